import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.resume import Finished, Sampling, Submission, next_submission, stream_seed
from generator.rollout import Rollout, Segment
from generator.stops import StopMatcher

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


def test_a_rollout_whose_last_token_completes_a_stop_string_is_a_natural_stop_even_with_the_last_of_the_budget():
    assert next_submission(sampling(), rollout(20, 21), stopped=True) == Finished("stop")
    assert next_submission(sampling(max_tokens=2), rollout(20, 21), stopped=True) == Finished("stop")


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_rollout_that_cannot_be_resumed_exactly_is_begun_but_never_continued_elsewhere(penalty):
    params = sampling(**{penalty: 0.5})
    assert isinstance(next_submission(params, rollout()), Submission)
    assert next_submission(params, rollout(20)) == Finished("failed")
    assert next_submission(params, rollout(20, STOP)) == Finished("stop")
    assert isinstance(next_submission(sampling(repetition_penalty=1.5), rollout(20)), Submission)


def test_without_a_seed_none_is_submitted():
    decision = next_submission(sampling(), rollout(20))
    assert isinstance(decision, Submission)
    assert decision.seed is None


def test_a_seed_names_the_same_stream_in_every_process():
    """Another value would silently change every recorded run; Python's own hash changes with each process."""
    assert stream_seed(1, "0-3", 17) == 2853062159404424425
    assert 0 <= stream_seed(-5, "x", 0) < 2**63


@given(st.sets(st.tuples(st.integers(), st.text(max_size=4), st.integers(0, 10_000)), min_size=2, max_size=20))
def test_different_seeds_rollouts_and_positions_get_different_streams(arguments):
    assert len({stream_seed(*argument) for argument in arguments}) == len(arguments)


def letters(token_ids) -> str:
    """A tokenizer with one letter a token."""
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def sampled(params: Sampling, stream: list[int], interruptions: list[int]) -> tuple[Rollout, list[Submission]]:
    """The rollout of a deterministic engine that reads its tokens from ``stream``, and what was submitted to it.

    The engine is aborted after each of ``interruptions`` tokens, once per number. It is as strict as a real one.
    """
    current, pending, submissions = Rollout(id="r", prompt_token_ids=(10, 11)), list(interruptions), []
    stops = StopMatcher(letters, params.stop, params.min_tokens) if params.stop else None
    while not isinstance(decision := next_submission(params, current, stops is not None and stops.stopped), Finished):
        submissions.append(decision)
        assert decision.max_tokens >= 1
        assert 0 <= decision.min_tokens <= decision.max_tokens
        assert decision.prompt_token_ids == current.prompt_token_ids + current.response_token_ids
        limit = pending.pop(0) if pending else len(stream)
        start, tokens = len(current.response_token_ids), []
        while len(tokens) < min(limit, decision.max_tokens):
            token = stream[start + len(tokens)]
            if len(tokens) < decision.min_tokens and token in params.stop_token_ids:
                token = 9  # the engine forbids a stop token while the minimum is not reached
            tokens.append(token)
            if token in params.stop_token_ids:
                break
        if stops is not None and (end := stops.feed(tokens)) is not None:
            tokens = tokens[:end]
        logprobs = tuple(-float(start + n) for n in range(len(tokens)))
        current = current.extended(Segment(tuple(tokens), logprobs, len(submissions)))
    return current.extended(Segment((), (), len(submissions)), decision.reason), submissions


STREAM = st.lists(st.integers(2, 9), min_size=12, max_size=12)
INTERRUPTIONS = st.lists(st.integers(0, 5), min_size=0, max_size=20)
PARAMS = st.builds(
    sampling,
    max_tokens=st.integers(6, 10),
    min_tokens=st.integers(0, 6),
    max_model_len=st.sampled_from([0, 7, 9, 20]),
    seed=st.sampled_from([None, 3]),
    stop=st.lists(st.lists(st.integers(4, 9), min_size=1, max_size=3).map(letters), max_size=2).map(tuple),
)


@given(PARAMS, STREAM, INTERRUPTIONS)
def test_a_rollout_is_the_same_however_often_it_is_interrupted(params, stream, interruptions):
    whole, _ = sampled(params, stream, [])
    pieces, submissions = sampled(params, stream, interruptions)
    assert pieces.response_token_ids == whole.response_token_ids
    assert pieces.logprobs == whole.logprobs
    assert len(pieces.versions) == len(pieces.loss_mask) == len(pieces.response_token_ids)
    assert pieces.finish_reason == whole.finish_reason
    assert len(submissions) <= len(interruptions) + 1
    assert 1 <= len(whole.response_token_ids) <= params.max_tokens
    if params.max_model_len:
        assert len(whole.prompt_token_ids) + len(whole.response_token_ids) <= params.max_model_len


@given(PARAMS, STREAM, INTERRUPTIONS)
def test_no_stop_ends_a_rollout_before_its_minimum(params, stream, interruptions):
    finished, _ = sampled(params, stream, interruptions)
    if finished.finish_reason == "stop":
        assert len(finished.response_token_ids) > params.min_tokens


@given(PARAMS, STREAM, INTERRUPTIONS)
def test_no_two_positions_of_a_rollout_draw_the_same_random_number(params, stream, interruptions):
    """A request draws number 0, 1, 2, ... of the stream that its seed names."""
    finished, submissions = sampled(params, stream, interruptions)
    starts = [len(submission.prompt_token_ids) - 2 for submission in submissions]
    ends = [*starts[1:], len(finished.response_token_ids)]
    drawn = [(s.seed, n) for s, start, end in zip(submissions, starts, ends, strict=True) for n in range(end - start)]
    if params.seed is not None:
        assert len(set(drawn)) == len(drawn)
    assert sampled(params, stream, interruptions)[1] == submissions, "the streams are not reproducible"


@pytest.mark.parametrize("position", range(7))
def test_an_abort_at_any_position_leaves_budgets_that_add_up(position):
    params = sampling(min_tokens=4)
    decision = next_submission(params, rollout(*[20] * position))
    if position == params.max_tokens:
        assert decision == Finished("length")
    else:
        assert decision == Submission((10, 11, *[20] * position), 6 - position, max(0, 4 - position))
