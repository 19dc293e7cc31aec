"""Which rollouts a page shows, and what of them: a few that say something, of steps spread over the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.report.read import Run
from trainer.report.series import rounded
from trainer.report.token_texts import TokenTexts
from trainer.watch.read_folder import json_lines, number

STEPS = 8
"""Steps of which rollouts are shown."""
READ_BYTES = 48 << 20
"""Bytes of rollouts that are read of a run at most: a file of a large batch is looked into, not read to its end."""
TOKENS = 1200
"""Tokens that are shown of one rollout: its beginning, and a third of them its end."""
PROMPT_CHARACTERS = 3000

Row = Mapping[str, Any]


def choose_rollouts(run: Run, texts: TokenTexts | None, count: int) -> list[dict[str, Any]]:
    """Up to ``count`` rollouts of the run for the page, by step. Without ``texts`` their tokens are shown by ids."""
    steps = spread(sorted(run.rollout_files), STEPS)
    shown: list[dict[str, Any]] = []
    for place, step in enumerate(steps):
        share = (count - len(shown)) // (len(steps) - place)
        rows = _rows(run.rollout_files[step], READ_BYTES // len(steps)) if share else []
        shown += [view(row, reasons, texts) for row, reasons in interesting(rows, share)]
    return shown


def spread(steps: Sequence[int], count: int) -> list[int]:
    """``count`` of ``steps``, evenly spaced, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def interesting(rows: Sequence[Row], count: int) -> list[tuple[Row, list[str]]]:
    """Up to ``count`` of ``rows`` with the reasons for taking them: the first by each reason, then the second, ..."""
    different = list({tuple(row["response_token_ids"]): row for row in reversed(rows)}.values())[::-1]
    rows = different if len(different) >= count else rows
    scored = sorted(filter(_has_reward, rows), key=_reward)
    same = bool(scored) and _reward(scored[0]) == _reward(scored[-1])
    orders: list[tuple[str, list[Row]]] = [
        ("most versions", _first(rows, lambda row: -_versions(row), lambda row: _versions(row) > 1)),
        *([("", scored)] if same else [("highest reward", scored[::-1]), ("lowest reward", scored)]),
        ("truncated", _first(rows, lambda row: -_versions(row), lambda row: row["finish_reason"] == "length")),
        ("with observations", _first(rows, lambda row: 0, lambda row: bool(row.get("observations")))),
        ("without a reward", _first(rows, lambda row: 0, lambda row: not _has_reward(row))),
    ]
    chosen: dict[int, tuple[Row, list[str]]] = {}
    for place in range(len(rows)):
        for reason, order in orders:
            if place < len(order):
                known = id(order[place]) in chosen
                if not known and len(chosen) >= count:
                    continue
                reasons = chosen.setdefault(id(order[place]), (order[place], []))[1]
                if place == 0 and reason:
                    reasons.append(reason)
    return list(chosen.values())


def view(row: Row, reasons: list[str], texts: TokenTexts | None) -> dict[str, Any]:
    """What the page holds of a rollout; columns of tokens are short, versions and marks are runs of equal ones."""
    ids, versions, logprobs, mask = (row[name] for name in ("response_token_ids", "versions", "logprobs", "loss_mask"))
    pieces: Sequence[str | int] = texts(ids) if texts else ids
    head, tail = _ends(len(ids))
    kept = [*range(head), *range(len(ids) - tail, len(ids))]
    observed = row.get("observations") or ()
    kinds = [_kind(any(start <= place < end for start, end in observed), bool(mask[place])) for place in kept]
    return {
        "step": row["step"],
        "id": str(row.get("rollout_id", "")),
        "reasons": reasons,
        "reward": rounded(number(row["reward"])),
        "parts": {str(name): rounded(number(value)) for name, value in (row.get("reward_parts") or {}).items()},
        "advantage": rounded(number(row["advantage"])),
        "finish": str(row["finish_reason"]),
        "length": len(ids),
        "prompt": str(row.get("prompt", ""))[-PROMPT_CHARACTERS:],
        "text": None if texts else str(row.get("text", ""))[:PROMPT_CHARACTERS],
        "pieces": [pieces[position] for position in kept],
        "logprobs": [rounded(number(logprobs[position]), 3) for position in kept],
        "versions": runs(versions[position] for position in kept),
        "kinds": runs(kinds),
        "left_out": [head, len(ids) - len(kept)],
    }


def runs(values: Iterable[Any]) -> list[tuple[Any, int]]:
    """Equal neighbours as (value, how many)."""
    return [(value, len(list(equal))) for value, equal in itertools.groupby(values)]


def _rows(path: Path, size: int) -> list[Row]:
    """The rollouts of a file, so many bytes of it; lines that are none are passed over."""
    rows: list[Row] = []
    read = 0
    for row in json_lines(path):
        if row is not None and _complete(row):
            rows.append(row)
            read += 40 * len(row["response_token_ids"]) + len(str(row.get("prompt", "")))
        if read > size:
            break
    return rows


def _complete(row: Row) -> bool:
    """Whether a line holds a rollout as runs write them: what somebody else wrote into the file must not end here."""
    columns: list[Any] = [row.get(name) for name in ("response_token_ids", "versions", "logprobs", "loss_mask")]
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return False
    if not all(isinstance(value, int) and 0 <= value < 1 << 31 for column in columns[:2] for value in column):
        return False
    ranges, parts = row.get("observations") or [], row.get("reward_parts") or {}
    pairs = isinstance(ranges, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(end, int) for end in pair) for pair in ranges
    )
    known = isinstance(row.get("step"), int) and {"reward", "advantage", "finish_reason"} <= row.keys()
    return pairs and known and isinstance(parts, dict)


def _first(rows: Sequence[Row], order: Callable[[Row], float], fits: Callable[[Row], bool]) -> list[Row]:
    return sorted((row for row in rows if fits(row)), key=order)


def _versions(row: Row) -> int:
    return len(set(row["versions"]))


def _reward(row: Row) -> float:
    return number(row["reward"]) or 0.0


def _has_reward(row: Row) -> bool:
    return number(row["reward"]) is not None


def _kind(observed: bool, trained: bool) -> str:
    if observed:
        return "observed"
    return "trained" if trained else "masked"


def _ends(length: int) -> tuple[int, int]:
    """Tokens to show of the beginning and of the end."""
    return (length, 0) if length <= TOKENS else (TOKENS - TOKENS // 3, TOKENS // 3)
