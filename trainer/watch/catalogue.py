"""Every metric of a step: name, unit and meaning. The documentation is written from it, and tests read it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``<x>`` in a name stands for a name chosen elsewhere, such as that of a reward function."""

    name: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", "mean reward of the step's rollouts that have one"),
    Metric("reward/std", "reward", "standard deviation of the reward over all rollouts of the step"),
    Metric("reward/min", "reward", "smallest reward of the step"),
    Metric("reward/max", "reward", "largest reward of the step"),
    Metric("reward/excluded", "rollouts", "rollouts without a reward: declined, raised or timed out; never scored 0"),
    Metric("reward/failed", "values", "values of reward functions that raised, since the previous step"),
    Metric("reward/timeout", "values", "the same, that ran out of time"),
    Metric("reward/declined", "values", "the same, that returned None"),
    Metric("reward/invalid", "values", "the same, that returned something that is no finite number"),
    Metric("reward/wrong_length", "values", "the same, that returned a list of another length"),
    Metric("reward/<part>", "reward", "mean of one reward function, before its weight"),
    Metric("completions/length_mean", "tokens", "mean response length; observed tokens do not count"),
    Metric("completions/length_min", "tokens", "shortest response"),
    Metric("completions/length_max", "tokens", "longest response"),
    Metric("completions/stop_fraction", "fraction", "rollouts that the model ended by itself"),
    Metric("completions/truncated_fraction", "fraction", "rollouts cut at the response budget"),
    Metric("completions/versions_mean", "versions", "policy versions that sampled a rollout, mean"),
    Metric("completions/versions_max", "versions", "policy versions that sampled a rollout, largest"),
    Metric("completions/multi_version_fraction", "fraction", "rollouts sampled by more than one policy version"),
    Metric("completions/resumed_fraction", "fraction", "rollouts that were submitted to an engine more than once"),
    Metric("completions/observed_mean", "tokens", "tokens of a rollout that its environment wrote, mean"),
    Metric("group/count", "groups", "prompt groups in the step"),
    Metric("group/reward_std_mean", "reward", "standard deviation of the reward inside a group, mean over groups"),
    Metric("group/zero_variance_fraction", "fraction", "groups whose rewards are all equal and which teach nothing"),
    Metric("staleness/token_mean", "versions", "learner version minus a trained token's version, mean"),
    Metric("staleness/token_max", "versions", "the same, largest; bounded by staleness.max_versions"),
    Metric("staleness/rollout_mean", "versions", "staleness of a rollout's oldest trained token, mean"),
    Metric("staleness/rollout_max", "versions", "the same, largest"),
    Metric("staleness/in_flight_mean", "versions", "versions published while a rollout was being sampled, mean"),
    Metric("staleness/in_flight_max", "versions", "the same, largest"),
    Metric("staleness/queue_mean", "versions", "versions published after a rollout's newest token, mean"),
    Metric("staleness/queue_max", "versions", "the same, largest"),
    Metric("staleness/masked_fraction", "fraction", "sampled tokens of the step that the loss does not see"),
    Metric("staleness/expired_tokens", "tokens", "too old to be learned from, or gone with a token that was"),
    Metric("staleness/expired_rollouts", "rollouts", "rollouts that lost all their tokens to that"),
    Metric("staleness/expired_groups", "groups", "groups that did; their prompts are sampled again"),
    Metric(
        "fairness/short_trained_share",
        "fraction",
        "trained of the tokens sampled, prompts with responses shorter than the median",
    ),
    Metric("fairness/long_trained_share", "fraction", "the same for prompts with longer ones; a group's mean decides"),
    Metric("fairness/hard_trained_share", "fraction", "the same for prompts with a lower mean reward than the median"),
    Metric("fairness/easy_trained_share", "fraction", "the same for those with a higher one"),
    Metric("policy/version", "version", "learner version when it took the batch"),
    Metric("policy/loss", "loss", "the objective that was minimised, mean over the updates of the batch"),
    Metric("policy/entropy", "nats", "entropy of the current policy per trained token"),
    Metric("policy/clip_fraction_low", "fraction", "trained tokens clipped at the lower bound"),
    Metric("policy/clip_fraction_high", "fraction", "trained tokens clipped at the upper bound"),
    Metric("policy/correction_truncated_fraction", "fraction", "trained tokens whose importance weight was truncated"),
    Metric("policy/correction_masked_fraction", "fraction", "trained tokens that the correction's mask left out"),
    Metric("policy/grad_norm", "norm", "gradient norm before clipping, mean over the updates of the batch"),
    Metric("policy/updates", "updates", "optimizer updates made on the batch"),
    Metric("policy/skipped_updates", "updates", "updates not made because loss or gradient was not finite"),
    Metric("policy/second_moment_masked_fraction", "fraction", "tokens that algorithm.correction.second_moment drops"),
    Metric("policy/reference_kl", "nats", "KL of the current policy against the reference model, by the k3 estimator"),
    Metric("policy/kl_penalty_mean", "reward", "reward taken from a rollout for leaving the reference model, mean"),
    Metric("policy/learning_rate", "rate", "learning rate of the step"),
    Metric("mismatch/kl", "nats", "behaviour against current policy: mean of log(behaviour) - log(current)"),
    Metric("mismatch/k3_kl", "nats", "the same by the k3 estimator, never negative"),
    Metric("mismatch/logprob_abs_diff_mean", "nats", "absolute difference of the log-probabilities, mean"),
    Metric("mismatch/logprob_abs_diff_max", "nats", "the same, largest"),
    Metric("mismatch/ess", "fraction", "effective sample size of the importance weights before truncation"),
    Metric("mismatch/ratio_mean", "ratio", "importance weight before truncation, mean"),
    Metric("mismatch/ratio_p01", "ratio", "the same, 1st percentile, to within 9% of its logarithm"),
    Metric("mismatch/ratio_p50", "ratio", "the same, median"),
    Metric("mismatch/ratio_p99", "ratio", "the same, 99th percentile"),
    Metric("by_lag/<lag>/token_fraction", "fraction", "trained tokens whose version is this much older: 0, 1, 2, ..."),
    Metric("by_lag/<lag>/<metric>", "", "a `mismatch` or `policy` metric over the tokens of this lag alone"),
    Metric("by_source/<source>/reward_mean", "reward", "mean reward of the prompts of one data set of data.mixture"),
    Metric("by_source/<source>/groups", "groups", "prompt groups of that data set in the step"),
    Metric("filter/zero_variance_rollouts", "rollouts", "rollouts left out because their group's rewards are equal"),
    Metric("filter/replaced_groups", "groups", "groups with equal rewards in whose place others were sampled"),
    Metric("filter/overlong_rollouts", "rollouts", "rollouts left out because they were cut at the response budget"),
    Metric("filter/overlong_penalty_mean", "reward", "reward taken from a rollout for its length, mean"),
    Metric("push/version", "version", "newest version published since the previous step"),
    Metric("push/seconds", "seconds", "the whole push, all its phases"),
    Metric("push/pause_seconds", "seconds", "how long engines generated nothing for a push"),
    Metric("push/interrupted_rollouts", "rollouts", "rollouts aborted for a push and submitted again"),
    Metric("push/bytes", "bytes", "weights, changes of weights or adapters, sent since the previous step"),
    Metric("push/dense_bytes", "bytes", "what they would have been, had everything been sent"),
    Metric("push/canary_abs_diff_mean", "nats", "engines against learner on fixed sequences, mean; only when compared"),
    Metric("push/canary_abs_diff_max", "nats", "the same, largest"),
    Metric("push/canary_engines", "engines", "engines that were compared, over the pushes since the previous step"),
    Metric("push/verify_seconds", "seconds", "engines compute the fixed sequences; the learner does in push/prepare"),
    Metric("push/<phase>_seconds", "seconds", "one phase: prepare, gate, transfer, swap, confirm, publish, resume"),
    Metric("throughput/generated_tokens_per_second", "tokens/s", "response tokens of rollouts finished in the step"),
    Metric("throughput/trained_tokens_per_second", "tokens/s", "response tokens that the loss saw"),
    Metric("throughput/learner_tokens_per_second", "tokens/s", "trained tokens over the learner's own time"),
    Metric("throughput/rollouts_per_second", "rollouts/s", "rollouts trained on"),
    Metric("tokens/trained", "tokens", "response tokens that the loss saw"),
    Metric("tokens/streamed", "tokens", "those of them that the learner had begun with before the batch was full"),
    Metric("tokens/fed", "tokens", "tokens of the learner's forward pass, shared prompts once, padding not counted"),
    Metric("tokens/padding_fraction", "fraction", "padding in the learner's forward pass"),
    Metric("rollouts/without_signal", "rollouts", "rollouts with advantage 0 or no trained token: not fed"),
    Metric("engines/serving", "engines", "engines that serve at the end of the step"),
    Metric(
        "engines/lost",
        "engines",
        "engines that died or did not answer since the previous step, those for evaluations too",
    ),
    Metric(
        "engines/restarted",
        "engines",
        "engines started in the place of lost ones since the previous step, those for evaluations too",
    ),
    Metric("engines/max_running_groups", "groups", "groups that may be in flight, whatever staleness allows"),
    Metric("engines/kv_cache_usage", "fraction", "the fullest KV cache since the previous step, where it is looked at"),
    Metric("engines/preemptions", "requests", "requests that lost their KV cache to others since the previous step"),
    Metric("rollouts/moved", "rollouts", "unfinished rollouts carried to another engine with all their tokens"),
    Metric("rollouts/restarted", "rollouts", "the same, whose last tokens were gone with the actor of their engine"),
    Metric("rollouts/stalled", "requests", "requests that got no token for engine.rollout_timeout and were taken back"),
    Metric("tokens/cached", "tokens", "prompt tokens that engines found in their prefix caches"),
    Metric("tokens/surplus", "tokens", "tokens sampled behind a stop string before the request could be ended; cut"),
    Metric("timing/step_seconds", "seconds", "wall time since the previous step ended"),
    Metric("timing/train_seconds", "seconds", "from the full batch to the end of the learner's step, without the push"),
    Metric("timing/<part>_seconds", "seconds", "one part of a step"),
    Metric("idle/learner_seconds", "seconds", "the learner waited for a batch"),
)

EVALUATION: tuple[Metric, ...] = (
    Metric("eval/reward_mean", "reward", "mean reward of the held-out rollouts that have one"),
    Metric("eval/reward_std", "reward", "its standard deviation over all of them"),
    Metric("eval/pass@<k>", "fraction", "chance that one of k rollouts of a prompt has evaluation.pass_reward or more"),
    Metric("eval/by_source/<source>/reward_mean", "reward", "the mean reward of one data set of data.mixture"),
    Metric("eval/prompts", "prompts", "held-out prompts"),
    Metric("eval/excluded", "rollouts", "rollouts without a reward"),
    Metric("eval/reward/<cause>", "values", "values of reward functions, or episodes, without a reward, by cause"),
    Metric("eval/length_mean", "tokens", "mean response length"),
    Metric("eval/truncated_fraction", "fraction", "rollouts cut at the response budget"),
    Metric("eval/seconds", "seconds", "from the first request to the last reward, beside training"),
)
"""The keys of ``evaluations.jsonl``."""

SUMMARY: tuple[Metric, ...] = (
    Metric("status", "", "done, failed or interrupted"),
    Metric("error", "", "of a failed run: its first cause; the whole story is in error.txt"),
    Metric("steps", "steps", "batches learned from"),
    Metric("policy_version", "version", "version published last"),
    Metric("wall_seconds", "seconds", "from start to end, over all starts of the run"),
    Metric("reward/first10_mean", "reward", "mean of reward/mean over the first 10 steps"),
    Metric("reward/last10_mean", "reward", "the same over the last 10 steps"),
    Metric("tokens/generated", "tokens", "of finished rollouts; at a run's end trained + expired + lost"),
    Metric("tokens/trained", "tokens", "those that the loss saw"),
    Metric("tokens/expired", "tokens", "those too old to be learned from (staleness.max_versions)"),
    Metric("tokens/lost", "tokens", "those of rollouts without a reward"),
    Metric("rollouts/finished", "rollouts", "rollouts that came to an end, learned from or not"),
    Metric("rollouts/resumed", "rollouts", "those of them that were submitted to an engine more than once"),
    Metric("rollouts/failed", "rollouts", "those of them given up after engine.rollout_tries"),
    Metric("steps/skipped", "steps", "steps with an update that was skipped: its loss or gradient was not finite"),
    Metric("checkpoints/failed", "checkpoints", "checkpoints that could not be written while the run went on"),
    Metric("eval/last_reward_mean", "reward", "eval/reward_mean of the last evaluation; absent without any"),
    Metric("eval/best_reward_mean", "reward", "the same of the best one"),
    Metric("eval/best_version", "version", "the version that was evaluated best, the newest of equals"),
    Metric("push/count", "pushes", "pushes, the first version's and those for engines that joined included"),
    Metric("push/pause_seconds_mean", "seconds", "how long a push paused generation, mean"),
)
"""The keys of ``summary.json``; totals that are not here are those of the metric of their name."""

_DESCRIBED = (*METRICS, *EVALUATION)
_PATTERNS = [
    re.compile("[^/]+".join(re.escape(part) for part in re.split(r"<\w+>", metric.name))) for metric in _DESCRIBED
]


def find(name: str) -> Metric | None:
    """The entry that describes ``name``: the exact one first, else one with a placeholder, else ``None``."""
    exact = (metric for metric in _DESCRIBED if metric.name == name)
    placeholders = (metric for metric, pattern in zip(_DESCRIBED, _PATTERNS, strict=True) if pattern.fullmatch(name))
    return next(exact, None) or next(placeholders, None)


def unknown(names: Iterable[str]) -> list[str]:
    """The names that the catalogue does not describe, sorted."""
    return sorted(name for name in names if find(name) is None)


def markdown(metrics: Iterable[Metric] = METRICS) -> str:
    """The catalogue, or some entries, as a Markdown table for the documentation."""
    rows = [f"| `{metric.name}` | {metric.unit or '-'} | {metric.meaning} |" for metric in metrics]
    return "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows]) + "\n"
