"""Scheduling policies in Python: which tasks a ticket stands for.

A stage's dispenser hands out tickets 0, 1, 2, ...; a policy is the meaning of a ticket. The same as
`Claimer` in `device/queue.h`, which `tests/test_plan.py` drives ticket by ticket to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .queues import WINDOW_LIMIT, Batches, Span, make_batches

__all__ = ["POLICY_CODES", "STEALING", "VICTIM_CODES", "Dispenser", "Knobs"]

POLICY_CODES = {
    "counter": 0,
    "steal": 1,
    "static_strided": 2,
    "static_expert": 3,
    "static_tail": 4,
    "window": 5,
}
"""`weave::Policy` by name."""

VICTIM_CODES = {"largest": 0, "random": 1}
"""`weave::Victim` by name."""

STEALING = ("steal", "window")
"""Policies whose tickets go into queues that others may steal from."""


@dataclass(frozen=True)
class Knobs:
    """A policy and its settings.

    Attributes:
        policy: a key of POLICY_CODES.
        victim: "largest" window, or the first non-empty one from a "random" place.
        steal: "half" of the victim's window, or "one" task.
        min_steal: victims with fewer tasks than this are skipped; at least 1.
        static_share: percent of a stage's tasks that static_tail puts into lists, 0 .. 100.
        batch: most tasks that a ticket of steal is worth: 1, 2 or 4.

    Raises:
        ValueError: a value outside those.
    """

    policy: str = "steal"
    victim: str = "largest"
    steal: str = "half"
    min_steal: int = 1
    static_share: int = 70
    batch: int = 4

    def __post_init__(self) -> None:
        for name, allowed in (
            ("policy", tuple(POLICY_CODES)),
            ("victim", tuple(VICTIM_CODES)),
            ("steal", ("half", "one")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        if self.min_steal < 1:
            raise ValueError(f"min_steal must be at least 1, got {self.min_steal}")
        if not 0 <= self.static_share <= 100:
            raise ValueError(f"static_share must be 0 .. 100 (percent), got {self.static_share}")
        if self.batch not in (1, 2, 4):
            raise ValueError(f"batch must be 1, 2 or 4, got {self.batch}")


@dataclass(frozen=True)
class Dispenser:
    """The tickets of one stage under one policy.

    Attributes:
        knobs: the policy.
        tasks: tasks of the stage; at most WINDOW_LIMIT where they can be stolen.
        workers: workers of the launch, at least 1.
        expert_task: [experts + 1] first task of each expert, the last entry `tasks`;
            read by static_expert only.

    Raises:
        ValueError: a number outside its range, or no `expert_task` for static_expert.
    """

    knobs: Knobs
    tasks: int
    workers: int
    expert_task: Sequence[int] = ()
    batches: Batches = field(init=False)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if self.tasks < 0:
            raise ValueError(f"tasks must be 0 or more, got {self.tasks}")
        if self.stealing and self.tasks > WINDOW_LIMIT:
            raise ValueError(
                f"tasks must be at most {WINDOW_LIMIT} with policy {self.knobs.policy!r}, "
                f"got {self.tasks}"
            )
        if self.knobs.policy == "static_expert" and (
            len(self.expert_task) < 2 or self.expert_task[-1] != self.tasks
        ):
            raise ValueError("expert_task must have experts + 1 entries and end with tasks")
        object.__setattr__(
            self, "batches", make_batches(self.tasks, self.workers, self.knobs.batch)
        )

    @property
    def stealing(self) -> bool:
        """Whether tickets go into queues that others may steal from."""
        return self.knobs.policy in STEALING

    @property
    def tail_start(self) -> int:
        """First task of static_tail that is in no list."""
        return self.tasks * self.knobs.static_share // 100

    @property
    def tickets(self) -> int:
        """Tickets that may hold tasks; from here on the dispenser is exhausted."""
        match self.knobs.policy:
            case "counter":
                return self.tasks
            case "static_tail":
                return self.workers + self.tasks - self.tail_start
            case "steal":
                b = self.batches
                in_rounds = self.workers * (4 * b.fours + 2 * b.twos)
                return self.workers * (b.fours + b.twos) + self.tasks - in_rounds
            case _:
                return self.workers

    def window(self, ticket: int) -> Span:
        """Positions of a ticket of a stealing policy: the first is run at once, the rest queued."""
        if self.knobs.policy == "steal":
            return self.batches.window(self.tasks, ticket)
        if ticket >= self.workers:
            return Span(self.tasks, self.tasks)
        return Span(self.tasks * ticket // self.workers, self.tasks * (ticket + 1) // self.workers)

    def task(self, position: int) -> int:
        """Task at a position of a stealing policy's windows."""
        return self.batches.task(position) if self.knobs.policy == "steal" else position

    def tasks_of(self, ticket: int) -> list[int]:
        """Tasks of a ticket, in the order its taker runs them."""
        if self.stealing:
            return [self.task(p) for p in range(*self.window(ticket))]
        policy = self.knobs.policy
        if policy == "counter":
            return [ticket] if ticket < self.tasks else []
        if policy == "static_tail":
            if ticket >= self.workers:
                task = self.tail_start + ticket - self.workers
                return [task] if task < self.tasks else []
            return list(range(ticket, self.tail_start, self.workers))
        if ticket >= self.workers:
            return []
        if policy == "static_strided":
            return list(range(ticket, self.tasks, self.workers))
        return self._expert_list(ticket)

    def _expert_list(self, ticket: int) -> list[int]:
        """Up to one expert a worker: its tasks over several lists; else several experts a list."""
        first, experts = self.expert_task, len(self.expert_task) - 1
        if experts <= self.workers:
            lists = self.workers // experts
            expert, sub = divmod(ticket, lists)
            if expert >= experts:
                return []
            return list(range(first[expert] + sub, first[expert + 1], lists))
        return [
            task
            for expert in range(ticket, experts, self.workers)
            for task in range(first[expert], first[expert + 1])
        ]
