"""Compiling the engine at first use, and loading it.

The compiled library lies in the user's cache (see `runtime.cache`) under a hash of every source
file, the flags, the compiler's version and the CPU's features, so it is compiled once for all of
them and a home directory shared by different machines holds one for each.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Final

from ..runtime import cache

__all__ = ["FLAGS", "BuildError", "build", "compiler", "compiler_version", "load", "sources"]

FLAGS: Final = (
    "-O3",
    "-std=c++17",
    # A compiler that may fuse products with sums does it in one copy of a loop, not in another.
    "-ffp-contract=off",
    # Nobody looks at floating-point exception flags, and loops with a choice in them vectorise.
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)

_ENGINE: Final = Path(__file__).with_name("engine.cpp")
_COMPILERS: Final = ("g++", "c++", "clang++")
_TIMEOUT_SECONDS: Final = 600

_log = logging.getLogger("weave_moe")


class BuildError(RuntimeError):
    """The engine cannot be compiled or loaded here; the message says why in one line or a few."""


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX, split as a shell would, or the first of g++, c++, clang++.

    Raises BuildError if there is none.
    """
    chosen = os.environ.get("CXX", "").strip()
    if not chosen:
        for name in _COMPILERS:
            if shutil.which(name):
                return [name]
        raise BuildError(
            "no C++ compiler found (tried g++, c++, clang++): install g++, or name one in $CXX"
        )
    try:
        command = shlex.split(chosen)
    except ValueError as error:
        raise BuildError(f"$CXX is no command: {chosen!r} ({error})") from None
    if not command or shutil.which(command[0]) is None:
        raise BuildError(f"the C++ compiler named in $CXX was not found: {chosen!r}")
    return command


def sources(file: Path = _ENGINE) -> list[Path]:
    """`file` and all that it includes with quotes, directly or not, each once."""
    found: list[Path] = []
    pending = [file.resolve()]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.append(path)
        names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)
        pending.extend((path.parent / name).resolve() for name in names)
    return found


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
            # A message in the user's language would not be found by what looks for "error".
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler {command[0]!r} does not run: {error}") from None


def compiler_version(command: list[str]) -> str:
    """All that a compiler prints for --version. Raises BuildError if it does not run."""
    done = _run([*command, "--version"])
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} --version failed:\n{_first_errors(done.stderr)}")
    return done.stdout


def _cpu_features() -> str:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    line = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    features = " ".join(sorted(line[1].split())) if line else platform.processor()
    return f"{platform.system()} {platform.machine()} {features}"


def _first_errors(output: str, lines: int = 5) -> str:
    """The lines of a compiler's output that say what is wrong, or its first ones."""
    written = [line.rstrip() for line in output.splitlines() if line.strip()]
    errors = [line for line in written if re.search(r"\berror\b", line)]
    return "\n".join((errors or written)[:lines]) or "(it printed nothing)"


def build() -> Path:
    """The path of the compiled engine for this machine; compiles it if it is not in the cache.

    Raises BuildError if there is no compiler, or with its first error lines if it fails.
    """
    command = compiler()
    flags = list(FLAGS)
    if platform.machine() in ("x86_64", "aarch64"):  # elsewhere compilers may not know the option
        flags.append("-march=native")
    version = compiler_version(command)
    texts = [part for path in sources() for part in (path.name, path.read_text())]
    identity = [*texts, *command, *flags, version, _cpu_features()]

    def make() -> bytes:
        _log.info("compiling the CPU engine with %s, once for this machine", command[0])
        with tempfile.TemporaryDirectory(prefix="weave-moe-") as folder:
            output = Path(folder) / "engine.so"
            done = _run([*command, *flags, str(_ENGINE), "-o", str(output)])
            if done.returncode:
                raise BuildError(
                    f"{shlex.join(command)} failed to compile the CPU engine:\n"
                    f"{_first_errors(done.stderr)}"
                )
            return output.read_bytes()

    try:
        return cache.cached_file("host", identity, ".so", make)
    except OSError as error:
        raise BuildError(f"the CPU engine cannot be kept in the cache: {error}") from None


_lock = threading.Lock()
_loaded: dict[tuple[str | None, ...], ctypes.CDLL | BuildError] = {}


def load() -> ctypes.CDLL:
    """The engine, compiled if need be and loaded once in a process. Calls release the GIL.

    Raises BuildError, and then at once each time, until $CXX or $PATH changes.
    """
    wanted = (os.environ.get("CXX"), os.environ.get("PATH"))
    with _lock:
        for engine in _loaded.values():
            if isinstance(engine, ctypes.CDLL):
                return engine
        failure = _loaded.get(wanted)
        if isinstance(failure, BuildError):
            raise BuildError(*failure.args)
        try:
            engine = _load()
        except BuildError as error:
            _loaded[wanted] = error
            raise
        _loaded[wanted] = engine
        return engine


def _load() -> ctypes.CDLL:
    path = build()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        # A file from another C library, or damaged on disk: worth one fresh compile.
        _log.warning("the compiled CPU engine does not load (%s): compiling it again", error)
        cache.discard(path)
    path = build()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"the compiled CPU engine does not load: {error}; if its directory does not allow "
            "execution, set WEAVE_MOE_CACHE to another one"
        ) from None
