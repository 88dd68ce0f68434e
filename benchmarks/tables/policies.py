"""Policies against each other in the same kernel: idle, with SMs held, and what they read."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .rows import (
    BATCH,
    DEFAULT_KNOBS,
    EVEN,
    FEW,
    LEVEL,
    ORDER,
    ROUTINGS,
    SKEWED,
    Cell,
    Row,
    Rows,
    cell_of,
    figure,
    geometric_mean,
    grouped,
    in_rows,
    is_plain,
    listed,
    markdown,
    newest,
    one_or_range,
    tokens_said,
)


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
        text += (
            ": queues are refilled by a few tasks at a time, or by none (a ticket above "
            f"{FEW} tokens is one task), so that little is left in them"
        )
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
    """Plain rows, by cell and policy."""
    found: dict[Cell, Rows] = newest(filter(is_plain, rows), cell_of, policy_of)
    return found


def labelled_table(rows: Iterable[Row]) -> str:
    """Counters with a label, each beside the row without one of the same commit."""

    def figures(row: Row) -> list[str]:
        return [
            *(figure(row, "ncu_us", ".1f"), figure(row, "dram_over_min", ".2f")),
            figure(row, "l2_hit", ".2f"),
        ]

    def about(row: Row) -> tuple[str, Cell, str]:
        return row["commit"], cell_of(row), policy_of(row)

    rows = list(rows)
    plain: dict[tuple[str, Cell, str], Row] = {}
    for row in rows:
        # Of the very same run, if there is one.
        if not row["label"] and (row.get("beside") or not plain.get(about(row), {}).get("beside")):
            plain[about(row)] = row
    found: dict[tuple[Cell, str, str], Row] = {}
    for row in rows:
        if row["label"]:
            found[cell_of(row), policy_of(row), row["label"]] = row
    lines = []
    for (cell, policy, label), row in found.items():
        pair = zip(figures(plain.get(about(row), {})), figures(row), strict=True)
        name = [f"`{policy}`", cell.model, f"{cell.tokens:,}", cell.routing, label]
        lines.append([*name, *(f"{without} / {with_it}" for without, with_it in pair)])
    head = ["policy", "model", "tokens", "routing", "label", "us under ncu, without / with it"]
    return markdown([*head, "DRAM bytes over the least", "L2 hit rate"], lines) if lines else ""


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
