"""The command line: what it prints and writes, and one clear line for every kind of bad input."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from weave_moe import __version__, backends
from weave_moe.cli import cli
from weave_moe.data import load_trace, model_path, sample_text
from weave_moe.presets import PRESETS
from weave_moe.run import compare, files, sources
from weave_moe.run.errors import InputError

POLICIES = ["steal", "counter", "static_strided", "static_expert", "static_tail", "window"]
SMALL = ("--tokens", "24", "--policy", "steal,counter", "--workers", "3")


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def succeed(*arguments: str | Path) -> Result:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result


def run_json(out: Path, *arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(succeed("run", "--json", "--out", out, *arguments).stdout)
    return found


@pytest.fixture
def host(tmp_path: Path) -> None:
    """Skips where the CPU engine cannot run."""
    found = json.loads(
        succeed(
            "run", "--json", "--out", tmp_path / "probe", "--tokens", "1", "--policy", "steal"
        ).stdout
    )
    if found["backend"] != "host":
        pytest.skip(f"the CPU engine does not run here: {found['notes']}")


# What it does.


@pytest.mark.usefixtures("host")
def test_run_checks_compares_and_draws(tmp_path: Path) -> None:
    result = succeed("run", "--out", tmp_path / "out")
    for name in POLICIES:
        assert name in result.stdout
    for word in ("equal bits", "not evidence of speed", "ui.perfetto.dev", "timeline.png"):
        assert word in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "timeline.json",
        "timeline.png",
    ]


@pytest.mark.usefixtures("host")
def test_json_and_timeline_hold_the_same_tasks(tmp_path: Path) -> None:
    found = run_json(tmp_path, "--workers", "5", "--tokens", "100", "--layer", "1")
    assert found["check"]["agrees"]
    assert found["check"]["equal_bits"]
    assert found["check"]["max_row_error"] <= found["check"]["allowed"]
    assert [entry["policy"] for entry in found["policies"]] == POLICIES
    assert found["load"]["slots"] == 400
    tasks = {entry["tasks"] for entry in found["policies"]}
    assert len(tasks) == 1, "policies change who runs a task, not how many there are"
    events = json.loads((tmp_path / "timeline.json").read_bytes())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split()[0] for name in names] == POLICIES
    for number, entry in enumerate(found["policies"], start=1):
        mine = [e for e in events if e["pid"] == number and e["ph"] == "X" and e["cat"] != "wait"]
        assert len(mine) == entry["tasks"] == sum(w["tasks"] for w in entry["per_worker"])
        assert len(entry["per_worker"]) == entry["workers"] == 5
        # A steal takes one task to run at once; what it puts into the thief's queue is its own.
        assert sum("stolen" in e["cat"] for e in mine) == entry["steals"]
        assert 0 <= entry["busy_share"] <= 1
    image = pytest.importorskip("PIL.Image").open(tmp_path / "timeline.png")
    assert image.width == 1440
    assert image.height > 600
    assert set(found["files"]) == {"timeline.json", "timeline.png"}


@pytest.mark.parametrize("name", ["shipped", *PRESETS])
def test_every_preset_runs_scaled_down(name: str, tmp_path: Path) -> None:
    scale = "1" if name == "shipped" else "1/64"
    routing = ("--routing", "zipf", "--preset", name)
    found = run_json(tmp_path, *SMALL, *routing, "--scale", scale)
    assert found["check"]["agrees"]
    if name != "shipped":
        assert found["shape"]["experts"] == PRESETS[name].experts
        assert any("scaled by 1/64" in note for note in found["notes"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(dtype: str, tmp_path: Path) -> None:
    found = run_json(tmp_path, *SMALL, "--dtype", dtype)
    assert found["shape"]["dtype"] == dtype
    assert 0 < found["check"]["max_row_error"] <= found["check"]["allowed"]


def test_a_config_file_is_a_layer(tmp_path: Path) -> None:
    for path in (model_path(), model_path() / "config.json"):
        found = run_json(tmp_path, *SMALL, "--config", path)
        assert (found["shape"]["hidden"], found["shape"]["experts"]) == (128, 16)


def test_a_large_layer_is_scaled_down_and_this_is_said(tmp_path: Path) -> None:
    result = succeed("run", "--out", tmp_path, "--preset", "olmoe", *SMALL)
    assert "scaled by 1/2" in result.stdout
    refused = call("run", "--out", tmp_path, "--preset", "deepseek-v3", "--scale", "1")
    assert refused.exit_code == 2
    hint = refused.stderr.split("try --scale ")[1].strip()
    assert 0 < float(sources_fraction(hint)) < 1


def sources_fraction(text: str) -> float:
    above, _, below = text.partition("/")
    return float(above) / float(below or 1)


def test_the_reference_has_nothing_to_draw(tmp_path: Path) -> None:
    result = succeed("run", "--backend", "reference", "--out", tmp_path / "out", *SMALL)
    assert "reference" in result.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [(), ("--help",), ("run", "--help"), ("quickstart", "-h")])
def test_help(arguments: Sequence[str]) -> None:
    assert "Usage: weave-moe" in succeed(*arguments).stdout


def test_presets_are_listed() -> None:
    listed = succeed("presets").stdout
    assert all(name in listed for name in ("shipped", *PRESETS))


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "weave_moe"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"weave-moe {__version__}\n"
    bad = subprocess.run([*command, "run", "--nope"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weave_moe.cli"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"weave-moe {__version__}\n"
    bad = subprocess.run([*command, "run", "--nope"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    # Without a compiler the reference runs, and the reason is said.
    lone = {**os.environ, "CXX": "/no/such/compiler", "WEAVE_MOE_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(
        [*command, "run", "--tokens", "8", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=lone,
        check=True,
    )
    assert "/no/such/compiler" in " ".join(result.stdout.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_wrong_result(unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "weave_moe.cli", "presets"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    try:
        result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_stdout_is_one_line() -> None:
    command = [sys.executable, "-m", "weave_moe.cli", "presets"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert re.fullmatch(r"weave-moe: .*No space left on device\n", result.stderr)


# Routing.


def test_text_goes_through_the_model_as_the_trace_did(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from weave_moe.run.model import from_text

    trace = load_trace("small-16e-top4")
    # Windows of 512 tokens, the first of them of the text kjv; also a last one that is shorter.
    routed = from_text("kjv", 2, 700, "float32")
    assert routed.x is not None
    assert routed.x.shape == (700, 128)
    expected = torch.from_numpy(trace.topk_ids[:512, 2])
    same = (routed.topk_ids[:512] == expected).float().mean()
    assert same > 0.99, "only near ties may differ from machine to machine"
    close = (routed.topk_weights[:512] - torch.from_numpy(trace.topk_weights[:512, 2])).abs()
    assert close.median() < 1e-3
    path = tmp_path / "text.txt"
    path.write_bytes(sample_text("kjv").encode()[:600])
    again = from_text(str(path), 2, 600, "float32")
    # Causal: what comes later changes nothing but last bits.
    assert (again.topk_ids[:512] == routed.topk_ids[:512]).float().mean() > 0.99
    assert (again.x - routed.x[:600]).norm() < 1e-3 * again.x.norm()  # type: ignore[operator, union-attr]


@pytest.mark.usefixtures("host")
def test_run_on_text_uses_the_models_own_layer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = run_json(tmp_path, *SMALL, "--routing", "text:python", "--layer", "3")
    assert "layer 3 of 4" in found["routing"]
    assert found["tokens"] == 24
    assert found["check"]["agrees"]


def test_a_trace_file_of_the_users_own(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(-1, 6, size=(30, 2, 3))
    np.savez(tmp_path / "mine.npz", topk_ids=ids, experts=np.array(6))
    found = run_json(
        tmp_path,
        "--routing",
        f"trace:{tmp_path / 'mine.npz'}",
        "--layer",
        "1",
        "--policy",
        "window",
    )
    assert (found["tokens"], found["shape"]["experts"], found["shape"]["top_k"]) == (30, 6, 3)
    assert found["load"]["slots"] == (ids[:, 1] >= 0).sum()
    assert any("names no layer sizes" in note for note in found["notes"])


@given(
    name=st.sampled_from(list(PRESETS)),
    kind=st.sampled_from(["uniform", "zipf", "hot"]),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_synthetic_routing_is_the_routers(name: str, kind: str, tokens: int, seed: int) -> None:
    entry = PRESETS[name]
    routed = sources.synthetic(sources.parse_source(kind), entry, tokens, seed)
    assert routed.topk_ids.shape == routed.topk_weights.shape == (tokens, entry.top_k)
    assert all(len(set(row)) == entry.top_k for row in routed.topk_ids.tolist())
    assert 0 <= int(routed.topk_ids.min()) <= int(routed.topk_ids.max()) < entry.experts
    sums = routed.topk_weights.sum(1)
    if entry.routing.renormalize and entry.routing.scoring != "topk_softmax":
        assert torch.allclose(sums, torch.tensor(entry.routing.scaling_factor), rtol=1e-4)
    again = sources.synthetic(sources.parse_source(kind), entry, tokens, seed)
    assert torch.equal(again.topk_ids, routed.topk_ids)


def shares(text: str, tokens: int = 4000) -> torch.Tensor:
    """Share of tokens that an expert has, most popular first, in qwen3-30b's router."""
    routed = sources.synthetic(sources.parse_source(text), PRESETS["qwen3-30b"], tokens, 1)
    counts = torch.bincount(routed.topk_ids.reshape(-1).long(), minlength=128)
    return counts.sort(descending=True).values / tokens


def test_skews_are_what_they_say() -> None:
    assert float(shares("uniform").max()) < 0.09  # mean: 8 / 128 = 0.0625
    assert float(shares("zipf:0").max()) < 0.09
    assert float(shares("zipf:2")[0]) > 0.9
    assert float(shares("zipf:1.2")[0] / shares("zipf:1.2")[60]) > 8
    assert float(shares("hot:1")[0]) == 1
    assert float(shares("hot:0")[-1]) == 0
    assert abs(float(shares("hot:0.3")[0]) - 0.3) < 0.03
    # First choice with probability proportional to 1 / rank: 1 / H(128) = 0.184 for k = 1.
    one = sources.synthetic(sources.parse_source("zipf:1"), PRESETS["llama-4-scout"], 20_000, 3)
    top = torch.bincount(one.topk_ids.reshape(-1).long()).max() / 20_000
    assert abs(float(top) - 1 / sum(1 / r for r in range(1, 17))) < 0.02


@given(text=st.text(max_size=20) | st.from_regex(r"(zipf|hot|trace|text|uniform):.{0,9}"))
def test_any_routing_string_is_a_source_or_one_error(text: str) -> None:
    try:
        source = sources.parse_source(text)
    except InputError:
        return
    assert source.kind == text.partition(":")[0]
    assert math.isfinite(source.value)


# A wrong result, and errors while writing.


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("damage", ["value", "bit", "nan"])
def test_a_wrong_result_is_found_and_nothing_written(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compare.fused_experts

    def wrong(*tensors: Any, policy: str = "auto", **options: Any) -> torch.Tensor:
        y = right(*tensors, policy=policy, **options)
        if policy == "counter":
            if damage == "bit":
                y.view(torch.int16)[3, 5] ^= 1
            else:
                y[3, 5] = math.nan if damage == "nan" else y[3, 5] + 1
        return y

    monkeypatch.setattr(compare, "fused_experts", wrong)
    result = call("run", "--out", tmp_path / "out", *SMALL)
    assert result.exit_code == 1
    check = json.loads(call("run", "--json", "--out", tmp_path / "out", *SMALL).stdout)["check"]
    assert not check["agrees"]
    assert ("WRONG: counter" if damage != "bit" else "differ in their bits") in result.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("fails_at", ["fdopen", "replace"])
def test_a_full_disk_leaves_the_old_files(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timeline.json").write_text("old")

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, fails_at, full)
    result = call("run", "--out", tmp_path, *SMALL)
    one_line(result, "No space left on device")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["timeline.json"]
    assert (tmp_path / "timeline.json").read_text() == "old"


@pytest.mark.usefixtures("host")
def test_files_are_replaced_and_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text("old")
    succeed("run", "--out", tmp_path, *SMALL)
    assert "traceEvents" in json.loads((tmp_path / "timeline.json").read_bytes())
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "timeline.json").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.usefixtures("host")
def test_without_matplotlib_the_png_alone_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = succeed("run", "--out", tmp_path / "out", *SMALL)
    assert "pip install 'weave-moe[plot]'" in result.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["timeline.json"]


def test_without_transformers_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for arguments in (["run", "--routing", "text:kjv"], ["quickstart"]):
        one_line(call(*arguments, "--out", tmp_path / "out"), "weave-moe[transformers]")


# Bad input.


def one_line(result: Result, says: str = "") -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("weave-moe: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


BAD: dict[str, tuple[list[str], str]] = {
    "unknown command": (["walk"], "walk"),
    "unknown option": (["run", "--fast"], "--fast"),
    "unknown preset": (["run", "--preset", "qwen3-30"], "did you mean qwen3-30b?"),
    "unknown policy": (["run", "--policy", "steal,lifo"], "'lifo'"),
    "empty policy": (["run", "--policy", ""], "--policy"),
    "unknown backend": (["run", "--backend", "tpu"], "tpu"),
    "unknown dtype": (["run", "--dtype", "fp4"], "fp4"),
    "two layers": (["run", "--preset", "olmoe", "--config", "x"], "exclude"),
    "negative tokens": (["run", "--tokens", "-5"], "-5"),
    "no tokens": (["run", "--tokens", "0"], "0"),
    "tokens no number": (["run", "--tokens", "many"], "many"),
    "more tokens than the trace": (["run", "--tokens", "9999"], "9999"),
    "no workers": (["run", "--workers", "0"], "0"),
    "negative layer": (["run", "--layer", "-1"], "-1"),
    "layer beyond": (["run", "--layer", "4"], "from 0 to 3"),
    "layer of nothing": (["run", "--routing", "uniform", "--layer", "0"], "--layer"),
    "negative seed": (["run", "--seed", "-1"], "-1"),
    "zipf of a word": (["run", "--routing", "zipf:steep"], "steep"),
    "zipf below": (["run", "--routing", "zipf:-1"], "-1"),
    "hot above": (["run", "--routing", "hot:1.5"], "1.5"),
    "hot nan": (["run", "--routing", "hot:nan"], "nan"),
    "no source": (["run", "--routing", "dice"], "dice"),
    "no trace": (["run", "--routing", "trace:nowhere"], "small-16e-top4"),
    "no text": (["run", "--routing", "text:nowhere"], "kjv"),
    "text of another model": (["run", "--routing", "text:kjv", "--preset", "olmoe"], "shipped"),
    "text scaled": (["run", "--routing", "text:kjv", "--scale", "1/2"], "--scale"),
    "trace of another model": (
        ["run", "--routing", "trace:small-16e-top4", "--preset", "olmoe"],
        "16 experts, top-4",
    ),
    "scale zero": (["run", "--scale", "0"], "--scale"),
    "scale above": (["run", "--scale", "3/2"], "--scale"),
    "scale no number": (["run", "--scale", "half"], "half"),
    "scale by zero": (["run", "--scale", "1/0"], "1/0"),
    "too large": (["run", "--preset", "mixtral-8x22b", "--scale", "1"], "try --scale"),
    "too many": (["run", "--preset", "olmoe", "--tokens", "131072"], "or fewer"),
    "too much text": (["run", "--routing", "text:kjv", "--tokens", "131072"], "or fewer"),
    "no config": (["run", "--config", "/no/such/config.json"], "/no/such/config.json"),
    "quickstart without text": (["quickstart", "--text", "nowhere"], "kjv"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(case: str, tmp_path: Path) -> None:
    arguments, says = BAD[case]
    out = ["--out", str(tmp_path / "out")] if arguments[0] in ("run", "quickstart") else []
    one_line(call(*arguments, *out), says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(tmp_path: Path) -> None:
    one_line(call("run", "--backend", "cuda", "--out", tmp_path / "out"), "cuda")


def text_file(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


IDS = np.zeros((4, 1, 2), dtype=np.int64)
LARGE = npz(
    topk_ids=IDS,
    experts=np.array(50_000),
    meta=json.dumps({"model": {"hidden": 65536, "intermediate": 65536}}),
)
BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "config no JSON": ("config", b"{", "JSON"),
    "config binary": ("config", b"\xff\xfe\x00", "JSON"),
    "config a list": ("config", b"[1, 2]", "object"),
    "config deep": ("config", b"[" * 100_000, "JSON"),
    "config dense": (
        "config",
        b'{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008}',
        "not a Mixture-of-Experts",
    ),
    "config zero": (
        "config",
        b'{"model_type": "mixtral", "hidden_size": 0, "intermediate_size": 8, '
        b'"num_local_experts": 8, "num_experts_per_tok": 2}',
        "hidden_size",
    ),
    "trace no npz": ("trace", b"not a zip file", "npz"),
    "trace empty": ("trace", b"", "npz"),
    "trace cut": ("trace", npz(topk_ids=IDS)[:-40], "npz"),
    "trace without ids": ("trace", npz(weights=IDS), "topk_ids"),
    "trace of floats": ("trace", npz(topk_ids=IDS / 2), "integers"),
    "trace of one number": ("trace", npz(topk_ids=np.array(3)), "shape"),
    "trace beyond its experts": ("trace", npz(topk_ids=IDS + 9, experts=np.array(4)), "9"),
    "trace with odd weights": ("trace", npz(topk_ids=IDS, topk_weights=IDS[:2]), "topk_weights"),
    "trace of a billion experts": (
        "trace",
        npz(topk_ids=IDS, experts=np.array(10**9)),
        "file.npz is of 1,000,000,000 experts",
    ),
    "trace of ids that are no experts": (
        "trace",
        npz(topk_ids=IDS + 10**9),
        "is of 1,000,000,001 experts, as its file says or its largest id has it: the GPU kernel "
        "takes at most 1,024, the CPU engine 65,534",
    ),
    "trace of many large experts": ("trace", LARGE, "trace of 50,000 experts with 4 tokens has"),
    "trace of more than fit": ("trace", LARGE, "at --scale 1/64 still; try a layer of fewer"),
    "trace of another kind": ("trace", pickle.dumps({"a": 1}), "damaged, or no npz file"),
    "text binary": ("text", b"\xff\xfe\xfd", "UTF-8"),
    "text empty": ("text", b"", "empty"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case: str, tmp_path: Path) -> None:
    kind, content, says = BAD_FILES[case]
    path = tmp_path / "file.npz"
    path.write_bytes(content)
    option = ["--config", path] if kind == "config" else ["--routing", f"{kind}:{path}"]
    result = call("run", *option, "--out", tmp_path / "out")
    one_line(result, says)
    # Nothing is said of an option that was not given, nor advice to load what may be harmful.
    assert "--scale 1:" not in result.stderr
    assert "pickle" not in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.npz"]


@pytest.mark.parametrize("where", ["file", "file/below", "link"])
@pytest.mark.parametrize("command", ["run", "quickstart"])
def test_an_output_folder_that_cannot_be(command: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    one_line(call(command, "--out", tmp_path / where), "--out")
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    one_line(call("run", "--out", tmp_path / "out"), "permission")


# Quickstart.


@pytest.mark.usefixtures("host")
def test_quickstart(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = succeed("quickstart", "--out", tmp_path)
    assert "agree in float32" in result.stdout
    assert "(equal)" in result.stdout
    assert "512 of 512" in result.stdout
    assert (tmp_path / "timeline.json").is_file()


def test_quickstart_on_a_text_of_three_bytes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "short.txt").write_text("Ab\n")
    result = succeed("quickstart", "--text", tmp_path / "short.txt", "--out", tmp_path)
    assert "3 of 3" in result.stdout
    one_line(call("quickstart", "--text", tmp_path / "short.txt", "--out", tmp_path / "short.txt"))


def test_quickstart_sees_a_wrong_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    right = backends.choose

    def wrong(call: Any, name: str = "auto") -> Any:
        class Twice:
            name = "host"

            def experts(self, call: Any) -> torch.Tensor:
                return right(call, "reference").experts(call) * 1.01

        return Twice()

    monkeypatch.setattr(backends, "choose", wrong)
    result = call("quickstart", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "WRONG: they differ in float32" in " ".join(result.stdout.split())
