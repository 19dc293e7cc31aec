"""The command itself, in a process of its own, as a person would run it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import workflows
from tests.trainer.command import ROOT, ended, environment, no_process_left, processes_of_this_test, rows_of, run
from tests.trainer.watch import wandb_file
from trainer.checkpoint_model import write_checkpoint_model
from trainer.evaluation_target import run_config
from trainer.inputs import find_model
from trainer.watch import catalogue
from weight_sync.canary import TOLERANCES

pytestmark = pytest.mark.engine  # processes of the whole command: seconds each even where no engine starts

ROLLOUT_KEYS = {
    "step", "prompt_token_ids", "response_token_ids", "logprobs", "versions", "loss_mask", "reward", "advantage",
    "finish_reason", "text",
}  # fmt: skip


EXACT = ["staleness.max_versions=0", "sampling.seed=7", "engine.max_running=1", "logger.wandb.mode=offline"]
"""On-policy, and every sequence is sampled with random numbers of its own and computed alone: see docs/staleness.md."""


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """Three steps of the tiny recipe, trained as the nightly workflow does; every test below looks at the same run."""
    folder = tmp_path_factory.mktemp("run")
    overrides = [
        "steps=3",
        *EXACT,
        "logger.rollouts.every=1",
        "evaluation.every=2",
        "evaluation.prompts=4",
        "evaluation.temperature=0",
    ]
    train = workflows.words(
        workflows.NIGHTLY_CPU, "Train", RECIPE="ci_tiny", RUN_DIR=str(folder), OVERRIDES=" ".join(overrides)
    )
    done = ended(train)
    return folder, done


class TestAFinishedRun:
    def test_it_exits_with_0_and_leaves_no_process(self, finished_run):
        _, done = finished_run
        assert done.returncode == 0, done.stdout + done.stderr
        assert no_process_left(), processes_of_this_test()

    def test_its_output_names_sources_every_step_and_the_run_folder(self, finished_run):
        folder, done = finished_run
        for words in ("data", "model", "wandb", "offline", "step 1/3", "step 3/3", str(folder)):
            assert words in done.stdout
        assert "Traceback" not in done.stdout + done.stderr

    def test_its_summary_adds_up(self, finished_run):
        summary = json.loads((finished_run[0] / "summary.json").read_text())
        assert summary["status"] == "done"
        assert summary["steps"] == summary["policy_version"] == 3
        assert summary["push/count"] == 4  # version 0 and one after each step
        assert summary["tokens/lost"] == 0
        assert summary["tokens/generated"] == summary["tokens/trained"] + summary["tokens/expired"]

    def test_it_writes_one_line_of_metrics_a_step(self, finished_run):
        lines = [json.loads(line) for line in (finished_run[0] / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        for name in ("reward/mean", "policy/grad_norm", "mismatch/kl", "staleness/token_max", "push/pause_seconds"):
            assert all(name in line for line in lines), name

    def test_its_first_push_is_proven_and_the_later_ones_are_not(self, finished_run):
        first, *later = [json.loads(line) for line in (finished_run[0] / "metrics.jsonl").read_text().splitlines()]
        assert first["push/canary_engines"] == 1
        tolerance = TOLERANCES["float32"]
        assert 0.0 < first["push/canary_abs_diff_mean"] <= tolerance.mean
        assert first["push/canary_abs_diff_max"] <= tolerance.largest
        assert not any("push/canary_engines" in line for line in later)

    def test_every_trained_rollout_keeps_the_invariants(self, finished_run):
        rows = [
            json.loads(line)
            for path in sorted((finished_run[0] / "rollouts").glob("step_*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        assert len(rows) == 3 * 4 * 8
        for row in rows:
            assert row.keys() >= ROLLOUT_KEYS
            lengths = {len(row[key]) for key in ("response_token_ids", "logprobs", "versions", "loss_mask")}
            assert len(lengths) == 1
            assert 1 <= lengths.pop() <= 24
            assert row["versions"] == sorted(row["versions"])
            assert row["step"] - 1 - row["versions"][0] == 0  # staleness.max_versions
            assert row["finish_reason"] in ("stop", "length")

    def test_it_leaves_a_trace_a_configuration_a_checkpoint_and_an_export(self, finished_run):
        folder, _ = finished_run
        assert json.loads((folder / "trace.json").read_text())
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["name"] == "ci_tiny"
        assert config["sampling"]["max_tokens"] == 24
        assert {"torch", "ray", "deepspeed", "transformers"} <= config["versions"].keys()
        assert (folder / "checkpoints" / "step_3").is_dir()
        from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM.from_pretrained(folder / "export").num_parameters() > 0

    def test_it_leaves_a_report_that_misses_nothing(self, finished_run):
        folder, done = finished_run
        page = (folder / "report.html").read_text(encoding="utf-8")
        (run,) = json.loads(re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL)[1])["runs"]
        assert run["notes"] == []
        assert run["columns"]["step"] == [1, 2, 3]
        assert {rollout["step"] for rollout in run["rollouts"]} == {1, 2, 3}
        assert run["timeline"]["learner"]
        assert run["timeline"]["paused"]
        ((engine, rollouts),) = run["timeline"]["engines"]
        assert engine == "engine 0"
        assert max(rollouts) > 0
        assert [name for _, _, name in run["timeline"]["evaluations"]] == [
            f"evaluation of version {version}" for version in (0, 2, 3)
        ]
        assert any(run["timeline"]["sampling"])
        assert str(folder / "report.html") in done.stdout
        # The page has the text that the rewards saw, token by token.
        shown = run["rollouts"][0]
        rows = map(json.loads, (folder / "rollouts" / f"step_{shown['step']}.jsonl").read_text().splitlines())
        (row,) = [row for row in rows if row["rollout_id"] == shown["id"]]
        assert row["text"] in "".join(shown["pieces"])

    def test_wandb_offline_file_holds_the_same_steps(self, finished_run):
        (path,) = finished_run[0].glob("wandb/offline-run-*/run-*.wandb")
        records = wandb_file.read_records(path)
        rows = wandb_file.history(records)
        assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2, 3]
        assert [row["step"] for row in rows if "eval/reward_mean" in row] == [0, 2, 3]
        assert {tag for record in records for tag in record.run.tags} == {"nightly"}

    def test_tensorboard_s_events_hold_the_same_steps(self, finished_run):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(finished_run[0] / "tensorboard")).Reload()
        rows = [json.loads(line) for line in (finished_run[0] / "metrics.jsonl").read_text().splitlines()]
        for name in ("reward/mean", "push/pause_seconds", "mismatch/kl"):
            shown = [(event.step, pytest.approx(event.value, rel=1e-5)) for event in found.Scalars(name)]
            assert [(row["step"], row[name]) for row in rows] == shown
        assert [event.step for event in found.Scalars("eval/reward_mean")] == [0, 2, 3]

    def test_the_nightly_workflow_checks_it_and_puts_the_table_on_its_page(self, finished_run, tmp_path):
        folder, page = finished_run[0], tmp_path / "page.md"
        check = workflows.words(workflows.NIGHTLY_CPU, "Check", RUN_DIR=str(folder))
        done = subprocess.run(
            check, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
            env=environment() | {"GITHUB_STEP_SUMMARY": str(page)},
        )  # fmt: skip
        assert done.returncode in (0, 1), "three steps may be too few for the recipe's conditions, which can be judged"
        conditions = yaml.safe_load((folder / "config.yaml").read_text())["checks"]
        assert all(condition in page.read_text() for condition in conditions)
        assert '| pass | summary("status") == "done"' in page.read_text()

    def test_every_second_version_and_the_last_are_evaluated(self, finished_run):
        lines = [json.loads(line) for line in (finished_run[0] / "evaluations.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 2, 3]
        assert all(line["eval/prompts"] == 4 and 0 <= line["eval/reward_mean"] <= 1 for line in lines)
        assert all(catalogue.unknown(line.keys() - {"step"}) == [] for line in lines)
        assert "evaluation of version 2" in finished_run[1].stdout

    def test_its_best_checkpoint_is_named_with_the_value_of_its_evaluation(self, finished_run):
        folder, _ = finished_run
        evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
        value = evaluations[-1]["eval/reward_mean"]
        best = json.loads((folder / "checkpoints" / "best.json").read_text())
        assert best == {"checkpoint": "step_3", "step": 3, "metric": "eval/reward_mean", "value": value}

    def test_its_checkpoint_is_evaluated_as_the_run_evaluated_it_with_nothing_but_the_run_folder(
        self, finished_run, tmp_path
    ):
        folder, _ = finished_run
        done = run(str(folder), f"--output={tmp_path / 'result.jsonl'}", module="trainer.evaluate", timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert no_process_left(), processes_of_this_test()
        (row,) = [json.loads(line) for line in (tmp_path / "result.jsonl").read_text().splitlines()]
        in_run = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])
        assert row["step"] == in_run["step"] == 3
        same = ("eval/reward_mean", "eval/reward_std", "eval/pass@1", "eval/length_mean", "eval/prompts")
        assert {name: row[name] for name in same} == {name: in_run[name] for name in same}
        assert f"{row['eval/reward_mean']:.4f}" in done.stdout
        assert not list(folder.glob(".evaluate-*"))

    def test_the_export_is_the_folder_that_the_engine_has_loaded_for_that(self, finished_run, tmp_path):
        """So vLLM loads the export."""
        folder, _ = finished_run
        config = run_config(folder, [])
        base = find_model(config, config.model.path)
        write_checkpoint_model(folder / "checkpoints" / "step_3" / "learner", base, False, tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {path.name for path in (folder / "export").iterdir()}
        for name in names:
            assert (tmp_path / name).read_bytes() == (folder / "export" / name).read_bytes(), name

    def test_every_metric_it_writes_is_in_the_catalogue(self, finished_run):
        for line in (finished_run[0] / "metrics.jsonl").read_text().splitlines():
            assert catalogue.unknown(json.loads(line).keys() - {"step"}) == []


def test_an_on_policy_run_stopped_between_two_steps_and_continued_has_the_weights_of_one_that_was_not(
    finished_run, tmp_path
):
    """Bit for bit; that run was evaluated besides, which must not matter."""
    for steps in (1, 3):
        done = run("recipe=ci_tiny", f"steps={steps}", f"run_dir={tmp_path}", "logger.rollouts.every=1", *EXACT)
        assert done.returncode == 0, done.stdout + done.stderr
    for step in (1, 2, 3):
        one, other = (rows_of(folder / "rollouts" / f"step_{step}.jsonl") for folder in (finished_run[0], tmp_path))
        assert one.keys() == other.keys()
        for name, row in one.items():
            for column in ("response_token_ids", "logprobs", "versions", "advantage"):
                assert row[column] == other[name][column], (step, name, column)
    exports = [(folder / "export" / "model.safetensors").read_bytes() for folder in (finished_run[0], tmp_path)]
    assert exports[0] == exports[1]


def test_the_jobs_of_a_sweep_have_run_folders_of_their_own_and_one_that_fails_does_not_end_it(tmp_path):
    overrides = ["recipe=ci_tiny", "seed=0,1", f"run_dir={tmp_path}/sweep", "logger.wandb.mode=disabled"]
    done = run(*overrides, "engine.start_timeout=0.01", "--multirun", timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    for job in (0, 1):
        folder = tmp_path / "sweep" / str(job)
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == "failed"
        assert "engine.start_timeout" in summary["error"]
        assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == job
