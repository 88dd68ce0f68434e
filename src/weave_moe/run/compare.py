"""One layer's experts under several policies: checked first, then measured and traced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backends import choose
from ..layer import fused_experts
from ..presets import Preset
from ..shapes import DTYPES, POLICIES, Activation, check_experts
from .errors import InputError
from .sources import Load, Routed

if TYPE_CHECKING:
    from ..host.stats import RunStats

__all__ = [
    "ERROR_LIMIT",
    "Comparison",
    "Experts",
    "PolicyRun",
    "build_experts",
    "choose_backend",
    "choose_scale",
    "compare",
    "cores",
    "default_workers",
    "one_torch_thread",
    "parse_policies",
    "row_error",
    "uses_gpu",
]

RUN_POLICIES = tuple(name for name in POLICIES if name != "auto")
ERROR_LIMIT = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
"""Largest relative error of an output row that counts as agreement with the reference."""
CPU_FLOPS = 4.0e9
"""Most floating-point operations a policy in a CPU run."""
CPU_BYTES = 512 << 20
"""Most bytes of expert weights in a CPU run."""
CPU_SLOTS = 1 << 16
"""Most (token, slot) pairs in a CPU run, whatever the layer's size."""
SMALLEST = Fraction(1, 64)
"""Smallest factor that a layer is scaled by unasked."""


@dataclass(frozen=True, eq=False)
class Experts:
    """The tensors of one call of `fused_experts`, in its own words."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    activation: Activation
    b13: Tensor | None = None
    b2: Tensor | None = None
    interleaved: bool = False
    weight_on_input: bool = False

    def options(self) -> dict[str, Any]:
        """The keywords that describe the layer."""
        names = ("activation", "b13", "b2", "interleaved", "weight_on_input")
        return {name: getattr(self, name) for name in names}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The positional arguments."""
        return self.x, self.w13, self.w2, self.topk_weights, self.topk_ids

    def to(self, device: str) -> Experts:
        """The same on another device."""
        tensors: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True, eq=False)
class PolicyRun:
    """One policy's result: error against the reference, and the statistics of a traced launch."""

    policy: str
    error: float
    stats: RunStats | None


@dataclass(frozen=True, eq=False)
class Comparison:
    """All policies on one input.

    backend: the one that ran. workers: of each launch, 0 where the backend has none. limit: largest
    error allowed. equal_bits: every launch of every policy gave the same bits.
    """

    backend: str
    workers: int
    load: Load
    limit: float
    equal_bits: bool
    runs: tuple[PolicyRun, ...]

    @property
    def error(self) -> float:
        """Largest relative error of a row, over policies."""
        return _worst([run.error for run in self.runs])

    @property
    def agrees(self) -> bool:
        """Whether every policy is as close to the reference as the dtype allows, in equal bits."""
        # Written so that a NaN error does not pass.
        return self.equal_bits and all(run.error <= self.limit for run in self.runs)


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """torch on one thread meanwhile: faster at these sizes, far faster where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parse_policies(text: str) -> tuple[str, ...]:
    """Names of `--policy`, each once, in order; `all` is every policy. InputError for another."""
    names: list[str] = []
    for part in text.split(","):
        name = part.strip()
        if name != "all" and name not in POLICIES:
            raise InputError(
                f"--policy must be all or some of {', '.join(POLICIES)} (with commas between); "
                f"got {name!r}"
            )
        names += RUN_POLICIES if name == "all" else [name]
    return tuple(dict.fromkeys(names))


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """Threads of a CPU run: one a core, but at least 4, at most 16.

    Fewer than four leave too little to see in a timeline; on a smaller machine they take turns.
    """
    return min(16, max(4, cores()))


def choose_scale(
    preset: Preset, tokens: int, dtype: str, wanted: str, *, on_gpu: bool
) -> tuple[Fraction, str | None]:
    """The factor for H and I, and a line about it where it is not 1.

    wanted: `auto`, or a fraction such as 1/8 or 0.5. On a CPU a layer must be small, since the
    loops there are plain; `auto` takes the largest of 1, 1/2, 1/4, ... that makes it so. Raises
    InputError for a factor outside (0, 1] and for a layer too large at the factor asked for.
    """
    slots = tokens * preset.top_k
    size = DTYPES[dtype].itemsize

    def few_bytes(factor: Fraction) -> bool:
        return preset.scaled(factor).weight_elements * size <= CPU_BYTES

    def fits(factor: Fraction) -> bool:
        return few_bytes(factor) and preset.scaled(factor).flops(slots) <= CPU_FLOPS

    if not on_gpu and slots > CPU_SLOTS:
        raise InputError(
            f"--tokens {tokens}: {slots} slots are too many for the CPU's plain loops, which take "
            f"{CPU_SLOTS}; try {CPU_SLOTS // preset.top_k} or fewer"
        )
    if wanted != "auto":
        try:
            factor = Fraction(wanted)
        except (ValueError, ZeroDivisionError):
            factor = Fraction(0)
        if not 0 < factor <= 1:
            raise InputError(f"--scale must be auto or above 0 and at most 1, got {wanted!r}")
        asked = True
    else:
        factor, asked = Fraction(1), False
    if not on_gpu and not fits(factor):
        smaller = factor
        while not fits(smaller) and smaller > SMALLEST:
            smaller /= 2
        layer = preset.scaled(factor)
        size_gb = layer.weight_elements * size / 1e9
        work = layer.flops(slots) / 1e9
        if asked or not fits(smaller):
            fewer = "fewer --tokens" if few_bytes(smaller) else "a layer of fewer experts"
            hint = f"--scale {smaller}" if fits(smaller) else fewer
            option = f"--scale {factor}: " if asked else ""
            still = "" if asked else f", at --scale {smaller} still"
            raise InputError(
                f"{option}{preset.name} of {preset.experts:,} experts with {tokens} tokens has "
                f"{size_gb:.2f} GB of weights and {work:.1f} GFLOP a policy, too much for the "
                f"CPU's plain loops ({CPU_BYTES / 1e9:.2f} GB, {CPU_FLOPS / 1e9:g} GFLOP){still}; "
                f"try {hint}"
            )
        factor = smaller
    if factor == 1:
        return factor, None
    layer = preset.scaled(factor)
    return factor, (
        f"scaled by {factor}: H {preset.hidden} -> {layer.hidden}, "
        f"I {preset.intermediate} -> {layer.intermediate}; the number of experts and the routing "
        "are the model's, times are not"
    )


def build_experts(preset: Preset, routed: Routed, dtype: str, seed: int) -> Experts:
    """The call to run: the routing's own tensors where it has them, else random ones.

    Random weights are scaled so that activations and outputs are about 1.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = DTYPES[dtype]

    def normal(*shape: int, scale: float) -> Tensor:
        # One expert at a time, or a large layer's fp32 values would all be in memory at once.
        result = torch.empty(shape, dtype=kind)
        for part in result if len(shape) == 3 else (result,):
            part.copy_(torch.randn(part.shape, generator=generator).mul_(scale))
        return result

    hidden, inner, experts = preset.hidden, preset.intermediate, preset.experts
    x = routed.x
    if x is None:
        x = normal(routed.tokens, hidden, scale=1.0)
    w13, w2 = routed.w13, routed.w2
    if w13 is None or w2 is None:
        w13 = normal(experts, preset.w13_rows, hidden, scale=hidden**-0.5)
        w2 = normal(experts, hidden, inner, scale=2 * inner**-0.5)
    b13 = b2 = None
    if preset.expert_bias:
        b13 = normal(experts, preset.w13_rows, scale=0.2)
        b2 = normal(experts, hidden, scale=0.2)
    return Experts(
        x=x.to(kind),
        w13=w13.to(kind),
        w2=w2.to(kind),
        topk_weights=routed.topk_weights,
        topk_ids=routed.topk_ids,
        activation=preset.activation,
        b13=b13,
        b2=b2,
        interleaved=preset.interleaved,
        weight_on_input=preset.weight_on_input,
    )


def uses_gpu(wanted: str) -> bool:
    """Whether a run with `--backend wanted` goes to a GPU: to any if asked to, else to a Hopper."""
    if wanted not in ("auto", "cuda") or not torch.cuda.is_available():
        return False
    return wanted == "cuda" or torch.cuda.get_device_capability() == (9, 0)


def choose_backend(experts: Experts, wanted: str) -> tuple[str, Experts, str | None]:
    """The backend's name, the call on its device, and a line where `auto` had to make do.

    Raises InputError where the backend asked for cannot run this call here.
    """
    gpu = uses_gpu(wanted)
    if wanted == "cuda" and not gpu:
        raise InputError("--backend cuda cannot run here: torch sees no GPU")
    moved = experts.to("cuda") if gpu else experts
    name = wanted if wanted != "auto" else ("cuda" if gpu else "host")
    call = check_experts(*moved.inputs(), **moved.options())
    try:
        return choose(call, name).name, moved, None
    except ValueError as error:
        if wanted == "auto" and not gpu:
            return "reference", moved, f"{error}; without it there is nothing to compare or draw"
        other = "; --backend host runs it on the CPU" if gpu else ""
        raise InputError(f"--backend {wanted}: {error}{other}") from error


def row_error(result: Tensor, expected: Tensor) -> float:
    """Largest ||y - r|| / ||r|| over rows, NaN if any is; rows with r = 0 must be 0 exactly."""
    y, r = result.double(), expected.double()
    if y.numel() == 0:
        return 0.0
    distance, size = (y - r).norm(dim=1), r.norm(dim=1)
    # max() drops no NaN, unlike Python's.
    error = torch.where(size > 0, distance / size, distance * torch.inf)
    return float(torch.where((size == 0) & (distance == 0), 0.0, error).max())


def compare(
    experts: Experts,
    backend: str,
    policies: tuple[str, ...],
    *,
    load: Load,
    workers: int | None = None,
    step: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Run every policy twice: once checked against the reference, then traced.

    step is told what comes next; it is called 1 + 2 x policies times.
    """
    from ..host.workspace import Workspace

    step("reference")
    expected = fused_experts(*experts.inputs(), **experts.options(), backend="reference")
    dtype = str(experts.x.dtype).removeprefix("torch.")
    if backend == "reference":
        only = PolicyRun("reference", 0.0, None)
        return Comparison(backend, 0, load, ERROR_LIMIT[dtype], True, (only,))
    count = workers or default_workers()
    first: Tensor | None = None
    equal = True
    errors: dict[str, float] = {}
    stats: dict[str, RunStats | None] = {}
    for policy in policies:
        workspace = Workspace(workers=count, trace=True)
        for traced in (False, True):
            step(f"{policy}: {'trace' if traced else 'check'}")
            result = fused_experts(
                *experts.inputs(),
                **experts.options(),
                policy=policy,
                workspace=workspace,
                backend=backend,
            )
            if first is None:
                first = result
            equal = equal and _same_bits(first, result)
            errors[policy] = _worst([errors.get(policy, 0.0), row_error(result, expected)])
        stats[policy] = workspace.last_run
    runs = tuple(PolicyRun(name, errors[name], stats[name]) for name in policies)
    return Comparison(backend, count, load, ERROR_LIMIT[dtype], equal, runs)


def _worst(errors: list[float]) -> float:
    """The largest; NaN if any is, unlike max()."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.view(kind), b.view(kind))
