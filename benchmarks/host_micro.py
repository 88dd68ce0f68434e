"""The scheduler core's own costs on this CPU, each against a bar; exit status 1 if one is missed.

plan    groups, rows and order of 4,096 tokens x 8 slots over 128 experts, by one thread: below 1 ms
claim   one task from an uncontended queue or dispenser, by one worker of 64, under every policy:
        below 100 ns

Each figure is the best of 20 repeats, in wall-clock time; other load on the machine only raises it.
"""

from __future__ import annotations

import platform
import sys

import numpy as np

from weave_moe.host import engine
from weave_moe.host.build import BuildError, compiler
from weave_moe.schedule import POLICY_CODES

TOKENS, TOP_K, EXPERTS = 4096, 8, 128
CLAIMS = 1 << 18
PLAN_BAR_NS = 1e6
CLAIM_BAR_NS = 100.0


def routings() -> dict[str, np.ndarray]:
    """Expert ids of every slot, [TOKENS, TOP_K], distinct within a token."""
    random = np.random.default_rng(0)
    popularity = {
        "uniform": np.ones(EXPERTS),
        "zipf 1.2": np.arange(1, EXPERTS + 1) ** -1.2,
    }
    # The largest keys of exponential races: a weighted choice without replacement.
    return {
        name: np.argsort(random.exponential(size=(TOKENS, EXPERTS)) / weights, axis=1)[:, :TOP_K]
        for name, weights in popularity.items()
    }


def main() -> int:
    try:
        print(f"{platform.processor() or platform.machine()}, {' '.join(compiler())}")
        figures = [
            (f"plan, {name}", engine.bench_plan(ids.ravel(), EXPERTS), PLAN_BAR_NS)
            for name, ids in routings().items()
        ]
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    figures += [
        (f"claim, {policy}", engine.bench_claims(policy, CLAIMS)[0], CLAIM_BAR_NS)
        for policy in POLICY_CODES
    ]
    missed = False
    for name, took, bar in figures:
        met = took < bar
        missed |= not met
        print(f"{name:24} {took:12,.1f} ns   bar {bar:12,.0f} ns   {'ok' if met else 'MISSED'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
