"""The batch mask of M2PO against a loop that drops one outlier after another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithm.second_moment import second_moment_mask

ROWS = st.lists(
    st.tuples(st.sampled_from([-2.0, -0.5, -0.1, 0.0, 0.1, 0.3, 0.5, 2.0]), st.floats(-2, 2), st.booleans()),
    max_size=20,
)


def dropping_one_after_another(rows: list[tuple[float, float, bool]], limit: float) -> list[bool]:
    kept = [mask for _, _, mask in rows]
    while True:
        judged = [i for i, (x, a, _) in enumerate(rows) if kept[i] and ((a > 0 and x > 0) or (a < 0 and x < 0))]
        if not judged or sum(rows[i][0] ** 2 for i in judged) / len(judged) <= limit:
            return kept
        furthest = max(abs(rows[i][0]) for i in judged)
        for i in judged:
            if abs(rows[i][0]) == furthest:
                kept[i] = False


def mask(rows: list[tuple[float, float, bool]], limit: float) -> list[bool]:
    columns = [torch.tensor([row[n] for row in rows], dtype=torch.float64) for n in range(2)]
    return second_moment_mask(*columns, torch.tensor([row[2] for row in rows], dtype=torch.bool), limit).tolist()


# No mean of such squares is one of the limits: which side it falls on then would be a matter of rounding.
@given(ROWS, st.sampled_from([0.0, 0.04137, 0.20373, 1.00731]))
@settings(max_examples=200, deadline=None)
def test_the_furthest_tokens_go_until_the_rest_agree_whatever_the_order(rows, limit):
    assert mask(rows, limit) == dropping_one_after_another(rows, limit)
    assert mask(rows[::-1], limit) == mask(rows, limit)[::-1]


def test_tokens_that_move_back_towards_the_behaviour_policy_stay_however_far_they_are():
    rows = [(3.0, -1.0, True), (-3.0, 1.0, True), (3.0, 1.0, True), (0.1, 1.0, True)]
    assert mask(rows, 0.04) == [True, True, False, True]


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_masked_already_is_neither_judged_nor_restored(value):
    assert mask([(value, 1.0, False), (0.1, 1.0, True)], 0.04) == [False, True]
