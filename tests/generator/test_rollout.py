import math
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
    assert extended.segments == 1


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
    assert (
        a.segments
        == len({*first, *(n for n in range(1, len(rows)) if rows[n][2] != rows[n - 1][2])} - {0, len(rows)}) + 1
    )


@given(st.lists(st.integers(0, 5), min_size=2, max_size=8))
def test_segments_are_accepted_exactly_as_long_as_versions_do_not_decrease(versions):
    result = Rollout(id="r", prompt_token_ids=(1,))
    for version in versions:
        segment = Segment((9,), (-1.0,), version)
        if result.newest_version is not None and version < result.newest_version:
            with pytest.raises(RolloutError, match="decrease"):
                result.extended(segment)
        else:
            result = result.extended(segment)
    assert list(result.versions) == sorted(result.versions)
