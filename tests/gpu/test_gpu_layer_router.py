"""The router of a whole layer: its logits, and whom it chooses with what weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_cases import TARGET, same_bits
from layer_cases import (
    LayerCase,
    assert_result,
    assert_routing,
    cases_of,
    check_layer,
    expect_layers,
    layer,
    make_layer,
    ordered_sums,
)
from layer_tables import (
    EACH,
    MANY,
    SHORT,
    SIDE,
    E,
    H,
    I,
    base,
)
from torch import Tensor, nn

from weave_moe import RoutingConfig, route
from weave_moe.shapes import DTYPES

pytestmark = pytest.mark.gpu

NAN, INF = float("nan"), float("inf")
ROUTED = layer(*SIDE, 64, RoutingConfig(6), (MANY,), logits=True, router="float32")
LOGITS = {
    f"{hidden}, {dtype}, router {router}": layer(
        *(hidden, 64, 64, RoutingConfig(16, "sigmoid"), (1, 9, 64, 257)),
        dtype=dtype,
        router=router,
        router_bias=router == "float32",
        shared=64 if dtype == "float16" or router == "float32" else 0,
    )
    for hidden, dtype, router in (
        *((512, "bfloat16", "bfloat16"), (512, "bfloat16", "float32"), (512, "float16", "float16")),
        *((2880, "bfloat16", "bfloat16"), (7168, "bfloat16", "bfloat16")),
        *((2880, "bfloat16", "float32"), (7168, "bfloat16", "float32")),
    )
}
TIES = {
    f"{experts} {top_k} {scoring}": layer(
        *(*SIDE, experts, RoutingConfig(top_k, scoring), EACH), logits=True
    )
    for experts, top_k in ((16, 1), (16, 4), (133, 4), (384, 8), (1024, 16))
    for scoring in (RoutingConfig.SCORINGS if experts == 16 else ("softmax", "sigmoid"))
}

expect_layers([ROUTED, *LOGITS.values(), *TIES.values()])


def rows_of_logits(tokens: int, experts: int, *, far: float) -> Tensor:
    """Logits [T, E], each row of a kind: noise, near and exact ties, NaN, infinities, extremes.

    far: so low that the score is 0 in fp32.
    """
    g = torch.Generator().manual_seed(experts)
    rows = 2 * torch.randn(tokens, experts, generator=g)
    special = torch.tensor([NAN, INF, -INF, 0.0, far])
    holes = special[torch.randint(5, rows.shape, generator=g)]
    kinds: list[Callable[[Tensor, Tensor], Any]] = [
        lambda row, hole: row,
        lambda row, hole: row.bfloat16(),
        lambda row, hole: row.round(),
        lambda row, hole: row.round().clamp(-1, 1),
        lambda row, hole: 0.0,
        lambda row, hole: NAN,
        lambda row, hole: INF,
        lambda row, hole: -INF,
        lambda row, hole: far,
        lambda row, hole: torch.where(row > 1, hole, row),
        lambda row, hole: hole,
        lambda row, hole: torch.where(row == row.max(), NAN, row),
        lambda row, hole: torch.where(row == row.min(), INF, row),
        lambda row, hole: row * 10 - 40,
        lambda row, hole: (row * 30).clamp(-80, 80),
        lambda row, hole: row + far - 30,
        lambda row, hole: torch.where(row == row.max(), row, far),
        lambda row, hole: 2.0**-20 * row,
    ]
    for t in range(tokens):
        rows[t] = kinds[t % len(kinds)](rows[t].clone(), holes[t])
    return rows


GROUPS = ((1, 1), (8, 4), (4, 1), (8, 1), (64, 16), (16, 16))
BIASES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda noise: None,
    "noise": lambda noise: 0.1 * noise,
    "below": lambda noise: 0.1 * noise - 5,
    "above": lambda noise: 20 * noise + 100,
    "equal": lambda noise: torch.full_like(noise, -2.0),
    "steps": lambda noise: noise.round(),
    "wild": lambda noise: torch.where(
        noise > 1, INF, torch.where(noise < -1, -INF, torch.where(noise.abs() < 0.1, NAN, noise))
    ),
}


@pytest.mark.parametrize("scoring", RoutingConfig.SCORINGS)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_routing_of_given_logits(scoring: str, groups: tuple[int, int]) -> None:
    tokens, experts = ROUTED.tokens[0], ROUTED.experts
    noise = torch.randn(experts, generator=torch.Generator().manual_seed(1))
    rows = rows_of_logits(tokens, experts, far=-150.0 if scoring == "sqrtsoftplus" else -100.0)
    for i, (name, make_bias) in enumerate(BIASES.items()):
        logits = rows.to((torch.float32, torch.bfloat16)[i % 2]).to(TARGET.device)
        bias = make_bias(noise)
        bias = None if bias is None else bias.to(TARGET.device)
        config = RoutingConfig(6, scoring, i % 3 > 0, (1.0, 2.5, 1.0, 0.5)[i % 4], *groups)
        case = make_layer(ROUTED, tokens)
        case = case.with_(router_logits=logits, selection_bias=bias, routing=config)
        y, weights, ids = case.routed()
        # Infinite biases of as many groups leave little that is certain.
        choice = assert_routing(case, weights, ids, certain_share=0.1 if name == "wild" else 0.3)
        want_weights, want_ids = route(logits, config, bias)
        assert torch.equal(ids[choice.certain], want_ids[choice.certain]), name
        same = (ids == want_ids).all(dim=1)
        torch.testing.assert_close(weights[same], want_weights[same], rtol=3e-5, atol=1e-15)
        if bias is None:
            for row in (5, 6, 7):  # NaN, inf and -inf throughout
                assert ids[row].tolist() == [0, 1, 2, 3, 4, 5]
        assert_result(case, y, weights, ids)
        # Few tokens are routed by other code, and fewer by other code still: every kind of row.
        for part in (slice(0, 36), slice(0, 9), slice(9, 18)):
            _, few_weights, few_ids = case.rows(part).routed()
            assert same_bits(few_weights, weights[part]), (name, part)
            assert torch.equal(few_ids, ids[part]), (name, part)


@pytest.mark.parametrize(("name", "tokens"), cases_of(TIES))
def test_the_lowest_id_wins_ties(name: str, tokens: int) -> None:
    case = make_layer(TIES[name], tokens)
    # bf16 logits of few values: the cut falls among equals in most rows.
    few = (case.options["router_logits"] / 2).round().clamp(-1, 1)
    few[::3] = 0
    case = case.with_(router_logits=few)
    _, weights, ids = case.routed()
    assert_routing(case, weights, ids, certain_share=1.0)
    assert ids[0].tolist() == list(range(TIES[name].routing.top_k))


@pytest.mark.parametrize("tokens", EACH)
@pytest.mark.parametrize("scoring", RoutingConfig.SCORINGS)
def test_a_tied_router_gives_the_lowest_ids(scoring: str, tokens: int) -> None:
    # Equal rows of the router's weight, wherever they lie, above all others; and rows of zeros.
    case = make_layer(base(RoutingConfig(4, scoring)), tokens)
    case = case.with_(x=case.x.abs())
    router = case.options["router_weight"].clone()
    router[1::2] = router.amax(dim=0).abs()
    _, _, ids = case.with_(router_weight=router).routed()
    assert ids.tolist() == [[1, 3, 5, 7]] * tokens
    _, weights, ids = case.with_(router_weight=torch.zeros_like(router)).routed()
    assert ids.tolist() == [[0, 1, 2, 3]] * tokens
    assert bool(weights.isfinite().all())


def assert_logits(case: LayerCase, weights: Tensor, ids: Tensor) -> None:
    """The logits behind the sigmoids `weights` are within rounding: a score shows them to about a
    place of its own."""
    logits, slack = (value.gather(1, ids.long()) for value in case.logits())
    score = torch.sigmoid(logits)
    error = (weights.double() - score).abs()
    allowed = score * (1 - score) * slack + 2.0**-21 * score
    assert bool((error <= allowed).all()), float((error / allowed).max())


@pytest.mark.parametrize(("name", "tokens"), cases_of(LOGITS))
def test_logits_are_within_fp32_rounding_of_the_product(name: str, tokens: int) -> None:
    case = make_layer(LOGITS[name], tokens)
    _, weights, ids = check_layer(case)
    assert_logits(case, weights, ids)


@pytest.mark.parametrize("tokens", EACH)
@pytest.mark.parametrize("router", ["bfloat16", "float32"])
def test_experts_closer_than_a_place_of_their_logits(router: str, tokens: int) -> None:
    # Logits near 8, where bf16 has steps of 1/16; neighbours differ by 1/256 of that, or 1/2048.
    shared = I if router == "float32" else 0
    case = make_layer(base(RoutingConfig(4), router=router, shared=shared), tokens)
    weight = torch.zeros(E, H)
    weight[:, ::2] = 2.0**-5
    order = torch.randperm(E, generator=torch.Generator().manual_seed(2))
    step = 2.0**-12 if router == "bfloat16" else 2.0**-15
    weight[:, 1] = step * order
    x = torch.ones_like(case.x)
    case = case.with_(x=x, router_weight=weight.to(DTYPES[router]).to(TARGET.device))
    _, _, ids = case.routed()
    want = order.argsort(descending=True)[:4].tolist()
    assert ids.tolist() == [want] * tokens


@pytest.mark.parametrize("tokens", EACH)
@ordered_sums
def test_tokens_of_nan_and_infinity(tokens: int) -> None:
    for name, one in SHORT.items():
        case = make_layer(one, tokens)
        want = case.routed()
        x = case.x.clone()
        x[0], x[1, 3], x[2, ::7] = NAN, INF, -INF
        got = case.with_(x=x).routed()
        for mine, expected in zip(got, want, strict=True):
            assert same_bits(mine[3:], expected[3:]), name
        _, weights, ids = (value[:3] for value in got)
        assert bool(weights.isfinite().all()), name
        assert bool(((ids >= 0) & (ids < E)).all()), name
        assert all(len(set(row)) == one.shape.top_k for row in ids.tolist()), name
        if one.routing.num_groups == 1:  # how groups of nothing rank is nobody's affair
            assert ids[0].tolist() == list(range(one.shape.top_k)), name


# The checks themselves.


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(x.float(), weight.float(), bias.float())


def truncated(value: Tensor, places: int) -> Tensor:
    """`value` with that many places behind its leading one."""
    return (value.float().view(torch.int32) >> (23 - places) << (23 - places)).view(torch.float32)


ROUTERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bf16 logits": lambda x, w, b: linear(x, w, b).bfloat16().float(),
    "a bf16 weight": lambda x, w, b: linear(x, w.bfloat16(), b),
    "a tf32 weight": lambda x, w, b: linear(x, truncated(w, 10), b),
    "a sum kept in fp16": lambda x, w, b: linear(x[:, :64], w[:, :64], b).half()
    + linear(x[:, 64:], w[:, 64:], 0 * b),
    "a column less": lambda x, w, b: linear(x[:, 1:], w[:, 1:], b),
    "no bias": lambda x, w, b: linear(x, w, 0 * b),
}  # fmt: skip


@pytest.mark.parametrize("bug", ROUTERS)
def test_the_checks_find_logits_that_are_not_right(bug: str) -> None:
    case = make_layer(LOGITS["512, bfloat16, router float32"], 64)
    inputs = (case.x, case.options["router_weight"], case.options["router_bias"])
    assert_logits(case, *route(linear(*inputs), case.routing))
    with pytest.raises(AssertionError):
        assert_logits(case, *route(ROUTERS[bug](*inputs), case.routing))
