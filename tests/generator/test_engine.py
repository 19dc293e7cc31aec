"""One real vLLM engine, shared by the module, with weights pushed into it while it generates."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import psutil
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from generator.engine import Engine
from generator.link import EngineError
from generator.request import Request
from generator.resume import Sampling
from generator.rollout import Rollout, Segment
from tests.brake import ANY_NUMBER, FUNCTIONS_IN_THE_WORKER, begun, braked
from tests.tiny import (
    VOCABULARY,
    ModuleLearner,
    OneEngine,
    assert_sampled_by,
    engine_settings,
    next_token_logprobs,
    tiny_llama,
)
from weight_sync.canary import canary_sequences
from weight_sync.client import UpdateRequest
from weight_sync.push import Pusher

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

MAX_TOKENS = 400
MAX_RUNNING = 6


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {"A": tiny_llama(1), "B": tiny_llama(2)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    models["A"].save_pretrained(folder)
    tokenizer = Tokenizer(BPE({letters([token_id]): token_id for token_id in range(VOCABULARY)}, []))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0, max_model_len=450)
    settings = engine_settings(folder, sampling, running=MAX_RUNNING, pressure=True)
    engine = Engine(replace(settings, environment=settings.environment | FUNCTIONS_IN_THE_WORKER))
    await engine.start()
    yield engine
    await engine.shutdown()


@pytest.fixture(scope="module")
def learner(engine, models) -> ModuleLearner:
    return ModuleLearner(models["A"], engine)


@pytest.fixture(scope="module")
def one_engine(engine) -> OneEngine:
    return OneEngine(engine)


@pytest.fixture(autouse=True)
def abort_mode(one_engine) -> None:
    """Every test begins in it, whatever the one before did."""
    one_engine.mode, one_engine.kv_cache = "abort", "recompute"


@pytest.fixture(scope="module")
def pusher(learner, one_engine) -> Pusher:
    return Pusher(learner, one_engine, timeout=120.0)


async def push(pusher: Pusher, learner: ModuleLearner, model: torch.nn.Module) -> int:
    learner.model = model
    version = 0 if pusher.published is None else pusher.published + 1
    await pusher.push(version)
    return version


async def sampled(engine: Engine, tokens: int) -> None:
    """Wait until the engine has sampled ``tokens`` more."""
    start = (await engine.stats())["generated_tokens"]
    async with asyncio.timeout(120):
        while (await engine.stats())["generated_tokens"] < start + tokens:  # noqa: ASYNC110 (there is no such event)
            await asyncio.sleep(0.002)


def letters(token_ids) -> str:
    """What the test model's tokenizer decodes token ids to: one character each."""
    return "".join(chr(0x100 + token_id) for token_id in token_ids)


def sampling(engine: Engine, **changes) -> Sampling:
    return replace(engine.settings.sampling, **changes)


def begin(whole: Rollout, tokens: int, version: int) -> Rollout:
    """The rollout that ``whole`` was after its first ``tokens`` tokens."""
    segment = Segment(whole.response_token_ids[:tokens], whole.logprobs[:tokens], version)
    return Rollout(id=whole.id, prompt_token_ids=whole.prompt_token_ids).extended(segment)


def prompts(count: int) -> list[Rollout]:
    return [Rollout(id=str(n), prompt_token_ids=(5 + n, 17, 3, 60, 42 + n)) for n in range(count)]


async def test_an_engine_without_a_published_version_serves_nothing(engine):
    assert engine.version is None
    with pytest.raises(EngineError, match="cannot serve version 0"):
        await engine.resume(0)


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
async def test_weights_pushed_mid_generation_sample_exactly_the_tokens_that_they_are_tagged_with(
    engine, learner, pusher, models, one_engine, mode
):
    """A, B, A, B during the same rollouts; more rollouts than run at a time, so that some wait when a push comes.

    In mode ``keep`` the KV cache is recomputed, so the tokens are exactly those of the weights there too; in mode
    ``wait`` what waits at vLLM runs to its end as well.
    """
    one_engine.mode = mode
    by_version = {await push(pusher, learner, models["A"]): models["A"]}
    started = prompts(MAX_RUNNING + 2)
    partial: list[Rollout] = []
    async with braked(engine, steps=ANY_NUMBER if mode == "wait" else MAX_TOKENS // 6) as go_on:
        task = asyncio.create_task(engine.generate(started))
        for name in ("B",) if mode == "wait" else ("B", "A", "B"):  # after a wait nothing is left to be pushed into
            await sampled(engine, MAX_RUNNING * MAX_TOKENS // 6)
            partial += await engine.partial_rollouts()
            by_version[await push(pusher, learner, models[name])] = models[name]
            await go_on()
    finished = (await asyncio.wait_for(task, timeout=300)).rollouts

    assert [rollout.id for rollout in finished] == [rollout.id for rollout in started]
    assert any(known.response_token_ids for known in partial[: len(started)]), "before the first push"
    for known in partial:
        whole = finished[int(known.id)].first(len(known.response_token_ids))
        assert (known.response_token_ids, known.logprobs) == (whole.response_token_ids, whole.logprobs)
        assert known.versions == whole.versions
    assert max(rollout.version_count for rollout in finished) == {"abort": 4, "keep": 4, "wait": 1}[mode]
    assert max(rollout.resumes for rollout in finished) == {"abort": 3, "keep": 0, "wait": 0}[mode]
    for rollout in finished:
        assert len(rollout.response_token_ids) == MAX_TOKENS
        assert rollout.finish_reason == "length"
    assert_sampled_by(finished, by_version, tolerance=2e-4)


async def test_the_models_of_this_test_disagree_so_that_a_wrong_tag_would_show(models):
    tokens = list(range(3, 90))
    a, b = (next_token_logprobs(models[name], tokens).argmax(-1) for name in ("A", "B"))
    assert (a != b).float().mean() > 0.8


SEQUENCES = canary_sequences(VOCABULARY, 200)


async def test_a_pushed_engine_computes_what_the_learner_computes(engine, learner, pusher, models):
    for name in ("A", "B"):
        await push(pusher, learner, models[name])
        await engine.pause()
        computed = await engine.prompt_logprobs(SEQUENCES)
        for row, expected in zip(computed, await learner.logprobs(SEQUENCES), strict=True):
            assert row == pytest.approx(expected, abs=1e-4)
        await engine.resume(pusher.published)


async def test_given_sequences_are_computed_behind_a_closed_gate_and_between_updates_only(engine, pusher):
    with pytest.raises(EngineError, match="serves"):
        await engine.prompt_logprobs(SEQUENCES)
    await engine.pause()
    task = asyncio.create_task(engine.generate(prompts(1)))
    await engine.prompt_logprobs(SEQUENCES)
    assert (await engine.stats())["submitted"] == 0
    with pytest.raises(EngineError, match="the engine is not paused"):
        await engine.start_weight_update()
    await engine.resume(pusher.published)
    (rollout,) = (await asyncio.wait_for(task, timeout=300)).rollouts
    assert len(rollout.response_token_ids) == MAX_TOKENS


async def test_frozen_requests_are_not_disturbed_by_a_question_for_given_sequences(engine, learner, pusher, models):
    await push(pusher, learner, models["A"])
    whole = (await engine.generate(prompts(2))).rollouts
    async with braked(engine, steps=30):
        task = asyncio.create_task(engine.generate(prompts(2)))
        await sampled(engine, 60)
        await engine.pause("keep")
    before = await engine.partial_rollouts()
    assert await engine.prompt_logprobs(SEQUENCES) is None
    assert await engine.partial_rollouts() == before
    await engine.resume(pusher.published)
    finished = (await asyncio.wait_for(task, timeout=300)).rollouts
    assert [rollout.resumes for rollout in finished] == [0, 0]
    assert [r.response_token_ids for r in finished] == [r.response_token_ids for r in whole]


async def test_two_pushes_in_quick_succession_lose_no_token(engine, learner, pusher, models):
    async with braked(engine, steps=10):
        task = asyncio.create_task(engine.generate(prompts(3)))
        await sampled(engine, 30)
        await push(pusher, learner, models["A"])
        await push(pusher, learner, models["B"])
    finished = (await asyncio.wait_for(task, timeout=300)).rollouts
    for rollout in finished:
        assert len(rollout.response_token_ids) == MAX_TOKENS
        assert rollout.resumes == 2


async def test_an_engine_says_how_full_its_kv_cache_was_since_the_last_question(engine, learner, pusher, models):
    await push(pusher, learner, models["A"])
    await engine.pressure()
    await engine.generate(prompts(MAX_RUNNING), sampling(engine, max_tokens=40))
    busy = await engine.pressure()
    assert 0.0 < busy.kv_cache_usage < 1.0
    assert busy.preemptions == 0  # there is room for all of them
    assert (await engine.pressure()).kv_cache_usage < busy.kv_cache_usage


async def test_a_paused_engine_holds_new_rollouts_and_serves_them_after_the_resume(engine, pusher):
    await engine.pause()
    task = asyncio.create_task(engine.generate(prompts(1)))
    await asyncio.sleep(0.2)
    assert (await engine.stats())["submitted"] == 0
    assert not task.done()
    await engine.resume(pusher.published)
    (rollout,) = (await asyncio.wait_for(task, timeout=300)).rollouts
    assert len(rollout.response_token_ids) == MAX_TOKENS


async def test_pausing_a_paused_engine_and_resuming_a_serving_one_change_nothing_but_warn(engine, pusher, caplog):
    assert await engine.pause() == 0
    assert await engine.pause() == 0
    assert "is paused already" in caplog.text
    await engine.resume(pusher.published)
    task = asyncio.create_task(engine.generate(prompts(2)))
    await sampled(engine, 20)
    await engine.resume(pusher.published)
    assert "serves already" in caplog.text
    for rollout in (await asyncio.wait_for(task, timeout=300)).rollouts:
        assert len(rollout.response_token_ids) == MAX_TOKENS
        assert rollout.resumes == 0


async def test_an_abort_brings_back_every_request_those_that_still_waited_without_a_token(engine, pusher):
    """Twice as many rollouts as run at a time: nothing is sampled for the second half before the pause."""
    async with braked(engine, steps=5):
        task = asyncio.create_task(engine.generate(prompts(2 * MAX_RUNNING)))
        await begun(engine, MAX_RUNNING)
        assert await engine.pause() == 2 * MAX_RUNNING
    assert (await engine.stats())["submitted"] == 0
    tokens = [len(rollout.response_token_ids) for rollout in await engine.partial_rollouts()]
    assert tokens.count(0) == MAX_RUNNING
    await engine.resume(pusher.published)
    for rollout in (await asyncio.wait_for(task, timeout=300)).rollouts:
        assert len(rollout.response_token_ids) == MAX_TOKENS


async def test_the_prefix_cache_is_empty_after_an_abort_even_with_requests_that_waited(engine, pusher):
    """128 tokens are a whole block of vLLM's cache on CPU: without the abort, the second request would find them."""
    long = [Rollout(id=f"long{n}", prompt_token_ids=tuple(3 + (n + k) % 90 for k in range(140))) for n in range(9)]
    cached = sampling(engine, max_tokens=8)
    await engine.generate(long[:1], cached)
    again = await engine.generate(long[:1], cached)
    assert again.counts["tokens/cached"] == 128, "without a pause the prompt is found in the cache"
    task = asyncio.create_task(engine.generate(long, sampling(engine, max_tokens=200)))
    await sampled(engine, 30)
    await engine.pause()
    await engine.resume(pusher.published)
    returned = await asyncio.wait_for(task, timeout=300)
    assert returned.counts["tokens/cached"] == 128, "the first one found its prompt, but only before the pause"


async def test_a_weight_update_of_a_serving_engine_is_refused(engine):
    with pytest.raises(EngineError, match="the engine is not paused"):
        await engine.start_weight_update()


@pytest.mark.parametrize(
    "changes",
    [{}, {"repetition_penalty": 1.3}, {"min_tokens": 20, "stop_token_ids": frozenset(range(60))}],
    ids=["plain", "repetition penalty", "stop tokens after a minimum"],
)
async def test_a_greedy_rollout_interrupted_at_any_position_equals_the_uninterrupted_one(
    engine, learner, pusher, models, changes
):
    version = await push(pusher, learner, models["A"])
    params = sampling(engine, max_tokens=41, **changes)
    whole = (await engine.generate(prompts(2), params)).rollouts[1]
    assert whole.finish_reason == ("stop" if "min_tokens" in changes else "length")
    positions = range(1, len(whole.response_token_ids))
    started = [replace(begin(whole, position, version), id=str(position)) for position in positions]
    continued = (await asyncio.wait_for(engine.generate(started, params), timeout=300)).rollouts
    for position, rollout in zip(positions, continued, strict=True):
        assert rollout.response_token_ids == whole.response_token_ids, f"interrupted after {position} tokens"
        assert rollout.logprobs == pytest.approx(whole.logprobs, abs=1e-4), f"interrupted after {position} tokens"
        assert rollout.finish_reason == whole.finish_reason


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9, "top_k": 20, "min_p": 0.01}], ids=["plain", "filtered"])
async def test_seeded_sampling_is_reproducible_differs_within_a_group_and_never_starts_again(
    engine, learner, pusher, models, changes
):
    version = await push(pusher, learner, models["A"])
    params = sampling(engine, max_tokens=20, temperature=1.0, seed=7, **changes)
    group = [Rollout(id=f"0-{member}", prompt_token_ids=(7, 7, 7)) for member in range(4)]
    first, again = [(await engine.generate(group, params)).rollouts for _ in range(2)]
    assert [rollout.response_token_ids for rollout in first] == [rollout.response_token_ids for rollout in again]
    assert len({rollout.response_token_ids for rollout in first}) == len(group)

    started = [begin(rollout, 10, version) for rollout in first]
    resumed, again = [(await engine.generate(started, params)).rollouts for _ in range(2)]
    assert [rollout.response_token_ids for rollout in resumed] == [rollout.response_token_ids for rollout in again]
    for rollout, whole in zip(resumed, first, strict=True):
        assert rollout.response_token_ids[:10] == whole.response_token_ids[:10]
        # From here on it draws from the stream of (7, id, 10), the uninterrupted one from that of (7, id, 0).
        assert rollout.response_token_ids[10:] != whole.response_token_ids[10:]


async def test_a_stop_string_ends_a_rollout_exactly_wherever_it_was_interrupted(engine, learner, pusher, models):
    version = await push(pusher, learner, models["A"])
    (whole,) = (await engine.generate(prompts(1), sampling(engine, max_tokens=60))).rollouts
    text = letters(whole.response_token_ids)
    end = next(n for n in range(12, 60) if text.index(text[n - 3 : n]) == n - 3)
    stopping = sampling(engine, max_tokens=60, stop=(text[end - 3 : end],))

    started = [replace(begin(whole, position, version), id=str(position)) for position in range(end + 2)]
    returned = await asyncio.wait_for(engine.generate(started, stopping), timeout=300)
    for position, rollout in enumerate(returned.rollouts):
        assert rollout.response_token_ids == whole.response_token_ids[:end], f"interrupted after {position} tokens"
        assert rollout.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-4)
        assert len(rollout.versions) == len(rollout.loss_mask) == end
        assert rollout.finish_reason == "stop"
    assert (await engine.stats())["submitted"] == 0

    async with braked(engine, steps=0, seconds=0.5):
        returned = await asyncio.wait_for(engine.generate(started[end - 1 : end], stopping), timeout=300)
    assert returned.counts["tokens/surplus"] < 60 - end, "a request ran on behind its end, to its whole budget"


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_push_while_requests_end_at_stop_strings_loses_none_of_them(
    engine, learner, models, one_engine, pusher, mode, monkeypatch
):
    """Ends close to each other, some before, some during and some after the push. vLLM's versions are checked too."""
    monkeypatch.setattr(one_engine, "mode", mode)
    await push(pusher, learner, models["A"])
    started = [Rollout(id=f"p{n}", prompt_token_ids=(5 + n, 9, 3)) for n in range(24)]
    stopping = sampling(engine, max_tokens=100, temperature=1.0, seed=3, stop=tuple(letters([n]) for n in range(3)))
    async with braked(engine, steps=10) as go_on:
        task = asyncio.create_task(engine.generate(started, stopping))
        for name in ("B", "A", "B"):
            await sampled(engine, 60)
            await push(pusher, learner, models[name])
            await go_on()
    finished = (await asyncio.wait_for(task, timeout=300)).rollouts
    assert (await engine.stats())["submitted"] == 0
    assert {rollout.finish_reason for rollout in finished} <= {"stop", "length"}
    assert sum(rollout.finish_reason == "stop" for rollout in finished) > len(finished) / 2
    for rollout in finished:
        stops = [position for position, token_id in enumerate(rollout.response_token_ids) if token_id < 3]
        assert stops in ([], [len(rollout.response_token_ids) - 1])
        assert (rollout.finish_reason == "stop") == bool(stops)


async def test_a_rollout_without_progress_is_submitted_again_and_fails_after_so_many_tries(engine, pusher, monkeypatch):
    """vLLM's core is stopped, as by a driver that hangs, and goes on afterwards."""
    core = next(p for p in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(p.cmdline()))
    async with braked(engine, steps=10):
        task = asyncio.create_task(engine.generate(prompts(2), sampling(engine, max_tokens=440)))
        await begun(engine, 2)
        core.suspend()
        try:
            # Only now: before, a busy machine might keep a token back for as long.
            monkeypatch.setattr(engine, "settings", replace(engine.settings, rollout_timeout=1.0, rollout_tries=2))
            for request in engine._requests.values():
                wait_no_longer_than(request, 1.0)
            returned = await asyncio.wait_for(task, timeout=120)
        finally:
            core.resume()
    one, other = returned.rollouts
    assert one.finish_reason == other.finish_reason == "failed"
    assert returned.counts["rollouts/stalled"] == 4
    assert min(len(rollout.response_token_ids) for rollout in (one, other)) >= 1
    assert one.resumes == 1
    monkeypatch.undo()
    (after,) = (await engine.generate(prompts(1))).rollouts
    assert len(after.response_token_ids) == MAX_TOKENS


def wait_no_longer_than(request: Request, seconds: float) -> None:
    """From now on ``seconds`` for a token, whatever the settings said when the request was handed in."""
    request._limit = seconds
    request._restart_clock()


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 1.5}, {"presence_penalty": 2.0}], ids=["frequency", "presence"]
)
async def test_a_penalty_counts_the_tokens_before_a_freeze_as_well(engine, learner, pusher, models, penalty):
    await push(pusher, learner, models["A"])
    params = sampling(engine, max_tokens=300, **penalty)
    (whole,) = (await engine.generate(prompts(1), params)).rollouts
    (plain,) = (await engine.generate(prompts(1), sampling(engine, max_tokens=300))).rollouts
    assert whole.response_token_ids != plain.response_token_ids
    async with braked(engine, steps=70):
        task = asyncio.create_task(engine.generate(prompts(1), params))
        await sampled(engine, 60)
        await engine.pause("keep")
    (frozen,) = engine._requests.values()
    assert 60 <= len(frozen.token_ids) < 300
    await engine.resume(pusher.published)
    (rollout,) = (await asyncio.wait_for(task, timeout=300)).rollouts
    assert rollout.resumes == 0
    assert rollout.response_token_ids == whole.response_token_ids


async def test_a_frozen_request_does_not_stall_however_long_the_push_takes(engine, pusher):
    """Tokens that were on their way when the requests were frozen must not set their clocks going again."""
    async with braked(engine, steps=10):
        task = asyncio.create_task(engine.generate(prompts(MAX_RUNNING)))
        await begun(engine, MAX_RUNNING)
        frozen = list(engine._requests.values())
        for request in frozen:  # no longer than they are frozen: a busy machine might keep a token back for as long
            wait_no_longer_than(request, 1.0)
        await engine.pause("keep")
        await asyncio.sleep(2.0)
        for request in frozen:
            request._limit = engine.settings.rollout_timeout
        await engine.resume(pusher.published)
    returned = await asyncio.wait_for(task, timeout=300)
    assert returned.counts["rollouts/stalled"] == 0
    assert [(r.resumes, len(r.response_token_ids)) for r in returned.rollouts] == [(0, MAX_TOKENS)] * MAX_RUNNING


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
async def test_a_pause_that_is_given_up_half_way_leaves_an_engine_that_can_be_paused_and_resumed(engine, pusher, mode):
    for turns in (0, 2, 5):
        task = asyncio.create_task(engine.generate(prompts(MAX_RUNNING + 1)))
        await sampled(engine, 40)
        pause = asyncio.create_task(engine.pause(mode))
        for _ in range(turns):
            await asyncio.sleep(0)
        pause.cancel()
        await asyncio.wait([pause])
        assert pause.cancelled() or pause.exception() is None, "on a busy machine it may have been through"
        assert await engine.pause("abort") <= MAX_RUNNING + 1
        assert (await engine.stats())["submitted"] == 0
        await engine.resume(pusher.published)
        for rollout in (await asyncio.wait_for(task, timeout=300)).rollouts:
            assert (rollout.finish_reason, len(rollout.response_token_ids)) == ("length", MAX_TOKENS)


@pytest.mark.parametrize("seed", range(3))
async def test_pauses_and_resumes_in_any_interleaving_end_as_the_last_of_them_says(engine, pusher, seed):
    """Nobody waits for an answer before the next call, and some callers are gone before theirs comes."""
    dice = random.Random(seed)
    task = asyncio.create_task(engine.generate(prompts(MAX_RUNNING + 2)))
    await sampled(engine, 30)
    calls: list[asyncio.Task[object]] = []
    for _ in range(30):
        call = (
            engine.resume(pusher.published)
            if dice.random() < 0.5
            else engine.pause(dice.choice(("abort", "keep", "wait")))
        )
        calls.append(asyncio.create_task(call))
        await asyncio.sleep(dice.choice((0, 0, 0.001, 0.03)))
        if dice.random() < 0.3:
            dice.choice(calls).cancel()
    await asyncio.wait_for(engine.resume(pusher.published), timeout=120)
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert not isinstance(error, BaseException) or isinstance(error, asyncio.CancelledError | EngineError)
    for rollout in (await asyncio.wait_for(task, timeout=300)).rollouts:
        assert (rollout.finish_reason, len(rollout.response_token_ids)) == ("length", MAX_TOKENS)


async def test_no_version_is_served_in_the_middle_of_a_weight_update(engine, learner, pusher, models):
    """Nor after one that was given up: its sender may have sent a part of it."""
    await engine.pause()
    await engine.start_weight_update()
    with pytest.raises(EngineError, match="in the middle of a weight update"):
        await engine.resume(pusher.published)
    with pytest.raises(Exception, match="abandoned"):
        await engine.update_weights(UpdateRequest({"abandoned": "given up"}))
    with pytest.raises(EngineError, match="in the middle of a weight update"):
        await engine.resume(pusher.published)
    await push(pusher, learner, models["A"])
    (rollout,) = (await engine.generate(prompts(1))).rollouts
    assert len(rollout.response_token_ids) == MAX_TOKENS


async def test_a_drained_engine_hands_back_every_rollout_with_its_tokens(engine, pusher):
    """Last of all: the engine takes nothing any more."""
    async with braked(engine, steps=10):
        task = asyncio.create_task(engine.generate(prompts(MAX_RUNNING + 2)))
        await sampled(engine, 60)
        await engine.drain()
    returned = await asyncio.wait_for(task, timeout=120)
    assert returned.reason == "drained"
    assert sum(len(rollout.response_token_ids) for rollout in returned.rollouts) >= 60
    assert all(rollout.finish_reason is None for rollout in returned.rollouts)
    assert (await engine.generate(prompts(1))).reason == "drained"
    with pytest.raises(EngineError, match="drained"):
        await engine.resume(pusher.published)
