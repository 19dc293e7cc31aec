"""Which choices of the algorithm go together; read before anything heavy starts, so torch is not imported here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import AlgorithmConfig, LearnerConfig, SamplingConfig

GROUP_RELATIVE = ("grpo", "grpo_batch_std", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Advantages that compare the rollouts of a prompt group."""

NEEDS_RATIO = ("gspo", "cispo", "sapo", "dppo", "topr")
"""Objectives that are nothing but their ratio: where it is always 1 they are another objective."""

READS_CLIP_DUAL = ("ppo_clip", "gspo")


def problem(algorithm: AlgorithmConfig, sampling: SamplingConfig, learner: LearnerConfig) -> str | None:
    """What is wrong with the first combination that cannot work, for people; ``None`` when all is well."""
    several = learner.epochs * learner.minibatches > 1
    for problems in (_bounds(algorithm), _correction(algorithm, several), _data(algorithm, sampling)):
        for found in problems:
            return found
    return None


PART_BY_PART = ("grpo", "dr_grpo", "rloo", "reward")
"""Advantages that look at nothing outside a prompt group."""


def whole_batch_needed(algorithm: AlgorithmConfig, learner: LearnerConfig) -> str | None:
    """Why no gradient can be computed before the batch is full, for people; ``None`` where one can.

    What the loss is a mean over is no reason: sums of gradients are divided by it at the end.
    """
    if learner.epochs * learner.minibatches > 1:
        return "`learner.epochs` and `learner.minibatches` make several updates of the whole batch"
    if "." in algorithm.advantage:
        return f"`algorithm.advantage={algorithm.advantage}` may compare a rollout with the whole batch"
    if algorithm.advantage not in PART_BY_PART:
        return f"`algorithm.advantage={algorithm.advantage}` compares a rollout with the whole batch"
    if algorithm.correction.second_moment is not None:
        return "`algorithm.correction.second_moment` drops tokens down to a mean over the whole batch"
    if "." in algorithm.aggregation:
        return f"`algorithm.aggregation={algorithm.aggregation}` may use any count of the whole batch"
    return None


def corrected(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss holds the ratio between the current policy and what sampled the tokens."""
    if algorithm.objective == "reinforce":  # measures no ratio of its own, from whatever proximal policy
        return algorithm.correction.weight != "none" and algorithm.proximal == "current"
    return algorithm.correction.weight != "none" or algorithm.proximal == "behaviour"


def _bounds(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.correction
    if algorithm.clip_low is not None and algorithm.clip_low >= 1:
        yield f"`algorithm.clip_low={algorithm.clip_low}`: the value must be below 1, or null for no lower bound"
    if algorithm.clip_dual is not None and algorithm.clip_dual <= 1:
        yield f"`algorithm.clip_dual={algorithm.clip_dual}`: the value must be above 1, or null to leave it off"
    if algorithm.clip_dual is not None and algorithm.objective not in READS_CLIP_DUAL:
        yield (
            f"`algorithm.clip_dual={algorithm.clip_dual}` has no effect with `algorithm.objective="
            f"{algorithm.objective}`; it belongs to {' and '.join(READS_CLIP_DUAL)}"
        )
    for name in ("weight", "mask"):
        low, high = getattr(correction, f"{name}_low"), getattr(correction, f"{name}_high")
        if not (low or 0.0) <= 1 <= (1 if high is None else high):
            yield (
                f"`algorithm.correction.{name}_low={low}` and `{name}_high={high}` must have the ratio 1 between them: "
                "it belongs to a token on which both policies agree"
            )
    kl = algorithm.kl
    if kl.coefficient > 0 and kl.place == "loss" and kl.estimator == "k1":
        yield (
            "`algorithm.kl.estimator=k1` with `algorithm.kl.place=loss` has no effect: its gradient has mean zero. Use "
            "`algorithm.kl.estimator=k2`, or `algorithm.kl.place=reward`"
        )
    if correction.mask != "none" and correction.mask_low is None and correction.mask_high is None:
        yield (
            f"`algorithm.correction.mask={correction.mask}` leaves nothing out without a bound; set "
            "`algorithm.correction.mask_low` or `algorithm.correction.mask_high`"
        )


def _correction(algorithm: AlgorithmConfig, several: bool) -> Iterator[str]:
    """``several``: whether a batch gets more than one update."""
    correction, objective, proximal = algorithm.correction, algorithm.objective, algorithm.proximal
    if proximal == "behaviour":
        for name, level in (("weight", correction.weight), ("mask", correction.mask)):
            if level != "none":
                yield (
                    "`algorithm.proximal=behaviour` already measures the ratio against the behaviour policy; with "
                    f"`algorithm.correction.{name}={level}` it would be applied twice, to a ratio that is 1; use "
                    f"`algorithm.correction.{name}=none`"
                )
    if objective in NEEDS_RATIO and (proximal == "current" or (proximal == "recomputed" and not several)):
        yield (
            f"`algorithm.objective={objective}` with `algorithm.proximal={proximal}` has no effect: with "
            f"{'whatever number of updates' if several else 'one update'} a batch its ratio is always 1. Use "
            "`algorithm.proximal=behaviour` with `algorithm.correction.weight=none`"
        )
    if several and proximal == "current" and objective != "reinforce" and not algorithm.allow_uncorrected:
        yield (
            f"`algorithm.objective={objective}` with `algorithm.proximal=current` and several updates a batch "
            "(`learner.epochs`, `learner.minibatches`) has no trust region: its ratio is 1 at every update and nothing "
            "is clipped. Use `algorithm.proximal=recomputed`, or ask for it with `algorithm.allow_uncorrected=true`"
        )
    if proximal == "log_linear" and (correction.weight == "none" or objective == "reinforce"):
        yield (
            "`algorithm.proximal=log_linear` lies between behaviour and current policy, so it takes both an importance "
            "weight to reach it and an objective with a ratio to go on from it; one of them is missing in "
            f"`algorithm.correction.weight={correction.weight}` with `algorithm.objective={objective}`"
        )
    if not corrected(algorithm) and not algorithm.allow_uncorrected:
        # Invariant 11: engine and learner differ numerically even on-policy, so this holds for every bound.
        yield (
            f"`algorithm.objective={objective}` with `algorithm.proximal={proximal}` and "
            f"`algorithm.correction.weight={correction.weight}` trains off-policy data as if it were on-policy: the "
            "importance ratio is always 1. Use `algorithm.correction.weight=token` with `algorithm.proximal=current`, "
            "or ask for it with `algorithm.allow_uncorrected=true`"
        )


def _data(algorithm: AlgorithmConfig, sampling: SamplingConfig) -> Iterator[str]:
    if sampling.group_size == 1 and algorithm.advantage in GROUP_RELATIVE:
        yield (
            f"`sampling.group_size=1`: the advantage `{algorithm.advantage}` compares the rollouts of a group, and one "
            "rollout has nothing to be compared with; use 2 or more, or `algorithm.advantage=reinforce_pp`"
        )
    filters = algorithm.filter
    if sampling.group_size == 1 and (filters.zero_variance or filters.refill):
        key = "zero_variance=true" if filters.zero_variance else f"refill={filters.refill}"
        yield (
            f"`algorithm.filter.{key}` with `sampling.group_size=1` takes out every group: the rewards of one rollout "
            "are always equal; leave it off, or use 2 or more"
        )
    buffer = filters.overlong_buffer
    if buffer > sampling.max_tokens:
        yield (
            f"`algorithm.filter.overlong_buffer={buffer}` is more than `sampling.max_tokens={sampling.max_tokens}`, "
            "in front of which it lies"
        )
