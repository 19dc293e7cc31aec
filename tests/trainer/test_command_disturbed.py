"""The command while something happens to it: signals, a dead engine, engines that come and go."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.trainer.command import act_after, no_process_left, processes_of_this_test, rows_of, run
from tests.trainer.deadly_reward import engine_cores
from trainer.control import request

pytestmark = pytest.mark.engine


def interrupt_after(line_like: str, signal_number: int, folder: Path, *overrides: str) -> tuple[int, str]:
    """As :func:`act_after`, with a signal to the command."""
    return act_after(line_like, lambda process: process.send_signal(signal_number), folder, *overrides)


PATIENT = "shutdown.timeout=120"

ALWAYS_SAMPLING = [
    "sampling.max_tokens=40",
    "sampling.ignore_eos=true",
    "staleness.max_versions=8",
    "logger.rollouts.every=1",
    PATIENT,
]
"""The bound leaves room for new groups all the time, and sampling one takes a while: some are in the middle of it."""

BATCH = 4 * 8
"""Rollouts of a step of the recipe."""

BEGINNING_EARLY = ["batch.streaming=true", "staleness.adapt_running_groups=true", "staleness.max_running_groups=2"]
"""Half of a batch at a time, so that the first batch comes in two parts."""


def interrupted_in_mid_sampling(folder: Path) -> dict[str, dict]:
    """Interrupt the run, and again if nothing was being sampled just then; the rollouts of its last checkpoint."""
    for _ in range(5):
        line = r"step +\d*[2-9]/"
        code, output = interrupt_after(line, signal.SIGINT, folder, *ALWAYS_SAMPLING, *BEGINNING_EARLY)
        assert code == 130, output
        assert "Traceback" not in output
        assert "interrupted writing a checkpoint" in output
        assert no_process_left(), processes_of_this_test()
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        kept = rows_of(folder / "checkpoints" / f"step_{summary['policy_version']}" / "rollouts.jsonl")
        if any(row["finish_reason"] is None and row["response_token_ids"] for row in kept.values()):
            return kept
    pytest.fail("no checkpoint has a rollout that was in flight")


def test_ctrl_c_writes_a_checkpoint_and_the_same_command_continues_from_it_token_for_token(tmp_path):
    kept = interrupted_in_mid_sampling(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    steps = summary["policy_version"] + max(2, math.ceil(len(kept) / BATCH))  # so many until all of them are trained on
    done = run(
        "recipe=ci_tiny",
        f"steps={steps}",
        f"run_dir={tmp_path}",
        "logger.wandb.mode=disabled",
        *ALWAYS_SAMPLING,
        *BEGINNING_EARLY,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["policy_version"]) == ("done", steps, steps)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert sum(line["tokens/streamed"] for line in lines) > 0
    assert all(line["engines/max_running_groups"] >= 1 and "engines/kv_cache_usage" in line for line in lines)
    trained = rows_of(*(tmp_path / "rollouts").glob("step_*.jsonl"))
    for name, row in kept.items():
        count = len(row["response_token_ids"])
        for column in ("response_token_ids", "logprobs", "versions"):
            assert trained[name][column][:count] == row[column], "a kept rollout goes on with the tokens that it had"
    assert summary["tokens/generated"] == sum(summary[f"tokens/{end}"] for end in ("trained", "expired", "lost"))


def test_a_killed_run_leaves_no_process(tmp_path):
    code, output = interrupt_after(r"step +1/", signal.SIGKILL, tmp_path)
    assert code == -signal.SIGKILL, output
    # Nobody ends Ray's agents then but they themselves, after about a minute in which they try to report to the GCS.
    assert no_process_left(patience=240), processes_of_this_test()


def test_a_sigterm_while_engines_start_exits_with_130_and_leaves_no_process(tmp_path):
    code, output = interrupt_after("starting 1 engine", signal.SIGTERM, tmp_path)
    assert code == 130, output
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"
    assert no_process_left(), processes_of_this_test()


def kill_engine_core(process: subprocess.Popen) -> None:
    (core,) = engine_cores(psutil.Process(process.pid))
    core.kill()


def nothing(process: subprocess.Popen) -> None:
    """The run is disturbed by what it runs."""


def test_a_run_whose_engine_dies_goes_on_with_a_new_one_and_loses_no_token(tmp_path):
    deadly = "reward=tests.trainer.deadly_reward.share_of_a"
    code, output = act_after(r"step +1/", nothing, tmp_path, "steps=12", deadly)
    assert code == 0, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == summary["policy_version"] == 12
    assert summary["engines/lost"] == summary["engines/restarted"] == 1
    assert summary["tokens/generated"] == sum(summary[f"tokens/{end}"] for end in ("trained", "expired", "lost"))
    assert no_process_left(), processes_of_this_test()


def test_a_run_whose_engine_dies_and_may_not_be_replaced_fails_with_the_cause_and_leaves_no_process(tmp_path):
    code, output = act_after(r"step +1/", kill_engine_core, tmp_path, "engine.max_restarts=0")
    assert code == 1, output
    assert "Traceback" not in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "engine 0" in summary["error"]
    assert "EngineDeadError" in (tmp_path / "error.txt").read_text()
    assert no_process_left(), processes_of_this_test()


def test_engines_are_added_and_drained_while_a_run_goes_on(tmp_path):
    def change_twice(process: subprocess.Popen) -> None:
        assert request(tmp_path, {"engine.count": 2})["engine.count"] == 2
        answer = request(tmp_path, {"engine.count": 0})
        assert "at least 1" in answer["error"]
        assert "cannot be changed" in request(tmp_path, {"steps": 3})["error"]
        wait_for(lambda: request(tmp_path, {})["engines_serving"] == 2)
        assert request(tmp_path, {"engine.count": 1})["engines_serving"] == 1
        process.send_signal(signal.SIGINT)

    evaluated = ["evaluation.every=1", "evaluation.prompts=4", "evaluation.engine=dedicated", PATIENT]
    code, output = act_after(r"evaluation of version 2", change_twice, tmp_path, *evaluated)
    assert code == 130, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["engines/lost"] == 0
    versions = [json.loads(line)["step"] for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert versions == list(range(len(versions))), "each version was sent to the engine that evaluates, and to no other"
    assert no_process_left(), processes_of_this_test()


def wait_for(condition: Callable[[], bool], patience: float = 300.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)
