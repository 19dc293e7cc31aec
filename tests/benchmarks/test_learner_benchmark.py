import json
import subprocess
import sys

import pytest


@pytest.mark.engine
def test_the_quick_benchmark_of_the_learner_writes_its_three_ratios(tmp_path):
    path = tmp_path / "learner.json"
    command = [sys.executable, "-m", "benchmarks.learner", "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(path.read_text())
    for name in ("throughput_ratio_padded", "throughput_ratio_real", "loss_memory_ratio"):
        assert figures[name] > 0
    # For four times the tokens, the memory of one chunk and of what is one number or one hidden state a token.
    assert figures["loss_memory_ratio"] < 1.5
