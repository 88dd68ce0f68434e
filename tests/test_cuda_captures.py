"""What must be loaded before a graph is captured, and what captures share."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weave_moe
from fakes.launches import Recorder, bf16_case, config_of, layer_of
from weave_moe.backends import cuda
from weave_moe.routing import RoutingConfig
from weave_moe.shapes import LayerShape


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
            patch.setattr(torch.cuda, "device", lambda index: nullcontext())
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
                config = config_of(
                    plan,
                    router=kinds[router],
                    router_experts=shape.experts,
                    shared_intermediate=shared,
                )
                assert config in warm, f"{tokens} of {most} tokens, {shape}"

    @pytest.mark.parametrize(
        ("shared", "router", "groups", "whole"),
        [
            (0, torch.bfloat16, 1, True),
            (96, torch.float32, 1, True),
            (96, torch.float16, 1, False),  # neither x's type nor fp32
            (60, torch.bfloat16, 1, False),  # shared experts that the kernel does not take at all
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
                if inter and inter % 8 == 0
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
