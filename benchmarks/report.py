"""Makes the README's table of GPU results from benchmarks/results/h200-experts.jsonl.

    python benchmarks/report.py            # writes README.md
    python benchmarks/report.py --check    # exit status 1 if README.md is not what the results say

Where a cell was timed several times, the last row of the file counts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/h200-experts.jsonl"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

Key = tuple[str, int, float]


def load(path: Path) -> dict[Key, dict[str, dict[str, Any]]]:
    """Rows by (model, T, skew) and contestant."""
    cells: dict[Key, dict[str, dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        cells.setdefault((row["model"], row["T"], row["skew"]), {})[row["contestant"]] = row
    return cells


def best_rival(rows: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest contestant that is not ours."""
    timed = [r for n, r in rows.items() if not n.startswith("weave") and "us" in r]
    return min(timed, key=lambda r: float(r["us"]), default=None)


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def table(cells: dict[Key, dict[str, dict[str, Any]]]) -> str:
    """Markdown: a row a cell, and what it says in words."""
    lines = [
        "| model | tokens | skew | floor, us | weave-moe, us | of the floor | best rival, us "
        "| times as fast |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {}
    behind = []
    for (model, tokens, skew), rows in cells.items():
        ours, rival = rows.get("weave"), best_rival(rows)
        if ours is None or "us" not in ours:
            continue
        floor = ours["floor_us"]
        text = [model, str(tokens), f"{skew:g}", f"{floor:.1f}", f"{ours['us']:.1f}"]
        text.append(f"{floor / ours['us']:.3f}")
        if rival is None:
            text += ["-", "-"]
        else:
            ratio = rival["us"] / ours["us"]
            ratios.setdefault(model, []).append(ratio)
            if ratio < 1:
                behind.append(f"{model} T={tokens} skew {skew:g} ({ratio:.2f})")
            text += [f"{rival['us']:.1f} ({rival['contestant']})", f"{ratio:.2f}"]
        lines.append(f"| {' | '.join(text)} |")
    words = []
    if ratios:
        every = [r for values in ratios.values() for r in values]
        by_model = ", ".join(f"{m} {geometric_mean(v):.2f}" for m, v in ratios.items())
        words.append(
            f"Geometric mean against the best rival in each cell: {geometric_mean(every):.2f} "
            f"({by_model})."
        )
        words.append(
            f"Slower than the best rival in {len(behind)} of {len(every)} cells: "
            f"{', '.join(behind)}."
            if behind
            else f"At least as fast as the best rival in all {len(every)} cells."
        )
    return "\n".join([*lines, "", *words])


def dynamic_words(cells: dict[Key, dict[str, dict[str, Any]]]) -> str:
    """What dynamic scheduling gave on an idle GPU, in words."""
    gains = [
        rows["weave:static_strided"]["us"] / rows["weave"]["us"]
        for rows in cells.values()
        if all("us" in rows.get(n, {}) for n in ("weave", "weave:static_strided"))
    ]
    level = [
        rows["weave"]["us"] / rows["weave:counter"]["us"]
        for rows in cells.values()
        if all("us" in rows.get(n, {}) for n in ("weave", "weave:counter"))
    ]
    if not gains or not level:
        return ""
    return (
        f"The same kernel with its tasks dealt out before the launch (`static_strided`) takes "
        f"{min(gains):.2f} to {max(gains):.2f} times as long on an idle GPU, "
        f"{geometric_mean(gains):.2f} in the geometric mean; one global counter "
        f"{1 / max(level):.3f} to {1 / min(level):.3f} times: stealing is level with it, no faster."
    )


def section(path: Path = RESULTS) -> str:
    """The generated part of the README, between its markers."""
    cells = load(path)
    row = next(iter(next(iter(cells.values())).values()))
    rivals = sorted(
        {
            f"{r['contestant']} ({r['version']}: {r['note']})"
            for rows in cells.values()
            for n, r in rows.items()
            if not n.startswith("weave") and r.get("version")
        }
    )
    head = (
        f"{row['gpu']}, driver {row['driver']}, torch {row['versions']['torch']}, bf16, "
        f"{row['date']}, commit {row['commit'][:12]}; experts from ids to output, replays of CUDA "
        "graphs, contestants in turn in one process. Floor: the weights of the experts touched at "
        f"{row['read_tbs']:.2f} TB/s, or the arithmetic at {row['matrix_tflops']:.0f} TFLOP/s, "
        "both measured in the same run (a plain reading kernel's rate, so a cell can pass 1). "
        "Rivals: " + "; ".join(rivals) + "."
    )
    return "\n".join([BEGIN, head, "", table(cells), "", dynamic_words(cells), END])


def main() -> int:
    """Write or check the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = README.read_text()
    start, end = text.index(BEGIN), text.index(END) + len(END)
    new = text[:start] + section() + text[end:]
    if args.check:
        if new != text:
            print("README.md differs from benchmarks/results: run python benchmarks/report.py")
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
