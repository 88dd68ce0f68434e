"""Graphs and streams: captures, replays with other inputs, and calls beside one another."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from gpu_cases import (
    SMALL,
    TARGET,
    Case,
    assert_right,
    check,
    expect,
    holes,
    make,
    same_bits,
    skewed,
)
from torch import Tensor

pytestmark = pytest.mark.gpu

TOKENS = (1, 12, 40, 200, 1100)
expect(SMALL, TOKENS)


class Replayed:
    """A captured call whose inputs are buffers of its own, to be written before a replay."""

    def __init__(self, case: Case, *, policy: str = "auto", layers: int = 1) -> None:
        self.valid = torch.tensor(case.tokens, dtype=torch.int32, device=TARGET.device)
        x, _, _, weights, ids = case.args
        self.case = case.with_(
            x=x.clone(), weights=weights.clone(), ids=ids.clone(), num_valid_tokens=self.valid
        )
        self.case.run(policy=policy)  # compiled and loaded
        torch.cuda.synchronize()
        self.out = torch.full_like(x, float("nan"))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(layers):
                self.out.copy_(self.case.run(policy=policy))

    def replay(self, case: Case, valid: int | None = None) -> Tensor:
        """The result of a replay with another case's tokens and routing."""
        for mine, new in zip(self.case.args, case.args, strict=True):
            if mine is not new:
                mine.copy_(new)
        self.valid.fill_(case.tokens if valid is None else valid)
        self.out.fill_(float("nan"))
        self.graph.replay()
        return self.out.clone()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("policy", ["steal", "counter", "static_strided"])
def test_replays_with_other_inputs_routing_and_counts(
    gpu: torch.device, tokens: int, policy: str
) -> None:
    replayed = Replayed(make(SMALL, tokens), policy=policy)
    cases = [make(SMALL, tokens, seed=seed, routing=skewed) for seed in range(5)]
    cases.append(make(SMALL, tokens, routing=holes))
    want = [check(case) for case in cases]
    for i in range(100):
        case, whole = cases[i % len(cases)], want[i % len(cases)]
        valid = (tokens, tokens - 1, 0, 200, -3, 1, tokens + 5, tokens // 2, 256)[i % 9]
        got = replayed.replay(case, valid)
        live = min(max(valid, 0), tokens)
        assert same_bits(got[:live], whole[:live]), (i, valid)
        assert not got[live:].any(), (i, valid)


def test_several_launches_in_one_graph(gpu: torch.device) -> None:
    replayed = Replayed(make(SMALL, 40), layers=5)
    for seed in range(20):
        case = make(SMALL, 40, seed=seed)
        assert same_bits(replayed.replay(case), case.run())


def test_a_graph_for_many_tokens_serves_few(gpu: torch.device) -> None:
    replayed = Replayed(make(SMALL, 200))
    for valid in (1, 3, 12, 40, 199):
        few = make(SMALL, valid)
        padded = make(SMALL, 200)
        for mine, new in zip(padded.args, few.args, strict=True):
            if mine is not new:
                mine[:valid] = new
        got = replayed.replay(padded, valid)
        assert same_bits(got[:valid], check(few))


def test_a_graph_whose_layers_are_of_several_sizes(gpu: torch.device) -> None:
    # Later layers outgrow the buffers of earlier ones within one capture.
    cases = [make(SMALL, tokens) for tokens in (1, 40, 1100, 12, 200)]
    want = [check(case) for case in cases]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [case.run() for case in cases]
    for _ in range(10):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for got, expected in zip(outs, want, strict=True):
            assert same_bits(got, expected)


def test_two_graphs_between_eager_calls(gpu: torch.device) -> None:
    one, two = Replayed(make(SMALL, 12)), Replayed(make(SMALL, 200, routing=skewed))
    eager = make(SMALL, 40)
    want = check(eager)
    for seed in range(20):
        first, second = make(SMALL, 12, seed=seed), make(SMALL, 200, seed=seed)
        got_first, a = one.replay(first), eager.run()
        got_second, b = two.replay(second), eager.run()
        assert same_bits(a, want)
        assert same_bits(b, want)
        assert same_bits(got_first, first.run())
        assert same_bits(got_second, second.run())


def test_a_graph_stays_right_after_eager_calls_have_grown(gpu: torch.device) -> None:
    replayed = Replayed(make(SMALL, 12))
    for tokens in (40, 1100, 3000):
        check(make(SMALL, tokens))
        torch.cuda.empty_cache()
        junk = torch.full((1 << 26,), 255, dtype=torch.uint8, device=gpu)
        case = make(SMALL, 12, seed=tokens)
        got = replayed.replay(case)
        del junk
        assert_right(got, case)


def test_a_kernel_that_is_not_loaded_is_a_clear_error_in_a_capture(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weave_moe.backends import cuda

    case = make(SMALL, 12)
    want = case.run()
    torch.cuda.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "_prepared", set())
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match=r"warmup\(shape, tokens=12\)"),
            torch.cuda.graph(graph),
        ):
            case.run()
    assert same_bits(case.run(), want)


_FRESH = """
import torch, weave_moe
from weave_moe.shapes import LayerShape

torch.manual_seed(0)
H, I, E, k, T = 512, 192, 16, 4, 12
x = torch.randn(T, H, device="cuda").bfloat16()
w13 = (torch.randn(E, 2 * I, H, device="cuda") / H**0.5).bfloat16()
w2 = (torch.randn(E, H, I, device="cuda") / I**0.5).bfloat16()
weights = torch.rand(T, k, device="cuda")
ids = torch.randint(E, (T, k), device="cuda")
weave_moe.warmup(LayerShape(H, I, E, k, "bfloat16"), tokens=T)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = weave_moe.fused_experts(x, w13, w2, weights, ids, backend="cuda")
graph.replay()
eager = weave_moe.fused_experts(x, w13, w2, weights, ids, backend="cuda")
assert torch.equal(out, eager)
truth = weave_moe.fused_experts(x, w13, w2, weights, ids, backend="reference")
assert float((out.float() - truth.float()).norm() / truth.float().norm()) < 1e-2
print("right")
"""


def test_a_processs_first_launch_may_be_in_a_capture_after_warmup(gpu: torch.device) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FRESH], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "right\n", done.stderr[-3000:]


def test_streams_side_by_side(gpu: torch.device) -> None:
    cases = [make(SMALL, tokens, routing=skewed) for tokens in (1100, 200, 40)]
    want = [check(case) for case in cases]
    streams = [torch.cuda.Stream(gpu) for _ in cases]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in cases]
    for _ in range(30):
        for case, stream, into in zip(cases, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(case.run())
    torch.cuda.synchronize()
    for got, expected in zip(results, want, strict=True):
        assert sum(same_bits(value, expected) for value in got) == 30


def test_threads_side_by_side(gpu: torch.device) -> None:
    cases = [make(SMALL, tokens) for tokens in (12, 1100, 40, 200)]
    want = [check(case) for case in cases]
    torch.cuda.synchronize()
    bad: list[str] = []

    def work(number: int, own_stream: bool) -> None:
        try:
            stream = torch.cuda.Stream(gpu) if own_stream else torch.cuda.default_stream(gpu)
            with torch.cuda.stream(stream):
                for i in range(80):
                    at = (i + number) % len(cases)
                    got = cases[at].run()
                    # Takes whatever memory another thread has just given back, and fills it.
                    torch.full((256, 512), float("nan"), device=gpu)
                    if not same_bits(got, want[at]):
                        bad.append(f"thread {number}, call {i}")
        except Exception as error:
            bad.append(repr(error))

    # Two with streams of their own, two that share one.
    threads = [threading.Thread(target=work, args=(n, n < 2)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad, bad[:5]


def test_calls_that_follow_each_others_results(gpu: torch.device) -> None:
    # Each launch may be placed before the one whose output it reads has ended.
    case = make(SMALL, 12)
    want = [case.args[0]]
    for _ in range(3):
        want.append(check(case.with_(x=want[-1])))
        torch.cuda.synchronize()
    for _ in range(20):
        x = case.args[0]
        for _ in range(3):
            x = case.with_(x=x).run()
        assert same_bits(x, want[-1])


def test_ids_that_the_kernel_before_wrote(gpu: torch.device) -> None:
    case = make(SMALL, 40)
    others = [make(SMALL, 40, seed=seed, routing=skewed) for seed in range(4)]
    want = [case.with_(ids=other.args[4]).run() for other in others]
    ids = case.args[4].clone()
    moving = case.with_(ids=ids)
    torch.cuda.synchronize()
    results = []
    for i in range(100):
        ids.copy_(others[i % 4].args[4])
        results.append(moving.run())
    for i, got in enumerate(results):
        assert same_bits(got, want[i % 4]), i
