"""Times a whole MoE layer, from hidden states to output: weave-moe beside its rivals, in turn.

    python benchmarks/layer.py --out benchmarks/results/h200-layer.jsonl

Timed as by experts.py (graphs of 8 calls or 4, inputs and weight sets in rotation, contestants in
turn, medians), with routing as a random router weight gives it, or with --skews, for other
exponents than 0, as experts.py draws it: hidden states are chosen so that the router's product with
them gives those logits, and nobody is told more. Contestants get hidden states [T, H] and:

    weave          one call of weave_moe.moe_layer: router, experts and shared experts
    weave:POLICY   the same under a policy
    weave:routed   the same without the shared experts, for layers that have them
    weave:experts  the routed experts alone, from the same ids and weights
    torch, rivals  experts as in experts.py, given their own router and shared experts:
                   - logits by torch.mm of the 16-bit inputs with fp32 accumulation and fp32 output
                     (on a CPU, of fp32 copies), as serving engines compute them;
                   - the rival's fused top-k if it brings one, else torch operators in the fewest
                     steps that give the model's weights (topk, then softmax over the chosen logits,
                     where that is the same as softmax, topk, renormalise);
                   - silu(x W1) * (x W3) W2 by torch, its gate and the sum, on the same stream.

What the router adds to weave:experts is `router_us` of a weave row, what shared experts add is
`shared_us`: medians of differences within a round. `floor_us` counts what the row's contestant has
to read and compute, router and shared experts included.

Rivals come from --rivals FILE.py as for experts.py. Besides, a factory may have the attribute
of_layer(layer, weights) (`weave_moe.bench.cells.Layer` and `Weights`), which is called instead of
it, for layers with biases, interleaved rows or an activation that is not SwiGLU; and what a factory
returns may have topk(logits, routing, selection_bias) -> (weights, ids int32), or None for a router
that it does not have. A rival whose result does not depend on the weights that it is given routes
itself: it gets the logits and is spared the top-k. Where the model's router is no softmax over the
chosen logits, its logits are made of the right ids and weights, and its result is scaled by their
sum.

Correctness comes first, as in experts.py, against `weave_moe.reference.moe_reference` without
rounding. Two experts' logits may lie closer than fp32 sums differ, and then a contestant may choose
the other one: compared are the rows whose ids are the reference's (`rows_checked`), and of all rows
98 % must be such (`ids_agree`).

--padded also times 5 valid tokens of 5, 256 and 2,048 that the call has, in turn: rows with `valid`
besides `T`; their other rows are NaN, and must come out as zeros.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import common
import experts
import torch
import torch.nn.functional as F
from common import Row
from tables.rivals import NOT_ASKED
from torch import Tensor

from weave_moe import Activation, RoutingConfig, SharedExperts, __version__, moe_layer, presets
from weave_moe.bench import cells, contestants
from weave_moe.bench.cells import Layer, Unsupported, Weights
from weave_moe.presets import Preset
from weave_moe.reference import activate, moe_reference, shared_reference
from weave_moe.routing import route, router_logits

MODELS: Mapping[str, Preset] = {
    "qwen3-30b": presets.preset("qwen3-30b"),
    "qwen3-235b": presets.preset("qwen3-235b"),
    "mixtral": presets.preset("mixtral-8x7b"),
    "deepseek-v3": presets.preset("deepseek-v3"),
    "gpt-oss-120b": presets.preset("gpt-oss-120b"),
    "qwen3-next": presets.preset("qwen3-next"),
    "deepseek-v2-lite": presets.preset("deepseek-v2-lite"),
}
TOKENS = (1, 16, 64, 256, 1024, 4096)
VALID, CAPTURED = 5, (5, 256, 2048)
"""Valid tokens of --padded, and the tokens of the calls that have them; the first has no others."""
AGREE = 0.98
"""Least share of tokens whose experts must be the reference's."""
OURS = ("weave", "weave:experts", "weave:routed")
DTYPE = "bfloat16"


# --- the layer ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Whole:
    """One set of weights: experts; router [E, H]; router_bias, selection_bias [E] or None."""

    experts: Weights
    router: Tensor
    router_bias: Tensor | None
    selection_bias: Tensor | None
    shared: SharedExperts | None

    @property
    def of_router(self) -> list[Tensor]:
        found = (self.router, self.router_bias, self.selection_bias)
        return [tensor for tensor in found if tensor is not None]

    @property
    def of_shared(self) -> list[Tensor]:
        if self.shared is None:
            return []
        found = (self.shared.w13, self.shared.w2, self.shared.gate)
        return [tensor for tensor in found if tensor is not None]


def make_whole(preset: Preset, device: torch.device, seed: int) -> Whole:
    """Random weights, scaled so that outputs and router logits are about 1.

    Biases are small enough to leave the routing even.
    """
    g = torch.Generator(device=device)
    g.manual_seed(1000 + seed)
    shape = preset.shape(DTYPE)
    hidden, inter = shape.hidden, preset.shared_intermediate

    def normal(*size: int, scale: float, dtype: torch.dtype = shape.torch_dtype) -> Tensor:
        return torch.empty(size, device=device, dtype=dtype).normal_(0, scale, generator=g)

    shared = None
    if inter:
        shared = SharedExperts(
            normal((2 if shape.gated else 1) * inter, hidden, scale=hidden**-0.5),
            normal(hidden, inter, scale=inter**-0.5),
            normal(hidden, scale=hidden**-0.5) if preset.shared_gated else None,
        )
    return Whole(
        cells.make_weights(shape, device, seed=seed, biases=preset.expert_bias),
        normal(shape.experts, hidden, scale=hidden**-0.5),
        normal(shape.experts, scale=0.1) if preset.router_bias else None,
        # fp32, as models keep it.
        normal(shape.experts, scale=0.02, dtype=torch.float32) if preset.selection_bias else None,
        shared,
    )


def make_sets(preset: Preset, device: torch.device) -> list[Whole]:
    """The sets of weights that calls take in turn; on a CPU two, so that rotation is tested."""
    count = 2
    if device.type == "cuda":
        free = float(torch.cuda.mem_get_info(device)[0])
        count = cells.weight_sets(preset.shape(DTYPE), common.calls_of(1), free)
    return [make_whole(preset, device, seed) for seed in range(count)]


def floor_us(
    preset: Preset, tokens: int, active: float, rates: common.Rates, beside: Sequence[Tensor]
) -> float:
    """No layer takes less: weights and x read and y written, or the arithmetic, at best rates.

    beside: the matrices of router and shared experts, and their biases.
    """
    shape = preset.shape(DTYPE)
    moved = cells.least_bytes(shape, tokens, active) + tokens * shape.hidden * shape.element_size
    moved += sum(tensor.nbytes for tensor in beside)
    flops = cells.flops_of(shape, tokens * shape.top_k)
    flops += sum(2 * tokens * tensor.numel() for tensor in beside if tensor.dim() == 2)
    return max(moved / rates.read / 1e6, flops / rates.matrix / 1e6)


# --- our contestants ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Contestant(cells.Contestant):
    """Ours. choose: x -> ids [T, k]; None: those that it is given.  shared: whether it has them."""

    choose: Callable[[Tensor], Tensor] | None = None
    shared: bool = True


def backend_of(device: torch.device) -> str:
    """No fallback on a GPU: its time would pass for the kernel's."""
    return "cuda" if device.type == "cuda" else "reference"


def ours(
    preset: Preset,
    w: Whole,
    policy: str = "auto",
    *,
    shared: bool = True,
    valid: Tensor | None = None,
) -> Contestant:
    """Our whole layer. valid: the number of valid tokens, on the device."""
    options: dict[str, Any] = {
        "routing": preset.routing,
        "router_weight": w.router,
        "router_bias": w.router_bias,
        "selection_bias": w.selection_bias,
        "shared": w.shared if shared else None,
        "activation": preset.activation,
        "b13": w.experts.b13,
        "b2": w.experts.b2,
        "num_valid_tokens": valid,
        "interleaved": preset.interleaved,
        "weight_on_input": preset.weight_on_input,
        "policy": policy,
        "backend": backend_of(w.router.device),
    }

    def call(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        y: Tensor = moe_layer(x, w.experts.w13, w.experts.w2, **options)
        return y

    def choose(x: Tensor) -> Tensor:
        ids: Tensor = moe_layer(x, w.experts.w13, w.experts.w2, return_routing=True, **options)[2]
        return ids

    note = "hidden states to output" if shared else "without the shared experts"
    return Contestant(call, __version__, note, ours=True, choose=choose, shared=shared)


def experts_alone(preset: Preset, w: Whole) -> Contestant:
    """Our routed experts, from ids."""
    factory = contestants.ours("auto", backend_of(w.router.device))
    made = factory(Layer.of(preset, DTYPE), w.experts)
    return Contestant(made.call, made.version, made.note, ours=True, shared=False)


# --- rivals -------------------------------------------------------------------------------------

SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


def over_the_chosen(routing: RoutingConfig, selection_bias: Tensor | None) -> bool:
    """Whether weights are a softmax over the top-k logits, but for the scale."""
    softmax = routing.scoring == "softmax" and routing.renormalize
    plain = selection_bias is None and routing.num_groups == 1
    return plain and (softmax or routing.scoring == "topk_softmax")


def torch_topk(
    logits: Tensor, routing: RoutingConfig, selection_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights fp32 and ids int32 [T, k], in any order, by as few torch operators as it takes."""
    k = routing.top_k
    if over_the_chosen(routing, selection_bias):
        top, ids = torch.topk(logits, k, sorted=False)
        weights = torch.softmax(top, dim=-1)
    else:
        scores = SCORES[routing.scoring](logits)
        key = scores if selection_bias is None else scores + selection_bias
        if routing.num_groups > 1:
            grouped = key.view(len(key), routing.num_groups, -1)
            if selection_bias is None:
                best = grouped.amax(dim=-1)
            else:
                best = torch.topk(grouped, 2).values.sum(dim=-1)
            kept = torch.topk(best, routing.topk_groups, sorted=False).indices
            dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
            key = grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1)
        weights, ids = torch.topk(key, k, sorted=False)
        if selection_bias is not None:
            weights = scores.gather(1, ids)
        if routing.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
    if routing.scaling_factor != 1:
        weights = weights * routing.scaling_factor
    return weights, ids.int()


class Rival:
    """A rival's experts with one set of weights, given a router and shared experts."""

    def __init__(self, rival: Any, preset: Preset, w: Whole) -> None:
        self.rival, self.preset, self.w = rival, preset, w
        self.version = getattr(rival, "version", "")
        self.activation = getattr(rival, "activation", None)
        self.own_activation = getattr(rival, "own_activation", False)
        self.graphs = getattr(rival, "graphs", True)
        self.routes_itself: bool | None = None  # not known before the first call
        self.own_topk = False

    @property
    def note(self) -> str:
        own = "its own top-k" if self.own_topk else "torch's top-k"
        if self.routes_itself and over_the_chosen(self.preset.routing, self.w.selection_bias):
            own = "its own top-k and weights"
        elif self.routes_itself:
            own += ", and again its own from logits of these"
        texts = [getattr(self.rival, "note", ""), f"logits by torch.mm, {own}"]
        texts += ["shared experts by torch"] if self.w.shared is not None else []
        return "; ".join(text for text in texts if text)

    def logits(self, x: Tensor) -> Tensor:
        """fp32 [T, E]."""
        if x.is_cuda:
            logits: Tensor = torch.mm(x, self.w.router.t(), out_dtype=torch.float32)
        else:  # torch has no such product for CPUs
            logits = x.float() @ self.w.router.float().t()
        return logits if self.w.router_bias is None else logits.add_(self.w.router_bias)

    def topk(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        arguments = logits, self.preset.routing, self.w.selection_bias
        fused = getattr(self.rival, "topk", None)
        found: tuple[Tensor, Tensor] | None = fused(*arguments) if fused else None
        self.own_topk = found is not None
        return torch_topk(*arguments) if found is None else found

    def choose(self, x: Tensor) -> Tensor:
        """ids [T, k]: of a rival that routes itself, those that its logits stand for."""
        return self.topk(self.logits(x))[1]

    def routed(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        if self.routes_itself is None:
            weights, ids = self.topk(logits)
            given = cells.logits_of(ids, weights, logits.shape[1])
            self.routes_itself = bool(self.rival(x, ids, torch.zeros_like(weights), given).any())
        routing = self.preset.routing
        if self.routes_itself and over_the_chosen(routing, self.w.selection_bias):
            # Their shapes are all that it may look at.
            size = len(x), routing.top_k
            ids, weights = x.new_empty(size, dtype=torch.int32), logits.new_empty(size)
            y: Tensor = self.rival(x, ids, weights, logits)
            return y if routing.scaling_factor == 1 else y.mul_(routing.scaling_factor)
        weights, ids = self.topk(logits)
        if self.routes_itself:
            given = cells.logits_of(ids, weights, logits.shape[1])
            y = self.rival(x, ids, weights, given)
            return y.mul_(weights.sum(dim=1, keepdim=True))
        y = self.rival(x, ids, weights, logits)
        return y

    def shared(self, x: Tensor, shared: SharedExperts) -> Tensor:
        h = x @ shared.w13.t()
        if self.preset.activation == Activation():
            gate, up = h.chunk(2, dim=-1)
            a = F.silu(gate) * up
        else:
            a = activate(h, self.preset.activation).to(x.dtype)
        y = a @ shared.w2.t()
        return y if shared.gate is None else torch.sigmoid(x @ shared.gate.view(-1, 1)) * y

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor | None) -> Tensor:
        y = self.routed(x)
        return y if self.w.shared is None else y + self.shared(x, self.w.shared)


def of_weights(factory: experts.Factory) -> contestants.Factory:
    """A factory of a layer from one that takes w13 and w2 alone."""

    def made(layer: Layer, w: Weights) -> Any:
        biases = w.b13 is not None or w.b2 is not None
        plain = layer.activation == Activation() and not layer.interleaved
        if biases or layer.weight_on_input or not plain:
            raise Unsupported(f"{NOT_ASKED}, for a plain SwiGLU layer")
        return factory(w.w13, w.w2)

    return made


def load_rivals(path: str | None) -> dict[str, contestants.Factory]:
    """Factories by name, `torch` first."""
    found = {
        name: getattr(factory, "of_layer", None) or of_weights(factory)
        for name, factory in experts.load_rivals(path).items()
    }
    return found | {"torch": contestants.grouped}


def make(
    name: str, rivals: Mapping[str, contestants.Factory], preset: Preset, sets: Sequence[Whole]
) -> Any:
    """A contestant's functions, one for each weight set, or the exception that making them gave."""

    def one(w: Whole) -> Any:
        family, _, policy = name.partition(":")
        if name == "weave:experts":
            return experts_alone(preset, w)
        if name == "weave:routed":
            return ours(preset, w, shared=False)
        if family == "weave":
            return ours(preset, w, policy or "auto")
        return Rival(rivals[name](Layer.of(preset, DTYPE), w.experts), preset, w)

    try:
        return [one(w) for w in sets]
    except Exception as problem:  # what is installed may be broken in any way
        return problem


# --- cells --------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A model's layer on so many tokens.

    captured: that many in the call, None: no others.  skew: of the experts' popularity, Zipf's
    exponent; 0: as the router's random weight gives it.
    """

    model: str
    tokens: int
    captured: int | None = None
    skew: float = 0.0

    @property
    def rows(self) -> int:
        return self.captured or self.tokens

    def __str__(self) -> str:
        of = "" if self.captured is None else f" of {self.captured}"
        skew = f" skew {self.skew:g}" if self.skew else ""
        return f"{self.model} T={self.tokens}{of}{skew}"


def routed_as_drawn(
    x: Tensor, w: Whole, routing: RoutingConfig, skew: float, g: torch.Generator
) -> Tensor:
    """Hidden states whose router logits are those that `common.route` draws for the skew.

    x, but for what the router sees of it: their parts in the space of its rows are exchanged.
    Logits have the mean 0, or where the scores saturate (sigmoid) the k-th largest is about 0.
    """
    experts, hidden = w.router.shape
    if experts > hidden:
        raise ValueError(f"{experts} experts' logits cannot be chosen by {hidden} numbers a token")
    logits, _, _ = common.route(len(x), experts, routing.top_k, skew, g)
    assert logits is not None
    if routing.scoring in ("softmax", "topk_softmax"):
        logits = logits - logits.mean()
    else:
        logits = logits - torch.topk(logits, routing.top_k).values[:, -1].mean()
    if w.router_bias is not None:
        logits = logits - w.router_bias.float()
    router, states = w.router.float(), x.float()
    # Small, and so exact that only the rounding of x is left.
    inverse = torch.linalg.inv((router @ router.t()).double().cpu()).float().to(x.device)
    return (states + (logits - states @ router.t()) @ inverse @ router).to(x.dtype)


class Cell(cells.Cell):
    """A case on a device: inputs, the reference's routing of them, the truth and the floors."""

    def __init__(
        self, case: Case, sets: Sequence[Whole], rates: common.Rates, device: torch.device
    ) -> None:
        self.case, self.preset, self.wholes = case, MODELS[case.model], list(sets)
        g = torch.Generator(device=device)
        g.manual_seed(case.tokens * 7 + int(case.skew * 10))
        shape = self.preset.shape(DTYPE)
        inputs, routes = [], []
        for i in range(common.calls_of(case.tokens)):
            x = torch.empty(case.rows, shape.hidden, device=device, dtype=shape.torch_dtype)
            # Rows that are no tokens must not be read, or not count: NaN would show.
            x[case.tokens :] = torch.nan
            x[: case.tokens].normal_(generator=g)
            w = sets[i % len(sets)]
            if case.skew:
                x[: case.tokens] = routed_as_drawn(
                    x[: case.tokens], w, self.preset.routing, case.skew, g
                )
            logits = router_logits(x[: case.tokens], w.router, w.router_bias)
            weights, ids = route(logits, self.preset.routing, w.selection_bias)
            inputs.append(x)
            routes.append((logits, ids.contiguous(), weights))
        layer = Layer.of(self.preset, DTYPE)
        super().__init__(layer, [w.experts for w in sets], inputs, routes, rates)
        self.floor = self.floor_of("weave")
        self.row = {"model": case.model, "T": case.rows}
        if case.captured is not None:
            self.row["valid"] = case.tokens
        self.row |= {"skew": case.skew, "active": self.active, "maxload": self.busiest}
        self.row["floor_us"] = round(self.floor, 2)
        self._truths: dict[tuple[Activation, bool], Tensor] = {}

    def floor_of(self, name: str) -> float:
        """Of what a contestant computes."""
        assert self.rates is not None
        w = self.wholes[0]
        beside = [] if name == "weave:experts" else w.of_router
        beside = beside if name in ("weave:experts", "weave:routed") else beside + w.of_shared
        return floor_us(self.preset, self.case.tokens, self.active, self.rates, beside)

    def truth_of(self, activation: Activation, shared: bool) -> Tensor:
        """The checked rows of the first call's result, in fp32.

        activation: of the routed experts; the shared ones have the layer's.
        """
        if (activation, shared) not in self._truths:
            rows = cells.checked_rows(self.case.tokens).to(self.device)
            w, x = self.wholes[0], self.inputs[0][rows]
            logits = self.routes[0][0]
            assert logits is not None
            with torch.no_grad():
                y = moe_reference(
                    x,
                    w.experts.w13,
                    w.experts.w2,
                    routing=self.preset.routing,
                    # Not of these rows alone, whose last bits may be others.
                    router_logits=logits[rows],
                    selection_bias=w.selection_bias,
                    activation=activation,
                    b13=w.experts.b13,
                    b2=w.experts.b2,
                    interleaved=self.preset.interleaved,
                    weight_on_input=self.preset.weight_on_input,
                    rounding=False,
                )
                if shared and w.shared is not None:
                    y = y + shared_reference(
                        x, w.shared, activation=self.preset.activation, rounding=False
                    )
            self._truths[activation, shared] = y
        return self._truths[activation, shared]

    def check(self, functions: Sequence[Callable[..., Any]], row: Row) -> bool:
        """Fills in the errors of the first call; whether it is right, by its own activation."""
        first: Any = functions[0]
        own = getattr(first, "activation", None)
        tokens = self.case.tokens
        y = self.call(functions, 0)
        ids = self.routes[0][1]
        choose = getattr(first, "choose", None)
        chosen = ids if choose is None else choose(self.inputs[0])[:tokens]
        same = (chosen.sort(dim=1).values == ids.sort(dim=1).values).all(dim=1)
        row["ids_agree"] = round(float(same.float().mean()), 4)
        row["note"], row["version"] = first.note, first.version
        if row["ids_agree"] < AGREE:
            row["error"] = f"its experts are the reference's for {row['ids_agree']:.1%} of tokens"
            return False
        if bool((y[tokens:] != 0).any()):
            row["error"] = "rows that are no tokens are not zero"
            return False
        rows = cells.checked_rows(tokens).to(self.device)
        rows, like = rows[same[rows]], same[rows]
        shared = not isinstance(first, Contestant) or first.shared
        truth = self.truth_of(own or self.preset.activation, shared)
        every, worst = cells.errors(y[rows], truth[like])
        row["rel_err"], row["max_row_err"] = round(every, 5), round(worst, 5)
        row["rows_checked"] = len(rows)
        allowed, allowed_row = cells.LIMITS[DTYPE]
        # Written so that NaN fails. own_activation without an activation: nothing to compare with.
        if every < allowed and worst < allowed_row:
            return True
        if getattr(first, "own_activation", False) and own is None:
            return True
        row["error"] = cells.WRONG
        return False


def run_cell(cell: Cell, functions: Mapping[str, Any], seconds: float) -> list[Row]:
    """A row for each contestant: name -> functions, one for each weight set, or why it has none."""
    rows, graphs, _ = cells.prepare(cell, functions)
    times = common.in_turn(graphs, cell.device, seconds)
    us = {name: [each / cell.calls for each in found] for name, found in times.items()}
    for name, found in us.items():
        floor = cell.floor_of(name)
        rows[name]["floor_us"] = round(floor, 2)
        common.timed(rows[name], found, floor)
    if "weave" in us:
        rows["weave"] |= parts_us(us, cell.wholes[0].shared is not None)
    common.check_launches(cell.device)
    return list(rows.values())


def parts_us(us: Mapping[str, Sequence[float]], shared: bool) -> Row:
    """What router and shared experts add, of the pairs that were timed."""
    routed = "weave:routed" if shared else "weave"
    found = {}
    for key, more, less in (
        ("router_us", routed, "weave:experts"),
        ("shared_us", "weave", routed),
    ):
        if more != less and more in us and less in us:
            pairs = zip(us[more], us[less], strict=True)
            found[key] = round(statistics.median(a - b for a, b in pairs), 2)
    return found


def make_padded(preset: Preset, sets: Sequence[Whole], valid: Tensor | None) -> list[Contestant]:
    """Our functions, one for each weight set."""
    return [ours(preset, w, valid=valid) for w in sets]


def run_padded(
    model: str, sets: Sequence[Whole], rates: common.Rates, device: torch.device, seconds: float
) -> list[Row]:
    """A row for each number of tokens in the call, of which VALID are valid; timed in turn.

    over_bare, more_us: the median ratio to, and the median difference from, the call that has no
    other tokens (and is told no number), of the same rounds.
    """
    found: dict[int, Row] = {}
    graphs: dict[str, Callable[[], Any]] = {}
    alive = []  # a graph reads its inputs where they were
    count = torch.tensor([VALID], dtype=torch.int32, device=device)
    for captured in CAPTURED:
        cell = Cell(Case(model, VALID, captured), sets, rates, device)
        alive.append(cell)
        functions = make_padded(cell.preset, sets, None if captured == VALID else count)
        rows, replays, _ = cells.prepare(cell, {"weave": functions})
        found[captured] = rows["weave"]
        graphs |= {str(captured): replay for replay in replays.values()}
    times = common.in_turn(graphs, device, seconds)
    us = {name: [each / common.calls_of(VALID) for each in of] for name, of in times.items()}
    bare = us.get(str(VALID))
    for captured, row in found.items():
        each = us.get(str(captured))
        if each is None:
            continue
        common.timed(row, each, row["floor_us"])
        if bare is not None:
            pairs = list(zip(each, bare, strict=True))
            ratio, spread = common.spread([a / b for a, b in pairs])
            row |= {"over_bare": round(ratio, 4), "spread": round(spread, 4)}
            row["more_us"] = round(statistics.median(a - b for a, b in pairs), 2)
    common.check_launches(device)
    return list(found.values())


# --- the run ------------------------------------------------------------------------------------


class Job(NamedTuple):
    """Contestants of a cell; padded: VALID tokens of each of CAPTURED instead, ours alone."""

    case: Case
    names: list[str]
    padded: bool = False

    def __str__(self) -> str:
        return f"{self.case} of more" if self.padded else str(self.case)

    def cells(self) -> list[Case]:
        if not self.padded:
            return [self.case]
        return [Case(self.case.model, VALID, captured) for captured in CAPTURED]

    def run(
        self,
        sets: Sequence[Whole],
        made: Mapping[str, Any],
        rates: common.Rates,
        device: torch.device,
        seconds: float,
    ) -> list[Row]:
        if self.padded:
            return run_padded(self.case.model, sets, rates, device, seconds)
        cell = Cell(self.case, sets, rates, device)
        return run_cell(cell, {name: made[name] for name in self.names}, seconds)


def missing(case: Case, names: Sequence[str], rows: Sequence[Row], commit: str) -> list[str]:
    """Contestants that have no row of this commit in the cell yet."""
    valid = None if case.captured is None else case.tokens
    done = {
        row["contestant"]
        for row in rows
        if (row["commit"], row["model"], row["T"], row.get("valid"), row["skew"])
        == (commit, case.model, case.rows, valid, case.skew)
    }
    return [name for name in names if name not in done]


def jobs_of(
    model: str,
    sizes: Sequence[tuple[int, float]],
    names: Sequence[str],
    padded: bool,
    rows: Sequence[Row],
    commit: str,
) -> list[Job]:
    """What is still to be done of a model; sizes: numbers of tokens, and skews."""
    if not MODELS[model].shared_intermediate:  # it would be weave again
        names = [name for name in names if name != "weave:routed"]
    jobs = []
    for count, skew in sizes:
        case = Case(model, count, skew=skew)
        wanted = missing(case, names, rows, commit)
        if set(wanted) & set(OURS):  # they are subtracted from each other, round by round
            wanted = [name for name in names if name in wanted or name in OURS]
        if wanted:
            jobs.append(Job(case, wanted))
    every = Job(Case(model, VALID), ["weave"], padded=True)
    if padded and any(missing(case, every.names, rows, commit) for case in every.cells()):
        jobs.append(every)
    return jobs


def show(job: Job, rows: Sequence[Row], elapsed: float) -> None:
    texts = []
    for row in rows:
        name = row["contestant"] + (f" of {row['T']}" if "valid" in row else "")
        if "us" not in row:
            texts.append(f"{name} {row['error'][:90]}")
            continue
        texts.append(f"{name} {row['us']:.1f} ({row['of_floor']:.3f})")
        texts += [
            f"[{key} {row[key]:.2f}]"
            for key in ("router_us", "shared_us", "over_bare", "more_us")
            if key in row
        ]
    print(f"[{elapsed:5.0f} s] {job}: {'  '.join(texts)}", flush=True)


def compile_first(args: argparse.Namespace) -> None:
    """Fills the compilers' caches, a process a model, so that compiling takes its time once."""
    experts.load_once(args)
    experts.compile_each(__file__, args.models)


def compile_only(
    jobs: Sequence[Job], sets: Sequence[Whole], made: Mapping[str, Any], device: torch.device
) -> None:
    """Calls everything once."""
    count = torch.tensor([VALID], dtype=torch.int32, device=device)
    for job in jobs:
        for case in job.cells():
            cell = Cell(case, sets, common.Rates(1.0, 1.0), device)
            functions = [made[name] for name in job.names]
            if job.padded:
                functions = [make_padded(cell.preset, sets, count)]
            for found in functions:
                try:
                    with torch.no_grad():
                        cell.check(found, {})
                except Exception:  # the run itself will say so
                    continue


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help='"" for none')
    parser.add_argument("--skews", default="0", help="Zipf exponents, as 0,1.2")
    parser.add_argument("--padded", action="store_true", help=f"also {VALID} valid tokens of more")
    parser.add_argument("--contestants", help="by default ours, torch and all of --rivals")
    parser.add_argument("--rivals", help="a Python file that defines RIVALS")
    parser.add_argument("--cell-seconds", type=float, default=0.12, help="of replays")
    parser.add_argument("--max-seconds", type=float, help="begin no cell that would end later")
    parser.add_argument("--out", default="layer.jsonl")
    parser.add_argument("--again", action="store_true", help="time cells that have rows already")
    parser.add_argument("--commit", default=None, help="the commit to name, where git is not there")
    parser.add_argument("--compile-first", action="store_true", help="one process a model")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.models = args.models.split(",")
    for model in args.models:
        if model not in MODELS:
            parser.error(f"--models must be some of {', '.join(MODELS)}; got {model!r}")
    args.tokens = [int(count) for count in args.tokens.split(",") if count]
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    clock = common.Clock(args.max_seconds)
    rivals = load_rivals(args.rivals)
    args.contestants = args.contestants or ",".join([*OURS, *rivals])
    if args.compile_first:
        compile_first(args)
        print(f"[{clock.elapsed:5.0f} s] compiled", flush=True)
        clock.passed_over()
    names, skews = args.contestants.split(","), common.skews_of(args)
    if args.compile_only:
        skews = skews[:1]  # other routings run the same code
    sizes = [(count, skew) for count in args.tokens for skew in skews]
    commit = args.commit or common.git_commit()
    out = Path(args.out)
    device = common.the_device()
    rates = experts.rates_of(args, device)
    about = common.about(device, commit, rates)
    present = [] if args.again else common.read_rows(out)
    for model in args.models:
        jobs = jobs_of(model, sizes, names, args.padded, present, commit)
        if not jobs:
            continue
        preset = MODELS[model]
        # Other sets of weights run the same code.
        sets = [make_whole(preset, device, 0)] if args.compile_only else make_sets(preset, device)
        needed = dict.fromkeys(name for job in jobs for name in job.names)
        made = {name: make(name, rivals, preset, sets) for name in needed}
        if args.compile_only:
            compile_only(jobs, sets, made, device)
            continue
        for job in jobs:
            if not clock.room():
                print("out of time: the same command goes on from here", flush=True)
                return 0
            rows = job.run(sets, made, rates, device, args.cell_seconds)
            common.add_rows(out, [row | about for row in rows])
            show(job, rows, clock.elapsed)
        del sets, made
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
