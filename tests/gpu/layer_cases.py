"""Whole layers for tests on a GPU: rows of a table, inputs for them, and what a layer's routing and
its result are held to.

The routing is judged in fp64, by code of its own: `choose` says which experts a token must get and
in which tokens that is certain. Where two experts are closer than fp32 tells them apart, either
order will do; where they are equal, only the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_cases import TARGET, TOLERANCE, bits, compile_all, configs, expect, weights_of
from routing_truth import Choice, choose
from torch import Tensor

import weave_moe
from weave_moe import RoutingConfig, SharedExperts
from weave_moe.reference import experts_reference, local_experts, shared_reference
from weave_moe.shapes import DTYPES, Activation, ExpertsCall, LayerShape, check_experts


@dataclass(frozen=True)
class Layer:
    """A row of a table of layers: sizes, router and options, and the numbers of tokens to try.

    router: the type of router_weight.  logits: router_logits are given instead, in that type.
    router_bias, selection_bias: there is one.  shared: Is, rows of each half of the shared experts;
    0 for none.  shared_gate: scaled by a sigmoid.  biases: of the experts.
    routable: experts that the router chooses from, by way of an expert_map; 0 for no map.
    """

    shape: LayerShape
    routing: RoutingConfig
    tokens: tuple[int, ...]
    router: str = "bfloat16"
    logits: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    activation: str | Activation = "silu"
    biases: bool = False
    interleaved: bool = False
    weight_on_input: bool = False
    residual: bool = False
    routable: int = 0

    @property
    def experts(self) -> int:
        """Experts that the router chooses from."""
        return self.routable or self.shape.experts

    def work(self, tokens: int) -> int:
        """Multiplications of a call and elements of its weights, for what a CPU can do in time."""
        s = self.shape
        row = (s.w13_rows + s.intermediate) * s.hidden
        shared = self.shared * 3 * s.hidden
        return tokens * (s.top_k * row + shared + self.experts * s.hidden) + s.experts * row


CPU_WORK = 400_000_000


def cases_of(
    layers: dict[str, Layer], tokens: Iterable[int] | None = None, *, calls: int = 1
) -> list[tuple[str, int]]:
    """(name, tokens) of every case of a table, or of its rows with other numbers of tokens; on a
    CPU, of those that it can do that many `calls` of in time."""
    return [
        (name, count)
        for name, one in layers.items()
        for count in (one.tokens if tokens is None else tokens)
        if TARGET.on_gpu or one.work(count) * calls <= CPU_WORK
    ]


def layer(
    hidden: int,
    intermediate: int,
    experts: int,
    routing: RoutingConfig,
    tokens: Iterable[int],
    *,
    dtype: str = "bfloat16",
    **options: Any,
) -> Layer:
    """A row, its LayerShape from sizes."""
    gated = Activation.parse(options.get("activation", "silu")).gated
    s = LayerShape(hidden, intermediate, experts, routing.top_k, dtype, gated)
    return Layer(s, routing, tuple(tokens), **options)


def _kernel_options(one: Layer) -> dict[str, Any]:
    """What `configs` must know of a row besides its shape."""
    kind = one.shape.dtype if one.logits else one.router
    # The kernel multiplies by weights of two types; for others torch does, before it.
    router = {"float32": "fp32", one.shape.dtype: "same"}.get(kind, "none")
    if one.logits and not one.shared_gate:
        router = "logits"
    return {
        "activation": one.activation,
        "biases": one.biases,
        "weight_on_input": one.weight_on_input,
        "router": router,
        "shared": 0 if router == "none" else one.shared,
    }


def expect_layers(layers: Iterable[Layer]) -> None:
    """Declares, when a test file is loaded, what the rows will need compiled."""
    for one in layers:
        expect(one.shape, one.tokens, **_kernel_options(one))


def compile_layers(layers: Iterable[Layer]) -> None:
    """Compiles what the rows need now: for a test that seldom runs."""
    needed = (configs(one.shape, one.tokens, **_kernel_options(one)) for one in layers)
    compile_all([(config, None) for config in set().union(*needed)])


_parts: dict[tuple[Any, ...], Any] = {}


def _router_weight(one: Layer, exact: bool) -> Tensor:
    key = ("router", one.shape.hidden, one.experts, one.router, exact)
    if key not in _parts:
        g = torch.Generator(TARGET.device).manual_seed(one.experts)
        value = torch.randn(one.experts, one.shape.hidden, generator=g, device=TARGET.device)
        _parts[key] = _scaled(value, 1.5, exact).to(DTYPES[one.router])
    weight: Tensor = _parts[key]
    return weight


def _shared_experts(one: Layer, exact: bool) -> SharedExperts:
    s = one.shape
    key = ("shared", s.hidden, one.shared, one.shared_gate, one.router, s.gated, s.dtype, exact)
    if key not in _parts:
        g = torch.Generator(TARGET.device).manual_seed(one.shared)

        def noise(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=g, device=TARGET.device)

        w13 = noise(one.shared * (2 if s.gated else 1), s.hidden) * s.hidden**-0.5
        w2 = noise(s.hidden, one.shared) * 2 * one.shared**-0.5
        # Of the router's type, as the kernel wants it.
        kind = s.dtype if one.logits else one.router
        gate = _scaled(noise(1, s.hidden), 1.0, exact).to(DTYPES[kind])
        _parts[key] = SharedExperts(
            w13.to(s.torch_dtype), w2.to(s.torch_dtype), gate if one.shared_gate else None
        )
    shared: SharedExperts = _parts[key]
    return shared


def _scaled(value: Tensor, size: float, exact: bool) -> Tensor:
    """`value` [rows, H] at `size` / sqrt(H); if `exact` few bits each, so that sums of its products
    with numbers of few bits are exact in fp32, in any order."""
    step = size * value.size(1) ** -0.5
    if not exact:
        return value * step
    return (2 * value).round() * 2.0 ** round(math.log2(step / 2))


def an_expert_map(routable: int, experts: int) -> Tensor:
    """Every other global expert is a local one, in any order, the rest are none (said in several
    ways)."""
    g = torch.Generator().manual_seed(routable)
    found = torch.full((routable,), -1, dtype=torch.int32)
    found[1::2][:experts] = torch.randperm(experts, generator=g).to(torch.int32)
    found[0::6] = experts
    found[2::6] = -7
    return found.to(TARGET.device)


@dataclass(frozen=True, eq=False)
class LayerCase:
    """One call of `moe_layer`: x, w13, w2 by position, `options` by keyword."""

    layer: Layer
    x: Tensor
    w13: Tensor
    w2: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.x.size(0)

    @property
    def routing(self) -> RoutingConfig:
        found: RoutingConfig = self.options["routing"]
        return found

    @property
    def experts(self) -> int:
        """Experts that the router chooses from."""
        weight, logits = (self.options.get(n) for n in ("router_weight", "router_logits"))
        return len(weight) if weight is not None else int(logits.size(1))

    def with_(self, **changes: Any) -> LayerCase:
        """The case with arguments replaced, by name."""
        tensors = {n: changes.pop(n) for n in ("x", "w13", "w2") if n in changes}
        return replace(self, **tensors, options={**self.options, **changes})

    def rows(self, chosen: slice | Tensor) -> LayerCase:
        """The case of some of the tokens."""
        changes = {
            n: self.options[n][chosen]
            for n in ("router_logits", "residual")
            if self.options.get(n) is not None
        }
        return self.with_(x=self.x[chosen], **changes)

    def _call(self, options: dict[str, Any]) -> Any:
        defaults = {"backend": TARGET.backend, "policy": "steal"}  # as of gpu_cases
        return weave_moe.moe_layer(self.x, self.w13, self.w2, **defaults | self.options | options)

    def run(self, **options: Any) -> Tensor:
        """y."""
        result: Tensor = self._call(options)
        return result

    def routed(self, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(y, weights, ids)."""
        result: tuple[Tensor, Tensor, Tensor] = self._call({**options, "return_routing": True})
        return result

    def valid(self) -> int:
        """Tokens that are no padding."""
        count = self.options.get("num_valid_tokens")
        return self.tokens if count is None else min(max(int(count), 0), self.tokens)

    def logits(self) -> tuple[Tensor, Tensor]:
        """The router's logits in fp64 and how far fp32 ones may lie from them: [T, E] each.

        A sum of H products may lose a place of the running sum's at each step of the tensor cores
        (16 columns). The running sum is about as large as the last one or as a sum of products of
        either sign.
        """
        given = self.options.get("router_logits")
        if given is not None:
            return given.double(), torch.zeros_like(given, dtype=torch.float64)
        hidden = self.x.size(1)
        x, weight = self.x.double(), self.options["router_weight"].double()
        bias = self.options.get("router_bias")
        logits = x @ weight.T
        size = logits.abs() + x.norm(dim=1, keepdim=True) * weight.norm(dim=1) * hidden**-0.5
        if bias is not None:
            logits, size = logits + bias.double(), size + bias.double().abs()
        slack = size * 2.0**-23 * (8 + hidden / 16)
        # An infinite logit is as certain as it gets.
        return logits, slack.masked_fill(~logits.isfinite(), 0.0)

    def experts_call(self, weights: Tensor, ids: Tensor) -> ExpertsCall:
        """The routed experts of a routing, as a call."""
        names = (
            *("activation", "b13", "b2", "expert_map", "num_valid_tokens", "residual"),
            *("interleaved", "weight_on_input"),
        )
        options = {n: self.options[n] for n in names if n in self.options}
        # What is past the valid tokens may be anything, and is skipped.
        return check_experts(self.x, self.w13, self.w2, weights, ids, **options)

    def truth(self, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What a routing gives, in fp32 and rounded nowhere [T, H], and the size of the layer's own
        part of it: about what each element is made of [T]."""
        call = self.experts_call(weights, ids)
        y = experts_reference(call, rounding=False)
        live = local_experts(call) >= 0
        size = weights.float().square().masked_fill(~live, 0.0).sum(dim=1)
        shared = self.options.get("shared")
        if shared is not None:
            valid = self.options.get("num_valid_tokens")
            y = y + shared_reference(
                self.x,
                shared,
                activation=self.options.get("activation", "silu"),
                num_valid_tokens=valid,
                rounding=False,
            )
            gate = torch.ones_like(size)
            if shared.gate is not None:
                gate = torch.sigmoid(self.x.float() @ shared.gate.float().reshape(-1, 1)).squeeze(1)
            size = size + gate.square()
            size[self.valid() :] = 0.0
        return y, size.sqrt()


def make_layer(one: Layer, tokens: int, *, seed: int = 0, exact: bool = False) -> LayerCase:
    """A call of a row with outputs of about 1.

    exact: the router's inputs have so few bits that its sums are exact in any order.
    """
    s, on = one.shape, TARGET.device
    g = torch.Generator().manual_seed(seed + 1000 * tokens)
    fixed = torch.Generator().manual_seed(one.experts)  # parameters, whatever the tokens
    w13, w2, b13, b2 = weights_of(s)
    x = torch.randn(tokens, s.hidden, generator=g)
    if exact:
        x = (2 * x).round() / 2
    options: dict[str, Any] = {"routing": one.routing, "activation": one.activation}
    if one.logits:
        drawn = 2 * torch.randn(tokens, one.experts, generator=g)
        options["router_logits"] = drawn.to(DTYPES[one.router]).to(on)
    else:
        options["router_weight"] = _router_weight(one, exact)
        if one.router_bias:
            bias = torch.randn(one.experts, generator=fixed)
            bias = (4 * bias).round() / 4 if exact else bias
            options["router_bias"] = bias.to(DTYPES[one.router]).to(on)
    if one.selection_bias:
        options["selection_bias"] = (0.1 * torch.randn(one.experts, generator=fixed)).to(on)
    if one.biases:
        options |= {"b13": b13, "b2": b2}
    if one.shared:
        options["shared"] = _shared_experts(one, exact)
    if one.routable:
        options["expert_map"] = an_expert_map(one.routable, s.experts)
    if one.residual:
        added = torch.randn(tokens, s.hidden, generator=g)
        options["residual"] = added.to(s.torch_dtype).to(on)
    options |= {"interleaved": one.interleaved, "weight_on_input": one.weight_on_input}
    return LayerCase(one, x.to(s.torch_dtype).to(on), w13, w2, options)


ordered_sums = pytest.mark.skipif(
    TARGET.backend == "reference", reason="torch's products choose their order by the batch"
)
"""For tests of what the reference does not promise: the same sums in every batch."""


def some(mask: Tensor) -> list[int]:
    """The first tokens of a mask."""
    rows: list[int] = mask.nonzero().flatten()[:20].tolist()
    return rows


def assert_routing(
    case: LayerCase, weights: Tensor, ids: Tensor, *, certain_share: float = 0.0
) -> Choice:
    """`weights` and `ids` are what the router must give for the valid tokens.

    certain_share: of the tokens, that the test would be of no use without.
    """
    config, tokens, valid = case.routing, case.tokens, case.valid()
    assert (weights.shape, weights.dtype) == ((tokens, config.top_k), torch.float32)
    assert (ids.shape, ids.dtype) == ((tokens, config.top_k), torch.int32)
    logits, slack = (value[:valid] for value in case.logits())
    chosen, weights = ids[:valid].long(), weights[:valid].double()
    choice = choose(logits, slack, config, case.options.get("selection_bias"))
    if not valid:
        return choice
    outside = (chosen < 0) | (chosen >= case.experts)
    assert not bool(outside.any()), f"ids out of range in {some(outside.any(dim=1))}"
    twice = (chosen.sort(dim=1).values.diff(dim=1) == 0).any(dim=1)
    assert not bool(twice.any()), f"an expert twice in {some(twice)}"
    wrong = (chosen != choice.ids).any(dim=1) & choice.certain
    assert not bool(wrong.any()), (
        f"{int(wrong.sum())} tokens with other experts: {some(wrong)}; the first has "
        f"{chosen[wrong][0].tolist()} instead of {choice.ids[wrong][0].tolist()}"
    )
    share = float(choice.certain.float().mean())
    assert share >= certain_share, f"only {share:.0%} of the tokens are certain"
    if config.num_groups == 1:
        # Of two that are nearly equal either may be first, but nothing further down.
        got = choice.keys.gather(1, chosen) + choice.slack.gather(1, chosen)
        want = choice.keys.gather(1, choice.ids) - choice.slack.gather(1, choice.ids)
        low = (got < want).any(dim=1)
        assert not bool(low.any()), f"experts that are too low in {some(low)}"
    else:
        groups = chosen // (case.experts // config.num_groups)
        count = F.one_hot(groups, config.num_groups).amax(dim=1).sum(dim=1)
        assert not bool((count > config.topk_groups).any()), "experts of too many groups"
    finite = weights.isfinite().all(dim=1)
    assert bool(finite.all()), f"weights are not finite in {some(~finite)}"
    want = choice.weights(chosen)
    error = (weights - want).abs()
    relative = 3e-5 + 4 * slack.gather(1, chosen).amax(dim=1, keepdim=True)
    floor = abs(config.scaling_factor) * (1e-15 if config.renormalize else 1e-36)
    off = (error > relative * want.abs() + floor).any(dim=1)
    assert not bool(off.any()), (
        f"weights off in {some(off)}: {weights[off][0].tolist()} instead of {want[off][0].tolist()}"
    )
    return choice


def assert_result(case: LayerCase, y: Tensor, weights: Tensor, ids: Tensor) -> None:
    """`y` is the layer's for that routing: close to the truth where something contributes, else
    zero or the residual's."""
    valid = case.valid()
    weights, ids = weights.clone(), ids.clone()
    weights[valid:], ids[valid:] = 0, -1
    want, size = case.truth(weights, ids)
    assert y.shape == case.x.shape
    assert y.dtype == case.x.dtype
    if not case.tokens:
        return
    value = y.float()
    finite = value.isfinite().all(dim=1)
    assert bool(finite.all()), f"rows not finite: {some(~finite)}"
    live = (local_experts(case.experts_call(weights, ids)) >= 0).any(dim=1)
    if case.options.get("shared") is not None:
        live[:valid] = True
    residual = case.options.get("residual")
    idle = torch.zeros_like(value) if residual is None else residual.float()
    other = ~live & (value != idle).any(dim=1)
    assert not bool(other.any()), f"rows that nothing contributes to: {some(other)}"
    norm = want.norm(dim=1)
    # A narrow row's parts may cancel; a wide row's norm is that of its parts.
    if case.x.size(1) < 256:
        norm = norm + 0.3 * case.x.size(1) ** 0.5 * size
    error = (value - want).norm(dim=1)
    bad = error > TOLERANCE[y.dtype] * norm + 1e-30
    assert not bool(bad.any()), (
        f"{int(bad.sum())} of {len(bad)} rows off: {some(bad)}; worst relative error "
        f"{float((error / norm.clamp(min=1e-9))[live].max()):.2e}"
    )


def check_layer(
    case: LayerCase, *, certain_share: float = 0.0, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a case, holds its routing and its result to the truth: (y, weights, ids)."""
    y, weights, ids = case.routed(**options)
    assert_routing(case, weights, ids, certain_share=certain_share)
    assert_result(case, y, weights, ids)
    return y, weights, ids


class Recorded:
    """Work recorded into a CUDA graph; elsewhere than on a GPU it is done again at each replay.

    results: the tensors that `work` returned, whose memory a replay writes.
    """

    def __init__(self, work: Callable[[], tuple[Tensor, ...]]) -> None:
        self._work, self._graph = work, None
        if not TARGET.on_gpu:
            self.results = work()
            return
        work()  # compiled and loaded
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.results = work()

    def replay(self) -> tuple[Tensor, ...]:
        """The results, which the next replay overwrites."""
        for result in self.results:
            result.fill_(float("nan") if result.is_floating_point() else -999_999)
        if self._graph is not None:
            self._graph.replay()
            return self.results
        for mine, new in zip(self.results, self._work(), strict=True):
            mine.copy_(new)
        return self.results


def recorded(case: LayerCase, **options: Any) -> Callable[[LayerCase, int], tuple[Tensor, ...]]:
    """A recorded call, whose inputs are buffers of its own: (another case, valid) -> results."""
    own = {"x": case.x.clone(), "num_valid_tokens": torch.zeros((), dtype=torch.int32)}
    own["num_valid_tokens"] = own["num_valid_tokens"].to(TARGET.device)
    for name in ("router_logits", "residual"):
        if case.options.get(name) is not None:
            own[name] = case.options[name].clone()
    graph = Recorded(lambda: case.with_(**own).routed(**options))

    def replay(other: LayerCase, valid: int) -> tuple[Tensor, ...]:
        own["x"].copy_(other.x)
        for name in ("router_logits", "residual"):
            if name in own:
                own[name].copy_(other.options[name])
        own["num_valid_tokens"].fill_(valid)
        return graph.replay()

    return replay


def differs(
    results: tuple[Tensor, ...], whole: tuple[Tensor, ...], case: LayerCase, valid: int
) -> Tensor:
    """Whether a valid token's results are not the bits of the whole case, or another row is not
    idle: a flag on the device, which nobody has waited for."""
    live = min(max(valid, 0), case.tokens)
    y, residual = results[0], case.options.get("residual")
    bad = (y[live:] != (0 if residual is None else residual[live:])).any()
    for mine, right in zip(results, whole, strict=True):
        bad = bad | (bits(mine[:live]) != bits(right[:live])).any()
    return bad
