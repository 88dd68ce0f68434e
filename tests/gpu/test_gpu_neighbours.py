"""Right and finite with SMs held by another kernel from before the launch until after its end."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import POLICIES, SMALL, Routing, check, expect, make, same_bits, skewed, uniform

from weave_moe.tools.neighbour import held

pytestmark = pytest.mark.gpu

TOKENS = (1, 40, 1100)
expect(SMALL, TOKENS)


@pytest.mark.parametrize("sms", [0, 16, 66, -1])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("routing", [uniform, skewed])
def test_every_policy_with_sms_held(
    gpu: torch.device, sms: int, tokens: int, routing: Routing
) -> None:
    if sms < 0:  # all but one
        sms += torch.cuda.get_device_properties(gpu).multi_processor_count
    case = make(SMALL, tokens, routing=routing)
    want = check(case)
    outs = {policy: torch.full_like(want, float("nan")) for policy in POLICIES}
    stream = torch.cuda.Stream(gpu)
    torch.cuda.synchronize()

    def run_all() -> None:
        with torch.cuda.stream(stream):
            for policy, out in outs.items():
                case.run(policy=policy, out=out)

    run_all()  # buffers of this stream, code of every call
    stream.synchronize()
    for out in outs.values():
        out.fill_(float("nan"))
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    with held(sms, gpu):
        run_all()
        end.record(stream)
        end.synchronize()
    for policy, out in outs.items():
        assert same_bits(out, want), policy


def test_a_graph_with_sms_held(gpu: torch.device) -> None:
    case = make(SMALL, 40, routing=skewed)
    want = check(case)
    stream = torch.cuda.Stream(gpu)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = case.run()
    with torch.cuda.stream(stream):
        graph.replay()
    torch.cuda.synchronize()
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    with held(100, gpu):
        with torch.cuda.stream(stream):
            for _ in range(10):
                graph.replay()
        stream.synchronize()
    assert same_bits(out, want)
