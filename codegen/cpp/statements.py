"""One statement of a tile program as lines of C++: loads, stores, arithmetic, reductions, products."""

from dataclasses import dataclass
from functools import singledispatchmethod

import sympy

from fusec.codegen.cpp.expressions import CPP, MEMORY_TYPES, identifier, print_constant, scalar_type
from fusec.codegen.cpp.operations import print_operation
from fusec.codegen.tile.kernel import (
    Check,
    ClampIndex,
    Combine,
    Compute,
    Constant,
    Dot,
    Fold,
    Index,
    Init,
    Kernel,
    Load,
    Loop,
    Matrix,
    Operand,
    Prefetch,
    Scan,
    Sort,
    Statement,
    Store,
    Update,
    index_symbol,
    walk,
)
from fusec.errors import BuildError
from fusec.ir import types as t
from fusec.ir.types import DType
from fusec.loops.kinds import FEW_ROWS

COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""The operation that combines two partial results of a reduction."""
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf"))
PAIRED_LANES = 16
"""Lanes of the instruction that multiplies pairs of bfloat16."""
_BROADCASTING = _COMPARISONS | {"add", "sub", "mul", "div", "maximum", "minimum", "and", "or", "xor", "fma"}


@dataclass(frozen=True)
class Kind:
    """Type of a name."""

    dtype: DType
    lanes: int
    """0 for a scalar."""
    depth: int = 0
    """Number of tile loops around its definition."""

    @property
    def text(self) -> str:
        """Its type in C++."""
        if not self.lanes:
            return scalar_type(self.dtype)
        return f"{self.dtype.name if self.dtype != t.BOOL else 'bool'}x{self.lanes}"


class Statements:
    """Prints statements within the loops that are open."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.buffers = {b.name: b for b in kernel.buffers}
        self.kinds: dict[str, Kind] = {}
        self.types: set[Kind] = set()
        """The vector types that the text needs."""
        self.linked: set[str] = set()
        """The templates of ``dot.h`` that the text needs and that are compiled once for all kernels."""
        self.lines: list[str] = []
        self.depth = 1
        self.tiles: list[Loop] = []
        """The tile loop that is open, if one is."""
        self.steps = [s.step for s in walk(kernel.body) if isinstance(s, Loop) and s.kind == "tile"]

    def line(self, text: str) -> None:
        """Append a line."""
        self.lines.append("  " * self.depth + text)

    @singledispatchmethod
    def straight(self, statement: Statement) -> None:
        """Append the lines of a statement without children.

        Raises:
            BuildError: for tiles of two axes, and where a scalar and a tile are mixed up.
        """
        raise BuildError(f"kernel {self.kernel.name} holds tiles of two axes", why="a tile in C++ is one vector")

    def _define(self, name: str, dtype: DType, lanes: int) -> str:
        kind = Kind(dtype, lanes, len(self.tiles))
        self.kinds[name] = kind
        if lanes:
            self.types.add(Kind(dtype, lanes))
        return f"{kind.text} {identifier(name)}"

    def _lanes(self, expression: sympy.Expr) -> int:
        """Return the lanes of an index expression: those of the tile loop whose axis it mentions."""
        if not self.tiles:
            return 0
        loop = self.tiles[-1]
        mentioned = {str(s) for s in sympy.sympify(expression).free_symbols}
        along = loop.axis in mentioned or any(self.kinds[s].lanes for s in mentioned if s in self.kinds)
        return int(loop.step) if along else 0

    def _address(self, buffer: str, offset: sympy.Expr) -> tuple[str, str]:
        """Return the pointer of the first lane, and the suffix of load and store: ``""``, ``_strided`` or ``_at``."""
        pointer = pointer_to(buffer, offset)
        if not self._lanes(offset):
            return pointer, ""
        axis = _axis_in(offset, self.tiles[-1].axis)
        stride = stride_along(offset, axis.name)
        rest = sympy.expand(offset - stride * axis)
        indices = [s for s in offset.free_symbols if str(s) in self.kinds and self.kinds[str(s)].lanes]
        if indices or axis in rest.free_symbols or axis in stride.free_symbols:
            lane = sympy.Symbol("lane", integer=True)
            each = {s: sympy.Symbol(f"{identifier(s.name)}.v[lane]", integer=True) for s in indices}
            at = CPP.print(offset.subs({axis: axis + lane, **each}))
            return identifier(buffer), f"_at [&](int64_t lane) LANEWISE {{ return {at}; }}"
        return pointer, "" if stride == 1 else f"_strided {CPP.print(stride)}"

    def strides_one(self, load: Load) -> bool:
        """Return whether the lanes of a load are neighbours in memory."""
        return bool(self._lanes(load.offset)) and not self._address(load.buffer, load.offset)[1]

    @straight.register
    def _check(self, s: Check) -> None:
        value, length = self._operand(s.value, t.I64), CPP.print(s.length)
        self.line(f"if (uint64_t({value}) >= uint64_t({length})) return out_of_range({value}, {s.number});")

    @straight.register
    def _clamp_index(self, s: ClampIndex) -> None:
        value, length = self._operand(s.value, t.I64), CPP.print(s.length)
        value = value if s.bounded else f"clamp_index({value}, {length})"
        self.line(f"const {self._define(s.dst, t.I64, self.lanes_of(s.value))} = {value};")

    @straight.register
    def _load(self, s: Load) -> None:
        buffer = self.buffers[s.buffer]
        lanes = self._lanes(s.offset)
        target = self._define(s.dst, t.accumulation(buffer.dtype), lanes)
        pointer, how = self._address(s.buffer, s.offset)
        if not lanes:
            self.line(f"const {target} = load({pointer});")
            return
        function, _, argument = how.partition(" ")
        argument = f", {argument}" if argument else ""
        self.line(f"const {target} = load{function}<{lanes}>({pointer}{argument}, lanes);")

    @straight.register
    def _prefetch(self, s: Prefetch) -> None:
        self.prefetch(s.buffer, s.offset)

    def prefetch(self, buffer: str, offset: sympy.Expr) -> None:
        """Append the prefetch of an element into the second-level cache, which waits for more lines than the first."""
        self.line(f"__builtin_prefetch({pointer_to(buffer, offset)}, 0, 2);")

    @straight.register
    def _store(self, s: Store) -> None:
        buffer = self.buffers[s.buffer]
        dtype = t.accumulation(buffer.dtype)
        lanes = self._lanes(s.offset)
        value = self._operand(s.value, dtype)
        pointer, how = self._address(s.buffer, s.offset)
        if not lanes:
            if self.lanes_of(s.value):
                raise BuildError(f"a tile is stored to one element of {s.buffer}", where=self.kernel.name)
            if self.tiles and self.tiles[-1].start == self.tiles[-1].stop:
                raise BuildError(f"a tile loop that never runs stores an element of {s.buffer}", where=self.kernel.name)
            self.line(f"store({pointer}, {scalar_type(dtype)}({value}));")
            return
        if not self.lanes_of(s.value):
            value = f"{self._tile_type(dtype, lanes)}({value})"
        function, _, argument = how.partition(" ")
        argument = f", {argument}" if argument else ""
        self.line(f"store{function}({pointer}{argument}, {value}, lanes);")

    @straight.register
    def _combine(self, s: Combine) -> None:
        dtype = t.accumulation(self.buffers[s.buffer].dtype)
        lanes, (pointer, how) = self._lanes(s.offset), self._address(s.buffer, s.offset)
        width = int(self.tiles[-1].step) if self.tiles else 0  # each lane counts, also where all are for one place
        value = self._operand(s.value, dtype)
        if not width:
            text = print_operation(s.op, [f"load({pointer})", f"{scalar_type(dtype)}({value})"], dtype)
            self.line(f"store({pointer}, {scalar_type(dtype)}({text}));")
            return
        if not self.lanes_of(s.value):
            value = f"{self._tile_type(dtype, width)}({value})"
        function, _, argument = how.partition(" ")
        if lanes and function != "_at":  # no two lanes have one place
            argument = f", {argument}" if argument else ""
            text = print_operation(s.op, [f"load{function}<{lanes}>({pointer}{argument}, lanes)", value], dtype)
            self.line(f"store{function}({pointer}{argument}, {self._tile_type(dtype, lanes)}({text}), lanes);")
            return
        at = argument or "[](int64_t) LANEWISE { return 0; }"
        operation = print_operation(s.op, ["a", "b"], dtype)
        if dtype.is_float and s.op in ("maximum", "minimum"):  # of random numbers, so that branches are mispredicted
            lane = self._tile_type(dtype, 4)
            operation = f"{s.op}({lane}(a), {lane}(b)).v[0]"
        combined = f"[]({scalar_type(dtype)} a, {scalar_type(dtype)} b) LANEWISE {{ return {operation}; }}"
        self.line(f"combine_at({pointer}, {at}, {value}, lanes, {combined});")

    def _tile_type(self, dtype: DType, lanes: int) -> str:
        kind = Kind(dtype, lanes)
        self.types.add(kind)
        return kind.text

    def lanes_of(self, operand: Operand) -> int:
        """Return the lanes of a value; 0 for a scalar."""
        return 0 if isinstance(operand, Constant) else self.kinds[operand].lanes

    def _operand(self, operand: Operand, dtype: DType) -> str:
        return print_constant(operand, dtype) if isinstance(operand, Constant) else identifier(operand)

    @straight.register
    def _compute(self, s: Compute) -> None:
        lanes = max(map(self.lanes_of, s.operands))
        if s.op == "cast":
            source = None if isinstance(s.operands[0], Constant) else self.kinds[s.operands[0]].dtype
            text = _print_cast(self._operand(s.operands[0], s.dtype), source, s)
            self.line(f"const {self._define(s.dst, s.dtype, lanes)} = {text};")
            return
        if s.op == "bitcast":
            text = self._operand(s.operands[0], s.dtype)
            if s.rounds_to != t.U8:  # float8 lies in registers as its bits
                text = f"bitcast<{MEMORY_TYPES[s.rounds_to or s.dtype]}>({text})"
            self.line(f"const {self._define(s.dst, s.dtype, lanes)} = {text};")
            return
        dtypes = [t.BOOL, s.dtype, s.dtype] if s.op == "where" else [s.dtype] * len(s.operands)
        operands = [self._operand(o, d) for o, d in zip(s.operands, dtypes, strict=True)]
        if lanes and s.op not in _BROADCASTING:
            # Overloads are chosen by exact type, so scalars are broadcast first.
            operands = [
                text if self.lanes_of(o) else f"{self._tile_type(d, lanes)}({text})"
                for text, o, d in zip(operands, s.operands, dtypes, strict=True)
            ]
        result = t.BOOL if s.op in _COMPARISONS else s.dtype
        exponent = s.operands[1].value if s.op == "pow" and isinstance(s.operands[1], Constant) else None
        text = print_operation(s.op, operands, s.dtype, exponent)
        self.line(f"const {self._define(s.dst, result, lanes)} = {text};")

    @straight.register
    def _index(self, s: Index) -> None:
        lanes = self._lanes(s.value)
        value = sympy.sympify(s.value)
        target = self._define(s.dst, s.dtype, lanes)
        if not lanes:
            self.line(f"const {target} = {CPP.print(value)};")
            return
        axis, step = _axis_in(value, self.tiles[-1].axis), stride_along(value, self.tiles[-1].axis)
        kind = f"{scalar_type(s.dtype)}, {lanes}"
        if sympy.expand(value - step * axis).has(axis):  # a quotient or remainder
            at = CPP.print(value.subs(axis, axis + sympy.Symbol("lane", integer=True)))
            self.line(f"const {target} = each<{kind}>([&](int64_t lane) LANEWISE {{ return {at}; }});")
        else:
            self.line(f"const {target} = iota<{kind}>({CPP.print(value)}, {CPP.print(step)});")

    @straight.register
    def _init(self, s: Init) -> None:
        lanes = int(self.tiles[-1].step) if self.tiles and s.tile else int(self.steps[0]) if s.tile else 0
        self.line(f"{self._define(s.dst, s.dtype, lanes)}({self.identity(s.op, s.dtype)});")

    def identity(self, op: str, dtype: DType) -> str:
        """Return the initial value of an accumulator."""
        if dtype == t.BOOL:
            return "true" if op in ("min", "prod") else "false"
        if op in ("sum", "prod"):
            return print_constant(Constant(0 if op == "sum" else 1), dtype)
        return f"{'lowest' if op == 'max' else 'highest'}<{scalar_type(dtype)}>()"

    @straight.register
    def _update(self, s: Update) -> None:
        kind = self.kinds[s.acc]
        acc = identifier(s.acc)
        values = [self._operand(v, kind.dtype) for v in s.values]
        if kind.lanes:
            values = [
                text if self.lanes_of(v) else f"{self._tile_type(kind.dtype, kind.lanes)}({text})"
                for text, v in zip(values, s.values, strict=True)
            ]
        if len(values) == 1:
            text = print_operation(COMBINE[s.op], [acc, values[0]], kind.dtype)
        elif kind.dtype.is_float:
            text = f"fma({values[0]}, {values[1]}, {acc})"
        else:
            text = f"{acc} + {values[0]} * {values[1]}"
        if kind.lanes and kind.depth < len(self.tiles):
            text = f"keep(lanes, {text}, {acc})"
        self.line(f"{acc} = {text};")

    @straight.register
    def _scan(self, s: Scan) -> None:
        tiled = self.tiles and self.tiles[-1].axis == s.axis
        target = self._define(s.dst, s.dtype, int(self.tiles[-1].step) if tiled else 0)
        value, acc = self._operand(s.value, s.dtype), identifier(s.acc)
        if tiled and not self.lanes_of(s.value):
            value = f"{self.kinds[s.dst].text}({value})"
        self.line(f"const {target} = scan_{s.op}({acc}, {value}{', lanes' if tiled else ''});")

    @straight.register
    def _sort(self, s: Sort) -> None:
        buffers = ", ".join(map(identifier, (s.keys, s.order, s.values, s.memory)))
        self.line(f"argsort<{str(s.descending).lower()}>({buffers}, {CPP.print(s.length)}, {CPP.print(s.count)});")

    @straight.register
    def _dot(self, s: Dot) -> None:
        if self.buffers[s.right.buffer].packed:
            self._packed_dot(s)
            return
        along = "k" if s.right.row_stride == 1 and s.left.column_stride == 1 else "n"
        step = s.right.column_stride if along == "k" else s.right.row_stride
        lanes = s.right.row_stride if along == "k" else s.right.column_stride
        if s.target.column_stride != 1 or lanes != 1 or (along == "k" and s.adds):
            raise BuildError("a block of a matrix product whose operands are not dense", where=self.kernel.name)

        left = (s.left.row_stride,) if along == "k" else (s.left.row_stride, s.left.column_stride)
        right = ", ".join([matrix(s.right, step), *map(identifier, s.listed)])
        right = f"listed({right})" if s.listed else right
        operands = [matrix(s.target, s.target.row_stride), matrix(s.left, *left), right]
        few = isinstance(s.rows, int) and s.rows <= FEW_ROWS  # a template parameter
        sizes = [*(() if few else (s.rows,)), s.columns, s.depth]
        arguments = ", ".join([*operands, *map(CPP.print, sizes)])
        options = [str(s.rows)] if few else []
        options += [str(self.steps[0]), *(["true" if s.adds else "false"] if along == "n" else [])]
        self.line(
            f"dot_{'' if few else 'any_' if s.any_rows else 'many_'}along_{along}<{', '.join(options)}>({arguments});"
        )
        if not few:
            self._link(s, f"along_{along}")

    def _packed_dot(self, s: Dot) -> None:
        """Print a product with a prepacked block, which begins at the same offset as if it were not transposed."""
        operands = [matrix(s.target, s.target.row_stride), matrix(s.left, s.left.row_stride), matrix(s.right)]
        arguments = ", ".join([*operands, *map(CPP.print, (s.rows, s.columns, s.depth))])
        self.line(f"dot_packed<{self.steps[0]}>({arguments});")
        self._link(s, "packed")

    def _link(self, s: Dot, how: str) -> None:
        """Note the templates of ``dot.h`` that a large-M product uses."""
        lanes = self.steps[0]
        sums, left, right = (MEMORY_TYPES[self.buffers[m.buffer].dtype] for m in (s.target, s.left, s.right))
        paired = lanes == PAIRED_LANES and (sums, left, right) == ("float", "bf16", "bf16")
        words = [("word", "word")] if paired else []
        quads = [(f"Quad<{left}>", f"Quad<{right}>")] if sums == "int32_t" else []
        operands = {
            # transposed, and widened, in pairs or in groups of four bytes
            "along_k": [("float", "float"), *words] if sums == "float" else quads,
            "along_n": [("float" if sums == "float" else left, right)],
            "packed": words or [(left, right)],
        }
        self.linked |= {f"fusec::RowTiles<{lanes}, {sums}, {', '.join(pair)}>" for pair in operands[how]}

    @straight.register
    def _fold(self, s: Fold) -> None:
        kind = self.kinds[s.src]
        source = identifier(s.src)
        if self.tiles and kind.depth:
            source = f"keep(lanes, {source}, {kind.text}({self.identity(s.op, kind.dtype)}))"
        text = f"fold_{s.op}({source})" if kind.lanes else source
        self.line(f"const {self._define(s.dst, s.dtype, 0)} = {text};")


def matrix(m: Matrix, *strides: t.Size) -> str:
    """Return the arguments of a matrix: the pointer to its first element, and strides."""
    return ", ".join([pointer_to(m.buffer, m.offset), *map(CPP.print, strides)])


def pointer_to(buffer: str, offset: sympy.Expr) -> str:
    """Return the pointer to an element of a buffer."""
    text = CPP.print(offset)
    if text == "0":
        return identifier(buffer)
    return f"{identifier(buffer)} + {text}" if not text.startswith("-") else f"{identifier(buffer)} + ({text})"


def stride_along(offset: sympy.Expr, axis: str) -> sympy.Expr:
    """Return by how many elements an offset grows along a loop's axis."""
    return sympy.expand(offset).coeff(_axis_in(offset, axis), 1)


def _axis_in(offset: sympy.Expr, name: str) -> sympy.Symbol:
    """Return the symbol of an axis, as an offset has it."""
    return next((s for s in offset.free_symbols if str(s) == name), index_symbol(name))


def _print_cast(text: str, source: DType | None, s: Compute) -> str:
    if s.dtype == t.BOOL:
        return f"to_bool({text})"
    if source is not None and source != s.dtype:
        text = f"cast<{scalar_type(s.dtype)}>({text})"
    return text if s.rounds_to is None else f"round_to<{MEMORY_TYPES[s.rounds_to]}>({text})"
