"""The reference model of a KL penalty: a frozen policy beside the one that is trained, without optimizer."""

from __future__ import annotations

from typing import Any

import torch

from trainer.learner_setup import LearnerSpec, load_model, register_head
from trainer.policy import PolicyModel


def load_reference(spec: LearnerSpec, vocabulary: int, device: torch.device) -> Any:
    """The policy with the weights at ``algorithm.kl.model``, in the forward dtype and in evaluation mode.

    With ZeRO stage 3 it is sharded over the ranks as the learner is, a DeepSpeed engine without an optimizer; with any
    other stage each rank has a copy. Nothing of it is in a checkpoint: it is read from its path at each start.
    Raises ``ValueError`` for a model with another number of tokens than ``vocabulary``.
    """
    import deepspeed

    path = spec.algorithm.kl.model or spec.model_path
    policy = PolicyModel(load_model(spec, path), spec.temperature, spec.learner.logprob_chunk)
    tokens = policy.model.get_input_embeddings().weight.shape[0]
    if tokens != vocabulary:
        raise ValueError(
            f"algorithm.kl.model={path} knows {tokens} tokens and the model that is trained {vocabulary}: a penalty "
            "compares what both say of the same tokens"
        )
    policy.requires_grad_(False)
    if spec.learner.zero_stage < 3:
        return policy.to(device).eval()
    register_head(policy)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    if spec.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=policy, config=config)
    engine.eval()
    return engine
