"""Graphs of every operation, element type and layout, made from the bytes of a program.

What may flip on a rounding (a comparison, a floor, a cast to an integer) reads only exact values, those that no
rounding has touched; so that integers, truth values and NaN of two right compilers can be compared exactly.
"""

from collections.abc import Sequence

from fusec.errors import GraphError
from fusec.ir.graph import Graph, Value, base
from fusec.ir.types import (
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    DType,
    ScalarType,
    Size,
    TensorType,
    contiguous_strides,
    same_size,
    symbol,
)
from tests.campaigns.fuzz.draws import Draws, Program
from tests.campaigns.fuzz.packed import Packed

FLOATS = (F32, BF16, F16, F64)
_INTS = (I64, I32, I16, I8, U8)
_DTYPES = (F32, F32, F32, F32, BF16, BF16, F16, F64, I64, I64, I32, I16, I8, U8, BOOL)
_LENGTHS: tuple[Size, ...] = (3, 1, 2, 0, 5, 8, 17, 33, symbol("s0"), symbol("s0"))

_FAR = 1 << 40

_SMOOTH = ("exp", "tanh", "sigmoid", "erf", "expm1", "exp2")
_OF_EXACT = ("floor", "ceil", "round", "trunc", "sign", "sqrt", "rsqrt", "log", "log2", "log1p", "reciprocal",
             "sin", "cos")  # fmt: skip
_EXACT = ("neg", "abs", "floor", "ceil", "round", "trunc", "sign")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_INTEGER = ("add", "sub", "mul", "maximum", "minimum", "and", "or", "xor")


def wide_graph(program: Program) -> Graph:
    """The graph of a program; it passes the verifier and the interpreter can run it."""
    return _Wide(program).graph


class _Wide(Packed):
    def __init__(self, program: Program) -> None:
        head, steps = program
        super().__init__(Draws(head))
        lengths = [self.draws.choice(_LENGTHS) for _ in range(3)]
        if any(not isinstance(n, int) for n in lengths) and self.draws.chance(40):
            self.graph.add_input(ScalarType("int", symbol("s0")), "n")
        for _ in range(1 + self.draws.below(4)):
            self.input(lengths)
        for step in steps:
            self.draws = Draws(step)
            self.step()
        self.draws = Draws(head[24:])
        self.outputs()

    def input(self, lengths: Sequence[Size]) -> None:
        rank = self.draws.choice((2, 1, 2, 3, 0))
        shape = tuple(1 if self.draws.chance(12) else self.draws.choice(lengths) for _ in range(rank))
        strides = contiguous_strides(shape)
        layout = self.draws.choice(("dense", "dense", "dense", "turned", "gaps", "repeated"))
        if layout == "turned":
            strides = contiguous_strides(shape[::-1])[::-1]
        elif layout == "gaps" and rank > 1:
            strides = contiguous_strides((*shape[:-1], shape[-1] + 2))
        elif layout == "repeated" and rank and shape[-1] != 0:
            strides = (*strides[:-1], 0)
        value = self.graph.add_input(TensorType(self.draws.choice(_DTYPES), shape, strides), "x")
        self.keep(value, exact=True)

    def outputs(self) -> None:
        """Some of what nobody reads, and now and then anything else: inputs, views of them, the same twice."""
        fresh = [v for v in reversed(self.values) if v not in self.stale]
        unread = [v for v in fresh if not v.users] or fresh
        chosen = unread[: 1 + self.draws.choice((0, 1, 2, 3, 6))]
        chosen += [self.draws.choice(fresh) for _ in range(self.draws.choice((0, 0, 1, 2)))]
        # What an opaque call returns keeps the strides that it comes with.
        turned = [self.draws.chance(20) and not _is_of_opaque(v) for v in chosen]
        self.graph.set_outputs(
            chosen, [self.promised(v.tensor) if t else v.type for v, t in zip(chosen, turned, strict=True)]
        )

    def promised(self, type: TensorType) -> TensorType:
        """Another layout, as eager may have it."""
        return TensorType(type.dtype, type.shape, contiguous_strides(type.shape[::-1])[::-1])

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        kinds = (
            self.binary, self.unary, self.reduce, self.view, self.view, self.cast, self.compare, self.choose,
            self.contract, self.concat, self.integer, self.divide, self.look_up, self.write, self.write_rows,
            self.source, self.hard, self.opaque, self.binary, self.convolve, self.packed,
            self.bytes, self.bits,
        )  # fmt: skip
        try:
            self.draws.choice(kinds)()
        except GraphError:  # sizes with symbols may not fit though their numbers would
            pass

    def binary(self) -> None:
        if not (x := self.pick(lambda v: v.dtype.is_float)):
            return
        op = self.draws.choice(("add", "mul", "sub", "maximum", "minimum", "div"))
        y = self.partner(x, exact=op == "div")
        # Not even a maximum is exact: it may give a zero of either sign.
        self.add(op, [y, x] if op != "div" and self.draws.chance(30) else [x, y], False)

    def unary(self) -> None:
        if x := self.pick(lambda v: v.dtype.is_float):
            op = self.draws.choice((*_SMOOTH, "neg", "abs"))
            self.add(op, [x], None if op in _EXACT else False)

    def hard(self) -> None:
        if x := self.pick(lambda v: v.dtype.is_float and v in self.exact):
            op = self.draws.choice((*_OF_EXACT, "pow", "atan2", "floor_divide", "remainder", "fmod"))
            operands = [x] if op in _OF_EXACT else [x, self.partner(x, exact=True)]
            self.add(op, operands, op in (*_EXACT, "fmod"))

    def compare(self) -> None:
        if not (x := self.pick(lambda v: v in self.exact)):
            return
        if x.dtype.is_float and self.draws.chance(25):
            self.add(self.draws.choice(("isnan", "isinf")), [x])
        else:
            self.add(self.draws.choice(_COMPARISONS), [x, self.partner(x, exact=True)])

    def integer(self) -> None:
        if not (x := self.pick(lambda v: not v.dtype.is_float)):
            return
        if self.draws.chance(20):
            self.add(self.draws.choice(("not",) if x.dtype == BOOL else ("neg", "abs", "sign", "not")), [x])
        else:
            self.add(self.draws.choice(_INTEGER[5:] if x.dtype == BOOL else _INTEGER), [x, self.partner(x)])

    def divide(self) -> None:
        """By numbers other than 0 and -1, which eager raises or traps for; shifts within the width."""
        if not (x := self.pick(lambda v: v.dtype.kind == "int")):
            return
        op = self.draws.choice(("floor_divide", "remainder", "fmod", "shift_left", "shift_right", "pow"))
        numbers = (0, 1, 3, 7) if op in ("shift_left", "shift_right", "pow") else (1, 2, 3, 7)
        number = self.draws.choice(numbers)
        signed = op in ("floor_divide", "remainder", "fmod") and x.dtype != U8 and self.draws.chance(30)
        self.add(op, [x, self.number(-number - 1 if signed else number, x.dtype)])

    def choose(self) -> None:
        if not (c := self.pick(lambda v: v.dtype == BOOL)):
            return
        if x := self.pick(lambda v: self.broadcast_fits(c, v)):
            y = self.partner(x)
            if self.broadcast_fits(c, x, y):
                self.add("where", [c, x, y] if self.draws.chance(50) else [c, y, x])

    def cast(self) -> None:
        if not (x := self.pick()):
            return
        dtype = self.draws.choice((F32, BF16, F16, F64, I64, I32, I16, I8, U8, BOOL))
        if x.dtype.is_float and not dtype.is_float:
            if x not in self.exact:
                return
            if dtype != BOOL:
                x = self.representable(x, dtype)
        elif x.dtype == I64 and dtype in (F32, BF16):
            # Whether a sum of products overflows must not depend on its order.
            x = self.add("minimum", [self.add("maximum", [x, self.number(-_FAR, I64)]), self.number(_FAR, I64)])
        self.add("cast", [x], dtype=dtype)

    def representable(self, x: Value, dtype: DType) -> Value:
        """Floats that an integer type holds: what eager makes of others is not defined."""
        x = self.add("where", [self.add("isnan", [x]), self.number(0.0, x.dtype), x])
        least = self.number(0.0 if dtype == U8 else -100.0, x.dtype)
        return self.add("minimum", [self.add("maximum", [x, least]), self.number(100.0, x.dtype)])

    def reduce(self) -> None:
        if not (x := self.pick(lambda v: v.tensor.rank > 0)):
            return
        op = self.draws.choice(("max", "min") if x.dtype == BOOL else ("sum", "max", "min", "prod"))
        rank = x.tensor.rank
        dims = tuple(d for d in range(-rank, 0) if d == -1 - self.draws.below(rank) or self.draws.chance(30))
        if not dims or (op in ("max", "min") and any(x.shape[d] == 0 for d in dims)):
            return
        exact = x in self.exact and not x.dtype.is_float
        found = self.add(op, [x], exact, dims=dims)
        if self.draws.chance(50):
            kept = tuple(n for d, n in enumerate(x.shape) if d - rank not in dims)
            self.add("reshape", [found], shape=kept)

    def source(self) -> None:
        known = any(
            v.type.expr if isinstance(v.type, ScalarType) else any(not isinstance(n, int) for n in v.shape)
            for v in self.graph.inputs
        )
        n = self.draws.choice(_LENGTHS if known else _LENGTHS[:-2])
        if self.draws.chance(25):
            shape = (n, self.draws.choice(_LENGTHS[:-2]))
            if self.small(shape):
                self.add("full", [], True, shape=shape, dtype=self.draws.choice((F32, I64, BF16)), value=2)
        elif self.draws.chance(30):
            self.add("size", [], True, expr=n * 2 + 1, dtype=I64)
        else:
            self.add("iota", [], True, size=n, dtype=self.draws.choice((I64, I32, F32)))

    def opaque(self) -> None:
        if x := self.pick(lambda v: v.dtype == F32 and v.tensor.rank > 0):
            attributes = {
                "target": "aten.softmax.int",
                "args": (("%", 0), -1),
                "kwargs": (),
                "operand_types": (x.type,),
            }
            types = [x.tensor.with_shape(x.shape)]
            self.keep(self.graph.add_node("opaque", [x], attributes, types=types).result, False)

    # -- products -----------------------------------------------------------------------------------------------

    def contract(self) -> None:
        """Each letter that both have is summed or, now and then, kept; the result's letters come in some order."""
        x = self.pick(lambda v: v.dtype.is_float and 0 < v.tensor.rank < 4)
        y = x and self.pick(lambda v: v.dtype == x.dtype and 0 < v.tensor.rank < 4)
        if not x or not y:
            return
        left = "abcd"[: x.tensor.rank]
        free, right = list(left), ""
        for i, n in enumerate(y.shape):
            shared = [letter for letter in free if same_size(x.shape[left.index(letter)], n)]
            letter = self.draws.choice(shared) if shared and not self.draws.chance(30) else "wxyz"[i]
            free = [other for other in free if other != letter]
            right += letter
        sizes = dict(zip(left + right, (*x.shape, *y.shape), strict=True))
        both = [letter for letter in left if letter in right]
        summed = [letter for i, letter in enumerate(both) if i == 0 or self.draws.chance(40)]
        kept = [letter for letter in dict.fromkeys(left + right) if letter not in summed]
        out = self.draws.shuffled(kept) if self.draws.chance(40) else kept
        if self.small(tuple(sizes[letter] for letter in out)):
            self.add("contraction", [x, y], False, spec=f"{left},{right}->{''.join(out)}")

    def convolve(self) -> None:
        fitting = [v for v in self.values if v not in self.stale and v.dtype == F32 and v.tensor.rank == 3]
        fitting = [v for v in fitting if all(isinstance(n, int) and n for n in v.shape)]
        if x := self.pick(lambda v: v in fitting):
            channels, length = x.shape[1:]
            if w := self.pick(lambda v: v in fitting and v.shape[1] == channels and v.shape[2] <= length):
                stride, padding = 1 + self.draws.below(2), self.draws.below(2)
                # Whether padding times infinity is NaN depends on the algorithm that torch chooses.
                operands = [self.representable(v, F32) for v in (x, w)]
                self.add("convolution", operands, False, stride=(stride,), padding=(padding,), dilation=(1,), groups=1)


def _is_of_opaque(value: Value) -> bool:
    root = base(value).producer
    return root is not None and root.is_op("opaque")
