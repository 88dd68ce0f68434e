"""Times the same layer under every scheduling policy: on an idle GPU, and with SMs held.

    python benchmarks/policies.py --out benchmarks/results/h200-policies.jsonl

Cells are those of experts.py, and for layers of 128 experts and top-8 the shipped recorded routing.
All policies of a cell take turns in one loop, so that `over_steal`, the median over the rounds of
a policy's time divided by steal's, and `spread`, half the distance between the quartiles of that
ratio, are paired. Every policy's output must equal steal's to the bit, and steal's be right, before
anything is timed.

With SMs held: another kernel holds 8, 16, 32 or 66 of them from before the first launch until after
the last. Knobs of the queues are compared on a few cells: half or one task a theft, queues of at
least 1 or 4 tasks, the largest queue or the first one found from a random place.

steals, busy share, tail gap and the like are medians of three launches of their own, with the
kernel's statistics on. Busy share: of the SMs that were free, from a worker's start until its exit,
waiting included, less the time until it knew its tasks. Tail gap: between the first and the last
SM that was done for good. The kernel's clock ticks coarsely, about a microsecond. Where a call runs
as several launches, they are of the last.

dram_over_min is filled in by counters.py; null where it has not been measured.

A cell whose work an exception ends gets rows with that error, and the run goes on with the next;
the same command tries it again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from common import Case, Cell, Layer, Row
from torch import Tensor

import weave_moe
from weave_moe.tools.neighbour import held

POLICIES = ("steal", "counter", "static_strided", "static_expert", "static_tail", "window")
HELD = (8, 16, 32, 66)
HELD_TOKENS = (1, 16, 64, 256, 1024)
TRACES = {"wide-128e-top8": (128, 8)}
DEFAULT_KNOBS = {"steal": "half", "min_steal": 1, "victim": "largest"}
KNOBS: tuple[Row, ...] = ({"steal": "one"}, {"min_steal": 4}, {"victim": "random"})
KNOB_CASES = (
    Case("qwen3-30b", 64, 1.2),
    Case("qwen3-30b", 1024, 1.2),
    Case("qwen3-235b", 64, 0.0),
    Case("mixtral", 64, 1.2),
)
STATS_LAUNCHES = 3
HELD_SECONDS = 20.0
STOPPED = "stopped: "
"""What the error of a job that an exception ended begins with."""
COLUMNS = START, END, TASKS, STEALS, SWEEPS, TICKETS, LOST, PLANNED = range(8)
"""Of the kernel's statistics, a row a worker; times in ns."""
FIGURES = (
    *("tasks", "most_tasks", "steals", "sweeps", "tickets", "lost"),
    *("busy_share", "tail_gap_us", "planned_us"),
)


class Variant(NamedTuple):
    """A policy and what differs from the default knobs."""

    policy: str
    changed: tuple[tuple[str, Any], ...] = ()

    @property
    def knobs(self) -> Row:
        return DEFAULT_KNOBS | dict(self.changed)

    def __str__(self) -> str:
        changed = ",".join(f"{name}={value}" for name, value in self.changed)
        return f"{self.policy}[{changed}]" if changed else self.policy


class Job(NamedTuple):
    """A cell, the SMs that another kernel holds, and what takes turns in it."""

    case: Case
    sms_held: int
    variants: tuple[Variant, ...]


def cases_of(
    models: Iterable[str], tokens: list[int] | None, skews: list[float], traces: Iterable[str]
) -> list[Case]:
    """Cells in the order of the models, each with its synthetic and its recorded routings."""
    cases = []
    for model in models:
        synthetic = common.grid([model], tokens, skews)
        fitting = [t for t in traces if TRACES[t] == common.MODELS[model][2:]]
        counts = sorted({case.tokens for case in synthetic})
        cases += synthetic
        cases += [Case(model, c, None, t) for t in fitting for c in counts if c <= 8192]
    return cases


def jobs_of(cases: Iterable[Case], sms_held: Iterable[int]) -> list[Job]:
    """Idle first; SMs are held for at most 1,024 tokens."""
    plain = tuple(map(Variant, POLICIES))
    knobs = tuple(
        Variant(policy, tuple(changed.items()))
        for policy in ("steal", "window")
        for changed in KNOBS
    )
    jobs = []
    for case in cases:
        jobs.append(Job(case, 0, plain + knobs if case in KNOB_CASES else plain))
        if case.trace is None and case.tokens in HELD_TOKENS:
            jobs += [Job(case, sms, plain) for sms in sms_held]
    return jobs


def key(row: Row) -> tuple[Any, ...]:
    """What a row is of, its commit included."""
    knobs = tuple(row["knobs"][name] for name in DEFAULT_KNOBS)
    cell = (row["model"], row["T"], row["skew"], row.get("trace"))
    return (row["commit"], *cell, row["sms_held"], row["contestant"], knobs)


def base_row(cell: Cell, job: Job, variant: Variant) -> Row:
    return {
        **cell.row,
        "trace": job.case.trace,
        "contestant": f"weave:{variant.policy}",
        "knobs": variant.knobs,
        "sms_held": job.sms_held,
        "batch": workspace_of(variant).batch,
        "dram_over_min": None,
    }


def remaining(jobs: Iterable[Job], rows: Iterable[Row], commit: str) -> list[Job]:
    """Jobs with a variant that has no row of this commit: whole, because ratios are paired."""
    done = {key(row) for row in rows if not row.get("error", "").startswith(STOPPED)}
    return [
        job
        for job in jobs
        if not all(
            (
                *(commit, job.case.model, job.case.tokens, job.case.skew, job.case.trace),
                *(job.sms_held, f"weave:{v.policy}", tuple(v.knobs.values())),
            )
            in done
            for v in job.variants
        )
    ]


def workspace_of(variant: Variant) -> weave_moe.Workspace:
    return weave_moe.Workspace(**variant.knobs)


def functions_of(
    variant: Variant, layers: list[Layer], workspace: weave_moe.Workspace
) -> list[Callable[..., Tensor]]:
    """The layer under a policy, one function for each weight set."""
    backend = "cuda" if layers[0][0].device.type == "cuda" else "reference"

    def make(w13: Tensor, w2: Tensor) -> Callable[..., Tensor]:
        def f(
            x: Tensor,
            ids: Tensor,
            weights: Tensor,
            logits: Tensor | None,
            out: Tensor | None = None,
        ) -> Tensor:
            return weave_moe.fused_experts(
                *(x, w13, w2, weights, ids),
                out=out,
                policy=variant.policy,
                backend=backend,
                workspace=workspace,
            )

        return f

    return [make(*layer) for layer in layers]


def summary(stats: Tensor, free: int) -> Row:
    """What one launch's statistics [workers, 8] say; free: SMs that nothing else held.

    Workers that started late, where an SM became free, are no SMs of their own: of the ends, the
    `free` last ones are those after which an SM had no more work.
    """
    table = stats.cpu()
    start, end = table[:, START].double(), table[:, END].double()
    if float(end.max()) == 0:  # this kernel keeps none
        return {}
    span = float(end.max() - start.min())
    planned = torch.maximum(table[:, PLANNED].double(), start)
    busy = float((end - planned).clamp(min=0).sum())
    last = end.sort(descending=True).values[:free]
    return {
        "tasks": int(table[:, TASKS].sum()),
        "most_tasks": int(table[:, TASKS].max()),
        "steals": int(table[:, STEALS].sum()),
        "sweeps": int(table[:, SWEEPS].sum()),
        "tickets": int(table[:, TICKETS].sum()),
        "lost": int(table[:, LOST].sum()),
        "busy_share": round(busy / (free * span), 4) if span else None,
        "tail_gap_us": round(float(last[0] - last[-1]) / 1e3, 2),
        "planned_us": round(float((planned - start).median()) / 1e3, 2),
    }


def median_summary(summaries: list[Row]) -> Row:
    """Medians of each figure; null where there are none."""
    kept = [found for found in summaries if found]
    middle: Row = dict.fromkeys(FIGURES)
    for name in FIGURES:
        values = [found[name] for found in kept if found[name] is not None]
        if values:
            middle[name] = statistics.median(values)
    return middle


class Probe:
    """Launches of a policy that record statistics; the first one, here, makes its buffers."""

    def __init__(self, cell: Cell, variant: Variant, sms: int) -> None:
        self.cell, self.workspace = cell, workspace_of(variant)
        size = (STATS_LAUNCHES, sms, len(COLUMNS))
        self.stats = torch.zeros(size, dtype=torch.int64, device=cell.device)
        self.functions = functions_of(variant, cell.layers, self.workspace)
        cell.call(self.functions, 0)

    def launch(self) -> None:
        """Waits for nothing and allocates nothing new: SMs may be held meanwhile."""
        for i, stats in enumerate(self.stats):
            # A private door of the CUDA backend: its kernel fills in a row a worker.
            self.workspace._cuda_stats = stats  # type: ignore[attr-defined]
            self.cell.call(self.functions, i % self.cell.calls)
        torch.cuda.current_stream().synchronize()

    def result(self, free: int) -> Row:
        return median_summary([summary(stats, free) for stats in self.stats.cpu()])


def check_all(cell: Cell, functions: dict[Variant, Any], rows: dict[Variant, Row]) -> list[Variant]:
    """Fills in the errors; the variants that are right, with the first one's bits."""
    first = next(iter(functions))
    if not cell.check(functions[first], rows[first]):
        for variant in functions:
            rows[variant]["error"] = rows[first]["error"]
        return []
    want = cell.call(functions[first], 0)
    good = []
    for variant, mine in functions.items():
        row = rows[variant]
        for name in ("rel_err", "max_row_err", "rows_checked", "note", "version"):
            row[name] = rows[first][name]
        row["note"], row["version"] = "ids to output", weave_moe.__version__
        if torch.equal(cell.call(mine, 0), want):
            good.append(variant)
        else:
            row["error"] = f"not the bits of {first}"
    return good if first in good else []


def run_job(cell: Cell, job: Job, seconds: float, sms: int) -> list[Row]:
    """A row a variant."""
    rows = {variant: base_row(cell, job, variant) | median_summary([]) for variant in job.variants}
    functions = {
        variant: functions_of(variant, cell.layers, workspace_of(variant))
        for variant in job.variants
    }
    good = check_all(cell, functions, rows)
    graphs = {str(variant): cell.graph(functions[variant]) for variant in good}
    probes = {}
    # A stream of its own: the default one may wait for kernels of others, and they for it.
    on_gpu = cell.device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
        for replay in graphs.values():  # what is sent once is sent before SMs are held
            replay()
        if on_gpu:
            probes = {variant: Probe(cell, variant, sms) for variant in good}
            torch.cuda.synchronize()
        neighbour = held(job.sms_held, cell.device, limit_seconds=HELD_SECONDS)
        with neighbour if job.sms_held else nullcontext():
            times = common.in_turn(graphs, cell.device, seconds, least=5)
            for probe in probes.values():
                probe.launch()
    common.check_launches(cell.device)
    for variant in good:
        row, us = rows[variant], times[str(variant)]
        common.timed(row, [t / cell.calls for t in us], cell.floor)
        ratios = [a / b for a, b in zip(us, times[str(good[0])], strict=True)]
        middle, width = common.spread(ratios)
        row["over_steal"], row["spread"] = round(middle, 4), round(width, 4)
    for variant, probe in probes.items():
        rows[variant] |= probe.result(sms - job.sms_held)
    return list(rows.values())


def run_or_tell(cell: Cell, job: Job, seconds: float, sms: int) -> list[Row]:
    """run_job; where an exception ends it and the GPU still works, rows that say so."""
    try:
        return run_job(cell, job, seconds, sms)
    except RuntimeError as problem:
        if cell.device.type == "cuda":
            torch.cuda.synchronize()  # raises where there is no going on
        said = str(problem).splitlines() or [""]
        words = f"{STOPPED}{type(problem).__name__}: {said[0][:200]}"
        return [
            base_row(cell, job, variant) | median_summary([]) | {"error": words}
            for variant in job.variants
        ]


def show(job: Job, rows: list[Row], elapsed: float) -> None:
    texts = []
    for variant, row in zip(job.variants, rows, strict=True):
        figure = f"{row['us']:.1f} x{row['over_steal']:.3f}" if "us" in row else row.get("error")
        texts.append(f"{variant} {figure}")
    extra = f" {job.sms_held} SMs held" if job.sms_held else ""
    print(f"[{elapsed:5.0f} s] {job.case}{extra}: {'  '.join(texts)}", flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default=",".join(common.MODELS))
    parser.add_argument("--tokens", help="by default those of each model")
    parser.add_argument("--skews", default=",".join(map(str, common.SKEWS)))
    parser.add_argument("--traces", default=",".join(TRACES), help="'' for none")
    parser.add_argument("--held", default=",".join(map(str, HELD)), help="SMs; '' for none")
    parser.add_argument("--only", choices=("idle", "held"), help="half of the work")
    parser.add_argument("--cell-seconds", type=float, help="of replays; by default 0.4, many 1.5")
    parser.add_argument("--max-seconds", type=float, help="begin no cell that would end later")
    parser.add_argument("--out", default="policies.jsonl")
    parser.add_argument("--again", action="store_true", help="time cells that have rows already")
    parser.add_argument("--commit", default=None, help="the commit to name, where git is not there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    # Streams that share one of the GPU's queues wait for each other, and the neighbour's must have
    # its own. Read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    clock = common.Clock(args.max_seconds)
    commit = args.commit or common.git_commit()
    out = Path(args.out)
    device = common.the_device()
    rates, sms = common.Rates(1.0, 1.0), 1
    if device.type == "cuda":
        rates = common.measure_rates()
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    about = common.about(device, commit, rates)
    tokens = common.tokens_of(args)
    cases = cases_of(
        args.models.split(","),
        tokens,
        common.skews_of(args),
        [name for name in args.traces.split(",") if name],
    )
    jobs = jobs_of(cases, [int(count) for count in args.held.split(",") if count])
    jobs = [job for job in jobs if args.only is None or (job.sms_held > 0) == (args.only == "held")]
    todo = remaining(jobs, [] if args.again else common.read_rows(out), commit)
    layers: list[Layer] = []
    model, cell, stopped = None, None, 0
    for job in todo:
        if not clock.room():
            print("out of time: the same command goes on from here", flush=True)
            break
        if job.case.model != model:
            cell, layers = None, []
            if device.type == "cuda":
                torch.cuda.empty_cache()
            model, layers = job.case.model, common.make_layers(job.case.model, device)
        if cell is None or cell.case != job.case:
            cell = Cell(job.case, layers, rates, device)
        seconds = args.cell_seconds or common.seconds_of(job.case.tokens)
        rows = run_or_tell(cell, job, seconds, sms)
        stopped += any(row.get("error", "").startswith(STOPPED) for row in rows)
        common.add_rows(out, [row | about for row in rows])
        show(job, rows, clock.elapsed)
    if stopped:
        print(f"jobs stopped: {stopped}; the same command tries them again", flush=True)
    return int(stopped > 0)


if __name__ == "__main__":
    sys.exit(main())
