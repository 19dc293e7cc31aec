"""From the command line to checked configurations, with errors that help: see :mod:`trainer.explain`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from trainer.checks import ConfigError, all_keys, check
from trainer.config import Config
from trainer.explain import GROUPS, explain, unknown_key
from trainer.help import config_groups
from trainer.nearest import nearest
from trainer.wording import PATH, clipped

CONFIG_MODULE = "configs"

GROUP_VALUE = re.compile(r"[A-Za-z_][\w./-]*(,[A-Za-z_][\w./-]*)*")
"""The name of an option of a group, or several in a sweep."""

ConfigStore.instance().store(name="schema", node=Config)


def prepared(arguments: Sequence[str]) -> list[str]:
    """The command line as Hydra gets it: overrides first, then Hydra's flags, since its parser takes no mixture.

    ``hardware=auto``, said or unsaid, becomes what this machine has. A key of ``data.options``, which only the recipe
    knows, may be set without the ``++`` that Hydra wants for a key that is not in the schema.
    """
    overrides, flags = split(arguments)
    if {"--hydra-help", "--version"} & set(flags):
        return flags  # Hydra would apply overrides to a configuration of its own
    overrides = [argument for argument in overrides if argument != "hardware=auto"]
    overrides = [f"++{argument}" if argument.startswith("data.options.") else argument for argument in overrides]
    if not any(argument.startswith("hardware=") for argument in overrides):
        overrides.append(f"hardware={detect_hardware()}")
    return [*overrides, *flags]


DEEPEST = 100
"""Brackets in brackets of a value."""
MOST_JOBS = 10_000
"""Of a sweep. What asks for more is a slip, and would be listed for minutes before the first one starts."""
MOST_CHECKED = 50
"""Jobs of a sweep that are composed before the first one starts, which takes a moment each; all are checked again."""

VALUE_FLAGS = {"--cfg", "-c", "--package", "-p", "--info", "-i", "--config-dir", "-cd", "--shell-completion", "-sc"}
"""Flags of Hydra that are followed by a value; the configuration itself, ``--config-name``, is not to be changed."""
FLAGS = VALUE_FLAGS | {"--resolve", "--multirun", "-m", "--run", "-r", "--hydra-help", "--version"}


PURPOSES = {"--cfg": "--cfg", "-c": "--cfg", "--info": "--info", "-i": "--info", "--multirun": "--multirun",
            "-m": "--multirun", "--run": "--run", "-r": "--run"}  # fmt: skip
"""The flags that say what is to be done, of which there can be one."""


def command_configs(arguments: Sequence[str]) -> list[Config]:
    """The configurations that a command line, as :func:`prepared` returns it, asks for: of its one run, or of the first
    jobs of its sweep. Raises :class:`ConfigError` for whatever is wrong with it.
    """
    overrides, flags = split(arguments)
    check_flags(flags)
    check_keys(overrides)
    if {"--hydra-help", "--version"} & set(flags):
        return []
    sweeps = bool({"--multirun", "-m"} & set(flags)) or "hydra.mode=MULTIRUN" in (one.lstrip("+") for one in overrides)
    folder = config_folder(flags)
    return [compose_config(job, folder) for job in islice(jobs(overrides, sweeps), MOST_CHECKED)]


def check_flags(flags: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for a word that is neither an override nor a flag that this command has."""
    for before, word in zip(["", *flags], flags, strict=False):
        if word not in FLAGS and before not in VALUE_FLAGS:
            if word.startswith("-"):
                raise ConfigError(f"there is no flag `{word}`{nearest(word, [*FLAGS, '--help'])}")
            raise ConfigError(f"`{word}` is no override: write `{word}=VALUE`")
    purposes = sorted({PURPOSES[word] for word in flags if word in PURPOSES})
    if len(purposes) > 1:
        raise ConfigError(f"{' and '.join(f'`{flag}`' for flag in purposes)} do not go together; take one of them")
    if "--resolve" in flags and "--cfg" not in purposes:
        raise ConfigError("`--resolve` goes with `--cfg job`, which prints the configuration")


def config_folder(flags: Sequence[str]) -> str | None:
    """The folder of ``--config-dir``, if there is one. Raises :class:`ConfigError` where it does not exist."""
    for flag, value in pairwise(flags):
        if flag in ("--config-dir", "-cd"):
            if not os.path.isdir(value):  # also false for what cannot be looked up
                raise ConfigError(f"`--config-dir {clipped(value, PATH)}`: there is no such folder in {Path.cwd()}")
            return value
    return None


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides, and everything else: flags of Hydra and their values."""
    overrides = [word for word in arguments if word.startswith("~") or ("=" in word and not word.startswith("-"))]
    flags = [word for word in arguments if word not in overrides]
    # `--config-dir=DIR` is `--config-dir DIR`.
    return overrides, [part for word in flags for part in (word.split("=", 1) if word.startswith("--") else [word])]


def detect_hardware() -> str:
    """``gpu`` where ``nvidia-smi`` runs and lists a GPU, else ``cpu``."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return "cpu"
    return "gpu" if "GPU" in listing.stdout else "cpu"


def compose_config(overrides: Sequence[str], folder: str | None = None) -> Config:
    """Compose and check. ``folder`` has groups beside those of ``configs/``, as ``--config-dir`` gives one.

    Raises :class:`ConfigError` with a message for people.
    """
    check_keys(overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            if folder is not None:
                _search_in(folder)
            config = _object(compose("config", overrides=list(overrides)))
    except ConfigError:
        raise
    except Exception as error:  # Hydra, OmegaConf and the YAML parser raise errors of a dozen kinds
        raise ConfigError(explain(error, overrides, folder)) from error
    finally:
        GlobalHydra.instance().clear()
    check(config)
    return config


def _search_in(folder: str) -> None:
    """Let Hydra search a folder where it would search that of ``--config-dir``."""
    loader = GlobalHydra.instance().config_loader()
    path = loader.get_search_path()
    path.prepend(provider="command-line", path=f"file://{Path(folder).absolute()}", anchor=SearchPathQuery("schema"))
    loader.repository.initialize_sources(path)  # type: ignore[attr-defined]  # of its only implementation


def jobs(overrides: Sequence[str], sweeps: bool = True) -> Iterator[list[str]]:
    """The overrides of jobs in which every value of every sweep occurs; of the one job where nothing is swept.

    Raises :class:`ConfigError` for what cannot be read, and for several values where there is no sweep.
    """
    choices = [_choices(override, sweeps) for override in map(parse, overrides)]
    for job in range(max((len(values) for _, values in choices if values), default=1)):
        yield [
            text if not values else f"{key}={values[job % len(values)]}"
            for text, (key, values) in zip(overrides, choices, strict=True)
        ]


def parse(override: str) -> Override:
    """One override, read. Raises :class:`ConfigError`."""
    if _depth(override) > DEEPEST:  # Hydra's parser takes seconds to give up
        raise ConfigError(f"`{clipped(override)}`: the value is nested too deeply")
    try:
        return OverridesParser.create().parse_overrides([override])[0]
    except RecursionError as error:
        raise ConfigError(f"`{clipped(override)}`: the value is nested too deeply") from error
    except OverrideParseException as error:
        raise ConfigError(explain(error)) from error
    except Exception as error:  # a number with too many digits is a ValueError
        raise ConfigError(f"`{clipped(override)}` cannot be read as an override: {error}") from error


def _depth(text: str) -> int:
    """How deeply brackets stand in brackets, quoted ones counted too."""
    steps = ((character in "[{(") - (character in "]})") for character in text)
    return max(accumulate(steps), default=0)


def _choices(override: Override, sweeps: bool) -> tuple[str, list[str]]:
    """The key, and the values that it is to have one after another; none where it has a single one."""
    key, text = override.get_key_element(), f"`{clipped(override.input_line or '')}`"
    if not override.is_sweep_override():
        return key, []
    if not sweeps:
        raise ConfigError(
            f"{text} names several values: add `--multirun` for a run with each, or write a list as `{key}=[...]`, or "
            "quote a text that holds a comma"
        )
    if override.is_hydra_override():
        raise ConfigError(f"{text}: settings of Hydra cannot be swept")
    try:
        values = list(islice(override.sweep_string_iterator(), MOST_JOBS + 1))
    except Exception as error:
        raise ConfigError(f"{text}: the values of the sweep cannot be listed: {error}") from error
    if not 0 < len(values) <= MOST_JOBS:
        raise ConfigError(f"{text}: a sweep has at least one value, and at most {MOST_JOBS:,}")
    return key, values


def check_keys(overrides: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for the first override whose key neither the schema nor a group has.

    Done before Hydra composes, because Hydra adds an unknown key silently when it is written ``+key=value``, and
    complains about a missing recipe when ``recipe`` itself is mistyped.
    """
    known = [*all_keys(), *GROUPS]
    for override in overrides:
        name, _, value = override.partition("=")
        key = name.lstrip("+~").split("@", 1)[0]
        if not key:
            raise ConfigError(f"`{override}` has no key before the `=`")
        if key in GROUPS and "=" in override and (value == "null" or not GROUP_VALUE.fullmatch(value)):
            raise ConfigError(f"`{override}`: the value must be one of {', '.join(config_groups()[key])}")
        if key not in known and not key.startswith(("hydra.", "hydra/", "data.options.")):
            raise ConfigError(unknown_key(key))


def typed(composed: DictConfig) -> Config:
    """A composed Hydra configuration as the checked dataclass tree. Raises :class:`ConfigError`."""
    try:
        config = _object(composed)
    except ConfigError:
        raise
    except Exception as error:  # an interpolation may raise anything
        raise ConfigError(explain(error)) from error
    check(config)
    return config


def _object(composed: DictConfig) -> Config:
    whole = OmegaConf.merge(OmegaConf.structured(Config), composed)
    if missing := sorted(OmegaConf.missing_keys(whole)):
        raise ConfigError(f"`{missing[0]}` has no value: the recipe or the command line must set it")
    config = OmegaConf.to_object(whole)
    assert isinstance(config, Config)
    return config
