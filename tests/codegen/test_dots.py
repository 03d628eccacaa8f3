"""Blocks of products in C++, by hand: right at every size, in either layout, and nothing is written beside them."""

from pathlib import Path

import pytest
import sympy
import torch
from torch import Tensor

from fusec.cache import Cache
from fusec.codegen import target_named
from fusec.codegen.cpp.build import BuildError, CppKernel, build, forget_loaded
from fusec.codegen.cpp.compiler import find_compiler
from fusec.codegen.cpp.printer import print_kernel
from fusec.codegen.program.constant_folding import prepack
from fusec.codegen.tile.kernel import Buffer, Dot, Kernel, Load, Loop, Matrix, Store
from fusec.config import Config
from fusec.ir.types import BF16, F32, F64, I8, I32, U8, DType, Size, symbol
from tests.codegen.instructions import BF16_INSTRUCTIONS, BYTE_INSTRUCTIONS, built
from tests.combinations import rotating

M, N, K, STEP = (symbol(name) for name in ("m", "n", "k", "step"))
j = sympy.Symbol("j", integer=True, nonnegative=True)
THEIRS = {F32: torch.float32, F64: torch.float64, BF16: torch.bfloat16}
RANGES = {I8: (torch.int8, -128, 127), U8: (torch.uint8, 0, 255)}
ROWS, COLUMNS, DEPTHS = (1, 8, 17, 70), (1, 16, 37, 150), ((1, 4), (24, 28), (24, 29), (25, 28), (300, 304))
"""Depths, and how far rows of the left operand lie apart: pairs of bfloat16 have to be even in both."""


def dot(name: str, dtype: DType, along: str, rows: Size, adds: bool, other: DType | None = None) -> Kernel:
    """One block in the middle of larger matrices; its first row is read again, a tile at a time."""
    other = other or dtype
    sums = {BF16: F32, I8: I32, U8: I32}.get(dtype, dtype)
    right = Matrix("w", K + 4, 1, K + 4) if along == "k" else Matrix("w", N + 3, N + 3, 1)
    if along == "packed":
        right = Matrix("w", sympy.Integer(0), 1, K)
    left = Matrix("x", STEP, 1, STEP) if along == "across" else Matrix("x", STEP, STEP, 1)
    block = Dot(Matrix("y", N + 3, N + 3, 1), left, right, rows, N, K, adds)
    again = Loop("j", 0, N, target_named("cpp").lanes, "tile", (Load("v", "y", N + 3 + j), Store("first", j, "v")))
    weight = Buffer("w", other, (K + 4) * (N + 4), "input", packed=int(along == "packed"))
    buffers = (Buffer("x", dtype, (M + K + 4) * STEP, "input"), weight,
               Buffer("y", sums, (M + 2) * (N + 3), "output"), Buffer("first", sums, N, "output"))  # fmt: skip
    once = Loop("part", 0, 1, 1, "grid", (block, again))
    return Kernel(name, "contraction", buffers, ("m", "n", "k", "step"), (once,))


def framed(inside: Tensor, step: int, around: float) -> Tensor:
    """A matrix with a row above, one below, and columns behind, so that rows lie so far apart."""
    whole = torch.full((inside.shape[0] + 2, step), around).to(inside)
    whole[1:-1, : inside.shape[1]] = inside
    return whole


LAID_OUT = [
    *((dtype, along, adds, "") for dtype in THEIRS for along, adds in (("k", False), ("n", False), ("n", True))),
    *((dtype, "across", True, "") for dtype in THEIRS),  # as "n", and the left operand lies along its rows
    (F32, "packed", False, ""),
]
"""By element type, how weights may lie, whether a block may be added to what is there, and what stands in front."""
LAID_OUT += [(BF16, along, False, head) for along in ("k", "n", "packed") for head in BF16_INSTRUCTIONS]


@pytest.mark.parametrize("rows", [1, 6, M], ids=["one", "few", "many"])
@pytest.mark.parametrize(("dtype", "along", "adds", "head"), LAID_OUT, ids=lambda x: str(x)[:7])
def test_a_block_is_right_and_alone(along: str, adds: bool, dtype: DType, head: str, rows: Size) -> None:
    """What lies around the operands is NaN, and what lies around the result stays."""
    turned = along == "packed"
    kernel = built(dot("block", dtype, along, rows, adds), head)
    for m in ROWS if rows == M else (int(rows),):
        for n in COLUMNS:
            for k, step in (pair for pair in DEPTHS if not turned or pair[0] % 2 == pair[1] % 2 == 0):
                x, w = torch.randn(m, k).to(THEIRS[dtype]), torch.randn(n, k).to(THEIRS[dtype])
                before = torch.randn(m, n, dtype=torch.float64 if dtype == F64 else torch.float32)
                right = framed(w, k + 4, torch.nan) if along == "k" else framed(w.t(), n + 3, torch.nan)
                right = prepack(w, n) if turned else right
                y, first = framed(before, n + 3, 7.0), torch.empty(n).to(before)
                left = framed(x.t(), m + 3, torch.nan) if along == "across" else framed(x, step, torch.nan)
                kernel((left, right, y, first), (m, n, k, left.shape[1]))
                expected = (x.double() @ w.double().t() + (before if adds else 0)).to(before)
                torch.testing.assert_close(y, framed(expected, n + 3, 7.0), atol=1e-4, rtol=1e-4)
                assert torch.equal(first, y[1, :n])


@pytest.mark.parametrize(
    ("rows", "head", "right", "left"), rotating((1, 6, M), BYTE_INSTRUCTIONS, list(RANGES), list(RANGES)), ids=str
)
def test_bytes_are_summed_exactly(left: DType, right: DType, head: str, rows: Size) -> None:
    """Extreme values included, where instructions may saturate; nothing is written beside the result."""
    kernel = built(dot("block", left, "k", rows, False, right), head)
    for m in (1, 3, 17, 70) if rows == M else (int(rows),):
        for n in (1, 5, 16, 37, 150):
            for k, step in ((1, 4), (60, 64), (64, 64), (132, 136), (200, 201), (259, 264), (600, 600)):
                x, w = _bytes(left, m, k), _bytes(right, n, k)
                y, first = torch.full((m + 2, n + 3), 7, dtype=torch.int32), torch.empty(n, dtype=torch.int32)
                kernel((framed(x, step, 77), framed(w, k + 4, 77), y, first), (m, n, k, step))
                expected = framed(x.int() @ w.int().t(), n + 3, 7)
                assert torch.equal(y, expected), (m, n, k, step)
                assert torch.equal(first, y[1, :n])


def _bytes(dtype: DType, rows: int, columns: int) -> Tensor:
    """Random numbers, of which many are the least and the largest; the last row is of these alone."""
    own, least, largest = RANGES[dtype]
    x = torch.randint(least, largest + 1, (rows, columns), dtype=own)
    x = torch.where(torch.rand(rows, columns) < 0.3, torch.tensor(least, dtype=own), x)
    x = torch.where(torch.rand(rows, columns) < 0.3, torch.tensor(largest, dtype=own), x)
    x[-1] = least or largest
    return x


def test_panels_are_built_once_for_all_kernels(tmp_path: Path) -> None:
    """An object that is damaged is built again."""
    config = Config(cache_dir=str(tmp_path))
    texts = [("block", print_kernel(dot("block", F32, along, M, False))) for along in ("k", "n", "packed")]
    forget_loaded()
    for text in texts:
        (kernel,) = build([text], config)
        assert not isinstance(kernel, BuildError), kernel
    (panels,) = tmp_path.glob("*.o")
    panels.write_bytes(b"damaged")
    for library in tmp_path.glob("*.so"):
        library.unlink()
    forget_loaded()
    assert not any(isinstance(kernel, BuildError) for kernel in build(texts, config))
    assert panels.read_bytes() != b"damaged"


@pytest.mark.parametrize("suffixes", [(".so",), (".so", ".o")])
def test_what_does_not_load_or_link_is_built_anew_and_replaced(tmp_path: Path, suffixes: tuple[str, ...]) -> None:
    """Its digest is right: an earlier version kept what a compiler had made without loading it."""
    config, cache = Config(cache_dir=str(tmp_path)), Cache(tmp_path)
    text = ("block", print_kernel(dot("block", F32, "k", M, False)))
    forget_loaded()
    build([text], config)
    whole = {path: path.read_bytes() for path in tmp_path.iterdir() if path.suffix in suffixes}
    assert {path.suffix for path in whole} == set(suffixes)
    for path in whole:
        cache.publish(path.stem, path.suffix, b"rubbish")
    forget_loaded()
    (kernel,) = build([text], config)
    assert not isinstance(kernel, BuildError), kernel
    assert {path: path.read_bytes() for path in whole} == whole


@pytest.mark.skipif(not find_compiler().has_amx, reason="no AMX")
def test_tiles_of_other_libraries_keep_their_configuration() -> None:
    """They may configure them once for each thread."""
    text = """
    #include "dot.h"
    using namespace fusec;
    extern "C" EXPORT int64_t probe(void* const* buffers, const int64_t*, Team&) {
      uint8_t theirs[64] = {1}, after[64], none[64] = {};
      theirs[16] = 32, theirs[48] = 7;
      load_configuration(theirs);
      const bf16 *const x = (const bf16*)buffers[0], *const w = (const bf16*)buffers[1];
      dot_many_along_k<16>((float*)buffers[2], 40, x, 36, w, 36, 33, 40, 36);
      store_configuration(after);
      load_configuration(none);
      return __builtin_memcmp(theirs, after, sizeof after) ? 256 : 0;
    }
    """
    (probe,) = build([("probe", text)], Config())
    assert isinstance(probe, CppKernel), probe
    x, w, y = torch.randn(33, 36).bfloat16(), torch.randn(40, 36).bfloat16(), torch.empty(33, 40)
    assert not probe((x, w, y), ())
    torch.testing.assert_close(y, x.float() @ w.float().t(), atol=1e-4, rtol=1e-4)
