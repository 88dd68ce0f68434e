"""The experts on every backend: held to a plain loop, for every kind of ids, size and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from generators import (
    ACTIVATIONS,
    AWKWARD_SIZES,
    DTYPES,
    ROUTINGS,
    TOLERANCE,
    Case,
    Guarded,
    assert_close,
    assert_rows_close,
    experts_case,
    experts_cases,
    generator,
    naive,
    poison_allocator,
    poisoned,
)
from weave_moe import Activation, SharedExperts, fused_experts, reference
from weave_moe.reference import activate, experts_reference, local_experts, shared_reference
from weave_moe.shapes import POLICIES

NAN, INF = float("nan"), float("inf")


def run(case: Case, backend: str) -> Tensor:
    """The case on `backend`, with freed memory full of NaN before."""
    poison_allocator()
    return fused_experts(*case.args, **case.options, backend=backend)


class TestTheReferenceItself:
    @given(experts_cases())
    def test_without_rounding_it_is_the_plain_loop_in_float64(self, case: Case) -> None:
        want, magnitude = naive(case)
        got = experts_reference(case.call(), rounding=False, compute_dtype=torch.float64)
        assert got.dtype is torch.float64
        assert ((got - want).abs() <= 1e-12 * (magnitude + 1e-3)).all()

    @given(experts_cases())
    def test_it_rounds_where_the_contract_says_and_nowhere_else(self, case: Case) -> None:
        """Bit for bit: in float64, sums are exact enough for a rounding to fall the same way."""
        want, _ = naive(case, rounding=True)
        got = experts_reference(case.call(), compute_dtype=torch.float64)
        assert got.dtype is case.x.dtype
        assert torch.equal(got, want.to(got.dtype))

    @given(experts_cases())
    def test_fp32_inside_stays_within_rounding(self, case: Case) -> None:
        assert_close(experts_reference(case.call()), case)

    @given(experts_cases(), st.integers(1, 5))
    def test_slabs_of_tokens_change_nothing(self, case: Case, tokens: int) -> None:
        """Results of float64 inside and rounded, so that how torch blocks a product is not seen."""
        call = case.call()
        whole = experts_reference(call, compute_dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                reference, "SLAB_BYTES", tokens * call.shape.top_k * call.shape.hidden * 8
            )
            cut = experts_reference(call, compute_dtype=torch.float64)
        assert torch.equal(whole, cut)

    @given(experts_cases(max_size=8, max_tokens=8))
    def test_gradients_are_those_of_the_plain_loop(self, case: Case) -> None:
        leaves = {
            name: value.float().requires_grad_()
            for name, value in case.call().inputs().items()
            if value.is_floating_point()
        }
        case = case.with_(**leaves)
        direction = torch.randn(case.x.shape, generator=generator(8)).double()
        got = experts_reference(case.call(), rounding=False, compute_dtype=torch.float64)
        want, _ = naive(case)
        if not want.requires_grad or not case.x.size(0):
            assert not got.any()
            return
        grads, expected = (
            torch.autograd.grad(
                (y * direction).sum(),
                list(leaves.values()),
                allow_unused=True,
                materialize_grads=True,
            )
            for y in (got, want)
        )
        for name, one, other in zip(leaves, grads, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)

    def test_fp16_rows_may_leave_fp16_s_range_before_they_are_weighted(self) -> None:
        case = experts_case(dtype=torch.float16, tokens=3, top_k=1)
        case = case.with_(
            w2=(case.w2.float() * 3e4).clamp(-6e4, 6e4).half(),
            x=case.x * 2,
            topk_weights=torch.full((3, 1), 2.0**-16),
        )
        rows, _ = naive(case.with_(topk_weights=torch.ones(3, 1)))
        assert rows.abs().max() > torch.finfo(torch.float16).max
        got = experts_reference(case.call())
        assert got.isfinite().all()
        assert_close(got, case)

    @given(st.integers(0, 2**31), st.booleans())
    def test_activate_takes_both_row_orders(self, seed: int, interleaved: bool) -> None:
        h = torch.randn(5, 12, generator=generator(seed))
        gate_up = torch.stack(h.chunk(2, dim=1), dim=-1).flatten(1) if interleaved else h
        got = activate(gate_up, Activation("silu"), interleaved=interleaved)
        want = torch.nn.functional.silu(h[:, :6]) * h[:, 6:]
        torch.testing.assert_close(got, want)

    @given(experts_cases())
    def test_local_experts_are_in_range_or_minus_one(self, case: Case) -> None:
        call = case.call()
        local = local_experts(call)
        assert local.dtype is torch.int64
        assert ((local >= -1) & (local < call.shape.experts)).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("gated", [False, True])
    def test_shared_experts_are_an_mlp_with_a_sigmoid_gate(
        self, dtype: torch.dtype, gated: bool
    ) -> None:
        g = generator(7)
        x, w13, w2 = (
            torch.randn(size, generator=g) / fan
            for size, fan in (((5, 16), 1.0), ((12, 16), 4.0), ((16, 6), 1.5))
        )
        gate = torch.randn(1, 16, generator=g) / 4
        x, w13, w2, gate = (t.to(dtype) for t in (x, w13, w2, gate))
        got = shared_reference(x, SharedExperts(w13, w2, gate if gated else None))
        h = x.double() @ w13.double().T
        want = (torch.nn.functional.silu(h[:, :6]) * h[:, 6:]) @ w2.double().T
        if gated:
            want = want * torch.sigmoid(x.double() @ gate.double().T)
        assert got.dtype is dtype
        assert_rows_close(got, want, {torch.float32: 1e-5}.get(dtype, 2.0**-7))


class TestEveryBackend:
    @settings(max_examples=60)
    @given(case=experts_cases())
    def test_any_call_is_right(self, case: Case, backend: str) -> None:
        assert_close(run(case, backend), case)

    @pytest.mark.parametrize("routing", sorted(ROUTINGS))
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_kind_of_routing(self, routing: str, dtype: torch.dtype, backend: str) -> None:
        case = experts_case(37, 24, 20, 9, 3, dtype=dtype, routing=routing, seed=1)
        assert_close(run(case, backend), case)

    @pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_activation_on_values_that_its_limits_cut(
        self, activation: Activation, dtype: torch.dtype, backend: str
    ) -> None:
        """|gate| and |up| reach 50, and biases are set."""
        case = experts_case(16, 24, 12, 5, 2, dtype=dtype, activation=activation, biases=True)
        case = case.with_(x=case.x * 16, w2=case.w2 / 128)
        h = (case.x.double() @ case.w13[0].double().T).abs().max()
        assert h > 40
        assert_close(run(case, backend), case)

    def test_activations_differ(self, backend: str) -> None:
        """Inputs on which a forgotten limit, alpha, offset or kind would be seen."""
        case = experts_case(8, 24, 12, 3, 2)
        case = case.with_(x=case.x * 8)
        gated = [
            *(act for act in ACTIVATIONS if act.gated),
            Activation("silu", 1.702, 7.0, 0.0),
            Activation("silu", 1.0, 7.0, 1.0),
            Activation("silu", 1.702, None, 1.0),
        ]
        results = [run(case.with_(activation=act), backend) for act in gated]
        for i, one in enumerate(results):
            for other in results[:i]:
                assert (one - other).abs().max() > 1e-4

    @pytest.mark.parametrize("size", AWKWARD_SIZES)
    def test_awkward_sizes(self, size: int, backend: str) -> None:
        for hidden, intermediate in ((size, 24), (40, size)):
            case = experts_case(3, hidden, intermediate, 2, 1, dtype=torch.bfloat16, seed=size)
            got = run(case, backend)
            assert_close(got, case)
            assert 0.2 < got.float().square().mean().sqrt() < 5

    @pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (1, 7), (7, 1), (31, 33)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_tiny_and_odd_sizes(
        self, hidden: int, intermediate: int, dtype: torch.dtype, backend: str
    ) -> None:
        case = experts_case(9, hidden, intermediate, 3, 2, dtype=dtype)
        assert_close(run(case, backend), case)

    @pytest.mark.parametrize("top_k", [1, 2, 8, 16, 24])
    def test_top_k_up_to_all_experts(self, top_k: int, backend: str) -> None:
        case = experts_case(4, 16, 8, 24, top_k)
        assert_close(run(case, backend), case)

    @pytest.mark.parametrize("experts", [1, 8, 128, 129, 256, 512, 896])
    def test_numbers_of_experts(self, experts: int, backend: str) -> None:
        case = experts_case(64, 8, 4, experts, min(8, experts), routing="skewed")
        assert_close(run(case, backend), case)

    @pytest.mark.parametrize("tokens", [0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257])
    @pytest.mark.parametrize("routing", ["distinct", "first"])
    def test_numbers_of_tokens(self, tokens: int, routing: str, backend: str) -> None:
        case = experts_case(tokens, 12, 6, 5, 2, dtype=torch.bfloat16, routing=routing)
        assert_close(run(case, backend), case)

    def test_every_number_of_tokens_up_to_340(self, backend: str) -> None:
        """Sizes between tile widths, and 304 and 336, where another kernel wrote out of bounds."""
        case = experts_case(340, 12, 6, 5, 2, dtype=torch.bfloat16, routing="skewed", seed=4)
        want, magnitude = naive(case)
        allowed = TOLERANCE[torch.bfloat16] * (magnitude + 0.5)
        whole = run(case, backend)
        for tokens in range(341):
            guarded = Guarded(tokens, 12, dtype=torch.bfloat16)
            head = {
                name: getattr(case, name)[:tokens] for name in ("x", "topk_weights", "topk_ids")
            }
            got = fused_experts(*case.with_(**head).args, backend=backend, out=guarded.tensor)
            guarded.check()
            assert ((got.double() - want[:tokens]).abs() <= allowed[:tokens]).all(), tokens
            if backend != "reference":
                # A token's bits do not depend on the rest of the batch.
                assert torch.equal(got, whole[:tokens]), tokens

    def test_more_slots_than_16_bits_count(self, backend: str) -> None:
        case = experts_case(8200, 4, 2, 8, 8, seed=3)
        assert case.topk_ids.numel() > 65535
        small = case.with_(
            x=case.x[-20:], topk_weights=case.topk_weights[-20:], topk_ids=case.topk_ids[-20:]
        )
        assert_close(run(case, backend)[-20:], small)

    def test_no_tokens_is_an_empty_result(self, backend: str) -> None:
        case = experts_case(tokens=0)
        assert run(case, backend).shape == (0, 16)
        out = torch.empty(0, 16)
        assert run(case.with_(out=out), backend) is out

    @given(case=experts_cases(max_size=12, max_tokens=12))
    def test_a_row_without_slots_is_exactly_zero_or_the_residual_s(
        self, case: Case, backend: str
    ) -> None:
        """Even where weights, tokens and biases are NaN: skipped is not multiplied by zero."""
        nan = {
            n: torch.full_like(getattr(case, n), NAN) for n in ("x", "w13", "w2", "topk_weights")
        }
        case = case.with_(**nan, topk_ids=torch.full_like(case.topk_ids, -1))
        got = run(case, backend)
        residual = case.options.get("residual")
        assert torch.equal(got, torch.zeros_like(got) if residual is None else residual)

    @given(case=experts_cases(max_size=12, max_tokens=12))
    def test_what_skipped_slots_and_unused_experts_hold_is_never_read(
        self, case: Case, backend: str
    ) -> None:
        local = local_experts(case.call())
        skipped = local < 0
        used = set(local.flatten().tolist())
        w13, w2 = case.w13.clone(), case.w2.clone()
        for expert in set(range(case.w2.size(0))) - used:
            w13[expert], w2[expert] = NAN, INF
        x = case.x.clone()
        x[skipped.all(dim=1)] = NAN
        dirty = case.with_(
            x=x, w13=w13, w2=w2, topk_weights=case.topk_weights.masked_fill(skipped, NAN)
        )
        assert torch.equal(run(dirty, backend), run(case, backend))

    @given(case=experts_cases(max_size=12, max_tokens=12))
    def test_a_zero_weight_is_not_a_skip(self, case: Case, backend: str) -> None:
        """Zero times a NaN row is NaN: zero weights are not special."""
        case = case.with_(
            x=torch.full_like(case.x, NAN), topk_weights=torch.zeros_like(case.topk_weights)
        )
        used = (local_experts(case.call()) >= 0).any(dim=1)
        # relu(NaN)^2 and the rest keep NaN.
        assert torch.equal(run(case, backend).isnan().all(dim=1), used)

    def test_nan_of_one_token_stays_with_it(self, backend: str) -> None:
        case = experts_case(12, routing="skewed", seed=2)
        x = case.x.clone()
        x[5] = NAN
        got = run(case.with_(x=x), backend)
        assert got[5].isnan().all()
        rest = [t for t in range(12) if t != 5]
        assert_rows_close(got[rest], run(case, backend)[rest], 1e-5)

    @pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
    def test_ids_are_read_in_their_own_width(self, id_dtype: torch.dtype, backend: str) -> None:
        """Upper halves of int64 ids count: 2^32 is not expert 0."""
        case = experts_case(6, routing="holes", id_dtype=id_dtype)
        assert_close(run(case, backend), case)
        if id_dtype is torch.int64:
            far = case.topk_ids + 2**32
            got = run(case.with_(topk_ids=far), backend)
            assert torch.equal(got, torch.zeros_like(got))

    @pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
    def test_an_expert_map_skips_what_is_not_here(
        self, id_dtype: torch.dtype, backend: str
    ) -> None:
        case = experts_case(20, 16, 8, 4, 3, mapped=True, id_dtype=id_dtype)
        assert_close(run(case, backend), case)
        # Entries that are no local expert are skipped as well.
        wild = case.options["expert_map"].clone()
        wild[1], wild[3] = 4, -7
        assert_close(run(case.with_(expert_map=wild), backend), case.with_(expert_map=wild))
        # Ids beyond the map, on both sides.
        ids = case.topk_ids.clone()
        ids[0], ids[1], ids[2] = 8, -1, 2**31 - 1
        assert_close(run(case.with_(topk_ids=ids), backend), case.with_(topk_ids=ids))

    def test_global_ids_without_a_map_skip(self, backend: str) -> None:
        case = experts_case(20, 16, 8, 32, 4)
        local = case.with_(w13=case.w13[:4], w2=case.w2[:4])
        assert_close(run(local, backend), local)

    def test_halves_of_the_experts_add_up(self, backend: str) -> None:
        """Expert parallelism: each half of the experts computes its part of the sum."""
        case = experts_case(20, 16, 8, 6, 3)
        halves = []
        for first in (0, 3):
            expert_map = torch.full((6,), -1, dtype=torch.int32)
            expert_map[first : first + 3] = torch.arange(3, dtype=torch.int32)
            part = case.with_(
                w13=case.w13[first : first + 3],
                w2=case.w2[first : first + 3],
                expert_map=expert_map,
            )
            halves.append(run(part, backend))
        assert_close(halves[0] + halves[1], case)

    @pytest.mark.parametrize("valid", [-3, 0, 1, 5, 11, 12, 99])
    @pytest.mark.parametrize("count_dtype", [torch.int32, torch.int64])
    def test_padding_rows_are_zero_and_read_nothing(
        self, valid: int, count_dtype: torch.dtype, backend: str
    ) -> None:
        case = experts_case(12, dtype=torch.bfloat16)
        count = torch.tensor([valid], dtype=count_dtype)
        x = case.x.clone()
        x[max(valid, 0) :] = NAN
        got = run(
            case.with_(x=x, num_valid_tokens=count, out=poisoned(12, 16, dtype=torch.bfloat16)),
            backend,
        )
        live = min(max(valid, 0), 12)
        assert torch.equal(got[live:], torch.zeros_like(got[live:]))
        head = case.with_(
            x=case.x[:live], topk_weights=case.topk_weights[:live], topk_ids=case.topk_ids[:live]
        )
        assert_close(got[:live], head)

    def test_the_count_is_read_when_the_call_runs(self, backend: str) -> None:
        count = torch.tensor(2, dtype=torch.int32)
        case = experts_case(6).with_(num_valid_tokens=count)
        assert not run(case, backend)[2:].any()
        count.fill_(5)
        assert run(case, backend)[4].any()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_duplicates_count_twice(self, dtype: torch.dtype, backend: str) -> None:
        case = experts_case(7, 16, 8, 4, 3, dtype=dtype, routing="duplicates")
        assert_close(run(case, backend), case)
        summed = case.with_(
            topk_ids=case.topk_ids[:, :1].contiguous(),
            topk_weights=case.topk_weights.sum(1, keepdim=True),
        )
        assert_close(run(case, backend), summed, factor=2)

    @pytest.mark.parametrize("top_k", [1, 3])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_weight_on_the_input_is_applied_once(
        self, top_k: int, dtype: torch.dtype, backend: str
    ) -> None:
        case = experts_case(9, 16, 8, 4, top_k, dtype=dtype, weight_on_input=True)
        half = case.with_(topk_weights=torch.full((9, top_k), 0.5))
        got = run(half, backend)
        assert_close(got, half)
        # silu is not homogeneous, so that weighting input, output or both are three results.
        on_output = run(half.with_(weight_on_input=False), backend)
        assert (got - on_output).abs().max() > 0.05
        assert (got - on_output * 0.5).abs().max() > 0.05

    @given(case=experts_cases(max_size=16, max_tokens=16), policy=st.sampled_from(POLICIES))
    def test_a_policy_changes_no_bit(self, case: Case, policy: str, backend: str) -> None:
        got = run(case.with_(policy=policy), backend)
        assert torch.equal(got, run(case, backend))

    @given(case=experts_cases(max_size=16, max_tokens=16))
    def test_calls_repeat_to_the_bit(self, case: Case, backend: str) -> None:
        first = run(case, backend)
        for _ in range(3):
            assert torch.equal(run(case, backend), first)

    @given(case=experts_cases())
    def test_out_is_written_whole_and_nothing_beyond_it(self, case: Case, backend: str) -> None:
        guarded = Guarded(*case.x.shape, dtype=case.x.dtype)
        got = run(case.with_(out=guarded.tensor), backend)
        assert got is guarded.tensor
        guarded.check()
        assert torch.equal(got, run(case, backend))

    @given(case=experts_cases())
    def test_inputs_are_left_alone(self, case: Case, backend: str) -> None:
        before = {name: value.clone() for name, value in case.call().inputs().items()}
        run(case, backend)
        for name, value in case.call().inputs().items():
            assert torch.equal(value, before[name]), name

    @given(case=experts_cases())
    def test_inputs_beside_poison_give_the_same(self, case: Case, backend: str) -> None:
        """Every input in a block of its own between NaN: what lies beyond its ends is not read."""
        want = run(case, backend)
        changes: dict[str, Any] = {}
        for name, value in case.call().inputs().items():
            block = poisoned(value.numel() + 128, dtype=value.dtype)
            block[64 : 64 + value.numel()] = value.flatten()
            changes[name] = block[64 : 64 + value.numel()].view(value.shape)
        assert torch.equal(run(case.with_(**changes), backend), want)

    @given(case=experts_cases(max_size=16, max_tokens=16))
    def test_views_of_larger_weights_give_the_same(self, case: Case, backend: str) -> None:
        """Rows and experts that lie apart, NaN between (a backend may refuse, with a reason)."""

        def apart(value: Tensor) -> Tensor:
            experts, rows, columns = value.shape
            wide = poisoned(experts, rows + 3, columns + 8, dtype=value.dtype)
            wide[:, 1 : rows + 1, :columns] = value
            return wide[:, 1 : rows + 1, :columns]

        views = case.with_(w13=apart(case.w13), w2=apart(case.w2))
        try:
            got = run(views, backend)
        except ValueError as error:
            assert str(error).startswith(f"backend {backend!r} cannot run this call: ")  # noqa: PT017
            return
        if backend == "reference":
            # Strides choose torch's kernel, and so the last bits.
            assert_close(got, case)
        else:
            assert torch.equal(got, run(case, backend))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_tokens_and_weights_may_be_strided(self, dtype: torch.dtype, backend: str) -> None:
        case = experts_case(9, dtype=dtype)
        other = case.with_(
            x=case.x.T.contiguous().T,
            topk_weights=torch.stack((case.topk_weights, case.topk_weights * 7), -1)[..., 0],
            topk_ids=case.topk_ids.T.contiguous().T,
        )
        assert torch.equal(run(other, backend), run(case, backend))

    def test_offsets_beyond_32_bits(self, tmp_path: Path, backend: str) -> None:
        """Expert 1 begins 2^31 elements behind expert 0, in a file that is mostly a hole."""
        case = experts_case(3, 16, 8, 2, 1, dtype=torch.bfloat16, routing="one_each")
        count = 2**31 + 16 * 16
        try:
            big = torch.from_file(
                str(tmp_path / "hole"), shared=True, size=count, dtype=torch.bfloat16
            )
        except RuntimeError as error:
            pytest.skip(f"no room for a sparse file of {2 * count} bytes: {error}")
        changes = {}
        for name in ("w13", "w2"):
            value: Tensor = getattr(case, name)
            view = big.as_strided(value.shape, (2**31, value.size(2), 1))
            view.copy_(value)
            changes[name] = view
            try:
                got = run(case.with_(**changes), backend)
            except ValueError as error:
                pytest.skip(str(error))
            assert_close(got, case)
            changes = {}

    def test_a_named_backend_says_what_it_cannot_run(self) -> None:
        case = experts_case()
        with pytest.raises(ValueError, match=r"^backend 'cuda' cannot run this call: "):
            fused_experts(*case.args, **case.options, backend="cuda")
        with pytest.raises(
            ValueError, match=r"^backend must be one of auto, cuda, host or reference"
        ):
            fused_experts(*case.args, backend="tpu")
