"""Train the byte-level MoE language models behind the shipped model and routing traces.

    bible -f <<< "Gen1:1-Rev22:21" > kjv-raw.txt     # the package bible-kjv of Debian
    python tools/train_tiny_moe.py corpus --kjv kjv-raw.txt --stdlib DIR --out corpus
    python tools/train_tiny_moe.py train --corpus corpus --size small --minutes 4 --out model
    python tools/train_tiny_moe.py train --corpus corpus --size wide --minutes 4 --out wide \
        --trace wide-128e-top8.npz

``--size small`` is the model that ships; of ``wide`` only the trace does. Half of each batch comes
from either text, so that routers see two kinds. Training stops by the clock, so two runs with one
seed end alike but not equal.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import math
import os
import platform
import re
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

sys.path.insert(0, str(Path(__file__).resolve().parent))
from record_traces import WINDOW, write_trace

from weave_moe.data import BEGIN, END, VOCAB, encode

KINDS = ("kjv", "python")
HELD_OUT_BOOKS = ("Ruth", "Est", "Jonah", "Jas")
HELD_OUT_MODULES = ("shlex.py", "textwrap.py", "heapq.py", "queue.py", "statistics.py")
# Tables, tests and third-party code, which are no ordinary Python or not under Python's licence.
SKIPPED_FOLDERS = {
    "site-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
    "test",
    "tests",
    "idle_test",
    "ensurepip",
}

SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "shape": {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 96,
        },
        "lr": 3e-3,
        "batch": 64,
    },
    "wide": {
        "shape": {
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 128,
        },
        "lr": 1e-3,
        "batch": 64,
    },
    # For trying the script out on a CPU.
    "toy": {
        "shape": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        "lr": 3e-3,
        "batch": 4,
    },
}
SEQUENCE = WINDOW
BALANCE_COEFFICIENT = 0.01
EVAL_WINDOWS = 32


def make_corpus(kjv: Path, stdlib: Path, version: str, out: Path) -> None:
    """Write ``{kind}.{train,held}.bin`` (uint16 token ids) and ``sample-{kind}.txt`` to ``out``.

    ``source.txt`` says in words what they hold; ``version`` is the Python that ``stdlib`` is of.
    """
    out.mkdir(parents=True, exist_ok=True)
    books: dict[str, list[str]] = {}
    for line in kjv.read_text().splitlines():
        verse = re.match(r"((?:[123])?[A-Za-z]+)\d+:\d+ ", line)
        if verse:
            books.setdefault(verse[1], []).append(line)
    modules: dict[str, str] = {}
    for folder, folders, files in os.walk(stdlib):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix == ".py":
                with contextlib.suppress(UnicodeDecodeError):
                    modules[str(path.relative_to(stdlib))] = path.read_bytes().decode("utf-8")
    documents = {
        "kjv": {name: "\n".join(verses) + "\n" for name, verses in books.items()},
        "python": {name: text for name, text in modules.items() if text},
    }
    held = {"kjv": HELD_OUT_BOOKS, "python": HELD_OUT_MODULES}
    for kind in KINDS:
        missing = set(held[kind]) - set(documents[kind])
        if missing:
            raise SystemExit(f"the {kind} source lacks {', '.join(sorted(missing))}")
        for part in ("train", "held"):
            names = [n for n in documents[kind] if (n in held[kind]) == (part == "held")]
            tokens: list[int] = []
            for name in names:
                tokens += [BEGIN, *encode(documents[kind][name]), END]
            data = np.array(tokens, dtype=np.uint16)
            (out / f"{kind}.{part}.bin").write_bytes(data.tobytes())
            digest = hashlib.sha256(data.tobytes()).hexdigest()[:16]
            print(f"{kind} {part}: {len(names)} documents, {len(tokens)} tokens, sha256 {digest}")
        sample = documents[kind][held[kind][0]]
        (out / f"sample-{kind}.txt").write_bytes(sample.encode("utf-8"))
    (out / "source.txt").write_text(
        f"King James Version (public domain) and CPython {version}'s library (PSF-2.0)\n"
    )


class Corpus:
    """Token streams on a device: random windows to train on, fixed ones to test on."""

    def __init__(self, folder: Path, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.source = (folder / "source.txt").read_text().strip()
        self.digest: dict[str, str] = {}
        self.streams: dict[tuple[str, str], torch.Tensor] = {}
        for kind in KINDS:
            for part in ("train", "held"):
                data = (folder / f"{kind}.{part}.bin").read_bytes()
                self.digest[f"{kind}.{part}"] = hashlib.sha256(data).hexdigest()[:16]
                tokens = torch.from_numpy(np.frombuffer(data, dtype=np.uint16).astype(np.int32))
                self.streams[kind, part] = tokens.to(device)
        self.offsets = torch.arange(SEQUENCE + 1, device=device)

    def batch(self, size: int) -> torch.Tensor:
        """int64 [size, SEQUENCE + 1]; one half of either kind."""
        halves = []
        for kind in KINDS:
            stream = self.streams[kind, "train"]
            starts = torch.randint(
                stream.numel() - SEQUENCE, (size // 2, 1), generator=self.generator,
                device=self.device,
            )  # fmt: skip
            halves.append(stream[starts + self.offsets])
        return torch.cat(halves).long()

    def held_out(self, kind: str, limit: int) -> torch.Tensor:
        """int64 [windows, SEQUENCE + 1], evenly spaced over the held-out stream."""
        stream = self.streams[kind, "held"]
        count = min(limit, (stream.numel() - 1) // SEQUENCE)
        last = stream.numel() - SEQUENCE - 1
        starts = torch.linspace(0, last, count, device=self.device).long()[:, None]
        return stream[starts + self.offsets].long()


class MasterAdamW:
    """AdamW on float32 copies of bfloat16 parameters.

    The forward pass then runs in the very precision that is saved, while updates smaller than a
    bfloat16 step still add up.
    """

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.parameters]
        groups = [
            {"params": [m for m in self.masters if m.dim() >= 2], "weight_decay": 0.1},
            {"params": [m for m in self.masters if m.dim() < 2], "weight_decay": 0.0},
        ]
        fused = self.masters[0].is_cuda
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)
        self.lr = lr

    def step(self, scale: float) -> None:
        """One update at ``scale`` times the peak rate; clips the gradient's norm at 1."""
        for group in self.adam.param_groups:
            group["lr"] = self.lr * scale
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adam.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)
                master.grad = None


def losses(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy in nats a token, and the balance loss averaged over layers.

    transformers pools the layers before it multiplies shares and probabilities, under which one
    layer may crowd its experts if another makes up for it; so its function is called per layer.
    """
    config = model.config
    out = model.model(input_ids=tokens[:, :-1], output_router_logits=True, use_cache=False)
    logits = model.lm_head(out.last_hidden_state).float()
    entropy = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    balance: list[Any] = [
        load_balancing_loss_func((layer,), config.num_experts, config.num_experts_per_tok)
        for layer in out.router_logits
    ]
    return entropy, torch.stack(balance).mean()


def bits_a_byte(model: Any, corpus: Corpus, limit: int) -> dict[str, float]:
    """Held-out loss of each kind in bits a token (a byte, but for a document's two marks)."""
    model.eval()
    result = {}
    with torch.no_grad():
        for kind in KINDS:
            rows = corpus.held_out(kind, limit)
            parts = [rows[start : start + 32] for start in range(0, rows.shape[0], 32)]
            total = sum(float(losses(model, part)[0]) * part.shape[0] for part in parts)
            result[kind] = total / rows.shape[0] / math.log(2)
    model.train()
    return result


def choose_experts_kernel(model: Any, corpus: Corpus) -> str:
    """The grouped kernel if it runs here and agrees with the plain loop, else the loop."""
    tokens = corpus.batch(4)

    def gradient() -> torch.Tensor:
        entropy, balance = losses(model, tokens)
        total: Any = entropy + BALANCE_COEFFICIENT * balance
        total.backward()
        grads = [p.grad.float().flatten() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return torch.cat([entropy.detach()[None].float(), *grads])

    model.set_experts_implementation("eager")
    plain = gradient()
    try:
        model.set_experts_implementation("grouped_mm")
        grouped = gradient()
        error = float((grouped - plain).norm() / plain.norm())
        print(f"grouped_mm against the plain loop: relative difference {error:.2e}")
        if error < 0.05:
            return "grouped_mm"
    except (RuntimeError, ValueError, NotImplementedError) as problem:
        print(f"grouped_mm does not run here: {problem}")
    model.zero_grad(set_to_none=True)
    model.set_experts_implementation("eager")
    return "eager"


def train(args: argparse.Namespace) -> None:
    """Train until the time is up, then save the model, training.json and the trace asked for."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    size = SIZES[args.size]
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        intermediate_size=4 * size["shape"]["hidden_size"],
        max_position_embeddings=SEQUENCE,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE_COEFFICIENT,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=END,
        tie_word_embeddings=False,
        **size["shape"],
    )
    # Not .to(bfloat16), which would round the rotary frequencies that loading keeps in float32.
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.bfloat16).to(device)
    corpus = Corpus(args.corpus, device, args.seed)
    kernel = choose_experts_kernel(model, corpus)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.size}: {parameters:,} parameters, experts by {kernel}", flush=True)
    optimizer = MasterAdamW(model, args.lr or size["lr"])
    batch = args.batch or size["batch"]
    budget = args.minutes * 60.0
    start = time.monotonic()
    report = 0.0
    step = 0
    while (elapsed := time.monotonic() - start) < budget:
        done = elapsed / budget
        # Warm up by steps (the first are slow, compiling), then a cosine in time to a hundredth.
        scale = min(1.0, (step + 1) / args.warmup) * (0.505 + 0.495 * math.cos(math.pi * done))
        entropy, balance = losses(model, corpus.batch(batch))
        total: Any = entropy + BALANCE_COEFFICIENT * balance
        total.backward()
        optimizer.step(scale)
        step += 1
        if step % 50 == 0 and elapsed >= report:
            held = bits_a_byte(model, corpus, EVAL_WINDOWS)
            print(
                f"{args.size} {elapsed:5.0f} s step {step} train {entropy.item() / math.log(2):.3f}"
                f" bits balance {balance.item():.3f}"
                f" held out {' '.join(f'{k} {v:.3f}' for k, v in held.items())}",
                flush=True,
            )
            report = elapsed + max(budget / 15, 1.0)
    held = bits_a_byte(model, corpus, 10**9)
    seconds = time.monotonic() - start
    is_cuda = device.type == "cuda"
    training = {
        "size": args.size,
        "seed": args.seed,
        "date": datetime.date.today().isoformat(),
        "steps": step,
        "tokens": step * batch * SEQUENCE,
        "seconds": round(seconds, 1),
        "batch": batch,
        "sequence": SEQUENCE,
        "peak_learning_rate": args.lr or size["lr"],
        "balance_coefficient": BALANCE_COEFFICIENT,
        "precision": "bfloat16 with float32 masters",
        "text": corpus.source,
        "held_out_bits_per_byte": {kind: round(value, 4) for kind, value in held.items()},
        "corpus_sha256_16": corpus.digest,
        "device": torch.cuda.get_device_name(device) if is_cuda else "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(f"{args.size} done: {json.dumps(training)}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "training.json").write_text(json.dumps(training, indent=2) + "\n")
    if not all(math.isfinite(value) for value in held.values()):
        raise SystemExit(f"{args.size}: the loss is not finite; nothing but training.json is saved")
    if args.size != "wide":
        # The loop is what loads anywhere; the kernel that trained it is no property of the model.
        model.set_experts_implementation("eager")
        model.save_pretrained(args.out)
        print(f"{args.size}: saved to {args.out}", flush=True)
    if args.trace:
        print(write_trace(args.trace, model.float(), training, args.trace_tokens), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus", help="tokenise the two texts")
    corpus.add_argument("--kjv", type=Path, required=True, help="output of `bible -f`")
    corpus.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    corpus.add_argument("--python-version", default=platform.python_version(), help="of --stdlib")
    corpus.add_argument("--out", type=Path, required=True)
    run = commands.add_parser("train", help="train by the clock")
    run.add_argument("--corpus", type=Path, required=True)
    run.add_argument("--size", choices=sorted(SIZES), default="small")
    run.add_argument("--minutes", type=float, default=4.0)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--trace", type=Path, help="also record a routing trace here")
    run.add_argument("--trace-tokens", type=int, default=4 * WINDOW, help="tokens a text")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--batch", type=int, help="sequences a step")
    run.add_argument("--lr", type=float, help="peak learning rate")
    run.add_argument("--warmup", type=int, default=100, help="steps of rising learning rate")
    args = parser.parse_args()
    if args.command == "corpus":
        make_corpus(args.kjv, args.stdlib, args.python_version, args.out)
    else:
        train(args)


if __name__ == "__main__":
    main()
