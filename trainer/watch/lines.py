"""The texts of the console as pure functions of metrics, rollouts and totals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from generator.rollout import Group
from trainer.watch.totals import REWARD_WINDOW

# What chat templates put around a message (ChatML, Llama 3), which nobody wants to read four times a table.
_TEMPLATE_MARKS = re.compile(r"<\|(?:im_start|start_header_id)\|>\w*|<\|\w+\|>")

TABLE_COLUMNS = ("prompt", "completion", "reward", "advantage", "versions", "tokens", "finish")
"""Columns of the table of completions, on the screen, in wandb and in TensorBoard."""

TABLE = "completions/table"
"""The name of that table in wandb and in TensorBoard."""


def step_line(step: int, steps: int, metrics: Mapping[str, float], width: int | None = None) -> Text:
    """The line of a step, in fixed columns; the last of them are left out where they exceed ``width``."""

    def n(name: str, form: str) -> str:
        return number(metrics, name, form)

    start = f"step {step:>{len(str(steps))}}/{steps}"
    parts = [
        start,
        f"{n('timing/step_seconds', '5.1f')} s",
        f"reward {n('reward/mean', '6.3f')} ±{n('reward/std', '.2f')}",
        f"staleness {n('staleness/token_mean', '4.2f')} max {n('staleness/token_max', '.0f')}",
        f"tok/s {n('throughput/generated_tokens_per_second', '5,.0f')} generated "
        f"{n('throughput/trained_tokens_per_second', '5,.0f')} trained",
    ]
    if excluded := metrics.get("reward/excluded"):
        parts.append(f"{excluded:.0f} WITHOUT REWARD")
    parts.append(f"length {n('completions/length_mean', '4.0f')}")
    if "push/pause_seconds" in metrics:
        parts.append(f"pause {n('push/pause_seconds', '4.2f')} s")
    if "idle/learner_seconds" in metrics:
        parts.append(f"idle {n('idle/learner_seconds', '4.1f')} s")
    while width is not None and len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    line = Text("  ".join(parts))
    line.highlight_words([start], "bold")
    line.highlight_regex(r"reward +-?[\d.]+", "green")
    line.highlight_regex(r"\d+ WITHOUT REWARD", "yellow")
    return line


def evaluation_line(version: int, metrics: Mapping[str, float]) -> Text:
    """The line of an evaluation."""
    passes = [name for name in metrics if name.startswith("eval/pass@")]
    parts = [
        f"evaluation of version {version}",
        f"reward {number(metrics, 'eval/reward_mean', '.3f')} ±{number(metrics, 'eval/reward_std', '.2f')}",
        *(f"{name.removeprefix('eval/')} {number(metrics, name, '.3f')}" for name in passes),
        f"{number(metrics, 'eval/prompts', '.0f')} prompts in {number(metrics, 'eval/seconds', '.1f')} s",
    ]
    line = Text("  ".join(parts), style="bold")
    line.highlight_regex(r"reward +-?[\d.]+", "green")
    return line


def table_rows(groups: Sequence[Group], advantages: Sequence[Sequence[float]], rows: int) -> list[list[Any]]:
    """Up to ``rows`` rollouts for a table, of as many prompts as there are; best and worst of a group first."""
    ranked = []
    for group, values in zip(groups, advantages, strict=True):
        order = sorted(zip(group.rollouts, values, strict=True), key=lambda pair: -pair[1])
        half = len(order) // 2
        interleaved = [pair for pairs in zip(order[:half], reversed(order[half:]), strict=False) for pair in pairs]
        ranked.append((group, interleaved if len(interleaved) == len(order) else [*interleaved, order[half]]))
    chosen: list[list[Any]] = []
    for place in range(max((len(pairs) for _, pairs in ranked), default=0)):
        for group, pairs in ranked:
            if len(chosen) == rows:
                return chosen
            if place < len(pairs):
                item, advantage = pairs[place]
                rollout = item.rollout
                chosen.append([group.prompt.text, item.text, item.reward, advantage, rollout.version_count,
                               rollout.sampled_tokens, rollout.finish_reason])  # fmt: skip
    return chosen


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The totals as (label, text)."""
    lines = []
    if summary.get("error"):
        lines.append(("error", str(summary["error"])))
    if summary.get("reward/first10_mean") is not None:
        first, last = summary["reward/first10_mean"], summary["reward/last10_mean"]
        short = summary["steps"] <= REWARD_WINDOW  # the two windows are then the same
        of_all = f" of {summary['steps']}" if summary["steps"] < 2 * REWARD_WINDOW else ""  # they overlap
        lines.append(("reward", f"{first:.3f} on average" if short else
                                f"{first:.3f} in the first 10 steps, {last:.3f} in the last 10{of_all}"))  # fmt: skip
    if "eval/best_version" in summary:
        last, best = summary["eval/last_reward_mean"], summary["eval/best_reward_mean"]
        what = f"reward {last:.3f} in the last one, {best:.3f} in the best, of version {summary['eval/best_version']}"
        lines.append(("evaluation", what))
    ends = ", ".join(f"{summary[f'tokens/{end}']:,} {end}" for end in ("generated", "trained", "expired", "lost"))
    lines.append(("tokens", ends + (" (no reward)" if summary["tokens/lost"] else "")))
    lines.append(("rollouts", f"{summary['rollouts/finished']:,} finished, "
                              f"{summary['rollouts/resumed']:,} of them resumed across pushes"))  # fmt: skip
    if summary.get("push/count"):
        lines.append(("pushes", f"{summary['push/count']}, pausing generation "
                                f"{summary['push/pause_seconds_mean']:.2f} s on average"))  # fmt: skip
    return lines


def number(metrics: Mapping[str, float], name: str, form: str) -> str:
    """A metric in a fixed width, or a dash of that width when the step has none."""
    width = int(form.split(".")[0].strip(",") or 0)
    return f"{metrics[name]:{form}}" if metrics.get(name) is not None else "-".rjust(width)


def cell(value: Any) -> str:
    """A number in a table."""
    if value is None:
        return "none"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def question(prompt: str) -> str:
    """The end of a prompt, where the question stands, without the marks of the chat template."""
    return shorten(_TEMPLATE_MARKS.sub("", prompt), 160, end=True)


def shorten(text: str, length: int, end: bool = False) -> str:
    """At most ``length`` characters of the beginning, or of the end."""
    text = text.strip()
    if len(text) <= length:
        return text
    return "..." + text[-length:] if end else text[:length] + "..."


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
