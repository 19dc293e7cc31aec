"""The learner group with real Ray actors: results of all ranks, original causes, and nothing left running."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny import learner_spec
from trainer.config import LearnerConfig
from trainer.train_rollout import TrainRollout

VOCABULARY = 17


def rollouts(advantage: float = 1.0) -> list[TrainRollout]:
    r = random.Random(0)
    return [
        TrainRollout(
            id=f"r{n}",
            group=n // 2,
            prompt_token_ids=(1 + n // 2, 2),
            response_token_ids=tuple(r.choices(range(VOCABULARY), k=5)),
            logprobs=(-2.8,) * 5,
            versions=(0,) * 5,
            loss_mask=(True,) * 5,
            advantage=advantage * (-1) ** n,
        )
        for n in range(4)
    ]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def local_ray():
    import ray

    ray.init(num_cpus=1, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.engine
async def test_two_ranks_train_together_and_keep_the_cause_of_a_failure(local_ray, model_folder, tmp_path):
    from trainer.learner_error import LearnerError
    from trainer.learner_group import LearnerGroup

    spec = learner_spec(model_folder, learner=LearnerConfig(ranks=2, zero_stage=2, timeout=300.0))
    group = LearnerGroup(spec)
    await group.start()
    before = await group.logprobs([[1, 2, 3]])
    metrics = (await group.train(rollouts(), version=0)).metrics
    assert metrics["tokens/trained"] == 20
    assert metrics["policy/grad_norm"] > 0
    after = await group.logprobs([[1, 2, 3]])
    assert before != after
    await group.save(tmp_path / "checkpoint")
    assert "policy/loss is" in (await group.train(rollouts(advantage=3e38), version=1)).skipped
    assert await group.steps_done() == 2
    with pytest.raises(
        LearnerError, match=r"kl_penalties failed on rank 0: RuntimeError: .*no reference.*rank 1"
    ) as caught:
        await group.kl_penalties(rollouts())
    assert type(caught.value.__cause__).__name__ == "RuntimeError"
    with pytest.raises(LearnerError, match=r"load failed on rank 0: FileNotFoundError: .*holds no learner checkpoint"):
        await group.load(tmp_path)
    await group.load(tmp_path / "checkpoint")
    assert await group.logprobs([[1, 2, 3]]) == after
    assert await group.steps_done() == 1
    actors = list(group._actors)
    await group.close()
    await group.close()
    # A killed actor may still answer a call that overtakes the kill: what counts is that it ends.
    async with asyncio.timeout(120):
        for actor in actors:
            with pytest.raises(local_ray.exceptions.RayActorError):
                await call_again_and_again(actor)


async def call_again_and_again(actor) -> None:
    while True:
        await actor.rendezvous.remote()


@pytest.mark.engine
async def test_a_call_past_its_deadline_is_an_error_that_names_the_rank_and_the_key(local_ray, model_folder):
    from trainer.learner_error import LearnerError
    from trainer.learner_group import LearnerGroup

    spec = learner_spec(model_folder)
    group = LearnerGroup(replace(spec, learner=replace(spec.learner, timeout=0.01)))
    with pytest.raises(LearnerError, match=r"rendezvous: rank 0 did not return within 0.01 s \(learner.timeout\)"):
        await group.start()
    await group.close()


@pytest.mark.engine
async def test_a_model_that_does_not_load_is_named(local_ray, tmp_path):
    from trainer.learner_error import LearnerError
    from trainer.learner_group import LearnerGroup

    group = LearnerGroup(learner_spec(tmp_path))
    with pytest.raises(LearnerError, match=r"learner start failed on rank 0: .*" + tmp_path.name):
        await group.start()
    await group.close()
