"""Instructions that few machines have, done by several: what to put in front of a kernel that is to use them."""

import re

import pytest

from fusec.codegen import target_named
from fusec.codegen.cpp import target
from fusec.codegen.cpp.build import CppKernel, build
from fusec.codegen.cpp.compiler import find_compiler
from fusec.codegen.cpp.printer import print_kernel
from fusec.codegen.cpp.target import CppTarget
from fusec.codegen.tile.kernel import Kernel
from fusec.config import Config

WITHOUT_AMX = """
#undef __AMX_TILE__
#undef __AMX_BF16__
#undef __AMX_INT8__
"""
PAIRS = (
    WITHOUT_AMX
    + """
#define __AVX512BF16__ 1
#undef __AVX512FP16__
#define __builtin_ia32_dpbf16ps_v16sf(sums, a, b) emulated_pairs(sums, (Halves32)(a), (Halves32)(b))
#define __builtin_ia32_cvtne2ps2bf16_v32hi emulated_conversion
#define __builtin_ia32_cvtne2ps2bf16_v32bf emulated_conversion
typedef float Floats16 __attribute__((vector_size(64)));
typedef unsigned short Halves32 __attribute__((vector_size(64)));
static inline Floats16 emulated_pairs(Floats16 sums, Halves32 a, Halves32 b) {
  for (int i = 0; i < 32; i++) {
    const unsigned x = (unsigned)a[i] << 16, y = (unsigned)b[i] << 16;
    float left, right;
    __builtin_memcpy(&left, &x, 4);
    __builtin_memcpy(&right, &y, 4);
    sums[i / 2] += left * right;
  }
  return sums;
}
static inline Halves32 emulated_conversion(Floats16 high, Floats16 low) {
  Halves32 pairs;
  for (int i = 0; i < 32; i++) {
    float x = i < 16 ? low[i] : high[i - 16];
    unsigned bits;
    __builtin_memcpy(&bits, &x, 4);
    pairs[i] = (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  return pairs;
}
"""
)
AMX = """
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define FUSEC_AMX_INSTRUCTIONS
namespace fusec {
struct word;
template <class T> struct Quad;
static struct { unsigned char rows, bytes, content[16][64]; } tiles[8];
static inline void load_configuration(const void* shapes) {
  for (int t = 0; t < 8; t++) {
    tiles[t].bytes = ((const unsigned char*)shapes)[16 + 2 * t];
    tiles[t].rows = ((const unsigned char*)shapes)[48 + t];
    __builtin_memset(tiles[t].content, 0, sizeof tiles[t].content);
  }
}
static inline void store_configuration(void* shapes) { __builtin_memset(shapes, 0, 64); }
template <int TILE> static void zero_tile() { __builtin_memset(tiles[TILE].content, 0, sizeof tiles[TILE].content); }
template <int TILE> static void load_tile(const void* p, long bytes) {
  zero_tile<TILE>();
  for (int r = 0; r < tiles[TILE].rows; r++)
    __builtin_memcpy(tiles[TILE].content[r], (const char*)p + r * bytes, tiles[TILE].bytes);
}
template <int TILE> static void store_tile(void* p, long bytes) {
  for (int r = 0; r < tiles[TILE].rows; r++)
    __builtin_memcpy((char*)p + r * bytes, tiles[TILE].content[r], tiles[TILE].bytes);
}
typedef unsigned char byte;
static inline void add_word(byte* sum, const byte* x, const byte* y, const word*, const word*) {
  for (int i = 0; i < 4; i += 2) {
    const unsigned a = (x[i] | x[i + 1] << 8) << 16, b = (y[i] | y[i + 1] << 8) << 16;
    float total, left, right;
    __builtin_memcpy(&total, sum, 4), __builtin_memcpy(&left, &a, 4), __builtin_memcpy(&right, &b, 4);
    total += left * right;
    __builtin_memcpy(sum, &total, 4);
  }
}
template <class L, class R>
static void add_word(byte* sum, const byte* x, const byte* y, const Quad<L>*, const Quad<R>*) {
  int total;
  __builtin_memcpy(&total, sum, 4);
  for (int i = 0; i < 4; i++) total += (int)(L)x[i] * (int)(R)y[i];
  __builtin_memcpy(sum, &total, 4);
}
template <int SUM, int LEFT, int RIGHT, class L, class R> static void multiply_tiles(const L* left, const R* right) {
  for (int r = 0; r < tiles[LEFT].rows; r++)
    for (int c = 0; c < tiles[RIGHT].bytes / 4; c++)
      for (int k = 0; k < tiles[LEFT].bytes / 4; k++) {
        byte* const sum = tiles[SUM].content[r] + 4 * c;
        add_word(sum, tiles[LEFT].content[r] + 4 * k, tiles[RIGHT].content[k] + 4 * c, left, right);
      }
}
}
"""


def _has(feature: str) -> bool:
    return f"#define __{feature}__ 1" in find_compiler().identity


_compiler, _cpp = find_compiler(), target_named("cpp")
BF16_INSTRUCTIONS = [
    *([""] if _cpp.many_bf16_products else []),
    *([PAIRS] if _cpp.lanes == 16 and not _cpp.bf16_products else []),
    *([AMX] if _cpp.lanes == 16 and not _compiler.has_amx else []),
]
"""Of this machine, if it has any, and the others."""
BYTE_INSTRUCTIONS = [
    "",
    *([WITHOUT_AMX] if _compiler.has_amx else [AMX] if _has("AVX512VNNI") else []),
]


def built(kernel: Kernel, head: str) -> CppKernel:
    """Return a kernel that is built behind such a text, without linking what is built for all kernels."""
    text = print_kernel(kernel)
    if head:
        text = head + re.sub("^extern template.*$", "", text, flags=re.MULTILINE)
    (found,) = build([(kernel.name, text)], Config())
    assert isinstance(found, CppKernel), found
    return found


def emulate_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels multiply pairs of bfloat16, by several instructions where the machine has none that does."""
    if not target_named("cpp").bf16_products:
        monkeypatch.setattr(CppTarget, "bf16_products", True)
        monkeypatch.setattr(target, "print_kernel", lambda kernel: PAIRS + print_kernel(kernel))
