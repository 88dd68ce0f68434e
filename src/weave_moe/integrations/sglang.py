"""SGLang's plugin: experts of unquantised MoE layers, where WEAVE_MOE_SGLANG=1 asks for it.

    WEAVE_MOE_SGLANG=1 python -m sglang.launch_server --model-path MODEL
    python -m weave_moe.integrations.sglang      # what would happen in this environment

SGLang finds `register` by the entry point `weave` of the group "sglang.srt.plugins" and calls it in
each of its processes. Nothing of SGLang is imported until the variable asks for it.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final

import torch
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

VARIABLE: Final = "WEAVE_MOE_SGLANG"
"""The environment variable that switches the plugin on."""

GROUP: Final = "sglang.srt.plugins"

_log = logging.getLogger("sglang.weave_moe")


def register() -> None:
    """Offers the experts to SGLang in this process, if the environment asks for them.

    SGLang calls it before it applies its plugins' hooks. Where the variable is not set it does
    nothing. Where this SGLang has no place for it, SGLang is left as it is and the log says why.

    Raises ValueError for a value of the variable other than 1, 0 or nothing.
    """
    if not asked_for(VARIABLE):
        return
    problem = _install()
    if problem is not None:
        _log.warning("weave-moe: not used in any layer, %s", problem)


def _install() -> str | None:
    """Registers runner and hook; why not, if that cannot be."""
    try:
        from . import sglang_runner
    except ImportError as error:
        return f"SGLang 0.5.19 or newer is needed, and this one lacks what the plugin uses: {error}"
    return sglang_runner.install()


def report(model: nn.Module) -> str:
    """Whether each layer of experts of a loaded SGLang model runs weave-moe, as text.

    model: the module within SGLang's model runner.

    Raises TypeError if model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

    found: list[Verdict] = []
    for path, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if not isinstance(method, FusedMoEMethodBase):
            continue
        known: Verdict | None = getattr(method, "weave_verdict", None)
        known = known or other_method("SGLang", path, method)
        found.append(Verdict(path, known.used, known.detail))
    return report_text(found)


def _discovered() -> str | None:
    """None if SGLang finds the plugin and loads it; else the reason."""
    problem = entry_point_problem(GROUP)
    if problem is not None:
        return problem
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        return f"SGLANG_PLUGINS={allowed} leaves it out"
    return None


def _found() -> tuple[str, str]:
    import sglang

    return sglang.__version__, "cuda" if torch.cuda.is_available() else "cpu"


def _usable() -> str | None:
    problem = _install()
    if problem is not None:
        return problem
    from .sglang_runner import device_problem

    return device_problem()


def main(arguments: list[str] | None = None) -> int:
    """`python -m weave_moe.integrations.sglang`: whether SGLang would use the plugin, and why not.

    Returns the exit status: 0 if it is on, 1 if it is off, 2 if there is no SGLang or the variable
    has a value that it cannot have.
    """
    return status_command(
        arguments,
        module="weave_moe.integrations.sglang",
        engine="SGLang",
        variable=VARIABLE,
        found=_found,
        discovered=_discovered,
        usable=_usable,
    )


if __name__ == "__main__":
    raise SystemExit(main())
