"""Loads by tensor descriptor: blocks of memory with regular strides, copied by hardware.

From Hopper on (NVIDIA's TMA) one thread requests a whole block by its offset along each dim; lanes beyond the ends are
zero, as after a masked load. No registers hold an address per lane.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import sympy

from fusec.codegen.tile.kernel import Buffer, Descriptor, DotTiles, Load, Loop, Statement, When, index_symbol, walk
from fusec.ir.types import DType, Size, estimate, same_size, simplify
from fusec.loops.affine import divide

ALIGNMENT = 16
"""Alignment in bytes of the first element, of all strides but the innermost, and of the innermost side of a block."""
MAX_DIM = 2**31 - 1
"""The most elements along a dim: offsets are signed 32-bit integers."""
_LARGEST_SIDE = 256
"""The most elements of a block along a dim."""
_DIMS = 5


@dataclass(frozen=True)
class _Dim:
    """A dim of memory: an axis, or a remainder or quotient of one."""

    axis: str
    offset: sympy.Expr
    below: Size
    """Steps of the axis per step of the dim."""
    length: Size
    stride: Size
    lanes: int = 1


def described(body: Iterable[Statement], sizes: Mapping[str, Size], buffers: Iterable[Buffer]) -> tuple[Statement, ...]:
    """Return the statements with a descriptor in those loads of a matrix unit's operands that allow one.

    Args:
        body: statements of a kernel, whose tiles begin at multiples of their lanes.
        sizes: the size of each axis, by name.
        buffers: the buffers of the kernel.
    """
    body = tuple(body)
    operands = {name for s in walk(body) if isinstance(s, DotTiles) for name in s.reads}
    dtypes = {buffer.name: buffer.dtype for buffer in buffers if buffer.role == "input"}

    def visit(statement: Statement, lanes: Mapping[str, int]) -> Statement:
        if isinstance(statement, Loop) and statement.kind == "tile" and isinstance(statement.step, int):
            lanes = {**lanes, statement.axis: statement.step}
        if isinstance(statement, (Loop, When)):
            return replace(statement, body=tuple(visit(s, lanes) for s in statement.body))
        if isinstance(statement, Load) and statement.dst in operands and statement.buffer in dtypes:
            return replace(statement, descriptor=_descriptor(statement, sizes, lanes, dtypes[statement.buffer]))
        return statement

    return tuple(visit(statement, {}) for statement in body)


def _descriptor(load: Load, sizes: Mapping[str, Size], lanes: Mapping[str, int], dtype: DType) -> Descriptor | None:
    """Return the descriptor of a load, if it may have one."""
    dims, start = _dims(load.offset, sizes, lanes)
    if not _evenly(dims, start, ALIGNMENT // dtype.bytes):
        return None
    tile = [dim for dim in dims if dim.lanes > 1]
    axes = tuple(axis for axis, _ in itertools.groupby(tile, lambda dim: dim.axis))
    if len(axes) != 2 or len({*axes}) != 2 or not all(map(_in_order, itertools.pairwise(tile))):
        return None
    block, offsets = tuple(dim.lanes for dim in dims), tuple(dim.offset for dim in dims)
    return Descriptor(int(start), axes, offsets, block, tuple(d.length for d in dims), tuple(d.stride for d in dims))


def _dims(offset: sympy.Expr, sizes: Mapping[str, Size], lanes: Mapping[str, int]) -> tuple[list[_Dim], sympy.Expr]:
    """Return the dims of an offset, by stride, largest first, and its constant part; no dims if it has other terms."""
    start, found = sympy.Integer(0), dict[str, list[_Dim]]()
    for term in sympy.Add.make_args(sympy.expand(offset)):
        axes = [name for name in sizes if term.has(index_symbol(name))]
        dim = _dim(term, axes[0], sizes) if len(axes) == 1 else None
        if dim is not None:
            found.setdefault(dim.axis, []).append(dim)
        elif axes:
            return [], start
        else:
            start += term
    cut = [_cut(dims, sizes[axis], lanes.get(axis, 1)) for axis, dims in found.items()]
    dims = sorted(itertools.chain(*cut), key=lambda dim: -estimate(dim.stride))
    return (dims if all(cut) else []), start


def _evenly(dims: list[_Dim], start: sympy.Expr, elements: int) -> bool:
    """Return whether descriptors allow the number, lengths and strides of dims, with so many elements in 16 bytes."""
    if not (2 <= len(dims) <= _DIMS and start.is_Integer and start % elements == 0):
        return False
    known = [dim.length for dim in dims if isinstance(dim.length, int)]
    return (
        dims[-1].stride == 1
        and dims[-1].lanes >= elements
        and all(_is_multiple(dim.stride, elements) for dim in dims[:-1])
        and all(dim.lanes <= _LARGEST_SIDE for dim in dims)
        and all(0 < length <= MAX_DIM for length in known)
    )


def _dim(term: sympy.Expr, axis: str, sizes: Mapping[str, Size]) -> _Dim | None:
    """Return the term of an offset in one axis as a dim: ``stride · (axis // below % length)``."""
    name, below, length = index_symbol(axis), cast(Size, 1), cast(Size | None, None)
    stride, offset = term.as_independent(name)
    whole = offset
    if isinstance(whole, sympy.Mod):
        whole, length = whole.args[0], simplify(whole.args[1])
    if isinstance(whole, sympy.floor):
        below = simplify(name / whole.args[0])
        whole = name
    length = divide(sizes[axis], below) if length is None else length
    if whole != name or length is None or sympy.sympify(below).has(name):
        return None
    return _Dim(axis, offset, below, length, simplify(stride))


def _cut(dims: list[_Dim], size: Size, lanes: int) -> list[_Dim]:
    """Return the dims of one axis with the lanes of a block along each; none, where a block is not a box of them."""
    found, below, left = list[_Dim](), cast(Size, 1), lanes
    for number, dim in enumerate(sorted(dims, key=lambda dim: estimate(dim.below)), 1):
        if not same_size(dim.below, below):
            return []
        below, own = below * dim.length, left
        if number < len(dims):
            if not isinstance(dim.length, int) or (dim.length % left and left % dim.length):
                return []
            own = min(left, dim.length)
        left //= own
        found.append(replace(dim, lanes=own))
    return found if same_size(below, size) else []


def _in_order(pair: tuple[_Dim, _Dim]) -> bool:
    """Return whether two adjacent dims are of different axes, or in order within the same axis."""
    outer, inner = pair
    return outer.axis != inner.axis or estimate(outer.below) > estimate(inner.below)


def _is_multiple(stride: Size, elements: int) -> bool:
    """Return whether a stride is positive and a multiple of so many elements, for all values of its symbols."""
    stride = sympy.sympify(stride)
    return bool(stride.is_positive and (stride / elements).is_integer)
