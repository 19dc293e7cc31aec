"""Diagnostics: right by hand on a few tokens, and exact over any split."""

import math
from dataclasses import fields, replace

import pytest
import torch

from trainer.algorithm.corrections import Correction
from trainer.algorithm.diagnostics import DiagnosticSums, diagnostic_metrics, diagnostic_sums, zero_sums
from trainer.algorithm.objectives import TokenLoss
from trainer.algorithm.tokens import TokenBatch
from trainer.watch.catalogue import unknown

BATCH = TokenBatch(
    logprobs=torch.tensor([-1.5, -1.0, -0.5, -2.5, -9.0]),
    behaviour_logprobs=torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0]),
    advantages=torch.ones(5),
    loss_mask=torch.tensor([True, True, True, True, False]),
    sequence=torch.zeros(5, dtype=torch.int64),
    group=torch.zeros(5, dtype=torch.int64),
    lags=torch.tensor([0, 0, 1, 7, 2]),
    entropy=torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0]),
)
OBJECTIVE = TokenLoss(
    loss=torch.zeros(5),
    clipped_low=torch.tensor([True, False, False, False, True]),
    clipped_high=torch.tensor([False, True, True, False, True]),
)
CORRECTION = Correction(
    weights=torch.ones(5),
    truncated=torch.tensor([True, True, True, False, True]),
    masked=torch.tensor([False, False, False, True, True]),
)


def sums(rows: slice = slice(None), **columns: torch.Tensor) -> DiagnosticSums:
    batch = replace(BATCH, **columns)

    def part(whole):
        return replace(
            whole,
            **{f.name: v[rows] for f in fields(whole) if isinstance(v := getattr(whole, f.name), torch.Tensor)},
        )

    return diagnostic_sums(part(batch), torch.tensor(0.25), part(OBJECTIVE), part(CORRECTION))


def test_values_are_those_of_the_definitions_over_unmasked_tokens():
    log_ratios = [-0.5, 1.0, 0.0, 0.5]
    ratios = [math.exp(x) for x in log_ratios]
    expected = {
        "policy/loss": 0.25,
        "policy/entropy": 2.5,
        "policy/clip_fraction_low": 0.25,
        "policy/clip_fraction_high": 0.5,
        "policy/correction_truncated_fraction": 0.75,
        "policy/correction_masked_fraction": 0.25,
        "mismatch/kl": -sum(log_ratios) / 4,
        "mismatch/k3_kl": sum(r - 1 - x for r, x in zip(ratios, log_ratios, strict=True)) / 4,
        "mismatch/logprob_abs_diff_mean": 0.5,
        "mismatch/logprob_abs_diff_max": 1.0,
        "mismatch/ratio_mean": sum(ratios) / 4,
        "mismatch/ess": sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)),
    }
    metrics = diagnostic_metrics(sums())
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_the_same_is_told_by_token_age_for_the_ages_that_occur():
    metrics = diagnostic_metrics(sums())
    assert {name.split("/")[1] for name in metrics if name.startswith("by_lag/")} == {"0", "1", "3_or_more"}
    assert metrics["by_lag/0/token_fraction"] == 0.5
    assert metrics["by_lag/0/kl"] == pytest.approx(-0.25)
    assert metrics["by_lag/0/logprob_abs_diff_max"] == 1.0
    assert metrics["by_lag/1/kl"] == 0.0
    assert metrics["by_lag/1/ess"] == 1.0
    assert metrics["by_lag/3_or_more/ratio_mean"] == pytest.approx(math.exp(0.5))
    assert metrics["by_lag/3_or_more/correction_masked_fraction"] == 1.0


def test_the_divergence_from_a_reference_is_told_where_there_is_one():
    metrics = diagnostic_metrics(sums(reference_logprobs=BATCH.logprobs + 1.0))
    assert metrics["policy/reference_kl"] == pytest.approx(math.e - 2.0)
    assert metrics["by_lag/1/reference_kl"] == pytest.approx(math.e - 2.0)
    assert "policy/reference_kl" not in diagnostic_metrics(sums())


def test_the_loss_of_several_updates_is_their_mean_and_the_rest_is_over_all_their_tokens():
    two = diagnostic_metrics(sums() + sums(), updates=2)
    assert two == pytest.approx(diagnostic_metrics(sums()))


def test_every_metric_is_in_the_catalogue():
    assert not unknown(diagnostic_metrics(sums(reference_logprobs=BATCH.logprobs)))


def test_identical_policies_have_no_mismatch_and_a_full_effective_sample_size():
    metrics = diagnostic_metrics(sums(logprobs=BATCH.behaviour_logprobs))
    assert metrics["mismatch/kl"] == metrics["mismatch/k3_kl"] == metrics["mismatch/logprob_abs_diff_max"] == 0.0
    assert metrics["mismatch/ess"] == metrics["mismatch/ratio_mean"] == 1.0
    assert metrics["mismatch/ratio_p01"] == metrics["mismatch/ratio_p99"] == 1.0


@pytest.mark.parametrize("cut", range(6))
def test_parts_of_any_size_combine_into_the_values_of_the_whole(cut):
    whole = diagnostic_metrics(sums())
    combined = diagnostic_metrics(zero_sums() + sums(slice(0, cut)) + sums(slice(cut, None)))
    assert combined.pop("policy/loss") == pytest.approx(2 * whole.pop("policy/loss"))  # shares of the loss add up
    assert combined == pytest.approx(whole)


def test_quantiles_of_the_ratio_are_within_a_tenth_of_their_logarithm():
    generator = torch.Generator().manual_seed(0)
    log_ratio = 0.3 * torch.randn(5001, generator=generator, dtype=torch.float64)
    zero = torch.zeros_like(log_ratio)
    never = torch.zeros(5001, dtype=torch.bool)
    batch = TokenBatch(log_ratio, zero, zero, ~never, never.long(), never.long(), never.long(), zero)
    metrics = diagnostic_metrics(
        diagnostic_sums(batch, zero.sum(), TokenLoss(zero, never, never), Correction(zero, never, never))
    )
    for name, share in (("p01", 0.01), ("p99", 0.99)):
        exact = torch.quantile(log_ratio, share).item()
        assert math.log(metrics[f"mismatch/ratio_{name}"]) == pytest.approx(exact, rel=0.1)
    assert metrics["mismatch/ratio_p50"] == pytest.approx(1.0, abs=0.02)


def test_one_dominating_ratio_shows_in_the_effective_sample_size_because_nothing_is_clamped():
    metrics = diagnostic_metrics(sums(logprobs=BATCH.behaviour_logprobs + torch.tensor([80.0, 0.0, 0.0, 0.0, 0.0])))
    assert metrics["mismatch/ess"] == pytest.approx(1 / 4)


def test_without_a_trained_token_only_the_loss_is_reported():
    assert diagnostic_metrics(zero_sums()) == {"policy/loss": 0.0}
