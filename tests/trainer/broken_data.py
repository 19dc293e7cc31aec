"""Files of rows that cannot work: cut, mutated, of another encoding or format, with rows of another shape."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.trainer.broken import Broken

ROWS = tuple(
    {"question": f"Ada has {n} pens and gets 3 more. How many?", "answer": f"{n}+3={n + 3}\n#### {n + 3}"}
    for n in range(1, 7)
)
LINES = tuple(json.dumps(row) for row in ROWS)
TEXT = "\n".join(LINES) + "\n"
"""A file that is fine."""


def arguments(*overrides: str) -> tuple[str, ...]:
    """A recipe that reads files, with the tiny model."""
    return ("recipe=gsm8k_fully_async", "hardware=cpu", "model.path={model}", "sampling.max_tokens=64", *overrides)


def data(what: str, content: str | bytes, *names: str, name: str = "rows.jsonl") -> Broken:
    """A data file; what is named is the file unless said."""
    path = f"{{folder}}/{name}"
    return Broken(what, arguments(f"data.path={path}"), names or (path,), {name: content})


def other(what: str, make: Callable[[Path], None] | None = None, path: str = "{folder}/rows") -> Broken:
    """A path at which there is no file."""
    return Broken(what, arguments(f"data.path={path}"), ("data.path", path[:40]), make=make)


def with_row(what: str, row: object, *names: str) -> Broken:
    """A file whose third row is ``row``."""
    lines = [*LINES[:2], json.dumps(row), *LINES[3:]]
    return data(what, "\n".join(lines), "{folder}/rows.jsonl:3", *names)


def with_line(what: str, line: str | bytes, *, ends: str = "\n", start: bytes = b"") -> Broken:
    """A file whose fourth line is ``line``."""
    lines = [text.encode() for text in LINES]
    lines[3] = line.encode() if isinstance(line, str) else line
    return data(what, start + ends.encode().join(lines), "{folder}/rows.jsonl:4")


BOM = b"\xef\xbb\xbf"
ROW = ROWS[2]

CUT = (
    data("an empty file", ""),
    data("a file of blank lines", "\n \n\t\n"),
    data("a file of a byte order mark", BOM),
    data("a file of Windows line ends", "\r\n\r\n"),
    data("a file cut in its last line", TEXT[:-20], "{folder}/rows.jsonl:6"),
    with_line("a file cut in the middle", LINES[3][: len(LINES[3]) // 2]),
    with_line("a cut line behind a byte order mark", LINES[3][:-1], start=BOM),
    with_line("a cut line between Windows line ends", LINES[3][:-1], ends="\r\n"),
    with_line("a cut line behind both", LINES[3][:-1], ends="\r\n", start=BOM),
    with_line("two files in one, each with a byte order mark", BOM + LINES[3].encode()),
    with_line("a text broken by a line end", LINES[3].replace("pens ", "pens\n")),
    with_line("a NUL between two lines", b"\0" + LINES[3].encode()),
    with_line("a NUL in a text", LINES[3].replace("pens", "p\0ns")),
    with_line("two objects in a line", LINES[3] * 2),
    with_line("lists in lists in lists", "[" * 100_000 + "]" * 100_000),
    with_line("a number of 5,000 digits", f'{{"question": {"9" * 5000}}}'),
)

ENCODINGS = (
    data("a file in Latin-1", TEXT.replace("pens", "Stäbe").encode("latin-1")),
    data("a file in UTF-16", TEXT.encode("utf-16")),
    data("a file in UTF-16 without a byte order mark", TEXT.encode("utf-16-le")),
    data("a file in UTF-32", TEXT.encode("utf-32")),
    data("a compressed file", gzip.compress(TEXT.encode(), mtime=0)),
    data("half a character in a question", TEXT.replace("pens", "\\ud800", 1), "row 1", "surrogate"),
)

FORMATS = (
    data("a list of all rows", json.dumps(ROWS, indent=1), "{folder}/rows.json:1", name="rows.json"),
    data("a table of commas", "question,answer\nwhy?,five\n", "{folder}/rows.csv", name="rows.csv"),
    data("a table of a head alone", "question,answer\n", "{folder}/rows.csv", name="rows.csv"),
    data("an empty table", "", "{folder}/rows.csv", name="rows.csv"),
    data("a cut Parquet file", b"PAR1\x15\x04\x15\x20", "{folder}/rows.parquet", name="rows.parquet"),
    data("an empty Parquet file", b"", "{folder}/rows.parquet", name="rows.parquet"),
    with_line("a row as Python writes it", str(ROWS[3])),
)

SHAPES = (
    with_row("a list for a row", ["why?", "#### 1"], "list"),
    with_row("a text for a row", "why?", "str"),
    with_row("null for a row", None),
    with_row("a row without a question", {"answer": ROW["answer"]}, "'question'"),
    with_row("a row without an answer", {"question": ROW["question"]}, "'answer'"),
    with_row("a row with a mistyped column", {"Question": "why?", "answer": "#### 1"}, "'question'", "Question"),
    with_row("a question of null", ROW | {"question": None}, "'question'"),
    with_row("a question that is a number", ROW | {"question": 5}, "'question'"),
    with_row("a question that is a list", ROW | {"question": ["why?"]}, "'question'"),
    with_row("a question of spaces", ROW | {"question": "  "}, "'question'"),
    with_row("an answer that is NaN", ROW | {"answer": float("nan")}, "'answer'"),
    with_row("an answer without its mark", ROW | {"answer": "5"}, "####"),
    with_row("an answer without a number", ROW | {"answer": "#### five"}, "####"),
    data("a column that hides the texts", json.dumps(ROW | {"completions": "x"}), "'completions'"),
    data("a very long line", json.dumps(ROW | {"question": "why " * 50_000}), "row 1", "engine.max_model_len"),
)

PLACES = (
    other("a file that is not there"),
    other("a folder", lambda folder: (folder / "rows").mkdir()),
    other("a pipe", lambda folder: os.mkfifo(folder / "rows")),
    other("a link to itself", lambda folder: (folder / "rows").symlink_to(folder / "rows")),
    other("a device", path="/dev/zero"),
    other("a name that is too long", path="/" + "a" * 3000),
    other("a home of nobody", path="~nobody_at_all/rows.jsonl"),
    Broken(
        "a broken file of held-out rows",
        arguments("data.path={folder}/rows.jsonl", "data.eval_path={folder}/test.jsonl", "evaluation.every=1"),
        ("{folder}/test.jsonl:2",),
        {"rows.jsonl": TEXT, "test.jsonl": f"{LINES[0]}\n{{\n"},
    ),
    Broken(
        "a broken file of a mixture",
        arguments("data.mixture=[{path: '{folder}/rows.jsonl'},{path: '{folder}/hard.jsonl'}]"),
        ("data set 'hard'", "{folder}/hard.jsonl:1"),
        {"rows.jsonl": TEXT, "hard.jsonl": "{"},
    ),
)  # fmt: skip


GRAMMAR = {"a quote": ('"', ""), "a brace": ("{}", ""), "a colon": (":", ";")}
"""Characters that a line cannot do without, and what takes the place of one."""


def mutations(seed: int) -> Iterator[Broken]:
    """Without end: the file above with one character of its grammar taken out or replaced, or cut inside of a line."""
    rng = random.Random(f"broken data {seed}")
    seen = {TEXT}
    while True:
        number = rng.randrange(len(LINES))
        line, kind = LINES[number], rng.choice((*GRAMMAR, "a cut"))
        if kind == "a cut":
            changed = line[: rng.randrange(1, len(line))]
        else:
            characters, instead = GRAMMAR[kind]
            at = rng.choice([at for at, character in enumerate(line) if character in characters])
            changed = line[:at] + instead + line[at + 1 :]
        text = "\n".join([*LINES[:number], changed, *LINES[number + 1 :]])
        if text not in seen:
            seen.add(text)
            name = f"{kind} of line {number + 1}, {len(seen) - 1}"
            yield data(name, text, f"{{folder}}/rows.jsonl:{number + 1}")


DATA = (*CUT, *ENCODINGS, *FORMATS, *SHAPES, *PLACES)
