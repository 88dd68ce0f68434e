"""What the CUDA backend takes and refuses, and its errors, without a GPU."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import weave_moe
from fakes.devices import entered
from fakes.launches import Recorder, bf16_case, layer_of
from generators import Case, generator
from weave_moe.backends import cuda
from weave_moe.routing import LayerCall, RoutingConfig
from weave_moe.runtime import kernel
from weave_moe.shapes import ExpertsCall, SharedExperts, shared_call


class TestUnavailable:
    """Reasons are words for the user: they name the argument, the value and what is allowed."""

    @pytest.mark.parametrize(
        ("case", "reason"),
        [
            (bf16_case(dtype=torch.float32), "float32; the kernel takes bfloat16 and float16"),
            (
                bf16_case(hidden=60),
                "hidden is 60; rows must be a multiple of 16 bytes, so of 8 elements: pad x and "
                "the weights with zeros to 64, or take backend='reference'",
            ),
            (
                bf16_case(intermediate=36),
                "intermediate is 36; rows must be a multiple of 16 bytes, so of 8 elements: pad "
                "the weights with zeros to 40, or take backend='reference'",
            ),
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
            assert f"must be contiguous: pass {name}.contiguous()" in found
            flat = torch.zeros(weight.numel() + 8, dtype=weight.dtype)
            shift = next(i for i in range(1, 8) if (flat.data_ptr() + 2 * i) % 16)
            moved = flat[shift : shift + weight.numel()].view(weight.shape)
            found = cuda.BACKEND._unsupported(case.with_(**{name: moved}).call())
            assert found is not None
            assert f"does not start at a multiple of 16 bytes: pass {name}.clone()" in found
            # What is advised helps.
            assert cuda.BACKEND._unsupported(case.with_(**{name: moved.clone()}).call()) is None

    @pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "relu2"])
    def test_padding_with_zeros_changes_nothing(self, activation: str) -> None:
        case = bf16_case(hidden=60, intermediate=36, biases=True, activation=activation)
        x, w13, w2, weights, ids = case.args
        halves = w13.size(1) // 36
        pad = torch.nn.functional.pad
        wide = pad(w13.view(4, halves, 36, 60), (0, 4, 0, 4)).reshape(4, halves * 40, 64)
        b13 = pad(case.options["b13"].view(4, halves, 36), (0, 4)).reshape(4, halves * 40)
        options = {"activation": activation, "backend": "reference"}
        want = weave_moe.fused_experts(
            *case.args, b13=case.options["b13"], b2=case.options["b2"], **options
        )
        padded = (pad(x, (0, 4)), wide, pad(w2, (0, 4, 0, 4)), weights, ids)
        b2 = pad(case.options["b2"], (0, 4))
        got = weave_moe.fused_experts(*padded, b13=b13, b2=b2, **options)
        torch.testing.assert_close(got[:, :60], want)
        assert not got[:, 60:].any()

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
