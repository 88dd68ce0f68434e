"""The shipped scheduler core and CPU engine under stress, chosen schedules and sanitizers.

Six ways of looking, from tests/native:
  plan_team      the plan built by several threads, as by a block
  stress         threads, a million tasks, random pauses; every task exactly once and in order
  overlap        threads of two launches in one workspace: those too many are refused
  interleave     workers as fibers that switch at any atomic operation: all schedules with a few
                 preemptions, and random ones; deterministic, so a planted bug is always caught
  stress under ThreadSanitizer    data handed over without release and acquire
  engine_driver  the real engine, under ThreadSanitizer and under AddressSanitizer
Every planted bug is a change to a copy of the sources; its test first passes on the sources as they
are, then fails on the copy.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from native import STEPPED, Builder, Everywhere, Patch, needs_cxx
from native.mirror import Probe, compare_plans

pytestmark = needs_cxx

_Patches = Sequence[Patch | Everywhere]

THREAD = ("-O1", "-fsanitize=thread")
ADDRESS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SPINS = "100000"  # waits of at least five seconds; a wait that nobody ends takes no longer


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder.of_session(tmp_path_factory)


def run(program: Path, *args: object, prefix: Sequence[str] = ()) -> tuple[int, str]:
    """Exit status and all output of a driver."""
    done = subprocess.run(
        [*prefix, str(program), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        env={"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    return done.returncode, done.stdout + done.stderr


def counts(output: str) -> dict[str, int]:
    """What a driver counted: "tasks 12 steals 3" as a dict."""
    return {name: int(n) for name, n in re.findall(r"(\w+) (\d+)", output)}


def prefix_or_skip(builder: Builder, sanitizer: str) -> list[str]:
    prefix = builder.sanitizer_prefix(sanitizer)
    if prefix is None:
        pytest.skip(f"programs built with -fsanitize={sanitizer} cannot be built or run here")
    return prefix


# The checks that planted bugs have to fail. Each gives (exit status, output).


def interleavings(builder: Builder, patches: _Patches = ()) -> tuple[int, str]:
    program = builder.build("interleave.cpp", [*patches, *STEPPED])
    return run(program, "random", 20000, 1)


def races(builder: Builder, patches: _Patches = ()) -> tuple[int, str]:
    prefix = prefix_or_skip(builder, "thread")
    program = builder.build("stress.cpp", patches, flags=THREAD)
    return run(program, 1, 100_000, SPINS, prefix=prefix)


def engine_races(builder: Builder, patches: _Patches = ()) -> tuple[int, str]:
    prefix = prefix_or_skip(builder, "thread")
    flags = (*THREAD, "-ffp-contract=off")
    program = builder.build("engine_driver.cpp", patches, flags=flags, engine=True)
    return run(program, 1, 60, SPINS, prefix=prefix)


# The sources as they are. Cached: every planted bug asks for the same run again.


@cache
def clean_interleavings(builder: Builder) -> dict[str, int]:
    status, output = interleavings(builder)
    assert status == 0, output
    return counts(output)


@cache
def clean_races(builder: Builder) -> dict[str, int]:
    status, output = races(builder)
    assert status == 0, output
    return counts(output)


@cache
def clean_engine_races(builder: Builder) -> dict[str, int]:
    status, output = engine_races(builder)
    assert status == 0, output
    return counts(output)


def test_a_million_tasks_each_run_exactly_once_and_in_order(builder: Builder) -> None:
    status, output = run(builder.build("stress.cpp"), 1, 1_000_000, SPINS)
    assert status == 0, output
    seen = counts(output)
    assert seen["tasks"] >= 1_000_000
    assert seen["launches"] > 500
    assert seen["steals"] > 1000
    assert seen["lost"] > 0, "no claim ever met another one"


@pytest.mark.parametrize("case", range(10))
def test_every_schedule_with_two_preemptions(builder: Builder, case: int) -> None:
    program = builder.build("interleave.cpp", STEPPED)
    status, output = run(program, "bounded", 2, case)
    assert status == 0, output
    assert counts(output)["schedules"] > 10_000
    if case < 5:
        assert counts(output)["steals"] > 500


@pytest.mark.slow
def test_every_schedule_with_three_preemptions(builder: Builder) -> None:
    status, output = run(builder.build("interleave.cpp", STEPPED), "bounded", 3, 9)
    assert status == 0, output
    assert counts(output)["schedules"] > 500_000


def test_random_schedules_of_random_launches(builder: Builder) -> None:
    assert clean_interleavings(builder)["steals"] > 1000


def test_the_core_is_clean_under_thread_sanitizer(builder: Builder) -> None:
    assert clean_races(builder)["tasks"] >= 100_000


@pytest.mark.slow
def test_the_engine_is_clean_under_thread_sanitizer(builder: Builder) -> None:
    assert clean_engine_races(builder)["steals"] > 10


@pytest.mark.slow
def test_the_engine_is_clean_under_address_and_undefined_sanitizer(builder: Builder) -> None:
    prefix_or_skip(builder, "address,undefined")
    program = builder.build("engine_driver.cpp", flags=(*ADDRESS, "-ffp-contract=off"), engine=True)
    status, output = run(program, 2, 40, SPINS)
    assert status == 0, output


def test_a_worker_too_many_is_refused_and_the_launch_fails(builder: Builder) -> None:
    status, output = run(builder.build("overlap.cpp"), 20)
    assert status == 0, output
    assert counts(output)["overlaps"] == 20 * 15


@pytest.mark.parametrize(
    ("right", "wrong", "seen"),
    [
        ("< s.workers) return true;", "<= s.workers) return true;", "not as many entered"),
        ("fail(s.control, OVERLAP);", "", "is not OVERLAP|takes the launch for one that succeeded"),
        ("fail(s.control, OVERLAP);", "fail(s.control, PLAN_TIMEOUT);", "is not OVERLAP"),
        ("or_relaxed(&c->left, LEFT_FAILED);", "", "takes the launch for one that succeeded"),
        (
            "cas_relaxed(&c->error, OK, error);",
            "store_relaxed(&c->error, error);",
            "took the first",
        ),
    ],
)
def test_catches_an_overlap_that_goes_unnoticed(
    builder: Builder, right: str, wrong: str, seen: str
) -> None:
    # Unnoticed, nobody ends the wait for a plan: its limit does.
    soon = Patch("scheduler.h", "if (looks >= s.spin_limit)", "if (looks >= 300)")
    status, output = run(builder.build("overlap.cpp", [soon]), 1)
    assert status == 0, output
    program = builder.build("overlap.cpp", [Patch("scheduler.h", right, wrong), soon])
    status, output = run(program, 1)
    assert status == 1
    assert re.search(seen, output), output


def plan_races(builder: Builder, patches: _Patches = ()) -> tuple[int, str]:
    prefix = prefix_or_skip(builder, "thread")
    return run(builder.build("plan_team.cpp", patches, flags=THREAD), 1, 300, prefix=prefix)


def test_several_threads_build_the_plan_that_one_does(builder: Builder) -> None:
    status, output = plan_races(builder)
    assert status == 0, output
    assert counts(output)["groups"] > 1000


# Planted bugs: memory orders, which only ThreadSanitizer can see.


def assert_a_race(builder: Builder, *patches: Patch) -> None:
    clean_races(builder)
    status, output = races(builder, patches)
    assert status != 0
    assert "data race" in output, output


def test_catches_a_plan_published_relaxed(builder: Builder) -> None:
    assert_a_race(
        builder,
        Patch(
            "scheduler.h",
            "store_release(&s.control->plan, PLAN_READY)",
            "store_relaxed(&s.control->plan, (u32)PLAN_READY)",
        ),
    )


def test_catches_a_plan_read_without_acquire(builder: Builder) -> None:
    assert_a_race(
        builder,
        Patch(
            "scheduler.h",
            "return wait_for(s, &s.control->plan, PLAN_READY, PLAN_TIMEOUT);",
            """for (u32 i = 0; i < s.spin_limit; ++i) {
    if (load_relaxed(&s.control->plan) == PLAN_READY) return true;
    pause(i);
  }
  return false;""",
        ),
    )


@pytest.mark.parametrize("counter", ["up_done[group]", "down_done[expert]"])
def test_catches_a_missing_dependency_release(builder: Builder, counter: str) -> None:
    assert_a_race(
        builder,
        Patch("scheduler.h", f"add_release(&s.{counter}, 1u)", f"add_relaxed(&s.{counter}, 1u)"),
    )


def test_catches_a_missing_dependency_acquire(builder: Builder) -> None:
    """The plan still has its acquire here; tasks wait with a relaxed load."""
    wait = "if (load_acquire(counter) >= target) return true;"
    assert_a_race(
        builder,
        Patch(
            "scheduler.h",
            wait,
            "if ((error == PLAN_TIMEOUT ? load_acquire(counter) : load_relaxed(counter)) >= target)"
            " return true;",
        ),
    )


def test_catches_a_plan_built_without_a_barrier(builder: Builder) -> None:
    status, output = plan_races(builder)
    assert status == 0, output
    step = "  team.sync();\n  place_slots("
    patch = Patch("plan.h", step, step.replace("  team.sync();\n", ""))
    status, output = plan_races(builder, [patch])
    assert status != 0
    assert "data race" in output or "another plan" in output, output


def test_catches_k_ranges_added_without_order(builder: Builder) -> None:
    count = "add_acq_rel(&s.part_done[stage][tile], 1u)"
    assert_a_race(builder, Patch("scheduler.h", count, count.replace("acq_rel", "relaxed")))


@pytest.mark.slow
def test_catches_a_missing_dependency_release_in_the_engine(builder: Builder) -> None:
    clean_engine_races(builder)
    release = "add_release(&s.up_done[group], 1u)"
    patch = Patch("scheduler.h", release, release.replace("release", "relaxed"))
    status, output = engine_races(builder, [patch])
    assert status != 0
    assert "data race" in output, output


# Planted bugs: claims and counters, caught by the schedules that break them.


def assert_a_bad_schedule(builder: Builder, *patches: Patch, wrong: str) -> None:
    clean_interleavings(builder)
    status, output = interleavings(builder, patches)
    assert status == 1, output
    assert re.search(wrong, output), output


def test_catches_a_claim_without_compare_and_swap(builder: Builder) -> None:
    claim = Patch(
        "queue.h",
        "return cas_relaxed(&stage.queue[worker], own, own + 1);",
        "return store_relaxed(&stage.queue[worker], own + 1), own;",
    )
    assert_a_bad_schedule(builder, claim, wrong="ran twice")
    # Threads on cores find it as well, without any help.
    status, output = run(builder.build("stress.cpp", [claim]), 1, 1_000_000, 2000)
    assert status == 1
    assert re.search("ran twice|ran before|in vain|error flag|was lost", output), output


def test_catches_a_refill_before_the_word_is_empty(builder: Builder) -> None:
    """A window with one task left is overwritten by the next ticket's: that task is lost."""
    early = "if (window_lo(own) + (exhausted ? 0 : 1) < window_hi(own))"
    issue = "if (!window_empty(own)) return cas_relaxed"
    resolve = "if (!window_empty(own)) {\n      if (raw"
    assert_a_bad_schedule(
        builder,
        Patch("queue.h", issue, issue.replace("if (!window_empty(own))", early)),
        Patch("queue.h", resolve, resolve.replace("if (!window_empty(own))", early)),
        wrong="in vain|was lost",
    )


def test_catches_a_thief_that_compares_part_of_the_word(builder: Builder) -> None:
    """It looks at hi alone, and puts back a lo that the owner has moved on."""
    assert_a_bad_schedule(
        builder,
        Patch(
            "queue.h",
            "if (found == word) {",
            """const u64 mine = window_word(window_tag(word), lo, split);
      if (found == word || (window_hi(found) == hi && !window_empty(found) &&
                            cas_relaxed(&stage.queue[victim], found, mine) == found)) {""",
        ),
        wrong="ran twice|ran before",
    )


def test_catches_a_worker_that_leaves_its_window_behind(builder: Builder) -> None:
    retry = "counts.lost++;\n        return RETRY;"
    assert_a_bad_schedule(
        builder,
        Patch("queue.h", retry, retry.replace("RETRY", "DRY")),
        wrong="in vain|was lost|not empty",
    )


@pytest.mark.parametrize(
    ("reset", "wrong"),
    [
        ("store_relaxed(&s.control->tick[i], (u64)0);", "dispenser was not reset"),
        ("store_relaxed(&s.up_done[i], 0u);", "dependency counter was not reset"),
        ("store_relaxed(&s.down_done[i], 0u);", "dependency counter was not reset"),
        ("store_relaxed(&s.part_done[stage][tile], 0u);", "dependency counter was not reset"),
        ("store_relaxed(&s.control->plan, (u32)PLAN_NONE);", "launch state was not reset"),
        ("store_relaxed(&s.control->left, 0u);", "launch state was not reset"),
    ],
)
def test_catches_a_counter_not_reset_between_launches(
    builder: Builder, reset: str, wrong: str
) -> None:
    assert_a_bad_schedule(builder, Patch("scheduler.h", reset, "(void)s;"), wrong=wrong)


def test_catches_stages_that_share_their_counts_of_k_ranges(builder: Builder) -> None:
    """A down tile may start while the gate_up tile of the same number is unfinished."""
    assert_a_bad_schedule(
        builder,
        Everywhere("scheduler.h", "s.part_done[stage]", "s.part_done[(void)stage, 0]"),
        wrong="last K range|in vain|not reset",
    )


def test_catches_a_plan_published_before_it_is_built(builder: Builder) -> None:
    claim = "cas_relaxed(&s.control->plan, PLAN_NONE, PLAN_CLAIMED)"
    assert_a_bad_schedule(
        builder, Patch("scheduler.h", claim, claim.replace("CLAIMED", "READY")), wrong=": .+"
    )


# Planted bugs: arithmetic, caught by the comparison with the Python mirror.


@cache
def mirror_agrees(builder: Builder) -> None:
    compare_plans(Probe(builder.build("probe.cpp", shared=True)), seed=7, routings=300)


@pytest.mark.parametrize(
    ("right", "off"),
    [
        ("div_up(tokens, width_cap)", "tokens / width_cap + 1"),
        ("(u64)g * c.units / c.groups", "((u64)g * c.units + 1) / c.groups"),
        ("hi = g + 1 < c.groups ?", "hi = g < c.groups ?"),
        ("u32 within = tile - any.first * chunks, first", "u32 within = tile - any.first, first"),
    ],
)
def test_catches_an_off_by_one_group(builder: Builder, right: str, off: str) -> None:
    mirror_agrees(builder)
    patched = builder.build("probe.cpp", [Patch("plan.h", right, off)], shared=True)
    with pytest.raises(AssertionError):
        compare_plans(Probe(patched), seed=7, routings=300)


def test_a_planted_bug_whose_place_has_changed_is_an_error(builder: Builder) -> None:
    """A patch that no longer applies must not pass for a bug that was caught."""
    with pytest.raises(AssertionError, match="occurs 0 times"):
        builder.sources([Patch("queue.h", "no such text", "")])
    with pytest.raises(AssertionError, match=r"occurs \d+ times"):
        builder.sources([Patch("queue.h", "return", "")])
