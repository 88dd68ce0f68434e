"""Tiny models of transformers on a GPU, in bf16, with our kernel: numbers, generation, graphs.

PYTHONPATH=src:tests python -m pytest tests/test_transformers_gpu.py --noconftest -q
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.7.0")

import weave_moe
from test_transformers_integration import (
    FAMILIES,
    STATIC,
    model_of,
    silent_report,
    tokens,
)

DEVICE = os.environ.get("WEAVE_TEST_DEVICE", "cuda")
"""cpu, to try the tests themselves: those of graphs are then skipped."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnknownMarkWarning"),
    pytest.mark.skipif(
        DEVICE == "cuda"
        and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9),
        reason="needs an sm_90 GPU",
    ),
]
IDS = tokens(3, 21).to(DEVICE) if DEVICE != "cuda" or torch.cuda.is_available() else tokens()


def logits_of(model: Any, implementation: str | None = None, ids: Tensor = IDS) -> Tensor:
    if implementation is not None:
        model.set_experts_implementation(implementation)
    with torch.no_grad():
        logits: Tensor = model(ids, use_cache=False).logits
    return logits.float().flatten(0, 1)


def apart(a: Tensor, b: Tensor) -> float:
    """Relative error of the middle row."""
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).median())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_are_as_near_to_fp32_as_eagers(family: str) -> None:
    exact = logits_of(model_of(family).to(DEVICE), "eager")
    model = model_of(family, torch.bfloat16).to(DEVICE)
    eager, ours = (logits_of(model, name) for name in ("eager", "weave"))
    # The middle row: a router of bf16 may choose another of two experts that are nearly tied.
    assert apart(ours, exact) <= 1.25 * apart(eager, exact)
    found = silent_report(model)
    assert found.on
    if DEVICE == "cuda":
        assert {layer.detail for layer in found.layers} == {"backend cuda"}
    # The same in a batch of many tokens, which other kernels compute.
    many = tokens(24, 60, seed=4).to(DEVICE)
    assert apart(*(logits_of(model, name, many) for name in ("weave", "eager"))) < 0.05


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen3Next", "DeepseekV3", "Mixtral", "GptOss"])
def test_optimized_blocks(family: str) -> None:
    """Whole blocks are near the model's own, but for tokens whose experts are nearly tied."""
    model = model_of(family, torch.bfloat16).to(DEVICE)
    own = logits_of(model, "eager")
    done = weave_moe.optimize(model)
    assert done.replaced
    ours = logits_of(model)
    done.restore()
    assert apart(ours, own) < 0.05
    assert torch.equal(logits_of(model, "eager"), own)


@pytest.mark.parametrize("family", STATIC)
def test_generation_with_a_static_cache(family: str) -> None:
    model = model_of(family, torch.bfloat16).to(DEVICE)
    model.set_experts_implementation("weave")
    ids = IDS[:, :5]
    made = []
    for cache in (None, "static"):
        with torch.no_grad():
            made.append(
                model.generate(
                    *(ids,),
                    max_new_tokens=6,
                    do_sample=False,
                    cache_implementation=cache,
                    disable_compile=True,
                    attention_mask=torch.ones_like(ids),
                )
            )
    assert made[0].shape == (3, 11)
    assert torch.equal(*made)


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are a GPU's")
@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("family", STATIC)
def test_a_captured_model_follows_its_input(family: str, optimized: bool) -> None:
    model = model_of(family, torch.bfloat16).to(DEVICE)
    model.set_experts_implementation("weave")
    if optimized:
        weave_moe.optimize(model)
    held = copy.deepcopy(IDS)
    stream = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            for _ in range(2):  # what is loaded at first use is loaded
                model(held, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(held, use_cache=False).logits
        for seed in range(5, 15):
            held.copy_(tokens(3, 21, seed=seed))
            graph.replay()
            assert torch.equal(logits, model(held, use_cache=False).logits)
    weave_moe.check()
