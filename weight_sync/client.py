"""The control plane of a push: vLLM's ``VLLMWeightSyncClient`` over engine actors, every call with a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weight_sync.push import PushError
from weight_sync.ranks import rank_offsets

logger = logging.getLogger(__name__)

ABANDON_SECONDS = 10.0
UpdatePayload = dict[str, Any] | list[dict[str, Any]]


@dataclass(frozen=True)
class InitRequest:
    """What an engine actor hands to ``AsyncLLM.init_weight_transfer_engine``; has the field of vLLM's request class.

    Ours, because importing vLLM's takes seconds of the learner's start, and it would be read no differently.
    """

    init_info: dict[str, Any]


@dataclass(frozen=True)
class UpdateRequest:
    """What an engine actor hands to ``AsyncLLM.update_weights``; has the field of vLLM's request class."""

    update_info: UpdatePayload


class Client(Protocol):
    """vLLM's ``VLLMWeightSyncClient``, with the version that an update brings and a way to give an update up."""

    version: int | None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: UpdatePayload) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    def abandon(self, reason: str) -> None: ...


class AdapterClient(Client, Protocol):
    """A client of engines that hold an adapter beside their weights."""

    def load_adapter(self, version: int, files: Any) -> None: ...


class EngineClient:
    """Drives the weight updates of several engines as one.

    ``engines`` are Ray actor handles with the methods ``init_weight_transfer_engine(request)``,
    ``start_weight_update()``, ``update_weights(request)`` and ``finish_weight_update(weight_version)``, and where
    adapters are pushed alone ``load_adapter(version, files)``.
    ``workers_per_engine`` counts each engine's workers; ``timeout`` bounds each call, in seconds. ``version`` is the
    policy version that the update in progress brings: vLLM's trainer engines finish an update without naming one.

    Every method raises :class:`PushError` with the engine, the step and the cause as soon as one engine fails.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        *,
        workers_per_engine: Sequence[int],
        timeout: float,
        names: Sequence[str] | None = None,
    ) -> None:
        if len(engines) != len(workers_per_engine):
            raise ValueError(f"{len(engines)} engines, but worker counts of {len(workers_per_engine)}")
        self.version: int | None = None
        self._engines = list(engines)
        self._offsets = rank_offsets(workers_per_engine)
        self._timeout = timeout
        self._names = list(names) if names is not None else [f"engine {index}" for index in range(len(engines))]
        self._updating = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every engine join the transfer group, each at its own rank offset.

        vLLM's trainer engines know of one engine only and offer all of them offset 1; ``ipc`` has no group and no rank.
        """
        grouped = "rank_offset" in init_info
        ranks: list[dict[str, Any]] = [{"rank_offset": offset} if grouped else {} for offset in self._offsets]
        requests = [InitRequest(init_info | rank) for rank in ranks]
        self._call("init_weight_transfer_engine", [(request,) for request in requests])

    def start_weight_update(self) -> None:
        """Begin an update in every engine."""
        self._updating = True
        self._call("start_weight_update", [()] * len(self._engines))

    def update_weights(self, update_info: UpdatePayload) -> None:
        """Have every engine receive the announced tensors; returns when all of them hold them."""
        self._call("update_weights", [(UpdateRequest(update_info),)] * len(self._engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Complete the update in every engine, which from then on tags tokens with ``weight_version``."""
        if weight_version is None and self.version is not None:
            weight_version = str(self.version)
        self._call("finish_weight_update", [(weight_version,)] * len(self._engines))
        self._updating = False

    def load_adapter(self, version: int, files: Any) -> None:
        """Have every engine compute with the adapter in ``files``, of which there is one copy on each node."""
        import ray

        stored = ray.put(files)
        self._call("load_adapter", [(version, stored)] * len(self._engines))

    def abandon(self, reason: str) -> None:
        """After a failure, end the update in every engine that is still in one, so that the next can start.

        vLLM's workers leave an update only by finishing it or by failing in ``update_weights``, and the failure of one
        engine leaves the others in theirs. So each is sent what is no announcement. Waits a few seconds at most.
        """
        if not self._updating:
            return
        self._updating = False
        import ray

        request = UpdateRequest({"abandoned": reason})
        calls = [engine.update_weights.remote(request) for engine in self._engines]
        answered, late = ray.wait(calls, num_returns=len(calls), timeout=min(ABANDON_SECONDS, self._timeout))
        for call in answered:
            try:
                ray.get(call)
            except ray.exceptions.RayError as error:  # the expected answer
                logger.debug("%s has left the update: %s", self._names[calls.index(call)], error)
        for call in late:
            logger.warning("%s did not answer that its update was given up", self._names[calls.index(call)])

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Call ``method`` on all engines, each with its arguments; return with the last, fail with the first."""
        import ray

        pending = {}
        for index, (engine, positional) in enumerate(zip(self._engines, arguments, strict=True)):
            pending[getattr(engine, method).remote(*positional)] = index
        deadline = time.monotonic() + self._timeout
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(self._names[index] for index in pending.values())
                raise PushError(method, f"no answer within {self._timeout:g} s (weight_sync.timeout)", late)
            index = pending.pop(ready[0])
            try:
                ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                raise PushError(method, error.cause, self._names[index]) from error
            except ray.exceptions.RayError as error:
                raise PushError(method, error, self._names[index]) from error
