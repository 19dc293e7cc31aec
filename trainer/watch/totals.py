"""The numbers of a whole run: the running totals of ``summary.json``, over all starts of the run.

Names follow ``trainer/watch/catalogue.py``, which says what each one means and in which unit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from generator.rollout import Group, Rollout
from trainer.watch.metrics import PushRecord, trained_tokens

REWARD_WINDOW = 10
"""Steps in ``reward/first10_mean`` and ``reward/last10_mean``."""


def evaluation_summary(evaluations: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """What ``summary.json`` says of the evaluations, by version: the last one and the best. Nothing without any."""
    rewards = {
        version: metrics["eval/reward_mean"]
        for version, metrics in evaluations.items()
        if metrics.get("eval/reward_mean") is not None and math.isfinite(metrics["eval/reward_mean"])
    }
    if not rewards:
        return {}
    best = max(rewards, key=lambda version: (rewards[version], version))
    return {
        "eval/last_reward_mean": rewards[max(rewards)],
        "eval/best_reward_mean": rewards[best],
        "eval/best_version": best,
    }


@dataclass
class RunningTotals:
    """The sums that ``summary.json`` reports, over the whole run, resumes of the run included.

    Every sampled token ends in exactly one place: trained, expired, lost, or still waiting to be consumed.
    """

    counts: Counter[str] = field(default_factory=Counter)
    pause_seconds: float = 0.0
    first_rewards: list[float] = field(default_factory=list)
    last_rewards: list[float] = field(default_factory=list)

    COUNTED = ("tokens/generated", "tokens/trained", "tokens/expired", "tokens/lost", "rollouts/finished",
               "rollouts/resumed", "rollouts/failed", "rollouts/moved", "rollouts/restarted", "rollouts/stalled",
               "tokens/cached", "tokens/surplus", "engines/lost", "engines/restarted", "engines/preemptions",
               "push/count", "steps/skipped", "checkpoints/failed")  # fmt: skip

    def add(self, name: str, count: int) -> None:
        """Add to one of the counts by its name in the summary. Raises :class:`KeyError` for another name."""
        if name not in self.COUNTED:
            raise KeyError(f"{name!r} is not counted; the totals of a run are {', '.join(self.COUNTED)}")
        self.counts[name] += count

    def add_finished(self, rollouts: Iterable[Rollout]) -> None:
        """Count rollouts that have ended, whether or not they will be trained on."""
        for rollout in rollouts:
            self.counts["rollouts/finished"] += 1
            self.counts["rollouts/resumed"] += rollout.resumes > 0
            self.counts["rollouts/failed"] += rollout.finish_reason == "failed"
            self.counts["tokens/generated"] += rollout.sampled_tokens

    def add_step(self, groups: Iterable[Group], reward_mean: float | None) -> None:
        """Count a step's tokens: those the loss sees as trained, those it masks as expired."""
        for group in groups:
            for item in group.rollouts:
                trained = trained_tokens(item.rollout)
                self.counts["tokens/trained"] += trained
                if item.reward is not None:  # tokens without a reward are lost, and counted by whoever found that out
                    self.counts["tokens/expired"] += item.rollout.sampled_tokens - trained
        if reward_mean is not None:
            if len(self.first_rewards) < REWARD_WINDOW:
                self.first_rewards.append(reward_mean)
            self.last_rewards = [*self.last_rewards, reward_mean][-REWARD_WINDOW:]

    def add_push(self, push: PushRecord) -> None:
        """Count one push."""
        self.counts["push/count"] += 1
        self.pause_seconds += push.pause_seconds

    def summary(self) -> dict[str, float | int | None]:
        """The totals under their names in ``summary.json``; means of nothing are ``None``."""
        pushes = self.counts["push/count"]
        return {
            "reward/first10_mean": float(np.mean(self.first_rewards)) if self.first_rewards else None,
            "reward/last10_mean": float(np.mean(self.last_rewards)) if self.last_rewards else None,
            **{name: self.counts[name] for name in self.COUNTED},
            "push/pause_seconds_mean": self.pause_seconds / pushes if pushes else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "counts": dict(self.counts),
            "pause_seconds": self.pause_seconds,
            "first_rewards": list(self.first_rewards),
            "last_rewards": list(self.last_rewards),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.counts = Counter(state["counts"])
        self.pause_seconds = state["pause_seconds"]
        self.first_rewards = list(state["first_rewards"])
        self.last_rewards = list(state["last_rewards"])
