"""Device memory of launches: buffers for each stream or graph, grown when a call needs more.

All of it comes from torch's allocator on the stream it is used on. Within a capture it comes from
the graph's pool, and the zeroing of the counters is recorded in the graph.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..schedule.granularity import KernelPlan
from .driver import capture_id, encode_tensor_map

__all__ = ["BufferPool", "Buffers", "Needs", "control_bytes", "needs_of"]

_CONTROL: Final = 64  # sizeof(weave::Control), rounded up
_STAGES: Final = 3
_WARPS: Final = 12


@dataclass(frozen=True)
class Needs:
    """Sizes of one launch's buffers.

    counters: bytes that must be zero before the first launch.  h_rows: rows of activations [I] and
    of down rows [H].  plan: bytes of a plan in global memory, 0 with a local one.
    """

    counters: int
    groups: int
    h_rows: int
    h_bytes: int
    row_bytes: int
    gathered_bytes: int
    plan: int
    sums: int
    part_counts: int


def control_bytes(workers: int, groups: int, experts: int) -> int:
    """Control, queues and dependency counters, in that order."""
    return _CONTROL + 8 * _STAGES * workers + 4 * (groups + experts)


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
) -> Needs:
    """What a launch of at most `tokens` tokens needs, for any routing."""
    slots = tokens * top_k
    touched = min(experts, slots)
    groups = touched + slots // plan.width_cap
    # TMA reads a whole group's width from its first row: never past the last row.
    rows = slots + 15 * touched + plan.width_cap
    row_bytes = rows * hidden * (2 if dtype == "bfloat16" else 4)
    plan_bytes = 0
    if not plan.local_plan:
        words = (
            4 * groups
            + (experts + 1)
            + 2 * experts
            + rows
            + slots
            + 4
            + 2
            + 2 * 16
            + _WARPS * experts
        )
        plan_bytes = 4 * words
    sums = parts = 0
    if plan.parts_up > 1 or plan.parts_down > 1:
        tiles_up = groups * -(-intermediate // plan.chunk_up)
        tiles_down = groups * -(-hidden // plan.chunk_down)
        blocks = tiles_up * plan.parts_up + tiles_down * plan.parts_down
        sums = 4 * blocks * plan.tile_m * plan.width_cap
        parts = tiles_up + tiles_down
    return Needs(
        control_bytes(workers, groups, experts) + 4 * parts,
        groups,
        rows,
        rows * intermediate * 2,
        row_bytes,
        rows * hidden * 2 if plan.gathered_first else 0,
        plan_bytes,
        sums,
        parts,
    )


class Buffers:
    """The memory that one launch at a time may use, and the tensor maps into it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counters: Tensor = torch.empty(0, dtype=torch.uint8, device=device)
        self.h = self.rows = self.gathered = self.plan = self.sums = self.counters
        self._maps: dict[tuple[int, ...], list[bytes]] = {}

    def fit(self, needs: Needs) -> None:
        """Grows what is too small. Counters are zeroed when new; so is h, whose padding rows are
        read (and ignored) before anything is written there."""
        if self.counters.numel() < needs.counters:
            self.counters = torch.zeros(needs.counters, dtype=torch.uint8, device=self.device)
        if self.h.numel() < needs.h_bytes:
            self.h = torch.zeros(needs.h_bytes, dtype=torch.uint8, device=self.device)
            self._maps.clear()
        if self.gathered.numel() < needs.gathered_bytes:
            self.gathered = torch.zeros(needs.gathered_bytes, dtype=torch.uint8, device=self.device)
            self._maps.clear()
        if self.rows.numel() < needs.row_bytes:
            self.rows = torch.empty(needs.row_bytes, dtype=torch.uint8, device=self.device)
        if self.sums.numel() < needs.sums:
            self.sums = torch.empty(needs.sums, dtype=torch.uint8, device=self.device)
        if self.plan.numel() < needs.plan:
            self.plan = torch.empty(needs.plan, dtype=torch.uint8, device=self.device)

    def reset(self) -> None:
        """Back to the initial state, after a launch that gave up."""
        self.counters.zero_()

    def row_maps(
        self, tensor: Tensor, columns: int, plan: KernelPlan, rows: int, dtype: str
    ) -> list[bytes]:
        """Maps of h or the gathered rows, [rows, columns], for each width: a box holds a group's
        rows and the columns of a stage."""
        key = (tensor.data_ptr(), plan.tile_k, plan.width_cap, columns, rows, dtype == "bfloat16")
        found = self._maps.get(key)
        if found is None:
            pointer, blocks = tensor.data_ptr(), plan.tile_k // 64
            found = []
            for width in range(8, plan.width_cap + 1, 8):
                if columns % 64 == 0:
                    dims, strides, box = (
                        (64, rows, columns // 64),
                        (columns, 64),
                        (64, width, blocks),
                    )
                    found.append(encode_tensor_map(pointer, dtype, dims, strides, box))
                else:
                    shape = (columns, rows)
                    found.append(encode_tensor_map(pointer, dtype, shape, (columns,), (64, width)))
            self._maps[key] = found
        return found


class BufferPool:
    """The buffers of one device, by stream; a capture has its own for as long as it lasts."""

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
            found = self._eager.get(stream)
            if found is None:
                found = self._eager[stream] = self.new()
            return found
        held = self._capture.get(stream)
        if held is None or held[0] != capture:
            # The graph replays its own zeroing; its memory is the graph's pool's, not ours.
            held = self._capture[stream] = (capture, self.new())
        return held[1]

    def new(self) -> Buffers:
        """Buffers that no stream is bound to yet; `reset_all` will find them."""
        buffers = Buffers(self.device)
        self._all.add(buffers)
        return buffers

    def reset_all(self) -> None:
        """After an error: every counter of the device back to zero. Waits for the device."""
        torch.cuda.synchronize(self.device)
        captured = {id(buffers) for _, buffers in self._capture.values()}
        for buffers in list(self._all):
            if id(buffers) not in captured:
                buffers.reset()
        self.error.zero_()
