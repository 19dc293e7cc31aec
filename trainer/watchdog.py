"""A run that hangs says so, and says what it waits for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.loop import Parts
    from trainer.watch.trace import OpenSpan

logger = logging.getLogger(__name__)

LOOKS = 10
"""How often it is looked for progress within the time after which there is a warning."""


class StalledError(RuntimeError):
    """Nothing came to its end for ``watchdog.fail_after`` seconds. The message has what was waited for."""


async def watch_for_stalls(parts: Parts) -> None:
    """For as long as the run lasts: warn when nothing comes to its end any more, and fail when that goes on."""
    watchdog, trace = parts.config.watchdog, parts.watch.trace

    def waited_for() -> str:
        admission, engines = parts.admission, parts.engines
        return (
            f"{what_is_open(trace.open_spans(), time.monotonic())}; push: {parts.pusher.step.value}; {engines.serving} "
            f"of {engines.count} engines serve{evaluations_of(parts)}; {admission.running} groups in flight, "
            f"{admission.buffered} scored and not learned from, {parts.config.batch.prompts} make a batch"
        )

    await watch_progress(lambda: trace.ended, waited_for, watchdog.warn_after, watchdog.fail_after)


def evaluations_of(parts: Parts) -> str:
    """What there is to say about the evaluation in progress, and about engines that are there for nothing else."""
    version, engines, pusher = parts.evaluations.going_on, parts.evaluation_engines, parts.evaluation_pusher
    said = "" if version is None else f"; version {version} is evaluated"
    if engines is not None and pusher is not None:
        said += f"; push for evaluations: {pusher.step.value}; {engines.serving} of {engines.count} engines serve them"
    return said


async def watch_progress(
    ended: Callable[[], int], waited_for: Callable[[], str], warn_after: float, fail_after: float
) -> None:
    """For ever: warn when ``ended``, a count of what came to its end, has stayed the same for ``warn_after`` seconds.

    Each further warning comes after twice the time. After ``fail_after`` seconds raises :class:`StalledError`.
    ``waited_for`` says for people what is going on.
    """
    clock = asyncio.get_running_loop().time
    count, since, next_warning = ended(), clock(), warn_after
    while True:
        await asyncio.sleep(min(warn_after, fail_after) / LOOKS)
        if (now := ended()) != count:
            count, since, next_warning = now, clock(), warn_after
            continue
        still = clock() - since
        if still >= fail_after:
            raise StalledError(f"nothing came to its end for {still:.0f} s (watchdog.fail_after). {waited_for()}")
        if still >= next_warning:
            logger.warning("nothing came to its end for %.0f s (watchdog.warn_after). %s", still, waited_for())
            next_warning *= 2


def what_is_open(spans: Iterable[OpenSpan], now: float) -> str:
    """Of each track, what has been going on longest, for how long, and how much else. ``now`` is the spans' clock."""
    by_track = sorted(spans, key=lambda span: (span.track, span.began))
    lines = []
    for track, on_track in itertools.groupby(by_track, key=lambda span: span.track):
        oldest, *others = on_track
        more = f" and {len(others)} more" if others else ""
        lines.append(f"{track}: {oldest.name} for {now - oldest.began:.0f} s{more}")
    return "; ".join(lines) or "nothing is going on"
