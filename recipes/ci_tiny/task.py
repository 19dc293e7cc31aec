"""The tiny task: some dozens of short strings to continue."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from generator.task import DataError, TaskContext, TaskData
from recipes.ci_tiny.model import CHARACTERS

TRAIN_ROWS = 48
EVAL_ROWS = 8
PROMPT_CHARACTERS = (4, 12)


class CiTiny:
    """Random strings as prompts; the reward is the share of the letter ``a`` in what follows."""

    def load(self, context: TaskContext) -> TaskData:
        """Generate the strings. Raises :class:`DataError` for a data file or an option, as it has neither."""
        for key, path in {"data.path": context.data_path, "data.eval_path": context.eval_path}.items():
            if path is not None:
                raise DataError(f"{key} is {path!r}, but ci_tiny generates its prompts; leave it unset")
        if context.options:
            raise DataError(f"data.options: no key {next(iter(context.options))!r} in this recipe; there are none")
        rng = random.Random(f"ci_tiny prompts {context.seed}")
        texts: dict[str, None] = {}
        while len(texts) < TRAIN_ROWS + EVAL_ROWS:
            length = rng.randint(*PROMPT_CHARACTERS)
            texts["".join(rng.choice(CHARACTERS) for _ in range(length))] = None
        rows = [{"start": text} for text in texts]
        return TaskData(
            rows=rows[:TRAIN_ROWS],
            source=f"{TRAIN_ROWS} generated strings",
            reason="ci_tiny has no other data",
            eval_rows=rows[TRAIN_ROWS:],
        )

    def prompt(self, row: Mapping[str, Any]) -> str:
        """The string itself."""
        return str(row["start"])

    def rewards(self) -> list[tuple[str, str, float]]:
        """One function, weight 1."""
        return [("share_of_a", "recipes.ci_tiny.reward.share_of_a", 1.0)]
