"""The pool with simulated engines that are lost: every rollout comes back as if nothing had happened."""

from __future__ import annotations

import asyncio

import pytest

from generator import virtual_time
from generator.link import EngineError
from tests.generator.pool_world import World, check, run
from tests.pools import pool_settings_for


@pytest.mark.parametrize("way", ["die", "kill", "hang"])
def test_rollouts_of_a_lost_engine_go_on_elsewhere_and_end_as_if_nothing_had_happened(way):
    async def test(world: World) -> None:
        tasks = [world.generate(3, str(number)) for number in range(4)]
        await asyncio.sleep(7.0)
        getattr(world.engines[0], way)()
        for task in tasks:
            check(await task)
        assert world.pool.counts["engines/lost"] == 1
        # With its tokens where the engine could still hand them back, from what the pool knew where it could not.
        assert world.pool.counts["rollouts/restarted"] == (0 if way == "die" else 6)

    run(test)


def test_tokens_that_were_sampled_before_a_death_keep_their_older_version():
    async def test(world: World) -> None:
        task = world.generate(4)
        await asyncio.sleep(7.0)
        world.engines[0].die()
        await asyncio.sleep(1.0)
        await world.push(1)
        rollouts = await task
        check(rollouts, published=1)
        assert {rollout.versions[0] for rollout in rollouts} == {0}
        assert {rollout.versions[-1] for rollout in rollouts if len(rollout.versions) > 8} == {1}

    run(test)


def test_a_rollout_restarts_from_the_tokens_that_the_pool_knew():
    async def test(world: World) -> None:
        task = world.generate(1, "long")
        await asyncio.sleep(10.0)
        world.engines[0].die()
        await asyncio.sleep(1.0)
        known = (await world.pool.partial_rollouts())[0]
        world.engines[1].kill()
        # What the second engine had sampled is gone with it; what the first had handed back is not.
        assert len(known.response_token_ids) >= 9
        (rollout,) = await task
        check([rollout])
        assert rollout.response_token_ids[: len(known.response_token_ids)] == known.response_token_ids
        assert rollout.resumes >= 2

    run(test)


def test_an_engine_that_died_while_nobody_called_it_is_found_and_replaced():
    async def test(world: World) -> None:
        world.engines[1].die()
        await asyncio.sleep(6.0)
        assert world.pool.counts["engines/lost"] == 1
        assert world.pool.serving == 1
        await asyncio.sleep(40.0)
        assert world.pool.serving == 2
        assert [engine.name for engine in world.engines] == ["engine 0", "engine 1", "engine 2"]

    run(test)


def test_a_drained_engine_hands_its_rollouts_over_before_it_ends():
    async def test(world: World) -> None:
        tasks = [world.generate(2, str(number)) for number in range(6)]
        await asyncio.sleep(8.0)
        await world.pool.set_count(1)
        for task in tasks:
            check(await task)
        assert world.pool.serving == 1
        assert world.pool.counts["rollouts/moved"] > 0
        assert world.pool.counts["rollouts/restarted"] == 0
        assert world.pool.counts["engines/lost"] == 0

    run(test)


def test_the_last_restart_used_up_is_an_error_that_names_the_first_and_the_last_cause():
    async def test(world: World) -> None:
        task = world.generate(2)
        await asyncio.sleep(3.0)
        world.engines[0].die("the first")
        await asyncio.sleep(60.0)
        world.engines[1].die("the second")
        with pytest.raises(EngineError, match=r"max_restarts=1 is used up.*the first.*the second"):
            await task
        assert len(world.engines) == 2

    run(test, pool_settings=pool_settings_for(1, max_running=4, max_restarts=1))


def test_an_engine_that_does_not_start_again_is_tried_later_and_not_for_ever():
    async def test(world: World) -> None:
        begun = asyncio.get_running_loop().time()
        task = world.generate(2)
        world.engines[0].die()
        with pytest.raises(EngineError, match="engine 4 refuses to start"):
            await task
        assert len(world.engines) == 1 + 4
        assert asyncio.get_running_loop().time() - begun > 4 * 30.0 + 1.0 + 2.0 + 4.0

    options = pool_settings_for(1, max_running=4, max_restarts=4)
    run(test, pool_settings=options, refuse_from=1)


def test_other_engines_carry_on_when_a_lost_one_cannot_be_replaced():
    async def test(world: World) -> None:
        world.engines[0].die()
        await asyncio.sleep(1_000.0)
        check(await world.generate(4))
        assert world.pool.serving == 1

    run(test, refuse_from=2)


def test_nothing_that_serves_for_too_long_is_an_error_and_not_a_hang():
    async def test(world: World) -> None:
        world.engines[0].die()
        with pytest.raises(EngineError, match="no engine has served for 100 s"):
            await world.generate(2)

    run(test, pool_settings=pool_settings_for(1, max_running=4, serve_timeout=100.0), equipping=False)


def test_an_engine_that_does_not_start_ends_the_start_with_its_name_and_leaves_nothing_behind():
    async def program() -> None:
        world = World(refuse_from=1)
        with pytest.raises(EngineError, match="engine 1 refuses to start"):
            await world.pool.start()
        await world.pool.shutdown()
        assert all(engine._ended.is_set() for engine in world.engines)

    virtual_time.run(program())


def test_engines_that_are_still_starting_end_with_the_pool():
    async def program() -> None:
        world = World()
        task = asyncio.create_task(world.pool.start())
        await asyncio.sleep(5.0)
        await world.pool.shutdown()
        await asyncio.gather(task, return_exceptions=True)
        assert all(engine._ended.is_set() for engine in world.engines)

    virtual_time.run(program())
