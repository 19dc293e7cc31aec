"""The whole real stack learns: a two-layer model from random weights, a trivial reward, tens of steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 25


def metrics(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train ``ci_tiny`` and return the metrics of each step."""
    command = [
        sys.executable, "-m", "trainer", "recipe=ci_tiny", f"steps={STEPS}", f"run_dir={folder}", "hardware=cpu",
        "logger.wandb.mode=disabled", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def gain(steps: list[dict[str, float]]) -> float:
    """How much the share of the letter `a` rose from the first five steps to the last five."""
    shares = [step["reward/share_of_a"] for step in steps]
    return sum(shares[-5:]) / 5 - sum(shares[:5]) / 5


@pytest.fixture(scope="module")
def flipped_on_policy(tmp_path_factory) -> list[dict[str, float]]:
    """A weight of -1 flips every reward and so every advantage; the logged part stays the plain share."""
    flipped = "reward=[{name: share_of_a, function: recipes.ci_tiny.reward.share_of_a, weight: -1.0}]"
    return metrics(tmp_path_factory.mktemp("flipped") / "run", flipped, "staleness.max_versions=0")


@pytest.mark.engine
def test_a_tiny_model_from_random_weights_learns_a_trivial_reward(tmp_path):
    steps = metrics(tmp_path / "run")
    assert gain(steps) > 0.2, steps


@pytest.mark.engine
def test_with_the_sign_of_the_advantage_flipped_it_unlearns_it(flipped_on_policy):
    assert gain(flipped_on_policy) < 0.02, flipped_on_policy


@pytest.mark.engine
def test_right_after_every_push_engine_and_learner_give_the_same_tokens_the_same_log_probabilities(flipped_on_policy):
    """On-policy: all tokens of a batch were sampled by an engine from the weights that the learner has."""
    # A batch without a single `a` has no advantages: nothing is fed, and there is nothing to compare.
    compared = [step for step in flipped_on_policy if "mismatch/logprob_abs_diff_mean" in step]
    assert len(compared) >= 5
    assert len({step["policy/entropy"] for step in compared}) == len(compared), "the weights changed in between"
    for step in compared:
        assert step["staleness/token_max"] == 0
        assert step["mismatch/logprob_abs_diff_mean"] <= 1e-5
