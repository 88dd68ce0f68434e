"""The size of tasks, and what runs beside the layer."""

from __future__ import annotations

from collections.abc import Iterable

from .policies import policy_of
from .rows import (
    FEW,
    LEVEL,
    Cell,
    Row,
    Rows,
    cell_of,
    geometric_mean,
    markdown,
    newest,
    one_or_range,
)


def ticket_words(rows: Iterable[Row]) -> str:
    """What is to be said of rows from before workspaces left the size of a ticket to the plan."""
    if all("batch" in row for row in rows if row["T"] > FEW):
        return ""
    return (
        f"Above {FEW} tokens `steal` had `Workspace(batch=4)` in these measurements, up to four "
        "tasks a ticket, where calls take one; what that changes is in "
        "docs/measured.md."
    )


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
    rows = [row for row in rows if row["neighbour"] == "all-reduce"]
    runs = "the all-reduces run at {} of their rate"
    text = beside_words(rows, "all-reduce", "NCCL's all-reduces on two GPUs", "them", runs)
    return f"{text} {ticket_words(rows)}".strip()


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
