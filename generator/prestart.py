"""A quicker start of a CPU engine: its two processes import vLLM side by side instead of one after the other.

vLLM starts the engine core as a fresh process once the engine's own imports and configuration are done, and the core
then imports everything again: ten seconds of CPU time and more, twice. Here a fork server, Python's own, imports it
from the first moment on, and the core is forked from it. On GPUs vLLM's own way stays: loading weights and capturing
graphs dwarf the imports, and a fork server must not see CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from generator.orphan import ending_with_parent

CORE_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
)
"""What an engine core on CPU imports before it can load a model."""


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """No garbage collection meanwhile: imports only add objects, and looking through them again takes a sixth of the
    time that vLLM's take."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def prestart_core() -> None:
    """Start the fork server. Call it before vLLM is imported; the core inherits the environment of this moment."""
    os.environ.setdefault("LD_PRELOAD", _openmp_of_torch())
    multiprocessing.set_forkserver_preload([__name__ + "_imports"])
    forkserver.ensure_running()


def import_ahead(modules: Iterable[str]) -> None:
    """In the fork server: import what its children will need.

    A fork server ends when the process that started it has closed its pipe, but it looks only when its imports are
    done: tens of seconds and most of a gigabyte for nobody, were it not ended meanwhile.
    """
    with ending_with_parent(), quick_imports():
        for name in modules:
            importlib.import_module(name)
    # The modules stay for good; a collection in the core would only copy their pages.
    gc.freeze()


def use_prestarted_core() -> None:
    """Have vLLM fork the engine cores of this process from the fork server: it knows spawn and fork alone."""
    utils: Any = importlib.import_module("vllm.v1.engine.utils")
    assert hasattr(utils, "get_mp_context"), "vLLM has moved the place where an engine core's process is made"
    utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")


def _openmp_of_torch() -> str:
    """torch's OpenMP library, or nothing. vLLM preloads it into engine cores that it spawns, so that its kernels and
    torch's share one pool of threads."""
    spec = importlib.util.find_spec("torch")
    found = sorted(Path(spec.origin).parent.glob("lib/libgomp*.so*")) if spec and spec.origin else []
    return str(found[0]) if found else ""
