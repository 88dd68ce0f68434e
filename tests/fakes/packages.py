"""An engine for a test: the installed package, or its stand-in for as long as the test's module."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType


def is_installed(package: str) -> bool:
    """Whether the real package is here, and not a stand-in."""
    return importlib.util.find_spec(package) is not None


def as_modules(contents: dict[str, dict[str, object]]) -> dict[str, ModuleType]:
    """Modules by dotted name, with what each holds; packages above them are made too."""
    made: dict[str, ModuleType] = {}
    for dotted in contents:
        parts = dotted.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in made:
                made[name] = ModuleType(name)
                made[name].__path__ = []  # type: ignore[attr-defined]
                if end > 1:
                    setattr(made[".".join(parts[: end - 1])], parts[end - 1], made[name])
    for dotted, names in contents.items():
        for key, value in names.items():
            setattr(made[dotted], key, value)
    return made


@contextmanager
def engine(
    package: str, standin: Callable[[], dict[str, ModuleType]], ours: tuple[str, ...]
) -> Iterator[bool]:
    """Yields whether the real package is used; `ours` are our modules that import it.

    A stand-in, and our modules that were imported with it, leave sys.modules in the end.
    """
    real = is_installed(package)
    before = set(sys.modules)
    if not real:
        sys.modules.update(standin())
    try:
        yield real
    finally:
        if not real:
            for name in set(sys.modules) - before:
                if name == package or name.startswith(f"{package}.") or name in ours:
                    del sys.modules[name]
            parent = sys.modules.get("weave_moe.integrations")
            for name in ours:  # the package keeps its submodules as attributes
                child = name.rpartition(".")[2]
                if parent is not None and hasattr(parent, child):
                    delattr(parent, child)


@contextmanager
def lines_of(logger: str) -> Iterator[list[str]]:
    """What a logger says, whether or not it hands its records on."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, keep = logging.getLogger(logger), Keep()
    level = log.level
    log.addHandler(keep)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(keep)
        log.setLevel(level)
