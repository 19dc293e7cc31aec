"""Whether memory grows with every push: 500 pushes of a tiny model into one real engine.

    python -m benchmarks.push_memory [--pushes 500] [--settled 50] [--json PATH]

After ``--settled`` pushes and at the end, the resident size of this process, where the learner's side is, and of the
engine's is the mean over ten pushes. Every push is proven by digests and a canary, and two sets of weights take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import figures, machine, write_json
from generator.engine import Engine
from generator.resume import Sampling
from tests.tiny import VOCABULARY, ModuleLearner, OneEngine, engine_settings, tiny_llama
from trainer.leave import leave
from weight_sync.canary import canary_sequences
from weight_sync.push import Pusher
from weight_sync.verification import Verification

CONTEXT = 128
WINDOW = 10
"""Pushes that a figure is the mean of."""


def resident() -> dict[str, int]:
    """Resident bytes of this process and its descendants, by name and process id."""
    me = psutil.Process()
    return {
        f"{process.name()} {process.pid}": process.memory_info().rss for process in [me, *me.children(recursive=True)]
    }


async def run(pushes: int, settled: int) -> dict[str, Any]:
    """Push, and compare the memory of all processes that were there all the time."""
    models: list[Any] = [tiny_llama(1), tiny_llama(2)]
    with tempfile.TemporaryDirectory() as folder:
        models[0].save_pretrained(folder)
        engine = Engine(engine_settings(folder, Sampling(max_tokens=8, max_model_len=CONTEXT), running=4))
        await engine.start()
    learner = ModuleLearner(tiny_llama(1), engine)
    proof = Verification("every", "float32", canary_sequences(VOCABULARY, CONTEXT - 1))
    pusher = Pusher(learner, OneEngine(engine), timeout=60.0, verification=proof)
    samples: list[dict[str, int]] = []
    try:
        for version in range(pushes):
            learner.model.load_state_dict(models[version % 2].state_dict())
            await pusher.push(version)
            samples.append(resident())
    finally:
        await engine.shutdown()
    early, late = samples[settled - WINDOW : settled], samples[-WINDOW:]
    processes = [process for process in early[0] if all(process in sample for sample in early + late)]
    growth = {process: _mean(late, process) / _mean(early, process) for process in processes}
    return {
        "pushes": pushes,
        "settled": settled,
        "memory_growth": max(growth.values()),
        "by_process": growth,
        "mib": {process: [sample[process] >> 20 for sample in samples[:: max(1, pushes // 20)]]
                for process in processes},
    }  # fmt: skip


def _mean(samples: list[dict[str, int]], process: str) -> float:
    return statistics.mean(sample[process] for sample in samples)


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=500)
    parser.add_argument("--settled", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments.pushes, arguments.settled))
    print(machine())
    print(figures(report))
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
    leave(0)
