"""The CUDA driver through ctypes: loading a cubin, launching it, tensor maps, capture ids.

Only what the kernels need; torch owns contexts, memory, and all streams but those made here.
Importing this module loads nothing: libcuda is opened at the first call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

__all__ = [
    "CudaError",
    "Kernel",
    "Library",
    "capture_id",
    "create_stream",
    "encode_tensor_map",
]

TENSOR_MAP_BYTES: Final = 128
_MAX_DYNAMIC_SHARED_BYTES: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DATA_TYPES: Final = {"bfloat16": 9, "float16": 6}  # CUtensorMapDataType
_SWIZZLES: Final = {64: 2, 128: 3}  # CUtensorMapSwizzle
# Weights are read once, in whole 128-byte lines. Promoting them to 256 bytes in L2 was measured to
# cost 2 to 7 percent (docs/measured.md).
_L2_PROMOTION_128B: Final = 2


_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("allowed", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )

    def __init__(self, identifier: int, *, allowed: int) -> None:
        super().__init__(identifier, b"", allowed)


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


class CudaError(RuntimeError):
    """A driver call failed; the message names the call and the driver's words for it."""


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(name: str, status: int) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _library().cuGetErrorString(status, ctypes.byref(text))
    raise CudaError(f"{name} failed: {(text.value or b'unknown error').decode()} ({status})")


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_library(), name)(*arguments))


class Library:
    """The kernels of a cubin, for every device of its architecture.

    Raises CudaError if the driver does not take the code.
    """

    def __init__(self, cubin: bytes) -> None:
        self._cubin = cubin  # the driver may read it again when another device loads it
        self._handle = ctypes.c_void_p()
        _call("cuLibraryLoadData", ctypes.byref(self._handle), cubin, None, None, 0, None, None, 0)

    def kernel(self, name: str, *, shared_bytes: int, threads: int) -> Kernel:
        """The kernel of that name. shared_bytes: most dynamic shared memory of a block.
        threads: threads of a block."""
        handle = ctypes.c_void_p()
        _call("cuLibraryGetKernel", ctypes.byref(handle), self._handle, name.encode())
        return Kernel(self, handle, shared_bytes, threads)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a library."""

    library: Library
    _handle: ctypes.c_void_p
    shared_bytes: int
    threads: int

    def prepare(self, device: int) -> None:
        """Loads the code on a device and allows its shared memory. Not during capture."""
        function = ctypes.c_void_p()
        _call("cuKernelGetFunction", ctypes.byref(function), self._handle)
        _call(
            "cuKernelSetAttribute",
            _MAX_DYNAMIC_SHARED_BYTES,
            self.shared_bytes,
            self._handle,
            device,
        )

    def launch(
        self, blocks: int, stream: int, *arguments: ctypes.Structure, shared: int | None = None
    ) -> None:
        """Launches `blocks` blocks on a stream of the current device; arguments by value.

        shared: dynamic shared memory of a block, by default the most there may be.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(a) for a in arguments])
        # The kernel waits for the one before it by itself (griddepcontrol.wait), so that its blocks
        # may be placed while that one drains.
        attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, allowed=1)
        config = _LaunchConfig(
            blocks,
            1,
            1,
            self.threads,
            1,
            1,
            self.shared_bytes if shared is None else shared,
            stream,
            ctypes.pointer(attribute),
            1,
        )
        _call("cuLaunchKernelEx", ctypes.byref(config), self._handle, pointers, None)


def create_stream() -> int:
    """A new stream of the current device, of the highest priority, for torch.cuda.ExternalStream.

    torch hands out 32 pooled streams a device in turn, so any of them may come to somebody else;
    this one is the caller's alone. It does not wait for the default stream, and is never destroyed.

    The device's context must be current, as after an allocation there. Raises CudaError.
    """
    least, greatest = ctypes.c_int(), ctypes.c_int()
    _call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
    stream = ctypes.c_void_p()
    _call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, greatest)
    assert stream.value is not None
    return stream.value


def encode_tensor_map(
    pointer: int,
    dtype: str,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzle: int = 128,
) -> bytes:
    """A tiled TMA map with zeros outside the tensor.

    pointer: device address, 16-byte aligned.  dims, box: elements, innermost first.
    strides: elements, of dims[1:]; each a multiple of 8.  dtype: "bfloat16" or "float16".
    swizzle: 128 or 64 bytes.
    """
    rank = len(dims)
    out = (ctypes.c_char * (TENSOR_MAP_BYTES + 64))()
    at = (ctypes.addressof(out) + 63) & ~63
    _call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(at),
        _DATA_TYPES[dtype],
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * (rank - 1))(*[2 * s for s in strides]),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # no interleave
        _SWIZZLES[swizzle],
        _L2_PROMOTION_128B,
        0,  # zeros outside
    )
    return ctypes.string_at(at, TENSOR_MAP_BYTES)


def capture_id(stream: int) -> int | None:
    """A number for the graph capture in progress on a stream, None if there is none."""
    import torch

    # Also makes the device's context current in a thread that has not used it yet.
    if not torch.cuda.is_current_stream_capturing():
        return None
    status = ctypes.c_int()
    number = ctypes.c_uint64()
    # The older form of the call is in every driver that runs Hopper.
    library = _library()
    form = getattr(library, "cuStreamGetCaptureInfo_v2", None)
    if form is not None:
        result = form(
            ctypes.c_void_p(stream),
            ctypes.byref(status),
            ctypes.byref(number),
            None,
            None,
            None,
        )
    else:
        result = library.cuStreamGetCaptureInfo(
            ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number)
        )
    _check("cuStreamGetCaptureInfo", result)
    return number.value if status.value == 1 else None
