"""What the README says is so: its code runs, its links lead somewhere, its lists are complete."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from pages import code_blocks
from weave_moe.blocks import COVERED
from weave_moe.cli import cli
from weave_moe.shapes import POLICIES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return code_blocks(README, language)


def test_the_python_example_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[0], "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert not printed or re.search(r"static_expert: \d+ tasks, 0 stolen", printed)


def test_the_transformers_example_runs_on_the_shipped_model() -> None:
    pytest.importorskip("transformers")
    import torch

    from weave_moe.run.model import load_model

    names: dict[str, Any] = {"model": load_model("float32")}
    exec(compile(blocks("python")[1], "README.md", "exec"), names)
    with torch.no_grad():
        logits = names["model"](torch.arange(9).unsqueeze(0), use_cache=False).logits
    assert logits.shape[:2] == (1, 9)


def test_the_commands_are_understood() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    mine = [command for command in commands if command[:1] == ["weave-moe"]]
    assert len(mine) > 3
    for command in mine:
        found = cli.commands[command[1]]
        found.make_context(command[1], command[2:])
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands:
        assert command[0] in ("weave-moe", "make")
        assert command[0] != "make" or command[1] in targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:src|docs|tests|tools)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_every_page_is_found_from_the_readme() -> None:
    reached, pending = set(), [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#]+\.md)[^)]*\)", page.read_text(encoding="utf-8"))
            pending += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(PAGES) <= reached


def test_the_table_of_policies_is_complete() -> None:
    table = README.split("## Policies")[1].split("##")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(POLICIES)
    assert f"{len(POLICIES) - 1} policies".replace("6", "six") in README


def test_numbers() -> None:
    assert f"block of {len(COVERED)} classes" in README


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_an_installed_package_has_all_its_files() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]["weave_moe"]
    package = ROOT / "src" / "weave_moe"
    taken = {path for pattern in globs for path in package.glob(pattern)}
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.suffix == ".py" or path in taken, path
    for folder in package.rglob("*"):
        if any(folder.glob("*.py")):
            assert (folder / "__init__.py").exists(), f"{folder} is not packaged"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_licences_of_all_that_is_shipped_are_declared() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [*ROOT.glob("LICENSE*"), *(ROOT / "src").rglob("LICENSE*")]
    here = {str(path.relative_to(ROOT)) for path in files}
    assert set(project["license-files"]) == here
    provenance = (ROOT / "src/weave_moe/data/PROVENANCE.md").read_text(encoding="utf-8")
    for name in project["license"].split(" AND "):
        assert name in provenance


def test_a_source_distribution_can_test_itself() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    taken = {
        name
        for line in re.findall(r"^(?:graft|include) (.*)$", manifest, re.MULTILINE)
        for name in line.split()
    }
    # setuptools takes these by itself.
    taken |= {"README.md", "LICENSE", "pyproject.toml", "src", "MANIFEST.in"}
    for folder in ("tests", "docs", "benchmarks", "tools", "Makefile", ".ci/run"):
        assert (ROOT / folder).exists()
        assert folder in taken
