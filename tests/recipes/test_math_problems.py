import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.task import DataError
from recipes.math.problems import KINDS, Difficulty, generate, latex
from recipes.math.task import EXAMPLES


def number(text: str) -> Fraction:
    """The value of what :func:`latex` wrote, read without it."""
    found = re.fullmatch(r"(-?)(?:(\d+)|\\frac\{(\d+)\}\{(\d+)\})", text)
    value = Fraction(found[2]) if found[2] else Fraction(int(found[3]), int(found[4]))
    return -value if found[1] else value


def holds(kind: str, problem: str, answer: Fraction) -> bool:
    """Whether the answer solves the problem, worked out from its text."""
    if kind == "fractions":
        left, sign, right = re.fullmatch(r"Compute \$(\S+) ([-+]) (\S+)\$\.", problem).groups()
        return number(left) + (1 if sign == "+" else -1) * number(right) == answer
    if kind == "polynomial":
        a, sign, b, c, x = re.fullmatch(
            r"What is \$(\d+)x\^2 ([-+]) (\d+)x \+ (\d+)\$ at \$x = (\d+)\$\?", problem
        ).groups()
        return int(a) * int(x) ** 2 + (1 if sign == "+" else -1) * int(b) * int(x) + int(c) == answer
    factor, sign, shift, right = re.fullmatch(r"Solve for \$x\$: \$(\d*)x ([-+]) (\d+) = (-?\d+)\$\.", problem).groups()
    return int(factor or 1) * answer + (1 if sign == "+" else -1) * int(shift) == int(right)


@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), largest=st.integers(6, 40), seed=st.integers(0, 1000))
def test_every_answer_solves_its_problem(kind, largest, seed):
    rows, _ = generate(Difficulty((kind,), largest, train_rows=10, eval_rows=0), seed)
    for row in rows:
        assert row["kind"] == kind
        assert holds(kind, row["problem"], number(row["answer"]))


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_a_solved_example_of_every_kind_and_it_is_right(kind):
    problem, solution = EXAMPLES[kind]
    assert holds(kind, problem, number(re.search(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", solution)[1]))


@pytest.mark.parametrize(("value", "text"), [((-3, 1), "-3"), ((1, 2), r"\frac{1}{2}"), ((-1, 2), r"-\frac{1}{2}")])
def test_numbers_are_latex(value, text):
    assert latex(Fraction(*value)) == text


def test_rows_depend_on_the_seed_alone_and_held_out_ones_are_not_trained_on():
    train, held_out = generate(Difficulty(), 3)
    assert (train, held_out) == generate(Difficulty(), 3)
    assert train != generate(Difficulty(), 4)[0]
    problems = [row["problem"] for row in [*train, *held_out]]
    assert len(set(problems)) == len(problems) == 512 + 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["shift", "calculus"]}, r"data\.options\.kinds is .*; choose from shift, linear"),
        ({"kinds": []}, "choose from shift"),
        ({"largest_number": 1}, r"data\.options\.largest_number is 1; .* at least 2"),
        ({"train_rows": "many"}, r"data\.options\.train_rows is 'many'; it must be a whole number"),
    ],
)
def test_a_wrong_difficulty_is_refused_with_what_is_allowed(options, message):
    with pytest.raises(DataError, match=message):
        Difficulty.from_options(options)


def test_one_kind_may_be_named_without_a_list():
    assert Difficulty.from_options({"kinds": "linear"}).kinds == ("linear",)


def test_more_rows_than_there_are_problems_are_refused_with_how_many_there_are():
    with pytest.raises(DataError, match=r"allow only \d+ distinct train rows of the 500 asked for"):
        generate(Difficulty(("shift",), 3, train_rows=500, eval_rows=0), 0)
