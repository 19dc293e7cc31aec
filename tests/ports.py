"""Ports for processes that listen only after seconds of imports."""

from __future__ import annotations

import random
import socket

BELOW_THE_SYSTEMS = range(20_000, 32_000)
"""Ports that the system gives to nobody who asks for any port, or just connects, and Ray neither."""


def port_for_later() -> int:
    """A free TCP port of 127.0.0.1 that nobody takes by chance until a test's processes listen there."""
    for port in random.SystemRandom().sample(BELOW_THE_SYSTEMS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("100 ports of 127.0.0.1 are taken")
