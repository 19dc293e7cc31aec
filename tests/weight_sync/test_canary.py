import math

import pytest

from trainer.learner_setup import DTYPES
from weight_sync.canary import TOLERANCES, CanaryError, canary_sequences, compare

EXPECTED = [[-1.0, -2.0], [-3.0, -0.5, -4.0]]


def off_by(error: float, at: tuple[int, int] | None = None) -> list[list[float]]:
    """The expected log-probabilities with an error in every place, or in one."""
    places = enumerate(EXPECTED)
    return [[v + (error if at in (None, (n, k)) else 0.0) for k, v in enumerate(row, 1)] for n, row in places]


def test_the_sequences_are_the_same_every_time_and_others_for_another_seed():
    assert canary_sequences(100, 500) == canary_sequences(100, 500)
    assert canary_sequences(100, 500) != canary_sequences(100, 500, seed=1)


@pytest.mark.parametrize("block", [8, 16, 32, 64])
def test_the_sequences_lie_inside_a_block_of_the_cache_and_across_its_bounds(block):
    lengths = [len(sequence) for sequence in canary_sequences(1000, 4096)]
    assert min(lengths) < block < max(lengths)
    assert all(length % block for length in lengths)


@pytest.mark.parametrize(("room", "lengths"), [(2, [2]), (5, [5]), (18, [5, 18]), (67, [5, 19, 67])])
def test_the_sequences_fit_into_the_context(room, lengths):
    sequences = canary_sequences(50, room)
    assert [len(sequence) for sequence in sequences] == lengths
    assert all(0 <= token < 50 for sequence in sequences for token in sequence)


def test_a_context_without_room_for_two_tokens_is_refused():
    with pytest.raises(ValueError, match="2 tokens"):
        canary_sequences(50, 1)


def test_every_dtype_that_a_model_can_have_has_a_tolerance():
    assert set(TOLERANCES) == set(DTYPES)


def test_an_engine_within_the_tolerance_passes_and_is_reported():
    report = compare(EXPECTED, {"engine 0": off_by(5e-5), "engine 1": off_by(4e-4, at=(1, 2))}, "float32")
    assert report is not None
    assert report.engines == 2
    assert report.abs_diff_mean == pytest.approx((5 * 5e-5 + 4e-4) / 10)
    assert report.abs_diff_max == pytest.approx(4e-4)


def test_where_no_engine_could_be_asked_there_is_nothing_to_report():
    assert compare(EXPECTED, {"engine 0": None}, "float32") is None


def test_an_engine_is_blamed_where_others_could_not_be_asked():
    """It may be the only one that is wrong."""
    with pytest.raises(CanaryError, match="engine 1 of 1 engine") as caught:
        compare(EXPECTED, {"engine 0": None, "engine 1": off_by(1.0)}, "float32")
    assert caught.value.engine == "engine 1"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (off_by(5e-4), ["engine 1 is off by 0.0005 on average", "Allowed in float32: 0.0001 on average"]),
        (off_by(0.003, at=(1, 2)), ["by 0.003 at most", "sequence 1, token 2"]),
        (off_by(math.nan, at=(0, 1)), ["not a number in 1 of them", "sequence 0 at token 1"]),
        (off_by(-math.inf), ["not a number in 5 of them"]),
    ],
    ids=["mean", "largest", "nan", "infinite"],
)
def test_an_engine_beyond_the_tolerance_is_blamed_by_how_much_and_where(answer, words):
    with pytest.raises(CanaryError) as caught:
        compare(EXPECTED, {"engine 0": off_by(0.0), "engine 1": answer}, "float32")
    assert caught.value.engine == "engine 1"
    for word in words:
        assert word in str(caught.value)


def test_what_float32_may_not_differ_by_bfloat16_may():
    answers = {"engine 0": off_by(0.04)}
    assert compare(EXPECTED, answers, "bfloat16") is not None
    with pytest.raises(CanaryError):
        compare(EXPECTED, answers, "float32")


def test_no_engine_is_blamed_where_all_of_them_are_wrong():
    with pytest.raises(CanaryError, match="engine 0, engine 1 of 2") as caught:
        compare(EXPECTED, {"engine 0": off_by(1.0), "engine 1": off_by(2.0)}, "float32")
    assert caught.value.engine is None
