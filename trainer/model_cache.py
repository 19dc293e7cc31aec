"""The cache of model folders that were converted or built here: each is complete or it is not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from generator.task import ModelError

TEMPORARY_PREFIX = ".midflight-building-"
STALE_TEMPORARY_SECONDS = 24 * 3600


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/midflight``, or ``~/.cache/midflight``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "midflight"


def build_once(cache: Path, name: str, write: Callable[[Path], None]) -> Path:
    """The folder ``cache/name``, written by ``write`` if it is not there.

    ``write`` gets an empty folder beside the final one, which is renamed when it is complete: a half-written folder is
    never used, and of two processes that write at once one wins and the other uses the winner's.
    Raises :class:`ModelError` when the cache cannot be written.
    """
    final = cache / name
    if not missing_parts(final):
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache)
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=cache))
    except OSError as error:
        raise ModelError(
            f"models cannot be cached in {cache}: {error}; set model.cache_dir to a writable folder"
        ) from error
    try:
        write(temporary)
        temporary.chmod(0o755)  # mkdtemp's folders are private
        if final.exists() and missing_parts(final):
            shutil.rmtree(final)  # somebody removed files of it
        try:
            temporary.rename(final)
        except OSError:
            if missing_parts(final):
                raise
    except OSError as error:
        raise ModelError(f"writing the model {final} failed: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _remove_stale(cache: Path) -> None:
    """Remove what processes that were killed in the middle of a conversion left behind."""
    for left in cache.glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if left.is_dir() and time.time() - left.stat().st_mtime > STALE_TEMPORARY_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def missing_parts(folder: Path) -> list[str]:
    """What a model folder needs and ``folder`` does not have."""
    wanted = {
        "config.json": ("config.json",),
        "weights (*.safetensors or pytorch_model*.bin)": ("*.safetensors", "pytorch_model*.bin"),
        "a tokenizer (tokenizer.json or tokenizer.model)": ("tokenizer.json", "tokenizer.model", "vocab.json"),
    }
    return [what for what, patterns in wanted.items() if not any(any(folder.glob(pattern)) for pattern in patterns)]
