"""A neighbour: a kernel that holds a number of SMs for as long as it is told to."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from weave_moe.runtime import nvrtc
from weave_moe.runtime.driver import Kernel

LIMIT_SECONDS = 8.0
"""A hog leaves by itself after this, so that a launch that waits for its SMs fails, and ends."""

_SHARED_BYTES = 200 * 1024  # one block an SM, and no room beside it for a block of experts

_SOURCE = r"""
struct Args {
  volatile unsigned int* started;
  volatile unsigned int* stop;
  unsigned long long limit_ns;
};
extern "C" __global__ void hog(const __grid_constant__ Args a) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  a.started[blockIdx.x] = 1;
  __threadfence_system();
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (!*a.stop && now - begin < a.limit_ns);
  if (!*a.stop) a.started[blockIdx.x] = 2;  // left by itself
  __threadfence_system();
}
"""


class _Args(ctypes.Structure):
    _fields_ = (
        ("started", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
    )


@cache
def _kernel(device: int) -> Kernel:
    cubin, _ = nvrtc.compile_cubin(_SOURCE, {}, [])
    kernel = Kernel(cubin, "hog", shared_bytes=_SHARED_BYTES, threads=32)
    kernel.prepare(device)
    return kernel


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _words(device: int) -> torch.Tensor:
    # Pinned memory that is never freed: freeing it would wait for the device.
    return torch.zeros(1024, dtype=torch.int32, pin_memory=True)


@contextmanager
def held(sms: int, device: torch.device) -> Iterator[None]:
    """Holds `sms` SMs while the block runs. AssertionError if a hog had to leave by itself.

    Warm up what the block calls: loading code may wait for the whole device.
    """
    assert device.index is not None
    kernel, stream = _kernel(device.index), _stream(device.index)
    words = _words(device.index)
    started = words[:sms]
    words.zero_()
    if sms:
        args = _Args(words.data_ptr(), words.data_ptr() + 4 * 1000, int(LIMIT_SECONDS * 1e9))
        kernel.launch(sms, stream.cuda_stream, args)
        deadline = time.monotonic() + 5
        while int(started.min()) == 0:
            assert time.monotonic() < deadline, "the hog did not get its SMs"
    try:
        yield
    finally:
        words[1000] = 1
        stream.synchronize()
    assert int((started == 2).sum()) == 0, "the launch ended only after the hog had left"
