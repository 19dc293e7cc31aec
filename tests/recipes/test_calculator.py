import re

import pytest

from generator.task import TaskContext
from recipes.calculator import Calculator
from recipes.calculator.arithmetic import ArithmeticSyntaxError, calculate
from tests.trainer.scripted import CODEC, NoTrace, ScriptedEngines, prompt, rollouts, sampling
from trainer.episodes import MultiTurn


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"), (" 2 + 3 ", "5"), ("6 x 5", "30"), ("(1+2)*-3", "-9"), ("7/2", "3.5"), ("1/3", "0.333333"),
        ("0.1+0.2", "0.3"), ("9/3", "3"), ("10 - 2.5", "7.5"), ("6 \N{MULTIPLICATION SIGN} 2", "12"),
    ],
)  # fmt: skip
def test_arithmetic_is_exact_and_short(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "2 +", "2**99", "__import__('os')", "abs(1)", "True", "'a'*9", "1/0", "1e999", "1j", "9" * 65, "a", "1;2",
     "[1]", "1 if 1 else 2", "7 // 2", "(" * 60, "1<2"],
)  # fmt: skip
def test_anything_but_bounded_arithmetic_is_refused(expression):
    with pytest.raises(ArithmeticSyntaxError):
        calculate(expression)


async def played(*lines: str, answer: str = "#### 84"):
    question = prompt("12 boxes of 7?", answer=answer)
    episodes = MultiTurn(
        Calculator().environment(),
        ScriptedEngines(lines),
        sampling(max_tokens=300, max_model_len=600),
        CODEC,
        NoTrace(),
        timeout=60.0,
    )
    (scored,) = await episodes.sample(question, rollouts(question), version=0)
    return scored


async def test_a_call_is_answered_and_the_model_goes_on():
    scored = await played("<calc>", "12*7</calc>", "#### 84")
    assert scored.text == "<calc>12*7</calc> = 84\n#### 84"
    assert scored.reward == pytest.approx(0.6 + 0.3 + 0.1)
    assert scored.log == {"calls": 1, "errors": 0}
    (span,) = scored.rollout.observations
    assert CODEC.decode(scored.rollout.response_token_ids[slice(*span)]) == " = 84\n"


async def test_a_wrong_expression_gets_an_error_to_read_and_the_episode_goes_on():
    scored = await played("<calc>", "12*</calc>", "<calc>", "12*7</calc>", "#### 84")
    assert "<calc>12*</calc> = error: not arithmetic\n" in scored.text
    assert scored.log == {"calls": 2, "errors": 1}
    assert scored.reward_parts["exact_answer"] == 1.0


async def test_an_answer_without_a_call_is_scored_as_it_is():
    scored = await played("5 > ", "4 so #### 12")
    assert (scored.reward, scored.reward_parts["calculator_calls"]) == (0.0, 0.0)
    assert not scored.rollout.observations


async def test_the_last_number_alone_earns_a_part():
    assert (await played("<calc>", "12*7</calc>", "so it is 84")).reward == pytest.approx(0.3 + 0.1)


async def test_a_call_that_cannot_be_computed_earns_nothing():
    assert (await played("<calc>", "12 boxes</calc>", "I do not know")).reward == 0.0


async def test_calls_are_bounded():
    scored = await played(*["<calc>", "1+1</calc>"] * 8)
    assert scored.reward_parts["calculator_calls"] == 8.0


def test_a_prompt_shows_calls_that_the_calculator_would_continue_the_same_way():
    context = TaskContext(None, {"source": "generated"}, lambda: False, seed=0)
    task = Calculator()
    data = task.load(context)
    chat = task.prompt(data.rows[0])
    for message in chat[2:-1:2]:
        expression, result = re.fullmatch(r"<calc>(.*)</calc> = (\d+)\n#### \2", message["content"]).groups()
        assert calculate(expression) == result
    assert chat[-1]["content"] == data.rows[0]["question"]
    assert task.rewards() == []
