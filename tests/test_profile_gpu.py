"""Records of the GPU kernel without a GPU: launches that are made up, read by the real reader.

`FakeGpu` stands where the kernel is. A launch is a simulated one; what the kernel would have left
in device memory (SM clocks by block, counters, results) is written into CPU tensors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import weave_moe
from test_profile import profile_of, table_of
from weave_moe.backends import cuda
from weave_moe.cli import cli
from weave_moe.profile import ABSENT, RECORD_DTYPE, PolicyRecord, load_profile
from weave_moe.profile import gpu as producer
from weave_moe.profile.gpu import COLUMNS, END, LAUNCHES, PLANNED, START, SWEEPS
from weave_moe.profile.measures import summarise
from weave_moe.profile.producers import Blocks, from_gpu, from_simulated
from weave_moe.profile.records import MOMENTS
from weave_moe.run.errors import InputError
from weave_moe.schedule import StageShape
from weave_moe.schedule.granularity import SHARED_BYTES
from weave_moe.shapes import LayerShape
from weave_moe.simulate import make_workload, simulate
from weave_moe.simulate.workload import Workload
from weave_moe.tools.machine import Gpu

SMS = 132
H200 = Gpu(0, "NVIDIA H200", (9, 0), SMS, SHARED_BYTES, 141 << 30, True)
TICK = 32
"""Step of the device's timer here."""
NOW = 1_760_000_000 * 10**9
"""What that timer says: nanoseconds since 1970."""


def rounding(moment: float) -> float:
    """How far the reader may move a moment that was `moment` on the device's timer: it may reckon
    in floats, where a timer's 61 bits do not fit."""
    return 1 + 2 * float(np.spacing(moment))


# Launches that are made up


def with_loads_and_stores(records: Any, makespan: int) -> Any:
    """What a simulation does not know: some moment for the loads and the store of each task, and
    stores that go on beside the worker's next task."""
    out = records.copy()
    tiles = out["stage"] < 2
    out["load_ns"] = np.where(tiles, (out["claim_ns"] + out["compute_ns"]) // 2, ABSENT)
    out["store_ns"] = (out["compute_ns"] + 3 * out["end_ns"]) // 4
    out["store_ns"][~tiles] = out["compute_ns"][~tiles]
    out["end_ns"][tiles] = np.minimum(out["end_ns"][tiles] + 600, makespan)
    return out


def device_records(run: PolicyRecord, combine_tokens: int) -> Any:
    """A run's records as the kernel has them, by when they were claimed."""
    out = run.records.astype(cuda.TRACE_DTYPE)
    combine = out["stage"] == 2
    out["chunk"][combine] *= combine_tokens
    return out[np.argsort(out["claim_ns"], kind="stable")]


@dataclass(frozen=True, eq=False)
class Launched:
    """A launch as device memory holds it: records in ticks of SM clocks, and both clocks' ends."""

    trace: cuda._Trace
    clock: Any


def in_device_memory(
    records: Any, workers: int, makespan: int, began: int, rate: Any, offset: Any
) -> Launched:
    """`records` with each block's moments by its own clock, of `rate` ticks a nanosecond."""
    rate, offset = np.asarray(rate), np.asarray(offset, dtype=np.int64)
    records = records[np.argsort(records["worker"], kind="stable")]
    worker = records["worker"]
    count = np.bincount(worker, minlength=workers)
    trace = cuda._Trace(torch.device("cpu"), workers, max(1, int(count.max(initial=0))))
    for name in MOMENTS:
        ticks = offset[worker] + np.rint(records[name] * rate[worker]).astype(np.int64)
        records[name] = np.where(records[name] == ABSENT, ABSENT, ticks)
    place = np.arange(len(records)) - (np.cumsum(count) - count)[worker]
    memory = trace.records.numpy().view(cuda.TRACE_DTYPE).reshape(workers, -1)
    memory[worker, place] = records
    clock = trace.clock.numpy()
    clock[:, 0], clock[:, 1] = began, offset
    clock[:, 2], clock[:, 3] = began + makespan, offset + np.rint(makespan * rate).astype(np.int64)
    return Launched(trace, clock)


@st.composite
def traces(draw: st.DrawFn) -> tuple[Any, int, int]:
    """Records of a GPU, workers, makespan: tasks follow each other, but the next may begin before
    the last one's stores are over."""
    workers = draw(st.integers(1, 5))
    count = draw(st.integers(0, 25))
    records = np.zeros(count, dtype=cuda.TRACE_DTYPE)
    free = [draw(st.integers(0, 50)) for _ in range(workers)]
    for number, record in enumerate(records):
        worker = draw(st.integers(0, workers - 1))
        stage = draw(st.integers(0, 2))
        claim = free[worker] + draw(st.integers(0, 900))
        wait = claim + draw(st.integers(0, 900))
        compute = wait + draw(st.sampled_from([0, 3, 700, 4000]))
        store = compute + (0 if stage == 2 else draw(st.integers(0, 5000)))
        end = store + draw(st.integers(0, 3000))
        record["worker"], record["sm"], record["stage"] = worker, 40 + worker, stage
        record["expert"] = ABSENT if stage == 2 else 1
        # So that no place is there twice.
        record["group"] = ABSENT if stage == 2 else number
        record["chunk"] = 2 * number if stage == 2 else draw(st.integers(0, 3))
        others = [w for w in range(workers) if w != worker]
        record["victim"] = draw(st.sampled_from([ABSENT, *others]))
        load = ABSENT if stage == 2 else draw(st.integers(claim, compute))
        for name, moment in zip(MOMENTS, (claim, wait, load, compute, store, end), strict=True):
            record[name] = moment
        free[worker] = store + draw(st.integers(0, end - store))
    makespan = int(records["end_ns"].max(initial=0)) + draw(st.integers(1, 900))
    return records, workers, makespan


def tasks_of(records: Any) -> tuple[int, int, int]:
    up, down, combine = (int((records["stage"] == stage).sum()) for stage in range(3))
    return up, down, combine


# From a trace to a record


@given(drawn=traces(), data=st.data())
def test_a_trace_becomes_a_record_with_nothing_lost(
    drawn: tuple[Any, int, int], data: st.DataObject
) -> None:
    trace, workers, _ = drawn
    order = data.draw(st.permutations(range(len(trace))))
    run = from_gpu(
        trace[list(order)], "steal", workers=workers, tasks=tasks_of(trace), combine_tokens=2
    )
    want = trace.astype(RECORD_DTYPE)
    want["chunk"][want["stage"] == 2] //= 2
    assert sorted(run.records.tolist()) == sorted(want.tolist())
    assert run.makespan_ns == trace["end_ns"].max(initial=0)
    summary = summarise(profile_like(run), run)
    assert summary.steals == (trace["victim"] >= 0).sum()
    assert summary.read_bytes is None
    assert summary.wait_ns is not None or not len(trace)
    # What the blocks did without a task is not known from the tasks.
    assert (run.first_ns == ABSENT).all()
    for worker in range(workers):
        mine = trace["end_ns"][trace["worker"] == worker]
        assert run.last_ns[worker] == mine.max(initial=ABSENT)


def profile_like(run: PolicyRecord) -> Any:
    stages = (StageShape("gate_up", 256, 64, 100), StageShape("down", 256, 64, 128))
    return profile_of(run, stages=stages)


@given(drawn=traces(), data=st.data())
def test_the_reader_s_clocks_do_not_move_a_moment(
    drawn: tuple[Any, int, int], data: st.DataObject
) -> None:
    """SM clocks of any offset and rate, read back by the backend's own reader."""
    trace, workers, makespan = drawn
    rate = [data.draw(st.floats(1.0, 2.0)) for _ in range(workers)]
    offset = [data.draw(st.integers(1, 1 << 50)) for _ in range(workers)]
    began = data.draw(st.integers(1, 1 << 60))
    launched = in_device_memory(trace, workers, makespan, began, rate, offset)
    workspace = SimpleNamespace(_cuda_trace=launched.trace)
    found = cuda.take_trace(workspace)
    run = from_gpu(found, "steal", workers=workers, tasks=tasks_of(trace), combine_tokens=2)
    want = from_gpu(trace, "steal", workers=workers, tasks=tasks_of(trace), combine_tokens=2)
    key = ("worker", "stage", "group", "chunk")
    got, expected = (np.sort(one.records, order=key) for one in (run, want))
    slack = rounding(float(began + makespan))
    for name in MOMENTS:
        assert ((got[name] == ABSENT) == (expected[name] == ABSENT)).all()
        assert (np.abs(got[name] - expected[name]) <= slack).all(), name


@given(drawn=traces(), data=st.data())
def test_a_trace_that_is_not_whole_is_refused(
    drawn: tuple[Any, int, int], data: st.DataObject
) -> None:
    trace, workers, _ = drawn
    tasks = tasks_of(trace)

    def refused(other: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            from_gpu(other, "steal", workers=workers, tasks=tasks, combine_tokens=2)

    tiles = np.flatnonzero(trace["stage"] < 2)
    if len(trace):
        lost = data.draw(st.integers(0, len(trace) - 1))
        refused(np.delete(trace, lost), "trace must have .* tasks, got")
    if len(tiles) > 1:
        twice = trace.copy()
        a, b = tiles[:2]
        for name in ("stage", "group", "chunk"):
            twice[name][b] = twice[name][a]
        with pytest.raises(ValueError, match=r"each .* task once"):
            from_gpu(twice, "steal", workers=workers, tasks=tasks_of(twice), combine_tokens=2)
    refused(np.zeros(2, [("worker", "<i4")]), "trace must have the fields worker, sm")


@given(
    blocks=st.lists(
        st.tuples(*[st.integers(0, 60)] * 2, st.integers(1, 60)), min_size=1, max_size=8
    )
)
def test_seats_are_the_most_blocks_there_at_a_time(blocks: list[tuple[int, int, int]]) -> None:
    """Blocks that wait for an SM of another one's are no seats of their own."""
    first = np.array([a for a, _, _ in blocks], dtype=np.int64)
    last = np.array([a + n for a, _, n in blocks], dtype=np.int64)
    planned = np.array([a + p for a, p, _ in blocks], dtype=np.int64)
    none = np.zeros(0, dtype=cuda.TRACE_DTYPE)
    run = from_gpu(
        *(none, "steal"),
        workers=len(blocks),
        tasks=(0, 0, 0),
        combine_tokens=1,
        blocks=Blocks(first, last, np.minimum(planned, last), 7),
    )
    there = [sum(a <= t <= z for a, z in zip(first, last, strict=True)) for t in range(121)]
    assert run.seats == max(there)
    assert run.makespan_ns == last.max()
    assert run.tail_gap_ns == last.max() - last.min()
    assert run.steal_attempts == 7
    took = np.minimum(planned, last) - first
    planning = summarise(profile_like(run), run).planning_ns
    assert planning == (round(float(np.median(took))), took.max())


def test_a_block_claims_nothing_before_it_has_planned() -> None:
    """The timer of the plan is coarser than the clock of the tasks: the tasks decide."""
    trace = np.zeros(1, dtype=cuda.TRACE_DTYPE)
    trace["victim"] = trace["part"] = ABSENT
    for number, name in enumerate(MOMENTS):
        trace[name] = 100 + number
    blocks = Blocks(*(np.array([n, n], dtype=np.int64) for n in (10, 500, 256)))
    run = from_gpu(trace, "steal", workers=2, tasks=(1, 0, 0), combine_tokens=1, blocks=blocks)
    assert run.planned_ns is not None
    assert run.planned_ns.tolist() == [100, 256]
    late = Blocks(*(np.array([n, n], dtype=np.int64) for n in (102, 103, 128)))
    run = from_gpu(trace, "steal", workers=2, tasks=(1, 0, 0), combine_tokens=1, blocks=late)
    assert run.first_ns.tolist() == [100, 102]
    assert run.last_ns.tolist() == [105, 103]
    assert run.planned_ns is not None
    assert run.planned_ns.tolist() == [100, 103]
    assert run.makespan_ns == 105


@given(
    clock=st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 9000)), min_size=1, max_size=6),
    began=st.integers(0, 1 << 61),
    absent=st.integers(0, 6),
    many=st.booleans(),
)
def test_arrivals_and_departures_are_on_the_axis_of_the_records(
    clock: list[tuple[int, int]], began: int, absent: int, many: bool
) -> None:
    table = np.array([(began + a, 5, began + a + n, 9) for a, n in clock], dtype=np.int64)
    left = np.zeros((len(clock), COLUMNS), dtype=np.int64)
    left[:, PLANNED] = table[:, 0] + 3
    left[:, SWEEPS] = 2
    if absent < len(clock) > 1:
        table[absent] = left[absent] = 0  # a block that never came
    blocks, times = producer._blocks(table, left, many=many)
    there = [i for i in range(len(clock)) if table[i, 0]]
    first = min(table[i, 0] for i in there)
    for i in range(len(clock)):
        if i not in there:
            assert blocks.first[i] == blocks.last[i] == ABSENT
            continue
        assert blocks.first[i] == table[i, 0] - first
        assert blocks.last[i] == table[i, 2] - first
        if not many:
            assert blocks.planned is not None
            # No later than the block's end.
            assert blocks.planned[i] == min(table[i, 0] + 3, table[i, 2]) - first
    assert (blocks.planned is None) == many
    assert blocks.looks == 2 * len(there)
    assert len(times) == 2 * len(there)
    # Counters that a kernel does not keep are not zero of anything.
    bare, _ = producer._blocks(table, 0 * left, many=many)
    assert bare.planned is None
    assert bare.looks == ABSENT


# A GPU that is made up


@dataclass
class FakeGpu:
    """Experts "on a GPU": each call takes a simulated launch's time on a device clock of its own.

    slower: what recording makes of a launch.  scale: a launch's length by its number, of a
    policy's.  sort, combine: nanoseconds.  lose: records that are missing.
    """

    slower: float = 1.05
    scale: Callable[[int], float] = lambda number: 1.0
    sort: int = 9_600
    combine: int = 6_400
    lose: int = 0
    wrong: Callable[[FakeGpu, str], bool] = lambda fake, policy: False
    counters: bool = True
    now: int = NOW // TICK * TICK
    calls: list[tuple[str, bool, int]] = field(default_factory=list)
    recorded: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    results: dict[Any, Tensor] = field(default_factory=dict)
    runs: dict[str, PolicyRecord] = field(default_factory=dict)
    work: Workload | None = None

    def experts(self, x: Tensor, w13: Tensor, w2: Tensor, *rest: Any, **options: Any) -> Tensor:
        """Stands for `fused_experts`."""
        policy, workspace = options.pop("policy"), options.pop("workspace")
        assert options.pop("backend") == "cuda"
        out: Tensor = options.pop("out")
        _, ids = rest
        self.calls.append((policy, workspace.trace, w13.data_ptr()))
        if "y" not in self.results:
            self.results["y"] = weave_moe.fused_experts(
                x, w13, w2, *rest, **options, backend="reference"
            )
        out.copy_(self.results["y"])
        if self.wrong(self, policy):
            out[0] += 1
        self.launch(x, w13, ids, policy, workspace)
        return out

    def run_of(self, x: Tensor, w13: Tensor, ids: Tensor, policy: str) -> PolicyRecord:
        """A simulated launch, with every moment that the kernel records."""
        if policy not in self.runs:
            kind = str(x.dtype).removeprefix("torch.")
            sizes = (x.shape[1], w13.shape[1] // 2, w13.shape[0], ids.shape[1])
            shape = LayerShape(*sizes, kind)
            topk = ids.numpy().astype(np.int64)
            self.work = make_workload(shape, topk)
            run = from_simulated(simulate(shape, topk, policy=policy, trace=True))
            records = with_loads_and_stores(run.records, run.makespan_ns)
            combine = records["stage"] == 2
            records["chunk"][combine] //= self.work.slices  # a simulated task has its own number
            self.runs[policy] = replace(run, records=records)
        return self.runs[policy]

    def launch(self, x: Tensor, w13: Tensor, ids: Tensor, policy: str, workspace: Any) -> None:
        run = self.run_of(x, w13, ids, policy)
        assert self.work is not None
        many = self.work.kernel.many
        factor = 1.0
        if workspace.trace:
            factor = self.slower * self.scale(self.recorded[policy])
            self.recorded[policy] += 1
        self.now += TICK * (len(self.calls) * 7 % 5) + (self.sort if many else 0)
        began = self.now // TICK * TICK
        records = run.records.copy()
        for name in MOMENTS:
            there = records[name] != ABSENT
            records[name][there] = (records[name][there] * factor).astype(np.int64)
        length = (int(run.makespan_ns * factor) // TICK + 1) * TICK
        records["chunk"][records["stage"] == 2] *= self.work.kernel.combine_tokens
        first = int(records["claim_ns"].min(initial=length))
        planned = 0 if many else first // TICK * TICK
        self.lengths.setdefault(policy, []).append(length if workspace.trace else planned - length)
        if workspace.trace:
            kept = records.astype(cuda.TRACE_DTYPE)[self.lose :]
            rate, offset = np.full(SMS, 1.7), np.arange(1, SMS + 1) * 10**9
            launched = in_device_memory(kept, SMS, length, began, rate, offset)
            workspace._cuda_trace = launched.trace
        if self.counters:
            left = workspace._cuda_stats
            left[:, START], left[:, END] = began, began + length
            left[:, SWEEPS], left[:, PLANNED] = 1, began + planned
        self.now = began + length + (self.combine if many else 0)

    def stamp(self, at: Tensor) -> None:
        """Stands for the launch that notes the time."""
        at.fill_(self.now)

    def install(self, patch: pytest.MonkeyPatch) -> FakeGpu:
        """Puts itself where the GPU is."""
        patch.setattr(producer, "fused_experts", self.experts)
        patch.setattr(producer, "_stamp", self.stamp)
        patch.setattr(producer, "the_gpu", lambda: H200)
        patch.setattr(producer, "seconds_of", lambda tokens: 0.01)
        patch.setattr("weave_moe.profile.command.uses_gpu", lambda wanted: True)
        return self


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu().install(monkeypatch)


LAYER = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "moe_intermediate_size": 96,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LAYER))
    return path


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["profile", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def profiled(layer: Path, out: Path, *arguments: str) -> Any:
    result = call(
        *("--config", str(layer), "--routing", "zipf", "--out", str(out), "--json"), *arguments
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_policy_s_record_is_its_launch(
    fake: FakeGpu, layer: Path, tmp_path: Path, tokens: int, dtype: str
) -> None:
    out = tmp_path / "out"
    document = profiled(
        layer, out, *("--tokens", str(tokens), "--dtype", dtype, "--policy", "steal,static_expert")
    )
    assert document["producer"] == "gpu"
    assert document["check"]["agrees"]
    assert document["machine"].startswith("NVIDIA H200, 132 SMs")
    assert set(document["files"]) == {
        *("profile.html", "profile.json", "profile.png", "profile.npz")
    }
    profile = load_profile(out / "profile.npz")
    assert [run.policy for run in profile.runs] == ["steal", "static_expert"]
    assert fake.work is not None
    for run in profile.runs:
        want = fake.runs[run.policy].records
        key = ("worker", "stage", "group", "chunk", "compute_ns")
        got, expected = np.sort(run.records, order=key), np.sort(want, order=key)
        for name in ("worker", "sm", "stage", "expert", "group", "chunk", "part", "victim"):
            assert (got[name] == expected[name]).all(), name
        for name in MOMENTS:
            there = expected[name] != ABSENT
            assert ((got[name] != ABSENT) == there).all()
            slowed = expected[name][there] * fake.slower
            assert np.abs(got[name][there] - slowed).max(initial=0) < 1e3, name
        assert run.recorded == dict.fromkeys(MOMENTS, True)
        assert run.seats == run.workers == SMS
        assert run.steal_attempts == SMS
        assert run.read_bytes == ABSENT
        assert (run.planned_ns is None) == (tokens == 300)
        if run.planned_ns is not None:
            assert run.planned_ns.max() > 0
            first = run.records["claim_ns"].min()
            assert (np.abs(run.planned_ns - first) <= TICK + rounding(NOW)).all()
    notes = " ".join(document["notes"])
    assert "not recorded, it takes the hardware's counters" in notes
    assert f"whose step here is {TICK} ns" in notes
    assert ("launches of their own" in notes) == (tokens == 300)
    page = (out / "profile.html").read_text(encoding="utf-8")
    assert "recorded: blocks of the GPU kernel" in page
    assert 'id="absent"' not in page
    pytest.importorskip("jinja2")
    table = table_of(page)
    assert table["weights read, over the least"] == ["not recorded"] * 2
    for label in ("whole call", "recording, this launch", "recording, the call"):
        assert len(table[label]) == 2
        assert all("s" in cell and "not" not in cell for cell in table[label]), label
    assert ("planning" in table) == (tokens != 300)
    assert "of that before down, for others" in table
    assert all(cell.endswith("TB/s") for cell in table["the least over the makespan"])
    trace = json.loads((out / "profile.json").read_text(encoding="utf-8"))
    tracks = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    busy = {f"SM {r['sm']}, worker {r['worker']}" for run in profile.runs for r in run.records}
    assert busy <= tracks


def test_what_recording_costs_is_measured_and_said(
    fake: FakeGpu, layer: Path, tmp_path: Path
) -> None:
    fake.slower = 1.25
    document = profiled(layer, tmp_path / "out", "--tokens", "40", "--policy", "steal")
    timing = document["policies"][0]["timing"]
    assert timing["recorded_launch_ns"] / timing["launch_ns"] == pytest.approx(1.25, abs=0.02)
    assert timing["launch_ns"] == pytest.approx(-min(fake.lengths["steal"]), abs=TICK)
    assert timing["call_ns"] > 0
    assert timing["recorded_call_ns"] > 0
    page = (tmp_path / "out" / "profile.html").read_text(encoding="utf-8")
    ratio = timing["recorded_launch_ns"] / timing["launch_ns"] - 1
    assert f"{ratio:+.1%}\n" in page
    result = call("--from", str(tmp_path / "out" / "profile.npz"), "--out", str(tmp_path / "two"))
    words = " ".join(result.output.split())
    assert "recording steal: the launch" in words
    assert f"{ratio:+.1%} when recorded; the whole call" in words


def test_a_reader_that_rounds_is_not_hidden(
    fake: FakeGpu, layer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = cuda.take_trace

    def rounded(workspace: Any) -> Any:
        found = take(workspace)
        for name in MOMENTS:
            found[name] = np.where(found[name] < 0, ABSENT, found[name] // 512 * 512)
        return found

    monkeypatch.setattr(cuda, "take_trace", rounded)
    document = profiled(layer, tmp_path / "out", "--tokens", "40", "--policy", "steal")
    assert "and kept in steps of 512 ns: two SMs agree" in " ".join(document["notes"])


def test_the_launch_of_median_length_is_kept_and_never_the_first(
    fake: FakeGpu, layer: Path, tmp_path: Path
) -> None:
    """Launches of very different lengths; the first ones, before any replay, the longest."""
    factors = np.random.default_rng(3).uniform(1.0, 2.0, 997)
    fake.scale = lambda number: 9.0 if number < 3 else float(factors[number % 997])
    document = profiled(layer, tmp_path / "out", "--tokens", "40", "--policy", "steal,counter")
    for entry in document["policies"]:
        lengths = [n for n in fake.lengths[entry["policy"]] if n > 0]
        calls = sum(traced for policy, traced, _ in fake.calls if policy == entry["policy"])
        assert calls == len(lengths)
        # Of each of the last replays the last call.
        per_replay = 8
        last = lengths[-per_replay * LAUNCHES :][per_replay - 1 :: per_replay]
        timing = entry["timing"]
        assert timing["launches"] == LAUNCHES
        near = rounding(NOW)
        assert entry["makespan_ns"] == pytest.approx(sorted(last)[LAUNCHES // 2], abs=near)
        assert timing["shortest_ns"] == pytest.approx(min(last), abs=near)
        assert timing["longest_ns"] == pytest.approx(max(last), abs=near)
        apart = np.diff(sorted(last))[LAUNCHES // 2 - 1 : LAUNCHES // 2 + 1]
        assert (apart > 2 * near).all()  # or it could be another one


@pytest.mark.parametrize("tokens", [40, 300])
def test_sort_and_combine_are_launches_of_their_own_or_tasks(
    fake: FakeGpu, layer: Path, tmp_path: Path, tokens: int
) -> None:
    document = profiled(layer, tmp_path / "out", "--tokens", str(tokens), "--policy", "steal")
    timing = document["policies"][0]["timing"]
    combine_tasks = document["policies"][0]["by_stage"][2]
    trace = json.loads((tmp_path / "out" / "profile.json").read_text(encoding="utf-8"))
    launches = [e for e in trace["traceEvents"] if e.get("cat") == "launch"]
    page = (tmp_path / "out" / "profile.html").read_text(encoding="utf-8")
    if tokens == 40:
        assert combine_tasks > 0
        assert timing["sort_ns"] is timing["combine_ns"] is None
        assert launches == []
        assert '<th scope="row">sort' not in page
        return
    assert combine_tasks == 0
    assert timing["sort_ns"] == pytest.approx(fake.sort, abs=5 * TICK)
    assert timing["combine_ns"] == fake.combine
    assert [e["name"] for e in launches] == ["sort", "gate_up and down", "combine"]
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in launches]
    assert ends[0][0] == 0
    assert ends[0][1] == pytest.approx(ends[1][0], abs=1e-6)
    assert ends[1][1] == pytest.approx(ends[2][0], abs=1e-6)
    first = min(e["args"]["compute_ns"] for e in trace["traceEvents"] if e.get("cat") == "gate_up")
    starts = [e["ts"] for e in trace["traceEvents"] if e.get("cat") == "gate_up"]
    assert min(starts) == pytest.approx((first + timing["sort_ns"]) / 1000)
    assert "before it, combine" in page


def test_calls_take_the_weights_in_turn(fake: FakeGpu, layer: Path, tmp_path: Path) -> None:
    document = profiled(layer, tmp_path / "out", "--tokens", "40", "--policy", "steal")
    replay = [pointer for _, traced, pointer in fake.calls if traced][-8:]
    copies = len(set(replay))
    assert copies >= 2
    for i in range(len(replay) - copies + 1):
        assert len(set(replay[i : i + copies])) == copies
    # A layer this small is in L2 whatever is done, and the report does not hide it.
    assert "SO FEW THAT L2 MAY HOLD THEM" in " ".join(document["notes"])


def test_a_wrong_result_in_any_launch_is_not_reported(
    fake: FakeGpu, layer: Path, tmp_path: Path
) -> None:
    arguments = ("--config", str(layer), "--tokens", "20", "--policy", "steal,counter")
    out = tmp_path / "out"
    # From the first call on; and only when all have been checked, in a replay that records.
    for wrong in (
        lambda fake, policy: policy == "counter",
        lambda fake, policy: fake.recorded["counter"] > 40 and policy == "counter",
    ):
        fake.wrong = wrong
        fake.recorded.clear()
        result = call(*arguments, "--out", str(out))
        assert result.exit_code == 1, result.output
        assert "WRONG" in result.output
        assert not out.exists()


def test_records_that_had_no_room_are_said_to_be_missing(
    fake: FakeGpu, layer: Path, tmp_path: Path
) -> None:
    fake.lose = 3
    result = call(
        *("--config", str(layer), "--tokens", "20", "--policy", "static_expert"),
        *("--out", str(tmp_path / "out")),
    )
    assert result.exit_code == 2, result.output
    assert len(result.output.strip().splitlines()) == 1
    assert "a launch under static_expert has" in result.output
    assert "room for eight times its share" in result.output
    assert not (tmp_path / "out").exists()


def test_without_the_kernel_s_counters_the_rest_is_there(
    fake: FakeGpu, layer: Path, tmp_path: Path
) -> None:
    fake.counters = False
    document = profiled(layer, tmp_path / "out", "--tokens", "40", "--policy", "steal")
    entry = document["policies"][0]
    assert entry["steal_attempts"] is entry["planning_ns"] is None
    assert entry["timing"]["launch_ns"] is None
    page = (tmp_path / "out" / "profile.html").read_text(encoding="utf-8")
    assert "not measured" in page


# Which engine


def test_the_gpu_is_taken_unless_an_option_is_for_the_cpu(
    fake: FakeGpu, layer: Path, tmp_path: Path
) -> None:
    common = ("--config", str(layer), "--tokens", "20", "--policy", "steal")
    for arguments, engine in (
        ((), "gpu"),
        (("--backend", "cuda"), "gpu"),
        (("--backend", "host"), "cpu"),
        (("--workers", "4"), "cpu"),
        (("--dtype", "float32"), "cpu"),
    ):
        out = tmp_path / "-".join(["out", *arguments])
        result = call(*common, *arguments, "--out", str(out))
        assert result.exit_code == 0, result.output
        assert load_profile(out / "profile.npz").producer == engine, arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "cuda", "--workers", "3"), "--workers belongs to the CPU engine"),
        (
            ("--backend", "cuda", "--dtype", "float32"),
            "kernel does not take this layer (x is float32",
        ),
        (("--tokens", "131072", "--preset", "qwen3-30b"), "--tokens must be at most 16384"),
        (
            (
                "--scale",
                "3",
            ),
            "--scale must be auto or above 0",
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_one_line(
    fake: FakeGpu, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = call(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not fake.calls


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ((), "--backend cuda: torch sees none; --simulate predicts its records"),
        (
            (replace(H200, name="Some GPU", capability=(8, 0), kernel=False),),
            "--backend cuda: Some GPU has compute capability 8.0, and the kernel is built for 9.0",
        ),
    ],
)
def test_without_a_hopper_it_says_what_else_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: tuple[Gpu, ...], message: str
) -> None:
    machine = SimpleNamespace(gpus=gpus, no_gpu=None if gpus else "torch sees none")
    monkeypatch.setattr(producer, "look", lambda: machine)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    result = call("--backend", "cuda", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "--backend host records the CPU engine" in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.cuda.OutOfMemoryError("no"), "memory is too small for qwen3_moe with 20 tokens"),
        (cuda.KernelError("an earlier launch gave up"), "an earlier launch gave up"),
    ],
)
def test_a_gpu_that_does_not_do_is_one_line(
    fake: FakeGpu,
    layer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(producer, "fused_experts", fail)
    result = call("--config", str(layer), "--tokens", "20", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_the_stamp_compiles() -> None:
    from weave_moe.runtime import nvrtc

    try:
        nvrtc.version()
    except nvrtc.CompileError as problem:
        pytest.skip(str(problem))
    cubin, _ = nvrtc.compile_cubin(producer._STAMP_SOURCE, {}, [])
    assert cubin.startswith(b"\x7fELF")


def test_a_layer_keeps_its_own_16_bit_type() -> None:
    from weave_moe.presets import preset
    from weave_moe.run.command import RunOptions

    layer = replace(preset("qwen3-30b"), dtype="float16", notes=("a note",))
    assert producer.gpu_layer(RunOptions(), layer, 8) == (layer, "float16", ("a note",))
    wide = replace(layer, dtype="float32")
    assert producer.gpu_layer(RunOptions(), wide, 8)[1] == "bfloat16"
    small, _, notes = producer.gpu_layer(RunOptions(scale="1/2"), layer, 8)
    assert (small.hidden, small.experts) == (1024, 128)
    assert any("scaled by 1/2" in note for note in notes)
    with pytest.raises(InputError, match="hidden is 60"):
        producer.gpu_layer(RunOptions(), replace(layer, hidden=60), 8)
