"""A benchmark's rows as JSON lines, CSV, Markdown, tables on the terminal and a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from .measure import TIMED
from .timing import Row

__all__ = [
    "COLUMNS",
    "Section",
    "csv_text",
    "json_lines",
    "markdown",
    "picture_png",
    "rich_table",
    "sections",
]

COLUMNS = (
    *("preset", "hidden", "intermediate", "experts", "top_k", "dtype", "activation"),
    *("T", "routing", "active", "busiest", "neighbour_sms", "contestant", "ours", "status"),
    *("us", "p99_us", "spread", "rounds", "timed_as", "tflops", "tbs"),
    *("floor_us", "of_floor", "of_matrix", "of_read", "to_best", "over_alone"),
    *("rel_err", "max_row_err", "rows_checked", "version", "note", "error"),
    *("evidence", "gpu", "driver", "torch", "triton", "read_tbs", "matrix_tflops"),
    *("weave_moe", "seed", "date", "command"),
)
"""What rows may have, in the order of the CSV file's columns."""

HEAD = (
    *("tokens", "contestant", "us", "p99", "spread", "TFLOP/s", "TB/s", "floor", "matrix", "read"),
    "to best",
)
"""Of tables. floor, matrix, read: shares of the least time and of the machine's two rates."""
CPU_HEAD = ("tokens", "contestant", "us", "p99", "spread", "to best")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#7b3294")
MARKS = "osD^vPX*"
EACH_CALL = "*"
"""Marks times that are of calls, not of graph replays."""


@dataclass(frozen=True)
class Section:
    """A layer, a dtype, a routing and a neighbour: its rows by tokens and contestant."""

    title: str
    rows: tuple[Row, ...]

    @property
    def head(self) -> tuple[str, ...]:
        """The columns: no share of what a machine can do where that was not measured."""
        return HEAD if any(row.get("floor_us") for row in self.rows) else CPU_HEAD

    def lines(self) -> list[list[str]]:
        """The table's cells; words instead of numbers where there is no time."""
        return [_line(row, self.head) for row in self.rows]


def sections(rows: Iterable[Row]) -> list[Section]:
    """The rows in the order in which they were measured, a section after the other."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row["preset"], row["dtype"], row["routing"], row["neighbour_sms"])
        groups.setdefault(key, []).append(row)
    found = []
    for (preset, dtype, routing, sms), some in groups.items():
        beside = f", {sms} SMs held by another kernel" if sms else ""
        cpu = "" if some[0].get("gpu") else " (CPU time, not evidence of speed)"
        found.append(Section(f"{preset}, {dtype}, {routing}{beside}{cpu}", tuple(some)))
    return found


def _line(row: Row, head: Sequence[str]) -> list[str]:
    name = str(row["contestant"])
    if row.get("timed_as") == "calls" and row.get("gpu"):
        name += EACH_CALL
    cells = {"tokens": f"{row['T']:,}", "contestant": name, "us": str(row["status"])}
    if row["status"] == TIMED:
        cells |= {
            "us": f"{row['us']:,.1f}",
            "p99": f"{row['p99_us']:,.1f}",
            "spread": f"{row['spread']:.1%}",
            "TFLOP/s": f"{row['tflops']:,.1f}",
            "TB/s": f"{row['tbs']:.3f}",
            "floor": _share(row.get("of_floor")),
            "matrix": _share(row.get("of_matrix")),
            "read": _share(row.get("of_read")),
            "to best": "" if row.get("to_best") is None else f"{row['to_best']:.3f}",
        }
    return [cells.get(name, "") for name in head]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def rich_table(section: Section) -> Table:
    """A section for a terminal; the fastest of each number of tokens is bold."""
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold",
        title=section.title,
        title_justify="left",
    )
    for name in section.head:
        left = name == "contestant"
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    before = None
    for row, line in zip(section.rows, section.lines(), strict=True):
        shown = [line[0] if row["T"] != before else "", *line[1:]]
        before = row["T"]
        table.add_row(*shown, style="bold" if row.get("to_best") == 1.0 else "")
    return table


def json_lines(rows: Iterable[Row]) -> bytes:
    """One JSON object a row."""
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()


def csv_text(rows: Iterable[Row]) -> bytes:
    """A line a row, `COLUMNS` first; empty where a row has no value."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="raise", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def markdown(
    head: Sequence[str],
    contestants: Sequence[tuple[str, str, str]],
    absent: Mapping[str, str],
    rows: Sequence[Row],
    wrong: Sequence[str],
) -> bytes:
    """The whole benchmark as a page.

    head: paragraphs about it.  contestants: name, version, what a call includes.  absent: name ->
    why.  wrong: lines about times that are not reported.
    """
    parts = ["# weave-moe bench", *head]
    if wrong:
        parts += ["## Not reported", "\n".join(f"- {_escaped(line)}" for line in wrong)]
    parts += [
        "## Contestants",
        _table(("contestant", "version", "includes"), [list(c) for c in contestants]),
    ]
    if absent:
        parts += ["Not here:", _table(("rival", "why"), [list(item) for item in absent.items()])]
    parts.append("## Times")
    for section in sections(rows):
        parts += [f"### {section.title}", _table(section.head, section.lines())]
    reasons = [
        f"{row['contestant']}, {row['preset']} {row['dtype']}: {row['error']}"
        for row in rows
        if row["status"] == "not run"
    ]
    if reasons:
        parts += ["Not run:", "\n".join(f"- {_escaped(line)}" for line in dict.fromkeys(reasons))]
    return ("\n\n".join(parts) + "\n").encode()


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    every = [[_escaped(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *every))


def picture_png(rows: Sequence[Row]) -> bytes | None:
    """A panel a section, a line a contestant by tokens: the share of the floor, where it is known,
    else microseconds. None without matplotlib or without times."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    shown = [s for s in sections(rows) if any(row["status"] == TIMED for row in s.rows)]
    if not shown:
        return None
    value = "of_floor" if all(r.get("of_floor") for r in rows if r["status"] == TIMED) else "us"
    across = min(3, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(4.6 * across + 1.8, 3.4 * down + 0.3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(r["contestant"] for r in rows if r["status"] == TIMED))
    handles: dict[str, Any] = {}
    for number, section in enumerate(shown):
        axis = figure.add_subplot(down, across, number + 1)
        for i, name in enumerate(names):
            its = [r for r in section.rows if r["contestant"] == name and r["status"] == TIMED]
            its.sort(key=lambda row: row["T"])
            if its:
                (handles[name],) = axis.plot(
                    [row["T"] for row in its],
                    [row[value] for row in its],
                    marker=MARKS[i % len(MARKS)],
                    color=COLOURS[i % len(COLOURS)],
                    linestyle="-" if its[0]["ours"] else "--",
                    markersize=4,
                    linewidth=1.2,
                )
        ticks = sorted({row["T"] for row in section.rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{t:,}" for t in ticks], rotation=45, fontsize=7)
        axis.minorticks_off()
        if value == "us":
            axis.set_yscale("log")
        else:
            axis.axhline(1, color="black", linewidth=0.8)
        # A name may hold what matplotlib would read as a formula.
        axis.set_title(section.title.replace("$", r"\$"), fontsize=8)
        axis.set_xlabel("tokens", fontsize=8)
        axis.set_ylabel("share of the floor" if value == "of_floor" else "us", fontsize=8)
        axis.tick_params(axis="y", which="both", labelsize=7)
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside right center",
        fontsize=7,
        frameon=False,
    )
    content = io.BytesIO()
    # No version in the file: it would differ without a reason.
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
