"""How far the simulator is from measured launches, how fast it is; and the fit of its costs.

    python benchmarks/simulator.py                    errors on every measured row
    python benchmarks/simulator.py --speed            tasks a second, one core
    python benchmarks/simulator.py --fit --write      fit again, and ship it

Rows come from --results. The costs are fitted to the models of --fitted; all others are held out: a
fit does not see them, and the errors that are stated are theirs. Only CPU time is used, no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from weave_moe.schedule import POLICY_CODES
from weave_moe.shapes import LayerShape
from weave_moe.simulate import Machine, load_machine, make_workload
from weave_moe.simulate.calibrate import (
    FREE,
    START,
    Cell,
    Predicted,
    fit,
    predict,
    ranking,
    read_cells,
    summary,
)
from weave_moe.simulate.machine import CALIBRATION
from weave_moe.simulate.result import run_workload

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results/h200-experts.jsonl"
FITTED = "qwen3-30b,mixtral"
SEED = 1
"""Other routings than the fit's, which could be fitted to their chance."""
SPEED_TASKS = 100_000
SPEED_BAR_S = 2.0


def errors_of(predicted: list[Predicted]) -> dict[str, Any]:
    """Median and worst, over all and by policy, and the ranking of policies."""
    policies = sorted({p.cell.policy for p in predicted})
    order = ranking(predicted)
    return {
        "models": sorted({p.cell.model for p in predicted}),
        "tokens": sorted({p.cell.tokens for p in predicted}),
        **summary(predicted),
        "by_policy": {
            policy: summary([p for p in predicted if p.cell.policy == policy])
            for policy in policies
        },
        "ranking": {
            "pairs_above_5_percent": order.pairs,
            "right": order.right,
            "policies_measured": policies,
        },
    }


def show(title: str, predicted: list[Predicted], *, cells: bool) -> None:
    print(f"\n{title}")
    if cells:
        for p in predicted:
            c = p.cell
            print(
                f"  {c.model:12} T={c.tokens:<4} skew {c.skew:<4g}{c.policy:16}"
                f"{c.us:9.1f} us measured {p.us:9.1f} simulated {p.error:+7.1%}"
            )
    found = errors_of(predicted)
    order = found["ranking"]
    print(
        f"  {found['cells']} rows: median {found['median']:.1%}, worst {found['worst']:.1%}", end=""
    )
    print(f" ({found['worst_cell']})")
    for policy, by in found["by_policy"].items():
        print(f"    {policy:16} median {by['median']:.1%}, worst {by['worst']:.1%}")
    print(
        f"  pairs of policies that differ by more than 5 %: {order['pairs_above_5_percent']}, "
        f"ranked right {order['right']}"
    )


def split(cells: list[Cell], fitted: str) -> tuple[list[Cell], list[Cell]]:
    models = fitted.split(",")
    return [c for c in cells if c.model in models], [c for c in cells if c.model not in models]


def git(*words: str) -> str:
    run = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=ROOT)
    return run.stdout.strip() or "unknown"


def write(
    machine: Machine,
    args: argparse.Namespace,
    predicted: list[Predicted],
    held_out: list[Predicted],
) -> None:
    fitted = errors_of(predicted)
    measured = [json.loads(line) for line in (ROOT / args.results).read_text().splitlines()]
    document = {
        "gpu": measured[0]["gpu"],
        "results": args.results,
        "results_commit": git("log", "-1", "--format=%H", "--", args.results),
        "rows_commit": sorted({r["commit"] for r in measured}),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/simulator.py --fit --write",
        "fitted_to": f"{args.fitted.replace(',', ' and ')} ({fitted['cells']} rows)",
        "free": {name: list(bounds) for name, bounds in FREE.items()},
        "machine": {
            name: value
            for name, value in asdict(machine).items()
            if name not in ("name", "verified", "source")
        },
        "errors": {
            "routings": args.routings,
            "seed": SEED,
            "fitted": fitted,
            "held_out": errors_of(held_out),
        },
        "rows": "ROWS",
    }
    lines = [
        [p.cell.model, p.cell.tokens, p.cell.skew, p.cell.policy, p.cell.us, round(p.us, 3)]
        for p in (*predicted, *held_out)
    ]
    rows = ",\n    ".join(map(json.dumps, lines))
    text = json.dumps(document, indent=2).replace('"ROWS"', f"[\n    {rows}\n  ]")
    path = ROOT / "src/weave_moe/simulate" / CALIBRATION
    path.write_text(text + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


def speed() -> int:
    """Simulates a launch of about 100,000 tasks under each policy."""
    shape = LayerShape(7168, 2048, 1024, 8)
    slowest = 0.0
    for tokens in (256, 8192):
        ids = np.random.default_rng(0).random((tokens, 1024)).argpartition(8, axis=1)[:, :8]
        begin = time.process_time()
        work = make_workload(shape, ids)
        planned = time.process_time() - begin
        for policy in POLICY_CODES:
            begin = time.process_time()
            result = run_workload(work, load_machine("h200"), policy)
            seconds = time.process_time() - begin + planned
            per_100k = seconds * SPEED_TASKS / result.tasks
            slowest = max(slowest, per_100k)
            print(
                f"T={tokens:<5} {policy:15} {result.tasks:7,} tasks {seconds:6.2f} s: "
                f"{per_100k:.2f} s for 100,000 tasks"
            )
    print(f"slowest {slowest:.2f} s for 100,000 tasks; wanted below {SPEED_BAR_S:g} s of one core")
    return 0 if slowest < SPEED_BAR_S else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", default=RESULTS)
    parser.add_argument("--fitted", default=FITTED, help="models that a fit may see")
    parser.add_argument("--fit", action="store_true", help="fit the costs again")
    parser.add_argument("--fit-routings", type=int, default=2, help="launches a cell in the fit")
    parser.add_argument("--write", action="store_true", help="write the shipped calibration")
    parser.add_argument("--routings", type=int, default=4, help="launches a cell in the errors")
    parser.add_argument("--cells", action="store_true", help="print every row")
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    if args.speed:
        return speed()
    seen, unseen = split(read_cells(ROOT / args.results), args.fitted)
    machine = load_machine("h200")
    if args.fit:
        machine = fit(
            START,
            seen,
            routings=args.fit_routings,
            said=lambda text: print(text, flush=True),
        )
    predicted = predict(machine, seen, routings=args.routings, seed=SEED)
    held_out = predict(machine, unseen, routings=args.routings, seed=SEED)
    show(f"fitted to: {args.fitted}", predicted, cells=args.cells)
    show("held out", held_out, cells=args.cells)
    if args.write:
        write(machine, args, predicted, held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
