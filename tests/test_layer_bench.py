"""benchmarks/layer.py on a CPU with small layers: what it computes is tested, not what it times."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from test_benchmarks import RIVALS as EXPERTS_RIVALS
from weave_moe import Activation, RoutingConfig, fused_experts
from weave_moe.routing import route

FOLDER = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")
Row = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture
def full(_path: None) -> ModuleType:
    import layer

    return layer


@pytest.fixture
def layer(full: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With all the models' routers and activations, but few and small experts."""
    small = {
        name: replace(
            preset,
            hidden=64,
            intermediate=32,
            experts=min(preset.experts, 32),
            shared_intermediate=48 if preset.shared_intermediate else 0,
        )
        for name, preset in full.MODELS.items()
    }
    monkeypatch.setattr(full, "MODELS", small)
    monkeypatch.setattr(full.common, "the_device", lambda: CPU)
    monkeypatch.setattr(full, "CAPTURED", (5, 8, 20))
    few_rounds = partial(full.common.in_turn, least=2)
    monkeypatch.setattr(full.common, "in_turn", few_rounds)
    return full


MODELS = [
    *("qwen3-30b", "qwen3-235b", "mixtral", "deepseek-v3"),
    *("gpt-oss-120b", "qwen3-next", "deepseek-v2-lite"),
]


def make_cell(
    layer: ModuleType, model: str, tokens: int, captured: int | None = None, skew: float = 0.0
) -> Any:
    sets = layer.make_sets(layer.MODELS[model], CPU)
    return layer.Cell(
        layer.Case(model, tokens, captured, skew), sets, layer.common.Rates(4.0, 700.0), CPU
    )


def rival_of(layer: ModuleType, cell: Any, call: Any) -> Any:
    """A contestant's functions: call(w) gives f(x, ids, weights, logits) of a set of weights."""
    return [layer.Rival(call(w), cell.preset, w) for w in cell.wholes]


def experts_by(cell: Any, activation: Activation | None = None) -> Any:
    """A right rival's experts."""
    preset = cell.preset

    def made(w: Any) -> Any:
        def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor) -> Tensor:
            return fused_experts(
                *(x, w.experts.w13, w.experts.w2, weights, ids),
                activation=activation or preset.activation,
                b13=w.experts.b13,
                b2=w.experts.b2,
                interleaved=preset.interleaved,
                backend="reference",
            )

        return f

    return made


# --- the layers and their floors ----------------------------------------------------------------


def test_the_models_are_those_of_the_experts_and_three_more(full: ModuleType) -> None:
    import common

    assert list(full.MODELS) == MODELS
    for name, sizes in common.MODELS.items():
        preset = full.MODELS[name]
        assert (preset.hidden, preset.intermediate, preset.experts, preset.top_k) == sizes
    assert full.TOKENS == (1, 16, 64, 256, 1024, 4096)
    assert full.CAPTURED == (5, 256, 2048)


@pytest.mark.parametrize("model", MODELS)
def test_a_set_of_weights_has_all_that_the_model_has(layer: ModuleType, model: str) -> None:
    preset = layer.MODELS[model]
    one, other = layer.make_sets(preset, CPU)
    assert (one.experts.b13 is not None) == (one.router_bias is not None) == preset.expert_bias
    assert (one.selection_bias is not None) == preset.selection_bias
    assert (one.shared is not None) == (preset.shared_intermediate > 0)
    assert (one.shared is not None and one.shared.gate is not None) == preset.shared_gated
    for a, b in zip(one.of_router + one.of_shared, other.of_router + other.of_shared, strict=True):
        assert not torch.equal(a, b)
    cell = make_cell(layer, model, 64)
    assert cell.truth_of(preset.activation, True).std() == pytest.approx(1, abs=0.9)
    assert cell.routes[0][0].std() == pytest.approx(1, abs=0.2)


@given(
    model=st.sampled_from(MODELS),
    tokens=st.integers(1, 20000),
    active=st.integers(1, 8),
    read=st.floats(1, 10),
)
def test_floors_count_router_and_shared_experts(
    model: str, tokens: int, active: int, read: float
) -> None:
    import layer

    preset = replace(layer.MODELS[model], hidden=48, intermediate=32, experts=32)
    preset = replace(preset, shared_intermediate=24 if preset.shared_intermediate else 0)
    w = layer.make_whole(preset, CPU, 0)
    rates = layer.common.Rates(read, 700.0)
    floors = [
        layer.floor_us(preset, tokens, active, rates, beside)
        for beside in ([], w.of_router, w.of_router + w.of_shared)
    ]
    router = 32 * 48 * 2 + 32 * 2 * preset.router_bias + 32 * 4 * preset.selection_bias
    shared = preset.shared_intermediate * 48 * 3 * 2 + 48 * 2 * preset.shared_gated
    moved = [active * 3 * 48 * 32 * 2 + 2 * tokens * 48 * 2]
    moved += [moved[0] + router, moved[0] + router + shared]
    flops = [tokens * preset.top_k * 6 * 48 * 32]
    flops += [flops[0] + tokens * 2 * 32 * 48]
    flops += [flops[1] + tokens * 6 * 48 * preset.shared_intermediate]
    for floor, some_bytes, some_flops in zip(floors, moved, flops, strict=True):
        assert floor == pytest.approx(max(some_bytes / read / 1e6, some_flops / 700e6))


def test_each_contestant_s_floor_is_of_what_it_computes(layer: ModuleType) -> None:
    cell = make_cell(layer, "deepseek-v3", 16)
    floors = [cell.floor_of(n) for n in ("weave:experts", "weave:routed", "weave", "torch")]
    assert floors[0] < floors[1] < floors[2] == floors[3] == cell.floor


# --- skewed routing -----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [16, 64, 1024])
@pytest.mark.parametrize("model", ["qwen3-30b", "mixtral", "deepseek-v3", "qwen3-next"])
def test_a_skewed_layer_is_routed_as_the_experts_are(
    full: ModuleType, model: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From hidden states and router weight alone, in bf16, with the models' numbers of experts."""
    preset = full.MODELS[model]
    small = replace(preset, hidden=4 * preset.experts, intermediate=16)
    small = replace(small, shared_intermediate=16 if preset.shared_intermediate else 0)
    monkeypatch.setattr(full, "MODELS", {model: small})
    cell = make_cell(full, model, tokens, skew=1.2)
    g = torch.Generator().manual_seed(3)
    routes = [
        full.common.route(tokens, preset.experts, preset.top_k, 1.2, g) for _ in range(cell.calls)
    ]
    drawn = full.common.cells.Cell(
        full.Layer.of(small, "bfloat16"), cell.sets, cell.inputs, routes, None
    )
    assert cell.active == pytest.approx(drawn.active, rel=0.15)
    assert cell.busiest == pytest.approx(drawn.busiest, rel=0.15)
    assert cell.row["skew"] == 1.2
    assert (cell.row["active"], cell.row["maxload"]) == (cell.active, cell.busiest)
    even = make_cell(full, model, tokens)
    assert even.row["skew"] == 0.0
    assert cell.busiest > 1.3 * even.busiest
    assert cell.active <= even.active
    # The floor is of the experts that this routing touches.
    args = small, tokens, cell.active, cell.rates, cell.wholes[0].of_router
    assert cell.floor_of("weave:routed") == full.floor_us(*args)
    size = cell.inputs[0].float().square().mean().sqrt()
    assert 0.8 < size < 4, "hidden states are of the size of the even ones"


@pytest.mark.parametrize("model", MODELS)
def test_contestants_are_right_under_skew(layer: ModuleType, model: str) -> None:
    cell = make_cell(layer, model, 33, skew=1.2)
    for functions in (
        *(layer.make(name, {}, cell.preset, cell.wholes) for name in layer.OURS),
        rival_of(layer, cell, experts_by(cell)),
    ):
        row: Row = {}
        assert cell.check(functions, row), row
        assert row["ids_agree"] == 1.0
        assert row["rel_err"] < 1e-2


def test_logits_are_what_was_drawn_but_for_the_rounding_of_hidden_states(
    layer: ModuleType,
) -> None:
    preset = replace(layer.MODELS["gpt-oss-120b"], hidden=256)
    w = layer.make_whole(preset, CPU, 0)
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = layer.routed_as_drawn(x, w, preset.routing, 1.2, torch.Generator().manual_seed(5))
    drawn, ids, weights = layer.common.route(50, 32, 4, 1.2, torch.Generator().manual_seed(5))
    logits = layer.router_logits(y, w.router, w.router_bias)
    assert (logits - (drawn - drawn.mean())).abs().max() < 0.03
    got_weights, got = route(logits, preset.routing, None)
    assert (got.sort(1).values == ids.sort(1).values).all(dim=1).float().mean() >= 0.94
    assert (got_weights - weights).abs().max() < 0.02
    # What the router does not see is x's.
    router = w.router.float()
    unseen = torch.eye(256) - torch.linalg.pinv(router) @ router
    torch.testing.assert_close(y.float() @ unseen, x.float() @ unseen, atol=0.1, rtol=0.02)
    wide = replace(preset, hidden=16)
    with pytest.raises(ValueError, match="32 experts' logits cannot be chosen by 16 numbers"):
        layer.routed_as_drawn(x[:, :16], layer.make_whole(wide, CPU, 0), preset.routing, 1.2, None)


def test_a_run_tells_skews_apart(layer: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--models", "mixtral", "--tokens", "3,9", "--out", str(out), "--commit", "c1"]
    command += ["--cell-seconds", "0.01", "--contestants", "weave,weave:experts,torch"]
    assert layer.main(command) == 0
    assert {row["skew"] for row in rows_of(out)} == {0.0}
    assert layer.main([*command, "--skews", "0,1.2", "--padded"]) == 0
    rows = rows_of(out)
    cells = [(r["T"], r["skew"], "valid" in r) for r in rows[::3]]
    assert cells == [
        *((3, 0.0, False), (9, 0.0, False), (3, 1.2, False), (9, 1.2, False), (5, 0.0, True)),
    ]
    assert all("us" in row for row in rows)
    assert layer.main([*command, "--skews", "1.2,0"]) == 0
    assert rows_of(out) == rows
    assert str(layer.Case("a", 5, None, 1.2)) == "a T=5 skew 1.2"


# --- rivals' routers ----------------------------------------------------------------------------


@st.composite
def routers(draw: st.DrawFn) -> tuple[RoutingConfig, bool]:
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    kept = draw(st.integers(1, groups))
    scoring = draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus", "topk_softmax"]))
    if scoring == "topk_softmax":
        groups = kept = 1
    config = RoutingConfig(
        top_k=draw(st.integers(1, 32 // groups * kept)),
        scoring=scoring,
        renormalize=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        topk_groups=kept,
    )
    return config, draw(st.booleans()) and scoring != "topk_softmax"


@given(drawn=routers(), seed=st.integers(0, 1000))
def test_the_torch_router_is_the_reference_s(drawn: tuple[RoutingConfig, bool], seed: int) -> None:
    import layer

    config, biased = drawn
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, 32, generator=g)
    bias = torch.randn(32, generator=g) * 0.1 if biased else None
    weights, ids = layer.torch_topk(logits, config, bias)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    want_weights, want = route(logits, config, bias)
    got = torch.zeros(9, 32).scatter_(1, ids.long(), weights)
    torch.testing.assert_close(got, torch.zeros(9, 32).scatter_(1, want.long(), want_weights))
    assert torch.equal(ids.sort(dim=1).values, want.sort(dim=1).values)


@pytest.mark.parametrize("model", MODELS)
def test_a_rival_that_takes_ids_gets_the_router_s(layer: ModuleType, model: str) -> None:
    cell = make_cell(layer, model, 33)
    functions = rival_of(layer, cell, experts_by(cell))
    row: Row = {}
    assert cell.check(functions, row), row
    assert functions[0].routes_itself is False
    assert (row["ids_agree"], row["rows_checked"]) == (1.0, 33)
    assert row["rel_err"] < 1e-2
    assert "logits by torch.mm, torch's top-k" in row["note"]
    assert ("shared experts by torch" in row["note"]) == (cell.wholes[0].shared is not None)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("up_offset", [None, 1.5])
def test_a_rival_that_routes_itself_gets_logits_alone(
    layer: ModuleType, model: str, up_offset: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = make_cell(layer, model, 33)
    own = replace(cell.preset.activation, up_offset=up_offset) if up_offset else None
    config = RoutingConfig(top_k=cell.preset.top_k, scoring="topk_softmax")

    def itself(w: Any) -> Any:
        inner = experts_by(cell, own)(w)

        def f(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor) -> Tensor:
            assert ids.shape == weights.shape == (len(x), config.top_k)
            chosen, mine = route(logits, config)
            return inner(x, mine, chosen, logits)  # type: ignore[no-any-return]

        f.activation = own  # type: ignore[attr-defined]
        return f

    functions = rival_of(layer, cell, itself)
    row: Row = {}
    assert cell.check(functions, row), row
    assert functions[0].routes_itself
    assert row["ids_agree"] == 1.0
    spared = model in ("qwen3-30b", "qwen3-235b", "mixtral", "gpt-oss-120b", "qwen3-next")
    assert ("its own top-k and weights" in row["note"]) == spared

    def no_topk(*arguments: Any) -> Any:
        raise AssertionError("it was charged for a top-k")

    monkeypatch.setattr(layer, "torch_topk", no_topk)
    if spared:
        cell.call(functions, 0)
    else:
        with pytest.raises(AssertionError, match="charged"):
            cell.call(functions, 0)
    if own is not None:
        functions[0].activation = None
        monkeypatch.undo()
        assert not cell.check(functions, {}), "another activation is another result"


def test_a_rival_s_own_top_k_is_used_where_it_has_the_router(layer: ModuleType) -> None:
    used = []

    def topk(logits: Tensor, config: RoutingConfig, bias: Tensor | None) -> Any:
        if config.scoring != "softmax":
            return None
        used.append(config)
        return route(logits, config, bias)

    for model in ("qwen3-30b", "deepseek-v3"):
        cell = make_cell(layer, model, 5)

        def made(w: Any, cell: Any = cell) -> Any:
            f = experts_by(cell)(w)
            f.topk, f.note = topk, "fast"
            return f

        row: Row = {}
        assert cell.check(rival_of(layer, cell, made), row)
        assert row["note"].startswith("fast; logits by torch.mm, ")
        assert ("its own top-k" in row["note"]) == (model == "qwen3-30b") == bool(used)
        used.clear()


# --- right or wrong -----------------------------------------------------------------------------


def test_near_ties_are_left_out_but_only_so_many(layer: ModuleType) -> None:
    cell = make_cell(layer, "qwen3-30b", 100)

    def swapped(count: int) -> Any:
        """Another last expert for the first tokens: as of a near tie, and a wrong result there."""

        class Other(layer.Rival):  # type: ignore[name-defined, misc]
            def topk(self, logits: Tensor) -> tuple[Tensor, Tensor]:
                weights, ids = super().topk(logits)
                other = torch.topk(logits, self.preset.top_k + 1).indices[:count, -1:].int()
                last = ids == torch.topk(logits, self.preset.top_k).indices[:, -1:].int()
                last[count:] = False
                return weights, ids.masked_scatter(last, other)

        return [Other(experts_by(cell)(w), cell.preset, w) for w in cell.wholes]

    row: Row = {}
    assert cell.check(swapped(2), row)
    assert (row["ids_agree"], row["rows_checked"]) == (0.98, 98)
    assert row["max_row_err"] < 1e-2
    row = {}
    assert not cell.check(swapped(3), row)
    assert row["error"] == "its experts are the reference's for 97.0% of tokens"


def wrong_somewhere(cell: Any, functions: Any, change: Any) -> bool:
    """Whether a changed result passes."""
    row: Row = {}
    changed = [lambda *a, f=f: change(f(*a)) for f in functions]
    for f, of in zip(changed, functions, strict=True):
        f.note, f.version, f.choose = "", "", of.choose  # type: ignore[attr-defined]
    return bool(cell.check(changed, row))


def test_wrong_results_are_seen(layer: ModuleType) -> None:
    cell = make_cell(layer, "deepseek-v3", 40)
    right = layer.make("weave", {}, cell.preset, cell.wholes)

    def one_row(y: Tensor) -> Tensor:
        y[17] *= 1.05
        return y

    def nan(y: Tensor) -> Tensor:
        y[39, 3] = torch.nan
        return y

    assert wrong_somewhere(cell, right, lambda y: y)
    for change in (one_row, nan, lambda y: y * 1.03, torch.zeros_like):
        assert not wrong_somewhere(cell, right, change)


@pytest.mark.parametrize(
    ("of_preset", "of_weights"),
    [
        ({}, {}),
        ({}, {"shared": None}),
        ({}, {"selection_bias": None}),
        ({"routing": {"scaling_factor": 1.0}}, {}),
        ({"routing": {"num_groups": 1, "topk_groups": 1}}, {}),
        ({"routing": {"renormalize": False}}, {}),
        ({"activation": Activation("gelu")}, {}),
    ],
    ids=str,
)
def test_a_layer_without_one_of_its_parts_is_wrong(
    layer: ModuleType, of_preset: Row, of_weights: Row
) -> None:
    cell = make_cell(layer, "deepseek-v3", 60)
    changes = dict(of_preset)
    if "routing" in changes:
        changes["routing"] = replace(cell.preset.routing, **changes["routing"])
    preset = replace(cell.preset, **changes)
    functions = [layer.ours(preset, replace(w, **of_weights)) for w in cell.wholes]
    row: Row = {}
    right = not of_preset and not of_weights
    assert cell.check(functions, row) == right
    assert ("error" in row) != right


def test_a_wrong_row_is_found_in_a_large_batch_s_sample(layer: ModuleType) -> None:
    cell = make_cell(layer, "mixtral", 1100)
    functions = layer.make("weave", {}, cell.preset, cell.wholes)
    row: Row = {}
    assert cell.check(functions, row)
    assert row["rows_checked"] == 256
    assert row["ids_agree"] == 1.0

    def broken(y: Tensor) -> Tensor:
        y[550] = 0  # half a batch in: row 128 of the sample
        return y

    assert layer.cells.checked_rows(1100)[128] == 550
    assert not wrong_somewhere(cell, functions, broken)


@pytest.mark.parametrize("model", MODELS)
def test_our_contestants_are_right(
    layer: ModuleType, model: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "backend_of", lambda device: backend)
    cell = make_cell(layer, model, 21)
    for name in (*layer.OURS, "weave:counter"):
        row: Row = {}
        functions = layer.make(name, {}, cell.preset, cell.wholes)
        assert not isinstance(functions, Exception)
        assert cell.check(functions, row), (name, row)
        assert row["rel_err"] < 1e-2
        assert row["version"]


# --- times --------------------------------------------------------------------------------------


def test_what_router_and_shared_experts_add_is_paired(layer: ModuleType) -> None:
    us = {
        "weave": [10.0, 20.0, 31.0],
        "weave:routed": [9.0, 18.0, 28.0],
        "weave:experts": [5.0, 13.0, 25.0],
    }
    assert layer.parts_us(us, shared=True) == {"router_us": 4.0, "shared_us": 2.0}
    del us["weave:routed"]
    assert layer.parts_us(us, shared=True) == {}
    assert layer.parts_us(us, shared=False) == {"router_us": 6.0}
    assert layer.parts_us({"weave": [1.0]}, shared=False) == {}


RIVALS = (
    EXPERTS_RIVALS
    + """
def any_layer(w13, w2):
    raise AssertionError("of_layer is there")
def of_layer(layer, w):
    def f(x, ids, weights, logits):
        return weave_moe.fused_experts(
            x, w.w13, w.w2, weights, ids, activation=layer.activation, b13=w.b13, b2=w.b2,
            interleaved=layer.interleaved, backend="reference")
    return f
any_layer.of_layer = of_layer
RIVALS["any"] = any_layer
"""
)


@pytest.fixture
def rivals(tmp_path: Path) -> str:
    file = tmp_path / "rivals.py"
    file.write_text(RIVALS)
    return str(file)


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_writes_a_row_a_contestant_and_goes_on_where_it_stopped(
    layer: ModuleType, tmp_path: Path, rivals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--models", "qwen3-30b,gpt-oss-120b,qwen3-next", "--tokens", "1,3"]
    command += ["--out", str(out), "--cell-seconds", "0.01", "--rivals", rivals]
    monkeypatch.setattr(sys, "argv", [str(FOLDER / "layer.py"), *command])
    assert layer.main([*command, "--commit", "c1", "--contestants", "weave,good"]) == 0
    first = rows_of(out)
    assert len(first) == 3 * 2 * 2
    assert not any("router_us" in row for row in first)
    assert layer.main([*command, "--commit", "c1"]) == 0
    rows = rows_of(out)
    assert rows[: len(first)] == first
    # Ours are timed again, since they are subtracted from each other; good is not.
    assert len(rows) - len(first) == 2 * (2 + 4 + 2 + 4 + 3 + 4)
    last = {(r["model"], r["T"], r["contestant"]): r for r in rows}
    for (model, _, name), row in last.items():
        assert row["skew"] == 0.0
        assert "valid" not in row
        if name == "broken":
            assert row["error"].startswith(
                "its factory" if model == "gpt-oss-120b" else "RuntimeError('no such library')"
            )
        elif model == "gpt-oss-120b" and name in ("good", "wrong"):
            assert row["error"] == ("its factory takes w13 and w2 alone, for a plain SwiGLU layer")
        elif name == "wrong":
            assert row["error"] == "wrong result"
        else:
            assert row["us"] > 0
            assert row["rel_err"] < 1e-2
            assert row["ids_agree"] == 1.0
            assert row["rounds"] >= 2
            # Its floor is smaller, which rounding to hundredths of a microsecond hides here.
            assert row["floor_us"] <= last[model, row["T"], "weave"]["floor_us"]
        assert ("router_us" in row) == (name == "weave")
        assert ("shared_us" in row) == (name == "weave" and model == "qwen3-next")
    assert {name for model, _, name in last if model == "qwen3-next"} >= {"weave:routed", "torch"}
    assert ("qwen3-30b", 1, "weave:routed") not in last
    assert layer.main([*command, "--commit", "c1"]) == 0
    assert rows_of(out) == rows
    assert layer.main([*command, "--commit", "c2", "--contestants", "torch"]) == 0
    assert len(rows_of(out)) == len(rows) + 6
    text = rows[0]["command"]
    assert text.startswith("python benchmarks/layer.py --models qwen3-30b,gpt-oss")
    assert "/" not in text.replace("benchmarks/layer.py", "")


@pytest.mark.parametrize("model", ["qwen3-next", "deepseek-v3", "gpt-oss-120b"])
def test_padded_calls_are_compared_with_bare_ones(
    layer: ModuleType, model: str, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--models", model, "--tokens", "", "--padded", "--out", str(out)]
    command += ["--cell-seconds", "0.01", "--commit", "c1"]
    assert layer.main(command) == 0
    rows = rows_of(out)
    assert [(r["T"], r["valid"], r["contestant"]) for r in rows] == [
        (captured, 5, "weave") for captured in layer.CAPTURED
    ]
    for row in rows:
        assert row["us"] > 0
        assert row["rows_checked"] == 5
        assert row["floor_us"] == rows[0]["floor_us"], "rows that are no tokens need no time"
    assert (rows[0]["over_bare"], rows[0]["spread"], rows[0]["more_us"]) == (1.0, 0.0, 0.0)
    assert layer.main(command) == 0
    assert rows_of(out) == rows
    assert layer.main([*command[:3], "3", *command[4:]]) == 0
    assert {r.get("valid") for r in rows_of(out)[3:]} == {None}


def test_rows_that_are_no_tokens_must_be_zero_and_unread(layer: ModuleType) -> None:
    cell = make_cell(layer, "qwen3-30b", 5, captured=20)
    x = cell.inputs[0]
    assert x.shape[0] == 20
    assert x[5:].isnan().all()
    assert not x[:5].isnan().any()
    count = torch.tensor([5], dtype=torch.int32)
    row: Row = {}
    assert cell.check(layer.make_padded(cell.preset, cell.wholes, count), row), row
    row = {}
    assert not cell.check(layer.make_padded(cell.preset, cell.wholes, None), row)
    assert row["error"] == "rows that are no tokens are not zero"
    too_few = torch.tensor([4], dtype=torch.int32)
    row = {}
    assert not cell.check(layer.make_padded(cell.preset, cell.wholes, too_few), row)
    assert row["error"] == "wrong result"


def test_a_run_stops_in_time(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--models", "qwen3-30b", "--tokens", "1,2", "--padded", "--out", str(out)]
    command += ["--cell-seconds", "0.01", "--commit", "c", "--contestants", "weave"]
    answers = iter([True, True, False])
    monkeypatch.setattr(layer.common.Clock, "room", lambda self: next(answers))
    assert layer.main([*command, "--max-seconds", "1"]) == 0
    assert [r["T"] for r in rows_of(out)] == [1, 2]
    monkeypatch.setattr(layer.common.Clock, "room", lambda self: True)
    assert layer.main(command) == 0
    assert [r["T"] for r in rows_of(out)] == [1, 2, *layer.CAPTURED]


def test_compiling_first_calls_everything_once_and_times_nothing(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the processes that compile, one a model; here in this one."""
    calls, out, file = tmp_path / "calls", tmp_path / "rows.jsonl", tmp_path / "rivals.py"
    file.write_text(
        f"def logged(w13, w2):\n"
        f"    def f(x, ids, weights, logits):\n"
        f"        open({str(calls)!r}, 'a').write(f'{{len(x)}} {{w13.shape[0]}}\\n')\n"
        f"        return x * 0\n"
        f"    return f\n"
        f"RIVALS = {{'logged': logged}}\n"
    )
    command = ["--models", "mixtral,qwen3-next", "--tokens", "3,7", "--out", str(out)]
    command += ["--commit", "c", "--contestants", "weave,logged", "--rivals", str(file), "--padded"]
    monkeypatch.setattr(sys, "argv", ["layer.py", *command, "--compile-first"])
    started: list[list[str]] = []
    padded: list[int] = []
    real = layer.moe_layer

    def logged(x: Tensor, *arguments: Any, **options: Any) -> Any:
        if options["num_valid_tokens"] is not None:
            padded.append(len(x))
        return real(x, *arguments, **options)

    monkeypatch.setattr(layer, "moe_layer", logged)

    class Process:
        def __init__(self, arguments: list[str]) -> None:
            started.append(arguments)
            assert layer.main(arguments[2:]) == 0

        def wait(self) -> None:
            pass

    monkeypatch.setattr(layer.experts, "subprocess", SimpleNamespace(Popen=Process))
    assert layer.main([*command, "--compile-first", "--max-seconds", "0"]) == 0
    # At first 4 tokens, then twice to see whether it routes itself.
    log = calls.read_text().splitlines()
    assert log == ["4 8", *["3 8"] * 2, "7 8", *["3 32"] * 2, "7 32"]
    assert padded == [n for n in layer.CAPTURED for _ in range(2)] * 2, "y, and then ids"
    assert not out.exists()
    assert [a[-3:] for a in started] == [
        ["--models", m, "--compile-only"] for m in ("mixtral", "qwen3-next")
    ]


def test_an_unknown_model_is_one_line(
    layer: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        layer.main(["--models", "qwen"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--models must be some of qwen3-30b," in error
    assert error.endswith("got 'qwen'")


# --- the committed rivals -----------------------------------------------------------------------

INSTALLABLE = ["vllm", "triton_kernels", "flashinfer", "deepgemm"]


def test_rivals_that_are_not_installed_are_rows_with_their_error(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weave_moe.bench import contestants

    monkeypatch.setattr(contestants.util, "find_spec", lambda name: None)
    file, out = str(FOLDER / "rivals.py"), tmp_path / "rows.jsonl"
    assert list(layer.experts.load_rivals(file)) == ["torch", *INSTALLABLE]
    assert list(layer.load_rivals(file)) == ["torch", *INSTALLABLE]
    command = ["--models", "mixtral,gpt-oss-120b", "--tokens", "3", "--out", str(out)]
    command += ["--cell-seconds", "0.01", "--rivals", file, "--commit", "c"]
    assert layer.main(command) == 0
    errors = {(r["model"], r["contestant"]): r["error"] for r in rows_of(out) if "error" in r}
    packages = ("vllm", "triton_kernels", "flashinfer-python", "deep_gemm")
    assert errors == {
        (model, name): f"{package} is not installed"
        for model in ("mixtral", "gpt-oss-120b")
        for name, package in zip(INSTALLABLE, packages, strict=True)
    }
    monkeypatch.setattr(layer.common, "MODELS", {"tiny": (64, 32, 8, 2)})
    out.unlink()
    command = ["--models", "tiny", "--tokens", "3", "--skews", "0", "--commit", "c"]
    command += ["--contestants", ",".join(INSTALLABLE), "--out", str(out), "--rivals", file]
    assert layer.experts.main(command) == 0
    assert [r["error"] for r in rows_of(out)] == [f"{name} is not installed" for name in packages]


@pytest.mark.parametrize("model", ["qwen3-30b", "deepseek-v3", "gpt-oss-120b", "deepseek-v2-lite"])
def test_installed_rivals_get_the_layer_and_a_fused_top_k(
    layer: ModuleType, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins: an adapter that computes, and vLLM's top-k in torch."""
    from fakes.packages import as_modules
    from weave_moe.bench import contestants

    used: list[str] = []

    def topk_softmax(
        weights: Tensor, ids: Tensor, places: Tensor, logits: Tensor, renormalize: bool = False
    ) -> None:
        used.append("softmax")
        config = RoutingConfig(top_k=ids.shape[1], renormalize=renormalize)
        found, chosen = route(logits, config)
        weights.copy_(found)
        ids.copy_(chosen)

    def grouped_topk(
        scores: Tensor,
        num_expert_group: int,
        topk_group: int,
        topk: int,
        renormalize: bool,
        routed_scaling_factor: float,
        bias: Tensor,
        scoring_func: int = 0,
    ) -> tuple[Tensor, Tensor]:
        used.append("grouped")
        assert scoring_func == 1
        config = RoutingConfig(
            topk,
            "sigmoid",
            renormalize=renormalize,
            scaling_factor=routed_scaling_factor,
            num_groups=num_expert_group,
            topk_groups=topk_group,
        )
        return route(scores, config, bias)

    ops = {"vllm._custom_ops": {"topk_softmax": topk_softmax, "grouped_topk": grouped_topk}}
    for name, module in as_modules(ops).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(contestants, "installed", lambda rival: None)
    rival = replace(contestants.RIVALS["vllm"], factory=contestants.grouped)
    monkeypatch.setattr(contestants, "RIVALS", {**contestants.RIVALS, "vllm": rival})
    cell = make_cell(layer, model, 17)
    found = layer.load_rivals(str(FOLDER / "rivals.py"))
    row: Row = {}
    assert cell.check(layer.make("vllm", found, cell.preset, cell.wholes), row), row
    assert "its own top-k" in row["note"]
    assert set(used) == {"grouped" if model == "deepseek-v3" else "softmax"}
    (w, *_), experts_alone = cell.wholes, layer.experts.load_rivals(str(FOLDER / "rivals.py"))
    if model == "qwen3-30b":
        logits, ids, weights = cell.routes[0]
        y = experts_alone["vllm"](w.experts.w13, w.experts.w2)(cell.inputs[0], ids, weights, logits)
        assert layer.cells.errors(y, cell.truth_of(Activation(), False))[1] < 2e-2
