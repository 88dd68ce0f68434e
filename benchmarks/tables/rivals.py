"""The experts against other implementations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from .rows import (
    EVEN,
    FEW,
    LEVEL,
    SKEWED,
    Cell,
    Row,
    Rows,
    cell_of,
    commits,
    figure,
    geometric_mean,
    in_rows,
    listed,
    markdown,
    newest,
)


def load_experts(rows: Iterable[Row]) -> dict[Cell, Rows]:
    """Rows by cell and contestant."""
    found: dict[Cell, Rows] = newest(rows, cell_of, lambda row: str(row["contestant"]))
    return found


def best_rival(rows: Rows) -> Row | None:
    """The fastest contestant that is not ours."""
    timed = [r for n, r in rows.items() if not n.startswith("weave") and "us" in r]
    return min(timed, key=lambda r: float(r["us"]), default=None)


def ratio_to_rival(rows: Rows) -> float | None:
    """How many times as long the best rival takes."""
    ours, rival = rows.get("weave", {}), best_rival(rows)
    return rival["us"] / ours["us"] if rival is not None and "us" in ours else None


def below_one(ratio: float) -> str:
    """Three decimals, or as many as tell it from 1."""
    digits = 3
    while digits < 9 and f"{ratio:.{digits}f}".startswith("1"):
        digits += 1
    return f"{ratio:.{digits}f}"


def rivals_table(cells: dict[Cell, Rows]) -> str:
    """A row a model and token count; even and skewed routing side by side."""
    what = ["us", "of the floor", "best rival, us", "times as fast"]
    head = ["model", "tokens"]
    head += [f"{EVEN}: {what[0]}", *what[1:], f"{SKEWED}: {what[0]}", *what[1:]]
    lines = []
    for model, tokens in in_rows(cells):
        line = [model, f"{tokens:,}"]
        for routing in (EVEN, SKEWED):
            rows = cells.get(Cell(model, tokens, routing), {})
            ours, rival, ratio = rows.get("weave", {}), best_rival(rows), ratio_to_rival(rows)
            if "us" not in ours:
                line += ["-"] * 4
                continue
            line += [f"{ours['us']:.1f}", f"{ours['floor_us'] / ours['us']:.3f}"]
            if rival is None or ratio is None:
                line += ["-", "-"]
            else:
                line += [f"{rival['us']:.1f} ({rival['contestant']})", f"{ratio:.2f}"]
        if set(line[2:]) != {"-"}:
            lines.append(line)
    return markdown(head, lines)


def contestants_table(cells: dict[Cell, Rows]) -> str:
    """Every contestant's time in every cell."""
    names = list(dict.fromkeys(name for rows in cells.values() for name in rows))
    names.sort(key=lambda name: (name != "weave", not name.startswith("weave")))
    lines = []
    for model, tokens in in_rows(cells):
        for routing in (EVEN, SKEWED):
            rows = cells.get(Cell(model, tokens, routing), {})
            if rows:
                floor = next(iter(rows.values()))["floor_us"]
                line = [model, f"{tokens:,}", routing, f"{floor:.1f}"]
                # A dash: not run; an error is not a time.
                line += [
                    figure(rows.get(name, {}), "us", ".1f")
                    if "error" not in rows.get(name, {})
                    else "error"
                    for name in names
                ]
                lines.append(line)
    return markdown(["model", "tokens", "routing", "floor", *(f"`{n}`" for n in names)], lines)


def ratios_to_rival(cells: dict[Cell, Rows]) -> dict[Cell, float]:
    """Of the cells that have one."""
    return {cell: r for cell, rows in cells.items() if (r := ratio_to_rival(rows)) is not None}


def rivals_words(cells: dict[Cell, Rows]) -> str:
    """Means, and the cells where a rival is faster."""
    ratios = ratios_to_rival(cells)
    if not ratios:
        return ""

    def mean(keep: Callable[[Cell], bool]) -> str:
        return f"{geometric_mean(r for cell, r in ratios.items() if keep(cell)):.2f}"

    models, routings = (dict.fromkeys(cell[i] for cell in ratios) for i in (0, 2))
    by_model = ", ".join(f"{m} {mean(lambda c, m=m: c.model == m)}" for m in models)
    by_tokens = ", ".join(
        f"{mean(lambda c, t=t: c.tokens == t)} at {t:,}" for t in sorted({c.tokens for c in ratios})
    )

    def of_routing(routing: str) -> str:
        some = [cell for cell in ratios if cell.routing == routing]
        of, least = dict.fromkeys(c.model for c in some), min(c.tokens for c in some)
        fewer = f" ({', '.join(of)}; from {least:,} tokens on)" if len(of) < len(models) else ""
        return f"{routing} {mean(lambda c: c.routing == routing)}{fewer}"

    by_routing = ", ".join(map(of_routing, routings))
    behind = [f"{cell} ({below_one(ratio)})" for cell, ratio in ratios.items() if ratio < 1]
    close = sum(abs(ratio - 1) <= LEVEL for ratio in ratios.values())
    words = [
        f"Geometric mean against the best rival in each cell: {mean(lambda _: True)} (by model: "
        f"{by_model}; by tokens: {by_tokens}; by routing: {by_routing}).",
        f"Slower than the best rival in {len(behind)} of {len(ratios)} cells: {listed(behind)}."
        if behind
        else f"At least as fast as the best rival in all {len(ratios)} cells.",
    ]
    if close:
        words.append(f"Within {LEVEL:.0%} of it, either way, in {close}.")
    return " ".join(words)


def more_rivals_words(more: dict[Cell, Rows], known: Iterable[str]) -> str:
    """What rivals beside the known ones change where they were timed, too."""
    ratios, known = ratios_to_rival(more), set(known)
    names = dict.fromkeys(name for rows in more.values() for name in rows)
    others = [name for name in names if not name.startswith("weave") and name not in known]
    if not ratios or not others:
        return ""
    best = {cell: str(rival["contestant"]) for cell in ratios if (rival := best_rival(more[cell]))}
    among = {
        cell: {name: row for name, row in rows.items() if name not in others}
        for cell, rows in more.items()
    }
    before = ratios_to_rival(among)
    at = commits(row for rows in more.values() for row in rows.values())
    wins = [
        f"{name} in {len(its)} ({', '.join(map(str, its))})"
        for name in others
        if (its := [cell for cell, winner in best.items() if winner == name])
    ]
    text = (
        f"With {', '.join(others)} as well, timed apart in {len(ratios)} cells ({at}), the best "
        "rival is "
    )
    text += f"{'; '.join(wins)}; else one of those above" if wins else "still one of those above"
    text += f". The geometric mean there is {geometric_mean(ratios.values()):.2f}"
    if wins and before:
        text += f", against {geometric_mean(before.values()):.2f} over those above alone"
    behind = [f"{cell} ({below_one(ratio)})" for cell, ratio in ratios.items() if ratio < 1]
    return text + (f"; slower in {len(behind)}: {listed(behind)}." if behind else ".")


def rivals_said(rows: Iterable[Row]) -> str:
    """Names, versions and notes of rivals, of which models where one has several, and where one was
    not asked for more tokens."""
    found: dict[tuple[str, str], list[Row]] = {}
    most = 0
    for r in rows:
        most = max(most, r["T"])
        if not r["contestant"].startswith("weave") and r.get("version"):
            found.setdefault((r["contestant"], f"{r['version']}: {r['note']}"), []).append(r)
    several = Counter(name for name, _ in found)
    texts = []
    for (name, what), of in sorted(found.items(), key=lambda item: item[0]):
        models = ", ".join(dict.fromkeys(r["model"] for r in of)) if several[name] > 1 else ""
        tokens = max(r["T"] for r in of)
        texts.append(
            f"{name}{f' for {models}' if models else ''} ({what})"
            + ("" if tokens == most else f", up to {tokens:,} tokens only")
        )
    return f"Rivals: {'; '.join(texts)}." if texts else ""


NOT_ASKED = "its factory takes w13 and w2 alone"
"""How layer.py's error begins where our adapter of a rival does not take the layer."""


def why_absent(row: Row) -> str:
    """Why a row has no time: an exception, a wrong result, or what was not asked for."""
    error = row.get("error", "")
    if error.startswith(NOT_ASKED):
        return "not asked: our adapter covers plain SwiGLU layers"
    raised = re.match(r"(\w+)\(", error)
    if raised:
        return f"did not run: {raised[1]}"
    return error or "did not run"


def absent_words(cells: dict[Cell, Rows]) -> str:
    """Which rivals have no time in a whole model, and why; the mean without models most lack."""
    models: dict[str, set[str]] = {}
    rivals: dict[str, None] = {}
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for cell, rows in cells.items():
        timed = models.setdefault(cell.model, set())
        for name, row in rows.items():
            if not name.startswith("weave"):
                rivals[name] = None
                timed |= {name} if "us" in row else set()
                reasons.setdefault((cell.model, name), {})[why_absent(row)] = None
    lacks = {model: [n for n in rivals if n not in timed] for model, timed in models.items()}
    lacks = {model: names for model, names in lacks.items() if names}
    if not lacks:
        return ""
    named: dict[tuple[str, str], list[str]] = {}
    for model, names in lacks.items():
        why: dict[str, list[str]] = {}
        for name in names:
            why.setdefault("; ".join(reasons.get((model, name), ["not timed"])), []).append(name)
        for reason, some in why.items():
            named.setdefault((", ".join(some), reason), []).append(model)
    texts = [f"{some} for {', '.join(of)} ({reason})" for (some, reason), of in named.items()]
    text = f"No time of {'; '.join(texts)}."
    most = {model for model, names in lacks.items() if 2 * len(names) > len(rivals)}
    rest = [r for cell, r in ratios_to_rival(cells).items() if cell.model not in most]
    if most and rest:
        text += f" Without {', '.join(sorted(most))} the mean is {geometric_mean(rest):.2f}."
    return text


def rivals_part(cells: dict[Cell, Rows]) -> list[str]:
    """Few and many tokens apart, each with its table and words."""
    parts = []
    for title, keep in (
        (f"**Up to {FEW} tokens**", lambda c: c.tokens <= FEW),
        (f"**More than {FEW} tokens**", lambda c: c.tokens > FEW),
    ):
        some = {cell: rows for cell, rows in cells.items() if keep(cell) and "weave" in rows}
        if some:
            parts += [title, rivals_table(some), rivals_words(some)]
    every = ratios_to_rival(cells).values()
    if len(parts) > 3 and every:
        parts.append(f"Over all {len(every)} cells: {geometric_mean(every):.2f}.")
    return parts
