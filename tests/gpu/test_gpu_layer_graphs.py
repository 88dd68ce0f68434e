"""Whole layers in CUDA graphs: inputs that change, launches, and nobody who waits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_cases import TARGET, same_bits
from layer_cases import (
    Recorded,
    cases_of,
    check_layer,
    differs,
    expect_layers,
    make_layer,
    ordered_sums,
    recorded,
)
from layer_tables import (
    DENSE,
    EACH,
    LAYERS,
    SHORT,
    SOME,
    WHOLE,
)
from torch import Tensor

import weave_moe

pytestmark = pytest.mark.gpu

expect_layers([*SHORT.values(), *WHOLE.values(), LAYERS["given logits"]])


@pytest.mark.parametrize(("name", "tokens"), cases_of(WHOLE, (1, *EACH), calls=4))
@ordered_sums
def test_replays_with_other_inputs_and_counts(name: str, tokens: int) -> None:
    exact = not TARGET.on_gpu
    cases = [make_layer(LAYERS[name], tokens, seed=seed, exact=exact) for seed in range(5)]
    want = [check_layer(case) for case in cases]
    replay = recorded(cases[0])
    for i in range(200 if TARGET.on_gpu else 14):
        valid = (tokens, tokens - 1, 0, 200, -3, 1, tokens + 5, tokens // 2, 256)[i % 9]
        got = replay(cases[i % 5], valid)
        assert not differs(got, want[i % 5], cases[i % 5], valid), (i, valid)


@ordered_sums
def test_several_graphs_between_eager_calls() -> None:
    exact = not TARGET.on_gpu
    names = {"qwen": 12, "deepseek": 40, "gpt-oss": 3, "shared 200 gated": 300}
    replays, cases, want = {}, {}, {}
    for name, tokens in names.items():
        cases[name] = [make_layer(LAYERS[name], tokens, seed=s, exact=exact) for s in range(3)]
        want[name] = [check_layer(case) for case in cases[name]]
        replays[name] = recorded(cases[name][0])
    eager = make_layer(LAYERS["llama4"], SOME)
    expected = check_layer(eager)
    for i in range(30 if TARGET.on_gpu else 3):
        for name, tokens in names.items():
            valid = (tokens, tokens // 2, 1)[i % 3]
            got = replays[name](cases[name][i % 3], valid)
            between = eager.routed()
            assert not differs(got, want[name][i % 3], cases[name][i % 3], valid), (name, i)
            assert all(same_bits(a, b) for a, b in zip(between, expected, strict=True)), (name, i)


@ordered_sums
def test_graphs_and_eager_calls_of_one_workspace() -> None:
    # Few and many tokens: buffers of the workspace grow after the captures.
    exact, workspace = not TARGET.on_gpu, weave_moe.Workspace(steal="one", min_steal=2)
    names = {"qwen": 12, "deepseek": 40, "shared 384 gated": 300, "fp16 logits": 3}
    cases = {
        name: [make_layer(LAYERS[name], tokens, seed=seed, exact=exact) for seed in range(3)]
        for name, tokens in names.items()
    }
    want = {name: [check_layer(case) for case in cases[name]] for name in names}
    replays = {}
    for name in names:  # recorded between eager calls
        cases[name][1].run(workspace=workspace)
        replays[name] = recorded(cases[name][0], workspace=workspace)
    for i in range(30 if TARGET.on_gpu else 2):
        for name, tokens in names.items():
            mine, other = i % 3, (i + 1) % 3
            before = cases[name][other].routed(workspace=workspace)
            valid = (tokens, tokens // 2, 1)[mine]
            got = replays[name](cases[name][mine], valid)
            after = cases[name][other].routed(workspace=workspace)
            assert not differs(got, want[name][mine], cases[name][mine], valid), (name, i)
            for eager in (before, after):
                assert not differs(eager, want[name][other], cases[name][other], tokens), (name, i)


def test_layers_of_several_sizes_in_one_graph() -> None:
    # Later layers outgrow the buffers of earlier ones within one capture.
    cases = [make_layer(one, t) for one in SHORT.values() for t in (1, 40, 300, 3)]
    want = [check_layer(case) for case in cases]
    graph = Recorded(lambda: tuple(t for case in cases for t in case.routed()))
    for _ in range(3):
        got = graph.replay()
        for i, expected in enumerate(want):
            assert all(same_bits(a, b) for a, b in zip(got[3 * i :], expected, strict=False)), i


def test_layers_that_follow_each_others_results() -> None:
    # Each launch may be placed before the one whose output it routes has ended.
    case = make_layer(DENSE, 12)

    def chain() -> tuple[Tensor, ...]:
        x = case.x
        for _ in range(4):
            x = case.with_(x=x).run()
        return (x,)

    x = case.x
    for _ in range(4):
        x, _, _ = check_layer(case.with_(x=x))
        if TARGET.on_gpu:
            torch.cuda.synchronize()
    graph = Recorded(chain)
    for _ in range(10):
        assert same_bits(chain()[0], x)
        assert same_bits(graph.replay()[0], x)


def launches(work: Callable[[], Any]) -> int:
    """Kernels that a CUDA graph of `work` launches."""
    driver = ctypes.CDLL("libcuda.so.1")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds.count(0)  # CU_GRAPH_NODE_TYPE_KERNEL


def launches_of_a_call(call: Callable[[], Any]) -> int:
    """Of one more call in a graph: the setting up of the first one's buffers is not counted."""
    call()  # compiled and loaded
    return launches(lambda: [call() for _ in range(3)]) - launches(lambda: [call(), call()])


@pytest.mark.parametrize("tokens", EACH)
@pytest.mark.parametrize("name", SHORT)
def test_numbers_of_launches(gpu: torch.device, name: str, tokens: int) -> None:
    case = make_layer(SHORT[name], tokens)
    # Logits, sort, experts, combine.
    assert launches_of_a_call(case.run) == (1 if tokens <= 256 else 4)
    padded = case.with_(num_valid_tokens=torch.tensor(tokens // 2, device=gpu))
    # With room for many, the launch for few goes before them, and the device chooses.
    assert launches_of_a_call(padded.run) == (1 if tokens <= 256 else 5)


@pytest.mark.parametrize("tokens", EACH)
def test_given_logits_need_no_launch_of_their_own(gpu: torch.device, tokens: int) -> None:
    case = make_layer(LAYERS["given logits"], tokens)
    assert launches_of_a_call(case.run) == (1 if tokens <= 256 else 3)
    padded = case.with_(num_valid_tokens=torch.tensor(tokens // 2, device=gpu))
    assert launches_of_a_call(padded.run) == (1 if tokens <= 256 else 4)


@pytest.mark.parametrize("tokens", EACH)
def test_nobody_waits_for_the_device(gpu: torch.device, tokens: int) -> None:
    for one in SHORT.values():
        case = make_layer(one, tokens).with_(num_valid_tokens=torch.tensor(tokens, device=gpu))
        case.routed()
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            case.routed()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
