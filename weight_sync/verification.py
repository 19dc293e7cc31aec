"""Which pushes are proven: ``weight_sync.verify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weight_sync.canary import Sequences

VerifyWord = Literal["none", "first", "every"]


@dataclass(frozen=True, slots=True)
class Verification:
    """``when`` is a word, or n for the first push and every n-th version.

    ``dtype`` is the one in which learner and engines compute; ``sequences`` are what both compute on. ``adapters``: an
    adapter is pushed. At version 0 it changes nothing, and for some versions too little for the canary to tell an
    engine that leaves it out; until one could, pushes are proven as soon as the learner finds that it would.
    """

    when: VerifyWord | int = "none"
    dtype: str = "float32"
    sequences: Sequences = ()
    adapters: bool = False

    def wanted(self, version: int, unproven: bool) -> bool:
        """Whether to prove the push of ``version``. ``unproven``: nothing was, since engines joined or left last."""
        if self.when == "none":
            return False
        if unproven or self.when == "every":
            return True
        return isinstance(self.when, int) and version % self.when == 0

    @property
    def of_adapters(self) -> bool:
        """Whether a push is to show that engines apply the adapter."""
        return self.adapters and self.when != "none"
