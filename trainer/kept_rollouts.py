"""The rollouts of a checkpoint on the disk: a line of JSON each, with the names of the rows in ``rollouts/``.

``group`` numbers the groups of the file. A row with a ``reward`` is of a scored group; the others are of groups that
were being sampled: ``finish_reason`` is ``null`` where a rollout was cut in the middle. The prompt is that of the data.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from generator.rollout import Group, Prompt, Rollout, ScoredRollout
from trainer.checks import ConfigError
from trainer.groups import KeptGroups, StartedGroup
from trainer.watch.run_folder import finite, token_columns

ROLLOUTS_FILE = "rollouts.jsonl"


def write_groups(folder: Path, kept: KeptGroups) -> None:
    """Write ``rollouts.jsonl`` into ``folder``."""
    with (folder / ROLLOUTS_FILE).open("w", encoding="utf-8") as file:
        for row in _rows(kept):
            file.write(json.dumps(row, allow_nan=False) + "\n")


def read_groups(folder: Path, prompt: Callable[[int], Prompt], first_number: int) -> KeptGroups:
    """What :func:`write_groups` wrote. ``prompt`` returns a prompt of the data by its id, or raises ``KeyError``.

    Raises :class:`ConfigError` that names the file and the line when it cannot be read, or holds a rollout that breaks
    an invariant.
    """
    path = folder / ROLLOUTS_FILE
    read = 0
    scored: list[Group] = []
    started: list[StartedGroup] = []
    try:
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            read += 1
            row = json.loads(line)
            rows.append((row, _rollout(row, prompt(row["prompt_id"]))))
        for _, members in itertools.groupby(rows, key=lambda pair: pair[0]["group"]):
            group = list(members)
            first = group[0][0]
            of, version = prompt(first["prompt_id"]), first["admitted_version"]
            if "reward" in first:
                scored.append(Group(of, tuple(_scored(row, rollout) for row, rollout in group), version))
            else:
                started.append(StartedGroup(of, tuple(rollout for _, rollout in group), version))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        where = f"{path}, line {read}" if read else str(path)
        raise ConfigError(
            f"the rollouts of the checkpoint cannot be read: {where}: {type(error).__name__}: {error}. Continue from "
            "another checkpoint with `resume=PATH`"
        ) from error
    return KeptGroups(tuple(scored), tuple(started), first_number)


def _rows(kept: KeptGroups) -> Iterator[dict[str, Any]]:
    for number, group in enumerate(kept.scored):
        for item in group.rollouts:
            score = {"reward": item.reward, "reward_parts": item.reward_parts, "text": item.text}
            yield _row(number, group, item.rollout) | score | {"log": finite(item.log)}
    for number, unfinished in enumerate(kept.started, start=len(kept.scored)):
        for rollout in unfinished.rollouts:
            yield _row(number, unfinished, rollout)


def _row(number: int, group: Group | StartedGroup, rollout: Rollout) -> dict[str, Any]:
    return {
        "group": number,
        "prompt_id": group.prompt.id,
        "admitted_version": group.admitted_version,
        "rollout_id": rollout.id,
        **token_columns(rollout),
        "finish_reason": rollout.finish_reason,
        "resumes": rollout.resumes,
    }


def _rollout(row: dict[str, Any], prompt: Prompt) -> Rollout:
    return Rollout(
        id=row["rollout_id"],
        prompt_token_ids=prompt.token_ids,
        response_token_ids=tuple(row["response_token_ids"]),
        logprobs=tuple(row["logprobs"]),
        versions=tuple(row["versions"]),
        loss_mask=tuple(row["loss_mask"]),
        finish_reason=row["finish_reason"],
        resumes=row["resumes"],
        observations=tuple((start, end) for start, end in row["observations"]),
    )


def _scored(row: dict[str, Any], rollout: Rollout) -> ScoredRollout:
    return ScoredRollout(rollout, row["text"], row["reward"], row["reward_parts"], row["log"])
