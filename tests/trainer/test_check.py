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
    assert "2 of 2 conditions hold" in output
    assert '| pass | last("reward/mean") > 0.9' in output


def test_one_condition_that_does_not_hold_is_exit_code_1(run_dir, capsys):
    assert main([str(run_dir), 'max("reward/mean") > 0.5', 'min("reward/mean") > 0.5']) == 1
    assert "| FAIL | min" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ('{"status": "interrupted", "steps": 10}', "run (interrupted after 10 steps): 1 of 1 conditions hold"),
        ("{}", "run (killed, or still going on): 1 of 1 conditions hold"),
    ],
)
def test_of_a_run_that_did_not_come_to_its_end_it_says_so(run_dir, capsys, summary, said):
    (run_dir / "summary.json").write_text(summary)
    main([str(run_dir), 'max("reward/mean") > 0.5'])
    assert said in capsys.readouterr().out


def test_the_table_is_appended_to_the_page_of_the_workflow(run_dir, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    main([str(run_dir)])
    assert page.read_text().startswith("before\n### ")
    assert "| pass |" in page.read_text()


def test_the_last_line_of_a_killed_run_may_be_torn_and_is_told_of(run_dir, capsys):
    with open(run_dir / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 11, "reward/me\xff')
    assert main([str(run_dir)]) == 0
    assert "1 lines cannot be read" in capsys.readouterr().err


def test_evaluations_are_judged_too(run_dir):
    (run_dir / "evaluations.jsonl").write_text(
        '{"step": 0, "eval/reward_mean": 0.2}\n{"step": 4, "eval/reward_mean": 0.5}\n'
    )
    assert main([str(run_dir), 'last("eval/reward_mean") > 2 * first("eval/reward_mean")']) == 0
    assert main([str(run_dir), 'last("eval/reward_mean") > 0.6']) == 1


def test_a_page_of_the_workflow_that_cannot_be_written_does_not_change_the_verdict(run_dir, tmp_path, capsys):
    assert main([str(run_dir), "--summary", str(tmp_path)]) == 0
    assert "cannot be appended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("break_it", "conditions", "words"),
    [
        (lambda f: (f / "metrics.jsonl").unlink(), [], "no run folder"),
        (lambda f: (f / "config.yaml").unlink(), [], "config.yaml"),
        (lambda f: (f / "config.yaml").write_text("a: [\n"), [], "config.yaml"),
        (lambda f: (f / "config.yaml").write_text("name: x\n"), [], "no `checks`"),
        (lambda f: (f / "config.yaml").write_bytes(b"\xff\xfe\x00"), [], "config.yaml"),
        (lambda f: (f / "summary.json").write_text("{"), [], "summary.json"),
        (lambda f: None, ['mean("nothing") > 1'], "no metric is called `nothing`"),
        (lambda f: None, ["1 +"], "cannot be read"),
        (lambda f: (f / "config.yaml").write_text("checks:"), [], "no condition is given"),
    ],
)
def test_what_cannot_be_judged_is_exit_code_2_and_one_readable_line(run_dir, capsys, break_it, conditions, words):
    break_it(run_dir)
    assert main([str(run_dir), *conditions]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
