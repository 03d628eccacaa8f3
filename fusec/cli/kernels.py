"""``fusec kernels``: list, show, time and edit the kernels of a model."""

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusec.cli.models import compiled_model, loaded_model, recording
from fusec.cli.options import BATCH, LENGTH, Batch, Dynamic, Json, Length, ModelOrGraph, Target, chosen
from fusec.cli.programs import words_of
from fusec.cli.terminal import CHECK_FAILED, UsageError, check_name, is_graph_file, note, reports, show, write_json
from fusec.config import Config
from fusec.errors import BuildError

if TYPE_CHECKING:
    from fusec.debug.explanation import Explanation, KernelRow

kernels = typer.Typer(no_args_is_help=True, help="List, show, time and edit the kernels of a model.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="as `fusec kernels list` shows it")]


def _explained(model: str, target: str, dynamic: bool, batch: int, length: int) -> "Explanation":
    from fusec.debug.capture import CaptureOptions

    compiled = compiled_model(model, recording(target=target), CaptureOptions(dynamic), batch, length)
    explanation = compiled.explained()
    note_unused_edits(explanation)
    return explanation


def note_unused_edits(explanation: "Explanation") -> None:
    """Name the edits of kernels of a model that are not used, as these kernels were other code then."""
    from fusec.codegen.program.edits import edit_path, other_edits

    config = Config.from_environment()
    for row in (row for row in explanation.kernels if row.kind == "generated"):
        language = edit_path(row.name, row.source, config).suffix
        for path in (path for path in other_edits(row.name, row.edited, config) if path.suffix == language):
            note(f"{path} is not used: {row.name} was other code when it was edited")


def note_interpreted(interpreted: bool) -> None:
    """Say that times are of Triton's interpreter where they are."""
    if interpreted:
        note("measured in Triton's interpreter, on the CPU: these times say nothing about a GPU")


def _row(explanation: "Explanation", name: str) -> "KernelRow":
    rows = {row.name: row for row in explanation.kernels if row.kind == "generated"}
    check_name("kernel", name, rows)
    return rows[name]


@kernels.command(name="list")
@reports
def list_kernels(
    model: ModelOrGraph, target: Target = "", dynamic: Dynamic = False, batch: Batch = BATCH, length: Length = LENGTH,
    as_json: Json = False,
) -> None:  # fmt: skip
    """List the generated kernels, the slowest first, with their limits."""
    from fusec.debug.tables import roofline_table

    explanation = _explained(model, target, dynamic, batch, length)
    explanation.kernels = [row for row in explanation.kernels if row.kind == "generated"]
    if as_json:
        write_json([row.to_json() for row in explanation.kernels])
    else:
        show(roofline_table(explanation, len(explanation.kernels)))


@kernels.command(name="show")
@reports
def show_kernel(
    model: ModelOrGraph, name: Name, target: Target = "", dynamic: Dynamic = False, batch: Batch = BATCH,
    length: Length = LENGTH, as_json: Json = False,
) -> None:  # fmt: skip
    """Show what a kernel computes, where it comes from, how far it is from the limit, and its source."""
    from fusec.debug.kernel_tables import kernel_view

    row = _row(_explained(model, target, dynamic, batch, length), name)
    if as_json:
        write_json(row.to_json())
    else:
        show(kernel_view(row))
        typer.echo(row.source)


@kernels.command()
@reports
def bench(
    model: ModelOrGraph, name: Name, target: Target = "", dynamic: Dynamic = False, batch: Batch = BATCH,
    length: Length = LENGTH, seconds: Annotated[float, typer.Option(min=0.1, help="time to spend")] = 2.0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Time a kernel alone on random inputs, interleaved with other ways to compute the same."""
    from fusec.analysis.machine import ASSUMED
    from fusec.debug.explanation import is_interpreted
    from fusec.debug.kernel_bench import alternatives
    from fusec.debug.kernel_tables import alternative_view

    explanation = _explained(model, target, dynamic, batch, length)
    config = Config.from_options(None, chosen(target=target))
    row = _row(explanation, name)
    interpreted = is_interpreted(row.nodes[0].body, explanation.machine)
    found, limit = alternatives(row, explanation.assumed, config, seconds)
    if as_json:
        ways = [vars(one) for one in found]
        write_json({"limit_us": limit.limit_us, "interpreted": interpreted, "alternatives": ways})
        return
    known = explanation.machine.source != ASSUMED and not interpreted
    show(alternative_view(name, found, limit, known))
    note_interpreted(interpreted)


@kernels.command()
@reports
def edit(
    model: ModelOrGraph, name: Name, target: Target = "", dynamic: Dynamic = False, batch: Batch = BATCH,
    length: Length = LENGTH,
    path_only: Annotated[bool, typer.Option("--path", help="write the source if needed, and print its path")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Open the source of a kernel in $EDITOR; it is used from then on, until its region changes.

    Afterwards the model is compared with eager and float64; exits with 1 where it is wrong.
    """
    from fusec.codegen.program.edits import other_edits, write_edit

    if is_graph_file(model) or os.path.isdir(model):
        raise UsageError("the kernels of a graph or trace cannot be edited", why="they are checked with the model")
    explanation, config = _explained(model, target, dynamic, batch, length), Config.from_environment()
    generated = {row.name for row in explanation.kernels if row.kind == "generated"}
    refused = [] if name in generated else other_edits(name, "", config)
    row = None if refused else _row(explanation, name)  # one that could not be built is in no explanation
    path = Path(row.edited) if row and row.edited else write_edit(name, row.source, config) if row else refused[-1]
    right, failure = None, ""
    if not path_only:
        _open_editor(path)
        failure = _failure(model, target, batch, length, dynamic)
        right = not failure
    if as_json:
        write_json({"file": path, "right": right})
    elif path_only:
        typer.echo(path)
    else:
        if not failure.startswith(BuildError.__name__):
            failure = failure and "wrong with the edited kernel: compare it with eager by `fusec bisect`"
        typer.echo(failure or "right: as eager and float64")
        note(f"{path}: fusec kernels revert removes it")
    if right is False:
        raise typer.Exit(CHECK_FAILED)


def _open_editor(path: Path) -> None:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        subprocess.run([*words_of(editor), str(path)], check=False)
    except OSError as error:
        raise UsageError(
            f"{editor} does not run", why=str(error), fix="name an editor in $EDITOR, or use --path"
        ) from error


@kernels.command()
@reports
def revert(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="a kernel; by default all that are edited")] = "",
    as_json: Json = False,
) -> None:
    """Remove edits, so that generated kernels are used again."""
    from fusec.codegen.program.edits import edits

    config = Config.from_environment()
    found = edits(config, name)
    if name and not found:
        check_name("edited kernel", name, {path.stem.rpartition("-")[0] for path in edits(config)})
    for path in found:
        path.unlink()
    if as_json:
        write_json({"removed": found})
    else:
        typer.echo(f"{len(found)} edit{'' if len(found) == 1 else 's'} removed")


def _failure(model: str, target: str, batch: int, length: int, dynamic: bool) -> str:
    """Return how a model differs from eager, or why a kernel could not be built; "" where it is right."""
    from fusec.debug.reduce import Case, NothingFails, failing_case
    from fusec.debug.trial import Trial

    config, said = Config.from_options(None, {"strict": True, **chosen(target=target)}), [""]

    def fails(case: Case) -> str:
        said[0], _ = Trial(case.graph, case.inputs, config, lambda text: None).wrong()
        return said[0]

    try:
        with loaded_model(model, batch, length) as loaded:
            failing_case(loaded.model, loaded.inputs, loaded.keywords, fails, dynamic=dynamic)
    except NothingFails:
        return ""
    return said[0]
