"""Evaluations beside training, with parts that have no model behind them."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from typing import Any

import pytest

from generator.link import EngineError, EngineLostError
from generator.rollout import Prompt, Rollout, ScoredRollout
from tests.trainer.loop_doubles import Engines, Pusher, Rewards, Watch, parts
from tests.virtual import in_virtual_time
from trainer.episodes import SingleTurn
from trainer.evaluation import EvaluationError, Evaluations, Evaluator, evaluation_metrics
from trainer.loop import train
from trainer.watchdog import evaluations_of

HELD_OUT = [Prompt(number, (1, 2), f"{number}?", {}) for number in range(5)]


def scored(*rewards: float | None) -> list[ScoredRollout]:
    rollout = Rollout("r", (1,), (5, 6), (-1.0, -1.0), (3, 3), (True, True), "stop")
    return [ScoredRollout(rollout, "", reward, {}) for reward in rewards]


def evaluator(engines: Any, rollouts: int = 2) -> Evaluator:
    return Evaluator(HELD_OUT, SingleTurn(engines, Rewards(), str, Watch()), rollouts, pass_reward=1.0)


def run_with(engines: Any, every: int, steps: int = 6, **changes: Any) -> tuple[Any, dict[int, dict[str, float]]]:
    found: dict[int, dict[str, float]] = {}

    def report(version: int, metrics: dict[str, float]) -> None:
        assert version not in found
        found[version] = metrics

    evaluations = Evaluations(evaluator(engines), every, last=steps, report=report, **changes)
    return parts(steps=steps, engines=engines, evaluations=evaluations), found


@pytest.mark.parametrize(("every", "versions"), [(1, [0, 1, 2, 3, 4, 5, 6]), (4, [0, 4, 6]), (0, [])])
@in_virtual_time
async def test_versions_are_evaluated_at_their_interval_and_the_last_one_too(every, versions):
    run, found = run_with(Engines(), every)
    await asyncio.wait_for(train(run), timeout=60)
    assert list(found) == versions
    assert run.watch.steps == [1, 2, 3, 4, 5, 6]


@in_virtual_time
async def test_an_evaluation_is_of_one_version_however_slow_it_is_and_training_goes_on_beside_it():
    """The double's tokens have the version of their moment, so a push in the middle would be found."""
    seen: list[int] = []

    class Slow(Engines):
        async def generate(self, rollouts: list[Rollout], sampling: Any = None) -> list[Rollout]:
            held_out = rollouts[0].id.startswith("evaluation")
            for _ in range(200 if held_out else 0):
                await asyncio.sleep(0)
            if held_out:
                seen.append(len(run.learner.batches))
            return await super().generate(rollouts)

    run, found = run_with(Slow(), every=1)
    await asyncio.wait_for(train(run), timeout=60)
    assert list(found) == [0, 1, 2, 3, 4, 5, 6]
    of_version_0 = seen[: len(HELD_OUT)]
    assert max(of_version_0) == 1, "the first batch is learned from while version 0 is evaluated, and no other"


@in_virtual_time
async def test_an_evaluation_is_one_span_of_the_trace():
    spans: list[tuple[str, str]] = []

    class Traced(Watch):
        def span(self, track: str, name: str, **more: Any) -> Any:
            spans.append((track, name))
            return super().span(track, name)

    engines = Engines(version=3)
    await Evaluator(HELD_OUT, SingleTurn(engines, Rewards(), str, Watch()), 1, 1.0, Traced()).run(3)
    assert spans == [("evaluation", "evaluation of version 3")]


@in_virtual_time
async def test_tokens_of_another_version_are_an_error_not_a_result():
    engines = Engines(version=3)
    with pytest.raises(EvaluationError, match=r"version 2 has tokens of \[3\]"):
        await evaluator(engines).run(2)


@in_virtual_time
async def test_an_error_of_an_evaluation_ends_the_run():
    engines = Engines()
    run, _ = run_with(engines, every=1)
    run.evaluations.evaluator = evaluator(Engines(version=9))
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(train(run), timeout=60)
    assert raised.group_contains(EvaluationError)


@in_virtual_time
async def test_what_was_reported_before_a_restart_is_not_evaluated_again():
    run, found = run_with(Engines(), every=2, reported=lambda version: version in (0, 4))
    await asyncio.wait_for(train(run), timeout=60)
    assert list(found) == [2, 6]


@in_virtual_time
async def test_with_no_engine_left_an_evaluation_is_given_up_so_that_a_push_can_bring_weights(caplog, monkeypatch):
    monkeypatch.setattr("trainer.evaluation.LOOK_SECONDS", 0.01)

    class Dead(Engines):
        async def generate(self, rollouts: list[Rollout], sampling: Any = None) -> list[Rollout]:
            await asyncio.Event().wait()
            raise AssertionError

    evaluations = Evaluations(evaluator(Dead()), every=1, serving=lambda: 0)
    await evaluations.begin(4, asyncio.Lock())
    await asyncio.wait_for(evaluations.ended(), timeout=60)
    assert "version 4 is given up" in caplog.text
    await asyncio.wait_for(evaluations.ended(), timeout=60)


def test_pass_at_k_is_the_share_of_k_rollouts_of_which_one_passes():
    rewards = [1.0, 0.0, 0.2, 1.5]
    metrics = evaluation_metrics([scored(*rewards)], pass_reward=1.0)
    for k in (1, 2, 4):
        chosen = list(itertools.combinations(rewards, k))
        assert metrics[f"eval/pass@{k}"] == pytest.approx(sum(max(some) >= 1.0 for some in chosen) / len(chosen))
    assert "eval/pass@8" not in metrics


def test_what_has_no_reward_is_excluded_and_never_counts_as_wrong():
    metrics = evaluation_metrics([scored(1.0, None), scored(None, None), scored(0.0, 1.0)], pass_reward=1.0)
    assert metrics["eval/reward_mean"] == pytest.approx(2 / 3)
    assert metrics["eval/excluded"] == 3
    assert metrics["eval/prompts"] == 3
    assert metrics["eval/pass@1"] == pytest.approx((1.0 + 0.5) / 2)
    assert metrics["eval/pass@2"] == 1.0


def test_an_evaluation_without_any_reward_has_no_mean_instead_of_zero():
    metrics = evaluation_metrics([scored(None)], pass_reward=1.0)
    assert math.isnan(metrics["eval/reward_mean"])
    assert "eval/pass@1" not in metrics


def test_the_data_sets_of_a_mixture_have_a_mean_each():
    metrics = evaluation_metrics([scored(1.0), scored(0.0, None), scored(None)], 1.0, ["easy", "easy", "hard"])
    assert metrics["eval/by_source/easy/reward_mean"] == 0.5
    assert math.isnan(metrics["eval/by_source/hard/reward_mean"])
    assert not any("by_source" in name for name in evaluation_metrics([scored(1.0)], 1.0, [""]))


@in_virtual_time
async def test_with_engines_of_its_own_pushes_to_the_others_do_not_wait_for_an_evaluation_and_each_is_of_one_version():
    own, training = Engines(), Engines()
    slow = asyncio.Event()
    sent: list[tuple[int, int]] = []

    class Slow(SingleTurn):
        async def sample(self, prompt: Prompt, rollouts: list[Rollout], version: int) -> Any:
            if version == 0:
                await slow.wait()
            return await super().sample(prompt, rollouts, version)

    async def send(version: int, weights: asyncio.Lock) -> None:
        own.version = version
        sent.append((version, training.version))

    run, found = run_with(training, every=4, steps=6, send=send)
    run.evaluations.evaluator = Evaluator(HELD_OUT, Slow(own, Rewards(), str, Watch()), 2, pass_reward=1.0)
    running = asyncio.create_task(train(run))
    for _ in range(10_000):
        await asyncio.sleep(0)
    assert len(run.learner.batches) == 4, "so many until the next evaluation is due"
    assert training.version >= 3
    assert (run.evaluations.going_on, found) == (0, {})
    slow.set()
    await asyncio.wait_for(running, timeout=60)
    assert list(found) == [0, 4, 6]
    assert sent == [(0, 0), (4, 4), (6, 6)], "each version is sent while the learner holds it"


@in_virtual_time
async def test_an_evaluation_of_its_own_engines_that_has_ended_is_reported_at_the_next_push():
    own = Engines()

    async def send(version: int, weights: asyncio.Lock) -> None:
        own.version = version

    run, found = run_with(Engines(), every=1, steps=3, send=send)
    run.evaluations.evaluator = evaluator(own)
    await asyncio.wait_for(train(run), timeout=60)
    assert list(found) == [0, 1, 2, 3]


class Held(SingleTurn):
    """Samples once ``opened`` is set."""

    opened: asyncio.Event

    async def sample(self, prompt: Prompt, rollouts: list[Rollout], version: int) -> Any:
        await self.opened.wait()
        return await super().sample(prompt, rollouts, version)


def held_evaluator(own: Engines) -> tuple[Evaluator, asyncio.Event]:
    episodes = Held(own, Rewards(), str, Watch())
    episodes.opened = asyncio.Event()
    return Evaluator(HELD_OUT, episodes, 2, pass_reward=1.0), episodes.opened


@in_virtual_time
async def test_engines_of_training_are_at_work_and_get_weights_while_the_next_evaluation_waits_for_the_one_before():
    own, training = Engines(), Engines()

    async def send(version: int, weights: asyncio.Lock) -> None:
        async with weights:
            own.version = version

    run, found = run_with(training, every=1, steps=3, send=send)
    run.admission.max_versions = run.learner.bound = 0
    run.evaluations.evaluator, opened = held_evaluator(own)
    running = asyncio.create_task(train(run))
    for _ in range(10_000):
        await asyncio.sleep(0)
    assert (run.evaluations.going_on, run.pusher.pushed) == (0, [0, 1])
    assert training.calls == 2 * 3, "the groups of version 1 are sampled too"
    training.joined.set()
    for _ in range(100):
        await asyncio.sleep(0)
        if len(run.pusher.pushed) > 2:
            training.joined.clear()
    assert run.pusher.pushed[:3] == [0, 1, 1], "an engine that joined gets the weights"
    opened.set()
    await asyncio.wait_for(running, timeout=60)
    assert list(found) == [0, 1, 2, 3]


class Hangs(Engines):
    """Lost: nobody samples until another engine serves, which the next evaluation brings."""

    async def generate(self, rollouts: list[Rollout], sampling: Any = None) -> list[Rollout]:
        if self.version == 2:
            await asyncio.Event().wait()
        return await super().generate(rollouts)


class Raises(Engines):
    """The same, after so long that the pool does not wait any more."""

    async def generate(self, rollouts: list[Rollout], sampling: Any = None) -> list[Rollout]:
        if self.version == 2:
            raise EngineError("no engine has served for 60 s (engine.start_timeout)")
        return await super().generate(rollouts)


@pytest.mark.parametrize("lost", [Hangs, Raises])
@in_virtual_time
async def test_a_lost_engine_of_its_own_costs_an_evaluation_its_result_and_nothing_else(lost, caplog):
    own = lost()

    async def send(version: int, weights: asyncio.Lock) -> None:
        own.version = version

    run, found = run_with(Engines(), every=2, send=send, serving=lambda: int(own.version != 2))
    run.evaluations.evaluator = evaluator(own)
    await asyncio.wait_for(train(run), timeout=60)
    assert run.steps_done == 6
    assert list(found) == [0, 4, 6]
    assert "the evaluation of version 2 is given up and has no result: no engine" in caplog.text


@in_virtual_time
async def test_training_goes_on_without_evaluations_when_their_engine_cannot_be_replaced_any_more(caplog):
    async def send(version: int, weights: asyncio.Lock) -> None:
        if version > 0:
            raise EngineError("no engine is left and engine.max_restarts=3 is used up")

    run, found = run_with(Engines(), every=3, send=send)
    run.evaluations.evaluator = evaluator(Engines())
    await asyncio.wait_for(train(run), timeout=60)
    assert (run.steps_done, list(found)) == (6, [0])
    for version in (3, 6):
        assert f"version {version} is given up and has no result: no engine is left" in caplog.text


@in_virtual_time
async def test_a_result_that_cannot_be_right_ends_the_run_also_when_an_engine_was_lost_beside_it():
    class Some(Engines):
        async def generate(self, rollouts: list[Rollout], sampling: Any = None) -> list[Rollout]:
            if rollouts[0].id.startswith("evaluation-0-1-"):
                raise EngineLostError("gone")
            raise ValueError("a fault of ours")

    async def send(version: int, weights: asyncio.Lock) -> None:
        pass

    evaluations = Evaluations(evaluator(Some()), every=1, send=send)
    await evaluations.begin(0, asyncio.Lock())
    with pytest.raises(ExceptionGroup) as raised:
        await evaluations.ended()
    assert raised.group_contains(ValueError)


@in_virtual_time
async def test_an_evaluation_that_the_end_of_the_run_cuts_off_is_named(caplog):
    run, found = run_with(Engines(), every=1)
    run.evaluations.evaluator, _ = held_evaluator(Engines())
    running = asyncio.create_task(train(run))
    for _ in range(1000):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert found == {}
    assert "the evaluation of version 0 is given up and has no result: the run ends" in caplog.text


@in_virtual_time
async def test_engines_of_evaluations_are_counted_and_named_with_what_is_waited_for():
    own = Engines(counts=Counter({"engines/lost": 2, "engines/restarted": 1}))

    async def send(version: int, weights: asyncio.Lock) -> None:
        own.version = version
        said.append(evaluations_of(run))

    said: list[str] = []
    run, _ = run_with(Engines(counts={"engines/lost": 3}), every=2, steps=3, send=send)
    run.evaluations.evaluator = evaluator(own)
    assert evaluations_of(run) == ""
    run.evaluation_engines, run.evaluation_pusher = own, Pusher(own)
    await asyncio.wait_for(train(run), timeout=60)
    assert (run.watch.counts["engines/lost"], run.watch.counts["engines/restarted"]) == (5, 1)
    assert [metrics["engines/lost"] for metrics in run.watch.metrics] == [5, 0, 0]
    assert said[0] == "; push for evaluations: idle; 1 of 1 engines serve them"
    await run.evaluations.begin(2, run.weights)
    assert evaluations_of(run).startswith("; version 2 is evaluated; ")
    await run.evaluations.give_up("enough")
