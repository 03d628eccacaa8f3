"""Number of evaluations of each expression of a nest: a fused kernel may recompute what another would store."""

from collections.abc import Mapping, Sequence

from fusec.ir.graph import Value
from fusec.ir.types import estimate
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, below


def evaluations(nest: LoopNest, symbols: Mapping[str, int] | None = None) -> dict[IndexedExpr, float]:
    """Estimate how often each expression of a nest is evaluated; ``symbols`` are the known sizes."""
    # The grid runs over the rows of reductions; the other loops are inside.
    over = ("reduction", "scan", "sort")
    rows = next((i.operands[0].axes.difference(i.bound) for i in nest.walk() if i.kind in over), frozenset[Axis]())
    order = sorted((a for dim in nest.axes for a in dim), key=lambda axis: axis not in rows)
    found: dict[IndexedExpr, float] = {}
    prologue = below(i for i in nest.walk() if i.kind == "contraction")
    seen: set[IndexedExpr] = set()
    for output in nest.outputs:
        own = {axis for part in output.index for axis in part.axes}
        nested = [a for a in order if a in own]
        stack = [output.root]
        while stack:
            item = stack.pop()
            if item in seen:
                continue
            seen.add(item)
            stack.extend(item.operands)
            if item.kind in ("pointwise", "reduction", "contraction"):
                loops = () if item in prologue or item.kind == "contraction" else nested
                found[item] = _evaluations(item, loops, symbols)
    return found


def repetitions(evaluations: Mapping[IndexedExpr, float]) -> dict[Value, float]:
    """Return the number of evaluations per element of each value that is recomputed."""
    counts: dict[Value, float] = {}
    for item, count in evaluations.items():
        counts[item.value] = counts.get(item.value, 0.0) + count
    times = {value: count / max(estimate(value.tensor.numel), 1) for value, count in counts.items()}
    return {value: n for value, n in times.items() if n > 1}


def _evaluations(item: IndexedExpr, nested: Sequence[Axis], symbols: Mapping[str, int] | None) -> float:
    """Return the iterations of the loops down to the innermost one that an expression depends on."""
    depends = [i for i, a in enumerate(nested) if a in item.axes]
    loops = {*(nested[: max(depends) + 1] if depends else ()), *item.axes}
    count = 1.0
    for axis in loops:
        count *= estimate(axis.size, symbols)
    return count
