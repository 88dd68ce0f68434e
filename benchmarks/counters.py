"""Bytes read from DRAM over the least possible, and L2 hit rates, by the hardware counters.

    python benchmarks/counters.py --out benchmarks/results/h200-counters.jsonl \\
        --policies benchmarks/results/h200-policies.jsonl

Runs itself under Nsight Compute (ncu), which counts all kernels of one call of each policy; for
each kernel it empties the caches first and leaves the clocks alone, so its times are not these
benchmarks' times. Least bytes: the active experts' weights and x, once; a read of h or of down rows
that missed L2 counts as more, so the ratio of a kernel that reads nothing twice lies a little above
1 where they do not fit. L2 hit rate: of all sectors looked up, and of those read. Rows of the same
commit in --policies get dram_over_min and l2_hit; with --fill-only, from rows that are there.

--label says what is special about a build or a setting, such as one without cache hints; rows with
a label are kept, and not filled in. --hot-hint counts each policy's call again with that hint for
L2 on weights that several groups of tokens read: rows with the label "hot evict-last", say, and
beside them those of the same run without it.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import common
import policies
import torch
from common import Case, Cell, Row
from tables.rows import is_plain

from weave_moe.backends import cuda

READ = ("dram__bytes_read.sum", "dram__bytes_op_read.sum")
"""Names of one thing in different chips and versions; the first that has a value counts."""
HIT_RATE = "lts__t_sector_hit_rate.pct"
SECTORS, HITS = "lts__t_sectors_op_read.sum", "lts__t_sectors_op_read_lookup_hit.sum"
DURATION = "gpu__time_duration.sum"
METRICS = (READ[0], HIT_RATE, SECTORS, HITS, DURATION)
BASE_METRICS = ((READ[0], HIT_RATE), (READ[1], HIT_RATE))
"""What is asked for where the whole list is not known."""
CASES = (
    *(Case("qwen3-30b", tokens, skew) for tokens in (64, 256, 1024, 4096) for skew in (0.0, 1.2)),
    *(Case("mixtral", tokens, skew) for tokens in (64, 1024, 4096) for skew in (0.0, 1.2)),
)
HOT_HINTS = {
    "evict-first": cuda._EVICT_FIRST,
    "normal": cuda._EVICT_NORMAL,
    "evict-last": cuda._EVICT_LAST,
}
ROOTS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")


def find_ncu() -> str | None:
    """On the path, or where its installers put it: the newest, by its start script."""
    found = shutil.which("ncu")
    if found is not None:
        return found
    paths = [p for root in ROOTS for p in [*sorted(Path(root).glob("*/ncu")), Path(root, "ncu")]]
    runs = [str(p) for p in paths if p.is_file() and os.access(p, os.X_OK)]
    return runs[-1] if runs else None


def parse(text: str) -> list[dict[str, float]]:
    """Values by metric of each kernel in ncu's raw csv page; what is not a number is left out.

    Raises ValueError where there is no such page.
    """
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not heads:
        raise ValueError("ncu printed no table:\n" + "\n".join(lines[-15:]))
    kernels = []
    for line in csv.DictReader(io.StringIO("\n".join(lines[heads[-1] :]))):
        if not (line.get("ID") or "").isdigit():
            continue  # the line of units
        kernel = {}
        for name in (*READ, HIT_RATE, SECTORS, HITS, DURATION):
            try:
                kernel[name] = float((line.get(name) or "").replace(",", ""))
            except ValueError:
                continue
        kernels.append(kernel)
    return kernels


def figures(kernels: list[dict[str, float]], least: float) -> Row:
    """Of the kernels of one call."""
    read = [next((k[name] for name in READ if name in k), None) for k in kernels]
    row: Row = {"kernels": len(kernels), "dram_bytes": None, "dram_over_min": None}
    if kernels and None not in read:
        total = sum(value for value in read if value is not None)
        row |= {"dram_bytes": int(total), "dram_over_min": round(total / least, 4)}
    # Of several kernels, the one that reads most: the experts.
    main = max(kernels, key=lambda k: next((k[n] for n in READ if n in k), 0.0), default={})
    row["l2_hit"] = round(main[HIT_RATE] / 100, 4) if HIT_RATE in main else None
    hits = main[HITS] / main[SECTORS] if main.get(SECTORS) and HITS in main else None
    row["l2_read_hit"] = None if hits is None else round(hits, 4)
    if kernels and all(DURATION in k for k in kernels):
        # With empty caches, each kernel by itself: no time of the benchmarks.
        row["ncu_us"] = round(sum(k[DURATION] for k in kernels) / 1e3, 1)
    return row


def shared_out(kernels: list[dict[str, float]], calls: int) -> list[list[dict[str, float]]]:
    """The kernels of each call, which all have the same number. ValueError where they have not."""
    if not kernels or len(kernels) % calls:
        raise ValueError(f"{len(kernels)} kernels of {calls} calls: not the same number each")
    each = len(kernels) // calls
    return [kernels[i : i + each] for i in range(0, len(kernels), each)]


def fill(policy_rows: list[Row], counter_rows: Iterable[Row]) -> int:
    """Puts the ratios into rows of the same commit, cell and policy; how many got one."""
    found = {
        (r["commit"], r["model"], r["T"], r["skew"], r.get("trace"), r["contestant"]): r
        for r in counter_rows
        if is_plain(r) and r.get("dram_over_min") is not None
    }
    filled = 0
    for row in policy_rows:
        cell = (row["commit"], row["model"], row["T"], row["skew"], row.get("trace"))
        measured = found.get((*cell, row["contestant"]))
        default = row["knobs"] == policies.DEFAULT_KNOBS and not row["sms_held"]
        if measured is not None and default:
            row["dram_over_min"], row["l2_hit"] = measured["dram_over_min"], measured["l2_hit"]
            filled += 1
    return filled


def fill_file(counters: Path, target: Path) -> None:
    rows = common.read_rows(target)
    filled = fill(rows, common.read_rows(counters))
    target.write_text("")
    common.add_rows(target, rows)
    print(f"{filled} rows of {target.name} have dram_over_min now")


def with_hint(name: str, hint: str) -> str:
    """What --counted calls a policy under a hint; "": none."""
    return f"{name}@{hint}" if hint else name


def functions_of(name: str, layers: list[common.Layer]) -> list:
    """A policy's functions, one for each weight set, by what --counted calls it."""
    policy, _, hint = name.partition("@")
    variant = policies.Variant(policy)
    workspace = policies.workspace_of(variant)
    if hint:
        workspace._hot_hint = HOT_HINTS[hint]
    return policies.functions_of(variant, layers, workspace)


def launch_counted(case: Case, names: list[str]) -> None:
    """What runs under ncu: each policy's call, once warmed up, between the profiler's marks."""
    device = common.the_device()
    layers = common.make_layers(case.model, device)[:1]
    cell = Cell(case, layers, common.Rates(1.0, 1.0), device)
    made = [functions_of(name, layers) for name in names]
    for functions in made:
        cell.call(functions, 0)
    common.check_launches(device)
    torch.cuda.profiler.start()
    for functions in made:
        cell.call(functions, 0)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    common.check_launches(device)
    print(f"active={len(cell.routes[0][1].unique())}", flush=True)


def count(ncu: str, case: Case, names: list[str]) -> tuple[list[dict[str, float]], int]:
    """The kernels' counters, and the number of experts that the call touched."""
    problem = ""
    for metrics in (METRICS, *BASE_METRICS):
        command = [
            *(ncu, "--clock-control", "none", "--profile-from-start", "off"),
            *("--target-processes", "all", "--csv", "--page", "raw", "--print-units", "base"),
            *("--metrics", ",".join(metrics), sys.executable, str(Path(__file__).resolve())),
            *("--counted", case.model, str(case.tokens), str(case.skew), ",".join(names)),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        active = [line for line in run.stdout.splitlines() if line.startswith("active=")]
        try:
            kernels = parse(run.stdout)
        except ValueError as error:
            problem = f"{error}\n{run.stderr[-800:]}"
            continue
        if active and any(name in kernel for kernel in kernels for name in READ):
            return kernels, int(active[0].removeprefix("active="))
        problem = f"no counters in:\n{run.stdout[-800:]}{run.stderr[-800:]}"
    raise RuntimeError(problem)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", help="by default some cells of qwen3-30b and mixtral")
    parser.add_argument("--tokens")
    parser.add_argument("--skews", default=",".join(map(str, common.SKEWS)))
    parser.add_argument("--contestants", default=",".join(policies.POLICIES), help="policies")
    parser.add_argument("--label", default="", help="what is special about this build")
    parser.add_argument(
        "--hot-hint", default="", help=f"also with {', '.join(HOT_HINTS)}; fills nothing in"
    )
    parser.add_argument("--max-seconds", type=float, help="begin no cell that would end later")
    parser.add_argument("--out", default="counters.jsonl")
    parser.add_argument("--policies", help="result file of policies.py to fill in")
    parser.add_argument("--fill-only", action="store_true", help="measure nothing")
    parser.add_argument("--commit", default=None, help="the commit to name, where git is not there")
    parser.add_argument("--counted", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.hot_hint = [hint for hint in args.hot_hint.split(",") if hint]
    for hint in args.hot_hint:
        if hint not in HOT_HINTS:
            parser.error(f"--hot-hint must be some of {', '.join(HOT_HINTS)}; got {hint!r}")
    if args.hot_hint and args.label:
        parser.error("--hot-hint makes the label itself; got --label, too")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.counted:
        model, tokens, skew, names = args.counted
        launch_counted(Case(model, int(tokens), float(skew)), names.split(","))
        return 0
    out = Path(args.out)
    if not args.fill_only:
        ncu = find_ncu()
        if ncu is None:
            print("ncu is not there: Nsight Compute brings it")
            return 2
        clock = common.Clock(args.max_seconds)
        commit = args.commit or common.git_commit()
        about = common.about(common.the_device(), commit, common.Rates(0.0, 0.0))
        hints = ["", *args.hot_hint]
        runs = [(name, hint) for hint in hints for name in args.contestants.split(",")]
        for case in common.cases_of(args, CASES):
            if not clock.room():
                print("out of time", flush=True)
                break
            kernels, active = count(ncu, case, [with_hint(*run) for run in runs])
            least = common.minimum_bytes(case, active)
            cell = {"model": case.model, "T": case.tokens, "skew": case.skew, "active": active}
            rows = [
                {
                    **cell,
                    "contestant": f"weave:{name}",
                    "label": f"hot {hint}" if hint else args.label,
                }
                | ({"beside": ",".join(args.hot_hint)} if args.hot_hint and not hint else {})
                | {"batch": policies.workspace_of(policies.Variant(name)).batch}
                | figures(mine, least)
                | about
                for (name, hint), mine in zip(runs, shared_out(kernels, len(runs)), strict=True)
            ]
            common.add_rows(out, rows)
            texts = [
                f"{with_hint(r['contestant'], r['label'])} {r['dram_over_min']} {r['l2_hit']}"
                for r in rows
            ]
            print(f"[{clock.elapsed:5.0f} s] {case}: {'  '.join(texts)}", flush=True)
    if args.policies:
        fill_file(out, Path(args.policies))
    return 0


if __name__ == "__main__":
    sys.exit(main())
