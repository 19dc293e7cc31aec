"""The learner against a bare PyTorch loop of forward, backward and AdamW: tokens a second, and memory of the loss.

    python -m benchmarks.learner [--model PATH] [--json PATH] [--quick]

Both train the same model on the same batches with the same threads, and take turns; a figure is the median of the
ratios of the turns, since the speed of a shared machine changes from one turn to the next. The bare loop is a good one:
it pads to the longest rollout of the batch, fills micro-batches up to the same token budget, and runs the head on the
response tokens alone.

`throughput_ratio_padded`: all rollouts are equally long, so there is nothing to gain from batching; what is measured is
what the learner costs (DeepSpeed, corrections, diagnostics). `throughput_ratio_real`: prompts in groups and the lengths
of a real run, with the learner's own packing. `loss_memory_ratio`: the peak memory of log-probabilities and their
gradients for 4,096 response tokens over that for 1,024. Without --model, SmolLM2-135M-Instruct; --quick takes a tiny
model and few repetitions. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, table, write_json
from tests.tiny import learner_spec, tiny_llama
from trainer.config import LearnerConfig, OptimizerConfig
from trainer.learner import Learner
from trainer.logprobs import chunked_logprobs
from trainer.model import embedded_model
from trainer.train_rollout import TrainRollout

OPTIMIZER = OptimizerConfig(learning_rate=1e-6)
MEMORY_VOCABULARY = 49_152
FEW_TOKENS, MANY_TOKENS = 1024, 4096
PROMPTS = (40, 160)
"""Shortest and longest prompt of the batch with real lengths."""


def batch(vocabulary: int, groups: int, size: int, length: Callable[[random.Random], tuple[int, int]]) -> list[Any]:
    """``groups`` groups of ``size`` rollouts; ``length`` draws the length of a prompt and of one response to it."""
    chance = random.Random(0)
    rollouts = []
    for group in range(groups):
        prompt = tuple(chance.choices(range(vocabulary), k=length(chance)[0]))
        for number in range(size):
            n = length(chance)[1]
            rollouts.append(
                TrainRollout(
                    id=f"{group}.{number}",
                    group=group,
                    prompt_token_ids=prompt,
                    response_token_ids=tuple(chance.choices(range(vocabulary), k=n)),
                    logprobs=(-3.0,) * n,
                    versions=(0,) * n,
                    loss_mask=(True,) * n,
                    advantage=(-1.0) ** number,
                )
            )
    return rollouts


def even(_: random.Random) -> tuple[int, int]:
    """Every prompt and every response as long as any other."""
    return 64, 97  # the last response token is not fed, so rows have 160 tokens


def real(chance: random.Random) -> tuple[int, int]:
    """Many short responses and a few that use the whole budget."""
    return chance.randint(*PROMPTS), min(256, max(4, round(chance.lognormvariate(4.0, 0.8))))


class BareLoop:
    """What one would write without a framework: padded micro-batches, the policy gradient, clipped AdamW."""

    def __init__(self, model: torch.nn.Module, token_budget: int) -> None:
        self._model, self._budget = model.train(), token_budget
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=OPTIMIZER.learning_rate,
            betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
            weight_decay=OPTIMIZER.weight_decay,
            fused=True,
        )

    def train(self, rollouts: Sequence[TrainRollout]) -> None:
        """One step on the batch."""
        tokens = sum(len(r.response_token_ids) for r in rollouts)
        longest = max(len(r.prompt_token_ids) + len(r.response_token_ids) for r in rollouts)
        rows = max(1, self._budget // longest)
        for start in range(0, len(rollouts), rows):
            part = rollouts[start : start + rows]
            (self._loss(part, longest) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIMIZER.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, rollouts: Sequence[TrainRollout], longest: int) -> torch.Tensor:
        ids = torch.zeros(len(rollouts), longest, dtype=torch.int64)
        attended = torch.zeros_like(ids)
        response = torch.zeros_like(ids, dtype=torch.bool)
        advantages = torch.tensor([r.advantage for r in rollouts])
        for row, r in enumerate(rollouts):
            sequence = r.prompt_token_ids + r.response_token_ids
            ids[row, : len(sequence)] = torch.tensor(sequence)
            attended[row, : len(sequence)] = 1
            response[row, len(r.prompt_token_ids) : len(sequence)] = True
        model: Any = self._model
        output = model.base_model(input_ids=ids[:, :-1], attention_mask=attended[:, :-1], use_cache=False)
        hidden = output.last_hidden_state[response[:, 1:]]
        log_p = model.get_output_embeddings()(hidden).float().log_softmax(-1)
        logprobs = log_p.gather(1, ids[response][:, None]).squeeze(1)
        by_token = advantages.repeat_interleave(response.sum(1))
        return -(by_token * logprobs).sum()


def throughput(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step, by batch and by who makes it, and their ratios."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    bare = BareLoop(model, arguments.budget)
    figures: dict[str, Any] = {}
    learners: list[Learner] = []
    for name, packing, lengths in (("padded", "padded", even), ("real", "shared_prompt", real)):
        rollouts = batch(model.config.vocab_size, arguments.groups, arguments.size, lengths)
        learner = make_learner(folder, packing, arguments)
        learners.insert(0, learner)
        makers: dict[str, Callable[[Sequence[TrainRollout]], Any]] = {
            "bare": bare.train,
            "learner": functools.partial(learner.train, version=0),
        }
        for make in makers.values():
            make(rollouts[: arguments.size])  # a warm-up: buffers and optimizer state are made in the first step
        seconds: dict[str, list[float]] = {who: [] for who in makers}
        for _ in range(arguments.repeat):
            for who, make in makers.items():
                started = time.perf_counter()
                make(rollouts)
                seconds[who].append(time.perf_counter() - started)
        tokens = sum(len(r.prompt_token_ids) + len(r.response_token_ids) - 1 for r in rollouts)
        for who, values in seconds.items():
            figures[f"{who}_tokens_per_second_{name}"] = tokens / statistics.median(values)
        turns = [bare_loop / ours for bare_loop, ours in zip(seconds["bare"], seconds["learner"], strict=True)]
        figures[f"throughput_ratio_{name}"] = statistics.median(turns)
        figures[f"throughput_ratios_{name}"] = [round(turn, 3) for turn in sorted(turns)]
    for learner in learners:  # the first one, whose process group the others share, comes last
        learner.close()
    return figures


def make_learner(folder: str, packing: str, arguments: argparse.Namespace) -> Learner:
    """A learner of one rank, as a run has it."""
    settings = LearnerConfig(micro_batch_tokens=arguments.budget, cpu_threads=arguments.threads, packing=packing)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Learner(learner_spec(folder, learner=settings, optimizer=OPTIMIZER), 0, 1, "127.0.0.1", port)


def loss_memory(hidden_size: int, tokens: int) -> int:
    """Peak memory, in bytes, that log-probabilities of ``tokens`` tokens and their gradients add to this process."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(MEMORY_VOCABULARY, hidden_size, requires_grad=True)
    targets = torch.randint(MEMORY_VOCABULARY, (tokens,))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    logprobs, _ = chunked_logprobs(hidden, weight, None, targets, 1.0, LearnerConfig().logprob_chunk)
    logprobs.sum().backward()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A figure of ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def memory(hidden_size: int) -> dict[str, Any]:
    """The memory of the loss for few and for many tokens, each in a process of its own, and their ratio."""
    context = multiprocessing.get_context("spawn")
    figures = []
    for tokens in (FEW_TOKENS, MANY_TOKENS):
        with context.Pool(1) as pool:
            figures.append(pool.apply(loss_memory, (hidden_size, tokens)))
    few, many = figures
    mib = 1 << 20
    return {"loss_mib_few_tokens": few / mib, "loss_mib_many_tokens": many / mib, "loss_memory_ratio": many / few}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as folder:
        if arguments.quick:
            tiny: Any = tiny_llama(1)
            tiny.save_pretrained(folder)
        model = folder if arguments.quick else str(arguments.model or embedded_model())
        hidden_size = json.loads((Path(model) / "config.json").read_text())["hidden_size"]
        return throughput(model, arguments) | memory(hidden_size)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in the format of transformers")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--size", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeat, arguments.groups = 2, 2
    figures = run(arguments)
    rows = [{"figure": name, "value": value} for name, value in figures.items()]
    print(f"{machine()}\n\n{table(rows)}")
    write_json(arguments.json, {"machine": machine(), **figures})


if __name__ == "__main__":
    main()
