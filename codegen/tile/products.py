"""The parts of a GEMM region: prologue, products and epilogue."""

from collections.abc import Iterable

from fusec.loops.indexing import IndexedExpr, LoopNest, Output, above, walk
from fusec.loops.kinds import Shape


class Products:
    """The products of a region, the outputs that need them, and the reductions around them."""

    def __init__(self, nest: LoopNest, shape: Shape) -> None:
        self.shape = shape
        self.after = above(nest, shape.contractions)
        """The products and all that is computed from them."""
        self.results = [o for o in nest.outputs if o.root in self.after]
        """The outputs of the epilogue."""
        self.side = [o for o in nest.outputs if o.root not in self.after]
        """The outputs of the prologue."""

    def of(self, results: Iterable[Output]) -> list[IndexedExpr]:
        """Return the products that some outputs need."""
        needed = set(walk(o.root for o in results))
        return [c for c in self.shape.contractions if c in needed]

    def reductions(self, roots: Iterable[IndexedExpr], prologue: bool = True) -> list[IndexedExpr]:
        """Return the reductions that some values need.

        Args:
            roots: the values.
            prologue: whether those that only the operands of the products need are among them.
        """
        needed = set(walk(roots, lambda item: prologue or item.kind != "contraction"))
        return [r for r in self.shape.reductions if r in needed]
