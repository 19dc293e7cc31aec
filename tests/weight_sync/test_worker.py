"""What is added to vLLM's worker class, on stand-ins for what vLLM puts into a worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weight_sync.worker import WorkerExtension


def worker(modules: list[str], layers: list[str], computing: list[int | None]) -> WorkerExtension:
    """One whose model has room for adapters beside ``modules``, and holds adapter 1, of ``layers``."""
    adapters = {1: SimpleNamespace(loras=dict.fromkeys(layers))}
    manager = SimpleNamespace(get_adapter=adapters.get, modules=dict.fromkeys(modules), lora_index_to_id=computing)
    extension = WorkerExtension()
    extension.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    return extension


def test_the_layers_of_an_adapter_that_a_model_has_no_room_for_are_named():
    assert worker(["a.qkv_proj", "a.o_proj"], ["a.qkv_proj"], [1]).adapter_layers_left_out(1) == []
    assert worker(["a.o_proj"], ["a.v_proj", "a.o_proj", "a.q_proj"], [1]).adapter_layers_left_out(1) == [
        "a.q_proj",
        "a.v_proj",
    ]


@pytest.mark.parametrize(("adapter", "computing"), [(1, [None]), (2, [1])])
def test_an_adapter_that_a_model_does_not_compute_with_is_an_error(adapter, computing):
    with pytest.raises(RuntimeError, match=f"without {adapter}"):
        worker(["a.o_proj"], ["a.o_proj"], computing).adapter_layers_left_out(adapter)
