"""The experts as vLLM's modular kernels want them, and the method that chooses them.

Imported by `weave_moe.integrations.vllm.register` only, in vLLM's processes. vLLM builds an
`UnquantizedFusedMoEMethod` for each MoE layer whose weights are not quantised; its registry of
replacements makes that a `WeaveMoEMethod`, which takes `WeaveExperts` where they can run the layer
and changes nothing where they cannot. Preparing, exchanging between ranks and finishing stay
vLLM's.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, Final

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as modular
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform

from ..layer import fused_experts
from ..ops import OPERATOR_OUT
from ..shapes import DTYPES, Activation, LayerShape, dtype_name, is_recorded
from .switch import BACKENDS, Verdict, fit_problem, make_kernels, other_method

__all__ = ["WeaveExperts", "WeaveMoEMethod", "device_problem", "install", "problem_of"]

REPLACED: Final = "UnquantizedFusedMoEMethod"
"""The class of vLLM that the registry replaces, by its name."""

_log = logging.getLogger("vllm.weave_moe")
_STANDARD = modular.FusedMoEActivationFormat.Standard
_LARGEST_CALL: Final = 16_384
"""Tokens to make kernels for where vLLM's scheduler cannot be asked: the most of one launch."""


# ---- What vLLM's activations are here -----------------------------------------------------------

# By vLLM's values. Which names a release has differs: 0.20 knows no gelu_tanh, for one.
_KINDS: Final = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "swigluoai": "silu",
    "swigluoai_uninterleave": "silu",
    "relu2_no_mul": "relu2",
}
_INTERLEAVED: Final = MoEActivation("swigluoai")
"""The one whose gate and up rows alternate (gpt-oss)."""


@functools.lru_cache(maxsize=64)
def _activation(
    name: str, limit: float | None, alpha: float | None, beta: float | None
) -> Activation:
    """The activation of a value of vLLM's MoEActivation.

    limit, alpha, beta: vLLM's parameters of its clamped SwiGLU. Plain silu has the limit alone, and
    gelu none; those of the interleaved swigluoai (gpt-oss) are part of vLLM's kernel.
    """
    if name == _INTERLEAVED.value:
        return Activation.parse("swiglu_oai")
    if name == "swigluoai_uninterleave":
        return Activation("silu", 1.0 if alpha is None else alpha, limit, beta or 0.0)
    return Activation(_KINDS[name], limit=limit if name == "silu" else None)


def _clamp(config: Any, quant_config: Any) -> tuple[float | None, float | None, float | None]:
    """Limit, alpha and beta of a layer: the quantisation's come first, then the layer's."""

    def first(quantised: str, plain: str) -> float | None:
        value = getattr(quant_config, quantised, None)
        found: float | None = getattr(config, plain, None) if value is None else value
        return found

    return (
        first("gemm1_clamp_limit", "swiglu_limit"),
        first("gemm1_alpha", "swiglu_alpha"),
        first("gemm1_beta", "swiglu_beta"),
    )


# ---- Whether a layer can be taken ---------------------------------------------------------------


def _fits(shape: LayerShape, activation: str) -> str | None:
    return fit_problem(
        current_platform.device_type,
        shape,
        _activation(activation, None, None, None),
        interleaved=activation == _INTERLEAVED.value,
    )


def _any_shape(activation: str = "silu") -> LayerShape:
    """A layer that every backend takes, to ask about something else than its sizes."""
    return LayerShape(64, 64, 1, 1, "bfloat16", _KINDS[activation] != "relu2")


def device_problem() -> str | None:
    """Why no layer can run on this process's device; None if layers can."""
    return _fits(_any_shape(), "silu")


def _parallel_problem(parallel: Any) -> str | None:
    if getattr(parallel, "use_passthrough_all2all", False):
        return "the experts would have to exchange tokens themselves (all2all passthrough)"
    if parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels:
        return (
            f"tokens are exchanged by all2all backend {parallel.all2all_backend}; of those it has "
            "been written for allgather_reducescatter"
        )
    return None


def _shape_of(moe: Any) -> LayerShape:
    return LayerShape(
        moe.hidden_dim,
        moe.intermediate_size_per_partition,
        moe.num_local_experts,
        moe.experts_per_token,
        dtype_name(moe.in_dtype),
        bool(moe.is_act_and_mul),
    )


def problem_of(moe: Any) -> str | None:
    """Why a layer does not run here, in words for the log; None if it does.

    moe: vLLM's FusedMoEConfig of the layer.
    """
    if moe.moe_backend != "auto":
        return f"moe_backend {moe.moe_backend!r} was asked for by name"
    if moe.is_lora_enabled:
        return "LoRA is enabled, which it does not compute"
    name = moe.activation.value
    if name not in _KINDS:
        return f"activation {name} is not one that it computes"
    if moe.in_dtype not in DTYPES.values():
        return f"activations are {dtype_name(moe.in_dtype)}, it takes {', '.join(DTYPES)}"
    problem = _parallel_problem(moe.moe_parallel_config) or _fits(_shape_of(moe), name)
    if problem is not None:
        return problem
    # What is left are vLLM's own conditions: the format of activations, batch invariance, and
    # those that releases after this was written may add.
    supported, reason = WeaveExperts.is_supported_config(WeaveExperts, moe, None, None, _STANDARD)
    if supported and moe.moe_parallel_config.use_batched_activation_format:
        return "tokens would come in batches by expert"
    return None if supported else (reason or "vLLM does not say why")


# ---- The experts --------------------------------------------------------------------------------


class WeaveExperts(modular.FusedMoEExpertsModular):  # type: ignore[misc]
    """One layer's experts for vLLM's modular kernel; the routed weights are applied and summed.

    Everything is read anew in each call, weights included: load balancing may rewrite them in
    place. A call starts work on the current stream and waits for nothing.
    """

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        self._weave_activation = _activation(
            moe_config.activation.value, *_clamp(moe_config, quant_config)
        )

    @staticmethod
    def activation_format() -> Any:
        """Tokens come as rows [T, H]."""
        return _STANDARD

    @staticmethod
    def _supports_current_device() -> bool:
        return device_problem() is None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return _fits(_any_shape("relu2_no_mul"), "relu2_no_mul") is None

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        name = activation.value
        return name in _KINDS and _fits(_any_shape(name), name) is None

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return _parallel_problem(moe_parallel_config) is None

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return _fits(LayerShape(hidden_dim, 64, 1, 1), "silu") is None

    def supports_expert_map(self) -> bool:
        """Global ids with a map to local ones are taken as they are (vLLM before 0.24 asks)."""
        return True

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No scratch memory of vLLM's; an output of [M, K]."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """The output is weighted and summed already."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor | None,
        workspace2: Tensor | None,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes `output` [T, H] from hidden_states [T, H], ids and weights [T, k].

        w1: [E, 2I, H], gate rows first ([E, I, H] without a gate); w2: [E, H, I]. Ids are global
        where expert_map (int32, the global experts) is given, and those of experts elsewhere are
        skipped. With apply_router_weight_on_input vLLM has scaled the input already, and the
        weights are not applied again.
        """
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        if topk_ids.dtype not in (torch.int32, torch.int64):
            topk_ids = topk_ids.to(torch.int32)
        act = self._weave_activation
        if activation != self.moe_config.activation:
            act = _activation(activation.value, *_clamp(self.moe_config, self.quant_config))
        tensors = (hidden_states, w1, w2, topk_weights, topk_ids)
        interleaved = activation == _INTERLEAVED
        backend = BACKENDS[hidden_states.device.type]
        if is_recorded():
            # On GPUs vLLM hides the layer from the compiler; on CPUs it lets it look inside.
            OPERATOR_OUT(
                output,
                *tensors,
                self.w1_bias,
                self.w2_bias,
                expert_map,
                kind=act.kind,
                alpha=act.alpha,
                limit=act.limit,
                up_offset=act.up_offset,
                interleaved=interleaved,
                backend=backend,
            )
            return
        fused_experts(
            *tensors,
            activation=act,
            interleaved=interleaved,
            b13=self.w1_bias,
            b2=self.w2_bias,
            expert_map=expert_map,
            out=output,
            backend=backend,
        )


# ---- The method ---------------------------------------------------------------------------------


def _most_tokens(moe: Any) -> int:
    """The largest number of tokens of one call, as far as vLLM's configuration tells."""
    try:
        from vllm.config import get_current_vllm_config

        most = get_current_vllm_config().scheduler_config.max_num_batched_tokens
    except (ImportError, AssertionError, AttributeError, RuntimeError):
        return _LARGEST_CALL
    return min(int(most) * int(moe.dp_size), _LARGEST_CALL) if most else _LARGEST_CALL


class WeaveMoEMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """vLLM's method for unquantised experts, with ours where they can run the layer.

    weave_problem: why this layer keeps vLLM's experts, None if it has ours. weave_verdict: the same
    with the layer's name, once its weights are loaded.
    """

    unquantized_backend: Any
    experts_cls: Any

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self.weave_verdict: Verdict | None = None
        self.weave_problem: str | None = problem_of(moe)
        self._weave_tokens = _most_tokens(moe)
        self._weave_instead = (self.unquantized_backend, self.experts_cls)
        if self.weave_problem is None:
            # The backend whose layout is the checkpoint's: nothing is swapped, padded or repacked.
            self.unquantized_backend = UnquantizedMoeBackend.TRITON
            self.experts_cls = WeaveExperts

    def process_weights_after_loading(self, layer: Any) -> None:
        """As vLLM's, once kernels are made; then the log says what runs the layer."""
        if self.weave_problem is None:
            self.weave_problem = self._make_kernels(layer)
            if self.weave_problem is not None:  # vLLM lays weights out below, so that it is in time
                self.unquantized_backend, self.experts_cls = self._weave_instead
        super().process_weights_after_loading(layer)
        name = str(getattr(layer, "layer_name", "a layer"))
        if self.weave_problem is not None:
            self._conclude(Verdict(name, False, self.weave_problem))
        else:
            backend = BACKENDS[layer.w2_weight.device.type]
            self._conclude(Verdict(name, True, f"backend {backend}"))

    def _make_kernels(self, layer: Any) -> str | None:
        clamp = _clamp(self.moe, self.get_fused_moe_quant_config(layer))
        return make_kernels(
            layer.w2_weight.device.type,
            _shape_of(self.moe),
            _activation(self.moe.activation.value, *clamp),
            bias=bool(self.moe.has_bias),
            tokens=self._weave_tokens,
            log=_log,
        )

    def _conclude(self, verdict: Verdict) -> None:
        if verdict != self.weave_verdict:  # weights may be loaded again, to the same end
            self.weave_verdict = verdict
            _log.info("weave-moe: %s", verdict)


def announcing(construct: Any) -> Any:
    """A layer's `__init__` that also logs the layers whose method is none of ours.

    Layers with quantised weights never reach `WeaveMoEMethod`, so nothing else would name them.
    """

    @functools.wraps(construct)
    def announced(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        method = getattr(self, "quant_method", None)
        on = op_registry_oot.get(REPLACED) is WeaveMoEMethod
        if on and method is not None and not isinstance(method, UnquantizedFusedMoEMethod):
            name = str(getattr(self, "layer_name", "a layer"))
            _log.info("weave-moe: %s", other_method("vLLM", name, method))

    return announced


def _announce_others() -> None:
    # The class that holds a layer's experts: the former since 0.21 or so, the latter before.
    for module, name in (("routed_experts", "RoutedExperts"), ("layer", "FusedMoE")):
        try:
            found = importlib.import_module(f"vllm.model_executor.layers.fused_moe.{module}")
        except ImportError:
            continue
        kind: Any = getattr(found, name, None)
        if isinstance(kind, type):
            construct = vars(kind)["__init__"]
            setattr(kind, "__init__", announcing(construct))  # noqa: B010
            return


_announces = False


def install() -> str | None:
    """Makes vLLM build `WeaveMoEMethod`s in this process; why not, if another has taken the place.

    A second call changes nothing.
    """
    global _announces
    found = op_registry_oot.get(REPLACED)
    if found is WeaveMoEMethod:
        return None
    if found is not None:
        return f"vLLM's {REPLACED} is replaced by {found.__module__}.{found.__qualname__} already"
    CustomOp.register_oot(WeaveMoEMethod, name=REPLACED)
    # The registry has renamed it; `custom_ops` of vLLM's configuration shall still find it.
    WeaveMoEMethod.name = UnquantizedFusedMoEMethod.name
    if not _announces:
        _announces = True
        _announce_others()
    return None
