"""``fusec reduce``: the smallest graph that still fails, as a script that stands alone."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusec.cli.models import declaring_files, graph_of_trace, loaded_model, run_script, sampled_graph
from fusec.cli.options import BATCH, LENGTH, Batch, Declare, Dynamic, Json, Length, ModelOrGraph, Target, Train, chosen
from fusec.cli.programs import exit_code_of, words_of
from fusec.cli.terminal import UsageError, is_graph_file, note, read_text, write_json

if TYPE_CHECKING:
    from fusec.debug.reduce import Case, Reduced

Output = Annotated[Path, typer.Option("-o", "--output", help="the script to write")]
Command = Annotated[
    str, typer.Option(metavar="COMMAND", help="keep what makes this command fail; {} in it is the graph, a .fir file")
]
Seconds = Annotated[float, typer.Option(min=1, help="the most time of the search")]


def reduce(
    model: ModelOrGraph,
    output: Output = Path("reduced.py"),
    command: Command = "",
    target: Target = "",
    disable: Annotated[str, typer.Option(help="passes, fusions and rewrites to leave out")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="what falls back fails, too")] = False,
    dynamic: Dynamic = False,
    train: Train = False,
    batch: Batch = BATCH,
    length: Length = LENGTH,
    seconds: Seconds = 300.0,
    declare: Declare = "",
    as_json: Json = False,
) -> None:
    """Shrink a graph whose program is wrong or raises, while it fails in the same way.

    Without --command, results are compared with eager and float64, as by bisect.
    """
    from fusec.config import Config
    from fusec.debug.reduce import Case, failing_case, fails_with
    from fusec.debug.reduce import reduce as search

    model = graph_of_trace(model)
    if declare:
        run_script(declare)
    options = chosen(target=target, disable=disable, strict=strict)
    config = Config.from_options(None, options)
    fails = _fails(command) if command else fails_with(config)
    if is_graph_file(model):
        graph, inputs = sampled_graph(model)
        found = search(Case(graph, tuple(inputs)), fails, progress=note, seconds=seconds)
    else:
        with loaded_model(model, batch, length, train) as loaded:
            case = failing_case(loaded.model, loaded.inputs, loaded.keywords, fails, dynamic=dynamic, train=train)
        found = search(case, fails, progress=note, seconds=seconds)
    found.options = options
    found.declarations = [read_text(path) for path in declaring_files(declare, model)]
    _report(found, found.script(output), as_json)


def _report(found: "Reduced", files: list[Path], as_json: bool) -> None:
    if as_json:
        counts = {"operations": found.operations, "left": found.case.size, "tests": found.tests}
        write_json({"failure": found.failure, **counts, "files": files, "graph": str(found.case.graph)})
        return
    typer.echo(f"{found.operations} → {found.case.size} operations after {found.tests} tests: {found.failure}")
    note(f"python {files[0]}")


def _fails(command: str) -> "Callable[[Case], str]":
    """Return the oracle that writes a graph and runs a command on it: the failure is its exit code."""
    if "{}" not in command:
        raise UsageError("the command reads no graph", fix="write {} where the path of the graph belongs")

    words = words_of(command)

    def fails(case: "Case") -> str:
        from fusec.scratch import scratch_folder

        with scratch_folder() as folder:
            path = folder / "graph.fir"
            path.write_text(str(case.graph), encoding="utf-8")
            code = exit_code_of([word.replace("{}", str(path)) for word in words])
        return f"exit code {code}" if code else ""

    return fails
