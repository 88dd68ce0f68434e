"""The shipped language model: loading it, and the routing of a text through it."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor

from ..shapes import DTYPES, Activation
from .errors import InputError
from .sources import Routed, check_layer, check_tokens, read_text

__all__ = ["WINDOW", "from_text", "load_model", "moe_blocks"]

WINDOW = 512
"""Longest run of tokens that the shipped model was trained on; longer texts are cut."""


def load_model(dtype: str) -> Any:
    """The shipped model in `dtype`, for inference on the CPU.

    Raises InputError where transformers is not installed.
    """
    from ..data import model_path

    # The hub's client would otherwise look for updates; every file needed is in the package.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"the shipped model needs transformers: pip install 'weave-moe[transformers]' ({error})"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model_path(), dtype=DTYPES[dtype], local_files_only=True
    )
    return model.eval()


def moe_blocks(model: Any) -> list[tuple[str, Any]]:
    """(name, module) of every block that holds a router `gate` and `experts`, first layer first."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "gate") and hasattr(module, "experts")
    ]


def from_text(name: str, layer: int | None, tokens: int | None, dtype: str) -> Routed:
    """Routing of a text's first tokens in one layer of the shipped model, all of it real.

    The result holds the hidden states that reached that layer's block, the router's ids and
    weights, and the layer's own expert weights. Raises InputError for a text, layer or number of
    tokens that is not there.
    """
    from ..data import encode

    text, called = read_text(name)
    ids = encode(text)
    count = check_tokens(tokens, len(ids), called)
    model = load_model(dtype)
    blocks = moe_blocks(model)
    layer = check_layer(layer, len(blocks), "the shipped model")
    block = blocks[layer][1]
    seen: dict[str, list[Tensor]] = {"x": [], "weights": [], "ids": []}

    def router(_module: Any, inputs: Any, output: Any) -> None:
        seen["x"].append(inputs[0].reshape(-1, inputs[0].shape[-1]))
        seen["weights"].append(output[1])
        seen["ids"].append(output[2])

    handle = block.gate.register_forward_hook(router)
    # The last window may be short, and runs on its own then: positions start again in each.
    parts = [ids[start : min(start + WINDOW, count)] for start in range(0, count, WINDOW)]
    try:
        with torch.no_grad():
            for part in parts:
                model.model(input_ids=torch.tensor([part]), use_cache=False)
    finally:
        handle.remove()
    joined = {key: torch.cat(value) for key, value in seen.items()}
    return Routed(
        topk_ids=joined["ids"].to(torch.int32),
        topk_weights=joined["weights"].float(),
        experts=block.experts.num_experts,
        origin=(
            f"{called}, tokens 0..{count - 1}, through layer {layer} of {len(blocks)} of the "
            "shipped model (its hidden states, router and experts)"
        ),
        x=joined["x"].contiguous(),
        w13=block.experts.gate_up_proj.detach(),
        w2=block.experts.down_proj.detach(),
        activation=Activation("silu"),
    )
