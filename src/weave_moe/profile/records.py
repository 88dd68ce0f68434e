"""The record of a launch: one entry a task, whoever made it, in memory and in a file.

Everything that is drawn or counted is drawn from these arrays, so an engine that fills them gets
the whole report. The file is numpy's npz: a JSON header and, for each policy, three or four arrays.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..schedule import StageShape

__all__ = [
    "ABSENT",
    "FORMAT",
    "MOMENTS",
    "PRODUCERS",
    "RECORD_DTYPE",
    "SHORTEST_WAIT_NS",
    "PolicyRecord",
    "Profile",
    "Timing",
    "load_profile",
    "save_profile",
]

Records = npt.NDArray[Any]
Moments = npt.NDArray[np.int64]

ABSENT: Final = -1
"""In a record: not known, or not there (no expert of a combine task, no victim of an own task)."""

FORMAT: Final = 2
"""Version of the file."""

PRODUCERS: Final = {
    "cpu": "recorded: threads of the CPU engine",
    "gpu": "recorded: blocks of the GPU kernel",
    "simulated": "PREDICTED by simulation, nothing was run",
}
"""Who makes records, and what their report says of them."""

MOMENTS: Final = ("claim_ns", "wait_ns", "load_ns", "compute_ns", "store_ns", "end_ns")
"""The times of a record, in the order in which they are written there."""

RECORD_DTYPE: Final = np.dtype(
    [
        ("worker", "<i4"),
        ("sm", "<i4"),
        ("stage", "<i4"),
        ("expert", "<i4"),
        ("group", "<i4"),
        ("chunk", "<i4"),
        ("part", "<i4"),
        ("victim", "<i4"),
        *((name, "<i8") for name in MOMENTS),
    ]
)
"""One task, 80 bytes.

worker: who ran it.  sm: where, -1 if that is not known or there is none.  stage: 0 gate_up, 1 down,
2 combine.  expert, group: -1 for combine.  chunk: chunk of output columns; for combine, block of
tokens.  part: K range.  victim: the worker whose queue it was stolen from, -1 if it is the
worker's own. A theft moves up to half a queue; its first task alone carries the victim's number.

Moments in nanoseconds since the launch began, -1 where nobody recorded them:
claim_ns: the worker had the task.  wait_ns: it had nothing else to do before this task, and waited
for what the task depends on, on a GPU for the first of its weights too; equal to compute_ns where
it did not wait.  load_ns: the first of its weights were asked for.  compute_ns: what it depends on
was there and work on it began (always recorded).  store_ns: its result was complete and was being
written.  end_ns: others were told that it is finished (always recorded). On a GPU a worker's next
task may begin before that.
"""

SHORTEST_WAIT_NS: Final = 500
"""A wait below this is no wait: it is the time between two readings of a clock."""

_LONGEST = 1 << 42  # over an hour in nanoseconds; times a million workers it is still 62 bits
_CORRUPT = (
    *(ValueError, KeyError, TypeError, AttributeError, OverflowError, EOFError, IndexError),
    RecursionError,
)


@dataclass(frozen=True)
class Timing:
    """What a launch's own records cannot tell: what comes before and after it, and what recording
    costs. Nanoseconds; -1: not known, or there is no such launch.

    call_ns: the whole call where nothing is recorded, from one call to the next.
    sort_ns: of the launch before this one, which sorts the tokens and gathers their rows.
    combine_ns: of the launch after it.
    launch_ns: this launch where nothing is recorded, from when its first worker knew the plan.
    recorded_call_ns, recorded_launch_ns: the same two where tasks are recorded; the call includes
    the clearing of the records' memory.
    shortest_ns, longest_ns: makespans of the launches that were recorded, of which the one of
    median length was kept.
    launches: how many of them.

    Raises ValueError for anything but whole numbers in range.
    """

    call_ns: int = ABSENT
    sort_ns: int = ABSENT
    combine_ns: int = ABSENT
    launch_ns: int = ABSENT
    recorded_call_ns: int = ABSENT
    recorded_launch_ns: int = ABSENT
    shortest_ns: int = ABSENT
    longest_ns: int = ABSENT
    launches: int = ABSENT

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or not ABSENT <= value < _LONGEST:
                raise ValueError(f"{name} must be {ABSENT} .. {_LONGEST - 1}, got {value!r}")


@dataclass(frozen=True, eq=False)
class PolicyRecord:
    """A launch under one policy.

    policy: its name.  workers: how many there may be; numbered from 0.  seats: how many run at a
    time, where a neighbour holds SMs; else as many as workers.
    makespan_ns: from when the launch began until its last worker left.  tail_gap_ns: from the first
    worker's departure to the last one's.  steal_attempts: looks for something to steal, -1 if they
    were not counted.  read_bytes: weights read from device memory, -1 if that is not known.
    first_ns, last_ns: [workers] int64, arrival and departure of each, -1 for one that never came.
    records: [tasks] of `RECORD_DTYPE`, by compute_ns.
    planned_ns: [workers] int64, when each had made the plan for itself, -1 for one that did not;
    None where workers do not, or nobody recorded it.
    timing: None where nothing around the launch was measured or predicted.

    Raises ValueError for anything that contradicts itself.
    """

    policy: str
    workers: int
    seats: int
    makespan_ns: int
    tail_gap_ns: int
    steal_attempts: int
    read_bytes: int
    first_ns: Moments
    last_ns: Moments
    records: Records
    planned_ns: Moments | None = None
    timing: Timing | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or not self.policy:
            raise ValueError(f"policy must be a name, got {self.policy!r}")
        least = {"workers": 1, "seats": 1, "makespan_ns": 0, "tail_gap_ns": 0}
        for name, low in {**least, "steal_attempts": ABSENT, "read_bytes": ABSENT}.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value < _LONGEST:
                raise ValueError(f"{name} must be {low} .. {_LONGEST - 1}, got {value!r}")
        if self.workers > 1 << 20 or self.seats > self.workers:
            raise ValueError(
                f"workers must be at most {1 << 20} and seats at most workers, "
                f"got {self.workers} and {self.seats}"
            )
        for name in ("first_ns", "last_ns", "planned_ns"):
            array = getattr(self, name)
            if array is None and name == "planned_ns":
                continue
            if array.shape != (self.workers,) or array.dtype != np.int64:
                raise ValueError(
                    f"{name} must be int64 [{self.workers}], got {array.dtype} {array.shape}"
                )
            _within(name, array, ABSENT, self.makespan_ns)
        if self.planned_ns is not None:
            early = (self.planned_ns != ABSENT) & (self.planned_ns < self.first_ns)
            if early.any():
                worker = int(np.flatnonzero(early)[0])
                raise ValueError(f"planned_ns must not be before first_ns: worker {worker}")
        if self.records.dtype != RECORD_DTYPE or self.records.ndim != 1:
            raise ValueError(f"records must be a row of RECORD_DTYPE, got {self.records.dtype}")
        self._check_records()

    def _check_records(self) -> None:
        records, last = self.records, self.makespan_ns
        _within("worker", records["worker"], 0, self.workers - 1)
        _within("stage", records["stage"], 0, 2)
        _within("victim", records["victim"], ABSENT, self.workers - 1)
        for name in ("sm", "expert", "group", "chunk", "part"):
            _within(name, records[name], ABSENT, (1 << 31) - 1)
        for name in MOMENTS:
            _within(name, records[name], ABSENT, last)
        for name in ("compute_ns", "end_ns"):
            _within(name, records[name], 0, last)
        for early, late in (
            *(("claim_ns", "wait_ns"), ("claim_ns", "compute_ns"), ("wait_ns", "compute_ns")),
            *(("compute_ns", "store_ns"), ("store_ns", "end_ns"), ("compute_ns", "end_ns")),
            *(("claim_ns", "load_ns"), ("load_ns", "end_ns")),
        ):
            a, b = records[early], records[late]
            wrong = np.flatnonzero((a != ABSENT) & (b != ABSENT) & (a > b))
            if wrong.size:
                at = int(wrong[0])
                raise ValueError(
                    f"{early} must not be after {late}: record {at} has {a[at]} and {b[at]}"
                )
        if (records["victim"] == records["worker"]).any():
            raise ValueError("victim must be another worker than the record's own")
        if (np.diff(records["compute_ns"]) < 0).any():
            raise ValueError("records must be in the order of compute_ns")
        if self.planned_ns is not None:
            late = self.planned_ns[records["worker"]] > records["compute_ns"]
            if late.any():
                at = int(np.flatnonzero(late)[0])
                raise ValueError(f"planned_ns must not be after compute_ns: record {at}")

    @property
    def recorded(self) -> dict[str, bool]:
        """Whether each of `MOMENTS` is known for any task."""
        return {name: bool((self.records[name] != ABSENT).any()) for name in MOMENTS}


@dataclass(frozen=True, eq=False)
class Profile:
    """Launches of one layer on one routing, under several policies.

    producer: a key of `PRODUCERS`.  title, size, routing, machine: lines for people: the layer,
    its sizes, where the routing comes from, what ran it.  expert_tokens: [experts] int64, slots of
    each.
    stages: how gate_up and down are cut into chunks.  gated: whether a gate_up output takes two
    weight rows.  element_size: bytes of a weight.  notes: more lines.  runs: one a policy.

    Raises ValueError for anything that contradicts itself.
    """

    producer: str
    title: str
    size: str
    routing: str
    machine: str
    expert_tokens: Moments
    stages: tuple[StageShape, StageShape]
    gated: bool
    element_size: int
    notes: tuple[str, ...]
    runs: tuple[PolicyRecord, ...]

    def __post_init__(self) -> None:
        if self.producer not in PRODUCERS:
            raise ValueError(f"producer must be {', '.join(PRODUCERS)}, got {self.producer!r}")
        if self.expert_tokens.ndim != 1 or not self.expert_tokens.size:
            raise ValueError("expert_tokens must be [experts], of at least one expert")
        _within("expert_tokens", self.expert_tokens, 0, 1 << 40)
        if self.element_size not in (1, 2, 4):
            raise ValueError(f"element_size must be 1, 2 or 4, got {self.element_size!r}")
        if not self.runs:
            raise ValueError("runs must hold at least one policy")
        names = [run.policy for run in self.runs]
        if len(set(names)) != len(names):
            raise ValueError(f"each policy must be there once, got {', '.join(names)}")
        for run in self.runs:
            _within("expert", run.records["expert"], ABSENT, self.expert_tokens.size - 1)
            for number, stage in enumerate(self.stages):
                mine = run.records[run.records["stage"] == number]
                _within(f"chunk of {stage.stage}", mine["chunk"], 0, stage.chunks - 1)
                _within(f"part of {stage.stage}", mine["part"], 0, stage.parts - 1)
                _within(f"expert of {stage.stage}", mine["expert"], 0, self.expert_tokens.size - 1)

    @property
    def predicted(self) -> bool:
        """Whether nothing was run."""
        return self.producer == "simulated"

    @property
    def recorded(self) -> dict[str, bool]:
        """Whether each of `MOMENTS` is known for any task of any run."""
        found = [run.recorded for run in self.runs]
        return {name: any(one[name] for one in found) for name in MOMENTS}

    @property
    def tasks(self) -> int:
        """Of all runs."""
        return sum(len(run.records) for run in self.runs)

    def only(self, policies: tuple[str, ...]) -> Profile:
        """The runs of `policies`, in their order. Raises ValueError for one that is not there."""
        there = {run.policy: run for run in self.runs}
        for name in policies:
            if name not in there:
                raise ValueError(f"policy {name!r} is not recorded, only {', '.join(there)}")
        return replace(self, runs=tuple(there[name] for name in policies))


def _within(name: str, values: npt.NDArray[Any], low: int, high: int) -> None:
    wrong = np.flatnonzero((values < low) | (values > high))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(f"{name} must be {low} .. {high}, got {values[at]} at {at}")


_SCALARS = ("policy", "workers", "seats", "makespan_ns", "tail_gap_ns")
_COUNTS = ("steal_attempts", "read_bytes")
_ARRAYS = ("first_ns", "last_ns", "records")
_TEXTS = ("producer", "title", "size", "routing", "machine")
_STAGE = ("outputs", "chunk_outputs", "reduction", "parts")


def save_profile(profile: Profile) -> bytes:
    """The file of a profile; `load_profile` reads it."""
    header = {
        "format": FORMAT,
        **{name: getattr(profile, name) for name in (*_TEXTS, "gated", "element_size")},
        "notes": list(profile.notes),
        "stages": [{name: getattr(s, name) for name in _STAGE} for s in profile.stages],
        "runs": [
            {
                **{name: getattr(run, name) for name in (*_SCALARS, *_COUNTS)},
                "timing": None if run.timing is None else asdict(run.timing),
            }
            for run in profile.runs
        ],
    }
    arrays: dict[str, npt.NDArray[Any]] = {
        "header": np.array(json.dumps(header)),
        "expert_tokens": profile.expert_tokens,
    }
    for number, run in enumerate(profile.runs):
        arrays.update({f"{name}_{number}": getattr(run, name) for name in _ARRAYS})
        if run.planned_ns is not None:
            arrays[f"planned_ns_{number}"] = run.planned_ns
    buffer = io.BytesIO()
    saving: Any = np.savez_compressed
    saving(buffer, **arrays)
    return buffer.getvalue()


def load_profile(path: str | Path) -> Profile:
    """The profile in a file that `save_profile` made, here or elsewhere.

    Raises ValueError, naming the file, if it cannot be read, is no such file, or contradicts
    itself. Nothing in it is executed.
    """
    try:
        opened = np.load(path, allow_pickle=False)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise ValueError("no record of a launch: it has no header")
        with opened as file:
            if "header" not in file:
                raise ValueError("no record of a launch: it has no header")
            return _from_arrays({name: file[name] for name in file.files})
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ValueError(f"{path}: damaged, or no npz file") from error
    except _CORRUPT as error:
        # numpy's own words for a file of another kind name pickles, which nobody asked for.
        what = "damaged, or no npz file" if "pickle" in str(error) else str(error)
        if isinstance(error, KeyError):
            what = f"no record of a launch: {error.args[0]} is missing"
        raise ValueError(f"{path}: {what}") from error


def _timing(entry: dict[str, Any]) -> Timing:
    return Timing(**{field.name: entry[field.name] for field in fields(Timing)})


def _from_arrays(arrays: dict[str, npt.NDArray[Any]]) -> Profile:
    header = json.loads(str(arrays["header"]))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else header
        raise ValueError(f"format must be {FORMAT}, got {found!r}")
    for name in _TEXTS:
        if not isinstance(header[name], str):
            raise ValueError(f"{name} must be text, got {header[name]!r}")
    if len(header["stages"]) != 2:
        raise ValueError(f"stages must be gate_up and down, got {len(header['stages'])}")
    up, down = (
        StageShape(kind, **{name: int(entry[name]) for name in _STAGE})
        for kind, entry in zip(("gate_up", "down"), header["stages"], strict=True)
    )
    runs = []
    for number, entry in enumerate(header["runs"]):
        records = arrays[f"records_{number}"]
        if records.dtype.names != RECORD_DTYPE.names:
            raise ValueError(f"records must have the fields {', '.join(RECORD_DTYPE.names or ())}")
        planned = arrays.get(f"planned_ns_{number}")
        runs.append(
            PolicyRecord(
                **{name: entry[name] for name in (*_SCALARS, *_COUNTS)},
                first_ns=arrays[f"first_ns_{number}"].astype(np.int64),
                last_ns=arrays[f"last_ns_{number}"].astype(np.int64),
                records=records.astype(RECORD_DTYPE),
                planned_ns=None if planned is None else planned.astype(np.int64),
                timing=None if entry["timing"] is None else _timing(entry["timing"]),
            )
        )
    return Profile(
        **{name: header[name] for name in _TEXTS},
        expert_tokens=arrays["expert_tokens"].astype(np.int64),
        stages=(up, down),
        gated=bool(header["gated"]),
        element_size=header["element_size"],
        notes=tuple(str(note) for note in header["notes"]),
        runs=tuple(runs),
    )
