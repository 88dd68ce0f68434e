"""Memory that the CUDA backend gives to launches: room for any routing, and nothing overlaps."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fakes.launches import Launched, Recorder, bf16_case, config_of, layer_of
from generators import ROUTINGS
from weave_moe.backends import cuda
from weave_moe.reference import local_experts
from weave_moe.runtime import kernel
from weave_moe.runtime.buffers import (
    MAX_CHUNKS,
    ROUTER_STATE_BYTES,
    Buffers,
    Needs,
    needs_of,
    plan_arrays,
)
from weave_moe.runtime.kernel import (
    COMBINE_WARPS,
    ROUTE_ROWS,
    ROUTE_TOKENS,
    ROUTE_WARPS,
    SORT_THREADS,
    chooser_words,
    sort_bytes,
)
from weave_moe.schedule import build_plan, plan_groups
from weave_moe.schedule.granularity import (
    CONTROL_BYTES,
    FEW_TOKENS,
    GATHER_WIDTH,
    MAX_SLOTS,
    SHARED_BYTES,
    STAGING_BYTES,
    KernelPlan,
    choose_kernel,
)


def plain_needs(plan: KernelPlan, **sizes: Any) -> Needs:
    """What launches of a small layer in bf16 need."""
    return needs_of(plan, hidden=64, intermediate=64, dtype="bfloat16", **sizes)


def span(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())


@settings(max_examples=60)
@given(data=st.data())
def test_no_routing_outgrows_a_launchs_buffers(
    data: st.DataObject, shared_recorder: Recorder
) -> None:
    recorder = shared_recorder
    experts = data.draw(st.one_of(st.integers(1, 12), st.sampled_from([64, 600, 1024])), "experts")
    top_k = data.draw(st.integers(1, 8), "top_k")
    many = st.sampled_from([130, 257, 600])
    tokens = data.draw(st.one_of(st.integers(1, 60), many), "tokens")
    case = bf16_case(
        tokens,
        hidden=8 * data.draw(st.integers(1, 20), "H / 8"),
        intermediate=8 * data.draw(st.integers(1, 20), "I / 8"),
        experts=experts,
        top_k=top_k,
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float16])),
        routing=data.draw(st.sampled_from(sorted(ROUTINGS)), "routing"),
        seed=data.draw(st.integers(0, 1000)),
    )
    (launch,) = recorder.run(case)
    chosen = local_experts(case.call()).flatten().tolist()
    has_room_for(launch, recorder.buffers, chosen)
    assert launch.p.experts == launch.p.routed == experts
    assert launch.p.router.state is launch.p.router.ids is None


def has_room_for(launch: Launched, held: Buffers, chosen: list[int]) -> None:
    """What the device will plan for slots of these experts (-1: none) fits the launch's memory."""
    p, config, experts = launch.p, launch.config, launch.p.experts
    plan = build_plan(chosen, experts, config.width_cap)[0]
    last_row = max((g.row + g.width for g in plan.groups), default=0)
    assert len(chosen) == p.tokens * p.top_k

    # Data: every group's whole width, and TMA's boxes, which may reach one more.
    hidden, inter = p.hidden, p.intermediate
    fits(held.h, p.h, 2 * last_row * inter)
    fits(held.rows, p.rows, (2 if config.dtype == "bfloat16" else 4) * last_row * hidden)
    if config.many or config.width_cap > GATHER_WIDTH or config.scale_x:
        fits(held.gathered, p.gathered, 2 * last_row * hidden)
    else:
        assert p.gathered is None

    # Counters: one after the other, in 8-byte words where they are, nothing twice.
    shared = p.shared
    assert shared.max_groups >= len(plan.groups)
    assert shared.experts == experts
    tiles_up, tiles_down = len(plan.groups) * p.chunks_up, len(plan.groups) * p.chunks_down
    parts = ((tiles_up, shared.up_parts), (tiles_down, shared.down_parts))
    state = [] if config.router == "none" else [(p.router.state, ROUTER_STATE_BYTES, 4)]
    disjoint(
        held.counters,
        (shared.control, 64, 8),
        (shared.queue, 3 * 8 * shared.workers, 8),
        (shared.up_done, 4 * shared.max_groups, 4),
        (shared.down_done, 4 * experts, 4),
        *((at, 4 * tiles, 4) for tiles, at in parts if config.split_k),
        *state,
    )
    if config.split_k:
        blocks = tiles_up * p.parts_up + tiles_down * p.parts_down
        fits(held.sums, p.sums, 4 * blocks * config.tile_m * config.width_cap)

    used = CONTROL_BYTES + p.ring_bytes
    if not config.many:
        used += 16 * shared.max_groups + 4 * (experts + 1) + 2 * (len(chosen) + plan.rows)
        # The slots of a token that each block routes for itself: up to 32, id and weight, tagged.
        used += 0 if config.router == "none" else 32 * 2 * 8
        assert used <= SHARED_BYTES
        assert p.chunk_tokens is p.plan.groups is p.plan.slot_row is None
        return
    assert used + STAGING_BYTES <= SHARED_BYTES
    # Rows that the sort writes to, whatever it finds in memory, are below max_rows.
    assert plan.rows <= p.max_rows
    fits(held.gathered, p.gathered, 2 * p.max_rows * hidden)
    disjoint(
        held.plan,
        # Read 16 bytes, eight experts, at a time.
        (p.chunk_tokens, 2 * p.sort_chunks * -(-experts // 8) * 8, 16),
        (p.plan.groups, 16 * shared.max_groups, 4),
        (p.plan.expert_group, 4 * (experts + 1), 4),
        (p.plan.slot_row, 4 * len(chosen), 4),
        (p.plan.totals, 12, 4),
    )
    assert p.plan.expert_row is p.plan.expert_tokens is p.plan.row_slot is None
    assert all((g.width + 15) // 16 * 16 <= config.width_cap for g in plan.groups)


@settings(max_examples=40)
@given(data=st.data())
def test_no_routing_outgrows_a_layers_buffers(
    data: st.DataObject, shared_recorder: Recorder
) -> None:
    recorder = shared_recorder
    top_k = data.draw(st.integers(1, 8), "top_k")
    some = st.one_of(st.integers(top_k, 12), st.sampled_from([64, 600, 1000]))
    experts = data.draw(some, "experts")
    tokens = data.draw(st.one_of(st.integers(1, 60), st.sampled_from([130, 257])), "tokens")
    # Many experts are narrow ones, for the sake of time.
    inter = 8 * data.draw(st.integers(1, 20 if experts < 600 else 4), "I / 8")
    hidden = 8 * data.draw(st.sampled_from((1, 7, 8, 33, 36) if experts < 600 else (1, 8)), "H / 8")
    shared_inter = 8 * data.draw(st.integers(0, 40), "Is / 8")
    slices = -(-shared_inter // inter)
    if top_k + slices > MAX_SLOTS or experts + slices > 1024:
        shared_inter = slices = 0
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    router = data.draw(st.sampled_from(["logits", "same", "fp32"]), "router")
    gated = bool(slices) and data.draw(st.booleans(), "gate")
    case = bf16_case(
        tokens,
        hidden=hidden,
        intermediate=inter,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        weight_on_input=not gated and data.draw(st.booleans(), "weight_on_input"),
        routing=data.draw(st.sampled_from(sorted(ROUTINGS)), "routing"),
        seed=data.draw(st.integers(0, 1000)),
    )
    gate = (torch.float32 if router == "fp32" else dtype) if gated else None
    call = layer_of(case, router=router, shared=shared_inter, gate=gate)
    assert cuda.BACKEND.layer_unavailable(call) is None
    (launch,), weights, ids = recorder.layer(call)
    p, held, r = launch.p, recorder.buffers, launch.p.router

    # Any ids that a router may give, and then the shared experts of each token.
    routed = local_experts(case.call()).tolist()
    chosen = [[*row, *range(experts, experts + slices)] for row in routed]
    has_room_for(launch, held, [e for row in chosen for e in row])
    assert (p.experts, p.routed, p.top_k) == (experts + slices, experts, top_k + slices)
    assert (r.experts, r.top_k) == (experts, top_k)
    assert r.rows == (0 if router == "logits" else experts) + int(gated)
    assert launch.config.shared == bool(slices)

    # Nothing else may lie where the router's counters are, in a launch of any size.
    end = held.counters.data_ptr() + held.counters.numel()
    assert p.shared.down_done + 4 * p.experts <= r.state <= end - ROUTER_STATE_BYTES
    slots = tokens * p.top_k
    assert (p.ids, p.weights, p.ids_wide, p.weights_kind) == (None, None, 0, 0)
    sums = 8 * tokens * -(-p.hidden // 256) * -(-r.rows // 4) * 4
    if launch.config.many:
        assert r.partial is None
        assert r.slots is None
        sums = -(-p.hidden // 256)
        assert 1 <= r.parts <= sums
        kept = tokens * (1 + sums - sums // r.parts) * -(-r.rows // 4) * 4
        parts = (r.sums, 4 * kept, 16), (r.ids, 4 * slots, 4), (r.weights, 4 * slots, 4)
        disjoint(held.router, *(part for part in parts if part[1]))
        assert [one.name for one in recorder.all[:1]] == (["route"] if r.rows else ["sort"])
        if r.rows:
            blocks = recorder.all[0].blocks // r.parts
            assert recorder.all[0].blocks == blocks * r.parts
            assert blocks == -(-tokens // ROUTE_TOKENS) * -(-r.rows // ROUTE_ROWS)
            assert recorder.all[0].shared is None
        # A warp at least can choose in what the sort has for other things then.
        assert 2 * experts + 65 <= 16 * SORT_THREADS
    else:
        assert r.ids is None
        assert r.weights is None
        disjoint(held.tagged, (r.slots, 16 * slots, 16), (r.partial, sums, 32))
        # Launches are numbered by a counter, so these words are as old as the counters.
        both = held.counters.untyped_storage(), held.tagged.untyped_storage()
        assert both[0].data_ptr() == both[1].data_ptr()
    for at, result in ((r.chosen, ids), (r.chosen_weights, weights)):
        assert at == result.data_ptr()
        assert result.shape == (tokens, top_k)


@st.composite
def crowds(draw: st.DrawFn) -> list[int]:
    """Tokens of each expert, many, around the sizes that cost a group or padding."""
    edge = st.sampled_from([8, 16, 57, 64, 128, 256, 512, 1024, 4096])
    near = st.builds(lambda n, by: max(0, n + by), edge, st.integers(-9, 9))
    some = st.one_of(st.just(0), st.just(1), st.integers(0, 700), near)
    return draw(st.lists(some, min_size=1, max_size=60))


@given(crowds(), st.integers(1, 16), st.integers(0, 300), st.sampled_from([16, 78, 132, 300]))
def test_the_plan_of_many_tokens_has_room_for_any_routing(
    loads: list[int], top_k: int, skipped: int, workers: int
) -> None:
    experts = len(loads)
    tokens = max(1, -(-(sum(loads) + skipped) // top_k))
    chosen = choose_kernel(tokens=tokens, top_k=top_k, experts=experts, hidden=64)
    if not chosen.many:  # as much of one, whoever else would plan it
        chosen = choose_kernel(tokens=1 << 14, top_k=top_k, experts=experts, hidden=64)
        assert chosen.many
    needs = plain_needs(chosen, tokens=tokens, top_k=top_k, experts=experts, workers=workers)
    plan = plan_groups(loads, chosen.width_cap)
    rows = needs.h_rows - chosen.width_cap  # TMA loads may reach a group's width past the last
    assert len(plan.groups) <= needs.groups
    assert max((g.row + g.width for g in plan.groups), default=0) <= plan.rows <= rows
    assert needs.h_bytes == needs.gathered_bytes == needs.row_bytes == needs.h_rows * 64 * 2

    # The sort: chunks of whole tokens, one a worker at most, all there in each array.
    slots = tokens * top_k
    assert needs.chunk_tokens >= 1
    chunks = -(-tokens // needs.chunk_tokens)
    assert chunks <= min(workers, MAX_CHUNKS)
    assert needs.chunk_tokens * top_k < 1 << 16, "counted in 16 bits"
    words = dict(plan_arrays(needs.groups, experts, slots, chunks))
    assert list(words) == ["chunk_tokens", "groups", "expert_group", "slot_row", "totals"]
    assert all(size % 4 == 0 for size in words.values()), "each starts at 16 bytes"
    assert 4 * words["chunk_tokens"] >= 2 * chunks * experts
    assert 4 * words["groups"] >= 16 * len(plan.groups)
    assert words["expert_group"] >= experts + 1
    assert words["slot_row"] >= slots
    assert words["totals"] >= 3
    assert needs.plan == 4 * sum(words.values())


def loaded_kernels(
    plan: KernelPlan, router: str
) -> tuple[kernel.Kernels, dict[str, tuple[int, int]]]:
    """A plan's kernels, as their names, and for each (most shared memory, threads)."""
    limits: dict[str, tuple[int, int]] = {}

    class Library:
        def __init__(self, cubin: bytes) -> None:
            pass

        def kernel(self, name: str, *, shared_bytes: int, threads: int) -> str:
            limits[name] = (shared_bytes, threads)
            return name

    config = config_of(plan, router=router)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "Library", Library)
        patch.setattr(kernel, "cached_file", lambda *a: types.SimpleNamespace(read_bytes=bytes))
        patch.setattr(kernel.nvrtc, "version", lambda: "0")
        return kernel._load(config, SHARED_BYTES), limits


def test_a_launch_that_routes_many_tokens_has_one_kernel_more() -> None:
    plan = choose_kernel(tokens=1 << 14, top_k=8, experts=128, hidden=64, router=True)
    for router in ("same", "fp32"):
        loaded, limits = loaded_kernels(plan, router)
        assert loaded.route == "weave_route"
        assert limits["weave_route"] == (0, 32 * ROUTE_WARPS)
    assert loaded_kernels(plan, "logits")[0].route is None
    few = choose_kernel(tokens=8, top_k=8, experts=128, hidden=64, router=True)
    assert list(loaded_kernels(few, "same")[1]) == ["weave_experts"]


@settings(max_examples=40)
@given(
    experts=st.integers(1, 1024),
    top_k=st.integers(1, 16),
    workers=st.integers(16, 200),
    tokens=st.one_of(st.integers(1, cuda.SLAB_TOKENS), st.just(cuda.SLAB_TOKENS)),
)
def test_a_block_of_the_sort_gets_the_shared_memory_that_it_asks_for(
    experts: int, top_k: int, workers: int, tokens: int
) -> None:
    plan = choose_kernel(tokens=1 << 14, top_k=8, experts=128, hidden=64)
    assert plan.many
    loaded, limits = loaded_kernels(plan, "none")
    assert loaded.route is None
    assert [loaded.experts, loaded.sort, loaded.combine] == list(limits)
    assert list(limits) == ["weave_experts", "weave_sort", "weave_combine"]
    assert limits["weave_experts"] == (SHARED_BYTES, plan.threads)
    most, threads = limits["weave_sort"]
    assert threads == SORT_THREADS
    assert most <= SHARED_BYTES - 2048, "it has words of its own as well"
    assert limits["weave_combine"] == (0, 32 * COMBINE_WARPS)
    needs = plain_needs(plan, tokens=tokens, top_k=top_k, experts=experts, workers=workers)
    assert sort_bytes(experts, needs.chunk_tokens * top_k, 1024) <= most


def fits(buffer: Tensor, pointer: int | None, size: int) -> None:
    """`size` bytes at `pointer` lie in the buffer, aligned for TMA."""
    assert pointer == buffer.data_ptr()
    assert size <= buffer.numel()


def disjoint(buffer: Tensor, *parts: tuple[int, int, int]) -> None:
    """Parts (address, bytes, alignment) lie in the buffer, aligned, in order, none overlapping."""
    end = buffer.data_ptr()
    for address, size, alignment in parts:
        assert address >= end
        assert address % alignment == 0
        end = address + size
    assert end <= buffer.data_ptr() + buffer.numel()


@pytest.mark.parametrize("experts", [3, 300])
def test_each_warp_of_the_sort_has_room_to_choose(recorder: Recorder, experts: int) -> None:
    recorder.layer(layer_of(bf16_case(FEW_TOKENS + 1, hidden=64, intermediate=8, experts=experts)))
    (sort,) = (launched for launched in recorder.all if launched.name == "sort")
    assert sort.p.router.experts == experts
    behind = sort.shared // 4 - SORT_THREADS // 16 - MAX_CHUNKS
    assert behind >= SORT_THREADS // 32 * chooser_words(experts)
    assert sort.shared >= sort_bytes(experts, sort.p.chunk_slots)


@given(
    st.integers(1, 3000), st.integers(1, 16), st.integers(1, 1024), st.none() | st.integers(0, 1025)
)
def test_needs_grow_with_tokens(tokens: int, top_k: int, experts: int, rows: int | None) -> None:
    # Within one kernel: a launch captured for many tokens serves few.
    plan = choose_kernel(
        tokens=tokens, top_k=top_k, experts=experts, hidden=64, router=rows is not None
    )

    def needs(count: int) -> Needs:
        sizes = {"tokens": count, "top_k": top_k, "experts": experts, "workers": 132}
        return plain_needs(plan, **sizes, router_rows=rows)

    less, more = needs(max(1, tokens // 2)), needs(tokens)
    # But for the sort's counts: a token more may make chunks larger, and so fewer.
    # And what a router keeps: the more tokens, the fewer ranges of columns.
    for name in set(Needs.__dataclass_fields__) - {"plan", "router"}:
        assert getattr(less, name) <= getattr(more, name)
    assert (more.router > 0) == (rows is not None and plan.many)
    assert (more.tagged > 0) == (rows is not None and not plan.many)
    assert (more.plan > 0) == (more.chunk_tokens > 0) == plan.many
    counts = 2 * min(132, MAX_CHUNKS) * -(-experts // 8) * 8
    assert less.plan - counts <= more.plan
