"""`MoELayer.from_transformers` against transformers' own blocks, made tiny, on the same weights."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from generators import assert_rows_close, generator
from weave_moe import Activation, LayerShape, MoELayer, RoutingConfig, fused_experts
from weave_moe.blocks import COVERED, parts_of
from weave_moe.routing import route, router_logits

transformers = pytest.importorskip("transformers", minversion="5.0.0")

H, I, E, K = 48, 20, 16, 3

# Every way of saying a size that the configurations below know; each takes what it has.
SIZES: dict[str, Any] = {
    "hidden_size": H,
    "num_experts_per_tok": K,
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "n_group": 1,
    "topk_group": 1,
}
V3 = {"moe_intermediate_size": I, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
PLAIN = {"intermediate_size": I}
QWEN = {"moe_intermediate_size": I, "intermediate_size": 7}
SHARED = {**QWEN, "shared_expert_intermediate_size": 12}

# Block -> (model, configuration class, options). A model's class is in the file of that name.
BLOCKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "MixtralSparseMoeBlock": ("mixtral", "MixtralConfig", PLAIN),
    "MiniMaxSparseMoeBlock": ("minimax", "MiniMaxConfig", PLAIN),
    "MiniMaxM2SparseMoeBlock": ("minimax_m2", "MiniMaxM2Config", PLAIN),
    "OlmoeSparseMoeBlock": ("olmoe", "OlmoeConfig", {**PLAIN, "norm_topk_prob": False}),
    "FlexOlmoSparseMoeBlock": ("flex_olmo", "FlexOlmoConfig", {**PLAIN, "norm_topk_prob": True}),
    "Qwen2MoeSparseMoeBlock": ("qwen2_moe", "Qwen2MoeConfig", {**SHARED, "norm_topk_prob": False}),
    "Qwen3MoeSparseMoeBlock": ("qwen3_moe", "Qwen3MoeConfig", {**QWEN, "norm_topk_prob": True}),
    "Qwen3NextSparseMoeBlock": ("qwen3_next", "Qwen3NextConfig", SHARED),
    "Qwen3_5MoeSparseMoeBlock": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", SHARED),
    "Qwen3VLMoeTextSparseMoeBlock": ("qwen3_vl_moe", "Qwen3VLMoeTextConfig", QWEN),
    "DeepseekV2Moe": ("deepseek_v2", "DeepseekV2Config", {**V3, "topk_method": "greedy"}),
    "DeepseekV3MoE": ("deepseek_v3", "DeepseekV3Config", V3),
    "DeepseekV32MoE": ("deepseek_v32", "DeepseekV32Config", V3),
    "DeepseekV4SparseMoeBlock": (
        "deepseek_v4",
        "DeepseekV4Config",
        {"moe_intermediate_size": I, "mlp_layer_types": ["moe"], "num_hidden_layers": 1},
    ),
    "Dots1MoE": ("dots1", "Dots1Config", {**V3, "n_shared_experts": 2}),
    "Glm4MoeMoE": ("glm4_moe", "Glm4MoeConfig", {**V3, "norm_topk_prob": True}),
    "Glm4MoeLiteMoE": ("glm4_moe_lite", "Glm4MoeLiteConfig", V3),
    "Glm4vMoeTextMoE": ("glm4v_moe", "Glm4vMoeTextConfig", V3),
    "GlmMoeDsaMoE": ("glm_moe_dsa", "GlmMoeDsaConfig", V3),
    "KimiLinearMoE": ("kimi_linear", "KimiLinearConfig", V3),
    "SolarOpenMoE": ("solar_open", "SolarOpenConfig", V3),
    "MiMoV2FlashMoE": ("mimo_v2_flash", "MiMoV2FlashConfig", V3),
    "NemotronHMoE": (
        "nemotron_h",
        "NemotronHConfig",
        {**V3, "moe_shared_expert_intermediate_size": 12, "mlp_hidden_act": "relu2"},
    ),
    "GptOssMLP": ("gpt_oss", "GptOssConfig", PLAIN),
    "GraniteMoeMoE": ("granitemoe", "GraniteMoeConfig", PLAIN),
    "GraniteMoeSharedMoE": ("granitemoeshared", "GraniteMoeSharedConfig", PLAIN),
    "GraniteMoeHybridMoE": ("granitemoehybrid", "GraniteMoeHybridConfig", PLAIN),
    "Llama4TextMoe": ("llama4", "Llama4TextConfig", {**PLAIN, "num_experts_per_tok": 1}),
}


def config_of(block: str, **changes: Any) -> Any:
    """The tiny configuration of a block."""
    model, name, options = BLOCKS[block]
    module = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    config = getattr(module, name)(**options)
    for key, value in {**SIZES, **options, **changes}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config._experts_implementation = "eager"
    return config


def block_of(block: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A block with weights that give outputs of about 1, or a skip if this release lacks it."""
    model = BLOCKS[block][0]
    try:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} has no {model}")
    config = config_of(block, **changes)
    made: nn.Module = getattr(module, block)(config, *([0] if "DeepseekV4" in block else []))
    if not hasattr(made, "experts"):
        pytest.skip(f"transformers {transformers.__version__} has another {block}")
    g = generator(seed)
    for name, value in [*made.named_parameters(), *made.named_buffers()]:
        fan_in = value.shape[-1]
        if "experts." in name and block in ("GptOssMLP", "Llama4TextMoe") and value.dim() == 3:
            fan_in = value.shape[1]
        scale = 0.3 if value.dim() == 1 or name.endswith("_bias") else fan_in**-0.5
        scale *= 2 if "down_proj" in name else 1
        value.data.copy_(scale * torch.randn(value.shape, generator=g))
    return made.eval().requires_grad_(False)


def hidden_of(output: Tensor | tuple[Tensor, ...], like: Tensor) -> Tensor:
    """The hidden states of a block's output, which may be a tuple, in the input's shape."""
    return (output[0] if isinstance(output, tuple) else output).view(like.shape)


@pytest.fixture(params=sorted(BLOCKS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_table_here_is_all_that_is_covered() -> None:
    assert sorted(BLOCKS) == sorted(COVERED)


def test_fp32_is_equal_within_rounding(name: str, backend: str) -> None:
    block = block_of(name)
    x = torch.randn(2, 9, H, generator=generator(1))
    want = hidden_of(block(x), x)
    assert 0.3 < want.square().mean().sqrt() < 10
    got = MoELayer.from_transformers(block, backend=backend)(x)
    assert_rows_close(got.flatten(0, 1), want.flatten(0, 1), 2e-6)


def test_the_block_still_computes_the_same_afterwards(name: str) -> None:
    """Its weights may have moved in memory, and are the same parameters with the same values."""
    block = block_of(name)
    x = torch.randn(1, 7, H, generator=generator(2))
    before = hidden_of(block(x), x)
    values = {k: v.clone() for k, v in block.state_dict().items()}
    MoELayer.from_transformers(block)
    for key, value in block.state_dict().items():
        assert torch.equal(value, values[key])
    assert_rows_close(hidden_of(block(x), x)[0], before[0], 2e-6)


def test_the_state_dict_is_the_block_s(name: str, backend: str) -> None:
    block, other = block_of(name, seed=0), block_of(name, seed=1)
    layer = MoELayer.from_transformers(block, backend=backend)
    assert list(layer.state_dict()) == list(block.state_dict())
    for key, value in other.state_dict().items():
        assert layer.state_dict()[key].shape == value.shape
    x = torch.randn(1, 7, H, generator=generator(3))
    layer.load_state_dict(other.state_dict())
    assert_rows_close(layer(x)[0], hidden_of(other(x), x)[0], 2e-6)
    # Loaded in place: the block it came from holds the same memory.
    assert_rows_close(hidden_of(block(x), x)[0], hidden_of(other(x), x)[0], 2e-6)
    # And the other way round, through a file.
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    fresh = block_of(name, seed=2)
    fresh.load_state_dict(torch.load(buffer))
    assert_rows_close(hidden_of(fresh(x), x)[0], hidden_of(other(x), x)[0], 2e-6)


def test_low_precision_experts_are_the_block_s_within_rounding(name: str, backend: str) -> None:
    """The same ids and weights given, since routers differ in what they round."""
    if name == "Llama4TextMoe":
        pytest.skip("its experts take all tokens for all experts, not ids")
    block = block_of(name).to(torch.bfloat16)
    layer = MoELayer.from_transformers(block, backend=backend)
    x = torch.randn(9, H, generator=generator(4)).to(torch.bfloat16)
    weights = torch.rand(9, K, generator=generator(5)).to(torch.bfloat16)
    ids = torch.rand(9, E, generator=generator(6)).argsort(1)[:, :K]
    w13, w2 = layer._expert_weights()
    parts = layer.parts
    got = fused_experts(
        x,
        w13,
        w2,
        weights,
        ids,
        activation=layer.activation,
        b13=layer._tensor(parts.b13),
        b2=layer._tensor(parts.b2),
        interleaved=parts.interleaved,
        backend=backend,
    )
    # The block rounds after each step and adds up in bf16.
    assert_rows_close(got, block.experts(x, ids, weights), 2.0**-6)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layers_follow_the_fp32_block(
    name: str, dtype: torch.dtype, backend: str
) -> None:
    """Against the block in fp32 with the same rounded weights: our router rounds no logits."""
    block = block_of(name).to(dtype)
    truth = copy.deepcopy(block).float()
    layer = MoELayer.from_transformers(block, backend=backend)
    x = torch.randn(1, 9, H, generator=generator(7)).to(dtype)
    got, want = layer(x), hidden_of(truth(x.float()), x)
    assert got.dtype is dtype
    assert_rows_close(got[0], want[0], 2.0**-6 if dtype is torch.bfloat16 else 2.0**-9)


@pytest.mark.parametrize(
    "move",
    [
        copy.deepcopy,
        lambda layer: layer.to(torch.float64).to(torch.float32),
        lambda layer: layer.share_memory(),
    ],
    ids=["deepcopy", "cast", "share_memory"],
)
def test_moving_a_layer_changes_nothing(name: str, move: Callable[[MoELayer], MoELayer]) -> None:
    x = torch.randn(1, 7, H, generator=generator(8))
    layer = MoELayer.from_transformers(block_of(name), backend="reference")
    want = layer(x)
    moved = move(layer)
    # Under inference mode, where the memory order may have to be restored.
    with torch.inference_mode():
        assert torch.equal(moved(x), want)
    assert torch.equal(moved(x), want)
    # Ordinary parameters still, which can be loaded into and trained.
    assert not any(parameter.is_inference() for parameter in moved.parameters())
    moved.load_state_dict(block_of(name, seed=1).state_dict())
    other = MoELayer.from_transformers(block_of(name, seed=1), backend="reference")
    assert torch.equal(moved(x), other(x))


def test_weights_are_never_copied(name: str) -> None:
    layer = MoELayer.from_transformers(block_of(name))
    storages = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    for weight in layer._expert_weights():
        assert weight.untyped_storage().data_ptr() in storages
        assert weight.is_contiguous()
    shared = layer._shared_experts()
    if shared is not None:
        assert shared.w13.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("gap", [0, 3])
def test_shared_projections_in_one_block_in_another_order(gap: int) -> None:
    """up before gate, and with a gap between them: they must not be taken for [gate, up]."""
    block = block_of("DeepseekV3MoE")
    x = torch.randn(1, 7, H, generator=generator(18))
    want = block(x)
    mlp: Any = block.shared_experts
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    rows = gate.size(0)
    both = torch.full((2 * rows + gap, H), float("nan"))
    for weight, first in (
        ((up, 0), (gate, rows + gap)) if gap == 0 else ((gate, 0), (up, rows + gap))
    ):
        view = both[first : first + rows]
        view.copy_(weight)
        weight.data = view
    layer = MoELayer.from_transformers(block, backend="reference")
    assert_rows_close(layer(x)[0], want[0], 2e-6)


def test_it_reads_the_shape(name: str) -> None:
    layer = MoELayer.from_transformers(block_of(name))
    gated = name != "NemotronHMoE"
    top_k = 1 if name == "Llama4TextMoe" else K
    assert layer.shape == LayerShape(H, I, E, top_k, "float32", gated)
    assert layer.extra_repr()


class TestOptions:
    @pytest.mark.parametrize("normalise", [False, True])
    @pytest.mark.parametrize(
        "name", ["Qwen3MoeSparseMoeBlock", "OlmoeSparseMoeBlock", "DeepseekV3MoE"]
    )
    def test_renormalising_follows_the_block(self, name: str, normalise: bool) -> None:
        block = block_of(name, norm_topk_prob=normalise)
        layer = MoELayer.from_transformers(block, backend="reference")
        assert layer.routing.renormalize is normalise
        x = torch.randn(1, 7, H, generator=generator(9))
        assert_rows_close(layer(x)[0], block(x)[0], 2e-6)

    @pytest.mark.parametrize("name", ["DeepseekV2Moe", "DeepseekV3MoE"])
    @pytest.mark.parametrize(("groups", "kept"), [(1, 1), (2, 1), (8, 4)])
    def test_groups_follow_the_block(self, name: str, groups: int, kept: int) -> None:
        changes = {"n_group": groups, "topk_group": kept, "topk_method": "group_limited_greedy"}
        block = block_of(name, **changes)
        layer = MoELayer.from_transformers(block, backend="reference")
        assert (layer.routing.num_groups, layer.routing.topk_groups) == (groups, kept)
        x = torch.randn(1, 30, H, generator=generator(10))
        try:
            want = block(x)
        except AttributeError as error:
            pytest.skip(f"transformers {transformers.__version__} cannot run it either: {error}")
        assert_rows_close(layer(x)[0], want[0], 2e-6)

    @pytest.mark.parametrize("factor", [1.0, 2.5, 16.0])
    @pytest.mark.parametrize("name", ["DeepseekV2Moe", "DeepseekV3MoE", "DeepseekV4SparseMoeBlock"])
    def test_scaling_is_applied_to_routed_experts_only(self, name: str, factor: float) -> None:
        block = block_of(name, routed_scaling_factor=factor)
        layer = MoELayer.from_transformers(block, backend="reference")
        assert layer.routing.scaling_factor == factor
        x = torch.randn(1, 7, H, generator=generator(11))
        assert_rows_close(layer(x)[0], block(x)[0], 2e-6)

    @pytest.mark.parametrize(
        ("act", "kind"), [("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")]
    )
    def test_the_activation_follows_the_block(self, act: str, kind: str) -> None:
        block = block_of("Qwen2MoeSparseMoeBlock", hidden_act=act)
        layer = MoELayer.from_transformers(block, backend="reference")
        assert layer.activation == Activation(kind)
        x = torch.randn(1, 7, H, generator=generator(12))
        assert_rows_close(layer(x)[0], block(x)[0], 2e-6)

    @pytest.mark.parametrize("name", ["GptOssMLP", "DeepseekV4SparseMoeBlock"])
    def test_clamped_values_are_clamped(self, name: str) -> None:
        """Inputs so large that the limit decides: without it, results would differ by far."""
        block = block_of(name)
        layer = MoELayer.from_transformers(block, backend="reference")
        x = 30 * torch.randn(1, 7, H, generator=generator(13))
        want = hidden_of(block(x), x)
        assert_rows_close(layer(x)[0], want[0], 1e-5)
        limitless = Activation("silu", layer.activation.alpha, None, layer.activation.up_offset)
        w13, w2 = layer._expert_weights()
        parts = layer.parts
        weights, ids = route(
            router_logits(x[0], getattr(block, parts.router_weight.split(".")[0]).weight),
            layer.routing,
        )
        far = fused_experts(
            x[0],
            w13,
            w2,
            weights,
            ids,
            activation=limitless,
            interleaved=parts.interleaved,
            backend="reference",
        )
        assert far.norm() > 2 * want.norm()

    def test_a_negative_selection_bias_chooses_as_the_block_does(self) -> None:
        block = block_of("DeepseekV3MoE")
        if "masked_fill(~score_mask.bool(), 0.0)" in inspect.getsource(
            inspect.getmodule(type(block))
        ):  # type: ignore[arg-type]
            pytest.skip(
                f"transformers {transformers.__version__} takes experts of dropped groups here"
            )
        block.gate.e_score_correction_bias -= 5.0  # type: ignore[union-attr,operator]
        layer = MoELayer.from_transformers(block, backend="reference")
        x = torch.randn(1, 30, H, generator=generator(14))
        assert_rows_close(layer(x)[0], block(x)[0], 2e-6)

    def test_later_changes_of_the_weights_are_seen(self) -> None:
        """Engines rewrite weights in place."""
        block = block_of("GptOssMLP")
        layer = MoELayer.from_transformers(block, backend="reference")
        x = torch.randn(1, 7, H, generator=generator(15))
        before = layer(x)
        block.experts.gate_up_proj.mul_(0.5)  # type: ignore[union-attr,operator]
        assert (layer(x) - before).abs().max() > 0.05
        assert_rows_close(layer(x)[0], hidden_of(block(x), x)[0], 2e-6)


class TestInsideAModel:
    @pytest.mark.parametrize(
        ("model", "config", "options"),
        [
            ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"moe_intermediate_size": I}),
            ("MixtralForCausalLM", "MixtralConfig", {}),
            ("GptOssForCausalLM", "GptOssConfig", {}),
        ],
    )
    def test_a_model_with_its_blocks_replaced_gives_the_same_logits(
        self, model: str, config: str, options: dict[str, Any], backend: str
    ) -> None:
        made = getattr(transformers, config)(
            vocab_size=64,
            hidden_size=H,
            intermediate_size=I,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            num_experts_per_tok=2,
            **options,
        )
        for key in ("num_experts", "num_local_experts"):
            if hasattr(made, key):
                setattr(made, key, 8)
        torch.manual_seed(0)
        net = getattr(transformers, model)(made).eval().requires_grad_(False)
        # Two sequences, because a tuple of two would unpack from a batch of two in silence.
        tokens = torch.randint(64, (2, 11), generator=generator(16))
        want = net(tokens).logits
        for layer in net.model.layers:
            layer.mlp = MoELayer.from_transformers(layer.mlp, backend=backend, drop_in=True)
        torch.testing.assert_close(net(tokens).logits, want, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["GptOssMLP", "Llama4TextMoe", "MixtralSparseMoeBlock"])
    def test_drop_in_returns_what_the_block_does(self, name: str) -> None:
        block = block_of(name)
        layer = MoELayer.from_transformers(block, backend="reference", drop_in=True)
        x = torch.randn(2, 7, H, generator=generator(17))
        want, got = block(x), layer(x)
        assert type(got) is type(want)
        for one, other in zip(
            got if isinstance(got, tuple) else (got,),
            want if isinstance(want, tuple) else (want,),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class TestWhatIsNotCovered:
    def test_no_module(self) -> None:
        with pytest.raises(TypeError, match=r"^module must be a torch.nn.Module, got str"):
            MoELayer.from_transformers("model")  # type: ignore[arg-type]

    def test_another_module(self) -> None:
        with pytest.raises(ValueError, match=r"^module must be one of .*Mixtral.*, got Linear$"):
            MoELayer.from_transformers(nn.Linear(2, 2))

    def fails(self, block: nn.Module, words: str) -> None:
        name = type(block).__name__
        with pytest.raises(ValueError, match=f"^module {name} is not covered: .*{words}"):
            parts_of(block)

    def test_hash_routing(self) -> None:
        self.fails(
            block_of("DeepseekV4SparseMoeBlock", mlp_layer_types=["hash_moe"]), "hash routing"
        )

    def test_a_latent_projection(self) -> None:
        self.fails(block_of("NemotronHMoE", moe_latent_size=8), "projects tokens by fc1_latent")

    def test_experts_in_a_list(self) -> None:
        block = block_of("MixtralSparseMoeBlock")
        block.experts = nn.ModuleList([nn.Linear(2, 2)])
        block.experts.act_fn = nn.SiLU()
        self.fails(block, "experts.gate_up_proj; its experts are a list of modules")

    def test_quantised_experts(self) -> None:
        block = block_of("MixtralSparseMoeBlock")
        weight = block.experts.down_proj.to(torch.float8_e4m3fn)  # type: ignore[union-attr,operator]
        block.experts.down_proj = nn.Parameter(weight, requires_grad=False)  # type: ignore[union-attr]
        self.fails(block, "experts.down_proj must be .*float8_e4m3fn")

    def test_split_experts(self) -> None:
        block = block_of("MixtralSparseMoeBlock")
        block.experts._is_expert_parallel = True  # type: ignore[union-attr]
        self.fails(block, "split over several processes")

    def test_an_unknown_activation(self) -> None:
        self.fails(block_of("MixtralSparseMoeBlock", hidden_act="quick_gelu"), "QuickGELU")

    def test_shared_experts_with_another_activation(self) -> None:
        block = block_of("Qwen2MoeSparseMoeBlock")
        block.shared_expert.act_fn = block_of(
            "Qwen2MoeSparseMoeBlock", hidden_act="gelu"
        ).experts.act_fn  # type: ignore[union-attr]
        self.fails(block, "shared_expert has another activation")

    def test_shared_experts_with_biases(self) -> None:
        self.fails(
            block_of("DeepseekV4SparseMoeBlock", mlp_bias=True), "shared_experts.* has a bias"
        )

    def test_a_missing_part(self) -> None:
        block = block_of("MixtralSparseMoeBlock")
        del block.gate
        self.fails(block, "no child module gate")

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"policy": "fast"}, ValueError, "^policy must be"),
            ({"backend": "tpu"}, ValueError, "^backend must be"),
            ({"drop_in": 1}, TypeError, "^drop_in must be"),
        ],
    )
    def test_options(self, options: dict[str, Any], error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            MoELayer.from_transformers(block_of("MixtralSparseMoeBlock"), **options)


def test_a_routing_read_is_the_routing_of_the_table() -> None:
    """Spot checks of what README and the shapes table say of well-known models."""
    v3 = MoELayer.from_transformers(block_of("DeepseekV3MoE")).routing
    assert v3 == RoutingConfig(
        K, "sigmoid", renormalize=True, scaling_factor=2.5, num_groups=4, topk_groups=2
    )
    oss = MoELayer.from_transformers(block_of("GptOssMLP"))
    assert oss.routing == RoutingConfig(K, "topk_softmax", renormalize=True)
    assert oss.activation == Activation.parse("swiglu_oai")
    llama = MoELayer.from_transformers(block_of("Llama4TextMoe"))
    assert llama.routing == RoutingConfig(1, "sigmoid")
    assert llama.parts.weight_on_input
