"""Which axes every name of a kernel is a tile over, in the order of its dimensions, and which lanes of it are valid."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import sympy

from fusec.codegen.tile.kernel import (
    Assign,
    ClampIndex,
    Compute,
    DotTiles,
    Fold,
    Index,
    Init,
    Kernel,
    Load,
    Loop,
    Operand,
    Statement,
    Update,
    When,
    index_symbol,
    walk,
)
from fusec.ir.types import Size, simplify


def with_distinct_axes(kernel: Kernel) -> Kernel:
    """Rename serial loops over an axis that is tiled elsewhere, so that a name is a tile everywhere or nowhere."""
    serial = {s.axis for s in walk(kernel.body) if isinstance(s, Loop) and s.kind == "serial"}
    both = serial.intersection(_tile_loops(kernel))
    return replace(kernel, body=_renamed(kernel.body, both, {})) if both else kernel


def _renamed(part: Any, axes: set[str], names: Mapping[sympy.Symbol, sympy.Symbol]) -> Any:
    """Return statements or parts of them in which serial loops over these axes have names of their own."""
    if isinstance(part, sympy.Basic):
        return part.xreplace(dict(names))
    if isinstance(part, tuple):
        return tuple(_renamed(p, axes, names) for p in part)
    if isinstance(part, Loop) and part.axis in axes:
        old = index_symbol(part.axis)
        if part.kind == "serial":
            part = replace(part, axis=f"{part.axis}_serial")
        names = {**names, old: index_symbol(part.axis)}
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{f.name: _renamed(getattr(part, f.name), axes, names) for f in fields(part)})


def tile_axes(kernel: Kernel) -> tuple[str, ...]:
    """The axes of all tile loops in the order of the dimensions of every tile: outer before inner.

    The rows, which are outermost, come last in products that are transposed. What a product sums over stands before the
    last axis of its own, so that a matrix unit takes its second operand as it is loaded.
    """
    order, axes = _tile_loops(kernel), spans(kernel)
    if kernel.config.transposed:
        order.append(order.pop(0))
    for dot in (s for s in walk(kernel.body) if isinstance(s, DotTiles)):
        columns = max((order.index(axis) for axis in axes.get(dot.acc, ())), default=0)
        if order.index(dot.axis) > columns:
            order.remove(dot.axis)
            order.insert(columns, dot.axis)
    return tuple(order)


def _tile_loops(kernel: Kernel) -> list[str]:
    return list(dict.fromkeys(s.axis for s in walk(kernel.body) if isinstance(s, Loop) and s.kind == "tile"))


def spans(kernel: Kernel) -> dict[str, frozenset[str]]:
    """The axes of each name; an accumulator has those of all it takes in, whatever comes first."""
    axes = frozenset(_tile_loops(kernel))
    defined = list(_definitions(kernel.body, "", {}))
    found: dict[str, frozenset[str]] = {}
    changed = True
    while changed:
        changed = False
        for name, statement, lane in defined:
            own = found.get(name, frozenset())
            taken = own | (_taken(statement, found) & axes) | ({lane} if lane else set())
            if taken != own:
                found[name], changed = taken, True
    return found


def mentioned(offset: sympy.Expr | int) -> frozenset[str]:
    """The names in an index expression."""
    return frozenset(s.name for s in sympy.sympify(offset).free_symbols)


def lanes_along(kernel: Kernel) -> dict[str, int]:
    """The most lanes of a tile along each axis."""
    lanes: dict[str, int] = {}
    for loop in walk(kernel.body):
        if isinstance(loop, Loop) and loop.kind == "tile" and isinstance(loop.step, int):
            lanes[loop.axis] = max(loop.step, lanes.get(loop.axis, 1))
    return lanes


def covers(loop: Loop) -> bool:
    """Whether the first tile holds the whole range."""
    ends = loop.stop.args if isinstance(loop.stop, sympy.Min) else (loop.stop,)
    lengths = [simplify(end - loop.start) for end in ends]
    return any(isinstance(n, int) and n <= loop.step for n in lengths)


def exact(loop: Loop) -> bool:
    """Whether there are tiles and each is full."""
    length = simplify(loop.stop - loop.start) if not isinstance(loop.stop, sympy.Min) else None
    return isinstance(length, int) and length > 0 and length % loop.step == 0


def limit_of(loop: Loop) -> Size:
    """What lanes stay below; not what all lanes of a tile do."""
    if isinstance(loop.stop, sympy.Min) and covers(loop):
        return sympy.Min(*(end for end in loop.stop.args if sympy.expand(end - loop.start) != loop.step))
    return loop.stop


def _definitions(
    body: Iterable[Statement], lane: str, partial: dict[str, bool]
) -> Iterable[tuple[str, Statement, str]]:
    """Every statement that gives a name its value, and the axis along which an accumulator has partial results."""
    for statement in body:
        if isinstance(statement, Loop):
            yield from _definitions(statement.body, statement.axis if statement.kind == "tile" else lane, partial)
        elif isinstance(statement, When):
            yield from _definitions(statement.body, lane, partial)
        elif isinstance(statement, Init):
            partial[statement.dst] = statement.tile
        elif isinstance(statement, Update):
            yield statement.acc, statement, lane if partial.get(statement.acc) else ""
        elif isinstance(statement, (Assign, DotTiles)):
            yield statement.acc, statement, ""
        elif isinstance(statement, (Load, Compute, Index, Fold, ClampIndex)):
            yield statement.dst, statement, ""


def _taken(statement: Statement, found: dict[str, frozenset[str]]) -> frozenset[str]:
    def of(*operands: Operand) -> frozenset[str]:
        return frozenset[str]().union(*(found.get(o, frozenset()) for o in operands if isinstance(o, str)))

    if isinstance(statement, Load):
        names = mentioned(statement.offset)  # of axes, and of places
        return names | of(*names)
    if isinstance(statement, ClampIndex):
        return of(statement.value)
    if isinstance(statement, Index):
        return mentioned(statement.value)
    if isinstance(statement, Compute):
        return of(*statement.operands)
    if isinstance(statement, Update):
        return of(*statement.values)
    if isinstance(statement, Assign):
        return of(statement.value)
    if isinstance(statement, DotTiles):
        return of(statement.left, statement.right) - {statement.axis}
    if isinstance(statement, Fold):
        folded = of(statement.src)
        return folded - {statement.axis} if statement.axis else frozenset()
    return frozenset()
