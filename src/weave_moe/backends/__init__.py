"""Who computes the experts: one small interface, and the choice of a backend for a call."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..routing import LayerCall
from ..shapes import ExpertsCall, check_choice, lacks_memory

__all__ = ["NAMES", "Backend", "WholeLayer", "choose", "whole", "why_not"]

NAMES: Final = ("auto", "cuda", "host", "reference")
"""What `backend` may be: "auto", or the name of one."""

_log = logging.getLogger("weave_moe")


@runtime_checkable
class Backend(Protocol):
    """Computes the experts of a checked call.

    A backend is the object `BACKEND` of a module `weave_moe.backends.<name>`.
    """

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    def unavailable(self, call: ExpertsCall) -> str | None:
        """Why this backend cannot run `call` here, in words for the user; None if it can."""
        ...

    def experts(self, call: ExpertsCall) -> Tensor:
        """Runs `call`, which has at least one token: [T, H] in x's dtype, `call.out` if given."""
        ...


@runtime_checkable
class WholeLayer(Protocol):
    """A backend that also runs router and shared experts itself."""

    def layer_unavailable(self, call: LayerCall) -> str | None:
        """Why it cannot, given that it can run the experts; None if it can."""
        ...

    def layer(self, call: LayerCall, return_routing: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(y [T, H], weights fp32 [T, k], ids int32 [T, k]); the last two are empty if not asked
        for. At least one token."""
        ...


_loaded: dict[str, Backend] = {}


def _load(name: str) -> Backend | str:
    """The backend of that name, or why it cannot be loaded."""
    if name in _loaded:
        return _loaded[name]
    try:
        backend = importlib.import_module(f"{__name__}.{name}").BACKEND
    except ModuleNotFoundError as error:
        if error.name == f"{__name__}.{name}":
            return "it is not part of this version"
        return f"it needs the module {error.name}"
    except (ImportError, OSError) as error:
        return f"it does not load: {error}"
    assert isinstance(backend, Backend)
    _loaded[name] = backend
    return backend


def _for_call(name: str, call: ExpertsCall) -> Backend | str:
    """The backend of that name if it can run `call`, or why not."""
    backend = _load(name)
    if isinstance(backend, str):
        return backend
    return backend.unavailable(call) or backend


def why_not(name: str, call: ExpertsCall) -> str | None:
    """Why the backend of that name cannot run `call` here, in words for the user; None if it can.

    name: one of `NAMES` but not "auto", else ValueError.
    """
    check_choice("backend", name, NAMES[1:])
    found = _for_call(name, call)
    return found if isinstance(found, str) else None


def whole(call: LayerCall, name: str = "auto") -> WholeLayer | None:
    """The backend that runs all of the layer itself, None where it is put together from parts."""
    device = call.experts.device.type
    if name not in ("auto", "cuda") or device != "cuda":
        return None
    inputs = call.inputs()
    if _needs_grad(inputs) is not None:
        return None  # the parts say which
    _check_memory(inputs | {"out": call.experts.out})
    found = _for_call("cuda", call.experts)
    if not isinstance(found, WholeLayer):
        return None
    return None if found.layer_unavailable(call) else found


@lru_cache(maxsize=256)
def _log_fallback(name: str, reason: str) -> None:
    # The cache is what makes it once for each reason.
    _log.warning("the %s backend is not used: %s; running the slow reference", name, reason)


def _needs_grad(inputs: Mapping[str, Tensor]) -> str | None:
    """The first input that autograd would have to follow, if any."""
    if not torch.is_grad_enabled():
        return None
    return next((name for name, value in inputs.items() if value.requires_grad), None)


def _check_memory(tensors: Mapping[str, Tensor | None]) -> None:
    """ValueError for the first without: backends are given addresses."""
    for name, value in tensors.items():
        if value is not None and lacks_memory(value):
            raise ValueError(
                f"{name} has no memory: it stands for a tensor that is not there; pass one that "
                "holds its values, or backend='reference'"
            )


def choose(call: ExpertsCall, name: str = "auto") -> Backend:
    """The backend that runs `call`.

    "auto" takes `cuda` for tensors on an NVIDIA GPU and `host` for tensors on the CPU, where that
    backend is present and takes the call; else `reference`, with a warning in the log (logger
    "weave_moe"), once for each reason. Any other name means that backend and no other.

    Only the reference can be differentiated through, and only if it is asked for by name.

    Raises TypeError or ValueError for an unknown name, ValueError with the reason if the backend
    asked for cannot run the call or a tensor has no memory, and ValueError if gradients are needed:
    run inference under torch.no_grad() or torch.inference_mode().
    """
    check_choice("backend", name, NAMES)
    if name != "reference":
        inputs = call.inputs()
        if (tensor := _needs_grad(inputs)) is not None:
            raise ValueError(
                f"{tensor} requires grad, but backend={name!r} is for inference only: call it "
                "under torch.no_grad() or torch.inference_mode(), or pass backend='reference'"
            )
        _check_memory(inputs | {"out": call.out})
    if name != "auto":
        found = _for_call(name, call)
        if isinstance(found, str):
            raise ValueError(f"backend {name!r} cannot run this call: {found}")
        return found
    wanted = {"cuda": "cuda", "cpu": "host"}.get(call.device.type)
    if wanted is not None:
        found = _for_call(wanted, call)
        if not isinstance(found, str):
            return found
        _log_fallback(wanted, found)
    fallback = _for_call("reference", call)
    assert not isinstance(fallback, str)
    return fallback
