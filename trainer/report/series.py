"""The metrics of a run as columns of a bounded number of points, and the charts that they fill."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.watch.charts import CHARTS, matching, meaning
from trainer.watch.read_folder import number

POINTS = 400
"""Points of a column at most: more than a chart has pixels on a phone, fewer than a file of megabytes needs."""

Row = Mapping[str, Any]
Column = list[float | None]


@dataclass(frozen=True)
class Columns:
    """A point of a column is one step, or as many neighbouring ones as had to be put together."""

    values: Mapping[str, Column]
    """By name, ``step`` among them, all of one length. The mean over a point's steps; of a name that ends with ``max``,
    and of ``step``, the largest, of one that ends with ``min`` the smallest. ``None`` where no step has a number."""
    extremes: Mapping[str, tuple[Column, Column]]
    """Smallest and largest value of a point's steps, of the names whose ``values`` are means and hide them."""


def charts(names: Sequence[str]) -> list[dict[str, Any]]:
    """The charts that have something to show, for the page; ``names`` are the metrics of all runs together."""
    found = []
    for chart in CHARTS:
        metrics = matching(chart.metrics, names)
        points = matching(chart.points, names)
        if metrics or points:
            band = chart.band if chart.band and set(chart.band) <= set(names) else None
            shown = [*metrics, *(band or ()), *points]
            found.append({"group": chart.group, "title": chart.title, "unit": chart.unit, "kind": chart.kind,
                          "metrics": metrics, "band": band, "points": points,
                          "help": [(name, meaning(name)) for name in shown]})  # fmt: skip
    return found


def columns(rows: Collection[Row], points: int = POINTS) -> Columns:
    """The metrics of ``rows``, which are gone through once and never held together: a long run has 100,000 of them."""
    size = -(-len(rows) // points) or 1
    joined: list[dict[str, tuple[float, float, float]]] = []
    remaining = iter(rows)
    while part := list(itertools.islice(remaining, size)):
        joined.append(_joined([{**row, **derived(row)} for row in part]))
    names = sorted(set().union(*joined))
    values = {name: [_shown(name, point.get(name)) for point in joined] for name in names}
    hidden = [name for name in names if not _is_extreme(name) and any(_spread(point.get(name)) for point in joined)]
    return Columns(values, {name: (_side(joined, name, 0), _side(joined, name, 2)) for name in hidden})


def derived(row: Row) -> dict[str, float]:
    """Numbers that charts need and a row of metrics holds only in pieces."""
    made = {}
    mean, std = number(row.get("reward/mean")), number(row.get("reward/std"))
    if mean is not None and std is not None:
        low, high = number(row.get("reward/min")), number(row.get("reward/max"))
        made["reward/mean-std"] = mean - std if low is None else max(low, mean - std)
        made["reward/mean+std"] = mean + std if high is None else min(high, mean + std)
    step = number(row.get("timing/step_seconds"))
    if step is not None:
        parts = [
            number(row.get(name)) or 0.0 for name in ("idle/learner_seconds", "timing/train_seconds", "push/seconds")
        ]
        made["timing/rest_seconds"] = max(0.0, step - sum(parts))
    return made


def rounded(value: float | None, digits: int = 5) -> float | int | None:
    """``value`` with so many significant digits: what a chart can show, in a fifth of the characters."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _joined(rows: Sequence[Row]) -> dict[str, tuple[float, float, float]]:
    """(smallest, mean, largest) of each number in ``rows``."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, raw in row.items():
            if (value := number(raw)) is not None:
                found.setdefault(name, []).append(value)
    return {name: (min(values), sum(values) / len(values), max(values)) for name, values in found.items()}


def _is_extreme(name: str) -> bool:
    return name == "step" or name.endswith(("max", "min"))


def _spread(point: tuple[float, float, float] | None) -> bool:
    return point is not None and point[0] < point[2]


def _shown(name: str, point: tuple[float, float, float] | None) -> float | None:
    if point is None:
        return None
    if name == "step":
        return rounded(point[2], 9)
    return rounded(point[2] if name.endswith("max") else point[0] if name.endswith("min") else point[1])


def _side(points: Sequence[Mapping[str, tuple[float, float, float]]], name: str, side: int) -> Column:
    return [rounded(point[name][side]) if name in point else None for point in points]
