"""What all tables share: rows of the result files, cells, words for numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

FEW = 256
"""Most tokens that count as few, here and in common.py."""
BATCH = 16
"""Fewest tokens that count as a batch: with less, most experts have no token."""
DECODE = 64
"""Most tokens where what the router adds is said in microseconds, not as a share."""
LEVEL = 0.01
"""Times that differ by no more than this, or than the paired spread if it is wider, are level."""
EVEN, SKEWED, RECORDED = "even", "Zipf 1.2", "recorded"
ROUTINGS = (EVEN, SKEWED, RECORDED)
ORDER = ("steal", "counter", "static_strided", "static_tail", "window", "static_expert")
DEFAULT_KNOBS = {"steal": "half", "min_steal": 1, "victim": "largest"}
Row = dict[str, Any]
Rows = dict[str, Row]


class Cell(NamedTuple):
    """A model, a number of tokens and a routing."""

    model: str
    tokens: int
    routing: str

    def __str__(self) -> str:
        return f"{self.model} T={self.tokens} {self.routing}"


def routing_of(row: Row) -> str:
    if row.get("trace"):
        return RECORDED
    return {0.0: EVEN, 1.2: SKEWED}.get(row["skew"], f"Zipf {row['skew']:g}")


def read(path: Path) -> list[Row]:
    """Rows of a result file, none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def newest(rows: Iterable[Row], group: Callable[[Row], Any], name: Callable[[Row], str]) -> Any:
    """{group: {name: row}}: of each group the rows of the commit that was measured last."""
    rows = list(rows)
    last = {group(row): row["commit"] for row in rows}
    found: dict[Any, Rows] = {}
    for row in rows:
        if row["commit"] == last[group(row)]:
            found.setdefault(group(row), {})[name(row)] = row
    return found


def cell_of(row: Row) -> Cell:
    return Cell(row["model"], row["T"], routing_of(row))


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def markdown(head: list[str], lines: Iterable[list[str]]) -> str:
    """A table."""
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def listed(texts: list[str], most: int = 12) -> str:
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def in_rows(cells: Iterable[Cell]) -> list[tuple[str, int]]:
    """Models in the order of the file, each with its token counts going up."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    pairs = {(cell.model, cell.tokens) for cell in cells}
    return sorted(pairs, key=lambda pair: (models.index(pair[0]), pair[1]))


def tokens_said(tokens: int) -> str:
    return f"{tokens:,} token{'s' if tokens != 1 else ''}"


def figure(row: Row, name: str, form: str) -> str:
    value = row.get(name)
    return "-" if value is None else format(value, form)


def one_or_range(values: Iterable[float], form: str) -> str:
    low, high = min(values), max(values)
    texts = [format(low, form), format(high, form)]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def provenance(rows: list[Row]) -> str:
    """GPU, versions, dates, commits and rates of rows."""

    def each(pick: Callable[[Row], Any]) -> str:
        return ", ".join(dict.fromkeys(str(pick(row)) for row in rows))

    return (
        f"{each(lambda r: r['gpu'])}, driver {each(lambda r: r['driver'])}, torch "
        f"{each(lambda r: r['versions']['torch'])}, bf16, {each(lambda r: r['date'])}, commit "
        f"{each(lambda r: r['commit'][:12])}"
    )


def floor_words(rows: list[Row]) -> str:
    return (
        "Floor: the weights of the experts touched at "
        f"{one_or_range([r['read_tbs'] for r in rows], '.2f')} TB/s, or the arithmetic at "
        f"{one_or_range([r['matrix_tflops'] for r in rows], '.0f')} TFLOP/s, both measured in the "
        "same run (a plain reading kernel's rate, so a cell can pass 1)."
    )
