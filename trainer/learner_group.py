"""The driver's handle on the learner: one Ray actor per rank, and every call on all of them under one deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from trainer.evaluation_engine import TRAINING
from trainer.learner_actor import LearnerActor
from trainer.learner_error import LearnerError
from trainer.learner_setup import LearnerSpec, TransferSpec
from trainer.step_metrics import StepResult
from trainer.train_rollout import TrainRollout

if TYPE_CHECKING:
    from weight_sync.manifest import Manifest

logger = logging.getLogger(__name__)

_SIBLING_GRACE = 1.0
"""Seconds that other ranks get to report their own error after the first: the first is often only its echo."""
_CLOSE_TIMEOUT = 5.0
"""Seconds that ranks get to leave the process group before their actors are killed."""


class LearnerGroup:
    """``learner.ranks`` learner actors behind one object. Every method is a coroutine that never blocks the event loop.

    Every call has the deadline ``learner.timeout`` and raises :class:`LearnerError`, naming the ranks and keeping the
    original error as its cause. After such an error the ranks may be out of step: ``close`` is all that is left.
    """

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        self._timeout = spec.learner.timeout
        self._actors: list[Any] = []
        self._address = ""

    @property
    def address(self) -> str:
        """The node address of rank 0, known after :meth:`start`: where a transfer group can listen."""
        return self._address

    async def start(self) -> None:
        """Start the actors and load the model on every rank."""
        ranks = self._spec.learner.ranks
        # No CPU is reserved: on a machine with two cores the engines would otherwise leave none to schedule on.
        actor = ray.remote(
            num_cpus=0,
            num_gpus=self._spec.gpus if self._spec.device == "cuda" else 0,
            max_restarts=0,
            concurrency_groups={"control": 1},
        )(LearnerActor)
        self._actors = [actor.remote() for _ in range(ranks)]
        ((self._address, port),) = await self._wait("rendezvous", [self._actors[0].rendezvous.remote()])
        refs = [a.start.remote(self._spec, rank, ranks, self._address, port) for rank, a in enumerate(self._actors)]
        await self._wait("start", refs)

    async def train(self, rollouts: Sequence[TrainRollout], version: int) -> StepResult:
        """One step on a batch, see :meth:`trainer.learner.Learner.train`. The batch is stored once."""
        return (await self._call("train", ray.put(tuple(rollouts)), version))[0]

    async def accumulate(self, rollouts: Sequence[TrainRollout], version: int) -> None:
        """Begin with a part of the next batch, see :meth:`trainer.learner.Learner.accumulate`."""
        await self._call("accumulate", ray.put(tuple(rollouts)), version)

    async def kl_penalties(self, rollouts: Sequence[TrainRollout]) -> list[float]:
        """What ``algorithm.kl`` subtracts from the reward of each rollout."""
        return (await self._call("kl_penalties", ray.put(tuple(rollouts))))[0]

    async def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """For each token sequence, the current log-probability of every token but the first."""
        return (await self._call("logprobs", sequences, temperature))[0]

    async def base_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The same with the adapters off."""
        return (await self._call("base_logprobs", sequences))[0]

    async def save(self, folder: str | Path) -> None:
        """Write a checkpoint. The folder must be visible on the node of every rank."""
        await self._call("save", str(folder))

    async def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint."""
        await self._call("load", str(folder))

    async def export(self, folder: str | Path) -> None:
        """Write a folder that transformers and vLLM load directly."""
        await self._call("export", str(folder))

    async def connect_weights(self, transfer: TransferSpec) -> None:
        """Build the transfer group between rank 0 and the engines of a pool, again after a failed push."""
        await self._call("connect_weights", transfer)

    async def prepare(self, base: int | None = None, pool: str = TRAINING) -> Manifest:
        """Check on every rank that the weights are finite; the manifest of what engines will hold. Disturbs none.

        ``base``: the version since which only changes may be sent, see :meth:`weight_sync.sender.WeightSender.prepare`.
        """
        return (await self._call("prepare_push", pool, base))[0]

    async def send(self, version: int, hashed: bool = False, pool: str = TRAINING) -> int:
        """Move the weights into every engine of a pool, as ``version``; the bytes of tensors, or of a delta, sent.

        ``hashed``: engines compare a digest of every tensor, see :meth:`weight_sync.sender.WeightSender.send`.
        """
        return (await self._call("send_weights", pool, version, hashed))[0]

    async def steps_done(self) -> int:
        """Batches learned from, those before a checkpoint was loaded included."""
        return (await self._call("steps_done"))[0]

    async def interrupt(self) -> None:
        """Give up the step in progress on every rank, see :meth:`trainer.learner.Learner.train`; :meth:`steps_done`
        says whether it counts.

        Returns at once; the interrupted ``train`` ends with an error, and later calls wait for that.
        """
        await self._wait("interrupt", [a.interrupt.options(concurrency_group="control").remote() for a in self._actors])

    async def close(self) -> None:
        """End all ranks; kills those that do not answer. Safe to call twice and after any error."""
        actors, self._actors = self._actors, []
        try:
            await asyncio.wait_for(asyncio.gather(*(_as_future(a.close.remote()) for a in actors)), _CLOSE_TIMEOUT)
        except Exception as error:
            logger.info("a learner rank did not close by itself and is ended: %s", error)
        for actor in actors:
            ray.kill(actor)

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every rank; the results in rank order."""
        if not self._actors:
            raise LearnerError(f"learner {method}: the learner is not running")
        return await self._wait(method, [getattr(actor, method).remote(*arguments) for actor in self._actors])

    async def _wait(self, method: str, refs: list[Any]) -> list[Any]:
        calls = [_as_future(ref) for ref in refs]
        try:
            done, pending = await asyncio.wait(calls, timeout=self._timeout, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            for call in calls:  # whatever they end with now, nobody waits for it
                call.cancel()
            raise
        if any(call.exception() for call in done) and pending:
            await asyncio.wait(pending, timeout=_SIBLING_GRACE)
        errors = {rank: call.exception() for rank, call in enumerate(calls) if call.done() and call.exception()}
        if errors:
            for call in pending:
                call.cancel()
            causes = {rank: getattr(error, "cause", None) or error for rank, error in errors.items()}
            what = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
            first = next((rank for rank, call in enumerate(calls) if call in done and rank in causes), min(causes))
            raise LearnerError(f"learner {method} failed on {what}") from causes[first]
        if pending:
            late = [str(rank) for rank, call in enumerate(calls) if not call.done()]
            for call in pending:
                call.cancel()
            raise LearnerError(
                f"learner {method}: rank {', '.join(late)} did not return within {self._timeout:g} s (learner.timeout)"
            ) from TimeoutError(method)
        return [call.result() for call in calls]


async def _await(ref: Any) -> Any:
    return await ref


def _as_future(ref: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(_await(ref))
