"""What a call of the layer's experts is made of, and every check it must pass.

`check_experts` turns a request into an `ExpertsCall`, the one form that backends receive: they may
rely on all that is said there and never look at a user's arguments again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = [
    "DTYPES",
    "POLICIES",
    "Activation",
    "ExpertsCall",
    "LayerShape",
    "SharedExperts",
    "as_written",
    "check_experts",
    "check_shared",
    "is_recorded",
    "lacks_memory",
    "shared_call",
]

POLICIES: Final = (
    "auto",
    "steal",
    "counter",
    "static_strided",
    "static_expert",
    "static_tail",
    "window",
)
"""Names of the scheduling policies: who runs a task. They never change a result."""

DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""Types of activations and weights, by the name that `LayerShape.dtype` uses."""

_COMPUTE: Final = tuple(DTYPES.values())
_IDS: Final = (torch.int32, torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def check_choice(name: str, value: object, allowed: Sequence[str]) -> str:
    """`value` if it is one of `allowed`; else TypeError or ValueError naming argument `name`."""
    if not isinstance(value, str):
        raise TypeError(
            f"{name} must be a str, one of {_joined(allowed)}, got {type(value).__name__}"
        )
    if value not in allowed:
        raise ValueError(f"{name} must be one of {_joined(allowed)}, got {value!r}")
    return value


def check_flag(name: str, value: object) -> bool:
    """`value` if it is a bool; else TypeError naming argument `name`."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_count(name: str, value: object, least: int = 1) -> int:
    """`value` if it is an int of at least `least`; else TypeError or ValueError naming `name`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


_BEYOND_FP32: Final = (2 - 2.0**-24) * 2.0**127  # the least that rounds to infinity


def check_number(name: str, value: object) -> float:
    """`value` as a float if it is a number that fp32 has, however rounded; else TypeError or
    ValueError naming `name`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond float's range
        number = math.inf
    if not abs(number) < _BEYOND_FP32:
        raise ValueError(f"{name} must be finite in fp32, got {number}")
    return number


def is_recorded() -> bool:
    """Whether a call of this thread is not run but written down: by a compiler, or by a mode that
    records operators or fakes tensors (make_fx, FakeTensorMode). Other modes only watch."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()
    )


def lacks_memory(value: Tensor) -> bool:
    """Whether a tensor has elements and no memory: its storage was freed, or it stands for another
    one (fake and functional tensors)."""
    try:
        base = value.data_ptr() - value.storage_offset() * value.element_size()
    except RuntimeError:
        return True
    return base == 0 and value.numel() > 0


def check_tensor(
    name: str,
    value: object,
    dims: Sequence[str],
    dtypes: Sequence[torch.dtype],
    *,
    device: torch.device | None = None,
) -> Tensor:
    """`value` if it is a dense tensor with `len(dims)` dimensions, one of `dtypes`, on `device`.

    `dims` are the words for the dimensions, such as ("T", "H"). Raises TypeError for what is no
    tensor or has another dtype, ValueError for another number of dimensions, layout or device.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        raise ValueError(f"{name} must be a dense (strided) tensor, got layout {layout}")
    # What is recorded cannot be asked; the operator that is called instead asks.
    if not is_recorded():
        # Its memory would hold the opposite of its values, and backends read memory.
        if value.is_neg():
            raise ValueError(f"{name} must not be a lazily negated view: pass {name}.resolve_neg()")
        if lacks_memory(value) and _is_freed(value):
            raise ValueError(f"{name} has no memory: its storage was freed")
    if value.dim() != len(dims):
        raise ValueError(
            f"{name} must have shape [{', '.join(dims)}], got shape {list(value.shape)}"
        )
    if value.dtype not in dtypes:
        raise TypeError(
            f"{name} must be {_joined([dtype_name(d) for d in dtypes])}, "
            f"got {dtype_name(value.dtype)}"
        )
    if value.device.type == "meta":
        raise ValueError(f"{name} is on the meta device and holds no data")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on x's device {device}, got {value.device}")
    return value


def _is_freed(value: Tensor) -> bool:
    try:
        return value.device.type != "meta" and value.untyped_storage().nbytes() == 0
    except RuntimeError:  # it has none of its own
        return False


def check_size(name: str, value: Tensor, dim: int, size: int, meaning: str) -> None:
    """ValueError unless dimension `dim` of `value` has `size` elements; `meaning` says why."""
    if value.size(dim) != size:
        raise ValueError(
            f"{name} must have {size} in dimension {dim} ({meaning}), got shape {list(value.shape)}"
        )


def _check_not_empty(name: str, value: Tensor) -> None:
    if 0 in value.shape:
        raise ValueError(
            f"{name} must have at least 1 in every dimension, got shape {list(value.shape)}"
        )


@dataclass(frozen=True)
class Activation:
    """What happens between the two matrix products.

    Gated kinds take a gate value g and an up value u and give f(g) * (u + up_offset), where
    g is first cut to at most `limit` and u to [-limit, limit] (no cut if `limit` is None):

    - "silu": f(g) = g * sigmoid(alpha * g). SwiGLU; with alpha 1.702, limit 7 and up_offset 1 it
      is gpt-oss's clamped SwiGLU, which `parse` knows as "swiglu_oai".
    - "gelu": f(g) = g * Phi(g), with the error function; "gelu_tanh": its tanh approximation.

    "relu2" is not gated: relu(v)^2 of the one value v, with w13 [E, I, H]. alpha belongs to "silu",
    limit and up_offset to the gated kinds.

    Raises TypeError or ValueError for an unknown kind or a parameter that the kind does not have.
    """

    kind: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    KINDS: ClassVar[tuple[str, ...]] = ("silu", "gelu", "gelu_tanh", "relu2")
    NAMES: ClassVar[tuple[str, ...]] = (*KINDS, "swiglu_oai")

    def __post_init__(self) -> None:
        check_choice("activation kind", self.kind, self.KINDS)
        check_number("activation alpha", self.alpha)
        check_number("activation up_offset", self.up_offset)
        if self.limit is not None and check_number("activation limit", self.limit) <= 2.0**-150:
            raise ValueError(f"activation limit must be above 0 in fp32 or None, got {self.limit}")
        if self.kind != "silu" and self.alpha != 1.0:
            raise ValueError(
                f"activation alpha belongs to silu and must be 1.0 for {self.kind}, "
                f"got {self.alpha}"
            )
        if not self.gated and (self.limit is not None or self.up_offset != 0.0):
            raise ValueError(
                f"activation limit and up_offset belong to the gated kinds and must be None and "
                f"0.0 for {self.kind}, got {self.limit} and {self.up_offset}"
            )

    @property
    def gated(self) -> bool:
        """Whether w13 holds gate and up rows (True) or up rows only (False)."""
        return self.kind != "relu2"

    @staticmethod
    def parse(value: str | Activation) -> Activation:
        """The activation of a name in `NAMES`; an `Activation` is returned as it is."""
        if isinstance(value, Activation):
            return value
        if not isinstance(value, str):
            raise TypeError(
                f"activation must be an Activation or one of {_joined(Activation.NAMES)}, "
                f"got {type(value).__name__}"
            )
        name = check_choice("activation", value, Activation.NAMES)
        if name == "swiglu_oai":
            return Activation("silu", alpha=1.702, limit=7.0, up_offset=1.0)
        return Activation(name)


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer's experts. Any size from 1 up; a backend may take fewer and says so.

    hidden: H, elements of a token's row.  intermediate: I, rows of each half of W13.
    experts: E, experts whose weights are here.  top_k: k, slots a token.
    dtype: name of the type of activations and weights, a key of `DTYPES`.
    gated: whether W13 has 2I rows (gate and up) or I.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: str = "bfloat16"
    gated: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "top_k"):
            check_count(name, getattr(self, name))
        check_choice("dtype", self.dtype, tuple(DTYPES))
        check_flag("gated", self.gated)

    @property
    def w13_rows(self) -> int:
        """Rows of W13 an expert: 2I if gated, else I."""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's type."""
        return DTYPES[self.dtype]

    @property
    def element_size(self) -> int:
        """Bytes of an element of `dtype`."""
        return self.torch_dtype.itemsize

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's W13 and W2."""
        return (self.w13_rows + self.intermediate) * self.hidden * self.element_size


@dataclass(frozen=True, eq=False)
class SharedExperts:
    """Shared experts of a layer, as one MLP that every token takes; several lie end to end in Is.

    w13: [2Is, H], gate rows first, then up rows ([Is, H] if the activation is not gated).
    w2: [H, Is].  Both in the layer's dtype; Is need not be the routed experts' I.
    gate: None, or [H] or [1, H] in any float dtype: the MLP's output is scaled by
        sigmoid(x . gate), computed in fp32.
    The activation is the routed experts'.
    """

    w13: Tensor
    w2: Tensor
    gate: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ExpertsCall:
    """One checked call of the experts: what every backend receives.

    With T tokens, H = hidden, I = intermediate, E experts, k slots a token:

    x: [T, H] in `shape.dtype`, contiguous. T may be 0.
    w13: [E, 2I, H], gate rows first then up rows, or gate0, up0, gate1, up1, ... if `interleaved`;
        [E, I, H] if the activation is not gated. w2: [E, H, I]. Both in x's dtype, contiguous in
        their last dimension; the other strides are free.
    topk_weights: [T, k] float32, bfloat16 or float16, contiguous.
    topk_ids: [T, k] int32 or int64, contiguous.
    b13: [E, 2I] (or [E, I]), in w13's row order, or None; b2: [E, H], or None; both in x's dtype,
        contiguous.
    expert_map: int32 [E_global], contiguous, or None: the local expert of a global id.
    num_valid_tokens: int32 or int64, one element on x's device, or None.
    residual: [T, H] in x's dtype, contiguous, or None: what the experts' sum is added to.
    out: [T, H] in x's dtype, contiguous, or None. It is `residual` itself (the layer then adds to
        it in place) or shares no memory with it, and shares none with another input.

    All tensors lie on one device. What to compute:

        e    = ids[t, j], through expert_map if there is one
        h    = x[t] @ W13[e]^T + b13[e]                     in fp32
        a    = activation(h)                                rounded to the dtype
        row  = a @ W2[e]^T + b2[e]                          rounded to bf16 for bf16, else fp32
        y[t] = sum over j = 0..k-1, in that order, of w[t, j] * row[j]   in fp32
        y[t] = y[t] + residual[t], if there is one                       in fp32
        y[t] is rounded once, to the dtype

    A slot is skipped, which is not the same as multiplied by zero, if its id is < 0 or >= E
    (>= E_global before, < 0 or >= E after expert_map), or if t >= num_valid_tokens: no weight is
    read and nothing is added. So a row without slots, valid or not, is exactly zero or, with a
    residual, exactly the residual's (a -0 in it becomes 0). A count below 0 is 0, one above T is T.
    Ids that occur twice count twice. With `weight_on_input` the row x[t] is scaled by w[t, j] and
    rounded to the dtype before the first product, and not weighted after the second.
    """

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    activation: Activation
    b13: Tensor | None
    b2: Tensor | None
    expert_map: Tensor | None
    num_valid_tokens: Tensor | None
    residual: Tensor | None
    out: Tensor | None
    policy: str
    workspace: Any
    interleaved: bool
    weight_on_input: bool
    shape: LayerShape

    @property
    def num_tokens(self) -> int:
        """T, valid or not."""
        return self.x.size(0)

    @property
    def device(self) -> torch.device:
        """Where all tensors of the call lie."""
        return self.x.device

    def output(self) -> Tensor:
        """The tensor to write, [T, H]: `out`, or a new one whose content is undefined."""
        return torch.empty_like(self.x) if self.out is None else self.out

    def inputs(self) -> dict[str, Tensor]:
        """The tensors that are read, by argument name."""
        names = (
            *("x", "w13", "w2", "topk_weights", "topk_ids"),
            *("b13", "b2", "expert_map", "num_valid_tokens", "residual"),
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def check_tokens(x: object) -> Tensor:
    """`x` if it is a tensor of tokens [T, H] with H >= 1 in one of `DTYPES`; T may be 0."""
    tokens = check_tensor("x", x, ("T", "H"), _COMPUTE)
    if tokens.size(1) < 1:
        raise ValueError(
            f"x must have at least 1 in dimension 1 (H), got shape {list(tokens.shape)}"
        )
    return tokens


def _check_weight(name: str, value: object, dims: Sequence[str], x: Tensor) -> Tensor:
    weight = check_tensor(name, value, dims, (x.dtype,), device=x.device)
    _check_not_empty(name, weight)
    if weight.size(-1) > 1 and weight.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {weight.stride()} "
            f"for shape {list(weight.shape)}"
        )
    return weight


def as_written(device: torch.device) -> AbstractContextManager[Any]:
    """Products in the types that the code says, where autocast would choose narrower ones."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Bytes [first, last) of memory between a tensor's first and last element."""
    if tensor.numel() == 0:
        return (0, 0)
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return (start, start + elements * tensor.element_size())


def _check_out(out: object, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    checked = check_tensor("out", out, ("T", "H"), (x.dtype,), device=x.device)
    if checked.shape != x.shape:
        raise ValueError(
            f"out must have x's shape {list(x.shape)}, got shape {list(checked.shape)}"
        )
    if not checked.is_contiguous():
        raise ValueError(
            f"out must be contiguous, got strides {checked.stride()} for shape {list(x.shape)}"
        )
    if checked.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "out must not require grad: autograd cannot follow what is written into it"
        )
    check_out_apart(checked, inputs)
    return checked


def check_out_apart(out: Tensor, inputs: dict[str, Tensor]) -> None:
    """ValueError, naming the input, if `out` shares memory with one of these and is not `residual`
    itself: inputs are still read when parts of the output are written."""
    if is_recorded():
        return  # there is no memory yet, and the graph copies the result where all has been read
    first, last = _span(out)
    for name, value in inputs.items():
        start, end = _span(value)
        if first >= end or start >= last:
            continue
        if name != "residual":
            raise ValueError(f"out must share no memory with {name}, but overlaps it")
        if first != start:
            raise ValueError(
                "out must be residual itself or share no memory with it, but overlaps it in part"
            )


def check_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str | Activation = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: str = "auto",
    workspace: Any = None,
    interleaved: bool = False,
    weight_on_input: bool = False,
) -> ExpertsCall:
    """Checks a call of the experts and puts it into the form that backends receive.

    The arguments are `ExpertsCall`'s, with these freedoms: x, topk_weights, topk_ids, b13, b2,
    expert_map and residual may have any strides (a contiguous copy is made); `activation` may be a
    name. Weights are never copied, so w13 and w2 must be contiguous in their last dimension.
    workspace is None or a workspace object of the backend that will run the call.

    No value of a tensor is looked at (that would wait for the device): any id and any number of
    valid tokens has a meaning.

    Raises TypeError (no tensor, wrong dtype, wrong kind of object) or ValueError (wrong shape,
    size, device, strides, overlap, unknown name), naming the argument, the value and what is
    allowed.
    """
    act = Activation.parse(activation)
    check_choice("policy", policy, POLICIES)
    check_flag("interleaved", interleaved)
    check_flag("weight_on_input", weight_on_input)
    if interleaved and not act.gated:
        raise ValueError(
            f"interleaved must be False for {act.kind}, whose w13 has no gate rows, got True"
        )
    if workspace is not None and not hasattr(workspace, "last_run"):
        raise TypeError(
            f"workspace must be None or a weave_moe.Workspace, got {type(workspace).__name__}"
        )

    x = check_tokens(x)
    hidden = x.size(1)
    w13 = _check_weight("w13", w13, ("E", "2I" if act.gated else "I", "H"), x)
    w2 = _check_weight("w2", w2, ("E", "H", "I"), x)
    experts, intermediate = w2.size(0), w2.size(2)
    rows = 2 * intermediate if act.gated else intermediate
    check_size("w2", w2, 1, hidden, "H, from x")
    check_size("w13", w13, 0, experts, "E, from w2")
    check_size(
        "w13", w13, 1, rows, f"{'2I' if act.gated else 'I'} for {act.kind}, I being w2's last"
    )
    check_size("w13", w13, 2, hidden, "H, from x")

    ids = check_tensor("topk_ids", topk_ids, ("T", "k"), _IDS, device=x.device)
    check_size("topk_ids", ids, 0, x.size(0), "T, from x")
    if ids.size(1) < 1:
        raise ValueError(
            f"topk_ids must have at least 1 in dimension 1 (k), got shape {list(ids.shape)}"
        )
    weights = check_tensor("topk_weights", topk_weights, ("T", "k"), _COMPUTE, device=x.device)
    if weights.shape != ids.shape:
        raise ValueError(
            f"topk_weights must have topk_ids' shape {list(ids.shape)}, "
            f"got shape {list(weights.shape)}"
        )

    if b13 is not None:
        b13 = check_tensor(
            "b13", b13, ("E", "2I" if act.gated else "I"), (x.dtype,), device=x.device
        )
        check_size("b13", b13, 0, experts, "E")
        check_size("b13", b13, 1, rows, "w13's rows")
        b13 = b13.contiguous()
    if b2 is not None:
        b2 = check_tensor("b2", b2, ("E", "H"), (x.dtype,), device=x.device)
        check_size("b2", b2, 0, experts, "E")
        check_size("b2", b2, 1, hidden, "H")
        b2 = b2.contiguous()
    if expert_map is not None:
        expert_map = check_tensor(
            "expert_map", expert_map, ("E_global",), (torch.int32,), device=x.device
        )
        _check_not_empty("expert_map", expert_map)
        expert_map = expert_map.contiguous()
    if num_valid_tokens is not None:
        dims = ("1",) if isinstance(num_valid_tokens, Tensor) and num_valid_tokens.dim() else ()
        num_valid_tokens = check_tensor(
            "num_valid_tokens", num_valid_tokens, dims, _IDS, device=x.device
        )
        if num_valid_tokens.numel() != 1:
            raise ValueError(
                f"num_valid_tokens must hold one element, got shape {list(num_valid_tokens.shape)}"
            )
    if residual is not None:
        residual = check_tensor("residual", residual, ("T", "H"), (x.dtype,), device=x.device)
        if residual.shape != x.shape:
            raise ValueError(
                f"residual must have x's shape {list(x.shape)}, got shape {list(residual.shape)}"
            )
        residual = residual.contiguous()

    call = ExpertsCall(
        x=x.contiguous(),
        w13=w13,
        w2=w2,
        topk_weights=weights.contiguous(),
        topk_ids=ids.contiguous(),
        activation=act,
        b13=b13,
        b2=b2,
        expert_map=expert_map,
        num_valid_tokens=num_valid_tokens,
        residual=residual,
        out=out,
        policy=policy,
        workspace=workspace,
        interleaved=interleaved,
        weight_on_input=weight_on_input,
        shape=LayerShape(
            hidden, intermediate, experts, ids.size(1), dtype_name(x.dtype), act.gated
        ),
    )
    if out is not None:
        _check_out(out, call.x, call.inputs())
    return call


def check_shared(shared: object, x: Tensor, activation: Activation) -> SharedExperts:
    """`shared` if it fits tokens x [T, H]; else TypeError or ValueError naming its field."""
    if not isinstance(shared, SharedExperts):
        raise TypeError(f"shared must be None or a SharedExperts, got {type(shared).__name__}")
    w13 = _check_weight("shared.w13", shared.w13, ("2Is" if activation.gated else "Is", "H"), x)
    w2 = _check_weight("shared.w2", shared.w2, ("H", "Is"), x)
    rows = w2.size(1) * (2 if activation.gated else 1)
    check_size("shared.w2", w2, 0, x.size(1), "H, from x")
    check_size("shared.w13", w13, 0, rows, "its gate and up rows, from shared.w2's last")
    check_size("shared.w13", w13, 1, x.size(1), "H, from x")
    if shared.gate is not None:
        dims = ("1", "H") if isinstance(shared.gate, Tensor) and shared.gate.dim() == 2 else ("H",)
        gate = check_tensor("shared.gate", shared.gate, dims, _COMPUTE, device=x.device)
        if gate.numel() != x.size(1) or gate.size(-1) != x.size(1):
            raise ValueError(
                f"shared.gate must have shape [{x.size(1)}] or [1, {x.size(1)}] (H, from x), "
                f"got shape {list(gate.shape)}"
            )
    return shared


def shared_call(
    x: Tensor,
    shared: SharedExperts,
    activation: Activation,
    *,
    num_valid_tokens: Tensor | None = None,
    policy: str = "auto",
    workspace: Any = None,
) -> ExpertsCall:
    """The shared experts of tokens x [T, H] as a call with one expert and one slot a token.

    Every id is 0 and the slot's weight is sigmoid(x . gate) in fp32, or 1 without a gate, so that
    a backend needs no code of its own for shared experts.
    """
    tokens = x.size(0)
    if shared.gate is None:
        weights = torch.ones((tokens, 1), dtype=torch.float32, device=x.device)
    else:
        with as_written(x.device):
            weights = torch.sigmoid(x.float() @ shared.gate.float().reshape(-1, 1))
    return check_experts(
        x,
        shared.w13.unsqueeze(0),
        shared.w2.unsqueeze(0),
        weights,
        torch.zeros((tokens, 1), dtype=torch.int32, device=x.device),
        activation=activation,
        num_valid_tokens=num_valid_tokens,
        policy=policy,
        workspace=workspace,
    )
