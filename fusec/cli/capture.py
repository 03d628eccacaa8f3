"""``fusec capture``: a model as the text of its graph."""

from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.models import loaded_model
from fusec.cli.options import BATCH, LENGTH, Batch, Dynamic, Length, Model, Train
from fusec.cli.terminal import UsageError, note, write_json, write_text


def capture(
    model: Model,
    output: Annotated[str, typer.Option("-o", "--output", help="file to write; - is standard output")] = "-",
    dynamic: Dynamic = False,
    train: Train = False,
    sources: Annotated[bool, typer.Option(help="end each line with its source location")] = True,
    batch: Batch = BATCH,
    length: Length = LENGTH,
    as_json: Annotated[bool, typer.Option("--json", help="summary as JSON; needs -o")] = False,
) -> None:
    """Write the graph of a model as imported, before any pass.

    A model with several graphs (training, graph breaks) yields several files, numbered from the second on.
    """
    from fusec.debug.capture import capture as capture_graphs
    from fusec.ir.printer import print_graph

    if as_json and output == "-":
        raise UsageError("--json needs -o", why="standard output takes either the graph or the summary")
    with loaded_model(model, batch, length, train) as loaded:
        graphs = capture_graphs(loaded.model, *loaded.inputs, dynamic=dynamic, train=train, **loaded.keywords)
    written = []
    for i, graph in enumerate(graphs):
        if output == "-" and i > 0:
            note(f"{len(graphs)} graphs; the first is on standard output, -o FILE writes them all")
            break
        first = Path(output)
        path = output if i == 0 else str(first.with_name(f"{first.stem}.{i}{first.suffix}"))
        write_text(path, print_graph(graph, sources=sources))
        written.append({"file": path, "graph": graph.name, "nodes": len(graph), "inputs": len(graph.inputs)})
    if as_json:
        write_json({"model": loaded.title, "graphs": written})
    elif output != "-":
        for row in written:
            note(f"{row['file']}: {row['nodes']} nodes")
