import asyncio
import logging
import re
from pathlib import Path

import pytest

from generator.rollout import Prompt, Rollout
from trainer.dotted import DottedPathError, resolve_dotted
from trainer.rewards import RewardScorer, resolve_rewards

HERE = "reward_samples"  # the module beside this file
PROMPT = Prompt(0, (1, 2), "question", {"answer": "yes"})


@pytest.fixture(autouse=True)
def _samples(monkeypatch):
    """Make the samples importable, and let what hangs in them end with the test."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import reward_samples

    reward_samples.release.clear()
    yield
    reward_samples.release.set()


def scorer(*names_and_weights, timeout=120.0, workers=4) -> RewardScorer:
    spec = [
        {"name": name, "function": f"{HERE}.{name}", "weight": weight}
        for name, weight in (item if isinstance(item, tuple) else (item, 1.0) for item in names_and_weights)
    ]
    return RewardScorer(resolve_rewards(spec, []), timeout=timeout, workers=workers)


async def score(scorer: RewardScorer, *texts: str):
    rollouts = [Rollout(f"r{index}", PROMPT.token_ids) for index in range(len(texts))]
    return await scorer.score(PROMPT, rollouts, texts)


def counted(scorer: RewardScorer) -> dict[str, int]:
    return {name.removeprefix("reward/"): count for name, count in scorer.take_counts().items() if count}


async def test_the_reward_is_the_weighted_sum_and_every_part_is_kept_by_name():
    subject = scorer(("length", 0.5), ("matches", 2.0), ("slow_ones", 0.0))
    first, second = await score(subject, "yes", "no")
    assert first.reward_parts == {"length": 3.0, "matches": 1.0, "slow_ones": 1.0}
    assert (first.reward, second.reward) == (3.5, 1.0)
    assert (first.rollout.id, first.text, second.rollout.id) == ("r0", "yes", "r1")
    assert counted(subject) == {}


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("raises", "failed"),
        ("raises_async", "failed"),
        ("exits", "failed"),
        ("alarms", "failed"),
        ("too_few", "wrong_length"),
        ("not_a_list", "invalid"),
        ("by_number", "invalid"),
        ("huge", "invalid"),
    ],
)
async def test_a_function_that_fails_excludes_its_rollouts_and_is_counted_by_cause(function, cause):
    subject = scorer("length", function)
    scored = await score(subject, "yes", "no")
    assert [item.reward for item in scored] == [None, None]
    assert [item.reward_parts for item in scored] == [{"length": 3.0, function: None}, {"length": 2.0, function: None}]
    assert counted(subject) == {cause: 2}


@pytest.mark.parametrize("function", ["hangs", "hangs_async"])
async def test_a_function_that_hangs_is_given_up_at_the_deadline_and_blocks_no_other_group(function):
    hanging = scorer(function, timeout=0.1, workers=1)
    assert [item.reward for item in await score(hanging, "yes", "no")] == [None, None]
    # The one place is free again: the next group is scored too, up to its own deadline.
    assert [item.reward for item in await score(hanging, "yes")] == [None]
    assert counted(hanging) == {"timeout": 3}


async def test_a_function_that_resists_its_cancellation_is_not_waited_for():
    from reward_samples import release

    subject = scorer("is_slow_to_be_cancelled", timeout=0.1)
    assert [item.reward for item in await score(subject, "yes")] == [None]
    assert counted(subject) == {"timeout": 1}
    release.set()


async def test_scoring_one_group_does_not_wait_for_another_that_hangs():
    subject = scorer("hangs", "length", workers=2)
    stuck = asyncio.create_task(score(subject, "yes"))
    await asyncio.sleep(0)
    quick = scorer("length")
    assert (await score(quick, "yes"))[0].reward == 3.0
    assert not stuck.done()
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck


async def test_only_rollouts_that_a_function_declines_are_excluded():
    subject = scorer("declines_short")
    assert [item.reward for item in await score(subject, "yes", "n", "no")] == [1.0, None, 1.0]
    assert counted(subject) == {"declined": 1}


async def test_values_that_are_no_finite_number_are_excluded_and_booleans_are_numbers():
    subject = scorer("strange_numbers")
    assert [item.reward for item in await score(subject, "a", "b", "c", "d")] == [None, None, None, 1.0]
    assert counted(subject) == {"invalid": 3}


async def test_a_missing_part_of_weight_zero_excludes_nothing():
    subject = scorer("length", ("raises", 0.0))
    (item,) = await score(subject, "yes")
    assert item.reward == 3.0
    assert item.reward_parts["raises"] is None
    assert counted(subject) == {"failed": 1}


async def test_plain_functions_run_outside_the_event_loop_s_thread():
    assert (await score(scorer("thread_name"), "x"))[0].reward == 0.0


async def test_a_function_that_spoils_its_arguments_does_not_spoil_those_of_the_next():
    scored = await score(scorer("spoils_its_arguments", "matches"), "yes", "no")
    assert [item.reward_parts["matches"] for item in scored] == [1.0, 0.0]


async def test_many_groups_at_once_use_few_places_and_all_get_their_own_scores():
    subject = scorer("length", "slow_ones", workers=2)
    results = await asyncio.gather(*(score(subject, "x" * count) for count in range(30)))
    assert [items[0].reward for items in results] == [count + 1.0 for count in range(30)]


async def test_a_failure_is_told_once_with_its_cause(caplog):
    subject = scorer("raises")
    with caplog.at_level(logging.WARNING):
        await score(subject, "yes")
        await score(subject, "yes")
    (record,) = caplog.records
    assert "raises raised RuntimeError: verifier crashed" in record.getMessage()
    assert record.exc_info is not None


def test_a_path_alone_or_a_list_of_paths_replaces_the_task_s_own_functions():
    defaults = [("own", f"{HERE}.length", 0.7)]
    assert [(part.name, part.weight) for part in resolve_rewards(None, defaults)] == [("own", 0.7)]
    assert [(part.name, part.weight) for part in resolve_rewards(f"{HERE}:matches", defaults)] == [("matches", 1.0)]
    names = [part.name for part in resolve_rewards([f"{HERE}.length", {"function": f"{HERE}.matches"}], defaults)]
    assert names == ["length", "matches"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{HERE}.lenght", "has no 'lenght'; did you mean 'length'?"),
        ("trainer.reward.length", "trainer has no 'reward'; did you mean 'rewards'"),
        ("nowhere_at_all.length", "there is no package or module 'nowhere_at_all'"),
        ("length", "not a dotted path of the form package.module.name"),
        ("a..b", "not a dotted path"),
        ("recipes.ci_tiny.reward", "is a module; name the object inside it"),
        (f"{HERE}.CONSTANT", "is a int, which cannot be called"),
        (3, "neither a dotted path nor a mapping"),
        ([{"name": "x"}], "neither a dotted path nor a mapping with the key 'function'"),
        ([{"function": f"{HERE}.length", "wieght": 1}], "unknown key 'wieght'; there are name, function and weight"),
        ([{"function": f"{HERE}.length", "weight": "much"}], "is 'much', not a finite number"),
        ([{"function": f"{HERE}.length", "weight": float("nan")}], "not a finite number"),
        ([f"{HERE}.length", f"{HERE}.length"], "several functions are named 'length'"),
        ([{"function": f"{HERE}.length", "weight": 0}], "no function has a weight other than 0"),
        ([], "no function has a weight other than 0"),
    ],
)
def test_a_wrong_specification_is_refused_with_what_is_wrong_and_what_is_nearest(spec, message):
    with pytest.raises(DottedPathError, match=re.escape(message)):
        resolve_rewards(spec, [])


def test_a_module_that_fails_to_import_is_reported_with_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "crashing_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        DottedPathError, match="importing broken_reward failed: ModuleNotFoundError: No module named 'a_package_that"
    ):
        resolve_dotted("broken_reward.f", "reward function")
    with pytest.raises(DottedPathError, match="importing crashing_reward failed: ZeroDivisionError"):
        resolve_dotted("crashing_reward.f", "reward function")


def test_a_dotted_path_may_reach_into_a_class():
    assert resolve_dotted("decimal.Decimal.from_float", "test") is not None
