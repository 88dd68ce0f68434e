"""`weave-moe cache`: the compiled code that is kept on disk."""

from __future__ import annotations

import time

from ..run.errors import InputError
from ..runtime import cache
from ..runtime.cache import Entry
from .printing import as_json, line, size

__all__ = ["ACTIONS", "cache_command"]

ACTIONS = ("list", "size", "clear")
_WORDS = {"experts": "GPU kernel", "host": "CPU engine"}


def cache_command(action: str, *, json_wanted: bool) -> int:
    """Does one of `ACTIONS`. Exit status 0, or 1 if an entry could not be removed.

    Raises InputError if the directory cannot be read.
    """
    home = cache.directory()
    try:
        if action == "clear":
            return _clear(json_wanted)
        entries = cache.entries()
    except OSError as error:
        raise InputError(f"the cache {home} cannot be read: {error.strerror or error}") from error
    total = sum(entry.bytes for entry in entries)
    if json_wanted:
        document: dict[str, object] = {
            "directory": str(home),
            "count": len(entries),
            "bytes": total,
        }
        if action == "list":
            document["entries"] = [_document(entry) for entry in entries]
        as_json(document)
        return 0
    if action == "list":
        for entry in sorted(entries, key=lambda entry: entry.made):
            made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))
            line(size(entry.bytes), f"{made}  {_WORDS[entry.kind]}  {entry.path.name}")
    line("total", f"{_count(entries)} in {home}")
    return 0


def _clear(json_wanted: bool) -> int:
    cleared = cache.clear()
    home = cache.directory()
    if json_wanted:
        as_json(
            {
                "directory": str(home),
                "removed": [_document(entry) for entry in cleared.removed],
                "kept": [{**_document(entry), "why": why} for entry, why in cleared.kept],
            }
        )
    else:
        line("removed", f"{_count(cleared.removed)} from {home}")
        for entry, why in cleared.kept:
            line("kept", f"{entry.path.name}: {why}")
    return 1 if cleared.kept else 0


def _count(entries: list[Entry] | tuple[Entry, ...]) -> str:
    word = "entry" if len(entries) == 1 else "entries"
    return f"{len(entries)} {word}, {size(sum(entry.bytes for entry in entries))}"


def _document(entry: Entry) -> dict[str, str | int | float]:
    return {
        "name": entry.path.name,
        "kind": entry.kind,
        "bytes": entry.bytes,
        "made": round(entry.made, 3),
    }
