"""Diagnostics: right by hand on a few tokens, and exact over any split."""

import math

import pytest
import torch

from trainer.diagnostics import DiagnosticSums, diagnostic_metrics, diagnostic_sums, zero_sums

BEHAVIOUR = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0])
CURRENT = torch.tensor([-1.5, -1.0, -0.5, -2.5, -9.0])
MASK = torch.tensor([True, True, True, True, False])


def sums(rows: slice = slice(None), current: torch.Tensor = CURRENT) -> DiagnosticSums:
    return diagnostic_sums(
        loss=torch.tensor(0.25),
        logprobs=current[rows],
        behaviour_logprobs=BEHAVIOUR[rows],
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0])[rows],
        loss_mask=MASK[rows],
        clipped_low=torch.tensor([True, False, False, False, True])[rows],
        clipped_high=torch.tensor([False, True, True, False, True])[rows],
        truncated=torch.tensor([True, True, True, False, True])[rows],
    )


def test_values_are_those_of_the_definitions_over_unmasked_tokens():
    log_ratios = [-0.5, 1.0, 0.0, 0.5]
    ratios = [math.exp(x) for x in log_ratios]
    expected = {
        "policy/loss": 0.25,
        "policy/entropy": 2.5,
        "policy/clip_fraction_low": 0.25,
        "policy/clip_fraction_high": 0.5,
        "policy/correction_truncated_fraction": 0.75,
        "mismatch/kl": -sum(log_ratios) / 4,
        "mismatch/k3_kl": sum(r - 1 - x for r, x in zip(ratios, log_ratios, strict=True)) / 4,
        "mismatch/logprob_abs_diff_mean": 0.5,
        "mismatch/logprob_abs_diff_max": 1.0,
        "mismatch/ratio_mean": sum(ratios) / 4,
        "mismatch/ess": sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)),
    }
    assert diagnostic_metrics(sums()) == pytest.approx(expected)


def test_identical_policies_have_no_mismatch_and_a_full_effective_sample_size():
    metrics = diagnostic_metrics(sums(current=BEHAVIOUR))
    assert metrics["mismatch/kl"] == metrics["mismatch/k3_kl"] == metrics["mismatch/logprob_abs_diff_max"] == 0.0
    assert metrics["mismatch/ess"] == metrics["mismatch/ratio_mean"] == 1.0


@pytest.mark.parametrize("cut", range(6))
def test_parts_of_any_size_combine_into_the_values_of_the_whole(cut):
    whole = diagnostic_metrics(sums())
    combined = diagnostic_metrics(zero_sums() + sums(slice(0, cut)) + sums(slice(cut, None)))
    assert combined.pop("policy/loss") == pytest.approx(2 * whole.pop("policy/loss"))  # shares of the loss add up
    assert combined == pytest.approx(whole)


def test_one_dominating_ratio_shows_in_the_effective_sample_size_because_nothing_is_clamped():
    metrics = diagnostic_metrics(sums(current=BEHAVIOUR + torch.tensor([80.0, 0.0, 0.0, 0.0, 0.0])))
    assert metrics["mismatch/ess"] == pytest.approx(1 / 4)


def test_without_a_trained_token_only_the_loss_is_reported():
    assert diagnostic_metrics(zero_sums()) == {"policy/loss": 0.0}
