"""``data.mixture``: several data sets of one recipe, each with its share of the prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import DataConfig
from trainer.nearest import nearest
from trainer.wording import shown

LARGEST_WEIGHT = 1e9
KEYS = ("name", "weight", "path", "eval_path", "options")


class MixtureError(ValueError):
    """``data.mixture`` cannot be used. The message says which data set, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """One data set: what ``data.path``, ``data.eval_path`` and ``data.options`` are for a run with a single one."""

    name: str
    """Under which its metrics are found."""
    share: float
    """Of all prompts; the shares of a mixture sum to 1."""
    path: str | None
    eval_path: str | None
    options: Mapping[str, Any]


def data_sources(data: DataConfig) -> tuple[DataSource, ...]:
    """The data sets of a run: those of ``data.mixture``, or the only one, whose name is empty.

    Raises :class:`MixtureError`.
    """
    if not data.mixture:
        return (DataSource("", 1.0, data.path, data.eval_path, data.options),)
    for key in ("path", "eval_path"):
        if getattr(data, key) is not None:
            raise MixtureError(f"`data.{key}` is for a single data set; in `data.mixture` each has a {key} of its own")
    items = [_item(number, item) for number, item in enumerate(data.mixture, start=1)]
    weights = [_weight(name, item.get("weight", 1.0)) for name, item in items]
    names = Counter(name for name, _ in items)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise MixtureError(
            f"`data.mixture`: several data sets are named {repeated[0]!r}; give each a `name` of its own"
        )
    return tuple(
        DataSource(
            name,
            weight / sum(weights),
            item.get("path"),
            item.get("eval_path"),
            {**data.options, **(item.get("options") or {})},
        )
        for (name, item), weight in zip(items, weights, strict=True)
    )


def interleaved(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """The first of each sequence, then the second of each, and so on: any beginning has something of all of them."""
    longest = max(map(len, rows), default=0)
    return [one[index] for index in range(longest) for one in rows if index < len(one)]


def _item(number: int, item: Any) -> tuple[str, Mapping[str, Any]]:
    where = f"`data.mixture`, data set {number}"
    if not isinstance(item, Mapping):
        raise MixtureError(f"{where}: {shown(item)} is no mapping with the keys {', '.join(KEYS)}")
    if unknown := [str(key) for key in item if key not in KEYS]:
        raise MixtureError(f"{where}: no key `{unknown[0]}`{nearest(unknown[0], KEYS)}; there are {', '.join(KEYS)}")
    if not isinstance(item.get("options") or {}, Mapping):
        raise MixtureError(f"{where}: `options` is {shown(item['options'])}, not a mapping")
    for key in ("path", "eval_path"):
        if not isinstance(item.get(key), str | None):
            raise MixtureError(f"{where}: `{key}` is {shown(item[key])}; it must be the name of a file, or left out")
    path = item.get("path")
    name = item.get("name") or (Path(path).stem if path else f"set{number}")
    if not isinstance(name, str) or "/" in name:
        raise MixtureError(f"{where}: the name {shown(name)} is part of names of metrics: text without a `/`")
    return name, item


def _weight(name: str, weight: Any) -> float:
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not 0 < weight <= LARGEST_WEIGHT:  # also false for NaN
        raise MixtureError(
            f"`data.mixture`: the weight of {name!r} is {shown(weight)}; it must be a number greater than 0 and at "
            f"most {LARGEST_WEIGHT:g}; leave out a data set that is not to be trained on"
        )
    return float(weight)
