"""Which kernel a call gets: tile, ring and widths, from sizes alone.

Pure functions of the shape, the token count and the GPU's limits; no table of models, nothing tuned
at run time. Each threshold states what was measured for it (docs/measured.md has the numbers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from .plan import max_groups

__all__ = ["KernelPlan", "choose_kernel", "local_plan_bytes"]

SHARED_BYTES: Final = 232_448
"""Dynamic shared memory a block may have on sm_90."""

CONTROL_BYTES: Final = 56 * 4 + 8 * (2 * 16 + 3 * 4 + 2 * 2 * 2 + 1) + 24
"""Of tasks, barriers and the plan's totals: `sizeof(Smem)` in device/config.h."""

FEW_TOKENS: Final = 256
"""Most tokens of the one launch that does everything; more take three."""

LOCAL_SLOTS: Final = 4096
"""Most slots that each block plans for itself, in shared memory and in 16-bit row numbers."""

STAGING_BYTES: Final = 2 * 2 * 8192
"""Shared memory through which tiles of many tokens are stored."""

MAX_STAGES: Final = 16
"""Most stages of the ring: barriers there are for."""

MAX_SLOTS: Final = 32
"""Of a token: experts it chose, and slices of the shared experts."""

OWN_BYTES: Final = 16 * MAX_SLOTS
"""Shared memory for the slots of a token that each block routes for itself."""

GATHER_WIDTH: Final = 32
"""Rows of x of wider groups are copied into row order first; else read by token."""

NARROW: Final = 256
"""Weight rows of at most so many elements make tasks of 64 KB and less, of 2 to 3 us: there one
counter takes 4 to 7 % less than queues. From 512 on they are level."""

WIDTH_CAPS: Final = {64: (8, 32), 128: (16, 64, 128)}
"""Of kernels for few tokens, by tile_m. Each is compiled at first use, so there are few of them."""

MANY_WIDTH_CAP: Final = 256


@dataclass(frozen=True)
class KernelPlan:
    """One compiled kernel and how a call uses it.

    tile_m: weight rows of a tile.  tile_k: columns of a ring stage.  ring_bytes: shared memory for
    the ring.
    width_cap: most tokens of a group.  many: three launches (sorting, experts, combine) with tiles
    for many tokens; else one, in which each block plans for itself.
    combine_tokens: tokens of a combine task.  slice: hidden elements of a combine task.
    hold_down: down weights wait for their group's gate_up tiles, like its activations.
    parts_up, parts_down: K ranges of a tile, whose sums the last to finish adds in order. They are
    part of a result's bits, so they must not depend on the number of tokens.
    policy: what "auto" is.
    batch: most tasks that "steal" puts into a queue at once.
    reasons: one line for each choice.
    """

    tile_m: int
    tile_k: int
    ring_bytes: int
    width_cap: int
    many: bool
    combine_tokens: int
    slice: int
    hold_down: bool = False
    parts_up: int = 1
    parts_down: int = 1
    policy: str = "steal"
    batch: int = 4
    reasons: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """Threads of a block: a warpgroup for each 64 rows of the tile, and four warps more."""
        return self.tile_m // 64 * 128 + 128

    def chunk_up(self, *, gated: bool = True) -> int:
        """Elements of h in a gate_up tile: rows of W13's gate half (and as many of its up half), or
        of W13 where there is no gate."""
        return self.tile_m // 2 if gated else self.tile_m

    @property
    def chunk_down(self) -> int:
        """Rows of W2 in a tile."""
        return self.tile_m

    @property
    def gathers(self) -> bool:
        """Whether a group may be so wide that its rows of x are copied into row order first."""
        return self.width_cap > GATHER_WIDTH

    def stages(self, width: int) -> int:
        """Stages of the ring in a launch whose widest group takes `width` columns."""
        return _stages(self.ring_bytes, self.tile_m, self.tile_k, width)

    def __str__(self) -> str:
        where = "in a launch of its own" if self.many else "in each block"
        least, most = self.stages(self.width_cap), self.stages(8)
        stages = f"{most} stages of {self.tile_k} columns"
        if least < most:
            stages += f" (the widest groups: {least})"
        head = (
            f"tiles of {self.tile_m} rows x up to {self.width_cap} tokens, {stages}, "
            f"planned {where}"
        )
        return "\n  ".join((head, *self.reasons))


def local_plan_bytes(slots: int, experts: int, width_cap: int) -> int:
    """Bytes of a plan in shared memory, for any routing of `slots` slots."""
    groups = max_groups(slots, experts, width_cap)
    padding = 7 if width_cap <= 56 else 15
    rows = slots + padding * min(experts, slots)
    return groups * 16 + (experts + 1) * 4 + 2 * (slots + rows)


def _most_tokens(mean: float) -> float:
    """Tokens that nearly every expert stays below when routing is even: its load scatters about the
    mean by its square root."""
    return mean + 3 * math.sqrt(mean)


def _width_cap(tokens: int, mean: float, tile_m: int) -> int:
    # Each group streams its expert's weights through a ring again, so hot experts want wide groups;
    # and a wide cap costs little where no expert is hot, because the ring follows the widest group
    # of the launch.
    wanted = min(tokens, max(64.0, _most_tokens(mean)))
    caps = WIDTH_CAPS[tile_m]
    return next((cap for cap in caps if cap >= wanted), caps[-1])


@lru_cache(maxsize=4096)  # every eager call asks
def choose_kernel(
    *,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int | None = None,
    shared_bytes: int = SHARED_BYTES,
    router: bool = False,
    shared: int = 0,
) -> KernelPlan:
    """The kernel for `tokens` tokens of `top_k` slots over `experts` local experts.

    intermediate: like hidden where it is not given.
    router: the launch routes them itself.  shared: slices of shared experts, which take every
    token.
    """
    routed_slots = tokens * top_k
    slots = tokens * (top_k + shared)
    mean = routed_slots / max(1, min(experts, routed_slots))
    experts += shared
    tile_m, tile_k = 64 if slots <= 32 else 128, 128
    cap = _width_cap(tokens, mean, tile_m)
    used = local_plan_bytes(slots, experts, cap) + (OWN_BYTES if router else 0)
    ring = (shared_bytes - CONTROL_BYTES - used) // 1024 * 1024
    room = ring - _stages(ring, tile_m, tile_k, 8) * tile_m * tile_k * 2
    fits = used <= shared_bytes // 6 and room >= 4 * (2 * 16 + 3 * (experts + 1))
    if tokens > FEW_TOKENS or slots > LOCAL_SLOTS or not fits:
        return _many(tokens, slots, mean, shared_bytes)
    reasons = [f"{mean:.1f} tokens an expert that has any: groups of at most {cap}"]
    if tile_m == 64:
        reasons.append(
            f"{slots} slots: tiles of 64 rows, for more tasks than SMs (T=1: 24.2 us against 26.6)"
        )
    reasons.append("stages of 128 columns: a row's 256 contiguous bytes at a time")
    if tokens == 1:
        reasons.append(
            "down weights after gate_up: T=1 30.6 us against 31.5 (T=2: 46.0 against 44.9)"
        )
    policy = "steal"
    if tile_m == 64:
        policy = "counter"
        reasons.append("one counter for so few tasks: T=1 29.3 us against 29.9 with queues")
    elif min(hidden, intermediate or hidden) <= NARROW:
        policy = "counter"
        reasons.append(
            f"one counter for tasks as small as those of rows of at most {NARROW}: 43.1 us against "
            "44.7 with queues"
        )
    if cap > GATHER_WIDTH:
        reasons.append(
            f"rows of groups wider than {GATHER_WIDTH} are gathered first (read by token, 64 rows "
            "took 1.8 us a stage)"
        )
    # Few tokens: as many combine tasks as there is work for the SMs. A task's eight warps take
    # 2,048 elements of a token at once.
    combine_tokens = 1 if tokens <= 128 else 2
    step = tile_m // 64 * 4 * 256
    piece = step if tokens <= 64 else -(-hidden // step) * step
    return KernelPlan(
        tile_m,
        tile_k,
        ring,
        cap,
        False,
        combine_tokens,
        piece,
        hold_down=tokens == 1,
        policy=policy,
        reasons=tuple(reasons),
    )


def _many(tokens: int, slots: int, mean: float, shared_bytes: int) -> KernelPlan:
    ring = (shared_bytes - CONTROL_BYTES - STAGING_BYTES) // 1024 * 1024
    reasons = [f"{tokens} tokens, {slots} slots: sorting and combine are launches of their own"]
    if _most_tokens(mean) <= 128:
        cap, tile_k = 128, 128
        reasons.append(
            f"{mean:.1f} tokens an expert: groups of at most 128 and stages of 128 columns "
            "(qwen3-30b, T=1024: 347 us against 352)"
        )
    else:
        cap, tile_k = MANY_WIDTH_CAP, 64
        reasons += (
            f"{mean:.1f} tokens an expert: groups of at most {cap}",
            "stages of 64 columns: the ring stays deep (deepseek-v3, T=4096: 6.5 ms against 7.6)",
        )
    reasons.append(
        "one task a ticket: neighbours run together and share what they read (deepseek-v3, T=4096: "
        "6.83 ms against 6.88)"
    )
    return KernelPlan(128, tile_k, ring, cap, True, 1, 256, batch=1, reasons=tuple(reasons))


def _stages(ring_bytes: int, tile_m: int, tile_k: int, width: int) -> int:
    return min(MAX_STAGES, ring_bytes // ((tile_m + width) * tile_k * 2))
