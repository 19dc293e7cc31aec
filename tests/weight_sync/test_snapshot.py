"""The learner's copy of what engines hold: what it finds changed, and when it finds nothing to go by."""

from __future__ import annotations

import torch

from weight_sync.delta import Patch, bits
from weight_sync.manifest import Manifest
from weight_sync.snapshot import Snapshot
from weight_sync.source import DeepSpeedSource


def source(model: torch.nn.Module) -> DeepSpeedSource:
    return DeepSpeedSource(model, dtype=torch.bfloat16, bucket_bytes=100)


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))


def wire(of: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in source(of)}


def find(snapshot: Snapshot, base: int, learner: torch.nn.Module):
    sent = source(learner)
    return snapshot.find(base, sent.manifest(), sent.shares(0, 1))


def taken(version: int, learner: torch.nn.Module) -> tuple[Snapshot, Manifest]:
    snapshot, sent = Snapshot(), source(learner)
    snapshot.take(version, sent.manifest(), sent.shares(0, 1))
    return snapshot, sent.manifest()


def step(learner: torch.nn.Module, size: float) -> None:
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(torch.randn_like(parameter).sign() * size)


def test_steps_too_small_for_the_engines_dtype_travel_once_they_add_up_and_engines_hold_what_is_pushed_whole():
    learner = model()
    snapshot, manifest = taken(0, learner)
    held = wire(learner)
    changes = []
    for version in range(1, 30):
        step(learner, 1e-5)
        delta = find(snapshot, version - 1, learner)
        assert delta is not None
        patch = Patch(held, manifest, delta.changed)
        patch.load(list(zip(delta.manifest.names, delta.tensors, strict=True)))
        snapshot.advance(version)
        changes.append(sum(delta.changed))
        expected = wire(learner)
        assert all(bool((bits(held[name]) == bits(expected[name])).all()) for name in held)
    elements = sum(parameter.numel() for parameter in learner.parameters())
    assert 0 < max(changes) < elements / 4, "most steps leave most of the weights where they are in bfloat16"


def test_where_most_has_changed_everything_is_sent():
    learner = model()
    snapshot, _ = taken(0, learner)
    step(learner, 0.1)
    assert find(snapshot, 0, learner) is None


def test_where_nothing_has_changed_nothing_travels():
    learner = model()
    snapshot, _ = taken(0, learner)
    delta = find(snapshot, 0, learner)
    assert delta is not None
    assert delta.tensors == ()
    assert delta.manifest.total_bytes == 0


def test_a_copy_of_another_version_is_not_gone_by():
    learner = model()
    snapshot, _ = taken(4, learner)
    assert find(Snapshot(), 4, learner) is None
    assert find(snapshot, 3, learner) is None
    assert find(snapshot, 4, learner) is not None
    snapshot.version = None
    assert find(snapshot, 4, learner) is None


def test_a_copy_that_was_taken_again_is_of_the_new_weights():
    learner = model()
    snapshot, manifest = taken(0, learner)
    step(learner, 0.1)
    snapshot.take(1, manifest, source(learner).shares(0, 1))
    delta = find(snapshot, 1, learner)
    assert delta is not None
    assert sum(delta.changed) == 0


def test_the_shares_of_all_ranks_are_the_weights():
    learner = model()
    shares = [list(source(learner).shares(rank, 3)) for rank in range(3)]
    for tensor, *of_tensor in zip(learner.parameters(), *shares, strict=True):
        assert torch.equal(torch.cat([share.elements for share in of_tensor]), tensor.detach().flatten())
        assert [share.start for share in of_tensor] == [tensor.numel() * rank // 3 for rank in range(3)]
