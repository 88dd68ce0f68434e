"""A kernel that reads memory and does nothing else; apart, because it needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read(x, sink, block: tl.constexpr, steps: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * block * steps
    total = tl.zeros((block,), tl.float32)
    for i in range(steps):
        total += tl.load(x + start + i * block + tl.arange(0, block)).to(tl.float32)
    if tl.sum(total) == 12345.678:  # never: keeps the loads
        tl.store(sink, 1.0)
