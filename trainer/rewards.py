"""Scoring: reward functions are called outside the event loop, with a deadline, and nothing missing becomes a zero.

A part (one reward function) that raises, runs out of time, declines (``None``), returns something that is no finite
number, or returns the wrong number of values has no value for its rollouts. A rollout whose weighted parts are not all
there has no reward: it is excluded and counted by cause, never scored 0.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from generator.rollout import Prompt, Rollout, ScoredRollout
from trainer.dotted import DottedPathError, resolve_dotted
from trainer.threads import in_daemon_thread
from trainer.unscored import NotScoredError, Unscored, finite_number
from trainer.wording import shown

PURPOSE = "reward function"
TEXTS = ("prompts", "completions")
"""What every function gets beside the columns of the data."""
LARGEST_WEIGHT = 1e9


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
        raise DottedPathError(f"reward: {shown(item)} is neither a dotted path nor a mapping with the key 'function'")
    unknown = set(item) - {"name", "function", "weight"}
    if unknown:
        raise DottedPathError(f"reward: unknown key {min(map(str, unknown))!r}; there are name, function and weight")
    path, weight = item["function"], item.get("weight", 1.0)
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not -LARGEST_WEIGHT <= weight <= LARGEST_WEIGHT:  # also false for NaN
        raise DottedPathError(
            f"reward: the weight of {path} is {shown(weight)}, not a finite number between {-LARGEST_WEIGHT:g} and "
            f"{LARGEST_WEIGHT:g}"
        )
    name = item.get("name") or path.replace(":", ".").rsplit(".", 1)[-1]
    if not isinstance(name, str):
        raise DottedPathError(f"reward: the name of {path} is {shown(name)}; it must be text")
    function = resolve_dotted(path, PURPOSE)
    if not callable(function):
        raise DottedPathError(f"{PURPOSE}: {path!r} is a {type(function).__name__}, which cannot be called")
    return RewardPart(name, function, float(weight))


def check_arguments(parts: Sequence[RewardPart], columns: Iterable[tuple[str, ...]]) -> None:
    """Raise :class:`DottedPathError` for a function that cannot be called with the texts and the columns of the data.

    ``columns`` are the names that rows of the data have. Every call would fail, and no rollout would have a reward.
    """
    for names in dict.fromkeys(columns):
        for part in parts:
            try:
                inspect.signature(part.function).bind(**dict.fromkeys((*TEXTS, *names)))
            except TypeError as error:
                raise DottedPathError(
                    f"{PURPOSE} {part.name}: it is called with {', '.join((*TEXTS, *names))}, all by name, and cannot "
                    f"be: {error}. A function takes the columns that it does not use as `**columns`"
                ) from error
            except ValueError:  # of a function in C Python does not know what it takes
                continue


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
        self._unscored = Unscored()

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
        """How many values of parts are missing since the last call, by cause: see :mod:`trainer.unscored`."""
        return self._unscored.take_counts()

    def _total(self, by_part: Mapping[str, float | None]) -> float | None:
        total = 0.0
        for part in self._parts:
            value = by_part[part.name]
            if part.weight == 0:
                continue
            if value is None:
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
        except NotScoredError as error:
            self._unscored.tell(f"reward {part.name}", error, count)
            return [None] * count

    async def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        if _is_async(function):
            return await self._awaited(function(**arguments), self._timeout)
        call = in_daemon_thread(functools.partial(function, **arguments), "reward")
        result = await self._awaited(call, self._timeout)
        if inspect.isawaitable(result):  # a plain wrapper around an async function
            return await self._awaited(result, max(0.0, deadline - loop.time()))
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
            raise NotScoredError("timeout", f"took longer than {self._timeout:g} s (rewarding.timeout)")
        if task.cancelled():
            raise NotScoredError("failed", "cancelled itself")
        error = task.exception()
        if error is not None:
            raise NotScoredError("failed", f"raised {type(error).__name__}: {error}") from error
        return task.result()

    def _checked(self, part: RewardPart, result: Any, count: int) -> list[float | None]:
        try:
            # The keys of a mapping and the members of a set are not rewards, and have no order that means anything.
            values = None if isinstance(result, Mapping | Set | str | bytes) else list(result)
        except TypeError:
            values = None
        if values is None:
            raise NotScoredError("invalid", f"returned {result!r:.80} instead of a list of {count} numbers")
        if len(values) != count:
            raise NotScoredError("wrong_length", f"returned {len(values)} values for {count} completions")
        checked: list[float | None] = []
        for value in values:
            number = finite_number(value)
            if number is None:
                self._missing(part, value)
            checked.append(number)
        return checked

    def _missing(self, part: RewardPart, value: Any) -> None:
        if value is None:
            self._unscored.count("declined")
        else:
            what = NotScoredError("invalid", f"returned {value!r:.80}, which is no number that can be averaged")
            self._unscored.tell(f"reward {part.name}", what)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
