"""The page: what is known of the runs as one JSON object, in one HTML file with its style and its script."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from trainer.report.read import ReportError, Run, TraceEvents, read_run
from trainer.report.rollouts import choose_rollouts
from trainer.report.series import Columns, charts, columns, rounded
from trainer.report.timeline import timeline
from trainer.report.token_texts import find_tokenizer
from trainer.watch.catalogue import SUMMARY, find
from trainer.watch.read_folder import number
from trainer.watch.run_folder import write_atomically

NAME = "report.html"
"""The page of one run, in its folder."""
COMPARISON = "comparison.html"
"""The page of several, in the folder of the first."""
SCRIPTS = ("elements.js", "charts.js", "timeline.js", "rollouts.js", "page.js")
ROLLOUTS = 32
"""Rollouts on a page, those of all its runs together."""


def write_report(run_dirs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page about the runs in ``run_dirs`` to ``output`` (see :data:`NAME`, :data:`COMPARISON`); its path.

    Raises :class:`ReportError` for a folder that holds no run, and when the page cannot be written.
    """
    runs = [read_run(Path(path)) for path in run_dirs]
    path = output or runs[0].path / (NAME if len(runs) == 1 else COMPARISON)
    text = render(content(runs))
    try:
        write_atomically(path.absolute(), text.encode("utf-8", "replace").decode("utf-8"))
    except OSError as error:
        raise ReportError(
            f"the page cannot be written to {path}: {error.strerror or error}; name another place with --output"
        ) from error
    return path


def render(data: Mapping[str, Any]) -> str:
    """The HTML file about ``data``, with style and scripts inside."""
    parts = {"style": _file("page.css"), "script": "\n".join(map(_file, SCRIPTS)), "data": embedded(data)}
    page = _file("page.html")
    for name, text in parts.items():
        before, after = page.split(f"<!-- {name} -->")  # the mark stands once: data cannot bring another one in
        page = before + text + after
    return page


def embedded(data: Any) -> str:
    """JSON that can stand inside a ``<script>``: no ``<`` is left that could end it or begin a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the page shows, as plain values."""
    labels = short_names([run.path for run in runs])
    measured = [(columns(run.metrics), columns(run.evaluations)) for run in runs]
    drawn = charts(sorted({name for both in measured for some in both for name in some.values}))
    described = []
    for run, label, (metrics, evaluations) in zip(runs, labels, measured, strict=True):
        points = _drawn(metrics, drawn) | {"evaluations": evaluations.values}
        described.append(_run(run, label, ROLLOUTS // len(runs) or 1, _summary(run, metrics)) | points)
    return {
        "written": time.strftime("%Y-%m-%d %H:%M %Z"),
        "runs": described,
        "charts": drawn,
        "settings": differing_settings([flat(run.config) for run in runs]) if len(runs) > 1 else [],
        "summary_help": {metric.name: metric.meaning for metric in SUMMARY},
    }


def flat(settings: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as ``a.b: value``, values as people write them on a command line."""
    if isinstance(settings, Mapping) and settings:
        return {
            key: value
            for name, inner in settings.items()
            for key, value in flat(inner, f"{prefix}.{name}" if prefix else str(name)).items()
        }
    text = settings if isinstance(settings, str) else json.dumps(settings, ensure_ascii=False, default=str)
    return {prefix: text} if prefix else {}


def differing_settings(settings: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str | None]]]:
    """The keys whose values are not the same in all runs, with the value of each; ``None`` where a run lacks it."""
    keys = dict.fromkeys(key for one in settings for key in one)
    rows = [(key, [one.get(key) for one in settings]) for key in keys if key != "run_dir"]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart; numbered where they are the same."""
    parts = [path.absolute().parts for path in paths]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(part[-depth:]) for part in parts]
    return [f"{name} ({place})" if names.count(name) > 1 else name for place, name in enumerate(names, start=1)]


def _drawn(measured: Columns, drawn: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What of the columns some chart draws, and the extremes of those that are drawn as lines without a band."""
    names = {name for chart in drawn for name in (*chart["metrics"], *(chart["band"] or ()))}
    lines = {name for chart in drawn if chart["kind"] == "lines" and not chart["band"] for name in chart["metrics"]}
    return {
        "columns": {name: column for name, column in measured.values.items() if name in names or name == "step"},
        "extremes": {name: sides for name, sides in measured.extremes.items() if name in lines},
    }


def _run(run: Run, label: str, rollouts: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    texts = find_tokenizer(run.path, run.config)
    chosen = choose_rollouts(run, texts, rollouts)
    lanes = timeline(TraceEvents(run.path / "trace.json"))
    notes = list(run.notes)
    if lanes is None:
        notes.append("trace.json is missing or holds nothing: there is no timeline.")
    if chosen and texts is None:
        notes.append("The tokenizer is not there any more: tokens are shown by their ids.")
    settings = flat({key: value for key, value in run.config.items() if key != "versions"})
    return {
        "label": label,
        "path": str(run.path.absolute()),
        "status": str(run.summary.get("status", "")),
        "error": str(run.summary["error"]) if run.summary.get("error") else None,
        "started": _started(run.path),
        "summary": summary,
        "settings": settings,
        "versions": flat(run.config.get("versions", {})),
        "steps": len(run.metrics),
        "timeline": lanes,
        "rollouts": chosen,
        "rollout_steps": len(run.rollout_files),
        "notes": notes,
    }


def _summary(run: Run, metrics: Columns) -> dict[str, list[Any]]:
    """The numbers of ``summary.json``, and a few of the whole run, by name: value and unit."""
    values = {name: value for name, raw in run.summary.items() if (value := number(raw)) is not None}
    steps, idle = (metrics.values.get(name, []) for name in ("timing/step_seconds", "idle/learner_seconds"))
    if (seconds := sum(filter(None, steps))) > 0:
        values["idle/learner_share"] = sum(filter(None, idle)) / seconds
    known = {metric.name: metric.unit for metric in SUMMARY}
    described = {}
    for name, value in values.items():
        metric = find(name)
        unit = known.get(name) or (metric.unit if metric else "")
        described[name] = [rounded(value, 7), unit]
    return described


def _started(path: Path) -> str | None:
    """When the trace began, in local time. Its first line says so."""
    try:
        with (path / "trace.json").open(encoding="utf-8", errors="replace") as file:
            found = re.search(r'"epoch": (\d+)', file.readline(200))
        return time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(int(found[1]))) if found else None
    except (OSError, OverflowError, ValueError):
        return None


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
