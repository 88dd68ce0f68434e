"""Routers: from a token's logits to k experts and their weights. The one definition of it.

Every router of the shape table of well-known models is a `RoutingConfig`:

    Mixtral, Qwen3-MoE        RoutingConfig(k, renormalize=True)
    OLMoE, DeepSeek-V2-Lite   RoutingConfig(k)
    DeepSeek-V2               RoutingConfig(6, num_groups=8, topk_groups=3, scaling_factor=16)
    DeepSeek-V3               RoutingConfig(8, "sigmoid", renormalize=True, scaling_factor=2.5,
                              num_groups=8, topk_groups=4), with a selection bias
    Kimi-K2, GLM-4.5,         RoutingConfig(k, "sigmoid", renormalize=True, scaling_factor=...),
    MiniMax-M2, Nemotron-3    with a selection bias
    DeepSeek-V4               RoutingConfig(6, "sqrtsoftplus", renormalize=True,
                              scaling_factor=1.5), with a selection bias
    gpt-oss, Granite          RoutingConfig(k, "topk_softmax")
    Llama-4                   RoutingConfig(1, "sigmoid"), and the weight on the input
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .shapes import (
    DTYPES,
    ExpertsCall,
    SharedExperts,
    as_written,
    check_choice,
    check_count,
    check_experts,
    check_flag,
    check_number,
    check_out_apart,
    check_shared,
    check_size,
    check_tensor,
    check_tokens,
)

__all__ = ["LayerCall", "RoutingConfig", "check_layer", "check_router", "route", "router_logits"]

_FLOATS = tuple(DTYPES.values())


@dataclass(frozen=True)
class RoutingConfig:
    """How a router chooses and weighs experts.

    top_k: experts a token.
    scoring: "softmax" over all experts; "sigmoid" or "sqrtsoftplus" (the square root of softplus)
        of each; "topk_softmax": the k largest logits, then softmax over these.
    renormalize: divide a token's k weights by their sum + 1e-20 ("topk_softmax" sums to 1 anyway).
    scaling_factor: multiplies the weights, once, after renormalising, whether or not that is done.
    num_groups, topk_groups: experts lie in `num_groups` groups of neighbours, and a token chooses
        among the `topk_groups` best groups only (DeepSeek-V2 and V3).

    Raises TypeError or ValueError, naming the field, for a value that is not allowed.
    """

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1

    SCORINGS: ClassVar[tuple[str, ...]] = ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax")

    def __post_init__(self) -> None:
        check_count("top_k", self.top_k)
        check_choice("scoring", self.scoring, self.SCORINGS)
        check_flag("renormalize", self.renormalize)
        check_number("scaling_factor", self.scaling_factor)
        check_count("num_groups", self.num_groups)
        check_count("topk_groups", self.topk_groups)
        if self.topk_groups > self.num_groups:
            raise ValueError(
                f"topk_groups must be at most num_groups {self.num_groups}, got {self.topk_groups}"
            )

    def check_experts(self, experts: int) -> None:
        """Raises ValueError if a token cannot choose `top_k` of `experts` experts this way."""
        if experts % self.num_groups:
            raise ValueError(
                f"num_groups must divide the number of experts {experts}, got {self.num_groups}"
            )
        choice = experts // self.num_groups * self.topk_groups
        if self.top_k > choice:
            raise ValueError(
                f"top_k must be at most {choice}, the experts that a token may choose from, "
                f"got {self.top_k}"
            )


def check_router(
    x: Tensor,
    experts: int,
    *,
    routing: RoutingConfig,
    router_weight: Tensor | None = None,
    router_bias: Tensor | None = None,
    router_logits: Tensor | None = None,
    selection_bias: Tensor | None = None,
) -> None:
    """Checks a layer's router arguments for tokens x [T, H] and `experts` routable experts.

    Either router_weight [E, H] with an optional router_bias [E], or router_logits [T, E]; and an
    optional selection_bias [E]. Raises TypeError or ValueError naming the argument.
    """
    if not isinstance(routing, RoutingConfig):
        raise TypeError(f"routing must be a RoutingConfig, got {type(routing).__name__}")
    routing.check_experts(experts)
    if (router_weight is None) == (router_logits is None):
        raise ValueError(
            "router_weight or router_logits must be given, and not both, "
            f"got {'neither' if router_weight is None else 'both'}"
        )
    if router_weight is not None:
        _check_linear(x, router_weight, router_bias, experts)
    else:
        if router_bias is not None:
            raise ValueError("router_bias must be None when router_logits are given, got a tensor")
        logits = check_tensor("router_logits", router_logits, ("T", "E"), _FLOATS, device=x.device)
        check_size("router_logits", logits, 0, x.size(0), "T, from x")
        check_size("router_logits", logits, 1, experts, "E")
    _check_bias("selection_bias", selection_bias, experts, x.device)


@dataclass(frozen=True)
class LayerCall:
    """One checked call of the whole layer.

    experts: the routed experts' call, but for its ids and weights, which the router is to find.
    The rest are `moe_layer`'s arguments: router_weight or router_logits is given, and not both.
    """

    experts: ExpertsCall
    routing: RoutingConfig
    router_weight: Tensor | None
    router_bias: Tensor | None
    router_logits: Tensor | None
    selection_bias: Tensor | None
    shared: SharedExperts | None

    @property
    def router_experts(self) -> int:
        """E of the router: the experts' own, or the length of their map."""
        call = self.experts
        return call.shape.experts if call.expert_map is None else call.expert_map.numel()

    def inputs(self) -> dict[str, Tensor]:
        """The tensors that are read, by argument name."""
        shared = self.shared
        more = {
            "router_weight": self.router_weight,
            "router_bias": self.router_bias,
            "router_logits": self.router_logits,
            "selection_bias": self.selection_bias,
            "shared.w13": None if shared is None else shared.w13,
            "shared.w2": None if shared is None else shared.w2,
            "shared.gate": None if shared is None else shared.gate,
        }
        found = {name: t for name, t in more.items() if t is not None}
        return self.experts.inputs() | found

    def route(self) -> tuple[Tensor, Tensor]:
        """By torch's operators: (weights fp32 [T, k], ids int32 [T, k])."""
        logits = self.router_logits
        if self.router_weight is not None:
            logits = router_logits(self.experts.x, self.router_weight, self.router_bias)
        assert logits is not None
        return route(logits, self.routing, self.selection_bias)

    def routed(self, weights: Tensor, ids: Tensor) -> ExpertsCall:
        """The experts' call with the router's result."""
        return replace(self.experts, topk_weights=weights, topk_ids=ids.contiguous())


def check_layer(
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
    **options: Any,
) -> LayerCall:
    """Checks all arguments of a layer; `options` are the other keywords of `check_experts`.

    Raises TypeError or ValueError naming the argument.
    """
    x = check_tokens(x)
    if not isinstance(routing, RoutingConfig):
        raise TypeError(f"routing must be a RoutingConfig, got {type(routing).__name__}")
    slots = (x.size(0), routing.top_k)
    call = LayerCall(
        check_experts(
            x,
            w13,
            w2,
            torch.empty(slots, dtype=torch.float32, device=x.device),
            torch.empty(slots, dtype=torch.int32, device=x.device),
            **options,
        ),
        routing,
        router_weight,
        router_bias,
        router_logits,
        selection_bias,
        shared,
    )
    check_router(
        x,
        call.router_experts,
        routing=routing,
        router_weight=router_weight,
        router_bias=router_bias,
        router_logits=router_logits,
        selection_bias=selection_bias,
    )
    if shared is not None:
        check_shared(shared, x, call.experts.activation)
    if call.experts.out is not None:
        check_out_apart(call.experts.out, call.inputs())
    return call


def _check_bias(name: str, bias: Tensor | None, experts: int, device: torch.device) -> None:
    if bias is not None:
        check_tensor(name, bias, ("E",), _FLOATS, device=device)
        check_size(name, bias, 0, experts, "E")


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, experts: int) -> None:
    check_tensor("router_weight", weight, ("E", "H"), _FLOATS, device=x.device)
    check_size("router_weight", weight, 0, experts, "E")
    check_size("router_weight", weight, 1, x.size(1), "H, from x")
    _check_bias("router_bias", bias, experts, x.device)


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Router logits x @ weight^T + bias, accumulated and returned in fp32: [T, E].

    x: [T, H]; weight: [E, H]; bias: [E] or None; each in float32, bfloat16 or float16. Products of
    bf16 or fp16 values are exact in fp32, so near-tied experts are told apart as well as the inputs
    allow; autocast changes nothing. The product is torch's: its setting for float32 matrix products
    holds here too (leave it at "highest"), and the last bits of a token's logits may depend on the
    rest of the batch.

    Raises TypeError or ValueError naming the argument.
    """
    check_tensor("x", x, ("T", "H"), _FLOATS)
    experts = weight.size(0) if isinstance(weight, Tensor) and weight.dim() == 2 else 0
    _check_linear(x, weight, bias, experts)
    with as_written(x.device):
        # Contiguous, because strides choose torch's kernel and so the last bits.
        x = x.float().contiguous()
        return F.linear(x, weight.float(), None if bias is None else bias.float())


def route(
    logits: Tensor, config: RoutingConfig, selection_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses each token's experts: (weights fp32 [T, k], ids int32 [T, k]), best expert first.

    logits: [T, E] in float32, bfloat16 or float16. selection_bias: [E] or None; it is added to the
    scores (to the logits for "topk_softmax") to select, and never weighs.

    - Weights come from the scores without the bias, are renormalised if the config says so, and
      scaled once.
    - Of equal experts, and of equal groups, the one with the lowest id wins.
    - A group's score is its best expert's, or the sum of its two best biased scores when a
      selection bias is given. Experts of a dropped group cannot be chosen.
    - A NaN logit counts as -inf, and an expert at -inf, or with a NaN bias, is chosen only after
      all others that its token may choose, whatever their bias. +inf counts as the largest finite
      number. So a token always gets k distinct ids in [0, E) and finite weights; one whose logits
      are all NaN gets 0..k-1.

    Raises TypeError or ValueError naming the argument.
    """
    if not isinstance(config, RoutingConfig):
        raise TypeError(f"config must be a RoutingConfig, got {type(config).__name__}")
    check_tensor("logits", logits, ("T", "E"), _FLOATS)
    experts = logits.size(1)
    config.check_experts(experts)
    _check_bias("selection_bias", selection_bias, experts, logits.device)

    raw = logits.float()
    lowest = torch.finfo(torch.float32).min
    dead = torch.isnan(raw) | (raw == -torch.inf)
    # Finite on both ends, so that no inf - inf can arise; masked_fill rather than nan_to_num
    # because the latter's gradient is one wherever its output is finite.
    finite = raw.masked_fill(dead, lowest).clamp(max=torch.finfo(torch.float32).max)
    if config.scoring == "softmax":
        scores = torch.softmax(finite, dim=-1)
    elif config.scoring == "sigmoid":
        scores = torch.sigmoid(finite)
    elif config.scoring == "sqrtsoftplus":
        scores = torch.sqrt(F.softplus(finite))
    else:
        scores = finite

    with torch.no_grad():
        key = scores if selection_bias is None else scores + selection_bias.float()
        # Whatever the bias: live experts first, then dead ones, then those of dropped groups.
        least = torch.nextafter(finite.new_tensor(lowest), finite.new_tensor(0.0))
        key = torch.maximum(key, least).masked_fill(dead | torch.isnan(key), lowest)
        if config.num_groups > 1:
            key = _drop_groups(key, config, biased=selection_bias is not None)
        # A stable sort, because torch.topk leaves the order of equal values open.
        order = torch.sort(key, dim=-1, descending=True, stable=True).indices
        ids = order[:, : config.top_k]

    weights = scores.gather(1, ids)
    if config.scoring == "topk_softmax":
        weights = torch.softmax(weights, dim=-1)
    elif config.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * config.scaling_factor, ids.to(torch.int32)


def _drop_groups(key: Tensor, config: RoutingConfig, *, biased: bool) -> Tensor:
    """`key` [T, E] with -inf for the experts outside each token's best groups."""
    grouped = key.reshape(key.size(0), config.num_groups, key.size(1) // config.num_groups)
    best = grouped.sort(dim=-1, descending=True).values[..., : 2 if biased else 1].sum(dim=-1)
    kept = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : config.topk_groups]
    dropped = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).reshape(key.shape)
