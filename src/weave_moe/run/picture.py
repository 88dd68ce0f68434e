"""Timelines as one picture: a panel a policy, a row a worker."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..host.stats import STAGES, RunStats
from .compare import Comparison, cores

__all__ = ["STAGE_COLOURS", "STEAL_COLOUR", "WAIT_COLOUR", "timeline_png"]

STAGE_COLOURS = ("#3f6fb5", "#e39a3b", "#4f9d69")
"""gate_up, down, combine."""
STEAL_COLOUR = "#c2185b"
WAIT_COLOUR = "#d5d8dd"
DPI = 120
# Inches: the picture's width, and above, below and between the panels.
WIDTH, HEAD, FOOT, GAP = 12.0, 1.05, 0.62, 0.46
# Sides of the panels, as a share of the width.
LEFT, RIGHT = 0.085, 0.985


def panel_inches(workers: int) -> float:
    """Height of a panel with a row for each of `workers`."""
    return max(0.6, min(0.26, max(0.03, 5.0 / workers)) * workers)


def timeline_png(comparison: Comparison, title: str, subtitle: str) -> bytes | None:
    """The runs of `comparison` as a PNG, or None where matplotlib is not installed.

    Colours are stages; white is idle, grey a wait for other tasks. A stolen task has a bar in
    `STEAL_COLOUR` along its foot. All panels share one time axis.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return None
    runs = [run for run in comparison.runs if run.stats is not None and run.stats.trace is not None]
    if not runs:
        return None
    workers = max(run.stats.workers for run in runs if run.stats)
    panel = panel_inches(workers)
    height = HEAD + FOOT + len(runs) * panel + (len(runs) - 1) * GAP
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    end = max(run.stats.makespan_ns for run in runs if run.stats)
    unit, name = (1e6, "ms") if end >= 2e6 else (1e3, "µs")
    # A file's name may hold what matplotlib would read as a formula, and be of any length.
    styles: tuple[tuple[str, float, dict[str, Any]], ...] = (
        (_shortened(title, 54), 0.30, {"fontsize": 14, "fontweight": "bold"}),
        (_shortened(subtitle, 170), 0.55, {"fontsize": 9, "color": "#555b66"}),
    )
    for text, down, style in styles:
        figure.text(LEFT, 1 - down / height, text, va="center", parse_math=False, **style)
    for index, run in enumerate(runs):
        stats = run.stats
        assert stats is not None
        assert stats.trace is not None
        top = HEAD + index * (panel + GAP)
        axes = figure.add_axes((LEFT, 1 - (top + panel) / height, RIGHT - LEFT, panel / height))
        pixel = end / (WIDTH * (RIGHT - LEFT) * DPI)
        # In narrow rows a stolen task is all mark.
        low = 0.16 if panel / workers * DPI >= 12 else -0.42
        for corners, colour in _boxes(stats, stats.trace, low):
            axes.add_collection(
                PolyCollection(
                    corners * np.array([1 / unit, 1.0]),
                    facecolors=colour,
                    edgecolors="white" if colour in STAGE_COLOURS else "none",
                    # A line between tasks where there is room for it, or it would hide them.
                    linewidths=np.where(corners[:, 1, 0] - corners[:, 0, 0] > 4 * pixel, 0.4, 0.0),
                )
            )
        axes.set_xlim(0, end * 1.005 / unit)
        axes.set_ylim(stats.workers - 0.5, -0.5)
        step = 2 ** max(0, math.ceil(math.log2(stats.workers / 16)))
        axes.set_yticks(range(0, stats.workers, step))
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.tick_params(axis="x", labelsize=8, labelbottom=index == len(runs) - 1)
        axes.set_facecolor("#fbfbfc")
        axes.grid(axis="x", color="#e6e8ec", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.axvline(
            stats.makespan_ns / unit, color="#8a909c", linewidth=0.8, linestyle=(0, (3, 2))
        )
        axes.set_title(run.policy, loc="left", fontsize=10, fontweight="bold", pad=4)
        axes.set_title(
            f"{stats.tasks} tasks · {stats.steals} stolen · busy {stats.busy_share:.0%} · "
            f"tail gap {stats.tail_gap_ns / unit:.2f} {name}",
            loc="right",
            fontsize=8.5,
            color="#555b66",
            pad=4,
        )
        if index == 0:
            axes.set_ylabel("worker", fontsize=9)
        if index == len(runs) - 1:
            axes.set_xlabel(
                f"{name} since the launch{_caveat(comparison)}",
                fontsize=9,
            )
    keys = [Patch(color=c, label=s) for s, c in zip(STAGES, STAGE_COLOURS, strict=True)]
    keys += [Patch(color=STEAL_COLOUR, label="stolen"), Patch(color=WAIT_COLOUR, label="waits")]
    figure.legend(
        handles=keys,
        loc="upper right",
        bbox_to_anchor=(RIGHT, 1 - 0.12 / height),
        ncol=len(keys),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.2,
    )
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names in other scripts
        figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _caveat(comparison: Comparison) -> str:
    if comparison.backend != "host":
        return ""
    turns = ""
    if comparison.workers > cores():
        turns = f", on {cores()} cores in turn: a long task waited for its core"
    return f" ({comparison.workers} CPU threads{turns}; no evidence of speed)"


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _boxes(
    stats: RunStats, trace: NDArray[Any], mark: float
) -> list[tuple[NDArray[np.float64], str]]:
    """Rectangles [n, 4 corners, (ns, worker)] and their colour, in drawing order.

    mark: upper edge of a stolen task's mark, in rows from the worker's middle.
    """
    worker = trace["worker"].astype(float)
    start, end = trace["start_ns"].astype(float), trace["end_ns"].astype(float)
    since = _waits_from(trace)
    waited = start - since > 0
    drawn = [(_rectangles(since[waited], start[waited], worker[waited], -0.12, 0.12), WAIT_COLOUR)]
    for stage, colour in enumerate(STAGE_COLOURS):
        mine = trace["stage"] == stage
        drawn.append((_rectangles(start[mine], end[mine], worker[mine], -0.42, 0.42), colour))
    stolen = trace["victim"] >= 0
    # A pixel wide at least, or the mark of a short task would vanish.
    least = stats.makespan_ns / 900
    wide = np.maximum(end[stolen], start[stolen] + least)
    drawn.append((_rectangles(start[stolen], wide, worker[stolen], mark, 0.42), STEAL_COLOUR))
    return [(corners, colour) for corners, colour in drawn if len(corners)]


def _waits_from(trace: NDArray[Any]) -> NDArray[np.float64]:
    """When each task's worker began to wait for it: its claim, or the end of the task before."""
    since = trace["claim_ns"].astype(float)
    order = np.lexsort((trace["start_ns"], trace["worker"]))
    same = trace["worker"][order][1:] == trace["worker"][order][:-1]
    ends = np.where(same, trace["end_ns"][order][:-1], 0).astype(float)
    since[order[1:]] = np.maximum(since[order[1:]], ends)
    return since


def _rectangles(
    start: NDArray[Any], end: NDArray[Any], worker: NDArray[Any], low: float, high: float
) -> NDArray[np.float64]:
    x = np.stack([start, end, end, start], axis=1)
    y = np.stack([worker + low, worker + low, worker + high, worker + high], axis=1)
    return np.stack([x, y], axis=2)
