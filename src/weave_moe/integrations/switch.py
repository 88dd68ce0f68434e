"""What the serving engines' plugins share: the switch, the shape's fit, and kernels made early."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch

from .._version import __version__
from ..shapes import Activation, LayerShape
from .fit import backend_problem

__all__ = [
    "BACKENDS",
    "PLUGIN",
    "Verdict",
    "asked_for",
    "device_here",
    "entry_point_problem",
    "fit_problem",
    "make_kernels",
    "other_method",
    "report_text",
    "status_command",
]

PLUGIN = "weave"
"""The name of our entry points."""

BACKENDS = {"cuda": "cuda", "cpu": "host"}
"""The fast backend of a device's type."""


@dataclass(frozen=True)
class Verdict:
    """What became of one layer's experts.

    name: the layer's name in the engine. used: whether the layer runs weave-moe. detail: the
    backend if it does, else the reason why not.
    """

    name: str
    used: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {'used' if self.used else 'not used'}, {self.detail}"


def other_method(engine: str, name: str, method: object) -> Verdict:
    """The verdict on a layer that the engine runs by a class that the plugin never touches."""
    kind = type(method).__name__
    return Verdict(name, False, f"{engine} runs it by {kind}, which the plugin leaves alone")


def report_text(verdicts: list[Verdict]) -> str:
    """The verdicts as text: one line that sums them up, then one for each layer."""
    if not verdicts:
        return "weave-moe: off, the model has no layers of experts"
    used = sum(verdict.used for verdict in verdicts)
    state = "on" if used == len(verdicts) else "partly on" if used else "off"
    lines = [f"weave-moe: {state}, in {used} of {len(verdicts)} layers of experts"]
    return "\n".join([*lines, *(f"  {verdict}" for verdict in verdicts)])


def asked_for(variable: str) -> bool:
    """Whether the environment variable switches a plugin on: "1" does; "", "0" or unset do not.

    Raises ValueError for any other value.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable} must be 1 (on) or 0 (off), got {value!r}")
    return value == "1"


def entry_point_problem(group: str) -> str | None:
    """None if an engine that looks for plugins in `group` finds ours; else the reason."""
    if PLUGIN in [point.name for point in metadata.entry_points(group=group)]:
        return None
    return "weave-moe's entry point is not installed: run pip install on weave-moe again"


def status_command(
    arguments: list[str] | None,
    *,
    module: str,
    engine: str,
    variable: str,
    found: Callable[[], tuple[str, str]],
    discovered: Callable[[], str | None],
    usable: Callable[[], str | None],
) -> int:
    """`python -m MODULE` of an engine's plugin: whether the engine would use it, and why not.

    found: the engine's version and its device, ImportError where there is no such engine.
    discovered, usable: why the engine would not load the plugin, why it could not use it.

    Returns the exit status: 0 if it is on, 1 if it is off, 2 if there is no engine or the variable
    has a value that it cannot have.
    """
    if sys.argv[1:] if arguments is None else arguments:
        print(f"usage: python -m {module}", file=sys.stderr)
        return 2
    try:
        version, device = found()
    except ImportError as error:
        print(f"error: {engine} cannot be imported: {error}", file=sys.stderr)
        return 2
    try:
        asked = asked_for(variable)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"weave-moe {__version__}, {engine} {version}, torch {torch.__version__}, on {device}")
    problem = discovered()
    if problem is None and not asked:
        problem = f"{variable} is not 1"
    if problem is None:
        problem = usable()
    if problem is not None:
        print(f"weave-moe: off, {problem}")
        return 1
    print("weave-moe: on; at start the log says for each layer whether it is used")
    return 0


def device_here(kind: str) -> tuple[str, int | None]:
    """The device of type `kind` that this process computes on: its type and index."""
    if kind == "cuda" and torch.cuda.is_available():
        return kind, torch.cuda.current_device()
    return kind, None


def fit_problem(
    device: str, shape: LayerShape, activation: Activation, *, interleaved: bool = False
) -> str | None:
    """Why the fast backend of a device type does not run such experts; None if it does."""
    kind, index = device_here(device)
    return backend_problem("auto", kind, index, shape, activation.kind, interleaved=interleaved)


_made: set[tuple[LayerShape, Activation, bool, int, int | None]] = set()


def make_kernels(
    device: str,
    shape: LayerShape,
    activation: Activation,
    *,
    bias: bool,
    tokens: int,
    log: logging.Logger,
) -> str | None:
    """Compiles and loads what calls of up to `tokens` tokens need, once for each kind of layer.

    Engines capture graphs later, and a capture can load nothing. On a CPU there is nothing to do.
    Returns why it cannot be done, None if it is.
    """
    kind, index = device_here(device)
    if kind != "cuda":
        return None
    key = (shape, activation, bias, tokens, index)
    if key in _made:
        return None
    start = time.monotonic()
    try:
        from ..backends.cuda import warmup

        warmup(shape, tokens, activation=activation, bias=bias, device=index)
    except Exception as error:  # whatever it is: a server goes on with its own experts
        text = str(error).strip() or type(error).__name__
        return f"its kernels cannot be made: {text.splitlines()[0]}"
    _made.add(key)
    seconds = time.monotonic() - start
    log.info("weave-moe: kernels for up to %d tokens are loaded (%.1f s)", tokens, seconds)
    return None
