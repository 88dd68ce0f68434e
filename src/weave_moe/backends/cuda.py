"""The experts kernel on an NVIDIA Hopper GPU (compute capability 9.0)."""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..routing import LayerCall, RoutingConfig
from ..runtime.buffers import (
    ROUTER_STATE_BYTES,
    BufferPool,
    Buffers,
    Needs,
    needs_of,
    plan_arrays,
    route_blocks,
    route_parts,
    slot_words,
    sums_bytes,
)
from ..runtime.driver import TENSOR_MAP_BYTES, capture_id, encode_tensor_map
from ..runtime.kernel import (
    COMBINE_WARPS,
    ERRORS,
    PIECE,
    KernelConfig,
    Kernels,
    Launch,
    kernel_for,
    launch_maps,
    packed,
    sort_bytes,
)
from ..schedule import POLICY_CODES, VICTIM_CODES, WINDOW_LIMIT
from ..schedule.granularity import FEW_TOKENS, MAX_SLOTS, KernelPlan, choose_kernel
from ..shapes import (
    Activation,
    ExpertsCall,
    LayerShape,
    SharedExperts,
    check_count,
    check_flag,
    dtype_name,
)

__all__ = [
    "BACKEND",
    "KernelError",
    "check",
    "plan_for",
    "slab_tokens",
    "take_trace",
    "unsupported",
    "warmup",
]

SLAB_TOKENS: Final = 16_384
SLAB_BYTES: Final = 5 << 30
"""Most tokens, and about the most bytes of rows, of one launch: larger calls run in slabs of equal
size, in the same buffers. Each slab reads the weights again (deepseek-v3 at 16,384 tokens: 5 ms of
22 with two slabs), so the bounds are wide."""

_SPIN_LIMIT: Final = 8_000_000  # about 4 s of polling
_RING_LIMIT_NS: Final = 20_000_000_000
_EVICT_FIRST: Final = 0x12F0000000000000
_EVICT_NORMAL: Final = 0x1000000000000000
_EVICT_LAST: Final = 0x14F0000000000000


class KernelError(RuntimeError):
    """A launch gave up: its output is NaN, and the device's buffers have been initialised again."""


@dataclass(frozen=True)
class _Device:
    index: int
    multiprocessors: int
    shared_bytes: int
    capability: tuple[int, int]
    name: str


@cache
def _device(index: int) -> _Device:
    properties = torch.cuda.get_device_properties(index)
    return _Device(
        index,
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", 232_448),
        (properties.major, properties.minor),
        properties.name,
    )


_calls = itertools.count(1)
_pools: dict[int, BufferPool] = {}
_pools_lock = threading.Lock()


def _pool(device: torch.device) -> BufferPool:
    index = device.index
    assert index is not None
    found = _pools.get(index)
    if found is None:
        with _pools_lock:
            found = _pools.setdefault(index, BufferPool(device))
    return found


_Dims = tuple[tuple[int, int, int], ...]


def _map_of(
    weight: Tensor, dtype: str, columns: int, rows: _Dims, blocks: int, packed: bool
) -> bytes:
    """A map of a weight: size, stride and box of each dimension of rows, the first of 8 rows. A box
    holds 64 columns or, packed, `blocks` such blocks after its 8 rows."""
    (first, *rest) = rows
    if packed:
        dims = [(64, 0, 64), first, (columns // 64, 64, blocks), *rest]
    else:
        dims = [(columns, 0, 64), first, *rest]
    sizes, strides, boxes = zip(*dims, strict=True)
    return encode_tensor_map(weight.data_ptr(), dtype, sizes, strides[1:], boxes)


_weight_maps: dict[tuple[Any, ...], tuple[bytes, bytes]] = {}


def _maps_of_weights(
    w13: Tensor,
    w2: Tensor,
    s: LayerShape,
    plan: KernelPlan,
    *,
    interleaved: bool,
    packed_down: bool,
) -> tuple[bytes, bytes]:
    """Maps of w13 and w2, made again when a weight lies elsewhere."""
    index = w13.device.index
    key = (
        w13.data_ptr(),
        w2.data_ptr(),
        index,
        s.hidden,
        s.intermediate,
        s.experts,
        s.dtype,
        s.gated,
        interleaved,
        packed_down,
        plan.tile_m,
        plan.tile_k,
    )
    found = _weight_maps.get(key)
    if found is not None:
        return found
    hidden, inter, experts, dtype = s.hidden, s.intermediate, s.experts, s.dtype
    blocks = plan.tile_k // 64
    # Gate and up alternate by 8 rows: a dimension of 2 between the 8 rows and the blocks of rows.
    # The last expert's last tile may reach past the tensor; there the map reads zeros.
    if not s.gated:
        rows: _Dims = ((8, hidden, 8), (experts * inter // 8, 8 * hidden, plan.tile_m // 8))
    elif interleaved:
        rows = (
            (8, 2 * hidden, 8),
            (2, hidden, 2),
            (experts * inter // 8, 16 * hidden, plan.tile_m // 16),
        )
    else:
        rows = (
            (8, hidden, 8),
            (2, inter * hidden, 2),
            (experts * inter // 4 - inter // 8, 8 * hidden, plan.tile_m // 16),
        )
    map13 = _map_of(w13, dtype, hidden, rows, blocks, packed(hidden))
    rows = ((8, inter, 8), (experts * hidden // 8, 8 * inter, plan.tile_m // 8))
    map2 = _map_of(w2, dtype, inter, rows, blocks, packed_down)
    if len(_weight_maps) > 4096:  # a server's layers fit; moving weights must not grow it for ever
        _weight_maps.clear()
    _weight_maps[key] = (map13, map2)
    return map13, map2


def slab_tokens(shape: LayerShape, shared: int = 0) -> int:
    """Most tokens of one launch; with `shared` slices of shared experts."""
    row_size = 2 if shape.dtype == "bfloat16" else 4
    slots = shape.top_k + shared
    token = slots * (shape.hidden * (row_size + 2) + shape.intermediate * 2)
    return min(SLAB_TOKENS, max(256, SLAB_BYTES // token))


def plan_for(
    shape: LayerShape, tokens: int, device: int = 0, *, router: bool = False, shared: int = 0
) -> KernelPlan:
    """The kernel that a call of `tokens` tokens would get on a GPU; `print` shows the reasons.

    router: the kernel routes them itself.  shared: slices of shared experts, each as wide as the
    routed experts.
    """
    return choose_kernel(
        tokens=min(tokens, slab_tokens(shape, shared)),
        top_k=shape.top_k,
        experts=shape.experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        shared_bytes=_device(device).shared_bytes,
        router=router,
        shared=shared,
    )


@cache
def most_few_tokens(shape: LayerShape, device: int, router: bool, shared: int) -> int:
    """Most tokens of a call that gets one launch; 0 where none does."""
    counts = range(FEW_TOKENS, 0, -1)
    plans = (plan_for(shape, n, device, router=router, shared=shared) for n in counts)
    return next((n for n, plan in zip(counts, plans, strict=False) if not plan.many), 0)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def shared_slices(shape: LayerShape, shared_intermediate: int) -> int:
    """Experts as wide as the routed ones that the shared experts are cut into."""
    return -(-shared_intermediate // shape.intermediate)


def _other_device(index: int) -> str | None:
    """Why the kernel does not run on that GPU, None if it does."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    device = _device(index)
    if device.capability != (9, 0):
        return (
            f"{device.name} has compute capability {device.capability[0]}."
            f"{device.capability[1]}, and the kernel is built for 9.0 (H100, H200, H20, GH200)"
        )
    return None


def _other_shape(s: LayerShape) -> str | None:
    """Why the kernel does not take layers of that shape, None if it does."""
    if s.dtype not in ("bfloat16", "float16"):
        return f"x is {s.dtype}; the kernel takes bfloat16 and float16"
    for name, size, what in (
        ("hidden", s.hidden, "x and the weights"),
        ("intermediate", s.intermediate, "the weights"),
    ):
        if size % 8:
            return (
                f"{name} is {size}; rows must be a multiple of 16 bytes, so of 8 elements: pad "
                f"{what} with zeros to {-(-size // 8) * 8}, or take backend='reference'"
            )
    if s.experts > 1024:
        return f"{s.experts} experts; at most 1,024"
    if s.top_k > 16:
        return f"top_k is {s.top_k}; at most 16"
    return None


_SCORINGS: Final = {name: i for i, name in enumerate(RoutingConfig.SCORINGS)}
_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _other_layer(s: LayerShape, router_experts: int, shared_intermediate: int) -> str | None:
    """Why one launch does not take router, experts and shared experts of such sizes, None if it
    does."""
    slices = shared_slices(s, shared_intermediate)
    if router_experts > 1024:
        return f"the router has {router_experts} experts; at most 1,024"
    if shared_intermediate % 8:
        return (
            f"the shared experts' intermediate size is {shared_intermediate}; it must be a "
            "multiple of 8"
        )
    if s.top_k + slices > MAX_SLOTS:
        return f"{s.top_k} experts and {slices} slices of shared ones a token; at most {MAX_SLOTS}"
    if s.experts + slices > 1024:
        return f"{s.experts} experts and {slices} slices of shared ones; at most 1,024"
    return None


def _other_router(call: LayerCall) -> str | None:
    """Why the kernel does not route as the call says, None if it does."""
    if call.routing.num_groups > 32:
        return f"{call.routing.num_groups} groups of experts; at most 32"
    weight, gate = call.router_weight, call.shared.gate if call.shared is not None else None
    for name, tensor in (("router_weight", weight), ("shared.gate", gate)):
        if tensor is None:
            continue
        if tensor.dtype not in (call.experts.x.dtype, torch.float32):
            return f"{name} is {dtype_name(tensor.dtype)}; it must be x's type or float32"
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            return f"{name} must be contiguous and start at a multiple of 16 bytes"
    if weight is not None and gate is not None and weight.dtype != gate.dtype:
        return "router_weight and shared.gate differ in type"
    for tensor in (call.router_logits, call.router_bias, call.selection_bias):
        if tensor is not None and not tensor.is_contiguous():
            return "the router's logits and biases must be contiguous"
    return None


def _other_shared(call: LayerCall) -> str | None:
    """Why the kernel does not take the call's shared experts, None if it does."""
    if call.shared is None:
        return None
    if call.experts.weight_on_input and call.shared.gate is not None:
        return "the weight is on the input, and the shared experts' gate on the output"
    for weight in (call.shared.w13, call.shared.w2):
        if not weight.is_contiguous() or weight.data_ptr() % 16:
            return "shared weights must be contiguous and start at a multiple of 16 bytes"
    return None


@dataclass(frozen=True)
class _Layer:
    """What a launch does besides the routed experts.

    router: of `ROUTERS`.  rows: of the router's weight, and the shared experts' gate.
    slices: of the shared experts.  weights, ids: where the router's result goes; empty for nowhere.
    """

    call: LayerCall
    router: str
    rows: int
    slices: int
    shared_intermediate: int
    weights: Tensor
    ids: Tensor

    @classmethod
    def of(cls, call: LayerCall, weights: Tensor, ids: Tensor) -> _Layer:
        shared = call.shared
        gate = None if shared is None else shared.gate
        factor = call.router_weight if call.router_weight is not None else gate
        router = "logits"
        if factor is not None:
            router = "same" if factor.dtype == call.experts.x.dtype else "fp32"
        inter = 0 if shared is None else shared.w2.size(1)
        return cls(
            call,
            router,
            (0 if call.router_weight is None else call.router_experts) + int(gate is not None),
            shared_slices(call.experts.shape, inter),
            inter,
            weights,
            ids,
        )

    @property
    def shared(self) -> SharedExperts | None:
        return self.call.shared

    def fill(self, p: Launch, piece: _Piece, buffers: Buffers) -> None:
        """The router's part of a launch's parameters; the others are known."""
        call, r, tokens, first = self.call, p.router, piece.tokens, piece.first
        routing, experts = call.routing, call.router_experts
        r.weight = _pointer(call.router_weight)
        r.gate = None if self.shared is None else _pointer(self.shared.gate)
        if call.router_logits is not None:
            size = call.router_logits.element_size()
            r.logits = call.router_logits.data_ptr() + first * experts * size
            r.logits_kind = _KINDS[call.router_logits.dtype]
        if call.router_bias is not None:
            r.bias, r.bias_kind = call.router_bias.data_ptr(), _KINDS[call.router_bias.dtype]
        if call.selection_bias is not None:
            r.selection_bias = call.selection_bias.data_ptr()
            r.selection_kind = _KINDS[call.selection_bias.dtype]
        r.expert_map = _pointer(call.experts.expert_map)
        words = tokens * p.top_k
        r.state = p.shared.control + piece.needs.counters - ROUTER_STATE_BYTES
        if piece.plan.many:
            r.parts = route_parts(tokens, p.hidden, self.rows, p.shared.workers)
            r.sums = buffers.router.data_ptr()  # read 16 bytes at a time
            r.ids = r.sums + sums_bytes(tokens, p.hidden, self.rows, r.parts)
            r.weights = r.ids + 4 * words
        else:
            r.slots = buffers.tagged.data_ptr()
            r.partial = r.slots + 8 * slot_words(words)
        if self.ids.numel():
            r.chosen = self.ids.data_ptr() + 4 * first * routing.top_k
            r.chosen_weights = self.weights.data_ptr() + 4 * first * routing.top_k
        r.scoring, r.top_k = _SCORINGS[routing.scoring], routing.top_k
        r.renormalize, r.scale = int(routing.renormalize), routing.scaling_factor
        r.groups, r.kept_groups = routing.num_groups, routing.topk_groups
        r.experts, r.rows = experts, self.rows
        # Not read where the launch routes: what stands for ids in such a call is none.
        p.ids, p.weights, p.ids_wide, p.weights_kind = None, None, 0, 0
        p.expert_map, p.experts_global = None, 0


class _Cuda:
    name = "cuda"

    def unavailable(self, call: ExpertsCall) -> str | None:
        if call.device.type != "cuda":
            return f"x is on {call.device}, not on a GPU"
        return _other_device(call.device.index or 0) or self._unsupported(call)

    def _unsupported(self, call: ExpertsCall) -> str | None:
        reason = _other_shape(call.shape)
        if reason is not None:
            return reason
        for name, weight in (("w13", call.w13), ("w2", call.w2)):
            if not weight.is_contiguous():
                return (
                    f"{name} has strides {weight.stride()}; it must be contiguous: pass "
                    f"{name}.contiguous(), made once"
                )
            if weight.data_ptr() % 16:
                return (
                    f"{name} does not start at a multiple of 16 bytes: pass {name}.clone(), made "
                    "once"
                )
        return None

    def experts(self, call: ExpertsCall) -> Tensor:
        with torch.cuda.device(call.device):
            check(call.device)
            return _run(call)

    def layer_unavailable(self, call: LayerCall) -> str | None:
        inter = 0 if call.shared is None else call.shared.w2.size(1)
        return (
            _other_layer(call.experts.shape, call.router_experts, inter)
            or _other_router(call)
            or _other_shared(call)
        )

    def layer(self, call: LayerCall, return_routing: bool) -> tuple[Tensor, Tensor, Tensor]:
        experts = call.experts
        with torch.cuda.device(experts.device):
            check(experts.device)
            # Zeros: rows past the valid ones are not routed, nor are all by a launch that gives up.
            shape = (experts.num_tokens if return_routing else 0, call.routing.top_k)
            weights = torch.zeros(shape, dtype=torch.float32, device=experts.device)
            ids = torch.zeros(shape, dtype=torch.int32, device=experts.device)
            return _run(experts, _Layer.of(call, weights, ids)), weights, ids


def unsupported(call: ExpertsCall) -> str | None:
    """Why the kernel does not take `call` on any GPU; None if it does. Asks nothing of a GPU."""
    return BACKEND._unsupported(call)


def _raise_if_failed(pool: BufferPool) -> None:
    code = int(pool.error[0])
    if code:
        pool.reset_all()
        raise KernelError(
            f"an earlier launch on {pool.device} gave up: {ERRORS.get(code, f'error {code}')}; its "
            "output was filled with NaN"
        )


def check(device: torch.device | int | None = None) -> None:
    """Raises KernelError if a launch on the device has given up since the last check.

    Does not wait: a launch still running is not looked at. Call torch.cuda.synchronize() first to
    include it. Where nothing was launched, or there is no GPU, there is nothing to raise.
    """
    if not _pools:
        return
    index = device.index if isinstance(device, torch.device) else device
    if index is None:
        index = torch.cuda.current_device()
    pool = _pools.get(index)
    if pool is not None:
        with torch.cuda.device(index):  # whose stream may be in a capture
            if capture_id(torch.cuda.current_stream().cuda_stream) is None:
                _raise_if_failed(pool)


_prepared: set[tuple[KernelConfig, int, int]] = set()


def _prepared_kernel(
    s: LayerShape,
    act: Activation,
    plan: KernelPlan,
    index: int,
    *,
    bias: bool,
    scale_x: bool,
    trace: bool = False,
    router: str = "none",
    router_experts: int = 0,
    shared_intermediate: int = 0,
    only_ready: bool,
) -> Kernels | None:
    """The kernels of a plan, loaded on a device; None if it is not and `only_ready`."""
    config = KernelConfig.of(
        plan,
        dtype=s.dtype,
        activation=act.kind,
        clamp=act.limit is not None,
        bias=bias,
        scale_x=scale_x,
        trace=trace,
        router=router,
        router_experts=router_experts,
        hidden=s.hidden,
        intermediate=s.intermediate,
        shared_intermediate=shared_intermediate,
    )
    shared = _device(index).shared_bytes
    key = (config, shared, index)
    if key in _prepared:
        return kernel_for(config, shared)
    if only_ready:
        return None
    kernels = kernel_for(config, shared)
    kernels.prepare(index)
    _prepared.add(key)
    return kernels


def _buffers_for(call: ExpertsCall, pool: BufferPool, stream: int, *, capturing: bool) -> Buffers:
    # A graph keeps its own: those of a workspace may be replaced by larger ones before a replay.
    if call.workspace is None or capturing:
        return pool.get(stream)
    held = getattr(call.workspace, "_cuda_buffers", None)
    if held is None:
        held = {}
        call.workspace._cuda_buffers = held
    index = call.device.index
    if index not in held:
        held[index] = pool.new()
    buffers: Buffers = held[index]
    return buffers


def _run(call: ExpertsCall, layer: _Layer | None = None) -> Tensor:
    out = call.output()
    residual = call.residual
    touched = [t for t in (call.x, residual, out) if t is not None]
    if any(t.data_ptr() % 16 for t in touched):  # views into the middle of a row of something
        aligned = replace(
            call,
            x=call.x.clone(),
            residual=None if residual is None else residual.clone(),
            out=torch.empty_like(out),
        )
        if layer is not None:
            layer = replace(layer, call=replace(layer.call, experts=aligned))
        return out.copy_(_run(aligned, layer))
    pool = _pool(call.device)
    stream = torch.cuda.current_stream().cuda_stream
    capturing = capture_id(stream) is not None
    buffers = _buffers_for(call, pool, stream, capturing=capturing)
    pieces = _pieces(call, layer, only_ready=capturing)
    with buffers.lock:
        for piece in pieces:  # before the first is launched: what grows is made anew
            buffers.fit(piece.needs)
        for piece in pieces:
            _launch(call, layer, out, piece, pool, buffers)
    return out


@dataclass(frozen=True)
class _Piece:
    """One launch of a call, or with many tokens those that make it: `tokens` tokens from `first`.

    few_tokens: not 0 where the device chooses between this piece and another one.
    """

    first: int
    tokens: int
    few_tokens: int
    plan: KernelPlan
    kernels: Kernels
    needs: Needs


def _pieces(call: ExpertsCall, layer: _Layer | None, *, only_ready: bool) -> list[_Piece]:
    """A slab after the other. Where the number of valid tokens is the device's to read and there is
    room for many, a piece for few goes before them, and one of both returns at once."""
    index = call.device.index or 0
    slices = 0 if layer is None else layer.slices
    slab = slab_tokens(call.shape, slices)
    slab = -(-call.num_tokens // max(1, -(-call.num_tokens // slab)))  # all of about one size
    plan = partial(plan_for, call.shape, device=index, router=layer is not None, shared=slices)
    parts = []
    for first in range(0, call.num_tokens, slab):
        tokens = min(slab, call.num_tokens - first)
        parts.append((first, tokens, plan(tokens)))
    few = 0
    # The records of a traced call are those of its last launch.
    if call.num_valid_tokens is not None and not _traced(call) and all(p.many for *_, p in parts):
        few = most_few_tokens(call.shape, index, layer is not None, slices)
        # Some numbers below it may not fit in one launch either (with very many experts).
        few = few if few < call.num_tokens else 0
    if few:
        parts.insert(0, (0, few, plan(few)))
    return [_piece(call, layer, *part, few, only_ready=only_ready) for part in parts]


def _piece(
    call: ExpertsCall,
    layer: _Layer | None,
    first: int,
    tokens: int,
    plan: KernelPlan,
    few_tokens: int,
    *,
    only_ready: bool,
) -> _Piece:
    s = call.shape
    index = call.device.index or 0
    slices = 0 if layer is None else layer.slices
    kernels = _prepared_kernel(
        s,
        call.activation,
        plan,
        index,
        bias=call.b13 is not None or call.b2 is not None,
        scale_x=call.weight_on_input,
        trace=_traced(call),
        router="none" if layer is None else layer.router,
        router_experts=0 if layer is None else layer.call.router_experts,
        shared_intermediate=0 if layer is None else layer.shared_intermediate,
        only_ready=only_ready,
    )
    if kernels is None:
        most = call.num_tokens
        what = f"call weave_moe.warmup(shape, tokens={most})"
        if layer is not None:
            what = f"call MoELayer.warmup({most}), or weave_moe.warmup with its router="
        raise RuntimeError(
            "the experts kernel for this shape is not loaded yet and cannot be during graph "
            f"capture; {what} before it"
        )
    needs = needs_of(
        plan,
        tokens=tokens,
        top_k=s.top_k + slices,
        experts=s.experts + slices,
        hidden=s.hidden,
        intermediate=s.intermediate,
        dtype=s.dtype,
        workers=_device(index).multiprocessors,
        gated=s.gated,
        scale_x=call.weight_on_input,
        router_rows=None if layer is None else layer.rows,
    )
    return _Piece(first, tokens, few_tokens, plan, kernels, needs)


def _launch(
    call: ExpertsCall,
    layer: _Layer | None,
    out: Tensor,
    piece: _Piece,
    pool: BufferPool,
    buffers: Buffers,
) -> None:
    p = Launch()
    _fill_tensors(p, call, out, piece.first)
    _fill_sizes(p, call, layer, piece)
    _fill_buffers(p, call, piece, buffers)
    _fill_knobs(p, call, piece)
    p.call = next(_calls) & 0xFFFF_FFFF
    p.host_error = pool.error.data_ptr()
    if layer is not None:
        layer.fill(p, piece, buffers)
    if _traced(call):
        _fill_trace(p, call, piece)
    maps = _maps(call, layer, piece.plan, buffers)
    kernels, workers = piece.kernels, p.shared.workers
    stream = torch.cuda.current_stream().cuda_stream
    if kernels.route is not None:
        blocks = route_blocks(piece.tokens, p.router.rows) * p.router.parts
        kernels.route.launch(blocks, stream, p)
    if kernels.sort is not None:
        size = sort_bytes(p.experts, p.chunk_slots, p.router.experts)
        kernels.sort.launch(workers, stream, p, shared=size)
    kernels.experts.launch(workers, stream, maps, p)
    if kernels.combine is not None:
        warps = piece.tokens * -(-p.hidden // PIECE)
        kernels.combine.launch(-(-warps // COMBINE_WARPS), stream, p)


def _fill_tensors(p: Launch, call: ExpertsCall, out: Tensor, first: int) -> None:
    """What the caller gave, from token `first` on."""
    s = call.shape
    p.x = call.x.data_ptr() + first * s.hidden * 2
    p.ids = call.topk_ids.data_ptr() + first * s.top_k * call.topk_ids.element_size()
    p.ids_wide = int(call.topk_ids.dtype == torch.int64)
    p.weights = call.topk_weights.data_ptr() + first * s.top_k * call.topk_weights.element_size()
    p.weights_kind = _KINDS[call.topk_weights.dtype]
    valid = call.num_valid_tokens
    p.valid, p.valid_offset = _pointer(valid), first
    p.valid_wide = int(valid is not None and valid.dtype == torch.int64)
    p.expert_map = _pointer(call.expert_map)
    p.experts_global = 0 if call.expert_map is None else call.expert_map.numel()
    p.b13, p.b2 = _pointer(call.b13), _pointer(call.b2)
    p.bias_step, p.bias_up = (2, 1) if call.interleaved else (1, s.intermediate)
    if call.residual is not None:
        p.residual = call.residual.data_ptr() + first * s.hidden * 2
    p.out = out.data_ptr() + first * s.hidden * 2
    p.stats = _pointer(getattr(call.workspace, "_cuda_stats", None))


def _fill_sizes(p: Launch, call: ExpertsCall, layer: _Layer | None, piece: _Piece) -> None:
    """The layer's sizes, and those of its tasks."""
    s, act, plan = call.shape, call.activation, piece.plan
    slices = 0 if layer is None else layer.slices
    p.tokens, p.few_tokens, p.top_k = piece.tokens, piece.few_tokens, s.top_k + slices
    p.experts, p.routed = s.experts + slices, s.experts
    p.hidden, p.intermediate, p.x_pitch = s.hidden, s.intermediate, s.hidden
    p.alpha, p.up_offset = act.alpha, act.up_offset
    p.limit = act.limit if act.limit is not None else 0.0
    p.chunks_up = -(-s.intermediate // plan.chunk_up(gated=s.gated))
    p.chunks_down = -(-s.hidden // plan.chunk_down)
    p.up_blocks = s.intermediate // (4 if s.gated and not call.interleaved else 8)
    # A K range has at least one stage's columns.
    p.parts_up = min(plan.parts_up, -(-s.hidden // plan.tile_k))
    p.parts_down = min(plan.parts_down, -(-s.intermediate // plan.tile_k))
    p.hold_down = int(plan.hold_down)
    p.combine_tokens, p.slice = plan.combine_tokens, plan.slice
    p.combine_slices = -(-s.hidden // plan.slice)
    p.ring_bytes = plan.ring_bytes
    # With evict-first weights 257 to 768 tokens of mixtral and 235b take 1 to 2 % longer.
    p.weight_hint, p.x_hint = (
        (_EVICT_NORMAL, _EVICT_NORMAL) if plan.many else (_EVICT_FIRST, _EVICT_LAST)
    )
    p.hot_hint = getattr(call.workspace, "_hot_hint", p.weight_hint)


def _fill_buffers(p: Launch, call: ExpertsCall, piece: _Piece, buffers: Buffers) -> None:
    """Memory between launches; the sizes are known."""
    plan, needs, workers = piece.plan, piece.needs, _device(call.device.index or 0).multiprocessors
    p.h, p.rows = buffers.h.data_ptr(), buffers.rows.data_ptr()
    p.max_rows = needs.h_rows - plan.width_cap
    p.sums = _pointer(buffers.sums) if needs.sums else None
    if plan.gathers or call.weight_on_input:
        p.gathered = buffers.gathered.data_ptr()
    if plan.many:
        p.chunk_slots = needs.chunk_tokens * p.top_k
        p.sort_chunks = -(-p.tokens // needs.chunk_tokens)
        at = buffers.plan.data_ptr()
        slots = p.tokens * p.top_k
        for name, words in plan_arrays(needs.groups, p.experts, slots, p.sort_chunks):
            setattr(p if name == "chunk_tokens" else p.plan, name, at)
            at += 4 * words
    shared = p.shared
    shared.control = buffers.counters.data_ptr()
    shared.queue = shared.control + 64
    shared.up_done = shared.queue + 24 * workers
    shared.down_done = shared.up_done + 4 * needs.groups
    shared.up_parts = shared.down_done + 4 * p.experts
    shared.down_parts = shared.up_parts + 4 * needs.groups * p.chunks_up
    shared.workers, shared.max_groups, shared.experts = workers, needs.groups, p.experts


def _fill_knobs(p: Launch, call: ExpertsCall, piece: _Piece) -> None:
    """The policy and its settings, and how long anything waits."""
    workspace, knobs, plan = call.workspace, p.knobs, piece.plan
    policy = plan.policy if call.policy == "auto" else call.policy
    tasks = piece.needs.groups * max(p.chunks_up * p.parts_up, p.chunks_down * p.parts_down)
    if policy in ("steal", "window") and tasks > WINDOW_LIMIT:
        policy = "counter"  # a queue's word has no room for their numbers; results are the same
    knobs.policy = POLICY_CODES[policy]
    knobs.victim = VICTIM_CODES[getattr(workspace, "victim", "largest")]
    knobs.steal_one = int(getattr(workspace, "steal", "half") == "one")
    knobs.min_steal = getattr(workspace, "min_steal", 1)
    knobs.static_share = getattr(workspace, "static_share", 70)
    knobs.batch = getattr(workspace, "batch", None) or plan.batch
    p.shared.spin_limit = getattr(workspace, "_spin_limit", _SPIN_LIMIT)
    p.ring_limit_ns = _RING_LIMIT_NS


def _fill_trace(p: Launch, call: ExpertsCall, piece: _Piece) -> None:
    """Room for the records of a launch, which the workspace holds."""
    assert call.workspace is not None
    workers = p.shared.workers
    tasks = piece.needs.groups * (p.chunks_up * p.parts_up + p.chunks_down * p.parts_down)
    tasks += 0 if piece.plan.many else -(-p.tokens // p.combine_tokens) * p.combine_slices
    # A block that runs alone takes all tasks; one of many takes about its share.
    p.trace_tasks = min(tasks, 8 * -(-tasks // workers) + 64)
    trace = _Trace(call.device, workers, p.trace_tasks)
    p.trace, p.trace_clock = trace.records.data_ptr(), trace.clock.data_ptr()
    call.workspace._cuda_trace = trace


def _maps(
    call: ExpertsCall, layer: _Layer | None, plan: KernelPlan, buffers: Buffers
) -> ctypes.Structure:
    """`weave::Maps` of a launch."""
    s = call.shape
    unused = [bytes(TENSOR_MAP_BYTES)]
    shared_inter = 0 if layer is None else layer.shared_intermediate
    packed_down = packed(s.intermediate, shared_inter)
    weights = _maps_of_weights(
        *(call.w13, call.w2, s, plan), interleaved=call.interleaved, packed_down=packed_down
    )
    shared_weights = (*unused, *unused)
    if layer is not None and layer.shared is not None:
        shared_weights = _maps_of_weights(
            layer.shared.w13,
            layer.shared.w2,
            replace(s, experts=1, top_k=1, intermediate=shared_inter),
            plan,
            interleaved=False,
            packed_down=packed_down,
        )
    gathered, store_h, store_rows = unused, unused, unused
    if plan.gathers or call.weight_on_input:
        gathered = buffers.row_maps(
            buffers.gathered, s.hidden, plan, s.dtype, packed=packed(s.hidden)
        )
    if plan.many:
        store_h = buffers.store_maps(
            buffers.h, s.intermediate, plan.chunk_up(gated=s.gated) // 2, s.dtype
        )
        store_rows = 4 * unused  # fp16: rows of fp32, stored without a map
        if s.dtype == "bfloat16":
            store_rows = buffers.store_maps(buffers.rows, s.hidden, plan.tile_m // 2, s.dtype)
    h = buffers.row_maps(buffers.h, s.intermediate, plan, s.dtype, packed=packed_down)
    return launch_maps([*weights, *shared_weights, *h, *gathered, *store_h, *store_rows])


TRACE_DTYPE: Final = np.dtype(
    [
        *[
            (name, "<i4")
            for name in ("worker", "sm", "stage", "expert", "group", "chunk", "part", "victim")
        ],
        *[(f"{name}_ns", "<i8") for name in ("claim", "wait", "load", "compute", "store", "end")],
    ]
)
"""One task of a launch on a GPU: `weave::TaskRecord` of device/trace.h, with times in nanoseconds
since the launch began; -1 where there is none."""


class _Trace:
    """The records of one launch, on the device."""

    def __init__(self, device: torch.device, workers: int, tasks: int) -> None:
        size = workers * tasks * TRACE_DTYPE.itemsize
        self.records = torch.full((size,), 255, dtype=torch.uint8, device=device)
        self.clock = torch.zeros(workers, 4, dtype=torch.int64, device=device)

    def read(self) -> npt.NDArray[Any]:
        """`TRACE_DTYPE` records of all tasks, by when they were claimed. Waits for the device."""
        if self.records.is_cuda:  # the launch may run on another stream than this thread's
            torch.cuda.synchronize(self.records.device)
        found = self.records.cpu().numpy().view(TRACE_DTYPE)
        clock = self.clock.cpu().numpy()
        found = found[found["worker"] >= 0].copy()
        ran = clock[:, 0] > 0
        # The timer counts from 1970: only differences of it are exact in floating point.
        began = clock[ran, 0].min() if ran.any() else 0
        timer0, clock0, timer1, clock1 = (clock[found["worker"], i] for i in range(4))
        # An SM's clock runs at one rate during a launch; its own two ends give the rate.
        rate = (timer1 - timer0) / np.maximum(clock1 - clock0, 1)
        for name in TRACE_DTYPE.names or ():
            if name.endswith("_ns"):
                at = found[name]
                time = (timer0 - began) + (at - clock0) * rate
                found[name] = np.where(at < 0, -1, np.rint(time).astype(np.int64))
        ordered: npt.NDArray[Any] = found[np.argsort(found["claim_ns"], kind="stable")]
        return ordered


def _traced(call: ExpertsCall) -> bool:
    return bool(getattr(call.workspace, "trace", False))


def take_trace(workspace: Any) -> npt.NDArray[Any]:
    """The records of the last launch that used the workspace, which must be one with trace=True.

    A call of more tokens than one launch takes leaves those of its last launch. Waits for the
    device. Raises ValueError where there is no record.
    """
    trace = getattr(workspace, "_cuda_trace", None)
    if trace is None:
        raise ValueError(
            "workspace must be one with trace=True that a call on a GPU has used; it has no record"
        )
    records: npt.NDArray[Any] = trace.read()
    return records


def warmup(
    shape: LayerShape,
    tokens: int,
    *,
    activation: str | Activation = "silu",
    bias: bool = False,
    weight_on_input: bool = False,
    router: str | None = None,
    router_experts: int | None = None,
    shared_intermediate: int = 0,
    device: int | None = None,
) -> None:
    """Compiles (or reads from the cache) and loads every kernel that calls of up to `tokens` tokens
    can need, so that later calls, and graph captures, compile and load nothing.

    shape: the layer's sizes.  tokens: largest T.  activation: as in `fused_experts`.  bias: whether
    b13 or b2 will be given.  weight_on_input: as in `fused_experts`.  device: the GPU's index, by
    default the current one.

    For `moe_layer`: router, the type of router_weight or, where router_logits will be given, of the
    shared experts' gate, x's or "float32"; "logits" where these are given and there is no gate;
    None for `fused_experts`.  router_experts: E of the router
    where an expert_map will be given, else it is shape's.  shared_intermediate: Is of the shared
    experts, 0 where there are none. `MoELayer.warmup` fills all of it in.

    Raises TypeError or ValueError, naming the argument, for a layer that the kernel does not take;
    RuntimeError where there is no GPU that it runs on, and during graph capture.
    """
    if not isinstance(shape, LayerShape):
        raise TypeError(f"shape must be a LayerShape, got {type(shape).__name__}")
    check_count("tokens", tokens)
    check_flag("bias", bias)
    check_flag("weight_on_input", weight_on_input)
    check_count("shared_intermediate", shared_intermediate, 0)
    if router_experts is not None:
        check_count("router_experts", router_experts)
    act = Activation.parse(activation)
    kinds = {None: "none", "logits": "logits", "float32": "fp32", shape.dtype: "same"}
    if router not in kinds:
        raise ValueError(
            f'router must be None, "logits", "float32" or "{shape.dtype}", as shape is, '
            f"got {router!r}"
        )
    if shared_intermediate and router is None:
        raise ValueError("router must not be None with shared experts: they belong to moe_layer")
    reason = _other_shape(shape)
    if reason is not None:
        raise ValueError(f"shape must be one that the kernel takes: {reason}")
    experts = shape.experts if router_experts is None else router_experts
    reason = None if router is None else _other_layer(shape, experts, shared_intermediate)
    if reason is not None:
        raise ValueError(
            f"router must be None for a layer that is put together from parts: {reason}"
        )
    if act.gated != shape.gated:
        wanted = "a gate" if shape.gated else "no gate"
        raise ValueError(f"activation must have {wanted}, as shape says, got {act.kind}")
    if not torch.cuda.is_available():
        raise RuntimeError("there is nothing to warm up: torch sees no GPU")
    index = torch.cuda.current_device() if device is None else device
    reason = _other_device(index)
    if reason is not None:
        raise RuntimeError(f"there is nothing to warm up: {reason}")
    with torch.cuda.device(index):
        _pool(torch.device("cuda", index))
        # Asked for its other effect, too: a thread that is new to the device gets its context.
        if capture_id(torch.cuda.current_stream().cuda_stream) is not None:
            raise RuntimeError("warmup loads code, which cannot be done during graph capture")
        slices = shared_slices(shape, shared_intermediate)
        for count in range(1, min(tokens, slab_tokens(shape, slices)) + 1):
            plan = plan_for(shape, count, index, router=router is not None, shared=slices)
            _prepared_kernel(
                shape,
                act,
                plan,
                index,
                bias=bias,
                scale_x=weight_on_input,
                router=kinds[router],
                router_experts=experts,
                shared_intermediate=shared_intermediate,
                only_ready=False,
            )


BACKEND: Final = _Cuda()
