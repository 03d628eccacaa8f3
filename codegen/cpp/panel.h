// Operands of a block of a matrix product, by any instruction.
#pragma once

#include "vec.h"

namespace fusec {

// Words of neighbours along k: two bfloat16, or four bytes.
struct __attribute__((packed, aligned(2), may_alias)) word { int32_t bits; };
template <class T> struct __attribute__((packed, aligned(1), may_alias)) Quad { int32_t bits; };

// What tiles of one product have in common. The right operand lies along its columns.
template <class A, class L, class R> struct Panel {
  int64_t target_step, left_step, left_k;
  const R* right;
  int64_t right_step, columns, depth;
  bool adds;  // to what is there. Asked when sums are stored: were it known when compiled, all would be compiled twice
};

}  // namespace fusec
