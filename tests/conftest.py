"""What all tests share: markers, hypothesis' settings, and the backends that a test runs on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from fakes.launches import Recorder
from generators import experts_case
from weave_moe import backends

# Examples run for milliseconds to tenths of a second on machines of any load.
settings.register_profile(
    "weave",
    deadline=None,
    max_examples=40,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("weave")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The sizes here are too small for torch's threads, and tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=["reference", "host"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend that can run here.

    Skipped, with the reason, where there is no compiler. With one, an engine that does not build is
    a failure: a skip would let it through.
    """
    name: str = request.param
    try:
        backends.choose(experts_case(tokens=1).call(), name)
    except ValueError as error:
        if any(shutil.which(compiler) for compiler in ("g++", "c++", "clang++")):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    return name


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Launches on a GPU are recorded, not run."""
    return Recorder(monkeypatch)


@pytest.fixture(scope="module")
def shared_recorder() -> Iterator[Recorder]:
    """For properties, whose examples may share one."""
    with pytest.MonkeyPatch.context() as patch:
        yield Recorder(patch)
