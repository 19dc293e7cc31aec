"""The wandb dashboard: what would be sent, for sending it needs an account."""

from __future__ import annotations

import base64
import json
import re
from types import SimpleNamespace

import pytest

from trainer.dashboard import (
    NAME,
    TOTALS,
    DashboardError,
    main,
    panel,
    run_ids,
    sections,
    specification,
    workspace,
)
from trainer.watch.catalogue import EVALUATION, METRICS, SUMMARY, find
from trainer.watch.charts import CHARTS, DERIVED, matching
from trainer.watch.lines import TABLE

LOGGED = {metric.name for metric in (*METRICS, *EVALUATION)}


def spec(**more):
    return specification(workspace("team", "midflight", **more))["spec"]["section"]


def plots(of):
    """The line plots of a specification, by title."""
    every = [one for section in of["panelBankConfig"]["sections"] for one in section["panels"]]
    return {one["config"]["chartTitle"]: one["config"] for one in every if one["viewType"] == "Run History Line Plot"}


def filters(of):
    return [(item["key"], item["op"], item["value"]) for item in of["runSets"][0]["filters"]["filters"]]


def test_every_metric_that_it_names_is_one_that_runs_log():
    shown = plots(spec())
    assert len(shown) == sum(map(len, sections().values())) > 25
    named = [name for one in shown.values() for name in one["metrics"]]
    assert [name for name in named if find(name) is None or name in DERIVED] == []
    for one in shown.values():
        if one.get("metricRegex"):
            for entry in re.sub(r"\\(.)", r"\1", one["metricRegex"])[2:-2].replace("[^/]+", "0").split("|"):
                assert find(entry) is not None, entry
    assert set(TOTALS) <= {metric.name for metric in SUMMARY} | LOGGED


def test_every_plot_has_the_axis_of_steps_and_the_unit_of_its_metrics():
    for title, one in plots(spec()).items():
        assert one["xAxis"] == "step", title
        for name in one["metrics"]:
            assert one["yAxisTitle"].startswith(find(name).unit), (title, name)
    assert spec()["settings"]["xAxis"] == "step"
    for chart in CHARTS:
        for name in set(chart.names) - set(DERIVED):
            assert chart.unit.startswith(find(name).unit), (chart.title, name)


@pytest.mark.parametrize(
    "name",
    ["reward/mean", "eval/reward_mean", "completions/length_mean", "policy/entropy", "mismatch/kl",
     "mismatch/ratio_mean", "staleness/token_mean", "throughput/trained_tokens_per_second", "push/pause_seconds",
     "push/transfer_seconds", "idle/learner_seconds", "staleness/expired_tokens", "reward/excluded",
     "engines/restarted"],
)  # fmt: skip
def test_what_a_reviewer_needs_is_on_it(name):
    assert any(name in one["metrics"] for one in plots(spec()).values())


def test_a_regular_expression_matches_what_its_chart_means_and_nothing_else():
    """wandb matches with RE2, which knows no look-around."""
    names = [*LOGGED, "by_lag/0/k3_kl", "by_lag/3/token_fraction", "by_source/gsm8k/reward_mean", "eval/pass@4",
             "reward/exact", "timing/optimizer_seconds", "push/gate_seconds"]  # fmt: skip
    names = [name for name in names if "<" not in name]
    charts = {chart.title: chart for chart in CHARTS}
    patterns = {one.title: one.regex for found in sections().values() for one in found if one.regex}
    assert {"Trained tokens by age", "Evaluation", "Reward by data set"} <= patterns.keys()
    for title, regex in patterns.items():
        assert "(?" not in regex
        meant = [*charts[title].metrics, *charts[title].points]
        assert sorted(name for name in names if re.search(regex, name)) == sorted(matching(meant, names)), title


def test_only_the_parts_of_the_reward_have_no_panel():
    assert [chart.title for chart in CHARTS if panel(chart) is None] == ["Parts of the reward"]


def test_phases_and_ages_are_stacked():
    shown = plots(spec())
    assert {title for title, one in shown.items() if one["plotType"] == "stacked-area"} == {
        chart.title for chart in CHARTS if chart.kind == "stack"
    }


def test_its_sections_are_those_of_the_report_between_totals_and_settings():
    shown = spec()["panelBankConfig"]["sections"]
    groups = list(dict.fromkeys(chart.group for chart in CHARTS))
    assert [section["name"] for section in shown] == ["Totals", *groups, "Settings that differ"]
    assert all(section["isOpen"] for section in shown)
    assert TABLE in json.dumps(shown[0])


def test_runs_are_chosen_by_tag_and_baselines_stay_in_every_panel():
    runs = spec(tags=["nightly", "cpu 2"], baselines=["abc123", "def456"])["runSets"][0]
    assert filters(spec(tags=["nightly", "cpu 2"])) == [
        ({"section": "run", "name": "tags"}, "IN", ["nightly", "cpu 2"])
    ]  # fmt: skip
    decoded = [base64.b64decode(run).decode() for run in runs["pinnedRunIds"]]
    assert decoded == ["Run:v1:abc123:midflight:team", "Run:v1:def456:midflight:team"]
    assert runs["baselineRunId"] == runs["pinnedRunIds"][0]
    assert filters(spec()) == []
    assert "baselineRunId" not in spec()["runSets"][0]


@pytest.mark.parametrize(
    ("more", "words"), [({"tags": ["lr=1"]}, "lr=1"), ({"baselines": [str(n) for n in range(21)]}, "21 baselines")]
)
def test_what_wandb_would_not_understand_is_refused(more, words):
    with pytest.raises(DashboardError, match=words):
        workspace("team", "midflight", **more)


def test_a_baseline_is_a_run_folder_an_id_a_name_or_a_tag(tmp_path):
    (tmp_path / "run" / "wandb").mkdir(parents=True)
    (tmp_path / "run" / "wandb" / "run_id").write_text("folder1\n")
    asked = []

    def find_runs(filters):
        asked.append(filters)
        known = {"best": ["new", "old"], "x1": ["x1"], "gone": []}
        found = ["t1", "t2"] if "tags" in filters else known[filters["$or"][0]["name"]]
        return [SimpleNamespace(id=number) for number in found]

    folder = str(tmp_path / "run")
    assert run_ids([folder, "best", "x1", "tag:base", folder], find_runs) == ["folder1", "new", "x1", "t1", "t2"]
    assert asked[0] == {"$or": [{"name": "best"}, {"display_name": "best"}]}
    assert asked[-1] == {"tags": {"$in": ["base"]}}
    assert run_ids([folder, "x1"], None) == ["folder1", "x1"]
    for reference, who, words in (
        ("gone", find_runs, "gone"),
        ("tag:base", None, "--output"),
        (str(tmp_path), None, "wandb"),
    ):
        with pytest.raises(DashboardError, match=words):
            run_ids([reference], who)


def test_the_command_writes_what_would_be_sent_without_an_account(tmp_path, capsys):
    assert (
        main(["--entity", "team", "--tag", "nightly", "--baseline", "abc", "--output", str(tmp_path / "d.json")]) == 0
    )
    assert capsys.readouterr().out == f"{tmp_path / 'd.json'}\n"
    written = json.loads((tmp_path / "d.json").read_text())
    assert (written["entityName"], written["projectName"], written["displayName"]) == ("team", "midflight", NAME)
    assert plots(written["spec"]["section"]).keys() == plots(spec()).keys()


def test_without_an_account_saving_is_one_sentence_and_exit_code_2(monkeypatch, tmp_path, capsys):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert main([]) == 2
    told = capsys.readouterr().err
    assert "--output" in told
    assert told.count("\n") == 1


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "nowhere" / "d.json")]) == 2
    assert "nowhere" in capsys.readouterr().err
