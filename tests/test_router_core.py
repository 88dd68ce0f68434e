"""The router of a launch (device/router.h) on a CPU, its text as it is and with the parameters that
the backend gives it: which lane multiplies what, sums, choices, and what it leaves behind."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.launches import Launched, Recorder, bf16_case, layer_of
from native import STEPPED, Builder, Patch, needs_cxx
from weave_moe.routing import LayerCall, RoutingConfig, route, router_logits
from weave_moe.runtime.buffers import logit_sums
from weave_moe.runtime.kernel import SORT_THREADS, KernelConfig, Launch, chooser_words

pytestmark = needs_cxx

Build = Callable[..., ctypes.CDLL]
SEGMENT = 256
CHUNK = 20
"""Tokens of a block of the sort: every warp has some, and some have two."""
EPOCH = 2
"""Of the words of weave::Control."""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    builder = Builder.of_session(tmp_path_factory)

    def library(config: KernelConfig, patches: Sequence[Patch] = ()) -> ctypes.CDLL:
        # The router knows nothing of the rest: fewer libraries to compile.
        config = replace(config, packed_up=False, packed_down=False, shared=False, width_cap=8)
        # The text has a GPU's pragmas, and functions that a CPU cannot have and does not call.
        flags = ("-O1", "-w", *config.options())
        found = builder.build("router.cpp", (*STEPPED, *patches), flags=flags, shared=True)
        loaded = ctypes.CDLL(str(found))
        loaded.emulate_failure.restype = ctypes.c_char_p
        return loaded

    return library


@dataclass
class Routed:
    """What became of a launch.

    slots: what each block that reads slots takes for their experts [T, slots], -1 for none, and for
    their weights.  weights, ids: the router's result [T, k].  sums: of each segment's columns, few
    tokens: [T, segments, rows].
    """

    slots: list[tuple[Tensor, Tensor]]
    weights: Tensor
    ids: Tensor
    sums: Tensor | None = None


def room_of(p: Launch) -> int:
    """Words that a block of the sort has for choices."""
    return SORT_THREADS // 32 * chooser_words(p.router.experts)


def words(tensor: Tensor, at: int, *size: int) -> Tensor:
    """Words of a buffer from an address on."""
    first = (at - tensor.data_ptr()) // 4
    found = tensor.view(torch.int32)[first : first + torch.Size(size).numel()]
    assert found.numel() == torch.Size(size).numel()
    return found.view(size)


def allow(library: ctypes.CDLL, *read: Tensor) -> None:
    """What the launches that follow may read."""
    library.emulate_allow(
        (ctypes.c_void_p * len(read))(*(t.data_ptr() for t in read)),
        (ctypes.c_uint64 * len(read))(*(t.numel() * t.element_size() for t in read)),
        len(read),
    )


def chosen(launches: Sequence[Launched], call: LayerCall) -> Launched:
    """That of a call's launches which the device chooses, by the number of valid tokens."""
    count, last = call.experts.num_valid_tokens, launches[-1]
    few = count is not None and int(count) <= last.p.few_tokens
    return launches[0] if few else last


def emulate(
    build: Build,
    recorder: Recorder,
    call: LayerCall,
    *,
    blocks: int = 3,
    seed: int = 0,
    patches: Sequence[Patch] = (),
    before: int = 0,
) -> Routed:
    """Runs the router of a call of one launch. AssertionError where it does what it must not.

    before: launches that its workspace has seen; the first finds no words of another.
    """
    launches, weights, ids = recorder.layer(call)
    launch = chosen(launches, call)
    library, p, held = build(launch.config, patches), launch.p, recorder.buffers
    for tensor in (held.router, weights.view(torch.uint8), ids.view(torch.uint8)):
        tensor.fill_(0xA5)
    if before == 0:
        held.tagged.fill_(0xA5)
    words(held.counters, p.shared.control, 3)[EPOCH] = before
    allow(library, *call.inputs().values(), held.router, held.tagged)
    slots, sums = (p.tokens, p.top_k), None
    if launch.config.many:
        first = recorder.all[len(launches) - 1]
        assert (first.name == "route") == (p.router.rows > 0)
        grid = first.blocks if first.name == "route" else 0
        library.emulate_many(ctypes.byref(p), grid, seed, CHUNK, room_of(p))
        both = (
            words(held.router, p.router.ids, *slots),
            words(held.router, p.router.weights, *slots),
        )
        of_blocks = [(both[0], both[1].view(torch.float32))]
    else:
        own = [torch.zeros(blocks, *slots, dtype=t) for t in (torch.int32, torch.float32)]
        library.emulate_few(
            ctypes.byref(p), blocks, seed, *(ctypes.c_void_p(t.data_ptr()) for t in own)
        )
        of_blocks = list(zip(*own, strict=True))
        if launch.config.router != "logits":
            size = (p.tokens, logit_sums(p.hidden), -(-p.router.rows // 4) * 4)
            # Each beside its launch's number.
            found = words(held.tagged, p.router.partial, *size, 2).view(torch.float32)
            sums = found[..., : p.router.rows, 0]
    failure = library.emulate_failure()
    assert failure is None, failure
    return Routed(of_blocks, weights, ids, sums)


def factors(call: LayerCall) -> Tensor:
    """The rows that x is multiplied with: the router's, and the shared experts' gate."""
    gate = None if call.shared is None else call.shared.gate
    return torch.cat([t for t in (call.router_weight, gate) if t is not None])


def exact_sums(call: LayerCall) -> Tensor:
    """[T, segments, rows], in fp64."""
    pieces = (t.double().split(SEGMENT, dim=1) for t in (call.experts.x, factors(call)))
    return torch.stack([x @ w.T for x, w in zip(*pieces, strict=True)], dim=1)


def check(call: LayerCall, routed: Routed) -> None:
    """The router's result is `routing.route`'s, and every block knows it."""
    logits = call.router_logits
    if logits is None:
        assert call.router_weight is not None
        logits = router_logits(call.experts.x, call.router_weight, call.router_bias)
    weights, ids = route(logits, call.routing, call.selection_bias)
    valid, top_k = call.experts.x.size(0), call.routing.top_k
    if call.experts.num_valid_tokens is not None:
        valid = min(int(call.experts.num_valid_tokens), valid)
    assert torch.equal(routed.ids[:valid], ids[:valid])
    torch.testing.assert_close(routed.weights[:valid], weights[:valid], rtol=1e-6, atol=1e-9)
    for rest in (routed.ids, routed.weights):
        assert (rest[valid:].contiguous().view(torch.uint8) == 0xA5).all(), "nobody asked for these"
    local, expert_map = ids, call.experts.expert_map
    experts = call.experts.shape.experts
    if expert_map is not None:
        local = expert_map[ids.long()]
    local = torch.where((local < 0) | (local >= experts), -1, local)
    for slot_ids, slot_weights in routed.slots:
        found = slot_ids[:valid], slot_weights[:valid]
        assert torch.equal(found[0][:, :top_k], local[:valid])
        live = local[:valid] >= 0
        assert torch.equal(found[1][:, :top_k][live], routed.weights[:valid][live])
        # Slices of shared experts follow, each with the same weight.
        slices = torch.arange(found[0].size(1) - top_k) + experts
        assert (found[0][:, top_k:] == slices).all()
        gate = torch.ones(valid, 1)
        if call.shared is not None and call.shared.gate is not None:
            product = call.experts.x[:valid].float() @ call.shared.gate.float().reshape(-1, 1)
            gate = torch.sigmoid(product)
        torch.testing.assert_close(found[1][:, top_k:], gate.expand(-1, len(slices)))


def exact_call(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    router: str = "same",
    gated: bool = False,
    scoring: str = "sigmoid",
    case: dict[str, Any] | None = None,
    **options: Any,
) -> LayerCall:
    """A layer whose router's sums are exact in fp32, in any order; ties are many."""
    g = torch.Generator().manual_seed(tokens + hidden)

    def some(*size: int) -> Tensor:
        return torch.randint(-4, 5, size, generator=g)

    weight_type = torch.float32 if router == "fp32" else dtype
    experts_and_tokens = bf16_case(
        tokens, hidden=hidden, experts=experts, top_k=top_k, dtype=dtype, **(case or {})
    )
    routable = experts * (2 if (case or {}).get("mapped") else 1)
    options = {
        "x": some(tokens, hidden).to(dtype),
        "routing": RoutingConfig(top_k, scoring, renormalize=tokens % 2 == 0),
        "gate": weight_type if gated else None,
        **options,
    }
    if router != "logits":
        options["router_weight"] = (some(routable, hidden) / 64).to(weight_type)
    call = layer_of(experts_and_tokens, router=router, **options)
    if call.shared is not None and call.shared.gate is not None:
        call.shared.gate.copy_(some(*call.shared.gate.shape) / 128)
    return call


CALLS = {
    # Every block chooses for all tokens itself.
    "1 token": exact_call(1, 5, 2, 72),
    "8 columns": exact_call(3, 16, 8, 8, shared=64),
    "a token a warp": exact_call(12, 33, 4, 600, shared=128, gated=True),
    # Tokens are shared out; blocks of 8 tokens, then of 32.
    "13 tokens": exact_call(13, 20, 4, 264, shared=72, gated=True, selection_bias=True),
    "64 tokens": exact_call(64, 8, 2, 256, case={"mapped": True, "valid": 50}),
    "70 tokens": exact_call(70, 17, 3, 520, case={"valid": 67}),
    "no valid token": exact_call(70, 17, 3, 520, case={"valid": 0}),
    "fp32": exact_call(30, 33, 4, 264, dtype=torch.float16, router="fp32", router_bias=True),
    "fp32, x of bf16": exact_call(20, 40, 2, 96, router="fp32", shared=64, gated=True),
    "experts of three warps": exact_call(20, 70, 3, 64, scoring="softmax"),
    "two experts a lane": exact_call(5, 400, 4, 64, scoring="softmax"),
    "logits": exact_call(20, 9, 3, 64, router="logits", shared=64),
    "logits and a gate": exact_call(20, 9, 3, 264, router="logits", shared=64, gated=True),
    # A launch of its own; blocks of 16 tokens, then of 32.
    "290 tokens": exact_call(290, 33, 4, 264, case={"mapped": True, "valid": 270}),
    "20 of 290 tokens": exact_call(290, 33, 4, 264, case={"valid": 20}),
    "257 tokens, fp32": exact_call(
        *(257, 20, 4, 320), dtype=torch.float16, router="fp32", shared=64, gated=True
    ),
    "257 tokens, logits": exact_call(257, 9, 3, 64, router="logits", scoring="softmax"),
    "2049 tokens": exact_call(2049, 6, 2, 40, shared=64, gated=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_router_gives_what_it_must(build: Build, recorder: Recorder, name: str) -> None:
    call = CALLS[name]
    for seed in range(2 if call.experts.num_tokens < 100 else 1):
        routed = emulate(build, recorder, call, seed=seed)
        check(call, routed)
        if routed.sums is not None:
            valid = call.experts.num_valid_tokens
            want = exact_sums(call)[: None if valid is None else int(valid)]
            assert torch.equal(routed.sums[: want.size(0)].double(), want)


def real_call(tokens: int, **options: Any) -> LayerCall:
    """The same first tokens whatever their number, in fp32's full length."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(300, 264, generator=g)[:tokens]
    weight = torch.randn(33, 264, generator=g)
    case = bf16_case(tokens, hidden=264, experts=33, top_k=4, dtype=options.get("dtype"))
    return layer_of(
        case,
        router="fp32",
        x=x.to(case.x.dtype),
        router_weight=weight,
        routing=RoutingConfig(4, options.get("scoring", "topk_softmax")),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_fp32_lose_nothing(
    build: Build,
    recorder: Recorder,
    dtype: torch.dtype,
) -> None:
    call = real_call(20, dtype=dtype)
    sums = emulate(build, recorder, call).sums
    assert sums is not None
    pieces = (t.double().square().split(SEGMENT, dim=1) for t in (call.experts.x, factors(call)))
    size = torch.stack([x @ w.T for x, w in zip(*pieces, strict=True)], dim=1).sqrt()
    # Each of some hundred sums is rounded to fp32; two parts of a weight would be 17 bits.
    error = (sums.double() - exact_sums(call)).abs() / size
    assert error.max() < 2**-19
    assert error.square().mean().sqrt() < 2**-22


@pytest.mark.parametrize("scoring", ["softmax", "topk_softmax"])
def test_a_tokens_experts_do_not_depend_on_the_batch(
    build: Build,
    recorder: Recorder,
    scoring: str,
) -> None:
    *others, largest = (
        emulate(build, recorder, real_call(n, dtype=torch.float16, scoring=scoring), seed=n)
        for n in (1, 9, 70, 257)
    )
    for other in others:
        assert torch.equal(other.ids, largest.ids[: len(other.ids)])
        assert torch.equal(other.weights, largest.weights[: len(other.ids)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_and_biases_of_any_type(
    build: Build,
    recorder: Recorder,
    dtype: torch.dtype,
) -> None:
    g = torch.Generator().manual_seed(5)
    logits, bias = torch.randn(20, 9, generator=g), torch.randn(9, generator=g)
    given = exact_call(
        *(20, 9, 3, 64), router="logits", router_logits=logits.to(dtype), selection_bias=bias
    )
    check(given, emulate(build, recorder, given))
    made = exact_call(20, 9, 3, 64, selection_bias=bias.to(dtype), router_bias=bias.to(dtype))
    check(made, emulate(build, recorder, made))


def two_launches(build: Build, recorder: Recorder, patches: Sequence[Patch] = ()) -> None:
    """One after the other in a workspace, the second routed otherwise."""
    for before, seed in enumerate((3, 4)):
        g = torch.Generator().manual_seed(seed)
        call = exact_call(70, 17, 3, 264, x=torch.randint(-4, 5, (70, 264), generator=g).bfloat16())
        check(call, emulate(build, recorder, call, blocks=5, patches=patches, before=before))


def test_a_launch_takes_no_words_of_the_one_before(build: Build, recorder: Recorder) -> None:
    two_launches(build, recorder)
    always_the_first = Patch("router.h", "return epoch + 1;", "return 1;")
    with pytest.raises(AssertionError):
        two_launches(build, recorder, [always_the_first])


PLANTED = {
    "fragments in another order": (
        Patch("router.h", "w10[wp], w01[wp], w11[wp]", "w01[wp], w10[wp], w11[wp]"),
        "70 tokens",
    ),
    "rows and tokens of the sums exchanged": (
        Patch(
            "router.h",
            "(q & 1), row = first_row + lane / 4 + (q & 2 ? 8 : 0)",
            "q / 2, row = first_row + lane / 4 + (q & 1 ? 8 : 0)",
        ),
        "70 tokens",
    ),
    "units are not waited for": (
        Patch("router.h", "there = there && has_tag(v[i], tag);", "there = there || true;"),
        "70 tokens",
    ),
    "another block's tokens are not waited for": (
        Patch("config.h", "return NOT_YET;", "return NONE;"),
        "70 tokens",
    ),
    "terms of a softmax that are not there yet": (
        Patch("route.h", "    team.sync();\n    sum = 0;", "    sum = 0;"),
        "experts of three warps",
    ),
    "later ranges added to the wrong token": (
        Patch("router.h", "from + i * rows4 + row)", "from + i * rows4 + row + rows4)"),
        "290 tokens",
    ),
}


def test_a_launch_that_is_not_chosen_multiplies_nothing(build: Build, recorder: Recorder) -> None:
    call = CALLS["20 of 290 tokens"]
    launches, *results = recorder.layer(call, return_routing=False)
    route, p = recorder.all[1], launches[1].p
    assert route.name == "route"
    assert not any(result.numel() for result in results)  # nothing else is written
    held = recorder.buffers.router
    sums, library = held[: p.router.ids - p.router.sums], build(route.config, [])
    allow(library, *call.inputs().values(), held)
    few, count = p.few_tokens, call.experts.num_valid_tokens
    assert count is not None
    for chooses, valid, multiplies in (
        *((few, n, False) for n in (torch.iinfo(count.dtype).min, -1, 0, 20, few)),
        *((few, n, True) for n in (few + 1, 290, torch.iinfo(count.dtype).max)),
        *((0, n, n > 0) for n in (-1, 20, few + 1)),
    ):
        p.few_tokens = chooses
        count.fill_(valid)
        held.fill_(0xA5)
        library.emulate_many(ctypes.byref(p), route.blocks, 0, p.tokens, room_of(p))
        assert bool((sums != 0xA5).any()) == multiplies, valid
    count.fill_(20)  # as other tests find it


@pytest.mark.parametrize("bug", PLANTED)
def test_it_finds_what_is_planted(build: Build, recorder: Recorder, bug: str) -> None:
    patch, name = PLANTED[bug]
    call = CALLS[name]
    launches, _, _ = recorder.layer(call)
    build(chosen(launches, call).config, [patch])  # what does not compile is not found

    def run() -> None:
        for seed in range(3):
            # Five blocks: none has all units of a block of tokens.
            check(call, emulate(build, recorder, call, blocks=5, seed=seed, patches=[patch]))

    with pytest.raises(AssertionError):
        run()
