"""Output folders in which a file is either whole or absent."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .errors import InputError

__all__ = ["check_folder", "write_files"]


def check_folder(folder: Path) -> None:
    """Raises InputError if `folder` cannot be created or written to. Creates nothing."""
    place = folder
    while not place.exists() and not place.is_symlink() and place.parent != place:
        place = place.parent
    if not place.is_dir():
        raise InputError(f"--out {folder}: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"--out {folder}: no permission to write to {place}")


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files into `folder`, all complete before any of them appears under its name.

    Each is written under a temporary name beside its own and renamed, so a reader sees the old
    content or the new. Raises InputError where the system refuses; nothing is left behind then.
    """
    waiting: list[tuple[Path, Path]] = []
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
            waiting.append((Path(temporary), folder / name))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            # mkstemp's 0600 is for secrets; these files are as open as any other the user makes.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
        for written, final in waiting:
            os.replace(written, final)
    except OSError as error:
        raise InputError(f"--out {folder}: cannot write: {error.strerror or error}") from error
    finally:
        for written, _ in waiting:
            written.unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only succeeds while empty
    return [final for _, final in waiting]
