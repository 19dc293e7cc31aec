from decimal import Decimal

import pytest

from recipes.gsm8k.reward import answer_format, exact_answer, final_number, last_number, marked_number

REFERENCE = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"


def score(function, completion: str, reference: str = REFERENCE) -> float:
    (value,) = function(["question"], [completion], answer=[reference])
    return value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1072", "1072"),
        ("so it is\n####1,072", "1072"),
        ("#### $1,072.00.", "1072"),
        ("#### +7", "7"),
        ("#### -5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### \N{MINUS SIGN}5", "-5"),
        ("#### .5", "0.5"),
        ("#### 18.", "18"),
        ("#### 7 apples.", "7"),
        ("#### 3\n#### 5", "5"),
        ("#### 3 #### 5", "5"),
        ("#### 5\nI hope this helps.", "5"),
    ],
)
def test_the_marked_number_is_read_through_signs_commas_currency_and_units(text, number):
    assert marked_number(text) == Decimal(number)


@pytest.mark.parametrize(
    "text", ["", "1072", "####", "#### none", "#### 1 2 3", "#### 5 + 3 = 8", "#### 4 or 5", "### 5", "#### 5 ####"]
)
def test_without_one_number_directly_after_the_mark_there_is_no_marked_number(text):
    assert marked_number(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("She has 7 apples, not 8.", "8"),
        ("5-3", "3"),
        ("(5)-3", "3"),
        ("x = -3", "-3"),
        ("it is -$3.50.", "-3.5"),
        ("$-3", "-3"),
        ("that makes 12,345", "12345"),
        ("1, 2,3", "3"),
        ("#### 5 ####", "5"),
        ("x3", "3"),
        ("60%", "60"),
    ],
)
def test_the_final_number_is_the_last_one_wherever_it_stands(text, number):
    assert final_number(text) == Decimal(number)


def test_a_text_without_digits_has_no_final_number():
    assert final_number("no idea, \N{SUBSCRIPT TWO}") is None


def test_exact_answer_compares_values_and_needs_the_mark():
    assert score(exact_answer, "#### 1072") == 1.0
    assert score(exact_answer, "#### 1072.0") == 1.0
    assert score(exact_answer, "It is 1072") == 0.0
    assert score(exact_answer, "#### 1073") == 0.0


def test_the_last_mark_counts_so_a_right_answer_that_is_replaced_scores_nothing():
    assert score(exact_answer, "#### 1072\n#### 3") == 0.0


def test_last_number_needs_no_mark_but_the_right_number_at_the_end():
    assert score(last_number, "It is 1,072.") == 1.0
    assert score(last_number, "1072 is 1 number") == 0.0
    assert score(last_number, "") == 0.0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("2 + 3 = 5\n#### 5", 1.0),
        ("#### 5.\n", 1.0),
        ("#### 9", 1.0),
        ("#### 5 apples", 0.0),
        ("#### 5\nThat is all.", 0.0),
        ("#### 5\n#### 5", 0.0),
        ("5", 0.0),
    ],
)
def test_answer_format_is_about_the_shape_not_the_number(completion, value):
    assert score(answer_format, completion) == value


def test_each_completion_is_compared_with_its_own_reference():
    assert exact_answer(["q"] * 2, ["#### 1", "#### 1"], answer=["#### 1", "#### 2"]) == [1.0, 0.0]
