"""What a learner rank is made of: specification, process, model, optimizer and DeepSpeed's configuration.

DeepSpeed and transformers are imported inside the functions: nothing here costs more than torch until a learner starts.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from trainer import packed_attention
from trainer.config import AlgorithmConfig, LearnerConfig, OptimizerConfig
from trainer.zero_files import zero_stage

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Forward dtypes that the learner trains in, by the name that ``model.dtype`` takes."""


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """Everything that all ranks of a learner share. Picklable."""

    model_path: str
    """A folder or hub id that transformers can load."""
    dtype: str
    """Dtype of the forward pass: float32, or bfloat16 with float32 master weights."""
    device: str
    """cpu (collectives over gloo) or cuda (nccl; the rank's process sees its own GPU as the first)."""
    temperature: float
    """The sampling temperature of the engines."""
    seed: int
    steps: int
    """Of the run: what the learning rate falls over, where ``optimizer.schedule`` lets it fall."""
    trust_remote_code: bool
    learner: LearnerConfig
    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    gpus: float = 1.0
    """GPUs that a rank reserves where ``device`` is cuda; less than 1 where it shares one with an engine."""


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """How weights travel from a learner's first rank to the engines of one pool. Picklable.

    The fields without a word of their own are those of :class:`weight_sync.sender.WeightSender` and its ``connect``.
    Weights travel in the dtype of the forward pass, which is also the engines'.
    """

    pool: str
    """The learner keeps a sender for each."""
    engines: Sequence[Any]
    """Ray actor handles."""
    names: Sequence[str]
    workers: Sequence[int]
    address: str
    backend: str
    bucket_bytes: int
    timeout: float
    staging: str | None = None
    deltas: bool = False
    adapters: bool = False
    """Push adapters alone, with a :class:`weight_sync.adapter_sender.AdapterSender`."""


def deepspeed_config(spec: LearnerSpec) -> dict[str, Any]:
    """The DeepSpeed configuration of a spec.

    Raises ``ValueError`` where the optimizer is to be offloaded and no stage shards it.
    """
    bfloat16 = spec.dtype == "bfloat16"
    stage = zero_stage(spec.learner.zero_stage, spec.dtype)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # The true number differs from step to step: the learner sets the boundary and scales the loss itself.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": spec.optimizer.max_grad_norm if stage > 0 else 0.0,
        "zero_optimization": {"stage": stage},
    }
    if spec.learner.offload:
        if stage == 0:
            raise ValueError("learner.offload needs learner.zero_stage 1, 2 or 3: stage 0 has no offload")
        pinned = spec.device == "cuda"
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
        # PyTorch's fused AdamW runs on CPU too; DeepSpeed's own has to be compiled on the machine.
        config["zero_force_ds_cpu_optimizer"] = False
    if bfloat16:
        config |= {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    return config


def prepare_process(spec: LearnerSpec, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
    """Environment, threads, seed and log levels of this rank's process, before DeepSpeed is imported."""
    if spec.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        # Ray sets OMP_NUM_THREADS=1 for an actor; the cores are shared out evenly unless the configuration says.
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(spec.learner.cpu_threads or max(1, cores // world_size))
    elif spec.learner.cpu_threads > 0:
        torch.set_num_threads(spec.learner.cpu_threads)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }
    if master_addr.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.manual_seed(spec.seed)
    from deepspeed.utils.logging import set_log_level_from_string
    from transformers.utils.logging import disable_progress_bar

    set_log_level_from_string("warning")
    disable_progress_bar()
    # DeepSpeed 0.19.8 calls names that torch 2.13 renamed, once for every bucket.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def join_process_group(spec: LearnerSpec, rank: int, world_size: int) -> None:
    import deepspeed

    # On CPU, DeepSpeed would compile a shared-memory all-reduce that only its inference uses: half a minute of gcc.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if spec.device == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=spec.learner.timeout),
        verbose=False,
    )


def load_model(spec: LearnerSpec, path: str) -> Any:
    """The causal language model at ``path`` in the forward dtype, with all dropout off: the engine samples without."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, trust_remote_code=spec.trust_remote_code)
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=DTYPES[spec.dtype],
        attn_implementation=attention_for(spec.learner.packing),
        trust_remote_code=spec.trust_remote_code,
    )
    if spec.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def architecture(path: str, trust_remote_code: bool, dtype: torch.dtype | None = None) -> Any:
    """The model at ``path`` without its weights: nothing of them is read, and no memory is taken."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def attention_for(packing: str) -> str:
    """The name of the attention that a model of transformers needs for a ``learner.packing``."""
    if packing == "padded":
        return "sdpa"
    from transformers import AttentionInterface

    AttentionInterface.register(packed_attention.NAME, packed_attention.packed_attention)
    return packed_attention.NAME


def register_head(policy: Any) -> None:
    """For ZeRO stage 3: the policy reads the head's weight outside of the head's own forward."""
    import deepspeed

    for parameter in policy.model.get_output_embeddings().parameters():
        deepspeed.zero.register_external_parameter(policy, parameter)


def adamw(parameters: Any, spec: LearnerSpec) -> torch.optim.AdamW:
    """PyTorch's fused AdamW: one pass over the memory, on CPU and GPU, and no extension to compile."""
    optimizer = spec.optimizer
    return torch.optim.AdamW(
        parameters,
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        fused=True,
    )


def save_tokenizer(model_path: str, trust_remote_code: bool, folder: str | Path) -> None:
    """Write the tokenizer of a model into ``folder``; a model without one only has that said."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        logger.warning("the export in %s has no tokenizer: %s has none that loads (%s)", folder, model_path, error)
        return
    tokenizer.save_pretrained(str(folder))
