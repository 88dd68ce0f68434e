"""Whole sparse-MoE blocks of a model replaced by `MoELayer`, and put back.

Nothing here imports transformers: blocks are known by the names of their classes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import backends
from ..blocks import COVERED
from ..layer import MoELayer
from ..shapes import POLICIES, check_choice
from .fit import problem_of

if TYPE_CHECKING:
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self

__all__ = ["Optimized", "optimize"]

_log = logging.getLogger("weave_moe")


class Optimized:
    """What `optimize` did to a model, and the way back.

    replaced: names of the blocks that are an `MoELayer` now. kept: the reason for each block of a
    known class that stayed as it was, by name. As a context manager it restores the model at the
    end.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kept: dict[str, str] = {}
        self._model = model
        self._blocks: dict[str, nn.Module] = {}
        self._hook: RemovableHandle | None = None

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of the blocks that are replaced, in the model's order."""
        return tuple(self._blocks)

    def restore(self) -> None:
        """Puts the blocks back, with the weights as they are now. A second call does nothing."""
        for name, block in self._blocks.items():
            layer = self._model.get_submodule(name)
            # Moving a model replaces buffers. Those of children are shared, the block's are not.
            for key, value in layer.named_buffers(recurse=False):
                setattr(block, key, value)
            for key, parameter in layer.named_parameters(recurse=False):
                setattr(block, key, parameter)
            block.train(layer.training)
            _set_module(self._model, name, block)
        self._blocks.clear()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


_RECORDERS = "transformers.utils.output_capturing"
"""Whose hooks stay on a model's parts once its router logits or the like have been asked for. They
do nothing until that is done again, which `_refuse_router_logits` sees."""


def _hooked(block: nn.Module) -> bool:
    return any(
        hasattr(module, "_hf_hook")
        or module._forward_pre_hooks
        or any(
            getattr(hook, "__module__", None) != _RECORDERS
            for hook in module._forward_hooks.values()
        )
        for module in block.modules()
    )


def _configured(model: nn.Module) -> bool:
    """Whether a model hands out router logits where a call does not say."""
    return bool(getattr(getattr(model, "config", None), "output_router_logits", False))


def _refuse_router_logits(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Before each forward of a model with replaced blocks."""
    wanted = kwargs.get("output_router_logits")
    if _configured(model) if wanted is None else wanted:
        raise ValueError(
            "output_router_logits must not be True while blocks are replaced by weave_moe.optimize:"
            " a fused router hands out no logits; call .restore() of what optimize returned first"
        )


def optimize(
    model: nn.Module, *, policy: str = "auto", backend: str = "auto", workspace: Any = None
) -> Optimized:
    """Replaces the sparse-MoE blocks of known classes by whole layers, router included.

    The classes are `weave_moe.blocks.COVERED`; each block is taken over by
    `MoELayer.from_transformers(block, drop_in=True)`: parameters and their names stay, nothing is
    copied, and the router is computed in fp32. `.restore()` of what is returned puts the blocks
    back. Layers that are replaced already are left alone, so that it may be called twice.

    A block stays as it is, with the reason in the log "weave_moe" and in `.kept`, if it is not
    covered, it or a part of it has forward hooks (a fused layer would not run them), it is
    offloaded, the device's fast backend refuses it (the slow reference would run), or the model's
    configuration asks for router logits, which a fused router does not hand out: asking for them
    later is a ValueError in the model's forward. If anything else goes wrong, the model stays as it
    was.

    policy, backend, workspace: see `weave_moe.fused_experts`. For inference only.

    Raises TypeError if model is no module; ValueError if it has no block that could be replaced,
    with the reasons.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_choice("policy", policy, POLICIES)
    check_choice("backend", backend, backends.NAMES)
    done = Optimized(model)
    try:
        fused = _replace_blocks(done, policy=policy, backend=backend, workspace=workspace)
    except BaseException:
        done.restore()
        raise
    if not done._blocks and not fused:
        reasons = "; ".join(sorted(set(done.kept.values())))
        raise ValueError(
            f"model {type(model).__name__} has no sparse-MoE block that can be replaced: "
            f"{reasons or 'none of its modules is one of ' + ', '.join(COVERED)}"
        )
    if done._blocks:
        done._hook = model.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True)
    return done


def _replace_blocks(done: Optimized, *, policy: str, backend: str, workspace: Any) -> bool:
    """Replaces what can be; whether some block was replaced before."""
    model, fused = done._model, False
    for name, block in list(model.named_modules()):
        if isinstance(block, MoELayer):
            fused = True
        if type(block).__name__ not in COVERED or not name:
            continue
        reason = _why_kept(model, block)
        if reason is None:
            try:
                layer = MoELayer.from_transformers(
                    block, policy=policy, backend=backend, workspace=workspace, drop_in=True
                )
            except ValueError as error:
                reason = str(error)
            else:
                reason = problem_of(layer, next(block.parameters()).device)
        if reason is not None:
            done.kept[name] = reason
            _log.warning("%s stays as it is: %s", name, reason)
            continue
        _set_module(model, name, layer)
        done._blocks[name] = block
    return fused


def _why_kept(model: nn.Module, block: nn.Module) -> str | None:
    if _hooked(block):
        return "it has forward hooks, which a fused layer would not run"
    if any(tensor.is_meta for tensor in (*block.parameters(), *block.buffers())):
        return "its weights are on the meta device"
    if _configured(model):
        return "config.output_router_logits is True, and a fused router hands out no logits"
    return None
