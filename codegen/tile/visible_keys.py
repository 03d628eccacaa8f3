"""Keys that the queries of one iteration see: the range of the loop over them, and masks tested block by block."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import sympy

from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Constant, Operand
from fusec.ir.types import BOOL, Size, accumulation
from fusec.loops.attention import Attention
from fusec.loops.indexing import IndexedExpr
from fusec.loops.visible import Bound, Mask, visible_keys


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that any query of one iteration sees."""

    emitter: Emitter
    parts: Attention
    ranges: Mapping[sympy.Symbol, tuple[Size, Size]]
    """First and last value, in one iteration, of the queries' axes that vary there."""
    at_run_time: Callable[[IndexedExpr, str], sympy.Symbol]
    """Returns the ``max`` or ``min`` of an integer over the queries of one iteration."""

    def range(self, block: int) -> tuple[Size, Size]:
        """Return the first key, rounded down to the start of a block, and the end."""
        bounds = visible_keys(self.parts.scores, self.parts.keys, self.emitter.axis_symbol)
        starts = [self._extreme(bound, -1) for bound in bounds if not bound.upper]
        stops = [self._extreme(bound, 1) for bound in bounds if bound.upper]
        start = sympy.Max(0, *(sympy.floor(s / block) * block for s in starts if s is not None))
        return start, sympy.Min(self.parts.key_count, *(s + 1 for s in stops if s is not None))

    def _extreme(self, limit: Bound, sign: int) -> sympy.Expr | None:
        """Return the least (-1) or greatest (1) value of a bound over the queries of one iteration, if known."""
        bound = limit.value
        for number, item in limit.numbers.items():
            slope = bound.coeff(number, 1)
            bound = bound.subs(number, self.at_run_time(item, "max" if slope * sign > 0 else "min"))
        for symbol in map(self.emitter.axis_symbol, self.parts.queries):
            slope = bound.coeff(symbol, 1)
            if symbol in sympy.expand(bound - slope * symbol).free_symbols or not slope.is_Integer:
                return None
            if symbol in self.ranges:
                bound = bound.subs(symbol, self.ranges[symbol][0 if slope * sign < 0 else 1])
        return sympy.expand(bound)


def shown_by_all(emitter: Emitter, masks: Iterable[Mask], lowest: bool = False) -> Operand:
    """Emit whether every mask shows a score; with ``lowest``, an added lowest number shows it, and -inf does not."""
    shown = [_shown(emitter, mask, lowest) for mask in masks]
    return reduce(lambda a, b: emitter.compute("and", a, b, dtype=BOOL), shown)


def _shown(emitter: Emitter, mask: Mask, lowest: bool) -> Operand:
    value, dtype = emitter.emit(mask.item), accumulation(mask.item.dtype)
    if mask.hidden is False:
        return value
    if lowest or mask.hidden is True:
        return emitter.compute("ne", value, Constant(mask.hidden), dtype=dtype)
    return emitter.compute("not", emitter.compute("le", value, Constant(mask.least), dtype=dtype), dtype=BOOL)
