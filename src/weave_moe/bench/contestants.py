"""Our own contestants, torch's plain operators, and which others can be found here.

A factory makes a `Contestant` of a layer and one set of weights; it raises `Unsupported` where the
implementation is here but does not take the layer. `rivals` has the factories of other packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..backends import why_not
from ..host.workspace import Workspace
from ..layer import fused_experts
from ..reference import activate
from ..shapes import check_experts
from . import rivals
from .cells import Contestant, Layer, Unsupported, Weights

__all__ = ["RIVALS", "Found", "Rival", "find", "grouped", "make", "ours", "torch_eager"]

Factory = Callable[[Layer, Weights], Contestant]


def ours(policy: str, backend: str, workers: int | None = None) -> Factory:
    """This package's experts under a policy. workers: threads of the CPU engine."""

    def factory(layer: Layer, w: Weights) -> Contestant:
        workspace = Workspace(workers=workers) if backend == "host" else None
        options: dict[str, Any] = {
            "activation": layer.activation,
            "b13": w.b13,
            "b2": w.b2,
            "interleaved": layer.interleaved,
            "weight_on_input": layer.weight_on_input,
        }
        probe = w.w13.new_zeros(1, layer.shape.hidden)
        one = torch.ones(1, layer.shape.top_k, device=probe.device)
        call = check_experts(probe, w.w13, w.w2, one, one.int() - 1, **options)
        reason = why_not(backend, call)
        if reason is not None:
            raise Unsupported(reason)

        def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
            return fused_experts(
                *(x, w.w13, w.w2, weights, ids),
                **options,
                policy=policy,
                backend=backend,
                workspace=workspace,
            )

        return Contestant(f, __version__, "ids to output", ours=True)

    return factory


def torch_eager(layer: Layer, w: Weights) -> Contestant:
    """torch operators, expert by expert: what a model without any of these libraries runs."""

    def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in torch.bincount(ids[ids >= 0].long()).nonzero()[:, 0].tolist():
            t, j = torch.where(ids == e)
            rows, scale = x[t], weights[t, j][:, None]
            if layer.weight_on_input:
                rows = (rows * scale).to(x.dtype)
            h = rows @ w.w13[e].T
            if w.b13 is not None:
                h = h + w.b13[e]
            a = activate(h, layer.activation, interleaved=layer.interleaved)
            out = a.to(x.dtype) @ w.w2[e].T
            if w.b2 is not None:
                out = out + w.b2[e]
            y.index_add_(0, t, out.float() if layer.weight_on_input else out.float() * scale)
        return y.to(x.dtype)

    note = "a loop over experts: gather, matmul, activation, matmul, weighted sum"
    # It asks the device which experts are used, which a graph cannot.
    return Contestant(f, torch.__version__, note, graphs=False)


def grouped(layer: Layer, w: Weights) -> Contestant:
    """torch's grouped matrix products, with torch operators around them."""
    product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(
        torch, "_grouped_mm", None
    )
    if product is None:
        raise Unsupported("this torch has no grouped_mm")
    if layer.skips:
        raise Unsupported("empty slots")
    experts = layer.shape.experts
    up, down = w.w13.transpose(1, 2), w.w2.transpose(1, 2)

    def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, flat.long(), torch.ones_like(flat))
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        rows, scale = x[order // ids.shape[1]], weights.reshape(-1)[order][:, None]
        if layer.weight_on_input:
            rows = (rows * scale).to(x.dtype)
        h = product(rows, up, offs=offsets)
        if w.b13 is not None:
            h = h + w.b13[flat[order]]
        a = activate(h, layer.activation, interleaved=layer.interleaved).to(x.dtype)
        out = product(a, down, offs=offsets)
        if w.b2 is not None:
            out = out + w.b2[flat[order]]
        scaled = out.float() if layer.weight_on_input else out.float() * scale
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return y.index_add_(0, order // ids.shape[1], scaled).to(x.dtype)

    note = "sort, gather, grouped_mm, activation, grouped_mm, scatter: torch operators"
    return Contestant(f, torch.__version__, note)


@dataclass(frozen=True)
class Rival:
    """Another implementation.

    package: what to install for it, as its registry names it.  module: what is imported; its
    presence is what counts.  factory: makes a contestant.  cpu: whether it runs on a CPU too.
    """

    package: str
    module: str
    factory: Factory
    cpu: bool = False


RIVALS: Mapping[str, Rival] = {
    "torch-eager": Rival("torch", "torch", torch_eager, cpu=True),
    "torch-grouped_mm": Rival("torch", "torch", grouped, cpu=True),
    "transformers-grouped_mm": Rival(
        "transformers", "transformers", rivals.transformers_grouped, cpu=True
    ),
    "transformers-batched_mm": Rival(
        "transformers", "transformers", rivals.transformers_batched, cpu=True
    ),
    "liger": Rival("liger-kernel", "liger_kernel", rivals.liger),
    "vllm": Rival("vllm", "vllm", rivals.vllm),
    "triton_kernels": Rival("triton_kernels", "triton_kernels", rivals.triton_kernels),
    "deepgemm": Rival("deep_gemm", "deep_gemm", rivals.deepgemm),
    "flashinfer": Rival("flashinfer-python", "flashinfer", rivals.flashinfer),
}
"""By the name that `weave-moe bench --rivals` takes, in the order in which they are listed."""

CPU_RIVALS = ("torch-eager",)
"""Those that take part unasked on a CPU, and not on a GPU."""


@dataclass(frozen=True)
class Found:
    """What there is to compare with: names, and why each other one is not there."""

    rivals: tuple[str, ...]
    absent: Mapping[str, str]


def installed(rival: Rival) -> str | None:
    """Why a rival is not here, None if it is. Imports nothing."""
    try:
        here = util.find_spec(rival.module) is not None
    except (ImportError, ValueError):  # a package that hides itself, or half of one
        here = False
    if here:
        return None
    return f"{rival.package} is not installed"


def find(wanted: Sequence[str] | None, device: torch.device) -> Found:
    """The rivals that are here, of those wanted; None: of all, on a CPU of `CPU_RIVALS`.

    Raises ValueError for a name that is none.
    """
    for name in wanted or ():
        if name not in RIVALS:
            raise ValueError(f"rivals must be some of {', '.join(RIVALS)}; got {name!r}")
    on_cpu = device.type == "cpu"
    names = list(RIVALS) if wanted is None else list(dict.fromkeys(wanted))
    here: list[str] = []
    absent: dict[str, str] = {}
    for name in names:
        rival = RIVALS[name]
        reason = installed(rival)
        if reason is None and on_cpu and not rival.cpu:
            reason = "it needs a GPU"
        if reason is None and wanted is None and on_cpu != (name in CPU_RIVALS):
            reason = f"not on a {'CPU' if on_cpu else 'GPU'} unless --rivals names it"
        if reason is None:
            here.append(name)
        else:
            absent[name] = reason
    return Found(tuple(here), absent)


def make(factory: Factory, layer: Layer, sets: Sequence[Weights]) -> list[Contestant] | Exception:
    """A contestant for each set of weights, or the exception that making one gave."""
    try:
        return [factory(layer, weights) for weights in sets]
    except Exception as problem:  # what is installed may be broken in any way
        return problem
