"""Aggregation: the denominators of the whole batch make the loss independent of how it was split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.aggregation import AGGREGATIONS, Denominators, aggregate

LOSS = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0], dtype=torch.float64)
MASK = torch.tensor([True, True, False, True, True])
SEQUENCE = torch.tensor([0, 0, 0, 1, 2])
WHOLE = Denominators(tokens=4, sequences=3)


def test_token_mean_divides_by_the_tokens_of_the_batch():
    assert aggregate("token_mean", LOSS, MASK, SEQUENCE, WHOLE).item() == pytest.approx((1 + 2 + 4 + 10) / 4)


def test_sequence_mean_averages_the_means_of_the_rollouts():
    assert aggregate("sequence_mean", LOSS, MASK, SEQUENCE, WHOLE).item() == pytest.approx((1.5 + 4 + 10) / 3)


def test_sequence_sum_averages_the_sums_of_the_rollouts():
    assert aggregate("sequence_sum", LOSS, MASK, SEQUENCE, WHOLE).item() == pytest.approx((3 + 4 + 10) / 3)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    owner=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    seed=st.integers(0, 1000),
)
def test_any_split_into_micro_batches_adds_up_to_the_loss_of_the_whole_batch(name, lengths, owner, seed):
    generator = torch.Generator().manual_seed(seed)
    losses = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    masks = [torch.rand(n, generator=generator) < 0.7 for n in lengths]
    denominators = Denominators(sum(int(m.sum()) for m in masks), sum(bool(m.any()) for m in masks))

    def share(members: list[int]) -> float:
        if not members:
            empty = torch.zeros(0, dtype=torch.int64)
            return aggregate(name, empty.double(), empty.bool(), empty, denominators).item()
        sequence = torch.cat([torch.full((lengths[i],), number) for number, i in enumerate(members)])
        loss, mask = torch.cat([losses[i] for i in members]), torch.cat([masks[i] for i in members])
        return aggregate(name, loss, mask, sequence, denominators).item()

    everything = share(list(range(len(lengths))))
    parts = [share([i for i in range(len(lengths)) if owner[i] == part]) for part in range(4)]
    assert sum(parts) == pytest.approx(everything, rel=1e-12, abs=1e-12)
