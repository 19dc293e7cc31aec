"""Weights & Biases, kept at arm's length: a thread of its own, so that neither its start nor its network can hold up,
let alone end, a training run. ``wandb`` is imported in that thread, and not at all when the mode is ``disabled``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import WandbConfig
from trainer.watch.lines import TABLE

logger = logging.getLogger(__name__)

_MODES = {"online": "online", "shared": "online", "run": "online", "offline": "offline", "dryrun": "offline",
          "disabled": "disabled"}  # fmt: skip
RUN_ID = "wandb/run_id"
"""Where in a run folder the id of its wandb run stands."""

FILES = ("trace.json", "report.html")
"""Files of a run folder that are uploaded when the run ends: the timeline, for Perfetto, and the page about the run."""

TEMPORARY = "wandb/temporary"
"""Where in a run folder wandb's temporary files are while it runs, and after a kill until the run continues."""

FINISH_SECONDS = 30.0
"""Time to upload what is left at the end of a run. Nothing is lost past it: `wandb sync` uploads it later."""

_INIT_SECONDS = 15.0  # a server that does not answer by then is not waited for: the run is logged offline
_QUEUE_ITEMS = (
    10_000  # steps kept while the server is slow; past it steps are dropped from wandb, not from the run folder
)


@dataclass(frozen=True, slots=True)
class _Finish:
    summary: Mapping[str, Any]
    exit_code: int


@dataclass(frozen=True, slots=True)
class _Step:
    metrics: Mapping[str, Any]
    table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None


class WandbLog:
    """Sends what happens to wandb. No method raises or blocks, but for :meth:`finish`, which waits a bounded time.

    ``mode`` ``auto`` follows ``WANDB_MODE`` where it is set, else is online when credentials are found (environment,
    netrc; no prompt, no network) and offline otherwise. A configured mode wins over the environment. ``announce`` is
    called once, from the logging thread, with the mode taken and the reason.
    """

    def __init__(
        self,
        settings: WandbConfig,
        run_dir: Path,
        config: Mapping[str, Any],
        announce: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._config = config
        self._announce = announce
        self._queue: queue.Queue[_Step | _Finish] = queue.Queue(_QUEUE_ITEMS)
        self._thread: threading.Thread | None = None
        self._run: Any = None
        self._failed = False
        self._abandoned = False
        mode, why = configured_mode(settings.mode, os.environ)
        if mode == "disabled":
            announce("disabled", why)
            return
        self._thread = threading.Thread(target=self._work, args=(mode, why), name="wandb-log", daemon=True)
        self._thread.start()

    def step(
        self, metrics: Mapping[str, Any], table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None
    ) -> None:
        """Log a step; ``metrics`` holds the key ``step``. ``table`` is (columns, rows) of completions."""
        if self._thread is None or self._failed:
            return
        try:
            self._queue.put_nowait(_Step(dict(metrics), table))
        except queue.Full:
            self._fail("wandb is too slow: steps are no longer sent to it", None)

    def finish(self, summary: Mapping[str, Any], exit_code: int, timeout: float) -> None:
        """Send the summary, upload the rest, end wandb's process. Returns after about ``timeout`` s at the latest."""
        if self._thread is None:
            return
        try:
            self._queue.put(_Finish(dict(summary), exit_code), timeout=1.0)
            self._thread.join(timeout)
        except queue.Full:
            pass
        if self._thread.is_alive():
            logger.warning(
                "wandb did not finish in %.0f s; its files are in %s, `wandb sync` uploads them later",
                timeout, self._run_dir / "wandb",
            )  # fmt: skip
            self._abandoned = True
            _kill_service()
        self._thread = None

    def _work(self, mode: str, why: str) -> None:
        """The logging thread: start, then whatever is queued until the end."""
        try:
            self._start(mode, why)
        except Exception as error:
            self._fail("wandb did not start; the run goes on without it", error)
        while True:
            item = self._queue.get()
            try:
                if isinstance(item, _Finish):
                    return self._end(item)
                if not self._failed:
                    self._log(item)
            except Exception as error:
                self._fail("wandb failed; the run goes on without it", error)
                if isinstance(item, _Finish):
                    return None

    def _start(self, mode: str, why: str) -> None:
        import wandb

        with contextlib.suppress(ImportError, AttributeError):  # of another wandb, which is no reason to go without it
            _take_in_temporary_files(self._run_dir / TEMPORARY)
        # `silent` keeps wandb's banner and warnings off a screen with a progress bar; `announce` says what matters.
        wandb.setup(wandb.Settings(silent=True))
        if mode == "auto":
            mode, why = logged_in_mode(wandb)
        try:
            self._run = self._init(wandb, mode)
        except Exception as error:
            if mode == "offline" or self._abandoned:
                raise
            logger.debug("wandb online failed", exc_info=True)
            # A failed start leaves its service behind; the next one gets a fresh one.
            wandb.teardown()
            wandb.setup(wandb.Settings(silent=True))
            mode, why = "offline", f"{why}, but the server could not be used: {_first_line(error)}"
            self._run = self._init(wandb, mode)
        # O6: with an axis of its own no metric depends on wandb's internal counter, which refuses older steps.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if mode == "offline":
            self._announce(mode, f"{why}; upload later with `wandb sync {_short(Path(self._run.dir).parent)}`")
        else:
            self._announce(mode, f"{why}; {self._run.url}")

    def _init(self, wandb: Any, mode: str) -> Any:
        offline = mode == "offline"
        run_id, known = _run_id(self._run_dir / RUN_ID)
        return wandb.init(
            mode=mode,
            project=self._settings.project,
            entity=self._settings.entity,
            name=self._settings.name or self._run_dir.name,
            group=self._settings.group,
            tags=list(self._settings.tags) or None,
            id=run_id,
            # Asking for a run that is new would only be another round trip to the server; offline it cannot be asked.
            resume="allow" if known and not offline else None,
            dir=str(self._run_dir),
            config=dict(self._config),
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                x_save_requirements=False,  # takes a second; config.yaml has the main versions
                x_disable_machine_info=offline,  # samples the machine and asks the network where it runs
                x_disable_stats=offline,
                init_timeout=_INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                x_transaction_log_flush_interval=5.0,  # a killed run loses at most so many seconds of it
            ),
        )

    def _log(self, item: _Step) -> None:
        row = dict(item.metrics)
        if item.table is not None:
            import wandb

            columns, rows = item.table
            row[TABLE] = wandb.Table(columns=list(columns), data=[list(r) for r in rows])
        self._run.log(row)

    def _end(self, item: _Finish) -> None:
        if self._run is not None:
            import wandb

            try:
                for name in FILES:
                    if (path := self._run_dir / name).is_file():
                        self._run.save(path, base_path=self._run_dir, policy="now", glob=False)
                self._run.summary.update({key: value for key, value in item.summary.items() if value is not None})
                self._run.finish(exit_code=item.exit_code)
            finally:
                _teardown(wandb)
                shutil.rmtree(self._run_dir / TEMPORARY, ignore_errors=True)

    def _fail(self, what: str, error: BaseException | None) -> None:
        if not self._failed:
            self._failed = True
            if self._abandoned:  # said already, and the service is dead because we killed it
                return
            logger.warning("%s%s", what, f": {_first_line(error)}" if error else "")
            logger.debug("wandb error", exc_info=error)


def configured_mode(mode: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """The mode that configuration and environment ask for, and why; ``auto`` when neither decides."""
    if mode != "auto":
        return mode, f"logger.wandb.mode={mode}"
    asked = environment.get("WANDB_MODE", "").lower()
    if asked in _MODES:
        return _MODES[asked], f"WANDB_MODE={asked}"
    if environment.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return "disabled", "WANDB_DISABLED is set"
    return "auto", "logged in?"


def logged_in_mode(wandb: Any) -> tuple[str, str]:
    """What ``auto`` means here, and why. Asks neither a person nor the network."""
    try:
        logged_in = wandb.login(verify=False, prompt=False)
    except Exception as error:  # a malformed key, for example: wandb raises several types of its own
        return "offline", f"the wandb credentials cannot be used: {_first_line(error)}"
    return ("online", "logged in") if logged_in else ("offline", "not logged in: `wandb login` changes that")


def _run_id(path: Path) -> tuple[str, bool]:
    """The one id of a run folder, and whether it stood there: a resumed run continues its wandb run."""
    known = path.exists()
    if not known:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip(), known


def _take_in_temporary_files(folder: Path) -> None:
    """Have wandb's temporary files in ``folder`` instead of where the system keeps such.

    Importing wandb makes two folders there, which it removes when Python ends in good order: of every run that is
    killed they would be left for ever. Reaches for private names (wandb 0.31): there is no setting for it.
    """
    from wandb.sdk.artifacts.artifact import Artifact
    from wandb.sdk.data_types import _private

    for name, made in (("media", _private.MEDIA_TMP), ("artifacts", Artifact._TMP_DIR)):
        made.cleanup()
        (folder / name).mkdir(parents=True, exist_ok=True)
        made.name = str(folder / name)


def _teardown(wandb: Any) -> None:
    """End wandb's service process. wandb calls ``sys.exit`` with that process's exit code when it is not 0."""
    try:
        wandb.teardown()
    except SystemExit as error:
        logger.debug("wandb-core ended with %s", error.code)


def _kill_service() -> None:
    """Kill the service process that hangs, or wandb's own exit hook would wait for it without end.

    Reaches for private names (wandb 0.31): there is no public handle of the process.
    """
    from wandb.sdk import wandb_setup

    connection = getattr(wandb_setup.singleton(), "_connection", None)
    process = getattr(getattr(connection, "_proc", None), "_process", None)
    if process is None:
        return
    if forget_exit_hook := getattr(connection, "_cleanup", None):
        forget_exit_hook()
    os.environ.pop("WANDB_SERVICE", None)
    process.kill()
    process.wait(5.0)


def _short(path: Path) -> str:
    return min(str(path), os.path.relpath(path), key=len)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
