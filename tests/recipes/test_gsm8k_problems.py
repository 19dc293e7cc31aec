import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.task import DataError
from recipes.gsm8k.problems import OPERATIONS, Difficulty, generate
from recipes.gsm8k.reward import marked_number
from recipes.gsm8k.source import checked_row

CALCULATION = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
MIXED = Difficulty(steps=3, largest_number=12, operations=OPERATIONS, train_rows=80, eval_rows=10)


def calculate(left: str, symbol: str, right: str) -> int:
    a, b = int(left), int(right)
    assert symbol != "/" or a % b == 0
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // (b or 1)}[symbol]


@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(1, 4),
    largest=st.integers(5, 30),
    operations=st.sets(st.sampled_from(OPERATIONS), min_size=1).map(tuple),
    seed=st.integers(0, 1000),
)
def test_the_worked_answer_chains_from_the_numbers_of_the_question_to_the_marked_number(
    steps, largest, operations, seed
):
    if "divide" in operations:
        operations = (*operations, "multiply")  # division alone soon runs out of divisors
    rows, _ = generate(Difficulty(steps, largest, 0, operations, train_rows=10, eval_rows=0), seed)
    for row in rows:
        calculations = CALCULATION.findall(row["answer"])
        assert len(calculations) == steps
        asked = [int(n) for n in re.findall(r"\d+", row["question"])]
        assert [int(right) for _, _, right, _, _ in calculations] == asked[1:]
        assert max(asked) <= largest
        count = asked[0]
        for left, symbol, right, result, shown in calculations:
            assert int(left) == count
            count = calculate(left, symbol, right)
            assert count == int(result) == int(shown) >= 0
        assert marked_number(row["answer"]) == count


def test_rows_have_the_schema_that_a_data_file_must_have():
    train, held_out = generate(MIXED, 0)
    for row in train + held_out:
        assert checked_row(row, "here") == row


def test_the_default_difficulty_offers_hundreds_of_distinct_problems():
    train, held_out = generate(Difficulty(), 0)
    questions = {row["question"] for row in train + held_out}
    assert len(train) >= 300
    assert len(questions) == len(train) + len(held_out)


def test_training_and_held_out_rows_share_no_combination_of_numbers_and_operations():
    def combinations(rows):
        return {tuple(CALCULATION.findall(row["answer"])) for row in rows}

    for difficulty in (Difficulty(), MIXED):
        train, held_out = generate(difficulty, 3)
        assert held_out
        assert not combinations(train) & combinations(held_out)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others():
    assert generate(MIXED, 7) == generate(MIXED, 7)
    assert generate(MIXED, 7)[0] != generate(MIXED, 8)[0]


def test_no_result_exceeds_the_largest_result():
    rows, _ = generate(Difficulty(steps=2, largest_number=9, largest_result=10, train_rows=50, eval_rows=5), 0)
    results = [int(result) for row in rows for *_, result, _ in CALCULATION.findall(row["answer"])]
    assert max(results) == 10


def test_a_difficulty_with_too_few_problems_is_refused_with_what_to_change():
    with pytest.raises(DataError, match=r"only \d+ distinct .*largest_number"):
        generate(Difficulty(operations=("subtract",), largest_number=2, train_rows=5000), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "data.options.steps is 0"),
        ({"steps": "two"}, "data.options.steps is 'two'"),
        ({"largest_number": 1}, "at least 2"),
        ({"largest_number": 10**9}, "at least 2 and at most 1000"),
        ({"eval_rows": -1}, "data.options.eval_rows is -1"),
        ({"operations": ["add", "root"]}, "choose from add, subtract, multiply, divide"),
        ({"operations": []}, "choose from"),
        ({"operations": 3}, "choose from"),
    ],
)
def test_an_impossible_difficulty_is_refused_by_name(options, message):
    with pytest.raises(DataError, match=re.escape(message)):
        Difficulty.from_options(options)


def test_one_operation_may_be_given_without_a_list():
    assert Difficulty.from_options({"operations": "subtract"}).operations == ("subtract",)
