"""`weave-moe simulate`: from options to a table of simulated policies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from .._version import __version__
from ..backends.cuda import slab_tokens
from ..presets import Preset
from ..run import sources
from ..run.command import Request, RunOptions, prepare
from ..run.compare import one_torch_thread, parse_policies
from ..run.errors import InputError
from ..run.report import Reporter
from ..shapes import LayerShape
from ..tools.choice import choose_plan
from .machine import Machine, calibration_of, load_machine
from .result import Simulated, simulate

__all__ = [
    "SimulateOptions",
    "check_slots",
    "error_line",
    "full_size",
    "machine_of",
    "simulate_command",
]


@dataclass(frozen=True)
class SimulateOptions:
    """The options of `weave-moe simulate`, as the command line has them."""

    preset: str | None = None
    config: Path | None = None
    tokens: int | None = None
    routing: str | None = None
    layer: int | None = None
    policy: str = "all"
    machine: str = "h200"
    held: int = 0
    seed: int = 0
    as_json: bool = False


def full_size(
    options: RunOptions, layer: Preset, tokens: int
) -> tuple[Preset, str, tuple[str, ...]]:
    """The layer as it is: nothing is run, so nothing must fit. 16-bit, as the kernel takes it."""
    dtype = layer.dtype if layer.dtype in ("bfloat16", "float16") else "bfloat16"
    refused = choose_plan(layer, dtype, tokens, None, 1).refused
    if refused is not None:
        raise InputError(
            f"{layer.name}: the GPU kernel does not take this layer ({refused}), so there is no "
            "launch to simulate"
        )
    longest = slab_tokens(layer.shape(dtype))
    if tokens > longest:
        raise InputError(
            f"--tokens must be at most {longest} for {layer.name}, what one launch takes (a longer "
            f"call is several); got {tokens}"
        )
    notes = list(layer.notes)
    if layer.shared_intermediate:
        notes.append("the model's shared experts are dense and left out")
    return layer, dtype, tuple(notes)


def check_slots(request: Request) -> None:
    """InputError where no slot has an expert: then there is nothing to simulate."""
    if not sources.load_of(request.routed).slots:
        raise InputError(
            f"--routing must have a slot with an expert, 0 .. {request.preset.experts - 1}: all "
            "are empty"
        )


def machine_of(name: str, held: int) -> Machine:
    """The machine of --machine, of which --held SMs are held. InputError for what cannot be."""
    try:
        machine = load_machine(name)
    except ValueError as error:
        raise InputError(f"--{error}") from error
    if not 0 <= held < machine.sms:
        raise InputError(f"--held must be 0 .. {machine.sms - 1} SMs of {machine.name}, got {held}")
    return machine


def error_line(
    machine: Machine, tokens: int = 1, policies: Sequence[str] = (), held: int = 0
) -> str:
    """What is known of the error of a simulation, and what of it was never measured."""
    found = calibration_of(machine)
    held_out, others = found["errors"]["held_out"], found["errors"].get("policies")
    measured = list(held_out["ranking"]["policies_measured"])
    stated = (
        f"on launches of {found['gpu']} that it was not fitted to ({', '.join(held_out['models'])}"
        f"; T {held_out['tokens'][0]} to {held_out['tokens'][-1]}; {', '.join(measured)}): median "
        f"{held_out['median']:.1%}, worst {held_out['worst']:.1%}"
    )
    most_held = 0
    if others is not None:
        measured += others["ranking"]["policies_measured"]
        most_held = others["held"][-1]
        stated += (
            f"; of all policies, with up to {most_held} SMs held: median {others['median']:.1%}, "
            f"worst {others['worst']:.1%}"
        )
    outside = [] if machine.verified else [f"machine {machine.name}"]
    if tokens > held_out["tokens"][-1]:
        outside.append(f"{tokens} tokens")
    unknown = [p for p in policies if p not in measured and p != "auto"]
    outside += [", ".join(unknown)] if unknown else []
    outside += [f"{held} held SMs"] if held > most_held else []
    return stated + (f". Not measured, error unknown: {'; '.join(outside)}" if outside else "")


def simulate_command(options: SimulateOptions) -> int:
    """Simulate and print. Exit status 0; InputError for bad input."""
    policies = parse_policies(options.policy)
    machine = machine_of(options.machine, options.held)
    reporter = Reporter(quiet=options.as_json)
    with one_torch_thread(), reporter.working(1 + len(policies)) as step:
        step("routing")
        request = prepare(_run_options(options), full_size)
        check_slots(request)
        shape = request.preset.shape(request.dtype)
        ids = request.routed.topk_ids.numpy().astype(np.int64)
        results = []
        for policy in policies:
            step(policy)
            try:
                results.append(
                    simulate(shape, ids, policy=policy, machine=machine, held=options.held)
                )
            except ValueError as error:
                raise InputError(str(error)) from error
    reporter.stop()
    if options.as_json:
        reporter.raw(_as_json(request, shape, results, options, machine))
    else:
        _print(reporter, request, results, options, machine)
    return 0


def _run_options(options: SimulateOptions) -> RunOptions:
    return RunOptions(
        preset=options.preset,
        config=options.config,
        tokens=options.tokens,
        routing=options.routing,
        layer=options.layer,
        seed=options.seed,
    )


def _microseconds(value: float) -> str:
    return f"{value:,.1f} us" if value < 1e3 else f"{value / 1e3:,.2f} ms"


def _print(
    reporter: Reporter,
    request: Request,
    results: list[Simulated],
    options: SimulateOptions,
    machine: Machine,
) -> None:
    preset = request.preset
    size = (
        f"H {preset.hidden}, I {preset.intermediate}, {preset.experts} experts, "
        f"top-{preset.top_k}, {request.dtype}"
    )
    reporter.line("layer", f"{preset.title}: {request.routed.tokens} tokens; {size}")
    reporter.line("routing", f"{request.routed.origin}: {sources.load_of(request.routed)}")
    held = f", {options.held} of them held by a neighbour" if options.held else ""
    reporter.line("machine", f"{machine.label}; {machine.sms} SMs{held}")
    for note in request.notes:
        reporter.line("note", note)
    reporter.blank()
    reporter.out.print(_table(results))
    reporter.line("", "simulated, nothing was run. time: from launch to launch; read: weights from")
    reporter.line("", "device memory over the least; stages: when gate_up, down and combine end")
    policies = [r.policy for r in results]
    reporter.line("error", error_line(machine, request.routed.tokens, policies, options.held))


def _table(results: list[Simulated]) -> Table:
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="bold", title="simulated", title_justify="left"
    )
    best = min(r.time_us for r in results)
    table.add_column("policy", no_wrap=True)
    for name in ("time", "of floor", "busy", "tail gap", "waits", "stolen", "read"):
        table.add_column(name, justify="right", no_wrap=True)
    scale, digits, unit = (1, ".0f", "us") if best < 1e3 else (1e3, ".2f", "ms")
    table.add_column(f"stages end ({unit})", justify="right", no_wrap=True)
    for r in results:
        ends = " / ".join(f"{last / scale:{digits}}" for _, last in r.stages_us)
        table.add_row(
            r.policy,
            _microseconds(r.time_us),
            f"{r.floor_us / r.time_us:.1%}",
            f"{r.busy_share:.1%}",
            _microseconds(r.tail_gap_us),
            _microseconds(r.dependency_wait_us),
            f"{r.steals:,}",
            f"{r.read_bytes / max(1, r.least_bytes):.2f} x",
            ends,
            style="bold" if r.time_us == best else "",
        )
    return table


def _as_json(
    request: Request,
    shape: LayerShape,
    results: list[Simulated],
    options: SimulateOptions,
    machine: Machine,
) -> str:
    skip = ("machine", "trace", "per_worker")
    policies: list[dict[str, Any]] = []
    for r in results:
        entry = {f.name: getattr(r, f.name) for f in fields(r) if f.name not in skip}
        entry["stages_us"] = {
            name: list(span)
            for name, span in zip(("gate_up", "down", "combine"), r.stages_us, strict=True)
        }
        entry["per_worker"] = [asdict(w) for w in r.per_worker]
        policies.append(entry)
    document = {
        "weave_moe": __version__,
        "simulated": True,
        "machine": asdict(machine),
        "error": {
            "known": machine.verified,
            "about": error_line(
                machine, request.routed.tokens, [r.policy for r in results], options.held
            ),
            **calibration_of(machine)["errors"],
        },
        "layer": request.preset.title,
        "shape": asdict(shape),
        "tokens": request.routed.tokens,
        "routing": request.routed.origin,
        "seed": options.seed,
        "load": asdict(sources.load_of(request.routed)),
        "held": options.held,
        "notes": list(request.notes),
        "policies": policies,
    }
    return json.dumps(document, indent=2, allow_nan=False)
