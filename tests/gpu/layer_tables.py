"""The tables of layers that the tests of whole layers run."""

from __future__ import annotations

from typing import Any

from gpu_cases import SMALL, TARGET
from layer_cases import Layer, layer

from weave_moe import RoutingConfig
from weave_moe.shapes import Activation

TOKENS = (0, 1, 2, 7, 8, 9, 12, 13, 16, 33, 64, 200, 256, 257, 600, 1100, 4500)
FEW, SOME, MANY = 3, 40, 300
EACH = (FEW, SOME, MANY)
"""A number of tokens for the smallest tiles, for larger ones in one launch, and for several."""

QWEN = RoutingConfig(4, renormalize=True)
DEEPSEEK = RoutingConfig(
    4, "sigmoid", renormalize=True, scaling_factor=2.5, num_groups=4, topk_groups=2
)
H, I, E = SMALL.hidden, SMALL.intermediate, SMALL.experts


def base(routing: RoutingConfig, tokens: tuple[int, ...] = EACH, **options: Any) -> Layer:
    return layer(H, I, E, routing, tokens, **options)


# A kernel takes seconds to compile, and what it is compiled for are types, activation, whether
# there are shared experts, and whether sizes are multiples of 64. So rows that differ in nothing of
# that are free, others try as few numbers of tokens as will do.
LAYERS = {
    "qwen": base(QWEN, TOKENS),
    "deepseek": base(
        DEEPSEEK,
        (0, 1, 2, 7, 9, 12, 13, 33, 64, 200, 256, 257, *EACH),
        selection_bias=True,
        shared=I,
        router="float32",
    ),
    "given logits": base(RoutingConfig(4), (0, 1, 200, *EACH), logits=True, router="float32"),
    "bf16 logits": base(QWEN, logits=True),
    "fp16 logits": base(QWEN, logits=True, router="float16", residual=True),
    "fp32 router": base(
        QWEN, router="float32", router_bias=True, shared=2 * I, shared_gate=True, residual=True
    ),
    "router of another type": base(
        RoutingConfig(4, "sqrtsoftplus"), (SOME,), router="float16", router_bias=True
    ),
    "gpt-oss": base(
        RoutingConfig(4, "topk_softmax"),
        (1, *EACH),
        router_bias=True,
        activation="swiglu_oai",
        biases=True,
        interleaved=True,
    ),
    "llama4": layer(
        *(H, I, E, RoutingConfig(1, "sigmoid"), (1, *EACH)), weight_on_input=True, shared=2 * I
    ),
    "on the input": base(QWEN, weight_on_input=True, shared=I, residual=True),
    "nemotron": base(
        RoutingConfig(4, "sigmoid", renormalize=True, scaling_factor=2.5),
        (1, SOME, MANY),
        selection_bias=True,
        activation="relu2",
        shared=2 * I,
    ),
    "biases": base(QWEN, (SOME,), biases=True, shared=I, shared_gate=True),
    "gelu": base(RoutingConfig(4), (SOME,), activation="gelu", shared=2 * I, shared_gate=True),
    "gelu_tanh": base(QWEN, (MANY,), activation="gelu_tanh", shared=I),
    "clamped": base(QWEN, (FEW,), activation=Activation("silu", limit=0.75), shared=2 * I),
    "interleaved": base(QWEN, interleaved=True, shared=2 * I, shared_gate=True),
    # Of every relation to I: equal, twice, half, a multiple of 8 and of nothing else, smaller than
    # a tile, larger than all.
    **{
        f"shared {size}{' gated' if gate else ''}": base(
            QWEN, shared=size, shared_gate=gate, residual=gate
        )
        for size in (I, 2 * I, I // 2, 8, 200, 1056)
        for gate in (False, True)
    },
    "fp16": base(QWEN, dtype="float16", router="float16", shared=I),
    "fp16, fp32 router": base(
        DEEPSEEK, (SOME,), dtype="float16", router="float32", selection_bias=True, shared=I
    ),
    "mapped": base(QWEN, (1, 7, *EACH, 1100), routable=40, shared=I, shared_gate=True),
    "mapped, alone": base(RoutingConfig(2, "sigmoid"), (1, 7, *EACH, 1100), routable=100),
    **{
        f"{hidden}x{intermediate}": layer(hidden, intermediate, 16, QWEN, EACH, shared=64)
        for hidden, intermediate in (
            *((2880, 1408), (1408, 2880), (1856, 704), (704, 1856)),
            *((352, 176), (176, 352), (96, 192), (192, 96)),
        )
    },
    # Sizes of nemotron-3 and deepseek-v3, each in either place, of few experts.
    **{
        f"{hidden}x{intermediate}": layer(
            hidden, intermediate, 4, RoutingConfig(2, renormalize=True), (FEW, SOME)
        )
        for hidden, intermediate in ((2688, 7168), (7168, 2688), (2688, 64), (64, 2688))
    },
    # A router's sums over less than a step, over parts of one, and over very many.
    **{
        f"H{hidden}": layer(hidden, 64, 16, QWEN, EACH, shared=64) for hidden in (8, 72, 256, 7168)
    },
}  # fmt: skip

SIDE = (256, 64) if TARGET.on_gpu else (64, 16)
EXPERTS_AND_SLOTS = (
    *((1, 1), (2, 1), (2, 2), (3, 2), (3, 3)),
    *((4, 1), (4, 4), (5, 5), (7, 3), (8, 2), (16, 16), (33, 5), (60, 4), (64, 6), (96, 7)),
    *((128, 8), (133, 9), (160, 6), (256, 8), (257, 10), (384, 8), (512, 10), (640, 11)),
    *((768, 12), (896, 16), (1000, 13), (1016, 14), (1023, 15), (1024, 1), (1024, 16)),
)
NUMBERS = {
    f"E{experts} k{top_k}": layer(
        *SIDE,
        experts,
        RoutingConfig(top_k, "softmax" if experts % 2 else "sigmoid", renormalize=top_k % 2 == 0),
        # So many slots and experts do not fit one launch, few tokens or not.
        (1, 9, 256, 300) if (experts, top_k) == (1024, 16) else (1, 9, 300),
        router="float32" if top_k % 3 == 0 else "bfloat16",
        selection_bias=top_k % 4 == 0,
        shared=64 if top_k % 3 == 0 else 0,
    )
    for experts, top_k in EXPERTS_AND_SLOTS
}

DENSE = base(QWEN, (1, 3, 12, 40, 200, 300, 1100), shared=2 * I, shared_gate=True)
SHORT = {
    **{name: LAYERS[name] for name in ("qwen", "deepseek", "gpt-oss", "llama4")},
    "dense": DENSE,
}
"""What properties are tried on that hold for all: every router, both kinds of shared experts."""

WHOLE = {
    name: LAYERS[name] for name in ("qwen", "deepseek", "fp16 logits", f"shared {2 * I} gated")
}
"""Routers of each kind, a residual, a gate."""
