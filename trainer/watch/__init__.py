"""What people see of a run: the console, the run folder, wandb, TensorBoard and the trace, behind one object."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TextIO

from generator.rollout import Group
from trainer.config import Config
from trainer.watch.console import Console, ConsoleLogHandler
from trainer.watch.lines import TABLE_COLUMNS, table_rows
from trainer.watch.metrics import PushRecord, step_metrics
from trainer.watch.run_folder import RunFolder, RunFolderError
from trainer.watch.tensorboard_log import TensorBoardLog
from trainer.watch.totals import RunningTotals, evaluation_summary
from trainer.watch.trace import Trace
from trainer.watch.wandb_log import FINISH_SECONDS, WandbLog
from weight_sync.background import in_thread

logger = logging.getLogger(__name__)

__all__ = ["PushRecord", "RunFolderError", "Watch"]

Status = Literal["done", "failed", "interrupted"]

_ENDS: dict[Status, tuple[int, float]] = {"done": (0, FINISH_SECONDS), "failed": (1, 10.0), "interrupted": (130, 5.0)}
"""By status: wandb's exit code, and seconds that the report, and then wandb, may take. An interrupted run hurries."""


class Watch:
    """Everything that is shown or written about a run. The run tells it what happens; it decides nothing.

    ``resume_step`` is the last step contained in the checkpoint that the run continues, 0 for a run that begins again
    in its folder, or ``None`` for a fresh run. ``model_folder`` is where the model that it trains was read from.
    Raises :class:`RunFolderError` before anything is written when the run folder belongs to another run.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume_step: int | None = None,
        model_folder: str | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._config = config
        settings = asdict(config)
        self._folder = RunFolder(config.run_dir, resume_step)
        self._folder.write_config(settings, model_folder)
        self.run_dir = self._folder.path
        self.trace = Trace(self.run_dir / "trace.json", append=resume_step is not None)
        self.console = Console(config.steps, progress=config.logger.progress, stream=stream)
        self.log_handler: logging.Handler = ConsoleLogHandler(self.console)
        """For the run to install on the root logger in place of a stream handler, which would tear the live line."""
        self._totals = RunningTotals()
        self._lock = threading.Lock()
        self._pushes: list[PushRecord] = []
        self._steps_done = resume_step or 0
        self._version = 0
        self._earlier_seconds = 0.0
        self._started = self._stepped = time.monotonic()
        self._generated_at_step = 0
        self._closed = False
        self._warned = False
        self.console.start(f"Midflight: {config.name}, {config.steps} steps")
        self.source("run folder", str(self.run_dir), _beginning(resume_step))
        self._wandb = WandbLog(
            config.logger.wandb, self.run_dir, settings, lambda mode, why: self.source("wandb", mode, why)
        )
        self._tensorboard: TensorBoardLog | None = None
        if config.logger.tensorboard.enabled:
            self._tensorboard = TensorBoardLog(self.run_dir, resume_step, settings)
            self.source("tensorboard", str(self._tensorboard.folder), f"tensorboard --logdir {config.run_dir}")

    def source(self, kind: str, what: str, why: str = "") -> None:
        """Show where something came from: ``kind`` is ``model``, ``data``, ``hardware``, ..."""
        self.console.source(kind, what, why)

    def waiting(self, text: str | None) -> None:
        """Show what is being waited for; ``None``: nothing."""
        self.console.waiting(text)

    def begin(self) -> None:
        """The parts have started and steps begin: start the bar and the clock of the first step.

        What an earlier run wrote of steps that will be done again is removed now, and not before.
        """
        self._folder.rewind()
        self.console.begin_steps(self._steps_done)
        self._stepped = time.monotonic()

    def finished(self, group: Group) -> None:
        """Count the rollouts of a group that came back from the engines, used or not."""
        with self._lock:
            self._totals.add_finished(item.rollout for item in group.rollouts)

    def count(self, name: str, count: int) -> None:
        """Add to a total of the summary, for example ``tokens/expired`` when a whole group is dropped."""
        with self._lock:
            self._totals.add(name, count)

    def push(self, record: PushRecord) -> None:
        """Note a push: in the trace now, in the metrics of the next step."""
        with self._lock:
            self._pushes.append(record)
            self._totals.add_push(record)
            self._version = record.version
        self.trace.complete("push", f"push version {record.version}", record.started, record.seconds,
                            bytes=record.bytes, interrupted_rollouts=record.interrupted_rollouts)  # fmt: skip
        for name, start, seconds in record.phases:
            self.trace.complete("push", name, start, seconds)

    def skipped(self, step: int, reason: str, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> None:
        """An update of the step was skipped for ``reason``: count it and keep its batch, as :meth:`step` takes it."""
        self.count("steps/skipped", 1)
        path = self._folder.write_rollouts(step, groups, advantages, skipped=reason)
        logger.warning("step %d: an update was skipped: %s (the batch is in %s)", step, reason, path)

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]],
        *,
        version: int,
    ) -> dict[str, float]:
        """Write and show a finished step; returns its metrics.

        ``metrics`` are those of other rooms under their full names, ``groups`` what was trained on, ``advantages`` one
        list a group, ``version`` the learner's version when it took the groups. Blocks for a file write, not for wandb.
        """
        now = time.monotonic()
        with self._lock:
            pushes, self._pushes = self._pushes, []
            generated = self._totals.counts["tokens/generated"]
            full = step_metrics(
                groups, version=version, seconds=now - self._stepped, pushes=pushes, extra=metrics,
                generated_tokens=generated - self._generated_at_step,
            )  # fmt: skip
            self._totals.add_step(groups, full.get("reward/mean"))
        self._stepped, self._generated_at_step, self._steps_done = now, generated, step
        self._warn_of_no_signal(step, full)
        self._folder.append_metrics(step, full)
        if _due(step, self._config.logger.rollouts.every):
            self._folder.write_rollouts(step, groups, advantages)
        self.console.step(step, full)
        table = None
        if _due(step, self._config.logger.table.every):
            rows = table_rows(groups, advantages, self._config.logger.table.rows)
            self.console.table(step, rows)
            table = (TABLE_COLUMNS, rows)
        self._wandb.step({"step": step, **full}, table)
        if self._tensorboard is not None:
            self._tensorboard.step(step, full, table)
        return full

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Write and show an evaluation, on the axis of steps. Blocks for a file write, not for wandb."""
        self._folder.append_evaluation(version, metrics)
        self.console.evaluation(version, metrics)
        self._wandb.step({"step": version, **metrics})
        if self._tensorboard is not None:
            self._tensorboard.step(version, metrics)

    def evaluated(self, version: int) -> bool:
        """Whether the version was evaluated, before a restart for example."""
        return version in self._folder.evaluations

    def _warn_of_no_signal(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once, when nothing can be learned because no response comes to its end: zeros look like any other run. Not
        when the rewards are equal because all of them have become good."""
        cut = metrics.get("completions/truncated_fraction") == 1.0
        improved = metrics.get("reward/mean", 0.0) > min(self._totals.first_rewards, default=math.inf)
        if cut and metrics.get("group/zero_variance_fraction") == 1.0 and not improved and not self._warned:
            self._warned = True
            logger.warning(
                "step %d: every response was cut at sampling.max_tokens=%d and no group has different rewards, so "
                "nothing was learned; more tokens may help",
                step,
                self._config.sampling.max_tokens,
            )

    def summary(self, status: Status | Literal["running"] = "running", error: str | None = None) -> dict[str, Any]:
        """The totals so far, with the keys of ``summary.json``."""
        with self._lock:
            summary = {
                "status": status,
                "steps": self._steps_done,
                "policy_version": self._version,
                "wall_seconds": round(self._earlier_seconds + time.monotonic() - self._started, 3),
                **self._totals.summary(),
                **evaluation_summary(self._folder.evaluations),
            }
        return summary | ({"error": error} if error else {})

    def close(self, status: Status, error: BaseException | str | None = None) -> dict[str, Any]:
        """End everything in bounded time and write ``summary.json``, first of all, whatever fails afterwards.

        Returns the summary. Safe to call more than once: only the first call counts.
        """
        text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        summary = self.summary(status, text)
        if self._closed:
            return summary
        self._closed = True
        self._folder.write_summary(summary)
        self._folder.close()
        self.trace.close()
        if self._tensorboard is not None:
            self._tensorboard.finish(status)
        code, seconds = _ENDS[status]
        report = self._write_report(seconds)
        self._wandb.finish(summary, exit_code=code, timeout=seconds)
        self.console.close(summary, str(self.run_dir), report)
        return summary

    def _write_report(self, seconds: float) -> str | None:
        """The page about the run, from the files it has just closed, if that takes no longer than ``seconds``.

        Its failure is no failure of the run.
        """
        if not self._config.logger.report:
            return None
        from trainer.report import write_report  # it reads the catalogue of this package

        written = in_thread(lambda: write_report([self.run_dir]), "report")
        try:
            return str(written.result(seconds))
        except TimeoutError:
            logger.warning("the report takes long; `python -m trainer.report %s` writes it", self.run_dir)
        except Exception as error:
            logger.warning("no report was written: %s: %s", type(error).__name__, error)
        return None

    def state_dict(self) -> dict[str, Any]:
        """The totals, for a checkpoint: a resumed run goes on counting where it stopped."""
        with self._lock:
            seconds = self._earlier_seconds + time.monotonic() - self._started
            return {"totals": self._totals.state_dict(), "version": self._version, "wall_seconds": seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the totals that :meth:`state_dict` returned."""
        with self._lock:
            self._totals.load_state_dict(state["totals"])
            self._version = state["version"]
            self._earlier_seconds = state["wall_seconds"]
            self._generated_at_step = self._totals.counts["tokens/generated"]


def _beginning(resume_step: int | None) -> str:
    if resume_step is None:
        return ""
    return f"continued after step {resume_step}" if resume_step else "begun again: it ended before its first checkpoint"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
