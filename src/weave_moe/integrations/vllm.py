"""vLLM's plugin: experts of unquantised MoE layers, where WEAVE_MOE_VLLM=1 asks for it.

    WEAVE_MOE_VLLM=1 vllm serve MODEL            # the log says for each layer whether it is used
    python -m weave_moe.integrations.vllm        # what would happen in this environment

vLLM finds `register` by the entry point `weave` of the group "vllm.general_plugins" and calls it in
each of its processes. Nothing of vLLM is imported until the variable asks for it.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final

from torch import nn

from .switch import (
    PLUGIN,
    Verdict,
    asked_for,
    entry_point_problem,
    other_method,
    report_text,
    status_command,
)

__all__ = ["VARIABLE", "main", "register", "report"]

VARIABLE: Final = "WEAVE_MOE_VLLM"
"""The environment variable that switches the plugin on."""

GROUP: Final = "vllm.general_plugins"

# A child of vLLM's own logger, whose handlers and level it takes over.
_log = logging.getLogger("vllm.weave_moe")


def register() -> None:
    """Offers the experts to vLLM in this process, if the environment asks for them.

    vLLM calls it, perhaps more than once. Where the variable is not set it does nothing. Where this
    vLLM's classes are not the ones it knows, or another plugin has replaced them, vLLM is left as
    it is and the log says why.

    Raises ValueError for a value of the variable other than 1, 0 or nothing.
    """
    if not asked_for(VARIABLE):
        return
    problem = _install()
    if problem is not None:
        _log.warning("weave-moe: not used in any layer, %s", problem)


def _install() -> str | None:
    """Puts the experts into vLLM's registry; why not, if that cannot be."""
    try:
        from . import vllm_experts
    except ImportError as error:
        return f"this vLLM lacks what the plugin needs: {error}"
    return vllm_experts.install()


def report(model: nn.Module) -> str:
    """Whether each layer of experts of a loaded vLLM model runs weave-moe, as text.

    model: the module within a worker: `print(*llm.apply_model(report))`, for which vLLM wants
    VLLM_ALLOW_INSECURE_SERIALIZATION=1 where its workers are other processes.

    Raises TypeError if model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    found: dict[int, Verdict] = {}
    for path, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        # vLLM wraps the method of a layer that exchanges tokens; the wrapped one decided.
        method = getattr(method, "old_quant_method", method)
        if not isinstance(method, FusedMoEMethodBase) or id(method) in found:
            continue
        name = getattr(module, "layer_name", path)
        known: Verdict | None = getattr(method, "weave_verdict", None)
        found[id(method)] = known or other_method("vLLM", name, method)
    return report_text(list(found.values()))


def _discovered() -> str | None:
    """None if vLLM finds the plugin and loads it; else the reason."""
    problem = entry_point_problem(GROUP)
    if problem is not None:
        return problem
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves it out"
    return None


def _found() -> tuple[str, str]:
    import vllm
    from vllm.platforms import current_platform

    return vllm.__version__, current_platform.device_type or "no device"


def _usable() -> str | None:
    problem = _install()
    if problem is not None:
        return problem
    from .vllm_experts import device_problem

    return device_problem()


def main(arguments: list[str] | None = None) -> int:
    """`python -m weave_moe.integrations.vllm`: whether vLLM would use the plugin, and why not.

    Returns the exit status: 0 if it is on, 1 if it is off, 2 if there is no vLLM or the variable
    has a value that it cannot have.
    """
    return status_command(
        arguments,
        module="weave_moe.integrations.vllm",
        engine="vLLM",
        variable=VARIABLE,
        found=_found,
        discovered=_discovered,
        usable=_usable,
    )


if __name__ == "__main__":
    raise SystemExit(main())
