"""Diagnostics of a batch as additive sums: exact over any split into micro-batches and ranks. Pure.

A mean of per-rank means is not the mean. So each micro-batch yields sums (and maxima), they are added (and maximised)
over micro-batches and ranks, and only the result is divided. Everything is float64: importance ratios are not clamped
here, and their squares stay finite up to log-ratios of 300.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SUMS = (
    "loss",
    "tokens",
    "log_ratio",
    "k3",
    "abs_log_ratio",
    "ratio",
    "ratio_squared",
    "entropy",
    "clipped_low",
    "clipped_high",
    "truncated",
)
"""What is summed over tokens with the loss mask set, in the order of :attr:`DiagnosticSums.sums`."""

_EXPONENT_LIMIT = 300.0


@dataclass(frozen=True, slots=True)
class DiagnosticSums:
    """Additive parts of the diagnostics: ``sums`` ``[len(SUMS)]`` and ``maximum`` ``[1]`` (largest log-probability
    difference), float64, so that one all-reduce with sum and one with max combine the ranks."""

    sums: Tensor
    maximum: Tensor

    def __add__(self, other: DiagnosticSums) -> DiagnosticSums:
        return DiagnosticSums(self.sums + other.sums, torch.maximum(self.maximum, other.maximum))


def zero_sums(device: torch.device | str = "cpu") -> DiagnosticSums:
    """The neutral element of the addition."""
    return DiagnosticSums(
        torch.zeros(len(SUMS), dtype=torch.float64, device=device), torch.zeros(1, dtype=torch.float64, device=device)
    )


@torch.no_grad()
def diagnostic_sums(
    *,
    loss: Tensor,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    entropy: Tensor,
    loss_mask: Tensor,
    clipped_low: Tensor,
    clipped_high: Tensor,
    truncated: Tensor,
) -> DiagnosticSums:
    """The sums of one micro-batch over its unmasked tokens.

    ``loss`` is the micro-batch's share of the batch loss (scalar); ``logprobs`` (current policy),
    ``behaviour_logprobs`` and ``entropy`` are ``[T]`` float; ``loss_mask``, ``clipped_low``, ``clipped_high`` and
    ``truncated`` are ``[T]`` bool.
    """
    log_ratio = (logprobs.double() - behaviour_logprobs.double())[loss_mask]
    ratio = log_ratio.clamp(max=_EXPONENT_LIMIT).exp()
    columns = {
        "tokens": torch.ones_like(log_ratio),
        "log_ratio": log_ratio,
        "k3": ratio - 1.0 - log_ratio,
        "abs_log_ratio": log_ratio.abs(),
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "entropy": entropy[loss_mask].double(),
        "clipped_low": clipped_low[loss_mask].double(),
        "clipped_high": clipped_high[loss_mask].double(),
        "truncated": truncated[loss_mask].double(),
    }
    sums = torch.stack([loss.double() if name == "loss" else columns[name].sum() for name in SUMS])
    maximum = log_ratio.abs().max().reshape(1) if log_ratio.numel() else log_ratio.new_zeros(1)
    return DiagnosticSums(sums, maximum)


def diagnostic_metrics(total: DiagnosticSums) -> dict[str, float]:
    """The metrics of the whole batch from its combined sums.

    ``mismatch/*`` compares the behaviour policy (which sampled) with the current policy on the sampled tokens:
    ``kl`` and ``k3_kl`` estimate KL(behaviour || current) (estimators k1 and k3 of Schulman's note on approximating
    KL), ``ratio_mean`` is the mean of current / behaviour, and ``ess`` is the effective sample size of the unclamped
    ratios as a share of the tokens, ``(sum w)^2 / (n sum w^2)``. Only ``policy/loss`` is reported when no token was
    trained.
    """
    s = dict(zip(SUMS, total.sums.tolist(), strict=True))
    metrics = {"policy/loss": s["loss"]}
    tokens = s["tokens"]
    if tokens == 0:
        return metrics
    return metrics | {
        "policy/entropy": s["entropy"] / tokens,
        "policy/clip_fraction_low": s["clipped_low"] / tokens,
        "policy/clip_fraction_high": s["clipped_high"] / tokens,
        "policy/correction_truncated_fraction": s["truncated"] / tokens,
        "mismatch/kl": -s["log_ratio"] / tokens,
        "mismatch/k3_kl": s["k3"] / tokens,
        "mismatch/logprob_abs_diff_mean": s["abs_log_ratio"] / tokens,
        "mismatch/logprob_abs_diff_max": total.maximum.item(),
        "mismatch/ratio_mean": s["ratio"] / tokens,
        "mismatch/ess": s["ratio"] ** 2 / (tokens * s["ratio_squared"]) if s["ratio_squared"] > 0 else 0.0,
    }
