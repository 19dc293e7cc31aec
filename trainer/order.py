"""In which order prompts are handed out: a seeded shuffle each epoch, and several data sets by their shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PromptOrder:
    """An endless order of the prompts of one or several data sets, as positions in one list of them all.

    ``counts`` are the prompts of each data set, which stand one set behind the other, and ``shares`` how much of the
    order is to come from each; they sum to 1. The next prompt is of the set that is furthest behind its share, so no
    set is ever a whole prompt ahead of it: every batch has the mixture, not only the run. Which prompt of a set comes
    next is decided by the set's own shuffle: one that runs out sooner begins a new epoch, with a new one.
    """

    def __init__(self, counts: Sequence[int], shares: Sequence[float], *, seed: int, shuffle: bool) -> None:
        self._counts = list(counts)
        self._shares = list(shares)
        self._seed = seed
        self._shuffle = shuffle
        self._starts = [sum(counts[:number]) for number in range(len(counts))]
        self._epochs = [0] * len(counts)
        self._cursors = [0] * len(counts)
        self._shuffled = [self._epoch(number) for number in range(len(counts))]

    @property
    def position(self) -> list[tuple[int, int]]:
        """Of each data set, its epoch and how many prompts of that were handed out."""
        return list(zip(self._epochs, self._cursors, strict=True))

    def next(self) -> int:
        """The position of the next prompt."""
        number = self._furthest_behind()
        if self._cursors[number] == self._counts[number]:
            self._epochs[number] += 1
            self._cursors[number] = 0
            self._shuffled[number] = self._epoch(number)
        self._cursors[number] += 1
        return self._starts[number] + self._shuffled[number][self._cursors[number] - 1]

    def go_to(self, position: Sequence[tuple[int, int]]) -> None:
        """Continue at an earlier :attr:`position`. Raises ``ValueError`` for one that does not exist."""
        for (epoch, cursor), count in zip(position, self._counts, strict=True):
            if epoch < 0 or not 0 <= cursor <= count:
                raise ValueError(f"a position that does not exist: prompt {cursor} of {count} in epoch {epoch}")
        self._epochs = [epoch for epoch, _ in position]
        self._cursors = [cursor for _, cursor in position]
        self._shuffled = [self._epoch(number) for number in range(len(self._counts))]

    def _furthest_behind(self) -> int:
        """The data set that lacks most of its share of the prompts handed out, the next one included; the first of
        equals."""
        handed_out = [
            epoch * count + cursor
            for epoch, cursor, count in zip(self._epochs, self._cursors, self._counts, strict=True)
        ]
        then = sum(handed_out) + 1
        lacking = [share * then - done for share, done in zip(self._shares, handed_out, strict=True)]
        return lacking.index(max(lacking))

    def _epoch(self, number: int) -> list[int]:
        """The order of a data set in its current epoch."""
        count = self._counts[number]
        if not self._shuffle:
            return list(range(count))
        # The first set of all has the order that it would have alone.
        of = [self._seed, self._epochs[number], number] if number else [self._seed, self._epochs[number]]
        shuffled: list[int] = np.random.default_rng(of).permutation(count).tolist()
        return shuffled
