"""The tokens of a micro-batch as the loss sees them: one flat row, padding does not exist here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from trainer.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The response tokens of a micro-batch, flat. Every field is ``[T]``; all tokens of a rollout are in it."""

    logprobs: Tensor
    """Current policy; float, carries the gradient."""
    behaviour_logprobs: Tensor
    """Policy that sampled the token; float."""
    advantages: Tensor
    """Float."""
    loss_mask: Tensor
    """Bool: whether the loss sees the token. What stands in the other places cannot reach the loss."""
    sequence: Tensor
    """int64: number of the token's rollout inside the micro-batch."""
    group: Tensor
    """int64: number of the token's prompt group inside the batch, an index into ``Denominators.prompt_tokens``."""
    lags: Tensor
    """int64: the learner's version minus the version that sampled the token."""
    entropy: Tensor
    """Entropy of the current policy at the token, float; carries a gradient where ``entropy_bonus`` is not 0."""
    proximal_logprobs: Tensor | None = None
    """Policy before the first update on this batch, float; ``algorithm.proximal=recomputed`` needs it."""
    reference_logprobs: Tensor | None = None
    """Frozen reference policy, float; a KL penalty needs it."""


def token_batch(micro: MicroBatch, logprobs: Tensor, entropy: Tensor) -> TokenBatch:
    """What the loss sees of a micro-batch, with the current policy's ``logprobs`` and ``entropy``, both ``[T]``."""
    return TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=micro.behaviour_logprobs,
        advantages=micro.advantages,
        loss_mask=micro.loss_mask,
        sequence=micro.sequence,
        group=micro.group,
        lags=micro.lags,
        entropy=entropy,
        proximal_logprobs=micro.proximal_logprobs,
        reference_logprobs=micro.reference_logprobs,
    )
