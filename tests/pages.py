"""What the pages of the documentation hold."""

from __future__ import annotations

import re


def code_blocks(text: str, language: str = "python") -> list[str]:
    """The fenced blocks of a page that are in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
