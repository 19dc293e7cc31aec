"""The real loop under any order of events: hypothesis finishes and fails rollouts, ends steps and pushes, and restarts.

With evaluations by the engines of training, by one of their own that may be lost, or none; with streaming or without.
Engines, learner and pusher do nothing by themselves: each call waits until the machine answers it. Invariants are
looked at after every event; at the end everything is answered, and the run must come to its last step.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from generator.link import EngineError
from generator.rollout import Prompt, Rollout, ScoredRollout, Segment
from generator.virtual_time import VirtualTimeLoop
from tests.trainer.loop_doubles import Engines, Learner, Pusher, Watch, parts
from trainer.config import WatchdogConfig
from trainer.episodes import SingleTurn
from trainer.evaluation import LOOK_SECONDS, Evaluations, Evaluator
from trainer.groups import KeptGroups
from trainer.loop import Parts, train
from trainer.step_metrics import StepResult
from weight_sync.push import PushReport

STEPS, BATCH, SIZE = 8, 2, 2
HELD_OUT = [Prompt(number, (1, 2), "", {}) for number in range(2)]
ENDS = ["stop", "stop", "stop", "flat", "failed", "unscored"]
"""How a group ends: scored, with equal rewards, failed at the engine, or without a reward."""
TURNS = 1000
"""Turns of the event loop after which everybody waits for an answer, if not before."""


@dataclass
class Call:
    """A group that is being sampled."""

    rollouts: list[Rollout]
    answer: asyncio.Future[list[Rollout]]


@dataclass
class Answered(Engines):
    """Samples when the machine says so."""

    calls_open: list[Call] = field(default_factory=list)

    async def generate(self, rollouts: list[Rollout], sampling: Any = None) -> list[Rollout]:
        self.calls += 1
        call = Call(list(rollouts), asyncio.get_running_loop().create_future())
        self.calls_open.append(call)
        try:
            return await call.answer
        finally:
            self.calls_open.remove(call)


@dataclass
class AnsweredLearner(Learner):
    """Ends a step when the machine says so, after it has checked the bound on every token."""

    step_open: asyncio.Future[None] | None = None
    """Of a step, or of what it begins with."""

    async def accumulate(self, rollouts: Any, version: int) -> None:
        await self.answered()
        self.parts += rollouts

    async def train(self, rollouts: Any, version: int) -> StepResult:
        await self.answered()
        return await super().train(rollouts, version)

    async def answered(self) -> None:
        self.step_open = asyncio.get_running_loop().create_future()
        try:
            await self.step_open
        finally:
            self.step_open = None


@dataclass
class AnsweredPusher(Pusher):
    """Publishes when the machine says so: until then engines sample from the version before."""

    push_open: asyncio.Future[None] | None = None

    async def push(self, version: int) -> PushReport:
        self.push_open = asyncio.get_running_loop().create_future()
        try:
            await self.push_open
        finally:
            self.push_open = None
        return await super().push(version)


class Scores:
    """A rollout that failed has no reward; now and then a reward function fails too, or likes all rollouts alike."""

    broken = False
    flat = False

    async def score(self, prompt: Any, rollouts: list[Rollout], texts: list[str]) -> tuple[ScoredRollout, ...]:
        rewards = [None if self.broken else float(self.flat or number % 2) for number in range(len(rollouts))]
        return tuple(ScoredRollout(r, "", reward, {}) for r, reward in zip(rollouts, rewards, strict=True))

    def take_counts(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds of the flow."""

    step: int
    prompts: dict[str, Any]
    kept: KeptGroups


class Flow(RuleBasedStateMachine):
    """One run, restarted from its checkpoints now and then."""

    @initialize(
        bound=st.integers(0, 2),
        running=st.sampled_from([1, 3, 100]),
        on_expired=st.sampled_from(["mask_tokens", "drop_rollout", "drop_group"]),
        refill=st.integers(0, 1),
        rows=st.sampled_from([3, 40]),
        streaming=st.booleans(),
        every=st.sampled_from([1, 1, 3]),
        evaluated_by=st.sampled_from(["nobody", "all", "one of its own"]),
    )
    def start(self, **options: Any) -> None:
        self.loop = VirtualTimeLoop()
        self.options = options
        self.checkpoint: Checkpoint | None = None
        self.evaluated: dict[int, dict[str, float]] = {}
        self.given_up: set[int] = set()
        """Versions whose evaluation may be missing at the end."""
        self.begin()

    def begin(self) -> None:
        """A process of the run: from the checkpoint, if there is one."""
        changes = dict(self.options)
        bound, refill, self.every = (changes.pop(name) for name in ("bound", "refill", "every"))
        self.evaluated_by = changes.pop("evaluated_by")
        engines = Answered()
        self.scores = Scores()
        run = parts(
            steps=STEPS, batch=BATCH, bound=bound, engines=engines, rewards=self.scores,
            learner=AnsweredLearner(bound), pusher=AnsweredPusher(engines), **changes,
        )  # fmt: skip
        run.config.algorithm.filter.refill = refill
        run.config.watchdog = WatchdogConfig(warn_after=1e6, fail_after=1e6)
        if self.checkpoint is not None:
            run.prompts.load_state_dict(self.checkpoint.prompts, self.checkpoint.kept.prompt_ids)
            run.steps_done = self.checkpoint.step
            run.admission.continue_at(self.checkpoint.step, len(self.checkpoint.kept.scored))
            run.groups.restore(self.checkpoint.kept)
        run.evaluations = self.evaluations(engines)
        self.run: Parts = run
        self.task = self.loop.create_task(train(run))
        self.settle()

    def evaluations(self, engines: Answered) -> Evaluations:
        """Of a process of the run: the engine of their own, if they have one, is a new one."""
        self.own = Answered(serving=0)
        self.own_pusher = AnsweredPusher(self.own)
        self.replaceable = True
        if self.evaluated_by == "nobody":
            return Evaluations()
        begun_at = 0 if self.checkpoint is None else self.checkpoint.step
        self.evaluated = {version: metrics for version, metrics in self.evaluated.items() if version <= begun_at}

        async def send(version: int, weights: asyncio.Lock) -> None:
            if not self.replaceable:
                raise EngineError("no engine is left")
            async with weights:
                await self.own_pusher.push(version)
            assert len(self.run.learner.batches) + begun_at == version, "the learner holds another version"
            self.own.serving = 1

        def report(version: int, metrics: dict[str, float]) -> None:
            assert version not in self.evaluated
            self.evaluated[version] = metrics

        alone = self.evaluated_by == "one of its own"
        episodes = SingleTurn(self.own if alone else engines, self.scores, str, Watch())
        return Evaluations(
            Evaluator(HELD_OUT, episodes, SIZE, 1.0), self.every, STEPS,
            serving=lambda: self.own.serving if alone else 1,
            report=report, reported=lambda version: version in self.evaluated, send=send if alone else None,
        )  # fmt: skip

    def settle(self) -> None:
        """Until everybody waits for an answer. No time passes."""

        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)
                if not self.loop._ready:  # type: ignore[attr-defined]
                    return
            raise AssertionError("the loop goes round and round")

        self.loop.run_until_complete(turns())
        if self.task.done():
            self.task.result()

    def teardown(self) -> None:
        if not hasattr(self, "task"):
            return
        self.scores.broken = self.scores.flat = False
        for _ in range(1000):
            if self.task.done():
                break
            for call in list(self.run.engines.calls_open):
                self.answer(call, "stop")
            for call in list(self.own.calls_open) if self.own.serving else []:
                self.answer(call, "stop")
            self.answer_learner()
            self.answer_pusher()
        self.stop()
        self.loop.close()
        assert self.run.steps_done == STEPS, "the run did not come to its last step although everything was answered"
        assert self.run.groups.kept({}).prompt_ids == []
        if self.evaluated_by != "nobody":
            assert self.evaluated.keys() | self.given_up >= {*range(0, STEPS, self.every), STEPS}

    def stop(self) -> None:
        self.give_up_the_evaluation()
        self.task.cancel()
        self.loop.run_until_complete(asyncio.wait({self.task}))
        if not self.task.cancelled():
            self.task.result()

    def give_up_the_evaluation(self) -> None:
        if (version := self.run.evaluations.going_on) is not None:
            self.given_up.add(version)

    def answer(self, call: Call, reason: Any) -> None:
        """The group ends: what has no token yet gets one."""
        version = (self.own if call in self.own.calls_open else self.run.engines).version
        ended = [
            one if one.finish_reason else replace(self.with_token(one, version), finish_reason=reason)
            for one in call.rollouts
        ]
        call.answer.set_result(ended)
        self.settle()

    def with_token(self, rollout: Rollout, version: int) -> Rollout:
        return rollout if rollout.response_token_ids else rollout.extended(Segment((5,), (-1.0,), version))

    def answer_learner(self) -> None:
        if (step := self.run.learner.step_open) is not None:
            step.set_result(None)
            self.settle()

    def answer_pusher(self) -> None:
        for pusher in (self.run.pusher, self.own_pusher):
            if (push := pusher.push_open) is not None:
                push.set_result(None)
                self.settle()

    # -- events -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.run.engines.calls_open)
    @rule(members=st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE, unique=True))
    def sample(self, members: list[int]) -> None:
        """These rollouts of every group get a token of the version that engines serve."""
        segment = Segment((5,), (-1.0,), self.run.engines.version)
        for call in self.run.engines.calls_open:
            for member in members:
                if not call.rollouts[member].finish_reason:
                    call.rollouts[member] = call.rollouts[member].extended(segment)

    @precondition(lambda self: self.run.engines.calls_open)
    @rule(newest=st.booleans(), end=st.sampled_from(ENDS))
    def finish(self, newest: bool, end: str) -> None:
        """The group that began last ends, or the one that has been in flight longest."""
        # A run in which nothing is ever scored ends with an error, which is another test.
        hopeless = self.run.unscored_in_a_row >= BATCH
        self.scores.broken, self.scores.flat = end == "unscored" and not hopeless, end == "flat"
        call = self.run.engines.calls_open[-1 if newest else 0]
        self.answer(call, "failed" if end == "failed" and not hopeless else "stop")

    @precondition(lambda self: self.run.learner.step_open)
    @rule()
    def step_ends(self) -> None:
        self.answer_learner()

    @precondition(lambda self: self.own.calls_open and self.own.serving)
    @rule(end=st.sampled_from(ENDS))
    def evaluated_group_ends(self, end: str) -> None:
        self.scores.broken, self.scores.flat = end == "unscored", end == "flat"
        self.answer(self.own.calls_open[0], "failed" if end == "failed" else "stop")

    @precondition(lambda self: self.own.serving)
    @rule(for_good=st.booleans())
    def engine_of_evaluations_is_lost(self, for_good: bool) -> None:
        """What it was sampling waits for another one, which comes with the next evaluation or not at all."""
        self.give_up_the_evaluation()
        self.own.serving, self.replaceable = 0, self.replaceable and not for_good
        if not self.replaceable:
            self.given_up |= set(range(STEPS + 1))
        self.loop.run_until_complete(asyncio.sleep(2 * LOOK_SECONDS))
        self.settle()

    @precondition(lambda self: self.run.pusher.push_open or self.own_pusher.push_open)
    @rule()
    def push_ends(self) -> None:
        self.answer_pusher()

    @rule(
        seed=st.integers(0, 1000),
        events=st.integers(1, 60),
        newest=st.sampled_from([0.5, 0.9, 1.0]),
        own=st.sampled_from(["ends", "stays", "stays", "is lost"]),
    )
    def a_while(self, seed: int, events: int, newest: float, own: str) -> None:
        """Many events at random: hypothesis alone rarely gets a run past its first steps. Old groups may be left.

        An evaluation on its own engine ends meanwhile, or does not, or is lost at the end.
        """
        chance = random.Random(seed)
        for _ in range(events):
            happening = chance.choice(["sample", "finish", "finish", "evaluate", "step", "push"])
            if happening == "sample":
                self.sample([0, 1][: chance.randint(1, SIZE)])
            elif happening == "finish" and self.run.engines.calls_open:
                self.finish(chance.random() < newest, chance.choice(ENDS))
            elif happening == "evaluate" and own == "ends" and self.own.calls_open and self.own.serving:
                self.evaluated_group_ends(chance.choice(ENDS))
            elif happening == "step":
                self.answer_learner()
            elif happening == "push":
                self.answer_pusher()
            self.check_invariants_now()
        if own == "is lost" and self.own.serving:
            self.engine_of_evaluations_is_lost(for_good=False)

    def check_invariants_now(self) -> None:
        self.no_place_is_lost()
        self.no_prompt_is_lost()
        self.somebody_is_at_work()
        self.no_place_is_left_empty()
        self.the_weights_are_held_only_where_they_change_or_travel()
        self.the_buffer_gives_the_oldest_first()

    @rule()
    def engine_joins(self) -> None:
        """The published version is pushed again, between steps."""
        self.run.engines.joined.set()
        self.settle()
        self.run.engines.joined.clear()

    @rule()
    def save(self) -> None:
        newest = {one.id: one for call in self.run.engines.calls_open for one in call.rollouts}
        self.checkpoint = Checkpoint(self.run.steps_done, self.run.prompts.state_dict(), self.run.groups.kept(newest))

    @precondition(lambda self: self.checkpoint is not None)
    @rule(save=st.booleans())
    def restart(self, save: bool) -> None:
        """With a checkpoint of this moment, or from an older one."""
        if save:
            self.save()
        self.stop()
        self.begin()

    # -- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def no_place_is_lost(self) -> None:
        admission, groups, config = self.run.admission, self.run.groups, self.run.config
        kept = groups.kept({})
        sampling = len(groups._sampling)
        assert admission.running == sampling
        assert admission.buffered + admission.consumed == len(kept.scored) + self.run.steps_done * BATCH
        assert admission.running <= admission.max_running
        bound = (admission.version + config.staleness.max_versions + 1) * BATCH
        assert admission.running + admission.buffered + admission.consumed <= min(bound, STEPS * BATCH)

    @invariant()
    def no_prompt_is_lost(self) -> None:
        kept = self.run.groups.kept({})
        assert Counter(kept.prompt_ids) == self.run.prompts._handed_out

    @invariant()
    def somebody_is_at_work(self) -> None:
        """Else nobody would ever do anything again."""
        evaluating = self.own.serving and self.own.calls_open
        at_work = self.run.engines.calls_open or evaluating or self.holders()
        assert self.task.done() or at_work

    def holders(self) -> list[Any]:
        """Steps and pushes in progress."""
        open_now = (self.run.learner.step_open, self.run.pusher.push_open, self.own_pusher.push_open)
        return [one for one in open_now if one is not None]

    @invariant()
    def no_place_is_left_empty(self) -> None:
        """Whoever else waits, for an evaluation for example."""
        assert self.task.done() or self.run.engines.calls == 0 or self.run.admission.capacity() == 0

    @invariant()
    def the_weights_are_held_only_where_they_change_or_travel(self) -> None:
        """Else an engine that joins would wait. After a step the learner has other weights than those evaluated."""
        if self.evaluated_by == "all" and self.run.evaluations.going_on is not None:
            return
        assert self.run.weights.locked() == bool(self.holders())

    @invariant()
    def the_buffer_gives_the_oldest_first(self) -> None:
        ages = [group.oldest_version for group in self.run.groups.buffer.groups()]
        assert ages == sorted(ages)


TestFlow = Flow.TestCase
TestFlow.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
