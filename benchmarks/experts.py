"""Times the experts of a MoE layer: weave-moe beside its rivals, in one process and in turn.

    python benchmarks/experts.py --out benchmarks/results/h200-experts.jsonl

Every contestant gets the same inputs: x, ids and weights on the device; the layer includes whatever
the contestant does with them (planning or sorting, gathering, both products, combining). Timed are
replays of a CUDA graph of 8 calls (4 above 1,024 tokens) with different inputs, routings and weight
sets. All contestants of a cell take turns, in another order each round; a row holds the median and
the 99th percentile over the rounds, without the first quarter of them.

Correctness comes first: a contestant whose result is wrong gets a row with its error and no time.
Compared with a plain fp32 computation is the first call: every row, or above 1,024 tokens 256 rows
evenly spread over the batch (`rows_checked`), together (`rel_err`) and each by itself
(`max_row_err`).

A cell whose row is already in the output file, for this commit, is skipped (--again runs it), so a
run that --max-seconds ended goes on where it stopped.

Rivals: `torch` (grouped_mm and torch operators) is built in. Others come from --rivals FILE.py, as
benchmarks/rivals.py for packages that are installed, which defines RIVALS = {name: factory};
factory(w13, w2) returns f(x, ids, weights, logits) -> y and may set f.version, f.note and
f.activation, a weave_moe.Activation of kind silu by which its result is checked, if that is not
SwiGLU. (f.own_activation = True without it: its result is not compared.)
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import common
import torch
from common import Cell, Row

from weave_moe.bench import contestants
from weave_moe.bench.cells import Layer, Weights, prepare
from weave_moe.shapes import LayerShape

Factory = Callable[..., Any]


def weave(policy: str, device: torch.device) -> Factory:
    """A factory for our own contestant under a policy."""
    backend = "cuda" if device.type == "cuda" else "reference"
    return of_weights(contestants.ours(policy, backend))


def of_weights(factory: contestants.Factory) -> Factory:
    """A factory of w13 and w2 from one of the package, for a plain layer of any top-k."""

    def made(w13, w2):
        experts, hidden, inter = w2.shape
        dtype = str(w13.dtype).removeprefix("torch.")
        return factory(Layer(LayerShape(hidden, inter, experts, 1, dtype)), Weights(w13, w2))

    return made


def load_rivals(path: str | None) -> dict[str, Factory]:
    rivals: dict[str, Factory] = {"torch": of_weights(contestants.grouped)}
    if path:
        spec = importlib.util.spec_from_file_location("rivals", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        rivals.update(module.RIVALS)
    return rivals


def make(name: str, rivals: dict[str, Factory], layers: list[common.Layer]) -> Any:
    """A contestant's functions, one for each weight set, or the exception that making them gave."""
    try:
        family, _, policy = name.partition(":")
        device = layers[0][0].device
        factory = weave(policy or "auto", device) if family == "weave" else rivals[name]
        return [factory(*layer) for layer in layers]
    except Exception as problem:
        return problem


def run_cell(cell: Cell, functions: dict[str, Any], seconds: float) -> list[Row]:
    """A row for each contestant: name -> functions, one for each weight set, or why it has none."""
    rows, graphs, _ = prepare(cell, functions)
    for name, times in common.in_turn(graphs, cell.device, seconds).items():
        common.timed(rows[name], [us / cell.calls for us in times], cell.floor)
    common.check_launches(cell.device)
    return list(rows.values())


def missing(case: common.Case, names: list[str], rows: list[Row], commit: str) -> list[str]:
    """Contestants that have no row of this commit in the cell yet."""
    done = {
        row["contestant"]
        for row in rows
        if (row["commit"], row["model"], row["T"], row["skew"])
        == (commit, case.model, case.tokens, case.skew)
    }
    return [name for name in names if name not in done]


def show(cell: Cell, rows: list[Row], elapsed: float) -> None:
    texts = [
        f"{r['contestant']} {r['us']:.1f} ({r['of_floor']:.3f})"
        if "us" in r
        else f"{r['contestant']} {r['error'][:90]}"
        for r in rows
    ]
    print(f"[{elapsed:5.0f} s] {cell.case} floor {cell.floor:.1f}: {'  '.join(texts)}", flush=True)


def compile_first(args: argparse.Namespace) -> None:
    """Fills the compilers' caches, a process a model, so that compiling takes its time once."""
    load_once(args)
    compile_each(__file__, args.models.split(","))


def compile_each(script: str, models: Iterable[str]) -> None:
    """Runs the script as it was called, for each model in a process of its own, only to compile."""
    ours = {"--compile-first", "--compile-only"}
    same = [word for word in sys.argv[1:] if word not in ours]
    started = [
        subprocess.Popen([sys.executable, script, *same, "--models", model, "--compile-only"])
        for model in models
    ]
    for process in started:
        process.wait()


def rates_of(args: argparse.Namespace, device: torch.device) -> common.Rates:
    """The machine's rates, measured and said; of no use to a run that only compiles."""
    if device.type != "cuda" or args.compile_only:
        return common.Rates(1.0, 1.0)
    rates = common.measure_rates()
    print(f"read {rates.read:.2f} TB/s, bf16 matrix {rates.matrix:.0f} TFLOP/s", flush=True)
    return rates


def load_once(args: argparse.Namespace) -> None:
    """What rivals unpack or build at first use, before several processes do it at once."""
    device = common.the_device()
    layers = [
        (
            torch.zeros(8, 256, 256, device=device, dtype=torch.bfloat16),
            torch.zeros(8, 256, 128, device=device, dtype=torch.bfloat16),
        )
    ]
    g = torch.Generator(device=device)
    logits, ids, weights = common.route(4, 8, 2, 0.0, g)
    x = torch.zeros(4, 256, device=device, dtype=torch.bfloat16)
    rivals = load_rivals(args.rivals)
    for name in args.contestants.split(","):
        functions = make(name, rivals, layers)
        try:
            functions[0](x, ids, weights, logits)
        except Exception:  # the run itself will say so
            continue


def compile_only(cell: Cell, contestants: dict[str, Any]) -> None:
    for functions in contestants.values():
        try:
            cell.call(functions, 0)
        except Exception:  # the run itself will say so
            continue


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default=",".join(common.MODELS))
    parser.add_argument("--tokens", help="by default those of each model")
    parser.add_argument("--skews", default=",".join(map(str, common.SKEWS)))
    parser.add_argument("--contestants", default="weave,weave:counter,weave:static_strided,torch")
    parser.add_argument("--rivals", help="a Python file that defines RIVALS")
    parser.add_argument("--cell-seconds", type=float, help="of replays; by default 0.4, many 1.5")
    parser.add_argument("--max-seconds", type=float, help="begin no cell that would end later")
    parser.add_argument("--out", default="experts.jsonl")
    parser.add_argument("--again", action="store_true", help="time cells that have rows already")
    parser.add_argument("--commit", default=None, help="the commit to name, where git is not there")
    parser.add_argument("--compile-first", action="store_true", help="one process a model")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    clock = common.Clock(args.max_seconds)
    if args.compile_first:
        compile_first(args)
        print(f"[{clock.elapsed:5.0f} s] compiled", flush=True)
        clock.passed_over()
    rivals = load_rivals(args.rivals)
    commit = args.commit or common.git_commit()
    out = Path(args.out)
    device = common.the_device()
    rates = rates_of(args, device)
    about = common.about(device, commit, rates)
    present = [] if args.again else common.read_rows(out)
    names = args.contestants.split(",")
    tokens, skews = common.tokens_of(args), common.skews_of(args)
    if args.compile_only:
        skews = skews[:1]  # other routings run the same code
    for model in args.models.split(","):
        todo = [
            (case, wanted)
            for case in common.grid([model], tokens, skews)
            if (wanted := missing(case, names, present, commit))
        ]
        if not todo:
            continue
        layers = common.make_layers(model, device)
        needed = {name for _, wanted in todo for name in wanted}
        made = {name: make(name, rivals, layers) for name in names if name in needed}
        for case, wanted in todo:
            if not clock.room():
                print("out of time: the same command goes on from here", flush=True)
                return 0
            cell = Cell(case, layers, rates, device)
            contestants = {name: made[name] for name in wanted}
            if args.compile_only:
                compile_only(cell, contestants)
                continue
            rows = run_cell(cell, contestants, args.cell_seconds or common.seconds_of(case.tokens))
            common.add_rows(out, [row | about for row in rows])
            show(cell, rows, clock.elapsed)
            del cell
        del layers, made
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
