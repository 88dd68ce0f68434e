"""Launches of a call on a GPU: how many, how large, and what is handed to them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weave_moe
from fakes.launches import H200, Recorder, bf16_case, layer_of
from generators import ROUTINGS, generator
from weave_moe.backends import cuda
from weave_moe.presets import PRESETS
from weave_moe.routing import RoutingConfig
from weave_moe.runtime import kernel
from weave_moe.runtime.buffers import ROUTER_STATE_BYTES, needs_of
from weave_moe.runtime.kernel import COMBINE_WARPS, PIECE, sort_bytes
from weave_moe.schedule.granularity import FEW_TOKENS, choose_kernel
from weave_moe.shapes import LayerShape


@pytest.mark.parametrize("multiprocessors", [78, 114, 132])  # H20, H100 PCIe, H100 SXM and H200
@pytest.mark.parametrize("tokens", [5, FEW_TOKENS + 1])
def test_a_launch_has_a_block_for_each_multiprocessor(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tokens: int, multiprocessors: int
) -> None:
    device = replace(H200, multiprocessors=multiprocessors)
    monkeypatch.setattr(cuda, "_device", lambda index: device)
    (launch,) = recorder.run(bf16_case(tokens))
    assert launch.blocks == launch.p.shared.workers == multiprocessors
    assert launch.config.many == (tokens > FEW_TOKENS)
    if launch.config.many:
        sort, _, _ = recorder.all
        assert sort.blocks == multiprocessors
    # Each block has its queue of each stage before the counters of groups, in memory that is there.
    shared, counters = launch.p.shared, recorder.buffers.counters
    assert shared.up_done - shared.queue == 3 * 8 * multiprocessors
    end = shared.down_done + 4 * shared.experts
    assert end <= counters.data_ptr() + counters.numel()


def test_few_tokens_take_one_launch(recorder: Recorder) -> None:
    recorder.run(bf16_case(5))
    (launched,) = recorder.all
    assert (launched.name, launched.shared) == ("experts", None)
    assert not launched.config.many


@settings(max_examples=20)
@given(data=st.data())
def test_many_tokens_take_three_launches_that_cover_them(
    data: st.DataObject, shared_recorder: Recorder
) -> None:
    recorder = shared_recorder
    tokens = data.draw(st.integers(FEW_TOKENS + 1, 3000), "tokens")
    hidden = 8 * data.draw(st.integers(1, 80), "H / 8")
    top_k = data.draw(st.integers(1, 3), "top_k")
    case = bf16_case(tokens, hidden=hidden, intermediate=8, experts=3, top_k=top_k)
    recorder.run(case)
    sort, experts, combine = recorder.all
    assert [sort.name, experts.name, combine.name] == ["sort", "experts", "combine"]
    assert bytes(sort.p) == bytes(experts.p) == bytes(combine.p)
    assert sort.maps == combine.maps == b""
    assert sort.blocks == experts.blocks == 132
    p, slots = sort.p, tokens * top_k
    assert p.chunk_slots % top_k == 0
    assert (p.sort_chunks - 1) * p.chunk_slots < slots <= p.sort_chunks * p.chunk_slots
    assert sort.shared == sort_bytes(3, p.chunk_slots)
    assert experts.shared is combine.shared is None
    # A warp for each token and piece.
    warps = tokens * -(-hidden // PIECE)
    assert (combine.blocks - 1) * COMBINE_WARPS < warps <= combine.blocks * COMBINE_WARPS


@pytest.mark.parametrize("routes", [False, True])
def test_the_device_chooses_between_a_launch_for_few_tokens_and_the_others(
    recorder: Recorder, routes: bool
) -> None:
    tokens = 2048
    case = bf16_case(tokens, valid=5, residual=True)
    if routes:
        recorder.layer(layer_of(case))
    else:
        recorder.run(case)
    few, *many = recorder.all
    names = ["route", "sort", "experts", "combine"]
    assert len(recorder.all) == (5 if routes else 4)
    assert few.name == "experts"
    assert [launched.name for launched in many] == names[not routes :]
    assert [few.config.many, *(launched.config.many for launched in many)] == [
        False,
        *[True] * len(many),
    ]
    assert (few.p.tokens, many[0].p.tokens) == (FEW_TOKENS, tokens)
    for name in ("x", "out", "residual", "valid", "valid_offset", "top_k"):
        assert len({getattr(launched.p, name) for launched in recorder.all}) == 1, name
    assert {launched.p.few_tokens for launched in recorder.all} == {FEW_TOKENS}
    # One memory for both, made before either starts.
    held = recorder.buffers
    for launched in recorder.all:
        p = launched.p
        assert p.shared.control == held.counters.data_ptr()
        assert p.h == held.h.data_ptr()
        if routes:
            assert p.router.state + ROUTER_STATE_BYTES <= p.shared.control + held.counters.numel()


def test_where_nothing_is_to_choose_there_are_no_launches_more(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = bf16_case(2048, valid=5)
    for case, most in (
        (bf16_case(2048), 16_384),  # the host knows the number
        (bf16_case(FEW_TOKENS, valid=5), 16_384),  # few in any case
        (padded.with_(workspace=weave_moe.Workspace(trace=True)), 16_384),
        # A slab that is itself a launch for few tokens.
        (bf16_case(2 * FEW_TOKENS + 1, valid=5), 2 * FEW_TOKENS),
    ):
        monkeypatch.setattr(cuda, "SLAB_TOKENS", most)
        launches = recorder.run(case)
        assert [launch.p.few_tokens for launch in launches] == [0] * len(launches)
        assert sum(launch.p.tokens for launch in launches) == len(case.args[0])
    monkeypatch.setattr(cuda, "SLAB_TOKENS", 1024)
    launches = recorder.run(padded)
    assert [launch.p.tokens for launch in launches] == [FEW_TOKENS, 1024, 1024]
    assert [launch.p.valid_offset for launch in launches] == [0, 0, 1024]
    assert {launch.p.few_tokens for launch in launches} == {FEW_TOKENS}


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    # With so many experts 86 (or 256, or 43) tokens fit in one launch, and these fewer do not.
    [(46, 1013, 8), (180, 1020, 2), (23, 1024, 16), (2048, 1013, 8), (300, 1024, 8)],
)
def test_no_launch_goes_past_the_call(
    recorder: Recorder, tokens: int, experts: int, top_k: int
) -> None:
    case = bf16_case(
        tokens, hidden=8, intermediate=8, experts=experts, top_k=top_k, valid=tokens - 1
    )
    launches = recorder.run(case)
    assert max(launch.p.valid_offset + launch.p.tokens for launch in launches) == tokens
    # Where both kinds are launched there are counts for both.
    for launch in launches:
        assert launch.p.few_tokens < tokens
        assert (launch.p.few_tokens > 0) == (len(launches) > 1)


def test_parameters_come_from_the_call(recorder: Recorder) -> None:
    case = bf16_case(
        5, biases=True, valid=3, mapped=True, id_dtype=torch.int64, activation="swiglu_oai"
    )
    call = case.call()
    recorder.launches.clear()
    out = cuda._run(call)
    p = recorder.launches[0].p
    for name, tensor in (
        *(("x", call.x), ("ids", call.topk_ids), ("weights", call.topk_weights)),
        *(("valid", call.num_valid_tokens), ("expert_map", call.expert_map)),
        *(("b13", call.b13), ("b2", call.b2), ("out", out)),
    ):
        assert tensor is not None
        assert getattr(p, name) == tensor.data_ptr(), name
    assert (p.tokens, p.top_k, p.experts, p.experts_global) == (5, 2, 4, 8)
    assert (p.ids_wide, p.valid_wide, p.weights_kind) == (1, 0, 0)
    assert (p.alpha, p.limit, p.up_offset) == (pytest.approx(1.702), 7.0, 1.0)
    plain = recorder.run(bf16_case(5))[0].p
    assert plain.valid is plain.expert_map is plain.b13 is plain.b2 is None
    assert (plain.ids_wide, plain.alpha, plain.up_offset) == (0, 1.0, 0.0)


def test_a_routers_parameters_come_from_the_call(recorder: Recorder) -> None:
    routing = RoutingConfig(
        2, "sqrtsoftplus", renormalize=True, scaling_factor=2.5, num_groups=4, topk_groups=3
    )
    call = layer_of(
        bf16_case(5, valid=3, experts=8),
        routing=routing,
        router="fp32",
        router_bias=torch.zeros(8, dtype=torch.float16),
        selection_bias=torch.zeros(8, dtype=torch.bfloat16),
        shared=100 * 8,
        gate=torch.float32,
    )
    (launch,), weights, ids = recorder.layer(call)
    p, r, shared = launch.p, launch.p.router, call.shared
    assert shared is not None
    for name, tensor in (
        *(("weight", call.router_weight), ("gate", shared.gate), ("bias", call.router_bias)),
        *(("selection_bias", call.selection_bias), ("chosen", ids), ("chosen_weights", weights)),
    ):
        assert tensor is not None
        assert getattr(r, name) == tensor.data_ptr(), name
    assert r.logits is r.expert_map is None
    assert (r.bias_kind, r.selection_kind) == (2, 1)
    assert RoutingConfig.SCORINGS[r.scoring] == "sqrtsoftplus"
    assert (r.top_k, r.renormalize, r.groups, r.kept_groups) == (2, 1, 4, 3)
    assert (r.scale, r.experts, r.rows) == (2.5, 8, 9)
    assert launch.config.router == "fp32"
    assert p.valid == call.experts.num_valid_tokens.data_ptr()
    # Tokens past the valid ones are not routed: what is handed out there is zero.
    assert not ids.any()
    assert not weights.any()

    plain = layer_of(bf16_case(5, mapped=True), router="logits", shared=64)
    (launch,), _, _ = recorder.layer(plain)
    p, r = launch.p, launch.p.router
    assert r.weight is r.gate is r.bias is r.selection_bias is None
    assert r.logits == plain.router_logits.data_ptr()
    # The router's experts are global ones, and it is the router that maps them.
    assert (r.experts, r.rows, r.expert_map) == (8, 0, plain.experts.expert_map.data_ptr())
    assert (p.expert_map, p.experts_global, p.routed, p.experts) == (None, 0, 4, 5)
    assert (r.renormalize, r.groups, r.kept_groups, r.scale) == (0, 1, 1, 1.0)


@pytest.mark.parametrize(
    ("router", "gate", "kind"),
    [
        ("logits", None, "logits"),
        ("logits", torch.float16, "same"),
        ("logits", torch.float32, "fp32"),
        ("same", None, "same"),
        ("same", torch.float16, "same"),
        ("fp32", None, "fp32"),
        ("fp32", torch.float32, "fp32"),
    ],
)
def test_kinds_of_routers(
    recorder: Recorder, router: str, gate: torch.dtype | None, kind: str
) -> None:
    for tokens in (5, FEW_TOKENS + 1):
        case = bf16_case(tokens, dtype=torch.float16)
        call = layer_of(case, router=router, shared=64, gate=gate)
        assert cuda.BACKEND.layer_unavailable(call) is None
        (launch,), _, _ = recorder.layer(call)
        assert launch.config.router == kind
        # Logits come first of all, if there is anything to make them from.
        assert launch.p.router.rows == (gate is not None) + (0 if router == "logits" else 4)
        names = [one.name for one in recorder.all]
        many = ["route"] * (launch.p.router.rows > 0) + ["sort", "experts", "combine"]
        assert names == (["experts"] if tokens == 5 else many)
        assert len({bytes(one.p) for one in recorder.all}) == 1
    named = [one.name == "experts" for one in recorder.all]
    assert [one.maps != b"" for one in recorder.all] == named


def test_scorings_have_the_numbers_of_the_core(recorder: Recorder) -> None:
    numbers = []
    for scoring in RoutingConfig.SCORINGS:
        call = layer_of(bf16_case(5), routing=RoutingConfig(2, scoring))
        numbers.append(recorder.layer(call)[0][0].p.router.scoring)
    (text,) = re.findall(r"enum Scoring : u32 \{(.*?)\}", kernel.device_sources()["route.h"])
    core = {name.replace("_", "").lower(): int(n) for name, n in re.findall(r"(\w+) = (\d)", text)}
    assert numbers == [core[name.replace("_", "")] for name in RoutingConfig.SCORINGS]


@pytest.mark.parametrize(
    ("shared", "inter", "slices"),
    [(0, 64, 0), (8, 64, 1), (64, 64, 1), (72, 64, 2), (128, 64, 2), (1024, 64, 16), (32, 64, 1)],
)
def test_shared_experts_are_slices_as_wide_as_the_others(
    recorder: Recorder, shared: int, inter: int, slices: int
) -> None:
    for tokens in (1, 5, 40, FEW_TOKENS + 1):
        case = bf16_case(tokens, intermediate=inter, experts=6, top_k=3)
        (launch,), _, _ = recorder.layer(layer_of(case, shared=shared))
        p = launch.p
        assert (p.experts, p.routed, p.top_k) == (6 + slices, 6, 3 + slices)
        assert (p.intermediate, p.shared.experts) == (inter, 6 + slices)
        assert launch.config.shared == bool(slices)
        # A kernel and a plan for as many slots as there are, and groups for the routed ones.
        plan = choose_kernel(
            tokens=tokens, top_k=3, experts=6, hidden=64, router=True, shared=slices
        )
        config = launch.config
        assert (config.tile_m, config.width_cap, config.many) == (
            plan.tile_m,
            plan.width_cap,
            plan.many,
        )
        assert p.ring_bytes == plan.ring_bytes
        plain = recorder.run(case)[0]
        assert plain.config.router == "none"
        assert not plain.config.shared
        assert (plain.p.experts, plain.p.routed, plain.p.top_k) == (6, 6, 3)


@pytest.mark.parametrize("name", PRESETS)
def test_every_presets_layer_of_few_tokens_is_one_launch(recorder: Recorder, name: str) -> None:
    preset = PRESETS[name]
    shape, inter = preset.shape(), preset.shared_intermediate
    slices = cuda.shared_slices(shape, inter)
    assert cuda._other_shape(shape) is cuda._other_layer(shape, shape.experts, inter) is None
    assert not cuda.plan_for(shape, FEW_TOKENS, router=True, shared=slices).many
    assert cuda.most_few_tokens(shape, 0, True, slices) == FEW_TOKENS
    assert cuda.plan_for(shape, FEW_TOKENS + 1, router=True, shared=slices).many


@pytest.mark.parametrize(("dtype", "kind"), [("float32", 0), ("bfloat16", 1), ("float16", 2)])
def test_types_of_weights_have_numbers(recorder: Recorder, dtype: str, kind: int) -> None:
    case = bf16_case(weight_dtype=getattr(torch, dtype))
    assert recorder.run(case)[0].p.weights_kind == kind


@pytest.mark.parametrize("policy", [p for p in weave_moe.POLICIES if p != "auto"])
def test_policies_have_the_numbers_of_the_core(recorder: Recorder, policy: str) -> None:
    from weave_moe.schedule import POLICY_CODES

    p = recorder.run(bf16_case().with_(policy=policy))[0].p
    assert p.knobs.policy == POLICY_CODES[policy]


@pytest.mark.parametrize("tokens", [40, FEW_TOKENS + 1])
@pytest.mark.parametrize("policy", [p for p in weave_moe.POLICIES if p != "auto"])
def test_more_tasks_than_a_queue_can_name_are_counted(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, policy: str, tokens: int
) -> None:
    from weave_moe.schedule import POLICY_CODES

    case = bf16_case(tokens, intermediate=200).with_(policy=policy)
    p = recorder.run(case)[0].p
    most = p.shared.max_groups * max(p.chunks_up, p.chunks_down)
    for limit, taken in ((most, policy), (most - 1, "counter")):
        monkeypatch.setattr(cuda, "WINDOW_LIMIT", limit)
        if policy not in ("steal", "window"):
            taken = policy
        assert recorder.run(case)[0].p.knobs.policy == POLICY_CODES[taken]


@pytest.mark.parametrize("tokens", [1, 16, 17, 40, FEW_TOKENS + 1])
@pytest.mark.parametrize(("hidden", "inter"), [(64, 64), (512, 256), (256, 512), (512, 264)])
def test_auto_is_the_plans_policy(recorder: Recorder, tokens: int, hidden: int, inter: int) -> None:
    from weave_moe.schedule import POLICY_CODES

    p = recorder.run(bf16_case(tokens, hidden=hidden, intermediate=inter))[0].p
    narrow = min(hidden, inter) <= 256 and tokens <= FEW_TOKENS
    policy = "counter" if tokens <= 16 or narrow else "steal"
    assert p.knobs.policy == POLICY_CODES[policy]


def test_slabs_follow_each_other_through_every_tensor(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "SLAB_TOKENS", 16)
    case = bf16_case(37, valid=20, id_dtype=torch.int64, weight_dtype=torch.float16)
    launches = recorder.run(case)
    assert [launch.p.tokens for launch in launches] == [13, 13, 11]  # about equal
    assert [launch.p.valid_offset for launch in launches] == [0, 13, 26]
    first = launches[0].p
    for number, launch in enumerate(launches):
        p = launch.p
        assert p.x - first.x == p.out - first.out == number * 13 * 64 * 2
        assert p.ids - first.ids == number * 13 * 2 * 8
        assert p.weights - first.weights == number * 13 * 2 * 2
        assert p.valid == first.valid
        assert p.residual is None


def test_a_residual_follows_the_slabs_and_may_be_the_output(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "SLAB_TOKENS", 16)
    case = bf16_case(37, residual=True)
    into = case.options["residual"]
    for number, launch in enumerate(recorder.run(case.with_(out=into))):
        assert launch.p.residual == launch.p.out == into.data_ptr() + number * 13 * 64 * 2
    strided = torch.zeros(64, 37, dtype=into.dtype).t()
    launches = recorder.run(case.with_(residual=strided, out=into))
    held = [launch.p.residual - number * 13 * 64 * 2 for number, launch in enumerate(launches)]
    assert len(set(held)) == 1
    assert held[0] not in (strided.data_ptr(), into.data_ptr())


def test_slabs_follow_each_other_through_what_a_router_reads_and_writes(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "SLAB_TOKENS", 16)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        logits = torch.zeros(37, 8, dtype=dtype)
        call = layer_of(
            bf16_case(37, mapped=True, residual=True),
            router="logits",
            router_logits=logits,
            selection_bias=True,
            shared=64,
            gate=torch.bfloat16,
        )
        launches, weights, ids = recorder.layer(call)
        assert [launch.p.tokens for launch in launches] == [13, 13, 11]
        for number, launch in enumerate(launches):
            p, r, first = launch.p, launch.p.router, 13 * number
            assert p.x == call.experts.x.data_ptr() + first * 64 * 2
            assert p.residual == call.experts.residual.data_ptr() + first * 64 * 2
            assert r.logits == logits.data_ptr() + first * 8 * size
            assert r.logits_kind == {4: 0, 2: 1}[size]
            assert r.chosen == ids.data_ptr() + first * 2 * 4
            assert r.chosen_weights == weights.data_ptr() + first * 2 * 4
            # What the launch itself reads them from, and all that does not go by token.
            assert r.slots == recorder.buffers.tagged.data_ptr()
            assert call.shared is not None
            assert r.gate == call.shared.gate.data_ptr()
            assert r.selection_bias == call.selection_bias.data_ptr()
            assert r.expert_map == call.experts.expert_map.data_ptr()
        launches, weights, ids = recorder.layer(call, return_routing=False)
        assert weights.numel() == ids.numel() == 0
        assert all(one.p.router.chosen is one.p.router.chosen_weights is None for one in launches)


def test_shared_experts_make_slabs_smaller() -> None:
    shape = LayerShape(7168, 2048, 256, 8)
    rows = [cuda.slab_tokens(shape, shared) for shared in range(9)]
    assert rows == sorted(rows, reverse=True)
    assert rows[8] < rows[0] <= cuda.SLAB_TOKENS
    for slices, tokens in enumerate(rows):
        plan = cuda.choose_kernel(
            tokens=tokens, top_k=8, experts=256, hidden=7168, router=True, shared=slices
        )
        needs = needs_of(
            plan,
            tokens=tokens,
            top_k=8 + slices,
            experts=256 + slices,
            hidden=7168,
            intermediate=2048,
            dtype="bfloat16",
            workers=132,
            router_rows=257,
        )
        rest = (15 * (256 + slices) + plan.width_cap) * (4 * 7168 + 2 * 2048)
        assert needs.h_bytes + needs.row_bytes + needs.gathered_bytes <= cuda.SLAB_BYTES + rest


def test_every_launch_of_a_call_has_its_residual(recorder: Recorder) -> None:
    case = bf16_case(FEW_TOKENS + 1, residual=True)
    recorder.run(case)
    assert [launch.name for launch in recorder.all] == ["sort", "experts", "combine"]
    assert {launch.p.residual for launch in recorder.all} == {case.options["residual"].data_ptr()}


@pytest.mark.parametrize("name", ["x", "out", "residual"])
def test_rows_that_do_not_start_at_16_bytes(recorder: Recorder, name: str) -> None:
    # Views are contiguous and may start anywhere; the kernel copies 16 bytes at a time.
    case = bf16_case()
    flat = torch.zeros(case.x.numel() + 8, dtype=case.x.dtype)
    shift = next(i for i in range(1, 8) if (flat.data_ptr() + 2 * i) % 16)
    moved = flat[shift : shift + case.x.numel()].view(case.x.shape)
    moved.copy_(case.x)
    call = case.with_(**{name: moved})
    assert cuda.BACKEND._unsupported(call.call()) is None
    layer = layer_of(call, router="logits", shared=64)
    for p in (recorder.run(call)[0].p, recorder.layer(layer)[0][0].p):
        assert p.x % 16 == 0
        assert p.out % 16 == 0
        assert (p.residual or 0) % 16 == 0
        assert bool(p.residual) == (name == "residual")
    assert p.router.logits == layer.router_logits.data_ptr()
    assert p.top_k == 3


def test_case_seeds_differ() -> None:
    # The property above would be worth little if its routings were all one.
    g = [ROUTINGS["skewed"](generator(seed), 20, 4, 2) for seed in (0, 1)]
    assert not torch.equal(*g)


def test_records_of_tasks_are_placed_on_one_axis(recorder: Recorder) -> None:
    trace = cuda._Trace(torch.device("cpu"), 2, 3)
    # Two SMs whose clocks differ in start and rate: 1 and 2 ticks a nanosecond.
    trace.clock.copy_(torch.tensor([[1000, 50, 2000, 1050], [1100, 7000, 2100, 9000]]))
    records = trace.records.numpy().view(cuda.TRACE_DTYPE)
    assert (records["worker"] == -1).all(), "nothing is recorded yet"
    records[4] = (1, 9, 0, 3, 2, 5, 0, -1, 7200, 7400, 7300, 7600, 8000, 8200)
    records[0] = (0, 8, 2, -1, -1, 4, 0, 1, 150, 250, -1, 350, 350, 450)
    found = trace.read()
    assert found["worker"].tolist() == [0, 1]
    assert found["claim_ns"].tolist() == [100, 200]
    assert found["load_ns"].tolist() == [-1, 250]
    assert found["end_ns"].tolist() == [400, 700]
    assert found["victim"].tolist() == [1, -1]


def test_a_launch_that_is_traced_has_room_for_its_records(recorder: Recorder) -> None:
    for tokens in (5, FEW_TOKENS + 1):
        case = bf16_case(tokens)
        workspace = weave_moe.Workspace(trace=True)
        (launch,) = recorder.run(case.with_(workspace=workspace))
        p = launch.p
        assert launch.config.trace
        trace = workspace._cuda_trace  # type: ignore[attr-defined]
        assert p.trace == trace.records.data_ptr()
        assert p.trace_clock == trace.clock.data_ptr()
        size = cuda.TRACE_DTYPE.itemsize
        assert trace.records.numel() == 132 * p.trace_tasks * size
        assert not len(cuda.take_trace(workspace))
        (launch,) = recorder.run(case)
        assert not launch.config.trace
        assert launch.p.trace is launch.p.trace_clock is None


def test_what_is_launched_can_be_compared_with_another_revision() -> None:
    tool = Path(__file__).parents[1] / "tools/same_launches.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tool), "--record", "12"]
    first, again = (
        subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
        for _ in range(2)
    )
    assert first == again
    calls = json.loads(first)
    assert len(calls) == 12
    # Addresses are told by the buffer that they lie in.
    assert {launch[-1]["h"] for _, launches, _ in calls for launch in launches} == {"h + 0"}
