import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.resume import Finished, Sampling, Submission, next_submission
from generator.rollout import Rollout, Segment

STOP = 2
OTHER_STOP = 3


def sampling(**changes) -> Sampling:
    return Sampling(**{"max_tokens": 6, "stop_token_ids": frozenset({STOP, OTHER_STOP}), **changes})


def rollout(*tokens: int) -> Rollout:
    return Rollout(id="r", prompt_token_ids=(10, 11)).extended(Segment(tokens, (-1.0,) * len(tokens), version=0))


def test_a_fresh_rollout_is_submitted_with_its_whole_budget():
    assert next_submission(sampling(min_tokens=2), rollout()) == Submission((10, 11), max_tokens=6, min_tokens=2)


def test_a_rollout_aborted_before_its_first_token_is_submitted_again_unchanged():
    fresh = rollout()
    assert next_submission(sampling(), fresh.extended(Segment((), (), 1))) == next_submission(sampling(), fresh)


def test_a_resumed_rollout_continues_from_its_tokens_with_what_is_left_of_both_budgets():
    decision = next_submission(sampling(min_tokens=3), rollout(20, 21))
    assert decision == Submission((10, 11, 20, 21), max_tokens=4, min_tokens=1)


def test_min_tokens_already_reached_do_not_forbid_a_stop_after_the_resume():
    decision = next_submission(sampling(min_tokens=2), rollout(20, 21, 22))
    assert isinstance(decision, Submission)
    assert decision.min_tokens == 0


def test_a_budget_spent_exactly_at_the_abort_is_a_length_stop_and_never_a_submission_of_zero_tokens():
    assert next_submission(sampling(), rollout(20, 21, 22, 23, 24, 25)) == Finished("length")


@pytest.mark.parametrize("token", [STOP, OTHER_STOP])
def test_a_stop_token_that_arrived_with_the_abort_is_a_natural_stop(token):
    assert next_submission(sampling(), rollout(20, token)) == Finished("stop")


def test_a_stop_token_with_the_last_of_the_budget_is_a_natural_stop():
    assert next_submission(sampling(max_tokens=2), rollout(20, STOP)) == Finished("stop")


def test_a_stop_token_inside_the_forbidden_minimum_does_not_stop():
    assert isinstance(next_submission(sampling(min_tokens=3), rollout(20, STOP)), Submission)


def test_a_stop_token_at_the_end_of_the_prompt_does_not_stop_a_fresh_rollout():
    fresh = Rollout(id="r", prompt_token_ids=(10, STOP))
    assert isinstance(next_submission(sampling(), fresh), Submission)


def test_the_context_bounds_the_budget_like_max_tokens():
    decision = next_submission(sampling(max_model_len=5), rollout(20))
    assert decision == Submission((10, 11, 20), max_tokens=2, min_tokens=0)
    assert next_submission(sampling(max_model_len=5), rollout(20, 21, 22)) == Finished("length")


def test_a_prompt_that_fills_the_context_is_an_error_that_names_the_sizes():
    with pytest.raises(ValueError, match="2 tokens and the context holds 2"):
        next_submission(sampling(max_model_len=2), rollout())


@pytest.mark.parametrize("changes", [{"max_tokens": 0}, {"min_tokens": -1}, {"min_tokens": 7}])
def test_budgets_that_contradict_each_other_are_refused(changes):
    with pytest.raises(ValueError, match="tokens"):
        sampling(**changes)


def test_an_observation_that_ends_with_a_stop_token_is_no_natural_stop():
    decision = next_submission(sampling(), rollout(20).observed([30, STOP]))
    assert decision == Submission((10, 11, 20, 30, STOP), max_tokens=5, min_tokens=0)


def test_observed_tokens_count_against_the_context_and_not_against_the_budgets():
    observed = rollout(20).observed([30, 31, 32])
    assert next_submission(sampling(min_tokens=3), observed).max_tokens == 5
    assert next_submission(sampling(min_tokens=3), observed).min_tokens == 2
    assert next_submission(sampling(max_model_len=8), observed).max_tokens == 2


def test_an_observation_that_leaves_no_room_ends_the_rollout_with_length():
    assert next_submission(sampling(max_model_len=6), rollout(20).observed([30, 31, 32])) == Finished("length")


def test_the_stop_token_of_an_earlier_turn_does_not_end_this_one():
    earlier = rollout(20, STOP)
    assert next_submission(sampling(turn_start=2), earlier) == Submission((10, 11, 20, STOP), 4, 0)
    later = earlier.extended(Segment((21, STOP), (-1.0, -1.0), 0))
    assert next_submission(sampling(turn_start=2), later) == Finished("stop")


@given(
    stream=st.lists(st.integers(2, 9), min_size=12, max_size=12),
    cuts=st.lists(st.integers(0, 5), min_size=0, max_size=20),
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(6, 10),
    max_model_len=st.sampled_from([0, 7, 9, 20]),
)
def test_a_rollout_is_the_same_however_often_it_is_interrupted(stream, cuts, min_tokens, max_tokens, max_model_len):
    """A deterministic engine that reads its tokens from a list, aborted after ``cuts`` tokens, again and again."""
    params = sampling(max_tokens=max_tokens, min_tokens=min_tokens, max_model_len=max_model_len)

    def run(interruptions: list[int]) -> Rollout:
        current, version, pending = Rollout(id="r", prompt_token_ids=(10, 11)), 0, list(interruptions)
        while not isinstance(decision := next_submission(params, current), Finished):
            limit = pending.pop(0) if pending else len(stream)
            tokens: list[int] = []
            position = len(decision.prompt_token_ids) - 2
            while len(tokens) < min(limit, decision.max_tokens):
                token = stream[position + len(tokens)]
                if len(tokens) < decision.min_tokens and token in params.stop_token_ids:
                    token = 9  # the engine forbids a stop token while the minimum is not reached
                tokens.append(token)
                if token in params.stop_token_ids:
                    break
            current = current.extended(Segment(tuple(tokens), (-1.0,) * len(tokens), version))
            version += 1
        return current.extended(Segment((), (), version), decision.reason)

    whole, pieces = run([]), run(cuts)
    assert pieces.response_token_ids == whole.response_token_ids
    assert pieces.finish_reason == whole.finish_reason
    assert len(whole.response_token_ids) <= max_tokens
