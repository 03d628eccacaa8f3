"""The edit of a model that returns a value inside a fusion, tried: it is compiled without that result."""

import re
from collections.abc import Sequence
from dataclasses import replace

from fusec.debug.subject import Subject
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.remarks import Remark
from fusec.rewriting.match import SAME


def with_tried_edit(subject: Subject, remark: Remark) -> Remark:
    """Return a remark with its edit only if that was tried and fuses; the results that are left are as before."""
    if remark.pass_name != "group" or not remark.suggestion:
        return remark
    key = f"{remark.reason} {remark.sources}"
    if key not in subject.tried:
        subject.tried[key] = _fuses_without(subject, remark)
    if not subject.tried[key]:
        return replace(remark, suggestion="")
    return replace(remark, figures={**remark.figures, "tried": SAME})


def _fuses_without(subject: Subject, remark: Remark) -> bool:
    """Compile the graph without the results inside the fusion; return whether that leaves fewer such remarks."""
    from fusec.debug.optimize import opt

    graph = subject.imported and subject.imported.copy()
    target = "triton" if any("@triton" in step.source for step in subject.steps.values()) else ""
    found = _alike(subject.remarks, remark)
    count, reasons = len(found), [r.reason for r in found]
    while graph is not None and _drop_results(graph, reasons):
        found = _alike(opt(graph, options={"record": False, "target": target}).remarks, remark)
        if len(found) < count:
            return True
        reasons = [r.reason for r in found]
    return False


def _alike(remarks: Sequence[Remark], remark: Remark) -> list[Remark]:
    return [r for r in remarks if (r.message, r.sources) == (remark.message, remark.sources)]


def _drop_results(graph: Graph, reasons: Sequence[str]) -> bool:
    """Drop the results of a graph that are returned from the lines in these reasons; return whether there were any."""
    lines = [found[1] for reason in reasons if (found := re.search(r"([^\s(]+:\d+)\) between its matmuls", reason))]
    kept = [i for i, v in enumerate(graph.outputs) if not any(_is_inside(v, line) for line in lines)]
    if not kept or len(kept) == len(graph.outputs):
        return False
    graph.set_outputs([graph.outputs[i] for i in kept], [graph.output_types[i] for i in kept])
    graph.erase_dead()
    return True


def _is_inside(value: Value, line: str) -> bool:
    """Return whether a result is computed at a line, and read by other operations as well."""
    views: set[Node] = set()
    while (node := value.producer) is not None and (node.has(Trait.VIEW) or node.is_op("cast")):
        views.add(node)
        value = node.operands[0]
    if node is None or views.issuperset(value.users):
        return False
    return any(f"{s.file.rpartition('/')[2]}:{s.line}" == line for s in node.sources)
