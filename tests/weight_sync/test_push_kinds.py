"""Pushes that are staged, and pushes of what changed."""

import asyncio

import pytest

from tests.virtual import in_virtual_time
from tests.weight_sync.push_script import STAGED, Script, pusher
from weight_sync.push import PushError

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
