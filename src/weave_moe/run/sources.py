"""Where a run's routing comes from: a trace, text through the shipped model, or a generator.

Synthetic routing goes through the layer's own router: popularities become logits, and `route` turns
these into ids and weights, so group limits, renormalisation and scaling are those of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..presets import Preset
from ..routing import route
from ..shapes import Activation
from .errors import InputError

__all__ = [
    "RECORDED_TOKENS",
    "SOURCES",
    "SYNTHETIC_TOKENS",
    "Load",
    "Routed",
    "Source",
    "check_layer",
    "check_tokens",
    "from_trace",
    "load_of",
    "parse_source",
    "read_text",
    "synthetic",
]

SOURCES = (
    "trace:NAME, trace:FILE.npz, text:NAME, text:FILE, uniform, zipf[:A], dirichlet[:A] or "
    "hot[:SHARE]"
)
ZIPF = 1.2
DIRICHLET = 0.3
HOT = 0.5
_VALUES = {
    "zipf": (ZIPF, 0.0, 10.0, "an exponent from 0 to 10"),
    "dirichlet": (DIRICHLET, 0.01, 1e4, "a concentration from 0.01 to 10000"),
    "hot": (HOT, 0.0, 1.0, "a share from 0 to 1"),
}
"""Of kinds with a number: its default, its bounds, and these in words."""
SYNTHETIC_TOKENS, RECORDED_TOKENS = 512, 2048
"""Tokens of a run that is not told: of generated routing, and of a trace or a text at most."""


@dataclass(frozen=True)
class Source:
    """A parsed `--routing`. kind: trace, text, uniform, zipf, dirichlet or hot.

    name: what follows trace: or text:. value: the exponent of zipf, the concentration of dirichlet
    or the share of hot.
    """

    kind: str
    name: str = ""
    value: float = 0.0

    def __str__(self) -> str:
        if self.kind in ("trace", "text"):
            return f"{self.kind}:{self.name}"
        return self.kind if self.kind == "uniform" else f"{self.kind}:{self.value:g}"


@dataclass(frozen=True, eq=False)
class Routed:
    """Tokens with their experts, and whatever else of the layer is real.

    topk_ids: int32 [T, k]. topk_weights: float32 [T, k]. x: [T, H] hidden states that the model had
    there, or None where only the routing is known. w13, w2: that layer's own weights, or None.
    origin: one line for people.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    experts: int
    origin: str
    x: Tensor | None = None
    w13: Tensor | None = None
    w2: Tensor | None = None
    activation: Activation | None = None

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.topk_ids.shape[0])

    @property
    def top_k(self) -> int:
        """k."""
        return int(self.topk_ids.shape[1])


@dataclass(frozen=True)
class Load:
    """How tokens are spread: `slots` in all, on `used` of `experts`, `most` on the busiest."""

    slots: int
    experts: int
    used: int
    most: int

    def __str__(self) -> str:
        average = self.slots / max(1, self.experts)
        return (
            f"{self.slots} slots, {self.used} of {self.experts} experts used, "
            f"busiest {self.most} slots ({self.most / max(average, 1e-9):.1f} x the mean)"
        )


def load_of(routed: Routed) -> Load:
    """The load of `routed`; skipped slots do not count."""
    ids = routed.topk_ids.reshape(-1)
    ids = ids[(ids >= 0) & (ids < routed.experts)].long()
    counts = torch.bincount(ids, minlength=routed.experts)
    return Load(
        slots=int(counts.sum()),
        experts=routed.experts,
        used=int((counts > 0).sum()),
        most=int(counts.max()),
    )


def parse_source(text: str) -> Source:
    """A `--routing` value. Raises InputError for anything but the forms of `SOURCES`."""
    kind, colon, rest = text.partition(":")
    if kind in ("trace", "text") and rest:
        return Source(kind, name=rest)
    if kind == "uniform" and not colon:
        return Source(kind)
    if kind in _VALUES:
        default, low, high, allowed = _VALUES[kind]
        if not colon:
            return Source(kind, value=default)
        try:
            value = float(rest)
        except ValueError:
            value = math.nan
        if low <= value <= high:
            return Source(kind, value=value)
        raise InputError(f"--routing {kind}: must be followed by {allowed}, got {rest!r}")
    raise InputError(f"--routing must be {SOURCES}; got {text!r}")


def synthetic(source: Source, preset: Preset, tokens: int, seed: int) -> Routed:
    """Generated routing for `preset`'s router: ids and weights of `tokens` tokens.

    uniform: logits from a normal distribution, alike for every expert.
    zipf:A: the expert of popularity rank r is drawn with probability proportional to r^-A, k of
        them without replacement (Gumbel noise on log-popularity gives exactly that); ranks are
        shuffled.
    dirichlet:A: popularities are drawn from a symmetric Dirichlet distribution of concentration A,
        the smaller the more uneven; k experts with these probabilities, as for zipf.
    hot:S: uniform, but one expert is a token's first choice with probability S and its last
        otherwise. Group-limited routers still drop that expert where they drop its group.
    """
    generator = torch.Generator().manual_seed(seed)
    experts = preset.experts
    order = torch.randperm(experts, generator=generator)
    if source.kind in ("zipf", "dirichlet"):
        if source.kind == "zipf":
            rank = torch.empty(experts).scatter_(0, order, torch.arange(1.0, experts + 1))
            popularity = -source.value * rank.log()
        else:
            # Gamma variates over their sum are Dirichlet's. Where they are next to nothing, the
            # router's scores must still differ, or ties would favour the first experts.
            gamma = np.random.default_rng(seed).standard_gamma(source.value, experts)
            share = np.maximum(gamma / max(gamma.sum(), 1e-300), 1e-20)
            popularity = torch.from_numpy(np.log(share)).float()
        uniform = torch.rand(tokens, experts, generator=generator).clamp_(1e-9, 1 - 1e-7)
        logits = popularity - (-uniform.log()).log()
    else:
        logits = torch.randn(tokens, experts, generator=generator)
        if source.kind == "hot" and tokens:
            chosen = torch.rand(tokens, generator=generator) < source.value
            first, last = logits.amax(1) + 1, logits.amin(1) - 1
            logits[:, order[0]] = torch.where(chosen, first, last)
    bias = torch.zeros(experts) if preset.selection_bias else None
    weights, ids = route(logits, preset.routing, bias)
    what = {
        "uniform": "uniform random logits",
        "zipf": f"synthetic Zipf popularity, exponent {source.value:g}",
        "dirichlet": f"synthetic Dirichlet popularity, concentration {source.value:g}",
        "hot": f"synthetic hot expert, first choice of {source.value:.0%} of tokens",
    }[source.kind]
    return Routed(ids, weights.float(), experts, f"{what}, seed {seed}")


def from_trace(
    name: str, layer: int | None, tokens: int | None
) -> tuple[Routed, dict[str, object]]:
    """The first `tokens` tokens of a trace's layer (default 0), and the trace's metadata.

    Raises InputError for what `data.load_trace` refuses, a layer or a token that is not there.
    """
    from ..data import load_trace

    try:
        trace = load_trace(name)
    except ValueError as error:
        raise InputError(f"--routing {error}") from error
    layer = check_layer(layer, trace.layers, f"trace {trace.name}")
    count = check_tokens(tokens, trace.tokens, f"trace {trace.name}")
    ids = torch.from_numpy(trace.topk_ids[:count, layer].copy()).to(torch.int32)
    weights = torch.from_numpy(trace.topk_weights[:count, layer].copy()).float()
    note = trace.meta.get("note")
    kind = f" ({note})" if isinstance(note, str) else ""
    origin = f"trace {trace.name}, layer {layer} of {trace.layers}, tokens 0..{count - 1}{kind}"
    return Routed(ids, weights, trace.experts, origin), trace.meta


def read_text(name: str) -> tuple[str, str]:
    """A shipped text by name or a UTF-8 file by path: (text, what to call it). Or InputError."""
    from ..data import sample_text, text_names

    if name in text_names():
        return sample_text(name), f"shipped text {name}"
    path = Path(name)
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        known = ", ".join(text_names())
        raise InputError(
            f"--routing text {name!r} is neither a file nor a shipped text ({known})"
        ) from None
    except OSError as error:
        raise InputError(f"--routing text {name}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise InputError(f"--routing text {name}: not UTF-8 text") from None
    if not text:
        raise InputError(f"--routing text {name}: the file is empty")
    return text, f"text {path.name}"


def check_layer(layer: int | None, layers: int, where: str) -> int:
    """`layer`, 0 where it is None; InputError unless it is one of `layers`."""
    if layer is None:
        return 0
    if not 0 <= layer < layers:
        raise InputError(f"--layer must be from 0 to {layers - 1} for {where}, got {layer}")
    return layer


def check_tokens(wanted: int | None, there: int, where: str) -> int:
    """`wanted`, by default 2048 or all there are; InputError if there are fewer."""
    if wanted is None:
        return min(RECORDED_TOKENS, there)
    if wanted > there:
        raise InputError(f"--tokens must be at most {there} for {where}, got {wanted}")
    return wanted
