"""The example in docs/environments.md is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from generator.task import TaskContext
from tests.trainer.scripted import CODEC, NoTrace, ScriptedEngines, prompt, rollouts, sampling
from trainer.episodes import MultiTurn
from trainer.inputs import find_environment

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


@pytest.fixture
def task():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict = {}
    exec(code, names)
    return names["Guess"]()


async def play(task, *guesses: str):
    data = task.load(TaskContext(None, {}, lambda: False, 0))
    row = data.rows[6]
    question = prompt(task.prompt(row), **row)
    environment = find_environment(task)
    assert environment is not None
    limits = sampling(max_model_len=400)
    episodes = MultiTurn(environment, ScriptedEngines(guesses), limits, CODEC, NoTrace(), timeout=60.0)
    (scored,) = await episodes.sample(question, rollouts(question), version=0)
    return scored


async def test_the_example_plays_until_the_number_is_found(task):
    scored = await play(task, "32", "4", "7")
    assert scored.reward == pytest.approx(1 / 3)
    assert scored.log == {"guesses": 3}
    assert scored.text == "32\nlower. Next guess: 4\nhigher. Next guess: 7"


async def test_the_example_ends_at_an_answer_that_is_no_guess(task):
    scored = await play(task, "32", "no idea")
    assert (scored.reward, scored.log) == (0.0, {"guesses": 2})


async def test_the_example_ends_after_five_guesses(task):
    assert (await play(task, *["1"] * 5)).log == {"guesses": 5}
