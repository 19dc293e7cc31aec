"""Which checkpoints of adapters fit a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainer.adapter_record import AdapterRecord
from trainer.config import LoRAConfig

SETTINGS = LoRAConfig(rank=2, alpha=4.0)
RECORD = AdapterRecord(SETTINGS, "of these weights", "float32")
ALL_WEIGHTS = replace(RECORD, settings=LoRAConfig())


@pytest.mark.parametrize("record", [RECORD, ALL_WEIGHTS])
def test_a_checkpoint_fits_the_run_that_wrote_it(tmp_path: Path, record: AdapterRecord):
    record.write(tmp_path, parts=2)
    record.check(tmp_path, ranks=2)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (replace(RECORD, base="of others"), r"another base model: the weights at model\.path have changed$"),
        (replace(RECORD, base="of others", dtype="bfloat16"), r"in bfloat16, .* made with model\.dtype=float32$"),
        (
            replace(RECORD, settings=LoRAConfig(rank=4, alpha=8.0)),
            r"made with learner\.lora\.rank=2 and learner\.lora\.alpha=4\.0$",
        ),
        (ALL_WEIGHTS, r"this run trains all weights .* the checkpoint holds an adapter$"),
    ],
)
def test_a_checkpoint_of_other_adapters_or_of_another_base_is_refused_saying_what_differs(tmp_path, run, said):
    RECORD.write(tmp_path, parts=2)
    with pytest.raises(ValueError, match=said):
        run.check(tmp_path, ranks=2)


def test_a_checkpoint_of_all_weights_is_refused_where_adapters_are_trained(tmp_path: Path):
    with pytest.raises(ValueError, match=r"this run trains an adapter .* the checkpoint holds all weights$"):
        RECORD.check(tmp_path, ranks=2)


def test_a_checkpoint_in_parts_fits_as_many_ranks_and_a_whole_one_any_number(tmp_path: Path):
    RECORD.write(tmp_path, parts=0)
    RECORD.check(tmp_path, ranks=3)
    RECORD.write(tmp_path, parts=2)
    with pytest.raises(ValueError, match=r"learner\.ranks=3, and it was made with learner\.ranks=2; .* must stay"):
        RECORD.check(tmp_path, ranks=3)
