"""What a run of the scheduler says about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["STAGES", "TRACE_DTYPE", "RunStats", "WorkerStats"]

STAGES: Final = ("gate_up", "down", "combine")
"""Names of the stages, by the number that a trace's `stage` holds."""

TRACE_DTYPE: Final = np.dtype(
    [
        ("worker", "u2"),
        ("stage", "u1"),
        ("expert", "i4"),
        ("group", "i4"),
        ("chunk", "i4"),
        ("part", "i4"),
        ("victim", "i4"),
        ("claim_ns", "i8"),
        ("start_ns", "i8"),
        ("end_ns", "i8"),
    ],
    align=True,
)
"""One task of a trace.

worker: who ran it.  stage: 0 gate_up, 1 down, 2 combine.  expert, group: -1 for combine.
chunk: chunk of output columns; for combine, block of tokens.  part: K range.
victim: the worker whose queue it was stolen from, -1 if it was not stolen.
claim_ns, start_ns, end_ns: when it was claimed, when what it depends on was finished, when it was
finished itself; nanoseconds since the launch began.
"""


@dataclass(frozen=True)
class WorkerStats:
    """One worker of a run. Times are in nanoseconds.

    tasks: tasks run.  steals: tasks taken from another worker's queue (each with up to half of it).
    steal_attempts: looks at all queues for something to steal.  tickets: batches asked of
    dispensers.  busy_ns: in tasks, by the clock on the wall, so a worker whose thread the system
    has put aside counts as busy.  wait_ns: waiting for what a claimed task depends on.
    idle_ns: the rest of the run: starting, planning, claiming, and having nothing to do.
    first_ns, last_ns: arrival and departure, since the launch began.
    """

    tasks: int
    steals: int
    steal_attempts: int
    tickets: int
    busy_ns: int
    wait_ns: int
    idle_ns: int
    first_ns: int
    last_ns: int


@dataclass(frozen=True)
class RunStats:
    """One run of the experts. Times are in nanoseconds; on the CPU they are no evidence of speed.

    A call cut into slabs of tokens is one run: counts and times of its launches are added, and
    group and block numbers go on from one launch to the next.

    policy: a name of POLICIES, never "auto".  workers: how many.  tasks, steals, steal_attempts,
    tickets: sums over the workers (see `WorkerStats`).  lost: claims that another worker beat, and
    that were tried again.  makespan_ns: from the call to the last worker's departure.
    busy_share: busy time of all workers over workers x makespan_ns, 0 to 1.
    tail_gap_ns: from the first worker's departure to the last one's.
    dependency_wait_ns: sum of wait_ns.  groups, rows: token groups of the plan, and their rows with
    padding.  per_worker: one entry a worker.
    trace: one `TRACE_DTYPE` entry a task, by start, if the workspace records traces; else None.
    """

    policy: str
    workers: int
    tasks: int
    steals: int
    steal_attempts: int
    tickets: int
    lost: int
    makespan_ns: int
    busy_share: float
    tail_gap_ns: int
    dependency_wait_ns: int
    groups: int
    rows: int
    per_worker: tuple[WorkerStats, ...]
    trace: npt.NDArray[Any] | None = field(default=None, repr=False, compare=False)
