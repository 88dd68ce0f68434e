"""Which kernel a call gets: tile, ring and widths, from sizes alone.

Pure functions of the shape, the token count and the GPU's limits; no table of models, nothing tuned
at run time. Each threshold states what was measured for it (docs/measured.md has the numbers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from .plan import max_groups

__all__ = ["KernelPlan", "choose_kernel", "local_plan_bytes"]

SHARED_BYTES: Final = 232_448
"""Dynamic shared memory a block may have on sm_90."""

CONTROL_BYTES: Final = 48 * 4 + 8 * (2 * 16 + 3 * 4 + 1) + 24
"""Of tasks, barriers and the plan's totals: `sizeof(Smem)` in device/config.h."""

LOCAL_SLOTS: Final = 4096
"""Most slots that each block plans for itself, in shared memory and in 16-bit row numbers."""

MAX_STAGES: Final = 16
"""Most stages of the ring: barriers there are for."""

WIDTH_CAPS: Final = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class KernelPlan:
    """One compiled kernel and how a call uses it.

    tile_m: weight rows of a tile.  tile_k: columns of a ring stage.  ring_bytes: shared memory for
    the ring.
    width_cap: most tokens of a group.  local_plan: each block plans for itself.
    gathered_first: x is copied into row order before its tiles, else read by token.
    combine_tokens: tokens of a combine task.  slice: hidden elements of a combine task.
    hold_down: down weights wait for their group's gate_up tiles, like its activations.
    parts_up, parts_down: K ranges of a tile, whose sums the last to finish adds in order. They are
    part of a result's bits, so they must not depend on the number of tokens.
    reasons: one line for each choice.
    """

    tile_m: int
    tile_k: int
    ring_bytes: int
    width_cap: int
    local_plan: bool
    gathered_first: bool
    combine_tokens: int
    slice: int
    hold_down: bool = False
    parts_up: int = 1
    parts_down: int = 1
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

    def stages(self, width: int) -> int:
        """Stages of the ring in a launch whose widest group takes `width` columns."""
        return _stages(self.ring_bytes, self.tile_m, self.tile_k, width)

    def __str__(self) -> str:
        where = "in each block" if self.local_plan else "by the first block"
        head = (
            f"tiles of {self.tile_m} rows x up to {self.width_cap} tokens, "
            f"{self.stages(8)} to {self.stages(self.width_cap)} stages of {self.tile_k} columns, "
            f"planned {where}"
        )
        return "\n  ".join((head, *self.reasons))


def local_plan_bytes(slots: int, experts: int, width_cap: int) -> int:
    """Bytes of a plan in shared memory, for any routing of `slots` slots."""
    groups = max_groups(slots, experts, width_cap)
    padding = 7 if width_cap <= 56 else 15
    rows = slots + padding * min(experts, slots)
    return groups * 16 + (experts + 1) * 4 + 2 * (slots + rows)


def _width_cap(mean: float) -> int:
    # An expert's load scatters about its mean by its square root: three of them cover nearly all
    # experts with one group, so that their weights pass through each SM's ring once.
    wanted = mean + 3 * math.sqrt(mean)
    return next((cap for cap in WIDTH_CAPS if cap >= wanted), WIDTH_CAPS[-1])


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
    cap = _width_cap(mean)
    reasons = [f"{mean:.1f} tokens an expert that has any: groups of at most {cap}"]
    if slots <= 32:
        tile_m = 64
        reasons.append(
            f"{slots} slots: tiles of 64 rows, for more tasks than SMs (T=1: 24.2 us against 26.6)"
        )
    else:
        tile_m = 128
    if local:
        tile_k = 128
        reasons.append("stages of 128 columns: a row's 256 contiguous bytes at a time")
    else:
        tile_k = 64
        reasons.append("many tokens: stages of 64 columns, so that the ring stays deep")
    if tokens == 1:
        reasons.append(
            "down weights after gate_up: T=1 30.6 us against 31.5 (T=2: 46.0 against 44.9)"
        )
    if cap > 32:
        reasons.append("x is gathered first (read by token, 64 rows took 1.8 us a stage)")
    ring = (shared_bytes - CONTROL_BYTES) // 1024 * 1024
    if local:
        used = local_plan_bytes(slots, experts, cap)
        ring = (shared_bytes - CONTROL_BYTES - used) // 1024 * 1024
        room = ring - _stages(ring, tile_m, tile_k, 8) * tile_m * tile_k * 2
        if used > shared_bytes // 6 or room < 4 * (2 * 16 + 3 * (experts + 1)):
            local = False
            ring = (shared_bytes - CONTROL_BYTES) // 1024 * 1024
            reasons.append("the plan does not fit beside the ring: the first block makes it")
    # Few tokens: as many combine tasks as there is work for the SMs. A task's eight warps take
    # 2,048 elements of a token at once.
    combine_tokens = 1 if tokens <= 128 else 2 if tokens <= 512 else 8
    step = tile_m // 64 * 4 * 256
    piece = step if tokens <= 64 else -(-hidden // step) * step
    return KernelPlan(
        tile_m,
        tile_k,
        ring,
        cap,
        local,
        cap > 32,
        combine_tokens,
        piece,
        hold_down=tokens == 1,
        reasons=tuple(reasons),
    )


def _stages(ring_bytes: int, tile_m: int, tile_k: int, width: int) -> int:
    return min(MAX_STAGES, ring_bytes // ((tile_m + width) * tile_k * 2))
