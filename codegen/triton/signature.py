"""The signature of a kernel: its grid, parameters, compiler options, width of offsets, and names."""

import keyword
import math
from dataclasses import dataclass
from typing import Any

from fusec.codegen.tile.blocks import block_count
from fusec.codegen.tile.kernel import Check, Kernel, Load, Loop, walk
from fusec.codegen.tile.sizes import Language
from fusec.codegen.triton.prelude import FUNCTIONS
from fusec.codegen.triton.tiles import lanes_along, spans
from fusec.errors import ScheduleError
from fusec.ir.types import Size, product, simplify

_WARP_ELEMENTS = 256
"""Elements of a tile for each warp: 8 for each lane, so that the loads of half types are 16 bytes wide."""
_MAX_WARPS = 16
_MAX_WARPS_OF_BLOCKS = 8
"""Warps of a kernel with two-dimensional tiles: more warps leave each lane too few registers for several of them."""
_WARPS_OF_DESCRIPTORS = 4
"""The minimum of a kernel with tensor descriptors: Inductor excludes fewer as unsafe."""
_WARP, _REGISTERS = 32, 1 << 16
"""Lanes of a warp, and registers of a processor, where a kernel may ask for registers."""
_MAX_INT32 = 2**31 - 1
ASSERTING = {"debug": True, "sanitize_overflow": False}
"""Options that compile the assertions of the kernel, but not those of Triton on integer overflow."""
_RESERVED = frozenset({"tl", "triton", "float", "range", "pid", *keyword.kwlist, *FUNCTIONS})


@dataclass(frozen=True)
class Block:
    """A compile-time parameter of a kernel: the number of lanes of some of its tile loops."""

    name: str
    lanes: int


@dataclass(frozen=True)
class Described:
    """A run-time parameter of a kernel: a tensor descriptor through which it loads blocks of a buffer."""

    name: str
    buffer: str
    start: int
    block: tuple[int, ...]
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]


def described(kernel: Kernel) -> dict[Load, Described]:
    """Return the descriptor of each load that uses one: none unless the configuration asks for them."""
    if not kernel.config.descriptors:
        return {}
    names, found = dict[tuple[object, ...], str](), dict[Load, Described]()
    for load in walk(kernel.body):
        if isinstance(load, Load) and (d := load.descriptor) is not None:
            key = (load.buffer, d.start, d.block, d.shape, d.strides)
            others = sum(known[0] == load.buffer for known in names if known != key)
            name = names.setdefault(key, f"{load.buffer}_desc{others + 1 if others else ''}")
            found[load] = Described(name, load.buffer, d.start, d.block, d.shape, d.strides)
    return found


def descriptors(kernel: Kernel) -> tuple[Described, ...]:
    """Return all descriptors, in the order of the buffers."""
    order = [buffer.name for buffer in kernel.buffers]
    return tuple(sorted(dict.fromkeys(described(kernel).values()), key=lambda d: order.index(d.buffer)))


def blocks(kernel: Kernel) -> tuple[Block, ...]:
    """Return the compile-time parameters, one for each distinct number of lanes."""
    lanes = list(
        dict.fromkeys(lanes_of(loop) for loop in walk(kernel.body) if isinstance(loop, Loop) and loop.kind == "tile")
    )
    return tuple(Block("BLOCK" if len(lanes) == 1 else f"BLOCK_{n}", n) for n in lanes)


def options(kernel: Kernel) -> dict[str, Any]:
    """Return the options of Triton's compiler; FP fusion is off: products are rounded before they are added."""
    warps = num_warps(kernel)
    registers = min(kernel.config.registers, _REGISTERS // (_WARP * warps))
    chosen = {"num_stages": kernel.config.stages, "maxnreg": registers}
    found = {"num_warps": warps, **{k: n for k, n in chosen.items() if n}, "enable_fp_fusion": False}
    return found | ASSERTING if any(isinstance(s, Check) for s in walk(kernel.body)) else found


def num_warps(kernel: Kernel) -> int:
    """Return the number of warps of a program: as configured, or enough that each lane holds few elements of a tile."""
    if kernel.config.warps:
        return kernel.config.warps
    lanes, axes = lanes_along(kernel), spans(kernel)
    loads = [axes.get(s.dst, ()) for s in walk(kernel.body) if isinstance(s, Load)]
    largest = max([math.prod(lanes[a] for a in own) for own in loads], default=1)
    warps = max(largest, *lanes.values(), 1) // _WARP_ELEMENTS
    most = _MAX_WARPS_OF_BLOCKS if any(len(own) > 1 for own in loads) else _MAX_WARPS
    least = _WARPS_OF_DESCRIPTORS if descriptors(kernel) else 1
    return max(least, min(most, warps))


def grid_loops(kernel: Kernel) -> tuple[Loop, ...]:
    """Return the grid loops, outermost first."""
    loops: list[Loop] = []
    body = kernel.body
    while len(body) == 1 and isinstance(body[0], Loop) and body[0].kind == "grid":
        loops.append(body[0])
        body = body[0].body
    return tuple(loops)


def trips(loop: Loop) -> Size:
    """Return the trip count of a loop."""
    length = simplify(loop.stop - loop.start)
    return length if loop.step == 1 else block_count(length, loop.step)


def launches(kernel: Kernel) -> Size:
    """Return the number of programs of a launch."""
    return product(tuple(trips(loop) for loop in grid_loops(kernel)))


def parameters(kernel: Kernel) -> tuple[str, ...]:
    """Return the names of the run-time parameters: pointers, then tensor descriptors, then symbols."""
    pointers = tuple(f"{buffer.name}_ptr" for buffer in kernel.buffers)
    return (*pointers, *(d.name for d in descriptors(kernel)), *map(identifier, kernel.symbols))


def wide(kernel: Kernel) -> bool:
    """Return whether offsets need 64 bits: always with a symbolic size."""
    lengths = [simplify(buffer.numel) for buffer in kernel.buffers]
    return not all(isinstance(n, int) and n <= _MAX_INT32 for n in lengths)


def lanes_of(loop: Loop) -> int:
    """Return the number of lanes of a tile loop.

    Raises:
        ScheduleError: if it is not a power of two.
    """
    if not isinstance(loop.step, int) or loop.step & (loop.step - 1):
        raise ScheduleError(f"a tile of {loop.step} elements", why="a Triton block is a power of two")
    return loop.step


def identifier(name: str) -> str:
    """Return a name of the tile program as an identifier that is none of Python, Triton or the prelude."""
    return f"{name}_" if name in _RESERVED or name.startswith("BLOCK") else name


TRITON = Language("Triton", minimum="tl.minimum({}, {})", maximum="tl.maximum({}, {})", symbol=identifier)
"""Sizes and offsets; none is negative, so division, which truncates, agrees with Python's."""
