"""wandb, the real one, offline: each run in a process of its own, as wandb changes the process it lives in."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.watch.wandb_file import history, read_records, summary
from trainer.watch.wandb_log import TEMPORARY, configured_mode

PROGRAM = """
import sys
from pathlib import Path
from trainer.config import WandbConfig
from trainer.leave import leave
from trainer.watch.wandb_log import WandbLog

def main(folder, mode, end):
    Path(folder).mkdir()
    said = lambda mode, why: print(f"{mode}: {why}", flush=True)
    log = WandbLog(WandbConfig(mode=mode), Path(folder), {"seed": 7, "batch": {"prompts": 2}}, said)
    table = (("prompt", "reward"), [["2+2", 1.0]])
    for step in (1, 2, 3):
        log.step({"step": step, "reward/mean": step / 4, "policy/loss": float("nan")}, table if step == 2 else None)
    (Path(folder) / "trace.json").write_text("[]")
    if end == "hang":
        print(sys.stdin.readline())
    log.finish({"status": "done", "reward/last10_mean": 0.5, "nothing": None}, exit_code=0, timeout=float(end))
    print("wandb imported:", "wandb" in sys.modules)

if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
"""


def start(tmp_path: Path, mode: str, end: str = "240", **environment: str) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "run"), mode, end],
        env={**clean, **home, **environment}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where the system keeps temporary files for a run. Its path is short: wandb's service has a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix="w"))
    yield folder
    shutil.rmtree(folder)


def offline_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    return path


def services(parent: int | None = None) -> list[int]:
    """Processes of wandb-core that belong to a run in this test: started with ``--pid <parent>``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"wandb-core" in command[0] and str(parent).encode() in command:
            found.append(int(folder.name))
    return found


def wait_until(condition, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.engine
def test_an_offline_run_is_read_back_from_its_file(tmp_path, temporary):
    process = start(tmp_path, "auto", TMPDIR=str(temporary))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "offline: not logged in" in output
    assert "wandb sync" in output
    records = read_records(offline_file(tmp_path))
    rows = history(records)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["reward/mean"] for row in rows] == [0.25, 0.5, 0.75]
    assert rows[1]["completions/table.nrows"] == 1
    assert summary(records)["reward/last10_mean"] == 0.5
    assert summary(records)["status"] == "done"
    axes = {r.metric.glob_name or r.metric.name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["*"] == "step"
    config = {item.key: item.value_json for record in records for item in record.run.config.update}
    assert config["seed"] == "7"
    assert "trace.json" in [file.path for record in records for file in record.files.files]
    assert (offline_file(tmp_path).parent / "files" / "trace.json").read_text() == "[]"
    assert services(process.pid) == []
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "run" / TEMPORARY).exists()


@pytest.mark.engine
def test_disabled_does_not_even_import_wandb(tmp_path):
    output, _ = start(tmp_path, "disabled").communicate(timeout=300)
    assert "wandb imported: False" in output
    assert not (tmp_path / "run" / "wandb").exists()


@pytest.mark.engine
def test_a_server_that_refuses_leads_to_an_offline_run_and_says_so(tmp_path):
    key = "a" * 40
    process = start(tmp_path, "auto", WANDB_API_KEY=key, WANDB_BASE_URL="http://127.0.0.1:9")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "offline: logged in, but the server could not be used" in output
    assert key not in output
    assert [row["step"] for row in history(read_records(offline_file(tmp_path)))] == [1, 2, 3]
    assert services(process.pid) == []


@pytest.mark.engine
def test_a_malformed_key_leads_to_an_offline_run(tmp_path):
    process = start(tmp_path, "auto", WANDB_API_KEY="short")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "offline: the wandb credentials cannot be used" in output


@pytest.mark.engine
def test_a_wandb_that_does_not_end_is_left_behind_in_time_and_without_its_process(tmp_path):
    process = start(tmp_path, "online", "0.5", WANDB_API_KEY="a" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "did not finish" in output
    assert "Traceback" not in output
    assert wait_until(lambda: services(process.pid) == [])


@pytest.mark.engine
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_no_wandb_process_and_no_files_outside_its_folder(tmp_path, temporary, kill):
    process = start(tmp_path, "offline", "hang", TMPDIR=str(temporary))
    assert process.stdout is not None
    assert "offline" in process.stdout.readline()
    assert services(process.pid) != []
    process.send_signal(kill)
    process.communicate(timeout=300)
    assert wait_until(lambda: services(process.pid) == [])
    assert [path.name for path in temporary.iterdir() if path.name.endswith(("wandb-media", "wandb-artifacts"))] == []


@pytest.mark.parametrize(
    ("configured", "environment", "mode"),
    [
        ("auto", {}, "auto"),
        ("auto", {"WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("auto", {"WANDB_MODE": "nonsense"}, "auto"),
        ("offline", {"WANDB_MODE": "online"}, "offline"),
        ("disabled", {}, "disabled"),
    ],
)
def test_a_configured_mode_wins_over_the_environment(configured, environment, mode):
    assert configured_mode(configured, environment)[0] == mode
