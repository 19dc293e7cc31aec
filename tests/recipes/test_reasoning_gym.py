"""With the real library, in its own processes."""

import pytest

from generator.task import DataError, TaskContext
from recipes.bounded import BoundedCalls, CallFailedError
from recipes.reasoning_gym import ReasoningGym, reward
from recipes.reasoning_gym.task import EASY
from trainer.data import PromptStream, build_prompts
from trainer.model import load_tokenizer


def context(path=None, seed=0, **options) -> TaskContext:
    return TaskContext(path, options, lambda: False, seed)


def loaded(seed=0, **options):
    task = ReasoningGym()
    return task, task.load(context(seed=seed, **{"train_rows": 12, "eval_rows": 4, **options}))


@pytest.fixture(scope="module")
def sums():
    return loaded(easy=True)


def scores(row, *completions) -> list[float | None]:
    columns = {name: [value] * len(completions) for name, value in row.items()}
    return reward.score(["p"] * len(completions), list(completions), **columns)


def test_rows_are_different_and_held_out_ones_are_not_trained_on(sums):
    _, data = sums
    questions = [row["question"] for row in [*data.rows, *data.eval_rows]]
    assert len(set(questions)) == len(questions) == 12 + 4
    assert data.source == "12 rows of reasoning_gym's chain_sum (min_terms 2, max_terms 2, min_digits 1, max_digits 1)"


@pytest.fixture(scope="module")
def other_process():
    return BoundedCalls("recipes.reasoning_gym.library", memory_mib=2048)


def test_rows_depend_on_the_seed_alone_in_whichever_process(sums, other_process, monkeypatch):
    monkeypatch.setattr(reward, "library", other_process)
    _, data = sums
    assert loaded(easy=True)[1] == data
    assert loaded(seed=1, easy=True)[1].rows != data.rows


@pytest.mark.parametrize("name", ["list_functions", "pool_matrix", "word_ladder", "family_relationships"])
def test_tasks_that_draw_from_more_than_their_own_generator_are_the_same_in_each_process(
    name, other_process, monkeypatch
):
    _, data = loaded(task=name, train_rows=3, eval_rows=0)
    monkeypatch.setattr(reward, "library", other_process)
    assert loaded(task=name, train_rows=3, eval_rows=0)[1] == data
    for row in data.rows:
        assert scores(row, f"<answer>{row['answer']}</answer>", "no") == [1.0, 0.0]


def test_the_reward_is_the_task_s_own_scorer(sums):
    _, data = sums
    row = data.rows[0]
    right = row["answer"]
    completions = [f"so <answer> {right}.0 </answer>", f"<answer>1{right}9</answer>", right, "<answer></answer>"]
    exact, contains, untagged, empty = scores(row, *completions)
    assert exact == 1.0
    assert 0.0 < contains < 1.0
    assert (untagged, empty) == (0.0, 0.0)


def test_the_last_answer_counts(sums):
    row = sums[1].rows[0]
    assert scores(row, f"<answer>x</answer> no, <answer>{row['answer']}</answer>") == [1.0]


def test_an_answer_that_is_made_to_take_for_ever_is_cut_and_the_next_one_is_scored():
    _, data = loaded(task="spiral_matrix", train_rows=1, eval_rows=0)
    row = data.rows[0]
    # The library's scorer evaluates what the model wrote.
    values = scores(row, "<answer>[9**9**9**9]</answer>", f"<answer>{row['answer']}</answer>")
    assert values == [None, 1.0]


def test_a_row_that_is_not_the_one_that_was_asked_is_an_error(sums):
    row = {**sums[1].rows[0], "question": "another"}
    with pytest.raises(CallFailedError, match="another one than when it was asked"):
        scores(row, "<answer>1</answer>")


def test_the_prompt_is_one_of_the_library_or_examples_with_their_answers(sums):
    task, data = sums
    system, question = task.prompt(data.rows[0])
    assert "<answer>" in system["content"]
    assert question["content"] == data.rows[0]["question"]
    small, data = loaded(easy=True, prompt="examples")
    chat = small.prompt(data.rows[0])
    assert [message["role"] for message in chat] == ["system", *["user", "assistant"] * 3, "user"]
    used = {row["question"] for row in [*data.rows, *data.eval_rows]}
    assert not used & {message["content"] for message in chat[1:-1]}
    assert all(message["content"].startswith("<answer>") for message in chat[2::2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "chain_sums"}, r"data\.options\.task is 'chain_sums', .*no such task; did you mean chain_sum\b"),
        ({"task": "qqq"}, "no such task; there are .*basic_arithmetic, "),
        ({"config": {"min_term": 2}}, r"chain_sum has no key 'min_term'; did you mean min_terms\? There are min_terms"),
        ({"config": {"min_terms": 9, "max_terms": 2}}, r"chain_sum refuses .*max_terms must be >= min_terms"),
        ({"config": {"min_terms": "two"}}, r"chain_sum refuses .*'two'"),
        ({"config": {"seed": 3}}, r"data\.options\.config\.seed: the run sets it"),
        ({"config": [1]}, r"data\.options\.config is \[1\], not a mapping"),
        ({"prompt": "long"}, r"data\.options\.prompt is 'long'; choose from DeepSeekZero, default, .*examples"),
        ({"easy": True, "train_rows": 500}, r"chain_sum has only \d+ different rows of the 504 asked for"),
        ({"task": "rubiks_cube", "prompt": "examples"}, "rows of rubiks_cube have no answer to show"),
        ({"train_rows": 0}, r"data\.options\.train_rows is 0; .* at least 1"),
        ({"tasks": "chain_sum"}, r"no key 'tasks' in this recipe; there are task, config"),
        ({"easy": "very"}, r"data\.options\.easy is 'very'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(options, message):
    with pytest.raises(DataError, match=message):
        loaded(**options)


def test_a_data_file_is_refused():
    with pytest.raises(DataError, match="generates its rows"):
        ReasoningGym().load(context(path="rows.jsonl"))


@pytest.mark.parametrize("name", EASY)
def test_the_easiest_configuration_can_be_changed_key_by_key(name):
    _, data = loaded(task=name, easy=True, config={"max_digits": 2})
    assert "max_digits 2" in data.source
    assert "max_terms 2" in data.source


def test_without_the_library_the_recipe_says_what_to_install(monkeypatch):
    monkeypatch.setattr(reward, "library", BoundedCalls("a_library_that_is_not_there"))
    with pytest.raises(DataError, match=r"No module named 'a_library_that_is_not_there'; `pip install reasoning-gym"):
        loaded()


def test_the_order_of_rows_goes_on_where_a_checkpoint_left_it(sums, tmp_path):
    from recipes.ci_tiny.model import build

    build(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))

    def stream(data) -> PromptStream:
        prompts = build_prompts(data.rows, lambda row: row["question"], tokenizer, max_tokens=200)
        return PromptStream(prompts, seed=0)

    whole, first, then = stream(sums[1]), stream(sums[1]), stream(loaded(easy=True)[1])
    expected = [whole.next().id for _ in range(30)]
    begun = [first.next() for _ in range(17)]
    for prompt in begun:
        first.done(prompt)
    then.load_state_dict(first.state_dict())
    assert [prompt.id for prompt in begun] + [then.next().id for _ in range(13)] == expected
