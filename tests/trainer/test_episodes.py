"""Environments in the trainer: rewards, failures, deadlines, and what is counted."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace

import pytest

from generator.rollout import Rollout, ScoredRollout
from generator.task import Episode
from tests.trainer.scripted import CODEC, NoTrace, ScriptedEngines, prompt, rollouts, sampling
from tests.virtual import in_virtual_time
from trainer.episodes import MultiTurn, SingleTurn


def source(run, *lines: str, timeout: float = 60.0, engines=None, drop_group: bool = False, **changes) -> MultiTurn:
    """An environment with the coroutine function ``run(task, sampler)``."""
    environment = type("Env", (), {"run": staticmethod(run)})()
    engines = engines or ScriptedEngines(lines or ("ask", "done"))
    return MultiTurn(
        environment, engines, sampling(**changes), CODEC, NoTrace(), timeout=timeout, drop_group=drop_group
    )


async def one(episodes: MultiTurn, **columns):
    question = prompt("2+2?", **columns)
    (scored,) = await episodes.sample(question, rollouts(question), version=0)
    return scored


def counted(episodes: MultiTurn) -> dict[str, int]:
    return {name.removeprefix("reward/"): count for name, count in episodes.take_counts().items() if count}


async def two_turns(task, sampler):
    await sampler.generate(sampler.token_ids)
    await sampler.generate(sampler.token_ids + sampler.encode(task["hint"]))
    return Episode(1.0, {"turns": 2}, {"hint": task["hint"]})


async def test_an_episode_brings_its_rollout_text_reward_parts_and_log():
    episodes = source(two_turns)
    scored = await one(episodes, hint=" 4;")
    assert (scored.reward, scored.reward_parts, scored.log) == (1.0, {"turns": 2.0}, {"hint": " 4;"})
    assert scored.text == "ask 4;done"
    assert scored.rollout.sampled_tokens == len("ask.done.")
    assert counted(episodes) == {}


async def test_the_rollouts_of_a_group_are_played_side_by_side_and_come_back_in_order():
    started, all_started = [], asyncio.Event()

    async def run(task, sampler):
        started.append(sampler)
        if len(started) == 3:
            all_started.set()
        await all_started.wait()
        await sampler.generate(sampler.token_ids)
        return Episode(float(started.index(sampler)))

    question = prompt("2+2?")
    scored = await source(run).sample(question, rollouts(question, 3), version=0)
    assert [item.rollout.id for item in scored] == ["0-0", "0-1", "0-2"]
    assert sorted(item.reward for item in scored) == [0.0, 1.0, 2.0]


async def raises(task, sampler):
    await sampler.generate(sampler.token_ids)
    raise KeyError("lost")


async def declines(task, sampler):
    await sampler.generate(sampler.token_ids)
    return Episode(None)


async def gives_nan(task, sampler):
    await sampler.generate(sampler.token_ids)
    return Episode(math.nan)


async def returns_a_number(task, sampler):
    await sampler.generate(sampler.token_ids)
    return 1.0


async def says_nothing(task, sampler):
    return Episode(1.0)


async def encodes_again(task, sampler):
    turn = await sampler.generate(sampler.token_ids)
    await sampler.generate(sampler.encode(turn.text + " 4;"))


async def hangs(task, sampler):
    await sampler.generate(sampler.token_ids)
    await asyncio.Event().wait()


async def ignores_its_cancellation(task, sampler):
    await sampler.generate(sampler.token_ids)
    while True:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
            return


async def blocks_a_thread(task, sampler):
    await sampler.generate(sampler.token_ids)
    await sampler.call(threading.Event().wait)


@pytest.mark.parametrize(
    ("run", "cause"),
    [
        (raises, "failed"), (says_nothing, "failed"), (encodes_again, "failed"), (declines, "declined"),
        (gives_nan, "invalid"), (returns_a_number, "invalid"), (hangs, "timeout"),
        (ignores_its_cancellation, "timeout"), (blocks_a_thread, "timeout"),
    ],
)  # fmt: skip
async def test_what_cannot_be_scored_is_excluded_and_counted_and_never_zero(run, cause):
    episodes = source(run, timeout=0.05 if cause == "timeout" else 60.0)
    scored = await one(episodes)
    assert scored.reward is None
    assert counted(episodes) == {cause: 1}
    assert counted(episodes) == {}


async def test_a_part_that_is_no_number_is_counted_and_does_not_cost_the_reward():
    async def run(task, sampler):
        await sampler.generate(sampler.token_ids)
        return Episode(1.0, {"good": 0.5, "bad": math.inf, "none": None})

    episodes = source(run)
    scored = await one(episodes)
    assert (scored.reward, scored.reward_parts) == (1.0, {"good": 0.5, "bad": None, "none": None})
    assert counted(episodes) == {"invalid": 1}


class SlowEngines(ScriptedEngines):
    """Every turn takes several times what an environment may take."""

    async def generate(self, rollouts, sampling=None):
        await asyncio.sleep(0.3)
        return await super().generate(rollouts, sampling)


@in_virtual_time
async def test_generation_does_not_count_against_the_deadline():
    episodes = source(two_turns, engines=SlowEngines(("ask", "done")), timeout=0.15)
    assert (await one(episodes, hint=" 4;")).reward == 1.0


@in_virtual_time
async def test_an_environment_that_was_given_up_samples_nothing_any_more():
    tried = asyncio.Event()

    async def run(task, sampler):
        await sampler.generate(sampler.token_ids)
        try:
            await asyncio.Event().wait()
        finally:
            with pytest.raises(ValueError, match="over"):
                await sampler.generate(sampler.token_ids)
            tried.set()

    episodes = source(run, timeout=0.05)
    scored = await one(episodes)
    await asyncio.wait_for(tried.wait(), timeout=60)
    assert scored.rollout.sampled_tokens == len("ask.")


async def test_an_error_of_the_engines_ends_the_run_even_where_the_environment_swallows_it():
    async def run(task, sampler):
        try:
            await sampler.generate(sampler.token_ids)
        except Exception:
            return Episode(1.0)

    with pytest.raises(ExceptionGroup) as failure:
        await one(source(run, engines=ScriptedEngines((), error=RuntimeError("the engine broke"))))
    assert failure.group_contains(RuntimeError, match="the engine broke")


class FailingEngines(ScriptedEngines):
    """The first rollout stalls for good."""

    async def generate(self, rollouts: list[Rollout], sampling=None) -> list[Rollout]:
        finished = await super().generate(rollouts, sampling)
        return [replace(r, finish_reason="failed") if r.id == "0-0" else r for r in finished]


@pytest.mark.parametrize("drop_group", [False, True])
async def test_a_rollout_that_the_engines_gave_up_is_excluded_alone_or_with_its_group(drop_group):
    episodes = source(two_turns, engines=FailingEngines(("ask", "done")), drop_group=drop_group)
    question = prompt("2+2?", hint=" 4;")
    scored = await episodes.sample(question, rollouts(question, 2), version=0)
    assert [item.rollout.finish_reason for item in scored] == ["failed", "stop"]
    assert [item.reward for item in scored] == [None, None if drop_group else 1.0]


async def test_a_cancelled_run_cancels_its_environments():
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def run(task, sampler):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    running = asyncio.create_task(one(source(run)))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(cancelled.wait(), timeout=60)


@in_virtual_time
async def test_an_episode_that_has_ended_is_known_until_its_group_has():
    seen = []

    async def run(task, sampler):
        turn = await sampler.generate(sampler.token_ids)
        if len(seen) == 1:  # the second episode of the group goes on after the first has ended
            await asyncio.sleep(0.01)
            seen.append(episodes.partial_rollouts())
        seen.append(turn)
        return Episode(1.0)

    episodes = source(run)
    question = prompt("2+2?")
    scored = await episodes.sample(question, rollouts(question, 2), version=0)
    assert seen[1] == {item.rollout.id: item.rollout for item in scored}
    assert episodes.partial_rollouts() == {}


async def test_finished_rollouts_of_one_turn_are_known_while_they_are_scored():
    seen = []

    class Rewards:
        async def score(self, prompt, finished, texts):
            seen.append(episodes.partial_rollouts())
            return tuple(ScoredRollout(one, text, 1.0, {}) for one, text in zip(finished, texts, strict=True))

    episodes = SingleTurn(ScriptedEngines(["done"]), Rewards(), CODEC.decode, NoTrace())
    question = prompt("2+2?")
    scored = await episodes.sample(question, rollouts(question, 2), version=0)
    assert seen == [{item.rollout.id: item.rollout for item in scored}]
    assert episodes.partial_rollouts() == {}


async def test_partial_rollouts_are_those_of_the_turns_that_have_ended():
    observed = []

    async def run(task, sampler):
        await sampler.generate(sampler.token_ids)
        observed.append(episodes.partial_rollouts()["0-0"])
        return Episode(1.0)

    episodes = source(run)
    scored = await one(episodes)
    assert observed == [scored.rollout]
    assert episodes.partial_rollouts() == {}
