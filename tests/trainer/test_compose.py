import inspect
from importlib import resources

import pytest

from trainer.algorithm import combinations
from trainer.algorithm.advantages import ADVANTAGES
from trainer.algorithm.aggregation import AGGREGATIONS
from trainer.algorithm.objectives import DIVERGENCES, OBJECTIVES
from trainer.algorithm.proximal import PROXIMAL_POLICIES
from trainer.algorithm.ratios import LEVELS
from trainer.algorithm.regularisers import KL_ESTIMATORS
from trainer.checks import EXTENSIBLE, VALUES, ConfigError, all_keys, get
from trainer.compose import compose_config, prepared, split
from trainer.config import Config


@pytest.mark.parametrize("recipe", ["gsm8k_fully_async", "ci_tiny"])
@pytest.mark.parametrize("hardware", ["cpu", "gpu", "cluster"])
def test_every_recipe_composes_on_every_hardware(recipe, hardware):
    config = compose_config([f"recipe={recipe}", f"hardware={hardware}"])
    assert config.name == recipe
    assert config.hardware == hardware


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["recipe=NAME", "ci_tiny"]),
        (["recipe=ci_tinny"], ["recipe=ci_tinny", "did you mean `ci_tiny`"]),
        (["receipt=ci_tiny"], ["`receipt`", "did you mean `recipe`"]),
        (["recipe=ci_tiny", "stepss=3"], ["`stepss`", "did you mean `steps`"]),
        (["recipe=ci_tiny", "prompts=3"], ["`prompts`", "did you mean `batch.prompts`"]),
        (["recipe=ci_tiny", "sampling.max_token=3"], ["did you mean `sampling.max_tokens`"]),
        (["recipe=ci_tiny", "optimizer.lr=3"], ["did you mean `optimizer.learning_rate`"]),
        (["recipe=ci_tiny", "+x=3"], ["`x` is not a key"]),
        (["recipe=ci_tiny", "optimizer.learning_rate=nan"], ["optimizer.learning_rate=nan", "finite"]),
        (["recipe=ci_tiny", "weight_sync.timeout=inf"], ["weight_sync.timeout=inf", "finite"]),
        (["recipe=ci_tiny", "steps=many"], ["`steps`", "many", "integer"]),
        (["recipe=ci_tiny", "steps=0"], ["`steps=0`", "at least 1"]),
        (["recipe=ci_tiny", "optimizer=3"], ["optimizer", "OptimizerConfig"]),
        (["recipe=ci_tiny", "algorithm=gpro"], ["algorithm=gpro", "did you mean `grpo`"]),
        (["recipe=ci_tiny", "algorithm.objective=ppo_clp"], ["did you mean `ppo_clip`"]),
        (["recipe=ci_tiny", "algorithm.correction.weight=none"], ["importance ratio", "allow_uncorrected"]),
        (["recipe=ci_tiny", "algorithm.correction=none"], ["algorithm.correction", "CorrectionConfig"]),
        (["recipe=ci_tiny", "algorithm.correction.cap=3"], ["`algorithm.correction.cap` is not a key"]),
        (["recipe=ci_tiny", "algorithm.proximal=behaviour"], ["twice"]),
        (["recipe=ci_tiny", "algorithm=gspo", "algorithm.correction.mask=token"], ["mask_high"]),
        (
            ["recipe=ci_tiny", "algorithm=gspo", "algorithm.correction={mask:token,mask_high:2}"],
            ["correction.mask=token", "twice"],
        ),
        (["recipe=ci_tiny", "algorithm.objective=gspo"], ["no effect", "algorithm.proximal=behaviour"]),
        (["recipe=ci_tiny", "algorithm=reinforce_tis", "algorithm.proximal=log_linear"], ["one of them is missing"]),
        (
            ["recipe=ci_tiny", "algorithm.objective=reinforce", "algorithm.correction.weight=none"],
            ["importance ratio", "allow_uncorrected"],
        ),
        (["recipe=ci_tiny", "algorithm.clip_low=1"], ["algorithm.clip_low=1", "null"]),
        (["recipe=ci_tiny", "algorithm.clip_dual=0.5"], ["algorithm.clip_dual", "above 1"]),
        (["recipe=ci_tiny", "algorithm=cispo", "algorithm.clip_dual=3"], ["no effect", "ppo_clip and gspo"]),
        (["recipe=ci_tiny", "algorithm.correction.weight_high=0.5"], ["weight_high=0.5", "ratio 1 between"]),
        (["recipe=ci_tiny", "algorithm.filter.overlong_buffer=999"], ["overlong_buffer=999"]),
        (["recipe=ci_tiny", "algorithm.proximal=recomputed"], ["not built yet", "log_linear"]),
        (["recipe=ci_tiny", "algorithm.correction.second_moment=0.04"], ["not built yet", "second_moment"]),
        (["recipe=ci_tiny", "algorithm.kl.coefficient=0.1"], ["not built yet", "reference model"]),
        (["recipe=ci_tiny", "algorithm.objective=nowhere.at.all"], ["algorithm.objective", "'nowhere'"]),
        (["recipe=ci_tiny", "algorithm.objective=math.exp"], ["algorithm.objective=math.exp", "(batch, proximal,"]),
        (["recipe=ci_tiny", "algorithm.advantage=math.pi"], ["algorithm.advantage=math.pi", "(statistics)"]),
        (["recipe=ci_tiny", "sampling.temperature=0"], ["greedy"]),
        (["recipe=ci_tiny", "sampling.top_p=0.9"], ["sampling.top_p"]),
        (["recipe=ci_tiny", "sampling.stop=['']"], ["sampling.stop", "at least one character"]),
        (["recipe=ci_tiny", "sampling.presence_penalty=0.5"], ["weight_sync.mode=keep", "`wait`"]),
        (["recipe=ci_tiny", "sampling.frequency_penalty=0.5"], ["weight_sync.mode=keep", "`wait`"]),
        (["recipe=ci_tiny", "weight_sync.mode=keep", "sampling.presence_penalty=3"], ["between -2 and 2"]),
        (["recipe=ci_tiny", "sampling.repetition_penalty=0"], ["greater than 0"]),
        (
            [
                "recipe=ci_tiny",
                "sampling.repetition_penalty=1.1",
                "algorithm.correction.weight=none",
                "algorithm.allow_uncorrected=true",
            ],
            ["`sampling.repetition_penalty`", "algorithm.correction.weight=token"],
        ),
        (["recipe=ci_tiny", "sampling.bad_words=[x]"], ["`sampling.bad_words` is not supported", "tokenizer"]),
        (["recipe=ci_tiny", "+sampling.structured_outputs=x"], ["grammar", "weight_sync.mode=abort"]),
        (["recipe=ci_tiny", "sampling.n=4"], ["sampling.group_size"]),
        (["recipe=ci_tiny", "sampling.group_size=1"], ["group_size=1"]),
        (["recipe=ci_tiny", "engine.max_model_len=8"], ["no room for a prompt"]),
        (["recipe=ci_tiny", "learner.ranks=1000"], ["learner.ranks=1000"]),
        (["recipe=ci_tiny", "hardware=cpu", "weight_sync.backend=nccl"], ["needs GPUs"]),
        (["recipe=ci_tiny", "batch.prompts=[1,"], ["batch.prompts"]),
    ],
)
def test_a_broken_configuration_is_answered_in_one_paragraph_that_names_the_key(overrides, words):
    with pytest.raises(ConfigError) as failure:
        compose_config(overrides)
    message = str(failure.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_uncorrected_training_is_possible_when_asked_for_by_name():
    config = compose_config(["recipe=ci_tiny", "algorithm.correction.weight=none", "algorithm.allow_uncorrected=true"])
    assert config.algorithm.correction.weight == "none"


PRESETS = sorted(path.name[:-5] for path in (resources.files("configs") / "algorithm").iterdir())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes_or_says_what_of_it_is_not_built_yet(preset):
    overrides = ["recipe=ci_tiny", f"algorithm={preset}"]
    if preset in ("decoupled_ppo", "m2po"):
        with pytest.raises(ConfigError, match="not built yet"):
            compose_config(overrides)
    else:
        compose_config(overrides)


def test_one_rollout_a_prompt_is_enough_for_an_advantage_that_compares_with_the_batch():
    config = compose_config(["recipe=ci_tiny", "algorithm=reinforce_pp", "sampling.group_size=1"])
    assert config.sampling.group_size == 1


def test_a_part_of_the_algorithm_may_be_the_users_own_function():
    path = "tests.trainer.algorithm.test_loss.sum_of_losses"
    assert compose_config(["recipe=ci_tiny", f"algorithm.aggregation={path}"]).algorithm.aggregation == path


def test_the_names_that_are_allowed_are_those_that_the_algorithm_knows():
    known = {
        "advantage": ADVANTAGES,
        "objective": OBJECTIVES,
        "proximal": PROXIMAL_POLICIES,
        "correction.weight": LEVELS,
        "correction.mask": LEVELS,
        "aggregation": AGGREGATIONS,
        "divergence": DIVERGENCES,
        "kl.estimator": KL_ESTIMATORS,
    }
    for key, registry in known.items():
        assert set(VALUES[f"algorithm.{key}"]) == set(registry)
    assert set(combinations.GROUP_RELATIVE) < set(ADVANTAGES)
    assert set(combinations.NEEDS_RATIO) < set(OBJECTIVES)


def test_every_extensible_function_has_the_arguments_that_built_in_ones_have():
    registries = (ADVANTAGES, OBJECTIVES, LEVELS, LEVELS, AGGREGATIONS)
    for (key, arguments), registry in zip(EXTENSIBLE.items(), registries, strict=True):
        for choice in registry.values():
            assert len(inspect.signature(choice.function).parameters) == len(arguments), key


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_penalties_on_the_response_alone_are_possible_where_no_rollout_is_submitted_twice(mode):
    penalties = ["sampling.presence_penalty=0.5", "sampling.frequency_penalty=-0.5"]
    sampling = compose_config(["recipe=ci_tiny", f"weight_sync.mode={mode}", *penalties]).sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)


def test_every_checked_key_exists_and_its_default_is_allowed():
    keys = all_keys()
    for key, allowed in VALUES.items():
        assert key in keys
        assert get(Config(), key) in allowed


@pytest.mark.parametrize("arguments", [["recipe=ci_tiny"], ["recipe=ci_tiny", "hardware=auto"]])
def test_hardware_auto_becomes_what_the_machine_has(arguments):
    detected = [argument for argument in prepared(arguments) if argument.startswith("hardware=")]
    assert detected in (["hardware=cpu"], ["hardware=gpu"])


def test_flags_of_hydra_may_stand_anywhere_and_come_last():
    overrides, flags = split(prepared(["--cfg", "job", "recipe=ci_tiny", "~data"]))
    assert overrides[:2] == ["recipe=ci_tiny", "~data"]
    assert flags == ["--cfg", "job"]
    assert prepared(["recipe=ci_tiny", "--cfg", "job"])[-2:] == flags


def test_no_override_goes_to_hydras_own_help():
    assert prepared(["recipe=ci_tiny", "--hydra-help"]) == ["--hydra-help"]


def test_a_key_of_the_recipe_alone_can_be_set_like_any_other():
    config = compose_config(prepared(["recipe=gsm8k_fully_async", "data.options.steps=2"]))
    assert config.data.options["steps"] == 2
