"""A run that ends at random moments and is started again: real loop, pool, pusher, checkpoints and run folder.

Engines and learner are simulated, time is virtual. The engines of each process sample other tokens than those of the
process before, so a rollout that was sampled again cannot be taken for one that went on.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from generator import virtual_time
from generator.pool import EnginePool
from generator.resume import Sampling
from generator.rollout import Prompt
from generator.roster import ABLE
from generator.simulated import SimulatedEngine
from generator.simulated_stream import SimulatedSettings
from generator.task import Episode
from tests.pools import pool_settings_for
from tests.trainer.loop_doubles import Rewards
from tests.trainer.scripted import CODEC, EOS
from trainer.admission import Admission
from trainer.checkpoint_folder import FILES_FILE, checkpoints
from trainer.checks import ConfigError
from trainer.config import BatchConfig, CheckpointConfig, Config, SamplingConfig, StalenessConfig
from trainer.data import PromptStream
from trainer.earlier_run import resume_step
from trainer.episodes import EpisodeSource, MultiTurn, SingleTurn
from trainer.groups import KeptGroups
from trainer.kept_rollouts import ROLLOUTS_FILE
from trainer.learner_error import LearnerError
from trainer.loop import Parts, train
from trainer.run import train_and_save
from trainer.state import continue_from, find_checkpoint, load_state
from trainer.step_metrics import StepResult
from trainer.watch import Watch
from weight_sync.push import Pusher
from weight_sync.simulated import SimulatedSender

STEPS, BATCH, SIZE, BOUND, ROWS = 10, 3, 3, 2, 100
SAMPLING = Sampling(max_tokens=60, max_model_len=400, stop_token_ids=frozenset({EOS}))
COLUMNS = ("response_token_ids", "logprobs", "versions")


@dataclass
class Learner:
    """A step takes half a minute, and is made a second before ``train`` returns. Checks the staleness bound."""

    made: int = 0
    trained: list[str] = field(default_factory=list)

    async def train(self, rollouts: Sequence[Any], version: int) -> StepResult:
        for rollout in rollouts:
            versions = [v for v, seen in zip(rollout.versions, rollout.loss_mask, strict=True) if seen]
            assert not versions or 0 <= version - max(versions) <= version - min(versions) <= BOUND
        await asyncio.sleep(29.0)
        self.made += 1
        await asyncio.sleep(1.0)
        return StepResult({"policy/loss": 0.0})

    async def interrupt(self) -> None:
        await asyncio.sleep(0.1)

    async def steps_done(self) -> int:
        return self.made

    async def save(self, folder: str) -> None:
        await asyncio.to_thread(Path(folder).mkdir, parents=True)
        await asyncio.sleep(3.0)

    async def export(self, folder: str) -> None:
        await asyncio.sleep(1.0)


class ThreeTurns:
    """Says the same after the same turns, whoever asks."""

    async def run(self, task: Any, sampler: Any) -> Episode:
        conversation, turns = sampler.token_ids, 0
        for turns in range(1, 4):
            turn = await sampler.generate(conversation, max_tokens=25, stop_token_ids={50})
            if not turn.token_ids:
                break
            await asyncio.sleep(2.0)
            conversation = sampler.token_ids + sampler.encode(f"#{turns}{turn.text[:2]}#")
        return Episode(float(len(sampler.token_ids) % 2), log={"turns": turns})


@dataclass
class Story:
    """A run folder and what its processes did."""

    folder: Path
    episodes: str
    engines_die: bool = False
    chance: random.Random = field(default_factory=random.Random)
    processes: int = 0
    kept: list[list[dict[str, Any]]] = field(default_factory=list)
    """The rollouts of each checkpoint that a process continued from."""

    @property
    def config(self) -> Config:
        config = Config(
            name="test",
            task="test",
            steps=STEPS,
            run_dir=str(self.folder),
            batch=BatchConfig(prompts=BATCH),
            sampling=SamplingConfig(group_size=SIZE),
            staleness=StalenessConfig(max_versions=BOUND),
            checkpoint=CheckpointConfig(every=1),
        )
        config.logger.wandb.mode = "disabled"
        config.logger.rollouts.every = 1
        return config

    def process(self, ends_after: float | None, gently: bool) -> str:
        """One process of the run; it is ended after so many seconds unless it ends by itself."""
        self.processes += 1
        return virtual_time.run(self._process(ends_after, gently))

    async def _process(self, ends_after: float | None, gently: bool) -> str:
        stream = PromptStream([Prompt(number, CODEC.encode(f"{number}?"), "", {}) for number in range(ROWS)], seed=0)
        checkpoint = find_checkpoint(self.config)
        state, kept = load_state(checkpoint, self.config, stream) if checkpoint else (None, KeptGroups())
        if checkpoint is not None:
            self.kept.append([json.loads(line) for line in (checkpoint / ROLLOUTS_FILE).read_text().splitlines()])
        watch = Watch(self.config, resume_step=resume_step(self.config, state), stream=io.StringIO())
        pool = EnginePool(self._engine, pool_settings_for(2, max_running=12, max_restarts=1000))
        parts = self._parts(stream, pool, watch)
        if state is not None:
            continue_from(state, kept, parts)
            parts.learner.made = state.step
        await pool.start()
        dying = asyncio.create_task(self._kill_engines(pool)) if self.engines_die else None
        running = asyncio.create_task(train_and_save(parts) if gently or ends_after is None else train(parts))
        await asyncio.wait({running}, timeout=ends_after)
        if ended := running.done():
            running.result()
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled() and not ended:
            running.result()
        if dying is not None:
            dying.cancel()
        await pool.shutdown()
        status = "done" if ended else "interrupted"
        watch.close(status)
        return status

    def _engine(self, number: int) -> SimulatedEngine:
        settings = SimulatedSettings(
            SAMPLING, seed=self.processes, vocabulary=90, max_running=12, token_seconds=1.0, start_seconds=5.0,
            latency=0.05, answer_timeout=5.0,
        )  # fmt: skip
        return SimulatedEngine(f"engine {number}", settings)

    async def _kill_engines(self, pool: EnginePool) -> None:
        while True:
            await asyncio.sleep(self.chance.uniform(0.0, 120.0))
            if well := [slot.link for slot in pool._roster.within(*ABLE)]:
                getattr(self.chance.choice(well), self.chance.choice(("die", "kill", "hang")))()

    def _episodes(self, pool: EnginePool, watch: Watch) -> EpisodeSource:
        if self.episodes == "an environment":
            return MultiTurn(ThreeTurns(), pool, SAMPLING, CODEC, watch.trace, timeout=60.0)
        return SingleTurn(pool, SlowRewards(), CODEC.decode, watch.trace)

    def _parts(self, stream: PromptStream, pool: EnginePool, watch: Watch) -> Parts:
        sender = SimulatedSender(seconds=2.0)

        async def connect() -> None:
            sender.connect([link.handle for link in await pool.take_members()])

        return Parts(
            config=self.config,
            prompts=stream,
            engines=pool,
            episodes=self._episodes(pool, watch),
            learner=Learner(),
            pusher=Pusher(sender, pool, timeout=60.0, connect=connect),
            admission=Admission(BATCH, BOUND, 100, "mask_tokens", STEPS * BATCH),
            watch=watch,
        )

    def trained(self) -> list[dict[str, Any]]:
        files = [self.folder / "rollouts" / f"step_{step}.jsonl" for step in range(1, STEPS + 1)]
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


class SlowRewards(Rewards):
    """Some rollouts are being scored at any moment."""

    async def score(self, *arguments: Any) -> Any:
        await asyncio.sleep(4.0)
        return await super().score(*arguments)


@pytest.mark.parametrize("episodes", ["one turn", "an environment"])
@pytest.mark.parametrize(
    ("gently", "engines_die"), [(True, False), (True, True), (False, False)], ids=["ctrl-c", "ctrl-c, kills", "sigkill"]
)
@pytest.mark.parametrize("seed", range(2))
def test_a_run_ended_at_random_moments_trains_every_group_once_and_goes_on_from_every_token(
    episodes, gently, engines_die, seed, tmp_path
):
    chance = random.Random(seed)
    story = Story(tmp_path, episodes, engines_die, chance)
    while story.processes < 8:
        if story.process(chance.uniform(5.0, 200.0), gently) == "done":
            break
    else:
        assert story.process(None, gently) == "done"
    assert story.processes > 2

    trained = story.trained()
    by_id = {row["rollout_id"]: row for row in trained}
    assert len(by_id) == len(trained) == STEPS * BATCH * SIZE
    order = PromptStream([Prompt(n, CODEC.encode(f"{n}?"), "", {}) for n in range(ROWS)], seed=0)
    assert sorted({row["prompt_id"] for row in trained}) == sorted(order.next().id for _ in range(STEPS * BATCH))

    last = story.kept[-1] if not gently else [row for rows in story.kept for row in rows]
    for row in last:
        count = len(row["response_token_ids"])
        for column in COLUMNS:
            assert by_id[row["rollout_id"]][column][:count] == row[column]
    rows = [row for rows in story.kept for row in rows]
    assert any("reward" in row for row in rows) or not gently
    assert any(row["response_token_ids"] and "reward" not in row for row in rows)

    summary = json.loads((tmp_path / "summary.json").read_text())
    sampled = sum(len(r["response_token_ids"]) - sum(e - s for s, e in r["observations"]) for r in trained)
    ends = {end: summary[f"tokens/{end}"] for end in ("trained", "expired", "lost")}
    assert summary["tokens/generated"] == sampled == sum(ends.values())
    assert ends["lost"] == 0
    assert summary["rollouts/finished"] == len(trained)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


def test_rollouts_that_went_on_after_a_restart_are_resumed_ones(tmp_path):
    story = Story(tmp_path, "one turn")
    story.process(40.0, gently=True)
    assert story.process(None, gently=True) == "done"
    (kept,) = story.kept
    unfinished = [row for row in kept if "reward" not in row and row["finish_reason"] is None]
    assert any(row["response_token_ids"] for row in unfinished)
    assert any(row["finish_reason"] for row in kept if "reward" not in row), "a finished member of an unfinished group"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rollouts/resumed"] >= sum(bool(row["response_token_ids"]) for row in unfinished)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "JSONDecodeError"),
        (lambda text: text.replace('"logprobs": [-', '"logprobs": [', 1), "RolloutError"),
        (lambda text: text.replace('"prompt_id": ', '"prompt_id": 1000', 1), "KeyError"),
        (lambda text: None, "FileNotFoundError"),
    ],
    ids=["torn", "an invariant broken", "a prompt that is not there", "no file"],
)
def test_damaged_rollouts_of_a_checkpoint_are_a_configuration_error_that_names_the_file(damage, words, tmp_path):
    story = Story(tmp_path, "one turn")
    story.process(50.0, gently=True)
    path = checkpoints(tmp_path)[-1] / ROLLOUTS_FILE
    text = damage(path.read_text())
    path.unlink() if text is None else path.write_text(text)
    (path.parent / FILES_FILE).unlink()  # else its size alone gives it away
    with pytest.raises(ConfigError, match=f"{ROLLOUTS_FILE}.*{words}"):
        story.process(None, gently=True)


def test_a_checkpoint_from_before_rollouts_were_kept_continues_with_their_prompts(tmp_path):
    story = Story(tmp_path, "one turn")
    story.process(80.0, gently=True)
    folder = checkpoints(tmp_path)[-1]
    state = json.loads((folder / "state.json").read_text())
    del state["next_group"]
    state["prompts"]["returned"] = [*state["prompts"].pop("handed_out"), *state["prompts"]["returned"]]
    (folder / "state.json").write_text(json.dumps(state))
    config, stream = story.config, PromptStream([Prompt(n, CODEC.encode(f"{n}?"), "", {}) for n in range(ROWS)], seed=0)
    loaded, kept = load_state(folder, config, stream)
    assert (kept.scored, kept.started) == ((), ())
    assert kept.first_number > ROWS * SIZE
    assert stream.next().id == state["prompts"]["returned"][0]
    assert loaded.step == state["step"]


def test_a_checkpoint_that_cannot_be_written_costs_the_run_nothing_but_itself(tmp_path, monkeypatch, caplog):
    """The disk is full at the second checkpoint: the first one stays, and the third is made."""
    asked: list[int] = []

    def check_room(run_dir: str) -> None:
        asked.append(len(checkpoints(run_dir)))
        if len(asked) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.state.check_room", check_room)
    story = Story(tmp_path, "one turn")
    assert story.process(None, gently=False) == "done"
    assert "could not be written" in caplog.text
    assert asked[:3] == [0, 1, 1]
    assert json.loads((tmp_path / "summary.json").read_text())["checkpoints/failed"] == 1


def test_a_checkpoint_that_fails_half_way_does_not_keep_the_disk_full(tmp_path, monkeypatch):
    """Else the next line of ``metrics.jsonl`` would end the run. What a kill left goes with the next checkpoint."""
    saves: list[str] = []
    left: list[list[str]] = []

    def look(*_: object) -> None:
        left.append([path.name for path in (tmp_path / "checkpoints").glob(".*")])

    async def save(learner: Learner, folder: str) -> None:
        look()
        saves.append(folder)
        await asyncio.to_thread(Path(folder).mkdir, parents=True)
        if len(saves) == 1:
            (tmp_path / "checkpoints" / ".step_77.writing").mkdir()
        if len(saves) == 2:
            raise LearnerError("learner save failed on rank 0: OSError: No space left on device")

    monkeypatch.setattr(Learner, "save", save)
    monkeypatch.setattr("trainer.state.logger.warning", look)
    assert Story(tmp_path, "one turn").process(None, gently=False) == "done"
    assert len(saves) > 2
    assert not any(left)


def test_a_run_that_has_no_room_for_its_last_checkpoint_leaves_the_export(tmp_path, monkeypatch):
    exported: list[str] = []

    def check_room(run_dir: str) -> None:
        if len(metrics := (tmp_path / "metrics.jsonl").read_text().splitlines()) == STEPS:
            raise OSError(errno.ENOSPC, f"No space left on device after {len(metrics)} steps")

    async def export(learner: Learner, folder: str) -> None:
        exported.append(folder)

    monkeypatch.setattr("trainer.state.check_room", check_room)
    monkeypatch.setattr(Learner, "export", export)
    with pytest.raises(OSError, match="No space left"):
        Story(tmp_path, "one turn").process(None, gently=True)
    assert exported == [str(tmp_path / "export")]


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path):
    """At the first second at which a step is written and its checkpoint is not."""
    for second in range(40, 120):
        folder = tmp_path / str(second)
        Story(folder, "one turn").process(float(second), gently=False)
        if (folder / "metrics.jsonl").read_text():
            break
    assert not checkpoints(folder)
    assert Story(folder, "one turn").process(None, gently=False) == "done"
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
