"""The probe library: the C++ scheduler core, asked what `weave_moe.schedule` answers too."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weave_moe.routing import RoutingConfig
from weave_moe.schedule import (
    POLICY_CODES,
    VICTIM_CODES,
    Batches,
    Dispenser,
    Group,
    Knobs,
    Plan,
    Rows,
    Span,
    Tile,
    build_plan,
    max_groups,
    max_rows,
    tile_at,
)

_GUARD = 8  # entries behind every array that must stay as they are

_GROUP = np.dtype(
    [("row", "u4"), ("first", "u4"), ("siblings", "u4"), ("expert", "u2"), ("tokens", "u2")]
)


class _Knobs(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("policy", "victim", "steal_one", "min_steal", "static_share", "batch")
    ]


def _at(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _guarded(size: int, dtype: Any) -> np.ndarray[Any, Any]:
    """`size` entries and the guard; 0xa5 everywhere, so that what is not written shows."""
    return np.full((size + _GUARD) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype)


def _signed(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Row and slot numbers, all ones as -1."""
    none = np.iinfo(array.dtype).max
    return tuple(-1 if v == none else int(v) for v in array)


class Probe:
    """Answers of the compiled core, in the mirror's terms."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library))
        self.lib.probe_window_word.restype = ctypes.c_uint64
        self.lib.probe_k_range.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p]
        assert self.lib.probe_sizeof_group() == _GROUP.itemsize

    def route(
        self, logits: Tensor, config: RoutingConfig, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        tokens, experts = logits.shape
        logits = logits.float().contiguous()
        bias = None if bias is None else bias.float().contiguous()
        weights = torch.full((tokens, config.top_k), float("nan"))
        ids = torch.full((tokens, config.top_k), -7, dtype=torch.int32)
        numbers = (ctypes.c_uint32 * 5)(
            RoutingConfig.SCORINGS.index(config.scoring),
            config.top_k,
            int(config.renormalize),
            config.num_groups,
            config.topk_groups,
        )
        self.lib.probe_route(
            ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_void_p(None if bias is None else bias.data_ptr()),
            tokens,
            experts,
            numbers,
            ctypes.c_float(config.scaling_factor),
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.c_void_p(weights.data_ptr()),
        )
        return weights, ids

    def plan(
        self,
        expert_of_slot: Sequence[int],
        experts: int,
        width_cap: int,
        *,
        warps: int = 1,
        narrow: bool = False,
    ) -> tuple[Plan, Rows]:
        slots = len(expert_of_slot)
        index = np.uint16 if narrow else np.uint32
        most_groups = max_groups(slots, experts, width_cap)
        most_rows = max_rows(slots, experts)
        assert self.lib.probe_max_groups(slots, experts, width_cap) == most_groups
        assert self.lib.probe_max_rows(slots, experts) == most_rows
        groups = _guarded(most_groups, _GROUP)
        arrays = [_guarded(n, np.uint32) for n in (experts + 1, experts, experts)]
        row_slot, slot_row = _guarded(most_rows, index), _guarded(slots, index)
        totals, asked = np.zeros(2, np.uint32), np.zeros(slots, np.uint32)
        ids = np.asarray(expert_of_slot, np.int32)
        self.lib.probe_plan(
            _at(ids), slots, experts, width_cap, warps, int(narrow), _at(groups),
            *map(_at, arrays), _at(row_slot), _at(slot_row), _at(totals), _at(asked),
        )  # fmt: skip
        count, rows = (int(v) for v in totals)
        assert count <= most_groups
        assert rows <= most_rows
        assert ((asked == 1) | (asked == 2)).all(), "expert_of is asked once or twice for each slot"
        for array, used in (
            (groups, count), (arrays[0], experts + 1), (arrays[1], experts), (arrays[2], experts),
            (row_slot, rows), (slot_row, slots),
        ):  # fmt: skip
            assert (array[used:].view(np.uint8) == 0xA5).all(), "written beyond the end"
        expert_group, expert_row, expert_tokens = (tuple(map(int, a[:-_GUARD])) for a in arrays)
        plan = Plan(
            width_cap,
            tuple(Group(*map(int, g)) for g in groups[:count]),
            expert_group,
            expert_row,
            expert_tokens,
            rows,
        )
        return plan, Rows(_signed(row_slot[:rows]), _signed(slot_row[:slots]))

    def tiles(self, plan: Plan, chunks: int, parts: int) -> list[Tile]:
        groups = np.array([tuple(g) for g in plan.groups], _GROUP)
        out = np.zeros((len(plan.groups) * chunks * parts, 3), np.uint32)
        self.lib.probe_tiles(_at(groups), chunks, parts, len(out), _at(out))
        return [Tile(*map(int, t)) for t in out]

    def batches(self, tasks: int, workers: int, most: int = 4) -> tuple[Batches, list[int]]:
        """The rounds of a stealing stage, and the task at each position."""
        out, task_of = np.zeros(2, np.uint32), np.zeros(tasks, np.uint32)
        self.lib.probe_batches(tasks, workers, most, _at(out), _at(task_of))
        return Batches(workers, int(out[0]), int(out[1])), task_of.tolist()

    def windows(self, tasks: int, workers: int, tickets: int, most: int = 4) -> list[Span]:
        out = np.zeros((tickets, 2), np.uint32)
        self.lib.probe_windows(tasks, workers, most, tickets, _at(out))
        return [Span(*map(int, s)) for s in out]

    def ticket(
        self, dispenser: Dispenser, ticket: int, expert_group: Sequence[int], tasks_per_group: int
    ) -> tuple[list[int], bool]:
        """Tasks of a ticket as the claiming code runs them, and whether it is past the last."""
        out, exhausted = np.zeros(dispenser.tasks, np.uint32), ctypes.c_uint32()
        bounds = np.asarray(expert_group, np.uint32)
        count = self.lib.probe_ticket(
            POLICY_CODES[dispenser.knobs.policy], dispenser.knobs.static_share,
            dispenser.knobs.batch, dispenser.tasks,
            dispenser.workers, len(bounds) - 1, _at(bounds), tasks_per_group, ticket, _at(out),
            ctypes.byref(exhausted),
        )  # fmt: skip
        return out[:count].tolist(), bool(exhausted.value)

    def interleave(
        self,
        knobs: Knobs,
        tasks: int,
        workers: int,
        expert_group: Sequence[int],
        tasks_per_group: int,
        order: Sequence[int],
    ) -> tuple[list[int], int]:
        """How often each task ran, and how many were stolen, when `order` says who moves next."""
        ran, steals = np.zeros(tasks, np.uint32), ctypes.c_uint32()
        bounds, turns = np.asarray(expert_group, np.uint32), np.asarray(order, np.uint32)
        c = _Knobs(
            POLICY_CODES[knobs.policy], VICTIM_CODES[knobs.victim], knobs.steal == "one",
            knobs.min_steal, knobs.static_share, knobs.batch,
        )  # fmt: skip
        wrong = self.lib.probe_interleave(
            ctypes.byref(c), tasks, workers, len(bounds) - 1, _at(bounds), tasks_per_group,
            _at(turns), len(turns), _at(ran), ctypes.byref(steals),
        )  # fmt: skip
        assert wrong == 0, f"queues or their count not empty at the end: {wrong}"
        return ran.tolist(), steals.value

    def k_range(self, reduction: int, parts: int, part: int) -> tuple[int, int]:
        out = np.zeros(2, np.int64)
        self.lib.probe_k_range(reduction, parts, part, _at(out))
        return int(out[0]), int(out[1] - out[0])


def random_routing(rng: np.random.Generator, most_slots: int = 600) -> tuple[list[int], int, int]:
    """(expert_of_slot, experts, width_cap): even, skewed and sparse ones, with skipped slots."""
    experts = int(rng.integers(1, 9) if rng.integers(2) else rng.integers(1, 200))
    slots = int(rng.integers(0, 20) if rng.integers(4) == 0 else rng.integers(0, most_slots))
    width_cap = int(8 * rng.integers(1, 8) if rng.integers(2) else 16 * rng.integers(4, 17))
    share = rng.dirichlet(np.full(experts, 10.0 ** rng.uniform(-2, 1)))
    ids = rng.choice(experts, slots, p=share)
    if rng.integers(3) == 0:
        ids = np.where(rng.random(slots) < rng.random(), -1, ids)
    return ids.tolist(), experts, width_cap


def compare_plans(probe: Probe, seed: int, routings: int) -> None:
    """Asserts that core and mirror agree on `routings` random routings."""
    rng = np.random.default_rng(seed)
    for _ in range(routings):
        ids, experts, width_cap = random_routing(rng)
        want = build_plan(ids, experts, width_cap)
        warps = int(rng.integers(2, 6)) if rng.integers(16) == 0 else 1
        got = probe.plan(ids, experts, width_cap, warps=warps, narrow=bool(rng.integers(2)))
        assert got == want, (ids, experts, width_cap)
        chunks, parts = (int(v) for v in rng.integers(1, 4, 2))
        plan = want[0]
        if len(plan.groups) > 20:
            continue  # tests of tile_at have larger ones
        assert probe.tiles(plan, chunks, parts) == [
            tile_at(plan.groups, chunks, parts, i) for i in range(len(plan.groups) * chunks * parts)
        ]
