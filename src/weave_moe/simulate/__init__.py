"""What a launch would take: a discrete-event simulation of every policy on a described machine."""

from .machine import MACHINES, Machine, calibration, load_machine
from .result import Simulated, simulate
from .workload import Workload, deal_counts, make_workload

__all__ = [
    "MACHINES",
    "Machine",
    "Simulated",
    "Workload",
    "calibration",
    "deal_counts",
    "load_machine",
    "make_workload",
    "simulate",
]
