"""Lowering of indexed expressions to statements, each in the outermost loop that binds all it needs."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import sympy

from fusec.codegen.tile.indices import Indices
from fusec.codegen.tile.kernel import (
    MAX_CHECKS,
    Buffer,
    Check,
    ClampIndex,
    Combine,
    Compute,
    Constant,
    Definition,
    Fold,
    Index,
    Init,
    Load,
    Loop,
    LoopKind,
    Operand,
    Scan,
    Statement,
    Store,
    Update,
    When,
    index_symbol,
    walk,
)
from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Value, is_written, storage
from fusec.ir.types import (
    BF16,
    F32,
    F64,
    I8,
    I32,
    I64,
    U8,
    DType,
    Size,
    accumulation,
    product,
    storage_numel,
)
from fusec.loops import indexing
from fusec.loops.affine import Affine, Axis, at_least
from fusec.loops.casts import is_bfloat16, keeps_all
from fusec.loops.indexing import DynamicIndex, IndexedExpr, Output

_FAR = 2**40
"""Larger than any index."""
_FEW_INDICES = 64
"""Up to so many indices are checked one by one."""
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf")


@dataclass
class _Level:
    axes: frozenset[Axis]
    statements: list[Statement] = field(default_factory=list)
    names: dict[IndexedExpr, Operand] = field(default_factory=dict)
    converted: dict[tuple[IndexedExpr, DType | None], str] = field(default_factory=dict)
    """Values of half types rounded to their type, and integers of 8 bits in 32."""
    clamped: dict[tuple[Operand, Size], str] = field(default_factory=dict)
    """Names of values clamped to a length."""


class Emitter(Indices):
    """Builds the statements of one kernel.

    Levels are the loops that are open; the first is the inside of the grid. A value is computed once, in the
    outermost open loop that binds its axes and sees its operands.
    """

    def __init__(self, body: Graph) -> None:
        """A new kernel.

        Args:
            body: the graph of the region.

        Raises:
            ScheduleError: where there are more dynamic indices than numbers of checks.
        """
        super().__init__()
        self.numbers = {node: i for i, node in enumerate(indexing.dynamically_indexed(body), 1)}
        """The number of the checks of each node's indices."""
        if len(self.numbers) > MAX_CHECKS:
            raise ScheduleError("a kernel with too many dynamic indices")
        written = {storage(v) for node in body.nodes for v in node.written}
        self.buffers: dict[Value, Buffer] = {
            v: _buffer(f"in{i}", v, "update" if v in written else "input") for i, v in enumerate(body.inputs)
        }
        self.outputs = [
            self.buffers[storage(v)] if is_written(v) else _buffer(f"out{i}", v, "output")
            for i, v in enumerate(body.outputs)
        ]
        self.output_types = [v.tensor for v in body.outputs]
        self.named = {b.name: v for b, v in zip(self.outputs, body.outputs, strict=True)}
        self.named |= {b.name: v for v, b in self.buffers.items()}
        """The value of the body that a name holds, where it holds one."""
        self.scratch: list[Buffer] = []
        self.packed: dict[Value, set[int]] = {}
        """For operands of products: the rows of transposed blocks in which it may be prepacked; 0 for none."""
        self.kept: dict[IndexedExpr, tuple[Buffer, sympy.Expr]] = {}
        """Values in scratch: buffer and offset."""
        self.levels = [_Level(frozenset())]
        self._count = 0

    def inputs(self, statements: Iterable[Statement]) -> tuple[Buffer, ...]:
        """Return the buffers of the body's inputs; those that all statements read in blocks of one size are packed."""
        loaded = {s.buffer for s in walk(statements) if isinstance(s, Load)}
        packed = {v: next(iter(blocks)) for v, blocks in self.packed.items() if len(blocks) == 1}
        return tuple(
            replace(b, packed=packed[v]) if v in packed and b.name not in loaded else b for v, b in self.buffers.items()
        )

    def fresh(self, hint: str = "v") -> str:
        """A new name."""
        self._count += 1
        return f"{hint}{self._count}"

    # Levels.

    @property
    def inner(self) -> list[Statement]:
        """The statements of the innermost open loop."""
        return self.levels[-1].statements

    @contextmanager
    def loop(
        self,
        axis: Axis,
        kind: LoopKind,
        step: Size = 1,
        start: Size = 0,
        stop: Size | None = None,
    ) -> Iterator[None]:
        """Open a loop over an axis; when it closes, it is appended to the enclosing one."""
        parts = self.parts_of(axis)
        self.levels.append(_Level(self.levels[-1].axes.union(parts, (axis,))))
        yield
        self._close(self.axis_name(axis), start, axis.size if stop is None else stop, step, kind)

    @contextmanager
    def tile(
        self, axes: tuple[Axis, ...], step: int, start: Size = 0, stop: Size | None = None, apart: bool = False
    ) -> Iterator[None]:
        """Open a tile loop over axes as one; ``start`` and ``stop`` count its elements, ``apart`` as for ``joint``."""
        with self.over(axes, apart) as axis, self.loop(axis, "tile", step, start, stop):
            yield

    @contextmanager
    def repeat(self, name: str, start: Size, stop: Size, step: Size, kind: LoopKind = "serial") -> Iterator[None]:
        """Open a loop that binds no axis: names defined inside are visible there only."""
        self.levels.append(_Level(self.levels[-1].axes))
        yield
        self._close(name, start, stop, step, kind)

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """Open a conditional: names defined inside are visible there only."""
        self.levels.append(_Level(self.levels[-1].axes))
        yield
        body = self.levels.pop().statements
        self.inner.append(When(condition, tuple(body)))

    def _close(self, name: str, start: Size, stop: Size, step: Size, kind: LoopKind) -> None:
        body = self.levels.pop().statements
        self.inner.append(Loop(name, start, stop, step, kind, tuple(body)))

    def take(self) -> list[Statement]:
        """Return the statements so far and start again, in other loops and with no names defined."""
        (level,) = self.levels
        self.levels = [_Level(level.axes)]
        return level.statements

    def define(self, item: IndexedExpr, operand: Operand, level: int = -1) -> None:
        """Bind a value to a name from here on, within the loop of that level."""
        self.levels[level].names[item] = operand
        self._name(item, operand)

    def add_scratch(
        self, dtype: DType, numel: Size, hint: str = "row", role: Literal["scratch", "shared"] = "scratch"
    ) -> Buffer:
        """Add memory, private to one grid iteration or shared by all."""
        buffer = Buffer(f"{hint}{len(self.scratch)}", dtype, numel, role)
        self.scratch.append(buffer)
        return buffer

    # Statements of the innermost loop, each with a new name.

    def compute(self, op: str, *operands: Operand, dtype: DType) -> str:
        """Append a pointwise operation."""
        name = self.fresh()
        self.inner.append(Compute(name, op, operands, dtype))
        return name

    def load(self, buffer: str, offset: sympy.Expr) -> str:
        """Append a load."""
        name = self.fresh()
        self.inner.append(Load(name, buffer, offset))
        return name

    def number(self, index: sympy.Expr) -> str:
        """Append the value of an index."""
        name = self.fresh("n")
        self.inner.append(Index(name, index))
        return name

    def within(self, value: Operand, length: Size) -> sympy.Symbol:
        """Return the symbol, for offsets, of an integer that is known to be in ``0 … length - 1``."""
        name = self.fresh("index")
        self.inner.append(ClampIndex(name, value, length, bounded=True))
        return index_symbol(name)

    def bind(self, axis: Axis, value: Operand) -> None:
        """Bind an axis to an integer in its range, from here on in the innermost loop."""
        parts = self.parts_of(axis)
        self.levels[-1].axes |= {axis, *parts}
        self.inner.append(ClampIndex(self.axis_name(axis), value, axis.size, bounded=True))

    def accumulator(self, op: str, dtype: DType, tile: bool = False) -> str:
        """Append the declaration of an accumulator."""
        name = self.fresh("acc")
        self.inner.append(Init(name, op, dtype, tile))
        return name

    def fold(self, op: str, tile: str, dtype: DType, axis: Axis | None = None) -> str:
        """Append the reduction of a tile's lanes, along one axis of several or the only one."""
        name = self.fresh("r")
        self.inner.append(Fold(name, op, tile, dtype, "" if axis is None else self.axis_name(axis)))
        return name

    # Computations.

    def emit(self, item: IndexedExpr) -> Operand:
        """Return the name of a value, computing it unless an open loop has it already."""
        for level in reversed(self.levels):
            if item in level.names:
                return level.names[item]
        if item in self.kept:
            buffer, offset = self.kept[item]
            self.named.setdefault(buffer.name, item.value)
            return self._define(item, Load(self.fresh(), buffer.name, offset), self._level(item))
        if item.kind == "load":
            buffer = self.buffers[item.value]
            offset = self.offset(item.index, item.value.tensor)
            named = [axis for axis in item.axes if offset.has(self.axis_symbol(axis))]
            if buffer.numel == 0 and all(axis.size != 0 for axis in named):
                # The loops around may run, but the buffer is empty.
                nothing = Compute(self.fresh(), "cast", (Constant(0),), accumulation(item.dtype))
                return self._define(item, nothing, self._level(item))
            return self._define(item, Load(self.fresh(), buffer.name, offset), self._level(item))
        if item.dynamic_index is not None:
            return self._lookup(item, item.dynamic_index)
        if item.kind == "constant":
            return self._constant(item)
        if item.kind == "index":
            return self._index(item)
        if item.kind == "pointwise":
            return self._pointwise(item)
        if item.kind == "scan":
            return self._scan(item)
        raise ScheduleError(f"a {item.kind} is read before it is computed")

    def store(self, output: Output) -> None:
        """Store one output element (tile) in the innermost loop."""
        value, type = self.emit(output.root), self.output_types[output.position]
        index, there = output.index, sympy.Integer(0)
        if output.dynamic_index is not None:
            d = output.dynamic_index.dim
            index = (*index[:d], Affine(), *index[d + 1 :])
            # The only row of a dim is row 0, whatever the stride: with stride 0 the address would not name the row, and
            # a tile of no rows would not be masked.
            there = self.dynamic_index(output.dynamic_index) * (1 if type.shape[d] == 1 else type.strides[d])
        offset = sympy.expand(self.offset(index, type) + there)
        name = self.outputs[output.position].name
        if output.dynamic_index is not None and "combine" in (how := output.dynamic_index.node.attributes):
            self.inner.append(Combine(how["combine"], name, offset, value))
        else:
            self.inner.append(Store(name, offset, value))

    def dynamic_index(self, index: DynamicIndex) -> sympy.Symbol:
        """Return the symbol, for offsets, of a dynamic index clamped to its dim."""
        value = self.emit(index.value)
        level = self.levels[self._level(index.value, (value,))]
        if (value, index.length) not in level.clamped:
            name = level.clamped[value, index.length] = self.fresh("index")
            checks = () if index.is_bounded else self.guard(index, value)
            level.statements += (*checks, ClampIndex(name, value, index.length, index.is_bounded))
        return index_symbol(level.clamped[value, index.length])

    def choose(self, index: DynamicIndex, number: sympy.Symbol) -> None:
        """Take a dynamic index to be a number that is in its range, from here on in the innermost loop."""
        name = self.number(number)
        self.define(index.value, name)
        self.levels[-1].clamped[name, index.length] = number.name

    def bound(self, value: Operand, dtype: DType) -> sympy.Symbol:
        """Return the symbol of an integer for bounds of loops, clamped so that sums of it do not overflow."""
        if dtype != I64:
            value = self.compute("cast", value, dtype=I64)
        for op, end in (("maximum", -_FAR), ("minimum", _FAR)):
            value = self.compute(op, value, Constant(end), dtype=I64)
        return sympy.Symbol(str(value), integer=True)

    def guard(self, index: DynamicIndex, value: Operand) -> tuple[Statement, ...]:
        """Return the statements before the use of a dynamic index; none where all are checked before the grid."""
        return ()

    def checks_ahead(self, indices: Iterable[DynamicIndex], lanes: int) -> tuple[Statement, ...]:
        """Return statements that check every dynamic index of a kernel against its dim, ahead of all else."""
        opened, self.levels = self.levels, [_Level(frozenset())]
        kept, self.kept = self.kept, {}  # scratch is still empty
        found: dict[IndexedExpr, dict[Size, int]] = {}
        for index in reversed(list(indices)):
            if index.value.axes or 0 not in index.value.value.shape:  # no loop would skip the check of no index
                found.setdefault(index.value, {})[index.length] = self.numbers[index.node]
        for value, numbers in found.items():
            with self._elements_to_check(value, lanes) as elements:
                self.inner.extend(Check(e, length, n) for length, n in numbers.items() for e in elements)
        statements, self.levels, self.kept = tuple(self.inner), opened, kept
        return statements

    @contextmanager
    def _elements_to_check(self, value: IndexedExpr, lanes: int) -> Iterator[tuple[Operand, ...]]:
        """Open loops over an index, and yield an element; of many the least and the greatest, where there are any."""
        axes, dtype = sorted(value.axes, key=lambda a: a.serial), accumulation(value.dtype)
        if not axes or at_least(_FEW_INDICES, product(tuple(axis.size for axis in axes))):
            with ExitStack() as loops:
                for axis in axes:
                    loops.enter_context(self.loop(axis, "serial"))
                yield (self.emit(value),)
            return
        ends = {op: self.accumulator(op, dtype, True) for op in ("min", "max")}
        with ExitStack() as loops:
            for axis in axes[:-1]:
                loops.enter_context(self.loop(axis, "serial"))
            loops.enter_context(self.loop(axes[-1], "tile", lanes))
            element = self.emit(value)
            self.inner.extend(Update(end, op, (element,)) for op, end in ends.items())
        least, greatest = (self.fold(op, end, dtype) for op, end in ends.items())
        with self.when(self.compute("le", least, greatest, dtype=dtype)):
            yield least, greatest

    def _lookup(self, item: IndexedExpr, index: DynamicIndex) -> str:
        offset, (row,) = self.offset(item.index, item.value.tensor), item.bound
        there = sympy.expand(offset.subs(self.axis_symbol(row), self.dynamic_index(index)))
        level = self._level(item, (self.emit(index.value),))
        return self._define(item, Load(self.fresh(), self.buffers[item.value].name, there), level)

    def _level(self, item: IndexedExpr, operands: Sequence[Operand] = ()) -> int:
        """Return the outermost open loop that binds the axes of ``item`` and sees its operands."""
        names = {o for o in operands if isinstance(o, str)}
        for number, level in enumerate(self.levels):
            names.difference_update(o for o in (*level.names.values(), *level.converted.values()) if isinstance(o, str))
            if item.axes <= level.axes and not names:
                return number
        raise ScheduleError(f"{item!r} depends on a loop that is not open")

    def _define(self, item: IndexedExpr, statement: Definition, level: int) -> str:
        self.levels[level].statements.append(statement)
        self.levels[level].names[item] = statement.dst
        self._name(item, statement.dst)
        return statement.dst

    def _name(self, item: IndexedExpr, operand: Operand) -> None:
        if isinstance(operand, str):
            self.named.setdefault(operand, item.value)

    def _constant(self, item: IndexedExpr) -> Operand:
        node = item.node
        if node.is_op("constant"):
            return Constant(node.attributes["value"])
        value = Index(self.fresh("n"), sympy.sympify(node.attributes["expr"]))
        return self._cast_index(item, value, 0)

    def _index(self, item: IndexedExpr) -> Operand:
        # Only entries of tables, which are few, have another dtype.
        dtype = I64 if item.dtype == I64 else I32
        value = Index(self.fresh("n"), self.expression(item.index[0]), dtype)
        return self._cast_index(item, value, self._level(item))

    def _cast_index(self, item: IndexedExpr, value: Index, level: int) -> Operand:
        name = self._define(item, value, level)
        if item.dtype == I64:
            return name
        cast = Compute(self.fresh(), "cast", (name,), accumulation(item.dtype))
        return self._define(item, cast, level)

    def _pointwise(self, item: IndexedExpr) -> Operand:
        node, target = item.node, item.dtype
        source = accumulation(node.operands[0].dtype)
        widens = node.is_op("cast") and target.bytes > 1 and target.kind != "bool" and is_narrow_bits(item.operands[0])
        operands = tuple(map(self.widened if widens else self.emit, item.operands))
        if node.is_op("cast"):
            return self._cast(item, operands, source, target)
        if node.is_op("bitcast"):
            compute = Compute(self.fresh(), "bitcast", operands, accumulation(target), target)
            return self._define(item, compute, self._level(item, operands))
        level = self._level(item, operands)
        if node.is_op(*_COMPARISONS):
            operands = tuple(self.rounded(o, name) for o, name in zip(item.operands, operands, strict=True))
        dtype = source if node.is_op(*_COMPARISONS) else accumulation(target)
        return self._define(item, Compute(self.fresh(), node.op.name, operands, dtype), level)

    def _scan(self, item: IndexedExpr) -> str:
        (axis,), (operand,) = item.bound, item.operands
        value, dtype = self.emit(operand), accumulation(item.dtype)
        level = self._level(item, (value,))
        around = self.levels[level].axes - {axis}
        outside = next((one for one in self.levels if one.axes == around), None)
        if outside is None:
            raise ScheduleError("a scan is within a loop over another axis")
        acc = self.fresh("acc")
        op = item.node.op.name.removeprefix("cum")
        outside.statements.append(Init(acc, op, F64 if dtype == F32 else dtype, tile=False))
        return self._define(item, Scan(self.fresh(), op, value, acc, self.axis_name(axis), dtype), level)

    def rounded(self, item: IndexedExpr, name: Operand) -> Operand:
        """Round a value of a half type: in the wider compute type it compares and truncates differently."""
        exact = item.kind in ("load", "lookup", "constant", "index", "sort") or item.node.is_op("cast")
        if exact or accumulation(item.dtype) == item.dtype or isinstance(name, Constant):
            return name
        return self._convert(item, "cast", (name,), accumulation(item.dtype), item.dtype)

    def element(self, reduction: IndexedExpr) -> Operand:
        """Return an element of what is reduced; of a sum over several segments, the sum of one element of each."""
        values, dtype = map(self.emit, reduction.operands), accumulation(reduction.dtype)
        return functools.reduce(lambda a, b: self.compute("add", a, b, dtype=dtype), values)

    def widened(self, item: IndexedExpr) -> Operand:
        """Return an integer of at most 32 bits as i32. So are bit operations on bytes, which x86 cannot shift."""
        if item.dtype == I32 or item.kind == "constant":
            return self.emit(item)
        if is_narrow_bits(item):
            return self._convert(item, item.node.op.name, tuple(self.widened(o) for o in item.operands), I32)
        return self._convert(item, "cast", (self.emit(item),), I32)

    def _convert(
        self, item: IndexedExpr, op: str, operands: tuple[Operand, ...], dtype: DType, rounds: DType | None = None
    ) -> str:
        """Append what makes a value's other form, once."""
        for level in reversed(self.levels):
            if (item, rounds) in level.converted:
                return level.converted[item, rounds]
        compute = Compute(self.fresh(), op, operands, dtype, rounds)
        level = self.levels[self._level(item, operands)]
        level.statements.append(compute)
        level.converted[item, rounds] = compute.dst
        self._name(item, compute.dst)
        return compute.dst

    def _cast(self, item: IndexedExpr, operands: tuple[Operand, ...], source: DType, target: DType) -> Operand:
        if accumulation(target) == target and source == target:
            # A widened half value is held in f32 already.
            self.levels[self._level(item, operands)].names[item] = operands[0]
            return operands[0]
        level = self._level(item, operands)
        if not target.is_float:
            operands = (self.rounded(item.operands[0], operands[0]),)
        exact = keeps_all(item.node) or (target == BF16 and is_bfloat16(item.operands[0].value))
        rounds = target if accumulation(target) != target and not exact else None
        return self._define(item, Compute(self.fresh(), "cast", operands, accumulation(target), rounds), level)


def is_narrow_bits(item: IndexedExpr) -> bool:
    """Return whether an expression is a bit operation on integers of 8 bits."""
    return item.kind == "pointwise" and item.dtype in (I8, U8) and item.node.is_op("and", "or", "xor", "shift_right")


def _buffer(name: str, value: Value, role: Literal["input", "output", "update"]) -> Buffer:
    return Buffer(name, value.dtype, storage_numel(value.tensor), role)


def static_size(axis: Axis) -> int:
    """Return the size of an axis that must be static.

    Raises:
        ScheduleError: where it is not.
    """
    if not isinstance(axis.size, int):
        raise ScheduleError(f"the size {axis.size} is not known when the kernel is made")
    return axis.size
