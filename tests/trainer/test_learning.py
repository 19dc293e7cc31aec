"""The whole real stack learns: a two-layer model from random weights, a trivial reward, tens of steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 25


def share_of_a(folder: Path, *overrides: str) -> list[float]:
    """Train ``ci_tiny`` and return the share of tokens that are the letter `a`, one number a step."""
    command = [
        sys.executable, "-m", "trainer", "recipe=ci_tiny", f"steps={STEPS}", f"run_dir={folder}", "hardware=cpu",
        "logger.wandb.mode=disabled", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["reward/share_of_a"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def gain(shares: list[float]) -> float:
    """How much the share rose from the first five steps to the last five."""
    return sum(shares[-5:]) / 5 - sum(shares[:5]) / 5


@pytest.mark.engine
def test_a_tiny_model_from_random_weights_learns_a_trivial_reward(tmp_path):
    shares = share_of_a(tmp_path / "run")
    assert gain(shares) > 0.2, shares


@pytest.mark.engine
def test_with_the_sign_of_the_advantage_flipped_it_unlearns_it(tmp_path):
    """A weight of -1 flips every reward and so every advantage; the logged part stays the plain share."""
    flipped = "reward=[{name: share_of_a, function: recipes.ci_tiny.reward.share_of_a, weight: -1.0}]"
    shares = share_of_a(tmp_path / "run", flipped)
    assert gain(shares) < 0.02, shares
