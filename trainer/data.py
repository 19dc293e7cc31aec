"""Prompts: rows of a task, rendered and tokenized, in a seeded order that a checkpoint can continue."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from generator.rollout import Prompt
from generator.task import DataError, Messages, ModelError
from trainer.order import PromptOrder
from trainer.task_calls import prompt_of

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
    source: str = "",
    first_id: int = 0,
) -> list[Prompt]:
    """Render and tokenize every row of the data set ``source``; ids count on from ``first_id``.

    A chat is rendered with the model's chat template, which brings its own special tokens; plain text gets the
    tokenizer's. Raises :class:`DataError` for an empty data set, for the first row whose prompt has more than
    ``max_tokens`` tokens, for an empty prompt, for what is no prompt, and for a column that would hide the texts from
    reward functions.
    """
    if len(rows) == 0:
        raise DataError("the data set has no rows")
    texts: list[str] = []
    chats: list[bool] = []
    for number, row in enumerate(rows, start=1):
        prompt = prompt_of(render, row, number)
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
        some = [texts[index] for index in chosen]
        # Not verbose: a prompt that is too long is an error of ours, and there is one message of it.
        encoded = tokenizer(some, add_special_tokens=not kind, verbose=False)["input_ids"]
        for index, ids in zip(chosen, encoded, strict=True):
            token_ids[index] = ids
    prompts = []
    for index, (row, text, ids) in enumerate(zip(rows, texts, token_ids, strict=True)):
        _check(index, row, text, ids, max_tokens)
        prompts.append(Prompt(first_id + index, tuple(ids), text, dict(row), source))
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
    """An endless stream of prompts: each epoch is a seeded permutation, and the position can be saved and restored.

    ``shares`` are those of several data sets, by the ``source`` of their prompts, which stand together in this order.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool = True,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self._prompts = list(prompts)
        self._shares = list((shares or {}).items())
        sizes = Counter(prompt.source for prompt in self._prompts)
        counts = [sizes[name] for name, _ in self._shares] or [len(self._prompts)]
        self._order = PromptOrder(counts, [share for _, share in self._shares] or [1.0], seed=seed, shuffle=shuffle)
        self._by_id = {prompt.id: prompt for prompt in self._prompts}
        self._seed = seed
        self._shuffle = shuffle
        self._returned: deque[int] = deque()
        self._handed_out: Counter[int] = Counter()
        """How often each id is handed out: a prompt can be in flight twice, from two epochs."""
        self._fingerprint = self._hash_prompts()

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
        return self._prompts[self._order.next()]

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
            **self._saved_position(),
            "handed_out": list(self._handed_out.elements()),
            "returned": list(self._returned),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def _saved_position(self) -> dict[str, Any]:
        """Of one data set plain numbers, of several a list by data set."""
        epochs, cursors = map(list, zip(*self._order.position, strict=True))
        if not self._shares:
            return {"epoch": epochs[0], "cursor": cursors[0]}
        return {"epoch": epochs, "cursor": cursors, "shares": self._saved_shares()}

    def _saved_shares(self) -> list[list[Any]]:
        """In their order, which is that of the prompts; as JSON gives it back."""
        return [[name, share] for name, share in self._shares]

    def load_state_dict(self, state: Mapping[str, Any], kept: Iterable[int] = ()) -> None:
        """Continue at a saved position.

        ``kept`` are the ids of prompts whose groups go on: these stay handed out. Others that were handed out and not
        done come first again. Raises :class:`DataError` when the position belongs to other prompts or another order,
        and ``KeyError``, ``TypeError`` or ``ValueError`` when it is none.
        """
        mine = {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "shares": self._saved_shares(),
            "fingerprint": self._fingerprint,
        }
        for name, value in mine.items():
            then = state.get(name, []) if name == "shares" else state[name]
            if then != value:
                what = f"{name} was {then}"
                if name == "shares":
                    what = f"the shares of data.mixture were {dict(then)}" if then else "it is of a single data set"
                elif name == "fingerprint":
                    what = "the prompts are not the same"
                raise DataError(
                    f"the checkpoint's position in the data does not fit this run: {what}. Resume with the data set, "
                    "prompt format and seed of the checkpoint, or start afresh in another run_dir"
                )
        returned = [int(i) for i in state["returned"]]
        # Checkpoints from before rollouts were kept have these in "returned".
        again = [int(i) for i in state.get("handed_out", ())]
        count = len(self._prompts)
        if any(not 0 <= index < count for index in [*returned, *again]):
            raise ValueError(f"a position that does not exist among {count} prompts")
        epochs, cursors = (value if self._shares else [value] for value in (state["epoch"], state["cursor"]))
        self._order.go_to([(int(epoch), int(cursor)) for epoch, cursor in zip(epochs, cursors, strict=True)])
        kept = list(kept)
        self._handed_out = Counter(kept)
        for prompt_id in kept:
            if prompt_id not in again:
                raise DataError(f"the checkpoint keeps rollouts of the prompt {prompt_id}, which it had not handed out")
            again.remove(prompt_id)
        self._returned = deque([*again, *returned])

    def _hash_prompts(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(repr((prompt.id, prompt.token_ids)).encode())
        return digest.hexdigest()
