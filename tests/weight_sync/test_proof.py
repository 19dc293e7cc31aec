"""Faults between a learner and one real engine: which proof of a push catches which, and what it names."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from generator.engine import Engine
from tests.tiny import EVERY, ModuleLearner, OneEngine, tiny_llama
from weight_sync import gloo_trainer
from weight_sync.buckets import pack
from weight_sync.canary import TOLERANCES
from weight_sync.push import Pusher, PushError, PushReport
from weight_sync.source import DeepSpeedSource
from weight_sync.verification import Verification

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

LAYERS = [f"model.layers.{number}." for number in range(2)]

versions = itertools.count()


async def push(
    engine: Engine, model: torch.nn.Module, *, sent: torch.nn.Module | None = None, proof: Verification = EVERY
) -> PushReport:
    """One push of ``model`` through a new group; ``sent`` travels in its place."""
    pusher = Pusher(ModuleLearner(model, engine, sent), OneEngine(engine), timeout=120.0, verification=proof)
    return await pusher.push(next(versions))


async def assert_a_good_push_is_served(engine: Engine, model: torch.nn.Module) -> None:
    report = await push(engine, model)
    assert engine.version == report.version
    assert report.canary is not None
    assert report.canary.engines == 1
    assert report.canary.abs_diff_mean < TOLERANCES["float32"].mean


async def test_before_the_first_push_an_engine_computes_nothing_like_its_model(logprobs_before_any_push, engine, model):
    """Otherwise a first push that changed nothing would pass for a good one."""
    (row, *_) = logprobs_before_any_push
    (expected, *_) = await ModuleLearner(model, engine).logprobs(EVERY.sequences)
    assert max(abs(here - there) for here, there in zip(row, expected, strict=True)) > 1.0


async def test_good_pushes_pass_both_proofs(engine, model):
    for other in (model, tiny_llama(2), model):
        await assert_a_good_push_is_served(engine, other)


# -- damage on the way: after the sender has hashed what it sends -----------------------------------------------------


class Wire:
    """Stands in for ``pack``: some tensors are changed behind the sender's back."""

    def __init__(self, model: torch.nn.Module, damage: dict[str, Callable[[torch.Tensor], Any]]) -> None:
        self._names = iter(DeepSpeedSource(model, bucket_bytes=1).manifest().names)
        self._damage = damage

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return pack([self._changed(next(self._names), tensor.clone()) for tensor in tensors])

    def _changed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in self._damage:
            self._damage[name](tensor)
        return tensor


def flip_a_byte(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8)[1001] ^= 4


def lose_a_slice(tensor: torch.Tensor) -> None:
    tensor[16:32] = 0


def swapped_layers(model: torch.nn.Module) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Every weight of the two layers under the other's name."""
    state = model.state_dict()
    pairs = [(name, name.replace(*order)) for order in (LAYERS, LAYERS[::-1]) for name in state if order[0] in name]
    return {name: lambda tensor, other=other: tensor.copy_(state[other]) for name, other in pairs}


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (
            lambda model: {"model.layers.1.mlp.down_proj.weight": flip_a_byte},
            r"1 of 20 tensors did not arrive as they were sent .*: model\.layers\.1\.mlp\.down_proj\.weight",
        ),
        (
            lambda model: {"model.layers.0.self_attn.k_proj.weight": lose_a_slice},
            r"1 of 20 tensors .*: model\.layers\.0\.self_attn\.k_proj\.weight",
        ),
        (
            lambda model: {"model.embed_tokens.weight": lambda tensor: tensor.copy_(tiny_llama(2).lm_head.weight)},
            r"1 of 20 tensors .*: model\.embed_tokens\.weight",
        ),
        # The norms of a model with random weights are all ones in every layer.
        (swapped_layers, r"14 of 20 tensors .*: model\.layers\.0\.self_attn\.q_proj\.weight.* and 6 more"),
    ],
    ids=["a corrupted byte", "a missing slice", "a stale head", "a swapped pair of layers"],
)
async def test_damage_on_the_way_is_found_by_the_digests_and_named(engine, model, damage, complaint, monkeypatch):
    monkeypatch.setattr(gloo_trainer, "pack", Wire(model, damage(model)).pack)
    served = engine.version
    with pytest.raises(PushError, match=f"at transfer.*{complaint}"):
        await push(engine, model)
    assert engine.version == served
    monkeypatch.undo()
    await assert_a_good_push_is_served(engine, model)


async def test_a_byte_changed_on_the_way_passes_where_no_proof_is_asked_for(engine, model, monkeypatch):
    """What the proofs are there for: everything else about such a push is right."""
    damage = {"model.layers.1.mlp.down_proj.weight": flip_a_byte}
    monkeypatch.setattr(gloo_trainer, "pack", Wire(model, damage).pack)
    report = await push(engine, model, proof=Verification("none"))
    assert engine.version == report.version
    assert report.canary is None


# -- what is hashed and travels right, but is not what the learner computes with --------------------------------------


def with_a_corrupted_byte(model: torch.nn.Module) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight.data
    weight.view(-1).view(torch.uint8)[1003] ^= 2  # of the exponent


def with_a_missing_slice(model: torch.nn.Module) -> None:
    lose_a_slice(model.model.layers[0].self_attn.k_proj.weight.data)


def with_swapped_layers(model: torch.nn.Module) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


@pytest.mark.parametrize("defect", [with_a_corrupted_byte, with_a_missing_slice, with_swapped_layers])
async def test_a_learner_that_sends_other_weights_than_it_computes_with_is_found_by_the_canary(engine, model, defect):
    sent = copy.deepcopy(model)
    defect(sent)
    served = engine.version
    with pytest.raises(PushError, match=r"at verify: CanaryError: the canary: engine 0 .* is off by .* on average"):
        await push(engine, model, sent=sent)
    assert engine.version == served
    await assert_a_good_push_is_served(engine, model)


# -- what arrives right and is loaded wrong ---------------------------------------------------------------------------


def forget_the_head(worker: Any) -> None:
    """From now on an update ends as vLLM alone ends it: on CPU a tied output head keeps its old, packed copy."""
    from weight_sync import reload

    reload.LayerwiseUpdate.whole_finish = reload.LayerwiseUpdate.finish
    reload.LayerwiseUpdate.finish = lambda self: reload.finalize_layerwise_reload(self._model, self._model_config)


def remember_the_head(worker: Any) -> None:
    from weight_sync import reload

    reload.LayerwiseUpdate.finish = reload.LayerwiseUpdate.whole_finish


async def test_a_tied_head_that_is_left_stale_is_found_by_the_canary(engine, model):
    await assert_a_good_push_is_served(engine, model)
    await engine.llm.collective_rpc(forget_the_head)
    served = engine.version
    with pytest.raises(PushError, match=r"at verify: CanaryError: .* output head that was left stale"):
        await push(engine, tiny_llama(2))
    assert engine.version == served
    await engine.llm.collective_rpc(remember_the_head)
    await assert_a_good_push_is_served(engine, tiny_llama(2))
