"""The command line: what each command is called, its options, and where its code is.

torch and the rest load inside the commands, so that --help and --version are quick.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ._version import __version__
from .run.errors import InputError

__all__ = ["cli", "main"]

BACKENDS = ("auto", "host", "reference", "cuda")
PLACES = ("auto", "host", "cuda")
DTYPES = ("bfloat16", "float16", "float32")
CACHE_ACTIONS = ("list", "size", "clear")
PARTS = ("all", "host", "cuda")
MAPPINGS = ("static_strided", "static_expert")
SPLITS = ("tensor", "expert")


class _Finite(click.FloatRange):
    """click's range of floats without nan, which no bound keeps out, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


# Options that several commands have.
_PRESET = click.option(
    "--preset", metavar="NAME", help="A model's layer; `weave-moe presets` lists them."
)
_CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The layer of a transformers config.json (or of the folder that holds one).",
)
_TOKENS = click.option(
    "--tokens",
    type=click.IntRange(min=1, max=131072),
    metavar="N",
    help="Tokens in the batch.  [default: 512; of a trace or text 2048, or all of it]",
)
_ROUTING = click.option(
    "--routing",
    metavar="SOURCE",
    help="trace:NAME, trace:FILE.npz, text:NAME, text:FILE, uniform, zipf[:A], dirichlet[:A] or "
    "hot[:SHARE].  [default: the shipped model's trace; uniform with --preset or --config]",
)
_LAYER = click.option(
    "--layer", type=int, metavar="L", help="Layer of a trace or text.  [default: 0]"
)
_POLICY = click.option(
    "--policy",
    default="all",
    show_default=True,
    metavar="NAMES",
    help="Policies to compare, with commas between, or all.",
)
_WORKERS = click.option(
    "--workers",
    type=click.IntRange(min=1, max=1024),
    metavar="N",
    help="Workers of the CPU engine, a thread each.  [default: the cores, from 4 to 16]",
)
_SCALE = click.option(
    "--scale",
    default="auto",
    show_default=True,
    metavar="F",
    help="Factor for H and I, such as 1/8. auto: on a CPU, as far down as its plain loops need.",
)
_MACHINE = click.option(
    "--machine",
    default="h200",
    show_default=True,
    metavar="NAME|FILE.json",
    help="h200, calibrated; h100-sxm, h100-pcie, h800-sxm, h20, gh200-96gb, by data sheet; or a "
    "file of a machine's rates and costs.",
)
_HELD = click.option(
    "--held",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="SMs that another kernel holds meanwhile.",
)
_SEED = click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
_OUT = click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("weave-run"),
    show_default=True,
    metavar="DIR",
    help="Folder for timeline.json and timeline.png.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


class OneLineGroup(click.Group):
    """A group whose errors are one line on stderr: status 2 for bad input, 130 for Ctrl-C."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """click's main, with this class's errors."""
        try:
            status = super().main(
                args=list(args) if args is not None else None,
                prog_name="weave-moe",
                complete_var=complete_var,
                standalone_mode=False,
                **extra,
            )
        except (click.ClickException, InputError) as error:
            message = error.format_message() if isinstance(error, click.ClickException) else error
            _complain(str(message))
            status = 2
        except (click.Abort, KeyboardInterrupt):
            _complain("interrupted")
            status = 130
        except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
            _drop_output()
            status = 141
        except OSError as error:  # such as a full disk under stdout
            _complain(str(error))
            _drop_output()
            status = 1
        if standalone_mode:
            sys.exit(status if isinstance(status, int) else 0)
        return status


def _drop_output() -> None:
    """What is still buffered would fail once more when the interpreter ends, with a status of its
    own."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    click.echo(f"weave-moe: {' '.join(message.split())}", err=True)


@click.group(
    cls=OneLineGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="weave-moe", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """A Mixture-of-Experts layer cut into micro-tasks that idle workers steal from each other.

    Start with `weave-moe quickstart`; then `weave-moe run --help`. Where something does not work,
    `weave-moe info` and `weave-moe check`.

    \b
    Exit status of every command:
      0    all is well
      1    something is wrong: a result, an entry of the cache that cannot be removed, a full disk
      2    bad input, with one line that says what
      3    a part of `check`, or all that `bench` should time, could not be run here
      130  Ctrl-C
      141  whoever read the output has gone
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
def presets() -> None:
    """List the models whose layer `weave-moe run --preset` knows."""
    from .run.report import print_presets

    print_presets()


@cli.command()
@_PRESET
@_CONFIG
@_TOKENS
@_ROUTING
@_LAYER
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True)
@_POLICY
@_WORKERS
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="[default: the model's own, bfloat16 for a preset]"
)
@_SCALE
@_SEED
@_OUT
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def run(**options: Any) -> int:
    """Run one MoE layer under several scheduling policies and show what each worker did.

    The result of every policy is first checked against the reference, and all of them against each
    other, bit by bit. Then a table by policy is printed, and a timeline is written: timeline.json
    opens in https://ui.perfetto.dev, timeline.png is a picture of it. Stolen tasks are marked.

    Without options, a small layer runs on the routing that the shipped language model learned.

    \b
    weave-moe run --preset qwen3-30b --routing zipf:1.2 --tokens 256
    weave-moe run --config path/to/config.json --routing hot:0.7 --policy steal,static_expert
    weave-moe run --routing text:notes.txt --layer 2
    """
    from .run.command import RunOptions, run_command

    return run_command(RunOptions(**options))


@cli.command()
@click.option(
    "--text",
    default="kjv",
    show_default=True,
    metavar="NAME|FILE",
    help="A shipped text or a UTF-8 file.",
)
@_OUT
def quickstart(text: str, out: Path) -> int:
    """Real text through the shipped model with its experts replaced, then a run on its routing.

    Shows that the logits agree with the original model's, lets both models go on with the text, and
    compares the scheduling policies on the routing that the text gave.
    """
    from .run.quickstart import quickstart_command

    return quickstart_command(text, out)


@cli.command()
@click.option(
    "--preset",
    metavar="NAME",
    help="A model's layer; `weave-moe presets` lists them.  [default: qwen3-30b]",
)
@_CONFIG
@click.option(
    "--tokens",
    type=click.IntRange(min=1, max=131072),
    default=64,
    show_default=True,
    metavar="N",
    help="Tokens of the call.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="[default: the layer's own]")
@click.option(
    "--sms",
    type=click.IntRange(min=1, max=1024),
    metavar="N",
    help="Show the kernel for a Hopper GPU of N SMs.  [default: the GPU that is here, else 132]",
)
@_JSON
def info(**options: Any) -> int:
    """Show what there is to run on, and which backend and kernel a call would get, and why.

    Package, Python, torch, GPUs, driver, NVRTC, C++ compiler and cache, each with its version and
    place or the reason why it is missing. Then the backend that a call of a layer would take, asked
    from the backends themselves: the first time, this compiles the CPU engine. Then the kernel it
    would have on a Hopper GPU.

    Exit status: 0, whatever is missing; 2 for bad input.
    """
    from .tools.info import InfoOptions, info_command

    return info_command(InfoOptions(**options))


@cli.command()
@click.argument("action", type=click.Choice(CACHE_ACTIONS), default="list")
@_JSON
def cache(action: str, as_json: bool) -> int:
    """List the compiled code that is kept on disk, show its size, or clear it.

    Clearing removes entries of this package and no other file. It is safe at any time: what another
    process is compiling is left alone, and what it has loaded stays loaded. The directory is
    $WEAVE_MOE_CACHE, else weave-moe in $XDG_CACHE_HOME or ~/.cache.

    Exit status: 0; 1 if an entry could not be removed; 2 for bad input.
    """
    from .tools.cached import cache_command

    return cache_command(action, json_wanted=as_json)


@cli.command()
@click.option(
    "--backend",
    type=click.Choice(PARTS),
    default="all",
    show_default=True,
    help="The part to run.",
)
@_JSON
def check(backend: str, as_json: bool) -> int:
    """Test, in under 30 seconds, that this machine computes right results.

    Runs the CPU engine and, on each Hopper GPU, the kernel: several layers, each under every policy
    and twice, which must agree to the bit and be as close to the reference as the type allows. One
    line each.

    Exit status: 0; 1 if anything is wrong; 3 if a part could not be run (no C++ compiler, no Hopper
    GPU, out of time) and what ran is right; 2 for bad input.
    """
    from .tools.selftest import BACKENDS, check_command

    return check_command(BACKENDS if backend == "all" else (backend,), json_wanted=as_json)


@cli.command()
@click.option(
    "--preset",
    metavar="NAMES",
    help="Models' layers, with commas between; `weave-moe presets` lists them.  [default: "
    "qwen3-30b; on a CPU the shipped model's]",
)
@_CONFIG
@click.option(
    "--tokens",
    metavar="LIST",
    help="Tokens of a call, with commas between.  [default: 1,4,16,64,256,1024,4096; on a CPU "
    "16,64]",
)
@click.option(
    "--routing",
    default="uniform,zipf",
    show_default=True,
    metavar="SOURCES",
    help="With commas between: uniform, zipf[:A], dirichlet[:A], hot[:SHARE], trace:NAME or "
    "trace:FILE.npz.",
)
@click.option(
    "--layer", type=int, metavar="L", help="Layer of the traces.  [default: another one each call]"
)
@click.option(
    "--dtype",
    metavar="NAMES",
    help="bfloat16, float16, on a CPU also float32, with commas between.  [default: the model's]",
)
@_POLICY
@click.option(
    "--rivals",
    default="all",
    show_default=True,
    metavar="NAMES",
    help="Other implementations, with commas between; all that are installed, or none. --list "
    "shows them.",
)
@click.option(
    "--neighbour",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Time all of it once more while another kernel keeps N SMs busy.",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="N",
    help="Time one GPU's part of experts that are cut among N.",
)
@click.option("--backend", type=click.Choice(PLACES), default="auto", show_default=True)
@_WORKERS
@_SCALE
@click.option(
    "--seconds",
    type=_Finite(min=0, min_open=True, max=15),
    metavar="S",
    help="Of replays, for each cell.  [default: 0.4, above 256 tokens 1.5]",
)
@click.option(
    "--max-spread",
    type=_Finite(min=0),
    metavar="X",
    help="Refuse times whose quartiles lie further than 2 X medians apart.  [default: 0.05; on a "
    "CPU 0.5]",
)
@_SEED
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("weave-bench"),
    show_default=True,
    metavar="DIR",
    help="Folder for bench.jsonl, bench.csv, bench.md and bench.png.",
)
@click.option("--list", "listed", is_flag=True, help="Show what there is to compare with, and end.")
@_JSON
def bench(**options: Any) -> int:
    """Time the layer beside other implementations: right first, then fast.

    Everyone's result is compared with a plain fp32 computation before anything is timed. Then CUDA
    graphs with changing inputs, routings and weights are replayed, contestants in turn. Times are
    held against what the GPU was just measured to do at best. On a CPU this times the CPU engine,
    which says nothing about speed.

    \b
    weave-moe bench --preset qwen3-30b,mixtral-8x7b --tokens 16,256 --routing uniform,zipf:1.2
    weave-moe bench --config path/to/config.json --tensor-parallel 8 --neighbour 16
    weave-moe bench --list

    Exit status: 0; 1 if a time is not reported, because a result was wrong or times were spread too
    wide; 3 if nothing of ours could be timed; 2 for bad input.
    """
    from .bench.command import BenchOptions, bench_command

    return bench_command(BenchOptions(**options))


@cli.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("weave-machine.json"),
    show_default=True,
    metavar="FILE.json",
    help="The machine's file. What was measured goes beside it, as FILE.rows.jsonl.",
)
@click.option(
    "--name", metavar="NAME", help="What to call the machine.  [default: the file's name]"
)
@click.option(
    "--measure-only", is_flag=True, help="Only time launches: the fit, on the CPU, comes later."
)
@click.option(
    "--fit-rows",
    "rows",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help="Only fit what --measure-only wrote; needs no GPU.",
)
@click.option(
    "--seconds",
    type=_Finite(min=0, min_open=True, max=15),
    default=0.3,
    show_default=True,
    metavar="S",
    help="Of replays, for each cell.",
)
@_JSON
def calibrate(**options: Any) -> int:
    """Measure this GPU for the simulator, and write a machine's file.

    Its rates are measured, then our kernel is timed on a few layers; the simulator's costs are
    fitted to two of them, and the error on two others is stated and kept in the file. Some minutes,
    most of them on one core. A file that is changed afterwards is no longer called calibrated.

    \b
    weave-moe calibrate --out mine.json
    weave-moe simulate --machine mine.json --preset qwen3-30b
    weave-moe calibrate --measure-only && weave-moe calibrate --fit-rows weave-machine.rows.jsonl

    Exit status: 0; 1 if a result was wrong or times were spread too wide, and then nothing is
    written; 2 for bad input, and where there is no Hopper GPU.
    """
    from .bench.calibrate import CalibrateOptions, calibrate_command

    return calibrate_command(CalibrateOptions(**options))


@cli.command()
@_PRESET
@_CONFIG
@_TOKENS
@_ROUTING
@_LAYER
@_POLICY
@_MACHINE
@_HELD
@_SEED
@_JSON
def simulate(**options: Any) -> int:
    """Predict what a launch takes on a GPU, under each scheduling policy; nothing is run.

    A discrete-event simulation of the kernel: its tasks, queues, ring and dependencies, on SMs that
    share memory. The error of its times against measured launches is printed with them.

    \b
    weave-moe simulate --preset qwen3-235b --tokens 64 --routing zipf
    weave-moe simulate --preset deepseek-v3 --tokens 128 --held 16 --policy steal,static_strided

    Exit status: 0; 2 for bad input.
    """
    from .simulate.command import SimulateOptions, simulate_command

    return simulate_command(SimulateOptions(**options))


@cli.command()
@_PRESET
@_CONFIG
@_TOKENS
@_ROUTING
@_LAYER
@click.option(
    "--share",
    type=_Finite(0, 1),
    metavar="P",
    help="The MoE experts' share of a step's time now, 0 to 1.  [default: 0.5 assumed]",
)
@click.option(
    "--communication",
    type=_Finite(0, 1),
    default=0.0,
    show_default=True,
    metavar="C",
    help="The share of a step that communication takes, not hidden behind anything.",
)
@click.option(
    "--busy",
    type=_Finite(0, 1),
    metavar="B",
    help="The share of busy SMs in the layer now.  [default: simulated, of the static mapping]",
)
@click.option(
    "--now",
    "now_us",
    type=_Finite(min=0, min_open=True),
    metavar="US",
    help="Microseconds that the layer's experts take now.  [default: as measured, else simulated]",
)
@click.option(
    "--static",
    type=click.Choice(MAPPINGS),
    default=MAPPINGS[0],
    show_default=True,
    help="The static mapping to compare with.",
)
@_MACHINE
@_HELD
@click.option(
    "--gpus",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="GPUs that share each layer.  [default: one has it whole]",
)
@click.option(
    "--split",
    type=click.Choice(SPLITS),
    help=f"How they share it: each expert cut, or experts dealt out.  [default: {SPLITS[0]}]",
)
@click.option(
    "--memory",
    "memory_gb",
    type=_Finite(min=0, min_open=True),
    metavar="GB",
    help="Memory of a GPU.  [default: by its data sheet]",
)
@_SEED
@_JSON
def advise(**options: Any) -> int:
    """Say whether this library is worth it for a model and a load, and why; nothing is run.

    The time by policy, simulated; the layer's gain over what was measured on such a load, else over
    the same kernel with a static mapping; the step's gain; from which skew on it pays; the memory
    left for KV cache. The verdict is one of: use it, does not matter, fix communication first,
    already busy, no.

    \b
    weave-moe advise --preset qwen3-30b --tokens 64 --routing zipf --share 0.4
    weave-moe advise --config path/to/config.json --tokens 256 --gpus 8 --communication 0.3
    weave-moe advise --routing trace:mine.npz --now 310 --json

    Exit status: 0, whatever the verdict; 2 for bad input.
    """
    from .advise.command import AdviseOptions, advise_command

    return advise_command(AdviseOptions(**options))


@cli.command()
@_PRESET
@_CONFIG
@_TOKENS
@_ROUTING
@_LAYER
@_POLICY
@click.option(
    "--backend",
    type=click.Choice(("host", "cuda")),
    help="What to record: host, the CPU engine; cuda, the GPU kernel.  "
    "[default: cuda with a Hopper GPU, else host]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1, max=1024),
    metavar="N",
    help="Workers of the CPU engine, a thread each.  [default: the cores, from 4 to 16]",
)
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="[default: the model's own, bfloat16 for a preset]"
)
@click.option(
    "--scale",
    metavar="F",
    help="Factor for H and I, such as 1/8.  [default: auto, as far down as the CPU needs]",
)
@click.option("--simulate", is_flag=True, help="Predict the records of a GPU instead; run nothing.")
@click.option("--machine", metavar="NAME|FILE.json", help="Of a simulation.  [default: h200]")
@click.option(
    "--held",
    type=click.IntRange(min=0),
    metavar="N",
    help="Of a simulation: SMs that another kernel holds meanwhile.  [default: 0]",
)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="Report what was recorded before, here or on another machine; run nothing.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="[default: 0]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("weave-profile"),
    show_default=True,
    metavar="DIR",
    help="Folder for profile.html, profile.json, profile.png and profile.npz.",
)
@_JSON
def profile(**options: Any) -> int:
    """Record every task of a layer under several policies, and report where the time went.

    profile.html is a report that needs no network: timelines, busy workers over time, waits,
    thefts, load of the experts, weights read, policies side by side. profile.json opens in
    https://ui.perfetto.dev, profile.png is a heat map, profile.npz holds the records.

    The GPU kernel records where there is a Hopper GPU, else the CPU engine; results are checked
    first. --simulate predicts a GPU's records.

    \b
    weave-moe profile --preset qwen3-30b --routing zipf --policy steal,static_expert
    weave-moe profile --simulate --preset qwen3-30b --tokens 64 --routing zipf
    weave-moe profile --from weave-profile/profile.npz --out again

    Exit status: 0; 1 if a result is wrong; 2 for bad input.
    """
    from .profile.command import ProfileOptions, profile_command

    return profile_command(ProfileOptions(**options))


def main() -> None:
    """Entry point of the console script."""
    cli.main()


if __name__ == "__main__":
    main()
