"""The plan in Python: from each slot's expert to groups, rows, and the task at an index.

The same arithmetic as `device/plan.h`, which runs inside a launch; here it serves whoever wants to
know a schedule without running it. `tests/test_plan.py` holds the two equal. A slot is one of a
token's `top_k` choices, numbered `token * top_k + j`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = [
    "NONE",
    "TOGETHER",
    "Cut",
    "Group",
    "Plan",
    "Rows",
    "StageShape",
    "Task",
    "Tile",
    "build_plan",
    "check_width_cap",
    "combine_stage",
    "combine_task",
    "count_tokens",
    "cut_tokens",
    "down_stage",
    "gate_up_stage",
    "group_width",
    "k_range",
    "max_groups",
    "max_rows",
    "padded_tokens",
    "place_rows",
    "plan_groups",
    "task_at",
    "tile_at",
]

NONE = -1
"""No slot in a row (padding), no row of a slot (skipped), no expert of a task (combine)."""

_LARGEST_EXPERTS = 65_534  # an expert's number is 16 bits, and all ones means none


def _div_up(a: int, b: int) -> int:
    return -(-a // b)


def check_width_cap(width_cap: int) -> int:
    """`width_cap` if a group may be that wide; else ValueError.

    Allowed: 8 to 256, a multiple of 8, from 64 up a multiple of 16.
    """
    if not 8 <= width_cap <= 256 or width_cap % (8 if width_cap < 64 else 16):
        raise ValueError(
            f"width_cap must be 8 .. 256, a multiple of 8, of 16 from 64 up, got {width_cap}"
        )
    return width_cap


def group_width(tokens: int) -> int:
    """Columns that a group of `tokens` takes: a multiple of 8, of 16 from 64 up."""
    return _div_up(tokens, 8) * 8 if tokens <= 56 else _div_up(tokens, 16) * 16


class Cut(NamedTuple):
    """How an expert's tokens are cut: evenly, at multiples of `unit`; only the last is padded."""

    groups: int
    unit: int
    units: int

    def at(self, group: int) -> int:
        """Position, among the expert's tokens, of the first token of its group number `group`."""
        return group * self.units // self.groups * self.unit


def cut_tokens(tokens: int, width_cap: int) -> Cut:
    """The cut of `tokens` into as few groups as `width_cap` allows."""
    groups = _div_up(tokens, width_cap)
    unit = 16 if groups and _div_up(tokens, groups) > 56 else 8
    return Cut(groups, unit, _div_up(tokens, unit))


def padded_tokens(tokens: int, width_cap: int) -> int:
    """Rows that an expert with `tokens` tokens takes, padding included."""
    cut = cut_tokens(tokens, width_cap)
    if not cut.groups:
        return 0
    last = cut.at(cut.groups - 1)
    return last + group_width(tokens - last)


def max_groups(slots: int, experts: int, width_cap: int) -> int:
    """No routing of `slots` slots over `experts` experts has more groups than this."""
    return min(experts, slots) + slots // width_cap


def max_rows(slots: int, experts: int) -> int:
    """No routing of `slots` slots over `experts` experts has more rows than this."""
    return slots + 15 * min(experts, slots)


class Group(NamedTuple):
    """A group: up to `width_cap` tokens of one expert, in the order of their slots."""

    row: int
    """First row."""
    first: int
    """First group of the same expert."""
    siblings: int
    """Groups of the same expert."""
    expert: int
    tokens: int

    @property
    def width(self) -> int:
        """Rows of the group, padding included."""
        return group_width(self.tokens)


@dataclass(frozen=True)
class Plan:
    """The groups of a routing, and each expert's share of them."""

    width_cap: int
    groups: tuple[Group, ...]
    expert_group: tuple[int, ...]
    """[experts + 1] first group of each expert; the last entry is the number of groups."""
    expert_row: tuple[int, ...]
    """[experts] first row of each expert."""
    expert_tokens: tuple[int, ...]
    """[experts] tokens of each expert."""
    rows: int
    """Rows of all groups, padding included."""

    @property
    def experts(self) -> int:
        """Number of experts, those without tokens included."""
        return len(self.expert_tokens)


class Rows(NamedTuple):
    """Where each slot went."""

    row_slot: tuple[int, ...]
    """[rows] slot in a row, NONE where the row is padding."""
    slot_row: tuple[int, ...]
    """[slots] row of a slot, NONE where the slot is skipped."""


def count_tokens(expert_of_slot: Sequence[int], experts: int) -> list[int]:
    """[experts] number of slots of each expert; a slot whose expert is NONE counts nowhere.

    Raises ValueError for an expert outside -1 .. experts - 1.
    """
    if not 1 <= experts <= _LARGEST_EXPERTS:
        raise ValueError(f"experts must be 1 .. {_LARGEST_EXPERTS}, got {experts}")
    tokens = [0] * experts
    for slot, expert in enumerate(expert_of_slot):
        if expert == NONE:
            continue
        if not 0 <= expert < experts:
            raise ValueError(
                f"expert_of_slot[{slot}] must be -1 (skip) .. {experts - 1}, got {expert}"
            )
        tokens[expert] += 1
    return tokens


def plan_groups(expert_tokens: Sequence[int], width_cap: int) -> Plan:
    """The plan of experts with `expert_tokens` [experts] tokens each.

    Raises ValueError for a negative count or a `width_cap` that is not allowed.
    """
    check_width_cap(width_cap)
    groups: list[Group] = []
    expert_group, expert_row, row = [], [], 0
    for expert, tokens in enumerate(expert_tokens):
        if tokens < 0:
            raise ValueError(f"expert_tokens[{expert}] must be 0 or more, got {tokens}")
        first = len(groups)
        expert_group.append(first)
        expert_row.append(row)
        cut = cut_tokens(tokens, width_cap)
        for g in range(cut.groups):
            lo, hi = cut.at(g), cut.at(g + 1) if g + 1 < cut.groups else tokens
            groups.append(Group(row + lo, first, cut.groups, expert, hi - lo))
        row += padded_tokens(tokens, width_cap)
    expert_group.append(len(groups))
    return Plan(
        width_cap,
        tuple(groups),
        tuple(expert_group),
        tuple(expert_row),
        tuple(int(t) for t in expert_tokens),
        row,
    )


def place_rows(plan: Plan, expert_of_slot: Sequence[int]) -> Rows:
    """The rows of `plan`'s slots: within an expert, in the order of the slots.

    `expert_of_slot` [slots] must be what the plan was counted from.
    """
    row_slot, slot_row = [NONE] * plan.rows, [NONE] * len(expert_of_slot)
    free = list(plan.expert_row)
    for slot, expert in enumerate(expert_of_slot):
        if expert == NONE:
            continue
        row_slot[free[expert]], slot_row[slot] = slot, free[expert]
        free[expert] += 1
    return Rows(tuple(row_slot), tuple(slot_row))


def build_plan(
    expert_of_slot: Sequence[int], experts: int, width_cap: int = 256
) -> tuple[Plan, Rows]:
    """Plan and rows of a routing.

    Args:
        expert_of_slot: [slots] expert of each slot, NONE where the slot is skipped.
        experts: number of experts, 1 .. 65,534.
        width_cap: most tokens in a group: 8 .. 256, a multiple of 8, of 16 from 64 up.

    Raises:
        ValueError: an expert, `experts` or `width_cap` outside its range.
    """
    plan = plan_groups(count_tokens(expert_of_slot, experts), width_cap)
    return plan, place_rows(plan, expert_of_slot)


TOGETHER: Final = 8
"""Groups of an expert whose tiles are neighbours in the order of tasks."""


class Tile(NamedTuple):
    """A task's place: K range `part` of output chunk `chunk` of group `group`."""

    group: int
    chunk: int
    part: int


def tile_at(groups: Sequence[Group], chunks: int, parts: int, index: int) -> Tile:
    """The task at `index` of a stage: ordered by expert, block of groups, chunk, group, part.

    A block is TOGETHER groups of the expert, the last one what is left. An expert's tiles number
    siblings x chunks, so `index // parts // chunks` is some group of it.
    """
    tile, part = divmod(index, parts)
    some = groups[tile // chunks]
    block, within = divmod(tile - some.first * chunks, TOGETHER * chunks)
    chunk, sibling = divmod(within, min(TOGETHER, some.siblings - block * TOGETHER))
    return Tile(some.first + block * TOGETHER + sibling, chunk, part)


@dataclass(frozen=True)
class StageShape:
    """What a stage computes for each group, and how finely it is cut.

    `outputs` output columns a row, in chunks of `chunk_outputs`; each a sum over `reduction`
    inputs, in `parts` K ranges. The combine stage has no groups: see `combine_stage`.
    """

    stage: str
    outputs: int
    chunk_outputs: int
    reduction: int
    parts: int = 1

    def __post_init__(self) -> None:
        for name in ("outputs", "chunk_outputs", "reduction", "parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def chunks(self) -> int:
        """Chunks of a group."""
        return _div_up(self.outputs, self.chunk_outputs)

    @property
    def tasks_per_group(self) -> int:
        """Tasks of a group."""
        return self.chunks * self.parts

    def tasks(self, plan: Plan) -> int:
        """Tasks of the stage."""
        return len(plan.groups) * self.tasks_per_group


def gate_up_stage(
    hidden: int, intermediate: int, *, gated: bool = True, parts: int = 1
) -> StageShape:
    """The first stage: a chunk is 128 rows of W13, so 64 outputs if gated and 128 if not."""
    return StageShape("gate_up", intermediate, 64 if gated else 128, hidden, parts)


def down_stage(hidden: int, intermediate: int, *, parts: int = 1) -> StageShape:
    """The second stage: a chunk is 128 rows of W2, so 128 outputs."""
    return StageShape("down", hidden, 128, intermediate, parts)


def combine_stage(tokens: int, combine_tokens: int) -> int:
    """Tasks of the third stage, `combine_tokens` tokens each."""
    if combine_tokens < 1:
        raise ValueError(f"combine_tokens must be at least 1, got {combine_tokens}")
    return _div_up(tokens, combine_tokens)


def k_range(reduction: int, parts: int, part: int) -> tuple[int, int]:
    """(start, count) of K range `part` of `parts`: cut at multiples of 16, evenly; may be empty."""
    units = _div_up(reduction, 16)
    start = min(16 * (part * units // parts), reduction)
    return start, min(16 * ((part + 1) * units // parts), reduction) - start


@dataclass(frozen=True)
class Task:
    """A micro-task, in full. Counts are in tokens, output columns and inputs of the reduction."""

    stage: str
    expert: int
    """NONE for combine."""
    token_start: int
    """Position among the expert's tokens in slot order; for combine, the token's number."""
    token_count: int
    chunk_start: int
    """First output column."""
    chunk_count: int
    k_start: int
    k_count: int


def task_at(plan: Plan, stage: StageShape, index: int) -> Task:
    """The task at `index` of `stage`, 0 <= index < stage.tasks(plan); else IndexError."""
    if not 0 <= index < stage.tasks(plan):
        raise IndexError(f"index must be 0 .. {stage.tasks(plan) - 1}, got {index}")
    tile = tile_at(plan.groups, stage.chunks, stage.parts, index)
    group = plan.groups[tile.group]
    chunk = tile.chunk * stage.chunk_outputs
    return Task(
        stage.stage,
        group.expert,
        group.row - plan.expert_row[group.expert],
        group.tokens,
        chunk,
        min(stage.chunk_outputs, stage.outputs - chunk),
        *k_range(stage.reduction, stage.parts, tile.part),
    )


def combine_task(tokens: int, hidden: int, top_k: int, combine_tokens: int, index: int) -> Task:
    """Task `index` of the third stage: it adds the `top_k` rows of each of its tokens."""
    start = index * combine_tokens
    if not 0 <= start < tokens:
        last = combine_stage(tokens, combine_tokens) - 1
        raise IndexError(f"index must be 0 .. {last}, got {index}")
    count = min(combine_tokens, tokens - start)
    return Task("combine", NONE, start, count, 0, hidden, 0, top_k)
