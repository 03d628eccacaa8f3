"""The figures of a compile that a benchmark or a golden test keeps."""

from typing import Any

from fusec.analysis.memory import is_attention, is_lookup, touched_bytes
from fusec.debug.explain import explain_subjects
from fusec.debug.explanation import KINDS, Explanation, KernelRow
from fusec.debug.subject import subject_of
from fusec.ir.graph import Node
from fusec.ir.types import TensorType, estimate


def summarize(*compiled: Any, title: str = "") -> dict[str, Any]:
    """Regions, kernels, coverage three ways and fallbacks by name, of the compiles of one model."""
    return summary_of(explain_subjects([subject_of(c) for c in compiled], title))


def summary_of(explanation: Explanation) -> dict[str, Any]:
    """The same, from an explanation."""
    return {
        "graphs": len(explanation.subjects),
        "regions": explanation.regions,
        "kernels": {kind: explanation.launches(kind) for kind in KINDS},
        "distinct_kernels": sum(row.kind == "generated" for row in explanation.kernels),
        "bytes": {kind: sum(k.bytes for k in explanation.kernels if k.kind == kind) for kind in KINDS},
        "flops": {kind: sum(k.flops for k in explanation.kernels if k.kind == kind) for kind in KINDS},
        "coverage": explanation.coverage,
        "left": left_to_aten(explanation),
        "activations": activations_generated(explanation),
        "fallbacks": {f.name: f.count for f in explanation.fallbacks},
        "copies": explanation.copies,
        "near_misses": len(explanation.near_misses),
        "failures": sum(r.kind == "failure" for r in explanation.remarks),
    }


def left_to_aten(explanation: Explanation) -> dict[str, float]:
    """Shares of bytes and FLOPs in calls into ATen that are no attention, lookup or arithmetic on indices."""
    rows = [row for row in explanation.kernels if row.kind == "opaque" and not _is_expected(row.nodes[0])]
    totals = {unit: sum(getattr(row, unit) for row in explanation.kernels) for unit in ("bytes", "flops")}
    return {unit: sum(getattr(r, unit) for r in rows) / total if total else 0.0 for unit, total in totals.items()}


def activations_generated(explanation: Explanation) -> float:
    """Share of generated kernels in the traffic of computed floats outside vendor calls, attention and lookups.

    Lookups stand at the edge of a model: what they move does not grow with its depth.
    """
    moved = dict.fromkeys(KINDS, 0)
    for row in explanation.kernels:
        if row.kind != "vendor" and not is_attention(row.nodes[0]) and not is_lookup(row.nodes[0]):
            moved[row.kind] += _activation_bytes(row, explanation.assumed)
    total = sum(moved.values())
    return moved["generated"] / total if total else 1.0


def _is_expected(node: Node) -> bool:
    if is_attention(node) or is_lookup(node):
        return True
    return all(isinstance(v.type, TensorType) and v.type.dtype.kind in ("int", "bool") for v in node.results)


def _activation_bytes(row: KernelRow, sizes: dict[str, int]) -> int:
    values = (v for node in row.nodes for v in dict.fromkeys((*node.operands, *node.results)))
    computed = (v for v in values if v.producer is not None and isinstance(v.type, TensorType))
    return sum(estimate(touched_bytes(v), sizes) for v in computed if v.tensor.dtype.is_float)


def summary_line(explanation: Explanation) -> str:
    """One line: fusions, kernels, coverage and fallbacks."""
    shares = explanation.coverage["bytes"]
    fallbacks = ", ".join(f"{f.name} ×{f.count}" for f in explanation.fallbacks) or "none"
    return (
        f"{explanation.title}: {sum(explanation.regions.values())} fusions, "
        f"{explanation.launches('generated')} kernels, {explanation.launches('vendor')} vendor calls; "
        f"bytes {' / '.join(f'{100 * shares[k]:.1f} % {k}' for k in KINDS)}; left to ATen: {fallbacks}"
    )
