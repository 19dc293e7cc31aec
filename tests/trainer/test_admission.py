from dataclasses import replace

import pytest

from generator.rollout import Group, Prompt, Rollout, ScoredRollout
from trainer.admission import Admission, expire


def admission(**changes) -> Admission:
    return Admission(
        **{"batch_prompts": 4, "max_versions": 1, "max_running": 100, "on_expired": "mask_tokens", **changes}
    )


def admit(places: Admission, count: int) -> None:
    for _ in range(count):
        places.admit()


def test_a_bound_of_zero_admits_exactly_one_batch_per_version():
    places = admission(max_versions=0)
    admit(places, 4)
    assert places.capacity() == 0
    for _ in range(4):
        places.finished()
    places.learned(4)
    assert places.capacity() == 0
    places.published(1)
    assert places.capacity() == 4


def test_a_bound_of_two_lets_sampling_run_two_batches_ahead():
    assert admission(max_versions=2).capacity() == 12


def test_concurrency_is_bounded_apart_from_staleness():
    assert admission(max_running=3).capacity() == 3


@pytest.mark.parametrize("leave", ["failed", "filtered"])
def test_a_group_that_is_dropped_frees_its_place(leave):
    places = admission()
    before = places.capacity()
    places.admit()
    if leave == "filtered":
        places.finished()
    getattr(places, leave)()
    assert places.capacity() == before


def test_nothing_is_sampled_for_a_step_that_never_comes():
    places = admission(total_groups=5)
    admit(places, 5)
    assert places.capacity() == 0


def test_a_resumed_run_has_the_same_bound_as_a_fresh_one():
    assert admission(version=7, consumed=28).capacity() == admission().capacity()


def test_a_version_out_of_order_is_refused():
    with pytest.raises(RuntimeError, match="published"):
        admission().published(2)


def test_admitting_without_a_place_is_refused():
    with pytest.raises(RuntimeError, match="no place"):
        admission(max_running=0).admit()


@pytest.mark.parametrize("on_expired", ["mask_tokens", "drop_rollout", "drop_group"])
def test_what_may_be_learned_from_is_decided_at_the_version_of_the_step_by_the_same_bound(on_expired):
    places = admission(max_versions=1, on_expired=on_expired, version=6)
    old = group((3, 4, 5), (5, 5))
    assert places.within_bound(old) == expire(old, version=6, max_versions=1, on_expired=on_expired)


def group(*versions: tuple[int, ...]) -> Group:
    rollouts = tuple(
        ScoredRollout(
            Rollout(
                id=str(number),
                prompt_token_ids=(1,),
                response_token_ids=(5,) * len(tags),
                logprobs=(-1.0,) * len(tags),
                versions=tags,
                loss_mask=(True,) * len(tags),
            ),
            "",
            1.0,
            {},
        )
        for number, tags in enumerate(versions)
    )
    return Group(Prompt(0, (1,), "", {}), rollouts, admitted_version=0)


def masks(kept: Group) -> list[tuple[bool, ...]]:
    return [scored.rollout.loss_mask for scored in kept.rollouts]


def test_a_group_within_the_bound_is_untouched():
    fresh = group((4, 5), (5, 5))
    assert expire(fresh, version=6, max_versions=2, on_expired="mask_tokens").group is fresh


def test_masking_takes_out_exactly_the_tokens_past_the_bound():
    kept = expire(group((3, 4, 5), (5, 5)), version=6, max_versions=1, on_expired="mask_tokens")
    assert (kept.tokens, kept.rollouts) == (2, 0)
    assert masks(kept.group) == [(False, False, True), (True, True)]


def test_dropping_a_rollout_takes_out_all_its_tokens_and_keeps_the_others():
    kept = expire(group((3, 4, 5), (5, 5)), version=6, max_versions=1, on_expired="drop_rollout")
    assert (kept.tokens, kept.rollouts) == (3, 1)
    assert masks(kept.group) == [(False, False, False), (True, True)]


def test_dropping_a_group_takes_out_everything():
    kept = expire(group((3, 4, 5), (5, 5)), version=6, max_versions=1, on_expired="drop_group")
    assert kept == type(kept)(None, tokens=5, rollouts=2)


def test_a_group_without_a_token_to_learn_from_is_dropped():
    assert expire(group((3,), (2, 2)), version=6, max_versions=1, on_expired="mask_tokens").group is None


def test_a_bound_of_zero_is_a_bound():
    kept = expire(group((5, 6), (6,)), version=6, max_versions=0, on_expired="mask_tokens")
    assert masks(kept.group) == [(False, True), (True,)]


@pytest.mark.parametrize(("on_expired", "tokens", "mask"), [
    ("mask_tokens", 2, (False, False, False, True)),
    ("drop_rollout", 3, (False, False, False, False)),
])  # fmt: skip
def test_observed_tokens_are_not_counted_as_expired(on_expired, tokens, mask):
    """Sampled by 3, observed, sampled by 3, sampled by 5: the observation is as old as the tokens around it."""
    observed = replace(
        group((3, 3, 3, 5)).rollouts[0].rollout, loss_mask=(True, False, True, True), observations=((1, 2),)
    )
    mixed = group((3,), (5, 5))
    mixed = replace(mixed, rollouts=(replace(mixed.rollouts[0], rollout=observed), mixed.rollouts[1]))
    kept = expire(mixed, version=6, max_versions=1, on_expired=on_expired)
    assert kept.tokens == tokens
    assert masks(kept.group)[0] == mask
    assert expire(mixed, version=6, max_versions=1, on_expired="drop_group").tokens == 3 + 2


def test_a_run_that_goes_on_has_the_places_that_it_had():
    before = admission()
    for version in range(3):
        while before.capacity():
            before.admit()
        for _ in range(4):
            before.finished()
        before.learned(4)
        before.published(version + 1)
    before.admit()
    before.finished()
    after = admission()
    after.continue_at(3, buffered=1)
    for _ in range(before.running):  # what was in flight is admitted again
        after.admit()
    assert after.capacity() == before.capacity()
    assert (after.version, after.consumed, after.buffered) == (before.version, before.consumed, before.buffered)
