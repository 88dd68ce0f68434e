"""Makes the README's results, the tables in docs and the plots from benchmarks/results.

    python benchmarks/report.py            # writes README.md, docs/*.md, docs/*.png
    python benchmarks/report.py --check    # exit status 1 if a page is not what the results say

Where a cell was timed several times, the last commit's rows count, and of those the last of each
contestant: rows of different commits are never compared. Nor are rows of different files, which are
of different runs. What has not been measured is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
NAMES = (
    *("experts", "policies", "neighbours", "layer", "more-rivals", "granularity"),
    *("counters", "end-to-end"),
)
FILES = {name: RESULTS / f"h200-{name}.jsonl" for name in NAMES}
README, DETAILS = ROOT / "README.md", ROOT / "docs/benchmarks.md"
WHOLE_MODELS, LIMITS = ROOT / "docs/end_to_end.md", ROOT / "docs/limits.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
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


def load_experts(rows: Iterable[Row]) -> dict[Cell, Rows]:
    """Rows by cell and contestant."""
    found: dict[Cell, Rows] = newest(rows, cell_of, lambda row: str(row["contestant"]))
    return found


def policy_of(row: Row) -> str:
    """Of a contestant weave:POLICY."""
    return str(row["contestant"]).partition(":")[2]


def variant_of(row: Row) -> str:
    """A policy, and what differs from the default knobs."""
    policy = policy_of(row)
    changed = [f"{k}={v}" for k, v in row["knobs"].items() if v != DEFAULT_KNOBS.get(k)]
    return f"{policy}[{','.join(changed)}]" if changed else policy


def load_policies(rows: Iterable[Row]) -> dict[tuple[Cell, int], Rows]:
    """Rows by cell, SMs held, and policy."""
    found: dict[tuple[Cell, int], Rows] = newest(
        rows, lambda row: (cell_of(row), int(row["sms_held"])), variant_of
    )
    return found


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def best_rival(rows: Rows) -> Row | None:
    """The fastest contestant that is not ours."""
    timed = [r for n, r in rows.items() if not n.startswith("weave") and "us" in r]
    return min(timed, key=lambda r: float(r["us"]), default=None)


def ratio_to_rival(rows: Rows) -> float | None:
    """How many times as long the best rival takes."""
    ours, rival = rows.get("weave", {}), best_rival(rows)
    return rival["us"] / ours["us"] if rival is not None and "us" in ours else None


def markdown(head: list[str], lines: Iterable[list[str]]) -> str:
    """A table."""
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def below_one(ratio: float) -> str:
    """Three decimals, or as many as tell it from 1."""
    digits = 3
    while digits < 9 and f"{ratio:.{digits}f}".startswith("1"):
        digits += 1
    return f"{ratio:.{digits}f}"


def listed(texts: list[str], most: int = 12) -> str:
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def in_rows(cells: Iterable[Cell]) -> list[tuple[str, int]]:
    """Models in the order of the file, each with its token counts going up."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    pairs = {(cell.model, cell.tokens) for cell in cells}
    return sorted(pairs, key=lambda pair: (models.index(pair[0]), pair[1]))


# --- against rivals -----------------------------------------------------------------------------


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
    by_routing = ", ".join(f"{r} {mean(lambda c, r=r: c.routing == r)}" for r in routings)
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
    wins = [
        f"{name} in {len(its)} ({', '.join(map(str, its))})"
        for name in others
        if (its := [cell for cell, winner in best.items() if winner == name])
    ]
    text = (
        f"With {', '.join(others)} as well, timed apart in {len(ratios)} cells, the best rival is "
    )
    text += f"{'; '.join(wins)}; else one of those above" if wins else "still one of those above"
    text += f". The geometric mean there is {geometric_mean(ratios.values()):.2f}"
    if wins and before:
        text += f", against {geometric_mean(before.values()):.2f} over those above alone"
    behind = [f"{cell} ({below_one(ratio)})" for cell, ratio in ratios.items() if ratio < 1]
    return text + (f"; slower in {len(behind)}: {listed(behind)}." if behind else ".")


def rivals_said(rows: Iterable[Row]) -> str:
    """Names, versions and notes of rivals."""
    found = {
        f"{r['contestant']} ({r['version']}: {r['note']})"
        for r in rows
        if not r["contestant"].startswith("weave") and r.get("version")
    }
    return f"Rivals: {'; '.join(sorted(found))}." if found else ""


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


# --- by policy ----------------------------------------------------------------------------------


def over_steal(rows: Rows, name: str) -> tuple[float, float] | None:
    """Paired ratio to steal's time, and its spread."""
    row = rows.get(name, {})
    if "over_steal" not in row:
        return None
    return float(row["over_steal"]), float(row["spread"])


def idle_cells(jobs: dict[tuple[Cell, int], Rows]) -> dict[Cell, Rows]:
    return {cell: rows for (cell, held), rows in jobs.items() if held == 0}


def verdicts(cells: dict[Cell, Rows], name: str) -> dict[str, list[Cell]]:
    """Cells where a policy takes longer than steal, is level with it, or takes less."""
    found: dict[str, list[Cell]] = {"slower": [], "level": [], "faster": []}
    for cell, rows in cells.items():
        pair = over_steal(rows, name)
        if pair is None:
            continue
        margin = max(LEVEL, pair[1])
        which = "level" if abs(pair[0] - 1) <= margin else "slower" if pair[0] > 1 else "faster"
        found[which].append(cell)
    return found


def grouped(cells: list[Cell]) -> str:
    """Cells in few words: token counts by model and routing."""
    groups: dict[tuple[str, str], list[int]] = {}
    for cell in cells:
        groups.setdefault((cell.model, cell.routing), []).append(cell.tokens)
    return "; ".join(
        f"{model} {routing} {', '.join(f'{t:,}' for t in sorted(tokens))}"
        for (model, routing), tokens in groups.items()
    )


def count_by_size(some: list[Cell], of: list[Cell]) -> str:
    """How many of the cells with few tokens, and of those with many."""
    texts = []
    for few, said in ((True, f"up to {FEW} tokens"), (False, "above")):
        total = [cell for cell in of if (cell.tokens <= FEW) == few]
        if total:
            texts.append(f"{sum(cell in total for cell in some)} of {len(total)} {said}")
    return ", ".join(texts)


def dynamic_words(jobs: dict[tuple[Cell, int], Rows], *, where: bool = False) -> str:
    """What dynamic scheduling gave, and where it gave nothing. where: name the cells."""
    cells = idle_cells(jobs)
    static, counter = verdicts(cells, "static_strided"), verdicts(cells, "counter")
    measured = [cell for found in static.values() for cell in found]
    if not measured:
        return ""
    pairs = [pair[0] for rows in cells.values() if (pair := over_steal(rows, "static_strided"))]
    nothing = static["level"] + static["faster"]
    words = [
        "On an idle GPU the same kernel with its tasks dealt out before the launch in turn "
        f"(`static_strided`) takes {min(pairs):.2f} to {max(pairs):.2f} times as long as with "
        f"stealing, {geometric_mean(pairs):.2f} in the geometric mean. **Dynamic scheduling gains "
        f"nothing there in {len(nothing)} of {len(measured)} cells** "
        f"({count_by_size(nothing, measured)}): the times are within {LEVEL:.0%}, or within the "
        "spread of the paired ones"
        + (f", or static lists win ({len(static['faster'])} cells)" if static["faster"] else "")
        + "."
    ]
    if where and nothing:
        words.append(f"These are, by tokens: {grouped(nothing)}.")
    text = f"One global counter is level with stealing in {len(counter['level'])} of "
    text += f"{sum(map(len, counter.values()))} cells"
    for which in ("faster", "slower"):
        if counter[which]:
            text += f", {which} in {len(counter[which])}"
            text += f" ({grouped(counter[which])})" if where else ""
    if len(counter["slower"]) < len(counter["level"] + counter["faster"]):
        text += ": what pays is handing out tasks at run time, more than stealing them"
    words += [f"{text}.", steals_words(jobs)]
    return " ".join(word for word in words if word)


def steals_words(jobs: dict[tuple[Cell, int], Rows]) -> str:
    """How often a queue was stolen from."""

    def counts(name: str) -> list[float]:
        rows = [named.get(name, {}) for named in jobs.values()]
        return [row["steals"] for row in rows if row.get("steals") is not None]

    steal, window = counts("steal"), counts("window")
    if not steal:
        return ""
    without = sum(count == 0 for count in steal)
    some = len(steal) - without
    text = f"In {without} of {len(steal)} cells"
    text += ", those with SMs held among them," if held_jobs(jobs) else ""
    text += " a launch under `steal` steals nothing"
    if some:
        most = f"{max(steal):,.0f} times"
        text += f", in the others up to {most}" if some > 1 else f", in the other one {most}"
    if 2 * without > len(steal):
        text += ": queues are refilled by a few tasks at a time, so that little is left in them"
    if window and max(window):
        text += (
            f". Under `window`, whose queues are filled before the first task, up to "
            f"{max(window):,.0f} times"
        )
    return f"{text}."


def dynamic_words_of_experts(cells: dict[Cell, Rows]) -> str:
    """The same from the rows beside rivals, where the policies' own file is missing."""

    def ratios(name: str) -> list[float]:
        return [
            rows[name]["us"] / rows["weave"]["us"]
            for rows in cells.values()
            if all("us" in rows.get(n, {}) for n in ("weave", name))
        ]

    gains, counter = ratios("weave:static_strided"), ratios("weave:counter")
    if not gains or not counter:
        return ""
    return (
        f"The same kernel with its tasks dealt out before the launch (`static_strided`) takes "
        f"{min(gains):.2f} to {max(gains):.2f} times as long on an idle GPU, "
        f"{geometric_mean(gains):.2f} in the geometric mean; one global counter "
        f"{min(counter):.3f} to {max(counter):.3f} times: stealing is level with it, no faster."
    )


def static_expert_table(jobs: dict[tuple[Cell, int], Rows]) -> str:
    """How many times as long a fixed map of experts to SMs takes."""
    cells = idle_cells(jobs)
    lines = []
    for model, tokens in in_rows(cells):
        pairs = [
            over_steal(cells.get(Cell(model, tokens, r), {}), "static_expert") for r in ROUTINGS
        ]
        if any(pairs):
            lines.append([model, f"{tokens:,}", *(f"{p[0]:.2f}" if p else "-" for p in pairs)])
    return markdown(["model", "tokens", *ROUTINGS], lines) if lines else ""


def static_expert_words(jobs: dict[tuple[Cell, int], Rows]) -> str:
    ratios = {
        cell: pair[0]
        for cell, rows in idle_cells(jobs).items()
        if (pair := over_steal(rows, "static_expert"))
    }
    if not ratios:
        return ""
    text = (
        "With every expert's tasks fixed to its own SMs (`static_expert`) the layer takes "
        f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} times as long as with stealing, "
        f"{geometric_mean(ratios.values()):.2f} in the geometric mean"
    )
    for title, routing, low, high in (
        (
            f"below {BATCH} tokens, where few experts are used and so few SMs have work,",
            "",
            0,
            BATCH,
        ),
        (f"at {SKEWED} from {BATCH} to {FEW} tokens", SKEWED, BATCH, FEW + 1),
        (f"at {SKEWED} above", SKEWED, FEW + 1, math.inf),
        (f"at even routing from {BATCH} tokens up", EVEN, BATCH, math.inf),
    ):
        some = {
            cell: ratio
            for cell, ratio in ratios.items()
            if cell.routing == (routing or cell.routing) and low <= cell.tokens < high
        }
        if some:
            most = max(some, key=lambda cell: some[cell])
            where = f"{most.model}, {tokens_said(most.tokens)}"
            text += f"; {title} at most {some[most]:.2f} times ({where})"
    return f"{text}."


def by_policy_table(jobs: dict[tuple[Cell, int], Rows]) -> str:
    """Geometric means over steal, by policy, tokens and routing."""
    cells = idle_cells(jobs)
    groups = [
        (f"{routing}, {'up to' if few else 'above'} {FEW}", routing, few)
        for few in (True, False)
        for routing in ROUTINGS
    ]
    columns = []
    for title, routing, few in groups:
        some = [r for c, r in cells.items() if c.routing == routing and (c.tokens <= FEW) == few]
        if some:
            columns.append((title, some))
    lines = []
    for name in ORDER[1:]:
        line = [f"`{name}`"]
        for _, some in columns:
            pairs = [pair[0] for rows in some if (pair := over_steal(rows, name))]
            line.append(
                f"{geometric_mean(pairs):.3f} ({min(pairs):.2f} to {max(pairs):.2f})"
                if pairs
                else "-"
            )
        if set(line[1:]) - {"-"}:
            lines.append(line)
    return markdown(["over steal", *(title for title, _ in columns)], lines) if lines else ""


def tokens_said(tokens: int) -> str:
    return f"{tokens:,} token{'s' if tokens != 1 else ''}"


def figure(row: Row, name: str, form: str) -> str:
    value = row.get(name)
    return "-" if value is None else format(value, form)


def every_cell_table(jobs: dict[tuple[Cell, int], Rows]) -> str:
    """Every idle cell: steal's time, the others over it, and what its workers did."""
    lines = []
    cells = idle_cells(jobs)
    for model, tokens in in_rows(cells):
        for routing in ROUTINGS:
            rows = cells.get(Cell(model, tokens, routing), {})
            steal = rows.get("steal", {})
            if "us" not in steal:
                continue
            pairs = [over_steal(rows, name) for name in ORDER[1:]]
            static = rows.get("static_strided", {})
            lines.append(
                [
                    *(model, f"{tokens:,}", routing, f"{steal['us']:.1f}"),
                    f"{steal['of_floor']:.3f}",
                    *(f"{p[0]:.3f}" if p else "-" for p in pairs),
                    figure(steal, "tasks", ",.0f"),
                    figure(steal, "steals", ",.0f"),
                    figure(steal, "busy_share", ".3f"),
                    f"{figure(steal, 'tail_gap_us', '.1f')} / "
                    f"{figure(static, 'tail_gap_us', '.1f')}",
                ]
            )
    head = ["model", "tokens", "routing", "steal, us", "of the floor"]
    head += [f"`{name}`" for name in ORDER[1:]]
    head += ["tasks", "steals", "busy share", "tail gap, us: steal / static_strided"]
    return markdown(head, lines) if lines else ""


def held_jobs(jobs: dict[tuple[Cell, int], Rows]) -> dict[tuple[Cell, int], Rows]:
    """Those with SMs held, fewer first."""
    held = [job for job in jobs.items() if job[0][1]]
    return dict(sorted(held, key=lambda item: item[0][1]))


def held_table(jobs: dict[tuple[Cell, int], Rows]) -> str:
    """A row a number of SMs held and cell: what ran beside the same kernel, in turn."""
    lines = []
    for (cell, held), rows in held_jobs(jobs).items():
        steal = rows.get("steal", {})
        if "us" in steal:
            pairs = [over_steal(rows, name) for name in ORDER[1:]]
            lines.append(
                [
                    *(f"{held}", cell.model, f"{cell.tokens:,}", cell.routing),
                    *(f"{steal['us']:.1f}", *(f"{p[0]:.3f}" if p else "-" for p in pairs)),
                ]
            )
    head = ["SMs held", "model", "tokens", "routing", "steal, us", *(f"`{n}`" for n in ORDER[1:])]
    return markdown(head, lines) if lines else ""


def held_words(jobs: dict[tuple[Cell, int], Rows], *, where: bool = False) -> str:
    """static_strided and counter over steal, by SMs held. where: name the cells."""
    held = held_jobs(jobs)
    texts = []
    for count in dict.fromkeys(sms for _, sms in held):
        some = [rows for (_, sms), rows in held.items() if sms == count]
        parts = []
        for name in ("static_strided", "counter"):
            pairs = [pair[0] for rows in some if (pair := over_steal(rows, name))]
            if pairs:
                span = one_or_range(pairs, ".2f")
                parts.append(f"`{name}` takes {geometric_mean(pairs):.2f} ({span})")
        if parts:
            models = dict.fromkeys(cell.model for cell, sms in held if sms == count)
            cells = f"{len(some)} cell{'s' if len(some) != 1 else ''} of {', '.join(models)}"
            texts.append(f"with {count} SMs held ({cells}) {', '.join(parts)}")
    if not texts:
        return ""
    words = [
        "Where another kernel holds SMs the whole time, over `steal` beside it, geometric means: "
        f"{'; '.join(texts)}."
    ]
    nothing: dict[int, list[str]] = {}
    for (cell, sms), rows in held.items():
        pair = over_steal(rows, "static_strided")
        if pair and pair[0] - 1 <= max(LEVEL, pair[1]):
            nothing.setdefault(sms, []).append(str(cell))
    if nothing:
        count = sum(map(len, nothing.values()))
        text = f"Stealing gains nothing over static lists in {count} of these {len(held)}"
        places = []
        for sms, cells_there in nothing.items():
            every = 1 < len(cells_there) == sum(there == sms for _, there in held)
            said = f"all {len(cells_there)}" if every else listed(cells_there)
            places.append(f"{said} with {sms} held")
        words.append(text + (f": {'; '.join(places)}." if where else "."))
    return " ".join(words)


def knobs_table(jobs: dict[tuple[Cell, int], Rows]) -> str:
    """The queues' knobs, over steal with the default ones."""
    cells = {c: r for c, r in idle_cells(jobs).items() if any("[" in name for name in r)}
    names = list(dict.fromkeys(name for rows in cells.values() for name in rows if "[" in name))
    lines = []
    for cell, rows in cells.items():
        line = [str(cell)]
        for name in ("window", *names):
            pair = over_steal(rows, name)
            line.append("-" if pair is None else f"{pair[0]:.3f} ± {pair[1]:.3f}")
        lines.append(line)
    head = ["over steal, half, from 1 task, largest", "`window`", *(f"`{n}`" for n in names)]
    return markdown(head, lines) if lines else ""


def load_counters(rows: Iterable[Row]) -> dict[Cell, Rows]:
    """Rows by cell and policy, without those of builds or settings that have a label."""
    found: dict[Cell, Rows] = newest((r for r in rows if not r["label"]), cell_of, policy_of)
    return found


def ticket_words(rows: Iterable[Row]) -> str:
    """What is to be said of rows from before workspaces left the size of a ticket to the plan."""
    if all("batch" in row for row in rows if row["T"] > FEW):
        return ""
    return (
        f"Above {FEW} tokens `steal` had `Workspace(batch=4)` in these measurements, up to four "
        "tasks a ticket, where calls take one; what that changes is in "
        "[measured.md](measured.md#many-tokens)."
    )


def memory_table(cells: dict[Cell, Rows]) -> str:
    """DRAM bytes read over the least, and L2 hit rates."""
    lines = []
    for cell, rows in cells.items():
        measured = [rows.get(name, {}) for name in ORDER]
        texts = [
            f"{figure(row, 'dram_over_min', '.2f')} / {figure(row, 'l2_hit', '.2f')}"
            for row in measured
        ]
        lines.append([str(cell), *texts])
    return markdown(["cell", *(f"`{name}`" for name in ORDER)], lines) if lines else ""


def memory_words(cells: dict[Cell, Rows]) -> str:
    """What policies read over the least, with few and with many tokens."""
    texts = []
    for few, said in ((True, f"Up to {FEW} tokens"), (False, "above")):
        found: dict[str, list[float]] = {}
        for cell, rows in cells.items():
            for name in ORDER:
                value = rows.get(name, {}).get("dram_over_min")
                if value is not None and (cell.tokens <= FEW) == few:
                    found.setdefault(name, []).append(value)
        if found:
            each = [f"`{n}` {one_or_range(values, '.2f')}" for n, values in found.items()]
            texts.append(f"{said} {', '.join(each)} times the least")
    return f"{'; '.join(texts)}." if texts else ""


# --- the size of tasks --------------------------------------------------------------------------


def load_granularity(rows: Iterable[Row]) -> dict[tuple[int, str], Rows]:
    """Rows by tile rows and layer, and policy; smallest tasks first."""
    found: dict[tuple[int, str], Rows] = newest(
        sorted(rows, key=lambda row: (row["tile_rows"], row["task_kb"])),
        lambda row: (int(row["tile_rows"]), str(row["model"])),
        policy_of,
    )
    return found


def granularity_words(rows: Iterable[Row]) -> str:
    """From which size of task on a policy costs no more than LEVEL over static lists."""
    cells = [found for found in load_granularity(rows).values() if "static_strided" in found]
    if not cells:
        return ""
    texts = []
    for policy in ("counter", "steal"):
        costs = [
            (found["static_strided"]["task_us"], found[policy]["over_static"])
            for found in cells
            if policy in found
        ]
        dear = [task for task, over in costs if over > LEVEL]
        above = [over for task, over in costs if not dear or task > max(dear)]
        text = f"`{policy}` costs up to {max(over for _, over in costs):.1%} more"
        if dear:
            text += f", where a task takes {max(dear):.1f} us of its worker or less"
        if above and dear:
            text += f"; of longer tasks {min(above):+.1%} to {max(above):+.1%}"
        texts.append(text)
    return (
        "In layers made for it, whose tasks are all alike, over static lists, which claim nothing: "
        f"{'. '.join(texts)}."
    )


def granularity_table(rows: Iterable[Row]) -> str:
    lines = []
    for (tile_rows, _), found in load_granularity(rows).items():
        static = found.get("static_strided", {})
        if "task_us" not in static:
            continue
        line = [f"{static['task_kb']:.0f}", str(tile_rows), f"{static['task_us']:.2f}"]
        for policy in ("counter", "steal", "window"):
            row = found.get(policy, {})
            there = "over_static" in row
            line.append(f"{row['over_static']:+.1%} ± {row['spread']:.1%}" if there else "-")
        lines.append(line)
    head = ["KB of weights a task", "tile rows", "`static_strided`, us a task"]
    head += [f"`{name}` over it" for name in ("counter", "steal", "window")]
    return markdown(head, lines) if lines else ""


# --- beside neighbours --------------------------------------------------------------------------


def load_neighbours(rows: Iterable[Row]) -> dict[tuple[Cell, str, int], Rows]:
    """Rows by cell, neighbour and its SMs, and contestant."""

    def job(row: Row) -> tuple[Cell, str, int]:
        return (cell_of(row), row["neighbour"], row["neighbour_sms"] or 0)

    found: dict[tuple[Cell, str, int], Rows] = newest(rows, job, policy_of)
    return found


def beside_words(rows: Iterable[Row], kind: str, said: str, it: str, runs: str) -> str:
    """What a policy takes beside a neighbour, over stealing beside it and over itself alone.

    said: what the neighbour is.  it: its pronoun.  runs: at which share of its rate, for {}.
    """
    jobs = {
        (cell, sms): found for (cell, of, sms), found in load_neighbours(rows).items() if of == kind
    }
    over = {
        name: [found[name]["us"] / found["steal"]["us"] for found in jobs.values() if name in found]
        for name in ("static_strided", "counter")
    }
    texts = [
        f"`{name}` takes {geometric_mean(ratios):.2f} ({one_or_range(ratios, '.2f')})"
        for name, ratios in over.items()
        if ratios
    ]
    if not texts:
        return ""
    alone = [found["steal"]["slowdown"] for found in jobs.values()]
    used = [row for found in jobs.values() for row in found.values()]
    left = [row["neighbour_tbs"] / row["neighbour_alone_tbs"] for row in used]
    cells = f"{len(jobs)} cell{'s' if len(jobs) != 1 else ''}"
    right = all(
        row["equal_bits"] and row["finite"] and row.get("reduced_right", True) for row in used
    )
    return (
        f"Beside {said}, over `steal` beside {it}, geometric means of "
        f"{cells}: {', '.join(texts)}. `steal` takes {one_or_range(alone, '.2f')} times as long as "
        f"alone, and {runs.format(one_or_range(left, '.2f'))}. "
        + ("All results are right." if right else "**Some results are wrong.**")
    )


def all_reduce_words(rows: Iterable[Row]) -> str:
    runs = "the all-reduces run at {} of their rate"
    return beside_words(rows, "all-reduce", "NCCL's all-reduces on two GPUs", "them", runs)


def stream_words(rows: Iterable[Row]) -> str:
    """The same of a kernel that only reads memory, with how many SMs it has."""
    sms = sorted({sms for _, kind, sms in load_neighbours(rows) if kind == "stream"})
    said = f"a kernel that reads memory on {' or '.join(map(str, sms))} SMs"
    return beside_words(rows, "stream", said, "it", "that kernel runs at {} of its rate")


def neighbours_table(rows: Iterable[Row]) -> str:
    lines = []
    for (cell, kind, sms), found in load_neighbours(rows).items():
        for name, row in found.items():
            good = row["equal_bits"] and row["finite"] and row.get("reduced_right", True)
            steal = found.get("steal", {}).get("us")
            lines.append(
                [
                    *(f"{kind} {sms or ''}".strip(), str(cell), f"`{name}`"),
                    *(f"{row['alone_us']:.1f}", f"{row['us']:.1f}", f"{row['slowdown']:.2f}"),
                    f"{row['us'] / steal:.3f}" if steal else "-",
                    f"{row['neighbour_alone_tbs']:.2f} / {row['neighbour_tbs']:.2f}",
                    "yes" if good else "**no**",
                ]
            )
    head = ["neighbour", "cell", "policy", "alone, us", "beside it, us", "times as long"]
    head += ["over steal beside it", "neighbour alone / beside, TB/s", "right"]
    return markdown(head, lines) if lines else ""


# --- the whole layer ----------------------------------------------------------------------------


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


def layer_table(cells: dict[Cell, Rows]) -> str:
    """A row a model and token count."""
    lines = []
    for model, tokens in in_rows(cells):
        rows = cells.get(Cell(model, tokens, EVEN), {})
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
    return f"Router and top-k add {', and '.join(texts)}." if texts else ""


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


def layer_words(cells: dict[Cell, Rows]) -> str:
    """What it was measured on, and what rivals got."""
    used = [row for rows in cells.values() for row in rows.values()]
    rivals = sorted(
        {
            f"{row['contestant']} ({row['version']})"
            for row in used
            if "us" in row and not row["contestant"].startswith("weave")
        }
    )
    text = (
        f"{provenance(used)}; from hidden states and router weight to output, even routing, "
        "replays of CUDA graphs, contestants in turn in one process, microseconds a call. "
        f"{floor_words(used)} Router and shared experts count in it."
    )
    if rivals:
        text += (
            f" Rivals: {', '.join(rivals)}; they get logits by torch.mm with fp32 output, their "
            "own top-k where they have one and else torch's, and shared experts by torch."
        )
    return text


def layer_part(rows: Iterable[Row], folder: str) -> list[str]:
    """What README and details say of the whole layer; nothing without rows."""
    rows = list(rows)
    cells, padded = load_layer(rows), load_padded(rows)
    if not cells:
        return []
    parts = [layer_words(cells), layer_table(cells), rivals_words(cells)]
    return [*parts, router_words(cells), padded_words(padded), picture("layer", folder)]


# --- whole models -------------------------------------------------------------------------------

NEAR = 0.1
"""A prediction of a whole model's gain that is off by no more than this is near."""
Step = tuple[str, str, int]
"""A model, a phase and its tokens."""


def load_steps(rows: Iterable[Row]) -> dict[Step, Rows]:
    """Rows of whole models by step and contestant."""
    found: dict[Step, Rows] = newest(
        rows, lambda row: (row["model"], row["phase"], row["T"]), lambda row: row["contestant"]
    )
    return found


def ours_of_steps(steps: dict[Step, Rows]) -> list[Row]:
    return [
        row
        for rows in steps.values()
        for name, row in sorted(rows.items())
        if name in ("weave", "weave:optimize") and "gain" in row
    ]


def whole_models_words(rows: Iterable[Row]) -> str:
    """What whole models gain, and how near the prediction is."""
    ours = ours_of_steps(load_steps(rows))
    if not ours:
        return ""
    said = []
    for phase in dict.fromkeys(row["phase"] for row in ours):
        gains = [row["gain"] for row in ours if row["phase"] == phase]
        said.append(f"{one_or_range(gains, '.2f')} times the tokens a second in {phase}")
    layers = dict.fromkeys(
        f"{row['model']}: {row['layers']} of {row['of_layers']} layers" for row in ours
    )
    near = sum(abs(row["predicted_off"]) <= NEAR for row in ours)
    far = [row for row in ours if abs(row["predicted_off"]) > NEAR]
    text = (
        f"In transformers, whole models with random weights ({', '.join(layers)}): "
        f"{', '.join(said)}, over the fastest of transformers' own experts in CUDA graphs. What "
        f"`weave-moe advise` predicts from transformers' times is within {NEAR:.0%} in {near} of "
        f"{len(ours)}"
    )
    if far:
        names = [
            f"{row['model']} {row['phase']} {row['T']:,} as `{row['contestant']}` "
            f"({row['predicted_gain']:.2f} predicted, {row['gain']:.2f} measured)"
            for row in far
        ]
        text += f"; not in {', '.join(names)}"
    return f"{text}."


def whole_models_table(rows: Iterable[Row]) -> str:
    """A row a step and way of ours."""
    steps = load_steps(rows)
    lines = []
    for row in ours_of_steps(steps):
        other = steps[row["model"], row["phase"], row["T"]][row["against"]]
        lines.append(
            [
                *(row["model"], row["phase"], f"{row['T']:,}", f"`{row['contestant']}`"),
                f"{row['tokens_per_s']:,.0f}",
                f"{other['tokens_per_s']:,.0f} ({row['against'].partition(':')[2]})",
                f"{row['gain']:.2f} ± {row['spread']:.2f}",
                f"{row['predicted_gain']:.2f}",
                f"{other['share']:.0%}",
            ]
        )
    head = ["model", "phase", "tokens", "ours", "tokens/s", "transformers' best, tokens/s"]
    head += ["gain", "predicted", "experts' share with transformers' best"]
    return markdown(head, lines) if lines else ""


def whole_models_section(rows: list[Row]) -> str:
    """The generated part of docs/end_to_end.md."""
    if not rows:
        return f"{BEGIN}\n{END}"
    versions = ", ".join(sorted({row["versions"]["transformers"] for row in rows}))
    head = f"{provenance(rows)}, transformers {versions}."
    return "\n".join(
        [BEGIN, "\n\n".join([head, whole_models_words(rows), whole_models_table(rows)]), END]
    )


# --- pages --------------------------------------------------------------------------------------


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


def readme_section(
    experts: list[Row],
    policies: list[Row],
    layer: Sequence[Row] = (),
    *,
    neighbours: Sequence[Row] = (),
    more: Sequence[Row] = (),
    whole_models: Sequence[Row] = (),
) -> str:
    """The generated part of the README, between its markers. more: rows of more rivals."""
    cells, jobs = load_experts(experts), load_policies(policies)
    used = [row for rows in cells.values() for row in rows.values()]
    head = (
        f"{provenance(used)}; experts from ids to output, replays of CUDA graphs, contestants in "
        f"turn in one process, microseconds a call. {floor_words(used)} {rivals_said(used)}"
    ).strip()
    dynamic = dynamic_words(jobs) or dynamic_words_of_experts(cells)
    more_words = more_rivals_words(load_experts(more), {row["contestant"] for row in used})
    parts = [head, *rivals_part(cells), more_words, picture("rivals", "docs/")]
    if jobs:
        of_policies = [row for named in jobs.values() for row in named.values()]
        parts += ["**By policy**", f"{provenance(of_policies)}."]
    parts += [dynamic, static_expert_words(jobs)]
    parts += [held_words(jobs), stream_words(neighbours), all_reduce_words(neighbours)]
    parts.append(picture("policies", "docs/"))
    whole = layer_part(layer, "docs/")
    parts += ["**The whole layer**", *whole] if whole else []
    said = whole_models_words(whole_models)
    if said:
        parts += ["**Whole models**", f"{said} [docs/end_to_end.md](docs/end_to_end.md)"]
    parts.append("How it is measured, and all tables: [docs/benchmarks.md](docs/benchmarks.md).")
    return "\n".join([BEGIN, "\n\n".join(part for part in parts if part), END])


def details_section(
    experts: list[Row],
    policies: list[Row],
    neighbours: list[Row],
    layer: Sequence[Row] = (),
    *,
    more: Sequence[Row] = (),
    granularity: Sequence[Row] = (),
    counters: Sequence[Row] = (),
) -> str:
    """The generated part of docs/benchmarks.md. more: rows of more rivals."""
    cells, jobs = load_experts(experts), load_policies(policies)
    counted = load_counters(counters)
    rows = [row for found in cells.values() for row in found.values()]
    head = f"{provenance(rows)}. {floor_words(rows)} {rivals_said(rows)}".strip()
    parts = ["## Against the floor and rivals", head]
    parts += [picture("floor"), picture("rivals"), rivals_words(cells)]
    parts += ["Microseconds a call:", contestants_table(cells)]
    others = load_experts(more)
    if others:
        apart = [row for found in others.values() for row in found.values()]
        parts += [
            "### More rivals",
            f"{provenance(apart)}. {floor_words(apart)} Another process than the table above: only "
            f"times of one row can be compared. {rivals_said(apart)}".strip(),
            more_rivals_words(others, {row["contestant"] for row in rows}),
            *("Microseconds a call:", contestants_table(others)),
        ]
    whole = layer_part(layer, "")
    if whole:
        parts += ["## The whole layer", *whole]
        parts += ["Microseconds a call:", contestants_table(load_layer(layer))]
        padded = padded_table(load_padded(layer))
        parts += ["Calls that have more tokens than valid ones:", padded] if padded else []
    if jobs:
        idle, held = (
            [row for (_, sms), rows in jobs.items() if (sms > 0) == there for row in rows.values()]
            for there in (False, True)
        )
        parts += [
            "## By policy",
            f"{provenance(idle)}. {floor_words(idle)}" if idle else "",
            *(dynamic_words(jobs, where=True), by_policy_table(jobs), picture("policies")),
            *("### A fixed map of experts to SMs, over `steal`", static_expert_words(jobs)),
            static_expert_table(jobs),
        ]
        for title, text in (
            (
                f"### With SMs held\n\n{provenance(held)}. {held_words(jobs, where=True)} Policies "
                "over `steal` beside the same kernel:"
                if held
                else "",
                held_table(jobs),
            ),
            ("### The queues' knobs", knobs_table(jobs)),
            ("### Every cell\n\nPolicies over `steal`, idle GPU.", every_cell_table(jobs)),
        ):
            if text:
                parts += [title, text]
    if counted:
        parts += [
            "### Memory",
            f"{provenance(counters)}. {memory_words(counted)} Bytes read from DRAM over the least "
            "possible / L2 hit rate, by the hardware counters:",
            memory_table(counted),
        ]
    if granularity:
        parts += [
            "## The size of tasks",
            f"{provenance(granularity)}. {granularity_words(granularity)}",
            granularity_table(granularity),
        ]
    if neighbours:
        reduced = [row for row in neighbours if row["neighbour"] == "all-reduce"]
        parts += [
            "## Beside other work",
            f"{provenance(neighbours)}.",
            stream_words(neighbours),
            f"{all_reduce_words(neighbours)} {ticket_words(reduced)}".strip(),
            neighbours_table(neighbours),
        ]
    return "\n".join([BEGIN, "\n\n".join(part for part in parts if part), END])


def limits_section(rows: dict[str, list[Row]]) -> str:
    """The generated part of docs/limits.md; rows: by file."""
    jobs, layer = load_policies(rows["policies"]), load_layer(rows["layer"])
    experts, padded = load_experts(rows["experts"]), load_padded(rows["layer"])
    parts = []
    for title, texts in (
        ("On a GPU of its own", [dynamic_words(jobs, where=True)]),
        ("With SMs held by others", [held_words(jobs, where=True)]),
        ("Where tasks are small", [granularity_words(rows["granularity"])]),
        ("Against rivals, the experts", [rivals_words(experts)]),
        ("Against rivals, the whole layer", [rivals_words(layer), router_words(layer)]),
        ("Padding", [padded_words(padded)]),
        ("Whole models, and what was predicted", [whole_models_words(rows["end-to-end"])]),
    ):
        if any(texts):
            parts += [f"## {title}", *(text for text in texts if text)]
    used = [row for found in rows.values() for row in found]
    if used:
        parts.insert(0, f"{provenance(used)}.")
    return "\n".join([BEGIN, "\n\n".join(parts), END])


def picture(name: str, folder: str = "") -> str:
    """A link to a plot that is there."""
    titles = {
        "rivals": "Times as fast as the best rival, by tokens",
        "floor": "Share of the floor, by tokens",
        "policies": "Policies over stealing, by tokens, on an idle GPU and with SMs held",
        "layer": "The whole layer: times as fast as the best rival, by tokens",
    }
    there = (DETAILS.parent / f"{name}.png").exists()
    return f"![{titles[name]}]({folder}{name}.png)" if there else ""


def replaced(page: Path, section: str) -> str:
    text = page.read_text()
    start, end = text.index(BEGIN), text.index(END) + len(END)
    return text[:start] + section + text[end:]


def pages() -> dict[Path, str]:
    """The text that each page should have."""
    rows = {name: read(path) for name, path in FILES.items()}
    return {
        README: replaced(
            README,
            readme_section(
                *(rows["experts"], rows["policies"], rows["layer"]),
                neighbours=rows["neighbours"],
                more=rows["more-rivals"],
                whole_models=rows["end-to-end"],
            ),
        ),
        WHOLE_MODELS: replaced(WHOLE_MODELS, whole_models_section(rows["end-to-end"])),
        LIMITS: replaced(LIMITS, limits_section(rows)),
        DETAILS: replaced(
            DETAILS,
            details_section(
                *(rows["experts"], rows["policies"], rows["neighbours"], rows["layer"]),
                more=rows["more-rivals"],
                granularity=rows["granularity"],
                counters=rows["counters"],
            ),
        ),
    }


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--no-plots", action="store_true", help="leave the plots as they are")
    args = parser.parse_args(arguments)
    if not (args.check or args.no_plots):
        import plots

        plots.write(
            load_experts(read(FILES["experts"])),
            load_policies(read(FILES["policies"])),
            load_layer(read(FILES["layer"])),
        )
    differ = [(path, text) for path, text in pages().items() if path.read_text() != text]
    for path, text in differ:
        if args.check:
            name = path.relative_to(ROOT)
            print(f"{name} differs from benchmarks/results: run python benchmarks/report.py")
        else:
            path.write_text(text)
    return int(args.check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
