"""``fusec bisect``: find the application of a rewrite that makes a model's results wrong."""

from dataclasses import asdict
from typing import Annotated

import typer

from fusec.cli.models import loaded_model
from fusec.cli.options import Batch, Dynamic, Json, Length, Model, Target, Train
from fusec.cli.terminal import CHECK_FAILED, note, write_json


def bisect(
    model: Model,
    target: Target = "",
    dynamic: Dynamic = False,
    train: Train = False,
    batch: Batch = 2,
    length: Length = 16,
    disable: Annotated[str, typer.Option(help="passes, fusions and rewrites to leave out")] = "",
    as_json: Json = False,
) -> None:
    """Compare a compiled model with eager and float64; where it is wrong, find the application responsible.

    Exits with 1 where it is wrong.
    """
    from fusec.debug.bisect import bisect as search

    with loaded_model(model, batch, length, train) as loaded:
        found = search(
            loaded.model, *loaded.inputs, dynamic=dynamic, train=train, options={"target": target, "disable": disable},
            progress=note, **loaded.keywords,
        )  # fmt: skip
    if as_json:
        write_json({"model": loaded.title, "graphs": [asdict(finding) for finding in found]})
    else:
        for finding in found:
            typer.echo(str(finding))
    if any(finding.wrong for finding in found):
        raise typer.Exit(CHECK_FAILED)
