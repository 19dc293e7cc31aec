"""Evaluation: held-out prompts, sampled and scored under exactly one policy version, while training goes on.

An evaluation begins right behind the push of its version and holds the next push until it has ended. Until then the
learner trains and the engines generate for training too, so it costs what its own tokens cost, and at most the wait of
one push. With an engine of its own (``evaluation.engine=dedicated``) it costs that engine, and one push to it more;
pushes to the others do not wait for it, only the next evaluation does. When that engine is lost, what it was evaluating
has no result, and the run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from generator.link import EngineError, root_cause
from generator.rollout import Prompt, Rollout, ScoredRollout
from trainer.episodes import EpisodeSource, Trace

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often a push that waits for an evaluation looks whether there is still an engine to end it."""


class EvaluationError(RuntimeError):
    """An evaluation that belongs to no single version."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a version on ``prompts``: ``rollouts`` of each, of which a reward of ``pass_reward`` and more passes.

    ``episodes`` samples and scores, with the evaluation's own sampling; its counts are not those of training.
    ``trace`` takes when it was.
    """

    prompts: Sequence[Prompt]
    episodes: EpisodeSource
    rollouts: int
    pass_reward: float
    trace: Trace | None = None

    async def run(self, version: int) -> dict[str, float]:
        """Sample and score everything under ``version``, which is published; the metrics.

        Raises :class:`EvaluationError` when a token was sampled by another version.
        """
        started = time.monotonic()
        with self.trace.span("evaluation", f"evaluation of version {version}") if self.trace else nullcontext():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._sample(prompt, version)) for prompt in self.prompts]
        scored = [task.result() for task in tasks]
        for item in (item for items in scored for item in items):
            if others := set(item.rollout.versions) - {version}:
                raise EvaluationError(
                    f"rollout {item.rollout.id} of the evaluation of version {version} has tokens of {sorted(others)}"
                )
        metrics = evaluation_metrics(scored, self.pass_reward, [prompt.source for prompt in self.prompts])
        counts = {f"eval/{name}": float(count) for name, count in self.episodes.take_counts().items()}
        return metrics | counts | {"eval/seconds": time.monotonic() - started}

    async def _sample(self, prompt: Prompt, version: int) -> tuple[ScoredRollout, ...]:
        names = (f"evaluation-{version}-{prompt.id}-{member}" for member in range(self.rollouts))
        return await self.episodes.sample(prompt, [Rollout(name, prompt.token_ids) for name in names], version)


def evaluation_metrics(
    scored: Sequence[Sequence[ScoredRollout]], pass_reward: float, sources: Sequence[str] = ()
) -> dict[str, float]:
    """The metrics of an evaluation, of the scored rollouts of each prompt; ``sources`` names the data set of each.

    What has no reward is counted as excluded and nothing else. ``eval/pass@k`` is the chance that one of k rollouts of
    a prompt passes, mean over the prompts with at least k scored rollouts, for k = 1, 2, 4, ...; the unbiased estimator
    of Chen et al. (arXiv:2107.03374), equation 1.
    """
    rewards = [[item.reward for item in items if item.reward is not None] for items in scored]
    everything = [reward for of_prompt in rewards for reward in of_prompt]
    rollouts = [item.rollout for items in scored for item in items]
    lengths = [rollout.sampled_tokens for rollout in rollouts]
    metrics = {
        "eval/reward_mean": float(np.mean(everything)) if everything else math.nan,
        "eval/reward_std": float(np.std(everything)) if everything else math.nan,
        "eval/prompts": float(len(scored)),
        "eval/excluded": float(len(rollouts) - len(everything)),
        "eval/length_mean": float(np.mean(lengths)) if lengths else math.nan,
        "eval/truncated_fraction": float(np.mean([r.finish_reason == "length" for r in rollouts])) if rollouts else 0.0,
    }
    for source in {name: None for name in sources if name}:
        found = [
            reward for of_prompt, name in zip(rewards, sources, strict=True) if name == source for reward in of_prompt
        ]
        metrics[f"eval/by_source/{source}/reward_mean"] = float(np.mean(found)) if found else math.nan
    k = 1
    while passes := [_pass_at(k, of_prompt, pass_reward) for of_prompt in rewards if len(of_prompt) >= k]:
        metrics[f"eval/pass@{k}"] = float(np.mean(passes))
        k *= 2
    return metrics


def _pass_at(k: int, rewards: Sequence[float], pass_reward: float) -> float:
    failed = sum(reward < pass_reward for reward in rewards)
    return 1.0 - math.comb(failed, k) / math.comb(len(rewards), k)


@dataclass
class Evaluations:
    """The evaluations of a run: which versions are evaluated, and the one that is going on. None without evaluator.

    Every ``every``-th version is, and ``last``. ``serving`` says how many engines serve, ``report`` takes the metrics
    of a version, and ``reported`` says whether it did so before a restart. ``send`` brings a version to engines that
    are there for evaluations only, as :meth:`begin` is told to; without it, it is sampled by those of training.
    """

    evaluator: Evaluator | None = None
    every: int = 0
    last: int = 0
    serving: Callable[[], int] = lambda: 1
    report: Callable[[int, dict[str, float]], None] = lambda version, metrics: None
    reported: Callable[[int], bool] = lambda version: False
    send: Callable[[int, asyncio.Lock], Awaitable[None]] | None = None
    _version: int = field(default=0, init=False)
    _running: asyncio.Task[dict[str, float]] | None = field(default=None, init=False)

    @property
    def going_on(self) -> int | None:
        """The version that is being evaluated, if one is."""
        return None if self._running is None else self._version

    async def before_push(self) -> None:
        """Return when a push to the engines of training may change their weights: see :meth:`ended`.

        An evaluation with engines of its own goes on, unless it has ended or there is none left of them.
        """
        if self.send is None or (self._running is not None and (self._running.done() or self.serving() == 0)):
            await self.ended()

    async def begin(self, version: int, weights: asyncio.Lock) -> None:
        """``version`` has just been published: evaluate it if it is due.

        The learner must hold it until this returns. The evaluation before, if it has engines of its own, ends first.
        ``weights`` is held while weights travel, and not in any wait before: engines of training that join need it.
        """
        due = self.every > 0 and (version % self.every == 0 or version == self.last)
        if self.evaluator is None or not due or self.reported(version):
            return
        await self.ended()
        self._version = version
        if self.send is not None:
            try:
                await self.send(version, weights)
            except EngineError as error:
                self._say_given_up(str(error))
                return
        self._running = asyncio.create_task(self.evaluator.run(version), name=f"evaluation of version {version}")

    async def ended(self) -> None:
        """Return when no evaluation is going on, its metrics reported: a push may change its weights. Raises its error.

        With no engine left it is given up: engines that come need the weights of now, which the push brings. So it is
        when engines of its own fail: training does not need them.
        """
        if (running := self._running) is None:
            return
        while not running.done():
            if self.serving() == 0:
                await self.give_up("no engine serves it any more")
                return
            await asyncio.wait({running}, timeout=LOOK_SECONDS)
        self._running = None
        if self.send is not None and (error := running.exception()) is not None and _only_engines_failed(error):
            self._say_given_up(str(root_cause(error)))
            return
        metrics = running.result()
        await asyncio.to_thread(self.report, self._version, metrics)

    async def give_up(self, reason: str) -> None:
        """End the one that is going on, if there is one, without a result, and say so."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
            if not running.cancelled() and (error := running.exception()) is not None:
                reason = f"{reason}; it has failed: {error!r}"
            self._say_given_up(reason)

    def _say_given_up(self, reason: str) -> None:
        logger.warning("the evaluation of version %d is given up and has no result: %s", self._version, reason)


def _only_engines_failed(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.split(EngineError)[1] is None
    return isinstance(error, EngineError)
