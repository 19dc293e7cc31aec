"""What is asked of the library reasoning-gym. Imports it, and runs in a process of its own.

Several of its scorers evaluate an answer as Python or hand it to sympy (``eval`` in ``n_queens`` and ``spiral_matrix``,
``parse_expr`` in ``countdown``): :mod:`recipes.bounded` bounds what that can cost. A row is named by where it came
from, and generated again to be scored, because what the library keeps beside it is not always something JSON holds.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
import random
from typing import Any

import numpy as np
from reasoning_gym.factory import DATASETS, create_dataset
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

SET_BY_RUN = ("seed", "size")
"""Fields of every task's configuration that follow from the run's."""


EXAMPLES = 3
"""Rows that a prompt of the style ``examples`` shows. SmolLM2-135M wrote the tags in 3 of 32 answers with one of them,
in 29 of 32 with three."""
TRIES = 4
"""Rows that are generated at most for each that is wanted: of small tasks many are the same."""


def generate(
    task: str, config: dict[str, Any], seed: int, train_rows: int, eval_rows: int, style: str
) -> dict[str, Any]:
    """``train``, ``eval``: rows with different questions; ``examples``: some more; ``system``: the prompt of ``style``.

    Where that cannot be, ``problem`` says why, for people. The same arguments give the same rows in every process.
    """
    if found := _problem(task, config, style):
        return {"problem": found}
    wanted = train_rows + eval_rows
    size = TRIES * wanted + EXAMPLES
    origin = {"task": task, "config": config, "seed": seed, "size": size}
    try:
        _dataset(json.dumps(origin))
    except Exception as error:  # whatever its own checks and its constructor raise
        return {"problem": f"data.options.config: {task} refuses {config}: {type(error).__name__}: {error}"}
    rows: dict[str, dict[str, Any]] = {}
    for index in range(size):
        if len(rows) == wanted + EXAMPLES:
            break
        try:
            entry = _entry(json.dumps(origin), index)
        except Exception as error:  # whatever the task raises
            return {"problem": f"{task} cannot generate row {index} with {config}: {type(error).__name__}: {error}"}
        rows.setdefault(entry["question"], _row(entry, {**origin, "index": index}))
    if len(rows) < wanted + EXAMPLES:
        return {
            "problem": f"{task} has only {max(0, len(rows) - EXAMPLES)} different rows of the {wanted} asked for; "
            "lower data.options.train_rows or eval_rows, or make the task larger with data.options.config"
        }
    examples, others = [*rows.values()][:EXAMPLES], [*rows.values()][EXAMPLES:]
    return {
        "train": others[:train_rows],
        "eval": others[train_rows:],
        "examples": examples,
        "system": SYSTEM_PROMPTS.get(style, ""),
    }


def score(origin: dict[str, Any], question: str, completion: str) -> float:
    """What the task's own scorer says of the answer in ``completion``: usually from 0 to 1.

    Raises ``ValueError`` when the row that ``origin`` names is not the one with this ``question``.
    """
    of, index = {key: value for key, value in origin.items() if key != "index"}, origin["index"]
    entry = _entry(json.dumps(of), index)
    if entry["question"] != question:
        raise ValueError(f"row {index} of {origin['task']} is another one than when it was asked")
    dataset = _dataset(json.dumps(of))
    return float(dataset.score_answer(extract_answer(completion), copy.deepcopy(entry)))  # a scorer may change it


def _problem(task: str, config: dict[str, Any], style: str) -> str | None:
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(DATASETS))}"
        return f"data.options.task is {task!r}, and reasoning_gym has no such task; {hint}"
    known = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in SET_BY_RUN]
    for key in config:
        if key in SET_BY_RUN:
            return f"data.options.config.{key}: the run sets it, from `seed`, data.options.train_rows and eval_rows"
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else "."
            return f"data.options.config: {task} has no key {key!r}{hint} There are {', '.join(known) or 'none'}"
    styles = (*SYSTEM_PROMPTS, "examples")
    if style not in styles:
        return f"data.options.prompt is {style!r}; choose from {', '.join(styles)}"
    return None


@functools.lru_cache(maxsize=64)
def _dataset(origin: str) -> Any:
    of = json.loads(origin)
    _seed_global_generators(of["seed"])
    return create_dataset(of["task"], **of["config"], seed=of["seed"], size=of["size"])


@functools.lru_cache(maxsize=64)
def _entry(origin: str, index: int) -> dict[str, Any]:
    dataset = _dataset(origin)
    # Some tasks draw from the generators that a process has one of, besides the one that they seed.
    _seed_global_generators(json.loads(origin)["seed"] + index)
    entry: dict[str, Any] = dataset[index]
    return entry


def _seed_global_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _row(entry: dict[str, Any], origin: dict[str, Any]) -> dict[str, Any]:
    metadata = json.loads(json.dumps(entry.get("metadata"), default=str, skipkeys=True))
    return {"question": entry["question"], "answer": entry["answer"], "metadata": metadata, "origin": origin}
