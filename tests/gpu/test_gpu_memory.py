"""What is written, and what is read: poison before, around and behind every buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_cases import (
    SMALL,
    TARGET,
    Guarded,
    Routing,
    assert_right,
    check,
    expect,
    holes,
    in_parts,
    make,
    poison_scratch,
    same_bits,
    shape,
    skewed,
    uniform,
)
from layer_cases import check_layer, expect_layers, make_layer
from layer_tables import LAYERS

import weave_moe
from weave_moe.runtime.buffers import Buffers
from weave_moe.shapes import LayerShape

pytestmark = pytest.mark.gpu

TOKENS = (1, 5, 12, 40, 200, 1100)
expect(SMALL, TOKENS)
ODD = shape(200, 88, 16, 4)
expect(ODD, TOKENS)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("s", [SMALL, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("routing", [uniform, holes])
def test_out_is_written_whole_and_nothing_beside_it(
    s: LayerShape, tokens: int, routing: Routing
) -> None:
    case = make(s, tokens, routing=routing)
    want = check(case)
    guarded = Guarded(tokens, s.hidden, want.dtype)
    got = case.run(out=guarded.tensor)
    assert got.data_ptr() == guarded.tensor.data_ptr()
    assert same_bits(got, want)
    guarded.check()


@pytest.mark.parametrize("s", [SMALL, ODD], ids=["even", "odd"])
def test_nothing_is_read_that_the_launch_did_not_write(gpu: torch.device, s: LayerShape) -> None:
    cases = [
        make(s, tokens, routing=routing)
        for tokens in (1100, 200, 40, 12, 1, 5, 70)
        for routing in (uniform, skewed, holes)
    ]
    want = [check(case) for case in cases]
    for case, expected in zip(cases, want, strict=True):
        # Padding rows of every earlier plan, in all buffers, become NaN.
        assert poison_scratch() >= 2
        assert same_bits(case.run(), expected), case.tokens


def test_a_poisoned_allocator(gpu: torch.device) -> None:
    # A fresh stream gets fresh buffers, out of blocks that were full of NaN.
    case = make(SMALL, 200, routing=holes)
    want = check(case)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        blocks = [
            torch.full((1 << n,), 255, dtype=torch.uint8, device=gpu)
            for n in range(9, 26)
            for _ in (0, 1)
        ]
        del blocks
        for tokens in (1, 40, 200, 1100):
            assert_right(make(SMALL, tokens).run(), make(SMALL, tokens))
        got = case.run()
    stream.synchronize()
    assert same_bits(got, want)


def test_inputs_are_left_as_they_are() -> None:
    for tokens in TOKENS:
        case = make(
            SMALL,
            tokens,
            biases=False,
            num_valid_tokens=torch.tensor(max(tokens - 1, 1), device=TARGET.device),
        )
        before = [a.clone() for a in case.args]
        case.run()
        for was, now in zip(before, case.args, strict=True):
            assert torch.equal(was, now)


def test_inputs_between_nan(gpu: torch.device) -> None:
    # Reading a row too many, or a column, would bring NaN into a sum.
    for s in (SMALL, ODD):
        for tokens in TOKENS:
            case = make(s, tokens)
            want = check(case)
            replaced = {}
            for name, tensor in zip(("x", "w13", "w2", "weights"), case.args, strict=False):
                flat = Guarded(1, tensor.numel(), tensor.dtype)
                flat._whole.fill_(float("nan"))
                view = flat.tensor.view(tensor.shape)
                view.copy_(tensor)
                replaced[name] = view
            assert same_bits(case.with_(**replaced).run(), want), (s, tokens)


def test_buffers_grow_without_losing_a_launch(gpu: torch.device) -> None:
    # Launches of rising size in one go: each outgrows the buffers of those still running.
    cases = [make(SMALL, tokens) for tokens in (1, 4, 20, 70, 300, 900, 1100, 2000)]
    stream = torch.cuda.Stream(gpu)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        results = [case.run() for case in cases]
    stream.synchronize()
    for got, case in zip(results, cases, strict=True):
        assert_right(got, case)


BAND = 1 << 18
"""Bytes: more than a tile's rows of any layer here."""


class Banded:
    """Every buffer of a launch made from here on lies between bands; `check` finds writes there."""

    def __init__(self, patch: pytest.MonkeyPatch, fill: int) -> None:
        self.fill = fill
        self.made: list[tuple[str, torch.Tensor, int]] = []

        def renew(buffers: Buffers, name: str, size: int, *, zeroed: bool) -> None:
            whole = torch.full((2 * BAND + size,), fill, dtype=torch.uint8, device=buffers.device)
            inside = whole[BAND : BAND + size]
            if zeroed:
                inside.zero_()
            setattr(buffers, name, inside)
            buffers._maps.clear()
            self.made.append((name, whole, size))

        patch.setattr(Buffers, "_renew", renew)

    @property
    def names(self) -> set[str]:
        return {name for name, _, size in self.made if size}

    def check(self) -> None:
        for name, whole, size in self.made:
            assert bool((whole[:BAND] == self.fill).all()), f"written before the start of {name}"
            assert bool((whole[BAND + size :] == self.fill).all()), f"written behind {name}"
        self.made.clear()


@pytest.fixture(params=[0xA5, 0xFF], ids=["small numbers", "NaN"])
def banded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Banded:
    # Either value would stay if the kernel wrote the same. NaN shows what is read there, as well.
    return Banded(monkeypatch, request.param)


OFTEN = (*TOKENS, 64, 257)
expect(SMALL, OFTEN)
expect(ODD, OFTEN)
FP16 = shape(512, 192, 16, 4, "float16")
expect(FP16, OFTEN)


@pytest.mark.parametrize("tokens", OFTEN)
@pytest.mark.parametrize("s", [SMALL, ODD, FP16], ids=["even", "odd", "fp16"])
def test_nothing_is_written_beside_the_buffers(
    gpu: torch.device, banded: Banded, s: LayerShape, tokens: int
) -> None:
    for routing in (uniform, skewed, holes):
        case = make(s, tokens, routing=routing)
        # Buffers of their own, just as large as this call needs.
        check(case, workspace=weave_moe.Workspace())
        kind = {"plan"} if tokens > 256 else set()
        assert banded.names >= {"_zeroed", "h", "rows"} | kind
        banded.check()


expect(SMALL, (1, 40), parts=2)


@pytest.mark.parametrize("tokens", [1, 40])
def test_nothing_is_written_beside_the_sums_of_k_ranges(
    gpu: torch.device, banded: Banded, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    in_parts(monkeypatch, 3, 2)
    check(make(SMALL, tokens, routing=skewed), workspace=weave_moe.Workspace())
    assert "sums" in banded.names
    banded.check()


BANDED_LAYERS = {
    name: replace(LAYERS[name], tokens=(3, 40, 300)) for name in ("qwen", "fp32 router")
}
expect_layers(BANDED_LAYERS.values())


@pytest.mark.parametrize("tokens", [3, 40, 300])
@pytest.mark.parametrize("name", BANDED_LAYERS)
def test_nothing_is_written_beside_the_buffers_of_a_layer(
    gpu: torch.device, banded: Banded, name: str, tokens: int
) -> None:
    check_layer(make_layer(BANDED_LAYERS[name], tokens), workspace=weave_moe.Workspace())
    assert banded.names >= ({"router", "plan"} if tokens > 256 else {"_zeroed"})
    banded.check()


def test_slabs_and_padding_write_nothing_beside_the_buffers(
    gpu: torch.device, banded: Banded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weave_moe.backends import cuda

    monkeypatch.setattr(cuda, "SLAB_TOKENS", 600)
    for valid in (5, 256, 257, 1000):
        count = torch.tensor(valid, device=gpu)
        check(make(SMALL, 1100, num_valid_tokens=count), workspace=weave_moe.Workspace())
        banded.check()
