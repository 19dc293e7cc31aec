"""Run folders of runs that never were, written by the real writers of the run folder and the trace."""

from __future__ import annotations

import time
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from generator.rollout import FinishReason, Group, Prompt, Rollout, ScoredRollout, Segment
from trainer.watch.charts import PHASES
from trainer.watch.run_folder import RunFolder
from trainer.watch.trace import ROLLOUTS, Trace

HOSTILE = "</script><script>alert(1)</script><!-- <b>&amp;\u2028"
LETTERS = "abcdefgh <>/\n"


def write_run(path: Path, steps: int = 12, *, tokens: int = 40, groups: int = 2, every: int = 4, seed: int = 0) -> Path:
    """A finished run of so many steps; rollouts of ``tokens`` tokens are written each ``every`` steps."""
    folder = RunFolder(path)
    settings = {"name": "toy", "steps": steps, "seed": seed, "run_dir": str(path), "model": {"path": HOSTILE}}
    folder.write_config(settings)
    trace = Trace(path / "trace.json")
    begin = time.time()
    for step in range(1, steps + 1):
        folder.append_metrics(step, metrics(step, steps))
        batch = [group(step, number, tokens) for number in range(groups)]
        if step % every == 0:
            folder.write_rollouts(step, batch, [[0.5, -0.5] for _ in batch])
        trace_step(trace, step, begin + 10 * step)
    folder.append_evaluation(0, {"eval/reward_mean": 0.1, "eval/pass@1": 0.1})
    folder.append_evaluation(steps, {"eval/reward_mean": 0.9, "eval/pass@1": 0.8})
    folder.write_summary({"status": "done", "steps": steps, "wall_seconds": 10.0 * steps, "tokens/trained": 960 + seed})
    folder.close()
    trace.complete("evaluation", "evaluation of version 0", begin + 10, 4.0)
    trace.complete("evaluation", f"evaluation of version {steps}", begin + 10 * steps, 8.0)
    trace.close()
    write_tokenizer(path / "export")
    return path


def metrics(step: int, steps: int) -> dict[str, float]:
    """A row with every family of metrics that the page has a chart of."""
    phases = {f"push/{phase}_seconds": 0.1 + 0.001 * step for phase in PHASES}
    lags = {
        f"by_lag/{lag}/{name}": 0.1 * step for lag in ("0", "1", "3_or_more") for name in ("token_fraction", "k3_kl")
    }
    names = (
        "reward/std", "reward/min", "reward/exact", "completions/length_mean", "completions/length_min",
        "completions/length_max", "completions/stop_fraction", "policy/entropy", "policy/loss", "policy/grad_norm",
        "mismatch/kl", "mismatch/k3_kl", "mismatch/ess", "staleness/token_mean", "staleness/token_max",
        "throughput/generated_tokens_per_second", "push/pause_seconds", "timing/forward_backward_seconds",
    )  # fmt: skip
    values = {name: (place + 1) * 0.37 * step / steps for place, name in enumerate(names)}
    times = {"timing/step_seconds": 10.0, "timing/train_seconds": 5.0, "idle/learner_seconds": 2.0, "push/seconds": 1.0}
    return {**values, **phases, **lags, **times, "reward/mean": step / steps, "engines/serving": 1.0}


def group(step: int, number: int, tokens: int) -> Group:
    """Two rollouts of the versions that a step can see: the first of two of them, its text hostile, the other cut."""
    across = rollout(f"{step}-{number}-a", [(max(0, step - 2), tokens // 2), (step - 1, tokens - tokens // 2)], "stop")
    cut = rollout(f"{step}-{number}-b", [(step - 1, tokens)], "length")
    scored = (ScoredRollout(across, HOSTILE, 1.0, {HOSTILE: 1.0}), ScoredRollout(cut, "plain", 0.0, {}))
    return Group(Prompt(number, (1, 2), HOSTILE, {}), scored, admitted_version=0)


def rollout(name: str, segments: list[tuple[int, int]], finish: FinishReason) -> Rollout:
    """A rollout of (version, tokens) segments whose tokens spell the start of a script."""
    made, count = Rollout(name, (1, 2), resumes=len(segments) - 1), 0
    for number, (version, tokens) in enumerate(segments, start=1):
        ids = tuple((count + place) % len(LETTERS) for place in range(tokens))
        count += tokens
        ends = finish if number == len(segments) else None
        made = made.extended(Segment(ids, (-0.5,) * tokens, version), ends)
    return made


def trace_step(trace: Trace, step: int, now: float) -> None:
    """The spans of a step of ten seconds: two groups, the learner, a push with its phases, a reward."""
    trace.complete("engine", f"prompt {step}", now, 6.0, version=step)
    trace.complete("engine", f"prompt {step + 1}", now, 4.0, version=step)
    for number, seconds in enumerate((6.0, 4.0)):
        trace.counter(f"engine {number}{ROLLOUTS}", 8, now)
        trace.counter(f"engine {number}{ROLLOUTS}", 0, now + seconds)
    trace.complete("reward", f"prompt {step}", now + 6, 0.5)
    trace.complete("learner", "wait for rollouts", now, 2.0)
    trace.complete("learner", f"step {step}", now + 2, 5.0)
    trace.complete("push", f"push version {step}", now + 7, 0.9, bytes=1)
    for place, phase in enumerate(PHASES):
        trace.complete("push", phase, now + 7 + 0.1 * place, 0.1)


def write_tokenizer(folder: Path) -> None:
    """A character tokenizer, where the export of a run has its own."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
