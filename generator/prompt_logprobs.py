"""Log-probabilities of given sequences from a running vLLM, through its own forward path."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_numbers = itertools.count()


async def prompt_logprobs(llm: AsyncLLM, sequences: Sequence[Sequence[int]], adapter: Any = None) -> list[list[float]]:
    """For each sequence of token ids, the log-probability of every token but the first, at temperature 1.

    vLLM must not be paused. The sequences run side by side, as rollouts do: on CPU a single bfloat16 row is computed by
    another kernel. They read nothing from the prefix cache. ``adapter`` is the LoRA request of the adapter to compute
    with, if any.
    """
    return await asyncio.gather(*(_of_one(llm, sequence, adapter) for sequence in sequences))


async def _of_one(llm: AsyncLLM, sequence: Sequence[int], adapter: Any) -> list[float]:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    # vLLM has no request without an output token; this one is thrown away. Log-probabilities of a prompt are those of
    # the raw logits in every ``logprobs_mode``.
    params = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    logprobs: list[float] = []
    name = f"prompt-logprobs/{next(_numbers)}"
    async for output in llm.generate(tokens_input(list(sequence)), params, name, lora_request=adapter):
        entries: list[Any] = list(output.prompt_logprobs or ())
        logprobs = [entry[token_id].logprob for token_id, entry in zip(sequence[1:], entries[1:], strict=True)]
    return logprobs
