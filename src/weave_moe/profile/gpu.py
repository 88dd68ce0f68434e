"""Records of the GPU kernel: what is launched, which launch is kept, and what recording costs.

All calls are replays of CUDA graphs, so that no launch waits for the host. A graph has several
calls on the same tokens and routing, each with another copy of the weights, so that L2 does not
hold them. Graphs that record and graphs that do not take turns, with those of all policies: a GPU
at its power limit is compared with itself. Of several recorded launches, each the last of its
graph, the one of median length is kept.
"""

from __future__ import annotations

import ctypes
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..backends import cuda
from ..bench.cells import (
    L2_BYTES,
    LIMITS,
    Cell,
    Layer,
    Weights,
    checked_rows,
    errors,
    make_weights,
)
from ..bench.timing import calls_of, capture, check_launches, in_turn, seconds_of, the_device
from ..host.workspace import Workspace
from ..layer import fused_experts
from ..presets import Preset
from ..run.command import Request, RunOptions
from ..run.compare import choose_scale
from ..run.errors import InputError
from ..run.report import Step, nanoseconds
from ..runtime import nvrtc
from ..runtime.driver import Kernel, Library
from ..schedule import StageShape
from ..schedule.granularity import SHARED_BYTES
from ..simulate.workload import Workload, make_workload
from ..tools.choice import choose_plan
from ..tools.machine import Gpu, look
from .producers import Blocks, from_gpu
from .records import ABSENT, MOMENTS, PolicyRecord, Timing

__all__ = ["LAUNCHES", "Recorded", "gpu_layer", "record", "the_gpu"]

LAUNCHES = 9
"""Launches recorded of each policy."""
BACKEND = "cuda"
REUSE = 2 * L2_BYTES
"""Bytes of weights read between two uses of one copy: then none of it is left in L2."""
MOST_COPIES = 16
WEIGHTS_SHARE = 0.5
"""Of the free memory, what all copies of the weights may take."""

# Columns of the statistics that the kernel leaves, a row a block; times by the device's timer.
START, END, SWEEPS, PLANNED = 0, 1, 4, 7
COLUMNS = 8

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Recorded:
    """One record a policy, and what there is to say about all of them.

    check: of the results against the reference, as `weave-moe run` has it.
    """

    runs: tuple[PolicyRecord, ...]
    machine: str
    stages: tuple[StageShape, StageShape]
    notes: tuple[str, ...]
    check: dict[str, Any]


def the_gpu() -> Gpu:
    """The current GPU. Raises InputError where there is none, or the kernel is not for it."""
    found = look()
    index = torch.cuda.current_device() if found.gpus else 0
    gpu = next((gpu for gpu in found.gpus if gpu.index == index), None)
    other = "--simulate predicts its records, and --backend host records the CPU engine"
    if gpu is None:
        raise InputError(f"--backend cuda: {found.no_gpu or 'torch sees no GPU'}; {other}")
    if not gpu.kernel:
        capability = ".".join(map(str, gpu.capability))
        raise InputError(
            f"--backend cuda: {gpu.name} has compute capability {capability}, and the kernel is "
            f"built for 9.0; {other}"
        )
    return gpu


def gpu_layer(
    options: RunOptions, layer: Preset, tokens: int
) -> tuple[Preset, str, tuple[str, ...]]:
    """The layer in a type that the kernel takes, at full size unless it is to be scaled; its dtype;
    and lines about it. Raises InputError for what one launch does not take."""
    dtype = options.dtype or layer.dtype
    if options.dtype is None and dtype not in ("bfloat16", "float16"):
        dtype = "bfloat16"
    factor, line = choose_scale(layer, tokens, dtype, options.scale, on_gpu=True)
    scaled = layer.scaled(factor)
    refused = choose_plan(scaled, dtype, tokens, None, 1).refused
    if refused is not None:
        raise InputError(
            f"{layer.name}: the GPU kernel does not take this layer ({refused}); --backend host "
            "records the CPU engine"
        )
    longest = cuda.slab_tokens(scaled.shape(dtype))
    if tokens > longest:
        raise InputError(
            f"--tokens must be at most {longest} for {layer.name}, what one launch takes (a longer "
            f"call is several); got {tokens}"
        )
    notes = [*layer.notes, *([line] if line else [])]
    if layer.shared_intermediate:
        notes.append("the model's shared experts are dense and left out")
    return scaled, dtype, tuple(notes)


def record(
    request: Request, policies: Sequence[str], gpu: Gpu, *, seed: int, step: Step
) -> Recorded:
    """Records of a layer's experts on the current GPU, one launch a policy.

    request: as `prepare` makes it with `gpu_layer`.  seed: of weights and inputs that the routing
    does not bring along.  step: is told what comes next, 3 + policies times.

    Raises InputError where the GPU's memory does not do, a launch gave up, or a launch has more
    tasks than it records.
    """
    try:
        return _record(request, policies, gpu, seed, step)
    except torch.cuda.OutOfMemoryError as error:
        raise InputError(
            f"the GPU's memory is too small for {request.preset.name} with "
            f"{request.routed.tokens} tokens under {len(policies)} policies: fewer --tokens, fewer "
            "policies by --policy, or --scale"
        ) from error
    except cuda.KernelError as error:
        raise InputError(str(error)) from error


def _record(request: Request, policies: Sequence[str], gpu: Gpu, seed: int, step: Step) -> Recorded:
    shape = request.preset.shape(request.dtype)
    ids = request.routed.topk_ids.numpy().astype(np.int64)
    work = make_workload(shape, ids, gpu.shared_bytes or SHARED_BYTES)
    step("weights")
    cell = _cell(request, work, seed)
    arms, check = _arms(cell, work, policies, gpu, step)
    replays = {f"plain {policy}": pair.plain.replay for policy, pair in arms.items()}
    replays |= {f"traced {policy}": pair.traced.replay for policy, pair in arms.items()}
    step("timing")
    times = in_turn(replays, cell.device, seconds_of(cell.tokens))
    call_ns = {n: round(statistics.median(us) * 1e3 / cell.calls) for n, us in times.items()}
    step("launches")
    found = _launches(cell, work, arms)
    check["equal_bits"] &= all(
        _same_bits(arm.out, check["first"]) for pair in arms.values() for arm in pair.all
    )
    check["agrees"] &= check["equal_bits"]
    del check["first"]
    if not math.isfinite(check["max_row_error"]):
        check["max_row_error"] = None
    runs = []
    for policy, taken in found.items():
        in_order = sorted(taken.samples, key=lambda sample: sample.length)
        kept = in_order[len(in_order) // 2]
        timing = Timing(
            call_ns=call_ns[f"plain {policy}"],
            sort_ns=_rounded(taken.sort),
            combine_ns=_rounded(taken.combine),
            launch_ns=_rounded(taken.plain),
            recorded_call_ns=call_ns[f"traced {policy}"],
            recorded_launch_ns=_rounded(taken.traced),
            shortest_ns=in_order[0].length,
            longest_ns=in_order[-1].length,
            launches=len(in_order),
        )
        here = len(kept.trace)
        if here < sum(work.tasks):
            raise InputError(
                f"a launch under {policy} has {sum(work.tasks):,} tasks and left records of "
                f"{here:,}: a block has room for eight times its share of them. Leave that policy "
                "out, or take fewer --tokens"
            )
        try:
            run = from_gpu(
                kept.trace,
                policy,
                workers=gpu.multiprocessors,
                tasks=work.tasks,
                combine_tokens=work.kernel.combine_tokens,
                blocks=kept.blocks,
                timing=timing,
            )
        except ValueError as error:
            raise InputError(f"the record of {policy} contradicts itself: {error}") from error
        runs.append(run)
    return Recorded(
        tuple(runs),
        f"{gpu.name}, {gpu.multiprocessors} SMs; torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}",
        work.stages,
        _notes(cell, work, found),
        check,
    )


# --- what is called ----------------------------------------------------------------------------


def _cell(request: Request, work: Workload, seed: int) -> Cell:
    """The layer on the device: copies of its weights, and the same tokens for each call."""
    preset, routed, shape, device = request.preset, request.routed, work.shape, the_device()
    if routed.w13 is None or routed.w2 is None:
        first = make_weights(shape, device, seed=seed, biases=preset.expert_bias)
    else:
        kind = shape.torch_dtype
        first = Weights(routed.w13.to(device, kind), routed.w2.to(device, kind))
    size = shape.experts * shape.expert_bytes
    free = float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 4.0 * size
    calls = calls_of(routed.tokens)
    wanted = max(2, -(-int(REUSE) // max(1, work.weight_bytes)))
    copies = min(wanted, MOST_COPIES, 1 + int(WEIGHTS_SHARE * free / size))
    # As many calls as it takes to use each copy.
    calls = max(calls, copies)
    sets = [first]
    for _ in range(copies - 1):
        sets.append(replace(first, w13=first.w13.clone(), w2=first.w2.clone()))
    x = routed.x
    if x is None:
        x = torch.randn(routed.tokens, shape.hidden, generator=torch.Generator().manual_seed(seed))
    route = (
        None,
        routed.topk_ids.int().contiguous().to(device),
        routed.topk_weights.float().contiguous().to(device),
    )
    layer = Layer.of(preset, request.dtype, [route])
    inputs = [x.to(device, shape.torch_dtype)] * calls
    return Cell(layer, sets, inputs, [route] * calls, None)


class _Arm:
    """The calls of one graph.

    statistics: int64 [calls, blocks, `COLUMNS`], written by its launches.
    out: the result of every call.  replay: makes all calls.
    """

    def __init__(self, cell: Cell, policy: str, blocks: int, *, trace: bool) -> None:
        self.cell, self.policy = cell, policy
        self.workspace: Any = Workspace(trace=trace)
        self.statistics = torch.zeros(
            cell.calls, blocks, COLUMNS, dtype=torch.int64, device=cell.device
        )
        self.out = torch.full_like(cell.inputs[0], float("nan"))
        self.replay: Callable[[], Any] = lambda: None

    def call(self, i: int) -> Tensor:
        """The i-th call."""
        cell = self.cell
        layer, weights = cell.layer, cell.sets[i % len(cell.sets)]
        _, ids, scales = cell.routes[i]
        # The kernel's own counters: a private door of the backend, as is the clock below.
        self.workspace._cuda_stats = self.statistics[i]
        return fused_experts(
            *(cell.inputs[i], weights.w13, weights.w2, scales, ids),
            activation=layer.activation,
            b13=weights.b13,
            b2=weights.b2,
            interleaved=layer.interleaved,
            weight_on_input=layer.weight_on_input,
            out=self.out,
            policy=self.policy,
            workspace=self.workspace,
            backend=BACKEND,
        )

    def capture(self, stamps: Tensor | None = None) -> None:
        """Makes the graph. stamps: int64 [calls + 1], the device's time before each call and after
        the last."""
        calls: list[Callable[[], Any]] = []
        for i in range(self.cell.calls):
            if stamps is not None:
                calls.append(partial(_stamp, stamps[i]))
            calls.append(partial(self.call, i))
        if stamps is not None:
            calls.append(partial(_stamp, stamps[-1]))
        self.replay = capture(calls, self.cell.device)
        # The graph has its own; those of the calls before it would be there once an arm.
        vars(self.workspace).pop("_cuda_buffers", None)

    def clear(self) -> None:
        """Leaves nothing of earlier calls, so that what is read later is of later ones."""
        self.statistics.zero_()
        self.out.fill_(float("nan"))


@dataclass(frozen=True, eq=False)
class _Pair:
    """The graphs of a policy.

    stamped: one that notes the time between calls, in stamps; None where a call is one launch.
    """

    plain: _Arm
    traced: _Arm
    stamped: _Arm | None
    stamps: Tensor | None

    @property
    def all(self) -> list[_Arm]:
        """Those that there are."""
        return [arm for arm in (self.plain, self.traced, self.stamped) if arm is not None]


def _arms(
    cell: Cell, work: Workload, policies: Sequence[str], gpu: Gpu, step: Step
) -> tuple[dict[str, _Pair], dict[str, Any]]:
    """The graphs of every policy, after a first call of each that is held to the reference."""
    rows = checked_rows(cell.tokens).to(cell.device)
    allowed, allowed_row = LIMITS[work.shape.dtype]
    check: dict[str, Any] = {
        "agrees": True,
        "equal_bits": True,
        "max_row_error": 0.0,
        "allowed": allowed_row,
    }
    first: Tensor | None = None
    arms: dict[str, _Pair] = {}
    for policy in policies:
        step(f"{policy}: check")
        plain, traced = (
            _Arm(cell, policy, gpu.multiprocessors, trace=trace) for trace in (False, True)
        )
        for arm in (plain, traced):
            result = arm.call(0).clone()
            first = result if first is None else first
            every, worst = errors(result[rows], cell.truth(cell.layer.activation))
            right = every < allowed and worst < allowed_row  # False for NaN
            check["agrees"] &= right
            check["equal_bits"] &= _same_bits(result, first)
            if not worst <= check["max_row_error"]:
                check["max_row_error"] = worst
            arm.capture()
        stamped = stamps = None
        if work.kernel.many:
            stamps = torch.zeros(cell.calls + 1, dtype=torch.int64, device=cell.device)
            stamped = _Arm(cell, policy, gpu.multiprocessors, trace=False)
            stamped.capture(stamps)
        arms[policy] = _Pair(plain, traced, stamped, stamps)
    check_launches(cell.device)
    check["first"] = first
    return arms, check


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


# --- what is read ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Sample:
    """One recorded launch. length: its makespan in nanoseconds.  times: every reading of the
    device's timer in it."""

    trace: npt.NDArray[Any]
    blocks: Blocks | None
    length: int
    times: Ints


@dataclass(eq=False)
class _Taken:
    """What was read of a policy: recorded launches; and in nanoseconds each, lengths of launches
    that were not and that were recorded, of sorts and of combines."""

    samples: list[_Sample]
    plain: list[int]
    traced: list[int]
    sort: list[int]
    combine: list[int]


def _launches(cell: Cell, work: Workload, arms: dict[str, _Pair]) -> dict[str, _Taken]:
    """Replays in turn, in another order each round, with a look at what each has left behind."""
    found = {policy: _Taken([], [], [], [], []) for policy in arms}
    chance, names = random.Random(0), list(arms)
    for pair in arms.values():
        for arm in pair.all:
            arm.clear()
    for _ in range(LAUNCHES):
        for policy in chance.sample(names, len(names)):
            pair, taken = arms[policy], found[policy]
            # One after the other without a pause, so that the recorded one finds a busy GPU.
            pair.plain.replay()
            pair.traced.replay()
            if pair.stamped is not None:
                pair.stamped.replay()
            check_launches(cell.device)
            taken.plain += _lengths(pair.plain.statistics)
            taken.traced += _lengths(pair.traced.statistics)
            taken.samples.append(_sample(pair.traced, many=work.kernel.many))
            if pair.stamped is not None and pair.stamps is not None:
                _between(pair.stamped.statistics, pair.stamps, taken)
    return found


def _lengths(left: Tensor) -> list[int]:
    """From when the first block knew the plan until the last one left, of all calls but the first,
    which follows a pause."""
    table = left[1:].cpu().numpy()
    return [
        int(one[:, END].max() - one[:, PLANNED].min()) for one in table if one[:, PLANNED].all()
    ]


def _between(left: Tensor, stamps: Tensor, taken: _Taken) -> None:
    """What is before and after the launch with the tasks, of all calls but the first."""
    table, at = left.cpu().numpy(), stamps.cpu().numpy()
    for i in range(1, len(table)):
        if table[i, :, PLANNED].all():
            taken.sort.append(max(0, int(table[i, :, PLANNED].min() - at[i])))
            taken.combine.append(max(0, int(at[i + 1] - table[i, :, END].max())))


def _sample(arm: _Arm, *, many: bool) -> _Sample:
    """The last launch of a graph that records."""
    trace = cuda.take_trace(arm.workspace)
    last = arm.statistics[-1].cpu().numpy()
    held = getattr(arm.workspace, "_cuda_trace", None)
    clock = getattr(held, "clock", None)
    length = int(trace["end_ns"].max(initial=0))
    if clock is None:
        return _Sample(trace, None, length, np.zeros(0, np.int64))
    blocks, times = _blocks(clock.cpu().numpy(), last, many=many)
    return _Sample(trace, blocks, max(length, int(blocks.last.max(initial=0))), times)


def _blocks(clock: Ints, left: Ints, *, many: bool) -> tuple[Blocks, Ints]:
    """Arrivals and departures, on the axis of the records, and the readings they are from.

    clock: [blocks, 4], the device's timer and the SM's clock at a block's start, and at its end.
    left: [blocks, `COLUMNS`], the kernel's own counters.
    """
    there = clock[:, 0] > 0
    began = int(clock[there, 0].min()) if there.any() else 0

    def since(times: Ints) -> Ints:
        return np.where(there, np.maximum(0, times - began), ABSENT)

    planned = left[:, PLANNED]
    last = since(np.maximum(clock[:, 2], clock[:, 0]))
    return (
        Blocks(
            since(clock[:, 0]),
            last,
            None if many or not planned[there].all() else np.minimum(since(planned), last),
            int(left[:, SWEEPS].sum()) if left.any() else ABSENT,
        ),
        clock[there][:, [0, 2]].ravel(),
    )


def _rounded(values: Sequence[int]) -> int:
    return round(statistics.median(values)) if values else ABSENT


# --- what is said ------------------------------------------------------------------------------


def _notes(cell: Cell, work: Workload, found: dict[str, _Taken]) -> tuple[str, ...]:
    reuse = len(cell.sets) * work.weight_bytes
    cold = reuse >= REUSE
    notes = [
        f"of {LAUNCHES} recorded launches of each policy the one of median length, each the last "
        f"of {cell.calls} calls without a pause; calls take {len(cell.sets)} copies of the weights "
        f"in turn, {reuse / 1e6:,.0f} MB of active experts, "
        + ("so that L2 holds none of them" if cold else "SO FEW THAT L2 MAY HOLD THEM"),
        "a task begins when its first weights and rows are there, and its time includes waits for "
        "later ones; a wait is that of the consumers before it, for others or for these",
    ]
    times = np.concatenate([s.times for taken in found.values() for s in taken.samples])
    if len(times):
        tick = int(np.gcd.reduce(times - times.min())) or 1
        traces = [sample.trace for taken in found.values() for sample in taken.samples]
        moments = np.concatenate([trace[name] for trace in traces for name in MOMENTS])
        grain = int(np.gcd.reduce(moments[moments > 0], initial=0))
        kept = f", and kept in steps of {nanoseconds(grain)}" if grain > 1 else ""
        notes.append(
            f"moments are an SM's own clock, placed by the device's timer, whose step here is "
            f"{nanoseconds(tick)}{kept}: two SMs agree to about that"
        )
    if work.kernel.many:
        notes.append(
            "sorting with gathering and combine are launches of their own for this many tokens: "
            "the record is of the launch between them, and their times are medians of other calls"
        )
    notes.append(
        "weights read from device memory: not recorded, it takes the hardware's counters; what "
        "tasks ask for is counted"
    )
    return tuple(notes)


class _StampArgs(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p),)


_STAMP_SOURCE = r"""
struct Args {
  unsigned long long* at;
};
extern "C" __global__ void stamp(const __grid_constant__ Args a) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  *a.at = now;
}
"""


@cache
def _stamp_kernel(device: int) -> Kernel:
    cubin, _ = nvrtc.compile_cubin(_STAMP_SOURCE, {}, [])
    kernel = Library(cubin).kernel("stamp", shared_bytes=0, threads=1)
    kernel.prepare(device)
    return kernel


def _stamp(at: Tensor) -> None:
    """Writes the device's time, once all launches before have ended, into one int64."""
    index = at.device.index or 0
    stream = torch.cuda.current_stream(index).cuda_stream
    _stamp_kernel(index).launch(1, stream, _StampArgs(at.data_ptr()))
