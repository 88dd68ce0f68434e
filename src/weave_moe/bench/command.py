"""`weave-moe bench`: the layer beside other implementations, checked first, then timed in turn."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import presets
from .._version import __version__
from ..presets import Preset
from ..run.compare import (
    choose_scale,
    default_workers,
    one_torch_thread,
    parse_policies,
    uses_gpu,
)
from ..run.errors import InputError
from ..run.files import check_folder, write_files
from ..run.report import Reporter, Step
from ..run.sources import Source, check_layer, parse_source
from ..shapes import DTYPES
from ..tools.machine import look
from . import outputs
from .cells import (
    WRONG,
    Cell,
    Layer,
    Rates,
    Weights,
    make_weights,
    prepare,
    routes_for,
    weight_sets,
)
from .contestants import RIVALS, Found, find, make, ours
from .measure import NOT_RUN, TIMED, measure, refused
from .rates import measure_rates
from .timing import Row, calls_of, seconds_of, the_device

__all__ = ["BenchOptions", "bench_command"]

GPU_TOKENS, CPU_TOKENS = (1, 4, 16, 64, 256, 1024, 4096), (16, 64)
GPU_DTYPES = ("bfloat16", "float16")
MAX_TOKENS = 131072
GPU_SPREAD, CPU_SPREAD = 0.05, 0.5
"""Spreads that are too wide unless an option says otherwise."""
CPU_SECONDS = 0.4
GPU_EVIDENCE = "device time, CUDA graph replays"
CPU_EVIDENCE = "CPU time, not evidence of speed"
WIDEST = 120


@dataclass(frozen=True)
class BenchOptions:
    """The options of `weave-moe bench`, as the command line has them."""

    preset: str | None = None
    config: Path | None = None
    tokens: str | None = None
    routing: str = "uniform,zipf"
    layer: int | None = None
    dtype: str | None = None
    policy: str = "all"
    rivals: str = "all"
    neighbour: int = 0
    tensor_parallel: int = 1
    backend: str = "auto"
    workers: int | None = None
    scale: str = "auto"
    seconds: float | None = None
    max_spread: float | None = None
    seed: int = 0
    out: Path = Path("weave-bench")
    listed: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class Plan:
    """What is asked for, checked: everything that can be wrong with the options is found here."""

    device: torch.device
    layers: tuple[tuple[Preset, str], ...]
    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    policies: tuple[str, ...]
    found: Found
    notes: tuple[str, ...]
    on_gpu: bool

    @property
    def cells(self) -> int:
        """How many there are."""
        return len(self.layers) * len(self.sources) * len(self.tokens)


@dataclass
class Outcome:
    """What was measured so far."""

    rows: list[Row] = field(default_factory=list)

    @property
    def refused(self) -> list[Row]:
        """Rows without the time that they should have."""
        return refused(self.rows)

    @property
    def contestants(self) -> list[tuple[str, str, str]]:
        """Name, version and what a call includes, of those that were called."""
        found: dict[str, tuple[str, str, str]] = {}
        for row in self.rows:
            if "version" in row:
                name = str(row["contestant"])
                found[name] = (name, str(row["version"]), str(row["note"]))
        return list(found.values())

    @property
    def status(self) -> int:
        """The exit status."""
        if self.refused:
            return 1
        if not any(row["ours"] and row["status"] == TIMED for row in self.rows):
            return 3
        return 0


def bench_command(options: BenchOptions) -> int:
    """Measure, print, write files.

    Exit status 0; 1 if a time is not reported because a result was wrong, times too spread or a
    call of ours failed; 3 if no layer could be timed with this package; InputError for bad input.
    """
    plan = read_plan(options)
    reporter = Reporter(quiet=options.as_json)
    if options.listed:
        _list(reporter, plan, options)
        return 0
    check_folder(options.out)
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        if not plan.on_gpu:
            stack.enter_context(one_torch_thread())
        step = stack.enter_context(reporter.working(plan.cells + 1))
        step("what this machine does at best" if plan.on_gpu else "start")
        _run(plan, options, outcome, step)
    contents = {
        "bench.jsonl": outputs.json_lines(outcome.rows),
        "bench.csv": outputs.csv_text(outcome.rows),
        "bench.md": outputs.markdown(
            _words(plan, outcome),
            outcome.contestants,
            plan.found.absent,
            outcome.rows,
            _refusals(outcome),
        ),
    }
    picture = outputs.picture_png(outcome.rows)
    if picture is not None:
        contents["bench.png"] = picture
    written = write_files(options.out, contents)
    reporter.stop()
    if options.as_json:
        reporter.raw(_as_json(plan, outcome, options, written))
    else:
        _print(reporter, plan, outcome, written)
    return outcome.status


# --- what is asked for -------------------------------------------------------------------------


def read_plan(options: BenchOptions) -> Plan:
    """The options, checked. Raises InputError."""
    gpu = uses_gpu(options.backend)
    if options.backend == "cuda" and not gpu:
        raise InputError("--backend cuda cannot run here: torch sees no GPU")
    if options.neighbour and not gpu:
        raise InputError("--neighbour holds SMs of a GPU, and this would run on the CPU")
    device = the_device() if gpu else torch.device("cpu")
    if options.neighbour:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        if options.neighbour >= sms:
            raise InputError(
                f"--neighbour must leave an SM free: below {sms} here, got {options.neighbour}"
            )
    tokens = _tokens(options.tokens, GPU_TOKENS if gpu else CPU_TOKENS)
    sources = tuple(dict.fromkeys(parse_source(text.strip()) for text in _split(options.routing)))
    if options.layer is not None and not all(source.kind == "trace" for source in sources):
        raise InputError("--layer belongs to traces, and --routing has something else too")
    notes: list[str] = []
    layers = []
    for chosen in _presets(options, gpu=gpu):
        layer = _cut(chosen, options.tensor_parallel)
        for dtype in _dtypes(options.dtype, layer, gpu=gpu):
            factor, line = choose_scale(layer, tokens[-1], dtype, options.scale, on_gpu=gpu)
            notes += [*layer.notes, *([line] if line else [])]
            scaled = layer.scaled(factor)
            if factor != 1:
                scaled = replace(scaled, name=f"{layer.name} x {factor}")
            if gpu:
                _check_memory(scaled, dtype, device)
            layers.append((scaled, dtype))
        for source in sources:
            if source.kind == "trace" and options.layer is not None:
                from ..data import load_trace

                with _named(source):
                    check_layer(options.layer, load_trace(source.name).layers, str(source))
            routes_for(source, layer, tokens[-1], torch.device("cpu"), calls=1, layer=options.layer)
        if layer.shared_intermediate:
            notes.append(f"{layer.name}: the model's shared experts are dense and left out")
    wanted = None if options.rivals == "all" else _split(options.rivals)
    try:
        found = find([] if wanted == ["none"] else wanted, device)
    except ValueError as error:
        raise InputError(f"--{error}") from error
    return Plan(
        device,
        tuple(layers),
        tokens,
        sources,
        parse_policies(options.policy),
        found,
        tuple(dict.fromkeys(notes)),
        gpu,
    )


@contextlib.contextmanager
def _named(source: Source) -> Any:
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"--routing {source}: {error}") from error


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _tokens(text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    if text is None:
        return default
    found = []
    for part in _split(text):
        if not part.isascii() or not part.isdigit() or not 1 <= int(part) <= MAX_TOKENS:
            raise InputError(
                f"--tokens must be numbers from 1 to {MAX_TOKENS} with commas between, got {part!r}"
            )
        found.append(int(part))
    return tuple(sorted(set(found)))


def _presets(options: BenchOptions, *, gpu: bool) -> list[Preset]:
    if options.preset is not None and options.config is not None:
        raise InputError("--preset and --config exclude each other")
    try:
        if options.config is not None:
            return [presets.from_config(options.config)]
        names = options.preset or ("qwen3-30b" if gpu else "shipped")
        return [presets.preset(name) for name in dict.fromkeys(_split(names))]
    except ValueError as error:
        raise InputError(f"--{error}") from error


def _cut(preset: Preset, parts: int) -> Preset:
    """One GPU's part of a layer whose experts are cut among `parts` GPUs."""
    if parts == 1:
        return preset
    if preset.intermediate % parts:
        raise InputError(
            f"--tensor-parallel {parts} does not divide {preset.name}'s intermediate size "
            f"{preset.intermediate}"
        )
    return replace(
        preset, name=f"{preset.name}/tp{parts}", intermediate=preset.intermediate // parts
    )


def _dtypes(text: str | None, preset: Preset, *, gpu: bool) -> list[str]:
    allowed = GPU_DTYPES if gpu else tuple(DTYPES)
    if text is None:
        return [preset.dtype if preset.dtype in allowed else "bfloat16"]
    found = list(dict.fromkeys(_split(text)))
    for name in found:
        if name not in allowed:
            raise InputError(
                f"--dtype must be some of {', '.join(allowed)} (with commas between) "
                f"{'on a GPU' if gpu else 'on a CPU'}, got {name!r}"
            )
    return found


def _check_memory(preset: Preset, dtype: str, device: torch.device) -> None:
    shape = preset.shape(dtype)
    size, free = shape.experts * shape.expert_bytes, torch.cuda.mem_get_info(device)[0]
    if size > 0.8 * free:
        raise InputError(
            f"{preset.name} has {size / 1e9:.0f} GB of weights, and {free / 1e9:.0f} GB of the "
            "GPU's memory are free; --tensor-parallel takes one GPU's part of it"
        )


# --- measuring ---------------------------------------------------------------------------------


def _run(plan: Plan, options: BenchOptions, outcome: Outcome, step: Step) -> None:
    rates: dict[str, Rates] = {}
    facts = _facts(plan, options)
    for preset, dtype in plan.layers:
        if plan.on_gpu and dtype not in rates:
            rates[dtype] = measure_rates(DTYPES[dtype])
        sets = _weights(preset, dtype, plan, options.seed)
        for source in plan.sources:
            _sweep(plan, options, outcome, step, (preset, dtype, source), sets, rates, facts)
        del sets
        if plan.on_gpu:
            torch.cuda.empty_cache()


def _weights(preset: Preset, dtype: str, plan: Plan, seed: int) -> list[Weights]:
    shape = preset.shape(dtype)
    free = float(torch.cuda.mem_get_info(plan.device)[0]) if plan.on_gpu else math.inf
    # The CPU's caches are nobody's question here: two sets, so that rotation is what it is.
    count = weight_sets(shape, calls_of(plan.tokens[-1]), free) if plan.on_gpu else 2
    return [
        make_weights(shape, plan.device, seed=seed + i, biases=preset.expert_bias)
        for i in range(count)
    ]


def _sweep(
    plan: Plan,
    options: BenchOptions,
    outcome: Outcome,
    step: Step,
    what: tuple[Preset, str, Source],
    sets: Sequence[Weights],
    rates: dict[str, Rates],
    facts: Row,
) -> None:
    """All numbers of tokens of one layer, dtype and routing."""
    preset, dtype, source = what
    made: dict[Layer, dict[str, Any]] = {}
    limit = options.max_spread
    if limit is None:
        limit = GPU_SPREAD if plan.on_gpu else CPU_SPREAD
    for tokens in plan.tokens:
        step(f"{preset.name} {dtype} {source} T={tokens}")
        routes = routes_for(
            source, preset, tokens, plan.device, seed=options.seed, layer=options.layer
        )
        layer = Layer.of(preset, dtype, routes)
        if layer not in made:
            made.clear()  # copies of the weights that others made
            made[layer] = _contestants(plan, options, layer, sets)
        generator = torch.Generator(device=plan.device)
        generator.manual_seed(options.seed + tokens)
        inputs = [
            torch.randn(
                tokens,
                preset.hidden,
                device=plan.device,
                dtype=DTYPES[dtype],
                generator=generator,
            )
            for _ in routes
        ]
        cell = Cell(layer, sets, inputs, routes, rates.get(dtype))
        cell.row = _cell_row(preset, source, cell)
        prepared = prepare(cell, made[layer])
        seconds = options.seconds
        if seconds is None:
            seconds = seconds_of(tokens) if plan.on_gpu else CPU_SECONDS
        for row in measure(
            cell,
            prepared,
            seconds=seconds,
            max_spread=limit,
            neighbour=options.neighbour,
        ):
            functions = made[layer][row["contestant"]]
            if row["status"] == TIMED:
                graph = plan.on_gpu and functions[0].graphs
                row["timed_as"] = "graph" if graph else "calls"
            if dtype in rates:
                row["read_tbs"] = round(rates[dtype].read, 3)
                row["matrix_tflops"] = round(rates[dtype].matrix, 1)
            for name in ("rel_err", "max_row_err"):  # JSON has no infinity
                if name in row and not math.isfinite(row[name]):
                    row[name] = None
            outcome.rows.append(row | facts)
        # What is measured is kept, should the rest fail or take too long.
        write_files(options.out, {"bench.jsonl": outputs.json_lines(outcome.rows)})


def _contestants(
    plan: Plan, options: BenchOptions, layer: Layer, sets: Sequence[Weights]
) -> dict[str, Any]:
    backend = "cuda" if plan.on_gpu else "host"
    workers = options.workers or (None if plan.on_gpu else default_workers())
    factories = {f"weave:{policy}": ours(policy, backend, workers) for policy in plan.policies}
    factories |= {name: RIVALS[name].factory for name in plan.found.rivals}
    return {name: make(factory, layer, sets) for name, factory in factories.items()}


def _cell_row(preset: Preset, source: Source, cell: Cell) -> Row:
    shape, act = cell.layer.shape, cell.layer.activation
    extra = f", clamp {act.limit:g}" if act.limit is not None else ""
    return {
        "preset": preset.name,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "dtype": shape.dtype,
        "activation": f"{act.kind}{extra}",
        "T": cell.tokens,
        "routing": _routing_name(source),
        "active": round(cell.active, 2),
        "busiest": round(cell.busiest, 2),
        "floor_us": None if cell.floor is None else round(cell.floor, 2),
    }


def _routing_name(source: Source) -> str:
    """A source without the folder of a trace's file."""
    return f"trace:{Path(source.name).name}" if source.kind == "trace" else str(source)


def _facts(plan: Plan, options: BenchOptions) -> Row:
    """What every row says of the run."""
    facts: Row = {
        "evidence": GPU_EVIDENCE if plan.on_gpu else CPU_EVIDENCE,
        "gpu": torch.cuda.get_device_name(plan.device) if plan.on_gpu else None,
        "torch": torch.__version__,
        "weave_moe": __version__,
        "seed": options.seed,
        "date": time.strftime("%Y-%m-%d"),
        "command": command_text(sys.argv[1:]),
    }
    if plan.on_gpu:
        facts["driver"] = look().driver.version
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts["triton"] = metadata.version("triton")
    return facts


def command_text(words: Sequence[str]) -> str:
    """The command as it was typed, without folders of the machine it ran on."""
    plain = [Path(word).name if word.startswith(("/", "~", ".")) else word for word in words]
    return " ".join(["weave-moe", *plain])


# --- what is said ------------------------------------------------------------------------------


def _machine(plan: Plan, outcome: Outcome) -> str:
    if not plan.on_gpu:
        return f"CPU, {default_workers()} workers by default: {CPU_EVIDENCE}"
    ceilings = {
        row["dtype"]: f"{row['matrix_tflops']:.0f} TFLOP/s {row['dtype']}" for row in outcome.rows
    }
    read = outcome.rows[0]["read_tbs"] if outcome.rows else 0
    return (
        f"{torch.cuda.get_device_name(plan.device)}; measured at best, now: read {read:.2f} TB/s, "
        f"{', '.join(ceilings.values())}"
    )


def _words(plan: Plan, outcome: Outcome) -> list[str]:
    """Paragraphs about the run."""
    words = [f"{_machine(plan, outcome)}."]
    if plan.on_gpu:
        words.append(
            "Times: microseconds a call, the median and the 99th percentile over replays of a CUDA "
            "graph of several calls, each with its own input and routing, over sets of weights in "
            "turn; contestants in turn, in another order each round. A star: calls timed one by "
            "one, since they ask the device in between and cannot be captured; these include what "
            "launching takes. Floor: the larger of the bytes (weights of the experts used, x, y) "
            "at the read rate and the operations at the matrix rate."
        )
    else:
        words.append(
            "**These are CPU times and no evidence of speed on a GPU.** They show that everything "
            "runs and is right."
        )
    words.append(
        "Each contestant was first compared with a plain fp32 computation, by its own activation. "
        "Spread: half the distance between the quartiles of its times, over their median."
    )
    words += [f"Note: {note}." for note in plan.notes]
    return words


def _refusals(outcome: Outcome) -> list[str]:
    """A line for each row that is refused."""
    lines = []
    for row in outcome.refused:
        beside = f" beside {row['neighbour_sms']} held SMs" if row["neighbour_sms"] else ""
        detail = str(row["error"])
        if row["status"] == WRONG:
            worst = row["max_row_err"]
            detail += ", worst row " + ("not finite" if worst is None else f"off by {worst:.1%}")
        lines.append(
            f"{row['contestant']} at {row['preset']} {row['dtype']} {row['routing']} "
            f"T={row['T']}{beside}: {detail}"
        )
    return lines


def _list(reporter: Reporter, plan: Plan, options: BenchOptions) -> None:
    here = {name: f"{RIVALS[name].package}" for name in plan.found.rivals}
    if options.as_json:
        document = {"rivals": here, "absent": dict(plan.found.absent)}
        reporter.raw(json.dumps(document, indent=2))
        return
    for policy in plan.policies:
        reporter.line("ours", f"weave:{policy}")
    for name, package in here.items():
        reporter.line("rival", f"{name} ({package} {_version(package)})")
    for name, reason in plan.found.absent.items():
        reporter.line("absent", f"{name}: {reason}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _print(reporter: Reporter, plan: Plan, outcome: Outcome, written: list[Path]) -> None:
    reporter.line("machine", _machine(plan, outcome))
    for note in plan.notes:
        reporter.line("note", note)
    for name, version, note in outcome.contestants:
        reporter.line("runs", f"{name} {version}: {note}")
    for name, reason in plan.found.absent.items():
        reporter.line("absent", f"{name}: {reason}")
    skipped = {
        f"{row['contestant']}, {row['preset']}: {row['error']}"
        for row in outcome.rows
        if row["status"] == NOT_RUN
    }
    for line in sorted(skipped):
        reporter.line("not run", line)
    for section in outputs.sections(outcome.rows):
        reporter.blank()
        # As wide as it is: a table cut off at 80 columns has lost its numbers.
        reporter.out.print(outputs.rich_table(section), width=WIDEST, crop=False)
    reporter.blank()
    if not plan.on_gpu:
        reporter.line("times", CPU_EVIDENCE)
    elif any(row.get("timed_as") == "calls" for row in outcome.rows):
        reporter.line("*", "timed call by call, launching included: it cannot be captured")
    for line in _refusals(outcome):
        reporter.line("REFUSED", line, "bold red")
    if outcome.status == 3:
        reporter.line("REFUSED", "no layer could be timed with this package", "bold red")
    for path in written:
        reporter.line("file", str(path))


def _as_json(plan: Plan, outcome: Outcome, options: BenchOptions, written: list[Path]) -> str:
    document = {
        "weave_moe": __version__,
        "result": {0: "reported", 1: "refused", 3: "nothing of ours timed"}[outcome.status],
        "refused": _refusals(outcome),
        "machine": _machine(plan, outcome),
        "evidence": GPU_EVIDENCE if plan.on_gpu else CPU_EVIDENCE,
        "contestants": [
            {"name": name, "version": version, "includes": note}
            for name, version, note in outcome.contestants
        ],
        "absent": dict(plan.found.absent),
        "notes": list(plan.notes),
        "rows": outcome.rows,
        "files": {path.name: str(path) for path in written},
    }
    return json.dumps(document, indent=2, allow_nan=False)
