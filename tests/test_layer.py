"""The public calls: whole layers, the module, and which backend runs what."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import weave_moe
from generators import (
    ACTIVATIONS,
    DTYPES,
    Case,
    Guarded,
    assert_rows_close,
    experts_case,
    experts_cases,
    generator,
    naive,
    poison_allocator,
)
from weave_moe import (
    LayerShape,
    MoELayer,
    RoutingConfig,
    SharedExperts,
    backends,
    fused_experts,
    moe_layer,
    ops,
    workspace_bytes,
)
from weave_moe.reference import moe_reference, shared_reference
from weave_moe.routing import route, router_logits
from weave_moe.shapes import ExpertsCall

NAN = float("nan")


def shared_of(case: Case, intermediate: int, *, gated: bool, seed: int = 0) -> SharedExperts:
    """Shared experts that fit the case's tokens and activation."""
    g = generator(seed)
    hidden, dtype = case.x.size(1), case.x.dtype
    rows = intermediate * (2 if case.options["activation"].gated else 1)
    return SharedExperts(
        (torch.randn(rows, hidden, generator=g) / hidden**0.5).to(dtype),
        (2 * torch.randn(hidden, intermediate, generator=g) / intermediate**0.5).to(dtype),
        (torch.randn(1, hidden, generator=g) / hidden**0.5).to(dtype) if gated else None,
    )


def layer_arguments(case: Case) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """The case without its routing, for `moe_layer`: (x, w13, w2) and the other options."""
    return case.args[:3], case.options


def global_experts(case: Case) -> int:
    """How many experts a router of the case chooses from."""
    expert_map = case.options.get("expert_map")
    return int(case.w2.size(0) if expert_map is None else expert_map.numel())


class TestMoeLayer:
    @given(case=experts_cases(max_size=20, max_tokens=12), data=st.data())
    def test_it_is_router_then_experts(self, case: Case, data: st.DataObject, backend: str) -> None:
        experts = global_experts(case)
        g = generator(data.draw(st.integers(0, 2**31)))
        logits = torch.randn(case.x.size(0), experts, generator=g)
        bias = data.draw(st.none() | st.just(torch.linspace(-1, 1, experts)))
        config = RoutingConfig(
            data.draw(st.integers(1, experts)), "sigmoid", renormalize=data.draw(st.booleans())
        )
        tensors, options = layer_arguments(case)
        y, weights, ids = moe_layer(
            *tensors,
            routing=config,
            router_logits=logits,
            selection_bias=bias,
            return_routing=True,
            backend=backend,
            **options,
        )
        want_weights, want_ids = route(logits, config, bias)
        assert torch.equal(weights, want_weights)
        assert torch.equal(ids, want_ids)
        want = fused_experts(*tensors, weights, ids, backend=backend, **options)
        assert torch.equal(y, want)
        alone = moe_layer(
            *tensors,
            routing=config,
            router_logits=logits,
            selection_bias=bias,
            backend=backend,
            **options,
        )
        assert torch.equal(alone, y)

    @given(case=experts_cases(max_size=20, max_tokens=12), data=st.data())
    def test_shared_experts_are_added_once_and_unscaled(
        self, case: Case, data: st.DataObject, backend: str
    ) -> None:
        """Routed weights are scaled by 2.5; the shared part is not, and both are rounded once."""
        shared = shared_of(case, data.draw(st.integers(1, 20)), gated=data.draw(st.booleans()))
        experts = global_experts(case)
        tensors, options = layer_arguments(case)
        options = dict(options)
        logits = torch.randn(case.x.size(0), experts, generator=generator(1))
        config = RoutingConfig(1, renormalize=True, scaling_factor=2.5)
        y, weights, ids = moe_layer(
            *tensors,
            routing=config,
            router_logits=logits,
            shared=shared,
            return_routing=True,
            backend=backend,
            **options,
        )
        residual = options.pop("residual", None)
        routed = fused_experts(*tensors, weights, ids, backend=backend, **options)
        gate = torch.ones(case.x.size(0), 1)
        if shared.gate is not None:
            # To the bit, so by the same product (a vector, not the transpose of a row).
            gate = torch.sigmoid(case.x.float() @ shared.gate.float().reshape(-1, 1))
        extra = fused_experts(
            case.x,
            shared.w13[None],
            shared.w2[None],
            gate,
            torch.zeros(case.x.size(0), 1, dtype=torch.int32),
            activation=options["activation"],
            num_valid_tokens=options.get("num_valid_tokens"),
            backend=backend,
        )
        want = routed.float() + extra.float()
        if residual is not None:
            want = want + residual.float()
        assert torch.equal(y, want.to(y.dtype))

    @given(case=experts_cases(max_size=20, max_tokens=12))
    def test_every_backend_gives_the_reference_within_rounding(
        self, case: Case, backend: str
    ) -> None:
        tensors, options = layer_arguments(case)
        experts, hidden = global_experts(case), case.x.size(1)
        g = generator(2)
        layer: dict[str, Any] = {
            "routing": RoutingConfig(1, "sigmoid", renormalize=True),
            "router_weight": torch.randn(experts, hidden, generator=g).to(case.x.dtype),
            "router_bias": torch.randn(experts, generator=g),
            "shared": shared_of(case, 5, gated=True),
            **options,
        }
        got = moe_layer(*tensors, backend=backend, **layer)
        truth = moe_reference(*tensors, rounding=False, compute_dtype=torch.float64, **layer)
        tolerance = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2e-5}
        scale = truth.abs().max() + 1 if truth.numel() else 1.0
        assert got.dtype is case.x.dtype
        assert ((got.double() - truth).abs() <= 2 * tolerance[got.dtype] * scale).all()

    @pytest.mark.parametrize("gated", [False, True])
    def test_padding_rows_get_nothing_from_shared_experts(self, gated: bool, backend: str) -> None:
        case = experts_case(8, valid=5)
        x = case.x.clone()
        x[5:] = NAN
        poison_allocator()
        y = moe_layer(
            x,
            *case.args[1:3],
            routing=RoutingConfig(2),
            router_logits=torch.full((8, 4), NAN),
            shared=shared_of(case, 5, gated=gated),
            backend=backend,
            **case.options,
        )
        assert torch.equal(y[5:], torch.zeros(3, 16))
        assert y[:5].isfinite().all()
        assert y[:5].abs().sum() > 0

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shared", [False, True])
    def test_a_residual_is_added_last_and_in_place(
        self, shared: bool, dtype: torch.dtype, backend: str
    ) -> None:
        case = experts_case(8, dtype=dtype, valid=5, residual=True)
        residual = case.options.pop("residual")
        layer: dict[str, Any] = {
            "routing": RoutingConfig(2),
            "router_logits": torch.randn(8, 4, generator=generator(4)),
            "shared": shared_of(case, 5, gated=True) if shared else None,
            "backend": backend,
            **case.options,
        }
        into = residual.clone()
        got = moe_layer(*case.args[:3], residual=into, out=into, **layer)
        assert got is into
        assert torch.equal(got, moe_layer(*case.args[:3], residual=residual, **layer))
        assert torch.equal(got[5:], residual[5:])
        # Less its rounded value the sum leaves what the rounding took.
        without = moe_layer(*case.args[:3], **layer)
        left = moe_layer(*case.args[:3], residual=-without, **layer)
        assert (left.abs() <= without.abs() * 2.0**-8).all()
        assert bool(left.any()) == (dtype is not torch.float32)

    def test_a_weight_on_the_input_is_for_routed_experts_only(self, backend: str) -> None:
        case = experts_case(8, weight_on_input=True)
        shared = shared_of(case, 5, gated=False)
        logits = torch.randn(8, 4, generator=generator(3))
        config = RoutingConfig(1, "sigmoid")
        y = moe_layer(
            *case.args[:3],
            routing=config,
            router_logits=logits,
            shared=shared,
            backend=backend,
            **case.options,
        )
        weights, ids = route(logits, config)
        routed, _ = naive(case.with_(topk_weights=weights, topk_ids=ids))
        assert_rows_close(y, routed + shared_reference(case.x, shared), 1e-5)

    @pytest.mark.parametrize("shared", [False, True])
    def test_out_is_written_and_returned(self, shared: bool, backend: str) -> None:
        case = experts_case(8)
        options: dict[str, Any] = {
            "routing": RoutingConfig(2),
            "router_logits": torch.randn(8, 4, generator=generator(4)),
            "shared": shared_of(case, 5, gated=True) if shared else None,
            "backend": backend,
            **case.options,
        }
        guarded = Guarded(8, 16, dtype=torch.float32)
        assert moe_layer(*case.args[:3], out=guarded.tensor, **options) is guarded.tensor
        guarded.check()
        assert torch.equal(guarded.tensor, moe_layer(*case.args[:3], **options))

    @pytest.mark.parametrize("shared", [False, True])
    def test_no_tokens(self, shared: bool, backend: str) -> None:
        case = experts_case(0)
        y, weights, ids = moe_layer(
            *case.args[:3],
            routing=RoutingConfig(2),
            router_weight=torch.zeros(4, 16),
            shared=shared_of(case, 5, gated=True) if shared else None,
            return_routing=True,
            backend=backend,
        )
        assert (y.shape, weights.shape, ids.shape) == ((0, 16), (0, 2), (0, 2))

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"routing": None}, TypeError, "^routing must be a RoutingConfig"),
            ({"router_logits": None}, ValueError, "^router_weight or router_logits must be given"),
            ({"router_logits": torch.zeros(5, 3)}, ValueError, "^router_logits must have 4"),
            ({"selection_bias": torch.zeros(5)}, ValueError, "^selection_bias must have 4"),
            ({"shared": (1, 2)}, TypeError, "^shared must be None or a SharedExperts"),
            ({"return_routing": None}, TypeError, "^return_routing must be True or False"),
            ({"backend": "gpu"}, ValueError, "^backend must be one of auto, cuda.*'gpu'"),
            ({"backend": None}, TypeError, "^backend must be a str.*NoneType"),
            ({"policy": "fast"}, ValueError, "^policy must be one of"),
            ({"b2": torch.zeros(4, 15)}, ValueError, "^b2 must have 16"),
            ({"out": torch.zeros(5, 15)}, ValueError, "^out must have x's shape"),
            ({"residual": torch.zeros(5, 15)}, ValueError, "^residual must have x's shape"),
            ({"residual": 1.0}, TypeError, "^residual must be a torch.Tensor, got float"),
            (
                {"expert_map": torch.zeros(9, dtype=torch.int32)},
                ValueError,
                "^router_logits must have 9",
            ),
        ],
    )
    def test_what_is_not_allowed_is_named(
        self, changes: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        case = experts_case()
        options: dict[str, Any] = {
            "routing": RoutingConfig(2),
            "router_logits": torch.zeros(5, 4),
            **changes,
        }
        with pytest.raises(error, match=words):
            moe_layer(*case.args[:3], **options)

    def test_a_shared_expert_that_does_not_fit_is_found_before_anything_runs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(call: ExpertsCall, name: str) -> backends.Backend:
            raise AssertionError("a backend was asked for")

        monkeypatch.setattr(backends, "choose", never)
        case = experts_case()
        with pytest.raises(ValueError, match=r"^shared\.w13 must have"):
            moe_layer(
                *case.args[:3],
                routing=RoutingConfig(2),
                router_logits=torch.zeros(5, 4),
                shared=SharedExperts(torch.zeros(6, 15), torch.zeros(16, 3)),
            )


class _Fake:
    """A backend that takes what it is told to, and counts."""

    def __init__(self, name: str, reason: str | None = None) -> None:
        self.name, self.reason, self.runs = name, reason, 0

    def unavailable(self, call: ExpertsCall) -> str | None:
        return self.reason

    def experts(self, call: ExpertsCall) -> Tensor:
        self.runs += 1
        return torch.full_like(call.x, 7.0)


class TestChoice:
    @pytest.fixture
    def pool(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
        """Backends by name, in place of the real ones; a str is why one does not load."""
        real = backends._load
        fakes: dict[str, Any] = {}
        monkeypatch.setattr(backends, "_load", lambda name: fakes.get(name) or real(name))
        backends._log_fallback.cache_clear()
        yield fakes
        backends._log_fallback.cache_clear()

    def test_auto_takes_the_host_for_tensors_on_the_cpu(self, pool: dict[str, Any]) -> None:
        pool["host"], pool["cuda"] = _Fake("host"), _Fake("cuda")
        case = experts_case()
        assert fused_experts(*case.args).eq(7).all()
        assert (pool["host"].runs, pool["cuda"].runs) == (1, 0)

    @pytest.mark.parametrize("missing", ["no compiler here", _Fake("host", "no compiler here")])
    def test_auto_falls_back_to_the_reference_and_says_so_once(
        self, missing: Any, pool: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        pool["host"] = missing
        case = experts_case()
        with caplog.at_level(logging.WARNING, "weave_moe"):
            for _ in range(3):
                got = fused_experts(*case.args)
        assert torch.equal(got, fused_experts(*case.args, backend="reference"))
        assert [r.getMessage() for r in caplog.records] == [
            "the host backend is not used: no compiler here; running the slow reference"
        ]

    @pytest.mark.parametrize("name", ["host", "cuda"])
    def test_a_named_backend_that_cannot_is_an_error_with_the_reason(
        self, name: str, pool: dict[str, Any]
    ) -> None:
        pool[name] = _Fake(name, "too wide")
        with pytest.raises(ValueError, match=f"^backend '{name}' cannot run this call: too wide$"):
            fused_experts(*experts_case().args, backend=name)

    def test_a_backend_whose_module_is_missing_is_an_error_with_the_reason(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backends, "_loaded", {})
        # None in sys.modules makes an import fail as for a module that is not there.
        monkeypatch.setitem(sys.modules, "weave_moe.backends.cuda", None)
        with pytest.raises(ValueError, match=r"^backend 'cuda' cannot run this call: "):
            fused_experts(*experts_case().args, backend="cuda")

    def test_no_tokens_run_nothing(self, pool: dict[str, Any]) -> None:
        pool["host"] = _Fake("host")
        assert fused_experts(*experts_case(0).args).shape == (0, 16)
        assert pool["host"].runs == 0

    @pytest.mark.parametrize("name", ["auto", "host", "cuda"])
    @pytest.mark.parametrize("tensor", ["x", "w13", "w2", "topk_weights"])
    def test_gradients_need_the_reference_by_name(
        self, name: str, tensor: str, pool: dict[str, Any]
    ) -> None:
        pool["host"], pool["cuda"] = _Fake("host"), _Fake("cuda")
        case = experts_case()
        case = case.with_(**{tensor: getattr(case, tensor).clone().requires_grad_()})
        with pytest.raises(ValueError, match=rf"^{tensor} requires grad, .*torch.no_grad\(\)"):
            fused_experts(*case.args, backend=name)
        with torch.no_grad():
            fused_experts(*case.args, backend=name)
        assert fused_experts(*case.args, backend="reference").requires_grad

    def test_real_backends_satisfy_the_interface(self) -> None:
        for name in backends.NAMES[1:]:
            backend = backends._load(name)
            if not isinstance(backend, str):
                assert isinstance(backend, backends.Backend)
                assert backend.name == name

    @pytest.mark.gpu
    def test_auto_on_a_gpu_is_right_whoever_runs_it(self) -> None:
        case = experts_case(8, 64, 64, 4, 2, dtype=torch.bfloat16)
        got = fused_experts(*(t.cuda() for t in case.args))
        assert_rows_close(got.cpu(), naive(case)[0], 2.0**-6)


class TestTheModule:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
    def test_it_is_moe_layer_with_its_parameters(
        self, activation: weave_moe.Activation, dtype: torch.dtype, backend: str
    ) -> None:
        torch.manual_seed(0)
        shape = LayerShape(16, 8, 6, 2, str(dtype).removeprefix("torch."), activation.gated)
        routing = RoutingConfig(2, "sigmoid", renormalize=True, scaling_factor=2.5)
        layer = MoELayer(
            shape,
            routing,
            activation=activation,
            router_bias=True,
            selection_bias=True,
            expert_bias=True,
            shared_intermediate=5,
            shared_gate=True,
            interleaved=activation.gated,
            weight_on_input=True,
            backend=backend,
        )
        assert layer.shape == shape
        for name, value in layer.state_dict().items():
            if "bias" in name:
                value.copy_(torch.randn(value.shape))
        p = layer.state_dict()
        w13 = "gate_up_proj" if activation.gated else "up_proj"
        halves = ("gate_proj", "up_proj") if activation.gated else ("up_proj",)
        x = torch.randn(3, 4, 16).to(dtype)
        with torch.no_grad():
            got = layer(x)
        want = moe_layer(
            x.view(12, 16),
            p[f"experts.{w13}"],
            p["experts.down_proj"],
            routing=routing,
            router_weight=p["gate.weight"],
            router_bias=p["gate.bias"],
            selection_bias=p["gate.e_score_correction_bias"],
            shared=SharedExperts(
                torch.cat([p[f"shared_experts.{half}.weight"] for half in halves]),
                p["shared_experts.down_proj.weight"],
                p["shared_expert_gate.weight"],
            ),
            activation=activation,
            b13=p[f"experts.{w13}_bias"],
            b2=p["experts.down_proj_bias"],
            interleaved=activation.gated,
            weight_on_input=True,
            backend=backend,
        )
        assert got.shape == x.shape
        assert torch.equal(got.view(12, 16), want)

    def test_outputs_start_near_one(self) -> None:
        torch.manual_seed(0)
        layer = MoELayer(LayerShape(64, 32, 8, 2, "float32"), RoutingConfig(2, renormalize=True))
        with torch.no_grad():
            y = layer(torch.randn(100, 64))
        assert 0.05 < y.square().mean().sqrt() < 5

    @pytest.mark.parametrize(
        "size", [(16,), (1, 16), (0, 16), (2, 3, 16), (2, 0, 16), (2, 3, 1, 16)]
    )
    def test_any_leading_dimensions(self, size: tuple[int, ...]) -> None:
        layer = MoELayer(LayerShape(16, 8, 4, 2, "float32"), RoutingConfig(2), backend="reference")
        x = torch.randn(size)
        with torch.no_grad():
            y = layer(x)
            assert y.shape == x.shape
            assert torch.allclose(y.reshape(-1, 16), layer(x.reshape(-1, 16)), atol=1e-6)
            strided = layer(x.movedim(-1, 0).contiguous().movedim(0, -1))
        assert torch.equal(strided, y)

    def test_padding_is_counted_over_all_leading_dimensions(self, backend: str) -> None:
        layer = MoELayer(LayerShape(16, 8, 4, 2, "float32"), RoutingConfig(2), backend=backend)
        with torch.no_grad():
            y = layer(torch.randn(2, 3, 16), num_valid_tokens=torch.tensor(4))
        assert y[1, 1:].abs().sum() == 0
        assert y[1, 0].abs().sum() > 0

    @pytest.mark.parametrize("shared", [0, 24])
    @pytest.mark.parametrize("size", [(16,), (0, 16), (2, 3, 16)])
    def test_a_residual_has_the_hidden_states_shape(
        self, size: tuple[int, ...], shared: int, backend: str
    ) -> None:
        shape = LayerShape(16, 8, 4, 2, "float32")
        layer = MoELayer(shape, RoutingConfig(2), shared_intermediate=shared, backend=backend)
        x, residual = torch.randn(size), torch.randn(size)
        with torch.no_grad():
            assert torch.equal(layer(x, residual=residual), layer(x) + residual)
            strided = residual.movedim(-1, 0).contiguous().movedim(0, -1)
            assert torch.equal(layer(x, residual=strided), layer(x) + residual)
            with pytest.raises(ValueError, match=r"^residual must have hidden_states' shape \["):
                layer(x, residual=torch.randn(1, *size))
            with pytest.raises(TypeError, match=r"^residual must be float32, got float16"):
                layer(x, residual=residual.half())
            with pytest.raises(TypeError, match=r"^residual must be a torch.Tensor, got list"):
                layer(x, residual=residual.tolist())

    def test_the_reference_trains(self) -> None:
        torch.manual_seed(0)
        layer = MoELayer(
            LayerShape(16, 8, 4, 2, "float32"),
            RoutingConfig(2, renormalize=True),
            shared_intermediate=4,
            shared_gate=True,
            backend="reference",
        )
        x, target = torch.randn(32, 16), torch.randn(32, 16)
        optimiser = torch.optim.Adam(layer.parameters(), 1e-2)
        losses = []
        for _ in range(30):
            optimiser.zero_grad()
            loss = (layer(x) - target).square().mean()
            loss.backward()
            for name, parameter in layer.named_parameters():
                assert parameter.grad is not None, name
                assert parameter.grad.abs().sum() > 0, name
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0]

    @pytest.mark.parametrize("output", ["hidden", "weights", "logits"])
    def test_logits_are_computed_outside_of_the_call_only_for_who_returns_them(
        self, output: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So that a GPU's kernel computes them wherever it can."""
        seen: dict[str, Any] = {}

        def spy(*args: Any, **options: Any) -> Any:
            seen.update(options)
            return moe_layer(*args, **options)

        monkeypatch.setattr("weave_moe.layer.moe_layer", spy)
        layer = MoELayer(LayerShape(16, 8, 4, 2, "float32"), RoutingConfig(2), router_bias=True)
        layer.parts, layer.drop_in = replace(layer.parts, output=output), True
        x = torch.randn(5, 16)
        with torch.no_grad():
            got = layer(x)
        if output == "logits":
            want = x @ layer.gate.weight.T + layer.gate.bias
            assert torch.allclose(seen["router_logits"], want, atol=1e-5)
            assert torch.equal(got[1], seen["router_logits"])
        else:
            assert seen["router_weight"] is layer.gate.weight
            assert seen["router_bias"] is layer.gate.bias
        assert ("router_logits" in seen) == (output == "logits")
        assert seen["return_routing"] == (output == "weights")

    @pytest.mark.parametrize(
        "move",
        [
            copy.deepcopy,
            lambda layer: pickle.loads(pickle.dumps(layer)),
            lambda layer: layer.to(torch.float64).to(torch.float32),
            lambda layer: torch.nn.Sequential(layer).double().float()[0],
            lambda layer: layer.to("meta").to_empty(device="cpu"),
            lambda layer: layer.share_memory(),
            lambda layer: assigned(layer, layer),
            lambda layer: assigned(layer.to("meta"), _small_layer(seed=1)),
        ],
        ids=[
            *("deepcopy", "pickle", "cast", "cast of its parent", "meta", "share_memory"),
            *("assign", "assign to meta"),
        ],
    )
    def test_shared_experts_lie_end_to_end_wherever_the_layer_goes(self, move: Any) -> None:
        layer = _small_layer(shared_intermediate=24)
        assert lies_in_order(layer)
        moved = move(layer)
        assert moved.shared_experts.up_proj.weight.device.type == "cpu"
        assert lies_in_order(moved)
        for parameter in moved.parameters():
            assert parameter.is_leaf
            assert parameter.requires_grad

    @pytest.mark.parametrize("name", ["auto", "host"])
    def test_gradients_are_refused_elsewhere(self, name: str) -> None:
        layer = MoELayer(LayerShape(16, 8, 4, 2, "float32"), RoutingConfig(2), backend=name)
        with pytest.raises(ValueError, match=r"requires grad, .*torch.no_grad\(\)"):
            layer(torch.randn(3, 16))

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"shape": 3}, TypeError, "^shape must be a LayerShape, got int"),
            ({"routing": 3}, TypeError, "^routing must be a RoutingConfig, got int"),
            ({"routing": RoutingConfig(1)}, ValueError, "^routing.top_k must be shape.top_k 2"),
            ({"routing": RoutingConfig(2, num_groups=3)}, ValueError, "^num_groups must divide"),
            ({"activation": "relu2"}, ValueError, "^activation must be gated, .*got relu2"),
            ({"shared_intermediate": -1}, ValueError, "^shared_intermediate must be at least 0"),
            ({"shared_gate": True}, ValueError, "^shared_gate must be False without shared"),
            ({"router_bias": "no"}, TypeError, "^router_bias must be True or False, got 'no'"),
            ({"expert_bias": 1}, TypeError, "^expert_bias must be True or False, got 1"),
            ({"activation": ""}, ValueError, "^activation must be one of .*''"),
            ({"interleaved": None}, TypeError, "^interleaved must be True or False"),
            (
                {"shape": LayerShape(16, 8, 4, 2, gated=False), "interleaved": True},
                ValueError,
                "^interleaved must be False for relu2",
            ),
            ({"policy": "fast"}, ValueError, "^policy must be one of"),
            ({"backend": "gpu"}, ValueError, "^backend must be one of"),
        ],
    )
    def test_what_is_not_allowed_is_named(
        self, changes: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        options: dict[str, Any] = {
            "shape": LayerShape(16, 8, 4, 2, "float32"),
            "routing": RoutingConfig(2),
            **changes,
        }
        with pytest.raises(error, match=words):
            MoELayer(**options)

    @pytest.mark.parametrize(
        ("x", "error", "words"),
        [
            ([1.0], TypeError, "^hidden_states must be a torch.Tensor, got list"),
            (torch.zeros(3, 15), ValueError, r"^hidden_states must have shape \[..., 16\]"),
            (torch.zeros(3, 16).half(), TypeError, "^hidden_states must be float32, .*float16"),
            (torch.tensor(1.0), ValueError, r"^hidden_states must have shape \[..., 16\]"),
            (torch.zeros(3, 16).long(), TypeError, "^hidden_states must be float32, .*int64"),
        ],
    )
    def test_bad_hidden_states_are_named(self, x: Any, error: type[Exception], words: str) -> None:
        layer = MoELayer(LayerShape(16, 8, 4, 2, "float32"), RoutingConfig(2))
        with torch.no_grad(), pytest.raises(error, match=words):
            layer(x)


def _small_layer(seed: int = 0, **options: Any) -> MoELayer:
    torch.manual_seed(seed)
    options = {"shape": LayerShape(16, 8, 4, 2, "float32"), "shared_intermediate": 24, **options}
    return MoELayer(options.pop("shape"), options.pop("routing", RoutingConfig(2)), **options)


def assigned(layer: MoELayer, other: MoELayer) -> MoELayer:
    """The layer with copies of the other's parameters assigned to it, rather than copied into."""
    layer.load_state_dict({n: v.clone() for n, v in other.state_dict().items()}, assign=True)
    return layer


def lies_in_order(layer: MoELayer) -> bool:
    """Whether gate and up rows of the layer's shared experts are one tensor in memory."""
    mlp: Any = layer.shared_experts
    return ops.end_to_end(mlp.gate_proj.weight, mlp.up_proj.weight) is not None


class _Graphs:
    """A compiler's back end that runs graphs as they are, and keeps what is called in each."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        calls = [n for n in graph.graph.nodes if n.op in ("call_function", "call_method")]
        self.calls.append([str(node.target) for node in calls])
        return graph.forward

    def operators(self) -> list[int]:
        """How many layers each graph has."""
        return [sum("weave.moe_layer" in name for name in graph) for graph in self.calls]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"shared_intermediate": 0},
    "shared": {},
    "gated shared": {"shared_gate": True},
    "not gated": {"shape": LayerShape(16, 8, 4, 2, "bfloat16", gated=False)},
    "biases": {
        **{"router_bias": True, "selection_bias": True, "expert_bias": True},
        **{"activation": "swiglu_oai", "interleaved": True},
        "routing": RoutingConfig(
            2,
            "sigmoid",
            **{"renormalize": True, "scaling_factor": 2.5, "num_groups": 2, "topk_groups": 1},
        ),
    },
    "on the input": {"weight_on_input": True, "shape": LayerShape(16, 8, 4, 2, "float16")},
}


class TestCompilers:
    """torch.compile and torch.export of the module."""

    @pytest.fixture(autouse=True)
    def _fresh(self) -> None:
        torch._dynamo.reset()

    @pytest.fixture(params=sorted(OPTIONS))
    def layer(self, request: pytest.FixtureRequest) -> MoELayer:
        return _small_layer(**OPTIONS[request.param])

    def inputs(self, layer: MoELayer, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        x, residual = (torch.randn(tokens, 16).to(layer.shape.torch_dtype) for _ in range(2))
        return x, torch.tensor(max(tokens - 1, 0)), residual

    @torch.no_grad()
    @pytest.mark.parametrize("options", sorted(OPTIONS))
    def test_one_graph_with_one_operator_for_every_number_of_tokens(
        self, options: str, backend: str
    ) -> None:
        layer, graphs = _small_layer(**OPTIONS[options], backend=backend), _Graphs()
        fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
        for tokens in (3, 8, 17):
            inputs = self.inputs(layer, tokens)
            assert torch.equal(fast(*inputs), layer(*inputs))
        assert graphs.operators() == [1]
        # Nothing of the router, nor of the shared experts, is left to the compiler: shapes, and
        # numbers that it took for inputs.
        rest = {name.strip("<>").split()[-1] for name in graphs.calls[0]}
        assert rest <= {
            *("weave.moe_layer", "reshape", "view", "size", "getitem", "item"),
            *("eq", "and_", "not_"),
        }

    @torch.no_grad()
    def test_none_and_one_too_where_the_compiler_may_not_look(self, layer: MoELayer) -> None:
        graphs = _Graphs()
        fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
        for tokens in (8, 0, 1, 17):
            x = self.inputs(layer, tokens)[0]
            torch._dynamo.decorators.mark_unbacked(x, 0)
            assert torch.equal(fast(x), layer(x))
        assert graphs.operators() == [1]

    @torch.no_grad()
    @pytest.mark.parametrize("tokens", [0, 1, 5])
    def test_one_number_of_tokens(self, layer: MoELayer, tokens: int) -> None:
        fast = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
        inputs = self.inputs(layer, tokens)
        assert torch.equal(fast(*inputs), layer(*inputs))

    @torch.no_grad()
    def test_leading_dimensions_are_symbols_too(self, backend: str) -> None:
        layer, graphs = _small_layer(backend=backend), _Graphs()
        fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
        for size in ((2, 3), (5, 4), (3, 7)):
            x = torch.randn(*size, 16)
            assert torch.equal(fast(x), layer(x))
        assert graphs.operators() == [1]

    @pytest.mark.slow
    @torch.no_grad()
    @pytest.mark.parametrize("options", ["biases", "gated shared", "not gated"])
    def test_the_default_compiler(self, options: str) -> None:
        """Inductor, which moves and fuses what is around the operator, and may relay its inputs."""
        layer = _small_layer(**OPTIONS[options])

        def around(x: Tensor, residual: Tensor) -> Tensor:
            # A transposed x, so that a layout of the compiler's choice would show.
            y: Tensor = layer((x.t().contiguous() * 2).t(), residual=torch.sin(residual))
            return torch.relu(y) + 1

        fast = torch.compile(around, fullgraph=True, dynamic=True)
        for tokens in (5, 12):
            x, _, residual = self.inputs(layer, tokens)
            assert_rows_close(fast(x, residual), around(x, residual), 1e-2)

    @torch.no_grad()
    @pytest.mark.parametrize("strict", [False, True])
    def test_export(self, layer: MoELayer, strict: bool) -> None:
        count = torch.export.Dim("count", min=0, max=64)
        program = torch.export.export(
            layer,
            self.inputs(layer, 5),
            dynamic_shapes=({0: count}, None, {0: count}),
            strict=strict,
        )
        assert str(program.graph).count("torch.ops.weave.moe_layer") == 1
        assert set(program.state_dict) == set(layer.state_dict())
        exported = program.module()
        for tokens in (9, 1, 0):
            inputs = self.inputs(layer, tokens)
            assert torch.equal(exported(*inputs), layer(*inputs))

    @torch.no_grad()
    @pytest.mark.filterwarnings("ignore:No complete tensor found")
    def test_weights_loaded_into_an_exported_layer_are_what_it_computes_with(
        self,
    ) -> None:
        """Gate and up rows of shared experts, too, which are one tensor to the layer itself."""
        layer, other = (_small_layer(seed) for seed in (0, 1))
        x = torch.randn(5, 16)
        program = torch.export.export(layer, (x,))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        assert torch.equal(loaded(x), layer(x))
        assert not torch.equal(layer(x), other(x))
        loaded.load_state_dict(other.state_dict())
        assert torch.equal(loaded(x), other(x))
        loaded.load_state_dict({n: v.clone() for n, v in layer.state_dict().items()}, assign=True)
        assert torch.equal(loaded(x), layer(x))

    @torch.no_grad()
    def test_weights_may_move_after_the_compilation(self, caplog: pytest.LogCaptureFixture) -> None:
        layer, other = (_small_layer(seed) for seed in (0, 1))
        x = torch.randn(5, 16)
        fast = torch.compile(layer, fullgraph=True, backend=_Graphs())
        fast(x)
        with caplog.at_level(logging.WARNING, "weave_moe"):
            ops._log_copy.cache_clear()
            for loaded in (layer.load_state_dict, lambda state: assigned(layer, other)):
                loaded(other.state_dict())
                assert torch.equal(fast(x), other(x))
            assert not [r for r in caplog.records if r.name == "weave_moe"]
            # Behind the layer's back: right still, at the price of a copy, until an eager call.
            rows: Any = layer.shared_experts.gate_proj
            rows.weight.data = 2 * rows.weight
            got = fast(x)
            assert "copies the shared experts' gate and up rows" in caplog.text
            assert not lies_in_order(layer)
        assert torch.equal(layer(x), got)
        assert not torch.equal(other(x), got)
        assert lies_in_order(layer)
        assert torch.equal(fast(x), got)
        ops._log_copy.cache_clear()

    def test_eager_calls_go_past_the_operator(
        self, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An operator in Python costs more than the launch of a small layer."""
        monkeypatch.setattr(ops, "moe_layer", None)
        with torch.no_grad():
            _small_layer(backend=backend)(torch.randn(3, 16))

    def test_a_workspace_is_refused(self) -> None:
        layer = _small_layer(workspace=weave_moe.Workspace(2))
        fast = torch.compile(layer, backend="eager", fullgraph=True)
        # The compiler wraps what it finds raised.
        errors = (ValueError, torch._dynamo.exc.Unsupported)
        with torch.no_grad(), pytest.raises(errors, match="workspace must be None where"):
            fast(torch.randn(3, 16))

    @pytest.mark.parametrize("name", ["auto", "host"])
    def test_gradients_are_refused_while_it_is_traced(self, name: str) -> None:
        layer = _small_layer(backend=name)
        fast = torch.compile(layer, fullgraph=True, backend="eager")
        words = "w13 requires grad, but weave::moe_layer is for inference only"
        errors = (ValueError, torch._dynamo.exc.Unsupported)
        with pytest.raises(errors, match=words):
            fast(torch.randn(3, 16))
        with pytest.raises(ValueError, match=words):
            torch.export.export(layer, (torch.randn(3, 16),))
        layer.requires_grad_(False)
        with pytest.raises(errors, match="x requires grad, but weave::moe_layer"):
            fast(torch.randn(3, 16).requires_grad_())
        assert torch.equal(fast(torch.ones(3, 16)), layer(torch.ones(3, 16)))

    def test_an_exported_layer_says_so_on_backward(self, backend: str) -> None:
        with torch.no_grad():
            program = torch.export.export(_small_layer(backend=backend), (torch.randn(3, 16),))
        y = program.module()(torch.randn(3, 16))
        with pytest.raises(RuntimeError, match=r"inference only.*backend='reference'"):
            y.sum().backward()

    @pytest.mark.slow
    def test_the_reference_trains_under_a_compiler(self) -> None:
        """Traced through, with breaks where it looks at numbers of rows."""
        layer, compiled = (_small_layer(shared_gate=True, backend="reference") for _ in range(2))
        graphs = _Graphs()
        fast = torch.compile(compiled, backend=graphs)
        x = torch.randn(9, 16)
        for run in (layer, fast):
            run(x).square().sum().backward()
        for (name, one), other in zip(layer.named_parameters(), compiled.parameters(), strict=True):
            assert other.grad is not None, name
            assert_rows_close(other.grad.flatten(1), one.grad.flatten(1), 1e-5)
        assert sum(graphs.operators()) == 0

    def test_the_reference_is_an_operator_where_nothing_is_to_be_trained(self) -> None:
        layer, graphs = _small_layer(backend="reference").requires_grad_(False), _Graphs()
        fast = torch.compile(layer, fullgraph=True, backend=graphs)
        x = torch.randn(9, 16)
        assert torch.is_grad_enabled()
        assert torch.equal(fast(x), layer(x))
        assert graphs.operators() == [1]


def _freed(value: torch.Tensor, kind: str) -> torch.Tensor:
    """Like `value`, of a storage that was freed: all of it, or a part as a sharded parameter's, or
    every second column."""
    if kind == "part":
        flat = torch.zeros(64 + value.numel(), dtype=value.dtype)
        found = flat[64:].view_as(value)
    elif kind == "strided":
        found = value.repeat_interleave(2, dim=-1)[..., ::2]
    else:
        found = value.clone()
    found.untyped_storage().resize_(0)
    return found


@pytest.mark.parametrize("kind", ["whole", "part", "strided"])
@pytest.mark.parametrize("name", ["x", "w13", "w2", "topk_weights", "topk_ids", "b2", "out"])
def test_a_tensor_whose_storage_was_freed_is_named(name: str, kind: str, backend: str) -> None:
    if kind == "strided" and name in ("w13", "w2", "out"):
        pytest.skip("it must be contiguous, and is told so")
    case = experts_case(4, biases=True)
    given = dict(zip(("x", "w13", "w2", "topk_weights", "topk_ids"), case.args, strict=True))
    given |= {"out": torch.empty_like(given["x"]), **case.options}
    given[name] = _freed(given[name], kind)
    with pytest.raises(ValueError, match=f"^{name} has no memory: its storage was freed"):
        weave_moe.fused_experts(**given, backend=backend)


@pytest.mark.parametrize("name", ["router_weight", "router_logits", "selection_bias", "w13"])
def test_a_layer_s_tensor_whose_storage_was_freed_is_named(name: str, backend: str) -> None:
    case = experts_case(4)
    x, w13, w2, *_ = case.args
    experts = w2.size(0)
    given = {"x": x, "w13": w13, "w2": w2, "selection_bias": torch.zeros(experts), **case.options}
    if name == "router_logits":
        given["router_logits"] = torch.zeros(4, experts)
    else:
        given["router_weight"] = torch.zeros(experts, x.size(1))
    given[name] = _freed(given[name], "part")
    with pytest.raises(ValueError, match=f"^{name} has no memory: its storage was freed"):
        weave_moe.moe_layer(**given, routing=RoutingConfig(2), backend=backend)


def test_a_tensor_that_stands_for_another_is_named(backend: str) -> None:
    if backend == "reference":
        pytest.skip("it is torch's operators")
    case = experts_case(4)
    x, *others = case.args

    def run(x: Tensor) -> Tensor:
        return weave_moe.fused_experts(x, *others, backend=backend, **case.options)

    with pytest.raises(ValueError, match=r"^x has no memory"):
        torch.func.functionalize(run)(x)


@pytest.mark.parametrize("whole", [False, True])
def test_modes_that_record_operators_see_one(backend: str, whole: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    if backend == "reference":
        pytest.skip("make_fx records what it did for one routing")
    case = experts_case(4)
    x, w13, w2, *chosen = case.args

    def run(x: Tensor) -> Tensor:
        if not whole:
            return weave_moe.fused_experts(x, w13, w2, *chosen, backend=backend, **case.options)
        router = {"routing": RoutingConfig(2), "router_weight": w13[:, 0].contiguous()}
        y: Tensor = weave_moe.moe_layer(x, w13, w2, backend=backend, **router, **case.options)
        return y

    with torch.no_grad():
        other = torch.randn_like(x)
        for how in ({}, {"tracing_mode": "fake", "_allow_non_fake_inputs": True}):
            graph = make_fx(run, **how)(x)
            assert torch.equal(graph(other), run(other))
        graph = make_fx(run, pre_dispatch=True)(x)
        assert torch.equal(graph(other), run(other))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("fake", [False, True])
def test_modes_that_record_operators_see_one_of_a_module(moved: bool, fake: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    layer, x = _small_layer(shared_gate=True, backend="host"), torch.randn(9, 16)
    gate = layer.shared_experts.gate_proj.weight
    how = {"tracing_mode": "fake", "_allow_non_fake_inputs": True} if fake else {}
    with torch.no_grad():
        if moved:  # no longer end to end with up_proj's
            gate.data = gate.data.clone()
        before = gate.data_ptr()
        graph = make_fx(lambda x: layer(x), **how)(x)
        called = [str(node.target) for node in graph.graph.nodes]
        assert [name for name in called if "weave" in name] == ["weave.moe_layer.default"]
        assert gate.data_ptr() == before
        other = torch.randn_like(x)
        assert torch.equal(graph(other), layer(other))


def test_out_where_tensors_are_fake(backend: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if backend == "reference":
        pytest.skip("it looks at ids")
    case = experts_case(4)
    with FakeTensorMode() as mode, torch.no_grad():
        x, *others = (mode.from_tensor(value) for value in case.args)
        out = torch.empty_like(x)
        y = weave_moe.fused_experts(x, *others, out=out, backend=backend, **case.options)
    assert y is out


@pytest.mark.parametrize("pre_dispatch", [None, False, True])
def test_modes_of_other_threads_and_modes_that_watch_change_nothing(
    pre_dispatch: bool | None,
) -> None:
    """What a thread records is its own; torch keeps one flag for all of them, which may stick."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    case, workspace = experts_case(4), weave_moe.Workspace()
    entered, done = threading.Event(), threading.Event()

    def wait(x: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert done.wait(600)
        return x

    def record() -> None:
        if pre_dispatch is None:
            with FakeTensorMode():
                wait(torch.empty(1))
        else:
            make_fx(wait, pre_dispatch=pre_dispatch)(torch.empty(1))

    options = {"workspace": workspace, "backend": "host", **case.options}
    want = weave_moe.fused_experts(*case.args, **options)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(record)
        try:
            assert entered.wait(60)
            assert torch.equal(weave_moe.fused_experts(*case.args, **options), want)
            with FlopCounterMode(display=False):
                assert torch.equal(weave_moe.fused_experts(*case.args, **options), want)
            assert not other.done()
        finally:
            done.set()
        other.result()


class TestCompiledBlocks:
    """Layers taken over from transformers' blocks, whose weights may be transposed."""

    @pytest.fixture
    def blocks(self) -> Any:
        pytest.importorskip("transformers", minversion="5.0.0")
        torch._dynamo.reset()
        return importlib.import_module("test_transformers_blocks")

    NAMES = (
        *("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "DeepseekV3MoE", "NemotronHMoE"),
        *("GptOssMLP", "Llama4TextMoe", "MiniMaxM2SparseMoeBlock", "DeepseekV4SparseMoeBlock"),
    )

    @pytest.mark.parametrize("name", NAMES)
    def test_one_graph_that_returns_what_the_block_does(
        self, name: str, blocks: Any, backend: str
    ) -> None:
        layer = MoELayer.from_transformers(blocks.block_of(name), backend=backend, drop_in=True)
        graphs = _Graphs()
        fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
        for tokens in (5, 3, 11):
            x = torch.randn(2, tokens, blocks.H)
            got, want = fast(x), layer(x)
            assert type(got) is type(want)
            for one, other in zip(
                got if isinstance(got, tuple) else (got,),
                want if isinstance(want, tuple) else (want,),
                strict=True,
            ):
                assert torch.equal(one, other)
        assert graphs.operators() == [1]

    @pytest.mark.parametrize("name", NAMES)
    def test_export(self, name: str, blocks: Any) -> None:
        layer = MoELayer.from_transformers(blocks.block_of(name))
        count = torch.export.Dim("count", min=1, max=64)
        x = torch.randn(1, 5, blocks.H)
        program = torch.export.export(layer, (x,), dynamic_shapes=({1: count},))
        assert set(program.state_dict) == set(layer.state_dict())
        for tokens in (9, 1):
            x = torch.randn(1, tokens, blocks.H)
            assert torch.equal(program.module()(x), layer(x))

    @pytest.mark.parametrize("name", ["GptOssMLP", "Llama4TextMoe"])
    def test_transposed_weights_out_of_order_are_named(self, name: str, blocks: Any) -> None:
        layer = MoELayer.from_transformers(blocks.block_of(name))
        x = torch.randn(3, blocks.H)
        want = layer(x)
        weight: Any = layer.experts.down_proj
        weight.data = weight.contiguous()
        fast = torch.compile(layer, fullgraph=True, backend="eager")
        errors = (ValueError, torch._dynamo.exc.Unsupported)
        with pytest.raises(errors, match=r"experts\.down_proj must lie in memory .*call the layer"):
            fast(x)
        with pytest.raises(ValueError, match=r"^experts\.down_proj must lie in memory"):
            torch.export.export(layer, (x,))
        assert torch.equal(layer(x), want)
        assert torch.equal(fast(x), want)


class TestWorkspace:
    def test_bytes_grow_with_tokens(self) -> None:
        pytest.importorskip("weave_moe.host.workspace")
        shape = LayerShape(2048, 768, 128, 8)
        sizes = [workspace_bytes(shape, tokens) for tokens in (0, 1, 16, 256)]
        assert sizes == sorted(sizes)
        assert sizes[-1] > sizes[0]

    @pytest.mark.parametrize(
        ("args", "error", "words"),
        [
            ((3, 1), TypeError, "^shape must be a LayerShape, got int"),
            ((LayerShape(8, 8, 2, 1), 1.5), TypeError, "^max_tokens must be an int, got float"),
            ((LayerShape(8, 8, 2, 1), -1), ValueError, "^max_tokens must be at least 0, got -1"),
        ],
    )
    def test_bad_arguments_are_named(
        self, args: tuple[Any, Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            workspace_bytes(*args)

    def test_after_a_layer_its_record_is_of_the_routed_experts(self) -> None:
        pytest.importorskip("weave_moe.host.workspace")
        case = experts_case(8, routing="first")
        try:
            backends.choose(case.call(), "host")
        except ValueError as error:
            pytest.skip(str(error))
        layer: dict[str, Any] = {
            "routing": RoutingConfig(2),
            "router_logits": torch.randn(8, 4, generator=generator(5)),
            "backend": "host",
        }
        plain, with_shared = weave_moe.Workspace(workers=2), weave_moe.Workspace(workers=2)
        moe_layer(*case.args[:3], **layer, workspace=plain)
        moe_layer(
            *case.args[:3],
            **layer,
            shared=shared_of(case, 5, gated=True),
            workspace=with_shared,
        )
        assert plain.last_run is not None
        assert with_shared.last_run is not None
        assert with_shared.last_run.tasks == plain.last_run.tasks


class TestThePackage:
    def test_importing_it_loads_nothing_and_touches_no_gpu(self) -> None:
        code = (
            "import sys, weave_moe; assert 'torch' not in sys.modules, 'torch'; dir(weave_moe); "
            "weave_moe.fused_experts; import torch; assert not torch.cuda.is_initialized(); "
            "assert not any(m.startswith(('transformers', 'weave_moe.host')) for m in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_every_public_name_loads(self) -> None:
        for name in weave_moe.__all__:
            if name != "Workspace":
                assert getattr(weave_moe, name) is not None
        assert set(weave_moe.__all__) <= set(dir(weave_moe))
        with pytest.raises(AttributeError, match="no attribute 'fused_expert'"):
            weave_moe.fused_expert  # noqa: B018


@pytest.mark.parametrize("backend", ["host", "reference"])
def test_autocast_changes_nothing(backend: str) -> None:
    torch.manual_seed(3)
    shape = LayerShape(64, 32, 16, 4, "float32")
    layer = MoELayer(shape, RoutingConfig(4), shared_intermediate=32, shared_gate=True)
    layer.backend = backend
    x = torch.randn(40, 64)
    with torch.no_grad():
        want = layer(x)
        logits = router_logits(x, layer.gate.weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer(x), want)
            assert torch.equal(router_logits(x, layer.gate.weight), logits)


def test_a_selection_bias_keeps_its_type_and_values_where_a_layer_is_cast() -> None:
    shape = LayerShape(64, 32, 16, 4, "float32")
    layer = MoELayer(shape, RoutingConfig(4, "sigmoid"), selection_bias=True)
    bias = 5 + torch.randn(16) / 100
    layer.gate.e_score_correction_bias.copy_(bias)
    for cast in (layer.bfloat16(), layer.to(torch.float16), layer.float(), layer.double()):
        assert torch.equal(cast.gate.e_score_correction_bias, bias)
        assert cast.state_dict()["gate.e_score_correction_bias"].dtype is torch.float32
    assert layer.to("meta").gate.e_score_correction_bias.is_meta
    # As a model that is made on the meta device is given memory.
    filled = layer.to_empty(device="cpu").gate.e_score_correction_bias
    assert (filled.device.type, filled.dtype) == ("cpu", torch.float32)
