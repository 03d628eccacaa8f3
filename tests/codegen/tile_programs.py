"""Kernels written by hand, one for each shape a schedule can give, for the tests of printers and checkers."""

from collections.abc import Sequence

import sympy

from fusec.codegen.tile.kernel import (
    Buffer,
    Compute,
    Constant,
    Fold,
    Index,
    Init,
    Kernel,
    Load,
    Loop,
    Operand,
    Statement,
    Store,
    Update,
    When,
)
from fusec.ir.types import BOOL, F32, I64, DType, Size, symbol

ROW, J, B, G, H = sympy.symbols("i j b g h", integer=True, nonnegative=True)
S = symbol("s0")
"""A symbolic number of rows."""


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def symbols_of(size: Size) -> tuple[str, ...]:
    """Names of the symbols of a size."""
    return () if isinstance(size, int) else tuple(sorted(s.name for s in size.free_symbols))


def pointwise(
    computes: Sequence[Compute],
    dtypes: Sequence[DType],
    size: Size,
    results: Sequence[tuple[str, DType]] = (("y", F32),),
    block: int = 64,
    name: str = "pointwise",
) -> Kernel:
    """Flat arithmetic on inputs a, b, c … over blocks of ``block`` elements."""
    names = "abcdefgh"[: len(dtypes)]
    inputs = tuple(Buffer(n, d, size, "input") for n, d in zip(names, dtypes, strict=True))
    outputs = tuple(Buffer(f"{n}_out", d, size, "output") for n, d in results)
    loads: list[Statement] = [Load(n, n, J) for n in names]
    stores: list[Statement] = [Store(f"{n}_out", J, n) for n, _ in results]
    tile = Loop("j", B, sympy.Min(B + block, size), block, "tile", (*loads, *computes, *stores))
    grid = Loop("b", 0, size, block, "grid", (tile,))
    return Kernel(name, "pointwise", inputs + outputs, symbols_of(size), (grid,))


def one(op: str, operands: Sequence[Operand], dtype: DType, result: DType | None = None, size: Size = 100) -> Kernel:
    """One operation on one to three inputs of the same dtype."""
    names = dict.fromkeys(o for o in operands if isinstance(o, str))
    computes = [Compute("y", op, tuple(operands), dtype)]
    return pointwise(computes, [dtype] * len(names), size, [("y", result or dtype)], name=f"one_{op}")


def softmax(rows: Size, cols: int, dtype: DType = F32, block: int | None = None) -> Kernel:
    """Whole rows if ``block`` is left out, else tiles of that many columns in three passes."""
    at = ROW * cols + J
    block = block or power_of_two(cols)

    def tile(*body: Statement) -> Loop:
        return Loop("j", 0, cols, block, "tile", body)

    body = (
        Init("m", "max", F32, True),
        tile(Load("x", "a", at), Update("m", "max", ("x",))),
        Fold("top", "max", "m", F32),
        Init("s", "sum", F32, True),
        tile(
            Load("x1", "a", at),
            Compute("d", "sub", ("x1", "top"), F32),
            Compute("e", "exp", ("d",), F32),
            Update("s", "sum", ("e",)),
        ),
        Fold("total", "sum", "s", F32),
        tile(
            Load("x2", "a", at),
            Compute("d1", "sub", ("x2", "top"), F32),
            Compute("e1", "exp", ("d1",), F32),
            Compute("y", "div", ("e1", "total"), F32),
            Store("y_out", at, "y"),
        ),
    )
    buffers = (Buffer("a", dtype, rows * cols, "input"), Buffer("y_out", dtype, rows * cols, "output"))
    return Kernel(
        "softmax", "row", buffers, symbols_of(rows), (Loop("i", 0, rows, 1, "grid", body),),
        formula="softmax(a) = e^(a - max a) / Σ e^(a - max a)",
    )  # fmt: skip


def layer_norm(rows: Size, cols: int, dtype: DType = F32, block: int | None = None) -> Kernel:
    """y = (x - mean) rsqrt(var + eps) w + b, with the squares folded by a two-operand update."""
    at = ROW * cols + J
    block = block or power_of_two(cols)
    body = (
        Init("s", "sum", F32, True),
        Loop("j", 0, cols, block, "tile", (Load("x", "a", at), Update("s", "sum", ("x",)))),
        Fold("total", "sum", "s", F32),
        Compute("mean", "div", ("total", Constant(cols)), F32),
        Init("q", "sum", F32, True),
        Loop("j", 0, cols, block, "tile", (
            Load("x1", "a", at), Compute("c", "sub", ("x1", "mean"), F32), Update("q", "sum", ("c", "c")),
        )),
        Fold("square", "sum", "q", F32),
        Compute("var", "div", ("square", Constant(cols)), F32),
        Compute("var_eps", "add", ("var", Constant(1e-5)), F32),
        Compute("r", "rsqrt", ("var_eps",), F32),
        Loop("j", 0, cols, block, "tile", (
            Load("x2", "a", at), Load("w", "w", J), Load("bias", "bias", J),
            Compute("c1", "sub", ("x2", "mean"), F32), Compute("n", "mul", ("c1", "r"), F32),
            Compute("y", "fma", ("n", "w", "bias"), F32), Store("y_out", at, "y"),
        )),
        Store("mean_out", ROW, "mean"),
    )  # fmt: skip
    buffers = (
        Buffer("a", dtype, rows * cols, "input"), Buffer("w", dtype, cols, "input"),
        Buffer("bias", dtype, cols, "input"), Buffer("y_out", dtype, rows * cols, "output"),
        Buffer("mean_out", F32, rows, "output"),
    )  # fmt: skip
    return Kernel(
        "layer_norm", "row", buffers, symbols_of(rows), (Loop("i", 0, rows, 1, "grid", body),),
        formula="(a - mean a) / sqrt(var a + eps) · w + bias",
    )  # fmt: skip


def fold_inside(op: str, cols: int, dtype: DType, result: DType) -> Kernel:
    """One tile for a whole row, reduced where it stands."""
    body = (
        Loop("j", 0, cols, power_of_two(cols), "tile", (Load("x", "a", ROW * cols + J), Fold("r", op, "x", result))),
        Store("y_out", ROW, "r"),
    )
    buffers = (Buffer("a", dtype, 3 * cols, "input"), Buffer("y_out", result, 3, "output"))
    return Kernel(f"fold_{op}", "row", buffers, (), (Loop("i", 0, 3, 1, "grid", body),))


def column_sum(rows: Size, cols: int, block: int = 16) -> Kernel:
    """Sum over the first axis: one lane a column, rows in order."""
    body = (
        Loop("j", B, sympy.Min(B + block, cols), block, "tile", (
            Init("s", "sum", F32, True),
            Loop("i", 0, rows, 1, "serial", (Load("x", "a", ROW * cols + J), Update("s", "sum", ("x",)))),
            Store("y_out", J, "s"),
        )),
    )  # fmt: skip
    buffers = (Buffer("a", F32, rows * cols, "input"), Buffer("y_out", F32, cols, "output"))
    return Kernel("column_sum", "column", buffers, symbols_of(rows), (Loop("b", 0, cols, block, "grid", body),))


def sum_of_chosen(rows: Size, cols: int, block: int = 16) -> Kernel:
    """Sum of the rows that a flag chooses; the others are not read."""
    at = ROW * cols + J
    tile = Loop("j", 0, cols, block, "tile", (Load("x", "a", at), Update("s", "sum", ("x",))))
    body = (
        Init("s", "sum", F32, True), Load("chosen", "flag", ROW), When("chosen", (tile,)),
        Fold("total", "sum", "s", F32), Store("y_out", ROW, "total"),
    )  # fmt: skip
    buffers = (Buffer("a", F32, rows * cols, "input"), Buffer("flag", BOOL, rows, "input"),
               Buffer("y_out", F32, rows, "output"))  # fmt: skip
    return Kernel("sum_of_chosen", "row", buffers, symbols_of(rows), (Loop("i", 0, rows, 1, "grid", body),))


def transpose(rows: int, cols: int) -> Kernel:
    """[rows, 2, cols] to [cols, 2, rows]: two grid axes and a strided load; a second result holds the position."""
    body = (
        Loop("j", 0, rows, power_of_two(rows), "tile", (
            Load("x", "a", J * (2 * cols) + H * cols + G),
            Index("at", J + 10 * G),
            Store("y_out", (G * 2 + H) * rows + J, "x"),
            Store("at_out", (G * 2 + H) * rows + J, "at"),
        )),
    )  # fmt: skip
    n = rows * 2 * cols
    buffers = (Buffer("a", F32, n, "input"), Buffer("y_out", F32, n, "output"), Buffer("at_out", I64, n, "output"))
    grid = Loop("g", 0, cols, 1, "grid", (Loop("h", 0, 2, 1, "grid", body),))
    return Kernel("transpose", "pointwise", buffers, (), (grid,))
