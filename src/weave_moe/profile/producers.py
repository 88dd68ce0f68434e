"""Who makes records: the CPU engine, the GPU kernel and the simulator, each from its own trace.

Another producer needs a function like these and nothing else: it hands over `PolicyRecord`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..host.stats import STAGES, RunStats, WorkerStats
from ..simulate import Simulated
from .records import ABSENT, RECORD_DTYPE, Moments, PolicyRecord, Records, Timing

__all__ = ["Blocks", "from_gpu", "from_run", "from_simulated", "tokens_of_experts"]


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
    timing = Timing(call_ns=round(1e3 * result.time_us))
    if not (records["stage"] == 2).any():  # launches of their own
        after = round(1e3 * result.makespan_us) - gone
        timing = replace(timing, sort_ns=begin, combine_ns=max(0, after))
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
        timing=timing,
    )


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a launch on a GPU. [workers] int64 each, nanoseconds since the launch began.

    first, last: arrival and departure.  planned: when it had made the plan; None where the launch
    before this one made it, or nobody recorded it.
    looks: for something to steal, all blocks together; -1 if they were not counted.
    """

    first: Moments
    last: Moments
    planned: Moments | None = None
    looks: int = ABSENT


def from_gpu(
    trace: npt.NDArray[Any],
    policy: str,
    *,
    workers: int,
    tasks: Sequence[int],
    combine_tokens: int,
    blocks: Blocks | None = None,
    timing: Timing | None = None,
) -> PolicyRecord:
    """A launch of the GPU kernel, from `backends.cuda.take_trace`.

    workers: blocks of the launch.  tasks: how many of gate_up, down and combine there must be.
    combine_tokens: tokens of a combine task.  blocks: None where they were not recorded; arrivals
    are then not known, and a block's departure is the end of its last task.

    Raises ValueError where the trace is not one of that launch, whole and in order.
    """
    if trace.dtype.names != RECORD_DTYPE.names:
        raise ValueError(f"trace must have the fields {', '.join(RECORD_DTYPE.names or ())}")
    records = trace.astype(RECORD_DTYPE)
    for number, (name, want) in enumerate(zip(STAGES, tasks, strict=True)):
        mine = records[records["stage"] == number]
        if len(mine) != want:
            raise ValueError(f"trace must have {want:,} {name} tasks, got {len(mine):,}")
        places = np.unique(mine[["group", "chunk", "part"]])
        if number < 2 and len(places) != want:
            raise ValueError(f"trace must have each {name} task once, got some of them twice")
    combine = records["stage"] == 2
    # The kernel notes the first token of a block of tokens.
    records["chunk"][combine] //= combine_tokens
    records = records[np.argsort(records["compute_ns"], kind="stable")]
    # A block was there for its tasks: its arrival and departure are by the device's timer, which is
    # coarser than the clock of the tasks.
    claimed = np.full(workers, np.iinfo(np.int64).max)
    np.minimum.at(claimed, records["worker"], records["claim_ns"])
    ended = np.full(workers, ABSENT, dtype=np.int64)
    np.maximum.at(ended, records["worker"], records["end_ns"])
    if blocks is None:
        blocks = Blocks(np.full(workers, ABSENT, dtype=np.int64), ended)
    blocks = replace(
        blocks,
        first=np.minimum(blocks.first, claimed),
        last=np.maximum(blocks.last, ended),
    )
    planned = blocks.planned
    if planned is not None:
        within = np.clip(planned, blocks.first, np.minimum(claimed, blocks.last))
        planned = np.where(planned == ABSENT, ABSENT, within)
    left = blocks.last[blocks.last != ABSENT]
    return PolicyRecord(
        policy=policy,
        workers=workers,
        seats=_seats(blocks) if (blocks.first != ABSENT).any() else workers,
        makespan_ns=int(blocks.last.max(initial=0)),
        tail_gap_ns=int(left.max() - left.min()) if len(left) else 0,
        steal_attempts=blocks.looks,
        read_bytes=ABSENT,
        first_ns=blocks.first,
        last_ns=blocks.last,
        records=records,
        planned_ns=planned,
        timing=timing,
    )


def _seats(blocks: Blocks) -> int:
    """The most blocks that were there at a time."""
    came = blocks.first != ABSENT
    first, last = np.sort(blocks.first[came]), np.sort(blocks.last[came])
    # One that leaves at the moment at which another comes was there with it.
    return int((np.arange(1, len(first) + 1) - np.searchsorted(last, first)).max())


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
