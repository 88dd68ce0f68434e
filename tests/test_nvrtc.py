"""Which NVRTC is loaded: that of the CUDA version that torch was built for, where there is one."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weave_moe.runtime import nvrtc


@pytest.mark.parametrize(
    ("built_for", "first"),
    [("12.8", "12"), ("12.1", "12"), ("13.0", "13"), (None, "13"), ("11.8", "13")],
)
def test_the_library_of_torchs_cuda_version_comes_first(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, first: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    other = "13" if first == "12" else "12"
    assert nvrtc._sonames() == [f"libnvrtc.so.{first}", f"libnvrtc.so.{other}"]


def test_without_torch_the_newest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert nvrtc._sonames() == ["libnvrtc.so.13", "libnvrtc.so.12"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Both versions' pip packages, and a torch that brings neither."""
    for folder, major in (("cu13", "13"), ("cuda_nvrtc", "12")):
        library = tmp_path / "nvidia" / folder / "lib" / f"libnvrtc.so.{major}"
        library.parent.mkdir(parents=True)
        library.touch()

    def find_spec(name: str) -> ModuleSpec:
        spec = ModuleSpec(name, None, origin=str(tmp_path / name / "__init__.py"))
        spec.submodule_search_locations = [str(tmp_path / name)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return tmp_path


@pytest.mark.parametrize(("built_for", "majors"), [("12.8", ("12", "13")), ("13.0", ("13", "12"))])
def test_all_places_of_one_version_come_before_those_of_the_other(
    monkeypatch: pytest.MonkeyPatch, installed: Path, built_for: str, majors: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    folders = {"13": "cu13", "12": "cuda_nvrtc"}
    want = []
    for major in majors:
        name = f"libnvrtc.so.{major}"
        want += [str(installed / "nvidia" / folders[major] / "lib" / name), name]
    assert nvrtc._candidates() == want


def test_the_first_that_loads_is_taken(monkeypatch: pytest.MonkeyPatch, installed: Path) -> None:
    tried: list[str] = []

    def load(path: str) -> SimpleNamespace:
        tried.append(Path(path).name)
        if "/" in path:  # as files that are no libraries
            raise OSError("not a library")
        return SimpleNamespace(path=path)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", load)
    nvrtc._library.cache_clear()
    try:
        assert nvrtc._library().path == "libnvrtc.so.12"
    finally:
        nvrtc._library.cache_clear()
    assert tried == ["libnvrtc.so.12", "libnvrtc.so.12"]
