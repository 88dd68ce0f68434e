"""Several GPUs in one process: each has its own buffers and kernels, and the results are one's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_cases import SMALL, Case, check, expect, make, same_bits, skewed
from layer_cases import LayerCase, expect_layers, make_layer
from layer_tables import LAYERS

import weave_moe

pytestmark = pytest.mark.gpu

TOKENS = (1, 12, 40, 200, 1100)
expect(SMALL, TOKENS)
ROUTED = replace(LAYERS["qwen"], tokens=(1, 40, 300))
expect_layers([ROUTED])


@pytest.fixture
def two(gpu: torch.device) -> Iterator[tuple[torch.device, torch.device]]:
    """Two devices; no launch on either that gave up goes unnoticed."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, there is {count}")
    second = torch.device("cuda", 1)
    if torch.cuda.get_device_capability(second) != (9, 0):
        pytest.skip("the second GPU is not of compute capability 9.0")
    yield gpu, second
    torch.cuda.synchronize(second)
    weave_moe.check(second)


def moved(case: Case, device: torch.device) -> Case:
    x, w13, w2, weights, ids = (tensor.to(device) for tensor in case.args)
    return case.with_(x=x, w13=w13, w2=w2, weights=weights, ids=ids)


def moved_layer(case: LayerCase, device: torch.device) -> LayerCase:
    def there(value: object) -> object:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    changes = {name: there(value) for name, value in case.options.items()}
    parts = {"x": case.x, "w13": case.w13, "w2": case.w2}
    return case.with_(**{name: there(value) for name, value in parts.items()}, **changes)


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits, of which both are read on the CPU."""
    return same_bits(got.cpu(), want.cpu())


def test_two_devices_in_turn(two: tuple[torch.device, torch.device]) -> None:
    cases = [make(SMALL, tokens, routing=skewed) for tokens in TOKENS]
    want = [check(case) for case in cases]
    there = [moved(case, two[1]) for case in cases]
    for _ in range(3):
        for case, other, expected in zip(cases, there, want, strict=True):
            # Whatever device is current: a call runs where its tensors are.
            for current in two:
                with torch.cuda.device(current):
                    first, second = case.run(), other.run()
                    assert torch.cuda.current_device() == current.index
                assert (first.device, second.device) == two
                assert equal(first, expected)
                assert equal(second, expected)


def test_layers_on_two_devices_in_turn(two: tuple[torch.device, torch.device]) -> None:
    for tokens in ROUTED.tokens:
        case = make_layer(ROUTED, tokens)
        other = moved_layer(case, two[1])
        want = case.routed()
        for _ in range(3):
            for got in (case.routed(), other.routed()):
                assert all(equal(mine, expected) for mine, expected in zip(got, want, strict=True))


def test_a_workspace_on_two_devices(two: tuple[torch.device, torch.device]) -> None:
    workspace = weave_moe.Workspace()
    for tokens in TOKENS:
        case = make(SMALL, tokens, routing=skewed)
        other, want = moved(case, two[1]), check(case)
        for _ in range(3):
            assert equal(case.run(workspace=workspace), want)
            assert equal(other.run(workspace=workspace), want)


def test_two_devices_from_two_threads(two: tuple[torch.device, torch.device]) -> None:
    cases = [make(SMALL, tokens, routing=skewed) for tokens in TOKENS]
    want = [check(case) for case in cases]
    wrong: list[str] = []
    started = threading.Barrier(2)

    def calls(device: torch.device) -> None:
        try:
            mine = [moved(case, device) for case in cases]
            started.wait(timeout=60)
            results = [(i, case.run()) for _ in range(30) for i, case in enumerate(mine)]
            torch.cuda.synchronize(device)
            wrong.extend(
                f"{TOKENS[i]} tokens on {device}" for i, y in results if not equal(y, want[i])
            )
        except Exception as error:
            wrong.append(f"{device}: {error!r}")

    threads = [threading.Thread(target=calls, args=(device,)) for device in two]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_launch_that_gives_up_is_its_devices(two: tuple[torch.device, torch.device]) -> None:
    case = make(SMALL, 40)
    other, want = moved(case, two[1]), check(case)
    workspace = weave_moe.Workspace()
    assert equal(other.run(workspace=workspace), want)
    torch.cuda.synchronize(two[1])
    # As another launch's worker that has entered and not left.
    held = workspace._cuda_buffers[1]  # type: ignore[attr-defined]
    held.counters.view(torch.int32)[0] = 1
    assert bool(other.run(workspace=workspace).isnan().all())
    torch.cuda.synchronize(two[1])
    weave_moe.check(two[0])
    assert equal(case.run(), want)
    with pytest.raises(weave_moe.KernelError):
        weave_moe.check(two[1])
    assert equal(other.run(workspace=workspace), want)
