import pytest

from trainer.config import OptimizerConfig
from trainer.schedule import learning_rate_at


def rates(steps: int = 8, **changes) -> list[float]:
    return [learning_rate_at(step, steps, OptimizerConfig(learning_rate=2.0, **changes)) for step in range(steps)]


def test_a_constant_rate_is_constant_from_the_first_step_or_from_the_end_of_the_warm_up():
    assert rates() == [2.0] * 8
    assert rates(warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_a_linear_schedule_falls_by_equal_amounts_towards_0_after_the_last_step():
    assert rates(schedule="linear", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 1.5, 1.0, 0.5]


def test_a_cosine_schedule_is_at_half_its_height_half_way():
    falling = rates(schedule="cosine", warmup_steps=4)
    assert falling[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert falling[6] == pytest.approx(1.0)
    assert falling[5] + falling[7] == pytest.approx(2.0)
    assert falling == [*falling[:4], *sorted(falling[4:], reverse=True)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 3, 8, 100])
def test_every_step_of_a_run_has_a_rate_above_0_and_none_above_the_configured_one(schedule, warmup_steps):
    assert all(0 < rate <= 2.0 for rate in rates(schedule=schedule, warmup_steps=warmup_steps))


def test_a_run_of_one_step_takes_the_whole_rate_and_a_step_past_the_last_takes_the_last_ones():
    config = OptimizerConfig(learning_rate=2.0, schedule="linear")
    assert learning_rate_at(0, 1, config) == 2.0
    assert learning_rate_at(9, 4, config) == learning_rate_at(3, 4, config) == 0.5
