"""Rows that are made by a random sampler: all distinct, and held-out ones of another kind than those to train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from generator.task import DataError

MAX_USELESS_TRIES = 5000
"""Samples in a row that bring nothing new, after which a difficulty counts as exhausted."""

Row = dict[str, str]
Sample = tuple[str, str, Row]
"""The split that owns a row ("train" or "eval"), the text by which rows are told apart, and the row."""


def distinct_rows(sample: Callable[[], Sample | None], difficulty: Any, advice: str) -> tuple[list[Row], list[Row]]:
    """As many training and held-out rows as ``difficulty`` asks for with ``train_rows`` and ``eval_rows``.

    ``sample`` returns ``None`` where it found nothing. Raises :class:`DataError` with the ``advice`` when there are too
    few distinct rows.
    """
    wanted = {"train": difficulty.train_rows, "eval": difficulty.eval_rows}
    found: dict[str, dict[str, Row]] = {"train": {}, "eval": {}}
    useless = 0
    while useless < MAX_USELESS_TRIES and any(len(found[split]) < wanted[split] for split in wanted):
        useless += 1
        if (sampled := sample()) is None:
            continue
        split, text, row = sampled
        if len(found[split]) < wanted[split] and text not in found[split]:
            found[split][text] = row
            useless = 0
    for split, count in wanted.items():
        if len(found[split]) < count:
            raise DataError(
                f"the generated problems allow only {len(found[split])} distinct {split} rows of the {count} asked for "
                f"with {difficulty}; {advice}, or lower data.options.{split}_rows"
            )
    return list(found["train"].values()), list(found["eval"].values())
