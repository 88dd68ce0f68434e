"""What a simulated GPU can do, and what its launches cost."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

__all__ = [
    "CALIBRATION",
    "MACHINES",
    "Calibrated",
    "Machine",
    "calibration",
    "calibration_of",
    "load_machine",
    "machine_file",
]

CALIBRATION = "h200.json"

_RANGES: Mapping[str, tuple[float, float]] = {
    "sms": (1, 1024),
    "hbm_tbs": (0.001, 1000),
    "l2_tbs": (0.001, 1000),
    "sm_gbs": (0.1, 100_000),
    "matrix_tflops": (0.1, 1_000_000),
    "boost": (1, 100),
    "narrow_width": (1, 256),
    "l2_mb": (0, 1_000_000),
    "shared_bytes": (131_072, 1 << 20),  # less has no room for the ring of the widest tiles
    "spread": (0, 0.99),
}
_COSTS = 0, 1_000_000
"""Values that a GPU could have, and far more; beyond them times overflow or never end."""


def _allowed(name: str) -> tuple[float, float]:
    """The least and the most of one of `Machine`'s numbers, in its own unit."""
    return _RANGES.get(name, _COSTS)


@dataclass(frozen=True)
class Machine:
    """A GPU as the simulator sees it.

    Rates and sizes:
        sms: SMs, each with one block of the kernel.
        hbm_tbs: TB/s that all SMs together read from device memory.
        l2_tbs: TB/s that all SMs together read from L2.
        sm_gbs: GB/s that one SM takes in, from wherever.
        matrix_tflops: dense bf16 TFLOP/s of all SMs.
        boost: times that figure an SM reaches by itself, since power is what all of them share.
        narrow_width: columns below which a product takes no less time.
        l2_mb: MB read from device memory until a weight tile has left L2 again.
        shared_bytes: shared memory of a block.
        spread: SMs do not share a busy memory evenly: their shares are spread over 1 - spread
            to 1 + spread.

    Costs, in microseconds:
        launch_us: of a launch, before any block plans and after the last has left.
        plan_us, plan_slot_ns: until tasks are known, and that much more for each slot, in ns.
        gather_us, gather_ticket_us: until rows of x are gathered, in a launch with a group that
            is wide enough for it, and that much more for each of an SM's tickets.
        sort_us, combine_launch_us: of the launches before and after the experts', for many tokens,
            besides the rows they move.
        stage_us: of a stage of the ring at least: of its products, which begin when it has come and
            end before it is free; and of its copies, where rows of x are copied singly.
        copy_row_ns: of such a row in a stage of 128 columns, besides, in ns.
        latency_us: of a read from device memory, as far as the loads in flight do not hide it.
        claim_us: of an atomic whose result is waited for (a stage's first ticket).
        steal_us: of looking at all queues and taking from one.
        epilogue_us: of a tile's activation and stores.
        publish_us: from a finished tile until others see it.
        combine_us: of a combine task, besides its reads.

    verified: whether the costs were fitted to measurements of this very machine.
    source: where the numbers come from, one line.

    Raises ValueError, naming the field, for a number that is not finite or that no GPU could have.
    """

    name: str
    sms: int
    hbm_tbs: float
    l2_tbs: float
    sm_gbs: float
    matrix_tflops: float
    boost: float = 1.0
    narrow_width: int = 32
    l2_mb: float = 30.0
    shared_bytes: int = 232_448
    spread: float = 0.05
    launch_us: float = 3.0
    plan_us: float = 2.8
    plan_slot_ns: float = 0.8
    gather_us: float = 5.0
    gather_ticket_us: float = 1.0
    sort_us: float = 10.0
    combine_launch_us: float = 3.0
    stage_us: float = 0.3
    copy_row_ns: float = 22.8
    latency_us: float = 0.2
    claim_us: float = 0.5
    steal_us: float = 1.5
    epilogue_us: float = 1.0
    publish_us: float = 1.0
    combine_us: float = 2.0
    verified: bool = False
    source: str = "user-defined"

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.type in ("int", "float"):
                value = getattr(self, entry.name)
                least, most = _allowed(entry.name)
                # NaN is in no range, and an integer of any length compares with a float.
                if not least <= value <= most:
                    raise ValueError(
                        f"machine {entry.name} must be {least:,} to {most:,}, got "
                        f"{reprlib.repr(value)}"
                    )

    @property
    def label(self) -> str:
        """Its name, and what its numbers are worth."""
        return f"{self.name} ({'calibrated' if self.verified else 'unverified'}: {self.source})"


@dataclass(frozen=True)
class Calibrated(Machine):
    """A machine whose costs were fitted on the spot, by `weave-moe calibrate`.

    calibration: what is known of it, as in the shipped file: `gpu`, `errors` with `held_out`, etc.
    """

    calibration: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


def calibration_of(machine: Machine) -> Mapping[str, Any]:
    """What says how far simulations of `machine` are off: its own calibration or the shipped."""
    return machine.calibration if isinstance(machine, Calibrated) else calibration()


@cache
def calibration() -> dict[str, Any]:
    """The shipped calibration: costs, what they were fitted to, and the errors that are left."""
    text = resources.files(__package__).joinpath(CALIBRATION).read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _h200() -> Machine:
    found = calibration()
    return Machine(
        name="h200",
        verified=True,
        source=f"fitted to {found['fitted_to']}",
        **found["machine"],
    )


def _others() -> dict[str, Machine]:
    """By data sheet: memory and matrix rates as printed, what a kernel gets of them as on H200."""
    h200 = _h200()
    read, matrix = h200.hbm_tbs / 4.8, h200.matrix_tflops / 989

    def sheet(name: str, sms: int, hbm: float, tflops: float, mhz: float) -> Machine:
        clock = mhz / 1830
        return replace(
            h200,
            name=name,
            sms=sms,
            hbm_tbs=round(hbm * read, 3),
            l2_tbs=round(h200.l2_tbs * sms / h200.sms * clock, 3),
            sm_gbs=round(h200.sm_gbs * clock, 1),
            matrix_tflops=round(tflops * matrix, 1),
            verified=False,
            source="rates of the data sheet, costs of h200",
        )

    return {
        "h100-sxm": sheet("h100-sxm", 132, 3.35, 989, 1830),
        "h100-pcie": sheet("h100-pcie", 114, 2.0, 756, 1620),
        "h800-sxm": sheet("h800-sxm", 132, 3.35, 989, 1830),
        "h20": sheet("h20", 78, 4.0, 148, 1830),
        "gh200-96gb": sheet("gh200-96gb", 132, 4.0, 989, 1830),
    }


def _digest(values: Mapping[str, Any]) -> str:
    """Of a machine's fields, so that a file that somebody changed is not called calibrated."""
    named = {entry.name: values.get(entry.name) for entry in fields(Machine)}
    named.pop("verified")
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]


def machine_file(machine: Machine, found: Mapping[str, Any]) -> str:
    """The file of a calibrated machine, which `load_machine` takes.

    found: its calibration; must hold `gpu`, `date` and `errors`.
    """
    values = asdict(machine)
    for name in ("verified", "calibration"):
        values.pop(name, None)
    return json.dumps({**values, "calibration": {**found, "of": _digest(values)}}, indent=2) + "\n"


def _own_calibration(given: Mapping[str, Any], found: Any) -> Mapping[str, Any] | None:
    """A file's calibration if it is whole and of these very fields, else None."""
    try:
        errors = found["errors"]["held_out"]
        whole = (
            isinstance(found["gpu"], str)
            and isinstance(errors["models"], list)
            and isinstance(errors["tokens"][-1], int)
            and isinstance(errors["held"][-1], int)
            and isinstance(errors["ranking"]["policies_measured"], list)
            and all(isinstance(errors[name], float) for name in ("median", "worst"))
        )
        return found if whole and found["of"] == _digest(given) else None
    except (KeyError, IndexError, TypeError):
        return None


MACHINES = ("h200", "h100-sxm", "h100-pcie", "h800-sxm", "h20", "gh200-96gb")
"""Machines that `load_machine` knows by name; only h200 is calibrated."""


def load_machine(which: str | Path | Machine) -> Machine:
    """A machine by name, from a JSON file of `Machine`'s fields, or as it is.

    A file may name a `base` machine and only the fields that differ; it counts as unverified. One
    that `weave-moe calibrate` wrote is a `Calibrated` machine for as long as nobody changes it.
    Raises ValueError for an unknown name or field, a file that cannot be read, or a value that is
    not allowed.
    """
    if isinstance(which, Machine):
        return which
    text = str(which)
    if text == "h200":
        return _h200()
    if text in MACHINES:
        return _others()[text]
    if not text.endswith(".json"):
        raise ValueError(
            f"machine must be one of {', '.join(MACHINES)} or a .json file, got {text!r}"
        )
    try:
        given = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"machine {text}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"machine {text}: must hold a JSON object of Machine's fields")
    found = given.pop("calibration", None)
    base = given.pop("base", "h200")
    if base not in MACHINES:
        raise ValueError(
            f"machine {text}: base must be one of {', '.join(MACHINES)}, got {reprlib.repr(base)}"
        )
    known = {entry.name: entry.type for entry in fields(Machine)}
    for name, value in given.items():
        if name not in known or name == "verified":
            raise ValueError(f"machine {text}: unknown field {name!r}")
        wanted = known[name]
        if wanted == "str":
            right = isinstance(value, str)
        else:
            right = isinstance(value, int if wanted == "int" else (int, float))
            right = right and not isinstance(value, bool)
        if not right:
            kind = {"str": "a string", "int": "an int"}.get(str(wanted), "a number")
            raise ValueError(f"machine {text}: {name} must be {kind}, got {reprlib.repr(value)}")
    named: dict[str, Any] = {"name": Path(text).stem, "source": f"user-defined, from {base}"}
    machine = replace(load_machine(base), **(named | given), verified=False)
    own = _own_calibration(given, found)
    if own is not None:
        return Calibrated(**{**asdict(machine), "verified": True}, calibration=own)
    if found is not None:
        return replace(machine, source=f"{machine.source}; changed since it was calibrated")
    return machine
