"""The page as a file: whole, small, closed, and made of whatever a run has left."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.trainer.report.folders import HOSTILE, write_run
from trainer.report import ReportError, write_report
from trainer.report.__main__ import main
from trainer.report.page import differing_settings, flat, short_names
from trainer.report.read import read_run
from trainer.report.series import columns
from trainer.watch.read_folder import Steps


class Page(HTMLParser):
    """The elements of a page, and the text of each script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script" and self.scripts:
            self.scripts[-1] += data

    @property
    def data(self):
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one")


def test_a_page_is_one_file_that_asks_for_nothing_else(run):
    page = Page(write_report([run]))
    assert page.addresses == ["data:,"]
    assert "default-src 'none'" in page.text
    outside = re.findall(
        r"(?:https?:)?//[\w.]+\.\w+", page.scripts[1] + re.search("<style>(.*?)</style>", page.text, re.S)[1]
    )
    assert set(outside) <= {"http://www.w3.org"}, "the namespace of SVG, which is a name and is never asked for"
    assert not re.search(
        r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|EventSource|innerHTML|outerHTML|eval\(", page.text
    )


def test_text_of_a_run_cannot_leave_the_data_it_stands_in(run):
    page = Page(write_report([run]))
    assert page.tags.count("script") == 2, "a completion opened one more"
    assert "alert(1)</script>" not in page.text
    (label,) = {name for rollout in page.data["runs"][0]["rollouts"] for name in rollout["parts"]}
    assert label == page.data["runs"][0]["rollouts"][0]["prompt"] == HOSTILE


def test_the_marks_of_the_template_in_data_are_data(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    (run / "summary.json").write_text(json.dumps({"status": "failed", "error": "<!-- script --> <!-- data -->"}))
    page = Page(write_report([run]))
    assert page.data["runs"][0]["error"] == "<!-- script --> <!-- data -->"
    assert len(page.scripts) == 2


def test_a_page_about_200_steps_is_small_and_keeps_every_step(tmp_path):
    run = write_run(tmp_path / "run", steps=200, tokens=1500, groups=2, every=50)
    path = write_report([run])
    assert path == run / "report.html"
    assert path.stat().st_size < 2_000_000
    assert Page(path).data["runs"][0]["columns"]["step"] == list(range(1, 201))


def test_a_page_about_thousands_of_steps_is_small_and_made_without_holding_them(tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    numbers = {f"by_lag/{lag}/{name}": 0.123456 for lag in range(8) for name in ("k3_kl", "entropy", "token_fraction")}
    line = json.dumps(numbers | {"push/pause_seconds": 1.0, "reward/mean": 0.5, "fairness/hard_trained_share": 0.5})[1:]
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, 6001):
            file.write(f'{{"step": {step}, {line if step != 4000 else line.replace("1.0", "90.0")}\n')
    tracemalloc.start()
    steps = Steps(run / "metrics.jsonl")
    kept = columns(steps)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(steps) == 6000
    assert peak < 6_000_000, "the rows held together take more than 20 MB"
    assert max(value for value in kept.extremes["push/pause_seconds"][1]) == 90
    shown = Page(write_report([run])).data["runs"][0]
    assert max(shown["extremes"]["push/pause_seconds"][1]) == 90
    assert len(shown["columns"]["step"]) == 400
    assert "fairness/hard_trained_share" not in shown["columns"], "what no chart draws is left out"
    assert (run / "report.html").stat().st_size < 1_000_000


def test_a_page_shows_every_part_of_a_run(run):
    shown = Page(write_report([run])).data
    assert {chart["group"].split(":")[0] for chart in shown["charts"]} == {
        "Learning", "Responses", "Policy", "Mismatch", "Staleness", "Losses", "Time"
    }  # fmt: skip
    one = shown["runs"][0]
    assert one["status"] == "done"
    assert one["notes"] == []
    assert one["settings"]["steps"] == "12"
    assert "torch" in one["versions"]
    assert {rollout["step"] for rollout in one["rollouts"]} == {4, 8, 12}
    lanes = one["timeline"]
    assert [name for name, _ in lanes["engines"]] == ["engine 0", "engine 1"]
    assert max(lanes["engines"][0][1]) == 8
    assert [name for _, _, name in lanes["evaluations"]] == ["evaluation of version 0", "evaluation of version 12"]


def test_every_explained_metric_has_its_words(run):
    for chart in Page(write_report([run])).data["charts"]:
        assert all(meaning for _, meaning in chart["help"]), chart["title"]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "trace.json", "rollouts"])
def test_a_page_is_made_without_a_part_and_says_so(tmp_path, name):
    run = write_run(tmp_path / "run", steps=4)
    gone = run / name
    gone.rename(tmp_path / "gone")
    notes = " ".join(Page(write_report([run])).data["runs"][0]["notes"])
    assert name in notes.lower()


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl", "trace.json", "rollouts/step_4.jsonl"])
@pytest.mark.parametrize("left", [0, 0.97])
def test_a_torn_file_gives_all_that_is_whole_in_it(tmp_path, name, left):
    run = write_run(tmp_path / "run", steps=4)
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: int(len(content) * left)])
    one = Page(write_report([run])).data["runs"][0]
    if name == "metrics.jsonl":
        assert one["columns"].get("step", []) == ([1, 2, 3] if left else [])
        assert any("metrics.jsonl" in note for note in one["notes"])
    if name == "trace.json":
        assert (one["timeline"] is not None) == bool(left)
    if name.startswith("rollouts"):
        assert len(one["rollouts"]) == (3 if left else 0)


@pytest.mark.parametrize("content", ["[1, 2", "null", '{"status": [1]}', "\x00\xff", "[" * 3000])
def test_content_that_is_no_run_s_ends_no_report(tmp_path, content):
    run = write_run(tmp_path / "run", steps=4)
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "evaluations.jsonl",
        "summary.json",
        "trace.json",
        "export/tokenizer.json",
    ):
        (run / name).write_text(content)
    row = '{"response_token_ids": [[1]], "versions": ["a"], "logprobs": [null], "loss_mask": [1], "step": 1}\n'
    (run / "rollouts" / "step_4.jsonl").write_text(content + "\n" + row)
    assert Page(write_report([run])).data["runs"][0]["notes"]


def test_without_a_tokenizer_tokens_are_shown_by_their_ids(tmp_path):
    run = write_run(tmp_path / "run", steps=4)
    (run / "export" / "tokenizer.json").unlink()
    one = Page(write_report([run])).data["runs"][0]
    assert one["rollouts"][0]["pieces"][:3] == [0, 1, 2]
    assert one["rollouts"][0]["text"] == HOSTILE
    assert any("ids" in note for note in one["notes"])


def test_the_tokenizer_of_the_model_is_taken_where_there_is_no_export(tmp_path):
    run = write_run(tmp_path / "run", steps=4)
    (run / "export").rename(tmp_path / "model")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(f"{text}model_folder: {tmp_path / 'model'}\n")
    assert Page(write_report([run])).data["runs"][0]["rollouts"][0]["pieces"][:3] == ["a", "b", "c"]


def test_several_runs_are_laid_side_by_side(tmp_path):
    runs = [write_run(tmp_path / name / "run", steps=4, seed=seed) for seed, name in enumerate(("first", "second"))]
    path = write_report(runs)
    assert path == runs[0] / "comparison.html"
    data = Page(path).data
    assert [run["label"] for run in data["runs"]] == ["first/run", "second/run"]
    assert data["settings"] == [["seed", ["0", "1"]]]
    assert [run["summary"]["tokens/trained"][0] for run in data["runs"]] == [960, 961]


def test_settings_that_only_one_run_has_are_a_difference():
    settings = [flat({"a": {"b": 1, "c": [1]}, "run_dir": "x"}), flat({"a": {"b": 1.0}, "run_dir": "y"})]
    assert differing_settings(settings) == [("a.b", ["1", "1.0"]), ("a.c", ["[1]", None])]


def test_runs_with_the_same_path_get_different_names():
    assert short_names([Path("/x/a"), Path("/x/a"), Path("/y/a")]) == ["x/a (1)", "x/a (2)", "y/a"]


def test_the_command_writes_where_it_is_told_and_says_where(run, tmp_path, capsys):
    assert main([str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert Page(tmp_path / "page.html").data["runs"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "nowhere", "is no folder"),
        (lambda path: path, "is not a run folder"),
    ],
)
def test_a_folder_that_is_no_run_s_is_one_sentence_and_exit_code_2(tmp_path, capsys, make, message):
    assert main([str(make(tmp_path))]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_folder_of_runs_is_refused_with_the_newest_run_in_it(tmp_path):
    for name, seconds in (("newer", 2000), ("older", 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
        os.utime(tmp_path / name, (seconds, seconds))
    with pytest.raises(ReportError, match=r"is not a run folder.* newest in it is .*/newer"):
        read_run(tmp_path)


def test_a_page_that_cannot_be_written_is_one_sentence(run, tmp_path):
    with pytest.raises(ReportError, match="--output"):
        write_report([run], tmp_path / "nowhere" / "page.html")
