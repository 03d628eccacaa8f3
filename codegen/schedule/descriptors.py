"""Loads that a chip can do by itself: blocks of memory that lies so evenly that a tensor descriptor tells of it.

From Hopper on (NVIDIA's TMA) one thread asks for a whole block, by its place along each dim, and finds zeros in the
lanes beyond the ends, as a masked load leaves them. No register holds an address for each lane.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import sympy

from fusec.codegen.kernel import Buffer, Descriptor, DotTiles, Load, Loop, Statement, When, index_symbol, walk
from fusec.ir.types import DType, Size, estimate, simplify

ALIGNMENT = 16
"""Bytes: what the first element, the step along every dim but the innermost and the innermost side of a block fill."""
MOST_PLACES = 2**31 - 1
"""Elements along a dim, places being 32 bits with a sign."""
_LARGEST_SIDE = 256
"""Of a block."""
_DIMS = 5


def described(body: Iterable[Statement], sizes: Mapping[str, Size], buffers: Iterable[Buffer]) -> tuple[Statement, ...]:
    """The same statements, where loads of a matrix unit's operands have a descriptor if they may.

    Args:
        body: statements of a kernel.
        sizes: elements along each axis, by its name.
        buffers: the memory that is only read.
    """
    body = tuple(body)
    operands = {name for s in walk(body) if isinstance(s, DotTiles) for name in (s.left, s.right)}
    dtypes = {buffer.name: buffer.dtype for buffer in buffers if buffer.role == "input"}

    def visit(statement: Statement, lanes: Mapping[str, int]) -> Statement:
        if isinstance(statement, Loop):
            if statement.kind == "tile" and isinstance(statement.step, int):
                lanes = {**lanes, statement.axis: statement.step}
            return replace(statement, body=tuple(visit(s, lanes) for s in statement.body))
        if isinstance(statement, When):
            return replace(statement, body=tuple(visit(s, lanes) for s in statement.body))
        if isinstance(statement, Load) and statement.dst in operands and statement.buffer in dtypes:
            return replace(statement, descriptor=_descriptor(statement, sizes, lanes, dtypes[statement.buffer]))
        return statement

    return tuple(visit(statement, {}) for statement in body)


def _descriptor(load: Load, sizes: Mapping[str, Size], lanes: Mapping[str, int], dtype: DType) -> Descriptor | None:
    """That of a load over two tile axes; other axes are dims of which a block has one element."""
    start, strides = sympy.expand(load.offset), dict[str, Size]()
    for name in sizes:
        if (stride := start.coeff(index_symbol(name), 1)) != 0:
            strides[name] = simplify(stride)
            start = sympy.expand(start - stride * index_symbol(name))
    axes = sorted(strides, key=lambda name: -estimate(strides[name]))
    block, elements = [lanes.get(name, 1) for name in axes], ALIGNMENT // dtype.bytes
    if len(lanes.keys() & strides.keys()) != 2 or len(axes) > _DIMS or not start.is_Integer or start % elements:
        return None  # whatever else an offset has, such as remainders of an axis or places, is left in its start
    if axes[-1] not in lanes or strides[axes[-1]] != 1 or block[-1] < elements or max(block) > _LARGEST_SIDE:
        return None
    shape = tuple(sizes[name] for name in axes)
    if not all(_is_multiple(strides[name], elements) for name in axes[:-1]):
        return None
    if not all(0 < n <= MOST_PLACES for n in shape if isinstance(n, int)):
        return None
    return Descriptor(int(start), tuple(axes), shape, tuple(strides[name] for name in axes))


def _is_multiple(stride: Size, elements: int) -> bool:
    """Whether a step is forward, and over whole groups of so many elements, whatever its symbols stand for."""
    stride = sympy.sympify(stride)
    return bool(stride.is_positive and (stride / elements).is_integer)
