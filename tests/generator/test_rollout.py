import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.rollout import Group, Prompt, Rollout, RolloutError, ScoredRollout, Segment


def rollout(**columns) -> Rollout:
    values = {
        "response_token_ids": (5, 6),
        "logprobs": (-0.5, -0.25),
        "versions": (1, 2),
        "loss_mask": (True, True),
    }
    return Rollout(id="r", prompt_token_ids=(1, 2), **{**values, **columns})


@pytest.mark.parametrize("column", ["response_token_ids", "logprobs", "versions", "loss_mask"])
def test_a_rollout_whose_columns_differ_in_length_is_refused(column):
    with pytest.raises(RolloutError, match="differ in length"):
        rollout(**{column: ()})


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 9999.0, 0.5])
def test_a_logprob_that_no_sampled_token_can_have_is_refused(logprob):
    with pytest.raises(RolloutError, match="position 1"):
        rollout(logprobs=(-0.5, logprob))


def test_versions_that_decrease_are_refused():
    with pytest.raises(RolloutError, match="decrease"):
        rollout(versions=(2, 1))


def test_abort_is_not_a_finish_reason():
    with pytest.raises(RolloutError, match="abort"):
        rollout(finish_reason="abort")


def test_a_segment_extends_every_column_together():
    extended = rollout().extended(Segment((7, 8, 9), (-1.0, -2.0, -3.0), version=4))
    assert extended.response_token_ids == (5, 6, 7, 8, 9)
    assert extended.logprobs == (-0.5, -0.25, -1.0, -2.0, -3.0)
    assert extended.versions == (1, 2, 4, 4, 4)
    assert extended.loss_mask == (True,) * 5


def test_an_empty_segment_changes_no_token_and_counts_as_no_segment():
    extended = rollout().extended(Segment((), (), version=4))
    assert extended == rollout()


def test_a_segment_older_than_the_rollout_is_refused():
    with pytest.raises(RolloutError, match="decrease"):
        rollout().extended(Segment((7,), (-1.0,), version=1))


def test_a_finished_rollout_cannot_be_extended():
    with pytest.raises(RolloutError, match="finished"):
        rollout(finish_reason="stop").extended(Segment((7,), (-1.0,), version=4))


def test_a_group_is_as_old_as_its_oldest_token():
    def scored(versions):
        return ScoredRollout(rollout(versions=versions), "", 1.0, {})

    prompt = Prompt(0, (1, 2), "", {})
    assert Group(prompt, (scored((3, 4)), scored((2, 5))), admitted_version=1).oldest_version == 2
    empty = ScoredRollout(Rollout(id="e", prompt_token_ids=(1,)), "", 1.0, {})
    assert Group(prompt, (empty,), admitted_version=7).oldest_version == 7


@st.composite
def streams_and_cuts(draw):
    """Rows (token, log-probability, version) with versions that never decrease, and two ways to cut between them."""
    steps = draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
    logprobs = draw(st.lists(st.floats(-50, 0), min_size=len(steps), max_size=len(steps)))
    rows = [(n, logprobs[n], sum(steps[: n + 1])) for n in range(len(steps))]
    cuts = st.lists(st.integers(0, len(rows)), max_size=8)
    return rows, draw(cuts), draw(cuts)


def grown(rows, cuts) -> Rollout:
    """The rollout of ``rows``, interrupted at ``cuts`` (twice the same place: an abort without a token between)."""
    result = Rollout(id="r", prompt_token_ids=(1,))
    changes = [n for n in range(1, len(rows)) if rows[n][2] != rows[n - 1][2]]  # a segment has one version
    bounds = sorted([0, *cuts, *changes, len(rows)])
    for start, end in pairwise(bounds):
        part = rows[start:end]
        version = part[0][2] if part else 0
        result = result.extended(Segment(tuple(r[0] for r in part), tuple(r[1] for r in part), version))
    return result


@given(streams_and_cuts())
def test_every_segmentation_of_a_stream_grows_the_same_rollout(case):
    rows, first, second = case
    a, b = grown(rows, first), grown(rows, second)
    assert (a.response_token_ids, a.logprobs, a.versions, a.loss_mask) == (
        b.response_token_ids,
        b.logprobs,
        b.versions,
        b.loss_mask,
    )
    assert list(zip(a.response_token_ids, a.logprobs, a.versions, strict=True)) == rows


@given(st.lists(st.integers(0, 5), min_size=2, max_size=8))
def test_segments_are_accepted_exactly_as_long_as_versions_do_not_decrease(versions):
    result = Rollout(id="r", prompt_token_ids=(1,))
    for version in versions:
        segment = Segment((9,), (-1.0,), version)
        if version < max(result.versions, default=0):
            with pytest.raises(RolloutError, match="decrease"):
                result.extended(segment)
        else:
            result = result.extended(segment)
    assert list(result.versions) == sorted(result.versions)


def test_an_observation_extends_every_column_and_the_loss_does_not_see_it():
    observed = rollout(finish_reason="stop").observed([7, 8])
    assert observed.response_token_ids == (5, 6, 7, 8)
    assert observed.logprobs == (-0.5, -0.25, 0.0, 0.0)
    assert observed.versions == (1, 2, 2, 2)
    assert observed.loss_mask == (True, True, False, False)
    assert observed.finish_reason is None
    assert observed.observations == ((2, 4),)
    assert observed.ends_with_observation


def test_sampled_tokens_stay_known_when_the_loss_mask_is_cleared():
    grown = rollout().observed([7, 8]).extended(Segment((9,), (-1.0,), version=2), "stop")
    masked = replace(grown, loss_mask=(False,) * 5)
    assert masked.sampled_tokens == 3
    assert [masked.sampled_before(position) for position in range(6)] == [0, 1, 2, 2, 2, 3]


def test_two_observations_in_a_row_are_one():
    assert rollout().observed([7]).observed([8, 9]).observations == ((2, 5),)


def test_an_empty_observation_only_lets_the_rollout_go_on():
    assert rollout(finish_reason="length").observed(()) == rollout()


def test_an_observation_before_the_first_sampled_token_is_refused():
    with pytest.raises(RolloutError, match="belongs to the prompt"):
        Rollout(id="r", prompt_token_ids=(1,)).observed([7])


def test_a_failed_rollout_observes_nothing():
    with pytest.raises(RolloutError, match="failed"):
        rollout(finish_reason="failed").observed([7])


@pytest.mark.parametrize("spans", [((0, 1),), ((1, 1),), ((1, 3),), ((1, 2), (1, 2))])
def test_observations_that_are_no_separate_ranges_behind_a_sampled_token_are_refused(spans):
    with pytest.raises(RolloutError, match="separate ranges"):
        rollout(loss_mask=(False, False), observations=spans)


def test_an_observation_that_the_loss_would_see_is_refused():
    with pytest.raises(RolloutError, match="the loss sees observed tokens"):
        rollout(observations=((1, 2),))


PIECES = st.lists(st.tuples(st.booleans(), st.lists(st.integers(3, 9), max_size=3)), max_size=8)


@given(PIECES, st.integers(0, 30))
def test_the_first_tokens_of_a_rollout_are_those_of_the_rollout_that_was_cut(pieces, count):
    grown = Rollout(id="r", prompt_token_ids=(1,)).extended(Segment((5,), (-1.0,), 0))
    sampled = 1
    for version, (observes, tokens) in enumerate(pieces):
        if observes:
            grown = grown.observed(tokens)
        else:
            grown = grown.extended(Segment(tuple(tokens), (-1.0,) * len(tokens), version))
            sampled += len(tokens)
    assert grown.sampled_tokens == sampled
    cut = grown.first(count)
    assert cut.response_token_ids == grown.response_token_ids[:count]
    assert cut.sampled_tokens == grown.sampled_before(min(count, len(grown.response_token_ids)))
