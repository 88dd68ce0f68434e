"""`weave-moe calibrate`: what the simulator needs to know of the GPU at hand, measured and fitted.

A few launches of our own kernel are timed, on routings that are drawn on the CPU from a seed, so
that a fit simulates the very launches that were timed, here or elsewhere. Costs are fitted to two
layers; two others, with other numbers of tokens, say how far the simulation is off.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import presets
from .._version import __version__
from ..run.compare import one_torch_thread, uses_gpu
from ..run.errors import InputError
from ..run.files import check_folder, write_files
from ..run.report import Reporter, Step
from ..run.sources import parse_source
from ..schedule import POLICY_CODES
from ..shapes import DTYPES
from ..simulate.calibrate import (
    Cell,
    Predicted,
    Works,
    errors_of,
    fit,
    free_for,
    predict,
)
from ..simulate.machine import Machine, load_machine, machine_file
from ..simulate.workload import make_workload
from ..tools.machine import look
from . import cells
from .cells import Layer, Rates, Routing, Weights, make_weights, prepare, routes_for, weight_sets
from .contestants import make, ours
from .measure import measure, refused
from .rates import measure_rates
from .timing import Row, calls_of, the_device

__all__ = ["CalibrateOptions", "calibrate_command", "fitted_machine", "read_rows"]

DTYPE = "bfloat16"
POLICIES = ("steal", "counter", "static_strided")
FIT_POLICIES = ("steal", "static_strided")
"""The counter is level with stealing: its rows would cost a fit time and tell it nothing."""
SKEWS = (0.0, 1.2)
FITTED = {"qwen3-30b": (1, 16, 64, 256, 1024, 2048), "mixtral-8x7b": (1, 64, 1024)}
HELD_OUT = {"olmoe": (4, 32, 128, 512, 2048), "qwen3-235b": (4, 32, 128, 512)}
"""Layers and their numbers of tokens, of 10 GB at most."""
DISTINCT = 2
"""Routings of a cell: the calls of a graph take them in turn, and each is simulated."""
SEED = 20
SPREAD = 0.05
SECONDS = 0.3
ROUNDS = 3
MEDIAN_BAR, WORST_BAR = 0.08, 0.20
"""Errors on launches that were not fitted to, above which a calibration is said to be poor."""
L2_SHARE = 0.5
"""Of L2: as much of other weights read, and a tile has left it. Each half keeps its own copies."""


@dataclass(frozen=True)
class CalibrateOptions:
    """The options of `weave-moe calibrate`, as the command line has them."""

    out: Path = Path("weave-machine.json")
    name: str | None = None
    rows: Path | None = None
    measure_only: bool = False
    seconds: float = SECONDS
    as_json: bool = False


def calibrate_command(options: CalibrateOptions) -> int:
    """Measure, fit, write the machine's file and its rows beside it.

    Exit status 0; 1 if a result was wrong or times were spread too wide, and then no file is
    written; InputError for bad input, and where there is no GPU to measure.
    """
    if options.rows is not None and options.measure_only:
        raise InputError("--fit-rows and --measure-only exclude each other")
    if options.out.suffix != ".json":
        raise InputError(f"--out must end in .json, got {options.out}")
    check_folder(options.out.parent)
    reporter = Reporter(quiet=options.as_json)
    rows = None if options.rows is None else read_rows(options.rows)
    if rows is None and not uses_gpu("auto"):
        raise InputError(
            "calibrate measures a GPU that the kernel runs on, and torch sees none; --fit-rows "
            "fits rows that were measured elsewhere"
        )
    steps = (0 if rows else len(grid()) + 1) + (0 if options.measure_only else ROUNDS * 14 + 2)
    with one_torch_thread(), reporter.working(steps) as step:
        contents: dict[str, str] = {}
        if rows is None:
            rows = measured_rows(options, step)
            wrong = refused(rows)
            if wrong:
                reporter.stop()
                return _refuse(reporter, wrong, options)
            contents[f"{options.out.stem}.rows.jsonl"] = "".join(
                json.dumps(row) + "\n" for row in rows
            )
        document: dict[str, Any] = {}
        if not options.measure_only:
            machine, document = fitted_machine(rows, options.name or options.out.stem, step)
            contents[options.out.name] = machine_file(machine, document)
    written = write_files(
        options.out.parent, {name: text.encode() for name, text in contents.items()}
    )
    reporter.stop()
    _print(reporter, rows, document, written, options)
    return 0


# --- measuring ---------------------------------------------------------------------------------


def grid() -> list[tuple[str, int, float]]:
    """Model, tokens and skew of every cell."""
    return [
        (model, tokens, skew)
        for models in (FITTED, HELD_OUT)
        for model, counts in models.items()
        for tokens in counts
        for skew in SKEWS
    ]


def routings(model: str, tokens: int, skew: float, device: torch.device) -> list[Routing]:
    """The distinct routings of a cell, the same everywhere."""
    source = parse_source("uniform" if skew == 0 else f"zipf:{skew:g}")
    return routes_for(
        source, presets.preset(model), tokens, device, calls=DISTINCT, seed=SEED * tokens
    )


def checksum(routes: Iterable[Routing]) -> int:
    """Of the routings' ids: whether these are the ones that were timed."""
    value = 0
    for _, ids, _ in routes:
        value = zlib.crc32(ids.cpu().numpy().tobytes(), value)
    return value


def measured_rows(options: CalibrateOptions, step: Step) -> list[Row]:
    """A row for each cell and policy, timed on the current GPU."""
    device = the_device()
    step("what this GPU does at best")
    rates = measure_rates(DTYPES[DTYPE])
    facts = _facts(device, rates)
    rows: list[Row] = []
    before = None
    sets: list[Weights] = []
    for model, tokens, skew in grid():
        step(f"{model} T={tokens} skew {skew:g}")
        preset = presets.preset(model)
        shape = preset.shape(DTYPE)
        if model != before:
            sets.clear()
            free = float(torch.cuda.mem_get_info(device)[0])
            count = weight_sets(shape, calls_of(tokens), free)
            sets += [make_weights(shape, device, seed=i) for i in range(count)]
            before = model
        routes = routings(model, tokens, skew, device)
        calls = calls_of(tokens)
        layer = Layer.of(preset, DTYPE, routes)
        cell = cells.Cell(
            layer,
            sets,
            _inputs(calls, tokens, shape.hidden, device),
            [routes[i % DISTINCT] for i in range(calls)],
            rates,
            {"model": model, "T": tokens, "skew": skew, "routings": checksum(routes)},
        )
        contestants = {f"weave:{p}": make(ours(p, "cuda"), layer, sets) for p in POLICIES}
        rows += [
            {**row, "active": cell.active, "busiest": cell.busiest, **facts}
            for row in measure(
                cell, prepare(cell, contestants), seconds=options.seconds, max_spread=SPREAD
            )
        ]
    return rows


def _inputs(calls: int, tokens: int, hidden: int, device: torch.device) -> list[Tensor]:
    return [torch.randn(tokens, hidden, device=device, dtype=DTYPES[DTYPE]) for _ in range(calls)]


def _facts(device: torch.device, rates: Rates) -> Row:
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "shared_bytes": getattr(properties, "shared_memory_per_block_optin", None),
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "read_tbs": round(rates.read, 4),
        "matrix_tflops": round(rates.matrix, 2),
        "driver": look().driver.version,
        "torch": torch.__version__,
        "weave_moe": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }


CONTESTANTS = tuple(f"weave:{policy}" for policy in POLICY_CODES)
TEXTS, COUNTS = ("model", "contestant", "gpu", "date"), ("T", "routings", "sms")
NUMBERS = ("skew", "us", "active", "busiest", "read_tbs", "matrix_tflops")
"""What each row must have."""


def read_rows(path: Path) -> list[Row]:
    """Rows that `measured_rows` gave. Raises InputError naming the file, the line and the problem.

    All must be of one GPU, and both kinds of layers among them.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InputError(f"--fit-rows {path}: {reason}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row: Row = json.loads(line)
            for name in (*TEXTS, *COUNTS, *NUMBERS):
                value = row[name]
                kinds: Any = str if name in TEXTS else int if name in COUNTS else (int, float)
                if isinstance(value, bool) or not isinstance(value, kinds):
                    raise TypeError(name)
                if name in NUMBERS and not 0 <= value < math.inf:
                    raise ValueError(f"{name} {value}")
            if row["us"] <= 0 or not 1 <= row["sms"] <= 1024 or not 1 <= row["T"] <= 1 << 14:
                raise ValueError("us, sms or T")
            if row["contestant"] not in CONTESTANTS:
                raise ValueError(row["contestant"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"--fit-rows {path}, line {number}: not a row of `weave-moe calibrate` ({error})"
            ) from error
        rows.append(row)
    if {row["model"] for row in rows} != {*FITTED, *HELD_OUT}:
        raise InputError(f"--fit-rows {path}: must have rows of {', '.join((*FITTED, *HELD_OUT))}")
    if len({(row["gpu"], row["sms"], row["read_tbs"]) for row in rows}) != 1:
        raise InputError(f"--fit-rows {path}: the rows are of several runs or GPUs")
    return rows


# --- fitting -----------------------------------------------------------------------------------


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    """The simulator's cells."""
    return [
        Cell(
            row["model"],
            row["T"],
            float(row["skew"]),
            row["contestant"].partition(":")[2],
            float(row["us"]),
            float(row["active"]),
            float(row["busiest"]),
        )
        for row in rows
    ]


def works_of(rows: Sequence[Row], shared_bytes: int) -> Works:
    """The launches that were timed, drawn again. Raises InputError where they are others now."""
    works: Works = {}
    for row in rows:
        key = row["model"], row["T"], float(row["skew"])
        if key in works:
            continue
        routes = routings(*key, torch.device("cpu"))
        if checksum(routes) != row["routings"]:
            raise InputError(
                f"the routings of {key[0]} T={key[1]} cannot be drawn again by torch "
                f"{torch.__version__}: fit where they were timed"
            )
        shape = presets.preset(key[0]).shape(DTYPE)
        works[key] = [make_workload(shape, ids.numpy(), shared_bytes) for _, ids, _ in routes]
    return works


def start_of(row: Row, name: str) -> Machine:
    """The machine before the fit: its own rates and sizes, the shipped costs."""
    base = load_machine("h200")
    sms = row["sms"]
    changed: dict[str, Any] = {
        "name": name,
        "sms": sms,
        "hbm_tbs": row["read_tbs"],
        "matrix_tflops": row["matrix_tflops"],
        "l2_tbs": round(base.l2_tbs * sms / base.sms, 3),
    }
    if row.get("shared_bytes"):
        changed["shared_bytes"] = row["shared_bytes"]
    if row.get("l2_bytes"):
        changed["l2_mb"] = round(L2_SHARE * row["l2_bytes"] / 1e6, 1)
    return replace(base, **changed, verified=False, source="before its fit")


def fitted_machine(
    rows: Sequence[Row], name: str, step: Step = lambda text: None, rounds: int = ROUNDS
) -> tuple[Machine, dict[str, Any]]:
    """The machine whose costs fit the rows of `FITTED` best, and its calibration.

    The calibration has the errors on the rows of `HELD_OUT`, which the fit has not seen.
    """
    step("the launches that were timed")
    start = start_of(rows[0], name)
    free = free_for(rows[0]["read_tbs"], rows[0]["matrix_tflops"])
    # The start lies within the bounds: costs are another machine's.
    inside = {cost: min(max(getattr(start, cost), low), high) for cost, (low, high) in free.items()}
    start = replace(start, **inside)
    works = works_of(rows, start.shared_bytes)
    seen = cells_of(row for row in rows if row["model"] in FITTED)
    unseen = cells_of(row for row in rows if row["model"] in HELD_OUT)

    def said(text: str) -> None:
        step(f"fit: {text}")

    fitting = [cell for cell in seen if cell.policy in FIT_POLICIES]
    machine = fit(start, fitting, rounds=rounds, free=free, works=works, said=said)
    step("errors")
    fitted: list[Predicted] = predict(machine, seen, works=works)
    held_out = predict(machine, unseen, works=works)
    about = f"{len(fitting)} launches of {rows[0]['gpu']}, {rows[0]['date']}"
    document = {
        "gpu": rows[0]["gpu"],
        "date": rows[0]["date"],
        "fitted_to": f"{', '.join(FITTED)} ({len(fitting)} rows)",
        "free": {cost: list(bounds) for cost, bounds in free.items()},
        **{
            name: rows[0].get(name)
            for name in ("driver", "torch", "weave_moe", "read_tbs", "matrix_tflops")
        },
        "errors": {
            "routings": DISTINCT,
            "seed": SEED,
            "fitted": errors_of(fitted),
            "held_out": errors_of(held_out),
        },
    }
    return replace(machine, source=f"fitted to {about}"), document


# --- what is said ------------------------------------------------------------------------------


def _refuse(reporter: Reporter, wrong: list[Row], options: CalibrateOptions) -> int:
    lines = [f"{row['contestant']} {row['model']} T={row['T']}: {row['error']}" for row in wrong]
    if options.as_json:
        reporter.raw(json.dumps({"result": "refused", "refused": lines}, indent=2))
    for line in lines:
        reporter.line("REFUSED", line, "bold red")
    reporter.line("result", "nothing is written: a machine is not what wrong or spread times say")
    return 1


def _print(
    reporter: Reporter,
    rows: Sequence[Row],
    document: Mapping[str, Any],
    written: Sequence[Path],
    options: CalibrateOptions,
) -> None:
    first = rows[0]
    measured = (
        f"{first['gpu']}: {first['sms']} SMs, reads {first['read_tbs']:.2f} TB/s, multiplies "
        f"{first['matrix_tflops']:.0f} TFLOP/s ({DTYPE})"
    )
    if options.as_json:
        reporter.raw(
            json.dumps(
                {
                    "weave_moe": __version__,
                    "result": "calibrated" if document else "measured",
                    "machine": measured,
                    "rows": len(rows),
                    "calibration": dict(document),
                    "files": {path.name: str(path) for path in written},
                },
                indent=2,
            )
        )
        return
    reporter.line("machine", measured)
    reporter.line("rows", f"{len(rows)} launches timed, three policies in turn")
    if document:
        errors = document["errors"]
        for label, which in (("fitted", "fitted"), ("unseen", "held_out")):
            found = errors[which]
            reporter.line(
                label,
                f"{', '.join(found['models'])}: {found['cells']} launches, off by "
                f"{found['median']:.1%} (median), {found['worst']:.1%} (worst: "
                f"{found['worst_cell']})",
            )
        unseen = errors["held_out"]
        if unseen["median"] > MEDIAN_BAR or unseen["worst"] > WORST_BAR:
            reporter.line(
                "note",
                f"a poor fit: {MEDIAN_BAR:.0%} and {WORST_BAR:.0%} are what a good one stays "
                "below; simulations on this machine say so too",
                "bold yellow",
            )
    for path in written:
        reporter.line("file", str(path))
    if document:
        reporter.line("use", f"weave-moe simulate --machine {options.out}")
