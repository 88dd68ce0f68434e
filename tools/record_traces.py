"""Record which experts a transformers MoE model's routers choose on the shipped texts.

    python tools/record_traces.py --model src/weave_moe/data/model \
        --out src/weave_moe/data/traces/small-16e-top4.npz

A trace is an npz file: ``topk_ids`` uint8 [tokens, layers, top_k], ``topk_weights`` float16 of the
same shape, ``meta`` a JSON string. The tokens are windows of each text, one after another, each run
on its own from position 0. The model runs in float32 with the class's plain loop over experts, so
that the same model and text give the same ids on another machine but for near ties.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from weave_moe.data import encode, sample_text, text_names

WINDOW = 512
NOTE = "learned routing of a small model, not of a production model"


def windows(tokens_a_text: int) -> list[dict[str, Any]]:
    """Spans of the shipped texts, ``WINDOW`` bytes each: {"text", "start", "stop"}."""
    spans = []
    for name in text_names():
        size = len(encode(sample_text(name)))
        if tokens_a_text % WINDOW or tokens_a_text > size:
            raise ValueError(
                f"tokens a text must be a multiple of {WINDOW} up to {size}, got {tokens_a_text}"
            )
        spans += [
            {"text": name, "start": start, "stop": start + WINDOW}
            for start in range(0, tokens_a_text, WINDOW)
        ]
    return spans


def record(model: Any, spans: list[dict[str, Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Run ``model`` on each span; return ids [tokens, layers, top_k] and weights float16.

    ids are uint8 where there are at most 256 experts, else int16.
    """
    chosen: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        chosen[-1].append((output[2], output[1]))

    gates = [layer.mlp.gate for layer in model.model.layers]
    handles = [gate.register_forward_hook(hook) for gate in gates]
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            for span in spans:
                chosen.append([])
                ids = encode(sample_text(span["text"]))[span["start"] : span["stop"]]
                model(input_ids=torch.tensor([ids], device=device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    experts = model.config.num_experts
    kind = np.uint8 if experts <= 256 else np.int16
    ids_out = torch.cat([torch.stack([i for i, _ in window], 1) for window in chosen])
    weights_out = torch.cat([torch.stack([w for _, w in window], 1) for window in chosen])
    return ids_out.cpu().numpy().astype(kind), weights_out.float().cpu().numpy().astype(np.float16)


def describe(model: Any, spans: list[dict[str, Any]], training: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a trace."""
    config = model.config
    return {
        "note": NOTE,
        "model": {
            "class": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "hidden": config.hidden_size,
            "intermediate": config.moe_intermediate_size,
            "layers": config.num_hidden_layers,
            "attention_heads": config.num_attention_heads,
            "key_value_heads": config.num_key_value_heads,
            "vocabulary": config.vocab_size,
        },
        "experts": config.num_experts,
        "top_k": config.num_experts_per_tok,
        "routing": "softmax over all experts, top-k, renormalised",
        "windows": spans,
        "text": {
            "kjv": "the Book of Ruth, King James Version (public domain)",
            "python": "shlex.py of CPython 3.11.7 (PSF-2.0)",
        },
        "recorded": {
            "date": datetime.date.today().isoformat(),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "device": next(model.parameters()).device.type,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "training": training,
        "seed": training.get("seed"),
        "licence": "Apache-2.0",
    }


def write_trace(path: Path, model: Any, training: dict[str, Any], tokens_a_text: int) -> str:
    """Record ``model`` (float32) on the shipped texts into ``path``; return a line about it."""
    model.set_experts_implementation("eager")
    model.eval()
    spans = windows(tokens_a_text)
    ids, weights = record(model, spans)
    meta = json.dumps(describe(model, spans, training), sort_keys=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, topk_ids=ids, topk_weights=weights, meta=np.array(meta))
    return f"{path}: {ids.shape[0]} tokens, {ids.shape[1]} layers, {path.stat().st_size} bytes"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with config and weights")
    parser.add_argument("--training", type=Path, help="training.json that the training wrote")
    parser.add_argument("--tokens-a-text", type=int, default=4 * WINDOW)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    training = json.loads(args.training.read_text()) if args.training else {}
    print(write_trace(args.out, model, training, args.tokens_a_text))


if __name__ == "__main__":
    main()
