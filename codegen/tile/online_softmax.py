"""The recurrence of online softmax, as statements; a schedule opens the loops and decides where the state lives.

Method: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022,
and "Flash-Decoding for long-context inference", 2023.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce

from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Constant, Operand
from fusec.ir.types import accumulation
from fusec.loops.attention import Attention, substituted
from fusec.loops.indexing import IndexedExpr

LOWEST = Constant(-math.inf)
"""The maximum of no scores."""


class OnlineSoftmax:
    """Updates the state of a row for each block of its scores.

    The state is the running maximum, the running sum of exponentials, and the running sum of values weighted by them.
    All methods append to the innermost open loop.

    Args:
        emitter: of the kernel.
        attention: the region.
        exp: the operation that computes exponentials.
    """

    def __init__(self, emitter: Emitter, attention: Attention, exp: str = "exp") -> None:
        self.emitter, self.parts, self.exp = emitter, attention, exp
        self.dtype = accumulation(attention.product.dtype)
        self.compute = partial(emitter.compute, dtype=self.dtype)

    def maximum(self, maxima: Sequence[Operand]) -> tuple[str, str]:
        """Return the largest of some maxima, and the base: the value subtracted from scores before exponentials."""
        largest = str(reduce(partial(self.compute, "maximum"), maxima))
        # After nothing but -inf there are no exponentials yet, rather than those of -inf + inf.
        empty = self.compute("eq", largest, LOWEST)
        return largest, self.compute("where", empty, Constant(0.0), largest)

    def exponential(self, score: Operand, base: Operand) -> str:
        """Return the weight of a score; of an earlier maximum, the factor that rescales the sums up to then."""
        return self.compute(self.exp, self.compute("sub", score, base))

    def rescaled(self, total: Operand, factor: Operand) -> str:
        """Return a running sum for a new base."""
        return self.compute("mul", total, factor)

    def combine_maxima(self, maxima: Sequence[Operand]) -> tuple[str, list[str]]:
        """Return the maximum over parts of the keys, and the factor that rescales the sums of each part."""
        largest, base = self.maximum(maxima)
        return largest, [self.exponential(part, base) for part in maxima]

    def combine_sums(self, sums: Iterable[Operand], factors: Iterable[Operand]) -> str:
        """Return the sum over parts of the keys, added in their order."""
        return reduce(partial(self.compute, "add"), map(self.rescaled, sums, factors))

    def define_maxima(self, largest: Operand) -> None:
        """Define the maxima of the region, given the one over all keys."""
        self.emitter.define(self.parts.largest, largest)
        for item in self.parts.maxima:
            self.emitter.define(item, self.emitter.emit(self._at_largest(item.operands[0])))

    def shift(self) -> Operand:
        """Return the factor for a softmax that subtracts something else than the largest score, as with sinks."""
        return self.emitter.emit(self._at_largest(self.parts.exponential))

    def define_result(self, total: Operand | None, sums: Iterable[Operand]) -> None:
        """Define the weighted sum, divided by the sum of exponentials or whatever the weights do with it.

        Args:
            total: the sum of exponentials, where the region takes it.
            sums: the sum of values, weighted by exponentials, for each segment of the columns.
        """
        emitter, parts = self.emitter, self.parts
        if parts.total is not None and total is not None:
            emitter.define(parts.total, total)
        for weighted, found in zip(parts.weighted, sums, strict=True):
            whole = replace(weighted, kind="load", operands=())
            emitter.define(whole, found)
            # The weights are linear in the exponential, and the result is rounded instead of them.
            result = substituted(parts.weights, parts.exponential, whole, parts.keys, casts=False)
            emitter.define(weighted, emitter.emit(result))

    def _at_largest(self, item: IndexedExpr) -> IndexedExpr:
        return substituted(item, self.parts.scores, self.parts.largest, self.parts.keys)
