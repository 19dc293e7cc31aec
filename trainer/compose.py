"""From command-line overrides to a checked configuration, with errors that help.

Hydra's own messages name the key and nothing else (O7). Here each becomes one paragraph with the nearest valid key or
value.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.checks import UNSUPPORTED, ConfigError, all_keys, check, nearest
from trainer.config import Config

CONFIG_MODULE = "configs"
GROUPS = ("recipe", "model", "algorithm", "hardware")

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
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    finally:
        GlobalHydra.instance().clear()


def check_keys(overrides: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for the first override whose key neither the schema nor a group has.

    Done before Hydra composes, because Hydra adds an unknown key silently when it is written ``+key=value``, and
    complains about a missing recipe when ``recipe`` itself is mistyped.
    """
    known = [*all_keys(), *GROUPS]
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~").split("@", 1)[0]
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
    if match := re.search(r"Could not find '([\w/]+)'(?:.*?Available options in '[\w/]+':\s*(.*))?", text, re.DOTALL):
        return _unknown_option(match[1], (match[2] or "").partition("Config search path")[0].split())
    if match := re.search(r"(?:Key '([^']+)' (?:is )?not in (?:struct|'\w+')|Could not override '([^']+)')", text):
        full_key = re.search(r"full_key: ([\w.]+)", text)
        key = match[2] or (full_key[1] if full_key else match[1])
        return _unknown_key(key)
    if match := re.search(r"Value (.+?) of type '\w+' could not be converted to (\w+)", text, re.DOTALL):
        full_key = re.search(r"full_key: ([\w.]+)", text)
        where = f"`{full_key[1]}`: " if full_key else ""
        return f"{where}the value {match[1]} is not a valid {match[2].lower()}"
    if match := re.search(r"is not a subclass of \w+Config.*?full_key: ([\w.]+)", text, re.DOTALL):
        one = next(key for key in all_keys() if key.startswith(f"{match[1]}."))
        return f"`{match[1]}` holds several keys and takes no value itself; set one of them, such as `{one}`"
    if match := re.search(r"You must specify '(\w+)'.*?(?:Available options:\s*(.*))?$", text, re.DOTALL):
        options = ", ".join((match[2] or "").split())
        return f"no {match[1]} was chosen: add `{match[1]}=NAME`" + (f", one of {options}" if options else "")
    return " ".join(text.split())


def _unknown_key(key: str) -> str:
    if key in UNSUPPORTED:
        return f"`{key}` is not supported: {UNSUPPORTED[key]}"
    return f"`{key}` is not a key of the configuration{nearest(key, [*all_keys(), *GROUPS])}"


def _unknown_option(option: str, available: list[str]) -> str:
    group, _, name = option.rpartition("/")
    hint = nearest(name, available)
    return f"`{group}={name}`: there is no such {group}; there is {', '.join(available)}{hint}"
