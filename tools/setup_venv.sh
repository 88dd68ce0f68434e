#!/bin/sh
# Makes the virtual environment that `make` uses: torch first, then this package with its test extras.
#   sh tools/setup_venv.sh VENV
# PYTHON  the interpreter to build on (default python3)
# TORCH   what to install as torch, in pip's words (e.g. TORCH="torch --index-url ..."); default: see below
set -eu
venv=${1:-.venv}
python=${PYTHON:-python3}

# A torch that the interpreter already has is kept: the environment sees it and pip leaves it alone.
if "$python" -c 'import torch' 2>/dev/null; then
    "$python" -m venv --system-site-packages "$venv"
else
    "$python" -m venv "$venv"
fi
"$venv/bin/python" -m pip install -q --upgrade pip

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    if [ -z "${TORCH:-}" ]; then
        # Without an NVIDIA GPU one fixed release is enough, and a CPU build where the index has one.
        if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
            TORCH="torch>=2.6"
        else
            TORCH="torch==2.13.0"
        fi
    fi
    # shellcheck disable=SC2086  # TORCH may carry options
    "$venv/bin/python" -m pip install -q $TORCH
fi
"$venv/bin/python" -m pip install -q -e ".[test]"
