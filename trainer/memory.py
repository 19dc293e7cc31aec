"""Whether a run fits into the memory of the device: an estimate from the configuration and the model's files.

It counts what is there for certain (weights, gradients, optimizer, KV cache, one chunk of logits) and nothing that
depends on the library (activations, buffers, the processes themselves): what it refuses cannot run, and what it lets
pass may still be too much. Pure functions, but for the four that read the machine.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.checks import ConfigError
from trainer.config import Config
from trainer.model import ResolvedModel
from trainer.model_size import ModelSize, model_size
from trainer.placement import (
    CPU_BLOCK_SIZE,
    KV_BYTES_ON_CPU,
    all_engines,
    device_kind,
    longest_response,
    shares_gpu,
)

GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2}
"""Of an element in the dtype that engines and the learner's forward pass compute in."""
MASTER, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes a trained parameter takes in float32: the weight that is updated, AdamW's two moments, the gradient."""


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that one process takes at least, in bytes, and what it is for."""

    what: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.what}: {self.bytes / GIB:.1f} GiB"


def check_memory(config: Config, model: ResolvedModel, longest_prompt: int) -> None:
    """Raise :class:`ConfigError` where engines or learner cannot fit into what this machine has.

    On a cluster only what the configuration itself bounds is looked at: nobody has seen its nodes yet.
    """
    size = model_size(Path(model.path))
    context = config.engine.max_model_len or longest_prompt + longest_response(config)[1]
    here = config.ray.address is None
    if device_kind(config) == "cpu":
        check_kv_cache(config, size, BYTES[model.dtype], context)
        if here and (memory := host_memory()):
            check_host(config, size, BYTES[model.dtype], model.vocabulary or 0, memory)
    elif here and (memory := gpu_memory()):
        check_gpu(config, size, BYTES[model.dtype], model.vocabulary or 0, context, memory)


def engine_need(config: Config, size: ModelSize, width: int, kv_bytes: int) -> Need:
    """Of one worker of an engine. ``width``: bytes of an element."""
    on_cpu = device_kind(config) == "cpu"  # on GPUs nothing is staged, and the copy for deltas is in the host's memory
    copies = 1 + config.weight_sync.staging + config.weight_sync.delta if on_cpu else 1
    weights = (size.parameters or 0) * width * copies // config.engine.tensor_parallel
    return Need("a worker of an engine, weights and KV cache", weights + kv_bytes)


def learner_need(config: Config, size: ModelSize, width: int, vocabulary: int) -> Need:
    """Of one learner rank: see ``trainer.learner_setup.deepspeed_config`` for what ZeRO shards at which stage."""
    learner = config.learner
    stage = max(learner.zero_stage, 1) if width == BYTES["bfloat16"] else learner.zero_stage
    sharded = [max(learner.ranks, 1) if stage >= least else 1 for least in (1, 2, 3)]
    parameters = size.parameters or 0
    need = parameters * width // sharded[2]
    if not learner.lora.rank:
        need += parameters * GRADIENT // sharded[1]
        if not learner.offload:
            master = MASTER if width != MASTER else 0  # in float32 the weights themselves
            need += parameters * (master + MOMENTS) // sharded[0]
    if config.algorithm.kl.coefficient > 0 and not (learner.lora.rank and config.algorithm.kl.model is None):
        need += parameters * width // sharded[2]  # the reference, as large as the policy where it is another model
    need += min(learner.logprob_chunk, learner.micro_batch_tokens) * vocabulary * BYTES["float32"]
    return Need("a learner rank, weights, gradients, optimizer and a chunk of logits", need)


def check_kv_cache(config: Config, size: ModelSize, width: int, context: int) -> None:
    """On CPU: raise :class:`ConfigError` where the KV cache has no room for a single rollout; vLLM would refuse it."""
    per_token = size.kv_bytes(width, config.engine.tensor_parallel)
    if per_token is None:
        return
    there = (config.engine.kv_cache_mib << 20) or KV_BYTES_ON_CPU
    blocks = -(-context // CPU_BLOCK_SIZE) + 1  # vLLM keeps one back
    needed = blocks * CPU_BLOCK_SIZE * per_token
    if needed > there:
        raise ConfigError(
            f"`engine.kv_cache_mib={there >> 20}` is too small for one rollout: {context} tokens, prompt and response, "
            f"take {-(-needed // (1 << 20))} MiB; raise it, or lower `engine.max_model_len` or `sampling.max_tokens`"
        )


def check_host(config: Config, size: ModelSize, width: int, vocabulary: int, memory: int) -> None:
    """Raise :class:`ConfigError` where all processes of a run on CPU together need more than ``memory`` bytes."""
    kv_bytes = (config.engine.kv_cache_mib << 20) or KV_BYTES_ON_CPU
    workers, ranks = all_engines(config) * config.engine.tensor_parallel, config.learner.ranks
    engine, learner = engine_need(config, size, width, kv_bytes), learner_need(config, size, width, vocabulary)
    total = workers * engine.bytes + ranks * learner.bytes
    if total > memory:
        raise ConfigError(
            f"the run needs at least {total / GIB:.1f} GiB of memory, and this machine has {memory / GIB:.1f}: "
            f"{workers} x ({engine}), {ranks} x ({learner}). Take a smaller `model.path`, fewer of `engine.count` and "
            "`learner.ranks`, a smaller `engine.kv_cache_mib`, or `learner.lora.rank=16`"
        )


def check_gpu(config: Config, size: ModelSize, width: int, vocabulary: int, context: int, memory: int) -> None:
    """Raise :class:`ConfigError` where an engine or a learner rank needs more than a GPU's ``memory`` bytes."""
    share = config.engine.gpu_memory_utilization
    kv_bytes = (size.kv_bytes(width, config.engine.tensor_parallel) or 0) * context
    engine, learner = engine_need(config, size, width, kv_bytes), learner_need(config, size, width, vocabulary)
    if engine.bytes > share * memory:
        raise ConfigError(
            f"an engine does not fit: {engine} for a single rollout of {context} tokens, and "
            f"`engine.gpu_memory_utilization={share:g}` of a GPU is {share * memory / GIB:.1f} GiB. Raise it or "
            "`engine.tensor_parallel`, lower `engine.max_model_len` or `sampling.max_tokens`, or take a smaller "
            "`model.path`"
        )
    left = (1 - share) * memory if shares_gpu(config) else memory
    if config.learner.ranks and learner.bytes > left:
        beside = f" beside `engine.gpu_memory_utilization={share:g}`" if shares_gpu(config) else ""
        raise ConfigError(
            f"the learner does not fit: {learner}, and a GPU has {left / GIB:.1f} GiB{beside}. Shard it with "
            "`learner.zero_stage=3` and more `learner.ranks`, or use `learner.offload=true`, `learner.lora.rank=16` or "
            "a smaller `model.path`"
        )


def host_memory(proc: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this machine has, or the container that this process is in; ``None`` where nothing says so."""
    try:
        total = re.search(r"^MemTotal:\s+(\d+) kB", proc.read_text(encoding="utf-8"), flags=re.MULTILINE)
    except OSError:
        return None
    limits = [int(total[1]) << 10] if total else []
    return min([*limits, *_container_limits(groups)], default=None)


def _container_limits(groups: Path) -> Iterator[int]:
    """Of both versions of control groups; without a limit there is no number, or one beyond any memory."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (groups / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdecimal():
            yield int(text)


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU of this machine; ``None`` where ``nvidia-smi`` does not say."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    sizes = [int(line) << 20 for line in answer.split() if line.isdecimal()]
    return min(sizes, default=None)
