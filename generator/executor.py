"""vLLM's executor for an engine of several workers, with one fault cured: answers that nobody has read.

A call to all workers reads their answers one after another and raises at the first that is a failure. What the workers
behind it answered stays in their queues and is taken for the answer to the next call, from then on for good (vLLM 0.32,
``MultiprocExecutor.collective_rpc``). An engine that has survived a failed push could then never take part in another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

UNREAD_SECONDS = 300.0
"""What a worker may take to answer a call that has failed already; its own waits end earlier."""


class WorkersExecutor(MultiprocExecutor):
    """Before a new call, what earlier calls have left unread is thrown away."""

    def _post_init_executor(self) -> None:
        super()._post_init_executor()
        self._unread = [0] * len(self.response_mqs)
        """Of each worker, the answers to come that somebody waits for or has given up waiting for."""
        for worker, queue in enumerate(self.response_mqs):
            queue.dequeue = partial(self._read, worker, queue.dequeue)

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, **options: Any
    ) -> Any:
        """As vLLM's. Raises ``TimeoutError`` when a worker still owes the answer to an earlier call."""
        if not self.futures_queue:  # else there are answers that somebody will read
            self._throw_away_unread()
        everyone = options.get("kv_output_aggregator") or options.get("ec_output_aggregator")
        only = None if everyone else options.get("unique_reply_rank")
        for worker in range(len(self._unread)) if only is None else [only]:
            self._unread[worker] += 1
        return super().collective_rpc(method, timeout, args, kwargs, **options)

    def _read(self, worker: int, dequeue: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = dequeue(*args, **kwargs)
        self._unread[worker] -= 1
        return answer

    def _throw_away_unread(self) -> None:
        for worker, queue in enumerate(self.response_mqs):
            while self._unread[worker] > 0:
                queue.dequeue(timeout=UNREAD_SECONDS)
