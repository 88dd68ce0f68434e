"""Running a checked call on the CPU engine."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..schedule import POLICY_CODES, VICTIM_CODES, Knobs
from ..shapes import ExpertsCall
from .build import BuildError, load
from .stats import TRACE_DTYPE, RunStats, WorkerStats
from .workspace import Workspace

__all__ = ["bench_claims", "bench_plan", "poison", "run", "unavailable"]

DEFAULT_POLICY: Final = "steal"
"""What policy "auto" means here."""

MAX_EXPERTS: Final = 65_534

_KEEP_BYTES: Final = 1 << 26
"""A thread's own workspace is freed after a call that left it larger than this."""

_DTYPES: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_ACTIVATIONS: Final = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}
_ERRORS: Final = {
    1: "more workers entered the launch than it has",
    2: "a worker waited for the plan longer than spin_limit allows",
    3: "a worker waited for another task's result longer than spin_limit allows",
    16: "another call is running in this workspace: give each thread its own",
    17: "not enough memory for the workspace",
    18: "a stage would have more tasks than the scheduler numbers",
    19: "a size or an option is outside its range",
}


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "w13", "w2", "b13", "b2", "topk_weights", "topk_ids")),
        *((name, c_void_p) for name in ("expert_map", "num_valid", "residual", "out")),
        *((name, c_int64) for name in ("x_row", "w13_expert", "w13_row", "w2_expert", "w2_row")),
        *((name, c_int64) for name in ("b13_expert", "b2_expert", "weights_row", "ids_row")),
        *((name, c_int64) for name in ("residual_row", "out_row", "tokens", "hidden")),
        *((name, c_int64) for name in ("intermediate", "experts", "experts_global", "top_k")),
        ("first_token", c_int64),
        *((name, c_int32) for name in ("dtype", "weights_dtype", "ids_int64", "num_valid_int64")),
        *((name, c_int32) for name in ("activation", "interleaved", "weight_on_input")),
        *((name, c_float) for name in ("alpha", "limit", "up_offset")),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("workers", "policy", "victim", "steal_one", "min_steal")),
        *(
            (name, c_int32)
            for name in ("static_share", "batch", "width_cap", "parts_up", "parts_down")
        ),
        *((name, c_int32) for name in ("combine_tokens", "trace")),
        ("spin_limit", c_uint32),
    )


_WORKER_DTYPE: Final = np.dtype(
    [
        (name, "i8")
        for name in (
            *("tasks", "tickets", "steals", "steal_attempts", "lost"),
            *("busy_ns", "wait_ns", "first_ns", "last_ns"),
        )
    ]
)


class _RunStats(ctypes.Structure):
    _fields_ = (
        ("tasks", c_int64 * 3),
        *((name, c_int64) for name in ("groups", "rows", "makespan_ns")),
        *((name, c_int64) for name in ("events", "events_dropped")),
    )


@cache
def _library() -> ctypes.CDLL:
    library = load()
    for name, result, arguments in (
        ("weave_workspace_create", c_void_p, ()),
        ("weave_workspace_destroy", None, (c_void_p,)),
        ("weave_workspace_bytes", c_int64, (c_void_p,)),
        ("weave_workspace_poison", None, (c_void_p,)),
        ("weave_run", c_int32, (c_void_p, c_void_p, c_void_p, c_void_p)),
        ("weave_worker_stats", c_int64, (c_void_p, c_void_p, c_int64)),
        ("weave_events", c_int64, (c_void_p, c_void_p, c_int64)),
        ("weave_sizeof", c_int64, (c_int32,)),
        ("weave_bench_plan", c_double, (c_void_p, c_int64, c_int64, c_int32, c_int32)),
        ("weave_bench_claims", c_double, (c_int32, c_int32, c_int64, c_int32, c_int32, c_void_p)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    structs = (
        *(ctypes.sizeof(struct) for struct in (_Call, _Options)),
        _WORKER_DTYPE.itemsize,
        ctypes.sizeof(_RunStats),
        TRACE_DTYPE.itemsize,
    )
    sizes = tuple(library.weave_sizeof(i) for i in range(len(structs)))
    if structs != sizes:
        raise BuildError(f"the engine's structs have {sizes} bytes, this module's {structs}")
    return library


def unavailable(call: ExpertsCall) -> str | None:
    """Why the engine cannot run `call` here; None if it can. Compiles it at the first call."""
    if call.device.type != "cpu":
        return f"it takes tensors on the CPU, and x is on {call.device}"
    if call.shape.experts > MAX_EXPERTS:
        return f"it takes at most {MAX_EXPERTS} experts, got {call.shape.experts}"
    try:
        _library()
    except BuildError as error:
        return str(error)
    return None


class _Handle:
    """The engine's own workspace, freed with this object."""

    def __init__(self) -> None:
        library = _library()
        self.pointer: int | None = library.weave_workspace_create()
        if not self.pointer:
            raise MemoryError("not enough memory for a workspace of the CPU engine")
        self._free = weakref.finalize(self, library.weave_workspace_destroy, self.pointer)

    @property
    def bytes(self) -> int:
        """Bytes held, without the trace."""
        return int(_library().weave_workspace_bytes(self.pointer))


def _handle(workspace: Workspace) -> _Handle:
    if workspace._engine is None:
        workspace._engine = _Handle()
    handle: _Handle = workspace._engine
    return handle


_of_thread = threading.local()


def _default_workspace() -> Workspace:
    workspace: Workspace | None = getattr(_of_thread, "workspace", None)
    if workspace is None:
        workspace = _of_thread.workspace = Workspace()
    return workspace


def run(call: ExpertsCall) -> Tensor:
    """Runs a checked call: [T, H] in x's dtype, which is `call.out` if there is one.

    Without `call.workspace` the calling thread's own is used, with one worker a logical CPU. Sets
    `call.workspace.last_run`. The GIL is released while the engine runs.

    Bits are equal for every policy, number of workers, repetition and batch around a token; only a
    workspace's parts_up and parts_down change them.

    Raises TypeError if `call.workspace` is no `Workspace`; RuntimeError if another call is running
    in it, or if a wait reached its spin_limit (the next call then works as ever); MemoryError;
    ValueError if one token alone has too many tasks; BuildError if the engine cannot be compiled.
    """
    workspace = _default_workspace() if call.workspace is None else call.workspace
    if not isinstance(workspace, Workspace):
        raise TypeError(
            f"workspace must be None or a weave_moe.Workspace for the host backend, "
            f"got {type(workspace).__name__}"
        )
    library = _library()
    policy = DEFAULT_POLICY if call.policy == "auto" else call.policy
    if not workspace._in_use.acquire(blocking=False):
        raise RuntimeError(f"the CPU engine did not run: {_ERRORS[16]}")
    try:
        handle = _handle(workspace)
        out = call.output()
        options = _options(workspace, policy)
        slab = workspace.slab_tokens(call.shape)
        record = _Record(policy, workspace)
        for start in range(0, call.num_tokens, slab):
            tokens = min(slab, call.num_tokens - start)
            arguments = _arguments(call, out, start, tokens)
            stats = _RunStats()
            status = library.weave_run(
                handle.pointer, ctypes.byref(arguments), ctypes.byref(options), ctypes.byref(stats)
            )
            if status == 17:
                raise MemoryError(f"the CPU engine did not run: {_ERRORS[status]}")
            if status:
                raise RuntimeError(
                    f"the CPU engine gave up: {_ERRORS.get(status, f'error {status}')} "
                    f"({workspace.workers} workers, spin_limit {workspace.spin_limit})"
                )
            record.add(library, handle, stats, tokens)
        workspace.last_run = record.finish()
        if call.workspace is None and handle.bytes > _KEEP_BYTES:
            workspace._engine = None
        return out
    finally:
        workspace._in_use.release()


def _options(workspace: Workspace, policy: str) -> _Options:
    return _Options(
        workers=workspace.workers,
        policy=POLICY_CODES[policy],
        victim=VICTIM_CODES[workspace.victim],
        steal_one=workspace.steal == "one",
        min_steal=workspace.min_steal,
        static_share=workspace.static_share,
        batch=workspace.batch or Knobs.batch,
        width_cap=workspace.width_cap,
        parts_up=workspace.parts_up,
        parts_down=workspace.parts_down,
        combine_tokens=workspace.combine_tokens,
        trace=workspace.trace,
        spin_limit=workspace.spin_limit,
    )


def _pointer(tensor: Tensor | None, offset: int = 0) -> int | None:
    return None if tensor is None else tensor.data_ptr() + offset * tensor.element_size()


def _arguments(call: ExpertsCall, out: Tensor, start: int, tokens: int) -> _Call:
    """`tokens` tokens of a call from token `start`. The tensors must outlive the structure."""
    valid, act, shape = call.num_valid_tokens, call.activation, call.shape
    hidden = shape.hidden
    return _Call(
        x=_pointer(call.x, start * call.x.stride(0)),
        w13=_pointer(call.w13),
        w2=_pointer(call.w2),
        b13=_pointer(call.b13),
        b2=_pointer(call.b2),
        topk_weights=_pointer(call.topk_weights, start * call.topk_weights.stride(0)),
        topk_ids=_pointer(call.topk_ids, start * call.topk_ids.stride(0)),
        expert_map=_pointer(call.expert_map),
        num_valid=_pointer(valid),
        residual=_pointer(call.residual, start * hidden),
        out=_pointer(out, start * out.stride(0)),
        x_row=call.x.stride(0),
        w13_expert=call.w13.stride(0),
        w13_row=call.w13.stride(1),
        w2_expert=call.w2.stride(0),
        w2_row=call.w2.stride(1),
        b13_expert=0 if call.b13 is None else call.b13.stride(0),
        b2_expert=0 if call.b2 is None else call.b2.stride(0),
        weights_row=call.topk_weights.stride(0),
        ids_row=call.topk_ids.stride(0),
        residual_row=hidden,
        out_row=out.stride(0),
        tokens=tokens,
        hidden=hidden,
        intermediate=shape.intermediate,
        experts=shape.experts,
        experts_global=0 if call.expert_map is None else call.expert_map.numel(),
        top_k=shape.top_k,
        first_token=start,
        dtype=_DTYPES[call.x.dtype],
        weights_dtype=_DTYPES[call.topk_weights.dtype],
        ids_int64=call.topk_ids.dtype is torch.int64,
        num_valid_int64=valid is not None and valid.dtype is torch.int64,
        activation=_ACTIVATIONS[act.kind],
        interleaved=call.interleaved,
        weight_on_input=call.weight_on_input,
        alpha=act.alpha,
        limit=math.inf if act.limit is None else act.limit,
        up_offset=act.up_offset,
    )


class _Record:
    """Statistics of a run, added up over its launches."""

    def __init__(self, policy: str, workspace: Workspace) -> None:
        self.policy = policy
        self.workspace = workspace
        self.workers = np.zeros(workspace.workers, _WORKER_DTYPE)
        self.traces: list[npt.NDArray[Any]] = []
        self.makespan = self.tail_gap = self.groups = self.rows = self.blocks = 0

    def add(self, library: ctypes.CDLL, handle: _Handle, stats: _RunStats, tokens: int) -> None:
        launch = np.zeros_like(self.workers)
        library.weave_worker_stats(handle.pointer, launch.ctypes.data, launch.size)
        launch["last_ns"] += self.makespan
        for name in launch.dtype.names or ():
            if name == "last_ns":
                self.workers[name] = launch[name]
            elif name != "first_ns" or self.makespan == 0:
                self.workers[name] += launch[name]
        if self.workspace.trace:
            if stats.events_dropped:
                raise MemoryError(f"not enough memory for a trace of {sum(stats.tasks)} tasks")
            self.traces.append(self._trace(library, handle, stats))
        self.tail_gap += int(launch["last_ns"].max() - launch["last_ns"].min())
        self.makespan += stats.makespan_ns
        self.groups += stats.groups
        self.rows += stats.rows
        self.blocks += stats.tasks[2]

    def _trace(self, library: ctypes.CDLL, handle: _Handle, stats: _RunStats) -> npt.NDArray[Any]:
        trace = np.zeros(stats.events, TRACE_DTYPE)
        library.weave_events(handle.pointer, trace.ctypes.data, stats.events)
        combine = trace["stage"] == 2
        trace["group"][~combine] += self.groups
        trace["chunk"][combine] += self.blocks
        for name in ("claim_ns", "start_ns", "end_ns"):
            trace[name] += self.makespan
        return trace

    def finish(self) -> RunStats:
        """The run's statistics."""
        total = {name: int(self.workers[name].sum()) for name in _WORKER_DTYPE.names or ()}
        everyone = self.workers.size * self.makespan
        trace = None
        if self.workspace.trace:
            trace = np.concatenate([np.zeros(0, TRACE_DTYPE), *self.traces])
            trace = trace[np.argsort(trace["start_ns"], kind="stable")]
        return RunStats(
            policy=self.policy,
            workers=self.workspace.workers,
            tasks=total["tasks"],
            steals=total["steals"],
            steal_attempts=total["steal_attempts"],
            tickets=total["tickets"],
            lost=total["lost"],
            makespan_ns=self.makespan,
            busy_share=total["busy_ns"] / everyone if everyone else 0.0,
            tail_gap_ns=self.tail_gap,
            dependency_wait_ns=total["wait_ns"],
            groups=self.groups,
            rows=self.rows,
            per_worker=tuple(self._worker(i) for i in range(self.workspace.workers)),
            trace=trace,
        )

    def _worker(self, index: int) -> WorkerStats:
        own = {name: int(self.workers[name][index]) for name in _WORKER_DTYPE.names or ()}
        return WorkerStats(
            tasks=own["tasks"],
            steals=own["steals"],
            steal_attempts=own["steal_attempts"],
            tickets=own["tickets"],
            busy_ns=own["busy_ns"],
            wait_ns=own["wait_ns"],
            idle_ns=self.makespan - own["busy_ns"] - own["wait_ns"],
            first_ns=own["first_ns"],
            last_ns=own["last_ns"],
        )


def poison(workspace: Workspace) -> None:
    """Fills with NaN all of a workspace's memory that no result may depend on. For tests."""
    if workspace._engine is not None:
        _library().weave_workspace_poison(workspace._engine.pointer)


def bench_plan(ids: Sequence[int], experts: int, width_cap: int = 32, repeats: int = 20) -> float:
    """Nanoseconds that the core takes to plan slots with these expert ids, the best of `repeats`.

    Raises MemoryError.
    """
    array = np.ascontiguousarray(ids, np.int32)
    took = _library().weave_bench_plan(array.ctypes.data, array.size, experts, width_cap, repeats)
    if took < 0:
        raise MemoryError("not enough memory for the plan")
    return float(took)


def bench_claims(
    policy: str, tasks: int, workers: int = 64, repeats: int = 20, batch: int = Knobs.batch
) -> tuple[float, int]:
    """Nanoseconds of one claim by the only running worker of `workers`, the best of `repeats`; and
    the tickets that it asked for.

    policy: a name of POLICIES but "auto". tasks: tasks of the stage, below 2^24. batch: most tasks
    of a ticket of "steal". Raises RuntimeError if the claims do not add up to the tasks.
    """
    tickets = c_int64()
    took = _library().weave_bench_claims(
        *(POLICY_CODES[policy], batch, tasks, workers, repeats), ctypes.byref(tickets)
    )
    if took < 0:
        raise RuntimeError(f"{tasks} tasks were not claimed exactly once each")
    return float(took), tickets.value
