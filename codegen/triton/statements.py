"""Statements of a tile program as lines of Triton: loads, stores, arithmetic, reductions, products; no loops."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import singledispatchmethod

import sympy

from fusec.codegen.tile.kernel import (
    Assign,
    Buffer,
    Check,
    ClampIndex,
    Combine,
    Compute,
    Constant,
    DotTiles,
    Fold,
    Index,
    Init,
    Kernel,
    Load,
    Operand,
    Scan,
    Statement,
    Store,
    Update,
    index_symbol,
    walk,
)
from fusec.codegen.tile.sort_tile import SortTile
from fusec.codegen.triton.arithmetic import (
    COMBINERS,
    NAMES,
    combined,
    expression,
    filled,
    identity,
    narrowed,
    reduced,
    rounded,
)
from fusec.codegen.triton.signature import TRITON, blocks, described, identifier, wide
from fusec.codegen.triton.tiles import lanes_along, mentioned, spans, tile_axes
from fusec.errors import ScheduleError
from fusec.ir.types import BOOL, F32, F64, I8, I64, DType, Size, accumulation


@dataclass(frozen=True)
class Tile:
    """A tile loop around a statement."""

    axis: str
    block: str
    first: Size
    """Index of its first lane."""
    mask: str
    """Name of the mask of valid lanes; empty where all are."""
    whole: bool
    """One tile holds the whole range."""


class Statements:
    """Prints statements within the tile loops around them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.buffers: dict[str, Buffer] = {b.name: b for b in kernel.buffers}
        self.blocks = {block.lanes: block.name for block in blocks(kernel)}
        self.wide = wide(kernel)
        self.accumulators: dict[str, Init] = {}
        self.untouched: set[str] = set()
        """Accumulators of the current basic block without an update yet: their first update initializes them."""
        self.order = tile_axes(kernel)
        self.spans = spans(kernel)
        self.lanes = lanes_along(kernel)
        self.described = described(kernel)
        self.tiles: dict[str, tuple[str, ...]] = {}
        """The axes of names that are tiles; all others are scalars."""
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

    @singledispatchmethod
    def line(self, statement: Statement, tiles: tuple[Tile, ...]) -> str:
        """Return a statement as text; empty for the declaration of an accumulator: its first update initializes it."""
        raise ScheduleError(f"a {type(statement).__name__} has no Triton form", where=self.kernel.name)

    def declare(self, names: Iterable[str]) -> Iterator[str]:
        """Initialize accumulators whose first update does not."""
        for name in sorted(self.untouched.intersection(names)):
            yield self._identity(self.accumulators[name])
            self.untouched.discard(name)

    # Tiles.

    def _ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return axes in the order of a tile's dimensions."""
        wanted = set(axes)
        return tuple(axis for axis in self.order if axis in wanted)

    def _axes_in(self, offset: sympy.Expr, tiles: tuple[Tile, ...]) -> tuple[str, ...]:
        """Return the axes of an index expression."""
        names, loops = mentioned(offset), {tile.axis for tile in tiles}
        return self._ordered((names & loops).union(*(self.tiles[index] for index in names & self.indices)))

    def _axes_of(self, *operands: Operand) -> tuple[str, ...]:
        """Return the axes of a value computed from these."""
        return self._ordered(a for o in operands if isinstance(o, str) for a in self.tiles.get(o, ()))

    def _along(self, name: str, axes: tuple[str, ...]) -> str:
        """Return a name as an operand, broadcast to these axes."""
        own = self.tiles.get(name, ())
        if not own or own == axes:
            return identifier(name)
        return f"{identifier(name)}[{', '.join(':' if axis in own else 'None' for axis in axes)}]"

    def _shape(self, axes: tuple[str, ...]) -> str:
        if not axes:
            return "()"
        return f"({', '.join(self.blocks[self.lanes[a]] for a in axes)}{',' if len(axes) == 1 else ''})"

    def _valid_lanes(self, axes: tuple[str, ...], tiles: tuple[Tile, ...]) -> str:
        """Return the mask of valid lanes of a tile over ``axes``; empty where all are."""
        masks = {tile.axis: tile.mask for tile in tiles if tile.mask}
        return " & ".join(self._along(masks[axis], axes) for axis in axes if axis in masks)

    def _mark(self, dst: str, axes: tuple[str, ...]) -> None:
        self.masked.discard(dst)
        if axes:
            self.tiles[dst] = axes
        else:
            self.tiles.pop(dst, None)

    def _pointer(self, buffer: str, offset: sympy.Expr, axes: tuple[str, ...]) -> str:
        start = f"{buffer}_ptr"
        if self.buffers[buffer].dtype.kind == "other":  # float8, which not all GPUs convert
            start += ".to(tl.pointer_type(tl.uint8), bitcast=True)"
        return start if offset == 0 else f"{start} + {self._index_text(offset, axes)}"

    def _index_text(self, offset: sympy.Expr, axes: tuple[str, ...]) -> str:
        return replace(TRITON, symbol=lambda name: self._along(name, axes)).print(offset)

    @line.register
    def _load(self, load: Load, tiles: tuple[Tile, ...]) -> str:
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

    def _block(self, load: Load, axes: tuple[str, ...], tiles: tuple[Tile, ...]) -> str:
        """Return a load by descriptor as a tile over these axes."""
        descriptor, first = load.descriptor, {index_symbol(tile.axis): tile.first for tile in tiles}
        assert descriptor is not None
        offsets = [TRITON.print(sympy.expand(offset.subs(first))) for offset in descriptor.offsets]
        if self.wide:  # descriptors take offsets of 32 bits
            offsets = [o if o.isdecimal() else f"tl.cast({o}, tl.int32)" for o in offsets]
        block = f"{self.described[load].name}.load([{', '.join(offsets)}])"
        if len(offsets) > 2:
            block += f".reshape({', '.join(self.blocks[self.lanes[axis]] for axis in descriptor.axes)})"
        return block if descriptor.axes == axes else f"{block}.T"

    @line.register
    def _compute(self, compute: Compute, tiles: tuple[Tile, ...]) -> str:
        axes = self._axes_of(*compute.operands)
        self._mark(compute.dst, axes)
        return f"{identifier(compute.dst)} = {expression(compute, lambda name: self._along(name, axes))}"

    @line.register
    def _check(self, check: Check, tiles: tuple[Tile, ...]) -> str:
        """Print a device assertion, as in eager's kernels; the next call that waits for the device reports it."""
        value, length = self._integer(check.value), TRITON.print(check.length, True)
        message = f"kernel {self.kernel.name}: index out of bounds for a dimension of size {length}"
        valid = self._valid_lanes(self._axes_of(check.value), tiles)
        mask = f", mask={valid}" if valid else ""
        return f"tl.device_assert(({value} >= 0) & ({value} < {length}), {message!r}{mask})"

    @line.register
    def _clamp_index(self, s: ClampIndex, tiles: tuple[Tile, ...]) -> str:
        self._mark(s.dst, self._axes_of(s.value))
        self.tiles.setdefault(s.dst, ())
        self.indices.add(s.dst)
        last, value = f"{TRITON.print(s.length, True)} - 1", self._integer(s.value)
        clamped = value if s.bounded else f"tl.minimum(tl.maximum({value}, 0), {last})"
        return f"{identifier(s.dst)} = {clamped}"

    def _integer(self, value: Operand) -> str:
        return filled(value.value, I64) if isinstance(value, Constant) else f"{identifier(value)}.to(tl.int64)"

    @line.register
    def _index(self, index: Index, tiles: tuple[Tile, ...]) -> str:
        value = sympy.sympify(index.value)
        axes = self._axes_in(value, tiles)
        self._mark(index.dst, axes)
        if value.is_Integer:
            return f"{identifier(index.dst)} = {filled(int(value), index.dtype)}"
        return f"{identifier(index.dst)} = tl.cast({self._index_text(value, axes)}, {NAMES[index.dtype.name]})"

    @line.register
    def _init(self, init: Init, tiles: tuple[Tile, ...]) -> str:
        self.accumulators[init.dst] = init
        self.untouched.add(init.dst)
        self._mark(init.dst, self._ordered(self.spans.get(init.dst, ())))
        return ""

    def _identity(self, init: Init) -> str:
        shape = self._shape(self.tiles.get(init.dst, ()))
        return f"{identifier(init.dst)} = {filled(identity(init.op, init.dtype), init.dtype, shape)}"

    @line.register
    def _update(self, update: Update, tiles: tuple[Tile, ...]) -> str:
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
        first = "".join(f"{line}\n" for line in self.declare((update.acc,)))
        return f"{first}{acc} = {combined(update.op, init.dtype, acc, value)}"

    def _is_partial(self, update: Update) -> bool:
        """Return whether a partial result of the same reduction is added: its invalid lanes hold the identity."""
        parts = [self.accumulators[o] for o in update.values if isinstance(o, str) and o in self.accumulators]
        return len(parts) == len(update.values) == 1 and parts[0].tile and parts[0].op == update.op

    def _valid(self, value: str, op: str, dtype: DType, mask: str) -> str:
        """Return a tile with the identity of ``op`` in lanes beyond the end."""
        return f"tl.where({mask}, {value}, {filled(identity(op, dtype), dtype)})"

    @line.register
    def _assign(self, assign: Assign, tiles: tuple[Tile, ...]) -> str:
        self.untouched.discard(assign.acc)
        return f"{identifier(assign.acc)} = {identifier(assign.value)}"

    @line.register
    def _fold(self, fold: Fold, tiles: tuple[Tile, ...]) -> str:
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

    @line.register
    def _scan(self, scan: Scan, tiles: tuple[Tile, ...]) -> str:
        """Print a scan of a tile, to which the accumulator brings the tiles before; or a step of a serial loop."""
        dst, acc, op = identifier(scan.dst), identifier(scan.acc), scan.op
        wide, axes = self.accumulators[scan.acc].dtype, self._axes_of(scan.value, scan.acc)
        tile = next((t for t in tiles if t.axis == scan.axis), None)
        axes = self._ordered({*axes, tile.axis}) if tile else axes
        value = self._wide_value(scan.value, wide, axes)
        self._mark(scan.dst, axes)
        narrowed_to = "" if scan.dtype == wide else f".to({NAMES[scan.dtype.name]})"
        if tile is None:
            return f"{acc} = {combined(op, wide, acc, value)}\n{dst} = {acc}{narrowed_to}"
        if tile.mask:
            value = self._valid(value, op, wide, self._along(tile.mask, axes))
        dim, before, each = axes.index(tile.axis), self._along(scan.acc, axes), f"each_{scan.dst}"
        so_far = combined(op, wide, before, f"tl.associative_scan({each}, {dim}, {COMBINERS[op]})")
        lines = [f"{each} = {value}", f"{dst} = ({so_far}){narrowed_to}"]
        if not tile.whole:
            lines.append(f"{acc} = {combined(op, wide, acc, reduced(op, wide, each, dim))}")
        return "\n".join(lines)

    @line.register
    def _sort_tile(self, sort: SortTile, tiles: tuple[Tile, ...]) -> str:
        """Print a sort of keys with their places below them, in 64 bits: it is stable, and the places are the order."""
        tile, along = next(t for t in tiles if t.axis == sort.axis), (sort.along,)
        keys, order, values = identifier(sort.keys), identifier(sort.order), identifier(sort.values)
        shape, own = self._shape((tile.axis,)), self.tiles.get(sort.keys, ())
        keys = keys if own else f"tl.broadcast_to({keys}, {shape})"
        key = f"{'~' if sort.descending else ''}sort_key({keys})"
        key = f"tl.where({tile.mask}, {key}, 0x7FFFFFFF)" if tile.mask else key
        lines = [f"{order} = places_in_order({key}, tl.arange(0, {tile.block}))"]
        if any(sort.values in s.reads for s in walk(self.kernel.body)):
            # The interpreter has no gather of booleans.
            as_byte = ".to(tl.int8)" if sort.dtype == BOOL else ""
            back = " != 0" if sort.dtype == BOOL else ""
            lines.append(f"{values} = tl.gather({keys}{as_byte}, {order}.to(tl.int32), 0){back}")
        self._mark(sort.order, along)
        self._mark(sort.values, along)
        return "\n".join(lines)

    def _wide_value(self, value: Operand, dtype: DType, axes: tuple[str, ...]) -> str:
        """Return an operand as a tile over these axes, in the type of a sum."""
        if isinstance(value, Constant):
            return filled(value.value, dtype, self._shape(axes))
        text = f"{self._along(value, axes)}.to({NAMES[dtype.name]})"
        return text if self._axes_of(value) == axes else f"tl.broadcast_to({text}, {self._shape(axes)})"

    @line.register
    def _dot_tiles(self, dot: DotTiles, tiles: tuple[Tile, ...]) -> str:
        acc, axes = identifier(dot.acc), self.tiles.get(dot.acc, ())
        first = dot.acc in self.untouched
        self.untouched.discard(dot.acc)
        if len(axes) == 2 and dot.dtype != F64:
            operands = [*self._matrices(dot, axes, tiles), *([] if first else [acc])]
            # By default f32 may be rounded to tf32, and sums are of floats.
            asked = {F32: ', input_precision="ieee"', I8: ", out_dtype=tl.int32"}.get(dot.dtype, "")
            return f"{acc} = tl.dot({', '.join(operands)}{asked})"
        joint = self._ordered({*axes, dot.axis})
        factors = [self._wide_factor(name, dot, joint, tiles) for name in (dot.left, dot.right)]
        value = reduced("sum", self.accumulators[dot.acc].dtype, " * ".join(factors), joint.index(dot.axis))
        return f"{acc} = {value}" if first else f"{acc} = {acc} + {value}"

    def _matrices(self, dot: DotTiles, axes: tuple[str, ...], tiles: tuple[Tile, ...]) -> list[str]:
        """Return the operands of a matrix unit: tiles ``[down, axis]`` and ``[axis, across]``."""
        down, across = (next(n for n in (dot.left, dot.right) if axis in self.tiles.get(n, ())) for axis in axes)
        texts = []
        for name, position in ((down, 1), (across, 0)):
            text, own = self._summand(name, dot, tiles)
            text = narrowed(dot.dtype, text)
            texts.append(text if own[position] == dot.axis else f"tl.trans({text})")
        return texts

    def _wide_factor(self, name: str, dot: DotTiles, axes: tuple[str, ...], tiles: tuple[Tile, ...]) -> str:
        """Return an operand of a product that is computed in the type of the sum."""
        text, own = self._summand(name, dot, tiles)
        text = (
            rounded(dot.dtype, text)
            if dot.dtype.is_float
            else f"{text}.to({NAMES[self.accumulators[dot.acc].dtype.name]})"
        )
        return text if own == axes else f"({text})[{', '.join(':' if axis in own else 'None' for axis in axes)}]"

    def _summand(self, name: str, dot: DotTiles, tiles: tuple[Tile, ...]) -> tuple[str, tuple[str, ...]]:
        """Return an operand of a product, 0 beyond the end of the summed axis, and its axes."""
        text, own = identifier(name), self.tiles.get(name, ())
        mask = next((tile.mask for tile in tiles if tile.axis == dot.axis), "")
        if dot.axis not in own:  # it has stride 0 there
            own = self._ordered({*own, dot.axis})
            text = f"tl.broadcast_to({self._along(name, own)}, {self._shape(own)})"
        elif name in self.masked:
            mask = ""
        dtype = accumulation(dot.dtype)
        return self._valid(text, "sum", dtype, self._along(mask, own)) if mask else text, own

    @line.register
    def _store(self, store: Store, tiles: tuple[Tile, ...]) -> str:
        axes = self._axes_in(store.offset, tiles)
        valid = self._valid_lanes(axes, tiles)
        mask = f", mask={valid}" if valid else ""
        pointer, value = self._pointer(store.buffer, store.offset, axes), self._stored(store.value, store.buffer, axes)
        text = f"tl.store({pointer}, {value}{mask})"
        # Every warp loads a scalar: the one that overwrites it waits until all have it.
        shared = not axes and any(store.buffer in s.loads for s in walk(self.kernel.body))
        return f"tl.debug_barrier()\n{text}" if shared else text

    @line.register
    def _combine(self, combine: Combine, tiles: tuple[Tile, ...]) -> str:
        """Print a load, a computation and a store; the barrier lets a lane load what another thread has stored."""
        buffer, axes = combine.buffer, self._axes_in(combine.offset, tiles)
        valid, dtype = self._valid_lanes(axes, tiles), accumulation(self.buffers[buffer].dtype)
        pointer, old, new = self._pointer(buffer, combine.offset, axes), f"old_{buffer}", f"new_{buffer}"
        load = f"tl.load({pointer}{f', mask={valid}, other=0' if valid else ''})"
        load += "" if self.buffers[buffer].dtype == dtype else f".to({NAMES[dtype.name]})"
        self._mark(old, axes)
        self._mark(new, axes)
        both = expression(Compute(new, combine.op, (old, combine.value), dtype), lambda name: self._along(name, axes))
        store = f"tl.store({pointer}, {self._stored(new, buffer, axes)}{f', mask={valid}' if valid else ''})"
        return f"tl.debug_barrier()\n{old} = {load}\n{new} = {both}\n{store}"

    def _stored(self, value: Operand, buffer: str, axes: tuple[str, ...]) -> str:
        dtype = self.buffers[buffer].dtype
        if isinstance(value, Constant):
            return filled(value.value, accumulation(dtype))
        cast = "" if accumulation(dtype) == dtype else f".to({buffer}_ptr.dtype.element_ty)"
        return f"{self._along(value, axes)}{cast}"
