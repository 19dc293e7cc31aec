"""Ray for one run: the configured cluster, or a local instance that listens on loopback only and ends with the run."""

from __future__ import annotations

import logging
import os
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from trainer.checks import ConfigError
from trainer.config import Config
from trainer.wording import one_line

ANSWER_SECONDS = 5.0
"""In which a cluster's port must answer."""
TRIES = 4
"""To start Ray on this machine."""
END_SECONDS = 30.0
"""What Ray's processes may take to end; afterwards the end of this process ends them."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the nodes of a Ray cluster have."""

    node_gpus: tuple[int, ...] = ()
    """GPUs of each node that lives."""

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(self.node_gpus)


class RaySession:
    """Starts Ray in the background when entered and ends it when left.

    Ray takes seconds to start and hardly any of this process's time: they pass while the inputs load. One thread
    starts it, waits, and ends it, because Linux ends Ray's processes when the thread that started them ends.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._cluster: Future[Cluster] = Future()
        self._begin, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ray-session", daemon=True)

    def __enter__(self) -> Self:
        _set_environment(self._config)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()
        self._begin.set()
        self._thread.join(END_SECONDS)

    def begin(self) -> None:
        """Let Ray start. Until then it is only imported, so that a refused configuration need not wait for it."""
        self._begin.set()

    def wait(self) -> Cluster:
        """Wait until Ray runs; what its nodes have. Raises what Ray's start raised; Ray has deadlines for it."""
        self.begin()
        return self._cluster.result()

    def _serve(self) -> None:
        try:
            import ray

            self._begin.wait()
            if self._leave.is_set():  # the configuration was refused meanwhile: nobody waits for the cluster
                return
            _start(self._config)
            try:
                self._cluster.set_result(_nodes())
                self._leave.wait()
            finally:
                ray.shutdown()
        except BaseException as error:
            if self._cluster.done():
                logging.getLogger(__name__).warning("Ray did not end cleanly: %s", error)
            else:
                self._cluster.set_exception(error)


def _nodes() -> Cluster:
    import ray

    living = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Cluster(tuple(int(resources.get("GPU", 0)) for resources in living))


def _set_environment(config: Config) -> None:
    """Before anything imports Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A call of Ray without Ray starts it by default: one from a thread that was given up would do so behind a run's
    # end. Such daemons die with that thread, and a minute later Ray ends the process, without a word.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    # Ray gives its workers the niceness 15: whatever else a machine does would take the cores from engines and learner.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if config.hardware == "cpu":
        # Engines and learner share the cores: a thread that spins at a barrier takes a core from the one it waits for.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if config.ray.address is None:
        # What makes Ray listen on loopback only, on Linux too (2.60); `_node_ip_address` is replaced by an outer one.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def _start(config: Config) -> None:
    import ray

    _give_daemons_their_own_process_group()
    # It announces at every start that its token authentication is on, and that it leaves SIGTERM alone: both as wanted.
    for source in ("ray._private.authentication", "ray._private.worker"):
        logging.getLogger(source).setLevel(logging.ERROR)
    if config.ray.address is not None:
        return _join(config.ray.address)
    where: dict[str, Any] = {"address": "local", "include_dashboard": False, "object_store_memory": 256 << 20}
    for tries_left in reversed(range(TRIES)):
        try:
            ray.init(log_to_driver=False, logging_level=logging.WARNING, **where)
            return
        except Exception as error:
            if "timed out during startup" not in str(error) or not tries_left:
                raise
            # Ray gives a node 30 seconds, which a busy machine can exceed; what it has read once it reads faster.
            logging.getLogger(__name__).warning("Ray did not start within 30 s: the machine is busy; trying again")
            ray.shutdown()


def _join(address: str) -> None:
    """Join a cluster. Raises :class:`ConfigError` where there is none, before Ray has tried for a minute."""
    import ray

    host, found, port = address.removeprefix("ray://").rpartition(":")
    try:
        if found:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:
        raise ConfigError(
            f"`ray.address={address}`: no Ray cluster can be joined there: {one_line(str(error))}. Name that of a "
            "cluster that runs, or leave the key out for one of this machine alone"
        ) from error


def _give_daemons_their_own_process_group() -> None:
    """A signal to the group of this process, as ``timeout`` and job schedulers send it, is not for Ray's daemons.

    They would end at once, under a run that is about to write its checkpoint. Ray makes the call that is wrapped here
    in each daemon before its program starts; when this process dies, they end as before.
    """
    import ray._private.utils as utils

    die_with_parent = utils.set_kill_on_parent_death_linux
    if die_with_parent.__module__ == __name__:
        return

    def detach() -> None:
        os.setpgid(0, 0)
        die_with_parent()

    utils.set_kill_on_parent_death_linux = detach
