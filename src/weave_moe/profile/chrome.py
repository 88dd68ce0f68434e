"""Records as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

The format is Google's Trace Event Format: a launch is a process, a worker a thread of it. Times are
microseconds since the launch began, or since the longest sort began that comes before a launch.
"""

from __future__ import annotations

import bisect
import json
from dataclasses import asdict
from typing import Any

import numpy as np

from ..host.stats import STAGES
from .measures import busy_grid
from .records import (
    ABSENT,
    MOMENTS,
    PRODUCERS,
    RECORD_DTYPE,
    SHORTEST_WAIT_NS,
    PolicyRecord,
    Profile,
)

__all__ = ["chrome_trace"]

_COLOURS = ("thread_state_running", "thread_state_iowait", "good")
_STOLEN_COLOUR = "terrible"
_NAMES = tuple(RECORD_DTYPE.names or ())
_WAVE_POINTS = 500
"""Moments at which the track of busy workers has a value."""

Event = dict[str, Any]
Task = dict[str, int]


def chrome_trace(profile: Profile, about: dict[str, Any]) -> bytes:
    """All runs of a profile as one JSON file; `about` is kept under otherData.

    A track a worker: its planning, its waits, its tasks, and within a task the storing of its
    result where that is recorded. Slices of a track nest or follow each other, or viewers would
    drop some: where a task is not over when the next one begins, its slice ends there, and its
    storing goes on as an async slice, which loads always are. A flow arrow leads from the victim's
    track, at the moment of the theft, to each stolen task; where the victim was in no task then, a
    slice of a nanosecond holds the arrow's tail. A counter shows how many workers are busy. Sort
    and combine, where they are launches of their own, have a track with the launch between them.
    """
    origin = max((run.timing.sort_ns for run in profile.runs if run.timing is not None), default=0)
    events: list[Event] = []
    for number, run in enumerate(profile.runs):
        events += _events(number + 1, profile, run)
    if origin > 0:
        for event in events:
            if event["ph"] != "M":
                event["ts"] = round(event["ts"] + origin / 1000, 3)
    meta = [event for event in events if event["ph"] == "M"]
    # Slices that start together nest, the longest outside.
    rest = sorted((e for e in events if e["ph"] != "M"), key=lambda e: (e["ts"], -e.get("dur", 0)))
    document = {
        "traceEvents": meta + rest,
        "displayTimeUnit": "ns",
        "otherData": {
            "title": profile.title,
            "producer": profile.producer,
            "what": PRODUCERS[profile.producer],
            "not_recorded": [name for name, there in profile.recorded.items() if not there],
            "timing_ns": {
                run.policy: asdict(run.timing) for run in profile.runs if run.timing is not None
            },
            **about,
        },
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _events(pid: int, profile: Profile, run: PolicyRecord) -> list[Event]:
    records = run.records
    stolen = int((records["victim"] != ABSENT).sum())
    label = f"{run.policy} ({len(records)} tasks, {stolen} stolen)"
    events = [
        _meta(pid, "process_name", 0, name=f"predicted: {label}" if profile.predicted else label),
        _meta(pid, "process_sort_index", 0, sort_index=pid),
    ]
    sms = dict(zip(records["worker"].tolist(), records["sm"].tolist(), strict=True))
    for worker in range(run.workers):
        sm = sms.get(worker, ABSENT)
        name = f"worker {worker}" if sm == ABSENT else f"SM {sm}, worker {worker}"
        events.append(_meta(pid, "thread_name", worker, name=name))
        events.append(_meta(pid, "thread_sort_index", worker, sort_index=worker))
    columns = [records[name].tolist() for name in _NAMES]
    tasks: list[Task] = [dict(zip(_NAMES, row, strict=True)) for row in zip(*columns, strict=True)]
    free, until = _track(run)
    spans: dict[int, list[tuple[int, int]]] = {}
    for task, end in zip(tasks, until, strict=True):
        spans.setdefault(task["worker"], []).append((task["compute_ns"], end))
    for number, task in enumerate(tasks):
        identity = (pid << 32) + number
        events += _slices(pid, identity, task, free[number], until[number])
        if task["victim"] != ABSENT:
            events += _arrow(pid, identity, task, spans.get(task["victim"], []))
    events += _around(pid, run)
    events += _wave(pid, run)
    return events


def _meta(pid: int, kind: str, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _track(run: PolicyRecord) -> tuple[list[int], list[int]]:
    """[tasks] each: when the slices before a task's on its track have ended, and when its own does,
    which is before the next one begins."""
    records = run.records
    order = np.lexsort((records["compute_ns"], records["worker"]))
    worker, begin = records["worker"][order], records["compute_ns"][order]
    until = records["end_ns"].copy()
    free = np.zeros(len(records), dtype=np.int64)
    if run.planned_ns is not None:
        free = np.maximum(free, run.planned_ns[records["worker"]])
    same = np.flatnonzero(np.diff(worker) == 0)
    until[order[same]] = np.minimum(until[order[same]], begin[same + 1])
    free[order[same + 1]] = until[order[same]]
    return free.tolist(), until.tolist()


def _around(pid: int, run: PolicyRecord) -> list[Event]:
    """Planning of each worker; and the launches before and after this one, if there are any."""
    found = []
    if run.planned_ns is not None:
        moments = zip(run.first_ns.tolist(), run.planned_ns.tolist(), strict=True)
        for worker, (begin, end) in enumerate(moments):
            if begin != ABSENT and end > begin:
                base = {"pid": pid, "tid": worker}
                found.append(_slice(base, "plan", "plan", begin, end, {}, "grey"))
    timing = run.timing
    if timing is None or timing.sort_ns == timing.combine_ns == ABSENT:
        return found
    track, here = run.workers, run.makespan_ns
    found.append(_meta(pid, "thread_name", track, name="launches of the call"))
    found.append(_meta(pid, "thread_sort_index", track, sort_index=-1))
    base = {"pid": pid, "tid": track}
    found.append(_slice(base, "gate_up and down", "launch", 0, here, {}, "thread_state_running"))
    # Not of this very call: see `Timing`.
    other = {"what": "not recorded: of other calls, which had no records to write"}
    if timing.sort_ns > 0:
        found.append(_slice(base, "sort", "launch", -timing.sort_ns, 0, other, "grey"))
    if timing.combine_ns > 0:
        end = here + timing.combine_ns
        found.append(_slice(base, "combine", "launch", here, end, other, "good"))
    return found


def _slices(pid: int, identity: int, task: Task, free: int, until: int) -> list[Event]:
    """What is drawn of a task. free: when the slices before it end.  until: when its own does."""
    stage, stolen = STAGES[task["stage"]], task["victim"] != ABSENT
    expert = "" if task["expert"] == ABSENT else f" e{task['expert']}"
    named = f"{stage}{expert} c{task['chunk']}"
    base = {"pid": pid, "tid": task["worker"]}
    begin, end = task["compute_ns"], task["end_ns"]
    args = {name: task[name] for name in ("expert", "group", "chunk", "part", "sm")}
    args |= {name: task[name] for name in MOMENTS if task[name] != ABSENT}
    if stolen:
        args["stolen_from"] = task["victim"]
    found = []
    since = max(task["wait_ns"], free)
    if task["wait_ns"] != ABSENT and begin - since >= SHORTEST_WAIT_NS:
        what = {"gate_up": "plan", "down": "gate_up", "combine": "down"}[stage]
        if task["load_ns"] != ABSENT:
            what = "weights" if stage == "gate_up" else f"{what} or weights"
        wait = {"before": stage, "group": task["group"]}
        found.append(_slice(base, f"wait for {what}", "wait", since, begin, wait, "grey"))
    found.append(
        _slice(
            base,
            f"{named} (stolen)" if stolen else named,
            f"{stage},stolen" if stolen else stage,
            begin,
            until,
            args,
            _STOLEN_COLOUR if stolen else _COLOURS[task["stage"]],
        )
    )
    store = task["store_ns"]
    if ABSENT != store < until:
        found.append(_slice(base, "store", "store", store, until, {}, "olive"))
    # Viewers make a track of each name: one a worker, not one a task.
    beside: list[tuple[str, int, int]] = []
    if store != ABSENT and until < end:
        beside.append(("store", max(store, until), end))
    if ABSENT != task["load_ns"] < begin:
        # Until the first product: the last bytes may arrive later.
        beside.append(("load", task["load_ns"], begin))
    for kind, low, high in beside:
        common = {**base, "name": f"{kind}, worker {task['worker']}", "cat": kind, "id": identity}
        found.append({**common, "ph": "b", "ts": low / 1000, "args": {"of": named}})
        found.append({**common, "ph": "e", "ts": high / 1000})
    return found


def _slice(
    base: Event, name: str, kind: str, begin: int, end: int, args: dict[str, Any], colour: str
) -> Event:
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {**base, "ph": "X", "name": name, "cat": kind, **times, "cname": colour, "args": args}


def _arrow(pid: int, identity: int, task: Task, victim: list[tuple[int, int]]) -> list[Event]:
    """Flow events from the victim's track at the time of the theft to the stolen task."""
    at = task["compute_ns"] if task["claim_ns"] == ABSENT else task["claim_ns"]
    place = bisect.bisect_right(victim, (at, 1 << 62)) - 1
    found: list[Event] = []
    if place < 0 or at >= victim[place][1]:
        base = {"pid": pid, "tid": task["victim"]}
        by = {"thief": task["worker"]}
        found.append(_slice(base, "robbed", "steal", at, at + 1, by, _STOLEN_COLOUR))
    flow = {"pid": pid, "name": "steal", "cat": "steal", "id": identity}
    found.append({**flow, "ph": "s", "tid": task["victim"], "ts": at / 1000})
    to = {"tid": task["worker"], "ts": task["compute_ns"] / 1000}
    found.append({**flow, "ph": "f", "bp": "e", **to})
    return found


def _wave(pid: int, run: PolicyRecord) -> list[Event]:
    busy = busy_grid(run, _WAVE_POINTS, run.makespan_ns).sum(axis=0)
    edges = np.linspace(0, run.makespan_ns, _WAVE_POINTS + 1) / 1000
    values = [*(round(float(n), 2) for n in busy), 0.0]
    counter = {"ph": "C", "pid": pid, "tid": 0, "name": "busy workers"}
    return [
        {**counter, "ts": round(float(at), 3), "args": {"busy": value}}
        for at, value in zip(edges, values, strict=True)
    ]
