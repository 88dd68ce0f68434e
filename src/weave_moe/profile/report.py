"""The HTML report: one file, nothing fetched, every number from the records it carries.

The tables are in the page as it is written; the drawings are made from the records by its script.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from .._version import __version__
from ..host.stats import STAGES
from ..run.report import nanoseconds
from ..tools.printing import size
from .measures import Summary, steal_pairs
from .records import ABSENT, PRODUCERS, SHORTEST_WAIT_NS, PolicyRecord, Profile

__all__ = ["beside_line", "html_report"]

Ints = npt.NDArray[Any]


def html_report(profile: Profile, summaries: tuple[Summary, ...]) -> bytes | None:
    """The page, or None where jinja2 is not installed."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        return None
    folder = resources.files(__package__)
    parts = {
        name: (folder / name).read_text(encoding="utf-8")
        for name in ("report.html.j2", "report.css", "report.js")
    }
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(parts),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Marked as safe: what the package ships, and JSON that `_inline` has made fit for its element.
    page = environment.get_template("report.html.j2").render(
        profile=profile,
        what=PRODUCERS[profile.producer],
        absent=[name for name, there in profile.recorded.items() if not there],
        rows=_rows(summaries, profile.producer),
        names=[summary.policy for summary in summaries],
        load=_load(profile),
        waits=_LEGEND[profile.producer],
        version=__version__,
        style=Markup(parts["report.css"]),
        script=Markup(parts["report.js"]),
        data=Markup(_inline(_data(profile, summaries))),
    )
    return page.encode()


def _inline(document: dict[str, Any]) -> str:
    """JSON that may stand in a script element: no character of it can end that element."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _load(profile: Profile) -> dict[str, Any]:
    counts = profile.expert_tokens
    total = int(counts.sum())
    return {
        "experts": int(counts.size),
        "used": int((counts > 0).sum()),
        "slots": total,
        "most": int(counts.max()),
        "times_mean": f"{counts.max() * counts.size / max(1, total):.1f}",
    }


_WAITS = {
    "cpu": ("the plan and sorted rows", "gate_up tasks"),
    "gpu": ("its own first weights and rows", "gate_up tasks and its own first weights"),
    "simulated": ("the plan and sorted rows", "gate_up tasks"),
}
"""What gate_up and down tasks wait for, by producer."""
_LEGEND = {
    "cpu": "waiting for other tasks",
    "gpu": "waiting for other tasks or first weights",
    "simulated": "waiting for other tasks",
}


def _rows(summaries: tuple[Summary, ...], producer: str) -> list[dict[str, Any]]:
    """The table that compares policies: a label, what it means, and a cell a policy."""

    def row(label: str, hint: str, cells: list[str], values: list[float] | None = None) -> None:
        best = None
        if values is not None and len(values) > 1 and min(values) < max(values):
            best = min(values)
        marked = [
            {"text": text, "best": values is not None and values[i] == best}
            for i, text in enumerate(cells)
        ]
        rows.append({"label": label, "hint": hint, "cells": marked})

    rows: list[dict[str, Any]] = []
    each = list(summaries)
    row(
        "makespan",
        "from the launch's begin until its last worker left",
        [nanoseconds(s.makespan_ns) for s in each],
        # A CPU's times are no evidence of speed, so none of them is the best.
        None if producer == "cpu" else [s.makespan_ns for s in each],
    )
    rows += _around(each)
    row(
        "if spread evenly",
        "the time in tasks over the workers that run at a time: a perfect schedule of these tasks",
        [nanoseconds(s.even_ns) for s in each],
    )
    row(
        "busy share",
        "time in tasks of all workers over workers x makespan",
        [f"{s.busy_share:.1%}" for s in each],
        [-s.busy_share for s in each],
    )
    row(
        "tail gap",
        "from the first worker's departure to the last one's",
        [nanoseconds(s.tail_gap_ns) for s in each],
        [s.tail_gap_ns for s in each],
    )
    row(
        "half-empty tail",
        "at the end, with fewer than half of the workers in tasks",
        [nanoseconds(s.tail_ns) for s in each],
        [s.tail_ns for s in each],
    )
    if any(s.planning_ns is not None for s in each):
        row(
            "planning",
            "each worker for itself, from its arrival to its first claim: median; longest",
            [
                "not recorded"
                if s.planning_ns is None
                else "; ".join(nanoseconds(ns) for ns in s.planning_ns)
                for s in each
            ],
        )
    row("workers", "that may run; at a time", [f"{s.workers}; {s.seats}" for s in each])
    row(
        "tasks",
        "all; gate_up + down + combine",
        [f"{s.tasks:,}\n{' + '.join(f'{n:,}' for n in s.by_stage)}" for s in each],
    )
    row(
        "thefts / looks",
        "a theft takes up to half of the victim's queue; looks that found nothing included",
        [
            f"{s.steals:,} / {'not known' if s.steal_attempts is None else f'{s.steal_attempts:,}'}"
            for s in each
        ],
    )
    row(
        # On a GPU they are for the task's own weights, too.
        "waits before tasks" if producer == "gpu" else "dependency waits",
        f"tasks that waited {SHORTEST_WAIT_NS} ns or more; all workers' time in waits",
        [
            "not recorded"
            if s.waits is None or s.wait_ns is None
            else f"{sum(s.waits):,}\n{nanoseconds(sum(s.wait_ns))}"
            for s in each
        ],
    )
    for number, stage in enumerate(STAGES):
        row(
            f"of these, before {stage}",
            f"for {'down tasks' if number == 2 else _WAITS[producer][number]}",
            [
                "not recorded"
                if s.waits is None or s.wait_ns is None
                else f"{s.waits[number]:,}; {nanoseconds(s.wait_ns[number])}"
                for s in each
            ],
        )
    if producer == "gpu":
        row(
            "of that before down, for others",
            "until the last gate_up task of the group had ended; the rest is for its own weights",
            ["not recorded" if s.blocked_ns is None else nanoseconds(s.blocked_ns) for s in each],
        )
    row(
        "longest wait",
        "of one task",
        [
            "not recorded" if s.longest_wait_ns is None else nanoseconds(s.longest_wait_ns)
            for s in each
        ],
    )
    for number, stage in enumerate(STAGES):
        ends = [s.stage_end_ns[number] for s in each]
        row(
            f"{stage} ends",
            "its last task",
            ["no such task" if end is None else nanoseconds(end) for end in ends],
        )
    row(
        "weights asked for, over the least",
        "by tasks, each task once, wherever they come from; the least is each active expert's once",
        [f"{s.asked_bytes / max(1, s.least_bytes):.2f} x\n{size(s.asked_bytes)}" for s in each],
    )
    row(
        "weights read, over the least",
        "from device memory",
        [
            "not recorded"
            if s.read_bytes is None
            else f"{s.read_bytes / max(1, s.least_bytes):.2f} x\n{size(s.read_bytes)}"
            for s in each
        ],
    )
    row("the least", "weights of the active experts", [size(s.least_bytes) for s in each])
    if producer != "cpu":
        row(
            "the least over the makespan",
            "bytes that must be read, a second",
            [f"{s.least_bytes / max(1, s.makespan_ns) / 1e3:.2f} TB/s" for s in each],
        )
    return rows


def _around(summaries: list[Summary]) -> list[dict[str, Any]]:
    """Rows about what a launch's own records cannot tell; none where nobody measured it."""
    timings: list[dict[str, int | None]] = [s.timing or {} for s in summaries]

    def both(timing: dict[str, int | None], name: str) -> str:
        plain, recorded = timing.get(name), timing.get(f"recorded_{name}")
        if plain is None or recorded is None:
            return "not measured"
        times = f"{nanoseconds(recorded)} / {nanoseconds(plain)}"
        return f"{recorded / max(1, plain) - 1:+.1%}\n{times}"

    def one(name: str, absent: str) -> list[str]:
        found = [timing.get(name) for timing in timings]
        return [absent if ns is None else nanoseconds(ns) for ns in found]

    def several(timing: dict[str, int | None]) -> str:
        least, most = timing.get("shortest_ns"), timing.get("longest_ns")
        if least is None or most is None:
            return "not measured"
        return f"{timing.get('launches')}\n{nanoseconds(least)} to {nanoseconds(most)}"

    call = [timing.get("call_ns") for timing in timings]
    known = [ns for ns in call if ns is not None]
    best = min(known) if len(known) == len(call) and len(set(known)) > 1 else None
    marked = [
        {"text": text, "best": ns is not None and ns == best}
        for text, ns in zip(one("call_ns", "not measured"), call, strict=True)
    ]
    rows: list[dict[str, Any]] = []

    def row(label: str, hint: str, cells: list[str]) -> None:
        rows.append(
            {"label": label, "hint": hint, "cells": [{"text": c, "best": False} for c in cells]}
        )

    if known:
        hint = "from one call to the next, with every launch of it, where nothing is recorded"
        rows.append({"label": "whole call", "hint": hint, "cells": marked})
    if any(timing.get("sort_ns") is not None for timing in timings):
        none = "no such launch"
        row("sort", "the launch before, rows gathered; of other calls", one("sort_ns", none))
        row("combine", "the launch after this one; of other calls", one("combine_ns", none))
    if any(timing.get("recorded_call_ns") is not None for timing in timings):
        row(
            "recording, this launch",
            "with records over without, planning left out: so far is the picture from the truth",
            [both(timing, "launch_ns") for timing in timings],
        )
        row(
            "recording, the call",
            "the same, and the clearing of the records' memory",
            [both(timing, "call_ns") for timing in timings],
        )
        row(
            "launches recorded",
            "this is the one of median length; shortest to longest makespan",
            [several(timing) for timing in timings],
        )
    return rows


def _data(profile: Profile, summaries: tuple[Summary, ...]) -> dict[str, Any]:
    return {
        "stages": list(STAGES),
        "predicted": profile.predicted,
        "waits": _LEGEND[profile.producer],
        "experts": profile.expert_tokens.tolist(),
        "runs": [_run(run, summary) for run, summary in zip(profile.runs, summaries, strict=True)],
    }


def _run(run: PolicyRecord, summary: Summary) -> dict[str, Any]:
    """A run's records by column, by worker and time; moments as distances, which are shorter.

    A column that is the same everywhere is that one number.
    """
    records = run.records[np.lexsort((run.records["compute_ns"], run.records["worker"]))]
    compute = records["compute_ns"]

    def before(name: str) -> Ints:
        return np.where(records[name] == ABSENT, ABSENT, compute - records[name])

    store = records["store_ns"]
    columns: dict[str, Ints] = {
        name: records[name]
        for name in ("worker", "sm", "stage", "expert", "group", "chunk", "part", "victim")
    }
    columns |= {
        "compute": compute,
        "length": records["end_ns"] - compute,
        "claimed": before("claim_ns"),
        "waited": before("wait_ns"),
        "load": records["load_ns"],
        "stored": np.where(store == ABSENT, ABSENT, records["end_ns"] - store),
    }
    return {
        "policy": run.policy,
        "workers": run.workers,
        "seats": run.seats,
        "makespan": run.makespan_ns,
        "took": nanoseconds(run.makespan_ns),
        "tasks": len(records),
        "beside": beside_line(run),
        "came": run.first_ns.tolist(),
        "planned": None if run.planned_ns is None else run.planned_ns.tolist(),
        "columns": {name: _short(column) for name, column in columns.items()},
        "busy": [round(share, 5) for share in summary.worker_busy],
        "wait": None
        if summary.worker_wait is None
        else [round(share, 5) for share in summary.worker_wait],
        "ran": list(summary.worker_tasks),
        "stolen": list(summary.worker_stolen),
        "robbed": list(summary.worker_robbed),
        "pairs": steal_pairs(run).tolist(),
    }


def beside_line(run: PolicyRecord) -> str:
    """The launches before and after, in words; empty where there are none."""
    if run.timing is None or ABSENT in (run.timing.sort_ns, run.timing.combine_ns):
        return ""
    sort, combine = nanoseconds(run.timing.sort_ns), nanoseconds(run.timing.combine_ns)
    return f"sort {sort} before it, combine {combine} after it"


def _short(column: Ints) -> int | list[int]:
    if len(column) and (column == column[0]).all():
        return int(column[0])
    found: list[int] = column.tolist()
    return found
