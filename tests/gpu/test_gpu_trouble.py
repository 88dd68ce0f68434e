"""Launches that cannot end well: they end, they say so, and the next call is right."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from gpu_cases import (
    SMALL,
    Case,
    assert_right,
    check,
    expect,
    make,
    poison_scratch,
    same_bits,
    shape,
    skewed,
)
from layer_cases import check_layer, differs, expect_layers, layer, make_layer, recorded
from layer_tables import EACH, LAYERS, MANY

import weave_moe
from weave_moe import KernelError, RoutingConfig

pytestmark = pytest.mark.gpu

# One token whose gate_up takes far longer than the first look at its result.
SLOW = shape(4096, 2048, 4, 1)
expect(SLOW, [1])
expect(SMALL, [1, 12, 40, 1100])
ROUTED = {
    "qwen": LAYERS["qwen"],
    "deepseek": LAYERS["deepseek"],
    "slow": layer(SLOW.hidden, SLOW.intermediate, SLOW.experts, RoutingConfig(1), [1]),
}
ROUTED_TOKENS = [("slow", 1), *((name, t) for name in ("qwen", "deepseek") for t in EACH)]
expect_layers(ROUTED.values())


def impatient() -> weave_moe.Workspace:
    """A workspace whose launches look once at what they wait for."""
    workspace = weave_moe.Workspace()
    workspace._spin_limit = 1  # type: ignore[attr-defined]
    return workspace


def gives_up(case: Case, workspace: weave_moe.Workspace) -> torch.Tensor:
    out = torch.ones_like(case.args[0])
    case.run(workspace=workspace, out=out)
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("residual", [False, True])
def test_a_launch_that_gives_up(gpu: torch.device, residual: bool) -> None:
    case = make(SLOW, 1, residual=residual)
    want = check(case)
    weave_moe.check()
    workspace = impatient()
    out = gives_up(case, workspace)
    assert bool(out.isnan().all())
    with pytest.raises(KernelError, match="waited too long"):
        weave_moe.check()
    weave_moe.check()  # said once
    workspace._spin_limit = 8_000_000  # type: ignore[attr-defined]
    for _ in range(3):
        assert same_bits(case.run(workspace=workspace), want)
        assert same_bits(case.run(), want)
    torch.cuda.synchronize()
    weave_moe.check()


def test_the_next_call_says_so_too(gpu: torch.device) -> None:
    case = make(SLOW, 1)
    want = check(case)
    gives_up(case, impatient())
    with pytest.raises(KernelError, match="gave up"):
        case.run()
    assert same_bits(case.run(), want)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("tokens", [40, 1100])
def test_impatient_launches_of_any_size_are_right_or_nan(
    gpu: torch.device, tokens: int, residual: bool
) -> None:
    # Whether a wait is lost depends on time here: with luck, none is.
    case = make(SMALL, tokens, residual=residual)
    want = check(case)
    for _ in range(10):
        out = gives_up(case, impatient())
        try:
            weave_moe.check()
        except KernelError:
            assert bool(out.isnan().all())
        else:
            assert same_bits(out, want)
        assert same_bits(case.run(), want)


def test_a_padded_call_that_gives_up(gpu: torch.device) -> None:
    # Of both kinds of launch that it has one runs; all rows are NaN or right, and the next call is.
    case = make(SMALL, 1100)
    want = check(case)
    for valid in (5, 256, 257, 1000):
        padded = case.with_(num_valid_tokens=torch.tensor(valid, device=gpu))
        for _ in range(5):
            out = gives_up(padded, impatient())
            try:
                weave_moe.check()
            except KernelError:
                assert bool(out.isnan().all())
            else:
                assert same_bits(out[:valid], want[:valid])
                assert not out[valid:].any()
            got = padded.run()
            assert same_bits(got[:valid], want[:valid])
            assert not got[valid:].any()


def right_or_nan(out: torch.Tensor, want: torch.Tensor) -> bool:
    """Waits, and holds the output of a call to that; whether it gave up, and so is NaN."""
    torch.cuda.synchronize()
    try:
        weave_moe.check()
    except KernelError:
        assert bool(out.isnan().all()), "gave up, and not all of it is NaN"
        return True
    assert torch.equal(out, want), "wrong, and nothing said so"
    return False


@pytest.mark.parametrize(("name", "tokens"), ROUTED_TOKENS)
def test_a_layer_that_gives_up(gpu: torch.device, name: str, tokens: int) -> None:
    # A workspace that is set back numbers its launches anew: the words that the failed launch's
    # router left would carry the next one's number, and are another routing's.
    failing, case = (make_layer(ROUTED[name], tokens, seed=seed) for seed in range(2))
    (failing_y, _, failing_ids), want = check_layer(failing), check_layer(case)
    assert tokens == 1 or not torch.equal(failing_ids, want[2])
    replay = recorded(case)
    failed = 0
    for i in range(10):
        workspace = impatient()
        out = torch.ones_like(failing_y)
        failing.run(workspace=workspace, out=out)
        if i % 2:  # before the host knows: a graph has buffers of its own
            assert not differs(replay(case, tokens), want, case, tokens)
        failed += right_or_nan(out, failing_y)
        workspace._spin_limit = 8_000_000  # type: ignore[attr-defined]
        for got in (case.routed(workspace=workspace), case.routed(), replay(case, tokens)):
            assert not differs(got, want, case, tokens)
    print(f"{failed} of 10 gave up")
    assert failed == 10 or name != "slow"


@pytest.mark.parametrize(("name", "tokens"), ROUTED_TOKENS)
def test_a_graph_of_an_impatient_layer(gpu: torch.device, name: str, tokens: int) -> None:
    # A replay sets its own buffers back, so each has the number of the one before, failed or not.
    cases = [make_layer(ROUTED[name], tokens, seed=seed) for seed in range(2)]
    want = [check_layer(case)[0] for case in cases]
    x, workspace = cases[0].x.clone(), impatient()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cases[0].with_(x=x).run(workspace=workspace)
    for i in range(10):
        x.copy_(cases[i % 2].x)
        out.fill_(1)
        graph.replay()
        right_or_nan(out, want[i % 2])
    assert same_bits(cases[1].run(), want[1])


def test_a_padded_layer_that_gives_up(gpu: torch.device) -> None:
    case = make_layer(ROUTED["qwen"], MANY)
    want = check_layer(case)
    for valid in (5, 256, 257):
        padded = case.with_(num_valid_tokens=torch.tensor(valid, device=gpu))
        right = want[0].clone()
        right[valid:] = 0
        for _ in range(5):
            out = torch.ones_like(right)
            padded.run(workspace=impatient(), out=out)
            right_or_nan(out, right)
            assert not differs(padded.routed(), want, padded, valid)


def test_launches_behind_one_that_gives_up(gpu: torch.device) -> None:
    # All are in the stream before the first runs, so the host cannot reset anything between them.
    slow, small = make(SLOW, 1), make(SMALL, 1100)
    want = check(small)
    workspace = impatient()
    gives_up(slow, workspace)
    with pytest.raises(KernelError):
        weave_moe.check()
    workspace._spin_limit = 8_000_000  # type: ignore[attr-defined]
    small.run(workspace=workspace)  # buffers
    torch.cuda.synchronize()
    poison_scratch()
    outs = [torch.ones_like(want) for _ in range(4)]
    torch.cuda._sleep(50_000_000)
    workspace._spin_limit = 1  # type: ignore[attr-defined]
    slow.run(workspace=workspace)
    workspace._spin_limit = 8_000_000  # type: ignore[attr-defined]
    for out in outs:
        small.run(workspace=workspace, out=out)
    torch.cuda.synchronize()
    with pytest.raises(KernelError):
        weave_moe.check()
    for out in outs:
        right = same_bits(out, want)
        assert right or bool(out.isnan().all()), "neither right nor NaN"
    assert same_bits(small.run(workspace=workspace), want)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("workers", [1, 7])
@pytest.mark.parametrize("tokens", [1, 40, 1100])
def test_a_launch_that_meets_another_ones_workers_always_says_so(
    gpu: torch.device, tokens: int, workers: int, residual: bool
) -> None:
    case = make(SMALL, tokens, routing=skewed, residual=residual)
    want = check(case)
    workspace = weave_moe.Workspace()
    case.run(workspace=workspace)
    torch.cuda.synchronize()
    weave_moe.check()
    held = workspace._cuda_buffers[gpu.index]  # type: ignore[attr-defined]
    for _ in range(3):
        # As a launch leaves it of which so many blocks have entered and none has left.
        held.counters.view(torch.int32)[0] = workers
        out = gives_up(case, workspace)
        assert bool(out.isnan().all())
        with pytest.raises(KernelError, match="two launches used one workspace at the same time"):
            weave_moe.check()
        weave_moe.check()  # said once
        assert same_bits(case.run(workspace=workspace), want)
        torch.cuda.synchronize()
        weave_moe.check()


@pytest.mark.parametrize("tokens", [40, 1100])
def test_two_launches_in_one_workspace_are_right_or_detected(
    gpu: torch.device, tokens: int
) -> None:
    # How often they meet is up to the hardware: never, with luck. What is wrong is always said.
    # Of different routings and inputs, so that one's plan is wrong for the other.
    cases = [make(SMALL, tokens, seed=seed, routing=skewed) for seed in range(2)]
    wants = [check(case) for case in cases]
    want, case = wants[0], cases[0]
    workspace = weave_moe.Workspace()
    workspace._spin_limit = 200_000  # type: ignore[attr-defined]  # tenths of a second, not seconds
    case.run(workspace=workspace)
    streams = [torch.cuda.Stream(gpu) for _ in range(2)]
    torch.cuda.synchronize()
    weave_moe.check()
    for _ in range(20):
        outs = [torch.ones_like(want) for _ in range(4)]
        torch.cuda.synchronize()
        error = None
        try:
            for i, out in enumerate(outs):
                with torch.cuda.stream(streams[i % 2]):
                    cases[i % 2].run(workspace=workspace, out=out)
            torch.cuda.synchronize()
            weave_moe.check()
        except KernelError as caught:
            error = caught
        torch.cuda.synchronize()
        if error is None:
            for i, out in enumerate(outs):
                assert same_bits(out, wants[i % 2]), "wrong, and nothing said so"
        else:
            with suppress(KernelError):  # launches that ran on after the error was raised
                weave_moe.check()
        assert same_bits(case.run(workspace=workspace), want)
        torch.cuda.synchronize()
        weave_moe.check()


def test_an_error_does_not_reach_a_graph(gpu: torch.device) -> None:
    case = make(SMALL, 40)
    want = check(case)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = case.run()
    gives_up(make(SLOW, 1), impatient())
    out.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, want)
    with pytest.raises(KernelError):
        weave_moe.check()
    out.fill_(1)
    graph.replay()
    assert_right(out, case)


def test_a_workspace_in_a_graph_and_eagerly(gpu: torch.device) -> None:
    workspace = weave_moe.Workspace()
    case = make(SMALL, 12)
    want = case.run(workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(workspace=workspace)
    large = make(SMALL, 1100)
    for _ in range(3):
        assert_right(large.run(workspace=workspace), large)  # outgrows what the graph may use
        torch.cuda.empty_cache()
        junk = torch.full((1 << 26,), 255, dtype=torch.uint8, device=gpu)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        del junk
        assert same_bits(out, want)


def test_a_workspace_first_used_in_a_graph(gpu: torch.device) -> None:
    workspace = weave_moe.Workspace()
    case = make(SMALL, 12)
    want = case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(workspace=workspace)
    # Nothing of the graph has run yet, its zeroing of the counters included.
    assert same_bits(case.run(workspace=workspace), want)
    graph.replay()
    assert same_bits(out, want)
