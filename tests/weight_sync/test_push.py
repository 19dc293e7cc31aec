"""The steps of a push, their order, and what a failure at each of them leaves behind."""

import asyncio

import pytest

from tests.virtual import in_virtual_time
from tests.weight_sync.push_script import ORDER, Script, pusher
from weight_sync.manifest import Manifest
from weight_sync.push import PushError, Step, engine_of


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
