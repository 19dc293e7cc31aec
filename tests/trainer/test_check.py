"""``python -m trainer.check`` on run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.check import main


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": n, "reward/mean": n / 10} for n in range(1, 11)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text('{"status": "done"}\n')
    (folder / "config.yaml").write_text("""checks: ['last("reward/mean") > 0.9', 'summary("status") == "done"']\n""")
    return folder


def test_the_conditions_of_the_recipe_are_taken_when_none_is_given(run_dir, capsys):
    assert main([str(run_dir)]) == 0
    output = capsys.readouterr().out
    assert "2 of 2 conditions hold, 10 steps" in output
    assert '| pass | last("reward/mean") > 0.9' in output


def test_one_condition_that_does_not_hold_is_exit_code_1(run_dir, capsys):
    assert main([str(run_dir), 'max("reward/mean") > 0.5', 'min("reward/mean") > 0.5']) == 1
    assert "| FAIL | min" in capsys.readouterr().out


def test_the_table_is_appended_to_the_page_of_the_workflow(run_dir, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    main([str(run_dir)])
    assert page.read_text().startswith("before\n### ")
    assert "| pass |" in page.read_text()


def test_the_last_line_of_a_killed_run_may_be_torn(run_dir):
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "reward/me')
    assert main([str(run_dir)]) == 0


@pytest.mark.parametrize(
    ("break_it", "conditions", "words"),
    [
        (lambda f: (f / "metrics.jsonl").unlink(), [], "no run folder"),
        (lambda f: (f / "config.yaml").unlink(), [], "config.yaml"),
        (lambda f: (f / "config.yaml").write_text("a: [\n"), [], "config.yaml"),
        (lambda f: (f / "config.yaml").write_text("name: x\n"), [], "no `checks`"),
        (lambda f: (f / "metrics.jsonl").write_text("{}\nno\n{}\n"), [], "metrics.jsonl:2"),
        (lambda f: (f / "summary.json").write_text("{"), [], "summary.json"),
        (lambda f: None, ['mean("nothing") > 1'], "no metric is called `nothing`"),
        (lambda f: None, ["1 +"], "cannot be read"),
    ],
)
def test_what_cannot_be_judged_is_exit_code_2_and_one_readable_line(run_dir, capsys, break_it, conditions, words):
    break_it(run_dir)
    assert main([str(run_dir), *conditions]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
