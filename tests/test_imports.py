"""Imports within the package go one way, and the parts that need no torch do without it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import weave_moe

PACKAGE = Path(weave_moe.__file__).parent
ORDER = (
    *("_version", "shapes", "schedule", "runtime", "routing", "reference", "host", "backends"),
    *("ops", "blocks", "layer", "integrations", "data", "presets", "run", "tools", "simulate"),
    *("bench", "profile", "advise", "cli", "__main__"),
)
"""Modules and folders of the package: each may import those before it, at any place in the code."""


def imports() -> Iterator[tuple[str, str, str]]:
    """(file, module or folder it is in, module or folder it imports) of every relative import."""
    for file in sorted(PACKAGE.rglob("*.py")):
        inside = file.relative_to(PACKAGE).with_suffix("").parts
        if inside == ("__init__",):
            continue  # the public names, from everywhere
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = inside[: len(inside) - node.level]
                names = [node.module] if node.module else [alias.name for alias in node.names]
                for name in names:
                    target = (*base, *name.split("."))[0]
                    yield str(file.relative_to(PACKAGE)), inside[0], target


def test_they_go_one_way() -> None:
    found = list(imports())
    assert len(found) > 50
    for file, source, target in found:
        assert source in ORDER, f"{source} has no place in the order of imports"
        assert target == source or ORDER.index(target) < ORDER.index(source), (
            f"{file} imports {target}"
        )


def test_schedules_and_the_command_line_s_help_need_no_torch() -> None:
    for module in ("weave_moe", "weave_moe.schedule", "weave_moe.data", "weave_moe.cli"):
        code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-W", "error", "-c", code]).returncode == 0, module


def test_public_names_load_without_warnings_and_touch_no_gpu() -> None:
    code = (
        "import weave_moe, torch\n"
        "for name in weave_moe.__all__: getattr(weave_moe, name)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    # torch's own warnings are torch's affair.
    command = [sys.executable, "-W", "error:::weave_moe", "-c", code]
    assert subprocess.run(command).returncode == 0
