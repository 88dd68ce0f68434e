"""Compiling C++ test drivers against the device headers, as they are or with a planted bug."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEVICE = HERE.parents[1] / "src" / "weave_moe" / "device"
HOST = DEVICE.parent / "host"

CXX = shlex.split(os.environ.get("CXX", "")) or ["g++"]
needs_cxx = pytest.mark.skipif(shutil.which(CXX[0]) is None, reason=f"no C++ compiler ({CXX[0]})")


@dataclass(frozen=True)
class Patch:
    """A planted bug: in `file`, `old` (which must occur exactly once) becomes `new`."""

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        found = text.count(self.old)
        if found != 1:
            raise AssertionError(
                f"{self.file}: the text to patch occurs {found} times, not once; "
                f"bring the planted bug up to date:\n{self.old}"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Everywhere:
    """In `file`, every `old` (at least one) becomes `new`."""

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        if self.old not in text:
            raise AssertionError(f"{self.file}: nothing to replace: {self.old}")
        return text.replace(self.old, self.new)


STEPPED = (
    Everywhere("memory.h", "__atomic_", "weave_step(), __atomic_"),
    Patch(
        "memory.h",
        """  if (iteration < 256)
    sched_yield();
  else
    usleep(50);
""",
        "  (void)iteration;\n  weave_yield();\n",
    ),
    Patch("memory.h", "#pragma once\n", "#pragma once\nvoid weave_step();\nvoid weave_yield();\n"),
)
"""What interleave.cpp needs: every atomic operation, and every pause, asks who runs next."""


class Builder:
    """Compiles once a session: processes of one pytest run share `folder`, by content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_session(cls, factory: pytest.TempPathFactory) -> Builder:
        base = factory.getbasetemp()
        if os.environ.get("PYTEST_XDIST_WORKER"):
            base = base.parent  # the folder that this run's processes share
        folder = base / "native"
        folder.mkdir(exist_ok=True)
        return cls(folder)

    def sources(self, patches: Sequence[Patch | Everywhere] = ()) -> Path:
        """A copy of the device and host sources with `patches` applied, as .../src/{device,host}.

        Every file name is unique over the two folders, so a patch names only the file.
        """
        texts = {
            f"{folder.name}/{path.name}": path.read_text()
            for folder in (DEVICE, HOST)
            for path in sorted(folder.glob("*"))
            if path.suffix in (".h", ".cpp")
        }
        for patch in patches:
            (name,) = [n for n in texts if n.endswith("/" + patch.file)]
            texts[name] = patch.apply(texts[name])
        key = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
        root = self.folder / f"src-{key}"
        with self._locked(root.name):
            if not root.exists():
                new = root.with_suffix(".new")
                shutil.rmtree(new, ignore_errors=True)
                for name, text in texts.items():
                    (new / name).parent.mkdir(parents=True, exist_ok=True)
                    (new / name).write_text(text)
                new.rename(root)
        return root

    def build(
        self,
        driver: str,
        patches: Sequence[Patch | Everywhere] = (),
        *,
        flags: Sequence[str] = ("-O2",),
        shared: bool = False,
        engine: bool = False,
    ) -> Path:
        """The program (or shared library) of tests/native/`driver` on patched sources."""
        root = self.sources(patches)
        inputs = [HERE / driver]
        if engine:
            inputs.append(root / "host" / "engine.cpp")
        command = [*CXX, "-std=c++17", "-g1", "-Wall", "-Wextra", "-pthread", *flags]
        if shared:
            command += ["-shared", "-fPIC"]
        command += [f"-I{root / 'device'}", f"-I{root / 'host'}", *map(str, inputs)]
        own = [(p.name, p.read_text()) for p in sorted(HERE.glob("*.*")) if p.suffix != ".py"]
        key = hashlib.sha256(repr((command, own)).encode()).hexdigest()[:16]
        out = self.folder / f"{Path(driver).stem}-{key}"
        with self._locked(out.name):
            if not out.exists():
                new = out.with_suffix(".new")
                done = subprocess.run(
                    [*command, "-o", str(new)], capture_output=True, text=True, timeout=300
                )
                assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
                new.rename(out)
        return out

    def sanitizer_prefix(self, sanitizer: str) -> list[str] | None:
        """How to start a program built with -fsanitize=`sanitizer`; None where that cannot run.

        ThreadSanitizer fails under some kernels' address space layout, which setarch -R evens out
        where it is allowed to.
        """
        out = self.folder / f"works-{sanitizer}"
        with self._locked(out.name):
            if not out.exists():
                source = out.with_suffix(".cpp")
                source.write_text("int main() {}\n")
                command = [*CXX, f"-fsanitize={sanitizer}", "-pthread", str(source), "-o", str(out)]
                if subprocess.run(command, capture_output=True, timeout=300).returncode:
                    return None
        for prefix in (["setarch", "-R"], []):
            if prefix and shutil.which(prefix[0]) is None:
                continue
            done = subprocess.run([*prefix, str(out)], capture_output=True, timeout=60)
            if done.returncode == 0:
                return prefix
        return None

    def _locked(self, name: str) -> _Lock:
        return _Lock(self.folder / f"{name}.lock")


class _Lock:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        self.file = self.path.open("w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()
