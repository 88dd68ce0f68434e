"""The benchmarks, run on a CPU with small layers: what they compute is tested, not what they time.

Their modules are imported as they are run: from their own folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weave_moe import Activation
from weave_moe.reference import experts_reference
from weave_moe.shapes import check_experts

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = {"tiny": (64, 32, 8, 2), "little": (128, 64, 16, 4), "traced": (64, 32, 128, 8)}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture(autouse=True)
def common(_path: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import common

    monkeypatch.setattr(common, "MODELS", TINY)
    monkeypatch.setattr(common, "the_device", lambda: CPU)
    return common


@pytest.fixture
def experts(common: ModuleType) -> ModuleType:
    import experts

    return experts


def make_cell(common: ModuleType, case: Any) -> Any:
    return common.Cell(case, common.make_layers(case.model, CPU), common.Rates(4.0, 700.0), CPU)


# --- what is measured ---------------------------------------------------------------------------


def test_the_grid_is_all_of_a_model_s_token_counts_or_those_asked_for() -> None:
    import common

    full = common.grid(common.TOKENS, None, common.SKEWS)
    assert len(full) == len(set(full)) == 2 * sum(map(len, common.TOKENS.values()))
    assert {c.model for c in full if c.tokens == 16384} == {"qwen3-30b"}
    assert {c.skew for c in full} == {0.0, 1.2}
    some = common.grid(["mixtral"], [2, 3], [0.0])
    assert [(c.tokens, c.skew) for c in some] == [(2, 0.0), (3, 0.0)]


@given(tokens=st.integers(1, 20000), active=st.floats(1, 8), rate=st.floats(1, 10))
def test_no_floor_is_below_its_bytes_or_its_arithmetic(
    tokens: int, active: float, rate: float
) -> None:
    import common

    case = common.Case("tiny", tokens, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "MODELS", TINY)
        floor = common.floor_us(case, active, common.Rates(rate, 700.0))
        least = common.minimum_bytes(case, active)
    hidden, inter, _, k = TINY["tiny"]
    read = (active * 3 * hidden * inter + tokens * hidden) * 2
    assert least == pytest.approx(read)
    by_bytes = (read + tokens * hidden * 2) / (rate * 1e6)
    by_flops = 6 * tokens * k * hidden * inter / 700e6
    assert floor == pytest.approx(max(by_bytes, by_flops))


@given(tokens=st.integers(1, 40000))
def test_rows_that_are_checked_are_all_or_spread_over_the_batch(tokens: int) -> None:
    import common

    rows = common.checked_rows(tokens)
    assert len(rows) == (tokens if tokens <= 1024 else common.CHECKED_ROWS)
    gaps = rows.diff()
    assert rows[0] == 0
    assert tokens - 1 - rows[-1] <= -(-tokens // common.CHECKED_ROWS)
    if len(gaps):
        assert 0 < gaps.min() <= gaps.max() <= -(-tokens // common.CHECKED_ROWS)


@pytest.mark.parametrize("activation", [Activation(), Activation.parse("swiglu_oai")])
def test_the_truth_is_the_package_s_reference(common: ModuleType, activation: Activation) -> None:
    cell = make_cell(common, common.Case("little", 40, 1.2))
    x, (_, ids, weights), (w13, w2) = cell.inputs[0], cell.routes[0], cell.layers[0]
    call = check_experts(x.float(), w13.float(), w2.float(), weights, ids, activation=activation)
    want = experts_reference(call)
    every, worst = common.errors(cell.truth(activation), want)
    assert every <= worst < 1e-5


def test_errors_see_one_wrong_row_and_nan() -> None:
    import common

    truth = torch.randn(300, 16)
    assert common.errors(truth, truth) == (0.0, 0.0)
    wrong = truth.clone()
    wrong[7] *= 1.1
    every, worst = common.errors(wrong, truth)
    assert every < common.MAX_ERROR < common.MAX_ROW_ERROR < worst
    wrong[7, 3] = float("nan")
    assert common.errors(wrong, truth)[1] == float("inf")


def test_a_wrong_row_is_found_in_a_large_batch_s_sample(
    common: ModuleType, experts: ModuleType
) -> None:
    cell = make_cell(common, common.Case("tiny", 1100, 0.0))
    right = experts.weave("auto", CPU)(*cell.layers[0])

    def broken(*arguments: Any) -> torch.Tensor:
        y: torch.Tensor = right(*arguments)
        y[550] = 0  # half a batch in: row 128 of the sample
        return y

    row: dict[str, Any] = {}
    assert cell.check([right], row)
    assert row["rows_checked"] == 256
    assert common.checked_rows(1100)[128] == 550
    assert not cell.check([broken], row)
    assert row["error"] == "wrong result"


def test_another_activation_is_compared_with_its_own_truth(
    common: ModuleType, experts: ModuleType
) -> None:
    import weave_moe

    cell = make_cell(common, common.Case("tiny", 30, 0.0))
    w13, w2 = cell.layers[0]
    shifted = Activation("silu", up_offset=1.0)

    def rival(x: Any, ids: Any, weights: Any, logits: Any) -> torch.Tensor:
        return weave_moe.fused_experts(
            x, w13, w2, weights, ids, activation=shifted, backend="reference"
        )

    row: dict[str, Any] = {}
    assert not cell.check([rival], row)
    rival.activation = shifted  # type: ignore[attr-defined]
    row = {}
    assert cell.check([rival], row)
    assert row["rel_err"] < 1e-2
    assert "error" not in row
    rival.activation = Activation("silu", up_offset=2.0)  # type: ignore[attr-defined]
    rival.own_activation = True  # type: ignore[attr-defined]
    assert not cell.check([rival], {}), "an activation that is named is checked"
    del rival.activation  # type: ignore[attr-defined]
    assert cell.check([rival], {})


@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_recorded_routing_is_the_trace_s(common: ModuleType, tokens: int) -> None:
    from weave_moe.data import load_trace

    trace = load_trace("wide-128e-top8")
    seen = set()
    for call in range(6):
        _, ids, weights = common.recorded("wide-128e-top8", tokens, call, CPU)
        assert ids.shape == weights.shape == (tokens, 8)
        assert ids.dtype == torch.int32
        whole = torch.from_numpy(trace.topk_ids[:, call % trace.layers]).int()
        places = (whole == ids[0]).all(dim=1).nonzero()[:, 0].tolist()
        assert any(torch.equal(whole[p : p + tokens], ids) for p in places)
        seen.add(ids.numpy().tobytes())
    assert len(seen) == 6
    with pytest.raises(ValueError, match="at most 8192"):
        common.recorded("wide-128e-top8", 8193, 0, CPU)


# --- how it is timed ----------------------------------------------------------------------------


@given(
    seconds=st.floats(0.01, 5),
    one=st.floats(1e-6, 3),
    least=st.integers(1, 10),
    more=st.integers(0, 60),
)
def test_rounds_keep_enough_and_stay_within_the_time(
    seconds: float, one: float, least: int, more: int
) -> None:
    import common

    most = least + more
    rounds = common.rounds_for(seconds, one, least, most)
    kept = rounds - max(2, rounds // 4)
    assert least <= kept <= most + 1
    assert kept == least or rounds <= least + 4 or rounds * one <= 1.1 * seconds + 4 * one


def test_contestants_take_turns_and_the_first_rounds_are_dropped(common: ModuleType) -> None:
    log: list[str] = []
    replays = {name: (lambda name=name: log.append(name)) for name in "abc"}
    times = common.in_turn(replays, CPU, 0.0, least=9)
    rounds = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 2, "one order only"
    assert {len(us) for us in times.values()} == {len(rounds) - max(2, len(rounds) // 4)}
    assert min(len(us) for us in times.values()) >= 9
    assert common.in_turn({}, CPU, 1.0) == {}


def test_median_and_tail_of_a_row() -> None:
    import common

    row: dict[str, Any] = {}
    common.timed(row, [5.0, 1.0, 3.0], 2.4)
    assert (row["us"], row["p99_us"], row["of_floor"], row["rounds"]) == (3.0, 5.0, 0.8, 3)
    assert common.spread([1.0, 1.1, 1.2, 1.3, 1.4]) == pytest.approx((1.2, 0.1))
    assert common.spread([2.0]) == (2.0, 0.0)


@pytest.fixture
def now(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What common.py takes for the time: its one element."""
    seconds = [0.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: seconds[0])
    return seconds


def test_a_clock_leaves_room_for_the_longest(common: ModuleType, now: list[float]) -> None:
    clock = common.Clock(10.0)
    answers = []
    for now[0] in (1.0, 4.0, 5.0, 6.9, 7.1):
        answers.append(clock.room())
    assert answers == [True, True, True, True, False]
    assert common.Clock(None).room()


def test_what_was_passed_over_is_no_measure_of_the_work(
    common: ModuleType, now: list[float]
) -> None:
    clock = common.Clock(100.0)
    now[0] = 60.0  # compiling took a minute
    clock.passed_over()
    assert clock.room()
    now[0] = 65.0
    assert clock.room()
    assert clock.longest == 5.0


def test_commands_name_no_folder_of_the_machine() -> None:
    import common

    text = common.command_text(["/x/y/benchmarks/experts.py", "--out", "/tmp/z/a.jsonl", "--again"])
    assert text == "python benchmarks/experts.py --out a.jsonl --again"


# --- experts.py ---------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


RIVALS = """
import torch, weave_moe
def good(w13, w2):
    def f(x, ids, weights, logits):
        return weave_moe.fused_experts(x, w13, w2, weights, ids, backend="reference")
    f.version, f.note = "1", "the same"
    return f
def wrong(w13, w2):
    return lambda x, ids, weights, logits: good(w13, w2)(x, ids, weights, logits) * 1.1
def broken(w13, w2):
    raise RuntimeError("no such library")
RIVALS = {"good": good, "wrong": wrong, "broken": broken}
"""


def test_a_run_writes_a_row_a_contestant_and_goes_on_where_it_stopped(
    experts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rivals = tmp_path / "rows.jsonl", tmp_path / "rivals.py"
    rivals.write_text(RIVALS)
    command = ["--models", "tiny,little", "--tokens", "1,9", "--out", str(out)]
    command += ["--cell-seconds", "0.01", "--commit", "c1", "--rivals", str(rivals)]
    monkeypatch.setattr(sys, "argv", [str(FOLDER / "experts.py"), *command])
    assert experts.main([*command, "--contestants", "weave,good"]) == 0
    first = rows_of(out)
    assert len(first) == 2 * 2 * 2 * 2
    assert experts.main([*command, "--contestants", "weave,good,wrong,broken"]) == 0
    rows = rows_of(out)
    assert rows[: len(first)] == first
    assert len(rows) == 2 * 2 * 2 * 4
    names = {(r["model"], r["T"], r["skew"], r["contestant"]) for r in rows}
    assert len(names) == len(rows)
    for row in rows:
        if row["contestant"] in ("weave", "good"):
            assert row["us"] > 0
            assert row["rel_err"] < 1e-2
            assert row["rounds"] >= 7
        else:
            assert "us" not in row
            expected = {"wrong": "wrong result", "broken": "RuntimeError('no such library')"}
            assert row["error"] == expected[row["contestant"]]
        assert row["command"].startswith("python benchmarks/experts.py --models tiny,little")
        assert "/" not in row["command"].replace("benchmarks/experts.py", "")
    assert experts.main([*command, "--contestants", "weave", "--commit", "c2"]) == 0
    assert len(rows_of(out)) == len(rows) + 8


def test_a_run_stops_in_time(
    experts: ModuleType, common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--models", "tiny", "--tokens", "1,2", "--out", str(out), "--contestants", "weave"]
    command += ["--cell-seconds", "0.01", "--commit", "c"]
    answers = iter([True, True, False])
    monkeypatch.setattr(common.Clock, "room", lambda self: next(answers))
    assert experts.main([*command, "--max-seconds", "1"]) == 0
    assert [(r["T"], r["skew"]) for r in rows_of(out)] == [(1, 0.0), (1, 1.2)]
    monkeypatch.setattr(common.Clock, "room", lambda self: True)
    assert experts.main(command) == 0
    assert [(r["T"], r["skew"]) for r in rows_of(out)] == [
        (1, 0.0),
        (1, 1.2),
        (2, 0.0),
        (2, 1.2),
    ]


# --- neighbours ---------------------------------------------------------------------------------


def test_the_neighbour_compiles() -> None:
    from weave_moe.runtime import nvrtc
    from weave_moe.tools import neighbour

    try:
        nvrtc.version()
    except nvrtc.CompileError as error:
        pytest.skip(str(error))
    cubin, log = nvrtc.compile_cubin(neighbour._SOURCE, {}, [])
    assert len(cubin) > 1000
    assert not log.strip("\0\n ")
    assert f"a.words[{neighbour._BYTES} + blockIdx.x]" in neighbour._SOURCE


def test_a_neighbour_reads_whole_mebibytes() -> None:
    from weave_moe.tools.neighbour import held

    with (
        pytest.raises(ValueError, match="reads must be a multiple of 1 MiB, got 3 bytes"),
        held(0, torch.device("cuda", 0), reads=torch.zeros(3, dtype=torch.uint8)),
    ):
        pass


# --- policies.py --------------------------------------------------------------------------------


@pytest.fixture
def policies(common: ModuleType) -> ModuleType:
    import policies

    return policies


def test_jobs_cover_every_policy_trace_and_held_sm_once(policies: ModuleType) -> None:
    from weave_moe.shapes import POLICIES

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies.common, "MODELS", {"qwen3-30b": (2048, 768, 128, 8), **TINY})
        cases = policies.cases_of(["qwen3-30b"], None, [0.0, 1.2], policies.TRACES)
    assert len(cases) == len(set(cases)) == 9 * 2 + 8
    jobs = policies.jobs_of(cases, policies.HELD)
    assert len(set(jobs)) == len(jobs)
    for job in jobs:
        names = {v.policy for v in job.variants}
        assert names == set(POLICIES) - {"auto"}
        assert job.variants[0] == policies.Variant("steal"), "the one that others are divided by"
        assert job.sms_held == 0 or job.case.tokens <= 1024
    held = {(j.case.tokens, j.case.skew, j.sms_held) for j in jobs if j.sms_held}
    assert held == {
        (t, s, h) for t in (1, 16, 64, 256, 1024) for s in (0.0, 1.2) for h in policies.HELD
    }
    knobs = [v for j in jobs for v in j.variants if v.changed]
    assert len(knobs) == 2 * 3 * len([c for c in cases if c in policies.KNOB_CASES]) > 0
    assert all(v.knobs != policies.DEFAULT_KNOBS for v in knobs)


def test_knobs_are_the_workspace_s(policies: ModuleType) -> None:
    import weave_moe

    knobs = weave_moe.Workspace().knobs()
    assert {name: knobs[name] for name in policies.DEFAULT_KNOBS} == policies.DEFAULT_KNOBS
    for changed in policies.KNOBS:
        weave_moe.Workspace(**changed)


def test_a_launch_s_statistics(policies: ModuleType) -> None:
    # Three free SMs; the fourth worker starts where the first one ended.
    stats = torch.zeros(4, 8, dtype=torch.int64)
    stats[:, policies.START] = torch.tensor([1000, 1000, 2000, 5000])
    stats[:, policies.END] = torch.tensor([5000, 11000, 10000, 9000])
    stats[:, policies.PLANNED] = torch.tensor([2000, 2000, 3000, 5000])
    stats[:, policies.TASKS] = torch.tensor([1, 5, 4, 2])
    stats[:, policies.STEALS] = torch.tensor([0, 2, 1, 0])
    found = policies.summary(stats, free=3)
    assert found["tasks"] == 12
    assert found["most_tasks"] == 5
    assert found["steals"] == 3
    assert found["tail_gap_us"] == 2.0  # 11 - 9: the first worker's SM went on with the fourth
    assert found["busy_share"] == pytest.approx((3 + 9 + 7 + 4) / (3 * 10), abs=1e-4)
    assert policies.summary(torch.zeros(4, 8, dtype=torch.int64), free=3) == {}
    middle = policies.median_summary([found, {}, found | {"steals": 5}])
    assert middle["steals"] == 4
    assert set(policies.median_summary([]).values()) == {None}


def test_policies_write_rows_by_variant_and_go_on(
    policies: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(policies, "KNOB_CASES", (policies.Case("traced", 3, 0.0),))
    command = ["--models", "traced", "--tokens", "3", "--out", str(out), "--held", ""]
    command += ["--cell-seconds", "0.01", "--commit", "c1"]
    assert policies.main([*command, "--traces", ""]) == 0
    first = rows_of(out)
    assert len(first) == 6 + 6 + 6
    assert policies.main(command) == 0
    rows = rows_of(out)
    assert rows[: len(first)] == first
    assert len(rows) == len(first) + 6
    assert {r["trace"] for r in rows} == {None, "wide-128e-top8"}
    assert len({policies.key(r) for r in rows}) == len(rows)
    for row in rows:
        assert row["us"] > 0
        assert row["rel_err"] < 1e-2
        assert row["dram_over_min"] is None
        assert row["sms_held"] == 0
        if row["contestant"] == "weave:steal" and row["knobs"] == policies.DEFAULT_KNOBS:
            assert (row["over_steal"], row["spread"]) == (1.0, 0.0)


def test_a_policy_with_other_bits_is_not_timed(policies: ModuleType, common: ModuleType) -> None:
    cell = make_cell(common, common.Case("tiny", 5, 0.0))
    job = policies.Job(cell.case, 0, (policies.Variant("steal"), policies.Variant("window")))
    real = policies.functions_of

    def planted(variant: Any, layers: Any, workspace: Any) -> Any:
        functions = real(variant, layers, workspace)
        if variant.policy == "window":
            return [lambda *a, f=f: f(*a) * 1.01 for f in functions]
        return functions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "functions_of", planted)
        steal, window = policies.run_job(cell, job, 0.01, 1)
    assert steal["us"] > 0
    assert window["error"] == "not the bits of steal"
    assert "us" not in window


def test_one_job_that_stops_is_not_the_whole_run(
    policies: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--models", "tiny", "--tokens", "1,3,5", "--skews", "0.0", "--out", str(out)]
    command += ["--held", "", "--cell-seconds", "0.01", "--commit", "c"]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # is put back at the end
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    real = policies.common.in_turn
    calls: list[int] = []

    def planted(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the block ran for longer than 20 s\nand more")
        return real(*arguments, **more)

    monkeypatch.setattr(policies.common, "in_turn", planted)
    assert policies.main(command) == 1
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert "jobs stopped: 1;" in capsys.readouterr().out
    rows = rows_of(out)
    assert len(rows) == 3 * 6
    failed = [row for row in rows if "error" in row]
    assert {row["T"] for row in failed} == {3}
    assert len(failed) == 6
    assert {row["error"] for row in failed} == {
        "stopped: RuntimeError: the block ran for longer than 20 s"
    }
    assert not any("us" in row or "over_steal" in row for row in failed)
    assert all("error" in row or row["us"] > 0 for row in rows)
    assert policies.main(command) == 0
    again = rows_of(out)[len(rows) :]
    assert [row["T"] for row in again] == [3] * 6, "only what had stopped"
    assert all(row["us"] > 0 for row in again)
    assert policies.main(command) == 0
    assert len(rows_of(out)) == len(rows) + 6
    assert len(calls) == 4


def test_a_gpu_that_is_gone_ends_the_run(
    policies: ModuleType, common: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = make_cell(common, common.Case("tiny", 3, 0.0))
    job = policies.Job(cell.case, 0, (policies.Variant("steal"),))
    cell.device = torch.device("cuda", 0)

    def lost(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(policies, "run_job", lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        policies.run_or_tell(cell, job, 0.01, 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    (row,) = policies.run_or_tell(cell, job, 0.01, 1)
    assert row["error"].startswith(policies.STOPPED)


# --- neighbours.py ------------------------------------------------------------------------------


@pytest.fixture
def neighbours(common: ModuleType) -> ModuleType:
    import neighbours

    return neighbours


def test_outputs_beside_a_neighbour_are_those_alone(
    neighbours: ModuleType, common: ModuleType
) -> None:
    bench = neighbours.Bench(make_cell(common, common.Case("tiny", 3, 0.0)))
    assert set(bench.graphs) == {"steal", "counter", "static_strided"}
    bench.spoil()
    assert bench.verdict("counter") == {"equal_bits": False, "finite": False}
    for replay in bench.graphs.values():
        replay()
    assert bench.verdict("counter") == {"equal_bits": True, "finite": True}
    bench.outs["counter"][7][0, 0] += 1
    assert bench.verdict("counter") == {"equal_bits": False, "finite": True}
    assert bench.verdict("steal")["equal_bits"]
    assert set(bench.alone(0.001)) == set(bench.graphs)


def test_the_all_reduces_outlast_the_layer(neighbours: ModuleType) -> None:
    for reduces, graph in ((10_000.0, 300.0), (5_000.0, 4_000.0)):
        count = neighbours.replays_beside(reduces, graph)
        assert count * graph <= reduces < (count + 1) * graph / neighbours.BUSY_SHARE
    assert neighbours.replays_beside(1.0, 300.0) == 1
    row = neighbours.beside({}, 30.0, 20.0, 0.5, 1.0)
    assert (row["slowdown"], row["neighbour_tbs"], row["neighbour_alone_tbs"]) == (1.5, 0.5, 1.0)


def test_two_gpus_are_asked_for_in_one_line(
    neighbours: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.setenv(name, "unset")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert neighbours.main(["--all-reduce"]) == 2
    assert capsys.readouterr().out == "two GPUs are needed, here is 1\n"
    assert os.environ["NCCL_NVLS_ENABLE"] == "0", "multicast stays off"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "what was set is kept"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert neighbours.main(["--all-reduce"]) == 2
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


# --- counters.py --------------------------------------------------------------------------------


@pytest.fixture
def counters(common: ModuleType) -> ModuleType:
    import counters

    return counters


PAGE = """==PROF== Connected to process 7
active=120
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum",\
"lts__t_sector_hit_rate.pct","lts__t_sectors_op_read.sum","lts__t_sectors_op_read_lookup_hit.sum"
"","","","byte","ns","%","sector","sector"
"0","7","sort","1000","10","12.5","10","5"
"1","7","experts","1,208,000,000","300,000","37.25","80000000","20000000"
"2","7","sort","1000","10","12.5","10","5"
"3","7","experts","2416000000","300000","n/a","80000000","n/a"
"""


def test_counters_are_read_from_the_raw_page(counters: ModuleType) -> None:
    kernels = counters.parse(PAGE)
    assert len(kernels) == 4
    one, two = counters.shared_out(kernels, 2)
    row = counters.figures(one, least=1208e6)
    assert row["kernels"] == 2
    assert row["dram_bytes"] == 1_208_001_000
    assert row["dram_over_min"] == pytest.approx(1.0, abs=1e-4)
    assert (row["l2_hit"], row["l2_read_hit"]) == (0.3725, 0.25)
    assert row["ncu_us"] == 300.0
    row = counters.figures(two, least=1208e6)
    assert row["dram_over_min"] == pytest.approx(2.0, abs=1e-4)
    assert (row["l2_hit"], row["l2_read_hit"]) == (None, None)
    with pytest.raises(ValueError, match="not the same number each"):
        counters.shared_out(kernels, 3)
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        counters.parse("==ERROR== ERR_NVGPUCTRPERM\n")
    assert counters.figures([{}], 1.0)["dram_over_min"] is None


def test_ratios_go_into_rows_of_the_same_commit_cell_and_policy(
    counters: ModuleType, policies: ModuleType
) -> None:
    cell = {"model": "tiny", "T": 64, "skew": 0.0, "contestant": "weave:steal", "commit": "a"}
    plain = {**cell, "knobs": policies.DEFAULT_KNOBS, "sms_held": 0, "dram_over_min": None}
    others = [
        {**plain, "commit": "b"},
        {**plain, "T": 1},
        {**plain, "contestant": "weave:counter"},
        {**plain, "sms_held": 16},
        {**plain, "knobs": {**policies.DEFAULT_KNOBS, "steal": "one"}},
        {**plain, "trace": "wide-128e-top8", "skew": None},
    ]
    measured = {**cell, "label": "", "dram_over_min": 1.2, "l2_hit": 0.5}
    labelled = {**measured, "label": "no hints", "dram_over_min": 9.0}
    beside = {**measured, "beside": "evict-last", "dram_over_min": 8.0}
    rows = [plain, *others]
    assert counters.fill(rows, [measured, labelled, beside]) == 1
    assert (plain["dram_over_min"], plain["l2_hit"]) == (1.2, 0.5)
    assert all(row["dram_over_min"] is None for row in others)


FAKE_NCU = """#!{python}
import subprocess, sys
words = sys.argv[1:]
if "dram__bytes_op_read.sum" not in words[words.index("--metrics") + 1]:
    sys.exit("==ERROR== no such metric")  # as a version that has another name for it
at = words.index("--metrics") + 2
assert words[at + 1].endswith("counters.py") and words[at + 2] == "--counted"
names = words[at + 6].split(",")
print("active=8")
print('"ID","Kernel Name","dram__bytes_op_read.sum","lts__t_sector_hit_rate.pct"')
print('"","","byte","%"')
for i, _ in enumerate(names):
    print(f'"{{i}}","experts","{{(i + 1) * 1000000}}","50"')
"""


def test_one_command_counts_every_policy_and_fills_in(
    counters: ModuleType,
    policies: ModuleType,
    common: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ncu = tmp_path / "ncu"
    ncu.write_text(FAKE_NCU.format(python=sys.executable))
    ncu.chmod(0o755)
    monkeypatch.setattr(counters, "find_ncu", lambda: str(ncu))
    out, table = tmp_path / "counters.jsonl", tmp_path / "policies.jsonl"
    shared = {"model": "tiny", "T": 5, "skew": 0.0, "trace": None, "sms_held": 0, "commit": "c"}
    shared |= {"knobs": policies.DEFAULT_KNOBS, "dram_over_min": None}
    names = ("weave:steal", "weave:window")
    common.add_rows(table, [{**shared, "contestant": name} for name in names])
    command = ["--models", "tiny", "--tokens", "5", "--skews", "0.0", "--commit", "c"]
    command += ["--contestants", "steal,window", "--out", str(out), "--policies", str(table)]
    assert counters.main(command) == 0
    least = common.minimum_bytes(common.Case("tiny", 5, 0.0), 8)
    want = [pytest.approx(n * 1e6 / least, abs=1e-4) for n in (1, 2)]
    assert [r["dram_over_min"] for r in rows_of(out)] == want
    assert [r["dram_over_min"] for r in rows_of(table)] == want
    assert {r["l2_hit"] for r in rows_of(table)} == {0.5}


def test_hot_hints_are_counted_beside_the_calls_without(
    counters: ModuleType,
    common: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ncu = tmp_path / "ncu"
    ncu.write_text(FAKE_NCU.format(python=sys.executable))
    ncu.chmod(0o755)
    monkeypatch.setattr(counters, "find_ncu", lambda: str(ncu))
    out = tmp_path / "counters.jsonl"
    command = ["--models", "tiny", "--tokens", "5", "--skews", "0", "--commit", "c"]
    command += ["--contestants", "steal,window", "--out", str(out)]
    assert counters.main([*command, "--hot-hint", "evict-last,normal"]) == 0
    rows = rows_of(out)
    said = [(r["contestant"], r["label"], r.get("beside")) for r in rows]
    assert said == [
        *(("weave:steal", "", "evict-last,normal"), ("weave:window", "", "evict-last,normal")),
        *(("weave:steal", "hot evict-last", None), ("weave:window", "hot evict-last", None)),
        *(("weave:steal", "hot normal", None), ("weave:window", "hot normal", None)),
    ]
    assert [r["dram_bytes"] for r in rows] == [n * 1_000_000 for n in range(1, 7)]
    assert counters.main([*command, "--label", "new"]) == 0
    assert [r["label"] for r in rows_of(out)[6:]] == ["new", "new"]
    assert not any("beside" in r for r in rows_of(out)[6:])
    with pytest.raises(SystemExit):  # which row would it be beside?
        counters.main([*command, "--label", "new", "--hot-hint", "normal"])
    with pytest.raises(SystemExit):
        counters.main([*command, "--hot-hint", "evict"])
    assert "must be some of evict-first, normal, evict-last; got" in capsys.readouterr().err


def test_a_hint_is_the_workspace_s_and_of_its_policy_alone(
    counters: ModuleType,
    policies: ModuleType,
    common: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from weave_moe.backends import cuda

    made: list[Any] = []
    real = policies.functions_of

    def logged(variant: Any, layers: Any, workspace: Any) -> Any:
        made.append((variant.policy, getattr(workspace, "_hot_hint", None)))
        return real(variant, layers, workspace)

    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(policies, "functions_of", logged)
    names = "steal,window,steal@evict-last,window@evict-first,steal@normal"
    assert counters.main(["--counted", "tiny", "5", "0", names]) == 0
    assert made == [
        *(("steal", None), ("window", None), ("steal", cuda._EVICT_LAST)),
        *(("window", cuda._EVICT_FIRST), ("steal", cuda._EVICT_NORMAL)),
    ]


def test_what_is_counted_is_a_call_of_each_policy_after_a_first_one(
    counters: ModuleType,
    policies: ModuleType,
    common: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log: list[str] = []
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: log.append(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    real = policies.functions_of

    def logged(variant: Any, *rest: Any) -> Any:
        (f,) = real(variant, *rest)
        return [lambda *a: (log.append(variant.policy), f(*a))[1]]

    monkeypatch.setattr(policies, "functions_of", logged)
    assert counters.main(["--counted", "tiny", "5", "1.2", "steal,window"]) == 0
    assert log == ["steal", "window", "start", "steal", "window", "stop"]
    active = int(capsys.readouterr().out.removeprefix("active="))
    cell = make_cell(common, common.Case("tiny", 5, 1.2))
    assert active == len(cell.routes[0][1].unique())


def test_compiling_first_calls_everything_once_and_times_nothing(
    experts: ModuleType,
    common: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the processes that compile, one a model; here in this one."""
    calls, out = tmp_path / "calls", tmp_path / "rows.jsonl"
    rivals = tmp_path / "rivals.py"
    rivals.write_text(
        f"def logged(w13, w2):\n"
        f"    def f(x, ids, weights, logits):\n"
        f"        open({str(calls)!r}, 'a').write(f'{{len(x)}} {{w13.shape[0]}}\\n')\n"
        f"    return f\n"
        f"RIVALS = {{'logged': logged}}\n"
    )
    command = ["--models", "tiny,little", "--tokens", "1,9", "--out", str(out), "--commit", "c"]
    command += ["--contestants", "logged", "--rivals", str(rivals)]
    monkeypatch.setattr(sys, "argv", ["experts.py", *command, "--compile-first"])
    started: list[list[str]] = []

    class Process:
        def __init__(self, arguments: list[str]) -> None:
            started.append(arguments)
            assert experts.main(arguments[2:]) == 0

        def wait(self) -> None:
            pass

    monkeypatch.setattr(experts, "subprocess", SimpleNamespace(Popen=Process))
    assert experts.main([*command, "--compile-first", "--max-seconds", "0"]) == 0
    assert calls.read_text().splitlines() == ["4 8", "1 8", "9 8", "1 16", "9 16"]
    assert not out.exists()
    assert [a[-3:] for a in started] == [
        ["--models", m, "--compile-only"] for m in ("tiny", "little")
    ]


def test_ncu_is_found_where_installers_put_it(
    counters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    monkeypatch.setattr(counters, "ROOTS", (str(tmp_path / "none"), str(tmp_path)))
    assert counters.find_ncu() is None
    for version in ("2024.1", "2025.3"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").write_text("")
    assert counters.find_ncu() is None, "not executable"
    for version in ("2024.1", "2025.3"):
        (tmp_path / version / "ncu").chmod(0o755)
    assert counters.find_ncu() == str(tmp_path / "2025.3" / "ncu")


# --- granularity.py -----------------------------------------------------------------------------


def test_granularity_times_each_policy_on_each_tile(
    common: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import granularity

    monkeypatch.setattr(granularity, "LAYERS", {"square": (64, 64, 8, 2)})
    out = tmp_path / "rows.jsonl"
    command = ["--models", "square", "--out", str(out), "--commit", "c", "--cell-seconds", "0.01"]
    for _ in range(2):  # the second time there is nothing left to do
        assert granularity.main(command) == 0
        rows = common.read_rows(out)
        assert [(r["tile_rows"], r["contestant"]) for r in rows] == [
            (tile, f"weave:{policy}") for tile in (64, 128) for policy in granularity.POLICIES
        ]
    for row in rows:
        assert row["rel_err"] < common.MAX_ERROR
        # Two tiles of gate and up and one of down an expert, or one and one.
        assert row["tasks"] == pytest.approx(row["active"] * (3 if row["tile_rows"] == 64 else 2))
        assert row["task_us"] == pytest.approx(row["us"] / row["tasks"], rel=0.01)
        assert row["task_kb"] == row["tile_rows"] * 64 * 2 / 1024
    assert {r["over_static"] for r in rows if r["contestant"] == "weave:static_strided"} == {0.0}


def test_granularity_changes_the_tiles_of_plans_and_nothing_for_good() -> None:
    import granularity

    from weave_moe.backends import cuda
    from weave_moe.schedule.granularity import choose_kernel

    plan = choose_kernel(tokens=64, top_k=8, experts=1024, hidden=128)
    before = cuda.plan_for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "plan_for", lambda *args, **options: plan)
        with granularity.tiles_of(64):
            changed = cuda.plan_for()
            assert (changed.tile_m, changed.slice) == (64, 1024) != (plan.tile_m, plan.slice)
            assert changed.width_cap == plan.width_cap
        assert cuda.plan_for() == plan
    assert cuda.plan_for is before
