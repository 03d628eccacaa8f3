"""``fusec view``: one offline HTML page."""

import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.check import is_report, read_report
from fusec.cli.kernels import note_interpreted
from fusec.cli.models import compiled_model, recording
from fusec.cli.options import BATCH, LENGTH, Batch, Dynamic, Json, Length, ModelOrGraph, Target, Train
from fusec.cli.terminal import UsageError, check_read_once, note, write_json, write_text

if TYPE_CHECKING:
    from fusec.debug.explanation import Explanation


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
    verify: Annotated[
        bool, typer.Option("--verify", help="check every rewrite, and show the error of each kernel against float64")
    ] = False,
    before: Annotated[
        str, typer.Option(metavar="MODEL|GRAPH|REPORT", help="an earlier version to compare with, or its report")
    ] = "",
    open_it: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
    as_json: Json = False,
) -> None:
    """Write a page that shows the graph pass by pass, its kernels, and where each node comes from.

    With --before it shows the differences between two versions of a model: sites, kernels, and both final graphs in
    one. MODEL or the earlier version may be a report, REPORT.json, of which there is no graph.
    """
    from fusec.debug.capture import CaptureOptions
    from fusec.viz.html import render, render_comparison, render_reports

    def explained(spec: str) -> "Explanation":
        compiled = compiled_model(
            spec, recording(True, target=target, verify=verify), CaptureOptions(dynamic, train, time), batch, length
        )
        if graph is not None:
            if not 0 <= graph < len(compiled.subjects):
                raise UsageError(f"no graph {graph}", fix=f"0 to {len(compiled.subjects) - 1}")
            compiled = replace(compiled, subjects=[compiled.subjects[graph]])
        explanation = compiled.explained()
        note_interpreted(explanation.interpreted)
        return explanation

    check_read_once(model, before)
    if as_json and output == "-":
        raise UsageError("--json prints where the page is, not the page", fix="name a file with -o")
    if is_report(model) and not before:
        raise UsageError(f"{model} is a report, which has no graph", fix="--before REPORT, or view the model")
    if is_report(model) or is_report(before):
        text = render_reports(*(read_report(s) if is_report(s) else explained(s).to_json() for s in (before, model)))
    else:
        old, now = explained(before) if before else None, explained(model)
        text = render(now, _events(model)) if old is None else render_comparison(old, now)
    write_text(output, text)
    if output != "-":
        _report(output, as_json)
        if open_it:
            webbrowser.open(Path(output).resolve().as_uri())


def _report(path: str, as_json: bool) -> None:
    size = Path(path).stat().st_size
    if as_json:
        write_json({"file": path, "bytes": size})
    else:
        note(f"{path}: {size / 1e6:.1f} MB")


def _events(model: str) -> list[dict[str, Any]]:
    """Return the recompiles, graph breaks and fallbacks of a trace, equal ones once; none of another MODEL."""
    if not Path(model).is_dir():
        return []
    from fusec.debug.traces import events_of, read_trace

    return [{"kind": kind, "text": text, "count": count} for kind, text, count in events_of(read_trace(Path(model)))]
