"""``fusec explain``: what became of a model."""

from typing import Annotated

import typer

from fusec.cli.models import compiled_model, is_graph_file
from fusec.cli.options import Batch, Dynamic, Length, ModelOrGraph, Target, Train
from fusec.cli.terminal import CHECK_FAILED, UsageError, note, show, write_json
from fusec.config import CHIPS, Config


def explain(
    model: ModelOrGraph,
    target: Target = "",
    dynamic: Dynamic = False,
    train: Train = False,
    batch: Batch = 2,
    length: Length = 16,
    everything: Annotated[bool, typer.Option("--all", help="every row of every table")] = False,
    sites: Annotated[
        bool, typer.Option("--sites", help="where a fusion could be expected, and what became of it")
    ] = False,
    kernel: Annotated[str, typer.Option(help="print the source of this kernel instead")] = "",
    roofline: Annotated[
        bool, typer.Option("--roofline", help="each kernel against the machine's limits: bytes, FLOPs, time")
    ] = False,
    time: Annotated[bool, typer.Option("--time", help="run it, and show measured times beside the predicted")] = False,
    machine: Annotated[str, typer.Option(help=f"predict for this GPU: {', '.join(CHIPS)}")] = "",
    brief: Annotated[bool, typer.Option("--line", help="one line")] = False,
    fail_under: Annotated[
        float,
        typer.Option(help="exit with 1 where generated kernels and vendor calls move less than this share, in percent"),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="plain data")] = False,
) -> None:
    """Show regions, kernels, coverage, what was left to ATen, and what nearly matched."""
    from fusec.debug.explain import explain_subjects
    from fusec.debug.report import summary_line
    from fusec.debug.tables import explanation_view, roofline_view, site_view

    chosen = {"target": target, "machine": machine}
    config = Config.from_options(None, {"record": True, **{k: v for k, v in chosen.items() if v}})
    if sites and is_graph_file(model):
        raise UsageError("a graph has no sites", why="they are found from the modules of a model", fix="give the model")
    compiled = compiled_model(model, config, dynamic=dynamic, train=train, batch=batch, length=length, time=time)
    explanation = explain_subjects(compiled.subjects, compiled.title, compiled.model)
    if as_json:
        write_json(explanation.to_json())
    elif kernel:
        typer.echo(_source(kernel, {k.name: k.source for k in explanation.kernels if k.source}))
    elif brief:
        typer.echo(summary_line(explanation))
    elif roofline or time:
        show(roofline_view(explanation, everything))
    elif sites:
        show(site_view(explanation))
    else:
        show(explanation_view(explanation, everything))
    covered = 100 * (1 - explanation.coverage["bytes"]["opaque"])
    if covered < fail_under:
        note(f"coverage is {covered:.1f} %, less than {fail_under:g} %")
        raise typer.Exit(CHECK_FAILED)


def _source(name: str, sources: dict[str, str]) -> str:
    from fusec.cli.terminal import check_name

    check_name("kernel", name, sources)
    return sources[name]
