"""Kernels from the statements of their schedules, of either target."""

from collections.abc import Iterable

import sympy

from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Kernel, Statement
from fusec.codegen.tile.origins import name_origins
from fusec.ir.graph import Graph
from fusec.ir.printer import print_graph
from fusec.ir.types import Size, estimate, product
from fusec.loops.indexing import stored_value
from fusec.loops.plan import Plan

_FIXED = KernelConfig()
_MULTIPLIED = 16
"""Multiply-adds that take about as long as reading one element."""


def assemble(
    plan: Plan, name: str, emitter: Emitter, statements: Iterable[Statement], config: KernelConfig = _FIXED
) -> Kernel:
    """Return the kernel of a plan from the statements of its schedule."""
    statements = tuple(statements)
    outputs = [b for b in emitter.outputs if b.role == "output"]
    return Kernel(
        name=name,
        kind=plan.shape.kind,
        buffers=(*emitter.inputs(statements), *outputs, *emitter.scratch),
        symbols=_symbols(plan.body),
        body=statements,
        work=_work(plan),
        formula=print_graph(plan.body, sources=False),
        config=config,
        origins=name_origins(plan.body, emitter.named, statements),
    )


def _work(plan: Plan) -> Size:
    """Return the largest number of elements read, written or multiplied; symbolic, if any of them is."""
    body, nest, shape = plan.body, plan.nest, plan.shape
    if shape.attention is not None:
        return product(tuple(a.size for a in shape.attention.loops))
    lookups = [i for i in nest.walk() if i.kind == "lookup"]
    elsewhere = {o.destination for o in nest.outputs} | {i.value for i in lookups}
    read = [v for v in body.inputs if v not in elsewhere]
    numels = [product(v.shape) for v in (*read, *map(stored_value, body.outputs))]
    numels += [product(tuple(a.size for a in lookup.axes)) for lookup in lookups]
    for contraction in shape.contractions:
        steps = product(tuple(a.size for a in (*contraction.axes, *contraction.bound))) * len(contraction.pairs)
        numels.append(steps // _MULTIPLIED)
    known = max((n for n in numels if isinstance(n, int)), default=0)
    symbolic = [n for n in numels if not isinstance(n, int)]
    return sympy.Max(known, max(symbolic, key=estimate), evaluate=False) if symbolic else known


def _symbols(body: Graph) -> tuple[str, ...]:
    """Return the names of the symbols that a kernel's text may mention: of all its types, and of slices' starts."""
    sizes: list[Size] = []
    nodes = body.nodes
    for value in (*body.inputs, *(r for node in nodes for r in node.results)):
        sizes += [*value.shape, *value.tensor.strides]
    for node in nodes:
        sizes += [node.attributes[key] for key in ("expr", "start") if key in node.attributes]
    found = {str(s) for n in sizes if not isinstance(n, int) for s in n.free_symbols}
    return tuple(sorted(found))
