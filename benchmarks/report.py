"""Makes the README's results, the tables in docs and the plots from benchmarks/results.

    python benchmarks/report.py            # writes README.md, docs/*.md, docs/*.png
    python benchmarks/report.py --check    # exit status 1 if a page is not what the results say

Where a cell was timed several times, the last commit's rows count, and of those the last of each
contestant: rows of different commits are never compared. Nor are rows of different files, which are
of different runs. What has not been measured is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tables.layers import (
    layer_tables,
    layer_words,
    load_layer,
    load_padded,
    padded_table,
    padded_words,
    router_words,
)
from tables.models import whole_models_table, whole_models_words
from tables.policies import (
    by_policy_table,
    dynamic_words,
    dynamic_words_of_experts,
    every_cell_table,
    held_table,
    held_words,
    knobs_table,
    labelled_table,
    load_counters,
    load_policies,
    memory_table,
    memory_words,
    static_expert_table,
    static_expert_words,
)
from tables.rivals import (
    absent_words,
    contestants_table,
    load_experts,
    more_rivals_words,
    rivals_part,
    rivals_said,
    rivals_words,
)
from tables.rows import Row, floor_words, is_plain, provenance, read
from tables.surroundings import (
    all_reduce_words,
    granularity_table,
    granularity_words,
    neighbours_table,
    stream_words,
)

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


def layer_part(rows: Iterable[Row], folder: str) -> list[str]:
    """What README and details say of the whole layer; nothing without rows."""
    rows = list(rows)
    cells, padded = load_layer(rows), load_padded(rows)
    if not cells:
        return []
    parts = [layer_words(cells), *layer_tables(cells), rivals_words(cells), absent_words(cells)]
    return [*parts, router_words(cells), padded_words(padded), picture("layer", folder)]


def whole_models_section(rows: list[Row]) -> str:
    """The generated part of docs/end_to_end.md."""
    if not rows:
        return f"{BEGIN}\n{END}"
    versions = ", ".join(sorted({row["versions"]["transformers"] for row in rows}))
    head = f"{provenance(rows)}, transformers {versions}."
    return "\n".join(
        [BEGIN, "\n\n".join([head, whole_models_words(rows), whole_models_table(rows)]), END]
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
        parts += ["**By policy**", f"{provenance([*of_policies, *neighbours])}."]
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
    labelled = [row for row in counters if row["label"]]
    if counted:
        plain = list(filter(is_plain, counters))
        parts += [
            "### Memory",
            f"{provenance(plain)}. {memory_words(counted)} Bytes read from DRAM over the least "
            "possible / L2 hit rate, by the hardware counters:",
            memory_table(counted),
        ]
    if labelled:
        parts += [
            f'With and without what a label says ({provenance(labelled)}); "hot" is the hint for '
            "L2 on weights that several groups of tokens read. Times under ncu are with empty "
            "caches, of one kernel after the other: no times of a call.",
            labelled_table(counters),
        ]
    if granularity:
        parts += [
            "## The size of tasks",
            f"{provenance(granularity)}. {granularity_words(granularity)}",
            granularity_table(granularity),
        ]
    if neighbours:
        parts += [
            "## Beside other work",
            f"{provenance(neighbours)}.",
            stream_words(neighbours),
            all_reduce_words(neighbours),
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
        (
            "Against rivals, the whole layer",
            [rivals_words(layer), absent_words(layer), router_words(layer)],
        ),
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
