"""What the names of a learner's files tell: where they are in a checkpoint, and the ZeRO stage that wrote them."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT_TAG = "learner"
"""The folder, in the learner's of a checkpoint, in which DeepSpeed writes its files."""


def zero_stage(configured: int, dtype: str) -> int:
    """The ZeRO stage of a learner that computes in ``dtype``.

    In bfloat16 stage 0 becomes 1: DeepSpeed's stage 0 accumulates gradients in bfloat16, its stage 1 in float32.
    """
    return max(configured, 1) if dtype == "bfloat16" else configured


def saved_stages(files: Path) -> tuple[int, ...]:
    """The ZeRO stages that may have written these files, by the names that DeepSpeed 0.19.8 gives them.

    Stage 3 has the weights in parts, 1 and 2 the optimizer's state alone, and 0 nothing.
    """
    if any(files.glob("zero_pp_rank_*_model_states.pt")):
        return (3,)
    if any(files.glob("*zero_pp_rank_*_optim_states.pt")):
        return (1, 2)
    return (0,)


def check_stage(files: Path, stage: int) -> None:
    """Raise ``ValueError`` unless ``stage``, that of the run, may have written these files."""
    saved = saved_stages(files)
    if stage not in saved:
        wrote = " or ".join(map(str, saved))
        raise ValueError(
            f"the learner checkpoint in {files.parent} was written with learner.zero_stage={wrote}, and the run has "
            f"{stage}; the stage must stay (hardware=gpu sets 2, hardware=cluster 3, and with model.dtype=bfloat16 0 "
            "becomes 1): set learner.zero_stage"
        )
