import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.ranks import engine_at, group_size, rank_offsets, worker_rank


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=5))
def test_every_worker_of_every_engine_has_a_rank_of_its_own_and_none_is_left_over(engines):
    workers = [replicas * per_replica for replicas, per_replica in engines]
    ranks = [
        worker_rank(
            rank_offset=offset,
            data_parallel_index=replica,
            workers_per_replica=per_replica,
            rank_in_replica=rank,
        )
        for offset, (replicas, per_replica) in zip(rank_offsets(workers), engines, strict=True)
        for replica in range(replicas)
        for rank in range(per_replica)
    ]
    assert sorted([0, *ranks]) == list(range(group_size(workers)))


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
@pytest.mark.parametrize("data_parallel", [1, 2])
def test_ranks_run_through_engines_then_data_parallel_replicas_then_tensor_parallel_workers(
    engines, tensor_parallel, data_parallel
):
    offsets = rank_offsets([tensor_parallel * data_parallel] * engines)
    ranks = [
        worker_rank(
            rank_offset=offsets[engine],
            data_parallel_index=replica,
            workers_per_replica=tensor_parallel,
            rank_in_replica=worker,
        )
        for engine, replica, worker in itertools.product(range(engines), range(data_parallel), range(tensor_parallel))
    ]
    assert ranks == list(range(1, 1 + engines * tensor_parallel * data_parallel))


def test_two_engines_of_tensor_parallel_two_follow_the_sender():
    assert rank_offsets([2, 2]) == [1, 3]
    assert group_size([2, 2]) == 5


def test_a_rank_belongs_to_the_engine_whose_workers_it_is_among():
    assert [engine_at(rank, [2, 1, 3]) for rank in range(1, 7)] == [0, 0, 1, 2, 2, 2]


def test_an_engine_without_workers_is_refused():
    with pytest.raises(ValueError, match="at least one worker"):
        rank_offsets([1, 0])
