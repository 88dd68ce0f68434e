"""The disk cache of compiled code, alone and with several processes at once."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.launches import config_of
from weave_moe.runtime import cache, kernel
from weave_moe.schedule.granularity import choose_kernel


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WEAVE_MOE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("WEAVE_MOE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.directory() == Path("/home/somebody/.cache/weave-moe")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert cache.directory() == Path("/var/xdg/weave-moe")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.directory() == Path("/home/somebody/.cache/weave-moe")
    monkeypatch.setenv("WEAVE_MOE_CACHE", "~/mine")
    assert cache.directory() == Path("/home/somebody/mine")
    monkeypatch.setenv("WEAVE_MOE_CACHE", "mine")
    monkeypatch.chdir(tmp_path)
    assert cache.directory() == tmp_path / "mine"
    monkeypatch.setenv("WEAVE_MOE_CACHE", "")
    assert cache.directory() == Path("/home/somebody/.cache/weave-moe")
    assert not (tmp_path / "mine").exists()  # asking creates nothing


def test_made_once_and_kept(home: Path) -> None:
    made: list[str] = []

    def make() -> bytes:
        made.append("now")
        return b"content"

    paths = {cache.cached_file("kernel", ["source", "flags"], ".bin", make) for _ in range(3)}
    (path,) = paths
    assert path.parent == home
    assert path.name.startswith("kernel-")
    assert path.suffix == ".bin"
    assert path.read_bytes() == b"content"
    assert made == ["now"]
    assert list(home.iterdir()) == [path]  # neither locks nor leftovers
    assert home.stat().st_mode & 0o077 == 0  # others may not plant code here
    cache.discard(path)
    cache.discard(path)
    assert cache.cached_file("kernel", ["source", "flags"], ".bin", make) == path
    assert made == ["now"] * 2


@given(
    st.lists(st.text(max_size=4) | st.binary(max_size=4), max_size=4),
    st.lists(st.text(max_size=4) | st.binary(max_size=4), max_size=4),
)
def test_other_identities_are_other_entries(one: list[str | bytes], two: list[str | bytes]) -> None:
    def plain(parts: list[str | bytes]) -> list[bytes]:
        return [part.encode() if isinstance(part, str) else part for part in parts]

    assert (cache._key(one) == cache._key(two)) == (plain(one) == plain(two))


def test_borders_and_order_count() -> None:
    keys = [
        cache._key(parts)
        for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c", ""])
    ]
    assert len(set(keys)) == 5


def test_kind_and_suffix_make_a_plain_name(home: Path) -> None:
    for kind, suffix in (("../x", ""), ("a/b", ""), (".x", ""), ("x", "/../y")):
        with pytest.raises(ValueError, match="must make a plain file name"):
            cache.cached_file(kind, [], suffix, lambda: b"")
    assert not home.exists()


def test_what_fails_leaves_nothing(home: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        cache.cached_file("x", ["1"], "", fail)
    assert list(home.iterdir()) == []
    assert cache.cached_file("x", ["1"], "", lambda: b"luck").read_bytes() == b"luck"


def test_threads_make_it_once(home: Path) -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        time.sleep(0.1)
        return bytes(100_000)

    def work() -> None:
        sizes.append(len(cache.cached_file("x", ["1"], "", make).read_bytes()))

    sizes: list[int] = []
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [100_000] * 8
    assert len(made) == 1


PROCESS = """
import os, sys, time
from weave_moe.runtime import cache

log, task = sys.argv[1:]

def make():
    with open(log, "a") as file:
        file.write("made\\n")
    if task == "die":
        os._exit(9)
    time.sleep(0.3)
    return b"x" * 1_000_000

path = cache.cached_file("x", ["1"], ".bin", make)
content = path.read_bytes()
assert content == b"x" * 1_000_000, len(content)
"""


def start(log: Path, task: str = "make") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(log), task], stderr=subprocess.PIPE, text=True
    )


def test_processes_make_it_once(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(log) for _ in range(6)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert log.read_text() == "made\n"
    assert len(list(home.iterdir())) == 1


def test_a_process_that_dies_while_making_blocks_nobody(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    dying = start(log, "die")
    dying.communicate()
    assert dying.returncode == 9
    assert not list(home.glob("x-*"))
    other = start(log)
    _, errors = other.communicate()
    assert other.returncode == 0, errors
    assert log.read_text() == "made\nmade\n"


def test_writers_that_do_not_see_each_other_agree(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where locks do nothing, the entry is made twice and is whole all the same."""
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.0)
    inside = threading.Barrier(2, timeout=10)
    results: list[bytes] = []

    def make() -> bytes:
        inside.wait()
        return b"y" * 300_000

    def work() -> None:
        results.append(cache.cached_file("x", ["1"], "", make).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"y" * 300_000] * 2
    assert len(list(home.iterdir())) == 1


def test_a_directory_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WEAVE_MOE_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, "weave_moe"):
        paths = {cache.cached_file("x", ["1"], "", lambda: b"code") for _ in range(2)}
    (path,) = paths
    assert path.read_bytes() == b"code"
    assert path.is_relative_to(tempfile.gettempdir())
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"{tmp_path / 'file' / 'cache'} cannot be written" in message
    assert "WEAVE_MOE_CACHE" in message


def test_a_private_directory_is_removed_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    program = (
        "import os\nfrom weave_moe.runtime import cache\n"
        "path = cache.cached_file('x', ['1'], '', lambda: b'code')\n"
        "child = os.fork()\n"  # whose end must not take the directory away
        "if child == 0: raise SystemExit(0)\n"
        "os.waitpid(child, 0)\nprint(path.read_bytes().decode(), path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "WEAVE_MOE_CACHE": str(tmp_path / "file" / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    content, path = done.stdout.split()
    assert content == "code"
    assert not Path(path).parent.exists()


NAME = f"experts-{'0a' * 16}.cubin"


def old(path: Path, content: str = "half") -> Path:
    """A file of two days ago."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    long_ago = time.time() - 2 * 86_400
    os.utime(path, (long_ago, long_ago))
    return path


def test_old_leftovers_are_removed(home: Path) -> None:
    leftovers = [old(home / f".{NAME}.a_b1.tmp"), old(home / f".{NAME}.lock")]
    entry = old(home / "x-entry")
    young = home / f".{NAME}.cd2.tmp"
    young.write_text("half")
    cache.cached_file("x", ["1"], "", lambda: b"")
    assert not any(path.exists() for path in leftovers)
    assert young.exists()
    assert entry.exists()


def test_hidden_files_of_others_stay(home: Path) -> None:
    # $WEAVE_MOE_CACHE may name a home directory.
    mine = [
        old(home / name) for name in (".profile", ".vimrc.tmp", ".lock", f".{NAME}", ".a-b.tmp")
    ]
    cache.cached_file("x", ["1"], "", lambda: b"")
    cache.clear()
    assert all(path.exists() for path in mine)


def test_entries_are_what_the_package_made(home: Path) -> None:
    assert cache.entries() == []
    paths = [
        cache.cached_file(kind, ["1"], suffix, lambda: b"code")
        for kind, suffix in cache.KINDS.items()
    ]
    assert [(e.path, e.kind, e.bytes) for e in cache.entries()] == [
        (path, kind, 4) for path, kind in zip(paths, cache.KINDS, strict=True)
    ]
    assert all(abs(time.time() - entry.made) < 60 for entry in cache.entries())


def test_clearing_takes_entries_and_nothing_else(home: Path) -> None:
    made = [
        cache.cached_file(kind, [str(i)], suffix, lambda: b"code")
        for kind, suffix in cache.KINDS.items()
        for i in range(2)
    ]
    stale = old(home / f".{NAME}.lock")
    hex32 = "0a" * 16
    others = [
        home / name
        for name in (
            *("notes.txt", "experts.cubin", f"experts-{hex32}", f"experts-{hex32}.so"),
            *(f"host-{hex32[1:]}.so", f"my-host-{hex32}.so", f"host-{hex32.upper()}.so"),
            *(f"host-{hex32}.so.bak", f".{NAME}.x.tmp", f".{NAME}.lock2"),
        )
    ]
    for path in others:
        path.write_text("of somebody else")
    folder = home / f"host-{'1b' * 16}.so"
    folder.mkdir()
    link = home / f"host-{'2c' * 16}.so"
    link.symlink_to(others[0])
    cleared = cache.clear()
    assert sorted(entry.path for entry in cleared.removed) == sorted(made)
    assert cleared.kept == ()
    assert not any(path.exists() for path in (*made, stale))
    assert all(path.read_text() == "of somebody else" for path in others)
    assert folder.is_dir()
    assert link.is_symlink()
    assert cache.clear() == cache.Cleared((), ())


def test_an_entry_that_cannot_be_removed_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache.cached_file("host", ["1"], ".so", lambda: b"code")
    right = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            raise PermissionError(13, "Permission denied")
        right(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    cleared = cache.clear()
    assert cleared.removed == ()
    assert [(entry.path, why) for entry, why in cleared.kept] == [(path, "Permission denied")]


CLEARED = """
import sys, time
from weave_moe.runtime import cache

def make():
    time.sleep(0.1)
    return b"x" * 1_000_000

deadline = time.monotonic() + float(sys.argv[1])
rounds = 0
while time.monotonic() < deadline:
    path = cache.cached_file("host", [sys.argv[2], str(rounds)], ".so", make)
    try:
        assert len(path.read_bytes()) == 1_000_000
    except FileNotFoundError:
        pass
    rounds += 1
print(rounds)
"""


def test_clearing_disturbs_nobody_who_makes_entries(home: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLEARED, "2", str(number // 2)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)  # two of each make the same entries
    ]
    removed = 0
    while any(process.poll() is None for process in processes):
        removed += len(cache.clear().removed)
        time.sleep(0.002)
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        assert int(output) > 3
    assert removed > 5
    cache.clear()
    assert list(home.iterdir()) == []


def test_a_kernel_that_is_cleared_before_it_is_read_is_made_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    found: list[Path] = []

    def compiled(self: kernel.KernelConfig, *extra: str) -> tuple[bytes, str]:
        made.append("now")
        return b"code", ""

    def cached_file(*arguments: Any) -> Path:
        found.append(cache.cached_file(*arguments))
        if len(found) == 1:
            cache.clear()
        return found[-1]

    monkeypatch.setattr(kernel.KernelConfig, "compile", compiled)
    monkeypatch.setattr(kernel.nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(kernel, "cached_file", cached_file)

    class Library:
        def __init__(self, cubin: bytes) -> None:
            self.cubin = cubin

        def kernel(self, name: str, **limits: int) -> bytes:
            return self.cubin

    monkeypatch.setattr(kernel, "Library", Library)
    plan = choose_kernel(tokens=1, top_k=1, experts=1, hidden=64)
    config = config_of(plan)
    assert kernel._load(config, 0).experts == b"code"  # type: ignore[comparison-overlap]
    assert len(made) == 2


def test_the_kinds_are_those_that_the_package_makes() -> None:
    source = "".join(path.read_text() for path in Path(cache.__file__).parents[1].rglob("*.py"))
    made = re.findall(r'cached_file\(\s*"([^"]+)", \w+, "([^"]+)"', source)
    assert dict(made) == cache.KINDS
