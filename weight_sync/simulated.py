"""The learner's side of a push to simulated engines: nothing travels but the version and the list of what would."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from generator.simulated_stream import sequence_logprobs
from weight_sync.canary import Logprobs, Sequences
from weight_sync.manifest import Manifest, ManifestEntry
from weight_sync.push import PushError

MANIFEST = Manifest((ManifestEntry("w", "float32", (2,)),))


class SimulatedSender:
    """Has the methods that :class:`weight_sync.push.Pusher` asks of a learner. ``seconds`` is what a transfer takes.

    ``staging``: what it sends waits in the engines until they are told to swap it in.
    """

    def __init__(self, seconds: float = 0.0, staging: bool = False) -> None:
        self.seconds = seconds
        self.staging = staging
        self.members: Sequence[Any] = ()

    def connect(self, handles: Sequence[Any]) -> None:
        """From now on the weights go to these :class:`generator.simulated.SimulatedEngine`."""
        self.members = handles

    async def prepare(self, base: int | None = None) -> Manifest:
        return MANIFEST

    async def logprobs(self, sequences: Sequences) -> Logprobs:
        return sequence_logprobs(sequences)

    async def base_logprobs(self, sequences: Sequences) -> Logprobs:
        return sequence_logprobs(sequences)

    async def send(self, version: int, hashed: bool = False) -> int:
        """Load ``version`` into every member, or stage it. Raises :class:`PushError` naming the first that failed."""
        if self.seconds:
            await asyncio.sleep(self.seconds)
        loads = [
            engine.stage(version, MANIFEST) if self.staging else engine.load(version, MANIFEST)
            for engine in self.members
        ]
        results = await asyncio.gather(*loads, return_exceptions=True)
        for engine, result in zip(self.members, results, strict=True):
            if isinstance(result, BaseException):
                raise PushError("update_weights", result, engine.name) from result
        return MANIFEST.total_bytes
