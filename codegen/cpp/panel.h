// Operands of a block of a matrix product, by any instruction.
#pragma once

#include "vec.h"

namespace fusec {

// Words of neighbours along k: two bfloat16, or four bytes.
struct __attribute__((packed, aligned(2), may_alias)) word { int32_t bits; };
template <class T> struct __attribute__((packed, aligned(1), may_alias)) Quad { int32_t bits; };

// Rows of an operand, so far apart in memory.
template <class R> struct Rows {
  typedef R element;
  static constexpr int ahead = 0;
  const R* data;
  int64_t step;
  LANEWISE const R* operator[](int64_t row) const { return data + row * step; }
  LANEWISE Rows from(int64_t row) const { return {data + row * step, step}; }
};

// Rows whose numbers are listed, such as those of pages. The list goes on beyond the last of them: while a row is
// multiplied, memory is asked for the one so far AHEAD.
template <class R> struct ListedRows {
  typedef R element;
  static constexpr int ahead = 32;
  const R* data;
  int64_t step;
  const int64_t* list;
  LANEWISE const R* operator[](int64_t row) const { return data + list[row] * step; }
  LANEWISE ListedRows from(int64_t row) const { return {data, step, list + row}; }
};
template <class R> FN ListedRows<R> listed(const R* data, int64_t step, const int64_t* list) { return {data, step, list}; }

// What tiles of one product have in common. The right operand lies along its columns.
template <class A, class L, class R, class Right = Rows<R>> struct Panel {
  int64_t target_step, left_step, left_k;
  Right right;
  int64_t columns, depth;
  bool adds;  // to what is there. Asked when sums are stored: were it known when compiled, all would be compiled twice
};

}  // namespace fusec
