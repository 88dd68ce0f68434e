"""`MoELayer`, what a compiler sees of it, and the operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import TARGET, same_bits
from layer_cases import (
    Layer,
    Recorded,
    check_layer,
    make_layer,
    ordered_sums,
)
from layer_tables import (
    EACH,
    FEW,
    LAYERS,
    MANY,
    SOME,
)
from torch import Tensor

from weave_moe import MoELayer, ops
from weave_moe.shapes import Activation

pytestmark = pytest.mark.gpu


def module_of(one: Layer, *, exact: bool = False) -> MoELayer:
    """The row as a module, with the weights of its cases."""
    case = make_layer(one, 0, exact=exact)
    with torch.device(TARGET.device):
        module = MoELayer(
            one.shape,
            one.routing,
            activation=one.activation,
            router_bias=one.router_bias,
            selection_bias=one.selection_bias,
            expert_bias=one.biases,
            shared_intermediate=one.shared,
            shared_gate=one.shared_gate,
            interleaved=one.interleaved,
            weight_on_input=one.weight_on_input,
            backend=TARGET.backend,
        )
    values: dict[str, Tensor | None] = {
        "gate.weight": case.options["router_weight"],
        "gate.bias": case.options.get("router_bias"),
        "gate.e_score_correction_bias": case.options.get("selection_bias"),
        "experts.gate_up_proj": case.w13,
        "experts.up_proj": case.w13,
        "experts.down_proj": case.w2,
    }
    for name in ("gate_up_proj", "up_proj"):
        values[f"experts.{name}_bias"] = case.options.get("b13")
    values["experts.down_proj_bias"] = case.options.get("b2")
    shared = case.options.get("shared")
    if shared is not None:
        halves = shared.w13.chunk(2) if one.shape.gated else (None, shared.w13)
        values["shared_experts.gate_proj.weight"], values["shared_experts.up_proj.weight"] = halves
        values["shared_experts.down_proj.weight"] = shared.w2
        values["shared_expert_gate.weight"] = shared.gate
    state = module.state_dict()
    module.load_state_dict({name: values[name] for name in state})
    return module.requires_grad_(False)


MODULES = {
    name: replace(LAYERS[name], router=LAYERS[name].shape.dtype, residual=False)
    for name in ("qwen", "deepseek", "gpt-oss", "llama4", "nemotron", "shared 384 gated", "fp16")
}


@pytest.mark.parametrize("tokens", [1, SOME, MANY])
@pytest.mark.parametrize("name", MODULES)
@ordered_sums
def test_the_module_is_the_call(name: str, tokens: int) -> None:
    one = MODULES[name]
    case = make_layer(one, tokens, exact=not TARGET.on_gpu)
    module = module_of(one, exact=not TARGET.on_gpu)
    if one.router_bias:
        case = case.with_(router_bias=module.state_dict()["gate.bias"])
    if one.selection_bias:
        bias = module.state_dict()["gate.e_score_correction_bias"]
        case = case.with_(selection_bias=bias)
    want, _, _ = check_layer(case)
    assert same_bits(module(case.x), want)
    residual = torch.randn_like(want)
    assert same_bits(module(case.x, residual=residual), case.run(residual=residual))
    count = torch.tensor(tokens // 2, device=TARGET.device)
    got = module(case.x.view(1, tokens, -1), num_valid_tokens=count)
    assert same_bits(got[0, : tokens // 2], want[: tokens // 2])
    assert not bool(got[0, tokens // 2 :].any())


class Graphs:
    """A compiler's back end that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.seen: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        self.seen.append(graph)
        return graph.forward


@pytest.mark.parametrize("name", ["qwen", "deepseek", "gpt-oss", "shared 384 gated"])
def test_one_compilation_serves_every_number_of_tokens(name: str) -> None:
    torch._dynamo.reset()
    module = module_of(MODULES[name])
    graphs = Graphs()

    def block(x: Tensor) -> Tensor:
        y: Tensor = module(x, residual=x)
        return y + 1

    fast = torch.compile(block, fullgraph=True, dynamic=True, backend=graphs)
    for tokens in (3, 8, 40, 300):
        x = make_layer(MODULES[name], tokens, exact=not TARGET.on_gpu).x
        assert same_bits(fast(x), block(x)), tokens
    assert len(graphs.seen) == 1


def test_a_compiled_module_in_a_graph() -> None:
    torch._dynamo.reset()
    module = module_of(MODULES["deepseek"])
    fast = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    cases = [make_layer(MODULES["deepseek"], 40, seed=seed) for seed in range(3)]
    want = [module(case.x) for case in cases]
    x = cases[0].x.clone()
    graph = Recorded(lambda: (fast(x),))
    for i in range(12):
        x.copy_(cases[i % 3].x)
        assert same_bits(graph.replay()[0], want[i % 3]), i


@pytest.mark.parametrize("name", ["qwen", "deepseek"])
def test_export(name: str) -> None:
    torch._dynamo.reset()
    module = module_of(MODULES[name])
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    x = make_layer(MODULES[name], 5).x
    program = torch.export.export(module, (x,), dynamic_shapes={"hidden_states": {0: tokens}})
    for count in (2, 40, 300):
        x = make_layer(MODULES[name], count, exact=not TARGET.on_gpu).x
        assert same_bits(program.module()(x), module(x)), count


@pytest.mark.parametrize("name", ["qwen", "shared 384 gated"])
def test_nobody_waits_for_the_device(gpu: torch.device, name: str) -> None:
    module = module_of(MODULES[name])
    inputs = [make_layer(MODULES[name], tokens).x for tokens in EACH]
    want = [module(x) for x in inputs]
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = [module(x) for x in inputs]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def arguments_of(operator: Any, values: dict[str, Any]) -> dict[str, Any]:
    """`values` by the names of an operator's arguments; those that it must have are all there."""
    found = {}
    for argument in operator._schema.arguments:
        if argument.name in values:
            found[argument.name] = values[argument.name]
        elif not argument.has_default_value():
            pytest.fail(f"say here what {argument.name} of {operator} is")
    return found


def operators() -> list[str]:
    """Every operator that the package registers."""
    names = {op.name().split("::")[1].split(".")[0] for op in _overloads()}
    return sorted(names)


def _overloads() -> list[Any]:
    found = []
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("weave::"):
            packet = getattr(torch.ops.weave, schema.name.removeprefix("weave::"))
            found.append(getattr(packet, schema.overload_name or "default"))
    return found


def test_every_operator_of_the_package_is_checked() -> None:
    assert {"moe_experts", "moe_experts_out"} <= set(operators())
    assert ops.OPERATOR.default in _overloads()


@pytest.mark.parametrize("tokens", [0, 3, SOME])
@pytest.mark.parametrize("operator", operators())
@pytest.mark.parametrize("name", ["qwen", "shared 384 gated", "deepseek"])
def test_opcheck(name: str, operator: str, tokens: int) -> None:
    one = LAYERS[name]
    case = make_layer(one, tokens)
    _, weights, ids = case.routed()
    act, shared = Activation.parse(one.activation), case.options.get("shared")
    values: dict[str, Any] = {
        **{"x": case.x, "w13": case.w13, "w2": case.w2},
        **{"topk_weights": weights, "topk_ids": ids},
        **{n: v for n, v in case.options.items() if isinstance(v, Tensor | bool)},
        **{n: getattr(act, n) for n in ("kind", "alpha", "limit", "up_offset")},
        **{n: getattr(one.routing, n) for n in one.routing.__dataclass_fields__},
        "out": torch.full_like(case.x, float("nan")),
        "residual": torch.ones_like(case.x),
        "backend": TARGET.backend,
    }
    if shared is not None:
        values |= {f"shared_{n}": getattr(shared, n) for n in ("w13", "w2", "gate")}
    for overload in _overloads():
        if overload.name() in (f"weave::{operator}", f"weave::{operator}.default"):
            torch.library.opcheck(overload, (), arguments_of(overload, values))


def test_gradients_are_refused() -> None:
    case = make_layer(LAYERS["qwen"], FEW)
    for name in ("x", "w13", "w2", "router_weight"):
        value = getattr(case, name) if hasattr(case, name) else case.options[name]
        wanted = case.with_(**{name: value.clone().requires_grad_()})
        if TARGET.backend == "reference":
            assert wanted.run().requires_grad
            continue
        with pytest.raises(ValueError, match=r"requires grad.*no_grad"):
            wanted.run()
        with torch.no_grad():
            assert same_bits(wanted.run(), case.run())
