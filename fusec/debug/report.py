"""The figures of a compile that a benchmark or a golden test keeps."""

from typing import Any

from fusec.debug.explain import KINDS, Explanation, explain_subjects
from fusec.debug.subject import subject_of


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
        "fallbacks": {f.name: f.count for f in explanation.fallbacks},
        "copies": explanation.copies,
        "near_misses": len(explanation.near_misses),
        "failures": sum(r.kind == "failure" for r in explanation.remarks),
    }


def summary_line(explanation: Explanation) -> str:
    """One line: fusions, kernels, coverage and fallbacks."""
    shares = explanation.coverage["bytes"]
    fallbacks = ", ".join(f"{f.name} ×{f.count}" for f in explanation.fallbacks) or "none"
    return (
        f"{explanation.title}: {sum(explanation.regions.values())} fusions, "
        f"{explanation.launches('generated')} kernels, {explanation.launches('vendor')} GEMMs; "
        f"bytes {' / '.join(f'{100 * shares[k]:.1f} % {k}' for k in KINDS)}; left to ATen: {fallbacks}"
    )
