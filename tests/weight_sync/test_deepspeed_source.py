"""The weight source over real DeepSpeed engines, two ranks, every ZeRO stage."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from tests.ports import port_for_later
from weight_sync.delta import Patch
from weight_sync.manifest import Manifest
from weight_sync.snapshot import Snapshot
from weight_sync.source import DeepSpeedSource, NonFiniteWeightError, TensorMeta

pytestmark = pytest.mark.engine

STAGES = [0, 1, 2, 3]
ADAPTED_STAGES = [0, 3]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
}


class Learner(torch.nn.Module):
    """A wrapped model whose tensors do not divide evenly among two ranks, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict(
            {
                "embed": torch.nn.Embedding(7, 5),
                "inner": torch.nn.Linear(5, 3),
                "head": torch.nn.Linear(5, 7, bias=False),
            }
        )
        self.model["head"].weight = self.model["embed"].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model["embed"](ids)
        return self.model["inner"](hidden).sum() + self.model["head"](hidden).square().sum()


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled here, for inference only
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.save([_read_around_a_step(rank, stage) for stage in STAGES], f"{folder}/{rank}.pt")
    torch.save({stage: _read_adapters(rank, stage) for stage in ADAPTED_STAGES}, f"{folder}/{rank}_adapted.pt")
    deepspeed.comm.barrier()


def _read_around_a_step(rank: int, stage: int) -> dict[str, Any]:
    """What the source of one rank says before and after an optimizer step, and about a poisoned weight."""
    import deepspeed

    torch.manual_seed(0)
    model = Learner()
    config = {**CONFIG, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    source = DeepSpeedSource(engine, prefix="model.", bucket_bytes=30)

    before = _copied(source)
    engine.backward(engine(torch.tensor([[1, 2, 3]])))
    engine.step()
    source.check_finite()
    after = _copied(source)

    # Rank 0's pass is cut short; completing it on both keeps their collectives aligned.
    if rank == 0:
        next(iter(source))
    else:
        source.begin_pass()
    source.finish_pass()
    again = _copied(source)
    few = _few_changes(engine, source, rank, stage)

    bias = engine.module.model["inner"].bias
    with deepspeed.zero.GatheredParameters(bias, modifier_rank=0, enabled=stage == 3):
        bias.data[-1] = float("nan")  # with ZeRO-3, held by one rank only
    complaint = ""
    try:
        source.check_finite()
    except NonFiniteWeightError as error:
        complaint = str(error)
    declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    return {"before": before, "after": after, "again": again, "declared": declared, "complaint": complaint, **few}


def _read_adapters(rank: int, stage: int) -> dict[str, Any]:
    """What the sources of one rank read of a model whose adapters have been trained for two steps, and what peft makes
    of the same weights."""
    import deepspeed
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(Learner(), LoraConfig(r=2, lora_alpha=3, target_modules=["inner"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {key: value for key, value in CONFIG.items() if key != "bf16"}
    config |= {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    plain = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    sources = {part: _adapted_source(engine, part) for part in ("merged", "base", "adapter")}
    rounded = _adapted_source(engine, "merged", dtype=torch.bfloat16)

    snapshot = Snapshot(rank, 2)
    snapshot.take(1, rounded.manifest(), rounded.shares(rank, 2))
    first = _copied(rounded)
    for _ in range(2):
        engine.backward(engine(torch.tensor([[1, 2, 3]])))
        engine.step()
    for source in sources.values():
        source.check_finite()
    delta = snapshot.find(1, rounded.manifest(), rounded.shares(rank, 2))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        plain.load_state_dict(engine.module.state_dict())
    return {
        **{part: _copied(source) for part, source in sources.items()},
        "rounded": _copied(rounded),
        "first": first,
        "changed": delta and delta.changed,
        "delta": delta and delta.tensors,
        "plain": dict(copy.deepcopy(plain).unload().named_parameters()),
        "expected": dict(plain.merge_and_unload().named_parameters()),
    }


def _adapted_source(engine: Any, part: Any, **options: Any) -> DeepSpeedSource:
    return DeepSpeedSource(engine, prefix="base_model.model.model.", bucket_bytes=30, lora=part, **options)


def _few_changes(engine: Any, source: DeepSpeedSource, rank: int, stage: int) -> dict[str, Any]:
    """What the two ranks' snapshots find when a few elements change, and the weights then."""
    import deepspeed

    snapshot, manifest = Snapshot(rank, 2), source.manifest()
    snapshot.take(1, manifest, source.shares(rank, 2))
    embed, inner = engine.module.model["embed"].weight, engine.module.model["inner"].weight
    with deepspeed.zero.GatheredParameters([embed, inner], modifier_rank=0, enabled=stage == 3):
        embed.data[0, 1], embed.data[6, 4], inner.data[2, 3] = 0.5, -0.5, 0.25
    delta = snapshot.find(1, manifest, source.shares(rank, 2))
    assert delta is not None
    snapshot.advance(2)
    nothing = snapshot.find(2, manifest, source.shares(rank, 2))
    assert nothing is not None
    return {
        "changed": delta.changed,
        "delta": delta.tensors,
        "changed_since": nothing.changed,
        "moved": _copied(source),
    }


def _copied(source: DeepSpeedSource) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in source}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks have written."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(_rank, (port_for_later(), str(folder)), nprocs=2)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[list[dict[str, Any]]]:
    """Both ranks' readings, by rank and stage."""
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def adapted(folder: Path) -> list[dict[int, dict[str, Any]]]:
    """Both ranks' readings of a model with adapters, by rank and stage."""
    return [torch.load(folder / f"{rank}_adapted.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("stage", STAGES)
def test_both_ranks_read_the_whole_model_before_and_after_a_step_in_one_order(results, stage):
    torch.manual_seed(0)
    initial = {name.removeprefix("model."): value.detach().bfloat16() for name, value in Learner().named_parameters()}
    first = results[0][stage]
    for reading in (results[0][stage], results[1][stage]):
        assert list(reading["before"]) == ["embed.weight", "inner.weight", "inner.bias"]
        assert reading["declared"] == [(n, torch.bfloat16, tuple(t.shape)) for n, t in reading["after"].items()]
        for name, tensor in initial.items():
            assert torch.equal(reading["before"][name], tensor)
            assert not torch.equal(reading["after"][name], tensor)
            assert torch.equal(reading["after"][name], first["after"][name])


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_cut_short_on_one_rank_leaves_the_next_one_whole(results, stage):
    for rank in range(2):
        reading = results[rank][stage]
        assert all(torch.equal(tensor, reading["after"][name]) for name, tensor in reading["again"].items())
        assert list(reading["again"]) == list(reading["after"])


@pytest.mark.parametrize("stage", STAGES)
def test_what_changed_in_the_shares_of_both_ranks_comes_together_on_the_first(results, stage):
    first, second = (results[rank][stage] for rank in range(2))
    assert first["changed"] == second["changed"] == (2, 1, 0)
    assert first["changed_since"] == second["changed_since"] == (0, 0, 0)
    assert second["delta"] == ()
    rows = first["declared"]
    whole = Manifest.from_wire([r[0] for r in rows], ["bfloat16"] * len(rows), [r[2] for r in rows])
    held = {name: tensor.clone() for name, tensor in first["again"].items()}
    patch = Patch(held, whole, first["changed"])
    patch.load(list(zip(patch.manifest.names, first["delta"], strict=True)))
    assert all(torch.equal(held[name], tensor) for name, tensor in first["moved"].items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_non_finite_weight_is_named_by_every_rank_that_holds_it(results, stage):
    complaining = [rank for rank in range(2) if "inner.bias" in results[rank][stage]["complaint"]]
    assert complaining == ([1] if stage == 3 else [0, 1])


@pytest.mark.parametrize("stage", ADAPTED_STAGES)
def test_both_ranks_read_the_adapters_merged_as_peft_merges_them_the_base_and_the_adapter_alone(adapted, stage):
    for rank in range(2):
        reading = adapted[rank][stage]
        expected = {name.removeprefix("model."): tensor.detach() for name, tensor in reading["expected"].items()}
        plain = {name.removeprefix("model."): tensor.detach() for name, tensor in reading["plain"].items()}
        assert list(reading["merged"]) == list(reading["base"]) == list(expected)
        assert all(torch.equal(reading["merged"][name], tensor) for name, tensor in expected.items())
        assert all(torch.equal(reading["rounded"][name], tensor.bfloat16()) for name, tensor in expected.items())
        assert all(torch.equal(reading["base"][name], tensor) for name, tensor in plain.items())
        assert not torch.equal(expected["inner.weight"], plain["inner.weight"])
        assert [(name, tuple(tensor.shape)) for name, tensor in reading["adapter"].items()] == [
            ("inner.lora_A.weight", (2, 5)),
            ("inner.lora_B.weight", (3, 2)),
        ]


@pytest.mark.parametrize("stage", ADAPTED_STAGES)
def test_a_delta_of_merged_weights_brings_what_a_dense_push_brings(adapted, stage):
    first, second = (adapted[rank][stage] for rank in range(2))
    assert first["changed"] == second["changed"]
    assert [count > 0 for count in first["changed"]] == [False, True, False]
    whole = Manifest.from_metadata(_metadata_of(first["rounded"]))
    held = dict(first["first"])
    patch = Patch(held, whole, first["changed"])
    patch.load(list(zip(patch.manifest.names, first["delta"], strict=True)))
    assert all(torch.equal(held[name], tensor) for name, tensor in first["rounded"].items())


def _metadata_of(tensors: dict[str, torch.Tensor]) -> list[TensorMeta]:
    return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
