import math

import pytest
import torch

from trainer.algorithm.filters import keep_group, overlong_penalty


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0], False),
        ([1.0, None], False),
        ([None, 0.0, 1.0], True),
        ([], False),
        ([1.0], False),
    ],
)
def test_a_group_is_kept_when_two_of_its_scored_rollouts_differ(rewards, kept):
    assert keep_group(rewards) is kept
    assert keep_group([math.nan if r is None else r for r in rewards]) is kept


def test_the_overlong_penalty_falls_linearly_over_the_buffer_and_not_further():
    lengths = torch.tensor([0, 80, 90, 95, 100, 130])
    assert overlong_penalty(lengths, 100, 20, 1.0).tolist() == pytest.approx([0.0, 0.0, -0.5, -0.75, -1.0, -1.0])
    assert overlong_penalty(lengths, 100, 20, 0.5).tolist() == pytest.approx([0.0, 0.0, -0.25, -0.375, -0.5, -0.5])


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_outside_the_budget_is_refused(buffer):
    with pytest.raises(ValueError, match="overlong_buffer"):
        overlong_penalty(torch.tensor([1]), 100, buffer, 1.0)
