"""A tile program as the text of a Triton kernel: signature, grid and loops; no loop where one tile covers the range."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import singledispatchmethod

import sympy

from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.kernel import Accumulation, DotTiles, Kernel, Loop, Statement, Update, When, index_symbol, walk
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.prelude import prelude
from fusec.codegen.triton.signature import (
    TRITON,
    descriptors,
    grid_loops,
    identifier,
    lanes_of,
    num_warps,
    parameters,
    trips,
)
from fusec.codegen.triton.statements import Statements, Tile
from fusec.codegen.triton.tiles import covers, exact, limit_of
from fusec.errors import ScheduleError
from fusec.ir.types import Size, simplify


def print_kernel(kernel: Kernel, dependent: bool = False) -> str:
    """Return the module of a kernel: imports, device functions, and one ``@triton.jit`` function for each grid.

    The last one has the kernel's name. Their parameters are a pointer for each buffer, the tensor descriptors, the
    symbols, and the blocks (with defaults).

    Args:
        kernel: the kernel.
        dependent: for programmatic dependent launch, where programs may start before the preceding kernel has ended.

    Raises:
        ScheduleError: for scratch memory, or an operation without a Triton form.
    """
    lines = [list(_Printer(grid, dependent).lines()) for grid in grids(kernel)]
    body = "\n\n\n".join(map("\n".join, lines))
    code = "\n".join(line for part in lines for line in part if not line.startswith("#"))
    return f"import triton\nimport triton.language as tl\n\n\n{prelude(code)}{body}\n"


class _Printer(Statements):
    def __init__(self, kernel: Kernel, dependent: bool) -> None:
        super().__init__(kernel)
        self.dependent = dependent
        self.ranges: dict[str, tuple[Loop, Tile]] = {}
        """Ranges defined in the current basic block, by axis."""

    def lines(self) -> Iterator[str]:
        """Yield the function, with its comment."""
        yield from self._comment()
        yield "@triton.jit"
        names, symbols = parameters(self.kernel), len(self.kernel.buffers) + len(descriptors(self.kernel))
        # By default Triton specializes a small integer to 32 bits, and products of such wrap around.
        signature = [*names[:symbols], *(f"{name}: tl.int64" for name in names[symbols:])]
        signature += [f"{n}: tl.constexpr = {k}" for k, n in self.blocks.items()]
        yield f"def {identifier(self.kernel.name)}({', '.join(signature)}):"
        grid = grid_loops(self.kernel)
        body = grid[-1].body if grid else self.kernel.body
        if self.dependent:
            # From here on all earlier kernels have ended, so dependents need only wait for this one.
            yield from _indent(iter(("tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()")))
        yield from _indent(self._programs(grid))
        yield from _indent(self._run(body, ()))

    def _comment(self) -> Iterator[str]:
        yield from (f"# {line}" for line in self.kernel.formula.splitlines())
        sources = dict.fromkeys(map(str, self.kernel.sources))
        yield from (f"#   {source}" for source in sources if source)
        if self.kernel.config != KernelConfig():
            yield f"# {replace(self.kernel.config, warps=num_warps(self.kernel))}"

    def _programs(self, grid: tuple[Loop, ...]) -> Iterator[str]:
        """Yield the axes of the grid, computed from one program id, the innermost fastest."""
        if not grid:
            return
        widened = ".to(tl.int64)" if self.wide else ""
        number = f"tl.program_id(0){widened}"
        if len(grid) > 1:
            yield f"pid = {number}"
            number = "pid"
        inner: Size = 1
        lines = []
        for depth, loop in reversed(list(enumerate(grid))):
            count = trips(loop)
            own = number if inner == 1 else f"{number} // {TRITON.print(inner, True)}"
            if depth:
                own = f"{own} % {TRITON.print(count, True)}"
            if loop.step != 1:
                own = f"({own})" if depth else own
                own = f"{own} * {TRITON.print(loop.step, True)}"
            start = "" if loop.start == 0 else f"{TRITON.print(loop.start)} + "
            lines.append(f"{identifier(loop.axis)} = {start}{own}")
            inner = simplify(inner * count)
        yield from reversed(lines)

    def _run(self, body: tuple[Statement, ...], tiles: tuple[Tile, ...]) -> Iterator[str]:
        for statement in body:
            yield from self._statement(statement, tiles)

    @singledispatchmethod
    def _statement(self, statement: Statement, tiles: tuple[Tile, ...]) -> Iterator[str]:
        yield from self.declare(statement.reads)
        yield self.line(statement, tiles)

    @_statement.register
    def _when(self, when: When, tiles: tuple[Tile, ...]) -> Iterator[str]:
        yield from self._nested(f"if {identifier(when.condition)}:", (), when.body, tiles)

    @_statement.register
    def _loop(self, loop: Loop, tiles: tuple[Tile, ...]) -> Iterator[str]:
        if loop.kind == "grid":
            raise ScheduleError(f"kernel {self.kernel.name} has a grid loop inside another statement")
        if loop.kind == "tile":
            yield from self._tiles(loop, tiles)
            return
        yield from self._repeated(loop, f"range({self._bounds(loop)})", identifier(loop.axis), tiles, ())

    def _run_ahead(self, loop: Loop) -> str:
        """Return the range of a tile loop. Triton pipelines loops with a matrix unit's products; others need stages."""
        stages, body = self.kernel.config.stages, list(walk(loop.body))
        multiplies = self.kernel.kind == "contraction" and any(
            isinstance(s, Update) and len(s.values) > 1 for s in body
        )
        if stages and multiplies and not any(isinstance(s, DotTiles) for s in body):
            return f"tl.range({self._bounds(loop)}, num_stages={stages})"
        return f"range({self._bounds(loop)})"

    def _bounds(self, loop: Loop) -> str:
        texts = [TRITON.print(loop.start), TRITON.print(loop.stop)]
        step = self.blocks[loop.step] if loop.kind == "tile" else TRITON.print(loop.step)
        return ", ".join([*texts, step] if step != "1" else texts)

    def _tiles(self, loop: Loop, around: tuple[Tile, ...]) -> Iterator[str]:
        axis, block = identifier(loop.axis), self.blocks[lanes_of(loop)]
        whole = covers(loop)
        first = loop.start if whole else index_symbol(f"{loop.axis}_start")
        tile = Tile(loop.axis, block, first, "" if exact(loop) else f"mask_{axis}", whole)
        self.tiles |= dict.fromkeys((loop.axis, *filter(None, [tile.mask])), (loop.axis,))
        lanes = f"tl.arange(0, {block})" + (".to(tl.int64)" if self.wide else "")
        limit = f"mask_{axis} = {axis} < {TRITON.print(limit_of(loop), True)}"
        if not tile.whole:
            counter = TRITON.print(first)
            head = [f"{axis} = {counter} + {lanes}", *([limit] if tile.mask else [])]
            yield from self._repeated(loop, self._run_ahead(loop), counter, (*around, tile), head)
            return
        known = self.ranges.get(axis)
        if known is None or replace(known[0], body=()) != replace(loop, body=()):
            yield f"{axis} = {lanes}" if loop.start == 0 else f"{axis} = {TRITON.print(loop.start)} + {lanes}"
            if tile.mask:
                yield limit
            self.ranges[axis] = (loop, tile)
        yield from self._run(loop.body, (*around, tile))

    def _repeated(
        self, loop: Loop, over: str, axis: str, tiles: tuple[Tile, ...], head: Sequence[str]
    ) -> Iterator[str]:
        counter, lines = axis, list(head)
        if self.wide and loop.kind == "serial" and not sympy.sympify(loop.stop).free_symbols:
            counter = f"{axis}_step"
            lines.append(f"{axis} = tl.cast({counter}, tl.int64)")
        yield from self._nested(f"for {counter} in {over}:", lines, loop.body, tiles)

    def _nested(
        self, opening: str, head: Sequence[str], body: tuple[Statement, ...], tiles: tuple[Tile, ...]
    ) -> Iterator[str]:
        """Print a block that runs any number of times: accumulators that it uses are initialized before."""
        updated = {s.acc for s in walk(body) if isinstance(s, Accumulation)}
        read = {name for s in walk(body) for name in s.reads}
        yield from self.declare(updated | read)
        yield opening
        outer, self.ranges = self.ranges, dict(self.ranges)
        lines = list(self._run(body, tiles))
        for line in reversed(head):
            if _mentions(lines, line.split(" = ")[0]):
                lines.insert(0, line)
        yield from _indent(iter(lines))
        self.ranges = outer


def _mentions(lines: Iterable[str], name: str) -> bool:
    return any(re.search(rf"\b{name}\b", line) for line in lines)


def _indent(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield from (f"    {part}" for part in line.splitlines() if part)
