"""Advice: the formula, the rules in their order, memory; and verdicts held against measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pages import code_blocks
from weave_moe.advise import (
    VERDICTS,
    Advice,
    MeasuredCell,
    ModelSize,
    Sweep,
    advise,
    end_to_end,
    fit_memory,
    measured_near,
    needed_speedup,
    routing_of,
    size_of_config,
    size_of_preset,
)
from weave_moe.advise import advice as module
from weave_moe.advise import measured as measured_module
from weave_moe.advise.advice import ASSUMED_SHARE, BUSY, COMMUNICATION, LEVEL, MATTERS, STATIC
from weave_moe.advise.measured import NEAR_LOAD, NEAR_TOKENS, measured_cells, ratio_errors
from weave_moe.advise.memory import GPU_GB, PUBLISHED, USABLE
from weave_moe.backends.cuda import slab_tokens
from weave_moe.cli import MAPPINGS, SPLITS, cli
from weave_moe.layer import MoELayer, moe_layer
from weave_moe.presets import PRESETS, Preset, from_config, preset
from weave_moe.routing import RoutingConfig
from weave_moe.shapes import LayerShape
from weave_moe.simulate import MACHINES, calibration, load_machine
from weave_moe.simulate.calibrate import SHAPES, Cell, draw_routings

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/h200-experts.jsonl"
H200 = load_machine("h200")
NOT_MEASURED = replace(H200, verified=False)
"""The same machine, for which no measured cell speaks."""
NAMES = {"mixtral": "mixtral-8x7b"}
SMALL = Preset("small", "small", 512, 256, 16, RoutingConfig(top_k=2, renormalize=True))

Ids = npt.NDArray[np.int64]


def layer_of(model: str) -> Preset:
    return preset(NAMES.get(model, model))


def routing(tokens: int, experts: int, top_k: int, skew: float = 0.0, seed: int = 0) -> Ids:
    generator = np.random.default_rng(seed)
    logits = -skew * np.log(np.arange(1.0, experts + 1)) + generator.gumbel(size=(tokens, experts))
    return np.argsort(-logits, axis=1)[:, :top_k]


# The formula


@given(st.floats(0, 1), st.floats(0.05, 50))
def test_a_step_is_what_its_parts_take(share: float, speedup: float) -> None:
    others, layer = 1 - share, share
    assert end_to_end(share, speedup) == pytest.approx(1 / (others + layer / speedup))
    assert end_to_end(share, 1.0) == pytest.approx(1.0)
    assert min(1, speedup) - 1e-9 <= end_to_end(share, speedup) <= max(1, speedup) + 1e-9
    assert end_to_end(1.0, speedup) == pytest.approx(speedup)


@given(st.floats(0.001, 1), st.floats(1.001, 2))
def test_the_speedup_that_is_needed_gives_the_gain(share: float, gain: float) -> None:
    needed = needed_speedup(share, gain)
    if needed is None:
        assert end_to_end(share, 1e12) <= gain * (1 + 1e-9)
    else:
        assert end_to_end(share, needed) == pytest.approx(gain)


@pytest.mark.parametrize(("share", "speedup"), [(-0.1, 2), (1.1, 2), (0.5, 0), (0.5, -1)])
def test_impossible_parts_are_refused(share: float, speedup: float) -> None:
    with pytest.raises(ValueError, match=r"share|speedup"):
        end_to_end(share, speedup)


@given(st.dictionaries(st.floats(0, 3), st.floats(0.9, 2), min_size=1), st.floats(1.0, 2))
def test_from_the_break_even_skew_on_it_always_pays(gains: dict[float, float], n: float) -> None:
    found = Sweep("static_strided", gains, n).break_even
    pays = {e for e, gain in gains.items() if gain >= n}
    if found is None:
        assert max(gains) not in pays
    else:
        assert all(e in pays for e in gains if e >= found)
        before = [e for e in gains if e < found]
        assert not before or max(before) not in pays
    assert Sweep("static_strided", gains, None).break_even is None


# Against the committed measurements


@cache
def committed() -> dict[tuple[str, int, float], dict[str, Any]]:
    """(model, T, skew) -> what the result file says, read anew, not what is shipped."""
    cells: dict[tuple[str, int, float], dict[str, Any]] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "us" in row and row["skew"] is not None:
            cell = cells.setdefault((row["model"], row["T"], row["skew"]), {"us": {}})
            cell.update(used=row["active"], busiest=row["maxload"])
            cell["us"][row["contestant"]] = row["us"]
    return {place: cell for place, cell in cells.items() if compared(cell["us"])}


def compared(times: dict[str, float]) -> bool:
    """Whether there is a time of ours and one of another."""
    return "weave" in times and not all(name.startswith("weave") for name in times)


def few() -> list[tuple[str, int, float]]:
    return [place for place in committed() if place[1] <= 256]


def drawn(place: tuple[str, int, float]) -> Ids:
    model, tokens, skew = place
    cell = committed()[place]
    return draw_routings(Cell(model, tokens, skew, "steal", 1.0, cell["used"], cell["busiest"]), 1)[
        0
    ]


def gain_of(place: tuple[str, int, float]) -> float:
    """The best rival's time over ours, as measured."""
    times = committed()[place]["us"]
    return min(us for name, us in times.items() if not name.startswith("weave")) / times["weave"]


def test_the_shipped_cells_are_the_committed_ones() -> None:
    shipped = {(c.model, c.tokens, c.skew): c for c in measured_cells()}
    assert set(shipped) == {p for p in committed() if p[0] in SHAPES}
    for place, cell in shipped.items():
        assert cell.gain == pytest.approx(gain_of(place))
        ours = {f"weave:{n}" if n != "steal" else "weave": us for n, us in cell.ours.items()}
        assert ours | dict(cell.others) == committed()[place]["us"]


@pytest.mark.parametrize("place", few(), ids=str)
def test_it_says_no_where_measurements_say_no(place: tuple[str, int, float]) -> None:
    layer, ids, measured = layer_of(place[0]), drawn(place), gain_of(place)
    whole = advise(layer, ids, share=1.0, exponents=())
    assert whole.against == "measured"
    if measured < 1 - LEVEL:
        assert whole.verdict == "no"
        assert f"{measured:.2f} times as fast" in whole.reason
    elif measured <= 1:
        assert whole.verdict == "does-not-matter"
        assert "level with" in whole.reason
    if measured < MATTERS:
        assert whole.verdict != "use"
    # Routings of one cell can look like another's, whose gain may be smaller, but not by much.
    if measured > 1.05:
        assert whole.verdict == "use"
    for share in (0.1, 0.5):
        part = replace(whole, share=share)
        verdict, _ = module._verdict(part)
        assert (verdict == "use") <= (end_to_end(share, measured) >= MATTERS)


def slower(gains: dict[tuple[str, int, float], float]) -> list[MeasuredCell]:
    """The shipped cells, the best of the others `gains` times our time where a gain is given."""
    cells = []
    for cell in measured_cells():
        gain = gains.get((cell.model, cell.tokens, cell.skew), cell.gain)
        others = {name: us * gain / cell.gain for name, us in cell.others.items()}
        cells.append(replace(cell, others=others))
    return cells


SOME = [("qwen3-30b", 4, 0), ("qwen3-30b", 64, 1.2), ("mixtral", 16, 0), ("mixtral", 64, 1.2)]
"""Measured places for which cells are made up."""


@pytest.mark.parametrize("place", SOME, ids=str)
@pytest.mark.parametrize("gain", [0.5, 0.93, 1 - 1.3 * LEVEL, 1 - 0.7 * LEVEL, 1.0, 1 + LEVEL / 2])
def test_slower_by_more_than_a_hundredth_is_no_and_level_does_not_matter(
    place: tuple[str, int, float], gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = slower({place: gain})
    monkeypatch.setattr(measured_module, "measured_cells", lambda: cells)
    layer, ids = layer_of(place[0]), drawn(place)
    rival = next(c for c in cells if (c.model, c.tokens, c.skew) == place).best[0]
    found = advise(layer, ids, share=1.0, exponents=())
    assert (found.against, found.speedup) == ("measured", pytest.approx(gain))
    assert f"{rival}, measured at" in found.reason
    assert f"{found.speedup:.2f} times as fast" in found.reason
    if gain < 1 - LEVEL:
        assert found.verdict == "no"
        assert "slower here" in found.reason
    else:
        assert found.verdict == "does-not-matter"
        assert "level with" in found.reason
    # Nor does a slow present hide who is faster.
    given_now = advise(layer, ids, now_us=10**6, exponents=())
    told = [note for note in given_now.notes if "was measured to be faster" in note]
    assert [note.split(" was")[0] for note in told] == ([rival] if gain < 1 - LEVEL else [])


@pytest.mark.parametrize("place", [p for p in few() if p[1] <= 64], ids=str)
def test_what_is_simulated_says_no_where_measurements_say_no(place: tuple[str, int, float]) -> None:
    times = committed()[place]["us"]
    measured = times["weave:static_strided"] / times["weave"]
    found = advise(
        layer_of(place[0]), drawn(place), share=1.0, machine=NOT_MEASURED, busy=0.0, exponents=()
    )
    assert found.against == "simulated"
    assert found.sure is not None
    assert found.speedup is not None
    assert found.sure < found.speedup
    # The error was taken off, so what is left was measured, too; and little is promised in vain.
    assert found.sure <= measured * 1.015
    if measured < 1.01:
        assert found.verdict != "use"


def test_the_errors_taken_off_are_those_of_the_shipped_rows() -> None:
    found = calibration()
    held_out = found["errors"]["held_out"]["models"]
    off: list[float] = []
    ratios: dict[str, list[float]] = {}
    # Of one file's rows at a time: policies are compared with those that took turns with them.
    for rows in (
        [(*row, 0) for row in found["rows"] if row[0] in held_out],
        [tuple(row) for row in found["policy_rows"]],
    ):
        by = {(m, t, skew, policy, held): (us, sim) for m, t, skew, policy, us, sim, held in rows}
        for (model, tokens, skew, policy, held), (us, sim) in by.items():
            if policy == "steal":
                off.append(abs(sim - us) / us)
            steal = by.get((model, tokens, skew, "steal", held))
            if steal is not None:
                error = abs((sim / steal[1]) / (us / steal[0]) - 1)
                ratios.setdefault(policy, []).append(error)
    errors = ratio_errors()
    assert set(errors.policies) == set(ratios) - {"steal"} >= set(STATIC)
    # What is known of one mapping is not held against the other.
    assert errors.policies["static_expert"] > 1.5 * errors.policies["static_strided"]
    named = [(error, ratios[policy]) for policy, error in errors.policies.items()]
    for error, those in ((errors.time, off), *named):
        assert len(those) >= 20
        assert sum(value > error for value in those) <= len(those) / 10
        # Not by being far too careful.
        assert sum(value > 0.8 * error for value in those) >= len(those) / 20
    stated = [found["errors"][kind]["by_policy"]["steal"]["worst"] for kind in KINDS]
    assert max(off) == pytest.approx(max(stated), abs=0.002)


KINDS = ("held_out", "policies")
"""Errors on rows that were not fitted to."""


def test_a_cell_speaks_only_for_loads_like_its_own() -> None:
    shape = SHAPES["qwen3-30b"]
    cells = [c for c in measured_cells() if c.model == "qwen3-30b"]
    most = max(c.tokens for c in cells)
    for cell in cells:
        near = measured_near(shape, cell.tokens, round(cell.used), round(cell.busiest))
        assert [c.tokens for c in near] == [cell.tokens]
        assert near[0].gain <= cell.gain + 1e-9 or near[0].skew == cell.skew
    assert measured_near(shape, most + 1, 128, most) == ()
    assert measured_near(replace(shape, hidden=4096), 64, 127, 10) == ()
    assert measured_near(replace(shape, dtype="float32"), 64, 127, 10) == ()


@given(st.integers(1, 300), st.integers(1, 300))
def test_no_cell_speaks_for_loads_that_are_far(tokens: int, busiest: int) -> None:
    assume(busiest <= tokens)
    near = measured_near(SHAPES["qwen3-30b"], tokens, 60, busiest)
    assert len({c.tokens for c in near}) == len(near) <= 2
    for cell in near:
        assert max(cell.tokens, tokens) <= NEAR_TOKENS * min(cell.tokens, tokens)
        loads = (busiest / tokens, cell.busiest / cell.tokens)
        assert max(loads) <= NEAR_LOAD * min(loads) * (1 + 1e-9)


@pytest.mark.parametrize("tokens", [32, 128])
def test_between_two_cells_the_worse_one_counts(tokens: int) -> None:
    ids = routing(tokens, 128, 8)
    found = advise(preset("qwen3-30b"), ids, share=1.0, exponents=())
    assert len(found.cells) == 2
    assert {c.tokens for c in found.cells} == {tokens // NEAR_TOKENS, tokens * NEAR_TOKENS}
    assert found.speedup == min(c.gain for c in found.cells)


# The rules, in their order


def fake(**changes: Any) -> Advice:
    base = Advice(
        "no",
        "",
        against="measured",
        versus="another",
        speedup=1.3,
        sure=1.3,
        gain=1.1,
        share=0.5,
        assumed=False,
    )
    return replace(base, **changes)


def memory(fits: bool, asked: bool = True) -> Any:
    return fit_memory(ModelSize(1, 10**9, 10**9, None, ""), 80 if fits else 2, 1 if asked else None)


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({}, "use", "1.30 times"),
        ({"communication": COMMUNICATION}, "use", ""),
        ({"communication": COMMUNICATION + 0.01}, "communication-first", "41%"),
        ({"communication": 0.5, "speedup": 0.9, "sure": 0.9}, "communication-first", ""),
        ({"speedup": 0.98, "sure": 0.98}, "no", "slower here: 0.98"),
        ({"speedup": 0.98, "sure": 0.98, "busy": 0.9}, "no", "measured"),
        ({"speedup": 0.98, "sure": 0.94, "against": "given"}, "no", "slower"),
        ({"speedup": 0.995, "sure": 0.995, "share": 1.0}, "does-not-matter", "is level with"),
        ({"speedup": 1.005, "sure": 1.005, "share": 1.0}, "does-not-matter", "is level with"),
        ({"speedup": 0.995, "sure": 0.95, "against": "given"}, "does-not-matter", ""),
        ({"speedup": 0.995, "sure": 0.995, "busy": 0.9}, "already-busy", ""),
        ({"speedup": 0.99, "sure": 0.95, "against": "simulated"}, "does-not-matter", ""),
        ({"busy": BUSY}, "use", ""),
        ({"busy": BUSY + 0.01}, "already-busy", "86%"),
        ({"busy": 0.9, "against": "simulated"}, "already-busy", "simulated"),
        ({"speedup": 1.03, "sure": 1.03}, "does-not-matter", "68% of the step"),
        ({"speedup": 1.01, "sure": 1.01, "share": 1.0}, "does-not-matter", "below 1.02"),
        ({"sure": 1.03, "against": "simulated"}, "does-not-matter", "error against it"),
        ({"share": 0.0}, "does-not-matter", ""),
        ({"memory": memory(True)}, "use", ""),
        ({"memory": memory(False)}, "no", "do not fit"),
        ({"memory": memory(False, asked=False)}, "use", ""),
        ({"memory": memory(False), "communication": 0.5}, "no", "do not fit"),
    ],
)
def test_the_first_rule_that_applies(changes: dict[str, Any], verdict: str, reason: str) -> None:
    found, why = module._verdict(fake(**changes))
    assert found == verdict
    assert found in VERDICTS
    assert reason in why


@given(st.floats(0, 1), st.floats(0, 0.4), st.floats(0.5, 2), st.floats(1, 1.2), st.floats(0, 1))
def test_use_it_is_said_only_where_it_matters(
    share: float, communication: float, speedup: float, error: float, busy: float
) -> None:
    assume(share + communication <= 1)
    changes = {"share": share, "communication": communication, "busy": busy}
    found = fake(speedup=speedup, sure=speedup / error, against="simulated", **changes)
    if module._verdict(found)[0] == "use":
        assert end_to_end(share, speedup) >= MATTERS
        assert busy <= BUSY


@pytest.mark.parametrize("change", [{"hidden": 2044}, {"intermediate": 100}, {"experts": 2000}])
def test_layers_that_the_kernel_refuses_are_no(change: dict[str, int]) -> None:
    layer = replace(preset("qwen3-30b"), **change)
    found = advise(layer, routing(8, layer.experts, layer.top_k), communication=0.5)
    assert (found.verdict, found.results, found.speedup) == ("no", (), None)
    assert "kernel does not take" in found.reason


def test_quantised_checkpoints_are_no() -> None:
    layer = replace(preset("qwen3-30b"), quantized="fp8")
    found = advise(layer, routing(8, 128, 8))
    assert (found.verdict, found.results, found.speedup) == ("no", (), None)
    assert "weights are fp8, which the GPU kernel does not take" in found.reason


def test_held_sms_and_a_hot_expert_are_what_it_is_for() -> None:
    # Measured: static lists take 1.32 times as long.
    place = ("mixtral", 1024, 1.2)
    held = advise(layer_of(place[0]), drawn(place), share=0.8, held=16, exponents=())
    assert held.verdict == "use"
    assert held.against == "simulated"
    layer = preset("qwen3-30b")
    ids = routing(64, 128, 8)
    notes = advise(layer, ids, share=0.8, held=48, exponents=()).notes
    unmeasured = "policies" not in calibration()["errors"]
    assert any("48 held SMs" in note for note in notes) == unmeasured
    # With half of the SMs held static lists were measured to be level.
    half = advise(layer, ids, share=0.8, held=66, exponents=())
    assert half.verdict != "use"
    hot = routing(256, 128, 8)
    hot[:, 0] = 77
    found = advise(
        layer, hot, share=0.5, static="static_expert", machine=NOT_MEASURED, exponents=()
    )
    assert found.verdict == "use"
    assert found.speedup is not None
    assert found.speedup > 2


def test_no_slot_at_all_and_more_slots_than_experts() -> None:
    with pytest.raises(ValueError, match=r"topk_ids must have a slot with an expert, 0 \.\. 15"):
        advise(SMALL, [[-1, -1], [-1, 16]])
    assert advise(SMALL, [[-1, -1], [-1, 15]], exponents=()).results
    # What a recorded routing may be, no router draws: two slots of one expert.
    one = replace(SMALL, experts=1, routing=RoutingConfig(top_k=2))
    found = advise(one, [[0, 0], [0, -1]])
    assert len(found.results) == len(module.POLICIES)
    assert found.sweeps == ()


def test_a_call_of_several_launches_is_refused_with_the_reason() -> None:
    longest = slab_tokens(SMALL.shape())
    with pytest.raises(ValueError, match=rf"topk_ids .* {longest} tokens, what one launch takes"):
        advise(SMALL, np.zeros((longest + 1, 2), dtype=int), exponents=())
    # A layer that the kernel refuses has no launches: no for any number of tokens.
    other = replace(SMALL, hidden=SMALL.hidden + 4)
    found = advise(other, np.zeros((longest + 1, 2), dtype=int), exponents=())
    assert "hidden is" in found.reason


def test_the_time_it_takes_now_comes_first() -> None:
    layer, ids = preset("qwen3-30b"), routing(64, 128, 8)
    base = advise(layer, ids, share=1.0, exponents=())
    steal = next(r.time_us for r in base.results if r.policy == "steal")
    for factor in (0.8, 1.01, 1.5):
        found = advise(layer, ids, share=1.0, now_us=factor * steal, exponents=())
        assert found.against == "given"
        assert found.speedup == pytest.approx(factor)
        assert found.verdict == {0.8: "no", 1.01: "does-not-matter", 1.5: "use"}[factor]


def test_a_sweep_compares_what_simulate_gives() -> None:
    steps: list[str] = []
    found = advise(SMALL, routing(64, 16, 2), exponents=(0.0, 2.0), step=steps.append)
    assert [s.static for s in found.sweeps] == list(STATIC)
    assert all(set(s.gains) == {0.0, 2.0} for s in found.sweeps)
    assert all(s.needed == needed_speedup(ASSUMED_SHARE) for s in found.sweeps)
    assert len(steps) == 1 + len(module.POLICIES) + 2
    assert found.assumed
    assert found.share == ASSUMED_SHARE


# One GPU of several


@given(st.integers(1, 60), st.sampled_from((1, 2, 4, 8)), st.integers(0, 50), st.booleans())
@settings(max_examples=60)
def test_the_busiest_gpu_has_its_experts_slots(
    tokens: int, gpus: int, seed: int, skipped: bool
) -> None:
    shape = LayerShape(64, 64, 16, 2)
    ids = routing(tokens, 16, 2, 1.0, seed)
    if skipped:
        ids[np.random.default_rng(seed).random(ids.shape) < 0.4] = -1
    each = 16 // gpus
    slots = [int(((ids >= g * each) & (ids < (g + 1) * each)).sum()) for g in range(gpus)]
    part, local = module._one_gpu(shape, ids, gpus, "expert")
    assert (part.experts, part.intermediate) == (each, 64)
    assert local.shape == ids.shape
    assert local.max() < each
    assert int((local >= 0).sum()) == max(slots)
    whole, same = module._one_gpu(shape, ids, gpus, "tensor")
    assert (whole.experts, whole.intermediate) == (16, 64 // gpus)
    assert np.array_equal(same, ids)


def test_a_gpu_of_several_takes_less_and_no_cell_speaks_for_it() -> None:
    ids = routing(64, 128, 8)
    one = advise(preset("qwen3-30b"), ids, exponents=())
    for split in ("tensor", "expert"):
        found = advise(preset("qwen3-30b"), ids, gpus=2, split=split, exponents=())
        assert found.cells == ()
        ratio = found.results[0].time_us / one.results[0].time_us
        assert 0.45 < ratio < 0.75
        assert any("2 GPUs" in note for note in found.notes)


# A running layer


@pytest.mark.parametrize("bias", [False, True])
def test_a_running_layer_is_taken_as_it_is(bias: bool) -> None:
    torch.manual_seed(0)
    shape = LayerShape(256, 128, 16, 4)
    config = RoutingConfig(scoring="sigmoid" if bias else "softmax", top_k=4, renormalize=True)
    layer = MoELayer(shape, config, selection_bias=bias, router_bias=bias)
    if bias:
        layer.gate.e_score_correction_bias.copy_(torch.randn(16))
        layer.gate.bias.data = torch.randn(16, dtype=torch.bfloat16)
    x = torch.randn(3, 11, 256, dtype=torch.bfloat16)
    ids = routing_of(layer, x)
    with torch.no_grad():
        _, _, expected = moe_layer(
            x.reshape(-1, 256),
            layer.experts.gate_up_proj,
            layer.experts.down_proj,
            router_weight=layer.gate.weight,
            router_bias=layer.gate.bias if bias else None,
            selection_bias=layer.gate.e_score_correction_bias if bias else None,
            routing=config,
            return_routing=True,
            backend="reference",
        )
    assert torch.equal(ids, expected)
    found = advise(layer, ids, exponents=())
    assert found.results[0].rows >= 33 * 4
    assert found.memory is None
    with pytest.raises(ValueError, match="hidden_states"):
        routing_of(layer, torch.zeros(3, 128))


def test_a_float32_layer_is_no() -> None:
    layer = MoELayer(LayerShape(64, 64, 8, 2, "float32"), RoutingConfig(top_k=2))
    found = advise(layer, routing(4, 8, 2))
    assert found.verdict == "no"
    assert "float32" in found.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": [[0.5, 1.0]]}, "topk_ids"),
        ({"topk_ids": [[0, 1, 2]]}, "topk_ids"),
        ({"topk_ids": np.zeros((0, 2), dtype=int)}, "topk_ids"),
        ({"share": 1.5}, "share"),
        ({"share": 0.7, "communication": 0.4}, "share and communication"),
        ({"busy": -0.1}, "busy"),
        ({"now_us": 0.0}, "now_us"),
        ({"static": "counter"}, "static"),
        ({"machine": "b9000"}, "machine"),
        ({"gpus": 3}, "gpus"),
        ({"gpus": 3, "split": "expert"}, "gpus"),
        ({"gpus": 0}, "gpus"),
        ({"split": "rows", "gpus": 2}, "split"),
        ({"split": "expert"}, "split needs gpus"),
        ({"held": 132}, "held"),
        ({"memory_gb": 0.0, "size": ModelSize(1, 1, 1, None, "")}, "memory_gb"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    good = {"layer": SMALL, "topk_ids": [[0, 1], [2, 3]], "exponents": ()}
    assert advise(**good).results
    with pytest.raises(ValueError, match=message):
        advise(**(good | change))
    with pytest.raises(TypeError, match="layer"):
        advise("qwen3-30b", good["topk_ids"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"share": "a"},
        {"communication": "a"},
        {"busy": [1]},
        {"now_us": "1"},
        {"memory_gb": "80"},
        {"gpus": 1.5},
        {"held": 1.5},
    ],
    ids=str,
)
def test_other_types_are_named(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"^{next(iter(change))} must be a"):
        advise(SMALL, [[0, 1], [2, 3]], exponents=(), **change)


@pytest.mark.parametrize("name", ["share", "now_us", "memory_gb"])
def test_numbers_are_finite(name: str) -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=name):
            advise(SMALL, [[0, 1], [2, 3]], exponents=(), **{name: value})


# Memory


def test_published_sizes_hold_their_experts() -> None:
    assert set(PUBLISHED) == set(PRESETS)
    for name in PUBLISHED:
        size = size_of_preset(PRESETS[name])
        assert size is not None
        assert 0.85 < size.experts / size.total < 1, name
    assert size_of_preset(SMALL) is None
    assert set(GPU_GB) == set(MACHINES)


@given(st.integers(1, 3000), st.floats(10, 300), st.integers(1, 64))
def test_the_fewest_gpus_hold_the_weights_and_one_less_does_not(
    gb: int, gpu_gb: float, gpus: int
) -> None:
    size = ModelSize(10, gb * 10**9, 10**8, 10**5, "")
    found = fit_memory(size, gpu_gb)
    assert found.fits
    assert found.gpus == found.fewest
    if found.fewest > 1:
        assert not fit_memory(size, gpu_gb, found.fewest - 1).fits
    asked = fit_memory(size, gpu_gb, gpus)
    assert asked.fits == (gpus >= asked.fewest)
    if asked.left_tokens is not None:
        used = asked.left_tokens * 1e5 / 1e9 + asked.weights_gb
        assert used <= gpus * gpu_gb * USABLE * (1 + 1e-9)
        assert used >= gpus * gpu_gb * USABLE - 1e-3


QWEN = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
}
DEEPSEEK = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    **{"intermediate_size": 18432, "first_k_dense_replace": 3, "n_shared_experts": 1},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512},
    **{"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"vocab_size": 129280, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4},
}
MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32},
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
}


@pytest.mark.parametrize(
    ("config", "name", "kv"),
    [
        (QWEN, "qwen3-30b", 48 * 2 * 4 * 128 * 2),
        (DEEPSEEK, "deepseek-v3", 61 * 576 * 2),
        (MIXTRAL, "mixtral-8x7b", 32 * 2 * 8 * 128 * 2),
    ],
)
def test_a_config_gives_the_published_size(
    config: dict[str, Any], name: str, kv: int, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": config} if name == "qwen3-30b" else config))
    found = size_of_config(tmp_path, from_config(path))
    published = size_of_preset(PRESETS[name])
    assert found is not None
    assert published is not None
    assert found.layers == published.layers
    assert found.experts == published.experts
    assert found.total == pytest.approx(published.total, rel=0.005)
    assert found.kv_token == kv


def test_layers_are_counted_as_configs_name_them(tmp_path: Path) -> None:
    layer = preset("qwen3-30b")
    path = tmp_path / "config.json"
    for change, layers in (
        ({"decoder_sparse_step": 2}, 24),
        ({"mlp_only_layers": [0, 1, 5]}, 45),
        ({"first_k_dense_replace": 4}, 44),
        ({"moe_layers": [3, 7]}, 2),
        ({"hybrid_override_pattern": "MEM*EME"}, 3),
    ):
        path.write_text(json.dumps(QWEN | change))
        found = size_of_config(path, layer)
        assert found is not None
        assert found.layers == layers
    path.write_text(json.dumps({"hidden_size": 64}))
    assert size_of_config(path, layer) is None
    for change, cached in (
        ({"layer_types": ["full_attention", "sliding_attention"] * 24}, 24),
        ({"full_attention_interval": 4}, 12),
    ):
        path.write_text(json.dumps(QWEN | change))
        found = size_of_config(path, layer)
        assert found is not None
        assert found.kv_token == cached * 2 * 4 * 128 * 2


# Command line


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["advise", *arguments])


def test_the_command_prints_what_the_api_says() -> None:
    arguments = ("--preset", "qwen3-30b", "--tokens", "16", "--routing", "zipf", "--share", "0.4")
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["verdict"] in VERDICTS
    assert found["gain"] == pytest.approx(end_to_end(0.4, found["speedup"]))
    assert found["share_assumed"] is False
    assert {p["policy"] for p in found["policies"]} == set(module.POLICIES)
    assert found["memory"]["weights_gb"] == pytest.approx(61.0)
    assert invoke(*arguments, "--json").stdout == result.stdout
    text = invoke(*arguments).stdout
    words = " ".join(text.split())
    assert f"verdict {VERDICTS[found['verdict']]}: " in words
    assert found["reason"] in words
    for part in ("simulated", "measured", "gain", "skew", "memory", "error"):
        assert part in text


def test_a_config_and_unknown_machines_go_through(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    common = ("--config", str(tmp_path), "--tokens", "4")
    result = invoke(*common, "--gpus", "2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["memory"]["left_tokens"] > 10**6
    (tmp_path / "mine.json").write_text('{"base": "h100-sxm"}')
    other = invoke(*common, "--machine", str(tmp_path / "mine.json"), "--json")
    assert other.exit_code == 0, other.output
    document = json.loads(other.stdout)
    assert document["memory"] is None
    assert document["measured"] == []
    assert any("machine mine" in note for note in document["notes"])


def test_what_is_odd_about_a_trace_or_a_call_is_said(tmp_path: Path) -> None:
    empty = tmp_path / "empty.npz"
    np.savez(empty, topk_ids=np.full((4, 2), -1))
    once = tmp_path / "once.npz"
    np.savez(once, topk_ids=np.zeros((4, 2), dtype=int))
    for arguments, message in (
        (("--routing", f"trace:{empty}"), "--routing must have a slot with an expert"),
        (("--preset", "qwen3-30b", "--tokens", "131072"), "--tokens must be at most 16384 tokens"),
        (("--preset", "qwen3-30b", "--tokens", "131072"), "what one launch takes"),
        (("--split", "expert"), "--split needs --gpus"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in " ".join(result.stderr.split())
    result = invoke("--routing", f"trace:{once}", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["skew"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--machine", "b9000"),
        ("--share", "1.5"),
        ("--share", "0.8", "--communication", "0.3"),
        ("--gpus", "5"),
        ("--split", "rows"),
        ("--now", "0"),
        ("--held", "132"),
        ("--memory", "0"),
        ("--preset", "qwen3-30b", "--tokens", "131072"),
        ("--preset", "qwen3-31b"),
    ],
)
def test_bad_options_are_one_line_and_status_2(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert arguments[-2].removeprefix("--") in result.stderr
    assert result.stdout == ""


def test_choices_of_the_command_line_are_the_api_s() -> None:
    assert MAPPINGS == STATIC
    assert SPLITS == module.SPLITS


def test_it_loads_nothing_that_only_prints_or_draws() -> None:
    code = (
        "import sys, weave_moe.advise\n"
        "sys.exit(bool({'rich', 'matplotlib', 'transformers', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_page_runs_as_it_is_and_states_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/advise.md").read_text(encoding="utf-8")
    for code in code_blocks(page):
        exec(compile(code, "advise.md", "exec"), {})
    assert capsys.readouterr().out.split(":")[0] in VERDICTS.values()
    for text in (
        f"above {COMMUNICATION:.0%} of".replace("%", " %"),
        f"above {BUSY:.0%} of".replace("%", " %"),
        f"{MATTERS:g} times",
        f"{ASSUMED_SHARE:g} is assumed",
        f"a factor of {NEAR_LOAD:g}",
        f"by more than {LEVEL:.0%}".replace("%", " %"),
        f"{USABLE:.0%} is usable".replace("%", " %"),
    ):
        assert text in page, text
    for name, words in VERDICTS.items():
        assert f"`{name}`" in page
        assert f"| {words} |" in page


def test_a_cell_prints_its_place() -> None:
    cell = MeasuredCell("qwen3-30b", 64, 1.2, 97.0, 60.0, {"steal": 2.0}, {"a": 3.0, "b": 2.5})
    assert str(cell) == "qwen3-30b, 64 tokens, skew 1.2"
    assert cell.best == ("b", 2.5)
    assert cell.gain == 1.25
