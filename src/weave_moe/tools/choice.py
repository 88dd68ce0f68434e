"""Which backend a call would take, and which kernel, found by asking those that decide."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ..backends import NAMES, choose, why_not
from ..backends.cuda import slab_tokens, unsupported
from ..presets import Preset
from ..schedule import plan_groups
from ..schedule.granularity import SHARED_BYTES, KernelPlan, choose_kernel
from ..shapes import ExpertsCall, LayerShape, check_experts
from .machine import Gpu

__all__ = ["Choice", "KernelChoice", "choose_backend", "choose_plan"]


@dataclass(frozen=True)
class Choice:
    """What backend "auto" takes for a call with tensors on `device`.

    why: in words.  refused: why each other backend does not run it, of those that do not.
    """

    device: str
    backend: str
    why: str
    refused: dict[str, str]


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of a call on a Hopper GPU.

    gpu: in words.  refused: why the kernel does not take the call; then there is no plan.
    launches: a call has, of at most launch_tokens tokens each; with `plan.many` each is three
    kernels.  tasks: of one launch, by stage, where every expert has as many tokens as another; no
    combine where that is a kernel of its own.
    """

    gpu: str
    multiprocessors: int
    shared_bytes: int
    refused: str | None
    plan: KernelPlan | None = None
    launches: int = 0
    launch_tokens: int = 0
    tasks: dict[str, int] | None = None

    def document(self) -> dict[str, Any]:
        """As JSON has it: `plan` as fields, with its derived sizes."""
        found = asdict(self)
        if self.plan is not None:
            found["plan"].update(
                threads=self.plan.threads,
                gathers=self.plan.gathers,
                stages={str(width): self.plan.stages(width) for width in (8, self.plan.width_cap)},
            )
        return found


@dataclass(frozen=True, eq=False)
class _Question(ExpertsCall):
    """A call with a layer's sizes on any device, whose tensors are stand-ins of a few bytes.

    Backends decide by sizes, types and options. The weights of a large layer would not fit into
    this machine's memory, and the device may not be here.
    """

    where: torch.device

    @property
    def device(self) -> torch.device:
        return self.where


def _question(layer: Preset, dtype: str, device: str) -> _Question:
    kind = layer.shape(dtype).torch_dtype
    rows = 16 if layer.activation.gated else 8
    call = check_experts(
        torch.zeros(1, 8, dtype=kind),
        torch.zeros(1, rows, 8, dtype=kind),
        torch.zeros(1, 8, 8, dtype=kind),
        torch.ones(1, 1),
        torch.zeros(1, 1, dtype=torch.int32),
        activation=layer.activation,
        interleaved=layer.interleaved,
        weight_on_input=layer.weight_on_input,
    )
    values = {field.name: getattr(call, field.name) for field in fields(call)}
    values["shape"] = layer.shape(dtype)
    return _Question(**values, where=torch.device(device))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without the package's warnings: here the fallback they tell of is the answer."""

    def nothing(record: logging.LogRecord) -> bool:
        return False

    log = logging.getLogger("weave_moe")
    log.addFilter(nothing)
    try:
        yield
    finally:
        log.removeFilter(nothing)


_WHY = {
    "cuda": "the tensors are on a GPU that the kernel is built for, and it takes this call",
    "host": "the tensors are on the CPU, and the CPU engine compiles and loads",
}


def choose_backend(layer: Preset, dtype: str, device: str) -> Choice:
    """The backend for a call of `layer` in `dtype` with its tensors on `device`.

    Asked about the CPU for the first time, the CPU engine is compiled: some seconds.
    """
    call = _question(layer, dtype, device)
    with _silent():
        taken = choose(call).name
    reasons = {name: why_not(name, call) for name in NAMES if name not in ("auto", taken)}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    wanted = "host" if call.device.type == "cpu" else "cuda"
    why = _WHY.get(taken) or f"{wanted} does not run it: {refused.get(wanted, 'unknown')}"
    return Choice(device, taken, why, refused)


def choose_plan(
    layer: Preset, dtype: str, tokens: int, gpu: Gpu | None, multiprocessors: int
) -> KernelChoice:
    """The kernel of a call of `tokens` tokens on `gpu`, or on a Hopper GPU that is not here."""
    shape = layer.shape(dtype)
    if gpu is None:
        named, shared = f"a Hopper GPU of {multiprocessors} SMs", SHARED_BYTES
    else:
        named, shared = f"{gpu.name} (cuda:{gpu.index})", gpu.shared_bytes or SHARED_BYTES
    refused = unsupported(_question(layer, dtype, "cuda"))
    if refused is not None:
        return KernelChoice(named, multiprocessors, shared, refused)
    most = min(tokens, slab_tokens(shape))
    plan = choose_kernel(
        tokens=most,
        top_k=shape.top_k,
        experts=shape.experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        shared_bytes=shared,
    )
    return KernelChoice(
        named,
        multiprocessors,
        shared,
        None,
        plan,
        launches=-(-tokens // most),
        launch_tokens=most,
        tasks=_even_tasks(shape, plan, most),
    )


def _even_tasks(shape: LayerShape, plan: KernelPlan, tokens: int) -> dict[str, int]:
    each, more = divmod(tokens * shape.top_k, shape.experts)
    loads = [each + (expert < more) for expert in range(shape.experts)]
    groups = len(plan_groups(loads, plan.width_cap).groups)
    combine = -(-tokens // plan.combine_tokens) * -(-shape.hidden // plan.slice)
    return {
        "groups": groups,
        "gate_up": groups
        * -(-shape.intermediate // plan.chunk_up(gated=shape.gated))
        * plan.parts_up,
        "down": groups * -(-shape.hidden // plan.chunk_down) * plan.parts_down,
        "combine": 0 if plan.many else combine,
    }
