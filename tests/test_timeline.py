"""Timelines say what the trace says: as Chrome trace events and as a picture."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weave_moe.host.stats import STAGES, TRACE_DTYPE, RunStats
from weave_moe.run import picture
from weave_moe.run.compare import Comparison, PolicyRun
from weave_moe.run.sources import Load
from weave_moe.run.timeline import timeline_json

Task = tuple[int, int, int, int, int, int]  # worker, stage, victim, claim, start, end


def stats_of(workers: int, tasks: list[Task], policy: str = "steal") -> RunStats:
    trace = np.zeros(len(tasks), dtype=TRACE_DTYPE)
    for number, (worker, stage, victim, claim, start, end) in enumerate(tasks):
        trace[number] = (
            worker,
            stage,
            number,
            number + 1,
            number % 7,
            0,
            victim,
            claim,
            start,
            end,
        )
        if stage == 2:
            trace[number]["expert"] = trace[number]["group"] = -1
    makespan = int(trace["end_ns"].max()) if tasks else 1
    return RunStats(
        policy=policy,
        workers=workers,
        tasks=len(tasks),
        steals=int((trace["victim"] >= 0).sum()),
        steal_attempts=0,
        tickets=0,
        lost=0,
        makespan_ns=makespan,
        busy_share=0.5,
        tail_gap_ns=0,
        dependency_wait_ns=0,
        groups=1,
        rows=1,
        per_worker=(),
        trace=trace,
    )


def comparison(*all_stats: RunStats) -> Comparison:
    runs = tuple(PolicyRun(stats.policy, 0.0, stats) for stats in all_stats)
    workers = max(stats.workers for stats in all_stats)
    return Comparison("host", workers, Load(1, 1, 1, 1), 1.0, True, runs)


@st.composite
def schedules(draw: st.DrawFn) -> RunStats:
    """Workers that run one task after another, with waits, idle time and thefts."""
    workers = draw(st.integers(1, 5))
    count = draw(st.integers(1, 40))
    free = [draw(st.integers(0, 10_000)) for _ in range(workers)]
    tasks: list[Task] = []
    for stage in sorted(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))):
        worker = draw(st.integers(0, workers - 1))
        # A claim may be issued while the task before still runs.
        claim = max(0, free[worker] + draw(st.integers(-500, 3000)))
        start = max(claim, free[worker]) + draw(st.sampled_from([0, 0, 10, 5000]))
        end = start + draw(st.integers(1, 20_000))
        others = [w for w in range(workers) if w != worker]
        victim = draw(st.sampled_from([-1, *others]))
        tasks.append((worker, stage, victim, claim, start, end))
        free[worker] = end
    order = draw(st.permutations(tasks))
    return stats_of(workers, list(order))


def load(result: Comparison) -> dict[str, Any]:
    document = json.loads(timeline_json(result, "a title", {"note": "kept"}))
    assert document["otherData"] == {"title": "a title", "note": "kept"}
    found: dict[str, Any] = document
    return found


@given(stats=schedules(), more=schedules())
def test_events_are_the_trace(stats: RunStats, more: RunStats) -> None:
    events = load(comparison(stats, more))["traceEvents"]
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    for pid, run in enumerate((stats, more), start=1):
        mine = [event for event in events if event["pid"] == pid]
        named = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert named == {worker: f"worker {worker}" for worker in range(run.workers)}
        slices = [event for event in mine if event["ph"] == "X" and event["cat"] != "wait"]
        assert run.trace is not None
        expected = sorted(
            (
                int(row["worker"]),
                STAGES[row["stage"]],
                int(row["expert"]),
                int(row["chunk"]),
                int(row["victim"]),
                int(row["start_ns"]),
                int(row["end_ns"]),
            )
            for row in run.trace
        )
        assert expected == sorted(
            (
                event["tid"],
                event["cat"].split(",")[0],
                event["args"]["expert"],
                event["args"]["chunk"],
                event["args"].get("stolen_from", -1),
                round(event["ts"] * 1000),
                round(event["ts"] * 1000) + round(event["dur"] * 1000),
            )
            for event in slices
        )
        for event in slices:
            assert ("stolen" in event["cat"]) == ("stolen_from" in event["args"])
            assert ("(stolen)" in event["name"]) == ("stolen_from" in event["args"])


@given(stats=schedules())
def test_slices_of_a_worker_do_not_overlap(stats: RunStats) -> None:
    events = [e for e in load(comparison(stats))["traceEvents"] if e["ph"] == "X"]
    for worker in range(stats.workers):
        spans = sorted(
            (round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000))
            for e in events
            if e["tid"] == worker
        )
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


@given(stats=schedules())
def test_an_arrow_leads_from_the_victim_to_each_stolen_task(stats: RunStats) -> None:
    events = load(comparison(stats))["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    tasks = [e for e in events if e["ph"] == "X" and e["cat"] != "wait"]
    heads = {(e["tid"], e["ts"]) for e in ends.values()}
    for task in tasks:
        if "stolen_from" not in task["args"]:
            continue
        began = [e["ts"] for e in tasks if e["tid"] == task["args"]["stolen_from"]]
        # Where the victim's first slice comes later there is nothing for an arrow to leave from.
        assert ((task["tid"], task["ts"]) in heads) == any(ts <= task["ts"] for ts in began)
    for key, tail in starts.items():
        head = ends[key]
        assert tail["ts"] <= head["ts"]
        stolen = next(e for e in tasks if e["tid"] == head["tid"] and e["ts"] == head["ts"])
        assert stolen["args"]["stolen_from"] == tail["tid"]
        assert any(
            e["tid"] == tail["tid"] and e["ts"] <= tail["ts"] <= e["ts"] + e["dur"] for e in tasks
        )


def pixels(result: Comparison) -> Any:
    image_module = pytest.importorskip("PIL.Image")
    content = picture.timeline_png(result, "a title", "a subtitle")
    assert content is not None
    return np.asarray(image_module.open(io.BytesIO(content)).convert("RGB"))


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def test_the_picture_has_a_row_a_worker_and_a_colour_a_stage() -> None:
    end = 1_000_000
    tasks = [
        (0, 0, -1, 0, 0, end // 2),
        (0, 1, -1, end // 2, end // 2, end),
        (1, 0, -1, 0, 0, end // 4),
        # Waits from a quarter to a half, then runs a stolen task, then is idle.
        (1, 2, 0, end // 4, end // 2, end * 3 // 4),
    ]
    image = pixels(comparison(stats_of(2, tasks), stats_of(2, tasks[:2])))
    panel = picture.panel_inches(2)
    height = picture.HEAD + picture.FOOT + 2 * panel + picture.GAP
    assert image.shape == (
        pytest.approx(height * picture.DPI, abs=1),
        picture.WIDTH * picture.DPI,
        3,
    )

    def at(panel_number: int, worker: int, share: float, low: float = 0.0) -> tuple[int, ...]:
        top = picture.HEAD + panel_number * (panel + picture.GAP)
        y = (top + panel * (worker + 0.5 + low) / 2) * picture.DPI
        span = picture.RIGHT - picture.LEFT
        x = (picture.LEFT + span * share / 1.005) * picture.WIDTH * picture.DPI
        return tuple(int(v) for v in image[round(y), round(x)])

    gate_up, down, combine = (rgb(colour) for colour in picture.STAGE_COLOURS)
    assert at(0, 0, 0.3) == gate_up
    assert at(0, 0, 0.7) == down
    assert at(0, 1, 0.1) == gate_up
    assert at(0, 1, 0.4) == rgb(picture.WAIT_COLOUR)
    assert at(0, 1, 0.7) == combine
    assert at(0, 1, 0.7, low=0.3) == rgb(picture.STEAL_COLOUR)
    assert at(0, 0, 0.7, low=0.3) == down
    idle = at(0, 1, 0.9)
    assert min(idle) > 240
    assert min(at(1, 1, 0.3)) > 240
    assert at(1, 0, 0.3) == gate_up


@given(stats=schedules())
@settings(max_examples=8)
def test_a_stage_has_its_colour_where_it_is_in_the_trace(stats: RunStats) -> None:
    assert stats.trace is not None
    image = pixels(comparison(stats))
    body = image[round(picture.HEAD * picture.DPI) :]  # below the legend

    def drawn(colour: str) -> bool:
        return bool((body == np.array(rgb(colour))).all(axis=2).any())

    for stage, colour in enumerate(picture.STAGE_COLOURS):
        mine = stats.trace[stats.trace["stage"] == stage]
        if not len(mine):
            assert not drawn(colour)
        elif (mine["end_ns"] - mine["start_ns"]).max() > stats.makespan_ns / 100:
            assert drawn(colour)
    assert drawn(picture.STEAL_COLOUR) == bool(stats.steals)


@pytest.mark.parametrize("workers", [1, 16, 132, 600])
def test_any_number_of_workers_is_drawn(workers: int) -> None:
    tasks = [(w, 0, -1, 0, w, 2000 + w) for w in range(workers)]
    image = pixels(comparison(stats_of(workers, tasks)))
    assert 100 < image.shape[0] < 4000
    assert (image == np.array(rgb(picture.STAGE_COLOURS[0]))).all(axis=2).sum() > 1000


def test_without_traces_there_is_no_picture() -> None:
    result = comparison(stats_of(2, [(0, 0, -1, 0, 0, 10)]))
    bare = Comparison("host", 2, result.load, 1.0, True, (PolicyRun("steal", 0.0, None),))
    assert picture.timeline_png(bare, "", "") is None
    assert load(bare)["traceEvents"] == []
