"""What runs inside the Ray actor of one learner rank: the learner, and what sends its weights to the engines."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch

from trainer.learner import Learner
from trainer.learner_setup import LearnerSpec, TransferSpec
from trainer.step_metrics import StepResult
from trainer.train_rollout import TrainRollout
from weight_sync.source import DeepSpeedSource

if TYPE_CHECKING:
    from weight_sync.lora import LoraPart
    from weight_sync.manifest import Manifest


class LearnerActor:
    """One rank inside its actor: the learner and its weight sender. Errors of both pass through unchanged."""

    def __init__(self) -> None:
        self._learner: Any = None
        self._senders: dict[str, Any] = {}

    def rendezvous(self) -> tuple[str, int]:
        """This node's address and a port that is free on it."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def start(self, spec: LearnerSpec, rank: int, world_size: int, address: str, port: int) -> None:
        self._learner = Learner(spec, rank, world_size, address, port)
        if spec.device == "cuda":
            # Takes many seconds: they pass while the engines start, not when the first push waits.
            importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")

    def train(self, rollouts: Sequence[TrainRollout], version: int) -> StepResult:
        return self._learner.train(rollouts, version)

    def accumulate(self, rollouts: Sequence[TrainRollout], version: int) -> None:
        self._learner.accumulate(rollouts, version)

    def kl_penalties(self, rollouts: Sequence[TrainRollout]) -> list[float]:
        return self._learner.kl_penalties(rollouts)

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        return self._learner.logprobs(sequences, temperature)

    def base_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._learner.base_logprobs(sequences)

    def save(self, folder: str) -> None:
        self._learner.save(folder)

    def load(self, folder: str) -> None:
        self._learner.load(folder)

    def export(self, folder: str) -> None:
        self._learner.export(folder)

    def connect_weights(self, transfer: TransferSpec) -> None:
        if transfer.pool not in self._senders:
            self._senders[transfer.pool] = self._sender(transfer)
        sender = self._senders[transfer.pool]
        sender.connect(transfer.engines, transfer.names, transfer.workers, transfer.address, 0)

    def _sender(self, transfer: TransferSpec) -> Any:
        size = transfer.bucket_bytes
        options: dict[str, Any] = {
            "backend": transfer.backend,
            "rank": self._learner.rank,
            "bucket_bytes": size,
            "timeout": transfer.timeout,
        }
        if transfer.adapters:
            from weight_sync.adapter_sender import AdapterSender

            return AdapterSender(self._source("base", size), self._source("adapter", size), **options)
        from weight_sync.sender import WeightSender

        options |= {"staging": transfer.staging, "deltas": transfer.deltas, "ranks": self._learner.world_size}
        return WeightSender(self._source("merged", size), **options)

    def _source(self, part: LoraPart, bucket_bytes: int) -> DeepSpeedSource:
        dtype = getattr(torch, self._learner.spec.dtype)
        return DeepSpeedSource(self._learner.engine, prefix="model.", dtype=dtype, bucket_bytes=bucket_bytes, lora=part)

    def prepare_push(self, pool: str, base: int | None) -> Manifest:
        return self._senders[pool].prepare(base)

    def send_weights(self, pool: str, version: int, hashed: bool) -> int:
        return self._senders[pool].send(version, hashed)

    def steps_done(self) -> int:
        return self._learner.steps_done

    def interrupt(self) -> None:
        # Runs in the control group's thread, beside the call that it interrupts.
        if self._learner is not None:
            self._learner.interrupt()

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        if self._learner is not None:
            self._learner.close()
