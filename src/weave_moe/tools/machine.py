"""What there is on this machine for the layer to run on, and why what is missing is missing.

Nothing here raises: a tool that shows what is wrong must work where everything is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import shutil
import sys
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from .._version import __version__
from ..runtime import cache, nvrtc

__all__ = ["CacheFacts", "Gpu", "Machine", "Part", "look"]

KERNEL_CAPABILITY = (9, 0)
"""Compute capability that the kernel is built for."""


@dataclass(frozen=True)
class Part:
    """Something that is installed (version, where it is), or why it cannot be used."""

    version: str | None = None
    path: str | None = None
    missing: str | None = None

    def __str__(self) -> str:
        if self.missing is not None:
            return f"none: {self.missing}"
        return f"{self.version} ({self.path})" if self.path else str(self.version)


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees.

    shared_bytes: shared memory that a block may have, None if torch does not say.  kernel: whether
    the experts kernel is built for it.
    """

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int | None
    memory_bytes: int
    kernel: bool


@dataclass(frozen=True)
class CacheFacts:
    """The directory of compiled code: finished entries and their bytes, or why it is unreadable."""

    directory: str
    entries: int
    bytes: int
    writable: bool
    missing: str | None = None


@dataclass(frozen=True)
class Machine:
    """All that `weave-moe info` says about a machine.

    cores: logical CPUs that this process may use.  cuda: the CUDA version that torch was built for.
    no_gpu: why there is none.  driver: the NVIDIA driver's version, with the newest CUDA that it
    runs.
    """

    package: Part
    python: Part
    system: str
    cores: int
    torch: Part
    cuda: str | None
    gpus: tuple[Gpu, ...]
    no_gpu: str | None
    driver: Part
    nvrtc: Part
    compiler: Part
    cache: CacheFacts


def look() -> Machine:
    """Looks at this machine. Compiles nothing and takes no GPU memory."""
    torch, part = _torch()
    gpus, no_gpu = ((), part.missing) if torch is None else _gpus(torch)
    return Machine(
        package=Part(__version__, str(Path(__file__).parents[1])),
        python=Part(platform.python_version(), sys.executable),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        torch=part,
        cuda=None if torch is None else torch.version.cuda,
        gpus=gpus,
        no_gpu=no_gpu,
        driver=_driver(),
        nvrtc=_nvrtc(),
        compiler=_compiler(),
        cache=_cache(),
    )


def _cores() -> int:
    return os.cpu_count() or 1


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _torch() -> tuple[Any, Part]:
    try:
        torch: Any = import_module("torch")
    # A build for another CUDA or C library fails in the loader, in ways of its own.
    except Exception as error:
        return None, Part(missing=f"it does not import: {_first_line(error)}")
    return torch, Part(torch.__version__, str(Path(torch.__file__).parent))


def _gpus(torch: Any) -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs that torch sees, or none and the reason."""
    if torch.version.cuda is None:
        other = getattr(torch.version, "hip", None)
        built = f"for ROCm {other}" if other else "without CUDA"
        return (), f"this torch ({torch.__version__}) was built {built}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say comes below, as the reason
            count = torch.cuda.device_count()
            if count == 0 and hidden is not None:
                return (), f"CUDA_VISIBLE_DEVICES is {hidden!r}"
            if not torch.cuda.is_available():
                torch.cuda.init()
                return (), "torch sees none"
            return tuple(_gpu(torch, index) for index in range(count)), None
    except (RuntimeError, AssertionError, OSError) as error:
        return (), _first_line(error)


def _gpu(torch: Any, index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return Gpu(
        index=index,
        name=properties.name,
        capability=capability,
        multiprocessors=properties.multi_processor_count,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", None),
        memory_bytes=properties.total_memory,
        kernel=capability == KERNEL_CAPABILITY,
    )


def _driver() -> Part:
    """The driver's release, from NVML or the kernel module, and its CUDA version, from libcuda."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Part(missing="libcuda.so.1 was not found, so no NVIDIA driver is installed here")
    number = ctypes.c_int()
    status = library.cuDriverGetVersion(ctypes.byref(number))
    if status:
        return Part(missing=f"libcuda.so.1 is there, but cuDriverGetVersion gave error {status}")
    newest = f"runs CUDA up to {number.value // 1000}.{number.value % 1000 // 10}"
    return Part(_driver_release() or "of unknown version", newest)


def _driver_release() -> str | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            text = ctypes.create_string_buffer(96)
            failed = library.nvmlSystemGetDriverVersion(text, len(text))
            library.nvmlShutdown()
            if not failed:
                return text.value.decode(errors="replace")
    except (OSError, AttributeError):
        pass
    try:
        module = Path("/proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", module)
    return found[1] if found else None


def _nvrtc() -> Part:
    try:
        return Part(nvrtc.version(), nvrtc.location())
    except nvrtc.CompileError as error:
        # The whole message lists every path that was tried.
        return Part(missing=_first_line(error).partition(" (tried ")[0])


def _compiler() -> Part:
    from ..host import build

    try:
        command = build.compiler()
        version = build.compiler_version(command)
    except build.BuildError as error:
        return Part(missing=" ".join(str(error).split()))
    path = shutil.which(command[0]) or command[0]
    return Part(
        (version.splitlines() or ["of unknown version"])[0], shlex.join([path, *command[1:]])
    )


def _cache() -> CacheFacts:
    home = cache.directory()
    there = home
    while not there.exists() and there != there.parent:
        there = there.parent
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    try:
        entries = cache.entries()
    except OSError as error:
        return CacheFacts(str(home), 0, 0, writable, error.strerror or str(error))
    return CacheFacts(str(home), len(entries), sum(e.bytes for e in entries), writable)
