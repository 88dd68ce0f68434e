"""Every kind of kernel is compiled for sm_90a and its machine code read; no GPU is needed.

What ptxas did shows only there: a spilled accumulator, a stack frame, or products that it ran one
after the other (warnings C7510 to C7519) give right results at a fraction of the speed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from weave_moe.presets import PRESETS
from weave_moe.runtime import cache, kernel, nvrtc
from weave_moe.runtime.kernel import KernelConfig, Launch
from weave_moe.schedule import group_width
from weave_moe.schedule.granularity import choose_kernel

try:
    nvrtc.version()
except nvrtc.CompileError as error:
    pytest.skip(str(error), allow_module_level=True)

SERIALISED = re.compile(r"C75\d\d|serializ", re.IGNORECASE)
THREADS_PER_REGISTER_FILE = 65_536


def config(
    model: str,
    tokens: int,
    *,
    dtype: str = "bfloat16",
    activation: str = "silu",
    clamp: bool = False,
    bias: bool = False,
    hidden: int = 2048,
    intermediate: int = 768,
) -> KernelConfig:
    """The kernel of a model's experts and routing for `tokens` tokens, with any sizes."""
    shape = PRESETS[model].shape()
    plan = choose_kernel(
        tokens=tokens, top_k=shape.top_k, experts=shape.experts, hidden=shape.hidden
    )
    return KernelConfig.of(
        plan,
        dtype=dtype,
        activation=activation,
        clamp=clamp,
        bias=bias,
        hidden=hidden,
        intermediate=intermediate,
    )


def representatives() -> dict[str, KernelConfig]:
    """By name: what models get for several token counts, then each option where it costs most."""
    found: dict[str, KernelConfig] = {}
    for model in ("qwen3-30b", "mixtral-8x7b", "deepseek-v3"):
        for tokens in (1, 16, 64, 256, 1024, 4096):
            chosen = config(model, tokens)
            if chosen not in found.values():
                found[f"{model}-{tokens}"] = chosen
    extras = {
        "fp16": config("qwen3-30b", 256, dtype="float16"),
        "fp16-wide": config("qwen3-30b", 4096, dtype="float16"),
        "gpt-oss": config(
            "gpt-oss-120b", 256, clamp=True, bias=True, hidden=2880, intermediate=2880
        ),
        "gelu-odd-sizes": config(
            "qwen3-30b", 256, activation="gelu", bias=True, hidden=2888, intermediate=176
        ),
        "gelu_tanh-odd-sizes-wide": config(
            "qwen3-30b", 1024, activation="gelu_tanh", hidden=96, intermediate=8
        ),
    }
    return found | extras


CONFIGS = representatives()


@dataclass(frozen=True)
class Compiled:
    """A kernel's code and what the compiler said of it."""

    config: KernelConfig
    cubin: Path
    log: str

    def number(self, pattern: str) -> int:
        found = re.search(pattern, self.log)
        assert found is not None, f"no {pattern!r} in:\n{self.log}"
        return int(found[1])


@pytest.fixture(scope="session")
def build_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all workers of a run of pytest-xdist, so that each kernel is compiled once."""
    base = tmp_path_factory.getbasetemp()
    path = base.parent / "kernels" if "popen-gw" in base.name else base / "kernels"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="module", params=list(CONFIGS))
def compiled(request: pytest.FixtureRequest, build_directory: Path) -> Compiled:
    chosen = CONFIGS[request.param]
    cubin = build_directory / f"{request.param}.cubin"

    def build() -> bytes:
        code, log = chosen.compile("--ptxas-options=-v")
        cubin.write_bytes(code)
        return log.encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEAVE_MOE_CACHE", str(build_directory))
        log = cache.cached_file("log", [request.param], ".txt", build)
    return Compiled(chosen, cubin, log.read_text())


def test_the_list_is_short_enough_for_every_run() -> None:
    assert 10 <= len(CONFIGS) <= 15
    options = [tuple(c.options()) for c in CONFIGS.values()]
    assert len(set(options)) == len(options)
    # And it has both sides of every option.
    for name in KernelConfig.__dataclass_fields__:
        if name not in ("split_k",):
            assert len({getattr(c, name) for c in CONFIGS.values()}) >= 2, name


def test_nothing_is_spilled_and_no_product_is_serialised(compiled: Compiled) -> None:
    assert compiled.number(r"(\d+) bytes stack frame") == 0
    assert compiled.number(r"(\d+) bytes spill stores") == 0
    assert compiled.number(r"(\d+) bytes spill loads") == 0
    assert not SERIALISED.search(compiled.log), compiled.log
    assert "warning" not in compiled.log.lower(), compiled.log


def test_a_block_of_it_fits_the_register_file(compiled: Compiled) -> None:
    threads = compiled.config.tile_m // 64 * 128 + 128
    registers = compiled.number(r"Used (\d+) registers")
    # Registers are handed out eight at a time.
    assert threads * (-(-registers // 8) * 8) <= THREADS_PER_REGISTER_FILE
    if compiled.config.tile_m == 128:
        assert registers <= 168


def disassembler() -> str:
    """Path of nvdisasm: the pip package's, else one on the PATH."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(root).glob("*/bin/nvdisasm"):
            return str(path)
    found = shutil.which("nvdisasm")
    if found is None:
        pytest.skip("nvdisasm is not installed: pip package nvidia-cuda-nvdisasm")
    return found


def machine_code(compiled: Compiled) -> list[str]:
    """Names of the instructions, with their modifiers, in order."""
    command = [disassembler(), "-c", str(compiled.cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # "  /*0a10*/  @P0 HGMMA.64x8x16.F32.BF16 R24, ..."
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", text, re.MULTILINE)


def test_its_machine_code_has_the_products_of_each_width_and_no_local_memory(
    compiled: Compiled,
) -> None:
    chosen = compiled.config
    code = machine_code(compiled)
    assert len(code) > 1000
    # One loop of products a width: a stage of tile_k columns is tile_k / 16 of them. More would
    # mean that the compiler made copies of the loop, fewer that a width is missing.
    kind = "F32.BF16" if chosen.dtype == "bfloat16" else "F32"
    widths = {group_width(n) for n in range(1, chosen.width_cap + 1)}
    want = {f"HGMMA.64x{n}x16.{kind}": chosen.tile_k // 16 for n in widths}
    assert Counter(op for op in code if op.startswith("HGMMA")) == want
    assert not [op for op in code if op.startswith(("LDL", "STL"))]


def test_its_machine_code_loads_as_its_options_say(compiled: Compiled) -> None:
    chosen = compiled.config
    code = Counter(machine_code(compiled))
    loads = {op.split(".")[1] for op in code if op.startswith("UTMALDG")}
    # w13 is a map of 5 dimensions where K is cut into 64s, else of 4; w2 and the rows one less.
    assert ("5D" in loads) == chosen.packed_up
    assert ("2D" in loads) == (
        not chosen.packed_down or (chosen.gathered_first and not chosen.packed_up)
    )
    copies = sum(n for op, n in code.items() if op.startswith("LDGSTS"))
    assert (copies > 0) == (not chosen.gathered_first), "rows read by token are copied by 16 bytes"


def test_python_has_the_launchs_fields_where_the_kernel_has_them() -> None:
    chosen = CONFIGS["qwen3-30b-1"]
    headers = kernel.device_sources()

    def asserts(structure: type[ctypes.Structure], name: str) -> Iterator[str]:
        for field, kind, *_ in structure._fields_:
            offset = getattr(structure, field).offset
            # Names of Python's own are those that C++ has as elements of an array.
            words = {"up_parts": "part_done[0]", "down_parts": "part_done[1]"}
            where = f"__builtin_offsetof({name}, {words.get(field, field)})"
            yield f'static_assert({where} == {offset}, "{name}::{field}");'
            if isinstance(kind, type) and issubclass(kind, ctypes.Structure):
                inner = f"decltype({name}::{field})"
                yield from asserts(kind, inner)

    lines = "\n".join(asserts(Launch, "weave::Launch"))
    assert lines.count("static_assert") > 40
    source = f'#include "config.h"\n{lines}\n'
    nvrtc.compile_cubin(source, headers, chosen.options())
    moved = source.replace(f"== {Launch.tokens.offset},", f"== {Launch.top_k.offset},")
    with pytest.raises(nvrtc.CompileError, match="tokens"):
        nvrtc.compile_cubin(moved, headers, chosen.options())


@pytest.mark.parametrize("name", ["LAUNCH_BYTES", "SMEM_BYTES"])
def test_sizes_that_python_and_the_kernel_disagree_on_do_not_compile(name: str) -> None:
    chosen = CONFIGS["qwen3-30b-1"]
    headers = kernel.device_sources()
    options = chosen.options()
    wrong = [re.sub(rf"(?<={name}=)\d+", lambda m: str(int(m[0]) + 8), o) for o in options]
    assert wrong != options
    source = '#include "config.h"\n'
    nvrtc.compile_cubin(source, headers, options)
    with pytest.raises(nvrtc.CompileError, match="static assertion failed"):
        nvrtc.compile_cubin(source, headers, wrong)


def test_a_compile_error_carries_the_compilers_log() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"did not compile.*\n.*weave_moe.cu\(2\)"):
        nvrtc.compile_cubin("\nnot_a_type x;\n", {}, [])
