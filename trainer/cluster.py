"""Whether a cluster has room for a run, known before anything is started on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.checks import ConfigError
from trainer.config import Config
from trainer.placement import all_engines, cpu_cores, device_kind, has_evaluation_engine, shares_gpu
from trainer.ray_session import Cluster


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one process of a run can be: an engine with all its workers, or a learner rank."""

    what: str
    node: int
    gpus: float
    """Half of one where an engine and a rank share it."""


def check_resources(config: Config, cluster: Cluster) -> None:
    """Raise :class:`ConfigError` when there are fewer GPUs, or cores, than the configuration needs.

    Without this check the start would wait for GPUs until its deadline, and workers that share a core would wait for
    each other by spinning.
    """
    if device_kind(config) == "cpu":
        _check_cores(config)
    else:
        place(config, cluster)


def place(config: Config, cluster: Cluster) -> list[Placed]:
    """A place on GPUs for every engine and learner rank, the engines first: their workers share a node.

    Ray decides at run time, and need not find this one. Raises :class:`ConfigError` when there is none.
    """
    engines, workers, ranks = all_engines(config), config.engine.tensor_parallel, config.learner.ranks
    if shares_gpu(config):
        node = next((number for number, gpus in enumerate(cluster.node_gpus) if gpus), None)
        if node is None:
            raise ConfigError("`weight_sync.backend=ipc` needs a GPU, but none is there")
        return [Placed("engine 0", node, 0.5), *(Placed(f"rank {rank}", node, 0.5) for rank in range(ranks))]
    if engines * workers + ranks > cluster.gpus:
        one_more = "(`engine.count` + 1 for `evaluation.engine=dedicated`)"
        count = one_more if has_evaluation_engine(config) else "`engine.count`"
        raise ConfigError(
            f"the run needs {engines * workers + ranks} GPUs ({count} x `engine.tensor_parallel` = "
            f"{engines * workers}, and `learner.ranks` = {ranks}), but {cluster.gpus} are there"
        )
    return _first_fit(config, engines, workers, ranks, cluster.node_gpus)


def _first_fit(config: Config, engines: int, workers: int, ranks: int, node_gpus: Sequence[int]) -> list[Placed]:
    free = list(node_gpus)
    placed = []
    for what, gpus in [(f"engine {n}", workers) for n in range(engines)] + [(f"rank {n}", 1) for n in range(ranks)]:
        node = next((number for number, left in enumerate(free) if left >= gpus), None)
        if node is None:
            raise ConfigError(
                f"the {workers} workers of an engine (`engine.tensor_parallel`) share a node, and beside those placed "
                f"before no node has {gpus} GPUs left for {what}: the nodes have {', '.join(map(str, node_gpus))}"
            )
        free[node] -= gpus
        placed.append(Placed(what, node, gpus))
    return placed


def _check_cores(config: Config) -> None:
    engine = config.engine
    workers = all_engines(config) * engine.tensor_parallel
    if engine.tensor_parallel > 1 and engine.cpu_threads_bind == "auto" and workers > cpu_cores():
        raise ConfigError(
            f"`engine.count` x `engine.tensor_parallel` = {workers} workers need a core each, but there are "
            f"{cpu_cores()}; on CPU more engines than cores are possible with `engine.tensor_parallel=1` only"
        )
