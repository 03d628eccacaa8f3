// Blocks of matrix products: accumulators in registers, the weight read once.
//
// target[m, n] = sum over k of left[m, k] * right[k, n], for ROWS rows known when compiled. The left operand lies
// along k and stays in the first-level cache; a register tile takes up to four of its rows at a time.
#pragma once

#include "vec.h"

namespace fusec {

// Products and sums round once, as fma does; nothing else in a kernel may be contracted.
#if defined(__clang__)
#define CONTRACT _Pragma("clang fp contract(fast)")
#define DOT_FUNCTION static __attribute__((noinline)) void
#else
#define CONTRACT
#define DOT_FUNCTION static __attribute__((noinline, optimize("fp-contract=fast"))) void
#endif

template <class A, int N> FN A sum_of(typename Raw<A, N>::type x) {
  if constexpr (N == 1) return x[0];
  else {
    typedef typename Raw<A, N / 2>::type half;
    half low, high;
    __builtin_memcpy(&low, &x, sizeof low);
    __builtin_memcpy(&high, (const char*)&x + sizeof low, sizeof high);
    return sum_of<A, N / 2>(low + high);
  }
}

// The sums of COUNT registers, a power of two, in one: each step folds two registers into halves of one. What is left
// of register i lies in the N / COUNT lanes from i * N / COUNT on.
#if defined(__clang__)
constexpr bool FOLDS = false;
template <class A, int N, int COUNT> typename Raw<A, N>::type sums_of(const typename Raw<A, N>::type* x);
#else
constexpr bool FOLDS = true;
template <class A, int N, int COUNT> FN typename Raw<A, N>::type sums_of(const typename Raw<A, N>::type* x) {
  if constexpr (COUNT == 1) return x[0];
  else {
    typedef typename Raw<typename IntOf<sizeof(A)>::type, N>::type places;
    constexpr int run = N / COUNT;
    const auto a = sums_of<A, N, COUNT / 2>(x), b = sums_of<A, N, COUNT / 2>(x + COUNT / 2);
    places even, odd;
    for (int i = 0; i < N; i++) even[i] = i < N / 2 ? i / run * 2 * run + i % run : N + (i - N / 2) / run * 2 * run + i % run;
    odd = even + run;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
  }
}
#endif

// Pairs of bfloat16 products are added into float lanes by one instruction, where the machine has it.
#if defined(__AVX512BF16__) && defined(__GNUC__) && !defined(__clang__)
typedef int16_t Pairs __attribute__((vector_size(64)));
template <class A, class L, class R, int N>
constexpr bool in_pairs = same_type<A, float>::value && same_type<L, bf16>::value && same_type<R, bf16>::value && N == 16;
FN Pairs load_pairs(const void* p) {
  Pairs x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
FN Raw<float, 16>::type add_pairs(Raw<float, 16>::type sum, Pairs a, Pairs b) {
#if __GNUC__ >= 13
  typedef __bf16 Halves __attribute__((vector_size(64)));
  return __builtin_ia32_dpbf16ps_v16sf(sum, (Halves)a, (Halves)b);
#else
  return __builtin_ia32_dpbf16ps_v16sf(sum, a, b);
#endif
}
#endif

// The right operand lies along k: lanes along k, COLUMNS of its columns at once, folded at the end.
template <int ROWS, int COLUMNS, int N, bool ADDS = false, class A, class L, class R>
DOT_FUNCTION dot_tile_k(A* target, int64_t target_step, const L* left, int64_t left_step, const R* right,
                        int64_t right_step, int64_t depth) {
  CONTRACT
  typedef typename Raw<A, N>::type raw;
  raw sums[ROWS][COLUMNS] = {};
  int64_t k = 0;
#if defined(__AVX512BF16__) && defined(__GNUC__) && !defined(__clang__)
  if constexpr (in_pairs<A, L, R, N>) {
    for (; k + 2 * N <= depth; k += 2 * N) {
      Pairs columns[COLUMNS];
      for (int c = 0; c < COLUMNS; c++) columns[c] = load_pairs(right + c * right_step + k);
      for (int r = 0; r < ROWS; r++) {
        const Pairs row = load_pairs(left + r * left_step + k);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = add_pairs(sums[r][c], row, columns[c]);
      }
    }
  }
#endif
  for (; k + N <= depth; k += N) {
    raw columns[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) columns[c] = load<N>(right + c * right_step + k, All{}).v;
    for (int r = 0; r < ROWS; r++) {
      const raw row = load<N>(left + r * left_step + k, All{}).v;
      for (int c = 0; c < COLUMNS; c++) sums[r][c] += row * columns[c];
    }
  }
  A found[ROWS * COLUMNS];
  if constexpr (FOLDS && ROWS * COLUMNS % N == 0) {
    for (int i = 0; i < ROWS * COLUMNS; i += N) {
      const raw folded = sums_of<A, N, N>(&sums[0][0] + i);
      __builtin_memcpy(found + i, &folded, sizeof folded);
    }
  } else {
    for (int i = 0; i < ROWS * COLUMNS; i++) found[i] = sum_of<A, N>((&sums[0][0])[i]);
  }
  for (int r = 0; r < ROWS; r++) {
    for (int c = 0; c < COLUMNS; c++) {
      A sum = found[r * COLUMNS + c];
      for (int64_t i = k; i < depth; i++) sum += A(load(left + r * left_step + i)) * A(load(right + c * right_step + i));
      A* const place = target + r * target_step + c;
      *place = ADDS ? *place + sum : sum;
    }
  }
}

template <int ROWS, int COLUMNS, int N, class A, class L, class R>
FN void dot_rows_k(A* target, int64_t target_step, const L* left, int64_t left_step, const R* right,
                   int64_t right_step, int64_t depth) {
  constexpr int full = ROWS / 4 * 4;
  for (int r = 0; r < full; r += 4)
    dot_tile_k<4, COLUMNS, N>(target + r * target_step, target_step, left + r * left_step, left_step, right, right_step, depth);
  if constexpr (ROWS % 4 != 0)
    dot_tile_k<ROWS % 4, COLUMNS, N>(target + full * target_step, target_step, left + full * left_step, left_step, right,
                                     right_step, depth);
}

template <int ROWS, int N, class A, class L, class R>
FN void dot_along_k(A* target, int64_t target_step, const L* left, int64_t left_step, const R* right,
                    int64_t right_step, int64_t columns, int64_t depth) {
  constexpr int wide = ROWS == 1 ? 8 : 4;
  int64_t c = 0;
  for (; c + wide <= columns; c += wide)
    dot_rows_k<ROWS, wide, N>(target + c, target_step, left, left_step, right + c * right_step, right_step, depth);
  for (; c < columns; c++)
    dot_rows_k<ROWS, 1, N>(target + c, target_step, left, left_step, right + c * right_step, right_step, depth);
}

// As many rows as it takes: a few columns stay in the first-level cache while all rows pass by.
template <int N, bool ADDS, class A, class L, class R>
FN void dot_rows_many_k(A* target, int64_t target_step, const L* left, int64_t left_step, const R* right,
                        int64_t right_step, int64_t rows, int64_t columns, int64_t depth) {
  constexpr int some = 4, wide = 4;
  int64_t c = 0;
  for (; c + wide <= columns; c += wide) {
    int64_t r = 0;
    for (; r + some <= rows; r += some)
      dot_tile_k<some, wide, N, ADDS>(target + r * target_step + c, target_step, left + r * left_step, left_step,
                                      right + c * right_step, right_step, depth);
    for (; r < rows; r++)
      dot_tile_k<1, wide, N, ADDS>(target + r * target_step + c, target_step, left + r * left_step, left_step,
                                   right + c * right_step, right_step, depth);
  }
  for (; c < columns; c++)
    for (int64_t r = 0; r < rows; r++)
      dot_tile_k<1, 1, N, ADDS>(target + r * target_step + c, target_step, left + r * left_step, left_step,
                                right + c * right_step, right_step, depth);
}

// So much of k at a time that a block of both operands stays in the second-level cache.
template <int N, class A, class L, class R>
FN void dot_many_along_k(A* target, int64_t target_step, const L* left, int64_t left_step, const R* right,
                         int64_t right_step, int64_t rows, int64_t columns, int64_t depth) {
  constexpr int64_t most = 4096 / sizeof(L);
  const int64_t some = depth < most ? depth : most;
  dot_rows_many_k<N, false>(target, target_step, left, left_step, right, right_step, rows, columns, some);
  for (int64_t k = some; k < depth; k += most)
    dot_rows_many_k<N, true>(target, target_step, left + k, left_step, right + k, right_step, rows, columns,
                             depth - k < most ? depth - k : most);
}

// The right operand lies along its columns: lanes along the columns, TILES of them at once.
template <int ROWS, int TILES, int N, bool ADDS, class A, class L, class R>
DOT_FUNCTION dot_tile_n(A* target, int64_t target_step, const L* left, int64_t left_step, int64_t left_k,
                        const R* right, int64_t right_step, int64_t columns, int64_t depth) {
  CONTRACT
  typedef typename Raw<A, N>::type raw;
  raw sums[ROWS][TILES] = {};
  for (int64_t k = 0; k < depth; k++) {
    raw row[TILES];
    if (columns >= TILES * N) for (int t = 0; t < TILES; t++) row[t] = load<N>(right + k * right_step + t * N, All{}).v;
    else row[0] = load<N>(right + k * right_step, Part{columns}).v;
    for (int r = 0; r < ROWS; r++) {
      const A x = A(load(left + r * left_step + k * left_k));
      for (int t = 0; t < TILES; t++) sums[r][t] += x * row[t];
    }
  }
  for (int r = 0; r < ROWS; r++) {
    A* const place = target + r * target_step;
    if (columns >= TILES * N) {
      for (int t = 0; t < TILES; t++) {
        if (ADDS) sums[r][t] += load<N>(place + t * N, All{}).v;
        store(place + t * N, Vec<A, N>(sums[r][t]), All{});
      }
    } else {
      if (ADDS) sums[r][0] += load<N>(place, Part{columns}).v;
      store(place, Vec<A, N>(sums[r][0]), Part{columns});
    }
  }
}

template <int ROWS, int TILES, int N, bool ADDS, class A, class L, class R>
FN void dot_rows_n(A* target, int64_t target_step, const L* left, int64_t left_step, int64_t left_k, const R* right,
                   int64_t right_step, int64_t columns, int64_t depth) {
  constexpr int full = ROWS / 4 * 4;
  for (int r = 0; r < full; r += 4)
    dot_tile_n<4, TILES, N, ADDS>(target + r * target_step, target_step, left + r * left_step, left_step, left_k, right,
                                  right_step, columns, depth);
  if constexpr (ROWS % 4 != 0)
    dot_tile_n<ROWS % 4, TILES, N, ADDS>(target + full * target_step, target_step, left + full * left_step, left_step,
                                         left_k, right, right_step, columns, depth);
}

template <int ROWS, int N, bool ADDS, class A, class L, class R>
FN void dot_along_n(A* target, int64_t target_step, const L* left, int64_t left_step, int64_t left_k, const R* right,
                    int64_t right_step, int64_t columns, int64_t depth) {
  constexpr int tiles = 4;
  int64_t c = 0;
  for (; c + tiles * N <= columns; c += tiles * N)
    dot_rows_n<ROWS, tiles, N, ADDS>(target + c, target_step, left, left_step, left_k, right + c, right_step, tiles * N,
                                     depth);
  for (; c < columns; c += N)
    dot_rows_n<ROWS, 1, N, ADDS>(target + c, target_step, left, left_step, left_k, right + c, right_step,
                                 columns - c < N ? columns - c : N, depth);
}

// As many rows as it takes: six at a time leave room for their sums, one row of the right operand and a factor.
template <int N, bool ADDS, class A, class L, class R>
FN void dot_many_along_n(A* target, int64_t target_step, const L* left, int64_t left_step, int64_t left_k,
                         const R* right, int64_t right_step, int64_t rows, int64_t columns, int64_t depth) {
  constexpr int some = 6, tiles = 4;
  for (int64_t c = 0; c < columns; c += tiles * N) {
    const int64_t wide = columns - c < tiles * N ? columns - c : tiles * N;
    int64_t r = 0;
    if (wide == tiles * N)
      for (; r + some <= rows; r += some)
        dot_tile_n<some, tiles, N, ADDS>(target + r * target_step + c, target_step, left + r * left_step, left_step,
                                         left_k, right + c, right_step, wide, depth);
    for (; r < rows; r++)
      dot_along_n<1, N, ADDS>(target + r * target_step + c, target_step, left + r * left_step, left_step, left_k,
                              right + c, right_step, wide, depth);
  }
}

}  // namespace fusec
