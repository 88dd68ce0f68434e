"""The benchmark of whole models, on a CPU with tiny ones: what it computes, checks and writes.

Its modules are imported as they are run: from their own folder.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers", minversion="5.7")

FOLDER = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MODELS = {
    "wide": (
        "qwen3_moe",
        TINY
        | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
        | {"intermediate_size": 64, "norm_topk_prob": True, "head_dim": 32},
    ),
    "few": (
        "mixtral",
        TINY
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}
        | {"sliding_window": None},
    ),
}
PUBLISHED: dict[str, Any] = {}
"""The benchmark's own, before the tiny ones take their place."""
QUICK = ["--layers", "2", "--context", "16", "--cell-seconds", "0.001", "--backend", "reference"]


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def models(_path: None) -> Iterator[ModuleType]:
    import whole_models

    with pytest.MonkeyPatch.context() as patch:
        PUBLISHED.update(whole_models.ARCHITECTURES)
        tiny = {name: whole_models.Architecture(*found) for name, found in MODELS.items()}
        patch.setattr(whole_models, "PROMPT_TOKENS", 48)
        patch.setattr(whole_models, "ARCHITECTURES", tiny)
        yield whole_models
    whole_models.weave.register()  # the benchmark's --backend is the process's


@pytest.fixture(scope="module")
def bench(models: ModuleType) -> Iterator[ModuleType]:
    import common
    import end_to_end

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_to_end, "ARCHITECTURES", models.ARCHITECTURES)
        patch.setattr(common, "the_device", lambda: CPU)
        yield end_to_end


@pytest.fixture(scope="module", params=list(MODELS))
def stage(request: pytest.FixtureRequest, models: ModuleType) -> Any:
    with torch.no_grad():
        return models.Stage(request.param, models.build(request.param, 2, CPU), 16, "reference")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the models ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("models")
def test_the_architectures_are_those_of_the_other_benchmarks() -> None:
    import common
    import transformers

    published = {
        "qwen3-30b": ("qwen3_moe", 48, 151936, 32, 4),
        "mixtral": ("mixtral", 32, 32000, 32, 8),
    }
    assert PUBLISHED.keys() == published.keys()
    for name, (kind, fields) in PUBLISHED.items():
        config = transformers.AutoConfig.for_model(kind, **fields)
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        inter = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        sizes = (config.hidden_size, inter, experts, config.num_experts_per_tok)
        assert sizes == common.MODELS[name]
        heads = (config.num_attention_heads, config.num_key_value_heads)
        assert (kind, config.num_hidden_layers, config.vocab_size, *heads) == published[name]
        head = getattr(config, "head_dim", None) or config.hidden_size // heads[0]
        assert head == 128


def test_a_model_has_the_layers_asked_for_and_weights_that_do_not_grow(
    models: ModuleType, stage: Any
) -> None:
    assert len(stage.blocks) == 2
    assert stage.full == 3
    assert len(models.Stage("few", models.build("few", None, CPU), 16, "reference").blocks) == 3
    tokens = stage.random_tokens(2, 40, seed=5)
    import transformers

    hidden = stage.hidden(tokens, transformers.DynamicCache(config=stage.model.config))
    assert hidden.dtype == torch.bfloat16
    logits = stage.logits(hidden).float()
    assert 0.5 < float(logits.std()) < 2
    routed = [torch.bincount(call.ids.flatten()) for call in truth_calls(models, stage, tokens)]
    assert all(int((load > 0).sum()) == len(load) for load in routed), "all experts are used"


def truth_calls(models: ModuleType, stage: Any, tokens: Tensor) -> list[Any]:
    import transformers

    models.TRUTH.kept = []
    with stage.running("truth"):
        stage.hidden(tokens, transformers.DynamicCache(config=stage.model.config))
    kept: list[Any] = models.TRUTH.kept
    models.TRUTH.kept = None
    return kept


def test_tokens_differ_by_seed_and_are_the_same_again(stage: Any) -> None:
    first = stage.random_tokens(4, 9, seed=1)
    assert torch.equal(first, stage.random_tokens(4, 9, seed=1))
    assert not torch.equal(first, stage.random_tokens(4, 9, seed=2))


@pytest.mark.parametrize(
    "name", ["truth", "weave", "weave:optimize", "without:experts", "without:block"]
)
def test_a_contestant_leaves_the_model_as_it_was(stage: Any, name: str) -> None:
    def state() -> Any:
        return [*stage.model.modules()], stage.model.config._experts_implementation

    before = state()
    with stage.running(name):
        assert state() != before
    assert state() == before
    with pytest.raises(ZeroDivisionError), stage.running(name):
        raise ZeroDivisionError
    assert state() == before


def test_ours_must_not_fall_back_unseen(
    stage: Any, models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.require("weave")
    import weave_moe.integrations.transformers as integration

    monkeypatch.setattr(integration, "_problem", lambda *given: "there is no such thing")
    stage.require("transformers:eager")
    with pytest.raises(RuntimeError, match="there is no such thing"):
        stage.require("weave")


def test_without_experts_and_blocks_their_input_comes_out(stage: Any) -> None:
    block = stage.model.get_submodule(stage.blocks[0])
    x = torch.randn(1, 5, 128, dtype=torch.bfloat16)
    with stage.running("without:experts"):
        assert torch.equal(block(x), x)
    with stage.running("without:block"):
        assert torch.equal(stage.model.get_submodule(stage.blocks[0])(x), x)
    assert not torch.equal(block(x), x)


# --- the phases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 5])
def test_decoding_is_the_whole_sequence_token_by_token(
    models: ModuleType, stage: Any, batch: int
) -> None:
    """Positions, masks and the cache are right: no row differs from a prompt of all tokens."""
    import transformers

    phase = models.Decode(stage, batch)
    assert phase.steps * batch >= models.ROWS
    with stage.running("truth"):
        models.run(phase, phase.steps)
        tokens = torch.cat([stage.prompt[torch.arange(batch) % 3], phase.drawn], dim=1)
        whole = stage.hidden(tokens, transformers.DynamicCache(config=stage.model.config))
    want = whole[:, 16:].transpose(0, 1).flatten(0, 1).float()
    off = (phase.hidden.float() - want).norm(dim=1) / want.norm(dim=1)
    assert float(off.median()) < 0.01
    assert float(off.max()) < 0.1
    chosen = stage.logits(phase.kept).argmax(-1)
    assert (chosen == phase.chosen).float().mean() > 0.95


def test_every_run_begins_anew(models: ModuleType, stage: Any) -> None:
    phase = models.Decode(stage, 3)
    models.run(phase, phase.steps)
    first, chosen = phase.hidden.clone(), phase.chosen.clone()
    models.run(phase, 2)
    assert torch.equal(phase.hidden, first)
    models.run(phase, phase.steps)
    assert torch.equal(phase.hidden, first)
    assert torch.equal(phase.chosen, chosen)
    assert phase.hidden.shape == (phase.steps * 3, 128)
    assert len(phase.hidden.unique(dim=0)) == len(phase.hidden)


def test_a_prompt_is_computed_whole(models: ModuleType, stage: Any) -> None:
    phase = models.Prompt(stage, 40)
    models.run(phase, 1)
    assert phase.hidden.shape == (40, 128)
    assert int(stage.logits(phase.hidden[-1]).argmax()) == int(phase.chosen)


@pytest.mark.parametrize("name", ["transformers:grouped_mm", "transformers:batched_mm"])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_no_step_asks_for_values_which_a_graph_could_not_answer(
    models: ModuleType, bench: ModuleType, stage: Any, name: str, kind: str
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    phase = bench.Case(kind, 8).of(stage)
    with FakeTensorMode(allow_non_fake_inputs=True), stage.running(name):
        phase.reset()
        phase.step()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        stage.running("transformers:eager"),
        pytest.raises(Exception, match=r"nonzero|_local_scalar_dense|unique"),
    ):
        phase.step()


# --- right or wrong -----------------------------------------------------------------------------


class Head:
    """Logits [rows, V] of hidden states [rows, H], by a fixed matrix."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.weight = torch.randn(vocabulary, hidden, generator=g) * hidden**-0.5

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = hidden @ self.weight.T
        return logits


def judged(
    bench: ModuleType, change: Callable[[Tensor], Tensor], noise: float = 0.004, rows: int = 700
) -> dict[str, Any]:
    """What is said of a run that `change` makes, beside one of transformers' with some noise."""
    g = torch.Generator().manual_seed(1)
    truth = torch.randn(rows, 32, generator=g)
    judge = bench.Judge(Head(32, 50), truth)
    theirs = truth + noise * torch.randn(truth.shape, generator=g)
    found = {"transformers:x": judge.compare(theirs), "weave": judge.compare(change(truth))}
    table: dict[str, dict[str, Any]] = {name: {} for name in found}
    good = bench.verdicts(judge, found, table)
    assert "transformers:x" in good
    assert ("weave" in good) == ("error" not in table["weave"])
    return table["weave"]


@given(times=st.sampled_from([0.0, 0.5, 1.0, 1.7]), seed=st.integers(0, 99))
def test_ours_may_be_as_far_from_the_truth_as_theirs(
    bench: ModuleType, times: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    row = judged(bench, lambda t: t + times * 0.004 * torch.randn(t.shape, generator=g))
    assert "error" not in row
    assert row["tokens_checked"] > 500
    assert row["tokens_wrong"] <= 1


@given(seed=st.integers(0, 99), what=st.sampled_from(["noise", "row", "nan", "tokens", "scale"]))
def test_wrong_runs_are_refused(bench: ModuleType, seed: int, what: str) -> None:
    g = torch.Generator().manual_seed(seed)

    def change(truth: Tensor) -> Tensor:
        wrong = truth.clone()
        some = int(torch.randint(len(truth), (1,), generator=g))
        if what == "noise":
            wrong += 3 * 0.004 * torch.randn(truth.shape, generator=g)
        elif what == "row":
            wrong[some] = truth[(some + 1) % len(truth)]
        elif what == "nan":
            wrong[some, seed % 32] = float("nan")
        elif what == "scale":
            wrong *= 1.02
        else:  # a twelfth of the rows choose other tokens by a small change
            wrong[::12] += 0.18 * truth[::12].norm(dim=1, keepdim=True) * direction(truth[::12])
        return wrong

    row = judged(bench, change)
    assert row["error"] == "wrong result"
    if what == "tokens":
        assert row["hidden_err"] < 0.004
        assert row["hidden_row_err"] < bench.FAR_ROW
        assert row["tokens_wrong"] > 7


def direction(hidden: Tensor) -> Tensor:
    """Of the change [rows, H], of size 1, that raises the second token over the first the most."""
    head = Head(32, 50)
    top = head(hidden).topk(2).indices
    step = head.weight[top[:, 1]] - head.weight[top[:, 0]]
    unit: Tensor = step / step.norm(dim=1, keepdim=True)
    return unit


def test_tokens_that_are_nearly_tied_are_not_compared(bench: ModuleType) -> None:
    head = Head(32, 50)
    truth = torch.randn(100, 32, generator=torch.Generator().manual_seed(3))
    top = head(truth).topk(2)
    step = head.weight[top.indices[:, 0]] - head.weight[top.indices[:, 1]]
    lead = (top.values[:, 0] - top.values[:, 1]) / step.square().sum(dim=1)
    tied = truth - (lead * 0.999).unsqueeze(1) * step  # the first leads by a thousandth of it
    judge = bench.Judge(head, tied)
    flipped = judge.compare(tied - (lead * 0.002).unsqueeze(1) * step)
    differ = flipped.chosen != judge.tokens[:, 0]
    assert int(differ.sum()) > 80
    assert not bool((judge.clear(flipped.logit) & differ).any())


def test_without_a_sound_one_of_theirs_only_the_limits_hold(bench: ModuleType) -> None:
    truth = torch.randn(100, 32, generator=torch.Generator().manual_seed(3))
    judge = bench.Judge(Head(32, 50), truth)
    broken = judge.compare(torch.full_like(truth, float("nan")))
    rows: dict[str, Any] = {"transformers:x": {}, "weave": {}}
    near = judge.compare(truth * 1.001)
    assert bench.verdicts(judge, {"transformers:x": broken, "weave": near}, rows) == ["weave"]
    far = judge.compare(truth * 1.1)
    assert bench.verdicts(judge, {"transformers:x": broken, "weave": far}, rows) == []


def test_layers_are_compared_one_by_one_with_the_truth(
    bench: ModuleType, models: ModuleType, stage: Any
) -> None:
    kept = truth_calls(models, stage, stage.random_tokens(1, 30, seed=3))
    assert [call.x.shape for call in kept] == [(30, 128)] * 2
    for name in (*bench.THEIRS, *bench.OURS):
        with stage.running(name):
            every, worst, rows = bench.layer_errors(stage, name, kept)
        assert 0 < every <= worst < 0.02
        assert every < 0.01
        assert 50 < rows <= 60
        wrong = [kept[0], kept[1]._replace(y=kept[1].y * 1.03)]
        with stage.running(name):
            assert bench.layer_errors(stage, name, wrong)[0] > 0.01
        one = kept[0].y.clone()
        one[7] *= 1.05
        with stage.running(name):
            found = bench.layer_errors(stage, name, [kept[0]._replace(y=one), kept[1]])
        assert found[1] > 0.02


def test_a_fused_router_may_only_differ_on_ties(
    bench: ModuleType, models: ModuleType, stage: Any
) -> None:
    (call, _) = truth_calls(models, stage, stage.random_tokens(1, 40, seed=4))
    with stage.running("weave:optimize"):
        layer = stage.model.get_submodule(stage.blocks[0])
        same = bench.same_experts(layer, call)
        assert int(same.sum()) > 30
        moved = call.ids.clone()
        weight = layer.get_parameter(layer.parts.router_weight).float()
        order = (call.x.float() @ weight.T).argsort(dim=1, descending=True)
        k = call.ids.shape[1]
        logits = (call.x.float() @ weight.T).gather(1, order)
        row = int((logits[:, k - 1] - logits[:, k]).argmax())
        moved[row] = order[row, 1 : k + 1]  # the best expert left out where it is clear
        assert bench.same_experts(layer, call._replace(ids=moved)) is None
        # Rows that are even otherwise: two experts with the same weights.
        layer.get_parameter(layer.parts.router_weight)[order[row, k]] = weight[order[row, k - 1]]
        tied = call._replace(ids=call.ids.clone(), x=call.x[row : row + 1])
        other = order[row : row + 1, [*range(k - 1), k]]
        found = bench.same_experts(layer, tied._replace(ids=other))
    assert found is not None
    layer.get_parameter(layer.parts.router_weight).copy_(weight)


# --- a cell -------------------------------------------------------------------------------------


@pytest.fixture
def cell(bench: ModuleType, stage: Any) -> Any:
    return bench.Cell(bench.Case("decode", 8).of(stage))


def test_a_cell_knows_its_load(stage: Any, cell: Any) -> None:
    assert len(cell.kept) == 2
    assert [len(call.x) for call in cell.kept] == [8, 8], "of the first step only"
    k = stage.model.config.num_experts_per_tok
    assert k <= cell.row["active"] <= 8 * k
    assert 8 * k / cell.row["active"] <= cell.row["busiest"] <= 8


def test_shares_gains_and_predictions(
    bench: ModuleType, cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def advise(layer: Any, ids: Tensor, **given: Any) -> Any:
        asked.append((layer.shape.experts, ids, given))
        return SimpleNamespace(speedup=(1.5, 2.5)[len(asked) - 1], reason="")

    monkeypatch.setattr(bench, "advise", advise)
    us = {
        "transformers:grouped_mm": [100.0, 110.0, 90.0],
        "transformers:eager": [300.0],
        "weave": [80.0, 88.0, 72.0],
        "weave:optimize": [50.0, 50.0, 50.0],
        "without:experts": [40.0, 40.0, 40.0],
        "without:block": [20.0, 20.0, 20.0],
    }
    rows: dict[str, Any] = {name: {"us": sorted(t)[len(t) // 2]} for name, t in us.items()}
    cell.compare(rows, us)
    theirs, ours = rows["transformers:grouped_mm"], rows["weave"]
    assert (theirs["share"], theirs["block_share"], theirs["layer_us"]) == (0.6, 0.8, 30.0)
    assert (ours["share"], ours["layer_us"], ours["gain"], ours["spread"]) == (0.5, 20.0, 1.25, 0.0)
    assert ours["against"] == rows["weave:optimize"]["against"] == "transformers:grouped_mm"
    assert ours["advised_speedup"] == 2.0
    assert ours["predicted_gain"] == pytest.approx(1 / (0.4 + 0.6 / 2), abs=1e-4)
    assert ours["predicted_off"] == pytest.approx(ours["predicted_gain"] / 1.25 - 1, abs=1e-4)
    assert rows["weave:optimize"]["gain"] == 2.0
    assert "share" not in rows["weave:optimize"]
    assert rows["weave:optimize"]["block_share"] == 0.6
    assert len(asked) == 2, "the first and the last layer"
    config = cell.phase.stage.model.config
    for (experts, ids, said), call in zip(asked, cell.kept, strict=True):
        assert experts == (getattr(config, "num_local_experts", None) or config.num_experts)
        assert torch.equal(ids, call.ids)
        assert (said["share"], said["now_us"]) == (0.6, 30.0)


def test_what_cannot_be_predicted_is_left_out_with_the_reason(
    bench: ModuleType, cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"share": 0.5, "layer_us": 10.0}

    def refuses(*given: Any, **more: Any) -> Any:
        raise ValueError("topk_ids must be at most 1 tokens")

    monkeypatch.setattr(bench, "advise", refuses)
    assert cell.predict(row)["advice"] == "topk_ids must be at most 1 tokens"
    not_taken = SimpleNamespace(speedup=None, reason="the kernel does not take it")
    monkeypatch.setattr(bench, "advise", lambda *given, **more: not_taken)
    assert cell.predict(row)["advice"] == "the kernel does not take it"
    for nothing in ({}, {"share": -0.1, "layer_us": -3.0}):
        assert cell.predict(nothing)["predicted_gain"] is None


def test_the_advisor_s_own_estimate_is_taken(bench: ModuleType, cell: Any) -> None:
    from weave_moe import MoELayer
    from weave_moe.advise import advise

    found = cell.predict({"share": 0.4, "layer_us": 100.0})
    stage = cell.phase.stage
    gains: list[float] = []
    for path, call in zip(stage.blocks, cell.kept, strict=True):
        layer = MoELayer.from_transformers(stage.model.get_submodule(path))
        advice = advise(layer, call.ids, share=0.4, now_us=100.0, exponents=())
        assert advice.gain is not None
        gains.append(advice.gain)
    assert min(gains) - 1e-4 <= found["predicted_gain"] <= max(gains) + 1e-4


def test_a_slow_one_is_timed_once(
    bench: ModuleType, cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["transformers:grouped_mm", "transformers:eager", "weave"]
    log: list[str] = []

    def fake(names: list[str]) -> Any:
        makes = {n: (lambda steps, n=n: log.append(f"{n} {steps}")) for n in names}
        replays = {n: bench.Replay(make, "calls") for n, make in makes.items()}
        return {n: {**cell.row, "contestant": n} for n in names}, replays

    monkeypatch.setattr(cell, "checked", fake)
    times = {"transformers:grouped_mm": 80.0, "transformers:eager": 250.0, "weave": 60.0}

    def one_round(makes: list[Any], device: Any) -> list[float]:
        before = len(log)
        for make in makes:
            make()
        return [times[entry.split(" ")[0]] for entry in log[before:]]

    from weave_moe.bench import timing

    monkeypatch.setattr(bench.common, "one_round", one_round)
    monkeypatch.setattr(timing, "one_round", one_round)
    rows = {row["contestant"]: row for row in cell.run(names, 0.0)}
    assert rows["transformers:eager"]["rounds"] == 1
    assert rows["weave"]["rounds"] == rows["transformers:grouped_mm"]["rounds"] >= 7
    assert {entry.split(" ")[1] for entry in log} == {str(cell.phase.timed)}
    assert rows["weave"]["us"] == 60.0 / cell.phase.timed
    assert rows["weave"]["tokens_per_s"] == pytest.approx(8e6 / rows["weave"]["us"], rel=1e-3)
    assert rows["weave"]["gain"] == pytest.approx(80 / 60, abs=1e-4)


# --- the run ------------------------------------------------------------------------------------


@pytest.fixture
def quick(bench: ModuleType, models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds of few steps: how long they take is no matter here."""
    monkeypatch.setattr(models.Decode, "timed", 2)
    monkeypatch.setattr(bench.common, "in_turn", partial(bench.common.in_turn, least=1))


def test_the_committed_rows_are_a_gpus(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (FOLDER.parent / bench.COMMITTED).is_file()
    monkeypatch.setattr(bench.common, "the_device", lambda: torch.device("cpu"))
    with pytest.raises(SystemExit, match="no GPU here"):
        bench.main(["--commit", "c1"])


def test_a_run_writes_a_row_a_contestant_and_goes_on_where_it_stopped(
    bench: ModuleType, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    command = [*QUICK, "--batches", "2", "--prompts", "24", "--out", str(out), "--commit", "c1"]
    monkeypatch.setattr(sys, "argv", [str(FOLDER / "end_to_end.py"), *command])
    some = ["--contestants", "transformers:grouped_mm,weave,without:experts"]
    assert bench.main([*command, "--models", "few", *some]) == 0
    first = rows_of(out)
    assert len(first) == 2 * 3
    assert bench.main([*command, "--models", "few", *some]) == 0
    assert rows_of(out) == first
    assert bench.main(command) == 0
    rows = rows_of(out)
    assert rows[: len(first)] == first
    assert len(rows) == 2 * 2 * len(bench.CONTESTANTS)
    keys = {(r["model"], r["phase"], r["T"], r["contestant"]) for r in rows}
    assert len(keys) == len(rows)
    for row in rows:
        assert (row["layers"], row["of_layers"], row["skew"]) == (2, 3, None)
        assert (row["phase"], row["T"], row["batch"], row["context"], row["steps"]) in {
            ("decode", 2, 2, 16, 2),
            ("prefill", 24, 1, 0, 1),
        }
        assert row["us"] > 0
        assert row["tokens_per_s"] == pytest.approx(row["T"] / row["us"] * 1e6, rel=0.01)
        assert row["timed_as"] == "calls"
        assert row["command"].startswith("python benchmarks/end_to_end.py --layers 2")
        assert "transformers" in row["versions"]
        assert row["commit"] == "c1"
        without = row["contestant"].startswith("without")
        assert without == ("rel_err" not in row) == ("hidden_err" not in row)
        if not without:
            assert 0 < row["rel_err"] <= row["max_row_err"] < 0.02
            assert row["hidden_err"] <= row["hidden_row_err"] < bench.FAR_ROW
            assert row["tokens_wrong"] <= 1 < row["tokens_checked"]
        if row["contestant"] in bench.OURS:
            assert row["against"].startswith("transformers:")
            assert row["gain"] > 0
            if row["predicted_gain"] is not None:
                ratio = row["predicted_gain"] / row["gain"]
                assert 1 + row["predicted_off"] == pytest.approx(ratio, rel=2e-3)
    assert bench.main([*command, "--models", "few", *some, "--commit", "c2"]) == 0
    assert len(rows_of(out)) == len(rows) + len(first)
    assert bench.main([*command, "--models", "few", *some, "--layers", "all"]) == 0
    assert {r["layers"] for r in rows_of(out)[-6:]} == {3}
    assert bench.main([*command, "--models", "few", *some, "--again"]) == 0
    assert len(rows_of(out)) == len(rows) + 3 * len(first)


def test_a_run_stops_in_time(
    bench: ModuleType, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    command = [*QUICK, "--models", "few", "--batches", "1,2", "--prompts", "", "--out", str(out)]
    command += ["--contestants", "transformers:grouped_mm", "--commit", "c"]
    answers = iter([True, False])
    monkeypatch.setattr(bench.common.Clock, "room", lambda self: next(answers))
    assert bench.main([*command, "--max-seconds", "1"]) == 0
    assert [r["T"] for r in rows_of(out)] == [1]
    monkeypatch.setattr(bench.common.Clock, "room", lambda self: True)
    assert bench.main(command) == 0
    assert [r["T"] for r in rows_of(out)] == [1, 2]


def of_ours(bench: ModuleType, planted: Callable[..., Tensor], out: Path) -> tuple[int, Any]:
    """The exit status and our row of a run in which `planted` computes what ours should."""
    from transformers.integrations.moe import ExpertsInterface

    import weave_moe.integrations.transformers as integration

    command = [*QUICK, "--models", "few", "--batches", "4", "--prompts", "", "--out", str(out)]
    command += ["--commit", "c", "--contestants", "weave,transformers:grouped_mm"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "_forward", planted)
        try:
            status = bench.main(command)
        finally:
            patch.undo()
            ExpertsInterface.register("weave", integration._forward)
    ours, theirs = rows_of(out)
    assert theirs["us"] > 0
    return status, ours


def test_a_wrong_layer_gets_no_time(bench: ModuleType, tmp_path: Path) -> None:
    import weave_moe.integrations.transformers as integration

    right = integration._forward

    def planted(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return right(experts, x, ids, weights) * 1.05

    status, row = of_ours(bench, planted, tmp_path / "rows.jsonl")
    assert status == 1
    assert row["error"] == "wrong result"
    assert row["rel_err"] > 0.01
    assert not {"us", "gain", "hidden_err"} & row.keys()


def test_layers_that_are_right_one_by_one_are_not_enough(bench: ModuleType, tmp_path: Path) -> None:
    import weave_moe.integrations.transformers as integration

    right, calls = integration._forward, [0]

    def planted(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        calls[0] += 1  # right in the two layers that are compared, then stale
        return right(experts, x, ids, weights) * (1 if calls[0] <= 2 else 0)

    status, row = of_ours(bench, planted, tmp_path / "rows.jsonl")
    assert status == 1
    assert row["error"] == "wrong result"
    assert row["rel_err"] < 0.01
    assert row["hidden_err"] > 0.01
    assert "us" not in row


def test_one_that_does_not_run_is_a_row_with_the_reason(bench: ModuleType, tmp_path: Path) -> None:
    def planted(*given: Any) -> Tensor:
        raise RuntimeError("no such thing here")

    status, row = of_ours(bench, planted, tmp_path / "rows.jsonl")
    assert status == 0
    assert row["error"] == "no such thing here"
    assert "us" not in row


def test_what_no_graph_can_hold_is_not_decoded_on_a_gpu(bench: ModuleType) -> None:
    stage = SimpleNamespace(device=torch.device("cuda"))
    phase = SimpleNamespace(stage=stage, name="decode")
    with pytest.raises(RuntimeError, match="no graph can hold it"):
        bench.replay_of(phase, "transformers:eager", None)
    phase.name = "prefill"
    assert bench.replay_of(phase, "transformers:eager", None).timed_as == "calls"


class FakeCuda:
    """What `replay_of` asks of torch.cuda, on a CPU; a graph is what makes a step again."""

    def __init__(self, phase: Any, peak: int, fails: bool = False) -> None:
        self.phase, self.peak, self.fails = phase, peak, fails
        self.log: list[Any] = []
        self.stream_of = "default"

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        stream = SimpleNamespace(wait_stream=lambda other: None)
        found = {
            "synchronize": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "empty_cache": lambda: None,
            "memory_allocated": lambda: 5,
            "max_memory_allocated": lambda: 5 + self.peak,
            "mem_get_info": lambda: (1000, 2000),
            "current_stream": lambda: stream,
            "Stream": lambda: stream,
            "stream": lambda of: contextlib.nullcontext(),
            "set_stream": lambda of: setattr(self, "stream_of", "default"),
            "CUDAGraph": lambda: SimpleNamespace(replay=self.replay),
            "graph": self.capture,
        }
        for name, function in found.items():
            patch.setattr(torch.cuda, name, function)

    @contextlib.contextmanager
    def capture(self, graph: Any, pool: Any) -> Iterator[None]:
        self.log.append(("capture", pool))
        self.stream_of = "capturing"
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        before = [t.clone() for t in (self.phase.state, self.phase.kept, self.phase.chosen)]
        yield  # what is captured does not run
        self.phase.state.copy_(before[0])
        self.phase.kept.copy_(before[1])
        self.phase.chosen.copy_(before[2])

    def replay(self) -> None:
        self.log.append("replay")
        self.phase.step()


def on_a_gpu(models: ModuleType, stage: Any) -> Any:
    phase = models.Decode(stage, 16)
    phase.stage = copy(stage)
    phase.stage.device = torch.device("cuda")
    return phase


def test_a_graph_s_replays_are_the_steps(
    bench: ModuleType, models: ModuleType, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = on_a_gpu(models, stage)
    models.run(phase, phase.steps)
    want = phase.hidden.clone()
    cuda = FakeCuda(phase, peak=900)
    cuda.patch(monkeypatch)
    replay = bench.replay_of(phase, "weave:optimize", "pool")
    assert replay.timed_as == "graph"
    assert cuda.log == [("capture", "pool")]
    kinds = {type(block).__name__ for block in replay.holds}
    assert kinds == {"MoELayer"}, "what the graph reads is kept"
    phase.hidden.zero_()
    replay.make(phase.steps)
    assert torch.equal(phase.hidden, want)
    assert cuda.log[1:] == ["replay"] * phase.steps


def test_a_step_that_does_not_fit_is_not_captured(
    bench: ModuleType, models: ModuleType, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = on_a_gpu(models, stage)
    cuda = FakeCuda(phase, peak=1001)
    cuda.patch(monkeypatch)
    with pytest.raises(RuntimeError, match="a step takes"):
        bench.replay_of(phase, "transformers:batched_mm", None)
    assert not cuda.log
    failing = FakeCuda(phase, peak=10, fails=True)
    failing.patch(monkeypatch)
    with pytest.raises(RuntimeError, match="not permitted"):
        bench.replay_of(phase, "transformers:grouped_mm", None)
    assert failing.stream_of == "default"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--models", "nothing"], "--models must be of wide, few, got 'nothing'"),
        (["--contestants", "weave,vllm"], "--contestants must be of"),
        (["--batches", "1,x"], "--batches must be positive numbers, got '1,x'"),
        (["--prompts", "0"], "--prompts must be positive numbers, got '0'"),
        (["--layers", "none"], "--layers must be a positive number or all, got 'none'"),
        (["--context", "0"], "--context must be at least 1, got 0"),
    ],
)
def test_bad_options_are_named(
    bench: ModuleType, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        bench.main(words)
    assert status.value.code == 2
    assert named in capsys.readouterr().err
