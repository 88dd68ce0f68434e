"""Inputs, the truth and the comparison for tests on a GPU, and what is compiled beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import weave_moe
from weave_moe.reference import experts_reference
from weave_moe.runtime.kernel import KernelConfig
from weave_moe.schedule.granularity import KernelPlan, choose_kernel
from weave_moe.shapes import Activation, LayerShape, check_experts

POLICIES = ("counter", "steal", "static_strided", "static_expert", "static_tail", "window")

TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
"""Error of a row, relative to its norm."""


@dataclass
class Target:
    """Where the tests run."""

    backend: str = "cuda"
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))

    @property
    def on_gpu(self) -> bool:
        return self.backend == "cuda"


TARGET = Target()


def shape(
    hidden: int, intermediate: int, experts: int, top_k: int, dtype: str = "bfloat16"
) -> LayerShape:
    return LayerShape(hidden, intermediate, experts, top_k, dtype)


SMALL = shape(512, 192, 16, 4)
"""Reaches every width and both kinds of plan with few tokens; H and I multiples of 64."""


# Routings: (generator, T, E, k) -> int64 [T, k] on the CPU.


def uniform(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Distinct experts of a token, as far as there are enough."""
    rounds = -(-top_k // experts)
    parts = [torch.rand(tokens, experts, generator=g).argsort(dim=1) for _ in range(rounds)]
    return torch.cat(parts, dim=1)[:, :top_k]


def skewed(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Zipf's law with exponent 1.2, duplicates included."""
    share = torch.arange(1, experts + 1) ** -1.2
    count = max(tokens * top_k, 1)
    ids = torch.multinomial(share, count, replacement=True, generator=g)
    return ids[: tokens * top_k].view(tokens, top_k)


def first(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    return torch.zeros(tokens, top_k, dtype=torch.int64)


def last(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    return torch.full((tokens, top_k), experts - 1)


def one_each(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    return (torch.arange(tokens * top_k) % experts).view(tokens, top_k)


def duplicates(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Every slot of a token the same expert."""
    return torch.randint(experts, (tokens, 1), generator=g).repeat(1, top_k)


def empty_edges(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Nothing for the first, the middle and the last expert."""
    left = [e for e in range(experts) if e not in (0, experts // 2, experts - 1)] or [0]
    return torch.tensor(left)[torch.randint(len(left), (tokens, top_k), generator=g)]


def holes(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Ids out of range scattered over the slots, and every third token without any slot."""
    ids = uniform(g, tokens, experts, top_k)
    wild = torch.tensor([-1, -2, experts, experts + 1, 2**31 - 1, -(2**31), 65536 + experts])
    mask = torch.rand(tokens, top_k, generator=g) < 0.4
    ids = torch.where(mask, wild[torch.randint(7, (tokens, top_k), generator=g)], ids)
    ids[::3] = -1
    return ids


def all_skipped(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    return torch.full((tokens, top_k), -1)


Routing = Callable[[torch.Generator, int, int, int], Tensor]
ROUTINGS: tuple[Routing, ...] = (
    *(uniform, skewed, first, last, one_each, duplicates, empty_edges, holes, all_skipped),
)


_weights: dict[tuple[LayerShape, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}


def weights_of(s: LayerShape, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w13, w2, b13, b2 of a layer whose outputs are about 1; made once, on the target."""
    key = (s, seed)
    if key not in _weights:
        if sum(w[0].numel() for w in _weights.values()) > 1 << 29:
            _weights.clear()
        g = torch.Generator(TARGET.device).manual_seed(seed)

        def noise(*size: int, scale: float = 1.0) -> Tensor:
            value = torch.randn(size, generator=g, device=TARGET.device) * scale
            return value.to(s.torch_dtype)

        _weights[key] = (
            noise(s.experts, s.w13_rows, s.hidden, scale=s.hidden**-0.5),
            # Twice the size, because silu(gate) * up has a root mean square near 1/2.
            noise(s.experts, s.hidden, s.intermediate, scale=2 * s.intermediate**-0.5),
            noise(s.experts, s.w13_rows),
            noise(s.experts, s.hidden),
        )
    return _weights[key]


@dataclass(frozen=True, eq=False)
class Case:
    """One call: `args` by position, `options` by keyword."""

    shape: LayerShape
    args: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.args[0].size(0)

    def with_(self, **changes: Any) -> Case:
        """The case with arguments replaced, by name."""
        names = ("x", "w13", "w2", "weights", "ids")
        args = tuple(changes.pop(n, a) for n, a in zip(names, self.args, strict=True))
        return replace(self, args=args, options={**self.options, **changes})

    def rows(self, chosen: slice | Tensor) -> Case:
        """The case of some of the tokens."""
        x, w13, w2, weights, ids = self.args
        options = dict(self.options)
        if options.get("residual") is not None:
            options["residual"] = options["residual"][chosen]
        return Case(self.shape, (x[chosen], w13, w2, weights[chosen], ids[chosen]), options)

    def run(self, **options: Any) -> Tensor:
        # Queues, unless the test says otherwise: "auto" is one counter in layers as small as these.
        defaults = {"backend": TARGET.backend, "policy": "steal"}
        return weave_moe.fused_experts(*self.args, **defaults | self.options | options)

    def truth(self) -> Tensor:
        """The result in fp32, rounded nowhere."""
        options = {k: v for k, v in self.options.items() if k not in ("out", "workspace", "policy")}
        return experts_reference(check_experts(*self.args, **options), rounding=False)

    def live(self) -> Tensor:
        """[T] whether a token has a slot that is not skipped."""
        from weave_moe.reference import local_experts

        options = {k: v for k, v in self.options.items() if k not in ("out", "workspace", "policy")}
        return (local_experts(check_experts(*self.args, **options)) >= 0).any(dim=1)


def make(
    s: LayerShape,
    tokens: int,
    *,
    routing: Routing = uniform,
    seed: int = 0,
    biases: bool = False,
    residual: bool = False,
    id_dtype: torch.dtype = torch.int32,
    weight_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Case:
    """A call with outputs of about 1."""
    g = torch.Generator().manual_seed(seed + 1000 * tokens)
    w13, w2, b13, b2 = weights_of(s)
    if biases:
        options |= {"b13": b13, "b2": b2}
    x = torch.randn(tokens, s.hidden, generator=g).to(s.torch_dtype)
    weights = torch.rand(tokens, s.top_k, generator=g) + 0.1
    weights = weights / weights.norm(dim=1, keepdim=True)
    mapped = options.get("expert_map")
    experts = s.experts if mapped is None else mapped.numel()
    ids = routing(g, tokens, experts, s.top_k)
    on = TARGET.device
    if residual:
        added = torch.randn(tokens, s.hidden, generator=g).to(s.torch_dtype)
        options |= {"residual": added.to(on)}
    return Case(
        s,
        (x.to(on), w13, w2, weights.to(weight_dtype).to(on), ids.to(id_dtype).to(on)),
        options,
    )


def assert_right(got: Tensor, case: Case) -> None:
    """`got` is finite, close to the truth, and zero or the residual's where no slot contributes."""
    want = case.truth()
    assert got.shape == want.shape
    assert got.dtype == case.args[0].dtype
    if not case.tokens:
        return
    value = got.float()
    finite = torch.isfinite(value).all(dim=1)
    assert bool(finite.all()), f"rows not finite: {_some(~finite)}"
    live = case.live()
    residual = case.options.get("residual")
    idle = torch.zeros_like(value) if residual is None else residual.float()
    other = ~live & (value != idle).any(dim=1)
    assert not bool(other.any()), f"rows without slots are not as they must be: {_some(other)}"
    norm = want.norm(dim=1)
    # Slots of a narrow row may cancel; a wide row's norm is that of its parts.
    if case.shape.hidden < 256:
        norm = norm + 0.3 * case.shape.hidden**0.5
    error = (value - want).norm(dim=1)
    bad = error > TOLERANCE[got.dtype] * norm
    assert not bool(bad.any()), (
        f"{int(bad.sum())} of {len(bad)} rows off: {_some(bad)}; worst relative error "
        f"{float((error / norm.clamp(min=1e-9))[live].max()):.2e}"
    )


def _some(mask: Tensor) -> list[int]:
    rows: list[int] = mask.nonzero().flatten()[:20].tolist()
    return rows


def bits(value: Tensor) -> Tensor:
    """The elements' bits, so that NaN equals NaN and -0 is not 0."""
    kind = {2: torch.int16, 4: torch.int32}[value.element_size()]
    return value.contiguous().view(kind)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def check(case: Case, **options: Any) -> Tensor:
    """Runs a case and holds it to the truth."""
    got = case.run(**options)
    assert_right(got, case)
    return got


class Guarded:
    """A tensor full of NaN within a larger one; `check` finds writes outside it."""

    BAND = 4096  # elements, so that alignment is that of the allocator

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        count = rows * columns
        self._whole = torch.full((count + 2 * self.BAND,), 1.25, dtype=dtype, device=TARGET.device)
        self.tensor = self._whole[self.BAND : self.BAND + count].view(rows, columns)
        self.tensor.fill_(float("nan"))

    def check(self) -> None:
        assert bool((self._whole[: self.BAND] == 1.25).all()), "written before the start"
        assert bool((self._whole[-self.BAND :] == 1.25).all()), "written beyond the end"


def in_parts(patch: pytest.MonkeyPatch, up: int, down: int) -> None:
    """From here on every plan of few tokens has so many K ranges."""
    from weave_moe.backends import cuda

    plan_for = cuda.plan_for

    def divided(*args: Any, **options: Any) -> KernelPlan:
        plan = plan_for(*args, **options)
        return plan if plan.many else replace(plan, parts_up=up, parts_down=down)

    patch.setattr(cuda, "plan_for", divided)


def scratch_tensors() -> Iterable[Tensor]:
    """Every tensor of data that launches outside captures share: no counters, no plans.
    What is tagged may hold anything but the number of a launch that is still to come."""
    from weave_moe.backends import cuda

    for pool in cuda._pools.values():
        for buffers in list(pool._all):
            for name in ("h", "rows", "gathered", "sums", "router", "tagged"):
                tensor = getattr(buffers, name, None)
                if tensor is not None and tensor.numel():
                    yield tensor


def poison_scratch() -> int:
    """Fills the data that launches leave behind with NaN (every byte ones); how many tensors."""
    count = 0
    for tensor in scratch_tensors():
        tensor.fill_(255)
        count += 1
    return count


def configs(
    s: LayerShape,
    tokens: Iterable[int],
    *,
    activation: str | Activation = "silu",
    biases: bool = False,
    weight_on_input: bool = False,
    interleaved: bool = False,
    router: str = "none",
    shared: int = 0,
    parts: int = 1,
) -> set[KernelConfig]:
    """The kernels that calls of these sizes get; interleaved rows have none of their own.

    router: what they route from, of `ROUTERS`.  shared: Is, rows of each half of shared experts.
    parts: K ranges, as `in_parts` makes plans have.
    """
    act = Activation.parse(activation)
    slices = -(-shared // s.intermediate)
    return {
        KernelConfig.of(
            replace(
                choose_kernel(
                    tokens=t,
                    top_k=s.top_k,
                    experts=s.experts,
                    hidden=s.hidden,
                    router=router != "none",
                    shared=slices,
                ),
                parts_up=parts,
                parts_down=parts,
            ),
            dtype=s.dtype,
            activation=act.kind,
            clamp=act.limit is not None,
            bias=biases,
            scale_x=weight_on_input,
            router=router,
            hidden=s.hidden,
            intermediate=s.intermediate,
            shared_intermediate=shared,
        )
        for t in tokens
        if t
    }


_EXPECTED: list[set[KernelConfig]] = []


def expect(s: LayerShape, tokens: Iterable[int], **options: Any) -> None:
    """Declares, when a test file is loaded, what its tests will need compiled."""
    _EXPECTED.append(configs(s, tokens, **options))


_COMPILE = """
import json, sys
from weave_moe.runtime import kernel
from weave_moe.runtime.kernel import KernelConfig

class Nothing:  # compile into the cache; load nothing
    def __init__(self, cubin): pass
    def kernel(self, name, **options): return None

config, sources = json.load(sys.stdin)
if sources is not None:
    kernel.device_sources = lambda: sources
    kernel._source_hash = lambda: kernel.hash_of(sources)
kernel.Library = Nothing
kernel.kernel_for(eval(config), 0)
"""


def compile_all(wanted: Iterable[tuple[KernelConfig, dict[str, str] | None]]) -> None:
    """Compiles kernels into the disk cache, a process a kernel; each with its device code by file
    name, or None for that of the package."""

    def compile_one(one: tuple[KernelConfig, dict[str, str] | None]) -> None:
        config, sources = one
        subprocess.run(
            [sys.executable, "-c", _COMPILE],
            input=json.dumps([repr(config), sources]),
            text=True,
            check=True,
            timeout=300,
        )

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        # Wide kernels take longest.
        list(pool.map(compile_one, sorted(wanted, key=lambda one: -one[0].width_cap)))


def warm_up() -> None:
    """Compiles what all loaded test files expect.

    A kernel that is missing here costs its test a few seconds and nothing else.
    """
    wanted = set().union(*_EXPECTED) if _EXPECTED else set()
    compile_all([(config, None) for config in wanted])
