"""The pool with simulated engines: whatever happens to engines, every rollout comes back as if nothing had."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from generator import virtual_time
from generator.link import EngineError
from generator.pool import EnginePool, PoolSettings
from generator.resume import Sampling
from generator.rollout import Rollout
from generator.simulated import SimulatedEngine
from generator.simulated_stream import SimulatedSettings, whole_stream
from tests.pools import pool_settings_for
from weight_sync.push import Pusher, PushError, PushReport, Step
from weight_sync.simulated import SimulatedSender
from weight_sync.verification import Verification

SAMPLING = Sampling(max_tokens=64, min_tokens=2, stop_token_ids=frozenset(range(20)))
ENGINE = SimulatedSettings(SAMPLING, max_running=4, token_seconds=1.0, start_seconds=30.0, latency=0.1)
FOREVER = 50_000.0
"""Seconds after which a test is stuck: the health watch keeps virtual time going."""


@dataclass
class World:
    """A pool of simulated engines, a learner that has only versions, and the pushes between them."""

    engine: SimulatedSettings = ENGINE
    pool_settings: PoolSettings = field(default_factory=lambda: pool_settings_for(2, max_running=4))
    engines: list[SimulatedEngine] = field(default_factory=list)
    """Every engine there ever was, by number."""
    refuse_from: int = 1_000_000
    """Engines from this number on do not start."""
    verification: Verification = field(default_factory=Verification)
    staged: bool = False
    """Whether weights travel while engines serve."""
    equipping: bool = True
    """Whether engines that join get the published version at once, as they do in a run."""

    def __post_init__(self) -> None:
        self.pool = EnginePool(self._make, self.pool_settings)
        self.sender = SimulatedSender(seconds=1.0, staging=self.staged)
        drain = 1_000.0 if self.pool_settings.mode == "wait" else 0.0
        self.pusher = Pusher(
            self.sender,
            self.pool,
            timeout=60.0,
            connect=self._connect,
            drain_timeout=drain,
            verification=self.verification,
            staged=self.staged,
        )
        self.weights = asyncio.Lock()

    def _make(self, number: int) -> SimulatedEngine:
        engine = SimulatedEngine(f"engine {number}", self.engine, refuse_start=number >= self.refuse_from)
        self.engines.append(engine)
        return engine

    async def _connect(self) -> None:
        self.sender.connect([link.handle for link in await self.pool.take_members()])

    async def push(self, version: int) -> PushReport:
        async with self.weights:
            return await self.pusher.push(version)

    async def equip(self) -> None:
        while True:
            await self.pool.joined.wait()
            async with self.weights:
                if self.pool.joined.is_set():
                    await self.pusher.push(self.pool.version)

    def generate(self, count: int, name: str = "r") -> asyncio.Task[list[Rollout]]:
        return asyncio.create_task(self.pool.generate(prompts(count, name)))


def prompts(count: int, name: str = "r") -> list[Rollout]:
    return [Rollout(f"{name}-{number}", (1, 2, 3)) for number in range(count)]


def run(test: Callable[[World], Awaitable[None]], **options: Any) -> None:
    """Run ``test`` with a pool that serves version 0."""

    async def program() -> None:
        world = World(**options)
        async with asyncio.timeout(FOREVER):
            await world.pool.start()
            await world.push(0)
            equipping = asyncio.create_task(world.equip()) if world.equipping else None
            try:
                await test(world)
                assert not (equipping and equipping.done()), "engines that joined could not be equipped"
            finally:
                if equipping:
                    equipping.cancel()
                await world.pool.shutdown()
        assert all(engine.called["shutdown"] or engine._ended.is_set() for engine in world.engines)

    virtual_time.run(program())


def check(rollouts: list[Rollout], published: int = 1_000_000) -> None:
    """Every rollout is what an engine that nothing happens to would have sampled."""
    for rollout in rollouts:
        expected = whole_stream(ENGINE, SAMPLING, Rollout(rollout.id, (1, 2, 3)))
        assert list(zip(rollout.response_token_ids, rollout.logprobs, strict=True)) == expected
        assert rollout.finish_reason == ("stop" if expected[-1][0] in SAMPLING.stop_token_ids else "length")
        assert all(rollout.loss_mask)
        assert 0 <= min(rollout.versions) <= max(rollout.versions) <= published


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


# -- losing engines ---------------------------------------------------------------------------------------------------


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
