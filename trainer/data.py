"""Prompts: rows of a task, rendered and tokenized, in a seeded order that a checkpoint can continue."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from generator.rollout import Prompt
from generator.task import DataError, Messages, ModelError

RESERVED_COLUMNS = ("prompts", "completions")
"""Names under which reward functions get the texts; a data set column cannot have them."""


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def __call__(self, text: list[str], **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def build_prompts(
    rows: Sequence[Mapping[str, Any]],
    render: Callable[[Mapping[str, Any]], str | Messages],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
) -> list[Prompt]:
    """Render and tokenize every row; ``id`` is the row's index.

    A chat is rendered with the model's chat template, which brings its own special tokens; plain text gets the
    tokenizer's. Raises :class:`DataError` for an empty data set, for the first row whose prompt has more than
    ``max_tokens`` tokens, for an empty prompt, and for a column that would hide the texts from reward functions.
    """
    if len(rows) == 0:
        raise DataError("the data set has no rows")
    texts: list[str] = []
    chats: list[bool] = []
    for row in rows:
        prompt = render(row)
        chats.append(not isinstance(prompt, str))
        if isinstance(prompt, str):
            texts.append(prompt)
        else:
            texts.append(_chat_text(tokenizer, prompt))
    for index, text in enumerate(texts):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"row {index + 1}: the prompt holds half a surrogate pair: {text!r:.80}")
    token_ids: list[list[int]] = [[] for _ in rows]
    for kind in {*chats}:
        chosen = [index for index, chat in enumerate(chats) if chat is kind]
        encoded = tokenizer([texts[index] for index in chosen], add_special_tokens=not kind)["input_ids"]
        for index, ids in zip(chosen, encoded, strict=True):
            token_ids[index] = ids
    prompts = []
    for index, (row, text, ids) in enumerate(zip(rows, texts, token_ids, strict=True)):
        _check(index, row, text, ids, max_tokens)
        prompts.append(Prompt(index, tuple(ids), text, dict(row)))
    return prompts


def _chat_text(tokenizer: Tokenizer, chat: Messages) -> str:
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of the model's own and may raise anything
        raise ModelError(
            f"the model's chat template cannot render the recipe's prompt ({type(error).__name__}: {error}); take an "
            "instruction-tuned model, or a recipe with plain prompts"
        ) from error


def _check(index: int, row: Mapping[str, Any], text: str, ids: list[int], max_tokens: int) -> None:
    if not ids:
        raise DataError(f"row {index + 1} of the data set renders to an empty prompt")
    if len(ids) > max_tokens:
        raise DataError(
            f"the prompt of row {index + 1} has {len(ids)} tokens; with the response budget (sampling.max_tokens) the "
            f"context has room for {max_tokens}. Shorten or remove the row, lower sampling.max_tokens, or raise "
            f"engine.max_model_len. It begins: {text[:80]!r}"
        )
    for name in RESERVED_COLUMNS:
        if name in row:
            raise DataError(f"the data set has a column {name!r}, a name that reward functions get the texts under")


class PromptStream:
    """An endless stream of prompts: each epoch is a seeded permutation, and the position can be saved and restored."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        self._prompts = list(prompts)
        self._by_id = {prompt.id: prompt for prompt in self._prompts}
        self._seed = seed
        self._shuffle = shuffle
        self._returned: deque[int] = deque()
        self._handed_out: Counter[int] = Counter()
        """How often each id is handed out: a prompt can be in flight twice, from two epochs."""
        self._fingerprint = self._hash_prompts()
        self._start_epoch(0)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.token_ids) for prompt in self._prompts)

    def by_id(self, prompt_id: int) -> Prompt:
        """A prompt of the stream. Raises ``KeyError`` for an id that it does not have."""
        return self._by_id[prompt_id]

    def next(self) -> Prompt:
        """The next prompt: one that was given back, if there is one, else the next of the epoch."""
        prompt = self._take()
        self._handed_out[prompt.id] += 1
        return prompt

    def _take(self) -> Prompt:
        if self._returned:
            return self._by_id[self._returned.popleft()]
        if self._cursor == len(self._order):
            self._start_epoch(self._epoch + 1)
        self._cursor += 1
        return self._prompts[self._order[self._cursor - 1]]

    def done(self, prompt: Prompt) -> None:
        """A prompt that was handed out needs no rollouts any more: it was learned from, or cannot be."""
        if self._handed_out[prompt.id] < 1:
            raise ValueError(f"prompt {prompt.id} is not handed out")
        self._handed_out[prompt.id] -= 1
        if not self._handed_out[prompt.id]:
            del self._handed_out[prompt.id]

    def give_back(self, prompt: Prompt) -> None:
        """Hand a prompt back whose group was lost, so that it is not missing from its epoch. It comes first again."""
        if prompt.id not in self._by_id:
            raise KeyError(f"prompt {prompt.id} is not of this stream")
        self.done(prompt)
        self._returned.append(prompt.id)

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values for a checkpoint."""
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "handed_out": list(self._handed_out.elements()),
            "returned": list(self._returned),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any], kept: Iterable[int] = ()) -> None:
        """Continue at a saved position.

        ``kept`` are the ids of prompts whose groups go on: these stay handed out. Others that were handed out and not
        done come first again. Raises :class:`DataError` when the position belongs to other prompts or another order,
        and ``KeyError``, ``TypeError`` or ``ValueError`` when it is none.
        """
        for name, mine in (("seed", self._seed), ("shuffle", self._shuffle), ("fingerprint", self._fingerprint)):
            if state[name] != mine:
                what = "the prompts are not the same" if name == "fingerprint" else f"{name} was {state[name]}"
                raise DataError(
                    f"the checkpoint's position in the data does not fit this run: {what}. Resume with the data set, "
                    "prompt format and seed of the checkpoint, or start afresh in another run_dir"
                )
        epoch, cursor, returned = int(state["epoch"]), int(state["cursor"]), [int(i) for i in state["returned"]]
        # Checkpoints from before rollouts were kept have these in "returned".
        again = [int(i) for i in state.get("handed_out", ())]
        count = len(self._prompts)
        if epoch < 0 or not 0 <= cursor <= count or any(not 0 <= index < count for index in [*returned, *again]):
            raise ValueError(f"a position that does not exist among {count} prompts")
        self._start_epoch(epoch)
        self._cursor = cursor
        kept = list(kept)
        self._handed_out = Counter(kept)
        for prompt_id in kept:
            if prompt_id not in again:
                raise DataError(f"the checkpoint keeps rollouts of the prompt {prompt_id}, which it had not handed out")
            again.remove(prompt_id)
        self._returned = deque([*again, *returned])

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._cursor = 0
        count = len(self._prompts)
        order = np.random.default_rng([self._seed, epoch]).permutation(count) if self._shuffle else np.arange(count)
        self._order: list[int] = order.tolist()

    def _hash_prompts(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(repr((prompt.id, prompt.token_ids)).encode())
        return digest.hexdigest()
