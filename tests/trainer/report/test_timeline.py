"""What the timeline shows of a trace."""

from __future__ import annotations

import pytest

from trainer.report.lanes import Lane, Level, Pauses, merged
from trainer.report.timeline import ENGINE_BINS, ENGINES, timeline
from trainer.watch.trace import ROLLOUTS


def process(pid=1):
    return {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": "midflight"}}


def row(track, tid=1, pid=1):
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}}


def span(name, start, seconds, tid=1, pid=1):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start * 1e6, "dur": seconds * 1e6, "args": {}}


def count(engine, at, rollouts, pid=1):
    return {"ph": "C", "pid": pid, "tid": 0, "name": engine + ROLLOUTS, "ts": at * 1e6, "args": {"value": rollouts}}


def test_how_many_spans_were_open_adds_up_to_their_seconds():
    level = Level(1.0, 10.0, bins=9)
    for start, stop in ((1.0, 4.5), (2.0, 3.0), (9.9, 10.0)):
        level.add(start, stop)
    assert level.values()[:4] == [1.0, 2.0, 1.0, 0.5]
    assert sum(level.values()) == pytest.approx(3.5 + 1.0 + 0.1)


def test_engines_are_paused_from_the_gate_of_a_push_to_its_resume():
    pauses = Pauses()
    phases = [(0, 1, "prepare"), (1, 2, "gate"), (2, 3, "transfer"), (3, 4, "resume"), (9, 10, "gate")]
    assert [pauses.pause(*phase) for phase in phases] == [None, None, None, (1, 4), None]


def test_near_neighbours_of_one_kind_become_one_segment():
    parts = [(0, 1, "step 1"), (1.1, 2, "step 2"), (1.0, 1.1, "wait"), (5, 6, "step 3")]
    joined = merged([(start, stop, name, name) for start, stop, name in parts], gap=0.5)
    assert joined == [(0, 2, "step 1", "step 2"), (1.0, 1.1, "wait", "wait"), (5, 6, "step 3", "step 3")]


def test_segments_that_were_put_together_again_and_again_are_named_by_their_ends():
    lane = Lane(1000.0, limit=4)
    for number in range(1000):
        lane.add(float(number), number + 0.9, f"step {number}")
    segments = lane.segments()
    assert len(segments) <= 4
    assert segments[0][2].startswith("step 0 to ")
    assert segments[-1] == (segments[-1][0], 999.9, segments[-1][2])
    assert segments[-1][2].endswith(" to 999")


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_a_lane_of_more_kinds_than_it_has_places_for_is_cut(seconds):
    lane = Lane(seconds, limit=10)
    for number in range(26):
        lane.add(0.0, 0.0, chr(ord("a") + number))
    assert len(lane.segments()) <= 10


def test_a_timeline_of_a_long_run_has_a_bounded_number_of_segments():
    events = [row("learner (2)"), *(span(f"step {number}", number, 0.9) for number in range(20_000))]
    lanes = timeline(events)
    assert len(lanes["learner"]) <= 3000
    assert lanes["learner"][-1][1] == lanes["end"] == 19_999.9
    assert timeline(events[:1]) is None


def test_each_engine_has_a_lane_with_its_rollouts_from_one_count_to_the_next():
    events = [process(), row("learner"), span("step 1", 0, 10), count("engine 0", 0, 8), count("engine 1", 5, 4),
              count("engine 0", 5, 0)]  # fmt: skip
    (first, before), (second, after) = timeline(events)["engines"]
    half = ENGINE_BINS // 2
    assert (first, second) == ("engine 0", "engine 1")
    assert before == [8.0] * half + [0.0] * half
    assert after == [0.0] * half + [4.0] * half, "the last count holds to the end"


def test_what_an_engine_had_when_a_run_was_killed_does_not_last_to_the_restart():
    events = [process(), row("learner"), count("engine 0", 0, 8), span("step 1", 0, 2),
              process(), row("learner"), count("engine 0", 8, 2), span("step 2", 8, 2)]  # fmt: skip
    ((_, rollouts),) = timeline(events)["engines"]
    fifth = ENGINE_BINS // 5
    assert rollouts == [8.0] * fifth + [0.0] * 3 * fifth + [2.0] * fifth


def test_engines_without_a_lane_of_their_own_are_counted():
    events = [row("learner"), span("step 1", 0, 1), *(count(f"engine {number}", 0, 1) for number in range(ENGINES + 5))]
    lanes = timeline(events)
    assert len(lanes["engines"]) == ENGINES
    assert lanes["more_engines"] == 5


def test_evaluations_pushes_and_pauses_have_lanes():
    events = [row("evaluation", 1), span("evaluation of version 4", 2, 3), row("push", 2),
              span("push version 5", 5, 2, 2), span("gate", 5, 1, 2), span("resume", 6, 1, 2)]  # fmt: skip
    lanes = timeline(events)
    assert lanes["evaluations"] == [(2.0, 5.0, "evaluation of version 4")]
    assert lanes["pushes"] == [(5.0, 7.0, "push version 5")]
    assert lanes["paused"] == [(5.0, 7.0, "paused")]


@pytest.mark.parametrize(
    "event",
    [{"ph": "X"}, {"ph": "C", "name": 3}, {"ph": "C", "name": f"a{ROLLOUTS}", "ts": "x", "args": [1]},
     {"ph": "X", "ts": float("nan"), "dur": 1, "name": "a"}, {"ph": "X", "ts": float("inf"), "dur": 1, "name": "a"},
     {"ph": "M", "name": "thread_name"}, {"ph": "X", "ts": 1, "dur": True, "name": []}],
)  # fmt: skip
def test_an_event_of_another_program_is_passed_over(event):
    lanes = timeline([row("learner"), span("step 1", 0, 10), event])
    assert lanes["end"] == 10.0
    assert lanes["learner"] == [(0.0, 10.0, "step 1")]
