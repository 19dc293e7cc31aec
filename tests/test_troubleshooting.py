"""Messages that docs/troubleshooting.md quotes are still what the program says."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.pages import ROOT, blocks
from trainer.watch.catalogue import unknown

PAGE = ROOT / "docs" / "troubleshooting.md"
ROOMS = ("trainer", "generator", "weight_sync", "recipes")
VARIES = "…"
QUOTES = [line for block in blocks(PAGE) if block.language == "text" for line in block.text.splitlines()]


@cache
def messages() -> list[str]:
    """Every text in the code, in pieces: what is filled in is a gap."""
    found = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(_piece(value) for value in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def _piece(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else "\0"


def is_said(quote: str) -> bool:
    """Whether one text of the code has every fixed part of the quote, in this order."""
    return any(_in_order([part.strip() for part in quote.split(VARIES)], text) for text in messages())


def _in_order(parts: list[str], text: str) -> bool:
    position = 0
    for part in parts:
        position = text.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_in_the_code(quote):
    assert any(len(part) >= 12 for part in quote.split(VARIES)), "too little of it is fixed"
    assert is_said(quote)


def test_a_message_that_nobody_writes_any_more_is_found():
    assert not is_said("the engines have all gone home, … of them")
    assert len(QUOTES) > 30


def test_every_symptom_says_what_to_do():
    sections = PAGE.read_text(encoding="utf-8").split("\n### ")[1:]
    for section in sections:
        text = section.split("\n## ")[0].split("```")[-1] if "```" in section else section
        assert len(text.split()) > 10, section.splitlines()[0]


def test_metrics_that_the_page_names_exist():
    prose = re.sub(r"```.*?```", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    families = "idle|push|staleness|mismatch|policy|completions|group|reward|engines|fairness"
    names = re.findall(rf"`((?:{families})/[\w@]+)`", prose)
    assert len(names) > 10
    assert not unknown(names)
