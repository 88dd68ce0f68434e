"""The plan's and the queues' arithmetic: C++ core against Python mirror, and what both promise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native import Builder, needs_cxx
from native.mirror import Probe, compare_plans, random_routing
from weave_moe import schedule
from weave_moe.schedule import (
    NONE,
    POLICY_CODES,
    WINDOW_LIMIT,
    Dispenser,
    Knobs,
    StageShape,
    build_plan,
    plan_groups,
)

WIDTH_CAPS = [*range(8, 64, 8), *range(64, 257, 16)]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    builder = Builder.of_session(tmp_path_factory)
    return Probe(builder.build("probe.cpp", shared=True))


@st.composite
def routings(draw: st.DrawFn, most_slots: int = 400) -> tuple[list[int], int, int]:
    """(expert_of_slot, experts, width_cap)."""
    experts = draw(st.integers(1, 40))
    some = st.integers(-1, experts - 1)
    hot = draw(some)
    one = st.one_of(some, st.just(hot)) if draw(st.booleans()) else some
    ids = draw(st.lists(one, max_size=most_slots))
    return ids, experts, draw(st.sampled_from(WIDTH_CAPS))


@st.composite
def stages(draw: st.DrawFn) -> tuple[Dispenser, list[int], int]:
    """A stage under any policy, with its expert_group and tasks a group."""
    counts = draw(st.lists(st.integers(0, 12), min_size=1, max_size=30))
    expert_group = [0]
    for n in counts:
        expert_group.append(expert_group[-1] + n)
    per_group = draw(st.integers(1, 5))
    knobs = Knobs(
        policy=draw(st.sampled_from(sorted(POLICY_CODES))),
        victim=draw(st.sampled_from(["largest", "random"])),
        steal=draw(st.sampled_from(["half", "one"])),
        min_steal=draw(st.integers(1, 3)),
        static_share=draw(st.integers(0, 100)),
        batch=draw(st.sampled_from((1, 2, 4))),
    )
    firsts = [g * per_group for g in expert_group]
    dispenser = Dispenser(knobs, firsts[-1], draw(st.integers(1, 50)), firsts)
    return dispenser, expert_group, per_group


# The two are one.


@needs_cxx
@settings(max_examples=300)
@given(routing=routings(), warps=st.integers(1, 4), narrow=st.booleans())
def test_core_and_mirror_make_the_same_plan(
    probe: Probe, routing: tuple[list[int], int, int], warps: int, narrow: bool
) -> None:
    assert probe.plan(*routing, warps=warps, narrow=narrow) == build_plan(*routing)


@needs_cxx
def test_core_and_mirror_agree_on_thousands_of_routings(probe: Probe) -> None:
    compare_plans(probe, seed=2024, routings=2000)


@needs_cxx
def test_core_and_mirror_agree_on_full_groups_of_the_largest_call(probe: Probe) -> None:
    rng = np.random.default_rng(5)
    ids = rng.choice(128, 4096 * 8, p=rng.dirichlet(np.full(128, 0.5))).tolist()
    for width_cap in (256, 8):
        assert probe.plan(ids, 128, width_cap, warps=8) == build_plan(ids, 128, width_cap)


@needs_cxx
@settings(max_examples=200)
@given(
    counts=st.lists(st.integers(0, 700), min_size=1, max_size=12),
    width_cap=st.sampled_from(WIDTH_CAPS),
    chunks=st.integers(1, 9),
    parts=st.integers(1, 5),
)
def test_core_and_mirror_find_the_same_task_at_every_index(
    probe: Probe, counts: list[int], width_cap: int, chunks: int, parts: int
) -> None:
    plan = plan_groups(counts, width_cap)
    tiles = probe.tiles(plan, chunks, parts)
    assert tiles == [
        schedule.tile_at(plan.groups, chunks, parts, i)
        for i in range(len(plan.groups) * chunks * parts)
    ]


@needs_cxx
@settings(max_examples=200)
@given(tasks=st.integers(0, 3000), workers=st.integers(1, 400), most=st.sampled_from((1, 2, 4)))
def test_core_and_mirror_deal_the_same_batches(
    probe: Probe, tasks: int, workers: int, most: int
) -> None:
    batches = schedule.make_batches(tasks, workers, most)
    assert probe.batches(tasks, workers, most) == (batches, [batches.task(i) for i in range(tasks)])
    tickets = tasks + 2 * workers
    assert probe.windows(tasks, workers, tickets, most) == [
        batches.window(tasks, t) for t in range(tickets)
    ]


@needs_cxx
@settings(max_examples=300)
@given(stage=stages())
def test_core_and_mirror_read_every_ticket_alike(
    probe: Probe, stage: tuple[Dispenser, list[int], int]
) -> None:
    dispenser, expert_group, per_group = stage
    for ticket in range(dispenser.tickets + dispenser.workers + 1):
        got = probe.ticket(dispenser, ticket, expert_group, per_group)
        assert got == (dispenser.tasks_of(ticket), ticket >= dispenser.tickets), ticket


@needs_cxx
@given(reduction=st.integers(1, 5000), parts=st.integers(1, 64))
def test_engine_and_mirror_cut_a_reduction_alike(probe: Probe, reduction: int, parts: int) -> None:
    for part in range(parts):
        want = schedule.k_range(reduction, parts, part)
        assert probe.k_range(reduction, parts, part) == want


@needs_cxx
@given(tag=st.integers(0, 70000), lo=st.integers(0, WINDOW_LIMIT), hi=st.integers(0, WINDOW_LIMIT))
def test_a_queue_word_holds_every_window_up_to_the_limit(
    probe: Probe, tag: int, lo: int, hi: int
) -> None:
    word = schedule.window_word(tag, lo, hi)
    assert probe.lib.probe_window_word(tag, lo, hi) == word
    assert schedule.window_tag(word) == tag % 65536
    assert (schedule.window_lo(word), schedule.window_hi(word)) == (lo, hi)
    assert schedule.window_empty(word) == (lo >= hi)


@needs_cxx
def test_the_limit_on_tasks_is_the_largest_window_end(probe: Probe) -> None:
    assert probe.lib.probe_window_limit() == WINDOW_LIMIT
    assert not schedule.window_empty(schedule.window_word(0, 0, WINDOW_LIMIT))
    assert schedule.window_empty(schedule.window_word(0, 0, WINDOW_LIMIT + 1) & (1 << 48) - 1)


# What a plan promises.


@given(routing=routings())
def test_every_slot_has_one_row_in_slot_order_and_padding_has_none(
    routing: tuple[list[int], int, int],
) -> None:
    ids, experts, width_cap = routing
    plan, rows = build_plan(ids, experts, width_cap)
    assert [s for s in rows.row_slot if s != NONE] == sorted(
        (s for s, e in enumerate(ids) if e != NONE), key=lambda s: (ids[s], s)
    )
    for slot, expert in enumerate(ids):
        row = rows.slot_row[slot]
        assert (row == NONE) == (expert == NONE)
        assert row == NONE or rows.row_slot[row] == slot
    for group in plan.groups:
        inside = rows.row_slot[group.row : group.row + group.width]
        assert all(ids[s] == group.expert for s in inside[: group.tokens])
        assert set(inside[group.tokens :]) <= {NONE}


@given(
    counts=st.lists(st.integers(0, 1500), min_size=1, max_size=10),
    width_cap=st.sampled_from(WIDTH_CAPS),
)
def test_groups_are_few_and_only_the_last_of_an_expert_is_padded(
    counts: list[int], width_cap: int
) -> None:
    plan = plan_groups(counts, width_cap)
    row = 0
    for expert, tokens in enumerate(counts):
        groups = plan.groups[plan.expert_group[expert] : plan.expert_group[expert + 1]]
        assert len(groups) == -(-tokens // width_cap), "as few groups as the cap allows"
        assert sum(g.tokens for g in groups) == tokens
        for i, g in enumerate(groups):
            assert (g.row, g.expert, g.siblings) == (row, expert, len(groups))
            assert 1 <= g.tokens <= g.width <= width_cap
            padding = g.width - g.tokens
            assert padding == 0 or (
                i == len(groups) - 1 and padding < (8 if g.tokens <= 56 else 16)
            )
            row += g.width
    assert row == plan.rows
    assert plan.rows <= schedule.max_rows(sum(counts), len(counts))
    assert len(plan.groups) <= schedule.max_groups(sum(counts), len(counts), width_cap)


def test_the_limits_on_groups_and_rows_are_reached() -> None:
    """The limits are no guesses: some routing needs every group, and all but few rows."""
    assert len(plan_groups([1, 1, 17], 8).groups) == 5 == schedule.max_groups(19, 3, 8)
    assert plan_groups([65], 256).rows == 80 == schedule.max_rows(65, 1)
    # And at the cap of many tokens.
    loads = [4 * 256 + 1, 1, 1]
    assert len(plan_groups(loads, 256).groups) == 7 == schedule.max_groups(sum(loads), 3, 256)
    assert plan_groups([4 * 256 + 65], 256).rows == schedule.max_rows(4 * 256 + 65, 1)


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    outputs=st.integers(1, 300),
    reduction=st.integers(1, 120),
    chunk=st.sampled_from([64, 128]),
    parts=st.integers(1, 4),
    width_cap=st.sampled_from([8, 16, 64]),
)
def test_tasks_cover_every_token_output_and_input_once(
    counts: list[int], outputs: int, reduction: int, chunk: int, parts: int, width_cap: int
) -> None:
    plan = plan_groups(counts, width_cap)
    stage = StageShape("gate_up", outputs, chunk, reduction, parts)
    seen = [np.zeros((n, outputs, reduction), np.int8) for n in counts]
    order = []
    for index in range(stage.tasks(plan)):
        t = schedule.task_at(plan, stage, index)
        tile = schedule.tile_at(plan.groups, stage.chunks, parts, index)
        block = (tile.group - plan.groups[tile.group].first) // schedule.TOGETHER
        order.append((t.expert, block, tile.chunk, tile.group, tile.part))
        seen[t.expert][
            t.token_start : t.token_start + t.token_count,
            t.chunk_start : t.chunk_start + t.chunk_count,
            t.k_start : t.k_start + t.k_count,
        ] += 1
    assert all((s == 1).all() for s in seen)
    assert order == sorted(order), "expert, block of groups, chunk, group, part"


@given(tokens=st.integers(1, 200), top_k=st.integers(1, 8), block=st.integers(1, 40))
def test_combine_tasks_cover_every_token_once(tokens: int, top_k: int, block: int) -> None:
    tasks = [
        schedule.combine_task(tokens, 7, top_k, block, i)
        for i in range(schedule.combine_stage(tokens, block))
    ]
    assert [n for t in tasks for n in range(t.token_start, t.token_start + t.token_count)] == [
        *range(tokens)
    ]
    with pytest.raises(IndexError, match="index must be"):
        schedule.combine_task(tokens, 7, top_k, block, len(tasks))


# What tickets promise.


@settings(max_examples=200)
@given(stage=stages())
def test_tickets_hand_out_every_task_exactly_once(
    stage: tuple[Dispenser, list[int], int],
) -> None:
    dispenser = stage[0]
    handed = [t for ticket in range(dispenser.tickets) for t in dispenser.tasks_of(ticket)]
    assert sorted(handed) == [*range(dispenser.tasks)]
    assert not dispenser.tasks_of(dispenser.tickets)


@given(tasks=st.integers(0, 2000), workers=st.integers(1, 60), most=st.sampled_from((1, 2, 4)))
def test_a_batch_is_large_only_while_much_remains(tasks: int, workers: int, most: int) -> None:
    batches, remaining, ticket = schedule.make_batches(tasks, workers, most), tasks, 0
    while remaining:
        if ticket % workers == 0:  # a round
            size = 4 if remaining >= 6 * workers else 2 if remaining >= 3 * workers else 1
            size = min(size, most)
        lo, hi = batches.window(tasks, ticket)
        assert lo == tasks - remaining
        assert hi - lo == size
        remaining -= size
        ticket += 1


@needs_cxx
@settings(max_examples=300)
@given(stage=stages(), order=st.lists(st.integers(0, 49), max_size=200))
def test_any_order_of_claims_runs_every_task_exactly_once(
    probe: Probe, stage: tuple[Dispenser, list[int], int], order: Sequence[int]
) -> None:
    dispenser, expert_group, per_group = stage
    ran, _ = probe.interleave(
        dispenser.knobs, dispenser.tasks, dispenser.workers, expert_group, per_group, order
    )
    assert ran == [1] * dispenser.tasks


@needs_cxx
@pytest.mark.parametrize("policy", ["steal", "window"])
@pytest.mark.parametrize("victim", ["largest", "random"])
def test_idle_workers_do_steal(probe: Probe, policy: str, victim: str) -> None:
    """Worker 0 takes its windows and stops; the others must find what it left."""
    knobs = Knobs(policy, victim)
    ran, steals = probe.interleave(knobs, 64, 4, [0, 64], 1, [0] * 2 + [1, 2, 3] * 200)
    assert ran == [1] * 64
    assert steals > 0


@given(lo=st.integers(0, 1000), size=st.integers(1, 1000))
def test_a_thief_takes_half_rounded_up_or_one(lo: int, size: int) -> None:
    assert schedule.steal_split(lo, lo + size) == lo + size // 2
    assert schedule.steal_split(lo, lo + size, one=True) == lo + size - 1


# Bad input.


@pytest.mark.parametrize("width_cap", [0, 4, 12, 57, 60, 72, 264, -8])
def test_a_width_that_no_group_may_have_is_refused(width_cap: int) -> None:
    with pytest.raises(ValueError, match=f"width_cap must be .* got {width_cap}"):
        build_plan([0], 1, width_cap)


def test_numbers_outside_their_range_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"expert_of_slot\[1\] must be -1 \(skip\) .. 3, got 4"):
        build_plan([0, 4], 4)
    with pytest.raises(ValueError, match=r"experts must be 1 \.\. 65534, got 65535"):
        build_plan([], 65535)
    with pytest.raises(ValueError, match=r"expert_tokens\[0\] must be 0 or more, got -1"):
        plan_groups([-1], 8)
    with pytest.raises(ValueError, match="parts must be at least 1, got 0"):
        schedule.gate_up_stage(64, 64, parts=0)
    with pytest.raises(IndexError, match=r"index must be 0 .. 1, got 2"):
        schedule.task_at(plan_groups([3], 8), schedule.down_stage(200, 64), 2)
    with pytest.raises(ValueError, match="combine_tokens must be at least 1, got 0"):
        schedule.combine_stage(4, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("policy", "auto"), ("victim", "smallest"), ("steal", "all"), ("min_steal", 0),
     ("static_share", 101), ("static_share", -1), ("batch", 3)],
)  # fmt: skip
def test_a_knob_outside_its_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* got {value!r}"):
        Knobs(**{name: value})  # type: ignore[arg-type]


def test_a_stage_that_does_not_fit_a_queue_is_refused() -> None:
    for policy in POLICY_CODES:
        big = WINDOW_LIMIT + 1
        if policy in schedule.STEALING:
            with pytest.raises(ValueError, match=f"tasks must be at most {WINDOW_LIMIT}"):
                Dispenser(Knobs(policy), big, 4)
        else:
            assert Dispenser(Knobs(policy), big, 4, [0, big]).tasks == big
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        Dispenser(Knobs(), 5, 0)
    with pytest.raises(ValueError, match="expert_task must have"):
        Dispenser(Knobs("static_expert"), 5, 2)


def test_random_routings_are_of_every_kind() -> None:
    """The bulk test draws empty plans, full ones, and experts cut into narrow and wide groups."""
    rng = np.random.default_rng(0)
    plans = [build_plan(*random_routing(rng))[0] for _ in range(300)]
    assert any(not p.groups for p in plans)
    assert any(len(p.groups) > p.experts for p in plans)
    assert any(all(p.expert_tokens) for p in plans)
    assert any(g.siblings > 2 and g.width > 56 for p in plans for g in p.groups)
    assert any(g.siblings > 2 and g.width <= 56 for p in plans for g in p.groups)
