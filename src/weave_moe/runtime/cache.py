"""Compiled code on disk: one directory a user, shared by every process and every compiler.

An entry is a file whose name holds a hash of all that its content depends on, so it never changes
and never goes stale: it is made once, under another name, and renamed into place. A reader needs no
lock; the lock only saves several processes from making the same entry at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["KINDS", "Cleared", "Entry", "cached_file", "clear", "directory", "discard", "entries"]

KINDS: Final = {"experts": ".cubin", "host": ".so"}
"""What the package keeps here: suffix by kind. Nothing else in the directory is an entry."""

LOCK_SECONDS: Final = 300.0
"""Longest wait for another process that is making the same entry; then it is made here as well."""

_STALE_SECONDS: Final = 86_400.0

_ENTRY: Final = re.compile(
    "|".join(rf"({kind})-[0-9a-f]{{32}}{re.escape(suffix)}" for kind, suffix in KINDS.items())
)
_LEFTOVER: Final = re.compile(r"\.[^.]+-[0-9a-f]{32}\S*\.(tmp|lock)")

_log = logging.getLogger("weave_moe")


def directory() -> Path:
    """Where entries are kept; it need not exist.

    $WEAVE_MOE_CACHE if set, else weave-moe under $XDG_CACHE_HOME (if that is an absolute path, as
    the XDG base directory specification demands), else under ~/.cache.
    """
    chosen = os.environ.get("WEAVE_MOE_CACHE")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "weave-moe"


def cached_file(
    kind: str, identity: Sequence[str | bytes], suffix: str, make: Callable[[], bytes]
) -> Path:
    """The path of the entry of that identity, whose content `make()` gives if it is not there yet.

    kind: a word for what it is; the file is named <kind>-<hash of the identity><suffix>.
    identity: everything that the content depends on; order and borders of its parts count.
    make: what it raises is passed on, and then no entry exists.

    Where the directory cannot be written, the entry is kept in a private directory until this
    process ends, with a warning in the log, once.

    Raises ValueError for a kind or suffix that makes no plain file name; OSError if the file cannot
    be written even so.
    """
    name = f"{kind}-{_key(identity)}{suffix}"
    if os.path.basename(name) != name or name.startswith("."):
        raise ValueError(
            f"kind and suffix must make a plain file name, got {kind!r} and {suffix!r}"
        )
    home = directory()
    path = home / name
    if path.is_file():
        return path
    if not _writable(home):
        path = _private_directory(str(home)) / name
        if path.is_file():
            return path
    with _lock(path):
        if not path.is_file():
            _remove_stale(path.parent)
            _write(path, make())
    return path


def _key(identity: Sequence[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in identity:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def discard(path: Path) -> None:
    """Removes an entry that turned out to be unusable, so that the next call makes it anew."""
    path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            # After a power cut a renamed file may be empty unless its content was written first.
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _writable(home: Path) -> bool:
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return True
    except OSError:
        return False


@cache
def _private_directory(instead_of: str) -> Path:
    import atexit

    private = tempfile.mkdtemp(prefix="weave-moe-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not take it from its parent
            shutil.rmtree(private, ignore_errors=True)

    atexit.register(remove)
    _log.warning(
        "the cache directory %s cannot be written: compiled code is kept in %s until this process "
        "ends; set WEAVE_MOE_CACHE to a directory of your own",
        instead_of,
        private,
    )
    return Path(private)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds the entry's lock file if it can be had; nothing depends on it but work saved."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _remove_stale(home: Path) -> None:
    """Removes what processes that were killed while making an entry left behind a day ago."""
    for leftover in home.glob(".*"):
        # The directory may be one that holds other hidden files, such as a home directory.
        if _LEFTOVER.fullmatch(leftover.name) is None:
            continue
        with contextlib.suppress(OSError):
            if leftover.is_file() and time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                leftover.unlink()


@dataclass(frozen=True)
class Entry:
    """A file of compiled code.

    kind: one of `KINDS`.  bytes: its size.  made: when, in seconds since the epoch.
    """

    path: Path
    kind: str
    bytes: int
    made: float


@dataclass(frozen=True)
class Cleared:
    """What `clear` did: the entries that are gone, and those that could not be removed, and why."""

    removed: tuple[Entry, ...]
    kept: tuple[tuple[Entry, str], ...]


def entries() -> list[Entry]:
    """The finished entries in `directory()`, by name; none where it does not exist.

    Raises OSError if the directory cannot be read.
    """
    found = []
    try:
        names = sorted(os.listdir(directory()))
    except FileNotFoundError:
        return []
    for name in names:
        match = _ENTRY.fullmatch(name)
        if match is None:
            continue
        path = directory() / name
        try:
            status = path.lstat()
        except FileNotFoundError:  # another process has just removed it
            continue
        if stat.S_ISREG(status.st_mode):
            kind = name[: name.index("-")]
            found.append(Entry(path, kind, status.st_size, status.st_mtime))
    return found


def clear() -> Cleared:
    """Removes all entries, and what killed processes left behind a day ago; no other file.

    Safe at any time: an entry that another process is making has another name until it is whole,
    and is left alone; one that another process has loaded stays loaded; one that it has found but
    not read yet is made again.

    Raises OSError if the directory cannot be read.
    """
    removed, kept = [], []
    for entry in entries():
        try:
            entry.path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            kept.append((entry, error.strerror or str(error)))
        else:
            removed.append(entry)
    _remove_stale(directory())
    return Cleared(tuple(removed), tuple(kept))
