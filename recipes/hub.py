"""A data set on the model hub: from its cache, or fetched within a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from generator.task import DataError

Result = TypeVar("Result")

FETCH_SECONDS = 120.0
"""How long fetching a small data set (3 MB) may take before the run goes on without it."""


class HubError(Exception):
    """The hub data set could not be read; the message says why, in a phrase."""


def read_from_hub(
    hub_id: str,
    patterns: Sequence[str],
    read: Callable[[Path], Result],
    reachable: Callable[[], bool],
    seconds: float = FETCH_SECONDS,
) -> tuple[Result, str]:
    """What ``read`` makes of a folder with the files that match ``patterns``, and whether it was "cached" or "fetched".

    Looks into the hub's cache first, and asks ``reachable`` only if the data set is not there, or ``read`` raises
    ``FileNotFoundError``. Raises :class:`HubError` when it is neither cached nor fetched within ``seconds``, and the
    :class:`DataError` of ``read``.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def load(local_only: bool) -> Result:
        folder = snapshot_download(
            hub_id, repo_type="dataset", allow_patterns=list(patterns), local_files_only=local_only
        )
        return read(Path(folder))

    try:
        return load(local_only=True), "cached"
    except (LocalEntryNotFoundError, FileNotFoundError):
        pass
    if not reachable():
        raise HubError("the hub is not reachable and the data set is not cached")
    return within(seconds, lambda: load(local_only=False)), "fetched"


def within(seconds: float, load: Callable[[], Any]) -> Any:
    """The result of ``load``, run in a daemon thread so that a connection that hangs cannot hang the run."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(load())
        except Exception as error:  # reported below, on the thread that asked
            outcome.append(error)

    thread = threading.Thread(target=run, name="fetch-data", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise HubError(f"fetching it took longer than {seconds:g} s")
    if isinstance(outcome[0], DataError):
        raise outcome[0]
    if isinstance(outcome[0], Exception):
        said = " ".join(str(outcome[0]).split())  # the hub's own words run over several lines
        raise HubError(f"fetching it failed: {said:.300}") from outcome[0]
    return outcome[0]
