"""What rollouts cannot be sampled with: by vLLM, across a resubmission, or so that the learner can learn from them."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.algorithm import combinations
from trainer.allowed import TEMPERATURES
from trainer.config import Config


def problem(config: Config) -> str | None:
    """What is wrong with the first setting that cannot work, for people; ``None`` when all is well."""
    for problems in (_temperatures(config), _distribution(config), _lengths(config), _resumable(config)):
        for found in problems:
            return found
    return None


def _temperatures(config: Config) -> Iterator[str]:
    lowest, highest = TEMPERATURES
    if config.sampling.temperature == 0:
        yield (
            "`sampling.temperature=0`: greedy decoding makes every rollout of a group the same, so no advantage can be "
            "computed; use a temperature such as 1.0"
        )
    both = {"sampling": config.sampling.temperature, "evaluation": config.evaluation.temperature}
    for section, temperature in both.items():
        if temperature and not lowest <= temperature <= highest:
            greedy = ", or 0 for greedy decoding" if section == "evaluation" else ""
            yield (
                f"`{section}.temperature={temperature}`: engines sample at {lowest:g} to {highest:g}; use a value "
                f"between them{greedy}"
            )


def _distribution(config: Config) -> Iterator[str]:
    sampling = config.sampling
    if not 0 < sampling.top_p <= 1:
        yield f"`sampling.top_p={sampling.top_p}`: the value must be greater than 0 and at most 1"
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        # L5: the engine renormalises over the kept tokens, the learner's softmax runs over all of them.
        yield (
            "`sampling.top_p`, `sampling.top_k` and `sampling.min_p` make the engine's log-probabilities incomparable "
            "with the learner's; leave them at 1.0, 0 and 0.0 for training"
        )


def _lengths(config: Config) -> Iterator[str]:
    sampling, context = config.sampling, config.engine.max_model_len
    if sampling.min_tokens > sampling.max_tokens:
        yield f"`sampling.min_tokens={sampling.min_tokens}` is more than `sampling.max_tokens={sampling.max_tokens}`"
    if context and context <= sampling.max_tokens:
        yield (
            f"`engine.max_model_len={context}` leaves no room for a prompt beside "
            f"`sampling.max_tokens={sampling.max_tokens}`"
        )


def _resumable(config: Config) -> Iterator[str]:
    """What a resubmission cannot continue, and what samples from a distribution that the learner does not compute."""
    sampling = config.sampling
    if any(not string or "\N{REPLACEMENT CHARACTER}" in string for string in sampling.stop):
        yield f"`sampling.stop={sampling.stop}`: a stop string holds at least one character, and no U+FFFD"
    output_only = {"presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty}
    for name, penalty in output_only.items():
        if not -2 <= penalty <= 2:
            yield f"`sampling.{name}={penalty}`: the value must lie between -2 and 2"
        if penalty and config.weight_sync.mode == "abort":
            yield (
                f"`sampling.{name}={penalty}` counts the tokens of a request, and `weight_sync.mode=abort` continues a "
                "rollout in a new request, which would start to count again; use `weight_sync.mode=keep` or `wait`, or "
                "`sampling.repetition_penalty`, which works in every mode"
            )
    penalties = {"repetition_penalty": sampling.repetition_penalty - 1, **output_only}
    penalised = [f"`sampling.{name}`" for name, penalty in penalties.items() if penalty]
    if penalised and not combinations.corrected(config.algorithm):
        # Unlike top-p, a penalty leaves every token a probability above 0, so an importance ratio is defined.
        yield (
            f"{', '.join(penalised)}: penalties make the engine's log-probabilities incomparable with the learner's, "
            "which does not apply them; only an importance ratio against the engine makes up for that, so use "
            "`algorithm.correction.weight=token`, or leave the penalties off"
        )
