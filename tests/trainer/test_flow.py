"""The real loop under any order of events: hypothesis finishes and fails rollouts, ends steps and pushes, and restarts.

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

from generator.rollout import Rollout, ScoredRollout, Segment
from generator.virtual_time import VirtualTimeLoop
from tests.trainer.loop_doubles import Engines, Learner, Pusher, parts
from trainer.config import WatchdogConfig
from trainer.groups import KeptGroups
from trainer.loop import Parts, train
from trainer.step_metrics import StepResult
from weight_sync.push import PushReport

STEPS, BATCH, SIZE = 8, 2, 2
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

    async def train(self, rollouts: Any, version: int) -> StepResult:
        self.step_open = asyncio.get_running_loop().create_future()
        try:
            await self.step_open
        finally:
            self.step_open = None
        return await super().train(rollouts, version)


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
    )
    def start(self, **options: Any) -> None:
        self.loop = VirtualTimeLoop()
        self.options = options
        self.checkpoint: Checkpoint | None = None
        self.begin()

    def begin(self) -> None:
        """A process of the run: from the checkpoint, if there is one."""
        changes = dict(self.options)
        bound, refill = changes.pop("bound"), changes.pop("refill")
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
        self.run: Parts = run
        self.task = self.loop.create_task(train(run))
        self.settle()

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
            self.answer_learner()
            self.answer_pusher()
        self.stop()
        self.loop.close()
        assert self.run.steps_done == STEPS, "the run did not come to its last step although everything was answered"
        assert self.run.groups.kept({}).prompt_ids == []

    def stop(self) -> None:
        self.task.cancel()
        self.loop.run_until_complete(asyncio.wait({self.task}))
        if not self.task.cancelled():
            self.task.result()

    def answer(self, call: Call, reason: Any) -> None:
        """The group ends: what has no token yet gets one."""
        version = self.run.engines.version
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
        if (push := self.run.pusher.push_open) is not None:
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

    @precondition(lambda self: self.run.pusher.push_open)
    @rule()
    def push_ends(self) -> None:
        self.answer_pusher()

    @rule(seed=st.integers(0, 1000), events=st.integers(1, 60), newest=st.sampled_from([0.5, 0.9, 1.0]))
    def a_while(self, seed: int, events: int, newest: float) -> None:
        """Many events at random: hypothesis alone rarely gets a run past its first steps. Old groups may be left."""
        chance = random.Random(seed)
        for _ in range(events):
            happening = chance.choice(["sample", "finish", "finish", "step", "push"])
            if happening == "sample":
                self.sample([0, 1][: chance.randint(1, SIZE)])
            elif happening == "finish" and self.run.engines.calls_open:
                self.finish(chance.random() < newest, chance.choice(ENDS))
            elif happening == "step":
                self.answer_learner()
            elif happening == "push":
                self.answer_pusher()
            self.check_invariants_now()

    def check_invariants_now(self) -> None:
        self.no_place_is_lost()
        self.no_prompt_is_lost()
        self.somebody_is_at_work()
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
        at_work = self.run.engines.calls_open or self.run.learner.step_open or self.run.pusher.push_open
        assert self.task.done() or at_work

    @invariant()
    def the_buffer_gives_the_oldest_first(self) -> None:
        ages = [group.oldest_version for group in self.run.groups.buffer.groups()]
        assert ages == sorted(ages)


TestFlow = Flow.TestCase
TestFlow.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
