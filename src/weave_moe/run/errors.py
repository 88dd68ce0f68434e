"""The one exception of the command line."""

from __future__ import annotations

__all__ = ["InputError"]


class InputError(ValueError):
    """Something the user gave cannot be used. Its message is one line, fit to be shown as it is."""
