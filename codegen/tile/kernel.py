"""The tile program: a kernel as grid, loops, loads, stores and arithmetic on tiles, independent of its text.

A *tile* is a run of elements along the axis of the enclosing tile loop: a vector register in C++, a block in
Triton. A name whose definition does not depend on that axis is a scalar, the same for all lanes; arithmetic
on a scalar and a tile broadcasts. Tile loops may nest where the target has blocks (Triton): a name is then a tile
over those axes that its definition depends on, and an accumulator over those of its updates.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import sympy

from fusec.codegen.tile.configuration import KernelConfig
from fusec.ir.graph import Source
from fusec.ir.types import I64, DType, Size


def index_symbol(name: str) -> sympy.Symbol:
    """Return the symbol of an index in expressions: of a loop, a block or a dynamic index."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


PARTS = sympy.Symbol("parts", integer=True, positive=True)
"""The number of threads that share the iterations of a grid; a grid of this size has one for each (C++)."""


@dataclass(frozen=True)
class Buffer:
    """Memory that a kernel sees through a pointer."""

    name: str
    dtype: DType
    numel: Size
    """Elements from the pointer to the end of the accessed range."""
    role: Literal["input", "output", "update", "scratch", "shared"]
    """``update`` is read and written in place. ``scratch`` is private to one iteration of the grid (C++ only), and
    ``shared`` is visible to all, and after the grid."""
    packed: int = 0
    """Rows of the transposed blocks in which a weight is prepacked, the last one shorter: lanes along the columns of a
    product then load contiguously. 0 for the layout of its type (C++)."""


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
    """A tensor descriptor: sizes and strides of memory for hardware that copies blocks.

    Dims are ordered by stride, largest first. Elements beyond the ends read as zero.
    """

    start: int
    """Offset of the first element."""
    axes: tuple[str, ...]
    """The tile axes of a block, in the order of memory."""
    offsets: tuple[sympy.Expr, ...]
    """Offset of a block along each dim, in terms of the starts of tiles."""
    block: tuple[int, ...]
    """Elements of a block along each dim."""
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]


class Statement:
    """A statement. Class variables name the fields behind its properties, which analyses of all statements use."""

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
        """The offsets of its loads and stores, or the index that it computes."""
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

    The result has the compute type: f32 for half types, else the type in memory.
    """

    INDICES, LOADED = ("offset",), ("buffer",)
    buffer: str
    offset: sympy.Expr
    """In elements, affine in loop axes, size symbols and clamped indices."""
    descriptor: Descriptor | None = None
    """For a load that may be made by tensor descriptor (Triton)."""


@dataclass(frozen=True)
class Compute(Definition):
    """``dst = op(operands)``, one pointwise operation of ``fusec.ir.ops``, computed in ``dtype``.

    Besides, there are ``fma`` and, on GPUs, ``exp_of_weight``: e^x for x at most 0, whose error grows with -x.
    For ``cast``, ``dtype`` is the compute type of the result, and ``rounds_to`` the dtype it rounds to; for
    ``bitcast``, ``rounds_to`` is the dtype whose bits are read.
    Comparisons carry the dtype of their operands and define a bool.
    """

    OPERANDS = ("operands",)
    op: str
    operands: tuple[Operand, ...]
    dtype: DType
    rounds_to: DType | None = None


@dataclass(frozen=True)
class Index(Definition):
    """``dst`` = the value of an affine expression of axes and symbols; a tile if it mentions the tile axis."""

    INDICES = ("value",)
    value: sympy.Expr
    dtype: DType = I64
    """I32 for entries of tables."""


@dataclass(frozen=True)
class Init(Definition):
    """Declare an accumulator, filled with the identity of ``op``; a tile accumulator has one partial result a lane."""

    op: str
    """``sum``, ``prod``, ``max`` or ``min``."""
    dtype: DType
    tile: bool


@dataclass(frozen=True)
class Update(Accumulation):
    """``acc = op(acc, value)``; two values mean ``acc += value[0]·value[1]``. Lanes beyond the end do nothing."""

    OPERANDS = ("values",)
    op: str
    values: tuple[Operand, ...]


@dataclass(frozen=True)
class Assign(Accumulation):
    """``acc = value``: replace an accumulator by a value computed from it (Triton)."""

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
    """The axis whose lanes are folded, within the current tile; empty for the only axis, over its whole range."""


@dataclass(frozen=True)
class Scan(Definition):
    """``dst`` = ``acc``, after ``value`` is folded into it with ``op``, one element after another along an axis.

    Lanes beyond the end do nothing.
    """

    OPERANDS = ("value", "acc")
    op: str
    value: Operand
    acc: str
    axis: str
    dtype: DType


@dataclass(frozen=True)
class Sort(Statement):
    """``order`` = the places of the first ``count`` of ``length`` keys in order; ``values`` = these keys (C++).

    Equal keys keep their order. Largest first if ``descending``; NaN is the largest.
    """

    LOADED, STORED = ("keys",), ("order", "values", "memory")
    order: str
    values: str
    keys: str
    memory: str
    """Room for each key and its place, twice."""
    length: Size
    count: Size
    descending: bool


@dataclass(frozen=True)
class DotTiles(Accumulation):
    """``acc += Σ left·right`` over the lanes of ``axis``, of two tiles (Triton).

    Where each spans one more axis it is a matrix product. Lanes beyond the end do not count.
    """

    OPERANDS = ("left", "right")
    left: str
    right: str
    axis: str
    dtype: DType
    """The type that both operands are rounded to and multiplied in. Sums have the accumulator's."""


@dataclass(frozen=True)
class Matrix:
    """A matrix in a buffer: the offset of its first element, and its strides, in elements."""

    buffer: str
    offset: sympy.Expr
    row_stride: Size
    column_stride: Size


@dataclass(frozen=True)
class Dot(Statement):
    """``target[m, n] = Σ_k left[m, k] · right[k, n]``: one block of a matrix product, summed in the target's type."""

    LOADED, STORED = ("left", "right", "listed"), ("target",)
    target: Matrix
    left: Matrix
    right: Matrix
    rows: Size
    columns: Size
    depth: Size
    adds: bool = False
    """Add the sums to the target."""
    any_rows: bool = False
    """Few rows are as likely as many; which, is known only at run time (C++)."""
    listed: tuple[str, ...] = ()
    """A buffer that lists the numbers of the right operand's rows in memory, and of some rows more (C++)."""


@dataclass(frozen=True)
class Store(Statement):
    """``buffer[offset] = value``, rounded to the buffer's dtype."""

    OPERANDS, INDICES, STORED = ("value",), ("offset",), ("buffer",)
    buffer: str
    offset: sympy.Expr
    value: Operand


@dataclass(frozen=True)
class Combine(Statement):
    """``buffer[offset] = op(buffer[offset], value)``; in C++ lanes for one place come one after another."""

    OPERANDS, INDICES, LOADED, STORED = ("value",), ("offset",), ("buffer",), ("buffer",)
    op: str
    buffer: str
    offset: sympy.Expr
    value: Operand


@dataclass(frozen=True)
class Prefetch(Statement):
    """Prefetch the cache line of ``buffer[offset]``, which a later iteration loads; it may lie beyond the end (C++)."""

    INDICES, LOADED = ("offset",), ("buffer",)
    buffer: str
    offset: sympy.Expr


@dataclass(frozen=True)
class Check(Statement):
    """Unless ``0 <= value < length``, end the kernel and report the check's number and the value.

    On a CPU checks come before the grid: a kernel that reports an index has stored nothing. On a GPU each comes right
    before the use of its index and is a device assertion, as in eager's kernels.
    """

    OPERANDS = ("value",)
    value: Operand
    length: Size
    number: int


@dataclass(frozen=True)
class ClampIndex(Definition):
    """``dst`` = an integer ``value`` as i64, clamped to ``0 <= dst < length``, for use in offsets.

    A check reports a value out of range. It may have computed the value in another loop, where floats round
    differently, so the index is clamped as well: no access leaves the tensor.
    """

    OPERANDS = ("value",)
    value: Operand
    length: Size
    bounded: bool = False
    """The value is proven to be in range: there is no check, and nothing to clamp."""


@dataclass(frozen=True)
class Loop(Statement):
    """``for axis in start … stop``; both are affine in outer axes and symbols, or integers defined before.

    ``grid`` iterations are independent and run in parallel (threads of a team, Triton programs); grid loops are the
    outermost and nest perfectly; other statements (C++), or another grid (Triton), may follow them and see their
    stores. ``dynamic`` iterations, from 0 in steps of 1, are independent as well: each part of a grid over ``PARTS``
    takes the next one that is left. ``serial`` runs in order. ``tile`` covers the range in tiles of ``step`` elements,
    the last one partly filled; inside it names are tiles, and the axis is the first element of the tile plus the lane.
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
class ComputedDot(Statement):
    """``target[m, n] = Σ_i Σ_k lefts[i][m, k] · values[i][k, n]``: a block whose right operand is computed (C++)."""

    OPERANDS: ClassVar[tuple[str, ...]] = ("values",)
    STORED: ClassVar[tuple[str, ...]] = ("target",)
    LOADED, BODY = ("lefts",), ("right",)
    target: Matrix
    lefts: tuple[Matrix, ...]
    """One for each segment of k; contiguous along it where ``any_rows`` or ``paired``."""
    right: Loop
    """The loop over the columns of the block; in it one over the outer steps of k, if there are any, and a tile loop
    over the inner ones."""
    values: tuple[str, ...]
    """Tiles of the right operand, one for each segment."""
    rows: Size
    steps: tuple[sympy.Expr, ...] = ()
    """Offset of each left operand at an outer step of k, where these do not follow one another in memory."""
    any_rows: bool = False
    """True if only the run time shows how many rows there are, few or many."""
    paired: bool = False
    """True if tiles are pairs of bfloat16, of which whole ones fill the inner steps; so are the lefts then."""


@dataclass(frozen=True)
class GroupedDot(ComputedDot):
    """``target[m, n] = Σ_o scale[o, n] · Σ_i Σ_k lefts[i][m, k] · (values[i][k, n] - zero[o, n])`` of few rows (C++).

    Lefts are int8, values int8 or uint8; within an outer step ``o`` of k they are summed in 32 bits.
    """

    OPERANDS = ("values", "scale", "zero")
    STORED = ("target", "totals")
    scale: str = ""
    zero: str = ""
    bounds: tuple[int, int] = (0, 0)
    """The least and the greatest value."""
    totals: str = ""
    """Memory for eight integers of each row and outer step: sums of the lefts."""


@dataclass(frozen=True)
class ColumnDot(ComputedDot):
    """A ``ComputedDot`` of few rows whose lanes are columns.

    ``right`` is the loop over the outer steps of k, if there are any; in it a tile loop over the columns of the block,
    and in that a loop over the inner steps.
    """

    adds: bool = False
    """Add the sums to the target."""


@dataclass(frozen=True)
class TableLookup(Definition):
    """``dst = values[index]``: a look-up in a table that registers hold (C++), modulo its size where it fills them."""

    OPERANDS, BODY = ("index", "value"), ("entries",)
    index: str
    """A tile of the enclosing loop: of 32-bit integers, or of bytes."""
    entries: Loop
    """A tile loop over the entries: one tile, or two."""
    value: str
    """The tile of its body that is the table, or one half of it."""
    shift: int | None = None
    """The first of the four bits of each byte by which a table of sixteen is read as bfloat16; else None."""


@dataclass(frozen=True)
class When(Statement):
    """Run the body if a scalar condition holds; names defined inside are visible there only."""

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
    """Approximate scalar operations of one launch: they decide whether to use threads."""
    checks: int | None = 0
    """Statements at its beginning that check dynamic indices (C++); None where an earlier kernel has checked them."""
    formula: str = ""
    """The computation, for the comment at its head."""
    sources: tuple[Source, ...] = ()
    config: KernelConfig = field(default_factory=KernelConfig)
    """The choices of its schedule (Triton)."""
    numbers: tuple[int, ...] = ()
    """Values of further symbols of the code that it shares with other kernels; see ``sharing.py``."""
    origins: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """For each name the operation of the region's body that it belongs to; see ``origins.py``."""

    @property
    def given(self) -> tuple[Buffer, ...]:
        """The buffers that a launch on a GPU takes: all but those that its grids share."""
        return tuple(buffer for buffer in self.buffers if buffer.role != "shared")


MAX_CHECKS = 255
"""The most checks in one kernel: the number of a failed one is returned together with its value, in 64 bits."""


def walk(body: Iterable[Statement]) -> Iterator[Statement]:
    """Yield all statements, outer before inner, in order."""
    for statement in body:
        yield statement
        yield from walk(statement.children)
