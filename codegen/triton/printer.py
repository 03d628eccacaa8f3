"""Tile program to the text of a Triton kernel, readable and straight-line wherever one tile covers the range."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import sympy

from fusec.codegen.kernel import (
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
    walk,
)
from fusec.codegen.triton.arithmetic import NAMES, combined, expression, filled, identity, literal, reduced
from fusec.codegen.triton.prelude import FUNCTIONS, prelude
from fusec.codegen.triton.signature import TRITON, blocks, grid_loops, identifier, lanes_of, parameters, trips, wide
from fusec.errors import ScheduleError
from fusec.ir.types import F32, F64, I32, I64, DType, Size, accumulation, simplify


def print_kernel(kernel: Kernel, interpreted: bool = False) -> str:
    """The module text of a kernel: imports, device functions, and one ``@triton.jit`` function of its name.

    Its parameters are a pointer for each buffer, the symbols, and the blocks (with defaults).

    Args:
        kernel: what to print.
        interpreted: for Triton's interpreter, where buffers of bf16 are passed as f32.

    Raises:
        ScheduleError: for scratch memory, tiles in two dimensions, or an operation without a Triton form.
    """
    lines = list(_Printer(kernel).lines())
    body = "\n".join(lines)
    code = "\n".join(line for line in lines if not line.startswith("#"))
    called = {name for name in FUNCTIONS if re.search(rf"(?<![.\w]){name}\b", code)}
    return f"import triton\nimport triton.language as tl\n\n\n{prelude(called, interpreted)}{body}\n"


def _covers(loop: Loop) -> bool:
    """Whether the first tile holds the whole range."""
    ends = loop.stop.args if isinstance(loop.stop, sympy.Min) else (loop.stop,)
    lengths = [simplify(end - loop.start) for end in ends]
    return any(isinstance(n, int) and n <= loop.step for n in lengths)


def _exact(loop: Loop) -> bool:
    """Whether every tile is full."""
    length = simplify(loop.stop - loop.start) if not isinstance(loop.stop, sympy.Min) else None
    return isinstance(length, int) and length % loop.step == 0


@dataclass(frozen=True)
class _Tile:
    """The tile loop that a statement stands in."""

    axis: str
    block: str
    mask: str
    """Name of the lanes within the range; empty where all are."""
    whole: bool
    """Whether it holds the whole range."""


class _Printer:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.buffers: dict[str, Buffer] = {b.name: b for b in kernel.buffers}
        self.blocks = {block.lanes: block.name for block in blocks(kernel)}
        self.wide = wide(kernel)
        self.accumulators: dict[str, Init] = {}
        self.untouched: set[str] = set()
        """Accumulators declared in the present straight run and not updated yet; their first update declares them."""
        self.ranges: dict[str, tuple[Loop, _Tile]] = {}
        """Lanes defined in the present straight run, by axis."""
        self.tiles: set[str] = set()
        """Names that stand for a tile; all others are scalars."""
        for buffer in kernel.buffers:
            if buffer.role in ("scratch", "shared"):
                raise ScheduleError(
                    f"kernel {kernel.name} needs {buffer.role} memory {buffer.name}",
                    why="a Triton program has no memory of its own", fix="schedule the region with whole rows",
                )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The function, its comment included."""
        yield from self._comment()
        yield "@triton.jit"
        signature = [*parameters(self.kernel), *(f"{n}: tl.constexpr = {k}" for k, n in self.blocks.items())]
        yield f"def {identifier(self.kernel.name)}({', '.join(signature)}):"
        grid = grid_loops(self.kernel)
        body = grid[-1].body if grid else self.kernel.body
        yield from _indent(self._programs(grid))
        yield from _indent(self._run(body, None))

    def _comment(self) -> Iterator[str]:
        yield from (f"# {line}" for line in self.kernel.formula.splitlines())
        places = dict.fromkeys(str(source) for source in self.kernel.sources)
        yield from (f"#   {place}" for place in places if place)

    def _programs(self, grid: tuple[Loop, ...]) -> Iterator[str]:
        """The axes of the grid from the one program number, the innermost fastest."""
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

    def _run(self, body: tuple[Statement, ...], tile: _Tile | None) -> Iterator[str]:
        for statement in body:
            if isinstance(statement, Loop):
                yield from self._loop(statement, tile)
            elif isinstance(statement, When):
                yield from self._nested(f"if {identifier(statement.condition)}:", (), statement.body, tile)
            else:
                yield from self._declare(self._touched(statement))
                yield getattr(self, f"_{type(statement).__name__.lower()}")(statement, tile) or ""

    def _declare(self, names: set[str]) -> Iterator[str]:
        """Fill accumulators whose first update does not declare them."""
        for name in sorted(names & self.untouched):
            yield self._identity(self.accumulators[name])
            self.untouched.discard(name)

    def _touched(self, statement: Statement) -> set[str]:
        """Names that a statement reads, other than the accumulator of an update."""
        if isinstance(statement, Update):
            return {o for o in statement.values if isinstance(o, str)}
        if isinstance(statement, Compute):
            return {o for o in statement.operands if isinstance(o, str)}
        if isinstance(statement, Fold):
            return {statement.src}
        return {statement.value} if isinstance(statement, Store) and isinstance(statement.value, str) else set()

    def _check(self, statement: Statement, tile: _Tile | None) -> str:
        raise ScheduleError(f"kernel {self.kernel.name} checks places", why="a program on a GPU cannot raise an error")

    def _loop(self, loop: Loop, tile: _Tile | None) -> Iterator[str]:
        if loop.kind == "grid":
            raise ScheduleError(f"kernel {self.kernel.name} has a grid loop inside another statement")
        if loop.kind == "tile":
            if tile is not None:
                raise ScheduleError(f"kernel {self.kernel.name} has tiles in two dimensions")
            yield from self._tiles(loop)
            return
        yield from self._repeated(loop, f"range({self._bounds(loop)})", identifier(loop.axis), tile, ())

    def _bounds(self, loop: Loop) -> str:
        texts = [TRITON.print(loop.start), TRITON.print(loop.stop)]
        step = self.blocks[loop.step] if loop.kind == "tile" else TRITON.print(loop.step)
        return ", ".join([*texts, step] if step != "1" else texts)

    def _tiles(self, loop: Loop) -> Iterator[str]:
        axis, block = identifier(loop.axis), self.blocks[lanes_of(loop)]
        tile = _Tile(axis, block, "" if _exact(loop) else f"mask_{axis}", _covers(loop))
        lanes = f"tl.arange(0, {block})" + (".to(tl.int64)" if self.wide else "")
        limit = f"mask_{axis} = {axis} < {TRITON.print(loop.stop, True)}"
        if not tile.whole:
            first = f"{axis}_start"
            head = [f"{axis} = {first} + {lanes}", *([limit] if tile.mask else [])]
            yield from self._repeated(loop, f"range({self._bounds(loop)})", first, tile, head)
            return
        known = self.ranges.get(axis)
        if known is None or replace(known[0], body=()) != replace(loop, body=()):
            yield f"{axis} = {lanes}" if loop.start == 0 else f"{axis} = {TRITON.print(loop.start)} + {lanes}"
            if tile.mask:
                yield limit
            self.ranges[axis] = (loop, tile)
        yield from self._run(loop.body, tile)

    def _repeated(
        self, loop: Loop, over: str, axis: str, tile: _Tile | None, head: "list[str] | tuple[()]"
    ) -> Iterator[str]:
        counter, lines = axis, list(head)
        if self.wide and loop.kind == "serial" and not sympy.sympify(loop.stop).free_symbols:
            counter = f"{axis}_step"
            lines.append(f"{axis} = tl.cast({counter}, tl.int64)")
        yield from self._nested(f"for {counter} in {over}:", lines, loop.body, tile)

    def _nested(
        self, opening: str, head: Sequence[str], body: tuple[Statement, ...], tile: _Tile | None
    ) -> Iterator[str]:
        """A part that runs several times, or perhaps not: what it changes has a value before."""
        updated = {s.acc for s in walk(body) if isinstance(s, Update)}
        read = {name for s in walk(body) for name in self._touched(s)}
        yield from self._declare(updated | read)
        yield opening
        outer, self.ranges = self.ranges, {}
        yield from _indent(iter(head))
        yield from _indent(self._run(body, tile))
        self.ranges = outer

    def _pointer(self, buffer: str, offset: sympy.Expr) -> str:
        return f"{buffer}_ptr" if offset == 0 else f"{buffer}_ptr + {TRITON.print(offset)}"

    def _is_tile(self, offset: sympy.Expr, tile: _Tile | None) -> bool:
        return tile is not None and tile.axis in {identifier(s.name) for s in sympy.sympify(offset).free_symbols}

    def _mark(self, dst: str, is_tile: bool) -> None:
        (self.tiles.add if is_tile else self.tiles.discard)(dst)

    def _load(self, load: Load, tile: _Tile | None) -> str:
        is_tile = self._is_tile(load.offset, tile)
        self._mark(load.dst, is_tile)
        other = f", mask={tile.mask}, other=0" if tile and tile.mask and is_tile else ""
        dtype = self.buffers[load.buffer].dtype
        compute = accumulation(dtype)
        widened = "" if compute == dtype else f".to({NAMES[compute.name]})"
        return f"{identifier(load.dst)} = tl.load({self._pointer(load.buffer, load.offset)}{other}){widened}"

    def _compute(self, compute: Compute, tile: _Tile | None) -> str:
        self._mark(compute.dst, any(o in self.tiles for o in compute.operands if isinstance(o, str)))
        return f"{identifier(compute.dst)} = {expression(compute, identifier)}"

    def _index(self, index: Index, tile: _Tile | None) -> str:
        value = sympy.sympify(index.value)
        self._mark(index.dst, self._is_tile(value, tile))
        if value.is_Integer:
            return f"{identifier(index.dst)} = {filled(int(value), I64)}"
        return f"{identifier(index.dst)} = tl.cast({TRITON.print(value)}, tl.int64)"

    def _init(self, init: Init, tile: _Tile | None) -> str:
        self.accumulators[init.dst] = init
        self.untouched.add(init.dst)
        self._mark(init.dst, init.tile)
        return ""

    def _identity(self, init: Init) -> str:
        shape = f"({self._block_of(init.dst)},)" if init.tile else "()"
        return f"{identifier(init.dst)} = {filled(identity(init.op, init.dtype), init.dtype, shape)}"

    def _block_of(self, accumulator: str) -> str:
        """The block of the tile loop in which an accumulator is updated."""
        for loop in walk(self.kernel.body):
            if isinstance(loop, Loop) and loop.kind == "tile":
                if any(getattr(s, "acc", getattr(s, "dst", "")) == accumulator for s in walk(loop.body)):
                    return self.blocks[lanes_of(loop)]
        raise ScheduleError(f"accumulator {accumulator} of kernel {self.kernel.name} is updated in no tile loop")

    def _update(self, update: Update, tile: _Tile | None) -> str:
        init, acc = self.accumulators[update.acc], identifier(update.acc)
        texts = [filled(o.value, init.dtype) if isinstance(o, Constant) else identifier(o) for o in update.values]
        value = " * ".join(texts)
        is_tile = any(o in self.tiles for o in update.values if isinstance(o, str))
        if tile is not None and tile.mask and init.tile and not self._is_partial(update):
            value, is_tile = self._valid(value, update.op, init.dtype, tile), True
        if update.acc in self.untouched and is_tile == init.tile:
            self.untouched.discard(update.acc)
            return f"{acc} = {value}"
        first = "".join(f"{line}\n" for line in self._declare({update.acc}))
        return f"{first}{acc} = {combined(update.op, init.dtype, acc, value)}"

    def _is_partial(self, update: Update) -> bool:
        """Whether a partial result of the same fold is added, which holds its identity in lanes beyond the end."""
        parts = [self.accumulators[o] for o in update.values if isinstance(o, str) and o in self.accumulators]
        return len(parts) == len(update.values) == 1 and parts[0].tile and parts[0].op == update.op

    def _valid(self, value: str, op: str, dtype: DType, tile: _Tile) -> str:
        """A tile whose lanes beyond the end hold what does not change the result of ``op``."""
        neutral = identity(op, dtype)
        text = literal(neutral, dtype) if dtype in (F32, F64, I32, I64) else filled(neutral, dtype)
        return f"tl.where({tile.mask}, {value}, {text})"

    def _fold(self, fold: Fold, tile: _Tile | None) -> str:
        src = identifier(fold.src)
        self._mark(fold.dst, False)
        if fold.src not in self.accumulators and tile is not None:
            if not tile.whole:
                raise ScheduleError(
                    f"kernel {self.kernel.name} folds {fold.src} inside a loop over several tiles",
                    why="each fold would see a part of the row", fix="fold an accumulator after the loop",
                )  # fmt: skip
            if fold.src not in self.tiles:
                src = f"tl.broadcast_to({src}, ({tile.block},))"
            src = self._valid(src, fold.op, fold.dtype, tile) if tile.mask else src
        return f"{identifier(fold.dst)} = {reduced(fold.op, fold.dtype, src)}"

    def _store(self, store: Store, tile: _Tile | None) -> str:
        mask = f", mask={tile.mask}" if tile and tile.mask and self._is_tile(store.offset, tile) else ""
        pointer, value = self._pointer(store.buffer, store.offset), self._stored(store.value, store.buffer)
        return f"tl.store({pointer}, {value}{mask})"

    def _stored(self, value: Operand, buffer: str) -> str:
        dtype = self.buffers[buffer].dtype
        if isinstance(value, Constant):
            return filled(value.value, accumulation(dtype))
        cast = "" if accumulation(dtype) == dtype else f".to({buffer}_ptr.dtype.element_ty)"
        return f"{identifier(value)}{cast}"


def _indent(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield from (f"    {part}" for part in line.splitlines() if part)
