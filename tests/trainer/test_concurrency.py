"""The bound on groups in flight follows the engines' KV caches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from generator import virtual_time
from generator.pool import EnginePool
from generator.pressure import Pressure, PressureGauge, together
from generator.simulated import SimulatedEngine
from generator.simulated_stream import SimulatedSettings
from tests.pools import pool_settings_for
from tests.trainer.loop_doubles import parts
from tests.trainer.test_loop import ENGINE, SlowLearner
from trainer.concurrency import ROOM, Concurrency
from trainer.loop import Parts, train
from weight_sync.push import Pusher
from weight_sync.simulated import SimulatedSender

CALM, BUSY, FULL = Pressure(0.5), Pressure(ROOM), Pressure(1.0, preemptions=3)


def test_preemptions_cut_the_bound_below_what_is_in_flight():
    assert Concurrency(most=100).look(FULL, running=50) == 40


def test_a_cut_is_not_repeated_before_it_can_show():
    concurrency = Concurrency(most=100)
    assert [concurrency.look(FULL, running) for running in (100, 95, 81, 80)] == [80, 80, 80, 64]


def test_groups_that_have_just_ended_do_not_make_the_cut_deeper():
    concurrency = Concurrency(most=100)
    concurrency.look(BUSY, running=100)
    assert concurrency.look(FULL, running=10) == 80


def test_the_bound_rises_step_by_step_where_it_is_what_keeps_groups_out_up_to_where_it_began():
    concurrency = Concurrency(most=100, bound=88)
    assert [concurrency.look(CALM, concurrency.bound) for _ in range(4)] == [93, 98, 100, 100]


def test_with_more_engines_the_bound_grows_as_they_do_and_may_rise_as_far_as_they_allow():
    concurrency = Concurrency(most=100, bound=50)
    assert [concurrency.resize(400), concurrency.resize(400), concurrency.resize(2)] == [200, 200, 1]
    concurrency.resize(3)
    assert [concurrency.look(CALM, concurrency.bound) for _ in range(3)] == [2, 3, 3]


@pytest.mark.parametrize(("pressure", "running"), [(CALM, 49), (BUSY, 50)], ids=["not in the way", "no room"])
def test_the_bound_stays_where_nothing_speaks_for_another(pressure, running):
    assert Concurrency(most=100, bound=50).look(pressure, running) == 50


def test_the_bound_never_falls_below_one_group():
    concurrency = Concurrency(most=2)
    for _ in range(5):
        concurrency.look(FULL, concurrency.bound)
    assert concurrency.bound == 1


def test_a_gauge_remembers_the_largest_usage_and_every_preemption_until_somebody_looks():
    class Scheduler:
        kv_cache_usage = 0.75

    class Iteration:
        num_preempted_reqs = 2

    gauge, fuller = PressureGauge(), Scheduler()
    fuller.kv_cache_usage = 0.875
    gauge.record(fuller, Iteration(), None, engine_idx=0)
    gauge.record(Scheduler(), None)
    gauge.record(None, Iteration())
    assert gauge.take() == Pressure(0.875, 4)
    assert gauge.take() == Pressure(0.75, 0)


def test_engines_together_are_as_full_as_the_fullest():
    assert together([Pressure(0.25, 1), Pressure(0.75, 2)]) == Pressure(0.75, 3)
    assert together([]) == Pressure()


async def run_with(settings: SimulatedSettings) -> Parts:
    pool = EnginePool(lambda number: SimulatedEngine(f"engine {number}", settings), pool_settings_for(2))
    sender = SimulatedSender(seconds=2.0)

    async def connect() -> None:
        sender.connect([link.handle for link in await pool.take_members()])

    pusher = Pusher(sender, pool, timeout=60.0, connect=connect)
    await pool.start()
    run = parts(steps=30, batch=4, bound=4, running=16, engines=pool, pusher=pusher, learner=SlowLearner(4))
    run.config.staleness.adapt_running_groups = True
    await train(run)
    await pool.shutdown()
    return run


def test_a_run_on_engines_that_preempt_has_fewer_groups_in_flight_and_reaches_its_last_step():
    crowded = virtual_time.run(run_with(replace(ENGINE, max_running=32, kv_tokens=200)))
    assert crowded.steps_done == 30
    bounds = [metrics["engines/max_running_groups"] for metrics in crowded.watch.metrics]
    assert min(bounds) < 16
    assert crowded.watch.counts["engines/preemptions"] > 0
    assert max(metrics["engines/kv_cache_usage"] for metrics in crowded.watch.metrics) == 1.0


def test_a_run_on_engines_with_room_keeps_its_bound():
    roomy = virtual_time.run(run_with(replace(ENGINE, max_running=32, kv_tokens=100_000)))
    assert {metrics["engines/max_running_groups"] for metrics in roomy.watch.metrics} == {16}
