"""What the benchmarks share: layers, inputs, the truth, the floor, timing in turn, result rows.

Times are of replays of CUDA graphs. Contestants take turns, in another order each round, because a
GPU at its power limit (all from about 2,048 tokens up) runs the faster the less the one before it
drew: medians of blocks of the same contestant moved by up to 15 %, those taken in turn do not.

Everything runs on a CPU too, without graphs, so that tests can run it; such times mean nothing.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weave_moe import Activation

MODELS = {
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "deepseek-v3": (7168, 2048, 256, 8),
}
"""Hidden, intermediate, experts, top-k."""

TOKENS = {
    "qwen3-30b": (1, 4, 16, 64, 256, 1024, 4096, 8192, 16384),
    "qwen3-235b": (1, 16, 64, 256, 1024, 4096),
    "mixtral": (1, 16, 64, 256, 1024, 4096),
    "deepseek-v3": (1, 16, 64, 256, 1024, 4096),
}
SKEWS = (0.0, 1.2)
FEW = 256
"""Most tokens that count as few."""
MAX_ERROR = 1e-2
"""Of all checked rows together, relative."""
MAX_ROW_ERROR = 2e-2
"""Of the worst checked row, relative to that row."""
CHECKED_ROWS = 256
"""Rows that are compared where there are more than 1,024 tokens."""

Row = dict[str, Any]
Layer = tuple[Tensor, Tensor]
Routing = tuple[Tensor | None, Tensor, Tensor]
"""Logits, ids int32, weights fp32."""


class Case(NamedTuple):
    """What is computed: a model's layer on so many tokens, routed at random or as recorded."""

    model: str
    tokens: int
    skew: float | None  # None: a trace
    trace: str | None = None

    @property
    def routing(self) -> str:
        return self.trace or f"skew {self.skew:g}"

    def __str__(self) -> str:
        return f"{self.model} T={self.tokens} {self.routing}"


class Rates(NamedTuple):
    """What the GPU does at best: TB/s read, and bf16 TFLOP/s."""

    read: float
    matrix: float


def grid(models: Iterable[str], tokens: Sequence[int] | None, skews: Sequence[float]) -> list[Case]:
    """The cells, model by model; tokens None: those of the model."""
    return [
        Case(model, count, skew)
        for model in models
        for count in (TOKENS[model] if tokens is None else tokens)
        for skew in skews
    ]


def calls_of(tokens: int) -> int:
    """Calls in a graph, each with its own input and routing."""
    return 8 if tokens <= 1024 else 4


def seconds_of(tokens: int) -> float:
    """Time for the replays of a cell, all contestants together."""
    return 0.4 if tokens <= FEW else 1.5


def minimum_bytes(case: Case, active: float) -> float:
    """Least bytes read: the active experts' weights, and x, once."""
    hidden, inter, _, _ = MODELS[case.model]
    return active * 3 * hidden * inter * 2 + case.tokens * hidden * 2


def floor_us(case: Case, active: float, rates: Rates) -> float:
    """No layer takes less: weights and x read and y written, or the arithmetic, at best rates."""
    hidden, inter, _, k = MODELS[case.model]
    moved = minimum_bytes(case, active) + case.tokens * hidden * 2
    flops = 6 * case.tokens * k * hidden * inter
    return max(moved / rates.read / 1e6, flops / rates.matrix / 1e6)


def measure_rates() -> Rates:
    """The rates of this GPU, now."""
    import triton
    from reading import read

    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    sink = torch.zeros(1, device="cuda")
    best = 0.0
    for block, steps in ((8192, 4), (8192, 16), (16384, 8)):
        kernel = read[(x.numel() // (block * steps),)]
        ms = triton.testing.do_bench(
            partial(kernel, x, sink, block=block, steps=steps, num_warps=8), return_mode="median"
        )
        best = max(best, x.numel() * 2 / ms / 1e9)
    del x
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ms = triton.testing.do_bench(lambda: a @ b.T, return_mode="median")
    return Rates(best, 2 * 8192**3 / ms / 1e9)


def make_layers(model: str, device: torch.device) -> list[Layer]:
    """One or two sets of random weights, scaled so that outputs are about 1."""
    hidden, inter, experts, _ = MODELS[model]
    layers = []
    for _ in range(2 if experts * 3 * hidden * inter * 2 < 12e9 else 1):
        w13 = torch.empty(experts, 2 * inter, hidden, device=device, dtype=torch.bfloat16)
        w2 = torch.empty(experts, hidden, inter, device=device, dtype=torch.bfloat16)
        layers.append((w13.normal_(0, hidden**-0.5), w2.normal_(0, inter**-0.5)))
    return layers


def route(tokens: int, experts: int, k: int, skew: float, g: torch.Generator) -> Routing:
    """Random, or with Zipf-like popularity of exponent skew."""
    device = g.device
    if skew == 0:
        logits = torch.randn(tokens, experts, device=device, generator=g)
    else:
        popularity = -skew * torch.log(torch.arange(1, experts + 1, device=device).float())
        popularity = popularity[torch.randperm(experts, device=device, generator=g)]
        u = torch.rand(tokens, experts, device=device, generator=g).clamp_(1e-9, 1 - 1e-9)
        logits = popularity - torch.log(-torch.log(u))
    top, ids = torch.topk(logits, k, dim=1)
    return logits, ids.int().contiguous(), torch.softmax(top, -1).float().contiguous()


def recorded(name: str, tokens: int, call: int, device: torch.device) -> Routing:
    """Routing of a shipped trace: neighbouring tokens, another layer and stretch each call."""
    from weave_moe.data import load_trace

    trace = load_trace(name)
    if tokens > trace.tokens:
        raise ValueError(f"tokens must be at most {trace.tokens}, those of {name}, got {tokens}")
    # Stretches from all over the trace, whatever their length.
    first = (call * 2654435761 >> 7) % (trace.tokens - tokens + 1)
    part = slice(first, first + tokens), call % trace.layers
    ids = torch.from_numpy(trace.topk_ids[part]).int().contiguous().to(device)
    return None, ids, torch.from_numpy(trace.topk_weights[part]).contiguous().to(device)


def checked_rows(tokens: int) -> Tensor:
    """Tokens whose rows are compared: all, or from 1,025 up evenly spread ones."""
    if tokens <= 1024:
        return torch.arange(tokens)
    return torch.arange(CHECKED_ROWS) * tokens // CHECKED_ROWS


def reference(
    x: Tensor, ids: Tensor, weights: Tensor, layer: Layer, activation: Activation
) -> Tensor:
    """fp32, one expert after the other."""
    if activation.kind != "silu":
        raise ValueError(f"activation must be of the kind silu, got {activation.kind}")
    w13, w2 = layer
    y = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    for e in ids.unique().tolist():
        t, j = torch.where(ids == e)
        h = x[t].float() @ w13[e].float().T
        gate, up = h.chunk(2, dim=1)
        if activation.limit is not None:
            gate = gate.clamp(max=activation.limit)
            up = up.clamp(-activation.limit, activation.limit)
        a = gate * torch.sigmoid(activation.alpha * gate) * (up + activation.up_offset)
        y.index_add_(0, t, (a @ w2[e].float().T) * weights[t, j][:, None])
    return y


def errors(y: Tensor, truth: Tensor) -> tuple[float, float]:
    """Relative error of all rows together, and of the worst row; NaN counts as infinite."""
    difference = (y.float() - truth).nan_to_num(nan=float("inf"))
    each = difference.norm(dim=1) / truth.norm(dim=1)
    return float(difference.norm() / truth.norm()), float(each.max())


class Cell:
    """A case on a device: inputs, routings, weights, the truth and the floor."""

    def __init__(self, case: Case, layers: list[Layer], rates: Rates, device: torch.device) -> None:
        hidden, _, experts, k = MODELS[case.model]
        g = torch.Generator(device=device)
        g.manual_seed(case.tokens * 7 + int((case.skew or 0) * 10))
        self.case, self.layers, self.device = case, layers, device
        self.calls = calls_of(case.tokens)
        if case.trace is None:
            assert case.skew is not None
            self.routes = [route(case.tokens, experts, k, case.skew, g) for _ in range(self.calls)]
        else:
            self.routes = [recorded(case.trace, case.tokens, i, device) for i in range(self.calls)]
        self.inputs = [
            torch.randn(case.tokens, hidden, device=device, dtype=torch.bfloat16, generator=g)
            for _ in range(self.calls)
        ]
        self.active = sum(len(r[1].unique()) for r in self.routes) / self.calls
        load = sum(int(torch.bincount(r[1].flatten()).max()) for r in self.routes) / self.calls
        self.floor = floor_us(case, self.active, rates)
        self.row: Row = {"model": case.model, "T": case.tokens, "skew": case.skew}
        if case.trace is not None:
            self.row["trace"] = case.trace
        self.row |= {"active": self.active, "maxload": load, "floor_us": round(self.floor, 2)}
        self._truth: dict[Activation, Tensor] = {}

    def truth(self, activation: Activation) -> Tensor:
        """The checked rows of the first call's result."""
        if activation not in self._truth:
            rows = checked_rows(self.case.tokens).to(self.device)
            _, ids, weights = self.routes[0]
            self._truth[activation] = reference(
                self.inputs[0][rows], ids[rows], weights[rows], self.layers[0], activation
            )
        return self._truth[activation]

    def call(self, functions: Sequence[Callable[..., Any]], i: int) -> Tensor:
        """The i-th call, of the functions one for each weight set."""
        logits, ids, weights = self.routes[i]
        return functions[i % len(functions)](self.inputs[i], ids, weights, logits)

    def check(self, functions: Sequence[Callable[..., Any]], row: Row) -> bool:
        """Fills in the errors of the first call; whether it is right, by its own activation."""
        activation = getattr(functions[0], "activation", Activation())
        rows = checked_rows(self.case.tokens).to(self.device)
        every, worst = errors(self.call(functions, 0)[rows], self.truth(activation))
        row["rel_err"], row["max_row_err"] = round(every, 5), round(worst, 5)
        row["rows_checked"] = len(rows)
        row["note"] = getattr(functions[0], "note", "")
        row["version"] = getattr(functions[0], "version", "")
        # Written so that NaN fails. own_activation without an activation: nothing to compare with.
        if every < MAX_ERROR and worst < MAX_ROW_ERROR:
            return True
        if getattr(functions[0], "own_activation", False) and activation == Activation():
            return True
        row["error"] = "wrong result"
        return False

    def graph(self, functions: Sequence[Callable[..., Any]]) -> Callable[[], Any]:
        """What replays all calls."""
        return capture([partial(self.call, functions, i) for i in range(self.calls)], self.device)


def capture(calls: list[Callable[[], Any]], device: torch.device) -> Callable[[], Any]:
    """What replays one CUDA graph of all calls, after a warm-up; on a CPU, what calls them."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
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
    return graph.replay


def one_round(replays: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Microseconds of each, run one after the other on the current stream."""
    if device.type != "cuda":
        times = []
        for replay in replays:
            begin = time.perf_counter()
            replay()
            times.append((time.perf_counter() - begin) * 1e6)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(replays) + 1)]
    marks[0].record()
    for replay, mark in zip(replays, marks[1:], strict=True):
        replay()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]


def in_turn(
    replays: dict[str, Callable[[], Any]],
    device: torch.device,
    seconds: float,
    least: int = 7,
    most: int = 60,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Microseconds of every replay in each round, for about so many seconds.

    The order is drawn anew each round. The first quarter of the rounds warms up and is dropped.
    """
    names, chance = list(replays), random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in names}
    if not names:
        return times

    def round_() -> float:
        order = chance.sample(names, len(names))
        measured = one_round([replays[name] for name in order], device)
        for name, us in zip(order, measured, strict=True):
            times[name].append(us)
        return sum(measured) / 1e6

    round_()
    rounds = rounds_for(seconds, round_(), least, most)
    for _ in range(rounds - 2):
        round_()
    return {name: us[max(2, rounds // 4) :] for name, us in times.items()}


def rounds_for(seconds: float, one: float, least: int, most: int) -> int:
    """Rounds of `one` second each that leave least to most after the first quarter is dropped."""
    kept = min(max(int(0.75 * seconds / max(one, 1e-9)), least), most)
    rounds = kept + max(2, kept // 3)
    while rounds - max(2, rounds // 4) < kept:
        rounds += 1
    return rounds


def timed(row: Row, us: Sequence[float], floor: float) -> None:
    """Fills in median and 99th percentile of the times of a call, and the share of the floor."""
    ordered = sorted(us)
    row["us"] = round(statistics.median(ordered), 2)
    row["p99_us"] = round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2)
    row["of_floor"] = round(floor / row["us"], 4)
    row["rounds"] = len(ordered)


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Median of paired ratios, and half the distance between their quartiles."""
    if len(ratios) < 2:
        return float(ratios[0]), 0.0
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(ratios), (high - low) / 2


def git_commit() -> str:
    run = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def driver_version() -> str:
    try:
        run = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "none"
    return run.stdout.strip().splitlines()[0] if run.stdout.strip() else "unknown"


def command_text(arguments: Sequence[str]) -> str:
    """The command as it is typed in a checkout: no folders of the machine it ran on."""
    script, *rest = arguments
    plain = [Path(word).name if "/" in word else word for word in rest]
    return " ".join(["python", f"benchmarks/{Path(script).name}", *plain])


def about(device: torch.device, commit: str, rates: Rates) -> Row:
    """What every row says of its run."""
    versions = {"torch": torch.__version__}
    if device.type == "cuda":
        import triton

        versions["triton"] = triton.__version__
    return {
        "dtype": "bfloat16",
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none",
        "driver": driver_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "command": command_text(sys.argv),
        "read_tbs": round(rates.read, 3),
        "matrix_tflops": round(rates.matrix, 1),
    }


def read_rows(path: Path) -> list[Row]:
    """Rows of a result file, none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def add_rows(path: Path, rows: Iterable[Row]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


class Clock:
    """Says when a run should stop, so that it ends in time and a later one can go on."""

    def __init__(self, limit: float | None) -> None:
        self.begin, self.limit, self.longest, self.last = time.monotonic(), limit, 0.0, 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def room(self) -> bool:
        """Whether another piece of work like the longest so far would end within the limit."""
        now = self.elapsed
        self.longest, self.last = max(self.longest, now - self.last), now
        return self.limit is None or now + self.longest < self.limit


def check_launches(device: torch.device) -> None:
    """Raises if a launch of ours gave up."""
    if device.type == "cuda":
        from weave_moe.backends.cuda import check

        torch.cuda.synchronize()
        check()


def the_device() -> torch.device:
    """The GPU, by number; a CPU where there is none, for tests."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
