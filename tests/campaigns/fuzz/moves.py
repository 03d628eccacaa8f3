"""Steps of random graphs that move elements: views, lookups, and writes."""

from fusec.ir.graph import Value, storage
from fusec.ir.types import I64, Size, same_shape
from tests.campaigns.fuzz.values import MOST_DIMS, Values


class Moves(Values):
    """What looks at values in another way, or writes to them."""

    def view(self) -> None:
        """A view of some kind."""
        if x := self.pick(lambda v: v.tensor.rank > 0):
            kinds = (self.permuted, self.sliced, self.reshaped, self.expanded, self.windowed)
            self.draws.choice(kinds)(x)

    def permuted(self, x: Value) -> None:
        """Dims in another order."""
        rank = x.tensor.rank
        self.add("permute", [x], dims=tuple(self.draws.shuffled(tuple(reversed(range(rank))))))

    def sliced(self, x: Value) -> None:
        """Part of a dim, which may be empty."""
        d = -1 - self.draws.below(x.tensor.rank)
        if isinstance(n := x.shape[d], int):
            start = self.draws.below(n + 1)
            stop = n - self.draws.below(n - start + 1)
            self.add("slice", [x], dim=d, start=start, stop=stop, step=1 + self.draws.below(3))

    def reshaped(self, x: Value) -> None:
        """Dims merged, split or added."""
        shape = list(x.shape)
        d = self.draws.below(len(shape))
        kind = self.draws.choice(("merge", "unsqueeze", "split", "flatten"))
        if kind == "flatten":
            shape = [x.tensor.numel]
        elif kind == "unsqueeze" and len(shape) < MOST_DIMS:
            shape.insert(d, 1)
        elif kind == "merge" and d + 1 < len(shape):
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
        elif kind == "split" and len(shape) < MOST_DIMS:
            n = shape[d]
            factor = next((f for f in (2, 3, 5, 11) if isinstance(n, int) and n and n % f == 0), 1)
            shape[d : d + 1] = [factor, n // factor] if isinstance(n, int) else [1, n]
        self.add("reshape", [x], shape=tuple(shape))

    def expanded(self, x: Value) -> None:
        """Repeated along new dims and those of length 1."""
        lead = self.draws.choice((2, 3, 1, 0))
        shape = tuple(4 if n == 1 and self.draws.chance(50) else n for n in x.shape)
        shape = (lead, *shape) if self.draws.chance(50) else shape
        if self.small(shape):
            self.add("expand", [x], shape=shape)

    def windowed(self, x: Value) -> None:
        """Windows, which overlap."""
        d = -1 - self.draws.below(x.tensor.rank)
        if isinstance(n := x.shape[d], int) and n and x.tensor.rank < MOST_DIMS:
            self.add("window", [x], dim=d, size=1 + self.draws.below(n), step=1 + self.draws.below(3))

    def concat(self) -> None:
        """Up to three values, maybe the same."""
        if not (x := self.pick(lambda v: v.tensor.rank > 0)):
            return
        d, parts = -1 - self.draws.below(x.tensor.rank), [x]

        def fits(v: Value) -> bool:
            rest = [s[:d] + s[d:][1:] for s in (v.shape, x.shape) if len(s) == x.tensor.rank]
            return v.dtype == x.dtype and len(rest) == 2 and same_shape(*rest)

        parts += [y for _ in range(self.draws.below(3)) if (y := self.pick(fits))]
        self.add("concat", parts, dim=d)

    def look_up(self) -> None:
        """At positions that a remainder keeps inside."""
        x = self.pick(lambda v: v.tensor.rank > 0)
        index = self.pick(lambda v: v.dtype == I64)
        if not x or not index:
            return
        d = -1 - self.draws.below(x.tensor.rank)
        if not isinstance(n := x.shape[d], int) or n == 0:
            return
        index = self.add("remainder", [index, self.number(n, I64)])
        rest = x.shape[: x.tensor.rank + d] + (x.shape[d + 1 :] if d < -1 else ())
        exact = x in self.exact
        inside = index.tensor.rank == x.tensor.rank and all(
            i - x.tensor.rank == d or (isinstance(a, int) and isinstance(b, int) and a <= b)
            for i, (a, b) in enumerate(zip(index.shape, x.shape, strict=True))
        )
        if inside and self.draws.chance(50):
            self.add("gather", [x, index], exact, dim=d)
        elif self.small((*rest, *index.shape)):
            self.add("take", [x, index], exact, dim=d)

    def write(self) -> None:
        """All of a value."""
        if destination := self.pick(self.is_writable):
            self.write_to(destination, self.value_for(destination, destination.shape))

    def write_rows(self) -> None:
        """Some rows, each once."""
        destination = self.pick(lambda v: self.is_writable(v) and v.tensor.rank > 0 and isinstance(v.shape[-1], int))
        if destination is None:
            return
        d = -1 - self.draws.below(destination.tensor.rank)
        if not isinstance(n := destination.shape[d], int):
            return
        index = self.graph.add_node("iota", (), {"size": self.draws.below(n + 1), "dtype": I64}).result
        if self.draws.chance(50):
            index = self.graph.add_node("sub", [self.number(n - 1, I64), index]).result
        shape = list(destination.shape)
        shape[d] = index.shape[0]
        self.write_to(destination, self.value_for(destination, tuple(shape)), index, d)

    def is_writable(self, value: Value) -> bool:
        """Whether no two elements share a place, and its storage is an input's or was made to be written to."""
        made, seen = storage(value), value
        while seen is not made and seen.producer is not None:
            if seen.producer.is_op("expand", "window"):
                return False
            if seen.producer.is_op("reshape") and not seen.producer.operands[0].tensor.is_contiguous:
                return False
            seen = seen.producer.operands[0]
        repeated = any(s == 0 and n != 1 for s, n in zip(made.tensor.strides, made.shape, strict=True))
        return not repeated and (made.producer is None or made.producer.is_op("full"))

    def value_for(self, destination: Value, shape: tuple[Size, ...]) -> Value:
        """What is written: a value that lies elsewhere, or a number."""

        def fits(v: Value) -> bool:
            return (
                v.dtype == destination.dtype and same_shape(v.shape, shape) and storage(v) is not storage(destination)
            )

        return (
            self.pick(fits)
            or self.graph.add_node("expand", [self.constant_for(destination.dtype)], {"shape": shape}).result
        )

    def write_to(self, destination: Value, value: Value, index: Value | None = None, d: int = -1) -> None:
        """Write, after which what was read of that storage is stale."""
        made = storage(destination)
        exact = destination in self.exact and (
            value in self.exact or (value.producer is not None and value.producer.is_op("expand"))
        )
        operands, attributes = [destination, value], {}
        if index is not None:
            operands, attributes = [*operands, index], {"dim": d}
        node = self.graph.add_node("write", operands, attributes)
        self.stale.update(v for v in self.values if storage(v) is made)
        self.keep(node.result, exact)
