"""The whole layer, router and shared experts among it, and padded calls."""

from __future__ import annotations

from collections.abc import Iterable

from .rivals import best_rival, load_experts, ratio_to_rival, rivals_said
from .rows import (
    DECODE,
    EVEN,
    Cell,
    Row,
    Rows,
    figure,
    floor_words,
    grouped,
    in_rows,
    markdown,
    newest,
    one_or_range,
    provenance,
)


def load_layer(rows: Iterable[Row]) -> dict[Cell, Rows]:
    """Rows by cell and contestant, without those of padded calls; whole layers first."""
    found = load_experts(row for row in rows if "valid" not in row)
    parts = ("weave:experts", "weave:routed")
    return {
        cell: dict(sorted(named.items(), key=lambda item: item[0] in parts))
        for cell, named in found.items()
    }


def load_padded(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each model, valid tokens and tokens of the call."""
    found = newest(
        (row for row in rows if "valid" in row),
        lambda row: (row["model"], row["valid"]),
        lambda row: str(row["T"]),
    )
    return [row for named in found.values() for row in named.values()]


def routings_of(cells: Iterable[Cell]) -> list[str]:
    """Those that cells have, even routing first."""
    return sorted({cell.routing for cell in cells}, key=lambda routing: (routing != EVEN, routing))


def layer_tables(cells: dict[Cell, Rows]) -> list[str]:
    """A table of the even cells, and one of each other routing with its name above it."""
    parts = []
    for routing in routings_of(cells):
        table = layer_table(cells, routing)
        if table:
            parts += [table] if routing == EVEN else [f"{routing} routing:", table]
    return parts


def layer_table(cells: dict[Cell, Rows], routing: str = EVEN) -> str:
    """A row a model and token count."""
    lines = []
    for model, tokens in in_rows(cells):
        rows = cells.get(Cell(model, tokens, routing), {})
        ours, rival, ratio = rows.get("weave", {}), best_rival(rows), ratio_to_rival(rows)
        if "us" in ours:
            line = [
                model,
                f"{tokens:,}",
                f"{ours['us']:.1f}",
                f"{ours['floor_us'] / ours['us']:.3f}",
            ]
            if rival is None or ratio is None:
                line += ["-", "-"]
            else:
                line += [f"{rival['us']:.1f} ({rival['contestant']})", f"{ratio:.2f}"]
            lines.append(
                [*line, figure(ours, "router_us", ".1f"), figure(ours, "shared_us", ".1f")]
            )
    head = ["model", "tokens", "us", "of the floor", "best rival, us", "times as fast"]
    return markdown([*head, "router and top-k, us", "shared experts, us"], lines) if lines else ""


def router_words(cells: dict[Cell, Rows]) -> str:
    """What router and top-k add to the experts."""
    few, many = [], []
    for cell, rows in cells.items():
        added = rows.get("weave", {}).get("router_us")
        if added is not None and cell.tokens <= DECODE:
            few.append(added)
        elif added is not None:
            many.append(added / rows["weave:experts"]["us"])
    texts = []
    if few:
        texts.append(f"{one_or_range(few, '.1f')} us up to {DECODE} tokens")
    if many:
        texts.append(f"{one_or_range(many, '.1%')} of the experts' time above {DECODE}")
    if not texts:
        return ""
    return (
        f"Router and top-k add {', and '.join(texts)}. It is the difference of two times: with "
        "many tokens the clock moves it by more than itself."
    )


def padded_words(rows: Iterable[Row]) -> str:
    """What tokens that are none cost."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        if row["T"] != row["valid"] and "over_bare" in row:
            groups.setdefault((row["valid"], row["T"]), []).append(row)
    texts = [
        f"{valid} valid tokens of {tokens:,} in the call take "
        f"{one_or_range([row['over_bare'] for row in some], '.2f')} times as long as {valid} alone "
        f"({one_or_range([row['more_us'] for row in some], '.1f')} us more)"
        for (valid, tokens), some in sorted(groups.items())
    ]
    return f"{'; '.join(texts)}." if texts else ""


def padded_table(rows: Iterable[Row]) -> str:
    """Every padded call."""
    lines = [
        [
            *(row["model"], f"{row['valid']} of {row['T']:,}", figure(row, "us", ".1f")),
            *(figure(row, "over_bare", ".3f"), figure(row, "more_us", ".1f")),
        ]
        for row in rows
    ]
    head = ["model", "valid tokens", "us", "over the valid ones alone", "us more"]
    return markdown(head, lines) if lines else ""


def other_commits(cells: dict[Cell, Rows]) -> str:
    """Which cells were not measured at the commit of most of the even ones."""
    by_commit: dict[str, list[Cell]] = {}
    for cell, rows in cells.items():
        by_commit.setdefault(next(iter(rows.values()))["commit"][:12], []).append(cell)

    def said(some: list[Cell]) -> str:
        """A routing alone, where these are all of its cells."""
        whole = [
            routing
            for routing in routings_of(some)
            if all(cell in some for cell in cells if cell.routing == routing)
        ]
        rest = [cell for cell in some if cell.routing not in whole]
        return "; ".join(text for text in (*whole, grouped(rest)) if text)

    def even(commit: str) -> int:
        return sum(cell.routing == EVEN for cell in by_commit[commit])

    by_size = sorted(by_commit, key=lambda commit: (-even(commit), -len(by_commit[commit])))
    texts = [f"{commit}: {said(by_commit[commit])}" for commit in by_size[1:]]
    return f" ({'; '.join(texts)})" if texts else ""


def layer_words(cells: dict[Cell, Rows]) -> str:
    """What it was measured on, and what rivals got."""
    used = [row for rows in cells.values() for row in rows.values()]
    # What all of them are given is said once, below.
    timed = [row | {"note": row["note"].partition("; logits by")[0]} for row in used if "us" in row]
    rivals = rivals_said(timed)
    text = (
        f"{provenance(used)}{other_commits(cells)}; from hidden states and router weight to "
        f"output, {' and '.join(routings_of(cells))} routing, replays of CUDA graphs, contestants "
        "in turn in one process, "
        f"microseconds a call. {floor_words(used)} Router and shared experts count in it."
    )
    if rivals:
        text += (
            f" {rivals} They get logits by torch.mm with fp32 output, their own top-k or vLLM's "
            "where it has the router and else torch's, and shared experts by torch."
        )
    return text
