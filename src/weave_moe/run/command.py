"""`weave-moe run`: from options to a checked comparison, a table and timeline files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .. import presets
from .._version import __version__
from ..host.engine import MAX_EXPERTS
from ..presets import Preset
from ..routing import RoutingConfig
from . import report, sources
from .compare import (
    Comparison,
    build_experts,
    choose_backend,
    choose_scale,
    compare,
    one_torch_thread,
    parse_policies,
    uses_gpu,
)
from .errors import InputError
from .files import check_folder, write_files
from .model import from_text
from .picture import timeline_png
from .report import Reporter
from .sources import Routed, Source
from .timeline import timeline_json

__all__ = ["DEFAULT_TRACE", "RunOptions", "run_command"]

DEFAULT_TRACE = "small-16e-top4"
TIMELINE, PICTURE = "timeline.json", "timeline.png"
FALLBACK_SIZES = (128, 96)
"""H and I for a trace that names none: the shipped model's."""


@dataclass(frozen=True)
class RunOptions:
    """The options of `weave-moe run`, as the command line has them."""

    preset: str | None = None
    config: Path | None = None
    tokens: int | None = None
    routing: str | None = None
    layer: int | None = None
    backend: str = "auto"
    policy: str = "all"
    workers: int | None = None
    dtype: str | None = None
    scale: str = "auto"
    seed: int = 0
    out: Path = Path("weave-run")
    as_json: bool = False


FitLayer = Callable[[RunOptions, Preset, int], tuple[Preset, str, tuple[str, ...]]]
"""From options, a layer and tokens to the layer that runs, its dtype, and lines about it."""


@dataclass(frozen=True, eq=False)
class Request:
    """What to run: a layer, its routing, and lines for people about both."""

    preset: Preset
    routed: Routed
    dtype: str
    notes: tuple[str, ...]


def run_command(options: RunOptions) -> int:
    """Run it. Exit status 0, or 1 if a result is wrong; InputError for bad input."""
    policies = parse_policies(options.policy)
    check_folder(options.out)
    reporter = Reporter(quiet=options.as_json)
    with one_torch_thread(), reporter.working(3 + 2 * len(policies)) as step:
        step("routing")
        request = prepare(options)
        return execute(request, options, policies, reporter, step)


def execute(
    request: Request,
    options: RunOptions,
    policies: tuple[str, ...],
    reporter: Reporter,
    step: report.Step,
) -> int:
    """Compare the policies on a prepared request, print the table, write the files."""
    step("weights")
    experts = build_experts(request.preset, request.routed, request.dtype, options.seed)
    backend, experts, note = choose_backend(experts, options.backend)
    load = sources.load_of(request.routed)
    result = compare(experts, backend, policies, load=load, workers=options.workers, step=step)
    notes = [*request.notes, *([note] if note else [])]
    preset = request.preset
    title = f"{preset.title}: {request.routed.tokens} tokens"
    size = (
        f"H {preset.hidden}, I {preset.intermediate}, {preset.experts} experts, "
        f"top-{preset.top_k}, {request.dtype}"
    )
    about = {
        "weave_moe": __version__,
        "layer": title,
        "size": size,
        "routing": request.routed.origin,
        "backend": result.backend,
        "workers": result.workers,
        "notes": notes,
    }
    if backend != "reference" and all(run.stats is None for run in result.runs):
        notes.append(f"the {backend} backend keeps no statistics: no table, no timeline")
    contents: dict[str, bytes] = {}
    if result.agrees and any(
        r.stats is not None and r.stats.trace is not None for r in result.runs
    ):
        contents[TIMELINE] = timeline_json(result, title, about)
        picture = timeline_png(result, title, f"{size}; {request.routed.origin}")
        if picture is None:
            notes.append("no PNG without matplotlib: pip install 'weave-moe[plot]'")
        else:
            contents[PICTURE] = picture
    written = write_files(options.out, contents) if contents else []
    reporter.stop()
    if options.as_json:
        reporter.raw(_as_json(request, result, options, about, written))
    else:
        reporter.comparison(title, size, request.routed.origin, result, notes, written)
    return 0 if result.agrees else 1


def prepare(options: RunOptions, fit: FitLayer | None = None) -> Request:
    """The layer and the routing that the options name. Raises InputError where they do not fit.

    fit: how the layer is made to fit the machine; `fit_layer` where None.
    """
    fit = fit or fit_layer
    if options.preset is not None and options.config is not None:
        raise InputError("--preset and --config exclude each other")
    chosen = _layer(options)
    text = options.routing or (f"trace:{DEFAULT_TRACE}" if chosen is None else "uniform")
    source = sources.parse_source(text)
    if options.layer is not None and source.kind not in ("trace", "text"):
        raise InputError(f"--layer belongs to a trace or a text, not to --routing {source}")
    if source.kind == "text":
        return _from_text(options, chosen, source, fit)
    if source.kind == "trace":
        routed, meta = sources.from_trace(source.name, options.layer, options.tokens)
        chosen = chosen or _trace_layer(routed, meta, source)
        _check_fit(chosen, routed, source)
        layer, dtype, notes = fit(options, chosen, routed.tokens)
    else:
        tokens = options.tokens or sources.SYNTHETIC_TOKENS
        layer, dtype, notes = fit(options, chosen or presets.shipped_preset(), tokens)
        routed = sources.synthetic(source, layer, tokens, options.seed)
    return Request(layer, routed, dtype, notes)


def fit_layer(
    options: RunOptions, layer: Preset, tokens: int
) -> tuple[Preset, str, tuple[str, ...]]:
    """`layer` scaled down as the options and the machine ask, its dtype, and lines about it."""
    dtype = options.dtype or layer.dtype
    factor, line = choose_scale(
        layer, tokens, dtype, options.scale, on_gpu=uses_gpu(options.backend)
    )
    notes = [*layer.notes, *([line] if line else [])]
    if layer.shared_intermediate:
        notes.append("the model's shared experts are dense and left out")
    return layer.scaled(factor), dtype, tuple(notes)


def _layer(options: RunOptions) -> Preset | None:
    try:
        if options.preset is not None:
            return presets.preset(options.preset)
        if options.config is not None:
            return presets.from_config(options.config)
    except ValueError as error:
        raise InputError(f"--{error}") from error
    return None


def _from_text(
    options: RunOptions, chosen: Preset | None, source: Source, fit: FitLayer
) -> Request:
    if chosen is not None and chosen.name != "shipped":
        raise InputError(
            f"--routing {source} goes through the shipped model, so its layer is the shipped "
            f"model's: leave out --{'preset' if options.preset else 'config'}, or take "
            "--routing trace:, uniform, zipf or hot"
        )
    if options.scale not in ("auto", "1"):
        raise InputError(
            f"--scale {options.scale}: real weights cannot be scaled (routing {source})"
        )
    layer, dtype, notes = fit(
        replace(options, scale="1"), presets.shipped_preset(), options.tokens or 1
    )
    routed = from_text(source.name, options.layer, options.tokens, dtype)
    return Request(layer, routed, dtype, notes)


def _trace_layer(routed: Routed, meta: dict[str, Any], source: Source) -> Preset:
    """The layer that a trace was recorded in, as far as its file tells.

    InputError for more experts than anything but the reference takes: such ids are something else.
    """
    if routed.experts > MAX_EXPERTS:
        raise InputError(
            f"--routing {source} is of {routed.experts:,} experts, as its file says or its largest "
            f"id has it: the GPU kernel takes at most 1,024, the CPU engine {MAX_EXPERTS:,}"
        )
    model = meta.get("model")
    recorded = model if isinstance(model, dict) else {}
    sizes = [recorded.get(key) for key in ("hidden", "intermediate")]
    known = all(isinstance(size, int) and 0 < size <= 1 << 16 for size in sizes)
    hidden, intermediate = sizes if known else FALLBACK_SIZES
    notes = (
        () if known else (f"the trace names no layer sizes: H {hidden}, I {intermediate} taken",)
    )
    return Preset(
        name="trace",
        title=f"layer of trace {Path(source.name).stem}",
        hidden=int(hidden or 0),
        intermediate=int(intermediate or 0),
        experts=routed.experts,
        routing=RoutingConfig(top_k=routed.top_k, renormalize=True),
        notes=(*notes, "random weights and hidden states: the routing alone is recorded"),
    )


def _check_fit(layer: Preset, routed: Routed, source: Source) -> None:
    if (layer.experts, layer.top_k) == (routed.experts, routed.top_k):
        return
    raise InputError(
        f"--routing {source} is of {routed.experts} experts, top-{routed.top_k}, but "
        f"{layer.name} has {layer.experts}, top-{layer.top_k}"
    )


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def _as_json(
    request: Request,
    result: Comparison,
    options: RunOptions,
    about: dict[str, Any],
    written: list[Path],
) -> str:
    shape = asdict(request.preset.shape(request.dtype))
    policies = []
    for run in result.runs:
        entry: dict[str, Any] = {"policy": run.policy, "max_row_error": _number(run.error)}
        if run.stats is not None:
            stats = {field.name: getattr(run.stats, field.name) for field in fields(run.stats)}
            stats.pop("trace", None)
            stats["per_worker"] = [asdict(worker) for worker in run.stats.per_worker]
            entry.update(stats, policy=run.policy)
        policies.append(entry)
    document = {
        **about,
        "shape": shape,
        "tokens": request.routed.tokens,
        "seed": options.seed,
        "load": asdict(result.load),
        "check": {
            "agrees": result.agrees,
            "equal_bits": result.equal_bits,
            "max_row_error": _number(result.error),
            "allowed": result.limit,
        },
        "policies": policies,
        "times": "CPU time, not evidence of speed" if result.backend == "host" else "device time",
        "files": {path.name: str(path) for path in written},
    }
    return json.dumps(document, indent=2, allow_nan=False)
