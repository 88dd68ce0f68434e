"""The simulator: nothing lost, nothing impossible, and how far it is from measured launches."""

from __future__ import annotations

import ctypes
import importlib
import json
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from native import Builder, needs_cxx
from pages import code_blocks
from weave_moe.backends.cuda import slab_tokens
from weave_moe.cli import cli
from weave_moe.schedule import POLICY_CODES, VICTIM_CODES, Dispenser, Knobs
from weave_moe.shapes import LayerShape
from weave_moe.simulate import (
    MACHINES,
    Machine,
    Simulated,
    calibration,
    deal_counts,
    load_machine,
    make_workload,
    simulate,
)
from weave_moe.simulate.calibrate import (
    Cell,
    Predicted,
    draw_routings,
    fit,
    predict,
    ranking,
    read_cells,
    summary,
)
from weave_moe.simulate.claims import StageClaims

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/h200-experts.jsonl"
POLICY_RESULTS = ROOT / "benchmarks/results/h200-policies.jsonl"
QWEN = LayerShape(2048, 768, 128, 8)
H200 = load_machine("h200")
SMALL = replace(H200, name="small", sms=6, hbm_tbs=0.2, l2_tbs=0.4)
POLICIES = tuple(POLICY_CODES)
FAR_OFF = ("static_expert",)
"""Policies whose simulated times are off by more than 20 % in some rows even with few tokens."""

Ids = npt.NDArray[np.int64]


def routing(tokens: int, experts: int, top_k: int, skew: float = 0.0, seed: int = 0) -> Ids:
    generator = np.random.default_rng(seed)
    logits = -skew * np.log(np.arange(1.0, experts + 1)) + generator.gumbel(size=(tokens, experts))
    return np.argsort(-logits, axis=1)[:, :top_k]


@st.composite
def launches(draw: st.DrawFn) -> dict[str, Any]:
    """A layer of any small size, a routing with skipped slots, a policy, held and slow SMs."""
    experts = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, min(4, experts)))
    tokens = draw(st.one_of(st.integers(1, 40), st.integers(300, 700)))
    ids = routing(
        tokens, experts, top_k, draw(st.sampled_from((0.0, 1.5, 4.0))), draw(st.integers(0, 99))
    )
    skipped = draw(st.sampled_from((0.0, 0.3, 1.0)))
    ids[np.random.default_rng(0).random(ids.shape) < skipped] = -1
    return {
        "shape": LayerShape(
            draw(st.integers(1, 40)) * 16, draw(st.integers(1, 30)) * 16, experts, top_k
        ),
        "topk_ids": ids,
        "policy": draw(st.sampled_from(POLICIES)),
        "held": draw(st.integers(0, SMALL.sms - 1)),
        "slow": draw(st.sampled_from(({}, {0: 3.0}, {2: 50.0, 5: 0.5}))),
        "knobs": Knobs(
            victim=draw(st.sampled_from(("largest", "random"))),
            steal=draw(st.sampled_from(("half", "one"))),
            min_steal=draw(st.integers(1, 3)),
        ),
        "machine": replace(
            SMALL,
            l2_mb=draw(st.sampled_from((0.01, 30.0))),
            publish_us=draw(st.sampled_from((0.0, 1.0, 40.0))),
            spread=draw(st.sampled_from((0.0, 0.1, 0.6))),
        ),
    }


# Conservation


@given(launches())
@settings(max_examples=40)
def test_every_task_runs_once_in_an_order_that_can_be(launch: dict[str, Any]) -> None:
    result = simulate(**launch, trace=True)
    work = make_workload(launch["shape"], launch["topk_ids"])
    trace = result.trace
    assert trace is not None
    assert len(trace) == result.tasks == sum(work.tasks)

    ran = Counter(
        tuple(int(entry[name]) for name in ("stage", "group", "chunk", "part")) for entry in trace
    )
    expected = Counter(
        (number, group, chunk, part)
        for number, stage in enumerate(work.stages)
        for group in range(len(work.plan.groups))
        for chunk in range(stage.chunks)
        for part in range(stage.parts)
    )
    expected.update({(2, -1, block, 0): work.slices for block in range(work.token_blocks)})
    assert ran == expected

    ends_up: Counter[int] = Counter()
    ends_down: Counter[int] = Counter()
    for entry in trace:
        if entry["stage"] == 0:
            ends_up[entry["group"]] = max(ends_up[entry["group"]], entry["end_ns"])
        if entry["stage"] == 1:
            ends_down[entry["expert"]] = max(ends_down[entry["expert"]], entry["end_ns"])
    publish, rounding = launch["machine"].publish_us * 1e3, 2
    ids, kernel = launch["topk_ids"], work.kernel
    for entry in trace:
        needs = [0]
        if entry["stage"] == 1:
            needs = [ends_up[entry["group"]] + publish]
        elif entry["stage"] == 2:
            first = int(entry["chunk"]) * kernel.combine_tokens
            its = ids[first : first + kernel.combine_tokens]
            needs += [ends_down[e] + publish for e in np.unique(its[its >= 0]).tolist()]
        assert entry["start_ns"] >= max(needs) - rounding
        assert entry["claim_ns"] - rounding <= entry["start_ns"] <= entry["end_ns"]

    for worker in range(SMALL.sms):
        its = trace[trace["worker"] == worker]
        assert (its["start_ns"][1:] >= its["end_ns"][:-1] - rounding).all()


@given(launches())
@settings(max_examples=40)
def test_time_and_bytes_add_up(launch: dict[str, Any]) -> None:
    result = simulate(**launch)
    work = make_workload(launch["shape"], launch["topk_ids"])
    makespan = result.makespan_us * 1e3
    assert len(result.per_worker) == SMALL.sms  # those that came late have left, too
    assert sum(w.tasks for w in result.per_worker) == result.tasks
    for worker in result.per_worker:
        assert worker.busy_ns + worker.wait_ns + worker.idle_ns == pytest.approx(makespan, abs=2)
        assert worker.idle_ns >= -2
        assert worker.first_ns <= worker.last_ns <= makespan + 1
    busy = sum(w.busy_ns for w in result.per_worker[: SMALL.sms - launch["held"]])
    experts = result.experts_us * 1e3
    assert result.busy_share * experts * (SMALL.sms - launch["held"]) == pytest.approx(
        busy, abs=2 * SMALL.sms
    )
    assert (experts < makespan) == work.kernel.many
    assert 0 <= result.tail_gap_us <= result.makespan_us
    # Each active expert's weights at least once, and no more often than it has groups.
    most = work.weight_bytes * max((g.siblings for g in work.plan.groups), default=1)
    assert work.weight_bytes == result.least_bytes
    assert result.least_bytes <= result.read_bytes + 1 <= most + 1
    if launch["machine"].l2_mb > 1:
        assert result.read_bytes == pytest.approx(result.least_bytes, abs=1)
    if launch["policy"] not in ("steal", "window"):
        assert result.steals == result.steal_attempts == 0


@given(launches())
@settings(max_examples=40)
def test_nothing_is_faster_than_the_machine(launch: dict[str, Any]) -> None:
    machine = replace(launch["machine"], narrow_width=8)
    result = simulate(**(launch | {"machine": machine}))
    assert result.time_us >= result.floor_us * 0.999 - 1e-6 or launch["topk_ids"].size == 0


# The claims are the kernel's


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(Builder.of_session(tmp_path_factory).build("claims.cpp", shared=True)))


@st.composite
def stages(draw: st.DrawFn) -> tuple[Dispenser, list[int], int, list[int]]:
    """A stage under any policy, its expert_group, tasks a group, and who claims when."""
    expert_group = [0]
    for n in draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)):
        expert_group.append(expert_group[-1] + n)
    per_group = draw(st.integers(1, 4))
    first = [g * per_group for g in expert_group]
    knobs = Knobs(
        draw(st.sampled_from(POLICIES)),
        draw(st.sampled_from(("largest", "random"))),
        draw(st.sampled_from(("half", "one"))),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 100)),
    )
    workers = draw(st.integers(1, 16))
    # Some come often, some never until the end.
    busy = draw(st.integers(1, workers))
    order = draw(st.lists(st.integers(0, busy - 1), max_size=2 * first[-1]))
    order += list(range(workers)) * (first[-1] + 3)
    return Dispenser(knobs, first[-1], workers, first), expert_group, per_group, order


@needs_cxx
@given(stages())
@settings(max_examples=200)
def test_claims_are_those_of_the_device_code(
    core: ctypes.CDLL, stage: tuple[Dispenser, list[int], int, list[int]]
) -> None:
    dispenser, expert_group, per_group, order = stage
    knobs = dispenser.knobs
    numbers = (
        np.array(
            [
                POLICY_CODES[knobs.policy],
                VICTIM_CODES[knobs.victim],
                knobs.steal == "one",
                knobs.min_steal,
                knobs.static_share,
                knobs.batch,
            ],
            np.uint32,
        ),
        np.array(expert_group, np.uint32),
        np.array(order, np.uint32),
        np.zeros(len(order), np.uint32),
        np.zeros(len(order), np.uint32),
    )
    its, bounds, turns, task, victim = (ctypes.c_void_p(a.ctypes.data) for a in numbers)
    core.claims_in_order(
        its, dispenser.tasks, dispenser.workers, len(expert_group) - 1, bounds, per_group,
        turns, len(order), task, victim,
    )  # fmt: skip
    want = [
        tuple(-1 if v == 0xFFFFFFFF else int(v) for v in pair)
        for pair in zip(*numbers[3:], strict=True)
    ]

    claims, gone, got = StageClaims(dispenser), set(), []
    for worker in order:
        found = None if worker in gone else claims.next(worker)
        if found is None:
            gone.add(worker)
        got.append(found or (-1, -1))
    assert got == want
    assert claims.queued == 0
    assert sorted(t for t, _ in got if t >= 0) == list(range(dispenser.tasks))


# What time must follow from


# Powers of two change no rounding, and so none of the ties that a schedule hangs on.
@given(launches(), st.sampled_from([0.5, 2.0, 4.0]))
@settings(max_examples=40)
def test_a_machine_n_times_as_fast_takes_an_nth(launch: dict[str, Any], n: float) -> None:
    machine = launch["machine"]
    rates = ("hbm_tbs", "l2_tbs", "sm_gbs", "matrix_tflops")
    changed = {name: getattr(machine, name) * n for name in rates}
    for name, value in asdict(machine).items():
        if name.endswith(("_us", "_ns")):
            changed[name] = value / n
    slow = {sm: extra / n for sm, extra in launch["slow"].items()}
    before = simulate(**launch)
    after = simulate(**(launch | {"machine": replace(machine, **changed), "slow": slow}))
    assert after.time_us * n == pytest.approx(before.time_us, rel=1e-9)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rate", ["hbm_tbs", "sm_gbs", "matrix_tflops"])
def test_more_of_a_rate_is_no_slower(policy: str, rate: str) -> None:
    ids = routing(64, 128, 8, 1.0)
    times = [
        simulate(
            QWEN, ids, policy=policy, machine=replace(H200, **{rate: getattr(H200, rate) * f})
        ).time_us
        for f in (0.5, 1.0, 2.0)
    ]
    assert times[0] * 1.01 >= times[1]
    assert times[1] * 1.01 >= times[2]


@pytest.mark.parametrize("hot", [0, 77])
def test_static_expert_takes_as_long_as_its_longest_list(hot: int) -> None:
    ids = routing(256, 128, 8)
    ids[:, 0] = hot
    work = make_workload(QWEN, ids)
    result = simulate(QWEN, ids, policy="static_expert")
    first = [g * work.stages[0].tasks_per_group for g in work.plan.expert_group]
    lists = Dispenser(Knobs("static_expert"), work.tasks[0], H200.sms, first)
    longest = max(len(lists.tasks_of(t)) for t in range(H200.sms))
    tile = 128 * QWEN.hidden * 2
    assert result.time_us > longest * tile / (H200.sm_gbs * 1e3)
    assert simulate(QWEN, ids, policy="steal").time_us < result.time_us / 2


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_stealing_is_level_with_the_counter_on_even_routing(tokens: int) -> None:
    ids = routing(tokens, 128, 8)
    times = [simulate(QWEN, ids, policy=p).time_us for p in ("steal", "counter")]
    assert times[0] == pytest.approx(times[1], rel=0.02)


def test_held_sms_hurt_those_who_wait_for_them() -> None:
    ids = routing(64, 128, 8)

    def times(held: int) -> dict[str, float]:
        return {
            p: simulate(QWEN, ids, policy=p, held=held).time_us
            for p in ("counter", "steal", "static_strided")
        }

    before, after, most = times(0), times(16), times(131)
    for policy in before:
        assert before[policy] < after[policy] < most[policy]
    for policy in ("counter", "steal"):
        assert after[policy] < 1.1 * before[policy]
        assert after[policy] < after["static_strided"]


def test_slow_sms_hurt_fixed_lists() -> None:
    ids = routing(64, 128, 8)
    slow = dict.fromkeys(range(0, 132, 8), 2.0)
    times = {
        p: simulate(QWEN, ids, policy=p, slow=slow).time_us
        for p in ("counter", "steal", "static_strided")
    }
    assert times["static_strided"] > 1.3 * max(times["counter"], times["steal"])


def hot(wide: int, narrow: int) -> Ids:
    """Ids [64, 2] that give expert 0 `wide` tokens and each of 8 more `narrow`."""
    return deal_counts([wide, *[narrow] * 8], tokens=64, top_k=2)


def test_rows_are_gathered_where_a_group_is_wide_and_only_there() -> None:
    shape = LayerShape(1024, 512, 9, 2)
    late = replace(H200, gather_us=100.0)

    def starts(ids: Ids, machine: Machine) -> npt.NDArray[np.int64]:
        trace = simulate(shape, ids, machine=machine, trace=True).trace
        assert trace is not None
        return np.sort(trace["start_ns"][trace["stage"] == 0])

    narrow = hot(32, 8)
    assert np.array_equal(starts(narrow, H200), starts(narrow, late))
    wide = hot(33, 8)
    # The consumers of every SM gather first, so groups that are narrow wait as well.
    assert starts(wide, late).min() >= 100_000
    assert starts(wide, H200).min() >= H200.gather_us * 1e3
    tickets = replace(late, gather_ticket_us=50.0)  # 104 rows: a ticket for each of 26 SMs
    assert starts(wide, tickets).min() >= 150_000


def test_only_narrow_groups_pay_for_rows_read_by_token() -> None:
    shape = LayerShape(4096, 512, 9, 2)
    slow = replace(H200, copy_row_ns=2000.0)
    for ids, paid in ((hot(64, 0), False), (hot(32, 0), True), (hot(64, 8), True)):
        times = [simulate(shape, ids, machine=m).time_us for m in (H200, slow)]
        assert (times[1] > 1.5 * times[0]) == paid
        assert paid or times[0] == times[1]


def test_a_window_is_stolen_from_where_lists_are_uneven() -> None:
    ids = routing(256, 128, 8, 1.2)
    result = simulate(QWEN, ids, policy="window", trace=True)
    assert result.steals > 0
    assert result.trace is not None
    assert (result.trace["victim"] >= 0).sum() == result.steals
    assert (result.trace["victim"] < 132).all()


# Against measurements


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return read_cells(RESULTS)


@pytest.fixture(scope="module")
def stated() -> dict[str, list[Predicted]]:
    """The rows that the calibration's errors were computed from."""
    found = calibration()
    rows: dict[str, list[Predicted]] = {"fitted": [], "held_out": [], "policies": []}
    for model, tokens, skew, policy, us, simulated, held in found["policy_rows"]:
        cell = Cell(model, tokens, skew, policy, us, 0, 0, held)
        rows["policies"].append(Predicted(cell, simulated))
    for model, tokens, skew, policy, us, simulated in found["rows"]:
        kind = "fitted" if model in found["errors"]["fitted"]["models"] else "held_out"
        rows[kind].append(Predicted(Cell(model, tokens, skew, policy, us, 0, 0), simulated))
    return rows


def key(cell: Cell) -> tuple[object, ...]:
    return (*cell.place, cell.policy, cell.us)


def test_the_calibration_is_of_the_committed_rows(
    cells: list[Cell], stated: dict[str, list[Predicted]]
) -> None:
    found = calibration()
    assert (ROOT / found["results"]).samefile(RESULTS)
    last: dict[tuple[object, ...], str] = {}
    for row in map(json.loads, RESULTS.read_text().splitlines()):
        last[row["model"], row["T"], row["skew"]] = row["commit"]
    assert found["rows_commit"] == sorted(set(last.values()))
    rows = [p.cell for kind in ("fitted", "held_out") for p in stated[kind]]
    assert sorted(map(key, rows)) == sorted(map(key, cells))
    others = read_cells(POLICY_RESULTS) if POLICY_RESULTS.is_file() else []
    others = [c for c in others if c.held or c.model in found["errors"]["held_out"]["models"]]
    assert sorted(key(p.cell) for p in stated["policies"]) == sorted(map(key, others))
    for kind, models in (
        ("fitted", {"qwen3-30b", "mixtral"}),
        ("held_out", {"qwen3-235b", "deepseek-v3"}),
    ):
        assert {p.cell.model for p in stated[kind]} == set(found["errors"][kind]["models"])
        assert set(found["errors"][kind]["models"]) == models


@pytest.mark.parametrize("kind", ["fitted", "held_out", "policies"])
def test_errors_are_what_the_rows_give(kind: str, stated: dict[str, list[Predicted]]) -> None:
    assert (kind in calibration()["errors"]) == bool(stated[kind])
    if not stated[kind]:
        return  # no such file is committed
    found = calibration()["errors"][kind]
    assert summary(stated[kind]).items() <= found.items()
    for policy, by in found["by_policy"].items():
        assert summary([p for p in stated[kind] if p.cell.policy == policy]) == by
    order = ranking(stated[kind])
    assert (order.pairs, order.right) == (
        found["ranking"]["pairs_above_5_percent"],
        found["ranking"]["right"],
    )
    assert found["median"] <= 0.08
    # With many tokens, and of two policies, it is not so: the page says of which rows.
    few = [p for p in stated[kind] if p.cell.tokens <= 256]
    assert summary([p for p in few if p.cell.policy not in FAR_OFF])["worst"] <= 0.20
    order = ranking(few)
    assert order.right >= 0.95 * order.pairs


def test_the_shipped_code_gives_the_stated_rows(
    cells: list[Cell], stated: dict[str, list[Predicted]]
) -> None:
    errors = calibration()["errors"]
    small = [c for c in cells if c.tokens == 1 or (c.tokens == 16 and c.model != "deepseek-v3")]
    wanted = {key(p.cell): p.us for kind in ("fitted", "held_out") for p in stated[kind]}
    for p in predict(H200, small, routings=errors["routings"], seed=errors["seed"]):
        assert p.us == pytest.approx(wanted[key(p.cell)], rel=5e-3)


def test_held_out_rows_on_other_routings(
    cells: list[Cell], stated: dict[str, list[Predicted]]
) -> None:
    models = calibration()["errors"]["held_out"]["models"]
    held_out = [c for c in cells if c.model in models and c.tokens <= 256]
    found = predict(H200, held_out, routings=1, seed=7)
    errors = summary([p for p in stated["held_out"] if p.cell.tokens <= 256])
    assert summary(found)["median"] <= errors["median"] + 0.01
    assert summary(found)["worst"] <= errors["worst"] + 0.04
    order = ranking(found)
    assert order.right >= 0.95 * order.pairs


def test_a_row_measured_again_replaces_the_old_one(tmp_path: Path) -> None:
    row = {"model": "mixtral", "T": 1, "skew": 0.0, "active": 2.0, "maxload": 1.0}
    knobs = {"steal": "half", "min_steal": 1, "victim": "largest"}
    rows = [
        row | {"contestant": "weave", "us": 100.0, "commit": "old"},
        row | {"contestant": "weave:counter", "us": 90.0, "commit": "old"},
        row | {"contestant": "weave", "us": 80.0, "commit": "new"},
        row | {"contestant": "vllm", "us": 70.0, "commit": "new"},
        row | {"contestant": "weave:window", "error": "no result", "commit": "new"},
        row | {"contestant": "weave:window", "us": 1.0, "knobs": knobs | {"steal": "one"}},
        row | {"contestant": "weave:window", "us": 50.0, "knobs": knobs, "sms_held": 8},
        row | {"contestant": "weave:window", "us": 1.0, "skew": None, "trace": "recorded"},
        row | {"contestant": "weave:window", "us": 1.0, "T": 100_000},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [(c.policy, c.us, c.held) for c in read_cells(path)] == [
        ("steal", 80.0, 0),
        ("counter", 90.0, 0),
        ("window", 50.0, 8),
    ]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("simulator")


@pytest.mark.parametrize("kind", ["held_out", "policies"])
def test_what_is_above_the_bars_is_on_the_page(
    kind: str, stated: dict[str, list[Predicted]], benchmark: ModuleType
) -> None:
    page = " ".join((ROOT / "docs/simulate.md").read_text(encoding="utf-8").split())
    words = benchmark.above_the_bars(stated[kind])
    assert words in page
    errors = calibration()["errors"][kind]
    kept = errors["median"] <= benchmark.MEDIAN_BAR and errors["worst"] <= benchmark.WORST_BAR
    assert ("so it is" in words) == kept


def test_bars_that_are_not_kept_are_named(benchmark: ModuleType) -> None:
    def rows(*errors: float, policy: str = "steal") -> list[Predicted]:
        cell = Cell("mixtral", 1, 0.0, policy, 100.0, 2.0, 1.0)
        return [Predicted(cell, 100.0 * (1 + error)) for error in errors]

    assert benchmark.above_the_bars(rows(0.07, 0.05, -0.19)).endswith("no row above 20%: so it is.")
    wide = rows(0.0, -0.25, 0.01, 0.31) + rows(0.4, 0.0, 0.0, policy="window")
    assert benchmark.above_the_bars(wide).endswith(
        "Not so: `steal` 2 of 4 rows (-25% to +31%), `window` 1 of 3 rows (+40%)."
    )
    assert benchmark.above_the_bars(rows(0.1, 0.12)).endswith("Not so: the median is 11.0%.")


def test_rows_of_another_commit_than_the_last_do_not_count(benchmark: ModuleType) -> None:
    def row(commit: str, contestant: str, tokens: int = 1) -> dict[str, Any]:
        return {
            **{"model": "mixtral", "T": tokens, "skew": 0.0, "us": 1.0},
            **{"contestant": contestant, "commit": commit},
        }

    rows = [row("a", "weave"), row("a", "vllm"), row("a", "weave", 4), row("b", "weave")]
    assert benchmark.newest(rows) == rows[2:]
    held = [row("c", "weave:steal") | {"sms_held": n} for n in (8, 16)]
    assert benchmark.newest([*rows, *held]) == [*rows[2:], *held]


def test_the_fit_sees_no_more_tokens_than_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark: ModuleType
) -> None:
    common = {"skew": 0.0, "active": 2.0, "maxload": 1.0, "contestant": "weave", "us": 100.0}
    rows = [common | {"model": m, "T": t} for m in ("mixtral", "qwen3-235b") for t in (1, 2, 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen: list[tuple[str, int]] = []

    def fitted(start: Machine, cells: list[Cell], **_: Any) -> Machine:
        seen.extend((cell.model, cell.tokens) for cell in cells)
        return start

    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark, "fit", fitted)
    words = ["--results", "rows.jsonl", "--fit", "--fit-tokens", "2", "--routings", "1"]
    assert benchmark.main(words) == 0
    assert seen == [("mixtral", 1), ("mixtral", 2)]


def test_one_command_states_the_errors_of_a_new_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    benchmark: ModuleType,
) -> None:
    common = {"T": 1, "skew": 0.0, "active": 8.0, "maxload": 1.0, "gpu": "a GPU", "commit": "abc"}
    common["floor_us"] = 15.0
    rows = [
        common | {"model": model, "contestant": name, "us": us}
        for model in ("qwen3-30b", "qwen3-235b")
        for name, us in (("weave", 30.0), ("weave:static_strided", 31.0), ("other", 40.0))
    ]
    held = [
        common | {"model": "qwen3-235b", "contestant": f"weave:{p}", "us": us, "sms_held": 16}
        for p, us in (("steal", 90.0), ("static_expert", 1000.0))
    ]
    for name, those in (("rows", rows), ("held", held)):
        text = "".join(json.dumps(row) + "\n" for row in those)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "docs").mkdir()
    (tmp_path / "src/weave_moe/simulate").mkdir(parents=True)
    page = f"before\n{benchmark.BEGIN}\nold\n{benchmark.END}\nafter\n"
    (tmp_path / benchmark.PAGE).write_text(page)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    files = ["--results", "rows.jsonl", "--policies", "held.jsonl"]
    assert benchmark.main([*files, "--routings", "1", "--write"]) == 0
    assert "held out" in capsys.readouterr().out
    written = json.loads((tmp_path / "src/weave_moe/simulate/h200.json").read_text())
    assert set(written) == set(calibration())
    assert written["machine"] == calibration()["machine"]
    assert written["command"] == calibration()["command"]  # of the fit, which was not run
    assert [len(written[key]) for key in ("rows", "policy_rows", "measured")] == [4, 2, 2]
    assert written["errors"]["policies"]["held"] == [16]
    assert written["errors"]["policies"]["ranking"]["right"] == 1
    text = (tmp_path / benchmark.PAGE).read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| `static_expert` | 16 | 1 |" in text
    assert "in rows that no fit sees: with SMs held by another kernel (qwen3-235b)." in text
    assert "The rows are of commit abc" in text
    assert text.count("Wanted were a median") == 2
    found = written["errors"]["held_out"]
    assert f"| {found['cells']} | {found['median']:.1%} | {found['worst']:.1%} |" in text


def test_drawn_routings_are_like_the_measured_ones() -> None:
    cell = Cell("qwen3-30b", 64, 1.2, "steal", 1.0, active=97.6, busiest=60.2)
    drawn = draw_routings(cell, 4)
    loads = [np.bincount(ids.ravel(), minlength=128) for ids in drawn]
    assert all(ids.shape == (64, 8) for ids in drawn)
    assert all(len(set(row)) == 8 for ids in drawn for row in ids.tolist())
    assert np.mean([(load > 0).sum() for load in loads]) == pytest.approx(97.6, abs=1.5)
    assert np.mean([load.max() for load in loads]) == pytest.approx(60.2, abs=1.5)


def test_a_fit_finds_what_the_rows_came_from() -> None:
    truth = replace(H200, hbm_tbs=4.4, launch_us=4.0)
    places = [("qwen3-30b", 1, 0.0, 8.0, 1.0), ("qwen3-30b", 16, 0.0, 83.0, 4.0)]
    asked = [Cell(m, t, s, "counter", 1.0, a, b) for m, t, s, a, b in places]
    rows = [replace(p.cell, us=p.us) for p in predict(truth, asked, routings=1)]
    start = replace(H200, hbm_tbs=4.7, launch_us=2.0)
    free = {"hbm_tbs": (4.3, 4.8), "launch_us": (1.5, 5.0)}
    found = fit(start, rows, routings=1, rounds=4, free=free)
    assert summary(predict(found, rows, routings=1))["worst"] < 0.005
    assert found.hbm_tbs == pytest.approx(4.4, rel=0.02)
    assert found.launch_us == pytest.approx(4.0, abs=0.4)


# Input


def test_dealt_counts_give_those_counts() -> None:
    ids = deal_counts([3, 0, 4, 1], tokens=4, top_k=2)
    assert ids.shape == (4, 2)
    assert np.bincount(ids.ravel(), minlength=4).tolist() == [3, 0, 4, 1]
    assert all(a != b for a, b in ids.tolist())
    for counts in ([5], [-1, 1], []):
        with pytest.raises(ValueError, match="counts"):
            deal_counts(counts, tokens=4, top_k=1)
    with pytest.raises(ValueError, match="tokens x top_k"):
        deal_counts([4, 4], tokens=4, top_k=1)
    with pytest.raises(ValueError, match="counts"):
        deal_counts(np.array([2**63], dtype=np.uint64), tokens=4, top_k=1)


@pytest.mark.parametrize("counts", [[1.5, 0.5], [1.0], ["1"], [True], [None], np.ones(2)])
def test_counts_that_are_no_integers_are_not_cut_down(counts: Any) -> None:
    with pytest.raises(TypeError, match=r"^counts must be integers"):
        deal_counts(counts, tokens=1, top_k=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": [[0.5] * 8]}, "topk_ids"),
        ({"topk_ids": [[1] * 7]}, "topk_ids"),
        ({"topk_ids": np.zeros((0, 8), dtype=int)}, "at least 1 token"),
        ({"shape": replace(QWEN, dtype="float32")}, "dtype"),
        ({"policy": "fair"}, "policy"),
        ({"machine": "b9000"}, "machine"),
        ({"held": 132}, "held"),
        ({"held": -1}, "held"),
        ({"slow": {132: 1.0}}, "slow"),
        ({"slow": {0: -1.0}}, "slow"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    good = {"shape": QWEN, "topk_ids": [[0, 1, 2, 3, 4, 5, 6, 7]]}
    assert simulate(**good).tasks > 0
    with pytest.raises(ValueError, match=message):
        simulate(**(good | change))


def test_only_the_measured_machine_counts_as_verified(tmp_path: Path) -> None:
    assert [name for name in MACHINES if load_machine(name).verified] == ["h200"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": "h100-sxm", "sms": 100}))
    mine = load_machine(path)
    assert (mine.name, mine.sms, mine.verified) == ("mine", 100, False)
    assert mine.hbm_tbs == load_machine("h100-sxm").hbm_tbs
    assert "unverified" in mine.label
    for text in ('{"sms": "many"}', '{"sms": 0}', '{"colour": 1}', "[1]", '{"base": "x"}', "{"):
        path.write_text(text)
        with pytest.raises(ValueError, match="machine"):
            load_machine(path)
    with pytest.raises(ValueError, match="machine"):
        load_machine(tmp_path / "none.json")


@pytest.mark.parametrize("change", [{"spread": 1.0}, {"plan_us": -1.0}, {"hbm_tbs": 0.0}])
def test_an_impossible_machine_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Machine(**(asdict(H200) | change))


# Command line


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments])


def test_the_command_prints_what_the_api_says() -> None:
    result = invoke("--preset", "qwen3-30b", "--tokens", "32", "--routing", "zipf", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["simulated"] is True
    assert [p["policy"] for p in document["policies"]] == list(
        dict.fromkeys(p["policy"] for p in document["policies"])
    )
    assert {p["policy"] for p in document["policies"]} == set(POLICIES)
    assert (
        document["error"]["held_out"]["median"] == (calibration()["errors"]["held_out"]["median"])
    )
    again = invoke("--preset", "qwen3-30b", "--tokens", "32", "--routing", "zipf", "--json")
    assert again.stdout == result.stdout


def test_the_table_is_labelled_and_states_its_error() -> None:
    result = invoke("--preset", "qwen3-30b", "--tokens", "16", "--held", "16", "--policy", "steal")
    assert result.exit_code == 0, result.output
    for text in ("simulated", "steal", "median", "16 of them held", "calibrated"):
        assert text in result.stdout
    unmeasured = "policies" not in calibration()["errors"]
    assert ("16 held SMs" in " ".join(result.stdout.split())) == unmeasured
    other = invoke("--preset", "qwen3-30b", "--tokens", "1", "--machine", "h100-sxm")
    assert other.exit_code == 0, other.output
    assert "unverified" in other.stdout
    assert "error unknown: machine h100-sxm" in " ".join(other.stdout.split())


def test_the_shipped_trace_is_the_default() -> None:
    result = invoke("--tokens", "100", "--policy", "counter")
    assert result.exit_code == 0, result.output
    assert "trace small-16e-top4" in result.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": 3}, "^shape must be a LayerShape, got int"),
        ({"held": 1.5}, "^held must be an int, got float"),
        ({"slow": [1]}, "^slow must map SMs to microseconds, got list"),
    ],
)
def test_other_types_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        simulate(**{"shape": LayerShape(64, 64, 8, 2), "topk_ids": [[0, 1]], **change})


@pytest.mark.parametrize(
    "arguments",
    [
        ("--machine", "b9000"),
        ("--policy", "fair"),
        ("--held", "132"),
        ("--preset", "qwen3-30b", "--tokens", str(slab_tokens(QWEN) + 1)),
        ("--preset", "qwen3-30b", "--routing", "flat"),
    ],
)
def test_bad_options_are_one_line_and_status_2(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_the_page_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    for code in code_blocks(page):
        exec(compile(code, "simulate.md", "exec"), {})
    assert "held by another kernel" in capsys.readouterr().out


def test_the_page_states_the_shipped_errors() -> None:
    page = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    stated = calibration()
    said = re.search(r"up to (\d+) tokens \((\d+) rows\)", stated["fitted_to"])
    assert said is not None
    most, count = map(int, said.groups())
    models = stated["errors"]["fitted"]["models"]
    rows = {
        kind: [
            Predicted(Cell(model, tokens, skew, policy, us, 0, 0), simulated)
            for model, tokens, skew, policy, us, simulated in stated["rows"]
            if (model in models) == (kind != "held out") and (tokens <= most) == (kind == "fitted")
        ]
        for kind in ("fitted", "not fitted")
    }
    errors = [summary(its) for its in rows.values()] + [stated["errors"]["held_out"]]
    assert errors[0]["cells"] == count
    for found in errors:
        assert f"| {found['cells']} | {found['median']:.1%} | {found['worst']:.1%} |" in page


def test_results_compare_by_value() -> None:
    ids = routing(4, 128, 8)
    first, second = simulate(QWEN, ids, trace=True), simulate(QWEN, ids)
    assert isinstance(first, Simulated)
    assert first == second
