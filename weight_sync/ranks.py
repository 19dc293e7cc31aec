"""Ranks in the transfer group: the learner's sender is 0, the workers of all engines follow, one rank each.

With two engines of tensor parallel size 2 the group has five members::

    rank    0        1            2            3            4
            sender   engine 0/0   engine 0/1   engine 1/0   engine 1/1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


def rank_offsets(workers_per_engine: Sequence[int]) -> list[int]:
    """The rank of each engine's first worker. An engine has data times tensor times pipeline parallel size workers."""
    if any(workers < 1 for workers in workers_per_engine):
        raise ValueError(f"every engine has at least one worker, got {list(workers_per_engine)}")
    return list(accumulate(workers_per_engine, initial=1))[:-1]


def group_size(workers_per_engine: Sequence[int]) -> int:
    """Members of the transfer group: the sender and every worker."""
    return 1 + sum(workers_per_engine)


def engine_at(rank: int, workers_per_engine: Sequence[int]) -> int:
    """The index of the engine that a rank from 1 on belongs to."""
    return bisect_right(rank_offsets(workers_per_engine), rank) - 1


def worker_rank(*, rank_offset: int, data_parallel_index: int, workers_per_replica: int, rank_in_replica: int) -> int:
    """The rank of one worker, as vLLM's broadcast engines compute it.

    ``workers_per_replica`` is tensor times pipeline parallel size; ``rank_in_replica`` counts within it.
    """
    return rank_offset + data_parallel_index * workers_per_replica + rank_in_replica
