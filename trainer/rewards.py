"""Scoring: reward functions are called outside the event loop, with a deadline, and nothing missing becomes a zero.

A part (one reward function) that raises, runs out of time, declines (``None``), returns something that is no finite
number, or returns the wrong number of values has no value for its rollouts. A rollout whose weighted parts are not all
there has no reward: it is excluded and counted by cause, never scored 0.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from generator.rollout import Prompt, Rollout, ScoredRollout
from trainer.dotted import DottedPathError, resolve_dotted
from trainer.threads import in_daemon_thread

logger = logging.getLogger(__name__)

PURPOSE = "reward function"


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One reward function under the name it is logged by. A part of weight 0 is logged and does not count."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0


def resolve_rewards(spec: Any, defaults: Sequence[tuple[str, str, float]]) -> tuple[RewardPart, ...]:
    """The reward functions that ``spec`` (``reward`` of the configuration) names, or the task's ``defaults``.

    ``spec`` is ``None``, a dotted path, or a list whose items are dotted paths or mappings with ``function`` and, if
    wanted, ``name`` and ``weight``. Raises :class:`DottedPathError` that names the item that is wrong.
    """
    if spec is None:
        items: list[Any] = [{"name": name, "function": path, "weight": weight} for name, path, weight in defaults]
    elif isinstance(spec, Sequence) and not isinstance(spec, str):
        items = list(spec)
    else:
        items = [spec]
    parts = tuple(_resolve_part(item) for item in items)
    repeated = [name for name, count in Counter(part.name for part in parts).items() if count > 1]
    if repeated:
        raise DottedPathError(f"reward: several functions are named {repeated[0]!r}; give each its own name")
    if not any(part.weight for part in parts):
        raise DottedPathError("reward: no function has a weight other than 0, so no rollout would have a reward")
    return parts


def _resolve_part(item: Any) -> RewardPart:
    if isinstance(item, str):
        item = {"function": item}
    if not isinstance(item, Mapping) or not isinstance(item.get("function"), str):
        raise DottedPathError(f"reward: {item!r} is neither a dotted path nor a mapping with the key 'function'")
    unknown = set(item) - {"name", "function", "weight"}
    if unknown:
        raise DottedPathError(f"reward: unknown key {sorted(unknown)[0]!r}; there are name, function and weight")
    path, weight = item["function"], item.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise DottedPathError(f"reward: the weight of {path} is {weight!r}, not a finite number")
    function = resolve_dotted(path, PURPOSE)
    if not callable(function):
        raise DottedPathError(f"{PURPOSE}: {path!r} is a {type(function).__name__}, which cannot be called")
    return RewardPart(item.get("name") or path.replace(":", ".").rsplit(".", 1)[-1], function, float(weight))


class _PartError(Exception):
    """Why a part has no values. ``cause`` is the counter it goes under."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class RewardScorer:
    """Scores the finished rollouts of one prompt; several groups may be scored at the same time.

    Plain functions run in threads, ``async`` functions on the running event loop; each call has ``timeout`` seconds,
    counted from when it gets one of the ``workers`` places. A thread cannot be stopped from outside: a plain function
    that hangs is abandoned with its (daemon) thread and gives its place back, so it costs memory but blocks neither
    other groups nor the end of the process. No signal is used, so scoring works on any thread; functions that use
    ``signal.alarm`` themselves fail there and are counted as failed.
    """

    def __init__(self, parts: Sequence[RewardPart], *, timeout: float, workers: int) -> None:
        self._parts = tuple(parts)
        self._timeout = timeout
        self._places = asyncio.Semaphore(workers)
        self._counts: Counter[str] = Counter()
        self._reported: set[tuple[str, str]] = set()

    async def score(
        self, prompt: Prompt, rollouts: Sequence[Rollout], texts: Sequence[str]
    ) -> tuple[ScoredRollout, ...]:
        """Score ``rollouts`` of ``prompt``, whose decoded responses are ``texts`` (same length and order)."""
        values = await asyncio.gather(*(self._values(part, prompt, texts) for part in self._parts))
        scored = []
        for index, (rollout, text) in enumerate(zip(rollouts, texts, strict=True)):
            by_part = {part.name: column[index] for part, column in zip(self._parts, values, strict=True)}
            scored.append(ScoredRollout(rollout, text, self._total(by_part), by_part))
        return tuple(scored)

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, as metrics: how many values of a part are missing for what cause
        (``reward/failed``, ``timeout``, ``declined``, ``invalid``, ``wrong_length``), and ``reward/excluded`` rollouts.
        """
        causes = ("failed", "timeout", "declined", "invalid", "wrong_length", "excluded")
        counts = {f"reward/{cause}": self._counts[cause] for cause in causes}
        self._counts.clear()
        return counts

    def _total(self, by_part: Mapping[str, float | None]) -> float | None:
        total = 0.0
        for part in self._parts:
            value = by_part[part.name]
            if part.weight == 0:
                continue
            if value is None:
                self._counts["excluded"] += 1
                return None
            total += part.weight * value
        return total

    async def _values(self, part: RewardPart, prompt: Prompt, texts: Sequence[str]) -> list[float | None]:
        """One value of ``part`` a completion; ``None`` where it has none, counted by cause."""
        count = len(texts)
        arguments: dict[str, Any] = {name: [value] * count for name, value in prompt.columns.items()}
        arguments |= {"prompts": [prompt.text] * count, "completions": list(texts)}
        try:
            async with self._places:
                result = await self._call(part.function, arguments)
            return self._checked(part, result, count)
        except _PartError as error:
            self._counts[error.cause] += count
            self._report(part, error)
            return [None] * count

    async def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        if _is_async(function):
            return await self._awaited(function(**arguments), self._timeout)
        result = await self._in_thread(function, arguments)
        if inspect.isawaitable(result):  # a plain wrapper around an async function
            return await self._awaited(result, max(0.0, deadline - loop.time()))
        return result

    async def _in_thread(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        def guarded() -> tuple[Any, BaseException | None]:
            try:
                return function(**arguments), None
            except BaseException as error:  # whatever a foreign function raises, SystemExit included, is its failure
                return None, error

        result, error = await self._awaited(in_daemon_thread(guarded, "reward"), self._timeout)
        if error is not None:
            raise _failure(error)
        return result

    async def _awaited(self, awaitable: Any, seconds: float) -> Any:
        """The result of ``awaitable`` within ``seconds``. A task that ignores cancellation is not waited for."""
        task = asyncio.ensure_future(awaitable)
        try:
            finished, _ = await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not finished:
            task.cancel()
            raise _PartError("timeout", f"took longer than {self._timeout:g} s (rewarding.timeout)")
        if task.cancelled():
            raise _PartError("failed", "cancelled itself")
        error = task.exception()
        if error is not None:
            raise error if isinstance(error, _PartError) else _failure(error)
        return task.result()

    def _checked(self, part: RewardPart, result: Any, count: int) -> list[float | None]:
        try:
            values = list(result)
        except TypeError as error:
            raise _PartError("invalid", f"returned {result!r:.80} instead of a list of {count} numbers") from error
        if len(values) != count:
            raise _PartError("wrong_length", f"returned {len(values)} values for {count} completions")
        checked: list[float | None] = []
        for value in values:
            number = finite_number(value)
            if number is None:
                cause = "declined" if value is None else "invalid"
                self._counts[cause] += 1
                if cause == "invalid":
                    self._report(part, _PartError(cause, f"returned {value!r:.80}, which is not a finite number"))
            checked.append(number)
        return checked

    def _report(self, part: RewardPart, error: _PartError) -> None:
        """Say it once a part and cause as a warning; the counters tell how often it happens."""
        first = (part.name, error.cause) not in self._reported
        self._reported.add((part.name, error.cause))
        level = logging.WARNING if first else logging.DEBUG
        logger.log(
            level, "reward %s %s; its rollouts are excluded and counted", part.name, error, exc_info=error.__cause__
        )


def _failure(error: BaseException) -> _PartError:
    failure = _PartError("failed", f"raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def finite_number(value: Any) -> float | None:
    """``value`` as a finite float, or ``None`` when it is none."""
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
