"""The sampler of an environment: what the environment passes, and what becomes of the rollout."""

from __future__ import annotations

import asyncio

import pytest

from generator.rollout import Rollout
from generator.task import TurnError
from tests.trainer.scripted import CODEC, EOS, ScriptedEngines, sampling
from trainer.conversation import Conversation

PROMPT = CODEC.encode("2+2?")


def conversation(*lines: str, recorded: Rollout | None = None, **changes) -> Conversation:
    return Conversation(
        recorded or Rollout("r", PROMPT), ScriptedEngines(lines), sampling(**changes), CODEC, limit=60.0
    )


async def test_turns_and_observations_alternate_in_one_rollout():
    talk = conversation("ask", "done")
    first = await talk.generate(talk.token_ids)
    assert (first.text, first.finish_reason) == ("ask", "stop")
    assert first.token_ids == (*CODEC.encode("ask"), EOS)
    second = await talk.generate(talk.token_ids + talk.encode(" = 4"))
    assert second.text == "done"
    assert talk.token_ids == PROMPT + first.token_ids + CODEC.encode(" = 4") + second.token_ids
    assert talk.rollout.loss_mask == (True,) * 4 + (False,) * 4 + (True,) * 5
    assert talk.rollout.finish_reason == "stop"


async def test_token_ids_that_were_encoded_again_are_refused():
    talk = conversation("ask", "done")
    turn = await talk.generate(talk.token_ids)
    again = PROMPT + talk.encode(turn.text)  # the stop token is lost in the text
    with pytest.raises(TurnError, match="do not continue the conversation"):
        await talk.generate(again)
    with pytest.raises(TurnError, match="differ at position 0 "):
        await talk.generate(talk.encode("only the observation"))


@pytest.mark.parametrize("token", [-1, 10_000])
async def test_an_observation_outside_the_vocabulary_is_refused(token):
    talk = conversation("ask", "done")
    await talk.generate(talk.token_ids)
    with pytest.raises(TurnError, match="does not know"):
        await talk.generate((*talk.token_ids, token))


async def test_the_first_turn_starts_from_the_prompt_alone():
    talk = conversation("ask")
    with pytest.raises(TurnError, match=r"Task\.prompt"):
        await talk.generate(talk.token_ids + talk.encode("hello"))


async def test_a_turn_has_a_budget_and_stop_tokens_of_its_own():
    talk = conversation("one two", "three<four")
    turn = await talk.generate(talk.token_ids, max_tokens=3)
    assert (turn.text, turn.finish_reason) == ("one", "length")
    turn = await talk.generate(talk.token_ids, stop_token_ids=talk.ids_containing("<"))
    assert (turn.text, turn.finish_reason) == ("three<", "stop")
    assert talk.tokens_left == 100 - len("onethree<")


async def test_a_turn_may_go_on_behind_its_stop_token_without_an_observation():
    talk = conversation("ask<", "done")
    stops = talk.ids_containing("<")
    await talk.generate(talk.token_ids, stop_token_ids=stops)
    turn = await talk.generate(talk.token_ids, stop_token_ids=stops)
    assert turn.text == "done"
    assert talk.rollout.observations == ()


async def test_the_budget_counts_the_sampled_tokens_of_all_turns():
    talk = conversation("four", "eight", max_tokens=8)
    await talk.generate(talk.token_ids)
    turn = await talk.generate(talk.token_ids + talk.encode("observed"))
    assert (turn.text, turn.finish_reason) == ("eig", "length")
    assert talk.tokens_left == 0


async def test_without_room_the_turn_is_empty_and_the_rollout_over():
    talk = conversation("four", max_model_len=20)
    await talk.generate(talk.token_ids)
    before = talk.token_ids
    turn = await talk.generate(before + talk.encode("an observation that is too long"))
    assert (turn.token_ids, turn.finish_reason) == ((), "length")
    assert talk.token_ids == before, "what nobody reads is not kept"
    assert talk.rollout.finish_reason == "length"
    with pytest.raises(TurnError, match="over"):
        await talk.generate(before)


async def test_two_turns_at_a_time_are_refused():
    talk = conversation("ask", "done")
    first = asyncio.create_task(talk.generate(talk.token_ids))
    await asyncio.sleep(0)
    with pytest.raises(TurnError, match="await one turn"):
        await talk.generate(talk.token_ids)
    assert (await first).text == "ask"


async def test_a_minimum_of_tokens_above_the_budget_of_a_turn_does_not_contradict_it():
    talk = conversation("a" * 30, min_tokens=20)
    assert len((await talk.generate(talk.token_ids, max_tokens=5)).token_ids) == 5


async def test_stop_ids_of_a_text_leave_special_tokens_out():
    assert conversation().ids_containing("") - set(range(2, 200)) == {0, 1}
    assert conversation().ids_containing("<") == frozenset(CODEC.encode("<"))


async def test_a_call_runs_in_a_thread_and_raises_what_the_function_raises():
    talk = conversation()
    assert await talk.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await talk.call(divmod, 7, 0)

    def end() -> None:
        raise SystemExit("no")

    with pytest.raises(RuntimeError, match="SystemExit: no"):
        await talk.call(end)


async def play(talk: Conversation) -> Rollout:
    stops = talk.ids_containing("<")
    await talk.generate(talk.token_ids, stop_token_ids=stops, max_tokens=8)
    await talk.generate(talk.token_ids + talk.encode(" 4;"), stop_token_ids=stops)
    await talk.generate(talk.token_ids + talk.encode(" 5."), stop_token_ids=stops)
    return talk.rollout


LINES = ("ask<never", "more", "the end")


async def test_an_episode_that_a_checkpoint_kept_goes_on_from_every_token_of_it():
    whole = await play(conversation(*LINES))
    for count in range(1, len(whole.response_token_ids) + 1):
        kept = whole.first(count)
        talk = conversation(*LINES, recorded=kept)
        talk._engines = ContinuingEngines([turn_of(whole, number) for number in range(3)])
        again = await play(talk)
        assert again.response_token_ids == whole.response_token_ids
        assert again.versions[:count] == whole.versions[:count]
        assert again.loss_mask == whole.loss_mask
        assert again.finish_reason == whole.finish_reason


async def test_an_episode_that_does_something_else_than_its_recording_is_sampled_anew():
    whole = await play(conversation(*LINES))
    talk = conversation(*LINES, recorded=whole)
    await talk.generate(talk.token_ids, stop_token_ids=talk.ids_containing("<"), max_tokens=8)
    assert talk._engines.turns == 0, "the first turn is the recorded one"
    talk._engines.said["r"], talk._engines.version = 1, 9
    turn = await talk.generate(talk.token_ids + talk.encode(" 9;"))
    assert turn.text == "more"
    assert talk._engines.turns == 1
    assert talk.partial is talk.rollout


def turn_of(whole: Rollout, number: int) -> tuple[int, ...]:
    """The tokens of a turn of a rollout with an observation between any two."""
    starts = [0, *(end for _, end in whole.observations)]
    ends = [*(start for start, _ in whole.observations), len(whole.response_token_ids)]
    return whole.response_token_ids[starts[number] : ends[number]]


class ContinuingEngines(ScriptedEngines):
    """Goes on where the rollout stands in its turn."""

    def __init__(self, turns: list[tuple[int, ...]]) -> None:
        super().__init__([])
        self._told = turns

    async def generate(self, rollouts, sampling=None):
        (rollout,) = rollouts
        number = len(rollout.observations)
        start = rollout.observations[-1][1] if rollout.observations else 0
        rest = self._told[number][len(rollout.response_token_ids) - start :]
        self.lines = [CODEC.decode([token for token in rest if token != EOS])]
        self.said = {}
        self.version = rollout.versions[-1] if rollout.versions else 0
        return await super().generate(rollouts, sampling)
