"""What the plugin touches of SGLang, for machines that have no SGLang: interfaces only.

Read in SGLang 0.5.23 (and in 0.5.19, the first release with a registry of runner cores), in these
files below sglang/srt:

    plugins/hook_registry.py                     HookRegistry, HookType
    layers/moe/utils.py                          names of runners and of exchanges
    layers/moe/moe_runner/{base,runner}.py       MoeRunnerConfig, DispatchMoeRunnerCore, MoeRunner
    layers/moe/moe_runner/triton.py              TritonMoeQuantInfo
    layers/moe/token_dispatcher/standard.py      StandardDispatchOutput, StandardCombineInput
    layers/moe/topk.py                           StandardTopKOutput
    layers/quantization/unquant.py               UnquantizedFusedMoEMethod
    runtime_context.py, server_args.py           get_server_args, names for --moe-runner-backend

It keeps names, arguments, the order of calls, and what is passed on; it computes nothing.
tools/engine_tests.sh runs the same tests with the real package.
"""

from __future__ import annotations

import functools
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .packages import as_modules


class _Name:
    value: str

    def is_auto(self) -> bool:
        return self.value == "auto"

    def is_triton(self) -> bool:
        return self.value == "triton"

    def is_none(self) -> bool:
        return self.value == "none"


class MoeRunnerBackend(_Name, Enum):
    AUTO = "auto"
    TRITON = "triton"
    FLASHINFER_CUTLASS = "flashinfer_cutlass"


class MoeA2ABackend(_Name, Enum):
    NONE = "none"
    DEEPEP = "deepep"


@dataclass(frozen=True)
class RegisteredMoeRunnerBackend(_Name):
    value: str


_cores: dict[str, Any] = {}
CHOICES: list[str] = []


def get_moe_runner_backend() -> MoeRunnerBackend:
    return MoeRunnerBackend.AUTO


def get_moe_a2a_backend() -> MoeA2ABackend:
    return MoeA2ABackend.NONE


def resolve_moe_runner_backend(backend: Any) -> Any:
    if not isinstance(backend, str):
        return backend
    try:
        return MoeRunnerBackend(backend)
    except ValueError:
        if backend in _cores:
            return RegisteredMoeRunnerBackend(backend)
        raise ValueError(f"{backend!r} is not registered") from None


def register_moe_runner_core(backend_name: str, factory: Any) -> None:
    if backend_name in _cores:
        raise ValueError(f"{backend_name!r} is registered already")
    _cores[backend_name] = factory


@dataclass
class MoeRunnerConfig:
    num_experts: int | None = None
    num_local_experts: int | None = None
    hidden_size: int | None = None
    intermediate_size_per_partition: int | None = None
    layer_id: int | None = None
    top_k: int | None = None
    num_fused_shared_experts: int | None = None
    params_dtype: torch.dtype | None = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
    silu_mul_keep_fp32: bool = False


class DispatchMoeRunnerCore(ABC):
    def __init__(self, config: MoeRunnerConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def runner_backend(self) -> Any: ...

    @abstractmethod
    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
    ) -> Any: ...


class MoeRunner:
    def __init__(self, runner_backend: Any, config: Any, lora_enabled: bool = False) -> None:
        self.runner_backend, self.config = runner_backend, config
        factory = _cores.get(runner_backend.value)
        self.runner_core = factory(config) if factory else None

    def run(self, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
        assert self.runner_core is not None
        return self.runner_core.run_from_dispatch(
            dispatch_output, quant_info, self.config, hooks=None
        )


class _Format(Enum):
    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep_normal"

    def is_standard(self) -> bool:
        return self is _Format.STANDARD


class StandardTopKOutput(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


class StandardDispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_output: StandardTopKOutput

    @property
    def format(self) -> _Format:
        return _Format.STANDARD


class StandardCombineInput(NamedTuple):
    hidden_states: Tensor


@dataclass
class TritonMoeQuantInfo:
    w13_weight: Tensor
    w2_weight: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    fuse_swiglu_interleaved: bool = False


class FusedMoEMethodBase:
    pass


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.with_bias = False
        self.runner: Any = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
    ) -> None:
        self.with_bias = with_bias
        rows = intermediate_size_per_partition * (2 if layer.moe_runner_config.is_gated else 1)
        w13 = torch.empty(num_experts, rows, hidden_size, dtype=params_dtype)
        w2 = torch.empty(
            num_experts, hidden_size, intermediate_size_per_partition, dtype=params_dtype
        )
        layer.w13_weight = nn.Parameter(w13, requires_grad=False)
        layer.w2_weight = nn.Parameter(w2, requires_grad=False)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        self.runner = MoeRunner(MoeRunnerBackend.TRITON, moe_runner_config)

    def forward_cuda(self, layer: Any, dispatch_output: Any) -> Any:
        weights = TritonMoeQuantInfo(layer.w13_weight, layer.w2_weight)
        return self.runner.run(dispatch_output, weights)


class FusedMoE(nn.Module):
    """layers/moe/fused_moe_triton/layer.py"""

    def __init__(self, quant_method: Any, moe_runner_config: Any) -> None:
        super().__init__()
        self.quant_method, self.moe_runner_config = quant_method, moe_runner_config


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    _hooks: dict[str, list[Any]] = {}  # noqa: RUF012
    _patched: set[str] = set()  # noqa: RUF012

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
        cls._hooks.setdefault(target, []).append(hook)

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls._hooks.items():
            if target in cls._patched:
                continue
            owner, _, name = target.rpartition(".")
            found = pkgutil.resolve_name(owner)
            for hook in hooks:
                original = getattr(found, name)
                around = functools.wraps(original)(functools.partial(hook, original))
                setattr(found, name, lambda *a, _f=around, **k: _f(*a, **k))
            cls._patched.add(target)


def modules() -> dict[str, ModuleType]:
    """The modules that the plugin and its tests import, by name."""
    _cores.clear()
    HookRegistry._hooks.clear()
    HookRegistry._patched.clear()
    CHOICES[:] = ["auto", "triton"]
    here = globals()

    def pick(*names: str) -> dict[str, object]:
        return {name: here[name] for name in names}

    moe = "sglang.srt.layers.moe"
    return as_modules(
        {
            "sglang": {"__version__": "stand-in"},
            f"{moe}.moe_runner": pick("MoeRunner", "MoeRunnerConfig", "register_moe_runner_core"),
            f"{moe}.moe_runner.base": pick("DispatchMoeRunnerCore", "MoeRunnerConfig"),
            f"{moe}.moe_runner.triton": pick("TritonMoeQuantInfo"),
            f"{moe}.fused_moe_triton.layer": pick("FusedMoE"),
            f"{moe}.token_dispatcher.standard": pick(
                "StandardCombineInput", "StandardDispatchOutput"
            ),
            f"{moe}.topk": pick("StandardTopKOutput"),
            f"{moe}.utils": pick(
                "MoeA2ABackend",
                "MoeRunnerBackend",
                "get_moe_a2a_backend",
                "get_moe_runner_backend",
                "resolve_moe_runner_backend",
            ),
            "sglang.srt.layers.quantization.base_config": pick("FusedMoEMethodBase"),
            "sglang.srt.layers.quantization.unquant": pick("UnquantizedFusedMoEMethod"),
            "sglang.srt.plugins.hook_registry": pick("HookRegistry", "HookType"),
            "sglang.srt.runtime_context": {"get_server_args": SimpleNamespace},
            "sglang.srt.server_args": {
                "MOE_RUNNER_BACKEND_CHOICES": CHOICES,
                "add_moe_runner_backend_choices": CHOICES.extend,
            },
        }
    )
