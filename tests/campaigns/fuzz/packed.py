"""Steps of random graphs that multiply by weights computed from packed integers."""

from fusec.ir.graph import Value
from fusec.ir.types import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    DType,
    Size,
    TensorType,
    contiguous_strides,
    symbol,
)
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

    def bytes(self) -> None:
        """``x · weightᵀ`` of bytes, in one spelling or another, scaled after it."""
        rows, depth, columns = (
            self.draws.choice(_ROWS),
            self.draws.choice((*_DEPTHS, 64, 132)),
            self.draws.choice((5, 1, 19)),
        )
        x = self._bytes(rows, depth)
        weight = self._input(self.draws.choice((I8, U8)), columns, depth)
        dtype = self.draws.choice((None, I32, F32, F64))
        if dtype is None:
            product = self._node("contraction", x, weight, spec="az,bz->ab", dtype=I32)
        else:
            operands = (self._node("cast", v, dtype=dtype) for v in (x, weight))
            product = self._node("contraction", *operands, spec="az,bz->ab")
        product = self._node("cast", product, dtype=F32)
        self.add("mul", [product, self._input(F32, columns)], False)

    def _bytes(self, rows: Size, depth: int) -> Value:
        """Given, or the whole parts of floats."""
        if self.draws.chance(50):
            return self._input(self.draws.choice((I8, U8)), rows, depth)
        x = self._node("minimum", self._node("maximum", self._input(F32, rows, depth), self.number(-100.0, F32)),
                       self.number(100.0, F32))  # fmt: skip
        return self._node("cast", x, dtype=I8)

    def bits(self) -> None:
        """Pairs of bytes as half-precision floats."""
        dtype, columns = self.draws.choice((F16, BF16)), self.draws.choice((5, 1, 19))
        pairs = self._input(U8, columns, 8)
        low, high = (
            self._node("cast", self._node("slice", pairs, dim=-1, start=i, stop=8, step=2), dtype=I32) for i in (0, 1)
        )
        # Exponents stay in the middle: no numbers that overflow as soon as they are added.
        high = self._node("or", self._node("and", high, self.number(0xBF, I32)), self.number(0x30, I32))
        word = self._node("or", low, self._node("shift_left", high, self.number(8, I32)))
        value = self._node("bitcast", self._node("cast", word, dtype=I16), dtype=dtype)
        self.add("cast", [value], True, dtype=F32)

    def _input(self, dtype: DType, *shape: Size) -> Value:
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
