"""The experts as operators: schema, fake tensors, mutation, autograd, compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch.library import opcheck

from generators import Case, experts_case, experts_cases
from weave_moe import fused_experts, ops

CASES = {
    "plain": {},
    "biases": {"biases": True, "activation": "swiglu_oai", "interleaved": True},
    "mapped": {"mapped": True, "valid": 3, "id_dtype": torch.int64},
    "relu2": {"activation": "relu2", "dtype": torch.bfloat16, "weight_dtype": torch.bfloat16},
    "on the input": {"weight_on_input": True, "activation": "gelu_tanh"},
    "no tokens": {"tokens": 0},
    "residual": {"residual": True, "dtype": torch.bfloat16},
}
TENSORS = ("b13", "b2", "expert_map", "num_valid_tokens", "residual")


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return experts_case(**CASES[request.param])


def operator_arguments(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The case as the operator's own arguments, with the activation's numbers."""
    options = dict(case.options)
    act = options.pop("activation")
    tensors = tuple(options.pop(name, None) for name in TENSORS)
    numbers = {n: getattr(act, n) for n in ("kind", "alpha", "limit", "up_offset")}
    return (*case.args, *tensors), {**options, **numbers}


@given(case=experts_cases(max_size=12, max_tokens=8))
def test_it_is_fused_experts(case: Case, backend: str) -> None:
    want = fused_experts(*case.args, **case.options, backend=backend)
    got = ops.moe_experts(*case.args, **case.options, backend=backend)
    assert torch.equal(got, want)
    out = torch.full_like(want, float("nan"))
    ops.moe_experts_out(out, *case.args, **case.options, backend=backend)
    assert torch.equal(out, want)


def test_opcheck(case: Case) -> None:
    arguments, options = operator_arguments(case)
    opcheck(ops.OPERATOR, arguments, options)


def test_opcheck_of_the_variant_that_writes_out(case: Case) -> None:
    arguments, options = operator_arguments(case)
    opcheck(ops.OPERATOR_OUT, (torch.empty_like(case.x), *arguments), options)


def test_opcheck_finds_a_wrong_schema(case: Case) -> None:
    """The check itself: an operator that writes `out` and does not say so is caught."""
    with torch.library._scoped_library("weave_test", "FRAGMENT") as library:
        schema = ops._op_out._schema.split("(", 1)[1].replace("Tensor(a0!) out", "Tensor out")
        library.define(f"hidden_out({schema.split(') -> ')[0]}) -> ()")
        library.impl("hidden_out", ops._experts_out, "CPU")
        arguments, options = operator_arguments(experts_case())
        out = torch.full_like(arguments[0], 7.0)
        with pytest.raises(Exception, match=r"mutat|alias"):
            opcheck(
                torch.ops.weave_test.hidden_out,
                (out, *arguments),
                options,
                test_utils="test_schema",
            )


def test_the_output_is_new_memory(case: Case) -> None:
    got = ops.moe_experts(*case.args, **case.options)
    assert got.is_contiguous()
    starts = {tensor.untyped_storage().data_ptr() for tensor in case.args if tensor.numel()}
    assert not got.numel() or got.untyped_storage().data_ptr() not in starts


def test_strides_of_the_fake_output_are_the_real_ones() -> None:
    case = experts_case(tokens=6)
    x = torch.stack((case.x, case.x))[:, ::2].transpose(0, 1)[:, 0]
    assert not x.is_contiguous()
    real = ops.moe_experts(x, *(a[::2] if i > 1 else a for i, a in enumerate(case.args[1:])))
    fake = ops._fake(x)
    assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_gradients_are_refused_before_and_behind_the_operator() -> None:
    case = experts_case()
    for name in ("x", "w13", "w2", "topk_weights"):
        changed = case.with_(**{name: getattr(case, name).clone().requires_grad_()})
        with pytest.raises(ValueError, match=f"^{name} requires grad"):
            ops.moe_experts(*changed.args)
        with torch.no_grad():
            assert not ops.moe_experts(*changed.args).requires_grad
        with pytest.raises(RuntimeError, match="inference only"):
            ops.OPERATOR(*changed.args).sum().backward()
    residual = torch.zeros_like(case.x).requires_grad_()
    with pytest.raises(ValueError, match=r"^residual requires grad"):
        ops.moe_experts(*case.args, residual=residual)
    with pytest.raises(ValueError, match=r"^out requires grad"):
        ops.moe_experts_out(torch.empty_like(case.x).requires_grad_(), *case.args)


def test_bad_arguments_are_named_when_it_runs() -> None:
    case = experts_case()
    with pytest.raises(ValueError, match="topk_ids"):
        ops.moe_experts(*case.with_(topk_ids=case.topk_ids[1:]).args)
    with pytest.raises(ValueError, match="activation"):
        ops.moe_experts(*case.args, activation="tanh")


def test_in_place_in_a_compiled_graph_is_as_in_eager_code() -> None:
    def layer(residual: Any, *arguments: Any) -> Any:
        own = residual.clone()
        ops.moe_experts_out(own, *arguments, residual=own)
        ops.moe_experts_out(residual, *arguments, residual=residual)
        return own + residual

    torch._dynamo.reset()
    case = experts_case(tokens=6, dtype=torch.bfloat16, residual=True)
    start = case.options["residual"]
    want = fused_experts(*case.args, residual=start)
    assert not torch.equal(want, start)
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        given_ = start.clone()
        with torch.no_grad():
            twice = run(given_, *case.args)
        assert torch.equal(given_, want)
        assert torch.equal(twice, want + want)


def test_the_operators_take_what_fused_experts_takes() -> None:
    import inspect

    def keywords(function: Any) -> dict[str, Any]:
        return {name: p.default for name, p in inspect.signature(function).parameters.items()}

    want = keywords(fused_experts)
    held = {"workspace", "out"}
    assert keywords(ops.moe_experts) == {n: d for n, d in want.items() if n not in held}
    with_out = keywords(ops.moe_experts_out)
    assert with_out.pop("out") is inspect.Parameter.empty
    assert with_out == keywords(ops.moe_experts)
    schema = {a.name for a in ops.OPERATOR._schemas[""].arguments}
    assert schema - {"kind", "alpha", "limit", "up_offset"} == set(with_out) - {"activation"}


def test_one_compilation_serves_every_number_of_tokens() -> None:
    def layer(*arguments: Any) -> Any:
        return ops.moe_experts(*arguments, activation="swiglu_oai", interleaved=True) + 1

    torch._dynamo.reset()
    nodes: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        nodes.append(sum("moe_experts" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (3, 8, 17):
        case = experts_case(tokens=tokens)
        assert torch.equal(fast(*case.args), layer(*case.args))
    assert nodes == [1]
