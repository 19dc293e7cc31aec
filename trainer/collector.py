"""The garbage collector of a driver that holds tens of thousands of objects for minutes."""

from __future__ import annotations

import gc


def relax_collector() -> None:
    """Look for reference cycles more rarely, and never in what there is already.

    A rollout in flight is a few dozen objects that live long. With Python's default, a look after every 700 new
    objects, they are looked through again and again: at 10,000 rollouts in flight that took a quarter of the driver's
    CPU time (``benchmarks/pool_scale.py``), at 100 a seventh. Objects without cycles are freed at once in any case.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 100)
