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


def is_plain(row: Row) -> bool:
    """Whether a row of counters has no label, nor stands beside one of the same run that has."""
    return not row.get("label") and not row.get("beside")


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


def grouped(cells: list[Cell]) -> str:
    """Cells in few words: token counts by model and routing."""
    groups: dict[tuple[str, str], list[int]] = {}
    for cell in cells:
        groups.setdefault((cell.model, cell.routing), []).append(cell.tokens)
    return "; ".join(
        f"{model} {routing} {', '.join(f'{t:,}' for t in sorted(tokens))}"
        for (model, routing), tokens in groups.items()
    )


def figure(row: Row, name: str, form: str) -> str:
    value = row.get(name)
    return "-" if value is None else format(value, form)


def one_or_range(values: Iterable[float], form: str) -> str:
    low, high = min(values), max(values)
    texts = [format(low, form), format(high, form)]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def each(rows: Iterable[Row], pick: Callable[[Row], Any]) -> str:
    """What rows have, in their order, without repeating."""
    return ", ".join(dict.fromkeys(str(pick(row)) for row in rows))


def commits(rows: Iterable[Row]) -> str:
    """At which rows were measured."""
    return f"commit {each(rows, lambda row: row['commit'][:12])}"


def provenance(rows: list[Row]) -> str:
    """GPU, versions, dates and commits of rows."""

    return (
        f"{each(rows, lambda r: r['gpu'])}, driver {each(rows, lambda r: r['driver'])}, torch "
        f"{each(rows, lambda r: r['versions']['torch'])}, bf16, {each(rows, lambda r: r['date'])}, "
        f"{commits(rows)}"
    )


def floor_words(rows: list[Row]) -> str:
    return (
        "Floor: the weights of the experts touched at "
        f"{one_or_range([r['read_tbs'] for r in rows], '.2f')} TB/s, or the arithmetic at "
        f"{one_or_range([r['matrix_tflops'] for r in rows], '.0f')} TFLOP/s, both measured in the "
        "same run (a plain reading kernel's rate, so a cell can pass 1)."
    )
