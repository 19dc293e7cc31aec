"""What people are told about the configuration, from the code: `--help`, and the rows of the reference page."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from importlib import resources
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainer import config
from trainer.allowed import VALUES

USAGE = """\
Midflight trains language models with reinforcement learning, fully asynchronously.

    python -m trainer recipe=NAME [key=value ...]

Exit codes: 0 done, 1 failed, 2 configuration error, 130 interrupted after writing a checkpoint.
"""

MORE = """\
All keys: docs/reference/configuration.md. What a command line comes to: add `--cfg job`. Several runs, one after
another: `--multirun seed=0,1,2`. A checkpoint or a model on held-out data: `python -m trainer.evaluate --help`.
Tab completion: `eval "$(python -m trainer --shell-completion install=bash)"`.
"""

COMMON_KEYS = (
    "model.path", "data.path", "reward", "seed", "steps", "run_dir", "resume", "batch.prompts", "sampling.group_size",
    "sampling.max_tokens", "sampling.temperature", "staleness.max_versions", "optimizer.learning_rate",
    "learner.ranks", "learner.micro_batch_tokens", "engine.count", "engine.tensor_parallel",
    "weight_sync.mode", "checkpoint.every", "logger.wandb.mode",
)  # fmt: skip
"""The twenty keys that people change most, in the order in which they meet them."""


def help_page() -> str:
    """The answer to ``--help``: usage, groups with their options, the common keys with defaults and meanings."""
    table = {key: (default, meaning) for key, default, meaning in rows(config.Config, "", field_comments())}
    width = max(map(len, COMMON_KEYS))
    groups = [f"  {name:<{width}}  {', '.join(options)}" for name, options in config_groups().items()]
    keys = [f"  {key:<{width}}  {table[key][1]} [{table[key][0].strip('`')}]" for key in COMMON_KEYS]
    return "\n".join(
        [USAGE, "Groups, chosen with GROUP=OPTION:", *groups, "", "Common keys [default]:", *keys, "", MORE]
    )


def config_groups() -> dict[str, list[str]]:
    """The options of every group that people choose from."""
    found = {}
    for folder in sorted(resources.files("configs").iterdir(), key=lambda item: item.name):
        if folder.is_dir() and folder.name != "recipe_on" and not folder.name.startswith("__"):
            found[folder.name] = sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml"))
    return found


def group_defaults() -> dict[str, str]:
    """The option of each group that is taken where none is chosen; groups without one are left out."""
    listed = yaml.safe_load((resources.files("configs") / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = {group: option for item in listed if isinstance(item, dict) for group, option in item.items()}
    return {group: chosen[group] for group in config_groups() if chosen.get(group, "???") != "???"}


def field_comments() -> dict[tuple[str, str], str]:
    """The comment behind each field of each dataclass in ``trainer/config.py``, by (class, field)."""
    source = inspect.getsource(config)
    lines = source.splitlines()
    comments = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    comments[node.name, item.target.id] = lines[item.lineno - 1].partition("#")[2].strip()
    return comments


def rows(schema: type, prefix: str, comments: dict[tuple[str, str], str]) -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every leaf below ``schema``, depth first."""
    result = []
    for item in dataclasses.fields(schema):
        key = prefix + item.name
        factory: Any = item.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            result += rows(factory, key + ".", comments)
            continue
        value: Any = item.default if factory is dataclasses.MISSING else factory()
        meaning = comments[schema.__name__, item.name] or ", ".join(VALUES.get(key, ()))
        result.append((key, "set by the recipe" if value == "???" else f"`{value}`", meaning))
    return result
