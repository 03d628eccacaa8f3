"""``fusec explain``: kernels, coverage, fallbacks and near misses of a model."""

from typing import TYPE_CHECKING, Annotated

import typer

from fusec.cli.kernels import note_interpreted, note_unused_edits
from fusec.cli.models import compiled_model, recording
from fusec.cli.options import BATCH, LENGTH, Batch, Dynamic, Json, Length, ModelOrGraph, Target, Train
from fusec.cli.terminal import CHECK_FAILED, UsageError, check_name, is_graph_file, note, show, write_json
from fusec.config import CHIPS

if TYPE_CHECKING:
    from fusec.debug.explanation import Explanation

Everything = Annotated[bool, typer.Option("--all", help="every row of every table")]
Sites = Annotated[bool, typer.Option("--sites", help="where fusions are expected, and whether they happened")]
Kernel = Annotated[str, typer.Option(help="print the source of this kernel instead")]
Roofline = Annotated[
    bool, typer.Option("--roofline", help="each kernel against the machine's limits: bytes, FLOPs, time")
]
Time = Annotated[bool, typer.Option("--time", help="run it, and show measured next to predicted times")]
Machine = Annotated[str, typer.Option(help=f"predict for this GPU: {', '.join(CHIPS)}")]
Brief = Annotated[bool, typer.Option("--line", help="one line")]
FailUnder = Annotated[
    float,
    typer.Option(
        min=0,
        max=100,
        help="exit with 1 where generated kernels and vendor calls move less than this share, in percent",
    ),
]


def explain(
    model: ModelOrGraph,
    target: Target = "",
    dynamic: Dynamic = False,
    train: Train = False,
    batch: Batch = BATCH,
    length: Length = LENGTH,
    everything: Everything = False,
    sites: Sites = False,
    kernel: Kernel = "",
    roofline: Roofline = False,
    time: Time = False,
    machine: Machine = "",
    brief: Brief = False,
    fail_under: FailUnder = 0.0,
    as_json: Json = False,
) -> None:
    """Show regions, kernels, coverage, fallbacks to ATen, and near misses."""
    from fusec.debug.capture import CaptureOptions
    from fusec.debug.report import summary_line
    from fusec.debug.tables import explanation_view, roofline_view, site_view

    config = recording(target=target, machine=machine)
    if sites and is_graph_file(model):
        raise UsageError("a graph has no sites", why="they are found from the modules of a model", fix="pass the model")
    compiled = compiled_model(model, config, CaptureOptions(dynamic, train, time), batch, length)
    explanation = compiled.explained()
    if as_json:
        write_json(explanation.to_json())
    elif kernel:
        sources = {k.name: k.source for k in explanation.kernels if k.source}
        check_name("kernel", kernel, sources)
        typer.echo(sources[kernel])
    elif brief:
        typer.echo(summary_line(explanation))
    elif roofline or time:
        show(roofline_view(explanation, everything))
        note_interpreted(explanation.interpreted)
    else:
        show(site_view(explanation) if sites else explanation_view(explanation, everything))
    note_unused_edits(explanation)
    _check_coverage(explanation, fail_under)


def _check_coverage(explanation: "Explanation", least: float) -> None:
    """Exit with 1 where less than a share of bytes, in percent, is moved by generated kernels and vendor calls."""
    covered = 100 * (1 - explanation.coverage["bytes"]["opaque"])
    if covered < least:
        note(f"coverage is {covered:.1f} %, less than {least:g} %")
        raise typer.Exit(CHECK_FAILED)
