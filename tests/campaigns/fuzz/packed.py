"""Steps of random graphs that multiply by weights computed from packed integers."""

from fusec.ir.graph import Value
from fusec.ir.types import BF16, F16, F32, I8, I64, U8, DType, TensorType, contiguous_strides, symbol
from tests.campaigns.fuzz.moves import Moves

_ROWS = (1, 2, 3, 17, symbol("s0"), 20)
_DEPTHS = (48, 16, 96, 24, 32, 8)


class Packed(Moves):
    """Products with weights that are codes and scales, in one spelling or another."""

    def packed(self) -> None:
        """``x · weightᵀ``, of inputs of their own."""
        dtype = self.draws.choice((F32, F32, BF16, F16))
        rows, depth = self.draws.choice(_ROWS), self.draws.choice(_DEPTHS)
        columns = self.draws.choice((5, 1, 8, 19))
        x = self._input(dtype, rows, depth)
        codes = self._codes(columns, depth)
        if self.draws.chance(40):
            weight = self._looked_up(codes, dtype)
        else:
            weight = self._node("cast", codes, dtype=dtype)
        weight = self._scaled(weight, dtype, columns, depth)
        self.add("contraction", [x, weight], False, spec="az,bz->ab")

    def _input(self, dtype: DType, *shape: int) -> Value:
        value = self.graph.add_input(TensorType(dtype, shape, contiguous_strides(shape)), "packed")
        self.exact.add(value)
        return value

    def _node(self, op: str, *operands: Value, **attributes: object) -> Value:
        return self.graph.add_node(op, operands, attributes).result

    def _codes(self, columns: int, depth: int) -> Value:
        """Integers of 8, 4 or 2 bits: neighbours of a row in one byte, or parts of it side by side."""
        per = self.draws.choice((2, 1, 4))
        if per == 1:
            return self._input(self.draws.choice((I8, U8)), columns, depth)
        byte, bits = self._input(U8, columns, depth // per), 8 // per
        parts = []
        for i in range(per):
            part = self._node("shift_right", byte, self.number(i * bits, U8)) if i else byte
            parts.append(self._node("and", part, self.number((1 << bits) - 1, U8)))
        if self.draws.chance(50):
            parts.reverse()
        if self.draws.chance(40):
            return self._node("concat", *parts, dim=-1)
        parts = [self._node("reshape", part, shape=(columns, depth // per, 1)) for part in parts]
        return self._node("reshape", self._node("concat", *parts, dim=-1), shape=(columns, depth))

    def _looked_up(self, codes: Value, dtype: DType) -> Value:
        """Numbers of a codebook: of 16, or of all that the codes may be."""
        codes = self._node("and", codes, self.number(15, codes.dtype))
        return self._node("take", self._input(dtype, 16), self._node("cast", codes, dtype=I64), dim=-1)

    def _scaled(self, weight: Value, dtype: DType, columns: int, depth: int) -> Value:
        """Scaled per row or group, after the subtraction of zero points or not."""
        group = self.draws.choice((depth, 8, 4))
        shape = (columns, depth // group, group)
        weight = self._node("reshape", weight, shape=shape)
        if self.draws.chance(50):
            weight = self._node("sub", weight, self._input(dtype, *shape[:2], 1))
        weight = self._node("mul", weight, self._input(dtype, *shape[:2], 1))
        return self._node("reshape", weight, shape=(columns, depth))
