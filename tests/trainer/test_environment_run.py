"""An environment through the real stack: vLLM samples the turns, the learner reads observations without a loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.echo_task import TURN_TOKENS, TURNS

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
MARK = len("#0#")
STEPS = 3


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    overrides = [
        "recipe=ci_tiny", "task=tests.trainer.echo_task.Echo", f"steps={STEPS}", f"run_dir={folder}", "hardware=cpu",
        "engine.max_model_len=128", "logger.rollouts.every=1", "logger.wandb.mode=disabled",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *overrides], capture_output=True, text=True, timeout=900, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def rows(run_dir: Path) -> list[dict]:
    files = [run_dir / "rollouts" / f"step_{step}.jsonl" for step in range(1, STEPS + 1)]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_every_rollout_has_its_turns_with_an_observation_between_any_two(run_dir):
    for row in rows(run_dir):
        assert row["log"] == {"turns": TURNS}
        assert len(row["observations"]) == TURNS - 1
        assert all(end - start == MARK for start, end in row["observations"])
        sampled = len(row["response_token_ids"]) - MARK * (TURNS - 1)
        assert TURNS <= sampled <= TURNS * TURN_TOKENS
        observed = {at for start, end in row["observations"] for at in range(start, end)}
        assert not any(row["loss_mask"][at] for at in observed)
        assert row["versions"] == sorted(row["versions"])


def test_the_learner_reads_the_conversation_that_the_engine_read(run_dir):
    """On-policy in float32, both compute the same log-probabilities only for the same tokens at the same positions."""
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert first["staleness/token_max"] == 0
    assert first["mismatch/logprob_abs_diff_max"] < 1e-3
    assert first["completions/observed_mean"] == MARK * (TURNS - 1)
    assert first["completions/length_max"] <= TURNS * TURN_TOKENS


def test_the_summary_counts_sampled_tokens_only(run_dir):
    summary = json.loads((run_dir / "summary.json").read_text())
    sampled = sum(len(r["response_token_ids"]) - sum(e - s for s, e in r["observations"]) for r in rows(run_dir))
    assert summary["tokens/generated"] == sampled
    assert summary["tokens/generated"] == summary["tokens/trained"] + summary["tokens/expired"]
    assert summary["tokens/lost"] == 0
