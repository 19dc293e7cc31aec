"""Rollouts under a thousand pushes and fifty engine deaths: is a token lost, mislabelled, or one too many?

    python -m benchmarks.soak [--json PATH] [--quick] [--pushes N] [--kills N] [--no-scale]

Part one: one real engine with a tiny float32 model, greedy, at least 32 rollouts in flight. Two sets of weights take
turns; pushes come at random moments, also back to back. Every token of every rollout is then compared with what the
model of its version computes. Memory (resident size of this process and of the engine core) is sampled after each push.

Part two: a real run of ``ci_tiny`` with two engines, of which one is killed again and again at random moments: vLLM's
engine core, or the actor around it. The run has to reach its last step; its rollouts and its summary are then checked.

Part three: what many rollouts in flight cost the driver, from ``benchmarks.pool_scale``.

The exit code is 1 when a token was lost, mislabelled or one too many, or a kill was not survived.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.pool_scale import QUICK_SCALE, SCALE
from benchmarks.pool_scale import measure as measure_scale
from benchmarks.report import machine, steps_made, write_json
from generator.engine import Engine
from generator.resume import Sampling
from generator.rollout import Rollout, RolloutError
from tests.tiny import ModuleLearner, OneEngine, engine_settings, next_token_logprobs, tiny_llama
from trainer.control import request
from trainer.leave import leave
from weight_sync.push import Pusher

IN_FLIGHT = 40
MAX_RUNNING = 32
PROMPT_TOKENS = 6
BUDGETS = (40, 300)
"""Response budgets are drawn from this range."""
STEPS_A_KILL = 20
PAUSE_SECONDS = (0.5, 8.0)
"""From the moment an engine serves until the next kill: shorter than another takes to start, so often none is left."""
TINY_BUDGET = 24
"""`sampling.max_tokens` of ci_tiny."""
FAULTS = ("tokens_lost", "tokens_mislabelled", "budget_violations", "rollouts_broken", "tokens_unaccounted")
"""Figures that are 0 in a run without a fault."""
VICTIMS = ("EngineCore", "ray::Engine")
"""How the processes of an engine are called: vLLM's engine core, and the actor that made it."""


# -- part one: pushes ------------------------------------------------------------------------------------------------


async def pushes(count: int, seed: int) -> dict[str, Any]:
    """``count`` pushes into one engine that never stops generating."""
    models: list[Any] = [tiny_llama(1), tiny_llama(2)]
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        models[0].save_pretrained(folder)
        sampling = Sampling(max_tokens=BUDGETS[1], temperature=0.0, max_model_len=512)
        settings = engine_settings(folder, sampling, running=MAX_RUNNING, block_size=32, prestart_core=True)
        engine = Engine(settings)
        await engine.start()
    learner = ModuleLearner(tiny_llama(1), engine)
    pusher = Pusher(learner, OneEngine(engine), timeout=120.0)
    memory: list[dict[str, int]] = []
    finished: list[tuple[Rollout, int]] = []
    stop = asyncio.Event()
    await pusher.push(0)
    lanes = [asyncio.create_task(_keep_sampling(engine, dice, lane, finished, stop)) for lane in range(IN_FLIGHT)]
    for version in range(1, count + 1):
        await asyncio.sleep(dice.choice((0.0, 0.0, 0.02, 0.05, 0.1, 0.2)))
        learner.model.load_state_dict(models[version % 2].state_dict())
        await pusher.push(version)
        memory.append(_resident())
    stop.set()
    await asyncio.wait_for(asyncio.gather(*lanes), timeout=300)
    stats = await engine.stats()
    await engine.shutdown()
    report = check(finished, models)
    report["tokens_lost"] = int(stats["generated_tokens"]) - report["tokens"]
    grown = growth(memory)
    series = {process: [sample.get(process, 0) >> 20 for sample in memory[:: max(1, count // 20)]] for process in grown}
    return report | {
        "pushes": count,
        "memory_growth": max(grown.values()),
        "memory_growth_by_process": grown,
        "memory_mib": series,
    }


async def _keep_sampling(
    engine: Engine, dice: random.Random, lane: int, finished: list[tuple[Rollout, int]], stop: asyncio.Event
) -> None:
    number = 0
    while not stop.is_set():
        prompt = tuple(dice.randrange(3, 96) for _ in range(PROMPT_TOKENS))
        budget = dice.randint(*BUDGETS)
        sampling = Sampling(max_tokens=budget, temperature=0.0, max_model_len=512)
        returned = await engine.generate([Rollout(f"{lane}-{number}", prompt)], sampling)
        finished.append((returned.rollouts[0], budget))
        number += 1


def check(finished: list[tuple[Rollout, int]], models: list[torch.nn.Module]) -> dict[str, Any]:
    """Compare every token with what the model of its version computes."""
    wrong = over = tokens = 0
    resumes: Counter[int] = Counter()
    for rollout, budget in finished:
        ids = [*rollout.prompt_token_ids, *rollout.response_token_ids]
        first = len(rollout.prompt_token_ids) - 1
        rows = [next_token_logprobs(model, ids)[first:] for model in models]
        for position, (token, version) in enumerate(zip(rollout.response_token_ids, rollout.versions, strict=True)):
            row = rows[version % 2][position]
            # Not argmax: of two logits that differ by rounding, either is right.
            wrong += bool(row.max() - row[token] > 1e-3)
            wrong += bool(abs(rollout.logprobs[position] - float(row[token])) > 1e-3)
        over += len(rollout.response_token_ids) != budget
        tokens += len(ids) - len(rollout.prompt_token_ids)
        resumes[rollout.resumes] += 1
    return {
        "rollouts": len(finished),
        "tokens": tokens,
        "tokens_mislabelled": wrong,
        "budget_violations": over,
        "resumes_mean": statistics.mean(resumes.elements()) if resumes else 0.0,
    }


def _resident() -> dict[str, int]:
    """Resident bytes of this process and its descendants, by name and process id."""
    me = psutil.Process()
    return {
        f"{process.name()} {process.pid}": process.memory_info().rss for process in [me, *me.children(recursive=True)]
    }


def growth(memory: list[dict[str, int]]) -> dict[str, float]:
    """How much each process grew: mean of its last quarter over mean of its second, less 1."""
    quarter = max(1, len(memory) // 4)
    early, late = memory[quarter : 2 * quarter] or memory, memory[-quarter:]
    grown = {}
    for process in sorted(set(early[0]) & set(late[-1])):
        before, after = (
            statistics.mean(sample[process] for sample in part if process in sample) for part in (early, late)
        )
        grown[process] = after / before - 1
    return grown


# -- part two: kills -------------------------------------------------------------------------------------------------


def kills(count: int, seed: int) -> dict[str, Any]:
    """A real run whose engines are killed ``count`` times."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "log"
        run = subprocess.Popen(
            [sys.executable, "-m", "trainer", "recipe=ci_tiny", f"run_dir={run_dir}", f"steps={STEPS_A_KILL * count}",
             "engine.count=2", f"engine.max_restarts={2 * count + 10}", "logger.rollouts.every=1",
             "logger.wandb.mode=disabled", "checkpoint.keep=1", "optimizer.learning_rate=1e-4"],
            stdout=log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        steps_at_kill = _kill_again_and_again(run, run_dir, count, dice)
        if run.wait(timeout=3600) != 0:
            raise RuntimeError(f"the run exited with {run.returncode}:\n{log.read_text()[-4000:]}")
        summary = json.loads((run_dir / "summary.json").read_text())
        broken, rollouts = _check_rollouts(run_dir)
    accounted = summary["tokens/trained"] + summary["tokens/expired"] + summary["tokens/lost"]
    return {
        "engine_kills": len(steps_at_kill),
        "kills_survived": sum(summary["steps"] > steps for steps in steps_at_kill),
        "steps": summary["steps"],
        "rollouts_checked": rollouts,
        "rollouts_broken": broken,
        "tokens_unaccounted": summary["tokens/generated"] - accounted,
    }


def _kill_again_and_again(run: subprocess.Popen[bytes], run_dir: Path, count: int, dice: random.Random) -> list[int]:
    """Kill an engine process at random moments while at least one engine serves; the steps done at each kill."""
    steps_at_kill: list[int] = []
    while run.poll() is None and len(steps_at_kill) < count:
        if not _serving(run_dir):
            time.sleep(0.5)
            continue
        time.sleep(dice.uniform(*PAUSE_SECONDS))
        if victims := _processes(run.pid, dice.choice(VICTIMS)):
            dice.choice(victims).kill()
            steps_at_kill.append(steps_made(run_dir))
    return steps_at_kill


def _serving(run_dir: Path) -> int:
    """How many engines serve; 0 before the run listens."""
    with contextlib.suppress(OSError, ValueError):
        return int(request(run_dir, {})["engines_serving"])
    return 0


def _processes(root: int, name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def _check_rollouts(run_dir: Path) -> tuple[int, int]:
    """(broken, checked): rollouts that break an invariant of the data model, of all that were trained on."""
    broken = checked = 0
    for file in sorted((run_dir / "rollouts").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            checked += 1
            try:
                Rollout(
                    "row",
                    tuple(row["prompt_token_ids"]),
                    tuple(row["response_token_ids"]),
                    tuple(row["logprobs"]),
                    tuple(row["versions"]),
                    tuple(row["loss_mask"]),
                    row["finish_reason"],
                )
                assert 0 < len(row["response_token_ids"]) <= TINY_BUDGET
                assert max(row["versions"]) < row["step"]
            except (RolloutError, AssertionError):
                broken += 1
    return broken, checked


def main() -> int:
    """Run the parts, print the table, write the JSON; how many figures show a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-scale", action="store_true", help="leave out part three")
    parser.add_argument("--quick", action="store_true", help="40 pushes, 1 kill, 100 and 1,000 in flight")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pushes, arguments.kills = 40, 1
    report: dict[str, Any] = {"machine": machine()}
    if arguments.pushes:
        report |= asyncio.run(pushes(arguments.pushes, arguments.seed))
    if arguments.kills:
        report |= kills(arguments.kills, arguments.seed)
    if not arguments.no_scale:
        scale = measure_scale(*((QUICK_SCALE, 1_000, 1) if arguments.quick else (SCALE, 20_000, 5)))
        report["driver_cpu_ratio"] = scale["driver_cpu_ratio"]
    print(
        "\n".join(
            f"| {name} | {value if not isinstance(value, float) else f'{value:.4g}'} |"
            for name, value in report.items()
        )
    )
    write_json(arguments.json, report)
    return faults(report)


def faults(report: dict[str, Any]) -> int:
    """How many of the figures show that something was lost, mislabelled or not survived."""
    died = report.get("engine_kills", 0) - report.get("kills_survived", 0)
    return sum(report.get(name, 0) != 0 for name in FAULTS) + (died != 0)


if __name__ == "__main__":
    leave(1 if main() else 0)
