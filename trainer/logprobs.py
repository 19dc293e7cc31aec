"""Log-probabilities and entropy of response tokens straight from hidden states, a chunk of tokens at a time."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LOG_ZERO = -1e4
"""Stands for the logarithm of a probability of 0, so that their product is 0 and not NaN."""


def chunked_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both ``[T]`` in at least float32.

    ``hidden`` is ``[T, H]``, ``head_weight`` ``[V, H]``, ``bias`` ``[V]`` or none, ``targets`` ``[T]`` int64. Logits
    are computed in the dtype of ``hidden`` (as the engine computes them), then divided by ``temperature`` and
    normalised in float32 or wider. The logits of at most ``chunk`` tokens exist at a time, forward and backward. The
    log-probabilities are differentiable in ``hidden``, ``head_weight`` and ``bias``; the entropy is where
    ``entropy_gradient`` asks for it.

    Raises ``ValueError`` for a temperature or chunk that is not positive.
    """
    if not temperature > 0:
        raise ValueError(
            f"sampling.temperature is {temperature}; a policy can be trained only at a temperature above 0"
        )
    if chunk < 1:
        raise ValueError(f"learner.logprob_chunk is {chunk}; it must be at least 1 token")
    return _ChunkedLogprobs.apply(hidden, head_weight, bias, targets, temperature, chunk, entropy_gradient)


class _ChunkedLogprobs(torch.autograd.Function):
    """Recomputes logits chunk by chunk in backward, except for the last chunk of the forward pass.

    Keeping one chunk's probabilities costs no more memory than the bound allows, and means that a micro-batch with no
    more response tokens than ``chunk`` runs the head only once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(targets.shape, dtype=dtype)
        entropy = torch.empty_like(logprobs)
        kept = None
        for rows in _chunks(targets.numel(), chunk):
            kept = None  # freed before the next chunk's logits exist
            log_p = _log_softmax(hidden[rows], weight, bias, temperature, dtype)
            logprobs[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
            probabilities = log_p.exp()
            mean = torch.linalg.vecdot(probabilities, log_p)
            if mean.isnan().any():
                # A token that the model rules out entirely has p = 0 and log p = -inf; its share of the entropy is 0.
                # Seldom so, and the copy is as large as the logits: only then.
                mean = torch.linalg.vecdot(probabilities, log_p.clamp(min=torch.finfo(dtype).min))
            entropy[rows] = -mean
            kept = probabilities
            del log_p, probabilities
        ctx.save_for_backward(hidden, weight, bias, targets, entropy if entropy_gradient else None)
        ctx.temperature, ctx.chunk, ctx.dtype = temperature, chunk, dtype
        ctx.kept = kept if any(ctx.needs_input_grad[:3]) else None
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=ctx.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=ctx.dtype) if needs_bias else None
        for rows in reversed(_chunks(targets.numel(), ctx.chunk)):
            probabilities, ctx.kept = ctx.kept, None
            if probabilities is None:
                probabilities = _log_softmax(hidden[rows], weight, bias, ctx.temperature, ctx.dtype).exp_()
            scale = (grad_logprobs[rows] / ctx.temperature).unsqueeze(1)
            # d log p(target) / d logits = (onehot(target) - p) / temperature, built in the memory of p.
            factor = -scale
            if entropy is not None:
                # d entropy / d logits = -p (log p + entropy) / temperature, where 0 log 0 is 0.
                slope = probabilities.log().clamp_(min=_LOG_ZERO).add_(entropy[rows, None])
                factor = slope.mul_((-grad_entropy[rows] / ctx.temperature).unsqueeze(1)).sub_(scale)
                del slope
            grad_logits = probabilities.mul_(factor).scatter_add_(1, targets[rows, None], scale)
            del factor
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, hidden[rows])
            del probabilities, grad_logits
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _chunks(tokens: int, chunk: int) -> list[slice]:
    """All of them full but the first, so that the last, which backward need not recompute, is as large as it may be."""
    starts = [0, *range(tokens % chunk or chunk, tokens, chunk)]
    return [slice(start, end) for start, end in itertools.pairwise([*starts, tokens]) if start < end]


def _add_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """``total += grad_logits^T @ hidden``, without a temporary where the dtypes agree."""
    if total.dtype == grad_logits.dtype:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total += grad_logits.t() @ hidden


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor:
    """Log-probabilities ``[tokens, V]`` in ``dtype``."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
    if temperature != 1.0:
        logits /= temperature
    return torch.log_softmax(logits, dim=-1)
