"""Stop strings, matched over the text of a whole response, whatever segments it came in.

vLLM gets token ids and returns token ids; it has no tokenizer. It could not find a stop string that straddles two
segments anyway: each resubmission is a new request to it (R7). So the match is made here, token by token.

A response is cut behind the *token* that completes a stop string: ids, log-probabilities and versions end with it, and
the text is what those ids decode to. The text therefore includes the stop string, and whatever follows it inside that
token. Nothing is ever tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Decode = Callable[[Sequence[int]], str]
"""Token ids to text. Special tokens are skipped, and an unfinished character at the end shows as U+FFFD."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character (yet)."""
MAX_UNCLEAN = 64
"""Tokens after which text that still ends in U+FFFD is taken for finished: no character has so many bytes."""


def load_decode(folder: str, stop: Sequence[str]) -> Decode:
    """The decoder of the model in ``folder``.

    Raises ``ValueError`` when it has no ``tokenizer.json``, or when a stop string could never appear in decoded text
    because it holds a special token.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"sampling.stop needs {path}, which does not exist; use sampling.stop_token_ids")
    tokenizer = Tokenizer.from_file(str(path))
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        for string in stop:
            if token.special and token.content in string:
                raise ValueError(
                    f"sampling.stop={string!r} holds the special token {token.content!r}, which decoded text never "
                    f"shows; use sampling.stop_token_ids=[{token_id}]"
                )

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode


class StopMatcher:
    """Finds the first token of one response that completes a stop string.

    That is token ``n``, counted from 1, for the smallest ``n > min_tokens`` where ``decode(first n tokens)`` holds a
    stop string that ``decode(first n - 1 tokens)`` did not hold at that place. A stop string that is complete within
    the first ``min_tokens`` tokens does not count (vLLM's rule).

    Each token costs one decoding of the last few tokens: a window that reaches back at least as far as the longest
    stop string, and begins where a character begins.
    """

    def __init__(self, decode: Decode, stop: Sequence[str], min_tokens: int = 0) -> None:
        if not stop or not all(stop) or any(REPLACEMENT in string for string in stop):
            raise ValueError(f"stop strings must hold at least one character, and no U+FFFD; these are {list(stop)}")
        self.stopped = False
        """Whether the last token that was fed completes a stop string."""
        self._decode = decode
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        # A match reaches back by all of its characters but the last; one more, because some decoders strip a space in
        # front of their first token.
        self._reach = max(map(len, stop))
        self._count = 0
        self._window: list[int] = []
        self._text = ""
        self._searched = 0
        """Characters of ``_text`` in which no stop string ends any more."""
        self._unclean = 0
        """Tokens since the text last ended with a whole character."""
        self._mark = 0
        """Where in ``_window`` the next window begins: a place at which the text was whole."""
        self._mark_text = 0

    def feed(self, token_ids: Sequence[int]) -> int | None:
        """Continue with the next tokens of the response.

        Returns how many of them belong to it, the last one completing a stop string; ``None`` when none does.
        Raises ``ValueError`` after a match: the response has ended.
        """
        if self.stopped:
            raise ValueError("tokens were fed to a stop matcher that has found the end of its response")
        for index, token_id in enumerate(token_ids):
            if self._completes(token_id):
                self.stopped = True
                return index + 1
        return None

    def _completes(self, token_id: int) -> bool:
        self._count += 1
        text = self._decode([*self._window, token_id])
        if self._window and text == self._text and not self._unclean:
            return False  # a special token: it adds nothing, and must not push the text out of the window
        self._window.append(token_id)
        self._text = text
        found = self._count > self._min_tokens and any(
            string in text[max(0, self._searched - len(string) + 1) :] for string in self._stop
        )
        self._searched = max(self._searched, len(text.rstrip(REPLACEMENT)))
        self._unclean = self._unclean + 1 if text.endswith(REPLACEMENT) and self._unclean < MAX_UNCLEAN else 0
        if not self._unclean and len(text) - self._mark_text >= self._reach:
            self._move_window()
        return found

    def _move_window(self) -> None:
        """Forget what lies before the mark, and mark where the text ends now."""
        if self._mark:
            del self._window[: self._mark]
            self._text = self._decode(self._window)
            self._searched = len(self._text.rstrip(REPLACEMENT))
        self._mark, self._mark_text = len(self._window), len(self._text)
