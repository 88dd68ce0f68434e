"""Claims of one stage: whose task is next under a policy, one claim after the other.

What a ticket stands for is `schedule.Dispenser`'s; here are the queues, as `Claimer` in
`device/queue.h` keeps them, without the races.
"""

from __future__ import annotations

from ..schedule import NONE, Dispenser, steal_split

__all__ = ["Claim", "StageClaims"]


Claim = tuple[int, int]
"""A task's index in its stage, and the worker whose queue it was stolen from, or NONE."""


class StageClaims:
    """A stage's dispenser and its workers' queues.

    tickets, steals, sweeps: how often a ticket was taken, a queue robbed, and all queues looked at.
    """

    def __init__(self, dispenser: Dispenser) -> None:
        workers = dispenser.workers
        self.dispenser = dispenser
        self.stealing = dispenser.stealing
        self.end = dispenser.tickets
        self.ticket = 0
        self.lists: list[list[int]] = [[] for _ in range(workers)]
        self.low = [0] * workers
        self.high = [0] * workers
        self.queued = 0
        self.exhausted = [False] * workers
        self.random = [(w * 2654435761 + 12345) & 0xFFFFFFFF for w in range(workers)]
        self.tickets = [0] * workers
        self.steals = [0] * workers
        self.sweeps = [0] * workers

    def next(self, worker: int) -> Claim | None:
        """The worker's next task; None when there is nothing left for it."""
        own = self.lists[worker]
        if own:
            return own.pop(), NONE
        low = self.low[worker]
        if low < self.high[worker]:
            self.low[worker] = low + 1
            if low + 1 == self.high[worker]:
                self.queued -= 1
            return self.dispenser.task(low), NONE
        while not self.exhausted[worker]:
            task = self._open(worker)
            if task != NONE:
                return task, NONE
        return self._steal(worker) if self.queued else None

    def _open(self, worker: int) -> int:
        ticket, self.ticket = self.ticket, self.ticket + 1
        self.tickets[worker] += 1
        if ticket >= self.end:
            self.exhausted[worker] = True
            return NONE
        if not self.stealing:
            tasks = self.dispenser.tasks_of(ticket)
            if not tasks:
                return NONE
            if len(tasks) > 1:
                self.lists[worker] = tasks[:0:-1]
            return tasks[0]
        low, high = self.dispenser.window(ticket)
        if low >= high:
            return NONE
        self._publish(worker, low + 1, high)
        return self.dispenser.task(low)

    def _publish(self, worker: int, low: int, high: int) -> None:
        self.low[worker], self.high[worker] = low, high
        self.queued += low < high

    def _steal(self, worker: int) -> Claim | None:
        knobs = self.dispenser.knobs
        workers = self.dispenser.workers
        random = self.random[worker] = (self.random[worker] * 1664525 + 1013904223) & 0xFFFFFFFF
        start = (random >> 8) % workers
        self.sweeps[worker] += 1
        victim, most = NONE, max(1, knobs.min_steal) - 1
        for step in range(workers):
            other = (start + step) % workers
            size = self.high[other] - self.low[other]
            if size > most:
                victim, most = other, size
                if knobs.victim == "random":
                    break
        if victim == NONE:
            return None
        low, high = self.low[victim], self.high[victim]
        split = steal_split(low, high, one=knobs.steal == "one")
        self.high[victim] = split
        self.queued -= split == low
        self._publish(worker, split + 1, high)
        self.steals[worker] += 1
        return self.dispenser.task(split), victim
