"""The public task interface: what a recipe implements.

A recipe package offers one factory, named in the configuration by dotted path (``task: recipes.gsm8k.GSM8K``). Nothing
else of the framework is imported by recipes. A task scores what the model wrote with reward functions, or has an
:class:`Environment` that talks with the model over several turns and scores the episode itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

Messages = list[dict[str, str]]
"""A chat: a list of ``{"role": ..., "content": ...}``, rendered with the model's chat template."""


class DataError(ValueError):
    """The data set cannot be used. The message names the file and line, or the missing column. Exit code 2."""


class ModelError(ValueError):
    """The configured model cannot be loaded. The message names the path and the reason. Exit code 2."""


class TurnError(ValueError):
    """An environment asked the sampler for a turn that cannot be. The message says what to do instead."""


class RewardFunction(Protocol):
    """A reward function with the signature that the TRL ecosystem uses, plain or ``async``.

    ``prompts`` and ``completions`` are texts, one a rollout; every data set column arrives by name as a list of equal
    length. Returns one float a rollout, or ``None`` for a rollout it declines to score.
    """

    def __call__(
        self, prompts: list[str], completions: list[str], **columns: Any
    ) -> list[float | None] | Awaitable[list[float | None]]: ...


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What a recipe is told when its data is loaded."""

    data_path: str | None
    """``data.path`` of the configuration: a local file, or ``None``."""
    options: Mapping[str, Any]
    """``data.options`` of the configuration: keys that only this recipe knows."""
    hub_reachable: Callable[[], bool]
    """Whether data sets can be fetched from, or are cached from, the model hub. Called at most once, lazily."""
    seed: int
    eval_path: str | None = None
    """``data.eval_path`` of the configuration: a local file of held-out rows, or ``None``."""


@dataclass(frozen=True, slots=True)
class TaskData:
    """The rows of a task and where they came from.

    ``rows`` is indexable and has a length; a row is a mapping of columns. ``source`` says in one phrase what was taken
    and ``reason`` why; both are shown in the first lines of a run. ``eval_rows`` are held out: evaluations sample
    them, training never does.
    """

    rows: Sequence[Mapping[str, Any]]
    source: str
    reason: str
    eval_rows: Sequence[Mapping[str, Any]] = field(default=())


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model sampled in one turn."""

    token_ids: tuple[int, ...]
    """The sampled ids, the stop token included; empty when there was no room left for any."""
    text: str
    """The same decoded, special tokens left out."""
    finish_reason: Literal["stop", "length"]
    """``stop``: the model ended the turn with a stop token; ``length``: the budget of the turn, of the rollout, or the
    context ran out."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What an environment returns when it is done."""

    reward: float | None
    """``None``: the rollout cannot be scored; it is excluded and counted, never 0."""
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """What the reward is made of, by name; logged as ``reward/<name>``."""
    log: Mapping[str, Any] = field(default_factory=dict)
    """Anything else worth keeping; written beside the rollout in ``rollouts/``."""


Result = TypeVar("Result")


class Sampler(Protocol):
    """One rollout, as its environment sees it: the conversation so far, and the model that continues it.

    Token ids in, token ids out: what the model sampled is never tokenized again, because other ids under the same text
    would make its log-probabilities wrong without anybody noticing.
    """

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole conversation so far: prompt, sampled tokens and observations."""
        ...

    @property
    def tokens_left(self) -> int:
        """How many tokens may still be sampled, all turns together."""
        ...

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop_token_ids: Iterable[int] = ()
    ) -> Turn:
        """Let the model continue the conversation ``token_ids`` until it ends its turn.

        ``token_ids`` is :attr:`token_ids`, followed by what the model is to read next: the observation, which the loss
        does not see. ``max_tokens`` bounds this turn, ``stop_token_ids`` end it besides those of the model. The weights
        may change in the middle of a turn, and the engine may be replaced: neither can be seen from here.

        Without room for another token the turn is empty, with the reason ``length``, and the observation is left out.
        Raises :class:`TurnError` for token ids that do not start with the conversation so far, for a second turn at the
        same time, and for another turn after an empty one.
        """
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The token ids of an observation. The names of special tokens in ``text`` become those tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        ...

    def ids_containing(self, text: str) -> frozenset[int]:
        """Every id of the vocabulary whose text contains ``text``: stop ids that end a turn right behind it."""
        ...

    async def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run blocking code in a thread, so that the other rollouts of the run go on meanwhile."""
        ...


class Environment(Protocol):
    """What the model acts in: it reads each turn, answers with observations, and scores the episode.

    One object serves all rollouts, many at a time, so what belongs to an episode lives in local variables of ``run``.
    """

    async def run(self, task: Mapping[str, Any], sampler: Sampler) -> Episode:
        """Play one episode on the data set row ``task``.

        Runs on the event loop of the trainer, one task a rollout. Code that blocks (files, subprocesses, long
        computations) would hold up all rollouts: hand it to :meth:`Sampler.call`. Outside ``generate`` the episode may
        take ``rewarding.timeout`` seconds at a time. An episode that raises or takes longer is excluded from training
        and counted, as a reward function that fails is.

        After a restart of the run an episode begins anew, with the turns that its checkpoint kept: one that does the
        same when it is told the same goes on where it was.
        """
        ...


class Task(Protocol):
    """A task: where its data comes from and how a row becomes a prompt.

    A task with an environment also has ``environment() -> Environment``; its ``rewards()`` are then not asked for.
    """

    def load(self, context: TaskContext) -> TaskData:
        """Load the data. Raises :class:`DataError` with the file and line of what is wrong."""
        ...

    def prompt(self, row: Mapping[str, Any]) -> str | Messages:
        """Turn a row into plain text, or into a chat that the model's chat template renders."""
        ...

    def rewards(self) -> list[tuple[str, str, float]]:
        """The default reward functions, as (name, dotted path, weight); ``reward`` of a run replaces them."""
        ...
