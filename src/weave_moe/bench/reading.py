"""A kernel that reads memory and does nothing else; apart, because it needs triton to import."""

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

__all__ = ["read"]


# Plain, as triton's compiler reads it: no annotations besides constexpr.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def read(x, sink, block: tl.constexpr, steps: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program p reads elements p * block * steps and on; x: bf16, sink: one fp32 element."""
    start = tl.program_id(0).to(tl.int64) * block * steps
    total = tl.zeros((block,), tl.float32)
    for i in range(steps):
        total += tl.load(x + start + i * block + tl.arange(0, block)).to(tl.float32)
    if tl.sum(total) == 12345.678:  # never: keeps the loads
        tl.store(sink, 1.0)
