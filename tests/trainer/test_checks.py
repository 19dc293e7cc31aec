import math
from typing import get_args

import pytest

from generator.link import KvCache, PushMode
from tests.trainer.configs import tiny_config
from trainer import learner_setup
from trainer.advantages import ADVANTAGES
from trainer.aggregation import AGGREGATIONS
from trainer.batching import Packing
from trainer.checks import VALUES, ConfigError, all_keys, check, get
from trainer.config import Config
from trainer.corrections import CORRECTIONS
from trainer.help import config_groups, field_comments, rows
from trainer.objectives import OBJECTIVES, PROXIMAL_POLICIES
from weight_sync.verification import VerifyWord


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer.learning_rate": math.nan}, ["optimizer.learning_rate=nan", "finite"]),
        ({"weight_sync.timeout": math.inf}, ["weight_sync.timeout=inf", "finite"]),
        ({"steps": 0}, ["`steps=0`", "at least 1"]),
        ({"algorithm.objective": "ppo_clp"}, ["did you mean `ppo_clip`"]),
        ({"algorithm.correction": "none"}, ["importance ratio", "allow_uncorrected"]),
        ({"algorithm.proximal": "behaviour"}, ["twice"]),
        ({"sampling.temperature": 0.0}, ["greedy"]),
        ({"sampling.top_p": 0.9}, ["sampling.top_p"]),
        ({"sampling.stop": [""]}, ["sampling.stop", "at least one character"]),
        ({"sampling.presence_penalty": 0.5}, ["weight_sync.mode=keep", "`wait`"]),
        ({"sampling.frequency_penalty": 0.5}, ["weight_sync.mode=keep", "`wait`"]),
        ({"sampling.presence_penalty": 3.0, "weight_sync.mode": "keep"}, ["between -2 and 2"]),
        ({"sampling.repetition_penalty": 0.0}, ["greater than 0"]),
        (
            {
                "sampling.repetition_penalty": 1.1,
                "algorithm.correction": "none",
                "algorithm.allow_uncorrected": True,
            },
            ["`sampling.repetition_penalty`", "algorithm.correction=token_truncate"],
        ),
        ({"sampling.group_size": 1}, ["group_size=1"]),
        ({"engine.max_model_len": 8}, ["no room for a prompt"]),
        ({"learner.ranks": 1000}, ["learner.ranks=1000"]),
        ({"weight_sync.backend": "nccl"}, ["needs GPUs"]),
        ({"weight_sync.verify": "evry"}, ["none, first, every, or a whole number", "did you mean `every`"]),
        ({"weight_sync.verify": 2.5}, ["weight_sync.verify=2.5", "a whole number"]),
        ({"weight_sync.verify": True}, ["weight_sync.verify=True", "a whole number"]),
        ({"weight_sync.verify": 0}, ["weight_sync.verify=0", "at least 1"]),
        ({"weight_sync.backend": "gloo", "hardware": "gpu"}, ["hardware=gpu", "weight_sync.backend=nccl"]),
        ({"weight_sync.backend": "gloo", "hardware": "cluster"}, ["hardware=cluster", "weight_sync.backend=nccl"]),
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


def test_uncorrected_training_is_possible_when_asked_for_by_name():
    check(tiny_config({"algorithm.correction": "none", "algorithm.allow_uncorrected": True}))


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_penalties_on_the_response_alone_are_possible_where_no_rollout_is_submitted_twice(mode):
    penalties = {"sampling.presence_penalty": 0.5, "sampling.frequency_penalty": -0.5}
    check(tiny_config({"weight_sync.mode": mode, **penalties}))


def test_every_checked_key_exists_and_its_default_is_allowed():
    keys = all_keys()
    for key, allowed in VALUES.items():
        assert key in keys
        assert get(Config(), key) in allowed


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("hardware", config_groups()["hardware"]),
        ("model.dtype", ["auto", *learner_setup.DTYPES]),
        ("algorithm.advantage", ADVANTAGES),
        ("algorithm.objective", OBJECTIVES),
        ("algorithm.proximal", PROXIMAL_POLICIES),
        ("algorithm.correction", CORRECTIONS),
        ("algorithm.aggregation", AGGREGATIONS),
        ("learner.packing", get_args(Packing)),
        ("weight_sync.mode", get_args(PushMode)),
        ("weight_sync.kv_cache", get_args(KvCache)),
        ("weight_sync.verify", get_args(VerifyWord)),
    ],
)
def test_the_words_that_a_key_may_take_are_those_that_the_code_behind_it_knows(key, words):
    assert sorted(VALUES[key]) == sorted(words)


def test_the_words_that_a_key_may_take_are_all_named_in_its_meaning():
    meanings = {key: meaning for key, _, meaning in rows(Config, "", field_comments())}
    for key, words in VALUES.items():
        assert [word for word in words if word not in meanings[key]] == [], key
