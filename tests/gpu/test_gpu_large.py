"""Tensors of more than 2^31 elements and 4 GiB: an offset of 32 bits would wrap."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import Case, check, expect, make, same_bits, shape, skewed

import weave_moe

pytestmark = pytest.mark.gpu

# Few and tiny experts, so that all there is to it is addresses: a few GB read and written a launch.
WIDE = shape(34_816, 16, 8, 1)
BLOCK, BLOCKS = 1_000, 62
EDGE = 2**31 // WIDE.hidden  # the row in which element 2^31 is: byte 2^32, of two bytes each
expect(WIDE, [1, BLOCK, BLOCK * BLOCKS])


def repeated(block: Case) -> Case:
    """The case's tokens over and over: what wraps would meet others, as no power of two is a whole
    number of rows."""
    x, _, _, weights, ids = block.args
    large = block.with_(
        x=x.repeat(BLOCKS, 1), weights=weights.repeat(BLOCKS, 1), ids=ids.repeat(BLOCKS, 1)
    )
    return large.with_(residual=block.options["residual"].repeat(BLOCKS, 1))


@pytest.mark.parametrize("slab", [None, 1 << 20], ids=["slabs", "one launch"])
def test_more_elements_than_31_bits_count(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, slab: int | None
) -> None:
    from weave_moe.backends import cuda

    free, _ = torch.cuda.mem_get_info(gpu)
    if free < 40 << 30:
        pytest.skip(f"needs 40 GiB of the device's memory, {free >> 30} are free")
    block = make(WIDE, BLOCK, routing=skewed, residual=True)
    want = check(block)
    large = repeated(block)
    rows, columns = large.args[0].shape
    assert rows * columns > 2**31
    assert rows - 300 > EDGE
    if slab is not None:  # rows in the launch's own buffers are as many
        monkeypatch.setattr(cuda, "SLAB_TOKENS", slab)
        monkeypatch.setattr(cuda, "SLAB_BYTES", 1 << 40)
    launches = -(-rows // cuda.slab_tokens(WIDE))
    assert (launches == 1) == (slab is not None)
    out = torch.full_like(large.args[0], float("nan"))
    got = large.run(out=out, workspace=weave_moe.Workspace())
    assert got.data_ptr() == out.data_ptr()
    # Rows that were held to the truth above, at every place that they are repeated at.
    for i in range(BLOCKS):
        assert same_bits(got[i * BLOCK : (i + 1) * BLOCK], want), f"rows from {i * BLOCK} on"
    # In place, as a block's addition is.
    into = large.options["residual"]
    large.run(out=into, workspace=weave_moe.Workspace())
    for i in range(BLOCKS):
        assert same_bits(into[i * BLOCK : (i + 1) * BLOCK], want), f"rows from {i * BLOCK} on"


@pytest.mark.parametrize("element", [2**30, 2**31], ids=["byte 2^31", "element 2^31"])
def test_tokens_on_either_side_of_an_edge(gpu: torch.device, element: int) -> None:
    # Views into the middle of a large tensor, and what lies beside them.
    free, _ = torch.cuda.mem_get_info(gpu)
    if free < 12 << 30:
        pytest.skip(f"needs 12 GiB of the device's memory, {free >> 30} are free")
    case = make(WIDE, 1, residual=True)
    want = check(case)
    rows = element // WIDE.hidden + 3
    x = torch.full((rows, WIDE.hidden), float("nan"), dtype=want.dtype, device=gpu)
    for row in (rows - 4, rows - 3, rows - 2, rows - 1):
        x[row] = case.args[0][0]
        assert same_bits(case.with_(x=x[row : row + 1]).run(), want), row
        x[row] = float("nan")
        assert same_bits(case.run(out=x[row : row + 1]), want), row
        assert bool(x[row - 1].isnan().all())
        x[row] = float("nan")
