"""The broken inputs that the command is held against: all that are written by hand, and as many made as are missing."""

from __future__ import annotations

from itertools import islice

from tests.trainer.broken import Broken
from tests.trainer.broken_code import CODE
from tests.trainer.broken_command_lines import COMMAND_LINES
from tests.trainer.broken_data import DATA, mutations
from tests.trainer.broken_recipes import RECIPES
from tests.trainer.broken_values import values

CONFIGURATIONS = 200
DATA_FILES = 60


def configurations(seed: int = 0, count: int = CONFIGURATIONS) -> list[Broken]:
    """``count`` configurations, those written by hand first."""
    by_hand = (*COMMAND_LINES, *RECIPES, *CODE)
    return [*by_hand, *islice(values(seed), max(0, count - len(by_hand)))][:count]


def data_files(seed: int = 0, count: int = DATA_FILES) -> list[Broken]:
    """``count`` data files, those written by hand first."""
    return [*DATA, *islice(mutations(seed), max(0, count - len(DATA)))][:count]
