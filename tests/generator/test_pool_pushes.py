"""Pushes into the pool with simulated engines, while engines fail, leave and join."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import Any

import pytest

from generator.link import EngineError
from generator.rollout import Rollout
from tests.generator.pool_world import ENGINE, World, check, prompts, run
from tests.pools import pool_settings_for
from weight_sync.push import PushError, Step
from weight_sync.verification import Verification

# -- pushes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "staged"),
    [
        ("refuse_weights", False),
        ("wrong_version", False),
        ("refuse_weights", True),
        ("wrong_version", True),
        ("refuse_swap", True),
    ],
)
def test_an_engine_that_fails_a_push_is_quarantined_and_the_others_serve_the_new_version(fault, staged):
    async def test(world: World) -> None:
        tasks = [world.generate(4, str(number)) for number in range(4)]
        await asyncio.sleep(5.0)
        setattr(world.engines[0], fault, 9)
        await world.push(1)
        assert world.pool.version == world.engines[1].version == 1
        assert world.engines[0].version == 0
        for task in tasks:
            check(await task, published=1)
        assert world.pool.counts["engines/lost"] == 1
        # It was well enough to hand its tokens back.
        assert world.pool.counts["rollouts/restarted"] == 0
        await asyncio.sleep(60.0)
        assert world.pool.serving == 2

    run(test, staged=staged)


def test_engines_generate_while_the_weights_of_a_staged_push_travel():
    async def test(world: World) -> None:
        tasks = [world.generate(4, str(number)) for number in range(2)]
        await asyncio.sleep(5.0)
        world.sender.seconds = 10.0  # a token takes 1 s
        pushing = asyncio.create_task(world.push(1))
        sampled = []
        for _ in range(2):
            await asyncio.sleep(4.0)
            sampled.append([(await engine.stats())["generated_tokens"] for engine in world.engines])
            assert world.pusher.step is Step.TRANSFER
        assert all(late > early for early, late in zip(*sampled, strict=True))
        await pushing
        for task in tasks:
            rollouts = await task
            check(rollouts, published=1)
            assert max(rollout.version_count for rollout in rollouts) == 2

    run(test, staged=True)


def test_engines_that_staged_what_another_one_refused_serve_on_meanwhile():
    async def test(world: World) -> None:
        tasks = [world.generate(4, str(number)) for number in range(4)]
        await asyncio.sleep(5.0)
        world.engines[0].refuse_weights = True
        await world.push(1)
        assert world.engines[1].called["stage"] == 3, "version 0, and version 1 twice"
        assert world.engines[1].called["pause"] == 2, "once for each version"
        for task in tasks:
            check(await task, published=1)

    run(test, staged=True)


EVERY = Verification("every", "float32", ((1, 2, 3), (4, 5)))


def test_an_engine_that_computes_something_else_is_quarantined_and_its_rollouts_go_on_elsewhere():
    async def test(world: World) -> None:
        tasks = [world.generate(4, str(number)) for number in range(4)]
        await asyncio.sleep(5.0)
        world.engines[0].logprob_error = 0.5
        report = await world.push(1)
        assert report.canary is not None
        assert report.canary.engines == 1
        assert world.engines[0].version == 0, "nothing was served under the wrong weights"
        for task in tasks:
            check(await task, published=1)
        assert world.pool.counts["engines/lost"] == 1
        assert world.pool.counts["rollouts/restarted"] == 0
        await asyncio.sleep(60.0)
        assert world.pool.serving == 2
        assert world.engines[2].called["prompt_logprobs"] == 1, "the new engine's first push is proven too"

    run(test, verification=EVERY)


def test_engines_with_frozen_requests_are_not_asked_and_their_rollouts_stay_as_they_are():
    async def test(world: World) -> None:
        task = world.generate(4)
        await asyncio.sleep(5.0)
        report = await world.push(1)
        assert report.canary is not None
        assert report.canary.engines == 1, "the other engine has nothing to do"
        check(await task, published=1)
        assert (await world.push(2)).canary.engines == 2

    run(test, verification=EVERY, pool_settings=pool_settings_for(2, max_running=4, mode="keep"))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("way", ["die", "kill", "hang"])
@pytest.mark.parametrize("after", [0.05, 0.15, 0.25, 0.9, 1.25, 1.45, 1.65, 1.75, 1.85, 1.95])
def test_an_engine_lost_at_any_moment_of_a_push_costs_only_itself(way, after, staged):
    async def test(world: World) -> None:
        tasks = [world.generate(4, str(number)) for number in range(4)]
        await asyncio.sleep(5.0)
        pushing = asyncio.create_task(world.push(1))
        await asyncio.sleep(after)
        getattr(world.engines[0], way)()
        await pushing
        assert world.pool.version == 1
        for task in tasks:
            check(await task, published=1)
        await asyncio.sleep(200.0)
        assert world.pool.serving == 2
        assert world.pool.counts["engines/lost"] == 1

    run(test, verification=EVERY, staged=staged)


def test_a_push_waits_for_a_replacement_where_no_engine_is_left():
    async def test(world: World) -> None:
        task = world.generate(4)
        await asyncio.sleep(5.0)
        world.engines[0].die()
        await asyncio.sleep(0.5)
        there = asyncio.create_task(world.pool.one_there())
        await asyncio.sleep(0.5)
        assert not there.done()
        await world.push(1)
        await there
        check(await task, published=1)
        assert world.pool.serving == 1

    # The start takes longer than a step of a push may.
    slow = replace(ENGINE, start_seconds=200.0)
    run(test, engine=slow, pool_settings=pool_settings_for(1, max_running=4))


def test_a_push_fails_with_the_cause_when_no_engine_is_left_for_good():
    async def test(world: World) -> None:
        world.engines[0].refuse_weights = True
        with pytest.raises(EngineError, match=r"no engine is left.*at transfer.*engine 0 refuses weights"):
            await world.push(1)
        with pytest.raises(EngineError, match="no engine is left"):
            await world.pool.one_there()

    run(test, pool_settings=pool_settings_for(1, max_restarts=0), equipping=False)


def test_a_failure_of_the_learner_costs_no_engine_and_is_not_tried_for_ever():
    async def test(world: World) -> None:
        async def broken(base: int | None) -> Any:
            raise RuntimeError("a weight is not finite")

        world.sender.prepare = broken
        with pytest.raises(PushError, match="not finite"):
            await world.push(1)
        assert world.pool.counts["engines/lost"] == 0

    run(test)


def test_a_push_whose_caller_gives_up_at_the_gate_leaves_no_engine_paused():
    async def test(world: World) -> None:
        task = world.generate(4)
        await asyncio.sleep(5.0)
        pushing = asyncio.create_task(world.push(1))
        await asyncio.sleep(0.05)
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        rollouts = await task
        check(rollouts, published=0)

    run(test)


def test_an_engine_that_joined_does_not_serve_after_a_push_that_never_reached_it():
    async def test(world: World) -> None:
        await world.pool.set_count(3)
        pushing = asyncio.create_task(world.push(1))
        await asyncio.sleep(0.05)
        pushing.cancel()
        (ended,) = await asyncio.gather(pushing, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError)
        assert not getattr(ended, "__notes__", ()), "the engines that held the old version should have been resumed"
        assert world.pool.serving == 2
        assert world.pool.joined.is_set()
        await world.push(1)
        assert world.pool.serving == 3

    run(test, equipping=False)


def test_a_push_costs_a_fixed_number_of_calls_per_engine_however_many_rollouts_are_in_flight():
    def calls_of_a_push(groups: int) -> int:
        seen: list[int] = []

        async def test(world: World) -> None:
            tasks = [world.generate(8, str(number)) for number in range(groups)]
            await asyncio.sleep(5.0)
            before = [engine.called.total() for engine in world.engines]
            await world.push(1)
            seen.append(sum(e.called.total() - b for e, b in zip(world.engines, before, strict=True)))
            await asyncio.gather(*tasks)

        run(test, pool_settings=pool_settings_for(4, max_running=4))
        return seen[0]

    # pause, load, confirm, resume; the health watch and equal loads bring nothing beside them
    assert calls_of_a_push(4) == calls_of_a_push(40) == 4 * 4


# -- everything at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_pushes_deaths_and_resizings_in_any_order_never_lose_double_or_mislabel_a_token(seed, mode):
    chance = random.Random(seed)
    options = pool_settings_for(3, max_running=4, max_restarts=10_000, mode=mode)

    async def test(world: World) -> None:
        begun: dict[str, int] = {}
        tasks = []

        async def one_group(name: str) -> list[Rollout]:
            begun[name] = world.pool.version or 0
            return await world.pool.generate(prompts(chance.randrange(1, 6), name))

        async def pushes() -> None:
            for version in range(1, 12):
                await asyncio.sleep(chance.choice([0.0, 0.3, 5.0, 20.0]))
                if mode == "abort" and chance.random() < 0.2:
                    await cancelled_push(world, version, chance.uniform(0.0, 0.1))
                await world.push(version)

        async def faults() -> None:
            for _ in range(8):
                await asyncio.sleep(chance.uniform(0.0, 30.0))
                alive = [engine for engine in world.engines if not engine._ended.is_set()]
                if alive:
                    getattr(chance.choice(alive), chance.choice(["die", "kill", "hang"]))()

        async def sizes() -> None:
            for _ in range(3):
                await asyncio.sleep(chance.uniform(0.0, 60.0))
                with contextlib.suppress(EngineError):  # one that was to start was killed
                    await world.pool.set_count(chance.randrange(1, 5))

        async with asyncio.TaskGroup() as group:
            for part in (pushes(), faults(), sizes()):
                group.create_task(part)
            for number in range(20):
                await asyncio.sleep(chance.uniform(0.0, 5.0))
                tasks.append(group.create_task(one_group(f"g{number}")))
        for number, task in enumerate(tasks):
            check(task.result(), published=world.pool.version)
            assert all(rollout.versions[0] >= begun[f"g{number}"] for rollout in task.result())
        assert await world.pool.partial_rollouts() == []
        assert all(slot.load == 0 for slot in world.pool._roster.slots)

    run(test, pool_settings=options)


async def cancelled_push(world: World, version: int, after: float) -> None:
    """A push whose caller gives up while the gates close."""
    pushing = asyncio.create_task(world.push(version))
    await asyncio.sleep(after)
    if world.pusher.step.value in ("idle", "prepare", "connect", "gate"):
        pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
