"""`weave-moe bench`: who takes part, what is right, what is timed, what is refused and said."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from fakes.packages import as_modules
from weave_moe import Activation
from weave_moe.bench import cells, command, contestants, measure, outputs, rivals, timing
from weave_moe.bench.cells import Cell, Contestant, Layer, Rates, Unsupported, Weights
from weave_moe.cli import cli
from weave_moe.presets import PRESETS, shipped_preset
from weave_moe.reference import activate
from weave_moe.run import sources
from weave_moe.run.errors import InputError
from weave_moe.shapes import POLICIES, LayerShape
from weave_moe.tools.choice import choose_plan

ROOT = Path(__file__).resolve().parents[1]

CPU = torch.device("cpu")
HOST = ("--backend", "host")
QUICK = (*HOST, "--seconds", "0.01", "--max-spread", "1000")
SMALL = LayerShape(64, 32, 8, 2, "float32")


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "bench.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def make_cell(
    layer: Layer | None = None,
    *,
    tokens: int = 12,
    sets: int = 2,
    calls: int = 3,
    rates: Rates | None = None,
    weights: Callable[[torch.Tensor], torch.Tensor] = lambda w: w / w.sum(1, keepdim=True),
    biases: bool = False,
) -> Cell:
    """A cell of random routings; `weights` makes those of the slots from positive numbers."""
    layer = layer or Layer(SMALL)
    shape, g = layer.shape, torch.Generator().manual_seed(3)
    routes = []
    for _ in range(calls):
        ids = torch.rand(tokens, shape.experts, generator=g).argsort(1)[:, : shape.top_k].int()
        chosen = weights(torch.rand(tokens, shape.top_k, generator=g) + 0.1)
        logits = cells.logits_of(ids, chosen, shape.experts) if layer.unit_weights else None
        routes.append((logits, ids.contiguous(), chosen.contiguous()))
    inputs = [torch.randn(tokens, shape.hidden, generator=g).to(shape.torch_dtype)] * calls
    made = [cells.make_weights(shape, CPU, seed=i, biases=biases) for i in range(sets)]
    return Cell(layer, made, inputs, routes, rates)


def is_right(cell: Cell, factory: Callable[[Layer, Weights], Contestant]) -> bool:
    """Whether every call is, each with its own routing and weights."""
    functions = contestants.make(factory, cell.layer, cell.sets)
    if isinstance(functions, Exception):
        raise functions
    good = cell.check(functions, {})
    for i in range(1, cell.calls):  # the truth of another call
        x, (logits, ids, w) = cell.inputs[i], cell.routes[i]
        one = Cell(cell.layer, [cell.sets[i % len(cell.sets)]], [x], [(logits, ids, w)], None)
        good = good and one.check([functions[i % len(functions)]], {})
    return good


# --- what is right -----------------------------------------------------------------------------

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")


@pytest.mark.parametrize("factory", [contestants.torch_eager, contestants.grouped])
@given(
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    interleaved=st.booleans(),
    on_input=st.booleans(),
    biases=st.booleans(),
    tokens=st.integers(1, 20),
)
def test_torch_s_operators_compute_any_layer(
    factory: Any,
    activation: str,
    dtype: str,
    interleaved: bool,
    on_input: bool,
    biases: bool,
    tokens: int,
) -> None:
    act = Activation.parse(activation)
    shape = LayerShape(64, 32, 8, 2, dtype, act.gated)
    layer = Layer(shape, act, interleaved and act.gated, on_input)
    # relu2 squares: an error is twice as large, and may pass what a row is allowed in 16 bits.
    loose = {name: (10 * a, 10 * b) for name, (a, b) in cells.LIMITS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "LIMITS", loose)
        assert is_right(make_cell(layer, tokens=tokens, biases=biases), factory)


@pytest.mark.parametrize("policy", ["steal", "static_expert"])
def test_ours_is_right_on_the_cpu_engine(policy: str) -> None:
    cell = make_cell()
    made = contestants.make(contestants.ours(policy, "host", 2), cell.layer, cell.sets)
    if isinstance(made, Unsupported):
        pytest.skip(str(made))
    assert is_right(cell, contestants.ours(policy, "host", 2))
    assert not isinstance(made, Exception)
    assert all(c.ours and c.version for c in made)


def test_what_a_backend_does_not_take_is_unsupported() -> None:
    cell = make_cell()
    reason = contestants.make(contestants.ours("steal", "cuda"), cell.layer, cell.sets)
    assert isinstance(reason, Unsupported)
    assert "not on a GPU" in str(reason)


def test_a_row_without_slots_must_be_zero() -> None:
    truth = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert cells.errors(truth.clone(), truth) == (0.0, 0.0)
    almost = truth + torch.tensor([[1e-9, 0.0], [0.0, 0.0]])
    assert cells.errors(almost, truth)[1] == math.inf
    assert cells.errors(torch.zeros(2, 2), torch.zeros(2, 2)) == (0.0, 0.0)
    assert cells.errors(torch.full((2, 2), math.nan), truth)[0] > 1


@pytest.mark.parametrize("dtype", list(cells.LIMITS))
def test_a_tenth_too_much_in_one_row_is_wrong_in_every_dtype(dtype: str) -> None:
    cell = make_cell(Layer(LayerShape(64, 32, 8, 2, dtype)), tokens=40)

    def off(layer: Layer, w: Weights) -> Contestant:
        right = contestants.torch_eager(layer, w)

        def f(x: Any, ids: Any, weights: Any, logits: Any) -> torch.Tensor:
            y = right(x, ids, weights, logits)
            y[7] *= 1.1
            return y

        return Contestant(f)

    assert is_right(cell, contestants.torch_eager)
    assert not is_right(cell, off)


@given(
    ids=st.lists(st.permutations(range(6)), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_logits_route_to_the_ids_with_the_weights(ids: list[list[int]], seed: int) -> None:
    wanted = torch.tensor(ids, dtype=torch.int32)[:, :3]
    weights = torch.rand(len(ids), 3, generator=torch.Generator().manual_seed(seed)) + 0.01
    weights /= weights.sum(1, keepdim=True)
    logits = cells.logits_of(wanted, weights, 6)
    top, found = logits.topk(3, dim=1)
    assert torch.equal(found.sort(1).values.int(), wanted.sort(1).values)
    dense = torch.zeros(len(ids), 6).scatter_(1, wanted.long(), weights)
    assert torch.allclose(top.softmax(1), dense.gather(1, found), atol=1e-6)


# --- routings and weights ----------------------------------------------------------------------


@pytest.mark.parametrize("text", ["uniform", "zipf:2", "dirichlet:0.2", "hot:0.9"])
def test_each_call_has_another_routing_of_the_kind(text: str) -> None:
    source = sources.parse_source(text)
    routes = cells.routes_for(source, PRESETS["qwen3-30b"], 32, CPU, seed=5)
    assert len(routes) == timing.calls_of(32) == 8
    assert len({r[1].numpy().tobytes() for r in routes}) == 8
    again = cells.routes_for(source, PRESETS["qwen3-30b"], 32, CPU, seed=5)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(routes, again, strict=True))
    assert all(r[0] is not None for r in routes), "normalised weights come with logits"


def test_weights_that_do_not_add_to_one_come_without_logits() -> None:
    for name, unit in (("deepseek-v3", False), ("olmoe", False), ("mixtral-8x7b", True)):
        routes = cells.routes_for(sources.parse_source("uniform"), PRESETS[name], 5, CPU)
        assert all((r[0] is not None) == unit for r in routes), name
        assert Layer.of(PRESETS[name], "bfloat16", routes).unit_weights == unit


def test_a_recorded_routing_keeps_its_layer_and_its_empty_slots(tmp_path: Path) -> None:
    ids = np.arange(60 * 3 * 2).reshape(60, 3, 2) % 5
    ids[:, 1, 1] = -1
    np.savez(tmp_path / "mine.npz", topk_ids=ids, experts=16)
    source = sources.parse_source(f"trace:{tmp_path / 'mine.npz'}")
    preset = PRESETS["mixtral-8x7b"]
    with pytest.raises(InputError, match="of 16 experts, top-2, but mixtral-8x7b has 8"):
        cells.routes_for(source, preset, 10, CPU)
    wide = dataclasses.replace(preset, experts=16)
    for route in cells.routes_for(source, wide, 10, CPU, layer=1):
        assert route[0] is None
        assert (route[1][:, 1] == -1).all()
        first = [tuple(row) for row in ids[:, 1].tolist()].index(tuple(route[1][0].tolist()))
        assert first >= 0
    assert Layer.of(wide, "bfloat16", cells.routes_for(source, wide, 10, CPU, layer=1)).skips
    with pytest.raises(InputError, match="at most 60"):
        cells.routes_for(source, wide, 61, CPU)
    with pytest.raises(InputError, match="from 0 to 2"):
        cells.routes_for(source, wide, 6, CPU, layer=3)


@given(
    hidden=st.sampled_from([64, 2048, 7168]),
    experts=st.integers(1, 256),
    calls=st.sampled_from([4, 8]),
    free=st.floats(1e6, 1.4e11),
)
def test_weight_sets_outgrow_the_cache_and_leave_memory(
    hidden: int, experts: int, calls: int, free: float
) -> None:
    shape = LayerShape(hidden, hidden // 2, experts, 1)
    size = experts * shape.expert_bytes
    sets = cells.weight_sets(shape, calls, free)
    assert 1 <= sets <= calls
    assert sets == 1 or sets * size <= cells.MEMORY_SHARE * free
    roomy = cells.weight_sets(shape, calls, 1e15)
    assert roomy >= 2
    assert roomy == calls or roomy * size > 2.9 * cells.L2_BYTES


def test_dirichlet_popularities_are_the_more_uneven_the_smaller() -> None:
    def share(text: str) -> float:
        found = sources.synthetic(sources.parse_source(text), PRESETS["llama-4-scout"], 4000, 2)
        counts = torch.bincount(found.topk_ids.reshape(-1).long(), minlength=16)
        assert int((counts == counts[0]).sum()) < 16
        return float(counts.max()) / 4000

    assert share("dirichlet:1000") < 0.1 < share("dirichlet:1") < share("dirichlet:0.03")
    # As many as numpy's own Dirichlet draw gives the popular ones.
    many = [np.random.default_rng(i).dirichlet(np.full(16, 0.3)).max() for i in range(400)]
    ours = []
    for i in range(60):
        found = sources.synthetic(
            sources.parse_source("dirichlet"), PRESETS["llama-4-scout"], 1000, i
        )
        ours.append(float(torch.bincount(found.topk_ids.reshape(-1).long()).max()) / 1000)
    assert abs(np.mean(ours) - np.mean(many)) < 0.1


def test_a_tiny_concentration_favours_no_expert_by_its_number() -> None:
    chosen = []
    for seed in range(12):
        found = sources.synthetic(
            sources.parse_source("dirichlet:0.01"), PRESETS["qwen3-30b"], 50, seed
        )
        assert all(len(set(row)) == 8 for row in found.topk_ids.tolist())
        chosen += found.topk_ids.reshape(-1).tolist()
    # Nearly all have no popularity; were those ties, the first experts would be chosen.
    assert 45 < np.mean(chosen) < 82
    assert len(set(chosen)) > 60


# --- who takes part ----------------------------------------------------------------------------


def test_every_rival_is_here_or_absent_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "installed", lambda rival: None)
    gpu = torch.device("cuda", 0)
    found = contestants.find(None, gpu)
    assert set(found.rivals) | set(found.absent) == set(contestants.RIVALS)
    assert set(found.absent) == {"torch-eager"}
    on_cpu = contestants.find(None, CPU)
    assert on_cpu.rivals == ("torch-eager",)
    assert on_cpu.absent["vllm"] == "it needs a GPU"
    named = contestants.find(["transformers-grouped_mm", "vllm"], CPU)
    assert named.rivals == ("transformers-grouped_mm",)
    assert set(named.absent) == {"vllm"}
    monkeypatch.undo()
    assert contestants.installed(contestants.Rival("no-such", "no_such", contestants.grouped))
    here = contestants.find(None, gpu)
    for name, reason in here.absent.items():
        assert "installed" in reason or name == "torch-eager"
    with pytest.raises(ValueError, match="rivals must be some of"):
        contestants.find(["vlm"], gpu)


def test_all_named_in_the_task_have_their_function() -> None:
    packages = {rival.package for rival in contestants.RIVALS.values()}
    assert packages == {
        *("torch", "transformers", "liger-kernel", "vllm", "triton_kernels", "deep_gemm"),
        "flashinfer-python",
    }


def transformers_layer() -> Any:
    pytest.importorskip("transformers")
    return make_cell(Layer(LayerShape(64, 32, 8, 2, "float32")))


@pytest.mark.parametrize("factory", [rivals.transformers_grouped, rivals.transformers_batched])
def test_transformers_experts(factory: Any) -> None:
    cell = transformers_layer()
    assert is_right(cell, factory)
    assert contestants.make(factory, cell.layer, cell.sets)[0].version != "unknown"  # type: ignore[index]


# Stand-ins with the interfaces of packages that are not here: what the real ones compute, in
# torch. They say whether our functions hand over the right tensors, not how the real ones behave.


def swiglu(h: torch.Tensor) -> torch.Tensor:
    return activate(h, Activation())


def plain_experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            y[t] += weights[t, j] * (w2[e] @ swiglu(w13[e] @ x[t]))
    return y


def vllm_standin() -> dict[str, dict[str, object]]:
    @contextlib.contextmanager
    def current(config: object) -> Iterator[None]:
        state.append(config)
        yield
        state.pop()

    state: list[object] = []

    def fused_experts(
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        inplace: bool = False,
    ) -> torch.Tensor:
        assert state, "the engine's settings are missing"
        return plain_experts(hidden_states, w1, w2, topk_weights, topk_ids)

    return {
        "vllm.model_executor.layers.fused_moe": {"fused_experts": fused_experts},
        "vllm.config": {"VllmConfig": object, "set_current_vllm_config": current},
    }


def liger_standin() -> dict[str, dict[str, object]]:
    class LigerFusedMoEFunction:
        @staticmethod
        def apply(x: Any, gate_up: Any, down: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            assert top_k_index.dtype == torch.int32
            return plain_experts(x, gate_up, down, top_k_weights, top_k_index)

    return {"liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": LigerFusedMoEFunction}}


def triton_kernels_standin() -> dict[str, dict[str, object]]:
    def data_of(scales: Any, counts: Any, experts: int, k: int, tiles: Any) -> Any:
        assert counts.dtype == torch.int32
        assert torch.equal(tiles, counts)
        assert len(counts) == experts
        return SimpleNamespace(gate_scal=scales, counts=counts, k=k)

    def indices(src_indx: torch.Tensor, dst_indx: torch.Tensor) -> Any:
        assert src_indx.dtype == dst_indx.dtype == torch.int32
        assert torch.equal(src_indx[dst_indx], torch.arange(len(src_indx)).int())
        return src_indx

    def routing(logits: torch.Tensor, k: int) -> tuple[Any, Any, Any]:
        assert k & (k - 1) == 0, "its kernels do not compile"
        top, ids = logits.topk(k, dim=1)
        order = ids.reshape(-1).argsort(stable=True).int()
        counts = ids.reshape(-1).bincount(minlength=logits.shape[1])
        data = SimpleNamespace(gate_scal=top.softmax(1).reshape(-1)[order], counts=counts, k=k)
        return data, order, order.argsort().int()

    def matmul_ogs(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        data: Any = None,
        gather_indx: Any = None,
        scatter_indx: Any = None,
        fused_activation: Any = None,
        gammas: torch.Tensor | None = None,
    ) -> torch.Tensor:
        flat = torch.arange(len(w)).repeat_interleave(data.counts)
        rows = x if gather_indx is None else x[gather_indx // data.k]
        out = torch.einsum("sh,sho->so", rows, w[flat])
        if bias is not None:
            assert bias.dtype == torch.float32
            out = out + bias[flat]
        if fused_activation is not None:
            alpha, limit = fused_activation
            act = Activation("silu", alpha=alpha, limit=limit, up_offset=1.0)
            out = activate(out, act, interleaved=True)
        if scatter_indx is not None:
            assert gammas is not None
            out = (out * gammas[:, None])[scatter_indx].view(-1, data.k, w.shape[2]).sum(1)
        return out

    return {
        "triton_kernels.matmul_ogs": {
            "matmul_ogs": matmul_ogs,
            "FnSpecs": lambda *arguments: arguments,
            "FusedActivation": lambda specs, arguments, reduction: arguments,
        },
        "triton_kernels.routing": {
            "routing": routing,
            "RoutingData": data_of,
            "GatherIndx": indices,
            "ScatterIndx": indices,
            "compute_expt_data": lambda counts, experts, slots: counts.clone(),
        },
        "triton_kernels.swiglu": {"swiglu_fn": None},
    }


def deepgemm_standin(pad: int = 8) -> dict[str, dict[str, object]]:
    def product(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, m_indices: torch.Tensor) -> None:
        assert m_indices.dtype == torch.int32
        assert len(a) % pad == 0
        blocks = m_indices.view(-1, pad)
        assert (blocks == blocks[:, :1]).all(), "a block of rows belongs to one expert"
        d.fill_(math.nan)  # rows of no expert hold anything
        for e in range(len(b)):
            d[m_indices == e] = (a[m_indices == e].float() @ b[e].float().T).to(d.dtype)

    return {
        "deep_gemm": {
            "m_grouped_bf16_gemm_nt_contiguous": product,
            "get_mk_alignment_for_contiguous_layout": lambda: pad,
        }
    }


def flashinfer_standin() -> dict[str, dict[str, object]]:
    tuning: list[bool] = []
    tuned: list[int] = []

    @contextlib.contextmanager
    def autotune(on: bool) -> Iterator[None]:
        tuning.append(on)
        yield
        tuning.pop()

    def cutlass_fused_moe(
        input: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        fc1_expert_weights: torch.Tensor,
        fc2_expert_weights: torch.Tensor,
        output_dtype: torch.dtype,
        quant_scales: list[Any],
        output: torch.Tensor | None = None,
        tune_max_num_tokens: int = 8192,
    ) -> None:
        if tuning:
            tuned.append(len(input))
        assert len(input) in tuned, "called before its tactics were tuned"
        up, gate = fc1_expert_weights.chunk(2, dim=1)
        w13 = torch.cat([gate, up], dim=1)
        y = plain_experts(
            input, w13, fc2_expert_weights, token_final_scales, token_selected_experts
        )
        assert output is not None
        output.copy_(y)

    return {
        "flashinfer.fused_moe": {"cutlass_fused_moe": cutlass_fused_moe},
        "flashinfer.autotuner": {"autotune": autotune},
    }


STANDINS: dict[str, Callable[[], dict[str, dict[str, object]]]] = {
    "vllm": vllm_standin,
    "liger": liger_standin,
    "triton_kernels": triton_kernels_standin,
    "deepgemm": deepgemm_standin,
    "flashinfer": flashinfer_standin,
}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for dotted, module in as_modules(STANDINS[name]()).items():
        monkeypatch.setitem(sys.modules, dotted, module)


def layer_for(name: str) -> Layer:
    return Layer(LayerShape(64, 32, 8, 2, "bfloat16" if name == "deepgemm" else "float32"))


@pytest.mark.parametrize("name", list(STANDINS))
def test_a_rival_is_handed_the_right_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, name)
    rival = contestants.RIVALS[name]
    cell = make_cell(layer_for(name), tokens=13)
    assert is_right(cell, rival.factory)
    made = contestants.make(rival.factory, cell.layer, cell.sets)
    assert not isinstance(made, Exception)
    assert made[0].note
    assert not made[0].ours
    # Weights swapped between gate and up must be noticed, or this test says nothing.
    swapped = [
        Weights(w.w13.reshape(8, 2, 32, 64).flip(1).reshape(8, 64, 64), w.w2) for w in cell.sets
    ]
    wrong = contestants.make(rival.factory, cell.layer, swapped)
    assert not isinstance(wrong, Exception)
    assert not cell.check(wrong, {})


def test_triton_kernels_is_held_to_its_own_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "triton_kernels")
    cell = make_cell()
    functions = contestants.make(rivals.triton_kernels, cell.layer, cell.sets)
    assert not isinstance(functions, Exception)
    assert functions[0].activation == Activation("silu", up_offset=1.0)
    blind = [Contestant(f.call) for f in functions]
    assert cell.check(functions, {})
    assert not cell.check(blind, {}), "by the layer's activation it is another function"
    # gpt-oss's layer is what it was written for.
    act = Activation.parse("swiglu_oai")
    layer = Layer(LayerShape(64, 32, 8, 2, "float32"), act, interleaved=True)
    assert is_right(make_cell(layer, biases=True), rivals.triton_kernels)


@pytest.mark.parametrize("top_k", [3, 6])
def test_triton_kernels_gets_ids_where_its_top_k_does_not_compile(
    top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "triton_kernels")
    layer = Layer(LayerShape(64, 32, 8, top_k, "float32"), unit_weights=False)
    cell = make_cell(layer, tokens=13, weights=lambda w: w * 2.5)
    functions = contestants.make(rivals.triton_kernels, layer, cell.sets)
    assert not isinstance(functions, Exception)
    assert "torch's sort of the slots" in functions[0].note
    assert cell.check(functions, {})
    _, ids, weights = cell.routes[0]
    assert not functions[0](cell.inputs[0], ids, torch.zeros_like(weights), None).any()


@pytest.mark.parametrize("name", [*STANDINS, "transformers-grouped_mm", "transformers-batched_mm"])
@pytest.mark.parametrize(
    ("changed", "biases"),
    [
        ({"activation": Activation("silu", limit=7.0)}, False),
        ({"activation": Activation("relu2")}, False),
        ({"interleaved": True}, False),
        ({"weight_on_input": True}, False),
        ({"skips": True}, False),
        ({}, True),
    ],
)
def test_a_rival_refuses_what_it_would_compute_wrong(
    name: str, changed: dict[str, Any], biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in STANDINS:
        stand_in(monkeypatch, name)
    else:
        pytest.importorskip("transformers")
    layer = dataclasses.replace(layer_for(name), **changed)
    if not layer.activation.gated:
        layer = dataclasses.replace(layer, shape=dataclasses.replace(layer.shape, gated=False))
    cell = make_cell(layer, biases=biases)
    made = contestants.make(contestants.RIVALS[name].factory, layer, cell.sets)
    if name == "triton_kernels" and not isinstance(made, Exception):
        assert set(changed) <= {"activation", "interleaved"}, "it says it takes these"
        assert cell.check(made, {})
        return
    assert isinstance(made, Unsupported), made


def test_other_interfaces_and_missing_weights_are_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = make_cell()
    for name in ("triton_kernels", "liger_kernel"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for factory in (rivals.triton_kernels, rivals.liger):
        assert isinstance(contestants.make(factory, cell.layer, cell.sets), Unsupported)
    stand_in(monkeypatch, "triton_kernels")
    scaled = make_cell(Layer(SMALL, unit_weights=False), weights=lambda w: w * 2.5)
    made = contestants.make(rivals.triton_kernels, scaled.layer, scaled.sets)
    _, ids, weights = scaled.routes[0]
    logits = torch.zeros(len(ids), SMALL.experts)
    with pytest.raises(Unsupported, match="do not add to 1"):
        made[0](scaled.inputs[0], ids, weights, logits)
    stand_in(monkeypatch, "deepgemm")
    made = contestants.make(rivals.deepgemm, cell.layer, cell.sets)
    assert isinstance(made, Unsupported)
    assert "float32" in str(made)


# --- what is timed, and what is refused --------------------------------------------------------


def fake(us: Sequence[float], *, right: bool = True, ours: bool = False) -> Any:
    """A factory; its `us` are the times that `stubbed` gives its rounds."""

    def factory(layer: Layer, w: Weights) -> Contestant:
        good = contestants.torch_eager(layer, w)
        made = Contestant(
            lambda *a: good(*a) * (1 if right else 1.2), "1.0", "all of it", ours=ours
        )
        return made

    factory.us = list(us)  # type: ignore[attr-defined]
    return factory


def stubbed(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, list[list[float]]]
) -> list[dict[str, Any]]:
    """`in_turn` gives each name's lists of times one after the other; what it was asked for."""
    asked: list[dict[str, Any]] = []

    def in_turn(replays: Any, device: Any, seconds: float, **more: Any) -> dict[str, list[float]]:
        asked.append({"names": list(replays), "seconds": seconds, **more})
        return {name: times[name].pop(0) for name in replays}

    monkeypatch.setattr(measure, "in_turn", in_turn)
    return asked


def measured(
    monkeypatch: pytest.MonkeyPatch,
    contestant: dict[str, Any],
    times: dict[str, list[list[float]]],
    **options: Any,
) -> tuple[dict[tuple[str, int], dict[str, Any]], list[dict[str, Any]]]:
    asked = stubbed(monkeypatch, times)
    cell = make_cell(rates=Rates(4.0, 700.0), calls=4)
    functions = {
        name: contestants.make(factory, cell.layer, cell.sets) if callable(factory) else factory
        for name, factory in contestant.items()
    }
    rows = measure.measure(
        cell,
        cells.prepare(cell, functions),
        **{"seconds": 0.5, "max_spread": 0.05, **options},
    )
    return {(row["contestant"], row["neighbour_sms"]): row for row in rows}, asked


def test_figures_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = measured(
        monkeypatch,
        {"weave:steal": fake([]), "slow": fake([])},
        {"weave:steal": [[400.0, 404.0, 396.0, 400.0]], "slow": [[800.0] * 4]},
    )
    ours, slow = rows["weave:steal", 0], rows["slow", 0]
    assert (ours["us"], ours["to_best"], slow["to_best"]) == (100.0, 1.0, 2.0)
    assert (ours["ours"], slow["ours"]) == (True, False)
    cell = make_cell(calls=4)
    flops = 2 * 12 * 2 * 64 * 3 * 32
    moved = cell.active * 3 * 64 * 32 * 4 + 2 * 12 * 64 * 4
    assert ours["tflops"] == pytest.approx(flops / 100 / 1e6, abs=0.006)
    assert ours["tbs"] == pytest.approx(moved / 100 / 1e6, abs=6e-5)
    assert ours["of_read"] == pytest.approx(ours["tbs"] / 4.0, abs=6e-5)
    assert ours["p99_us"] == 101.0


def test_a_wrong_result_has_no_time_and_is_no_competitor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, asked = measured(
        monkeypatch,
        {"weave:steal": fake([]), "cheat": fake([], right=False)},
        {"weave:steal": [[400.0] * 4]},
    )
    assert asked[0]["names"] == ["weave:steal"]
    assert rows["cheat", 0]["status"] == cells.WRONG
    assert "us" not in rows["cheat", 0]
    assert rows["cheat", 0]["max_row_err"] > 0.1
    assert rows["weave:steal", 0]["to_best"] == 1.0
    assert measure.refused(rows.values()) == [rows["cheat", 0]]


def test_spread_times_are_measured_once_more_and_then_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide, narrow = [400.0, 800.0] * 4, [400.0] * 8
    pair = {"weave:steal": fake([]), "other": fake([])}
    rows, asked = measured(
        monkeypatch, pair, {"weave:steal": [wide, narrow], "other": [narrow, narrow]}
    )
    assert [a["seconds"] for a in asked] == [0.5, 1.0]
    assert rows["weave:steal", 0]["status"] == measure.TIMED
    rows, asked = measured(
        monkeypatch, pair, {"weave:steal": [narrow, narrow], "other": [wide, wide]}
    )
    assert rows["other", 0]["status"] == measure.UNSTEADY
    assert "us" not in rows["other", 0]
    assert "33.3%" in rows["other", 0]["error"]
    assert rows["weave:steal", 0]["us"] == 100.0
    assert "to_best" not in rows["weave:steal", 0], "the best is not known"
    rows, _ = measured(
        monkeypatch, pair, {"weave:steal": [narrow], "other": [wide]}, max_spread=0.5
    )
    assert rows["other", 0]["status"] == measure.TIMED
    rows, _ = measured(
        monkeypatch,
        pair,
        {"weave:steal": [[math.nan] * 8] * 2, "other": [narrow, narrow]},
    )
    assert rows["weave:steal", 0]["status"] == measure.UNSTEADY


def test_what_does_not_run_is_a_reason_unless_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"weave:steal": [[400.0] * 4]}
    broken = RuntimeError("no such library")
    rows, _ = measured(
        monkeypatch,
        {"weave:steal": fake([]), "rival": broken, "weave:window": Unsupported("too wide")},
        times,
    )
    assert rows["rival", 0]["status"] == measure.NOT_RUN
    assert "no such library" in rows["rival", 0]["error"]
    assert rows["weave:window", 0]["status"] == measure.NOT_RUN
    assert rows["weave:window", 0]["error"] == "too wide"
    assert measure.refused(rows.values()) == []
    rows, _ = measured(
        monkeypatch, {"weave:steal": broken, "rival": fake([])}, {"rival": [[400.0] * 4]}
    )
    assert rows["weave:steal", 0]["status"] == measure.FAILED
    assert len(measure.refused(rows.values())) == 1


def test_a_neighbour_holds_its_sms_while_the_second_arm_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Any] = []

    @contextlib.contextmanager
    def held(sms: int, device: torch.device, **limits: float) -> Iterator[list[float]]:
        events.append(("hold", sms))
        yield [0.0]
        events.append("leave")

    monkeypatch.setattr(measure, "held", held)
    asked = stubbed(monkeypatch, {})
    del asked
    times = {"weave:steal": [[400.0] * 4, [600.0] * 4]}

    def in_turn(replays: Any, device: Any, seconds: float, **more: Any) -> dict[str, list[float]]:
        events.append("time")
        return {name: times[name].pop(0) for name in replays}

    monkeypatch.setattr(measure, "in_turn", in_turn)
    cell = make_cell(calls=4)
    functions = {"weave:steal": contestants.make(fake([]), cell.layer, cell.sets)}
    rows = measure.measure(
        cell, cells.prepare(cell, functions), seconds=0.1, max_spread=0.1, neighbour=16
    )
    assert events == ["time", ("hold", 16), "time", "leave"]
    assert [row["neighbour_sms"] for row in rows] == [0, 16]
    assert rows[1]["over_alone"] == 1.5
    assert "over_alone" not in rows[0]

    @contextlib.contextmanager
    def left(sms: int, device: torch.device, **limits: float) -> Iterator[list[float]]:
        yield [0.0]
        raise RuntimeError("the neighbour had left by itself")

    monkeypatch.setattr(measure, "held", left)
    times["weave:steal"] = [[400.0] * 4, [600.0] * 4]
    rows = measure.measure(
        cell, cells.prepare(cell, functions), seconds=0.1, max_spread=0.1, neighbour=16
    )
    assert [row["status"] for row in rows] == [measure.TIMED, measure.FAILED]
    assert "us" not in rows[1]


def test_what_cannot_be_captured_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(
        cells, "capture", lambda calls, device: lambda: log.append(f"graph of {len(calls)}")
    )
    cell = make_cell()
    for graphs in (True, False):
        f = Contestant(lambda *a: log.append("call"), graphs=graphs)  # type: ignore[arg-type, return-value]
        cell.graph([f])()
    assert log == ["graph of 3", "call", "call", "call"]


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def host() -> None:
    cell = make_cell()
    made = contestants.make(contestants.ours("steal", "host", 1), cell.layer, cell.sets)
    if isinstance(made, Exception):
        pytest.skip(f"the CPU engine does not run here: {made}")


@pytest.mark.usefixtures("host")
def test_the_cpu_s_times_are_labelled_in_every_place(tmp_path: Path) -> None:
    result = call("--tokens", "5,3", "--out", tmp_path, *QUICK, "--workers", "2")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path)
    names = {f"weave:{p}" for p in POLICIES if p != "auto"} | {"torch-eager"}
    assert {row["contestant"] for row in rows} == names
    assert [(r["T"], r["routing"]) for r in rows[:: len(names)]] == [
        *((3, "uniform"), (5, "uniform"), (3, "zipf:1.2"), (5, "zipf:1.2")),
    ]
    for row in rows:
        assert row["status"] == "timed"
        assert row["evidence"] == command.CPU_EVIDENCE
        assert row["floor_us"] is None
        assert row["of_floor"] is None
        assert row["rel_err"] < 1e-2
        assert set(row) <= set(outputs.COLUMNS)
        assert str(tmp_path) not in json.dumps(row)
    page = (tmp_path / "bench.md").read_text()
    assert "no evidence of speed" in page
    assert page.count("not evidence of speed)") == 2
    assert "not evidence of speed" in result.stdout
    for name in names:
        assert name in result.stdout
        assert f"| {name} |" in page
    for name, rival in contestants.RIVALS.items():
        if contestants.installed(rival):
            assert f"| {name} | {rival.package} is not installed |" in page
    table = list(csv.DictReader(io.StringIO((tmp_path / "bench.csv").read_text())))
    assert [(r["contestant"], r["T"], float(r["us"])) for r in table] == [
        (r["contestant"], str(r["T"]), r["us"]) for r in rows
    ]
    image = pytest.importorskip("PIL.Image").open(tmp_path / "bench.png")
    assert image.width > 600


@pytest.mark.usefixtures("host")
def test_layers_dtypes_and_parts_multiply(tmp_path: Path) -> None:
    result = call(
        *("--preset", "qwen3-30b,olmoe", "--tensor-parallel", "2", "--scale", "1/64"),
        *("--tokens", "2", "--routing", "hot:0.8", "--dtype", "float32,bfloat16"),
        *("--policy", "steal", "--rivals", "none", "--out", tmp_path, *QUICK, "--json"),
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    rows = document["rows"]
    assert [(r["preset"], r["intermediate"], r["dtype"]) for r in rows] == [
        ("qwen3-30b/tp2 x 1/64", 8, "float32"),
        ("qwen3-30b/tp2 x 1/64", 8, "bfloat16"),
        ("olmoe/tp2 x 1/64", 8, "float32"),
        ("olmoe/tp2 x 1/64", 8, "bfloat16"),
    ]
    assert document["result"] == "reported"
    assert document["evidence"] == command.CPU_EVIDENCE
    assert document["absent"] == {}


@pytest.mark.usefixtures("host")
def test_a_config_s_layer_with_all_of_its_details(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                **{"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32},
                **{"num_local_experts": 8, "num_experts_per_tok": 2},
            }
        )
    )
    result = call(
        *("--config", tmp_path, "--tokens", "9", "--routing", "dirichlet:0.1", "--json"),
        *("--rivals", "torch-eager,torch-grouped_mm,transformers-grouped_mm", *QUICK),
        *("--policy", "steal", "--out", tmp_path / "out"),
    )
    assert result.exit_code == 0, result.output
    rows = {row["contestant"]: row for row in json.loads(result.stdout)["rows"]}
    assert rows["weave:steal"]["activation"] == "silu, clamp 7"
    for name in ("weave:steal", "torch-eager", "torch-grouped_mm"):
        assert rows[name]["status"] == "timed", rows[name]
    if "transformers-grouped_mm" in rows:
        assert rows["transformers-grouped_mm"]["status"] == "not run"


@pytest.mark.usefixtures("host")
def test_a_wrong_result_ends_with_status_1_and_says_who(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = contestants.RIVALS["torch-eager"]
    wrong = contestants.Rival("torch", "torch", fake([], right=False), cpu=True)
    listed = {**contestants.RIVALS, "torch-eager": wrong}
    for module in (contestants, command):
        monkeypatch.setattr(module, "RIVALS", listed)
    options = ("--tokens", "4", "--routing", "uniform", "--policy", "steal", "--out", tmp_path)
    result = call(*options, *QUICK)
    assert result.exit_code == 1
    assert "REFUSED" in result.stdout
    assert "torch-eager at shipped bfloat16 uniform T=4: wrong result, worst row" in " ".join(
        result.stdout.split()
    )
    page = (tmp_path / "bench.md").read_text()
    assert "## Not reported" in page
    assert "| 4 | torch-eager | wrong result |" in page
    eager = next(row for row in rows_of(tmp_path) if row["contestant"] == "torch-eager")
    assert "us" not in eager

    def nan(layer: Layer, w: Weights) -> Contestant:
        return Contestant(lambda x, ids, weights, logits: x * math.nan)

    listed["torch-eager"] = contestants.Rival("torch", "torch", nan, cpu=True)
    result = call(*options, *QUICK, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["result"] == "refused"
    assert "not finite" in document["refused"][0]
    listed["torch-eager"] = real
    assert call(*options, *QUICK).exit_code == 0


@pytest.mark.usefixtures("host")
def test_times_too_spread_end_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_turn(replays: Any, device: Any, seconds: float, **more: Any) -> dict[str, list[float]]:
        return {name: [100.0, 300.0] * 5 for name in replays}

    monkeypatch.setattr(measure, "in_turn", in_turn)
    options: tuple[Any, ...] = ("--tokens", "4", "--routing", "uniform", "--policy", "steal")
    options += ("--out", tmp_path, *HOST)
    result = call(*options, "--max-spread", "0.4")
    assert result.exit_code == 1
    assert "times are spread by 50.0%, more than 40.0%" in " ".join(result.stdout.split())
    assert all("us" not in row for row in rows_of(tmp_path))
    assert not (tmp_path / "bench.png").exists()
    assert call(*options, "--max-spread", "0.6").exit_code == 0


def test_nothing_of_ours_to_time_is_status_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contestants, "why_not", lambda name, call: "no C++ compiler")
    result = call("--tokens", "2", "--routing", "uniform", "--out", tmp_path, *QUICK)
    assert result.exit_code == 3, result.output
    assert "no C++ compiler" in result.stdout
    assert "no layer could be timed with this package" in " ".join(result.stdout.split())
    rows = rows_of(tmp_path)
    assert {row["status"] for row in rows if row["ours"]} == {"not run"}
    assert next(r for r in rows if r["contestant"] == "torch-eager")["status"] == "timed"


def test_the_page_s_case_of_nothing_to_time_is_one() -> None:
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    assert "on a GPU a layer whose H or I is no multiple of 8" in page
    layer = PRESETS["qwen3-30b"]
    for change in ({"hidden": 2044}, {"intermediate": 764}):
        refused = choose_plan(
            dataclasses.replace(layer, **change), "bfloat16", 16, None, 132
        ).refused
        assert refused is not None
        assert "of 8 elements" in refused
    assert (
        choose_plan(dataclasses.replace(layer, interleaved=True), "bfloat16", 16, None, 132).refused
        is None
    )


def test_what_was_measured_is_kept_when_the_rest_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = command.routes_for, []

    def failing(source: Any, preset: Any, tokens: int, *rest: Any, **more: Any) -> Any:
        seen.append(tokens)
        if more.get("calls") is None and tokens == 3:
            raise KeyboardInterrupt
        return real(source, preset, tokens, *rest, **more)

    monkeypatch.setattr(command, "routes_for", failing)
    result = call("--tokens", "2,3", "--routing", "uniform", "--out", tmp_path, *QUICK)
    assert result.exit_code == 130
    assert {row["T"] for row in rows_of(tmp_path)} == {2}
    assert [path.name for path in tmp_path.iterdir()] == ["bench.jsonl"]


def test_list_shows_who_is_here_and_why_others_are_not(tmp_path: Path) -> None:
    result = call("--list", *HOST, "--rivals", "torch-grouped_mm,vllm", "--out", tmp_path / "none")
    assert result.exit_code == 0
    assert "torch-grouped_mm (torch 2" in result.stdout
    assert (
        "vllm: vllm is not installed" in result.stdout
        or contestants.installed(contestants.RIVALS["vllm"]) is None
    )
    assert not (tmp_path / "none").exists()
    document = json.loads(call("--list", *HOST, "--json").stdout)
    assert set(document["rivals"]) | set(document["absent"]) == set(contestants.RIVALS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tokens", "4,x"], "'x'"),
        (["--tokens", "0"], "'0'"),
        (["--tokens", "²"], "'²'"),
        (["--tokens", ""], "''"),
        (["--tokens", "999999"], "131072"),
        (["--preset", "qwen3-30b,qwen3-31b"], "qwen3-30b"),
        (["--preset", "olmoe", "--config", "x"], "exclude"),
        (["--config", "nowhere"], "nowhere"),
        (["--routing", "zipf,zopf"], "zopf"),
        (["--routing", "dirichlet:0"], "concentration"),
        (["--routing", "text:kjv"], "traces only"),
        (["--routing", "trace:nowhere.npz"], "nowhere"),
        (["--routing", "trace:wide-128e-top8"], "128 experts"),
        (["--routing", "uniform", "--layer", "1"], "--layer"),
        (["--routing", "trace:small-16e-top4", "--layer", "9"], "0 to 3"),
        (["--routing", "trace:small-16e-top4", "--tokens", "16000"], "at most"),
        (["--policy", "stael"], "stael"),
        (["--rivals", "vlm"], "vlm"),
        (["--dtype", "fp8"], "fp8"),
        (["--dtype", "bfloat16,"], "''"),
        (["--tensor-parallel", "7"], "does not divide"),
        (["--backend", "cuda"], "torch sees no GPU"),
        (["--neighbour", "8"], "GPU"),
        (["--scale", "2"], "'2'"),
        (["--seconds", "0"], "--seconds"),
        (["--max-spread", "-1"], "--max-spread"),
        (["--max-spread", "nan"], "--max-spread"),
        (["--max-spread", "inf"], "--max-spread"),
        (["--seconds", "nan"], "--seconds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_with_status_2(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "_run", lambda *a: pytest.fail("it began to measure"))
    result = call(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_run", lambda *a: pytest.fail("it began to measure"))
    (tmp_path / "file").write_text("")
    result = call("--out", tmp_path / "file" / "below")
    assert result.exit_code == 2
    assert "not a folder" in result.stderr


def test_commands_name_no_folder_of_the_machine() -> None:
    text = command.command_text(["bench", "--config", "/x/y/z.json", "--scale", "1/8"])
    assert text == "weave-moe bench --config z.json --scale 1/8"


# --- as on a GPU, on tensors of the CPU ----------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command believes in a GPU; tensors stay on the CPU, and rates are as given."""
    events: list[Any] = []
    monkeypatch.setattr(command, "uses_gpu", lambda wanted: True)
    monkeypatch.setattr(command, "the_device", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (40e9, 80e9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Hopper H1")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)

    def rates(dtype: torch.dtype) -> Rates:
        events.append(dtype)
        return Rates(4.0, 600.0 if dtype == torch.bfloat16 else 500.0)

    monkeypatch.setattr(command, "measure_rates", rates)
    real = contestants.ours
    monkeypatch.setattr(command, "ours", lambda policy, backend, workers: real(policy, "reference"))

    def find(wanted: Any, device: Any) -> contestants.Found:
        names = tuple(wanted) if wanted is not None else ("torch-eager", "torch-grouped_mm")
        return contestants.Found(names, {"vllm": "vllm is not installed"})

    monkeypatch.setattr(command, "find", find)

    def in_turn(replays: Any, device: Any, seconds: float, **more: Any) -> dict[str, list[float]]:
        events.append(("time", seconds))
        return {name: [80.0 + 8 * i] * 8 for i, name in enumerate(replays)}

    @contextlib.contextmanager
    def held(sms: int, device: torch.device, **limits: float) -> Iterator[list[float]]:
        events.append(("hold", sms))
        yield [0.0]

    monkeypatch.setattr(measure, "in_turn", in_turn)
    monkeypatch.setattr(measure, "held", held)
    return events


def test_a_gpu_s_rows_are_held_against_its_own_ceilings(gpu: list[Any], tmp_path: Path) -> None:
    result = call(
        *("--preset", "olmoe", "--scale", "1/64", "--tokens", "3,2000", "--routing", "zipf"),
        *("--dtype", "bfloat16,float16", "--policy", "steal,counter", "--neighbour", "16"),
        *("--out", tmp_path),
    )
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path)
    assert len(rows) == 2 * 2 * 2 * 4
    assert [e for e in gpu if isinstance(e, torch.dtype)] == [torch.bfloat16, torch.float16]
    arms = [e for e in gpu if isinstance(e, tuple)]
    few, many = ("time", 0.4), ("time", 1.5)
    assert arms == [few, ("hold", 16), few, many, ("hold", 16), many] * 2
    for row in rows:
        assert row["evidence"] == command.GPU_EVIDENCE
        assert row["gpu"] == "Hopper H1"
        assert row["timed_as"] == ("calls" if row["contestant"] == "torch-eager" else "graph")
        assert row["matrix_tflops"] == (600.0 if row["dtype"] == "bfloat16" else 500.0)
        assert row["of_floor"] == pytest.approx(row["floor_us"] / row["us"], rel=1e-2, abs=1e-3)
        assert (row["neighbour_sms"] == 16) == ("over_alone" in row)
        assert row["rows_checked"] == min(row["T"], 256)
    page = (tmp_path / "bench.md").read_text()
    assert "torch-eager\\*" in page or "torch-eager*" in page
    assert "16 SMs held by another kernel" in page
    assert "read 4.00 TB/s, 600 TFLOP/s bfloat16, 500 TFLOP/s float16" in page
    assert "not evidence of speed" not in page
    assert "absent    vllm: vllm is not installed" in result.stdout


def test_a_gpu_refuses_what_it_cannot_hold(gpu: list[Any], tmp_path: Path) -> None:
    result = call("--preset", "deepseek-v3,kimi-k2", "--out", tmp_path)
    assert result.exit_code == 2
    assert "kimi-k2 has 34 GB" in result.stderr
    assert call("--neighbour", "132", "--out", tmp_path).exit_code == 2
    assert call("--dtype", "float32", "--out", tmp_path).exit_code == 2
    assert not [e for e in gpu if isinstance(e, torch.dtype)]


def test_the_default_layer_is_a_large_one_only_on_a_gpu(gpu: list[Any]) -> None:
    plan = command.read_plan(command.BenchOptions())
    assert [layer.name for layer, _ in plan.layers] == ["qwen3-30b"]
    assert plan.tokens == command.GPU_TOKENS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "uses_gpu", lambda wanted: False)
        plan = command.read_plan(command.BenchOptions())
    assert [layer.name for layer, _ in plan.layers] == [shipped_preset().name]
    assert plan.tokens == command.CPU_TOKENS


# --- pages and pictures ------------------------------------------------------------------------


def test_a_page_s_cells_hold_no_bars_and_no_lines() -> None:
    row = {
        **{"preset": "a|b", "dtype": "x", "routing": "r", "neighbour_sms": 0, "T": 1},
        **{"contestant": "c|d\n", "status": "not run", "error": "e|f\ng", "ours": False},
    }
    page = outputs.markdown(["head"], [("n|m", "1", "x\ny")], {"z": "<b>|"}, [row], ["w|\nv"])
    text = page.decode()
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (3, 4, len(outputs.CPU_HEAD) + 1), line
    assert "<b>" not in text


def test_the_best_is_bold_and_sections_are_in_order() -> None:
    base = {"preset": "p", "dtype": "d", "T": 4, "ours": True, "status": "timed"}
    numbers = {"us": 1.0, "p99_us": 2.0, "spread": 0.01, "tflops": 1.0, "tbs": 1.0}
    rows = [
        {**base, **numbers, "contestant": "b", "routing": r, "neighbour_sms": n, "to_best": t}
        for r, n, t in (("z", 0, 1.0), ("z", 8, 1.5), ("a", 0, 2.0))
    ]
    found = outputs.sections(rows)
    assert [s.title.split(" (")[0] for s in found] == [
        *("p, d, z", "p, d, z, 8 SMs held by another kernel", "p, d, a"),
    ]
    table = outputs.rich_table(found[0])
    assert table.rows[0].style == "bold"
    assert outputs.rich_table(found[1]).rows[0].style == ""


# --- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_graphs_are_timed_alone_and_beside_a_neighbour(tmp_path: Path) -> None:
    result = call(
        *("--preset", "olmoe", "--tokens", "1,64,2048", "--routing", "zipf", "--neighbour", "16"),
        *("--rivals", "torch-eager,torch-grouped_mm", "--out", tmp_path, "--max-spread", "0.3"),
    )
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path)
    assert {row["status"] for row in rows} == {"timed"}
    for row in rows:
        assert 0 < row["of_floor"] < 1.2
        assert row["timed_as"] == ("calls" if row["contestant"] == "torch-eager" else "graph")
        assert row["rel_err"] < 1e-2
    assert {row["neighbour_sms"] for row in rows} == {0, 16}
