"""Arguments that several commands share: which model, how it is captured, and plain data instead of tables."""

from typing import Annotated, Any

import typer

BATCH, LENGTH = 2, 16
"""Their defaults."""
MOST = 10_000_000
"""The largest batch and length."""
Model = Annotated[str, typer.Argument(metavar="MODEL", help="SCRIPT.py, models:llama/tiny, or hf:llama")]
ModelOrGraph = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="SCRIPT.py, models:llama/tiny, hf:llama, GRAPH.fir, - for a graph, or a folder of fusec trace",
    ),
]
Target = Annotated[str, typer.Option(help="cpp or triton; by default by the device of the inputs")]
Dynamic = Annotated[bool, typer.Option("--dynamic", help="batch and length as symbols")]
Train = Annotated[bool, typer.Option("--train", help="forward and backward graphs")]
Batch = Annotated[int, typer.Option(min=1, max=MOST, help="batch of the sample inputs")]
Length = Annotated[int, typer.Option(min=1, max=MOST, help="tokens of the sample inputs")]
Declare = Annotated[
    str, typer.Option(metavar="SCRIPT", help="a Python file whose fusions and rewrites are applied as well")
]
Json = Annotated[bool, typer.Option("--json", help="plain data")]


def chosen(**options: Any) -> dict[str, Any]:
    """Return the options that are given; for others the environment has the default."""
    return {name: value for name, value in options.items() if value}
