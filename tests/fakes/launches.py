"""The CUDA backend without a GPU: launches are recorded in place of being run, with CPU tensors for
device memory; and calls to record."""

from __future__ import annotations

import ctypes
import types
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from generators import Case, experts_case, generator
from weave_moe.backends import cuda
from weave_moe.routing import LayerCall, RoutingConfig, check_layer
from weave_moe.runtime import buffers, driver, kernel
from weave_moe.runtime.buffers import BufferPool, Buffers
from weave_moe.schedule.granularity import SHARED_BYTES, KernelPlan
from weave_moe.shapes import SharedExperts

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


def config_of(plan: KernelPlan, **options: Any) -> kernel.KernelConfig:
    """The plan's kernels for a small layer in bf16, or what the options say."""
    common: dict[str, Any] = {
        **{"dtype": "bfloat16", "activation": "silu", "clamp": False, "bias": False},
        **{"hidden": 64, "intermediate": 64},
    }
    return kernel.KernelConfig.of(plan, **common | options)


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
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())

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
