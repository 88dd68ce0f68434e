"""Tensor maps of launches on a GPU: what their boxes hold, and when they are made anew."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.launches import Recorder, bf16_case, layer_of
from generators import Case
from weave_moe.runtime import driver
from weave_moe.schedule.granularity import FEW_TOKENS, GATHER_WIDTH


def box_of(
    flat: Tensor,
    found: tuple[Any, ...],
    block: int,
    tile_k: int,
    *,
    packed: bool,
    first: int = 0,
) -> list[list[int | None]]:
    """The rows of a tile that a map's boxes hold, in order, `tile_k` columns from `first` on: what
    the hardware does with dims, strides and box; None where it fills in zeros."""
    _, _, dims, strides, box, _ = found
    steps = (1, *strides)
    assert not packed or first % 64 == 0
    depth = 2 if packed else None  # the dimension of blocks of 64 columns

    def element(at: list[int]) -> int | None:
        if any(i >= d for i, d in zip(at, dims, strict=True)):
            return None
        return int(flat[sum(i * s for i, s in zip(at, steps, strict=True))])

    outer = [i for i in range(1, len(dims)) if i != depth]
    rows = []
    # Rows run through the dimensions but the columns', the first of them fastest.
    for number in range(math.prod(box[i] for i in outer)):
        index, left = [0] * len(dims), number
        for i in outer:
            index[i], left = left % box[i], left // box[i]
        index[-1] += block
        row = []
        for column in range(first, first + tile_k):
            at = list(index)
            at[0] = column % 64 if packed else column
            if depth is not None:
                at[depth] = column // 64
            row.append(element(at))
        rows.append(row)
    return rows


def place_of(row: int, kind: str) -> tuple[int, int]:
    """Half and element of a row of a tile of w13: eight of each half in turn."""
    return (0, row) if kind == "plain" else (row // 8 % 2, row // 16 * 8 + row % 8)


class TestMaps:
    """Tensor maps are made once for a place, and again when anything of it changes."""

    def test_equal_calls_share_them(self, recorder: Recorder) -> None:
        case = bf16_case()
        recorder.run(case)
        made = len(recorder.maps)
        assert made > 2
        recorder.run(case)
        assert len(recorder.maps) == made

    def test_moved_weights_get_their_own(self, recorder: Recorder) -> None:
        case = bf16_case()
        (before,) = recorder.run(case)
        for name in ("w13", "w2"):
            moved = case.with_(**{name: getattr(case, name).clone()})
            (after,) = recorder.run(moved)
            assert recorder.maps[-1][0] == moved.w2.data_ptr() or name == "w13"
            assert after.maps[:256] != before.maps[:256]

    def test_other_sizes_at_the_same_place_get_their_own(self, recorder: Recorder) -> None:
        def weights_of_maps(case: Case) -> bytes:
            return recorder.run(case)[0].maps[:256]

        one = bf16_case(hidden=64, intermediate=128, experts=2)
        # The same memory, read as another layer.
        other = bf16_case(hidden=128, intermediate=64, experts=2)
        w13 = one.w13.view(2, 128, 128)
        w2 = one.w2.view(2, 128, 64)
        assert weights_of_maps(one) != weights_of_maps(other.with_(w13=w13, w2=w2))
        half = one.with_(
            w13=one.w13.view(torch.float16),
            w2=one.w2.view(torch.float16),
            x=one.x.to(torch.float16),
        )
        assert weights_of_maps(one) != weights_of_maps(half)

    @pytest.mark.parametrize("hidden", [192, 72])
    @pytest.mark.parametrize("kind", ["gated", "interleaved", "plain"])
    @pytest.mark.parametrize("tokens", [1, 40, FEW_TOKENS + 1])
    def test_a_box_holds_the_rows_of_its_tile(
        self, recorder: Recorder, kind: str, hidden: int, tokens: int
    ) -> None:
        inter, experts = 88, 3
        case = bf16_case(
            tokens,
            hidden=hidden,
            intermediate=inter,
            experts=experts,
            top_k=2,
            activation="relu2" if kind == "plain" else "silu",
            interleaved=kind == "interleaved",
        )
        w13 = torch.arange(case.w13.numel()).view(case.w13.shape)  # each element is its own number
        (launch,) = recorder.run(case)
        p, tile_m, tile_k = launch.p, launch.config.tile_m, launch.config.tile_k
        w13_map = next(m for m in recorder.maps if m[0] == case.w13.data_ptr())
        elements = tile_m if kind == "plain" else tile_m // 2
        assert p.chunks_up == -(-inter // elements)
        for expert in range(experts):
            for chunk in range(p.chunks_up):
                block = expert * p.up_blocks + chunk * elements // 8
                got = box_of(w13.flatten(), w13_map, block, tile_k, packed=hidden % 64 == 0)
                for row, held in enumerate(got):
                    half, element = place_of(row, kind)
                    element += chunk * elements
                    if element >= inter:
                        continue  # a neighbour's rows, or none: dropped
                    at = {
                        "plain": element,
                        "gated": element + half * inter,
                        "interleaved": 2 * element + half,
                    }[kind]
                    want = w13[expert, at, :tile_k].tolist()
                    assert held == want + [None] * (tile_k - len(want))

    @pytest.mark.parametrize(
        ("hidden", "inter", "shared", "kind"),
        [
            # Slices that are all of it, two, three, the half of one, a part of two: packed.
            *((64, 128, 128, "gated"), (72, 64, 128, "plain"), (64, 64, 192, "gated")),
            *((64, 128, 64, "plain"), (64, 128, 192, "interleaved")),
            # The same, unpacked: I is no multiple of 64, or Is is none.
            *((72, 88, 88, "gated"), (64, 72, 144, "interleaved"), (64, 80, 40, "gated")),
            *((72, 88, 200, "plain"), (64, 128, 8, "gated"), (64, 64, 200, "gated")),
        ],
    )
    @pytest.mark.parametrize("tokens", [1, 40, FEW_TOKENS + 1])
    def test_boxes_of_shared_experts(
        self, recorder: Recorder, hidden: int, inter: int, shared: int, kind: str, tokens: int
    ) -> None:
        case = bf16_case(
            tokens,
            hidden=hidden,
            intermediate=inter,
            experts=3,
            activation="relu2" if kind == "plain" else "silu",
            interleaved=kind == "interleaved",  # the routed experts, and they alone
        )
        call = layer_of(case, shared=shared)
        assert call.shared is not None
        weights = call.shared.w13, call.shared.w2
        (launch,), _, _ = recorder.layer(call)
        p, config = launch.p, launch.config
        tile_m, tile_k = config.tile_m, config.tile_k
        slices = p.experts - p.routed
        assert (slices - 1) * inter < shared <= slices * inter
        assert config.packed_down == (inter % 64 == shared % 64 == 0)
        (map13, map2), (numbers13, numbers2) = (
            [next(m for m in recorder.maps if m[0] == w.data_ptr()) for w in weights],
            # Each element is its own number.
            [torch.arange(w.numel()).view(w.shape) for w in weights],
        )
        assert recorder.maps.index(map13) + 1 == recorder.maps.index(map2)
        elements = tile_m if kind == "plain" else tile_m // 2
        ran_over, read_nothing = 0, 0
        for number in range(slices):
            for chunk in range(p.chunks_up):
                block = (number * inter + chunk * elements) // 8  # device/producer.h
                got = box_of(numbers13.flatten(), map13, block, tile_k, packed=config.packed_up)
                for row, held in enumerate(got):
                    half, element = place_of(row, kind)
                    element += chunk * elements
                    if element >= inter:
                        ran_over += 1
                        continue  # the next slice's rows: dropped
                    element += number * inter
                    want = [None] * tile_k
                    if element < shared:
                        row_of = numbers13[element + half * shared, :tile_k].tolist()
                        want = row_of + [None] * (tile_k - len(row_of))
                    else:
                        read_nothing += 1
                    assert held == want
            for chunk in range(p.chunks_down):
                for column in range(0, inter, tile_k):
                    first = number * inter + column
                    got = box_of(
                        numbers2.flatten(),
                        map2,
                        chunk * tile_m // 8,
                        tile_k,
                        packed=config.packed_down,
                        first=first,
                    )
                    for row, held in enumerate(got):
                        want = [None] * tile_k
                        if chunk * tile_m + row < hidden:
                            row_of = numbers2[chunk * tile_m + row, first : first + tile_k]
                            want[: len(row_of)] = row_of.tolist()
                        assert held == want
        # The rows that a short slice lacks are zeros, and so are its columns: h and w2 alike.
        halves = 1 if kind == "plain" else 2
        assert read_nothing == halves * (slices * inter - shared)
        assert ran_over == halves * slices * (p.chunks_up * elements - inter)

    @pytest.mark.parametrize("shared", [128, 200])
    @pytest.mark.parametrize("tokens", [5, FEW_TOKENS + 1])
    def test_h_is_zero_past_a_slice(self, recorder: Recorder, tokens: int, shared: int) -> None:
        # The last stage of a slice of w2 goes on into the next one.
        call = layer_of(bf16_case(tokens, intermediate=64), shared=shared)
        (launch,), _, _ = recorder.layer(call)
        packed = launch.config.packed_down
        assert packed == (shared == 128)
        assert launch.config.tile_k > 64 or tokens > FEW_TOKENS
        of_h = [m for m in recorder.maps if m[0] == launch.p.h and m[4][0] == 64]
        assert len(of_h) == launch.config.width_cap // 8
        for _, _, dims, *_ in of_h:
            assert (64 * dims[2] if packed else dims[0]) == launch.p.intermediate

    def test_shared_weights_that_moved_get_their_own(self, recorder: Recorder) -> None:
        call = layer_of(bf16_case(), shared=128)
        shared = call.shared
        assert shared is not None
        (before,), _, _ = recorder.layer(call)
        made = len(recorder.maps)
        (again,), _, _ = recorder.layer(call)
        assert len(recorder.maps) == made
        assert again.maps == before.maps
        for name in ("w13", "w2"):
            moved = replace(shared, **{name: getattr(shared, name).clone()})
            (after,), _, _ = recorder.layer(replace(call, shared=moved))
            assert after.maps[256:512] != before.maps[256:512]
            assert after.maps[:256] == before.maps[:256]

    def test_rows_in_buffers_that_grew_get_their_own(self, recorder: Recorder) -> None:
        small, large = bf16_case(3), bf16_case(500)
        recorder.run(small)
        old = recorder.buffers.h.data_ptr(), recorder.buffers.h
        recorder.run(large)
        assert recorder.buffers.h.data_ptr() != old[0]
        recorder.run(small)
        assert any(m[0] == recorder.buffers.h.data_ptr() for m in recorder.maps)

    @pytest.mark.parametrize("tokens", [40, FEW_TOKENS + 1])
    @pytest.mark.parametrize("sizes", [(64, 64), (72, 64), (64, 72), (8, 8), (2880, 176)])
    def test_they_stay_within_their_tensors(
        self, recorder: Recorder, sizes: tuple[int, int], tokens: int
    ) -> None:
        case = bf16_case(tokens, hidden=sizes[0], intermediate=sizes[1], experts=3)
        recorder.run(case)
        held = recorder.buffers
        tensors = (case.w13, case.w2, held.h, held.rows, held.gathered)
        assert recorder.maps
        for pointer, _, dims, strides, box, swizzle in recorder.maps:
            tensor = next(t for t in tensors if t.data_ptr() == pointer)
            last = sum((d - 1) * s for d, s in zip(dims, (1, *strides), strict=True))
            assert 2 * (last + 1) <= tensor.numel() * tensor.element_size()
            # What the hardware asks of a map.
            assert all(2 * s % 16 == 0 for s in strides)
            assert all(1 <= b <= 256 for b in box)
            assert 2 * box[0] == swizzle
            assert len(dims) == len(box) == len(strides) + 1 <= 5

    @pytest.mark.parametrize("shared", [None, 0, 256])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("tokens", [5, 40, FEW_TOKENS + 1])
    def test_a_launch_has_those_that_the_kernel_is_compiled_for(
        self, recorder: Recorder, tokens: int, dtype: torch.dtype, shared: int | None
    ) -> None:
        case = bf16_case(tokens, hidden=192, intermediate=128, dtype=dtype)
        call = layer_of(case, shared=shared or 0)
        (launch,) = recorder.run(case) if shared is None else recorder.layer(call)[0]
        config, held = launch.config, recorder.buffers
        size = driver.TENSOR_MAP_BYTES
        bits = [launch.maps[at : at + size] for at in range(0, len(launch.maps), size)]
        made = [
            recorder.maps[n - 1] if n else None for n in (int.from_bytes(b, "little") for b in bits)
        ]
        weights: list[Tensor | None] = [case.w13, case.w2, None, None]
        if call.shared is not None:
            weights[2:] = call.shared.w13, call.shared.w2
        for weight in weights:
            found, *made = made
            assert (found and found[0]) == (None if weight is None else weight.data_ptr())
        rest = made
        by_width = config.width_cap // 8
        h, rest = rest[:by_width], rest[by_width:]
        gathers = config.many or config.width_cap > GATHER_WIDTH
        x, rest = (rest[:by_width], rest[by_width:]) if gathers else ([], rest[1:])
        for maps, tensor in ((h, held.h), (x, held.gathered)):
            for number, found in enumerate(maps):
                assert found is not None
                assert found[0] == tensor.data_ptr()
                # Columns of a swizzled row, rows of a group as wide, and the stage's other columns.
                assert found[4] == (64, 8 * (number + 1), config.tile_k // 64)
                assert found[5] == 128
        if not config.many:
            assert rest == [None, None]
            return
        stores, of_rows = rest[:4], rest[4:]
        # 32 elements of h or 64 of down rows, of a warpgroup's part of a slot's tokens.
        assert [s and (s[0], s[4], s[5]) for s in stores] == [
            (held.h.data_ptr(), (32, count), 64) for count in (64, 32, 16, 8)
        ]
        if dtype == torch.float16:
            assert of_rows == [None] * 4, "rows of fp32 are stored without"
            return
        assert [s and (s[0], s[4], s[5]) for s in of_rows] == [
            (held.rows.data_ptr(), (64, count), 128) for count in (64, 32, 16, 8)
        ]
