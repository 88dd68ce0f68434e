"""The queue protocol, model-checked: device/queue.pml under Spin, and why a naive deque is wrong.

The model is checked for a few sizes that take seconds; docs/protocol.md has the counts of larger
ones. Each planted bug must fail, or the model would prove nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from native import DEVICE

MODEL = DEVICE / "queue.pml"

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None,
    reason="Spin is not installed (Debian: apt-get install spin), or gcc is not",
)


def check(folder: Path, *options: str) -> tuple[int, str, str]:
    """(states, first error or "", all output) of a full search of the model with these options."""
    defines = [f"-D{option}" for option in options]
    compiled = ["gcc", "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", *defines, "-o", "pan", "pan.c"]
    for command in (["spin", "-a", *defines, str(MODEL)], compiled):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        ["./pan", "-m20000", "-w23"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    output = done.stdout
    assert "max search depth too small" not in output, output
    assert "out of memory" not in output, output
    states = re.search(r"(\d+) states, stored", output)
    errors = re.search(r"errors: (\d+)", output)
    assert states, output
    assert errors, output
    error = re.search(r"pan:1: (.*)", output)
    assert bool(error) == (errors[1] != "0"), output
    return int(states[1]), error[1] if error else "", output


@needs_spin
@pytest.mark.parametrize(
    "options",
    [
        "NW=2 NL=2 NU=6 ND=4 B=5 PREFETCH",
        "NW=2 NL=2 NU=6 ND=4 B=2 NG=1",
        "NW=2 NL=2 NU=5 ND=3 B=4 PREFETCH STEAL_ONE",
        "NW=3 NL=2 NU=2 ND=1 B=2 NG=1",
        "NW=3 NL=1 NU=3 ND=2 B=3",
        "NW=3 NL=2 NU=3 ND=0 B=3 NG=1",
    ],
)
def test_every_interleaving_runs_every_task_once_and_resets(tmp_path: Path, options: str) -> None:
    states, error, output = check(tmp_path, *options.split())
    assert not error, output
    assert states > 100_000


@needs_spin
def test_tags_are_not_needed_within_a_launch_nor_across_launches(tmp_path: Path) -> None:
    """A worker starts each launch at tag 1 whatever its word's tag is; even no tags would do."""
    for options in ("NW=2 NL=3 NU=5 ND=3 B=4 NO_TAGS", "NW=3 NL=1 NU=4 ND=0 B=4 NG=1 NO_TAGS"):
        _, error, output = check(tmp_path, *options.split())
        assert not error, output


@needs_spin
def test_resident_workers_finish_without_the_others(tmp_path: Path) -> None:
    """The others start only when the resident ones have left: no wait of theirs may need them."""
    for options in (
        "NW=3 NL=2 NU=6 ND=4 B=3 RESIDENT=1 PREFETCH",
        "NW=3 NL=2 NU=5 ND=3 B=4 RESIDENT=2",
    ):
        _, error, output = check(tmp_path, *options.split())
        assert not error, output


@needs_spin
@pytest.mark.parametrize(
    ("bug", "wrong"),
    [
        ("OWNER_STORES", r"assertion violated  !\(ran\["),
        ("EARLY_REFILL", r"assertion violated .*(ran\[|nonempty)|invalid end state"),
        ("PART_COMPARE", r"assertion violated  !\(ran\["),
        ("TICK_KEPT", r"assertion violated .*tickets"),
        ("DONE_KEPT", r"assertion violated .*up_done"),
        ("LEAVES_WINDOW", r"assertion violated .*nonempty|invalid end state"),
        ("NO_WAIT", r"assertion violated .*ran\[k\]"),
        ("PLAN_EARLY", r"assertion violated \(built==launch\)"),
    ],
)
def test_the_model_catches_a_planted_bug(tmp_path: Path, bug: str, wrong: str) -> None:
    assert f"#ifdef BUG_{bug}" in MODEL.read_text() or f"#ifndef BUG_{bug}" in MODEL.read_text()
    _, error, output = check(tmp_path, "NW=2", "NL=2", "NU=6", "ND=3", "B=3", f"BUG_{bug}")
    assert re.search(wrong, error), output


def test_the_model_has_no_bug_that_no_test_plants() -> None:
    """Every BUG_ switch of the model is a parameter of the test above."""
    planted = {
        value[0]
        for mark in test_the_model_catches_a_planted_bug.pytestmark  # type: ignore[attr-defined]
        if mark.name == "parametrize"
        for value in mark.args[1]
    }
    assert planted == set(re.findall(r"#ifn?def BUG_(\w+)", MODEL.read_text()))


# The deque of two counters, head and tail, each moved by an atomic addition and taken back when it
# went too far: a pop is {read head and tail; slot = head++; take it if slot < tail} and a steal is
# {t = tail--; if t <= head: tail++, else take t - 1}. Every interleaving of its atomic steps:


@dataclass(frozen=True)
class _Deque:
    head: int
    tail: int
    taken: tuple[int, ...]
    """How often each task was taken."""
    workers: tuple[tuple[str, int], ...]
    """(next step, the number the worker holds)."""

    def then(self, worker: int, step: str, held: int = 0, **changes: int) -> _Deque:
        workers = (*self.workers[:worker], (step, held), *self.workers[worker + 1 :])
        return replace(self, workers=workers, **changes)

    def take(self, task: int) -> _Deque:
        if not 0 <= task < len(self.taken):
            return self  # garbage: a slot that nobody filled
        taken = (*self.taken[:task], self.taken[task] + 1, *self.taken[task + 1 :])
        return replace(self, taken=taken)

    def step(self, worker: int) -> _Deque | None:
        """The state after this worker's next atomic step; None if it has stopped."""
        step, held = self.workers[worker]
        match step:
            case "pop":
                return self.then(worker, "pop: see tail", self.head)
            case "pop: see tail":
                return self.then(worker, "stopped" if held >= self.tail else "pop: add")
            case "pop: add":
                return self.then(worker, "pop: check", self.head, head=self.head + 1)
            case "pop: check":
                if held >= self.tail:
                    return self.then(worker, "stopped")
                return self.take(held).then(worker, "pop")
            case "steal":
                return self.then(worker, "steal: check", self.tail, tail=self.tail - 1)
            case "steal: check":
                if held <= self.head:
                    return self.then(worker, "steal: undo")
                return self.take(held - 1).then(worker, "stopped")
            case "steal: undo":
                return self.then(worker, "stopped", tail=self.tail + 1)
        return None


def _deque_outcomes(tasks: int, poppers: int, thieves: int) -> set[tuple[int, ...]]:
    """How often each task ran, over all interleavings; what is still visible at the end is run."""

    def ends() -> Iterator[_Deque]:
        workers = (("pop", 0),) * poppers + (("steal", 0),) * thieves
        todo = [_Deque(0, tasks, (0,) * tasks, workers)]
        seen = set(todo)
        while todo:
            state = todo.pop()
            after = [n for w in range(len(workers)) if (n := state.step(w)) is not None]
            if not after:
                yield state
            todo += [n for n in after if n not in seen]
            seen.update(after)

    outcomes = set()
    for end in ends():
        for task in range(end.head, end.tail):
            end = end.take(task)
        outcomes.add(end.taken)
    return outcomes


def test_a_deque_of_two_counters_loses_a_task() -> None:
    """One owner, one thief, one task: both see the other's step, both back off."""
    assert _deque_outcomes(tasks=1, poppers=1, thieves=1) == {(0,), (1,)}


def test_a_deque_of_two_counters_runs_a_task_twice() -> None:
    """Two warps of the owner and two thieves: a failing thief raises tail again too late."""
    assert any(2 in taken for taken in _deque_outcomes(tasks=2, poppers=2, thieves=2))


def test_a_deque_of_two_counters_is_right_without_thieves() -> None:
    """So the losses above are the protocol's, not this model's."""
    assert _deque_outcomes(tasks=3, poppers=2, thieves=0) == {(1, 1, 1)}
