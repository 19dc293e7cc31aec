"""Aggregation: the denominators of the whole batch make the loss independent of how it was split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithm.aggregation import AGGREGATIONS, Denominators, aggregate
from trainer.algorithm.tokens import TokenBatch
from trainer.config import AlgorithmConfig


def batch(mask: torch.Tensor, sequence: torch.Tensor, group: torch.Tensor) -> TokenBatch:
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    lags = torch.zeros(mask.shape, dtype=torch.int64)
    return TokenBatch(nothing, nothing, nothing, mask, sequence, group, lags, nothing)


LOSS = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0], dtype=torch.float64)
BATCH = batch(
    torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 0, 0, 0, 1])
)
WHOLE = Denominators(tokens=4, sequences=3, prompt_tokens=(3, 1, 0))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", (1 + 2 + 4 + 10) / 4),
        ("sequence_mean", (1.5 + 4 + 10) / 3),
        ("sequence_sum", (3 / 8 + 4 / 8 + 10 / 8) / 3),
        ("prompt_mean", ((1 + 2 + 4) / 3 + 10) / 2),
    ],
)
def test_each_mean_is_the_one_of_its_name(name, expected):
    config = AlgorithmConfig(aggregation=name, sum_length=8)
    assert aggregate(LOSS, BATCH, WHOLE, config).item() == pytest.approx(expected)


def test_a_sum_without_its_constant_is_refused():
    with pytest.raises(ValueError, match="sum_length is 0"):
        aggregate(LOSS, BATCH, WHOLE, AlgorithmConfig(aggregation="sequence_sum"))


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    prompts=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    owner=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    seed=st.integers(0, 1000),
)
def test_any_split_into_micro_batches_adds_up_to_the_loss_of_the_whole_batch(name, lengths, prompts, owner, seed):
    generator = torch.Generator().manual_seed(seed)
    losses = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    masks = [torch.rand(n, generator=generator) < 0.7 for n in lengths]
    tokens = [int(m.sum()) for m in masks]
    counts = [sum(n for n, p in zip(tokens, prompts, strict=False) if p == prompt) for prompt in range(4)]
    denominators = Denominators(sum(tokens), sum(n > 0 for n in tokens), tuple(counts))
    config = AlgorithmConfig(aggregation=name, sum_length=5)

    def share(members: list[int]) -> float:
        def flat(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
            return torch.cat([torch.zeros(0, dtype=dtype), *parts])

        sequence = flat([torch.full((lengths[i],), number) for number, i in enumerate(members)], torch.int64)
        group = flat([torch.full((lengths[i],), prompts[i]) for i in members], torch.int64)
        here = batch(flat([masks[i] for i in members], torch.bool), sequence, group)
        return aggregate(flat([losses[i] for i in members], torch.float64), here, denominators, config).item()

    everything = share(list(range(len(lengths))))
    parts = [share([i for i in range(len(lengths)) if owner[i] == part]) for part in range(4)]
    assert sum(parts) == pytest.approx(everything, rel=1e-12, abs=1e-12)
