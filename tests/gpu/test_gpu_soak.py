"""Minutes of whole layers at random: `pytest tests/gpu -m gpu_long -k soak`.

Round by round: layers and inputs are drawn, each is held to the truth by itself, and then they run
many times in random order, of any policy, on several streams and out of CUDA graphs, while another
kernel holds a random number of SMs. Every result must be the bits of the first. Set in the
environment:

    WEAVE_SOAK_SECONDS   how long, 240 if not set
    WEAVE_SOAK_SEED      where chance starts, 0 if not set; a second run takes another

A launch that never ends ends the process, with a traceback and what was drawn.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from gpu_cases import POLICIES, TARGET, poison_scratch, same_bits
from layer_cases import (
    Layer,
    LayerCase,
    Recorded,
    assert_result,
    assert_routing,
    compile_layers,
    make_layer,
)
from layer_cases import layer as row
from layer_tables import H, I, base
from torch import Tensor

import weave_moe
from weave_moe import RoutingConfig
from weave_moe.tools.neighbour import held

pytestmark = pytest.mark.gpu_long

SECONDS = float(os.environ.get("WEAVE_SOAK_SECONDS", "240"))
SEED = int(os.environ.get("WEAVE_SOAK_SEED", "0"))
STREAMS = 3
CASES, LAUNCHES = (24, 400) if TARGET.on_gpu else (6, 20)
"""Of a round."""

MOST_TOKENS = 1100 if TARGET.on_gpu else 40
HANG_SECONDS = 120.0
"""A round's launches take a second."""

# Few, so that all kernels are soon compiled.
SHAPES: tuple[Layer, ...] = (
    base(RoutingConfig(4), ()),
    base(RoutingConfig(4), (), shared=2 * I, shared_gate=True),
    base(RoutingConfig(4), (), router="float32", shared=I),
    base(RoutingConfig(4), (), logits=True, router="float32"),
    base(RoutingConfig(4), (), activation="swiglu_oai", biases=True, interleaved=True),
    row(352, 176, 16, RoutingConfig(4), (), shared=200),
    row(256, 64, 133 if TARGET.on_gpu else 33, RoutingConfig(8), ()),
    row(256, 64, 896 if TARGET.on_gpu else 64, RoutingConfig(16), (), shared=64),
    row(H, I, 16, RoutingConfig(4), (), dtype="float16", router="float16", shared=I),
)


def random_layer(chance: random.Random) -> Layer:
    """One of the shapes with any router and any options that need no other kernel."""
    one = chance.choice(SHAPES)
    top_k, experts = one.shape.top_k, one.shape.experts
    groups = [g for g in (1, 1, 2, 4) if experts % g == 0]
    count = chance.choice(groups)
    kept = chance.randint(1, count)
    if experts // count * kept < top_k:
        kept = count
    config = RoutingConfig(
        top_k,
        chance.choice(RoutingConfig.SCORINGS),
        chance.random() < 0.5,
        chance.choice((1.0, 2.5)),
        count,
        kept,
    )
    return replace(
        one,
        routing=config,
        router_bias=not one.logits and chance.random() < 0.3,
        selection_bias=chance.random() < 0.4,
        residual=chance.random() < 0.3,
        # More than 1,024 are routed by torch, in front of the kernel.
        routable=2 * experts + 8 if count == 1 and experts < 500 and chance.random() < 0.3 else 0,
    )


EDGES = (1, 2, 8, 9, 12, 13, 64, 65, 256, 257)


def random_tokens(chance: random.Random) -> int:
    """Often few, now and then many, and around where kernels change."""
    drawn = (chance.choice(EDGES), chance.randint(1, 40), chance.randint(1, 300), MOST_TOKENS)
    return min(chance.choices(drawn, (4, 4, 2, 1))[0], MOST_TOKENS)


def skew(case: LayerCase, chance: random.Random) -> LayerCase:
    """The case with a router that prefers some experts: a few, one, or none, by a lot."""
    kind = chance.choice(("even", "even", "few", "one", "zipf", "ties"))
    if kind == "even":
        return case
    g = torch.Generator().manual_seed(chance.randrange(2**31))
    if kind == "ties":
        if "router_logits" not in case.options:
            return case
        return case.with_(router_logits=case.options["router_logits"].round())
    bias = {
        "few": 4.0 * (torch.rand(case.experts, generator=g) < 0.1),
        "one": 8.0 * (torch.arange(case.experts) == chance.randrange(case.experts)),
        "zipf": 3.0 * torch.rand(case.experts, generator=g) ** 8,
    }[kind].to(case.x.device)
    if "router_logits" in case.options:
        return case.with_(router_logits=case.options["router_logits"] + bias)
    own = case.options.get("router_bias")
    return case.with_(router_bias=bias if own is None else (own + bias).to(own.dtype))


Results = tuple[Tensor, Tensor, Tensor]


@dataclass
class Drawn:
    """A case, its right results, and what a launch of it writes.

    valid: tokens that are no padding.  wrong: results that were not right, counted on the device.
    """

    case: LayerCase
    want: Results
    valid: int
    wrong: Tensor
    graphs: dict[int, Recorded] = field(default_factory=dict)

    def compare(self, got: tuple[Tensor, ...]) -> None:
        """Counts, without waiting, a result that has other bits."""
        y, weights, ids = self.want
        bad = (got[0] != y).any()
        for mine, right in ((got[1], weights), (got[2], ids)):
            bad = bad | (mine[: self.valid] != right[: self.valid]).any()
        self.wrong.add_(bad)

    def __str__(self) -> str:
        return f"{self.case.tokens} tokens ({self.valid} valid) of {self.case.layer}"


def draw(chance: random.Random) -> Drawn:
    """A case by chance, held to the truth."""
    one, tokens = random_layer(chance), random_tokens(chance)
    case = skew(make_layer(one, tokens, seed=chance.randrange(2**31)), chance)
    valid = tokens
    if chance.random() < 0.4:
        valid = chance.choice((0, tokens, chance.randint(0, tokens)))
        count = torch.tensor(valid, device=TARGET.device)
        case = case.with_(num_valid_tokens=count)
        # What is past them may be anything.
        case.x[valid:] = float("nan")
    want = case.routed()
    drawn = Drawn(case, want, valid, torch.zeros((), dtype=torch.int64, device=TARGET.device))
    try:
        assert_routing(case, want[1], want[2])
        assert_result(case, *want)
    except AssertionError as error:
        raise AssertionError(f"{drawn}: {error}") from error
    return drawn


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        yield


def neighbour(chance: random.Random, cores: int) -> Any:
    """SMs held by another kernel: none, some, or all but one."""
    if not TARGET.on_gpu:
        return nullcontext()
    return held(chance.choice((0, chance.randrange(cores), cores - 1)), TARGET.device)


@contextmanager
def no_hang(seconds: float, what: str) -> Iterator[None]:
    """Ends the process where the block does not end: nothing else gets a stuck device back."""
    print(what, flush=True)
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_round(drawn: list[Drawn], streams: list[Any], chance: random.Random, cores: int) -> int:
    """Launches of all cases at random, beside a neighbour; how many there were."""

    def launch(one: Drawn, at: int, policy: str, graph: bool) -> None:
        with on_stream(streams[at]):
            if graph and at in one.graphs:
                one.compare(one.graphs[at].replay())
            else:
                one.compare(one.case.routed(policy=policy))

    # A graph belongs to a stream, for two replays of one at a time would share what they write.
    # All are recorded first, because a capture gives back the memory that nobody holds.
    for i, one in enumerate(drawn[::3]):
        one.graphs[i % len(streams)] = Recorded(one.case.routed)
    # Once everywhere, undisturbed: code is loaded and memory is there.
    for one in drawn:
        for at in range(len(streams)):
            launch(one, at, "auto", False)
            launch(one, at, "auto", True)
    if TARGET.on_gpu:
        torch.cuda.synchronize()
        poison_scratch()
        torch.cuda.synchronize()
    count = 0
    for _ in range(4):
        with neighbour(chance, cores):
            for _ in range(LAUNCHES // 4):
                one, at = chance.choice(drawn), chance.randrange(len(streams))
                launch(one, at, chance.choice(POLICIES), chance.random() < 0.5)
                count += 1
            for stream in streams:
                if stream is not None:
                    stream.synchronize()
    return count


def test_soak(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():  # what a hang leaves must be seen
        soak(SECONDS, SEED)


def soak(seconds: float, seed: int) -> None:
    """Rounds for that long, at least one."""
    chance = random.Random(seed)
    cores: int = 1
    streams: list[Any] = [None]
    if TARGET.on_gpu:
        cores = torch.cuda.get_device_properties(TARGET.device).multi_processor_count
        streams = [torch.cuda.Stream(TARGET.device) for _ in range(STREAMS)]
        compile_layers(replace(one, tokens=(*EDGES, 40, 300, MOST_TOKENS)) for one in SHAPES)
    end = time.monotonic() + seconds
    rounds = launches = 0
    while not rounds or time.monotonic() < end:
        drawn_by = chance.randrange(2**31)
        own, where = random.Random(drawn_by), f"round {rounds}, drawn by {drawn_by}"
        # Before the clock starts: compiling is not hanging.
        drawn = [draw(own) for _ in range(CASES)]
        with no_hang(HANG_SECONDS, where):
            launches += run_round(drawn, streams, own, cores)
            wrong = {str(one): int(one.wrong) for one in drawn if int(one.wrong)}
        assert not wrong, f"{where}: launches with other bits: {wrong}"
        if TARGET.on_gpu:
            weave_moe.check()
        rounds += 1
    print(f"{rounds} rounds, {launches} launches, none wrong")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_soak_finds_a_wrong_result(which: int) -> None:
    chance = random.Random(1)
    drawn = draw(chance)
    while drawn.valid == 0:
        drawn = draw(chance)
    got = list(drawn.case.routed())
    drawn.compare(tuple(got))
    assert int(drawn.wrong) == 0
    got[which] = got[which].clone()
    got[which][drawn.valid - 1, -1] += 1
    drawn.compare(tuple(got))
    assert int(drawn.wrong) == 1
    assert not same_bits(got[which], drawn.want[which])
