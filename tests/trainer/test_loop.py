"""The two coroutines, with parts that have the methods of the real ones and no model behind them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from generator import virtual_time
from generator.pool import EnginePool
from generator.resume import Sampling
from generator.rollout import Group, Rollout, ScoredRollout
from generator.roster import ABLE
from generator.simulated import SimulatedEngine
from generator.simulated_stream import SimulatedSettings, whole_stream
from tests.pools import pool_settings_for
from tests.trainer.loop_doubles import Engines, Learner, Rewards, parts
from tests.virtual import in_virtual_time
from trainer.config import KLConfig, WatchdogConfig
from trainer.loop import NonFiniteError, Parts, RewardError, train
from trainer.state import save_checkpoint
from trainer.step_metrics import StepResult
from weight_sync import push as weight_push
from weight_sync.push import PushReport
from weight_sync.simulated import SimulatedSender
from weight_sync.verification import Verification


async def finish(run: Parts) -> Parts:
    await asyncio.wait_for(train(run), timeout=60)
    return run


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("running", [1, 2, 100], ids=lambda n: f"{n} groups at a time")
@in_virtual_time
async def test_every_step_is_made_and_pushed_whatever_the_bounds(bound, running):
    """With fewer running groups than a batch has, a place that a finished group leaves must be taken at once."""
    run = await finish(parts(bound=bound, running=running))
    assert run.steps_done == 6
    assert run.watch.steps == [1, 2, 3, 4, 5, 6]
    assert run.pusher.pushed == [0, 1, 2, 3, 4, 5, 6]
    assert all(len(batch) == 3 * 2 for batch in run.learner.batches)


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("place", ["loss", "reward"])
@in_virtual_time
async def test_the_learner_begins_before_the_batch_is_full_and_gets_every_rollout_once(bound, place):
    run = parts(bound=bound, streaming=True, batch=4, steps=8)
    run.config.algorithm.kl = KLConfig(coefficient=0.1, place=place)
    run.config.algorithm.advantage = "dr_grpo"
    await finish(run)
    assert run.learner.began > 0
    assert sum(metrics["tokens/streamed"] for metrics in run.watch.metrics) > 0
    trained = iter(run.watch.groups)
    for batch in run.learner.batches:
        groups = [next(trained) for _ in range(4)]
        assert [r.id for r in batch] == [item.rollout.id for group in groups for item in group.rollouts]
        assert [r.group for r in batch] == [0, 0, 1, 1, 2, 2, 3, 3]
        # The double has every second rollout of a call leave the reference, and a call holds whole groups.
        paid = 0.5 if place == "reward" else 0.0
        assert [r.advantage for r in batch] == [-(1.0 - paid) / 2, (1.0 - paid) / 2] * 4


async def ticks(number: int = 50) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("streaming", [False, True])
@in_virtual_time
async def test_no_push_waits_at_the_learner_behind_the_pass_for_the_penalties(streaming):
    """An engine joins in the middle of every pass: its push begins when the pass is through."""
    beside: list[int] = []

    class Passing(Learner):
        async def kl_penalties(self, rollouts: Any) -> list[float]:
            before = len(run.pusher.pushed)
            run.engines.joined.set()
            await ticks()
            beside.append(len(run.pusher.pushed) - before)
            run.engines.joined.clear()
            return [0.0 for _ in rollouts]

    run = parts(learner=Passing(1), streaming=streaming)
    run.config.algorithm.kl = KLConfig(coefficient=0.1, place="reward")
    await finish(run)
    assert set(beside) == {0}


@in_virtual_time
async def test_no_push_waits_at_the_learner_behind_a_checkpoint_and_an_interrupt_waits_for_no_push(tmp_path):
    class Saving(Learner):
        async def save(self, folder: str) -> None:
            held.append(run.weights.locked())
            await asyncio.to_thread(Path(folder).mkdir, parents=True)

    held: list[bool] = []
    run = parts(learner=Saving(1), engines=Reporting())
    run.config.run_dir = str(tmp_path)
    run.watch.state_dict = dict
    await save_checkpoint(run)
    assert held == [True]
    async with run.weights:  # by a push that does not end
        await asyncio.wait_for(save_checkpoint(run, newest={}), timeout=60)


class Reporting(Engines):
    """Has nothing in flight."""

    async def partial_rollouts(self, limit: float) -> list[Rollout]:
        return []


@in_virtual_time
async def test_a_run_that_hangs_ends_with_an_error_that_says_what_it_waits_for():
    class Hanging(Learner):
        async def train(self, rollouts: Any, version: int) -> StepResult:
            await asyncio.Event().wait()
            raise AssertionError

    run = parts(learner=Hanging(1))
    run.config = replace(run.config, watchdog=WatchdogConfig(warn_after=0.05, fail_after=0.2))
    with pytest.raises(ExceptionGroup) as raised:
        await finish(run)
    assert "nothing came to its end" in str(raised.value.exceptions[0])
    assert "3 make a batch" in str(raised.value.exceptions[0])


@in_virtual_time
async def test_a_data_set_smaller_than_a_batch_is_sampled_again_under_other_rollout_ids():
    run = await finish(parts(rows=1, batch=4))
    ids = [rollout.id for batch in run.learner.batches for rollout in batch]
    assert len(set(ids)) == len(ids) == 6 * 4 * 2


@in_virtual_time
async def test_on_policy_training_learns_from_nothing_but_the_current_version():
    run = await finish(parts(bound=0))
    for step, batch in enumerate(run.learner.batches):
        assert {version for rollout in batch for version in rollout.versions} == {step}


@in_virtual_time
async def test_off_policy_rollouts_are_sampled_by_more_than_one_version():
    run = await finish(parts(bound=2, steps=20))
    assert max(len(set(rollout.versions)) for batch in run.learner.batches for rollout in batch) > 1


@pytest.mark.parametrize("on_expired", ["mask_tokens", "drop_rollout", "drop_group"])
@in_virtual_time
async def test_every_generated_token_is_trained_expired_or_lost(on_expired):
    run = await finish(parts(bound=1, steps=15, on_expired=on_expired))
    masked = sum(
        len(r.rollout.loss_mask) - sum(r.rollout.loss_mask) for group in run.watch.groups for r in group.rollouts
    )
    watch = run.watch
    left = sum(watch.counts.get(name, 0) for name in ("tokens/expired", "tokens/lost"))
    assert watch.generated == watch.trained + masked + left


@in_virtual_time
async def test_a_group_that_expired_is_sampled_again_and_the_run_reaches_its_last_step():
    """Groups of a version long gone are put into the buffer by hand: none of their tokens may be learned from."""
    run = parts(bound=1, steps=4)
    run.admission.version = run.steps_done = 2
    run.admission.consumed = 2 * 3
    old = Rollout("old", (1, 2), (5,), (-1.0,), (0,), (True,), "stop")
    prompt = run.prompts.next()
    run.admission.admit()
    run.admission.finished()
    run.groups.buffer.put(Group(prompt, (ScoredRollout(old, "", 1.0, {}),) * 2, 0))
    await finish(run)
    assert run.watch.counts["tokens/expired"] == 2
    expired = [run.watch.metrics[0][f"staleness/expired_{what}"] for what in ("tokens", "rollouts", "groups")]
    assert expired == [2.0, 2.0, 1.0]
    assert "old" not in {rollout.id for batch in run.learner.batches for rollout in batch}


@in_virtual_time
async def test_rewards_that_score_nothing_end_the_run_with_what_they_did():
    with pytest.raises(ExceptionGroup) as failure:
        await finish(parts(rewards=Rewards(broken=True)))
    assert failure.group_contains(RewardError, match="reward/failed")


@in_virtual_time
async def test_a_skipped_update_keeps_its_batch_and_its_version_is_published_like_any_other():
    run = await finish(parts(learner=Learner(1, skips=frozenset({1, 2, 4}))))
    assert run.watch.kept == [(step, "the loss is nan", 3) for step in (2, 3, 5)]
    assert run.pusher.pushed == [0, 1, 2, 3, 4, 5, 6]
    assert run.watch.steps == [1, 2, 3, 4, 5, 6]


@in_virtual_time
async def test_skipped_steps_in_a_row_end_the_run_with_the_reason_after_the_last_was_written():
    run = parts(learner=Learner(1, skips=frozenset({0, 2, 3, 4, 5})))
    with pytest.raises(ExceptionGroup) as failure:
        await finish(run)
    assert failure.group_contains(
        NonFiniteError, match=r"3 steps in a row .*max_skipped_steps.*step 5: the loss is nan"
    )
    assert run.watch.steps == [1, 2, 3, 4, 5]
    assert [step for step, *_ in run.watch.kept] == [1, 3, 4, 5]


@pytest.mark.parametrize("place", ["loss", "reward"])
@in_virtual_time
async def test_what_a_rollout_pays_for_leaving_the_reference_enters_its_advantage_where_the_reward_is_its_place(place):
    run = parts(steps=2)
    run.config.algorithm.kl = KLConfig(coefficient=0.1, place=place)
    run.config.algorithm.advantage = "dr_grpo"
    await finish(run)
    paid = 0.5 if place == "reward" else 0.0
    for batch in run.learner.batches:
        assert [rollout.advantage for rollout in batch] == [-(1.0 - paid) / 2, (1.0 - paid) / 2] * 3


@in_virtual_time
async def test_dynamic_sampling_replaces_groups_with_equal_rewards_until_the_batch_teaches_something():
    run = await finish_refilling(parts(rewards=Rewards(flat=lambda p: p.id % 2 == 0), bound=1, steps=5), refill=8)
    assert {group.prompt.id % 2 for group in run.watch.groups} == {1}
    assert all(len(batch) == 3 * 2 for batch in run.learner.batches)
    replaced = sum(metrics["filter/replaced_groups"] for metrics in run.watch.metrics)
    assert replaced > 0
    masked = sum(r.rollout.loss_mask.count(False) for group in run.watch.groups for r in group.rollouts)
    assert run.watch.generated == run.watch.trained + masked + run.watch.counts["tokens/expired"]


@in_virtual_time
async def test_dynamic_sampling_ends_after_so_many_batches_and_takes_what_there_is():
    run = await finish_refilling(parts(rewards=Rewards(flat=lambda prompt: True), bound=0, steps=3), refill=2)
    assert [metrics["filter/replaced_groups"] for metrics in run.watch.metrics] == [6, 6, 6]
    assert run.steps_done == 3


async def finish_refilling(run: Parts, refill: int) -> Parts:
    run.config.algorithm.filter.refill = refill
    return await finish(run)


@in_virtual_time
async def test_an_error_in_an_engine_ends_the_run_instead_of_leaving_the_learner_waiting():
    with pytest.raises(ExceptionGroup) as failure:
        await finish(parts(engines=Engines(error_after=4)))
    assert failure.group_contains(RuntimeError, match="the engine broke")


@in_virtual_time
async def test_nothing_is_sampled_beyond_what_the_steps_need():
    run = await finish(parts(steps=4, bound=3))
    assert run.engines.calls == 4 * 3
    assert len(run.groups.buffer) == 0


@in_virtual_time
async def test_an_engine_that_joins_gets_the_published_version_at_once():
    run = parts(steps=3, bound=1)
    run.engines.joined.set()
    pushed = run.pusher.push

    async def push(version: int) -> PushReport:
        if run.pusher.pushed:
            run.engines.joined.clear()
        return await pushed(version)

    run.pusher.push = push
    await finish(run)
    assert run.pusher.pushed == [0, 0, 1, 2, 3]


@dataclass
class Stalling(Engines):
    """The first rollout of every group fails."""

    async def generate(self, rollouts: list[Rollout], sampling: Any = None) -> list[Rollout]:
        first, *others = await super().generate(rollouts)
        return [replace(first, finish_reason="failed"), *others]


@in_virtual_time
async def test_a_failed_rollout_is_left_out_and_its_group_carries_on():
    run = await finish(parts(engines=Stalling(), steps=3))
    for group in run.watch.groups:
        assert [r.reward is None for r in group.rollouts] == [True, False]
        assert not any(group.rollouts[0].rollout.loss_mask)


@in_virtual_time
async def test_a_failed_rollout_costs_its_group_where_that_is_asked_for():
    run = parts(engines=Stalling(), steps=3, drop_group=True)
    with pytest.raises(ExceptionGroup) as failure:
        await finish(run)
    assert failure.group_contains(RewardError)


@dataclass
class SlowLearner(Learner):
    """A step takes half a minute of virtual time."""

    async def train(self, rollouts: Any, version: int) -> StepResult:
        await asyncio.sleep(30.0)
        return await super().train(rollouts, version)


SAMPLING = Sampling(max_tokens=64, stop_token_ids=frozenset(range(20)))
ENGINE = SimulatedSettings(SAMPLING, max_running=4, token_seconds=1.0, latency=0.05)


@pytest.mark.parametrize("ways", [("die",), ("die", "kill", "hang")], ids=["tokens survive", "any way"])
def test_a_run_whose_engines_are_killed_again_and_again_reaches_its_last_step_and_accounts_for_every_token(ways):
    """The real loop, pool and pusher; four simulated engines, of which 20 are lost at random moments."""
    chance = random.Random(0)
    engines: list[SimulatedEngine] = []
    killed: list[SimulatedEngine] = []

    def make(number: int) -> SimulatedEngine:
        engines.append(SimulatedEngine(f"engine {number}", ENGINE))
        return engines[-1]

    async def kill(pool: EnginePool) -> None:
        while len(killed) < 20:
            await asyncio.sleep(chance.uniform(0.0, 60.0))
            if well := [slot.link for slot in pool._roster.within(*ABLE) if slot.link not in killed]:
                killed.append(chance.choice(well))
                getattr(killed[-1], chance.choice(ways))()

    async def program() -> tuple[Parts, EnginePool]:
        pool = EnginePool(make, pool_settings_for(4, max_running=4, max_restarts=100))
        sender = SimulatedSender(seconds=2.0)

        async def connect() -> None:
            sender.connect([link.handle for link in await pool.take_members()])

        pusher = weight_push.Pusher(sender, pool, timeout=60.0, connect=connect)
        await pool.start()
        run = parts(steps=40, batch=4, bound=2, engines=pool, pusher=pusher, learner=SlowLearner(2))
        async with asyncio.timeout(100_000.0):
            killing = asyncio.create_task(kill(pool))
            await train(run)
            killing.cancel()
        await pool.shutdown()
        return run, pool

    run, pool = virtual_time.run(program())
    assert run.watch.steps == list(range(1, 41))
    assert len(killed) == 20
    assert pool.counts["engines/lost"] == 20
    assert pool.counts["rollouts/moved"] > 0
    for rollout in (rollout for batch in run.learner.batches for rollout in batch):
        expected = whole_stream(ENGINE, SAMPLING, Rollout(rollout.id, rollout.prompt_token_ids))
        assert list(zip(rollout.response_token_ids, rollout.logprobs, strict=True)) == expected
    masked = sum(r.rollout.loss_mask.count(False) for group in run.watch.groups for r in group.rollouts)
    left = sum(run.watch.counts.get(name, 0) for name in ("tokens/expired", "tokens/lost"))
    assert run.watch.generated == run.watch.trained + masked + left
    sampled = sum(engine._generated for engine in engines)
    if "kill" in ways:  # what an engine had not returned is gone with it, and sampled again
        assert pool.counts["rollouts/restarted"] > 0
        assert sampled > run.watch.generated
    else:
        assert pool.counts["rollouts/restarted"] == 0
        assert sampled == run.watch.generated


# -- engines that do not compute with what they were sent -----------------------------------------------------------


async def proven_run(count: int, wrong: int, *, steps: int = 6) -> tuple[Parts, list[SimulatedEngine]]:
    """A run on ``count`` simulated engines, of which ``wrong`` begin to compute something else after a while."""
    engines: list[SimulatedEngine] = []

    def make(number: int) -> SimulatedEngine:
        engines.append(SimulatedEngine(f"engine {number}", ENGINE))
        return engines[-1]

    async def go_wrong() -> None:
        await asyncio.sleep(150.0)
        for engine in engines[:wrong]:
            engine.logprob_error = 0.25

    pool = EnginePool(make, pool_settings_for(count, max_running=4))
    sender = SimulatedSender(seconds=2.0)

    async def connect() -> None:
        sender.connect([link.handle for link in await pool.take_members()])

    every = Verification("every", "float32", ((1, 2, 3), (4, 5)))
    pusher = weight_push.Pusher(sender, pool, timeout=60.0, connect=connect, verification=every)
    await pool.start()
    run = parts(steps=steps, batch=4, bound=2, engines=pool, pusher=pusher, learner=SlowLearner(2))
    going_wrong = asyncio.create_task(go_wrong())
    try:
        async with asyncio.timeout(10_000.0):
            await train(run)
    finally:
        going_wrong.cancel()
        await pool.shutdown()
    return run, engines


def test_a_run_goes_on_without_the_engine_that_computes_something_else():
    run, engines = virtual_time.run(proven_run(count=2, wrong=1, steps=12))
    assert run.watch.steps == list(range(1, 13))
    assert run.engines.counts["engines/lost"] == 1
    assert engines[0].version < engines[1].version == 12


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_fails_with_both_figures_when_no_engine_computes_what_the_learner_does(count):
    with pytest.raises(ExceptionGroup) as failure:
        virtual_time.run(proven_run(count, wrong=count, steps=12))
    assert failure.group_contains(weight_push.PushError, match=r"at verify.*0\.25 on average and by 0\.25 at most")
