"""Whole models of published architectures in transformers, with random weights, and their two
phases: decoding a batch and taking in a prompt. What end_to_end.py times.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

import weave_moe
import weave_moe.integrations.transformers as weave
from weave_moe.blocks import COVERED
from weave_moe.reference import experts_reference
from weave_moe.shapes import check_experts

ROWS = 64
"""Rows that are compared at least: a small batch decodes more tokens."""
STEPS = 8
"""Tokens that each sequence decodes at least, and those that are timed."""
PROMPT_TOKENS = 4096
"""Of the prompts whose keys and values the sequences of a batch have in their caches."""


class Architecture(NamedTuple):
    """transformers' name for it, and the fields of its published config.json."""

    kind: str
    fields: dict[str, Any]


ARCHITECTURES = {
    "qwen3-30b": Architecture(
        "qwen3_moe",
        {
            **{"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            **{"intermediate_size": 6144, "norm_topk_prob": True, "rms_norm_eps": 1e-6},
            **{"max_position_embeddings": 40960, "tie_word_embeddings": False},
        },
    ),
    "mixtral": Architecture(
        "mixtral",
        {
            **{"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8},
            **{"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336},
            **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "sliding_window": None},
            "tie_word_embeddings": False,
        },
    ),
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
"""Of both models."""


class Call(NamedTuple):
    """What a layer's experts were given, and the right result [T, H] in fp32."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor


class Truth:
    """Experts for transformers that compute in fp32, and keep their calls while `kept` is a list.

    Where x and y go on from, the next layer, is bf16, as everywhere else.
    """

    def __init__(self) -> None:
        self.kept: list[Call] | None = None

    def __call__(self, experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        call = check_experts(x, experts.gate_up_proj, experts.down_proj, weights, ids)
        y = experts_reference(call, rounding=False)
        if self.kept is not None:
            self.kept.append(Call(x, ids, weights, y))
        return y.to(x.dtype)


def no_experts(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Costs nothing."""
    return x


TRUTH = Truth()
NAMES = {"truth": "end_to_end_truth", "without:experts": "end_to_end_none", "weave": weave.NAME}
"""experts_implementation, where it is not the part of the contestant's name after the colon."""
ExpertsInterface.register(NAMES["truth"], TRUTH)
ExpertsInterface.register(NAMES["without:experts"], no_experts)


def build(name: str, layers: int | None, device: torch.device) -> Any:
    """A model of an architecture with so many layers, None for all, and random bf16 weights.

    Every product keeps its input's size, but what layers add is smaller, that of experts much: then
    a near-tied expert, which rounding orders either way, moves hidden states by little and does not
    multiply through the layers, as it would where each layer replaces what it got.
    """
    kind, fields = ARCHITECTURES[name]
    depth = fields["num_hidden_layers"]
    depth = depth if layers is None else min(layers, depth)
    fields = fields | {"num_hidden_layers": depth, "rope_parameters": dict(ROPE)}
    config = transformers.AutoConfig.for_model(kind, **fields)
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="eager"
        )
    model.eval().requires_grad_(False)
    embeddings = model.get_input_embeddings().weight
    for path, parameter in model.named_parameters():
        if parameter.dim() == 1:
            continue  # a norm's: ones
        scale = 1.0 if parameter is embeddings else parameter.shape[-1] ** -0.5
        if path.endswith("o_proj.weight"):
            scale *= depth**-0.5
        elif path.endswith("down_proj"):
            scale *= 0.25 * depth**-0.5
        parameter.normal_(0, scale)
    return model


class Stage:
    """A model, and how its blocks are computed.

    blocks: names of its sparse-MoE blocks.  full: layers of the whole model.
    prompt: tokens [n, C] whose keys and values `contexts` has, a pair [n, h, C, d] a layer.
    """

    def __init__(self, name: str, model: Any, context: int, backend: str = "auto") -> None:
        self.name, self.model, self.backend = name, model, backend
        self.device = next(model.parameters()).device
        self.full = ARCHITECTURES[name].fields["num_hidden_layers"]
        self.blocks = [
            path for path, module in model.named_modules() if type(module).__name__ in COVERED
        ]
        # As newer releases call it; they warn of the old name.
        names = inspect.signature(type(model.base_model).forward).parameters
        self.cache = "cache" if "cache" in names else "past_key_values"
        weave.register(backend=backend)
        self.prompt = self.random_tokens(max(1, PROMPT_TOKENS // context), context, seed=0)
        held = transformers.DynamicCache(config=model.config)
        with self.running("transformers:eager"):
            self.hidden(self.prompt, held)
        self.contexts = [(layer.keys, layer.values) for layer in held.layers]

    def random_tokens(self, *size: int, seed: int) -> Tensor:
        g = torch.Generator(device=self.device)
        g.manual_seed(seed)
        vocabulary = self.model.config.vocab_size
        return torch.randint(vocabulary, size, device=self.device, generator=g)

    def hidden(self, tokens: Tensor, cache: Any) -> Tensor:
        """Hidden states [B, S, H] behind the last norm, of tokens [B, S] that follow a cache's."""
        given = {self.cache: cache}
        found: Tensor = self.model.base_model(
            input_ids=tokens, use_cache=True, **given
        ).last_hidden_state
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.model.get_output_embeddings()(hidden)
        return found

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """With the blocks of a contestant. Raises RuntimeError if ours would not run in each."""
        if name == "weave:optimize":
            done = weave_moe.optimize(self.model, backend=self.backend)
            try:
                if done.kept:
                    raise RuntimeError(next(iter(done.kept.values())))
                yield
            finally:
                done.restore()
        elif name == "without:block":
            blocks = {path: self.model.get_submodule(path) for path in self.blocks}
            for path in blocks:
                self.model.set_submodule(path, nn.Identity())
            try:
                yield
            finally:
                for path, block in blocks.items():
                    self.model.set_submodule(path, block)
        else:
            before = self.model.config._experts_implementation
            self.model.set_experts_implementation(NAMES.get(name, name.partition(":")[2]))
            try:
                yield
            finally:
                self.model.set_experts_implementation(before)

    def require(self, name: str) -> None:
        """Raises RuntimeError with the reason if `weave` would fall back in a layer."""
        if name != "weave":
            return
        with self.running(name):
            found = weave.report(self.model, file=io.StringIO())
        if not found.on:
            raise RuntimeError(next(layer.detail for layer in found.layers if not layer.used))


class Phase(Protocol):
    """What is timed: steps from the same beginning.

    tokens: that a step computes.  steps: that are compared.  timed: of these, the first that are
    timed.  hidden: of all steps, [rows, H], as the last run left them.
    """

    stage: Stage
    name: str
    batch: int
    tokens: int
    context: int
    steps: int
    timed: int

    @property
    def hidden(self) -> Tensor: ...

    def reset(self) -> None: ...

    def step(self) -> None: ...


def run(phase: Phase, steps: int) -> None:
    phase.reset()
    for _ in range(steps):
        phase.step()


class Decode:
    """Decoding a batch from a static cache that holds a context.

    The next token is chosen, and then not taken but one drawn beforehand: random models soon repeat
    themselves, and a batch that does so goes to few experts.
    """

    name, timed = "decode", STEPS

    def __init__(self, stage: Stage, batch: int) -> None:
        self.stage, self.batch, self.tokens = stage, batch, batch
        self.steps = max(STEPS, -(-ROWS // batch))
        device = stage.device
        config: Any = stage.model.config
        length = self.context = stage.prompt.shape[1]
        # Masks want rows of a multiple of 8.
        room = -(-(length + self.steps) // 8) * 8
        self.cache: Any = transformers.StaticCache(config=config, max_cache_len=room)
        _, heads, _, size = stage.contexts[0][0].shape
        self.cache.early_initialization(batch, heads, size, torch.bfloat16, device)
        # One tensor of all layers' lengths and the step: one copy goes back to the beginning.
        layers = self.cache.layers
        self.begin = torch.tensor([length] * len(layers) + [0], device=device)
        self.state = self.begin.clone()
        self.at = self.state[-1:]
        order = torch.arange(batch, device=device) % len(stage.prompt)
        for i, (layer, (keys, values)) in enumerate(zip(layers, stage.contexts, strict=True)):
            layer.keys[:, :, :length] = keys[order]
            layer.values[:, :, :length] = values[order]
            layer.cumulative_length = self.state[i]
        self.drawn = stage.random_tokens(batch, self.steps, seed=batch)
        self.chosen = torch.zeros(self.steps, batch, device=device, dtype=torch.int64)
        self.kept = torch.zeros(
            self.steps, batch, config.hidden_size, device=device, dtype=torch.bfloat16
        )

    @property
    def hidden(self) -> Tensor:
        """Step by step."""
        return self.kept.flatten(0, 1)

    def reset(self) -> None:
        self.state.copy_(self.begin)

    def step(self) -> None:
        tokens = self.drawn.index_select(1, self.at)
        hidden = self.stage.hidden(tokens, self.cache)[:, -1]
        chosen = self.stage.logits(hidden).argmax(-1)
        self.kept.index_copy_(0, self.at, hidden.unsqueeze(0))
        self.chosen.index_copy_(0, self.at, chosen.unsqueeze(0))
        self.at.add_(1)


class Prompt:
    """One prompt, with the cache that `generate` begins with; the next token is chosen."""

    name, batch, context, steps, timed = "prefill", 1, 0, 1, 1

    def __init__(self, stage: Stage, tokens: int) -> None:
        self.stage, self.tokens = stage, tokens
        self.drawn = stage.random_tokens(1, tokens, seed=tokens)
        self.chosen = torch.zeros(1, device=stage.device, dtype=torch.int64)
        size = stage.model.config.hidden_size
        self.kept = torch.zeros(tokens, size, device=stage.device, dtype=torch.bfloat16)

    @property
    def hidden(self) -> Tensor:
        """Of all tokens."""
        return self.kept

    def reset(self) -> None:
        pass

    def step(self) -> None:
        cache = transformers.DynamicCache(config=self.stage.model.config)
        hidden = self.stage.hidden(self.drawn, cache)[0]
        self.kept.copy_(hidden)
        self.chosen.copy_(self.stage.logits(hidden[-1:]).argmax(-1))
