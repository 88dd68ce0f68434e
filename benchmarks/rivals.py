"""Rivals for experts.py and layer.py: packages that are installed, by `weave_moe.bench.rivals`.

    python benchmarks/experts.py --rivals benchmarks/rivals.py --contestants weave,vllm,flashinfer

A package that is not installed, or does not take a layer, gives a row with its error and no time.
For layer.py, rivals that take ids get them from vLLM's fused top-k, if vLLM is installed and has
the model's router; else from torch operators, as layer.py says.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from weave_moe import RoutingConfig
from weave_moe.bench import contestants
from weave_moe.bench.cells import Layer, Unsupported, Weights
from weave_moe.shapes import LayerShape

NAMES = ("vllm", "triton_kernels", "flashinfer", "deepgemm")


def fused_topk(
    logits: Tensor, routing: RoutingConfig, selection_bias: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Weights and ids by vLLM's kernels, as of 0.24; None for a router that they have not."""
    ops = import_module("vllm._custom_ops")
    logits, k = logits.float().contiguous(), routing.top_k
    chosen = routing.scoring == "topk_softmax"  # softmax, top-k and renormalising come to the same
    plain = routing.num_groups == 1 and selection_bias is None and routing.scaling_factor == 1
    if plain and (chosen or routing.scoring == "softmax"):
        size = len(logits), k
        weights = torch.empty(size, device=logits.device)
        ids, places = (torch.empty(size, dtype=torch.int32, device=logits.device) for _ in range(2))
        ops.topk_softmax(weights, ids, places, logits, chosen or routing.renormalize)
        return weights, ids
    if routing.scoring == "sigmoid" and routing.num_groups > 1 and selection_bias is not None:
        weights, ids = ops.grouped_topk(
            *(logits, routing.num_groups, routing.topk_groups, k, routing.renormalize),
            *(routing.scaling_factor, selection_bias.float(), 1),  # 1: sigmoid
        )
        return weights.float(), ids.int()
    return None


def here(name: str) -> contestants.Rival:
    """Raises Unsupported if its package is not installed."""
    rival = contestants.RIVALS[name]
    reason = contestants.installed(rival)
    if reason is not None:
        raise Unsupported(reason)
    return rival


def factories(name: str) -> Callable[..., Any]:
    """Of w13 and w2 for experts.py; with of_layer for layer.py."""

    def of_weights(w13: Tensor, w2: Tensor) -> Any:
        experts, hidden, inter = w2.shape
        # A plain layer; contestants take top-k from the ids.
        shape = LayerShape(hidden, inter, experts, 1, str(w13.dtype).removeprefix("torch."))
        return here(name).factory(Layer(shape), Weights(w13, w2))

    def of_layer(layer: Layer, w: Weights) -> Any:
        made = here(name).factory(layer, w)

        def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
            return made.call(x, ids, weights, logits)

        f.version, f.note, f.graphs = made.version, made.note, made.graphs
        f.activation = made.activation
        if contestants.installed(contestants.RIVALS["vllm"]) is None:
            f.topk = fused_topk
            f.note += "" if name == "vllm" else "; fused top-k of vLLM's where it has the router"
        return f

    of_weights.of_layer = of_layer
    return of_weights


RIVALS = {name: factories(name) for name in NAMES}
