"""torch.cuda.device without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


def entered(inside: list[int]) -> Callable[[int], AbstractContextManager[None]]:
    """What stands for it: `inside` has the devices that are current, innermost last."""

    @contextmanager
    def device(index: int) -> Iterator[None]:
        inside.append(index)
        try:
            yield
        finally:
            inside.pop()

    return device
