"""The CPU engine as a backend: the scheduler on threads, wherever there is a C++ compiler."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ..host import engine
from ..shapes import ExpertsCall

__all__ = ["BACKEND"]


class _Host:
    name = "host"

    def unavailable(self, call: ExpertsCall) -> str | None:
        return engine.unavailable(call)

    def experts(self, call: ExpertsCall) -> Tensor:
        return engine.run(call)


BACKEND: Final = _Host()
