"""The tile program: a kernel as grid, loops, loads, stores and arithmetic on tiles, independent of its text.

A *tile* is a run of elements along the axis of the enclosing tile loop: a vector register in C++, a block in
Triton. A name whose definition does not depend on that axis is a scalar, the same for all lanes; arithmetic
on a scalar and a tile broadcasts. Tile loops may nest where the target has blocks (Triton): a name is then a tile
over those axes that its definition depends on, and an accumulator over those of what it takes in.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import sympy

from fusec.codegen.tile.configuration import KernelConfig
from fusec.ir.graph import Source
from fusec.ir.types import DType, Size


def index_symbol(name: str) -> sympy.Symbol:
    """What stands for an index in an expression: of a loop, a block or a dynamic index."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


PARTS = sympy.Symbol("parts", integer=True, positive=True)
"""How many threads share the iterations of a grid: a grid of so many has one for each (C++)."""


@dataclass(frozen=True)
class Buffer:
    """Memory that a kernel sees through a pointer."""

    name: str
    dtype: DType
    numel: Size
    """Elements from the pointer to the end of what is touched."""
    role: Literal["input", "output", "update", "scratch", "shared"]
    """``update`` is read and written in place. ``scratch`` is private to one iteration of the grid (C++ only), and
    ``shared`` is seen by all, and by what comes after the grid."""
    packed: int = 0
    """Rows of the blocks in which a matrix lies, each transposed, the last one shorter: lanes that run along the
    columns of a product find them side by side. 0 where it lies as its type says (C++)."""


@dataclass(frozen=True, eq=False)
class Constant:
    """A literal operand, in full precision; the operation that uses it rounds it to its own compute type."""

    value: float | int | bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and repr(self.value) == repr(other.value)  # 0.0 is not -0.0

    def __hash__(self) -> int:
        return hash(repr(self.value))


Operand: TypeAlias = str | Constant
"""A name defined earlier, or a literal."""

LoopKind: TypeAlias = Literal["grid", "dynamic", "serial", "tile"]


@dataclass(frozen=True)
class Descriptor:
    """What a chip that copies blocks by itself is told of memory: how many elements lie how far apart along each dim.

    Dims go from the farthest apart to the innermost. Beyond the ends there are zeros.
    """

    start: int
    """Elements ahead of the first."""
    axes: tuple[str, ...]
    """The tile axes that a block is over, in the order in which it lies in memory."""
    offsets: tuple[sympy.Expr, ...]
    """Where a block begins along each dim, in terms of where tiles begin."""
    block: tuple[int, ...]
    """Elements of a block along each dim."""
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]


class Statement:
    """One statement. Class variables name the fields that hold what analyses ask of every statement."""

    OPERANDS: ClassVar[tuple[str, ...]] = ()
    INDICES: ClassVar[tuple[str, ...]] = ()
    LOADED: ClassVar[tuple[str, ...]] = ()
    STORED: ClassVar[tuple[str, ...]] = ()
    RESULT: ClassVar[tuple[str, ...]] = ()
    BODY: ClassVar[tuple[str, ...]] = ()

    def _values(self, fields: tuple[str, ...]) -> Iterator[Any]:
        for value in (getattr(self, name) for name in fields):
            yield from value if isinstance(value, tuple) else (value,)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names among its operands."""
        return tuple(operand for operand in self._values(self.OPERANDS) if isinstance(operand, str))

    @property
    def indices(self) -> tuple[sympy.Expr, ...]:
        """The expressions over axes that decide what is loaded, stored or computed."""
        return tuple(self._values(self.INDICES))

    @property
    def result(self) -> str:
        """The name that it defines, or of the accumulator that it changes; empty where there is none."""
        return next(self._values(self.RESULT), "")

    @property
    def loads(self) -> tuple[str, ...]:
        """The buffers that it reads."""
        return tuple(m.buffer if isinstance(m, Matrix) else m for m in self._values(self.LOADED))

    @property
    def stores(self) -> tuple[str, ...]:
        """The buffers that it writes."""
        return tuple(m.buffer if isinstance(m, Matrix) else m for m in self._values(self.STORED))

    @property
    def children(self) -> "tuple[Statement, ...]":
        """The statements inside."""
        return tuple(self._values(self.BODY))


@dataclass(frozen=True)
class Definition(Statement):
    """A statement that defines a name."""

    RESULT = ("dst",)
    dst: str


@dataclass(frozen=True)
class Accumulation(Statement):
    """A statement that changes an accumulator."""

    RESULT = ("acc",)
    acc: str


@dataclass(frozen=True)
class Load(Definition):
    """``dst = buffer[offset]``; a tile where ``offset`` mentions the tile axis, whose coefficient is the lane stride.

    It arrives in its compute type: half types as f32, all others as they are.
    """

    INDICES, LOADED = ("offset",), ("buffer",)
    buffer: str
    offset: sympy.Expr
    """In elements, affine in loop axes, size symbols and clamped indices."""
    descriptor: Descriptor | None = None
    """What tells of all that it loads, where it may come so (Triton)."""


@dataclass(frozen=True)
class Compute(Definition):
    """``dst = op(operands)``, one pointwise operation of ``fusec.ir.ops``, carried out in ``dtype``.

    Besides, there are ``fma`` and, on GPUs, ``exp_of_weight``: e^x of what is at most 0, off by more the less it is.
    For ``cast``, ``dtype`` is the compute type of the result, and ``rounds_to`` the element type it rounds to.
    Comparisons carry the dtype of their operands and define a bool.
    """

    OPERANDS = ("operands",)
    op: str
    operands: tuple[Operand, ...]
    dtype: DType
    rounds_to: DType | None = None


@dataclass(frozen=True)
class Index(Definition):
    """``dst`` = the value of an affine expression of axes and symbols, as i64; a tile if it mentions the tile axis."""

    INDICES = ("value",)
    value: sympy.Expr


@dataclass(frozen=True)
class Init(Definition):
    """Declare an accumulator, filled with the identity of ``op``; a tile accumulator has one partial result a lane."""

    op: str
    """``sum``, ``prod``, ``max`` or ``min``."""
    dtype: DType
    tile: bool


@dataclass(frozen=True)
class Update(Accumulation):
    """``acc = op(acc, value)``; two values for ``sum`` mean ``acc += value[0]·value[1]``.

    Lanes beyond the end do nothing.
    """

    OPERANDS = ("values",)
    op: str
    values: tuple[Operand, ...]


@dataclass(frozen=True)
class Assign(Accumulation):
    """``acc = value``: an accumulator set to what was computed from it (Triton)."""

    OPERANDS = ("value",)
    value: str


@dataclass(frozen=True)
class Fold(Definition):
    """``dst`` = the lanes of the tile ``src`` reduced to a scalar with ``op``; lanes beyond the end do not count."""

    OPERANDS = ("src",)
    op: str
    src: str
    dtype: DType
    axis: str = ""
    """The axis whose lanes are folded, of those in this tile alone; empty for the only axis, and all of it."""


@dataclass(frozen=True)
class DotTiles(Accumulation):
    """``acc += Σ left·right`` over the lanes of ``axis``, of two tiles that are at hand (Triton).

    Where either spans one more axis it is a product of matrices. Lanes beyond the end do not count.
    """

    OPERANDS = ("left", "right")
    left: str
    right: str
    axis: str
    dtype: DType
    """What both operands are rounded to: the type that is multiplied. Sums have the accumulator's."""


@dataclass(frozen=True)
class Matrix:
    """A matrix in a buffer: where it starts, and what a step down and a step right add, in elements."""

    buffer: str
    offset: sympy.Expr
    row_stride: Size
    column_stride: Size


@dataclass(frozen=True)
class Dot(Statement):
    """``target[m, n] = Σ_k left[m, k] · right[k, n]``: one block of a matrix product, summed in the target's type."""

    LOADED, STORED = ("left", "right"), ("target",)
    target: Matrix
    left: Matrix
    right: Matrix
    rows: Size
    columns: Size
    depth: Size
    adds: bool = False
    """Whether the sums are added to the target."""


@dataclass(frozen=True)
class Store(Statement):
    """``buffer[offset] = value``, rounded to the buffer's element type."""

    OPERANDS, INDICES, STORED = ("value",), ("offset",), ("buffer",)
    buffer: str
    offset: sympy.Expr
    value: Operand


@dataclass(frozen=True)
class Check(Statement):
    """Unless ``0 <= value < length`` the kernel ends here and reports the check's number and the value.

    On a CPU checks come before the grid: a kernel that has anything to report has not stored anything. On a GPU each
    comes right before its index is used, and ends the program with the device's assertion, as those of eager's kernels
    do.
    """

    OPERANDS = ("value",)
    value: Operand
    length: Size
    number: int


@dataclass(frozen=True)
class ClampIndex(Definition):
    """``dst`` = an integer ``value`` as i64, clamped to ``0 <= dst < length``, for use in offsets.

    A check reports a value that is out of range. It may have computed the value in another loop, where floats are
    rounded differently, so the index that is used is clamped as well: no access leaves the tensor.
    """

    OPERANDS = ("value",)
    value: Operand
    length: Size


@dataclass(frozen=True)
class Loop(Statement):
    """``for axis in start … stop``, which are affine in outer axes and symbols, or integers defined before.

    ``grid`` iterations are independent and run in parallel (threads of a team, Triton programs); grid loops are the
    outermost and nest perfectly; other statements (C++), or another grid (Triton), may follow them, which see what was
    stored. ``dynamic`` iterations, from 0 in steps of 1, are independent as well: the parts of a grid over ``PARTS``
    take each the next one that is left. ``serial`` runs in order. ``tile`` covers the range in tiles of ``step``
    elements, the last one partly filled; inside it names are tiles, and the axis stands for the first element of the
    tile plus the lane.
    """

    BODY = ("body",)
    axis: str
    start: Size
    stop: Size
    step: Size
    """For a tile loop an int: the number of lanes."""
    kind: LoopKind
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class When(Statement):
    """The body runs only where a scalar truth value holds; what it defines is known inside only."""

    OPERANDS, BODY = ("condition",), ("body",)
    condition: str
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Kernel:
    """One launch, or one for each grid."""

    name: str
    """Readable, from the labels of the region: ``add_rms_norm``."""
    kind: Literal["pointwise", "row", "column", "contraction", "attention"]
    buffers: tuple[Buffer, ...]
    """Inputs first, then outputs (in the order of the region's operands and results), then memory of its own."""
    symbols: tuple[str, ...]
    """Names of the sizes that it takes as 64-bit integers."""
    body: tuple[Statement, ...]
    work: Size = 0
    """Scalar operations of one launch, about: what decides whether threads pay."""
    formula: str = ""
    """What it computes, for the comment at its head."""
    sources: tuple[Source, ...] = ()
    config: KernelConfig = field(default_factory=KernelConfig)
    """What its schedule was left free to choose (Triton)."""

    @property
    def given(self) -> tuple[Buffer, ...]:
        """The buffers that a launch on a GPU is given: all but memory that its grids share."""
        return tuple(buffer for buffer in self.buffers if buffer.role != "shared")


MAX_CHECKS = 255
"""Different checks in one kernel: the number of one that fails comes with its value, in 64 bits together."""


def walk(body: Iterable[Statement]) -> Iterator[Statement]:
    """All statements, outer before inner, in order."""
    for statement in body:
        yield statement
        yield from walk(statement.children)
