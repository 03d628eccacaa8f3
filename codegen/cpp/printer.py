"""A tile program as C++ text: the frame around it, grid loops as OpenMP loops, tiles as lambdas over their lanes."""

from collections.abc import Iterable

import sympy

from fusec.codegen.cpp.expressions import CPP, MEMORY_TYPES, identifier, scalar_type
from fusec.codegen.cpp.operations import print_operation
from fusec.codegen.cpp.statements import COMBINE, Straight
from fusec.codegen.kernel import Buffer, Check, Compute, Dot, Kernel, Load, Loop, Statement, Store, Update, When, walk
from fusec.errors import BuildError
from fusec.ir import types as t
from fusec.ir.ops import OPS

PARALLEL_WORK = 65536
"""Scalar operations below which waking the threads (a few µs) costs more than they save."""
STACK_BYTES = 65536
"""Scratch up to this size lies on the stack; beyond it each thread allocates its own."""
PARTIALS = 4
"""Independent accumulators of a reduction loop: an addition takes about 4 cycles, one starts every cycle."""
LIGHT_COST = 12
"""Cost of a loop body above which its own arithmetic hides the latency of the update."""


def print_kernel(kernel: Kernel) -> str:
    """The translation unit that defines ``kernel.name``."""
    return _Printer(kernel).print()


class _Printer(Straight):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.reports = any(isinstance(s, Check) for s in walk(kernel.body))
        """Whether it returns what ``out_of_range`` makes of a failed check, 0 where all is well."""

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
            self.line("return 0;")
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
            self.line(f"{element}*{restrict} const {identifier(b.name)} = static_cast<{element}*>(buffers[{i}]);")
        for i, symbol in enumerate(self.kernel.symbols):
            value = f"symbols[{i}]"
            if symbol == "parts" and (pays := self._threads_pay()) != "true":
                # Alone, nobody repeats for others what comes before the blocks that threads share.
                value = "1" if pays == "false" else f"{pays} ? {value} : 1"
            self.line(f"const int64_t {identifier(symbol)} = {value};")

    # ------------------------------------------------------------------ loops

    def _statement(self, statement: Statement) -> None:
        if isinstance(statement, Loop):
            {"grid": self._grid, "serial": self._serial, "tile": self._tile}[statement.kind](statement)
        elif isinstance(statement, When):
            self._when(statement)
        else:
            self.straight(statement)

    def _grid(self, loop: Loop) -> None:
        nest = [loop]
        while len(nest[-1].body) == 1 and isinstance(inner := nest[-1].body[0], Loop) and inner.kind == "grid":
            nest.append(inner)
        scratch = [b for b in self.kernel.buffers if b.role == "scratch"]
        large = [b for b in scratch if not _on_stack(b)]
        condition = self._parallel_condition()
        collapse = f" collapse({_rectangular(nest)})" if _rectangular(nest) > 1 else ""
        if large:
            self.line("{" if condition is None else f"#pragma omp parallel{condition}")
            if condition is not None:
                self.line("{")
            self.depth += 1
            self._declare(large)
            if condition is not None:
                self.line(f"#pragma omp for{collapse} schedule(static)")
        elif condition is not None:
            self.line(f"#pragma omp parallel for{collapse} schedule(static){condition}")
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
                self.line(f"alignas(64) {element} {name}[{max(1, int(b.numel))}];")
            else:
                self.line(f"Scratch<{element}> {name}_memory({CPP.print(b.numel)});")
                self.line(f"{element}* const {name} = {name}_memory.data;")

    def _parallel_condition(self) -> str | None:
        """The ``if`` clause; None where threads never pay."""
        pays = self._threads_pay()
        return {"true": "", "false": None}.get(pays, f" if ({pays})")

    def _threads_pay(self) -> str:
        """Whether there is work for threads: ``true``, ``false``, or what only a call knows."""
        work = self.kernel.work
        if isinstance(work, int):
            return "true" if work >= PARALLEL_WORK else "false"
        return f"{CPP.print(work)} >= {PARALLEL_WORK}"

    def _open(self, loop: Loop) -> None:
        axis = identifier(loop.axis)
        step = f"{axis}++" if loop.step == 1 else f"{axis} += {CPP.print(loop.step)}"
        self.line(f"for (int64_t {axis} = {CPP.print(loop.start)}; {axis} < {CPP.print(loop.stop)}; {step}) {{")
        self.depth += 1

    def _close(self, text: str = "}") -> None:
        self.depth -= 1
        self.line(text)

    def _serial(self, loop: Loop) -> None:
        self._open(loop)
        for statement in loop.body:
            self._statement(statement)
        self._close()

    def _when(self, statement: When) -> None:
        if self.lanes_of(statement.condition):
            raise BuildError("a tile decides whether statements run", where=self.kernel.name)
        self.line(f"if ({identifier(statement.condition)}) {{")
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
        self.line("{")
        self.depth += 1
        self.line(f"const auto tile = [&](const int64_t {axis}, const auto lanes{extra}) LANEWISE {{")
        self.tiles.append(loop)
        self.depth += 1
        for statement in loop.body:
            self._statement(statement)
        self._close("};")
        self.tiles.pop()
        self.line(f"const int64_t end = {CPP.print(loop.stop)};")
        self.line(f"int64_t {axis} = {CPP.print(loop.start)};")
        same = "".join(f", {identifier(a)}" for a in carried)
        partials = _partials_that_pay(loop, len(carried))
        if partials > 1:
            self._partials(axis, step, carried, partials)
        self.line(f"for (; {axis} + {step} <= end; {axis} += {step}) tile({axis}, All{{}}{same});")
        self.line(f"if ({axis} < end) tile({axis}, Part{{end - {axis}}}{same});")
        self._close()

    def _carried(self, loop: Loop) -> dict[str, str]:
        """Tile accumulators that the loop updates and that live outside of it, with their operation."""
        updates = [s for s in walk(loop.body) if isinstance(s, Update) and s.acc in self.kinds]
        return dict(sorted((s.acc, s.op) for s in updates if self.kinds[s.acc].lanes))

    def _partials(self, axis: str, step: int, carried: dict[str, str], partials: int) -> None:
        """Several tiles at a time, each with accumulators of its own: hides the latency of the update."""
        names = {a: [identifier(a), *(f"{identifier(a)}_{i}" for i in range(1, partials))] for a in carried}
        self.line(f"if ({axis} + {partials * step} <= end) {{")
        self.depth += 1
        for a, op in carried.items():
            identity = self.identity(op, self.kinds[a].dtype)
            self.line(f"{self.kinds[a].text} {', '.join(f'{n}({identity})' for n in names[a][1:])};")
        self.line(f"for (; {axis} + {partials * step} <= end; {axis} += {partials * step}) {{")
        self.depth += 1
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
    return isinstance(buffer.numel, int) and buffer.numel * buffer.dtype.bytes <= STACK_BYTES


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
