"""One layer through SGLang's runner on a GPU: numbers, graphs, weights rewritten in place.

With the installed package, or with the stand-in's classes where there is none. It needs nothing but
torch and pytest:

    PYTHONPATH=src:tests python -m pytest tests/test_sglang_gpu.py --noconftest -q
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes import sglang_standin
from fakes.packages import engine
from weave_moe.integrations import sglang as plugin
from weave_moe.reference import experts_reference
from weave_moe.shapes import check_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnknownMarkWarning"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs an sm_90 GPU",
    ),
]

OURS = ("weave_moe.integrations.sglang_runner",)
H, I, E, K = 512, 256, 16, 4


@pytest.fixture(scope="module")
def sglang() -> Iterator[SimpleNamespace]:
    with engine("sglang", sglang_standin.modules, OURS) as real:
        srt = "sglang.srt"
        found = SimpleNamespace(
            runner=importlib.import_module(f"{srt}.layers.moe.moe_runner"),
            dispatch=importlib.import_module(f"{srt}.layers.moe.token_dispatcher.standard"),
            topk=importlib.import_module(f"{srt}.layers.moe.topk"),
            method=importlib.import_module(f"{srt}.layers.quantization.unquant"),
            hooks=importlib.import_module(f"{srt}.plugins.hook_registry"),
            ours=importlib.import_module(OURS[0]),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(plugin.VARIABLE, "1")
            plugin.register()
            found.hooks.HookRegistry.apply_hooks()
            if real:  # no server runs, so that there are no arguments of one
                patch.setattr(found.ours, "get_server_args", SimpleNamespace)
            yield found


def random_layer(sglang: SimpleNamespace, top_k: int = K, **changes: Any) -> nn.Module:
    """A bf16 layer that the plugin has taken."""
    layer: Any = nn.Module()
    layer.moe_runner_config = sglang.runner.MoeRunnerConfig(
        num_experts=E,
        num_local_experts=E,
        hidden_size=H,
        intermediate_size_per_partition=I,
        layer_id=0,
        top_k=top_k,
        num_fused_shared_experts=0,
        params_dtype=torch.bfloat16,
        **changes,
    )
    layer.quant_method = sglang.method.UnquantizedFusedMoEMethod()
    with torch.device("cuda"):
        layer.quant_method.create_weights(
            layer=layer,
            num_experts=E,
            hidden_size=H,
            intermediate_size_per_partition=I,
            params_dtype=torch.bfloat16,
            with_bias=False,
        )
    g = torch.Generator().manual_seed(0)
    for tensor in layer.parameters():
        tensor.data.copy_(torch.randn(tensor.shape, generator=g) * tensor.size(-1) ** -0.5)
    layer.quant_method.create_moe_runner(layer, layer.moe_runner_config)
    assert layer.quant_method.weave_verdict.used, layer.quant_method.weave_verdict
    return layer


def inputs(tokens: int, top_k: int = K, seed: int = 1) -> list[Tensor]:
    """x, weights and ids on the GPU; some ids are -1, as of experts elsewhere."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=g).to(torch.bfloat16)
    ids = torch.rand(tokens, E, generator=g).argsort(dim=1)[:, :top_k].to(torch.int32)
    ids[torch.rand(tokens, top_k, generator=g) < 0.2] = -1
    weights = torch.rand(tokens, top_k, generator=g) + 0.1
    return [x.cuda(), weights.cuda(), ids.cuda()]


def run(sglang: SimpleNamespace, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    topk = sglang.topk.StandardTopKOutput(weights, ids, x)
    with torch.inference_mode():
        found: Tensor = layer.quant_method.forward_cuda(
            layer, sglang.dispatch.StandardDispatchOutput(x, None, topk)
        ).hidden_states
    return found


def close(got: Tensor, layer: Any, x: Tensor, weights: Tensor, ids: Tensor, **more: Any) -> None:
    weight = (layer.w13_weight.detach().cpu(), layer.w2_weight.detach().cpu())
    call = check_experts(x.cpu(), *weight, weights.cpu(), ids.cpu(), **more)
    want = experts_reference(call).double()
    error = (got.cpu().double() - want).norm(dim=1)
    assert bool((error <= 2**-6 * want.norm(dim=1)).all()), float(error.max())


@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
@pytest.mark.parametrize("factor", [None, 2.5])
def test_numbers(sglang: SimpleNamespace, tokens: int, factor: float | None) -> None:
    layer, given = random_layer(sglang, routed_scaling_factor=factor), inputs(tokens)
    x, weights, ids = given
    close(run(sglang, layer, *given), layer, x, weights * (factor or 1.0), ids)


def test_weights_on_the_input(sglang: SimpleNamespace) -> None:
    layer = random_layer(sglang, top_k=1, apply_router_weight_on_input=True)
    given = inputs(33, top_k=1)
    close(run(sglang, layer, *given), layer, *given, weight_on_input=True)


def test_a_captured_graph_follows_inputs_and_rewritten_weights(sglang: SimpleNamespace) -> None:
    layer: Any = random_layer(sglang)
    static = inputs(48)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(sglang, layer, *static)
    fresh = inputs(48, seed=2)
    for tensor, value in zip(static, fresh, strict=True):
        tensor.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    close(output, layer, *fresh)
    layer.w2_weight.data.mul_(-1)
    graph.replay()
    torch.cuda.synchronize()
    close(output, layer, *fresh)


def test_a_call_waits_for_nothing(sglang: SimpleNamespace) -> None:
    layer, given = random_layer(sglang, routed_scaling_factor=2.0), inputs(48)
    run(sglang, layer, *given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(sglang, layer, *given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
