"""Whether a backend would run a layer's experts, asked without a call: by sizes and device."""

from __future__ import annotations

from typing import Final

import torch

from .. import backends
from ..layer import MoELayer
from ..shapes import Activation, ExpertsCall, LayerShape

__all__ = ["backend_problem", "problem_of"]


_run: Final[set[tuple[object, ...]]] = set()
"""What a backend is known to run. Refusals are not kept: a compiler may come, memory be freed."""


def backend_problem(
    wanted: str,
    device: str,
    index: int | None,
    shape: LayerShape,
    kind: str,
    *,
    interleaved: bool = False,
    weight_on_input: bool = False,
    aligned: bool = True,
    planned: bool = False,
) -> str | None:
    """Why backend `wanted` would not run experts like these, in words; None if it will.

    wanted: a name in `weave_moe.backends.NAMES`; "auto" is the fast backend of the device's type,
        never the reference. device, index: a torch device's type and index. kind: of the
        activation. aligned: whether both weights start at a multiple of 16 bytes. planned: it is to
        run on a Hopper GPU that need not be here.

    Raises torch.OutOfMemoryError where the device has no room for a few bytes.
    """
    key = (wanted, device, index, shape, kind, interleaved, weight_on_input, aligned, planned)
    if key in _run:
        return None
    name = {"cuda": "cuda", "cpu": "host"}.get(device) if wanted == "auto" else wanted
    if name is None:
        return f"no backend runs on a device of type {device}"
    # A stand-in that has the sizes in `shape` and needs no memory: what a backend looks at beside
    # them is where and how the weights lie.
    elsewhere = planned and name == "cuda"
    try:
        named = device if index is None else f"{device}:{index}"
        at = torch.device("cpu" if elsewhere else named)
        weight = torch.empty((1, 1, 32), dtype=shape.torch_dtype, device=at)
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError) as error:  # torch without CUDA asserts
        return f"there is no device {device} here: {str(error).splitlines()[0]}"
    if not aligned:
        weight = weight[:, :, 1:9]
    none = torch.empty((0, 1), dtype=shape.torch_dtype, device=at)
    call = ExpertsCall(
        x=none,
        w13=weight,
        w2=weight,
        topk_weights=none,
        topk_ids=none.to(torch.int32),
        activation=Activation(kind),
        b13=None,
        b2=None,
        expert_map=None,
        num_valid_tokens=None,
        residual=None,
        out=None,
        policy="auto",
        workspace=None,
        interleaved=interleaved,
        weight_on_input=weight_on_input,
        shape=shape,
    )
    if elsewhere:
        from ..backends.cuda import unsupported

        reason = unsupported(call)
    else:
        reason = backends.why_not(name, call)
    if reason is not None:
        return f"backend {name!r} cannot run it: {reason}"
    _run.add(key)
    return None


def problem_of(layer: MoELayer, device: torch.device, *, planned: bool = False) -> str | None:
    """Why the backend that `layer` asks for would not run it on `device`; None if it will."""
    return backend_problem(
        layer.backend,
        device.type,
        device.index,
        layer.shape,
        layer.activation.kind,
        interleaved=layer.parts.interleaved,
        weight_on_input=layer.parts.weight_on_input,
        planned=planned,
    )
