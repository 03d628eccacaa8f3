"""The values of a graph that is being made, which of them are exact, and how one is picked."""

from collections.abc import Callable, Sequence

from fusec.ir.graph import Graph, Value
from fusec.ir.types import BOOL, F16, U8, DType, Size, broadcast, symbol
from tests.campaigns.fuzz.draws import Draws

MOST_DIMS = 4
_NUMBERS = (1.0, 0.5, -2.0, 3.0, 1e-6, 0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e30)
_MOST_ELEMENTS = 4000


class Values:
    """A graph, and what of it may be read."""

    def __init__(self, draws: Draws) -> None:
        self.graph, self.draws = Graph(), draws
        self.exact: set[Value] = set()
        """Those that no rounding has touched."""
        self.stale: set[Value] = set()
        """Those whose storage has been written since they were made."""
        self.values: list[Value] = []

    def keep(self, value: Value, exact: bool) -> Value:
        """Take a value among those that may be read."""
        self.values.append(value)
        if exact:
            self.exact.add(value)
        return value

    def add(self, op: str, operands: Sequence[Value], exact: bool | None = None, **attributes: object) -> Value:
        """A node; its result is exact where its operands are, unless something else is said."""
        node = self.graph.add_node(op, operands, attributes)
        whole = all(v in self.exact for v in operands) if exact is None else exact
        return self.keep(node.result, whole)

    def number(self, number: float | int | bool, dtype: DType) -> Value:
        """A 0-d number."""
        value = self.graph.constant(number, dtype)
        self.exact.add(value)
        return value

    def pick(self, fits: Callable[[Value], bool] = lambda v: True) -> Value | None:
        """One of the values that fit, the newest first."""
        fitting = [v for v in reversed(self.values) if v not in self.stale and fits(v)]
        return fitting[min(self.draws.below(len(fitting)), self.draws.below(len(fitting)))] if fitting else None

    def partner(self, x: Value, exact: bool = False) -> Value:
        """A value of the same type that broadcasts with ``x``; maybe a number."""
        if self.draws.chance(30):
            return self.constant_for(x.dtype)

        def fits(v: Value) -> bool:
            return v.dtype == x.dtype and (v in self.exact or not exact) and self.broadcast_fits(x, v)

        return self.pick(fits) or self.constant_for(x.dtype)

    def broadcast_fits(self, *values: Value) -> bool:
        """Whether values broadcast, and not to too many elements."""
        try:
            return self.small(broadcast(*(v.shape for v in values)))
        except ValueError:
            return False

    def small(self, shape: tuple[Size, ...]) -> bool:
        """Whether a shape has few elements and dims."""
        count = 1
        for n in shape:
            count *= n if isinstance(n, int) else int(n.subs({symbol("s0"): 7}))
        return count <= _MOST_ELEMENTS and len(shape) <= MOST_DIMS

    def constant_for(self, dtype: DType) -> Value:
        """A number that an element type holds."""
        if dtype.is_float:
            number = self.draws.choice(_NUMBERS)
            return self.number(6e4 if dtype == F16 and number == 1e30 else number, dtype)
        if dtype == BOOL:
            return self.number(self.draws.chance(50), dtype)
        least, most = (0, 255) if dtype == U8 else (-(1 << 8 * dtype.bytes - 1), (1 << 8 * dtype.bytes - 1) - 1)
        return self.number(self.draws.choice((1, 2, 3, 7, 0, most, least)), dtype)
