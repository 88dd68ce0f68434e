"""The documentation builds without a warning, its code runs, and its commands are understood."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pages import code_blocks
from weave_moe.cli import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BY_NAME = {page.name: page.read_text(encoding="utf-8") for page in PAGES}


def commands(text: str) -> list[str]:
    """What a page gives to type: lines of blocks, and code within a text; no synopses, no logs."""
    lines = re.findall(r"^ {4}(weave-moe [^\n]+)$", text, re.MULTILINE)
    lines += [" ".join(code.split()) for code in re.findall(r"`(weave-moe [^`]+)`", text)]
    lines = [line.partition("#")[0] for line in lines]
    return [line for line in lines if not re.search(r"\[|\.\.\.|\b[A-Z]+\b|^weave-moe:", line)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    out = tmp_path_factory.mktemp("site")
    # Strict: no link or anchor that leads nowhere, no page outside the navigation.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing(site: Path) -> None:
    for page in PAGES:
        name = "index.html" if page.stem == "index" else f"{page.stem}/index.html"
        html = (site / name).read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", html)
        assert not [url for url in fetched if "canonical" not in url], page.name


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    import weave_moe

    html = (site / "api/index.html").read_text(encoding="utf-8")
    for name in weave_moe.__all__:
        described = f'id="weave_moe.{name}"' in html
        assert described or f"weave_moe.{name}<" in html or name == "__version__", name


@pytest.mark.parametrize("page", BY_NAME)
def test_code_is_python_and_commands_are_understood(page: str) -> None:
    for block in code_blocks(BY_NAME[page]):
        compile(block, page, "exec")
    for line in commands(BY_NAME[page]):
        _, name, *rest = shlex.split(line)
        cli.commands[name].make_context(name, rest)


def test_there_are_commands_to_understand() -> None:
    assert sum(len(commands(text)) for text in BY_NAME.values()) > 40


# The code of advise.md, simulate.md and transformers.md runs where these are tested.
@pytest.mark.parametrize("page", ["index.md", "knobs.md"])
def test_the_code_runs_as_it_is(page: str) -> None:
    names: dict[str, object] = {"__name__": page}
    for block in code_blocks(BY_NAME[page]):
        exec(compile(block, page, "exec"), names)


def test_the_code_about_profiles_runs_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["profile", "--simulate", "--preset", "qwen3-30b", "--tokens", "16"]
    found = CliRunner().invoke(cli, [*command, "--policy", "steal,static_expert"])
    assert found.exit_code == 0, found.output
    for block in code_blocks(BY_NAME["profile.md"]):
        exec(compile(block, "profile.md", "exec"), {"__name__": "profile.md"})
    assert capsys.readouterr().out


def test_the_knobs_are_all_of_them() -> None:
    import inspect

    import weave_moe

    named = set(re.findall(r"`(\w+)`", BY_NAME["knobs.md"]))
    assert named >= set(inspect.signature(weave_moe.Workspace).parameters)
    assert named >= set(weave_moe.POLICIES) | {"auto"}


def test_the_widths_are_those_that_a_workspace_takes() -> None:
    import weave_moe

    said = "32, of the multiples of 8 up to 256, from 64 up those of 16"
    assert said in BY_NAME["knobs.md"]
    assert weave_moe.Workspace().width_cap == 32
    for width in range(1, 300):
        if width <= 256 and width % (8 if width < 64 else 16) == 0:
            assert weave_moe.Workspace(width_cap=width).width_cap == width
        else:
            with pytest.raises(ValueError, match="width_cap"):
                weave_moe.Workspace(width_cap=width)
