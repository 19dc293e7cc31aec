"""What ``python -m trainer.evaluate`` is pointed at: a run, one of its checkpoints or its export, or any model.

Of a run, its own configuration says how to evaluate: nothing of it has to be repeated.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from trainer.checkpoint_folder import STATE_FILE, checkpoints, step_of, torn, whole_checkpoints
from trainer.checks import ConfigError
from trainer.compose import check_keys, compose_config, detect_hardware, parse, prepared, typed
from trainer.config import Config
from trainer.explain import GROUPS, explain
from trainer.help import config_groups
from trainer.watch.read_folder import read_config

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, slots=True)
class Target:
    """What is evaluated, and how."""

    config: Config
    """Of the run with the overrides; for a model, the recipe's. ``model.path`` is the run's own for a checkpoint."""
    name: str
    """What it is, for people."""
    checkpoint: Path | None = None
    version: int = 0
    """Steps that the weights have behind them: those of the checkpoint. 0 for a model."""
    run_dir: Path | None = None
    """The run that it is of."""


def find_target(what: str, overrides: Sequence[str]) -> Target:
    """The target that ``what`` names: a run folder (its newest whole checkpoint), a checkpoint, a run's export, or
    whatever ``model.path`` may name.

    Raises :class:`ConfigError` that says what the path is missing, or which override cannot be.
    """
    path = Path(os.path.expanduser(what)).absolute()
    if os.path.isfile(path / STATE_FILE):  # also false for a name that is too long to be looked up
        return _checkpoint_target(path, overrides)
    if os.path.isfile(path / "config.json"):
        return _model_target(what, path, overrides)
    if os.path.isfile(path / CONFIG_FILE):
        if not (whole := whole_checkpoints(path)):
            raise ConfigError(f"the run in {path} has no whole checkpoint to evaluate")
        return _checkpoint_target(whole[-1], overrides)
    if path.is_dir() and path in checkpoints(path.parent.parent):
        return _checkpoint_target(path, overrides)  # which says what of it is missing
    return _model_target(what, path, overrides)


def _checkpoint_target(checkpoint: Path, overrides: Sequence[str]) -> Target:
    if wrong := torn(checkpoint):
        raise ConfigError(f"the checkpoint {checkpoint} is not whole: {wrong}")
    run_dir = checkpoint.parent.parent
    config = run_config(run_dir, overrides)
    try:
        version = step_of(checkpoint)
    except ValueError as error:
        raise ConfigError(f"{error}: a checkpoint's folder is step_<n>, in `checkpoints` of its run folder") from error
    return Target(config, f"checkpoint {checkpoint}", checkpoint, version, run_dir)


def _model_target(what: str, path: Path, overrides: Sequence[str]) -> Target:
    """A model: under the recipe of the command line; the export of a run under that run's configuration."""
    asked = any(override.startswith("recipe=") for override in overrides)
    if not asked and os.path.isfile(path.parent / CONFIG_FILE) and os.path.isdir(path):
        config = run_config(path.parent, overrides)
        config.model.path = str(path)
        return Target(config, f"model {path}", run_dir=path.parent)
    if not asked:
        raise ConfigError(
            f"`{what}` is no run folder and no checkpoint; to evaluate it as a model, say on which task: recipe=NAME"
        )
    config = compose_config(prepared(overrides))
    config.model.path = what
    return Target(config, f"model {what}")


def run_config(run_dir: Path, overrides: Sequence[str]) -> Config:
    """The configuration of a run, with overrides of keys. Raises :class:`ConfigError`."""
    try:
        written = read_config(run_dir / CONFIG_FILE)
    except (OSError, YAMLError, ValueError) as error:
        raise ConfigError(f"{run_dir / CONFIG_FILE} cannot be read: {explain(error)}") from error
    check_keys(overrides)
    try:
        for override in map(parse, overrides):
            _apply(written, override.key_or_group, override)
    except ConfigError:
        raise
    except Exception as error:  # of OmegaConf, and whatever a key below a value comes to
        raise ConfigError(f"{run_dir / CONFIG_FILE}: {explain(error)}") from error
    return typed(written)


def _apply(written: DictConfig, key: str, override: Any) -> None:
    if override.is_sweep_override() or override.is_delete():
        raise ConfigError(f"`{override.input_line}`: one value for each key, please; sweeps and deletions are for runs")
    if key == "hardware":
        name = detect_hardware() if override.value() == "auto" else str(override.value())
        if name not in (options := config_groups()["hardware"]):
            raise ConfigError(f"`{override.input_line}`: there is {', '.join(options)}")
        written.merge_with(OmegaConf.create((resources.files("configs") / "hardware" / f"{name}.yaml").read_text()))
    elif key in GROUPS:
        raise ConfigError(f"`{override.input_line}`: a run is evaluated with its own {key}; single keys can be changed")
    else:
        OmegaConf.update(written, key, override.value(), force_add=True)
