"""A tile program as C++ text: grid loops become OpenMP loops, tiles become Vec values.

Longer than 500 lines: it has a method for each statement of the tile program.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from fusec.codegen.cpp.expressions import CPP, MEMORY_TYPES, identifier, print_constant, scalar_type
from fusec.codegen.cpp.operations import print_operation
from fusec.codegen.kernel import (
    Assign,
    Buffer,
    Check,
    Compute,
    Constant,
    Dot,
    DotTiles,
    Fold,
    Index,
    Init,
    Kernel,
    Load,
    Loop,
    Matrix,
    Operand,
    Place,
    Statement,
    Store,
    Update,
    When,
    walk,
)
from fusec.errors import BuildError
from fusec.ir import types as t
from fusec.ir.ops import OPS
from fusec.ir.types import DType

PARALLEL_WORK = 65536
"""Scalar operations below which waking the threads (a few µs) costs more than they save."""
STACK_BYTES = 65536
"""Scratch up to this size lies on the stack; beyond it each thread allocates its own."""
PARTIALS = 4
"""Independent accumulators of a reduction loop: an addition takes about 4 cycles, one starts every cycle."""
FEW_ROWS = 16
"""Rows of a matrix product up to which each number of them has code of its own."""
LIGHT_COST = 12
"""Cost of a loop body above which its own arithmetic hides the latency of the update."""


@dataclass(frozen=True)
class _Kind:
    """What a name holds."""

    dtype: DType
    lanes: int
    """0 for a scalar."""
    depth: int = 0
    """Number of tile loops around its definition."""

    @property
    def text(self) -> str:
        if not self.lanes:
            return scalar_type(self.dtype)
        return f"{self.dtype.name if self.dtype != t.BOOL else 'bool'}x{self.lanes}"


def print_kernel(kernel: Kernel) -> str:
    """The translation unit that defines ``kernel.name``."""
    return _Printer(kernel).print()


class _Printer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.buffers = {b.name: b for b in kernel.buffers}
        self.kinds: dict[str, _Kind] = {}
        self.types: set[_Kind] = set()
        self.lines: list[str] = []
        self.depth = 1
        self.tiles: list[Loop] = []
        self.reports = any(isinstance(s, Check) for s in walk(kernel.body))
        """Whether it returns what ``out_of_range`` makes of a failed check, 0 where all is well."""
        self.steps = [s.step for s in walk(kernel.body) if isinstance(s, Loop) and s.kind == "tile"]

    def print(self) -> str:
        """The whole text."""
        self._pointers()
        scratch = [b for b in self.kernel.buffers if b.role == "scratch"]
        self._declare([b for b in self.kernel.buffers if b.role == "shared"])
        alone = [s for s in self.kernel.body if not (isinstance(s, Loop) and s.kind == "grid")]
        declared: set[str] = set()
        for statement in self.kernel.body:
            if statement in alone:  # no grid is around it
                self._declare([b for b in scratch if b.name in _touched([statement]) - declared])
                declared |= _touched([statement])
            self._statement(statement)
        if self.reports:
            self._line("return 0;")
        body = "\n".join(self.lines)
        return "\n".join([*self._head(), f"{self._signature()} {{", body, "}", ""])

    # ------------------------------------------------------------------ frame

    def _head(self) -> list[str]:
        header = "dot.h" if any(isinstance(s, Dot) for s in walk(self.kernel.body)) else "vec.h"
        lines = [f'#include "{header}"', "using namespace fusec;"]
        for kind in sorted(self.types, key=lambda k: k.text):
            form = f"Mask<{kind.lanes}>" if kind.dtype == t.BOOL else f"Vec<{scalar_type(kind.dtype)}, {kind.lanes}>"
            lines.append(f"using {kind.text} = {form};")
        comment = [f"{self.kernel.name} ({self.kernel.kind})"]
        comment += self.kernel.formula.splitlines()
        comment += [f"from {source}" for source in self.kernel.sources[:8]]
        hidden = len(self.kernel.sources) - 8
        comment += [f"and {hidden} more places"] if hidden > 0 else []
        return [*lines, "", *(f"// {_one_line(line)}" for line in comment)]

    def _signature(self) -> str:
        result = "int64_t" if self.reports else "void"
        return f'extern "C" EXPORT {result} {self.kernel.name}(void* const* buffers, const int64_t* symbols)'

    def _pointers(self) -> None:
        # An updated buffer may be a view of an input, so only kernels without one may promise not to alias.
        restrict = "" if any(b.role == "update" for b in self.kernel.buffers) else " __restrict"
        arguments = [b for b in self.kernel.buffers if b.role not in ("scratch", "shared")]
        for i, b in enumerate(arguments):
            element = ("const " if b.role == "input" else "") + MEMORY_TYPES[b.dtype]
            self._line(f"{element}*{restrict} const {identifier(b.name)} = static_cast<{element}*>(buffers[{i}]);")
        for i, symbol in enumerate(self.kernel.symbols):
            self._line(f"const int64_t {identifier(symbol)} = symbols[{i}];")

    def _line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    # ------------------------------------------------------------------ loops

    def _statement(self, statement: Statement) -> None:
        if isinstance(statement, Loop):
            {"grid": self._grid, "serial": self._serial, "tile": self._tile}[statement.kind](statement)
        elif isinstance(statement, Load):
            self._load(statement)
        elif isinstance(statement, Compute):
            self._compute(statement)
        elif isinstance(statement, Index):
            self._index(statement)
        elif isinstance(statement, Init):
            self._init(statement)
        elif isinstance(statement, Update):
            self._update(statement)
        elif isinstance(statement, Fold):
            self._fold(statement)
        elif isinstance(statement, Dot):
            self._dot(statement)
        elif isinstance(statement, When):
            self._when(statement)
        elif isinstance(statement, Check):
            self._check(statement)
        elif isinstance(statement, Place):
            self._place(statement)
        elif isinstance(statement, (Assign, DotTiles)):
            raise BuildError(f"kernel {self.kernel.name} holds tiles of two axes", why="a tile in C++ is one vector")
        else:
            self._store(statement)

    def _grid(self, loop: Loop) -> None:
        nest = [loop]
        while len(nest[-1].body) == 1 and isinstance(inner := nest[-1].body[0], Loop) and inner.kind == "grid":
            nest.append(inner)
        scratch = [b for b in self.kernel.buffers if b.role == "scratch"]
        large = [b for b in scratch if not _on_stack(b)]
        condition = self._parallel_condition()
        collapse = f" collapse({_rectangular(nest)})" if _rectangular(nest) > 1 else ""
        if large:
            self._line("{" if condition is None else f"#pragma omp parallel{condition}")
            if condition is not None:
                self._line("{")
            self.depth += 1
            self._declare(large)
            if condition is not None:
                self._line(f"#pragma omp for{collapse} schedule(static)")
        elif condition is not None:
            self._line(f"#pragma omp parallel for{collapse} schedule(static){condition}")
        for level in nest:
            self._open(level)
        self._declare([b for b in scratch if _on_stack(b)])
        for statement in nest[-1].body:
            self._statement(statement)
        for _ in nest:
            self._close()
        if large:
            self._close()

    def _declare(self, scratch: list[Buffer]) -> None:
        for b in scratch:
            element, name = MEMORY_TYPES[b.dtype], identifier(b.name)
            if _on_stack(b):
                self._line(f"alignas(64) {element} {name}[{max(1, int(b.numel))}];")
            else:
                self._line(f"Scratch<{element}> {name}_memory({CPP.print(b.numel)});")
                self._line(f"{element}* const {name} = {name}_memory.data;")

    def _parallel_condition(self) -> str | None:
        """The ``if`` clause; None where threads never pay."""
        work = self.kernel.work
        if isinstance(work, int) or work.is_Integer:
            return "" if int(work) >= PARALLEL_WORK else None
        return f" if ({CPP.print(work)} >= {PARALLEL_WORK})"

    def _open(self, loop: Loop) -> None:
        axis = identifier(loop.axis)
        step = f"{axis}++" if loop.step == 1 else f"{axis} += {CPP.print(loop.step)}"
        self._line(f"for (int64_t {axis} = {CPP.print(loop.start)}; {axis} < {CPP.print(loop.stop)}; {step}) {{")
        self.depth += 1

    def _close(self, text: str = "}") -> None:
        self.depth -= 1
        self._line(text)

    def _serial(self, loop: Loop) -> None:
        self._open(loop)
        for statement in loop.body:
            self._statement(statement)
        self._close()

    def _when(self, statement: When) -> None:
        if self._operand_lanes(statement.condition):
            raise BuildError("a tile decides whether statements run", where=self.kernel.name)
        self._line(f"if ({identifier(statement.condition)}) {{")
        self.depth += 1
        for inner in statement.body:
            self._statement(inner)
        self._close()

    def _tile(self, loop: Loop) -> None:
        """The body once, as a lambda over the tile's start and the lanes that count; then full tiles and the tail."""
        if self.tiles:
            raise BuildError("a tile loop lies inside another", where=f"{self.kernel.name}, axis {loop.axis}")
        axis, step = identifier(loop.axis), int(loop.step)
        carried = self._carried(loop)
        extra = "".join(f", {self.kinds[a].text}& {identifier(a)}" for a in carried)
        self._line("{")
        self.depth += 1
        self._line(f"const auto tile = [&](const int64_t {axis}, const auto lanes{extra}) LANEWISE {{")
        self.tiles.append(loop)
        self.depth += 1
        for statement in loop.body:
            self._statement(statement)
        self._close("};")
        self.tiles.pop()
        self._line(f"const int64_t end = {CPP.print(loop.stop)};")
        self._line(f"int64_t {axis} = {CPP.print(loop.start)};")
        same = "".join(f", {identifier(a)}" for a in carried)
        partials = _partials_that_pay(loop, len(carried))
        if partials > 1:
            self._partials(axis, step, carried, partials)
        self._line(f"for (; {axis} + {step} <= end; {axis} += {step}) tile({axis}, All{{}}{same});")
        self._line(f"if ({axis} < end) tile({axis}, Part{{end - {axis}}}{same});")
        self._close()

    def _carried(self, loop: Loop) -> dict[str, str]:
        """Tile accumulators that the loop updates and that live outside of it, with their operation."""
        updates = [s for s in walk(loop.body) if isinstance(s, Update) and s.acc in self.kinds]
        return dict(sorted((s.acc, s.op) for s in updates if self.kinds[s.acc].lanes))

    def _partials(self, axis: str, step: int, carried: dict[str, str], partials: int) -> None:
        """Several tiles at a time, each with accumulators of its own: hides the latency of the update."""
        names = {a: [identifier(a), *(f"{identifier(a)}_{i}" for i in range(1, partials))] for a in carried}
        self._line(f"if ({axis} + {partials * step} <= end) {{")
        self.depth += 1
        for a, op in carried.items():
            identity = self._identity(op, self.kinds[a].dtype)
            self._line(f"{self.kinds[a].text} {', '.join(f'{n}({identity})' for n in names[a][1:])};")
        self._line(f"for (; {axis} + {partials * step} <= end; {axis} += {partials * step}) {{")
        self.depth += 1
        for i in range(partials):
            start = axis if i == 0 else f"{axis} + {i * step}"
            self._line(f"tile({start}, All{{}}{''.join(f', {names[a][i]}' for a in carried)});")
        self._close()
        for a, op in carried.items():
            kind = self.kinds[a]
            level = names[a]
            while len(level) > 1:
                pairs = zip(level[::2], level[1::2], strict=True)
                level = [print_operation(_COMBINE[op], [_group(x), _group(y)], kind.dtype) for x, y in pairs]
            self._line(f"{identifier(a)} = {level[0]};")
        self._close()

    # ------------------------------------------------------------------ statements

    def _define(self, name: str, dtype: DType, lanes: int) -> str:
        kind = _Kind(dtype, lanes, len(self.tiles))
        self.kinds[name] = kind
        if lanes:
            self.types.add(_Kind(dtype, lanes))
        return f"{kind.text} {identifier(name)}"

    def _lanes(self, expression: sympy.Expr) -> int:
        """Lanes of a value at this expression: those of the tile loop whose axis it mentions."""
        if not self.tiles:
            return 0
        loop = self.tiles[-1]
        mentioned = {str(s) for s in sympy.sympify(expression).free_symbols}
        along = loop.axis in mentioned or any(self.kinds[s].lanes for s in mentioned if s in self.kinds)
        return int(loop.step) if along else 0

    def _address(self, buffer: str, offset: sympy.Expr) -> tuple[str, str]:
        """Pointer of the first lane, and how the others follow: ``""``, ``_strided`` or ``_at`` with an argument."""
        pointer = _pointer(buffer, offset)
        if not self._lanes(offset):
            return pointer, ""
        axis = sympy.Symbol(self.tiles[-1].axis, integer=True, nonnegative=True)
        axis = next((s for s in offset.free_symbols if str(s) == axis.name), axis)
        stride = sympy.expand(offset).coeff(axis, 1)
        rest = sympy.expand(offset - stride * axis)
        places = [s for s in offset.free_symbols if str(s) in self.kinds and self.kinds[str(s)].lanes]
        if places or axis in rest.free_symbols or axis in stride.free_symbols:
            lane = sympy.Symbol("lane", integer=True)
            each = {s: sympy.Symbol(f"{identifier(s.name)}.v[lane]", integer=True) for s in places}
            at = CPP.print(offset.subs({axis: axis + lane, **each}))
            return identifier(buffer), f"_at [&](int64_t lane) LANEWISE {{ return {at}; }}"
        return pointer, "" if stride == 1 else f"_strided {CPP.print(stride)}"

    def _check(self, s: Check) -> None:
        value, length = self._operand(s.value, t.I64), CPP.print(s.length)
        self._line(f"if (uint64_t({value}) >= uint64_t({length})) return out_of_range({value}, {s.number});")

    def _place(self, s: Place) -> None:
        lanes = self._operand_lanes(s.value)
        self._line(f"const {self._define(s.dst, t.I64, lanes)} = {self._operand(s.value, t.I64)};")

    def _load(self, s: Load) -> None:
        buffer = self.buffers[s.buffer]
        lanes = self._lanes(s.offset)
        target = self._define(s.dst, t.accumulation(buffer.dtype), lanes)
        pointer, how = self._address(s.buffer, s.offset)
        if not lanes:
            self._line(f"const {target} = load({pointer});")
            return
        function, _, argument = how.partition(" ")
        argument = f", {argument}" if argument else ""
        self._line(f"const {target} = load{function}<{lanes}>({pointer}{argument}, lanes);")

    def _store(self, s: Store) -> None:
        buffer = self.buffers[s.buffer]
        dtype = t.accumulation(buffer.dtype)
        lanes = self._lanes(s.offset)
        value = self._operand(s.value, dtype)
        pointer, how = self._address(s.buffer, s.offset)
        if not lanes:
            if self._operand_lanes(s.value):
                raise BuildError(f"a tile is stored to one element of {s.buffer}", where=self.kernel.name)
            self._line(f"store({pointer}, {scalar_type(dtype)}({value}));")
            return
        if not self._operand_lanes(s.value):
            value = f"{self._tile_type(dtype, lanes)}({value})"
        function, _, argument = how.partition(" ")
        argument = f", {argument}" if argument else ""
        self._line(f"store{function}({pointer}{argument}, {value}, lanes);")

    def _tile_type(self, dtype: DType, lanes: int) -> str:
        kind = _Kind(dtype, lanes)
        self.types.add(kind)
        return kind.text

    def _operand_lanes(self, operand: Operand) -> int:
        return 0 if isinstance(operand, Constant) else self.kinds[operand].lanes

    def _operand(self, operand: Operand, dtype: DType) -> str:
        return print_constant(operand, dtype) if isinstance(operand, Constant) else identifier(operand)

    def _compute(self, s: Compute) -> None:
        lanes = max(map(self._operand_lanes, s.operands))
        if s.op == "cast":
            source = None if isinstance(s.operands[0], Constant) else self.kinds[s.operands[0]].dtype
            text = _print_cast(self._operand(s.operands[0], s.dtype), source, s)
            self._line(f"const {self._define(s.dst, s.dtype, lanes)} = {text};")
            return
        dtypes = [t.BOOL, s.dtype, s.dtype] if s.op == "where" else [s.dtype] * len(s.operands)
        operands = [self._operand(o, d) for o, d in zip(s.operands, dtypes, strict=True)]
        if lanes and s.op not in _BROADCASTING:
            # Overloads are chosen by exact type, so scalars beside a tile are spread first.
            operands = [
                text
                if self._operand_lanes(o) or (s.op == "where" and i == 0)
                else f"{self._tile_type(d, lanes)}({text})"
                for i, (text, o, d) in enumerate(zip(operands, s.operands, dtypes, strict=True))
            ]
        result = t.BOOL if s.op in _COMPARISONS else s.dtype
        exponent = s.operands[1].value if s.op == "pow" and isinstance(s.operands[1], Constant) else None
        text = print_operation(s.op, operands, s.dtype, exponent)
        self._line(f"const {self._define(s.dst, result, lanes)} = {text};")

    def _index(self, s: Index) -> None:
        lanes = self._lanes(s.value)
        value = sympy.sympify(s.value)
        target = self._define(s.dst, t.I64, lanes)
        if not lanes:
            self._line(f"const {target} = {CPP.print(value)};")
            return
        axis = next(x for x in value.free_symbols if str(x) == self.tiles[-1].axis)
        step = sympy.expand(value).coeff(axis, 1)
        self._line(f"const {target} = iota<int64_t, {lanes}>({CPP.print(value)}, {CPP.print(step)});")

    def _init(self, s: Init) -> None:
        lanes = int(self.tiles[-1].step) if self.tiles and s.tile else int(self.steps[0]) if s.tile else 0
        self._line(f"{self._define(s.dst, s.dtype, lanes)}({self._identity(s.op, s.dtype)});")

    def _identity(self, op: str, dtype: DType) -> str:
        if dtype == t.BOOL:
            return "true" if op in ("min", "prod") else "false"
        if op in ("sum", "prod"):
            return print_constant(Constant(0 if op == "sum" else 1), dtype)
        return f"{'lowest' if op == 'max' else 'highest'}<{scalar_type(dtype)}>()"

    def _update(self, s: Update) -> None:
        kind = self.kinds[s.acc]
        acc = identifier(s.acc)
        values = [self._operand(v, kind.dtype) for v in s.values]
        if kind.lanes:
            values = [
                text if self._operand_lanes(v) else f"{self._tile_type(kind.dtype, kind.lanes)}({text})"
                for text, v in zip(values, s.values, strict=True)
            ]
        if len(values) == 1:
            text = print_operation(_COMBINE[s.op], [acc, values[0]], kind.dtype)
        elif kind.dtype.is_float:
            text = f"fma({values[0]}, {values[1]}, {acc})"
        else:
            text = f"{acc} + {values[0]} * {values[1]}"
        if kind.lanes and kind.depth < len(self.tiles):
            text = f"keep(lanes, {text}, {acc})"
        self._line(f"{acc} = {text};")

    def _dot(self, s: Dot) -> None:
        along = "k" if s.right.row_stride == 1 and s.left.column_stride == 1 and isinstance(s.rows, int) else "n"
        step = s.right.column_stride if along == "k" else s.right.row_stride
        lanes = s.right.row_stride if along == "k" else s.right.column_stride
        if s.target.column_stride != 1 or lanes != 1 or (along == "k" and s.adds):
            raise BuildError("a block of a matrix product whose operands are not dense", where=self.kernel.name)

        def matrix(m: Matrix, *strides: t.Size) -> str:
            return ", ".join([_pointer(m.buffer, m.offset), *map(CPP.print, strides)])

        left = (s.left.row_stride,) if along == "k" else (s.left.row_stride, s.left.column_stride)
        operands = [matrix(s.target, s.target.row_stride), matrix(s.left, *left), matrix(s.right, step)]
        few = isinstance(s.rows, int) and s.rows <= FEW_ROWS
        sizes = [*(() if few else (s.rows,)), s.columns, s.depth]
        arguments = ", ".join([*operands, *map(CPP.print, sizes)])
        options = [str(s.rows)] if few else []
        options += [str(self.steps[0]), *(["true" if s.adds else "false"] if along == "n" else [])]
        self._line(f"dot_{'' if few else 'many_'}along_{along}<{', '.join(options)}>({arguments});")

    def _fold(self, s: Fold) -> None:
        kind = self.kinds[s.src]
        source = identifier(s.src)
        if self.tiles and kind.depth:
            source = f"keep(lanes, {source}, {kind.text}({self._identity(s.op, kind.dtype)}))"
        text = f"fold_{s.op}({source})" if kind.lanes else source
        self._line(f"const {self._define(s.dst, s.dtype, 0)} = {text};")


_COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf"))
_BROADCASTING = _COMPARISONS | {"add", "sub", "mul", "div", "maximum", "minimum", "and", "or", "xor", "fma"}


def _pointer(buffer: str, offset: sympy.Expr) -> str:
    text = CPP.print(offset)
    if text == "0":
        return identifier(buffer)
    return f"{identifier(buffer)} + {text}" if not text.startswith("-") else f"{identifier(buffer)} + ({text})"


def _print_cast(text: str, source: DType | None, s: Compute) -> str:
    if s.dtype == t.BOOL:
        return f"to_bool({text})"
    if source is not None and source != s.dtype:
        text = f"cast<{scalar_type(s.dtype)}>({text})"
    return text if s.rounds_to is None else f"round_to<{MEMORY_TYPES[s.rounds_to]}>({text})"


def _partials_that_pay(loop: Loop, carried: int) -> int:
    """Copies of the accumulators: as many as fit into registers beside the rest, where the body is light."""
    if any(isinstance(s, Loop) for s in loop.body):
        return 1
    cost = sum(OPS[s.op].cost if isinstance(s, Compute) and s.op in OPS else 1 for s in loop.body)
    return 1 if cost > LIGHT_COST or not carried else {1: PARTIALS, 2: PARTIALS, 3: 2, 4: 2}.get(carried, 1)


def _touched(body: Iterable[Statement]) -> set[str]:
    """Names of the buffers that statements read or write."""
    names = {s.buffer for s in walk(body) if isinstance(s, (Load, Store))}
    return names | {m.buffer for s in walk(body) if isinstance(s, Dot) for m in (s.target, s.left, s.right)}


def _on_stack(buffer: Buffer) -> bool:
    numel = buffer.numel
    return (isinstance(numel, int) or bool(numel.is_Integer)) and int(numel) * buffer.dtype.bytes <= STACK_BYTES


def _rectangular(nest: list[Loop]) -> int:
    """How many of the nested loops have bounds that do not depend on each other."""
    axes: set[str] = set()
    for i, loop in enumerate(nest):
        bounds = sympy.sympify(loop.start).free_symbols | sympy.sympify(loop.stop).free_symbols
        if axes & {str(s) for s in bounds}:
            return i
        axes.add(loop.axis)
    return len(nest)


def _group(text: str) -> str:
    return f"({text})" if " " in text else text


def _one_line(text: str) -> str:
    # A backslash at the end would continue the comment.
    return text.replace("\n", " ").rstrip().rstrip("\\")
