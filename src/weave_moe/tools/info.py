"""`weave-moe info`: the machine, the backend of a call, and its kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..run.errors import InputError
from .machine import Gpu, Machine, look
from .printing import as_json, line, lines, size

if TYPE_CHECKING:
    from ..presets import Preset
    from .choice import Choice, KernelChoice

__all__ = ["InfoOptions", "info_command"]

DEFAULT_PRESET = "qwen3-30b"
DEFAULT_SMS = 132
"""SMs of an H100 SXM, H200 or GH200."""


@dataclass(frozen=True)
class InfoOptions:
    """The options of `weave-moe info`, as the command line has them."""

    preset: str | None = None
    config: Path | None = None
    tokens: int = 64
    dtype: str | None = None
    sms: int | None = None
    as_json: bool = False


@dataclass(frozen=True, eq=False)
class _Call:
    """A layer, and what would become of a call of it."""

    layer: Preset
    dtype: str
    tokens: int
    backends: tuple[Choice, ...]
    kernel: KernelChoice


def info_command(options: InfoOptions) -> int:
    """Shows it. Exit status 0, whatever is missing; InputError for bad input."""
    if options.preset is not None and options.config is not None:
        raise InputError("--preset and --config exclude each other")
    machine = look()
    call = _call(options, machine) if machine.torch.missing is None else None
    if options.as_json:
        as_json(_document(machine, call))
    else:
        _print_machine(machine)
        if call is not None:
            _print_call(call, machine)
    return 0


def _call(options: InfoOptions, machine: Machine) -> _Call:
    from .choice import choose_backend, choose_plan

    layer = _layer(options)
    dtype = options.dtype or layer.dtype
    gpu = _gpu_for(machine, options.sms)
    sms = gpu.multiprocessors if gpu else options.sms or DEFAULT_SMS
    # One of each model: eight equal GPUs have one answer.
    models: dict[str, str] = {}
    for found in machine.gpus:
        models.setdefault(found.name, f"cuda:{found.index}")
    devices = [*models.values(), "cpu"]
    return _Call(
        layer,
        dtype,
        options.tokens,
        tuple(choose_backend(layer, dtype, device) for device in devices),
        choose_plan(layer, dtype, options.tokens, gpu, sms),
    )


def _layer(options: InfoOptions) -> Preset:
    from ..presets import from_config, preset

    try:
        if options.config is not None:
            return from_config(options.config)
        return preset(options.preset or DEFAULT_PRESET)
    except ValueError as error:
        raise InputError(f"--{error}") from error


def _gpu_for(machine: Machine, sms: int | None) -> Gpu | None:
    """The GPU whose kernel is shown: the first that the kernel runs on, unless SMs are named."""
    return None if sms is not None else next((gpu for gpu in machine.gpus if gpu.kernel), None)


def _document(machine: Machine, call: _Call | None) -> dict[str, Any]:
    document = asdict(machine)
    document["call"] = None
    if call is not None:
        document["call"] = {
            "layer": call.layer.title,
            "shape": asdict(call.layer.shape(call.dtype)),
            "tokens": call.tokens,
            "backends": [asdict(choice) for choice in call.backends],
            "kernel": call.kernel.document(),
        }
    return document


def _print_machine(machine: Machine) -> None:
    line("package", f"weave-moe {machine.package}")
    line("python", str(machine.python))
    line("system", f"{machine.system}, {machine.cores} core{'s' if machine.cores != 1 else ''}")
    built = f", built for CUDA {machine.cuda}" if machine.cuda else ""
    line("torch", f"{machine.torch}{built}")
    for gpu in machine.gpus:
        major, minor = gpu.capability
        shared = f"{gpu.shared_bytes:,}" if gpu.shared_bytes is not None else "unknown"
        line(
            "gpu",
            f"cuda:{gpu.index} {gpu.name}: compute capability {major}.{minor}, "
            f"{gpu.multiprocessors} SMs, {shared} bytes of shared memory a block, "
            f"{size(gpu.memory_bytes)}",
        )
    if not machine.gpus:
        line("gpu", f"none: {machine.no_gpu}")
    line("driver", str(machine.driver))
    line("nvrtc", str(machine.nvrtc))
    line("compiler", str(machine.compiler))
    found = machine.cache
    count = f"{found.entries} entr{'y' if found.entries == 1 else 'ies'}, {size(found.bytes)}"
    if found.missing is not None:
        count = f"cannot be read: {found.missing}"
    elif not found.writable:
        count += "; it cannot be written: compiled code lasts as long as its process"
    line("cache", f"{found.directory}: {count}")


def _print_call(call: _Call, machine: Machine) -> None:
    layer = call.layer
    line("", "")
    line(
        "layer",
        f"{layer.title}: H {layer.hidden}, I {layer.intermediate}, {layer.experts} experts, "
        f"top-{layer.top_k}, {call.dtype}; {call.tokens} token{'s' if call.tokens != 1 else ''}",
    )
    for note in layer.notes:
        line("note", note)
    for number, choice in enumerate(call.backends):
        label = "backend" if number == 0 else ""
        line(label, f"tensors on {choice.device}: {choice.backend}, because {choice.why}")
        if choice.backend == "cuda" and machine.nvrtc.missing is not None:
            line("", f"but the kernel cannot be compiled: {machine.nvrtc.missing}")
    kernel = call.kernel
    if kernel.plan is None or kernel.tasks is None:
        line("kernel", f"none on {kernel.gpu}: {kernel.refused}")
        return
    line("kernel", f"on {kernel.gpu}, {kernel.shared_bytes:,} bytes of shared memory a block:")
    lines("", str(kernel.plan))
    tasks = kernel.tasks
    total = tasks["gate_up"] + tasks["down"] + tasks["combine"]
    many = kernel.plan.many
    combine = "combine in its own launch" if many else f"{tasks['combine']:,} combine"
    line(
        "",
        f"tasks with even routing: {tasks['gate_up']:,} gate_up and {tasks['down']:,} down tiles "
        f"of {tasks['groups']:,} groups, {combine}; {total / kernel.multiprocessors:.1f} an SM",
    )
    if kernel.launches > 1:
        line("", f"{kernel.launches} launches of at most {kernel.launch_tokens:,} tokens")
