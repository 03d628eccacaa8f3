"""``fusec bisect``: find the application of a rewrite that makes a model's results wrong."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.models import check_captured, graph_of_trace, loaded_model, run_script, sampled_graph
from fusec.cli.options import BATCH, LENGTH, Batch, Declare, Dynamic, Json, Length, Target, Train, chosen
from fusec.cli.programs import exit_code_of, words_of
from fusec.cli.terminal import CHECK_FAILED, UsageError, is_graph_file, note, write_json

if TYPE_CHECKING:
    from fusec.debug.bisect import Finding

Command = Annotated[
    str, typer.Option(metavar="COMMAND", help="search by the exit code of this command instead; it runs many times")
]


def bisect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="as for explain; GRAPH.fir on random inputs; none with --command")
    ] = "",
    command: Command = "",
    target: Target = "",
    dynamic: Dynamic = False,
    train: Train = False,
    batch: Batch = BATCH,
    length: Length = LENGTH,
    disable: Annotated[str, typer.Option(help="passes, fusions and rewrites to leave out")] = "",
    declare: Declare = "",
    as_json: Json = False,
) -> None:
    """Compare a compiled model with eager and float64; where it is wrong, find the rewrite, option or kernel at fault.

    With --command, find the one with which a program fails: it may crash, or exit with 1 where it is too slow. Exits
    with 1 where something is wrong.
    """
    if bool(model) == bool(command):
        raise UsageError("bisect takes a MODEL or a --command", fix='fusec bisect --command "python program.py"')
    if command and declare:
        raise UsageError("--declare is for a MODEL", why="the program of --command declares its own rewrites")
    if command:
        _bisect_command(command, chosen(FUSEC_TARGET=target), disable, as_json)
        return
    model = graph_of_trace(model)
    if declare:
        run_script(declare)
    options = chosen(target=target, disable=disable)
    title, found = _found(model, options, {"dynamic": dynamic, "train": train}, batch, length)
    if as_json:
        write_json({"model": title, "graphs": [asdict(finding) for finding in found]})
    else:
        for finding in found:
            typer.echo(str(finding))
    if not any(finding.wrong for finding in found):
        return
    if any(finding.wrong and not finding.stage for finding in found):
        sizes = {"batch": batch, "length": length, "dynamic": dynamic, "train": train, "declare": declare}
        note(f"shrink it: {_reduce_command(model, {**options, **sizes})}")
        for finding in (f for f in found if f.reduce and not is_graph_file(model)):
            note(f"or {finding.graph} alone, on random inputs: {finding.reduce}")
    raise typer.Exit(CHECK_FAILED)


def _found(
    model: str, options: dict[str, Any], capture: dict[str, bool], batch: int, length: int
) -> tuple[str, "list[Finding]"]:
    """Return the title of a model or graph, and the findings."""
    from fusec.debug.bisect import bisect as search
    from fusec.debug.bisect import bisect_graph

    if is_graph_file(model):
        check_captured(**capture)
        graph, inputs = sampled_graph(model)
        return graph.name, [bisect_graph(graph, inputs, options, note)]
    with loaded_model(model, batch, length, capture["train"]) as loaded:
        given: dict[str, Any] = {"options": options, "progress": note, **capture}
        return loaded.title, search(loaded.model, *loaded.inputs, **given, **loaded.keywords)


def _reduce_command(model: str, options: Mapping[str, Any]) -> str:
    """Return the command that reduces the model, with the options that are not reduce's own defaults."""
    usual = {"batch": BATCH, "length": LENGTH}
    words = ["fusec", "reduce", model]
    for name, value in options.items():
        if value and value != usual.get(name):
            words += [f"--{name}", *([] if value is True else [str(value)])]
    return shlex.join(words)


def _bisect_command(command: str, options: dict[str, str], disable: str, as_json: bool) -> None:
    from fusec.debug.bisect_command import bisect_command
    from fusec.scratch import scratch_folder

    words = words_of(command)

    def run(settings: Mapping[str, str], trace: Path) -> bool:
        code = exit_code_of(words, {**os.environ, **options, **settings, "FUSEC_TRACE": str(trace)})
        shown = " ".join(f"{name}={value}" for name, value in settings.items() if value)
        note(f"{shown or 'everything'}: {'fails' if code else 'succeeds'} ({code})")
        return code != 0

    with scratch_folder() as folder:
        found = bisect_command(run, folder, disable or os.environ.get("FUSEC_DISABLE", ""))
    if as_json:
        write_json(asdict(found))
    else:
        typer.echo(str(found))
    raise typer.Exit(CHECK_FAILED)
