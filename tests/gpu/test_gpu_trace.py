"""Records of a launch's tasks: complete, in order, and without effect on the result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_cases import SMALL, check, make, same_bits, skewed
from gpu_cases import shape as layer

import weave_moe

pytestmark = pytest.mark.gpu

POLICIES = ("steal", "counter", "static_strided")


@pytest.mark.parametrize("tokens", [1, 40, 200, 300, 1100])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_task_leaves_one_record(gpu: torch.device, tokens: int, policy: str) -> None:
    from weave_moe.backends import cuda

    case = make(SMALL, tokens, routing=skewed)
    want = check(case)
    workspace = weave_moe.Workspace(trace=True)
    got = case.run(workspace=workspace, policy=policy)
    assert same_bits(got, want)
    records = cuda.take_trace(workspace)
    plan = cuda.plan_for(SMALL, tokens)
    up, down = (records[records["stage"] == stage] for stage in (0, 1))
    groups = up["group"].max() + 1
    chunks_up = -(-SMALL.intermediate // plan.chunk_up())
    chunks_down = -(-SMALL.hidden // plan.chunk_down)
    for found, chunks in ((up, chunks_up), (down, chunks_down)):
        tasks = {(int(r["group"]), int(r["chunk"])) for r in found}
        assert len(tasks) == len(found) == groups * chunks
    combine = records[records["stage"] == 2]
    slices = -(-SMALL.hidden // plan.slice)
    assert len(combine) == (0 if plan.many else -(-tokens // plan.combine_tokens) * slices)
    sms = torch.cuda.get_device_properties(gpu).multi_processor_count
    assert ((records["sm"] >= 0) & (records["sm"] < sms)).all()
    assert ((records["victim"] >= -1) & (records["victim"] < sms)).all()
    if policy != "steal":
        assert (records["victim"] == -1).all()


@pytest.mark.parametrize("tokens", [40, 1100])
def test_the_moments_of_a_task_follow_each_other(gpu: torch.device, tokens: int) -> None:
    from weave_moe.backends import cuda

    workspace = weave_moe.Workspace(trace=True)
    case = make(layer(2048, 768, 16, 4), tokens, routing=skewed)
    case.run(workspace=workspace)
    records = cuda.take_trace(workspace)
    tiles = records[records["stage"] < 2]
    claim, load, compute, store, end = (
        tiles[f"{name}_ns"] for name in ("claim", "load", "compute", "store", "end")
    )
    assert (claim >= 0).all()
    assert (claim <= load).all()
    assert (load <= compute).all()
    assert (compute <= store).all()
    assert (store <= end).all()
    # Down tiles read what gate_up tiles of their group wrote: within a few ticks of the timer.
    for group in np.unique(tiles["group"]):
        mine = tiles["group"] == group
        up_end = end[mine & (tiles["stage"] == 0)].max()
        assert compute[mine & (tiles["stage"] == 1)].min() >= up_end - 1024


def test_without_a_record_it_is_an_error(gpu: torch.device) -> None:
    from weave_moe.backends import cuda

    with pytest.raises(ValueError, match=r"^workspace must be one with trace=True"):
        cuda.take_trace(weave_moe.Workspace())
