"""Models of transformers with our experts: equal to its own, and honest where they cannot run."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import io
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from generators import assert_rows_close, generator
from pages import code_blocks

transformers: Any = pytest.importorskip("transformers", minversion="5.7.0")

import weave_moe  # noqa: E402
from weave_moe import MoELayer, backends  # noqa: E402
from weave_moe.integrations import fit  # noqa: E402
from weave_moe.integrations import transformers as weave  # noqa: E402
from weave_moe.shapes import LayerShape  # noqa: E402

H, I, E, K = 32, 16, 8, 2
VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": I,
    "moe_intermediate_size": I,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
FULL = {"layer_types": ["full_attention", "full_attention"]}
GROUPS = {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
MLA = {
    **GROUPS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "mlp_layer_types": ["sparse", "sparse"],
}
# Plain, shared, grouped, biased, transposed, interleaved, clamped and gateless experts; routers
# that hand out weights in the model's dtype and in fp32.
FAMILIES: dict[str, dict[str, Any]] = {
    "AriaText": {"moe_num_experts": E, "moe_topk": K, "moe_num_shared_experts": 1},
    "DeepseekV2": MLA,
    "DeepseekV3": MLA,
    "DeepseekV4": {},
    "Dots1": GROUPS,
    "Ernie4_5_Moe": {"moe_num_experts": E, "moe_k": K, "moe_layer_start_index": 0},
    "FlexOlmo": {},
    "Glm4Moe": GROUPS,
    "GptOss": {},
    "GraniteMoe": {},
    "HYV4": {},
    "HunYuanMoEV1": {"moe_topk": K},
    "Lfm2Moe": {**FULL, "num_dense_layers": 0},
    "MiniMaxM2": {},
    "Mixtral": {},
    "NemotronH": {
        "layers_block_type": ["attention", "moe"],
        "mlp_hidden_act": "relu2",
        "moe_shared_expert_intermediate_size": I,
        "n_groups": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "Olmoe": {},
    "Phimoe": {},
    "Qwen2Moe": {"shared_expert_intermediate_size": I},
    "Qwen3Moe": {},
    "Qwen3Next": {**FULL, "shared_expert_intermediate_size": I},
}
STATIC = ("GptOss", "Mixtral", "Qwen3Moe")


def fill(module: nn.Module, seed: int = 0) -> None:
    """Weights so large that experts matter: transformers' own start values would hide them."""
    g = generator(seed)
    for name, value in module.named_parameters():
        if value.dim() < 2 or "norm" in name:
            continue
        owner = module.get_submodule(name.rpartition(".")[0])
        fan_in = value.shape[1 if getattr(owner, "is_transposed", False) else -1]
        scale = 0.3 if name.endswith("_bias") else fan_in**-0.5
        scale *= 2 if "experts" in name else 1
        value.data.copy_(scale * torch.randn(value.shape, generator=g))


def model_of(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny random causal language model of a family, or a skip if this release lacks it."""
    config_class = getattr(transformers, f"{family}Config", None)
    model_class = getattr(transformers, f"{family}ForCausalLM", None)
    if config_class is None or model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **FAMILIES[family], **changes}))
    fill(model)
    if not family_has_choice(model):
        pytest.skip(
            f"transformers {transformers.__version__} lets nobody choose {family}'s experts"
        )
    return model.to(dtype).eval()


def family_has_choice(model: nn.Module) -> bool:
    layers = silent_report(model).layers
    return bool(layers) and not any("no choice" in layer.detail for layer in layers)


def tokens(batch: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=generator(seed))


def logits_of(model: Any, implementation: str, ids: Tensor | None = None) -> Tensor:
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        logits: Tensor = model(tokens() if ids is None else ids, use_cache=False).logits
    return logits.float().flatten(0, 1)


def silent_report(model: nn.Module, **options: Any) -> weave.Report:
    return weave.report(model, file=io.StringIO(), **options)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Reasons are logged once a process, and options are the process's: start anew."""
    weave._warn.cache_clear()
    yield
    weave.register()


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Reasons logged so far."""
    caplog.set_level(logging.WARNING, "weave_moe")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "weave_moe"]


class TestFamilies:
    def test_fp32_logits_are_eagers(self, family: str, reasons: Callable[[], list[str]]) -> None:
        model = model_of(family)
        want = logits_of(model, "eager")
        got = logits_of(model, "weave")
        assert_rows_close(got, want, 2e-5)
        assert not reasons()
        assert silent_report(model).on
        # The comparison would show a wrong expert: turning their sign does.
        for name, value in model.named_parameters():
            if name.endswith("experts.down_proj"):
                value.data.neg_()
        other = logits_of(model, "weave")
        assert ((other - want).norm(dim=1) / want.norm(dim=1)).median() > 0.1

    def test_bf16_logits_are_as_near_to_fp32_as_eagers(self, family: str) -> None:
        exact = logits_of(model_of(family), "eager")
        model = model_of(family, torch.bfloat16)
        eager = (logits_of(model, "eager") - exact).norm()
        ours = (logits_of(model, "weave") - exact).norm()
        assert ours <= 1.25 * eager
        assert silent_report(model).on

    def test_generation_is_eagers_token_for_token(self, family: str) -> None:
        model = model_of(family)
        ids = tokens(2, 5, seed=2)
        made = {}
        for implementation in ("eager", "weave"):
            model.set_experts_implementation(implementation)
            try:
                with torch.no_grad():
                    made[implementation] = model.generate(
                        ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids)
                    )
            except (ValueError, StopIteration) as error:
                assert implementation == "eager", "only weave fails"
                pytest.skip(f"transformers {transformers.__version__} cannot either: {error}")
        assert made["weave"].shape == (2, 13)
        assert torch.equal(made["weave"], made["eager"])


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_generation_with_a_static_cache(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    ids = tokens(2, 5, seed=3)
    made = []
    for cache in ("dynamic", "static"):
        model.set_experts_implementation("weave")
        with torch.no_grad():
            made.append(
                model.generate(
                    ids,
                    max_new_tokens=6,
                    do_sample=False,
                    cache_implementation=None if cache == "dynamic" else cache,
                    attention_mask=torch.ones_like(ids),
                )
            )
    assert torch.equal(*made)


# ---- Every class that transformers lets choose --------------------------------------------------


def offered() -> list[tuple[str, str]]:
    """(module, class) of every experts class with the decorator, in the installed release."""
    root = Path(transformers.__file__).parent / "models"
    found = []
    for path in sorted(root.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        for kind in re.findall(r"^@use_experts_implementation.*\nclass (\w+)", text, re.MULTILINE):
            found.append((f"transformers.models.{path.parent.name}.{path.stem}", kind))
    return found


# Classes that compute what the layer does not, and a word of the reason.
NOT_COVERED = {
    "Inkling2Experts": "activation of its own",
    "Inkling2LoopExperts": "activation of its own",
    "MuseSparkExperts": "normalises",
}


def experts_of(module: str, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A module of experts by itself, tiny and random, that runs weave."""
    config = SimpleNamespace(
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
        **dict.fromkeys(("moe_num_experts",), E),
        **dict.fromkeys(("hidden_size", "moe_hidden_size"), H),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), I),
        num_experts_per_tok=3,
        hidden_act="silu",
        hidden_activation="gelu_pytorch_tanh",
        mlp_hidden_act="relu2",
        swiglu_alpha=1.5,
        swiglu_limit=2.0,
        mlp_gate_softcap=3.0,
        mlp_up_softcap=3.0,
        post_norm_eps=1e-6,
        moe_latent_size=None,
        mlp_bias=False,
        _experts_implementation="weave",
    )
    experts = getattr(importlib.import_module(module), kind)(config)
    fill(experts)
    for name, value in experts.named_parameters():
        if name.endswith("_bias"):
            value.data.copy_(torch.randn(value.shape, generator=generator(5)))
    return experts.to(dtype).requires_grad_(False)


def routed(
    count: int = 11, top_k: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states beyond every limit, ids and weights."""
    g = generator(6)
    x = 4 * torch.randn(count, H, generator=g)
    ids = torch.rand(count, E, generator=g).argsort(dim=1)[:, :top_k]
    return x.to(dtype), ids, torch.rand(count, top_k, generator=g) + 0.1


QWEN = ("transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts")
OSS = ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")


@pytest.mark.parametrize(("module", "kind"), offered(), ids=lambda value: str(value)[-24:])
def test_every_class(module: str, kind: str, reasons: Callable[[], list[str]]) -> None:
    try:
        experts = experts_of(module, kind)
    except ImportError as error:
        pytest.skip(f"transformers cannot import {module} here: {error}")
    x, ids, weights = routed()
    want = inspect.unwrap(type(experts).forward)(experts, x, ids, weights)
    assert_rows_close(experts(x, ids, weights), want, 1e-5)
    said = reasons()
    if kind in NOT_COVERED:
        assert len(said) == 1
        assert said[0].startswith(kind)
        assert NOT_COVERED[kind] in said[0]
        experts(x, ids, weights)
        assert reasons() == said
    else:
        assert not said
    assert silent_report(experts).on is (kind not in NOT_COVERED)


def test_a_gate_that_has_changed_since_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, reasons: Callable[[], list[str]]
) -> None:
    """The table of gates is by name: what a class computes under the name is checked, too."""
    experts = experts_of(*OSS)

    def changed(self: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return gate * torch.sigmoid(gate * self.alpha) * up

    original = type(experts)._apply_gate
    changed.__module__, changed.__qualname__ = original.__module__, original.__qualname__
    monkeypatch.setattr(type(experts), "_apply_gate", changed)
    x, ids, weights = routed()
    want = inspect.unwrap(type(experts).forward)(experts, x, ids, weights)
    assert_rows_close(experts(x, ids, weights), want, 1e-5)
    assert "not what this version of weave-moe knows it as" in reasons()[0]


# ---- What reaches the function ------------------------------------------------------------------


class TestCalls:
    @pytest.mark.parametrize("kinds", [QWEN, OSS], ids=["plain", "gpt-oss"])
    @pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
    def test_weights_and_ids_of_any_dtype(
        self, kinds: tuple[str, str], weight_dtype: torch.dtype, id_dtype: torch.dtype
    ) -> None:
        experts = experts_of(*kinds)
        x, ids, weights = routed()
        weights = weights.to(weight_dtype)
        want = inspect.unwrap(type(experts).forward)(experts, x, ids, weights.float())
        got = experts(x, ids.to(id_dtype), weights)
        assert got.dtype == x.dtype
        assert_rows_close(got, want, 1e-5)

    @pytest.mark.parametrize("kinds", [QWEN, OSS], ids=["plain", "gpt-oss"])
    def test_two_halves_of_the_experts_add_up_to_all(self, kinds: tuple[str, str]) -> None:
        """Expert parallelism: foreign experts are id num_experts, which is to be skipped."""
        experts = experts_of(*kinds)
        x, ids, weights = routed()
        want = experts(x, ids, weights)
        total = torch.zeros_like(want)
        for rank in range(2):
            half = copy.deepcopy(experts)
            half._is_expert_parallel = True
            half.num_experts = E // 2
            for name, value in experts.named_parameters():
                part = value.data[rank * E // 2 : (rank + 1) * E // 2].clone()
                setattr(half, name, nn.Parameter(part, requires_grad=False))
            foreign = ids // (E // 2) != rank
            local = torch.where(foreign, E // 2, ids % (E // 2))
            # Transformers passes a weight of 0 there; a skipped slot's weight is not even read.
            total += half(x, local, weights.masked_fill(foreign, float("nan")))
        assert_rows_close(total, want, 1e-5)
        assert not experts(x, torch.full_like(ids, E), weights).any()
        assert not experts(x, torch.full_like(ids, -1), weights).any()

    def test_no_tokens(self) -> None:
        x, ids, weights = routed(0)
        assert experts_of(*QWEN)(x, ids, weights).shape == (0, H)

    def test_arguments_it_does_not_know_are_refused(self) -> None:
        experts = experts_of(*QWEN)
        assert experts(*routed(), None) is not None
        assert experts(*routed(), process_group=None) is not None
        for arguments, options, name in (
            ((object(),), {}, "process_group"),
            ((), {"process_group": object()}, "process_group"),
            ((None, 3), {}, "argument 5"),
            ((), {"scale": 2}, "scale"),
        ):
            with pytest.raises(ValueError, match=f"{name}.*ep_implementation='auto'"):
                experts(*routed(), *arguments, **options)

    def test_hidden_states_wider_than_the_weights(self) -> None:
        """What autocast makes of a layer norm's output."""
        experts = experts_of(*QWEN, torch.bfloat16)
        x, ids, weights = routed()
        got = experts(x, ids, weights)
        assert got.dtype == torch.float32
        assert torch.equal(got, experts(x.bfloat16(), ids, weights).float())

    def test_transposed_weights_keep_shape_and_values(self) -> None:
        experts = experts_of(*OSS)
        before = {name: value.clone() for name, value in experts.state_dict().items()}
        assert weave.prepare(experts) == 1
        first = experts.gate_up_proj.data_ptr()
        experts(*routed())
        assert experts.gate_up_proj.data_ptr() == first, "put into order a second time"
        after = experts.state_dict()
        assert after.keys() == before.keys()
        for name, value in after.items():
            assert value.shape == before[name].shape
            assert torch.equal(value, before[name])
        assert weave.prepare(experts_of(*QWEN)) == 0


# ---- Where it cannot ----------------------------------------------------------------------------


def own(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """What transformers' grouped_mm makes of it."""
    table = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    result: Tensor = table["grouped_mm"](experts, x, ids, weights)
    return result


class TestFallbacks:
    @pytest.mark.parametrize("which", ["x", "topk_weights", "gate_up_proj", "down_proj"])
    def test_gradients_flow_through_transformers_own(
        self, which: str, reasons: Callable[[], list[str]]
    ) -> None:
        experts = experts_of(*QWEN)
        x, ids, weights = routed()
        leaf = {"x": x, "topk_weights": weights}.get(which)
        leaf = getattr(experts, which) if leaf is None else leaf
        leaf.requires_grad_()
        y = experts(x, ids, weights)
        y.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.abs().sum() > 0
        assert torch.equal(y, own(experts, x, ids, weights))
        (reason,) = reasons()
        assert "torch.no_grad()" in reason
        with torch.no_grad():
            assert not experts(x, ids, weights).requires_grad
        assert len(reasons()) == 1

    @pytest.mark.parametrize("which", ["gate_up_proj_bias", "down_proj_bias"])
    def test_gradients_of_biases_alone(self, which: str, reasons: Callable[[], list[str]]) -> None:
        experts = experts_of(*OSS)
        x, ids, weights = routed()
        bias = getattr(experts, which).requires_grad_()
        experts(x, ids, weights).sum().backward()
        assert bias.grad is not None
        (reason,) = reasons()
        assert "gradients are recorded" in reason

    def test_memory_that_was_short_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Is no reason for ever, nor hidden behind another one."""
        monkeypatch.setattr(fit, "_run", set())
        shape = LayerShape(64, 32, 4, 2, "float32")

        def full(*_: Any, **__: Any) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full)
            with pytest.raises(torch.OutOfMemoryError):
                fit.backend_problem("reference", "cpu", None, shape, "silu")
        assert fit.backend_problem("reference", "cpu", None, shape, "silu") is None
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full)  # not asked again
            assert fit.backend_problem("reference", "cpu", None, shape, "silu") is None

    def test_a_refusal_is_asked_for_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fit, "_run", set())
        answers: list[str | None] = ["there is no compiler", None]
        monkeypatch.setattr(backends, "why_not", lambda *_: answers.pop(0))
        shape = LayerShape(64, 32, 4, 2, "float32")
        reason = fit.backend_problem("host", "cpu", None, shape, "silu")
        assert reason == "backend 'host' cannot run it: there is no compiler"
        for _ in range(2):
            assert fit.backend_problem("host", "cpu", None, shape, "silu") is None

    def test_an_activation_of_a_users_own(self, reasons: Callable[[], list[str]]) -> None:
        base = type(experts_of(*QWEN))

        class Mine(base):  # type: ignore[misc, valid-type]
            def _apply_gate(self, gate_up: Tensor) -> Tensor:
                gate, up = gate_up.chunk(2, dim=-1)
                return torch.tanh(gate) * up

        experts = experts_of(*QWEN)
        experts.__class__ = Mine
        arguments = routed()
        assert torch.equal(experts(*arguments), own(experts, *arguments))
        (reason,) = reasons()
        assert reason.startswith("Mine does not run weave: it has an activation of its own")

    @pytest.mark.parametrize(
        ("act", "used"), [("gelu", True), ("gelu_new", True), ("relu2", False), ("tanh", False)]
    )
    def test_the_activation_function(
        self, act: str, used: bool, reasons: Callable[[], list[str]]
    ) -> None:
        experts = experts_of(*QWEN)
        experts.act_fn = transformers.activations.ACT2FN[act]
        arguments = routed()
        assert_rows_close(experts(*arguments), own(experts, *arguments), 1e-5)
        assert (not reasons()) is used
        assert silent_report(experts).on is used

    def test_a_dtype_the_layer_does_not_have(self, reasons: Callable[[], list[str]]) -> None:
        experts = experts_of(*QWEN, torch.float64)
        x, ids, weights = routed(dtype=torch.float64)
        want = inspect.unwrap(type(experts).forward)(experts, x, ids, weights)
        assert torch.equal(experts(x, ids, weights), want)
        assert "float64" in reasons()[0]

    def test_weights_that_are_no_plain_tensors(self, reasons: Callable[[], list[str]]) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        experts = experts_of(*QWEN)
        twice = TwoTensor(experts.down_proj.data, experts.down_proj.data)
        experts.down_proj = nn.Parameter(twice, requires_grad=False)
        status = silent_report(experts).layers[0]
        assert not status.used
        assert "TwoTensor" in status.detail

    def test_the_meta_device(self, reasons: Callable[[], list[str]]) -> None:
        experts = experts_of(*QWEN, torch.bfloat16).to("meta")
        y = experts(*(t.to("meta") for t in routed(dtype=torch.bfloat16)))
        assert y.is_meta
        assert y.shape == (11, H)
        assert "type meta" in reasons()[0]

    def test_a_backend_that_refuses(self, reasons: Callable[[], list[str]]) -> None:
        """The slow reference never stands in by itself."""
        weave.register(backend="cuda")
        experts = experts_of(*QWEN)
        arguments = routed()
        assert torch.equal(experts(*arguments), own(experts, *arguments))
        assert "backend 'cuda' cannot run it" in reasons()[0]
        status = silent_report(experts).layers[0]
        assert not status.used
        assert "cuda" in status.detail
        weave.register(backend="reference")
        assert_rows_close(experts(*arguments), own(experts, *arguments), 1e-5)
        assert silent_report(experts).layers[0].detail == "backend reference"


class TestFp8:
    def experts(self, scheme: str) -> Any:
        fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
        moe = importlib.import_module("transformers.integrations.moe")
        config = SimpleNamespace(
            hidden_size=H,
            num_experts=E,
            moe_intermediate_size=I,
            hidden_act="silu",
            _experts_implementation="weave",
        )
        kind = moe.use_experts_implementation(
            experts_class=type("FP8Experts", (fp8.FP8Experts,), {}),
            experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS,
        )
        return kind(config, block_size=(16, 16), activation_scheme=scheme)

    def test_the_name_passes_and_transformers_own_runs(
        self, monkeypatch: pytest.MonkeyPatch, reasons: Callable[[], list[str]]
    ) -> None:
        from transformers.integrations import finegrained_fp8

        experts = self.experts("dynamic")
        seen = []

        def grouped(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            seen.append(self)
            return x + 1

        table = finegrained_fp8.FP8ExpertsInterface._global_mapping
        monkeypatch.setitem(table, "grouped_mm", grouped)
        x, ids, weights = routed()
        assert torch.equal(experts(x, ids, weights), x + 1)
        assert seen == [experts]
        (reason,) = reasons()
        assert "FP8" in reason

    def test_static_scales_take_the_classs_own_forward(self) -> None:
        experts = self.experts("static")
        # Its loop takes wider weights, too, and then needs no GPU.
        for name in ("gate_up_proj", "down_proj"):
            shape = getattr(experts, name).shape
            wide = torch.randn(shape, generator=generator(8)) / shape[-1] ** 0.5
            setattr(experts, name, nn.Parameter(wide, requires_grad=False))
        x, ids, weights = routed()
        plain = experts_of(*QWEN)
        plain.gate_up_proj, plain.down_proj = experts.gate_up_proj, experts.down_proj
        assert_rows_close(experts(x, ids, weights), plain(x, ids, weights), 1e-5)

    def test_a_report_says_so(self) -> None:
        status = silent_report(self.experts("dynamic")).layers[0]
        assert not status.used
        assert "FP8" in status.detail


# ---- Switching on and off -----------------------------------------------------------------------


class TestSwitching:
    def test_a_transformers_that_takes_no_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def closed(self: Any, name: str) -> str:
            raise ValueError(name)

        kind = transformers.PreTrainedModel
        monkeypatch.setattr(kind, "get_correct_experts_implementation", closed)
        with pytest.raises(ImportError, match=r"needs transformers 5\.7 or newer"):
            weave.register()

    def test_registering_twice_changes_nothing(self) -> None:
        table = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
        before = dict(table)
        weave.register()
        weave.register()
        assert dict(table) == before
        assert list(table).count("weave") == 1

    def test_options_reach_the_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        experts = experts_of(*QWEN)
        want = experts(*routed())
        seen: list[dict[str, Any]] = []

        def spy(*arguments: Any, **options: Any) -> Tensor:
            seen.append(options)
            return weave_moe.fused_experts(*arguments, **options)

        monkeypatch.setattr(weave, "fused_experts", spy)
        weave.register(policy="static_expert", backend="host")
        assert torch.equal(experts(*routed()), want)
        assert (seen[0]["policy"], seen[0]["backend"]) == ("static_expert", "host")

    @pytest.mark.parametrize("options", [{"policy": "fast"}, {"backend": "gpu"}])
    def test_bad_options(self, options: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=f"^{next(iter(options))} must be one of"):
            weave.register(**options)

    def test_snapshots(self) -> None:
        model = model_of("Qwen3Moe")
        if not hasattr(model, "get_experts_implementation"):
            pytest.skip(f"transformers {transformers.__version__} takes no snapshots")
        start = model.get_experts_implementation()
        model.set_experts_implementation("weave")
        snapshot = model.get_experts_implementation()
        assert snapshot == {"": "weave"}
        model.set_experts_implementation(start)
        assert not silent_report(model).on
        model.set_experts_implementation(snapshot)
        assert silent_report(model).on
        with pytest.raises(ValueError, match='experts_implementation="weave"'):
            model.set_experts_implementation("waeve")

    def test_loading_with_the_name(self, tmp_path: Path) -> None:
        model = model_of("GptOss")
        want = logits_of(model, "weave")
        model.save_pretrained(tmp_path)  # after the weights have been put into row order
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, experts_implementation="weave"
        ).eval()
        assert silent_report(loaded).on
        with torch.no_grad():
            got = loaded(tokens(), use_cache=False).logits.flatten(0, 1)
        assert_rows_close(got, want, 1e-6)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert plain.config._experts_implementation == "grouped_mm", "the name was saved"


# ---- The report ---------------------------------------------------------------------------------


class TestReport:
    def test_layers_and_reasons(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = model_of("Qwen3Moe")
        model.set_experts_implementation("grouped_mm")
        assert not weave.report(model).on
        printed = capsys.readouterr().out
        assert printed.startswith("weave: off, in 0 of 2 layers of experts\n")
        assert printed.count("no, experts_implementation is 'grouped_mm'") == 2
        model.set_experts_implementation("weave")
        model.model.layers[1].mlp.experts.act_fn = nn.Tanh()
        found = weave.report(model)
        assert not found.on
        assert [layer.used for layer in found.layers] == [True, False]
        printed = capsys.readouterr().out
        assert printed.startswith("weave: partly on, in 1 of 2 layers of experts\n")
        assert "model.layers.0.mlp.experts  Qwen3MoeExperts: backend host" in printed
        assert "no, its activation Tanh is not covered" in printed

    def test_classes_without_a_choice(self) -> None:
        config = transformers.Llama4TextConfig(**{**SIZES, "num_experts_per_tok": 1})
        moe = importlib.import_module("transformers.models.llama4.modeling_llama4").Llama4TextMoe
        block = moe(config)
        fill(block)
        found = silent_report(block)
        assert len(found.layers) == 1
        assert "no choice" in found.layers[0].detail
        with weave.optimize(nn.Sequential(block)) as done:
            assert done.replaced == ("0",)

    def test_a_dense_model(self) -> None:
        found = silent_report(nn.Sequential(nn.Linear(3, 3)))
        assert not found.on
        assert str(found) == "weave: off, the model has no layers of experts"
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
            weave.report("model")  # type: ignore[arg-type]

    def test_the_command(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        transformers.Qwen3MoeConfig(**SIZES).save_pretrained(tmp_path)
        assert weave.main([str(tmp_path), "cpu"]) == 0
        printed = capsys.readouterr().out
        assert f"transformers {transformers.__version__}" in printed
        assert "weave: on, in 2 of 2 layers of experts" in printed
        # fp32, which the kernel does not take: known without a GPU.
        assert weave.main([str(tmp_path)]) == 1
        assert "the kernel takes bfloat16 and float16" in capsys.readouterr().out
        transformers.Qwen3MoeConfig(**SIZES, dtype="bfloat16").save_pretrained(tmp_path)
        assert weave.main([str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert "weave: on, in 2 of 2 layers of experts" in printed
        assert "backend cuda of a Hopper GPU, which is not here" in printed
        wide = {**SIZES, "moe_intermediate_size": 36}
        transformers.Qwen3MoeConfig(**wide, dtype="bfloat16").save_pretrained(tmp_path)
        assert weave.main([str(tmp_path)]) == 1
        assert "intermediate is 36" in capsys.readouterr().out
        transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
        assert weave.main([str(tmp_path)]) == 1
        for arguments in ([str(tmp_path / "none")], [], ["--help"], [str(tmp_path), "tpu"]):
            capsys.readouterr()
            assert weave.main(arguments) == 2
            assert len(capsys.readouterr().err.strip().splitlines()) == 1

    @pytest.mark.parametrize("method", ["fp8", "mxfp4"])
    def test_the_command_knows_quantised_checkpoints(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
    ) -> None:
        config = transformers.Qwen3MoeConfig(**SIZES, quantization_config={"quant_method": method})
        config.save_pretrained(tmp_path)
        assert weave.main([str(tmp_path)]) == 1
        printed = capsys.readouterr().out
        assert f"weave: off, the checkpoint's weights are {method}: transformers' own" in printed


# ---- Whole blocks -------------------------------------------------------------------------------

FUSED = ("DeepseekV3", "GptOss", "GraniteMoe", "MiniMaxM2", "Mixtral", "NemotronH", "Qwen2Moe")


class TestOptimize:
    @pytest.mark.parametrize("name", FUSED)
    def test_it_computes_the_same_and_comes_back(self, name: str) -> None:
        model = model_of(name)
        want = logits_of(model, "eager")
        names = list(model.state_dict())
        before = {key: type(module) for key, module in model.named_modules()}
        done = weave_moe.optimize(model)
        assert done.replaced
        assert not done.kept
        assert all(isinstance(model.get_submodule(key), MoELayer) for key in done.replaced)
        assert list(model.state_dict()) == names
        assert silent_report(model).on
        assert_rows_close(logits_of(model, "eager"), want, 2e-5)
        done.restore()
        assert {key: type(module) for key, module in model.named_modules()} == before
        # gpt-oss's weights lie in another order now, which moves the last bits of torch's products.
        assert_rows_close(logits_of(model, "eager"), want, 1e-6)
        done.restore()
        assert not done.replaced

    def test_generation(self) -> None:
        model = model_of("Mixtral")
        ids = tokens(2, 5)
        options = {"max_new_tokens": 8, "do_sample": False}
        with torch.no_grad():
            want = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            with weave_moe.optimize(model):
                got = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert torch.equal(got, want)

    def test_twice(self) -> None:
        model = model_of("Qwen3Moe")
        first = weave_moe.optimize(model)
        second = weave_moe.optimize(model)
        assert len(first.replaced) == 2
        assert not second.replaced
        second.restore()
        assert silent_report(model).on
        first.restore()

    @pytest.mark.parametrize("name", ["MiniMaxM2", "DeepseekV3", "GptOss"])
    def test_what_changed_meanwhile_is_kept(self, name: str) -> None:
        """Another dtype, other weights, a buffer of the block's own among them."""
        model = model_of(name)
        done = weave_moe.optimize(model)
        model.to(torch.bfloat16)
        other = model_of(name)
        fill(other, seed=9)
        for key, value in other.named_buffers():
            if key.endswith("correction_bias"):
                value.copy_(torch.randn(value.shape, generator=generator(4)))
        other = other.to(torch.bfloat16)
        model.load_state_dict(other.state_dict())
        done.restore()
        for key, value in model.state_dict().items():
            assert torch.equal(value, other.state_dict()[key]), key
        assert torch.equal(logits_of(model, "eager"), logits_of(other, "eager"))

    def test_blocks_that_stay(self, reasons: Callable[[], list[str]]) -> None:
        model = model_of("Qwen3Moe")
        handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        done = weave_moe.optimize(model)
        assert done.replaced == ("model.layers.1.mlp",)
        assert "hooks" in done.kept["model.layers.0.mlp"]
        assert len(reasons()) == 1
        done.restore()
        handle.remove()
        model.config.output_router_logits = True
        with pytest.raises(ValueError, match="output_router_logits"):
            weave_moe.optimize(model)

    def test_hooks_of_a_part_of_a_block(self) -> None:
        model = model_of("Qwen3Moe")
        model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: None)
        done = weave_moe.optimize(model)
        assert done.replaced == ("model.layers.1.mlp",)
        assert "hooks" in done.kept["model.layers.0.mlp"]

    def test_router_logits_that_are_asked_for_later(self) -> None:
        model, ids = model_of("Qwen3Moe"), tokens()
        with torch.no_grad():
            want = model(ids, output_router_logits=True).router_logits
            done = weave_moe.optimize(model)
            with pytest.raises(ValueError, match=r"output_router_logits must not be True while"):
                model(ids, output_router_logits=True)
            model.config.output_router_logits = True
            with pytest.raises(ValueError, match=r"call \.restore\(\) of what optimize returned"):
                model(ids)
            assert model(ids, output_router_logits=False).logits.isfinite().all()
            done.restore()
            for got, expected in zip(model(ids).router_logits, want, strict=True):
                assert torch.equal(got, expected)

    def test_what_fails_half_way_leaves_the_model_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = model_of("Qwen3Moe")
        before = [module for _, module in model.named_modules()]
        make, made = MoELayer.from_transformers, []

        def once(block: nn.Module, **options: Any) -> MoELayer:
            if made:
                raise torch.OutOfMemoryError("CUDA out of memory")
            made.append(make(block, **options))
            return made[0]

        monkeypatch.setattr(MoELayer, "from_transformers", once)
        with pytest.raises(torch.OutOfMemoryError):
            weave_moe.optimize(model)
        assert made
        after = [module for _, module in model.named_modules()]
        assert all(a is b for a, b in zip(before, after, strict=True))

    def test_a_backend_that_refuses(self, reasons: Callable[[], list[str]]) -> None:
        """A CPU's tensors, then fp32 on a GPU if there is one: the slow reference stays out."""
        model = model_of("GptOss")
        with pytest.raises(ValueError, match="backend 'cuda' cannot run it"):
            weave_moe.optimize(model, backend="cuda")
        assert len(reasons()) == 2
        done = weave_moe.optimize(model)
        found = silent_report(model, device="cuda")
        assert [layer.used for layer in found.layers] == [False, False]
        assert "the slow reference runs" in found.layers[0].detail
        done.restore()

    def test_nothing_to_replace(self) -> None:
        with pytest.raises(ValueError, match="no sparse-MoE block"):
            weave_moe.optimize(nn.Sequential(nn.Linear(3, 3)))
        with pytest.raises(ValueError, match="policy must be one of"):
            weave_moe.optimize(model_of("Mixtral"), policy="fast")
        with pytest.raises(ValueError, match="meta"):
            weave_moe.optimize(model_of("Mixtral").to("meta"))

    def test_it_holds_no_model_alive(self) -> None:
        model = model_of("Mixtral")
        block = model.model.layers[0].mlp
        weave_moe.optimize(model).restore()
        assert model.model.layers[0].mlp is block
        gc.collect()


# ---- Compilers ----------------------------------------------------------------------------------


class Graphs:
    """A compiler's back end that runs graphs as they are and keeps count of them."""

    def __init__(self) -> None:
        self.experts: list[int] = []

    def __deepcopy__(self, memo: Any) -> Graphs:
        return self  # a generation config is copied with the compiler in it

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.experts.append(
            sum("weave.moe_experts" in str(node.target) for node in graph.graph.nodes)
        )
        return graph.forward


class TestCompile:
    @pytest.mark.parametrize("kinds", [QWEN, OSS], ids=["plain", "gpt-oss"])
    def test_experts_of_any_number_of_tokens_are_one_graph(self, kinds: tuple[str, str]) -> None:
        torch._dynamo.reset()
        experts = experts_of(*kinds)
        weave.prepare(experts)
        graphs = Graphs()
        fast = torch.compile(experts, fullgraph=True, dynamic=True, backend=graphs)
        for count in (5, 3, 8, 33):
            x, ids, weights = routed(count)
            assert torch.equal(fast(x, ids, weights), experts(x, ids, weights))
        assert graphs.experts == [1]

    @pytest.mark.slow
    def test_a_model_has_no_graph_break(self) -> None:
        torch._dynamo.reset()
        model = model_of("Qwen3Moe", num_hidden_layers=1)
        model.set_experts_implementation("weave")
        graphs = Graphs()
        fast = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
        with torch.no_grad():
            for length in (5, 7, 12):
                ids = tokens(2, length)
                want = model(ids, use_cache=False).logits
                assert_rows_close(
                    fast(ids, use_cache=False).logits.flatten(0, 1), want.flatten(0, 1), 1e-6
                )
        assert graphs.experts == [1]

    @pytest.mark.slow
    def test_the_default_compiler(self) -> None:
        """Inductor, which moves and fuses what is around the operator, and may relay its inputs."""
        torch._dynamo.reset()
        experts = experts_of(*OSS, torch.bfloat16)
        weave.prepare(experts)

        def around(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            # A transposed x, so that a layout of the compiler's choice would show.
            y: Tensor = experts((x.t().contiguous() * 2).t(), ids, weights.softmax(-1))
            return torch.relu(y) + 1

        fast = torch.compile(around, fullgraph=True, dynamic=True)
        for count in (5, 12):
            x, ids, weights = routed(count, dtype=torch.bfloat16)
            assert_rows_close(fast(x, ids, weights), around(x, ids, weights), 1e-2)

    @pytest.mark.slow
    def test_generate_compiles_decoding(self) -> None:
        """generate() with a static cache, as on a GPU: decoding compiled, without breaks."""
        torch._dynamo.reset()
        model = model_of("Mixtral", num_hidden_layers=1, attn_implementation="sdpa")
        ids = tokens(2, 5)
        graphs = Graphs()
        compiling = transformers.CompileConfig(fullgraph=True, backend=graphs, mode=None)
        compiling._compile_all_devices = True
        made = []
        for implementation in ("eager", "weave"):
            model.set_experts_implementation(implementation)
            extra = {} if implementation == "eager" else {"compile_config": compiling}
            with torch.no_grad():
                made.append(
                    model.generate(
                        ids,
                        max_new_tokens=6,
                        do_sample=False,
                        attention_mask=torch.ones_like(ids),
                        cache_implementation=None if implementation == "eager" else "static",
                        **extra,
                    )
                )
        assert graphs.experts
        assert set(graphs.experts) == {1}
        assert torch.equal(*made)

    def test_transposed_weights_out_of_order_fall_back(
        self, reasons: Callable[[], list[str]]
    ) -> None:
        torch._dynamo.reset()
        experts = experts_of(*OSS)
        graphs = Graphs()
        arguments = routed()
        fast = torch.compile(experts, fullgraph=True, backend=graphs)
        got = fast(*arguments)
        assert graphs.experts == [0]
        (reason,) = reasons()
        assert "prepare(model)" in reason
        assert_rows_close(got, experts(*arguments), 1e-5)

    def test_gradients_fall_back_within_a_graph(self, reasons: Callable[[], list[str]]) -> None:
        torch._dynamo.reset()
        experts = experts_of(*QWEN, torch.bfloat16)
        x, ids, weights = routed(dtype=torch.bfloat16)
        graphs = Graphs()
        fast = torch.compile(experts, fullgraph=True, backend=graphs)
        fast(x, ids, weights)
        table = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
        grouped = table["grouped_mm"]
        try:
            torch.compile(grouped, fullgraph=True, backend=Graphs())(experts, x, ids, weights)
        except torch._dynamo.exc.Unsupported as error:
            pytest.skip(f"transformers' own experts break the graph here: {error}")
        x.requires_grad_()
        fast(x, ids, weights).sum().backward()
        assert x.grad is not None
        assert graphs.experts == [1, 0]
        assert "torch.no_grad()" in reasons()[0]

    def test_export(self) -> None:
        torch._dynamo.reset()
        experts = experts_of(*QWEN)
        count = torch.export.Dim("count", min=2, max=64)
        program = torch.export.export(
            experts, routed(5), dynamic_shapes=tuple({0: count} for _ in range(3))
        )
        assert "weave.moe_experts" in str(program.graph)
        assert torch.equal(program.module()(*routed(9)), experts(*routed(9)))


def test_the_documentations_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/transformers.md, block by block, on a tiny model."""
    page = Path(__file__).resolve().parents[1] / "docs" / "transformers.md"
    blocks = code_blocks(page.read_text("utf-8"))
    model_of("Qwen3Moe").save_pretrained(tmp_path)
    names: dict[str, Any] = {"path": tmp_path}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    printed = capsys.readouterr().out
    shown = "weave: on, in 2 of 2 layers of experts\n  model.layers.0.mlp.experts  Qwen3MoeExperts:"
    assert shown in printed
    assert "tokens/s" in printed
    assert names["done"].replaced == ()
    assert names["model"].config._experts_implementation == "grouped_mm"
    assert f"{len(offered())} of them" in page.read_text("utf-8") or not (
        transformers.__version__.startswith("5.24")
    )
    assert f"{len(FAMILIES)} families" in page.read_text("utf-8")
