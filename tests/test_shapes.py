from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from generators import Case, experts_case, experts_cases
from weave_moe.shapes import (
    POLICIES,
    Activation,
    ExpertsCall,
    LayerShape,
    SharedExperts,
    check_experts,
    check_shared,
    shared_call,
)


class TestActivation:
    @pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
    def test_a_kind_s_name_is_the_plain_activation(self, name: str) -> None:
        assert Activation.parse(name) == Activation(name)
        assert Activation(name).gated == (name != "relu2")

    def test_swiglu_oai_is_the_clamped_one(self) -> None:
        assert Activation.parse("swiglu_oai") == Activation("silu", 1.702, 7.0, 1.0)

    def test_the_largest_number_of_fp32_may_be_rounded(self) -> None:
        assert Activation("silu", limit=3.4028235e38).limit == 3.4028235e38

    def test_an_activation_is_taken_as_it_is(self) -> None:
        act = Activation("silu", limit=10.0)
        assert Activation.parse(act) is act

    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (lambda: Activation("swish"), ValueError, "kind.*silu, gelu.*'swish'"),
            (lambda: Activation(1), TypeError, "kind.*int"),
            (lambda: Activation("silu", limit=0.0), ValueError, "limit.*above 0.*0.0"),
            (lambda: Activation("silu", limit=float("nan")), ValueError, "limit.*finite.*nan"),
            # Numbers that fp32 has not.
            (lambda: Activation("silu", limit=3.5e38), ValueError, r"limit.*finite.*3\.5e\+38"),
            (lambda: Activation("silu", limit=1e-46), ValueError, "limit.*above 0.*1e-46"),
            (lambda: Activation("silu", alpha="1"), TypeError, "alpha.*number.*str"),
            (lambda: Activation("silu", up_offset=float("inf")), ValueError, "up_offset.*finite"),
            (lambda: Activation("silu", alpha=10**400), ValueError, "alpha.*finite"),
            (lambda: Activation("gelu", alpha=1.7), ValueError, "alpha.*silu.*gelu.*1.7"),
            (lambda: Activation("relu2", limit=7.0), ValueError, "limit.*gated.*relu2"),
            (lambda: Activation("relu2", up_offset=1.0), ValueError, "up_offset.*gated.*relu2"),
            (lambda: Activation.parse("swiglu"), ValueError, "activation.*swiglu_oai.*'swiglu'"),
            (lambda: Activation.parse(3), TypeError, "activation.*int"),
        ],
    )
    def test_what_is_not_allowed_is_named(
        self, make: Callable[[], Activation], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            make()


class TestLayerShape:
    @given(st.data())
    def test_sizes_are_those_of_the_weights(self, data: st.DataObject) -> None:
        case = data.draw(experts_cases())
        shape = case.call().shape
        assert shape.w13_rows == case.w13.size(1)
        one_expert = case.w13[0].nbytes + case.w2[0].nbytes
        assert shape.expert_bytes == one_expert
        assert shape.torch_dtype is case.x.dtype
        assert shape.element_size == case.x.element_size()

    def test_sizes_beyond_32_bits_are_exact(self) -> None:
        shape = LayerShape(7168, 2**21, 896, 16)
        assert shape.expert_bytes == 3 * 7168 * 2**21 * 2

    @pytest.mark.parametrize("field", ["hidden", "intermediate", "experts", "top_k"])
    @pytest.mark.parametrize(
        ("value", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]
    )
    def test_sizes_are_positive_ints(self, field: str, value: Any, error: type[Exception]) -> None:
        sizes: dict[str, Any] = {"hidden": 8, "intermediate": 4, "experts": 2, "top_k": 1}
        with pytest.raises(error, match=field):
            LayerShape(**{**sizes, field: value})

    def test_dtype_is_a_known_name(self) -> None:
        with pytest.raises(ValueError, match=r"dtype.*bfloat16, float16 or float32.*'float64'"):
            LayerShape(8, 4, 2, 1, "float64")


class TestCheckExperts:
    @given(experts_cases())
    def test_a_call_says_what_was_asked(self, case: Case) -> None:
        call = case.call()
        for name, value in zip(case.NAMES, case.args, strict=True):
            assert torch.equal(getattr(call, name), value)
        for name, value in case.options.items():
            assert getattr(call, name) is value or torch.equal(getattr(call, name), value)
        assert call.num_tokens == case.x.size(0)
        assert (call.policy, call.workspace, call.out) == ("auto", None, None)
        assert call.output().shape == call.x.shape
        with pytest.raises(FrozenInstanceError):
            call.policy = "steal"  # type: ignore[misc]

    @given(experts_cases(), st.data())
    def test_any_dimension_off_by_one_is_an_error_that_names_an_argument(
        self, case: Case, data: st.DataObject
    ) -> None:
        tensors = {
            n: v
            for n, v in (*zip(case.NAMES, case.args, strict=True), *case.options.items())
            if isinstance(v, Tensor) and n not in ("num_valid_tokens", "expert_map")
        }
        name = data.draw(st.sampled_from(sorted(tensors)))
        value = tensors[name]
        dim = data.draw(st.integers(0, value.dim() - 1))
        delta = data.draw(st.sampled_from((-1, 1)))
        size = list(value.shape)
        if size[dim] + delta < 0:
            delta = 1
        size[dim] += delta
        with pytest.raises(
            ValueError, match=r"^(x|w13|w2|topk_weights|topk_ids|b13|b2|residual) must"
        ):
            case.with_(**{name: torch.zeros(size, dtype=value.dtype)}).call()

    @given(experts_cases(), st.data())
    def test_any_other_number_of_dimensions_is_an_error_that_names_the_argument(
        self, case: Case, data: st.DataObject
    ) -> None:
        name = data.draw(st.sampled_from(case.NAMES))
        value: Tensor = getattr(case, name)
        wrong = data.draw(st.sampled_from([value.unsqueeze(0), value.flatten(), value.sum()]))
        if wrong.dtype is not value.dtype or wrong.dim() == value.dim():
            wrong = value.unsqueeze(0)
        with pytest.raises(ValueError, match=rf"^{name} must have shape \["):
            case.with_(**{name: wrong}).call()

    @pytest.mark.parametrize(
        ("name", "dtypes"),
        [
            ("x", (torch.float64, torch.int32, torch.bool)),
            ("w13", (torch.bfloat16, torch.float64)),
            ("w2", (torch.float16, torch.int8)),
            ("b13", (torch.bfloat16, torch.float64)),
            ("b2", (torch.bfloat16, torch.float64)),
            ("topk_weights", (torch.float64, torch.int32)),
            ("topk_ids", (torch.int16, torch.uint8, torch.float32, torch.bool)),
            ("expert_map", (torch.int64, torch.float32)),
            ("num_valid_tokens", (torch.int16, torch.float32)),
            ("residual", (torch.bfloat16, torch.float64)),
            ("out", (torch.bfloat16, torch.float64)),
        ],
    )
    def test_other_dtypes_are_type_errors_that_name_the_argument(
        self, name: str, dtypes: tuple[torch.dtype, ...]
    ) -> None:
        case = experts_case(biases=True, mapped=True, valid=3, residual=True)
        case = case.with_(out=torch.empty_like(case.x))
        case.call()
        value = case.options.get(name)
        value = getattr(case, name) if value is None else value
        for dtype in dtypes:
            with pytest.raises(TypeError, match=rf"^{name} must be .*got {str(dtype)[6:]}"):
                case.with_(**{name: value.to(dtype)}).call()

    @pytest.mark.parametrize(
        "name",
        [*Case.NAMES, "b13", "b2", "expert_map", "num_valid_tokens", "residual", "out"],
    )
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_what_is_no_dense_tensor_with_data_is_refused_by_name(self, name: str) -> None:
        case = experts_case(biases=True, mapped=True, valid=3, residual=True)
        case = case.with_(out=torch.empty_like(case.x))
        value = case.options.get(name)
        value = getattr(case, name) if value is None else value
        with pytest.raises(TypeError, match=rf"^{name} must be a torch.Tensor, got list"):
            case.with_(**{name: value.tolist() if value.dim() else [value.tolist()]}).call()
        with pytest.raises(ValueError, match=rf"^{name} is on the meta device"):
            case.with_(**{name: value.to("meta")}).call()
        if value.dim() == 2:
            with pytest.raises(ValueError, match=rf"^{name} must be a dense"):
                case.with_(**{name: value.to_sparse()}).call()
            nested = torch.nested.as_nested_tensor(list(value))
            with pytest.raises(ValueError, match=rf"^{name} must be a dense.*nested"):
                case.with_(**{name: nested}).call()

    @pytest.mark.parametrize("name", ["x", "w13", "w2", "topk_weights"])
    def test_a_view_whose_memory_holds_the_opposite_is_refused(self, name: str) -> None:
        case = experts_case()
        negated = torch.complex(torch.zeros(()), getattr(case, name)).conj().imag
        assert negated.is_neg()
        with pytest.raises(ValueError, match=rf"^{name} must not be a lazily negated view"):
            case.with_(**{name: negated}).call()

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"activation": "swish"}, ValueError, "^activation must be one of .*'swish'"),
            ({"activation": None}, TypeError, "^activation must be .*NoneType"),
            ({"policy": "stealing"}, ValueError, "^policy must be one of auto, .*'stealing'"),
            ({"policy": None}, TypeError, "^policy must be .*NoneType"),
            ({"interleaved": 1}, TypeError, "^interleaved must be True or False, got 1"),
            ({"weight_on_input": "no"}, TypeError, "^weight_on_input must be .*'no'"),
            ({"workspace": 7}, TypeError, "^workspace must be None or .*Workspace, got int"),
            (
                {"num_valid_tokens": torch.zeros(2, dtype=torch.int32)},
                ValueError,
                r"^num_valid_tokens must hold one element, got shape \[2\]",
            ),
            ({"num_valid_tokens": 3}, TypeError, "^num_valid_tokens must be a torch.Tensor"),
            (
                {"expert_map": torch.zeros(0, dtype=torch.int32)},
                ValueError,
                "^expert_map must have at least 1",
            ),
            ({"x": torch.zeros(5, 0)}, ValueError, r"^x must have at least 1.*\[5, 0\]"),
            ({"w13": torch.zeros(0, 16, 16)}, ValueError, "^w13 must have at least 1"),
            ({"w2": torch.zeros(4, 16, 0)}, ValueError, "^w2 must have at least 1"),
            (
                {
                    "topk_ids": torch.zeros(5, 0, dtype=torch.int32),
                    "topk_weights": torch.zeros(5, 0),
                },
                ValueError,
                "^topk_ids must have at least 1 in dimension 1",
            ),
        ],
    )
    def test_what_is_not_allowed_is_named(
        self, changes: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            experts_case().with_(**changes).call()

    def test_relu2_has_no_gate_rows_to_interleave(self) -> None:
        case = experts_case(activation="relu2")
        with pytest.raises(ValueError, match=r"^interleaved must be False for relu2"):
            case.with_(interleaved=True).call()

    @pytest.mark.parametrize("policy", POLICIES)
    def test_every_policy_is_taken(self, policy: str) -> None:
        assert experts_case().with_(policy=policy).call().policy == policy

    @given(experts_cases())
    def test_small_tensors_may_have_any_strides(self, case: Case) -> None:
        """x, weights, ids and biases: a transposed copy, and every other column of a wider one."""

        def strided(value: Tensor) -> tuple[Tensor, Tensor]:
            wide = torch.stack((value, torch.zeros_like(value)), dim=-1).flatten(-2)
            return value.T.contiguous().T, wide[..., ::2]

        names = ["x", "topk_weights", "topk_ids"]
        options = ("b13", "b2", "residual")
        names += [name for name in options if case.options.get(name) is not None]
        for name in names:
            value = getattr(case, name) if name in case.NAMES else case.options[name]
            for other in strided(value):
                given_ = getattr(case.with_(**{name: other}).call(), name)
                assert given_.is_contiguous()
                assert torch.equal(given_, value)

    @pytest.mark.parametrize("name", ["w13", "w2"])
    def test_weights_are_contiguous_in_their_last_dimension_and_never_copied(
        self, name: str
    ) -> None:
        case = experts_case()
        value: Tensor = getattr(case, name)
        wide = torch.zeros(*value.shape[:2], value.size(2) + 8)
        view = wide[:, :, : value.size(2)]
        assert getattr(case.with_(**{name: view}).call(), name).data_ptr() == wide.data_ptr()
        transposed = value.transpose(1, 2).contiguous().transpose(1, 2)
        with pytest.raises(ValueError, match=rf"^{name} must be contiguous in its last dimension"):
            case.with_(**{name: transposed}).call()

    def test_a_last_dimension_of_one_is_contiguous_whatever_its_stride(self) -> None:
        case = experts_case(intermediate=1)
        w2 = torch.as_strided(case.w2.clone(), case.w2.shape, (16, 1, 5))
        case.with_(w2=w2).call()

    def test_out_is_a_contiguous_tensor_of_x_s_shape(self) -> None:
        case = experts_case(tokens=5, hidden=16)
        for size in ((5, 15), (4, 16), (16, 5)):
            with pytest.raises(ValueError, match=r"^out must have x's shape \[5, 16\]"):
                case.with_(out=torch.empty(size)).call()
        with pytest.raises(ValueError, match=r"^out must be contiguous, got strides"):
            case.with_(out=torch.empty(16, 5).T).call()
        out = torch.empty(5, 16, requires_grad=True)
        with pytest.raises(ValueError, match=r"^out must not require grad"):
            case.with_(out=out).call()
        with torch.no_grad():
            case.with_(out=out).call()

    @pytest.mark.parametrize("name", ["x", "w13", "w2", "topk_weights", "b2"])
    def test_out_shares_no_memory_with_an_input(self, name: str) -> None:
        case = experts_case(tokens=4, hidden=4, top_k=4, biases=True)
        value = getattr(case, name) if name in case.NAMES else case.options[name]
        out = value.detach().reshape(-1)[:16].view(4, 4)
        with pytest.raises(ValueError, match=f"^out must share no memory with {name}"):
            case.with_(out=out).call()

    @pytest.mark.parametrize("shift", [-3, -1, 1, 3])
    def test_out_may_not_overlap_an_input_in_part(self, shift: int) -> None:
        case = experts_case(tokens=4, hidden=4)
        block = torch.zeros(10, 4)
        x, out = block[3:7], block[3 + shift : 7 + shift]
        with pytest.raises(ValueError, match=r"^out must share no memory with x"):
            case.with_(x=x, out=out).call()

    @pytest.mark.parametrize("rows", [0, 1, 5])
    def test_out_may_be_the_residual_itself(self, rows: int) -> None:
        case = experts_case(tokens=rows, residual=True)
        residual = case.options["residual"]
        call = case.with_(out=residual).call()
        assert call.out is residual
        assert call.residual is not None
        assert call.residual.data_ptr() == residual.data_ptr()
        # Which does not let it be another input as well.
        if rows:
            with pytest.raises(ValueError, match=r"^out must share no memory with x, but overlaps"):
                case.with_(x=residual, out=residual).call()
        case.with_(residual=case.x).call()

    @pytest.mark.parametrize("shift", [-15, -1, 1, 15])
    def test_out_may_not_overlap_the_residual_in_part(self, shift: int) -> None:
        case = experts_case(tokens=4, hidden=4)
        block = torch.zeros(64)
        residual, out = (block[at : at + 16].view(4, 4) for at in (20, 20 + shift))
        with pytest.raises(ValueError, match=r"^out must be residual itself or share no memory"):
            case.with_(residual=residual, out=out).call()
        beside = block[36:52].view(4, 4)
        case.with_(residual=residual, out=beside).call()

    def test_a_residual_has_x_s_shape(self) -> None:
        case = experts_case(tokens=5, hidden=16)
        for size in ((5, 15), (4, 16), (16, 5), (1, 16)):
            with pytest.raises(ValueError, match=r"^residual must have x's shape \[5, 16\], got"):
                case.with_(residual=torch.empty(size)).call()

    def test_out_may_lie_beside_an_input_in_one_block(self) -> None:
        case = experts_case(tokens=4, hidden=4)
        block = torch.zeros(8, 4)
        block[:4] = case.x
        call = case.with_(x=block[:4], out=block[4:]).call()
        assert call.out is not None

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["w13", "w2", "topk_weights", "topk_ids"])
    def test_tensors_lie_on_one_device(self, name: str) -> None:
        case = experts_case()
        with pytest.raises(ValueError, match=f"^{name} must be on x's device cpu, got cuda:0"):
            case.with_(**{name: getattr(case, name).cuda()}).call()

    def test_values_are_never_looked_at(self) -> None:
        """NaN, infinities and any id are values like others (looking would wait for a GPU)."""
        case = experts_case(routing="out_of_range")
        nan = torch.full_like(case.topk_weights, float("nan"))
        case.with_(x=torch.full_like(case.x, float("inf")), topk_weights=nan).call()


class TestShared:
    def shared(self, **changes: Any) -> SharedExperts:
        parts: dict[str, Any] = {"w13": torch.zeros(6, 16), "w2": torch.zeros(16, 3)}
        return SharedExperts(**{**parts, **changes})

    @pytest.mark.parametrize("gate", [None, torch.zeros(16), torch.zeros(1, 16)])
    def test_what_fits_is_taken(self, gate: Tensor | None) -> None:
        check_shared(self.shared(gate=gate), torch.zeros(5, 16), Activation("silu"))

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"w13": torch.zeros(5, 16)}, ValueError, r"^shared\.w13 must have 6 in dimension 0"),
            ({"w13": torch.zeros(6, 15)}, ValueError, r"^shared\.w13 must have 16 in dimension 1"),
            (
                {"w13": torch.zeros(1, 6, 16)},
                ValueError,
                r"^shared\.w13 must have shape \[2Is, H\]",
            ),
            ({"w2": torch.zeros(15, 3)}, ValueError, r"^shared\.w2 must have 16 in dimension 0"),
            ({"w2": torch.zeros(16, 0)}, ValueError, r"^shared\.w2 must have at least 1"),
            ({"w2": torch.zeros(16, 3).half()}, TypeError, r"^shared\.w2 must be float32"),
            ({"w2": torch.zeros(3, 16).T}, ValueError, r"^shared\.w2 must be contiguous"),
            ({"gate": torch.zeros(15)}, ValueError, r"^shared\.gate must have shape \[16\] or"),
            ({"gate": torch.zeros(16, 1)}, ValueError, r"^shared\.gate must have shape \[16\] or"),
            ({"gate": torch.zeros(1, 1, 16)}, ValueError, r"^shared\.gate must have shape \[H\]"),
            ({"gate": 1.0}, TypeError, r"^shared\.gate must be a torch.Tensor, got float"),
        ],
    )
    def test_what_does_not_fit_is_named(
        self, changes: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            check_shared(self.shared(**changes), torch.zeros(5, 16), Activation("silu"))

    def test_other_objects_are_type_errors(self) -> None:
        with pytest.raises(TypeError, match=r"^shared must be None or a SharedExperts, got tuple"):
            check_shared((1, 2), torch.zeros(5, 16), Activation("silu"))

    def test_it_is_a_call_with_one_expert_and_its_gate_as_weight(self) -> None:
        x = torch.randn(5, 16)
        gate = torch.randn(16)
        call = shared_call(x, self.shared(gate=gate), Activation("silu"))
        assert isinstance(call, ExpertsCall)
        assert (call.shape.experts, call.shape.top_k, call.shape.intermediate) == (1, 1, 3)
        assert not call.topk_ids.any()
        torch.testing.assert_close(call.topk_weights[:, 0], torch.sigmoid((x * gate).sum(1)))
        assert shared_call(x, self.shared(), Activation("silu")).topk_weights.eq(1).all()


def test_check_experts_takes_arguments_by_name_after_the_fifth() -> None:
    case = experts_case()
    with pytest.raises(TypeError):
        check_experts(*case.args, "silu")  # type: ignore[misc]
