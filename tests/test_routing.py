"""Routers, each kind of wrong routing that other implementations have shown in its own test."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from generators import generator
from weave_moe import RoutingConfig, route, router_logits
from weave_moe.routing import check_router

NAN, INF = float("nan"), float("inf")
SCORINGS = RoutingConfig.SCORINGS


@st.composite
def routers(draw: st.DrawFn, scorings: tuple[str, ...] = SCORINGS) -> tuple[int, RoutingConfig]:
    """(number of experts, a config that fits it)."""
    groups = draw(st.sampled_from((1, 1, 2, 3, 4, 8)))
    size = draw(st.integers(1, 12))
    kept = draw(st.integers(1, groups))
    return groups * size, RoutingConfig(
        draw(st.integers(1, kept * size)),
        draw(st.sampled_from(scorings)),
        renormalize=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from((1.0, 2.5, 16.0))),
        num_groups=groups,
        topk_groups=kept,
    )


@st.composite
def logit_rows(draw: st.DrawFn, experts: int) -> Tensor:
    """Logits [T, experts], each row of a kind: noise, ties, NaN, infinities, far below zero."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row = torch.randn(experts, generator=generator(draw(st.integers(0, 2**31))))
        kind = draw(
            st.sampled_from(("noise", "ties", "holes", "nan", "inf", "-inf", "far", "flat"))
        )
        if kind == "ties":
            row = (2 * row).round() / 2
        elif kind == "holes":
            special = torch.tensor([NAN, INF, -INF, 0.0, -100.0])
            row = torch.where(row > 0.3, special[(row * 1000).long() % 5], row)
        elif kind in ("nan", "inf", "-inf"):
            row = torch.full_like(row, float(kind))
        elif kind == "far":
            row = row - 120
        elif kind == "flat":
            row = torch.zeros_like(row)
        rows.append(row)
    return torch.stack(rows)


def chosen_by_sorting(
    logits: Tensor, config: RoutingConfig, bias: Tensor | None
) -> list[list[int]]:
    """Ids by Python's own sort, row by row. Scores are torch's, so that equal ones are equal."""
    finite = logits.float().nan_to_num(
        nan=torch.finfo(torch.float32).min,
        neginf=torch.finfo(torch.float32).min,
        posinf=torch.finfo(torch.float32).max,
    )
    scores = {
        "softmax": lambda v: torch.softmax(v, 1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda v: F.softplus(v).sqrt(),
        "topk_softmax": lambda v: v,
    }[config.scoring](finite)
    keys = scores if bias is None else scores + bias
    result = []
    for row, key_row in zip(logits.tolist(), keys.tolist(), strict=True):
        # (alive, key): a dead expert loses against any live one, and equals any dead one.
        alive = [not math.isnan(v) and v != -INF for v in row]
        keyed = [(live, k if live else 0.0) for live, k in zip(alive, key_row, strict=True)]
        size = len(row) // config.num_groups

        def group_key(g: int, keyed: list[tuple[bool, float]] = keyed, size: int = size) -> Any:
            best = sorted(keyed[g * size : (g + 1) * size], reverse=True)[
                : 1 if bias is None else 2
            ]
            return (sum(live for live, _ in best), sum(k for live, k in best if live))

        groups = sorted(range(config.num_groups), key=group_key, reverse=True)[: config.topk_groups]
        allowed = [e for e in range(len(row)) if e // size in groups]
        # sorted is stable and `allowed` ascends, so the lowest id comes first among equals.
        result.append(sorted(allowed, key=lambda e: keyed[e], reverse=True)[: config.top_k])
    return result


@given(st.data())
def test_ids_are_those_of_a_stable_sort(data: st.DataObject) -> None:
    experts, config = data.draw(routers())
    logits = data.draw(logit_rows(experts))
    bias = None
    if data.draw(st.booleans()):
        # Multiples of 1/4 of either sign, some large.
        bias = torch.tensor(
            data.draw(st.lists(st.integers(-40, 40), min_size=experts, max_size=experts))
        )
        bias = bias.float() / 4
    _, ids = route(logits, config, bias)
    want = chosen_by_sorting(logits, config, bias)
    live = (~logits.isnan() & (logits != -INF)).sum(dim=1)
    for row, (got, expected) in enumerate(zip(ids.tolist(), want, strict=True)):
        if config.num_groups > 1 and live[row] < experts:
            # How groups of dead experts rank among each other is nobody's contract.
            assert len(set(got)) == config.top_k
            continue
        assert got == expected


@given(st.data())
def test_every_row_gets_k_distinct_ids_in_range_and_finite_weights(data: st.DataObject) -> None:
    experts, config = data.draw(routers())
    logits = data.draw(logit_rows(experts))
    bias = data.draw(st.none() | st.just(torch.linspace(-50, 50, experts)))
    weights, ids = route(logits, config, bias)
    assert weights.dtype is torch.float32
    assert ids.dtype is torch.int32
    assert weights.shape == ids.shape == (logits.size(0), config.top_k)
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert ((ids >= 0) & (ids < experts)).all()
    for row in ids.tolist():
        assert len(set(row)) == config.top_k


@given(st.data())
def test_weights_are_the_unbiased_scores_of_the_chosen(data: st.DataObject) -> None:
    """Scores by their formulas in float64, on ordinary logits."""
    experts, config = data.draw(routers())
    logits = torch.randn(3, experts, generator=generator(data.draw(st.integers(0, 2**31)))) * 3
    bias = data.draw(st.none() | st.just(torch.linspace(-1, 1, experts)))
    weights, ids = route(logits, config, bias)
    for t in range(3):
        row = [float(v) for v in logits[t]]
        exps = [math.exp(v) for v in row]
        picked = [row[e] for e in ids[t].tolist()]
        want = {
            "softmax": [math.exp(v) / sum(exps) for v in picked],
            "sigmoid": [1 / (1 + math.exp(-v)) for v in picked],
            "sqrtsoftplus": [math.sqrt(math.log1p(math.exp(v))) for v in picked],
            "topk_softmax": [math.exp(v) / sum(math.exp(u) for u in picked) for v in picked],
        }[config.scoring]
        if config.renormalize and config.scoring != "topk_softmax":
            want = [w / sum(want) for w in want]
        want = [config.scaling_factor * w for w in want]
        torch.testing.assert_close(weights[t], torch.tensor(want), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_row_all_nan_or_infinite_takes_the_first_experts(
    scoring: str, renormalize: bool, value: float
) -> None:
    logits = torch.randn(3, 8, generator=generator(1))
    logits[1] = value
    weights, ids = route(logits, RoutingConfig(4, scoring, renormalize))
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert weights[1].isfinite().all()
    # Its neighbours do not notice.
    alone = route(logits[[0, 2]], RoutingConfig(4, scoring, renormalize))
    assert torch.equal(weights[[0, 2]], alone[0])
    assert torch.equal(ids[[0, 2]], alone[1])


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_row_with_some_nan_routes_among_its_finite_experts(scoring: str) -> None:
    logits = torch.tensor([[NAN, -150.0, NAN, 1.0, NAN, -200.0]])
    weights, ids = route(logits, RoutingConfig(3, scoring, renormalize=True))
    # -150 and -200 score 0 in fp32 where scores are probabilities, and still beat NaN.
    assert ids[0, 0] == 3
    assert set(ids[0].tolist()) == {1, 3, 5}
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    _, more = route(logits, RoutingConfig(5, scoring))
    assert more[0, 3:].tolist() == [0, 2]


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("bias", [-5.0, 5.0, 100.0, INF])
def test_a_nan_expert_is_last_whatever_the_bias(scoring: str, bias: float) -> None:
    logits = torch.tensor([[0.5, NAN, -INF, 1.0]])
    selection = torch.tensor([0.0, bias, bias, -bias])
    _, ids = route(logits, RoutingConfig(4, scoring), selection)
    assert set(ids[0, :2].tolist()) == {0, 3}
    assert ids[0, 2:].tolist() == [1, 2]


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("experts", [4, 64, 384, 896])
def test_the_lowest_id_wins_ties(scoring: str, experts: int) -> None:
    k = 4
    _, ids = route(torch.zeros(2, experts), RoutingConfig(k, scoring))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    # bf16 logits take few values, so that the cut falls among equals in most rows.
    logits = torch.randn(64, experts, generator=generator(experts)).to(torch.bfloat16)
    _, ids = route(logits, RoutingConfig(k, scoring))
    for row, got in zip(logits.tolist(), ids.tolist(), strict=True):
        assert got == sorted(range(experts), key=lambda e: (-row[e], e))[:k]


def test_equal_groups_are_taken_from_the_lowest() -> None:
    _, ids = route(torch.zeros(1, 16), RoutingConfig(4, num_groups=8, topk_groups=2))
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_a_bias_of_minus_infinity_puts_an_expert_behind_the_others_of_kept_groups_only() -> None:
    bias = torch.tensor([0.0, 0.0, -INF, -INF, 1.0, 1.0, -INF, -INF])
    config = RoutingConfig(3, "sigmoid", num_groups=2, topk_groups=1)
    assert route(torch.zeros(1, 8), config, bias)[1].tolist() == [[4, 5, 6]]


def test_an_expert_with_a_nan_bias_is_last() -> None:
    bias = torch.tensor([NAN, 0.0, -INF, 1.0])
    assert route(torch.zeros(1, 4), RoutingConfig(4), bias)[1].tolist() == [[3, 1, 2, 0]]


@given(st.integers(0, 2**31), st.sampled_from((-5.0, -1.0, 0.0, 5.0)))
def test_an_expert_of_a_dropped_group_is_never_chosen(seed: int, shift: float) -> None:
    """Biased scores are negative at -5, where masking dropped groups with 0 would prefer them."""
    g = generator(seed)
    logits = torch.randn(6, 32, generator=g)
    bias = torch.full((32,), shift) + 0.1 * torch.randn(32, generator=g)
    config = RoutingConfig(8, "sigmoid", num_groups=8, topk_groups=4)
    _, ids = route(logits, config, bias)
    biased = (logits.sigmoid() + bias).view(6, 8, 4)
    best_two = biased.topk(2, dim=-1).values.sum(-1)
    kept = best_two.topk(4, dim=-1).indices
    for row in range(6):
        assert set((ids[row] // 4).tolist()) <= set(kept[row].tolist())


def test_a_group_counts_by_its_best_or_with_a_bias_by_its_best_two() -> None:
    # Group 0 has the best single expert, group 1 the best pair.
    logits = torch.tensor([[3.0, -3.0, 2.0, 2.0]])
    config = RoutingConfig(2, "sigmoid", num_groups=2, topk_groups=1)
    assert set(route(logits, config)[1][0].tolist()) == {0, 1}
    assert set(route(logits, config, torch.zeros(4))[1][0].tolist()) == {2, 3}


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_selection_bias_selects_and_never_weighs(scoring: str, renormalize: bool) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    bias = torch.tensor([9.0, 9.0, 0.0, 0.0])
    config = RoutingConfig(2, scoring, renormalize)
    weights, ids = route(logits, config, bias)
    assert set(ids[0].tolist()) == {0, 1}
    # The same experts chosen without a bias: the others are out of reach.
    far = torch.tensor([[0.1, 0.2, -80.0, -80.0]])
    unbiased, same = route(far, config)
    want = unbiased[0][same[0].argsort()]
    if scoring == "softmax" and not renormalize:
        want = torch.softmax(logits, 1)[0, :2]
    torch.testing.assert_close(weights[0][ids[0].argsort()], want)


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus", "softmax"])
@pytest.mark.parametrize("logit", [-100.0, -200.0, -1e30])
def test_renormalising_survives_scores_that_underflow(scoring: str, logit: float) -> None:
    weights, _ = route(torch.full((2, 8), logit), RoutingConfig(3, scoring, renormalize=True))
    assert weights.isfinite().all()
    assert (weights <= 1.0).all()


def test_without_renormalising_softmax_is_over_all_experts() -> None:
    logits = torch.randn(5, 16, generator=generator(3))
    weights, ids = route(logits, RoutingConfig(4))
    torch.testing.assert_close(weights, torch.softmax(logits, 1).gather(1, ids.long()))
    assert (weights.sum(1) < 1).all()


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("factor", [2.5, 2.827, 0.5])
def test_the_scaling_factor_is_applied_exactly_once(
    scoring: str, renormalize: bool, factor: float
) -> None:
    logits = torch.randn(5, 16, generator=generator(4))
    plain, ids = route(logits, RoutingConfig(4, scoring, renormalize))
    scaled, same = route(logits, RoutingConfig(4, scoring, renormalize, scaling_factor=factor))
    assert torch.equal(ids, same)
    assert torch.equal(scaled, plain * factor)


@given(st.integers(0, 2**31), st.sampled_from((torch.bfloat16, torch.float16)))
def test_logits_of_low_precision_inputs_keep_fp32(seed: int, dtype: torch.dtype) -> None:
    """Two experts closer than the inputs' rounding step keep their order."""
    g = generator(seed)
    hidden = 64
    x = torch.randn(4, hidden, generator=g).to(dtype)
    weight = torch.randn(6, hidden, generator=g).to(dtype)
    weight[1] = weight[0]
    # One element one step larger in size: a difference far below a rounding step of the sum.
    step = torch.finfo(dtype).eps * weight[0, 5].float()
    weight[1, 5] = (weight[0, 5].float() + step).to(dtype)
    bias = torch.randn(6, generator=g)
    logits = router_logits(x, weight, bias)
    assert logits.dtype is torch.float32
    truth = x.double() @ weight.double().T + bias
    torch.testing.assert_close(logits.double(), truth, rtol=1e-5, atol=1e-5)
    difference = (truth[:, 1] - bias[1]) - (truth[:, 0] - bias[0])
    got = (router_logits(x, weight)[:, 1] - router_logits(x, weight)[:, 0]).double()
    torch.testing.assert_close(got, difference, rtol=0.02, atol=2e-5)


def test_low_precision_logits_would_not_tell_near_ties_apart() -> None:
    """The kind of input for which bf16 logits choose the wrong expert, and ours do not."""
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    weight = torch.ones(2, 256, dtype=torch.bfloat16)
    weight[1, 0] += 2.0**-7
    assert F.linear(x, weight).diff().item() == 0.0
    _, ids = route(router_logits(x, weight), RoutingConfig(1))
    assert ids.item() == 1


@given(st.integers(0, 2**31))
def test_strides_of_logits_do_not_matter(seed: int) -> None:
    logits = torch.randn(6, 16, generator=generator(seed))
    config = RoutingConfig(4, "sigmoid", num_groups=4, topk_groups=2)
    for other in (logits.T.contiguous().T, torch.stack((logits, logits), -1)[..., 0]):
        for got, want in zip(route(other, config), route(logits, config), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_no_tokens_route_to_nothing(scoring: str) -> None:
    config = RoutingConfig(2, scoring, num_groups=2, topk_groups=1)
    weights, ids = route(torch.zeros(0, 8), config, torch.zeros(8))
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_weights_pass_gradients_to_the_logits(scoring: str) -> None:
    logits = torch.randn(3, 8, generator=generator(5), requires_grad=True)
    weights, _ = route(logits, RoutingConfig(2, scoring))
    weights.square().sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: RoutingConfig(0), ValueError, "^top_k must be at least 1, got 0"),
        (lambda: RoutingConfig(2.0), TypeError, "^top_k must be an int, got float"),
        (
            lambda: RoutingConfig(2, "linear"),
            ValueError,
            "^scoring must be one of softmax, .*'linear'",
        ),
        (lambda: RoutingConfig(2, renormalize=1), TypeError, "^renormalize must be True or False"),
        (
            lambda: RoutingConfig(2, scaling_factor=INF),
            ValueError,
            "^scaling_factor must be finite",
        ),
        (
            lambda: RoutingConfig(2, scaling_factor=3.5e38),
            ValueError,
            "^scaling_factor must be finite in fp32",
        ),
        (
            lambda: RoutingConfig(2, scaling_factor="2"),
            TypeError,
            "^scaling_factor must be a number",
        ),
        (lambda: RoutingConfig(2, num_groups=0), ValueError, "^num_groups must be at least 1"),
        (lambda: RoutingConfig(2, topk_groups=2), ValueError, "^topk_groups must be at most num_g"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(
    make: Callable[[], RoutingConfig], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (([1.0], RoutingConfig(1)), TypeError, "^logits must be a torch.Tensor, got list"),
        ((torch.zeros(8), RoutingConfig(1)), ValueError, r"^logits must have shape \[T, E\]"),
        ((torch.zeros(2, 8).long(), RoutingConfig(1)), TypeError, "^logits must be .*got int64"),
        ((torch.zeros(2, 8), 2), TypeError, "^config must be a RoutingConfig, got int"),
        ((torch.zeros(2, 8), RoutingConfig(9)), ValueError, "^top_k must be at most 8.*got 9"),
        (
            (torch.zeros(2, 8), RoutingConfig(5, num_groups=4, topk_groups=2)),
            ValueError,
            "^top_k must be at most 4.*got 5",
        ),
        (
            (torch.zeros(2, 8), RoutingConfig(1, num_groups=3)),
            ValueError,
            "^num_groups must divide the number of experts 8, got 3",
        ),
        (
            (torch.zeros(2, 8), RoutingConfig(1), torch.zeros(7)),
            ValueError,
            r"^selection_bias must have 8 in dimension 0",
        ),
        (
            (torch.zeros(2, 8), RoutingConfig(1), torch.zeros(8, dtype=torch.int32)),
            TypeError,
            "^selection_bias must be .*got int32",
        ),
    ],
)
def test_bad_arguments_of_route_are_named(
    args: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        route(*args)


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((1, torch.zeros(4, 8)), TypeError, "^x must be a torch.Tensor"),
        (
            (torch.zeros(2, 8), torch.zeros(8)),
            ValueError,
            r"^router_weight must have shape \[E, H\]",
        ),
        ((torch.zeros(2, 8), torch.zeros(4, 7)), ValueError, "^router_weight must have 8 in"),
        ((torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(5)), ValueError, "^router_bias must"),
        ((torch.zeros(2, 8), torch.zeros(4, 8).long()), TypeError, "^router_weight must be"),
    ],
)
def test_bad_arguments_of_router_logits_are_named(
    args: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        router_logits(*args)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "^router_weight or router_logits must be given, .*got neither"),
        (
            {"router_weight": torch.zeros(4, 8), "router_logits": torch.zeros(2, 4)},
            ValueError,
            "not both, got both",
        ),
        (
            {"router_logits": torch.zeros(2, 4), "router_bias": torch.zeros(4)},
            ValueError,
            "^router_bias must be None when router_logits",
        ),
        ({"router_logits": torch.zeros(3, 4)}, ValueError, "^router_logits must have 2 in"),
        ({"router_logits": torch.zeros(2, 5)}, ValueError, "^router_logits must have 4 in"),
        ({"router_weight": torch.zeros(5, 8)}, ValueError, "^router_weight must have 4 in"),
        (
            {"router_logits": torch.zeros(2, 4), "selection_bias": torch.zeros(3)},
            ValueError,
            "^selection_bias must have 4 in",
        ),
        ({"routing": None}, TypeError, "^routing must be a RoutingConfig, got NoneType"),
        ({"routing": RoutingConfig(5)}, ValueError, "^top_k must be at most 4"),
    ],
)
def test_bad_router_arguments_of_a_layer_are_named(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_router(torch.zeros(2, 8), 4, **{"routing": RoutingConfig(2), **options})
