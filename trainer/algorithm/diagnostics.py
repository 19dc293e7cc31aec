"""Diagnostics of a batch as additive sums: exact over any split into micro-batches and ranks. Pure.

A mean of per-rank means is not the mean. So each micro-batch yields sums (and maxima), they are added (and maximised)
over micro-batches and ranks, and only the result is divided. Everything is kept by token age, and is float64:
importance ratios are not clamped here, and their squares stay finite up to log-ratios of 300. Quantiles come from a
histogram with fixed bins, which adds up too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm.corrections import Correction
from trainer.algorithm.objectives import TokenLoss
from trainer.algorithm.tokens import TokenBatch

COLUMNS = (
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
    "masked",
    "reference_tokens",
    "reference_k3",
)
"""What is summed over the tokens of each age that have the loss mask set."""

AGES = ("0", "1", "2", "3_or_more")
"""Token ages that are told apart: the learner's version minus the token's."""

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
"""Quantiles of the ratio, by the end of their metric's name."""

BINS = 255
"""Bins of the histogram of log-ratios; odd, so that one bin has its centre at 0."""

_EXPONENT_LIMIT = 300.0
_FINEST = 1e-3  # the histogram is about linear below this log-ratio and logarithmic above
_LARGEST = 20.0  # log-ratios beyond it fall into the outermost bins


@dataclass(frozen=True, slots=True)
class DiagnosticSums:
    """Additive parts of the diagnostics, float64, so that one all-reduce with sum and one with max combine the ranks.

    ``sums`` is ``[1 + len(AGES) * len(COLUMNS) + BINS]``: the loss, the columns of each age, the histogram.
    ``maximum`` is ``[len(AGES)]``: the largest log-probability difference of each age.
    """

    sums: Tensor
    maximum: Tensor

    def __add__(self, other: DiagnosticSums) -> DiagnosticSums:
        return DiagnosticSums(self.sums + other.sums, torch.maximum(self.maximum, other.maximum))

    def with_loss_times(self, factor: float) -> DiagnosticSums:
        """The same of a loss that is ``factor`` times this one."""
        return DiagnosticSums(torch.cat([self.sums[:1] * factor, self.sums[1:]]), self.maximum)

    @property
    def loss(self) -> float:
        """The loss that was minimised."""
        return self.sums[0].item()


def zero_sums(device: torch.device | str = "cpu") -> DiagnosticSums:
    """The neutral element of the addition."""
    length = 1 + len(AGES) * len(COLUMNS) + BINS
    return DiagnosticSums(
        torch.zeros(length, dtype=torch.float64, device=device),
        torch.zeros(len(AGES), dtype=torch.float64, device=device),
    )


@torch.no_grad()
def diagnostic_sums(batch: TokenBatch, loss: Tensor, objective: TokenLoss, correction: Correction) -> DiagnosticSums:
    """The sums of one micro-batch over its unmasked tokens. ``loss`` is its share of the batch loss (scalar)."""
    seen = batch.loss_mask
    log_ratio = (batch.logprobs.double() - batch.behaviour_logprobs.double())[seen]
    ratio = log_ratio.clamp(max=_EXPONENT_LIMIT).exp()
    columns = {
        "tokens": torch.ones_like(log_ratio),
        "log_ratio": log_ratio,
        "k3": ratio - 1.0 - log_ratio,
        "abs_log_ratio": log_ratio.abs(),
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "entropy": batch.entropy[seen].double(),
        "clipped_low": objective.clipped_low[seen].double(),
        "clipped_high": objective.clipped_high[seen].double(),
        "truncated": correction.truncated[seen].double(),
        "masked": correction.masked[seen].double(),
        **_against_reference(batch),
    }
    table = torch.stack([columns[name] for name in COLUMNS], dim=1)
    age = batch.lags[seen].clamp(0, len(AGES) - 1)
    by_age = table.new_zeros(len(AGES), len(COLUMNS)).index_add(0, age, table)
    maximum = log_ratio.new_zeros(len(AGES)).scatter_reduce(0, age, log_ratio.abs(), "amax")
    sums = torch.cat([loss.double().reshape(1), by_age.flatten(), _histogram(log_ratio)])
    return DiagnosticSums(sums, maximum)


def _against_reference(batch: TokenBatch) -> dict[str, Tensor]:
    """The columns of KL(current || reference) by the k3 estimator; zeros where the batch carries no reference."""
    logprobs = batch.logprobs[batch.loss_mask].double()
    if batch.reference_logprobs is None:
        return dict.fromkeys(("reference_tokens", "reference_k3"), torch.zeros_like(logprobs))
    log_ratio = logprobs - batch.reference_logprobs[batch.loss_mask].double()
    k3 = (-log_ratio).clamp(max=_EXPONENT_LIMIT).exp() - 1.0 + log_ratio
    return {"reference_tokens": torch.ones_like(logprobs), "reference_k3": k3}


def diagnostic_metrics(total: DiagnosticSums, updates: int = 1) -> dict[str, float]:
    """The metrics of the whole batch from its combined sums, over ``updates`` optimizer updates.

    ``policy/loss`` is the mean over the updates; everything else is over all tokens of all of them.

    ``mismatch/*`` compares the behaviour policy (which sampled) with the current policy on the sampled tokens:
    ``kl`` and ``k3_kl`` estimate KL(behaviour || current) (estimators k1 and k3 of Schulman's note on approximating
    KL), ``ratio_mean`` and ``ratio_p*`` describe current / behaviour, and ``ess`` is the effective sample size of the
    unclamped ratios as a share of the tokens, ``(sum w)^2 / (n sum w^2)``. ``by_lag/*`` is the same by token age, for
    the ages that occur. Only ``policy/loss`` is reported when no token was trained.
    """
    metrics = {"policy/loss": total.loss / updates}
    by_age = total.sums[1:-BINS].reshape(len(AGES), len(COLUMNS))
    tokens = by_age[:, 0].sum().item()
    if tokens == 0:
        return metrics
    for name, value in _means(by_age.sum(0), total.maximum.max()).items():
        metrics[f"{_HEADS.get(name, 'mismatch')}/{name}"] = value
    histogram = total.sums[-BINS:]
    metrics |= {f"mismatch/ratio_{name}": _quantile(histogram, share) for name, share in QUANTILES.items()}
    for age, sums, maximum in zip(AGES, by_age, total.maximum, strict=True):
        if sums[0] > 0:
            metrics[f"by_lag/{age}/token_fraction"] = sums[0].item() / tokens
            metrics |= {f"by_lag/{age}/{name}": value for name, value in _means(sums, maximum).items()}
    return metrics


_HEADS = {
    "entropy": "policy",
    "clip_fraction_low": "policy",
    "clip_fraction_high": "policy",
    "correction_truncated_fraction": "policy",
    "correction_masked_fraction": "policy",
    "reference_kl": "policy",
}
"""Where a metric of the whole batch stands if not under ``mismatch``."""


def _means(sums: Tensor, maximum: Tensor) -> dict[str, float]:
    """The metrics of some tokens, at least one, from their sums over :data:`COLUMNS`."""
    s = dict(zip(COLUMNS, sums.tolist(), strict=True))
    tokens, squares = s["tokens"], s["ratio_squared"]
    return {
        "entropy": s["entropy"] / tokens,
        "clip_fraction_low": s["clipped_low"] / tokens,
        "clip_fraction_high": s["clipped_high"] / tokens,
        "correction_truncated_fraction": s["truncated"] / tokens,
        "correction_masked_fraction": s["masked"] / tokens,
        "kl": -s["log_ratio"] / tokens,
        "k3_kl": s["k3"] / tokens,
        "logprob_abs_diff_mean": s["abs_log_ratio"] / tokens,
        "logprob_abs_diff_max": maximum.item(),
        "ratio_mean": s["ratio"] / tokens,
        "ess": s["ratio"] ** 2 / (tokens * squares) if squares > 0 else 0.0,
    } | ({"reference_kl": s["reference_k3"] / s["reference_tokens"]} if s["reference_tokens"] else {})


def _histogram(log_ratio: Tensor) -> Tensor:
    """Tokens in each bin, ``[BINS]`` float64. The bins are equal steps of ``asinh(log_ratio / _FINEST)``."""
    # A log-ratio that is not finite breaks the step anyway; here it only must not break the index.
    finite = log_ratio.nan_to_num(0.0, _LARGEST, -_LARGEST)
    position = torch.asinh(finite / _FINEST) / math.asinh(_LARGEST / _FINEST)
    bins = ((position.clamp(-1.0, 1.0) + 1.0) / 2.0 * (BINS - 1)).round().long()
    return torch.bincount(bins, minlength=BINS).double()


def _quantile(histogram: Tensor, share: float) -> float:
    """The ratio at the centre of the bin where the given share of the tokens is reached; within 9% of the log-ratio."""
    reached = torch.cumsum(histogram, 0) >= share * histogram.sum()
    position = 2.0 * int(reached.int().argmax()) / (BINS - 1) - 1.0
    return math.exp(_FINEST * math.sinh(position * math.asinh(_LARGEST / _FINEST)))
