"""The engine's workspace: how calls are scheduled, their memory, and what the last run did."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final, Literal

from ..schedule import (
    check_width_cap,
    combine_stage,
    down_stage,
    gate_up_stage,
    max_groups,
    max_rows,
)
from ..schedule.queues import WINDOW_LIMIT
from ..shapes import LayerShape, check_choice, check_count, check_flag
from .stats import RunStats

__all__ = ["DEFAULT_SLAB_BYTES", "Workspace", "workspace_bytes"]

DEFAULT_SLAB_BYTES: Final = 1 << 29
"""Bytes that one launch's buffers may take; calls with more tokens are cut into slabs of them."""

# At 50 us a sleep and more, a quarter of an hour: under a static policy a worker may have to wait
# for all that another one was dealt.
_DEFAULT_SPIN_LIMIT: Final = 1 << 24
_MAX_WORKERS: Final = 1 << 20
_MAX_PARTS: Final = 64

# As engine.cpp has them; tests/test_host_engine.py holds the two equal.
_BLOCK_TOKENS: Final = 16
_CHUNK_ROWS: Final = 128
_CONTROL_BYTES: Final = 512
_PLAN_SCRATCH_BYTES: Final = 1024
_LANES: Final = 16
_MAX_SLOTS: Final = 1 << 30


def _rounded(size: int, unit: int = 64) -> int:
    return -(-size // unit) * unit


class Workspace:
    """A scratch pad for calls of the CPU engine, one call at a time: its knobs and its last run.

    No knob but parts_up and parts_down changes a bit of a result.

    workers: threads, by default one a logical CPU; may exceed them.
    trace: record when each task ran, on which worker (`RunStats.trace`).
    victim: whom an idle worker robs: the "largest" queue, or the first non-empty one from a
        "random" place.
    steal: how much: "half" of the queue, or "one" task.
    min_steal: queues with fewer tasks are left alone.
    static_share: percent of a stage's tasks that policy "static_tail" fixes beforehand.
    batch: most tasks that policy "steal" puts into a queue at once: 1, 2 or 4. None leaves it to
        the plan: on a GPU 4 up to 256 tokens and 1 above, on the CPU 4.
    parts_up, parts_down: K ranges that the sums of gate_up and down tasks are cut into; other sums,
        so other last bits, which still depend on nothing but this.
    width_cap: most tokens in a group: 8 to 256, a multiple of 8, from 64 up of 16.
    combine_tokens: tokens of a combine task.
    spin_limit: turns that a waiting worker takes before the launch is given up; beyond a few
        hundred each sleeps 50 us.
    slab_bytes: memory for a launch's buffers; calls with more tokens run as several launches.

    Buffers grow with the largest call and are freed with the workspace. A workspace belongs to one
    call at a time: a second one meanwhile, from another thread, is a RuntimeError and leaves the
    first alone. A copy has the knobs, not the memory.

    Raises TypeError or ValueError, naming the argument, for a value that is not allowed.
    """

    last_run: RunStats | None
    """Statistics of the last run that succeeded, None before."""

    def __init__(
        self,
        workers: int | None = None,
        trace: bool = False,
        victim: Literal["largest", "random"] = "largest",
        steal: Literal["half", "one"] = "half",
        min_steal: int = 1,
        static_share: int = 70,
        parts_up: int = 1,
        parts_down: int = 1,
        width_cap: int = 32,
        *,
        batch: Literal[1, 2, 4] | None = None,
        combine_tokens: int = 16,
        spin_limit: int = _DEFAULT_SPIN_LIMIT,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
    ) -> None:
        if workers is None:
            workers = os.cpu_count() or 1
        self.workers = _at_most("workers", check_count("workers", workers), _MAX_WORKERS)
        self.trace = check_flag("trace", trace)
        self.victim = check_choice("victim", victim, ("largest", "random"))
        self.steal = check_choice("steal", steal, ("half", "one"))
        self.min_steal = _at_most("min_steal", check_count("min_steal", min_steal), WINDOW_LIMIT)
        self.static_share = _at_most(
            "static_share", check_count("static_share", static_share, 0), 100
        )
        if batch is not None and check_count("batch", batch) not in (1, 2, 4):
            raise ValueError(f"batch must be 1, 2, 4 or None, got {batch}")
        self.batch = batch
        self.parts_up = _at_most("parts_up", check_count("parts_up", parts_up), _MAX_PARTS)
        self.parts_down = _at_most("parts_down", check_count("parts_down", parts_down), _MAX_PARTS)
        self.width_cap = check_width_cap(check_count("width_cap", width_cap))
        self.combine_tokens = _at_most(
            "combine_tokens", check_count("combine_tokens", combine_tokens), WINDOW_LIMIT
        )
        self.spin_limit = _at_most(
            "spin_limit", check_count("spin_limit", spin_limit, 0), 0xFFFF_FFFF
        )
        self.slab_bytes = check_count("slab_bytes", slab_bytes)
        self.last_run = None
        self._in_use = threading.Lock()
        self._engine: Any = None  # host.engine puts its handle here at the first run

    def __repr__(self) -> str:
        knobs = ", ".join(f"{name}={value!r}" for name, value in self.knobs().items())
        return f"Workspace({knobs})"

    def knobs(self) -> dict[str, Any]:
        """The constructor's arguments that give a workspace like this one."""
        names = (
            *("workers", "trace", "victim", "steal", "min_steal", "static_share", "batch"),
            *("parts_up", "parts_down", "width_cap", "combine_tokens", "spin_limit", "slab_bytes"),
        )
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[Callable[..., Workspace], tuple[dict[str, Any]]]:
        # A copied or pickled model must not share, or free twice, the engine's memory.
        return (_from_knobs, (self.knobs(),))

    def slab_tokens(self, shape: LayerShape) -> int:
        """Most tokens that one launch of this workspace takes.

        Raises ValueError if even one token is too much for the scheduler's task numbers.
        """
        if not self._fits(shape, 1):
            raise ValueError(
                f"a stage may have at most {WINDOW_LIMIT} tasks in a launch, but one token of "
                f"{shape} with parts_up={self.parts_up} and parts_down={self.parts_down} needs more"
            )
        low, high = 1, 2
        while self._fits(shape, high) and self.launch_bytes(shape, high) <= self.slab_bytes:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(shape, middle) and self.launch_bytes(shape, middle) <= self.slab_bytes:
                low = middle
            else:
                high = middle
        return low

    def _fits(self, shape: LayerShape, tokens: int) -> bool:
        slots = tokens * shape.top_k
        if slots > _MAX_SLOTS:
            return False
        groups = max_groups(slots, shape.experts, self.width_cap)
        up = gate_up_stage(shape.hidden, shape.intermediate, gated=shape.gated, parts=self.parts_up)
        down = down_stage(shape.hidden, shape.intermediate, parts=self.parts_down)
        tasks = max(
            groups * up.tasks_per_group,
            groups * down.tasks_per_group,
            combine_stage(tokens, self.combine_tokens),
        )
        return tasks <= WINDOW_LIMIT

    def launch_bytes(self, shape: LayerShape, tokens: int) -> int:
        """Bytes of the buffers of a launch of `tokens` tokens, without the workers' own."""
        slots, experts = tokens * shape.top_k, shape.experts
        groups = max_groups(slots, experts, self.width_cap)
        rows = max_rows(slots, experts)
        state = [_CONTROL_BYTES, 3 * 8 * self.workers, 4 * groups, 4 * experts]
        plan = [16 * groups, 4 * experts + 4, *[4 * experts] * 2, 4 * rows, 4 * slots, 8]
        plan.append(4 * experts + _PLAN_SCRATCH_BYTES)
        row_bytes = 2 if shape.dtype == "bfloat16" else 4
        data = [rows * shape.intermediate * shape.element_size, slots * shape.hidden * row_bytes]
        if self.parts_up > 1:
            up = gate_up_stage(shape.hidden, shape.intermediate, gated=shape.gated)
            state.append(4 * groups * up.chunks)
            data.append(4 * self.parts_up * rows * shape.w13_rows)
        if self.parts_down > 1:
            state.append(4 * groups * down_stage(shape.hidden, shape.intermediate).chunks)
            data.append(4 * self.parts_down * rows * shape.hidden)
        return sum(_rounded(size) for size in (*state, *plan, *data))

    def bytes_for(self, shape: LayerShape, max_tokens: int) -> int:
        """Bytes this workspace grows to, if new, when it runs calls of up to `max_tokens` tokens.

        Without the trace. Raises ValueError if `max_tokens` is negative.
        """
        tokens = min(check_count("max_tokens", max_tokens, 0), self.slab_tokens(shape))
        if tokens == 0:
            return 0
        wide = _rounded(max(shape.hidden, shape.intermediate), _LANES)
        own = 4 * ((_BLOCK_TOKENS + 1) * wide + _BLOCK_TOKENS * _CHUNK_ROWS)
        return self.launch_bytes(shape, tokens) + _rounded(self.workers * own)


def _from_knobs(knobs: dict[str, Any]) -> Workspace:
    return Workspace(**knobs)


def _at_most(name: str, value: int, most: int) -> int:
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return value


def workspace_bytes(shape: LayerShape, max_tokens: int, workspace: Workspace | None = None) -> int:
    """Bytes of scratch memory for calls of `shape` with up to `max_tokens` tokens.

    workspace: whose knobs to go by; None for the defaults. Larger calls run in slabs, so there is a
    bound for any number of tokens (`Workspace.slab_bytes` and the workers' own rows).

    Raises TypeError or ValueError naming the argument.
    """
    if not isinstance(shape, LayerShape):
        raise TypeError(f"shape must be a LayerShape, got {type(shape).__name__}")
    return (Workspace() if workspace is None else workspace).bytes_for(shape, max_tokens)
