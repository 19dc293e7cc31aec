"""The algorithm once more, from the papers, in plain Python loops over rollouts; it shares no line with the trainer.

Gradients come from complex steps: the imaginary part of ``f(x + 1e-30 i)`` is the derivative to machine precision, as
long as decisions (clips, masks) look at real parts only. Where a paper stops the gradient, the frozen copy of the
current policy stands in the formula.
"""

import cmath
import math
import statistics
from dataclasses import dataclass
from typing import Any

STEP = 1e-30


@dataclass
class Case:
    """A few tokens. ``sequence`` and ``group`` number the rollout and the prompt of each token."""

    current: list[float]
    behaviour: list[float]
    proximal: list[float]
    reference: list[float]
    entropy: list[float]
    mask: list[bool]
    sequence: list[int]
    group: list[int]
    lags: list[int]
    advantages: list[float]


def loss_and_gradient(case: Case, algorithm: Any) -> tuple[float, list[float]]:
    value = loss(case, algorithm, [complex(x) for x in case.current])
    gradient = []
    for t in range(len(case.current)):
        shifted = [complex(x, STEP if u == t else 0.0) for u, x in enumerate(case.current)]
        gradient.append(loss(case, algorithm, shifted).imag / STEP)
    return value.real, gradient


def loss(case: Case, algorithm: Any, current: list[complex]) -> complex:
    """``current`` carries the step; ``case.current`` is the same policy with the gradient stopped."""
    rollouts: dict[int, list[int]] = {}
    for t, number in enumerate(case.sequence):
        if case.mask[t]:
            rollouts.setdefault(number, []).append(t)
    prompts: dict[int, list[int]] = {}
    for t, number in enumerate(case.group):
        if case.mask[t]:
            prompts.setdefault(number, []).append(t)
    total_tokens = sum(case.mask)

    total = 0j
    for tokens in rollouts.values():
        anchor = {t: proximal(case, algorithm, t) for t in tokens}
        rho = {t: anchor[t] - case.behaviour[t] for t in tokens}  # logarithms
        ratios = {t: current[t] - anchor[t] for t in tokens}
        frozen = {t: case.current[t] - anchor[t] for t in tokens}
        in_rollout = 0j
        for t in tokens:
            weight = correction(algorithm.correction, rho, t)
            token = objective(algorithm, case.advantages[t], current[t], ratios, frozen, anchor[t], t)
            token += algorithm.kl.coefficient * kl(algorithm.kl.estimator, current[t] - case.reference[t])
            token = weight * token - algorithm.entropy_bonus * case.entropy[t]
            if algorithm.aggregation == "token_mean":
                total += token / total_tokens
            elif algorithm.aggregation == "prompt_mean":
                total += token / len(prompts[case.group[t]]) / len(prompts)
            elif algorithm.aggregation == "sequence_mean":
                in_rollout += token / len(tokens)
            else:
                in_rollout += token / algorithm.sum_length
        total += in_rollout / len(rollouts)
    return total


def proximal(case: Case, algorithm: Any, t: int) -> float:
    if algorithm.proximal == "current":
        return case.current[t]
    if algorithm.proximal == "behaviour":
        return case.behaviour[t]
    if algorithm.proximal == "recomputed":
        return case.proximal[t]
    alpha = 0.0 if case.lags[t] == 0 else 1.0 / case.lags[t]
    return alpha * case.behaviour[t] + (1.0 - alpha) * case.current[t]


def level(name: str, rho: dict[int, float], t: int) -> float:
    if name == "none":
        return 1.0
    if name == "token":
        return math.exp(rho[t])
    product = math.prod(math.exp(x) for x in rho.values())
    return product if name == "sequence_product" else product ** (1.0 / len(rho))


def correction(settings: Any, rho: dict[int, float], t: int) -> float:
    judged = level(settings.mask, rho, t)
    if settings.mask_low is not None and judged < settings.mask_low:
        return 0.0
    if settings.mask_high is not None and judged > settings.mask_high:
        return 0.0
    weight = level(settings.weight, rho, t)
    if settings.weight_low is not None:
        weight = max(weight, settings.weight_low)
    if settings.weight_high is not None:
        weight = min(weight, settings.weight_high)
    return weight


def objective(
    algorithm: Any,
    advantage: float,
    current: complex,
    ratios: dict[int, complex],
    frozen: dict[int, float],
    anchor: float,
    t: int,
) -> complex:
    """``ratios`` and ``frozen``: the rollout's log-ratios with and without the step; ``anchor``: a log-probability."""
    low = -math.inf if algorithm.clip_low is None else 1 - algorithm.clip_low
    high = math.inf if algorithm.clip_high is None else 1 + algorithm.clip_high
    r, r_frozen = cmath.exp(ratios[t]), math.exp(frozen[t])
    if algorithm.objective == "ppo_clip":
        return clipped(r, advantage, low, high, algorithm.clip_dual)
    if algorithm.objective == "gspo":
        s = cmath.exp(sum(ratios.values()) / len(ratios))
        return clipped(s, advantage, low, high, algorithm.clip_dual)
    if algorithm.objective == "reinforce":
        return -advantage * current
    if algorithm.objective == "cispo":
        return -min(max(r_frozen, low), high) * advantage * current
    if algorithm.objective == "sapo":
        tau = algorithm.gate_positive if advantage > 0 else algorithm.gate_negative
        return -(4.0 / tau) / (1.0 + cmath.exp(-tau * (r - 1.0))) * advantage
    if algorithm.objective == "topr":
        product = math.prod(math.exp(x) for x in frozen.values())
        return -(1.0 if advantage >= 0 else min(max(product, 0.0), 1.0)) * advantage * current
    p, q = math.exp(anchor), math.exp(anchor + frozen[t])
    distance = abs(p - q)
    if algorithm.divergence == "kl":
        distance = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    away = (advantage > 0 and r_frozen > 1) or (advantage < 0 and r_frozen < 1)
    return 0j if away and distance > algorithm.divergence_limit else -r * advantage


def clipped(ratio: complex, advantage: float, low: float, high: float, dual: float | None) -> complex:
    """The smaller of the plain and the clipped surrogate; with a dual clip never below ``dual * advantage``."""
    bounded = ratio if low <= ratio.real <= high else complex(low if ratio.real < low else high)
    surrogate = min(ratio * advantage, bounded * advantage, key=lambda z: z.real)
    if dual is not None and advantage < 0:
        surrogate = max(surrogate, complex(dual * advantage), key=lambda z: z.real)
    return -surrogate


def kl(estimator: str, x: complex) -> complex:
    return {"k1": x, "k2": x * x / 2.0, "k3": cmath.exp(-x) - 1.0 + x}[estimator]


def advantages(rewards: list[float | None], groups: list[int], name: str) -> list[float]:
    """``None`` is a rollout without a reward."""
    scored = [r for r in rewards if r is not None]
    members: dict[int, list[float]] = {}
    for r, g in zip(rewards, groups, strict=True):
        if r is not None:
            members.setdefault(g, []).append(r)
    centred = [
        0.0 if len(set(members[g])) < 2 else r - statistics.fmean(members[g])
        for r, g in zip(rewards, groups, strict=True)
        if r is not None
    ]
    result = []
    for r, g in zip(rewards, groups, strict=True):
        if r is None:
            result.append(0.0)
            continue
        if name == "reward":
            result.append(r)
            continue
        if name == "reinforce_pp":
            flat = len(set(scored)) < 2
            result.append(0.0 if flat else (r - statistics.fmean(scored)) / (statistics.stdev(scored) + 1e-6))
            continue
        own = members[g]
        if len(set(own)) < 2:
            result.append(0.0)
        elif name == "rloo":
            result.append(r - (sum(own) - r) / (len(own) - 1))
        else:
            scale = {
                "dr_grpo": 1.0,
                "grpo": statistics.stdev(own) + 1e-6,
                "grpo_batch_std": statistics.stdev(scored) + 1e-6,
                "reinforce_pp_baseline": statistics.stdev(centred) + 1e-6,
            }[name]
            result.append((r - statistics.fmean(own)) / scale)
    return result
