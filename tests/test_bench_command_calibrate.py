"""`weave-moe calibrate`: what it times, what it fits, and when a machine is called calibrated."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from weave_moe.bench import calibrate, contestants, measure
from weave_moe.bench.cells import Contestant, Layer, Rates, Weights
from weave_moe.cli import cli
from weave_moe.presets import PRESETS, Preset
from weave_moe.simulate import Machine, load_machine, make_workload
from weave_moe.simulate.calibrate import FREE, free_for
from weave_moe.simulate.command import error_line
from weave_moe.simulate.machine import Calibrated, calibration, calibration_of, machine_file
from weave_moe.simulate.result import run_workload

CPU = torch.device("cpu")
TINY = {"qwen3-30b": (1, 8), "mixtral-8x7b": (1, 8)}
OTHERS = {"olmoe": (4,), "qwen3-235b": (3,)}
COSTS = ("hbm_tbs", "launch_us")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers, few cells, and few calls a graph."""
    real = calibrate.presets.preset
    monkeypatch.setattr(calibrate, "FITTED", TINY)
    monkeypatch.setattr(calibrate, "HELD_OUT", OTHERS)

    def scaled(name: str) -> Preset:
        return real(name).scaled(Fraction(1, 16))

    monkeypatch.setattr(calibrate.presets, "preset", scaled)
    monkeypatch.setattr(calibrate, "calls_of", lambda tokens: 2)


@pytest.fixture
def few_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(read: float, matrix: float) -> dict[str, tuple[float, float]]:
        every = free_for(read, matrix)
        return {name: every[name] for name in COSTS}

    monkeypatch.setattr(calibrate, "free_for", some)


SHIPPED = load_machine("h200")
TRUE = dataclasses.replace(
    SHIPPED,
    sms=78,
    hbm_tbs=3.12,
    # Far from where a fit starts, within its bounds.
    launch_us=SHIPPED.launch_us + (2 if SHIPPED.launch_us < sum(FREE["launch_us"]) / 2 else -2),
)
"""The machine that the rows below are of."""


def simulated_rows(machine: Machine = TRUE, **changed: Any) -> list[dict[str, Any]]:
    """What `measured_rows` would give on a GPU that behaves as the simulator has it."""
    rows = []
    for model, tokens, skew in calibrate.grid():
        routes = calibrate.routings(model, tokens, skew, CPU)
        shape = calibrate.presets.preset(model).shape("bfloat16")
        works = [make_workload(shape, ids.numpy()) for _, ids, _ in routes]
        for policy in calibrate.POLICIES:
            times = [run_workload(work, machine, policy).time_us for work in works]
            rows.append(
                {
                    **{"model": model, "T": tokens, "skew": skew},
                    **{"routings": calibrate.checksum(routes), "contestant": f"weave:{policy}"},
                    **{"us": statistics.fmean(times), "active": 1.0, "busiest": 1.0},
                    **{"gpu": "Hopper H1", "sms": machine.sms, "date": "2026-11-30"},
                    **{"read_tbs": 3.05, "matrix_tflops": machine.matrix_tflops},
                    **changed,
                }
            )
    return rows


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def call(command: str, *arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [command, *map(str, arguments)])


# --- the fit -----------------------------------------------------------------------------------


def test_the_grid_is_of_presets_and_keeps_what_is_unseen_apart() -> None:
    assert not set(calibrate.FITTED) & set(calibrate.HELD_OUT)
    assert set(calibrate.FITTED) | set(calibrate.HELD_OUT) <= set(PRESETS)
    cells = calibrate.grid()
    assert len(cells) == len(set(cells))
    for model, tokens, _ in cells:
        shape = PRESETS[model].shape("bfloat16")
        assert shape.experts * shape.expert_bytes < 10e9
        assert tokens <= 2048
    few = {t for m, t, _ in cells if m in calibrate.HELD_OUT}
    seen = {t for m, t, _ in cells if m in calibrate.FITTED}
    assert few - seen == {4, 32, 128, 512}


@pytest.mark.usefixtures("few_costs")
def test_a_fit_finds_a_machine_that_is_not_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Layers of their full size: nothing is computed, and small ones say nothing about memory.
    monkeypatch.setattr(calibrate, "FITTED", {"qwen3-30b": (1, 4, 16)})
    monkeypatch.setattr(calibrate, "HELD_OUT", {"olmoe": (2, 8)})
    monkeypatch.setattr(calibrate, "POLICIES", ("steal",))
    monkeypatch.setattr(calibrate, "DISTINCT", 1)
    rows = write(tmp_path / "m.rows.jsonl", simulated_rows())
    out = tmp_path / "mine.json"
    result = call("calibrate", "--fit-rows", rows, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    errors = found["calibration"]["errors"]
    assert errors["held_out"]["models"] == ["olmoe"]
    machine = load_machine(out)
    assert isinstance(machine, Calibrated)
    assert machine.verified
    assert (machine.name, machine.sms) == ("mine", 78)
    assert machine.label.startswith("mine (calibrated: fitted to 6 launches of Hopper H1")
    # Nearer the truth than where the fit began, for what it was free to change.
    start = calibrate.start_of(simulated_rows()[0], "x")
    for cost in COSTS:
        off, was = (abs(getattr(m, cost) - getattr(TRUE, cost)) for m in (machine, start))
        assert off < was, cost
    # On rows that the fit has not seen it is far nearer than without a fit.
    works = calibrate.works_of(simulated_rows(), start.shared_bytes)
    unseen = calibrate.cells_of(r for r in simulated_rows() if r["model"] == "olmoe")
    before = calibrate.errors_of(calibrate.predict(start, unseen, works=works))
    assert errors["held_out"]["median"] < 0.4 * before["median"]
    assert errors["held_out"]["median"] < 0.05


@given(read=st.floats(0.5, 20), matrix=st.floats(10, 5000))
def test_the_bounds_are_around_what_was_measured(read: float, matrix: float) -> None:
    free = free_for(read, matrix)
    assert set(free) == set(FREE)
    assert free["hbm_tbs"][0] < read < free["hbm_tbs"][1] or read < 0.51
    assert free["matrix_tflops"][0] < matrix < free["matrix_tflops"][1]
    assert free["launch_us"] == FREE["launch_us"]


def test_the_shipped_machine_s_bounds_hold_its_own() -> None:
    free = free_for(4.6, 690.0)
    for name in ("hbm_tbs", "matrix_tflops"):
        assert free[name][0] <= FREE[name][0] + 0.1 * FREE[name][0]
        assert free[name][1] >= FREE[name][1] - 0.1 * FREE[name][1]


@pytest.mark.usefixtures("small")
def test_other_routings_than_those_that_were_timed_are_refused(tmp_path: Path) -> None:
    rows = simulated_rows()
    rows[3]["routings"] += 1
    result = call(
        "calibrate", "--fit-rows", write(tmp_path / "r.jsonl", rows), "--out", tmp_path / "m.json"
    )
    assert result.exit_code == 2
    assert "cannot be drawn again" in result.stderr
    assert not (tmp_path / "m.json").exists()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda rows: rows[2].pop("us"), "line 3"),
        (lambda rows: rows[2].update(us="fast"), "line 3"),
        (lambda rows: rows[2].update(us=0.0), "line 3"),
        (lambda rows: rows[2].update(us=float("inf")), "line 3"),
        (lambda rows: rows[2].update(T=True), "line 3"),
        (lambda rows: rows[2].update(contestant="vllm"), "vllm"),
        (lambda rows: rows[2].update(sms=0), "line 3"),
        (lambda rows: rows[2].update(gpu="Hopper H2"), "several"),
        (lambda rows: rows.__delitem__(slice(0, 12)), "qwen3-30b"),
        (lambda rows: rows.clear(), "must have rows"),
    ],
)
def test_rows_that_are_not_ours_are_named(change: Any, named: str, tmp_path: Path) -> None:
    rows = simulated_rows()
    change(rows)
    path = write(tmp_path / "r.jsonl", rows)
    result = call("calibrate", "--fit-rows", path, "--out", tmp_path / "m.json")
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 100_000 + "]" * 100_000)
    for arguments, named in (
        (["--out", "m.txt"], "must end in .json"),
        (["--fit-rows", str(tmp_path / "none.jsonl")], "No such file"),
        (["--fit-rows", str(deep)], "line 1: not a row"),
        (["--fit-rows", "x", "--measure-only"], "exclude"),
        ([], "torch sees none"),
        (["--seconds", "0"], "--seconds"),
    ):
        result = call("calibrate", *arguments)
        assert result.exit_code == 2, result.output
        assert named in result.stderr
        assert result.stderr.count("\n") == 1


# --- the machine's file ------------------------------------------------------------------------


def errors(median: float = 0.01) -> dict[str, Any]:
    part = {
        **{"models": ["olmoe"], "tokens": [4, 32], "held": [0], "cells": 6, "median": median},
        **{"worst": 0.05, "worst_cell": "olmoe", "by_policy": {}},
        "ranking": {"pairs_above_5_percent": 0, "right": 0, "policies_measured": ["steal"]},
    }
    return {"routings": 2, "seed": 1, "fitted": part, "held_out": part}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    machine = dataclasses.replace(TRUE, name="mine", verified=False, source="fitted to 9 launches")
    found = {"gpu": "Hopper H1", "date": "2026-11-30", "errors": errors()}
    path.write_text(machine_file(machine, found))
    return path


def test_a_file_comes_back_as_it_was_written(mine: Path) -> None:
    machine = load_machine(mine)
    assert isinstance(machine, Calibrated)
    written = dataclasses.replace(TRUE, name="mine", source="fitted to 9 launches", verified=True)
    fields = [f.name for f in dataclasses.fields(Machine)]
    assert [getattr(machine, n) for n in fields] == [getattr(written, n) for n in fields]
    assert calibration_of(machine)["gpu"] == "Hopper H1"
    assert calibration_of(load_machine("h100-sxm")) == calibration()
    hash(machine)


@pytest.mark.parametrize("what", ["launch_us", "name", "sms", "source"])
def test_a_file_that_was_changed_is_not_called_calibrated(what: str, mine: Path) -> None:
    document = json.loads(mine.read_text())
    before = document[what]
    document[what] = before + 1 if not isinstance(before, str) else before + "!"
    mine.write_text(json.dumps(document))
    machine = load_machine(mine)
    assert not machine.verified
    assert not isinstance(machine, Calibrated)
    assert "changed since it was calibrated" in machine.label
    assert "unverified" in machine.label
    document[what] = before
    mine.write_text(json.dumps(document, sort_keys=True))
    assert load_machine(mine).verified, "another order of the same is the same"


@pytest.mark.parametrize(
    "broken",
    [
        *(None, 7, "yes", [], {}, {"errors": {}}, {"gpu": 1, "errors": errors()}),
        {"gpu": "x", "errors": {"held_out": {"models": []}}},
        {"gpu": "x", "errors": errors(), "of": "0000"},
    ],
)
def test_half_a_calibration_is_none(broken: Any, mine: Path) -> None:
    document = json.loads(mine.read_text())
    document["calibration"] = broken
    mine.write_text(json.dumps(document))
    assert not load_machine(mine).verified


def test_nobody_can_call_a_machine_verified_by_hand(mine: Path) -> None:
    document = json.loads(mine.read_text())
    document["verified"] = True
    mine.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="unknown field 'verified'"):
        load_machine(mine)


def test_simulate_states_the_machine_s_own_error(mine: Path) -> None:
    options = ("--preset", "olmoe", "--tokens", "16", "--routing", "uniform", "--machine", mine)
    result = call("simulate", *options)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "mine (calibrated: fitted to 9 launches)" in text
    assert "launches of Hopper H1" in text
    assert "median 1.0%, worst 5.0%" in text
    assert "unknown: machine mine" not in text
    found = json.loads(call("simulate", *options, "--json").stdout)
    assert found["error"]["known"]
    assert found["error"]["held_out"]["median"] == 0.01
    line = error_line(load_machine(mine), 64, ["window"], 4)
    assert "error unknown: 64 tokens; window; 4 held SMs" in line
    sheet = error_line(load_machine("h100-sxm"), 16, ["steal"])
    assert "error unknown: machine h100-sxm" in sheet


def test_advise_takes_it_and_nothing_that_was_measured_elsewhere(mine: Path) -> None:
    options = ("--preset", "qwen3-30b", "--tokens", "16", "--routing", "uniform", "--json")
    here = json.loads(call("advise", *options).stdout)
    result = call("advise", *options, "--machine", mine)
    assert result.exit_code == 0, result.output
    there = json.loads(result.stdout)
    assert here["measured"], "h200's own cells, or this shows nothing"
    assert there["measured"] == []
    assert there["machine"]["name"] == "mine"
    assert not any("machine mine" in note for note in there["notes"])


# --- timing, as on a GPU, on tensors of the CPU ------------------------------------------------


@pytest.fixture
def gpu(small: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    events: list[Any] = []
    monkeypatch.setattr(calibrate, "uses_gpu", lambda wanted: True)
    monkeypatch.setattr(calibrate, "the_device", lambda: CPU)
    monkeypatch.setattr(calibrate, "measure_rates", lambda dtype: Rates(3.05, 640.0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1e11, 1e11))
    properties = SimpleNamespace(
        name="Hopper H1",
        multi_processor_count=78,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        calibrate, "ours", lambda policy, backend: contestants.ours(policy, "reference")
    )

    def in_turn(replays: Any, device: Any, seconds: float, **more: Any) -> dict[str, list[float]]:
        events.append((sorted(replays), seconds))
        return {name: [800.0] * 7 for name in replays}

    monkeypatch.setattr(measure, "in_turn", in_turn)
    return events


def test_rows_are_timed_once_each_and_can_be_fitted_later(gpu: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    result = call("calibrate", "--measure-only", "--out", out, "--seconds", "0.2")
    assert result.exit_code == 0, result.output
    assert not out.exists()
    rows = calibrate.read_rows(tmp_path / "m.rows.jsonl")
    assert len(rows) == 3 * len(calibrate.grid()) == 3 * len(gpu)
    assert all(seconds == 0.2 and len(names) == 3 for names, seconds in gpu)
    for row in rows:
        assert row["us"] == 400.0
        assert row["ours"]
        assert (row["gpu"], row["sms"], row["read_tbs"]) == ("Hopper H1", 78, 3.05)
    # What a fit would simulate is what was timed.
    calibrate.works_of(rows, 232448)
    start = calibrate.start_of(rows[0], "m")
    assert (start.sms, start.hbm_tbs, start.matrix_tflops) == (78, 3.05, 640.0)
    assert start.l2_mb == 26.2
    assert not start.verified


def test_measured_and_fitted_in_one_go(
    gpu: list[Any], few_costs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    out = tmp_path / "here" / "m.json"
    result = call("calibrate", "--out", out)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.parent.iterdir()) == ["m.json", "m.rows.jsonl"]
    assert load_machine(out).verified
    # 400 us for every layer is no machine: the error says so.
    assert "a poor fit" in result.stdout
    assert "Hopper H1: 78 SMs, reads 3.05 TB/s" in result.stdout


def test_wrong_or_spread_times_write_nothing(
    gpu: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(policy: str, backend: str) -> Any:
        right = contestants.ours(policy, "reference")

        def factory(layer: Layer, w: Weights) -> Contestant:
            made = right(layer, w)
            return Contestant(lambda *a: made(*a) * (1.5 if policy == "counter" else 1), ours=True)

        return factory

    monkeypatch.setattr(calibrate, "ours", wrong)
    result = call("calibrate", "--out", tmp_path / "m.json")
    assert result.exit_code == 1
    assert "weave:counter" in result.stdout
    assert "weave:steal qwen3" not in result.stdout
    assert list(tmp_path.iterdir()) == []
    found = json.loads(call("calibrate", "--out", tmp_path / "m.json", "--json").stdout)
    assert found["result"] == "refused"
    monkeypatch.setattr(
        calibrate, "ours", lambda policy, backend: contestants.ours(policy, "reference")
    )

    def spread(replays: Any, device: Any, seconds: float, **more: Any) -> dict[str, list[float]]:
        return {name: [700.0, 900.0] * 5 for name in replays}

    monkeypatch.setattr(measure, "in_turn", spread)
    result = call("calibrate", "--out", tmp_path / "m.json")
    assert result.exit_code == 1
    assert "spread by 12.5%" in result.stdout
    assert list(tmp_path.iterdir()) == []
