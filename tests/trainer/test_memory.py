"""What a run needs at least, against hand-counted bytes, and what is refused."""

import json
import struct

import pytest

from generator.task import ModelError
from tests.trainer.configs import tiny_config
from trainer.checks import ConfigError
from trainer.memory import (
    GIB,
    check_gpu,
    check_host,
    check_kv_cache,
    engine_need,
    gpu_memory,
    host_memory,
    learner_need,
)
from trainer.model_size import ModelSize, model_size

SIZE = ModelSize(parameters=1000, layers=3, key_value_heads=2, head_size=5)


def learner(width: int, vocabulary: int = 0, size: ModelSize = SIZE, **changes) -> int:
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    return learner_need(tiny_config(keys), size, width, vocabulary).bytes


@pytest.mark.parametrize(
    ("width", "changes", "each"),
    [
        (4, {}, 4 + 4 + 8),  # weights, gradients, moments
        (2, {}, 2 + 4 + 4 + 8),  # and a master copy of the weights
        (4, {"learner__ranks": 4}, 4 + 4 + 8),  # stage 0 shards nothing
        (4, {"learner__ranks": 4, "learner__zero_stage": 1}, 4 + 4 + 8 / 4),
        (4, {"learner__ranks": 4, "learner__zero_stage": 2}, 4 + 4 / 4 + 8 / 4),
        (2, {"learner__ranks": 4, "learner__zero_stage": 3}, (2 + 4 + 4 + 8) / 4),
        (2, {"learner__ranks": 4}, 2 + 4 + (4 + 8) / 4),  # in bfloat16 stage 0 is 1
        (2, {"learner__offload": True, "learner__zero_stage": 1}, 2 + 4),
        (2, {"learner__lora__rank": 8}, 2),
        (4, {"algorithm__kl__coefficient": 0.1}, 4 + 4 + 8 + 4),
        (4, {"algorithm__kl__coefficient": 0.1, "learner__lora__rank": 8}, 4),
        (4, {"algorithm__kl__coefficient": 0.1, "learner__lora__rank": 8, "algorithm__kl__model": "x/y"}, 4 + 4),
    ],
)
def test_bytes_of_a_parameter_in_the_learner_follow_dtype_stage_adapters_and_reference(width, changes, each):
    assert learner(width, **changes) == 1000 * each


def test_one_chunk_of_logits_is_in_the_learner():
    changes = {"learner__logprob_chunk": 100, "learner__micro_batch_tokens": 4000}
    assert learner(4, vocabulary=7, **changes) - learner(4, **changes) == 100 * 7 * 4


def test_an_engine_holds_its_share_of_the_weights_its_copies_of_them_and_the_cache():
    assert engine_need(tiny_config({"engine.tensor_parallel": 2}), SIZE, 4, 30).bytes == 2000 + 30
    assert engine_need(tiny_config({"weight_sync.staging": True}), SIZE, 4, 30).bytes == 8000 + 30
    assert engine_need(tiny_config({"weight_sync.delta": True, "hardware": "gpu"}), SIZE, 4, 30).bytes == 4000 + 30


def test_a_token_of_the_cache_has_keys_and_values_of_every_layer_and_head():
    assert SIZE.kv_bytes(width=4, workers=1) == 2 * 3 * 2 * 5 * 4
    assert SIZE.kv_bytes(width=4, workers=2) == SIZE.kv_bytes(width=4, workers=4) == 2 * 3 * 1 * 5 * 4
    assert ModelSize(1000).kv_bytes(4, 1) is None


def test_more_than_the_host_has_is_refused_with_what_it_is_for():
    config = tiny_config({"engine.kv_cache_mib": 1024, "engine.count": 3})
    large = ModelSize(parameters=GIB)
    check_host(config, large, 4, 0, 31 * GIB)  # 3 x (4 + 1) and 16
    with pytest.raises(ConfigError, match=r"31\.0 GiB of memory, and .* has 30\.0: 3 x .*5\.0 GiB.*16\.0 GiB"):
        check_host(config, large, 4, 0, 30 * GIB)


def test_more_than_a_gpu_has_is_refused_by_the_side_that_does_not_fit():
    large = ModelSize(parameters=GIB, layers=1, key_value_heads=1, head_size=1)
    config = tiny_config({"hardware": "gpu", "engine.gpu_memory_utilization": 0.5})
    check_gpu(config, large, 2, 0, 100, 18 * GIB)
    with pytest.raises(ConfigError, match=r"the learner does not fit: .*18\.0 GiB.*`learner\.zero_stage=3`"):
        check_gpu(config, large, 2, 0, 100, 17 * GIB)
    with pytest.raises(ConfigError, match=r"an engine does not fit: .*`engine\.gpu_memory_utilization=0\.5`"):
        check_gpu(config, large, 2, 0, 100, 4 * GIB)
    shared = tiny_config({"hardware": "gpu", "engine.gpu_memory_utilization": 0.5, "weight_sync.backend": "ipc"})
    with pytest.raises(ConfigError, match=r"a GPU has 9\.0 GiB beside `engine\.gpu_memory_utilization"):
        check_gpu(shared, large, 2, 0, 100, 18 * GIB)


def test_a_cache_without_room_for_one_rollout_is_refused():
    size = ModelSize(None, layers=32, key_value_heads=8, head_size=128)  # 256 KiB a token in float32
    config = tiny_config({"engine.kv_cache_mib": 512})
    check_kv_cache(config, size, 4, 2048 - 32)
    with pytest.raises(ConfigError, match=r"`engine\.kv_cache_mib=512`.*2017 tokens.*520 MiB"):
        check_kv_cache(config, size, 4, 2048 - 31)


def test_the_memory_of_the_host_is_that_of_the_container_where_it_is_smaller(tmp_path):
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemTotal:       2048 kB\n")
    groups = tmp_path / "groups"
    groups.mkdir()
    assert host_memory(tmp_path / "meminfo", groups) == 2 << 20
    (groups / "memory.max").write_text("max\n")
    assert host_memory(tmp_path / "meminfo", groups) == 2 << 20
    (groups / "memory.max").write_text("1048576\n")
    assert host_memory(tmp_path / "meminfo", groups) == 1 << 20
    assert host_memory(tmp_path / "nothing", groups) is None


def test_the_smallest_gpu_counts_and_none_is_no_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 40960\n")
    program.chmod(0o755)
    assert gpu_memory() == 40960 << 20


def safetensors(shapes: dict[str, list[int]], cut: int = 0) -> bytes:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = 4
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return (struct.pack("<Q", len(text)) + text + bytes(end))[: -cut or None]


CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 20, "num_key_value_heads": 2}


def test_the_size_of_a_model_is_read_from_its_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": [10, 100], "b": []}))
    assert model_size(tmp_path) == ModelSize(1001, 3, 2, 5)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIG | {"head_dim": 8}}))
    assert model_size(tmp_path) == ModelSize(1001, 3, 2, 8)


@pytest.mark.parametrize(
    "kind",
    [
        {"kv_lora_rank": 512},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": 4096},
    ],
)
def test_the_cache_of_layers_of_another_kind_is_not_guessed(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | kind))
    assert model_size(tmp_path) == ModelSize(None)


def test_layers_that_all_see_everything_are_counted(tmp_path):
    for kind in ({"layer_types": ["full_attention"] * 3}, {"sliding_window": 9, "use_sliding_window": False}):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | kind))
        assert model_size(tmp_path).layers == 3


def test_only_the_shards_of_the_index_are_counted(tmp_path):
    for name in ("model-1", "model-2", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors({name: [10]}))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_size(tmp_path).parameters == 20


@pytest.mark.parametrize("content", [safetensors({"a": [10]}, cut=1), b"", b"x" * 30, safetensors({"a": [10]})[:20]])
def test_a_file_of_weights_that_is_not_whole_is_refused_by_its_name(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        model_size(tmp_path)
