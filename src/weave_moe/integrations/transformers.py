"""transformers 5: `experts_implementation="weave"`, fused blocks, and a report of what runs.

    import weave_moe.integrations.transformers as weave   # importing it registers the name
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="weave")
    weave.report(model)

    python -m weave_moe.integrations.transformers path/to/model   # what would run, without weights

transformers keeps a table of functions that compute an MoE layer's experts, and every experts class
decorated with `use_experts_implementation` looks its own up by `config._experts_implementation` in
each forward. This module puts one function there. It computes nothing of its own: it reads the
module's layout, calls the layer, and where a layout, a dtype, a device or a need for gradients is
not covered it calls transformers' `grouped_mm`, with the reason in the log "weave_moe", once for
each class and reason.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TextIO

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import backends, ops
from ..blocks import _ACTIVATIONS, quantization_name
from ..layer import MoELayer, _row_major, fused_experts
from ..reference import activate
from ..shapes import (
    DTYPES,
    POLICIES,
    Activation,
    LayerShape,
    check_choice,
    dtype_name,
    is_recorded,
)
from .fit import backend_problem, problem_of
from .fuse import Optimized, optimize

try:
    import transformers as _transformers
    from transformers.integrations import moe as _moe
except ImportError as error:
    raise ImportError(
        "weave_moe.integrations.transformers needs transformers 5.7 or newer: "
        f"pip install 'weave-moe[transformers]' ({error})"
    ) from error

__all__ = [
    "NAME",
    "LayerStatus",
    "Optimized",
    "Report",
    "optimize",
    "prepare",
    "register",
    "report",
]

NAME: Final = "weave"
"""What `experts_implementation` is called."""

_log = logging.getLogger("weave_moe")


@dataclass
class _Settings:
    policy: str = "auto"
    backend: str = "auto"


_settings = _Settings()


# ---- What a module of experts computes ----------------------------------------------------------


@dataclass(frozen=True)
class _Gate:
    """How a class's own `_apply_gate` is written as an `Activation`.

    alpha, limit: attributes of the module that hold them, None where the formula has none.
    act: the function is the module's `act_fn`; else it is silu. interleaved: gate and up alternate.
    """

    alpha: str | None = None
    limit: str | None = None
    up_offset: float = 0.0
    act: bool = False
    interleaved: bool = False


_PLAIN: Final = _Gate(act=True)
_LIMITED: Final = _Gate(limit="swiglu_limit")

# By the qualified name of the function, in one of transformers' own files. What is not here falls
# back; an entry whose formula no longer gives the function's numbers does, too.
_GATES: Final[dict[str, _Gate]] = {
    "GptOssExperts._apply_gate": _Gate("alpha", "limit", 1.0, interleaved=True),
    "OpenAIPrivacyFilterExperts._apply_gate": _Gate("alpha", "limit", 1.0),
    "MiniMaxM3VLExperts._apply_gate": _Gate("swiglu_alpha", "swiglu_limit", 1.0),
    "DeepseekV4Experts._apply_gate": _Gate(limit="limit", act=True),
    "HYV4Experts._apply_gate": _LIMITED,
    "HYV4VLExperts._apply_gate": _LIMITED,
    "Glm5NextTextExperts._apply_gate": _LIMITED,
    "BeamExperts._apply_gate": _PLAIN,
}


@dataclass(frozen=True)
class _Layout:
    """What a module computes, in values that a compiler may keep as symbols (floats among them)."""

    kind: str
    alpha: float
    limit: float | None
    up_offset: float
    w13: str
    interleaved: bool
    transposed: bool
    biases: bool

    @property
    def activation(self) -> Activation:
        return _activation(self.kind, self.alpha, self.limit, self.up_offset)


@functools.lru_cache(maxsize=256)
def _activation(kind: str, alpha: float, limit: float | None, up_offset: float) -> Activation:
    return Activation(kind, float(alpha), None if limit is None else float(limit), up_offset)


def _is_offered(module: nn.Module) -> bool:
    """Whether transformers lets this module's experts be chosen."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def _act_kind(experts: Any) -> str | None:
    act = getattr(experts, "act_fn", None)
    if act is torch.nn.functional.silu:
        return "silu"
    return _ACTIVATIONS.get(type(act).__name__)


def _act_name(experts: Any) -> str:
    act = getattr(experts, "act_fn", None)
    return getattr(act, "__name__", type(act).__name__)


def _layout(experts: Any) -> _Layout | str:
    """The layout of a module of experts, or why it is not covered."""
    if not _is_offered(experts):
        return "transformers offers no choice of experts for its class"
    if getattr(experts, "has_post_expert_norm", False):
        return "it normalises each expert's output, which the layer does not"
    gated = getattr(experts, "has_gate", True)
    name = "gate_up_proj" if gated else "up_proj"
    biases = bool(getattr(experts, "has_bias", False))
    for path in (name, "down_proj", *((f"{name}_bias", "down_proj_bias") if biases else ())):
        tensor = getattr(experts, path, None)
        if not isinstance(tensor, Tensor):
            return f"it has no tensor {path}"
        if is_traceable_wrapper_subclass(tensor):
            return f"{path} is a {type(tensor).__name__}, not a plain tensor"
        if tensor.dtype not in DTYPES.values():
            return f"{path} is {dtype_name(tensor.dtype)}; covered are {', '.join(DTYPES)}"
    if not gated:
        if _act_kind(experts) != "relu2":
            return f"its activation {_act_name(experts)} without a gate is not covered"
        return _Layout("relu2", 1.0, None, 0.0, name, False, experts.is_transposed, biases)
    gate = _gate(experts)
    if isinstance(gate, str):
        return gate
    kind = _act_kind(experts) if gate.act else "silu"
    if kind is None or kind == "relu2":
        return f"its activation {_act_name(experts)} is not covered"
    return _Layout(
        kind,
        getattr(experts, gate.alpha) if gate.alpha else 1.0,
        getattr(experts, gate.limit) if gate.limit else None,
        gate.up_offset,
        name,
        gate.interleaved,
        experts.is_transposed,
        biases,
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _gate_name(kind: Any) -> str:
    """The name of a class's gate: "" for transformers' default, a key of `_GATES`, or another."""
    function = kind._apply_gate
    if function is _moe._default_apply_gate:
        return ""
    name = f"{function.__module__}.{function.__qualname__}"
    return function.__qualname__ if name.startswith("transformers.models.") else name


def _gate(experts: Any) -> _Gate | str:
    name = _gate_name(type(experts))
    if not name:
        return _PLAIN
    return _GATES.get(name, f"it has an activation of its own, {name}")


_checked: dict[tuple[Any, ...], str | None] = {}


def _check_gate(experts: Any, layout: _Layout) -> str | None:
    """None if the module's own gate gives the numbers of its entry in the table; else the reason.

    Once for each function and formula. The sample reaches beyond every limit in use.
    """
    activation = layout.activation
    if not activation.gated:
        return None
    key = (type(experts)._apply_gate, activation, layout.interleaved)
    if key not in _checked:
        sample = torch.linspace(-60.0, 60.0, 242, dtype=torch.float32, device="cpu").reshape(11, 22)
        want = activate(sample, activation, interleaved=layout.interleaved)
        problem = None
        try:
            with torch.no_grad():
                got = experts._apply_gate(sample)
            if got.shape != want.shape or not torch.allclose(got, want, rtol=1e-5, atol=1e-6):
                problem = "its activation is not what this version of weave-moe knows it as"
        except Exception as error:
            problem = f"its activation cannot be checked: {error}"
        _checked[key] = problem
    return _checked[key]


# ---- Whether a backend takes them ---------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _shape(sizes: tuple[int, int, int, int], dtype: str, kind: str) -> LayerShape:
    # Its checks, once for each layer and not in every forward.
    return LayerShape(*sizes, dtype, Activation(kind).gated)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _backend_reason(
    device: str,
    index: int | None,
    dtype: str,
    sizes: tuple[int, int, int, int],
    kind: str,
    interleaved: bool,
    aligned: bool,
    planned: bool,
) -> str | None:
    """Why the backend in use would not run experts like these; None if it will.

    From plain values only, so that a compiler can evaluate it while it traces. sizes: H, I, E, k.
    """
    return backend_problem(
        *(_settings.backend, device, index, _shape(sizes, dtype, kind), kind),
        interleaved=interleaved,
        aligned=aligned,
        planned=planned,
    )


@functools.lru_cache(maxsize=1024)
def _warn(name: str, reason: str) -> None:
    # The cache is what makes it once for each class and reason.
    _log.warning("%s does not run weave: %s; transformers' own experts run", name, reason)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note(name: str, reason: str) -> None:
    _warn(name, reason)


# ---- The function in transformers' table --------------------------------------------------------


def _in_row_order(weight: Tensor) -> bool:
    return weight.size(1) == 1 or weight.stride(1) == 1


def _weights(experts: Any, layout: _Layout) -> tuple[Tensor, Tensor] | str:
    """W13 [E, 2I, H] and W2 [E, H, I] of a module, or why they cannot be had."""
    w13, w2 = getattr(experts, layout.w13), experts.down_proj
    if not layout.transposed:
        return w13, w2
    if is_recorded():
        if not (_in_row_order(w13) and _in_row_order(w2)):
            return (
                "its transposed weights are not in row order yet, and a compiler cannot put them "
                "there: call weave_moe.integrations.transformers.prepare(model) before compiling"
            )
        return w13.transpose(1, 2), w2.transpose(1, 2)
    return _row_major(w13), _row_major(w2)


def _problem(
    experts: Any,
    layout: _Layout,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    at: torch.device,
    planned: bool = False,
) -> str | None:
    """Why experts of this layout do not run the layer on a device, gradients aside."""
    tracing = is_recorded()
    if not tracing and (problem := _check_gate(experts, layout)):
        return problem
    # Where memory begins cannot be asked for while tracing, nor on the meta device.
    aligned = tracing or w2.is_meta or not (w13.data_ptr() % 16 or w2.data_ptr() % 16)
    reason: str | None = _backend_reason(
        at.type,
        at.index,
        dtype_name(w2.dtype),
        (w2.size(1), w2.size(2), w2.size(0), top_k),
        layout.kind,
        layout.interleaved,
        aligned,
        planned,
    )
    return reason


def _run(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor | str:
    """The experts' output, or why something else has to compute it."""
    layout = _layout(experts)
    if isinstance(layout, str):
        return layout
    b13 = getattr(experts, f"{layout.w13}_bias") if layout.biases else None
    b2 = experts.down_proj_bias if layout.biases else None
    recorded = (hidden_states, top_k_weights, getattr(experts, layout.w13), experts.down_proj)
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (*recorded, b13, b2)
    ):
        return (
            "gradients are recorded, and it is for inference only: call the model under "
            "torch.no_grad() or torch.inference_mode()"
        )
    weights = _weights(experts, layout)
    if isinstance(weights, str):
        return weights
    w13, w2 = weights
    # A compiler may keep this size as a symbol; counting up to it makes it a number.
    top_k = len(range(top_k_index.size(-1)))
    problem = _problem(experts, layout, w13, w2, top_k, w2.device)
    if problem is not None:
        return problem
    # Under autocast hidden states may be wider than the weights; grouped_mm casts them just so.
    x = hidden_states.to(w2.dtype)
    if is_recorded():
        y: Tensor = ops.OPERATOR(
            x,
            w13,
            w2,
            top_k_weights,
            top_k_index,
            b13,
            b2,
            kind=layout.kind,
            alpha=layout.alpha,
            limit=layout.limit,
            up_offset=layout.up_offset,
            interleaved=layout.interleaved,
            policy=_settings.policy,
            backend=_settings.backend,
        )
    else:
        y = fused_experts(
            x,
            w13,
            w2,
            top_k_weights,
            top_k_index,
            activation=layout.activation,
            b13=b13,
            b2=b2,
            interleaved=layout.interleaved,
            policy=_settings.policy,
            backend=_settings.backend,
        )
    return y.to(hidden_states.dtype)


def _forward(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    process_group: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """transformers' experts function: [T, H] from [T, H], ids [T, k] and weights [T, k].

    Ids outside [0, num_experts), which expert parallelism uses for experts elsewhere, are skipped.

    Raises ValueError for a process group: exchanging tokens within the kernel is not covered.
    """
    if process_group is not None or args or kwargs:
        extra = ["process_group"] if process_group is not None else []
        extra += [f"argument {i + 5}" for i in range(len(args))] + sorted(kwargs)
        raise ValueError(
            f"experts_implementation={NAME!r} takes hidden states, ids and weights, got "
            f"{', '.join(extra)} too; for expert parallelism use ep_implementation='auto', which "
            "exchanges tokens outside the experts"
        )
    result = _run(self, hidden_states, top_k_index, top_k_weights)
    if isinstance(result, str):
        _note(type(self).__name__, result)
        fallback = _moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        if self.down_proj.dtype == torch.float64:  # which grouped_mm does not take
            fallback = inspect.unwrap(type(self).forward)
        y: Tensor = fallback(self, hidden_states, top_k_index, top_k_weights)
        return y
    return result


def _fp8_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What FP8 experts run under the name: transformers' own, with the reason in the log."""
    from transformers.integrations import finegrained_fp8

    _note(type(self).__name__, "its weights are FP8, which the layer does not take")
    y: Tensor
    if getattr(self, "activation_scheme", "dynamic") == "static":
        # The one scheme that transformers' grouped_mm refuses.
        y = inspect.unwrap(type(self).forward)(self, *args, **kwargs)
    else:
        y = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"](self, *args, **kwargs)
    return y


def register(*, policy: str = "auto", backend: str = "auto") -> None:
    """Makes `experts_implementation="weave"` a name that transformers knows, in this process.

    Importing this module does it with the defaults. Calling it again changes the options for every
    model that runs under the name, and nothing else.

    policy, backend: see `weave_moe.fused_experts`. backend="auto" is the fast backend of the
        tensors' device: where that does not take a layer, transformers' grouped_mm runs, rather
        than the slow reference.

    Raises TypeError or ValueError naming the argument; ImportError for a transformers before 5.7,
    which takes no names but its own.
    """
    _settings.policy = check_choice("policy", policy, POLICIES)
    _settings.backend = check_choice("backend", backend, backends.NAMES)
    _moe.ExpertsInterface.register(NAME, _forward)
    auto: Any = _transformers
    try:
        # It looks at the model for one of transformers' own names only.
        auto.PreTrainedModel.get_correct_experts_implementation(None, NAME)
    except ValueError:
        raise ImportError(
            f"experts_implementation={NAME!r} needs transformers 5.7 or newer, which takes names "
            f"from other packages; this is {auto.__version__}"
        ) from None
    try:
        from transformers.integrations import finegrained_fp8
    except ImportError:
        return
    # The name passes transformers' checks on FP8 models, which look functions up in a table of
    # their own: without an entry there, the first forward would be a KeyError.
    interface = getattr(finegrained_fp8, "FP8ExpertsInterface", None)
    if interface is not None:
        interface.register(NAME, _fp8_forward)


def prepare(model: nn.Module) -> int:
    """Puts transposed expert weights (gpt-oss) into the order in memory that the layer reads.

    Only their order in memory changes: names, shapes and values stay, and so does what every other
    implementation computes. The first forward does the same, so this is for a model that is
    compiled or exported before it has run once. Returns how many modules have such weights.

    Raises TypeError if model is no module.
    """
    _check_model(model)
    count = 0
    for _, module in _candidates(model):
        layout = _layout(module)
        if not isinstance(layout, str) and layout.transposed:
            _weights(module, layout)
            count += 1
    return count


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


# ---- What runs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerStatus:
    """One layer's experts in a report.

    name: the module's name in the model; kind: its class. used: whether the layer runs there.
    detail: the backend if it does, else the reason why not.
    """

    name: str
    kind: str
    used: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """What `report` found: `layers` in the model's order; `str()` is the printed text."""

    layers: tuple[LayerStatus, ...]

    @property
    def on(self) -> bool:
        """Whether every layer of experts runs weave, and there is one."""
        return bool(self.layers) and all(layer.used for layer in self.layers)

    def __str__(self) -> str:
        used = sum(layer.used for layer in self.layers)
        if not self.layers:
            return "weave: off, the model has no layers of experts"
        state = "on" if used == len(self.layers) else "partly on" if used else "off"
        lines = [f"weave: {state}, in {used} of {len(self.layers)} layers of experts"]
        wide = max(len(layer.name) for layer in self.layers)
        lines += [
            f"  {layer.name:<{wide}}  {layer.kind}: {'' if layer.used else 'no, '}{layer.detail}"
            for layer in self.layers
        ]
        return "\n".join(lines)


def _holds_experts(name: str, module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return name.rsplit(".", 1)[-1] == "experts"
    stacked = [getattr(module, n, None) for n in ("gate_up_proj", "up_proj", "down_proj")]
    return _is_offered(module) or sum(isinstance(t, Tensor) and t.dim() == 3 for t in stacked) > 1


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that holds a layer's experts; those inside an `MoELayer` belong to it."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and (isinstance(module, MoELayer) or _holds_experts(name, module)):
            inside.update(module.modules())
            yield name, module


def _top_k(experts: Any) -> int:
    for owner in (experts, getattr(experts, "config", None)):
        for name in ("top_k", "num_experts_per_tok", "num_experts_per_token", "top_k_experts"):
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 1


def _backend_of(device: torch.device) -> str:
    if _settings.backend != "auto":
        return _settings.backend
    return {"cuda": "cuda", "cpu": "host"}.get(device.type, "reference")


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _status(name: str, module: Any, device: torch.device | None) -> LayerStatus:
    kind = type(module).__name__
    # For a GPU elsewhere: what the kernel takes can be said without one.
    planned = device is not None and device.type == "cuda" and not torch.cuda.is_available()
    there = " of a Hopper GPU, which is not here" if planned else ""

    def no(reason: str) -> LayerStatus:
        return LayerStatus(name, kind, False, reason)

    if isinstance(module, MoELayer):
        at = device or _device_of(module)
        reason = problem_of(module, at, planned=planned)
        if reason is not None:
            return no(f"the slow reference runs, router included: {reason}")
        used = _backend_of(at) if module.backend == "auto" else module.backend
        return LayerStatus(
            name, kind, True, f"the whole layer, router included, backend {used}{there}"
        )
    if isinstance(module, nn.ModuleList):
        return no("its experts are separate modules, where transformers 5 stacks their weights")
    if not _is_offered(module):
        return no("transformers offers no choice of experts for its class")
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if chosen != NAME:
        return no(f"experts_implementation is {chosen!r}")
    if hasattr(module, "gate_up_proj_scale_inv") or hasattr(module, "up_proj_scale_inv"):
        return no("its weights are FP8, which the layer does not take")
    layout = _layout(module)
    if isinstance(layout, str):
        return no(layout)
    w13, w2 = getattr(module, layout.w13), module.down_proj
    if layout.transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    at = device or w2.device
    problem = _problem(module, layout, w13, w2, _top_k(module), at, planned)
    if problem is not None:
        return no(problem)
    return LayerStatus(name, kind, True, f"backend {_backend_of(at)}{there}")


def report(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    file: TextIO | None = None,
) -> Report:
    """Prints, layer by layer, whether the model's experts run weave and, if not, why not.

    model: a transformers model, on any device. device: where it is going to run, if that is not
    where its weights are (they may be on "meta"); "cuda" where there is no GPU asks what the kernel
    takes on a Hopper one. file: where to print; standard output if None.

    It looks at modules, options and the device, and runs nothing. What only a forward shows (hidden
    states that need gradients) is in the log "weave_moe" once it happens. Returns the report.

    Raises TypeError if model is no module.
    """
    _check_model(model)
    at = None if device is None else torch.device(device)
    found = Report(tuple(_status(name, module, at) for name, module in _candidates(model)))
    print(found, file=file or sys.stdout)
    return found


# ---- The command --------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """`python -m weave_moe.integrations.transformers MODEL [cuda | cpu]`: the report of a model's
    config, for a GPU unless the CPU is asked for.

    MODEL is a name or a folder with config.json; no weights are read. Returns the exit status: 0 if
    every layer of experts would run weave, 1 if not, 2 if there is no such model.
    """
    names = sys.argv[1:] if arguments is None else arguments
    device = names[1] if len(names) == 2 else "cuda"
    if len(names) not in (1, 2) or names[0].startswith("-") or device not in ("cuda", "cpu"):
        usage = "usage: python -m weave_moe.integrations.transformers MODEL [cuda | cpu]"
        print(usage, file=sys.stderr)
        return 2
    auto: Any = _transformers
    try:
        config = auto.AutoConfig.from_pretrained(names[0])
        with torch.device("meta"):
            model = auto.AutoModel.from_config(config, experts_implementation=NAME)
    except (OSError, ValueError, KeyError, ImportError) as error:
        print(f"error: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 2
    print(f"transformers {auto.__version__}, torch {torch.__version__}, for {device}")
    parts = [config, *(getattr(config, n, None) for n in getattr(config, "sub_configs", ()))]
    quantized = [q for c in parts if (q := getattr(c, "quantization_config", None)) is not None]
    if quantized:
        how = quantization_name(quantized[0])
        print(f"weave: off, the checkpoint's weights are {how}: transformers' own experts run")
        return 1
    return 0 if report(model, device=device).on else 1


register()

if __name__ == "__main__":
    raise SystemExit(main())
