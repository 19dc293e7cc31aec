"""From command-line overrides to a checked configuration, with errors that help.

Hydra's own messages name the key and nothing else (O7). Here each becomes one paragraph with the nearest valid key or
value.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.checks import UNSUPPORTED, ConfigError, all_keys, check
from trainer.config import Config
from trainer.help import config_groups
from trainer.nearest import nearest

CONFIG_MODULE = "configs"
GROUPS = ("recipe", "model", "algorithm", "hardware")

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


VALUE_FLAGS = {"--cfg", "-c", "--package", "-p", "--info", "-i", "--config-dir", "-cd", "--shell-completion", "-sc"}
"""Flags of Hydra that are followed by a value; the configuration itself, ``--config-name``, is not to be changed."""
FLAGS = VALUE_FLAGS | {"--resolve", "--multirun", "-m", "--run", "-r", "--hydra-help", "--version"}


def check_flags(flags: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for a word that is neither an override nor a flag that this command has."""
    for before, word in zip(["", *flags], flags, strict=False):
        if word not in FLAGS and before not in VALUE_FLAGS:
            if word.startswith("-"):
                raise ConfigError(f"there is no flag `{word}`{nearest(word, [*FLAGS, '--help'])}")
            raise ConfigError(f"`{word}` is no override: write `{word}=VALUE`")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides, and everything else: flags of Hydra and their values."""
    overrides = [word for word in arguments if word.startswith("~") or ("=" in word and not word.startswith("-"))]
    return overrides, [word for word in arguments if word not in overrides]


def detect_hardware() -> str:
    """``gpu`` where ``nvidia-smi`` runs and lists a GPU, else ``cpu``."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return "cpu"
    return "gpu" if "GPU" in listing.stdout else "cpu"


def compose_config(overrides: Sequence[str]) -> Config:
    """Compose and check. Raises :class:`ConfigError` with a message for people."""
    check_keys(overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
            return typed(composed)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(explain(error)) from error
    finally:
        GlobalHydra.instance().clear()


def jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of jobs in which every value of every sweep occurs; of the one job where nothing is swept."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise ConfigError(explain(error)) from error
    choices = [
        list(override.sweep_string_iterator()) if override.is_sweep_override() else [None] for override in parsed
    ]
    for job in range(max(map(len, choices), default=1)):
        yield [
            text if values[0] is None else f"{override.get_key_element()}={values[job % len(values)]}"
            for text, override, values in zip(overrides, parsed, choices, strict=True)
        ]


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
            raise ConfigError(_unknown_key(key))


def typed(composed: DictConfig) -> Config:
    """A composed Hydra configuration as the checked dataclass tree. Raises :class:`ConfigError`."""
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"`{missing[0]}` has no value: the recipe or the command line must set it")
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), composed))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, Config)
    check(config)
    return config


def explain(error: Exception) -> str:
    """One paragraph for people from an error of Hydra or OmegaConf."""
    if isinstance(error, OverrideParseException):
        return f"`{error.override}` cannot be read as an override: {' '.join(str(error).split())}"
    text = "\n".join(str(part) for part in (error, error.__cause__) if part is not None)
    full_key = re.search(r"full_key: ([\w.]+)", text)
    where = f"`{full_key[1]}`: " if full_key else ""
    if match := re.search(r"Could not find '([\w/]+)'(?:.*?Available options in '[\w/]+':\s*(.*))?", text, re.DOTALL):
        return _unknown_option(match[1], (match[2] or "").partition("Config search path")[0].split())
    if match := re.search(r"(?:Key '([^']+)' (?:is )?not in (?:struct|'\w+')|Could not override '([^']+)')", text):
        key = match[2] or (full_key[1] if full_key else match[1])
        return _unknown_key(key)
    if match := re.search(r"Value (.+?) of type '\w+' could not be converted to (\w+)", text, re.DOTALL):
        return f"{where}the value {match[1]} is not a valid {match[2].lower()}"
    if match := re.search(r"is not a subclass of \w+Config.*?full_key: ([\w.]+)", text, re.DOTALL):
        one = next(key for key in all_keys() if key.startswith(f"{match[1]}."))
        return f"`{match[1]}` holds several keys and takes no value itself; set one of them, such as `{one}`"
    if match := re.search(r"field '[^']+' is not Optional\s+full_key: ([\w.]+)", text):
        return f"`{match[1]}=null`: the key needs a value"
    if match := re.search(r"You must specify '(\w+)'.*?(?:Available options:\s*(.*))?$", text, re.DOTALL):
        options = ", ".join((match[2] or "").split())
        return f"no {match[1]} was chosen: add `{match[1]}=NAME`" + (f", one of {options}" if options else "")
    # What OmegaConf says in its first line, without its own types and the override that it was merging.
    said = [line.strip() for line in text.splitlines() if not re.match(r"\s*(Error merging|\w+: |$)", line)]
    return where + (said[0] if said else " ".join(text.split()))


def _unknown_key(key: str) -> str:
    if key in UNSUPPORTED:
        return f"`{key}` is not supported: {UNSUPPORTED[key]}"
    return f"`{key}` is not a key of the configuration{nearest(key, [*all_keys(), *GROUPS])}"


def _unknown_option(option: str, available: list[str]) -> str:
    group, _, name = option.rpartition("/")
    hint = nearest(name, available)
    return f"`{group}={name}`: there is no such {group}; there is {', '.join(available)}{hint}"
