"""What the names of a learner's files tell: where they are in a checkpoint, and the ZeRO stage that wrote them."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT_TAG = "learner"
"""The folder, in the learner's of a checkpoint, in which DeepSpeed writes its files."""


def saved_stages(files: Path) -> tuple[int, ...]:
    """The ZeRO stages that may have written these files, by the names that DeepSpeed 0.19.8 gives them.

    Stage 3 has the weights in parts, 1 and 2 the optimizer's state alone, and 0 nothing.
    """
    if any(files.glob("zero_pp_rank_*_model_states.pt")):
        return (3,)
    if any(files.glob("*zero_pp_rank_*_optim_states.pt")):
        return (1, 2)
    return (0,)


def check_stage(files: Path, *stages: int) -> None:
    """Raise ``ValueError`` unless one of ``stages``, those that the run may have, may have written these files."""
    saved = saved_stages(files)
    if not set(saved) & set(stages):
        raise ValueError(
            f"the learner checkpoint in {files.parent} was written with learner.zero_stage={_or(saved)}, and the run "
            f"has {_or(stages)}; the stage must stay (hardware=gpu sets 2, hardware=cluster 3): set learner.zero_stage"
        )


def _or(stages: tuple[int, ...]) -> str:
    return " or ".join(map(str, stages))
