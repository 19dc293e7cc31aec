"""The command itself, in a process of its own, as a person would run it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests import workflows
from tests.trainer.watch import wandb_file
from trainer.checkpoint_model import write_checkpoint_model
from trainer.control import request
from trainer.evaluation_target import run_config
from trainer.inputs import find_model
from trainer.watch import catalogue
from weight_sync.canary import TOLERANCES

pytestmark = pytest.mark.engine  # processes of the whole command: seconds each even where no engine starts

ROOT = Path(__file__).resolve().parents[2]
ROLLOUT_KEYS = {
    "step", "prompt_token_ids", "response_token_ids", "logprobs", "versions", "loss_mask", "reward", "advantage",
    "finish_reason", "text",
}  # fmt: skip


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "trainer", *overrides]


def environment() -> dict[str, str]:
    # The test's own processes are told apart from any other Ray on the machine by this mark in their environment.
    return {**os.environ, "WANDB_MODE": "offline", "MIDFLIGHT_TEST": str(os.getpid()), "PYTHONPATH": str(ROOT)}


DESCENDANTS: set[psutil.Process] = set()
"""Processes of commands seen while they ran. vLLM's engine core, which renames itself, loses the mark by that."""


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def processes_of_this_test() -> list[psutil.Process]:
    found = []
    for process in {*psutil.process_iter(), *DESCENDANTS}:
        try:
            marked = process in DESCENDANTS or process.environ().get("MIDFLIGHT_TEST") == str(os.getpid())
            if marked and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def no_process_left(patience: float = 20.0) -> bool:
    """Whether every process of the command has ended; those that are on their way out get a moment."""
    deadline = time.monotonic() + patience
    while processes_of_this_test() and time.monotonic() < deadline:
        time.sleep(0.2)
    return not processes_of_this_test()


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
    done = subprocess.run(train, capture_output=True, text=True, timeout=900, env=environment(), cwd=ROOT, check=False)
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
        done = subprocess.run(
            [sys.executable, "-m", "trainer.evaluate", str(folder), f"--output={tmp_path / 'result.jsonl'}"],
            capture_output=True, text=True, timeout=600, env=environment(), cwd=ROOT, check=False,
        )  # fmt: skip
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
        done = subprocess.run(
            command("recipe=ci_tiny", f"steps={steps}", f"run_dir={tmp_path}", "logger.rollouts.every=1", *EXACT),
            capture_output=True, text=True, timeout=900, env=environment(), cwd=ROOT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    for step in (1, 2, 3):
        one, other = (rows_of(folder / "rollouts" / f"step_{step}.jsonl") for folder in (finished_run[0], tmp_path))
        assert one.keys() == other.keys()
        for name, row in one.items():
            for column in ("response_token_ids", "logprobs", "versions", "advantage"):
                assert row[column] == other[name][column], (step, name, column)
    exports = [(folder / "export" / "model.safetensors").read_bytes() for folder in (finished_run[0], tmp_path)]
    assert exports[0] == exports[1]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["recipe=ci_tinny"], ["ci_tiny"]),
        (["recipe=ci_tiny", "stepss=3"], ["`stepss`", "`steps`"]),
        (["recipe=ci_tiny", "steps=many"], ["`steps`"]),
        (["recipe=ci_tiny", "model.path=/nowhere/model"], ["/nowhere/model"]),
        (["recipe=ci_tiny", "reward=recipes.ci_tiny.reward.nothing"], ["nothing"]),
        (["recipe=gsm8k_fully_async", "data.path=/nowhere/train.jsonl"], ["/nowhere/train.jsonl"]),
        (["recipe=ci_tiny", "engine.max_model_len=25"], ["prompt of row", "engine.max_model_len"]),
    ],
)
def test_bad_input_ends_with_exit_code_2_and_one_readable_message(overrides, words, tmp_path):
    done = subprocess.run(
        command(*overrides, f"run_dir={tmp_path / 'run'}", "hardware=cpu"),
        capture_output=True, text=True, timeout=300, env=environment(), cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert no_process_left()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"question": "1+1?", "answer": "#### 2"}\n{"question": \n', ["train.jsonl:2:", "json"]),
        ('{"question": "1+1?", "solution": "2"}\n', ["answer"]),
        ("", ["empty"]),
    ],
    ids=["a line that does not parse", "a missing column", "an empty file"],
)
def test_a_broken_data_file_is_answered_with_its_name_and_what_is_wrong(content, words, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(content)
    done = subprocess.run(
        command("recipe=gsm8k_fully_async", f"data.path={path}", f"run_dir={tmp_path / 'run'}", "hardware=cpu"),
        capture_output=True, text=True, timeout=300, env=environment(), cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert str(path) in done.stderr
    for word in words:
        assert word in done.stderr.lower()


def act_after(
    line_like: str, act: Callable[[subprocess.Popen], None], folder: Path, *overrides: str
) -> tuple[int, str]:
    """Start the command, act on it after a line of output like a pattern; exit code and output."""
    process = subprocess.Popen(
        command("recipe=ci_tiny", "steps=10000", f"run_dir={folder}", "logger.wandb.mode=disabled", *overrides),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=ROOT,
    )  # fmt: skip
    output = []
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if re.search(line_like, line):
            break
    else:
        pytest.fail(
            f"the command ended with {process.wait(timeout=60)} before a line like {line_like!r}:\n" + "".join(output)
        )
    DESCENDANTS.update(descendants(process))
    try:
        act(process)
        rest, _ = process.communicate(timeout=300)
    except BaseException:
        process.send_signal(signal.SIGTERM)  # nothing of this command may be left to the next test
        raise
    return process.returncode, "".join(output) + rest


def interrupt_after(line_like: str, signal_number: int, folder: Path) -> tuple[int, str]:
    """As :func:`act_after`, with a signal to the command."""
    return act_after(line_like, lambda process: process.send_signal(signal_number), folder)


LONG_ROLLOUTS = ["sampling.max_tokens=40", "sampling.ignore_eos=true", "logger.rollouts.every=1"]
"""Sampling a group takes long enough that some are in the middle of it at any moment."""


def rows_of(*files: Path) -> dict[str, dict]:
    """The rows of files of rollouts, by the rollout's id, which no two have."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    by_id = {row["rollout_id"]: row for row in rows}
    assert len(by_id) == len(rows)
    return by_id


BEGINNING_EARLY = ["batch.streaming=true", "staleness.adapt_running_groups=true"]


def test_ctrl_c_writes_a_checkpoint_and_the_same_command_continues_from_it_token_for_token(tmp_path):
    def interrupt(process: subprocess.Popen) -> None:
        process.send_signal(signal.SIGINT)

    code, output = act_after(r"step +2/", interrupt, tmp_path, *LONG_ROLLOUTS, *BEGINNING_EARLY)
    assert code == 130, output
    assert "Traceback" not in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    (checkpoint,) = (tmp_path / "checkpoints").glob("step_*")
    kept = rows_of(checkpoint / "rollouts.jsonl")
    assert [row for row in kept.values() if row["finish_reason"] is None and row["response_token_ids"]], "in flight"
    assert no_process_left(), processes_of_this_test()

    steps = summary["policy_version"] + 2
    done = subprocess.run(
        command("recipe=ci_tiny", f"steps={steps}", f"run_dir={tmp_path}", "logger.wandb.mode=disabled",
                *LONG_ROLLOUTS, *BEGINNING_EARLY),
        capture_output=True, text=True, timeout=900, env=environment(), cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["policy_version"]) == ("done", steps, steps)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert sum(line["tokens/streamed"] for line in lines) > 0
    assert all(line["engines/max_running_groups"] >= 1 and "engines/kv_cache_usage" in line for line in lines)
    trained = rows_of(*(tmp_path / "rollouts").glob("step_*.jsonl"))
    for name, row in kept.items():
        count = len(row["response_token_ids"])
        for column in ("response_token_ids", "logprobs", "versions"):
            assert trained[name][column][:count] == row[column], "a kept rollout goes on with the tokens that it had"
    assert summary["tokens/generated"] == sum(summary[f"tokens/{end}"] for end in ("trained", "expired", "lost"))


def test_a_killed_run_leaves_no_process(tmp_path):
    code, output = interrupt_after(r"step +1/", signal.SIGKILL, tmp_path)
    assert code == -signal.SIGKILL, output
    # Nobody ends Ray's agents then but they themselves, after about a minute in which they try to report to the GCS.
    assert no_process_left(patience=240), processes_of_this_test()


def test_a_sigterm_while_engines_start_exits_with_130_and_leaves_no_process(tmp_path):
    code, output = interrupt_after("starting 1 engine", signal.SIGTERM, tmp_path)
    assert code == 130, output
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"
    assert no_process_left(patience=60), processes_of_this_test()


def kill_engine_core(process: subprocess.Popen) -> None:
    (core,) = [p for p in descendants(process) if "EngineCore" in " ".join(p.cmdline())]
    core.kill()


def test_a_run_whose_engine_dies_goes_on_with_a_new_one_and_loses_no_token(tmp_path):
    code, output = act_after(r"step +3/", kill_engine_core, tmp_path, "steps=20")
    assert code == 0, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == summary["policy_version"] == 20
    assert summary["engines/lost"] == summary["engines/restarted"] == 1
    assert summary["tokens/generated"] == sum(summary[f"tokens/{end}"] for end in ("trained", "expired", "lost"))
    assert no_process_left(patience=60), processes_of_this_test()


def test_a_run_whose_engine_dies_and_may_not_be_replaced_fails_with_the_cause_and_leaves_no_process(tmp_path):
    code, output = act_after(r"step +1/", kill_engine_core, tmp_path, "engine.max_restarts=0")
    assert code == 1, output
    assert "Traceback" not in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "engine 0" in summary["error"]
    assert "EngineDeadError" in (tmp_path / "error.txt").read_text()
    assert no_process_left(patience=60), processes_of_this_test()


def test_engines_are_added_and_drained_while_a_run_goes_on(tmp_path):
    def change_twice(process: subprocess.Popen) -> None:
        assert request(tmp_path, {"engine.count": 2})["engine.count"] == 2
        answer = request(tmp_path, {"engine.count": 0})
        assert "at least 1" in answer["error"]
        assert "cannot be changed" in request(tmp_path, {"steps": 3})["error"]
        wait_for(lambda: request(tmp_path, {})["engines_serving"] == 2)
        assert request(tmp_path, {"engine.count": 1})["engines_serving"] == 1
        process.send_signal(signal.SIGINT)

    evaluated = ["evaluation.every=1", "evaluation.prompts=4", "evaluation.engine=dedicated"]
    code, output = act_after(r"evaluation of version 2", change_twice, tmp_path, *evaluated)
    assert code == 130, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["engines/lost"] == 0
    versions = [json.loads(line)["step"] for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert versions == list(range(len(versions))), "each version was sent to the engine that evaluates, and to no other"
    assert no_process_left(patience=60), processes_of_this_test()


def wait_for(condition: Callable[[], bool], patience: float = 300.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_the_jobs_of_a_sweep_have_run_folders_of_their_own_and_one_that_fails_does_not_end_it(tmp_path):
    overrides = ["recipe=ci_tiny", "seed=0,1", f"run_dir={tmp_path}/sweep", "logger.wandb.mode=disabled"]
    done = subprocess.run(
        command(*overrides, "engine.start_timeout=0.01", "--multirun"),
        capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    for job in (0, 1):
        folder = tmp_path / "sweep" / str(job)
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == "failed"
        assert "engine.start_timeout" in summary["error"]
        assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == job
