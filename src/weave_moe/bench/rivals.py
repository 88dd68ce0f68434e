"""Other packages' experts, each as one small function that makes a contestant.

What each includes stands in its note. All start from ids and weights on the device, except where
the note says that it routes itself. Each is called as its own documentation has it; none is
patched. A package that is here in a version whose interface is another one raises, and its row says
what: such a row is no time, and no claim about the package.
"""

from __future__ import annotations

import contextlib
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from ..shapes import Activation
from .cells import Contestant, Layer, Unsupported, Weights

__all__ = [
    "deepgemm",
    "flashinfer",
    "liger",
    "transformers_batched",
    "transformers_grouped",
    "triton_kernels",
    "vllm",
]

DEEPGEMM_ROWS = 128
"""Rows that an expert's part is padded to, where the package does not say."""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _plain(layer: Layer, w: Weights, *, kinds: tuple[str, ...] = ("silu",)) -> None:
    """Raises Unsupported unless the layer is a gated MLP without anything around it."""
    plain = Activation(layer.activation.kind) == layer.activation
    if layer.activation.kind not in kinds or not plain:
        raise Unsupported(f"only for the activation {' or '.join(kinds)}, without a clamp")
    for has, what in (
        (w.b13 is not None or w.b2 is not None, "biases"),
        (layer.interleaved, "interleaved gate and up rows"),
        (layer.weight_on_input, "weights on the input"),
        (layer.skips, "empty slots"),
    ):
        if has:
            raise Unsupported(f"this way to call it does not take {what}")


def _transformers(layer: Layer, w: Weights, implementation: str) -> Any:
    """transformers' own experts of a Qwen3 MoE block, with these weights."""
    _plain(layer, w, kinds=("silu", "gelu"))
    modeling = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = import_module("transformers").Qwen3MoeConfig(
        hidden_size=layer.shape.hidden,
        moe_intermediate_size=layer.shape.intermediate,
        num_experts=layer.shape.experts,
        num_experts_per_tok=layer.shape.top_k,
        hidden_act=layer.activation.kind,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = modeling.Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(w.w13, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(w.w2, requires_grad=False)
    return experts


def transformers_grouped(layer: Layer, w: Weights) -> Contestant:
    """transformers' experts by grouped products."""
    experts = _transformers(layer, w, "grouped_mm")

    def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        y: Tensor = experts(x, ids, weights)
        return y

    note = "its grouped_mm experts: sort, gather, grouped_mm, activation, grouped_mm, sum"
    return Contestant(f, _version("transformers"), note)


def transformers_batched(layer: Layer, w: Weights) -> Contestant:
    """transformers' experts by batched products, for few tokens: each slot's weights are copied."""
    experts = _transformers(layer, w, "batched_mm")

    def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        size = ids.numel() * layer.shape.expert_bytes
        # Asked of the first call, which is as large as those that are captured.
        asking = x.is_cuda and not torch.cuda.is_current_stream_capturing()
        if asking and size > torch.cuda.mem_get_info(x.device)[0] / 2:
            raise Unsupported(f"it copies each slot's weights, here {size / 1e9:.0f} GB")
        y: Tensor = experts(x, ids, weights)
        return y

    note = "its batched_mm experts: a copy of each slot's weights, bmm, activation, bmm, sum"
    return Contestant(f, _version("transformers"), note)


def liger(layer: Layer, w: Weights) -> Contestant:
    """Liger's fused MoE, its forward pass alone."""
    _plain(layer, w)
    try:
        function = import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    except ImportError as error:
        raise Unsupported(f"this version has no fused MoE ({error})") from error

    def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        y: Tensor = function.apply(x, w.w13, w.w2, ids, weights)
        return y

    note = "its fused MoE, forward: sort, gathered product with SwiGLU, product, weighted sum"
    # It asks the device for the number of tiles, which a graph cannot.
    return Contestant(f, _version("liger-kernel"), note, graphs=False)


def vllm(layer: Layer, w: Weights) -> Contestant:
    """vLLM's fused experts, with its tuned tables where it has them for the GPU."""
    _plain(layer, w)
    fused = import_module("vllm.model_executor.layers.fused_moe").fused_experts
    config = import_module("vllm.config")

    # Newer versions look for the engine's settings.
    current = getattr(config, "set_current_vllm_config", None)
    settings = None if current is None else config.VllmConfig()

    def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        with contextlib.nullcontext() if current is None else current(settings):
            y: Tensor = fused(x, w.w13, w.w2, weights, ids)
        return y

    note = "fused_experts: align, Triton product, activation, Triton product, sum"
    return Contestant(f, _version("vllm"), note)


def _sorted_by_expert(package: Any, ids: Tensor, weights: Tensor, experts: int) -> Any:
    """triton_kernels' routing data, gather and scatter indices, of ids and weights [T, k]."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True).int()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(flat), dtype=torch.int32, device=ids.device)
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(counts[:1]).expand(len(flat)))
    tiles = package.compute_expt_data(counts, experts, len(flat))
    scales = weights.reshape(-1)[order]
    data = package.RoutingData(scales, counts, experts, ids.shape[1], tiles)
    gather = package.GatherIndx(src_indx=order, dst_indx=place)
    return data, gather, package.ScatterIndx(src_indx=place, dst_indx=order)


def triton_kernels(layer: Layer, w: Weights) -> Contestant:
    """OpenAI's triton_kernels; its SwiGLU adds 1 to the up half.

    It routes itself from logits, but where top-k is no power of two, for which its kernels do not
    compile: there it gets the ids and weights, and torch sorts the slots.
    """
    if layer.activation.kind != "silu" or layer.weight_on_input or layer.skips:
        raise Unsupported("only for SwiGLU, with weights on the output and no empty slots")
    act = layer.activation
    try:
        matmul = import_module("triton_kernels.matmul_ogs")
        package = import_module("triton_kernels.routing")
        routing = package.routing
        swiglu = import_module("triton_kernels.swiglu").swiglu_fn
    except ImportError as error:
        raise Unsupported(
            f"its interface here is another than matmul_ogs and routing ({error})"
        ) from error
    w13, b13, b2 = w.w13, w.b13, w.b2
    if not layer.interleaved:
        w13 = torch.stack(w13.chunk(2, dim=1), dim=2).reshape(w13.shape)
        b13 = None if b13 is None else torch.stack(b13.chunk(2, dim=1), dim=2).reshape(b13.shape)
    up, down = w13.transpose(1, 2), w.w2.transpose(1, 2)
    b13 = None if b13 is None else b13.float()
    b2 = None if b2 is None else b2.float()
    names = ("alpha", "limit")
    fused = matmul.FusedActivation(
        matmul.FnSpecs("swiglu", swiglu, names), (act.alpha, act.limit), 2
    )

    def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        top_k = ids.shape[1]
        if top_k & (top_k - 1):
            data, gather, scatter = _sorted_by_expert(package, ids, weights, len(up))
        elif logits is None:
            raise Unsupported("it routes from logits, and there are none")
        elif not layer.unit_weights:
            raise Unsupported(
                "it routes by a softmax over the top-k, and these weights do not add to 1"
            )
        else:
            data, gather, scatter = routing(logits, top_k)
        h = matmul.matmul_ogs(x, up, b13, data, gather_indx=gather, fused_activation=fused)
        y: Tensor = matmul.matmul_ogs(
            h, down, b2, data, scatter_indx=scatter, gammas=data.gate_scal
        )
        return y

    own = Activation("silu", alpha=act.alpha, limit=act.limit, up_offset=1.0)
    note = (
        "routing from logits (torch's sort of the slots where top-k is no power of two), product "
        "with SwiGLU (up + 1), product with weighted sum"
    )
    return Contestant(f, _version("triton_kernels"), note, activation=own)


def deepgemm(layer: Layer, w: Weights) -> Contestant:
    """DeepGEMM's bf16 grouped products over padded rows, with torch operators around them."""
    _plain(layer, w)
    if layer.shape.dtype != "bfloat16":
        raise Unsupported(f"it takes bfloat16, not {layer.shape.dtype}")
    package = import_module("deep_gemm")
    product = package.m_grouped_bf16_gemm_nt_contiguous
    asked = getattr(package, "get_mk_alignment_for_contiguous_layout", None)
    pad = int(asked()) if asked is not None else DEEPGEMM_ROWS
    experts, inter = layer.shape.experts, layer.shape.intermediate

    def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        k, hidden, slots = ids.shape[1], x.shape[1], ids.numel()
        # As many rows as padding may need, whatever the routing: a graph must not ask.
        rows = min(slots + experts * (pad - 1), slots * pad)
        rows = -(-rows // pad) * pad
        flat = ids.reshape(-1).long()
        order = torch.argsort(flat, stable=True)
        sorted_experts = flat[order]
        counts = torch.zeros(experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        ends = torch.cumsum((counts + pad - 1) // pad * pad, 0)
        starts = ends - (counts + pad - 1) // pad * pad
        before = torch.cumsum(counts, 0) - counts
        slot = torch.arange(slots, device=x.device)
        place = starts[sorted_experts] + slot - before[sorted_experts]
        gathered = x.new_empty(rows, hidden)
        gathered[place] = x[order // k]
        owner = torch.searchsorted(ends, torch.arange(rows, device=x.device), right=True)
        owner = torch.where(owner >= experts, -1, owner).int()
        h = x.new_empty(rows, 2 * inter)
        product(gathered, w.w13, h, owner)
        gate, up = h.chunk(2, dim=1)
        out = x.new_empty(rows, hidden)
        product(torch.nn.functional.silu(gate) * up, w.w2, out, owner)
        back = torch.empty_like(place).scatter_(0, order, place)
        picked = out[back].view(-1, k, hidden).float()
        return (picked * weights[:, :, None]).sum(dim=1).to(x.dtype)

    note = (
        "pad and gather, grouped product, SwiGLU, grouped product, sum: torch operators around it"
    )
    return Contestant(f, _version("deep_gemm"), note)


def flashinfer(layer: Layer, w: Weights) -> Contestant:
    """FlashInfer's CUTLASS fused MoE, with the tactics that its tuner finds for the first call."""
    _plain(layer, w)
    fused = import_module("flashinfer.fused_moe").cutlass_fused_moe
    autotune = import_module("flashinfer.autotuner").autotune
    half = layer.shape.intermediate
    w31 = torch.cat([w.w13[:, half:], w.w13[:, :half]], dim=1)  # up rows first
    tuned: set[int] = set()

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.empty_like(x)
        fused(x, ids, weights, w31, w.w2, x.dtype, [], output=y, tune_max_num_tokens=len(x))
        return y

    def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        if len(x) not in tuned:
            tuned.add(len(x))
            with autotune(True):
                run(x, ids, weights)
        return run(x, ids, weights)

    note = "cutlass_fused_moe: sort, products, SwiGLU, sum; tactics tuned on the first call"
    return Contestant(f, _version("flashinfer-python"), note)
