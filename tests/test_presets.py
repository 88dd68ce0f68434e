"""Presets agree with transformers' own configuration classes; odd config files are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weave_moe.presets import PRESETS, Preset, from_config, preset

transformers: Any = pytest.importorskip("transformers")

# What the published configuration of each model sets, in transformers' words.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-235b": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", {}),
    "mixtral-8x7b": ("MixtralConfig", {}),
    "mixtral-8x22b": ("MixtralConfig", {"hidden_size": 6144, "intermediate_size": 16384}),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 1024}),
    "deepseek-v2-lite": (
        "DeepseekV2Config",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek-v3": ("DeepseekV3Config", {}),
    "deepseek-v4-flash": ("DeepseekV4Config", {}),
    "kimi-k2": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 384,
            "routed_scaling_factor": 2.827,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "glm-4.5-air": ("Glm4MoeConfig", {}),
    "minimax-m2": ("MiniMaxM2Config", {}),
    "gpt-oss-20b": ("GptOssConfig", {"num_local_experts": 32}),
    "gpt-oss-120b": ("GptOssConfig", {}),
    "llama-4-scout": ("Llama4TextConfig", {}),
    "nemotron-3-nano": (
        "NemotronHConfig",
        {
            "hidden_size": 2688,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 2.5,
        },
    ),
}


def layer_only(entry: Preset) -> Preset:
    """Without the names, which a configuration does not have."""
    return replace(entry, name="", title="", notes=())


@pytest.mark.parametrize("name", [*CONFIGS, "qwen3.5-35b"])
def test_preset_is_what_transformers_config_says(name: str, tmp_path: Path) -> None:
    if name == "qwen3.5-35b":
        kind, fields = "Qwen3_5MoeConfig", {}  # nested: text_config within
    else:
        kind, fields = CONFIGS[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config: Any = getattr(transformers, kind)(**fields)
    values = config.to_dict()
    values["dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    assert layer_only(from_config(tmp_path)) == layer_only(PRESETS[name])
    assert from_config(tmp_path / "config.json").notes == ()


def test_every_preset_is_checked_above() -> None:
    assert set(PRESETS) == {*CONFIGS, "qwen3.5-35b"}


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_can_be_routed_and_scaled(name: str) -> None:
    entry = preset(name)
    entry.routing.check_experts(entry.experts)
    assert entry.shape().gated == entry.activation.gated
    small = entry.scaled(Fraction(1, 8))
    assert small.hidden % 8 == small.intermediate % 8 == 0
    assert abs(small.hidden - entry.hidden / 8) < 8
    assert abs(small.intermediate - entry.intermediate / 8) < 8
    assert (small.experts, small.routing) == (entry.experts, entry.routing)


def test_weight_elements_and_flops_count_the_two_products() -> None:
    entry = PRESETS["qwen3-30b"]
    assert entry.weight_elements == 128 * 3 * 768 * 2048
    assert entry.flops(10) == 10 * 6 * 768 * 2048
    plain = PRESETS["nemotron-3-nano"]
    assert plain.weight_elements == 128 * 2 * 1856 * 2688


GOOD: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}


def write(folder: Path, content: object) -> Path:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_good_config_is_good(tmp_path: Path) -> None:
    found = from_config(write(tmp_path, GOOD))
    assert (found.hidden, found.intermediate, found.experts, found.top_k) == (64, 32, 8, 2)
    assert found.routing.renormalize
    assert found.notes == ()


NUMBERS = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
WRONG = st.one_of(
    st.integers(max_value=0), st.floats(), st.booleans(), st.text(), st.lists(st.text(), min_size=1)
)


@given(key=st.sampled_from(NUMBERS), value=WRONG)
def test_a_wrong_number_is_named(
    key: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("config"), {**GOOD, key: value})
    with pytest.raises(ValueError, match=key) as error:
        from_config(path)
    assert "\n" not in str(error.value).replace(repr(value), "")


@pytest.mark.parametrize("key", NUMBERS)
def test_a_missing_field_is_named(key: str, tmp_path: Path) -> None:
    path = write(tmp_path, {name: value for name, value in GOOD.items() if name != key})
    with pytest.raises(ValueError, match=str(path)):
        from_config(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts": None}, "not a Mixture-of-Experts"),
        ({"num_experts_per_tok": 9}, "9"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"scoring_func": "cosine"}, "scoring_func"),
        ({"n_group": 3, "topk_group": 1}, "num_groups"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"routed_scaling_factor": "big"}, "routed_scaling_factor"),
        ({"swiglu_limit": -1.0}, "limit"),
    ],
)
def test_what_cannot_be_a_layer_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        from_config(write(tmp_path, {**GOOD, **change}))


@given(text=st.text())
def test_any_text_is_a_config_or_one_error(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match="config"):
        from_config(path)


def test_what_is_assumed_is_said(tmp_path: Path) -> None:
    unknown = {**GOOD, "model_type": "brand_new_moe", "quantization_config": {}, "dtype": "fp8"}
    notes = " ".join(from_config(write(tmp_path, unknown)).notes)
    for word in ("brand_new_moe", "softmax", "weights are quantised", "fp8"):
        assert word in notes


def test_how_a_checkpoint_is_stored_is_kept(tmp_path: Path) -> None:
    stored = {"quantization_config": {"quant_method": "mxfp4"}}
    found = from_config(write(tmp_path, {**GOOD, **stored}))
    assert found.quantized == "mxfp4"
    assert "the checkpoint's weights are mxfp4" in " ".join(found.notes)
    # Where the language model is one of several, it stands beside them.
    assert from_config(write(tmp_path, {"text_config": GOOD, **stored})).quantized == "mxfp4"
    assert from_config(write(tmp_path, GOOD)).quantized == ""


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"deepseek-v3.*did you mean mixtral-8x7b"):
        preset("mixtral-8x7")
