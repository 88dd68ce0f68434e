"""`simulate`: what a launch would take, and what its SMs would do meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..host.stats import TRACE_DTYPE, WorkerStats
from ..schedule import Knobs
from ..shapes import LayerShape, check_count
from .engine import NEVER, Launch
from .machine import Machine, load_machine
from .workload import Workload, make_workload

__all__ = ["Simulated", "simulate"]


@dataclass(frozen=True)
class Simulated:
    """One simulated launch. Times in microseconds, sizes in bytes.

    time_us: from launch to launch, as graph replays measure it.
    makespan_us: from when the blocks run until the last has left.
    floor_us: the least that device memory and the matrix units allow (weights of active experts,
    x and the result once; operations without padding).
    experts_us: of the launch with the tasks: the makespan, or for many tokens what is left of it
    without sorting and combine, which are launches of their own.
    busy_share: time in tasks, of all SMs over SMs x experts_us, 0 to 1; SMs that a neighbour holds
    do not count.  tail_gap_us: from the first block's departure to the last one's.
    dependency_wait_us: consumers waiting for other tasks' results, all SMs together.
    read_bytes: weights read from device memory.  least_bytes: each active expert's once.
    stages_us: first start and last end of gate_up, down and combine tasks, from when the blocks
    run; (0, 0) where there are none.
    per_worker: as the CPU engine's, in nanoseconds.
    trace: entries of `host.stats.TRACE_DTYPE`, by start, if asked for; else None.
    """

    policy: str
    machine: Machine
    workers: int
    held: int
    tasks: int
    groups: int
    rows: int
    steals: int
    steal_attempts: int
    tickets: int
    time_us: float
    makespan_us: float
    experts_us: float
    floor_us: float
    busy_share: float
    tail_gap_us: float
    dependency_wait_us: float
    read_bytes: int
    least_bytes: int
    stages_us: tuple[tuple[float, float], ...]
    per_worker: tuple[WorkerStats, ...] = field(repr=False)
    trace: npt.NDArray[Any] | None = field(default=None, repr=False, compare=False)


def simulate(
    shape: LayerShape,
    topk_ids: Any,
    *,
    policy: str = "steal",
    machine: str | Path | Machine = "h200",
    held: int = 0,
    slow: Mapping[int, float] | None = None,
    knobs: Knobs | None = None,
    trace: bool = False,
) -> Simulated:
    """One launch of the experts of a layer, simulated.

    Args:
        shape: the layer; bfloat16 or float16.
        topk_ids: [T, k] integers, the expert of each slot; -1 or >= E is skipped. Anything that
            numpy takes; `deal_counts` makes one from tokens an expert.
        policy: a name of `schedule.POLICY_CODES`, or "auto" (the kernel's own choice).
        machine: a name of `MACHINES`, a JSON file, or a `Machine`.
        held: SMs that a neighbour keeps for the whole launch.
        slow: SM -> microseconds that each ring stage takes it longer.
        knobs: settings of stealing, by default the plan's; their policy is replaced by `policy`.
        trace: record every task.

    Raises:
        TypeError: an argument of another type than it must have.
        ValueError: an argument outside what is allowed.
    """
    if not isinstance(shape, LayerShape):
        raise TypeError(f"shape must be a LayerShape, got {type(shape).__name__}")
    chosen = load_machine(machine)
    if check_count("held", held, 0) >= chosen.sms:
        raise ValueError(f"held must be 0 .. {chosen.sms - 1} SMs of {chosen.name}, got {held}")
    if slow is not None and not isinstance(slow, Mapping):
        raise TypeError(f"slow must map SMs to microseconds, got {type(slow).__name__}")
    for sm, extra in (slow or {}).items():
        if not 0 <= sm < chosen.sms or not 0 <= extra < NEVER:
            raise ValueError(f"slow must map SMs 0 .. {chosen.sms - 1} to us >= 0: {sm}: {extra}")
    work = make_workload(shape, topk_ids, chosen.shared_bytes)
    return run_workload(work, chosen, policy, held=held, slow=slow, knobs=knobs, trace=trace)


def run_workload(
    work: Workload,
    chosen: Machine,
    policy: str,
    *,
    held: int = 0,
    slow: Mapping[int, float] | None = None,
    knobs: Knobs | None = None,
    trace: bool = False,
) -> Simulated:
    """`simulate` for a workload that is there already."""
    name = work.kernel.policy if policy == "auto" else policy
    its = replace(knobs or Knobs(batch=work.kernel.batch), policy=name)
    launch = Launch(work, chosen, its, held=held, slow=slow, trace=trace)
    makespan = launch.run()
    ran = [w for w in launch.workers if w.left]
    on_time = launch.workers[: chosen.sms - held]
    experts = launch.over - (launch.planned if work.kernel.many else 0.0)
    present = len(on_time) * experts or 1.0
    io = 2 * work.tokens * work.shape.hidden * 2
    floor = max(
        (work.weight_bytes + io) / chosen.hbm_tbs / 1e6, work.flops / chosen.matrix_tflops / 1e6
    )
    claims = launch.claims
    per_worker = []
    for w in ran:
        i = w.index
        ns = [round(1e3 * t) for t in (w.busy, w.wait, w.first, w.last)]
        per_worker.append(
            WorkerStats(
                tasks=w.tasks,
                steals=sum(c.steals[i] for c in claims),
                steal_attempts=sum(c.sweeps[i] for c in claims),
                tickets=sum(c.tickets[i] for c in claims),
                busy_ns=ns[0],
                wait_ns=ns[1],
                idle_ns=round(1e3 * makespan) - ns[0] - ns[1],
                first_ns=ns[2],
                last_ns=ns[3],
            )
        )
    return Simulated(
        policy=name,
        machine=chosen,
        workers=chosen.sms,
        held=held,
        tasks=sum(work.tasks),
        groups=len(work.plan.groups),
        rows=work.plan.rows,
        steals=sum(w.steals for w in per_worker),
        steal_attempts=sum(w.steal_attempts for w in per_worker),
        tickets=sum(w.tickets for w in per_worker),
        time_us=makespan + chosen.launch_us,
        makespan_us=makespan,
        experts_us=experts,
        floor_us=floor,
        busy_share=sum(w.busy for w in on_time) / present,
        tail_gap_us=launch.over - min(w.last for w in on_time),
        dependency_wait_us=sum(w.wait for w in ran),
        read_bytes=round(launch.read_bytes),
        least_bytes=work.weight_bytes,
        stages_us=tuple(
            (first, last) if first < NEVER else (0.0, 0.0)
            for first, last in zip(launch.stage_first, launch.stage_last, strict=True)
        ),
        per_worker=tuple(per_worker),
        trace=_trace(launch),
    )


def _trace(launch: Launch) -> npt.NDArray[Any] | None:
    if launch.trace is None:
        return None
    out = np.zeros(len(launch.trace), dtype=TRACE_DTYPE)
    if len(out):
        places = np.array(launch.trace, dtype=np.int64).T
        for name, column in zip(TRACE_DTYPE.names or (), places, strict=False):
            out[name] = column
        times = np.rint(np.array(launch.trace_times).T * 1e3).astype(np.int64)
        out["claim_ns"], out["start_ns"], out["end_ns"] = times
    return out[np.argsort(out["start_ns"], kind="stable")]
