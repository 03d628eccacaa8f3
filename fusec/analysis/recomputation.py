"""Whether a nest computes its values more often than is worth it."""

from collections.abc import Sequence

from fusec.analysis.affine import Axis
from fusec.analysis.indexing import Located, Nest, below
from fusec.ir.graph import Value
from fusec.ir.types import estimate

# Arithmetic that costs about as much as moving one byte (a core's share of bandwidth against its throughput).
_FLOPS_PER_BYTE = 8
# Arithmetic that hides behind the load of its operand, however often it is repeated.
_CHEAP = 2


def recomputation(nest: Nest) -> str:
    """Why a nest computes some values more often than is worth it; "" where it does not."""
    order = [a for dim in nest.axes for a in dim]
    evaluations: dict[Value, float] = {}
    items: dict[Value, Located] = {}
    prologue = below(i for i in nest.walk() if i.kind == "contraction")
    seen: set[Located] = set()
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
                evaluations[item.value] = evaluations.get(item.value, 0.0) + _evaluations(item, loops)
                items[item.value] = item
    for value, count in evaluations.items():
        numel = estimate(value.tensor.numel)
        saved = 2 * numel * value.dtype.bytes
        cost = items[value].node.op.cost if items[value].kind == "pointwise" else 64
        if cost > _CHEAP and (count - numel) * cost > _FLOPS_PER_BYTE * saved:
            name = items[value].node.op.name
            return f"{name} would be computed {count / numel:.0f} times over"
    return ""


def _evaluations(item: Located, nested: Sequence[Axis]) -> float:
    """How often a value is computed: once for each step of the loops down to the innermost that it depends on."""
    depends = [i for i, a in enumerate(nested) if a in item.axes]
    loops = {*(nested[: max(depends) + 1] if depends else ()), *item.axes}
    count = 1.0
    for axis in loops:
        count *= estimate(axis.size)
    return count
