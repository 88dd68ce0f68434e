"""Fitting a machine's costs to measured launches, and the errors that are left.

Rows are those of `benchmarks/experts.py`. Their routings were drawn on a GPU and cannot be drawn
again elsewhere, so each cell is simulated on routings of the same distribution, chosen such that
they use as many experts, and load the busiest as much, as the row says. Nothing is chosen by time.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.cuda import slab_tokens
from ..schedule import Knobs
from ..shapes import LayerShape
from .machine import Machine
from .result import run_workload
from .workload import Workload, make_workload

__all__ = [
    "FREE",
    "SHAPES",
    "START",
    "Cell",
    "Predicted",
    "Ranking",
    "Works",
    "draw_routings",
    "errors_of",
    "fit",
    "free_for",
    "predict",
    "ranking",
    "read_cells",
    "summary",
]

SHAPES: Mapping[str, LayerShape] = {
    "qwen3-30b": LayerShape(2048, 768, 128, 8),
    "qwen3-235b": LayerShape(4096, 1536, 128, 8),
    "mixtral": LayerShape(4096, 14336, 8, 2),
    "deepseek-v3": LayerShape(7168, 2048, 256, 8),
}
"""Layers of the result file, by its names."""

FREE: Mapping[str, tuple[float, float]] = {
    "hbm_tbs": (4.3, 4.8),
    "l2_tbs": (6.0, 12.0),
    "spread": (0.0, 0.2),
    "launch_us": (1.5, 7.0),
    "latency_us": (0.0, 0.6),
    "gather_us": (0.0, 15.0),
    "gather_ticket_us": (0.2, 3.0),
    "sort_us": (4.0, 30.0),
    "combine_launch_us": (1.0, 10.0),
    "matrix_tflops": (500.0, 700.0),
    "epilogue_us": (0.2, 2.0),
    "publish_us": (0.2, 2.0),
    "combine_us": (0.5, 4.0),
}
"""Costs that a fit may change, and within which bounds. All else is measured apart or given. The
matrix rate is among them because the clock drops under long products. Not among them is what shows
only where few SMs have work, `sm_gbs`, `stage_us`, `copy_row_ns` and `boost`: the rows of a fit
hardly tell, so it would bend these to make up for something else."""

START = Machine(
    name="h200",
    sms=132,
    hbm_tbs=4.65,
    l2_tbs=7.8,
    sm_gbs=92.0,
    matrix_tflops=670.0,
    boost=1.25,
    spread=0.07,
    launch_us=4.0,
    plan_us=2.8,
    plan_slot_ns=0.8,
    gather_us=3.0,
    gather_ticket_us=2.5,
    sort_us=25.0,
    combine_launch_us=8.0,
    stage_us=0.3,
    copy_row_ns=22.8,
    latency_us=0.15,
    epilogue_us=1.0,
    publish_us=0.6,
    combine_us=2.4,
)
"""H200 before a fit: plan as the kernel's timeline has it, a row's copy from the 1.76 us that 64
rows took a stage (docs/measured.md) less `stage_us`. `stage_us`, `sm_gbs` and `boost` are what
makes lists of single SMs come out best: rows of `static_expert` of the fitted models on an idle
GPU, which are neither fitted to nor among the errors that are stated. The rest is near where
earlier fits ended."""

CANDIDATES = 400
"""Routings drawn to choose from."""


@dataclass(frozen=True)
class Cell:
    """A measured row: experts used and busiest load are means over the cell's routings.

    held: SMs that another kernel had meanwhile.
    """

    model: str
    tokens: int
    skew: float
    policy: str
    us: float
    active: float
    busiest: float
    held: int = 0

    @property
    def load(self) -> tuple[str, int, float]:
        """What decides its routings."""
        return self.model, self.tokens, self.skew

    @property
    def place(self) -> tuple[str, int, float, int]:
        """What its policies have in common."""
        return self.model, self.tokens, self.skew, self.held


def read_cells(path: str | Path) -> list[Cell]:
    """The timed rows of this library in a result file: contestants `weave` and `weave:POLICY`.

    Takes the files of `benchmarks/experts.py` and `benchmarks/policies.py`. Of rows measured again,
    such as after a change of the kernel, the last one counts. Left out are calls that take several
    launches, recorded routings, and other knobs than the default ones.
    """
    default = Knobs()
    cells = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        family, _, policy = row["contestant"].partition(":")
        shape = SHAPES.get(row["model"])
        one_launch = shape is not None and row["T"] <= slab_tokens(shape)
        knobs = row.get("knobs") or {}
        plain = row["skew"] is not None and all(
            value == getattr(default, name) for name, value in knobs.items()
        )
        if family == "weave" and "us" in row and one_launch and plain:
            cell = Cell(
                row["model"],
                row["T"],
                row["skew"],
                policy or "steal",
                row["us"],
                row["active"],
                row["maxload"],
                row.get("sms_held", 0),
            )
            key = (*cell.place, cell.policy)
            cells[key] = cell
    return list(cells.values())


def _draw(cell: Cell, shape: LayerShape, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    size = (cell.tokens, shape.experts)
    if cell.skew == 0:
        logits = generator.standard_normal(size)
    else:
        popularity = -cell.skew * np.log(np.arange(1, shape.experts + 1))
        logits = generator.permutation(popularity) + generator.gumbel(size=size)
    top = np.argpartition(-logits, shape.top_k - 1, axis=1)[:, : shape.top_k]
    return top.astype(np.int64)


def draw_routings(cell: Cell, count: int, seed: int = 0) -> list[npt.NDArray[np.int64]]:
    """`count` routings whose mean of experts used and of the busiest load is nearest the cell's."""
    shape = SHAPES[cell.model]
    generator = np.random.default_rng([seed, cell.tokens, round(cell.skew * 10)])
    candidates = [_draw(cell, shape, generator) for _ in range(CANDIDATES)]
    loads = [np.bincount(ids.ravel(), minlength=shape.experts) for ids in candidates]
    traits = np.array([[(load > 0).sum(), load.max()] for load in loads], dtype=float)
    wanted = np.array([cell.active, cell.busiest])
    scale = np.maximum(traits.std(axis=0), 1e-9)
    chosen: list[int] = []
    for n in range(1, count + 1):  # one after the other, each correcting the mean so far
        total = traits[chosen].sum(axis=0)
        distance = np.abs((total + traits) / n - wanted) / scale
        distance[chosen] = math.inf
        chosen.append(int(distance.sum(axis=1).argmin()))
    return [candidates[i] for i in chosen]


@dataclass(frozen=True)
class Predicted:
    """A cell and its simulated time."""

    cell: Cell
    us: float

    @property
    def error(self) -> float:
        """Relative: simulated over measured, less 1."""
        return self.us / self.cell.us - 1


Works = dict[tuple[str, int, float], list[Workload]]


def workloads(cells: Iterable[Cell], routings: int, seed: int = 0) -> Works:
    """The drawn launches of each place."""
    works: Works = {}
    for cell in cells:
        if cell.load not in works:
            works[cell.load] = [
                make_workload(SHAPES[cell.model], ids)
                for ids in draw_routings(cell, routings, seed)
            ]
    return works


def predict(
    machine: Machine,
    cells: Sequence[Cell],
    *,
    routings: int = 4,
    seed: int = 0,
    works: Works | None = None,
) -> list[Predicted]:
    """Each cell's simulated time: the mean over `routings` launches."""
    works = works or workloads(cells, routings, seed)
    found = []
    for cell in cells:
        times = [
            run_workload(w, machine, cell.policy, held=cell.held).time_us for w in works[cell.load]
        ]
        found.append(Predicted(cell, statistics.fmean(times)))
    return found


def _loss(predicted: Iterable[Predicted]) -> float:
    return math.sqrt(statistics.fmean(p.error**2 for p in predicted))


def fit(
    start: Machine,
    cells: Sequence[Cell],
    *,
    routings: int = 3,
    rounds: int = 3,
    seed: int = 0,
    free: Mapping[str, tuple[float, float]] = FREE,
    said: Callable[[str], None] = lambda text: None,
    works: Works | None = None,
) -> Machine:
    """`start` with the costs in `free` that make the root mean square error of `cells` least.

    A coordinate search: each cost in turn goes a step up or down while that helps; then smaller
    steps, `rounds` times. works: the launches of the cells, where their routings are known; else
    `routings` are drawn for each.
    """
    works = works or workloads(cells, routings, seed)

    def loss_of(machine: Machine) -> float:
        return _loss(predict(machine, cells, works=works))

    best, least = start, loss_of(start)
    for number in range(rounds):
        for name, (low, high) in free.items():
            step = (high - low) / (10 * 2**number)
            for sign in (1, -1):
                moved = False
                while True:
                    value = round(min(high, max(low, getattr(best, name) + sign * step)), 6)
                    trial = replace(best, **{name: value})
                    loss = loss_of(trial) if value != getattr(best, name) else math.inf
                    if loss >= least:
                        break
                    best, least, moved = trial, loss, True
                if moved:
                    break
            said(f"{number} {name} {getattr(best, name):g}: {least:.4f}")
    return best


def summary(predicted: Sequence[Predicted]) -> dict[str, Any]:
    """Median and worst of the absolute relative errors, and the cell of the worst."""
    errors = sorted(predicted, key=lambda p: abs(p.error))
    worst = errors[-1].cell
    return {
        "cells": len(errors),
        "median": round(statistics.median(abs(p.error) for p in errors), 4),
        "worst": round(abs(errors[-1].error), 4),
        "worst_cell": f"{worst.model} T={worst.tokens} skew {worst.skew:g} {worst.policy}"
        + (f", {worst.held} SMs held" if worst.held else ""),
    }


def free_for(read: float, matrix: float) -> dict[str, tuple[float, float]]:
    """`FREE` for a GPU of other rates, TB/s and TFLOP/s, as they were measured of it."""
    return {
        **FREE,
        "hbm_tbs": (round(0.92 * read, 3), round(1.06 * read, 3)),
        "matrix_tflops": (round(0.7 * matrix, 1), round(1.02 * matrix, 1)),
    }


def errors_of(predicted: Sequence[Predicted]) -> dict[str, Any]:
    """Median and worst, over all and by policy, and the ranking of policies."""
    policies = sorted({p.cell.policy for p in predicted})
    order = ranking(predicted)
    return {
        "models": sorted({p.cell.model for p in predicted}),
        "tokens": sorted({p.cell.tokens for p in predicted}),
        "held": sorted({p.cell.held for p in predicted}),
        **summary(predicted),
        "by_policy": {
            policy: summary([p for p in predicted if p.cell.policy == policy])
            for policy in policies
        },
        "ranking": {
            "pairs_above_5_percent": order.pairs,
            "right": order.right,
            "policies_measured": policies,
        },
    }


@dataclass(frozen=True)
class Ranking:
    """Pairs of policies in one place whose measured times differ by more than `above`."""

    above: float
    pairs: int
    right: int


def ranking(predicted: Sequence[Predicted], above: float = 0.05) -> Ranking:
    """How many of the pairs that differ by more than `above` the simulation ranks as measured."""
    places: dict[tuple[str, int, float, int], list[Predicted]] = {}
    for p in predicted:
        places.setdefault(p.cell.place, []).append(p)
    pairs = right = 0
    for there in places.values():
        for i, a in enumerate(there):
            for b in there[i + 1 :]:
                if max(a.cell.us, b.cell.us) > (1 + above) * min(a.cell.us, b.cell.us):
                    pairs += 1
                    right += (a.us < b.us) == (a.cell.us < b.cell.us)
    return Ranking(above, pairs, right)
