"""Queue words and batches in Python: the arithmetic of `device/queue.h`.

A worker's queue is a window [lo, hi) of positions in its stage's order, in one 64-bit word
{tag 16 | hi 24 | lo 24}. The owner takes from lo, thieves from hi, each with one compare-and-swap.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "WINDOW_LIMIT",
    "Batches",
    "Span",
    "make_batches",
    "steal_split",
    "window_empty",
    "window_hi",
    "window_lo",
    "window_tag",
    "window_word",
]

WINDOW_LIMIT = (1 << 24) - 1
"""Most tasks in a stage whose queues can be stolen from."""


def window_word(tag: int, lo: int, hi: int) -> int:
    """The word of window [lo, hi) with the lowest 16 bits of `tag`."""
    return (tag & 0xFFFF) << 48 | hi << 24 | lo


def window_tag(word: int) -> int:
    """A word's tag."""
    return word >> 48


def window_hi(word: int) -> int:
    """End of a word's window."""
    return word >> 24 & 0xFFFFFF


def window_lo(word: int) -> int:
    """Start of a word's window."""
    return word & 0xFFFFFF


def window_empty(word: int) -> bool:
    """Whether a word's window holds nothing."""
    return window_lo(word) >= window_hi(word)


def steal_split(lo: int, hi: int, *, one: bool = False) -> int:
    """Where a thief cuts a window: it takes [split, hi), half rounded up, or one task."""
    return hi - (1 if one else (hi - lo + 1) // 2)


class Span(NamedTuple):
    """Positions lo .. hi - 1."""

    lo: int
    hi: int


class Batches(NamedTuple):
    """How the dispenser of a stealing stage hands out tasks: rounds of one ticket a worker.

    A ticket is worth 4 tasks while at least 6 remain for each worker, then 2 while at least 3
    remain, then 1. Positions within a round are strided over its tickets, so that workers that run
    at the same time work on neighbouring tasks.
    """

    workers: int
    fours: int
    """Rounds of 4 tasks a ticket."""
    twos: int
    """Rounds of 2 after them; all later tickets are worth one task."""

    def window(self, tasks: int, ticket: int) -> Span:
        """Positions of a ticket; empty once the stage is dispensed."""
        first_two = self.fours * self.workers
        first_one = first_two + self.twos * self.workers
        if ticket < first_two:
            lo, size = 4 * ticket, 4
        elif ticket < first_one:
            lo, size = 4 * first_two + 2 * (ticket - first_two), 2
        else:
            lo, size = 4 * first_two + 2 * (first_one - first_two) + (ticket - first_one), 1
        return Span(min(lo, tasks), min(lo + size, tasks))

    def task(self, position: int) -> int:
        """Task at a position: a permutation of each round."""
        end_fours = 4 * self.workers * self.fours
        end_twos = end_fours + 2 * self.workers * self.twos
        if position >= end_twos:
            return position
        start, size = (0, 4) if position < end_fours else (end_fours, 2)
        round_, rest = divmod(position - start, size * self.workers)
        ticket, place = divmod(rest, size)
        return start + round_ * size * self.workers + ticket + place * self.workers


def make_batches(tasks: int, workers: int, most: int = 4) -> Batches:
    """The batches of a stage of `tasks` tasks for `workers` workers (at least 1), of at most `most`
    tasks a ticket (1, 2 or 4)."""
    fours = twos = 0
    if most >= 4 and tasks >= 6 * workers:
        fours = (tasks - 6 * workers) // (4 * workers) + 1
    rest = tasks - 4 * workers * fours
    if most >= 2 and rest >= 3 * workers:
        twos = (rest - 3 * workers) // (2 * workers) + 1
    return Batches(workers, fours, twos)
