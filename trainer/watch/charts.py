"""The charts that a run is judged by: which metrics belong together, under what title, in which unit.

The report (``trainer.report``) draws them, and the wandb dashboard (``trainer.dashboard``) has a panel of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.watch.catalogue import find

PHASES = ("connect", "prepare", "gate", "transfer", "swap", "confirm", "verify", "publish", "resume")
"""The phases of a push in their order; engines are paused from gate to resume."""

Kind = Literal["lines", "stack"]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its metrics, and how they are drawn.

    ``metrics`` are names of the catalogue; ``<x>`` in one stands for every name there, as it does in the catalogue, but
    for the names that have an entry of their own. ``band``: the two metrics between which an area is filled.
    ``points``: metrics of evaluations, drawn as points. A ``stack`` adds its metrics up.
    """

    group: str
    title: str
    unit: str
    metrics: tuple[str, ...]
    kind: Kind = "lines"
    band: tuple[str, str] | None = None
    points: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All that it is made of, the main metrics first."""
        return (*self.metrics, *(self.band or ()), *self.points)


_MISMATCH = "Mismatch: engines against learner"

CHARTS = (
    Chart("Learning", "Reward", "reward", ("reward/mean",), band=("reward/mean-std", "reward/mean+std"),
          points=("eval/reward_mean",)),
    Chart("Learning", "Parts of the reward", "reward, before weights", ("reward/<part>",)),
    Chart("Learning", "Reward by data set", "reward", ("by_source/<source>/reward_mean",)),
    Chart("Learning", "Evaluation", "fraction", (), points=("eval/pass@<k>", "eval/truncated_fraction")),
    Chart("Learning", "Groups that teach nothing", "fraction of groups", ("group/zero_variance_fraction",)),
    Chart("Responses", "Length", "tokens", ("completions/length_mean",),
          band=("completions/length_min", "completions/length_max"), points=("eval/length_mean",)),
    Chart("Responses", "How they end", "fraction of rollouts",
          ("completions/stop_fraction", "completions/truncated_fraction")),
    Chart("Responses", "Sampled across pushes", "fraction of rollouts",
          ("completions/multi_version_fraction", "completions/resumed_fraction")),
    Chart("Policy", "Entropy", "nats per token", ("policy/entropy",)),
    Chart("Policy", "Loss", "loss", ("policy/loss",)),
    Chart("Policy", "Gradient norm", "norm", ("policy/grad_norm",)),
    Chart("Policy", "Clipped tokens", "fraction of tokens", ("policy/clip_fraction_low", "policy/clip_fraction_high",
          "policy/correction_truncated_fraction", "policy/correction_masked_fraction")),
    Chart("Policy", "Distance from the reference", "nats", ("policy/reference_kl",)),
    Chart("Policy", "Learning rate", "rate", ("policy/learning_rate",)),
    Chart(_MISMATCH, "KL of behaviour and current policy", "nats", ("mismatch/kl", "mismatch/k3_kl")),
    Chart(_MISMATCH, "Difference of log-probabilities", "nats", ("mismatch/logprob_abs_diff_mean",)),
    Chart(_MISMATCH, "Largest difference of log-probabilities", "nats", ("mismatch/logprob_abs_diff_max",)),
    Chart(_MISMATCH, "Importance weight", "ratio",
          ("mismatch/ratio_mean", "mismatch/ratio_p50"), band=("mismatch/ratio_p01", "mismatch/ratio_p99")),
    Chart(_MISMATCH, "Effective sample size", "fraction", ("mismatch/ess",)),
    Chart(_MISMATCH, "Canary: engines after a push", "nats",
          ("push/canary_abs_diff_mean", "push/canary_abs_diff_max")),
    Chart("Staleness", "Age of trained tokens", "versions", ("staleness/token_mean", "staleness/token_max")),
    Chart("Staleness", "Where they got old", "versions", ("staleness/in_flight_mean", "staleness/queue_mean")),
    Chart("Staleness", "Trained tokens by age", "fraction of tokens", ("by_lag/<lag>/token_fraction",), "stack"),
    Chart("Staleness", "Mismatch by age (k3)", "nats", ("by_lag/<lag>/k3_kl",)),
    Chart("Staleness", "Entropy by age", "nats per token", ("by_lag/<lag>/entropy",)),
    Chart("Losses", "Sampled tokens that the loss does not see", "fraction of sampled tokens",
          ("staleness/masked_fraction",)),
    Chart("Losses", "Too old to learn from", "tokens", ("staleness/expired_tokens",)),
    Chart("Losses", "Without a reward", "rollouts", ("reward/excluded",)),
    Chart("Losses", "Carried over between engines", "rollouts", ("rollouts/moved", "rollouts/restarted")),
    Chart("Losses", "Engines", "engines", ("engines/serving", "engines/lost", "engines/restarted")),
    Chart("Losses", "Preempted, stalled", "requests", ("engines/preemptions", "rollouts/stalled")),
    Chart("Time", "Throughput", "tokens/s", ("throughput/generated_tokens_per_second",
          "throughput/trained_tokens_per_second", "throughput/learner_tokens_per_second")),
    Chart("Time", "A step, from the learner's side", "seconds", ("idle/learner_seconds", "timing/train_seconds",
          "push/seconds", "timing/rest_seconds"), "stack"),
    Chart("Time", "Training", "seconds", ("timing/before_updates_seconds", "timing/forward_backward_seconds",
          "timing/optimizer_seconds", "timing/<part>_seconds"), "stack"),
    Chart("Time", "Pushes by phase", "seconds", (*(f"push/{phase}_seconds" for phase in PHASES),
          "push/<phase>_seconds"), "stack"),
    Chart("Time", "Generation paused by pushes", "seconds", ("push/pause_seconds",)),
    Chart("Time", "Sent by pushes", "bytes", ("push/bytes",)),
)  # fmt: skip

DERIVED = {
    "timing/rest_seconds": "the rest of the step: writing it down, checkpoints, and what overlaps nothing above",
    "reward/mean-std": "one standard deviation below the mean, or the smallest reward",
    "reward/mean+std": "one standard deviation above the mean, or the largest reward",
}
"""What the report computes from metrics, and no run writes: name and meaning."""


def matching(entries: Sequence[str], names: Iterable[str]) -> list[str]:
    """Those of ``names`` that the entries of a chart mean, in their order; of one entry in the order of numbers."""
    known = list(names)
    found: list[str] = []
    for entry in entries:
        fitting = [name for name in known if name == entry or ("<" in entry and _stands_for(entry, name))]
        found += sorted(set(fitting) - set(found), key=_natural)
    return found


def pattern(entry: str) -> str:
    """A name of the catalogue as a regular expression of RE2: what it stands for, and more where others fit as well."""
    return "[^/]+".join(re.escape(part) for part in re.split(r"<\w+>", entry))


def meaning(name: str) -> str:
    """What a metric of a chart is, for people; empty for a name that is no metric."""
    metric = find(name)
    return DERIVED.get(name) or (metric.meaning if metric else "")


def _stands_for(entry: str, name: str) -> bool:
    described = find(name)
    own_entry = described is not None and described is not find(entry)
    return name not in DERIVED and not own_entry and re.fullmatch(pattern(entry), name) is not None


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
