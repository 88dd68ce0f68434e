"""What the benchmarks share: their models, cells and routings, and what result rows say.

How something is timed and what counts as right is `weave_moe.bench`'s, which `weave-moe bench` uses
too; scripts find it here by its own names.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from weave_moe.bench import cells
from weave_moe.bench.cells import (
    CHECKED_ROWS,
    LIMITS,
    Rates,
    Routing,
    Weights,
    checked_rows,
    errors,
    make_weights,
    recorded,
)
from weave_moe.bench.rates import measure_rates
from weave_moe.bench.timing import (
    FEW,
    Row,
    calls_of,
    capture,
    check_launches,
    in_turn,
    one_round,
    rounds_for,
    seconds_of,
    spread,
    the_device,
    timed,
)
from weave_moe.shapes import LayerShape

__all__ = [
    "CHECKED_ROWS",
    "FEW",
    "MAX_ERROR",
    "MAX_ROW_ERROR",
    "MODELS",
    "SKEWS",
    "TOKENS",
    "Case",
    "Cell",
    "Clock",
    "Layer",
    "Rates",
    "Row",
    "about",
    "add_rows",
    "calls_of",
    "capture",
    "check_launches",
    "checked_rows",
    "command_text",
    "errors",
    "floor_us",
    "git_commit",
    "grid",
    "in_turn",
    "make_layers",
    "measure_rates",
    "minimum_bytes",
    "one_round",
    "read_rows",
    "recorded",
    "rounds_for",
    "route",
    "seconds_of",
    "spread",
    "the_device",
    "timed",
]

MODELS = {
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "deepseek-v3": (7168, 2048, 256, 8),
}
"""Hidden, intermediate, experts, top-k."""

TOKENS = {
    "qwen3-30b": (1, 4, 16, 64, 256, 1024, 4096, 8192, 16384),
    "qwen3-235b": (1, 16, 64, 256, 1024, 4096, 8192),
    "mixtral": (1, 16, 64, 256, 1024, 4096, 8192),
    "deepseek-v3": (1, 16, 64, 256, 1024, 4096),
}
SKEWS = (0.0, 1.2)
MAX_ERROR, MAX_ROW_ERROR = LIMITS["bfloat16"]

Layer = tuple[Tensor, Tensor]
"""w13 and w2."""


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


def grid(models: Iterable[str], tokens: Sequence[int] | None, skews: Sequence[float]) -> list[Case]:
    """The cells, model by model; tokens None: those of the model."""
    return [
        Case(model, count, skew)
        for model in models
        for count in (TOKENS[model] if tokens is None else tokens)
        for skew in skews
    ]


def shape_of(model: str) -> LayerShape:
    return LayerShape(*MODELS[model])


def minimum_bytes(case: Case, active: float) -> float:
    """Least bytes read: the active experts' weights, and x, once."""
    return cells.least_bytes(shape_of(case.model), case.tokens, active)


def floor_us(case: Case, active: float, rates: Rates) -> float:
    """No layer takes less: weights and x read and y written, or the arithmetic, at best rates."""
    shape = shape_of(case.model)
    return cells.floor_us(shape, case.tokens, active, case.tokens * shape.top_k, rates)


def make_layers(model: str, device: torch.device) -> list[Layer]:
    """One or two sets of random weights, scaled so that outputs are about 1."""
    shape = shape_of(model)
    sets = 2 if shape.experts * shape.expert_bytes < 12e9 else 1
    made = [make_weights(shape, device) for _ in range(sets)]
    return [(weights.w13, weights.w2) for weights in made]


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


class Cell(cells.Cell):
    """A case on a device: inputs, routings, weights, the truth and the floor."""

    def __init__(self, case: Case, layers: list[Layer], rates: Rates, device: torch.device) -> None:
        shape = shape_of(case.model)
        g = torch.Generator(device=device)
        g.manual_seed(case.tokens * 7 + int((case.skew or 0) * 10))
        self.case, self.layers = case, layers
        calls = calls_of(case.tokens)
        if case.trace is None:
            assert case.skew is not None
            routes = [
                route(case.tokens, shape.experts, shape.top_k, case.skew, g) for _ in range(calls)
            ]
        else:
            routes = [recorded(case.trace, case.tokens, i, device) for i in range(calls)]
        inputs = [
            torch.randn(case.tokens, shape.hidden, device=device, dtype=torch.bfloat16, generator=g)
            for _ in range(calls)
        ]
        sets = [Weights(*layer) for layer in layers]
        super().__init__(cells.Layer(shape), sets, inputs, routes, rates)
        self.row = {"model": case.model, "T": case.tokens, "skew": case.skew}
        if case.trace is not None:
            self.row["trace"] = case.trace
        self.row |= {
            "active": self.active,
            "maxload": self.busiest,
            "floor_us": round(self.floor, 2),
        }


def tokens_of(args: argparse.Namespace) -> list[int] | None:
    """--tokens, None for those of each model."""
    return [int(count) for count in args.tokens.split(",")] if args.tokens else None


def skews_of(args: argparse.Namespace) -> list[float]:
    """--skews."""
    return [float(skew) for skew in args.skews.split(",")]


def cases_of(args: argparse.Namespace, few: Sequence[Case]) -> list[Case]:
    """The cases of --models, --tokens and --skews; `few` without either of the first two."""
    if args.models is None and args.tokens is None:
        return list(few)
    models = args.models.split(",") if args.models else list(MODELS)
    return grid(models, tokens_of(args), skews_of(args))


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

    def passed_over(self) -> None:
        """What was done until now is no piece of the work that others are like."""
        self.last = self.elapsed

    def room(self) -> bool:
        """Whether another piece of work like the longest so far would end within the limit."""
        now = self.elapsed
        self.longest, self.last = max(self.longest, now - self.last), now
        return self.limit is None or now + self.longest < self.limit
