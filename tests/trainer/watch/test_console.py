"""What a person reads, on a terminal and in a file."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import struct
import termios

import pytest

from trainer.watch.console import Console, ConsoleLogHandler
from trainer.watch.lines import duration, question, step_line, summary_lines, table_rows

METRICS = {
    "reward/mean": 0.4567, "reward/std": 0.31, "reward/excluded": 0.0, "staleness/token_mean": 0.8,
    "staleness/token_max": 1.0, "completions/length_mean": 37.4, "throughput/generated_tokens_per_second": 1812.3,
    "throughput/trained_tokens_per_second": 1640.0, "timing/step_seconds": 6.14, "push/pause_seconds": 0.34,
    "idle/learner_seconds": 0.2,
}  # fmt: skip
SUMMARY = {
    "status": "done", "steps": 2, "policy_version": 2, "wall_seconds": 75.2, "reward/first10_mean": 0.2,
    "reward/last10_mean": 0.7, "tokens/generated": 5000, "tokens/trained": 4000, "tokens/expired": 3, "tokens/lost": 0,
    "rollouts/finished": 64, "rollouts/resumed": 12, "push/count": 2, "push/pause_seconds_mean": 0.25,
}  # fmt: skip


class Terminal:
    """A pseudo terminal of 100 columns; what was written to it is read with :meth:`text`."""

    def __init__(self):
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115 - closed by text()
        os.set_blocking(self.master, False)
        self.read = b""

    def drain(self):
        try:
            while chunk := os.read(self.master, 65536):
                self.read += chunk
        except OSError:
            pass
        return self.read.decode()

    def text(self):
        text = self.drain()
        self.stream.close()
        os.close(self.master)
        return text


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def session(console, rows):
    console.start("Midflight: toy, 2 steps")
    console.source("model", "embedded model", "no hub reachable")
    console.waiting("starting engine 0")
    console.begin_steps()
    console.step(1, METRICS)
    console.waiting("a batch")
    console.table(1, rows)
    console.step(2, METRICS)
    console.close(SUMMARY, "/runs/toy")


def test_a_file_gets_plain_lines_and_no_control_code(monkeypatch, scored, group):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    session(Console(2, stream=stream), table_rows([group(scored(1.0, ((0, 1), (1, 2))))], [[0.5]], 4))
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "model       embedded model  (no hub reachable)" in text
    assert "waiting     starting engine 0 ..." in text
    assert [line[:8] for line in text.splitlines() if line.startswith("step ") and "completions" not in line] == [
        "step 1/2", "step 2/2",
    ]  # fmt: skip
    assert "done after 2 steps in 1 min 15 s" in text
    assert text.rstrip().endswith("run folder  /runs/toy")


def test_a_terminal_gets_the_same_lines_and_a_bar(terminal, scored, group):
    session(Console(2, stream=terminal.stream), table_rows([group(scored(1.0))], [[0.5]], 4))
    text = terminal.text()
    assert "\x1b[" in text
    assert "2/2" in text
    assert "staleness 0.80  1,812 tok/s" in text
    assert "starting engine 0 ..." in text
    assert "/runs/toy" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is shown again"


def test_the_bar_can_be_switched_off(terminal):
    console = Console(2, progress=False, stream=terminal.stream)
    console.begin_steps()
    console.step(1, METRICS)
    text = terminal.text()
    assert "\x1b[?25l" not in text
    assert "reward" in text


def test_a_completion_cannot_send_control_codes_to_the_terminal(scored, group):
    stream = io.StringIO()
    rows = table_rows([group(scored(1.0, text="a\x1b[2Jb\x07\nc[red]d"), prompt="p\x9bq")], [[0.5]], 1)
    Console(1, stream=stream).table(1, rows)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\x9b" not in text
    assert "[red]d" in text


def test_a_stream_that_is_only_ascii_does_not_end_the_run(scored, group):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    session(Console(2, stream=stream), table_rows([group(scored(1.0, text="3 ÷ 4 = zwölf"))], [[0.5]], 1))
    assert b"3 ? 4 = zw?lf" in raw.getvalue()


def test_a_reader_that_leaves_does_not_end_the_run(caplog):
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w")  # noqa: SIM115 - closing it would raise the same error
    console = Console(2, stream=stream)
    session(console, [])
    assert caplog.text.count("nothing more is printed") == 1
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_log_records_go_above_the_live_line(terminal):
    console = Console(2, stream=terminal.stream)
    console.begin_steps()
    handler = ConsoleLogHandler(console)
    handler.handle(logging.LogRecord("pool", logging.WARNING, "f", 1, "engine %d is late", (3,), None))
    console.close(SUMMARY, "/runs/toy")
    assert "WARNING pool: engine 3 is late" in terminal.text()


def test_a_step_line_fits_a_narrow_terminal_and_keeps_the_main_numbers():
    full = step_line(3, 100, METRICS).plain
    assert full == (
        "step   3/100    6.1 s  reward  0.457 ±0.31  staleness 0.80 max 1  tok/s 1,812 generated 1,640 trained  "
        "length   37  pause 0.34 s  idle  0.2 s"
    )
    narrow = step_line(3, 100, METRICS, width=80).plain
    assert len(narrow) <= 80
    assert full.startswith(narrow)
    assert "staleness" in narrow


def test_missing_numbers_are_dashes_and_excluded_rollouts_stand_out():
    line = step_line(1, 9, {"reward/excluded": 3.0, "timing/step_seconds": 1.0}).plain
    assert "reward      - ±-  staleness    - max -" in line
    assert "3 WITHOUT REWARD" in line


def test_the_table_shows_different_prompts_and_both_ends_of_a_group(scored, group):
    groups = [group(*[scored(float(i), text=f"{name}{i}") for i in range(3)], prompt=name) for name in "ab"]
    advantages = [[-1.0, 0.0, 1.0]] * 2
    assert [row[1] for row in table_rows(groups, advantages, 4)] == ["a2", "b2", "a0", "b0"]
    assert [row[1] for row in table_rows(groups, advantages, 99)] == ["a2", "b2", "a0", "b0", "a1", "b1"]


def test_a_table_row_says_how_many_versions_sampled_the_completion(scored, group):
    (row,) = table_rows([group(scored(None, ((0, 2), (1, 2), (4, 1)), "length"))], [[0.0]], 1)
    assert row[2:] == [None, 0.0, 3, 5, "length"]


def test_a_question_is_shown_without_the_marks_of_the_chat_template():
    assert question("<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n") == "How many?"
    assert question("x" * 500).startswith("...")


def test_last_lines_tell_error_and_totals():
    lines = dict(summary_lines({**SUMMARY, "steps": 11, "error": "EngineDeadError: engine 0"}))
    assert lines["error"] == "EngineDeadError: engine 0"
    assert lines["tokens"] == "5,000 generated, 4,000 trained, 3 expired, 0 lost"
    assert dict(summary_lines({**SUMMARY, "tokens/lost": 9}))["tokens"].endswith("9 lost (no reward)")
    assert lines["reward"] == "0.200 in the first 10 steps, 0.700 in the last 10 of 11"
    assert dict(summary_lines({**SUMMARY, "steps": 10}))["reward"] == "0.200 on average"


def test_durations_read_as_people_say_them():
    assert [duration(s) for s in (0.34, 59.94, 61, 3725)] == ["0.3 s", "59.9 s", "1 min 1 s", "1 h 2 min"]
