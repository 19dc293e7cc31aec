"""Reward functions of every kind, good and bad, for the tests to name by dotted path."""

import asyncio
import signal
import threading

release = threading.Event()
CONSTANT = 3


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def matches(completions, answer, **columns):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


async def slow_ones(prompts, completions, **columns):
    await asyncio.sleep(0)
    return [1.0] * len(completions)


def raises(**columns):
    raise RuntimeError("verifier crashed")


async def raises_async(**columns):
    raise RuntimeError("service is down")


def exits(**columns):
    raise SystemExit(3)


def alarms(**columns):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def hangs(**columns):
    release.wait()


async def hangs_async(**columns):
    await asyncio.Event().wait()


async def is_slow_to_be_cancelled(**columns):
    try:
        await asyncio.Event().wait()
    finally:
        while not release.is_set():  # noqa: ASYNC110 - threading.Event, set by the test
            await asyncio.sleep(0.01)


def too_few(completions, **columns):
    return [1.0] * (len(completions) - 1)


def by_number(completions, **columns):
    return {number: 1.0 for number in range(len(completions))}


def huge(completions, **columns):
    return [1e308] * len(completions)


def not_a_list(**columns):
    return 1.0


def declines_short(completions, **columns):
    return [1.0 if len(text) > 1 else None for text in completions]


def strange_numbers(completions, **columns):
    return [float("nan"), float("inf"), "1.0", True][: len(completions)]


def thread_name(completions, **columns):
    return [float(threading.current_thread() is threading.main_thread())] * len(completions)


def spoils_its_arguments(completions, answer, **columns):
    completions.clear()
    answer.clear()
    return [1.0, 1.0]
