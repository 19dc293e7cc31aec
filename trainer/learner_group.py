"""The learner as the driver sees it: one Ray actor a rank, every call a collective with a deadline.

Each actor holds a :class:`trainer.learner.Learner` and the sending end of weight pushes. This module is the only one
that knows learner ranks are Ray actors.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from weight_sync.manifest import Manifest
from weight_sync.push import SendReport

from trainer.batching import TrainRollout
from trainer.config import WeightSyncConfig
from trainer.learner import LearnerSpec


class LearnerError(RuntimeError):
    """A learner rank failed, died, or did not answer in time. The message names the rank and the call."""


class LearnerRank:
    """What lives in a learner actor."""

    def __init__(self, spec: LearnerSpec, rank: int, backend: str, weight_sync: WeightSyncConfig) -> None:
        self._spec, self._rank, self._backend, self._weight_sync = spec, rank, backend, weight_sync
        self._learner: Any = None
        self._sender: Any = None

    def address(self) -> tuple[str, int]:
        """This node's address as the other nodes reach it, and a free port for the ranks to meet at."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def start(self, world_size: int, host: str, port: int) -> None:
        """Load the model and meet the other ranks."""
        import torch
        from weight_sync.sender import WeightSender
        from weight_sync.source import DeepSpeedSource

        from trainer.learner import Learner

        self._learner = Learner(self._spec, self._rank, world_size, host, port)
        self._sender = WeightSender(
            DeepSpeedSource(self._learner.engine, prefix="model.", dtype=getattr(torch, self._spec.dtype)),
            backend=self._backend,
            rank=self._rank,
            bucket_bytes=self._weight_sync.bucket_mib << 20,
            timeout=self._weight_sync.timeout,
        )

    def connect(self, engines: Sequence[Any], workers_per_engine: int) -> None:
        """Build the transfer group with the engines, from the first rank."""
        address = self._weight_sync.address
        host = ray.util.get_node_ip_address() if address == "auto" else address
        self._sender.connect(engines, host, 0, 1 + len(engines) * workers_per_engine)

    def prepare(self) -> Manifest:
        """Refuse weights that are not finite, and say what will be sent."""
        return self._sender.prepare()

    def send(self, version: int) -> SendReport:
        """Move the weights into every engine."""
        return self._sender.send(version)

    def train(self, rollouts: Sequence[TrainRollout], version: int) -> dict[str, float]:
        """One optimizer step."""
        return self._learner.train(rollouts, version)

    def save(self, folder: str) -> None:
        """Write what :meth:`load` continues from."""
        self._learner.save(folder)

    def load(self, folder: str) -> None:
        """Continue from what :meth:`save` wrote."""
        self._learner.load(folder)

    def export(self, folder: str) -> None:
        """Write a folder that transformers and vLLM load."""
        self._learner.export(folder)

    def steps_done(self) -> int:
        """Optimizer steps made."""
        return self._learner.steps_done

    def interrupt(self) -> None:
        """Give up the optimizer step that is being computed, if one is. Called beside the running call."""
        if self._learner is not None:
            self._learner.interrupt()

    def close(self) -> None:
        """Leave the process groups."""
        if self._sender is not None:
            self._sender.close()
        if self._learner is not None:
            self._learner.close()


class LearnerGroup:
    """All ranks of the learner. Not thread-safe: call it from one event loop."""

    def __init__(self, spec: LearnerSpec, *, backend: str, weight_sync: WeightSyncConfig) -> None:
        self._spec = spec
        self._timeout = spec.learner.timeout
        self._backend, self._weight_sync = backend, weight_sync
        self._ranks: list[Any] = []

    async def start(self) -> None:
        """Start every rank and let them meet."""
        gpus = 0.0 if self._spec.device == "cpu" else 1.0
        # A second thread of its own lets `interrupt` reach a rank in the middle of a step.
        actor = ray.remote(num_cpus=0, num_gpus=gpus, concurrency_groups={"control": 1})(LearnerRank)
        self._ranks = [
            actor.remote(self._spec, rank, self._backend, self._weight_sync) for rank in range(self._spec.learner.ranks)
        ]
        host, port = await self._call(0, "address")
        await self._all("start", len(self._ranks), host, port)

    async def connect(self, engines: Sequence[Any], workers_per_engine: int) -> None:
        """Build the group in which weights travel. Must be done before the first push, and after a failed one."""
        await self._call(0, "connect", list(engines), workers_per_engine)

    async def train(self, rollouts: Sequence[TrainRollout], version: int) -> dict[str, float]:
        """One optimizer step on ``rollouts`` by a learner of ``version``; metrics of the whole batch."""
        shared = ray.put(list(rollouts))
        return (await self._all("train", shared, version))[0]

    async def prepare(self) -> Manifest:
        """The learner's first part of a push; see :class:`weight_sync.push.Learner`."""
        return (await self._all("prepare"))[0]

    async def send(self, version: int) -> SendReport:
        """The learner's second part of a push."""
        return (await self._all("send", version))[0]

    async def save(self, folder: str) -> None:
        """Write weights and optimizer state into ``folder``."""
        await self._all("save", folder)

    async def load(self, folder: str) -> None:
        """Continue from what :meth:`save` wrote."""
        await self._all("load", folder)

    async def export(self, folder: str) -> None:
        """Write a folder that transformers and vLLM load."""
        await self._all("export", str(Path(folder).absolute()))

    async def steps_done(self) -> int:
        """Optimizer steps made since the run began, checkpoints included."""
        return await self._call(0, "steps_done")

    async def interrupt(self) -> None:
        """Give up the step in progress on every rank; the weights stay those of the last finished step."""
        await asyncio.gather(
            *(_wait(rank.interrupt.options(concurrency_group="control").remote()) for rank in self._ranks)
        )

    async def close(self, timeout: float = 5.0) -> None:
        """End every rank within ``timeout`` seconds."""
        ranks, self._ranks = self._ranks, []
        closing = [asyncio.wait_for(_wait(rank.close.remote()), timeout) for rank in ranks]
        await asyncio.gather(*closing, return_exceptions=True)
        for rank in ranks:
            ray.kill(rank)

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every rank; the first failure ends the wait: the other ranks may hang in a collective."""
        return list(await asyncio.gather(*(self._call(n, method, *arguments) for n in range(len(self._ranks)))))

    async def _call(self, rank: int, method: str, *arguments: Any) -> Any:
        reference = getattr(self._ranks[rank], method).remote(*arguments)
        try:
            return await asyncio.wait_for(_wait(reference), self._timeout)
        except TimeoutError as error:
            raise LearnerError(
                f"learner rank {rank} did not answer `{method}` within {self._timeout:.0f} s (learner.timeout)"
            ) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), Exception) else error
            raise LearnerError(f"learner rank {rank} failed in `{method}`: {type(cause).__name__}: {cause}") from cause
        except ray.exceptions.RayActorError as error:
            raise LearnerError(f"learner rank {rank} died during `{method}`: {error}") from error


async def _wait(reference: Any) -> Any:
    """A Ray object reference as a coroutine, which ``asyncio.wait_for`` may cancel."""
    return await reference
