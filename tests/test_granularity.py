"""`choose_kernel`: whatever the sizes, the kernel that it names fits the GPU and holds the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weave_moe.presets import PRESETS, Preset
from weave_moe.schedule import build_plan, check_width_cap, combine_task, max_groups
from weave_moe.schedule.granularity import (
    CONTROL_BYTES,
    FEW_TOKENS,
    GATHER_WIDTH,
    LOCAL_SLOTS,
    MANY_WIDTH_CAP,
    MAX_SLOTS,
    MAX_STAGES,
    OWN_BYTES,
    SHARED_BYTES,
    STAGING_BYTES,
    WIDTH_CAPS,
    KernelPlan,
    choose_kernel,
    local_plan_bytes,
)

TOKENS = st.one_of(st.integers(1, 8), st.integers(1, 400), st.integers(1, 8192))
EXPERTS = st.one_of(st.integers(1, 8), st.integers(1, 1024), st.integers(1000, 1024))
TOP_K = st.integers(1, 16)
HIDDEN = st.integers(1, 2048).map(lambda n: 8 * n)
CAPS = [cap for caps in WIDTH_CAPS.values() for cap in caps]


@dataclass(frozen=True)
class Sizes:
    """What a kernel is chosen for. shared: slices of shared experts."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    router: bool
    shared: int

    @property
    def slots(self) -> int:
        return self.tokens * (self.top_k + self.shared)

    @property
    def all_experts(self) -> int:
        return self.experts + self.shared

    def choose(self) -> KernelPlan:
        return choose_kernel(**vars(self))


@st.composite
def all_sizes(draw: st.DrawFn) -> Sizes:
    """Layers that the backend hands over: up to 32 slots and 1,024 experts with the shared ones,
    of which there are some only where the kernel routes."""
    tokens, top_k, hidden = draw(TOKENS), draw(TOP_K), draw(HIDDEN)
    router = draw(st.booleans())
    shared = draw(st.one_of(st.just(0), st.just(1), st.integers(0, MAX_SLOTS - top_k)))
    shared = shared if router else 0
    return Sizes(tokens, top_k, min(draw(EXPERTS), 1024 - shared), hidden, router, shared)


SIZES = all_sizes()


def used(plan: KernelPlan, sizes: Sizes) -> int:
    """Bytes of shared memory that a launch takes."""
    bytes_ = CONTROL_BYTES + plan.ring_bytes
    if plan.many:
        return bytes_ + STAGING_BYTES
    # device/experts.cu: slots of a token that a block routes for itself, then its plan.
    own = MAX_SLOTS * (8 + 8) if sizes.router else 0
    return bytes_ + own + local_plan_bytes(sizes.slots, sizes.all_experts, plan.width_cap)


@given(SIZES)
def test_it_fits_a_blocks_shared_memory_with_a_ring_that_streams(sizes: Sizes) -> None:
    plan = sizes.choose()
    assert used(plan, sizes) <= SHARED_BYTES
    # As much ring as there is room for, in whole steps of 1,024 bytes.
    assert used(plan, sizes) + 1024 > SHARED_BYTES
    # Both are followed by what TMA writes or reads with a swizzle, or by 16-byte fields.
    assert plan.ring_bytes % 1024 == STAGING_BYTES % 1024 == 0
    for width in range(8, plan.width_cap + 1, 8):
        stages = plan.stages(width)
        stage = (plan.tile_m + width) * plan.tile_k * 2
        # One stage is multiplied, one waits, one is being filled.
        assert 3 <= stages <= MAX_STAGES
        assert stages * stage <= plan.ring_bytes
        assert stages == MAX_STAGES or (stages + 1) * stage > plan.ring_bytes


@given(SIZES)
def test_its_sizes_are_those_that_the_kernel_is_written_for(sizes: Sizes) -> None:
    plan = sizes.choose()
    assert plan.tile_m in (64, 128)
    assert plan.tile_k in (64, 128)
    assert check_width_cap(plan.width_cap) <= MANY_WIDTH_CAP
    assert plan.many or plan.width_cap in WIDTH_CAPS[plan.tile_m]
    assert plan.threads == 2 * plan.tile_m + 128
    assert plan.chunk_up() * 2 == plan.chunk_up(gated=False) == plan.chunk_down == plan.tile_m
    assert plan.gathers == (plan.width_cap > GATHER_WIDTH)
    if plan.many:
        # Rows come from the gathered copy alone, products have multiples of 16 columns, each of two
        # warpgroups is followed by a warp that stores, and those can store no part of a sum.
        assert plan.gathers
        assert plan.width_cap % 16 == 0
        assert plan.tile_m == 128
        assert plan.parts_up == plan.parts_down == 1
        assert not plan.hold_down
    # Combine tasks read and write 16 bytes a lane, eight elements.
    assert plan.combine_tokens >= 1
    assert plan.slice % 8 == 0


@given(TOKENS, TOP_K, EXPERTS, HIDDEN)
def test_combine_tasks_cover_every_element_of_every_token_once(
    tokens: int, top_k: int, experts: int, hidden: int
) -> None:
    plan = choose_kernel(tokens=tokens, top_k=top_k, experts=experts, hidden=hidden)
    if plan.many:
        return  # no tasks: a launch of its own
    slices = -(-hidden // plan.slice)
    blocks = -(-tokens // plan.combine_tokens)
    assert (slices - 1) * plan.slice < hidden <= slices * plan.slice
    last = combine_task(tokens, hidden, top_k, plan.combine_tokens, blocks - 1)
    assert last.token_start + last.token_count == tokens
    assert blocks * slices < 1 << 24, "a queue's window has 24 bits"


@given(SIZES)
def test_a_local_plan_has_room_for_its_scratch(sizes: Sizes) -> None:
    plan, experts = sizes.choose(), sizes.all_experts
    if plan.many:
        return
    # device/experts.cu lays it behind the weights of the deepest ring: sums of up to 16 warps (8
    # bytes each), two words an expert and at least one histogram, all of an even number of words.
    room = plan.ring_bytes - plan.stages(8) * plan.tile_m * plan.tile_k * 2
    assert room >= 4 * (2 * 16 + 3 * ((experts + 1) // 2 * 2))


@given(SIZES)
def test_a_choice_of_experts_has_room_in_what_will_be_the_ring(sizes: Sizes) -> None:
    plan = sizes.choose()
    if plan.many:
        return
    # device/route.h: score and key of each expert, keys of groups, the experts chosen and their
    # scores; the best of each warp and a word of it; the gate's logit.
    choice = 4 * (2 * sizes.experts + 32 + 2 * 16 + (2 * 16 + 1) * 16 + 1)
    assert choice <= plan.ring_bytes


@given(SIZES)
def test_what_each_block_routes_for_itself_is_counted(sizes: Sizes) -> None:
    plan = sizes.choose()
    assert OWN_BYTES == MAX_SLOTS * 2 * 8
    assert OWN_BYTES % 16 == 0, "a plan's groups follow"
    if not sizes.router:
        return
    # Routing changes nothing else: the same tiles, and less ring for as much as it takes.
    other = replace(sizes, router=False).choose()
    if plan.many or other.many:
        assert plan.many >= other.many
        return
    assert (plan.tile_m, plan.tile_k, plan.width_cap) == (
        other.tile_m,
        other.tile_k,
        other.width_cap,
    )
    least = OWN_BYTES // 1024
    assert least <= (other.ring_bytes - plan.ring_bytes) // 1024 <= least + 1


@given(SIZES)
def test_shared_experts_are_slots_and_experts_like_the_others(sizes: Sizes) -> None:
    plan, plain = sizes.choose(), replace(sizes, shared=0).choose()
    assert plan.many >= plain.many
    # Groups are as wide as the routed experts' loads ask for; those of shared experts are cut.
    if not plan.many and plan.tile_m == plain.tile_m:
        assert plan.width_cap == plain.width_cap
    assert plan.tile_m == (64 if sizes.slots <= 32 and not plan.many else 128)


@given(st.data())
def test_a_local_plan_has_room_for_any_routing(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 40), "experts")
    top_k = data.draw(st.integers(1, 8), "top_k")
    tokens = data.draw(st.integers(1, 60), "tokens")
    slots = tokens * top_k
    # Few experts with many slots, many with one, and some that are skipped.
    few = data.draw(st.integers(1, experts), "used experts")
    ids = data.draw(st.lists(st.integers(-1, few - 1), min_size=slots, max_size=slots), "experts")
    width_cap = data.draw(st.sampled_from(CAPS), "width_cap")
    plan, rows = build_plan(ids, experts, width_cap)
    groups = max_groups(slots, experts, width_cap)
    assert len(plan.groups) <= groups
    room = local_plan_bytes(slots, experts, width_cap)
    # A group takes 16 bytes; rows and slots are 16-bit numbers, with all ones for none.
    assert groups * 16 + 4 * (experts + 1) + 2 * (len(rows.row_slot) + slots) <= room
    assert len(rows.row_slot) < 0xFFFF


@given(SIZES)
def test_numbers_of_a_local_plan_are_below_its_index_type(sizes: Sizes) -> None:
    plan, slots = sizes.choose(), sizes.slots
    if not plan.many:
        assert sizes.tokens <= FEW_TOKENS
        assert slots <= LOCAL_SLOTS
        assert slots + 15 * min(sizes.all_experts, slots) < 0xFFFF
        # device/router.h counts the units of blocks of 8 tokens, of 32 from 65 tokens on.
        assert -(-sizes.tokens // (8 if sizes.tokens <= 64 else 32)) <= 32


@given(TOKENS, TOP_K, EXPERTS)
def test_the_widest_group_is_worth_its_registers(tokens: int, top_k: int, experts: int) -> None:
    plan = choose_kernel(tokens=tokens, top_k=top_k, experts=experts, hidden=2048)
    slots = tokens * top_k
    mean = min(tokens, slots / min(experts, slots))
    # Even routing must not be cut into more groups than it has experts, except at the widest.
    caps = (MANY_WIDTH_CAP,) if plan.many else WIDTH_CAPS[plan.tile_m]
    assert plan.width_cap >= mean or plan.width_cap == caps[-1]
    # Nor may a kernel be compiled for widths that no routing of so few tokens reaches: an expert
    # is chosen once by a token.
    smaller = [cap for cap in caps if cap < plan.width_cap]
    assert not smaller or tokens > smaller[-1]


def test_layers_of_small_tasks_get_one_counter() -> None:
    def policy(hidden: int, intermediate: int | None, tokens: int = 64) -> str:
        sizes = {"hidden": hidden, "intermediate": intermediate}
        return choose_kernel(tokens=tokens, top_k=8, experts=128, **sizes).policy

    assert policy(2048, 256) == policy(256, 2048) == policy(256, None) == "counter"
    assert policy(2048, 264) == policy(2048, None) == "steal"
    # With many tokens a ticket is one task, and so "steal" is a counter itself.
    assert policy(2048, 256, FEW_TOKENS + 1) == "steal"
    for preset in PRESETS.values():
        shape = preset.shape()
        assert policy(shape.hidden, shape.intermediate) == "steal"


def test_few_slots_get_finer_tiles() -> None:
    def tile(tokens: int) -> int:
        return choose_kernel(tokens=tokens, top_k=8, experts=128, hidden=2048).tile_m

    assert tile(1) == tile(4) == 64
    assert tile(16) == tile(4096) == 128


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_known_models_plan_for_themselves_until_there_are_many_tokens(preset: Preset) -> None:
    shape = preset.shape()

    for router, shared in ((False, 0), (True, 0), (True, 1), (True, 2)):

        def many(tokens: int, router: bool = router, shared: int = shared) -> bool:
            return (
                Sizes(tokens, shape.top_k, shape.experts, shape.hidden, router, shared)
                .choose()
                .many
            )

        found = [many(tokens) for tokens in range(1, 4 * FEW_TOKENS)]
        assert found == sorted(found)
        assert not found[0]
        assert not many(64)
        assert many(FEW_TOKENS + 1)


@given(TOKENS, TOP_K, EXPERTS, HIDDEN)
def test_it_is_a_pure_function_and_prints_its_reasons(
    tokens: int, top_k: int, experts: int, hidden: int
) -> None:
    sizes = {"tokens": tokens, "top_k": top_k, "experts": experts, "hidden": hidden}
    plan = choose_kernel(**sizes)
    assert plan == choose_kernel(**sizes)
    text = str(plan)
    assert f"tiles of {plan.tile_m} rows x up to {plan.width_cap} tokens" in text
    assert plan.reasons
    for reason in plan.reasons:
        assert reason in text
    assert replace(plan, reasons=()) != plan
    assert all(line.isascii() and len(line) < 120 for line in text.splitlines())


@pytest.mark.parametrize("shared_bytes", [SHARED_BYTES - 8192, SHARED_BYTES])
@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_known_models_get_few_kernels(preset: Preset, shared_bytes: int) -> None:
    shape = preset.shape()
    plans = {
        (p.tile_m, p.tile_k, p.width_cap, p.many)
        for tokens in (*range(1, 1025), 2048, 4096, 8192, 16_384)
        for p in [
            choose_kernel(
                tokens=tokens,
                top_k=shape.top_k,
                experts=shape.experts,
                hidden=shape.hidden,
                shared_bytes=shared_bytes,
            )
        ]
    }
    # Each is compiled once a shape family: a warmup of seconds, not minutes.
    assert 2 <= len(plans) <= 10
