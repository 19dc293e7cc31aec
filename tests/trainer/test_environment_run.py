"""An environment through the real stack: vLLM samples the turns, the learner reads observations without a loss.

The model is trained by an adapter that is pushed alone: a run of its own for that would show nothing more.
"""

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
        "learner.lora.rank=4", "learner.lora.targets=[q_proj,v_proj,down_proj]", "weight_sync.lora=adapter",
        "weight_sync.verify=every",
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


def test_the_adapter_alone_is_pushed_after_each_step_and_the_checkpoint_holds_it_without_its_base(run_dir):
    first, *steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert first["push/bytes"] > 0
    for step in steps:
        assert 0 < step["push/bytes"] < step["push/dense_bytes"]
        assert step["push/canary_engines"] == 1
    exported = (run_dir / "export" / "model.safetensors").stat().st_size
    checkpoint = run_dir / "checkpoints" / f"step_{STEPS}" / "learner"
    assert json.loads((checkpoint / "lora.json").read_text())["rank"] == 4
    assert sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()) < exported
