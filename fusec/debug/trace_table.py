"""A traced program as tables on a terminal."""

from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from fusec.debug.subject import kind_of
from fusec.debug.text import new_table
from fusec.debug.traces import Trace, events_of


def trace_view(trace: Trace) -> RenderableType:
    """The compiles of a traced program, and its recompiles, graph breaks and fallbacks."""
    table = new_table(
        "Compiles", "graph", "nodes", "kernels", "vendor", "ATen", "seconds", "folder", numbers=(1, 2, 3, 4, 5)
    )
    for compile in trace.compiles:
        if compile.subject is None:
            table.add_row(compile.state, *[""] * 5, f"{compile.path.name}\n{compile.error}", style="red")
            continue
        kinds = Counter(kind_of(node, compile.subject) for node in compile.subject.final.nodes)
        sizes = f"{len(compile.subject.imported or ())} → {len(compile.subject.final)}"
        counts = (str(kinds[kind]) for kind in ("generated", "vendor", "opaque"))
        table.add_row(compile.subject.title, sizes, *counts, f"{compile.seconds:.2f}", compile.path.name)
    parts: list[RenderableType] = [table]
    titles = {"recompile": "Recompiles", "graph break": "Graph breaks", "fallback": "Left to ATen"}
    for kind, reason, count in events_of(trace):
        times = f" ×{count}" if count > 1 else ""
        parts.append(Text(f"{titles[kind]}{times}: ", style="yellow").append(reason, style="default"))
    return Group(*parts)
