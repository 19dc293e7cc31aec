"""The mask of M2PO: the tokens on which the policies differ most leave the batch, until the rest agree. Pure."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def second_moment_mask(log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, limit: float) -> Tensor:
    """Which of all tokens of the *batch* the loss still sees, ``[N]`` bool; a subset of ``loss_mask``.

    ``log_ratio`` is ``[N]`` current minus behaviour log-probability before the first update, ``advantages`` ``[N]``
    float. Only tokens whose update leads away from the behaviour policy (ratio above 1 with a positive advantage, or
    below 1 with a negative one) are judged: those with the largest squared log-ratio are dropped until the mean square
    of the others is at most ``limit``. Tokens with equal log-ratios stay or go together, so the mask depends on neither
    the order nor the split of the batch.

    M2PO (arXiv:2510.01161), algorithm 1. The mean is over the whole batch, therefore this runs once, before the update,
    and the denominators of the loss are counted from what it returns.
    """
    judged = loss_mask & (((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0)))
    moments = torch.where(judged, log_ratio, 0.0).double().square()
    ordered = moments[judged].sort().values
    means = ordered.cumsum(0) / torch.arange(1, ordered.numel() + 1, device=ordered.device)
    kept = int((means <= limit).sum())  # the means never fall, so these are the first ones
    if kept == ordered.numel():
        return loss_mask.clone()
    return loss_mask & ~(judged & (moments >= ordered[kept]))
