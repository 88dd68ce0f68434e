"""vLLM's plugin against vLLM's classes: those of the installed package, else a stand-in's."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import logging
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
from torch.utils._python_dispatch import TorchDispatchMode

from fakes import vllm_standin
from fakes.packages import engine, lines_of
from generators import TOLERANCE, Case, assert_rows_close, experts_case, generator
from weave_moe.integrations import switch
from weave_moe.integrations import vllm as plugin
from weave_moe.reference import experts_reference
from weave_moe.shapes import Activation, LayerShape, check_experts

OURS = ("weave_moe.integrations.vllm_experts",)


@pytest.fixture(scope="module")
def vllm() -> Iterator[SimpleNamespace]:
    """vLLM's modules and ours on top of them, with a current configuration."""
    with engine("vllm", vllm_standin.modules, OURS) as real:
        moe = "vllm.model_executor.layers.fused_moe"
        found = SimpleNamespace(
            real=real,
            platforms=importlib.import_module("vllm.platforms"),
            activation=importlib.import_module(f"{moe}.activation"),
            config=importlib.import_module(f"{moe}.config"),
            method=importlib.import_module(f"{moe}.unquantized_fused_moe_method"),
            backends=importlib.import_module(f"{moe}.oracle.unquantized"),
            ops=importlib.import_module("vllm.model_executor.custom_op"),
            ours=importlib.import_module(OURS[0]),
        )
        if real and found.platforms.current_platform.device_type not in ("cpu", "cuda"):
            pytest.skip("this vLLM was built for no device that is here")
        with contextlib.ExitStack() as stack:
            if real:
                settings = importlib.import_module("vllm.config")
                stack.enter_context(settings.set_current_vllm_config(settings.VllmConfig()))
                if device_of(found) == "cpu":
                    # Before 0.32 vLLM never ran modular kernels on CPUs, and frees a GPU's memory.
                    patch = stack.enter_context(pytest.MonkeyPatch.context())
                    patch.setattr(torch.accelerator, "empty_cache", lambda: None)
                workspace = importlib.import_module("vllm.v1.worker.workspace")
                workspace.init_workspace_manager(torch.device(device_of(found)))
            yield found


@pytest.fixture
def installed(vllm: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """The plugin in vLLM's registry for one test."""
    assert vllm.ours.install() is None
    yield vllm
    del vllm.ops.op_registry_oot[vllm.ours.REPLACED]


def device_of(vllm: SimpleNamespace) -> str:
    device: str = vllm.platforms.current_platform.device_type
    return device


def known(kind: Any, values: dict[str, Any]) -> Any:
    """A configuration of vLLM with those values that this release has fields for."""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    return kind(**{name: value for name, value in values.items() if name in names})


def moe_config(vllm: SimpleNamespace, **changes: Any) -> Any:
    """vLLM's FusedMoEConfig of a layer: 64 hidden, 32 intermediate, 4 experts, 2 a token."""
    parallel = {
        **{f"{part}_size": 1 for part in ("tp", "pcp", "dp", "ep", "sp")},
        **{f"{part}_rank": 0 for part in ("tp", "pcp", "dp", "ep")},
        "use_ep": False,
        "all2all_backend": "allgather_reducescatter",
        "enable_eplb": False,
    }
    values = {
        "num_experts": 4,
        "experts_per_token": 2,
        "hidden_dim": 64,
        "intermediate": 32,
        "num_local_experts": 4,
        "activation": "silu",
        "device": device_of(vllm),
        "routing_method": next(iter(vllm.config.RoutingMethodType)),
        "in_dtype": torch.float32,
    }
    parallel |= {name: changes.pop(name) for name in list(changes) if name in parallel}
    values |= changes
    values["num_logical_experts"] = values["num_experts"]
    values["activation"] = vllm.activation.MoEActivation(values["activation"])
    values["is_act_and_mul"] = not values["activation"].value.endswith("_no_mul")
    size = values.pop("intermediate")
    values |= {"intermediate_size": size, "intermediate_size_per_partition": size}
    values["moe_parallel_config"] = known(vllm.config.FusedMoEParallelConfig, parallel)
    return known(vllm.config.FusedMoEConfig, values)


def layer_of(vllm: SimpleNamespace, case: Case, **changes: Any) -> nn.Module:
    """A loaded layer with a case's weights, as vLLM makes them; `.quant_method` runs it."""
    experts, _, hidden = case.w13.shape
    on_input = changes.pop("on_input", False)
    expert_map = case.options.get("expert_map")
    config = moe_config(
        vllm,
        num_experts=experts if expert_map is None else expert_map.numel(),
        num_local_experts=experts,
        experts_per_token=case.topk_ids.size(1),
        hidden_dim=hidden,
        intermediate=case.w2.size(2),
        in_dtype=case.x.dtype,
        has_bias="b13" in case.options,
        **changes,
    )
    layer: Any = nn.Module()
    try:
        layer.quant_method = vllm.method.UnquantizedFusedMoEMethod(config)
    except NotImplementedError as error:  # it chooses its own experts before ours are asked
        pytest.skip(f"this vLLM runs no such layer on {device_of(vllm)}: {error}")
    layer.quant_method.create_weights(
        layer,
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size_per_partition=case.w2.size(2),
        params_dtype=case.x.dtype,
    )
    given = {"w13_weight": case.w13, "w2_weight": case.w2}
    given |= {f"w{key[1:]}_bias": case.options[key] for key in ("b13", "b2") if key in case.options}
    for name, value in given.items():
        getattr(layer, name).data.copy_(value)
    layer.moe_config = config
    layer.layer_name = "model.layers.3.mlp.experts"
    layer.activation = config.activation
    layer.apply_router_weight_on_input = on_input
    layer.global_num_experts = config.num_experts
    layer.expert_map = expert_map
    layer.shared_experts = None
    layer.swiglu_limit = changes.get("swiglu_limit")
    layer.swiglu_alpha = changes.get("swiglu_alpha")
    layer.swiglu_beta = changes.get("swiglu_beta")
    layer._expert_routing_tables = layer._maybe_init_expert_routing_tables = lambda: None
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def run(layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """One forward of the layer through vLLM's modular kernel."""
    given = {"shared_experts": None, "shared_experts_input": None}
    wanted = inspect.signature(layer.quant_method.apply).parameters
    extra = {name: value for name, value in given.items() if name in wanted}
    with torch.inference_mode():
        y: Tensor = layer.quant_method.apply(
            layer=layer, x=x, topk_weights=weights, topk_ids=ids, **extra
        )
    return y


def run_case(layer: Any, case: Case) -> Tensor:
    return run(layer, case.x, case.topk_weights, case.topk_ids)


def uses_ours(vllm: SimpleNamespace, layer: Any) -> bool:
    return isinstance(layer.quant_method.moe_kernel.fused_experts, vllm.ours.WeaveExperts)


def has(vllm: SimpleNamespace, activation: str) -> bool:
    return activation in {member.value for member in vllm.activation.MoEActivation}


# ---- The switch ---------------------------------------------------------------------------------


def test_vllm_finds_register_by_its_entry_point() -> None:
    points = metadata.entry_points(group=plugin.GROUP)
    (point,) = [point for point in points if point.name == plugin.PLUGIN]
    assert point.load() is plugin.register


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_it_imports_nothing_and_says_nothing(value: str | None) -> None:
    code = (
        "import sys\n"
        "import weave_moe, weave_moe.integrations\n"
        "assert 'weave_moe.integrations.vllm' not in sys.modules\n"
        "from weave_moe.integrations.vllm import register\n"
        "register()\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('vllm', 'sglang')]\n"
        "assert 'weave_moe.integrations.vllm_experts' not in sys.modules\n"
    )
    environment = {key: kept for key, kept in os.environ.items() if key != plugin.VARIABLE}
    if value is not None:
        environment[plugin.VARIABLE] = value
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("value", ["yes", "2", " 1", "true"])
def test_another_value_of_the_variable_is_an_error(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, value)
    with pytest.raises(ValueError, match=f"{plugin.VARIABLE} must be 1 .on. or 0 .off., got"):
        plugin.register()


def test_on_it_registers_once_a_process(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "1")
    assert vllm.ours.REPLACED not in vllm.ops.op_registry_oot
    for _ in range(3):
        plugin.register()
        found = vllm.ops.op_registry_oot[vllm.ours.REPLACED]
        assert found is vllm.ours.WeaveMoEMethod
        # What `custom_ops` in vLLM's configuration calls the operation.
        assert found.name == vllm.method.UnquantizedFusedMoEMethod.name == "unquantized_fused_moe"
    assert type(vllm.method.UnquantizedFusedMoEMethod(moe_config(vllm))) is found
    del vllm.ops.op_registry_oot[vllm.ours.REPLACED]
    assert type(vllm.method.UnquantizedFusedMoEMethod(moe_config(vllm))) is not found


def test_another_plugin_s_replacement_stays(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(vllm.method.UnquantizedFusedMoEMethod):
        pass

    monkeypatch.setenv(plugin.VARIABLE, "1")
    monkeypatch.setitem(vllm.ops.op_registry_oot, vllm.ours.REPLACED, Other)
    with lines_of("vllm.weave_moe") as said:
        plugin.register()
    assert vllm.ops.op_registry_oot[vllm.ours.REPLACED] is Other
    assert len(said) == 1
    assert "not used in any layer" in said[0]
    assert "Other" in said[0]


def test_a_vllm_without_its_classes_is_left_alone(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "1")
    monkeypatch.delitem(sys.modules, OURS[0])
    monkeypatch.delattr(sys.modules["weave_moe.integrations"], "vllm_experts")
    monkeypatch.delattr(vllm.ops, "op_registry_oot")
    with lines_of("vllm.weave_moe") as said:
        plugin.register()
    assert "this vLLM lacks what the plugin needs" in said[0]


# ---- Which layers -------------------------------------------------------------------------------


def test_a_layer_that_fits_is_taken_and_the_log_says_so(installed: SimpleNamespace) -> None:
    with lines_of("vllm.weave_moe") as said:
        layer = layer_of(installed, experts_case(5, 64, 32))
        layer.quant_method.process_weights_after_loading(layer)  # a reload says nothing new
    assert uses_ours(installed, layer)
    backend = {"cpu": "host", "cuda": "cuda"}[device_of(installed)]
    assert said == [f"weave-moe: model.layers.3.mlp.experts: used, backend {backend}"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lora": ({"is_lora_enabled": True}, "LoRA"),
    "named backend": ({"moe_backend": "triton"}, "moe_backend 'triton' was asked for"),
    "situ": ({"activation": "situ"}, "activation situ is not one"),
    "swiglustep": ({"activation": "swiglustep"}, "activation swiglustep is not one"),
    "float64": ({"in_dtype": torch.float64}, "activations are float64"),
    "deepep": (
        {"use_ep": True, "dp_size": 2, "all2all_backend": "deepep_high_throughput"},
        "all2all backend deepep_high_throughput",
    ),
    "batched": (
        {"use_ep": True, "dp_size": 2, "all2all_backend": "deepep_low_latency"},
        "all2all backend deepep_low_latency",
    ),
    "in the kernel": ({"all2all_backend": "passthrough"}, "passthrough"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_does_not_fit_is_refused_with_the_reason(
    vllm: SimpleNamespace, name: str
) -> None:
    changes, reason = REFUSED[name]
    if not has(vllm, changes.get("activation", "silu")):
        pytest.skip(f"this vLLM has no activation {changes['activation']}")
    if name == "in the kernel" and not hasattr(
        vllm.config.FusedMoEParallelConfig, "use_passthrough_all2all"
    ):
        pytest.skip("this vLLM has no such all2all backend")
    config = moe_config(vllm, **changes)
    found = vllm.ours.problem_of(config)
    assert found is not None
    assert reason in found
    assert vllm.ours.problem_of(moe_config(vllm)) is None


@pytest.mark.parametrize("refused", ["named backend", "lora"])
def test_a_refused_layer_keeps_vllm_s_experts_and_the_log_says_why(
    installed: SimpleNamespace, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, reason = REFUSED[refused]
    plain = installed.ours.UnquantizedFusedMoEMethod(moe_config(installed))
    # vLLM itself would turn the option down on a CPU: the layer is told of it afterwards.
    found = installed.ours.problem_of(moe_config(installed, **changes))
    monkeypatch.setattr(installed.ours, "problem_of", lambda moe: found)
    method = installed.method.UnquantizedFusedMoEMethod(moe_config(installed))
    assert method.weave_problem is not None
    assert reason in method.weave_problem
    assert method.experts_cls is not installed.ours.WeaveExperts
    assert plain.experts_cls is installed.ours.WeaveExperts
    monkeypatch.setattr(
        installed.method.UnquantizedFusedMoEMethod, "process_weights_after_loading", lambda *a: None
    )
    with lines_of("vllm.weave_moe") as said:
        method.process_weights_after_loading(SimpleNamespace(layer_name="model.layers.0.experts"))
    assert said == [f"weave-moe: model.layers.0.experts: not used, {found}"]


def test_where_kernels_cannot_be_made_vllm_s_experts_stay(
    installed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = installed.method.UnquantizedFusedMoEMethod
    case, seen = experts_case(5, 64, 32), []
    layer: Any = layer_of(installed, case)
    method = base(moe_config(installed))
    theirs = method._weave_instead
    monkeypatch.setattr(
        base,
        "process_weights_after_loading",
        lambda self, layer: seen.append((self.unquantized_backend, self.experts_cls)),
    )
    monkeypatch.setattr(installed.ours, "make_kernels", lambda *args, **options: "no compiler")
    with lines_of("vllm.weave_moe") as said:
        method.process_weights_after_loading(layer)
    assert seen == [theirs]
    assert theirs[1] is not installed.ours.WeaveExperts
    assert said == ["weave-moe: model.layers.3.mlp.experts: not used, no compiler"]


def test_kernels_are_made_once_for_each_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    cuda = importlib.import_module("weave_moe.backends.cuda")
    monkeypatch.setattr(cuda, "warmup", lambda *args, **options: calls.append((args, options)))
    monkeypatch.setattr(switch, "device_here", lambda kind: (kind, 3 if kind == "cuda" else None))
    monkeypatch.setattr(switch, "_made", set())
    shape, silu = LayerShape(64, 32, 4, 2), Activation("silu", limit=7.0)

    def make(device: str = "cuda", bias: bool = True, tokens: int = 512) -> str | None:
        return switch.make_kernels(device, shape, silu, bias=bias, tokens=tokens, log=log)

    log = logging.getLogger("vllm.weave_moe")
    with lines_of("vllm.weave_moe") as said:
        assert [make(), make(), make(bias=False), make("cpu")] == [None] * 4
    assert calls[0] == ((shape, 512), {"activation": silu, "bias": True, "device": 3})
    assert len(calls) == len(said) == 2
    assert said[0].startswith("weave-moe: kernels for up to 512 tokens are loaded")

    def fails(*args: Any, **options: Any) -> None:
        raise OSError("no compiler here\nand more")

    monkeypatch.setattr(cuda, "warmup", fails)
    assert make(tokens=1024) == "its kernels cannot be made: no compiler here"
    assert make() is None


def test_a_layer_with_another_method_is_named_too(installed: SimpleNamespace) -> None:
    """Quantised weights: vLLM's class for them is not ours to replace."""

    class Fp8MoEMethod:
        pass

    class Layer:
        def __init__(self, method: Any) -> None:
            self.layer_name, self.quant_method = "model.layers.7.mlp.experts", method

    Layer.__init__ = installed.ours.announcing(Layer.__init__)  # type: ignore[method-assign]
    with lines_of("vllm.weave_moe") as said:
        Layer(layer_of(installed, experts_case(5, 64, 32)).quant_method)
        said.clear()
        Layer(Fp8MoEMethod())
    assert said == [
        "weave-moe: model.layers.7.mlp.experts: not used, vLLM runs it by Fp8MoEMethod, which the "
        "plugin leaves alone"
    ]
    # vLLM's own class has been given that __init__, once.
    moe = "vllm.model_executor.layers.fused_moe"
    try:
        kind = importlib.import_module(f"{moe}.routed_experts").RoutedExperts
    except ImportError:
        kind = importlib.import_module(f"{moe}.layer").FusedMoE
    assert kind.__init__.__wrapped__.__qualname__ == f"{kind.__name__}.__init__"
    assert not hasattr(kind.__init__.__wrapped__, "__wrapped__")


def test_what_it_declares_is_what_the_backend_takes(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, kinds = vllm.ours.WeaveExperts, vllm.activation.MoEActivation
    declared = {kind.value for kind in kinds if experts._supports_activation(kind)}
    assert declared <= set(vllm.ours._KINDS)
    assert {"silu", "gelu"} <= declared
    # Where the backend takes no interleaved rows and no layer without a gate, neither is declared.
    ask = vllm.ours.fit_problem

    def stricter(device: str, shape: Any, activation: Any, *, interleaved: bool = False) -> Any:
        if interleaved or not shape.gated or shape.hidden % 8:
            return "not on this device"
        return ask(device, shape, activation, interleaved=interleaved)

    monkeypatch.setattr(vllm.ours, "fit_problem", stricter)
    assert not experts._supports_no_act_and_mul()
    assert not experts._supports_shape(20)
    assert experts._supports_shape(24)
    left = {kind.value for kind in kinds if experts._supports_activation(kind)}
    assert left == declared - {"swigluoai", "relu2_no_mul"}
    assert vllm.ours.problem_of(moe_config(vllm, hidden_dim=20)) == "not on this device"
    assert not experts._supports_quant_scheme("int8", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_a_vllm_for_gpus_is_told_so(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        vllm.ours, "current_platform", SimpleNamespace(device_type="cuda", device_name="none")
    )
    assert "cuda" in vllm.ours.device_problem()


# ---- What it computes ---------------------------------------------------------------------------

NUMBERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "int64 ids": {"id_dtype": torch.int64},
    "biases": {"biases": True},
    "skewed": {"routing": "skewed"},
    "dropped slots": {"routing": "holes"},
    "local experts of a rank": {"mapped": True},
    "local experts, biases": {"mapped": True, "biases": True, "dtype": torch.bfloat16},
    "one token": {"tokens": 1},
}


def close(got: Tensor, case: Case, **changes: Any) -> None:
    want = experts_reference(case.with_(**changes).call())
    assert_rows_close(got, want, TOLERANCE[case.x.dtype])


@pytest.mark.parametrize("name", NUMBERS)
def test_vllm_s_kernel_gives_the_layer_s_numbers(installed: SimpleNamespace, name: str) -> None:
    case = experts_case(**{"tokens": 17, "hidden": 64, "intermediate": 32, **NUMBERS[name]})
    layer = layer_of(installed, case)
    assert uses_ours(installed, layer)
    close(run_case(layer, case), case)


ACTIVATIONS: dict[str, tuple[str, dict[str, float], Activation]] = {
    "gelu": ("gelu", {}, Activation("gelu")),
    "gelu_tanh": ("gelu_tanh", {}, Activation("gelu_tanh")),
    "clamped silu": ("silu", {"swiglu_limit": 0.7}, Activation("silu", limit=0.7)),
    "clamped, packed": (
        "swigluoai_uninterleave",
        {"swiglu_limit": 1.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
        Activation("silu", 1.702, 1.5, 1.0),
    ),
    "gpt-oss": ("swigluoai", {}, Activation.parse("swiglu_oai")),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(installed: SimpleNamespace, name: str) -> None:
    vllm_name, options, activation = ACTIVATIONS[name]
    if not has(installed, vllm_name):
        pytest.skip(f"this vLLM has no activation {vllm_name}")
    if options and "swiglu_limit" not in {
        field.name for field in dataclasses.fields(installed.config.FusedMoEConfig)
    }:
        pytest.skip("this vLLM computes no clamped gate in unquantised layers")
    interleaved = name == "gpt-oss"
    case = experts_case(17, 64, 32, activation=activation, interleaved=interleaved)
    config = moe_config(installed, activation=vllm_name, hidden_dim=64, intermediate=32)
    problem = installed.ours.problem_of(config)
    if problem is not None:
        assert device_of(installed) == "cuda"  # the engine for CPUs takes them all
        pytest.skip(problem)
    layer = layer_of(installed, case, activation=vllm_name, **options)
    got = run_case(layer, case)
    close(got, case)
    # And it is not the activation without its parameters.
    if activation != Activation("silu"):
        with pytest.raises(AssertionError):
            close(got, case, activation="silu", interleaved=False)


def test_weights_on_the_input_are_applied_once(installed: SimpleNamespace) -> None:
    case = experts_case(17, 64, 32, top_k=1)
    weights = torch.linspace(0.2, 0.9, 17).unsqueeze(1)  # those of one expert would all be 1
    case = case.with_(topk_weights=weights)
    layer = layer_of(installed, case, on_input=True)
    got = run_case(layer, case)
    close(got, case, weight_on_input=True)
    # It is not what applying them twice, never, or only at the end gives.
    never, twice = torch.ones_like(case.topk_weights), case.topk_weights**2
    for wrong in (
        {"weight_on_input": True, "topk_weights": twice},
        {"weight_on_input": True, "topk_weights": never},
        {"weight_on_input": False},
    ):
        with pytest.raises(AssertionError):
            close(got, case, **wrong)


def test_experts_that_are_rewritten_in_place_are_what_the_next_call_reads(
    installed: SimpleNamespace,
) -> None:
    case = experts_case(17, 64, 32, experts=6, top_k=2, biases=True)
    layer = layer_of(installed, case)
    before = run_case(layer, case)
    order = torch.randperm(6, generator=generator(1))
    addresses = (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr())
    for name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias"):  # as load balancing does
        tensor = getattr(layer, name).data
        tensor.copy_(tensor[order].clone())
    assert addresses == (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr())
    assert not torch.equal(run_case(layer, case), before)
    moved = order.argsort().to(case.topk_ids.dtype)[case.topk_ids.long()]
    after = run(layer, case.x, case.topk_weights, moved)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_redundant_experts_of_a_rank(installed: SimpleNamespace) -> None:
    """Load balancing puts copies of an expert on ranks: physical ids, several for one expert."""
    case = experts_case(17, 64, 32, experts=4, top_k=2)
    twice = torch.tensor([0, 1, 2, 3, 2, 1])
    physical = case.with_(w13=case.w13[twice].clone(), w2=case.w2[twice].clone())
    layer = layer_of(installed, physical)
    other = torch.where(case.topk_ids == 2, 4, torch.where(case.topk_ids == 1, 5, case.topk_ids))
    close(run(layer, case.x, case.topk_weights, other.to(torch.int32)), case)


class _Recorded(TorchDispatchMode):
    """The operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.name()))
        return func(*args, **(kwargs or {}))


WAITS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "_to_copy", "unique")


@pytest.mark.parametrize("on_input", [False, True])
def test_a_call_reads_no_value_of_a_tensor_on_the_host(
    installed: SimpleNamespace, on_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph capture would refuse: no operator that waits, on top of the layer's own work."""
    case = experts_case(17, 64, 32, top_k=1, mapped=True)
    layer = layer_of(installed, case, on_input=on_input)
    calls: list[Any] = []

    def layer_s_work(*tensors: Tensor, out: Tensor, **options: Any) -> Tensor:
        check_experts(*tensors, out=out, **{k: v for k, v in options.items() if k != "backend"})
        calls.append(options)
        return out

    monkeypatch.setattr(installed.ours, "fused_experts", layer_s_work)
    experts, output = layer.quant_method.moe_kernel.fused_experts, torch.empty_like(case.x)
    with torch.inference_mode(), _Recorded() as recorded:
        experts.apply(
            output,
            case.x,
            layer.w13_weight,
            layer.w2_weight,
            case.topk_weights,
            case.topk_ids,
            layer.activation,
            8,
            layer.expert_map,
            None,
            None,
            None,
            None,
            None,
            on_input,
        )
    assert len(calls) == 1
    assert not [name for name in recorded.names if any(wait in name for wait in WAITS)]
    assert recorded.names == (["aten::ones_like"] if on_input else [])


def test_a_compiler_can_look_inside(installed: SimpleNamespace) -> None:
    """vLLM for CPUs compiles through the layer, with the number of tokens as a symbol."""
    case = experts_case(17, 64, 32, biases=True)
    layer = layer_of(installed, case)
    experts = layer.quant_method.moe_kernel.fused_experts

    def forward(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        output = torch.empty_like(x)
        experts.apply(
            output,
            x,
            layer.w13_weight,
            layer.w2_weight,
            weights,
            ids,
            layer.activation,
            4,
            None,
            None,
            None,
            None,
            None,
            None,
            False,
        )
        return output

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (17, 5):
        some = case.with_(**{name: getattr(case, name)[:tokens] for name in Case.NAMES[::3]})
        some = some.with_(topk_ids=case.topk_ids[:tokens])
        with torch.inference_mode():
            got = compiled(some.x, some.topk_weights, some.topk_ids)
        close(got, some)


# ---- What it says -------------------------------------------------------------------------------


def test_report_names_each_layer(installed: SimpleNamespace) -> None:
    model: Any = nn.Module()
    model.ours = layer_of(installed, experts_case(5, 64, 32))
    model.theirs = layer_of(installed, experts_case(5, 64, 32))
    model.theirs.quant_method.weave_verdict = None
    text = plugin.report(model).splitlines()
    assert text[0] == "weave-moe: partly on, in 1 of 2 layers of experts"
    assert "used, backend" in text[1]
    assert "not used, vLLM runs it by" in text[2]
    assert plugin.report(nn.Linear(2, 2)) == "weave-moe: off, the model has no layers of experts"
    with pytest.raises(TypeError, match="model must be"):
        plugin.report(3)  # type: ignore[arg-type]


def test_the_command_says_why_it_is_off_and_when_it_is_on(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert plugin.main([]) == 1
    assert f"off, {plugin.VARIABLE} is not 1" in capsys.readouterr().out
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert plugin.main([]) == 1
    assert "VLLM_PLUGINS=other leaves it out" in capsys.readouterr().out
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setenv(plugin.VARIABLE, "1")
    assert plugin.main([]) == 0
    assert "weave-moe: on" in capsys.readouterr().out
    vllm.ops.op_registry_oot.pop(vllm.ours.REPLACED)
    monkeypatch.setenv(plugin.VARIABLE, "maybe")
    assert plugin.main([]) == 2
    assert "must be 1" in capsys.readouterr().err
    assert plugin.main(["extra"]) == 2


def test_the_command_without_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert plugin.main([]) == 2
    assert capsys.readouterr().err.startswith("error: vLLM cannot be imported")
