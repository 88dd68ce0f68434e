"""Where the workers' time goes: one record a task, from any engine, as a report."""

from .records import (
    ABSENT,
    PRODUCERS,
    RECORD_DTYPE,
    PolicyRecord,
    Profile,
    Timing,
    load_profile,
    save_profile,
)

__all__ = [
    "ABSENT",
    "PRODUCERS",
    "RECORD_DTYPE",
    "PolicyRecord",
    "Profile",
    "Timing",
    "load_profile",
    "save_profile",
]
