"""Timing the contestants of one cell, and refusing a time where it is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..tools.neighbour import held
from .cells import WRONG, Cell, Prepared, Unsupported, flops_of, least_bytes
from .timing import Row, check_launches, in_turn, spread, timed

__all__ = ["FAILED", "NOT_RUN", "TIMED", "UNSTEADY", "measure", "refused"]

TIMED, NOT_RUN, UNSTEADY, FAILED = "timed", "not run", "unsteady", "failed"
"""What a row's `status` may be, besides `WRONG`. Not run: another's does not take the layer, or
raised; failed: ours raised where it takes the layer, or the neighbour did not last."""

HELD_SECONDS = 20.0
"""A neighbour leaves by itself after this."""


def refused(rows: Iterable[Row]) -> list[Row]:
    """Rows for which no time is reported although they should have one."""
    return [row for row in rows if row["status"] in (WRONG, UNSTEADY, FAILED)]


def measure(
    cell: Cell,
    prepared: Prepared,
    *,
    seconds: float,
    max_spread: float,
    neighbour: int = 0,
    ours: Callable[[str], bool] = lambda name: name.startswith("weave"),
) -> list[Row]:
    """A row for each contestant and arm: alone, and beside a neighbour if there is to be one.

    seconds: of replays, an arm, all contestants together; twice that once more if a spread is too
    wide.  max_spread: half the distance between the quartiles of a contestant's times, over their
    median, that is too wide.  neighbour: SMs that another kernel holds in the second arm.

    A contestant that is wrong or too unsteady has no time. Where one is too unsteady, the cell has
    no ratios to the best either, since the best is not known.
    """
    rows: list[Row] = []
    alone: dict[str, float] = {}
    for sms in (0, neighbour) if neighbour else (0,):
        arm = {
            name: {**row, "ours": ours(name), "neighbour_sms": sms}
            for name, row in prepared.rows.items()
        }
        for name, row in arm.items():
            row["status"] = _status_before(prepared, name, row)
        try:
            times, widths = _steady(cell, prepared.replays, sms, seconds, max_spread)
        except RuntimeError as problem:
            for name in prepared.replays:
                arm[name] |= {"status": FAILED, "error": str(problem)}
            times, widths = {}, {}
        for name, us in times.items():
            _fill(arm[name], us, widths[name], max_spread, cell)
        _ratios(arm)
        for name, row in arm.items():
            if sms and row["status"] == TIMED and name in alone:
                row["over_alone"] = round(row["us"] / alone[name], 4)
            elif row["status"] == TIMED:
                alone[name] = row["us"]
        rows += arm.values()
    return rows


def _status_before(prepared: Prepared, name: str, row: Row) -> str:
    if name in prepared.replays:
        return TIMED
    problem = prepared.problems.get(name)
    if problem is None:
        return WRONG
    return FAILED if row["ours"] and not isinstance(problem, Unsupported) else NOT_RUN


def _steady(
    cell: Cell,
    replays: Mapping[str, Callable[[], Any]],
    sms: int,
    seconds: float,
    max_spread: float,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Microseconds of a call in each round, and their relative spreads; measured again if wide."""
    times: dict[str, list[float]] = {}
    widths: dict[str, float] = {}
    for factor in (1, 2):
        if cell.device.type == "cuda":
            torch.cuda.synchronize(cell.device)
        with _stream(cell.device):
            for replay in replays.values():  # what is sent once is sent before SMs are held
                replay()
            if cell.device.type == "cuda":
                torch.cuda.synchronize(cell.device)
            with _neighbour(sms, cell.device):
                found = in_turn(dict(replays), cell.device, factor * seconds, seed=factor)
        check_launches(cell.device)
        times = {name: [us / cell.calls for us in found[name]] for name in found}
        widths = {name: width / middle for name, (middle, width) in _spreads(times).items()}
        if all(width <= max_spread for width in widths.values()):
            break
    return times, widths


def _spreads(times: Mapping[str, list[float]]) -> dict[str, tuple[float, float]]:
    return {name: spread(us) for name, us in times.items()}


def _stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream of its own: the default one may wait for kernels of others, and they for it."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def _neighbour(sms: int, device: torch.device) -> AbstractContextManager[Any]:
    return held(sms, device, limit_seconds=HELD_SECONDS) if sms else nullcontext()


def _fill(row: Row, us: list[float], width: float, max_spread: float, cell: Cell) -> None:
    row["spread"] = round(width, 4)
    # Written so that NaN is too wide.
    if not width <= max_spread:
        row["status"] = UNSTEADY
        row["error"] = f"times are spread by {width:.1%}, more than {max_spread:.1%}"
        row["rounds"] = len(us)
        return
    timed(row, us, cell.floor)
    shape = cell.layer.shape
    moved = least_bytes(shape, cell.tokens, cell.active)
    moved += cell.tokens * shape.hidden * shape.element_size
    row["tflops"] = round(flops_of(shape, cell.slots) / row["us"] / 1e6, 2)
    row["tbs"] = round(moved / row["us"] / 1e6, 4)
    if cell.rates is not None:
        row["of_matrix"] = round(row["tflops"] / cell.rates.matrix, 4)
        row["of_read"] = round(row["tbs"] / cell.rates.read, 4)


def _ratios(arm: Mapping[str, Row]) -> None:
    """Each time over the shortest, where all that should have a time have one."""
    timed_rows = [row for row in arm.values() if row["status"] == TIMED]
    if any(row["status"] in (UNSTEADY, FAILED) for row in arm.values()) or not timed_rows:
        return
    best = min(row["us"] for row in timed_rows)
    for row in timed_rows:
        row["to_best"] = round(row["us"] / best, 4)
