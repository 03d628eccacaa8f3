"""A tile program as C++ text: the frame around it, grid loops shared by a team, tiles as lambdas over their lanes."""

from collections.abc import Iterable, Sequence
from functools import singledispatchmethod

import sympy

from fusec.codegen.cpp.expressions import CPP, MEMORY_TYPES, identifier, scalar_type
from fusec.codegen.cpp.operations import print_operation
from fusec.codegen.cpp.statements import COMBINE, PAIRED_LANES, Statements, matrix, stride_along
from fusec.codegen.tile.kernel import (
    PARTS,
    Buffer,
    ColumnDot,
    Compute,
    ComputedDot,
    Dot,
    GroupedDot,
    Index,
    Kernel,
    Load,
    Loop,
    Scan,
    Sort,
    Statement,
    TableLookup,
    Update,
    When,
    index_symbol,
    walk,
)
from fusec.errors import BuildError
from fusec.ir import types as t
from fusec.ir.ops import OPS
from fusec.ir.types import Size, simplify
from fusec.loops.kinds import FEW_ROWS

PARALLEL_WORK = 65536
"""Scalar operations below which waking the threads (a few µs) costs more than they save."""
STACK_BYTES = 65536
"""Scratch up to this size lies on the stack; beyond it each thread allocates its own."""
PARTIALS = 4
"""Independent accumulators of a reduction loop: an addition takes about 4 cycles, and one starts every cycle."""
AHEAD_BYTES = 16 << 10
"""Distance of prefetches: what a core reads in about 1 µs, several times the latency of memory."""
LIGHT_COST = 12
"""Cost of a loop body above which its own arithmetic hides the latency of the update."""


def print_kernel(kernel: Kernel) -> str:
    """Return the translation unit that defines ``kernel.name``."""
    return _Printer(kernel).print()


class _Printer(Statements):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.is_parallel = _is_parallel(kernel)

    def print(self) -> str:
        """Return the text."""
        self._pointers()
        self._enter()
        body = self.kernel.body
        at = next((i for i, s in enumerate(body) if _is_grid(s)), len(body))
        self._outside_grid(body[:at])
        for statement in body[at : at + 1]:
            self._statement(statement)
        self._outside_grid(body[at + 1 :], after_grid=True)
        self.line("return 0;")
        return "\n".join([*self._head(), f"{self._signature()} {{", *self.lines, "}", ""])

    def _outside_grid(self, statements: Sequence[Statement], after_grid: bool = False) -> None:
        """Print statements outside the grid: all threads run those before it, the first thread runs those after it."""
        if not statements:
            return
        if after_grid and self.is_parallel != "false":
            self.line("team.wait();")
            self.line("if (team.thread) return 0;")
        scratch, declared = [b for b in self.kernel.buffers if b.role == "scratch"], set[str]()
        for statement in statements:
            self._declare([b for b in scratch if b.name in _touched([statement]) - declared])
            declared |= _touched([statement])
            self._statement(statement)
        if not after_grid and self.is_parallel != "false" and any(b.role == "update" for b in self.kernel.buffers):
            self.line("team.wait();")  # all checks have passed before anything is stored

    # ------------------------------------------------------------------ frame

    def _head(self) -> list[str]:
        kinds = {type(s) for s in walk(self.kernel.body)}
        header = (
            "dot_columns.h" if ColumnDot in kinds else "dot.h" if kinds & {Dot, ComputedDot, GroupedDot} else "vec.h"
        )
        lines = [f'#include "{name}"' for name in (header, *(["sort.h"] if kinds & {Scan, Sort} else []))]
        lines.append("using namespace fusec;")
        lines += [f"extern template struct {name};" for name in sorted(self.linked)]
        for kind in sorted(self.types, key=lambda k: k.text):
            form = f"Mask<{kind.lanes}>" if kind.dtype == t.BOOL else f"Vec<{scalar_type(kind.dtype)}, {kind.lanes}>"
            lines.append(f"using {kind.text} = {form};")
        comment = [f"{self.kernel.name} ({self.kernel.kind})"]
        comment += self.kernel.formula.splitlines()
        sources = list(dict.fromkeys(map(str, self.kernel.sources)))
        comment += [f"from {source}" for source in sources[:8]]
        hidden = len(sources) - 8
        comment += [f"and {hidden} more locations"] if hidden > 0 else []
        return [*lines, "", *(f"// {_one_line(line)}" for line in comment)]

    def _signature(self) -> str:
        return f'extern "C" EXPORT int64_t {self.kernel.name}(void* const* buffers, const int64_t* symbols, Team& team)'

    def _pointers(self) -> None:
        # An updated buffer may be a view of an input, so only kernels without one may promise not to alias.
        restrict = "" if any(b.role == "update" for b in self.kernel.buffers) else " __restrict"
        arguments = [b for b in self.kernel.buffers if b.role not in ("scratch", "shared")]
        for i, b in enumerate(arguments):
            element = ("const " if b.role == "input" else "") + MEMORY_TYPES[b.dtype]
            self.line(f"{element}*{restrict} const {identifier(b.name)} = static_cast<{element}*>(buffers[{i}]);")
        for i, symbol in enumerate(self.kernel.symbols):
            self.line(f"const int64_t {identifier(symbol)} = symbols[{i}];")

    def _enter(self) -> None:
        """Enter the team of threads and obtain shared memory."""
        shared = [b for b in self.kernel.buffers if b.role == "shared"]
        for i, b in enumerate(shared):
            self.line(f"Shared<{MEMORY_TYPES[b.dtype]}, {i}> {identifier(b.name)}_memory(team, {CPP.print(b.numel)});")
        self.line(f"if (!team.enter({self.is_parallel})) return 0;")
        for i, b in enumerate(shared):
            element = MEMORY_TYPES[b.dtype]
            self.line(f"{element}* const {identifier(b.name)} = static_cast<{element}*>(team.lent({i}));")
        if any(PARTS == s.stop for s in self.kernel.body if isinstance(s, Loop)):
            self.line(f"const int64_t {PARTS} = {'1' if self.is_parallel == 'false' else 'team.sharing'};")

    # ------------------------------------------------------------------ loops

    @singledispatchmethod
    def _statement(self, statement: Statement) -> None:
        self.straight(statement)

    @_statement.register
    def _loop(self, loop: Loop) -> None:
        kinds = {"grid": self._grid, "dynamic": self._dynamic, "serial": self._serial, "tile": self._tile}
        kinds[loop.kind](loop)

    def _grid(self, loop: Loop) -> None:
        nest = [loop]
        while len(nest[-1].body) == 1 and isinstance(inner := nest[-1].body[0], Loop) and inner.kind == "grid":
            nest.append(inner)
        scratch = [b for b in self.kernel.buffers if b.role == "scratch"]
        self._declare([b for b in scratch if not _on_stack(b)])
        if loop.stop == PARTS:
            together = [loop]
            self._open("{")
            self.line(f"const int64_t {identifier(loop.axis)} = team.part();")
        elif together := nest[: _rectangular(nest)] if self.is_parallel != "false" else []:
            counts = ", ".join(CPP.print(_count(level)) for level in together)
            self._open(f"for (auto own = team.share({{{counts}}}); own; ++own) {{")
            for i, level in enumerate(together):
                place = 0 if _count(level) == 1 else index_symbol(f"own[{i}]")  # constants compile much faster
                axis = place * level.step + level.start
                self.line(f"const int64_t {identifier(level.axis)} = {CPP.print(axis)};")
        rest = nest[len(together) :]
        for level in rest:
            self._open_loop(level)
        self._declare([b for b in scratch if _on_stack(b)])
        self._run(nest[-1].body)
        for _ in range(len(rest) + bool(together)):
            self._close()

    def _declare(self, scratch: list[Buffer]) -> None:
        large = [b for b in scratch if not _on_stack(b)]
        if large:
            memory = f"{identifier(large[0].name)}_memory"
            rooms = (f"Scratch::room<{MEMORY_TYPES[b.dtype]}>({CPP.print(b.numel)})" for b in large)
            self.line(f"Scratch {memory}(team.arena, {' + '.join(rooms)});")
        for b in scratch:
            element, name = MEMORY_TYPES[b.dtype], identifier(b.name)
            if b in large:
                self.line(f"{element}* const {name} = {memory}.take<{element}>({CPP.print(b.numel)});")
            else:
                self.line(f"alignas(64) {element} {name}[{max(1, int(b.numel))}];")

    def _open(self, text: str) -> None:
        self.line(text)
        self.depth += 1

    def _close(self, text: str = "}") -> None:
        self.depth -= 1
        self.line(text)

    def _run(self, statements: Iterable[Statement]) -> None:
        for statement in statements:
            self._statement(statement)

    def _open_loop(self, loop: Loop) -> None:
        axis = identifier(loop.axis)
        step = f"{axis}++" if loop.step == 1 else f"{axis} += {CPP.print(loop.step)}"
        self._open(f"for (int64_t {axis} = {CPP.print(loop.start)}; {axis} < {CPP.print(loop.stop)}; {step}) {{")

    def _dynamic(self, loop: Loop) -> None:
        self._open(f"for (auto dealt = team.deal({CPP.print(loop.stop)}); dealt; ++dealt) {{")
        self.line(f"const int64_t {identifier(loop.axis)} = *dealt;")
        self._run(loop.body)
        self._close()

    def _serial(self, loop: Loop) -> None:
        self._open_loop(loop)
        self._run(loop.body)
        self._close()

    @_statement.register
    def _when(self, statement: When) -> None:
        if self.lanes_of(statement.condition):
            raise BuildError("a tile decides whether statements run", where=self.kernel.name)
        self._open(f"if ({identifier(statement.condition)}) {{")
        self._run(statement.body)
        self._close()

    def _tile(self, loop: Loop) -> None:
        """Print the body once, as a lambda over the tile's start and its valid lanes; then full tiles and the tail."""
        if self.tiles:
            raise BuildError("a tile loop lies inside another", where=f"{self.kernel.name}, axis {loop.axis}")
        axis, step = identifier(loop.axis), int(loop.step)
        carried = self._carried(loop)
        extra = "".join(f", {self.kinds[a].text}& {identifier(a)}" for a in carried)
        self._open("{")
        self._open(f"const auto tile = [&](const int64_t {axis}, const auto lanes{extra}) LANEWISE {{")
        self.tiles.append(loop)
        self._run(loop.body)
        self._close("};")
        self.tiles.pop()
        self.line(f"const int64_t end = {CPP.print(loop.stop)};")
        self.line(f"int64_t {axis} = {CPP.print(loop.start)};")
        same = "".join(f", {identifier(a)}" for a in carried)
        partials = _accumulator_count(loop, len(carried))
        if partials > 1:
            self._partials(axis, step, carried, partials)
        self.line(f"for (; {axis} + {step} <= end; {axis} += {step}) tile({axis}, All{{}}{same});")
        self.line(f"if ({axis} < end) tile({axis}, Part{{end - {axis}}}{same});")
        self._close()

    @_statement.register
    def _computed_dot(self, s: ComputedDot) -> None:
        """Print the right operand as a lambda that returns one for its tiles, then the call that multiplies."""
        self._open("{")
        column, *outer, tile = _nested(s.right)
        axes = [loop.axis for loop in (column, *outer, tile)] if outer else [column.axis, "step", tile.axis]
        at = [f"const int64_t {identifier(axis)}" for axis in axes]
        self._right(s, [column, *outer], tile, at)
        left = MEMORY_TYPES[self.buffers[s.lefts[0].buffer].dtype]
        lefts = ", ".join(f"{{{matrix(m, m.row_stride, m.column_stride)}}}" for m in s.lefts)
        self.line(f"const Left<{left}> lefts[] = {{{lefts}}};")
        lanes = int(tile.step)
        extent = [column.start, column.stop, _count(outer[0]) if outer else 1, int(tile.stop)]
        columns = ", ".join(map(CPP.print, extent))
        operands = f"{matrix(s.target, s.target.row_stride)}, lefts, values"
        if isinstance(s, GroupedDot):
            _, ahead = self._fetch(column, tile, at)
            operands = f"{matrix(s.target, s.target.row_stride)}, lefts, {identifier(s.totals)}, values"
            self.line(f"dot_grouped<{s.rows}, {len(s.values)}, {ahead}>({operands}, fetch, {columns});")
        elif isinstance(s.rows, int) and s.rows <= FEW_ROWS and _is_contiguous(s):
            lanes, paired = (lanes // 2, ", true") if s.paired else (lanes, "")
            line, ahead = self._fetch(column, tile, at)
            options = f"{s.rows}, {lanes}, {len(s.values)}, {line}, {ahead}{paired}"
            self.line(f"dot_computed<{options}>({operands}, fetch, {columns});")
        else:
            sums = MEMORY_TYPES[self.buffers[s.target.buffer].dtype]
            pairs = [("word", "word")] if lanes == PAIRED_LANES and (sums, left) == ("float", "bf16") else []
            self.linked |= {f"fusec::RowTiles<{lanes}, {sums}, {', '.join(p)}>" for p in [(sums, sums), *pairs]}
            step = "step" if s.steps else "Contiguous{}"
            if s.steps:
                offsets = ", ".join(map(CPP.print, s.steps))
                self._open(f"const auto step = [&](int segment, {at[1]}) LANEWISE {{")
                self.line(f"const int64_t steps[] = {{{offsets}}};")
                self.line("return steps[segment];")
                self._close("};")
            line, ahead = self._fetch(column, tile, at)
            function = "dot_any_computed" if s.any_rows else "dot_many_computed"
            arguments = f"{operands}, fetch, {CPP.print(s.rows)}, {columns}, {step}"
            options = f"{lanes}, {len(s.values)}, {line}{f', {ahead}' if s.any_rows else ''}"
            self.line(f"{function}<{options}>({arguments});")
        self._close()

    @_statement.register
    def _column_dot(self, s: ColumnDot) -> None:
        """Print the right operand as a lambda that returns one for its tiles of columns, then the call."""
        self._open("{")
        *outer, tile, inner = _nested(s.right)
        first = [] if inner.start == 0 else [Index(inner.axis, inner.start + index_symbol("k"))]
        axes = tile.axis, outer[0].axis if outer else "step", "k" if first else inner.axis
        column, step, k = (f"const int64_t {identifier(axis)}" for axis in axes)
        self._open(f"const auto values = [&]({column}, {step}, const auto lanes) LANEWISE {{")
        self._run(statement for loop in outer for statement in loop.body if not isinstance(statement, Loop))
        self.tiles.append(tile)
        self._run(statement for statement in tile.body if not isinstance(statement, Loop))
        self._open(f"return [=]({k}, auto* values) LANEWISE {{")
        self._run([*first, *inner.body])
        for i, value in enumerate(s.values):
            self.line(f"values[{i}] = {identifier(value)};")
        self._close("};")
        self._close("};")
        streams = self._streams(inner, inner)
        by_step = str(not streams).lower()
        line = self._print_fetch(streams or self._streams(tile, tile), (column, step, k), first if streams else [])
        self.tiles.pop()
        left = MEMORY_TYPES[self.buffers[s.lefts[0].buffer].dtype]
        lefts = ", ".join(f"{{{matrix(m, m.row_stride, m.column_stride)}}}" for m in s.lefts)
        self.line(f"const Left<{left}> lefts[] = {{{lefts}}};")
        extent = [tile.start, tile.stop, _count(outer[0]) if outer else 1, _count(inner)]
        arguments = [matrix(s.target, s.target.row_stride), "lefts", "values", "fetch", *map(CPP.print, extent)]
        options = f"{s.rows}, {tile.step}, {len(s.values)}, {line}, {by_step}, {str(s.adds).lower()}"
        self.line(f"dot_columns<{options}>({', '.join(arguments)});")
        self._close()

    def _right(self, s: ComputedDot, around: list[Loop], tile: Loop, at: list[str]) -> None:
        """Print the right operand: ``values(column, step)`` returns a function that fills tiles at k, or a group."""
        self._open(f"const auto values = [&]({at[0]}, {at[1]}) LANEWISE {{")
        for loop in around:
            self._run(statement for statement in loop.body if not isinstance(statement, Loop))
        lookups = [s for s in tile.body if isinstance(s, TableLookup)]
        for lookup in {s.value: s for s in lookups}.values():
            self._table(lookup)
        fill = "const auto fill =" if isinstance(s, GroupedDot) else "return"
        self._open(f"{fill} [=]({at[2]}, const auto lanes, auto* values) LANEWISE {{")
        self.tiles.append(tile)
        self._run(tile.body)
        for i, value in enumerate(s.values):
            self.line(f"values[{i}] = {identifier(value)};")
        self.tiles.pop()
        self._close("};")
        if isinstance(s, GroupedDot):
            code, (low, high) = scalar_type(self.kinds[s.values[0]].dtype), s.bounds
            scale, zero = (identifier(str(name)) for name in (s.scale, s.zero))
            self.line(f"return group<{code}, {low}, {high}>(fill, {scale}, {zero});")
        self._close("};")

    def _fetch(self, column: Loop, tile: Loop, at: Sequence[str]) -> tuple[int, int]:
        """Print the prefetch of a tile's loads as a lambda.

        Returns:
            the elements that one prefetch serves, and how many columns ahead to prefetch.
        """
        self.tiles.append(tile)
        loads = self._streams(tile, column)
        served = self._print_fetch(loads, at)
        self.tiles.pop()
        lanes, length = int(tile.step), int(tile.stop)
        steps = [self.buffers[x.buffer].dtype.bytes * stride_along(x.offset, column.axis) for x in loads]
        longest = max((int(step) for step in steps if step.is_Integer), default=0)
        ahead = AHEAD_BYTES // longest if longest > 0 else 0
        return max(min(served, length // lanes * lanes), lanes), ahead

    def _streams(self, loop: Loop, rows: Loop) -> list[Load]:
        """Return the loads of a loop's own body that are contiguous along the open tile loop.

        Those of rows that are looked up are left out, as it is not known where the next ones are.
        """
        loads = [load for load in loop.body if isinstance(load, Load) and self.strides_one(load)]
        found = {statement.result for statement in rows.body}
        return [load for load in loads if found.isdisjoint(map(str, load.offset.free_symbols))]

    def _print_fetch(self, loads: list[Load], at: Sequence[str], first: Sequence[Statement] = ()) -> int:
        """Print the prefetch of loads, behind some statements, as a lambda; return the elements it serves."""
        self._open(f"const auto fetch = [&]({', '.join(at)}) LANEWISE {{")
        self._run(first)
        for load in loads:
            self.prefetch(load.buffer, load.offset)
        self._close("};")
        return 64 // max((self.buffers[load.buffer].dtype.bytes for load in loads), default=4)

    def _table(self, s: TableLookup) -> None:
        """Print a table, as a lambda and the registers that it fills: equal for all tiles of the loop around it."""
        loop, table = s.entries, f"table_{identifier(s.value)}"
        self._open(f"const auto {table} = [&](const int64_t {identifier(loop.axis)}, const auto lanes) LANEWISE {{")
        self.tiles.append(loop)
        self._run(loop.body)
        self.tiles.pop()
        self.line(f"return {identifier(s.value)};")
        self._close("};")
        for i, start in enumerate(range(0, count := int(loop.stop), int(loop.step))):
            left = count - start
            lanes = "All{}" if left >= loop.step else f"Part{{{left}}}"
            self.line(f"const auto {table}_{i} = {table}({start}, {lanes});")
        if s.shift is not None:
            self.line(f"const Pairs {table}_pairs = paired({table}_0.v, {table}_0.v);")

    @_statement.register
    def _table_lookup(self, s: TableLookup) -> None:
        """Print a look-up in the registers of a table."""
        if s.shift is not None:
            table = f"table_{identifier(s.value)}_pairs"
            self.line(f"const Pairs {identifier(s.dst)} = look_up<{s.shift}>({table}, {identifier(s.index)});")
            return
        kind, registers = self.kinds[s.value], -(-int(s.entries.stop) // int(s.entries.step))
        tables = [f"table_{identifier(s.value)}_{i}" for i in range(registers)]
        arguments = ", ".join([*tables, identifier(s.index)])
        self.line(f"const {self._define(s.dst, kind.dtype, kind.lanes)} = permute({arguments});")

    def _carried(self, loop: Loop) -> dict[str, str]:
        """Return the tile accumulators declared outside the loop that it updates, with their operation."""
        updates = [s for s in walk(loop.body) if isinstance(s, Update) and s.acc in self.kinds]
        return dict(sorted((s.acc, s.op) for s in updates if self.kinds[s.acc].lanes))

    def _partials(self, axis: str, step: int, carried: dict[str, str], partials: int) -> None:
        """Print a loop over several tiles at a time, each with its own accumulators, to hide the latency of updates."""
        names = {a: [identifier(a), *(f"{identifier(a)}_{i}" for i in range(1, partials))] for a in carried}
        self._open(f"if ({axis} + {partials * step} <= end) {{")
        for a, op in carried.items():
            identity = self.identity(op, self.kinds[a].dtype)
            self.line(f"{self.kinds[a].text} {', '.join(f'{n}({identity})' for n in names[a][1:])};")
        self._open(f"for (; {axis} + {partials * step} <= end; {axis} += {partials * step}) {{")
        for i in range(partials):
            start = axis if i == 0 else f"{axis} + {i * step}"
            self.line(f"tile({start}, All{{}}{''.join(f', {names[a][i]}' for a in carried)});")
        self._close()
        for a, op in carried.items():
            kind = self.kinds[a]
            level = names[a]
            while len(level) > 1:
                pairs = zip(level[::2], level[1::2], strict=True)
                level = [print_operation(COMBINE[op], [_group(x), _group(y)], kind.dtype) for x, y in pairs]
            self.line(f"{identifier(a)} = {level[0]};")
        self._close()


def _is_contiguous(dot: ComputedDot) -> bool:
    """Return whether each left operand is contiguous along k; blocks of few rows among many may not be."""
    return not dot.steps and all(left.column_stride == 1 for left in dot.lefts)


def _accumulator_count(loop: Loop, carried: int) -> int:
    """Return the number of copies of the accumulators: as many as fit into registers, where the body is light."""
    if any(isinstance(s, Loop) for s in loop.body):
        return 1
    cost = sum(OPS[s.op].cost if isinstance(s, Compute) and s.op in OPS else 1 for s in loop.body)
    return 1 if cost > LIGHT_COST or not carried else {1: PARTIALS, 2: PARTIALS, 3: 2, 4: 2}.get(carried, 1)


def _nested(loop: Loop) -> list[Loop]:
    """Return a loop and those that each end the body of the one before."""
    loops = [loop]
    while isinstance(inner := loops[-1].body[-1], Loop):
        loops.append(inner)
    return loops


def _touched(body: Iterable[Statement]) -> set[str]:
    """Return the names of the buffers that statements read or write."""
    return {buffer for s in walk(body) for buffer in (*s.loads, *s.stores)}


def _on_stack(buffer: Buffer) -> bool:
    return isinstance(buffer.numel, int) and buffer.numel * buffer.dtype.bytes <= STACK_BYTES


def _rectangular(nest: list[Loop]) -> int:
    """Return the number of nested loops whose bounds do not depend on each other."""
    axes: set[str] = set()
    for i, loop in enumerate(nest):
        bounds = sympy.sympify(loop.start).free_symbols | sympy.sympify(loop.stop).free_symbols
        if axes & {str(s) for s in bounds}:
            return i
        axes.add(loop.axis)
    return len(nest)


def _is_grid(statement: Statement) -> bool:
    return isinstance(statement, Loop) and statement.kind == "grid"


def _count(loop: Loop) -> Size:
    """Return the number of iterations of a loop."""
    return simplify(sympy.floor((sympy.sympify(loop.stop) - loop.start + loop.step - 1) / sympy.sympify(loop.step)))


def _is_parallel(kernel: Kernel) -> str:
    """Return the condition to use threads: ``true``, ``false``, or an expression over symbols."""
    if not any(_is_grid(s) for s in kernel.body):
        return "false"
    if isinstance(kernel.work, int):
        return "true" if kernel.work >= PARALLEL_WORK else "false"
    return f"{CPP.print(kernel.work)} >= {PARALLEL_WORK}"


def _group(text: str) -> str:
    return f"({text})" if " " in text else text


def _one_line(text: str) -> str:
    # A backslash at the end would continue the comment.
    return text.replace("\n", " ").rstrip().rstrip("\\")
