"""The pages of the project as tests read them: fenced blocks, the section they stand in, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?$")
INLINE = re.compile(r"(?<!`)`((?:\.venv/bin/)?python -m [^`]+|make [^`]+|\.ci/run|scripts/\w+)`(?!`)")
"""Commands in running text: they stand alone between backticks."""
TUTORIAL = (ROOT / "docs" / "your-own-task.md", "In ten minutes")
"""A page and its section whose files and commands tests/test_tutorial.py takes."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. ``title`` is the name of the file that it shows, where it shows one."""

    page: Path
    line: int
    language: str
    title: str | None
    section: str
    """The heading of the second level above it."""
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a page. ``note`` is the comment behind it, ``section`` the heading above it."""

    page: Path
    line: int
    words: tuple[str, ...]
    note: str
    section: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line} {' '.join(self.words)}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, from the top."""
    section, opened, lines = "", None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if opened is None and line.startswith("## "):
            section = line.removeprefix("## ")
        elif opened is None and line.startswith("```"):
            match = FENCE.match(line)
            assert match, f"{page.name}:{number}: a fence has a language and perhaps a title: {line}"
            opened, lines = (number, match[1], match[2]), []
        elif opened is not None and line == "```":
            yield Block(page, opened[0], opened[1], opened[2], section, "\n".join(lines) + "\n")
            opened = None
        elif opened is not None:
            lines.append(line)
    assert opened is None, f"{page.name}: the block of line {opened} has no end"


def commands(block: Block) -> list[Command]:
    """The commands of a shell block. A command ends with its line, unless that ends with a backslash."""
    found = []
    for text in block.text.replace("\\\n", " ").splitlines():
        code, _, note = text.partition(" #")
        if code.strip() and not code.startswith("#"):
            found.append(Command(block.page, block.line, tuple(shlex.split(code)), note.strip(), block.section))
    return found


def all_commands(page: Path) -> list[Command]:
    """Every command of a page: those of its shell blocks, and those that stand in its text."""
    found = [command for block in blocks(page) if block.language == "bash" for command in commands(block)]
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.startswith("```")
        for code in [] if fenced else INLINE.findall(line):
            found.append(Command(page, number, tuple(shlex.split(code)), "", ""))
    return found
