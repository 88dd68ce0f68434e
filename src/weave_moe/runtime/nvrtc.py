"""NVRTC through ctypes: C++ to a cubin for sm_90a, with no CUDA toolkit installed.

The library is the one torch itself brought (or the pip package nvidia-cuda-nvrtc); no GPU is needed
to compile.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["ARCHITECTURE", "CompileError", "compile_cubin", "location", "version"]

ARCHITECTURE: Final = "sm_90a"
_MAJORS: Final = ("13", "12")


class CompileError(RuntimeError):
    """NVRTC is missing, or it rejected the source; the message carries its log."""


def _sonames() -> list[str]:
    """Of the CUDA major version that torch was built for first: its code suits the driver."""
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None) or ""
    majors = sorted(_MAJORS, key=lambda major: not cuda.startswith(f"{major}."))
    return [f"libnvrtc.so.{major}" for major in majors]


def _candidates() -> list[str]:
    found: list[str] = []
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec and torch_spec.origin:
        roots.append(str(Path(torch_spec.origin).parent / "lib"))
    for soname in _sonames():
        for root in roots:
            found += [str(p) for p in sorted(Path(root).glob(f"**/{soname}*"))]
        found.append(soname)  # the loader's own search, and a library that torch has loaded
    return found


@cache
def _library() -> ctypes.CDLL:
    tried = []
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(f"{path}: {error}")
    raise CompileError(
        "NVRTC was not found: install a CUDA build of torch, or the package nvidia-cuda-nvrtc "
        f"(tried {'; '.join(tried)})"
    )


def _check(name: str, status: int) -> None:
    if status:
        text = _library().nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        raise CompileError(f"{name} failed: {text(status).decode()}")


@cache
def version() -> str:
    """NVRTC's version, such as "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check("nvrtcVersion", _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def location() -> str:
    """The library's path, or its bare name where the loader knows it. CompileError without it."""
    return _library()._name


def compile_cubin(
    source: str, headers: Mapping[str, str], options: Sequence[str]
) -> tuple[bytes, str]:
    """Machine code for sm_90a and the compiler's log.

    headers: text by the name it is included by.  Raises CompileError with the log.
    """
    lib = _library()
    program = ctypes.c_void_p()
    names = [n.encode() for n in headers]
    texts = [headers[n].encode() for n in headers]
    count = len(names)
    _check(
        "nvrtcCreateProgram",
        lib.nvrtcCreateProgram(
            ctypes.byref(program),
            source.encode(),
            b"weave_moe.cu",
            count,
            (ctypes.c_char_p * count)(*texts),
            (ctypes.c_char_p * count)(*names),
        ),
    )
    try:
        all_options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", *options]
        encoded = (ctypes.c_char_p * len(all_options))(*[o.encode() for o in all_options])
        status = lib.nvrtcCompileProgram(program, len(all_options), encoded)
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        text = log.value.decode(errors="replace")
        if status:
            raise CompileError(f"the kernel did not compile with NVRTC {version()}:\n{text}")
        _check("nvrtcGetCUBINSize", lib.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check("nvrtcGetCUBIN", lib.nvrtcGetCUBIN(program, cubin))
        return cubin.raw, text
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
