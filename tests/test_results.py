"""The committed result files, and the report that is made of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.jsonl"))
KEYS = {
    *("model", "T", "skew", "dtype", "contestant", "gpu", "driver", "versions"),
    *("date", "commit", "command"),
}
OF_A_FILE = {
    "h200-experts": {"floor_us", "read_tbs", "matrix_tflops"},
    "h200-more-rivals": {"floor_us", "read_tbs", "matrix_tflops", "version"},
    "h200-policies": {
        *("floor_us", "read_tbs", "matrix_tflops", "trace", "knobs", "sms_held", "steals"),
        *("busy_share", "tail_gap_us", "dram_over_min"),
    },
    "h200-neighbours": {
        *("neighbour", "neighbour_sms", "us", "alone_us", "slowdown", "equal_bits", "finite"),
        *("neighbour_tbs", "neighbour_alone_tbs"),
    },
    "h200-granularity": {
        *("floor_us", "read_tbs", "tile_rows", "task_kb", "task_us", "tasks", "workers"),
        *("over_static", "spread"),
    },
    "h200-layer": {"floor_us", "read_tbs", "matrix_tflops", "active", "maxload"},
    "h200-end-to-end": {"phase", "layers", "of_layers", "read_tbs", "matrix_tflops"},
    "h200-counters": {"label", "kernels", "dram_bytes", "dram_over_min", "l2_hit"},
}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import report

    yield report
    sys.path.remove(str(ROOT / "benchmarks"))


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_row_names_what_it_was_measured_on(path: Path) -> None:
    for row in rows(path):
        assert row.keys() >= KEYS | OF_A_FILE[path.stem]
        command = row["command"].split()
        assert command[0] == "python"
        assert (ROOT / command[1]).is_file()
        assert not any("/" in word for word in command[2:])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_time_of_a_wrong_result(path: Path) -> None:
    for row in rows(path):
        assert ("us" in row) != ("error" in row) or "label" in row
        if "us" in row and row["contestant"].startswith("weave"):
            assert row["rel_err"] < 1e-2
            assert row.get("max_row_err", 0) < 2e-2
            assert row.get("equal_bits", True)
            assert row.get("finite", True)


def test_every_time_of_the_experts_has_its_99th_percentile() -> None:
    timed = [row for row in rows(ROOT / "benchmarks/results/h200-experts.jsonl") if "us" in row]
    assert timed
    for row in timed:
        assert row["p99_us"] >= row["us"] > 0, row


def test_the_pages_say_what_the_results_say(report: ModuleType) -> None:
    for page, text in report.pages().items():
        assert page.read_text() == text, f"{page.name}: run python benchmarks/report.py"


def test_there_is_something_to_report(report: ModuleType) -> None:
    assert "times as fast" in report.readme_section(report.read(report.FILES["experts"]), [])
    assert {f"h200-{name}" for name in report.NAMES} >= {p.stem for p in RESULTS}


def test_counted_bytes_stand_beside_the_policies(report: ModuleType) -> None:
    policies = report.read(report.FILES["policies"])
    timed = {row["commit"] for row in policies}
    counted, filled = (
        {
            (r["commit"], r["model"], r["T"], r["skew"], r["contestant"]): r["dram_over_min"]
            for r in rows
            if r["commit"] in timed and r["dram_over_min"] is not None
            if report.is_plain(r)
        }
        for rows in (report.read(report.FILES["counters"]), policies)
    )
    assert filled
    assert filled == counted


def test_what_a_launch_takes_is_what_the_page_says(report: ModuleType) -> None:
    from weave_moe.backends.cuda import slab_tokens
    from weave_moe.simulate.calibrate import SHAPES

    text = " ".join(report.DETAILS.read_text().split())
    most = {model: slab_tokens(shape) for model, shape in SHAPES.items()}
    fewer = [f"{model} {tokens:,}" for model, tokens in most.items() if tokens < 16384]
    assert max(most.values()) == 16384
    said = f"would need more than 5 GiB fewer ({', '.join(fewer) or 'none of these models'})"
    assert f"a launch takes at most 16,384 tokens, of layers whose rows {said}" in text


# --- a report of made-up rows -------------------------------------------------------------------

ABOUT = {
    "dtype": "bfloat16",
    "gpu": "GPU",
    "driver": "1",
    "versions": {"torch": "2"},
    "date": "2026-01-01",
    "commit": "c" * 40,
    "command": "python benchmarks/experts.py",
    "read_tbs": 4.5,
    "matrix_tflops": 700.0,
}


def expert_row(model: str, tokens: int, skew: float, contestant: str, us: float | None) -> Row:
    row = {"model": model, "T": tokens, "skew": skew, "contestant": contestant, "floor_us": 10.0}
    row |= {"version": "3", "note": "fused"}
    return row | ABOUT | ({"error": "wrong result"} if us is None else {"us": us, "rel_err": 0.003})


def policy_row(
    cell: tuple[str, int, float | None],
    policy: str,
    over: float,
    *,
    held: int = 0,
    spread: float = 0.001,
    knobs: Row | None = None,
) -> Row:
    model, tokens, skew = cell
    return {
        **{"model": model, "T": tokens, "skew": skew, "trace": None if skew is not None else "t"},
        **{"contestant": f"weave:{policy}", "floor_us": 10.0, "us": 20.0 * over},
        **{"of_floor": 0.5 / over, "over_steal": over, "spread": spread, "sms_held": held},
        "knobs": {"steal": "half", "min_steal": 1, "victim": "largest"} | (knobs or {}),
        **{"tasks": 100, "steals": 7, "busy_share": 0.9, "tail_gap_us": 1.5},
        **{"dram_over_min": None, "l2_hit": None, "rel_err": 0.003},
    } | ABOUT


def neighbour_row(policy: str, slowdown: float) -> Row:
    return {
        **{"model": "a", "T": 64, "skew": 0.0, "contestant": f"weave:{policy}"},
        **{"neighbour": "stream", "neighbour_sms": 16, "us": 20 * slowdown, "alone_us": 20.0},
        **{"slowdown": slowdown, "equal_bits": True, "finite": True},
        **{"neighbour_tbs": 0.5, "neighbour_alone_tbs": 0.6},
    } | ABOUT


def write(path: Path, found: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def test_the_report_names_the_cells_that_are_behind(report: ModuleType) -> None:
    found = [
        *(expert_row("a", 1, 0.0, "weave", 2.0), expert_row("a", 1, 0.0, "vllm", 4.0)),
        *(expert_row("a", 16, 1.2, "weave", 4.0), expert_row("a", 16, 1.2, "vllm", 2.0)),
        *(expert_row("a", 16, 1.2, "broken", None), expert_row("a", 16, 1.2, "slow", 9.0)),
        expert_row("a", 4096, 0.0, "weave", 4.0),
    ]
    text = report.readme_section(found, [])
    assert (
        "Geometric mean against the best rival in each cell: 1.00 (by model: a 1.00; by tokens: "
        "2.00 at 1, 0.50 at 16; by routing: even 2.00, Zipf 1.2 0.50)." in text
    )
    assert "Slower than the best rival in 1 of 2 cells: a T=16 Zipf 1.2 (0.500)." in text
    assert "either way" not in text
    few, many = text.split("**More than 256 tokens**")
    assert "| a | 1 | 2.0 | 5.000 | 4.0 (vllm) | 2.00 | - | - | - | - |" in few
    assert "| a | 16 | - | - | - | - | 4.0 | 2.500 | 2.0 (vllm) | 0.50 |" in few
    assert "| a | 4,096 | 4.0 | 2.500 | - | - | - | - | - | - |" in many
    assert "4,096" not in few
    details = report.details_section(found, [], [])
    assert "| a | 16 | Zipf 1.2 | 10.0 | 4.0 | 2.0 | error | 9.0 |" in details


def test_only_rows_of_one_commit_are_compared(report: ModuleType) -> None:
    from tables.rivals import ratio_to_rival
    from tables.rows import Cell

    old = [expert_row("a", 1, 0.0, "weave", 1.0), expert_row("a", 1, 0.0, "vllm", 2.0)]
    new = [row | {"commit": "d" * 40} for row in (old[0] | {"us": 5.0},)]
    cells = report.load_experts(old + new)
    assert cells == {Cell("a", 1, "even"): {"weave": new[0]}}
    assert ratio_to_rival(next(iter(cells.values()))) is None
    again = report.load_experts([*old, old[0] | {"us": 1.5}])
    assert next(iter(again.values()))["weave"]["us"] == 1.5


@pytest.fixture
def made_up() -> list[Row]:
    found = []
    for tokens, static, expert in ((64, 1.05, 3.0), (4096, 1.001, 1.5)):
        for skew in (0.0, 1.2, None):
            cell = ("a", tokens, skew)
            found += [
                policy_row(cell, "steal", 1.0),
                policy_row(cell, "counter", 0.998),
                policy_row(cell, "static_strided", static),
                policy_row(cell, "static_expert", expert + (skew or 0)),
            ]
    found.append(policy_row(("a", 64, 1.2), "steal", 1.03, knobs={"steal": "one"}))
    for held, static in ((66, 1.004), (16, 1.2)):
        found += [
            policy_row(("a", 64, 0.0), "steal", 1.0, held=held) | {"us": 25.0},
            policy_row(("a", 64, 0.0), "static_strided", static, held=held) | {"us": 30.0},
            policy_row(("a", 64, 0.0), "counter", 0.99, held=held) | {"us": 25.0},
        ]
    return found


def test_it_says_where_dynamic_scheduling_gains_nothing(
    report: ModuleType, made_up: list[Row]
) -> None:
    jobs = report.load_policies(made_up)
    short, long = report.dynamic_words(jobs), report.dynamic_words(jobs, where=True)
    assert "**Dynamic scheduling gains nothing there in 3 of 6 cells** (0 of 3 up to 256" in short
    assert "3 of 3 above" in short
    assert "a even 4,096; a Zipf 1.2 4,096; a recorded 4,096" in long
    assert "One global counter is level with stealing in 6 of 6 cells" in short
    wide = [row | {"spread": 0.2} for row in made_up]
    assert "in 6 of 6 cells" in report.dynamic_words(report.load_policies(wide))
    faster = [
        row | {"over_steal": 0.9} if "counter" in row["contestant"] else row for row in made_up
    ]
    text = report.dynamic_words(report.load_policies(faster))
    assert "level with stealing in 0 of 6 cells, faster in 6" in text
    assert "what pays is handing out tasks" in text
    slower = [row | {"over_steal": 1.1 if "counter" in str(row) else 1.0} for row in made_up]
    text = report.dynamic_words(report.load_policies(slower))
    assert "level with stealing in 0 of 6 cells, slower in 6." in text
    assert report.dynamic_words({}) == ""


def test_tables_by_policy(report: ModuleType, made_up: list[Row]) -> None:
    from tables.surroundings import ticket_words

    jobs = report.load_policies(made_up)
    assert "| a | 64 | 3.00 | 4.20 | 3.00 |" in report.static_expert_table(jobs)
    words = report.static_expert_words(jobs)
    assert "1.50 to 4.20 times as long" in words
    assert "; at Zipf 1.2 from 16 to 256 tokens at most 4.20 times (a, 64 tokens)" in words
    assert "; at Zipf 1.2 above at most 2.70 times (a, 4,096 tokens)" in words
    assert "; at even routing from 16 tokens up at most 3.00 times (a, 64 tokens)." in words
    assert "below 16" not in words
    one = report.load_policies([policy_row(("b", 1, None), "static_expert", 9.0)])
    assert "so few SMs have work, at most 9.00 times (b, 1 token)" in report.static_expert_words(
        one
    )
    assert "1.030 ± 0.001" in report.knobs_table(jobs)
    assert "`steal[steal=one]`" in report.knobs_table(jobs)
    assert "1.050 (1.05 to 1.05)" in report.by_policy_table(jobs)
    assert "0.900 | 1.5 / 1.5 |" in report.every_cell_table(jobs)
    assert "had `Workspace(batch=4)`" in ticket_words(made_up)
    assert ticket_words([row for row in made_up if row["T"] <= 256]) == ""
    assert ticket_words([row | {"batch": None} for row in made_up]) == ""
    assert report.memory_table({}) == report.memory_words({}) == ""
    counted = [
        row | {"dram_over_min": row["T"] / 64 + row["over_steal"] / 10, "l2_hit": 0.4, "label": ""}
        for row in made_up
        if not row["sms_held"]
    ]
    labelled = {**counted[0], "dram_over_min": 99.0, "label": "no hints", "commit": "later"}
    cells = report.load_counters([*counted, labelled])
    assert "1.10 / 0.40" in report.memory_table(cells)
    words = report.memory_words(cells)
    assert words.startswith("Up to 256 tokens `steal` 1.10, `counter` 1.10, ")
    assert "`static_expert` 1.30 to 1.42 times the least; above `steal` 64.10, " in words


def test_counters_with_a_label_stand_beside_those_without(
    report: ModuleType, made_up: list[Row]
) -> None:
    from tables.policies import labelled_table

    def row(policy: str, label: str, over: float, **more: Any) -> Row:
        made = policy_row(("a", 4096, 1.2), policy, 1.0)
        return made | {"label": label, "dram_over_min": over, "l2_hit": over / 10} | more

    plain = [row("steal", "", 2.0, ncu_us=10.0), row("counter", "", 1.5)]
    assert labelled_table(plain) == labelled_table([]) == ""
    hot = row("steal", "hot evict-last", 1.25, ncu_us=8.0)
    line = "| `steal` | a | 4,096 | Zipf 1.2 | hot evict-last | "
    assert labelled_table([*plain, hot]).splitlines()[2:] == [
        line + "10.0 / 8.0 | 2.00 / 1.25 | 0.20 / 0.12 |"
    ]
    # Of another commit there is nothing beside it; of the same run rather than another one.
    other = {**hot, "commit": "d" * 40}
    assert line + "- / 8.0 | - / 1.25 | - / 0.12 |" in labelled_table([*plain, other])
    beside = row("steal", "", 3.0, ncu_us=11.0, beside="evict-last")
    for rows in ([*plain, beside, hot], [beside, *plain, hot]):
        assert line + "11.0 / 8.0 | 3.00 / 1.25 |" in labelled_table(rows)
        cells = report.load_counters(rows)
        assert [r["dram_over_min"] for r in next(iter(cells.values())).values()] == [2.0, 1.5]
    old = row("counter", "no hints", 9.0)
    assert "| no hints | - / - | 1.50 / 9.00 |" in labelled_table([*plain, old])
    page = report.details_section(
        *([expert_row("a", 1, 0.0, "weave", 2.0)], made_up, []), counters=[*plain, beside, hot]
    )
    assert page.index("### Memory") < page.index("With and without what a label") < page.index(line)
    rows = [expert_row("a", 1, 0.0, "weave", 2.0)]
    page = report.details_section(rows, made_up, [], counters=plain)
    assert "a label says" not in page


def test_with_sms_held_only_what_took_turns_is_compared(
    report: ModuleType, made_up: list[Row]
) -> None:
    jobs = report.load_policies(made_up)
    table = report.held_table(jobs).splitlines()[2:]
    assert table == [
        "| 16 | a | 64 | even | 25.0 | 0.990 | 1.200 | - | - | - |",
        "| 66 | a | 64 | even | 25.0 | 0.990 | 1.004 | - | - | - |",
    ]
    words = report.held_words(jobs, where=True)
    assert "geometric means: with 16 SMs held (1 cell of a) `static_strided` takes 1.20" in words
    assert (
        "with 66 SMs held (1 cell of a) `static_strided` takes 1.00 (1.00), `counter` takes"
        in words
    )
    assert words.endswith("nothing over static lists in 1 of these 2: a T=64 even with 66 held.")
    assert report.held_words(jobs).endswith("nothing over static lists in 1 of these 2.")
    idle = [row | {"us": 1.0} if not row["sms_held"] else row for row in made_up]
    assert report.held_table(report.load_policies(idle)).splitlines()[2:] == table
    assert report.held_words({}) == report.held_table({}) == ""
    page = report.details_section([expert_row("a", 1, 0.0, "weave", 2.0)], made_up, [])
    assert page.count("### With SMs held") == 1
    none = report.details_section([expert_row("a", 1, 0.0, "weave", 2.0)], made_up[:4], [])
    assert "### With SMs held" not in none


def test_how_little_is_stolen_is_said(report: ModuleType, made_up: list[Row]) -> None:
    from tables.policies import steals_words

    words = steals_words(report.load_policies(made_up))
    assert words.startswith("In 0 of 8 cells, those with SMs held among them, a launch under")
    assert "refilled" not in words
    rows = [
        *[policy_row(("a", t, 0.0), "steal", 1.0) | {"steals": n} for t, n in ((1, 0), (9, 4))],
        policy_row(("a", 1, 0.0), "window", 1.0) | {"steals": 30},
        policy_row(("a", 9, 0.0), "steal", 1.0, held=8) | {"steals": 0},
    ]
    words = steals_words(report.load_policies(rows))
    assert words.startswith("In 2 of 3 cells, those with SMs held among them, a launch")
    assert "steals nothing, in the other one 4 times: queues are refilled by a few" in words
    assert "Under `window`, whose queues are filled before the first task, up to 30 times." in words
    assert steals_words({}) == ""


# --- more rivals, all-reduces -------------------------------------------------------------------


def test_more_rivals_are_compared_among_themselves(report: ModuleType) -> None:
    known = [expert_row("a", 64, 0.0, n, us) for n, us in (("weave", 5.0), ("vllm", 50.0))]
    more = [
        *(expert_row("a", 64, 0.0, n, us) for n, us in (("weave", 2.0), ("vllm", 4.0))),
        *(expert_row("a", 64, 0.0, n, us) for n, us in (("new", 3.0), ("slow", 9.0))),
        *(expert_row("a", 4096, 0.0, n, us) for n, us in (("weave", 4.0), ("vllm", 3.0))),
        *(expert_row("a", 4096, 0.0, n, us) for n, us in (("new", 5.0), ("slow", None))),
    ]
    words = report.more_rivals_words(report.load_experts(more), {"weave", "vllm"})
    assert words == (
        "With new, slow as well, timed apart in 2 cells (commit cccccccccccc), the best "
        "rival is new in 1 (a T=64 even); "
        "else one of those above. The geometric mean there is 1.06, against 1.22 over those above "
        "alone; slower in 1: a T=4096 even (0.750)."
    )
    still = [row | ({"us": 8.0} if row["contestant"] == "new" else {}) for row in more]
    words = report.more_rivals_words(report.load_experts(still), {"weave", "vllm"})
    assert "still one of those above. The geometric mean there is 1.22; slower in 1" in words
    assert report.more_rivals_words({}, {"weave"}) == ""
    assert report.more_rivals_words(report.load_experts(known), {"weave", "vllm"}) == ""
    readme = report.readme_section(known, [], more=more)
    details = report.details_section(known, [], [], more=more)
    assert "new in 1 (a T=64 even)" in readme
    assert "| a | 64 | 5.0 | 2.000 | 50.0 (vllm) | 10.00 |" in readme, "of the first file alone"
    assert "| a | 64 | even | 10.0 | 2.0 | 4.0 | 3.0 | 9.0 |" in details
    assert "| a | 4,096 | even | 10.0 | 4.0 | 3.0 | 5.0 | error |" in details
    assert "More rivals" not in report.details_section(known, [], [])


def test_all_reduces_in_words(report: ModuleType) -> None:
    def rows_beside(tokens: int, **times: float) -> list[Row]:
        return [
            neighbour_row(policy, us / 20.0)
            | {"T": tokens, "neighbour": "all-reduce", "neighbour_sms": None, "reduced_right": True}
            for policy, us in times.items()
        ]

    rows = rows_beside(1, steal=20.0, counter=20.0, static_strided=22.0)
    rows += rows_beside(64, steal=25.0, counter=24.0, static_strided=30.0)
    words = report.all_reduce_words([*rows, neighbour_row("steal", 9.0)])
    assert "geometric means of 2 cells: `static_strided` takes 1.15 (1.10 to 1.20)" in words
    assert "`counter` takes 0.98 (0.96 to 1.00)." in words
    assert "`steal` takes 1.00 to 1.25 times as long as alone" in words
    assert "run at 0.83 of their rate. All results are right." in words
    for broken in ("equal_bits", "finite", "reduced_right"):
        wrong = report.all_reduce_words([*rows[1:], rows[0] | {broken: False}])
        assert "**Some results are wrong.**" in wrong
    assert report.all_reduce_words([neighbour_row("steal", 1.1)]) == ""
    assert words in report.readme_section(
        [expert_row("a", 1, 0.0, "weave", 1.0)], [], neighbours=rows
    )


def layer_row(model: str, tokens: int, contestant: str, us: float | None, **more: Any) -> Row:
    floor = 8.0 if contestant == "weave:experts" else 10.0
    return expert_row(model, tokens, 0.0, contestant, us) | {"floor_us": floor} | more


@pytest.fixture
def whole() -> list[Row]:
    found = []
    for model in "ab":
        for tokens, us, router in ((1, 20.0, 4.5), (64, 40.0, 6.25), (4096, 800.0, 40.0)):
            more = {"shared_us": 1.5} if model == "b" else {}
            found += [
                # The parts first, as of a run that went on: the cell's floor is the whole one's.
                layer_row(model, tokens, "weave:experts", us - router),
                layer_row(model, tokens, "weave", us, router_us=router, **more),
                layer_row(model, tokens, "vllm", 1.25 * us),
                layer_row(model, tokens, "wrong", None),
            ]
    found.append(layer_row("a", 4096, "torch", 700.0))
    for model, over in (("a", 1.04), ("b", 1.062)):
        found += [
            layer_row(model, 5, "weave", 22.0, valid=5, over_bare=1.0, more_us=0.0),
            layer_row(model, 256, "weave", 23.0, valid=5, over_bare=over, more_us=1.0),
            layer_row(model, 2048, "weave", 27.0, valid=5, over_bare=1.2, more_us=over),
        ]
    return found


def test_the_report_of_the_whole_layer(report: ModuleType, whole: list[Row]) -> None:
    experts = [expert_row("a", 1, 0.0, "weave", 2.0)]
    text = report.readme_section(experts, [], whole)
    part = text.split("**The whole layer**")[1]
    assert "| a | 1 | 20.0 | 0.500 | 25.0 (vllm) | 1.25 | 4.5 | - |" in part
    assert "| a | 4,096 | 800.0 | 0.013 | 700.0 (torch) | 0.88 | 40.0 | - |" in part
    assert "| b | 64 | 40.0 | 0.250 | 50.0 (vllm) | 1.25 | 6.2 | 1.5 |" in part
    assert "Slower than the best rival in 1 of 6 cells: a T=4096 even (0.875)." in part
    assert (
        "Router and top-k add 4.5 to 6.2 us up to 64 tokens, and 5.3% of the experts' time above 64"
        in part
    )
    assert (
        "5 valid tokens of 256 in the call take 1.04 to 1.06 times as long as 5 alone (1.0 us "
        "more); 5 valid tokens of 2,048 in the call take 1.20 times as long as 5 alone (1.0 to "
        "1.1 us more)." in part
    )
    assert "Rivals: torch (3: fused); vllm (3: fused). They get logits by torch.mm" in part
    details = report.details_section(experts, [], [], whole)
    assert "| a | 64 | even | 10.0 | 40.0 | 33.8 | 50.0 | error | - |" in details
    assert "| b | 5 of 2,048 | 27.0 | 1.200 | 1.1 |" in details
    assert "| b | 5 of 5 | 22.0 | 1.000 | 0.0 |" in details


def test_skewed_cells_of_the_layer_have_a_table_and_count(
    report: ModuleType, whole: list[Row], tmp_path: Path
) -> None:
    experts = [expert_row("a", 1, 0.0, "weave", 2.0)]
    assert "Zipf" not in "".join(report.layer_part(whole, ""))
    skewed = [row | {"skew": 1.2} for row in whole if row["model"] == "a" and "valid" not in row]
    skewed = [row | {"us": row["us"] * 2} if "us" in row else row for row in skewed]
    cells = report.load_layer([*whole, *skewed])
    part = report.readme_section(experts, [], [*whole, *skewed]).split("**The whole layer**")[1]
    assert "to output, even and Zipf 1.2 routing, replays" in part
    even, below = part.split("Zipf 1.2 routing:")
    assert "| a | 1 | 20.0 | 0.500 | 25.0 (vllm) | 1.25 | 4.5 | - |" in even
    assert "| a | 1 | 40.0 | 0.250 | 50.0 (vllm) | 1.25 | 4.5 | - |" in below
    assert "| b |" not in below
    assert (
        "Slower than the best rival in 2 of 9 cells: a T=4096 even (0.875), a T=4096 Zipf 1.2 "
        "(0.875)." in below
    )
    assert "by routing: even 1.18, Zipf 1.2 1.11" in below
    newer = [row | {"commit": "d" * 40} for row in skewed]
    text = report.layer_part([*whole, *newer, newer[0] | {"T": 3}], "")[0]
    assert " (dddddddddddd: Zipf 1.2); from hidden states" in text
    details = report.details_section(experts, [], [], [*whole, *skewed])
    assert "| a | 64 | Zipf 1.2 | 10.0 | 80.0 | 67.5 | 100.0 | error | - |" in details
    pytest.importorskip("matplotlib")
    import plots

    plots.layer(cells, tmp_path)
    assert (tmp_path / "layer.png").stat().st_size > 0


def test_padded_calls_are_no_cells_of_the_layer(report: ModuleType, whole: list[Row]) -> None:
    cells = report.load_layer(whole)
    assert {cell.tokens for cell in cells} == {1, 64, 4096}
    newer = [row | {"commit": "d" * 40, "over_bare": 1.5} for row in whole if row.get("valid")]
    rows = report.load_padded([*whole, newer[0]])
    assert [r["over_bare"] for r in rows if r["model"] == "a"] == [1.5], "of one commit"
    assert len([r for r in rows if r["model"] == "b"]) == 3


def test_without_rows_of_the_layer_nothing_is_said_of_it(report: ModuleType) -> None:
    found = [expert_row("a", 1, 0.0, "weave", 2.0)]
    for text in (report.readme_section(found, []), report.details_section(found, [], [])):
        assert "whole layer" not in text
    assert report.layer_part([], "") == []


def step_row(phase: str, tokens: int, contestant: str, us: float, **more: Any) -> Row:
    row = {"model": "a", "T": tokens, "skew": None, "phase": phase, "contestant": contestant}
    row |= {"layers": 8, "of_layers": 48, "us": us, "tokens_per_s": 1e6 * tokens / us}
    versions = {"versions": {"torch": "2", "transformers": "5"}}
    return row | ABOUT | versions | more


def test_the_report_of_whole_models(report: ModuleType) -> None:
    ours = {"against": "transformers:b", "spread": 0.004}
    found = [
        step_row("decode", 16, "transformers:a", 900.0, share=0.9),
        step_row("decode", 16, "transformers:b", 450.0, share=0.5),
        step_row("decode", 16, "without:experts", 225.0),
        {k: v for k, v in step_row("decode", 16, "transformers:c", 1.0).items() if k != "us"},
        step_row(
            *("decode", 16, "weave", 300.0),
            **ours | {"gain": 1.5, "predicted_gain": 1.6, "predicted_off": 0.067},
        ),
        step_row("prefill", 512, "transformers:b", 600.0, share=0.25),
        step_row(
            *("prefill", 512, "weave:optimize", 500.0),
            **ours | {"gain": 1.2, "predicted_gain": 1.05, "predicted_off": -0.125},
        ),
    ]
    words = report.whole_models_words(found)
    assert "(a: 8 of 48 layers; commit cccccccccccc): 1.50 times the tokens a second in" in words
    assert " in decode, 1.20 times the tokens a second in prefill" in words
    assert "within 10% in 1 of 2; not in a prefill 512 as `weave:optimize` (1.05 pre" in words
    table = report.whole_models_table(found)
    assert "| a | decode | 16 | `weave` | 53,333 | 35,556 (b) | 1.50 ± 0.00 | 1.60 | 50% |" in table
    assert len(table.splitlines()) == 4
    assert "transformers 5." in report.whole_models_section(found)
    experts = [expert_row("a", 1, 0.0, "weave", 2.0)]
    assert words in report.readme_section(experts, [], whole_models=found)
    assert "**Whole models**" not in report.readme_section(experts, [])
    assert report.whole_models_words([]) == report.whole_models_table([]) == ""


def test_pages_and_plots_of_all_that_there_is(
    report: ModuleType,
    made_up: list[Row],
    whole: list[Row],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"{name}.jsonl" for name in report.FILES}
    names = ("README.md", "docs/benchmarks.md", "docs/end_to_end.md", "docs/limits.md")
    pages = [tmp_path / name for name in names]
    pages[1].parent.mkdir()
    for page in pages:
        page.write_text(f"before\n{report.BEGIN}\nyesterday's\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "FILES", files)
    monkeypatch.setattr(report, "README", pages[0])
    monkeypatch.setattr(report, "DETAILS", pages[1])
    monkeypatch.setattr(report, "WHOLE_MODELS", pages[2])
    monkeypatch.setattr(report, "LIMITS", pages[3])
    monkeypatch.setattr(report, "ROOT", tmp_path)
    pairs = [(model, tokens) for model in "ab" for tokens in (1, 64, 4096)]
    write(
        files["experts"],
        [
            expert_row(model, tokens, skew, name, us)
            for model, tokens in pairs
            for skew in (0.0, 1.2)
            for name, us in (("weave", 11.0), ("vllm", 13.0), ("weave:counter", 11.0))
        ],
    )
    assert report.main(["--check"]) == 1
    assert not list(tmp_path.rglob("*.png"))
    assert report.main([]) == 0
    assert {p.name for p in tmp_path.rglob("*.png")} == {"rivals.png", "floor.png"}
    assert report.main(["--check"]) == 0
    write(files["policies"], made_up)
    write(files["neighbours"], [neighbour_row("steal", 1.1), neighbour_row("counter", 1.2)])
    assert report.main(["--check"]) == 1
    assert report.main([]) == 0
    assert {p.name for p in tmp_path.rglob("*.png")} == {"rivals.png", "floor.png", "policies.png"}
    assert report.main(["--check"]) == 0
    texts = readme, details, _, limits = [page.read_text() for page in pages]
    for text in texts:
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "yesterday" not in text
    assert "(docs/policies.png)" in readme
    assert "(policies.png)" in details
    assert (
        "| stream 16 | a T=64 even | `counter` | 20.0 | 24.0 | 1.20 | 1.091 | 0.60 / 0.50 | yes |"
        in details
    )
    assert "Over all 12 cells: 1.18." in readme
    assert "## On a GPU of its own\n\nOn an idle GPU" in limits
    assert "## Padding" not in limits
    assert "whole layer" not in readme + details
    write(files["layer"], whole)
    assert report.main(["--check"]) == 1
    assert report.main([]) == 0
    assert report.main(["--check"]) == 0
    readme, details, _, limits = (page.read_text() for page in pages)
    assert "## Padding" in limits
    assert (pages[1].parent / "layer.png").exists()
    assert "(docs/layer.png)" in readme
    assert "(layer.png)" in details
    assert readme.index("**The whole layer**") < readme.index("How it is measured")


def test_rivals_that_were_not_asked_everywhere_are_named(report: ModuleType) -> None:
    from tables.layers import other_commits
    from tables.rivals import absent_words, rivals_said

    def made(model: str, tokens: int, **times: float | None) -> list[Row]:
        rows = [expert_row(model, tokens, 0.0, name, us or 1.0) for name, us in times.items()]
        for row in rows:
            row |= {"version": "1", "note": "its own"}
            if times[row["contestant"]] is None:
                del row["us"]
        return rows

    rows = made("a", 1, weave=1.0, x=2.0, y=4.0, z=3.0) + made("a", 512, weave=1.0, x=2.0)
    assert rivals_said(rows) == (
        "Rivals: x (1: its own); y (1: its own), up to 1 tokens only; "
        "z (1: its own), up to 1 tokens only."
    )
    assert absent_words(report.load_experts(rows)) == ""
    rows += made("b", 1, weave=1.0, x=None, y=8.0, z=None)
    cells = report.load_experts(rows)
    assert absent_words(cells) == (
        "No time of x, z for b (did not run). Without b the mean is 2.00."
    )
    errors = {"x": "its factory takes w13 and w2 alone, for a plain SwiGLU layer"}
    errors["z"] = "CompilationError('def f("
    for model in "bc":
        rows += made(model, 2, weave=1.0, x=None, y=8.0, z=None)
    for row in rows:
        if row["contestant"] in errors and row["model"] != "a":
            row["error"] = errors[row["contestant"]]
    assert absent_words(report.load_experts(rows)) == (
        "No time of x for b, c (not asked: our adapter covers plain SwiGLU layers); "
        "z for b, c (did not run: CompilationError). Without b, c the mean is 2.00."
    )
    for row in rows:
        if row["model"] != "a" and "error" in row:
            row["error"] = "wrong result"
    assert "No time of x, z for b, c (wrong result)." in absent_words(report.load_experts(rows))
    assert other_commits(cells) == ""
    next(rows for cell, rows in cells.items() if cell.model == "b")["weave"]["commit"] = "e" * 40
    assert other_commits(cells) == f" ({'e' * 12}: b even 1)"
