"""Functions of a few integers, such as the weights of four-bit codes: a table in registers replaces them."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from operator import is_not

from fusec.loops.affine import Affine, Axis
from fusec.loops.casts import uncast
from fusec.loops.indexing import IndexedExpr, walk
from fusec.loops.intervals import interval

REGISTERS = 2
"""The most registers of a table."""
_LEAST_OPERATIONS = (2, 4)
"""The fewest operations that a look-up has to replace, for tables of one and two registers."""


@dataclass(frozen=True)
class Table:
    """An expression as a function of an integer."""

    code: IndexedExpr
    """The integer, from 0 to ``entry.size - 1``."""
    entry: Axis
    value: IndexedExpr
    """The function at each entry."""

    def field(self, lanes: int) -> tuple[IndexedExpr, int]:
        """Return an integer, and the position of the code's lowest bit in it.

        Look-ups in a table that fills registers of ``lanes`` entries ignore the bits above the code, so that a mask of
        these bits is left out; for other tables it is the code itself, at 0.
        """
        item, first, mask = self.code, 0, self.entry.size - 1
        if self.entry.size not in (lanes, REGISTERS * lanes):
            return item, first
        while item.kind == "pointwise" and item.node.is_op("and", "shift_right"):
            whole, operand = item.operands
            if operand.kind != "constant" or not operand.node.is_op("constant"):
                break
            number = int(operand.node.attributes["value"])
            if item.node.is_op("shift_right"):
                if not 0 <= number < min(32, 8 * whole.dtype.bytes) - first - mask.bit_length() + 1:
                    break
                first += number
            elif number >> first & mask != mask:
                break
            item = uncast(whole)
        return item, first

    @property
    def key(self) -> Hashable:
        """Equal for tables with equal entries, such as those of both halves of a byte."""
        return self.entry.size, self._key(self.value)

    def _key(self, item: IndexedExpr) -> Hashable:
        if self.entry not in item.axes:
            return item
        index = tuple((part.coefficient(self.entry), _at(part, self.entry, Affine())) for part in item.index)
        if item.kind == "index":
            return item.dtype, index
        index = index if item.kind in ("load", "lookup") else ()
        return item.kind, item.value, index, tuple(map(self._key, item.operands))


def tables(roots: Iterable[IndexedExpr], axis: Axis, lanes: int) -> dict[IndexedExpr, Table]:
    """Return the largest expressions below ``roots`` that vary along ``axis`` only with an integer of few values.

    Args:
        roots: the expressions.
        axis: of the lanes.
        lanes: entries that one register holds.
    """
    found: dict[IndexedExpr, Table] = {}
    stack, seen = list(roots), set[IndexedExpr]()
    while stack:
        item = stack.pop()
        if item in seen or axis not in item.axes:
            continue
        seen.add(item)
        table = _table(item, axis, lanes)
        if table is None:
            stack.extend(item.operands)
        else:
            found[item] = table
    return found


def _table(item: IndexedExpr, axis: Axis, lanes: int) -> Table | None:
    if item.kind not in ("pointwise", "lookup"):
        return None
    for code in reversed(list(walk([item]))):
        values = interval(code.value) if axis in code.axes and code is not item else None
        if values is None or values[0] < 0 or not 0 < values[1] < REGISTERS * lanes:
            continue
        replaced = [i for i in walk([item], partial(is_not, code)) if axis in i.axes]
        if not any(_is_read_along(i, axis) for i in walk([code])):
            continue  # an index, by which the table itself is computed, or the same number in all lanes
        if any(i.kind not in ("pointwise", "lookup") for i in replaced):
            continue  # it varies with more
        least = _LEAST_OPERATIONS[values[1] // lanes]
        if len(replaced) >= least or any(i.kind == "lookup" for i in replaced):
            code, entry = uncast(code), Axis(values[1] + 1, "entry")
            return Table(code, entry, _at_entry(item, code, axis, entry, {}))
    return None


def _is_read_along(item: IndexedExpr, axis: Axis) -> bool:
    """Return whether an expression is a load of other elements for each step along an axis."""
    strides = item.value.tensor.strides if item.kind == "load" else ()
    return any(stride != 0 and axis in part.axes for part, stride in zip(item.index, strides, strict=False))


def _is_cast(item: IndexedExpr) -> bool:
    """Return whether an expression is a cast to numbers."""
    return item.kind == "pointwise" and item.node.is_op("cast") and item.dtype.kind != "bool"


def _at_entry(
    item: IndexedExpr, code: IndexedExpr, axis: Axis, entry: Axis, made: dict[IndexedExpr, IndexedExpr]
) -> IndexedExpr:
    """Return an expression with the number of the entry in place of the code."""
    if axis not in item.axes:
        return item
    if item not in made:
        made[item] = _replaced(item, code, axis, entry, made)
    return made[item]


def _replaced(
    item: IndexedExpr, code: IndexedExpr, axis: Axis, entry: Axis, made: dict[IndexedExpr, IndexedExpr]
) -> IndexedExpr:
    if item is code:
        return _number(item, Affine.of([(entry, 1)]))
    operands = tuple(_at_entry(o, code, axis, entry, made) for o in item.operands)
    if (number := _sum(item, operands)) is not None:
        return _number(item, number)
    axes = frozenset[Axis]().union(*(o.axes for o in operands))
    if item.dynamic_index is None:
        return replace(item, operands=operands, axes=axes)
    (row,) = item.bound
    axes |= {a for part in item.index for a in part.axes} - {row}
    if operands[0].kind == "index":
        (number,) = operands[0].index
        index = tuple(_at(part, row, number) for part in item.index)
        return IndexedExpr("load", item.value, index, axes=axes)
    return replace(item, operands=operands, axes=axes, dynamic_index=replace(item.dynamic_index, value=operands[0]))


def _at(index: Affine, row: Axis, number: Affine) -> Affine:
    """Return an index with a number in place of one axis."""
    return Affine.of((t for t in index.terms if t[0] is not row), index.offset) + number.scaled(index.coefficient(row))


def _number(item: IndexedExpr, number: Affine) -> IndexedExpr:
    return IndexedExpr("index", item.value, (number,), axes=frozenset(number.axes))


def _sum(item: IndexedExpr, operands: tuple[IndexedExpr, ...]) -> Affine | None:
    """Return an expression as the number of the entry plus a constant, as far as it is that and does not wrap around.

    Small integers are exact in every dtype.
    """
    if item.kind != "pointwise" or operands[0].kind != "index":
        return None
    (number,) = operands[0].index
    if item.node.is_op("add", "sub") and item.dtype.kind == "int" and operands[1].kind == "constant":
        value = operands[1].node.attributes["value"]
        number = number + Affine(offset=value if item.node.is_op("add") else -value)
    elif not _is_cast(item):
        return None
    exact = item.dtype.is_float or interval(item.value) == (number.offset, number.maximum())
    return number if exact else None
