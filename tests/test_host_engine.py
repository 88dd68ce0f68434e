"""The CPU engine: results against the reference, bits, statistics, and what goes wrong."""

from __future__ import annotations

import copy
import ctypes
import mmap
import pickle
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from generators import (
    AWKWARD_SIZES,
    DTYPES,
    ROUTINGS,
    Case,
    Guarded,
    assert_close,
    experts_case,
    experts_cases,
    generator,
)
from weave_moe import backends
from weave_moe.host import build, engine
from weave_moe.host.stats import RunStats
from weave_moe.host.workspace import Workspace, workspace_bytes
from weave_moe.reference import experts_reference, local_experts
from weave_moe.schedule import (
    Plan,
    combine_stage,
    count_tokens,
    down_stage,
    gate_up_stage,
    padded_tokens,
    plan_groups,
    tile_at,
)
from weave_moe.shapes import POLICIES, ExpertsCall, LayerShape

FIXED_POLICIES = POLICIES[1:]
WORKERS = (1, 2, 3, 8, 33)


def _no_compiler() -> str:
    try:
        build.compiler()
    except build.BuildError as error:
        return str(error)
    return ""


# An engine that does not compile is no reason to skip.
pytestmark = pytest.mark.skipif(bool(_no_compiler()), reason=_no_compiler() or "a compiler is here")


def run(case: Case, **changes: Any) -> Tensor:
    return engine.run(case.with_(**changes).call())


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def last_run(workspace: Workspace) -> RunStats:
    assert workspace.last_run is not None
    return workspace.last_run


def knobs(width_caps: tuple[int, ...] = (8, 24, 32, 64, 256)) -> st.SearchStrategy[dict[str, Any]]:
    """Settings that change who does what, and no bit of the result."""
    return st.fixed_dictionaries(
        {
            "workers": st.sampled_from(WORKERS),
            "victim": st.sampled_from(("largest", "random")),
            "steal": st.sampled_from(("half", "one")),
            "min_steal": st.sampled_from((1, 2, 5)),
            "static_share": st.sampled_from((0, 1, 50, 70, 99, 100)),
            "batch": st.sampled_from((1, 2, 4)),
            "width_cap": st.sampled_from(width_caps),
            "combine_tokens": st.sampled_from((1, 3, 16, 1000)),
            "slab_bytes": st.sampled_from((1, 20_000, 1 << 29)),
            "trace": st.booleans(),
        }
    )


# Results.


@given(experts_cases(), knobs(), st.sampled_from(POLICIES), st.integers(1, 5), st.integers(1, 5))
def test_any_call_is_close_to_the_truth(
    case: Case, options: dict[str, Any], policy: str, parts_up: int, parts_down: int
) -> None:
    workspace = Workspace(**options, parts_up=parts_up, parts_down=parts_down)
    for _ in range(2):
        out = Guarded(*case.x.shape, dtype=case.x.dtype)
        got = run(case, workspace=workspace, policy=policy, out=out.tensor)
        assert got is out.tensor
        out.check()
        assert_close(got, case)
        engine.poison(workspace)


ROW_TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1.2e-3, torch.float32: 4e-6}


def assert_like_reference(case: Case, got: Tensor) -> None:
    """Every row within the dtype's rounding of the contract's reference, relative to its norm."""
    want = experts_reference(case.call())
    assert got.dtype == want.dtype
    norm = want.double().norm(dim=1)
    # A row of few elements may cancel to nearly nothing; no row is smaller than a fifth of usual.
    usual = norm.square().mean().sqrt()
    error = (got.double() - want.double()).norm(dim=1)
    allowed = ROW_TOLERANCE[got.dtype] * torch.maximum(norm, 0.2 * usual)
    assert bool((error <= allowed).all()), f"worst row {(error / allowed).max()} of allowed, {case}"


@st.composite
def large_cases(draw: st.DrawFn) -> Case:
    """Sizes beyond one chunk, one block of tokens, one group; real models' awkward sizes.

    Rows have 8 elements at least: fewer, each a sum of hundreds of products, may all cancel.
    """
    sizes = st.sampled_from((1, 2, 8, 96, 128, 176, 192, 352, 704)) | st.integers(1, 300)
    return experts_case(
        draw(st.integers(0, 90)),
        draw(sizes.filter(lambda hidden: hidden >= 8)),
        draw(sizes),
        draw(st.sampled_from((1, 2, 7, 16))),
        draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(DTYPES)),
        routing=draw(st.sampled_from(sorted(ROUTINGS))),
        activation=draw(st.sampled_from(("silu", "relu2", "swiglu_oai"))),
        biases=draw(st.booleans()),
        residual=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=25)
@given(
    large_cases(), knobs(), st.sampled_from(POLICIES), st.sampled_from(((1, 1), (3, 2), (64, 64)))
)
def test_sizes_beyond_one_chunk(
    case: Case, options: dict[str, Any], policy: str, parts: tuple[int, int]
) -> None:
    options["slab_bytes"] = max(options["slab_bytes"], 500_000)
    workspace = Workspace(**options, parts_up=parts[0], parts_down=parts[1])
    assert_like_reference(case, run(case, workspace=workspace, policy=policy))


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "experts", "top_k"),
    [
        (37, 64, 32, 1024, 16),  # many experts, most of them empty
        (9, 32, 16, 48, 48),  # every expert of every token
        (5, AWKWARD_SIZES[0], 96, 3, 2),
        (5, 96, AWKWARD_SIZES[1], 3, 2),
        (300, 40, 24, 2, 2),  # groups of every width
        (1, 1, 1, 1, 1),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_shapes(
    tokens: int, hidden: int, intermediate: int, experts: int, top_k: int, dtype: torch.dtype
) -> None:
    case = experts_case(tokens, hidden, intermediate, experts, top_k, dtype=dtype)
    for width_cap in (32, 256):
        assert_like_reference(case, run(case, workspace=Workspace(3, width_cap=width_cap)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_are_exact(dtype: torch.dtype) -> None:
    """Every 16-bit pattern widens, and fp32 patterns from everywhere narrow, as torch has it."""
    one = torch.ones(1, 1, 1, dtype=torch.float32)
    ids = torch.zeros(1 << 16, 1, dtype=torch.int32)
    # One input, one output, relu(1)^2 = 1: the result is the slot's weight in x's type.
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(-1, 1)
    case = Case((torch.ones(1 << 16, 1), one, one, patterns, ids), {"activation": "relu2"})
    got = run(case)
    assert torch.equal(got.isnan(), patterns.isnan())
    want = patterns.float()
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))

    g = generator(1)
    anywhere = torch.randint(-(1 << 31), 1 << 31, (1 << 15, 1), generator=g).to(torch.int32)
    near_half = (torch.randint(0x33000000 - 5, 0x48000000, (1 << 15, 1), generator=g)).to(
        torch.int32
    )
    # Ties and their neighbours: 16-bit values and half of their last place.
    ties = patterns.float().view(torch.int32)[::2] + torch.randint(
        -1, 2, (1 << 15, 1), generator=g
    ).to(torch.int32)
    ties = ties + (0x1000 if dtype is torch.float16 else 0x8000)
    for sample in (anywhere, near_half, ties):
        weights = sample.view(torch.float32)
        x = torch.ones(len(sample), 1, dtype=dtype)
        case = Case(
            (x, one.to(dtype), one.to(dtype), weights, ids[: len(sample)]), {"activation": "relu2"}
        )
        got, want = run(case), weights.to(dtype)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


def crafted(
    dtype: torch.dtype,
    x: list[float],
    w13: list[list[float]],
    w2: list[list[float]],
    weights: list[float],
    **options: Any,
) -> float:
    """One token with slots 0, 1, ... on experts 0, 1, ...; H inputs, I = len(w2[0]), one output.

    relu2, so that h^2 comes before w2. w13[e] is one row for all of I; w2[e] is the first row.
    """
    inner = len(w2[0])
    up = torch.tensor(w13, dtype=dtype).unsqueeze(1).expand(-1, inner, -1)
    down = torch.zeros(len(w2), len(x), inner, dtype=dtype)
    down[:, 0] = torch.tensor(w2)
    ids = torch.arange(len(weights), dtype=torch.int32).unsqueeze(0)
    args = (torch.tensor([x], dtype=dtype), up, down, torch.tensor([weights]), ids)
    case = Case(args, {"activation": "relu2", **options})
    got = run(case)
    assert torch.equal(got, experts_reference(case.call()))
    return float(got[0, 0])


def test_roundings_are_where_the_contract_has_them() -> None:
    bf16, fp16, fp32 = DTYPES
    one = [[1.0], [1.0]]
    # A row of 1 + 2^-9 less a row of 1: gone if the row was rounded to bf16, kept in fp32.
    assert crafted(bf16, [1.0], one, [[1.0, 2.0**-9], [1.0, 0.0]], [1.0, -1.0]) == 0.0
    # fp16 rows are kept: what fp16 cannot hold, in the last place or beyond its range, survives.
    assert crafted(fp16, [1.0], one, [[1.0, 2.0**-12], [1.0, 0.0]], [1.0, -1.0]) == 2.0**-12
    assert crafted(fp16, [8.0], one, [[2000.0], [0.0]], [0.25, 0.0]) == 32_000.0
    # (1 + 2^-6)^2 = 1 + 2^-5 + 2^-12: the intermediate loses its last term to fp16.
    assert crafted(fp16, [1.0], [[1 + 2.0**-6], [1.0]], [[1.0], [1 + 2.0**-5]], [1.0, -1.0]) == 0.0
    # A scaled input is rounded: 1 + 2^-12 is 1 in fp16, and then both slots are equal.
    scaled = crafted(fp16, [1.0], one, [[1.0], [-1.0]], [1 + 2.0**-12, 1.0], weight_on_input=True)
    assert scaled == 0.0
    # Slots are added in order: 2^24 + 1 is 2^24 in fp32, and only this order gives 0.
    rows = [[1.0]] * 3
    assert crafted(fp32, [1.0], rows, rows, [2.0**24, 1.0, -(2.0**24)]) == 0.0
    assert crafted(fp32, [1.0], rows, rows, [2.0**24, -(2.0**24), 1.0]) == 1.0
    # A residual comes after the last of them, and before the only rounding.
    last = {"residual": torch.tensor([[-(2.0**24)]])}
    assert crafted(fp32, [1.0], rows[:2], rows[:2], [2.0**24, 1.0], **last) == 0.0
    tie = {"residual": torch.tensor([[2.0**-8]]).to(bf16)}
    assert crafted(bf16, [1.0], one, one, [1.0, 2.0**-8], **tie) == 1 + 2.0**-7
    # A weight times a row is rounded before it is added.
    third, square = 1 / 3, float(torch.tensor(1 / 3) * torch.tensor(1 / 3))
    assert crafted(fp32, [1.0], one, [[third], [1.0]], [third, -square]) == 0.0


def test_no_tokens_and_no_slots() -> None:
    workspace = Workspace(3, trace=True)
    case = experts_case(0)
    assert run(case, workspace=workspace).shape == (0, 16)
    stats = last_run(workspace)
    assert (stats.tasks, stats.groups, stats.rows, stats.busy_share) == (0, 0, 0, 0.0)
    assert len(stats.per_worker) == 3
    assert stats.trace is not None
    assert len(stats.trace) == 0
    poisoned = torch.full_like(case.w13, float("nan"))
    case = experts_case(50, routing="all_skipped").with_(w13=poisoned)
    for policy in FIXED_POLICIES:
        assert bits(run(case, workspace=workspace, policy=policy)) == bytes(50 * 16 * 4)
        assert last_run(workspace).groups == 0


def test_skipped_slots_and_invalid_tokens_touch_nothing() -> None:
    """NaN in every weight, token and slot weight that is not to be used leaves no trace."""
    nan = float("nan")
    case = experts_case(40, experts=6, routing="holes", valid=31, biases=True, seed=3)
    used = set(local_experts(case.call()).flatten().tolist()) - {-1}
    case = case.with_(topk_ids=torch.where(case.topk_ids == 2, -1, case.topk_ids))
    used.discard(2)
    skipped = (case.topk_ids < 0) | (torch.arange(40) >= 31).unsqueeze(1)
    want = run(case)
    changes: dict[str, Tensor] = {"topk_weights": case.topk_weights.masked_fill(skipped, nan)}
    for name in ("w13", "w2", "b13", "b2"):
        value = (case.options.get(name) if name in case.options else getattr(case, name)).clone()
        for e in set(range(6)) - used:
            value[e] = nan
        changes[name] = value
    x = case.x.clone()
    x[skipped.all(dim=1)] = nan
    got = run(case, x=x, **changes)
    assert bits(got) == bits(want)
    assert bits(got[31:]) == bytes(got[31:].numel() * 4)


UNREADABLE = """
import ctypes, mmap, os, resource, sys, threading, time, torch
from weave_moe.host import engine
from weave_moe.host.workspace import Workspace
from weave_moe.shapes import check_experts

torch.set_num_threads(1)
E, H, I, T, k = 6, 64, 32, 23, 3
libc = ctypes.CDLL(None, use_errno=True)
g = torch.Generator().manual_seed(0)

def guarded(*size, lock):
    bytes_each = 4 * size[1] * size[2]
    assert bytes_each % mmap.PAGESIZE == 0
    memory = mmap.mmap(-1, size[0] * bytes_each)
    tensor = torch.frombuffer(memory, dtype=torch.float32).view(size)
    tensor.copy_(torch.randn(size, generator=g) / 8)
    for e in lock:
        address = tensor[e].data_ptr()
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(bytes_each), 0) == 0
    return tensor

x, weights = torch.randn(T, H, generator=g), torch.rand(T, k, generator=g)
ids = torch.randint(-1, E, (T, k), generator=g)
ids[(ids == 1) | (ids == 5)] = E  # nobody uses experts 1 and 5
w13, w2 = guarded(E, 2 * I, H, lock=(1, 5)), guarded(E, H, I, lock=(1, 5))
y = engine.run(check_experts(x, w13, w2, weights, ids))
assert bool(y.isfinite().all())

def in_child(task):
    # A process may fork between launches.
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os._exit(task())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def again():
    return 0 if torch.equal(engine.run(check_experts(x, w13, w2, weights, ids)), y) else 3

def forbidden():
    ids[0, 0] = 1
    engine.run(check_experts(x, w13, w2, weights, ids))
    return 4

def few_threads():
    # Address space for a dozen more stacks: the threads that start take the others' work.
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * mmap.PAGESIZE + (150 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        for _ in range(200):
            threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
        return 5  # the limit does not do what this test is about
    except RuntimeError:
        pass
    workspace = Workspace(200)
    call = check_experts(x, w13, w2, weights, ids, workspace=workspace)
    return 0 if torch.equal(engine.run(call), y) and workspace.last_run.workers == 200 else 3

print(in_child(again), in_child(few_threads), in_child(forbidden))
"""


@pytest.mark.slow
def test_unused_experts_are_not_read_and_threads_and_forks_do_not_matter() -> None:
    """Unused experts lie on pages that may not be read; using one is the crash that proves it.

    The children of that process also run where no further thread can be started.
    """
    done = subprocess.run([sys.executable, "-c", UNREADABLE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"0 0 {-signal.SIGSEGV}\n"), done.stderr


def test_ids_beyond_32_bits_are_skipped() -> None:
    case = experts_case(30, experts=4, top_k=3, id_dtype=torch.int64)
    far = torch.tensor([1 << 32, -(1 << 32), 1 << 62, -(1 << 63), 5 << 16])
    mask = torch.rand(30, 3, generator=generator(4)) < 0.5
    offset = far[torch.randint(5, (30, 3), generator=generator(5))] * mask
    want = run(case, topk_ids=case.topk_ids.masked_fill(mask, -1))
    assert bits(run(case, topk_ids=case.topk_ids + offset)) == bits(want)
    expert_map = torch.arange(4, dtype=torch.int32)
    got = run(case, topk_ids=case.topk_ids + offset, expert_map=expert_map)
    assert bits(got) == bits(want)


def test_offsets_beyond_32_bits() -> None:
    """Experts and rows more than 2^31 elements apart, in memory that is mostly never touched."""
    case = experts_case(6, 3, 2, 3, 2)
    no_reserve = 0x4000  # MAP_NORESERVE, which Python's mmap has no name for everywhere
    apart = (1 << 31) + 5

    def far(weight: Tensor) -> Tensor:
        experts, rows, columns = weight.shape
        spread = (experts - 1) * apart + (rows - 1) * (apart // 8) + columns
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        memory = torch.frombuffer(mmap.mmap(-1, 4 * spread, flags=flags), dtype=torch.float32)
        result = memory.as_strided(weight.shape, (apart, apart // 8, 1))
        result.copy_(weight)
        return result

    want = run(case)
    assert bits(run(case, w13=far(case.w13))) == bits(want)
    assert bits(run(case, w2=far(case.w2))) == bits(want)


def test_weights_of_any_stride() -> None:
    case = experts_case(20, 32, 24, 5, 2, biases=True)
    want = run(case)

    def spread(weight: Tensor) -> Tensor:
        experts, rows, columns = weight.shape
        wide = torch.full((experts, 2, rows + 3, columns + 5), float("nan"))
        wide[:, 1, :rows, :columns] = weight
        return wide[:, 1, :rows, :columns]

    def rows_first(weight: Tensor) -> Tensor:
        return weight.transpose(0, 1).contiguous().transpose(0, 1)

    for change in (spread, rows_first):
        got = run(case, w13=change(case.w13), w2=change(case.w2))
        assert bits(got) == bits(want)


# Bits.


@st.composite
def bit_cases(draw: st.DrawFn) -> Case:
    return experts_case(
        draw(st.integers(1, 70)),
        draw(st.sampled_from((1, 40, 130, 300))),
        draw(st.sampled_from((2, 65, 96, 200))),
        draw(st.sampled_from((1, 4, 40))),
        draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(DTYPES)),
        routing=draw(st.sampled_from(("distinct", "skewed", "duplicates", "holes", "last"))),
        biases=draw(st.booleans()),
        weight_on_input=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=12)
@given(bit_cases(), st.data())
def test_bits_depend_on_nobody_who_ran_what(case: Case, data: st.DataObject) -> None:
    want = bits(run(case, workspace=Workspace(1), policy="counter"))
    for workers in WORKERS:
        options = data.draw(knobs())
        options["workers"] = workers
        options["slab_bytes"] = max(options["slab_bytes"], 200_000)
        workspace = Workspace(**options)
        for policy in FIXED_POLICIES:
            for _ in range(2):
                engine.poison(workspace)
                assert bits(run(case, workspace=workspace, policy=policy)) == want, (
                    policy,
                    workspace,
                )


@settings(max_examples=15)
@given(bit_cases(), st.sampled_from(((1, 1), (3, 1), (2, 5))), st.data())
def test_bits_of_a_token_do_not_depend_on_the_batch(
    case: Case, parts: tuple[int, int], data: st.DataObject
) -> None:
    workspace = Workspace(2, parts_up=parts[0], parts_down=parts[1])
    tokens = case.x.size(0)
    whole = run(case, workspace=workspace)
    some = torch.tensor(
        data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=2 * tokens))
    )
    alone = some[:1]
    for chosen in (some, alone):
        part = {name: getattr(case, name)[chosen] for name in ("x", "topk_weights", "topk_ids")}
        assert bits(run(case, **part, workspace=workspace)) == bits(whole[chosen])


@settings(max_examples=15)
@given(bit_cases(), st.data())
def test_padding_changes_no_bit(case: Case, data: st.DataObject) -> None:
    tokens = case.x.size(0)
    valid = data.draw(st.integers(0, tokens))
    ids_of_padding = data.draw(st.sampled_from((0, -1, 1 << 30)))
    x, ids = case.x.clone(), case.topk_ids.clone()
    x[valid:], ids[valid:] = float("nan"), ids_of_padding
    count = torch.tensor([valid], dtype=data.draw(st.sampled_from((torch.int32, torch.int64))))
    workspace = Workspace(3, slab_bytes=data.draw(st.sampled_from((1, 50_000, 1 << 29))))
    got = run(case, x=x, topk_ids=ids, num_valid_tokens=count, workspace=workspace)
    assert bits(got[:valid]) == bits(run(case)[:valid])
    assert bits(got[valid:]) == bytes(got[valid:].nbytes)


@settings(max_examples=20)
@given(st.lists(experts_cases(max_size=200), min_size=2, max_size=4), knobs(), st.data())
def test_a_workspace_serves_any_sequence_of_calls(
    cases: list[Case], options: dict[str, Any], data: st.DataObject
) -> None:
    """Other shapes, types, policies and worker counts one after the other; poisoned between."""
    options["slab_bytes"] = max(options["slab_bytes"], 20_000)
    workspace = Workspace(**options)
    for case in [*cases, *cases]:
        workspace.workers = data.draw(st.sampled_from(WORKERS))
        parts = workspace.parts_up, workspace.parts_down = data.draw(
            st.sampled_from(((1, 1), (2, 3)))
        )
        policy = data.draw(st.sampled_from(FIXED_POLICIES))
        fresh = run(case, workspace=Workspace(1, parts_up=parts[0], parts_down=parts[1]))
        assert bits(run(case, workspace=workspace, policy=policy)) == bits(fresh)
        engine.poison(workspace)


# Statistics and traces.


def plan_of(call: ExpertsCall, width_cap: int) -> Plan:
    experts = local_experts(call).flatten().tolist()
    return plan_groups(count_tokens(experts, call.shape.experts), width_cap)


@settings(max_examples=25)
@given(bit_cases(), knobs(), st.sampled_from(FIXED_POLICIES), st.sampled_from(((1, 1), (3, 2))))
@example(experts_case(60, 300, 200, 5, 3), {"workers": 3}, "steal", (2, 2))
def test_statistics_add_up(
    case: Case, options: dict[str, Any], policy: str, parts: tuple[int, int]
) -> None:
    options = {**options, "trace": True, "slab_bytes": 1 << 29}
    workspace = Workspace(**options, parts_up=parts[0], parts_down=parts[1])
    run(case, workspace=workspace, policy=policy)
    stats = last_run(workspace)
    call = case.call()
    shape = call.shape
    plan = plan_of(call, workspace.width_cap)
    up = gate_up_stage(shape.hidden, shape.intermediate, gated=shape.gated, parts=parts[0])
    down = down_stage(shape.hidden, shape.intermediate, parts=parts[1])
    blocks = combine_stage(call.num_tokens, workspace.combine_tokens)

    assert stats.policy == policy
    assert stats.workers == workspace.workers == len(stats.per_worker)
    assert stats.groups == len(plan.groups)
    assert stats.rows == sum(padded_tokens(n, workspace.width_cap) for n in plan.expert_tokens)
    assert stats.tasks == up.tasks(plan) + down.tasks(plan) + blocks
    for name in ("tasks", "steals", "steal_attempts", "tickets"):
        assert getattr(stats, name) == sum(getattr(worker, name) for worker in stats.per_worker)
    assert stats.dependency_wait_ns == sum(worker.wait_ns for worker in stats.per_worker)
    busy = sum(worker.busy_ns for worker in stats.per_worker)
    assert stats.busy_share == pytest.approx(busy / (stats.workers * stats.makespan_ns))
    last = [worker.last_ns for worker in stats.per_worker]
    assert stats.makespan_ns == max(last)
    assert stats.tail_gap_ns == max(last) - min(last)
    for worker in stats.per_worker:
        assert 0 <= worker.first_ns <= worker.last_ns
        assert worker.busy_ns + worker.wait_ns <= worker.last_ns - worker.first_ns
        assert worker.busy_ns + worker.wait_ns + worker.idle_ns == stats.makespan_ns
    if (
        policy == "counter"
    ):  # a ticket for each task, and one more a worker and stage to see the end
        assert stats.tickets == stats.tasks + 3 * stats.workers
    if policy not in ("steal", "window"):
        assert (stats.steals, stats.steal_attempts, stats.lost) == (0, 0, 0)
    check_trace(stats, call, plan, (up, down), workspace)


def check_trace(
    stats: RunStats, call: ExpertsCall, plan: Plan, stages: tuple[Any, Any], workspace: Workspace
) -> None:
    trace = stats.trace
    assert trace is not None
    fields = ("stage", "expert", "group", "chunk", "part")
    ran = sorted(tuple(int(event[name]) for name in fields) for event in trace)
    want = [
        (kind, plan.groups[group].expert, group, chunk, part)
        for kind, stage in enumerate(stages)
        for group in range(len(plan.groups))
        for chunk in range(stage.chunks)
        for part in range(stage.parts)
    ]
    blocks = combine_stage(call.num_tokens, workspace.combine_tokens)
    want += [(2, -1, -1, block, 0) for block in range(blocks)]
    assert ran == sorted(want)  # every task exactly once

    assert (trace["victim"] >= 0).sum() == stats.steals
    assert not (trace["victim"] == trace["worker"]).any()
    assert (trace["victim"] < stats.workers).all()
    assert (np.diff(trace["start_ns"]) >= 0).all()
    assert (trace["claim_ns"] <= trace["start_ns"]).all()
    assert (trace["start_ns"] <= trace["end_ns"]).all()
    assert trace["claim_ns"].min(initial=0) >= 0
    assert trace["end_ns"].max(initial=0) <= stats.makespan_ns
    for index, worker in enumerate(stats.per_worker):
        mine = trace[trace["worker"] == index]
        assert len(mine) == worker.tasks
        assert int((mine["end_ns"] - mine["start_ns"]).sum()) == worker.busy_ns
        assert (mine["claim_ns"][1:] >= mine["end_ns"][:-1]).all()  # one thing at a time
        assert (np.diff(mine["stage"].astype(int)) >= 0).all()

    up, down, combine = (trace[trace["stage"] == kind] for kind in range(3))
    up_end = np.zeros(len(plan.groups), np.int64)
    np.maximum.at(up_end, up["group"], up["end_ns"])
    assert (down["start_ns"] >= up_end[down["group"]]).all()
    expert_end = np.zeros(call.shape.experts + 1, np.int64)  # the last entry: skipped slots
    np.maximum.at(expert_end, down["expert"], down["end_ns"])
    experts = local_experts(call).numpy()
    for event in combine:
        begin = int(event["chunk"]) * workspace.combine_tokens
        needed = expert_end[experts[begin : begin + workspace.combine_tokens]]
        assert event["start_ns"] >= needed.max(initial=0)


def stage_trace(stats: RunStats, stage: int) -> Any:
    assert stats.trace is not None
    return stats.trace[stats.trace["stage"] == stage]


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_static_policies_bind_tasks_to_workers(workers: int) -> None:
    """A list of tasks belongs to whoever took its ticket, as a whole."""
    case = experts_case(64, 40, 300, 12, 3, seed=5)
    plan = plan_of(case.call(), 32)
    chunks = gate_up_stage(40, 300).chunks
    order = {
        tile_at(plan.groups, chunks, 1, index)[:2]: index
        for index in range(len(plan.groups) * chunks)
    }
    workspace = Workspace(workers, trace=True, combine_tokens=1)

    def assert_lists_are_whole(stage: int, number: Callable[[Any], int]) -> None:
        owner: dict[int, int] = {}
        for event in stage_trace(last_run(workspace), stage):
            worker = int(event["worker"])
            assert owner.setdefault(number(event) % workers, worker) == worker

    run(case, workspace=workspace, policy="static_strided")
    assert_lists_are_whole(0, lambda event: order[int(event["group"]), int(event["chunk"])])
    assert_lists_are_whole(2, lambda event: int(event["chunk"]))
    # With more experts than workers a list has every so-many-th expert; blocks have no expert.
    run(case, workspace=workspace, policy="static_expert")
    assert_lists_are_whole(0, lambda event: int(event["expert"]))
    assert_lists_are_whole(1, lambda event: int(event["expert"]))
    assert_lists_are_whole(2, lambda event: int(event["chunk"]))


@pytest.mark.parametrize("policy", ["steal", "window"])
def test_idle_workers_steal(policy: str) -> None:
    """With more workers than cores some are held up with full queues, and others rob them."""
    case = experts_case(200, 200, 100, 16, 4)
    workspace = Workspace(8)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        run(case, workspace=workspace, policy=policy)
        stats = last_run(workspace)
        if stats.steals:
            assert stats.steal_attempts >= stats.steals
            return
    pytest.fail("nothing was stolen in 20 seconds of launches")


def test_min_steal_leaves_small_queues_alone() -> None:
    case = experts_case(200, 100, 100, 16, 4)
    workspace = Workspace(8, min_steal=1 << 20)
    for _ in range(5):
        run(case, workspace=workspace)
        assert last_run(workspace).steals == 0


@given(st.integers(1, 300), st.integers(1, 50))
@settings(max_examples=10)
def test_slabs_are_one_run(tokens: int, per_slab: int) -> None:
    case = experts_case(tokens, 24, 70, 5, 2, valid=tokens * 2 // 3, residual=tokens % 2 == 0)
    whole = Workspace(2)
    want = run(case, workspace=whole)
    shape = case.call().shape
    workspace = Workspace(2, trace=True, slab_bytes=whole.launch_bytes(shape, per_slab))
    slab = workspace.slab_tokens(shape)
    assert slab >= per_slab
    assert workspace.launch_bytes(shape, slab + 1) > workspace.slab_bytes
    assert bits(run(case, workspace=workspace)) == bits(want)
    stats, launches = last_run(workspace), -(-tokens // slab)
    trace = stats.trace
    assert trace is not None
    assert len(trace) == stats.tasks
    fields = trace[["stage", "group", "chunk", "part"]]
    assert len(np.unique(fields)) == len(trace)
    combine = stage_trace(stats, 2)
    assert len(combine) == sum(
        -(-min(slab, tokens - start) // 16) for start in range(0, tokens, slab)
    )
    assert sorted(combine["chunk"]) == list(range(len(combine)))
    assert set(trace["group"]) - {-1} == set(range(stats.groups))
    assert trace["end_ns"].max() <= stats.makespan_ns
    assert (launches > 1) == (tokens > slab)


# Workspaces.


@given(
    experts_cases(max_size=300),
    knobs(),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from((0, 1, 5, 1000)),
)
def test_workspace_bytes_is_what_the_engine_takes(
    case: Case, options: dict[str, Any], parts_up: int, parts_down: int, more: int
) -> None:
    workspace = Workspace(**options, parts_up=parts_up, parts_down=parts_down)
    call = case.with_(workspace=workspace).call()
    engine.run(call)
    tokens = min(call.num_tokens, workspace.slab_tokens(call.shape))
    held = engine._handle(workspace).bytes
    if call.num_tokens <= tokens:
        assert held == workspace_bytes(call.shape, call.num_tokens, workspace)
    assert held <= workspace_bytes(call.shape, call.num_tokens + more, workspace)
    bound = workspace.launch_bytes(call.shape, 1)
    assert workspace.launch_bytes(call.shape, tokens or 1) <= max(workspace.slab_bytes, bound)


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 300),
    st.integers(1, 64),
    st.sampled_from((8, 32, 256)),
    st.integers(1, 64),
)
def test_a_slab_is_as_large_as_task_numbers_allow(
    hidden: int, intermediate: int, experts: int, top_k: int, width_cap: int, parts: int
) -> None:
    """The engine refuses one token more than `slab_tokens` says, before it looks at anything."""
    workspace = Workspace(1, width_cap=width_cap, parts_up=parts, parts_down=1, slab_bytes=1 << 62)
    shape = LayerShape(hidden, intermediate, experts, top_k)
    handle = engine._handle(workspace)
    options = engine._options(workspace, "counter")
    call = experts_case(1).call()
    arguments = engine._arguments(call, call.output(), 0, 1)
    arguments.hidden, arguments.intermediate = hidden, intermediate
    arguments.experts, arguments.top_k = experts, top_k
    arguments.tokens = workspace.slab_tokens(shape) + 1

    def status() -> int:
        return int(
            engine._library().weave_run(
                handle.pointer, ctypes.byref(arguments), ctypes.byref(options), None
            )
        )

    assert status() == 18
    assert handle.bytes == 0
    options.width_cap = 72
    assert status() == 19
    options.width_cap, arguments.experts = 64, 65_535
    assert status() == 19


def test_any_number_of_tokens_has_a_bound() -> None:
    shape = LayerShape(7168, 2048, 256, 16)
    workspace = Workspace(2)
    assert (
        workspace_bytes(shape, 131_072, workspace) < 1.01 * (1 << 29) + 2 * 17 * 7168 * 4 + 20_000
    )
    assert workspace_bytes(shape, 0) == 0
    with pytest.raises(ValueError, match="max_tokens must be at least 0, got -1"):
        workspace_bytes(shape, -1)
    with pytest.raises(TypeError, match="shape must be a LayerShape"):
        workspace_bytes((1, 2), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 16777215 tasks"):
        Workspace(parts_up=64).slab_tokens(LayerShape(8, 1 << 24, 2, 2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"workers": 0}, ValueError, "workers must be at least 1, got 0"),
        ({"workers": 1 << 21}, ValueError, "workers must be at most 1048576"),
        ({"workers": 2.0}, TypeError, "workers must be an int"),
        ({"trace": 1}, TypeError, "trace must be True or False"),
        ({"victim": "next"}, ValueError, "victim must be one of largest or random, got 'next'"),
        ({"steal": "all"}, ValueError, "steal must be one of half or one"),
        ({"min_steal": 0}, ValueError, "min_steal must be at least 1"),
        ({"static_share": 101}, ValueError, "static_share must be at most 100, got 101"),
        ({"batch": 3}, ValueError, "batch must be 1, 2, 4 or None, got 3"),
        ({"parts_up": 65}, ValueError, "parts_up must be at most 64"),
        ({"parts_down": 0}, ValueError, "parts_down must be at least 1"),
        ({"width_cap": 72}, ValueError, "width_cap must be 8 .. 256"),
        ({"combine_tokens": 0}, ValueError, "combine_tokens must be at least 1"),
        ({"spin_limit": 1 << 32}, ValueError, "spin_limit must be at most"),
        ({"slab_bytes": 0}, ValueError, "slab_bytes must be at least 1"),
    ],
)
def test_bad_knobs(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Workspace(**options)


def test_copies_have_knobs_and_memory_of_their_own() -> None:
    case = experts_case(30)
    workspace = Workspace(3, victim="random", slab_bytes=12345)
    want = run(case, workspace=workspace)
    for twin in (copy.deepcopy(workspace), pickle.loads(pickle.dumps(workspace))):
        assert twin.knobs() == workspace.knobs()
        assert twin.last_run is None
        assert bits(run(case, workspace=twin)) == bits(want)
        del twin
    assert bits(run(case, workspace=workspace)) == bits(want)
    assert "victim='random'" in repr(workspace)


def test_workspace_of_another_kind() -> None:
    class Other:
        last_run = None

    with pytest.raises(
        TypeError, match=r"workspace must be None or a weave_moe.Workspace .* Other"
    ):
        run(experts_case(3), workspace=Other())


# What goes wrong.


@pytest.mark.parametrize("policy", FIXED_POLICIES)
def test_a_wait_beyond_its_limit_is_an_error_and_the_next_call_works(policy: str) -> None:
    case = experts_case(40, 200, 100, 8, 2)
    want = bits(run(case))
    workspace = Workspace(1, spin_limit=0, parts_up=3, parts_down=2)
    want_parts = bits(run(case, workspace=Workspace(1, parts_up=3, parts_down=2)))
    # One worker finds everything done that it waits for, but may not look even once.
    with pytest.raises(RuntimeError, match="another task's result longer than spin_limit"):
        run(case, workspace=workspace, policy=policy)
    assert workspace.last_run is None
    for workers in (5, 2, 33):
        workspace.workers, workspace.spin_limit = workers, 0
        with pytest.raises(RuntimeError, match="longer than spin_limit allows"):
            run(case, workspace=workspace, policy=policy)
        workspace.spin_limit = 1 << 20
        assert bits(run(case, workspace=workspace, policy=policy)) == want_parts
        assert last_run(workspace).workers == workers
    workspace.parts_up = workspace.parts_down = 1
    assert bits(run(case, workspace=workspace, policy=policy)) == want


@pytest.fixture
def slow_case() -> Case:
    """A call of some tenths of a second."""
    return experts_case(512, 1024, 512, 8, 4)


def test_two_launches_in_one_workspace(slow_case: Case) -> None:
    workspace, other = Workspace(1), Workspace(2)
    quick = experts_case(5)
    quick_want = run(quick)
    want = run(slow_case, workspace=other)
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(run(slow_case, workspace=workspace)))
    thread.start()
    while not (workspace._in_use.locked() and workspace._engine is not None):
        time.sleep(0.001)
    time.sleep(0.01)
    before = thread.is_alive()
    with pytest.raises(RuntimeError, match="another call is running in this workspace"):
        run(quick, workspace=workspace)
    # The engine itself notices as well, should somebody come past Python's lock.
    call = quick.call()
    out = call.output()
    arguments, options = engine._arguments(call, out, 0, 5), engine._options(workspace, "steal")
    status = engine._library().weave_run(
        workspace._engine.pointer,
        ctypes.byref(arguments),
        ctypes.byref(options),
        None,
    )
    assert thread.is_alive(), "the slow call was not slow enough to be disturbed"
    assert before
    assert status == 16
    # Threads with workspaces of their own get along, and Python runs meanwhile.
    assert bits(run(quick, workspace=other)) == bits(quick_want)
    assert bits(run(quick)) == bits(quick_want)
    thread.join()
    assert bits(results[0]) == bits(want)
    assert bits(run(quick, workspace=workspace)) == bits(quick_want)


def test_threads_with_workspaces_of_their_own() -> None:
    cases = [experts_case(30 + i, 64, 32, 8, 2, seed=i) for i in range(4)]
    wants = [bits(run(case)) for case in cases]
    wrong: list[str] = []

    def work(index: int) -> None:
        workspace = None if index % 2 else Workspace(3)
        for _ in range(20):
            if bits(run(cases[index], workspace=workspace)) != wants[index]:
                wrong.append(f"thread {index}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_large_default_workspace_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    case = experts_case(30)
    run(case)
    assert engine._default_workspace()._engine is not None
    monkeypatch.setattr(engine, "_KEEP_BYTES", 10)
    run(case)
    assert engine._default_workspace()._engine is None


def test_calls_the_engine_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    call = experts_case(3).call()
    assert engine.unavailable(call) is None
    assert backends.choose(call).name == "host"
    monkeypatch.setattr(engine, "MAX_EXPERTS", 3)
    assert engine.unavailable(call) == "it takes at most 3 experts, got 4"


# Compiling.


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """This process as if it had not loaded the engine yet, with a cache of its own."""
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("WEAVE_MOE_CACHE", str(tmp_path / "cache"))
    engine._library.cache_clear()
    yield tmp_path
    engine._library.cache_clear()


def compiler_script(folder: Path, body: str) -> Path:
    """A compiler that says its version and does `body`, with the output's path in $out."""
    script = folder / "fake c++"
    script.write_text(
        "#!/bin/sh\n"
        'for a; do if [ "$a" = --version ]; then echo "fake 1.0"; exit 0; fi; done\n'
        f'echo run >> "{folder}/runs"\n'
        'while [ "$1" != -o ]; do shift; done; out=$2\n' + body
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def test_no_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = experts_case(3).call()
    want = experts_reference(call)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(fresh))
    reason = engine.unavailable(call)
    assert reason is not None
    assert "no C++ compiler found (tried g++" in reason
    with pytest.raises(
        ValueError, match="backend 'host' cannot run this call: no C\\+\\+ compiler"
    ):
        backends.choose(call, "host")
    chosen = backends.choose(call)
    assert chosen.name == "reference"
    assert bits(chosen.experts(call)) == bits(want)
    monkeypatch.setenv("CXX", "/nonexistent/c++ -m64")
    reason = engine.unavailable(call)
    assert reason == "the C++ compiler named in $CXX was not found: '/nonexistent/c++ -m64'"
    monkeypatch.setenv("CXX", "'unbalanced")
    assert "$CXX is no command" in str(engine.unavailable(call))
    assert not (fresh / "cache").exists()


def test_a_compiler_that_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = compiler_script(
        fresh,
        "echo 'In file included from engine.cpp:1:' >&2\n"
        'for i in 1 2 3 4 5 6 7; do echo "engine.cpp:$i:1: error: number $i" >&2; done\nexit 1\n',
    )
    monkeypatch.setenv("CXX", f"'{script}'")
    call = experts_case(3).call()
    for _ in range(3):
        reason = engine.unavailable(call)
        assert reason is not None
        first, *errors = reason.splitlines()
        assert first.endswith("failed to compile the CPU engine:")
        assert errors == [f"engine.cpp:{i}:1: error: number {i}" for i in range(1, 6)]
    assert (fresh / "runs").read_text() == "run\n"  # once, not for every call
    assert not list((fresh / "cache").iterdir())
    with pytest.raises(build.BuildError, match="number 1"):
        engine.run(call)


def test_a_damaged_library_is_compiled_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as usual:
        usual.delenv("WEAVE_MOE_CACHE")
        real = build.build()
    monkeypatch.setenv("CXX", f"'{compiler_script(fresh, f'cp {str(real)!r} $out')}'")
    path = build.build()
    assert build.build() == path
    assert (fresh / "runs").read_text() == "run\n"
    path.write_bytes(b"not a library")
    case = experts_case(3)
    assert_close(run(case), case)
    assert (fresh / "runs").read_text() == "run\nrun\n"
    # One that stays unusable is an error, not an endless loop.
    build._loaded.clear()
    engine._library.cache_clear()
    monkeypatch.setenv("CXX", f"'{compiler_script(fresh, 'echo nonsense > $out')}' -v")
    reason = engine.unavailable(case.call())
    assert reason is not None
    assert "does not load" in reason


def test_a_traced_task_ends_before_others_are_told(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine that sleeps after each such message, as a thread may that loses its core."""
    for folder in ("device", "host"):
        shutil.copytree(Path(build.__file__).parents[1] / folder, fresh / "src" / folder)
    header = fresh / "src/device/scheduler.h"
    text = header.read_text()
    for message in (
        "add_release(&s.up_done[group], 1u);",
        "add_release(&s.down_done[expert], 1u);",
    ):
        assert text.count(message) == 1
        text = text.replace(message, f"{message} usleep(1000);")
    header.write_text(text)
    command = shlex.join([*build.compiler(), *build.FLAGS, str(fresh / "src/host/engine.cpp")])
    monkeypatch.setenv("CXX", f"'{compiler_script(fresh, f'{command} -o $out')}'")
    case = experts_case(40, 130, 70, 4, 2)
    for parts in (1, 2):
        workspace = Workspace(3, trace=True, parts_up=parts, parts_down=parts)
        run(case, workspace=workspace, policy="counter")
        call = case.call()
        up = gate_up_stage(call.shape.hidden, call.shape.intermediate, parts=parts)
        down = down_stage(call.shape.hidden, call.shape.intermediate, parts=parts)
        check_trace(last_run(workspace), call, plan_of(call, 32), (up, down), workspace)


@pytest.mark.parametrize(
    ("policy", "batch", "most"), [("steal", 4, 3), ("steal", 1, 1), ("counter", 4, 1)]
)
def test_the_bench_of_claims_claims_as_launches_do(policy: str, batch: int, most: int) -> None:
    took, tickets = engine.bench_claims(policy, 10_000, repeats=1, batch=batch)
    assert took > 0
    # Windows become smaller towards the end; the last ticket finds nothing.
    assert 10_000 / batch < tickets <= 10_000 / most + 1


def test_the_cache_key_covers_all_that_matters(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = compiler_script(fresh, "echo library > $out")
    monkeypatch.setenv("CXX", f"'{script}'")
    paths = [build.build()]

    def changed(change: Callable[[], None]) -> None:
        change()
        paths.append(build.build())

    changed(lambda: script.write_text(script.read_text().replace("fake 1.0", "fake 1.1")))
    changed(lambda: monkeypatch.setenv("CXX", f"'{script}' -DX"))
    changed(lambda: monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g")))
    changed(lambda: monkeypatch.setattr(build, "_cpu_features", lambda: "Linux x86_64 sse2"))
    header = fresh / "extra.h"
    header.write_text("// empty\n")
    every = build.sources()
    changed(lambda: monkeypatch.setattr(build, "sources", lambda: [*every, header]))
    changed(lambda: header.write_text("// changed\n"))
    assert len(set(paths)) == len(paths) == 7
    names = {path.name for path in every}
    assert {"engine.cpp", "engine.h", "arithmetic.h", "queue.h", "plan.h", "memory.h"} <= names
