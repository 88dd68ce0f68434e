"""Tiny models of transformers on a GPU, in bf16, with our kernel: numbers, generation, graphs.

PYTHONPATH=src:tests python -m pytest tests/test_transformers_gpu.py --noconftest -q
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.7.0")

import weave_moe
from test_transformers_integration import (
    FAMILIES,
    STATIC,
    logits_of,
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


@pytest.fixture
def ids() -> Tensor:
    return tokens(3, 21).to(DEVICE)


def apart(a: Tensor, b: Tensor) -> float:
    """Relative error of the middle row."""
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).median())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_are_as_near_to_fp32_as_eagers(family: str, ids: Tensor) -> None:
    exact = logits_of(model_of(family).to(DEVICE), "eager", ids)
    model = model_of(family, torch.bfloat16).to(DEVICE)
    eager, ours = (logits_of(model, name, ids) for name in ("eager", "weave"))
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
def test_optimized_blocks(family: str, ids: Tensor) -> None:
    """Whole blocks are near the model's own, but for tokens whose experts are nearly tied."""
    model = model_of(family, torch.bfloat16).to(DEVICE)
    own = logits_of(model, "eager", ids)
    done = weave_moe.optimize(model)
    assert done.replaced
    ours = logits_of(model, "eager", ids)  # whole blocks, whatever their experts would be
    done.restore()
    assert apart(ours, own) < 0.05
    assert torch.equal(logits_of(model, "eager", ids), own)


@pytest.mark.parametrize("family", STATIC)
def test_generation_with_a_static_cache(family: str, ids: Tensor) -> None:
    model = model_of(family, torch.bfloat16).to(DEVICE)
    model.set_experts_implementation("weave")
    ids = ids[:, :5]
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


@pytest.mark.skipif(DEVICE != "cuda", reason="transformers compiles by itself on a GPU alone")
@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("family", STATIC)
def test_generation_that_compiles_itself(family: str, optimized: bool, ids: Tensor) -> None:
    """As `generate` does with a static cache: by inductor, with CUDA graphs."""
    torch.compiler.reset()
    model = model_of(family, torch.bfloat16).to(DEVICE)
    model.set_experts_implementation("weave")
    if optimized:
        weave_moe.optimize(model)
    made = []
    for disabled in (True, False, False):
        assert hasattr(model, "_compiled_call") == (len(made) == 2)
        with torch.no_grad():
            got = model.generate(
                *(ids[:, :5],),
                max_new_tokens=8,
                do_sample=False,
                cache_implementation="static",
                disable_compile=disabled,
                attention_mask=torch.ones_like(ids[:, :5]),
                return_dict_in_generate=True,
                output_logits=True,
            )
        made.append((got.sequences[:, 5:], torch.stack(got.logits, dim=1).float()))
    weave_moe.check()
    (own, want), *compiled = made
    assert torch.equal(compiled[0][0], compiled[1][0])
    for chosen, logits in compiled:
        # Sums are in another order: of two tokens that are nearly tied the other may be chosen, and
        # what comes after it is another text.
        same = (chosen == own).long().cumprod(dim=1).roll(1, dims=1)
        same[:, 0] = 1
        assert same[:, 1].all()
        assert apart(logits[same == 1], want[same == 1]) < 0.05


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are a GPU's")
@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("family", STATIC)
def test_a_captured_model_follows_its_input(family: str, optimized: bool, ids: Tensor) -> None:
    model = model_of(family, torch.bfloat16).to(DEVICE)
    model.set_experts_implementation("weave")
    if optimized:
        weave_moe.optimize(model)
    stream = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            for _ in range(2):  # what is loaded at first use is loaded
                model(ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(ids, use_cache=False).logits
        for seed in range(5, 15):
            ids.copy_(tokens(3, 21, seed=seed))
            graph.replay()
            assert torch.equal(logits, model(ids, use_cache=False).logits)
    weave_moe.check()
