"""The plots of docs/ and the README; apart, because they need matplotlib."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import report
from tables.policies import idle_cells, over_steal
from tables.rivals import best_rival, ratio_to_rival
from tables.rows import EVEN, ORDER, SKEWED, Cell, Rows, geometric_mean, in_rows

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKS = "osD^vP"
Jobs = dict[tuple[Cell, int], Rows]


def lines_of(cells: dict[Cell, Rows], routing: str, value: Any) -> dict[str, tuple[list, list]]:
    """{model: (tokens, values)} of the cells that have a value."""
    lines: dict[str, tuple[list, list]] = {}
    for model, tokens in in_rows(cells):
        rows = cells.get(Cell(model, tokens, routing))
        found = None if rows is None else value(rows)
        if found is not None:
            xs, ys = lines.setdefault(model, ([], []))
            xs.append(tokens)
            ys.append(found)
    return lines


def share_of(rows: Rows) -> float | None:
    ours = rows.get("weave", {})
    return ours["floor_us"] / ours["us"] if "us" in ours else None


def share_of_rival(rows: Rows) -> float | None:
    rival = best_rival(rows)
    return None if rival is None else rival["floor_us"] / rival["us"]


def panels(count: int, title: str, label: str) -> tuple[Any, Any]:
    figure, axes = plt.subplots(
        1, count, figsize=(4 * count + 1.5, 3.5), sharey=True, squeeze=False, layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    axes[0, 0].set_ylabel(label)
    for axis in axes[0]:
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def by_tokens(axis: Any, routing: str, ticks: list[int]) -> None:
    axis.set_title(f"{routing} routing", fontsize=10)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{t:,}" for t in ticks], rotation=45, fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("tokens")


def tokens_of(cells: dict[Cell, Rows]) -> list[int]:
    return sorted({cell.tokens for cell in cells})


def save(figure: Any, folder: Path, name: str) -> None:
    labelled = figure.axes[0].get_legend_handles_labels()
    figure.legend(*labelled, loc="outside right center", fontsize=8, frameon=False)
    # No version in the file: it would differ without a reason.
    figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def rivals(cells: dict[Cell, Rows], folder: Path) -> None:
    if not any(ratio_to_rival(rows) for rows in cells.values()):
        return
    figure, axes = panels(2, "Against the best rival in each cell", "times as fast")
    for axis, routing in zip(axes, (EVEN, SKEWED), strict=True):
        axis.axhline(1, color="black", linewidth=0.8)
        for i, (model, (xs, ys)) in enumerate(lines_of(cells, routing, ratio_to_rival).items()):
            axis.plot(xs, ys, marker=MARKS[i % 6], color=COLOURS[i % 6], label=model, markersize=4)
        by_tokens(axis, routing, tokens_of(cells))
    save(figure, folder, "rivals")


def floor(cells: dict[Cell, Rows], folder: Path) -> None:
    if not any(share_of(rows) for rows in cells.values()):
        return
    figure, axes = panels(
        2, "Share of the floor: weave-moe (solid), the best rival (dashed)", "of the floor"
    )
    for axis, routing in zip(axes, (EVEN, SKEWED), strict=True):
        axis.axhline(1, color="black", linewidth=0.8)
        theirs = lines_of(cells, routing, share_of_rival)
        for i, (model, (xs, ys)) in enumerate(lines_of(cells, routing, share_of).items()):
            look = {"marker": MARKS[i % 6], "color": COLOURS[i % 6], "markersize": 4}
            axis.plot(xs, ys, label=model, **look)
            if model in theirs:
                axis.plot(*theirs[model], linestyle="--", linewidth=0.9, **look)
        by_tokens(axis, routing, tokens_of(cells))
    save(figure, folder, "floor")


def common_tokens(cells: dict[Cell, Rows], routing: str) -> list[int]:
    """Numbers of tokens that at least half of the models have: means of others are of others."""
    pairs = {(cell.model, cell.tokens) for cell in cells if cell.routing == routing}
    models = {model for model, _ in pairs}
    counts = sorted({tokens for _, tokens in pairs})
    return [t for t in counts if 2 * sum(pair[1] == t for pair in pairs) >= len(models)]


def policies(jobs: Jobs, folder: Path) -> None:
    """Means over models by tokens: even and skewed on an idle GPU, and skewed with SMs held."""
    cells = idle_cells(jobs)
    if not any(over_steal(rows, "counter") for rows in cells.values()):
        return
    shown = [(f"{routing} routing", routing, cells) for routing in (EVEN, SKEWED)]
    held = Counter(sms for _, sms in jobs if sms)
    if held:
        (most, _), *_ = held.most_common(1)
        beside = {cell: rows for (cell, sms), rows in jobs.items() if sms == most}
        models = ", ".join(dict.fromkeys(cell.model for cell in beside))
        shown.append((f"{most} SMs held, {EVEN} routing, {models}", EVEN, beside))
    title = "Time over that of stealing in the same loop, geometric means of models"
    figure, axes = panels(len(shown), title, "times")
    for axis, (title, routing, some) in zip(axes, shown, strict=True):
        ticks = common_tokens(some, routing)
        for i, name in enumerate(ORDER):
            points = []
            for tokens in ticks:
                rows = [r for c, r in some.items() if c.tokens == tokens and c.routing == routing]
                pairs = [pair[0] for r in rows if (pair := over_steal(r, name))]
                if pairs:
                    points.append((tokens, geometric_mean(pairs)))
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    **{"marker": MARKS[i], "color": COLOURS[i], "label": name, "markersize": 4},
                )
        by_tokens(axis, routing, ticks)
        axis.set_title(title, fontsize=10)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_locator(FixedLocator([0.8, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16]))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    save(figure, folder, "policies")


def layer(cells: dict[Cell, Rows], folder: Path) -> None:
    if not any(ratio_to_rival(rows) for rows in cells.values()):
        return
    routings = [r for r in (EVEN, SKEWED) if lines_of(cells, r, ratio_to_rival)]
    models = list(dict.fromkeys(cell.model for cell in cells))
    title = "The whole layer against the best rival"
    figure, axes = panels(len(routings), title, "times as fast")
    for axis, routing in zip(axes, routings, strict=True):
        axis.axhline(1, color="black", linewidth=0.8)
        for model, (xs, ys) in lines_of(cells, routing, ratio_to_rival).items():
            i = models.index(model)
            # From the seventh on, a colour comes again with another mark and dashes.
            look = {"marker": MARKS[(i + i // 6) % 6], "color": COLOURS[i % 6], "markersize": 4}
            axis.plot(xs, ys, label=model, linestyle="--" if i >= 6 else "-", **look)
        by_tokens(axis, routing, tokens_of(cells))
    save(figure, folder, "layer")


def write(
    cells: dict[Cell, Rows], jobs: Jobs, whole: dict[Cell, Rows], folder: Path | None = None
) -> None:
    """All that there are results for."""
    folder = report.DETAILS.parent if folder is None else folder
    rivals(cells, folder)
    floor(cells, folder)
    policies(jobs, folder)
    layer(whole, folder)
