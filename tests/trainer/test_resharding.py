"""Parts of any number of ranks become those of any other. With DeepSpeed's own files: in test_learner.py."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.resharding import MOMENTS, flat_parts, parameter_parts, shard_files

RANKS = st.integers(1, 5)
SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), min_size=1, max_size=6)
KEYS = ("fp32", *MOMENTS)


def parameters(shapes: list[list[int]]) -> dict[str, dict[str, torch.Tensor]]:
    """By key and name, the number of each element telling what and where it is."""
    return {
        key: {
            f"p{number}": 1000.0 * place + 100 * number + torch.arange(1.0, 1.0 + torch.Size(shape).numel())
            for number, shape in enumerate(shapes)
        }
        for place, key in enumerate(KEYS)
    }


def flat_checkpoint(values: dict[str, dict[str, torch.Tensor]], ranks: int, padded: bool) -> list[dict[str, Any]]:
    """What ``ranks`` ranks save at stage 1 or 2. ``padded``: as the bfloat16 optimizer does, the masters too."""
    size = -(-sum(tensor.numel() for tensor in values["fp32"].values()) // (2 * ranks)) * 2
    rows = {key: torch.cat(list(of.values())) for key, of in values.items()}
    numel = rows["fp32"].numel()
    full = {key: torch.nn.functional.pad(row, (0, size * ranks - numel)) for key, row in rows.items()}

    def piece(key: str, rank: int, end: int) -> torch.Tensor:
        return full[key][rank * size : max(rank * size, min((rank + 1) * size, end))].clone()

    return [
        {
            "single_partition_of_fp32_groups": [piece("fp32", rank, size * ranks if padded else numel)],
            "base_optimizer_state": {
                "state": {0: {"step": 3, **{key: piece(key, rank, size * ranks) for key in MOMENTS}}},
                "param_groups": [{"lr": 0.1, "params": [0]}],
            },
            "clip_grad": 1.0,
        }
        for rank in range(ranks)
    ]


def parameter_checkpoint(
    values: dict[str, dict[str, torch.Tensor]], ranks: int, groups: list[list[str]]
) -> list[dict[str, Any]]:
    """What ``ranks`` ranks save at stage 3 with the parameters in ``groups``."""

    def flat(key: str, rank: int, group: list[str]) -> torch.Tensor:
        pieces = []
        for name in group:
            size = -(-values[key][name].numel() // ranks)
            row = torch.nn.functional.pad(values[key][name], (0, size * ranks - values[key][name].numel()))
            pieces.append(row[rank * size : (rank + 1) * size])
        return torch.cat(pieces)

    return [
        {
            "fp32_flat_groups": [flat("fp32", rank, group) for group in groups],
            "optimizer_state_dict": {
                "state": {
                    number: {"step": 3, **{key: flat(key, rank, group) for key in MOMENTS}}
                    for number, group in enumerate(groups)
                },
                "param_groups": [{"lr": 0.1, "params": list(range(len(groups)))}],
            },
            "overflow": False,
        }
        for rank in range(ranks)
    ]


def same(found: Any, wanted: Any) -> bool:
    """Equal, tensors by their values."""
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


@settings(deadline=None)  # a busy machine is no fault of the code
@given(SHAPES, RANKS, RANKS, st.booleans())
def test_flat_parts_are_what_the_new_ranks_would_have_saved_themselves(shapes, before, after, padded):
    values = parameters(shapes)
    saved = flat_checkpoint(values, before, padded)
    named = [{f"p{number}": shape for number, shape in enumerate(shapes)}]
    for rank, wanted in enumerate(flat_checkpoint(values, after, padded=True)):
        size = wanted["single_partition_of_fp32_groups"][0].numel()
        assert same(flat_parts(saved, named, [size], rank), wanted)


@settings(deadline=None)
@given(SHAPES, RANKS, RANKS, st.data())
def test_parts_of_each_parameter_are_what_the_new_ranks_would_have_saved_themselves(shapes, before, after, data):
    """The groups may be others: how many parameters go into one depends on the ranks."""
    values = parameters(shapes)
    names = [f"p{number}" for number in range(len(shapes))]

    def grouped() -> list[list[str]]:
        cut = data.draw(st.integers(1, len(names)))
        return [group for group in (names[:cut], names[cut:]) if group]

    old, new = grouped(), grouped()
    by_name = dict(zip(names, shapes, strict=True))
    shapes_of = [[{name: by_name[name] for name in group} for group in groups] for groups in (old, new)]
    saved = parameter_checkpoint(values, before, old)
    for rank, wanted in enumerate(parameter_checkpoint(values, after, new)):
        assert same(parameter_parts(saved, *shapes_of, rank, after), wanted)


def test_a_checkpoint_from_before_the_first_update_has_no_moments():
    shapes = [[3], [2, 2]]
    saved = flat_checkpoint(parameters(shapes), 2, padded=False)
    for one in saved:
        one["base_optimizer_state"]["state"] = {}
    part = flat_parts(saved, [{"p0": [3], "p1": [2, 2]}], [8], 0)
    assert part["base_optimizer_state"]["state"] == {}
    assert part["single_partition_of_fp32_groups"][0].numel() == 8


def test_a_rank_reads_its_own_part_and_never_has_the_whole_model_in_memory():
    """The row here is one element that looks like 2 ** 51 of them: nobody has the memory to copy it."""
    length = 2**50
    pieces = [torch.full((1,), value).expand(length) for value in (1.0, 2.0)]
    saved = [
        {
            "single_partition_of_fp32_groups": [piece],
            "base_optimizer_state": {"state": {0: {"step": 3, **dict.fromkeys(MOMENTS, piece)}}},
        }
        for piece in pieces
    ]
    # Ranks of six elements do not divide the pieces: that of the middle has four of the first and two of the second.
    rank, size = length // 6, 6
    part = flat_parts(saved, [{"p0": [2 * length]}], [size], rank)
    assert length % 6 == 4
    wanted = [1.0] * 4 + [2.0] * 2
    assert part["single_partition_of_fp32_groups"][0].tolist() == wanted
    assert all(part["base_optimizer_state"]["state"][0][key].tolist() == wanted for key in MOMENTS)


def test_files_are_in_the_order_of_ranks_not_of_names(tmp_path):
    for rank in (10, 2, 0):
        (tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    assert [path.name.split("_")[4] for path in shard_files(tmp_path)] == ["0", "2", "10"]
