"""A cell of a benchmark: one layer on so many tokens and one kind of routing.

It has inputs, routings, sets of weights, the right result and the least time, and says of a
contestant whether it is right. A contestant is called as

    y = f(x, ids, weights, logits)

with x [T, H], ids int32 [T, k], weights float32 [T, k] and logits float32 [T, E], whose top-k are
the ids and whose softmax over these are the weights, where these add to 1; None where nobody can
want them. It may have the attributes of `Contestant`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..data import load_trace
from ..presets import Preset
from ..reference import experts_reference
from ..run.errors import InputError
from ..run.sources import Source, synthetic
from ..shapes import Activation, LayerShape, check_experts
from .timing import Row, calls_of, capture

__all__ = [
    "CHECKED_ROWS",
    "LIMITS",
    "WRONG",
    "Cell",
    "Contestant",
    "Layer",
    "Prepared",
    "Rates",
    "Routing",
    "Unsupported",
    "Weights",
    "checked_rows",
    "errors",
    "floor_us",
    "flops_of",
    "least_bytes",
    "logits_of",
    "make_weights",
    "prepare",
    "recorded",
    "routes_for",
    "unit_weights",
    "weight_sets",
]

LIMITS = {"bfloat16": (1e-2, 2e-2), "float16": (2e-3, 5e-3), "float32": (1e-4, 2e-4)}
"""Largest relative error of all checked rows together, and of the worst one by itself."""
CHECKED_ROWS = 256
"""Rows that are compared where there are more than 1,024 tokens."""
WRONG = "wrong result"
ABSENT_LOGIT = -1e4
"""Of an expert that a token does not go to: below every logit that is the log of a weight."""
L2_BYTES = 60e6
"""Of the GPUs that the kernel is for, at most."""
MEMORY_SHARE = 0.25
"""Of the free memory, what several sets of weights may take: rivals make copies of their own."""

Routing = tuple[Tensor | None, Tensor, Tensor]
"""Logits, ids int32, weights fp32."""


class Unsupported(ValueError):
    """A contestant that is here does not take this layer; the message says why."""


class Experts(Protocol):
    """How a contestant is called."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        """The layer's output [T, H]."""
        ...


class Rates(NamedTuple):
    """What the GPU does at best: TB/s read, and TFLOP/s of the layer's dtype."""

    read: float
    matrix: float


@dataclass(frozen=True)
class Layer:
    """The layer that is computed, besides its weights.

    unit_weights: whether each token's weights add to 1.
    skips: whether slots may be empty (an id below 0).
    """

    shape: LayerShape
    activation: Activation = field(default_factory=Activation)
    interleaved: bool = False
    weight_on_input: bool = False
    unit_weights: bool = True
    skips: bool = False

    @staticmethod
    def of(preset: Preset, dtype: str, routes: Sequence[Routing] = ()) -> Layer:
        """The layer of a preset, as it is routed."""
        return Layer(
            preset.shape(dtype),
            preset.activation,
            preset.interleaved,
            preset.weight_on_input,
            all(unit_weights(weights) for _, _, weights in routes),
            any(bool((ids < 0).any()) for _, ids, _ in routes),
        )


@dataclass(frozen=True, eq=False)
class Weights:
    """One set of weights: w13 [E, 2I, H] (or [E, I, H]), w2 [E, H, I], b13, b2 [E, ...] or None."""

    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Contestant:
    """One implementation with one set of weights.

    version: of what it is from.  note: what a call includes.
    activation: by which its result is checked, if not the layer's.
    graphs: whether it can be captured in a CUDA graph; if not, its calls are timed one by one.
    ours: whether it is this package's.
    """

    call: Experts
    version: str = ""
    note: str = ""
    activation: Activation | None = None
    graphs: bool = True
    ours: bool = False

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        """The layer's output [T, H]."""
        return self.call(x, ids, weights, logits)


# --- what a layer needs ------------------------------------------------------------------------


def least_bytes(shape: LayerShape, tokens: int, active: float) -> float:
    """Least bytes read: the active experts' weights, and x, once."""
    return active * shape.expert_bytes + tokens * shape.hidden * shape.element_size


def floor_us(shape: LayerShape, tokens: int, active: float, slots: float, rates: Rates) -> float:
    """No layer takes less: weights and x read and y written, or the arithmetic, at best rates."""
    moved = least_bytes(shape, tokens, active) + tokens * shape.hidden * shape.element_size
    return max(moved / rates.read / 1e6, flops_of(shape, slots) / rates.matrix / 1e6)


def flops_of(shape: LayerShape, slots: float) -> float:
    """Operations of both products for so many slots, without padding."""
    return 2 * slots * shape.hidden * (shape.w13_rows + shape.intermediate)


# --- weights and routings ----------------------------------------------------------------------


def weight_sets(shape: LayerShape, calls: int, free_bytes: float) -> int:
    """Sets of weights that calls take in turn: none may find its weights in the L2 cache.

    Two, or more of a small layer; one where more would crowd out what rivals copy.
    """
    size = shape.experts * shape.expert_bytes
    wanted = max(2, -(-int(3 * L2_BYTES) // size))
    return max(1, min(wanted, calls, int(MEMORY_SHARE * free_bytes / size)))


def make_weights(
    shape: LayerShape, device: torch.device, *, seed: int | None = None, biases: bool = False
) -> Weights:
    """Random weights, scaled so that outputs are about 1. seed None: torch's own state."""
    generator = None
    if seed is not None:
        generator = torch.Generator(device=device)
        generator.manual_seed(seed)
    experts, hidden, inter = shape.experts, shape.hidden, shape.intermediate

    def normal(*size: int, scale: float) -> Tensor:
        return torch.empty(size, device=device, dtype=shape.torch_dtype).normal_(
            0, scale, generator=generator
        )

    return Weights(
        normal(experts, shape.w13_rows, hidden, scale=hidden**-0.5),
        normal(experts, hidden, inter, scale=inter**-0.5),
        normal(experts, shape.w13_rows, scale=0.2) if biases else None,
        normal(experts, hidden, scale=0.2) if biases else None,
    )


def logits_of(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Logits [T, E] with these ids as top-k, and as softmax over them the weights over their sum.

    For implementations that route themselves.
    """
    logits = torch.full((len(ids), experts), ABSENT_LOGIT, device=ids.device)
    return logits.scatter_(1, ids.long(), weights.float().clamp_min(1e-30).log())


def recorded(
    name: str, tokens: int, call: int, device: torch.device, layer: int | None = None
) -> Routing:
    """Routing of a trace: neighbouring tokens, another stretch each call.

    layer: of the trace; None: another one each call. Raises ValueError for more tokens than there
    are, a layer that is not there, or a name or file that `load_trace` refuses.
    """
    trace = load_trace(name)
    if tokens > trace.tokens:
        raise ValueError(f"tokens must be at most {trace.tokens}, those of {name}, got {tokens}")
    if layer is not None and not 0 <= layer < trace.layers:
        raise ValueError(f"layer must be from 0 to {trace.layers - 1} for {name}, got {layer}")
    # Stretches from all over the trace, whatever their length.
    first = (call * 2654435761 >> 7) % (trace.tokens - tokens + 1)
    part = slice(first, first + tokens), call % trace.layers if layer is None else layer
    ids = torch.from_numpy(trace.topk_ids[part]).int().contiguous().to(device)
    return None, ids, torch.from_numpy(trace.topk_weights[part]).float().contiguous().to(device)


def routes_for(
    source: Source,
    preset: Preset,
    tokens: int,
    device: torch.device,
    *,
    calls: int | None = None,
    seed: int = 0,
    layer: int | None = None,
) -> list[Routing]:
    """A routing for each call. Raises InputError where a trace does not fit the layer.

    Logits are given where the weights of all calls add to 1.
    """
    routes: list[Routing] = []
    for call in range(calls_of(tokens) if calls is None else calls):
        if source.kind == "trace":
            try:
                route = recorded(source.name, tokens, call, device, layer)
                fits = load_trace(source.name)
            except ValueError as error:
                raise InputError(f"--routing {source}: {error}") from error
            if (fits.experts, route[1].shape[1]) != (preset.experts, preset.top_k):
                raise InputError(
                    f"--routing {source} is of {fits.experts} experts, top-{route[1].shape[1]}, "
                    f"but {preset.name} has {preset.experts}, top-{preset.top_k}"
                )
        elif source.kind == "text":
            raise InputError(
                f"--routing {source}: a benchmark takes the routing of texts from traces only "
                "(trace:NAME or trace:FILE.npz)"
            )
        else:
            drawn = synthetic(source, preset, tokens, seed + call)
            ids = drawn.topk_ids.int().contiguous().to(device)
            route = None, ids, drawn.topk_weights.float().contiguous().to(device)
        routes.append(route)
    if all(bool((r[1] >= 0).all()) and unit_weights(r[2]) for r in routes):
        return [(logits_of(r[1], r[2], preset.experts), r[1], r[2]) for r in routes]
    return routes


def unit_weights(weights: Tensor) -> bool:
    """Whether each row of weights [T, k] adds to 1."""
    return bool(((weights.sum(dim=1) - 1).abs() < 1e-3).all())


# --- right or wrong ----------------------------------------------------------------------------


def checked_rows(tokens: int) -> Tensor:
    """Tokens whose rows are compared: all, or from 1,025 up evenly spread ones."""
    if tokens <= 1024:
        return torch.arange(tokens)
    return torch.arange(CHECKED_ROWS) * tokens // CHECKED_ROWS


def errors(y: Tensor, truth: Tensor) -> tuple[float, float]:
    """Relative error of all rows together, and of the worst row; NaN counts as infinite.

    A row whose truth is zero must be zero.
    """
    difference = (y.float() - truth).nan_to_num(nan=float("inf"))
    size, off = truth.norm(dim=1), difference.norm(dim=1)
    each = torch.where(size > 0, off / size, torch.where(off > 0, torch.inf, 0.0))
    total = float(truth.norm())
    every = float(difference.norm()) / total if total else float(each.max())
    return every, float(each.max())


class Cell:
    """A layer on so many tokens: inputs, routings, weights, the truth and the floor.

    sets: the weights that calls take in turn.  inputs: x [T, H] of each call.  routes: its routing.
    rates: None where the machine's are not known; then there is no floor.
    active, busiest: experts used, and slots of the busiest one, means over the calls.
    row: what every row of the cell says.
    """

    def __init__(
        self,
        layer: Layer,
        sets: Sequence[Weights],
        inputs: Sequence[Tensor],
        routes: Sequence[Routing],
        rates: Rates | None,
        row: Row | None = None,
    ) -> None:
        self.layer, self.sets = layer, list(sets)
        self.inputs, self.routes = list(inputs), list(routes)
        self.calls, self.tokens = len(self.inputs), len(self.inputs[0])
        self.device = self.inputs[0].device
        used = [ids[(ids >= 0) & (ids < layer.shape.experts)].long() for _, ids, _ in self.routes]
        counts = [torch.bincount(ids, minlength=1) for ids in used]
        self.slots = sum(ids.numel() for ids in used) / self.calls
        self.active = sum(int((count > 0).sum()) for count in counts) / self.calls
        self.busiest = sum(int(count.max()) for count in counts) / self.calls
        self.rates = rates
        self.floor: float | None = None
        if rates is not None:
            self.floor = floor_us(layer.shape, self.tokens, self.active, self.slots, rates)
        self.row: Row = dict(row or {})
        self._truth: dict[Activation, Tensor] = {}

    def truth(self, activation: Activation) -> Tensor:
        """The checked rows of the first call's result, computed and left in fp32."""
        if activation not in self._truth:
            rows = checked_rows(self.tokens).to(self.device)
            _, ids, weights = self.routes[0]
            first = self.sets[0]
            call = check_experts(
                self.inputs[0][rows],
                first.w13,
                first.w2,
                weights[rows],
                ids[rows],
                activation=activation,
                b13=first.b13,
                b2=first.b2,
                interleaved=self.layer.interleaved,
                weight_on_input=self.layer.weight_on_input,
            )
            with torch.no_grad():
                self._truth[activation] = experts_reference(call, rounding=False)
        return self._truth[activation]

    def call(self, functions: Sequence[Callable[..., Any]], i: int) -> Tensor:
        """The i-th call, of the functions one for each weight set."""
        logits, ids, weights = self.routes[i]
        result: Tensor = functions[i % len(functions)](self.inputs[i], ids, weights, logits)
        return result

    def check(self, functions: Sequence[Callable[..., Any]], row: Row) -> bool:
        """Fills in the errors of the first call; whether it is right, by its own activation."""
        own = getattr(functions[0], "activation", None)
        activation = self.layer.activation if own is None else own
        rows = checked_rows(self.tokens).to(self.device)
        every, worst = errors(self.call(functions, 0)[rows], self.truth(activation))
        row["rel_err"], row["max_row_err"] = round(every, 5), round(worst, 5)
        row["rows_checked"] = len(rows)
        row["note"] = getattr(functions[0], "note", "")
        row["version"] = getattr(functions[0], "version", "")
        allowed, allowed_row = LIMITS[self.layer.shape.dtype]
        # Written so that NaN fails. own_activation without an activation: nothing to compare with.
        if every < allowed and worst < allowed_row:
            return True
        if getattr(functions[0], "own_activation", False) and own is None:
            return True
        row["error"] = WRONG
        return False

    def graph(self, functions: Sequence[Callable[..., Any]]) -> Callable[[], Any]:
        """What makes all calls: a graph, or the calls themselves for what cannot be captured."""
        calls = [partial(self.call, functions, i) for i in range(self.calls)]
        if not getattr(functions[0], "graphs", True):
            return lambda: [call() for call in calls]
        return capture(calls, self.device)


class Prepared(NamedTuple):
    """Contestants of a cell.

    rows: one each.  replays: what makes all calls of those that are right.  problems: what the
    others raised; such a row's `error` says it too, and so it does where a result is wrong.
    """

    rows: dict[str, Row]
    replays: dict[str, Callable[[], Any]]
    problems: dict[str, Exception]


def prepare(cell: Cell, contestants: Mapping[str, Any]) -> Prepared:
    """Checks the contestants of a cell and captures those that are right.

    contestants: name -> functions, one for each weight set, or the exception that says why there
    are none.
    """
    found = Prepared({}, {}, {})
    for name, functions in contestants.items():
        row = found.rows[name] = {**cell.row, "contestant": name}
        try:
            if isinstance(functions, Exception):
                raise functions
            with torch.no_grad():
                if cell.check(functions, row):
                    found.replays[name] = cell.graph(functions)
        except Exception as problem:  # a rival that does not run is a row, not the end
            found.problems[name] = problem
            unsupported = isinstance(problem, Unsupported)
            row["error"] = str(problem) if unsupported else repr(problem)[:200]
            if cell.device.type == "cuda":
                torch.cuda.synchronize()
    return found
