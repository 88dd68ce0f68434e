"""What records say: shares, gaps, waits, thefts and bytes. Pure functions of the arrays."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..host.stats import STAGES
from ..schedule import k_range
from .records import ABSENT, SHORTEST_WAIT_NS, PolicyRecord, Profile

__all__ = [
    "Summary",
    "busy_grid",
    "busy_spans",
    "least_bytes",
    "steal_pairs",
    "summarise",
    "task_bytes",
]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Summary:
    """One policy in numbers. Times in nanoseconds, sizes in bytes; None where it is not known.

    tasks: all, and `by_stage` gate_up, down, combine.  busy_share: all workers' time in tasks over
    seats x makespan, 0 to 1.  even_ns: what the makespan would be if that work were spread evenly.
    tail_ns: how long before the end the number of busy workers fell below half of the seats for
    good.  steals: thefts, each of up to half a queue.  waits: tasks that waited for others,
    for `SHORTEST_WAIT_NS` or more, by stage.  wait_ns: all waits together, by stage.
    longest_wait_ns: of one task.
    asked_bytes: weights that the tasks ask for, each task once.  least_bytes: each active expert's
    weights once.  read_bytes: from device memory.
    stage_end_ns: when the last task of each stage ended, None for a stage without tasks.
    blocked_ns: of the waits of down tasks, what was over before the last gate_up task of the
    group had ended: the rest they waited for their own weights.
    planning_ns: each worker's from its arrival on, median and longest.
    timing: as `Timing` has it; None as a whole where there is none.
    worker_busy, worker_wait: [workers] shares of the makespan; a wait beside a task that was not
    over yet does not count.  worker_tasks, worker_stolen,
    worker_robbed: [workers] tasks run, thefts by it, thefts from it.
    """

    policy: str
    workers: int
    seats: int
    tasks: int
    by_stage: tuple[int, int, int]
    makespan_ns: int
    even_ns: int
    busy_share: float
    tail_gap_ns: int
    tail_ns: int
    steals: int
    steal_attempts: int | None
    waits: tuple[int, int, int] | None
    wait_ns: tuple[int, int, int] | None
    longest_wait_ns: int | None
    asked_bytes: int
    least_bytes: int
    read_bytes: int | None
    stage_end_ns: tuple[int | None, int | None, int | None]
    blocked_ns: int | None
    planning_ns: tuple[int, int] | None
    timing: dict[str, int | None] | None
    worker_busy: tuple[float, ...]
    worker_wait: tuple[float, ...] | None
    worker_tasks: tuple[int, ...]
    worker_stolen: tuple[int, ...]
    worker_robbed: tuple[int, ...]


def busy_spans(run: PolicyRecord) -> tuple[Any, Any, Any]:
    """(worker, start, end), int64 [tasks] each: when workers were in tasks, none of it twice.

    By worker, then by time. Where a worker's next task begins before the last one's end, as where
    two warpgroups share tasks, its span begins at that end.
    """
    records = run.records
    order, earlier = _in_turn(run)
    worker = records["worker"][order].astype(np.int64)
    start = np.maximum(records["compute_ns"][order], earlier)
    # Nothing is left of a task that lies within another.
    return worker, start, np.maximum(records["end_ns"][order], start)


def _in_turn(run: PolicyRecord) -> tuple[Any, Any]:
    """The order of records by worker, then by time; and for each until when, at most, the worker
    was in tasks before it."""
    records = run.records
    order = np.lexsort((records["compute_ns"], records["worker"]))
    worker, end = records["worker"][order].astype(np.int64), records["end_ns"][order]
    # Offsets keep the workers apart in one running maximum.
    apart = worker * (run.makespan_ns + 1)
    reached = np.maximum.accumulate(end + apart) - apart
    earlier = np.concatenate([np.zeros(1, np.int64), reached])[: len(order)]
    earlier[np.flatnonzero(np.diff(worker)) + 1] = 0
    return order, earlier


def busy_grid(run: PolicyRecord, bins: int, end_ns: int) -> Floats:
    """[workers, bins] share of each bin that a worker was in tasks, 0 to 1; bins of 0 .. end_ns."""
    grid = np.zeros((run.workers, bins))
    worker, start, end = busy_spans(run)
    if not len(worker) or end_ns <= 0:
        return grid
    # The time in tasks up to a moment is piecewise linear: its differences at the bins' edges are
    # exact, however short the tasks.
    edges = np.linspace(0, end_ns, bins + 1)
    for number in range(run.workers):
        low, high = np.searchsorted(worker, (number, number + 1))
        if low == high:
            continue
        length = end[low:high] - start[low:high]
        total = np.concatenate([[0], np.cumsum(length)]).astype(float)
        which = np.searchsorted(start[low:high], edges, side="right")
        before = np.maximum(which - 1, 0)
        inside = np.clip(edges - start[low:high][before], 0, length[before])
        spent = np.where(which > 0, total[before] + inside, 0.0)
        grid[number] = np.diff(spent) * bins / end_ns
    return np.clip(grid, 0.0, 1.0)


def task_bytes(profile: Profile, run: PolicyRecord) -> npt.NDArray[np.int64]:
    """[tasks] bytes of weights that a task asks for, 0 for combine."""
    records = run.records
    out = np.zeros(len(records), dtype=np.int64)
    for number, stage in enumerate(profile.stages):
        mine = records["stage"] == number
        chunk = records["chunk"][mine].astype(np.int64)
        rows = np.minimum(stage.chunk_outputs, stage.outputs - chunk * stage.chunk_outputs)
        inputs = np.array([k_range(stage.reduction, stage.parts, p)[1] for p in range(stage.parts)])
        halves = 2 if number == 0 and profile.gated else 1
        out[mine] = rows * halves * inputs[records["part"][mine]] * profile.element_size
    return out


def least_bytes(profile: Profile) -> int:
    """Bytes of the active experts' weights, each once."""
    up, down = profile.stages
    elements = up.outputs * (2 if profile.gated else 1) * up.reduction
    elements += down.outputs * down.reduction
    active = int((profile.expert_tokens > 0).sum())
    return active * elements * profile.element_size


def steal_pairs(run: PolicyRecord) -> npt.NDArray[np.int64]:
    """[pairs, 3] thief, victim and how often, by thief and victim."""
    stolen = run.records[run.records["victim"] != ABSENT]
    both = np.stack([stolen["worker"], stolen["victim"]], axis=1).astype(np.int64)
    if not len(both):
        return np.zeros((0, 3), dtype=np.int64)
    pairs, counts = np.unique(both, axis=0, return_counts=True)
    return np.concatenate([pairs, counts[:, None]], axis=1)


def summarise(profile: Profile, run: PolicyRecord) -> Summary:
    """The numbers of one run of `profile`."""
    records, stage = run.records, run.records["stage"]
    worker, start, end = busy_spans(run)
    busy = np.bincount(worker, weights=end - start, minlength=run.workers)
    span = max(1, run.makespan_ns)
    known = run.recorded["wait_ns"]
    waited = np.where(records["wait_ns"] == ABSENT, 0, records["compute_ns"] - records["wait_ns"])
    stolen = records[records["victim"] != ABSENT]
    by_stage = [int((stage == s).sum()) for s in range(len(STAGES))]
    waits = [int(((stage == s) & (waited >= SHORTEST_WAIT_NS)).sum()) for s in range(len(STAGES))]
    wait_ns = [int(waited[stage == s].sum()) for s in range(len(STAGES))]
    ends = [
        int(records["end_ns"][stage == s].max()) if by_stage[s] else None
        for s in range(len(STAGES))
    ]
    order, earlier = _in_turn(run)
    alone = np.minimum(waited[order], np.maximum(0, records["compute_ns"][order] - earlier))
    per_wait = np.bincount(records["worker"][order], weights=alone, minlength=run.workers) / span

    def counted(column: npt.NDArray[Any]) -> tuple[int, ...]:
        return tuple(int(n) for n in np.bincount(column, minlength=run.workers))

    return Summary(
        policy=run.policy,
        workers=run.workers,
        seats=run.seats,
        tasks=len(records),
        by_stage=(by_stage[0], by_stage[1], by_stage[2]),
        makespan_ns=run.makespan_ns,
        even_ns=round(float(busy.sum()) / run.seats),
        busy_share=float(busy.sum()) / (run.seats * span),
        tail_gap_ns=run.tail_gap_ns,
        tail_ns=_tail(run, start, end),
        steals=len(stolen),
        steal_attempts=None if run.steal_attempts == ABSENT else run.steal_attempts,
        waits=(waits[0], waits[1], waits[2]) if known else None,
        wait_ns=(wait_ns[0], wait_ns[1], wait_ns[2]) if known else None,
        longest_wait_ns=int(waited.max(initial=0)) if known else None,
        asked_bytes=int(task_bytes(profile, run).sum()),
        least_bytes=least_bytes(profile),
        read_bytes=None if run.read_bytes == ABSENT else run.read_bytes,
        stage_end_ns=(ends[0], ends[1], ends[2]),
        blocked_ns=_blocked(run) if known else None,
        planning_ns=_planning(run),
        timing=None
        if run.timing is None
        else {name: None if ns == ABSENT else ns for name, ns in asdict(run.timing).items()},
        worker_busy=tuple(float(share) for share in busy / span),
        worker_wait=tuple(float(share) for share in per_wait) if known else None,
        worker_tasks=counted(records["worker"]),
        worker_stolen=counted(stolen["worker"]),
        worker_robbed=counted(stolen["victim"]),
    )


def _blocked(run: PolicyRecord) -> int:
    """Waits of down tasks until the last gate_up task of their group had ended."""
    records = run.records
    up, down = records[records["stage"] == 0], records[records["stage"] == 1]
    down = down[down["wait_ns"] != ABSENT]
    groups, number = np.unique(np.append(up["group"], down["group"]), return_inverse=True)
    ready = np.zeros(len(groups), dtype=np.int64)
    np.maximum.at(ready, number[: len(up)], up["end_ns"])
    until = np.minimum(ready[number[len(up) :]], down["compute_ns"])
    return int(np.maximum(0, until - down["wait_ns"]).sum())


def _planning(run: PolicyRecord) -> tuple[int, int] | None:
    if run.planned_ns is None:
        return None
    did = (run.planned_ns != ABSENT) & (run.first_ns != ABSENT)
    if not did.any():
        return None
    took = (run.planned_ns - run.first_ns)[did]
    return round(float(np.median(took))), int(took.max())


def _tail(run: PolicyRecord, start: npt.NDArray[Any], end: npt.NDArray[Any]) -> int:
    """From when fewer than half of the seats were in tasks, for good, to the makespan's end."""
    if not len(end):
        return run.makespan_ns
    moments = np.concatenate([start, end])
    steps = np.concatenate([np.ones(len(start)), -np.ones(len(end))])
    # At one moment ends come first, so that a worker between two tasks is not counted twice.
    order = np.lexsort((steps, moments))
    count, moments = np.cumsum(steps[order]), moments[order]
    # A worker that goes from one task to the next is not idle in between, however the clock ticks.
    last_of = np.append(np.diff(moments) > 0, True)
    enough = np.flatnonzero((2 * count >= run.seats) & last_of)
    if not enough.size:
        return run.makespan_ns
    after = int(enough[-1]) + 1
    return run.makespan_ns - int(moments[min(after, len(moments) - 1)])
