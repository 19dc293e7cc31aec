"""What a push costs in each mode: pause, recomputed tokens, and how far engine and learner drift apart.

    python -m benchmarks.push_modes [--model PATH] [--pushes N] [--running N] [--repeat N] [--json PATH] [--quick]

One engine generates without a break while new weights are pushed. The pushed weights differ as after an optimizer step
of AdamW: every weight moves by the learning rate, up or down at random. Afterwards every sampled token is scored by the
model of its version, given the whole sequence before it: the gap is the difference to the log-probability that the
engine reported, by the token's age (pushes that its rollout had been through when it was sampled). Modes take turns in
one process; ``--quick`` uses a tiny random model.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, table, write_json
from generator.engine import Engine
from generator.launch import EngineSettings
from generator.link import KvCache, PushMode
from generator.resume import Sampling
from generator.rollout import Rollout
from tests.tiny import ModuleLearner, OneEngine, engine_settings, next_token_logprobs, tiny_llama
from trainer.leave import leave
from weight_sync.push import Pusher

MODES: list[tuple[PushMode, KvCache]] = [
    ("abort", "recompute"),
    ("keep", "recompute"),
    ("keep", "reuse"),
    ("wait", "recompute"),
]
LEARNING_RATE = 2e-5
PROMPT_TOKENS = 60


def moved(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy whose every weight has moved by the learning rate, up or down."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randint_like(parameter, 2).mul_(2).sub_(1), alpha=LEARNING_RATE)
    return other


async def measure(
    engine: Engine, models: list[Any], mode: PushMode, kv_cache: KvCache, running: int, budget: int, seed: int
) -> dict[str, Any]:
    """One pass over all models: ``running`` rollouts, a push at even distances.

    Passes of one engine take different seeds: prompts of an earlier one may be in the prefix cache, under its weights.
    """
    learner = ModuleLearner(models[0], engine)
    side = OneEngine(engine)
    side.mode, side.kv_cache = mode, kv_cache
    pusher = Pusher(learner, side, timeout=300.0, drain_timeout=300.0)
    vocabulary = models[0].config.vocab_size
    torch.manual_seed(seed)
    prompts = torch.randint(3, vocabulary, (running, PROMPT_TOKENS)).tolist()
    await pusher.push(0)
    before = await engine.stats()
    task = asyncio.create_task(engine.generate([Rollout(str(n), tuple(p)) for n, p in enumerate(prompts)]))
    started = time.monotonic()
    pauses, recomputed = [], 0.0
    every = running * budget // len(models)
    for version in range(1, len(models)):
        await _sampled(engine, before["generated_tokens"] + version * every, task)
        learner.model = models[version]
        # Every rollout is still running: budgets are equal, and the last push comes before they are used up.
        tokens = running * PROMPT_TOKENS + (await engine.stats())["generated_tokens"] - before["generated_tokens"]
        pauses.append((await pusher.push(version)).pause_seconds)
        recomputed += 0 if mode == "wait" or kv_cache == "reuse" else tokens
    finished = (await task).rollouts
    seconds = time.monotonic() - started
    gaps = gap_by_age(finished, models)
    return {
        "mode": mode if mode != "keep" else f"keep, {kv_cache}",
        "pause_seconds": statistics.median(pauses),
        "recomputed_tokens_a_push": recomputed / len(pauses),
        "seconds": seconds,
        **{f"gap_age_{age}": statistics.mean(gaps[age]) if age in gaps else None for age in range(len(models))},
        "gap_max": max(max(values) for values in gaps.values()),
    }


async def _sampled(engine: Engine, tokens: float, task: asyncio.Task[Any]) -> None:
    while not task.done() and (await engine.stats())["generated_tokens"] < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def gap_by_age(rollouts: list[Rollout], models: list[torch.nn.Module]) -> dict[int, list[float]]:
    """Absolute differences of log-probabilities, by how many versions the rollout had seen before the token's."""
    gaps: dict[int, list[float]] = defaultdict(list)
    for rollout in rollouts:
        ids = [*rollout.prompt_token_ids, *rollout.response_token_ids]
        first = len(rollout.prompt_token_ids) - 1
        rows = {version: next_token_logprobs(models[version], ids)[first:] for version in set(rollout.versions)}
        columns = zip(rollout.response_token_ids, rollout.versions, rollout.logprobs, strict=True)
        for position, (token, version, logprob) in enumerate(columns):
            gaps[version - rollout.versions[0]].append(abs(logprob - float(rows[version][position][token])))
    return gaps


async def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All modes, taking turns, ``repeat`` times."""
    base: Any = tiny_llama(1) if arguments.quick else _load(arguments.model)
    models = [base]
    for number in range(arguments.pushes):
        models.append(moved(models[-1], number))
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        engine = Engine(_settings(folder, arguments))
        await engine.start()
    try:
        return [
            await measure(engine, models, mode, kv_cache, arguments.running, arguments.tokens, seed)
            for seed, (mode, kv_cache) in enumerate(MODES * arguments.repeat)
        ]
    finally:
        await engine.shutdown()


def _load(path: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _settings(folder: str, arguments: argparse.Namespace) -> EngineSettings:
    context = PROMPT_TOKENS + arguments.tokens
    sampling = Sampling(max_tokens=arguments.tokens, min_tokens=arguments.tokens, max_model_len=context)
    return engine_settings(
        folder, sampling, arguments.running, threads=2, kv_cache_bytes=1 << 30, block_size=32, prestart_core=True
    )


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in the format of transformers")
    parser.add_argument("--pushes", type=int, default=3)
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="response tokens of a rollout")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeat = 1
    elif not arguments.model:
        parser.error("--model PATH is needed without --quick")
    rows = asyncio.run(run(arguments))
    print(f"{machine()}\n\n{table(rows)}")
    write_json(arguments.json, {"machine": machine(), "runs": rows})


if __name__ == "__main__":
    main()
    leave(0)
