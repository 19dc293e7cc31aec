"""Tokens for the tests of the loss, and the loss of them through the code under test."""

import math
import random
from dataclasses import replace
from typing import Any

import torch

from tests.trainer.algorithm.reference import Case
from trainer.algorithm.aggregation import Denominators
from trainer.algorithm.diagnostics import DiagnosticSums
from trainer.algorithm.loss import policy_loss
from trainer.algorithm.tokens import TokenBatch
from trainer.config import AlgorithmConfig, CorrectionConfig

LENGTHS = (3, 1, 3, 1, 2)
GROUPS = (0, 0, 1, 2, 2)


def make_case(advantages: list[float] | None = None, seed: int = 0, spread: float = 0.6) -> Case:
    """Five rollouts to three prompts; some tokens masked, every rollout with at least one that is not."""
    r = random.Random(seed)
    sequence = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    current = [-0.05 - 2.0 * r.random() for _ in sequence]
    per_rollout = advantages or [r.uniform(-1, 1) for _ in LENGTHS]
    first = [t for t in range(len(sequence)) if t == 0 or sequence[t] != sequence[t - 1]]
    return Case(
        current=current,
        behaviour=[min(x + r.gauss(0, spread), -0.01) for x in current],
        proximal=[min(x + r.gauss(0, spread / 2), -0.01) for x in current],
        reference=[min(x + r.gauss(0, spread), -0.01) for x in current],
        entropy=[r.random() for _ in sequence],
        mask=[t in first or r.random() < 0.75 for t in range(len(sequence))],
        sequence=sequence,
        group=[GROUPS[number] for number in sequence],
        lags=[r.randint(0, 4) for _ in sequence],
        advantages=[per_rollout[number] for number in sequence],
    )


def algorithm(correction: dict[str, Any] | None = None, **keys: Any) -> AlgorithmConfig:
    return replace(AlgorithmConfig(sum_length=7, **keys), correction=CorrectionConfig(**(correction or {})))


def denominators(case: Case) -> Denominators:
    counts = [0] * (1 + max(case.group, default=-1))
    for seen, group in zip(case.mask, case.group, strict=True):
        counts[group] += seen
    seen = {s for s, m in zip(case.sequence, case.mask, strict=True) if m}
    return Denominators(sum(case.mask), len(seen), tuple(counts))


def tokens(case: Case, dtype: torch.dtype = torch.float64) -> TokenBatch:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return TokenBatch(
        logprobs=column(case.current).requires_grad_(),
        behaviour_logprobs=column(case.behaviour),
        advantages=column(case.advantages),
        loss_mask=torch.tensor(case.mask, dtype=torch.bool),
        sequence=torch.tensor(case.sequence, dtype=torch.int64),
        group=torch.tensor(case.group, dtype=torch.int64),
        lags=torch.tensor(case.lags, dtype=torch.int64),
        entropy=column(case.entropy),
        proximal_logprobs=column(case.proximal),
        reference_logprobs=column(case.reference),
    )


def run(
    case: Case, config: AlgorithmConfig, counts: Denominators | None = None
) -> tuple[float, list[float], DiagnosticSums]:
    """Loss, gradient in the current log-probabilities, and diagnostic sums."""
    batch = tokens(case)
    loss, sums = policy_loss(batch, config, counts or denominators(case))
    (gradient,) = torch.autograd.grad(loss, batch.logprobs)
    return loss.item(), gradient.tolist(), sums


def assert_close(actual: tuple[float, list[float]], expected: tuple[float, list[float]], what: object) -> None:
    """To 1e-6 relative (and 1e-15 absolute, for sums that cancel): the value and every entry of the gradient."""
    for a, e in zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True):
        assert math.isclose(a, e, rel_tol=1e-6, abs_tol=1e-15), (what, actual, expected)
