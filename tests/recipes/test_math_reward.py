"""With the real math-verify, in its own process."""

import asyncio

import pytest

from recipes.bounded import BoundedCalls, CallFailedError
from recipes.math import reward as module
from recipes.math.reward import boxed, math_verify, math_verify_number

RIGHT = [
    (r"\frac{1}{2}", r"so it is \boxed{\frac{1}{2}}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"\frac{1}{2}", "The final answer is $1/2$."),
    (r"\frac{3}{4}", r"\boxed{\frac{6}{8}}"),
    ("7", r"$x = 12 - 5 = \boxed{7}$"),
    ("7", r"$x = 7$"),
    (r"2\sqrt{2}", r"\boxed{\sqrt{8}}"),
    ("x^2 + 2x + 1", r"\boxed{(x + 1)^2}"),
    ("(1, 2]", r"\boxed{(1,2]}"),
    ("1000", r"\boxed{1{,}000}"),
    ("$-3$", "-3"),
]
WRONG = [
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"),
    ("7", r"\boxed{-7}"),
    ("7", r"\boxed{7x}"),
    ("7", r"first \boxed{7}, no: \boxed{6}"),
    ("x^2 + 2x + 1", r"\boxed{(x + 2)^2}"),
    ("(1, 2]", r"\boxed{[1, 2]}"),
]
UNREADABLE = ["", "I do not know", r"\boxed{", r"\boxed{\frac{1}{}}", "$$", "\x00\ud800", "\N{SNOWMAN}" * 40]
HOSTILE = [
    r"\boxed{9^{9^{9^{9}}}}",
    "the answer is 9^9^9^9",
    r"\boxed{((1000000!)!)!}",
    "(" * 20_000,
    r"\boxed{" + r"\frac{1}{" * 3_000 + "2" + "}" * 3_000 + "}",
    "$" + r"\sqrt{" * 2_000 + "2" + "}" * 2_000 + "$",
    "1" * 200_000,
    "$ " * 20_000,
    r"\boxed{" + "+".join(f"x_{{{n}}}^{{{n}}}" for n in range(2_000)) + "}",
]


@pytest.fixture(scope="module", autouse=True)
def _one_second_for_what_is_hostile():
    """What is made to take for ever is cut sooner than in a run, and nothing else, however busy the machine is."""
    calls = BoundedCalls("recipes.math.judge", seconds=60.0)

    def library(function: str, reference: str, completion: str):
        return calls(function, reference, completion, seconds=1.0 if completion in HOSTILE else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "library", library)
        yield


def judged(reference: str, completion: str, reward=math_verify) -> float | None:
    (value,) = reward(["p"], [completion], answer=[reference], other=[1])
    return value


@pytest.mark.parametrize(("reference", "completion"), RIGHT)
def test_an_answer_that_equals_the_reference_earns_1_however_it_is_written(reference, completion):
    assert judged(reference, completion) == 1.0


@pytest.mark.parametrize(("reference", "completion"), WRONG)
def test_an_answer_that_does_not_equal_the_reference_earns_0(reference, completion):
    assert judged(reference, completion) == 0.0


@pytest.mark.parametrize("completion", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_completion_without_mathematics_in_it_earns_0(completion):
    assert judged("7", completion) == 0.0


@pytest.mark.parametrize("completion", HOSTILE, ids=range(len(HOSTILE)))
def test_a_completion_that_is_made_to_take_for_ever_earns_nothing_and_the_next_one_is_judged(completion):
    assert judged("7", completion) in (0.0, None)
    assert judged("7", r"\boxed{7}") == 1.0


def test_a_completion_of_a_group_that_is_cut_does_not_touch_the_others():
    completions = [r"\boxed{7}", HOSTILE[0], r"\boxed{8}"]
    assert math_verify(["p"] * 3, completions, answer=["7"] * 3) == [1.0, None, 0.0]


@pytest.mark.parametrize(
    ("reference", "completion", "value"),
    [
        (r"\frac{5}{6}", r"\boxed{\frac{5}{6}}", 1.0),
        (r"\frac{5}{6}", r"\boxed{\frac{10}{12}}", 1.0),
        (r"\frac{5}{6}", "5/6", 1.0),
        (r"-\frac{1}{2}", r"\boxed{-0.5}", 1.0),
        ("7", r"$x = \boxed{7}$", 1.0),
        ("7", r"\boxed{x = 7}", 1.0),
        (r"\frac{5}{6}", r"\boxed{\frac{1}{2} + \frac{1}{3}}", 0.0),
        ("7", r"\boxed{12 - 5}", 0.0),
        ("7", r"\boxed{8}", 0.0),
        ("7", "", 0.0),
    ],
)
def test_where_a_number_is_asked_for_what_is_still_to_be_computed_is_no_answer(reference, completion, value):
    assert judged(reference, completion, math_verify_number) == value


def test_a_reference_that_cannot_be_read_is_an_error_that_quotes_it():
    with pytest.raises(CallFailedError, match="no mathematics in the reference answer ''"):
        math_verify(["p"], ["7"], answer=[""])


async def test_judging_works_outside_the_main_thread_where_rewards_are_called():
    assert await asyncio.to_thread(judged, "7", r"\boxed{7}") == 1.0


def test_exactly_one_box_is_the_format():
    assert boxed(["p"] * 3, [r"\boxed{1}", "1", r"\boxed{1} or \boxed {2}"]) == [1.0, 0.0, 0.0]
