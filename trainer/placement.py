"""What each process gets: cores, GPUs, memory, context length. Pure functions of the configuration and the model."""

from __future__ import annotations

import os
from dataclasses import replace

from generator.actor import Resources
from generator.launch import SEVERAL_WORKERS, EngineSettings
from generator.pool import PoolSettings
from generator.resume import Sampling
from trainer.checks import ConfigError
from trainer.config import Config
from trainer.model import DeviceKind, ResolvedModel

KV_BYTES_ON_CPU = 512 << 20
"""KV cache of a CPU engine unless ``engine.kv_cache_mib`` says otherwise: room for small models and short contexts."""


CPU_BLOCK_SIZE = 32
"""Tokens of a KV-cache block on CPU: the smallest that vLLM's CPU attention has."""
ROOM_FACTOR = 2
SHARED_GPU = 0.5
"""What engine and learner reserve each of a GPU that they share. What they take of its memory is another matter."""
SEED_STRIDE = 1000


def device_kind(config: Config) -> DeviceKind:
    """``cpu`` or ``gpu``: what engines and learner compute on."""
    return "cpu" if config.hardware == "cpu" else "gpu"


def transfer_backend(config: Config) -> str:
    """``weight_sync.backend`` with ``auto`` resolved: gloo between CPUs, nccl between GPUs."""
    if config.weight_sync.backend != "auto":
        return config.weight_sync.backend
    return "gloo" if device_kind(config) == "cpu" else "nccl"


def engine_transfer_backend(config: Config) -> str:
    """Name of the engines' transfer engine in vLLM's factory: the backend, and over nccl with deltas one of ours."""
    backend = transfer_backend(config)
    return "nccl_delta" if backend == "nccl" and config.weight_sync.delta else backend


def pushes_adapters(config: Config) -> bool:
    """Whether engines hold the model and its adapter apart, and pushes bring the adapter alone."""
    return config.learner.lora.rank > 0 and config.weight_sync.lora == "adapter"


def prompt_limit(config: Config, model: ResolvedModel) -> int:
    """The longest prompt, in tokens, that leaves room for the response budget.

    Raises :class:`ConfigError` when the budget alone fills the model's context.
    """
    context = config.engine.max_model_len or model.max_position_embeddings
    if context > model.max_position_embeddings:
        raise ConfigError(
            f"`engine.max_model_len={context}` is more than the model's context of {model.max_position_embeddings}"
        )
    key, tokens = longest_response(config)
    if tokens >= context:
        raise ConfigError(f"`{key}={tokens}` leaves no room for a prompt in a context of {context}")
    return context - tokens


def longest_response(config: Config) -> tuple[str, int]:
    """The largest response budget, in tokens, and the key that sets it."""
    training, evaluation = config.sampling.max_tokens, config.evaluation.max_tokens
    if config.evaluation.every and evaluation > training:
        return "evaluation.max_tokens", evaluation
    return "sampling.max_tokens", training


def make_sampling(config: Config, model: ResolvedModel, max_model_len: int) -> Sampling:
    """How rollouts are sampled; every end-of-sequence id of the model stops one unless they are ignored.

    The seed is the same before and after a restart of the run: the ids of its rollouts go on, so that no random stream
    comes twice, and what was lost since the checkpoint is sampled as it was.
    """
    sampling = config.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(model.eos_token_ids))
    return Sampling(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop=tuple(sampling.stop),
        stop_token_ids=frozenset(stops),
        max_model_len=max_model_len,
    )


def check_stop_tokens(config: Config, model: ResolvedModel) -> None:
    """Raise :class:`ConfigError` for a stop token that the model does not have: vLLM would index its logits by it."""
    count = model.vocabulary
    for number in config.sampling.stop_token_ids:
        if count is not None and number >= count:
            raise ConfigError(
                f"`sampling.stop_token_ids` has {number}, and the ids of {model.source} end at {count - 1}"
            )


def evaluation_sampling(config: Config, sampling: Sampling) -> Sampling:
    """How the rollouts of an evaluation are sampled, where those of training are by ``sampling``."""
    evaluation = config.evaluation
    tokens = evaluation.max_tokens or sampling.max_tokens
    minimum = min(sampling.min_tokens, tokens)
    return replace(sampling, temperature=evaluation.temperature, max_tokens=tokens, min_tokens=minimum)


def engine_settings(
    config: Config,
    model: ResolvedModel,
    longest_prompt: int,
    first_step: int = 0,
    number: int = 0,
    for_evaluations: bool = False,
) -> EngineSettings:
    """The settings of engine ``number`` of training, or of the pool that is there for evaluations alone.

    ``first_step`` is the number of steps made before in the run that this one continues: without ``sampling.seed``, an
    engine draws from a stream of its own, which is another one after a restart.
    """
    engine = config.engine
    max_model_len = engine.max_model_len or longest_prompt + longest_response(config)[1]
    on_cpu = device_kind(config) == "cpu"
    return EngineSettings(
        name=f"engine {number}",
        pressure=config.staleness.adapt_running_groups,
        model_path=model.path,
        dtype=model.dtype,
        sampling=make_sampling(config, model, max_model_len),
        max_model_len=max_model_len,
        max_running=engine.max_running,
        transfer_backend=engine_transfer_backend(config),
        seed=config.seed + number + SEED_STRIDE * first_step,
        tensor_parallel=engine.tensor_parallel,
        enforce_eager=engine.enforce_eager,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_bytes=((engine.kv_cache_mib << 20) or KV_BYTES_ON_CPU) if on_cpu else None,
        rollout_timeout=engine.rollout_timeout,
        rollout_tries=engine.rollout_tries,
        pause_timeout=0.6 * config.weight_sync.timeout,  # inside the pool's deadline for the same call
        drain_timeout=config.weight_sync.drain_timeout,
        trust_remote_code=config.model.trust_remote_code,
        # vLLM's default on CPU is 128: prompts shorter than that would never be shared within a group.
        block_size=CPU_BLOCK_SIZE if on_cpu else None,
        lora_rank=config.learner.lora.rank if pushes_adapters(config) else 0,
        lora_targets=tuple(config.learner.lora.targets),
        executor=("uni" if engine.tensor_parallel == 1 else SEVERAL_WORKERS) if on_cpu else None,
        prestart_core=on_cpu,
        environment=engine_environment(config, number, for_evaluations) if on_cpu else gpu_environment(config),
    )


def pool_settings(config: Config) -> PoolSettings:
    """How the engine pool behaves."""
    return PoolSettings(
        count=config.engine.count,
        max_running=config.engine.max_running,
        max_restarts=config.engine.max_restarts,
        serve_timeout=config.engine.start_timeout,
        mode=config.weight_sync.mode,  # type: ignore[arg-type]  # checked
        kv_cache=config.weight_sync.kv_cache,  # type: ignore[arg-type]  # checked
    )


def has_evaluation_engine(config: Config) -> bool:
    """Whether there is one engine more, for evaluations alone."""
    return config.evaluation.every > 0 and config.evaluation.engine == "dedicated"


def all_engines(config: Config) -> int:
    """Engines of the run, those for evaluations included."""
    return config.engine.count + has_evaluation_engine(config)


def engine_threads(config: Config) -> int:
    """Threads of one engine on CPU: unless configured, all engines together have a thread for every core.

    More threads than cores in all, because engine and learner often wait for each other, and then have all the cores.
    Threads must wait without spinning for that: see ``trainer.ray_session``.
    """
    return config.engine.cpu_threads or max(1, cpu_cores() // config.engine.count)


def core_numbers() -> list[int]:
    """The cores that this process may use, by the operating system's numbers."""
    return sorted(os.sched_getaffinity(0))


def cpu_cores() -> int:
    """How many cores this process may use."""
    return len(core_numbers())


def worker_cores(config: Config, number: int, for_evaluations: bool = False) -> str:
    """The cores of each worker of a tensor-parallel engine on CPU, as ``VLLM_CPU_OMP_THREADS_BIND`` takes them.

    Unless configured, the workers of all engines share the cores evenly; vLLM's own ``auto`` wants a memory node for
    each worker. ``number`` is the engine's in its pool: one that replaces a lost one takes the place of some engine's
    cores. Behind those of training come those of the engine for evaluations.
    """
    engine = config.engine
    if engine.cpu_threads_bind != "auto":
        return engine.cpu_threads_bind
    cores = core_numbers()
    each = max(1, len(cores) // (all_engines(config) * engine.tensor_parallel))
    first = (engine.count if for_evaluations else number % engine.count) * engine.tensor_parallel

    def place(worker: int) -> str:
        return ",".join(str(cores[(worker * each + core) % len(cores)]) for core in range(each))

    return "|".join(place(first + rank) for rank in range(engine.tensor_parallel))


ONEDNN_PRIMITIVES = "128"
"""oneDNN keeps a compiled kernel, half a megabyte, for each shape of a matrix product, 1,024 of them unless told
otherwise. Resubmissions make a new shape each: an engine would grow by half a gigabyte and seldom use one twice."""


def engine_environment(config: Config, number: int = 0, for_evaluations: bool = False) -> dict[str, str]:
    """Environment variables of engine ``number`` on CPU."""
    environment = {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": ONEDNN_PRIMITIVES,
    }
    if config.engine.tensor_parallel > 1:
        return environment | {"VLLM_CPU_OMP_THREADS_BIND": worker_cores(config, number, for_evaluations)}
    # One process less than the default, whose start costs as much again. vLLM allows it only together with this
    # variable; the engine core still is a process of its own.
    return environment | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(engine_threads(config)),
    }


def gpu_environment(config: Config) -> dict[str, str]:
    """Environment variables of an engine on GPUs.

    Over ``ipc``, workers take the handles of GPU memory as pickled text, which vLLM refuses unless told otherwise. Who
    can send one to an engine is in the Ray cluster of the run, and could run anything there anyway.
    """
    return {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if shares_gpu(config) else {}


def engine_room(config: Config) -> int:
    """Groups that may be sampled or scored at a time: more than the engines run, so that none waits for the driver."""
    running = config.engine.count * config.engine.max_running
    return max(1, ROOM_FACTOR * running // config.sampling.group_size)


def running_limit(config: Config) -> int:
    """Groups that may be in flight at most, beside the staleness bound."""
    return config.staleness.max_running_groups or engine_room(config)


def check_tensor_parallel(config: Config, model: ResolvedModel) -> None:
    """Raise :class:`ConfigError` when the model's attention cannot be split among the workers of an engine.

    vLLM says so too, but after it was started, and of key-value heads without a word.
    """
    workers = config.engine.tensor_parallel
    heads, key_heads = model.attention_heads, model.key_value_heads
    if heads and heads % workers:
        what = f"{heads} attention heads"
    elif key_heads and key_heads % workers and workers % key_heads:
        what = f"{key_heads} key-value heads"
    else:
        return
    raise ConfigError(
        f"`engine.tensor_parallel={workers}` cannot split the {what} of {model.source} evenly; use a divisor of them"
    )


def engine_resources(config: Config) -> Resources:
    """What one engine actor reserves. On CPU nothing: the operating system shares two cores better than Ray does."""
    if device_kind(config) == "cpu":
        return Resources()
    return Resources(cpus=1.0, gpus=SHARED_GPU if shares_gpu(config) else float(config.engine.tensor_parallel))


def learner_gpus(config: Config) -> float:
    """GPUs that a learner rank reserves."""
    if device_kind(config) == "cpu":
        return 0.0
    return SHARED_GPU if shares_gpu(config) else 1.0


def shares_gpu(config: Config) -> bool:
    """Whether the engine and the learner live on one GPU: what ``weight_sync.backend=ipc`` is for."""
    return device_kind(config) == "gpu" and transfer_backend(config) == "ipc"
