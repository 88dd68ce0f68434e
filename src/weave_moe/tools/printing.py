"""How the tools print: a label and a line on stdout, sizes and JSON. Needs no torch."""

from __future__ import annotations

import json
from typing import Any

import click

__all__ = ["as_json", "line", "lines", "size"]

_INDENT = 10


def line(label: str, text: str) -> None:
    """`text` after a label of at most nine letters."""
    click.echo(f"{label:{_INDENT}}{text}".rstrip())


def lines(label: str, text: str) -> None:
    """Each line of `text`, the first one after the label, the others below it."""
    for number, part in enumerate(text.splitlines() or [""]):
        line(label if number == 0 else "", part)


def size(count: int) -> str:
    """A number of bytes for people: B, kB, MB or GB, in powers of 1,000."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.5 or unit == "GB":
            break
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def as_json(document: Any) -> None:
    """A JSON document on stdout."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))
