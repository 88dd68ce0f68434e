"""`weave-moe check`: whatever can compute the experts here, held against the reference.

A part is a backend on a device. Each runs a few layers that between them reach one token and many,
every kind of plan and group, all types and options it takes; each layer under every policy, twice,
the second time with other settings of the scheduler. All results of a layer must be equal to the
bit, and as close to the reference as its type allows. Outputs start as NaN, so that a row nobody
wrote is found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..backends import why_not
from ..host.workspace import Workspace
from ..layer import fused_experts
from ..run.compare import ERROR_LIMIT, RUN_POLICIES, one_torch_thread, row_error
from ..shapes import DTYPES, Activation, check_experts
from .machine import Machine, look
from .printing import as_json, line

__all__ = ["BACKENDS", "NOT_RUN", "OK", "WRONG", "Layer", "Outcome", "check_command"]

BACKENDS = ("host", "cuda")
OK, WRONG, NOT_RUN = "ok", "wrong", "not run"
_STATUS = {OK: 0, WRONG: 1, NOT_RUN: 3}

LIMIT_SECONDS = {"host": 28.0, "cuda": 20.0}
"""No layer is begun later than this: the CPU engine's take a second, the GPU's may compile a kernel
first, 4 to 12 s once a machine."""


@dataclass(frozen=True)
class Layer:
    """One layer of the test. skewed: expert e is drawn in proportion to 1 / (e + 1).

    trimmed: some ids are out of range, the experts are half of a larger layer's by an expert map,
    and the last tokens are not valid.
    """

    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: str = "bfloat16"
    activation: str = "silu"
    biases: bool = False
    skewed: bool = False
    trimmed: bool = False
    interleaved: bool = False
    weight_on_input: bool = False

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.tokens} token{'s' if self.tokens != 1 else ''}, H {self.hidden}, "
            f"I {self.intermediate}, {self.experts} experts, top-{self.top_k}, {self.dtype})"
        )


LAYERS = (
    # The second uses the first one's kernel, the fourth the third one's.
    Layer("one token", 1, 256, 128, 16, 4),
    Layer("few tokens", 7, 256, 128, 16, 4, trimmed=True),
    Layer("a batch", 33, 256, 128, 16, 4),
    Layer("uneven, half of the experts elsewhere", 33, 256, 128, 16, 4, skewed=True, trimmed=True),
    Layer(
        "many tokens, clamped, biases",
        *(1100, 136, 72, 16, 4, "float16", "swiglu_oai"),
        biases=True,
        skewed=True,
    ),
)
HOST_LAYERS = (
    *LAYERS,
    Layer("full precision", 65, 96, 40, 9, 3, "float32", "gelu", skewed=True),
    Layer("squared ReLU", 40, 96, 56, 8, 2, "float32", "relu2", trimmed=True),
    Layer("weight on input", 40, 96, 56, 8, 1, weight_on_input=True),
    Layer("interleaved rows", 40, 96, 56, 8, 2, "float16", "gelu_tanh", interleaved=True),
)
"""The CPU engine's: what the kernel does not take as well."""


@dataclass(frozen=True)
class Outcome:
    """What became of one layer on one backend, or of a whole backend that did not run.

    result: `OK`, `WRONG` or `NOT_RUN`.  what: layer or backend.  detail: in words.  error: largest
    relative error of a row, None if not finite.  allowed: the largest one that is right.
    """

    backend: str
    device: str
    what: str
    result: str
    detail: str
    error: float | None = None
    allowed: float | None = None
    equal_bits: bool | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.result.upper() if self.result != OK else OK:9}{self.what}: {self.detail}"


def check_command(backends: tuple[str, ...], *, json_wanted: bool) -> int:
    """Runs the test. Exit status 0; 1 if anything is wrong; 3 if a part could not be run.

    backends: some of `BACKENDS`, the parts to run.
    """
    began = time.monotonic()
    outcomes = []
    with one_torch_thread(), torch.no_grad():
        for outcome in _outcomes(backends, look(), began):
            outcomes.append(outcome)
            if not json_wanted:
                line(outcome.backend, str(outcome))
    results = {outcome.result for outcome in outcomes}
    worst = next(result for result in (WRONG, NOT_RUN, OK) if result in results)
    seconds = time.monotonic() - began
    if json_wanted:
        as_json(
            {
                "result": worst,
                "seconds": round(seconds, 3),
                "outcomes": [asdict(outcome) for outcome in outcomes],
            }
        )
    else:
        count = sum(outcome.result == OK for outcome in outcomes)
        verdict = {
            OK: "all is well",
            WRONG: "SOMETHING IS WRONG: do not trust results from this machine",
            NOT_RUN: "what ran is right, but not all could be run (--backend names a part)"
            if count
            else "nothing could be run, so nothing is known of this machine",
        }[worst]
        line("result", f"{verdict}; {count} of {len(outcomes)} ok in {seconds:.1f} s")
    return _STATUS[worst]


def _outcomes(backends: tuple[str, ...], machine: Machine, began: float) -> Iterator[Outcome]:
    if "host" in backends:
        reason = _host_trouble(machine)
        if reason is not None:
            yield reason
        else:
            yield from _part("host", "cpu", HOST_LAYERS, began + LIMIT_SECONDS["host"])
    if "cuda" in backends:
        devices = [f"cuda:{gpu.index}" for gpu in machine.gpus if gpu.kernel]
        reason = _cuda_trouble(machine)
        if reason is not None:
            yield reason
        else:
            for device in devices:
                yield from _part("cuda", device, LAYERS, began + LIMIT_SECONDS["cuda"])


def _host_trouble(machine: Machine) -> Outcome | None:
    """What keeps the CPU engine from running: without a compiler it cannot; with one it must."""
    began = time.monotonic()
    layer = LAYERS[0]
    reason = why_not("host", check_experts(*_case(layer).tensors, **_case(layer).options))
    if reason is None:
        return None
    result = WRONG if machine.compiler.missing is None else NOT_RUN
    seconds = time.monotonic() - began
    return Outcome("host", "cpu", "CPU engine", result, _one_line(reason), seconds=seconds)


def _cuda_trouble(machine: Machine) -> Outcome | None:
    reason = None
    if not machine.gpus:
        reason = f"no GPU: {machine.no_gpu}"
    elif not any(gpu.kernel for gpu in machine.gpus):
        names = ", ".join(
            f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
            for gpu in machine.gpus
        )
        reason = f"the kernel is built for compute capability 9.0, and here is {names}"
    elif machine.nvrtc.missing is not None:
        reason = machine.nvrtc.missing
    if reason is None:
        return None
    return Outcome("cuda", "cuda", "GPU kernel", NOT_RUN, _one_line(reason))


def _part(
    backend: str, device: str, layers: tuple[Layer, ...], deadline: float
) -> Iterator[Outcome]:
    for layer in layers:
        where = str(layer) if backend == "host" else f"{device} {layer}"
        if time.monotonic() > deadline:
            detail = (
                f"{LIMIT_SECONDS[backend]:.0f} s are over, most of them for compiling; run it "
                "again, now that this is in the cache"
            )
            yield Outcome(backend, device, where, NOT_RUN, detail)
            continue
        began = time.monotonic()
        try:
            outcome = _try(backend, device, layer, where)
        # Whatever a backend raises here, for a call that it takes, is a finding.
        except Exception as error:
            detail = f"{type(error).__name__}: {_one_line(str(error))}"
            outcome = Outcome(backend, device, where, WRONG, detail)
        seconds = round(time.monotonic() - began, 3)
        yield Outcome(**{**asdict(outcome), "seconds": seconds})


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _try(backend: str, device: str, layer: Layer, where: str) -> Outcome:
    case, expected = _case(layer), _expected(layer)
    moved = case.to(device)
    allowed = ERROR_LIMIT[layer.dtype]
    first: Tensor | None = None
    odd: list[str] = []
    errors: dict[str, list[float]] = {policy: [] for policy in RUN_POLICIES}
    for policy in RUN_POLICIES:
        for workspace in _workspaces():
            out = torch.full_like(moved.tensors[0], math.nan)
            fused_experts(
                *moved.tensors,
                **moved.options,
                out=out,
                policy=policy,
                workspace=workspace,
                backend=backend,
            )
            got = out.cpu()
            if device != "cpu":
                _raise_if_failed(device)
            if first is None:
                first = got
            # As bytes, since a NaN is not equal to itself.
            if not torch.equal(got.view(torch.uint8), first.view(torch.uint8)):
                odd.append(policy)
            errors[policy].append(row_error(got, expected))
    # Written so that a NaN is wrong, and the worst error.
    wrong = [p for p, found in errors.items() if not all(error <= allowed for error in found)]
    every = [error for found in errors.values() for error in found]
    worst = math.nan if any(map(math.isnan, every)) else max(every)
    if wrong:
        verdict = f"the result of {_names(wrong)} is wrong"
    elif odd:
        verdict = f"{_names(odd)} gave other bits than the first run"
    else:
        verdict = f"{len(errors)} policies, twice, equal bits"
    return Outcome(
        backend,
        device,
        where,
        WRONG if wrong or odd else OK,
        f"{verdict}; error {worst:.1e}, allowed {allowed:.0e}",
        error=worst if math.isfinite(worst) else None,
        allowed=allowed,
        equal_bits=not odd,
    )


def _names(policies: list[str]) -> str:
    return ", ".join(dict.fromkeys(policies))


def _workspaces() -> tuple[Workspace, Workspace]:
    """Two settings of the scheduler that must not change a bit."""
    return Workspace(workers=4), Workspace(workers=3, victim="random", steal="one")


def _raise_if_failed(device: str) -> None:
    from ..backends.cuda import check

    torch.cuda.synchronize(device)
    check(torch.device(device))


@dataclass(frozen=True, eq=False)
class _Case:
    """The arguments of a layer's call: by position, and by keyword."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any]

    def to(self, device: str) -> _Case:
        x, w13, w2, weights, ids = (tensor.to(device) for tensor in self.tensors)
        options = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        return _Case((x, w13, w2, weights, ids), options)


@cache
def _case(layer: Layer) -> _Case:
    """Random tensors, the same every time, with outputs of about 1."""
    generator = torch.Generator().manual_seed(layer.tokens)
    kind = DTYPES[layer.dtype]

    def noise(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(sizes, generator=generator).mul_(scale).to(kind)

    activation = Activation.parse(layer.activation)
    tokens, hidden, inner, experts = layer.tokens, layer.hidden, layer.intermediate, layer.experts
    rows = 2 * inner if activation.gated else inner
    options: dict[str, Any] = {
        "activation": activation,
        "interleaved": layer.interleaved,
        "weight_on_input": layer.weight_on_input,
    }
    if layer.biases:
        options.update(b13=noise(experts, rows, scale=0.2), b2=noise(experts, hidden, scale=0.2))
    everywhere = experts
    if layer.trimmed:
        everywhere = 2 * experts
        places = torch.full((everywhere,), -1, dtype=torch.int32)
        places[1::2] = torch.arange(experts, dtype=torch.int32).flip(0)
        options.update(
            expert_map=places, num_valid_tokens=torch.tensor(max(1, tokens - 3), dtype=torch.int32)
        )
    share = 1.0 / torch.arange(1, everywhere + 1) if layer.skewed else torch.ones(everywhere)
    ids = torch.multinomial(share.expand(tokens, -1), layer.top_k, generator=generator).int()
    if layer.trimmed:
        ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
        ids[::5, 0] = everywhere
    weights = torch.rand(tokens, layer.top_k, generator=generator) + 0.1
    return _Case(
        (
            noise(tokens, hidden),
            noise(experts, rows, hidden, scale=hidden**-0.5),
            noise(experts, hidden, inner, scale=2 * inner**-0.5),
            weights / weights.norm(dim=1, keepdim=True),
            ids,
        ),
        options,
    )


@cache
def _expected(layer: Layer) -> Tensor:
    case = _case(layer)
    return fused_experts(*case.tensors, **case.options, backend="reference")
