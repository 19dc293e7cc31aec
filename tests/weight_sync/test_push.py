import asyncio
import pickle
from collections.abc import Iterator

import pytest

from tests.virtual import in_virtual_time
from weight_sync.canary import CanaryError
from weight_sync.manifest import Manifest, ManifestEntry
from weight_sync.push import Pusher, PushError, Step, engine_of
from weight_sync.verification import Verification

MANIFEST = Manifest((ManifestEntry("w", "float32", (2,)),))
ORDER = ["prepare", "gate", "transfer", "confirm", "publish", "resume"]
STAGED = ["prepare", "transfer", "gate", "swap", "confirm", "publish", "resume"]


class Script:
    """A learner and engines in one, that write down what is asked of them and fail or hang where they are told to."""

    def __init__(self, fail_at: str | None = None, hang_at: str | None = None) -> None:
        self.fail_at, self.hang_at = fail_at, hang_at
        self.calls: list[str] = []
        self.members_changed = False
        self.quarantined: list[str | None] = []
        self.engines_left = 0
        """How many failures cost an engine and leave others to go on with."""
        self.published: list[int] = []
        self.sent_bytes = MANIFEST.total_bytes
        self.hashed: list[bool] = []
        self.bases: list[int | None] = []
        """What each push was told that the engines hold."""
        self.off_by: dict[str, float | None] = {"engine 0": 0.0, "engine 1": 0.0}
        """How wrong each engine's log-probabilities are; ``None``: it holds frozen requests."""
        self.adapter_adds: Iterator[float] = iter(())
        """What the adapter of each push that is asked about changes of the learner's log-probabilities."""

    async def _do(self, step: str) -> None:
        self.calls.append(step)
        await asyncio.sleep(0)
        if step == self.hang_at:
            await asyncio.Event().wait()
        if step == self.fail_at:
            raise ConnectionError("the cable is out")

    async def prepare(self, base: int | None) -> Manifest:
        self.bases.append(base)
        await self._do("prepare")
        return MANIFEST

    async def logprobs(self, sequences) -> list[list[float]]:
        await self._do("learner's logprobs")
        return [[-1.0] * (len(sequence) - 1) for sequence in sequences]

    async def base_logprobs(self, sequences) -> list[list[float]]:
        added = next(self.adapter_adds)
        return [[-1.0 - added] * (len(sequence) - 1) for sequence in sequences]

    async def send(self, version: int, hashed: bool) -> int:
        self.hashed.append(hashed)
        await self._do("transfer")
        return self.sent_bytes

    async def close_gate(self) -> None:
        await self._do("gate")

    async def swap(self, version: int) -> None:
        await self._do("swap")

    async def confirm(self, version: int, manifest: Manifest) -> None:
        assert manifest == MANIFEST
        await self._do("confirm")

    async def prompt_logprobs(self, sequences) -> dict[str, list[list[float]] | None]:
        await self._do("verify")
        return {
            name: None if error is None else [[error - 1.0] * (len(sequence) - 1) for sequence in sequences]
            for name, error in self.off_by.items()
        }

    def publish(self, version: int) -> None:
        self.calls.append("publish")
        if self.fail_at == "publish":
            raise ConnectionError("the cable is out")
        self.published.append(version)

    async def resume(self) -> None:
        await self._do("resume")

    async def quarantine(self, engine: str | None, reason: str) -> bool:
        self.quarantined.append(engine)
        self.off_by.pop(engine, None)
        self.engines_left -= 1
        return self.engines_left >= 0

    async def connect(self) -> None:
        await self._do("connect")
        self.members_changed = False


def pusher(script: Script, **options) -> Pusher:
    return Pusher(learner=script, engines=script, connect=script.connect, **{"timeout": 5.0, **options})


async def test_a_push_takes_its_steps_in_order_and_reports_each():
    script = Script()
    ticks = iter(range(1000))
    report = await pusher(script, clock=lambda: float(next(ticks))).push(7)
    assert script.calls == ORDER
    assert script.published == [7]
    assert (report.version, report.bytes) == (7, 8)
    assert list(report.seconds) == ORDER
    assert report.pause_seconds >= sum(report.seconds[step] for step in ORDER[1:])


WAITING_STEPS = ["prepare", "gate", "transfer", "confirm"]


@pytest.mark.parametrize(
    ("step", "way"),
    [(step, "hang_at") for step in WAITING_STEPS] + [(step, "fail_at") for step in [*WAITING_STEPS, "publish"]],
)
@in_virtual_time
async def test_a_failure_before_the_publication_publishes_nothing_and_names_its_step(step, way):
    script = Script(**{way: step})
    run = pusher(script, published=3, timeout=0.05 if way == "hang_at" else 5.0)
    with pytest.raises(PushError, match=f"at {step}: ") as caught:
        await run.push(4)
    assert caught.value.step == step
    assert ("no answer within" if way == "hang_at" else "the cable is out") in str(caught.value)
    assert script.published == []
    assert run.published == 3
    assert run.step is Step.IDLE


@pytest.mark.parametrize("step", ["transfer", "confirm", "publish"])
async def test_engines_that_may_hold_half_an_update_are_never_resumed(step):
    script = Script(fail_at=step)
    with pytest.raises(PushError):
        await pusher(script, published=3).push(4)
    assert "resume" not in script.calls


async def test_a_gate_that_fails_is_opened_again_on_the_old_version():
    script = Script(fail_at="gate")
    with pytest.raises(PushError, match="at gate"):
        await pusher(script, published=3).push(4)
    assert script.calls == ["prepare", "gate", "resume"]


@in_virtual_time
async def test_a_push_that_is_cancelled_at_the_gate_leaves_no_engine_paused():
    script = Script(hang_at="gate")
    run = pusher(script, published=3)
    task = asyncio.create_task(run.push(4))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert script.calls == ["prepare", "gate", "resume"]
    assert run.step is Step.IDLE


async def test_the_transfer_group_is_built_anew_when_engines_joined_or_left_and_only_then():
    script = Script()
    script.members_changed = True
    run = pusher(script)
    await run.push(0)
    await run.push(1)
    assert script.calls == ["connect", *ORDER, *ORDER]


async def test_an_engine_that_fails_a_push_is_ended_and_the_others_get_the_whole_version_again():
    script = Script()
    script.engines_left = 1
    send = script.send

    async def fail_once(version: int, hashed: bool) -> int:
        script.send = send
        await script._do("transfer")
        raise PushError("update_weights", ConnectionError("it is gone"), "engine 1")

    script.send = fail_once
    report = await pusher(script, published=3).push(4)
    assert script.quarantined == ["engine 1"]
    assert script.calls == [*ORDER[:3], *ORDER]
    assert report.version == 4


async def test_a_failure_that_no_engine_is_to_blame_for_is_not_tried_again():
    script = Script(fail_at="transfer")
    with pytest.raises(PushError):
        await pusher(script, published=3).push(4)
    assert script.calls == ORDER[:3]
    assert script.quarantined == [None]


def test_the_blamed_engine_is_found_behind_other_errors():
    remote = RuntimeError("learner send failed on rank 0")
    remote.__cause__ = PushError("update_weights", "it is gone", "engine 3")
    assert engine_of(PushError("transfer", remote)) == "engine 3"
    assert engine_of(PushError("transfer", "nobody")) is None


async def test_a_failure_to_prepare_does_not_touch_the_engines():
    script = Script(fail_at="prepare")
    with pytest.raises(PushError, match="at prepare"):
        await pusher(script, published=3).push(4)
    assert script.calls == ["prepare"]


@in_virtual_time
async def test_a_lost_resume_is_an_error_and_not_a_silent_pause():
    script = Script(hang_at="resume")
    with pytest.raises(PushError, match="at resume"):
        await pusher(script, timeout=0.05).push(0)
    assert script.published == [0]


async def test_a_failed_push_can_be_followed_by_a_good_one():
    script = Script(fail_at="transfer")
    run = pusher(script)
    with pytest.raises(PushError):
        await run.push(0)
    script.fail_at = None
    await run.push(0)
    assert script.published == [0]


async def test_a_second_push_is_refused_while_one_runs_and_leaves_it_alone():
    script = Script()
    run = pusher(script)
    first = asyncio.create_task(run.push(1))
    await asyncio.sleep(0)
    with pytest.raises(PushError, match="version 2 was asked for while a push is at prepare"):
        await run.push(2)
    assert (await first).version == 1
    assert script.published == [1]


async def test_a_push_that_sent_fewer_bytes_than_its_manifest_lists_is_a_failure():
    script = Script()
    script.sent_bytes = 4
    with pytest.raises(PushError, match="4 bytes were sent, the manifest lists 8"):
        await pusher(script).push(0)
    assert script.published == []


async def test_a_version_older_than_the_published_one_is_refused():
    script = Script()
    with pytest.raises(PushError, match="older"):
        await pusher(script, published=3).push(2)
    assert script.calls == []


async def test_a_timeout_inside_a_step_is_not_mistaken_for_the_step_s_own_deadline():
    script = Script()

    async def impatient(base: int | None) -> Manifest:
        raise TimeoutError("the disk is slow")

    script.prepare = impatient
    with pytest.raises(PushError, match="the disk is slow"):
        await pusher(script).push(0)


# -- staged pushes ----------------------------------------------------------------------------------------------------


async def test_a_staged_push_transfers_before_the_gate_and_swaps_behind_it():
    script = Script()
    ticks = iter(range(1000))
    report = await pusher(script, staged=True, clock=lambda: float(next(ticks))).push(7)
    assert script.calls == STAGED
    assert script.published == [7]
    assert list(report.seconds) == STAGED
    assert report.bytes == 8
    behind_the_gate = sum(report.seconds[step] for step in STAGED[2:])
    assert behind_the_gate <= report.pause_seconds < behind_the_gate + report.seconds["transfer"] + len(STAGED)


@pytest.mark.parametrize(
    ("step", "way"),
    [(step, "hang_at") for step in STAGED[:5]] + [(step, "fail_at") for step in STAGED[:6]],
)
@in_virtual_time
async def test_a_staged_push_that_fails_publishes_nothing_and_disturbs_no_engine_before_its_gate(step, way):
    script = Script(**{way: step})
    run = pusher(script, staged=True, published=3, timeout=0.05 if way == "hang_at" else 5.0)
    with pytest.raises(PushError, match=f"at {step}: "):
        await run.push(4)
    assert script.published == []
    assert run.published == 3
    assert script.calls == STAGED[: STAGED.index(step) + 1] + ["resume"] * (step == "gate")


@in_virtual_time
async def test_a_staged_push_that_is_cancelled_while_it_travels_leaves_the_engines_alone():
    script = Script(hang_at="transfer")
    task = asyncio.create_task(pusher(script, staged=True, published=3).push(4))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert script.calls == ["prepare", "transfer"]


async def test_an_engine_that_fails_to_swap_is_ended_and_the_others_get_the_version_again():
    script = Script()
    script.engines_left = 1
    swap = script.swap

    async def fail_once(version: int) -> None:
        script.swap = swap
        await script._do("swap")
        error = RuntimeError("out of memory")
        error.engine = "engine 1"
        raise error

    script.swap = fail_once
    assert (await pusher(script, staged=True, published=3).push(4)).version == 4
    assert script.quarantined == ["engine 1"]
    assert script.calls == [*STAGED[:4], *STAGED]


async def test_fewer_staged_bytes_than_the_manifest_lists_are_a_failure_before_the_gate():
    script = Script()
    script.sent_bytes = 4
    with pytest.raises(PushError, match="4 bytes were sent, the manifest lists 8"):
        await pusher(script, staged=True).push(0)
    assert script.calls == ["prepare", "transfer"]


# -- deltas -----------------------------------------------------------------------------------------------------------


async def test_a_push_builds_on_what_the_engines_confirmed_last():
    script = Script()
    run = pusher(script, deltas=True)
    for version in range(3):
        await run.push(version)
    assert script.bases == [None, 0, 1]


async def test_without_deltas_everything_is_sent():
    script = Script()
    run = pusher(script)
    for version in range(3):
        await run.push(version)
    assert script.bases == [None, None, None]


@pytest.mark.parametrize("step", ["prepare", "gate", "transfer", "swap", "confirm", "publish"])
async def test_after_a_failure_at_any_step_everything_is_sent(step):
    script = Script()
    run = pusher(script, deltas=True, staged=True)
    await run.push(0)
    script.fail_at = step
    with pytest.raises(PushError):
        await run.push(1)
    script.fail_at = None
    await run.push(1)
    await run.push(2)
    assert script.bases == [None, 0, None, 1]


async def test_a_second_try_of_the_same_push_sends_everything():
    script = Script(fail_at="confirm")
    script.engines_left = 1
    run = pusher(script, deltas=True)
    run._held = 3
    with pytest.raises(PushError):
        await run.push(4)
    assert script.bases == [3, None]


async def test_when_engines_joined_everything_is_sent_to_all():
    script = Script()
    run = pusher(script, deltas=True)
    await run.push(0)
    script.members_changed = True
    await run.push(0)
    await run.push(1)
    assert script.bases == [None, None, 0]


async def test_every_so_many_versions_everything_is_sent():
    script = Script()
    run = pusher(script, deltas=True, dense_every=3)
    for version in range(7):
        await run.push(version)
    assert script.bases == [None, 0, 1, None, 3, 4, None]


async def test_a_delta_may_send_fewer_bytes_than_the_manifest_lists_and_never_more():
    script = Script()
    run = pusher(script, deltas=True)
    assert (await run.push(0)).bytes == 8
    script.sent_bytes = 3
    report = await run.push(1)
    assert (report.bytes, report.dense_bytes) == (3, 8)
    script.sent_bytes = 9
    with pytest.raises(PushError, match="9 bytes were sent, the manifest lists 8"):
        await run.push(2)


# -- proof ------------------------------------------------------------------------------------------------------------

EVERY = Verification("every", "float32", ((1, 2, 3), (4, 5)))
PROVEN = ["prepare", "learner's logprobs", "gate", "transfer", "confirm", "verify", "publish", "resume"]


async def test_a_proven_push_asks_the_learner_before_the_gate_and_the_engines_before_the_publication():
    script = Script()
    script.off_by = {"engine 0": 1e-5, "engine 1": -3e-5}
    report = await pusher(script, verification=EVERY).push(0)
    assert script.calls == PROVEN
    assert script.hashed == [True]
    assert report.canary is not None
    assert report.canary.engines == 2
    assert report.canary.abs_diff_mean == pytest.approx(2e-5)
    assert report.canary.abs_diff_max == pytest.approx(3e-5)
    assert list(report.seconds)[3:5] == ["confirm", "verify"]


@pytest.mark.parametrize(
    ("when", "proven"),
    [("none", []), ("first", [0]), ("every", [0, 1, 2, 3, 4]), (3, [0, 3])],
)
async def test_a_push_is_proven_when_the_configuration_asks_for_it(when, proven):
    script = Script()
    run = pusher(script, verification=Verification(when, "float32", EVERY.sequences))
    reports = [await run.push(version) for version in range(5)]
    assert [report.version for report in reports if report.canary is not None] == proven
    assert script.hashed == [version in proven for version in range(5)]


@pytest.mark.parametrize(("when", "proven"), [("none", []), ("first", [0, 2]), (3, [0, 2, 3])])
async def test_the_first_adapter_that_changes_enough_for_the_canary_to_miss_it_is_proven_too(when, proven):
    script = Script()
    script.adapter_adds = iter((0.0, 0.5e-4, 2e-4, 2e-4, 2e-4))
    run = pusher(script, verification=Verification(when, "float32", EVERY.sequences, adapters=True))
    reports = [await run.push(version) for version in range(5)]
    assert [report.version for report in reports if report.canary is not None] == proven


async def test_an_adapter_that_engines_could_not_be_asked_about_is_tried_again_at_the_next_push():
    script = Script()
    script.adapter_adds = iter((0.0, 1.0, 1.0))
    run = pusher(script, verification=Verification("first", "float32", EVERY.sequences, adapters=True))
    await run.push(0)
    script.off_by = {"engine 0": None, "engine 1": None}
    assert (await run.push(1)).canary is None
    script.off_by = {"engine 0": 0.0, "engine 1": 0.0}
    assert (await run.push(2)).canary is not None
    assert (await run.push(3)).canary is None


async def test_the_first_push_after_engines_joined_is_proven_again():
    script = Script()
    run = pusher(script, verification=Verification("first", "float32", EVERY.sequences))
    await run.push(0)
    await run.push(1)
    script.members_changed = True
    await run.push(1)
    assert script.hashed == [True, False, True]


async def test_a_first_push_that_fails_before_its_proof_leaves_that_to_the_next_one():
    script = Script(fail_at="gate")
    run = pusher(script, verification=Verification("first", "float32", EVERY.sequences))
    with pytest.raises(PushError):
        await run.push(0)
    script.fail_at = None
    await run.push(0)
    assert script.hashed == [True]


async def test_an_engine_that_computes_something_else_is_ended_and_the_others_get_the_version_again():
    script = Script()
    script.off_by["engine 1"] = 0.5
    script.engines_left = 1
    report = await pusher(script, verification=EVERY).push(0)
    assert script.quarantined == ["engine 1"]
    assert script.calls == [*PROVEN[:6], *PROVEN]
    assert report.canary is not None
    assert report.canary.engines == 1


async def test_a_staged_push_is_proven_as_any_other():
    script = Script()
    report = await pusher(script, verification=EVERY, staged=True).push(0)
    assert script.hashed == [True]
    assert report.canary is not None
    assert script.calls == ["prepare", "learner's logprobs", "transfer", "gate", "swap", *PROVEN[4:]]


async def test_a_push_fails_where_every_engine_computes_something_else_and_nothing_is_published():
    script = Script()
    script.off_by = {"engine 0": 0.5, "engine 1": 0.25}
    with pytest.raises(PushError, match="at verify: CanaryError: the canary: engine 0, engine 1 of 2") as caught:
        await pusher(script, verification=EVERY).push(0)
    assert isinstance(caught.value.cause, CanaryError)
    assert script.quarantined == [None], "no engine is to blame"
    assert script.published == []
    assert "resume" not in script.calls


@in_virtual_time
async def test_a_canary_that_is_not_answered_ends_at_the_deadline():
    with pytest.raises(PushError, match="at verify: no answer within"):
        await pusher(Script(hang_at="verify"), verification=EVERY, timeout=0.05).push(0)


async def test_where_no_engine_can_be_asked_there_is_no_figure():
    script = Script()
    script.off_by = {"engine 0": None}
    assert (await pusher(script, verification=EVERY).push(0)).canary is None


def test_an_error_crosses_processes_with_its_step_engine_and_reason():
    inner = PushError("update_weights", ValueError("wrong shape: w"), "engine 1")
    error = pickle.loads(pickle.dumps(PushError("transfer", inner)))
    assert error.step == "transfer"
    assert "update_weights in engine 1: ValueError: wrong shape: w" in str(error)
