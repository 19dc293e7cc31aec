"""How much memory a push takes on learner ranks whose weights are partitioned (ZeRO-3), in buckets.

    python -m benchmarks.push_zero3 smollm2|random|tiny [--pushes 3] [--json PATH]

Two ranks of the real learner, after an optimizer step, so that all of its memory is there; this process receives in the
engines' place. Before each push a rank gives memory that it does not use back to the operating system; what it needs at
most beyond that, while it pushes, is what counts. The unit is the largest bucket that travels: a tensor is never split,
so where the embedding is larger than ``weight_sync.bucket_mib`` the unit is a bucket with the embedding.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import re
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from benchmarks import push_models
from benchmarks.report import figures, machine, write_json
from tests.tiny import learner_spec
from trainer.batching import TrainRollout
from trainer.config import LearnerConfig, WeightSyncConfig
from trainer.learner_setup import LearnerSpec
from trainer.leave import leave
from weight_sync.buckets import plan_buckets
from weight_sync.group import GlooGroup, free_port, receive_buckets
from weight_sync.manifest import Manifest
from weight_sync.sender import WeightSender
from weight_sync.source import DeepSpeedSource

RANKS = 2
TIMEOUT = 120.0


class PipeClient:
    """The sender's client: what it asks of engines goes through a pipe to the process that plays them."""

    def __init__(self, pipe: Connection) -> None:
        self.version: int | None = None
        self._pipe = pipe

    def _ask(self, what: str, argument: Any = None) -> None:
        self._pipe.send((what, argument))
        if not self._pipe.poll(TIMEOUT):
            raise TimeoutError(f"the receiver did not answer {what} within {TIMEOUT:g} s")
        if answer := self._pipe.recv():
            raise RuntimeError(answer)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("init", init_info)

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None:
        self._ask("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def abandon(self, reason: str) -> None: ...


def serve(pipe: Connection, bucket_bytes: int) -> None:
    """Receive updates until the sender hangs up."""
    group: GlooGroup | None = None
    with contextlib.suppress(EOFError):
        while True:
            what, info = pipe.recv()
            try:
                if what == "init":
                    where = (info["master_address"], info["master_port"])
                    group = GlooGroup(*where, info["rank_offset"], info["world_size"], TIMEOUT)
                else:
                    assert group is not None
                    manifest = Manifest.from_wire(info["names"], info["dtype_names"], info["shapes"])
                    sizes = [sum(entry.bytes for entry in bucket) for bucket in plan_buckets(manifest, bucket_bytes)]
                    for _ in receive_buckets(group, sizes):
                        pass
                pipe.send("")
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")


def rank_main(
    rank: int, port: int, spec: LearnerSpec, bucket_bytes: int, pushes: int, pipe: Connection | None, results: Any
) -> None:
    """One learner rank: a step, then pushes. Puts (rank, what each took at most in bytes) into ``results``."""
    from trainer.learner import Learner

    learner = Learner(spec, rank, RANKS, "127.0.0.1", port)
    learner.train(batch(), version=0)
    dtype = getattr(torch, spec.dtype)
    source = DeepSpeedSource(learner.engine, prefix="model.", dtype=dtype, bucket_bytes=bucket_bytes)
    sender = WeightSender(source, backend="gloo", rank=rank, bucket_bytes=bucket_bytes, timeout=TIMEOUT)
    if pipe is not None:
        sender.connect_client(PipeClient(pipe), "127.0.0.1", 0, 2)
    taken = []
    for version in range(pushes):
        sender.prepare()
        steady = settle()
        sender.send(version)
        taken.append(status("VmHWM") - steady)
    sender.close()
    sizes = [sum(entry.bytes for entry in bucket) for bucket in plan_buckets(source.manifest(), bucket_bytes)]
    results.put((rank, taken, sizes))
    learner.close()


def settle() -> int:
    """Give back what is unused and forget the peak so far; resident bytes now."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(key: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def batch() -> list[TrainRollout]:
    """A few rollouts, enough for an optimizer step."""
    count = 4
    return [
        TrainRollout(
            id=str(number),
            group=0,
            prompt_token_ids=(5, 6, 7),
            response_token_ids=(8 + number, 9, 10, 11),
            logprobs=(-2.0,) * 4,
            versions=(0,) * 4,
            loss_mask=(True,) * 4,
            advantage=1.0 if number % 2 else -1.0,
        )
        for number in range(count)
    ]


def run(model_name: str, path: Path | None, dtype: str, bucket_bytes: int, pushes: int) -> dict[str, Any]:
    """Start the ranks, play the engines, and put the figures together."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        model = push_models.load(model_name, path, getattr(torch, dtype))
        model.save_pretrained(folder)
        del model
        spec = learner_spec(folder, dtype=dtype, learner=LearnerConfig(zero_stage=3, ranks=RANKS, timeout=TIMEOUT))
        port = free_port("127.0.0.1")
        ranks = [
            context.Process(
                target=rank_main,
                args=(rank, port, spec, bucket_bytes, pushes, None if rank else there, results),
                daemon=True,
            )
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        there.close()  # so that the pipe ends with the sender
        serve(here, bucket_bytes)
        answers = dict((rank, (taken, sizes)) for rank, taken, sizes in (results.get(timeout=60) for _ in ranks))
        for process in ranks:
            process.join(60)
    sizes = answers[0][1]
    unit = max(sizes)
    by_rank = {f"rank {rank}": [taken / unit for taken in answers[rank][0]] for rank in sorted(answers)}
    return {
        "model": model_name,
        "dtype": dtype,
        "bytes": sum(sizes),
        "bucket_bytes": unit,
        "zero3_buckets": max(max(values) for values in by_rank.values()),
        "buckets_by_rank": by_rank,
    }


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*push_models.NAMES, push_models.TINY])
    parser.add_argument("--path", type=Path, help="another folder for smollm2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--bucket-kib", type=int, default=WeightSyncConfig().bucket_mib << 10)
    parser.add_argument("--pushes", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = run(arguments.model, arguments.path, arguments.dtype, arguments.bucket_kib << 10, arguments.pushes)
    print(machine())
    print(figures(report))
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
    leave(0)
