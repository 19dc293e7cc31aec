"""What the processes of ``test_learner.py`` do: every scenario of a number of ranks, one after another.

All in the same processes, because starting them is what takes time. The first rank writes down what the tests compare.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import learner_spec
from tests.trainer.learner_files import FILES
from tests.trainer.plain_loop import EPSILON, batch
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
