"""Tile program to the text of a Triton kernel, readable and straight-line wherever one tile covers the range."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import sympy

from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.kernel import (
    Assign,
    Buffer,
    Check,
    ClampIndex,
    Compute,
    Constant,
    DotTiles,
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
    index_symbol,
    walk,
)
from fusec.codegen.triton.arithmetic import (
    NAMES,
    combined,
    expression,
    filled,
    identity,
    narrowed,
    reduced,
    rounded,
)
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.prelude import prelude
from fusec.codegen.triton.signature import (
    TRITON,
    blocks,
    described,
    descriptors,
    grid_loops,
    identifier,
    lanes_of,
    num_warps,
    parameters,
    trips,
    wide,
)
from fusec.codegen.triton.tiles import covers, exact, lanes_along, limit_of, mentioned, spans, tile_axes
from fusec.errors import ScheduleError
from fusec.ir.types import F32, F64, I64, DType, Size, accumulation, simplify


def print_kernel(kernel: Kernel, interpreted: bool = False, dependent: bool = False) -> str:
    """The module text of a kernel: imports, device functions, and one ``@triton.jit`` function for each grid.

    The last one has the kernel's name. Their parameters are a pointer for each buffer, the tensor descriptors, the
    symbols, and the blocks (with defaults).

    Args:
        kernel: what to print.
        interpreted: for Triton's interpreter, where buffers of bf16 are passed as f32.
        dependent: for programmatic dependent launch, where programs may start before the kernel ahead has ended.

    Raises:
        ScheduleError: for scratch memory, or an operation without a Triton form.
    """
    lines = [list(_Printer(grid, dependent).lines()) for grid in grids(kernel)]
    body = "\n\n\n".join(map("\n".join, lines))
    code = "\n".join(line for part in lines for line in part if not line.startswith("#"))
    return f"import triton\nimport triton.language as tl\n\n\n{prelude(code, interpreted)}{body}\n"


@dataclass(frozen=True)
class _Tile:
    """A tile loop that a statement stands in."""

    axis: str
    block: str
    first: Size
    """What its first lane stands for."""
    mask: str
    """Name of the lanes within the range; empty where all are."""
    whole: bool
    """Whether it holds the whole range."""


class _Printer:
    def __init__(self, kernel: Kernel, dependent: bool = False) -> None:
        self.kernel, self.dependent = kernel, dependent
        self.buffers: dict[str, Buffer] = {b.name: b for b in kernel.buffers}
        self.blocks = {block.lanes: block.name for block in blocks(kernel)}
        self.wide = wide(kernel)
        self.accumulators: dict[str, Init] = {}
        self.untouched: set[str] = set()
        """Accumulators declared in the present straight run and not updated yet; their first update declares them."""
        self.ranges: dict[str, tuple[Loop, _Tile]] = {}
        """Lanes defined in the present straight run, by axis."""
        self.order = tile_axes(kernel)
        self.spans = spans(kernel)
        self.lanes = lanes_along(kernel)
        self.described = described(kernel)
        self.tiles: dict[str, tuple[str, ...]] = {}
        """Names that stand for a tile, and its axes; all others are scalars."""
        self.indices: set[str] = set()
        """Names of clamped dynamic indices, which may be tiles and appear in offsets."""
        self.masked: set[str] = set()
        """Names that are 0 in lanes beyond the end, as a load leaves them."""
        for buffer in kernel.buffers:
            if buffer.role == "scratch":
                raise ScheduleError(
                    f"kernel {kernel.name} needs scratch memory {buffer.name}",
                    why="a Triton program has no memory of its own", fix="schedule the region with whole rows",
                )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The function, its comment included."""
        yield from self._comment()
        yield "@triton.jit"
        names, symbols = parameters(self.kernel), len(self.kernel.buffers) + len(descriptors(self.kernel))
        # By itself Triton takes a number that fits for one of 32 bits, and products of such wrap around.
        signature = [*names[:symbols], *(f"{name}: tl.int64" for name in names[symbols:])]
        signature += [f"{n}: tl.constexpr = {k}" for k, n in self.blocks.items()]
        yield f"def {identifier(self.kernel.name)}({', '.join(signature)}):"
        grid = grid_loops(self.kernel)
        body = grid[-1].body if grid else self.kernel.body
        if self.dependent:
            # All that ran before has ended from here on, so that whoever starts now need only wait for this kernel.
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

    def _run(self, body: tuple[Statement, ...], tiles: tuple[_Tile, ...]) -> Iterator[str]:
        for statement in body:
            if isinstance(statement, Loop):
                yield from self._loop(statement, tiles)
            elif isinstance(statement, When):
                yield from self._nested(f"if {identifier(statement.condition)}:", (), statement.body, tiles)
            else:
                yield from self._declare(self._touched(statement))
                yield getattr(self, f"_{type(statement).__name__.lower()}")(statement, tiles) or ""

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
        if isinstance(statement, DotTiles):
            return {statement.left, statement.right}
        if isinstance(statement, Assign):
            return {statement.value}
        if isinstance(statement, Fold):
            return {statement.src}
        if isinstance(statement, (Store, Check, ClampIndex)) and isinstance(statement.value, str):
            return {statement.value}
        return set()

    def _loop(self, loop: Loop, tiles: tuple[_Tile, ...]) -> Iterator[str]:
        if loop.kind == "grid":
            raise ScheduleError(f"kernel {self.kernel.name} has a grid loop inside another statement")
        if loop.kind == "tile":
            yield from self._tiles(loop, tiles)
            return
        yield from self._repeated(loop, f"range({self._bounds(loop)})", identifier(loop.axis), tiles, ())

    def _run_ahead(self, loop: Loop) -> str:
        """The range of a tile loop; Triton loads ahead by itself for a matrix unit, and for other products if told."""
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

    def _tiles(self, loop: Loop, around: tuple[_Tile, ...]) -> Iterator[str]:
        axis, block = identifier(loop.axis), self.blocks[lanes_of(loop)]
        whole = covers(loop)
        first = loop.start if whole else index_symbol(f"{loop.axis}_start")
        tile = _Tile(loop.axis, block, first, "" if exact(loop) else f"mask_{axis}", whole)
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
        self, loop: Loop, over: str, axis: str, tiles: tuple[_Tile, ...], head: "list[str] | tuple[()]"
    ) -> Iterator[str]:
        counter, lines = axis, list(head)
        if self.wide and loop.kind == "serial" and not sympy.sympify(loop.stop).free_symbols:
            counter = f"{axis}_step"
            lines.append(f"{axis} = tl.cast({counter}, tl.int64)")
        yield from self._nested(f"for {counter} in {over}:", lines, loop.body, tiles)

    def _nested(
        self, opening: str, head: Sequence[str], body: tuple[Statement, ...], tiles: tuple[_Tile, ...]
    ) -> Iterator[str]:
        """A part that runs several times, or perhaps not: what it changes has a value before."""
        updated = {s.acc for s in walk(body) if isinstance(s, (Update, Assign, DotTiles))}
        read = {name for s in walk(body) for name in self._touched(s)}
        yield from self._declare(updated | read)
        yield opening
        outer, self.ranges = self.ranges, dict(self.ranges)
        lines = list(self._run(body, tiles))
        for line in reversed(head):
            if _mentions(lines, line.split(" = ")[0]):
                lines.insert(0, line)
        yield from _indent(iter(lines))
        self.ranges = outer

    # Tiles.

    def _ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Axes in the order of a tile's dimensions."""
        wanted = set(axes)
        return tuple(axis for axis in self.order if axis in wanted)

    def _axes_in(self, offset: sympy.Expr, tiles: tuple[_Tile, ...]) -> tuple[str, ...]:
        """The axes of the tile that an expression stands for."""
        names, loops = mentioned(offset), {tile.axis for tile in tiles}
        return self._ordered((names & loops).union(*(self.tiles[index] for index in names & self.indices)))

    def _axes_of(self, *operands: Operand) -> tuple[str, ...]:
        """The axes of what is made of these."""
        return self._ordered(a for o in operands if isinstance(o, str) for a in self.tiles.get(o, ()))

    def _along(self, name: str, axes: tuple[str, ...]) -> str:
        """A name as an operand of a tile over these axes."""
        own = self.tiles.get(name, ())
        if not own or own == axes:
            return identifier(name)
        return f"{identifier(name)}[{', '.join(':' if axis in own else 'None' for axis in axes)}]"

    def _shape(self, axes: tuple[str, ...]) -> str:
        if not axes:
            return "()"
        return f"({', '.join(self.blocks[self.lanes[a]] for a in axes)}{',' if len(axes) == 1 else ''})"

    def _valid_lanes(self, axes: tuple[str, ...], tiles: tuple[_Tile, ...]) -> str:
        """Which lanes of a tile over ``axes`` lie within their ranges; empty where all do."""
        masks = {tile.axis: tile.mask for tile in tiles if tile.mask}
        return " & ".join(self._along(masks[axis], axes) for axis in axes if axis in masks)

    def _mark(self, dst: str, axes: tuple[str, ...]) -> None:
        self.masked.discard(dst)
        if axes:
            self.tiles[dst] = axes
        else:
            self.tiles.pop(dst, None)

    # Statements.

    def _pointer(self, buffer: str, offset: sympy.Expr, axes: tuple[str, ...]) -> str:
        return f"{buffer}_ptr" if offset == 0 else f"{buffer}_ptr + {self._index_text(offset, axes)}"

    def _index_text(self, offset: sympy.Expr, axes: tuple[str, ...]) -> str:
        return replace(TRITON, symbol=lambda name: self._along(name, axes)).print(offset)

    def _load(self, load: Load, tiles: tuple[_Tile, ...]) -> str:
        axes = self._axes_in(load.offset, tiles)
        self._mark(load.dst, axes)
        self.masked.add(load.dst)
        dtype = self.buffers[load.buffer].dtype
        compute = accumulation(dtype)
        widened = "" if compute == dtype else f".to({NAMES[compute.name]})"
        if load in self.described:
            return f"{identifier(load.dst)} = {self._block(load, axes, tiles)}{widened}"
        valid = self._valid_lanes(axes, tiles)
        other = f", mask={valid}, other=0" if valid else ""
        return f"{identifier(load.dst)} = tl.load({self._pointer(load.buffer, load.offset, axes)}{other}){widened}"

    def _block(self, load: Load, axes: tuple[str, ...], tiles: tuple[_Tile, ...]) -> str:
        """What a descriptor loads, as a tile over these axes."""
        descriptor, first = load.descriptor, {index_symbol(tile.axis): tile.first for tile in tiles}
        assert descriptor is not None
        offsets = [TRITON.print(sympy.expand(offset.subs(first))) for offset in descriptor.offsets]
        if self.wide:  # descriptors take offsets of 32 bits
            offsets = [o if o.isdecimal() else f"tl.cast({o}, tl.int32)" for o in offsets]
        block = f"{self.described[load].name}.load([{', '.join(offsets)}])"
        if len(offsets) > 2:
            block += f".reshape({', '.join(self.blocks[self.lanes[axis]] for axis in descriptor.axes)})"
        return block if descriptor.axes == axes else f"{block}.T"

    def _compute(self, compute: Compute, tiles: tuple[_Tile, ...]) -> str:
        axes = self._axes_of(*compute.operands)
        self._mark(compute.dst, axes)
        return f"{identifier(compute.dst)} = {expression(compute, lambda name: self._along(name, axes))}"

    def _check(self, check: Check, tiles: tuple[_Tile, ...]) -> str:
        """Eager's kernels, too, end with an assertion of the device, which the next call that waits for it reports."""
        value, length = self._integer(check.value), TRITON.print(check.length, True)
        message = f"kernel {self.kernel.name}: index out of bounds for a dimension of size {length}"
        valid = self._valid_lanes(self._axes_of(check.value), tiles)
        mask = f", mask={valid}" if valid else ""
        return f"tl.device_assert(({value} >= 0) & ({value} < {length}), {message!r}{mask})"

    def _clampindex(self, s: ClampIndex, tiles: tuple[_Tile, ...]) -> str:
        self._mark(s.dst, self._axes_of(s.value))
        self.tiles.setdefault(s.dst, ())
        self.indices.add(s.dst)
        last = f"{TRITON.print(s.length, True)} - 1"
        return f"{identifier(s.dst)} = tl.minimum(tl.maximum({self._integer(s.value)}, 0), {last})"

    def _integer(self, value: Operand) -> str:
        return filled(value.value, I64) if isinstance(value, Constant) else f"{identifier(value)}.to(tl.int64)"

    def _index(self, index: Index, tiles: tuple[_Tile, ...]) -> str:
        value = sympy.sympify(index.value)
        axes = self._axes_in(value, tiles)
        self._mark(index.dst, axes)
        if value.is_Integer:
            return f"{identifier(index.dst)} = {filled(int(value), I64)}"
        return f"{identifier(index.dst)} = tl.cast({self._index_text(value, axes)}, tl.int64)"

    def _init(self, init: Init, tiles: tuple[_Tile, ...]) -> str:
        self.accumulators[init.dst] = init
        self.untouched.add(init.dst)
        self._mark(init.dst, self._ordered(self.spans.get(init.dst, ())))
        return ""

    def _identity(self, init: Init) -> str:
        shape = self._shape(self.tiles.get(init.dst, ()))
        return f"{identifier(init.dst)} = {filled(identity(init.op, init.dtype), init.dtype, shape)}"

    def _update(self, update: Update, tiles: tuple[_Tile, ...]) -> str:
        init, acc = self.accumulators[update.acc], identifier(update.acc)
        axes = self.tiles.get(update.acc, ())
        texts = [
            filled(o.value, init.dtype) if isinstance(o, Constant) else self._along(o, axes) for o in update.values
        ]
        value, own = " * ".join(texts), self._axes_of(*update.values)
        if tiles and tiles[-1].mask and init.tile and not self._is_partial(update):
            value, own = self._valid(value, update.op, init.dtype, self._along(tiles[-1].mask, axes)), axes
        if update.acc in self.untouched and own == axes:
            self.untouched.discard(update.acc)
            return f"{acc} = {value}"
        first = "".join(f"{line}\n" for line in self._declare({update.acc}))
        return f"{first}{acc} = {combined(update.op, init.dtype, acc, value)}"

    def _is_partial(self, update: Update) -> bool:
        """Whether a partial result of the same fold is added, which holds its identity in lanes beyond the end."""
        parts = [self.accumulators[o] for o in update.values if isinstance(o, str) and o in self.accumulators]
        return len(parts) == len(update.values) == 1 and parts[0].tile and parts[0].op == update.op

    def _valid(self, value: str, op: str, dtype: DType, mask: str) -> str:
        """A tile whose lanes beyond the end hold what does not change the result of ``op``."""
        return f"tl.where({mask}, {value}, {filled(identity(op, dtype), dtype)})"

    def _assign(self, assign: Assign, tiles: tuple[_Tile, ...]) -> str:
        self.untouched.discard(assign.acc)
        return f"{identifier(assign.acc)} = {identifier(assign.value)}"

    def _fold(self, fold: Fold, tiles: tuple[_Tile, ...]) -> str:
        src, axes = identifier(fold.src), self.tiles.get(fold.src, ())
        axis = fold.axis or (axes[0] if axes else "")
        tile = next((t for t in tiles if t.axis == axis), tiles[-1] if tiles else None)
        partial = fold.src in self.accumulators and self.accumulators[fold.src].tile
        if not partial and tile is not None:
            if not tile.whole and not fold.axis:
                raise ScheduleError(
                    f"kernel {self.kernel.name} folds {fold.src} inside a loop over several tiles",
                    why="each fold would see a part of the row", fix="fold an accumulator after the loop",
                )  # fmt: skip
            axis, axes, whole = tile.axis, self._ordered({*axes, tile.axis}), axes
            src = self._along(fold.src, axes)
            if axes != whole:
                src = f"tl.broadcast_to({src}, {self._shape(axes)})"
            src = self._valid(src, fold.op, fold.dtype, self._along(tile.mask, axes)) if tile.mask else src
        self._mark(fold.dst, tuple(a for a in axes if a != axis))
        return f"{identifier(fold.dst)} = {reduced(fold.op, fold.dtype, src, axes.index(axis))}"

    def _dottiles(self, dot: DotTiles, tiles: tuple[_Tile, ...]) -> str:
        acc, axes = identifier(dot.acc), self.tiles.get(dot.acc, ())
        first = dot.acc in self.untouched
        self.untouched.discard(dot.acc)
        if len(axes) == 2 and dot.dtype != F64:
            operands = [*self._matrices(dot, axes, tiles), *([] if first else [acc])]
            # What is multiplied as f32 is not rounded to less.
            precision = ', input_precision="ieee"' if dot.dtype == F32 else ""
            return f"{acc} = tl.dot({', '.join(operands)}{precision})"
        joint = self._ordered({*axes, dot.axis})
        factors = [self._wide_factor(name, dot, joint, tiles) for name in (dot.left, dot.right)]
        value = reduced("sum", self.accumulators[dot.acc].dtype, " * ".join(factors), joint.index(dot.axis))
        return f"{acc} = {value}" if first else f"{acc} = {acc} + {value}"

    def _matrices(self, dot: DotTiles, axes: tuple[str, ...], tiles: tuple[_Tile, ...]) -> list[str]:
        """The operands of a matrix unit: tiles ``[down, axis]`` and ``[axis, across]``."""
        down, across = (next(n for n in (dot.left, dot.right) if axis in self.tiles.get(n, ())) for axis in axes)
        texts = []
        for name, position in ((down, 1), (across, 0)):
            text, own = self._summand(name, dot, tiles)
            text = narrowed(dot.dtype, text)
            texts.append(text if own[position] == dot.axis else f"tl.trans({text})")
        return texts

    def _wide_factor(self, name: str, dot: DotTiles, axes: tuple[str, ...], tiles: tuple[_Tile, ...]) -> str:
        """An operand of a product that is computed in the type of the sum."""
        text, own = self._summand(name, dot, tiles)
        text = rounded(dot.dtype, text)
        return text if own == axes else f"({text})[{', '.join(':' if axis in own else 'None' for axis in axes)}]"

    def _summand(self, name: str, dot: DotTiles, tiles: tuple[_Tile, ...]) -> tuple[str, tuple[str, ...]]:
        """An operand of a product, 0 beyond the end of what is summed, as a load leaves it; and its axes."""
        text, own = identifier(name), self.tiles.get(name, ())
        mask = next((tile.mask for tile in tiles if tile.axis == dot.axis), "")
        if dot.axis not in own:  # it has stride 0 there
            own = self._ordered({*own, dot.axis})
            text = f"tl.broadcast_to({self._along(name, own)}, {self._shape(own)})"
        elif name in self.masked:
            mask = ""
        return self._valid(text, "sum", F32, self._along(mask, own)) if mask else text, own

    def _store(self, store: Store, tiles: tuple[_Tile, ...]) -> str:
        axes = self._axes_in(store.offset, tiles)
        valid = self._valid_lanes(axes, tiles)
        mask = f", mask={valid}" if valid else ""
        pointer, value = self._pointer(store.buffer, store.offset, axes), self._stored(store.value, store.buffer, axes)
        text = f"tl.store({pointer}, {value}{mask})"
        # A number is loaded by every warp: the one that replaces it waits until all have it.
        shared = not axes and any(isinstance(s, Load) and s.buffer == store.buffer for s in walk(self.kernel.body))
        return f"tl.debug_barrier()\n{text}" if shared else text

    def _stored(self, value: Operand, buffer: str, axes: tuple[str, ...]) -> str:
        dtype = self.buffers[buffer].dtype
        if isinstance(value, Constant):
            return filled(value.value, accumulation(dtype))
        cast = "" if accumulation(dtype) == dtype else f".to({buffer}_ptr.dtype.element_ty)"
        return f"{self._along(value, axes)}{cast}"


def _mentions(lines: Iterable[str], name: str) -> bool:
    return any(re.search(rf"\b{name}\b", line) for line in lines)


def _indent(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield from (f"    {part}" for part in line.splitlines() if part)
