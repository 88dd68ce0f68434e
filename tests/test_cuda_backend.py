"""The CUDA backend's own logic, without a GPU: what it refuses, and what it hands to a launch.

Launches are recorded in place of being run, with CPU tensors for device memory.
"""

from __future__ import annotations

import ctypes
import math
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weave_moe
from generators import ROUTINGS, Case, experts_case, generator
from weave_moe.backends import cuda
from weave_moe.reference import local_experts
from weave_moe.runtime import buffers, driver, kernel
from weave_moe.runtime.buffers import (
    MAX_CHUNKS,
    BufferPool,
    Buffers,
    Needs,
    needs_of,
    plan_arrays,
)
from weave_moe.runtime.kernel import COMBINE_WARPS, PIECE, SORT_THREADS, sort_bytes
from weave_moe.schedule import build_plan, plan_groups
from weave_moe.schedule.granularity import (
    CONTROL_BYTES,
    FEW_TOKENS,
    GATHER_WIDTH,
    SHARED_BYTES,
    STAGING_BYTES,
    choose_kernel,
)
from weave_moe.shapes import LayerShape

H200 = cuda._Device(0, 132, SHARED_BYTES, (9, 0), "NVIDIA H200")


def bf16_case(tokens: int = 5, **options: Any) -> Case:
    options = {"hidden": 64, "intermediate": 64, "dtype": torch.bfloat16, **options}
    return experts_case(tokens, **options)


class TestUnavailable:
    """Reasons are words for the user: they name the argument, the value and what is allowed."""

    @pytest.mark.parametrize(
        ("case", "reason"),
        [
            (bf16_case(dtype=torch.float32), "float32; the kernel takes bfloat16 and float16"),
            (bf16_case(hidden=60), "hidden is 60"),
            (bf16_case(intermediate=36), "intermediate is 36"),
            (bf16_case(hidden=8, intermediate=8, experts=1025), "1025 experts; at most 1,024"),
            (bf16_case(top_k=17), "top_k is 17; at most 16"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_the_kernel_does_not_do(self, case: Case, reason: str) -> None:
        found = cuda.BACKEND._unsupported(case.call())
        assert found is not None
        assert reason in found

    @pytest.mark.parametrize(
        "case",
        [
            bf16_case(),
            bf16_case(dtype=torch.float16, activation="gelu", biases=True),
            bf16_case(activation="swiglu_oai", valid=3, mapped=True, id_dtype=torch.int64),
            bf16_case(hidden=8, intermediate=8, experts=1024, top_k=16),
            bf16_case(hidden=2880, intermediate=176, experts=1),
        ],
        ids=repr,
    )
    def test_what_it_does(self, case: Case) -> None:
        assert cuda.BACKEND._unsupported(case.call()) is None

    def test_weights_that_tma_cannot_read(self) -> None:
        case = bf16_case()
        for name in ("w13", "w2"):
            weight: Tensor = getattr(case, name)
            padded = torch.zeros(*weight.shape[:2], weight.size(2) + 8, dtype=weight.dtype)
            found = cuda.BACKEND._unsupported(
                case.with_(**{name: padded[..., : weight.size(2)]}).call()
            )
            assert found is not None
            assert name in found
            flat = torch.zeros(weight.numel() + 8, dtype=weight.dtype)
            shift = next(i for i in range(1, 8) if (flat.data_ptr() + 2 * i) % 16)
            moved = flat[shift : shift + weight.numel()].view(weight.shape)
            found = cuda.BACKEND._unsupported(case.with_(**{name: moved}).call())
            assert found is not None
            assert name in found
            assert "16 bytes" in found

    def test_tensors_elsewhere(self) -> None:
        assert cuda.BACKEND.unavailable(bf16_case().call()) == "x is on cpu, not on a GPU"

    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
    def test_other_gpus_are_named(
        self, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = cuda._Device(0, 108, 166_912, capability, "Some GPU")
        monkeypatch.setattr(cuda, "_device", lambda index: other)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        call: Any = types.SimpleNamespace(device=torch.device("cuda", 0))
        found = cuda.BACKEND.unavailable(call)
        assert found is not None
        assert "Some GPU" in found
        assert f"{capability[0]}.{capability[1]}" in found
        assert "9.0" in found
        assert "H100" in found

    def test_a_torch_without_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        call: Any = types.SimpleNamespace(device=torch.device("cuda", 0))
        assert cuda.BACKEND.unavailable(call) == "this torch was built without CUDA"


@dataclass
class Launched:
    """One launch, recorded. shared: bytes asked for, None for the most there may be."""

    name: str
    blocks: int
    p: kernel.Launch
    maps: bytes
    config: kernel.KernelConfig
    shared: int | None


class Recorder:
    """Stands where driver and device are: calls of the backend end up in `all`, and those of the
    experts' kernel in `launches`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.all: list[Launched] = []
        self.launches: list[Launched] = []
        self.maps: list[tuple[Any, ...]] = []
        self.compiled: list[kernel.KernelConfig] = []
        self.capturing: int | None = None
        self.config: kernel.KernelConfig | None = None
        recorder = self

        class FakeKernel:
            def __init__(self, name: str, config: kernel.KernelConfig) -> None:
                self.name, self.config = name, config

            def prepare(self, device: int) -> None:
                pass

            def launch(
                self, blocks: int, stream: int, *arguments: Any, shared: int | None = None
            ) -> None:
                assert stream == 7
                *maps, p = arguments
                copy = kernel.Launch()
                ctypes.memmove(ctypes.byref(copy), ctypes.byref(p), ctypes.sizeof(p))
                bits = b"".join(map(bytes, maps))
                launched = Launched(self.name, blocks, copy, bits, self.config, shared)
                recorder.all.append(launched)
                if self.name == "experts":
                    recorder.launches.append(launched)

        def kernel_for(config: kernel.KernelConfig, shared: int) -> kernel.Kernels:
            recorder.compiled.append(config)
            names = ("experts", "sort", "combine") if config.many else ("experts",)
            fakes: list[Any] = [FakeKernel(name, config) for name in names]
            return kernel.Kernels(*fakes)

        def encode(
            pointer: int, dtype: str, dims: Any, strides: Any, box: Any, *, swizzle: int = 128
        ) -> bytes:
            found = (pointer, dtype, tuple(dims), tuple(strides), tuple(box), swizzle)
            recorder.maps.append(found)
            return len(recorder.maps).to_bytes(driver.TENSOR_MAP_BYTES, "little")

        def capture(stream: int) -> int | None:
            return recorder.capturing

        patch.setattr(cuda, "_device", lambda index: H200)
        patch.setattr(cuda, "_prepared", set())
        patch.setattr(cuda, "_weight_maps", {})
        patch.setattr(cuda, "kernel_for", kernel_for)
        for module in (cuda, buffers):
            patch.setattr(module, "encode_tensor_map", encode)
            patch.setattr(module, "capture_id", capture)
        patch.setattr(
            torch.cuda,
            "current_stream",
            lambda device=None: types.SimpleNamespace(cuda_stream=7),
        )
        self.pool = BufferPool.__new__(BufferPool)
        self.pool.device = torch.device("cpu")
        self.pool.error = torch.zeros(1, dtype=torch.int32)
        self.pool._eager, self.pool._capture = {}, {}
        self.pool._all = weakref.WeakSet()
        patch.setattr(cuda, "_pool", lambda device: self.pool)

    def run(self, case: Case) -> list[Launched]:
        """The launches of the experts' kernel in a call."""
        self.launches.clear()
        self.all.clear()
        cuda._run(case.call())
        return list(self.launches)

    @property
    def buffers(self) -> Buffers:
        """What the last call used."""
        return self.pool.get(7)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.fixture(scope="module")
def shared_recorder() -> Iterator[Recorder]:
    """For properties, whose examples may share one."""
    with pytest.MonkeyPatch.context() as patch:
        yield Recorder(patch)


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
    p, config, held = launch.p, launch.config, recorder.buffers
    # What the device will plan.
    chosen = local_experts(case.call()).flatten().tolist()
    plan = build_plan(chosen, experts, config.width_cap)[0]
    last_row = max((g.row + g.width for g in plan.groups), default=0)

    # Data: every group's whole width, and TMA's boxes, which may reach one more.
    hidden, inter = p.hidden, p.intermediate
    fits(held.h, p.h, 2 * last_row * inter)
    fits(held.rows, p.rows, (2 if config.dtype == "bfloat16" else 4) * last_row * hidden)
    if config.many or config.width_cap > GATHER_WIDTH:
        fits(held.gathered, p.gathered, 2 * last_row * hidden)
    else:
        assert p.gathered is None

    # Counters: one after the other, in 8-byte words where they are, nothing twice.
    shared = p.shared
    assert shared.max_groups >= len(plan.groups)
    tiles_up, tiles_down = len(plan.groups) * p.chunks_up, len(plan.groups) * p.chunks_down
    parts = ((tiles_up, shared.up_parts), (tiles_down, shared.down_parts))
    disjoint(
        held.counters,
        (shared.control, 64, 8),
        (shared.queue, 3 * 8 * shared.workers, 8),
        (shared.up_done, 4 * shared.max_groups, 4),
        (shared.down_done, 4 * experts, 4),
        *((at, 4 * tiles, 4) for tiles, at in parts if config.split_k),
    )
    if config.split_k:
        blocks = tiles_up * p.parts_up + tiles_down * p.parts_down
        fits(held.sums, p.sums, 4 * blocks * config.tile_m * config.width_cap)

    used = CONTROL_BYTES + p.ring_bytes
    if not config.many:
        used += 16 * shared.max_groups + 4 * (experts + 1) + 2 * (len(chosen) + plan.rows)
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
    needs = needs_of(
        chosen,
        tokens=tokens,
        top_k=top_k,
        experts=experts,
        hidden=64,
        intermediate=64,
        dtype="bfloat16",
        workers=workers,
    )
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
    limits: dict[str, tuple[int, int]] = {}

    class Library:
        def __init__(self, cubin: bytes) -> None:
            pass

        def kernel(self, name: str, *, shared_bytes: int, threads: int) -> str:
            limits[name] = (shared_bytes, threads)
            return name

    plan = choose_kernel(tokens=1 << 14, top_k=8, experts=128, hidden=64)
    assert plan.many
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "Library", Library)
        patch.setattr(kernel, "cached_file", lambda *a: types.SimpleNamespace(read_bytes=bytes))
        patch.setattr(kernel.nvrtc, "version", lambda: "0")
        loaded = kernel._load(
            kernel.KernelConfig.of(
                plan,
                dtype="bfloat16",
                activation="silu",
                clamp=False,
                bias=False,
                hidden=64,
                intermediate=64,
            ),
            SHARED_BYTES,
        )
    assert [loaded.experts, loaded.sort, loaded.combine] == list(limits)
    assert list(limits) == ["weave_experts", "weave_sort", "weave_combine"]
    assert limits["weave_experts"] == (SHARED_BYTES, plan.threads)
    most, threads = limits["weave_sort"]
    assert threads == SORT_THREADS
    assert most <= SHARED_BYTES - 2048, "it has words of its own as well"
    assert limits["weave_combine"] == (0, 32 * COMBINE_WARPS)
    chunk_tokens = needs_of(
        plan,
        tokens=tokens,
        top_k=top_k,
        experts=experts,
        hidden=64,
        intermediate=64,
        dtype="bfloat16",
        workers=workers,
    ).chunk_tokens
    assert sort_bytes(experts, chunk_tokens * top_k) <= most


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


@pytest.mark.parametrize("tokens", [5, FEW_TOKENS + 1])
def test_a_launch_has_a_block_for_each_multiprocessor(recorder: Recorder, tokens: int) -> None:
    (launch,) = recorder.run(bf16_case(tokens))
    assert launch.blocks == launch.p.shared.workers == 132
    assert launch.config.many == (tokens > FEW_TOKENS)


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


@pytest.mark.parametrize(("dtype", "kind"), [("float32", 0), ("bfloat16", 1), ("float16", 2)])
def test_types_of_weights_have_numbers(recorder: Recorder, dtype: str, kind: int) -> None:
    case = bf16_case(weight_dtype=getattr(torch, dtype))
    assert recorder.run(case)[0].p.weights_kind == kind


@pytest.mark.parametrize("policy", [p for p in weave_moe.POLICIES if p != "auto"])
def test_policies_have_the_numbers_of_the_core(recorder: Recorder, policy: str) -> None:
    from weave_moe.schedule import POLICY_CODES

    p = recorder.run(bf16_case().with_(policy=policy))[0].p
    assert p.knobs.policy == POLICY_CODES[policy]


@pytest.mark.parametrize("tokens", [1, 16, 17, 40, FEW_TOKENS + 1])
def test_auto_is_the_plans_policy(recorder: Recorder, tokens: int) -> None:
    from weave_moe.schedule import POLICY_CODES

    p = recorder.run(bf16_case(tokens))[0].p
    plan = choose_kernel(tokens=tokens, top_k=2, experts=4, hidden=64)
    assert p.knobs.policy == POLICY_CODES[plan.policy]
    assert plan.policy == ("counter" if tokens <= 16 else "steal")


def test_slabs_follow_each_other_through_every_tensor(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "SLAB_TOKENS", 16)
    case = bf16_case(37, valid=20, id_dtype=torch.int64, weight_dtype=torch.float16)
    launches = recorder.run(case)
    assert [launch.p.tokens for launch in launches] == [16, 16, 5]
    assert [launch.p.valid_offset for launch in launches] == [0, 16, 32]
    first = launches[0].p
    for number, launch in enumerate(launches):
        p = launch.p
        assert p.x - first.x == p.out - first.out == number * 16 * 64 * 2
        assert p.ids - first.ids == number * 16 * 2 * 8
        assert p.weights - first.weights == number * 16 * 2 * 2
        assert p.valid == first.valid
        assert p.residual is None


def test_a_residual_follows_the_slabs_and_may_be_the_output(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "SLAB_TOKENS", 16)
    case = bf16_case(37, residual=True)
    into = case.options["residual"]
    for number, launch in enumerate(recorder.run(case.with_(out=into))):
        assert launch.p.residual == launch.p.out == into.data_ptr() + number * 16 * 64 * 2
    strided = torch.zeros(64, 37, dtype=into.dtype).t()
    launches = recorder.run(case.with_(residual=strided, out=into))
    held = [launch.p.residual - number * 16 * 64 * 2 for number, launch in enumerate(launches)]
    assert len(set(held)) == 1
    assert held[0] not in (strided.data_ptr(), into.data_ptr())


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
    if cuda.BACKEND._unsupported(call.call()) is None:
        p = recorder.run(call)[0].p
        assert p.x % 16 == 0
        assert p.out % 16 == 0
        assert (p.residual or 0) % 16 == 0
        assert bool(p.residual) == (name == "residual")


def box_of(
    flat: Tensor, found: tuple[Any, ...], block: int, tile_k: int, columns: int
) -> list[list[int | None]]:
    """The rows of a tile that a map's boxes hold, in order, `tile_k` columns from the first: what
    the hardware does with dims, strides and box; None where it fills in zeros."""
    _, _, dims, strides, box, _ = found
    steps = (1, *strides)
    packed = columns % 64 == 0
    depth = 2 if packed else None  # the dimension of blocks of 64 columns

    def element(at: list[int]) -> int | None:
        if any(i >= d for i, d in zip(at, dims, strict=True)):
            return None
        return int(flat[sum(i * s for i, s in zip(at, steps, strict=True))])

    outer = [i for i in range(1, len(dims)) if i != depth]
    rows = []
    # Rows run through the dimensions but the columns', the first of them fastest.
    for number in range(math.prod(box[i] for i in outer)):
        index, left = [0] * len(dims), number
        for i in outer:
            index[i], left = left % box[i], left // box[i]
        index[-1] += block
        row = []
        for column in range(tile_k):
            at = list(index)
            at[0] = column % 64 if packed else column
            if depth is not None:
                at[depth] = column // 64
            row.append(element(at))
        rows.append(row)
    return rows


class TestMaps:
    """Tensor maps are made once for a place, and again when anything of it changes."""

    def test_equal_calls_share_them(self, recorder: Recorder) -> None:
        case = bf16_case()
        recorder.run(case)
        made = len(recorder.maps)
        assert made > 2
        recorder.run(case)
        assert len(recorder.maps) == made

    def test_moved_weights_get_their_own(self, recorder: Recorder) -> None:
        case = bf16_case()
        (before,) = recorder.run(case)
        for name in ("w13", "w2"):
            moved = case.with_(**{name: getattr(case, name).clone()})
            (after,) = recorder.run(moved)
            assert recorder.maps[-1][0] == moved.w2.data_ptr() or name == "w13"
            assert after.maps[:256] != before.maps[:256]

    def test_other_sizes_at_the_same_place_get_their_own(self, recorder: Recorder) -> None:
        def weights_of_maps(case: Case) -> bytes:
            return recorder.run(case)[0].maps[:256]

        one = bf16_case(hidden=64, intermediate=128, experts=2)
        # The same memory, read as another layer.
        other = bf16_case(hidden=128, intermediate=64, experts=2)
        w13 = one.w13.view(2, 128, 128)
        w2 = one.w2.view(2, 128, 64)
        assert weights_of_maps(one) != weights_of_maps(other.with_(w13=w13, w2=w2))
        half = one.with_(
            w13=one.w13.view(torch.float16),
            w2=one.w2.view(torch.float16),
            x=one.x.to(torch.float16),
        )
        assert weights_of_maps(one) != weights_of_maps(half)

    @pytest.mark.parametrize("hidden", [192, 72])
    @pytest.mark.parametrize("kind", ["gated", "interleaved", "plain"])
    @pytest.mark.parametrize("tokens", [1, 40, FEW_TOKENS + 1])
    def test_a_box_holds_the_rows_of_its_tile(
        self, recorder: Recorder, kind: str, hidden: int, tokens: int
    ) -> None:
        inter, experts = 88, 3
        case = bf16_case(
            tokens,
            hidden=hidden,
            intermediate=inter,
            experts=experts,
            top_k=2,
            activation="relu2" if kind == "plain" else "silu",
            interleaved=kind == "interleaved",
        )
        w13 = torch.arange(case.w13.numel()).view(case.w13.shape)  # each element is its own number
        (launch,) = recorder.run(case)
        p, tile_m, tile_k = launch.p, launch.config.tile_m, launch.config.tile_k
        w13_map = next(m for m in recorder.maps if m[0] == case.w13.data_ptr())
        elements = tile_m if kind == "plain" else tile_m // 2
        assert p.chunks_up == -(-inter // elements)
        for expert in range(experts):
            for chunk in range(p.chunks_up):
                block = expert * p.up_blocks + chunk * elements // 8
                got = box_of(w13.flatten(), w13_map, block, tile_k, hidden)
                for row, held in enumerate(got):
                    half, element = 0, row
                    if kind != "plain":
                        half, element = row // 8 % 2, row // 16 * 8 + row % 8
                    element += chunk * elements
                    if element >= inter:
                        continue  # a neighbour's rows, or none: dropped
                    at = {
                        "plain": element,
                        "gated": element + half * inter,
                        "interleaved": 2 * element + half,
                    }[kind]
                    want = w13[expert, at, :tile_k].tolist()
                    assert held == want + [None] * (tile_k - len(want))

    def test_rows_in_buffers_that_grew_get_their_own(self, recorder: Recorder) -> None:
        small, large = bf16_case(3), bf16_case(500)
        recorder.run(small)
        old = recorder.buffers.h.data_ptr(), recorder.buffers.h
        recorder.run(large)
        assert recorder.buffers.h.data_ptr() != old[0]
        recorder.run(small)
        assert any(m[0] == recorder.buffers.h.data_ptr() for m in recorder.maps)

    @pytest.mark.parametrize("tokens", [40, FEW_TOKENS + 1])
    @pytest.mark.parametrize("sizes", [(64, 64), (72, 64), (64, 72), (8, 8), (2880, 176)])
    def test_they_stay_within_their_tensors(
        self, recorder: Recorder, sizes: tuple[int, int], tokens: int
    ) -> None:
        case = bf16_case(tokens, hidden=sizes[0], intermediate=sizes[1], experts=3)
        recorder.run(case)
        held = recorder.buffers
        tensors = (case.w13, case.w2, held.h, held.rows, held.gathered)
        assert recorder.maps
        for pointer, _, dims, strides, box, swizzle in recorder.maps:
            tensor = next(t for t in tensors if t.data_ptr() == pointer)
            last = sum((d - 1) * s for d, s in zip(dims, (1, *strides), strict=True))
            assert 2 * (last + 1) <= tensor.numel() * tensor.element_size()
            # What the hardware asks of a map.
            assert all(2 * s % 16 == 0 for s in strides)
            assert all(1 <= b <= 256 for b in box)
            assert 2 * box[0] == swizzle
            assert len(dims) == len(box) == len(strides) + 1 <= 5

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("tokens", [5, 40, FEW_TOKENS + 1])
    def test_a_launch_has_those_that_the_kernel_is_compiled_for(
        self, recorder: Recorder, tokens: int, dtype: torch.dtype
    ) -> None:
        (launch,) = recorder.run(bf16_case(tokens, hidden=192, intermediate=128, dtype=dtype))
        config, held = launch.config, recorder.buffers
        size = driver.TENSOR_MAP_BYTES
        bits = [launch.maps[at : at + size] for at in range(0, len(launch.maps), size)]
        made = [
            recorder.maps[n - 1] if n else None for n in (int.from_bytes(b, "little") for b in bits)
        ]
        w13, w2, *rest = made
        assert w13 is not None
        assert w2 is not None
        by_width = config.width_cap // 8
        h, rest = rest[:by_width], rest[by_width:]
        gathers = config.many or config.width_cap > GATHER_WIDTH
        x, rest = (rest[:by_width], rest[by_width:]) if gathers else ([], rest[1:])
        for maps, tensor in ((h, held.h), (x, held.gathered)):
            for number, found in enumerate(maps):
                assert found is not None
                assert found[0] == tensor.data_ptr()
                # Columns of a swizzled row, rows of a group as wide, and the stage's other columns.
                assert found[4] == (64, 8 * (number + 1), config.tile_k // 64)
                assert found[5] == 128
        if not config.many:
            assert rest == [None, None]
            return
        stores, of_rows = rest[:4], rest[4:]
        # 32 elements of h or 64 of down rows, of a warpgroup's part of a slot's tokens.
        assert [s and (s[0], s[4], s[5]) for s in stores] == [
            (held.h.data_ptr(), (32, count), 64) for count in (64, 32, 16, 8)
        ]
        if dtype == torch.float16:
            assert of_rows == [None] * 4, "rows of fp32 are stored without"
            return
        assert [s and (s[0], s[4], s[5]) for s in of_rows] == [
            (held.rows.data_ptr(), (64, count), 128) for count in (64, 32, 16, 8)
        ]


class TestCaptures:
    """Nothing is compiled in a capture, and a graph's buffers are its own."""

    def test_a_kernel_that_is_not_ready_is_an_error(self, recorder: Recorder) -> None:
        recorder.capturing = 1
        with pytest.raises(RuntimeError, match=r"weave_moe\.warmup\(shape, tokens=5\)"):
            recorder.run(bf16_case(5))
        assert not recorder.compiled
        recorder.capturing = None
        recorder.run(bf16_case(5))
        recorder.capturing = 2
        assert len(recorder.run(bf16_case(5))) == 1

    def test_captures_share_no_buffers(self, recorder: Recorder) -> None:
        case = bf16_case(5)
        seen = {recorder.run(case)[0].p.shared.control}
        kept = [recorder.buffers]
        for capture in (1, 2):
            recorder.capturing = capture
            seen.add(recorder.run(case)[0].p.shared.control)
            kept.append(recorder.buffers)
            # Several layers of one graph share.
            assert recorder.run(case)[0].p.shared.control in seen
        assert len(seen) == 3

    @given(st.data())
    @settings(max_examples=15)
    def test_warmup_loads_all_that_calls_will_need(self, data: st.DataObject) -> None:
        with pytest.MonkeyPatch.context() as patch:
            recorder = Recorder(patch)
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.version, "cuda", "13.0")
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr(torch.cuda, "device", lambda index: _nothing())
            patch.setattr(cuda, "_pools", {0: recorder.pool})
            shape = LayerShape(
                64,
                64,
                data.draw(st.sampled_from([1, 8, 64, 128, 256, 1024]), "experts"),
                data.draw(st.integers(1, 16), "top_k"),
                "bfloat16",
            )
            most = data.draw(st.integers(1, 20_000), "tokens")
            cuda.warmup(shape, most)
            warm = set(recorder.compiled)
            some = data.draw(st.lists(st.integers(1, most), min_size=20, max_size=20))
            for tokens in (*some, most, cuda.SLAB_TOKENS):
                if tokens > most:
                    continue
                plan = cuda.plan_for(shape, tokens)
                config = kernel.KernelConfig.of(
                    plan,
                    dtype="bfloat16",
                    activation="silu",
                    clamp=False,
                    bias=False,
                    hidden=64,
                    intermediate=64,
                )
                assert config in warm, f"{tokens} of {most} tokens, {shape}"

    @pytest.mark.parametrize(
        ("changes", "options", "error", "words"),
        [
            ({}, {"biases": True}, TypeError, "biases"),
            ({}, {"bias": 1}, TypeError, "^bias must be True or False, got 1"),
            ({}, {"tokens": 0}, ValueError, "^tokens must be at least 1, got 0"),
            ({}, {"tokens": 1.5}, TypeError, "^tokens must be an int, got float"),
            ({}, {"shape": "qwen3-30b"}, TypeError, "^shape must be a LayerShape, got str"),
            ({}, {"activation": "swish"}, ValueError, "^activation must be one of .*'swish'"),
            ({}, {"activation": "relu2"}, ValueError, "^activation must have a gate, .*relu2"),
            ({}, {"weight_on_input": 1}, TypeError, "^weight_on_input must be True or False"),
            ({"dtype": "float32"}, {}, ValueError, "^shape must be .*float32"),
            ({"hidden": 60}, {}, ValueError, "^shape must be .*hidden is 60"),
            ({"gated": False}, {}, ValueError, "^activation must have no gate, .*silu"),
        ],
    )
    def test_warmup_names_what_it_does_not_take(
        self,
        changes: dict[str, Any],
        options: dict[str, Any],
        error: type[Exception],
        words: str,
    ) -> None:
        sizes = {"hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2, **changes}
        with pytest.raises(error, match=words):
            weave_moe.warmup(**{"shape": LayerShape(**sizes), "tokens": 1, **options})

    def test_warmup_without_a_gpu_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shape = LayerShape(64, 64, 8, 2)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match="nothing to warm up: torch sees no GPU"):
            weave_moe.warmup(shape, 1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        other = cuda._Device(0, 108, 166_912, (8, 0), "Some GPU")
        monkeypatch.setattr(cuda, "_device", lambda index: other)
        with pytest.raises(RuntimeError, match="nothing to warm up: Some GPU"):
            weave_moe.warmup(shape, 1, device=0)


class _nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


class TestErrors:
    """A launch that gave up is said once, and everything starts anew."""

    def test_a_failed_launch(self, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder.run(bf16_case())
        held = recorder.buffers
        held.counters.fill_(255)
        monkeypatch.setattr(cuda, "_pools", {0: recorder.pool})
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        for code, words in kernel.ERRORS.items():
            recorder.pool.error[0] = code
            with pytest.raises(weave_moe.KernelError, match=words):
                weave_moe.check(0)
            assert not held.counters.any()
            weave_moe.check(0)

    def test_in_a_capture_nothing_is_raised(
        self, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cuda, "_pools", {0: recorder.pool})
        recorder.pool.error[0] = 3
        recorder.capturing = 1
        weave_moe.check(0)
        recorder.capturing = None
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        with pytest.raises(weave_moe.KernelError):
            weave_moe.check(0)

    def test_where_nothing_ever_ran_there_is_nothing_to_check(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cuda, "_pools", {})
        weave_moe.check(3)
        weave_moe.check()  # not even torch is asked for the current device


@given(st.integers(1, 3000), st.integers(1, 16), st.integers(1, 1024))
def test_needs_grow_with_tokens(tokens: int, top_k: int, experts: int) -> None:
    # Within one kernel: a launch captured for many tokens serves few.
    plan = choose_kernel(tokens=tokens, top_k=top_k, experts=experts, hidden=64)

    def needs(count: int) -> Needs:
        return needs_of(
            plan,
            tokens=count,
            top_k=top_k,
            experts=experts,
            hidden=64,
            intermediate=64,
            dtype="bfloat16",
            workers=132,
        )

    less, more = needs(max(1, tokens // 2)), needs(tokens)
    # But for the sort's counts: a token more may make chunks larger, and so fewer.
    for name in set(Needs.__dataclass_fields__) - {"plan"}:
        assert getattr(less, name) <= getattr(more, name)
    assert (more.plan > 0) == (more.chunk_tokens > 0) == plan.many
    counts = 2 * min(132, MAX_CHUNKS) * -(-experts // 8) * 8
    assert less.plan - counts <= more.plan


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
