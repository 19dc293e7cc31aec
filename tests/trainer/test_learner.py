"""The learner with real DeepSpeed on gloo: the update does not depend on ranks, ZeRO stage, split or packing.

All scenarios of a world size run one after another in the same processes, because starting them is what takes time.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ports import port_for_later
from tests.tiny import learner_spec
from tests.trainer.learner_files import FILES
from tests.trainer.plain_loop import (
    EPSILON,
    batch,
    decoupled_loss,
    distance,
    m2po_loss,
    reference_update,
    response_logprobs,
    tiny_model,
)
from trainer.checkpoint_model import checkpoint_weights, write_checkpoint_model
from trainer.config import AlgorithmConfig, CorrectionConfig, KLConfig, LearnerConfig, LoRAConfig, OptimizerConfig
from trainer.learner import Learner
from trainer.learner_setup import LearnerSpec
from trainer.model import ResolvedModel
from trainer.train_rollout import TrainRollout
from trainer.zero_files import CHECKPOINT_TAG, saved_stages

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.01, max_grad_norm=0.1, warmup_steps=2, eps=EPSILON)
SEQUENCES = [[1, 2, 3, 4], [5, 6]]
SEVERAL = {
    "epochs": 2,
    "minibatches": 2,
    "algorithm": AlgorithmConfig(proximal="recomputed", kl=KLConfig(coefficient=0.3)),
}
M2PO = {
    "algorithm": AlgorithmConfig(
        proximal="behaviour",
        clip_low=None,
        clip_high=None,
        correction=CorrectionConfig(weight="none", second_moment=0.2),
    )
}
LORA = LoRAConfig(rank=4, targets=["q_proj", "up_proj"])
IN_REWARD = AlgorithmConfig(kl=KLConfig(coefficient=0.3, estimator="k1", place="reward"))


def spec(folder: Path, **changes: Any) -> LearnerSpec:
    learner = LearnerConfig(
        zero_stage=changes.pop("stage", 0),
        micro_batch_tokens=changes.pop("budget", 40),
        packing=changes.pop("packing", "shared_prompt"),
        logprob_chunk=7,
        gradient_checkpointing=changes.pop("gradient_checkpointing", False),
        offload=changes.pop("offload", False),
        lora=changes.pop("lora", LoRAConfig()),
        epochs=changes.pop("epochs", 1),
        minibatches=changes.pop("minibatches", 1),
        cpu_threads=1,  # threads of a model this small do nothing but wait for one another
        timeout=120.0,
    )
    return learner_spec(folder, learner=learner, **({"temperature": 0.8, "optimizer": OPTIMIZER} | changes))


SCENARIOS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one micro-batch": {"budget": 10_000},
        "many micro-batches": {"budget": 1},
        "padded": {"packing": "padded"},
        "gradient checkpointing": {"gradient_checkpointing": True},
        "zero 1": {"stage": 1},
        "zero 2": {"stage": 2},
        "zero 3": {"stage": 3},
    },
    2: {
        "zero 0": {},
        "zero 0, padded, many micro-batches": {"packing": "padded", "budget": 1},
        "zero 1": {"stage": 1},
        "zero 2": {"stage": 2},
        "zero 3": {"stage": 3},
    },
}


WITH_SEVERAL_UPDATES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one micro-batch": {"budget": 10_000},
        "padded, many micro-batches": {"packing": "padded", "budget": 1},
        "gradient checkpointing": {"gradient_checkpointing": True},
        "zero 1, offloaded": {"stage": 1, "offload": True},
        "zero 2": {"stage": 2},
        "zero 3, offloaded": {"stage": 3, "offload": True},
    },
    2: {
        "zero 0": {},
        "zero 1, padded, many micro-batches": {"stage": 1, "packing": "padded", "budget": 1},
        "zero 2, offloaded": {"stage": 2, "offload": True},
        "zero 3": {"stage": 3},
    },
}
"""The variants of SEVERAL; M2PO is run in the first and the last of them."""
NOT_FINITE: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 2": {"stage": 2},
    "zero 2, offloaded": {"stage": 2, "offload": True},
    "zero 3": {"stage": 3},
    "bfloat16": {"dtype": "bfloat16"},
}

STREAMED: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 1": {"stage": 1},
    "zero 2, many micro-batches": {"stage": 2, "budget": 1},
    "zero 2, offloaded": {"stage": 2, "offload": True},
    "zero 3": {"stage": 3},
}
STREAMED_AGAINST_WHOLE: dict[str, dict[str, Any]] = {
    "prompt means and a reference, zero 3": {
        "stage": 3,
        "algorithm": AlgorithmConfig(aggregation="prompt_mean", kl=KLConfig(coefficient=0.3)),
    },
    "rollout means, zero 0": {"algorithm": AlgorithmConfig(aggregation="sequence_mean")},
    "bfloat16": {"dtype": "bfloat16"},
}


CONTINUED: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 2": {"stage": 2},
    "zero 3": {"stage": 3},
    "bfloat16": {"dtype": "bfloat16"},
}
"""The learners that save, and are loaded."""


def worker(rank: int, world: int, port: int, folder: Path, others: Path) -> None:
    """Run every scenario of this world size on one rank; rank 0 leaves what it saw in ``folder``.

    ``others`` is where another number of ranks has left its checkpoints, if there was one before.
    """

    def learner(**changes: Any) -> Learner:
        return Learner(spec(folder / "model", **changes), rank, world, "127.0.0.1", port)

    first = learner()  # makes the process group and leaves it with the process, so that later learners share it
    results: dict[str, Any] = {}
    for name, changes in SCENARIOS[world].items():
        one = learner(**changes)
        metrics = [whole(one, batch(seed)) for seed in range(2)]
        results[name] = (metrics, exported(one, folder / "export", rank), one.logprobs(SEQUENCES))
        one.close()
    for name, changes in WITH_SEVERAL_UPDATES[world].items():
        results[f"several: {name}"] = two_steps(learner, SEVERAL | changes, folder, rank)
    for name in (list(WITH_SEVERAL_UPDATES[world])[number] for number in (0, -1)):
        results[f"m2po: {name}"] = two_steps(learner, M2PO | WITH_SEVERAL_UPDATES[world][name], folder, rank)
    for name, changes in CONTINUED.items():
        results[f"continued: {name}"] = continued(learner, changes, folder / name, rank)
        if others.is_dir():
            results[f"from other ranks: {name}"] = loaded_and_trained(learner, changes, others / name, folder, rank)
    results["other stages"] = [refused_stage(learner, *stages, folder) for stages in ((2, 3), (3, 2), (0, 2), (2, 0))]
    for name, changes in STREAMED.items():
        results[f"streamed: {name}"] = two_steps(learner, changes, folder, rank, step=streamed)
    for name, changes in STREAMED_AGAINST_WHOLE.items():
        results[f"streamed: {name}"] = [two_steps(learner, changes, folder, rank, step) for step in (streamed, whole)]
    for stage in (0, 2):
        results[f"streamed, not finite: {stage}"] = streamed_not_finite(learner, stage, folder, rank)
    for name, changes in NOT_FINITE.items():
        results[f"not finite: {name}"] = not_finite(learner, changes, folder, rank)
    for stage in (0, 3):
        results[f"penalties {stage}"] = penalties(learner, folder, rank, stage=stage)
    for stage in (0, 2, 3):
        results[f"adapters {stage}"] = adapters_continued(learner, {"stage": stage, "lora": LORA}, folder, rank)
    for stage in (0, 3):
        results[f"penalties of adapters {stage}"] = penalties(learner, folder, rank, stage=stage, lora=LORA)
    results["adapters in bfloat16"] = adapters_in_bfloat16(learner, folder, rank)
    for stage in (0, 2, 3) if world == 1 else ():
        results[f"interrupted {stage}"] = interrupted(learner, stage, folder, rank)
    if world == 1:
        results["interrupted between updates"] = interrupted(learner, 2, folder, rank, after=3, **SEVERAL)
    one = learner(stage=2)
    one.train(batch(groups=1, size=1), version=0)  # with two ranks, one of them has nothing to do
    results["one rollout"] = exported(one, folder / "export", rank)
    one.close()
    for stage in (0, 3):
        one = learner(stage=stage, dtype="bfloat16", algorithm=SEVERAL["algorithm"])
        results[f"bfloat16 reference {stage}"] = one.train(batch(0), version=0).metrics
        one.close()
    results["bfloat16"] = drift(learner, "bfloat16", folder, rank)
    results["float32"] = drift(learner, "float32", folder, rank)
    if rank == 0:
        torch.save(results, folder / "results.pt")
    first.close()


def exported(learner: Learner, folder: Path, rank: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    learner.export(folder)
    return load_file(folder / "model.safetensors") if rank == 0 else {}


def whole(one: Learner, rollouts: list[TrainRollout]) -> dict[str, float]:
    return one.train(rollouts, version=0).metrics


def streamed(one: Learner, rollouts: list[TrainRollout]) -> dict[str, float]:
    """The groups of a batch one after another, with a pass without gradients between two, as a push may make one."""
    for group in (0, 1):
        one.accumulate([r for r in rollouts if r.group == group], version=0)
        one.logprobs(SEQUENCES)
    return one.train([r for r in rollouts if r.group > 1], version=0).metrics


def two_steps(
    learner: Any, changes: dict[str, Any], folder: Path, rank: int, step: Any = whole
) -> tuple[list[dict], dict]:
    """The metrics of a step on each of two batches, and the weights after them."""
    one = learner(**changes)
    metrics = [step(one, batch(seed)) for seed in range(2)]
    weights = exported(one, folder / "export", rank)
    one.close()
    return metrics, weights


def penalties(learner: Any, folder: Path, rank: int, **changes: Any) -> tuple[list[float], dict]:
    """What a penalty takes from the second batch after a step on the first, and the weights then."""
    one = learner(algorithm=IN_REWARD, **changes)
    one.train(batch(0), version=0)
    seen = one.kl_penalties(batch(1)), exported(one, folder / "export", rank)
    one.close()
    return seen


def adapters_in_bfloat16(learner: Any, folder: Path, rank: int) -> tuple[list[dict], dict]:
    """Metrics of three steps with the KL penalty towards the base, and the weights."""
    one = learner(stage=2, dtype="bfloat16", lora=LORA, algorithm=SEVERAL["algorithm"])
    metrics = [one.train(batch(0), version=0).metrics for _ in range(3)]
    weights = exported(one, folder / "export", rank)
    one.close()
    return metrics, weights


def continued(learner: Any, changes: dict[str, Any], folder: Path, rank: int) -> tuple[dict, ...]:
    """Weights after a step, those that the checkpoint behind it holds, those after a second step, and those after one
    in a new learner that has loaded the checkpoint."""
    one = learner(**changes)
    one.train(batch(0), version=0)
    one.save(folder / "checkpoint")
    assert one.engine.zero_optimization_stage() in saved_stages(folder / "checkpoint" / CHECKPOINT_TAG)
    saved = exported(one, folder / "export", rank)
    read = checkpoint_weights(folder / "checkpoint") if rank == 0 else {}
    one.train(batch(1), version=1)
    uninterrupted = exported(one, folder / "export", rank)
    one.close()
    return saved, read, uninterrupted, loaded_and_trained(learner, changes, folder, folder, rank)[1]


def refused_stage(learner: Any, own: int, written: int, folder: Path) -> str:
    """What loading files of another stage ends with, before anything in them is read."""
    files = folder / f"of stage {written}" / CHECKPOINT_TAG
    files.mkdir(parents=True, exist_ok=True)
    for name in FILES[written]:
        (files / name).touch()
    one = learner(stage=own)
    with pytest.raises(ValueError, match="the stage must stay") as refused:
        one.load(files.parent)
    one.close()
    return str(refused.value)


def adapters_continued(learner: Any, changes: dict[str, Any], folder: Path, rank: int) -> tuple[dict, ...]:
    """Weights of two steps in one go, and with a save and a load in a new learner in between; those when it saved, and
    those of the model that is made of what it saved."""
    kept = folder / f"adapters {changes['stage']}"
    one = learner(**changes)
    one.train(batch(0), version=0)
    one.save(kept / "checkpoint")
    saved = exported(one, folder / "export", rank)
    made = model_of(kept / "checkpoint", folder) if rank == 0 else {}
    one.train(batch(1), version=1)
    uninterrupted = exported(one, folder / "export", rank)
    one.close()
    return uninterrupted, loaded_and_trained(learner, changes, kept, folder, rank)[1], saved, made


def model_of(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    base = ResolvedModel(str(folder / "model"), "the base", "", (), 512, "float32")
    write_checkpoint_model(checkpoint, base, False, checkpoint / "model")
    return load_file(checkpoint / "model" / "model.safetensors")


def loaded_and_trained(
    learner: Any, changes: dict[str, Any], checkpoint: Path, folder: Path, rank: int
) -> tuple[dict, dict, int]:
    """Weights of a new learner that has loaded a checkpoint, those after another step, and the steps that it counts."""
    one = learner(**changes)
    one.load(checkpoint / "checkpoint")
    loaded = exported(one, folder / "export", rank)
    one.train(batch(1), version=1)
    trained = exported(one, folder / "export", rank)
    steps = one.steps_done
    one.close()
    return loaded, trained, steps


def interrupted(
    learner: Any, stage: int, folder: Path, rank: int, after: int = 1, **changes: Any
) -> tuple[str, int, dict, dict]:
    """A step that is interrupted when forward pass number ``after`` is through, so inside its backward pass; a save."""
    one = learner(stage=stage, budget=10_000, **changes)
    one.train(batch(0), version=0)
    before = exported(one, folder / "export", rank)
    layers = next(module for module in one.engine.module.modules() if isinstance(module, torch.nn.ModuleList))
    passes = iter(range(1, 100))
    layers[-1].register_forward_hook(lambda *_: one.interrupt() if next(passes) == after else None)
    error = "none"
    try:
        one.train(batch(1), version=1)
    except InterruptedError as interrupt:
        error = str(interrupt)
    one.save(folder / f"interrupted{stage}")
    one.close()
    other = learner(stage=stage)
    other.load(folder / f"interrupted{stage}")
    steps, after = other.steps_done, exported(other, folder / "export", rank)
    other.close()
    return error, steps, before, after


def not_finite(learner: Any, changes: dict[str, Any], folder: Path, rank: int) -> tuple[Any, int, dict, dict]:
    """What a batch with an infinite loss gives, steps and weights right after it, and weights after a good batch."""
    one = learner(**changes)
    bad = batch(0)
    bad[0] = TrainRollout("huge", 0, bad[0].prompt_token_ids, (1,) * 8, (-3.0,) * 8, (0,) * 8, (True,) * 8, 3e38)
    result = one.train([bad[0], *(r for r in bad[1:] if r.group == 0)], version=0)
    steps, untouched = one.steps_done, exported(one, folder / "export", rank)
    one.train(batch(0), version=0)
    stepped = exported(one, folder / "export", rank)
    one.close()
    return result, steps, untouched, stepped


def streamed_not_finite(learner: Any, stage: int, folder: Path, rank: int) -> tuple[Any, dict, dict]:
    """A loss that is infinite in the first part of a batch: the result, weights after it, and after a good batch."""
    one = learner(stage=stage)
    first = batch(0)[0]
    huge = TrainRollout("huge", 0, first.prompt_token_ids, (1,) * 8, (-3.0,) * 8, (0,) * 8, (True,) * 8, 3e38)
    one.accumulate([huge], version=0)
    result = one.train([r for r in batch(0) if r.group > 0], version=0)
    untouched = exported(one, folder / "export", rank)
    streamed(one, batch(0))
    stepped = exported(one, folder / "export", rank)
    one.close()
    return result, untouched, stepped


def drift(learner: Any, dtype: str, folder: Path, rank: int) -> dict[str, torch.Tensor]:
    one = learner(dtype=dtype, optimizer=OptimizerConfig(learning_rate=2e-5))
    for _ in range(20):
        one.train(batch(), version=0)
    weights = exported(one, folder / "export", rank)
    one.close()
    return weights


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
