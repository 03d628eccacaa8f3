"""``fusec trace``: run a program, and keep each of its compiles as files."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.options import Json
from fusec.cli.terminal import UsageError, note, show, write_json

Folder = Annotated[Path, typer.Option("-o", "--output", help="the folder to write; it must not exist")]
Program = Annotated[list[str], typer.Argument(metavar="PROGRAM [ARGUMENTS]…", help="a Python file, or -m MODULE")]

_ERROR = 2
"""The descriptor of standard error."""


def trace(program: Program, output: Folder = Path("fusec-trace"), as_json: Json = False) -> None:
    """Run a Python program, and write graphs, kernels, remarks, recompiles and graph breaks of each compile.

    ``fusec explain`` and ``fusec view`` read the folder. The exit code is the program's. With --json, what the program
    prints is on standard error.
    """
    if os.path.lexists(output):
        raise UsageError(f"{output} exists", fix="name another folder with -o, or remove it")
    if program[0] != "-m" and not os.path.isfile(program[0]):
        raise UsageError(f"there is no file {program[0]}", fix="fusec trace -- PROGRAM.py ARGUMENTS, or -m MODULE")
    environment = {**os.environ, "FUSEC_TRACE": str(output.resolve())}
    command = [sys.executable, *program]
    code = subprocess.run(command, env=environment, stdout=_ERROR if as_json else None, check=False).returncode
    from fusec.debug.trace_table import trace_data, trace_view
    from fusec.debug.traces import NoTrace, Trace, read_trace

    try:
        found = read_trace(output)
    except NoTrace:
        if output.exists():  # fusec was loaded
            note(f"{output} has no compile: none began, or it could not be written")
        else:
            note('nothing was compiled: torch.compile(model, backend="fusec") was not called, or its result was not')
        found = Trace([])
    if as_json:
        write_json({"folder": output, "exit_code": code, **trace_data(found)})
    elif found.compiles or found.events:
        show(trace_view(found))
        if cut := sum(compile.state == "running" for compile in found.compiles):
            note(f"compiles that did not end, or could not be written: {cut}")
        if found.subjects:
            note(f"{output}: fusec explain {output}, fusec view {output}")
    raise typer.Exit(code)
