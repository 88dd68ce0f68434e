"""Whether a change of host code leaves launches as they were: needs no GPU.

    python tools/same_launches.py REVISION

Records what random calls launch, with the package of a revision and with the one in the working
tree: kernels, grids, shared memory, parameters, tensor maps, and where in the buffers each address
lies. Exit status 1, and the first call that differs, if they are not the same. Device code is
compared as text: what was run on a GPU at that revision then holds for the working tree.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OF_CONTROL = ("queue", "up_done", "down_done", "up_parts", "down_parts")


def drawn(rng: random.Random) -> dict[str, Any]:
    """The sizes and options of a call."""
    import torch

    tokens = rng.choice([1, 4, 16, 64, 200, 256, 257, 300, 1024, 2048, 2500, rng.randint(1, 3000)])
    experts = rng.choice([4, 8, 64, 128, 256, 512, 600])
    hidden, intermediate = rng.choice([64, 96, 128]), rng.choice([64, 72])
    if experts * hidden * intermediate > 6_000_000:
        hidden = intermediate = 8
    case: dict[str, Any] = {
        **{"tokens": tokens, "experts": experts, "hidden": hidden, "intermediate": intermediate},
        "top_k": min(experts, rng.choice([1, 2, 4, 8, 10])),
        "valid": rng.choice([None, None, 5, 0, tokens, tokens - 1]),
    }
    names = ("biases", "weight_on_input", "residual", "mapped", "interleaved")
    case |= rng.choice([{}, {"dtype": torch.float16}, *({name: True} for name in names)])
    layer = None
    if rng.random() < 0.5:
        router, shared = rng.choice(["same", "fp32", "logits"]), rng.choice([0, 64, 96])
        gate = torch.bfloat16 if shared and router != "logits" and rng.random() < 0.5 else None
        layer = {"router": router, "shared": shared, "gate": gate}
    return {"case": case, "layer": layer, "slab": rng.choice([16_384, 16_384, 1024, 300])}


def recorded(calls: int) -> list[Any]:
    """What each call launches, as plain values."""
    import pytest

    from fakes.launches import Recorder, bf16_case, layer_of
    from weave_moe.backends import cuda
    from weave_moe.runtime.buffers import _HELD

    rng, found = random.Random(0), []
    for number in range(calls):
        call = drawn(rng)
        options = {name: value for name, value in call["case"].items() if value is not None}
        case = bf16_case(options.pop("tokens"), **options, seed=number)
        with pytest.MonkeyPatch.context() as patch:
            recorder = Recorder(patch)
            patch.setattr(cuda, "SLAB_TOKENS", call["slab"])
            layer = call["layer"] and layer_of(case, **call["layer"])
            if layer is None:
                recorder.run(case)
            elif cuda.BACKEND.layer_unavailable(layer) is None:
                recorder.layer(layer)
            held = [(name, getattr(recorder.buffers, name)) for name in _HELD]

        def place(address: int | None, held: list[Any] = held) -> str | None:
            for name, tensor in held:
                if address and 0 <= address - tensor.data_ptr() < max(tensor.numel(), 1):
                    return f"{name} + {address - tensor.data_ptr()}"
            return "a tensor" if address else None

        def plain(p: ctypes.Structure, place: Any = place) -> dict[str, Any]:
            values: dict[str, Any] = {}
            for name, kind, *_ in p._fields_:
                value = getattr(p, name)
                if isinstance(value, ctypes.Structure):
                    values[name] = plain(value)
                elif name in OF_CONTROL:  # some unused ones lie behind the buffer's end
                    values[name] = f"control + {value - p.control}"
                elif name != "call":  # which counts launches
                    values[name] = place(value) if kind is ctypes.c_void_p else value
            return values

        launches = [
            [one.name, one.blocks, one.shared, str(one.config), one.maps.hex(), plain(one.p)]
            for one in recorder.all
        ]
        maps = [[place(pointer), *map(str, rest)] for pointer, *rest in recorder.maps]
        found.append([str(call), launches, maps])
    return found


def recorded_by(package: Path, calls: int) -> list[Any]:
    """The same in a process of its own, with the package in that folder."""
    paths = os.pathsep.join([str(package), str(ROOT / "tests")])
    command = [sys.executable, __file__, "--record", str(calls)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def device_code(package: Path) -> dict[str, str]:
    folder = package / "weave_moe/device"
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.is_file()}


def differences(before: Any, after: Any, where: str = "launches") -> Iterator[str]:
    """Where two nested values differ, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before | after:
            yield from differences(before.get(name), after.get(name), f"{where}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{where}[{i}]")
    elif before != after:
        yield f"{where}: {str(before)[:200]} -> {str(after)[:200]}"


def main() -> int:
    """Compares, or records for another process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("revision", nargs="?", help="of git, to compare with")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--record", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.record:
        json.dump(recorded(args.record), sys.stdout)
        return 0
    if args.revision is None:
        parser.error("a revision is needed")
    archive = subprocess.run(
        ["git", "archive", args.revision, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        packages = Path(folder) / "src", ROOT / "src"
        code = [device_code(package) for package in packages]
        before, after = (recorded_by(package, args.calls) for package in packages)
    changed = [name for name in code[0] | code[1] if code[0].get(name) != code[1].get(name)]
    print(f"device code: {', '.join(changed) + ' changed' if changed else 'the same'}")
    for old, new in zip(before, after, strict=True):
        if old != new:
            print(f"not the same: {old[0]}")
            for line in differences(old[1:], new[1:]):
                print(line)
            return 1
    launches = sum(len(call[1]) for call in before)
    print(f"{len(before)} calls, {launches} launches: the same")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
