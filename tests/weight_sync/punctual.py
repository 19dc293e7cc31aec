"""Members of a transfer group: those that a test counts on come in time, however busy the machine is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

LEFT = r"(?i)connection (closed|reset)|broken pipe"
"""How gloo says that a peer has gone, and not: timed out. Which it says depends on what it was about."""


def always_come(patch: pytest.MonkeyPatch, *ranks: int) -> None:
    """The deadline of rank 0 for the others begins when ``ranks`` have come."""

    class Patient(TCPStore):
        def wait(self, keys: list[str], *limit: Any) -> None:
            super().wait([f"arrived/{rank}" for rank in ranks], timedelta(seconds=120))
            super().wait(keys, *limit)

    patch.setattr("weight_sync.group.TCPStore", Patient)
