"""A request's tokens before vLLM's record of versions is there."""

from __future__ import annotations

from generator.request import Request


def request(submitted: int, versions: list[int]) -> Request:
    count = len(versions)
    return Request(
        "r/0",
        token_ids=list(range(count)),
        logprobs=[-1.0] * count,
        versions=versions,
        submitted_version=submitted,
    )


def test_a_request_that_no_push_met_is_known_whole():
    (segment,) = request(3, [3, 3, 3]).certain_segments()
    assert (segment.token_ids, segment.version) == ((0, 1, 2), 3)


def test_tokens_that_arrived_behind_a_push_wait_for_the_record_of_versions():
    """In mode `keep` the first of them may have been sampled before the push."""
    (segment,) = request(3, [3, 3, 4, 5]).certain_segments()
    assert (segment.token_ids, segment.version) == ((0, 1), 3)
    assert request(3, [4, 4]).certain_segments() == []
