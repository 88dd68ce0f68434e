"""The experts as operators of torch, so that a compiler sees one opaque node and no graph breaks.

    torch.ops.weave.moe_experts(x, w13, w2, topk_weights, topk_ids, ...) -> Tensor
    torch.ops.weave.moe_experts_out(out, x, w13, w2, topk_weights, topk_ids, ...) -> ()

The first changes none of its arguments and returns memory of its own; the second writes `out` and
nothing else, and its schema says so. `moe_experts` and `moe_experts_out` here call them with an
activation instead of its numbers. Importing this module registers the operators.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from . import backends
from .shapes import Activation, check_experts

__all__ = ["OPERATOR", "OPERATOR_OUT", "moe_experts", "moe_experts_out"]

_TENSORS: Final = (
    "Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? b13=None, "
    "Tensor? b2=None, Tensor? expert_map=None, Tensor? num_valid_tokens=None, "
    "Tensor? residual=None"
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


def _backward(*_: Any) -> Any:
    raise RuntimeError(
        "weave::moe_experts is for inference only and has no backward: call it under "
        "torch.no_grad() or torch.inference_mode(), or take weave_moe.fused_experts with "
        "backend='reference'"
    )


_op: Any = torch.library.custom_op(
    "weave::moe_experts",
    _experts,
    mutates_args=(),
    schema=f"({_TENSORS}, *, {_OPTIONS}) -> Tensor",
)
_op.register_fake(_fake)
_op.register_autograd(_backward)

_op_out: Any = torch.library.custom_op(
    "weave::moe_experts_out",
    _experts_out,
    mutates_args=("out",),
    schema=f"(Tensor(a0!) out, {_TENSORS}, *, {_OPTIONS}) -> ()",
)
_op_out.register_fake(_fake_out)

OPERATOR: Final = torch.ops.weave.moe_experts
OPERATOR_OUT: Final = torch.ops.weave.moe_experts_out
"""The operators themselves, which take an activation's numbers: kind, alpha, limit, up_offset."""


def _check_no_grad(tensors: dict[str, Tensor | None]) -> None:
    if torch.is_grad_enabled():
        for name, value in tensors.items():
            if value is not None and value.requires_grad:
                raise ValueError(
                    f"{name} requires grad, but weave::moe_experts is for inference only: call it "
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
        {
            **{"x": x, "w13": w13, "w2": w2, "topk_weights": topk_weights},
            **{"b13": b13, "b2": b2, "residual": residual},
        }
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
        {
            **{"out": out, "x": x, "w13": w13, "w2": w2, "topk_weights": topk_weights},
            **{"b13": b13, "b2": b2, "residual": residual},
        }
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
