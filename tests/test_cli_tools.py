"""`weave-moe info`, `cache` and `check`: what they say of this machine and of others.

GPUs that are not here are faked where facts about them are read. No result of a computation is:
where a test needs a wrong one, a right one is damaged.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import types
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from generators import experts_case
from weave_moe import __version__, backends
from weave_moe.backends import cuda
from weave_moe.cli import BACKENDS, CACHE_ACTIONS, PARTS, cli
from weave_moe.host import build, engine
from weave_moe.host.workspace import Workspace
from weave_moe.presets import PRESETS, preset
from weave_moe.run.compare import RUN_POLICIES
from weave_moe.runtime import cache, nvrtc
from weave_moe.runtime.kernel import KernelConfig
from weave_moe.schedule.granularity import SHARED_BYTES, choose_kernel
from weave_moe.shapes import DTYPES, Activation, LayerShape, check_experts
from weave_moe.tools import cached, choice, machine, printing, selftest

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = not torch.cuda.is_available()


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def document(*arguments: str, status: int = 0) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def one_line(result: Result, says: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("weave-moe: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


@pytest.fixture
def host() -> None:
    """Skips where there is no compiler; an engine that does not build is a failure."""
    reason = backends.why_not("host", experts_case(tokens=1).call())
    if reason is None:
        return
    try:
        build.compiler()
    except build.BuildError:
        pytest.skip(reason)
    pytest.fail(reason, pytrace=False)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of the test's own; it does not exist yet."""
    monkeypatch.setenv("WEAVE_MOE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fresh_engine(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """As in a process that has not loaded the CPU engine, with an empty cache."""
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(engine, "_library", engine._library.__wrapped__)


# GPUs that are not here.

H200 = ("NVIDIA H200", (9, 0), 132, 232_448)
H20 = ("NVIDIA H20", (9, 0), 78, 232_448)
A100 = ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912)
B200 = ("NVIDIA B200", (10, 0), 148, 232_448)

FakeGpu = tuple[str, tuple[int, int], int, int]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch say that these GPUs are here. Nothing can run on them."""

    def now(*gpus: FakeGpu) -> None:
        def properties(index: int) -> types.SimpleNamespace:
            name, (major, minor), count, shared = gpus[index]
            return types.SimpleNamespace(
                name=name,
                major=major,
                minor=minor,
                multi_processor_count=count,
                shared_memory_per_block_optin=shared,
                total_memory=80 << 30,
            )

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(cuda, "_device", cuda._device.__wrapped__)

    return now


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise nvrtc.CompileError("NVRTC was not found: install it (tried a: b; c: d)")

    monkeypatch.setattr(nvrtc, "version", missing)


# info


@pytest.mark.usefixtures("host")
def test_info_knows_this_machine(home: Path) -> None:
    found = document("info")
    assert found["package"]["version"] == __version__
    assert (Path(found["package"]["path"]) / "cli.py").is_file()
    assert found["python"] == {
        "version": platform.python_version(),
        "path": sys.executable,
        "missing": None,
    }
    assert found["torch"]["version"] == torch.__version__
    assert found["cuda"] == torch.version.cuda
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["cache"]["directory"] == str(home)
    assert found["cache"]["writable"]
    assert found["nvrtc"]["version"] == nvrtc.version()
    assert Path(found["nvrtc"]["path"]).name.startswith("libnvrtc")
    assert os.access(found["compiler"]["path"].split()[0], os.X_OK)
    assert len(found["gpus"]) == (0 if NO_GPU else torch.cuda.device_count())
    assert (found["no_gpu"] is not None) == NO_GPU
    assert found["call"]["backends"][-1]["device"] == "cpu"
    assert found["call"]["backends"][-1]["backend"] == "host"
    assert not home.exists() or list(home.iterdir()), "only a compile may create it"


def test_info_says_the_same_in_words(home: Path) -> None:
    text = call("info").stdout
    found = document("info")
    for part in ("package", "python", "system", "torch", "gpu", "driver", "nvrtc", "compiler"):
        assert re.search(rf"^{part} +\S", text, re.MULTILINE), part
    for said in (__version__, torch.__version__, found["nvrtc"]["version"], str(home)):
        assert said in text
    assert found["compiler"]["version"] in text
    if NO_GPU:
        assert f"none: {found['no_gpu']}" in text


@pytest.mark.parametrize("tokens", [1, 64, 700, 20_000])
@pytest.mark.parametrize("name", ["qwen3-30b", "mixtral-8x7b", "shipped"])
def test_the_kernel_is_printed_as_it_prints_itself(name: str, tokens: int) -> None:
    text = call("info", "--preset", name, "--tokens", str(tokens), "--sms", "132").stdout
    entry = preset(name)
    most = min(tokens, cuda.slab_tokens(entry.shape("bfloat16")))
    plan = choose_kernel(tokens=most, top_k=entry.top_k, experts=entry.experts, hidden=entry.hidden)
    assert plan.reasons
    assert "\n".join(f"{'':10}{line}" for line in str(plan).splitlines()) in text
    launches = -(-tokens // most)
    assert (f"{launches} launches of at most {most:,} tokens" in text) == (launches > 1)


def test_sms_are_shared_by_the_same_tasks() -> None:
    one, two = (document("info", "--sms", count)["call"]["kernel"] for count in ("78", "132"))
    assert (one["multiprocessors"], two["multiprocessors"]) == (78, 132)
    assert one["tasks"] == two["tasks"]
    assert one["plan"] == two["plan"]
    text = call("info", "--sms", "78").stdout
    total = sum(one["tasks"][stage] for stage in ("gate_up", "down", "combine"))
    assert f"{total / 78:.1f} an SM" in text


@given(
    name=st.sampled_from(list(PRESETS)),
    tokens=st.integers(1, 3000),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
@settings(max_examples=25)
def test_even_tasks_are_those_of_an_even_routing(name: str, tokens: int, dtype: str) -> None:
    from weave_moe.schedule import build_plan

    shape = preset(name).shape(dtype)
    plan = choose_kernel(
        tokens=tokens, top_k=shape.top_k, experts=shape.experts, hidden=shape.hidden
    )
    ids = [slot % shape.experts for slot in range(tokens * shape.top_k)]
    groups = len(build_plan(ids, shape.experts, plan.width_cap)[0].groups)
    found = choice._even_tasks(shape, plan, tokens)
    assert found["groups"] == groups
    assert found["gate_up"] * plan.chunk_up(gated=shape.gated) >= groups * shape.intermediate
    assert found["down"] * plan.chunk_down >= groups * shape.hidden
    # With many tokens combine is a launch of its own.
    combined = found["combine"] * plan.combine_tokens * plan.slice
    assert combined == 0 if plan.many else combined >= tokens * shape.hidden


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("name", PRESETS)
def test_the_backend_is_the_one_a_call_takes(name: str, dtype: str | None) -> None:
    from weave_moe.run.compare import build_experts
    from weave_moe.run.sources import parse_source, synthetic

    entry = preset(name)
    small = entry.scaled(Fraction(1, 64))
    kind = dtype or entry.dtype
    experts = build_experts(small, synthetic(parse_source("uniform"), small, 2, 0), kind, 0)
    real = check_experts(*experts.inputs(), **experts.options())
    asked = choice.choose_backend(entry, kind, "cpu")
    assert asked.backend == backends.choose(real).name
    assert "on the CPU" in asked.why
    # And whether the kernel would take it: with the layer's own sizes, of which none is odd here.
    kernel = choice.choose_plan(entry, kind, 5, None, 132)
    assert kernel.refused == cuda.unsupported(real)
    assert (kernel.plan is None) == (kernel.refused is not None)


def test_sizes_that_the_kernel_does_not_take_are_the_layers_own(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral",
        "hidden_size": 60,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = document("info", "--config", str(path), "--sms", "132")["call"]
    assert found["kernel"]["refused"].startswith("hidden is 60")
    assert found["kernel"]["plan"] is None
    assert found["shape"]["hidden"] == 60
    assert "hidden is 60" in call("info", "--config", str(path), "--sms", "132").stdout


@pytest.mark.usefixtures("fresh_engine")
def test_without_a_compiler_the_reference_is_named_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    found = document("info")
    assert "/no/such/compiler" in found["compiler"]["missing"]
    on_cpu = found["call"]["backends"][-1]
    assert on_cpu["backend"] == "reference"
    assert "/no/such/compiler" in on_cpu["why"]
    assert "/no/such/compiler" in on_cpu["refused"]["host"]
    assert not caplog.records, "the answer is no warning"
    assert "none: the C++ compiler named in $CXX was not found" in call("info").stdout


@pytest.mark.usefixtures("host")
class TestFakeGpus:
    """Facts of GPUs, and what they decide; no launch."""

    def test_a_hopper(self, install: Callable[..., None]) -> None:
        install(H200)
        found = document("info", "--tokens", "16")
        (gpu,) = found["gpus"]
        assert gpu["name"] == "NVIDIA H200"
        assert gpu["capability"] == [9, 0]
        assert gpu["multiprocessors"] == 132
        assert gpu["shared_bytes"] == 232_448
        assert gpu["kernel"]
        assert found["no_gpu"] is None
        on_gpu, on_cpu = found["call"]["backends"]
        assert (on_gpu["device"], on_gpu["backend"]) == ("cuda:0", "cuda")
        assert (on_cpu["device"], on_cpu["backend"]) == ("cpu", "host")
        assert "H200" in found["call"]["kernel"]["gpu"]
        text = call("info").stdout
        assert "compute capability 9.0, 132 SMs, 232,448 bytes" in text
        assert re.search(r"tensors on cuda:0: cuda, because .* takes this call", text)

    def test_the_kernel_is_planned_for_the_gpu_that_is_here(
        self, install: Callable[..., None]
    ) -> None:
        install(A100, ("Hopper of less", (9, 0), 50, 166_912))
        kernel = document("info")["call"]["kernel"]
        assert (kernel["multiprocessors"], kernel["shared_bytes"]) == (50, 166_912)
        expected = cuda.plan_for(LayerShape(2048, 768, 128, 8, "bfloat16"), 64, device=1)
        assert kernel["plan"]["ring_bytes"] == expected.ring_bytes
        assert (
            expected.ring_bytes
            < choose_kernel(tokens=64, top_k=8, experts=128, hidden=2048).ring_bytes
        )
        named = document("info", "--sms", "132")["call"]["kernel"]
        assert (named["multiprocessors"], named["shared_bytes"]) == (132, SHARED_BYTES)

    @pytest.mark.parametrize("gpu", [A100, B200], ids=lambda gpu: gpu[0])
    def test_another_gpu(self, gpu: FakeGpu, install: Callable[..., None]) -> None:
        install(gpu)
        found = document("info")
        assert not found["gpus"][0]["kernel"]
        on_gpu = found["call"]["backends"][0]
        assert on_gpu["backend"] == "reference"
        assert gpu[0] in on_gpu["why"]
        assert "9.0" in on_gpu["why"]

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (("--dtype", "float32"), "float32"),
        ],
    )
    def test_a_call_that_the_kernel_does_not_take(
        self, arguments: tuple[str, ...], reason: str, install: Callable[..., None]
    ) -> None:
        install(H200)
        found = document("info", *arguments)["call"]
        assert found["backends"][0]["backend"] == "reference"
        assert reason in found["backends"][0]["why"]
        assert reason in found["kernel"]["refused"]
        assert reason in call("info", *arguments).stdout

    def test_equal_gpus_have_one_answer(self, install: Callable[..., None]) -> None:
        install(H200, H200, A100, H200)
        found = document("info")
        assert len(found["gpus"]) == 4
        answers = [(c["device"], c["backend"]) for c in found["call"]["backends"]]
        assert answers == [("cuda:0", "cuda"), ("cuda:2", "reference"), ("cpu", "host")]

    @pytest.mark.usefixtures("no_nvrtc")
    def test_a_kernel_that_cannot_be_compiled(self, install: Callable[..., None]) -> None:
        install(H20)
        assert document("info")["nvrtc"] == {
            "version": None,
            "path": None,
            "missing": "NVRTC was not found: install it",
        }
        assert "but the kernel cannot be compiled: NVRTC was not found" in call("info").stdout

    def test_gpus_that_are_hidden(
        self, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        assert document("info")["no_gpu"] == "CUDA_VISIBLE_DEVICES is '-1'"

    def test_torchs_own_reason(
        self, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install()
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

        def init() -> None:
            raise RuntimeError("The NVIDIA driver on your system is too old\nmore words")

        monkeypatch.setattr(torch.cuda, "init", init)
        assert document("info")["no_gpu"] == "The NVIDIA driver on your system is too old"


def test_a_torch_without_cuda_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert document("info")["no_gpu"] == f"this torch ({torch.__version__}) was built without CUDA"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert document("info")["no_gpu"] == f"this torch ({torch.__version__}) was built for ROCm 6.4"


def test_a_torch_that_does_not_import_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcudart.so.13: cannot open shared object file\nmore words")

    monkeypatch.setattr(machine, "import_module", broken)
    found = document("info")
    assert found["torch"]["missing"] == (
        "it does not import: libcudart.so.13: cannot open shared object file"
    )
    assert found["call"] is None
    assert found["nvrtc"]["version"] == nvrtc.version()
    assert "libcudart.so.13" in call("info").stdout


class TestDriver:
    """The driver's versions, from libraries that are not here."""

    @staticmethod
    def libraries(monkeypatch: pytest.MonkeyPatch, **present: Any) -> None:
        def load(name: str) -> Any:
            word = name.partition(".")[0].replace("-", "_")
            if word not in present:
                raise OSError(f"{name}: cannot open shared object file")
            return types.SimpleNamespace(**present[word])

        monkeypatch.setattr(machine.ctypes, "CDLL", load)

    @staticmethod
    def cuda_version(number: int, status: int = 0) -> dict[str, Any]:
        def get(pointer: Any) -> int:
            pointer._obj.value = number
            return status

        return {"cuDriverGetVersion": get}

    @staticmethod
    def nvml(release: bytes, status: int = 0) -> dict[str, Any]:
        def get(text: Any, length: int) -> int:
            assert length >= len(release) + 1
            ctypes.memmove(text, release + b"\0", len(release) + 1)
            return status

        return {
            "nvmlInit_v2": lambda: 0,
            "nvmlSystemGetDriverVersion": get,
            "nvmlShutdown": lambda: 0,
        }

    def test_both_libraries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.libraries(
            monkeypatch, libcuda=self.cuda_version(13000), libnvidia_ml=self.nvml(b"580.159.04")
        )
        assert str(machine._driver()) == "580.159.04 (runs CUDA up to 13.0)"

    @pytest.mark.parametrize(
        ("text", "release"),
        [
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release "
                "Build  (root@host)\nGCC version:  gcc version 12.3.0\n",
                "580.95.05",
            ),
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue Jun  6\n",
                "535.54",
            ),
            ("nothing of the kind\n", "of unknown version"),
        ],
    )
    def test_without_nvml_the_kernel_module_tells(
        self, text: str, release: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.libraries(monkeypatch, libcuda=self.cuda_version(12080))
        right = Path.read_text

        def read(self: Path, *arguments: Any, **options: Any) -> str:
            if str(self) == "/proc/driver/nvidia/version":
                return text
            return right(self, *arguments, **options)

        monkeypatch.setattr(Path, "read_text", read)
        assert str(machine._driver()) == f"{release} (runs CUDA up to 12.8)"

    def test_a_driver_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.libraries(monkeypatch, libcuda=self.cuda_version(0, status=100))
        assert "cuDriverGetVersion gave error 100" in str(machine._driver())

    def test_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.libraries(monkeypatch)
        assert "no NVIDIA driver is installed" in str(machine._driver())


def test_a_cache_that_cannot_be_written_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir()
    access = os.access
    monkeypatch.setattr(
        machine.os, "access", lambda path, mode: Path(path) != home and access(path, mode)
    )
    assert not document("info", "--sms", "1")["cache"]["writable"]
    assert "cannot be written" in call("info").stdout


FLOATS = [
    (name, option.opts[0])
    for name, command in cli.commands.items()
    for option in command.params
    if isinstance(option.type, click.types.FloatParamType)
]


def test_there_are_float_options() -> None:
    assert {("bench", "--max-spread"), ("calibrate", "--seconds"), ("advise", "--memory")} <= {
        *FLOATS
    }


@pytest.mark.parametrize(("command", "option"), FLOATS, ids=" ".join)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "many"])
def test_a_float_option_takes_finite_numbers_only(command: str, option: str, value: str) -> None:
    one_line(call(command, option, value), option)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["info", "--preset", "qwen3-30"], "did you mean qwen3-30b?"),
        (["info", "--preset", "olmoe", "--config", "x"], "exclude"),
        (["info", "--config", "/no/such/config.json"], "/no/such/config.json"),
        (["info", "--tokens", "0"], "0"),
        (["info", "--tokens", "many"], "many"),
        (["info", "--dtype", "fp4"], "fp4"),
        (["info", "--sms", "0"], "0"),
        (["cache", "burn"], "burn"),
        (["cache", "list", "more"], "more"),
        (["check", "--backend", "reference"], "reference"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(arguments: list[str], says: str) -> None:
    one_line(call(*arguments), says)


# cache


def fill(count: int = 2) -> list[Path]:
    return [
        cache.cached_file(kind, [str(i)], suffix, lambda: b"x" * 1500)
        for kind, suffix in cache.KINDS.items()
        for i in range(count)
    ]


def test_cache_lists_what_is_there(home: Path) -> None:
    assert document("cache") == {"directory": str(home), "count": 0, "bytes": 0, "entries": []}
    assert call("cache", "clear").exit_code == 0
    assert not home.exists(), "looking creates nothing"
    paths = fill()
    (home / "notes.txt").write_text("of somebody else")
    found = document("cache", "list")
    assert found["count"] == len(found["entries"]) == 4
    assert found["bytes"] == 6000
    assert {entry["name"] for entry in found["entries"]} == {path.name for path in paths}
    text = call("cache").stdout
    assert all(path.name in text for path in paths)
    assert "notes.txt" not in text
    assert "GPU kernel" in text
    assert "CPU engine" in text
    size = document("cache", "size")
    assert size == {"directory": str(home), "count": 4, "bytes": 6000}
    assert call("cache", "size").stdout == f"total     4 entries, 6 kB in {home}\n"
    assert document("info")["cache"]["entries"] >= 4


def test_cache_clears_its_own_entries(home: Path) -> None:
    paths = fill()
    other = home / "notes.txt"
    other.write_text("of somebody else")
    result = call("cache", "clear")
    assert result.exit_code == 0
    assert result.stdout == f"removed   4 entries, 6 kB from {home}\n"
    assert list(home.iterdir()) == [other]
    fill(1)
    removed = document("cache", "clear")["removed"]
    assert {entry["kind"] for entry in removed} == set(cache.KINDS)
    assert not any(path.exists() for path in paths)


def test_what_cannot_be_removed_is_status_1(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path, _) = fill(1)
    right = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            raise PermissionError(13, "Permission denied")
        right(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    found = document("cache", "clear", status=1)
    assert [(entry["name"], entry["why"]) for entry in found["kept"]] == [
        (path.name, "Permission denied")
    ]
    assert len(found["removed"]) == 1
    result = call("cache", "clear")
    assert result.exit_code == 1
    assert f"kept      {path.name}: Permission denied" in result.stdout


def test_a_cache_that_is_no_directory(home: Path) -> None:
    home.write_text("a file")
    for action in CACHE_ACTIONS:
        one_line(call("cache", action), "Not a directory")


@pytest.mark.usefixtures("host")
def test_an_engine_that_is_cleared_away_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WEAVE_MOE_CACHE")
        built = build.build()
    home.mkdir()
    path = Path(shutil.copy(built, home))
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(engine, "_library", engine._library.__wrapped__)
    case = experts_case(tokens=9)
    workspace = Workspace(workers=2)
    before = engine.run(case.with_(workspace=workspace).call())
    loaded = build.load()
    assert loaded._name == str(path)
    assert call("cache", "clear").stdout.startswith("removed   1 entry")
    assert not path.exists()
    assert build.load() is loaded
    assert torch.equal(engine.run(case.with_(workspace=workspace).call()), before)


# check


@pytest.mark.usefixtures("host")
def test_check_finds_nothing_wrong_here(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[int, ...], str, int]] = []
    right = selftest.fused_experts

    def counted(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        if options["backend"] == "host":
            workers = options["workspace"].workers
            calls.append((tuple(tensors[0].shape), options["policy"], workers))
            assert options["out"].isnan().all()
        y = right(*tensors, **options)
        if options["backend"] == "host":
            assert options["workspace"].last_run is not None
            assert options["workspace"].last_run.policy == options["policy"]
        return y

    monkeypatch.setattr(selftest, "fused_experts", counted)
    found = document("check", "--backend", "host")
    assert found["result"] == "ok"
    assert found["seconds"] < 30
    assert len(found["outcomes"]) == len(selftest.HOST_LAYERS) > 5
    for outcome in found["outcomes"]:
        assert (outcome["backend"], outcome["result"]) == ("host", "ok")
        assert outcome["equal_bits"]
        assert 0 <= outcome["error"] <= outcome["allowed"]
    assert any(outcome["error"] > 0 for outcome in found["outcomes"])
    assert len(calls) == len(selftest.HOST_LAYERS) * len(RUN_POLICIES) * 2
    assert {policy for _, policy, _ in calls} == set(RUN_POLICIES)
    assert len({workers for _, _, workers in calls}) == 2


@pytest.mark.usefixtures("host")
@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_without_a_gpu_a_part_is_not_run() -> None:
    result = call("check")
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert len(lines) == len(selftest.HOST_LAYERS) + 2, "a line each, the GPU's, and the result"
    assert all(re.match(r"host      ok  ", line) for line in lines[:-2])
    assert re.match(r"cuda      NOT RUN  GPU kernel: no GPU: ", lines[-2])
    assert "what ran is right, but not all could be run" in lines[-1]
    assert document("check", "--backend", "cuda", status=3)["result"] == "not run"


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_where_nothing_ran_nothing_is_called_right() -> None:
    result = call("check", "--backend", "cuda")
    assert result.exit_code == 3
    last = result.stdout.splitlines()[-1]
    assert "nothing could be run" in last
    assert "0 of 1 ok" in last
    assert "is right" not in result.stdout


@pytest.mark.gpu
def test_the_kernel_on_this_gpu() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is built for compute capability 9.0")
    found = document("check", "--backend", "cuda")
    assert {outcome["what"].split()[0] for outcome in found["outcomes"]} >= {"cuda:0"}


DAMAGE = {
    "value": "the result of window is wrong",
    "nan": "the result of window is wrong; error nan",
    "one bit": "window gave other bits",
    "a row not written": "the result of window is wrong; error nan",
    "zero rows not zero": "the result of window is wrong; error inf",
}


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("repetition", [0, 1])
@pytest.mark.parametrize("damage", DAMAGE)
def test_check_finds_wrong_results(
    damage: str, repetition: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = selftest.fused_experts
    seen = 0

    def damaged(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        nonlocal seen
        y = right(*tensors, **options)
        if options["backend"] == "host" and options["policy"] == "window":
            seen += 1
            if seen % 2 == 1 - repetition:
                if damage == "value":
                    y[-1] *= 1.1
                    y[0, 0] += 1
                elif damage == "nan":
                    y[0, 3] = math.nan
                elif damage == "one bit":
                    y.view(torch.uint8)[0, 0] ^= 1
                elif damage == "a row not written":
                    y[0] = math.nan
                else:
                    y[(y == 0).all(dim=1)] = 1e-3
        return y

    monkeypatch.setattr(selftest, "fused_experts", damaged)
    if damage == "zero rows not zero":
        layers = tuple(layer for layer in selftest.HOST_LAYERS if layer.trimmed)
    else:
        layers = selftest.HOST_LAYERS[:2]
    monkeypatch.setattr(selftest, "HOST_LAYERS", layers)
    result = call("check", "--backend", "host")
    assert result.exit_code == 1
    assert "SOMETHING IS WRONG" in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("host")]
    assert all(re.match(r"host      WRONG  ", line) for line in lines)
    assert all(DAMAGE[damage] in line for line in lines)
    assert all("window" in line and "counter" not in line for line in lines)
    found = document("check", status=1)
    assert found["result"] == "wrong", "whatever could not be run"
    assert {o["equal_bits"] for o in found["outcomes"] if o["backend"] == "host"} == {False}


@pytest.mark.usefixtures("host")
def test_a_backend_that_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = selftest.fused_experts

    def raising(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        if options["policy" if "policy" in options else "backend"] == "static_tail":
            raise RuntimeError("the CPU engine gave up:\nof patience")
        return right(*tensors, **options)

    monkeypatch.setattr(selftest, "fused_experts", raising)
    monkeypatch.setattr(selftest, "HOST_LAYERS", selftest.HOST_LAYERS[:1])
    found = document("check", "--backend", "host", status=1)
    (outcome,) = found["outcomes"]
    assert outcome["detail"] == "RuntimeError: the CPU engine gave up: of patience"


@pytest.mark.usefixtures("fresh_engine")
def test_without_a_compiler_the_engine_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    result = call("check", "--backend", "host")
    assert result.exit_code == 3
    assert result.stdout.startswith("host      NOT RUN  CPU engine: the C++ compiler named in $CXX")
    # Nothing ran, so nothing is called right.
    assert "nothing could be run" in result.stdout
    assert "is right" not in result.stdout


@pytest.mark.usefixtures("fresh_engine")
def test_a_compiler_that_fails_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "c++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo broken 1.0; exit 0; }\n'
        "echo 'engine.cpp:1:1: error: no luck today' >&2\nexit 1\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    result = call("check", "--backend", "host")
    assert result.exit_code == 1
    assert re.match(r"host      WRONG    CPU engine: .*no luck today", result.stdout)
    assert document("info")["compiler"]["version"] == "broken 1.0"


@pytest.mark.usefixtures("no_nvrtc")
def test_a_kernel_without_nvrtc_is_not_run(install: Callable[..., None]) -> None:
    install(H200)
    (outcome,) = document("check", "--backend", "cuda", status=3)["outcomes"]
    assert outcome["detail"] == "NVRTC was not found: install it"


def test_other_gpus_are_not_run(install: Callable[..., None]) -> None:
    install(A100, B200)
    (outcome,) = document("check", "--backend", "cuda", status=3)["outcomes"]
    assert outcome["result"] == "not run"
    for said in ("9.0", A100[0], "8.0", B200[0], "10.0"):
        assert said in outcome["detail"]


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_a_hopper_on_which_nothing_runs_is_wrong(install: Callable[..., None]) -> None:
    install(H200, A100, H20)
    found = document("check", "--backend", "cuda", status=1)
    assert len(found["outcomes"]) == 2 * len(selftest.LAYERS)
    assert {outcome["device"] for outcome in found["outcomes"]} == {"cuda:0", "cuda:2"}
    assert {outcome["result"] for outcome in found["outcomes"]} == {"wrong"}


@pytest.mark.usefixtures("host")
def test_out_of_time_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selftest.LIMIT_SECONDS, "host", -1.0)
    found = document("check", "--backend", "host", status=3)
    assert {outcome["result"] for outcome in found["outcomes"]} == {"not run"}
    assert len(found["outcomes"]) == len(selftest.HOST_LAYERS)


def test_the_layers_reach_every_kind_of_kernel() -> None:
    plans, configs = [], set()
    for layer in selftest.LAYERS:
        case = selftest._case(layer)
        assert cuda.unsupported(check_experts(*case.tensors, **case.options)) is None
        plan = choose_kernel(
            tokens=layer.tokens, top_k=layer.top_k, experts=layer.experts, hidden=layer.hidden
        )
        act = Activation.parse(layer.activation)
        plans.append(plan)
        configs.add(
            KernelConfig.of(
                plan,
                dtype=layer.dtype,
                activation=act.kind,
                clamp=act.limit is not None,
                bias=layer.biases,
                hidden=layer.hidden,
                intermediate=layer.intermediate,
            )
        )
    assert len(configs) <= 3, "each takes seconds to compile"
    for name in ("tile_m", "tile_k", "many", "gathers", "hold_down"):
        assert len({getattr(plan, name) for plan in plans}) == 2, name
    for name in ("dtype", "clamp", "bias", "packed_up", "packed_down"):
        assert len({getattr(config, name) for config in configs}) == 2, name


@pytest.mark.parametrize("layer", selftest.HOST_LAYERS, ids=lambda layer: layer.name)
def test_the_layers_are_worth_testing(layer: selftest.Layer) -> None:
    expected = selftest._expected(layer)
    rows = expected.float().norm(dim=1) / layer.hidden**0.5
    used = rows > 0
    assert used.any()
    assert 0.2 < float(rows[used].mean()) < 3, "outputs of about 1"
    if layer.trimmed:
        assert not used.all(), "some rows without slots"
    assert len({selftest._case(one).tensors[0].sum().item() for one in selftest.HOST_LAYERS}) > 4


# The command line around them.


def test_light_commands_import_no_torch(home: Path) -> None:
    program = (
        "import sys\nfrom weave_moe.cli import cli\n"
        "for arguments in (['--version'], ['--help'], ['info', '--help'], ['check', '--help'],\n"
        "                  ['cache'], ['cache', 'clear']):\n"
        "    assert cli.main(arguments, standalone_mode=False) in (0, None), arguments\n"
        "    assert 'torch' not in sys.modules, arguments\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"weave-moe {__version__}" in done.stdout


def test_choices_are_those_of_the_code() -> None:
    assert CACHE_ACTIONS == cached.ACTIONS
    assert ("all", *selftest.BACKENDS) == PARTS
    assert set(BACKENDS) == set(backends.NAMES)


def test_exit_statuses_are_documented() -> None:
    usage = (ROOT / "docs" / "usage.md").read_text()
    table = usage.split("## Exit status")[1].split("\n## ")[0]
    documented = set(re.findall(r"^\| (\d+) \|", table, re.MULTILINE))
    helped = call("--help").stdout.split("Exit status")[1].split("Options")[0]
    assert set(re.findall(r"^\s+(\d+)  ", helped, re.MULTILINE)) == documented
    assert documented >= {"0", "1", "2", "3", "130"}
    for command in ("info", "cache", "check"):
        assert "Exit status" in call(command, "--help").stdout
        assert f"## weave-moe {command}" in usage
    assert set(selftest._STATUS.values()) <= {int(status) for status in documented}


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (3_271_576, "3.27 MB"),
        (150_754_820_096, "151 GB"),
        (5_000_000_000_000, "5,000 GB"),
    ],
)
def test_sizes_for_people(count: int, words: str) -> None:
    assert printing.size(count) == words
