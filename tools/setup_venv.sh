#!/bin/sh
# Makes the virtual environment that `make` uses: torch first, then this package with some extras.
#   sh tools/setup_venv.sh VENV EXTRAS
# PYTHON  the interpreter to build on (default python3)
# TORCH   what to install as torch where that interpreter has none, in pip's words, options included:
#         TORCH="torch --index-url https://..."; default: see below
set -eu
venv=${1:-.venv}
extras=${2:-test}
python=${PYTHON:-python3}

fail() {
    echo "setup: $*" >&2
    exit 1
}
command -v "$python" >/dev/null 2>&1 || fail "no $python here: install Python 3.10 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version 2>&1) is too old: Python 3.10 or newer is needed; set PYTHON"
command -v "${CXX:-g++}" >/dev/null 2>&1 || command -v c++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 ||
    echo "setup: no C++ compiler found; without g++ the CPU engine cannot run and the reference takes its place" >&2

# A torch that the interpreter already has is kept: the environment sees it and pip leaves it alone.
have=$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null || true)
echo "setup: making $venv with $("$python" --version 2>&1)"
if [ -n "$have" ]; then
    "$python" -m venv --system-site-packages "$venv"
else
    "$python" -m venv "$venv"
fi || fail "no virtual environment could be made (Debian and Ubuntu need the package python3-venv)"
if [ -n "$have" ] && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    # The interpreter is itself in a virtual environment: its packages are not the base interpreter's.
    echo "$have" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-python.pth"
fi

# pip before 21.3, which comes with some Pythons of 3.10, makes no editable install from a pyproject.toml alone.
"$venv/bin/python" -m pip install -q --disable-pip-version-check --upgrade pip
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    if [ -z "${TORCH:-}" ]; then
        # Without an NVIDIA GPU one fixed release is enough, and a CPU build where the index has one.
        if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
            TORCH="torch>=2.6"
        else
            TORCH="torch==2.13.0"
        fi
    fi
    echo "setup: installing $TORCH (this can take minutes)"
    # shellcheck disable=SC2086  # TORCH may carry options
    "$venv/bin/python" -m pip install -q --disable-pip-version-check $TORCH
fi
echo "setup: installing this package with the extras $extras"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -e ".[$extras]"
