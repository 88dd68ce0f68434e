"""Another kernel beside ours: it holds a number of SMs, idle or reading memory, until told to stop.

For tests and benchmarks of what a launch does that does not get the whole GPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch
from torch import Tensor

from ..runtime import nvrtc
from ..runtime.driver import Kernel, Library, create_stream

__all__ = ["LIMIT_SECONDS", "held"]

LIMIT_SECONDS: Final = 8.0
"""A neighbour leaves by itself after this, so that a launch that waits for its SMs fails, and ends.
"""

_SHARED_BYTES: Final = 200 * 1024  # one block an SM, and no room beside it for a block of experts
_BYTES: Final = 1000  # of the host's words, after one a block: one a block, MiB read

_SOURCE: Final = r"""
struct Args {
  volatile unsigned int* words;  // the host's: reading it again and again slows the whole GPU
  const volatile unsigned int* stop;  // the device's
  unsigned long long limit_ns;
  const uint4* buffer;  // null: read nothing
  unsigned long long vectors;
};
extern "C" __global__ void __launch_bounds__(512) neighbour(const __grid_constant__ Args a) {
  unsigned long long begin, now, at = (unsigned long long)blockIdx.x * a.vectors / gridDim.x;
  unsigned int mebibytes = 0, sum = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  if (threadIdx.x == 0) a.words[blockIdx.x] = 1;
  __threadfence_system();
  __shared__ unsigned int leave;
  for (;;) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (threadIdx.x == 0) leave = *a.stop || now - begin >= a.limit_ns;
    __syncthreads();
    if (leave) break;
    if (a.buffer) {  // 1 MiB, then the next one
      for (unsigned int i = threadIdx.x; i < 65536; i += 4 * blockDim.x) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned long long from = at + i + j * blockDim.x;
          v[j] = __ldcs(a.buffer + (from < a.vectors ? from : from - a.vectors));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
      }
      at += 65536;
      if (at >= a.vectors) at -= a.vectors;
      ++mebibytes;
    } else {
      __nanosleep(1000);
    }
    __syncthreads();
  }
  if (sum == 0x12345678) a.words[blockIdx.x] = 3;  // keeps the loads
  if (threadIdx.x == 0) {
    a.words[1000 + blockIdx.x] = mebibytes;
    if (!*a.stop) a.words[blockIdx.x] = 2;  // left by itself
  }
  __threadfence_system();
}
"""


class _Args(ctypes.Structure):
    _fields_ = (
        ("words", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
        ("buffer", ctypes.c_void_p),
        ("vectors", ctypes.c_uint64),
    )


@cache
def _kernel(device: int, threads: int) -> Kernel:
    cubin, _ = nvrtc.compile_cubin(_SOURCE, {}, [])
    kernel = Library(cubin).kernel("neighbour", shared_bytes=_SHARED_BYTES, threads=threads)
    kernel.prepare(device)
    return kernel


class _Channel:
    """What a device's neighbour and the host tell each other by; made once, never freed, because
    freeing pinned memory waits for the device.

    The two streams are of no pool: work that came to be sent to one of them would wait until the
    neighbour has left, or keep it from being told to.
    """

    def __init__(self, device: int) -> None:
        self.words = torch.zeros(2048, dtype=torch.int32, pin_memory=True)
        self.values = torch.tensor([0, 1], dtype=torch.int32).pin_memory()
        with torch.cuda.device(device):
            self.stop = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
            torch.cuda.synchronize()
            self.stream, self.stopping = (
                torch.cuda.ExternalStream(create_stream(), device)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )

    def set_stop(self, value: int) -> None:
        """By a copy: it needs no SM."""
        with torch.cuda.stream(self.stopping):
            self.stop.copy_(self.values[value : value + 1], non_blocking=True)
        self.stopping.synchronize()


@cache
def _channel(device: int) -> _Channel:
    return _Channel(device)


@contextmanager
def held(
    sms: int,
    device: torch.device,
    *,
    reads: Tensor | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> Iterator[list[float]]:
    """Holds `sms` SMs while the block runs; with `reads`, they read that tensor again and again.

    reads: on the device, its bytes a multiple of 1 MiB.  limit_seconds: when it leaves by itself.
    The list that is yielded gets, at the end, the TB/s that were read.

    Warm up what the block calls: loading code may wait for the whole device. Streams that share a
    queue of the GPU wait for each other: where there are many, CUDA_DEVICE_MAX_CONNECTIONS should
    be 32 from before CUDA starts. Raises ValueError for a device without a number or `reads` of
    another size, RuntimeError if the neighbour did not get its SMs or had to leave by itself.
    """
    if device.index is None:
        raise ValueError(f"device must have an index, got {device}")
    size = 0 if reads is None else reads.numel() * reads.element_size()
    if size % (1 << 20):
        raise ValueError(f"reads must be a multiple of 1 MiB, got {size} bytes")
    kernel = _kernel(device.index, 32 if reads is None else 512)
    channel, rate = _channel(device.index), [0.0]
    words = channel.words
    started = words[:sms]
    words.zero_()
    channel.set_stop(0)
    begin = time.monotonic()
    if sms:
        pointer = None if reads is None else reads.data_ptr()
        args = _Args(
            words.data_ptr(),
            channel.stop.data_ptr(),
            int(limit_seconds * 1e9),
            pointer,
            size // 16,
        )
        with torch.cuda.device(device.index):
            kernel.launch(sms, channel.stream.cuda_stream, args)
        deadline = begin + 5
        while int(started.min()) == 0:
            if time.monotonic() > deadline:
                channel.set_stop(1)
                raise RuntimeError(f"the neighbour did not get its {sms} SMs")
    begin = time.monotonic()
    try:
        yield rate
    finally:
        channel.set_stop(1)
        channel.stream.synchronize()
    mebibytes = int(words[_BYTES : _BYTES + sms].sum())
    rate[0] = mebibytes * 2**20 / (time.monotonic() - begin) / 1e12
    if int((started == 2).sum()):
        raise RuntimeError(
            f"the block ran for longer than {limit_seconds:g} s: the neighbour had left by itself"
        )
