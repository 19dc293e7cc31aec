from dataclasses import replace

import pytest

from generator.launch import SEVERAL_WORKERS, EngineSettings
from tests.trainer.configs import tiny_config
from trainer import placement
from trainer.checks import ConfigError
from trainer.model import ResolvedModel

MODEL = ResolvedModel("/models/m", "folder", "test", (2, 7), 64, "float32")


def test_every_end_of_sequence_id_of_the_model_stops_a_rollout_besides_the_recipe_s_own():
    sampling = placement.make_sampling(tiny_config({"sampling.stop_token_ids": [9]}), MODEL, 64)
    assert sampling.stop_token_ids == {2, 7, 9}


def test_ignoring_end_of_sequence_leaves_the_recipe_s_own_stops():
    sampling = placement.make_sampling(
        tiny_config({"sampling.stop_token_ids": [9], "sampling.ignore_eos": True}), MODEL, 64
    )
    assert sampling.stop_token_ids == {9}


def test_what_is_configured_for_sampling_reaches_the_engine():
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    keys = {"sampling.stop": ["END", "\n"], **{f"sampling.{name}": value for name, value in penalties.items()}}
    sampling = placement.engine_settings(tiny_config(keys), MODEL, 10).sampling
    assert sampling.stop == ("END", "\n")
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
    assert sampling.seed is None


def test_a_sampling_seed_is_the_same_for_every_engine_and_after_a_restart_an_engines_own_stream_is_not():
    def settings(first_step: int, number: int) -> EngineSettings:
        return placement.engine_settings(tiny_config({"sampling.seed": 5}), MODEL, 10, first_step, number)

    steps_and_engines = [(0, 0), (0, 3), (7, 0), (7, 3)]
    assert {settings(*which).sampling.seed for which in steps_and_engines} == {5}
    assert len({settings(*which).seed for which in steps_and_engines}) == 4


def test_the_context_is_as_long_as_the_longest_prompt_needs():
    settings = placement.engine_settings(tiny_config({"sampling.max_tokens": 24}), MODEL, longest_prompt=10)
    assert settings.max_model_len == 34


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"sampling.max_tokens": 64}, "no room for a prompt"), ({"engine.max_model_len": 100}, "more than the model's")],
)
def test_a_budget_or_context_that_the_model_does_not_have_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        placement.prompt_limit(tiny_config(changes), MODEL)


def test_each_engine_has_its_own_name_and_random_stream():
    settings = [placement.engine_settings(tiny_config({"engine.count": 3}), MODEL, 10, number=n) for n in range(3)]
    assert [(s.name, s.seed) for s in settings] == [("engine 0", 0), ("engine 1", 1), ("engine 2", 2)]


def test_threads_are_what_was_configured_and_never_zero(monkeypatch):
    monkeypatch.setattr(placement, "cpu_cores", lambda: 2)
    assert placement.engine_threads(tiny_config()) == 2
    assert placement.engine_threads(tiny_config({"engine.count": 8})) == 1
    assert placement.engine_threads(tiny_config({"engine.cpu_threads": 5})) == 5


@pytest.mark.parametrize(
    ("cores", "count", "tensor_parallel", "binds"),
    [
        (2, 1, 2, ["0|1"]),
        (8, 1, 2, ["0,1,2,3|4,5,6,7"]),
        (8, 2, 2, ["0,1|2,3", "4,5|6,7"]),
        (7, 3, 2, ["0|1", "2|3", "4|5"]),
    ],
)
def test_the_workers_of_all_engines_share_the_cores_and_none_has_another_s(
    monkeypatch, cores, count, tensor_parallel, binds
):
    monkeypatch.setattr(placement, "core_numbers", lambda: list(range(cores)))
    config = tiny_config({"engine.count": count, "engine.tensor_parallel": tensor_parallel})
    settings = [placement.engine_settings(config, MODEL, 10, number=number) for number in range(count + 1)]
    found = [each.environment["VLLM_CPU_OMP_THREADS_BIND"] for each in settings]
    assert found == [*binds, binds[0]], "an engine that replaces another takes the place of one"
    assert {each.executor for each in settings} == {SEVERAL_WORKERS}
    config.engine.cpu_threads_bind = "4|6"
    assert placement.engine_settings(config, MODEL, 10).environment["VLLM_CPU_OMP_THREADS_BIND"] == "4|6"


def test_the_engine_for_evaluations_has_cores_of_its_own(monkeypatch):
    monkeypatch.setattr(placement, "core_numbers", lambda: list(range(6)))
    evaluated = {"evaluation.engine": "dedicated", "evaluation.every": 5}
    config = tiny_config({**evaluated, "engine.count": 2, "engine.tensor_parallel": 2})

    def cores(number: int, **pool: bool) -> str:
        settings = placement.engine_settings(config, MODEL, 10, number=number, **pool)
        return settings.environment["VLLM_CPU_OMP_THREADS_BIND"]

    assert [cores(number) for number in range(3)] == ["0|1", "2|3", "0|1"]
    assert {cores(number, for_evaluations=True) for number in range(2)} == {"4|5"}


@pytest.mark.parametrize(
    ("heads", "key_heads", "workers", "refused"),
    [
        (9, 3, 2, "9 attention heads"),
        (6, 3, 2, "3 key-value heads"),
        (8, 2, 4, None),  # each key-value head is held by two workers
        (8, 8, 4, None),
        (None, None, 4, None),
    ],
)
def test_attention_heads_that_do_not_divide_among_the_workers_are_refused(heads, key_heads, workers, refused):
    model = replace(MODEL, attention_heads=heads, key_value_heads=key_heads)
    config = tiny_config({"engine.tensor_parallel": workers})
    if refused is None:
        placement.check_tensor_parallel(config, model)
        return
    with pytest.raises(ConfigError, match=f"`engine.tensor_parallel={workers}` cannot split the {refused} of folder"):
        placement.check_tensor_parallel(config, model)


def test_a_gpu_engine_reserves_a_gpu_for_each_of_its_workers():
    gpu = tiny_config({"engine.tensor_parallel": 4}, "gpu")
    assert placement.engine_resources(gpu).gpus == 4
    assert placement.transfer_backend(gpu) == "nccl"
    settings = placement.engine_settings(gpu, replace(MODEL, dtype="bfloat16"), 10)
    assert settings.transfer_backend == "nccl"
    assert settings.block_size is None
    assert settings.environment == {}


def test_an_engine_and_a_learner_that_share_a_gpu_reserve_it_together():
    shared = tiny_config({"weight_sync.backend": "ipc"}, "gpu")
    assert placement.transfer_backend(shared) == "ipc"
    assert placement.engine_resources(shared).gpus + placement.learner_gpus(shared) == 1
    environment = placement.engine_settings(shared, replace(MODEL, dtype="bfloat16"), 10).environment
    assert environment == {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    apart = tiny_config({}, "gpu")
    assert (placement.engine_resources(apart).gpus, placement.learner_gpus(apart)) == (1, 1)
    assert placement.learner_gpus(tiny_config()) == 0


@pytest.mark.parametrize(("hardware", "expected"), [("cpu", "gloo"), ("gpu", "nccl_delta")])
def test_engines_that_get_deltas_have_a_transfer_engine_that_takes_them(hardware, expected):
    config = tiny_config({"weight_sync.delta": True}, hardware)
    assert placement.engine_settings(config, MODEL, 10).transfer_backend == expected
