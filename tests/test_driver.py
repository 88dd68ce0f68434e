"""The driver's calls, on a library that stands in for libcuda."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakes.devices import entered
from weave_moe.runtime import driver
from weave_moe.tools import neighbour

NON_BLOCKING = 1


class FakeDriver:
    """Streams of one context: each has a number of its own, flags and a priority."""

    def __init__(self, least: int, greatest: int) -> None:
        self.range = least, greatest
        self.streams: dict[int, tuple[int, int]] = {}
        self.failing = 0

    def cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> int:
        least._obj.value, greatest._obj.value = self.range
        return 0

    def cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: Any) -> int:
        if self.failing:
            return self.failing
        number = 0x1000 + 8 * len(self.streams)
        stream._obj.value = number
        self.streams[number] = flags, priority.value
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"out of memory"
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    library = FakeDriver(least=0, greatest=-5)
    monkeypatch.setattr(driver, "_library", lambda: library)
    return library


def test_a_stream_is_new_does_not_block_and_comes_first(fake: FakeDriver) -> None:
    made = [driver.create_stream() for _ in range(70)]  # more than a pool of torch's has
    assert len(set(made)) == 70
    assert set(made) == set(fake.streams)
    assert set(fake.streams.values()) == {(NON_BLOCKING, -5)}


def test_a_stream_that_cannot_be_made_is_named(fake: FakeDriver) -> None:
    fake.failing = 2
    with pytest.raises(
        driver.CudaError, match=r"cuStreamCreateWithPriority failed: out of memory \(2\)"
    ):
        driver.create_stream()


def test_a_neighbour_s_streams_are_no_others(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch's own streams come from a pool, as they do, two of them may be one."""
    current: list[int] = []
    ready: list[int] = []
    wrapped: list[tuple[int, int]] = []

    def external(pointer: int, device: int) -> SimpleNamespace:
        assert current == [device], "made in another device's context"
        assert device in ready, "no context before an allocation"
        wrapped.append((pointer, device))
        return SimpleNamespace(cuda_stream=pointer)

    real: Callable[..., torch.Tensor] = torch.zeros

    def zeros(*size: int, dtype: Any, pin_memory: bool = False, device: Any = None) -> torch.Tensor:
        if device is not None:
            assert current == [device.index]
            ready.append(device.index)
        return real(*size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "device", entered(current))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", external)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: pytest.fail("a stream of the pool"))
    channels = [neighbour._Channel(device) for device in (0, 1)]
    streams = [s.cuda_stream for c in channels for s in (c.stream, c.stopping)]
    assert len(set(streams)) == 4
    assert [pointer for pointer, _ in wrapped] == streams == list(fake.streams)
    assert [device for _, device in wrapped] == [0, 0, 1, 1]
