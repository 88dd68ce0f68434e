"""The experts kernel: its configuration, its parameters, and the cache of compiled code.

The C++ side is device/config.h; both sides' sizes are compared when the kernel is compiled.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from ..schedule.granularity import CONTROL_BYTES, OWN_BYTES, KernelPlan
from . import nvrtc
from .cache import cached_file, discard
from .driver import TENSOR_MAP_BYTES, CudaError, Kernel, Library

__all__ = ["KernelConfig", "Launch", "kernel_for", "launch_maps"]

DEVICE: Final = Path(__file__).parents[1] / "device"
_SOURCE: Final = "experts.cu"
ROUTERS: Final = ("none", "logits", "same", "fp32")
"""What a launch routes its tokens from: given ids, logits, a router weight of x's type, of fp32."""

_ACTIVATIONS: Final = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}

ERRORS: Final = {
    1: "two launches used one workspace at the same time",
    2: "the tokens were not routed, or their slots not counted, in time",
    3: "a task waited too long for another one's result",
    4: "a stage of the shared-memory ring was not filled or freed in time",
}


class _PlanPointers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "groups",
            "expert_group",
            "expert_row",
            "expert_tokens",
            "row_slot",
            "slot_row",
            "totals",
        )
    ]


class _Shared(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in ("control", "queue", "up_done", "down_done", "up_parts", "down_parts")
        ],
        *[(name, ctypes.c_uint32) for name in ("workers", "max_groups", "experts", "spin_limit")],
    ]


class _Knobs(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("policy", "victim", "steal_one", "min_steal", "static_share", "batch")
    ]


class _Router(ctypes.Structure):
    """`weave::Router` and, within it, `weave::Routing` of device/route.h."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in (
                "weight",
                "gate",
                "logits",
                "bias",
                "selection_bias",
                "expert_map",
                "ids",
                "weights",
                "slots",
                "chosen",
                "chosen_weights",
                "sums",
                "partial",
                "state",
            )
        ],
        *[
            (name, ctypes.c_uint32)
            for name in ("scoring", "top_k", "renormalize", "groups", "kept_groups")
        ],
        ("scale", ctypes.c_float),
        *[
            (name, ctypes.c_uint32)
            for name in (
                "experts",
                "rows",
                "logits_kind",
                "bias_kind",
                "selection_kind",
                "parts",
            )
        ],
    ]


class Launch(ctypes.Structure):
    """`weave::Launch` of device/config.h, field for field."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in (
                "x",
                "ids",
                "weights",
                "valid",
                "expert_map",
                "b13",
                "b2",
                "residual",
                "out",
                "gathered",
                "h",
                "rows",
            )
        ],
        ("sums", ctypes.c_void_p),
        ("plan", _PlanPointers),
        ("chunk_tokens", ctypes.c_void_p),
        ("shared", _Shared),
        ("router", _Router),
        ("knobs", _Knobs),
        ("stats", ctypes.c_void_p),
        ("trace", ctypes.c_void_p),
        ("trace_clock", ctypes.c_void_p),
        ("host_error", ctypes.c_void_p),
        ("weight_hint", ctypes.c_uint64),
        ("hot_hint", ctypes.c_uint64),
        ("x_hint", ctypes.c_uint64),
        ("ring_limit_ns", ctypes.c_uint64),
        ("x_pitch", ctypes.c_int64),
        ("valid_offset", ctypes.c_int64),
        *[
            (name, ctypes.c_uint32)
            for name in (
                "ring_bytes",
                "tokens",
                "top_k",
                "experts",
                "experts_global",
                "hidden",
                "intermediate",
                "routed",
                "few_tokens",
                "chunks_up",
                "chunks_down",
                "parts_up",
                "parts_down",
                "up_blocks",
                "bias_step",
                "bias_up",
                "hold_down",
                "combine_tokens",
                "combine_slices",
                "slice",
                "call",
                "max_rows",
                "trace_tasks",
                "sort_chunks",
                "chunk_slots",
                "ids_wide",
                "weights_kind",
                "valid_wide",
            )
        ],
        *[(name, ctypes.c_float) for name in ("alpha", "limit", "up_offset")],
    ]


@cache
def _maps_type(count: int) -> type[ctypes.Structure]:
    size = count * TENSOR_MAP_BYTES
    return type("Maps", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_char * size)]})


def launch_maps(maps: list[bytes]) -> ctypes.Structure:
    """`weave::Maps`: w13, w2, both of the shared experts, activations and gathered rows by width,
    then stores by rows."""
    structure = _maps_type(len(maps))()
    ctypes.memmove(ctypes.addressof(structure), b"".join(maps), len(maps) * TENSOR_MAP_BYTES)
    return structure


def packed(*columns: int) -> bool:
    """Whether matrices of so many columns are read by boxes that hold all columns of a stage: they
    are whole blocks of 64."""
    return all(count % 64 == 0 for count in columns)


@dataclass(frozen=True)
class KernelConfig:
    """What is fixed when the kernel is compiled.

    dtype: "bfloat16" or "float16".  activation: a kind of `Activation`.  clamp: it has a limit.
    bias: either bias is given.  scale_x: the weight is on the input.  trace: tasks leave records.
    router: what the launch routes from, of `ROUTERS`.  router_keys: most experts of a lane that
    chooses.  shared: there are shared experts.
    packed_up, packed_down: hidden, intermediate (and the shared experts') are multiples of 64, so
    that one TMA box holds all columns of a stage.
    """

    tile_m: int
    tile_k: int
    width_cap: int
    many: bool
    split_k: bool
    dtype: str
    activation: str
    clamp: bool
    bias: bool
    scale_x: bool
    trace: bool
    router: str
    router_keys: int
    shared: bool
    packed_up: bool
    packed_down: bool

    @classmethod
    def of(
        cls,
        plan: KernelPlan,
        *,
        dtype: str,
        activation: str,
        clamp: bool,
        bias: bool,
        scale_x: bool = False,
        trace: bool = False,
        router: str = "none",
        router_experts: int = 0,
        hidden: int,
        intermediate: int,
        shared_intermediate: int = 0,
    ) -> KernelConfig:
        """The configuration for a plan and a layer."""
        return cls(
            plan.tile_m,
            plan.tile_k,
            plan.width_cap,
            plan.many,
            plan.parts_up > 1 or plan.parts_down > 1,
            dtype,
            activation,
            clamp,
            bias,
            scale_x,
            trace,
            router,
            next(n for n in (4, 8, 16, 32) if router == "none" or 32 * n >= router_experts),
            shared_intermediate > 0,
            packed(hidden),
            packed(intermediate, shared_intermediate),
        )

    def options(self) -> list[str]:
        """NVRTC's command line."""
        values = {
            "TILE_M": self.tile_m,
            "TILE_K": self.tile_k,
            "WIDTH_CAP": self.width_cap,
            "MANY": int(self.many),
            # Few slots: one look-up a lane is enough, and the code that runs once is shorter.
            "LOOK_AHEAD": 1 if self.tile_m == 64 else 8,
            "SPLIT_K": int(self.split_k),
            "BF16": int(self.dtype == "bfloat16"),
            "ACTIVATION": _ACTIVATIONS[self.activation],
            "CLAMP": int(self.clamp),
            "BIAS": int(self.bias),
            "SCALE_X": int(self.scale_x),
            "TRACE": int(self.trace),
            "ROUTER": ROUTERS.index(self.router),
            "ROUTER_KEYS": self.router_keys,
            "SHARED": int(self.shared),
            "OWN_BYTES": OWN_BYTES if self.router != "none" and not self.many else 0,
            "PACKED_UP": int(self.packed_up),
            "PACKED_DOWN": int(self.packed_down),
            "SMEM_BYTES": CONTROL_BYTES,
            "LAUNCH_BYTES": ctypes.sizeof(Launch),
            "ROUTER_STATE_BYTES": ROUTER_STATE_BYTES,
        }
        return [f"-DWEAVE_{name}={value}" for name, value in values.items()]

    def compile(self, *extra: str) -> tuple[bytes, str]:
        """The cubin and the compiler's log; `extra` are further options."""
        headers = device_sources()
        source = headers[_SOURCE]
        return nvrtc.compile_cubin(source, headers, [*self.options(), *extra])


@cache
def device_sources() -> dict[str, str]:
    """The device code's text by file name."""
    return {p.name: p.read_text() for p in sorted(DEVICE.iterdir()) if p.suffix in {".h", ".cu"}}


def hash_of(sources: dict[str, str]) -> str:
    """What tells one device code from another."""
    digest = hashlib.sha256()
    for name, text in sources.items():
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


@cache
def _source_hash() -> str:
    return hash_of(device_sources())


ROUTER_STATE_BYTES: Final = 256
SORT_THREADS: Final = 512
MAX_CHUNK_SLOTS: Final = 1 << 15
"""Most slots of a chunk: what a block of the sort has memory for."""

ROUTE_WARPS: Final = 8
ROUTE_TOKENS: Final = 32
ROUTE_ROWS: Final = 128
"""Of device/router.h: of a block of `weave_route`."""
COMBINE_WARPS: Final = 8
PIECE: Final = 256
"""Of device/many.h and device/combine.h: elements of a token that a warp of the combine adds up."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of a configuration. sort, combine and, if it routes, route: with many tokens."""

    experts: Kernel
    sort: Kernel | None = None
    combine: Kernel | None = None
    route: Kernel | None = None

    def prepare(self, device: int) -> None:
        """Loads the code on a device and allows its shared memory. Not during capture."""
        for kernel in (self.route, self.sort, self.experts, self.combine):
            if kernel is not None:
                kernel.prepare(device)


def sort_bytes(experts: int, chunk_slots: int, router_experts: int = 0) -> int:
    """Shared memory of a block of the sort: `SortMemory` in device/many.h.

    router_experts: that its warps choose among, 0 where they do not.
    """
    sorts = 2 * 8 * SORT_THREADS + 4 * experts + chunk_slots
    choices = SORT_THREADS // 32 * chooser_words(router_experts) if router_experts else 0
    return 4 * (SORT_THREADS // 16 + 256 + max(sorts, choices))


def chooser_words(experts: int) -> int:
    """Of device/router.h."""
    return 2 * experts + 65


_kernels: dict[tuple[KernelConfig, int], Kernels] = {}
_lock = threading.Lock()


def _load(config: KernelConfig, shared_bytes: int) -> Kernels:
    identity = [_source_hash(), nvrtc.ARCHITECTURE, nvrtc.version(), *config.options()]

    def compiled() -> bytes:
        return config.compile()[0]

    def load(path: Path) -> Kernels:
        library = Library(path.read_bytes())
        threads = config.tile_m // 64 * 128 + 128
        experts = library.kernel("weave_experts", shared_bytes=shared_bytes, threads=threads)
        if not config.many:
            return Kernels(experts)
        most = sort_bytes(1024, MAX_CHUNK_SLOTS)
        sort = library.kernel("weave_sort", shared_bytes=most, threads=SORT_THREADS)
        combine = library.kernel("weave_combine", shared_bytes=0, threads=32 * COMBINE_WARPS)
        route = None
        if config.router in ("same", "fp32"):
            threads = 32 * ROUTE_WARPS
            route = library.kernel("weave_route", shared_bytes=0, threads=threads)
        return Kernels(experts, sort, combine, route)

    path = cached_file("experts", identity, ".cubin", compiled)
    try:
        return load(path)
    # A damaged entry is made anew, once, and one that was cleared away before it was read.
    except (CudaError, FileNotFoundError):
        discard(path)
        return load(cached_file("experts", identity, ".cubin", compiled))


def kernel_for(config: KernelConfig, shared_bytes: int) -> Kernels:
    """The loaded kernels: compiled at first use, then from the disk cache.

    shared_bytes: dynamic shared memory that a block may have.
    """
    key = (config, shared_bytes)
    found = _kernels.get(key)
    if found is not None:
        return found
    with _lock:
        found = _kernels.get(key)
        if found is None:
            found = _load(config, shared_bytes)
            _kernels[key] = found
    return found
