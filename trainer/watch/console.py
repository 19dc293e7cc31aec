"""What a person reads while a run goes: first lines, one line a step, a bar, a table of completions, the last lines.

On a terminal there is also a live line at the bottom; elsewhere (a file, a pipe, ``nohup``) the same lines come without
any control code.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from trainer.watch.lines import (
    TABLE_COLUMNS,
    cell,
    duration,
    evaluation_line,
    number,
    question,
    shorten,
    step_line,
    summary_lines,
)

logger = logging.getLogger(__name__)

_WIDTH_WITHOUT_TERMINAL = 120
_LABEL = 12
_STYLES = {"done": "bold green", "interrupted": "bold yellow", "failed": "bold red"}


class Console:
    """Prints to ``stream``. Thread-safe: wandb announces itself from a thread of its own.

    ``progress`` allows the live line; it appears only where ``stream`` is a capable terminal.
    """

    def __init__(self, steps: int, *, progress: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        terminal = self._stream.isatty()
        if isinstance(self._stream, io.TextIOWrapper):
            # A completion may hold anything; where the locale is ASCII it must not end the run.
            self._stream.reconfigure(errors="replace")
        # force_terminal: rich would also colour a file when FORCE_COLOR is set.
        self._rich = RichConsole(
            file=self._stream,
            force_terminal=terminal,
            highlight=False,
            width=None if terminal else _WIDTH_WITHOUT_TERMINAL,
        )
        self._live_allowed = progress and terminal and not self._rich.is_dumb_terminal
        self._unicode = (self._rich.encoding or "").lower().startswith("utf")
        self._steps = steps
        self._lock = threading.RLock()
        self._waiting: tuple[str, float] | None = None
        self._begun = False
        self._gone = False
        self._status: Status | None = None
        self._progress: Progress | None = None
        self._task: Any = None

    def start(self, title: str) -> None:
        """The first line of a run."""
        self._print(Text(self.printable(title), style="bold"))

    def source(self, kind: str, what: str, why: str = "") -> None:
        """One of the first lines: where the model, the data, the hardware came from, and why."""
        line = Text(f"  {kind:<{_LABEL}}", style="cyan").append(self.printable(what), style="default")
        if why:
            line.append(self.printable(f"  ({why})"), style="dim")
        self._print(line)

    def waiting(self, text: str | None) -> None:
        """Say what is being waited for; ``None`` when nothing is. The wait before is printed with how long it took."""
        with self._writing():
            if self._waiting is not None and self._waiting[0] != text:
                self._waited()
            if text is None or (self._waiting is not None and self._waiting[0] == text):
                return
            self._waiting = (text, time.monotonic())
            text = self.printable(text)
            if self._progress is not None:
                self._progress.update(self._task, waiting=text)
            elif not self._live_allowed:
                if not self._begun:  # afterwards a log file has its line a step, and nothing else
                    self._print(Text(f"  {'waiting':<{_LABEL}}{text} ..."))
            elif self._status is None:
                self._status = self._rich.status(f"{text} ...", refresh_per_second=4)
                self._status.start()
            else:
                self._status.update(f"{text} ...")

    def begin_steps(self, done: int = 0) -> None:
        """Start the bar, ``done`` steps into the run."""
        with self._writing():
            self.waiting(None)
            self._stop_live()
            self._begun = True
            if not self._live_allowed:
                return
            self._progress = Progress(
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[waiting]}", style="dim"),
                console=self._rich,
                refresh_per_second=2,
                transient=True,
            )
            self._task = self._progress.add_task("", total=self._steps, completed=done, numbers="", waiting="")
            self._progress.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of a step, and the bar."""
        with self._writing():
            self._print(step_line(step, self._steps, metrics, self._rich.width if self._rich.is_terminal else None))
            if self._progress is not None:
                reward, staleness, rate = (
                    number(metrics, name, form)
                    for name, form in (
                        ("reward/mean", ".3f"),
                        ("staleness/token_mean", ".2f"),
                        ("throughput/generated_tokens_per_second", ",.0f"),
                    )
                )
                numbers = f"reward {reward}  staleness {staleness}  {rate} tok/s"
                self._progress.update(self._task, completed=step, numbers=numbers, refresh=True)

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """The line of an evaluation."""
        self._print(evaluation_line(version, metrics))

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Completions of a step, with the columns of :data:`~trainer.watch.lines.TABLE_COLUMNS`."""
        table = Table(
            title=f"step {step}: some completions", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
            expand=False, pad_edge=False,
        )  # fmt: skip
        table.add_column("prompt", ratio=2, overflow="fold", style="dim")
        table.add_column("completion", ratio=3, overflow="fold")
        for name in TABLE_COLUMNS[2:]:
            table.add_column(name, justify="left" if name == "finish" else "right", no_wrap=True)
        for prompt, completion, *numbers in rows:
            prompt = question(prompt)  # the question, not the instructions
            cells = [Text(self.printable(prompt)), Text(self.printable(shorten(completion, 240)))]
            table.add_row(*cells, *(Text(cell(value)) for value in numbers))
        self._print(table)

    def close(self, summary: Mapping[str, Any], run_dir: str, report: str | None = None) -> None:
        """Take the live line down and print the last lines, of them where the ``report`` is if one was written."""
        with self._writing():
            self._waiting = None
            self._stop_live()
            status = str(summary["status"])
            self._print(Text(f"\n{status}", style=_STYLES.get(status, "bold")).append(
                f" after {summary['steps']} steps in {duration(summary['wall_seconds'])}, "
                f"policy version {summary['policy_version']}", style="default"))  # fmt: skip
            for label, text in summary_lines(summary):
                self._print(Text(f"  {label:<{_LABEL}}", style="cyan").append(self.printable(text), style="default"))
            for label, path in (("report", report), ("run folder", run_dir)):
                if path:
                    line = Text(f"  {label:<{_LABEL}}", style="cyan")
                    self._print(line.append(self.printable(path), style="bold"))

    def printable(self, text: str) -> str:
        """``text`` on one line, without control characters, in what the stream can encode."""
        text = text.replace("\r\n", "\n").replace("\n", " ⏎ " if self._unicode else " \\n ").replace("\t", " ")
        text = "".join(c if c.isprintable() else "\ufffd" for c in text)
        encoding = self._rich.encoding or "utf-8"
        return text.encode(encoding, "replace").decode(encoding, "replace")

    def _waited(self) -> None:
        """Print how long the last wait took (startup only: while steps run, the bar shows waits and forgets them)."""
        assert self._waiting is not None
        text, since = self._waiting
        self._waiting = None
        if self._progress is not None:
            self._progress.update(self._task, waiting="")
        elif not self._begun and (self._live_allowed or time.monotonic() - since >= 1.0):
            line = Text(f"  {'waited':<{_LABEL}}", style="dim")
            self._print(line.append(f"{duration(time.monotonic() - since):>6}  {self.printable(text)}", style="dim"))

    def _stop_live(self) -> None:
        if self._status is not None:
            self._status.stop()
        if self._progress is not None:
            self._progress.stop()
        self._status = self._progress = None

    def _print(self, what: Text | Table) -> None:
        with self._writing():
            if not self._gone:
                self._write(what)
                self._stream.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Holds the lock; a terminal that was closed, or a reader that left the pipe, is no reason to lose a run."""
        with self._lock:
            try:
                yield
            except OSError as error:
                self._gone, self._live_allowed = True, False
                self._status = self._progress = None
                logger.warning("nothing more is printed: standard output is gone (%s)", error)

    def _write(self, what: Text | Table) -> None:
        if self._rich.is_terminal:
            self._rich.print(what)
        else:
            # Lines of a log are neither folded nor padded: other programs search and cut them.
            with self._rich.capture() as captured:
                self._rich.print(what, soft_wrap=isinstance(what, Text))
            self._stream.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


class ConsoleLogHandler(logging.Handler):
    """Log records above the live line instead of through it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = "yellow" if record.levelno >= logging.WARNING else "dim"
            self._console._print(Text(self.format(record), style=style))
        except Exception:
            self.handleError(record)
