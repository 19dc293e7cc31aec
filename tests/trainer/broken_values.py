"""Bad values for every key of the configuration, made from its type, its words and its bounds: new keys come along."""

from __future__ import annotations

import dataclasses
import itertools
import random
import types
import typing
from collections.abc import Iterator
from typing import Any

from tests.trainer.broken import TINY, Broken
from trainer.allowed import AT_LEAST, AT_MOST, BELOW, EXTENSIBLE, OR_A_NUMBER, POSITIVE, VALUES
from trainer.config import Config


def values(seed: int) -> Iterator[Broken]:
    """Without end: every key once in a shuffled order, each with a value drawn from its bad ones, then all again."""
    rng = random.Random(f"broken values {seed}")
    keys = dict(typed_keys(Config))
    for round_ in itertools.count():
        for key in rng.sample(sorted(keys), len(keys)):
            kind, text = rng.choice(sorted(bad_values(key, keys[key]).items()))
            yield Broken(f"{key}: {kind} {round_}", (*arguments(key), f"{key}={text}"), (key,))


def mistyped(key: str, rng: random.Random) -> str:
    """``key`` without one letter of its last part."""
    path, dot, name = key.rpartition(".")
    place = rng.randrange(1, len(name))
    return f"{path}{dot}{name[:place]}{name[place + 1 :]}"


def typed_keys(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key that has a value of its own, and its type."""
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from typed_keys(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, hints[item.name]


def arguments(key: str) -> tuple[str, ...]:
    """A command line that is fine but for a value of ``key``."""
    return tuple(word for word in TINY if not word.startswith(f"{key}="))


def bad_values(key: str, hint: Any) -> dict[str, str]:
    """Values that no configuration can have for ``key``, as they are written on the command line, by what is wrong."""
    optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
    kind = next(part for part in typing.get_args(hint) if part is not type(None)) if optional else hint
    bad = {"empty": "", "an interpolation of nothing": "${nowhere.at_all}"}
    if not optional and kind is not Any:
        bad["null"] = "null"
    container = typing.get_origin(kind)
    if container is not dict and kind is not Any:
        bad["a mapping"] = "{a: 1}"
    if container is not list and kind is not Any:
        bad["a list"] = "[1,[2]]"
    if container is not None:
        bad["a word"] = "word"
    if kind is bool:
        bad["no truth value"] = "maybe"
    if kind in (int, float):
        bad |= bad_numbers(key, kind)
    if key in VALUES:
        bad["a mistyped word"] = mistyped(VALUES[key][-1], random.Random(key))
        if key not in OR_A_NUMBER:
            bad["a number"] = "7"
    if key in EXTENSIBLE:
        bad |= {"a path to nothing": "nowhere_at_all.function", "a path to no function": "math.pi"}
    return bad


def bad_numbers(key: str, kind: type) -> dict[str, str]:
    """For a key that takes a number: none, none that is finite, one beyond its bounds."""
    bad = {"a word": "many", "nan": "nan", "infinite": "-inf", "huge": "9" * 30 if kind is int else "1e300"}
    if kind is int:
        bad["a fraction"] = "1.5"
    if key in AT_LEAST:
        bad["too small"] = f"{AT_LEAST[key] - 1:g}"
    if key in POSITIVE:
        bad["zero"] = "0"
    if key in BELOW:
        bad["at its bound"] = f"{BELOW[key]}"
    if key in AT_MOST:
        bad["too large"] = f"{AT_MOST[key] + 1}"
    return bad
