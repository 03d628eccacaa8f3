"""``fusec why``: why a fusion happened at a place of a model, or did not."""

from typing import Annotated

import typer

from fusec.cli.models import compiled_model, recording
from fusec.cli.options import BATCH, LENGTH, Batch, Dynamic, Json, Length, ModelOrGraph, Target, Train
from fusec.cli.terminal import show, write_json

What = Annotated[
    str,
    typer.Argument(metavar="WHAT", help="a fusion (swiglu), a kind of site (norm, attention), kernel, or everything"),
]
At = Annotated[
    str,
    typer.Argument(metavar="[AT]", help="a module (layers.0.mlp, layers.*), file.py:12, or a node of the graph (%12)"),
]


def why(
    model: ModelOrGraph,
    what: What = "everything",
    at: At = "",
    target: Target = "",
    dynamic: Dynamic = False,
    train: Train = False,
    batch: Batch = BATCH,
    length: Length = LENGTH,
    as_json: Json = False,
) -> None:
    """Say whether a fusion happened at a place; else the nearest attempt, its obstacle, and an edit."""
    from fusec.debug.capture import CaptureOptions
    from fusec.debug.finding_table import finding_view
    from fusec.debug.why import why as findings

    compiled = compiled_model(model, recording(target=target), CaptureOptions(dynamic, train), batch, length)
    found = findings(compiled.subjects, compiled.model, what, at)
    if as_json:
        write_json([finding.to_json() for finding in found])
    else:
        show(finding_view(found))
