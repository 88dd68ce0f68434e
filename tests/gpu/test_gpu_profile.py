"""`weave-moe profile` on the GPU: every task of every policy, and what recording costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_cases import SMALL, expect
from gpu_cases import shape as layer

from weave_moe.backends import cuda
from weave_moe.profile import ABSENT, PolicyRecord, Profile, load_profile
from weave_moe.profile.command import ProfileOptions, profile_command
from weave_moe.profile.gpu import LAUNCHES
from weave_moe.profile.measures import summarise
from weave_moe.profile.records import MOMENTS

pytestmark = pytest.mark.gpu

FEW, MANY = 40, 300
expect(SMALL, (FEW, MANY))
expect(layer(512, 192, 16, 4, "float16"), (FEW,))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """SMALL as transformers describes it."""
    path = tmp_path / "config.json"
    fields = {
        "model_type": "qwen3_moe",
        "hidden_size": SMALL.hidden,
        "moe_intermediate_size": SMALL.intermediate,
        "num_experts": SMALL.experts,
        "num_experts_per_tok": SMALL.top_k,
        "norm_topk_prob": True,
    }
    path.write_text(json.dumps(fields))
    return path


def profiled(config: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> Any:
    """The command's JSON, and the profile that it wrote."""
    out = config.parent / "out"
    asked = ProfileOptions(config=config, routing="zipf", out=out, as_json=True, **options)
    assert profile_command(asked) == 0
    return json.loads(capsys.readouterr().out), load_profile(out / "profile.npz")


@pytest.mark.parametrize(("tokens", "dtype"), [(FEW, None), (FEW, "float16"), (MANY, None)])
def test_the_kernel_is_profiled(
    gpu: torch.device,
    config: Path,
    capsys: pytest.CaptureFixture[str],
    tokens: int,
    dtype: str | None,
) -> None:
    document, profile = profiled(
        config, capsys, tokens=tokens, dtype=dtype, policy="steal,static_strided"
    )
    assert document["producer"] == profile.producer == "gpu"
    assert document["check"]["agrees"]
    assert {"profile.npz", "profile.json"} <= set(document["files"])
    assert [run.policy for run in profile.runs] == ["steal", "static_strided"]
    many = cuda.plan_for(SMALL, tokens).many
    assert many == (tokens == MANY)
    for run, entry in zip(profile.runs, document["policies"], strict=True):
        check_records(profile, run, gpu)
        check_times(run, entry["timing"], many=many)
    trace = json.loads((config.parent / "out" / "profile.json").read_text(encoding="utf-8"))
    tracks = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for run in profile.runs:
        assert {f"SM {r['sm']}, worker {r['worker']}" for r in run.records} <= tracks


def check_records(profile: Profile, run: PolicyRecord, gpu: torch.device) -> None:
    sms = torch.cuda.get_device_properties(gpu).multi_processor_count
    records = run.records
    assert run.workers == sms
    assert run.seats <= sms
    assert run.recorded == dict.fromkeys(MOMENTS, True)
    # A block an SM: no two blocks were on one, and no block on two.
    pairs = set(zip(records["worker"].tolist(), records["sm"].tolist(), strict=True))
    assert len({worker for worker, _ in pairs}) == len(pairs)
    assert ((records["sm"] >= 0) & (records["sm"] < sms)).all()
    if run.policy != "steal":
        assert (records["victim"] == ABSENT).all()
    tiles = records[records["stage"] < 2]
    groups = len(np.unique(tiles["group"]))
    per_group = sum(stage.tasks_per_group for stage in profile.stages)
    assert len(tiles) == groups * per_group
    # Its weights are asked for once a group, and never less than what there is.
    summary = summarise(profile, run)
    assert summary.asked_bytes >= summary.least_bytes > 0
    assert 0 < summary.busy_share < 1
    assert summary.read_bytes is None
    assert (run.first_ns != ABSENT).all()
    assert (run.last_ns >= run.first_ns).all()


def check_times(run: PolicyRecord, timing: dict[str, int], *, many: bool) -> None:
    assert timing["launches"] == LAUNCHES
    assert timing["shortest_ns"] <= run.makespan_ns <= timing["longest_ns"] + 512
    # A launch is part of its call, and records cost something but do not change what is seen.
    assert 0 < timing["launch_ns"] < 1.1 * timing["call_ns"]
    assert 0.8 < timing["recorded_launch_ns"] / timing["launch_ns"] < 2
    assert timing["recorded_call_ns"] > 0.8 * timing["call_ns"]
    if many:
        assert run.planned_ns is None
        assert timing["sort_ns"] > 0
        assert timing["combine_ns"] > 0
        parts = timing["sort_ns"] + timing["launch_ns"] + timing["combine_ns"]
        # Launches overlap a little in a call, and not where the time is taken between calls.
        assert 0.7 < parts / timing["call_ns"] < 1.8
        return
    assert timing["sort_ns"] is timing["combine_ns"] is None
    assert run.planned_ns is not None
    assert (run.planned_ns > run.first_ns).any()
