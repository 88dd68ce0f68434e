"""Timelines as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

The format is Google's Trace Event Format: a run of a policy is a process, a worker a thread of it.
Times are microseconds since the launch.
"""

from __future__ import annotations

import bisect
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..host.stats import STAGES, RunStats
from .compare import Comparison

__all__ = ["timeline_json"]

_COLOURS = ("thread_state_running", "thread_state_iowait", "good")
_STOLEN_COLOUR = "terrible"
_WAIT_NS = 1000
"""Shortest dependency wait that gets a slice of its own."""


def timeline_json(comparison: Comparison, title: str, about: dict[str, Any]) -> bytes:
    """The runs of `comparison` as one JSON file; `about` is kept under otherData.

    Slices are named stage, expert and chunk; viewers colour by the name without its numbers, so a
    stage is one colour and its stolen tasks, named so, another. A stolen task also has a flow arrow
    from what its victim was doing at the time. A wait for other tasks' results is a slice before
    the task's.
    """
    events: list[dict[str, Any]] = []
    for index, run in enumerate(comparison.runs):
        if run.stats is not None and run.stats.trace is not None:
            events += _policy_events(index + 1, run.policy, run.stats, run.stats.trace)
    # Viewers take events of one thread in the order of time; slices that start together nest.
    meta = [event for event in events if event["ph"] == "M"]
    rest = sorted((e for e in events if e["ph"] != "M"), key=lambda e: (e["ts"], -e.get("dur", 0)))
    document = {
        "traceEvents": meta + rest,
        "displayTimeUnit": "ns",
        "otherData": {"title": title, **about},
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _policy_events(
    pid: int, policy: str, stats: RunStats, trace: NDArray[Any]
) -> list[dict[str, Any]]:
    def named(kind: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}

    events = [
        named("process_name", 0, name=f"{policy} ({stats.tasks} tasks, {stats.steals} stolen)"),
        named("process_sort_index", 0, sort_index=pid),
    ]
    for worker in range(stats.workers):
        events.append(named("thread_name", worker, name=f"worker {worker}"))
        events.append(named("thread_sort_index", worker, sort_index=worker))
    order = np.argsort(trace["start_ns"], kind="stable")
    tasks = [_as_dict(trace[i]) for i in order]
    by_worker: dict[int, list[dict[str, int]]] = {}
    for task in tasks:
        by_worker.setdefault(task["worker"], []).append(task)
    free_at = dict.fromkeys(range(stats.workers), 0)
    for number, task in enumerate(tasks):
        worker, stage = task["worker"], STAGES[task["stage"]]
        stolen = task["victim"] >= 0
        what = "" if task["expert"] < 0 else f" e{task['expert']}"
        since = max(task["claim_ns"], free_at[worker])
        free_at[worker] = max(free_at[worker], task["end_ns"])
        base = {"pid": pid, "tid": worker}
        if task["start_ns"] - since >= _WAIT_NS:
            events.append(
                {
                    **base,
                    "ph": "X",
                    "name": f"wait for {'gate_up' if stage == 'down' else 'down'}",
                    "cat": "wait",
                    "ts": since / 1000,
                    "dur": (task["start_ns"] - since) / 1000,
                    "cname": "grey",
                    "args": {"before": stage, "group": task["group"]},
                }
            )
        args = {key: task[key] for key in ("expert", "group", "chunk", "part")}
        events.append(
            {
                **base,
                "ph": "X",
                "name": f"{stage}{what} c{task['chunk']}{' (stolen)' if stolen else ''}",
                "cat": f"{stage},stolen" if stolen else stage,
                "ts": task["start_ns"] / 1000,
                "dur": (task["end_ns"] - task["start_ns"]) / 1000,
                "cname": _STOLEN_COLOUR if stolen else _COLOURS[task["stage"]],
                "args": {**args, "stolen_from": task["victim"]} if stolen else args,
            }
        )
        if stolen:
            events += _arrow(pid, (pid << 32) + number, task, by_worker.get(task["victim"], []))
    return events


def _arrow(
    pid: int, identity: int, task: dict[str, int], victims: list[dict[str, int]]
) -> list[dict[str, Any]]:
    """Flow events from the victim's slice at the time of the steal to the stolen task's slice."""
    at = task["claim_ns"]
    place = bisect.bisect_right(victims, at, key=lambda t: t["start_ns"])
    last = victims[max(0, place - 1)] if victims else None
    if last is None or last["start_ns"] > task["start_ns"]:
        return []  # the victim's first task starts later: its slice cannot hold the arrow's tail
    if not last["start_ns"] <= at < last["end_ns"]:
        at = min((last["start_ns"] + last["end_ns"]) // 2, task["start_ns"])
    flow = {"pid": pid, "name": "steal", "cat": "steal", "id": identity}
    return [
        {**flow, "ph": "s", "tid": task["victim"], "ts": at / 1000},
        {**flow, "ph": "f", "bp": "e", "tid": task["worker"], "ts": task["start_ns"] / 1000},
    ]


def _as_dict(row: Any) -> dict[str, int]:
    return {name: int(row[name]) for name in row.dtype.names}
