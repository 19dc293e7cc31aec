"""Reading what a run has written, whatever happened to it."""

from __future__ import annotations

from trainer.watch.read_folder import Steps, number, read_rows


def test_steps_are_read_in_their_order_and_of_two_of_one_number_the_later_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "a": 1}\n{"step": 1, "a": 2}\n\n{"a": 3, "step": 2.0}\n{"step": 3, "a": 4}\n')
    steps = Steps(path)
    assert list(steps) == list(steps) == [{"step": 1, "a": 2}, {"step": 2, "a": 3}, {"step": 3, "a": 4}]
    assert (len(steps), steps.broken) == (3, 0)
    assert {"step": 3, "a": 4} in steps
    assert {row["step"]: row["a"] for row in steps} == {step: row["a"] for step, row in read_rows(path).by_step.items()}


def test_lines_that_are_no_steps_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[1]\n{"step": null}\n{"x": 1}\n{"step": 2, "a": \xff}\n{"step": 3, "a": 1')
    steps = Steps(path)
    assert [row["step"] for row in steps] == [1]
    assert steps.broken == 4
    assert list(Steps(tmp_path / "nothing")) == []


def test_a_step_that_is_written_while_the_file_is_read_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    steps = Steps(path)
    with open(path, "a") as file:
        file.write('{"step": 2}\n')
    assert [row["step"] for row in steps] == [1]


def test_a_number_that_no_float_holds_is_none():
    assert [number(value) for value in (10**400, float("inf"), True, "1", None, 2)] == [None] * 5 + [2.0]
