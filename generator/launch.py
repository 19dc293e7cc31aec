"""What vLLM is told: the settings of one engine, and the sampling parameters of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from generator.adapter import engine_arguments
from generator.pressure import PressureGauge
from generator.prestart import quick_imports, use_prestarted_core
from generator.resume import Sampling, Submission

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


SEVERAL_WORKERS = "generator.executor.WorkersExecutor"
"""The executor of an engine with several workers on one machine, by the path under which vLLM imports it."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine needs to start. Sizes in tokens unless the name says otherwise."""

    name: str
    model_path: str
    dtype: str
    sampling: Sampling
    max_model_len: int
    max_running: int
    transfer_backend: str
    seed: int
    tensor_parallel: int
    enforce_eager: bool
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    """Size of the KV cache on CPU; ``None`` on GPU, where ``gpu_memory_utilization`` says it."""
    rollout_timeout: float
    """Seconds a request may go without a new token before it is taken back and submitted again."""
    rollout_tries: int
    """So many requests of a rollout in a row may run into ``rollout_timeout`` before the rollout has failed."""
    pause_timeout: float
    """Seconds a pause may take, in mode ``wait`` beside the time in which requests run to their end."""
    drain_timeout: float
    """Seconds in which the requests of mode ``wait`` must have run to their end."""
    trust_remote_code: bool
    block_size: int | None = None
    """Tokens of a KV-cache block, the grain at which prompts are shared; ``None``: vLLM chooses."""
    lora_rank: int = 0
    """Rank of the adapter that belongs to every version; 0: none does."""
    lora_targets: tuple[str, ...] = ()
    """The layers that it is for, by the last parts of their names: by more vLLM does not find parts of fused layers."""
    executor: str | None = None
    """vLLM's ``distributed_executor_backend``, or the path of a class; ``None``: vLLM chooses."""
    prestart_core: bool = False
    """Whether the engine core's imports run beside the engine's, see ``generator.prestart``."""
    loaded_version: int | None = None
    """The version of the weights in the model folder, which the engine then loads; ``None``: it starts with random
    ones, and a push brings the first."""
    pressure: bool = False
    """Whether vLLM counts how full its KV cache is and what it preempts, see ``generator.pressure``."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables set before vLLM is imported, for example the cores of a CPU engine."""


def sampling_params(sampling: Sampling, submission: Submission) -> Any:
    """vLLM's parameters of one request. What counts or looks at output tokens comes from the submission.

    Stop strings are not among them: see :mod:`generator.stops`. ``n`` is never set: a rollout is a request.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=submission.max_tokens,
        min_tokens=submission.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=submission.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        # Every end-of-sequence id is in stop_token_ids, so vLLM's own choice of one of them must not interfere.
        ignore_eos=True,
        stop_token_ids=sorted(sampling.stop_token_ids),
        logprobs=0,
        detokenize=False,
        # Deltas leave the engine as they are sampled: they are what survives its death.
        output_kind=RequestOutputKind.DELTA,
    )


def build_llm(settings: EngineSettings, gauge: PressureGauge | None = None) -> AsyncLLM:
    """Start vLLM. Blocks for seconds to minutes. Where there is a ``gauge``, vLLM reports every iteration to it."""
    with quick_imports():
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

    if settings.prestart_core:
        use_prestarted_core()
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_running,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": settings.enforce_eager,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "trust_remote_code": settings.trust_remote_code,
        # Log-probabilities of the distribution that was sampled from, not of the raw logits (L5).
        "logprobs_mode": "processed_logprobs",
        # Random weights: the first push brings the right ones, and what it leaves out shows. An engine that had loaded
        # the model by itself would pass for one that received it.
        "load_format": "dummy" if settings.loaded_version is None else "auto",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "weight_transfer_config": WeightTransferConfig(backend=settings.transfer_backend),
        "worker_extension_cls": "weight_sync.worker.WorkerExtension",
    }
    optional = {
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "block_size": settings.block_size,
        "distributed_executor_backend": settings.executor,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    if settings.lora_rank:
        arguments |= engine_arguments(settings.lora_rank, settings.lora_targets)
    gauges: Any = None if gauge is None else [lambda config, number: gauge]
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=gauges)
