"""Stalls, on a virtual clock."""

from __future__ import annotations

import asyncio
import logging

import pytest

from generator import virtual_time
from trainer.watch.trace import OpenSpan, Trace
from trainer.watchdog import StalledError, watch_progress, what_is_open


async def stalled(ended, warn_after=60.0, fail_after=600.0):
    await watch_progress(ended, lambda: "reward: prompt 3", warn_after, fail_after)


def test_a_run_in_which_nothing_ends_is_warned_of_ever_more_rarely_and_then_fails(caplog):
    with pytest.raises(StalledError, match=r"for 600 s .*watchdog.fail_after.*reward: prompt 3"):
        virtual_time.run(stalled(lambda: 7))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(" s ")[0].split()[-1] for line in said] == ["60", "120", "240", "480"]
    assert all("reward: prompt 3" in line for line in said)


def test_a_run_in_which_things_end_is_left_alone_however_long_it_lasts(caplog):
    async def run():
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(stalled(lambda: loop.time() // 50), timeout=10_000)

    with pytest.raises(TimeoutError):
        virtual_time.run(run())
    assert caplog.records == []


def test_what_ends_after_a_warning_takes_the_stall_back(caplog):
    async def run():
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(stalled(lambda: loop.time() // 100), timeout=1_000)

    with pytest.raises(TimeoutError):
        virtual_time.run(run())
    assert all(" 60 s " in record.getMessage() for record in caplog.records)
    assert len(caplog.records) > 5


def test_each_track_is_named_with_what_takes_longest():
    spans = [
        OpenSpan("reward", "prompt 3", 40.0),
        OpenSpan("engine", "prompt 9", 70.0),
        OpenSpan("engine", "prompt 8", 10.0),
    ]
    assert what_is_open(spans, 100.0) == "engine: prompt 8 for 90 s and 1 more; reward: prompt 3 for 60 s"
    assert what_is_open([], 100.0) == "nothing is going on"


def test_the_trace_knows_what_is_open_and_counts_what_has_ended(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    with trace.span("learner", "step 1"), trace.span("reward", "prompt 1"):
        assert [(span.track, span.name) for span in trace.open_spans()] == [
            ("learner", "step 1"),
            ("reward", "prompt 1"),
        ]
        assert trace.ended == 0
    trace.complete("push", "push version 1", 0.0, 1.0)
    assert (trace.open_spans(), trace.ended) == ([], 3)
    trace.close()
