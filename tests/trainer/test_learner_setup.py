import pytest

from tests.tiny import learner_spec
from trainer.config import LearnerConfig
from trainer.learner_setup import deepspeed_config


def test_bfloat16_never_uses_the_stage_that_accumulates_gradients_in_bfloat16():
    bfloat16 = deepspeed_config(learner_spec("m", dtype="bfloat16", learner=LearnerConfig(zero_stage=0)))
    assert bfloat16["zero_optimization"]["stage"] == 1
    assert bfloat16["data_types"]["grad_accum_dtype"] == "fp32"


def test_offloading_needs_a_stage_that_shards_the_optimizer():
    with pytest.raises(ValueError, match=r"learner\.offload needs learner\.zero_stage"):
        deepspeed_config(learner_spec("m", learner=LearnerConfig(offload=True)))
