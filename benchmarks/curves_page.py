"""The page of learning curves: a table and two pictures from the runs of ``benchmarks.learning_curves``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.svg import Curve, small_multiples

if TYPE_CHECKING:
    from benchmarks.learning_curves import Run

WINDOW = 5
"""Steps that a figure of the table is the mean of."""
POINTS = 60
"""Places on the axis of seconds at which the seeds, whose steps end at different times, are compared."""

TEXT = """\
# Learning curves

A two-layer model from random weights learns to write the letter `a` (`recipe=ci_tiny`): every preset of
`configs/algorithm`, {seeds} each, through the real stack (vLLM, DeepSpeed, Ray, pushes in the middle of
generations), all with the same learning rate, which is tuned for none of them. The reward is the share of the letter;
all responses are equally long, so how presets weigh lengths does not show. Lines are means over the seeds, bands one
standard deviation to each side, the means of the other presets grey behind.

A preset that learns slowly here is no worse for it: its bounds may just be made for smaller steps than these.

Made by one command, which continues where it was broken off:

```bash
python -m benchmarks.learning_curves
```

{how}

![reward against rollouts](learning-curves-rollouts.svg)

![reward against seconds](learning-curves-seconds.svg)

Seconds count from the moment at which engine and learner are ready{side_by_side}. Where seeds take different times,
one counts with its first reward until its first step, and with its last one after its last step.

{table}
"""


def write_page(docs: Path, runs: Sequence[Run], settings: Mapping[str, Any]) -> Path:
    """Write ``learning-curves.md`` and its pictures into the folder ``docs``; the path of the page."""
    by_preset: dict[str, list[Run]] = {}
    for run in runs:
        by_preset.setdefault(run.preset, []).append(run)
    pictures = {
        "rollouts": small_multiples(
            [against_rollouts(name, group) for name, group in by_preset.items()],
            "Reward against rollouts", "rollouts learned from", "share of the letter a", y_most=1.0,
        ),
        "seconds": small_multiples(
            [against_seconds(name, group) for name, group in by_preset.items()],
            "Reward against wall time", "seconds", "share of the letter a", y_most=1.0,
        ),
    }  # fmt: skip
    for name, picture in pictures.items():
        (docs / f"learning-curves-{name}.svg").write_text(picture)
    jobs, overrides = settings["jobs"], " ".join(f"`{override}`" for override in settings["overrides"])
    seeds = max(len(group) for group in by_preset.values())
    page = TEXT.format(
        seeds=f"{seeds} seed{'s' * (seeds != 1)}",
        how=f"(Commit `{settings['commit']}`, {settings['machine']}; {overrides}.)",
        side_by_side=f", with {jobs} runs side by side" if jobs > 1 else "",
        table=table(by_preset),
    )
    path = docs / "learning-curves.md"
    path.write_text(page)
    return path


def against_rollouts(name: str, runs: Sequence[Run]) -> Curve:
    """Mean and spread over the seeds after each step, as far as all of them go."""
    steps = min(len(run.rewards) for run in runs)
    rewards = np.array([run.rewards[:steps] for run in runs])
    rollouts = np.array([run.rollouts[:steps] for run in runs]).mean(axis=0)
    return Curve(name, rollouts.tolist(), *mean_and_spread(rewards))


def against_seconds(name: str, runs: Sequence[Run]) -> Curve:
    """The same over wall time, from the quickest first step to the slowest last one.

    A seed keeps its first reward before its first step, when nothing has been learned yet, and its last one at the end.
    """
    at = np.linspace(min(run.seconds[0] for run in runs), max(run.seconds[-1] for run in runs), POINTS)
    rewards = np.array([np.interp(at, run.seconds, run.rewards) for run in runs])
    return Curve(name, at.tolist(), *mean_and_spread(rewards))


def mean_and_spread(values: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and unbiased standard deviation of ``[seeds, points]`` over the seeds; 0 for one seed."""
    spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    return values.mean(axis=0).tolist(), spread.tolist()


def table(by_preset: Mapping[str, Sequence[Run]]) -> str:
    """First, middle and last steps of each preset, and seconds, in Markdown."""
    lines = [
        f"| preset | seeds | reward, first {WINDOW} steps | middle {WINDOW} | last {WINDOW} | seconds | start, end |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in by_preset.items():
        steps = min(len(run.rewards) for run in runs)
        middle = max(0, steps // 2 - WINDOW // 2)
        windows = [slice(0, WINDOW), slice(middle, middle + WINDOW), slice(max(0, steps - WINDOW), steps)]
        cells = [cell([float(np.mean(run.rewards[window])) for run in runs], 2) for window in windows]
        cells += [cell([run.seconds[-1] for run in runs], 0), cell([run.start_seconds for run in runs], 0)]
        lines.append(f"| `{name}` | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation of one value a seed."""
    (mean,), (spread,) = mean_and_spread(np.array(values)[:, None])
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"
