"""Where transformers' sparse-MoE blocks keep the parts of a layer, and what their routers do.

A block is recognised by the name of its class, and only if that class is in the table below: two
blocks with the same parameters may compute different things. transformers is never imported here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from .routing import RoutingConfig
from .shapes import DTYPES, Activation, dtype_name

__all__ = ["COVERED", "LayerParts", "part", "parts_of", "quantization_name"]


@dataclass(frozen=True)
class LayerParts:
    """What a layer computes, and the dotted names of its tensors in a module tree.

    w13, w2: stacked expert weights, [E, 2I, H] and [E, H, I]; [E, H, 2I] and [E, I, H] if
        `transposed`. b13, b2: their biases, or None.
    router_weight: [E, H]; router_bias, selection_bias: [E], or None.
    shared: an MLP with gate_proj, up_proj and down_proj (no gate_proj if the activation is not
        gated), or None; shared_gate: the [1, H] weight of its sigmoid gate, or None.
    output: what the block returned: "hidden", or a tuple of it and the router's "weights" [T, k] or
        "logits" [T, E]; "logits" blocks return hidden as [T, H].
    """

    routing: RoutingConfig
    activation: Activation
    w13: str = "experts.gate_up_proj"
    w2: str = "experts.down_proj"
    b13: str | None = None
    b2: str | None = None
    router_weight: str = "gate.weight"
    router_bias: str | None = None
    selection_bias: str | None = None
    shared: str | None = None
    shared_gate: str | None = None
    transposed: bool = False
    interleaved: bool = False
    weight_on_input: bool = False
    output: str = "hidden"


@dataclass(frozen=True)
class _Block:
    """How to read one family of blocks.

    renormalize: what the router does; None where the block's `norm_topk_prob` says so.
    scaled: the router multiplies by the block's `routed_scaling_factor`.
    groups: None; "always" for DeepSeek-V3's rule; "method" where `topk_method` says so.
    gate: the experts' activation: "plain" act_fn, "limited" by the experts' `limit`, or "oai",
        gpt-oss's clamped SwiGLU.
    identities: children that must do nothing.
    """

    scoring: str = "softmax"
    renormalize: bool | None = True
    scaled: bool = False
    groups: str | None = None
    router: str = "gate"
    router_bias: bool = False
    selection_bias: str | None = None
    shared: str | None = None
    shared_gate: bool = False
    gate: str = "plain"
    transposed: bool = False
    interleaved: bool = False
    biases: bool = False
    weight_on_input: bool = False
    output: str = "hidden"
    identities: tuple[str, ...] = ()


_SOFTMAX = _Block()
_SOFTMAX_OPTIONAL = _Block(renormalize=None)
_SOFTMAX_SHARED = _Block(renormalize=None, shared="shared_expert", shared_gate=True)
_DEEPSEEK_V2 = _Block(renormalize=False, scaled=True, groups="method", shared="shared_experts")
_DEEPSEEK_V3 = _Block(
    "sigmoid",
    renormalize=None,
    scaled=True,
    groups="always",
    selection_bias="gate.e_score_correction_bias",
    shared="shared_experts",
)
_GRANITE = _Block("topk_softmax", router="router")

_BLOCKS: Final[dict[str, _Block]] = {
    "MixtralSparseMoeBlock": _SOFTMAX,
    "MiniMaxSparseMoeBlock": _SOFTMAX,
    "Qwen3VLMoeTextSparseMoeBlock": _SOFTMAX,
    "Qwen3MoeSparseMoeBlock": _SOFTMAX_OPTIONAL,
    "OlmoeSparseMoeBlock": _SOFTMAX_OPTIONAL,
    "FlexOlmoSparseMoeBlock": _SOFTMAX_OPTIONAL,
    "Qwen2MoeSparseMoeBlock": _SOFTMAX_SHARED,
    "Qwen3NextSparseMoeBlock": _SOFTMAX_SHARED,
    "Qwen3_5MoeSparseMoeBlock": _Block(shared="shared_expert", shared_gate=True),
    "DeepseekV2Moe": _DEEPSEEK_V2,
    "DeepseekV3MoE": _DEEPSEEK_V3,
    "DeepseekV32MoE": _DEEPSEEK_V3,
    "DeepseekV4SparseMoeBlock": _Block(
        "sqrtsoftplus",
        scaled=True,
        selection_bias="gate.e_score_correction_bias",
        shared="shared_experts",
        gate="limited",
    ),
    "Dots1MoE": _DEEPSEEK_V3,
    "Glm4MoeMoE": _DEEPSEEK_V3,
    "Glm4MoeLiteMoE": _DEEPSEEK_V3,
    "Glm4vMoeTextMoE": _DEEPSEEK_V3,
    "GlmMoeDsaMoE": _DEEPSEEK_V3,
    "KimiLinearMoE": _DEEPSEEK_V3,
    "SolarOpenMoE": _DEEPSEEK_V3,
    "MiMoV2FlashMoE": _Block(
        "sigmoid",
        renormalize=None,
        scaled=True,
        groups="always",
        selection_bias="gate.e_score_correction_bias",
    ),
    "NemotronHMoE": _Block(
        "sigmoid",
        renormalize=None,
        scaled=True,
        groups="always",
        selection_bias="gate.e_score_correction_bias",
        shared="shared_experts",
        identities=("fc1_latent_proj", "fc2_latent_proj"),
    ),
    "MiniMaxM2SparseMoeBlock": _Block("sigmoid", selection_bias="e_score_correction_bias"),
    "GptOssMLP": _Block(
        "topk_softmax",
        router="router",
        router_bias=True,
        gate="oai",
        transposed=True,
        interleaved=True,
        biases=True,
        output="weights",
    ),
    "GraniteMoeMoE": _GRANITE,
    "GraniteMoeSharedMoE": _GRANITE,
    "GraniteMoeHybridMoE": _GRANITE,
    "Llama4TextMoe": _Block(
        "sigmoid",
        renormalize=False,
        router="router",
        shared="shared_expert",
        transposed=True,
        weight_on_input=True,
        output="logits",
    ),
}

COVERED: Final = tuple(sorted(_BLOCKS))
"""Class names of the transformers blocks that `MoELayer.from_transformers` takes."""

_ACTIVATIONS: Final = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}


def part(module: nn.Module, path: str) -> Any:
    """The module, parameter or buffer of that dotted name."""
    return operator.attrgetter(path)(module)


def parts_of(block: nn.Module) -> LayerParts:
    """The parts of one of transformers' sparse-MoE blocks (transformers 5, see `COVERED`).

    Raises TypeError if `block` is no module; ValueError, naming the class and what is in the way,
    for a class that is not covered, or a block of a covered class whose weights or options are not:
    experts kept as a list of modules, quantised weights, hash routing, latent projections, biases
    where there should be none, experts split over several processes.
    """
    if not isinstance(block, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(block).__name__}")
    name = type(block).__name__
    family = _BLOCKS.get(name)
    if family is None:
        raise ValueError(
            f"module must be one of transformers' sparse-MoE blocks {', '.join(COVERED)}, "
            f"got {name}"
        )
    return _Reader(block, family).parts()


class _Reader:
    """Reads one block; every problem becomes a ValueError that names the block's class."""

    def __init__(self, block: nn.Module, family: _Block) -> None:
        self.block = block
        self.family = family
        self.experts = self.child("experts")
        self.router = self.child(family.router)

    def problem(self, text: str) -> ValueError:
        return ValueError(f"module {type(self.block).__name__} is not covered: {text}")

    def child(self, name: str) -> nn.Module:
        child = getattr(self.block, name, None)
        if not isinstance(child, nn.Module):
            raise self.problem(f"it has no child module {name}")
        return child

    def tensor(self, path: str, dims: int) -> str:
        """`path`, if the block has a plain tensor there."""
        try:
            value = part(self.block, path)
        except AttributeError:
            value = None
        if not isinstance(value, Tensor):
            hint = (
                "; its experts are a list of modules, where transformers 5 keeps stacked weights"
                if path.startswith("experts.") and isinstance(self.experts, nn.ModuleList)
                else ""
            )
            raise self.problem(f"it has no tensor {path}{hint}")
        if value.dim() != dims:
            raise self.problem(f"{path} must have {dims} dimensions, got {list(value.shape)}")
        if value.dtype not in DTYPES.values():
            raise self.problem(f"{path} must be {', '.join(DTYPES)}, got {dtype_name(value.dtype)}")
        return path

    def option(self, *names: str) -> Any:
        """An option by any of its names: where it is kept moves between transformers' releases."""
        owners: Iterable[Any] = (
            self.router,
            self.block,
            getattr(self.block, "config", None),
            getattr(self.experts, "config", None),
        )
        for owner in owners:
            for name in names:
                value = getattr(owner, name, None)
                if value is not None:
                    return value
        raise self.problem(f"it has no option {' or '.join(names)}")

    def act_name(self, owner: nn.Module, path: str) -> str:
        act = getattr(owner, "act_fn", getattr(owner, "activation_fn", None))
        name = _ACTIVATIONS.get(type(act).__name__)
        if name is None:
            raise self.problem(
                f"the activation of {path} must be one of {', '.join(_ACTIVATIONS)}, "
                f"got {type(act).__name__}"
            )
        return name

    def activation(self) -> Activation:
        if self.family.gate == "oai":
            alpha = float(self.experts.alpha)  # type: ignore[arg-type]
            return Activation("silu", alpha, float(self.experts.limit), 1.0)  # type: ignore[arg-type]
        name = self.act_name(self.experts, "experts")
        if self.family.gate == "limited":
            return Activation(name, limit=float(self.experts.limit))  # type: ignore[arg-type]
        return Activation(name)

    def routing(self) -> RoutingConfig:
        family = self.family
        renormalize = family.renormalize
        if renormalize is None:
            renormalize = bool(self.option("norm_topk_prob"))
        grouped = family.groups == "always" or (
            family.groups == "method" and self.option("topk_method") == "group_limited_greedy"
        )
        return RoutingConfig(
            int(self.option("top_k", "num_experts_per_tok")),
            family.scoring,
            renormalize=renormalize,
            scaling_factor=float(self.option("routed_scaling_factor")) if family.scaled else 1.0,
            num_groups=int(self.option("num_group", "n_group")) if grouped else 1,
            topk_groups=int(self.option("topk_group")) if grouped else 1,
        )

    def shared(self, activation: Activation) -> str | None:
        path = self.family.shared
        if path is None:
            return None
        mlp = self.child(path)
        if self.act_name(mlp, path) != activation.kind:
            raise self.problem(f"{path} has another activation than the experts")
        for name in (*(("gate_proj",) if activation.gated else ()), "up_proj", "down_proj"):
            self.tensor(f"{path}.{name}.weight", 2)
            if getattr(getattr(mlp, name), "bias", None) is not None:
                raise self.problem(f"{path}.{name} has a bias")
        return path

    def parts(self) -> LayerParts:
        family, block = self.family, self.block
        if getattr(block, "is_hash", False):
            raise self.problem("it routes by token ids (hash routing), not by router logits")
        if getattr(self.experts, "_is_expert_parallel", False):
            raise self.problem("its experts are split over several processes")
        for name in family.identities:
            if not isinstance(getattr(block, name, nn.Identity()), nn.Identity):
                raise self.problem(f"it projects tokens by {name} before or after the experts")
        activation = self.activation()
        w13 = "experts.gate_up_proj" if activation.gated else "experts.up_proj"
        return LayerParts(
            routing=self.routing(),
            activation=activation,
            w13=self.tensor(w13, 3),
            w2=self.tensor("experts.down_proj", 3),
            b13=self.tensor(f"{w13}_bias", 2) if family.biases else None,
            b2=self.tensor("experts.down_proj_bias", 2) if family.biases else None,
            router_weight=self.tensor(f"{family.router}.weight", 2),
            router_bias=self.tensor(f"{family.router}.bias", 1) if family.router_bias else None,
            selection_bias=family.selection_bias and self.tensor(family.selection_bias, 1),
            shared=self.shared(activation),
            shared_gate=(
                self.tensor("shared_expert_gate.weight", 2) if family.shared_gate else None
            ),
            transposed=family.transposed,
            interleaved=family.interleaved,
            weight_on_input=family.weight_on_input,
            output=family.output,
        )


def quantization_name(value: object) -> str:
    """What a configuration's quantization_config, a mapping or an object, calls its weights."""
    named = value.get("quant_method") if isinstance(value, Mapping) else None
    named = named or getattr(value, "quant_method", None)
    return str(getattr(named, "value", named)) if named else "quantised"
