"""``python -m trainer.dashboard``: the wandb dashboard on which a nightly run is reviewed, as code.

It saves a view of a wandb project: totals and the latest completions, then a panel of each chart of
:mod:`trainer.watch.charts` on the axis of steps, and last the settings in which runs differ. Shown are the newest runs
of the project, or those with a tag (``logger.wandb.tags``); baselines stay in every panel however old they get, and the
first of them is what the others are compared with. Needs the optional package ``wandb-workspaces``.

    python -m trainer.dashboard --project midflight-nightly --tag nightly --baseline tag:baseline --baseline RUN_DIR
    python -m trainer.dashboard --entity TEAM --output dashboard.json       # what would be sent; no account, no network

Exit codes: 0 saved or written, 2 it cannot be made; the message says why.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import WandbConfig
from trainer.watch.catalogue import EVALUATION, METRICS, SUMMARY, find
from trainer.watch.charts import CHARTS, DERIVED, Chart, pattern
from trainer.watch.lines import TABLE
from trainer.watch.wandb_log import RUN_ID, logged_in_mode

NAME = "Midflight: nightly review"
STEP = "step"
"""The axis of every panel: the metric that all others are logged against, see :mod:`trainer.watch.wandb_log`."""
TOTALS = ("reward/last10_mean", "eval/last_reward_mean", "steps", "wall_seconds", "tokens/trained", "tokens/expired",
          "tokens/lost", "push/pause_seconds_mean")  # fmt: skip
"""Keys of ``summary.json``, which a run's wandb summary holds too: figures of the first section, columns of runs."""
COLUMNS = 3
PINNED = 20
"""Runs that wandb keeps in every panel at most."""

TAG = re.compile(r"[\w .:/-]+")
"""Tags that wandb-workspaces 0.4 can filter by: it rewrites ``=``, ``<`` and ``>`` inside quotes too."""

Find = Callable[[Mapping[str, Any]], Iterable[Any]]
"""The runs of the project, newest first, by a filter of ``wandb.Api().runs``; each has its ``id``."""


class DashboardError(ValueError):
    """The dashboard cannot be made. The message says why, and what to do. Exit code 2."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot over steps: metrics by name, or, where ``regex`` is set, all whose names it matches as a whole."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    regex: str | None = None
    stacked: bool = False


def panel(chart: Chart) -> Panel | None:
    """The panel of a chart; ``None`` for one that wandb cannot draw.

    wandb chooses by name or by a regular expression without look-ahead, so what a name with ``<x>`` stands for can be
    drawn only where no other metric fits it. What only the report computes is left out.
    """
    names = [name for name in chart.names if name not in DERIVED]
    exact = tuple(name for name in names if "<" not in name)
    open_ended = [name for name in names if "<" in name and not _fits_others(name)]
    stacked = chart.kind == "stack"
    if open_ended:
        regex = "|".join(pattern(name) for name in (*exact, *open_ended))
        return Panel(chart.title, chart.unit, (), f"^({regex})$", stacked)
    return Panel(chart.title, chart.unit, exact, None, stacked) if exact else None


def sections() -> dict[str, list[Panel]]:
    """The panels by section, in the order of the report."""
    found: dict[str, list[Panel]] = {}
    for chart in CHARTS:
        if (made := panel(chart)) is not None:
            found.setdefault(chart.group, []).append(made)
    return found


def workspace(
    entity: str, project: str, *, name: str = NAME, tags: Sequence[str] = (), baselines: Sequence[str] = ()
) -> Any:
    """The ``wandb_workspaces.workspaces.Workspace``; ``baselines`` are ids of runs. Nothing is sent.

    Raises :class:`DashboardError` for a tag that cannot be filtered by, too many baselines, and without the package.
    """
    ws, panels = _package()
    if refused := [tag for tag in tags if not TAG.fullmatch(tag)]:
        raise DashboardError(f"the tag {refused[0]!r} cannot be filtered by; use letters, digits, spaces and . : / - _")
    if len(baselines) > PINNED:
        raise DashboardError(f"{len(baselines)} baselines are more than the {PINNED} that wandb keeps in every panel")
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[_first(ws, panels), *(_section(ws, panels, *item) for item in sections().items()), _last(ws, panels)],
        settings=ws.WorkspaceSettings(x_axis=STEP, point_visualization_method="bucketing"),
        runset_settings=ws.RunsetSettings(
            filters=f"Tags() in {list(tags)!r}" if tags else "",
            pinned_columns=["run:displayName", "run:tags", *(f"summary:{total}" for total in TOTALS)],
            baseline_run=baselines[0] if baselines else None,
            pinned_runs=list(baselines),
        ),
    )


def specification(view: Any) -> dict[str, Any]:
    """What saving ``view`` would send, as plain values.

    ``_to_model`` and the two options are those of ``wandb_workspaces.workspaces.internal.upsert_view2`` (0.4.13), which
    has no public way to the same.
    """
    model = view._to_model()
    spec = json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))
    return {"entityName": model.entity, "projectName": model.project, "displayName": model.display_name, "spec": spec}


def run_ids(references: Sequence[str], find_runs: Find | None) -> list[str]:
    """The ids of the runs that ``references`` name, each once.

    A reference is a run folder, an id, a name (of which the newest run is taken), or ``tag:TAG``, which names several.

    Without ``find_runs`` nobody can be asked: what is no folder is taken for an id. Raises :class:`DashboardError` for
    one that names no run.
    """
    found: list[str] = []
    for reference in references:
        found += _run_ids(reference, find_runs)
    return list(dict.fromkeys(found))


def _run_ids(reference: str, find_runs: Find | None) -> list[str]:
    if Path(reference).is_dir():
        path = Path(reference) / RUN_ID
        if not path.is_file():
            raise DashboardError(f"{reference} has no {RUN_ID}: wandb was off in that run (logger.wandb.mode)")
        return [path.read_text(encoding="utf-8").strip()]
    tag = reference.removeprefix("tag:") if reference.startswith("tag:") else None
    if find_runs is None:
        if tag is not None:
            raise DashboardError(
                f"{reference}: only wandb knows which runs have a tag; leave --output out, or give ids"
            )
        return [reference]
    by_name = {"$or": [{"name": reference}, {"display_name": reference}]}  # wandb calls the id `name`
    ids = [str(run.id) for run in find_runs({"tags": {"$in": [tag]}} if tag is not None else by_name)]
    if not ids:
        raise DashboardError(f"no run of the project is called {reference}, and there is no such run folder")
    return ids if tag is not None else ids[:1]


def _fits_others(entry: str) -> bool:
    """Whether a regular expression for ``entry`` would match metrics that have an entry of their own."""
    described = find(entry)
    others = [metric.name for metric in (*METRICS, *EVALUATION) if metric is not described and "<" not in metric.name]
    return any(re.fullmatch(pattern(entry), name) for name in others)


def _package() -> tuple[Any, Any]:
    try:
        from wandb_workspaces import workspaces
        from wandb_workspaces.reports.v2 import panels
    except ImportError as error:
        raise DashboardError(
            f"{error}; it needs the package wandb-workspaces: `make setup` or `pip install wandb-workspaces`"
        ) from None
    return workspaces, panels


def _section(ws: Any, panels: Any, title: str, shown: Sequence[Panel]) -> Any:
    plots = [
        panels.LinePlot(
            title=one.title, x=STEP, y=list(one.metrics), metric_regex=one.regex, title_x="step", title_y=one.unit,
            plot_type="stacked-area" if one.stacked else "line",
        )
        for one in shown
    ]  # fmt: skip
    return _grid(ws, title, plots)


def _first(ws: Any, panels: Any) -> Any:
    units = {metric.name: metric.unit for metric in SUMMARY}
    figures = [panels.ScalarChart(title=f"{total} ({units[total]})", metric=total) for total in TOTALS]
    return _grid(ws, "Totals", [*figures, panels.WeavePanelSummaryTable(table_name=TABLE)])


def _last(ws: Any, panels: Any) -> Any:
    return _grid(ws, "Settings that differ", [panels.RunComparer(diff_only="split")], columns=1)


def _grid(ws: Any, title: str, shown: Sequence[Any], columns: int = COLUMNS) -> Any:
    layout = ws.SectionLayoutSettings(columns=columns, rows=-(-len(shown) // columns))
    settings = ws.SectionPanelSettings(x_axis=STEP)
    return ws.Section(name=title, panels=list(shown), is_open=True, layout_settings=layout, panel_settings=settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Save the dashboard or write its specification, say where it is, and return the exit code."""
    given = _arguments(arguments)
    try:
        entity: str = given.entity or ""
        find_runs: Find | None = None
        if given.output is None:
            entity, find_runs = _account(given.project, given.entity)
        baselines = run_ids(given.baseline, find_runs)
        view = workspace(entity, given.project, name=given.name, tags=given.tag, baselines=baselines)
        sys.stdout.write(_saved(view) if given.output is None else _written(view, given.output))
    except (ValueError, OSError) as error:  # ValueError: ours, and what wandb-workspaces does not take for a name
        sys.stderr.write(f"Dashboard error: {error}\n")
        return 2
    return 0


def _account(project: str, entity: str | None) -> tuple[str, Find]:
    """The entity that the dashboard is saved for, and who finds runs of its project. Asks nobody to log in."""
    import wandb

    mode, why = logged_in_mode(wandb)
    if mode != "online":
        raise DashboardError(f"{why}; --output FILE writes what would be sent")
    try:
        api = wandb.Api()
        chosen = entity or api.default_entity
    except Exception as error:  # of the network, of the account: wandb raises several types of its own
        raise DashboardError(f"wandb cannot be used: {error}") from error

    def find_runs(filters: Mapping[str, Any]) -> Iterable[Any]:
        try:
            found = api.runs(f"{chosen}/{project}", filters=dict(filters), order="-created_at")
            return list(itertools.islice(found, PINNED + 1))
        except Exception as error:  # the same, and a project that does not exist
            raise DashboardError(f"the runs of {chosen}/{project} cannot be read: {error}") from error

    return chosen, find_runs


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--project", default=WandbConfig.project, help="wandb project (default: %(default)s)")
    parser.add_argument("--entity", help="wandb user or team; default: that of the account")
    parser.add_argument("--name", default=NAME, help="title of the dashboard (default: %(default)s)")
    parser.add_argument("--tag", action="append", default=[], help="show only runs with this tag, or another one given")
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="RUN",
        help="a run to compare with: a run folder, an id, a name (the newest of that name) or tag:TAG",
    )
    parser.add_argument("--output", help="write what would be sent to this file (- for the screen), and send nothing")
    return parser.parse_args(arguments)


def _saved(view: Any) -> str:
    """Save it, and return its address. Raises :class:`DashboardError`."""
    try:
        view.save()
        return f"{view.url}\n"
    except Exception as error:  # of the network, of the server: wandb raises several types of its own
        raise DashboardError(f"it could not be saved: {type(error).__name__}: {error}") from error


def _written(view: Any, output: str) -> str:
    """The specification, or, when it was written to a file, where it is."""
    text = json.dumps(specification(view), indent=2, ensure_ascii=False) + "\n"
    if output == "-":
        return text
    Path(output).write_text(text, encoding="utf-8")
    return f"{output}\n"


if __name__ == "__main__":
    sys.exit(main())
