"""What was measured near a load: this library's times and others', on the same layer.

The cells are shipped with the simulator's calibration, which `benchmarks/simulator.py --write`
makes from a result file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..shapes import LayerShape
from ..simulate import calibration
from ..simulate.calibrate import SHAPES

__all__ = ["MeasuredCell", "RatioErrors", "measured_cells", "measured_near", "ratio_errors"]

NEAR_TOKENS = 2.0
"""A cell speaks for up to so many times its tokens, and as few: the measured ones are a factor of 4
apart, so that between them both neighbours speak."""
NEAR_LOAD = 2.0
"""And for routings whose busiest expert, as a multiple of the mean, is within this factor. Of even
routings it differs by 1.6 from one measured number of tokens to the next."""


@dataclass(frozen=True)
class MeasuredCell:
    """One layer, number of tokens and skew as measured.

    used, busiest: experts with tokens and tokens of the busiest, means over the cell's routings.
    ours: policy -> microseconds.  others: other implementations -> microseconds.
    """

    model: str
    tokens: int
    skew: float
    used: float
    busiest: float
    ours: Mapping[str, float]
    others: Mapping[str, float]

    @property
    def best(self) -> tuple[str, float]:
        """The fastest of the others and its time; ("", inf) where there is none."""
        return min(self.others.items(), key=lambda item: item[1], default=("", math.inf))

    @property
    def gain(self) -> float:
        """The fastest of the others' time over ours; below 1 it was faster."""
        return self.best[1] / self.ours["steal"]

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens} tokens, skew {self.skew:g}"


@cache
def measured_cells() -> tuple[MeasuredCell, ...]:
    """All cells in which this library and at least one other implementation have a time."""
    cells = (MeasuredCell(*entry) for entry in calibration()["measured"])
    return tuple(c for c in cells if "steal" in c.ours and c.others and c.model in SHAPES)


def measured_near(
    shape: LayerShape, tokens: int, used: int, busiest: int
) -> tuple[MeasuredCell, ...]:
    """Cells of a layer of the same sizes whose tokens and load are near; nearest first.

    For each number of tokens the cell of the most similar routing, if it is near. None for more
    tokens than any cell has: that would be an extrapolation. 16-bit layers only: nothing else was
    measured.
    """
    sizes = (shape.hidden, shape.intermediate, shape.experts, shape.top_k, shape.gated)
    same_layer = []
    for cell in measured_cells():
        its = SHAPES[cell.model]
        if sizes == (its.hidden, its.intermediate, its.experts, its.top_k, its.gated):
            same_layer.append(cell)
    if shape.dtype == "float32" or tokens > max((c.tokens for c in same_layer), default=0):
        return ()
    found: dict[int, tuple[float, MeasuredCell]] = {}
    for cell in same_layer:
        far = abs(math.log(tokens / cell.tokens))
        # As multiples of the mean load, which is comparable where tokens differ a little.
        load = abs(math.log((max(1, busiest) / tokens) / (cell.busiest / cell.tokens)))
        same = tokens == cell.tokens
        spread = abs(math.log(max(1, used) / cell.used)) if same else 0.0
        if far > math.log(NEAR_TOKENS) + 1e-9 or load > math.log(NEAR_LOAD):
            continue
        # Of cells with the same load, the one that promises less.
        key = (load + spread, cell.gain)
        if cell.tokens not in found or key < (found[cell.tokens][0], found[cell.tokens][1].gain):
            found[cell.tokens] = (load + spread, cell)
    cells = [cell for _, cell in found.values()]
    cells.sort(key=lambda cell: abs(math.log(tokens / cell.tokens)))
    # A cell of exactly these tokens needs no neighbours.
    return tuple(cells[:1] if cells and cells[0].tokens == tokens else cells)


@dataclass(frozen=True)
class RatioErrors:
    """How far simulated times and ratios are from measured ones, on rows that were not fitted to.

    time: of stealing's time.  policies: by policy, of its time over stealing's. Each is exceeded by
    a tenth of the rows.
    """

    time: float
    policies: Mapping[str, float]


@cache
def ratio_errors() -> RatioErrors:
    """From the rows that are shipped with the calibration."""
    found = calibration()
    models = set(found["errors"]["held_out"]["models"])
    rows = [(*row, 0) for row in found["rows"] if row[0] in models]
    rows += [tuple(row) for row in found["policy_rows"]]
    steal: dict[tuple[Any, ...], float] = {}
    others: list[tuple[tuple[Any, ...], str, float]] = []
    for number, (model, tokens, skew, policy, us, simulated, held) in enumerate(rows):
        # Ratios are of rows of one file, whose contestants took turns.
        place = (number >= len(rows) - len(found["policy_rows"]), model, tokens, skew, held)
        if policy == "steal":
            steal[place] = simulated / us
        else:
            others.append((place, policy, simulated / us))
    ratios: dict[str, list[float]] = {}
    for place, policy, off in others:
        if place in steal:
            ratios.setdefault(policy, []).append(abs(off / steal[place] - 1))

    def tenth(values: list[float]) -> float:
        return statistics.quantiles(values, n=10)[-1]

    return RatioErrors(
        tenth([abs(off - 1) for off in steal.values()]),
        {policy: tenth(values) for policy, values in ratios.items()},
    )
