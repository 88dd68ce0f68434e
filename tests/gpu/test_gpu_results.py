"""Every size, routing and option against the layer computed in fp32 and rounded nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from gpu_cases import (
    POLICIES,
    ROUTINGS,
    SMALL,
    TARGET,
    Guarded,
    Routing,
    assert_right,
    check,
    expect,
    holes,
    make,
    same_bits,
    shape,
    skewed,
    uniform,
    weights_of,
)
from torch import Tensor

from weave_moe.reference import local_experts
from weave_moe.schedule import group_width
from weave_moe.schedule.granularity import choose_kernel
from weave_moe.shapes import Activation, LayerShape, check_experts

pytestmark = pytest.mark.gpu

KERNEL_TOKENS = (1, 9, 12, 17, 40, 200, 300, 1100)
"""Token counts of SMALL that reach all kernels: tiles of 64 and of 128 rows, groups of at most 8 to
256 tokens, in one launch or in three."""

expect(SMALL, [*KERNEL_TOKENS, *range(1, 71), 300, 1000, 5000])


@pytest.mark.parametrize("tokens", range(71))
def test_every_number_of_tokens(tokens: int) -> None:
    check(make(SMALL, tokens))


@pytest.mark.parametrize("tokens", [300, 1000, 5000])
@pytest.mark.parametrize("routing", [uniform, skewed])
def test_many_tokens(tokens: int, routing: Routing) -> None:
    check(make(SMALL, tokens, routing=routing))


@pytest.mark.parametrize("tokens", KERNEL_TOKENS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.__name__)
def test_every_kind_of_routing_in_every_kernel(routing: Routing, tokens: int) -> None:
    check(make(SMALL, tokens, routing=routing))


def around_widths(cap: int) -> list[int]:
    """Tokens of an expert just below, at and above each width of a kernel, and where it cuts."""
    widths = {group_width(n) for n in range(1, cap + 1)}
    edges = [*widths, cap + 8, cap + 16, 2 * cap, 3 * cap]
    return sorted({n for edge in edges for n in (edge - 1, edge, edge + 1)})


def with_counts(counts: Sequence[int]) -> Routing:
    """Expert e gets exactly counts[e] slots, at places without order; the others are skipped."""

    def routing(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
        flat = torch.full((tokens * top_k,), -1)
        filled = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        flat[: len(filled)] = filled
        return flat[torch.randperm(len(flat), generator=g)].view(tokens, top_k)

    return routing


@pytest.mark.parametrize("tokens", KERNEL_TOKENS[1:])
def test_experts_with_any_number_of_tokens_around_each_width(tokens: int) -> None:
    sizes = {"top_k": SMALL.top_k, "experts": SMALL.experts, "hidden": SMALL.hidden}
    cap = choose_kernel(tokens=tokens, **sizes).width_cap
    slots = tokens * SMALL.top_k
    waiting = [n for n in around_widths(cap) if n <= slots]
    seen: set[int] = set()
    while waiting:
        counts: list[int] = []
        # Largest first, so that each call holds as many as have room.
        for n in sorted(waiting, reverse=True):
            if len(counts) < SMALL.experts and sum(counts) + n <= slots:
                counts.append(n)
                waiting.remove(n)
        case = make(SMALL, tokens, routing=with_counts(counts), seed=len(seen))
        experts = local_experts(check_experts(*case.args))
        found = torch.bincount(experts.flatten() + 1, minlength=SMALL.experts + 1)[1:]
        assert found[: len(counts)].tolist() == counts
        seen.update(counts)
        check(case)
    assert seen


SIZES = [
    *((2880, 2880), (2048, 1408), (1024, 704), (7168, 64)),  # multiples of 64
    *((512, 352), (512, 176), (256, 96), (256, 8)),  # I is none
    *((352, 192), (96, 192), (8, 64)),  # H is none
    *((176, 352), (2888, 1416), (192 + 8, 96), (8, 8), (1864, 176)),  # neither
]
SIZE_TOKENS = (3, 12, 200, 1100)
for hidden, intermediate in SIZES:
    expect(shape(hidden, intermediate, 16, 4), SIZE_TOKENS)


@pytest.mark.parametrize("tokens", SIZE_TOKENS)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_sizes_that_are_no_multiple_of_a_tile(hidden: int, intermediate: int, tokens: int) -> None:
    check(make(shape(hidden, intermediate, 16, 4), tokens, routing=skewed))


@pytest.mark.parametrize("tokens", SIZE_TOKENS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(512, 176), (96, 192), (176, 96)])
def test_weights_of_experts_without_tokens_are_never_read(
    hidden: int, intermediate: int, tokens: int
) -> None:
    # Tiles at an expert's end reach into its neighbour's rows; nothing of those may come through.
    s = shape(hidden, intermediate, 16, 4)

    def odd(g: torch.Generator, tokens: int, experts: int, top_k: int) -> Tensor:
        return 2 * torch.randint(experts // 2, (tokens, top_k), generator=g) + 1

    case = make(s, tokens, routing=odd)
    w13, w2 = (w.clone() for w in case.args[1:3])
    want = case.run()
    w13[::2] = w2[::2] = float("nan")
    got = case.with_(w13=w13, w2=w2).run()
    assert same_bits(got, want)
    assert_right(got, case)


@pytest.mark.parametrize("tokens", [12, 200])
def test_nothing_of_a_token_reaches_another(tokens: int) -> None:
    case = make(SMALL, tokens, routing=skewed)
    want = case.run()
    x = case.args[0].clone()
    x[tokens // 2] = float("nan")
    got = case.with_(x=x).run()
    others = torch.arange(tokens, device=got.device) != tokens // 2
    assert same_bits(got[others], want[others])
    assert bool(got[tokens // 2].isnan().all())


MANY_EXPERTS = [
    *((shape(256, 64, 1024, 16), (1, 2, 64, 300)), (shape(256, 64, 896, 9), (100,))),
    *((shape(256, 64, 1, 1), (1, 8, 100)), (shape(256, 64, 3, 16), (1, 5, 60))),
    (shape(256, 64, 133, 8), (16, 140)),
]
for many, counts_of_tokens in MANY_EXPERTS:
    expect(many, counts_of_tokens)


@pytest.mark.parametrize(
    ("s", "tokens"),
    [(s, tokens) for s, counts in MANY_EXPERTS for tokens in counts],
    ids=lambda value: f"E{value.experts}k{value.top_k}" if isinstance(value, LayerShape) else None,
)
@pytest.mark.parametrize("policy", ["steal", "static_expert"])
def test_numbers_of_experts_and_slots(s: LayerShape, tokens: int, policy: str) -> None:
    check(make(s, tokens), policy=policy)
    check(make(s, tokens, routing=skewed), policy=policy)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [3, 40])
def test_types_of_ids_and_weights(
    id_dtype: torch.dtype, weight_dtype: torch.dtype, tokens: int
) -> None:
    check(make(SMALL, tokens, id_dtype=id_dtype, weight_dtype=weight_dtype))


@pytest.mark.parametrize("tokens", [3, 40, 1100])
def test_ids_far_out_of_range_are_skipped(tokens: int) -> None:
    case = make(SMALL, tokens, id_dtype=torch.int64)
    ids = case.args[4].clone()
    # Low halves that would be experts, high halves that say otherwise.
    wild = torch.tensor([1 << 32, (1 << 32) + 3, -(1 << 32) + 3, 2**63 - 1, -(2**63), 16, -1])
    ids.view(-1)[::3] = wild.to(ids.device).repeat(ids.numel())[: ids.view(-1)[::3].numel()]
    check(case.with_(ids=ids))


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [3, 40, 1100])
def test_expert_maps(tokens: int, id_dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(tokens)
    expert_map = torch.full((40,), -1, dtype=torch.int32)
    expert_map[1::2][: SMALL.experts] = torch.randperm(SMALL.experts, generator=g).to(torch.int32)
    expert_map[0], expert_map[2], expert_map[4] = SMALL.experts, -7, 2**31 - 1
    on_device = expert_map.to(TARGET.device)
    case = make(SMALL, tokens, expert_map=on_device, id_dtype=id_dtype)
    check(case)
    wild = case.args[4].clone()
    wild[:, 0] = 40
    wild[:, 1] = -1
    check(case.with_(ids=wild))


@pytest.mark.parametrize("count_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [3, 40, 1100])
def test_counts_of_valid_tokens(tokens: int, count_dtype: torch.dtype) -> None:
    case = make(SMALL, tokens)
    everything = case.run()
    least, most = torch.iinfo(count_dtype).min, torch.iinfo(count_dtype).max
    for valid in (least, -1, 0, 1, tokens - 1, tokens, tokens + 1, most):
        count = torch.tensor(valid, dtype=count_dtype, device=TARGET.device)
        got = case.run(num_valid_tokens=count if valid % 2 else count.view(1))
        live = min(max(valid, 0), tokens)
        assert same_bits(got[:live], everything[:live])
        assert not got[live:].any()


OPTIONS = {
    "biases": {"biases": True},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "swiglu_oai": {"activation": "swiglu_oai", "biases": True},
    "clamped": {"activation": Activation("silu", limit=0.75)},
    "offset": {"activation": Activation("gelu_tanh", limit=0.5, up_offset=0.25), "biases": True},
}
for options in OPTIONS.values():
    expect(SMALL, (12, 200, 1100), **options)


@pytest.mark.parametrize("tokens", [12, 200, 1100])
@pytest.mark.parametrize("name", OPTIONS)
def test_activations_and_biases(name: str, tokens: int) -> None:
    options = dict(OPTIONS[name])
    biases = bool(options.pop("biases", False))
    case = make(SMALL, tokens, biases=biases, **options)
    # Gates and ups from -50 to 50: the limits cut, the exponentials saturate.
    x = case.args[0] * torch.linspace(0.1, 12, tokens, device=TARGET.device).unsqueeze(1).to(
        case.args[0].dtype
    )
    got = case.with_(x=x).run()
    assert_right(got, case.with_(x=x))
    if biases:
        for one in ("b13", "b2"):
            other = "b2" if one == "b13" else "b13"
            check(case.with_(x=x, **{other: None}))


def interleave(rows: Tensor) -> Tensor:
    """Gate rows, then up rows -> gate0, up0, gate1, up1, ..."""
    gate, up = rows.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).reshape(rows.shape).contiguous()


@pytest.mark.parametrize("tokens", [1, 12, 200, 1100])
@pytest.mark.parametrize(("hidden", "intermediate"), [(512, 192), (352, 184), (2880, 2880)])
def test_interleaved_rows_give_the_bits_of_rows_that_are_not(
    hidden: int, intermediate: int, tokens: int
) -> None:
    case = make(shape(hidden, intermediate, 16, 4), tokens, routing=skewed, biases=True)
    want = check(case)
    turned = case.with_(
        w13=interleave(case.args[1]), b13=interleave(case.options["b13"]), interleaved=True
    )
    assert same_bits(check(turned), want)


expect(shape(352, 184, 16, 4), (1, 12, 200, 1100), biases=True)
expect(shape(2880, 2880, 16, 4), (1, 12, 200, 1100), biases=True)


def plain(hidden: int, intermediate: int, dtype: str = "bfloat16") -> LayerShape:
    return LayerShape(hidden, intermediate, 16, 4, dtype, gated=False)


PLAIN_TOKENS = (0, 1, 12, 40, 200, 300, 1100)
for plain_shape in (
    plain(512, 192),
    plain(2688, 1856),
    plain(352, 200),
    plain(512, 192, "float16"),
):
    for with_biases in (False, True):
        expect(plain_shape, PLAIN_TOKENS, activation="relu2", biases=with_biases)


@pytest.mark.parametrize("tokens", PLAIN_TOKENS)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    "s",
    [plain(512, 192), plain(2688, 1856), plain(352, 200), plain(512, 192, "float16")],
    ids=lambda s: f"{s.hidden}x{s.intermediate}-{s.dtype}",
)
def test_an_activation_without_gate(s: LayerShape, tokens: int, biases: bool) -> None:
    check(make(s, tokens, routing=skewed, biases=biases, activation="relu2"))


@pytest.mark.parametrize("tokens", [12, 1100])
def test_an_activation_without_gate_around_each_width(tokens: int) -> None:
    s = plain(512, 192)
    cap = choose_kernel(tokens=tokens, top_k=4, experts=16, hidden=512).width_cap
    slots = tokens * 4
    waiting = sorted((n for n in around_widths(cap) if n <= slots), reverse=True)
    while waiting:
        counts: list[int] = []
        for n in list(waiting):
            if len(counts) < s.experts and sum(counts) + n <= slots:
                counts.append(n)
                waiting.remove(n)
        check(make(s, tokens, routing=with_counts(counts), activation="relu2"))


SCALED_TOKENS = (1, 12, 40, 200, 300, 1100)
expect(SMALL, SCALED_TOKENS, weight_on_input=True)
expect(shape(352, 200, 16, 1), SCALED_TOKENS, weight_on_input=True)
expect(shape(512, 192, 16, 4, "float16"), SCALED_TOKENS, weight_on_input=True)


@pytest.mark.parametrize("tokens", SCALED_TOKENS)
@pytest.mark.parametrize("routing", [uniform, skewed])
@pytest.mark.parametrize(
    "s",
    [SMALL, shape(352, 200, 16, 1), shape(512, 192, 16, 4, "float16")],
    ids=lambda s: f"{s.hidden}-{s.top_k}-{s.dtype}",
)
def test_weight_on_the_input(s: LayerShape, tokens: int, routing: Routing) -> None:
    check(make(s, tokens, routing=routing, weight_on_input=True))


FP16 = shape(512, 192, 16, 4, "float16")
expect(FP16, [1, 12, 40, 200, 1100])


@pytest.mark.parametrize("tokens", [1, 12, 40, 200, 1100])
@pytest.mark.parametrize("routing", [uniform, skewed])
def test_fp16(tokens: int, routing: Routing) -> None:
    check(make(FP16, tokens, routing=routing))


@pytest.mark.parametrize("tokens", [12, 200, 1100])
def test_fp16_rows_beyond_its_range_before_weighting(tokens: int) -> None:
    case = make(FP16, tokens)
    weights = case.args[3] * 2.0**-16
    w2 = (case.args[2].float() * 2.0**16).clamp(-60000, 60000).half()
    large = case.with_(w2=w2, weights=weights)
    assert float(large.with_(weights=case.args[3]).truth().abs().max()) > 65504
    check(large)


expect(FP16, [12, 1100], activation="swiglu_oai", biases=True)


@pytest.mark.parametrize("tokens", [12, 1100])
def test_fp16_with_biases(tokens: int) -> None:
    check(make(FP16, tokens, biases=True, activation="swiglu_oai"))


# Slabs of up to 300 tokens may be launches for few; of 450 none is, and the device chooses.
@pytest.mark.parametrize(
    ("tokens", "slab"),
    [*((t, s) for t in (63, 64, 65, 200, 1000) for s in (64, 300)), (900, 600)],
)
def test_slabs(gpu: torch.device, tokens: int, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from weave_moe.backends import cuda

    case = make(SMALL, tokens, routing=skewed)
    whole = case.run()
    monkeypatch.setattr(cuda, "SLAB_TOKENS", slab)
    assert same_bits(check(case), whole)
    for valid in (-(2**63), -1, 0, 30, 64, 65, 130, 256, 257, 301, tokens + 3, 2**63 - 1):
        count = torch.tensor(valid, device=gpu)
        live = min(max(valid, 0), tokens)
        got = case.run(num_valid_tokens=count)
        assert same_bits(got[:live], whole[:live])
        assert not got[live:].any()


RESIDUAL_TOKENS = (0, 3, 40, 1100)
HALF_A_PLACE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Most that rounding changes a number, relative to it."""


@pytest.mark.parametrize("tokens", RESIDUAL_TOKENS)
@pytest.mark.parametrize("routing", [uniform, skewed, holes])
@pytest.mark.parametrize("s", [SMALL, FP16], ids=lambda s: s.dtype)
def test_residuals(s: LayerShape, routing: Routing, tokens: int) -> None:
    case = make(s, tokens, routing=routing, residual=True)
    before = case.options["residual"].clone()
    check(case)
    assert same_bits(case.options["residual"], before)
    check(case.with_(residual=case.args[0]))  # the input itself


@pytest.mark.parametrize("tokens", RESIDUAL_TOKENS[1:])
@pytest.mark.parametrize("s", [SMALL, FP16], ids=lambda s: s.dtype)
def test_a_sum_and_its_residual_are_rounded_once(s: LayerShape, tokens: int) -> None:
    # Less its own rounded value a sum leaves what the rounding took; rounded before, it left zero.
    case = make(s, tokens)
    rounded = case.run()
    left = case.run(residual=-rounded)
    allowed = HALF_A_PLACE[left.dtype] * rounded.float().abs() + 2.0**-24
    assert bool((left.float().abs() <= allowed).all())
    assert float((left != 0).float().mean()) > 0.5
    nothing = torch.zeros_like(rounded)
    assert torch.equal(case.run(residual=nothing), rounded)


expect(shape(512, 192, 16, 1), RESIDUAL_TOKENS)


@pytest.mark.parametrize("tokens", RESIDUAL_TOKENS[1:])
def test_a_residual_is_added_after_the_last_slot(tokens: int) -> None:
    case = make(SMALL, tokens)
    _, _, _, weights, ids = case.args
    # Powers of two: then a weight times a row is exact, fused with the addition or not. Far apart,
    # so that sums are not.
    weights = torch.exp2((4 * weights.log2()).round())
    case = case.with_(weights=weights)
    total = torch.zeros_like(case.args[0], dtype=torch.float32)
    for j in range(SMALL.top_k):
        weight = weights[:, j : j + 1]
        row = case.with_(ids=ids[:, j : j + 1], weights=torch.ones_like(weight)).run()
        total = total + weight * row.float()
    rounded = total.bfloat16()
    assert same_bits(case.run(), rounded)
    # What is left of a sum shows its last bits, and with them the order.
    assert same_bits(case.run(residual=-rounded), (total - rounded.float()).bfloat16())


@pytest.mark.parametrize("count_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", RESIDUAL_TOKENS[1:])
def test_rows_past_the_valid_ones_are_the_residuals(tokens: int, count_dtype: torch.dtype) -> None:
    case = make(SMALL, tokens, residual=True)
    everything, residual = check(case), case.options["residual"]
    least, most = torch.iinfo(count_dtype).min, torch.iinfo(count_dtype).max
    x = case.args[0].clone()
    for valid in (most, tokens + 1, tokens - 1, tokens // 2, 1, 0, -1, least):
        live = min(max(valid, 0), tokens)
        x[live:] = float("nan")
        count = torch.tensor(valid, dtype=count_dtype, device=TARGET.device)
        got = case.with_(x=x).run(num_valid_tokens=count)
        assert same_bits(got[:live], everything[:live])
        assert torch.equal(got[live:], residual[live:])


@pytest.mark.parametrize("tokens", RESIDUAL_TOKENS)
@pytest.mark.parametrize("s", [SMALL, FP16], ids=lambda s: s.dtype)
def test_residuals_in_place(s: LayerShape, tokens: int) -> None:
    case = make(s, tokens, routing=holes, residual=True)
    want = check(case)
    for policy in (*POLICIES, "auto"):
        guarded = Guarded(tokens, s.hidden, want.dtype)
        into = guarded.tensor.copy_(case.options["residual"])
        assert case.run(residual=into, out=into, policy=policy) is into
        assert same_bits(into, want)
        guarded.check()
    # A second time adds a second time.
    again = case.run(residual=into, out=into)
    assert same_bits(again, check(case.with_(residual=want)))


@pytest.mark.parametrize("tokens", RESIDUAL_TOKENS[1:])
def test_residuals_in_place_in_a_graph(gpu: torch.device, tokens: int) -> None:
    case = make(SMALL, tokens, residual=True)
    residual = case.options["residual"]
    into = residual.clone()
    once = check(case)
    twice = check(case.with_(residual=once))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(residual=into, out=into)
    for _ in range(3):
        into.copy_(residual)
        for want in (once, twice):
            graph.replay()
            assert same_bits(into, want)


@pytest.mark.parametrize("tokens", RESIDUAL_TOKENS[1:])
def test_residuals_anywhere_in_memory(tokens: int) -> None:
    case = make(SMALL, tokens, residual=True)
    want, residual = check(case), case.options["residual"]
    wide = torch.full((tokens, 2 * SMALL.hidden), float("nan"), dtype=want.dtype).to(want.device)
    wide[:, ::2] = residual
    assert same_bits(case.run(residual=wide[:, ::2]), want)
    # The kernel reads 16 bytes at a time; a view may start between.
    for shift in (1, 4, 8):
        flat = torch.full((want.numel() + 8,), float("nan"), dtype=want.dtype).to(want.device)
        moved = flat[shift : shift + want.numel()].view_as(want)
        moved.copy_(residual)
        assert same_bits(case.run(residual=moved), want)
        assert same_bits(case.run(residual=moved, out=moved), want)
        assert bool(flat[:shift].isnan().all())
        assert bool(flat[shift + want.numel() :].isnan().all())


ODD_RESIDUALS = [(96, 192), (8, 8), (2888, 1416)]


@pytest.mark.parametrize("tokens", SIZE_TOKENS)
@pytest.mark.parametrize(("hidden", "intermediate"), ODD_RESIDUALS)
def test_residuals_of_sizes_that_are_no_multiple_of_a_piece(
    hidden: int, intermediate: int, tokens: int
) -> None:
    check(make(shape(hidden, intermediate, 16, 4), tokens, routing=skewed, residual=True))


@pytest.mark.parametrize(
    ("tokens", "slab"), [*((t, s) for t in (64, 65, 200, 1000) for s in (64, 300)), (900, 600)]
)
@pytest.mark.parametrize("s", [SMALL, FP16], ids=lambda s: s.dtype)
def test_slabs_with_residuals(
    gpu: torch.device, s: LayerShape, tokens: int, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weave_moe.backends import cuda

    case = make(s, tokens, routing=skewed, residual=True)
    whole, residual = check(case), case.options["residual"]
    monkeypatch.setattr(cuda, "SLAB_TOKENS", slab)
    assert same_bits(check(case), whole)
    into = residual.clone()
    assert same_bits(case.run(residual=into, out=into), whole)
    for valid in (-1, 0, 30, 64, 65, 130, 256, 257, 301, tokens + 3):
        live = min(max(valid, 0), tokens)
        count = torch.tensor(valid, device=gpu)
        for into in (torch.full_like(residual, float("nan")), residual.clone()):
            given = {} if into.isnan().any() else {"residual": into}
            got = case.run(num_valid_tokens=count, out=into, **given)
            assert same_bits(got[:live], whole[:live])
            assert torch.equal(got[live:], residual[live:])


expect(FP16, [64, 65, 200, 256, 300, 900, 1000, 3, 1100])
expect(SMALL, [256, 900])

TINY = shape(64, 64, 8, 2)
expect(TINY, [131_072])


def test_the_most_tokens() -> None:
    # Scheduling and addresses, not products: tokens, not bytes, are what is large here.
    check(make(TINY, 131_072))


def test_no_tokens() -> None:
    case = make(SMALL, 0)
    assert case.run().shape == (0, SMALL.hidden)


@pytest.mark.parametrize("tokens", [3, 40])
def test_inputs_with_strides(tokens: int) -> None:
    case = make(SMALL, tokens)
    want = case.run()
    x, _, _, weights, ids = case.args
    wide = torch.full((tokens, 2 * SMALL.hidden), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, SMALL.hidden :] = x
    turned = case.with_(
        x=wide[:, SMALL.hidden :],
        weights=weights.t().contiguous().t(),
        ids=ids.t().contiguous().t(),
    )
    assert not turned.args[0].is_contiguous()
    assert same_bits(turned.run(), want)


def test_weights_that_move_between_calls() -> None:
    # A map of a freed weight must not be used for the one that took its place, nor the other way.
    case = make(SMALL, 12)
    want = case.run()
    for _ in range(3):
        w13, w2 = case.args[1].clone(), case.args[2].clone()
        assert same_bits(case.with_(w13=w13, w2=w2).run(), want)
        w13.mul_(2)
        assert_right(case.with_(w13=w13, w2=w2).run(), case.with_(w13=w13, w2=w2))
        del w13, w2


@pytest.mark.parametrize("tokens", [1, 12, 200, 1100])
@pytest.mark.parametrize("policy", ["steal", "counter"])
def test_sanitized(tokens: int, policy: str) -> None:
    # Few and small, for compute-sanitizer: its commands are in conftest.py.
    case = make(SMALL, tokens, routing=skewed)
    for _ in range(2):
        check(case, policy=policy)
    check(make(SMALL, tokens, routing=skewed, residual=True), policy=policy)


def test_the_weights_of_the_tests_are_those_of_the_layer() -> None:
    # Kept between tests: none of them may have written to them.
    for s in (SMALL, FP16):
        kept = weights_of(s)
        assert all(bool(w.isfinite().all()) for w in kept)
