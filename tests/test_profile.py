"""Records of tasks: who makes them, what is counted in them, what is drawn, what is refused."""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weave_moe
from weave_moe.cli import cli
from weave_moe.host.stats import STAGES, TRACE_DTYPE
from weave_moe.profile import ABSENT, PRODUCERS, RECORD_DTYPE, PolicyRecord, Profile, Timing
from weave_moe.profile.chrome import chrome_trace
from weave_moe.profile.command import MOST_TASKS
from weave_moe.profile.measures import (
    busy_grid,
    busy_spans,
    least_bytes,
    steal_pairs,
    summarise,
    task_bytes,
)
from weave_moe.profile.picture import heat_map
from weave_moe.profile.producers import from_run, from_simulated, tokens_of_experts
from weave_moe.profile.records import MOMENTS, load_profile, save_profile
from weave_moe.profile.report import html_report
from weave_moe.schedule import StageShape
from weave_moe.shapes import LayerShape
from weave_moe.simulate import simulate

EXPERTS = 3
STAGE_SHAPES = (StageShape("gate_up", 160, 64, 100), StageShape("down", 100, 64, 160))


def profile_of(*runs: PolicyRecord, producer: str = "gpu", **other: Any) -> Profile:
    return Profile(
        **{
            "producer": producer,
            "title": "a layer",
            "size": "sizes",
            "routing": "a routing",
            "machine": "a machine",
            "expert_tokens": np.array([5, 0, 2], dtype=np.int64),
            "stages": STAGE_SHAPES,
            "gated": True,
            "element_size": 2,
            "notes": ("a note",),
            "runs": runs,
            **other,
        }
    )


@st.composite
def launches(draw: st.DrawFn, policy: str = "steal") -> PolicyRecord:
    """Any record that an engine could make: each moment there or not, tasks that overlap or not."""
    workers = draw(st.integers(1, 5))
    count = draw(st.integers(0, 30))
    known = {name: draw(st.booleans()) for name in ("claim_ns", "wait_ns", "load_ns", "store_ns")}
    overlap = draw(st.booleans())
    free = [0] * workers
    records = np.zeros(count, dtype=RECORD_DTYPE)
    for record in records:
        worker = draw(st.integers(0, workers - 1))
        stage = draw(st.integers(0, 2))
        early = st.integers(-400, -1) if overlap else st.integers(-400, 2000)
        claim = max(0, free[worker] + draw(st.one_of(early, st.integers(0, 2000))))
        wait = claim if overlap else max(claim, free[worker])
        compute = wait + draw(st.sampled_from([0, 7, 900, 5000]))
        length = draw(st.integers(0, 9000))
        moments = {
            "claim_ns": claim,
            "wait_ns": wait,
            "load_ns": claim + draw(st.integers(0, compute + length - claim)),
            "store_ns": compute + draw(st.integers(0, length)),
        }
        free[worker] = compute + length
        others = [w for w in range(workers) if w != worker]
        record["worker"], record["stage"] = worker, stage
        record["sm"] = draw(st.sampled_from([ABSENT, worker + 10]))
        record["expert"] = ABSENT if stage == 2 else draw(st.sampled_from([0, 2]))
        record["group"] = ABSENT if stage == 2 else draw(st.integers(0, 9))
        record["chunk"] = draw(st.integers(0, 1))
        record["victim"] = draw(st.sampled_from([ABSENT, ABSENT, *others]))
        for name, moment in moments.items():
            record[name] = moment if known[name] else ABSENT
        record["compute_ns"], record["end_ns"] = compute, compute + length
    records = records[np.argsort(records["compute_ns"], kind="stable")]
    makespan = int(records["end_ns"].max(initial=0)) + draw(st.integers(1, 5000))
    last = np.array([min(makespan, free[w]) for w in range(workers)], dtype=np.int64)
    seats = draw(st.integers(1, workers))
    planned = None
    if draw(st.booleans()):
        # At most until the first task; a worker without tasks until whenever, or never.
        until = np.full(workers, makespan, dtype=np.int64)
        np.minimum.at(until, records["worker"], records["compute_ns"])
        planned = np.array([draw(st.integers(ABSENT, int(n))) for n in until], dtype=np.int64)
    return PolicyRecord(
        policy=policy,
        workers=workers,
        seats=seats,
        makespan_ns=makespan,
        tail_gap_ns=int(last.max() - last.min()),
        steal_attempts=draw(st.sampled_from([ABSENT, 12])),
        read_bytes=draw(st.sampled_from([ABSENT, 10_000])),
        first_ns=np.zeros(workers, dtype=np.int64),
        last_ns=last,
        records=records,
        planned_ns=planned,
        timing=draw(timings()),
    )


@st.composite
def timings(draw: st.DrawFn) -> Timing | None:
    """Of a launch that nobody timed, or each time known or not."""
    some = st.sampled_from([ABSENT, 0, 3, 12_345])
    return draw(st.one_of(st.none(), st.builds(Timing, *[some] * len(fields(Timing)))))


def busy_by_hand(run: PolicyRecord, worker: int, low: int, high: int) -> int:
    """Nanoseconds of low .. high in which a worker was in a task."""
    mine = [
        (max(low, int(r["compute_ns"])), min(high, int(r["end_ns"])))
        for r in run.records
        if r["worker"] == worker
    ]
    total, reached = 0, low
    for start, end in sorted(span for span in mine if span[0] < span[1]):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


# What is counted


@given(run=launches(), bins=st.integers(1, 40), longer=st.integers(0, 3000))
def test_busy_time_is_the_union_of_tasks(run: PolicyRecord, bins: int, longer: int) -> None:
    summary = summarise(profile_of(run), run)
    by_hand = [busy_by_hand(run, w, 0, run.makespan_ns) for w in range(run.workers)]
    assert summary.busy_share == pytest.approx(sum(by_hand) / run.makespan_ns / run.seats)
    assert summary.worker_busy == pytest.approx([n / run.makespan_ns for n in by_hand])
    end = run.makespan_ns + longer
    grid = busy_grid(run, bins, end)
    assert grid.shape == (run.workers, bins)
    assert grid.min() >= 0
    assert grid.max() <= 1
    assert grid.sum(axis=1) * end / bins == pytest.approx(np.array(by_hand, float), abs=1e-3)
    middle = bins // 2
    edges = np.linspace(0, end, bins + 1)[[middle, middle + 1]]
    # To the nanosecond, where the bin's edges are whole ones.
    if all(edge == int(edge) for edge in edges):
        low, high = (int(edge) for edge in edges)
        for worker in range(run.workers):
            expected = busy_by_hand(run, worker, low, high)
            assert grid[worker, middle] * (high - low) == pytest.approx(expected, abs=1e-3)


@given(run=launches())
def test_spans_of_a_worker_never_overlap(run: PolicyRecord) -> None:
    worker, start, end = busy_spans(run)
    assert (start <= end).all()
    rows = list(zip(worker.tolist(), start.tolist(), end.tolist(), strict=True))
    for before, after in itertools.pairwise(rows):
        assert before[0] < after[0] or (before[0] == after[0] and before[2] <= after[1])


@given(run=launches())
def test_counts(run: PolicyRecord) -> None:
    profile = profile_of(run)
    summary = summarise(profile, run)
    records = run.records
    assert summary.tasks == sum(summary.by_stage) == sum(summary.worker_tasks) == len(records)
    stolen = records[records["victim"] >= 0]
    assert summary.steals == len(stolen) == sum(summary.worker_stolen)
    pairs = steal_pairs(run)
    assert pairs[:, 2].sum() == len(stolen)
    for thief, victim, count in pairs:
        both = (stolen["worker"] == thief) & (stolen["victim"] == victim)
        assert both.sum() == count
    for worker in range(run.workers):
        assert summary.worker_robbed[worker] == (stolen["victim"] == worker).sum()
    if (records["wait_ns"] == ABSENT).all():
        assert summary.waits is summary.wait_ns is summary.longest_wait_ns is None
    else:
        waits = records["compute_ns"] - records["wait_ns"]
        assert summary.wait_ns == tuple(waits[records["stage"] == s].sum() for s in range(3))
        assert summary.waits == tuple(
            ((records["stage"] == s) & (waits >= 500)).sum() for s in range(3)
        )
        assert summary.longest_wait_ns == waits.max()
        assert summary.worker_wait is not None
        for worker in range(run.workers):
            alone, reached = 0, 0
            for task in records[records["worker"] == worker]:
                since = max(int(task["wait_ns"]), reached)
                alone += max(0, int(task["compute_ns"]) - since)
                reached = max(reached, int(task["end_ns"]))
            # A moment is in a task or in a wait, or else it would be there twice.
            assert summary.worker_wait[worker] * run.makespan_ns == pytest.approx(alone)


@given(run=launches())
def test_waits_for_others_are_those_before_they_had_ended(run: PolicyRecord) -> None:
    blocked = summarise(profile_of(run), run).blocked_ns
    if (run.records["wait_ns"] == ABSENT).all():
        assert blocked is None
        return
    total = 0
    for task in run.records[run.records["stage"] == 1]:
        same = (run.records["stage"] == 0) & (run.records["group"] == task["group"])
        ready = int(run.records["end_ns"][same].max(initial=0))
        total += max(0, min(ready, int(task["compute_ns"])) - int(task["wait_ns"]))
    assert blocked == total


@given(run=launches())
def test_planning_and_what_is_around_a_launch_are_said_or_unknown(run: PolicyRecord) -> None:
    summary = summarise(profile_of(run), run)
    took = [int(n) for n in (run.planned_ns if run.planned_ns is not None else []) if n >= 0]
    expected = (round(float(np.median(took))), max(took)) if took else None
    assert summary.planning_ns == expected
    if run.timing is None:
        assert summary.timing is None
        return
    assert summary.timing is not None
    for name, value in summary.timing.items():
        assert value == (None if getattr(run.timing, name) == ABSENT else getattr(run.timing, name))


@given(run=launches())
def test_the_tail_is_when_half_of_the_seats_are_empty_for_good(run: PolicyRecord) -> None:
    tail = summarise(profile_of(run), run).tail_ns
    worker, start, end = busy_spans(run)

    def busy_at(moment: float) -> int:
        return len(np.unique(worker[(start <= moment) & (moment < end)]))

    edges = sorted({0, run.makespan_ns, *start.tolist(), *end.tolist()})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    since = run.makespan_ns - tail
    assert all(2 * busy_at(m) < run.seats for m in middles if m > since)
    before = [m for m in middles if m < since]
    if before and tail < run.makespan_ns:
        assert 2 * busy_at(before[-1]) >= run.seats


def test_bytes_of_all_tasks_of_a_group_are_the_expert_s_weights() -> None:
    """Uneven chunks and K ranges: 160 outputs in chunks of 64, 100 inputs in 3 parts."""
    stages = (StageShape("gate_up", 160, 64, 100, 3), StageShape("down", 100, 64, 160, 2))
    places = [
        (stage, chunk, part)
        for stage, shape in enumerate(stages)
        for chunk in range(shape.chunks)
        for part in range(shape.parts)
    ]
    records = np.zeros(len(places), dtype=RECORD_DTYPE)
    for name in RECORD_DTYPE.names or ():
        records[name] = ABSENT
    for record, (stage, chunk, part) in zip(records, places, strict=True):
        record["stage"], record["chunk"], record["part"] = stage, chunk, part
        record["worker"] = record["expert"] = record["group"] = 0
        record["compute_ns"] = record["end_ns"] = 1
    run = one_run(records, 10)
    profile = profile_of(run, stages=stages, expert_tokens=np.array([4, 0, 0]))
    weights = 2 * (2 * 160 * 100 + 100 * 160)
    assert task_bytes(profile, run).sum() == weights == least_bytes(profile)
    plain = replace(profile, gated=False, element_size=4)
    assert task_bytes(plain, run).sum() == 4 * (160 * 100 + 100 * 160) == least_bytes(plain)


def one_run(records: Any, makespan: int, workers: int = 1, **other: Any) -> PolicyRecord:
    gone = np.full(workers, makespan, dtype=np.int64)
    values: dict[str, Any] = {
        "policy": "steal",
        "workers": workers,
        "seats": workers,
        "makespan_ns": makespan,
        "tail_gap_ns": 0,
        "steal_attempts": 0,
        "read_bytes": ABSENT,
        "first_ns": gone * 0,
        "last_ns": gone,
        "records": records,
    }
    return PolicyRecord(**{**values, **other})


# Who makes records


@pytest.fixture(scope="module")
def cpu_run() -> Any:
    generator = torch.Generator().manual_seed(3)
    hidden, inner, experts, tokens = 64, 96, 8, 300
    ids = torch.randint(0, experts, (tokens, 2), generator=generator) // 2
    x = torch.randn(tokens, hidden, generator=generator)
    w13 = torch.randn(experts, 2 * inner, hidden, generator=generator) / 8
    w2 = torch.randn(experts, hidden, inner, generator=generator) / 8
    workspace = weave_moe.Workspace(workers=4, trace=True)
    weights = torch.full((tokens, 2), 0.5)
    weave_moe.fused_experts(
        x, w13, w2, weights, ids, policy="window", workspace=workspace, backend="host"
    )
    return workspace.last_run


def test_the_cpu_engine_s_records_are_its_own_statistics(cpu_run: Any) -> None:
    run = from_run(cpu_run)
    summary = summarise(profile_of(run, expert_tokens=np.ones(8, np.int64)), run)
    assert summary.tasks == cpu_run.tasks
    assert summary.steals == cpu_run.steals
    assert summary.busy_share == pytest.approx(cpu_run.busy_share, abs=1e-6)
    assert summary.tail_gap_ns == cpu_run.tail_gap_ns
    assert summary.wait_ns is not None
    assert sum(summary.wait_ns) == cpu_run.dependency_wait_ns
    assert summary.worker_tasks == tuple(worker.tasks for worker in cpu_run.per_worker)
    assert run.recorded == {name: name not in ("load_ns", "store_ns") for name in MOMENTS}
    assert (run.records["sm"] == ABSENT).all()
    with pytest.raises(ValueError, match="trace"):
        from_run(replace(cpu_run, trace=None))


@pytest.mark.parametrize("policy", ["steal", "static_expert", "window"])
@pytest.mark.parametrize(("tokens", "held"), [(16, 0), (48, 100), (300, 0), (300, 40)])
def test_simulated_records_are_the_simulation_s_own_numbers(
    policy: str, tokens: int, held: int
) -> None:
    shape = LayerShape(hidden=512, intermediate=256, experts=32, top_k=4)
    rng = np.random.default_rng(tokens)
    ids = (rng.random((tokens, 32)) ** 3).argsort(axis=1)[:, :4]
    result = simulate(shape, ids, policy=policy, held=held, trace=True)
    run = from_simulated(result)
    from weave_moe.simulate import make_workload

    work = make_workload(shape, ids)
    profile = profile_of(
        run,
        producer="simulated",
        stages=work.stages,
        expert_tokens=tokens_of_experts(ids, 32),
    )
    summary = summarise(profile, run)
    assert summary.tasks == result.tasks
    assert summary.steals == result.steals
    timing = summary.timing
    assert timing is not None
    assert timing["call_ns"] == pytest.approx(1e3 * result.time_us, abs=1)
    if work.kernel.many:
        # Sort, tasks and combine are the whole of it.
        parts = (timing["sort_ns"], summary.makespan_ns, timing["combine_ns"])
        assert sum(part or 0 for part in parts) == pytest.approx(1e3 * result.makespan_us, abs=3)
        assert all(parts)
    else:
        assert timing["sort_ns"] is timing["combine_ns"] is None
    assert timing["recorded_call_ns"] is None
    assert summary.makespan_ns == pytest.approx(1e3 * result.experts_us, abs=2)
    assert summary.read_bytes == result.read_bytes
    assert summary.least_bytes == result.least_bytes
    # Each claim of a group reads its weights once; in L2 or not.
    assert summary.asked_bytes >= summary.read_bytes * 0.999
    assert summary.wait_ns is not None
    assert sum(summary.wait_ns) == pytest.approx(
        1e3 * result.dependency_wait_us, abs=2 * summary.tasks + 1
    )
    if not held:
        assert summary.busy_share == pytest.approx(result.busy_share, abs=1e-3)
        assert (run.records["sm"] == run.records["worker"]).all()
    else:
        assert run.seats == result.workers - held
        late = run.records[run.records["worker"] >= run.seats]
        assert (late["sm"] == ABSENT).all()
    with pytest.raises(ValueError, match="trace"):
        from_simulated(replace(result, trace=None))


@given(ids=st.lists(st.integers(-2, 9), max_size=40))
def test_tokens_of_experts(ids: list[int]) -> None:
    counts = tokens_of_experts(np.array(ids, dtype=np.int64), 7)
    assert counts.tolist() == [ids.count(expert) for expert in range(7)]


def test_a_trace_has_no_field_that_a_record_lacks() -> None:
    names = set(RECORD_DTYPE.names or ()) | {"start_ns"}  # which is a record's compute_ns
    assert set(TRACE_DTYPE.names or ()) <= names
    assert RECORD_DTYPE.itemsize == 80


# The file


@given(one=launches("steal"), two=launches("counter"), producer=st.sampled_from(sorted(PRODUCERS)))
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=30)
def test_a_file_holds_all_of_it(
    one: PolicyRecord, two: PolicyRecord, producer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    profile = profile_of(one, two, producer=producer)
    path = tmp_path_factory.getbasetemp() / "file.npz"
    path.write_bytes(save_profile(profile))
    again = load_profile(path)
    for name in ("producer", "title", "size", "routing", "machine", "stages", "gated", "notes"):
        assert getattr(again, name) == getattr(profile, name)
    assert again.expert_tokens.tolist() == profile.expert_tokens.tolist()
    for run, before in zip(again.runs, profile.runs, strict=True):
        assert (run.records == before.records).all()
        assert (run.planned_ns is None) == (before.planned_ns is None)
        assert run.timing == before.timing
        assert summarise(again, run) == summarise(profile, before)
    assert [run.policy for run in again.only(("counter",)).runs] == ["counter"]
    with pytest.raises(ValueError, match="'window' is not recorded, only steal, counter"):
        again.only(("window",))


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("worker", {"worker": 2}, "worker must be 0 .. 1, got 2 at 1"),
    ("stage", {"stage": 3}, "stage must be 0 .. 2"),
    ("victim", {"victim": 7}, "victim must be -1 .. 1"),
    ("self", {"victim": 0}, "victim must be another worker"),
    ("late", {"end_ns": 101}, "end_ns must be -1 .. 100"),
    ("end", {"end_ns": ABSENT}, "end_ns must be 0 .. 100"),
    ("back", {"compute_ns": 80, "end_ns": 70}, "compute_ns must not be after end_ns: record 1"),
    ("claim", {"claim_ns": 61}, "claim_ns must not be after compute_ns"),
    ("store", {"store_ns": 71}, "store_ns must not be after end_ns"),
    ("load", {"claim_ns": 30, "load_ns": 20}, "claim_ns must not be after load_ns"),
    ("order", {"compute_ns": 5}, "order of compute_ns"),
    ("expert", {"expert": EXPERTS}, "expert must be -1 .. 2"),
    ("no expert", {"expert": ABSENT}, "expert of gate_up must be 0 .. 2"),
    ("chunk", {"chunk": 3}, "chunk of gate_up must be 0 .. 2"),
    ("part", {"part": 1}, "part of gate_up must be 0 .. 0"),
]


def two_records(**second: int) -> Any:
    records = np.zeros(2, dtype=RECORD_DTYPE)
    for name in ("victim", "sm", "load_ns", "store_ns", "wait_ns", "claim_ns"):
        records[name] = ABSENT
    records["compute_ns"], records["end_ns"] = [10, 60], [40, 70]
    for name, value in second.items():
        records[name][1] = value
    return records


@pytest.mark.parametrize(("_name", "change", "message"), BAD, ids=[entry[0] for entry in BAD])
def test_records_that_contradict_themselves_are_refused(
    _name: str, change: dict[str, int], message: str
) -> None:
    profile_of(one_run(two_records(), 100, workers=2))
    with pytest.raises(ValueError, match=re.escape(message)):
        profile_of(one_run(two_records(**change), 100, workers=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seats": 3}, "seats at most workers"),
        ({"makespan_ns": 1 << 50}, "makespan_ns must be"),
        ({"makespan_ns": 100.0}, "makespan_ns must be"),
        ({"read_bytes": -2}, "read_bytes must be"),
        ({"policy": ""}, "policy must be a name"),
        ({"first_ns": np.zeros(3, np.int64)}, "first_ns must be int64 [2]"),
        ({"last_ns": np.full(2, 101)}, "last_ns must be -1 .. 100"),
        ({"records": np.zeros(2, TRACE_DTYPE)}, "records must be a row of RECORD_DTYPE"),
        ({"planned_ns": np.zeros(3, np.int64)}, "planned_ns must be int64 [2]"),
        ({"planned_ns": np.array([0, 101])}, "planned_ns must be -1 .. 100"),
        ({"planned_ns": np.array([11, 0])}, "planned_ns must not be after compute_ns: record 0"),
        (
            {"planned_ns": np.array([1, 1]), "first_ns": np.array([0, 2])},
            "planned_ns must not be before first_ns: worker 1",
        ),
    ],
)
def test_launches_that_contradict_themselves_are_refused(
    change: dict[str, Any], message: str
) -> None:
    right = one_run(two_records(), 100, workers=2)
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(right, **change)


@pytest.mark.parametrize("value", [-2, 1 << 50, 1.0, True, "3"])
@pytest.mark.parametrize("name", [field.name for field in fields(Timing)])
def test_times_that_are_none_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be -1 .. "):
        Timing(**{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"producer": "tpu"}, "producer must be cpu, gpu, simulated"),
        ({"expert_tokens": np.zeros(0, np.int64)}, "expert_tokens"),
        ({"expert_tokens": np.array([-1, 2, 3])}, "expert_tokens must be 0"),
        ({"element_size": 3}, "element_size"),
        ({"runs": ()}, "at least one policy"),
    ],
)
def test_profiles_that_contradict_themselves_are_refused(
    change: dict[str, Any], message: str
) -> None:
    profile = profile_of(one_run(two_records(), 100, workers=2))
    with pytest.raises(ValueError, match=message):
        replace(profile, **change)
    with pytest.raises(ValueError, match="once"):
        replace(profile, runs=profile.runs * 2)


@pytest.fixture(scope="module")
def saved() -> bytes:
    return save_profile(profile_of(one_run(two_records(), 100, workers=2)))


def test_files_of_another_kind_are_refused(saved: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with pytest.raises(ValueError, match=r"a\.npz: No such file"):
        load_profile(path)
    for content in (b"", b"not a file", b"PK\x03\x04rest", saved[: len(saved) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.npz: "):
            load_profile(path)
    np.savez(path, other=np.zeros(3))
    with pytest.raises(ValueError, match="no header"):
        load_profile(path)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(ValueError, match="header"):
        load_profile(tmp_path / "b.npy")
    np.savez(path, header=np.array("[" * 100_000 + "]" * 100_000))
    with pytest.raises(ValueError, match=r"a\.npz: .*recursion"):
        load_profile(path)
    # An array of objects is code to run, and is not run.
    np.savez(path, header=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="damaged, or no npz file"):
        load_profile(path)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_refused_or_whole(saved: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(saved) - 1))
    damaged = bytearray(saved)
    damaged[at] ^= data.draw(st.integers(1, 255))
    try:
        profile = load_profile(io.BytesIO(bytes(damaged)))  # type: ignore[arg-type]
    except ValueError:
        return
    assert (profile.runs[0].records == two_records()).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "format must be 2, got 99"),
        ({"format": 1}, "format must be 2, got 1"),
        ({"title": 3}, "title must be text"),
        ({"stages": []}, "stages must be gate_up and down"),
        ({"producer": "x"}, "producer must be"),
        ({"runs": [{}]}, "policy is missing"),
        ({"runs": 5}, "a.npz: "),
    ],
)
def test_headers_that_are_wrong_are_refused(
    saved: bytes, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with np.load(io.BytesIO(saved)) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file.files}
    header = {**json.loads(str(arrays["header"])), **change}
    arrays["header"] = np.array(json.dumps(header))
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load_profile(tmp_path / "a.npz")


# The trace


@given(one=launches("steal"), two=launches("counter"))
@settings(max_examples=40)
def test_chrome_events_are_the_records(one: PolicyRecord, two: PolicyRecord) -> None:
    profile = profile_of(one, two, producer="simulated")
    known = [run.timing for run in profile.runs if run.timing is not None]
    origin = max([0, *(timing.sort_ns for timing in known)])

    def moment(ts: float) -> int:
        return round(ts * 1000) - origin

    document = json.loads(chrome_trace(profile, {"note": "kept"}))
    assert document["otherData"]["note"] == "kept"
    assert "PREDICTED" in document["otherData"]["what"]
    absent = {name for name in MOMENTS if not profile.recorded[name]}
    assert set(document["otherData"]["not_recorded"]) == absent
    events = document["traceEvents"]
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    for pid, run in enumerate((one, two), start=1):
        mine = [event for event in events if event["pid"] == pid]
        tracks = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert set(tracks) - {run.workers} == set(range(run.workers))
        assert tracks.get(run.workers, "launches of the call") == "launches of the call"
        process = next(e["args"]["name"] for e in mine if e["name"] == "process_name")
        assert process.startswith(f"predicted: {run.policy} (")
        tasks = [e for e in mine if e["ph"] == "X" and e["cat"].split(",")[0] in STAGES]
        # A task's slice ends where the worker's next one begins.
        until = run.records["end_ns"].tolist()
        following: dict[int, int] = {}
        for number in reversed(range(len(until))):
            worker = int(run.records["worker"][number])
            if worker in following:
                later = int(run.records["compute_ns"][following[worker]])
                until[number] = min(until[number], later)
            following[worker] = number
        drawn = sorted(
            (
                *(event["tid"], event["cat"].split(",")[0]),
                *(event["args"][name] for name in ("expert", "group", "chunk", "part", "sm")),
                event["args"].get("stolen_from", ABSENT),
                *(event["args"].get(name, ABSENT) for name in MOMENTS),
                *(moment(event["ts"]), moment(event["ts"] + event["dur"])),
            )
            for event in tasks
        )
        expected = sorted(
            (
                *(int(r["worker"]), STAGES[r["stage"]]),
                *(int(r[name]) for name in ("expert", "group", "chunk", "part", "sm", "victim")),
                *(int(r[name]) for name in MOMENTS),
                *(int(r["compute_ns"]), until[number]),
            )
            for number, r in enumerate(run.records)
        )
        assert drawn == expected
        waits = [e for e in mine if e.get("cat") == "wait"]
        assert all(e["dur"] >= 0.5 for e in waits)
        began = (moment(e["ts"] + e["dur"]) for e in waits)
        long = run.records["compute_ns"] - run.records["wait_ns"] >= 500
        waited = run.records["compute_ns"][long & (run.records["wait_ns"] != ABSENT)]
        assert set(began) <= set(waited.tolist())
        plans = [e for e in mine if e.get("cat") == "plan"]
        planned = np.zeros(0) if run.planned_ns is None else run.planned_ns
        assert [(e["tid"], moment(e["ts"] + e["dur"])) for e in sorted(plans, key=tid_of)] == [
            (worker, int(n)) for worker, n in enumerate(planned) if n > 0
        ]


def tid_of(event: dict[str, Any]) -> int:
    tid: int = event["tid"]
    return tid


@given(one=launches("steal"), two=launches("counter"))
@settings(max_examples=60)
def test_slices_of_a_track_nest_or_follow_each_other(one: PolicyRecord, two: PolicyRecord) -> None:
    """Viewers drop what crosses another slice's end."""
    events = json.loads(chrome_trace(profile_of(one, two), {}))["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            span = (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in tracks.values():
        for (a, b), (c, d) in itertools.combinations(spans, 2):
            inside = (a <= c and d <= b) or (c <= a and b <= d)
            assert inside or b <= c or d <= a, (a, b, c, d)


@given(run=launches(), other=launches("counter"))
def test_launches_around_this_one_have_a_track_of_their_own(
    run: PolicyRecord, other: PolicyRecord
) -> None:
    document = json.loads(chrome_trace(profile_of(run, other), {}))
    known = [one.timing for one in (run, other) if one.timing is not None]
    origin = max([0, *(timing.sort_ns for timing in known)])
    for pid, one in enumerate((run, other), start=1):
        found = [
            (e["name"], round(1000 * e["ts"]) - origin, round(1000 * e["dur"]))
            for e in document["traceEvents"]
            if e.get("cat") == "launch" and e["pid"] == pid
        ]
        timing = one.timing
        if timing is None or timing.sort_ns == timing.combine_ns == ABSENT:
            assert found == []
            continue
        want = [("gate_up and down", 0, one.makespan_ns)]
        if timing.sort_ns > 0:
            want.append(("sort", -timing.sort_ns, timing.sort_ns))
        if timing.combine_ns > 0:
            want.append(("combine", one.makespan_ns, timing.combine_ns))
        assert sorted(found) == sorted(want)


@given(run=launches())
def test_each_stolen_task_is_linked_to_its_victim(run: PolicyRecord) -> None:
    events = json.loads(chrome_trace(profile_of(run), {}))["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    stolen = run.records[run.records["victim"] >= 0]
    assert len(starts) == len(ends) == len(stolen)
    assert starts.keys() == ends.keys()
    slices = [e for e in events if e["ph"] == "X"]

    def within(flow: dict[str, Any], tid: int) -> bool:
        return any(e["tid"] == tid and e["ts"] <= flow["ts"] <= e["ts"] + e["dur"] for e in slices)

    for identity, start in starts.items():
        end = ends[identity]
        assert start["ts"] <= end["ts"]
        assert within(start, start["tid"])
        assert within(end, end["tid"])
        assert end["bp"] == "e"
    links = sorted((e["tid"], starts[i]["tid"]) for i, e in ends.items())
    assert links == sorted(zip(stolen["worker"].tolist(), stolen["victim"].tolist(), strict=True))


def test_loads_and_stores_are_drawn_where_they_are_recorded() -> None:
    records = two_records(load_ns=50, store_ns=65)
    events = json.loads(chrome_trace(profile_of(one_run(records, 100, 2)), {}))["traceEvents"]
    store = [e for e in events if e.get("cat") == "store"]
    assert [(e["ts"], e["dur"]) for e in store] == [(0.065, 0.005)]
    load = [e for e in events if e.get("cat") == "load"]
    assert [(e["ph"], e["ts"]) for e in load] == [("b", 0.05), ("e", 0.06)]
    # Stores that go on beside the worker's next task are slices of their own.
    records["store_ns"][0], records["end_ns"][0] = 35, 66
    events = json.loads(chrome_trace(profile_of(one_run(records, 100, 2)), {}))["traceEvents"]
    store = [e for e in events if e.get("cat") == "store"]
    drawn = [(e["ph"], e["ts"], round(e.get("dur", 0), 3)) for e in store]
    assert drawn == [("X", 0.035, 0.025), ("b", 0.06, 0), ("X", 0.065, 0.005), ("e", 0.066, 0)]


# The picture and the page


@given(run=launches())
@settings(max_examples=5, deadline=None)
def test_the_heat_map_is_a_picture(run: PolicyRecord) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    profile = profile_of(run, title="a $title_{ of any \\kind")
    picture = heat_map(profile, (summarise(profile, run),))
    assert picture is not None
    pixels = image.imread(io.BytesIO(picture))
    assert pixels.shape[1] == 1440


def test_busy_is_bright_and_idle_is_dark_in_the_heat_map() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    records = two_records()
    records["compute_ns"], records["end_ns"] = [0, 50], [50, 100]
    records["worker"] = [0, 1]
    run = one_run(records, 100, workers=2)
    profile = profile_of(run)
    picture = heat_map(profile, (summarise(profile, run),))
    assert picture is not None
    pixels = image.imread(io.BytesIO(picture))[..., :3]
    height, width = pixels.shape[:2]
    top, panel = 1.05 * 120, 0.7 * 120
    row = [int(top + panel * part) for part in (0.25, 0.75)]
    column = [int(width * (0.085 + (0.93 - 0.085) * part)) for part in (0.25, 0.75)]
    bright = np.array([[pixels[y, x].sum() for x in column] for y in row])
    assert (bright > 1.5).tolist() == [[True, False], [False, True]]
    assert height > top + panel


class Page(HTMLParser):
    """Elements and the text of each script, as a browser's parser would cut them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self.inside] = self.texts.get(self.inside, "") + data


HOSTILE = (
    "</script x><!--<script></script><script>alert(1)</script><img src=//a.example onerror=x>"
    " & \"quotes' \u2028 é"
)


@given(run=launches(policy="steal"))
@settings(max_examples=20, deadline=None)
def test_the_page_carries_the_records_and_no_text_of_a_file_becomes_markup(
    run: PolicyRecord,
) -> None:
    pytest.importorskip("jinja2")
    run = replace(run, policy=HOSTILE)
    fields = dict.fromkeys(("title", "size", "routing", "machine"), HOSTILE)
    profile = profile_of(run, notes=(HOSTILE,), **fields)
    content = html_report(profile, (summarise(profile, run),))
    assert content is not None
    page = Page(content.decode())
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 2
    assert "img" not in tags
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href"):
            assert attributes.get(name, "data:,") == "data:,", tag
    policy = next(a for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in str(policy["content"])
    inside = content.decode().split('id="data">')[1].split("</script>")[0]
    # Not one of these, so nothing in it can end the element or begin another.
    assert not set("<>&") & set(inside)
    data = json.loads(inside)
    shown = data["runs"][0]
    assert shown["policy"] == HOSTILE
    order = np.lexsort((run.records["compute_ns"], run.records["worker"]))
    records = run.records[order]

    def column(name: str) -> Any:
        value = shown["columns"][name]
        return np.full(len(records), value) if isinstance(value, int) else np.array(value, int)

    for name in ("worker", "sm", "stage", "expert", "group", "chunk", "part", "victim"):
        assert (column(name) == records[name]).all(), name
    assert (column("compute") == records["compute_ns"]).all()
    assert (column("compute") + column("length") == records["end_ns"]).all()
    for name, moment in (("claimed", "claim_ns"), ("waited", "wait_ns")):
        back = np.where(column(name) < 0, ABSENT, column("compute") - column(name))
        assert (back == records[moment]).all()
    back = np.where(column("stored") < 0, ABSENT, records["end_ns"] - column("stored"))
    assert (back == records["store_ns"]).all()
    assert (column("load") == records["load_ns"]).all()


def table_of(page: str) -> dict[str, list[str]]:
    rows = re.findall(r'<tr><th scope="row">(.*?)<small>.*?</th>(.*?)</tr>', page, re.DOTALL)
    return {label: re.findall(r"<td.*?>(.*?)</td>", cells, re.DOTALL) for label, cells in rows}


def test_what_was_not_recorded_is_said_and_what_is_predicted_too() -> None:
    pytest.importorskip("jinja2")
    bare = one_run(two_records(), 100, workers=2, steal_attempts=ABSENT)
    for producer, words in PRODUCERS.items():
        profile = profile_of(bare, producer=producer)
        content = html_report(profile, (summarise(profile, bare),))
        assert content is not None
        page = content.decode()
        assert words in page
        assert ("<title>Predicted: " in page) == (producer == "simulated")
        assert "claim_ns, wait_ns, load_ns, store_ns: absent" in page
        table = table_of(page)
        waits = "waits before tasks" if producer == "gpu" else "dependency waits"
        assert table[waits] == ["not recorded"]
        assert table["weights read, over the least"] == ["not recorded"]
        assert table["thefts / looks"] == ["0 / not known"]
    full = two_records()
    for name in ("claim_ns", "wait_ns", "load_ns"):
        full[name] = [9, 50]
    full["store_ns"] = full["end_ns"]
    run = one_run(full, 100, workers=2, read_bytes=5000)
    profile = profile_of(run)
    content = html_report(profile, (summarise(profile, run),))
    assert content is not None
    assert b'id="absent"' not in content
    assert b"not recorded" not in content


def test_the_best_policy_is_marked_but_no_cpu_s_time() -> None:
    pytest.importorskip("jinja2")
    slow = one_run(two_records(), 200, workers=2, policy="counter", tail_gap_ns=9)
    fast = one_run(two_records(), 100, workers=2)
    for producer, marked in (("gpu", True), ("cpu", False)):
        profile = profile_of(slow, fast, producer=producer)
        content = html_report(profile, tuple(summarise(profile, run) for run in profile.runs))
        assert content is not None
        rows = dict(
            re.findall(
                r'<th scope="row">(.*?)<small>.*?</th>(.*?)</tr>', content.decode(), re.DOTALL
            )
        )
        assert ('class="best">100 ns' in rows["makespan"]) == marked
        assert 'class="best">0 ns' in rows["tail gap"]
        assert rows["tail gap"].count("best") == 1


# The command


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["profile", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


FILES = {"profile.html", "profile.json", "profile.png", "profile.npz"}


def test_the_cpu_engine_is_recorded_and_read_again(tmp_path: Path) -> None:
    out = tmp_path / "one"
    tokens = ("--tokens", "120", "--workers", "3")
    result = call(*tokens, "--policy", "auto,steal,window", "--out", str(out))
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "with a Hopper GPU, --backend cuda records" in words
    assert "load_ns, store_ns: not recorded" in words
    assert "PREDICTED" not in words
    assert {path.name for path in out.iterdir()} == FILES
    profile = load_profile(out / "profile.npz")
    assert [run.policy for run in profile.runs] == ["auto", "steal", "window"]
    assert profile.producer == "cpu"
    again = tmp_path / "two"
    result = call("--from", str(out / "profile.npz"), "--policy", "window", "--out", str(again))
    assert result.exit_code == 0, result.output
    assert [run.policy for run in load_profile(again / "profile.npz").runs] == ["window"]
    assert {path.name for path in again.iterdir()} == FILES


def test_a_simulation_is_labelled_as_predicted_everywhere(tmp_path: Path) -> None:
    arguments = ("--simulate", "--preset", "qwen3-30b", "--tokens", "8", "--policy", "window")
    result = call(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "PREDICTED by simulation, nothing was run" in result.output
    assert "error of simulated times" in " ".join(result.output.split())
    assert load_profile(tmp_path / "profile.npz").predicted
    assert "PREDICTED" in (tmp_path / "profile.html").read_text(encoding="utf-8")
    trace = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))
    assert trace["otherData"]["producer"] == "simulated"
    tracks = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert "SM 3, worker 3" in tracks


def test_a_record_made_elsewhere_is_reported(tmp_path: Path) -> None:
    """What a GPU build has to hand over, and nothing else."""
    records = two_records(sm=17)
    profile = profile_of(one_run(records, 100, workers=2, read_bytes=123_456))
    (tmp_path / "gpu.npz").write_bytes(save_profile(profile))
    out = tmp_path / "out"
    result = call("--from", str(tmp_path / "gpu.npz"), "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document["producer"] == "gpu"
    assert document["policies"][0]["read_bytes"] == 123_456
    assert set(document["files"]) == FILES
    assert document["recorded"]["claim_ns"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--backend", "cuda"],
            "--simulate predicts its records, and --backend host records the CPU engine",
        ),
        (["--from", "x.npz", "--tokens", "3"], "leave out --tokens"),
        (["--from", "x.npz", "--simulate"], "leave out --simulate"),
        (["--from", "x.npz", "--seed", "0"], "leave out --seed"),
        (["--from", "x.npz"], "--from: x.npz: No such file"),
        (["--simulate", "--workers", "3"], "--workers belongs to a run"),
        (["--simulate", "--machine", "abacus"], "--machine"),
        (["--simulate", "--held", "132"], "--held must be 0 .. 131"),
        (["--machine", "h200"], "--machine belongs to --simulate"),
        (["--held", "1"], "--held belongs to --simulate"),
        (["--policy", "fair"], "--policy must be"),
        (["--preset", "nothing"], "nothing"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = call(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_too_many_tasks_for_a_page_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert MOST_TASKS == 1_000_000
    monkeypatch.setattr("weave_moe.profile.command.MOST_TASKS", 1)
    path = tmp_path / "a.npz"
    path.write_bytes(save_profile(profile_of(one_run(two_records(), 100, workers=2))))
    result = call("--from", str(path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "2 tasks are too many" in result.output


def test_a_wrong_result_is_not_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from weave_moe.run import compare

    monkeypatch.setitem(compare.ERROR_LIMIT, "float32", -1.0)
    result = call("--tokens", "20", "--dtype", "float32", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1, result.output
    assert "WRONG" in result.output
    assert not (tmp_path / "out").exists()


def test_without_the_extras_the_rest_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(save_profile(profile_of(one_run(two_records(), 100, workers=2))))
    code = (
        "import sys\n"
        "sys.modules['matplotlib'] = sys.modules['markupsafe'] = None\n"
        "from weave_moe.profile.command import ProfileOptions, profile_command\n"
        "from pathlib import Path\n"
        f"profile_command(ProfileOptions(source=Path({str(path)!r}), out=Path({str(tmp_path)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'weave-moe[plot]'" in done.stdout
    assert "pip install 'weave-moe[report]'" in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"a.npz", "profile.json", "profile.npz"}


def test_reading_records_needs_no_torch_and_no_extras() -> None:
    code = (
        "import sys, weave_moe.profile\n"
        "loaded = {'torch', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_file_is_a_plain_zip_of_arrays(saved: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(saved)) as file:
        assert sorted(file.namelist()) == [
            *("expert_tokens.npy", "first_ns_0.npy", "header.npy", "last_ns_0.npy"),
            "records_0.npy",
        ]
