"""Attention over packed rows, against attention with one dense mask over the whole row."""

import pytest
import torch
from torch import Tensor

from trainer import packed_attention
from trainer.packed_attention import Segments

TABLE = torch.tensor([(5, 0), (3, 0), (1, 0), (4, 3), (7, 4), (2, 4)])
"""A prompt with two responses, a plain sequence, a prompt with one response."""
LENGTH = int(TABLE[:, 0].sum())


def inputs(seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(1, heads, LENGTH, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


def dense(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    number = torch.arange(len(TABLE)).repeat_interleave(TABLE[:, 0])
    prompt = TABLE[number, 1]
    start = TABLE[:, 0].cumsum(0) - TABLE[:, 0]
    position = torch.arange(LENGTH) - start[number] + torch.where(prompt == number, 0, TABLE[prompt, 0])
    seen = (number[:, None] == number) | (prompt[:, None] == number)
    behind = position[:, None] - position
    seen &= (behind >= 0) & (behind < (window or LENGTH))
    return torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=seen, scale=0.3
    ).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3])
def test_value_and_gradient_are_those_of_a_dense_mask(window):
    expected_of, given = inputs(), inputs()
    expected = dense(*expected_of, window)
    output, weights = packed_attention.packed_attention(
        torch.nn.Module(), *given, None, segments=Segments(TABLE), scaling=0.3, sliding_window=window, dropout=0.0
    )
    assert weights is None
    torch.testing.assert_close(output, expected)
    torch.manual_seed(1)
    slope = torch.randn_like(expected)
    expected.backward(slope)
    output.backward(slope)
    for ours, theirs in zip(given, expected_of, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def varlen(query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale, window_size, enable_gqa):
    """PyTorch's attention for variable lengths, which runs on GPUs only, as its documentation describes it."""
    assert enable_gqa
    outputs = []
    for number in range(len(query_ends) - 1):
        q = query[query_ends[number] : query_ends[number + 1]].transpose(0, 1)
        k, v = (side[key_ends[number] : key_ends[number + 1]].transpose(0, 1).repeat_interleave(2, 0)
                for side in (key, value))  # fmt: skip
        assert q.shape[1] <= most_queries
        assert k.shape[1] <= most_keys
        behind = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        left = window_size[0] if window_size[0] >= 0 else LENGTH
        seen = (behind >= -window_size[1]) & (behind <= left)
        outputs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale))
    return torch.cat(outputs, dim=1).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 3])
def test_what_a_gpu_is_asked_for_in_one_call_is_the_same(monkeypatch, window):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    query, key, value = inputs()
    output = packed_attention._in_one_call(query, key, value, Segments(TABLE), 0.3, window)
    torch.testing.assert_close(output[None], dense(query, key, value, window))


def test_a_model_that_passes_no_segments_on_is_named():
    with pytest.raises(ValueError, match=r"Linear gets no segments .*learner\.packing=padded"):
        packed_attention.packed_attention(torch.nn.Linear(1, 1), *inputs(), None)


def test_attention_that_does_more_is_refused_and_not_computed_wrongly():
    with pytest.raises(ValueError, match=r"caps attention scores.*learner\.packing=padded"):
        packed_attention.packed_attention(torch.nn.Module(), *inputs(), None, segments=Segments(TABLE), softcap=30.0)
