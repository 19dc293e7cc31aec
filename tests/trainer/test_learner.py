"""The learner with real DeepSpeed on gloo: the update does not depend on ranks, ZeRO stage, split or packing.

What the processes do, and what of it is written down for these tests, is in ``learner_worker.py``.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ports import port_for_later
from tests.trainer.learner_worker import (
    CONTINUED,
    NOT_FINITE,
    SCENARIOS,
    SEQUENCES,
    STREAMED,
    STREAMED_AGAINST_WHOLE,
    WITH_SEVERAL_UPDATES,
    worker,
)
from tests.trainer.plain_loop import (
    batch,
    decoupled_loss,
    distance,
    m2po_loss,
    reference_update,
    response_logprobs,
    tiny_model,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    """Where the learners of each number of ranks work."""
    return {world: tmp_path_factory.mktemp("learner") / "work" for world in (1, 2)}


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def results(request, folders) -> tuple[int, dict[str, Any]]:
    world = request.param
    folder = folders[world]
    folder.mkdir()
    tiny_model().save_pretrained(folder / "model")
    arguments = (world, port_for_later(), folder, folders[3 - world])
    context = torch.multiprocessing.spawn(worker, arguments, nprocs=world, join=False)
    deadline = time.monotonic() + 1000
    try:
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, "the learner processes did not finish"
    finally:
        for process in context.processes:
            process.kill()
    return world, torch.load(folder / "results.pt", weights_only=False)


@pytest.fixture(scope="module")
def start() -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in tiny_model().named_parameters()}


@pytest.mark.engine
def test_the_update_is_that_of_a_plain_loop_for_any_ranks_zero_stage_split_and_packing(results, start):
    world, seen = results
    expected, norms = reference_update([batch(0), batch(1)])
    for name in SCENARIOS[world]:
        metrics, weights, _ = seen[name]
        assert distance(weights, expected, start) < 1e-5, name
        assert [m["policy/grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-5), name


@pytest.mark.engine
def test_metrics_are_those_of_the_whole_batch_however_it_was_split(results):
    world, seen = results
    first, *others = [seen[name][0][0] for name in SCENARIOS[world]]
    exact = [key for key in first if key.startswith(("policy/", "mismatch/", "tokens/trained", "rollouts/"))]
    assert {"policy/loss", "policy/entropy", "mismatch/k3_kl", "mismatch/ess"} <= set(exact)
    for other in others:
        assert {k: other[k] for k in exact} == pytest.approx({k: first[k] for k in exact}, rel=1e-4, abs=1e-6)
    assert first["tokens/trained"] == sum(sum(r.loss_mask) for r in batch(0))
    assert first["rollouts/without_signal"] == sum(r.advantage == 0 or not any(r.loss_mask) for r in batch(0))


@pytest.mark.engine
def test_evaluated_log_probabilities_and_the_export_are_those_of_the_trained_weights(results):
    world, seen = results
    for name in SCENARIOS[world]:
        _, weights, logprobs = seen[name]
        model = tiny_model()
        model.load_state_dict(weights, strict=False)
        for sequence, values in zip(SEQUENCES, logprobs, strict=True):
            log_p = torch.log_softmax(model(torch.tensor([sequence])).logits[0], -1)
            expected = log_p[range(len(sequence) - 1), sequence[1:]].tolist()
            assert values == pytest.approx(expected, abs=1e-5), name


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() >= wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.engine
@pytest.mark.parametrize("name", list(CONTINUED))
def test_a_loaded_checkpoint_continues_exactly(results, name):
    _, _, uninterrupted, resumed = results[1][f"continued: {name}"]
    assert equal(resumed, uninterrupted)


@pytest.mark.engine
@pytest.mark.parametrize("name", list(CONTINUED))
def test_the_weights_of_a_checkpoint_are_read_without_a_learner_at_any_stage(results, name):
    saved, read, _, _ = results[1][f"continued: {name}"]
    assert equal({name: tensor.to(saved[name].dtype) for name, tensor in read.items() if name in saved}, saved)


@pytest.mark.engine
@pytest.mark.parametrize("name", list(CONTINUED))
def test_a_checkpoint_continues_on_another_number_of_ranks(results, folders, name):
    world, seen = results
    if f"from other ranks: {name}" not in seen:
        pytest.skip("the first number of ranks finds no checkpoint of another")
    written = torch.load(folders[3 - world] / "results.pt", weights_only=False)
    saved, _, uninterrupted, _ = written[f"continued: {name}"]
    loaded, trained, steps = seen[f"from other ranks: {name}"]
    assert steps == 2
    assert equal(loaded, saved)
    assert distance(trained, uninterrupted, saved) < (0.05 if name == "bfloat16" else 1e-5)


@pytest.mark.engine
def test_files_of_another_stage_are_refused_with_both_stages(results):
    wanted = [("3", "2"), ("1 or 2", "3"), ("1 or 2", "0"), ("0", "2")]
    for error, (written, own) in zip(results[1]["other stages"], wanted, strict=True):
        assert f"learner.zero_stage={written}, and the run has {own};" in error


@pytest.mark.engine
@pytest.mark.parametrize("name", list(NOT_FINITE))
def test_a_loss_that_is_not_finite_skips_the_step_which_counts_and_leaves_nothing_behind(results, start, name):
    result, steps, untouched, stepped = results[1][f"not finite: {name}"]
    assert "policy/loss is" in result.skipped
    assert (result.metrics["policy/updates"], result.metrics["policy/skipped_updates"]) == (0, 1)
    assert steps == 1
    assert all(torch.equal(untouched[key], weight.to(untouched[key].dtype)) for key, weight in start.items())
    expected, _ = reference_update([batch(0)], first_step=1)
    assert distance(stepped, expected, start) < (0.5 if name == "bfloat16" else 1e-5)


@pytest.mark.engine
def test_several_updates_a_batch_are_those_of_a_plain_loop_with_a_fixed_anchor_and_reference(results, start):
    world, seen = results
    expected, norms = reference_update([batch(0), batch(1)], decoupled_loss, epochs=2, minibatches=2)
    means = [sum(norms[:4]) / 4, sum(norms[4:]) / 4]
    for name in WITH_SEVERAL_UPDATES[world]:
        metrics, weights = seen[f"several: {name}"]
        assert distance(weights, expected, start) < 1e-5, name
        assert [m["policy/grad_norm"] for m in metrics] == pytest.approx(means, rel=1e-5), name
        assert [m["policy/updates"] for m in metrics] == [4, 4]
        assert metrics[0]["tokens/trained"] == sum(sum(r.loss_mask) for r in batch(0))
        assert metrics[0]["policy/reference_kl"] > 0


@pytest.mark.engine
def test_a_batch_that_comes_part_by_part_makes_the_update_of_the_whole_batch(results, start):
    world, seen = results
    expected, norms = reference_update([batch(0), batch(1)])
    first = seen[next(iter(SCENARIOS[world]))][0][0]
    for name in STREAMED:
        metrics, weights = seen[f"streamed: {name}"]
        assert distance(weights, expected, start) < 1e-5, name
        assert [m["policy/grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-5), name
        same = ("policy/loss", "policy/entropy", "mismatch/ess", "tokens/trained", "rollouts/without_signal")
        assert {k: metrics[0][k] for k in same} == pytest.approx({k: first[k] for k in same}, rel=1e-4), name
    for name in STREAMED_AGAINST_WHOLE:
        (metrics, weights), (other_metrics, other) = seen[f"streamed: {name}"]
        assert distance(weights, other, start) < (0.05 if name == "bfloat16" else 1e-5), name
        for key in ("policy/loss", "policy/grad_norm"):
            tolerance = 0.02 if name == "bfloat16" else 1e-4
            assert [m[key] for m in metrics] == pytest.approx([m[key] for m in other_metrics], rel=tolerance), name


@pytest.mark.engine
@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_that_is_not_finite_in_a_part_of_the_batch_skips_the_step_and_leaves_nothing_behind(
    results, start, stage
):
    result, untouched, stepped = results[1][f"streamed, not finite: {stage}"]
    assert "policy/loss is" in result.skipped
    assert all(torch.equal(untouched[key], weight) for key, weight in start.items())
    expected, _ = reference_update([batch(0)], first_step=1)
    assert distance(stepped, expected, start) < 1e-5


@pytest.mark.engine
def test_tokens_that_m2po_drops_are_those_of_the_whole_batch_on_any_number_of_ranks(results, start):
    world, seen = results
    expected, norms = reference_update([batch(0), batch(1)], m2po_loss)
    for name in (list(WITH_SEVERAL_UPDATES[world])[number] for number in (0, -1)):
        metrics, weights = seen[f"m2po: {name}"]
        assert distance(weights, expected, start) < 1e-5, name
        assert [m["policy/grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-5), name
        assert 0 < metrics[0]["policy/second_moment_masked_fraction"] < 1


@pytest.mark.engine
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rollout_pays_for_what_it_has_become_likelier_than_under_the_weights_at_start(results, stage):
    assert_pays(*results[1][f"penalties {stage}"])


def assert_pays(penalties: list[float], weights: dict[str, torch.Tensor]) -> None:
    """The penalties are those of the exported weights against the weights at start."""
    model, start = tiny_model(), tiny_model()
    model.load_state_dict(weights, strict=False)
    for r, paid in zip(batch(1), penalties, strict=True):
        moved = (response_logprobs(model, r) - response_logprobs(start, r)).detach()
        assert paid == pytest.approx(0.3 * float((moved * torch.tensor(r.loss_mask)).sum()), abs=1e-5)


@pytest.mark.engine
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_of_a_model_with_adapters_their_targets_change_alone_and_a_loaded_checkpoint_continues_exactly(
    results, start, stage
):
    uninterrupted, resumed, *_ = results[1][f"adapters {stage}"]
    assert uninterrupted.keys() == resumed.keys() == start.keys()
    for name, weight in uninterrupted.items():
        assert torch.equal(weight, resumed[name]), name
        assert torch.equal(weight, start[name]) == (not name.endswith(("q_proj.weight", "up_proj.weight"))), name


@pytest.mark.engine
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_model_made_of_a_checkpoint_of_adapters_is_what_was_exported_then(results, stage):
    _, _, exported, made = results[1][f"adapters {stage}"]
    assert exported.keys() == made.keys()
    assert all(torch.equal(weight, made[name]) for name, weight in exported.items())


@pytest.mark.engine
@pytest.mark.parametrize("stage", [0, 3])
def test_with_adapters_a_rollout_pays_for_what_it_has_become_likelier_than_under_the_base(results, stage):
    assert_pays(*results[1][f"penalties of adapters {stage}"])


@pytest.mark.engine
def test_adapters_are_trained_in_bfloat16_too_from_a_base_that_is_the_reference(results, start):
    metrics, weights = results[1]["adapters in bfloat16"]
    assert metrics[0]["policy/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[-1]["policy/reference_kl"] > 0
    for name, weight in weights.items():
        same = torch.equal(weight, start[name].bfloat16())
        assert same == (not name.endswith(("q_proj.weight", "up_proj.weight"))), name


@pytest.mark.engine
@pytest.mark.parametrize("stage", [0, 3])
def test_the_reference_in_bfloat16_is_the_policy_at_start(results, stage):
    metrics = results[1][f"bfloat16 reference {stage}"]
    assert metrics["policy/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy/skipped_updates"] == 0


@pytest.mark.engine
def test_a_step_that_is_interrupted_between_its_updates_counts_so_that_no_batch_is_learned_from_twice(results, start):
    if "interrupted between updates" not in results[1]:
        pytest.skip("several ranks give up between micro-batches only")
    error, steps, before, after = results[1]["interrupted between updates"]
    assert error == "optimizer step 2 was cut short after 1 update(s), and counts"
    assert steps == 2
    assert distance(after, before, start) > 1e-3


@pytest.mark.engine
def test_a_rank_without_work_takes_part(results, start):
    expected, _ = reference_update([batch(groups=1, size=1)])
    assert distance(results[1]["one rollout"], expected, start) < 1e-5


@pytest.mark.engine
def test_bfloat16_keeps_float32_master_weights_so_that_small_steps_add_up(results, start):
    # Steps of 2e-5 are below half a unit in the last place of most weights: without master weights nearly all round
    # away.
    assert distance(results[1]["bfloat16"], results[1]["float32"], start) < 0.5


@pytest.mark.engine
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_interrupt_ends_a_step_inside_its_micro_batch_and_the_weights_before_it_can_be_saved(results, stage):
    if f"interrupted {stage}" not in results[1]:
        pytest.skip("several ranks give up between micro-batches only")
    error, steps, before, after = results[1][f"interrupted {stage}"]
    assert error == "optimizer step 2 was given up; no step was taken"
    assert steps == 1
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, atol=0, rtol=0)
