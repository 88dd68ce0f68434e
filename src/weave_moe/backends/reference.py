"""The layer in plain torch as a backend: takes every call on every device, and is slow."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ..reference import experts_reference
from ..shapes import ExpertsCall

__all__ = ["BACKEND"]


class _Reference:
    name = "reference"

    def unavailable(self, call: ExpertsCall) -> str | None:
        return None

    def experts(self, call: ExpertsCall) -> Tensor:
        return experts_reference(call)


BACKEND: Final = _Reference()
