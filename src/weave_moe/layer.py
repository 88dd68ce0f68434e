"""The public calls: check, choose a backend, run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor, nn

from . import backends, ops
from . import routing as routers
from .blocks import LayerParts, part, parts_of
from .reference import assemble_layer
from .routing import LayerCall, RoutingConfig, check_layer
from .shapes import (
    POLICIES,
    Activation,
    ExpertsCall,
    LayerShape,
    SharedExperts,
    check_choice,
    check_count,
    check_experts,
    check_flag,
    dtype_name,
    is_recorded,
    shared_call,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self, Unpack

__all__ = ["MoELayer", "SharedExperts", "fused_experts", "moe_layer", "workspace_bytes"]


def _run(call: ExpertsCall, backend: str) -> Tensor:
    if backend != "reference" and is_recorded():
        return _as_operator(call, backend)
    chosen = backends.choose(call, backend)
    return chosen.experts(call) if call.num_tokens else call.output()


def _run_layer(
    call: LayerCall, backend: str, return_routing: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y [T, H], weights, ids); the last two may be empty where return_routing is False."""
    if call.experts.num_tokens and not is_recorded():
        whole = backends.whole(call, backend)
        if whole is not None:
            return whole.layer(call, return_routing)
    return assemble_layer(call, lambda experts: _run(experts, backend))


def _refuse_workspace(workspace: object) -> None:
    if workspace is not None:
        raise ValueError(
            "workspace must be None where operators are recorded (torch.compile, make_fx), got a "
            "Workspace"
        )


def _as_operator(call: ExpertsCall, backend: str) -> Tensor:
    """What a compiler sees of `_run`: one opaque node, for it cannot follow a backend."""
    _refuse_workspace(call.workspace)
    y = ops.moe_experts(
        call.x,
        call.w13,
        call.w2,
        call.topk_weights,
        call.topk_ids,
        activation=call.activation,
        b13=call.b13,
        b2=call.b2,
        expert_map=call.expert_map,
        num_valid_tokens=call.num_valid_tokens,
        residual=call.residual,
        interleaved=call.interleaved,
        weight_on_input=call.weight_on_input,
        policy=call.policy,
        backend=backend,
    )
    return y if call.out is None else call.out.copy_(y)


def fused_experts(
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
    backend: str = "auto",
) -> Tensor:
    """The experts of an MoE layer for tokens that are routed already: y [T, H].

        y[t] = sum over slots j of topk_weights[t, j] * (a @ w2[e]^T + b2[e]),  e = topk_ids[t, j]
        a    = activation(x[t] @ w13[e]^T + b13[e])

    With a residual, y[t] = residual[t] + that sum.

    x: [T, H] in bfloat16, float16 or float32, T from 0 up.
    w13: [E, 2I, H], gate rows first, then up rows ([E, I, H] if the activation is not gated);
        w2: [E, H, I]. In x's dtype, contiguous in their last dimension; never copied.
    topk_weights: [T, k] float32, bfloat16 or float16; topk_ids: [T, k] int32 or int64. An id < 0 or
        >= E is skipped: it reads nothing and adds nothing. Duplicates count twice.
    activation: "silu" (SwiGLU), "gelu", "gelu_tanh", "relu2" (not gated), "swiglu_oai" (gpt-oss),
        or an `Activation`.
    b13: [E, 2I], b2: [E, H]: biases in x's dtype.
    expert_map: int32 [E_global]: topk_ids are global ids and this gives the local expert, < 0 for
        none.
    num_valid_tokens: an int32 or int64 tensor of one element on x's device: tokens from there on
        are padding, cost nothing and give zero rows, or the residual's.
    residual: [T, H] in x's dtype, added to the experts' sum before it is rounded.
    out: [T, H], where to write y; it is what is returned. It may be `residual` itself, to add to it
        in place, and shares no memory with another input.
    policy: who runs a task ("auto", "steal", "counter", "static_strided", "static_expert",
        "static_tail", "window"); the result does not depend on it.
    workspace: None, or a `Workspace`: scratch memory and knobs of the call's own.
    interleaved: w13's rows alternate: gate0, up0, gate1, up1, ... (gpt-oss); so does b13.
    weight_on_input: scale x[t] by the weight before w13 instead of the result after w2 (Llama-4).
    backend: "auto", or "cuda", "host" or "reference": see `weave_moe.backends.choose`.

    Accumulation is fp32; where values are rounded and in which order slots are added is said in
    `weave_moe.shapes.ExpertsCall`. Inference only, but backend="reference" can be differentiated.

    Raises TypeError or ValueError, naming the argument, the value and what is allowed, before
    anything is computed.
    """
    call = check_experts(
        x,
        w13,
        w2,
        topk_weights,
        topk_ids,
        activation=activation,
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
    )
    return _run(call, backend)


class _LayerOptions(TypedDict, total=False):
    """`moe_layer`'s keywords with a default but return_routing, for its overloads."""

    router_weight: Tensor | None
    router_bias: Tensor | None
    router_logits: Tensor | None
    selection_bias: Tensor | None
    shared: SharedExperts | None
    activation: str | Activation
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
    backend: str


@overload
def moe_layer(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    routing: RoutingConfig,
    return_routing: Literal[False] = ...,
    **options: Unpack[_LayerOptions],
) -> Tensor: ...
@overload
def moe_layer(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    routing: RoutingConfig,
    return_routing: Literal[True],
    **options: Unpack[_LayerOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
def moe_layer(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    routing: RoutingConfig,
    router_weight: Tensor | None = None,
    router_bias: Tensor | None = None,
    router_logits: Tensor | None = None,
    selection_bias: Tensor | None = None,
    shared: SharedExperts | None = None,
    return_routing: bool = False,
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
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """A whole MoE layer, router and shared experts included: y [T, H].

    routing: how the router chooses and weighs experts.
    router_weight: [E, H], with an optional router_bias [E]; or router_logits: [T, E]. Any of
        float32, bfloat16 and float16; the router is computed in fp32. With expert_map, E is its
        length.
    selection_bias: [E], added to the scores to select experts; it never weighs.
    shared: shared experts. y = routed + shared, each in x's dtype, added in fp32 and rounded once;
        with a residual, (routed + shared) + residual. A GPU adds them as rows like the routed
        experts' instead, slice by slice of I elements, and rounds once: bits differ from the sum of
        parts, by less than the type's rounding.
    return_routing: return (y, topk_weights fp32 [T, k], topk_ids int32 [T, k]) instead of y. What
        they hold of tokens past num_valid_tokens is left open.

    The other arguments are those of `fused_experts`; weight_on_input is for the routed experts.

    Raises TypeError or ValueError, naming the argument, the value and what is allowed, before
    anything is computed.
    """
    check_flag("return_routing", return_routing)
    check_choice("backend", backend, backends.NAMES)
    call = check_layer(
        x,
        w13,
        w2,
        routing=routing,
        router_weight=router_weight,
        router_bias=router_bias,
        router_logits=router_logits,
        selection_bias=selection_bias,
        shared=shared,
        out=out,
        activation=activation,
        b13=b13,
        b2=b2,
        expert_map=expert_map,
        num_valid_tokens=num_valid_tokens,
        residual=residual,
        policy=policy,
        workspace=workspace,
        interleaved=interleaved,
        weight_on_input=weight_on_input,
    )
    y, weights, ids = _run_layer(call, backend, return_routing)
    return (y, weights, ids) if return_routing else y


def workspace_bytes(shape: LayerShape, max_tokens: int) -> int:
    """Bytes of scratch memory that calls of up to `max_tokens` tokens of this shape need on the CPU
    engine, with a default `Workspace`.

    Raises TypeError if `shape` is no LayerShape or max_tokens no int, ValueError if it is negative.
    """
    if not isinstance(shape, LayerShape):
        raise TypeError(f"shape must be a LayerShape, got {type(shape).__name__}")
    check_count("max_tokens", max_tokens, 0)
    from .host.workspace import workspace_bytes as host_bytes

    return host_bytes(shape, max_tokens)


class MoELayer(nn.Module):
    """An MoE layer as a module, for inference.

    `MoELayer(shape, routing)` makes one whose parameters are to be loaded (they start as normal
    noise of deviation 1 / sqrt(fan-in)); `MoELayer.from_transformers(block)` takes over a block of
    a transformers model, parameters and all.

    Parameters have the names of transformers' blocks: gate.weight [E, H] (and .bias,
    .e_score_correction_bias [E]), experts.gate_up_proj [E, 2I, H] (up_proj [E, I, H] if not gated),
    experts.down_proj [E, H, I] (and gate_up_proj_bias, down_proj_bias),
    shared_experts.{gate,up,down}_proj.weight, shared_expert_gate.weight [1, H].

    shape: sizes, dtype and gatedness of the experts.
    routing: the router; its top_k must be shape's.
    activation: see `fused_experts`; it must be gated if shape is.
    router_bias, selection_bias, expert_bias, shared_gate: whether there are such parameters.
    shared_intermediate: Is, rows of each half of the shared experts; 0 for none.
    interleaved, weight_on_input, policy, backend, workspace: see `fused_experts`.

    Raises TypeError or ValueError naming the argument.
    """

    def __init__(
        self,
        shape: LayerShape,
        routing: RoutingConfig,
        *,
        activation: str | Activation | None = None,
        router_bias: bool = False,
        selection_bias: bool = False,
        expert_bias: bool = False,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
        interleaved: bool = False,
        weight_on_input: bool = False,
        policy: str = "auto",
        backend: str = "auto",
        workspace: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(shape, LayerShape):
            raise TypeError(f"shape must be a LayerShape, got {type(shape).__name__}")
        if not isinstance(routing, RoutingConfig):
            raise TypeError(f"routing must be a RoutingConfig, got {type(routing).__name__}")
        if routing.top_k != shape.top_k:
            raise ValueError(
                f"routing.top_k must be shape.top_k {shape.top_k}, got {routing.top_k}"
            )
        routing.check_experts(shape.experts)
        check_count("shared_intermediate", shared_intermediate, 0)
        for name, flag in (
            ("router_bias", router_bias),
            ("selection_bias", selection_bias),
            ("expert_bias", expert_bias),
            ("shared_gate", shared_gate),
            ("interleaved", interleaved),
            ("weight_on_input", weight_on_input),
        ):
            check_flag(name, flag)
        if activation is None:
            activation = "silu" if shape.gated else "relu2"
        act = Activation.parse(activation)
        if act.gated != shape.gated:
            raise ValueError(
                f"activation must be {'gated' if shape.gated else 'relu2'}, as shape is, "
                f"got {act.kind}"
            )
        if interleaved and not act.gated:
            raise ValueError(f"interleaved must be False for {act.kind}, which has no gate rows")
        if shared_gate and not shared_intermediate:
            raise ValueError("shared_gate must be False without shared experts, got True")

        experts, hidden, dtype = shape.experts, shape.hidden, shape.torch_dtype

        def noise(*size: int) -> nn.Parameter:
            value = torch.randn(size, device=device) / size[-1] ** 0.5
            return nn.Parameter(value.to(dtype))

        def zeros(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

        def linear(rows: int, columns: int) -> nn.Module:
            holder = nn.Module()
            holder.weight = noise(rows, columns)
            return holder

        self.gate = linear(experts, hidden)
        if router_bias:
            self.gate.bias = zeros(experts)
        if selection_bias:
            # fp32 in every dtype, as transformers keeps it: bf16 would merge near-equal biases.
            bias = torch.zeros(experts, dtype=torch.float32, device=device)
            self.gate.register_buffer("e_score_correction_bias", bias)
        self.experts = nn.Module()
        w13 = "gate_up_proj" if shape.gated else "up_proj"
        self.experts.register_parameter(w13, noise(experts, shape.w13_rows, hidden))
        self.experts.down_proj = noise(experts, hidden, shape.intermediate)
        if expert_bias:
            self.experts.register_parameter(f"{w13}_bias", zeros(experts, shape.w13_rows))
            self.experts.down_proj_bias = zeros(experts, hidden)
        if shared_intermediate:
            self.shared_experts = nn.Module()
            for name in ("gate_proj", "up_proj") if shape.gated else ("up_proj",):
                self.shared_experts.add_module(name, linear(shared_intermediate, hidden))
            self.shared_experts.down_proj = linear(hidden, shared_intermediate)
            if shared_gate:
                self.shared_expert_gate = linear(1, hidden)
        self._settle(
            LayerParts(
                routing=routing,
                activation=act,
                w13=f"experts.{w13}",
                b13=f"experts.{w13}_bias" if expert_bias else None,
                b2="experts.down_proj_bias" if expert_bias else None,
                router_bias="gate.bias" if router_bias else None,
                selection_bias="gate.e_score_correction_bias" if selection_bias else None,
                shared="shared_experts" if shared_intermediate else None,
                shared_gate="shared_expert_gate.weight" if shared_gate else None,
                interleaved=interleaved,
                weight_on_input=weight_on_input,
            ),
            policy=policy,
            backend=backend,
            workspace=workspace,
        )

    @classmethod
    def from_transformers(
        cls,
        module: nn.Module,
        *,
        policy: str = "auto",
        backend: str = "auto",
        workspace: Any = None,
        drop_in: bool = False,
    ) -> Self:
        """A layer that computes what one of transformers' sparse-MoE blocks does.

        module: a block of a model of transformers 5, such as model.model.layers[0].mlp; which
            classes are covered is `weave_moe.blocks.COVERED`.
        drop_in: return what the block returns, so that the layer can take its place in the model.
            It matters for GptOssMLP, a tuple of hidden states and weights [T, k], and
            Llama4TextMoe, a tuple of hidden states [T, H] and logits [T, E].

        The block's own child modules, parameters and buffers are taken over under their names, so
        both share memory and state_dict() and load_state_dict() are the block's. Nothing is copied,
        with two exceptions, where the elements are put into another order in memory, names, shapes
        and values staying as they are: transposed expert weights (gpt-oss, Llama-4) are stored as
        W13 [E, 2I, H] and W2 [E, H, I], and the gate and up projections of shared experts lie end
        to end. Where that order would be lost (by moving or casting the layer, copying it, or
        assigning other parameters by load_state_dict) it is restored at once, and where a child
        module is moved behind the layer's back, by the next forward outside of a compiler.

        The router's own forward is not called: hooks on it see nothing, and jitter noise, which is
        for training, is not applied. The router is computed in fp32, so in a bf16 model near-tied
        experts may be ordered otherwise than by the block.

        Raises TypeError if module is no nn.Module, ValueError naming its class and what is in the
        way if it is not covered.
        """
        check_flag("drop_in", drop_in)
        parts = parts_of(module)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        for name, child in module.named_children():
            layer.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            layer.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            persistent = name not in module._non_persistent_buffers_set
            layer.register_buffer(name, buffer, persistent=persistent)
        layer.training = module.training
        layer._settle(parts, policy=policy, backend=backend, workspace=workspace, drop_in=drop_in)
        return layer

    def _settle(
        self,
        parts: LayerParts,
        *,
        policy: str,
        backend: str,
        workspace: Any,
        drop_in: bool = False,
    ) -> None:
        self.parts = parts
        self.policy = check_choice("policy", policy, POLICIES)
        self.backend = check_choice("backend", backend, backends.NAMES)
        self.workspace = workspace
        self.drop_in = drop_in
        self._put_in_order()
        self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]

    def _put_in_order(self) -> None:
        """Puts the weights into the memory order that calls need, where they are not in it.

        Wherever memory may have moved, rather than in a forward: that may be traced by a compiler,
        for which there is no memory, or recorded into a graph.
        """
        self._expert_weights()
        with torch.no_grad():
            self._shared_experts()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        bias = None if self.drop_in else self._tensor(self.parts.selection_bias)
        kept = bias.data if bias is not None and bias.dtype is torch.float32 else None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        bias = self._tensor(self.parts.selection_bias)
        if kept is not None and bias is not None and bias.dtype is not torch.float32:
            bias.data = kept.to(bias.device)  # a cast is of all else
        self._put_in_order()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._put_in_order()

    @property
    def routing(self) -> RoutingConfig:
        """How the router chooses and weighs experts."""
        return self.parts.routing

    @property
    def activation(self) -> Activation:
        """The experts' activation."""
        return self.parts.activation

    @property
    def shape(self) -> LayerShape:
        """Sizes of the routed experts, for `workspace_bytes`."""
        w2 = part(self, self.parts.w2)
        experts, hidden, intermediate = (
            w2.transpose(1, 2).shape if self.parts.transposed else w2.shape
        )
        return LayerShape(
            hidden,
            intermediate,
            experts,
            self.routing.top_k,
            dtype_name(w2.dtype),
            self.activation.gated,
        )

    def forward(
        self,
        hidden_states: Tensor,
        num_valid_tokens: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's output for hidden_states [..., H]: same shape and dtype, and nothing else.

        (With `drop_in`, what the block returned.) num_valid_tokens: see `fused_experts`; tokens are
        counted over all leading dimensions. residual: of hidden_states' shape and dtype, added to
        the output before it is rounded.

        Under torch.compile and torch.export the layer is one operator, `torch.ops.weave.moe_layer`,
        and the number of tokens may be a symbol; backend="reference" with gradients is traced
        through instead.

        Raises TypeError or ValueError naming the argument; ValueError, too, where gradients are
        needed and backend is not "reference": call it under torch.no_grad() or inference_mode();
        and under a compiler with a workspace, or with weights whose memory order was lost.
        """
        if not isinstance(hidden_states, Tensor):
            raise TypeError(
                f"hidden_states must be a torch.Tensor, got {type(hidden_states).__name__}"
            )
        parts, shape = self.parts, self.shape
        if hidden_states.dim() < 1 or hidden_states.size(-1) != shape.hidden:
            raise ValueError(
                f"hidden_states must have shape [..., {shape.hidden}], "
                f"got shape {list(hidden_states.shape)}"
            )
        if hidden_states.dtype is not shape.torch_dtype:
            raise TypeError(
                f"hidden_states must be {shape.dtype}, as the layer's experts are, "
                f"got {dtype_name(hidden_states.dtype)}"
            )
        if isinstance(residual, Tensor):  # what is no tensor is named by the call below
            if residual.shape != hidden_states.shape:
                raise ValueError(
                    f"residual must have hidden_states' shape {list(hidden_states.shape)}, "
                    f"got shape {list(residual.shape)}"
                )
            residual = residual.reshape(-1, shape.hidden)
        x = hidden_states.reshape(-1, shape.hidden)
        w13, w2 = self._expert_weights()
        options: dict[str, Any] = {
            "routing": parts.routing,
            "return_routing": self.drop_in and parts.output == "weights",
            "selection_bias": self._tensor(parts.selection_bias),
            "activation": parts.activation,
            "b13": self._tensor(parts.b13),
            "b2": self._tensor(parts.b2),
            "num_valid_tokens": num_valid_tokens,
            "residual": residual,
            "policy": self.policy,
            "interleaved": parts.interleaved,
            "weight_on_input": parts.weight_on_input,
            "backend": self.backend,
        }
        router, bias = part(self, parts.router_weight), self._tensor(parts.router_bias)
        logits = None
        if self.drop_in and parts.output == "logits":
            logits = options["router_logits"] = routers.router_logits(x, router, bias)
        else:
            options |= {"router_weight": router, "router_bias": bias}
        if is_recorded() and not self._trains(x, residual):
            result: Any = self._as_operator(x, w13, w2, options)
        else:
            result = moe_layer(
                x, w13, w2, shared=self._shared_experts(), workspace=self.workspace, **options
            )
        y: Tensor = result[0] if options["return_routing"] else result
        if logits is not None:
            return y, logits.to(y.dtype)
        y = y.view(hidden_states.shape)
        return (y, result[1].to(y.dtype)) if options["return_routing"] else y

    def warmup(self, tokens: int) -> None:
        """Compiles and loads, on the GPU that the layer is on, every kernel that its forward can
        need for up to `tokens` tokens; see `weave_moe.warmup`. Graph capture needs it before.

        Raises ValueError for a layer that the kernel does not take; RuntimeError where the layer is
        on no GPU that it runs on.
        """
        from .backends.cuda import BACKEND, unsupported, warmup

        parts, shape, device = self.parts, self.shape, self._device()
        if device.type != "cuda":
            raise RuntimeError(f"there is nothing to warm up: the layer is on {device}")
        w13, w2 = self._expert_weights()
        router, shared = part(self, parts.router_weight), self._shared_experts()
        logits = self.drop_in and parts.output == "logits"
        nothing = w2.new_empty(0, shape.hidden)
        given: dict[str, Any] = {"router_weight": router}
        if logits:
            given = {"router_logits": nothing.new_empty(0, shape.experts)}
        call = check_layer(
            nothing,
            w13,
            w2,
            routing=parts.routing,
            shared=shared,
            activation=parts.activation,
            interleaved=parts.interleaved,
            weight_on_input=parts.weight_on_input,
            **given,
        )
        options: dict[str, Any] = {"activation": parts.activation, "device": device.index}
        experts: dict[str, Any] = {
            "bias": parts.b13 is not None or parts.b2 is not None,
            "weight_on_input": parts.weight_on_input,
        }
        if BACKEND.layer_unavailable(call) is None:
            kind = "logits" if logits else dtype_name(router.dtype)
            inter = 0 if shared is None else shared.w2.size(1)
            warmup(shape, tokens, router=kind, shared_intermediate=inter, **experts, **options)
            return
        warmup(shape, tokens, **experts, **options)
        if shared is not None:  # a call of its own, or the reference's
            alone = shared_call(nothing, shared, call.experts.activation)
            if unsupported(alone) is None:
                warmup(alone.shape, tokens, **options)

    def _device(self) -> torch.device:
        device: torch.device = part(self, self.parts.router_weight).device
        return device

    def extra_repr(self) -> str:
        """The layer's options, for repr()."""
        return f"{self.shape}, {self.routing}, policy={self.policy!r}, backend={self.backend!r}"

    def _tensor(self, path: str | None) -> Tensor | None:
        return None if path is None else part(self, path)

    def _trains(self, *inputs: Tensor | None) -> bool:
        """Whether autograd has to follow a call, which it can through the reference only."""
        return (
            self.backend == "reference"
            and torch.is_grad_enabled()
            and any(
                isinstance(value, Tensor) and value.requires_grad
                for value in (*inputs, *self.parameters())
            )
        )

    def _as_operator(self, x: Tensor, w13: Tensor, w2: Tensor, options: dict[str, Any]) -> Any:
        """What a compiler sees of `moe_layer`: one opaque node."""
        _refuse_workspace(self.workspace)
        shared, up = None, None
        if self.parts.shared is not None:
            mlp, gate = part(self, self.parts.shared), self._tensor(self.parts.shared_gate)
            first = mlp.up_proj.weight
            if self.activation.gated:
                # Two tensors, which the operator joins: there is no memory to look at here.
                first, up = mlp.gate_proj.weight, first
            shared = SharedExperts(first, mlp.down_proj.weight, gate)
        return ops.moe_layer(x, w13, w2, shared=shared, shared_up=up, **options)

    def _expert_weights(self) -> tuple[Tensor, Tensor]:
        names = self.parts.w13, self.parts.w2
        w13, w2 = (part(self, name) for name in names)
        if not self.parts.transposed:
            return w13, w2
        if is_recorded():
            for name, weight in zip(names, (w13, w2), strict=True):
                if not _is_row_major(weight):
                    raise ValueError(
                        f"{name} must lie in memory as [E, columns, rows] where operators are "
                        "recorded (torch.compile, torch.export, make_fx): call the layer once "
                        "outside of them, which puts it into that order; got strides "
                        f"{list(weight.stride())}"
                    )
            return w13.transpose(1, 2), w2.transpose(1, 2)
        return _row_major(w13), _row_major(w2)

    def _shared_experts(self) -> SharedExperts | None:
        if self.parts.shared is None:
            return None
        mlp = part(self, self.parts.shared)
        w13 = mlp.up_proj.weight
        if self.activation.gated:
            w13 = _end_to_end(mlp.gate_proj.weight, w13)
        return SharedExperts(w13, mlp.down_proj.weight, self._tensor(self.parts.shared_gate))


def _after_load(layer: MoELayer, _keys: Any) -> None:
    layer._put_in_order()


def _is_row_major(parameter: Tensor) -> bool:
    """Whether parameter [E, n, m] lies in memory as [E, m, n], contiguous in its last dimension."""
    return parameter.stride(1) == 1 or parameter.size(1) == 1


def _row_major(parameter: Tensor) -> Tensor:
    """parameter [E, n, m] as [E, m, n], contiguous in its last dimension.

    The parameter keeps shape and values; its memory is put into that order if it is not.
    """
    if not _is_row_major(parameter) and not parameter.is_meta:
        # Outside inference mode, whose tensors a parameter cannot hold.
        with torch.inference_mode(False), torch.no_grad():
            parameter.data = parameter.transpose(1, 2).contiguous().transpose(1, 2)
    return parameter.transpose(1, 2)


def _end_to_end(gate: Tensor, up: Tensor) -> Tensor:
    """gate [I, H] and up [I, H] as one tensor [2I, H], without a copy where they lie end to end.

    Both keep shape and values; their memory is put into that order if it is not.
    """
    if (
        gate.is_meta
        or is_recorded()
        or (torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad))
    ):
        return torch.cat((gate, up))
    joined = ops.end_to_end(gate, up)
    if joined is None:
        with torch.inference_mode(False), torch.no_grad():
            joined = torch.cat((gate, up))
            gate.data, up.data = joined[: gate.size(0)], joined[gate.size(0) :]
    return joined
