"""One layer through vLLM's modular kernel on a GPU: numbers, graphs, weights rewritten in place.

With the installed package, or with the stand-in's classes where there is none. It needs nothing but
torch and pytest:

    PYTHONPATH=src:tests python -m pytest tests/test_vllm_gpu.py --noconftest -q
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes import vllm_standin
from fakes.packages import engine
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

OURS = ("weave_moe.integrations.vllm_experts",)
H, I, E, K = 512, 256, 16, 4


@pytest.fixture(scope="module")
def vllm() -> Iterator[SimpleNamespace]:
    with engine("vllm", vllm_standin.modules, OURS) as real, contextlib.ExitStack() as stack:
        moe = "vllm.model_executor.layers.fused_moe"
        if real:
            settings = importlib.import_module("vllm.config")
            stack.enter_context(settings.set_current_vllm_config(settings.VllmConfig()))
            workspace = importlib.import_module("vllm.v1.worker.workspace")
            workspace.init_workspace_manager(torch.device("cuda", torch.cuda.current_device()))
        found = SimpleNamespace(
            activation=importlib.import_module(f"{moe}.activation"),
            config=importlib.import_module(f"{moe}.config"),
            method=importlib.import_module(f"{moe}.unquantized_fused_moe_method"),
            ours=importlib.import_module(OURS[0]),
        )
        assert found.ours.install() is None
        yield found


def known(kind: Any, **values: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    return kind(**{name: value for name, value in values.items() if name in names})


def random_layer(
    vllm: SimpleNamespace, *, top_k: int = K, total: int = E, bias: bool = False, **changes: Any
) -> nn.Module:
    """A loaded bf16 layer of E experts, local ones of `total`."""
    parallel = known(
        vllm.config.FusedMoEParallelConfig,
        **{f"{part}_size": 1 for part in ("tp", "pcp", "dp", "ep", "sp")},
        **{f"{part}_rank": 0 for part in ("tp", "pcp", "dp", "ep")},
        use_ep=False,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    config = known(
        vllm.config.FusedMoEConfig,
        num_experts=total,
        experts_per_token=top_k,
        hidden_dim=H,
        intermediate_size=I,
        intermediate_size_per_partition=I,
        num_local_experts=E,
        num_logical_experts=total,
        activation=vllm.activation.MoEActivation("silu"),
        is_act_and_mul=True,
        device="cuda",
        routing_method=next(iter(vllm.config.RoutingMethodType)),
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        has_bias=bias,
        **changes,
    )
    layer: Any = nn.Module()
    with torch.device("cuda"):
        layer.quant_method = vllm.method.UnquantizedFusedMoEMethod(config)
        layer.quant_method.create_weights(
            layer,
            num_experts=E,
            hidden_size=H,
            intermediate_size_per_partition=I,
            params_dtype=torch.bfloat16,
        )
    g = torch.Generator().manual_seed(0)
    for tensor in layer.parameters():
        scale = tensor.size(-1) ** -0.5 if tensor.dim() == 3 else 1.0
        tensor.data.copy_(torch.randn(tensor.shape, generator=g) * scale)
    layer.moe_config, layer.activation = config, config.activation
    layer.layer_name, layer.shared_experts = "model.layers.0.mlp.experts", None
    layer.global_num_experts, layer.expert_map = total, None
    layer.apply_router_weight_on_input = False
    layer._expert_routing_tables = layer._maybe_init_expert_routing_tables = lambda: None
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.quant_method.weave_verdict.used, layer.quant_method.weave_verdict
    assert layer.quant_method.weave_verdict.detail == "backend cuda"
    return layer


def inputs(tokens: int, total: int = E, top_k: int = K, seed: int = 1) -> list[Tensor]:
    """x, weights and ids on the GPU."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=g).to(torch.bfloat16)
    ids = torch.rand(tokens, total, generator=g).argsort(dim=1)[:, :top_k].to(torch.int32)
    weights = torch.rand(tokens, top_k, generator=g) + 0.1
    return [x.cuda(), weights.cuda(), ids.cuda()]


def run(layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    wanted = inspect.signature(layer.quant_method.apply).parameters
    extra = {n: None for n in ("shared_experts", "shared_experts_input") if n in wanted}
    with torch.inference_mode():
        y: Tensor = layer.quant_method.apply(
            layer=layer, x=x, topk_weights=weights, topk_ids=ids, **extra
        )
    return y


def close(got: Tensor, layer: Any, x: Tensor, weights: Tensor, ids: Tensor, **more: Any) -> None:
    biases = {
        key: getattr(layer, name).detach().cpu()
        for key, name in (("b13", "w13_bias"), ("b2", "w2_bias"))
        if hasattr(layer, name)
    }
    call = check_experts(
        x.cpu(),
        layer.w13_weight.detach().cpu(),
        layer.w2_weight.detach().cpu(),
        weights.cpu(),
        ids.cpu(),
        expert_map=None if layer.expert_map is None else layer.expert_map.cpu(),
        **biases,
        **more,
    )
    want = experts_reference(call).double()
    error = (got.cpu().double() - want).norm(dim=1)
    assert bool((error <= 2**-6 * want.norm(dim=1)).all()), float(error.max())


@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
@pytest.mark.parametrize("bias", [False, True])
def test_numbers(vllm: SimpleNamespace, tokens: int, bias: bool) -> None:
    layer, given = random_layer(vllm, bias=bias), inputs(tokens)
    close(run(layer, *given), layer, *given)


def test_local_experts_of_a_rank(vllm: SimpleNamespace) -> None:
    layer: Any = random_layer(vllm, total=2 * E)
    layer.expert_map = torch.full((2 * E,), -1, dtype=torch.int32, device="cuda")
    layer.expert_map[1::2] = torch.arange(E, dtype=torch.int32, device="cuda")
    given = inputs(33, total=2 * E)
    close(run(layer, *given), layer, *given)


def test_weights_on_the_input(vllm: SimpleNamespace) -> None:
    layer: Any = random_layer(vllm, top_k=1)
    layer.apply_router_weight_on_input = True
    given = inputs(33, top_k=1)
    close(run(layer, *given), layer, *given, weight_on_input=True)


def test_a_captured_graph_follows_inputs_and_rewritten_weights(vllm: SimpleNamespace) -> None:
    """The first run at this size is the capture's own: loading the layer made the kernels."""
    layer: Any = random_layer(vllm)
    static = inputs(48)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(layer, *static)
    for seed in (2, 3):
        fresh = inputs(48, seed=seed)
        for tensor, value in zip(static, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        close(output, layer, *fresh)
    before = output.clone()
    order = torch.randperm(E, generator=torch.Generator().manual_seed(4)).cuda()
    for tensor in (layer.w13_weight.data, layer.w2_weight.data):  # as load balancing does
        tensor.copy_(tensor[order].clone())
    static[2].copy_(order.argsort().to(torch.int32)[static[2].long()])
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(output, before, rtol=0, atol=0)


def test_a_call_waits_for_nothing(vllm: SimpleNamespace) -> None:
    layer, given = random_layer(vllm), inputs(48)
    run(layer, *given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = run(layer, *given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(y, layer, *given)
