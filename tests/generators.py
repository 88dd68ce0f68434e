"""Inputs of every kind for the layer's tests, and the plain loop that their results are held to.

Outputs come out at about 1, so that an absolute error means something (weights are scaled by
1 / sqrt(fan-in)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from weave_moe.shapes import Activation, ExpertsCall, check_experts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2e-5}
"""Error allowed relative to the sum of absolute values that an output element is made of."""

ACTIVATIONS = (
    Activation("silu"),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu2"),
    Activation.parse("swiglu_oai"),
    Activation("silu", limit=10.0),
    Activation("gelu_tanh", limit=0.5, up_offset=0.25),
)

AWKWARD_SIZES = (2880, 2688, 1856, 704, 352, 176, 192, 96)
"""Hidden and intermediate sizes of real models and their tensor-parallel cuts, off powers of 2."""


def generator(seed: int) -> torch.Generator:
    """A torch generator that starts at `seed`."""
    return torch.Generator().manual_seed(seed)


# Routings: (generator, T, E, k) -> int64 [T, k].


def _distinct(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """k experts of each token, distinct as far as there are enough."""
    rounds = -(-top_k // experts)
    parts = [torch.rand(tokens, experts, generator=g).argsort(dim=1) for _ in range(rounds)]
    return torch.cat(parts, dim=1)[:, :top_k]


def _skewed(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Zipf's law: expert e is drawn in proportion to 1 / (e + 1)."""
    share = 1.0 / torch.arange(1, experts + 1)
    return torch.multinomial(share, max(tokens * top_k, 1), replacement=True, generator=g)[
        : tokens * top_k
    ].view(tokens, top_k)


def _empty_edges(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Nothing for the first, the middle and the last expert (where others are left)."""
    left = [e for e in range(experts) if e not in (0, experts // 2, experts - 1)] or [experts - 1]
    return torch.tensor(left)[torch.randint(len(left), (tokens, top_k), generator=g)]


def _holes(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """-1 scattered over the slots, and every third token without any slot."""
    ids = _distinct(g, tokens, experts, top_k)
    ids[torch.rand(tokens, top_k, generator=g) < 0.4] = -1
    ids[::3] = -1
    return ids


def _out_of_range(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Ids on both sides of [0, E), as far out as int32 goes."""
    ids = _distinct(g, tokens, experts, top_k)
    wild = torch.tensor([-1, -2, experts, experts + 1, 2**31 - 1, -(2**31), 65536 + experts])
    mask = torch.rand(tokens, top_k, generator=g) < 0.5
    return torch.where(mask, wild[torch.randint(7, (tokens, top_k), generator=g)], ids)


ROUTINGS: dict[str, Callable[[torch.Generator, int, int, int], Tensor]] = {
    "distinct": _distinct,
    "skewed": _skewed,
    "first": lambda g, t, e, k: torch.zeros(t, k, dtype=torch.int64),
    "last": lambda g, t, e, k: torch.full((t, k), e - 1),
    "one_each": lambda g, t, e, k: (torch.arange(t * k) % e).view(t, k),
    "duplicates": lambda g, t, e, k: torch.randint(e, (t, 1), generator=g).expand(t, k),
    "empty_edges": _empty_edges,
    "holes": _holes,
    "out_of_range": _out_of_range,
    "all_skipped": lambda g, t, e, k: torch.full((t, k), -1),
}
"""Kinds of routing by name."""


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of one call of `fused_experts`: `args` by position, `options` by keyword."""

    args: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    NAMES = ("x", "w13", "w2", "topk_weights", "topk_ids")

    def call(self) -> ExpertsCall:
        """The case as a checked call."""
        return check_experts(*self.args, **self.options)

    def with_(self, **changes: Any) -> Case:
        """The case with some arguments replaced, by name."""
        args = tuple(changes.pop(n, a) for n, a in zip(self.NAMES, self.args, strict=True))
        return Case(args, {**self.options, **changes})

    def __getattr__(self, name: str) -> Any:
        if name in self.NAMES:
            return self.args[self.NAMES.index(name)]
        raise AttributeError(name)

    def __repr__(self) -> str:
        shapes = {n: (tuple(a.shape), a.dtype) for n, a in zip(self.NAMES, self.args, strict=True)}
        return f"Case({shapes}, {self.options})"


def experts_case(
    tokens: int = 5,
    hidden: int = 16,
    intermediate: int = 8,
    experts: int = 4,
    top_k: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
    id_dtype: torch.dtype = torch.int32,
    routing: str = "distinct",
    activation: str | Activation = "silu",
    biases: bool = False,
    interleaved: bool = False,
    weight_on_input: bool = False,
    mapped: bool = False,
    valid: int | None = None,
    residual: bool = False,
    seed: int = 0,
) -> Case:
    """A call with outputs of about 1.

    mapped: the experts are one half of a larger layer's, every other id, by an expert_map.
    valid: num_valid_tokens, or None.
    """
    g = generator(seed)
    act = Activation.parse(activation)
    rows = intermediate * (2 if act.gated else 1)

    def noise(*size: int, fan_in: int = 1) -> Tensor:
        value: Tensor = torch.randn(size, generator=g) / fan_in**0.5
        return value.to(dtype)

    options: dict[str, Any] = {
        "activation": act,
        "interleaved": interleaved,
        "weight_on_input": weight_on_input,
    }
    if biases:
        options["b13"], options["b2"] = noise(experts, rows), noise(experts, hidden)
    if mapped:
        expert_map = torch.full((2 * experts,), -1, dtype=torch.int32)
        expert_map[1::2] = torch.randperm(experts, generator=g).to(torch.int32)
        options["expert_map"] = expert_map
    if valid is not None:
        options["num_valid_tokens"] = torch.tensor(valid, dtype=torch.int32)
    ids = ROUTINGS[routing](g, tokens, experts * (2 if mapped else 1), top_k)
    weights = torch.rand(tokens, top_k, generator=g) + 0.1
    weights = weights / weights.norm(dim=1, keepdim=True)
    args = (
        noise(tokens, hidden),
        noise(experts, rows, hidden, fan_in=hidden),
        # Twice the size, because silu(gate) * up has a root mean square near 1/2.
        2 * noise(experts, hidden, intermediate, fan_in=intermediate),
        weights.to(weight_dtype),
        ids.to(id_dtype),
    )
    if residual:
        options["residual"] = noise(tokens, hidden)
    return Case(args, options)


@st.composite
def experts_cases(draw: st.DrawFn, max_size: int = 33, max_tokens: int = 40) -> Case:
    """Calls of any sizes, types, routing, layout and options."""
    act = draw(st.sampled_from(ACTIVATIONS))
    tokens = draw(st.integers(0, max_tokens))
    return experts_case(
        tokens,
        draw(st.integers(1, max_size)),
        draw(st.integers(1, max_size)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 6)),
        dtype=draw(st.sampled_from(DTYPES)),
        weight_dtype=draw(st.sampled_from(DTYPES)),
        id_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        routing=draw(st.sampled_from(sorted(ROUTINGS))),
        activation=act,
        biases=draw(st.booleans()),
        interleaved=act.gated and draw(st.booleans()),
        weight_on_input=draw(st.booleans()),
        mapped=draw(st.booleans()),
        valid=draw(st.none() | st.integers(-1, tokens + 1)),
        residual=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def _naive_activation(h: Tensor, act: Activation, interleaved: bool) -> Tensor:
    if not act.gated:
        return torch.where(h > 0, h, 0.0) * torch.where(h > 0, h, 0.0)
    half = h.numel() // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, half + i) for i in range(half)]
    gate, up = h[[p[0] for p in pairs]], h[[p[1] for p in pairs]]
    if act.limit is not None:
        gate = torch.where(gate > act.limit, act.limit, gate)
        up = torch.where(up > act.limit, act.limit, torch.where(up < -act.limit, -act.limit, up))
    if act.kind == "silu":
        gate = gate / (1 + torch.exp(-act.alpha * gate))
    elif act.kind == "gelu":
        gate = gate * (1 + torch.erf(gate / 2**0.5)) / 2
    else:
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        gate = gate * (1 + torch.tanh(inner)) / 2
    return gate * (up + act.up_offset)


def naive(case: Case, *, rounding: bool = False) -> tuple[Tensor, Tensor]:
    """The case slot by slot in float64: (y, magnitude), both float64 [T, H].

    Shares no code with the package. rounding: round where `ExpertsCall` says so. magnitude is the
    sum of the absolute values of the products behind each element, and of the residual, which
    errors scale with.
    """
    x, w13, w2, weights, ids = case.args
    options = case.options
    b13, b2, expert_map = (options.get(name) for name in ("b13", "b2", "expert_map"))
    valid = options.get("num_valid_tokens")
    act = Activation.parse(options.get("activation", "silu"))
    dtype = x.dtype

    def rounded(value: Tensor) -> Tensor:
        return value.to(dtype).double() if rounding else value

    y = torch.zeros(x.shape, dtype=torch.float64)
    magnitude = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.size(0)):
        if valid is not None and t >= int(valid):
            continue
        for j in range(ids.size(1)):
            e = int(ids[t, j])
            if expert_map is not None:
                e = int(expert_map[e]) if 0 <= e < expert_map.numel() else -1
            if not 0 <= e < w2.size(0):
                continue
            weight = weights[t, j].double()
            row = x[t].double()
            if options.get("weight_on_input"):
                row, weight = rounded(row * weight), torch.tensor(1.0).double()
            h = w13[e].double() @ row
            if b13 is not None:
                h = h + b13[e].double()
            a = rounded(_naive_activation(h, act, options.get("interleaved", False)))
            out = w2[e].double() @ a
            size = w2[e].double().abs() @ a.abs()
            if b2 is not None:
                out, size = out + b2[e].double(), size + b2[e].double().abs()
            if dtype is torch.bfloat16:
                out = rounded(out)
            y[t] += weight * out
            magnitude[t] += weight.abs() * size
    residual = options.get("residual")
    if residual is not None:
        y, magnitude = y + residual.double(), magnitude + residual.double().abs()
    return rounded(y), magnitude


def assert_close(got: Tensor, case: Case, factor: float = 1.0) -> None:
    """`got` is the case's result in its dtype, each element within rounding of the truth."""
    want, magnitude = naive(case)
    assert got.shape == want.shape
    assert got.dtype == case.x.dtype
    error = (got.double() - want).abs()
    allowed = factor * TOLERANCE[got.dtype] * (magnitude + 0.5)
    # Rows without slots have no magnitude of their own, and must be exactly zero or the residual's.
    alone = case.options.get("residual")
    alone = torch.zeros_like(magnitude) if alone is None else alone.double().abs()
    allowed[(magnitude == alone).all(dim=1)] = 0.0
    bad = ~(error <= allowed)
    assert not bad.any(), (
        f"{int(bad.sum())} of {bad.numel()} elements off, rows {bad.any(dim=1).nonzero().flatten()}"
        f", worst error {error.max()}, {case}"
    )


def assert_rows_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Every row of `got` [T, H] within `tolerance` of `want`, relative to the row's norm."""
    assert got.shape == want.shape
    got, want = got.double(), want.double()
    norm = want.norm(dim=1)
    error = (got - want).norm(dim=1)
    assert bool((error <= tolerance * norm).all()), f"worst row {(error / norm).max()}"


def poisoned(*size: int, dtype: torch.dtype) -> Tensor:
    """A tensor full of NaN (of -999999, for ids)."""
    return torch.full(size, float("nan") if dtype.is_floating_point else -999999, dtype=dtype)


def poison_allocator() -> None:
    """Leaves freed blocks full of NaN behind for the next allocations of many sizes."""
    blocks = [poisoned(2**power, dtype=torch.float32) for power in range(4, 17)]
    blocks += [poisoned(3 * 2**power, dtype=torch.float32) for power in range(4, 16)]
    del blocks


class Guarded:
    """A poisoned tensor between two guard bands, whose `check` finds writes beyond its ends."""

    BAND = 256

    def __init__(self, *size: int, dtype: torch.dtype) -> None:
        count = torch.Size(size).numel()
        self._whole = torch.full((count + 2 * self.BAND,), 1.25, dtype=dtype)
        self.tensor = self._whole[self.BAND : self.BAND + count].view(size)
        self.tensor.fill_(float("nan"))

    def check(self) -> None:
        """Raises AssertionError if a guard band has changed."""
        assert bool((self._whole[: self.BAND] == 1.25).all()), "written before the start"
        assert bool((self._whole[-self.BAND :] == 1.25).all()), "written beyond the end"
