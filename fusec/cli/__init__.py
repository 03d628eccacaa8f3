"""The command line, ``fusec``: a module for each command."""

import gc
import sys
from typing import Annotated

import typer

from fusec.cli.bisect import bisect
from fusec.cli.cache import cache
from fusec.cli.capture import capture
from fusec.cli.check import check, diff
from fusec.cli.doctor import doctor
from fusec.cli.environment import env
from fusec.cli.explain import explain
from fusec.cli.kernels import kernels
from fusec.cli.machine import machine
from fusec.cli.opt import opt
from fusec.cli.reduce import reduce
from fusec.cli.terminal import Commands, raise_again, reports, whole_output
from fusec.cli.trace import trace
from fusec.cli.view import view
from fusec.cli.why import why

_ALLOCATIONS = 2_000_000
"""Between collections of garbage: a graph is many small objects, and each collection walks all of torch's as well.

Two compiled graphs of 2,000 operations are a million.
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"fusec {metadata.version('fusec')}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version")]

app = typer.Typer(
    name="fusec",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Inspect the compiler: capture a model, run passes on it, explain what was fused and why.\n\n"
    "A MODEL is SCRIPT.py (which defines `model` and `inputs`), models:llama/tiny, hf:llama, a .fir file, or - for "
    "a graph on standard input. Exit codes: 0 fine, 1 a check failed, 2 wrong usage, 3 a model, graph or rewrite is "
    "refused, 4 a crash.",
    pretty_exceptions_enable=False,
)


@app.callback()
def options(version: Version = False) -> None:
    """Options of all commands; the help is the application's."""


app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(reports(trace))
for command in (capture, opt, explain, why, view, bisect, reduce, check, diff, doctor, env):
    app.command()(reports(command))

app.add_typer(kernels, name="kernels")
app.add_typer(machine, name="machine")
app.add_typer(cache, name="cache")


def main() -> None:
    """Entry point of the ``fusec`` script."""
    gc.set_threshold(_ALLOCATIONS)
    sys.unraisablehook = raise_again
    try:
        with whole_output():
            app(prog_name="fusec")  # by `python -m fusec`, too: completion is of this name
    finally:
        gc.freeze()  # else Python walks all objects once more before it exits
