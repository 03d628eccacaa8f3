"""The kernel of a region, put together from the statements of its schedule, whichever target's."""

from collections.abc import Iterable

import sympy

from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import Emitter, region_symbols
from fusec.codegen.tile.kernel import Kernel, Statement
from fusec.ir.graph import Graph, Node
from fusec.ir.printer import print_graph
from fusec.ir.types import Size, estimate, product
from fusec.loops.indexing import LoopNest, made
from fusec.loops.kinds import Shape

ANY_ROWS = 1 << 16
"""No limit on the rows of a matmul: grouping has chosen already, so that whatever has a schedule is scheduled."""
_FIXED = KernelConfig()
_MULTIPLIED = 16
"""Multiply-adds that take as long as one element that is read, about."""


def assemble(
    region: Node,
    nest: LoopNest,
    shape: Shape,
    emitter: Emitter,
    statements: Iterable[Statement],
    config: KernelConfig = _FIXED,
) -> Kernel:
    """The kernel of a region, unnamed, from what its schedule has emitted."""
    body, statements = region.body, tuple(statements)
    outputs = [b for b in emitter.outputs if b.role == "output"]
    return Kernel(
        name="kernel",
        kind=shape.kind,
        buffers=(*emitter.inputs(statements), *outputs, *emitter.scratch),
        symbols=region_symbols(region),
        body=statements,
        work=_work(body, nest, shape),
        formula=print_graph(body, sources=False),
        sources=region.sources,
        config=config,
    )


def _work(body: Graph, nest: LoopNest, shape: Shape) -> Size:
    """The largest of what is read, made and multiplied: of sizes that only a call knows, and of those known before."""
    if shape.attention is not None:
        return product(tuple(a.size for a in shape.attention.loops))
    elsewhere = {o.destination for o in nest.outputs} | {i.value for i in nest.walk() if i.kind == "lookup"}
    read = [v for v in body.inputs if v not in elsewhere]
    numels = [product(v.shape) for v in (*read, *map(made, body.outputs))]
    for contraction in shape.contractions:
        numels.append(product(tuple(a.size for a in (*contraction.axes, *contraction.bound))) // _MULTIPLIED)
    known = max((n for n in numels if isinstance(n, int)), default=0)
    symbolic = [n for n in numels if not isinstance(n, int)]
    return sympy.Max(known, max(symbolic, key=estimate), evaluate=False) if symbolic else known
