from tests.tiny import learner_spec
from trainer.config import LearnerConfig, OptimizerConfig
from trainer.learner_setup import deepspeed_config, learning_rate_at


def test_the_learning_rate_warms_up_linearly_and_then_stays():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate_at(step, config) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate_at(0, OptimizerConfig(learning_rate=1.0)) == 1.0


def test_bfloat16_never_uses_the_stage_that_accumulates_gradients_in_bfloat16():
    bfloat16 = deepspeed_config(learner_spec("m", dtype="bfloat16", learner=LearnerConfig(zero_stage=0)))
    assert bfloat16["zero_optimization"]["stage"] == 1
    assert bfloat16["data_types"]["grad_accum_dtype"] == "fp32"
