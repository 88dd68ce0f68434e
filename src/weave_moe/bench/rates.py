"""What a GPU does at best, measured: the ceilings that times are held against."""

from __future__ import annotations

from functools import partial

import torch

from .cells import Rates

__all__ = ["measure_rates"]


def measure_rates(dtype: torch.dtype = torch.bfloat16) -> Rates:
    """The rates of the current GPU, now: a plain kernel that reads 2 GiB, and an 8192^3 product.

    dtype: of the product. Needs triton, which torch's CUDA builds bring.
    """
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]

    from .reading import read

    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    sink = torch.zeros(1, device="cuda")
    best = 0.0
    for block, steps in ((8192, 4), (8192, 16), (16384, 8)):
        kernel = read[(x.numel() // (block * steps),)]
        ms = triton.testing.do_bench(
            partial(kernel, x, sink, block=block, steps=steps, num_warps=8), return_mode="median"
        )
        best = max(best, x.numel() * 2 / ms / 1e9)
    del x
    a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    b = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    ms = triton.testing.do_bench(lambda: a @ b.T, return_mode="median")
    return Rates(best, 2 * 8192**3 / ms / 1e9)
