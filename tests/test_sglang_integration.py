"""SGLang's plugin against SGLang's classes: those of the installed package, else a stand-in's."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes import sglang_standin
from fakes.packages import engine, lines_of
from generators import TOLERANCE, Case, assert_rows_close, experts_case, generator
from weave_moe.integrations import sglang as plugin
from weave_moe.reference import experts_reference
from weave_moe.shapes import Activation

OURS = ("weave_moe.integrations.sglang_runner",)


@pytest.fixture(scope="module")
def sglang() -> Iterator[SimpleNamespace]:
    """SGLang's modules with the plugin's hook in place."""
    with engine("sglang", sglang_standin.modules, OURS) as real:
        srt = "sglang.srt"
        found = SimpleNamespace(
            real=real,
            runner=importlib.import_module(f"{srt}.layers.moe.moe_runner"),
            triton=importlib.import_module(f"{srt}.layers.moe.moe_runner.triton"),
            dispatch=importlib.import_module(f"{srt}.layers.moe.token_dispatcher.standard"),
            topk=importlib.import_module(f"{srt}.layers.moe.topk"),
            utils=importlib.import_module(f"{srt}.layers.moe.utils"),
            method=importlib.import_module(f"{srt}.layers.quantization.unquant"),
            hooks=importlib.import_module(f"{srt}.plugins.hook_registry"),
            arguments=importlib.import_module(f"{srt}.server_args"),
            ours=importlib.import_module(OURS[0]),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(plugin.VARIABLE, "1")
            plugin.register()
            found.hooks.HookRegistry.apply_hooks()
        yield found


@pytest.fixture
def on_cpu(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang as a server has it, but for the device: the layer's engine for CPUs takes its part."""
    monkeypatch.setattr(sglang.ours, "_device", lambda: "cpu")
    monkeypatch.setattr(sglang.ours, "get_server_args", SimpleNamespace)
    return sglang


def config_of(sglang: SimpleNamespace, **changes: Any) -> Any:
    """SGLang's MoeRunnerConfig of a layer: 64 hidden, 32 intermediate, 4 experts, 2 a token."""
    values = {
        "num_experts": 4,
        "num_local_experts": 4,
        "hidden_size": 64,
        "intermediate_size_per_partition": 32,
        "layer_id": 3,
        "top_k": 2,
        "num_fused_shared_experts": 0,
        "params_dtype": torch.float32,
        **changes,
    }
    return sglang.runner.MoeRunnerConfig(**values)


def layer_of(sglang: SimpleNamespace, case: Case, **changes: Any) -> nn.Module:
    """A layer with a case's weights, as SGLang makes it; `.quant_method` runs it."""
    experts, _, hidden = case.w13.shape
    layer: Any = nn.Module()
    layer.moe_runner_config = config_of(
        sglang,
        num_experts=experts,
        num_local_experts=experts,
        hidden_size=hidden,
        intermediate_size_per_partition=case.w2.size(2),
        top_k=case.topk_ids.size(1),
        params_dtype=case.x.dtype,
        **changes,
    )
    layer.quant_method = sglang.method.UnquantizedFusedMoEMethod()
    layer.quant_method.create_weights(
        layer=layer,
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size_per_partition=case.w2.size(2),
        params_dtype=case.x.dtype,
        with_bias=False,
    )
    layer.w13_weight.data.copy_(case.w13)
    layer.w2_weight.data.copy_(case.w2)
    layer.quant_method.create_moe_runner(layer, layer.moe_runner_config)
    return layer


def run(sglang: SimpleNamespace, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """One forward of the layer's experts, as on a GPU."""
    topk = sglang.topk.StandardTopKOutput(weights, ids, torch.empty(0))
    dispatched = sglang.dispatch.StandardDispatchOutput(x, None, topk)
    with torch.inference_mode():
        combined = layer.quant_method.forward_cuda(layer, dispatched)
    assert isinstance(combined, sglang.dispatch.StandardCombineInput)
    return combined.hidden_states


def run_case(sglang: SimpleNamespace, layer: Any, case: Case) -> Tensor:
    return run(sglang, layer, case.x, case.topk_weights, case.topk_ids)


def close(got: Tensor, case: Case, **changes: Any) -> None:
    want = experts_reference(case.with_(**changes).call())
    assert_rows_close(got, want, TOLERANCE[case.x.dtype])


# ---- The switch ---------------------------------------------------------------------------------


def test_sglang_finds_register_by_its_entry_point() -> None:
    points = metadata.entry_points(group=plugin.GROUP)
    (point,) = [point for point in points if point.name == plugin.PLUGIN]
    assert point.load() is plugin.register


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_it_imports_nothing_and_says_nothing(value: str | None) -> None:
    code = (
        "import sys\n"
        "from weave_moe.integrations.sglang import register\n"
        "register()\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('vllm', 'sglang')]\n"
        "assert 'weave_moe.integrations.sglang_runner' not in sys.modules\n"
    )
    environment = {key: kept for key, kept in os.environ.items() if key != plugin.VARIABLE}
    if value is not None:
        environment[plugin.VARIABLE] = value
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_another_value_of_the_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "on")
    with pytest.raises(ValueError, match=f"{plugin.VARIABLE} must be 1 .on. or 0 .off., got 'on'"):
        plugin.register()


def test_registering_again_changes_nothing(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "1")
    hooks = len(on_cpu.hooks.HookRegistry._hooks[on_cpu.ours.HOOKED])
    plugin.register()
    on_cpu.hooks.HookRegistry.apply_hooks()
    assert len(on_cpu.hooks.HookRegistry._hooks[on_cpu.ours.HOOKED]) == hooks == 1
    with lines_of("sglang.weave_moe") as said:
        layer_of(on_cpu, experts_case(5, 64, 32))
    assert len(said) == 1  # a hook that had been applied twice would say it twice


def test_the_name_can_be_given_on_the_command_line(sglang: SimpleNamespace) -> None:
    assert list(sglang.arguments.MOE_RUNNER_BACKEND_CHOICES).count(sglang.ours.NAME) == 1


def test_an_sglang_without_the_registry_is_left_alone(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "1")
    monkeypatch.delitem(sys.modules, OURS[0])
    monkeypatch.delattr(sys.modules["weave_moe.integrations"], "sglang_runner")
    monkeypatch.delattr(sglang.runner, "register_moe_runner_core")
    with lines_of("sglang.weave_moe") as said:
        plugin.register()
    assert len(said) == 1
    assert "SGLang 0.5.19 or newer is needed" in said[0]


# ---- Which layers -------------------------------------------------------------------------------


def test_a_layer_that_fits_is_taken_and_the_log_says_so(on_cpu: SimpleNamespace) -> None:
    with lines_of("sglang.weave_moe") as said:
        layer: Any = layer_of(on_cpu, experts_case(5, 64, 32))
    assert isinstance(layer.quant_method.runner.runner_core, on_cpu.ours.WeaveRunnerCore)
    assert layer.quant_method.runner.runner_backend.value == "weave"
    assert layer.quant_method.runner.runner_core.runner_backend.value == "weave"
    assert said == ["weave-moe: layer 3: used, backend host"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no combine": ({"no_combine": True, "inplace": False}, "one by one"),
    "two on the input": ({"apply_router_weight_on_input": True}, "2 experts a token"),
    "cut after silu": ({"gemm1_clamp_limit": 7.0}, "cut after the activation"),
    "silu without a gate": ({"is_gated": False}, "activation silu without a gate"),
    "another activation": ({"activation": "situ"}, "activation situ with a gate"),
    "limited gelu": ({"activation": "gelu", "gemm1_alpha": 1.0}, "activation gelu with a gate"),
    "float64": ({"params_dtype": torch.float64}, "torch.float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_does_not_fit_keeps_sglang_s_runner(
    on_cpu: SimpleNamespace, name: str
) -> None:
    changes, reason = REFUSED[name]
    method: Any = on_cpu.method.UnquantizedFusedMoEMethod()
    with lines_of("sglang.weave_moe") as said:
        method.create_moe_runner(nn.Module(), config_of(on_cpu, **changes))
    assert method.runner.runner_backend.value == "triton"
    assert len(said) == 1
    assert said[0].startswith("weave-moe: layer 3: not used, ")
    assert reason in said[0]


@pytest.mark.parametrize(
    "flag",
    [
        *("enable_lora", "enable_fused_moe_sum_all_reduce", "enable_symm_mem"),
        "enable_deterministic_inference",
    ],
)
def test_server_arguments_that_it_does_not_go_with(
    on_cpu: SimpleNamespace, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_cpu.ours, "get_server_args", lambda: SimpleNamespace(**{flag: True}))
    method: Any = on_cpu.method.UnquantizedFusedMoEMethod()
    method.create_moe_runner(nn.Module(), config_of(on_cpu))
    assert method.runner.runner_backend.value == "triton"
    assert f"--{flag.replace('_', '-')}" in method.weave_verdict.detail
    if on_cpu.real:  # and that is what this SGLang calls it
        assert hasattr(on_cpu.arguments.ServerArgs, flag)
        assert not hasattr(on_cpu.arguments.ServerArgs, "enable_what_is_not_there")


def test_what_is_asked_for_by_name_is_left_alone(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, exchanges = on_cpu.utils.MoeRunnerBackend, on_cpu.utils.MoeA2ABackend
    method: Any = on_cpu.method.UnquantizedFusedMoEMethod()
    method.create_moe_runner(nn.Module(), config_of(on_cpu))
    method.runner = SimpleNamespace(runner_backend=kinds.TRITON)
    assert on_cpu.ours.problem_of(method, config_of(on_cpu)) is None
    monkeypatch.setattr(on_cpu.ours, "get_moe_runner_backend", lambda: kinds.TRITON)
    found = on_cpu.ours.problem_of(method, config_of(on_cpu))
    assert found == "--moe-runner-backend triton was asked for by name"
    weave = on_cpu.utils.resolve_moe_runner_backend("weave")
    monkeypatch.setattr(on_cpu.ours, "get_moe_runner_backend", lambda: weave)
    assert on_cpu.ours.problem_of(method, config_of(on_cpu)) is None
    monkeypatch.setattr(on_cpu.ours, "get_moe_a2a_backend", lambda: exchanges.DEEPEP)
    assert "--moe-a2a-backend deepep" in on_cpu.ours.problem_of(method, config_of(on_cpu))
    monkeypatch.undo()
    monkeypatch.setattr(on_cpu.ours, "_device", lambda: "cpu")
    monkeypatch.setattr(on_cpu.ours, "get_server_args", SimpleNamespace)
    method.runner = SimpleNamespace(runner_backend=kinds.FLASHINFER_CUTLASS)
    assert "flashinfer_cutlass" in on_cpu.ours.problem_of(method, config_of(on_cpu))
    method.runner = SimpleNamespace(runner_backend=kinds.TRITON)
    method.with_bias = True
    assert "biases are float32" in on_cpu.ours.problem_of(method, config_of(on_cpu))


def test_where_kernels_cannot_be_made_sglang_s_runner_stays(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_cpu.ours, "make_kernels", lambda *args, **options: "no compiler")
    with lines_of("sglang.weave_moe") as said:
        layer: Any = layer_of(on_cpu, experts_case(5, 64, 32))
    assert layer.quant_method.runner.runner_backend.value == "triton"
    assert said == ["weave-moe: layer 3: not used, no compiler"]


def test_a_layer_with_another_method_is_named_too(on_cpu: SimpleNamespace) -> None:
    """Quantised weights: SGLang's class for them is not the one that is hooked."""

    class Fp8MoEMethod:
        pass

    def construct(layer: Any, method: Any) -> None:
        layer.quant_method, layer.moe_runner_config = method, config_of(on_cpu, layer_id=7)

    ours: Any = layer_of(on_cpu, experts_case(5, 64, 32))
    with lines_of("sglang.weave_moe") as said:
        on_cpu.ours._around_layer(construct, nn.Module(), ours.quant_method)
        assert said == []
        on_cpu.ours._around_layer(construct, SimpleNamespace(), method=Fp8MoEMethod())
    reason = "SGLang runs it by Fp8MoEMethod, which the plugin leaves alone"
    assert said == [f"weave-moe: layer 7: not used, {reason}"]
    layers = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    assert hasattr(layers, "FusedMoE")
    assert on_cpu.ours.LAYER in on_cpu.hooks.HookRegistry._patched
    assert on_cpu.ours.HOOKED in on_cpu.hooks.HookRegistry._patched


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_no_layer_is_taken(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang.ours, "get_server_args", SimpleNamespace)
    method: Any = sglang.method.UnquantizedFusedMoEMethod()
    method.create_moe_runner(nn.Module(), config_of(sglang))
    assert method.runner.runner_backend.value == "triton"
    assert "no GPU here" in method.weave_verdict.detail


# ---- What it computes ---------------------------------------------------------------------------

NUMBERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "int64 ids": {"id_dtype": torch.int64},
    "dropped slots": {"routing": "holes"},
    "skewed": {"routing": "skewed"},
    "no token": {"tokens": 0},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_sglang_s_runner_gives_the_layer_s_numbers(on_cpu: SimpleNamespace, name: str) -> None:
    case = experts_case(**{"tokens": 17, "hidden": 64, "intermediate": 32, **NUMBERS[name]})
    layer = layer_of(on_cpu, case)
    given = case.x.clone()
    close(run_case(on_cpu, layer, case), case)
    assert torch.equal(case.x, given)


ACTIVATIONS: dict[str, tuple[dict[str, Any], Activation, bool]] = {
    "gelu": ({"activation": "gelu"}, Activation("gelu"), False),
    "gelu_tanh": ({"activation": "gelu_tanh"}, Activation("gelu_tanh"), False),
    "relu2": ({"activation": "relu2", "is_gated": False}, Activation("relu2"), False),
    "deepseek-v4": ({"swiglu_limit": 0.7}, Activation("silu", limit=0.7), False),
    "gpt-oss": (
        {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
        Activation.parse("swiglu_oai"),
        True,
    ),
    "packed": (
        {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 1.0, "gate_up_interleaved": False},
        Activation("silu", 1.5, 1.0, 1.0),
        False,
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(on_cpu: SimpleNamespace, name: str) -> None:
    options, activation, interleaved = ACTIVATIONS[name]
    case = experts_case(17, 64, 32, activation=activation, interleaved=interleaved)
    layer = layer_of(on_cpu, case, **options)
    got = run_case(on_cpu, layer, case)
    close(got, case)
    if activation.gated:  # and it is not plain silu
        with pytest.raises(AssertionError):
            close(got, case, activation="silu", interleaved=False)


def test_the_scaling_factor_is_applied_once(on_cpu: SimpleNamespace) -> None:
    case = experts_case(17, 64, 32)
    layer = layer_of(on_cpu, case, routed_scaling_factor=2.5)
    got = run_case(on_cpu, layer, case)
    close(got / 2.5, case)


@pytest.mark.parametrize("factor", [None, 2.5])
def test_weights_on_the_input_are_applied_once(
    on_cpu: SimpleNamespace, factor: float | None
) -> None:
    case = experts_case(17, 64, 32, top_k=1)
    weights = torch.linspace(0.2, 0.9, 17).unsqueeze(1)
    case = case.with_(topk_weights=weights, weight_on_input=True)
    layer = layer_of(on_cpu, case, apply_router_weight_on_input=True, routed_scaling_factor=factor)
    got = run_case(on_cpu, layer, case) / (factor or 1.0)
    close(got, case)
    for wrong in ({"topk_weights": weights**2}, {"weight_on_input": False}):
        with pytest.raises(AssertionError):
            close(got, case, **wrong)


def test_experts_that_are_rewritten_in_place_are_what_the_next_call_reads(
    on_cpu: SimpleNamespace,
) -> None:
    case = experts_case(17, 64, 32, experts=6, top_k=2)
    layer: Any = layer_of(on_cpu, case)
    before = run_case(on_cpu, layer, case)
    order = torch.randperm(6, generator=generator(1))
    for tensor in (layer.w13_weight.data, layer.w2_weight.data):
        tensor.copy_(tensor[order].clone())
    assert not torch.equal(run_case(on_cpu, layer, case), before)
    moved = order.argsort().to(case.topk_ids.dtype)[case.topk_ids.long()]
    after = run(on_cpu, layer, case.x, case.topk_weights, moved)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_call_that_it_cannot_run_is_an_error_and_not_another_result(
    on_cpu: SimpleNamespace,
) -> None:
    case = experts_case(5, 64, 32)
    layer: Any = layer_of(on_cpu, case)
    core = layer.quant_method.runner.runner_core
    topk = on_cpu.topk.StandardTopKOutput(case.topk_weights, case.topk_ids, torch.empty(0))
    dispatched = on_cpu.dispatch.StandardDispatchOutput(case.x, None, topk)
    weights = on_cpu.triton.TritonMoeQuantInfo(layer.w13_weight, layer.w2_weight)
    config = layer.moe_runner_config
    core.run_from_dispatch(dispatched, weights, config)
    with pytest.raises(ValueError, match="without hooks"):
        core.run_from_dispatch(dispatched, weights, config, hooks=object())
    other = SimpleNamespace(format=SimpleNamespace(is_standard=lambda: False))
    with pytest.raises(ValueError, match="standard dispatch"):
        core.run_from_dispatch(other, weights, config)
    permuted = dataclasses.replace(weights, fuse_swiglu_interleaved=True)
    with pytest.raises(ValueError, match="permuted"):
        core.run_from_dispatch(dispatched, permuted, config)
    cut = dataclasses.replace(config, gemm1_clamp_limit=7.0)
    with pytest.raises(ValueError, match="activation must be covered"):
        core.run_from_dispatch(dispatched, weights, cut)


# ---- What it says -------------------------------------------------------------------------------


def test_report_names_each_layer(on_cpu: SimpleNamespace) -> None:
    model: Any = nn.Module()
    model.ours = layer_of(on_cpu, experts_case(5, 64, 32))
    model.theirs = nn.Module()
    model.theirs.quant_method = on_cpu.method.UnquantizedFusedMoEMethod()
    text = plugin.report(model).splitlines()
    assert text[0] == "weave-moe: partly on, in 1 of 2 layers of experts"
    assert text[1] == "  ours: used, backend host"
    assert text[2].startswith("  theirs: not used, SGLang runs it by")
    with pytest.raises(TypeError, match="model must be"):
        plugin.report(3)  # type: ignore[arg-type]


def test_the_command_says_why_it_is_off_and_when_it_is_on(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    assert plugin.main([]) == 1
    assert f"off, {plugin.VARIABLE} is not 1" in capsys.readouterr().out
    monkeypatch.setenv(plugin.VARIABLE, "1")
    monkeypatch.setenv("SGLANG_PLUGINS", "other, more")
    assert plugin.main([]) == 1
    assert "SGLANG_PLUGINS=other, more leaves it out" in capsys.readouterr().out
    monkeypatch.delenv("SGLANG_PLUGINS")
    if not torch.cuda.is_available():
        assert plugin.main([]) == 1
        assert "there is no GPU here" in capsys.readouterr().out
    monkeypatch.setattr(sglang.ours, "_device", lambda: "cpu")
    assert plugin.main([]) == 0
    assert "weave-moe: on" in capsys.readouterr().out
    monkeypatch.setenv(plugin.VARIABLE, "maybe")
    assert plugin.main([]) == 2
    assert "must be 1" in capsys.readouterr().err
    assert plugin.main(["extra"]) == 2


def test_the_command_without_sglang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert plugin.main([]) == 2
    assert capsys.readouterr().err.startswith("error: SGLang cannot be imported")
