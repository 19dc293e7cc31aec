import re
from collections.abc import Iterator
from importlib import resources

import pytest
import yaml

from trainer.checks import ConfigError, get
from trainer.compose import check_flags, compose_config, jobs, prepared, split
from trainer.config import Config
from trainer.help import config_groups

CONFIGS = resources.files("configs")


@pytest.mark.parametrize("recipe", config_groups()["recipe"])
@pytest.mark.parametrize("hardware", config_groups()["hardware"])
def test_every_recipe_composes_on_every_hardware(recipe, hardware):
    config = compose_config([f"recipe={recipe}", f"hardware={hardware}"])
    assert config.name == recipe
    assert config.hardware == hardware.partition("_")[0], "the name of a preset begins with what it is for"
    assert re.fullmatch(rf"outputs/{recipe}/[\d_-]+", config.run_dir), "interpolations are resolved"


def leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict) and prefix + name != "data.options":
            yield from leaves(value, f"{prefix}{name}.")
        elif name != "defaults":  # the options of other groups that a file chooses
            yield prefix + name, value


@pytest.mark.parametrize("group", ["recipe", "hardware", "model"])
def test_a_file_of_a_group_says_only_what_differs_from_the_defaults(group):
    for path in (CONFIGS / group).iterdir():
        tree = yaml.safe_load(path.read_text()) or {}
        tree = tree if "@package _global_" in path.read_text() else {group: tree}
        assert [key for key, value in leaves(tree) if get(Config(), key) == value] == [], path.name


@pytest.mark.parametrize("path", sorted((CONFIGS / "recipe_on").iterdir()), ids=lambda path: path.stem)
def test_a_recipe_s_file_for_one_hardware_says_only_what_differs_from_the_recipe(path):
    recipe, _, hardware = path.stem.rpartition("_")
    plain = compose_config([f"recipe={recipe}", "hardware=auto"])
    assert hardware in config_groups()["hardware"]
    tree = yaml.safe_load(path.read_text())
    included = [yaml.safe_load((path.parent / f"{name}.yaml").read_text()) for name in tree.pop("defaults", ())]
    set_before = {key for other in included for key, _ in leaves(other)}
    assert [key for key, value in leaves(tree) if key not in set_before and get(plain, key) == value] == []


@pytest.mark.parametrize("preset", config_groups()["algorithm"])
def test_a_preset_is_taken_whole_whatever_the_recipe_would_choose(preset):
    algorithm = compose_config(["recipe=ci_tiny", f"algorithm={preset}"]).algorithm
    said = list(leaves(yaml.safe_load((CONFIGS / "algorithm" / f"{preset}.yaml").read_text())))
    assert [(key, get(algorithm, key)) for key, _ in said] == said


@pytest.mark.parametrize("recipe", config_groups()["recipe"])
def test_a_recipe_learns_by_the_preset_that_it_was_tuned_with(recipe):
    algorithm = compose_config([f"recipe={recipe}"]).algorithm
    preset = "decoupled_ppo" if recipe == "gsm8k_decoupled" else "grpo_token_mean"
    assert algorithm == compose_config(["recipe=ci_tiny", f"algorithm={preset}"]).algorithm


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
        (["recipe=ci_tiny", "steps=many"], ["`steps`", "many", "integer"]),
        (["recipe=ci_tiny", "steps=0"], ["`steps=0`", "at least 1"]),
        (["recipe=ci_tiny", "optimizer=3"], ["`optimizer` holds several keys", "`optimizer.learning_rate`"]),
        (["recipe=ci_tiny", "weight_sync=keep"], ["`weight_sync` holds several keys", "`weight_sync.mode`"]),
        (["recipe=ci_tiny", "algorithm=gpro"], ["algorithm=gpro", "did you mean `grpo`"]),
        (["recipe=ci_tiny", "algorithm.correction=none"], ["several keys", "`algorithm.correction.weight`"]),
        (["recipe=ci_tiny", "algorithm.correction_cap=3"], ["`algorithm.correction_cap` is not a key"]),
        (["recipe=ci_tiny", "sampling.bad_words=[x]"], ["`sampling.bad_words` is not supported", "tokenizer"]),
        (["recipe=ci_tiny", "+sampling.structured_outputs=x"], ["grammar", "weight_sync.mode=abort"]),
        (["recipe=ci_tiny", "sampling.n=4"], ["sampling.group_size"]),
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


@pytest.mark.parametrize("arguments", [["recipe=ci_tiny"], ["recipe=ci_tiny", "hardware=auto"]])
def test_hardware_auto_becomes_what_the_machine_has(arguments):
    detected = [argument for argument in prepared(arguments) if argument.startswith("hardware=")]
    assert detected in (["hardware=cpu"], ["hardware=gpu"])


def test_flags_of_hydra_may_stand_anywhere_and_come_last():
    overrides, flags = split(prepared(["--cfg", "job", "recipe=ci_tiny", "~data"]))
    assert overrides[:2] == ["recipe=ci_tiny", "~data"]
    assert flags == ["--cfg", "job"]
    assert prepared(["recipe=ci_tiny", "--cfg", "job"])[-2:] == flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["steps"], "steps=VALUE"), (["-cn", "other"], "no flag `-cn`"), (["--multrun"], "did you mean `--multirun`")],
)
def test_a_word_that_is_neither_override_nor_flag_is_refused_by_name(flags, words):
    with pytest.raises(ConfigError, match=words):
        check_flags(flags)


def test_the_jobs_of_a_sweep_hold_every_value():
    found = list(jobs(["recipe=ci_tiny", "seed=0,1,2", "steps=range(3,5)", "sampling.stop=[a,b]"]))
    assert found == [
        ["recipe=ci_tiny", f"seed={seed}", f"steps={steps}", "sampling.stop=[a,b]"]
        for seed, steps in ((0, 3), (1, 4), (2, 3))
    ]


def test_no_override_goes_to_hydras_own_help():
    assert prepared(["recipe=ci_tiny", "--hydra-help"]) == ["--hydra-help"]


def test_a_key_of_the_recipe_alone_can_be_set_like_any_other():
    config = compose_config(prepared(["recipe=gsm8k_fully_async", "data.options.steps=2"]))
    assert config.data.options["steps"] == 2


def test_several_data_sets_are_a_list_on_the_command_line():
    mixture = "data.mixture=[{path: a.jsonl, weight: 3}, {name: hard, options: {steps: 2}}]"
    config = compose_config(prepared(["recipe=gsm8k_fully_async", mixture]))
    assert config.data.mixture == [{"path": "a.jsonl", "weight": 3}, {"name": "hard", "options": {"steps": 2}}]
    with pytest.raises(ConfigError, match="did you mean `weight`"):
        compose_config(prepared(["recipe=gsm8k_fully_async", "data.mixture=[{path: a.jsonl, wieght: 3}]"]))
