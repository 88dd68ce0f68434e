"""Who makes records: the CPU engine and the simulator, each by way of the traces it has already.

Another producer needs a function like these two and nothing else: it hands over `PolicyRecord`s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..host.stats import RunStats, WorkerStats
from ..simulate import Simulated
from .records import ABSENT, RECORD_DTYPE, PolicyRecord, Records

__all__ = ["from_run", "from_simulated", "tokens_of_experts"]


def tokens_of_experts(topk_ids: Any, experts: int) -> npt.NDArray[np.int64]:
    """[experts] slots of each expert; ids outside are skipped, as the engines do."""
    ids = np.asarray(topk_ids).reshape(-1).astype(np.int64)
    ids = ids[(ids >= 0) & (ids < experts)]
    return np.bincount(ids, minlength=experts).astype(np.int64)


def from_run(stats: RunStats) -> PolicyRecord:
    """A traced run of the CPU engine. Its tasks are plain loops: no times of loads and stores.

    Raises ValueError if the run was not traced.
    """
    if stats.trace is None:
        raise ValueError("stats must have a trace: Workspace(trace=True)")
    return PolicyRecord(
        policy=stats.policy,
        workers=stats.workers,
        seats=stats.workers,
        makespan_ns=stats.makespan_ns,
        tail_gap_ns=stats.tail_gap_ns,
        steal_attempts=stats.steal_attempts,
        read_bytes=ABSENT,
        first_ns=_moments(stats.per_worker, "first_ns", stats.workers, 0),
        last_ns=_moments(stats.per_worker, "last_ns", stats.workers, 0),
        records=_records(stats.trace, 0),
    )


def from_simulated(result: Simulated) -> PolicyRecord:
    """A simulated launch with its trace. Only what a consumer does has times in it.

    Where sorting and combine are launches of their own, the record is of the launch between them
    and begins when it does. Raises ValueError if no trace was asked for.
    """
    if result.trace is None:
        raise ValueError("result must have a trace: simulate(..., trace=True)")
    workers, there = result.workers, result.per_worker
    gone = max((w.last_ns for w in there), default=0)
    # What comes before it is all that the launch with the tasks does not last of the time.
    begin = max(0, gone - round(1e3 * result.experts_us))
    if len(result.trace):
        begin = min(begin, int(result.trace["claim_ns"].min()))
    records = _records(result.trace, begin)
    # A block has an SM to itself; one that found none at first goes where another has left.
    at_once = workers - result.held
    records["sm"] = np.where(records["worker"] < at_once, records["worker"], ABSENT)
    last_ns = _moments(there, "last_ns", workers, begin)
    last = max(gone - begin, int(records["end_ns"].max(initial=0)))
    return PolicyRecord(
        policy=result.policy,
        workers=workers,
        seats=at_once,
        makespan_ns=last,
        tail_gap_ns=round(1e3 * result.tail_gap_us),
        steal_attempts=result.steal_attempts,
        read_bytes=result.read_bytes,
        first_ns=_moments(there, "first_ns", workers, begin),
        last_ns=last_ns,
        records=records,
    )


def _moments(
    workers: tuple[WorkerStats, ...], name: str, count: int, begin: int
) -> npt.NDArray[np.int64]:
    out = np.full(count, ABSENT, dtype=np.int64)
    found = [max(0, getattr(worker, name) - begin) for worker in workers]
    out[: len(found)] = found
    return out


def _records(trace: npt.NDArray[Any], begin: int) -> Records:
    """Records of a trace whose tasks have three moments; times less `begin`.

    A worker waits for a task's dependencies from its claim on, or from the end of the task before
    where it was claimed earlier.
    """
    out = np.zeros(len(trace), dtype=RECORD_DTYPE)
    for name in ("worker", "stage", "expert", "group", "chunk", "part", "victim"):
        out[name] = trace[name]
    for name in ("sm", "load_ns", "store_ns"):
        out[name] = ABSENT
    out["claim_ns"] = trace["claim_ns"] - begin
    out["compute_ns"] = trace["start_ns"] - begin
    out["end_ns"] = trace["end_ns"] - begin
    out = out[np.argsort(out["compute_ns"], kind="stable")]
    order = np.lexsort((out["compute_ns"], out["worker"]))
    mine = out[order]
    same = mine["worker"][1:] == mine["worker"][:-1]
    before = np.where(same, mine["end_ns"][:-1], 0)
    since = mine["claim_ns"].copy()
    since[1:] = np.maximum(since[1:], before)
    # Two clock readings may swap by a nanosecond of rounding; a wait is never negative.
    out["wait_ns"][order] = np.minimum(since, mine["compute_ns"])
    return out
