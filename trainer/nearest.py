"""The words that were probably meant, for errors about keys and values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

CUTOFF = 0.6
"""The least similarity of two words, from 0 to 1, of which one may have been meant by the other."""
SLIP = 0.85
"""Two words as similar as this differ in a letter or two."""
AS_CLOSE = 0.03
"""Candidates no less similar than the best by more than this are as likely as it."""
MOST = 4
"""So many are named at most."""


def nearest(word: str, candidates: Iterable[str]) -> str:
    """``"; did you mean `x` or `y`?"`` for the candidates closest to ``word``, or an empty string if none is close."""
    close = [f"`{option}`" for option in likeliest(word, list(candidates))]
    if not close:
        return ""
    *first, last = close
    return f"; did you mean {', '.join(first) + ' or ' if first else ''}{last}?"


def likeliest(word: str, options: Sequence[str]) -> list[str]:
    """The options that were most probably meant by ``word``, the likeliest first."""
    letters = sorted(word)
    return (
        _by_similarity(word, [option for option in options if abbreviates(word, option)])
        # Two letters that changed places are likelier than another word that is as close.
        or [option for option in options if sorted(option) == letters][:1]
        or _of_the_same_tail(word, options)
        or _close(word, options)
        or _by_similarity(word, _of_a_close_tail(_tail(word), options))
    )


def _of_the_same_tail(word: str, options: Sequence[str]) -> list[str]:
    """The options in other sections, and what is a slip away: `learner.rank` is `learner.ranks` or another's `rank`."""
    same = [option for option in options if _tail(option) == _tail(word)]
    slips = [option for option in _close(word, options) if _similarity(word, option) >= SLIP]
    return _by_similarity(word, {*same, *slips}) if same else []


def _of_a_close_tail(tail: str, options: Sequence[str]) -> list[str]:
    """A mistyped last part matters more than the path to it: `tmeout` means any of several keys."""
    close = _close(tail, [_tail(option) for option in options])[:1]
    return [option for option in options if _tail(option) in close]


def _close(word: str, options: Sequence[str]) -> list[str]:
    """Of the options that are similar to ``word``, the best and those that are as good."""
    found = difflib.get_close_matches(word, dict.fromkeys(options), n=MOST, cutoff=CUTOFF)
    return [option for option in found if _similarity(word, option) >= _similarity(word, found[0]) - AS_CLOSE]


def _by_similarity(word: str, options: Iterable[str]) -> list[str]:
    return sorted(options, key=lambda option: (-_similarity(word, option), option))[:MOST]


def _similarity(word: str, option: str) -> float:
    # The order of the arguments is that of `get_close_matches`: the measure is not symmetric.
    return difflib.SequenceMatcher(None, option, word).ratio()


def _tail(key: str) -> str:
    return key.rpartition(".")[2]


def abbreviates(word: str, option: str) -> bool:
    """Whether the last part of ``word`` is the initials of that of ``option``: `optimizer.lr` or `lr`."""
    path, _, tail = word.rpartition(".")
    option_path, _, option_tail = option.rpartition(".")
    return (
        "_" in option_tail
        and tail == "".join(part[:1] for part in option_tail.split("_"))
        and (path in ("", option_path))
    )
