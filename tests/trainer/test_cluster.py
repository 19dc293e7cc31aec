import pytest

from tests.trainer.configs import tiny_config
from trainer import placement
from trainer.checks import ConfigError
from trainer.cluster import Cluster, check_resources, place
from trainer.compose import compose_config
from trainer.help import config_groups

PRESETS = {"gpu_1": (1,), "gpu_8": (8,), "cluster_16": (8, 8)}
"""The GPUs of each node that a preset is made for."""


@pytest.mark.parametrize("recipe", config_groups()["recipe"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_uses_every_gpu_that_it_is_made_for_with_every_recipe(preset, recipe):
    config = compose_config([f"recipe={recipe}", f"hardware={preset}"])
    placed = place(config, Cluster(PRESETS[preset]))
    used = [sum(one.gpus for one in placed if one.node == node) for node in range(len(PRESETS[preset]))]
    assert used == list(PRESETS[preset])
    names = [f"engine {n}" for n in range(config.engine.count)] + [f"rank {n}" for n in range(config.learner.ranks)]
    assert [one.what for one in placed] == names
    reserved = placement.engine_resources(config).gpus * config.engine.count
    assert reserved + placement.learner_gpus(config) * config.learner.ranks == sum(PRESETS[preset])
    # Rollouts enough for every rank, and for all engines together what they run at a time.
    assert config.batch.prompts * config.sampling.group_size >= config.learner.ranks


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_on_a_cluster_with_a_gpu_less_is_refused(preset):
    config = compose_config(["recipe=gsm8k_fully_async", f"hardware={preset}"])
    *others, last = PRESETS[preset]
    with pytest.raises(ConfigError, match="GPU"):
        check_resources(config, Cluster((*others, last - 1)))


def test_there_is_a_preset_for_each_size_that_is_tested_here():
    assert {name for name in config_groups()["hardware"] if "_" in name} == set(PRESETS)


def test_more_workers_than_cores_are_refused_unless_their_cores_are_given(monkeypatch):
    monkeypatch.setattr(placement, "core_numbers", lambda: [0, 1, 2])
    config = tiny_config({"engine.count": 2, "engine.tensor_parallel": 2})
    with pytest.raises(ConfigError, match=r"`engine.tensor_parallel` = 4 workers need a core each, but there are 3"):
        check_resources(config, Cluster())
    config.engine.cpu_threads_bind = "0|1"
    check_resources(config, Cluster())


def test_an_engine_and_a_rank_that_share_a_gpu_need_one():
    shared = tiny_config({"weight_sync.backend": "ipc"}, "gpu")
    assert [(one.what, one.node, one.gpus) for one in place(shared, Cluster((0, 1)))] == [
        ("engine 0", 1, 0.5),
        ("rank 0", 1, 0.5),
    ]
    with pytest.raises(ConfigError, match=r"`weight_sync\.backend=ipc` needs a GPU"):
        check_resources(shared, Cluster())


def test_more_gpus_than_there_are_is_a_configuration_error_that_adds_them_up():
    gpu = tiny_config({"engine.count": 2, "learner.ranks": 2}, "gpu")
    check_resources(gpu, Cluster((4,)))
    with pytest.raises(ConfigError, match=r"needs 4 GPUs .* 1 are there"):
        check_resources(gpu, Cluster((1,)))
    check_resources(tiny_config(), Cluster())


def test_an_engine_for_evaluations_alone_is_one_more_to_place():
    dedicated = {"evaluation.engine": "dedicated", "engine.tensor_parallel": 2}
    check_resources(tiny_config(dedicated, "gpu"), Cluster((3,)))
    evaluated = tiny_config({**dedicated, "evaluation.every": 5}, "gpu")
    check_resources(evaluated, Cluster((5,)))
    with pytest.raises(ConfigError, match=r"needs 5 GPUs .*`engine\.count` \+ 1 for `evaluation\.engine=dedicated`"):
        check_resources(evaluated, Cluster((4,)))


@pytest.mark.parametrize("node_gpus", [(3, 3, 3), (2, 2, 2, 2)])
def test_the_workers_of_an_engine_must_fit_on_one_node(node_gpus):
    config = tiny_config({"engine.tensor_parallel": 4, "engine.count": 1, "learner.ranks": 2}, "gpu")
    with pytest.raises(ConfigError, match=r"no node has 4 GPUs left for engine 0: the nodes have"):
        check_resources(config, Cluster(node_gpus))
    engine, *ranks = place(config, Cluster((3, 4)))
    assert (engine.node, [rank.node for rank in ranks]) == (1, [0, 0])
