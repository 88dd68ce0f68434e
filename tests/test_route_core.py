"""The core's choice of experts (device/route.h), which the GPU runs, against `routing.route`."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native.mirror import Probe
from test_plan import needs_cxx, probe  # noqa: F401
from weave_moe.routing import RoutingConfig, route

SHAPES = [(8, 2), (128, 8), (60, 4), (256, 8), (512, 10), (64, 6), (33, 1), (16, 16), (5, 3)]
GROUPS = {128: (8, 3), 256: (8, 4), 64: (4, 2), 512: (32, 4), 16: (1, 1), 60: (20, 7)}


def key_of(logits: torch.Tensor, config: RoutingConfig, bias: torch.Tensor | None) -> torch.Tensor:
    """What experts are ordered by, in fp64."""
    x = logits.double()
    score = {
        "softmax": lambda: x.softmax(-1),
        "sigmoid": lambda: x.sigmoid(),
        "sqrtsoftplus": lambda: torch.nn.functional.softplus(x).sqrt(),
        "topk_softmax": lambda: x,
    }[config.scoring]()
    return score if bias is None else score + bias.double()


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, RoutingConfig, torch.Tensor | None]:
    experts, top_k = draw(st.sampled_from(SHAPES))
    groups, kept = draw(st.sampled_from([(1, 1), GROUPS.get(experts, (1, 1))]))
    if experts // groups * kept < top_k:
        groups, kept = 1, 1
    config = RoutingConfig(
        top_k,
        draw(st.sampled_from(RoutingConfig.SCORINGS)),
        renormalize=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        topk_groups=kept,
    )
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["normal", "ties", "wide", "odd"]))
    logits = torch.randn(7, experts, generator=g)
    if kind == "ties":
        logits = (logits * 2).round()
    elif kind == "wide":
        logits = logits * 60
    elif kind == "odd":
        odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, -3.4028235e38])
        logits = odd[torch.randint(0, 6, logits.shape, generator=g)]
        logits[0] = float("nan")
    bias = None
    if draw(st.booleans()):
        bias = torch.randn(experts, generator=g)
        if kind in ("ties", "odd"):
            bias = bias.round()
    return logits, config, bias


@needs_cxx
@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_the_core_chooses_as_the_reference_does(
    probe: Probe,  # noqa: F811
    case: tuple[torch.Tensor, RoutingConfig, torch.Tensor | None],
) -> None:
    logits, config, bias = case
    want_weights, want = route(logits, config, bias)
    weights, ids = probe.route(logits, config, bias)
    assert ((ids >= 0) & (ids < logits.size(1))).all()
    assert all(len(set(row)) == config.top_k for row in ids.tolist())
    same = (ids == want).all(1)
    # Elsewhere two keys must be so near that the rounding of a score may decide.
    if not same.all():
        finite = logits.isfinite().all(1)
        assert (finite | same).all()
        key = key_of(logits[~same], config, bias)
        a = key.gather(1, ids[~same].long()).sort(1).values
        b = key.gather(1, want[~same].long()).sort(1).values
        if config.num_groups == 1:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert (~same).float().mean() < 0.3
    torch.testing.assert_close(weights[same], want_weights[same], rtol=1e-5, atol=1e-7)
