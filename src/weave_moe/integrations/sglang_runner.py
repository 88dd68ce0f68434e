"""The experts as a runner core of SGLang, and the hook that gives it a layer.

Imported by `weave_moe.integrations.sglang.register` only, within SGLang. Its method for
unquantised experts makes a runner for each layer; the hook lets it, and then puts a runner with our
core in its place where that can run the layer. Dispatch and combine between ranks stay SGLang's.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Final

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner, register_moe_runner_core
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import (
    get_moe_a2a_backend,
    get_moe_runner_backend,
    resolve_moe_runner_backend,
)
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args
from torch import Tensor

from ..layer import fused_experts
from ..shapes import DTYPES, Activation, LayerShape, dtype_name
from .switch import BACKENDS, Verdict, fit_problem, make_kernels, other_method

__all__ = ["NAME", "WeaveRunnerCore", "device_problem", "install", "problem_of"]

NAME: Final = "weave"
"""What the runner is called in SGLang."""

HOOKED: Final = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.create_moe_runner"
"""What the hook goes around. SGLang makes its runner there, and takes no registered name."""

LAYER: Final = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__"

_log = logging.getLogger("sglang.weave_moe")
_LARGEST_CALL: Final = 16_384
"""Tokens to make kernels for: the most that one launch takes; larger calls are several."""

# Server arguments under which SGLang's own runner does more than compute experts.
_FLAGS: Final = {
    "enable_lora": "LoRA is enabled, which it does not compute",
    "enable_fused_moe_sum_all_reduce": "the all-reduce is to be fused into the experts",
    "enable_symm_mem": "outputs are to lie in symmetric memory",
    "enable_deterministic_inference": "results are not to depend on the batch, which it "
    "does not promise",
}


# ---- Whether a layer can be taken ---------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _activation(
    name: str,
    gated: bool,
    alpha: float | None,
    clamp: float | None,
    swiglu_limit: float | None,
    interleaved: bool,
) -> tuple[Activation, bool] | str:
    """A layer's activation and whether its gate and up rows alternate, or why it is not covered.

    Named as in SGLang's MoeRunnerConfig: gemm1_alpha, gemm1_clamp_limit, swiglu_limit and
    gate_up_interleaved, which is read with an alpha only.
    """
    modified = (alpha, clamp, swiglu_limit) != (None, None, None)
    if name == "silu" and gated and alpha is not None:
        return Activation("silu", alpha, clamp, 1.0), interleaved
    if name == "silu" and gated and clamp is not None:
        return "its gate is cut after the activation, which the layer cuts before"
    if name == "silu" and gated:
        return Activation("silu", limit=swiglu_limit), False
    if name in ("gelu", "gelu_tanh") and gated and not modified:
        return Activation(name), False
    if name == "relu2" and not gated and not modified:
        return Activation("relu2"), False
    return f"activation {name} {'with' if gated else 'without'} a gate is not one that it computes"


def _activation_of(config: Any) -> tuple[Activation, bool] | str:
    return _activation(
        config.activation,
        bool(config.is_gated),
        getattr(config, "gemm1_alpha", None),
        getattr(config, "gemm1_clamp_limit", None),
        getattr(config, "swiglu_limit", None),
        bool(getattr(config, "gate_up_interleaved", True)),
    )


def _device() -> str:
    # SGLang runs experts by a runner on GPUs only.
    return "cuda"


def device_problem() -> str | None:
    """Why no layer can run on this process's device; None if layers can."""
    if _device() == "cuda" and not torch.cuda.is_available():
        return "there is no GPU here, and SGLang has runners on GPUs only"
    return fit_problem(_device(), LayerShape(64, 64, 1, 1), Activation("silu"))


def _shape_of(config: Any) -> LayerShape:
    return LayerShape(
        config.hidden_size,
        config.intermediate_size_per_partition,
        config.num_local_experts,
        config.top_k,
        dtype_name(config.params_dtype),
        bool(config.is_gated),
    )


def problem_of(method: Any, config: Any) -> str | None:
    """Why a layer does not run here, in words for the log; None if it does.

    method: SGLang's UnquantizedFusedMoEMethod of the layer, with the runner that it has made.
    config: the layer's MoeRunnerConfig.
    """
    asked, exchange = get_moe_runner_backend(), get_moe_a2a_backend()
    if not asked.is_auto() and asked.value != NAME:
        return f"--moe-runner-backend {asked.value} was asked for by name"
    if not exchange.is_none():
        return f"tokens are exchanged by --moe-a2a-backend {exchange.value}"
    arguments = get_server_args()
    for flag, reason in _FLAGS.items():
        if getattr(arguments, flag, False):
            return f"{reason} (--{flag.replace('_', '-')})"
    chosen = method.runner.runner_backend
    if not chosen.is_triton() or getattr(method, "_aiter_runner", None) is not None:
        return f"SGLang lays weights out for its runner {chosen.value} here"
    if method.with_bias:
        return "its biases are float32, and the layer takes them in the weights' type"
    if config.no_combine:
        return "the experts' outputs are wanted one by one"
    if config.apply_router_weight_on_input and config.top_k != 1:
        return f"weights go on the input with {config.top_k} experts a token; it takes 1 there"
    if getattr(config, "silu_mul_keep_fp32", False):
        return "the activation is to stay in fp32"
    if config.params_dtype not in DTYPES.values():
        return f"its weights are {config.params_dtype}; it takes {', '.join(DTYPES)}"
    activation = _activation_of(config)
    if isinstance(activation, str):
        return activation
    return device_problem() or fit_problem(
        _device(), _shape_of(config), activation[0], interleaved=activation[1]
    )


# ---- The runner core ----------------------------------------------------------------------------


class WeaveRunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
    """One layer's experts for SGLang's `MoeRunner`, from its standard dispatch.

    Everything is read anew in each call, weights included: load balancing may rewrite them in
    place. A call starts work on the current stream and waits for nothing.
    """

    @property
    def runner_backend(self) -> Any:
        """SGLang's identifier of the name `weave`."""
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
    ) -> Any:
        """StandardCombineInput with [T, H], weighted, summed and scaled.

        dispatch_output: standard: hidden_states [T, H]; topk_output with ids [T, k], local ones, -1
            for none, and weights [T, k]. quant_info: w13_weight [E, 2I, H] with gate rows first,
            w2_weight [E, H, I], in hidden_states' type.

        Raises ValueError for another format, quantised or permuted weights, or LoRA's hooks: a
        runner that silently computed something else would be worse.
        """
        if hooks is not None or not dispatch_output.format.is_standard():
            raise ValueError(
                f"runner {NAME!r} takes the standard dispatch without hooks, got "
                f"{dispatch_output.format} {'with' if hooks is not None else 'without'} hooks"
            )
        if getattr(quant_info, "fuse_swiglu_interleaved", False):
            raise ValueError(
                "quant_info.w13_weight must have its rows as loaded, got permuted ones"
            )
        activation = _activation_of(runner_config)
        if isinstance(activation, str):
            raise ValueError(f"runner_config.activation must be covered: {activation}")
        x: Tensor = dispatch_output.hidden_states
        weights: Tensor = dispatch_output.topk_output.topk_weights
        if runner_config.apply_router_weight_on_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        factor = runner_config.routed_scaling_factor
        if factor is not None and factor != 1.0:
            weights = weights * factor
        y = fused_experts(
            x,
            quant_info.w13_weight,
            quant_info.w2_weight,
            weights,
            dispatch_output.topk_output.topk_ids,
            activation=activation[0],
            interleaved=activation[1],
            b13=quant_info.b13,
            b2=quant_info.b2,
            backend=BACKENDS[x.device.type],
        )
        return StandardCombineInput(hidden_states=y)


# ---- The hook -----------------------------------------------------------------------------------


def _around_create(original: Any, method: Any, layer: Any, moe_runner_config: Any) -> None:
    """SGLang's create_moe_runner, and then our runner where it can run the layer."""
    original(method, layer, moe_runner_config)
    name = f"layer {moe_runner_config.layer_id}"
    problem = problem_of(method, moe_runner_config)
    if problem is None:
        activation = _activation_of(moe_runner_config)
        assert not isinstance(activation, str)
        problem = make_kernels(
            _device(),
            _shape_of(moe_runner_config),
            activation[0],
            bias=False,
            tokens=_LARGEST_CALL,
            log=_log,
        )
    if problem is None:
        method.runner = MoeRunner(resolve_moe_runner_backend(NAME), moe_runner_config)
        verdict = Verdict(name, True, f"backend {BACKENDS[_device()]}")
    else:
        verdict = Verdict(name, False, problem)
    method.weave_verdict = verdict
    _log.info("weave-moe: %s", verdict)


def _around_layer(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's FusedMoE.__init__, and a line in the log for a layer whose method is another.

    Layers with quantised weights never reach `_around_create`, so nothing else would name them.
    """
    original(layer, *args, **kwargs)
    method = getattr(layer, "quant_method", None)
    if method is not None and not hasattr(method, "weave_verdict"):
        name = f"layer {layer.moe_runner_config.layer_id}"
        _log.info("weave-moe: %s", other_method("SGLang", name, method))


_installed = False


def install() -> str | None:
    """Registers the runner core and the hook in this process; a second call changes nothing."""
    global _installed
    if _installed:
        return None
    if not hasattr(UnquantizedFusedMoEMethod, "create_moe_runner"):
        return "this SGLang's UnquantizedFusedMoEMethod has no create_moe_runner"
    register_moe_runner_core(NAME, WeaveRunnerCore)
    HookRegistry.register(HOOKED, _around_create, HookType.AROUND)
    HookRegistry.register(LAYER, _around_layer, HookType.AROUND)
    _add_choice()
    _installed = True
    return None


def _add_choice() -> None:
    """Lets --moe-runner-backend take the name; without it the layers are chosen all the same."""
    from sglang.srt import server_args

    choices = getattr(server_args, "MOE_RUNNER_BACKEND_CHOICES", ())
    add = getattr(server_args, "add_moe_runner_backend_choices", None)
    if add is not None and NAME not in choices:
        add([NAME])
