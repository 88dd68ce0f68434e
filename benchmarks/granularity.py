"""What scheduling costs a task, against the size of tasks.

    python benchmarks/granularity.py --out benchmarks/results/h200-granularity.jsonl

Layers of S columns and S rows an expert, so that every task of gate_up and down streams the same
tile: `tile_rows` of weights x S columns. About 512 slots over as many experts as make up some
hundred megabytes of weights; tasks from 16 KB, far below what the plan makes of any real layer, up
to a megabyte. Policies take turns in one loop, on the same kernel, with tiles of 64 and of 128
rows.

A row has the tasks of gate_up and down of a launch, `task_us`, the time that one of them takes of a
worker (us x workers / tasks), and `task_kb`. What a task costs beyond its bytes is the intercept of
a line through the tasks of one kernel; what a policy costs beyond static lists, which claim
nothing, is `over_static`: the median over the rounds of its time divided by static_strided's, minus
1, and `spread` half the distance between the quartiles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import common
import policies
import torch
from common import Case, Row

from weave_moe.backends import cuda
from weave_moe.schedule.granularity import KernelPlan

LAYERS = {
    "square-128": (128, 128, 1024, 8),
    "square-256": (256, 256, 512, 8),
    "square-512": (512, 512, 256, 8),
    "square-1024": (1024, 1024, 128, 8),
    "square-2048": (2048, 2048, 32, 8),
    "square-4096": (4096, 4096, 16, 8),
}
"""Hidden, intermediate, experts, top-k."""
TOKENS, TILE_ROWS = 64, (64, 128)
POLICIES = ("static_strided", "counter", "steal", "window")


class Job(NamedTuple):
    model: str
    tile_rows: int

    def __str__(self) -> str:
        return f"{self.model}, tiles of {self.tile_rows} rows"


@contextmanager
def tiles_of(rows: int) -> Iterator[None]:
    """Plans have tiles of so many rows meanwhile, whatever they would choose."""
    plan_for = cuda.plan_for

    def other(*args: object, **options: object) -> KernelPlan:
        plan = plan_for(*args, **options)  # type: ignore[arg-type]
        return replace(plan, tile_m=rows, slice=min(plan.slice, rows // 64 * 1024))

    cuda.plan_for = other
    try:
        yield
    finally:
        cuda.plan_for = plan_for


def tasks_of(model: str, active: float, tile_rows: int) -> float:
    """Tasks of gate_up and down, on average, while an expert's tokens are one group."""
    hidden, intermediate = LAYERS[model][:2]
    return active * (-(-2 * intermediate // tile_rows) + -(-hidden // tile_rows))


def run_job(cell: common.Cell, job: Job, seconds: float, workers: int) -> list[Row]:
    """A row a policy."""
    tasks = tasks_of(job.model, cell.active, job.tile_rows)
    size = LAYERS[job.model][0]
    rows: dict[policies.Variant, Row] = {}
    functions = {}
    for variant in map(policies.Variant, POLICIES):
        rows[variant] = {
            **cell.row,
            "contestant": f"weave:{variant}",
            "tile_rows": job.tile_rows,
            "task_kb": job.tile_rows * size * 2 / 1024,
            "tasks": round(tasks, 1),
            "workers": workers,
        }
        workspace = policies.workspace_of(variant)
        functions[variant] = policies.functions_of(variant, cell.layers, workspace)
    good = policies.check_all(cell, functions, rows)
    graphs = {str(variant): cell.graph(functions[variant]) for variant in good}
    times = common.in_turn(graphs, cell.device, seconds)
    common.check_launches(cell.device)
    for variant in good:
        row, us = rows[variant], times[str(variant)]
        common.timed(row, [t / cell.calls for t in us], cell.floor)
        row["task_us"] = round(row["us"] * workers / tasks, 4)
        ratios = [a / b for a, b in zip(us, times[str(good[0])], strict=True)]
        middle, width = common.spread(ratios)
        row["over_static"], row["spread"] = round(middle - 1, 4), round(width, 4)
    return list(rows.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default=",".join(LAYERS))
    parser.add_argument("--cell-seconds", type=float, default=0.15, help="of replays")
    parser.add_argument("--max-seconds", type=float, help="begin no cell that would end later")
    parser.add_argument("--out", default="granularity.jsonl")
    parser.add_argument("--commit", default=None, help="the commit to name, where git is not there")
    args = parser.parse_args(arguments)
    clock, device = common.Clock(args.max_seconds), common.the_device()
    common.MODELS.update(LAYERS)
    on_gpu = device.type == "cuda"
    rates = common.measure_rates() if on_gpu else common.Rates(1.0, 1.0)
    about = common.about(device, args.commit or common.git_commit(), rates)
    workers = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
    out = Path(args.out)
    done = {(r["model"], r["tile_rows"], r["commit"]) for r in common.read_rows(out)}
    for model in args.models.split(","):
        layers = common.make_layers(model, device)
        cell = common.Cell(Case(model, TOKENS, 0.0), layers, rates, device)
        for job in (Job(model, rows) for rows in TILE_ROWS):
            if (*job, about["commit"]) in done:
                continue
            if not clock.room():
                print("out of time: the same command goes on from here", flush=True)
                return 0
            with tiles_of(job.tile_rows):
                rows = run_job(cell, job, args.cell_seconds, workers)
            common.add_rows(out, [row | about for row in rows])
            figures = (
                f"{r['contestant'][6:]} {r['task_us']:.2f} us {r['over_static']:+.1%}"
                if "us" in r
                else f"{r['contestant']} {r['error']}"
                for r in rows
            )
            print(f"[{clock.elapsed:5.0f} s] {job}: {'  '.join(figures)}", flush=True)
        del layers, cell
        if on_gpu:
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
