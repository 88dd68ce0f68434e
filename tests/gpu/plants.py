"""Planted bugs of the device code: a line of it taken away, in a copy of the sources.

Of each it is said what catches it: test_gpu_long.py runs them on the GPU, and where that takes luck
tests/test_kernels.py finds them in the machine code.
"""

from __future__ import annotations

from collections.abc import Callable

Patch = Callable[[dict[str, str]], None]
"""Changes sources by file name."""


def without(file: str, text: str, instead: str = "") -> Patch:
    """Replaces every occurrence of `text`, which must be there."""

    def patch(sources: dict[str, str]) -> None:
        assert text in sources[file], f"{file} no longer has {text!r}"
        sources[file] = sources[file].replace(text, instead)

    return patch


CAUGHT = {
    "counter not reset": without("scheduler.h", "store_relaxed(&s.down_done[i], 0u)", "(void)0"),
    "gate_up not awaited": without(
        "producer.h", "up_target(t.tokens, up ? 0 : b.p.chunks_up)", "0"
    ),
    "sort not awaited": without(
        "many.h",
        "!wait_for(p.shared, &control->counted, p.sort_chunks, PLAN_TIMEOUT)",
        "false",
    ),
}
"""By the results of 2,000 launches."""

ORDERS = {
    "relaxed publication": without("memory.h", "red.release.gpu", "red.relaxed.gpu"),
    "no fence for copies": without("consumer.h", "fence_async_proxy_shared();", ";"),
    "no fence for rows": without(
        "producer.h",
        "fence_async_proxy();  // with few tokens the rows were ordinary stores",
        "",
    ),
    "no fence of writers": without("consumer.h", "fence_async_proxy();", ";"),
}
"""Memory orders. The hardware may order what the code does not, so results show them only by luck;
the machine code has fewer fences."""

LUCKY = ORDERS | {
    "staging not awaited": without(
        "staging.h",
        "b.wait(&b.s.drained[warpgroup][slots.slot], slots.phase ^ 1)",
        "true",
    ),
}
"""By results only with luck."""
