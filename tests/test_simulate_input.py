"""What `simulate` is told: machines that can be, layers that the kernel takes; else one line."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from weave_moe.advise import advise
from weave_moe.cli import cli
from weave_moe.presets import PRESETS, from_config
from weave_moe.shapes import LayerShape
from weave_moe.simulate import Machine, load_machine, simulate

H200 = load_machine("h200")
NUMBERS = [entry.name for entry in fields(Machine) if entry.type in ("int", "float")]
LAYER = LayerShape(512, 256, 8, 2)
IDS = np.stack([np.arange(40) % 8, (np.arange(40) // 3 + 5) % 8], 1)


def invoke(*arguments: object, command: str = "simulate") -> Result:
    return CliRunner().invoke(cli, [command, *map(str, arguments)])


def refused(result: Result) -> str:
    """The one line that is said; nothing else, and no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    line, *more = result.stderr.strip().splitlines()
    assert not more
    return line


# Machines


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "-1", "1e300", "1" + "0" * 400])
def test_a_number_that_no_gpu_has_is_named(name: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(f'{{"{name}": {value}}}')
    with pytest.raises(ValueError, match=rf"machine .*\b{name} must be") as caught:
        load_machine(path)
    assert len(str(caught.value)) < 200 + len(str(path))
    number = json.loads(value)
    with pytest.raises(ValueError, match=rf"^machine {name} must be .* to .*, got"):
        Machine(**(asdict(H200) | {name: number}))


RATES = ("hbm_tbs", "l2_tbs", "sm_gbs", "matrix_tflops", "sms", "shared_bytes", "narrow_width")


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("value", [0, 1e-300])
def test_nothing_moves_without_rates(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^machine {name} must be"):
        Machine(**(asdict(H200) | {name: value}))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_machine_that_is_taken_can_be_simulated(data: st.DataObject) -> None:
    values: dict[str, Any] = {}
    for name in data.draw(st.lists(st.sampled_from(NUMBERS), unique=True, max_size=4)):
        message = ""
        try:
            Machine(**(asdict(H200) | {name: -1}))
        except ValueError as error:
            message = str(error).replace(",", "")
        found = re.search(r"must be (\S+) to (\S+) got", message)
        assert found is not None, name
        least, most = (float(text) for text in found.groups())
        value = data.draw(st.sampled_from((least, most, (least + most) / 2)))
        values[name] = int(value) if isinstance(getattr(H200, name), int) else value
    machine = Machine(**(asdict(H200) | values))
    for policy in ("steal", "static_expert"):
        result = simulate(LAYER, IDS, policy=policy, machine=machine)
        assert 0 < result.time_us < 1e12
        assert 0 <= result.busy_share <= 1 + 1e-6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"sms": 2.5}', "sms must be an int, got 2.5"),
        ('{"sms": true}', "sms must be an int, got True"),
        ('{"hbm_tbs": "fast"}', "hbm_tbs must be a number, got 'fast'"),
        ('{"source": 5}', "source must be a string, got 5"),
        ('{"l2_mb": -0.5}', "l2_mb must be 0 to 1,000,000, got -0.5"),
        ('{"shared_bytes": 0}', "shared_bytes must be 131,072 to 1,048,576, got 0"),
        ('{"hbm_tbs": Infinity}', "hbm_tbs must be 0.001 to 1,000, got inf"),
        ('{"sms": ' + "1" * 5000 + "}", "mine.json"),
        ("[" * 100_000 + "]" * 100_000, "recursion"),
        ('{"sms": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
        ('{"name": ' + '{"a": ' * 100_000 + "1" + "}" * 100_001, "recursion"),
    ],
    ids=lambda text: text[:24],
)
@pytest.mark.parametrize("command", ["simulate", "advise"])
def test_a_file_of_anything_is_one_line(command: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    line = refused(invoke("--tokens", 4, "--machine", path, command=command))
    assert line.startswith("weave-moe: --machine ")
    assert said in line
    assert len(line) < 300 + len(str(path))


# Layers

QWEN: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "hidden_size": 256, "num_experts": 32},
    **{"num_experts_per_tok": 4, "moe_intermediate_size": 128, "num_hidden_layers": 2},
}
REFUSED = [
    ({"num_experts_per_tok": 20}, "top_k is 20"),
    ({"hidden_size": 63}, "hidden is 63"),
    ({"moe_intermediate_size": 100}, "intermediate is 100"),
    ({"num_experts": 100_000}, "100000 experts"),
]


def config(folder: Path, change: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(QWEN | change))
    return path


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=lambda x: str(x)[:24])
def test_a_layer_that_the_kernel_refuses_is_not_simulated(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = config(tmp_path, change)
    line = refused(invoke("--config", path, "--tokens", 8))
    assert f"the GPU kernel does not take this layer ({said}" in line
    # `advise` says the same, for it asks the same.
    layer = from_config(path)
    reason = advise(layer, np.arange(8 * layer.top_k).reshape(8, -1) % layer.experts).reason
    assert line.split("(", 1)[1].split("), so")[0] in reason


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_simulate_takes_the_presets_that_the_kernel_takes(name: str) -> None:
    layer = PRESETS[name]
    found = advise(layer, np.arange(layer.top_k).reshape(1, -1), exponents=())
    result = invoke("--preset", name, "--tokens", 1, "--policy", "steal")
    if found.results:
        assert result.exit_code == 0, result.output
    else:
        assert "the GPU kernel does not take this layer" in refused(result)


def test_a_trace_without_an_expert_is_not_simulated(tmp_path: Path) -> None:
    path = tmp_path / "empty.npz"
    np.savez(path, topk_ids=np.full((8, 2), -1), experts=8)
    line = refused(invoke("--routing", f"trace:{path}"))
    assert "--routing must have a slot with an expert, 0 .. 7: all are empty" in line
    assert line == refused(invoke("--routing", f"trace:{path}", command="advise"))
    out = ("--simulate", "--out", tmp_path / "out")
    assert line == refused(invoke("--routing", f"trace:{path}", *out, command="profile"))
    assert not (tmp_path / "out").exists()


def test_the_config_is_taken_without_the_change(tmp_path: Path) -> None:
    result = invoke("--config", config(tmp_path, {}), "--tokens", 8, "--policy", "steal")
    assert result.exit_code == 0, result.output
