"""The axes of every name's tile, in the order of its dimensions, and ranges of tile loops."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import sympy

from fusec.codegen.tile.kernel import DotTiles, Fold, Init, Kernel, Loop, Scan, Statement, Update, index_symbol, walk
from fusec.codegen.tile.sort_tile import SortTile
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
    """Return the axes of all tile loops in the order of the dimensions of every tile: outer before inner.

    The rows, which are outermost, come last in transposed products. The summed axis of a product comes before the last
    axis of its result, so that its second operand need not be transposed.
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
    """Return the axes of each name; an accumulator has those of all its updates."""
    axes = frozenset(_tile_loops(kernel))
    results = list(_results(kernel.body, "", set()))
    found: dict[str, frozenset[str]] = {}
    changed = True
    while changed:
        changed = False
        for statement, lane in results:
            span = (_span(statement, found) & axes) | ({lane} if lane else set())
            updated = {statement.result: span}
            if isinstance(statement, Scan):
                updated[statement.acc] = span - {statement.axis}
            elif isinstance(statement, SortTile):
                updated = dict.fromkeys((statement.order, statement.values), frozenset({statement.along}))
            for name, span in updated.items():
                if not span <= found.get(name, frozenset()):
                    found[name], changed = found.get(name, frozenset()) | span, True
    return found


def mentioned(offset: sympy.Expr | int) -> frozenset[str]:
    """Return the names in an index expression."""
    return frozenset(s.name for s in sympy.sympify(offset).free_symbols)


def lanes_along(kernel: Kernel) -> dict[str, int]:
    """Return the most lanes of a tile along each axis."""
    lanes: dict[str, int] = {}
    for loop in walk(kernel.body):
        if isinstance(loop, Loop) and loop.kind == "tile" and isinstance(loop.step, int):
            lanes[loop.axis] = max(loop.step, lanes.get(loop.axis, 1))
    return lanes


def covers(loop: Loop) -> bool:
    """Return whether the first tile holds the whole range."""
    ends = loop.stop.args if isinstance(loop.stop, sympy.Min) else (loop.stop,)
    lengths = [simplify(end - loop.start) for end in ends]
    return any(isinstance(n, int) and n <= loop.step for n in lengths)


def exact(loop: Loop) -> bool:
    """Return whether there is at least one tile and all are full."""
    length = simplify(loop.stop - loop.start) if not isinstance(loop.stop, sympy.Min) else None
    return isinstance(length, int) and length > 0 and length % loop.step == 0


def limit_of(loop: Loop) -> Size:
    """Return the upper bound of valid lanes, without bounds that all lanes satisfy."""
    if isinstance(loop.stop, sympy.Min) and covers(loop):
        return sympy.Min(*(end for end in loop.stop.args if sympy.expand(end - loop.start) != loop.step))
    return loop.stop


def _results(body: Iterable[Statement], lane: str, partial: set[str]) -> Iterator[tuple[Statement, str]]:
    """Yield every statement that defines a name, and the axis along which it keeps partial results."""
    for statement in body:
        if isinstance(statement, Init):
            partial.update({statement.dst} if statement.tile else ())
        elif statement.result:
            partial_results = isinstance(statement, Update) and statement.acc in partial
            scanned = isinstance(statement, Scan) and statement.axis == lane
            yield statement, lane if partial_results or scanned else ""
        inner = statement.axis if isinstance(statement, Loop) and statement.kind == "tile" else lane
        yield from _results(statement.children, inner, partial)


def _span(statement: Statement, found: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the axes of the tile that a statement computes, given those of earlier names."""
    names = frozenset[str]().union(*map(mentioned, statement.indices))
    own = names.union(*(found.get(name, ()) for name in (*names, *statement.reads)))
    if isinstance(statement, (Fold, DotTiles)):
        return own - {statement.axis} if statement.axis else frozenset()
    return own
