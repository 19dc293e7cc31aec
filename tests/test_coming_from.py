"""The page for people who come from another trainer names only keys of ours that exist, with values that they take."""

import re

import pytest

from tests.pages import ROOT
from trainer.allowed import problem
from trainer.checks import all_keys
from trainer.help import config_groups

PAGE = ROOT / "docs" / "coming-from.md"
TRAINERS = ("TRL", "verl", "SkyRL", "AReaL", "PipelineRL", "slime", "prime-rl")


def rows(trainer: str) -> list[list[str]]:
    """The cells of the trainer's table, its head left out."""
    section = PAGE.read_text().split(f"\n## {trainer}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    head = [cell.strip() for cell in lines[0]]
    assert head == [trainer, "Midflight", ""]
    return [[cell.strip() for cell in line] for line in lines[2:]]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_key_of_ours_exists_and_takes_the_value_that_stands_behind_it(trainer):
    for theirs, ours, _ in rows(trainer):
        keys = re.findall(r"`([^`]+)`", ours)
        assert keys, f"{theirs} has no key of ours"
        for key, _, value in (text.partition("=") for text in keys):
            if value and key in config_groups():
                assert value in config_groups()[key], f"{key}={value}"
                continue
            assert key in all_keys(), f"{theirs}: {key}"
            typed = int(value) if value.isdecimal() else value
            assert not value or problem(key, typed) is None, f"{key}={value}"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_section_says_which_file_at_which_commit_was_looked_at(trainer):
    section = PAGE.read_text().split(f"\n## {trainer}\n")[1].split("\n## ")[0]
    assert re.search(r"`[\w/.-]+\.(py|yaml|md|toml)`\s+at\s+(commit\s+)?`[0-9a-f]{7}`", section)


def test_every_row_names_something_of_theirs():
    for trainer in TRAINERS:
        assert all("`" in theirs or "weights" in theirs or "environments" in theirs for theirs, _, _ in rows(trainer))
