"""The layer beside other work on the same GPU: held SMs that read memory, and NCCL's all-reduce.

    python benchmarks/neighbours.py --out benchmarks/results/h200-neighbours.jsonl  # one GPU
    python benchmarks/neighbours.py --all-reduce --out ...                          # two GPUs

Each row is a policy beside a neighbour: `us` a call then, `alone_us` without it, policies in turn
in one loop, and what the neighbour got done in the meantime, `neighbour`'s rate beside the layer
and alone. Outputs beside the neighbour must have the bits that they have alone (`equal_bits`).

"stream": a kernel that reads 4 GiB again and again on some SMs from before the first launch until
after the last; no block of ours fits beside it there. "all-reduce": two processes, a GPU each, run
the same layer, while 64 MiB all-reduces, enough to outlast it, run on another stream; NVLink
multicast stays off.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import policies
import torch
from common import Case, Cell, Row

import weave_moe
from weave_moe.tools.neighbour import held

POLICIES = ("steal", "counter", "static_strided")
CASES = (
    *(Case("qwen3-30b", tokens, 0.0) for tokens in (16, 64, 256, 1024, 4096)),
    *(Case("qwen3-30b", tokens, 1.2) for tokens in (64, 1024)),
    *(Case("mixtral", tokens, 0.0) for tokens in (64, 1024)),
)
STREAM_SMS = (16, 32)
STREAM_BYTES = 4 << 30
REDUCE_BYTES = 64 << 20
REDUCES = 40
ROUNDS = 9
BUSY_SHARE = 0.7
"""The layer's calls are to take about this share of the all-reduces' time."""


def make_row(cell: Cell, policy: str, neighbour: str, sms: int | None) -> Row:
    return {
        **cell.row,
        "contestant": f"weave:{policy}",
        "batch": policies.workspace_of(policies.Variant(policy)).batch,
        "neighbour": neighbour,
        "neighbour_sms": sms,
    }


def beside(row: Row, us: float, alone_us: float, rate: float, alone_rate: float) -> Row:
    """Times of a call in us, rates of the neighbour in TB/s."""
    row["us"], row["alone_us"] = round(us, 2), round(alone_us, 2)
    row["slowdown"] = round(us / alone_us, 4)
    row["neighbour_tbs"], row["neighbour_alone_tbs"] = round(rate, 4), round(alone_rate, 4)
    return row


class Bench:
    """A cell's graphs by policy, and the outputs that they should give."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.device = cell, cell.device
        self.graphs: dict[str, Callable[[], Any]] = {}
        self.outs: dict[str, list[torch.Tensor]] = {}
        self.want: list[torch.Tensor] = []
        self.checked: Row = {}
        for policy in POLICIES:
            variant = policies.Variant(policy)
            functions = policies.functions_of(variant, cell.layers, policies.workspace_of(variant))
            if not self.want:
                if not cell.check(functions, self.checked):
                    raise RuntimeError(f"{cell.case}: {policy} gives a wrong result")
                self.checked["note"] = "ids to output"
                self.checked["version"] = weave_moe.__version__
                self.want = [cell.call(functions, i) for i in range(cell.calls)]
            self.outs[policy] = [torch.empty_like(y) for y in self.want]

            def call(i: int, functions: Any = functions, outs: Any = self.outs[policy]) -> None:
                logits, ids, weights = cell.routes[i]
                f = functions[i % len(functions)]
                f(cell.inputs[i], ids, weights, logits, out=outs[i])

            self.graphs[policy] = common.capture(
                [lambda i=i, call=call: call(i) for i in range(cell.calls)],  # type: ignore[misc]
                self.device,
            )

    def spoil(self) -> None:
        for outs in self.outs.values():
            for out in outs:
                out.fill_(float("nan"))

    def verdict(self, policy: str) -> Row:
        outs = self.outs[policy]
        return {
            "equal_bits": all(map(torch.equal, outs, self.want)),
            "finite": all(bool(out.isfinite().all()) for out in outs),
        }

    def alone(self, seconds: float) -> dict[str, float]:
        times = common.in_turn(self.graphs, self.device, seconds, least=5)
        return {p: statistics.median(us) / self.cell.calls for p, us in times.items()}


def stream_rows(cell: Cell, sms_counts: tuple[int, ...], seconds: float) -> list[Row]:
    """Beside a kernel that reads memory on some SMs."""
    bench = Bench(cell)
    torch.cuda._sleep(1)  # loaded now: loading would wait for the neighbour
    reads = torch.zeros(STREAM_BYTES, dtype=torch.uint8, device=cell.device)
    rows = []
    with torch.cuda.stream(torch.cuda.Stream()):
        alone = bench.alone(seconds)
        for sms in sms_counts:
            bench.spoil()
            torch.cuda.synchronize()
            with held(sms, cell.device, reads=reads, limit_seconds=20.0) as rate_alone:
                torch.cuda._sleep(200_000_000)  # about a tenth of a second of nothing else
                torch.cuda.current_stream().synchronize()
            with held(sms, cell.device, reads=reads, limit_seconds=20.0) as rate:
                times = common.in_turn(bench.graphs, cell.device, seconds, least=5)
            common.check_launches(cell.device)
            for policy, us in times.items():
                row = make_row(cell, policy, "stream", sms) | bench.checked
                middle = statistics.median(us) / cell.calls
                beside(row, middle, alone[policy], rate[0], rate_alone[0])
                rows.append(row | bench.verdict(policy))
    return rows


def replays_beside(reduces_us: float, graph_us: float) -> int:
    """Replays of a graph that end before the all-reduces do."""
    return max(1, int(BUSY_SHARE * reduces_us / graph_us))


def reduce_rows(cell: Cell, seconds: float) -> list[Row]:
    """Beside all-reduces of two GPUs; every rank calls this, and gets its own rows."""
    import torch.distributed as dist

    bench = Bench(cell)
    mine, other = torch.cuda.Stream(), torch.cuda.Stream()
    data = torch.full((REDUCE_BYTES // 2,), float(dist.get_rank()), dtype=torch.bfloat16)
    data = data.to(cell.device)
    mean = (dist.get_world_size() - 1) / 2  # an average of averages stays what it is

    def reduces(replay: Callable[[], Any] | None, count: int) -> tuple[float, float]:
        """us of all the all-reduces, and of the replays beside them."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        dist.barrier(device_ids=[dist.get_rank()])
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            marks[0].record()
            for _ in range(REDUCES):
                dist.all_reduce(data, op=dist.ReduceOp.AVG)
            marks[1].record()
        with torch.cuda.stream(mine):
            marks[2].record()
            for _ in range(count):
                assert replay is not None
                replay()
            marks[3].record()
        torch.cuda.synchronize()
        return tuple(a.elapsed_time(b) * 1e3 for a, b in (marks[:2], marks[2:]))  # type: ignore

    for _ in range(2):
        reduces(None, 0)
    reduce_us = statistics.median(reduces(None, 0)[0] for _ in range(ROUNDS))
    with torch.cuda.stream(mine):
        alone = bench.alone(seconds)
        bench.spoil()
    counts = {p: replays_beside(reduce_us, us * cell.calls) for p, us in alone.items()}
    found: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    for _ in range(ROUNDS):
        for policy, replay in bench.graphs.items():
            found[policy].append(reduces(replay, counts[policy]))
    common.check_launches(cell.device)
    rows = []
    moved = REDUCES * REDUCE_BYTES / 1e6
    for policy, times in found.items():
        row = make_row(cell, policy, "all-reduce", None) | bench.checked
        beside_us = statistics.median(t[0] for t in times)
        layer_us = statistics.median(t[1] for t in times)
        us = layer_us / counts[policy] / cell.calls
        beside(row, us, alone[policy], moved / beside_us, moved / reduce_us)
        row["overlap"] = round(min(1.0, beside_us / layer_us), 3)
        row["reduced_right"] = bool((data == mean).all())
        rows.append(row | bench.verdict(policy))
    return rows


def show(rows: list[Row], elapsed: float) -> None:
    for row in rows:
        what = f"{row['neighbour']} {row['neighbour_sms'] or ''}".strip()
        good = "" if row["equal_bits"] and row.get("reduced_right", True) else "  WRONG"
        print(
            f"[{elapsed:5.0f} s] {row['model']} T={row['T']} skew={row['skew']} "
            f"{row['contestant']} beside {what}: {row['us']} us, alone {row['alone_us']} "
            f"({row['slowdown']}); neighbour {row['neighbour_tbs']} TB/s, alone "
            f"{row['neighbour_alone_tbs']}{good}",
            flush=True,
        )


def run(args: argparse.Namespace, rank: int, make: Callable[[Cell, float], list[Row]]) -> bool:
    """All cases; rank 0 writes. Whether everything was right."""
    clock = common.Clock(None)
    device = common.the_device()
    rates = common.measure_rates() if device.type == "cuda" else common.Rates(1.0, 1.0)
    about = common.about(device, args.commit or common.git_commit(), rates)
    model, layers, good = None, [], True
    for case in common.cases_of(args, CASES):
        if case.model != model:
            layers = []
            torch.cuda.empty_cache()
            model, layers = case.model, common.make_layers(case.model, device)
        rows = make(Cell(case, layers, rates, device), args.cell_seconds)
        good = good and all(r["equal_bits"] and r.get("reduced_right", True) for r in rows)
        if rank == 0:
            common.add_rows(Path(args.out), [row | about for row in rows])
            show(rows, clock.elapsed)
    return good


def one_rank(rank: int, args: argparse.Namespace, port: int, world: int) -> None:
    """A process of the all-reduce: a GPU each."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    try:
        torch.manual_seed(0)
        if not run(args, rank, reduce_rows):
            raise SystemExit(1)
    finally:
        dist.destroy_process_group()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", help="by default some cells of qwen3-30b and mixtral")
    parser.add_argument("--tokens")
    parser.add_argument("--skews", default="0.0")
    parser.add_argument("--all-reduce", action="store_true", help="on two GPUs")
    parser.add_argument("--cell-seconds", type=float, default=0.4, help="of replays")
    parser.add_argument("--out", default="neighbours.jsonl")
    parser.add_argument("--commit", default=None, help="the commit to name, where git is not there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    # Streams that share one of the GPU's queues wait for each other, the layer's for the
    # neighbour's. Read when CUDA starts, here and in the processes of the all-reduce.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if not args.all_reduce:

        def make(cell: Cell, seconds: float) -> list[Row]:
            return stream_rows(cell, STREAM_SMS, seconds)

        return int(not run(args, 0, make))
    # No multicast over NVLink: a shared host's switch may not survive it.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch.multiprocessing as mp

    if torch.cuda.device_count() < 2:
        print(f"two GPUs are needed, here is {torch.cuda.device_count()}")
        return 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(one_rank, args=(args, port, 2), nprocs=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
