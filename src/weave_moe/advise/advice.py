"""The advice: times by policy, the gain of the layer and of the step, a verdict and its reason.

The gain is against, in this order: a time that is given; the best of the other implementations
where one was measured on such a layer and load; the same kernel with a static mapping, simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..backends.cuda import slab_tokens
from ..blocks import part
from ..layer import MoELayer
from ..presets import Preset
from ..routing import route, router_logits
from ..run.sources import Source, synthetic
from ..shapes import LayerShape, check_count, check_number
from ..simulate import Machine, Simulated, load_machine, simulate
from ..simulate.machine import Calibrated, calibration_of
from ..tools.choice import choose_plan
from .measured import MeasuredCell, measured_near, ratio_errors
from .memory import GPU_GB, Memory, ModelSize, fit_memory, size_of_preset

__all__ = [
    "ASSUMED_SHARE",
    "BUSY",
    "COMMUNICATION",
    "EXPONENTS",
    "LEVEL",
    "MATTERS",
    "POLICIES",
    "SPLITS",
    "STATIC",
    "VERDICTS",
    "Advice",
    "Sweep",
    "advise",
    "end_to_end",
    "needed_speedup",
    "preset_of",
    "routing_of",
]

VERDICTS: Mapping[str, str] = {
    "use": "use it",
    "does-not-matter": "does not matter",
    "communication-first": "fix communication first",
    "already-busy": "already busy",
    "no": "no",
}
"""Verdicts by name, and in words."""

ASSUMED_SHARE = 0.5
"""Of a step in its MoE layers' experts, where it is not said; or what communication leaves."""
MATTERS = 1.02
"""A step that gets less than so many times as fast does not matter."""
LEVEL = 0.01
"""Within so much of another's time, the layer is level with it: neither is slower."""
COMMUNICATION = 0.40
"""Above this share of the step, communication is what to fix."""
BUSY = 0.85
"""Above this share of busy SMs there is little that a schedule could fill."""

STATIC = ("static_strided", "static_expert")
"""Static mappings to compare with."""
POLICIES = ("steal", "counter", *STATIC)
SPLITS = ("tensor", "expert")
EXPONENTS = (0.0, 0.4, 0.8, 1.2, 1.6, 2.0)
"""Zipf exponents of the sweep for the break-even skew."""


def end_to_end(share: float, speedup: float) -> float:
    """How many times as fast a step is, `share` of which gets `speedup` times as fast (Amdahl).

    Raises ValueError for a share outside 0 .. 1 or a speedup that is not above 0.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be 0 .. 1, got {share}")
    if not speedup > 0:
        raise ValueError(f"speedup must be more than 0, got {speedup}")
    return 1 / ((1 - share) + share / speedup)


def needed_speedup(share: float, gain: float = MATTERS) -> float | None:
    """The layer's speedup with which a step gets `gain` times as fast; None if none is enough."""
    rest = 1 / gain - (1 - share)
    return share / rest if rest > 0 else None


@dataclass(frozen=True)
class Sweep:
    """Stealing against a static mapping as routing gets more skewed, simulated.

    gains: Zipf exponent -> the static mapping's time over stealing's.
    break_even: the least exponent from which on it is always enough to matter; None if there is
    none. A single one in between does not count: routings are drawn.
    """

    static: str
    gains: Mapping[float, float]
    needed: float | None

    @property
    def break_even(self) -> float | None:
        """The least exponent from which on the gain is at least what is needed."""
        found = None
        for exponent, gain in sorted(self.gains.items(), reverse=True):
            if self.needed is None or gain < self.needed:
                break
            found = exponent
        return found


@dataclass(frozen=True)
class Advice:
    """What `advise` found.

    verdict: a name of `VERDICTS`.  reason: one or two sentences.
    against: what the speedup is against: "given", "measured", "simulated"; "" where there is none.
    versus: that in words.  speedup: of the layer, None where the kernel does not take it.
    sure: the speedup less what is known of its error; the verdict goes by this.
    gain: of the step, 1 / ((1 - p) + p / s).
    share: p, of the step; assumed: nobody said so.
    results: one launch on one GPU, simulated under each policy.
    cells: measured near this load.  sweeps: gain by skew, for each static mapping.
    notes: lines for people.
    """

    verdict: str
    reason: str
    against: str = ""
    versus: str = ""
    speedup: float | None = None
    sure: float | None = None
    gain: float | None = None
    share: float = ASSUMED_SHARE
    assumed: bool = True
    communication: float = 0.0
    busy: float | None = None
    static: str = STATIC[0]
    results: tuple[Simulated, ...] = ()
    cells: tuple[MeasuredCell, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    memory: Memory | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def words(self) -> str:
        """The verdict in words."""
        return VERDICTS[self.verdict]


def preset_of(layer: Preset | MoELayer) -> Preset:
    """The layer as a preset: a MoELayer's sizes, router, activation and type."""
    if isinstance(layer, Preset):
        return layer
    if not isinstance(layer, MoELayer):
        raise TypeError(f"layer must be a Preset or a MoELayer, got {type(layer).__name__}")
    shape, parts = layer.shape, layer.parts
    return Preset(
        "layer",
        "a MoELayer",
        shape.hidden,
        shape.intermediate,
        shape.experts,
        parts.routing,
        activation=parts.activation,
        selection_bias=parts.selection_bias is not None,
        router_bias=parts.router_bias is not None,
        expert_bias=parts.b13 is not None,
        interleaved=parts.interleaved,
        weight_on_input=parts.weight_on_input,
        dtype=shape.dtype,
    )


@torch.no_grad()
def routing_of(layer: MoELayer, hidden_states: Tensor) -> Tensor:
    """ids int32 [T, k] that the layer's own router gives hidden_states [..., H].

    What to record of a running layer: call it in a forward hook, or on saved hidden states.
    Raises ValueError for hidden states of another size.
    """
    hidden = layer.shape.hidden
    if hidden_states.dim() < 1 or hidden_states.size(-1) != hidden:
        raise ValueError(
            f"hidden_states must have shape [..., {hidden}], got {list(hidden_states.shape)}"
        )
    parts = layer.parts

    def tensor(name: str | None) -> Tensor | None:
        return None if name is None else part(layer, name)

    logits = router_logits(
        hidden_states.reshape(-1, hidden),
        part(layer, parts.router_weight),
        tensor(parts.router_bias),
    )
    return route(logits, parts.routing, tensor(parts.selection_bias))[1]


def advise(
    layer: Preset | MoELayer,
    topk_ids: Any,
    *,
    share: float | None = None,
    communication: float = 0.0,
    busy: float | None = None,
    now_us: float | None = None,
    static: str = STATIC[0],
    machine: str | Path | Machine = "h200",
    held: int = 0,
    gpus: int | None = None,
    split: str | None = None,
    memory_gb: float | None = None,
    size: ModelSize | None = None,
    exponents: Sequence[float] = EXPONENTS,
    seed: int = 0,
    step: Callable[[str], None] = lambda what: None,
) -> Advice:
    """Whether this library helps a model under a load, and why.

    Args:
        layer: a preset, `presets.from_config(path)`, or a running `MoELayer`.
        topk_ids: [T, k] integers, the routing of one call: recorded (`routing_of`) or synthetic.
            With expert parallelism T counts the tokens of all GPUs.
        share: of a step's time that its MoE layers' experts take now, 0 to 1; None: not known, and
            `ASSUMED_SHARE` taken.
        communication: share of a step that communication takes, not hidden behind anything.
        busy: share of busy SMs in the layer now, as a profiler shows it; None: simulated, for the
            static mapping.
        now_us: microseconds that the layer's experts take now; None: what was measured near this
            load, else the simulated static mapping.
        static: the static mapping to compare with, of `STATIC`.
        machine: see `simulate`.  held: SMs of it that another kernel holds meanwhile.
        gpus: that share each layer; None: one has it whole, and memory is told for the fewest that
            hold the weights.
        split: how they share it: "tensor" (None: this) cuts each expert, "expert" deals experts
            out (the busiest GPU is simulated). Only with gpus.
        memory_gb: of a GPU; None: by the data sheet, where the machine's name is known.
        size: the model's weights; None: a preset's as published.
        exponents: Zipf exponents of the sweep for the break-even skew; () for none.
        seed: of the sweep's routings.
        step: is told what comes next; called 1 + len(POLICIES) + len(exponents) times at most.

    Raises:
        TypeError, ValueError: an argument outside what is allowed.
    """
    preset = preset_of(layer)
    _check_shares(share, communication, busy, now_us)
    if gpus is not None:
        check_count("gpus", gpus)
    if memory_gb is not None:
        check_number("memory_gb", memory_gb)
    if static not in STATIC:
        raise ValueError(f"static must be one of {', '.join(STATIC)}, got {static!r}")
    chosen = load_machine(machine)
    ids = _integers(topk_ids, preset)
    step("kernel")
    if split is not None and gpus is None:
        raise ValueError("split needs gpus: it says how so many GPUs share a layer")
    parts, split = 1 if gpus is None else gpus, split or SPLITS[0]
    shape, local = _one_gpu(preset.shape(), ids, parts, split)
    notes = _notes(chosen, len(local), held, parts, split)
    memory = _memory(preset, size, chosen, memory_gb, gpus, notes)
    common = Advice(
        "no",
        "",
        share=min(ASSUMED_SHARE, 1 - communication) if share is None else share,
        assumed=share is None,
        communication=communication,
        busy=busy,
        static=static,
        memory=memory,
    )
    if preset.quantized:
        reason = (
            f"the checkpoint's weights are {preset.quantized}, which the GPU kernel does not take; "
            "for advice on a copy in 16 bits, leave quantization_config out of the configuration"
        )
        return replace(common, reason=reason, notes=tuple(notes))
    mine = replace(preset, intermediate=shape.intermediate, experts=shape.experts)
    refused = choose_plan(mine, shape.dtype, len(local), None, chosen.sms).refused
    if refused is not None:
        reason = f"the GPU kernel does not take this layer ({refused}); the reference would run it"
        return replace(common, reason=reason, notes=tuple(notes))
    longest = slab_tokens(shape)
    if len(local) > longest:
        raise ValueError(
            f"topk_ids must be at most {longest} tokens, what one launch takes: a longer call is "
            f"several launches, one after another, and advice is on one; got {len(local)}"
        )

    results = []
    for policy in POLICIES:
        step(policy)
        results.append(simulate(shape, local, policy=policy, machine=chosen, held=held))
    times = {r.policy: r.time_us for r in results}
    cells: tuple[MeasuredCell, ...] = ()
    # What was measured beside others was measured on the shipped machine.
    shipped = chosen.verified and not isinstance(chosen, Calibrated)
    if shipped and not held and parts == 1:
        loads = np.bincount(local[local >= 0], minlength=shape.experts)
        cells = measured_near(shape, len(local), int((loads > 0).sum()), int(loads.max()))
    against, versus, speedup, sure = _speedup(times, static, now_us, cells)
    faster = [cell for cell in cells if cell.gain < 1 - LEVEL]
    if against == "given" and faster:
        notes.append(f"{faster[0].best[0]} was measured to be faster than this at {faster[0]}")
    if busy is None and against == "simulated":
        busy = next(r.busy_share for r in results if r.policy == static)
    found = replace(
        common,
        against=against,
        versus=versus,
        speedup=speedup,
        sure=sure,
        gain=end_to_end(common.share, speedup),
        busy=busy,
        results=tuple(results),
        cells=cells,
        notes=tuple(notes),
    )
    verdict, reason = _verdict(found)
    sweeps = _sweeps(
        preset, len(ids), chosen, held, parts, split, exponents, seed, common.share, step
    )
    return replace(found, verdict=verdict, reason=reason, sweeps=sweeps)


def _check_shares(
    share: float | None, communication: float, busy: float | None, now_us: float | None
) -> None:
    for name, value in (("share", share), ("communication", communication), ("busy", busy)):
        if value is not None and not 0 <= check_number(name, value) <= 1:
            raise ValueError(f"{name} must be 0 .. 1, got {value}")
    if (share or 0.0) + communication > 1:
        raise ValueError(
            f"share and communication are parts of one step and must add to at most 1, got "
            f"{share} and {communication}"
        )
    if now_us is not None and check_number("now_us", now_us) <= 0:
        raise ValueError(f"now_us must be more than 0, got {now_us}")


def _integers(topk_ids: Any, preset: Preset) -> npt.NDArray[np.int64]:
    ids = topk_ids.cpu().numpy() if isinstance(topk_ids, Tensor) else np.asarray(topk_ids)
    if ids.ndim != 2 or ids.shape[1] != preset.top_k or ids.dtype.kind not in "iu" or not len(ids):
        raise ValueError(
            f"topk_ids must be integers [T, {preset.top_k}] of at least 1 token, got {ids.dtype} "
            f"{list(ids.shape)}"
        )
    ids = ids.astype(np.int64)
    if not ((ids >= 0) & (ids < preset.experts)).any():
        raise ValueError(
            f"topk_ids must have a slot with an expert, 0 .. {preset.experts - 1}: all are empty"
        )
    return ids


def _one_gpu(
    shape: LayerShape, ids: npt.NDArray[np.int64], gpus: int, split: str
) -> tuple[LayerShape, npt.NDArray[np.int64]]:
    """The part of the layer and of the routing that the busiest of the GPUs has."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if gpus == 1:
        return shape, ids
    size = shape.intermediate if split == "tensor" else shape.experts
    if size % gpus:
        what = "intermediate size" if split == "tensor" else "number of experts"
        raise ValueError(f"gpus must divide the {what} {size} for split {split!r}, got {gpus}")
    if split == "tensor":
        return replace(shape, intermediate=size // gpus), ids
    each = size // gpus
    owner = np.where((ids >= 0) & (ids < size), ids // each, -1)
    busiest = int(np.bincount(owner[owner >= 0], minlength=gpus).argmax())
    local = np.where(owner == busiest, ids - busiest * each, -1)
    return replace(shape, experts=each), local


def _notes(machine: Machine, tokens: int, held: int, gpus: int, split: str) -> list[str]:
    notes = []
    errors = calibration_of(machine)["errors"]
    most_held = errors["policies"]["held"][-1] if "policies" in errors else 0
    outside = [] if machine.verified else [f"machine {machine.name}"]
    outside += [f"{tokens} tokens"] if tokens > errors["held_out"]["tokens"][-1] else []
    outside += [f"{held} held SMs"] if held > most_held else []
    if outside:
        notes.append(f"simulated and never measured, error unknown: {', '.join(outside)}")
    if gpus > 1:
        part_of = "its part of each expert" if split == "tensor" else "the busiest one's experts"
        notes.append(f"{gpus} GPUs share the layer: times are of one GPU, {part_of}")
    return notes


def _memory(
    preset: Preset,
    size: ModelSize | None,
    machine: Machine,
    memory_gb: float | None,
    gpus: int | None,
    notes: list[str],
) -> Memory | None:
    size = size or size_of_preset(preset)
    gpu_gb = memory_gb if memory_gb is not None else GPU_GB.get(machine.name)
    if size is None or gpu_gb is None:
        missing = "how large the model is" if size is None else f"the memory of {machine.name}"
        notes.append(f"memory: {missing} is not known")
        return None
    return fit_memory(size, gpu_gb, gpus)


def _speedup(
    times: Mapping[str, float],
    static: str,
    now_us: float | None,
    cells: Sequence[MeasuredCell],
) -> tuple[str, str, float, float]:
    """What the speedup is against, that in words, the speedup, and less its error."""
    errors = ratio_errors()
    if now_us is not None:
        speedup = now_us / times["steal"]
        return "given", f"the {now_us:,.1f} us it takes now", speedup, speedup / (1 + errors.time)
    if cells:
        worst = min(cells, key=lambda cell: cell.gain)
        return "measured", f"{worst.best[0]}, measured at {worst}", worst.gain, worst.gain
    speedup = times[static] / times["steal"]
    return (
        "simulated",
        f"the same kernel with {static}, simulated",
        speedup,
        speedup / (1 + errors.policies[static]),
    )


def _verdict(found: Advice) -> tuple[str, str]:
    """A name of `VERDICTS` and the reason. The first that applies."""
    assert found.speedup is not None
    assert found.sure is not None
    speedup, sure, memory, share = found.speedup, found.sure, found.memory, found.share
    if memory is not None and memory.asked and not memory.fits:
        return "no", (
            f"the weights do not fit: {memory.weights_gb:,.0f} GB need {memory.fewest} GPUs of "
            f"{memory.gpu_gb:g} GB, not {memory.gpus}"
        )
    if found.communication > COMMUNICATION:
        half = 1 / (1 - found.communication / 2)
        return "communication-first", (
            f"communication takes {found.communication:.0%} of the step: halving it gives "
            f"{half:.2f} times, this layer {end_to_end(share, speedup):.2f}"
        )
    if found.against == "measured" and speedup < 1 - LEVEL:
        return (
            "no",
            f"it was measured to be slower here: {speedup:.2f} times as fast as {found.versus}",
        )
    if found.against == "given" and speedup < 1 - LEVEL:
        return "no", f"it would be slower: {speedup:.2f} times as fast as {found.versus}"
    if found.busy is not None and found.busy > BUSY:
        most, predicted = 1 / found.busy, f"predicted: {speedup:.2f} against {found.versus}"
        if found.against == "simulated":
            return "already-busy", (
                f"SMs are busy {found.busy:.0%} of the time under {found.static}, simulated, so a "
                f"perfect schedule of this kernel gives at most {most:.2f} times; {predicted}. No "
                "other kernel was measured on such a layer: what yours takes now (--now) says more"
            )
        reason = (
            f"SMs are busy {found.busy:.0%} of the time now, so a perfect schedule gives at most "
            f"{most:.2f} times; {predicted}"
        )
        if speedup > most:
            reason += (
                ", which is more: that is not the kernel whose SMs are so busy, or they do more "
                "than they need; what it takes now (--now) would tell"
            )
        return "already-busy", reason
    gain = end_to_end(share, sure)
    less = "" if sure == speedup else f" ({sure:.2f} with the simulation's error against it)"
    part_of = f"{share:.0%} of the step{', assumed,' if found.assumed else ''}"
    level = found.against == "measured" and abs(speedup - 1) <= LEVEL
    as_fast = f"is level with {found.versus}, {speedup:.2f} times as fast"
    if not level:
        as_fast = f"gets {speedup:.2f} times as fast{less} as {found.versus}"
    reason = f"the layer {as_fast}; as {part_of} it makes the step {gain:.3f} times as fast"
    if gain >= MATTERS:
        return "use", reason
    needs = (1 - 1 / MATTERS) / (1 - 1 / sure) if sure > MATTERS else None
    reason += f"; below {MATTERS:g} it is not worth a change"
    if needs is not None:
        reason += f", which takes a layer of {math.ceil(100 * needs)}% of the step"
    return "does-not-matter", reason


def _sweeps(
    preset: Preset,
    tokens: int,
    machine: Machine,
    held: int,
    gpus: int,
    split: str,
    exponents: Sequence[float],
    seed: int,
    share: float,
    step: Callable[[str], None],
) -> tuple[Sweep, ...]:
    """Gains of stealing over each static mapping by the skew of a synthetic routing.

    None where a token has more slots than there are experts, which no router draws.
    """
    if preset.top_k > preset.experts:
        return ()
    gains: dict[str, dict[float, float]] = {name: {} for name in STATIC}
    for exponent in exponents:
        step(f"skew {exponent:g}")
        routed = synthetic(Source("zipf", value=exponent), preset, tokens, seed)
        ids = routed.topk_ids.numpy().astype(np.int64)
        shape, local = _one_gpu(preset.shape(), ids, gpus, split)
        steal = simulate(shape, local, policy="steal", machine=machine, held=held).time_us
        for name, its in gains.items():
            time = simulate(shape, local, policy=name, machine=machine, held=held).time_us
            its[exponent] = time / steal
    needed = needed_speedup(share)
    return tuple(Sweep(name, its, needed) for name, its in gains.items() if its)
