"""How contestants are timed: CUDA graphs replayed in turn, in another order each round.

In turn, because a GPU at its power limit (all from about 2,048 tokens up) runs the faster the less
the one before it drew: medians of blocks of the same contestant moved by up to 15 %, those taken in
turn do not.

Everything runs on a CPU too, without graphs; such times are no evidence of speed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

__all__ = [
    "FEW",
    "Row",
    "calls_of",
    "capture",
    "check_launches",
    "in_turn",
    "one_round",
    "rounds_for",
    "seconds_of",
    "spread",
    "the_device",
    "timed",
]

Row = dict[str, Any]
"""A line of a result file."""

FEW = 256
"""Most tokens that count as few."""


def calls_of(tokens: int) -> int:
    """Calls in a graph, each with its own input and routing."""
    return 8 if tokens <= 1024 else 4


def seconds_of(tokens: int) -> float:
    """Time for the replays of a cell, all contestants together."""
    return 0.4 if tokens <= FEW else 1.5


def capture(calls: Sequence[Callable[[], Any]], device: torch.device) -> Callable[[], Any]:
    """What replays one CUDA graph of all calls, after a warm-up; on a CPU, what calls them."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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
    marks: list[Any] = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(len(replays) + 1)
    ]
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


def timed(row: Row, us: Sequence[float], floor: float | None) -> None:
    """Fills in median and 99th percentile of a call's times, and the share of the floor.

    floor: microseconds, None where it is not known.
    """
    ordered = sorted(us)
    row["us"] = round(statistics.median(ordered), 2)
    row["p99_us"] = round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2)
    row["of_floor"] = None if floor is None else round(floor / row["us"], 4)
    row["rounds"] = len(ordered)


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Median of paired ratios, and half the distance between their quartiles."""
    if len(ratios) < 2:
        return float(ratios[0]), 0.0
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(ratios), (high - low) / 2


def check_launches(device: torch.device) -> None:
    """Raises if a launch of ours gave up."""
    if device.type == "cuda":
        from ..backends.cuda import check

        torch.cuda.synchronize()
        check()


def the_device() -> torch.device:
    """The GPU, by number; a CPU where there is none, for tests."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
