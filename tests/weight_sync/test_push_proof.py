"""Pushes that are proven: what engines compute is compared before anything is published."""

import pickle

import pytest

from tests.virtual import in_virtual_time
from tests.weight_sync.push_script import Script, pusher
from weight_sync.canary import CanaryError
from weight_sync.push import PushError
from weight_sync.verification import Verification

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
