"""A learner and engines that do what a script says at each step of a push."""

import asyncio
from collections.abc import Iterator

from weight_sync.manifest import Manifest, ManifestEntry
from weight_sync.push import Pusher

MANIFEST = Manifest((ManifestEntry("w", "float32", (2,)),))
ORDER = ["prepare", "gate", "transfer", "confirm", "publish", "resume"]
STAGED = ["prepare", "transfer", "gate", "swap", "confirm", "publish", "resume"]


class Script:
    """A learner and engines in one, that write down what is asked of them and fail or hang where they are told to."""

    def __init__(self, fail_at: str | None = None, hang_at: str | None = None) -> None:
        self.fail_at, self.hang_at = fail_at, hang_at
        self.calls: list[str] = []
        self.members_changed = False
        self.quarantined: list[str | None] = []
        self.engines_left = 0
        """How many failures cost an engine and leave others to go on with."""
        self.published: list[int] = []
        self.sent_bytes = MANIFEST.total_bytes
        self.hashed: list[bool] = []
        self.bases: list[int | None] = []
        """What each push was told that the engines hold."""
        self.off_by: dict[str, float | None] = {"engine 0": 0.0, "engine 1": 0.0}
        """How wrong each engine's log-probabilities are; ``None``: it holds frozen requests."""
        self.adapter_adds: Iterator[float] = iter(())
        """What the adapter of each push that is asked about changes of the learner's log-probabilities."""

    async def _do(self, step: str) -> None:
        self.calls.append(step)
        await asyncio.sleep(0)
        if step == self.hang_at:
            await asyncio.Event().wait()
        if step == self.fail_at:
            raise ConnectionError("the cable is out")

    async def prepare(self, base: int | None) -> Manifest:
        self.bases.append(base)
        await self._do("prepare")
        return MANIFEST

    async def logprobs(self, sequences) -> list[list[float]]:
        await self._do("learner's logprobs")
        return [[-1.0] * (len(sequence) - 1) for sequence in sequences]

    async def base_logprobs(self, sequences) -> list[list[float]]:
        added = next(self.adapter_adds)
        return [[-1.0 - added] * (len(sequence) - 1) for sequence in sequences]

    async def send(self, version: int, hashed: bool) -> int:
        self.hashed.append(hashed)
        await self._do("transfer")
        return self.sent_bytes

    async def close_gate(self) -> None:
        await self._do("gate")

    async def swap(self, version: int) -> None:
        await self._do("swap")

    async def confirm(self, version: int, manifest: Manifest) -> None:
        assert manifest == MANIFEST
        await self._do("confirm")

    async def prompt_logprobs(self, sequences) -> dict[str, list[list[float]] | None]:
        await self._do("verify")
        return {
            name: None if error is None else [[error - 1.0] * (len(sequence) - 1) for sequence in sequences]
            for name, error in self.off_by.items()
        }

    def publish(self, version: int) -> None:
        self.calls.append("publish")
        if self.fail_at == "publish":
            raise ConnectionError("the cable is out")
        self.published.append(version)

    async def resume(self) -> None:
        await self._do("resume")

    async def quarantine(self, engine: str | None, reason: str) -> bool:
        self.quarantined.append(engine)
        self.off_by.pop(engine, None)
        self.engines_left -= 1
        return self.engines_left >= 0

    async def connect(self) -> None:
        await self._do("connect")
        self.members_changed = False


def pusher(script: Script, **options) -> Pusher:
    return Pusher(learner=script, engines=script, connect=script.connect, **{"timeout": 120.0, **options})
