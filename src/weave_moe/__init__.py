"""Weave-MoE: a Mixture-of-Experts layer cut into micro-tasks that idle workers steal.

    y = weave_moe.fused_experts(x, w13, w2, topk_weights, topk_ids)
    y = weave_moe.moe_layer(x, w13, w2, router_weight=r, routing=weave_moe.RoutingConfig(top_k=8))
    layer = weave_moe.MoELayer.from_transformers(block)

Public names load on first use, so that importing the package costs next to nothing and touches no
GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .backends.cuda import KernelError, check, warmup
    from .host.workspace import Workspace
    from .integrations.fuse import optimize
    from .layer import MoELayer, fused_experts, moe_layer, workspace_bytes
    from .routing import RoutingConfig, route, router_logits
    from .shapes import POLICIES, Activation, LayerShape, SharedExperts

__all__ = [
    "POLICIES",
    "Activation",
    "KernelError",
    "LayerShape",
    "MoELayer",
    "RoutingConfig",
    "SharedExperts",
    "Workspace",
    "__version__",
    "check",
    "fused_experts",
    "moe_layer",
    "optimize",
    "route",
    "router_logits",
    "warmup",
    "workspace_bytes",
]

_HOME = {
    "Activation": "shapes",
    "KernelError": "backends.cuda",
    "LayerShape": "shapes",
    "MoELayer": "layer",
    "POLICIES": "shapes",
    "RoutingConfig": "routing",
    "SharedExperts": "shapes",
    "Workspace": "host.workspace",
    "check": "backends.cuda",
    "fused_experts": "layer",
    "moe_layer": "layer",
    "optimize": "integrations.fuse",
    "route": "routing",
    "router_logits": "routing",
    "warmup": "backends.cuda",
    "workspace_bytes": "layer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
