"""``fusec view``: one offline HTML page."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.models import compiled_model, recording
from fusec.cli.options import BATCH, LENGTH, Batch, Dynamic, Length, ModelOrGraph, Target, Train
from fusec.cli.terminal import UsageError, check_writable, note, write_text


def view(
    model: ModelOrGraph,
    output: Annotated[str, typer.Option("-o", "--output", help="file to write; - is standard output")] = "fusec.html",
    target: Target = "",
    dynamic: Dynamic = False,
    train: Train = False,
    batch: Batch = BATCH,
    length: Length = LENGTH,
    graph: Annotated[int | None, typer.Option(help="this graph alone, where there are several")] = None,
    time: Annotated[bool, typer.Option("--time", help="run it, and show how long each kernel takes")] = False,
    open_it: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
) -> None:
    """Write a page that shows the graph pass by pass, its kernels, and where each node comes from."""
    from fusec.debug.capture import CaptureOptions
    from fusec.debug.explain import explain_subjects
    from fusec.viz.html import render

    check_writable(output)
    compiled = compiled_model(model, recording(target=target), CaptureOptions(dynamic, train, time), batch, length)
    found = compiled.subjects
    if graph is not None:
        if not 0 <= graph < len(found):
            raise UsageError(f"no graph {graph}", fix=f"0 to {len(found) - 1}")
        found = [found[graph]]
    write_text(output, render(explain_subjects(found, compiled.title)))
    if output != "-":
        note(f"{output}: {Path(output).stat().st_size / 1e6:.1f} MB")
        if open_it:
            webbrowser.open(Path(output).resolve().as_uri())
