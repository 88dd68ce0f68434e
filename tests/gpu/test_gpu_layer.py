"""Whole layers: router, experts and shared experts in one call.

The rows of `layer_tables` say what is run, `layer_cases` says what is right. All that does not
concern the GPU itself also runs with `--on host` and `--on reference`, in smaller sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_cases import POLICIES, SMALL, TARGET, Guarded, expect, poison_scratch, same_bits
from layer_cases import (
    LayerCase,
    assert_result,
    assert_routing,
    cases_of,
    check_layer,
    expect_layers,
    make_layer,
    ordered_sums,
)
from layer_tables import (
    DENSE,
    EACH,
    FEW,
    LAYERS,
    MANY,
    NUMBERS,
    SHORT,
    SOME,
    WHOLE,
    E,
    base,
)
from torch import Tensor

import weave_moe
from weave_moe import RoutingConfig, SharedExperts

pytestmark = pytest.mark.gpu

NAN = float("nan")

expect_layers([*LAYERS.values(), *NUMBERS.values(), DENSE])
expect(SMALL, EACH)


@pytest.mark.parametrize(("name", "tokens"), cases_of(LAYERS))
def test_layers(name: str, tokens: int) -> None:
    check_layer(make_layer(LAYERS[name], tokens))


@pytest.mark.parametrize(("name", "tokens"), cases_of(NUMBERS))
def test_numbers_of_experts_and_slots(name: str, tokens: int) -> None:
    check_layer(make_layer(NUMBERS[name], tokens), certain_share=0.5 if tokens > 9 else 0.0)


# Equal bits.


@pytest.mark.parametrize(
    ("name", "tokens"), [*cases_of(SHORT, EACH, calls=4), *cases_of({"dense": DENSE}, calls=4)]
)
def test_policies_give_equal_bits(name: str, tokens: int) -> None:
    case = make_layer(SHORT[name], tokens)
    want = check_layer(case)
    for policy in POLICIES:
        for got, expected in zip(case.routed(policy=policy), want, strict=True):
            assert same_bits(got, expected), policy
        # Not asking for the routing changes nothing.
        assert same_bits(case.run(policy=policy), want[0]), policy


@pytest.mark.parametrize("tokens", [t for _, t in cases_of({"": DENSE}, calls=4)])
def test_fifty_calls_give_equal_bits(tokens: int) -> None:
    case = make_layer(DENSE, tokens)
    want = check_layer(case)
    results = [case.routed() for _ in range(50)]
    for which, expected in enumerate(want):
        assert sum(same_bits(got[which], expected) for got in results) == 50


@pytest.mark.parametrize(
    ("name", "most"), [*((name, 320) for name in WHOLE), ("qwen", 1100), ("shared 384 gated", 1100)]
)
@ordered_sums
def test_a_tokens_bits_do_not_depend_on_its_batch(name: str, most: int) -> None:
    # The batches run in different kernels. Elsewhere torch multiplies by the router's weight, and
    # in which order it sums depends on the batch: there the sums must be exact.
    most = most if TARGET.on_gpu else 270
    whole = make_layer(LAYERS[name], most, exact=not TARGET.on_gpu)
    want = whole.routed()
    for tokens in (1, 2, 7, 33, 200, 256, 257, 600):
        for start in (0, 17, most - tokens):
            if start + tokens <= most:
                chosen = slice(start, start + tokens)
                for got, expected in zip(whole.rows(chosen).routed(), want, strict=True):
                    assert same_bits(got, expected[chosen]), (tokens, start)


@ordered_sums
def test_a_tokens_bits_do_not_depend_on_its_place() -> None:
    case = make_layer(DENSE, 200, exact=not TARGET.on_gpu)
    want = check_layer(case)
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        order = torch.randperm(200, generator=g).to(TARGET.device)
        for got, expected in zip(case.rows(order).routed(), want, strict=True):
            assert same_bits(got, expected[order])


@pytest.mark.parametrize("tokens", EACH)
def test_routing_then_experts_is_the_layer(tokens: int) -> None:
    # What is returned is what was used: the experts alone, given it, give the same bits.
    for name in ("qwen", "mapped, alone"):
        case = make_layer(LAYERS[name], tokens)
        y, weights, ids = check_layer(case)
        alone = weave_moe.fused_experts(
            *(case.x, case.w13, case.w2, weights, ids),
            expert_map=case.options.get("expert_map"),
            backend=TARGET.backend,
        )
        assert same_bits(y, alone), name


# Padding, foreign experts, memory.


@pytest.mark.parametrize("count_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("name", "tokens"), cases_of(WHOLE, EACH, calls=4))
@ordered_sums
def test_counts_of_valid_tokens(name: str, tokens: int, count_dtype: torch.dtype) -> None:
    case = make_layer(LAYERS[name], tokens, exact=not TARGET.on_gpu)
    everything = check_layer(case)
    residual = case.options.get("residual")
    least, most = torch.iinfo(count_dtype).min, torch.iinfo(count_dtype).max
    for valid in (most, tokens + 1, tokens, tokens - 1, tokens // 2, 257, 256, 1, 0, -1, least):
        live = min(max(valid, 0), tokens)
        count = torch.tensor(valid, dtype=count_dtype, device=TARGET.device)
        changes: dict[str, Tensor] = {"x": case.x.clone()}
        if "router_logits" in case.options:
            changes["router_logits"] = case.options["router_logits"].clone()
        for value in changes.values():
            value[live:] = NAN
        padded = case.with_(**changes, num_valid_tokens=count if valid % 2 else count.view(1))
        got = padded.routed()
        for mine, expected in zip(got, everything, strict=True):
            assert same_bits(mine[:live], expected[:live]), valid
        # The routing of what is past them is nobody's affair, its rows are.
        idle = torch.zeros_like(got[0]) if residual is None else residual
        assert torch.equal(got[0][live:], idle[live:]), valid


@pytest.mark.parametrize("tokens", EACH)
@pytest.mark.parametrize("shared", [0, 200])
def test_tokens_without_a_local_expert(tokens: int, shared: int) -> None:
    one = base(RoutingConfig(4), routable=40, shared=shared)
    case = make_layer(one, tokens)
    nothing = torch.full((40,), -1, dtype=torch.int32, device=TARGET.device)
    y, _, ids = check_layer(case.with_(expert_map=nothing))
    assert bool(y.any()) == bool(shared)
    # Of the experts that this routing takes, only one is here.
    only = nothing.clone()
    only[ids[0, 0].long()] = 5
    y, _, ids = check_layer(case.with_(expert_map=only))
    without = (ids != ids[0, 0]).all(dim=1)
    assert not shared or bool(y[without].any())
    assert shared or not bool(y[without].any())
    # An expert that is not here may hold anything.
    w13, w2 = case.w13.clone(), case.w2.clone()
    others = torch.arange(E, device=TARGET.device) != 5
    w13[others] = w2[others] = NAN
    assert same_bits(case.with_(expert_map=only, w13=w13, w2=w2).run(), y)


@pytest.mark.parametrize("tokens", EACH)
@pytest.mark.parametrize("name", ["deepseek", "352x176", "shared 200 gated"])
def test_out_is_written_whole_and_nothing_beside_it(name: str, tokens: int) -> None:
    case = make_layer(LAYERS[name], tokens)
    want, _, _ = case.routed()
    guarded = Guarded(tokens, case.x.size(1), want.dtype)
    assert case.run(out=guarded.tensor) is guarded.tensor
    assert same_bits(guarded.tensor, want)
    guarded.check()
    # In place, on its own residual.
    residual = torch.ones_like(want)
    added = case.run(residual=residual)
    into = Guarded(tokens, case.x.size(1), want.dtype)
    into.tensor.copy_(residual)
    case.run(residual=into.tensor, out=into.tensor)
    assert same_bits(into.tensor, added)
    into.check()


def test_nothing_is_read_that_the_launch_did_not_write(gpu: torch.device) -> None:
    cases = [make_layer(one, tokens) for one in SHORT.values() for tokens in (300, 40, 1, 3)]
    want = [check_layer(case) for case in cases]
    for case, expected in zip(cases, want, strict=True):
        assert poison_scratch() >= 2
        for got, one in zip(case.routed(), expected, strict=True):
            assert same_bits(got, one), case.tokens


def test_a_poisoned_allocator(gpu: torch.device) -> None:
    # A fresh stream gets fresh buffers, out of blocks that were full of NaN.
    cases = [make_layer(one, tokens) for one in SHORT.values() for tokens in (300, 1, 40)]
    want = [check_layer(case) for case in cases]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        sizes = [1 << n for n in range(9, 26)]
        blocks = [torch.full((n,), 255, dtype=torch.uint8, device=gpu) for n in sizes * 2]
        del blocks
        got = [case.routed() for case in cases]
    stream.synchronize()
    for mine, expected in zip(got, want, strict=True):
        assert all(same_bits(a, b) for a, b in zip(mine, expected, strict=True))


def test_inputs_are_left_as_they_are() -> None:
    for one in SHORT.values():
        for tokens in (FEW, SOME):
            case = make_layer(one, tokens)
            tensors = [case.x, case.w13, case.w2]
            tensors += [v for v in case.options.values() if isinstance(v, Tensor)]
            before = [t.clone() for t in tensors]
            case.run()
            assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("tokens", EACH)
@pytest.mark.parametrize("name", ["qwen", "352x176", "shared 200 gated"])
def test_inputs_between_nan(name: str, tokens: int) -> None:
    # Reading a row too many, or a column, would bring NaN into a sum or a choice.
    case = make_layer(LAYERS[name], tokens, exact=not TARGET.on_gpu)
    want = case.routed()

    def between(value: Tensor) -> Tensor:
        flat = Guarded(1, value.numel(), value.dtype)
        flat._whole.fill_(NAN)
        return flat.tensor.view(value.shape).copy_(value)

    shared = case.options.get("shared")
    changes: dict[str, Any] = {"x": between(case.x)}
    changes["router_weight"] = between(case.options["router_weight"])
    if shared is not None:
        parts = (shared.w13, shared.w2, shared.gate)
        changes["shared"] = SharedExperts(*(None if p is None else between(p) for p in parts))
    for got, expected in zip(case.with_(**changes).routed(), want, strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize("tokens", EACH)
def test_inputs_with_strides(tokens: int) -> None:
    case = make_layer(LAYERS["fp32 router"], tokens, exact=not TARGET.on_gpu)
    want = case.routed()

    def wide(value: Tensor) -> Tensor:
        """The same values, every other element of a tensor full of NaN."""
        whole = torch.full((*value.shape, 2), NAN, dtype=value.dtype, device=value.device)
        whole[..., 1] = value
        return whole[..., 1]

    def shifted(value: Tensor) -> Tensor:
        """The same values, one element behind a multiple of 16 bytes."""
        whole = torch.full((value.numel() + 1,), NAN, dtype=value.dtype, device=value.device)
        return whole[1:].view(value.shape).copy_(value)

    def turned(value: Tensor) -> Tensor:
        return value.t().contiguous().t() if value.dim() == 2 else value

    given = make_layer(LAYERS["given logits"], tokens)
    for change in (wide, shifted, turned):
        moved = case.with_(x=change(case.x), residual=change(case.options["residual"]))
        for got, expected in zip(moved.routed(), want, strict=True):
            assert same_bits(got, expected), change.__name__
        # These may be the affair of other code, so they are right and no more.
        for name in ("router_weight", "router_bias"):
            check_layer(case.with_(**{name: change(case.options[name])}))
        check_layer(given.with_(router_logits=change(given.options["router_logits"])))


def test_a_router_that_changes_between_calls() -> None:
    # Engines load weights in place, and memory of a freed router goes to another.
    case = make_layer(DENSE, SOME)
    want = check_layer(case)
    for seed in range(3):
        router = case.options["router_weight"].clone()
        changed = case.with_(router_weight=router)
        assert same_bits(changed.run(), want[0])
        router.copy_(router.flip(0))
        y, _, ids = check_layer(changed)
        assert not torch.equal(ids, want[2]), seed
        del router, changed, y


@pytest.mark.parametrize("name", ["qwen", "shared 384 gated"])
def test_tokens_beyond_a_slab(
    gpu: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weave_moe.backends import cuda

    case = make_layer(LAYERS[name], 2 * MANY)
    want = check_layer(case)
    monkeypatch.setattr(cuda, "SLAB_TOKENS", MANY)
    for got, expected in zip(case.routed(), want, strict=True):
        assert same_bits(got, expected)
    residual = case.options.get("residual")
    for valid in (0, 1, MANY - 1, MANY, MANY + 1, 2 * MANY):
        count = torch.tensor(valid, device=gpu)
        found = case.routed(num_valid_tokens=count)
        for got, expected in zip(found, want, strict=True):
            assert same_bits(got[:valid], expected[:valid])
        padding = found[0][valid:]
        assert torch.equal(padding, padding * 0 if residual is None else residual[valid:])


SANITIZED = [("qwen", 1), ("deepseek", 1), ("deepseek", SOME), ("dense", SOME), ("dense", 1100)]


@pytest.mark.parametrize(("name", "tokens"), SANITIZED)
def test_sanitized_layers(name: str, tokens: int) -> None:
    # Few and small, for compute-sanitizer: its commands are in conftest.py.
    case = make_layer(SHORT[name], tokens)
    for _ in range(2):
        check_layer(case)


# The checks themselves.


def without_shared(case: LayerCase) -> Tensor:
    return case.run(shared=None, backend="reference")  # no kernel of its own for this


PLANTED: dict[str, Callable[[Tensor, Tensor, Tensor, LayerCase], tuple[Tensor, ...]]] = {
    "two experts change places": lambda y, w, i, case: (y, w.flip(1), i.flip(1)),
    "an expert twice": lambda y, w, i, case: (y, w, i[:, [0, 0, 2, 3]]),
    "an id out of range": lambda y, w, i, case: (y, w, i.masked_fill(i == i[7, 1], E)),
    "the next expert": lambda y, w, i, case: (y, w, (i + 1) % E),
    "a weight a little off": lambda y, w, i, case: (y, w * (1 + 2e-4), i),
    "scaled twice": lambda y, w, i, case: (y, w * 2.5, i),
    "not renormalised": lambda y, w, i, case: (y, w * 0.99, i),
    "a weight that is NaN": lambda y, w, i, case: (y, w.masked_fill(i == i[7, 1], NAN), i),
    "another type of ids": lambda y, w, i, case: (y, w, i.long()),
    "a row of another token": lambda y, w, i, case: (y.roll(1, 0), w, i),
    "a row 2 % off": lambda y, w, i, case: (torch.cat((y[:7] * 1.02, y[7:])), w, i),
    "no shared experts": lambda y, w, i, case: (without_shared(case), w, i),
    "shared experts of the next token": lambda y, w, i, case: (
        (y.float() - without_shared(case).float()).roll(1, 0).to(y.dtype)
        + without_shared(case),
        w,
        i,
    ),
    "an idle row that is not zero": lambda y, w, i, case: (y + (y == 0) * 1e-4, w, i),
    "a NaN": lambda y, w, i, case: (y.masked_fill(y == y[3, 3], NAN), w, i),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_the_checks_find_what_is_planted(bug: str) -> None:
    case = make_layer(LAYERS["deepseek"], 33)
    case = case.with_(num_valid_tokens=torch.tensor(20, device=TARGET.device))
    y, weights, ids = check_layer(case, certain_share=0.8)
    # Padding is nobody's affair: what is planted is in the valid tokens too.
    y, weights, ids = PLANTED[bug](y, weights, ids, case)
    with pytest.raises(AssertionError):  # noqa: PT012
        assert_routing(case, weights, ids)
        assert_result(case, y, weights, ids)
