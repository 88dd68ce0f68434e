"""The CUDA backend's own logic, without a GPU: what it refuses, and what it hands to a launch.

Launches are recorded in place of being run, with CPU tensors for device memory.
"""

from __future__ import annotations

import ctypes
import math
import re
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weave_moe
from fakes.devices import entered
from generators import ROUTINGS, Case, experts_case, generator
from weave_moe.backends import cuda
from weave_moe.reference import local_experts
from weave_moe.routing import LayerCall, RoutingConfig, check_layer
from weave_moe.runtime import buffers, driver, kernel
from weave_moe.runtime.buffers import (
    MAX_CHUNKS,
    ROUTER_STATE_BYTES,
    BufferPool,
    Buffers,
    Needs,
    needs_of,
    plan_arrays,
)
from weave_moe.runtime.kernel import (
    COMBINE_WARPS,
    PIECE,
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
from weave_moe.shapes import ExpertsCall, LayerShape, SharedExperts, shared_call

H200 = cuda._Device(0, 132, SHARED_BYTES, (9, 0), "NVIDIA H200")


def bf16_case(tokens: int = 5, **options: Any) -> Case:
    options = {"hidden": 64, "intermediate": 64, "dtype": torch.bfloat16, **options}
    return experts_case(tokens, **options)


def layer_of(
    case: Case,
    *,
    routing: RoutingConfig | None = None,
    router: str = "same",
    router_bias: bool | Tensor = False,
    selection_bias: bool | Tensor = False,
    shared: int | SharedExperts = 0,
    gate: torch.dtype | None = None,
    **changes: Any,
) -> LayerCall:
    """The case's experts as a layer's call.

    router: "logits" of fp32 are given, or a weight in x's type ("same") or fp32 ("fp32").
    routing: by default the case's number of slots, by softmax.  shared: rows of each half of the
    shared experts, 0 for none, or these themselves.  gate: of the shared experts, in that type.
    changes: arguments of `check_layer` by name, whatever the rest says.
    """
    x, w13, w2, _, ids = case.args
    expert_map = case.options.get("expert_map")
    experts = w2.size(0) if expert_map is None else expert_map.numel()
    g = generator(experts + x.size(0))

    def noise(*size: int, dtype: torch.dtype = x.dtype) -> Tensor:
        value: Tensor = torch.randn(size, generator=g)
        return value.to(dtype)

    arguments: dict[str, Any] = {
        **{"x": x, "w13": w13, "w2": w2, **case.options},
        "routing": routing or RoutingConfig(ids.size(1)),
    }
    if router == "logits":
        arguments["router_logits"] = noise(x.size(0), experts, dtype=torch.float32)
    else:
        dtype = torch.float32 if router == "fp32" else x.dtype
        arguments["router_weight"] = noise(experts, x.size(1), dtype=dtype)
    for name, bias in (("router_bias", router_bias), ("selection_bias", selection_bias)):
        if bias is not False:
            arguments[name] = noise(experts) if bias is True else bias
    if isinstance(shared, SharedExperts):
        arguments["shared"] = shared
    elif shared:
        gated = case.options["activation"].gated
        arguments["shared"] = SharedExperts(
            noise(shared * (2 if gated else 1), x.size(1)),
            noise(x.size(1), shared),
            None if gate is None else noise(1, x.size(1), dtype=gate),
        )
    arguments |= changes
    x, w13, w2 = (arguments.pop(name) for name in ("x", "w13", "w2"))
    return check_layer(x, w13, w2, **arguments)


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


GATED = bf16_case(activation="silu")


def moved_by(tensor: Tensor, elements: int) -> Tensor:
    """The same values, so many elements after a multiple of 16 bytes."""
    flat = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype)
    start = next(i for i in range(16) if flat[i:].data_ptr() % 16 == 0) + elements
    return flat[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def strided(tensor: Tensor) -> Tensor:
    """The same values, every other one of a tensor's."""
    spread = torch.zeros(*tensor.shape[:-1], 2 * tensor.size(-1), dtype=tensor.dtype)
    return spread[..., ::2].copy_(tensor)


def shared_with(change: str, change_to: Callable[[Tensor], Tensor]) -> SharedExperts:
    """Shared experts of 64 rows for `GATED`, of which one tensor is changed."""
    shared = layer_of(GATED, shared=64, gate=torch.bfloat16).shared
    assert shared is not None
    return replace(shared, **{change: change_to(getattr(shared, change))})


WEIGHT = torch.randn(4, 64, generator=generator(1)).bfloat16()
REFUSED: dict[str, tuple[LayerCall, str]] = {
    "groups": (
        layer_of(
            bf16_case(experts=66, hidden=8, intermediate=8),
            routing=RoutingConfig(2, num_groups=33, topk_groups=2),
        ),
        "33 groups of experts; at most 32",
    ),
    "a router of many experts": (
        layer_of(bf16_case(experts=513, hidden=8, intermediate=8, mapped=True)),
        "the router has 1026 experts; at most 1,024",
    ),
    "a router of another type": (
        layer_of(GATED, router_weight=WEIGHT.half()),
        "router_weight is float16; it must be x's type or float32",
    ),
    "a gate of another type": (
        layer_of(GATED, shared=shared_with("gate", Tensor.half), router_weight=WEIGHT),
        "shared.gate is float16",
    ),
    "two types": (
        layer_of(GATED, shared=shared_with("gate", Tensor.float)),
        "router_weight and shared.gate differ in type",
    ),
    "a router with gaps": (
        layer_of(GATED, router_weight=strided(WEIGHT)),
        "router_weight must be contiguous and start at a multiple of 16 bytes",
    ),
    "a router that starts anywhere": (
        layer_of(GATED, router_weight=moved_by(WEIGHT, 1)),
        "router_weight must be contiguous and start at a multiple of 16 bytes",
    ),
    "a gate that starts anywhere": (
        layer_of(GATED, shared=shared_with("gate", lambda t: moved_by(t, 4))),
        "shared.gate must be contiguous and start at a multiple of 16 bytes",
    ),
    "logits with gaps": (
        layer_of(GATED, router="logits", router_logits=strided(torch.zeros(5, 4))),
        "logits and biases must be contiguous",
    ),
    "a bias with gaps": (
        layer_of(GATED, router_bias=strided(torch.zeros(4))),
        "logits and biases must be contiguous",
    ),
    "a selection bias with gaps": (
        layer_of(GATED, selection_bias=strided(torch.zeros(4))),
        "logits and biases must be contiguous",
    ),
    "odd shared experts": (
        layer_of(GATED, shared=60),
        "the shared experts' intermediate size is 60; it must be a multiple of 8",
    ),
    "too many slots": (
        layer_of(bf16_case(top_k=16, experts=16, intermediate=8), shared=136),
        "16 experts and 17 slices of shared ones a token; at most 32",
    ),
    "too many experts": (
        layer_of(bf16_case(experts=1024, hidden=8, intermediate=8), shared=8),
        "1024 experts and 1 slices of shared ones; at most 1,024",
    ),
    "weights on both sides": (
        layer_of(bf16_case(weight_on_input=True), shared=64, gate=torch.bfloat16),
        "the weight is on the input, and the shared experts' gate on the output",
    ),
    "shared w13 with gaps": (
        layer_of(GATED, shared=shared_with("w13", lambda t: torch.cat((t, t), 1)[:, :64])),
        "shared weights must be contiguous and start at a multiple of 16 bytes",
    ),
    "a shared w2 that starts anywhere": (
        layer_of(GATED, shared=shared_with("w2", lambda t: moved_by(t, 2))),
        "shared weights must be contiguous and start at a multiple of 16 bytes",
    ),
}
TAKEN: dict[str, LayerCall] = {
    "a weight": layer_of(GATED),
    "logits": layer_of(GATED, router="logits"),
    "32 groups": layer_of(
        bf16_case(experts=64, hidden=8, intermediate=8),
        routing=RoutingConfig(2, num_groups=32, topk_groups=2),
    ),
    "a router of 1,024 experts": layer_of(
        bf16_case(experts=512, hidden=8, intermediate=8, mapped=True)
    ),
    "fp32, and a gate of fp32": layer_of(GATED, router="fp32", shared=64, gate=torch.float32),
    "biases of other types": layer_of(
        *(GATED,), router_bias=torch.zeros(4).half(), selection_bias=torch.zeros(4).bfloat16()
    ),
    "logits that start anywhere": layer_of(
        GATED, router="logits", router_logits=moved_by(torch.zeros(5, 4).half(), 1)
    ),
    "32 slots": layer_of(bf16_case(top_k=16, experts=16, intermediate=8), shared=128),
    "1,024 experts": layer_of(bf16_case(experts=1023, hidden=8, intermediate=8), shared=8),
    "the weight on the input": layer_of(bf16_case(weight_on_input=True), shared=64),
    "biases and interleaved rows": layer_of(
        bf16_case(biases=True, interleaved=True), shared=72, gate=torch.bfloat16
    ),
}


class TestWholeLayers:
    """Router and shared experts in the launch, where the kernel does that; else by parts."""

    @pytest.mark.parametrize("name", REFUSED)
    def test_what_the_kernel_does_not_do(self, name: str) -> None:
        call, reason = REFUSED[name]
        found = cuda.BACKEND.layer_unavailable(call)
        assert found is not None
        assert reason in found
        assert cuda.BACKEND._unsupported(call.experts) is None, "the experts alone are taken"

    @pytest.mark.parametrize("name", TAKEN)
    def test_what_it_does(self, recorder: Recorder, name: str) -> None:
        assert cuda.BACKEND.layer_unavailable(TAKEN[name]) is None
        (launch,), _, _ = recorder.layer(TAKEN[name])
        assert launch.config.router != "none"

    @pytest.fixture
    def on_gpu(self, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[LayerCall]:
        """CPU tensors pass for a GPU's; returns the calls that the backend gets as a whole."""
        monkeypatch.setattr(ExpertsCall, "device", torch.device("cuda", 0))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        whole: list[LayerCall] = []

        def layer(self: Any, call: LayerCall, return_routing: bool) -> tuple[Tensor, ...]:
            whole.append(call)
            size = (call.experts.num_tokens if return_routing else 0, call.routing.top_k)
            return call.experts.output(), torch.zeros(size), torch.zeros(size, dtype=torch.int32)

        monkeypatch.setattr(cuda._Cuda, "layer", layer)
        recorder.all.clear()
        recorder.launches.clear()
        return whole

    @staticmethod
    def call(call: LayerCall, **options: Any) -> Any:
        given = (*("router_weight", "router_bias", "router_logits"), "selection_bias", "shared")
        experts = call.experts
        more = ("activation", "b13", "b2", "expert_map", "interleaved", "weight_on_input")
        return weave_moe.moe_layer(
            experts.x,
            experts.w13,
            experts.w2,
            routing=call.routing,
            **{name: getattr(call, name) for name in given},
            **{name: getattr(experts, name) for name in more},
            **options,
        )

    @pytest.mark.parametrize("backend", ["auto", "cuda"])
    @pytest.mark.parametrize("name", REFUSED)
    def test_what_it_does_not_do_is_done_by_parts(
        self, on_gpu: list[LayerCall], recorder: Recorder, name: str, backend: str
    ) -> None:
        call, _ = REFUSED[name]
        experts, on_cuda = call.experts, 1
        if call.shared is not None:
            alone = shared_call(experts.x, call.shared, experts.activation)
            reason = cuda.BACKEND._unsupported(alone)
            if reason is not None and backend == "cuda":
                with pytest.raises(ValueError, match="backend 'cuda' cannot run"):
                    self.call(call, backend=backend)
                return
            on_cuda += reason is None  # else by the reference
        y, weights, ids = self.call(call, backend=backend, return_routing=True)
        assert not on_gpu
        assert y.shape == call.experts.x.shape
        want = call.route()
        assert torch.equal(weights, want[0])
        assert torch.equal(ids, want[1])
        # The routed experts' launch, and before it one for the shared.
        assert len(recorder.launches) == on_cuda
        for launch in recorder.launches:
            assert launch.config.router == "none"
            assert not launch.config.shared
        assert recorder.launches[-1].p.experts == call.experts.shape.experts

    @pytest.mark.parametrize("name", TAKEN)
    def test_what_it_does_is_handed_over_whole(
        self, on_gpu: list[LayerCall], recorder: Recorder, name: str
    ) -> None:
        for options in ({}, {"backend": "cuda"}, {"return_routing": True}):
            self.call(TAKEN[name], **options)
            (whole,) = on_gpu
            assert whole.routing == TAKEN[name].routing
            assert whole.shared is TAKEN[name].shared
            assert not recorder.all
            on_gpu.clear()

    def test_other_backends_work_by_parts(self, on_gpu: list[LayerCall]) -> None:
        call = TAKEN["a weight"]
        y, _, ids = self.call(call, backend="reference", return_routing=True)
        assert not on_gpu
        assert bool(y.abs().sum() > 0)
        assert torch.equal(ids, call.route()[1])
        with pytest.raises(ValueError, match="backend 'host' cannot run this call"):
            self.call(call, backend="host")

    def test_gradients_are_refused_by_name(self, on_gpu: list[LayerCall]) -> None:
        for name in ("router_weight", "selection_bias"):
            call = layer_of(GATED, selection_bias=True)
            needed = {name: getattr(call, name).float().requires_grad_()}
            if name == "router_weight":
                with pytest.raises(ValueError, match="requires grad"):
                    self.call(replace(call, **needed))
            with torch.no_grad():
                self.call(replace(call, **needed))
            assert len(on_gpu) == 1
            on_gpu.clear()

    @pytest.mark.parametrize(
        ("name", "size"),
        [
            *(("router_weight", (4, 64)), ("router_logits", (5, 4))),
            *(("selection_bias", (4,)), ("router_bias", (4,))),
            *(("shared.w13", (128, 64)), ("shared.w2", (64, 64)), ("shared.gate", (64,))),
        ],
    )
    def test_the_output_is_none_of_its_inputs(self, name: str, size: tuple[int, ...]) -> None:
        # Blocks that come late still route when others have written their results.
        out = torch.zeros(5, 64, dtype=torch.bfloat16)
        # Rows over each other, from within the output on.
        part = out.view(-1)[8:].as_strided(size, (0,) * (len(size) - 1) + (1,))
        changes: dict[str, Any] = {name: part}
        if name.startswith("shared."):
            changes = {"shared": shared_with(name[7:], lambda _: part)}
        router = "logits" if name == "router_logits" else "same"
        layer_of(GATED, router=router, **changes)
        with pytest.raises(ValueError, match=f"^out must share no memory with {name}, but"):
            layer_of(GATED, router=router, out=out, **changes)

    def test_no_tokens_are_no_launch(self, on_gpu: list[LayerCall], recorder: Recorder) -> None:
        call = layer_of(bf16_case(0), shared=64)
        y, weights, ids = self.call(call, return_routing=True)
        assert y.shape == (0, 64)
        assert weights.shape == ids.shape == (0, 2)
        assert not on_gpu
        assert not recorder.all


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
            if config.many and config.router in ("same", "fp32"):
                names += ("route",)
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
        patch.setattr(cuda, "_pools", {})
        patch.setattr(torch.cuda, "device", lambda device: _nothing())

    def layer(
        self, call: LayerCall, *, return_routing: bool = True
    ) -> tuple[list[Launched], Tensor, Tensor]:
        """The launches of the experts' kernel in a layer's call, and its weights and ids."""
        self.launches.clear()
        self.all.clear()
        out, weights, ids = cuda.BACKEND.layer(call, return_routing)
        assert out.shape == call.experts.x.shape
        return list(self.launches), weights, ids

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

    config = kernel.KernelConfig.of(
        plan,
        dtype="bfloat16",
        activation="silu",
        clamp=False,
        bias=False,
        router=router,
        hidden=64,
        intermediate=64,
    )
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
    assert sort_bytes(experts, chunk_tokens * top_k, 1024) <= most


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


@pytest.mark.parametrize("experts", [3, 300])
def test_each_warp_of_the_sort_has_room_to_choose(recorder: Recorder, experts: int) -> None:
    recorder.layer(layer_of(bf16_case(FEW_TOKENS + 1, hidden=64, intermediate=8, experts=experts)))
    (sort,) = (launched for launched in recorder.all if launched.name == "sort")
    assert sort.p.router.experts == experts
    behind = sort.shared // 4 - SORT_THREADS // 16 - MAX_CHUNKS
    assert behind >= SORT_THREADS // 32 * chooser_words(experts)
    assert sort.shared >= sort_bytes(experts, sort.p.chunk_slots)


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


def box_of(
    flat: Tensor,
    found: tuple[Any, ...],
    block: int,
    tile_k: int,
    *,
    packed: bool,
    first: int = 0,
) -> list[list[int | None]]:
    """The rows of a tile that a map's boxes hold, in order, `tile_k` columns from `first` on: what
    the hardware does with dims, strides and box; None where it fills in zeros."""
    _, _, dims, strides, box, _ = found
    steps = (1, *strides)
    assert not packed or first % 64 == 0
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
        for column in range(first, first + tile_k):
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
                got = box_of(w13.flatten(), w13_map, block, tile_k, packed=hidden % 64 == 0)
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

    @pytest.mark.parametrize(
        ("hidden", "inter", "shared", "kind"),
        [
            # Slices that are all of it, two, three, the half of one, a part of two: packed.
            *((64, 128, 128, "gated"), (72, 64, 128, "plain"), (64, 64, 192, "gated")),
            *((64, 128, 64, "plain"), (64, 128, 192, "interleaved")),
            # The same, unpacked: I is no multiple of 64, or Is is none.
            *((72, 88, 88, "gated"), (64, 72, 144, "interleaved"), (64, 80, 40, "gated")),
            *((72, 88, 200, "plain"), (64, 128, 8, "gated"), (64, 64, 200, "gated")),
        ],
    )
    @pytest.mark.parametrize("tokens", [1, 40, FEW_TOKENS + 1])
    def test_boxes_of_shared_experts(
        self, recorder: Recorder, hidden: int, inter: int, shared: int, kind: str, tokens: int
    ) -> None:
        case = bf16_case(
            tokens,
            hidden=hidden,
            intermediate=inter,
            experts=3,
            activation="relu2" if kind == "plain" else "silu",
            interleaved=kind == "interleaved",  # the routed experts, and they alone
        )
        call = layer_of(case, shared=shared)
        assert call.shared is not None
        weights = call.shared.w13, call.shared.w2
        (launch,), _, _ = recorder.layer(call)
        p, config = launch.p, launch.config
        tile_m, tile_k = config.tile_m, config.tile_k
        slices = p.experts - p.routed
        assert (slices - 1) * inter < shared <= slices * inter
        assert config.packed_down == (inter % 64 == shared % 64 == 0)
        (map13, map2), (numbers13, numbers2) = (
            [next(m for m in recorder.maps if m[0] == w.data_ptr()) for w in weights],
            # Each element is its own number.
            [torch.arange(w.numel()).view(w.shape) for w in weights],
        )
        assert recorder.maps.index(map13) + 1 == recorder.maps.index(map2)
        elements = tile_m if kind == "plain" else tile_m // 2
        ran_over, read_nothing = 0, 0
        for number in range(slices):
            for chunk in range(p.chunks_up):
                block = (number * inter + chunk * elements) // 8  # device/producer.h
                got = box_of(numbers13.flatten(), map13, block, tile_k, packed=config.packed_up)
                for row, held in enumerate(got):
                    half, element = 0, row
                    if kind != "plain":
                        half, element = row // 8 % 2, row // 16 * 8 + row % 8
                    element += chunk * elements
                    if element >= inter:
                        ran_over += 1
                        continue  # the next slice's rows: dropped
                    element += number * inter
                    want = [None] * tile_k
                    if element < shared:
                        row_of = numbers13[element + half * shared, :tile_k].tolist()
                        want = row_of + [None] * (tile_k - len(row_of))
                    else:
                        read_nothing += 1
                    assert held == want
            for chunk in range(p.chunks_down):
                for column in range(0, inter, tile_k):
                    first = number * inter + column
                    got = box_of(
                        numbers2.flatten(),
                        map2,
                        chunk * tile_m // 8,
                        tile_k,
                        packed=config.packed_down,
                        first=first,
                    )
                    for row, held in enumerate(got):
                        want = [None] * tile_k
                        if chunk * tile_m + row < hidden:
                            row_of = numbers2[chunk * tile_m + row, first : first + tile_k]
                            want[: len(row_of)] = row_of.tolist()
                        assert held == want
        # The rows that a short slice lacks are zeros, and so are its columns: h and w2 alike.
        halves = 1 if kind == "plain" else 2
        assert read_nothing == halves * (slices * inter - shared)
        assert ran_over == halves * slices * (p.chunks_up * elements - inter)

    @pytest.mark.parametrize("shared", [128, 200])
    @pytest.mark.parametrize("tokens", [5, FEW_TOKENS + 1])
    def test_h_is_zero_past_a_slice(self, recorder: Recorder, tokens: int, shared: int) -> None:
        # The last stage of a slice of w2 goes on into the next one.
        call = layer_of(bf16_case(tokens, intermediate=64), shared=shared)
        (launch,), _, _ = recorder.layer(call)
        packed = launch.config.packed_down
        assert packed == (shared == 128)
        assert launch.config.tile_k > 64 or tokens > FEW_TOKENS
        of_h = [m for m in recorder.maps if m[0] == launch.p.h and m[4][0] == 64]
        assert len(of_h) == launch.config.width_cap // 8
        for _, _, dims, *_ in of_h:
            assert (64 * dims[2] if packed else dims[0]) == launch.p.intermediate

    def test_shared_weights_that_moved_get_their_own(self, recorder: Recorder) -> None:
        call = layer_of(bf16_case(), shared=128)
        shared = call.shared
        assert shared is not None
        (before,), _, _ = recorder.layer(call)
        made = len(recorder.maps)
        (again,), _, _ = recorder.layer(call)
        assert len(recorder.maps) == made
        assert again.maps == before.maps
        for name in ("w13", "w2"):
            moved = replace(shared, **{name: getattr(shared, name).clone()})
            (after,), _, _ = recorder.layer(replace(call, shared=moved))
            assert after.maps[256:512] != before.maps[256:512]
            assert after.maps[:256] == before.maps[:256]

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

    @pytest.mark.parametrize("shared", [None, 0, 256])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("tokens", [5, 40, FEW_TOKENS + 1])
    def test_a_launch_has_those_that_the_kernel_is_compiled_for(
        self, recorder: Recorder, tokens: int, dtype: torch.dtype, shared: int | None
    ) -> None:
        case = bf16_case(tokens, hidden=192, intermediate=128, dtype=dtype)
        call = layer_of(case, shared=shared or 0)
        (launch,) = recorder.run(case) if shared is None else recorder.layer(call)[0]
        config, held = launch.config, recorder.buffers
        size = driver.TENSOR_MAP_BYTES
        bits = [launch.maps[at : at + size] for at in range(0, len(launch.maps), size)]
        made = [
            recorder.maps[n - 1] if n else None for n in (int.from_bytes(b, "little") for b in bits)
        ]
        weights: list[Tensor | None] = [case.w13, case.w2, None, None]
        if call.shared is not None:
            weights[2:] = call.shared.w13, call.shared.w2
        for weight in weights:
            found, *made = made
            assert (found and found[0]) == (None if weight is None else weight.data_ptr())
        rest = made
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

    def test_both_kernels_of_a_padded_call_must_be_ready(self, recorder: Recorder) -> None:
        recorder.run(bf16_case(2048))
        recorder.capturing = 1
        with pytest.raises(RuntimeError, match=r"weave_moe\.warmup\(shape, tokens=2048\)"):
            recorder.run(bf16_case(2048, valid=5))
        recorder.capturing = None
        recorder.run(bf16_case(2048, valid=5))
        recorder.capturing = 2
        assert len(recorder.run(bf16_case(2048, valid=5))) == 2

    def test_a_layers_kernel_is_another_one(self, recorder: Recorder) -> None:
        call = layer_of(bf16_case(5), shared=64)
        recorder.run(bf16_case(5))
        recorder.capturing = 1
        with pytest.raises(
            RuntimeError, match=r"capture; call MoELayer.warmup\(5\), or weave_moe.warmup with"
        ):
            recorder.layer(call)
        recorder.capturing = None
        recorder.layer(call)
        recorder.capturing = 2
        assert len(recorder.layer(call)[0]) == 1

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
            kinds = {None: "none", "logits": "logits", "bfloat16": "same", "float32": "fp32"}
            router = data.draw(st.sampled_from(list(kinds)), "router")
            shared = 0 if router is None else data.draw(st.sampled_from([0, 64, 200]), "Is")
            if cuda._other_layer(shape, shape.experts, shared):
                shared = 0
            slices = cuda.shared_slices(shape, shared)
            cuda.warmup(shape, most, router=router, shared_intermediate=shared)
            warm = set(recorder.compiled)
            some = data.draw(st.lists(st.integers(1, most), min_size=20, max_size=20))
            for tokens in (*some, most, cuda.SLAB_TOKENS):
                if tokens > most:
                    continue
                plan = cuda.plan_for(shape, tokens, router=router is not None, shared=slices)
                config = kernel.KernelConfig.of(
                    plan,
                    dtype="bfloat16",
                    activation="silu",
                    clamp=False,
                    bias=False,
                    router=kinds[router],
                    router_experts=shape.experts,
                    hidden=64,
                    intermediate=64,
                    shared_intermediate=shared,
                )
                assert config in warm, f"{tokens} of {most} tokens, {shape}"

    @pytest.mark.parametrize(
        ("shared", "router", "groups", "whole"),
        [
            (0, torch.bfloat16, 1, True),
            (96, torch.float32, 1, True),
            (96, torch.float16, 1, False),  # neither x's type nor fp32
            (0, torch.bfloat16, 64, False),
        ],
    )
    def test_a_layer_warms_up_what_its_forward_asks_for(
        self,
        recorder: Recorder,
        monkeypatch: pytest.MonkeyPatch,
        shared: int,
        router: torch.dtype,
        groups: int,
        whole: bool,
    ) -> None:
        asked: list[tuple[LayerShape, int, dict[str, Any]]] = []
        monkeypatch.setattr(cuda, "warmup", lambda *sizes, **given: asked.append((*sizes, given)))
        shape = LayerShape(64, 64, 128, 2, "bfloat16")
        layer = weave_moe.MoELayer(
            shape,
            RoutingConfig(2, num_groups=groups, topk_groups=groups),
            shared_intermediate=shared,
            expert_bias=True,
        )
        layer.gate.to(router)
        with pytest.raises(RuntimeError, match="the layer is on cpu"):
            layer.warmup(4)
        monkeypatch.setattr(weave_moe.MoELayer, "_device", lambda _: torch.device("cuda", 0))
        layer.warmup(4)
        common = {"activation": layer.parts.activation, "device": 0}
        routed = {**common, "bias": True, "weight_on_input": False}
        if whole:
            name = "float32" if router is torch.float32 else "bfloat16"
            assert asked == [(shape, 4, {**routed, "router": name, "shared_intermediate": shared})]
        else:
            assert asked[0] == (shape, 4, routed)
            assert asked[1:] == [
                (replace(shape, intermediate=inter, experts=1, top_k=1), 4, common)
                for inter in (shared,)
                if inter
            ]

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
            ({}, {"router": "float16"}, ValueError, '^router must be None, "logits", .*float16'),
            ({}, {"shared_intermediate": 8}, ValueError, "^router must not be None"),
            ({}, {"router": "logits", "shared_intermediate": -8}, ValueError, "^shared_intermedi"),
            *(
                ({}, {"router": "logits", **sizes}, ValueError, f"^router must be None .*{words}")
                for sizes, words in (
                    ({"router_experts": 2000}, "2000 experts; at most 1,024"),
                    ({"shared_intermediate": 12}, "12; it must be a multiple of 8"),
                    ({"shared_intermediate": 64 * 40}, "40 slices of shared ones a token"),
                )
            ),
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

    def test_warmup_asks_for_the_context_first_and_refuses_a_capture(
        self, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        order: list[str] = []
        make, ask = cuda.kernel_for, cuda.capture_id
        monkeypatch.setattr(cuda, "kernel_for", lambda *given: order.append("load") or make(*given))
        monkeypatch.setattr(cuda, "capture_id", lambda stream: order.append("ask") or ask(stream))
        shape = LayerShape(64, 64, 8, 2)
        weave_moe.warmup(shape, 1, device=0)
        assert order[0] == "ask"
        assert "load" in order
        recorder.capturing = 1
        with pytest.raises(RuntimeError, match="cannot be done during graph capture"):
            weave_moe.warmup(shape, 1, device=0)

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

    def test_a_capture_is_looked_for_on_the_device_that_is_asked_about(
        self, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inside: list[int] = []
        seen = []
        monkeypatch.setattr(torch.cuda, "device", entered(inside))
        monkeypatch.setattr(cuda, "capture_id", lambda stream: seen.append(list(inside)))
        monkeypatch.setattr(cuda, "_pools", {1: recorder.pool})
        weave_moe.check(1)
        assert seen == [[1]]

    def test_where_nothing_ever_ran_there_is_nothing_to_check(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cuda, "_pools", {})
        weave_moe.check(3)
        weave_moe.check()  # not even torch is asked for the current device


@given(
    st.integers(1, 3000), st.integers(1, 16), st.integers(1, 1024), st.none() | st.integers(0, 1025)
)
def test_needs_grow_with_tokens(tokens: int, top_k: int, experts: int, rows: int | None) -> None:
    # Within one kernel: a launch captured for many tokens serves few.
    plan = choose_kernel(
        tokens=tokens, top_k=top_k, experts=experts, hidden=64, router=rows is not None
    )

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
            router_rows=rows,
        )

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
