"""The order of prompts, for any sizes, shares and cuts."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.order import PromptOrder

SETS = st.lists(st.tuples(st.integers(1, 12), st.floats(0.05, 20.0)), min_size=1, max_size=5)


def order(sets: list[tuple[int, float]], seed: int = 0, shuffle: bool = True) -> PromptOrder:
    """Of data sets of (size, weight)."""
    total = sum(weight for _, weight in sets)
    return PromptOrder([size for size, _ in sets], [weight / total for _, weight in sets], seed=seed, shuffle=shuffle)


def draw(of: PromptOrder, count: int) -> list[int]:
    return [of.next() for _ in range(count)]


def by_set(drawn: list[int], sets: list[tuple[int, float]]) -> list[list[int]]:
    """The positions of each data set in the order in which they were drawn, counted from its own start."""
    bounds = [sum(size for size, _ in sets[:number]) for number in range(len(sets) + 1)]
    return [[n - start for n in drawn if start <= n < end] for start, end in itertools.pairwise(bounds)]


@settings(deadline=None)  # a busy machine is no fault of the code
@given(SETS, st.integers(0, 5), st.booleans(), st.integers(0, 60))
def test_the_order_goes_on_as_it_would_have_after_any_cut(sets, seed, shuffle, cut):
    whole = draw(order(sets, seed, shuffle), cut + 40)
    first = order(sets, seed, shuffle)
    draw(first, cut)
    second = order(sets, seed, shuffle)
    draw(second, 7)
    second.go_to(first.position)
    assert draw(second, 40) == whole[cut:]


@settings(deadline=None)
@given(SETS, st.integers(1, 80))
def test_no_data_set_is_ever_a_whole_prompt_ahead_of_its_share(sets, count):
    drawn = by_set(draw(order(sets), count), sets)
    total = sum(weight for _, weight in sets)
    assert sum(map(len, drawn)) == count
    for (_, weight), of_set in zip(sets, drawn, strict=True):
        assert len(of_set) < count * weight / total + 1


@settings(deadline=None)
@given(SETS, st.integers(0, 5))
def test_each_epoch_of_a_data_set_has_every_prompt_once_however_often_the_others_began_again(sets, seed):
    drawn = by_set(draw(order(sets, seed), 150), sets)
    for (size, _), of_set in zip(sets, drawn, strict=True):
        for start in range(0, len(of_set) - size + 1, size):
            assert Counter(of_set[start : start + size]) == Counter(range(size))


def test_a_data_set_that_runs_out_sooner_begins_again_with_a_new_shuffle():
    sets = [(10, 3.0), (1000, 1.0)]
    small, _ = by_set(draw(order(sets), 200), sets)
    epochs = [small[start : start + 10] for start in range(0, 150, 10)]
    assert len({tuple(epoch) for epoch in epochs}) > 10
    assert [len(part) for part in by_set(draw(order(sets), 200), sets)] == [150, 50]


def test_equal_shares_take_turns_and_every_batch_has_the_mixture():
    drawn = draw(order([(8, 1.0), (8, 1.0)], shuffle=False), 6)
    assert drawn == [0, 8, 1, 9, 2, 10]
    sets = [(50, 2.0), (50, 1.0), (50, 1.0)]
    of = order(sets)
    for _ in range(10):
        assert [len(part) for part in by_set(draw(of, 8), sets)] == [4, 2, 2]


def test_data_sets_of_one_size_are_not_shuffled_alike():
    first, second = by_set(draw(order([(20, 1.0), (20, 1.0)]), 40), [(20, 1.0), (20, 1.0)])
    assert first != second


@pytest.mark.parametrize("position", [[(-1, 0)], [(0, 4)], [(0, -1)], [(0, 0), (0, 0)]])
def test_a_position_that_does_not_exist_is_refused(position):
    with pytest.raises(ValueError, match=r"does not exist|argument"):
        order([(3, 1.0)]).go_to(position)
