import json
import logging
from collections import Counter

import pytest

from generator.rollout import Prompt
from generator.task import DataError
from recipes.ci_tiny.model import build
from trainer.data import PromptStream, build_prompts
from trainer.model import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A real tokenizer: one token a character, with a chat template that brings its own special token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build(folder)
    (folder / "chat_template.jinja").write_text(
        "<bos>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return load_tokenizer(str(folder))


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index, (1, index + 3), f"text {index}", {}) for index in range(count)]


def draw(stream: PromptStream, count: int) -> list[int]:
    return [stream.next().id for _ in range(count)]


def test_plain_text_and_chats_become_prompts_with_text_ids_and_columns(tokenizer):
    rows = [{"q": "ab", "chat": False}, {"q": "cd", "chat": True}]

    def render(row):
        return [{"role": "user", "content": row["q"]}] if row["chat"] else row["q"]

    plain, chat = build_prompts(rows, render, tokenizer, max_tokens=100)
    assert plain == Prompt(0, (3, 4), "ab", rows[0])
    assert chat.text == "<bos>user: cd\nassistant: "
    assert tokenizer.decode(chat.token_ids) == chat.text
    assert chat.token_ids[0] == tokenizer.bos_token_id


def test_a_prompt_that_leaves_no_room_is_refused_with_its_row_and_length_and_nothing_else_is_said(
    tokenizer, monkeypatch, caplog
):
    rows = [{"q": "abc"}, {"q": "abcd"}, {"q": "abcde"}]
    monkeypatch.setattr(tokenizer, "model_max_length", 3)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(DataError, match=r"row 2 .* 4 tokens.*room for 3.*'abcd'"):
        build_prompts(rows, lambda row: row["q"], tokenizer, max_tokens=3)
    assert caplog.text == ""
    assert len(build_prompts(rows, lambda row: row["q"], tokenizer, max_tokens=5)) == 3


def test_an_empty_data_set_and_an_empty_prompt_are_refused(tokenizer):
    with pytest.raises(DataError, match="no rows"):
        build_prompts([], str, tokenizer, max_tokens=3)
    with pytest.raises(DataError, match=r"row 1 .* empty prompt"):
        build_prompts([{"q": ""}], lambda row: row["q"], tokenizer, max_tokens=3)


def test_half_a_character_is_refused_with_its_row(tokenizer):
    with pytest.raises(DataError, match="row 2: the prompt holds half"):
        build_prompts([{"q": "fine"}, {"q": "\ud800 x"}], lambda row: row["q"], tokenizer, max_tokens=9)


def test_a_position_that_no_stream_of_these_prompts_was_at_is_refused():
    state = PromptStream(prompts(5), seed=0).state_dict()
    for broken in ({"cursor": 99_999}, {"returned": [99_999]}, {"epoch": -1}):
        with pytest.raises(ValueError, match="position"):
            PromptStream(prompts(5), seed=0).load_state_dict(state | broken)


def test_a_column_that_would_hide_the_texts_from_rewards_is_refused(tokenizer):
    with pytest.raises(DataError, match="column 'completions'"):
        build_prompts([{"completions": "x"}], lambda row: "ab", tokenizer, max_tokens=3)


def test_each_epoch_hands_out_every_prompt_once_in_a_new_order():
    stream = PromptStream(prompts(20), seed=0)
    first, second = draw(stream, 20), draw(stream, 20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second != list(range(20))


def test_the_order_depends_on_the_seed_and_can_be_that_of_the_file():
    assert draw(PromptStream(prompts(20), seed=1), 45) == draw(PromptStream(prompts(20), seed=1), 45)
    assert draw(PromptStream(prompts(20), seed=1), 20) != draw(PromptStream(prompts(20), seed=2), 20)
    assert draw(PromptStream(prompts(4), seed=1, shuffle=False), 6) == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("drawn", [0, 7, 20, 33])
def test_a_restored_stream_continues_where_the_saved_one_was(drawn):
    stream = PromptStream(prompts(20), seed=3)
    taken = [stream.next() for _ in range(drawn)]
    for prompt in taken[:-1]:
        stream.done(prompt)
    if taken:
        stream.give_back(taken[-1])
    state = json.loads(json.dumps(stream.state_dict()))
    restored = PromptStream(prompts(20), seed=3)
    draw(restored, 5)
    restored.load_state_dict(state)
    assert draw(restored, 50) == draw(stream, 50)


def test_prompts_that_were_being_sampled_when_the_state_was_saved_come_first_again():
    stream = PromptStream(prompts(10), seed=0)
    taken = [stream.next() for _ in range(4)]
    stream.done(taken[1])
    restored = PromptStream(prompts(10), seed=0)
    restored.load_state_dict(stream.state_dict())
    assert draw(restored, 3) == [taken[0].id, taken[2].id, taken[3].id]
    assert set(draw(restored, 6)).isdisjoint(prompt.id for prompt in taken)


def test_prompts_whose_groups_a_checkpoint_keeps_are_not_handed_out_again():
    stream = PromptStream(prompts(10), seed=0)
    taken = [stream.next() for _ in range(4)]
    stream.give_back(taken[3])
    restored = PromptStream(prompts(10), seed=0)
    restored.load_state_dict(json.loads(json.dumps(stream.state_dict())), kept=[taken[2].id, taken[0].id])
    assert draw(restored, 2) == [taken[1].id, taken[3].id]
    assert set(draw(restored, 6)).isdisjoint(prompt.id for prompt in taken)
    for prompt in taken:
        restored.done(prompt)


def test_a_prompt_in_flight_twice_is_kept_as_often_as_its_groups():
    stream = PromptStream(prompts(1), seed=0)
    stream.next(), stream.next()
    restored = PromptStream(prompts(1), seed=0)
    restored.load_state_dict(stream.state_dict(), kept=[0])
    assert restored.state_dict()["handed_out"] == restored.state_dict()["returned"] == [0]


def test_rollouts_of_a_prompt_that_was_not_handed_out_do_not_fit():
    stream = PromptStream(prompts(10), seed=0)
    given = stream.next()
    with pytest.raises(DataError, match="had not handed out"):
        PromptStream(prompts(10), seed=0).load_state_dict(stream.state_dict(), kept=[given.id, given.id])


def test_a_prompt_given_back_comes_first_again_and_no_other_is_lost():
    stream = PromptStream(prompts(10), seed=0)
    taken = [stream.next() for _ in range(4)]
    stream.give_back(taken[1])
    stream.give_back(taken[3])
    assert draw(stream, 2) == [taken[1].id, taken[3].id]
    seen = Counter([taken[0].id, taken[1].id, taken[2].id, taken[3].id, *draw(stream, 6)])
    assert set(seen.values()) == {1}


def test_a_prompt_of_another_stream_cannot_be_given_back():
    with pytest.raises(KeyError, match="99"):
        PromptStream(prompts(3), seed=0).give_back(Prompt(99, (1,), "", {}))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptStream(prompts(19), seed=0), "the prompts are not the same"),
        (PromptStream(prompts(20), seed=1), "seed was 1"),
        (PromptStream(prompts(20), seed=0, shuffle=False), "shuffle was False"),
    ],
)
def test_a_position_in_other_data_is_refused_instead_of_silently_skipping_rows(other, message):
    with pytest.raises(DataError, match=message):
        PromptStream(prompts(20), seed=0).load_state_dict(other.state_dict())


def test_the_longest_prompt_is_known_for_the_context_length():
    stream = PromptStream([Prompt(0, (1, 2), "", {}), Prompt(1, (1, 2, 3, 4), "", {})], seed=0)
    assert stream.longest_prompt == 4


def mixture(seed: int = 0, **shares: float) -> PromptStream:
    """Of data sets of 4 and more prompts each."""
    names = [name for number, name in enumerate(shares) for _ in range(4 + 3 * number)]
    of_sets = [Prompt(number, (1, number), "", {}, name) for number, name in enumerate(names)]
    return PromptStream(of_sets, seed=seed, shares=shares)


def test_a_mixture_continues_in_the_same_order_with_what_was_handed_out_first():
    stream = mixture(easy=0.75, hard=0.25)
    taken = [stream.next() for _ in range(21)]
    for prompt in taken[:-2]:
        stream.done(prompt)
    restored = mixture(easy=0.75, hard=0.25)
    restored.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert draw(restored, 52) == [taken[-2].id, taken[-1].id, *draw(stream, 50)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (mixture(easy=0.5, hard=0.5), "shares of data.mixture were"),
        (mixture(hard=0.25, easy=0.75), "shares of data.mixture were|not the same"),
        (PromptStream(prompts(11), seed=0), "single data set"),
    ],
)
def test_a_mixture_of_other_data_sets_or_shares_is_refused(other, message):
    with pytest.raises(DataError, match=message):
        mixture(easy=0.75, hard=0.25).load_state_dict(other.state_dict())
