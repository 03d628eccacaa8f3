"""A traced program as tables on a terminal."""

import json
import re
from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from fusec.debug.subject import kind_of
from fusec.debug.text import new_table
from fusec.debug.traces import Trace


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
    for kind, title in (("recompile", "Recompiles"), ("graph break", "Graph breaks"), ("fallback", "Left to ATen")):
        for reason, count in Counter(map(_essence, trace.of(kind))).items():
            times = f" ×{count}" if count > 1 else ""
            parts.append(Text(f"{title}{times}: ", style="yellow").append(reason, style="default"))
    return Group(*parts)


def _essence(text: str) -> str:
    """Return the reason of an event of torch, and the user's line.

    Texts of graph breaks have a traceback; a recompile with several cached graphs has a list with a reason for each.
    """
    if text.startswith("["):
        return "\n  ".join(dict.fromkeys(json.loads(text)))
    place = re.search(r"user code at (\S+:\d+)", text)
    reason = re.search(r"Explanation: (.*)", text) or re.search(r"Reason: (.*)", text)
    return text if place is None or reason is None else f"{reason.group(1)}\n  {place.group(1)}"
