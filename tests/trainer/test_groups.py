"""Where the groups of a run are, and how those of a checkpoint are written and read."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from generator.rollout import Group, Prompt, Rollout, ScoredRollout, Segment
from trainer.groups import Buffer, Groups, KeptGroups, StartedGroup
from trainer.kept_rollouts import read_groups, write_groups

PROMPTS = {number: Prompt(number, (1, number), f"prompt {number}", {"answer": number}) for number in range(9)}


def rollout(name: str, prompt: int, *versions: int, reason=None) -> Rollout:
    sampled = Rollout(name, PROMPTS[prompt].token_ids)
    for version in versions:
        sampled = sampled.extended(Segment((5,), (-0.1234567890123,), version))
    return replace(sampled, finish_reason=reason)


def scored(prompt: int, version: int) -> Group:
    members = (rollout(f"{prompt}-0", prompt, version, version + 1, reason="stop"),)
    return Group(PROMPTS[prompt], tuple(ScoredRollout(one, "text", 1.0, {}) for one in members), version)


async def test_the_group_with_the_oldest_token_is_taken_first():
    buffer = Buffer()
    taking = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    assert not taking.done()
    for prompt, version in ((0, 3), (1, 1), (2, 2), (3, 1)):
        buffer.put(scored(prompt, version))
    assert [group.prompt.id for group in buffer.groups()] == [1, 3, 2, 0]
    assert (await taking).prompt.id == 1
    assert [(await buffer.take()).prompt.id for _ in range(3)] == [3, 2, 0]
    assert len(buffer) == 0


async def test_every_group_is_kept_once_wherever_it_is():
    groups = Groups()
    groups.restore(KeptGroups((scored(0, 0),), (StartedGroup(PROMPTS[1], (rollout("1-0", 1, 0),), 0),), 5))
    first, second = groups.begin(PROMPTS[2], 2, 1), groups.begin(PROMPTS[3], 2, 1)
    assert [one.id for one in second.rollouts] == ["6-0", "6-1"], "numbers go on behind those of the checkpoint"
    groups.ended(first)
    groups.buffer.put(scored(2, 1))
    await groups.take()

    kept = groups.kept({"6-1": rollout("6-1", 3, 1, 1), "gone": rollout("gone", 3, 1)})
    assert [group.prompt.id for group in kept.scored] == [0, 2], "a step in progress counts as not made"
    assert [group.prompt.id for group in kept.started] == [3, 1]
    assert [len(one.response_token_ids) for one in kept.started[0].rollouts] == [0, 2]
    assert kept.prompt_ids == [0, 2, 3, 1]
    assert kept.first_number == 7

    groups.learned()
    assert groups.begin_again() == StartedGroup(PROMPTS[1], (rollout("1-0", 1, 0),), 0)
    assert groups.begin_again() is None
    assert [group.prompt.id for group in groups.kept({}).scored] == [2]


async def test_a_group_that_expired_is_not_kept():
    groups = Groups()
    groups.buffer.put(scored(0, 0))
    groups.expired(await groups.take())
    assert groups.kept({}) == KeptGroups()


def test_groups_read_back_as_they_were_written(tmp_path):
    turns = rollout("2-0", 2, 1, 2).observed((7, 8)).extended(Segment((9,), (-2.5,), 3))
    masked = replace(rollout("1-0", 1, 0, 1, reason="length"), loss_mask=(False, True), resumes=3)
    no_reward = ScoredRollout(masked, "a \u2028 text", None, {"format": None, "right": 0.5}, {"turns": [1, {"a": "b"}]})
    kept = KeptGroups(
        scored=(Group(PROMPTS[1], (no_reward, replace(no_reward, reward=-0.25)), 0), scored(1, 4)),
        started=(
            StartedGroup(PROMPTS[2], (turns, rollout("2-1", 2), rollout("2-2", 2, 1, reason="failed")), 1),
            StartedGroup(PROMPTS[2], (rollout("3-0", 2),), 2),
        ),
        first_number=4,
    )
    write_groups(tmp_path, kept)
    assert read_groups(tmp_path, PROMPTS.__getitem__, 4) == kept


def test_what_an_environment_logged_cannot_cost_the_checkpoint(tmp_path):
    group = scored(1, 4)
    logged = replace(group, rollouts=(replace(group.rollouts[0], log={"temperature": float("nan")}),))
    write_groups(tmp_path, KeptGroups(scored=(logged,)))
    (kept,) = read_groups(tmp_path, PROMPTS.__getitem__, 0).scored
    assert kept.rollouts[0].log == {"temperature": None}


@pytest.mark.parametrize("kept", [KeptGroups(), KeptGroups(first_number=3)])
def test_nothing_in_flight_is_an_empty_file(kept, tmp_path):
    write_groups(tmp_path, kept)
    assert read_groups(tmp_path, PROMPTS.__getitem__, kept.first_number) == kept
