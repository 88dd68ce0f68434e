"""Which kernel a call gets: tile, ring and widths, from sizes alone.

Pure functions of the shape, the token count and the GPU's limits; no table of models, nothing tuned
at run time. Each threshold states what was measured for it (docs/measured.md has the numbers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


__all__ = ["KernelPlan", "choose_kernel", "local_plan_bytes", "ring_bytes"]

SHARED_BYTES: Final = 232_448
"""Dynamic shared memory a block may have on sm_90."""

TASK_RING: Final = 4
_TASK_SLOT_BYTES: Final = 32
LOCAL_SLOTS: Final = 4096
"""Most slots that each block plans for itself: the plan stays in shared memory, below 65,535 rows."""

WIDTH_CAPS: Final = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class KernelPlan:
    """One compiled kernel and how a call uses it.

    tile_m: weight rows of a tile.  tile_k: columns of a ring stage.  stages: of the ring.
    width_cap: most tokens of a group.  local_plan: each block plans for itself.
    gathered_first: x is copied into row order before its tiles, else read by token.
    combine_tokens: tokens of a combine task.  slice: hidden elements of a combine task.
    reasons: one line for each choice.
    """

    tile_m: int
    tile_k: int
    stages: int
    width_cap: int
    local_plan: bool
    gathered_first: bool
    combine_tokens: int
    slice: int
    reasons: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """Threads of a block: a warpgroup for each 64 rows of the tile, and four warps more."""
        return self.tile_m // 64 * 128 + 128

    @property
    def chunk_up(self) -> int:
        """Rows of W13's gate half (and as many of its up half) in a tile."""
        return self.tile_m // 2

    @property
    def chunk_down(self) -> int:
        """Rows of W2 in a tile."""
        return self.tile_m

    def __str__(self) -> str:
        where = "in each block" if self.local_plan else "by the first block"
        head = (
            f"tiles of {self.tile_m} rows x up to {self.width_cap} tokens, "
            f"{self.stages} stages of {self.tile_k} columns, planned {where}"
        )
        return "\n  ".join((head, *self.reasons))


def ring_bytes(tile_m: int, tile_k: int, stages: int, width_cap: int) -> int:
    """Bytes of shared memory before a local plan; `sizeof(Smem)` in device/config.h."""
    stage = (tile_m + width_cap) * tile_k * 2
    barriers = 8 * (2 * stages + 3 * TASK_RING)
    return stages * stage + TASK_RING * _TASK_SLOT_BYTES + barriers + 16  # totals, aborted, gather


def local_plan_bytes(slots: int, experts: int, width_cap: int) -> int:
    """Bytes of a plan in shared memory, for any routing of `slots` slots."""
    touched = min(experts, slots)
    groups = touched + slots // width_cap
    padding = 7 if width_cap <= 56 else 15
    rows = slots + padding * touched
    return groups * 16 + (experts + 1) * 4 + 2 * (slots + rows)


def _width_cap(mean: float, largest: int) -> int:
    # An expert's load scatters about its mean by its square root: three of them cover nearly all
    # experts with one group, so that their weights pass through each SM's ring once.
    wanted = mean + 3 * math.sqrt(mean)
    return next((cap for cap in WIDTH_CAPS if cap >= wanted or cap == largest), largest)


def choose_kernel(
    *,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    shared_bytes: int = SHARED_BYTES,
) -> KernelPlan:
    """The kernel for `tokens` tokens of `top_k` slots over `experts` local experts."""
    slots = tokens * top_k
    touched = max(1, min(experts, slots))
    mean = slots / touched
    local = slots <= LOCAL_SLOTS
    reasons = []
    if slots <= 32:
        tile_m, tile_k = 64, 128
        reasons.append(
            f"{slots} slots: tiles of 64 rows, for more tasks than SMs (T=1: 24.2 us against 26.6)"
        )
    elif local:
        tile_m, tile_k = 128, 128
        reasons.append("few tokens: stages of 128 columns read 256 contiguous bytes of a row")
    else:
        tile_m, tile_k = 128, 64
        reasons.append("many tokens: stages of 64 columns, so that wide tiles leave a deep ring")
    cap = _width_cap(mean, 64 if local else 128)
    reasons.append(f"{mean:.1f} tokens an expert that has any: groups of at most {cap}")
    if cap > 32:
        reasons.append("wide groups: x is gathered first (by token, 64 rows took 1.8 us a stage)")
    used = local_plan_bytes(slots, experts, cap) if local else 0
    # A block's histograms lie where its activations will, at least one of them and two arrays more.
    if local and (used > shared_bytes // 6 or 12 * experts > 6 * cap * tile_k * 2):
        local, used = False, 0
        reasons.append("the plan does not fit beside the ring: the first block makes it")
    stages = max(
        s for s in range(2, 17) if s == 2 or ring_bytes(tile_m, tile_k, s, cap) + used <= shared_bytes
    )
    reasons.append(f"{stages} stages: {stages * tile_m * tile_k * 2 // 1024} KB of weights in flight")
    # Few tokens: as many combine tasks as there is work for the SMs. A task's eight warps take
    # 2,048 elements of a token at once.
    combine_tokens = 1 if tokens <= 128 else 2 if tokens <= 512 else 8
    step = tile_m // 64 * 4 * 256
    piece = step if tokens <= 64 else -(-hidden // step) * step
    return KernelPlan(
        tile_m, tile_k, stages, cap, local, cap > 32, combine_tokens, piece, tuple(reasons)
    )
