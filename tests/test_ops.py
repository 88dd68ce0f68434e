"""Experts and layers as operators: schema, fake tensors, mutation, autograd, compilation."""

from __future__ import annotations

import inspect
import logging
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from generators import Case, experts_case, experts_cases, generator
from weave_moe import RoutingConfig, SharedExperts, fused_experts, moe_layer, ops

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


def test_inductors_cuda_graphs_leave_them_out() -> None:
    # Their pools would own memory that a launch keeps for the next one.
    tag = getattr(torch._C.Tag, "cudagraph_unsafe", None)
    if tag is None:
        pytest.skip(f"torch {torch.__version__} has no such tag")
    for operator in (ops.OPERATOR, ops.OPERATOR_OUT, ops.OPERATOR_LAYER):
        assert tag in operator.default.tags


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


def keywords(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("into", ["out", "residual", "x"])
def test_a_compiled_graph_writes_where_it_is_told(into: str) -> None:
    case = experts_case(9, residual=True)
    x, *rest = case.args
    out = torch.empty_like(x)
    compiled = torch.compile(
        lambda x, residual, out: fused_experts(
            x, *rest, residual=residual, out=out, backend="host"
        ),
        fullgraph=True,
        backend="eager",
    )
    want = fused_experts(*case.args, residual=case.options["residual"], backend="host")
    residual = case.options["residual"].clone()
    target = {"out": out, "residual": residual, "x": x}[into]
    with torch.no_grad():
        assert torch.equal(compiled(x, residual, target), want)
    assert torch.equal(target, want)


def test_the_operators_take_what_fused_experts_takes() -> None:
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


# ---- Whole layers -------------------------------------------------------------------------------

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logits": {"logits": True, "dtype": torch.bfloat16},
    "a bias everywhere": {
        "router_bias": True,
        "selection_bias": True,
        **{"biases": True, "activation": "swiglu_oai", "interleaved": True},
        "routing": RoutingConfig(2, "sigmoid", renormalize=True, scaling_factor=2.5),
    },
    "groups": {"routing": RoutingConfig(1, num_groups=2), "dtype": torch.float16},
    "every expert": {"routing": RoutingConfig(4, "topk_softmax"), "logits": True},
    "mapped": {"mapped": True, "valid": 3},
    "shared": {"shared": 5},
    "shared, in two": {"shared": 5, "gated": True, "apart": True, "residual": True},
    "shared, relu2": {"shared": 5, "activation": "relu2", "dtype": torch.bfloat16},
    "on the input": {"weight_on_input": True, "routing": RoutingConfig(1, "sqrtsoftplus")},
    "no tokens": {"tokens": 0, "shared": 5, "valid": 0},
    "residual": {"residual": True, "dtype": torch.bfloat16},
}
LAYER_TENSORS = tuple(a.name for a in ops.OPERATOR_LAYER.default._schema.arguments)[3:16]


def layer_case(
    case: Case | None = None,
    *,
    routing: RoutingConfig | None = None,
    logits: bool = False,
    router_bias: bool = False,
    selection_bias: bool = False,
    shared: int = 0,
    gated: bool = False,
    apart: bool = False,
    seed: int = 0,
    **options: Any,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Arguments of `ops.moe_layer`: (x, w13, w2) and its keywords.

    logits: router logits instead of a weight. shared: Is of shared experts, `gated` by a sigmoid;
    apart: their gate and up rows are two tensors.
    """
    case = experts_case(seed=seed, **options) if case is None else case
    g = generator(seed + 1)
    (x, w13, w2), keywords = case.args[:3], dict(case.options)
    (tokens, hidden), dtype = x.shape, x.dtype
    expert_map = keywords.get("expert_map")
    experts = w2.size(0) if expert_map is None else expert_map.numel()
    keywords["routing"] = routing or RoutingConfig(2, renormalize=True)
    if logits:
        # Strided, because it may choose the strides of what is made from it.
        keywords["router_logits"] = torch.randn(experts, tokens, generator=g).t()
    else:
        keywords["router_weight"] = torch.randn(experts, hidden, generator=g).to(dtype)
        if router_bias:
            keywords["router_bias"] = torch.randn(experts, generator=g)
    if selection_bias:
        keywords["selection_bias"] = torch.linspace(-1, 1, experts)
    if shared:
        rows = shared * (2 if keywords["activation"].gated else 1)
        first = (torch.randn(rows, hidden, generator=g) / hidden**0.5).to(dtype)
        if apart:
            first, keywords["shared_up"] = first[:shared].clone(), first[shared:].clone()
        keywords["shared"] = SharedExperts(
            first,
            (2 * torch.randn(hidden, shared, generator=g) / shared**0.5).to(dtype),
            (torch.randn(1, hidden, generator=g) / hidden**0.5).to(dtype) if gated else None,
        )
    return (x, w13, w2), keywords


@pytest.fixture(params=sorted(LAYERS))
def layer(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    return layer_case(**LAYERS[request.param])


def package_s(options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `ops.moe_layer` as those of the package's: shared experts in one tensor."""
    options = dict(options)
    up = options.pop("shared_up", None)
    if up is not None:
        shared = options["shared"]
        options["shared"] = replace(shared, w13=torch.cat((shared.w13, up)))
    return options


def layer_operator_arguments(args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The keywords of `ops.moe_layer` as the operator's own arguments."""
    options = dict(options)
    shared, act, routing = (options.pop(n, None) for n in ("shared", "activation", "routing"))
    if shared is not None:
        options |= {f"shared_{field.name}": getattr(shared, field.name) for field in fields(shared)}
    tensors = tuple(options.pop(name, None) for name in LAYER_TENSORS)
    numbers = {field.name: getattr(act, field.name) for field in fields(act)}
    router = {field.name: getattr(routing, field.name) for field in fields(routing)}
    return (*args, *tensors), {**options, **numbers, **router}


def test_a_layer_s_operator_takes_what_moe_layer_takes() -> None:
    want = keywords(moe_layer)
    got = keywords(ops.moe_layer)
    assert got.pop("shared_up") is None
    assert got == {n: d for n, d in want.items() if n not in ("workspace", "out")}
    schema = {a.name for a in ops.OPERATOR_LAYER.default._schema.arguments}
    split = {"kind", "alpha", "limit", "up_offset", *(f.name for f in fields(RoutingConfig))}
    split |= {"shared_w13", "shared_up", "shared_w2", "shared_gate"}
    assert schema - split == set(got) - {"activation", "routing", "shared", "return_routing"}


@given(case=experts_cases(max_size=12, max_tokens=8), data=st.data())
def test_it_is_moe_layer(case: Case, data: st.DataObject, backend: str) -> None:
    experts = case.options.get("expert_map", case.w2[:, 0, 0]).numel()
    args, options = layer_case(
        case,
        routing=RoutingConfig(
            data.draw(st.integers(1, experts)),
            data.draw(st.sampled_from(RoutingConfig.SCORINGS)),
            renormalize=data.draw(st.booleans()),
            scaling_factor=data.draw(st.sampled_from((1.0, 2.5, 16))),
        ),
        **{n: data.draw(st.booleans()) for n in ("logits", "router_bias", "selection_bias")},
        shared=data.draw(st.integers(0, 6)),
        gated=data.draw(st.booleans()),
        apart=case.options["activation"].gated and data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 2**31)),
    )
    want = moe_layer(*args, **package_s(options), backend=backend, return_routing=True)
    got = ops.moe_layer(*args, **options, backend=backend, return_routing=True)
    assert len(got) == 3
    for one, other in zip(got, want, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    assert torch.equal(ops.moe_layer(*args, **options, backend=backend), want[0])


def test_opcheck_of_a_layer(layer: Any) -> None:
    arguments, options = layer_operator_arguments(*layer)
    opcheck(ops.OPERATOR_LAYER, arguments, options)


def test_opcheck_finds_a_wrong_fake_of_a_layer() -> None:
    """The check itself: a fake that says int64 ids, where the operator gives int32, is caught."""

    def wrong(*arguments: Any, **options: Any) -> Any:
        y, weights, ids = ops._fake_layer(*arguments, **options)
        return y, weights, ids.long()

    with torch.library._scoped_library("weave_test", "FRAGMENT") as library:
        library.define(f"wrong_layer({ops._op_layer._schema.split('(', 1)[1]}")
        library.impl("wrong_layer", ops._layer, "CPU")
        torch.library.register_fake("weave_test::wrong_layer", wrong, lib=library)
        arguments, options = layer_operator_arguments(*layer_case())
        with pytest.raises(Exception, match=r"int32|int64|[Dd]type"):
            opcheck(
                torch.ops.weave_test.wrong_layer,
                arguments,
                options,
                test_utils="test_faketensor",
            )


def test_a_layer_s_outputs_are_new_memory_with_the_fake_s_strides(layer: Any) -> None:
    arguments, options = layer_operator_arguments(*layer)
    real = ops.OPERATOR_LAYER(*arguments, **options)
    again = ops.OPERATOR_LAYER(*arguments, **options)
    fake = ops._fake_layer(*arguments, **options)
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        # Strides of dimensions of one element, and of no elements at all, mean nothing.
        assert one.is_contiguous()
        assert other.is_contiguous()
    tensors = [*real, *again, *(a for a in arguments if a is not None)]
    held = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    outputs = held[: 6 if real[0].numel() else 0]
    assert len(set(outputs)) == len(outputs)
    assert not set(outputs) & set(held[len(outputs) :])


class TestGateAndUpRows:
    """Shared experts' first matrix in two tensors, which are one where they lie end to end."""

    def test_they_are_one_where_they_lie_end_to_end(self) -> None:
        both = torch.randn(9, 8)
        for rows in range(10):
            got = ops.end_to_end(both[:rows], both[rows:])
            assert got is not None
            assert torch.equal(got, both)
            assert got.data_ptr() == both.data_ptr()

    def test_and_not_where_they_do_not(self) -> None:
        both = torch.randn(9, 8)
        whole = torch.randn(4, 16)
        for gate, up in (
            (both[4:8], both[:4]),  # the other way round
            (both[:4], both[5:]),  # with a gap
            (both[:4], both[3:7]),  # overlapping
            (both[:4], both[4:8].clone()),  # somewhere else
            (whole[:, :8], whole[:, 8:]),  # side by side
            (both[:4], both[4:8].view(8, 4)),  # of another width
        ):
            assert ops.end_to_end(gate, up) is None

    def test_they_are_copied_only_where_they_do_not_and_the_log_says_so_once(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        args, options = layer_case(shared=5, gated=True, apart=True)
        both = torch.cat((options["shared"].w13, options["shared_up"]))
        joined = {"shared": replace(options["shared"], w13=both[:5]), "shared_up": both[5:]}
        want = moe_layer(*args, **package_s(options))
        copies: list[int] = []

        def cat(tensors: Any, *rest: Any, **more: Any) -> Tensor:
            # Of a layer's two gate and up rows, rather than anybody's.
            copies.extend([1] * (len(tensors) == 2 and tensors[1].shape == (5, 16)))
            return real(tensors, *rest, **more)

        real = torch.cat
        monkeypatch.setattr(torch, "cat", cat)
        ops._log_copy.cache_clear()
        with caplog.at_level(logging.WARNING, "weave_moe"):
            assert torch.equal(ops.moe_layer(*args, **{**options, **joined}), want)
            assert not copies
            assert not caplog.records
            for _ in range(2):
                assert torch.equal(ops.moe_layer(*args, **options), want)
        assert len(copies) == 2
        assert len(caplog.records) == 1
        ops._log_copy.cache_clear()


@pytest.mark.parametrize(
    "name",
    [
        *("x", "w13", "w2", "router_weight", "router_bias", "router_logits", "shared.w13"),
        *("shared_up", "shared.w2", "shared.gate", "b13", "b2", "residual"),
    ],
)
def test_gradients_of_a_layer_are_refused_before_and_behind_the_operator(name: str) -> None:
    args, options = layer_case(
        logits=name == "router_logits",
        router_bias=True,
        **{"shared": 5, "gated": True, "apart": True, "biases": True, "residual": True},
    )
    if name.startswith("shared."):
        field = name.split(".")[1]
        value = getattr(options["shared"], field).clone().requires_grad_()
        options["shared"] = replace(options["shared"], **{field: value})
    elif name in ("x", "w13", "w2"):
        place = ("x", "w13", "w2").index(name)
        args = (*args[:place], args[place].clone().requires_grad_(), *args[place + 1 :])
    else:
        options[name] = options[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"^{name} requires grad, but weave::moe_layer is for"):
        ops.moe_layer(*args, **options)
    with torch.no_grad():
        assert not ops.moe_layer(*args, **options).requires_grad
    arguments, numbers = layer_operator_arguments(args, options)
    y, weights, ids = ops.OPERATOR_LAYER(*arguments, **numbers)
    assert not ids.requires_grad
    for value in (y, weights):
        with pytest.raises(RuntimeError, match=r"weave::moe_layer .*inference only.*'reference'"):
            value.sum().backward()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"routing": None}, TypeError, "^routing must be a RoutingConfig"),
        ({"routing": RoutingConfig(5)}, ValueError, "^top_k must be at most 4"),
        ({"shared": (1, 2)}, TypeError, "^shared must be None or a SharedExperts"),
        ({"shared_up": torch.zeros(5, 16)}, ValueError, "^shared_up must be None without shared"),
        ({"return_routing": None}, TypeError, "^return_routing must be True or False"),
        ({"activation": "tanh"}, ValueError, "^activation must be one of"),
        ({"router_weight": None}, ValueError, "^router_weight or router_logits must be given"),
        ({"router_bias": torch.zeros(3)}, ValueError, "^router_bias must have 4"),
        ({"policy": "fast"}, ValueError, "^policy must be one of"),
        ({"backend": "gpu"}, ValueError, "^backend must be one of"),
    ],
)
def test_bad_arguments_of_a_layer_are_named(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    args, options = layer_case()
    with pytest.raises(error, match=words):
        ops.moe_layer(*args, **{**options, **changes})


def test_shared_experts_in_part_are_named() -> None:
    arguments, options = layer_operator_arguments(*layer_case(shared=5))
    for name, words in (
        ("shared_w13", r"^shared\.w13 must be"),
        ("shared_w2", r"^shared\.w2 must"),
    ):
        place = 3 + LAYER_TENSORS.index(name)
        part = (*arguments[:place], None, *arguments[place + 1 :])
        with pytest.raises(TypeError, match=words):
            ops.OPERATOR_LAYER(*part, **options)


@pytest.mark.parametrize("unbacked", [False, True])
def test_one_compilation_of_a_layer_serves_every_number_of_tokens(unbacked: bool) -> None:
    """None and one, too, where the compiler may not look at the number of tokens."""
    torch._dynamo.reset()
    nodes: list[int] = []
    options = layer_case(shared=5, apart=True)[1]

    def around(*arguments: Any) -> Any:
        y, weights, ids = ops.moe_layer(*arguments, **options, return_routing=True)
        return y + 1, weights * 2, ids - 1

    def backend(graph: Any, _inputs: Any) -> Any:
        nodes.append(sum("weave.moe_layer" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    fast = torch.compile(around, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (3, 8, 0, 1, 17) if unbacked else (3, 8, 17):
        args, _ = layer_case(tokens=tokens)
        if unbacked:
            torch._dynamo.decorators.mark_unbacked(args[0], 0)
        for got, want in zip(fast(*args), around(*args), strict=True):
            assert torch.equal(got, want)
    assert nodes == [1]
