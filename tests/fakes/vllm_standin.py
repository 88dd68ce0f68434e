"""What the plugin touches of vLLM, for machines that have no vLLM: interfaces only.

Read in vLLM 0.33.0 (in 0.20.0 too, but for what is said there), in these files below
vllm/model_executor:

    custom_op.py                                             CustomOp, op_registry_oot
    layers/fused_moe/activation.py                           MoEActivation
    layers/fused_moe/config.py                               FusedMoE{Config,ParallelConfig,...}
    layers/fused_moe/modular_kernel.py                       FusedMoEExpertsModular, FusedMoEKernel
    layers/fused_moe/prepare_finalize/no_dp_ep.py            what is done before and after experts
    layers/fused_moe/topk_weight_and_reduce.py               TopKWeightAndReduceNoOP
    layers/fused_moe/fused_moe_method_base.py                FusedMoEMethodBase
    layers/fused_moe/unquantized_fused_moe_method.py         UnquantizedFusedMoEMethod
    layers/fused_moe/oracle/unquantized.py                   UnquantizedMoeBackend

It keeps names, arguments, the order of calls, and what is passed on; its own experts are a loop.
tools/engine_tests.sh runs the same tests with the real package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .packages import as_modules

registry: dict[str, type] = {}


class CustomOp(nn.Module):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(registry.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, replacement: Any = None, name: str | None = None) -> Any:
        key = name or cls.__name__
        assert key not in registry, f"{key} is registered already"
        replacement.name = key
        registry[key] = replacement
        return replacement


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"
    SITU = "situ"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    RELU2_NO_MUL = "relu2_no_mul"

    @property
    def is_gated(self) -> bool:
        return not self.value.endswith("_no_mul")


class RoutingMethodType(Enum):
    Default = 0


@dataclass
class FusedMoEParallelConfig:
    tp_size: int
    pcp_size: int
    dp_size: int
    ep_size: int
    tp_rank: int
    pcp_rank: int
    dp_rank: int
    ep_rank: int
    sp_size: int
    use_ep: bool
    all2all_backend: str
    enable_eplb: bool

    @property
    def use_all2all_kernels(self) -> bool:
        return self.use_ep and self.dp_size > 1

    @property
    def use_ag_rs_all2all_kernels(self) -> bool:
        return self.use_all2all_kernels and self.all2all_backend == "allgather_reducescatter"

    @property
    def use_passthrough_all2all(self) -> bool:
        return self.all2all_backend == "passthrough"

    @property
    def use_batched_activation_format(self) -> bool:
        return self.use_all2all_kernels and self.all2all_backend == "deepep_low_latency"


@dataclass
class FusedMoEConfig:
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    num_local_experts: int
    num_logical_experts: int
    activation: MoEActivation
    device: Any
    routing_method: RoutingMethodType
    moe_parallel_config: FusedMoEParallelConfig
    in_dtype: torch.dtype
    moe_backend: str = "auto"
    has_bias: bool = False
    is_lora_enabled: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None

    @property
    def intermediate_size_per_partition(self) -> int:
        return self.intermediate_size // self.moe_parallel_config.tp_size

    @property
    def is_act_and_mul(self) -> bool:
        return self.activation.is_gated

    @property
    def dp_size(self) -> int:
        return self.moe_parallel_config.dp_size


@dataclass
class FusedMoEQuantConfig:
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


class TopKWeightAndReduceNoOP:
    pass


class FusedMoEExperts(ABC):
    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        checks = {
            "current device": cls._supports_current_device(),
            "no act_and_mul": moe_config.is_act_and_mul or cls._supports_no_act_and_mul(),
            "activation": cls._supports_activation(moe_config.activation),
            "quantization": cls._supports_quant_scheme(weight_key, activation_key),
            "parallel": cls._supports_parallel_config(moe_config.moe_parallel_config),
            "hidden": cls._supports_shape(moe_config.hidden_dim),
            "format": activation_format == cls.activation_format(),
        }
        missing = [name for name, holds in checks.items() if not holds]
        return (not missing), (f"kernel does not support {missing[0]}" if missing else None)

    @staticmethod
    @abstractmethod
    def activation_format() -> Any: ...

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool: ...

    @property
    def w1_bias(self) -> Tensor | None:
        return self.quant_config.w1_bias

    @property
    def w2_bias(self) -> Tensor | None:
        return self.quant_config.w2_bias

    @property
    def a2_scale(self) -> None:
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        return None


class FusedMoEExpertsModular(FusedMoEExperts):
    @abstractmethod
    def workspace_shapes(self, *sizes: Any) -> Any: ...

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> Any: ...

    @abstractmethod
    def apply(self, *args: Any, **kwargs: Any) -> Any: ...


class FusedMoEKernel:
    """The modular kernel without an exchange of tokens between ranks."""

    def __init__(self, fused_experts: Any) -> None:
        self.fused_experts = fused_experts

    def apply(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        a1 = hidden_states
        if apply_router_weight_on_input:
            assert topk_ids.size(1) == 1
            a1 = a1 * topk_weights.to(a1.dtype)
        sizes = (a1.size(0), w1.size(1), a1.size(1), topk_ids.size(1))
        ws13, ws2, shape = self.fused_experts.workspace_shapes(
            *sizes, global_num_experts, w1.size(0), None, activation
        )
        scratch = [a1.new_empty(size) for size in (ws13, ws2)]
        output = a1.new_empty(shape)
        self.fused_experts.apply(
            output=output,
            hidden_states=a1,
            w1=w1,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            a1q_scale=None,
            a2_scale=self.fused_experts.a2_scale,
            workspace13=scratch[0],
            workspace2=scratch[1],
            expert_tokens_meta=None,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        reduce = self.fused_experts.finalize_weight_and_reduce_impl()
        assert isinstance(reduce, TopKWeightAndReduceNoOP)
        return output


class UnquantizedMoeBackend(Enum):
    TRITON = "TRITON"
    CPU = "CPU"


class FusedMoEMethodBase:
    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.moe_quant_config: Any = None
        self.moe_kernel: Any = None


class _CPUExperts(FusedMoEExpertsModular):
    """Stands for vLLM's own experts: silu only, slot by slot."""

    activation_format = staticmethod(lambda: FusedMoEActivationFormat.Standard)
    _supports_current_device = staticmethod(lambda: True)
    _supports_no_act_and_mul = staticmethod(lambda: True)
    _supports_quant_scheme = staticmethod(lambda w, a: True)
    _supports_activation = staticmethod(lambda a: True)
    _supports_parallel_config = staticmethod(lambda p: True)

    def workspace_shapes(self, *sizes: Any) -> Any:
        return (0,), (0,), (sizes[0], sizes[2])

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def apply(self, *, output: Tensor, **given: Any) -> None:
        output.zero_()
        for token, ids in enumerate(given["topk_ids"].tolist()):
            for slot, expert in enumerate(ids):
                gate, up = (given["w1"][expert] @ given["hidden_states"][token]).chunk(2)
                row = given["w2"][expert] @ (nn.functional.silu(gate) * up)
                output[token] += given["topk_weights"][token, slot] * row


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, CustomOp):
    name = "unquantized_fused_moe"

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self.unquantized_backend: Any = UnquantizedMoeBackend.CPU
        self.experts_cls: Any = _CPUExperts

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        rows = intermediate_size_per_partition * (2 if self.moe.is_act_and_mul else 1)
        shapes = {
            "w13_weight": (num_experts, rows, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        if self.moe.has_bias:
            shapes |= {"w13_bias": (num_experts, rows), "w2_bias": (num_experts, hidden_size)}
        for key, shape in shapes.items():
            empty = torch.empty(shape, dtype=params_dtype)
            layer.register_parameter(key, nn.Parameter(empty, requires_grad=False))

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig(
            *((layer.w13_bias, layer.w2_bias) if self.moe.has_bias else (None, None)),
            getattr(layer, "swiglu_alpha", None),
            getattr(layer, "swiglu_beta", None),
            getattr(layer, "swiglu_limit", None),
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        experts = self.experts_cls(moe_config=self.moe, quant_config=self.moe_quant_config)
        self.moe_kernel = FusedMoEKernel(experts)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        result: Tensor = self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
        )
        return result


class RoutedExperts(nn.Module):
    """layers/fused_moe/routed_experts.py; before 0.24 FusedMoE of layers/fused_moe/layer.py."""

    def __init__(self, layer_name: str, quant_method: Any) -> None:
        super().__init__()
        self.layer_name, self.quant_method = layer_name, quant_method


def modules() -> dict[str, ModuleType]:
    """The modules that the plugin and its tests import, by name."""
    registry.clear()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moe = "vllm.model_executor.layers.fused_moe"
    here = globals()

    def pick(*names: str) -> dict[str, object]:
        return {name: here[name] for name in names}

    return as_modules(
        {
            "vllm": {"__version__": "stand-in"},
            "vllm.platforms": {"current_platform": SimpleNamespace(device_type=device)},
            "vllm.config": {},
            "vllm.model_executor.custom_op": {"CustomOp": CustomOp, "op_registry_oot": registry},
            f"{moe}.activation": pick("MoEActivation"),
            f"{moe}.config": pick(
                "FusedMoEConfig",
                "FusedMoEParallelConfig",
                "FusedMoEQuantConfig",
                "RoutingMethodType",
            ),
            f"{moe}.fused_moe_method_base": pick("FusedMoEMethodBase"),
            f"{moe}.modular_kernel": pick(
                "FusedMoEActivationFormat",
                "FusedMoEExperts",
                "FusedMoEExpertsModular",
                "FusedMoEKernel",
            ),
            f"{moe}.oracle.unquantized": pick("UnquantizedMoeBackend"),
            f"{moe}.routed_experts": pick("RoutedExperts"),
            f"{moe}.topk_weight_and_reduce": pick("TopKWeightAndReduceNoOP"),
            f"{moe}.unquantized_fused_moe_method": pick("UnquantizedFusedMoEMethod"),
        }
    )
