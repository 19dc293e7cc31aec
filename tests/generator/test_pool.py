"""The pool with simulated engines: where rollouts go, engines that come and go, and what can be asked of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from generator import virtual_time
from generator.link import EngineError
from generator.simulated_stream import whole_stream
from tests.generator.pool_world import ENGINE, FOREVER, SAMPLING, World, check, prompts, run
from tests.pools import pool_settings_for

# -- routing ----------------------------------------------------------------------------------------------------------


def test_groups_go_to_the_engine_with_the_least_load_and_stay_together():
    async def test(world: World) -> None:
        tasks = [world.generate(size, name) for size, name in [(6, "a"), (2, "b"), (2, "c"), (4, "d")]]
        await asyncio.sleep(0.5)
        where = [{r.id for r in await engine.partial_rollouts()} for engine in world.engines]
        ids = {name: {r.id for r in prompts(size, name)} for size, name in [(6, "a"), (2, "b"), (2, "c"), (4, "d")]}
        assert where == [ids["a"], ids["b"] | ids["c"] | ids["d"]]
        for task in tasks:
            check(await task)

    run(test)


def test_whoever_wants_to_know_is_told_how_many_rollouts_each_engine_has():
    async def test(world: World) -> None:
        told: list[tuple[str, int]] = []
        world.pool.on_load = lambda engine, rollouts: told.append((engine, rollouts))
        first = world.generate(6, "a")
        await asyncio.sleep(0.5)
        await asyncio.gather(first, world.generate(2, "b"), world.generate(2, "c"))
        assert told[:3] == [("engine 0", 6), ("engine 1", 2), ("engine 1", 4)]
        assert {engine: rollouts for engine, rollouts in told} == {"engine 0": 0, "engine 1": 0}

    run(test)


def test_rollouts_stay_with_their_engine_over_pushes():
    async def test(world: World) -> None:
        tasks = [world.generate(4, str(number)) for number in range(2)]
        await asyncio.sleep(0.5)
        before = [{r.id for r in await engine.partial_rollouts()} for engine in world.engines]
        for version in range(1, 4):
            await world.push(version)
            assert [{r.id for r in await engine.partial_rollouts()} for engine in world.engines] == before
        for task in tasks:
            check(await task, published=3)
        assert world.pool.counts == {}
        assert [engine.called["generate"] for engine in world.engines] == [1, 1]

    run(test)


def test_an_overloaded_engine_gives_rollouts_to_one_that_joined_at_the_next_push():
    async def test(world: World) -> None:
        tasks = [world.generate(4, str(number)) for number in range(8)]
        await asyncio.sleep(5.0)
        await world.pool.set_count(2)
        await world.push(1)
        await asyncio.sleep(1.0)
        assert [(await engine.stats())["in_flight"] > 0 for engine in world.engines] == [True, True]
        for task in tasks:
            check(await task)
        assert world.pool.counts["rollouts/moved"] >= 12
        assert world.pool.counts["engines/lost"] == 0

    run(test, pool_settings=pool_settings_for(1, max_running=4), equipping=False)


# -- joining and leaving ----------------------------------------------------------------------------------------------


def test_an_engine_that_joins_serves_only_after_a_push():
    async def test(world: World) -> None:
        await world.pool.set_count(3)
        assert world.pool.serving == 2
        assert world.pool.joined.is_set()
        tasks = [world.generate(4, str(number)) for number in range(6)]
        await asyncio.sleep(10.0)
        assert world.engines[2].called["generate"] == 0
        await world.push(1)
        assert world.pool.serving == 3
        tasks += [world.generate(2, "new")]
        await asyncio.sleep(1.0)
        assert world.engines[2].called["generate"] > 0
        for task in tasks:
            check(await task)

    run(test, equipping=False)


def test_the_pool_is_as_full_as_its_fullest_engine_and_one_that_does_not_answer_is_left_out():
    async def test(world: World) -> None:
        tasks = [world.generate(4, "a"), world.generate(1, "b")]
        await asyncio.sleep(3.0)
        fullest = (await world.pool.pressure()).kv_cache_usage
        world.engines[0].hang()
        assert 0.0 < (await world.pool.pressure()).kv_cache_usage < fullest
        await asyncio.gather(*tasks)

    run(test, engine=replace(ENGINE, kv_tokens=1000))


def test_engines_come_and_go_during_generation_and_nothing_is_lost():
    async def test(world: World) -> None:
        tasks = [world.generate(4, str(number)) for number in range(20)]
        for version, count in enumerate([5, 1, 3, 2], start=1):
            await asyncio.sleep(4.0)
            await world.pool.set_count(count)
            await world.push(version)
            assert world.pool.serving == count
        for task in tasks:
            check(await task, published=4)
        assert world.pool.counts["rollouts/restarted"] == 0

    run(test)


def test_an_engine_that_is_not_wanted_any_more_while_it_starts_never_joins():
    async def test(world: World) -> None:
        more = asyncio.create_task(world.pool.set_count(4))
        await asyncio.sleep(5.0)
        await world.pool.set_count(2)
        await more
        await asyncio.sleep(100.0)
        assert world.pool.serving == 2
        assert [engine._ended.is_set() for engine in world.engines] == [False, False, True, True]

    run(test)


def test_a_pool_without_engines_is_refused():
    async def test(world: World) -> None:
        with pytest.raises(ValueError, match="at least one"):
            await world.pool.set_count(0)

    run(test)


# -- looking in -------------------------------------------------------------------------------------------------------


def test_partial_rollouts_hold_every_rollout_in_flight_also_those_that_no_engine_has():
    async def test(world: World) -> None:
        tasks = [world.generate(4, str(number)) for number in range(2)]
        await asyncio.sleep(6.0)
        world.engines[0].die()
        await asyncio.sleep(1.0)
        partial = await world.pool.partial_rollouts()
        assert len(partial) == 8
        assert sum(len(rollout.response_token_ids) >= 5 for rollout in partial) >= 3
        world.engines[1].kill()
        assert len(await world.pool.partial_rollouts()) == 8
        for task in tasks:
            check(await task)
        assert await world.pool.partial_rollouts() == []

    run(test, pool_settings=pool_settings_for(2, max_running=4))


def test_partial_rollouts_hold_the_tokens_of_this_moment_and_the_finished_members_of_unfinished_groups():
    async def test(world: World) -> None:
        task = world.generate(4)
        lengths = [len(whole_stream(ENGINE, SAMPLING, rollout)) for rollout in prompts(4)]
        await asyncio.sleep(min(lengths) + 2.0)
        partial = {rollout.id: rollout for rollout in await world.pool.partial_rollouts()}
        assert world.engines[0]._serving, "nothing is paused for it"
        passed = min(lengths) + 2
        for rollout, length in zip(prompts(4), lengths, strict=True):
            known = partial[rollout.id]
            assert len(known.response_token_ids) in (min(length, passed - 1), min(length, passed))
            assert (known.finish_reason is not None) == (len(known.response_token_ids) == length)
        finished = {rollout.id: rollout for rollout in await task}
        check(list(finished.values()))
        for name, known in partial.items():
            assert finished[name].first(len(known.response_token_ids)) == known.first(len(known.response_token_ids))

    run(test)


def test_an_engine_that_does_not_answer_costs_no_more_than_the_limit_and_no_rollout():
    async def test(world: World) -> None:
        tasks = [world.generate(4, str(number)) for number in range(2)]
        await asyncio.sleep(5.0)
        world.engines[0].hang()
        asked = asyncio.get_running_loop().time()
        partial = await world.pool.partial_rollouts(limit=2.0)
        assert asyncio.get_running_loop().time() - asked <= 2.0
        tokens = {rollout.id: len(rollout.response_token_ids) for rollout in partial}
        assert [tokens[f"0-{number}"] for number in range(4)] == [0] * 4
        assert min(tokens[f"1-{number}"] for number in range(4)) >= 2
        for task in tasks:
            check(await task)

    run(test, pool_settings=pool_settings_for(2, max_running=4))


def test_rollouts_that_come_with_tokens_go_on_from_them_and_finished_ones_are_not_sampled():
    async def test(world: World) -> None:
        whole = await world.pool.generate(prompts(3))
        longest = max(range(3), key=lambda number: len(whole[number].response_token_ids))
        given = [rollout if number != longest else rollout.first(3) for number, rollout in enumerate(whole)]
        before = sum(engine._generated for engine in world.engines)
        again = await world.pool.generate(given)
        check(again)
        assert [rollout.resumes for rollout in again] == [int(number == longest) for number in range(3)]
        sampled = sum(engine._generated for engine in world.engines) - before
        assert sampled == len(whole[longest].response_token_ids) - 3

    run(test)


def test_a_rollout_that_is_moved_before_it_was_ever_submitted_is_no_resume():
    async def test(world: World) -> None:
        for engine in world.engines:
            await engine.pause("abort", "recompute")
        task = world.generate(2)
        await asyncio.sleep(1.0)
        await world.engines[0].release(2)
        await asyncio.sleep(1.0)
        assert world.pool.counts["rollouts/moved"] == 2
        for engine in world.engines:
            await engine.resume(0)
        rollouts = await task
        check(rollouts)
        assert [rollout.resumes for rollout in rollouts] == [0, 0]

    run(test)


def test_what_engines_count_is_summed_and_stalled_requests_are_warned_of_by_their_engine(caplog):
    async def test(world: World) -> None:
        for engine, stalled in zip(world.engines, (3, 0), strict=True):
            engine.counts = {"rollouts/stalled": stalled, "tokens/cached": 10}
        await asyncio.gather(world.generate(4, "a"), world.generate(4, "b"))
        assert world.pool.counts["rollouts/stalled"] == 3
        assert world.pool.counts["tokens/cached"] == 20

    run(test)
    assert "engine 0 gave 3 requests no token" in caplog.text
    assert "engine 1 gave" not in caplog.text


# -- engines that load their weights themselves -----------------------------------------------------------------------


def test_engines_that_have_loaded_a_version_serve_it_without_a_push_and_so_does_one_that_takes_a_lost_ones_place():
    async def program() -> None:
        world = World(engine=replace(ENGINE, loaded_version=7))
        async with asyncio.timeout(FOREVER):
            await world.pool.start()
            await world.pool.serve_loaded(7)
            running = world.generate(6)
            await asyncio.sleep(0.5)
            world.engines[0].kill()
            await world.pool.joined.wait()
            await world.pool.serve_loaded(7)
            rollouts = await running
            check(rollouts)
            assert {version for rollout in rollouts for version in rollout.versions} == {7}
            assert world.pool.serving == 2
            await world.pool.shutdown()

    virtual_time.run(program())


def test_an_engine_that_has_loaded_another_version_serves_nothing():
    async def program() -> None:
        world = World(engine=replace(ENGINE, loaded_version=7))
        await world.pool.start()
        with pytest.raises(EngineError, match="cannot serve version 8"):
            await world.pool.serve_loaded(8)
        await world.pool.shutdown()

    virtual_time.run(program())
