"""TensorBoard: one event file a start of the run, in the folder ``tensorboard`` of the run folder.

The protocol buffers are those of the ``tensorboard`` package (2.21). They are written as they come, without the thread
of its own writers: a step is one event of some kilobytes, and the error of a full disk has to come to whoever can say
so. ``tensorboard`` is imported when a log is opened, and not otherwise: it is an optional package.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.watch import catalogue
from trainer.watch.lines import TABLE

logger = logging.getLogger(__name__)

FOLDER = "tensorboard"
"""Where in a run folder the event files are."""

JUDGED_BY = ("reward/mean", "eval/reward_mean", "mismatch/kl", "staleness/token_mean",
             "throughput/trained_tokens_per_second")  # fmt: skip
"""The metrics beside the settings of a run in TensorBoard's table of hyperparameters."""

_FILE_VERSION = "brain.Event:2"


class TensorBoardLog:
    """Writes what happens as events on the axis of steps, from any thread. No method raises: an error ends the log.

    ``resume_step`` is the last step contained in the checkpoint that the run continues, 0 for one that begins again,
    ``None`` for a fresh one. Event files are only ever added to, so what an earlier start wrote of later steps stays in
    its file; the new file begins with the event by which every reader discards it (``SessionLog.START``).
    ``settings`` is the resolved configuration.
    """

    def __init__(self, run_dir: Path, resume_step: int | None, settings: Mapping[str, Any]) -> None:
        self.folder = run_dir / FOLDER
        self._explained: set[str] = set()
        self._writer: Any = None
        self._lock = threading.Lock()
        with self._told_of():
            self._writer = _open(self.folder)
            self._begin(0 if resume_step is None else resume_step + 1, settings)

    def step(
        self,
        step: int,
        metrics: Mapping[str, Any],
        table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None,
    ) -> None:
        """Write the metrics of a step, or of the evaluation of a version, and a table of (columns, rows) as text."""
        with self._lock, self._told_of():
            if self._writer is None:
                return
            values = [self._scalar(name, value) for name, value in metrics.items() if value is not None]
            if table is not None:
                columns, rows = table
                cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
                values.append(_text(TABLE, cells))
            self._write(step, values)

    def finish(self, status: str) -> None:
        """Close the file. A run that is done is marked so among the hyperparameters; another one may go on."""
        with self._lock, self._told_of():
            if self._writer is None:
                return
            if status == "done":
                self._write(0, [_session_end()])
            self._writer.close()
            self._writer = None

    def _begin(self, first_step: int, settings: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._record(Event(file_version=_FILE_VERSION))
        self._record(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        lines = OmegaConf.to_yaml(OmegaConf.create(dict(settings)))
        self._write(first_step, [*_hyperparameters(settings), _text("config", [[_code(lines)]])])

    def _scalar(self, name: str, value: float) -> Any:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        metadata = None
        if name not in self._explained:  # readers keep what the first value of a name says
            self._explained.add(name)
            plugin = SummaryMetadata.PluginData(plugin_name="scalars")
            metadata = SummaryMetadata(plugin_data=plugin, summary_description=_explanation(name))
        return Summary.Value(tag=name, simple_value=float(value), metadata=metadata)

    def _write(self, step: int, values: Sequence[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._record(Event(step=step, summary=Summary(value=values)))

    def _record(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    @contextlib.contextmanager
    def _told_of(self) -> Iterator[None]:
        """An error in the body ends the log, and is said."""
        try:
            yield
        except Exception as error:  # of the disk, of a package that does not load: none of it may end a training run
            writer, self._writer = self._writer, None
            with contextlib.suppress(OSError):  # closing tries to write once more
                if writer is not None:
                    writer.close()
            logger.warning(
                "TensorBoard's log in %s ends here; the run goes on without it: %s: %s",
                self.folder, type(error).__name__, error,
            )  # fmt: skip


def _open(folder: Path) -> Any:
    """A writer of records into a new file, named as TensorBoard looks for it: it reads files in the order of names."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
    return RecordWriter(open(folder / name, "xb"))  # held for the run


def _text(name: str, cells: Sequence[Sequence[str]]) -> Any:
    """A table of Markdown, a cell a string; shape [rows, columns]."""
    from tensorboard.compat.proto import tensor_shape_pb2, types_pb2
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto

    shape = tensor_shape_pb2.TensorShapeProto(
        dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in (len(cells), len(cells[0]))]
    )
    strings = [cell.encode("utf-8", "replace") for row in cells for cell in row]
    tensor = TensorProto(dtype=types_pb2.DT_STRING, string_val=strings, tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=name, tensor=tensor, metadata=metadata)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return _code(value)
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _code(text: str) -> str:
    """Text that Markdown shows as it is: an indented block."""
    return "\n".join(f"    {line}" for line in text.splitlines()) or " "


def _hyperparameters(settings: Mapping[str, Any]) -> list[Any]:
    """The settings for the table that compares runs, with the metrics that go beside them."""
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    known = {key: value for key, value in leaves(settings) if value is not None}
    judged = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=name)) for name in JUDGED_BY]
    experiment = api_pb2.Experiment(hparam_infos=[_described(*item) for item in known.items()], metric_infos=judged)
    session = SessionStartInfo(start_time_secs=time.time())
    for key, value in known.items():
        field = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        setattr(session.hparams[key], field, value)
    return [
        _hparams(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment)),
        _hparams(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=session)),
    ]


def _described(key: str, value: bool | float | str) -> Any:
    from tensorboard.plugins.hparams import api_pb2

    kinds = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    return api_pb2.HParamInfo(name=key, type=kinds.get(type(value), api_pb2.DATA_TYPE_FLOAT64))


def _session_end() -> Any:
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    end = SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    return _hparams(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end))


def _hparams(tag: str, content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    return Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str | None]]:
    """Nested settings as (dotted key, value); lists as text, because a hyperparameter is one value."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            plain = isinstance(value, bool | int | float | str) or value is None
            yield f"{prefix}{name}", value if plain else str(value)


def _explanation(name: str) -> str:
    metric = catalogue.find(name)
    if metric is None:
        return ""
    return f"{metric.meaning} [{metric.unit}]" if metric.unit else metric.meaning
