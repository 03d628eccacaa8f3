"""Blocks of a GEMM's operands: where a left operand lies, and ranges of rows or columns."""

from dataclasses import dataclass, replace

import sympy

from fusec.codegen.tile.kernel import Matrix
from fusec.codegen.tile.rows import Tiling
from fusec.ir.types import Size, simplify
from fusec.loops.affine import Axis

BLOCK_SHARE = 7 / 8
"""The most of the second-level cache that a block of rows and their sums take."""
LEAST_ROWS = 192
"""The fewest rows of such a block."""


@dataclass(frozen=True)
class Left:
    """Storage of a left operand."""

    buffer: str
    offset: sympy.Expr
    """Over the row axes and the contracted axes as one."""
    row_stride: Size
    column_stride: Size = 1


@dataclass(frozen=True)
class Block:
    """A block of an axis."""

    axis: Axis
    start: Size
    stop: Size
    size: int
    """Length of all blocks but the last, which may be shorter."""

    @property
    def length(self) -> Size:
        """Exact length."""
        return simplify(sympy.expand(sympy.sympify(self.stop) - self.start))


def most_rows(row_bytes: int, tiling: Tiling) -> int:
    """Return the number of rows, each with its sums of so many bytes, that stay in the second-level cache."""
    most = int(BLOCK_SHARE * tiling.cache_bytes) // row_bytes
    return max(LEAST_ROWS, most // tiling.tile_rows * tiling.tile_rows)


def even_blocks(n: int, most: int, step: int) -> int:
    """Return the length of the fewest equal blocks that cover ``n`` elements; with several, a multiple of ``step``."""
    count = -(-n // most)
    return min(-(-n // (count * step)) * step, most, n)


def at(matrix: Matrix, starts: dict[sympy.Symbol, Size]) -> Matrix:
    """Return a matrix that begins at these indices."""
    return replace(matrix, offset=sympy.expand(matrix.offset.subs(starts)))
