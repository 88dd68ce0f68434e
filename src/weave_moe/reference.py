"""The layer in plain torch, fp32 inside: the oracle that every backend is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .routing import LayerCall, RoutingConfig, check_layer
from .shapes import (
    Activation,
    ExpertsCall,
    SharedExperts,
    as_written,
    check_shared,
    check_tokens,
    shared_call,
)

__all__ = [
    "activate",
    "assemble_layer",
    "experts_reference",
    "local_experts",
    "moe_reference",
    "shared_reference",
]

SLAB_BYTES = 1 << 30
"""Bytes that the rows [tokens, k, H] of one slab of tokens may take; larger calls are cut."""


def activate(h: Tensor, activation: Activation, *, interleaved: bool = False) -> Tensor:
    """The activation of h [..., 2I] (gate and up values) or [..., I] (not gated): [..., I].

    h has the row order of w13: gate values first, or gate0, up0, gate1, ... if `interleaved`.
    """
    if not activation.gated:
        return torch.relu(h) ** 2
    if interleaved:
        gate, up = h[..., 0::2], h[..., 1::2]
    else:
        gate, up = h.chunk(2, dim=-1)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    if activation.kind == "silu":
        gate = gate * torch.sigmoid(activation.alpha * gate)
    else:
        gate = F.gelu(gate, approximate="none" if activation.kind == "gelu" else "tanh")
    return gate * (up + activation.up_offset)


def local_experts(call: ExpertsCall) -> Tensor:
    """The expert that computes each slot, int64 [T, k]; -1 where the slot is skipped."""
    ids = call.topk_ids.long()
    if call.expert_map is not None:
        known = (ids >= 0) & (ids < call.expert_map.numel())
        mapped = call.expert_map.long()[ids.masked_fill(~known, 0)]
        ids = mapped.masked_fill(~known, -1)
    skipped = (ids < 0) | (ids >= call.shape.experts)
    if call.num_valid_tokens is not None:
        tokens = torch.arange(call.num_tokens, device=call.device)
        skipped = skipped | (tokens >= call.num_valid_tokens.reshape(())).unsqueeze(1)
    return ids.masked_fill(skipped, -1)


def experts_reference(
    call: ExpertsCall, *, rounding: bool = True, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Runs a checked call expert by expert: [T, H].

    rounding: True gives the contract of `ExpertsCall`, roundings included, in the call's dtype (and
        writes it to `call.out` if there is one). False rounds nowhere: x scaled on input, the
        intermediate, the rows and the result stay in `compute_dtype`, which is the result's type;
        with compute_dtype=torch.float64 that is the truth to measure errors by.
    compute_dtype: torch.float32 or torch.float64, the type that everything is computed in.

    Differentiable with respect to x, the weights, the biases, topk_weights and residual. How a
    matrix product sums is torch's affair here, so a token's last bits may depend on the rest of the
    batch.
    """
    per_token = max(1, call.shape.top_k * call.shape.hidden * compute_dtype.itemsize)
    slab = max(1, SLAB_BYTES // per_token)
    experts = local_experts(call)
    with as_written(call.device):
        parts = [
            _experts_slab(
                call, experts, start, min(start + slab, call.num_tokens), rounding, compute_dtype
            )
            for start in range(0, call.num_tokens, slab)
        ]
    result = torch.cat(parts) if parts else call.x.new_zeros(call.x.shape, dtype=compute_dtype)
    if not rounding:
        return result
    result = result.to(call.x.dtype)
    return result if call.out is None else call.out.copy_(result)


def _experts_slab(
    call: ExpertsCall,
    experts: Tensor,
    start: int,
    end: int,
    rounding: bool,
    compute: torch.dtype,
) -> Tensor:
    """The unrounded result [end - start, H] of tokens start..end-1."""
    dtype = call.x.dtype

    def rounded(value: Tensor) -> Tensor:
        return value.to(dtype).to(compute) if rounding else value

    x = call.x[start:end].to(compute)
    weights = call.topk_weights[start:end].to(compute)
    slots = experts[start:end]
    flat = slots.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    # Bin 0 counts the skipped slots, which the sort put first.
    counts = torch.bincount(flat + 1, minlength=call.shape.experts + 1).tolist()
    rows = x.new_zeros((flat.numel(), call.shape.hidden))
    first = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count == 0:
            continue
        mine = order[first : first + count]
        first += count
        token = mine // call.shape.top_k
        inputs = x[token]
        if call.weight_on_input:
            inputs = rounded(inputs * weights.reshape(-1)[mine].unsqueeze(1))
        h = inputs @ call.w13[expert].to(compute).T
        if call.b13 is not None:
            h = h + call.b13[expert].to(compute)
        a = rounded(activate(h, call.activation, interleaved=call.interleaved))
        row = a @ call.w2[expert].to(compute).T
        if call.b2 is not None:
            row = row + call.b2[expert].to(compute)
        if dtype is torch.bfloat16:
            # fp16 rows may lie beyond fp16's range before they are weighted, so only bf16 rounds.
            row = rounded(row)
        rows[mine] = row
    rows = rows.view(*slots.shape, -1)
    result = torch.zeros_like(x)
    for slot in range(call.shape.top_k):
        row = rows[:, slot]
        if not call.weight_on_input:
            row = row * weights[:, slot].unsqueeze(1)
        # A skipped slot's weight may be NaN or infinite, and zero times that is not zero.
        result = result + torch.where(slots[:, slot].unsqueeze(1) >= 0, row, 0.0)
    if call.residual is not None:
        result = result + call.residual[start:end].to(compute)
    return result


def shared_reference(
    x: Tensor,
    shared: SharedExperts,
    *,
    activation: str | Activation = "silu",
    num_valid_tokens: Tensor | None = None,
    rounding: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The shared experts' part of the layer for tokens x [T, H]: [T, H], scaled by their gate.

    Raises TypeError or ValueError naming the argument.
    """
    act = Activation.parse(activation)
    x = check_tokens(x)
    call = shared_call(x, check_shared(shared, x, act), act, num_valid_tokens=num_valid_tokens)
    return experts_reference(call, rounding=rounding, compute_dtype=compute_dtype)


def assemble_layer(
    layer: LayerCall, run: Callable[[ExpertsCall], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """A whole layer from its parts, whoever computes the experts: (y [T, H], weights, ids).

    The router is torch's; `run` computes the routed experts and, as a call of its own with one
    expert, the shared ones. Each gives a result in x's dtype, and

        y = (routed + shared) + residual        added in fp32 in that order, rounded once

    so that all backends that work by parts agree on the layer if they agree on the experts.
    """
    weights, ids = layer.route()
    call, shared = layer.routed(weights, ids), layer.shared
    if shared is None:
        return run(call), weights, ids
    # The routed experts last, so that a workspace's record of its last run is theirs.
    extra = run(
        shared_call(
            call.x,
            shared,
            call.activation,
            num_valid_tokens=call.num_valid_tokens,
            policy=call.policy,
            workspace=call.workspace,
        )
    )
    routed = run(replace(call, residual=None, out=None))
    if call.residual is None:
        # Torch adds bf16 and fp16 in fp32 and rounds once.
        y = routed + extra
    else:
        wide = torch.promote_types(routed.dtype, torch.float32)
        y = (routed.to(wide) + extra + call.residual).to(routed.dtype)
    return (y if call.out is None else call.out.copy_(y)), weights, ids


def moe_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    routing: RoutingConfig,
    rounding: bool = True,
    compute_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Tensor:
    """The whole layer by `experts_reference`: [T, H]. `options` are the keywords of `moe_layer`.

    rounding and compute_dtype are those of `experts_reference`; the router and the gate of shared
    experts are computed in fp32 whatever they are.

    Raises TypeError or ValueError naming the argument.
    """
    run = partial(experts_reference, rounding=rounding, compute_dtype=compute_dtype)
    return assemble_layer(check_layer(x, w13, w2, routing=routing, **options), run)[0]
