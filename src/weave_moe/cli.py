"""The command line: `weave-moe run`, `weave-moe quickstart`, `weave-moe presets`.

torch and the rest load inside the commands, so that --help and --version are quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ._version import __version__
from .run.errors import InputError

__all__ = ["cli", "main"]

BACKENDS = ("auto", "host", "reference", "cuda")
DTYPES = ("bfloat16", "float16", "float32")


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
            sys.stderr.close()
            status = 141
        if standalone_mode:
            sys.exit(status if isinstance(status, int) else 0)
        return status


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

    Start with `weave-moe quickstart`; then `weave-moe run --help`.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
def presets() -> None:
    """List the models whose layer `weave-moe run --preset` knows."""
    from .run.report import print_presets

    print_presets()


@cli.command()
@click.option("--preset", metavar="NAME", help="A model's layer; `weave-moe presets` lists them.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The layer of a transformers config.json (or of the folder that holds one).",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1, max=131072),
    metavar="N",
    help="Tokens in the batch.  [default: 512; of a trace or text 2048, or all of it]",
)
@click.option(
    "--routing",
    metavar="SOURCE",
    help="trace:NAME, trace:FILE.npz, text:NAME, text:FILE, uniform, zipf[:A] or hot[:SHARE].  "
    "[default: the shipped model's trace; uniform with --preset or --config]",
)
@click.option("--layer", type=int, metavar="L", help="Layer of a trace or text.  [default: 0]")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True)
@click.option(
    "--policy",
    default="all",
    show_default=True,
    metavar="NAMES",
    help="Policies to compare, with commas between, or all.",
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
    default="auto",
    show_default=True,
    metavar="F",
    help="Factor for H and I, such as 1/8. auto: on a CPU, as far down as its plain loops need.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("weave-run"),
    show_default=True,
    metavar="DIR",
    help="Folder for timeline.json and timeline.png.",
)
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
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("weave-run"),
    show_default=True,
    metavar="DIR",
    help="Folder for timeline.json and timeline.png.",
)
def quickstart(text: str, out: Path) -> int:
    """Real text through the shipped model with its experts replaced, then a run on its routing.

    Shows that the logits agree with the original model's, lets both models go on with the text, and
    compares the scheduling policies on the routing that the text gave.
    """
    from .run.quickstart import quickstart_command

    return quickstart_command(text, out)


def main() -> None:
    """Entry point of the console script."""
    cli.main()


if __name__ == "__main__":
    main()
