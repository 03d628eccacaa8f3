"""Schedule of long reductions to few numbers on a GPU: each part of what is reduced has programs of its own.

Rows alone would keep few processors busy, and a sum over everything only one. A second grid joins the parts, always in
the same order, and does whatever follows.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fusec.analysis.affine import Affine, Axis
from fusec.analysis.indexing import Located, Nest, stride
from fusec.analysis.kinds import Shape
from fusec.codegen.choice import Choice
from fusec.codegen.kernel import Buffer, Fold, Init, Load, Operand, Statement, Store, Update, index_symbol
from fusec.codegen.schedule.emitter import Emitter, block_range, grid, part_range
from fusec.codegen.schedule.products import power_of_two
from fusec.ir.types import BOOL, DType, Size, TensorType, accumulation, contiguous_strides, product

_JOINED = 4096
"""Elements of a block of parts that are joined."""
_BLOCK, _PART = index_symbol("block"), index_symbol("part")


def may_split(nest: Nest, shape: Shape) -> bool:
    """Whether all that a region makes follows from reductions over the same axes, of sizes that are known."""
    if shape.kind != "row":
        return False
    first, rows = shape.reductions[0], frozenset(shape.rows)
    alike = all(r.bound == first.bound and r.depth == first.depth and r.dtype != BOOL for r in shape.reductions)
    whole = all(o.axes == rows and o.destination is None for o in nest.outputs)
    return alike and whole and all(isinstance(a.size, int) for a in (*shape.rows, *first.bound))


def side_by_side(nest: Nest, shape: Shape) -> bool:
    """Whether what is reduced lies side by side, and not the rows."""
    bound = shape.reductions[0].bound
    return any(stride(i, axis) == 1 for i in nest.walk() if i.kind == "load" for axis in bound)


def schedule_split_reductions(emitter: Emitter, nest: Nest, shape: Shape, choice: Choice) -> tuple[Statement, ...]:
    """The body of a kernel for a region that ``may_split``: one grid for parts, one for what follows."""
    return _Split(emitter, nest, shape, choice).run()


class _Split:
    def __init__(self, emitter: Emitter, nest: Nest, shape: Shape, choice: Choice) -> None:
        self.emitter, self.nest, self.shape, self.choice = emitter, nest, shape, choice
        self.count = product(tuple(axis.size for axis in shape.rows))
        self.parts: dict[Located, Buffer] = {}
        """Where the results of each part lie, all of one reduction in a row."""

    def run(self) -> tuple[Statement, ...]:
        """The statements of the whole kernel."""
        blocks = (_BLOCK.name, -(-self.count // self.choice.rows))
        with self._rows():
            self._store_parts()
        first = grid(self.emitter.take(), [blocks, (_PART.name, self.choice.splits)])
        with self._rows():
            self._join_parts()
            for output in self.nest.outputs:
                self.emitter.store(output)
        return (*first, *grid(self.emitter.take(), [blocks]))

    def _rows(self) -> AbstractContextManager[None]:
        """The rows of one program."""
        if not self.shape.rows:
            return nullcontext()
        rows = self.choice.rows
        return self.emitter.tile(self.shape.rows, rows, *block_range(_BLOCK * rows, rows, self.count))

    def _store_parts(self) -> None:
        bound = self.shape.reductions[0].bound
        length, depth = product(tuple(axis.size for axis in bound)), self.choice.depth
        with self._reduced(bound, depth, *part_range(_PART, self.choice.splits, depth, length)) as values:
            values |= {r: self.emitter.emit(r.operands[0]) for r in self.shape.reductions}
        for r in self.shape.reductions:
            numel = self.count * self.choice.splits
            self.parts[r] = buffer = self.emitter.add_scratch(accumulation(r.dtype), numel, "parts", "shared")
            self.emitter.inner.append(Store(buffer.name, self._place(_PART * self.count), self.emitter.emit(r)))

    def _join_parts(self) -> None:
        part = Axis(self.choice.splits)
        with self._reduced((part,), min(power_of_two(self.choice.splits), _JOINED // self.choice.rows)) as values:
            for r in self.shape.reductions:
                values[r] = name = self.emitter.fresh()
                offset = self._place(self.emitter.axis_symbol(part) * self.count)
                self.emitter.inner.append(Load(name, self.parts[r].name, offset))

    @contextmanager
    def _reduced(
        self, axes: tuple[Axis, ...], depth: int, start: Size = 0, stop: Size | None = None
    ) -> Iterator[dict[Located, Operand]]:
        """Tiles over some axes; what is said within to be the value of each reduction there is reduced."""
        emitter, values = self.emitter, dict[Located, Operand]()
        names = {r: emitter.fresh("acc") for r in self.shape.reductions}
        emitter.inner.extend(Init(name, r.node.op.name, self._type(r), True) for r, name in names.items())
        with emitter.tile(axes, depth, start, stop):
            yield values
            emitter.inner.extend(Update(name, r.node.op.name, (values[r],)) for r, name in names.items())
        axis = emitter.axis_name(emitter.joint(axes))
        for r, name in names.items():
            total = emitter.fresh("r")
            emitter.inner.append(Fold(total, r.node.op.name, name, self._type(r), axis))
            emitter.define(r, total)

    def _type(self, reduction: Located) -> DType:
        return accumulation(reduction.dtype)

    def _place(self, first: Size) -> Size:
        """Where a result lies among those of its part, which begin at ``first``."""
        sizes = tuple(axis.size for axis in self.shape.rows)
        type = TensorType(BOOL, sizes, contiguous_strides(sizes))
        return first + self.emitter.offset(tuple(Affine.of([(axis, 1)]) for axis in self.shape.rows), type)
