"""What the learner must agree with: a loop over one rollout at a time in plain PyTorch, on a tiny model."""

from __future__ import annotations

import random
from typing import Any

import torch

from trainer.train_rollout import TrainRollout, split_minibatches

VOCABULARY = 23
EPSILON = 1e-5
"""AdamW's. With its usual 1e-8 the first updates of a weight whose gradient is nearly 0 are the rounding of that
gradient: a few such weights of the tiny model make up to 2e-5 of the norm of all updates."""


def batch(seed: int = 0, groups: int = 3, size: int = 4) -> list[TrainRollout]:
    r = random.Random(seed)
    rollouts = []
    for group in range(groups):
        prompt = tuple(r.choices(range(VOCABULARY), k=3 + 2 * group))
        for number in range(size):
            n = r.randint(1, 9)
            rollouts.append(
                TrainRollout(
                    id=f"{group}.{number}",
                    group=group,
                    prompt_token_ids=prompt,
                    response_token_ids=tuple(r.choices(range(VOCABULARY), k=n)),
                    logprobs=tuple(-2.0 - 2.0 * r.random() for _ in range(n)),
                    versions=(0,) * n,
                    loss_mask=tuple(r.random() < 0.8 for _ in range(n)),
                    advantage=0.0 if number == 3 else r.uniform(-1, 1),
                )
            )
    return rollouts


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def response_logprobs(model: Any, rollout: TrainRollout) -> torch.Tensor:
    """Of one rollout's response tokens, as a plain sequence."""
    logits = model(torch.tensor([rollout.prompt_token_ids + rollout.response_token_ids])).logits[0] / 0.8
    log_p = torch.log_softmax(logits, -1)[len(rollout.prompt_token_ids) - 1 : -1]
    return log_p[range(len(rollout.response_token_ids)), list(rollout.response_token_ids)]


def reference_update(
    rollouts: list[list[TrainRollout]], loss: Any = None, epochs: int = 1, minibatches: int = 1, first_step: int = 0
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Clipped AdamW steps of a plain PyTorch loop in float64, one rollout at a time: weights and gradient norms.

    ``loss`` is one of the functions below; it gets the log-probabilities, the rollout, and its log-probabilities under
    the weights before the batch and under those at start, and returns the loss of each token.
    """
    model, start = tiny_model().double(), tiny_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.01)
    norms = []
    for step, whole in enumerate(rollouts, start=first_step):
        with torch.no_grad():
            fixed = {r.id: (response_logprobs(model, r), response_logprobs(start, r)) for r in whole}
        masks = {r.id: torch.tensor(r.loss_mask) for r in whole}
        if loss is m2po_loss:
            masks = m2po_masks(whole, {r.id: fixed[r.id][0] for r in whole})
        for part in split_minibatches(whole, epochs, minibatches, f"0/{step}"):
            tokens = sum(int(masks[r.id].sum()) for r in part)
            total = torch.zeros(())
            for r in part:
                per_token = (loss or weighted_loss)(response_logprobs(model, r), r, *fixed[r.id])
                total = total + (per_token * masks[r.id]).sum() / tokens
            optimizer.zero_grad()
            total.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def weighted_loss(current: torch.Tensor, r: TrainRollout, *_: torch.Tensor) -> torch.Tensor:
    """The policy gradient with truncated importance weights."""
    return -(current.detach() - torch.tensor(r.logprobs)).exp().clamp(max=2.0) * r.advantage * current


def decoupled_loss(current: torch.Tensor, r: TrainRollout, before: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Clipped ratios against the weights before the batch, weights from there to the engine, a KL penalty (k2)."""
    ratio = (current - before).exp()
    clipped = torch.minimum(ratio * r.advantage, ratio.clamp(0.8, 1.2) * r.advantage)
    weight = (before - torch.tensor(r.logprobs)).exp().clamp(max=2.0)
    return weight * (-clipped + 0.3 * (current - start).square() / 2)


def m2po_loss(current: torch.Tensor, r: TrainRollout, *_: torch.Tensor) -> torch.Tensor:
    """Ratios against the engine, not clipped."""
    return -(current - torch.tensor(r.logprobs)).exp() * r.advantage


def m2po_masks(rollouts: list[TrainRollout], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is left when the furthest of the tokens that move away are dropped one by one."""
    masks = {r.id: torch.tensor(r.loss_mask) for r in rollouts}
    away = []
    for r in rollouts:
        for token, log_ratio in enumerate((before[r.id] - torch.tensor(r.logprobs)).tolist()):
            if r.loss_mask[token] and log_ratio * r.advantage > 0:
                away.append((log_ratio**2, r.id, token))
    away.sort()
    while away and sum(moment for moment, *_ in away) / len(away) > 0.2:
        _, rollout, token = away.pop()
        masks[rollout][token] = False
    return masks


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of two updates, relative to the norm of the second."""
    difference = sum(float((a[name].double() - b[name].double()).square().sum()) for name in start)
    return (difference / sum(float((b[name].double() - start[name].double()).square().sum()) for name in start)) ** 0.5
