"""Whether a model's weights fit the GPUs, and how much is left for the KV cache.

The experts' part is exact. The rest is the published size of a preset's model, or an estimate from
the fields of a config.json. 16-bit weights throughout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..presets import Preset

__all__ = [
    "GPU_GB",
    "PUBLISHED",
    "USABLE",
    "Memory",
    "ModelSize",
    "fit_memory",
    "size_of_config",
    "size_of_preset",
]

GPU_GB: Mapping[str, float] = {
    "h200": 141,
    "h100-sxm": 80,
    "h100-pcie": 80,
    "h800-sxm": 80,
    "h20": 96,
    "gh200-96gb": 96,
}
"""Memory by data sheet, in GB of 10^9 bytes."""

USABLE = 0.9
"""Share of it that an engine gives to weights and KV cache; the rest is activations, graphs and
fragmentation. vLLM's default is 0.9."""

ELEMENT = 2

PUBLISHED: Mapping[str, tuple[int, float]] = {
    "qwen3-30b": (48, 30.5),
    "qwen3-235b": (94, 235.1),
    "qwen3-next": (48, 80.0),
    "qwen3.5-35b": (40, 35.0),
    "mixtral-8x7b": (32, 46.7),
    "mixtral-8x22b": (56, 140.6),
    "olmoe": (16, 6.9),
    "deepseek-v2-lite": (26, 15.7),
    "deepseek-v3": (58, 671.0),
    "deepseek-v4-flash": (43, 284.0),
    "kimi-k2": (60, 1026.0),
    "glm-4.5-air": (45, 106.0),
    "minimax-m2": (62, 230.0),
    "gpt-oss-20b": (24, 20.9),
    "gpt-oss-120b": (36, 116.8),
    "llama-4-scout": (48, 109.0),
    "nemotron-3-nano": (23, 31.6),
}
"""MoE layers of a preset's model, and its parameters in 10^9 as published."""


@dataclass(frozen=True)
class ModelSize:
    """A model's weights, in bytes of 16-bit elements.

    layers: MoE layers.  experts: of the routed experts of all layers.  other: all else.
    kv_token: bytes of KV cache a token, None where it is not known.  source: one line.
    """

    layers: int
    experts: int
    other: int
    kv_token: int | None
    source: str

    @property
    def total(self) -> int:
        """All weights."""
        return self.experts + self.other


@dataclass(frozen=True)
class Memory:
    """A model's weights against the memory of its GPUs, all of them alike.

    gpus: as asked for, else the fewest that hold the weights.  asked: which of the two.
    fewest: that hold the weights.  gpu_gb: memory of each.  weights_gb: of the whole model.
    left_gb: for KV cache on each GPU, less than 0 where the weights do not fit.
    left_tokens: tokens of KV cache on all GPUs together, None where a token's size is not known.
    """

    gpus: int
    asked: bool
    fewest: int
    gpu_gb: float
    weights_gb: float
    experts_gb: float
    left_gb: float
    left_tokens: int | None
    source: str

    @property
    def fits(self) -> bool:
        """Whether the weights fit, with something left."""
        return self.left_gb > 0


def size_of_preset(preset: Preset) -> ModelSize | None:
    """The model of a preset; None where it is not one of `PUBLISHED`."""
    if preset.name not in PUBLISHED:
        return None
    layers, billions = PUBLISHED[preset.name]
    experts = layers * preset.weight_elements * ELEMENT
    total = round(billions * 1e9) * ELEMENT
    return ModelSize(
        layers,
        experts,
        max(0, total - experts),
        None,
        f"{layers} MoE layers, {billions:g} billion parameters as published",
    )


def size_of_config(path: str | Path, preset: Preset) -> ModelSize | None:
    """The model of a transformers config.json (or the folder that holds it), by its fields.

    preset: that file's layer. Returns None where the file does not say how many layers there are;
    what else is missing is left out of the estimate.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    config = _language_model(json.loads(file.read_text(encoding="utf-8")))
    layers = _count(config, "num_hidden_layers")
    if not layers:
        return None
    moe = _moe_layers(config, layers)
    hidden = _count(config, "hidden_size") or preset.hidden
    heads = _count(config, "num_attention_heads")
    groups = _count(config, "num_key_value_heads") or heads
    size = _count(config, "head_dim") or (hidden // heads if heads else 0)
    latent, rope = _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim")
    if latent:
        plain, value = _count(config, "qk_nope_head_dim"), _count(config, "v_head_dim")
        query = _count(config, "q_lora_rank")
        asked = heads * (plain + rope)
        attention = query * (hidden + asked) if query else hidden * asked
        attention += hidden * (latent + rope) + latent * heads * (plain + value)
        attention += heads * value * hidden
        cached = latent + rope
    else:
        attention = 2 * hidden * size * (heads + groups)
        cached = 2 * groups * size
    dense = 3 * hidden * _count(config, "intermediate_size") * (layers - moe)
    beside = hidden * (3 * preset.shared_intermediate + preset.experts) * moe
    words = _count(config, "vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)
    experts = moe * preset.weight_elements * ELEMENT
    other = (layers * attention + dense + beside + words) * ELEMENT
    kv = cached * _cached_layers(config, layers) * ELEMENT
    return ModelSize(
        moe,
        experts,
        other,
        kv or None,
        f"{moe} MoE layers of {layers}; what is not experts is estimated from the fields",
    )


def _language_model(config: Any) -> dict[str, Any]:
    """The part with the layers, where the file describes several models."""
    if not isinstance(config, dict):
        return {}
    if "num_hidden_layers" in config:
        return config
    inner = (_language_model(value) for value in config.values() if isinstance(value, dict))
    return next((found for found in inner if found), {})


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return value if 0 < value < 1 << 31 else 0


def _moe_layers(config: Mapping[str, Any], layers: int) -> int:
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return pattern.count("E")
    chosen = config.get("moe_layers")
    if isinstance(chosen, list) and chosen:
        return len(chosen)
    first = _count(config, "first_k_dense_replace")
    steps = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")
    step = next((_count(config, key) for key in steps if _count(config, key)), 1)
    dense = config.get("mlp_only_layers")
    dense = dense if isinstance(dense, list) else []
    return sum(1 for i in range(first, layers) if (i + 1) % step == 0 and i not in dense)


def _cached_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers whose cache grows with the text: full attention, no window and no linear attention."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return sum(1 for kind in kinds if kind == "full_attention")
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return pattern.count("*")
    return layers // (_count(config, "full_attention_interval") or 1)


def fit_memory(size: ModelSize, gpu_gb: float, gpus: int | None = None) -> Memory:
    """`size` on `gpus` GPUs of `gpu_gb` GB each; on the fewest that hold it where gpus is None.

    Raises ValueError for gpus below 1 or gpu_gb that is not above 0.
    """
    if not gpu_gb > 0:
        raise ValueError(f"memory_gb must be more than 0, got {gpu_gb}")
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus must be at least 1, got {gpus}")
    usable = gpu_gb * USABLE
    weights = size.total / 1e9
    fewest = math.floor(weights / usable) + 1
    count = gpus or fewest
    left = usable - weights / count
    tokens = None
    if size.kv_token and left > 0:
        tokens = int(left * count * 1e9 / size.kv_token)
    return Memory(
        count,
        gpus is not None,
        fewest,
        gpu_gb,
        weights,
        size.experts / 1e9,
        left,
        tokens,
        size.source,
    )
