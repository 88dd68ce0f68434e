"""The MoE layers of well-known models, and the reading of a transformers config.json.

Shapes and routers are those of the models' published configurations and of transformers' own
blocks. Shared experts are described, since a whole layer has them, but they are dense: no policy
concerns them, and ``weave-moe run`` leaves them out.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from .blocks import quantization_name
from .routing import RoutingConfig
from .shapes import DTYPES, Activation, LayerShape

__all__ = ["PRESETS", "Preset", "from_config", "preset", "shipped_preset"]

_SILU = Activation("silu")


@dataclass(frozen=True)
class Preset:
    """One MoE layer: sizes, router and activation.

    hidden, intermediate: elements (H and I of the layer's formulas), of one routed expert.
    selection_bias: the router adds a learned bias to its scores when it selects.
    router_bias, expert_bias: the router, and each expert's two matrices, have additive biases.
    interleaved: gate and up rows alternate in w13.
    weight_on_input: a slot's weight scales the token before the expert, not its output.
    shared_intermediate: I of all shared experts together, 0 for none.
    shared_gated: their output is scaled by a sigmoid gate.
    notes: what was assumed, since the configuration does not say it.
    quantized: how the checkpoint's weights are stored, if not in a type of torch's.
    """

    name: str
    title: str
    hidden: int
    intermediate: int
    experts: int
    routing: RoutingConfig
    activation: Activation = _SILU
    selection_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    interleaved: bool = False
    weight_on_input: bool = False
    shared_intermediate: int = 0
    shared_gated: bool = False
    dtype: str = "bfloat16"
    notes: tuple[str, ...] = ()
    quantized: str = ""

    @property
    def top_k(self) -> int:
        """Slots a token."""
        return self.routing.top_k

    @property
    def w13_rows(self) -> int:
        """Rows of one expert's w13: 2 I, or I where the activation is not gated."""
        return self.intermediate * (2 if self.activation.gated else 1)

    @property
    def weight_elements(self) -> int:
        """Elements of all routed experts' matrices."""
        return self.experts * self.hidden * (self.w13_rows + self.intermediate)

    def flops(self, slots: int) -> int:
        """Floating-point operations of the two products for ``slots`` (token, slot) pairs."""
        return 2 * slots * self.hidden * (self.w13_rows + self.intermediate)

    def shape(self, dtype: str | None = None) -> LayerShape:
        """The sizes as the layer's own type; ``dtype`` instead of the preset's where given."""
        return LayerShape(
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            top_k=self.top_k,
            dtype=dtype or self.dtype,
            gated=self.activation.gated,
        )

    def scaled(self, factor: Fraction) -> Preset:
        """The same layer with H and I times ``factor``, cut to multiples of 8."""

        def cut(size: int) -> int:
            return max(8, int(size * factor) // 8 * 8)

        if factor == 1:
            return self
        return replace(
            self,
            hidden=cut(self.hidden),
            intermediate=cut(self.intermediate),
            shared_intermediate=cut(self.shared_intermediate) if self.shared_intermediate else 0,
        )


def _softmax(top_k: int, *, renormalize: bool) -> RoutingConfig:
    return RoutingConfig(scoring="softmax", top_k=top_k, renormalize=renormalize)


def _sigmoid(top_k: int, scale: float = 1.0, *, groups: int = 1, kept: int = 1) -> RoutingConfig:
    return RoutingConfig(
        scoring="sigmoid",
        top_k=top_k,
        renormalize=True,
        scaling_factor=scale,
        num_groups=groups,
        topk_groups=kept,
    )


_GPT_OSS = {
    "routing": RoutingConfig(scoring="topk_softmax", top_k=4, renormalize=False),
    "activation": Activation.parse("swiglu_oai"),
    "router_bias": True,
    "expert_bias": True,
    "interleaved": True,
}

_ALL: tuple[Preset, ...] = (
    Preset("qwen3-30b", "Qwen3-30B-A3B", 2048, 768, 128, _softmax(8, renormalize=True)),
    Preset("qwen3-235b", "Qwen3-235B-A22B", 4096, 1536, 128, _softmax(8, renormalize=True)),
    Preset(
        "qwen3-next",
        "Qwen3-Next-80B-A3B",
        2048,
        512,
        512,
        _softmax(10, renormalize=True),
        shared_intermediate=512,
        shared_gated=True,
    ),
    Preset(
        "qwen3.5-35b",
        "Qwen3.5-35B-A3B",
        2048,
        512,
        256,
        _softmax(8, renormalize=True),
        shared_intermediate=512,
        shared_gated=True,
    ),
    Preset("mixtral-8x7b", "Mixtral-8x7B", 4096, 14336, 8, _softmax(2, renormalize=True)),
    Preset("mixtral-8x22b", "Mixtral-8x22B", 6144, 16384, 8, _softmax(2, renormalize=True)),
    Preset("olmoe", "OLMoE-1B-7B", 2048, 1024, 64, _softmax(8, renormalize=False)),
    Preset(
        "deepseek-v2-lite",
        "DeepSeek-V2-Lite",
        2048,
        1408,
        64,
        _softmax(6, renormalize=False),
        shared_intermediate=2 * 1408,
    ),
    Preset(
        "deepseek-v3",
        "DeepSeek-V3 / R1",
        7168,
        2048,
        256,
        _sigmoid(8, 2.5, groups=8, kept=4),
        selection_bias=True,
        shared_intermediate=2048,
    ),
    Preset(
        "deepseek-v4-flash",
        "DeepSeek-V4-Flash",
        4096,
        2048,
        256,
        RoutingConfig(scoring="sqrtsoftplus", top_k=6, renormalize=True, scaling_factor=1.5),
        activation=Activation("silu", limit=10.0),
        selection_bias=True,
        shared_intermediate=2048,
    ),
    Preset(
        "kimi-k2",
        "Kimi-K2",
        7168,
        2048,
        384,
        _sigmoid(8, 2.827),
        selection_bias=True,
        shared_intermediate=2048,
    ),
    Preset(
        "glm-4.5-air",
        "GLM-4.5-Air",
        4096,
        1408,
        128,
        _sigmoid(8),
        selection_bias=True,
        shared_intermediate=1408,
    ),
    Preset("minimax-m2", "MiniMax-M2", 3072, 1536, 256, _sigmoid(8), selection_bias=True),
    Preset("gpt-oss-20b", "gpt-oss-20b", 2880, 2880, 32, **_GPT_OSS),  # type: ignore[arg-type]
    Preset("gpt-oss-120b", "gpt-oss-120b", 2880, 2880, 128, **_GPT_OSS),  # type: ignore[arg-type]
    Preset(
        "llama-4-scout",
        "Llama-4-Scout",
        5120,
        8192,
        16,
        RoutingConfig(scoring="sigmoid", top_k=1, renormalize=False),
        weight_on_input=True,
        shared_intermediate=8192,
    ),
    Preset(
        "nemotron-3-nano",
        "Nemotron-3-Nano",
        2688,
        1856,
        128,
        _sigmoid(6, 2.5),
        activation=Activation("relu2"),
        selection_bias=True,
        shared_intermediate=3712,
    ),
)

PRESETS: Mapping[str, Preset] = {entry.name: entry for entry in _ALL}
"""Presets by name, in the order in which they are listed."""


def preset(name: str) -> Preset:
    """The preset called ``name``; ``shipped`` is the layer of the model in the package.

    Raises ValueError for another name.
    """
    if name == "shipped":
        return shipped_preset()
    if name not in PRESETS:
        known = ["shipped", *PRESETS]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"preset must be one of {', '.join(known)}; got {name!r}{hint}")
    return PRESETS[name]


def shipped_preset() -> Preset:
    """The layer of the small model that ships with the package."""
    from .data import model_path

    return replace(from_config(model_path()), name="shipped", title="the shipped small model")


# What a config.json leaves to the model's code, by model_type. `selection_bias` and the rest are
# Preset's fields; `scoring` and `renormalize` hold where the file has no field of its own for them.
_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"renormalize": True},
    "phimoe": {"renormalize": False},
    "minimax": {"renormalize": True},
    "granitemoe": {"scoring": "topk_softmax"},
    "granitemoeshared": {"scoring": "topk_softmax"},
    "qwen2_moe": {"shared_gated": True},
    "qwen3_moe": {},
    "qwen3_vl_moe_text": {"renormalize": True},
    "qwen3_next": {"shared_gated": True},
    "qwen3_5_moe_text": {"renormalize": True, "shared_gated": True},
    "olmoe": {},
    "flex_olmo": {},
    # transformers' DeepSeek-V2 router has no renormalisation at all.
    "deepseek_v2": {"always": {"renormalize": False}},
    "deepseek_v3": {"scoring": "sigmoid", "selection_bias": True},
    "deepseek_v32": {"scoring": "sigmoid", "selection_bias": True},
    "deepseek_v4": {"scoring": "sqrtsoftplus", "selection_bias": True},
    "kimi_k2": {"scoring": "sigmoid", "selection_bias": True},
    "glm4_moe": {"scoring": "sigmoid", "selection_bias": True},
    "glm4_moe_lite": {"scoring": "sigmoid", "selection_bias": True},
    "glm4v_moe_text": {"scoring": "sigmoid", "selection_bias": True},
    "glm_moe_dsa": {"scoring": "sigmoid", "selection_bias": True},
    "solar_open": {"scoring": "sigmoid", "selection_bias": True},
    "dots1": {"scoring": "sigmoid", "selection_bias": True},
    "minimax_m2": {"scoring": "sigmoid", "selection_bias": True, "renormalize": True},
    "gpt_oss": {
        "scoring": "topk_softmax",
        "router_bias": True,
        "expert_bias": True,
        "interleaved": True,
    },
    "llama4_text": {"scoring": "sigmoid", "weight_on_input": True},
    "nemotron_h": {"scoring": "sigmoid", "selection_bias": True},
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}


def from_config(path: str | os.PathLike[str]) -> Preset:
    """The MoE layer that a transformers config.json describes; ``path`` names it or its folder.

    Raises ValueError, naming the file and the problem, where it is missing, is no JSON object, is
    not the configuration of a Mixture-of-Experts model, or has a router or activation unknown here.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"config {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"config {file}: not a JSON file (not UTF-8)") from error
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config {file}: not a JSON file ({error})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"config {file}: must hold a JSON object, got {type(loaded).__name__}")
    name = loaded.get("model_type")
    title = f"{name if isinstance(name, str) else 'model'} of {file}"
    try:
        return _parse(_language_model(loaded), title)
    except ValueError as error:
        raise ValueError(f"config {file}: {error}") from error


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, where it is one of several."""
    while not any(config.get(key) is not None for key in _EXPERTS):
        inner = next((config[key] for key in _NESTED if isinstance(config.get(key), dict)), None)
        if inner is None:
            break
        # That of all parts stands beside them.
        config = {"quantization_config": config.get("quantization_config"), **inner}
    return config


def _number(config: dict[str, Any], keys: tuple[str, ...], what: str) -> tuple[str, int]:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one number a layer, all alike
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ValueError(f"{key} must be a positive integer, got {value!r}")
        return key, value
    raise ValueError(f"it lacks {what} ({', '.join(keys)})")


def _real(config: dict[str, Any], key: str, default: float | None) -> float | None:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)


def _flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def _activation(config: dict[str, Any], kind: str) -> Activation:
    if kind == "gpt_oss":
        return Activation(
            "silu",
            alpha=_real(config, "swiglu_alpha", 1.702) or 1.702,
            limit=_real(config, "swiglu_limit", 7.0),
            up_offset=1.0,
        )
    key = next(
        (k for k in ("mlp_hidden_act", "hidden_act", "hidden_activation") if config.get(k)), ""
    )
    named = config.get(key, "silu")
    if not isinstance(named, str) or named not in _ACTIVATIONS:
        raise ValueError(f"{key} must be one of {', '.join(_ACTIVATIONS)}, got {named!r}")
    return Activation(_ACTIVATIONS[named], limit=_real(config, "swiglu_limit", None))


def _parse(config: dict[str, Any], title: str) -> Preset:
    kind = config.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    family = _FAMILIES.get(kind)
    notes: list[str] = []
    if all(config.get(key) is None for key in _EXPERTS):
        raise ValueError(
            f"not a Mixture-of-Experts model (model_type {kind!r}): it has none of "
            f"{', '.join(_EXPERTS)}"
        )
    if family is None:
        family = {}
        notes.append(f"model_type {kind!r} is not known here: the router is taken from its fields")
    _, experts = _number(config, _EXPERTS, "a number of experts")
    _, hidden = _number(config, _HIDDEN, "a hidden size")
    _, top_k = _number(config, _TOP_K, "a number of experts a token")
    key, intermediate = _number(config, _INTERMEDIATE, "an intermediate size")
    if key == "intermediate_size" and kind not in _FAMILIES:
        notes.append("intermediate_size taken as the experts' own")
    if top_k > experts:
        raise ValueError(f"{top_k} experts a token of {experts} experts")
    latent = config.get("moe_latent_size")
    if latent is not None:
        _, hidden = _number(config, ("moe_latent_size",), "")

    bias = family.get("selection_bias", config.get("topk_method") == "noaux_tc")
    scoring = config.get("scoring_func", config.get("score_func"))
    if kind == "gpt_oss" or scoring is None:
        scoring = family.get("scoring", "softmax")
        if "scoring" not in family and kind not in _FAMILIES:
            notes.append("softmax scoring assumed")
    if scoring not in ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax"):
        raise ValueError(f"scoring_func must be softmax, sigmoid or sqrtsoftplus, got {scoring!r}")
    grouped = kind != "deepseek_v2" or config.get("topk_method") == "group_limited_greedy"
    groups = _number(config, ("n_group",), "")[1] if grouped and config.get("n_group") else 1
    kept = _number(config, ("topk_group",), "")[1] if groups > 1 and config.get("topk_group") else 1
    renormalize = family.get("always", {}).get("renormalize")
    if renormalize is None:
        # DeepSeek-V3's descendants renormalise by default, the softmax routers do not.
        default = family.get("renormalize", scoring in ("sigmoid", "sqrtsoftplus") and top_k > 1)
        renormalize = _flag(config, "norm_topk_prob", default)
    routing = RoutingConfig(
        scoring=scoring,
        top_k=top_k,
        renormalize=renormalize,
        scaling_factor=_real(config, "routed_scaling_factor", 1.0) or 1.0,
        num_groups=groups,
        topk_groups=kept if groups > 1 else 1,
    )
    routing.check_experts(experts)

    shared = 0
    for field in (
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ):
        if not shared and config.get(field):
            shared = _number(config, (field,), "")[1]
    if not shared and config.get("n_shared_experts"):
        shared = _number(config, ("n_shared_experts",), "")[1] * intermediate
    if kind == "llama4_text":
        shared = intermediate
    quantized = ""
    if config.get("quantization_config") is not None:
        quantized = quantization_name(config["quantization_config"])
        notes.append(
            f"the checkpoint's weights are {quantized}, which the kernel does not take: all this "
            "is of a copy in 16 bits"
        )
    named = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    named = named.removeprefix("torch.") if isinstance(named, str) else ""
    if named not in DTYPES:
        notes.append(f"dtype {named or '?'} is not one of {', '.join(DTYPES)}: bfloat16 is used")
        named = "bfloat16"
    return Preset(
        name=kind or "config",
        title=title,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        routing=routing,
        activation=_activation(config, kind),
        selection_bias=bool(bias),
        router_bias=family.get("router_bias", False),
        expert_bias=family.get("expert_bias", False),
        interleaved=family.get("interleaved", False),
        weight_on_input=family.get("weight_on_input", False),
        shared_intermediate=shared,
        shared_gated=bool(shared and family.get("shared_gated", False)),
        dtype=named,
        notes=tuple(notes),
        quantized=quantized,
    )
