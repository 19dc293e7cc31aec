"""The simulated engine does what the real one does, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from generator import virtual_time
from generator.link import EngineError, EngineLostError
from generator.pressure import Pressure
from generator.resume import Sampling
from generator.rollout import Rollout
from generator.simulated import SimulatedEngine
from generator.simulated_stream import SimulatedSettings, stream_token, whole_stream
from weight_sync.simulated import MANIFEST

STOPS = frozenset(range(20))
SAMPLING = Sampling(max_tokens=64, stop_token_ids=STOPS)
SETTINGS = SimulatedSettings(SAMPLING, vocabulary=1000, max_running=2, token_seconds=1.0, start_seconds=30.0)
UNBROKEN = Sampling(max_tokens=64)


def prompts(count: int, name: str = "r") -> list[Rollout]:
    return [Rollout(f"{name}{number}", (1, 2, 3)) for number in range(count)]


async def serving(settings: SimulatedSettings = SETTINGS, version: int = 0) -> SimulatedEngine:
    engine = SimulatedEngine("engine 0", settings)
    await engine.start()
    await serve(engine, version)
    return engine


async def serve(engine: SimulatedEngine, version: int) -> None:
    await engine.load(version, MANIFEST)
    await engine.confirm(version, MANIFEST)
    await engine.resume(version)


async def push(engine: SimulatedEngine, version: int, mode: Any = "abort") -> int:
    interrupted = await engine.pause(mode, "recompute")
    await serve(engine, version)
    return interrupted


def test_virtual_time_passes_only_while_everybody_waits():
    async def program() -> list[tuple[float, str]]:
        loop, seen = asyncio.get_running_loop(), []

        async def nap(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            seen.append((loop.time(), name))

        await asyncio.gather(nap(3600.0, "long"), nap(60.0, "short"), asyncio.to_thread(seen.append, (0.0, "thread")))
        return seen

    assert virtual_time.run(program()) == [(0.0, "thread"), (60.0, "short"), (3600.0, "long")]


def test_waiting_for_what_never_comes_is_an_error_and_not_a_hang():
    with pytest.raises(virtual_time.DeadlockError):
        virtual_time.run(asyncio.Event().wait())


def test_timeouts_go_by_virtual_time():
    async def program() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(900.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(program()) == 900.0


def test_the_token_stream_is_a_function_of_seed_id_and_position():
    other_seed = replace(SETTINGS, seed=1)
    assert stream_token(SETTINGS, "a", 5) == stream_token(SETTINGS, "a", 5)
    tokens = {stream_token(s, name, k) for s in (SETTINGS, other_seed) for name in "ab" for k in range(50)}
    assert len(tokens) == 200
    assert all(0 <= token < 1000 and -8.0 <= logprob < 0.0 for token, logprob in tokens)


HEAVY = replace(SETTINGS, sampling=replace(SAMPLING, max_tokens=2000), tail=1.2, shortest=4)


def test_lengths_with_a_heavy_tail_end_with_a_stop_token_or_at_the_budget_and_most_are_short():
    lengths = []
    for rollout in prompts(500):
        tokens = [token for token, _ in whole_stream(HEAVY, HEAVY.sampling, rollout)]
        assert not STOPS.intersection(tokens[:-1])
        assert tokens[-1] in STOPS or len(tokens) == 2000
        lengths.append(len(tokens))
    assert min(lengths) >= 4
    assert sum(length < 12 for length in lengths) > 300
    assert max(lengths) > 300


def test_so_many_rollouts_fail_on_their_way_and_their_tokens_are_those_that_they_would_have_had():
    async def program() -> None:
        calm = await (await serving(replace(HEAVY, max_running=500))).generate(prompts(200))
        rough = await (await serving(replace(HEAVY, max_running=500, failing=0.2))).generate(prompts(200))
        failed = [rollout for rollout in rough.rollouts if rollout.finish_reason == "failed"]
        assert 20 < len(failed) < 60
        for ours, theirs in zip(rough.rollouts, calm.rollouts, strict=True):
            count = len(ours.response_token_ids)
            assert ours.response_token_ids == theirs.response_token_ids[:count]
            assert (count < len(theirs.response_token_ids)) == (ours.finish_reason == "failed")

    virtual_time.run(program())


def test_an_engine_counts_the_requests_that_its_kv_cache_has_no_room_for():
    async def program() -> None:
        engine = await serving(replace(SETTINGS, sampling=UNBROKEN, max_running=10, kv_tokens=40))
        call = asyncio.create_task(engine.generate(prompts(4)))
        await asyncio.sleep(5.0)
        assert await engine.pressure() == Pressure(32 / 40, 0)
        await asyncio.sleep(10.0)
        assert await engine.pressure() == Pressure(1.0, 2)
        await call
        assert await engine.pressure() == Pressure(0.0, 0)

    virtual_time.run(program())


@pytest.mark.parametrize("minimum", [0, 30])
def test_a_stream_ends_with_its_first_stop_token_after_the_minimum_and_holds_none_before(minimum):
    sampling = replace(SAMPLING, min_tokens=minimum)
    for rollout in prompts(50):
        tokens = [token for token, _ in whole_stream(SETTINGS, sampling, rollout)]
        assert not STOPS.intersection(tokens[:-1])
        assert len(tokens) == 64 or (tokens[-1] in STOPS and len(tokens) > minimum)


def test_rollouts_take_as_long_as_their_tokens_and_wait_for_room():
    async def program() -> None:
        engine = await serving(replace(SETTINGS, sampling=replace(UNBROKEN, max_tokens=10)))
        begun = asyncio.get_running_loop().time()
        returned = await engine.generate(prompts(4))
        assert asyncio.get_running_loop().time() - begun == 20.0
        assert returned.reason == ""
        assert [(r.finish_reason, len(r.response_token_ids), r.resumes) for r in returned.rollouts] == [
            ("length", 10, 0)
        ] * 4

    virtual_time.run(program())


def test_an_abort_gives_back_what_runs_with_its_tokens_and_what_waits_with_none():
    async def program() -> None:
        engine = await serving(replace(SETTINGS, sampling=UNBROKEN))
        call = asyncio.create_task(engine.generate(prompts(4)))
        await asyncio.sleep(5.5)
        assert await engine.pause("abort", "recompute") == 4
        assert [len(r.response_token_ids) for r in await engine.partial_rollouts()] == [5, 5, 0, 0]
        assert (await engine.stats())["submitted"] == 0
        await engine.resume(0)
        returned = await call
        assert [r.resumes for r in returned.rollouts] == [1, 1, 1, 1]

    virtual_time.run(program())


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_pushes_change_neither_tokens_nor_logprobs_and_tag_each_token_with_its_version(mode):
    async def program() -> None:
        calm = await (await serving()).generate(prompts(8))
        engine = await serving()
        call = asyncio.create_task(engine.generate(prompts(8)))
        interrupted = []
        for version in range(1, 8):
            await asyncio.sleep(7.3)
            interrupted.append(await push(engine, version, mode))
        returned = await call
        for ours, theirs in zip(returned.rollouts, calm.rollouts, strict=True):
            assert (ours.response_token_ids, ours.logprobs) == (theirs.response_token_ids, theirs.logprobs)
            assert ours.finish_reason == theirs.finish_reason
            assert (ours.resumes > 0) <= (mode == "abort")
        assert interrupted[:2] == [7, 0 if mode == "wait" else 7]  # one was finished, and after a wait all are
        most = max(rollout.version_count for rollout in returned.rollouts)
        assert (most > 1) == (mode != "wait")

    virtual_time.run(program())


def test_frozen_requests_get_no_token_while_they_are_frozen():
    async def program() -> None:
        engine = await serving(replace(SETTINGS, sampling=replace(UNBROKEN, max_tokens=10)))
        call = asyncio.create_task(engine.generate(prompts(1)))
        await asyncio.sleep(4.0)
        await engine.pause("keep", "recompute")
        await asyncio.sleep(100.0)
        await serve(engine, 1)
        await asyncio.sleep(5.5)
        assert not call.done()
        await asyncio.sleep(1.0)
        (rollout,) = call.result().rollouts
        assert rollout.versions == (0,) * 4 + (1,) * 6
        assert rollout.resumes == 0

    virtual_time.run(program())


def test_a_last_token_that_comes_with_the_abort_finishes_its_rollout():
    async def program() -> None:
        engine = await serving(replace(SETTINGS, sampling=replace(UNBROKEN, max_tokens=10)))
        call = asyncio.create_task(engine.generate(prompts(1)))
        await asyncio.sleep(10.0)
        await engine.pause("abort", "recompute")
        assert (await call).rollouts[0].finish_reason == "length"

    virtual_time.run(program())


def test_a_paused_engine_holds_what_comes_and_serves_it_after_the_resume():
    async def program() -> None:
        engine = await serving()
        await engine.pause("abort", "recompute")
        call = asyncio.create_task(engine.generate(prompts(2)))
        await asyncio.sleep(1000.0)
        assert (await engine.stats())["submitted"] == 0
        await engine.resume(0)
        assert all(rollout.finish_reason for rollout in (await call).rollouts)

    virtual_time.run(program())


def test_a_drained_engine_hands_back_every_token_and_takes_nothing_more():
    async def program() -> None:
        engine = await serving(replace(SETTINGS, sampling=UNBROKEN))
        call = asyncio.create_task(engine.generate(prompts(3)))
        await asyncio.sleep(6.0)
        await engine.drain()
        returned = await call
        assert returned.reason == "drained"
        assert [len(r.response_token_ids) for r in returned.rollouts] == [6, 6, 0]
        assert (await engine.generate(prompts(1))).reason == "drained"
        with pytest.raises(EngineLostError):
            await engine.resume(0)

    virtual_time.run(program())


def test_a_release_moves_the_calls_that_came_last_and_leaves_the_others():
    async def program() -> None:
        engine = await serving()
        calls = [asyncio.create_task(engine.generate(prompts(2, name))) for name in "abc"]
        await asyncio.sleep(3.0)
        await engine.pause("abort", "recompute")
        assert await engine.release(3) == 4
        await engine.resume(0)
        assert [(await call).reason for call in calls] == ["", "moved", "moved"]
        assert [len(r.response_token_ids) for r in (await calls[1]).rollouts] == [0, 0]

    virtual_time.run(program())


def test_a_model_process_that_dies_leaves_every_token_with_the_caller():
    async def program() -> None:
        engine = await serving(replace(SETTINGS, sampling=UNBROKEN))
        call = asyncio.create_task(engine.generate(prompts(2)))
        await asyncio.sleep(6.0)
        engine.die()
        returned = await call
        assert returned.reason.startswith("lost: ")
        assert [len(r.response_token_ids) for r in returned.rollouts] == [6, 6]
        with pytest.raises(EngineLostError):
            await engine.check_health()

    virtual_time.run(program())


def test_an_engine_that_is_gone_fails_its_calls_and_an_answer_on_its_way_is_lost():
    async def program() -> None:
        engine = await serving(replace(SETTINGS, sampling=replace(UNBROKEN, max_tokens=10), latency=0.5))
        call = asyncio.create_task(engine.generate(prompts(1)))
        await asyncio.sleep(10.8)  # finished inside, not yet arrived
        engine.kill()
        with pytest.raises(EngineLostError, match=r"engine 0 died during `generate`") as failure:
            await call
        assert failure.value.engine == "engine 0"
        with pytest.raises(EngineLostError):
            await engine.stats()

    virtual_time.run(program())


def test_a_hanging_engine_fails_what_has_a_deadline_and_ends_the_rest_when_it_is_killed():
    async def program() -> None:
        engine = await serving()
        call = asyncio.create_task(engine.generate(prompts(1)))
        engine.hang()
        with pytest.raises(EngineLostError, match="did not answer `check_health` within 30"):
            await engine.check_health()
        await asyncio.sleep(10_000.0)
        assert not call.done()
        engine.kill()
        with pytest.raises(EngineLostError):
            await call

    virtual_time.run(program())


def test_an_engine_refuses_to_serve_a_version_it_does_not_hold():
    async def program() -> None:
        engine = await serving()
        await engine.pause("abort", "recompute")
        engine.wrong_version = 7
        await engine.load(1, MANIFEST)
        with pytest.raises(EngineError, match="weights 7 instead of version 1"):
            await engine.confirm(1, MANIFEST)
        with pytest.raises(EngineError, match="cannot serve version 1"):
            await engine.resume(1)

    virtual_time.run(program())


def test_weights_are_refused_while_the_engine_serves():
    async def program() -> None:
        with pytest.raises(EngineError, match="while it serves"):
            await (await serving()).load(1, ())

    virtual_time.run(program())


def test_an_engine_can_be_told_not_to_start():
    async def program() -> None:
        engine = SimulatedEngine("engine 3", SETTINGS, refuse_start=True)
        with pytest.raises(EngineError, match="engine 3 refuses to start"):
            await engine.start()
        with pytest.raises(EngineLostError, match="has not been started"):
            await engine.generate(prompts(1))

    virtual_time.run(program())
