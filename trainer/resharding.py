"""A learner's checkpoint on another number of ranks: the parts of all its ranks become those of the new ones.

DeepSpeed 0.19.8 loads a ZeRO checkpoint on as many ranks as wrote it only; its way round that, universal checkpoints,
writes every weight and moment to the disk once more, beforehand. Here each rank reads the files that are there (mapped,
not copied), cuts out its own part, and hands it to DeepSpeed in the form that a checkpoint of its own would have.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter that is as large as the parameter itself."""
Shapes = Sequence[Mapping[str, Sequence[int]]]
"""The shape of every parameter by its name, in the order in which they stand, of each group of a learner."""


def shard_files(folder: Path) -> list[Path]:
    """DeepSpeed's files with the parts of the optimizer, by rank; none at ZeRO stage 0, where nothing is in parts."""
    found = {}
    for path in folder.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"):
        if match := re.search(r"zero_pp_rank_(\d+)_", path.name):
            found[int(match[1])] = path
    return [found[rank] for rank in sorted(found)]


def load_on_other_ranks(engine: Any, folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Load the checkpoint in ``folder`` into a DeepSpeed engine of ``ranks`` ranks that did not write it; what was
    saved beside it. A collective.

    It must be of a stage that keeps its parts alike: :func:`trainer.zero_files.check_stage`.
    """
    saved = [_load(path)["optimizer_state_dict"] for path in shard_files(folder)]
    of_weights = sorted(folder.glob("*mp_rank_00_model_states.pt"))[0]
    model = _load(of_weights)
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        optimizer.checkpoint_event_prologue()
        part = parameter_parts(saved, model["param_shapes"], engine._get_zero_param_shapes(), rank, ranks)
        optimizer.load_state_dict(_at(rank, part), load_optimizer_states=True)
        optimizer.checkpoint_event_epilogue()
    else:
        engine.module.load_state_dict(model["module"])
        # What DeepSpeed's optimizer of bfloat16 at stage 1 calls its parts, and what that of all else does.
        own = getattr(optimizer, "fp32_groups_flat_partition", None) or optimizer.single_partition_of_fp32_groups
        part = flat_parts(saved, model["param_shapes"], [partition.numel() for partition in own], rank)
        optimizer.load_state_dict(_at(rank, part), load_optimizer_states=True, load_from_fp32_weights=True)
    engine.global_steps, engine.skipped_steps = model["global_steps"], model["skipped_steps"]
    return dict(model)


def flat_parts(saved: Sequence[Mapping[str, Any]], shapes: Shapes, sizes: Sequence[int], rank: int) -> dict[str, Any]:
    """What rank ``rank`` would have saved at stage 1 or 2, if its parts had the ``sizes``, one a group.

    The parameters of a group stand in one row, padded at its end, of which each rank has an equal piece.
    """
    base = saved[0]["base_optimizer_state"]
    masters: list[Tensor] = []
    states: dict[int, dict[str, Any]] = {}
    for group, size in enumerate(sizes):
        numel = sum(_numel(shape) for shape in shapes[group].values())

        def part(pieces: Iterable[Tensor], numel: int = numel, size: int = size) -> Tensor:
            return _cut(pieces, rank * size, size, numel)

        masters.append(part(one["single_partition_of_fp32_groups"][group].detach() for one in saved))
        of_ranks = [one["base_optimizer_state"]["state"].get(group) for one in saved]
        if all(of_ranks):
            states[group] = {**of_ranks[0], **{key: part(one[key] for one in of_ranks) for key in MOMENTS}}
    return {
        **saved[0],
        "single_partition_of_fp32_groups": masters,
        "base_optimizer_state": {**base, "state": states},
    }


def parameter_parts(
    saved: Sequence[Mapping[str, Any]], shapes: Shapes, new_shapes: Shapes, rank: int, ranks: int
) -> dict[str, Any]:
    """What rank ``rank`` of ``ranks`` would have saved at stage 3, with its parameters in the groups of ``new_shapes``.

    Each rank has an equal piece of each parameter, padded at the parameter's end.
    """
    places = _places(shapes, len(saved))

    def part(name: str, key: str) -> Tensor:
        group, start, length, numel = places[name]
        pieces = (_flat(one, group, key)[start : start + length] for one in saved)
        own = -(-numel // ranks)
        return _cut(pieces, rank * own, own, numel)

    optimizer = saved[0]["optimizer_state_dict"]
    masters = [torch.cat([part(name, "fp32") for name in group]) for group in new_shapes]
    states = {}
    if optimizer["state"]:
        step = {key: value for key, value in optimizer["state"][0].items() if key not in MOMENTS}
        for number, group in enumerate(new_shapes):
            moments = {key: torch.cat([part(name, key) for name in group]) for key in MOMENTS}
            states[number] = {**step, **moments}
    (of_all,) = optimizer["param_groups"]
    return {
        **saved[0],
        "fp32_flat_groups": masters,
        "optimizer_state_dict": {"state": states, "param_groups": [{**of_all, "params": list(range(len(new_shapes)))}]},
    }


def _places(shapes: Shapes, ranks: int) -> dict[str, tuple[int, int, int, int]]:
    """Where each parameter stands in the flat tensors of each rank: group, start, length there, and its whole size."""
    places = {}
    for number, group in enumerate(shapes):
        lengths = [-(-_numel(shape) // ranks) for shape in group.values()]
        starts = itertools.accumulate(lengths, initial=0)
        for (name, shape), start, length in zip(group.items(), starts, lengths, strict=False):
            places[name] = (number, start, length, _numel(shape))
    return places


def _flat(saved: Mapping[str, Any], group: int, key: str) -> Tensor:
    tensor = saved["fp32_flat_groups"][group] if key == "fp32" else saved["optimizer_state_dict"]["state"][group][key]
    flat: Tensor = tensor.detach()
    return flat


def _cut(pieces: Iterable[Tensor], start: int, size: int, numel: int) -> Tensor:
    """``size`` elements from ``start`` on of the pieces in a row, of which ``numel`` count; zeros behind those.

    What lies outside is never touched: a rank has room for its part, not for the whole model.
    """
    stop, at = min(start + size, numel), 0
    own: list[Tensor] = []
    for piece in pieces:
        own.append(piece[max(start - at, 0) : max(stop - at, 0)])
        at += piece.numel()
    part = torch.cat(own)
    return torch.nn.functional.pad(part, (0, size - part.numel()))


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _at(rank: int, part: Mapping[str, Any]) -> list[Any]:
    """Where DeepSpeed looks for the part of a rank: in a list of those of all ranks."""
    return [None] * rank + [part]


def _load(path: Path) -> Any:
    # Written by the run itself, and unpickled as DeepSpeed does.
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
