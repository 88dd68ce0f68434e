"""The heat map: workers by time, how much of each moment was spent in tasks."""

from __future__ import annotations

import io
import math
import warnings

from .measures import Summary, busy_grid
from .records import Profile
from .report import beside_line

__all__ = ["heat_map"]

DPI, WIDTH = 120, 12.0
HEAD, FOOT, GAP = 1.05, 0.62, 0.5
LEFT, RIGHT, BAR = 0.085, 0.93, 0.012
BINS = 600


def heat_map(profile: Profile, summaries: tuple[Summary, ...]) -> bytes | None:
    """A PNG with a panel a policy, a row a worker, or None where matplotlib is not installed.

    Dark is idle, bright is busy; all panels share one time axis. What no worker could do, after a
    launch's end, is left blank.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
    except ImportError:
        return None
    runs = profile.runs
    panel = max(0.7, min(2.4, 0.16 * max(run.workers for run in runs)))
    height = HEAD + FOOT + len(runs) * panel + (len(runs) - 1) * GAP
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    end = max(1, *(run.makespan_ns for run in runs))
    unit, name = (1e6, "ms") if end >= 2e6 else (1e3, "µs")
    title = f"PREDICTED · {profile.title}" if profile.predicted else profile.title
    lines = (
        (title, 60, 0.30, 14.0, "bold", "#1c2026"),
        (f"{profile.size}; {profile.routing}", 170, 0.55, 9.0, "normal", "#555b66"),
        (profile.machine, 170, 0.73, 9.0, "normal", "#555b66"),
    )
    for text, most, down, size, weight, colour in lines:
        shown = text if len(text) <= most else f"{text[: most - 1]}…"
        figure.text(
            *(LEFT, 1 - down / height, shown),
            va="center",
            parse_math=False,  # a file's name may hold what would be read as a formula
            fontsize=size,
            fontweight=weight,
            color=colour,
        )
    for index, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        top = HEAD + index * (panel + GAP)
        place = (LEFT, 1 - (top + panel) / height, RIGHT - LEFT, panel / height)
        axes = figure.add_axes(place)
        bins = max(1, round(BINS * run.makespan_ns / end))
        axes.imshow(
            busy_grid(run, bins, run.makespan_ns),
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmin=0,
            vmax=1,
            extent=(0, max(1, run.makespan_ns) / unit, run.workers - 0.5, -0.5),
        )
        axes.set_xlim(0, end / unit)
        step = 2 ** max(0, math.ceil(math.log2(run.workers / 8)))
        axes.set_yticks(range(0, run.workers, step))
        axes.tick_params(length=2, labelsize=8)
        axes.tick_params(axis="x", labelbottom=index == len(runs) - 1)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_title(run.policy, loc="left", fontsize=10, fontweight="bold", pad=4)
        beside = beside_line(run)
        axes.set_title(
            f"{summary.tasks:,} tasks · {summary.steals:,} stolen · "
            f"busy {summary.busy_share:.1%} · tail gap {summary.tail_gap_ns / unit:.2f} {name}"
            + (f" · {beside}" if beside else ""),
            loc="right",
            fontsize=8.5,
            color="#555b66",
            pad=4,
        )
        if index == 0:
            axes.set_ylabel("worker", fontsize=9)
        if index == len(runs) - 1:
            when = f"{name} since the launch began"
            caveat = " (CPU threads; no evidence of speed)" if profile.producer == "cpu" else ""
            axes.set_xlabel(when + caveat, fontsize=9)
    scale = figure.add_axes((RIGHT + 0.012, 1 - (HEAD + panel) / height, BAR, panel / height))
    figure.colorbar(ScalarMappable(Normalize(0, 1), "viridis"), cax=scale)
    scale.tick_params(labelsize=8)
    scale.set_ylabel("in tasks", fontsize=9)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names in other scripts
        figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()
