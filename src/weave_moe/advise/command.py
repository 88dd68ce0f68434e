"""`weave-moe advise`: from options to the advice, printed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from .._version import __version__
from ..presets import Preset
from ..run import sources
from ..run.command import Request, RunOptions, prepare
from ..run.compare import one_torch_thread
from ..run.errors import InputError
from ..run.report import Reporter
from ..simulate import calibration, load_machine
from ..simulate.command import error_line
from .advice import (
    BUSY,
    COMMUNICATION,
    EXPONENTS,
    MATTERS,
    POLICIES,
    Advice,
    Sweep,
    advise,
    end_to_end,
)
from .measured import ratio_errors
from .memory import Memory, ModelSize, size_of_config, size_of_preset

__all__ = ["AdviseOptions", "advise_command"]


@dataclass(frozen=True)
class AdviseOptions:
    """The options of `weave-moe advise`, as the command line has them."""

    preset: str | None = None
    config: Path | None = None
    tokens: int | None = None
    routing: str | None = None
    layer: int | None = None
    share: float | None = None
    communication: float = 0.0
    busy: float | None = None
    now_us: float | None = None
    static: str = "static_strided"
    machine: str = "h200"
    held: int = 0
    gpus: int | None = None
    split: str | None = None
    memory_gb: float | None = None
    seed: int = 0
    as_json: bool = False


def _as_it_is(
    options: RunOptions, layer: Preset, tokens: int
) -> tuple[Preset, str, tuple[str, ...]]:
    """The layer in full size and 16 bits; whether the kernel takes it is part of the advice."""
    notes = list(layer.notes)
    if layer.dtype == "float32":
        notes.append("float32 is not what a GPU serves: bfloat16 taken")
    if layer.shared_intermediate:
        notes.append("the model's shared experts are dense and left out")
    dtype = "bfloat16" if layer.dtype == "float32" else layer.dtype
    return layer, dtype, tuple(notes)


def advise_command(options: AdviseOptions) -> int:
    """Advise and print. Exit status 0, whatever the verdict; InputError for bad input."""
    if options.split is not None and options.gpus is None:
        raise InputError("--split needs --gpus: it says how so many GPUs share a layer")
    reporter = Reporter(quiet=options.as_json)
    with one_torch_thread(), reporter.working(2 + len(POLICIES) + len(EXPONENTS)) as step:
        step("routing")
        request = prepare(
            RunOptions(
                preset=options.preset,
                config=options.config,
                tokens=options.tokens,
                routing=options.routing,
                layer=options.layer,
                seed=options.seed,
            ),
            _as_it_is,
        )
        preset = replace(request.preset, dtype=request.dtype)
        try:
            advice = advise(
                preset,
                request.routed.topk_ids.numpy().astype(np.int64),
                share=options.share,
                communication=options.communication,
                busy=options.busy,
                now_us=options.now_us,
                static=options.static,
                machine=options.machine,
                held=options.held,
                gpus=options.gpus,
                split=options.split,
                memory_gb=options.memory_gb,
                size=_model_size(options, preset),
                seed=options.seed,
                step=step,
            )
        except ValueError as error:
            raise InputError(_option_of(str(error))) from error
    reporter.stop()
    if options.as_json:
        reporter.raw(_as_json(request, advice, options))
    else:
        _print(reporter, request, advice, options)
    return 0


_OPTIONS = {
    **{name: f"--{name}" for name in ("share", "communication", "busy", "static", "machine")},
    **{name: f"--{name}" for name in ("held", "gpus", "split")},
    **{"topk_ids": "--routing", "now_us": "--now", "memory_gb": "--memory"},
}
"""Of the API's arguments, the options that say them."""


def _option_of(message: str) -> str:
    """An error of the API with its argument named as the option, where it is one."""
    name, space, rest = message.partition(" ")
    option = _OPTIONS.get(name, name)
    if name == "topk_ids" and " tokens" in rest:
        option = "--tokens"
    return f"{option}{space}{rest}"


def _model_size(options: AdviseOptions, preset: Preset) -> ModelSize | None:
    if options.config is not None:
        return size_of_config(options.config, preset)
    return size_of_preset(preset)


def _us(value: float) -> str:
    return f"{value:,.1f} us" if value < 1e3 else f"{value / 1e3:,.2f} ms"


def _print(reporter: Reporter, request: Request, advice: Advice, options: AdviseOptions) -> None:
    preset = request.preset
    machine = load_machine(options.machine)
    size = (
        f"H {preset.hidden}, I {preset.intermediate}, {preset.experts} experts, "
        f"top-{preset.top_k}, {request.dtype}"
    )
    reporter.line("layer", f"{preset.title}: {request.routed.tokens} tokens; {size}")
    reporter.line("routing", f"{request.routed.origin}: {sources.load_of(request.routed)}")
    reporter.line("machine", f"{machine.label}; {machine.sms} SMs")
    for note in (*request.notes, *advice.notes):
        reporter.line("note", note)
    if advice.results:
        reporter.blank()
        reporter.out.print(_table(advice))
        policies = [r.policy for r in advice.results]
        error = error_line(machine, request.routed.tokens, policies, options.held)
        reporter.line("error", error)
    if advice.results:
        reporter.blank()
    for cell in advice.cells:
        names = {"steal": "weave-moe", **{name: name for name in cell.ours if name != "steal"}}
        times = [f"{names[name]} {_us(us)}" for name, us in cell.ours.items()]
        times += [f"{name} {_us(us)}" for name, us in cell.others.items()]
        reporter.line("measured", f"{cell}, on {calibration()['gpu']}: {', '.join(times)}")
    if advice.gain is not None and advice.speedup is not None:
        assumed = " (assumed: --share says it)" if advice.assumed else ""
        reporter.line(
            "gain",
            f"layer {advice.speedup:.2f} times as fast as {advice.versus}; the step, of which it "
            f"is {advice.share:.0%}{assumed}, {advice.gain:.3f} times",
        )
    for sweep in advice.sweeps:
        reporter.line("skew", _skew(sweep))
    if advice.memory is not None:
        reporter.line("memory", _memory(advice.memory))
    reporter.blank()
    style = {"use": "bold green", "no": "bold red"}.get(advice.verdict, "bold yellow")
    reporter.line("verdict", f"{advice.words}: {advice.reason}", style)


def _skew(sweep: Sweep) -> str:
    gains = ", ".join(f"{exponent:g}: {gain:.3f}" for exponent, gain in sweep.gains.items())
    found = sweep.break_even
    if sweep.needed is None:
        text = "no speedup of this layer is enough"
    elif found is None:
        text = f"no skew up to {max(sweep.gains):g} is enough ({sweep.needed:.3f} is needed)"
    else:
        text = f"pays from an exponent of {found:g} on ({sweep.needed:.3f} is needed)"
    return (
        f"stealing over {sweep.static}, the same kernel with fixed lists, by Zipf exponent, "
        f"simulated: {gains}; {text}"
    )


def _memory(memory: Memory) -> str:
    count = f"{memory.gpus} GPU{'s' if memory.gpus > 1 else ''} of {memory.gpu_gb:g} GB"
    weights = f"weights {memory.weights_gb:,.0f} GB, of which experts {memory.experts_gb:,.0f}"
    if not memory.fits:
        return f"{weights}: do not fit {count}; {memory.fewest} are needed ({memory.source})"
    left = f"{memory.left_gb:,.1f} GB a GPU left for KV cache"
    if memory.left_tokens is not None:
        left += f", {memory.left_tokens:,} tokens in all"
    fewest = "" if memory.asked else ", the fewest that hold them"
    return f"{weights}; on {count}{fewest}: {left} ({memory.source}; 16-bit weights)"


def _table(advice: Advice) -> Table:
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="bold", title="simulated", title_justify="left"
    )
    times = {r.policy: r.time_us for r in advice.results}
    table.add_column("policy", no_wrap=True)
    for name in ("time", f"over {advice.static}", "busy", "tail gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in advice.results:
        table.add_row(
            r.policy,
            _us(r.time_us),
            f"{times[advice.static] / r.time_us:.2f} x",
            f"{r.busy_share:.1%}",
            _us(r.tail_gap_us),
            style="bold" if r.policy == "steal" else "",
        )
    return table


def _as_json(request: Request, advice: Advice, options: AdviseOptions) -> str:
    machine = load_machine(options.machine)
    times = {r.policy: r.time_us for r in advice.results}
    policies: list[dict[str, Any]] = [
        {
            "policy": r.policy,
            "time_us": r.time_us,
            "floor_us": r.floor_us,
            "over_static": times[advice.static] / r.time_us,
            "busy_share": r.busy_share,
            "tail_gap_us": r.tail_gap_us,
        }
        for r in advice.results
    ]
    errors = ratio_errors()
    document = {
        "weave_moe": __version__,
        "verdict": advice.verdict,
        "words": advice.words,
        "reason": advice.reason,
        "layer": request.preset.title,
        "shape": asdict(request.preset.shape(request.dtype)),
        "tokens": request.routed.tokens,
        "routing": request.routed.origin,
        "load": asdict(sources.load_of(request.routed)),
        "seed": options.seed,
        "machine": asdict(machine),
        "held": options.held,
        "share": advice.share,
        "share_assumed": advice.assumed,
        "communication": advice.communication,
        "busy": advice.busy,
        "against": advice.against or None,
        "versus": advice.versus or None,
        "speedup": advice.speedup,
        "speedup_sure": advice.sure,
        "gain": advice.gain,
        "gain_sure": end_to_end(advice.share, advice.sure) if advice.sure else None,
        "static": advice.static,
        "policies": policies,
        "measured": [asdict(cell) for cell in advice.cells],
        "skew": [
            {
                "static": s.static,
                "gains": {f"{exponent:g}": gain for exponent, gain in s.gains.items()},
                "needed": s.needed,
                "break_even": s.break_even,
            }
            for s in advice.sweeps
        ],
        "memory": None
        if advice.memory is None
        else asdict(advice.memory) | {"fits": advice.memory.fits},
        "error": {
            "time": errors.time,
            "ratio": errors.policies[advice.static],
            "about": error_line(machine, request.routed.tokens, list(times), options.held),
        },
        "limits": {"matters": MATTERS, "communication": COMMUNICATION, "busy": BUSY},
        "notes": [*request.notes, *advice.notes],
    }
    return json.dumps(document, indent=2, allow_nan=False)
