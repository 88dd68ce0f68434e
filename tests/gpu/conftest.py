r"""Tests that need a Hopper GPU. They need pytest, torch and numpy, nothing else of the test tools.

    pytest tests/gpu -m gpu -n 4 --dist loadfile
                                             the short list; as five processes, with the
                                             long list and the soak beside them, 268 s (-n
                                             needs pytest-xdist, and nothing but time without it)
    pytest tests/gpu -m gpu_long             20,000 launches among neighbours, planted bugs, a
                                             soak of whole layers (-k soak)
    pytest tests/gpu -m gpu --on host        the tests' own logic on the CPU engine, without a GPU

Where only pytest itself is installed, add `--confcutdir=tests/gpu`: the conftest.py one level up
needs hypothesis.

The sanitizers, one at a time, over the tests that suit them (each takes some minutes):

    compute-sanitizer --tool memcheck  --error-exitcode 1 pytest tests/gpu -m gpu -k sanitized
    compute-sanitizer --tool initcheck --error-exitcode 1 pytest tests/gpu -m gpu \
        -k "sanitized and not 1100"

(initcheck does not see what TMA stores write, and reports every down row of many tokens as read
uninitialised; that they are written is shown by the tests that poison them.)

Kernels are compiled before the first test, one process a core.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_cases import TARGET, warm_up


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on",
        choices=("cuda", "host", "reference"),
        default="cuda",
        help="backend of tests/gpu; other than cuda, tests of the GPU itself are skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu_long: many minutes on a GPU; asked for with -m only")
    backend = config.getoption("--on", default="cuda")
    TARGET.backend = backend
    TARGET.device = torch.device("cuda", 0) if backend == "cuda" else torch.device("cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name != "gpu":
            continue
        reason = None
        if "gpu_long" in item.keywords and "gpu_long" not in (config.option.markexpr or ""):
            reason = "asked for with -m gpu_long"
        elif TARGET.on_gpu and not _hopper():
            reason = "needs a GPU of compute capability 9.0"
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    if TARGET.on_gpu and _hopper():
        warm_up()


@pytest.fixture
def gpu() -> torch.device:
    """For tests of the GPU itself: skipped on another backend."""
    if not TARGET.on_gpu:
        pytest.skip("a test of the GPU itself")
    return TARGET.device


@pytest.fixture(autouse=True)
def _no_failed_launch() -> Iterator[None]:
    """No test leaves a launch that gave up unnoticed, nor one running."""
    yield
    if TARGET.on_gpu and _hopper():
        import weave_moe

        torch.cuda.synchronize()
        weave_moe.check()
