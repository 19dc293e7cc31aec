"""The word that was probably meant, for errors about keys and values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, candidates: Iterable[str]) -> str:
    """``"; did you mean `x`?"`` for the candidate closest to ``word``, or an empty string if none is close."""
    options = list(candidates)
    # A mistyped last part matters more than the path to it: `batch.promts` and `prompts` both mean `batch.prompts`.
    close = [option for option in options if _abbreviates(word, option)][:1]
    # Two letters that changed places are likelier than another word that is as close.
    close = close or [option for option in options if sorted(option) == sorted(word)][:1]
    close = close or difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if not close:
        tails = {option.rsplit(".", 1)[-1]: option for option in options}
        close = [tails[t] for t in difflib.get_close_matches(word.rsplit(".", 1)[-1], tails, n=1, cutoff=0.6)]
    return f"; did you mean `{close[0]}`?" if close else ""


def _abbreviates(word: str, option: str) -> bool:
    """Whether the last part of ``word`` is the initials of that of ``option``: `optimizer.lr` or `lr`."""
    path, _, tail = word.rpartition(".")
    option_path, _, option_tail = option.rpartition(".")
    return (
        "_" in option_tail
        and tail == "".join(part[:1] for part in option_tail.split("_"))
        and (path in ("", option_path))
    )
