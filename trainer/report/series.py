"""The charts of a report, and the metrics of a run as columns of a bounded number of points."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.watch.catalogue import find
from trainer.watch.read_folder import number

POINTS = 400
"""Points of a column at most: more than a chart has pixels on a phone, fewer than a file of megabytes needs."""

PHASES = ("connect", "prepare", "gate", "transfer", "swap", "confirm", "verify", "publish", "resume")
"""The phases of a push in their order; engines are paused from gate to resume."""

Kind = Literal["lines", "stack"]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: the metrics of it, as regular expressions over their names, and how they are drawn.

    ``band``: the two metrics between which an area is filled. ``points``: metrics of evaluations, drawn as points.
    A ``stack`` adds its metrics up.
    """

    group: str
    title: str
    unit: str
    metrics: tuple[str, ...]
    kind: Kind = "lines"
    band: tuple[str, str] | None = None
    points: tuple[str, ...] = ()


CHARTS = (
    Chart("Learning", "Reward", "reward", ("reward/mean",), band=("reward/mean-std", "reward/mean+std"),
          points=("eval/reward_mean",)),
    Chart("Learning", "Parts of the reward", "reward, before weights",
          (r"reward/(?!mean|std|min|max|excluded|failed|timeout|declined|invalid|wrong_length).+",)),
    Chart("Learning", "Evaluation", "fraction", (), points=(r"eval/pass@\d+", "eval/truncated_fraction")),
    Chart("Learning", "Groups that teach nothing", "fraction of groups", ("group/zero_variance_fraction",)),
    Chart("Responses", "Length", "tokens", ("completions/length_mean",),
          band=("completions/length_min", "completions/length_max"), points=("eval/length_mean",)),
    Chart("Responses", "How they end", "fraction of rollouts",
          ("completions/stop_fraction", "completions/truncated_fraction")),
    Chart("Responses", "Sampled across pushes", "fraction of rollouts",
          ("completions/multi_version_fraction", "completions/resumed_fraction")),
    Chart("Responses", "Without a reward", "rollouts", ("reward/excluded",)),
    Chart("Policy", "Entropy", "nats per token", ("policy/entropy",)),
    Chart("Policy", "Loss", "loss", ("policy/loss",)),
    Chart("Policy", "Gradient norm", "norm", ("policy/grad_norm",)),
    Chart("Policy", "Clipped tokens", "fraction of tokens", ("policy/clip_fraction_low", "policy/clip_fraction_high",
          "policy/correction_truncated_fraction", "policy/correction_masked_fraction")),
    Chart("Policy", "Distance from the reference", "nats", ("policy/reference_kl",)),
    Chart("Policy", "Learning rate", "rate", ("policy/learning_rate",)),
    Chart("Mismatch: engines against learner", "KL of behaviour and current policy", "nats",
          ("mismatch/kl", "mismatch/k3_kl")),
    Chart("Mismatch: engines against learner", "Difference of log-probabilities", "nats",
          ("mismatch/logprob_abs_diff_mean",)),
    Chart("Mismatch: engines against learner", "Largest difference of log-probabilities", "nats",
          ("mismatch/logprob_abs_diff_max",)),
    Chart("Mismatch: engines against learner", "Importance weight", "ratio",
          ("mismatch/ratio_mean", "mismatch/ratio_p50"), band=("mismatch/ratio_p01", "mismatch/ratio_p99")),
    Chart("Mismatch: engines against learner", "Effective sample size", "fraction", ("mismatch/ess",)),
    Chart("Mismatch: engines against learner", "Canary: engines after a push", "nats",
          ("push/canary_abs_diff_mean", "push/canary_abs_diff_max")),
    Chart("Staleness", "Age of trained tokens", "versions", ("staleness/token_mean", "staleness/token_max")),
    Chart("Staleness", "Where they got old", "versions", ("staleness/in_flight_mean", "staleness/queue_mean")),
    Chart("Staleness", "Trained tokens by age", "fraction of tokens", (r"by_lag/[^/]+/token_fraction",), "stack"),
    Chart("Staleness", "Mismatch by age (k3)", "nats", (r"by_lag/[^/]+/k3_kl",)),
    Chart("Staleness", "Entropy by age", "nats per token", (r"by_lag/[^/]+/entropy",)),
    Chart("Staleness", "Tokens too old to learn from", "fraction of sampled tokens", ("staleness/masked_fraction",)),
    Chart("Time", "A step, from the learner's side", "seconds", ("idle/learner_seconds", "timing/train_seconds",
          "push/seconds", "timing/rest_seconds"), "stack"),
    Chart("Time", "Training", "seconds", (r"timing/(?!step|train|rest)\w+_seconds",), "stack"),
    Chart("Time", "Pushes by phase", "seconds", (*(f"push/{phase}_seconds" for phase in PHASES),
          r"push/(?!pause_)\w+_seconds"), "stack"),
    Chart("Time", "Generation paused by pushes", "seconds", ("push/pause_seconds",)),
    Chart("Time", "Throughput", "tokens/s", ("throughput/generated_tokens_per_second",
          "throughput/trained_tokens_per_second", "throughput/learner_tokens_per_second")),
    Chart("Time", "Sent by pushes", "bytes", ("push/bytes",)),
    Chart("Time", "Engines", "engines", ("engines/serving", "engines/lost")),
)  # fmt: skip

_DERIVED = {
    "timing/rest_seconds": "the rest of the step: writing it down, checkpoints, and what overlaps nothing above",
    "reward/mean-std": "one standard deviation below the mean, or the smallest reward",
    "reward/mean+std": "one standard deviation above the mean, or the largest reward",
}


def charts(names: Sequence[str]) -> list[dict[str, Any]]:
    """The charts that have something to show, for the page; ``names`` are the metrics of all runs together."""
    found = []
    for chart in CHARTS:
        metrics = _matching(chart.metrics, names)
        points = _matching(chart.points, names)
        if metrics or points:
            band = chart.band if chart.band and set(chart.band) <= set(names) else None
            shown = [*metrics, *(band or ()), *points]
            found.append({"group": chart.group, "title": chart.title, "unit": chart.unit, "kind": chart.kind,
                          "metrics": metrics, "band": band, "points": points,
                          "help": [(name, _meaning(name)) for name in shown]})  # fmt: skip
    return found


def columns(rows: Sequence[Mapping[str, Any]], points: int = POINTS) -> dict[str, list[float | None]]:
    """The metrics of ``rows`` by name, ``step`` among them, each with at most ``points`` values, as long as ``step``.

    A value is the mean of as many steps as had to be put together; of a name that ends with ``_max`` or ``max`` the
    largest, and with ``min`` the smallest. ``None`` where no step has a number.
    """
    size = -(-len(rows) // points) or 1
    joined = []
    for start in range(0, len(rows), size):  # never all of the rows at once: a long run has a hundred thousand
        part = [{**row, **derived(row)} for row in rows[start : start + size]]
        names = {name for row in part for name in row if number(row[name]) is not None}
        joined.append({name: _joined(name, part) for name in names})
    return {name: [part.get(name) for part in joined] for name in sorted(set().union(*joined))}


def derived(row: Mapping[str, Any]) -> dict[str, float]:
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


def _joined(name: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    values = [value for row in rows if (value := number(row.get(name))) is not None]
    if not values:
        return None
    if name == "step" or name.endswith("max"):
        return rounded(max(values), 9)
    return rounded(min(values) if name.endswith("min") else sum(values) / len(values))


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that match, in the order of the patterns; names of one pattern in the order of the numbers in them."""
    matching: list[str] = []
    for pattern in patterns:
        fitting = [name for name in names if name == pattern or re.fullmatch(pattern, name)]
        matching += sorted(set(fitting) - set(matching), key=_natural)
    return matching


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _meaning(name: str) -> str:
    metric = find(name)
    return _DERIVED.get(name) or (metric.meaning if metric else "")
