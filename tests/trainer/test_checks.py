import inspect
import math
from typing import get_args

import pytest

from generator.link import KvCache, PushMode
from tests.trainer.configs import tiny_config
from trainer import learner_setup
from trainer.algorithm import combinations
from trainer.algorithm.advantages import ADVANTAGES
from trainer.algorithm.aggregation import AGGREGATIONS, COUNTED
from trainer.algorithm.objectives import DIVERGENCES, OBJECTIVES
from trainer.algorithm.proximal import PROXIMAL_POLICIES
from trainer.algorithm.ratios import LEVELS
from trainer.algorithm.regularisers import KL_ESTIMATORS
from trainer.allowed import AT_LEAST, AT_MOST, BELOW, EXTENSIBLE, POSITIVE, VALUES
from trainer.batching import Packing
from trainer.checks import ConfigError, all_keys, check, get
from trainer.config import Config
from trainer.help import config_groups, field_comments, rows
from weight_sync.lora import LoraPart
from weight_sync.verification import VerifyWord

GSPO = {"algorithm.objective": "gspo", "algorithm.proximal": "behaviour", "algorithm.correction.weight": "none"}
ADAPTER = {"learner.lora.rank": 16, "learner.lora.targets": ["q_proj", "v_proj"], "weight_sync.lora": "adapter"}
REINFORCE = {"algorithm.objective": "reinforce"}
STREAMING = {"batch.streaming": True}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer.learning_rate": math.nan}, ["optimizer.learning_rate=nan", "finite"]),
        ({"weight_sync.timeout": math.inf}, ["weight_sync.timeout=inf", "finite"]),
        ({"steps": 0}, ["`steps=0`", "at least 1"]),
        ({"algorithm.objective": "ppo_clp"}, ["did you mean `ppo_clip`"]),
        ({"algorithm.correction.weight": "none"}, ["importance ratio", "allow_uncorrected"]),
        (REINFORCE | {"algorithm.correction.weight": "none"}, ["importance ratio", "allow_uncorrected"]),
        ({"algorithm.proximal": "behaviour"}, ["twice"]),
        (GSPO | {"algorithm.correction.mask": "token"}, ["mask_high"]),
        (
            GSPO | {"algorithm.correction.mask": "token", "algorithm.correction.mask_high": 2.0},
            ["correction.mask=token", "twice"],
        ),
        ({"algorithm.objective": "gspo"}, ["no effect", "algorithm.proximal=behaviour"]),
        (REINFORCE | {"algorithm.proximal": "log_linear"}, ["one of them is missing"]),
        ({"algorithm.clip_low": 1.0}, ["algorithm.clip_low=1", "null"]),
        ({"algorithm.clip_high": -0.1}, ["algorithm.clip_high=-0.1", "at least 0"]),
        ({"algorithm.clip_dual": 0.5}, ["algorithm.clip_dual", "above 1"]),
        (GSPO | {"algorithm.objective": "cispo", "algorithm.clip_dual": 3.0}, ["no effect", "ppo_clip and gspo"]),
        ({"algorithm.correction.weight_high": math.inf}, ["weight_high=inf", "finite"]),
        ({"algorithm.correction.weight_high": 0.5}, ["weight_high=0.5", "ratio 1 between"]),
        ({"algorithm.filter.overlong_buffer": 999}, ["overlong_buffer=999"]),
        ({"learner.epochs": 2}, ["algorithm.proximal=current", "no trust region", "recomputed"]),
        ({"learner.minibatches": 2}, ["algorithm.proximal=current", "no trust region", "recomputed"]),
        ({"evaluation.temperature": 0, "evaluation.rollouts": 4}, ["evaluation.temperature=0", "evaluation.rollouts"]),
        (
            {"engine.max_model_len": 600, "evaluation.max_tokens": 600},
            ["engine.max_model_len", "evaluation.max_tokens"],
        ),
        (GSPO | {"algorithm.proximal": "recomputed"}, ["no effect", "one update a batch"]),
        ({"algorithm.kl.coefficient": 0.1, "algorithm.kl.estimator": "k1"}, ["mean zero", "estimator=k2"]),
        ({"learner.minibatches": 1000, "algorithm.proximal": "recomputed"}, ["batch.prompts", "learner.epochs"]),
        (
            STREAMING | {"algorithm.advantage": "reinforce_pp"},
            ["batch.streaming=true", "advantage=reinforce_pp"],
        ),
        (STREAMING | {"algorithm.advantage": "math.exp"}, ["batch.streaming=true", "algorithm.advantage=math.exp"]),
        (STREAMING | {"learner.epochs": 2, "algorithm.proximal": "recomputed"}, ["batch.streaming=true", "several"]),
        (STREAMING | {"algorithm.correction.second_moment": 0.1}, ["batch.streaming=true", "second_moment"]),
        (
            STREAMING | {"algorithm.aggregation": "tests.trainer.algorithm.test_loss.sum_of_losses"},
            ["batch.streaming=true", "sum_of_losses"],
        ),
        ({"learner.offload": True}, ["learner.zero_stage"]),
        ({"learner.offload": True, "learner.zero_stage": 2}, ["hardware=cpu", "saves nothing"]),
        (
            {"checkpoint.best": "eval/reward_men"},
            ["checkpoint.best=eval/reward_men", "did you mean `eval/reward_mean`"],
        ),
        (
            {"weight_sync.backend": "ipc", "hardware": "gpu", "evaluation.engine": "dedicated"},
            ["evaluation.engine=dedicated", "weight_sync.backend=nccl"],
        ),
        ({"checkpoint.best": "eval/pass@1"}, ["checkpoint.best=eval/pass@1", "evaluation.every"]),
        (
            {"checkpoint.best": "eval/pass@4", "evaluation.every": 5, "evaluation.rollouts": 3},
            ["checkpoint.best=eval/pass@4", "evaluation.rollouts=3"],
        ),
        ({"optimizer.schedule": "cosin"}, ["did you mean `cosine`"]),
        ({"algorithm.objective": "nowhere.at.all"}, ["algorithm.objective", "'nowhere'"]),
        ({"algorithm.objective": "math.exp"}, ["algorithm.objective=math.exp", "(batch, proximal,"]),
        ({"algorithm.advantage": "math.pi"}, ["algorithm.advantage=math.pi", "(statistics)"]),
        ({"sampling.temperature": 0.0}, ["greedy"]),
        ({"sampling.temperature": 0.005}, ["sampling.temperature=0.005", "engines sample at 0.01 to 2"]),
        ({"evaluation.temperature": 1e-6}, ["evaluation.temperature=1e-06", "or 0 for greedy"]),
        ({"sampling.top_p": 0.9}, ["sampling.top_p"]),
        ({"sampling.stop": [""]}, ["sampling.stop", "at least one character"]),
        ({"sampling.presence_penalty": 0.5}, ["weight_sync.mode=keep", "`wait`"]),
        ({"sampling.frequency_penalty": 0.5}, ["weight_sync.mode=keep", "`wait`"]),
        ({"sampling.presence_penalty": 3.0, "weight_sync.mode": "keep"}, ["between -2 and 2"]),
        ({"sampling.repetition_penalty": 0.0}, ["greater than 0"]),
        (
            {
                "sampling.repetition_penalty": 1.1,
                "algorithm.correction.weight": "none",
                "algorithm.allow_uncorrected": True,
            },
            ["`sampling.repetition_penalty`", "algorithm.correction.weight=token"],
        ),
        ({"sampling.group_size": 1}, ["group_size=1"]),
        (
            {"sampling.group_size": 1, "algorithm.advantage": "reinforce_pp", "algorithm.filter.refill": 2},
            ["algorithm.filter.refill=2", "takes out every group"],
        ),
        ({"engine.max_model_len": 8}, ["no room for a prompt"]),
        ({"learner.ranks": 1000}, ["learner.ranks=1000"]),
        (
            {"learner.ranks": 3, "learner.minibatches": 2, "batch.prompts": 2, "sampling.group_size": 2}
            | {"algorithm.proximal": "recomputed"},
            ["learner.minibatches=2", "leaves 2 rollouts", "learner.ranks=3"],
        ),
        ({"weight_sync.backend": "nccl"}, ["weight_sync.backend=nccl", "needs GPUs", "weight_sync.backend=gloo"]),
        ({"weight_sync.backend": "ipc"}, ["weight_sync.backend=ipc", "needs GPUs", "weight_sync.backend=gloo"]),
        ({"weight_sync.backend": "mpi"}, ["weight_sync.backend=mpi", "auto, gloo, nccl, ipc"]),
        (
            {"weight_sync.backend": "ipc", "hardware": "gpu", "engine.count": 2},
            ["engine.count=2", "share a GPU", "weight_sync.backend=nccl"],
        ),
        ({"weight_sync.backend": "ipc", "hardware": "gpu", "engine.tensor_parallel": 2}, ["engine.tensor_parallel=2"]),
        ({"weight_sync.backend": "ipc", "hardware": "gpu", "learner.ranks": 2}, ["learner.ranks=2"]),
        ({"weight_sync.verify": "evry"}, ["none, first, every, or a whole number", "did you mean `every`"]),
        ({"weight_sync.verify": 2.5}, ["weight_sync.verify=2.5", "a whole number"]),
        ({"weight_sync.verify": True}, ["weight_sync.verify=True", "a whole number"]),
        ({"weight_sync.verify": 0}, ["weight_sync.verify=0", "at least 1"]),
        ({"weight_sync.backend": "gloo", "hardware": "gpu"}, ["hardware=gpu", "weight_sync.backend=nccl"]),
        ({"weight_sync.backend": "gloo", "hardware": "cluster"}, ["hardware=cluster", "weight_sync.backend=nccl"]),
        ({"weight_sync.staging": True, "hardware": "gpu"}, ["`weight_sync.staging=true`", "hardware=cpu"]),
        ({"weight_sync.staging_device": "hots"}, ["device, host", "did you mean `host`"]),
        ({"weight_sync.lora": "adaptor"}, ["merged, adapter", "did you mean `adapter`"]),
        ({"weight_sync.lora": "adapter"}, ["weight_sync.lora=adapter", "learner.lora.rank"]),
        ({"learner.lora.targets": ["q_proj"]}, ["learner.lora.targets", "no effect", "learner.lora.rank"]),
        ({"learner.lora.rank": 4, "learner.lora.alpha": 0.0}, ["learner.lora.alpha=0", "greater than 0"]),
        (ADAPTER | {"learner.lora.targets": []}, ["weight_sync.lora=adapter", "learner.lora.targets", "q_proj"]),
        (
            ADAPTER | {"learner.lora.targets": ["v_proj", "self_attn.q_proj"]},
            ["learner.lora.targets", "'self_attn.q_proj'", "write q_proj", "weight_sync.lora=merged"],
        ),
        (ADAPTER | {"learner.lora.rank": 600}, ["learner.lora.rank=600", "512", "weight_sync.lora=merged"]),
        (
            ADAPTER | {"evaluation.every": 5, "evaluation.engine": "dedicated"},
            [
                "weight_sync.lora=adapter",
                "evaluation.engine=dedicated",
                "not supported yet",
                "evaluation.engine=shared",
            ],
        ),
        (ADAPTER | {"weight_sync.staging": True}, ["weight_sync.staging=true", "weight_sync.lora=adapter"]),
        (ADAPTER | {"weight_sync.delta": True}, ["weight_sync.delta=true", "weight_sync.lora=adapter"]),
        ({"weight_sync.dense_every": -1}, ["weight_sync.dense_every=-1", "at least 0"]),
    ],
)
def test_a_configuration_that_cannot_work_is_answered_in_one_paragraph_that_names_the_key(changes, words):
    with pytest.raises(ConfigError) as failure:
        check(tiny_config(changes))
    message = str(failure.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("verify", ["none", "first", "every", 1, 20])
def test_pushes_are_proven_by_a_word_or_by_a_number(verify):
    check(tiny_config({"weight_sync.verify": verify}))


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint.best": None},
        {"checkpoint.best": "reward/mean"},
        {"checkpoint.best": "eval/pass@4", "evaluation.every": 5, "evaluation.rollouts": 7},
    ],
    ids=str,
)
def test_the_best_checkpoint_is_told_by_any_metric_that_the_run_will_have(changes):
    check(tiny_config(changes))


def test_uncorrected_training_is_possible_when_asked_for_by_name():
    check(tiny_config({"algorithm.correction.weight": "none", "algorithm.allow_uncorrected": True}))


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.proximal": "recomputed", "learner.epochs": 2, "learner.minibatches": 2},
        {"algorithm.proximal": "log_linear", "learner.epochs": 2},
        {"algorithm.objective": "reinforce", "learner.epochs": 2},
        {"algorithm.objective": "cispo", "algorithm.proximal": "recomputed", "learner.epochs": 2},
        {"algorithm.kl.coefficient": 0.1},
        {"algorithm.kl.coefficient": 0.1, "algorithm.kl.estimator": "k1", "algorithm.kl.place": "reward"},
        {"learner.offload": True, "learner.zero_stage": 1, "hardware": "gpu"},
        ADAPTER,
        {"learner.lora.rank": 16, "weight_sync.staging": True, "weight_sync.delta": True},
    ],
    ids=str,
)
def test_what_the_learner_is_built_for_is_accepted(changes):
    check(tiny_config(changes))


@pytest.mark.parametrize("key", ["clip_low", "clip_high", "correction.weight_high"])
def test_a_bound_that_is_null_does_not_bind(key):
    check(tiny_config({f"algorithm.{key}": None}))


def test_one_rollout_a_prompt_is_enough_for_an_advantage_that_compares_with_the_batch():
    check(tiny_config({"sampling.group_size": 1, "algorithm.advantage": "reinforce_pp"}))


def test_a_learner_may_begin_before_the_batch_is_full_where_no_part_of_the_algorithm_looks_at_all_of_it():
    for advantage in combinations.PART_BY_PART:
        check(tiny_config(STREAMING | {"algorithm.advantage": advantage, "algorithm.kl.coefficient": 0.1}))
    check(tiny_config(STREAMING | {"algorithm.proximal": "recomputed", "algorithm.filter.zero_variance": True}))


def test_a_part_of_the_algorithm_may_be_the_users_own_function():
    check(tiny_config({"algorithm.aggregation": "tests.trainer.algorithm.test_loss.sum_of_losses"}))


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_penalties_on_the_response_alone_are_possible_where_no_rollout_is_submitted_twice(mode):
    penalties = {"sampling.presence_penalty": 0.5, "sampling.frequency_penalty": -0.5}
    check(tiny_config({"weight_sync.mode": mode, **penalties}))


def test_every_checked_key_exists_and_its_default_is_allowed():
    for key, words in VALUES.items():
        assert get(Config(), key) in words
    assert {*EXTENSIBLE, *AT_LEAST, *POSITIVE, *BELOW, *AT_MOST} <= set(all_keys())


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("hardware", {name.partition("_")[0] for name in config_groups()["hardware"]}),
        ("model.dtype", ["auto", *learner_setup.DTYPES]),
        ("algorithm.advantage", ADVANTAGES),
        ("algorithm.objective", OBJECTIVES),
        ("algorithm.proximal", PROXIMAL_POLICIES),
        ("algorithm.correction.weight", LEVELS),
        ("algorithm.correction.mask", LEVELS),
        ("algorithm.aggregation", AGGREGATIONS),
        ("algorithm.divergence", DIVERGENCES),
        ("algorithm.kl.estimator", KL_ESTIMATORS),
        ("learner.packing", get_args(Packing)),
        ("weight_sync.mode", get_args(PushMode)),
        ("weight_sync.kv_cache", get_args(KvCache)),
        ("weight_sync.lora", set(get_args(LoraPart)) - {"base"}),
        ("weight_sync.verify", get_args(VerifyWord)),
    ],
)
def test_the_words_that_a_key_may_take_are_those_that_the_code_behind_it_knows(key, words):
    assert sorted(VALUES[key]) == sorted(words)


def test_the_parts_that_combinations_are_checked_for_are_ones_that_exist():
    assert set(combinations.GROUP_RELATIVE) < set(ADVANTAGES)
    assert set(combinations.NEEDS_RATIO) < set(OBJECTIVES)
    assert set(combinations.READS_CLIP_DUAL) < set(OBJECTIVES)
    assert set(combinations.PART_BY_PART) < set(ADVANTAGES)
    assert set(COUNTED) == set(AGGREGATIONS)


def test_a_function_of_the_users_is_called_with_what_the_built_in_ones_are_called_with():
    registries = (ADVANTAGES, OBJECTIVES, LEVELS, LEVELS, AGGREGATIONS)
    for (key, arguments), registry in zip(EXTENSIBLE.items(), registries, strict=True):
        for choice in registry.values():
            assert len(inspect.signature(choice.function).parameters) == len(arguments), key


def test_the_words_that_a_key_may_take_are_all_named_in_its_meaning():
    meanings = {key: meaning for key, _, meaning in rows(Config, "", field_comments())}
    for key, words in VALUES.items():
        assert [word for word in words if word not in meanings[key]] == [], key
