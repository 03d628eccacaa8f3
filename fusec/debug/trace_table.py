"""A traced program as tables on a terminal."""

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fusec.debug.explanation import KINDS
from fusec.debug.subject import kind_of
from fusec.debug.text import new_table
from fusec.debug.traces import Trace, events_of

_EVENTS = {"recompile": "Recompiles", "graph break": "Graph breaks", "fallback": "Left to ATen"}


def trace_data(trace: Trace) -> dict[str, Any]:
    """The same as JSON data."""
    compiles = []
    for compile in trace.compiles:
        row = {"folder": compile.path.name, "state": compile.state, "error": compile.error, "seconds": compile.seconds}
        if (subject := compile.subject) is not None:
            kinds = Counter(kind_of(node, subject) for node in subject.final.nodes)
            nodes = [len(subject.imported or ()), len(subject.final)]
            row |= {"graph": subject.title, "nodes": nodes, **{kind: kinds[kind] for kind in KINDS}}
        compiles.append(row)
    return {"compiles": compiles, **{f"{kind.replace(' ', '_')}s": trace.of(kind) for kind in _EVENTS}}


def trace_view(trace: Trace) -> RenderableType:
    """The compiles of a traced program, and its recompiles, graph breaks and fallbacks."""
    table = new_table(
        "Compiles", "graph", "nodes", "kernels", "vendor", "ATen", "seconds", "folder", numbers=(1, 2, 3, 4, 5)
    )
    for compile, data in zip(trace.compiles, trace_data(trace)["compiles"], strict=True):
        if compile.subject is None:
            table.add_row(compile.state, *[""] * 5, f"{compile.path.name}\n{compile.error}", style="red")
            continue
        before, after = data["nodes"]
        counts = (str(data[kind]) for kind in KINDS)
        table.add_row(data["graph"], f"{before} → {after}", *counts, f"{compile.seconds:.2f}", compile.path.name)
    parts: list[RenderableType] = [table]
    for kind, reason, count in events_of(trace):
        times = f" ×{count}" if count > 1 else ""
        parts.append(Text(f"{_EVENTS[kind]}{times}: ", style="yellow").append(reason, style="default"))
    return Group(*parts)
