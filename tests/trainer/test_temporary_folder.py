"""Temporary folders of processes that are gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from trainer.temporary_folder import temporary_folder


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = socket.gethostname()
    left_over = tmp_path / f".work-{gone.pid}-{host}-abc"
    kept = {
        f".work-{os.getppid()}-{host}-abc": "of a process that runs",
        f".work-{gone.pid}-of.another.host-abc": "of who knows",
        ".work-old": "of nobody",
        f".other-{gone.pid}-{host}-abc": "of another kind",
    }
    for name in (left_over.name, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("large")
    with temporary_folder(".work-", tmp_path) as folder:
        assert (folder.parent, folder.is_dir()) == (tmp_path, True)
        assert {path.name for path in tmp_path.iterdir()} == {folder.name, *kept}
        with temporary_folder(".work-", tmp_path):
            assert folder.is_dir(), "two at a time"
    assert not folder.exists()
