"""The work of one launch: its plan, its stages, and what each task reads and computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..schedule import Plan, StageShape, combine_stage, plan_groups
from ..schedule.granularity import KernelPlan, choose_kernel
from ..shapes import LayerShape

__all__ = ["Workload", "deal_counts", "make_workload"]

Ids = npt.NDArray[np.int64]
ELEMENT = 2
"""Bytes of an activation or a weight: bf16 or fp16."""


def deal_counts(counts: Sequence[int], tokens: int, top_k: int) -> Ids:
    """ids [tokens, top_k] with counts[e] slots of expert e, no expert twice in a token.

    Slots are dealt to the tokens in turn, so that each expert's tokens are neighbours. Raises
    TypeError for counts that are no integers, ValueError for one outside 0 .. tokens, or more slots
    than tokens x top_k.
    """
    array = np.asarray(counts).reshape(-1)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"counts must be integers, got {array.dtype} {list(counts)[:8]}")
    if array.size == 0 or array.min() < 0 or array.max() > tokens:
        raise ValueError(f"counts must be 0 .. {tokens} (tokens), got {list(counts)[:8]}")
    array = array.astype(np.int64)
    slots = int(array.sum())
    if slots > tokens * top_k:
        raise ValueError(f"counts must add to at most tokens x top_k = {tokens * top_k}: {slots}")
    ids = np.full(tokens * top_k, -1, dtype=np.int64)
    ids[:slots] = np.repeat(np.arange(array.size), array)
    return np.ascontiguousarray(ids.reshape(top_k, tokens).T)


@dataclass(frozen=True, eq=False)
class Workload:
    """One launch of a layer's experts.

    slots: valid slots.  stages: gate_up and down.  tasks: of gate_up, down and combine.
    token_blocks: combine blocks of tokens, `slices` tasks each; 0 where combine is another launch.
    block_experts: [token_blocks] number of experts that a block waits for.
    expert_blocks: for each expert, the blocks that wait for it.
    block_slots: [token_blocks] valid slots of each.
    """

    shape: LayerShape
    tokens: int
    slots: int
    kernel: KernelPlan
    plan: Plan
    stages: tuple[StageShape, StageShape]
    tasks: tuple[int, int, int]
    token_blocks: int
    slices: int
    block_experts: npt.NDArray[np.int64]
    block_slots: npt.NDArray[np.int64]
    expert_blocks: tuple[npt.NDArray[np.int64], ...]

    @property
    def active(self) -> int:
        """Experts with tokens."""
        return sum(1 for n in self.plan.expert_tokens if n)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the active experts' weights."""
        shape = self.shape
        return self.active * (shape.w13_rows + shape.intermediate) * shape.hidden * ELEMENT

    @property
    def flops(self) -> int:
        """Operations of both products, without padding."""
        shape = self.shape
        return 2 * self.slots * shape.hidden * (shape.w13_rows + shape.intermediate)

    def written_bytes(self) -> int:
        """Bytes of activations between the stages and of the result."""
        shape = self.shape
        rows = self.slots * (shape.intermediate + shape.hidden) + self.tokens * shape.hidden
        return rows * ELEMENT


def make_workload(shape: LayerShape, topk_ids: Any, shared_bytes: int = 232_448) -> Workload:
    """The work of a launch for `topk_ids` [T, k] (anything numpy takes; -1 or >= E: skipped).

    Raises ValueError for ids of another form, no tokens, or a dtype that the kernel does not take.
    """
    ids = np.asarray(topk_ids)
    if ids.ndim != 2 or ids.shape[1] != shape.top_k or ids.dtype.kind not in "iu":
        raise ValueError(
            f"topk_ids must be integers [T, {shape.top_k}], got {ids.dtype} {list(ids.shape)}"
        )
    tokens = int(ids.shape[0])
    if tokens < 1:
        raise ValueError("topk_ids must hold at least 1 token")
    if shape.dtype not in ("bfloat16", "float16"):
        raise ValueError(f"dtype must be bfloat16 or float16 on a GPU, got {shape.dtype!r}")
    kernel = choose_kernel(
        tokens=tokens,
        top_k=shape.top_k,
        experts=shape.experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        shared_bytes=shared_bytes,
    )
    ids = ids.astype(np.int64)
    valid = (ids >= 0) & (ids < shape.experts)
    counts = np.bincount(ids[valid], minlength=shape.experts)
    plan = plan_groups(counts.tolist(), kernel.width_cap)
    up = StageShape(
        "gate_up",
        shape.intermediate,
        kernel.chunk_up(gated=shape.gated),
        shape.hidden,
        kernel.parts_up,
    )
    down = StageShape(
        "down", shape.hidden, kernel.chunk_down, shape.intermediate, kernel.parts_down
    )
    # Where combine is a launch of its own there are no such tasks.
    blocks = 0 if kernel.many else combine_stage(tokens, kernel.combine_tokens)
    slices = -(-shape.hidden // kernel.slice)
    block_of = np.broadcast_to(np.arange(tokens)[:, None] // kernel.combine_tokens, ids.shape)
    pairs = np.unique(ids[valid] * blocks + block_of[valid]) if blocks else np.zeros(0, np.int64)
    expert, block = np.divmod(pairs, max(1, blocks))
    bounds = np.searchsorted(expert, np.arange(1, shape.experts))
    return Workload(
        shape,
        tokens,
        int(valid.sum()),
        kernel,
        plan,
        (up, down),
        (up.tasks(plan), down.tasks(plan), blocks * slices),
        blocks,
        slices,
        np.bincount(block, minlength=blocks),
        np.bincount(block_of[valid], minlength=blocks) if blocks else np.zeros(0, np.int64),
        tuple(np.split(block, bounds)),
    )
