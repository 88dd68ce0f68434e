"""The longer list: `pytest tests/gpu -m gpu_long`. Minutes, not seconds.

A planted bug is one line of device code taken away (plants.py). Of each it says what catches it:
where that depends on time, on who runs when, it is luck, and the test is marked so. Those of memory
orders tests/test_kernels.py catches without luck, in the machine code.
"""

from __future__ import annotations

import random

import pytest
import torch
from gpu_cases import (
    POLICIES,
    ROUTINGS,
    SMALL,
    check,
    compile_all,
    configs,
    expect,
    make,
    poison_scratch,
    same_bits,
    shape,
    skewed,
)
from layer_cases import cases_of, check_layer, differs, expect_layers, make_layer, recorded
from layer_tables import EACH, LAYERS, WHOLE
from plants import CAUGHT, LUCKY, Patch

import weave_moe
from weave_moe.runtime import kernel
from weave_moe.tools.neighbour import held

pytestmark = pytest.mark.gpu_long

TOKENS = (1, 3, 12, 40, 200, 1100)
expect(SMALL, TOKENS)
expect_layers(WHOLE.values())


def test_twenty_thousand_launches_among_neighbours(gpu: torch.device) -> None:
    cases = [make(SMALL, tokens, routing=routing) for tokens in TOKENS for routing in ROUTINGS]
    want = [check(case) for case in cases]
    outs = [torch.empty_like(value) for value in want]
    sms = torch.cuda.get_device_properties(gpu).multi_processor_count
    stream = torch.cuda.Stream(gpu)
    chance = random.Random(0)
    wrong = torch.zeros((), dtype=torch.int64, device=gpu)
    torch.cuda.synchronize()

    def launch(i: int, policy: str) -> None:
        with torch.cuda.stream(stream):
            outs[i].fill_(float("nan"))
            cases[i].run(policy=policy, out=outs[i])
            wrong.add_((outs[i] != want[i]).any())

    for policy in POLICIES:
        for i in range(len(cases)):
            launch(i, policy)
    torch.cuda.synchronize()
    done = 0
    while done < 20_000:
        with held(chance.choice([0, 0, chance.randrange(sms), sms - 1]), gpu):
            for _ in range(100):
                launch(chance.randrange(len(cases)), chance.choice(POLICIES))
                done += 1
            stream.synchronize()
        assert int(wrong) == 0, done
    weave_moe.check()


def test_a_thousand_replays(gpu: torch.device) -> None:
    for tokens in TOKENS:
        cases = [make(SMALL, tokens, seed=seed, routing=skewed) for seed in range(8)]
        want = [check(case) for case in cases]
        static = cases[0].with_(
            **{
                n: t.clone()
                for n, t in zip(
                    ("x", "weights", "ids"),
                    (cases[0].args[0], cases[0].args[3], cases[0].args[4]),
                    strict=True,
                )
            }
        )
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = static.run()
        wrong = torch.zeros((), dtype=torch.int64, device=gpu)
        for i in range(1000):
            for at in (0, 3, 4):
                static.args[at].copy_(cases[i % 8].args[at])
            out.fill_(float("nan"))
            graph.replay()
            wrong.add_((out != want[i % 8]).any())
        assert int(wrong) == 0, tokens


@pytest.mark.parametrize(("name", "tokens"), cases_of(WHOLE, (1, 12, *EACH, 1100)))
def test_a_thousand_replays_of_a_layer(gpu: torch.device, name: str, tokens: int) -> None:
    cases = [make_layer(LAYERS[name], tokens, seed=seed) for seed in range(8)]
    want = [check_layer(case) for case in cases]
    if tokens > 1:
        assert len({tuple(ids.flatten().tolist()) for _, _, ids in want}) == 8  # other routings
    replay = recorded(cases[0])
    counts = (tokens, tokens - 1, 0, 200, -3, 1, tokens + 5, tokens // 2, 257, 256, 13)
    wrong = torch.zeros((), dtype=torch.int64, device=gpu)
    for i in range(1000):
        which, valid = i % len(cases), counts[i % len(counts)]
        wrong.add_(differs(replay(cases[which], valid), want[which], cases[which], valid))
    assert int(wrong) == 0


STRESSED = (SMALL, shape(2048, 192, 64, 8))
STRESSED_TOKENS = (3, 40, 200, 1100)


def sources_with(plant: Patch | None) -> dict[str, str]:
    sources = dict(kernel.device_sources())
    if plant is not None:
        plant(sources)
    return sources


@pytest.fixture(scope="module")
def planted() -> None:
    """All broken kernels, compiled at once: one after the other they take minutes."""
    needed = set().union(*(configs(s, STRESSED_TOKENS) for s in STRESSED))
    broken = [sources_with(plant) for plant in (None, *CAUGHT.values(), *LUCKY.values())]
    compile_all([(config, sources) for config in needed for sources in broken])


def stress(gpu: torch.device, patch: pytest.MonkeyPatch, plant: Patch | None) -> int:
    """Launches that gave a wrong result or gave up, of 2,000 with the bug planted."""
    from weave_moe.backends import cuda

    sources = sources_with(plant)
    cases = [make(s, tokens, routing=skewed) for s in STRESSED for tokens in STRESSED_TOKENS]
    want = [check(case) for case in cases]
    torch.cuda.synchronize()
    # Own kernels, own buffers: nothing of the broken kernel is left when the test ends.
    patch.setattr(kernel, "device_sources", lambda: sources)
    patch.setattr(kernel, "_source_hash", lambda: kernel.hash_of(sources))
    patch.setattr(kernel, "_kernels", {})
    patch.setattr(cuda, "_prepared", set())
    patch.setattr(cuda, "_pools", {})
    bad = 0
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        for round_ in range(250):
            for i, case in enumerate(cases):
                if round_ % 10 == 0:
                    # What a launch reads too early, or of the launch before, is NaN.
                    poison_scratch()
                try:
                    out = case.run(policy=("steal", "counter")[round_ % 2])
                    bad += not same_bits(out, want[i])
                    stream.synchronize()
                    weave_moe.check()
                except weave_moe.KernelError:
                    bad += 1
            if plant is not None and bad > 20:
                break
    return bad


@pytest.mark.usefixtures("planted")
def test_the_stress_finds_nothing_where_nothing_is_planted(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stress(gpu, monkeypatch, None) == 0


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("bug", CAUGHT)
def test_bugs_that_are_caught(gpu: torch.device, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    caught = stress(gpu, monkeypatch, CAUGHT[bug])
    print(f"{bug}: caught in {caught} launches")
    assert caught > 0


LUCK = "the hardware may order what the code does not: caught, if at all, by luck"


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("bug", LUCKY)
def test_bugs_that_luck_may_catch(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    caught = stress(gpu, monkeypatch, LUCKY[bug])
    print(f"{bug}: caught in {caught} launches")
    if not caught:
        pytest.xfail(LUCK)
