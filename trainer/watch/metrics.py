"""The numbers of a step: pure functions of what was consumed. Those of a whole run: :mod:`trainer.watch.totals`.

Names follow ``trainer/watch/catalogue.py``, which says what each one means and in which unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from generator.rollout import Group, Rollout, ScoredRollout
from trainer.unscored import CAUSES

if TYPE_CHECKING:  # imports torch: seconds, before a word of a configuration error
    from weight_sync.canary import CanaryReport
    from weight_sync.push import PushReport

RESERVED_REWARD_NAMES = frozenset({"mean", "std", "min", "max", "excluded", "first10_mean", "last10_mean", *CAUSES})
"""Names under ``reward/`` that are statistics; a reward function of that name is logged as ``reward/part_<name>``."""


@dataclass(frozen=True, slots=True)
class PushRecord:
    """One push as people want to see it. ``started`` and the phases' starts are Unix seconds; durations are seconds."""

    version: int
    started: float
    seconds: float
    """The whole push, from preparing the weights to the resubmission of the unfinished rollouts."""
    pause_seconds: float
    """How long engines generated nothing."""
    bytes: int = 0
    dense_bytes: int = 0
    """What they would have been, had everything been sent."""
    interrupted_rollouts: int = 0
    """Unfinished rollouts that were submitted again after it."""
    phases: tuple[tuple[str, float, float], ...] = ()
    """(name, start, seconds) of each part, for the trace."""
    canary: CanaryReport | None = None
    """How far engines were from the learner, where that was compared."""


def push_record(report: PushReport, started: float, interrupted: int) -> PushRecord:
    """A push's report as people see it. ``started`` is the Unix time it began at; steps follow one another."""
    phases = []
    at = started
    for name, seconds in report.seconds.items():
        phases.append((name, at, seconds))
        at += seconds
    return PushRecord(
        version=report.version,
        started=started,
        seconds=sum(report.seconds.values()),
        pause_seconds=report.pause_seconds,
        bytes=report.bytes,
        dense_bytes=report.dense_bytes,
        interrupted_rollouts=interrupted,
        phases=tuple(phases),
        canary=report.canary,
    )


def step_metrics(
    groups: Sequence[Group],
    *,
    version: int,
    seconds: float,
    generated_tokens: int,
    pushes: Sequence[PushRecord] = (),
    extra: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """All metrics of a step as one flat dict.

    ``groups`` are those the step trained on, ``version`` the learner's policy version when it took them, ``seconds``
    the wall time since the previous step ended, ``generated_tokens`` the response tokens of rollouts that finished in
    it, ``pushes`` the pushes since the previous step. ``extra`` holds metrics that other rooms computed, under their
    full names (``policy/loss``, ``timing/train_seconds``, ``idle/learner_seconds``); they win over ours.
    Raises :class:`ValueError` for an extra name without a family, because dashboards group by it.
    """
    extra = dict(extra or {})
    if nameless := sorted(name for name in extra if "/" not in name):
        raise ValueError(f"metric names need a family such as policy/ or timing/: {', '.join(nameless)}")
    scored = [rollout for group in groups for rollout in group.rollouts]
    trained = sum(trained_tokens(item.rollout) for item in scored)
    rate = 1.0 / seconds if seconds > 0 else 0.0
    return {
        **reward_metrics(scored),
        **completion_metrics(scored),
        **group_metrics(groups),
        **source_metrics(groups),
        **staleness_metrics([item.rollout for item in scored], version),
        **push_metrics(pushes),
        "throughput/generated_tokens_per_second": generated_tokens * rate,
        "throughput/trained_tokens_per_second": trained * rate,
        "throughput/rollouts_per_second": len(scored) * rate,
        "timing/step_seconds": seconds,
        "policy/version": float(version),
        **extra,
    }


def reward_metrics(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """``reward/*``: over rollouts with a reward only; the others are counted in ``reward/excluded``, never as 0.

    ``reward/std`` is the population standard deviation over all rollouts of the step, not inside groups. Without any
    reward the statistics are left out rather than made up.
    """
    rewards = [item.reward for item in rollouts if item.reward is not None]
    metrics = {"reward/excluded": float(len(rollouts) - len(rewards))}
    if rewards:
        metrics |= {
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "reward/min": float(min(rewards)),
            "reward/max": float(max(rewards)),
        }
    parts: dict[str, list[float]] = {}
    for item in rollouts:
        for name, value in item.reward_parts.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    for name, values in parts.items():
        key = f"part_{name}" if name in RESERVED_REWARD_NAMES else name
        metrics[f"reward/{key}"] = float(np.mean(values))
    return metrics


def completion_metrics(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """``completions/*``: lengths in sampled tokens, how they ended, and across how many policy versions and resumes."""
    if not rollouts:
        return {}
    lengths = [item.rollout.sampled_tokens for item in rollouts]
    observed = [len(item.rollout.response_token_ids) - item.rollout.sampled_tokens for item in rollouts]
    versions = [item.rollout.version_count for item in rollouts]
    ends = Counter(item.rollout.finish_reason for item in rollouts)
    count = len(rollouts)
    return {
        "completions/length_mean": float(np.mean(lengths)),
        "completions/length_min": float(min(lengths)),
        "completions/length_max": float(max(lengths)),
        "completions/stop_fraction": ends["stop"] / count,
        "completions/truncated_fraction": ends["length"] / count,
        "completions/versions_mean": float(np.mean(versions)),
        "completions/versions_max": float(max(versions)),
        "completions/multi_version_fraction": sum(n > 1 for n in versions) / count,
        "completions/resumed_fraction": sum(item.rollout.resumes > 0 for item in rollouts) / count,
    } | ({"completions/observed_mean": float(np.mean(observed))} if any(observed) else {})


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``group/*``. A group with fewer than two rewards, or with equal ones, has no variance and teaches nothing."""
    if not groups:
        return {"group/count": 0.0}
    deviations = []
    for group in groups:
        rewards = [item.reward for item in group.rollouts if item.reward is not None]
        # Equality is compared, not a deviation computed from rounding: three times 0.1 has a deviation above 0.
        deviations.append(float(np.std(rewards)) if len(set(rewards)) > 1 else 0.0)
    return {
        "group/count": float(len(groups)),
        "group/reward_std_mean": float(np.mean(deviations)),
        "group/zero_variance_fraction": sum(d == 0.0 for d in deviations) / len(groups),
    }


def source_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``by_source/<name>/*`` of each data set of a mixture; nothing where there is only one, which has no name."""
    rewards: dict[str, list[float]] = {}
    counts: Counter[str] = Counter()
    for group in groups:
        if name := group.prompt.source:
            counts[name] += 1
            rewards.setdefault(name, []).extend(item.reward for item in group.rollouts if item.reward is not None)
    means = {f"by_source/{name}/reward_mean": float(np.mean(found)) for name, found in rewards.items() if found}
    return means | {f"by_source/{name}/groups": float(count) for name, count in counts.items()}


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """``staleness/*`` at consumption by a learner of ``version``, over the tokens that the loss sees.

    A rollout's staleness is that of its oldest trained token. It splits into the versions that passed while it was
    being sampled (*in flight*: newest minus oldest token) and those that passed afterwards (*queue*: learner minus
    newest token). Sampled tokens that are masked, such as expired ones, only enter ``staleness/masked_fraction``.
    """
    token_sum = token_count = all_tokens = 0
    total, in_flight, queue = [], [], []
    for rollout in rollouts:
        all_tokens += rollout.sampled_tokens
        versions = np.asarray(rollout.versions, dtype=np.int64)[np.asarray(rollout.loss_mask, dtype=bool)]
        if not versions.size:
            continue
        oldest, newest = int(versions[0]), int(versions[-1])  # versions never decrease along a rollout
        token_sum += version * versions.size - int(versions.sum())
        token_count += versions.size
        total.append(version - oldest)
        in_flight.append(newest - oldest)
        queue.append(version - newest)
    metrics = {"staleness/masked_fraction": (all_tokens - token_count) / all_tokens if all_tokens else 0.0}
    if token_count:
        metrics["staleness/token_mean"] = token_sum / token_count
        metrics["staleness/token_max"] = float(max(total))
        for name, values in (("rollout", total), ("in_flight", in_flight), ("queue", queue)):
            metrics[f"staleness/{name}_mean"] = float(np.mean(values))
            metrics[f"staleness/{name}_max"] = float(max(values))
    return metrics


def push_metrics(pushes: Sequence[PushRecord]) -> dict[str, float]:
    """``push/*`` of the pushes since the previous step; nothing when there was none."""
    if not pushes:
        return {}
    seconds = float(np.mean([push.seconds for push in pushes]))
    metrics = {
        "push/version": float(pushes[-1].version),
        "push/seconds": seconds,
        "push/pause_seconds": float(np.mean([push.pause_seconds for push in pushes])),
        "push/interrupted_rollouts": float(sum(push.interrupted_rollouts for push in pushes)),
    }
    if size := sum(push.bytes for push in pushes):
        metrics["push/bytes"] = float(size)
        metrics["push/dense_bytes"] = float(sum(push.dense_bytes for push in pushes))
    if canaries := [push.canary for push in pushes if push.canary is not None]:
        metrics["push/canary_abs_diff_mean"] = float(np.mean([canary.abs_diff_mean for canary in canaries]))
        metrics["push/canary_abs_diff_max"] = max(canary.abs_diff_max for canary in canaries)
        metrics["push/canary_engines"] = float(sum(canary.engines for canary in canaries))
    phases: dict[str, float] = {}
    for push in pushes:
        for name, _, duration in push.phases:
            phases[name] = phases.get(name, 0.0) + duration / len(pushes)
    return metrics | {f"push/{name}_seconds": value for name, value in phases.items()}


def trained_tokens(rollout: Rollout) -> int:
    """Response tokens that the loss sees."""
    return sum(rollout.loss_mask)
