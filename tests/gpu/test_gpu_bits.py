"""Equal bits: whoever runs a task, whenever, and whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import (
    POLICIES,
    SMALL,
    Routing,
    check,
    expect,
    make,
    same_bits,
    shape,
    skewed,
    uniform,
)

from weave_moe.shapes import LayerShape

pytestmark = pytest.mark.gpu

TOKENS = (1, 3, 12, 40, 200, 300, 1100)
expect(SMALL, TOKENS)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("routing", [uniform, skewed])
def test_policies_give_equal_bits(tokens: int, routing: Routing) -> None:
    case = make(SMALL, tokens, routing=routing)
    want = check(case)
    for policy in POLICIES:
        for _ in range(5):
            assert same_bits(case.run(policy=policy), want), policy


@pytest.mark.parametrize("tokens", TOKENS)
def test_fifty_calls_give_equal_bits(tokens: int) -> None:
    case = make(SMALL, tokens, routing=skewed)
    want = check(case)
    results = [case.run() for _ in range(50)]
    assert sum(same_bits(got, want) for got in results) == 50


LONG_SUMS = shape(2048, 768, 16, 4)
expect(LONG_SUMS, TOKENS)


@pytest.mark.parametrize("s", [SMALL, LONG_SUMS], ids=["small", "qwen"])
def test_a_tokens_bits_do_not_depend_on_its_batch(s: LayerShape) -> None:
    # The batches run in different kernels: other tiles, widths, rings and plans.
    whole = make(s, max(TOKENS))
    want = check(whole)
    for tokens in TOKENS[:-1]:
        for start in (0, 17, max(TOKENS) - tokens):
            part = whole.rows(slice(start, start + tokens))
            assert same_bits(part.run(), want[start : start + tokens]), (tokens, start)


def test_a_tokens_bits_do_not_depend_on_its_place() -> None:
    case = make(SMALL, 200, routing=skewed)
    want = check(case)
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        order = torch.randperm(200, generator=g).to(want.device)
        assert same_bits(case.rows(order).run(), want[order])
