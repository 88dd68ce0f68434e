"""Times whole models in transformers: decoding and a prompt, with its own experts and with ours.

    python benchmarks/end_to_end.py    # appends to benchmarks/results/h200-end-to-end.jsonl

Models have their architecture at full width, --layers of their layers and random bf16 weights, made
on the GPU. What is timed is a step: in decoding a token of each sequence, with transformers' static
cache, from the last token to the next one's choice; or a prompt, to its next token's choice. Steps
are replays of one CUDA graph, which transformers' own experts are given as well; its "eager"
experts, which no graph can hold, are called. All contestants of a cell take turns in one process.

Contestants: `transformers:NAME`, its implementations of experts; `weave`, ours under
experts_implementation="weave"; `weave:optimize`, ours with the router fused
(`weave_moe.optimize(model)`). Two more are no contestants but the same step without its experts
(they return their input), and without its whole blocks, router included. What a step takes more
than without its experts is their share: measured inside the step, so that shares and the rest add
to the whole, which times of the experts alone would not.

Each row of ours holds the measured `gain` over the best of transformers' own, and `predicted_gain`:
the share (Amdahl), and the layer's speedup as `weave_moe.advise` estimates it from what
transformers' experts take and the routing. It never sees a time of ours.

Correct first; docs/end_to_end.md has the rules. Exit status 1 if a result of ours was wrong. A cell
whose rows are in the output file, for this commit, is skipped (--again runs it), so a run that
--max-seconds ended goes on where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
import transformers
from common import Row
from torch import Tensor
from whole_models import ARCHITECTURES, TRUTH, Call, Decode, Phase, Prompt, Stage, build, run

import weave_moe
from weave_moe.advise import advise, routing_of
from weave_moe.advise import end_to_end as amdahl
from weave_moe.bench.cells import WRONG

THEIRS = ("transformers:grouped_mm", "transformers:batched_mm", "transformers:eager")
OURS = ("weave", "weave:optimize")
WITHOUT = {"weave": "without:experts", "weave:optimize": "without:block"}
"""What is left of a step without what each of ours replaces."""
CONTESTANTS = (*THEIRS, *WITHOUT.values(), *OURS)
COMMITTED = "benchmarks/results/h200-end-to-end.jsonl"
SLOW = 3.0
"""A contestant that takes so many times the fastest's time is timed once, not in turn."""
WITHIN = 2.0
"""Hidden states may be so many times as far from the truth as those of transformers' best."""
FAR, FAR_ROW = 0.05, 0.2
"""And no further than this: the median row, and any row."""
CLEAR, ULPS = 6.0, 2.0**-6
"""A token is clear if its logit leads by so many times the logits' error, and by 4 bf16 ulps."""
WRONG_TOKENS = 0.02
"""Share of the clear tokens that may differ: a near-tied expert can move a logit by more."""


def theirs(name: str) -> bool:
    """Whether a contestant is one of transformers' own, of `THEIRS` or of those that need more."""
    return name.startswith("transformers:")


# --- right or wrong ------------------------------------------------------------------------------


def layer_errors(stage: Stage, name: str, kept: Sequence[Call]) -> tuple[float, float, int]:
    """Errors of the blocks of a contestant, each on the input that it got in the true run.

    All rows of a layer together, and one row by itself, of the worst layer; rows that were compared
    in all layers. Run within `stage.running(name)`.
    """
    every, worst, rows = 0.0, 0.0, 0
    for path, call in zip(stage.blocks, kept, strict=True):
        block = stage.model.get_submodule(path)
        if name == "weave:optimize":
            same = same_experts(block, call)
            if same is None:
                return float("inf"), float("inf"), rows
            y = block(call.x.unsqueeze(0)).reshape(call.x.shape)
        else:
            same = torch.ones(len(call.x), dtype=torch.bool, device=call.x.device)
            y = block.experts(call.x, call.ids, call.weights)
        if not bool(same.any()):
            continue
        found = common.errors(y[same], call.y[same])
        every, worst, rows = max(every, found[0]), max(worst, found[1]), rows + int(same.sum())
    return every, worst, rows


def same_experts(layer: Any, call: Call) -> Tensor | None:
    """Rows [T] whose experts a fused router chooses as the model's own did.

    Ours computes in fp32, the model's in bf16. None if they differ by more than that explains.
    """
    own = routing_of(layer, call.x).sort(dim=1).values
    same = (own == call.ids.sort(dim=1).values).all(dim=1)
    weight = layer.get_parameter(layer.parts.router_weight)
    top = (call.x.float() @ weight.float().T).topk(call.ids.shape[1] + 1, dim=1).values
    tied = top[:, -2] - top[:, -1] < 2.0**-7 * top.abs().amax(dim=1)
    return same if bool((same | tied).all()) else None


class Found(NamedTuple):
    """A run beside the true one.

    median, worst: relative error of the hidden states' rows.  logit: rms error of the two leading
    tokens' logits.  chosen: the token [rows] that each row's logits choose.
    """

    median: float
    worst: float
    logit: float
    chosen: Tensor


class Judge:
    """Compares hidden states [rows, H] with the true ones, and the tokens that they choose."""

    CHUNK = 512

    def __init__(self, logits: Callable[[Tensor], Tensor], truth: Tensor) -> None:
        self.logits, self.truth = logits, truth
        top = [self.logits(part).float().topk(2) for part in truth.split(self.CHUNK)]
        self.leading = torch.cat([t.values for t in top])
        self.tokens = torch.cat([t.indices for t in top])

    def compare(self, hidden: Tensor) -> Found:
        off = hidden.float() - self.truth.float()
        each = (off.norm(dim=1) / self.truth.float().norm(dim=1)).nan_to_num(nan=float("inf"))
        chosen, square = [], 0.0
        parts = zip(
            *(t.split(self.CHUNK) for t in (hidden, self.tokens, self.leading)), strict=True
        )
        for part, tokens, leading in parts:
            logits = self.logits(part).float()
            chosen.append(logits.argmax(-1))
            square += float((logits.gather(1, tokens) - leading).square().sum())
        rms = (square / self.leading.numel()) ** 0.5
        return Found(float(each.median()), float(each.max()), rms, torch.cat(chosen))

    def clear(self, error: float) -> Tensor:
        """Rows whose next token no error of this size changes."""
        lead = self.leading[:, 0] - self.leading[:, 1]
        return lead > CLEAR * error + ULPS * self.leading[:, 0].abs()


def verdicts(judge: Judge, found: dict[str, Found], rows: dict[str, Row]) -> list[str]:
    """Fills in the errors of whole runs; the contestants whose results are right."""
    sound = [
        f for name, f in found.items() if theirs(name) and f.median < FAR and f.worst < FAR_ROW
    ]
    allowed = min([WITHIN * f.median for f in sound], default=FAR)
    good = []
    for name, f in found.items():
        row = rows[name]
        clear = judge.clear(max([s.logit for s in sound], default=f.logit))
        differ = int(((f.chosen != judge.tokens[:, 0]) & clear).sum())
        row["hidden_err"], row["hidden_row_err"] = round(f.median, 5), round(f.worst, 5)
        row["tokens_checked"], row["tokens_wrong"] = int(clear.sum()), differ
        # Equal to the bit in the best of theirs leaves no room for others' roundings.
        near = f.median <= max(allowed, 2.0**-9) and f.median < FAR and f.worst < FAR_ROW
        if near and differ <= max(1, WRONG_TOKENS * int(clear.sum())):
            good.append(name)
        else:
            row["error"] = WRONG
    return good


# --- a cell --------------------------------------------------------------------------------------


class Replay(NamedTuple):
    """What makes a contestant's first steps, so many, and by replays of a graph or by calls.

    holds: what a graph reads and nothing else would keep, blocks that ours put in for a while.
    """

    make: Callable[[int], None]
    timed_as: str
    holds: Any = None


def replay_of(phase: Phase, name: str, pool: Any) -> Replay:
    """Captured in the memory pool that all graphs of a cell share: they leave nothing in it."""
    stage = phase.stage
    if stage.device.type != "cuda" or name == "transformers:eager":
        if stage.device.type == "cuda" and phase.name == "decode":
            raise RuntimeError(
                "no graph can hold it: its loop asks the device which experts to run"
            )

        def calls(steps: int) -> None:
            with stage.running(name):
                run(phase, steps)

        return Replay(calls, "calls")
    with stage.running(name):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, stream = torch.cuda.memory_allocated(), torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            run(phase, 1)
        stream.wait_stream(side)
        torch.cuda.synchronize()
        needed = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        # Out of memory within a capture may leave the allocator in no state to go on.
        if needed > free:
            raise RuntimeError(f"a step takes {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                phase.step()
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails does not go back
        blocks = [stage.model.get_submodule(path) for path in stage.blocks]

    def replays(steps: int) -> None:
        phase.reset()
        for _ in range(steps):
            graph.replay()

    return Replay(replays, "graph", blocks)


class Cell:
    """A phase at a size: the true run, and what rows of it say."""

    def __init__(self, phase: Phase) -> None:
        self.phase, stage = phase, phase.stage
        TRUTH.kept = []
        try:
            with stage.running("truth"):
                run(phase, phase.steps)
            self.kept = TRUTH.kept[: len(stage.blocks)]  # of the first step
        finally:
            TRUTH.kept = None
        self.judge = Judge(stage.logits, phase.hidden.clone())
        loads = [torch.bincount(call.ids.flatten()) for call in self.kept]
        self.row: Row = {
            "model": stage.name,
            "T": phase.tokens,
            "skew": None,
            "phase": phase.name,
            "batch": phase.batch,
            "context": phase.context,
            "steps": phase.timed,
            "layers": len(stage.blocks),
            "of_layers": stage.full,
            "active": round(statistics.mean(int((load > 0).sum()) for load in loads), 1),
            "busiest": round(statistics.mean(int(load.max()) for load in loads), 1),
        }

    def __str__(self) -> str:
        return f"{self.row['model']} {self.phase.name} T={self.phase.tokens}"

    def run(self, names: Sequence[str], seconds: float) -> list[Row]:
        """A row for each contestant."""
        rows, replays = self.checked(names)
        device = self.phase.stage.device
        makes = {name: partial(replay.make, self.phase.timed) for name, replay in replays.items()}
        once = {name: common.one_round([make], device)[0] for name, make in makes.items()}
        limit = SLOW * min([us for name, us in once.items() if theirs(name)], default=0.0)
        slow = {name for name, us in once.items() if limit and us > limit}
        times = {name: [once[name]] for name in slow}
        quick = {name: make for name, make in makes.items() if name not in slow}
        times |= common.in_turn(quick, device, seconds)
        common.check_launches(device)
        steps = {name: [us / self.phase.timed for us in found] for name, found in times.items()}
        for name, us in steps.items():
            common.timed(rows[name], us, None)
            del rows[name]["of_floor"]
            rows[name]["tokens_per_s"] = round(self.phase.tokens / rows[name]["us"] * 1e6, 1)
        self.compare(rows, steps)
        return list(rows.values())

    def checked(self, names: Sequence[str]) -> tuple[dict[str, Row], dict[str, Replay]]:
        """Rows of all contestants, and how those are replayed that are right."""
        phase, stage = self.phase, self.phase.stage
        pool = torch.cuda.graph_pool_handle() if stage.device.type == "cuda" else None
        rows: dict[str, Row] = {}
        replays: dict[str, Replay] = {}
        found: dict[str, Found] = {}
        for name in names:
            row = rows[name] = {**self.row, "contestant": name}
            try:
                stage.require(name)
                compared = name not in WITHOUT.values()
                if compared and not self.check_layers(name, row):
                    continue
                replays[name] = replay_of(phase, name, pool)
                phase.hidden.fill_(float("nan"))  # of the one before
                replays[name].make(phase.steps)
                if compared:
                    found[name] = self.judge.compare(phase.hidden)
                row["timed_as"] = replays[name].timed_as
            except Exception as problem:  # a contestant that does not run is a row, not the end
                replays.pop(name, None)
                row["error"] = str(problem)[:200] or repr(problem)
                if stage.device.type == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
        good = {*verdicts(self.judge, found, rows), *WITHOUT.values()}
        return rows, {name: replay for name, replay in replays.items() if name in good}

    def check_layers(self, name: str, row: Row) -> bool:
        with self.phase.stage.running(name):
            every, worst, checked = layer_errors(self.phase.stage, name, self.kept)
        row["rel_err"], row["max_row_err"] = round(every, 5), round(worst, 5)
        row["rows_checked"] = checked
        # Written so that NaN fails.
        if every < common.MAX_ERROR and worst < common.MAX_ROW_ERROR:
            return True
        row["error"] = WRONG
        return False

    def compare(self, rows: dict[str, Row], us: dict[str, list[float]]) -> None:
        """Shares of all, and what ours gained and was predicted to."""
        layers = len(self.phase.stage.blocks)
        rest = {name: rows[name].get("us") for name in WITHOUT.values() if name in rows}
        for name, row in rows.items():
            if name in WITHOUT.values() or "us" not in row:
                continue
            without = rest.get("without:experts")
            # With its router fused, ours has no experts of their own.
            if without and name != "weave:optimize":
                row["share"] = round(1 - without / row["us"], 4)
                row["layer_us"] = round((row["us"] - without) / layers, 2)
            without = rest.get("without:block")
            if without:
                row["block_share"] = round(1 - without / row["us"], 4)
        timed = [name for name, row in rows.items() if theirs(name) and "us" in row]
        if not timed:
            return
        best = min(timed, key=lambda name: float(rows[name]["us"]))
        predicted = self.predict(rows[best])
        for name in OURS:
            if "us" not in rows.get(name, {}):
                continue
            row = rows[name]
            gain, spread = self.gain(us[best], us[name])
            row |= {"against": best, "against_us": rows[best]["us"]}
            row |= {"gain": round(gain, 4), "spread": round(spread, 4), **predicted}
            if predicted["predicted_gain"] is not None:
                row["predicted_off"] = round(predicted["predicted_gain"] / gain - 1, 4)

    @staticmethod
    def gain(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
        """Median and spread of the ratios of each round, where both took part in all of them."""
        if len(theirs) == len(ours):
            return common.spread([a / b for a, b in zip(theirs, ours, strict=True)])
        return statistics.median(theirs) / statistics.median(ours), 0.0

    def predict(self, best: Row) -> Row:
        """What the advisor makes of the best of theirs: its share, its time, and the routing."""
        row: Row = {"advised_share": best.get("share"), "advised_us": best.get("layer_us")}
        row |= {"advised_speedup": None, "predicted_gain": None}
        if not row["advised_us"] or row["advised_us"] <= 0:
            return row
        stage, last = self.phase.stage, len(self.kept) - 1
        speedups = []
        for i in sorted({0, last // 2, last}):
            layer = weave_moe.MoELayer.from_transformers(stage.model.get_submodule(stage.blocks[i]))
            try:
                advice = advise(
                    layer,
                    self.kept[i].ids,
                    share=row["advised_share"],
                    now_us=row["advised_us"],
                    exponents=(),
                )
            except ValueError as error:  # more tokens than it advises on
                return row | {"advice": str(error)}
            if advice.speedup is None:
                return row | {"advice": advice.reason}
            speedups.append(advice.speedup)
        speedup = statistics.mean(speedups)
        row["advised_speedup"] = round(speedup, 4)
        row["predicted_gain"] = round(amdahl(row["advised_share"], speedup), 4)
        return row


# --- the run -------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A phase and the tokens of a step: the batch in decoding, the prompt's."""

    phase: str
    tokens: int

    def of(self, stage: Stage) -> Phase:
        if self.phase == "decode":
            return Decode(stage, self.tokens)
        return Prompt(stage, self.tokens)


def missing(
    case: Case, stage_key: tuple[Any, ...], names: Sequence[str], rows: list[Row], commit: str
) -> list[str]:
    """Contestants that have no row of this commit in the cell yet."""
    model, layers, context = stage_key
    context = context if case.phase == "decode" else 0
    wanted = (commit, model, layers, context, case.phase, case.tokens)
    keys = ("commit", "model", "layers", "context", "phase", "T")
    done = {row["contestant"] for row in rows if tuple(row[key] for key in keys) == wanted}
    return [name for name in names if name not in done]


def show(cell: Cell, rows: list[Row], elapsed: float) -> None:
    print(f"[{elapsed:5.0f} s] {cell}, {cell.row['layers']} layers", flush=True)
    for row in rows:
        text = f"  {row['contestant']:<24} "
        if "us" in row:
            text += f"{row['us']:>10.1f} us {row['tokens_per_s']:>10,.0f} tokens/s"
            text += f"  experts {row['share']:.1%}" if "share" in row else ""
        if "gain" in row:
            text += f"  {row['gain']:.3f} x of {row['against']}"
        if row.get("predicted_gain"):
            text += f", predicted {row['predicted_gain']:.3f} ({row['predicted_off']:+.1%})"
        print(text + row.get("error", ""), flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default=",".join(ARCHITECTURES))
    parser.add_argument("--layers", default="8", help="of each model, or all; by default 8")
    parser.add_argument("--batches", default="1,16,64,256", help="sequences that decode")
    parser.add_argument("--prompts", default="4096", help="tokens of prompts")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--backend", default="auto", help="of ours; see weave_moe.fused_experts")
    parser.add_argument("--cell-seconds", type=float, default=1.5, help="of replays")
    parser.add_argument("--max-seconds", type=float, help="begin no cell that would end later")
    parser.add_argument("--out", default=COMMITTED)
    parser.add_argument("--again", action="store_true", help="time cells that have rows already")
    parser.add_argument("--commit", default=None, help="the commit to name, where git is not there")
    args = parser.parse_args(arguments)

    def numbers(option: str) -> list[int]:
        words = [word for word in getattr(args, option).split(",") if word]
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            parser.error(f"--{option} must be positive numbers, got {getattr(args, option)!r}")
        return [int(word) for word in words]

    for option, known in (("models", tuple(ARCHITECTURES)), ("contestants", CONTESTANTS)):
        words = getattr(args, option).split(",")
        for word in words:
            # Others of transformers' need packages or a hub; they may be there.
            if word not in known and not (option == "contestants" and theirs(word)):
                parser.error(f"--{option} must be of {', '.join(known)}, got {word!r}")
        setattr(args, option, words)
    if args.layers != "all":
        if not (args.layers.isdecimal() and int(args.layers) > 0):
            parser.error(f"--layers must be a positive number or all, got {args.layers!r}")
        args.layers = int(args.layers)
    if args.context < 1:
        parser.error(f"--context must be at least 1, got {args.context}")
    args.cases = [Case("decode", batch) for batch in numbers("batches")]
    args.cases += [Case("prefill", tokens) for tokens in numbers("prompts")]
    return args


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    clock = common.Clock(args.max_seconds)
    transformers.logging.set_verbosity_error()
    commit = args.commit or common.git_commit()
    out, device = Path(args.out), common.the_device()
    if device.type != "cuda" and args.out == COMMITTED:
        sys.exit("no GPU here: on a CPU this takes hours, and needs an --out of its own")
    rates = common.measure_rates() if device.type == "cuda" else common.Rates(1.0, 1.0)
    about = common.about(device, commit, rates)
    about["versions"] = about["versions"] | {"transformers": transformers.__version__}
    present = [] if args.again else common.read_rows(out)
    wrong = False
    for name in args.models:
        full = ARCHITECTURES[name].fields["num_hidden_layers"]
        layers = full if args.layers == "all" else min(args.layers, full)
        key = (name, layers, args.context)
        todo = [
            (case, wanted)
            for case in args.cases
            if (wanted := missing(case, key, args.contestants, present, commit))
        ]
        if not todo:
            continue
        stage = Stage(name, build(name, layers, device), args.context, args.backend)
        print(f"[{clock.elapsed:5.0f} s] {name}: {layers} of {full} layers", flush=True)
        for case, wanted in todo:
            if not clock.room():
                print("out of time: the same command goes on from here", flush=True)
                return int(wrong)
            cell = Cell(case.of(stage))
            # Gains are of times that were taken in turn: all run again, those missing are kept.
            rows = [
                row
                for row in cell.run(args.contestants, args.cell_seconds)
                if row["contestant"] in wanted
            ]
            common.add_rows(out, [row | about for row in rows])
            show(cell, rows, clock.elapsed)
            wrong |= any(r["contestant"] in OURS and r.get("error") == WRONG for r in rows)
            del cell
            if device.type == "cuda":
                torch.cuda.empty_cache()
        del stage
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
