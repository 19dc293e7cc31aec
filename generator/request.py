"""One request at vLLM, from hand-in to its end: the tokens that it brought, each with its version."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from generator.rollout import Segment
from generator.stops import StopMatcher

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class VersionMismatchError(RuntimeError):
    """The versions that we tagged tokens with are not those that vLLM recorded."""


@dataclass(slots=True)
class Request:
    """A request whose tokens are kept as they arrive, so that nothing is lost however it ends."""

    id: str
    stops: StopMatcher | None = None
    """Looks for stop strings; it has seen the tokens of the earlier segments."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens whose KV entries came from the prefix cache."""
    spans: Any = None
    """vLLM's own record of versions; only a request that came to an end has one."""
    surplus_tokens: int = 0
    """Tokens that vLLM sampled behind the end of the response before the request could be ended. They are cut."""
    stalled: bool = False
    submitted_version: int | None = None
    """What was served when the request was handed in."""
    _frozen: bool = False
    _lived_on: bool = False
    """It was frozen at least once, so its tokens may be of several versions."""
    _limit: float = 0.0
    _deadline: asyncio.Timeout | None = None

    async def run(
        self,
        llm: AsyncLLM,
        prompt: Any,
        params: Any,
        limit: float,
        version: Callable[[], int],
        adapter: Any = None,
    ) -> None:
        """Hand the request in and collect its tokens until it ends, or until one of them completes a stop string.

        After ``limit`` seconds without a new token it is taken back and is ``stalled``. ``version`` is asked for the
        served version whenever tokens arrive. ``adapter`` is the LoRA request of the adapter to compute with, if any.
        """
        self._limit = limit
        self.submitted_version = version()
        try:
            async with asyncio.timeout(limit) as self._deadline:
                async for output in llm.generate(prompt, params, self.id, lora_request=adapter):
                    self._restart_clock()
                    ended = self.stopped
                    self._collect(output, version())
                    if self.stopped and not ended and not output.finished:
                        # Aborted rather than left: only an aborted request brings vLLM's record of versions.
                        await llm.abort(self.id)
        except TimeoutError:
            if not (self._deadline and self._deadline.expired()):
                raise
            self.stalled = not self.stopped
        finally:
            self._deadline = None

    @property
    def stopped(self) -> bool:
        """Whether the last token completes a stop string."""
        return self.stops is not None and self.stops.stopped

    def _collect(self, output: Any, version: int) -> None:
        completion = output.outputs[0]
        if not self.token_ids:
            self.cached_tokens = output.num_cached_tokens or 0
        kept = self._kept(completion.token_ids)
        self.surplus_tokens += len(completion.token_ids) - kept
        for token_id, entry in list(zip(completion.token_ids, completion.logprobs or (), strict=True))[:kept]:
            self.token_ids.append(token_id)
            self.logprobs.append(entry[token_id].logprob)
            self.versions.append(version)
        if output.finished:
            self.spans = completion.weight_versions or ()

    def _kept(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens that just arrived belong to the response."""
        if self.stopped:
            return 0
        end = self.stops.feed(token_ids) if self.stops is not None else None
        return len(token_ids) if end is None else end

    def hold(self) -> None:
        """The request is frozen: until :meth:`go_on` its time does not count, though a last token may still arrive."""
        self._frozen = self._lived_on = True
        if self._deadline is not None:
            self._deadline.reschedule(None)

    def go_on(self) -> None:
        """Count the time for the next token from now."""
        self._frozen = False
        self._restart_clock()

    def _restart_clock(self) -> None:
        if self._deadline is not None and not self._frozen and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._limit)

    def check_versions(self) -> None:
        """Compare our tags with vLLM's record (invariant 2).

        In a request that lived through a push, a token that was sampled just before the pause may arrive after the
        resume: the record is right. Elsewhere a difference is a :class:`VersionMismatchError`.
        """
        if self.spans is None:
            return  # vLLM died or stalled: there is no record
        recorded = [int(span.version) for span in self.spans for _ in range(span.start, span.end)]
        if self.surplus_tokens:
            recorded = recorded[: len(self.versions)]
        if recorded == self.versions:
            return
        if not self._lived_on or len(recorded) != len(self.versions):
            raise VersionMismatchError(
                f"request {self.id} was tagged with versions {sorted(set(self.versions))}, but vLLM recorded "
                f"{self.spans} for its {len(self.versions)} tokens"
            )
        self.versions = recorded

    def certain_segments(self) -> list[Segment]:
        """What the request has brought so far and whose version is certain before vLLM's record is there.

        Where requests live through a push, a token that arrives behind it may have been sampled before. A token that
        arrives while the version of the hand-in is served can be of no other.
        """
        return [segment for segment in self.segments() if segment.version == self.submitted_version]

    def segments(self) -> list[Segment]:
        """What the request brought, one segment a version."""
        rows = zip(self.versions, self.token_ids, self.logprobs, strict=True)
        runs = [(version, list(run)) for version, run in itertools.groupby(rows, key=lambda row: row[0])]
        return [Segment(tuple(r[1] for r in run), tuple(r[2] for r in run), version) for version, run in runs]
