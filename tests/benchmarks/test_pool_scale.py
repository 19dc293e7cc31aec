from benchmarks.pool_scale import ENGINES, measure_loop, measure_push
from generator import virtual_time


def test_the_loop_makes_steps_over_engines_without_a_model_and_its_time_is_taken():
    assert virtual_time.run(measure_loop(in_flight=100, rollouts=1_000)) > 0


def test_a_push_calls_each_engine_a_few_times_however_many_rollouts_are_in_flight():
    calls = [virtual_time.run(measure_push(in_flight))[1] for in_flight in (100, 400)]
    assert calls == [4 * ENGINES, 4 * ENGINES]
