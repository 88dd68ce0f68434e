"""`weave-moe quickstart`: the shipped model on real text, with and without our layer in it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import END, encode
from ..layer import MoELayer
from . import model as models
from .command import RunOptions, execute, prepare
from .compare import one_torch_thread, parse_policies, row_error
from .errors import InputError
from .files import check_folder
from .report import Reporter
from .sources import read_text

__all__ = ["quickstart_command", "with_our_experts"]

PROMPT, CONTINUATION = 452, 60
AGREEMENT = 1e-4
"""Largest relative difference of a row of float32 logits that still counts as agreement."""


def quickstart_command(text: str, out: Path) -> int:
    """Run it. Exit status 0, or 1 if the logits or a policy's result disagree."""
    check_folder(out)
    content, called = read_text(text)
    ids = encode(content)[: models.WINDOW]
    if len(ids) < 2:
        raise InputError(f"--text {text}: at least 2 bytes are needed, got {len(ids)}")
    policies = parse_policies("all")
    options = RunOptions(routing=f"text:{text}", out=out)
    reporter = Reporter()
    with one_torch_thread(), reporter.working(10 + 2 * len(policies)) as step:
        step("loading the model")
        original = models.load_model("float32")
        ours = with_our_experts(original)
        step("float32 logits")
        truth, result = logits(original, ids), logits(ours, ids)
        step("bfloat16 logits")
        small = models.load_model("bfloat16")
        small_truth = logits(small, ids)
        small_result = logits(with_our_experts(small), ids)
        rows = [
            ("float32: ours to the original", result, truth),
            ("bfloat16: ours to the original", small_result, small_truth),
            ("original in bfloat16 to float32", small_truth, truth),
            ("ours in bfloat16 to float32", small_result, truth),
        ]
        table = [(name, *_differences(a, b), _same_choice(a, b)) for name, a, b in rows]
        step("continuing the text")
        prompt = ids[: min(PROMPT, len(ids))]
        texts = [continue_text(model, prompt) for model in (original, ours)]
        agrees = table[0][1] <= AGREEMENT
        reporter.logits(
            f"{called}, {len(ids)} tokens through the shipped model; all of its "
            f"{len(models.moe_blocks(small))} MoE blocks replaced by weave_moe.MoELayer",
            table,
            len(ids),
            agrees,
        )
        reporter.continuation(prompt, texts[0], texts[1])
        step("routing")
        status = execute(prepare(options), options, policies, reporter, step)
    return status or (0 if agrees else 1)


def with_our_experts(model: Any) -> Any:
    """A copy of `model` whose MoE blocks are MoELayers; it shares no memory with the original."""
    changed = copy.deepcopy(model)
    for name, block in models.moe_blocks(changed):
        changed.set_submodule(name, MoELayer.from_transformers(block, drop_in=True))
    return changed


def logits(model: Any, ids: list[int]) -> Tensor:
    """Next-token logits after each of `ids`: [tokens, vocabulary]."""
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return found


def continue_text(model: Any, prompt: list[int]) -> list[int]:
    """The `CONTINUATION` likeliest tokens after `prompt`, one by one."""
    inputs = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=CONTINUATION,
            do_sample=False,
            pad_token_id=END,
        )
    after: list[int] = found[0, len(prompt) :].tolist()
    return after


def _differences(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Largest and median of rows' relative differences."""
    each = [row_error(a[i : i + 1], b[i : i + 1]) for i in range(a.shape[0])]
    return row_error(a, b), sorted(each)[len(each) // 2]


def _same_choice(a: Tensor, b: Tensor) -> int:
    return int((a.argmax(dim=1) == b.argmax(dim=1)).sum())
