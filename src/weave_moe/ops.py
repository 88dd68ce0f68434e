"""The experts, and whole layers, as operators of torch: a compiler sees one opaque node, unbroken.

    torch.ops.weave.moe_experts(x, w13, w2, topk_weights, topk_ids, ...) -> Tensor
    torch.ops.weave.moe_experts_out(out, x, w13, w2, topk_weights, topk_ids, ...) -> ()
    torch.ops.weave.moe_layer(x, w13, w2, router_weight, ..., top_k=k, ...) -> (y, weights, ids)

The second writes `out` and nothing else, and its schema says so; the others change none of their
arguments and return memory of their own. `moe_experts`, `moe_experts_out` and `moe_layer` here call
them with an activation, a router and shared experts instead of their parts. Importing this module
registers the operators.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from . import backends
from .routing import RoutingConfig
from .shapes import Activation, SharedExperts, check_experts, check_flag

__all__ = [
    "OPERATOR",
    "OPERATOR_LAYER",
    "OPERATOR_OUT",
    "end_to_end",
    "moe_experts",
    "moe_experts_out",
    "moe_layer",
]

_log = logging.getLogger("weave_moe")

_EXTRAS: Final = (
    "Tensor? b13=None, Tensor? b2=None, Tensor? expert_map=None, Tensor? num_valid_tokens=None, "
    "Tensor? residual=None"
)
_TENSORS: Final = (
    f"Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, {_EXTRAS}"
)
_LAYER_TENSORS: Final = (
    "Tensor x, Tensor w13, Tensor w2, Tensor? router_weight=None, Tensor? router_bias=None, "
    "Tensor? router_logits=None, Tensor? selection_bias=None, Tensor? shared_w13=None, "
    f"Tensor? shared_up=None, Tensor? shared_w2=None, Tensor? shared_gate=None, {_EXTRAS}"
)
_ROUTING: Final = (
    "int top_k, str scoring='softmax', bool renormalize=False, float scaling_factor=1.0, "
    "int num_groups=1, int topk_groups=1"
)
_OPTIONS: Final = (
    "str kind='silu', float alpha=1.0, float? limit=None, float up_offset=0.0, "
    "bool interleaved=False, bool weight_on_input=False, str policy='auto', str backend='auto'"
)


def _experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    out: Tensor | None = None,
    backend: str = "auto",
    **options: Any,
) -> Tensor:
    # Autograd has been dealt with before an operator's body runs.
    with torch.no_grad():
        call = check_experts(
            x,
            w13,
            w2,
            topk_weights,
            topk_ids,
            activation=Activation(kind, alpha, limit, up_offset),
            b13=b13,
            b2=b2,
            expert_map=expert_map,
            num_valid_tokens=num_valid_tokens,
            residual=residual,
            out=out,
            **options,
        )
        chosen = backends.choose(call, backend)
        return chosen.experts(call) if call.num_tokens else call.output()


def _experts_out(out: Tensor, *tensors: Any, **options: Any) -> None:
    _experts(*tensors, out=out, **options)


def _fake(x: Tensor, *_tensors: Any, **_options: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_out(*_tensors: Any, **_options: Any) -> None:
    return None


def _no_backward(operator: str, instead: str) -> Any:
    """A backward that says that there is none, and what to take instead."""

    def backward(*_: Any) -> Any:
        raise RuntimeError(
            f"weave::{operator} is for inference only and has no backward: call it under "
            f"torch.no_grad() or torch.inference_mode(), or take {instead} with "
            "backend='reference'"
        )

    return backward


def end_to_end(gate: Tensor, up: Tensor) -> Tensor | None:
    """gate [I, H] and up [I, H] as one tensor [2I, H] of the same memory, if they lie end to end
    there; else None. For tensors that have memory: not on the meta device, and not fake.
    """
    if (
        gate.dim() == up.dim() == 2
        and gate.size(1) == up.size(1)
        and gate.is_contiguous()
        and up.is_contiguous()
        and gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        and gate.storage_offset() + gate.numel() == up.storage_offset()
    ):
        size = (gate.size(0) + up.size(0), gate.size(1))
        return gate.detach().as_strided(size, (gate.size(1), 1))
    return None


@lru_cache(maxsize=1)
def _log_copy() -> None:
    # The cache is what makes it once.
    _log.warning(
        "weave::moe_layer copies the shared experts' gate and up rows in each call, because they "
        "do not lie end to end in memory: call the MoELayer once outside of the compiler, which "
        "moves them there"
    )


def _shared(
    w13: Tensor | None, up: Tensor | None, w2: Tensor | None, gate: Tensor | None
) -> SharedExperts | None:
    """The shared experts of the operator's arguments. What is missing is named by the call."""
    if w13 is None and up is None and w2 is None and gate is None:
        return None
    if w13 is not None and up is not None:
        # Here, where there is memory to look at: a compiler has none while it traces.
        joined = end_to_end(w13, up)
        if joined is None:
            _log_copy()
            joined = torch.cat((w13, up))
        w13 = joined
    return SharedExperts(w13, w2, gate)  # type: ignore[arg-type]


def _layer(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    router_weight: Tensor | None = None,
    router_bias: Tensor | None = None,
    router_logits: Tensor | None = None,
    selection_bias: Tensor | None = None,
    shared_w13: Tensor | None = None,
    shared_up: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_gate: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = False,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    kind: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    # By its public name, because the call that the operator stands for is above this module.
    import weave_moe

    with torch.no_grad():
        y, weights, ids = weave_moe.moe_layer(
            x,
            w13,
            w2,
            routing=RoutingConfig(
                top_k, scoring, renormalize, scaling_factor, num_groups, topk_groups
            ),
            router_weight=router_weight,
            router_bias=router_bias,
            router_logits=router_logits,
            selection_bias=selection_bias,
            shared=_shared(shared_w13, shared_up, shared_w2, shared_gate),
            return_routing=True,
            activation=Activation(kind, alpha, limit, up_offset),
            b13=b13,
            b2=b2,
            expert_map=expert_map,
            num_valid_tokens=num_valid_tokens,
            residual=residual,
            **options,
        )
        # The strides that the fake says.
        return y, weights.contiguous(), ids.contiguous()


def _fake_layer(
    x: Tensor, *_tensors: Any, top_k: int, **_options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    slots = (x.size(0), top_k)
    return (
        x.new_empty(x.shape),
        x.new_empty(slots, dtype=torch.float32),
        x.new_empty(slots, dtype=torch.int32),
    )


# Kernels keep memory from one call to the next, which the pools of inductor's CUDA graphs
# (mode="reduce-overhead") must not own: there the operators run between the graphs. torch before
# 2.9 has no way to say so. Graphs that a program captures itself take them as they are.
_UNSAFE = getattr(torch._C.Tag, "cudagraph_unsafe", None)
_TAGS: dict[str, Any] = {} if _UNSAFE is None else {"tags": (_UNSAFE,)}

_op: Any = torch.library.custom_op(
    "weave::moe_experts",
    _experts,
    mutates_args=(),
    **_TAGS,
    schema=f"({_TENSORS}, *, {_OPTIONS}) -> Tensor",
)
_op.register_fake(_fake)
_op.register_autograd(_no_backward("moe_experts", "weave_moe.fused_experts"))

_op_out: Any = torch.library.custom_op(
    "weave::moe_experts_out",
    _experts_out,
    mutates_args=("out",),
    **_TAGS,
    schema=f"(Tensor(a0!) out, {_TENSORS}, *, {_OPTIONS}) -> ()",
)
_op_out.register_fake(_fake_out)

_op_layer: Any = torch.library.custom_op(
    "weave::moe_layer",
    _layer,
    mutates_args=(),
    **_TAGS,
    schema=f"({_LAYER_TENSORS}, *, {_ROUTING}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
_op_layer.register_fake(_fake_layer)
_op_layer.register_autograd(_no_backward("moe_layer", "weave_moe.moe_layer or a MoELayer"))

OPERATOR: Final = torch.ops.weave.moe_experts
OPERATOR_OUT: Final = torch.ops.weave.moe_experts_out
OPERATOR_LAYER: Final = torch.ops.weave.moe_layer
"""The operators themselves, which take an activation's numbers (kind, alpha, limit, up_offset), a
router's (the fields of `RoutingConfig`) and shared experts' tensors one by one."""


def _check_no_grad(operator: str, tensors: dict[str, Tensor | None]) -> None:
    if torch.is_grad_enabled():
        for name, value in tensors.items():
            if value is not None and value.requires_grad:
                raise ValueError(
                    f"{name} requires grad, but weave::{operator} is for inference only: call it "
                    "under torch.no_grad() or torch.inference_mode()"
                )


def moe_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str | Activation = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    residual: Tensor | None = None,
    interleaved: bool = False,
    weight_on_input: bool = False,
    policy: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """`weave_moe.fused_experts` as one operator: y [T, H], in x's dtype, contiguous.

    The arguments are `fused_experts`'s, without `workspace` and `out`; T may be a symbol, so one
    compilation serves every number of tokens. In eager code it does the same work as
    `fused_experts`, with the cost of an operator in Python on top.

    Raises ValueError if a tensor requires grad while gradients are recorded, which a compiler finds
    while it traces; TypeError or ValueError as `fused_experts` does when the operator runs.
    """
    _check_no_grad(
        "moe_experts",
        {
            **{"x": x, "w13": w13, "w2": w2, "topk_weights": topk_weights},
            **{"b13": b13, "b2": b2, "residual": residual},
        },
    )
    act = Activation.parse(activation)
    y: Tensor = OPERATOR(
        x,
        w13,
        w2,
        topk_weights,
        topk_ids,
        b13,
        b2,
        expert_map,
        num_valid_tokens,
        residual,
        kind=act.kind,
        alpha=act.alpha,
        limit=act.limit,
        up_offset=act.up_offset,
        interleaved=interleaved,
        weight_on_input=weight_on_input,
        policy=policy,
        backend=backend,
    )
    return y


def moe_experts_out(
    out: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str | Activation = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    residual: Tensor | None = None,
    interleaved: bool = False,
    weight_on_input: bool = False,
    policy: str = "auto",
    backend: str = "auto",
) -> None:
    """`moe_experts` into out [T, H]: x's dtype, contiguous. It may be `residual` itself, and shares
    no memory with another input.

    Raises what `moe_experts` raises, for `out` too.
    """
    _check_no_grad(
        "moe_experts_out",
        {
            **{"out": out, "x": x, "w13": w13, "w2": w2, "topk_weights": topk_weights},
            **{"b13": b13, "b2": b2, "residual": residual},
        },
    )
    act = Activation.parse(activation)
    OPERATOR_OUT(
        out,
        x,
        w13,
        w2,
        topk_weights,
        topk_ids,
        b13,
        b2,
        expert_map,
        num_valid_tokens,
        residual,
        kind=act.kind,
        alpha=act.alpha,
        limit=act.limit,
        up_offset=act.up_offset,
        interleaved=interleaved,
        weight_on_input=weight_on_input,
        policy=policy,
        backend=backend,
    )


def moe_layer(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    routing: RoutingConfig,
    router_weight: Tensor | None = None,
    router_bias: Tensor | None = None,
    router_logits: Tensor | None = None,
    selection_bias: Tensor | None = None,
    shared: SharedExperts | None = None,
    shared_up: Tensor | None = None,
    return_routing: bool = False,
    activation: str | Activation = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    residual: Tensor | None = None,
    policy: str = "auto",
    interleaved: bool = False,
    weight_on_input: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`weave_moe.moe_layer` as one operator: y [T, H], in x's dtype, contiguous.

    With return_routing, (y, topk_weights fp32 [T, k], topk_ids int32 [T, k]), each in memory of its
    own.

    The arguments are `weave_moe.moe_layer`'s, without `workspace` and `out`; T may be a symbol, so
    one compilation serves every number of tokens. And

    shared_up: [Is, H], the shared experts' up rows, where `shared.w13` is their gate rows [Is, H]
        alone, as models keep them. Where the two lie end to end in memory they are read as the one
        tensor [2Is, H] that they are; else each call copies them. It is looked up when the operator
        runs, so weights may be loaded or moved after a compilation.

    Raises TypeError if routing is no RoutingConfig, shared no SharedExperts, or return_routing no
    bool; ValueError if shared_up is given without shared, or a tensor requires grad while gradients
    are recorded, which a compiler finds while it traces; TypeError or ValueError as
    `weave_moe.moe_layer` does when the operator runs.
    """
    check_flag("return_routing", return_routing)
    if not isinstance(routing, RoutingConfig):
        raise TypeError(f"routing must be a RoutingConfig, got {type(routing).__name__}")
    if shared is not None and not isinstance(shared, SharedExperts):
        raise TypeError(f"shared must be None or a SharedExperts, got {type(shared).__name__}")
    if shared is None and shared_up is not None:
        raise ValueError("shared_up must be None without shared experts, got a tensor")
    shared_w13, shared_w2, shared_gate = (
        (None, None, None) if shared is None else (shared.w13, shared.w2, shared.gate)
    )
    _check_no_grad(
        "moe_layer",
        {
            **{"x": x, "w13": w13, "w2": w2, "router_weight": router_weight},
            **{"router_bias": router_bias, "router_logits": router_logits},
            **{"shared.w13": shared_w13, "shared_up": shared_up, "shared.w2": shared_w2},
            **{"shared.gate": shared_gate, "b13": b13, "b2": b2, "residual": residual},
        },
    )
    act = Activation.parse(activation)
    y, weights, ids = OPERATOR_LAYER(
        x,
        w13,
        w2,
        router_weight,
        router_bias,
        router_logits,
        selection_bias,
        shared_w13,
        shared_up,
        shared_w2,
        shared_gate,
        b13,
        b2,
        expert_map,
        num_valid_tokens,
        residual,
        top_k=routing.top_k,
        scoring=routing.scoring,
        renormalize=routing.renormalize,
        scaling_factor=routing.scaling_factor,
        num_groups=routing.num_groups,
        topk_groups=routing.topk_groups,
        kind=act.kind,
        alpha=act.alpha,
        limit=act.limit,
        up_offset=act.up_offset,
        interleaved=interleaved,
        weight_on_input=weight_on_input,
        policy=policy,
        backend=backend,
    )
    return (y, weights, ids) if return_routing else y
