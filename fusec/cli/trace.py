"""``fusec trace``: run a program, and keep each of its compiles as files."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.terminal import UsageError, check_writable, note, show

Folder = Annotated[Path, typer.Option("-o", "--output", help="the folder to write; it must not exist")]
Program = Annotated[list[str], typer.Argument(metavar="PROGRAM [ARGUMENTS]…", help="a Python file, or -m MODULE")]


def trace(program: Program, output: Folder = Path("fusec-trace")) -> None:
    """Run a Python program, and write graphs, kernels, remarks, recompiles and graph breaks of each compile.

    ``fusec explain`` and ``fusec view`` read the folder. The exit code is the program's.
    """
    if os.path.lexists(output):
        raise UsageError(f"{output} exists", fix="name another folder with -o, or remove it")
    check_writable(str(output))
    if program[0] != "-m" and not os.path.isfile(program[0]):
        raise UsageError(f"there is no file {program[0]}", fix="fusec trace -- PROGRAM.py ARGUMENTS, or -m MODULE")
    environment = {**os.environ, "FUSEC_TRACE": str(output.resolve())}
    code = subprocess.run([sys.executable, *program], env=environment, check=False).returncode
    from fusec.debug.trace_table import trace_view
    from fusec.debug.traces import NoTrace, read_trace

    try:
        found = read_trace(output)
    except NoTrace:
        note('nothing was compiled: torch.compile(model, backend="fusec") was not called, or its result was not')
        raise typer.Exit(code) from None
    show(trace_view(found))
    note(f"{output}: fusec explain {output}, fusec view {output}")
    raise typer.Exit(code)
