"""One paragraph for people from whatever Hydra, OmegaConf or the YAML parser raise while a configuration is composed.

Their own messages name a key and nothing else (O7), or a file, or neither. Here each names the key, the override or the
file that is wrong, and where there is one, the nearest valid key or value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import OverrideParseException
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]
from yaml.reader import ReaderError  # type: ignore[import-untyped]

from trainer.checks import UNSUPPORTED, all_keys, sections
from trainer.nearest import abbreviates, nearest
from trainer.wording import clipped, one_line

GROUPS = ("recipe", "model", "algorithm", "hardware")

NO_PACKAGE = (
    "a recipe's file begins with the line `# @package _global_`, and nothing stands before it, no byte order mark "
    "either; without it its keys stand below `recipe`"
)

LONGEST = 600
"""Characters of a message: what was given may be of any length."""


def explain(error: BaseException, overrides: Sequence[str] = (), folder: str | None = None) -> str:
    """One paragraph for people from an error of composing ``overrides``.

    ``folder`` is where further files of the configuration lie (``--config-dir``).
    """
    text = _explained(error, overrides, folder)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _explained(error: BaseException, overrides: Sequence[str], folder: str | None) -> str:
    if isinstance(error, OverrideParseException):
        return f"`{clipped(error.override)}` cannot be read as an override: {one_line(str(error))}"
    if isinstance(error, YAMLError):
        return _not_yaml(error)
    text = "\n".join(str(part) for part in (error, error.__cause__) if part is not None)
    if isinstance(error, UnicodeDecodeError):
        return f"{_undecodable(folder) or _culprit(text, overrides)}the file is not UTF-8 text: {error}"
    if isinstance(error, RecursionError):
        return f"{_culprit(text, overrides)}it is nested too deeply, or includes itself"
    if recognised := _recognised(text, overrides):
        return recognised
    said = _culprit(text, overrides) + _said(text)
    return said if said.startswith("recipe") else said + _in_file(text)


def _recognised(text: str, overrides: Sequence[str]) -> str | None:
    """What the errors that people meet most often come to."""
    full_key = re.search(r"full_key: ([\w.]+)", text)
    if match := re.search(r"Could not find '([\w/.-]+)'(?:.*?Available options in '[\w/]+':\s*(.*))?", text, re.DOTALL):
        available = (match[2] or "").partition("Config search path")[0].split()
        return _unknown_option(match[1], available) + _in_file(text)
    if match := re.search(r"(?:Key '([^']+)' (?:is )?not in (?:struct|'\w+')|Could not override '([^']+)')", text):
        key = match[2] or (full_key[1] if full_key else match[1])
        return (NO_PACKAGE if key == "recipe" else unknown_key(key)) + _in_file(text)
    if match := re.search(r"Value (.+?) of type '[\w.]+' could not be converted to (\w+)", text, re.DOTALL):
        value, kind = clipped(match[1]), match[2].lower()
        return f"{_culprit(text, overrides)}the value {value} is not a valid {kind}{_in_file(text)}"
    if (match := re.search(r"is not a subclass of (\w+)", text)) and (section := sections().get(match[1])):
        one = next(key for key in all_keys() if key.startswith(f"{section}."))
        told = f"`{section}` holds several keys and takes no value itself; set one of them, such as `{one}`"
        return told + _in_file(text)
    if match := re.search(r"field '[^']+' is not Optional\s+full_key: ([\w.]+)", text):
        return f"`{match[1]}=null`: the key needs a value{_in_file(text)}"
    if match := re.search(r"You must specify '(\w+)'.*?(?:Available options:\s*(.*))?$", text, re.DOTALL):
        options = ", ".join((match[2] or "").split())
        return f"no {match[1]} was chosen: add `{match[1]}=NAME`" + (f", one of {options}" if options else "")
    return None


def unknown_key(key: str) -> str:
    """What to say of a key that the configuration does not have: what was meant, or what there is beside it."""
    if key in UNSUPPORTED:
        return f"`{key}` is not supported: {UNSUPPORTED[key]}"
    section, _, name = key.rpartition(".")
    beside = [other.rpartition(".")[2] for other in all_keys() if section and other.rpartition(".")[0] == section]
    text = f"`{key}` is not a key of the configuration"
    if beside and not difflib.get_close_matches(name, beside, n=1):
        elsewhere = [other for other in all_keys() if other.rpartition(".")[2] == name or abbreviates(key, other)]
        return f"{text}{nearest(key, elsewhere)}; `{section}` has {', '.join(beside)}"
    return text + nearest(key, [*all_keys(), *GROUPS])


def _unknown_option(option: str, available: list[str]) -> str:
    group, _, name = option.rpartition("/")
    wrong = f"`{group}={name}`: there is no such {group}; there is {', '.join(available)}{nearest(name, available)}"
    return f"{wrong}. One of your own, FOLDER/{group}/{name}.yaml, is found with `--config-dir FOLDER`"


def _not_yaml(error: YAMLError) -> str:
    """With file and line."""
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark or error.context_mark):
        what = error.problem or error.context or "it cannot be read"
        return f"{mark.name}:{mark.line + 1}: the file is not YAML: {what} (column {mark.column + 1})"
    if isinstance(error, ReaderError):
        return f"{error.name}: the file is not YAML: {error.reason}, at character {error.position + 1}"
    return f"a file of the configuration is not YAML: {one_line(str(error))}"


def _undecodable(folder: str | None) -> str | None:
    """The first file of the configuration that is no text: the error does not say."""
    for path in sorted(Path(folder).rglob("*.yaml")) if folder else ():
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return f"{path}: "
        except OSError:
            continue
    return None


def _culprit(text: str, overrides: Sequence[str]) -> str:
    """The key, the override or the recipe that an error is about, as the beginning of a message."""
    if full_key := re.search(r"full_key: ([\w.]+)", text):
        return f"`{full_key[1]}`: "
    if override := re.search(r"Error merging override (.+)", text):
        return f"`{clipped(override[1])}`: "
    if file := re.search(r"In '([^']+)'", text):
        return f"{file[1]}.yaml: "
    if any(override in text for override in overrides):
        return ""
    return "".join(f"`{override}`: " for override in overrides if override.startswith("recipe="))


def _in_file(text: str) -> str:
    """Where the key lives that an error is about, if that is a file."""
    file = re.search(r"In '((?:recipe|recipe_on|model|algorithm|hardware)/[^']+)'", text)
    return f" (in {file[1]}.yaml)" if file else ""


def _said(text: str) -> str:
    """What OmegaConf says in its first line, without its own types and the override that it was merging."""
    lines = (re.sub(r"^In '[^']+': (\w+ raised while composing config:)?", "", line) for line in text.splitlines())
    said = [line.strip() for line in lines if not re.match(r"\s*(Error merging|\w+: |$)", line)]
    return said[0] if said else one_line(text)
