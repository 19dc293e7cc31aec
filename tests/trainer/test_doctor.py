"""What the doctor says of a machine: each thing, with what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer import doctor
from trainer.doctor import GIB, Finding


def test_this_machine_has_python_packages_and_loopback():
    findings = [finding for check in (doctor.python, doctor.packages, doctor.system) for finding in check()]
    assert [finding for finding in findings if finding.state == "FAIL"] == []
    assert {"Python", "packages", "loopback"} <= {finding.what for finding in findings}


def test_a_package_that_is_missing_fails_and_is_named(tmp_path):
    lock = tmp_path / "cpu.lock"
    lock.write_text("# made by make lock\nnumpy==0.0.1\nno-such-package==1.0\n")
    (finding,) = doctor.packages(lock)
    assert finding.state == "FAIL"
    assert "no-such-package" in finding.found
    assert finding.advice == "make setup"


def test_another_version_than_the_tested_one_is_a_note(tmp_path):
    lock = tmp_path / "cpu.lock"
    lock.write_text("numpy==0.0.1\n")
    (finding,) = doctor.packages(lock)
    assert finding.state == "note"
    assert "instead of 0.0.1" in finding.found


def test_little_memory_is_a_note_that_names_a_smaller_recipe(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8000000 kB\nMemAvailable: 4194304 kB\n")
    finding = next(doctor.memory(meminfo))
    assert (finding.state, finding.found) == ("note", "4.0 GiB available")
    assert "ci_tiny" in finding.advice


def test_a_full_disk_is_a_note_that_names_the_key_to_change(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=GIB // 2))
    runs, cache = doctor.disk()
    assert "run_dir" in runs.advice
    assert "model.cache_dir" in cache.advice


def test_a_folder_that_does_not_exist_yet_is_judged_by_the_one_it_will_be_made_in(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "default_cache_dir", lambda: tmp_path / "a" / "b")
    _, cache = doctor.disk()
    assert str(tmp_path) in cache.found
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("states", "code"), [(["ok", "note"], 0), (["ok", "FAIL"], 1)])
def test_only_what_keeps_every_run_from_starting_is_exit_code_1(states, code, monkeypatch, capsys):
    findings = [Finding(state, "thing", "seen", "do this") for state in states]
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter(findings),))
    assert doctor.main() == code
    assert "-> do this" in capsys.readouterr().out
