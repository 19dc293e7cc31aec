"""The typed configuration tree. Every default of the project stands here, and nowhere else.

Hydra composes ``configs/`` over this schema; its YAML files hold only what differs from these defaults, except for
``configs/algorithm/``: a preset says all that makes it up. A field's comment is its documentation:
``docs/reference/configuration.md`` is generated from this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ModelConfig:
    path: str = "auto"  # hub id or folder; `auto` takes the embedded SmolLM2-135M-Instruct on CPU, `hub_id` on GPU
    hub_id: str = "Qwen/Qwen2.5-1.5B-Instruct"  # what `auto` means on GPU
    dtype: str = "auto"  # engine and forward dtype: auto, float32, bfloat16; auto: bfloat16 where the hardware has it
    cache_dir: str | None = None  # converted models; default: $XDG_CACHE_HOME/midflight
    trust_remote_code: bool = False  # run code that comes with a hub model


@dataclass
class DataConfig:
    path: str | None = None  # local file; overrides the recipe's own source
    eval_path: str | None = None  # local file of held-out rows, for evaluations
    mixture: list[Any] = field(default_factory=list)  # several: a list of {name, weight, path, eval_path, options}
    shuffle: bool = True  # seeded order, reshuffled each epoch
    options: dict[str, Any] = field(default_factory=dict)  # keys of the recipe, for example the difficulty


@dataclass
class BatchConfig:
    prompts: int = 8  # prompt groups in a training batch; one batch is one step, and one policy version
    streaming: bool = False  # the learner begins with groups while the batch fills; the update is the same


@dataclass
class SamplingConfig:
    group_size: int = 8  # rollouts of a prompt
    max_tokens: int = 256  # tokens sampled in a response, cumulative over all turns and resumes
    min_tokens: int = 0  # no end-of-sequence before this many response tokens
    temperature: float = 1.0  # of sampling, 0.01 or more; the learner divides its logits by it too
    top_p: float = 1.0  # must stay 1.0 in training: the learner compares full distributions
    top_k: int = 0  # must stay 0 (off) in training, for the same reason
    min_p: float = 0.0  # must stay 0.0 in training, for the same reason
    seed: int | None = None  # reproducible rollouts, across resumes too: each has a random stream of its own
    stop_token_ids: list[int] = field(default_factory=list)  # besides the model's own end-of-sequence ids
    stop: list[str] = field(default_factory=list)  # strings that end a rollout; they stay in its text
    ignore_eos: bool = False  # go on past the model's end-of-sequence ids
    repetition_penalty: float = 1.0  # of tokens in prompt and response; a penalty needs a behaviour correction
    presence_penalty: float = 0.0  # of tokens in the response; not with weight_sync.mode=abort
    frequency_penalty: float = 0.0  # of tokens in the response, each time; not with weight_sync.mode=abort


@dataclass
class StalenessConfig:
    max_versions: int = 1  # learner version at consumption minus version of the oldest token; 0 is on-policy
    on_expired: str = "mask_tokens"  # mask_tokens, drop_rollout, drop_group: what happens to tokens past the bound
    max_running_groups: int = 0  # concurrency bound besides staleness; 0: what the engines have room for
    adapt_running_groups: bool = False  # lower that bound while engines preempt requests, and raise it again


@dataclass
class CorrectionConfig:
    weight: str = "token"  # importance ratio that weighs a token: none, token, sequence_product, sequence_geometric
    weight_low: float | None = None  # weights below are raised to this; null: no bound
    weight_high: float | None = 2.0  # weights above are truncated to this; null: no bound
    mask: str = "none"  # ratio by which tokens are left out: none, token, sequence_product, sequence_geometric
    mask_low: float | None = None  # tokens whose ratio is below are left out; null: no bound
    mask_high: float | None = None  # tokens whose ratio is above are left out; null: no bound
    second_moment: float | None = None  # M2PO: drop the furthest tokens down to this mean squared log-ratio; null: off


@dataclass
class KLConfig:
    coefficient: float = 0.0  # of the KL penalty towards the reference model; 0: none
    estimator: str = "k2"  # k1 (right in the reward), k2 (right in the loss), k3 (as GRPO had it)
    place: str = "loss"  # loss, or reward: where the penalty enters
    model: str | None = None  # the reference, as `model.path` names models; null: the weights that the run starts from


@dataclass
class FilterConfig:
    zero_variance: bool = False  # rollouts of groups with equal rewards count in no denominator
    refill: int = 0  # dynamic sampling: so many batches' worth of groups with equal rewards are replaced; 0: off
    overlong: str = "none"  # rollouts cut at sampling.max_tokens: none, mask (not learned from), penalty
    overlong_buffer: int = 0  # penalty: grows over this many tokens before sampling.max_tokens; 0: a fifth of them
    overlong_penalty: float = 1.0  # penalty: reward taken from a rollout that uses all of sampling.max_tokens


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"  # grpo, grpo_batch_std, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, reward, or path
    objective: str = "ppo_clip"  # ppo_clip, reinforce, gspo, cispo, sapo, dppo, topr, or a dotted path
    proximal: str = "current"  # anchor of the objective's ratio: current, behaviour, recomputed, log_linear
    clip_low: float | None = 0.2  # ratios are clipped to [1 - clip_low, 1 + clip_high]; null: no lower bound
    clip_high: float | None = 0.2  # the upper end of the clip range; null: no upper bound
    clip_dual: float | None = None  # ppo_clip, gspo: with a negative advantage the ratio counts at most this; null: off
    gate_positive: float = 1.0  # sapo: temperature of the gate where the advantage is positive
    gate_negative: float = 1.05  # sapo: temperature of the gate elsewhere; higher fades sooner
    divergence: str = "tv"  # dppo: tv (total variation) or kl, of the sampled token against all others
    divergence_limit: float = 0.15  # dppo: tokens past it are not pushed further; about 0.15 for tv, 0.05 for kl
    aggregation: str = "token_mean"  # token_mean, sequence_mean, sequence_sum, prompt_mean, or a dotted path
    sum_length: int = 0  # sequence_sum: the constant it divides by; 0: sampling.max_tokens
    entropy_bonus: float = 0.0  # coefficient of the policy's entropy per token, which is maximised
    allow_uncorrected: bool = False  # ask by name to train off-policy data without any behaviour correction
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)


@dataclass
class OptimizerConfig:
    learning_rate: float = 1e-6  # of AdamW, after the warm-up
    schedule: str = "constant"  # of the learning rate after the warm-up: constant, or linear or cosine to 0 at `steps`
    weight_decay: float = 0.0  # of AdamW
    beta1: float = 0.9  # decay of AdamW's first moment
    beta2: float = 0.95  # decay of AdamW's second moment
    eps: float = 1e-8  # AdamW's epsilon
    warmup_steps: int = 0  # steps over which the learning rate rises linearly
    max_grad_norm: float = 1.0  # gradients are clipped to this norm


@dataclass
class LoRAConfig:
    rank: int = 0  # of the adapter beside each target, which alone is trained; 0: none, all weights are trained
    alpha: float = 32.0  # an adapter's product counts alpha / rank times
    targets: list[str] = field(default_factory=list)  # linear layers, such as q_proj; empty: all but the output head


@dataclass
class LearnerConfig:
    epochs: int = 1  # passes over each batch
    minibatches: int = 1  # optimizer updates of a pass, each on an equal share of the batch's prompt groups
    max_skipped_steps: int = 3  # the run stops at so many steps in a row with a loss or gradient that is not finite
    ranks: int = 1  # data-parallel DeepSpeed ranks
    zero_stage: int = 0  # DeepSpeed ZeRO stage, 0 to 3
    offload: bool = False  # on GPU with zero_stage 1 to 3: master weights and optimizer in CPU memory; slower, leaner
    micro_batch_tokens: int = 4096  # token budget of a micro-batch, padding counted
    packing: str = "shared_prompt"  # shared_prompt (a group's prompt once, no padding) or padded (any attention)
    logprob_chunk: int = 1024  # response tokens whose logits exist at the same time
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, more time
    cpu_threads: int = 0  # 0: on CPU the cores, shared by the ranks; on GPU torch's default
    timeout: float = 1800.0  # seconds a learner call may take
    lora: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass
class EngineConfig:
    count: int = 1  # engines
    tensor_parallel: int = 1  # workers that share the model of an engine
    max_running: int = 64  # sequences an engine runs at a time
    max_model_len: int = 0  # context length, observations counted; 0: longest prompt plus sampling.max_tokens
    enforce_eager: bool = False  # no compilation and no CUDA graphs: a quicker start, slower steps
    gpu_memory_utilization: float = 0.85  # share of a GPU's memory that an engine takes
    kv_cache_mib: int = 0  # CPU: size of the KV cache; 0: 512
    cpu_threads: int = 0  # CPU: threads of an engine without tensor parallelism; 0: the cores, shared by the engines
    cpu_threads_bind: str = "auto"  # CPU with tensor parallelism: cores of its workers, such as 0-1|2-3; auto: shared
    start_timeout: float = 900.0  # seconds until an engine must have started
    rollout_timeout: float = 900.0  # seconds a request may go without a new token; then it is submitted again
    rollout_tries: int = 3  # requests in a row that may go without a token; then the rollout has failed
    on_failed: str = "drop_rollout"  # drop_rollout, drop_group: what a failed rollout costs
    max_restarts: int = 10  # lost engines that are replaced in a run


@dataclass
class WeightSyncConfig:
    mode: str = "abort"  # running requests: abort (and submit again), keep (frozen meanwhile), wait (for their end)
    kv_cache: str = "recompute"  # mode keep: recompute the frozen requests' KV cache under new weights, or reuse it
    backend: str = "auto"  # gloo (CPU), nccl (GPUs), ipc (learner and engine on one GPU); auto: gloo or nccl
    bucket_mib: int = 25  # packed bytes that travel in one collective
    staging: bool = False  # weights travel while engines generate, and are swapped in in a pause
    staging_device: str = "device"  # how they wait: device (ready to compute with), host (as they came, to be loaded)
    delta: bool = False  # send only the elements that changed in the engines' dtype; needs a copy on both sides
    dense_every: int = 100  # versions between pushes of all weights where deltas are sent; 0: only where one is needed
    lora: str = "merged"  # how adapters are pushed: merged (into all weights), adapter (alone, after the first push)
    verify: Any = "first"  # pushes that are proven: none, first (since engines joined), every, or n: each n-th too
    timeout: float = 120.0  # seconds each step of a push may take
    drain_timeout: float = 900.0  # mode wait: seconds until running requests must have ended
    address: str = "auto"  # where the learner's first rank listens; auto: its node's address, loopback when local


@dataclass
class RewardConfig:
    timeout: float = 60.0  # seconds a reward call, or an environment between two turns, may take; then: not scored
    workers: int = 4  # threads that run plain reward functions


@dataclass
class RolloutLogConfig:
    every: int = 10  # write every trained rollout of each n-th step; 0: never


@dataclass
class TableLogConfig:
    every: int = 5  # print a table of completions each n-th step; 0: never
    rows: int = 4  # completions in a table


@dataclass
class WandbConfig:
    mode: str = "auto"  # auto: online when logged in, else offline; online, offline, disabled
    project: str = "midflight"  # wandb project
    entity: str | None = None  # wandb user or team
    name: str | None = None  # name of the wandb run
    group: str | None = None  # group of the wandb run


@dataclass
class LoggerConfig:
    wandb: WandbConfig = field(default_factory=WandbConfig)
    rollouts: RolloutLogConfig = field(default_factory=RolloutLogConfig)
    table: TableLogConfig = field(default_factory=TableLogConfig)
    progress: bool = True  # a progress bar when the output is a terminal
    report: bool = True  # when the run ends, write report.html into the run folder


@dataclass
class EvaluationConfig:
    every: int = 0  # versions between evaluations on held-out prompts, the first and the last included; 0: none
    prompts: int = 64  # held-out prompts of an evaluation, always the same ones; 0: all there are
    rollouts: int = 1  # sampled of each prompt; eval/pass@k is told for k up to this
    temperature: float = 1.0  # of sampling in an evaluation, 0.01 or more; 0: greedy
    max_tokens: int = 0  # tokens of a response; 0: sampling.max_tokens
    pass_reward: float = 1.0  # a rollout with at least this reward passes
    engine: str = "shared"  # shared: the engines of training, the next push waits; dedicated: one engine more, for it


@dataclass
class CheckpointConfig:
    every: int = 0  # steps between checkpoints; 0: only at the end and on interrupt
    keep: int = 2  # newest checkpoints that are kept
    best: str | None = "eval/reward_mean"  # the one with the largest value of this metric is kept too; null: none


@dataclass
class RayConfig:
    address: str | None = None  # an existing cluster; none: a local instance bound to loopback


@dataclass
class WatchdogConfig:
    warn_after: float = 300.0  # seconds without a rollout, reward, step or push coming to its end; then: a warning
    fail_after: float = 3600.0  # seconds; then the run fails and says what it waited for. Every deadline is shorter


@dataclass
class ShutdownConfig:
    timeout: float = 20.0  # seconds that writing the checkpoint of an interrupted run may take


@dataclass
class Config:
    name: str = MISSING  # the recipe's name; its YAML file sets it
    task: str = MISSING  # dotted path of the task factory
    hardware: str = "auto"  # auto, cpu, gpu, cluster: set by the hardware group
    seed: int = 0  # of data order, learner and engines
    steps: int = MISSING  # batches to learn from; each is a policy version
    run_dir: str = "outputs/${name}/${now:%Y-%m-%d_%H-%M-%S}"  # the run folder
    resume: str = "auto"  # auto, never, or the path of a checkpoint
    checks: list[str] = field(default_factory=list)  # what `python -m trainer.check` asks of the run when it is over
    reward: Any = None  # dotted path, or a list of {name, function, weight}; none: the task's own
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    rewarding: RewardConfig = field(default_factory=RewardConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    shutdown: ShutdownConfig = field(default_factory=ShutdownConfig)
