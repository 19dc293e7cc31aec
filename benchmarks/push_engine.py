"""Pushes of one model into one real engine: bytes on the wire, the whole push, the gap in the token stream.

    python -m benchmarks.push_engine smollm2|random|tiny [--measure transfer push stall] [--repeat N] [--json PATH]

Learner and engine core are two processes of one machine; what is compared is measured in turns, between them:

- ``transfer``: packed buckets that are ready on the learner, against one raw broadcast of the same bytes;
- ``push``: from the moment the gate begins to close until the first new token of the one rollout there is, against that
  transfer plus vLLM's own reload of the same tensors from the worker's memory. ``restart`` is the part of it that has
  nothing to do with weights: the gate is closed and opened, and the rollout goes on;
- ``stall``: the longest time without a token around a push, with 32 rollouts in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import push_models
from benchmarks.push_bench import IN_FLIGHT, ONE_TOKENS, PROMPT_TOKENS, Bench
from benchmarks.report import machine, table, write_json
from generator.engine import Engine
from generator.launch import EngineSettings
from generator.link import PushMode
from generator.resume import Sampling
from tests.tiny import engine_settings
from trainer.config import WeightSyncConfig
from trainer.leave import leave
from weight_sync.buckets import plan_buckets

MODES: tuple[PushMode, ...] = ("abort", "keep", "wait")
MEASURES = ("transfer", "push", "stall")
STALL_TURNS = 3
"""After the one that does not count: they take most of the time."""
Samples = dict[str, list[float]]


async def measure(bench: Bench, measures: list[str], repeat: int) -> Samples:
    """Everything that is asked for, in turns, ``repeat`` times after one turn that does not count."""
    samples: Samples = defaultdict(list)
    await bench.push()
    for turn in range(repeat + 1):
        taken: dict[str, float] = {}
        if "transfer" in measures or "push" in measures:
            taken |= {"raw": await bench.raw(), "transfer": await bench.transfer()}
        if "push" in measures:
            taken["reload"] = await bench.reload()
            await bench.push()  # vLLM's reload leaves a tied output head stale
            taken["restart"] = await bench.restart()
            taken |= {f"push {mode}": await bench.whole_push(mode) for mode in MODES}
        if "stall" in measures and turn <= STALL_TURNS:
            taken |= {f"stall {mode}": await bench.stall(mode) for mode in MODES}
            taken["stall staged"] = await bench.staged_stall()
        print(
            f"turn {turn} of {repeat}: {', '.join(f'{name} {value:.3f}' for name, value in taken.items())}", flush=True
        )
        if turn:
            for name, seconds in taken.items():
                samples[name].append(seconds)
    return samples


def figures(samples: Samples) -> dict[str, Any]:
    """Ratios of medians; those whose parts were not measured are left out."""
    middle = {name: statistics.median(values) for name, values in samples.items()}
    found: dict[str, Any] = {}
    if "transfer" in middle:
        found["transfer_ratio"] = middle["raw"] / middle["transfer"]
    if "reload" in middle:
        alone = middle["transfer"] + middle["reload"]
        found |= {f"push_ratio {mode}": middle[f"push {mode}"] / alone for mode in MODES}
        found["push_ratio abort, without restart"] = (middle["push abort"] - middle["restart"]) / alone
    if "stall abort" in middle:
        found["staged_stall_ratio"] = middle["stall staged"] / middle["stall abort"]
    return found


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the engine and measure."""
    dtype = getattr(torch, arguments.dtype)
    model = push_models.load(arguments.model, arguments.path, dtype)
    with tempfile.TemporaryDirectory() as folder:
        push_models.save(model, Path(folder))
        engine = Engine(_settings(folder, arguments.dtype))
        await engine.start()
    bench = Bench(engine, model, arguments.bucket_kib << 10)
    try:
        samples = await measure(bench, arguments.measure, arguments.repeat)
    finally:
        await engine.shutdown()
    sent = bench.source.manifest()
    return {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "tensors": len(sent.entries),
        "bytes": sent.total_bytes,
        "buckets": len(plan_buckets(sent, bench.bucket_bytes)),
        **figures(samples),
        "seconds": dict(samples),
    }


def _settings(folder: str, dtype: str) -> EngineSettings:
    sampling = Sampling(max_tokens=ONE_TOKENS, min_tokens=ONE_TOKENS, max_model_len=PROMPT_TOKENS + ONE_TOKENS)
    settings = engine_settings(
        folder, sampling, IN_FLIGHT, threads=2, dtype=dtype, kv_cache_bytes=1 << 30, block_size=32, prestart_core=True
    )
    # With the first a function can be run in vLLM's worker; the second is what runs have on CPU.
    settings.environment.update({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OMP_WAIT_POLICY": "PASSIVE"})
    return settings


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*push_models.NAMES, push_models.TINY])
    parser.add_argument("--path", type=Path, help="another folder for smollm2")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--bucket-kib", type=int, default=WeightSyncConfig().bucket_mib << 10)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments))
    rows = [
        {"what": name, "median": statistics.median(values), "fastest": min(values), "slowest": max(values)}
        for name, values in report["seconds"].items()
    ]
    print(f"{machine()}; {report['model']}, {report['dtype']}, {report['bytes'] >> 20} MiB\n\n{table(rows)}\n")
    print("\n".join(f"{name}: {value}" for name, value in report.items() if "ratio" in name))
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
    leave(0)
