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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from weave_moe.presets import PRESETS
from weave_moe.runtime import buffers, driver, kernel, nvrtc
from weave_moe.runtime.cache import cached_file
from weave_moe.runtime.kernel import (
    COMBINE_WARPS,
    PIECE,
    ROUTE_ROWS,
    ROUTE_TOKENS,
    ROUTE_WARPS,
    SORT_THREADS,
    KernelConfig,
    Launch,
    sort_bytes,
)
from weave_moe.schedule import group_width
from weave_moe.schedule.granularity import (
    GATHER_WIDTH,
    MAX_SLOTS,
    OWN_BYTES,
    SHARED_BYTES,
    STAGING_BYTES,
    choose_kernel,
)

try:
    nvrtc.version()
except nvrtc.CompileError as error:
    pytest.skip(str(error), allow_module_level=True)


def load_plants() -> ModuleType:
    """tests/gpu/plants.py, whose folder is not on the path here."""
    path = Path(__file__).parent / "gpu" / "plants.py"
    spec = importlib.util.spec_from_file_location("plants", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plants = load_plants()

SERIALISED = re.compile(r"C75\d\d|serializ", re.IGNORECASE)
REGISTER_FILE = 65_536  # registers of an SM


def config(
    model: str,
    tokens: int,
    *,
    dtype: str = "bfloat16",
    activation: str = "silu",
    clamp: bool = False,
    bias: bool = False,
    scale_x: bool = False,
    trace: bool = False,
    router: str = "none",
    shared: int = 0,
    hidden: int = 2048,
    intermediate: int = 768,
) -> KernelConfig:
    """The kernel of a model's experts and routing for `tokens` tokens, with any sizes.

    shared: slices of shared experts.
    """
    shape = PRESETS[model].shape()
    plan = choose_kernel(
        tokens=tokens,
        top_k=shape.top_k,
        experts=shape.experts,
        hidden=shape.hidden,
        router=router != "none",
        shared=shared,
    )
    return KernelConfig.of(
        plan,
        dtype=dtype,
        activation=activation,
        clamp=clamp,
        bias=bias,
        scale_x=scale_x,
        trace=trace,
        router=router,
        router_experts=shape.experts,
        hidden=hidden,
        intermediate=intermediate,
        shared_intermediate=shared * intermediate,
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
        "gpt-oss": config(
            "gpt-oss-120b", 256, clamp=True, bias=True, hidden=2880, intermediate=2880
        ),
        "fp16-gelu-odd-sizes": config(
            *("qwen3-30b", 256),
            dtype="float16",
            activation="gelu",
            bias=True,
            hidden=2888,
            intermediate=176,
        ),
        # Everything that takes registers, beside the widest products.
        "fp16-gelu_tanh-odd-sizes-wide": config(
            *("qwen3-30b", 4096),
            dtype="float16",
            activation="gelu_tanh",
            clamp=True,
            bias=True,
            hidden=96,
            intermediate=8,
        ),
    }
    extras |= {
        "relu2": config("nemotron-3-nano", 64, activation="relu2", hidden=2688, intermediate=1856),
        "relu2-odd-sizes-wide": config(
            "nemotron-3-nano", 8192, activation="relu2", bias=True, hidden=200, intermediate=88
        ),
        "weight-on-input": config("llama-4-scout", 40, scale_x=True),
        "weight-on-input-many": config("qwen3-30b", 512, scale_x=True, trace=True),
    }
    # Each kind of router in one launch and in one of its own, with each type, with shared experts
    # and without; and beside the options that take most registers.
    fp16 = {"dtype": "float16"}
    extras |= {
        "router-same": config("qwen3-30b", 1, router="same", shared=1),
        "router-fp32": config("deepseek-v3", 16, router="fp32", shared=1),
        "router-logits": config("qwen3-30b", 64, router="logits", **fp16),
        "router-fp32-fp16": config(
            "qwen3-30b", 256, router="fp32", shared=2, clamp=True, bias=True, **fp16
        ),
        "router-same-many": config("qwen3-30b", 512, router="same", **fp16),
        "router-fp32-many": config("qwen3-30b", 512, router="fp32", **fp16),
        "router-logits-many": config("qwen3-30b", 512, router="logits", shared=1, bias=True),
    }
    # No plan has K ranges now. All of the parts' code is there at any width: one is enough.
    extras |= {"k-ranges": replace(config("qwen3-30b", 1), split_k=True)}
    return found | extras


CONFIGS = representatives()


@dataclass(frozen=True)
class Compiled:
    """A cubin's code and what the compiler said of it."""

    config: KernelConfig
    cubin: Path
    log: str

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that it must have."""
        if not self.config.many:
            return ("weave_experts",)
        route = ("weave_route",) if self.config.router in ("same", "fp32") else ()
        return ("weave_experts", "weave_sort", "weave_combine", *route)

    def logs(self) -> dict[str, str]:
        """What ptxas said of each kernel."""
        parts = re.split(r"Compiling entry function '(\w+)'", self.log)[1:]
        return dict(zip(parts[::2], parts[1::2], strict=True))

    def number(self, kernel: str, pattern: str) -> int:
        found = re.findall(pattern, self.logs()[kernel])
        assert len(found) == 1, f"not one {pattern!r} of {kernel} in:\n{self.log}"
        return int(found[0])

    def threads(self, kernel: str) -> int:
        return {
            "weave_experts": self.config.tile_m // 64 * 128 + 128,
            "weave_sort": SORT_THREADS,
            "weave_combine": 32 * COMBINE_WARPS,
            "weave_route": 32 * ROUTE_WARPS,
        }[kernel]


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
        log = cached_file("log", [request.param], ".txt", build)
    return Compiled(chosen, cubin, log.read_text())


def test_the_list_is_short_enough_for_every_run() -> None:
    assert 15 <= len(CONFIGS) <= 26
    options = [tuple(c.options()) for c in CONFIGS.values()]
    assert len(set(options)) == len(options)
    # And it has both sides of every option.
    for name in KernelConfig.__dataclass_fields__:
        assert len({getattr(c, name) for c in CONFIGS.values()}) >= 2, name
    routers = {(c.router, c.many) for c in CONFIGS.values()}
    assert routers == {(router, many) for router in kernel.ROUTERS for many in (False, True)}
    for router in kernel.ROUTERS:
        types = {(c.dtype, c.shared) for c in CONFIGS.values() if c.router == router}
        assert {kind for kind, _ in types} == {"bfloat16", "float16"}
        assert router == "none" or {shared for _, shared in types} == {False, True}


def test_nothing_is_spilled_and_no_product_is_serialised(compiled: Compiled) -> None:
    assert sorted(compiled.logs()) == sorted(compiled.kernels)
    for name in compiled.kernels:
        assert compiled.number(name, r"(\d+) bytes stack frame") == 0, name
        assert compiled.number(name, r"(\d+) bytes spill stores") == 0, name
        assert compiled.number(name, r"(\d+) bytes spill loads") == 0, name
    assert not SERIALISED.search(compiled.log), compiled.log
    assert "warning" not in compiled.log.lower(), compiled.log


def test_a_block_of_it_fits_the_register_file(compiled: Compiled) -> None:
    for name in compiled.kernels:
        registers = compiled.number(name, r"Used (\d+) registers")
        # Registers are handed out eight at a time.
        assert compiled.threads(name) * (-(-registers // 8) * 8) <= REGISTER_FILE, name
        if name == "weave_experts" and compiled.config.tile_m == 128:
            assert registers <= 168
        if name == "weave_combine":
            # Its reads hide behind those of other warps: at least four blocks an SM.
            assert compiled.threads(name) * registers <= REGISTER_FILE // 4


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


@cache
def machine_code(cubin: Path) -> dict[str, list[str]]:
    """Names of each kernel's instructions, with their modifiers, in order."""
    command = [disassembler(), "-c", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parts = re.split(r"^\.text\.(\w+):", text, flags=re.MULTILINE)[1:]
    # "  /*0a10*/  @P0 HGMMA.64x8x16.F32.BF16 R24, ..."
    line = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", re.MULTILINE)
    return {name: line.findall(code) for name, code in zip(parts[::2], parts[1::2], strict=True)}


def test_its_machine_code_has_the_products_of_each_width_and_no_local_memory(
    compiled: Compiled,
) -> None:
    chosen = compiled.config
    code = machine_code(compiled.cubin)
    assert sorted(code) == sorted(compiled.kernels)
    assert len(code["weave_experts"]) > 1000
    assert min(map(len, code.values())) > 100
    # One loop of products a width: a stage of tile_k columns is tile_k / 16 of them. More would
    # mean that the compiler made copies of the loop, fewer that a width is missing.
    kind = "F32.BF16" if chosen.dtype == "bfloat16" else "F32"
    products = {f"HGMMA.64x{n}x16.{kind}": chosen.tile_k // 16 for n in widths(chosen)}
    of_router = router_products(chosen)
    where = "weave_route" if chosen.many else "weave_experts"
    for name, found in code.items():
        want = (products if name == "weave_experts" else {}) | (of_router if name == where else {})
        assert Counter(op for op in found if op.startswith(("HGMMA", "HMMA"))) == want, name
        assert not [op for op in found if op.startswith(("LDL", "STL"))], name


def router_products(chosen: KernelConfig) -> dict[str, int]:
    """Products of 16 rows, 8 tokens and 16 columns that the router is made of (device/router.h)."""
    if chosen.router in ("none", "logits"):
        return {}
    fp32, fp16 = chosen.router == "fp32", chosen.dtype == "float16"
    # A weight of fp32 is three parts of bf16, and then an fp16 element of x is two.
    parts = (3 if fp32 else 1) * (2 if fp32 and fp16 else 1)
    # Blocks of 8 tokens that a warp takes, and how many times 32 columns it has on their way.
    loads = {4: 4} if chosen.many else {1: 8, 4: 4}
    count = sum(n * (steps // (2 if fp32 else 1)) * 2 * parts for n, steps in loads.items())
    return {"HMMA.16816.F32" if fp16 and not fp32 else "HMMA.16816.F32.BF16": count}


def widths(chosen: KernelConfig) -> set[int]:
    """Columns of the products of weight tiles that are compiled."""
    widths = {group_width(n) for n in range(1, chosen.width_cap + 1)}
    if chosen.many:  # groups of an odd number of eights take the next product
        widths = {-(-width // 16) * 16 for width in widths}
    return widths


def test_its_machine_code_loads_and_stores_as_its_options_say(compiled: Compiled) -> None:
    chosen = compiled.config
    every = {name: Counter(ops) for name, ops in machine_code(compiled.cubin).items()}
    code = every["weave_experts"]

    def count(*names: str) -> int:
        return sum(n for op, n in code.items() if op.startswith(names))

    loads = {op.split(".")[1] for op in code if op.startswith("UTMALDG")}
    # Gated w13 is a map of 5 dimensions where K is cut into 64s, else of 4; w2, plain w13 and the
    # rows one less.
    assert ("5D" in loads) == (chosen.packed_up and chosen.activation != "relu2")
    gathers = chosen.many or chosen.scale_x or chosen.width_cap > GATHER_WIDTH
    assert ("2D" in loads) == (not chosen.packed_down or (gathers and not chosen.packed_up))
    if not chosen.scale_x:
        # Rows read by token are copied by 16 bytes.
        assert (count("LDGSTS") > 0) == (not chosen.many)
    # While tokens are routed the first weights are on their way.
    assert (count("UTMAPF") > 0) == (chosen.router != "none" and not chosen.many)
    # Results of many tokens are transposed into shared memory, and stored from there.
    assert (count("STSM") > 0) == (count("UTMASTG") > 0) == chosen.many
    stores = {op.split(".")[1] for op in code if op.startswith("UTMASTG")}
    assert stores == ({"2D"} if chosen.many else set())
    for name in set(every) - {"weave_experts"}:
        assert not [op for op in every[name] if op.startswith(("UTMA", "STSM"))], name
        # The router's x of many tokens comes through shared memory.
        copies = any(op.startswith("LDGSTS") for op in every[name])
        assert copies == (name == "weave_route"), name


# --- memory orders ------------------------------------------------------------------------------

FENCES = ("FENCE.VIEW.ASYNC", "MEMBAR.ALL.GPU", "MEMBAR.SC.GPU")
"""Instructions that order what one block or proxy writes before what another one reads."""


def fences_of(code: dict[str, list[str]]) -> dict[str, Counter[str]]:
    """How many of each a kernel has, by its name; modifiers aside."""
    return {
        name: Counter(fence for op in ops for fence in FENCES if op.startswith(fence))
        for name, ops in code.items()
    }


def fences_needed(chosen: KernelConfig) -> dict[str, Counter[str]]:
    """What docs/kernel.md, "Memory order", comes to, counted by hand-overs and compiled widths."""
    compiled = widths(chosen)
    gated = chosen.activation != "relu2"
    parts = 0
    if chosen.many:
        # Slots that a tile is handed over in, of 128 tokens if gated, else 64; none of fp32 rows.
        halves = sum(-(-n // 128) for n in compiled)
        wholes = sum(-(-n // 64) for n in compiled)
        shared = halves * gated + wholes * (not gated) + wholes * (chosen.dtype == "bfloat16")
        device = 2  # before rows are loaded; before a stored tile of gate_up is told of
        releases = 1  # that tile
    else:
        gather = 0 if chosen.scale_x else GATHER_WIDTH
        wide = chosen.width_cap > gather
        # Rows of x that were copied by token; and the router's scratch, where TMA will write.
        shared = sum(n <= gather for n in compiled) + (chosen.router != "none")
        # Whoever wrote h, each width; the publisher; before rows are loaded; gathered rows.
        device = len(compiled) + 1 + 1 + wide
        releases = 2 + wide  # tiles of gate_up and of down; gathered rows
        parts = len(compiled) * chosen.split_k
    found = {
        "weave_experts": {
            "FENCE.VIEW.ASYNC": shared + device + 1,  # and one for the barriers' initial state
            # A proxy fence for device memory is one of these as well. Leaving acquires and
            # releases, and so does a finished K range.
            "MEMBAR.ALL.GPU": device + releases + 1 + parts,
            "MEMBAR.SC.GPU": 2 * parts,  # before and after the count of ranges
        }
    }
    if chosen.many:
        # Counts of a chunk, before one thread's release; that release; the last one out.
        found |= {"weave_sort": {"MEMBAR.SC.GPU": 1, "MEMBAR.ALL.GPU": 2}, "weave_combine": {}}
        if chosen.router in ("same", "fp32"):
            found["weave_route"] = {}  # kernel boundaries order the rest
    return {name: +Counter(counts) for name, counts in found.items()}


needs_known_fences = pytest.mark.skipif(
    nvrtc.version() not in ("13.0", "13.5"),
    reason="how a fence is compiled is known of NVRTC 13.0 and 13.5",
)


@needs_known_fences
def test_its_machine_code_has_each_fence_that_the_protocol_needs(compiled: Compiled) -> None:
    assert fences_of(machine_code(compiled.cubin)) == fences_needed(compiled.config)


def with_plant(
    plant: Callable[[dict[str, str]], None], chosen: KernelConfig, folder: Path
) -> dict[str, Counter[str]]:
    """Fences of a kernel whose sources have a bug planted."""
    sources = dict(kernel.device_sources())
    plant(sources)
    cubin = folder / "planted.cubin"
    cubin.write_bytes(nvrtc.compile_cubin(sources["experts.cu"], sources, chosen.options())[0])
    return fences_of(machine_code(cubin))


FEWER = {
    **{name: ("qwen3-30b-1", plant) for name, plant in plants.ORDERS.items()},
    "last K range": (
        "k-ranges",
        plants.without("scheduler.h", "add_acq_rel(&s.part_done", "add_relaxed(&s.part_done"),
    ),
    "K ranges' sums": ("k-ranges", plants.without("consumer.h", "  __threadfence();\n")),
    "departure": (
        "qwen3-30b-1",
        plants.without(
            "scheduler.h", "add_acq_rel(&s.control->left", "add_relaxed(&s.control->left"
        ),
    ),
    "router's scratch": ("router-same", plants.without("router.h", "fence_async_proxy_shared();")),
    "staged tiles": (
        "router-same-many",
        plants.without("staging.h", "fence_async_proxy_shared();"),
    ),
    "stored tiles": ("router-same-many", plants.without("staging.h", "fence_async_proxy();")),
    "a chunk's counts": (
        "router-same-many",
        plants.without(
            "many.h", "__threadfence();  // each thread's counts, before one thread's release"
        ),
    ),
}
"""Planted bugs that results show only by luck, each with a kernel that has the line."""


@needs_known_fences
@pytest.mark.parametrize("bug", FEWER)
def test_a_fence_that_is_taken_away_shows_in_the_machine_code(bug: str, tmp_path: Path) -> None:
    name, plant = FEWER[bug]
    needed, found = fences_needed(CONFIGS[name]), with_plant(plant, CONFIGS[name], tmp_path)
    assert found.keys() == needed.keys()
    assert found != needed
    for name, counts in found.items():
        assert counts <= needed[name], "a bug that adds fences is none of these"


def test_python_has_the_launchs_fields_where_the_kernel_has_them() -> None:
    chosen = CONFIGS["qwen3-30b-1"]
    headers = kernel.device_sources()
    routing = ("scoring", "top_k", "renormalize", "groups", "kept_groups", "scale")

    def asserts(structure: type[ctypes.Structure], name: str) -> Iterator[str]:
        for field, kind, *_ in structure._fields_:
            offset = getattr(structure, field).offset
            # Names of Python's own are those that C++ has as elements of an array, or one deeper.
            words = {"up_parts": "part_done[0]", "down_parts": "part_done[1]"}
            if structure is kernel._Router:
                words = {inner: f"routing.{inner}" for inner in routing}
            where = f"__builtin_offsetof({name}, {words.get(field, field)})"
            yield f'static_assert({where} == {offset}, "{name}::{field}");'
            if isinstance(kind, type) and issubclass(kind, ctypes.Structure):
                inner = f"decltype({name}::{field})"
                yield from asserts(kind, inner)

    lines = "\n".join(asserts(Launch, "weave::Launch"))
    assert lines.count("static_assert") > 40
    assert "(weave::Launch::router), routing.scale)" in lines
    source = f'#include "config.h"\n{lines}\n'
    nvrtc.compile_cubin(source, headers, chosen.options())
    moved = source.replace(f"== {Launch.tokens.offset},", f"== {Launch.top_k.offset},")
    with pytest.raises(nvrtc.CompileError, match="tokens"):
        nvrtc.compile_cubin(moved, headers, chosen.options())


def layout(chosen: KernelConfig) -> dict[str, int]:
    """C++ expressions, and what Python takes them for."""
    columns = chosen.width_cap // 8
    gathers = chosen.many or chosen.scale_x or chosen.width_cap > GATHER_WIDTH
    maps = 4 + columns + (columns if gathers else 1) + (8 if chosen.many else 2)
    found = {
        "sizeof(Maps)": maps * driver.TENSOR_MAP_BYTES,
        "sizeof(TensorMap)": driver.TENSOR_MAP_BYTES,
        "sizeof(Group)": 16,
        "sizeof(PlanTotals)": 12,
        "sizeof(PlanIndex)": 2,
        "sizeof(*((Launch*)0)->chunk_tokens)": 2,
        "sizeof(*((Launch*)0)->plan.slot_row)": 4,
        "sizeof(*((Launch*)0)->plan.expert_group)": 4,
        f"sizeof(Control) <= {buffers._CONTROL}": True,
        "sizeof(RouterState)": buffers.ROUTER_STATE_BYTES,
        "sizeof(*((Launch*)0)->router.chosen)": 4,
        "MAX_SLOTS": MAX_SLOTS,
        "MAX_TOP_K": 16,  # of what the backend takes
        "MAX_EXPERT_GROUPS": 32,
        **{f"ROUTER_{kind.upper()}": n for n, kind in enumerate(kernel.ROUTERS) if n},
        "NO_ROUTER": 0,
        "THREADS": chosen.tile_m // 64 * 128 + 128,
        "STAGING_BYTES": STAGING_BYTES if chosen.many else 0,
        "PIECE": PIECE,
    }
    if chosen.router != "none":
        own = 0 if chosen.many else OWN_BYTES
        found |= {
            "OWN_BYTES": own,
            # Columns of a partial sum: one for so many, two for one more.
            "SEGMENT": next(n for n in range(1, 10_000) if buffers.logit_sums(n + 1) == 2),
        }
        if chosen.many:
            found |= {"ROUTE_WARPS": ROUTE_WARPS, "ROUTE_TOKENS": ROUTE_TOKENS}
            found |= {"ROUTE_ROWS": ROUTE_ROWS}
    if not chosen.many:
        return found | {"GATHER_WIDTH": 0 if chosen.scale_x else GATHER_WIDTH}
    return found | {
        "SORT_THREADS": SORT_THREADS,
        "COMBINE_WARPS": COMBINE_WARPS,
        "MAX_CHUNKS": buffers.MAX_CHUNKS,
        "STORE_MAPS": len(buffers._STORE_ROWS),
        **{f"STORE_ROWS >> {i}": rows for i, rows in enumerate(buffers._STORE_ROWS)},
        # A box's columns are a warpgroup's elements, one swizzled row; a slot holds any box's rows.
        "TILE_M / 2 / WARPGROUPS": chosen.tile_m // 4,
        "TILE_M / WARPGROUPS": chosen.tile_m // 2,
        "STAGING_SLOT_BYTES / SLOT_TOKENS_GATED": 2 * (chosen.tile_m // 4),
        "STAGING_SLOT_BYTES / SLOT_TOKENS": 2 * (chosen.tile_m // 2),
        "STORE_ROWS <= SLOT_TOKENS && STORE_ROWS <= SLOT_TOKENS_GATED": True,
        # Swizzles follow the address: no slot may begin within a pattern's 1,024 bytes.
        "STAGING_SLOT_BYTES % 1024": 0,
    }


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3-30b-1", "qwen3-30b-64", "qwen3-30b-4096"),
        *("router-same", "router-logits", "router-fp32-many"),
    ],
)
def test_python_has_the_kernels_layout(name: str) -> None:
    chosen = CONFIGS[name]
    headers = kernel.device_sources()
    include = ("staging.h", "many.h") if chosen.many else ("combine.h",)
    if chosen.router != "none":
        include = (*include, "router.h")

    def source(expected: dict[str, int]) -> str:
        lines = [f'static_assert(({e}) == {int(n)}, "{e}");' for e, n in expected.items()]
        head = [f'#include "{file}"' for file in include]
        return "\n".join((*head, "using namespace weave;", *lines, ""))

    expected = layout(chosen)
    assert chosen.many == ("SORT_THREADS" in expected)
    nvrtc.compile_cubin(source(expected), headers, chosen.options())
    wrong = source({e: n + 1 for e, n in expected.items()})
    with pytest.raises(nvrtc.CompileError) as refused:
        nvrtc.compile_cubin(wrong, headers, chosen.options())
    for expression in expected:
        assert expression in str(refused.value), "each is compared"


def test_python_has_the_shared_memory_of_the_sort() -> None:
    headers = kernel.device_sources()
    # Its members' places are no constants to C++: here they are made to be.
    found = re.search(r"struct SortMemory \{.*?\n\};", headers["many.h"], re.DOTALL)
    assert found is not None
    constant = found[0].replace("WEAVE_FN", "__device__ constexpr")
    patched = headers | {"many.h": headers["many.h"].replace(found[0], constant)}
    options = next(c for c in CONFIGS.values() if c.many).options()

    def source(spare: int) -> str:
        lines = ['#include "many.h"', "using namespace weave;"]
        for experts, slots in ((1, 1), (7, 16), (8, 640), (127, 33), (128, 1000), (1024, 32_768)):
            size = sort_bytes(experts, slots) // 4 + spare
            m, at = f"m{experts}", f"words{experts}"
            eights = -(-experts // 8)
            sums = SORT_THREADS // eights * eights * 8  # [stretches][experts rounded up to 8]
            ends = {
                "chunks() - {at}": 2 * SORT_THREADS // 32,
                "total() - {m}.chunks()": buffers.MAX_CHUNKS,
                "before() - {m}.total()": sums,
                "count() - {m}.before()": sums,
                "first_row() - {m}.count()": experts,
                "expert_row() - {m}.first_row()": experts,
                "expert_tokens() - {m}.expert_row()": experts,
                "row() - {m}.expert_tokens()": experts,
                "at + {size} - {m}.row()": slots,
            }
            lines.append(f"__device__ u32 {at}[{size}];")
            lines.append(f"constexpr SortMemory {m} = {{{at}, {experts}}};")
            for text, least in ends.items():
                place = text.format(m=m, at=at, size=size)
                lines.append(f'static_assert({m}.{place} >= {least}, "{place}");')
            lines.append(f"static_assert({m}.row() + {slots} == {at} + {size - spare});")
        return "\n".join((*lines, ""))

    nvrtc.compile_cubin(source(0), patched, options)
    # One word less than Python says would be outside.
    with pytest.raises(nvrtc.CompileError, match="static assertion failed"):
        nvrtc.compile_cubin(source(-1), patched, options)


def test_the_sorts_own_words_fit_beside_those_it_is_given(compiled: Compiled) -> None:
    if compiled.config.many:
        static = compiled.number("weave_sort", r"(\d+) bytes smem")
        most = sort_bytes(1024, 1 << 15)
        assert static + most <= SHARED_BYTES


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
