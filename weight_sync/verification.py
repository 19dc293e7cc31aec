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
    adapter is pushed, which at version 0 changes nothing, so that only version 1 shows whether engines apply it.
    """

    when: VerifyWord | int = "none"
    dtype: str = "float32"
    sequences: Sequences = ()
    adapters: bool = False

    def wanted(self, version: int, unproven: bool) -> bool:
        """Whether to prove the push of ``version``. ``unproven``: nothing was, since engines joined or left last."""
        if self.when == "none":
            return False
        if unproven or self.when == "every" or (self.adapters and version == 1):
            return True
        return isinstance(self.when, int) and version % self.when == 0
