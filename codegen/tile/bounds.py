"""Proofs that a kernel stays within its buffers, for all values of its axes and all positive sizes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

import sympy

from fusec.codegen.tile.kernel import Check, ClampIndex, Combine, Kernel, Load, Loop, Statement, Store, walk
from fusec.ir.graph import Graph
from fusec.ir.types import Size, symbol
from fusec.loops.affine import at_least, divide


@dataclass(frozen=True)
class Access:
    """A load or store, inside the loops around it."""

    statement: "Load | Store | Combine"
    loops: tuple[Loop, ...]
    """Outermost first."""
    numel: Size
    """Length of the buffer."""

    def __str__(self) -> str:
        around = ", ".join(f"{loop.axis} in {loop.start} … {loop.stop}" for loop in self.loops)
        return f"{self.statement.buffer}[{self.statement.offset}] of {self.numel} with {around or 'no loops'}"


def unproven_accesses(kernel: Kernel, limits: Mapping[str, Size] | None = None) -> list[Access]:
    """Return the loads and stores not proven to stay within ``0 … numel - 1``; none, if the kernel is correct.

    Lanes of a tile beyond the range of its loop are masked, so they do not count. Loads from a kernel's own memory
    before any store to it are among the results.

    Args:
        kernel: the tile program.
        limits: upper bounds of symbols, as far as the graph gives them; see ``size_limits``.
    """
    spaces: dict[tuple[object, ...], _Space] = {}

    def stays_inside(access: Access) -> bool:
        along = {s.name for s in sympy.sympify(access.statement.offset).free_symbols}
        if any(loop.start == loop.stop and (loop.axis in along or loop.kind != "tile") for loop in access.loops):
            return True  # no iteration runs, or no lane is in range
        key = tuple((loop.axis, loop.start, loop.stop) for loop in access.loops)
        space = spaces.get(key) or spaces.setdefault(key, _Space(access.loops, limits or {}))
        offset = space.expression(access.statement.offset)
        return space.never_negative(offset) and space.never_negative(space.expression(access.numel) - 1 - offset)

    hollow = _loads_of_nothing(kernel)
    return [a for a in accesses(kernel) if a.statement in hollow or not stays_inside(a)]


def _loads_of_nothing(kernel: Kernel) -> list[Statement]:
    """Return the loads from a kernel's own memory ahead of all stores to it."""
    empty = {buffer.name for buffer in kernel.buffers if buffer.role in ("scratch", "shared")}
    found = []
    for statement in walk(kernel.body):
        if not empty.isdisjoint(statement.loads):
            found.append(statement)
        empty.difference_update(statement.stores)
    return found


def size_limits(body: Graph) -> dict[str, Size]:
    """Return upper bounds of symbols that the body slices up to, as a model slices its table of positions."""
    limits: dict[str, Size] = {}
    for node in body.nodes:
        if node.is_op("slice"):
            stop, length = node.attributes["stop"], node.operands[0].shape[node.attributes["dim"]]
            if isinstance(stop, sympy.Symbol) and isinstance(length, int):
                limits[stop.name] = min(length, limits.get(stop.name, length))
    return limits


def accesses(kernel: Kernel) -> Iterator[Access]:
    """Return every load and store of a kernel; a clamped index counts as one more loop around.

    A clamped index must also be checked, so that a value out of range is reported: an index of the same length before
    any store, its own value right before its use, or all of the kernel's by an earlier kernel.
    """
    first = takewhile(lambda s: not s.stores, walk(kernel.body))
    checked = {s.length for s in first if isinstance(s, Check)}
    themselves = {(s.value, s.length) for s in walk(kernel.body) if isinstance(s, Check)}

    def is_checked(s: ClampIndex) -> bool:
        return s.bounded or kernel.checks is None or s.length in checked or (s.value, s.length) in themselves

    found = [s for s in walk(kernel.body) if isinstance(s, ClampIndex) and is_checked(s)]
    indices = tuple(Loop(s.dst, 0, s.length, 1, "tile", ()) for s in found)
    lengths = {buffer.name: buffer.numel for buffer in kernel.buffers}

    def visit(body: tuple[Statement, ...], loops: tuple[Loop, ...]) -> Iterator[Access]:
        for statement in body:
            if isinstance(statement, (Load, Store, Combine)):
                yield Access(statement, loops, lengths[statement.buffer])
            yield from visit(statement.children, (*loops, statement) if isinstance(statement, Loop) else loops)

    return visit(kernel.body, indices)


class _Space:
    """The values that the axes of some nested loops take."""

    def __init__(self, loops: tuple[Loop, ...], limits: Mapping[str, Size]) -> None:
        self.names = {loop.axis: sympy.Dummy(loop.axis, integer=True, nonnegative=True) for loop in loops}
        self.limits = {symbol(name): limit for name, limit in limits.items()}
        self.ranges = [(self.names[loop.axis], *self._range(loop)) for loop in loops]
        self._found: dict[tuple[sympy.Expr, int], bool] = {}

    def _range(self, loop: Loop) -> tuple[tuple[sympy.Expr, ...], tuple[sympy.Expr, ...]]:
        """Return lower bounds of the least value, and upper bounds of the greatest."""
        stop = self.expression(loop.stop)
        ends = stop.args if isinstance(stop, sympy.Min) else (stop,)
        start = sympy.sympify(loop.start)
        terms = start.as_coefficients_dict()
        numbers = all(sympy.sympify(n).is_Integer for n in (stop, loop.step, *terms.values()))
        if loop.kind != "tile" and numbers and all(term.is_Symbol or term == 1 for term in terms):
            # Of blocks only the first elements. They differ from a number by multiples of another one.
            apart = sympy.gcd_list([loop.step, *(factor for term, factor in terms.items() if term != 1)])
            last = stop - 1 - (stop - 1 - terms[sympy.S.One]) % apart
            return (self.expression(start),), (last,)
        # What the run time gives may be negative: it is no bound.
        parts = [part for part in start.args if self._is_known(part)] if isinstance(start, sympy.Max) else []
        return tuple(map(self.expression, parts or [start])), tuple(sympy.expand(end - 1) for end in ends)

    def _is_known(self, start: sympy.Expr) -> bool:
        """Return whether a start of a loop consists of numbers and axes."""
        return all(symbol.name in self.names for symbol in start.free_symbols)

    def expression(self, size: Size) -> sympy.Expr:
        """Return a size over this space's symbols, whatever was assumed where it was built."""
        expr = sympy.sympify(size)
        return expr.xreplace({s: self.names.get(s.name) or symbol(s.name) for s in expr.free_symbols})

    def never_negative(self, expr: sympy.Expr, depth: int | None = None) -> bool:
        """Return whether ``expr >= 0`` throughout, with each axis, innermost first, at the worst end of its range."""
        depth = len(self.ranges) if depth is None else depth
        expr = sympy.expand(expr)
        if expr.is_Integer:
            return bool(expr >= 0)
        if (expr, depth) not in self._found:
            self._found[expr, depth] = self._is_never_negative(expr, depth)
        return self._found[expr, depth]

    def _is_never_negative(self, expr: sympy.Expr, depth: int) -> bool:
        part = self._part_of_an_axis(expr, depth)
        if part is not None:
            atom, ends = part
            return any(self._at_worst(expr, atom, end, depth) for end in ends)
        if depth == 0:
            return _certain(expr, self.limits)
        axis, least, greatest = self.ranges[depth - 1]
        slope = expr.coeff(axis, 1)
        if sympy.expand(expr - slope * axis).has(axis):
            return False
        if self.never_negative(slope, depth - 1):
            return any(self.never_negative(expr.subs(axis, end), depth - 1) for end in least)
        if self.never_negative(-slope, depth - 1):
            return any(self.never_negative(expr.subs(axis, end), depth - 1) for end in greatest)
        return False

    def _part_of_an_axis(self, expr: sympy.Expr, depth: int) -> tuple[sympy.Expr, list[sympy.Expr]] | None:
        """Return a quotient or remainder of an axis in an expression that is never negative, and upper bounds of it."""
        atoms = sorted(expr.atoms(sympy.floor, sympy.Mod), key=sympy.count_ops)
        for i, atom in enumerate(atoms):
            if not self._has_axes(atom) or any(o.has(atom) for o in atoms[i + 1 :]):
                continue
            over, under = atom.args if isinstance(atom, sympy.Mod) else atom.args[0].as_numer_denom()
            if self._has_axes(under) or not _certain(under - 1, self.limits) or not self.never_negative(over, depth):
                continue
            if isinstance(atom, sympy.Mod):
                return atom, [under - 1]
            if ends := [end for last in self._greatest(over) if (end := _quotient_of_last(last, under)) is not None]:
                return atom, ends
        return None

    def _has_axes(self, expr: sympy.Expr) -> bool:
        return not expr.free_symbols.isdisjoint(self.names.values())

    def _greatest(self, expr: sympy.Expr) -> list[sympy.Expr]:
        """Return upper bounds, without axes, of a sum of axes; only the least, where all are numbers."""
        for axis, _, greatest in reversed(self.ranges):
            slope = expr.coeff(axis, 1)
            if slope != 0:
                if not (slope.is_Integer and slope > 0):
                    return []
                rest = sympy.expand(expr - slope * axis)
                ends = [last for end in greatest for last in self._greatest(sympy.expand(rest + slope * end))]
                return [min(ends)] if ends and all(end.is_Integer for end in ends) else ends
        return [] if self._has_axes(expr) else [expr]

    def _at_worst(self, expr: sympy.Expr, part: sympy.Expr, greatest: sympy.Expr, depth: int) -> bool:
        """Return whether an expression is never negative for all values of a part of it, from 0 to its greatest."""
        place = sympy.Dummy("part", integer=True, nonnegative=True)
        expr = sympy.expand(expr.subs(part, place))
        slope = expr.coeff(place, 1)
        if sympy.expand(expr - slope * place).has(place):
            return False
        if self.never_negative(slope, depth):
            return self.never_negative(expr.subs(place, 0), depth)
        return self.never_negative(-slope, depth) and self.never_negative(expr.subs(place, greatest), depth)


def _quotient_of_last(last: sympy.Expr, divisor: sympy.Expr) -> Size | None:
    """Return ``last // divisor`` where that is a size, as for the last element of whole groups."""
    if last.is_Integer and divisor.is_Integer:
        return last // divisor
    groups = divide(last + 1, divisor)
    return None if groups is None else groups - 1


def _certain(expr: sympy.Expr, limits: Mapping[sympy.Symbol, Size]) -> bool:
    """Return whether an expression over positive sizes is never negative, with quotients and limits at their worst."""
    expr = sympy.expand(expr.replace(sympy.ceiling, lambda x: -sympy.floor(-x)))
    quotients = sorted(expr.atoms(sympy.floor, sympy.Mod), key=sympy.count_ops, reverse=True)
    # A quotient of sizes is not negative: a positive symbol minus one replaces it, in any power.
    stand_ins = [(q, sympy.Dummy("q", integer=True, positive=True) - 1) for q in quotients if _is_count(q, limits)]
    if len(stand_ins) == len(quotients) and at_least(sympy.expand(expr.subs(stand_ins)), 0):
        return True
    limited = [s for s in expr.free_symbols if s in limits]
    for atom in (*quotients[:1], *limited):
        slope = expr.coeff(atom, 1)
        if sympy.expand(expr - slope * atom).has(atom):
            continue
        least, greatest = _range_of(atom, limits)
        ends = least if _certain(slope, limits) else greatest if _certain(-slope, limits) else ()
        if any(_certain(expr.subs(atom, end), limits) for end in ends):
            return True
    return False


def _is_count(quotient: sympy.Expr, limits: Mapping[sympy.Symbol, Size]) -> bool:
    """Return whether a quotient is never negative."""
    if isinstance(quotient, sympy.Mod):
        return True
    over, under = sympy.together(quotient.args[0]).as_numer_denom()
    return _certain(over, limits) and _certain(under, limits)


def _range_of(
    atom: sympy.Expr, limits: Mapping[sympy.Symbol, Size]
) -> tuple[tuple[sympy.Expr, ...], tuple[sympy.Expr, ...]]:
    """Return lower and upper bounds of a quotient, remainder or limited symbol; any one of each is sufficient."""
    if atom.is_Symbol:
        return (sympy.S.One,), (sympy.sympify(limits[atom]),)
    if isinstance(atom, sympy.Mod):
        return (sympy.S.Zero,), (atom.args[1] - 1,)
    (exact,) = atom.args
    divisor = exact.as_numer_denom()[1]
    lost = sympy.Rational(divisor - 1, divisor) if divisor.is_Integer else 1
    return ((sympy.S.Zero, exact - lost) if _is_count(atom, limits) else (exact - lost,)), (exact,)
