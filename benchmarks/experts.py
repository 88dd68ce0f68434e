"""Times the experts of a MoE layer: weave-moe beside its rivals, in one process and in turn.

    python benchmarks/experts.py --out benchmarks/results/h200-experts.jsonl

Every contestant gets the same inputs: x, ids and weights on the device; the layer includes whatever
the contestant does with them (planning or sorting, gathering, both products, combining). Timed are
replays of a CUDA graph of several calls with different inputs, routings and weight sets, one graph
after the other, in rounds; a row holds the median and the 99th percentile over the rounds.

Correctness comes first: a contestant whose result is wrong gets a row with its error and no time.
A cell whose row is already in the output file, for this commit, is skipped (--again runs it).

Rivals: `torch` (grouped_mm and torch operators) is built in. Others come from --rivals FILE.py,
which defines RIVALS = {name: factory}; factory(w13, w2) returns f(x, ids, weights, logits) -> y and
may set f.version, f.note and f.own_activation = True, if its activation differs from SwiGLU (its
result is then not compared).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import weave_moe

MODELS = {
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "deepseek-v3": (7168, 2048, 256, 8),
}
TOKENS = (1, 16, 64, 256)
SKEWS = (0.0, 1.2)
MAX_ERROR = 1e-2


@triton.jit
def _read(x, sink, block: tl.constexpr, steps: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * block * steps
    total = tl.zeros((block,), tl.float32)
    for i in range(steps):
        total += tl.load(x + start + i * block + tl.arange(0, block)).to(tl.float32)
    if tl.sum(total) == 12345.678:  # never: keeps the loads
        tl.store(sink, 1.0)


def ceilings() -> tuple[float, float]:
    """Read rate in TB/s and bf16 matrix rate in TFLOP/s of this GPU, now."""
    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    sink = torch.zeros(1, device="cuda")
    read = 0.0
    for block, steps in ((8192, 4), (8192, 16), (16384, 8)):
        grid = (x.numel() // (block * steps),)
        ms = triton.testing.do_bench(
            partial(_read[grid], x, sink, block=block, steps=steps, num_warps=8),
            return_mode="median",
        )
        read = max(read, x.numel() * 2 / ms / 1e9)
    del x
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ms = triton.testing.do_bench(lambda: a @ b.T, return_mode="median")
    return read, 2 * 8192**3 / ms / 1e9


def route(tokens: int, experts: int, k: int, skew: float, g: torch.Generator):
    """Logits, ids int32 and weights fp32: random, or with Zipf-like popularity of exponent skew."""
    if skew == 0:
        logits = torch.randn(tokens, experts, device="cuda", generator=g)
    else:
        popularity = -skew * torch.log(torch.arange(1, experts + 1, device="cuda").float())
        popularity = popularity[torch.randperm(experts, device="cuda", generator=g)]
        u = torch.rand(tokens, experts, device="cuda", generator=g).clamp_(1e-9, 1 - 1e-9)
        logits = popularity - torch.log(-torch.log(u))
    top, ids = torch.topk(logits, k, dim=1)
    return logits, ids.int().contiguous(), torch.softmax(top, -1).float().contiguous()


def reference(x, ids, weights, w13, w2):
    """fp32, one expert after the other."""
    y = torch.zeros(x.shape, device="cuda", dtype=torch.float32)
    for e in ids.unique().tolist():
        t, j = torch.where(ids == e)
        h = x[t].float() @ w13[e].float().T
        half = h.shape[1] // 2
        a = torch.nn.functional.silu(h[:, :half]) * h[:, half:]
        y.index_add_(0, t, (a @ w2[e].float().T) * weights[t, j][:, None])
    return y


def weave(policy: str) -> Callable[..., Any]:
    """A factory for our own contestant under a policy."""

    def factory(w13, w2):
        def f(x, ids, weights, logits):
            return weave_moe.fused_experts(
                x, w13, w2, weights, ids, policy=policy, backend="cuda", workspace=None
            )

        f.version = weave_moe.__version__
        f.note = "ids to output in one launch"
        return f

    return factory


def torch_grouped(w13, w2):
    """torch's grouped matrix products with torch operators around them."""
    experts = w13.shape[0]
    up, down = w13.transpose(1, 2), w2.transpose(1, 2)

    def f(x, ids, weights, logits):
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, flat.long(), torch.ones_like(flat))
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        h = torch._grouped_mm(x[order // ids.shape[1]], up, offs=offsets)
        gate, value = h.chunk(2, dim=1)
        rows = torch._grouped_mm(torch.nn.functional.silu(gate) * value, down, offs=offsets)
        scaled = rows.float() * weights.reshape(-1)[order][:, None]
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return y.index_add_(0, order // ids.shape[1], scaled).to(x.dtype)

    f.version = torch.__version__
    f.note = "sort, gather, grouped_mm, silu, grouped_mm, scatter: torch operators"
    return f


def capture(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """One graph of all calls, after a warm-up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def git_commit() -> str:
    run = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def load_rivals(path: str | None) -> dict[str, Callable[..., Any]]:
    rivals: dict[str, Callable[..., Any]] = {"torch": torch_grouped}
    if path:
        spec = importlib.util.spec_from_file_location("rivals", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        rivals.update(module.RIVALS)
    return rivals


class Cell:
    """One model, token count and skew: inputs, routings, the truth and the floor."""

    def __init__(self, model: str, tokens: int, skew: float, layers, read: float, matrix: float):
        hidden, inter, experts, k = MODELS[model]
        g = torch.Generator(device="cuda")
        g.manual_seed(tokens * 7 + int(skew * 10))
        self.name = f"{model} T={tokens} skew={skew}"
        self.calls = 8 if tokens <= 1024 else 4
        self.routes = [route(tokens, experts, k, skew, g) for _ in range(self.calls)]
        self.inputs = [
            torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, generator=g)
            for _ in range(self.calls)
        ]
        self.truth = reference(self.inputs[0], *self.routes[0][1:], *layers[0])
        active = sum(len(r[1].unique()) for r in self.routes) / self.calls
        load = sum(int(torch.bincount(r[1].flatten()).max()) for r in self.routes) / self.calls
        weights = active * 3 * hidden * inter * 2 + 2 * tokens * hidden * 2
        flops = 6 * tokens * k * hidden * inter
        self.floor = max(weights / read / 1e6, flops / matrix / 1e6)
        self.row = {"model": model, "T": tokens, "skew": skew, "active": active, "maxload": load}
        self.row["floor_us"] = round(self.floor, 2)

    def call(self, functions, i: int):
        logits, ids, weights = self.routes[i]
        return functions[i % len(functions)](self.inputs[i], ids, weights, logits)

    def check(self, functions, row) -> bool:
        """Fills in the error of the first call; whether it is right, or has another activation."""
        error = float((self.call(functions, 0).float() - self.truth).norm() / self.truth.norm())
        row["rel_err"] = round(error, 5)
        row["note"] = getattr(functions[0], "note", "")
        row["version"] = getattr(functions[0], "version", "")
        if error < MAX_ERROR or getattr(functions[0], "own_activation", False):
            return True
        row["error"] = "wrong result"
        return False

    def graph(self, functions) -> torch.cuda.CUDAGraph:
        return capture([partial(self.call, functions, i) for i in range(self.calls)])

    def times(self, graphs, rounds: int) -> dict[str, list[float]]:
        """Microseconds a call in each round, the order reversed every other round."""
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for r in range(rounds + 2):
            for name in graphs if r % 2 else reversed(graphs):
                us = replay_us(graphs[name]) / self.calls
                if r >= 2:  # the first two warm up
                    times[name].append(us)
        return times


def run_cell(cell: Cell, contestants, rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant: name -> functions, one for each weight set, or why it has none."""
    rows, graphs = {}, {}
    for name, functions in contestants.items():
        row = rows[name] = {**cell.row, "contestant": name}
        try:
            if isinstance(functions, Exception):
                raise functions
            if cell.check(functions, row):
                graphs[name] = cell.graph(functions)
        except Exception as problem:  # a rival that does not run is a row, not the end
            row["error"] = repr(problem)[:200]
            torch.cuda.synchronize()
    for name, us in cell.times(graphs, rounds).items():
        us.sort()
        row = rows[name]
        row["us"] = round(statistics.median(us), 2)
        row["p99_us"] = round(us[min(len(us) - 1, int(0.99 * len(us)))], 2)
        row["of_floor"] = round(cell.floor / row["us"], 4)
    weave_check()
    return list(rows.values())


def make(name: str, rivals, layers):
    """A contestant's functions, one for each weight set, or the exception that making them gave."""
    try:
        family, _, policy = name.partition(":")
        factory = weave(policy or "auto") if family == "weave" else rivals[name]
        return [factory(*layer) for layer in layers]
    except Exception as problem:
        return problem


def make_layers(model: str):
    """One or two sets of random weights, scaled so that outputs are about 1."""
    hidden, inter, experts, _ = MODELS[model]
    layers = []
    for _ in range(2 if experts * 3 * hidden * inter * 2 < 12e9 else 1):
        w13 = torch.empty(experts, 2 * inter, hidden, device="cuda", dtype=torch.bfloat16)
        w2 = torch.empty(experts, hidden, inter, device="cuda", dtype=torch.bfloat16)
        layers.append((w13.normal_(0, hidden**-0.5), w2.normal_(0, inter**-0.5)))
    return layers


def show(cell: Cell, rows) -> None:
    texts = [
        f"{r['contestant']} {r['us']:.1f} ({r['of_floor']:.3f})"
        if "us" in r
        else f"{r['contestant']} {r['error'][:90]}"
        for r in rows
    ]
    print(f"{cell.name} floor {cell.floor:.1f}: {'  '.join(texts)}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--skews", default=",".join(map(str, SKEWS)))
    parser.add_argument("--contestants", default="weave,weave:counter,weave:static_strided,torch")
    parser.add_argument("--rivals", help="a Python file that defines RIVALS")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="experts.jsonl")
    parser.add_argument("--again", action="store_true", help="time cells that have rows already")
    parser.add_argument("--commit", default=None, help="the commit to name, where git is not there")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    rivals = load_rivals(args.rivals)
    commit = args.commit or git_commit()
    out = Path(args.out)
    done = set()
    if out.exists() and not args.again:
        for row in map(json.loads, out.read_text().splitlines()):
            if row["commit"] == commit:
                done.add((row["model"], row["T"], row["skew"], row["contestant"]))
    read, matrix = ceilings()
    print(f"read {read:.2f} TB/s, bf16 matrix {matrix:.0f} TFLOP/s", flush=True)
    common = {
        "dtype": "bfloat16",
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "command": "python " + " ".join(sys.argv),
        "read_tbs": round(read, 3),
        "matrix_tflops": round(matrix, 1),
    }
    for model in args.models.split(","):
        layers, made = make_layers(model), {}
        for tokens in map(int, args.tokens.split(",")):
            for skew in map(float, args.skews.split(",")):
                names = [
                    name
                    for name in args.contestants.split(",")
                    if (model, tokens, skew, name) not in done
                ]
                if not names:
                    continue
                for name in names:
                    if name not in made:
                        made[name] = make(name, rivals, layers)
                cell = Cell(model, tokens, skew, layers, read, matrix)
                rows = run_cell(cell, {name: made[name] for name in names}, args.rounds)
                with out.open("a") as file:
                    file.writelines(json.dumps(row | common) + "\n" for row in rows)
                show(cell, rows)
        del layers, made
        torch.cuda.empty_cache()
    return 0


def weave_check() -> None:
    """Raises if a launch of ours gave up."""
    from weave_moe.backends.cuda import check

    torch.cuda.synchronize()
    check()


def _driver_version() -> str:
    run = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip().splitlines()[0] if run.stdout.strip() else "unknown"


if __name__ == "__main__":
    sys.exit(main())
