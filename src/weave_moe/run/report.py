"""What the commands print: tables and lines on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .compare import Comparison, cores

__all__ = ["Reporter", "Step", "nanoseconds", "print_presets"]

Step = Callable[[str], None]
CPU_TIME = "CPU time, not evidence of speed"
_INDENT = 10


def nanoseconds(value: float) -> str:
    """A time for people: ns, µs, ms or s with three digits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if value >= size:
            return (
                f"{value / size:.3g} {unit}"
                if value < 1000 * size
                else f"{value / size:.0f} {unit}"
            )
    return f"{value:.0f} ns"


class _Console(Console):
    """rich's own would end the process with status 1, which says that a result is wrong."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console() -> Console:
    """stdout; wide enough for the tables where it is no terminal."""
    console = _Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 100)
    return console


class Reporter:
    """Everything that a command says. quiet: only what `raw` is given goes to stdout."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.out = _console()
        self.err = Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._progress: Progress | None = None

    @contextlib.contextmanager
    def working(self, steps: int) -> Iterator[Step]:
        """A progress bar on a terminal's stderr; call the result with the name of each step."""
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            console=self.err,
            transient=True,
            disable=not self.err.is_terminal,
        )
        task = progress.add_task("starting", total=steps + 1)

        def step(what: str) -> None:
            progress.update(task, advance=1, description=what, refresh=True)

        self._progress = progress
        with progress:
            yield step

    def stop(self) -> None:
        """Takes the progress bar away, before results are printed."""
        if self._progress is not None:
            self._progress.stop()

    def line(self, label: str, text: str, style: str = "") -> None:
        """`label` and `text`, the latter indented where it wraps."""
        if self.quiet:
            return
        self._wrapped(label, text, style)

    def _wrapped(self, label: str, text: str, style: str = "") -> None:
        width = max(40, min(self.out.width, 100) - _INDENT)
        lines = textwrap.wrap(text, width, break_on_hyphens=False) or [""]
        for number, line in enumerate(lines):
            head = Text(f"{label if number == 0 else '':{_INDENT}}", style="bold")
            self.out.print(head + Text(line, style=style), soft_wrap=True)

    def blank(self) -> None:
        """An empty line."""
        if not self.quiet:
            self.out.print()

    def raw(self, text: str) -> None:
        """`text` on stdout as it is."""
        print(text)

    def logits(
        self, title: str, rows: list[tuple[str, float, float, int]], tokens: int, agrees: bool
    ) -> None:
        """Differences of logits: (what, largest and median of a row's, same choices)."""
        self.line("model", title)
        verdict = (
            "agree in float32; in bfloat16 a rounding may swap two nearly tied experts, in the "
            "original as in ours"
            if agrees
            else "WRONG: they differ in float32"
        )
        self.line("logits", verdict, "green" if agrees else "bold red")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("relative difference of a token's logits", no_wrap=True)
        for name in ("largest", "median", "same choice"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, largest, median, same in rows:
            table.add_row(name, f"{largest:.1e}", f"{median:.1e}", f"{same} of {tokens}")
        self.blank()
        self.out.print(table)
        self.blank()

    def continuation(self, prompt: list[int], original: list[int], ours: list[int]) -> None:
        """How both models go on after `prompt`."""
        from ..data import decode

        def shown(ids: list[int]) -> str:
            return repr(decode(ids))[1:-1]

        self.line("text", f"...{shown(prompt[-60:])}")
        self.line("original", shown(original))
        self.line("ours", shown(ours) + (" (equal)" if ours == original else " (differs)"))
        self.blank()

    def comparison(
        self,
        title: str,
        size: str,
        origin: str,
        result: Comparison,
        notes: list[str],
        written: list[Path],
    ) -> None:
        """A comparison's check, table and files."""
        self.line("layer", f"{title}; {size}")
        self.line("routing", f"{origin}: {result.load}")
        if result.backend == "host":
            have = cores()
            turns = "; they take turns, so a task is long where its thread waits for a core"
            self.line(
                "backend",
                f"host: {result.workers} workers, a CPU thread each, on "
                f"{have} core{'s' if have > 1 else ''}{turns if result.workers > have else ''}",
            )
        else:
            self.line("backend", result.backend)
        for note in notes:
            self.line("note", note)
        self._check(result)
        if any(run.stats is not None for run in result.runs):
            self.blank()
            self.out.print(_table(result))
            where = CPU_TIME if result.backend == "host" else "device time of one traced launch"
            self.line("", f"times: {where}; waits: of all workers, for other tasks' results")
        if written:
            self.blank()
            for path in written:
                where = " (open in https://ui.perfetto.dev)" if path.suffix == ".json" else ""
                self.line(path.stem if path.suffix == ".json" else "picture", f"{path}{where}")

    def _check(self, result: Comparison) -> None:
        if result.backend == "reference":
            self.line("check", "this is the reference; nothing to compare it with")
            return
        count = len(result.runs)
        who = f"{count} policies" if count > 1 else "1 policy"
        errors = f"largest relative error of a row {result.error:.1e}, allowed {result.limit:.0e}"
        if result.agrees:
            equal = "equal bits in every launch"
            self.line("check", f"{who} against the reference: {errors}; {equal}", "green")
        else:
            wrong = [run.policy for run in result.runs if not run.error <= result.limit]
            what = f"WRONG: {', '.join(wrong)}" if wrong else "policies differ in their bits"
            self.line("check", f"{what}; {errors}; no timeline written", "bold red")


def _table(result: Comparison) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", collapse_padding=True)
    table.add_column("policy")
    names = ("tasks", "stolen/tried", "busy", "tail gap", "waits", "makespan")
    for name in names:
        table.add_column(name, justify="right")
    for run in result.runs:
        stats = run.stats
        if stats is None:
            continue
        table.add_row(
            run.policy,
            f"{stats.tasks:,}",
            f"{stats.steals:,} / {stats.steal_attempts:,}",
            f"{stats.busy_share:.1%}",
            nanoseconds(stats.tail_gap_ns),
            nanoseconds(stats.dependency_wait_ns),
            nanoseconds(stats.makespan_ns),
        )
    return table


def print_presets() -> None:
    """The table of presets, on stdout."""
    from ..presets import PRESETS, shipped_preset

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("preset", no_wrap=True)
    for name in ("H", "I", "E", "k", "shared I"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("router")
    table.add_column("activation")
    for entry in (shipped_preset(), *PRESETS.values()):
        routing = entry.routing
        parts = [routing.scoring]
        if entry.selection_bias:
            parts.append("bias")
        if routing.num_groups > 1:
            parts.append(f"{routing.topk_groups} of {routing.num_groups} groups")
        if routing.renormalize:
            parts.append("normed")
        if routing.scaling_factor != 1:
            parts.append(f"x {routing.scaling_factor:g}")
        if entry.weight_on_input:
            parts.append("weight on input")
        act = entry.activation
        named = act.kind
        if act.alpha != 1:
            named += f" x {act.alpha:g}"
        if act.limit is not None:
            named += f", clamp {act.limit:g}"
        if entry.expert_bias:
            named += ", biases"
        table.add_row(
            entry.name,
            *(str(n) for n in (entry.hidden, entry.intermediate, entry.experts, entry.top_k)),
            str(entry.shared_intermediate or "-"),
            ", ".join(parts),
            named,
        )
    _console().print(table)
