"""`weave-moe profile`: from options, or a file of records, to a table and a report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from .._version import __version__
from ..run.command import Request, RunOptions, prepare
from ..run.compare import (
    build_experts,
    choose_backend,
    compare,
    cores,
    one_torch_thread,
    parse_policies,
    uses_gpu,
)
from ..run.errors import InputError
from ..run.files import check_folder, write_files
from ..run.report import Reporter, Step, nanoseconds
from ..run.sources import load_of
from ..schedule import StageShape, down_stage, gate_up_stage
from ..shapes import DTYPES
from .chrome import chrome_trace
from .measures import Summary, summarise
from .picture import heat_map
from .producers import from_run, from_simulated, tokens_of_experts
from .records import PRODUCERS, PolicyRecord, Profile, load_profile, save_profile
from .report import html_report

__all__ = ["MOST_TASKS", "ProfileOptions", "profile_command"]

REPORT, TRACE, PICTURE, RECORDS = "profile.html", "profile.json", "profile.png", "profile.npz"
MOST_TASKS = 1_000_000
"""Tasks of all policies together; beyond it neither the report nor the trace would open."""

ON_A_GPU = (
    "of threads of the CPU engine; with a Hopper GPU, --backend cuda records the kernel's own tasks"
)


@dataclass(frozen=True)
class ProfileOptions:
    """The options of `weave-moe profile`, as the command line has them."""

    source: Path | None = None
    preset: str | None = None
    config: Path | None = None
    tokens: int | None = None
    routing: str | None = None
    layer: int | None = None
    backend: str | None = None
    policy: str = "all"
    workers: int | None = None
    dtype: str | None = None
    scale: str | None = None
    simulate: bool = False
    machine: str | None = None
    held: int | None = None
    seed: int | None = None
    out: Path = Path("weave-profile")
    as_json: bool = False


_OF_ANY = ("preset", "config", "tokens", "routing", "layer", "seed")
_OF_CPU = ("backend", "workers", "dtype", "scale")
_OF_SIMULATION = ("machine", "held")


def profile_command(options: ProfileOptions) -> int:
    """Record, or simulate, or read; then report.

    Exit status 0, or 1 if a result is wrong; InputError for bad input.
    """
    _check_options(options)
    policies = None if options.policy == "all" else parse_policies(options.policy)
    check_folder(options.out)
    reporter = Reporter(quiet=options.as_json)
    wanted = policies or parse_policies("all")
    with one_torch_thread(), reporter.working(4 + 2 * len(wanted)) as step:
        check = None
        if options.source is not None:
            step("reading")
            profile = _read(options.source, policies)
        elif options.simulate:
            profile = _simulated(options, wanted, step)
        else:
            engine = _on_gpu if _engine(options) == "cuda" else _recorded
            profile, check = engine(options, wanted, step)
            if not check["agrees"]:
                reporter.stop()
                return _wrong(reporter, profile, check, options)
        if profile.tasks > MOST_TASKS:
            raise InputError(
                f"{profile.tasks:,} tasks are too many for a report, which takes {MOST_TASKS:,}: "
                "fewer --tokens, or fewer policies by --policy"
            )
        step("report")
        summaries = tuple(summarise(profile, run) for run in profile.runs)
        contents, missing = _files(profile, summaries)
        written = write_files(options.out, contents)
    reporter.stop()
    if options.as_json:
        reporter.raw(_as_json(profile, summaries, check, written, missing))
    else:
        _print(reporter, profile, summaries, check, written, missing)
    return 0


def _check_options(options: ProfileOptions) -> None:
    def given(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if getattr(options, name) is not None), None)

    if options.source is not None:
        other = "simulate" if options.simulate else given((*_OF_ANY, *_OF_CPU, *_OF_SIMULATION))
        if other is not None:
            raise InputError(f"--from reads what was recorded before: leave out --{other}")
        return
    if options.simulate:
        other = given(_OF_CPU)
        if other is not None:
            raise InputError(f"--{other} belongs to a run, not to --simulate, which runs nothing")
        return
    other = given(_OF_SIMULATION)
    if other is not None:
        raise InputError(f"--{other} belongs to --simulate")
    if options.backend == "cuda" and options.workers is not None:
        raise InputError("--workers belongs to the CPU engine: a GPU has a worker an SM")


def _engine(options: ProfileOptions) -> str:
    """What records: the kernel where it runs, unless an option is for the CPU engine only."""
    if options.backend is not None:
        return options.backend
    only_cpu = options.workers is not None or options.dtype == "float32"
    return "cuda" if uses_gpu("auto") and not only_cpu else "host"


def _run_options(options: ProfileOptions) -> RunOptions:
    return RunOptions(
        preset=options.preset,
        config=options.config,
        tokens=options.tokens,
        routing=options.routing,
        layer=options.layer,
        backend="host",
        dtype=options.dtype,
        scale=options.scale or "auto",
        seed=options.seed or 0,
    )


def _read(source: Path, policies: tuple[str, ...] | None) -> Profile:
    try:
        profile = load_profile(source)
        return profile.only(policies) if policies else profile
    except ValueError as error:
        raise InputError(f"--from: {error}") from error


def _on_gpu(
    options: ProfileOptions, policies: tuple[str, ...], step: Step
) -> tuple[Profile, dict[str, Any]]:
    from .gpu import gpu_layer, record, the_gpu

    gpu = the_gpu()
    step("routing")
    asked = _run_options(options)
    request = prepare(asked, gpu_layer)
    found = record(request, policies, gpu, seed=asked.seed, step=step)
    gated = request.preset.shape(request.dtype).gated
    notes = [*request.notes, *found.notes]
    profile = _profile("gpu", request, found.machine, found.stages, gated, notes, found.runs)
    return profile, found.check


def _recorded(
    options: ProfileOptions, policies: tuple[str, ...], step: Step
) -> tuple[Profile, dict[str, Any]]:
    step("routing")
    asked = _run_options(options)
    request = prepare(asked)
    step("weights")
    experts = build_experts(request.preset, request.routed, request.dtype, asked.seed)
    _, experts, _ = choose_backend(experts, "host")
    load = load_of(request.routed)
    result = compare(experts, "host", policies, load=load, workers=options.workers, step=step)
    # Under the name that was asked for: "auto" beside "steal" is two runs.
    runs = tuple(
        replace(from_run(run.stats), policy=run.policy)
        for run in result.runs
        if run.stats is not None
    )
    shape = request.preset.shape(request.dtype)
    stages = (
        gate_up_stage(shape.hidden, shape.intermediate, gated=shape.gated),
        down_stage(shape.hidden, shape.intermediate),
    )
    have = cores()
    machine = (
        f"CPU engine: {result.workers} workers, a thread each, on {have} "
        f"core{'s' if have > 1 else ''}"
    )
    notes = [*request.notes, ON_A_GPU]
    if result.workers > have:
        notes.append("threads take turns on the cores: a task is long where its thread waited")
    notes.append("times are CPU time of plain loops, no evidence of speed")
    profile = _profile("cpu", request, machine, stages, shape.gated, notes, runs)
    check = {
        "agrees": result.agrees,
        "equal_bits": result.equal_bits,
        "max_row_error": result.error if np.isfinite(result.error) else None,
        "allowed": result.limit,
    }
    return profile, check


def _simulated(options: ProfileOptions, policies: tuple[str, ...], step: Step) -> Profile:
    from ..simulate import make_workload, simulate
    from ..simulate.command import check_slots, error_line, full_size, machine_of

    held = options.held or 0
    machine = machine_of(options.machine or "h200", held)
    step("routing")
    request = prepare(_run_options(options), full_size)
    check_slots(request)
    shape = request.preset.shape(request.dtype)
    ids = request.routed.topk_ids.numpy().astype(np.int64)
    try:
        work = make_workload(shape, ids, machine.shared_bytes)
        found = []
        for policy in policies:
            step(policy)
            found.append(
                simulate(shape, ids, policy=policy, machine=machine, held=held, trace=True)
            )
    except ValueError as error:
        raise InputError(str(error)) from error
    notes = [
        *request.notes,
        "predicted, nothing was run",
        f"error of simulated times: {error_line(machine, request.routed.tokens, policies, held)}",
        "time in a task includes waiting for its own weights",
    ]
    if work.kernel.many:
        notes.append(
            "sorting with gathering and combine are launches of their own for this many tokens: "
            "the record is of the launch between them"
        )
    label = f"{machine.label}; {machine.sms} SMs" + (f", {held} of them held" if held else "")
    runs = tuple(
        replace(from_simulated(result), policy=policy)
        for policy, result in zip(policies, found, strict=True)
    )
    return _profile("simulated", request, label, work.stages, shape.gated, notes, runs)


def _profile(
    producer: str,
    request: Request,
    machine: str,
    stages: tuple[StageShape, StageShape],
    gated: bool,
    notes: list[str],
    runs: tuple[PolicyRecord, ...],
) -> Profile:
    preset, routed = request.preset, request.routed
    return Profile(
        producer=producer,
        title=f"{preset.title}: {routed.tokens} tokens",
        size=(
            f"H {preset.hidden}, I {preset.intermediate}, {preset.experts} experts, "
            f"top-{preset.top_k}, {request.dtype}"
        ),
        routing=f"{routed.origin}: {load_of(routed)}",
        machine=machine,
        expert_tokens=tokens_of_experts(routed.topk_ids.numpy(), preset.experts),
        stages=stages,
        gated=gated,
        element_size=DTYPES[request.dtype].itemsize,
        notes=tuple(notes),
        runs=runs,
    )


def _files(
    profile: Profile, summaries: tuple[Summary, ...]
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    missing = []
    contents = {RECORDS: save_profile(profile), TRACE: chrome_trace(profile, _about(profile))}
    picture = heat_map(profile, summaries)
    if picture is None:
        missing.append("no PNG without matplotlib: pip install 'weave-moe[plot]'")
    else:
        contents[PICTURE] = picture
    page = html_report(profile, summaries)
    if page is None:
        missing.append("no HTML report without jinja2: pip install 'weave-moe[report]'")
    else:
        contents[REPORT] = page
    return contents, tuple(missing)


def _about(profile: Profile) -> dict[str, Any]:
    return {
        "weave_moe": __version__,
        "size": profile.size,
        "routing": profile.routing,
        "machine": profile.machine,
        "notes": list(profile.notes),
    }


def _wrong(
    reporter: Reporter, profile: Profile, check: dict[str, Any] | None, options: ProfileOptions
) -> int:
    if options.as_json:
        document = {"layer": profile.title, **_about(profile), "check": check}
        reporter.raw(json.dumps(document, indent=2, allow_nan=False))
    else:
        reporter.line("layer", f"{profile.title}; {profile.size}")
        reporter.line("check", "WRONG: a result differs from the reference, or policies differ in")
        reporter.line("", "their bits; nothing written. `weave-moe run` says which", "bold red")
    return 1


def _print(
    reporter: Reporter,
    profile: Profile,
    summaries: tuple[Summary, ...],
    check: dict[str, Any] | None,
    written: list[Path],
    missing: tuple[str, ...],
) -> None:
    reporter.line("layer", f"{profile.title}; {profile.size}")
    reporter.line("routing", profile.routing)
    style = "bold yellow" if profile.predicted else ""
    reporter.line("records", PRODUCERS[profile.producer], style)
    reporter.line("machine", profile.machine)
    absent = [name for name, there in profile.recorded.items() if not there]
    if absent:
        reporter.line("absent", f"{', '.join(absent)}: not recorded there, -1 in the records")
    for note in (*profile.notes, *missing):
        reporter.line("note", note)
    if check is not None:
        reporter.line(
            "check",
            f"largest relative error of a row {check['max_row_error']:.1e}, allowed "
            f"{check['allowed']:.0e}; equal bits in every launch",
            "green",
        )
    reporter.blank()
    reporter.out.print(_table(summaries))
    reporter.line("", "tail: fewer than half of the workers busy; weights: asked for by tasks, and")
    reporter.line("", "read from device memory, over the least (- where that is not known)")
    for s in summaries:
        if s.timing is not None and s.timing["recorded_call_ns"] is not None:
            reporter.line("recording" if s is summaries[0] else "", _cost(s.policy, s.timing))
    reporter.blank()
    labels = {REPORT: "report", TRACE: "trace", PICTURE: "heat map", RECORDS: "records"}
    for path in sorted(written, key=lambda path: list(labels).index(path.name)):
        where = " (open in https://ui.perfetto.dev)" if path.name == TRACE else ""
        reporter.line(labels[path.name], f"{path}{where}")


def _cost(policy: str, timing: dict[str, int | None]) -> str:
    """What recording adds, measured."""
    parts = []
    for name, what in (("launch_ns", "the launch"), ("call_ns", "the whole call")):
        plain, recorded = timing[name], timing[f"recorded_{name}"]
        if plain is not None and recorded is not None:
            more = recorded / max(1, plain) - 1
            parts.append(f"{what} {nanoseconds(plain)}, {more:+.1%} when recorded")
    for name in ("sort", "combine"):
        alone = timing[f"{name}_ns"]
        if alone is not None:
            parts.append(f"{name} {nanoseconds(alone)}")
    return f"{policy}: {'; '.join(parts)}"


def _table(summaries: tuple[Summary, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", collapse_padding=True)
    table.add_column("policy", no_wrap=True)
    for name in ("tasks", "stolen", "busy", "tail gap", "tail", "waits", "makespan", "weights"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in summaries:
        least = max(1, s.least_bytes)
        read = "-" if s.read_bytes is None else f"{s.read_bytes / least:.2f}"
        table.add_row(
            s.policy,
            f"{s.tasks:,}",
            f"{s.steals:,}",
            f"{s.busy_share:.1%}",
            nanoseconds(s.tail_gap_ns),
            nanoseconds(s.tail_ns),
            "-" if s.wait_ns is None else nanoseconds(sum(s.wait_ns)),
            nanoseconds(s.makespan_ns),
            f"{s.asked_bytes / least:.2f} / {read}",
        )
    return table


def _as_json(
    profile: Profile,
    summaries: tuple[Summary, ...],
    check: dict[str, Any] | None,
    written: list[Path],
    missing: tuple[str, ...],
) -> str:
    document = {
        "layer": profile.title,
        **_about(profile),
        "producer": profile.producer,
        "predicted": profile.predicted,
        "recorded": profile.recorded,
        "check": check,
        "expert_tokens": profile.expert_tokens.tolist(),
        "policies": [asdict(summary) for summary in summaries],
        "missing": list(missing),
        "files": {path.name: str(path) for path in written},
    }
    return json.dumps(document, indent=2, allow_nan=False)
