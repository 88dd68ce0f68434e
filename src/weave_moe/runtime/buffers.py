"""Device memory of launches: buffers for each stream or graph, grown when a call needs more.

All of it comes from torch's allocator on the stream it is used on. Within a capture it comes from
the graph's pool, and the zeroing of the counters is recorded in the graph.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..schedule import max_groups, max_rows
from ..schedule.granularity import KernelPlan
from .driver import capture_id, encode_tensor_map
from .kernel import MAX_CHUNK_SLOTS, ROUTE_ROWS, ROUTE_TOKENS, ROUTER_STATE_BYTES

__all__ = [
    "ROUTER_STATE_BYTES",
    "BufferPool",
    "Buffers",
    "Needs",
    "control_bytes",
    "needs_of",
    "plan_arrays",
]

_CONTROL: Final = 64  # sizeof(weave::Control), rounded up
_STAGES: Final = 3
MAX_CHUNKS: Final = 256  # that a worker may come to hold: device/many.h
_STORE_ROWS: Final = (64, 32, 16, 8)
_HELD: Final = ("_zeroed", "h", "rows", "gathered", "plan", "sums", "router")


@dataclass(frozen=True)
class Needs:
    """Sizes of one launch's buffers.

    counters: bytes that must be zero before the first launch.  h_rows: rows of activations [I] and
    of down rows [H].  plan: bytes of the plan of many tokens, else 0.  chunk_tokens: tokens that a
    chunk of the sort holds, else 0.  router: with many tokens, bytes of slots' ids and weights and
    of sums that logits are made from.  tagged: bytes of the words that the router of few tokens
    hands on; they carry their launch's number and start at zero.
    """

    counters: int
    groups: int
    h_rows: int
    h_bytes: int
    row_bytes: int
    gathered_bytes: int
    plan: int
    chunk_tokens: int
    sums: int
    router: int
    tagged: int


def control_bytes(workers: int, groups: int, experts: int) -> int:
    """Control, queues and dependency counters, in that order."""
    return _CONTROL + 8 * _STAGES * workers + 4 * (groups + experts)


def plan_arrays(groups: int, experts: int, slots: int, chunks: int) -> tuple[tuple[str, int], ...]:
    """The plan of many tokens: its arrays in order, each with its words, multiples of 4.

    chunk_tokens is the sort's own, 16 bits for each chunk and expert.
    """
    words = (
        ("chunk_tokens", chunks * -(-experts // 8) * 4),
        ("groups", 4 * groups),
        ("expert_group", experts + 1),
        ("slot_row", slots),
        ("totals", 4),
    )
    return tuple((name, -(-size // 4) * 4) for name, size in words)


def needs_of(
    plan: KernelPlan,
    *,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
    dtype: str,
    workers: int,
    gated: bool = True,
    scale_x: bool = False,
    router_rows: int | None = None,
) -> Needs:
    """What a launch of at most `tokens` tokens needs, for any routing.

    top_k, experts: with those of the shared experts.  router_rows: rows of the router's weight
    and the shared experts' gate; None where ids are given.
    """
    slots = tokens * top_k
    groups = max_groups(slots, experts, plan.width_cap)
    # TMA reads a whole group's width from its first row: never past the last row.
    rows = max_rows(slots, experts) + plan.width_cap
    row_bytes = rows * hidden * (2 if dtype == "bfloat16" else 4)
    plan_bytes = chunk_tokens = 0
    if plan.many:
        # A chunk for each worker, so that all of them gather, if its slots fit their memory.
        chunk_tokens = max(1, -(-tokens // min(workers, MAX_CHUNKS)))
        chunk_tokens = min(chunk_tokens, MAX_CHUNK_SLOTS // top_k)
        chunks = -(-tokens // chunk_tokens)
        plan_bytes = 4 * sum(size for _, size in plan_arrays(groups, experts, slots, chunks))
    router = tagged = 0
    if router_rows is not None and plan.many:
        ranges = route_parts(tokens, hidden, router_rows, workers)
        router = 8 * slots + sums_bytes(tokens, hidden, router_rows, ranges)
    elif router_rows is not None:
        tagged = 8 * (slot_words(slots) + tokens * logit_sums(hidden) * -(-router_rows // 4) * 4)
    sums = parts = 0
    if plan.parts_up > 1 or plan.parts_down > 1:
        tiles_up = groups * -(-intermediate // plan.chunk_up(gated=gated))
        tiles_down = groups * -(-hidden // plan.chunk_down)
        blocks = tiles_up * plan.parts_up + tiles_down * plan.parts_down
        sums = 4 * blocks * plan.tile_m * plan.width_cap
        parts = tiles_up + tiles_down
    return Needs(
        -(-(control_bytes(workers, groups, experts) + 4 * parts) // 128) * 128 + ROUTER_STATE_BYTES,
        groups,
        rows,
        rows * intermediate * 2,
        row_bytes,
        rows * hidden * 2 if plan.gathers or scale_x else 0,
        plan_bytes,
        chunk_tokens,
        sums,
        router,
        tagged,
    )


def slot_words(slots: int) -> int:
    """Tagged words of the slots, before those of partial logits: two a slot, whole sectors."""
    return -(-2 * slots // 4) * 4


def route_blocks(tokens: int, rows: int) -> int:
    """Blocks of `weave_route` for a range of columns."""
    return -(-tokens // ROUTE_TOKENS) * -(-rows // ROUTE_ROWS)


def route_parts(tokens: int, hidden: int, rows: int, workers: int) -> int:
    """Ranges of columns that `weave_route` gives blocks of their own: two blocks an SM, or one."""
    blocks = max(1, route_blocks(tokens, rows))
    return min(logit_sums(hidden), max(1, 2 * workers // blocks))


def sums_bytes(tokens: int, hidden: int, rows: int, parts: int) -> int:
    """Of what `weave_route` leaves: sums of the first range of columns, and of each segment behind;
    a token's rows are a multiple of 16 bytes."""
    kept = 1 + logit_sums(hidden) - logit_sums(hidden) // parts
    return 16 * tokens * kept * -(-rows // 4)


def logit_sums(hidden: int) -> int:
    """Sums that a logit is made from: one for each SEGMENT columns (device/router.h)."""
    return -(-hidden // 256)


class Buffers:
    """The memory that one launch at a time may use, and the tensor maps into it.

    lock: held from `fit` until the launch, so that no other thread replaces memory in between.
    """

    def __init__(self, device: torch.device, *, captured: bool = False) -> None:
        self.device = device
        self.lock = threading.Lock()
        self._captured = captured
        self.counters: Tensor = torch.empty(0, dtype=torch.uint8, device=device)
        self.tagged = self._zeroed = self.counters  # _zeroed: both, one behind the other
        self.h = self.rows = self.gathered = self.plan = self.sums = self.router = self.counters
        self._maps: dict[tuple[int, ...], list[bytes]] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    def fit(self, needs: Needs) -> None:
        """Grows what is too small, for use on the current stream.

        Counters are zero when new, and with them the tagged words, since launches are numbered by
        a counter: neither is ever renewed alone. h and the gathered rows are zero when new as well,
        because their padding is read (and ignored) before anything is written there; a graph would
        zero them at every replay, and goes without.
        """
        stream = torch.cuda.current_stream(self.device)
        self._streams.setdefault(stream.cuda_stream, stream)
        rows_zeroed = not self._captured
        if self.counters.numel() < needs.counters or self.tagged.numel() < needs.tagged:
            counters, tagged = (
                -(-max(old.numel(), new) // 256) * 256
                for old, new in ((self.counters, needs.counters), (self.tagged, needs.tagged))
            )
            self._renew("_zeroed", counters + tagged, zeroed=True)
            self.counters, self.tagged = self._zeroed[:counters], self._zeroed[counters:]
        self._grow("h", needs.h_bytes, zeroed=rows_zeroed)
        self._grow("gathered", needs.gathered_bytes, zeroed=rows_zeroed)
        self._grow("rows", needs.row_bytes)
        self._grow("sums", needs.sums)
        self._grow("plan", needs.plan)
        self._grow("router", needs.router)
        if len(self._streams) > 1 and not self._captured:
            # The allocator knows of the stream that memory was made on; this is another, perhaps.
            for name in _HELD:
                getattr(self, name).record_stream(stream)

    def _grow(self, name: str, size: int, *, zeroed: bool = False) -> None:
        old: Tensor = getattr(self, name)
        if old.numel() < size:
            self._renew(name, size, zeroed=zeroed)

    def _renew(self, name: str, size: int, *, zeroed: bool) -> None:
        make = torch.zeros if zeroed else torch.empty
        setattr(self, name, make(size, dtype=torch.uint8, device=self.device))
        self._maps.clear()

    def reset(self) -> None:
        """Back to the initial state, after a launch that gave up."""
        self._zeroed.zero_()

    def row_maps(
        self, tensor: Tensor, columns: int, plan: KernelPlan, dtype: str, *, packed: bool
    ) -> list[bytes]:
        """Maps of h or the gathered rows, [rows, columns], for each width: a box holds a group's
        rows and 64 columns or, packed, all columns of a stage."""
        rows = min(tensor.numel() // (2 * columns), 2**31 - 1)
        key = (tensor.data_ptr(), plan.tile_k, plan.width_cap, columns, dtype == "bfloat16", packed)
        found = self._maps.get(key)
        if found is None:
            dims = (64, rows, columns // 64) if packed else (columns, rows)
            strides = (columns, 64) if packed else (columns,)
            depth = (plan.tile_k // 64,) if packed else ()
            boxes = [(64, width, *depth) for width in range(8, plan.width_cap + 1, 8)]
            found = [encode_tensor_map(tensor.data_ptr(), dtype, dims, strides, b) for b in boxes]
            self._maps[key] = found
        return found

    def store_maps(self, tensor: Tensor, columns: int, width: int, dtype: str) -> list[bytes]:
        """Maps to store tiles of many tokens by: `width` columns of h or of down rows."""
        rows = min(tensor.numel() // (2 * columns), 2**31 - 1)
        key = (tensor.data_ptr(), width, columns, dtype == "bfloat16")
        found = self._maps.get(key)
        if found is None:
            found = [
                encode_tensor_map(
                    tensor.data_ptr(),
                    dtype,
                    (columns, rows),
                    (columns,),
                    (width, count),
                    swizzle=2 * width,
                )
                for count in _STORE_ROWS
            ]
            self._maps[key] = found
        return found


class BufferPool:
    """The buffers of one device, by stream; a capture has its own while its stream is in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Pinned, so that a kernel that gives up can say so without anybody waiting for it.
        self.error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._eager: dict[int, Buffers] = {}
        self._capture: dict[int, tuple[int, Buffers]] = {}
        self._all: weakref.WeakSet[Buffers] = weakref.WeakSet()

    def get(self, stream: int) -> Buffers:
        """The buffers for a launch on a stream, now."""
        capture = capture_id(stream)
        if capture is None:
            self._capture.pop(stream, None)  # over: the graph holds the memory that it needs
            found = self._eager.get(stream)
            if found is None:
                found = self._eager[stream] = self.new()
            return found
        held = self._capture.get(stream)
        if held is None or held[0] != capture:
            # The graph replays its own zeroing; its memory is the graph's pool's, not ours.
            held = self._capture[stream] = (capture, Buffers(self.device, captured=True))
        return held[1]

    def new(self) -> Buffers:
        """Eager buffers that no stream is bound to yet; `reset_all` will find them."""
        buffers = Buffers(self.device)
        self._all.add(buffers)
        return buffers

    def reset_all(self) -> None:
        """After an error: every eager counter of the device back to zero (graphs zero their own).
        Waits for the device, so it must not run while another thread captures."""
        self.error.zero_()  # first: a launch that is refused meanwhile says so again
        for buffers in list(self._all):
            with buffers.lock:  # no launch of another thread between its fit and its start
                torch.cuda.synchronize(self.device)  # those that started since are through
                buffers.reset()
                # The zeroing is on this stream, the next launch on any.
                torch.cuda.synchronize(self.device)
