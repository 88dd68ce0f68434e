"""The committed result files, and that the README says what they say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
KEYS = {
    *("model", "T", "skew", "dtype", "contestant", "floor_us", "gpu", "driver", "versions"),
    *("date", "commit", "command", "read_tbs", "matrix_tflops"),
}


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks/report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows() -> list[dict[str, object]]:
    text = (ROOT / "benchmarks/results/h200-experts.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_row_names_what_it_was_measured_on() -> None:
    for row in rows():
        assert row.keys() >= KEYS
        assert {"us", "p99_us", "rel_err"} <= row.keys() or "error" in row
        assert "/" not in str(row["command"]).replace("benchmarks/experts.py", "")


def test_no_time_of_a_wrong_result() -> None:
    for row in rows():
        if str(row["contestant"]).startswith("weave"):
            assert float(str(row["rel_err"])) < 1e-2


def test_the_readme_says_what_the_results_say(report: ModuleType) -> None:
    assert report.section() in (ROOT / "README.md").read_text()


def test_the_report_names_the_cells_that_are_behind(report: ModuleType) -> None:
    def cell(ours: float, rival: float) -> dict[str, dict[str, object]]:
        base = {"floor_us": 1.0}
        return {
            "weave": {**base, "us": ours},
            "vllm": {**base, "us": rival, "contestant": "vllm"},
            "broken": {**base, "error": "wrong result", "contestant": "broken"},
        }

    cells = {("a", 1, 0.0): cell(2.0, 4.0), ("a", 16, 0.0): cell(4.0, 2.0)}
    text = report.table(cells)
    assert "Geometric mean against the best rival in each cell: 1.00" in text
    assert "Slower than the best rival in 1 of 2 cells: a T=16 skew 0 (0.50)." in text
