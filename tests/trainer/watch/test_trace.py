"""The trace of a run."""

from __future__ import annotations

import asyncio
import json
import threading
import time

from trainer.watch.trace import TRACKS, Trace


def events(path, kind="X"):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


def by_name(path):
    return {event["name"]: event for event in events(path)}


def assert_rows_nest(path):
    """In each row any two events are disjoint or one holds the other, else viewers draw them wrongly."""
    rows = {}
    for event in events(path):
        rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        for i, (s, e) in enumerate(row):
            for s2, e2 in row[i + 1 :]:
                assert e <= s2 + 2 or e2 <= s + 2 or (s >= s2 - 2 and e <= e2 + 2) or (s2 >= s - 2 and e2 <= e + 2)


def test_the_parts_of_a_span_lie_inside_it_on_one_row(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    with trace.span("learner", "train", step=3):
        start = time.time()
        time.sleep(0.002)
    trace.complete("learner", "forward", start, 0.001)
    trace.close()
    found = by_name(tmp_path / "trace.json")
    outer, inner = found["train"], found["forward"]
    assert outer["tid"] == inner["tid"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert outer["dur"] >= 2000
    assert outer["args"] == {"step": 3}


def test_what_ended_beside_an_open_span_does_not_go_on_its_row(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    with trace.span("engine", "open"):
        trace.complete("engine", "beside", time.time() - 1, 2.0)
    trace.close()
    found = by_name(tmp_path / "trace.json")
    assert found["open"]["tid"] != found["beside"]["tid"]


def test_the_file_is_valid_at_any_time(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    assert events(tmp_path / "trace.json") == []
    for number in range(600):
        trace.complete("engine", f"e{number}", time.time(), 0.0)
        if number % 150 == 0:
            json.loads((tmp_path / "trace.json").read_text())
    trace.flush()
    assert len(events(tmp_path / "trace.json")) == 600


def test_tracks_are_named(tmp_path):
    Trace(tmp_path / "trace.json").close()
    names = [e["args"]["name"] for e in events(tmp_path / "trace.json", "M") if e["name"] == "thread_name"]
    assert names == list(TRACKS)


async def test_coroutines_that_overlap_get_rows_of_their_own(tmp_path):
    trace = Trace(tmp_path / "trace.json")

    async def request(name, seconds):
        with trace.span("engine", name):
            await asyncio.sleep(seconds)

    await asyncio.gather(request("a", 0.01), request("b", 0.02), request("c", 0.005))
    trace.close()
    found = by_name(tmp_path / "trace.json")
    assert len({event["tid"] for event in found.values()}) == 3
    assert_rows_nest(tmp_path / "trace.json")


async def test_rows_are_used_again(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    for name in "abc":
        with trace.span("engine", name):
            await asyncio.sleep(0)
    trace.close()
    assert len({event["tid"] for event in events(tmp_path / "trace.json")}) == 1


def test_finished_intervals_nest_or_move_to_another_row(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    now = time.time()
    trace.complete("push", "transfer", now + 1, 1.0)
    trace.complete("push", "push", now, 3.0)
    trace.complete("push", "overlaps", now + 2.5, 2.0)
    trace.close()
    found = by_name(tmp_path / "trace.json")
    assert found["transfer"]["tid"] == found["push"]["tid"] != found["overlaps"]["tid"]
    assert_rows_nest(tmp_path / "trace.json")


def test_threads_lose_no_event(tmp_path):
    trace = Trace(tmp_path / "trace.json")

    def work(name):
        for number in range(200):
            with trace.span("reward", f"{name}-{number}"):
                pass

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    assert len(by_name(tmp_path / "trace.json")) == 800


def test_a_counter_keeps_its_last_value_of_quick_changes_and_the_moment_of_it(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    begin = time.time()
    for at, value in ((0.0, 8), (0.1, 7), (0.2, 0), (60.0, 8), (60.1, 3)):
        trace.counter("engine 0", value, begin + at)
    trace.close()
    counted = events(tmp_path / "trace.json", "C")
    first = counted[0]["ts"]
    assert [(round((event["ts"] - first) / 1e6, 1), event["args"]["value"]) for event in counted] == [
        (0.0, 8), (0.2, 0), (60.0, 8), (60.1, 3)
    ]  # fmt: skip


def test_counters_of_a_long_run_leave_room_for_its_spans(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.watch.trace._COUNTER_EVENTS", 100)
    trace = Trace(tmp_path / "trace.json")
    begin = time.time()
    for second in range(10_000):
        trace.counter("engine 0", second, begin + second)
    trace.close()
    counted = events(tmp_path / "trace.json", "C")
    assert 800 < len(counted) < 1000, "each hundred covers twice the time of the hundred before"
    assert counted[-1]["args"]["value"] == 9999


def test_a_span_that_raises_is_recorded_and_frees_its_row(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    for name in ("first", "second"):
        try:
            with trace.span("engine", name):
                raise RuntimeError
        except RuntimeError:
            pass
    trace.close()
    found = by_name(tmp_path / "trace.json")
    assert found["first"]["tid"] == found["second"]["tid"]


def test_events_past_the_limit_are_dropped_and_counted(tmp_path):
    trace = Trace(tmp_path / "trace.json", max_events=20)
    for number in range(100):
        trace.complete("engine", f"e{number}", time.time(), 0.0)
    trace.close()
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) <= 21
    labels = [e["args"]["labels"] for e in events(tmp_path / "trace.json", "M") if e["name"] == "process_labels"]
    assert "later events dropped" in labels[0]


def test_a_resumed_run_continues_on_the_same_time_axis(tmp_path):
    path = tmp_path / "trace.json"
    moment = time.time() + 5
    first = Trace(path)
    first.complete("engine", "before", moment, 1.0)
    first.close()
    second = Trace(path, append=True)
    second.complete("engine", "after", moment, 1.0)
    second.close()
    found = by_name(path)
    assert abs(found["before"]["ts"] - found["after"]["ts"]) < 1


def test_a_broken_trace_is_replaced_and_a_closed_one_ignores_events(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [')
    trace = Trace(path, append=True)
    trace.close()
    trace.close()
    trace.complete("engine", "late", time.time(), 0.0)
    trace.flush()
    assert events(path) == []


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, caplog):
    trace = Trace(tmp_path / "trace.json")
    trace._file.close()
    trace._file = open("/dev/full", "wb")  # noqa: SIM115 - the trace closes it
    trace.complete("engine", "lost", time.time(), 0.0)
    trace.flush()
    trace.close()
    assert "the trace ends here" in caplog.text
