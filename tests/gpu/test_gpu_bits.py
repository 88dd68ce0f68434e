"""Equal bits: whoever runs a task, whenever, and whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import (
    POLICIES,
    SMALL,
    Routing,
    check,
    expect,
    in_parts,
    make,
    same_bits,
    shape,
    skewed,
    uniform,
)

import weave_moe
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


KNOBS: tuple[dict[str, Any], ...] = (
    *({"victim": "largest"}, {"victim": "random"}, {"steal": "half"}, {"steal": "one"}),
    *({"min_steal": 1}, {"min_steal": 3}, {"min_steal": 1000}),
    *({"batch": 1}, {"batch": 2}, {"batch": 4}),
    {"victim": "random", "steal": "one", "min_steal": 2, "batch": 2},
)


@pytest.mark.parametrize("policy", ["window", "steal"])
@pytest.mark.parametrize("tokens", [1, 12, 40, 200, 1100])
def test_queue_knobs_give_equal_bits(tokens: int, policy: str) -> None:
    case = make(SMALL, tokens, routing=skewed)
    want = check(case, policy="counter")
    for knobs in KNOBS:
        workspace = weave_moe.Workspace(**knobs)
        for _ in range(3):
            assert same_bits(case.run(policy=policy, workspace=workspace), want), knobs


PARTS_TOKENS = (1, 16, 64)
expect(SMALL, PARTS_TOKENS, parts=2)


@pytest.mark.parametrize("tokens", PARTS_TOKENS)
@pytest.mark.parametrize(("up", "down"), [(2, 1), (1, 2), (2, 2), (3, 3)])
def test_sums_in_k_ranges(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, tokens: int, up: int, down: int
) -> None:
    # No plan has them now. The two steps of the intermediate size make two ranges of three.
    case = make(SMALL, tokens, routing=skewed)
    whole = check(case)
    in_parts(monkeypatch, up, down)
    workspace = weave_moe.Workspace()
    want = check(case, workspace=workspace)
    # The kernel has left partial sums: these are its results, not those of a whole sum.
    sums = workspace._cuda_buffers[gpu.index].sums  # type: ignore[attr-defined]
    sums.fill_(255)
    assert same_bits(case.run(workspace=workspace), want)
    assert bool((sums.view(torch.int32) != -1).any())
    for _ in range(5):
        assert same_bits(case.run(), want)
    for policy in POLICIES:
        for _ in range(2):
            assert same_bits(case.run(policy=policy), want), policy
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = case.run()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out, want)
    # Whole sums again, in the same buffers.
    monkeypatch.undo()
    assert same_bits(case.run(), whole)
    assert same_bits(case.run(workspace=workspace), whole)
