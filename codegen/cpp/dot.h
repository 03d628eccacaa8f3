// Blocks of matrix products: accumulators in registers, the weight read once.
//
// target[m, n] = sum over k of left[m, k] * right[k, n]. The left operand lies along k and stays in the first-level
// cache; a register tile takes up to six of its rows at a time. A few rows, ROWS, are known when compiled. The tiles of
// many rows are RowTiles, built once for all kernels, which name as `extern template` what they are linked with:
// compiling them takes several times as long as all else.
#pragma once

#include "amx.h"

namespace fusec {

// Products and sums round once, as fma does; nothing else in a kernel may be contracted.
#if defined(__clang__)
#define CONTRACT _Pragma("clang fp contract(fast)")
#define DOT_FUNCTION static __attribute__((noinline)) void
#else
#define CONTRACT
#define DOT_FUNCTION static __attribute__((noinline, optimize("fp-contract=fast"))) void
#endif

// Vector registers of the machine: what sums, operands and factors of a tile have to fit into.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
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
template <class A, int N, int COUNT> FN typename Raw<A, N>::type sums_of(const typename Raw<A, N>::type* x) {
  if constexpr (COUNT == 1) return x[0];
#if !defined(__clang__)
  else {
    typedef typename Raw<typename IntOf<sizeof(A)>::type, N>::type places;
    constexpr int run = N / COUNT;
    const auto a = sums_of<A, N, COUNT / 2>(x), b = sums_of<A, N, COUNT / 2>(x + COUNT / 2);
    places even, odd;
    for (int i = 0; i < N; i++) {
      const int half = i % (N / 2);
      even[i] = (i < N / 2 ? 0 : N) + half / run * 2 * run + half % run;
    }
    odd = even + run;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
  }
#endif
}

// How many of so many registers are folded at a time.
template <int N> constexpr int together(int count) {
#if defined(__clang__)
  return 1;
#else
  int some = 1;
  while (some < count && some < N) some *= 2;
  return some;
#endif
}

// Of each run of RUN lanes the sum, in all of its lanes.
template <class A, int N, int RUN> FN typename Raw<A, N>::type sums_of_runs(typename Raw<A, N>::type x) {
  if constexpr (RUN == 1) return x;
#if !defined(__clang__)
  else {
    typename Raw<typename IntOf<sizeof(A)>::type, N>::type other;
    for (int i = 0; i < N; i++) other[i] = i ^ RUN / 2;
    return sums_of_runs<A, N, RUN / 2>(x + __builtin_shuffle(x, other));
  }
#endif
}

// found[r * COLUMNS + c] = the sum of the lanes of sums[r][c]. The sums are named one by one: where the compiler does not
// know which one is meant, all of them lie in memory throughout the loop that adds them up.
template <int N> constexpr int folded(int count) { return count + together<N>(count); }
template <int ROWS, int COLUMNS, int N, class A>
FN void fold_tile(typename Raw<A, N>::type (&sums)[ROWS][COLUMNS], A* found) {
  typedef typename Raw<A, N>::type raw;
  constexpr int all = ROWS * COLUMNS, some = together<N>(all), run = N / some;
  for (int i = 0; i < all; i += some) {
    raw group[some] = {};
    for (int j = 0; j < some && i + j < all; j++) group[j] = sums[(i + j) / COLUMNS][(i + j) % COLUMNS];
    const raw rest = sums_of<A, N, some>(group);
#if defined(__clang__)
    found[i] = sum_of<A, N>(rest);
#else
    typename Raw<typename IntOf<sizeof(A)>::type, N>::type first;
    for (int j = 0; j < N; j++) first[j] = j * run % N;
    const raw in_order = __builtin_shuffle(sums_of_runs<A, N, run>(rest), first);
    __builtin_memcpy(found + i, &in_order, some * sizeof(A));
#endif
  }
}

// How far ahead of some columns memory is asked for: at least the next ones.
constexpr int distance(int ahead, int columns) { return ahead < columns ? columns : ahead; }

// The right operand lies along k: lanes along k, COLUMNS of its columns at once, folded at the end. What the next
// columns need is asked for meanwhile, a line at a time: memory that is left to guess starts anew with every column.
// It goes to the second-level cache, which waits for more lines at once than the first.
template <int ROWS, int COLUMNS, int N, class A, class L, class Right>
DOT_FUNCTION dot_tile_k(A* target, int64_t target_step, const L* left, int64_t left_step, const Right right,
                        int64_t depth) {
  CONTRACT
  typedef typename Right::element R;
  typedef typename Raw<A, N>::type raw;
  raw sums[ROWS][COLUMNS] = {};
  const auto ask_for_next = [&](int64_t k) LANEWISE {
    for (int c = 0; c < COLUMNS; c++) __builtin_prefetch(right[c + distance(Right::ahead, COLUMNS)] + k, 0, 2);
  };
  const auto add = [&](int64_t k) LANEWISE {
    raw rows[ROWS];
    for (int r = 0; r < ROWS; r++) rows[r] = cast<A>(load<N>(left + r * left_step + k, All{})).v;
    for (int c = 0; c < COLUMNS; c++) {
      const raw column = cast<A>(load<N>(right[c] + k, All{})).v;
      for (int r = 0; r < ROWS; r++) sums[r][c] += rows[r] * column;
    }
  };
  int64_t k = 0;
  typedef typename StepOf<A, L, R, N>::type step;
  if constexpr (step::count > 1) {
    raw totals[ROWS] = {};
    for (; k + step::count * N <= depth; k += step::count * N) {
      decltype(step::left(left)) rows[ROWS];
      for (int r = 0; r < ROWS; r++) {
        rows[r] = step::left(left + r * left_step + k);
        if constexpr (step::excess) totals[r] = step::total(totals[r], rows[r]);
      }
      ask_for_next(k);
      for (int c = 0; c < COLUMNS; c++) {
        const auto column = step::right(right[c] + k);
        for (int r = 0; r < ROWS; r++) sums[r][c] = step::add(sums[r][c], rows[r], column);
      }
    }
    if constexpr (step::excess)
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] -= totals[r] * step::excess;
  }
  constexpr int line = 64 / sizeof(R) < N ? N : 64 / sizeof(R);
  for (; k + line <= depth; k += line) {
    ask_for_next(k);
    for (int i = 0; i < line; i += N) add(k + i);
  }
  if (line > N)
    for (; k + N <= depth; k += N) add(k);
  A found[folded<N>(ROWS * COLUMNS)];
  fold_tile<ROWS, COLUMNS, N>(sums, found);
  for (int r = 0; r < ROWS; r++) {
    for (int c = 0; c < COLUMNS; c++) {
      A sum = found[r * COLUMNS + c];
      const L* const row = left + r * left_step;
      const R* const column = right[c];
      for (int64_t i = k; i < depth; i++) sum += A(load(row + i)) * A(load(column + i));
      target[r * target_step + c] = sum;
    }
  }
}

template <int ROWS, int COLUMNS, int N, class A, class L, class Right>
FN void dot_rows_k(A* target, int64_t target_step, const L* left, int64_t left_step, const Right& right, int64_t depth) {
  constexpr int full = ROWS / 4 * 4;
  for (int r = 0; r < full; r += 4)
    dot_tile_k<4, COLUMNS, N>(target + r * target_step, target_step, left + r * left_step, left_step, right, depth);
  if constexpr (ROWS % 4 != 0)
    dot_tile_k<ROWS % 4, COLUMNS, N>(target + full * target_step, target_step, left + full * left_step, left_step,
                                     right, depth);
}

template <int ROWS, int N, class A, class L, class Right>
FN void dot_along_k(A* target, int64_t target_step, const L* left, int64_t left_step, const Right& right,
                    int64_t columns, int64_t depth) {
  constexpr int wide = ROWS == 1 ? 8 : ROWS == 2 ? 4 : REGISTERS / 8;
  int64_t c = 0;
  for (; c + wide <= columns; c += wide)
    dot_rows_k<ROWS, wide, N>(target + c, target_step, left, left_step, right.from(c), depth);
  for (; c < columns; c++) dot_rows_k<ROWS, 1, N>(target + c, target_step, left, left_step, right.from(c), depth);
}
template <int ROWS, int N, class A, class L, class R>
FN void dot_along_k(A* target, int64_t target_step, const L* left, int64_t left_step, const R* right,
                    int64_t right_step, int64_t columns, int64_t depth) {
  dot_along_k<ROWS, N>(target, target_step, left, left_step, Rows<R>{right, right_step}, columns, depth);
}

// Rows of a left operand, so far apart, and their elements. Those of few rows are neighbours.
template <class L> struct Left {
  const L* data;
  int64_t step, step_k;
};

// The right operand is computed: values(column, o) returns a function of (k, lanes, tiles), which fills a tile of each
// segment of k, and holds whatever is the same for all k, such as scales and tables. Each segment has its own left
// operand; fetch(column, o, k) prefetches what a tile is computed from. k is outer * inner steps long, and one prefetch
// serves LINE of them. Columns are prefetched AHEAD of the tile, at least those of the next one.
template <class Tiles, int COLUMNS> struct ColumnTiles {
  Tiles first;
  ColumnTiles<Tiles, COLUMNS - 1> rest;
  template <class Values>
  LANEWISE ColumnTiles(const Values& values, int64_t column, int64_t o)
      : first(values(column, o)), rest(values, column + 1, o) {}
  template <class Use> LANEWISE void each(const Use& use, int c = 0) const {
    use(c, first);
    rest.each(use, c + 1);
  }
};
template <class Tiles> struct ColumnTiles<Tiles, 0> {
  template <class Values> LANEWISE ColumnTiles(const Values&, int64_t, int64_t) {}
  template <class Use> LANEWISE void each(const Use&, int) const {}
};

// Adds the products of two tiles of the right operand, in pairs of bfloat16.
template <int ROWS, class Sums, class L, class Tile>
FN void add_pairs_of(Sums& sums, int c, const Left<L>& left, int64_t k, Tile low, Tile high) {
#ifdef IN_PAIRS
  const Pairs x = paired(low.v, high.v);
  for (int r = 0; r < ROWS; r++) sums[r][c] = add_pairs(sums[r][c], PairStep::left(left.data + r * left.step + k), x);
#endif
}

// The same of tiles that are pairs already.
template <int ROWS, int SEGMENTS, class Sums, class L, class Fill>
FN void add_filled_pairs(Sums& sums, int c, const Left<L>* lefts, int64_t o, const Fill& fill, int64_t k) {
#ifdef IN_PAIRS
  Pairs tiles[SEGMENTS];
  fill(k, All{}, tiles);
  for (int s = 0; s < SEGMENTS; s++)
    for (int r = 0; r < ROWS; r++)
      sums[r][c] = add_pairs(sums[r][c], PairStep::left(lefts[s].data + r * lefts[s].step + o + k), tiles[s]);
#endif
}

template <int ROWS, int COLUMNS, int N, int SEGMENTS, int LINE, int AHEAD, bool PAIRED, class A, class L, class Values,
          class Fetch>
DOT_FUNCTION dot_tile_computed(A* target, int64_t target_step, const Left<L>* lefts, const Values& values,
                               const Fetch& fetch, int64_t column, int64_t outer, int64_t inner) {
  CONTRACT
  typename Raw<A, N>::type sums[ROWS][COLUMNS] = {};
  for (int64_t o = 0; o < outer; o++) {
    const ColumnTiles<decltype(values(column, o)), COLUMNS> columns(values, column, o);
    const auto add = [&](int64_t k, auto lanes) LANEWISE {
      columns.each([&](int c, const auto& fill) LANEWISE {
        Vec<A, N> tiles[SEGMENTS];
        fill(k, lanes, tiles);
        for (int s = 0; s < SEGMENTS; s++) {
          const auto x = keep(lanes, tiles[s], Vec<A, N>(A(0))).v;
          const L* const left = lefts[s].data + o * inner + k;
          for (int r = 0; r < ROWS; r++) sums[r][c] += cast<A>(load<N>(left + r * lefts[s].step, lanes)).v * x;
        }
      });
    };
    const auto add_all = [&](int64_t k, int64_t end) LANEWISE {
      if constexpr (in_pairs<A, L, bf16, N>)
        for (; k + 2 * N <= end; k += 2 * N)
          columns.each([&](int c, const auto& fill) LANEWISE {
            if constexpr (PAIRED) {
              add_filled_pairs<ROWS, SEGMENTS>(sums, c, lefts, o * inner, fill, k);
            } else {
              Vec<A, N> low[SEGMENTS], high[SEGMENTS];
              fill(k, All{}, low);
              fill(k + N, All{}, high);
              for (int s = 0; s < SEGMENTS; s++) add_pairs_of<ROWS>(sums, c, lefts[s], o * inner + k, low[s], high[s]);
            }
          });
      if constexpr (!PAIRED)
        for (; k + N <= end; k += N) add(k, All{});
      return k;
    };
    int64_t k = 0;
    for (; k + LINE <= inner; k += LINE) {
      for (int c = 0; c < COLUMNS; c++) fetch(column + distance(AHEAD, COLUMNS) + c, o, k);
      add_all(k, k + LINE);
    }
    if (LINE > N) k = add_all(k, inner);
    if constexpr (!PAIRED)
      if (k < inner) add(k, Part{inner - k});
  }
  A found[folded<N>(ROWS * COLUMNS)];
  fold_tile<ROWS, COLUMNS, N>(sums, found);
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++) target[r * target_step + c] = found[r * COLUMNS + c];
}

// Columns from first to last, and rows in one part, or two of more than 8: the right operand is computed for each. If it
// is PAIRED, its tiles are pairs of bfloat16, of which whole ones fill the inner steps.
template <int ROWS, int N, int SEGMENTS, int LINE, int AHEAD, bool PAIRED = false, class A, class L, class Values,
          class Fetch>
FN void dot_computed(A* target, int64_t target_step, const Left<L>* lefts, const Values& values, const Fetch& fetch,
                     int64_t first, int64_t last, int64_t outer, int64_t inner) {
  if constexpr (ROWS > (in_pairs<A, L, bf16, N> ? 12 : 8)) {
    constexpr int half = (ROWS + 1) / 2;
    Left<L> below[SEGMENTS];
    for (int s = 0; s < SEGMENTS; s++) below[s] = {lefts[s].data + half * lefts[s].step, lefts[s].step, 1};
    dot_computed<half, N, SEGMENTS, LINE, AHEAD, PAIRED>(target, target_step, lefts, values, fetch, first, last, outer,
                                                         inner);
    dot_computed<ROWS - half, N, SEGMENTS, LINE, AHEAD, PAIRED>(target + half * target_step, target_step,
                                                                (const Left<L>*)below, values, fetch, first, last,
                                                                outer, inner);
  } else {
    constexpr int wide = ROWS <= 4 ? REGISTERS / 8 : ROWS <= 8 ? REGISTERS / 16 : 1;
    int64_t c = first;
    for (; c + wide <= last; c += wide)
      dot_tile_computed<ROWS, wide, N, SEGMENTS, LINE, AHEAD, PAIRED>(target + c - first, target_step, lefts, values,
                                                                      fetch, c, outer, inner);
    for (; c < last; c++)
      dot_tile_computed<ROWS, 1, N, SEGMENTS, LINE, AHEAD, PAIRED>(target + c - first, target_step, lefts, values,
                                                                   fetch, c, outer, inner);
  }
}

// The right operand is codes with a scale and a zero for each group: values(column, o) returns those of group o, in
// which products of bytes are added up exactly.
template <class R, int LOW, int HIGH, class Fill> struct Group {
  typedef GroupStep<R, LOW, HIGH> step;
  typedef Vec<R, 32> tile;
  Fill fill;
  float scale;
  int32_t zero;
};
template <class R, int LOW, int HIGH, class Fill> FN Group<R, LOW, HIGH, Fill> group(Fill fill, float scale, int32_t zero) {
  return {fill, scale, zero};
}

// Of each row and group the sum of the left operand, in lanes.
typedef Raw<int32_t, 8>::type Totals;

template <int ROWS, int COLUMNS, int SEGMENTS, int AHEAD, class Values, class Fetch>
DOT_FUNCTION dot_tile_grouped(float* target, int64_t target_step, const Left<int8_t>* lefts, const Totals* totals,
                              const Values& values, const Fetch& fetch, int64_t column, int64_t outer, int64_t inner) {
  CONTRACT
  typedef decltype(values(column, 0)) group;
  typedef typename group::step step;
  typedef Raw<float, 8>::type floats;
  floats sums[ROWS][COLUMNS] = {};
  for (int64_t o = 0; o < outer; o++) {
    const ColumnTiles<group, COLUMNS> columns(values, column, o);
    Totals found[ROWS][COLUMNS] = {};
    for (int64_t k = 0; k < inner; k += 32) {
      if (k % 64 == 0)
        for (int c = 0; c < COLUMNS; c++) fetch(column + distance(AHEAD, COLUMNS) + c, o, k);
      typename step::bytes rows[ROWS][SEGMENTS];
      for (int r = 0; r < ROWS; r++)
        for (int s = 0; s < SEGMENTS; s++)
          rows[r][s] = load<32>(lefts[s].data + r * lefts[s].step + o * inner + k, All{}).v;
      columns.each([&](int c, const group& one) LANEWISE {
        typename group::tile tiles[SEGMENTS];
        one.fill(k, All{}, tiles);
        typename step::bytes codes[SEGMENTS];
        for (int s = 0; s < SEGMENTS; s++) codes[s] = (typename step::bytes)tiles[s].v;
        for (int r = 0; r < ROWS; r++) found[r][c] = step::template add<SEGMENTS>(found[r][c], rows[r], codes);
      });
    }
    columns.each([&](int c, const group& one) LANEWISE {
      for (int r = 0; r < ROWS; r++) {
        const Totals exact = found[r][c] - totals[r * outer + o] * (one.zero + step::excess);
        sums[r][c] += __builtin_convertvector(exact, floats) * one.scale;
      }
    });
  }
  float all[folded<8>(ROWS * COLUMNS)];
  fold_tile<ROWS, COLUMNS, 8>(sums, all);
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++) target[r * target_step + c] = all[r * COLUMNS + c];
}

// As dot_computed, in tiles of 32 bytes. ``totals`` is memory for eight numbers of each row and group.
template <int ROWS, int SEGMENTS, int AHEAD, class Values, class Fetch>
FN void dot_grouped(float* target, int64_t target_step, const Left<int8_t>* lefts, int32_t* totals, const Values& values,
                    const Fetch& fetch, int64_t first, int64_t last, int64_t outer, int64_t inner) {
  if constexpr (ROWS > 8) {
    constexpr int half = (ROWS + 1) / 2;
    Left<int8_t> below[SEGMENTS];
    for (int s = 0; s < SEGMENTS; s++) below[s] = {lefts[s].data + half * lefts[s].step, lefts[s].step, 1};
    dot_grouped<half, SEGMENTS, AHEAD>(target, target_step, lefts, totals, values, fetch, first, last, outer, inner);
    dot_grouped<ROWS - half, SEGMENTS, AHEAD>(target + half * target_step, target_step, below, totals, values, fetch,
                                              first, last, outer, inner);
  } else {
    typedef GroupStep<uint8_t, 0, 1> step;
    const step::bytes one = step::bytes{} + 1;
    Totals* const found = (Totals*)totals;
    for (int r = 0; r < ROWS; r++)
      for (int64_t o = 0; o < outer; o++) {
        Totals total{};
        for (int s = 0; s < SEGMENTS; s++)
          for (int64_t k = 0; k < inner; k += 32) {
            const step::bytes row = load<32>(lefts[s].data + r * lefts[s].step + o * inner + k, All{}).v;
            total = step::add<1>(total, &row, &one);
          }
        found[r * outer + o] = total;
      }
    constexpr int wide = ROWS == 1 ? 4 : ROWS <= 4 ? REGISTERS / 8 : REGISTERS / 16;
    int64_t c = first;
    for (; c + wide <= last; c += wide)
      dot_tile_grouped<ROWS, wide, SEGMENTS, AHEAD>(target + c - first, target_step, lefts, found, values, fetch, c,
                                                    outer, inner);
    for (; c < last; c++)
      dot_tile_grouped<ROWS, 1, SEGMENTS, AHEAD>(target + c - first, target_step, lefts, found, values, fetch, c, outer,
                                                 inner);
  }
}

// A step along k: how many rows of the right operand it takes, and what is multiplied in each lane.
struct OneRow { static constexpr int count = 1; };

// A number, a word of two bfloat16, or four bytes.
template <class A, class L, class R, int N> struct Lanes : OneRow {
  typedef typename Raw<A, N>::type row;
  template <class Count> static LANEWISE row of(const R* p, const R*, Count count) {
    return cast<A>(load<N>(p, count)).v;
  }
  static LANEWISE A factor(const L* p) { return A(load(p)); }
  static LANEWISE row add(row sum, A x, row y) { return sum + x * y; }
};
#ifdef IN_PAIRS
// Two rows of bfloat16 in pairs, and two neighbours along k of the left operand.
struct RowPairs {
  static constexpr int count = 2;
  typedef Pairs row;
  template <class Count> static LANEWISE row of(const bf16* p, const bf16* next, Count count) {
    return interleaved(load<16>((const int16_t*)p, count).v, load<16>((const int16_t*)next, count).v);
  }
  static LANEWISE Pairs factor(const bf16* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return (Pairs)(Raw<int32_t, 16>::type{} + pair);
  }
  static LANEWISE Raw<float, 16>::type add(Raw<float, 16>::type sum, Pairs x, row y) { return add_pairs(sum, x, y); }
};
template <> struct Lanes<float, word, word, 16> : OneRow {
  typedef Raw<int32_t, 16>::type row;
  typedef Raw<float, 16>::type floats;
  template <class Count> static LANEWISE row of(const word* p, const word*, Count count) {
    return load<16>((const int32_t*)p, count).v;
  }
  static LANEWISE row factor(const word* p) { return row{} + p->bits; }
  static LANEWISE floats add(floats sum, row x, row y) { return add_pairs(sum, (Pairs)x, (Pairs)y); }
};
#endif
#ifdef IN_QUADS
template <class L, class R> struct Lanes<int32_t, Quad<L>, Quad<R>, QUAD_LANES> : OneRow {
  typedef typename Raw<int32_t, QUAD_LANES>::type row;
  template <class Count> static LANEWISE row of(const Quad<R>* p, const Quad<R>*, Count count) {
    return load<QUAD_LANES>((const int32_t*)p, count).v;
  }
  static LANEWISE row factor(const Quad<L>* p) { return row{} + p->bits; }
  static LANEWISE row add(row sum, row x, row y) { return QuadStep<L, L, QUAD_LANES>::add(sum, x, y); }
};
#endif

// Lanes of one tile that count, where so many of a row of tiles do.
template <int N> FN All of_tile(All, int) { return {}; }
template <int N> FN Part of_tile(Part all, int tile) {
  const int64_t count = all.count - tile * N;
  return {count < 0 ? 0 : count < N ? count : N};
}

// Lanes along the columns, TILES of them at once. Of as many rows from ``next`` on, so many tiles each are asked for
// meanwhile; or of listed ones those further on.
template <class Step, int ROWS, int TILES, int N, class A, class L, class R, class Right, class Count>
DOT_FUNCTION dot_tile_n(const Panel<A, L, R, Right>& panel, A* target, const L* left, int64_t first, Count columns,
                        const R* next, int asked) {
  CONTRACT
  constexpr int line = N * sizeof(R) < 64 ? 64 / (N * sizeof(R)) : 1;  // tiles
  const int64_t target_step = panel.target_step, left_step = panel.left_step, left_k = panel.left_k;
  const int64_t depth = panel.depth;
  Right right = panel.right;
  right.data += first, target += first;
  typename Raw<A, N>::type sums[ROWS][TILES] = {};
  for (int64_t k = 0; k + Step::count <= depth; k += Step::count) {
    typename Step::row row[TILES];
    const R *const place = right[k], *const last = right[k + Step::count - 1];
    for (int t = 0; t < TILES; t++) row[t] = Step::of(place + t * N, last + t * N, of_tile<N>(columns, t));
    if constexpr (Right::ahead > 0) {
      for (int i = 0; i < Step::count; i++)
        for (int t = 0; t < TILES; t += line) __builtin_prefetch(right[k + Right::ahead + i] + t * N, 0, 2);
    } else {
      for (int t = 0; t < asked; t += line) __builtin_prefetch(next + k * right.step + t * N, 0, 2);
    }
    for (int r = 0; r < ROWS; r++) {
      const auto x = Step::factor(left + r * left_step + k * left_k);
      for (int t = 0; t < TILES; t++) sums[r][t] = Step::add(sums[r][t], x, row[t]);
    }
  }
  // As in the loop above, each sum is to be named: else the compiler keeps those of a part of a tile in memory.
  const auto each = [&](const auto& does) LANEWISE {
    A* place = target;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++, place += target_step)
#pragma GCC unroll 4
      for (int t = 0; t < TILES; t++) does(place + t * N, sums[r][t], of_tile<N>(columns, t));
  };
  if (panel.adds) each([](A* place, auto& sum, auto count) LANEWISE { sum += load<N>(place, count).v; });
  each([](A* place, auto& sum, auto count) LANEWISE { store(place, Vec<A, N>(sum), count); });
}

constexpr int64_t TILES_AT_ONCE = REGISTERS / 8;
constexpr int64_t PANEL_TILES = 4;  // tiles of columns that stay in the first-level cache beside some rows

// As many columns as it takes: so many tiles at a time, then up to three, then what is left, of which only the last
// tile may be not full.
template <class Step, int ROWS, int N, class A, class L, class R, class Right>
FN void dot_columns_n(const Panel<A, L, R, Right>& panel, A* target, const L* left, const R* next = nullptr,
                      int asked = 0) {
  int64_t c = 0;
#define TILES(some, count) \
  dot_tile_n<Step, ROWS, some, N>(panel, target, left, c, count, next, asked), c += some * N, asked = 0
  while (c + TILES_AT_ONCE * N <= panel.columns) TILES(TILES_AT_ONCE, All{});
  if constexpr (TILES_AT_ONCE > 3)
    if (c + 3 * N <= panel.columns) TILES(3, All{});
  if constexpr (TILES_AT_ONCE > 2)
    if (c + 2 * N <= panel.columns) TILES(2, All{});
  const Part rest{panel.columns - c};
  if (rest.count > N) TILES(2, rest);
  else if (rest.count == N) TILES(1, All{});
  else if (rest.count > 0) TILES(1, rest);
#undef TILES
}

template <class Step, int ROWS, int N, class A, class L, class R, class Right>
FN void dot_panels_n(const Panel<A, L, R, Right>& whole, A* target, const L* left) {
  constexpr int full = ROWS / 4 * 4;
  constexpr int64_t wide = PANEL_TILES * N;
  for (int64_t c = 0; c < whole.columns; c += wide) {
    Panel<A, L, R, Right> panel = whole;
    panel.right.data += c;
    panel.columns = whole.columns - c < wide ? whole.columns - c : wide;
    for (int r = 0; r < full; r += 4)
      dot_columns_n<Step, 4, N>(panel, target + r * whole.target_step + c, left + r * whole.left_step);
    if constexpr (ROWS % 4 != 0)
      dot_columns_n<Step, ROWS % 4, N>(panel, target + full * whole.target_step + c, left + full * whole.left_step);
  }
}

template <int ROWS, int N, bool ADDS, class A, class L, class Right>
FN void dot_along_n(A* target, int64_t target_step, const L* left, int64_t left_step, int64_t left_k,
                    const Right& right, int64_t columns, int64_t depth) {
  typedef typename Right::element R;
  Panel<A, L, R, Right> whole{target_step, left_step, left_k, right, columns, depth, ADDS};
#ifdef IN_PAIRS
  if constexpr (in_pairs<A, L, R, N>)
    if (left_k == 1) {
      dot_panels_n<RowPairs, ROWS, N>(whole, target, left);
      if (depth % 2 == 0) return;
      whole.right = right.from(depth - 1), whole.depth = 1, whole.adds = true;  // the row that is in no pair
      left += depth - 1;
    }
#endif
  dot_panels_n<Lanes<A, L, R, N>, ROWS, N>(whole, target, left);
}
template <int ROWS, int N, bool ADDS, class A, class L, class R>
FN void dot_along_n(A* target, int64_t target_step, const L* left, int64_t left_step, int64_t left_k, const R* right,
                    int64_t right_step, int64_t columns, int64_t depth) {
  dot_along_n<ROWS, N, ADDS>(target, target_step, left, left_step, left_k, Rows<R>{right, right_step}, columns, depth);
}

// Ask memory for so many elements of some rows, into the second-level cache: the first one holds what is multiplied.
template <class T> FN void ask_for(const T* p, int64_t step, int64_t first, int64_t last, int64_t count) {
  for (int64_t r = first; r < last; r++)
    for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(p + r * step + i, 0, 2);
}

// The tiles of some rows at a time, and of the last ones: 16 with AMX; else six, which leave room for their sums, one row
// of the right operand and a factor. Few of these wait for each other's sums, so the last are shared out: 8 are 4 and 4.
template <int N, class A, class L, class R> struct RowTiles {
  static constexpr int MOST = in_amx<A, L, R> ? AMX_ROWS : 6;
  static void dot(const Panel<A, L, R>& panel, int64_t rows, A* target, const L* left, const R* next, int asked,
                  TileShapes& shapes);
  static int64_t together(int64_t rows) {
    if (in_amx<A, L, R>) return rows < MOST ? rows : MOST;
    return rows >= 9 || rows == 6 ? 6 : rows >= 7 || rows == 4 ? 4 : rows >= 3 ? 3 : rows;
  }
};
template <int N, class A, class L, class R>
void RowTiles<N, A, L, R>::dot(const Panel<A, L, R>& panel, int64_t rows, A* target, const L* left, const R* next,
                             int asked, TileShapes& shapes) {
  if constexpr (in_amx<A, L, R>) return dot_amx(panel, rows, target, left, next, asked, shapes);
  else {
    if (rows == 6) dot_columns_n<Lanes<A, L, R, N>, 6, N>(panel, target, left, next, asked);
    if (rows == 4) dot_columns_n<Lanes<A, L, R, N>, 4, N>(panel, target, left, next, asked);
    if (rows == 3) dot_columns_n<Lanes<A, L, R, N>, 3, N>(panel, target, left, next, asked);
    if (rows == 2) dot_columns_n<Lanes<A, L, R, N>, 2, N>(panel, target, left, next, asked);
    if (rows == 1) dot_columns_n<Lanes<A, L, R, N>, 1, N>(panel, target, left, next, asked);
  }
}
#ifndef MANY_IN_PAIRS
template <class A> struct RowTiles<16, A, word, word> {};  // nobody multiplies words
#endif
#ifndef IN_QUADS
template <int N, class L, class R> struct RowTiles<N, int32_t, Quad<L>, Quad<R>> {};
#endif

// As many rows as it takes, beside one panel. lefts() gives where the rows of the left operand lie from one up to
// another. The first of them ask for the rows from ``next`` on, if there are any, while they compute: the more rows,
// the less at once.
template <int N, class A, class L, class R, class Lefts>
FN void dot_panel_n(const Panel<A, L, R>& panel, A* target, int64_t rows, const Lefts& lefts, TileShapes& shapes,
                    const R* next = nullptr) {
  typedef RowTiles<N, A, L, R> tiles;
  const int most = !next ? 0 : rows <= tiles::MOST ? PANEL_TILES : rows < 8 * tiles::MOST ? PANEL_TILES / 2 : 1;
  for (int64_t r = 0, some, first = 0; r < rows; r += some, first += most) {
    some = tiles::together(rows - r);
    tiles::dot(panel, some, target + r * panel.target_step, lefts(r, r + some), next + first * N,
                first < PANEL_TILES ? most : 0, shapes);
  }
}

// Steps along k that are added up in registers: what is longer is a sum of sums, whose rounding errors grow slower; AMX
// adds all of them in order.
constexpr int64_t CHAIN = 128;

template <class T> constexpr bool is_half = same_type<T, bf16>::value || same_type<T, f16>::value;
template <class T> constexpr bool is_narrow = same_type<T, float>::value || is_half<T>;

// Rows of halves, so far apart, as rows of floats.
template <int N, class L>
FN void widen_rows(float* to, int64_t to_step, const L* from, int64_t from_step, int64_t rows, int64_t length,
                   int64_t step_k = 1) {
  for (int64_t r = 0; r < rows; r++, to += to_step, from += from_step) {
    int64_t i = 0;
    if (step_k != 1) {
      for (; i < length; i++) to[i] = load(from + i * step_k);
      continue;
    }
    for (; i + N <= length; i += N) store(to + i, load<N>(from + i, All{}), All{});
    if (i < length) store(to + i, load<N>(from + i, Part{length - i}), Part{length - i});
  }
}

// The left operand's halves are widened once for all columns: group by group where its rows lie along k, for some rows
// at a time where it lies along its rows, as the values of attention do.
template <int N, bool ADDS, class A, class L, class R>
FN void dot_many_along_n(A* target, int64_t target_step, const L* left, int64_t left_step, int64_t left_k,
                         const R* right, int64_t right_step, int64_t rows, int64_t columns, int64_t depth) {
  constexpr bool widened = same_type<A, float>::value && is_narrow<L> && !same_type<L, float>::value;
  typedef typename Chosen<widened, float, L>::type Factor;
  constexpr int64_t SOME = 64, most = RowTiles<N, A, Factor, R>::MOST;
  const bool across = left_k != 1 && left_step == 1;
  const int64_t step = !widened ? left_step : across ? 1 : CHAIN, step_k = !widened ? left_k : across ? SOME : 1;
  alignas(64) Factor wide_rows[widened ? SOME * CHAIN : 1];
  TileShapes shapes;
  for (int64_t c = 0; c < columns; c += PANEL_TILES * N) {
    const int64_t wide = columns - c < PANEL_TILES * N ? columns - c : PANEL_TILES * N;
    for (int64_t k = 0; k == 0 || k < depth; k += CHAIN) {
      const int64_t some = depth - k < CHAIN ? depth - k : CHAIN;
      const R* const block = right + k * right_step + c;
      // What follows in memory: more of these columns, or the next block of a weight that lies in blocks.
      const R* const next = block + some * right_step;
      int64_t first = 0, end = 0;  // of the rows that are widened
      const auto from = [&](int64_t r, int64_t last) LANEWISE {
        if (left_k == 1) ask_for(left + k, left_step, last, last + most < rows ? last + most : rows, some);
        const L* const there = left + r * left_step + k * left_k;
        if constexpr (widened) {
          if (last > end) {
            first = r, end = !across ? last : r + SOME < rows ? r + SOME : rows;
            if (across) widen_rows<N>(wide_rows, SOME, there, left_k, some, end - r);
            else if (left_k == 1) widen_rows<N>(wide_rows, CHAIN, there, left_step, end - r, some);
            else
              for (int64_t i = 0; i < (end - r) * some; i++)
                wide_rows[i / some * CHAIN + i % some] = load(there + i / some * left_step + i % some * left_k);
          }
          return (const Factor*)wide_rows + (r - first) * step;
        } else {
          return there;
        }
      };
      const Panel<A, Factor, R> panel{target_step, step, step_k, block, right_step, wide, some, ADDS || k};
      dot_panel_n<N>(panel, target + c, rows, from, shapes, next);
    }
  }
}

// As many rows as it takes beside a right operand that lies along k: blocks of it are transposed, so that lanes run along
// columns and nothing has to be folded.
template <int N, int STEP> FN void turn_registers(typename Raw<int32_t, N>::type* rows) {
  // Blocks off the diagonal change places, of half the size each time.
  if constexpr (STEP > 0) {
    typename Raw<int32_t, N>::type low, high;
    for (int i = 0; i < N; i++) {
      low[i] = i & STEP ? N + i - STEP : i;
      high[i] = i & STEP ? N + i : i + STEP;
    }
    for (int i = 0; i < N; i++) {
      if (i & STEP) continue;
      const auto a = rows[i], b = rows[i + STEP];
#if defined(__clang__)
      for (int l = 0; l < N; l++) {
        rows[i][l] = low[l] < N ? a[low[l]] : b[low[l] - N];
        rows[i + STEP][l] = high[l] < N ? a[high[l]] : b[high[l] - N];
      }
#else
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + STEP] = __builtin_shuffle(a, b, high);
#endif
    }
    turn_registers<N, STEP / 2>(rows);
  }
}

// transposed[k, c] = right[c, k], for so many columns and steps along k, each a float or a word.
template <int N, class W, class R>
DOT_FUNCTION turn(W* transposed, int64_t turned_step, const R* right, int64_t right_step, int64_t columns, int64_t depth) {
  typedef typename Raw<int32_t, N>::type raw;
  const auto row = [&](int64_t c, int64_t k) LANEWISE {
    raw bits;
    if constexpr (same_type<W, R>::value) {
      __builtin_memcpy(&bits, right + c * right_step + k, sizeof bits);
    } else {
      const auto wide = load<N>(right + c * right_step + k, All{}).v;
      __builtin_memcpy(&bits, &wide, sizeof bits);
    }
    return bits;
  };
  for (int64_t c = 0; c < columns; c += N) {
    const int64_t wide = columns - c < N ? columns - c : N;
    int64_t k = 0;
    if (wide == N) {
      for (; k + N <= depth; k += N) {
        raw rows[N];
        for (int i = 0; i < N; i++) rows[i] = row(c + i, k);
        turn_registers<N, N / 2>(rows);
        for (int i = 0; i < N; i++) __builtin_memcpy(transposed + (k + i) * turned_step + c, &rows[i], sizeof(raw));
      }
    }
    for (; k < depth; k++) {
      for (int64_t i = 0; i < wide; i++) {
        W& place = transposed[k * turned_step + c + i];
        if constexpr (same_type<W, R>::value) place = right[(c + i) * right_step + k];
        else place = load(right + (c + i) * right_step + k);
      }
    }
  }
}

// W is what the block is transposed as: what lies there, or floats that are made of halves on the way, as the left
// operand's rows are, group by group. Of bytes, those of the block may have to be flipped.
template <int N, class W, bool ADDS = false, bool FLIPS = false, class A, class L, class R>
FN void dot_turned(A* target, int64_t target_step, const L* left, int64_t left_step, const R* right,
                   int64_t right_step, int64_t rows, int64_t columns, int64_t depth) {
  typedef typename Chosen<same_type<W, float>::value, float, L>::type Factor;
  constexpr int64_t wide = PANEL_TILES * N, some = CHAIN, most = RowTiles<N, A, Factor, W>::MOST;
  constexpr bool widened = !same_type<Factor, L>::value;
  alignas(64) W transposed[wide * some];
  alignas(64) float group[widened ? most * some : 1];
  TileShapes shapes;
  for (int64_t c = 0; c < columns; c += wide) {
    const int64_t width = columns - c < wide ? columns - c : wide;
    for (int64_t k = 0; k == 0 || k < depth; k += some) {  // without anything to sum the result is 0
      const int64_t far = depth - k < some ? depth - k : some;
      turn<N>(transposed, wide, right + c * right_step + k, right_step, width, far);
      if constexpr (FLIPS)
        for (int64_t i = 0; i < wide * far; i++) transposed[i].bits ^= FLIP;
      // Memory fetches the block that follows meanwhile, so many of its columns with each group of rows, and the left
      // operand's next rows.
      const R* const next = right + (k + some < depth ? c * right_step + k + some : (c + width) * right_step);
      const auto lefts = [&](int64_t from, int64_t to) LANEWISE {
        ask_for(next, right_step, from * width / rows, to * width / rows, some);
        ask_for(left + k, left_step, to, to + most < rows ? to + most : rows, far);
        const L* const first = left + from * left_step + k;
        if constexpr (widened) {
          widen_rows<N>(group, some, first, left_step, to - from, far);
          return (const Factor*)group;
        } else {
          return first;
        }
      };
      const int64_t step = widened ? some : left_step;
      dot_panel_n<N>(Panel<A, Factor, W>{target_step, step, 1, transposed, wide, width, far, ADDS || k}, target + c, rows,
                     lefts, shapes);
    }
  }
}

// The same where that block of the right operand lies transposed in memory: panel[k, c], bfloat16 in pairs along k.
template <int N, class A, class L, class R>
FN void dot_packed(A* target, int64_t target_step, const L* left, int64_t left_step, const R* right, int64_t rows,
                   int64_t columns, int64_t depth) {
#ifdef MANY_IN_PAIRS
  if constexpr (many_in_pairs<A, L, R, N>) {
    dot_many_along_n<N, false>(target, target_step, (const word*)left, left_step / 2, 1, (const word*)right, columns,
                               rows, columns, depth / 2);
    return;
  }
#endif
  dot_many_along_n<N, false>(target, target_step, left, left_step, 1, right, columns, rows, columns, depth);
}

#ifdef IN_QUADS
// What sums of products with flipped bytes start from.
template <int N, class R, class L>
FN void begin_flipped(int32_t* target, int64_t target_step, const L* left, int64_t left_step, int64_t rows,
                      int64_t columns, int64_t depth) {
  typedef QuadStep<L, R, N> step;
  for (int64_t r = 0; r < rows; r++) {
    typename step::raw total{};
    int64_t k = 0;
    for (; k + 4 * N <= depth; k += 4 * N) total = step::total(total, step::left(left + r * left_step + k));
    int32_t sum = sum_of<int32_t, N>(total);
    for (; k < depth; k++) sum += left[r * left_step + k];
    for (int64_t c = 0; c < columns; c++) target[r * target_step + c] = -step::excess * sum;
  }
}
#endif

template <int N, class A, class L, class R>
FN void dot_many_along_k(A* target, int64_t target_step, const L* left, int64_t left_step, const R* right,
                         int64_t right_step, int64_t rows, int64_t columns, int64_t depth) {
#ifdef MANY_IN_PAIRS
  if constexpr (many_in_pairs<A, L, R, N>) {
    if (depth % 2 == 0 && left_step % 2 == 0 && right_step % 2 == 0) {
      dot_turned<N, word>(target, target_step, (const word*)left, left_step / 2, (const word*)right, right_step / 2,
                          rows, columns, depth / 2);
      return;
    }
  }
#endif
#ifdef IN_QUADS
  if constexpr (in_bytes<A, L, R> && N == QUAD_LANES) {
    if (depth % 4 == 0 && left_step % 4 == 0 && right_step % 4 == 0) {
      constexpr bool flips = flipped<L, R> && !in_amx<A, Quad<L>, Quad<R>>;
      if (flips) begin_flipped<N, R>(target, target_step, left, left_step, rows, columns, depth);
      dot_turned<N, Quad<R>, flips, flips>(target, target_step, (const Quad<L>*)left, left_step / 4,
                                           (const Quad<R>*)right, right_step / 4, rows, columns, depth / 4);
      return;
    }
  }
#endif
  if constexpr (same_type<A, float>::value && is_narrow<L> && is_narrow<R>) {
    dot_turned<N, float>(target, target_step, left, left_step, right, right_step, rows, columns, depth);
  } else {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
      dot_along_k<4, N>(target + r * target_step, target_step, left + r * left_step, left_step, right, right_step,
                        columns, depth);
    for (; r < rows; r++)
      dot_along_k<1, N>(target + r * target_step, target_step, left + r * left_step, left_step, right, right_step,
                        columns, depth);
  }
}

// As many rows as there turn out to be: the right operand is transposed where that is worth it.
constexpr int64_t FEW_ROWS = 16;

template <int WIDE, int N, class A, class L, class R>
FN void dot_any_rows_k(A* target, int64_t target_step, const L* left, int64_t left_step, const Rows<R>& right,
                       int64_t rows, int64_t depth) {
  int64_t r = 0;
#define ROWS(rows) \
  dot_tile_k<rows, WIDE, N>(target + r * target_step, target_step, left + r * left_step, left_step, right, depth)
  for (; r + 4 <= rows; r += 4) ROWS(4);
  if (rows - r == 3) ROWS(3);
  if (rows - r == 2) ROWS(2);
  if (rows - r == 1) ROWS(1);
#undef ROWS
}

template <int N, class A, class L, class R>
FN void dot_any_along_k(A* target, int64_t target_step, const L* left, int64_t left_step, const R* right,
                        int64_t right_step, int64_t rows, int64_t columns, int64_t depth) {
  if (rows > FEW_ROWS)
    return dot_many_along_k<N>(target, target_step, left, left_step, right, right_step, rows, columns, depth);
  if (rows == 1) return dot_along_k<1, N>(target, target_step, left, left_step, right, right_step, columns, depth);
  constexpr int wide = REGISTERS / 8;
  const Rows<R> whole{right, right_step};
  int64_t c = 0;
  for (; c + wide <= columns; c += wide)
    dot_any_rows_k<wide, N>(target + c, target_step, left, left_step, whole.from(c), rows, depth);
  for (; c < columns; c++) dot_any_rows_k<1, N>(target + c, target_step, left, left_step, whole.from(c), rows, depth);
}

template <int N, bool ADDS, class A, class L, class R>
FN void dot_any_along_n(A* target, int64_t target_step, const L* left, int64_t left_step, int64_t left_k,
                        const R* right, int64_t right_step, int64_t rows, int64_t columns, int64_t depth) {
  if (rows > FEW_ROWS)
    return dot_many_along_n<N, ADDS>(target, target_step, left, left_step, left_k, right, right_step, rows, columns,
                                     depth);
  int64_t r = 0;
#define ROWS(rows) \
  dot_along_n<rows, N, ADDS>(target + r * target_step, target_step, left + r * left_step, left_step, left_k, right, \
                             right_step, columns, depth)
  for (; r + 4 <= rows; r += 4) ROWS(4);
  if (rows - r == 3) ROWS(3);
  if (rows - r == 2) ROWS(2);
  if (rows - r == 1) ROWS(1);
#undef ROWS
}

// As many rows as it takes beside a right operand that is computed: blocks of it are computed along k, where what they
// are computed from lies, and transposed. Rows of halves, and those whose outer steps do not follow one another, are
// copied, group by group: step(segment, o) gives where such a step begins.
struct Contiguous {};

// The steps along k from one on, so many of them, of which each run lies in one outer step: use(j, o, at, run).
template <class Use> FN void each_run(int64_t k, int64_t count, int64_t inner, const Use& use) {
  for (int64_t j = 0, run; j < count; j += run) {
    const int64_t o = (k + j) / inner, at = (k + j) % inner;
    run = inner - at < count - j ? inner - at : count - j;
    use(j, o, at, run);
  }
}

// Computes so many columns of the right operand along k from one step on, and prefetches what follows after so many
// steps: put(column, j, lanes, tiles) takes the tiles of each segment.
template <int N, int SEGMENTS, int LINE, class A, class Values, class Fetch, class Put>
FN void each_tile(const Values& values, const Fetch& fetch, int64_t column, int64_t columns, int64_t k, int64_t count,
                  int64_t ahead, int64_t inner, const Put& put) {
  each_run(k, count, inner, [&](int64_t j, int64_t o, int64_t at, int64_t run) LANEWISE {
    const int64_t next = k + j + ahead, next_o = next / inner, next_at = next % inner;
    for (int64_t i = 0; i < columns; i++) {
      for (int64_t t = 0; t < run; t += LINE) fetch(column + i, next_o, next_at + t);
      const auto fill = values(column + i, o);
      const auto some = [&](int64_t t, auto lanes) LANEWISE {
        Vec<A, N> tiles[SEGMENTS];
        fill(at + t, lanes, tiles);
        put(i, j + t, lanes, tiles);
      };
      int64_t t = 0;
      for (; t + N <= run; t += N) some(t, All{});
      if (t < run) some(t, Part{run - t});
    }
  });
}

#ifdef MANY_IN_PAIRS
// The same in pairs of bfloat16. Of two segments whose left operands are neighbours each pair has one of both; else
// pairs are neighbours along k.
template <int N, int SEGMENTS, int LINE, class Values, class Fetch, class Step>
FN void dot_many_in_pairs(float* target, int64_t target_step, const Left<bf16>* lefts, const Values& values,
                          const Fetch& fetch, int64_t rows, int64_t first, int64_t last, int64_t outer, int64_t inner,
                          const Step& step) {
  constexpr int64_t wide = PANEL_TILES * N;
  constexpr bool contiguous = same_type<Step, Contiguous>::value;
  const bool joined = SEGMENTS == 2 && contiguous && lefts[0].step_k == 2 && lefts[1].data == lefts[0].data + 1;
  const int64_t some = joined ? CHAIN : 2 * CHAIN;  // a chain of words
  constexpr int most = RowTiles<N, float, word, word>::MOST;
  alignas(64) bf16 block[SEGMENTS][wide * 2 * CHAIN], group[most * 2 * CHAIN];
  alignas(64) word transposed[wide * CHAIN];
  TileShapes shapes;
  for (int64_t c = first; c < last; c += wide) {
    const int64_t width = last - c < wide ? last - c : wide;
    for (int64_t k = 0; k == 0 || k < outer * inner; k += some) {
      const int64_t far = outer * inner - k < some ? outer * inner - k : some;
      const auto put = [&](int64_t i, int64_t j, auto lanes, const auto* tiles) LANEWISE {
        if (joined) {
          const auto pairs = narrowed_bits(tiles[0]) | narrowed_bits(tiles[SEGMENTS - 1]) << 16;
          store((int32_t*)block + i * some + j, Vec<int32_t, N>((typename Raw<int32_t, N>::type)pairs), lanes);
        } else {
          for (int s = 0; s < SEGMENTS; s++) store(block[s] + i * some + j, tiles[s], lanes);
        }
      };
      each_tile<N, SEGMENTS, LINE, float>(values, fetch, c, width, k, far, some, inner, put);
      for (int s = 0; s < (joined ? 1 : SEGMENTS); s++) {
        const Left<bf16> left = lefts[s];
        const int64_t words = joined ? far : far / 2, there = joined ? k : k / 2;
        turn<N>(transposed, wide, (const word*)block[s], joined ? some : some / 2, width, words);
        const bool direct = joined || (contiguous && left.step_k == 1);
        const auto from = [&](int64_t r, int64_t to) LANEWISE {
          const bf16* const row = left.data + r * left.step;
          if (direct) return (const word*)row + there;
          each_run(k, far, inner, [&](int64_t j, int64_t o, int64_t at, int64_t run) LANEWISE {
            int64_t begin = (k + j) * left.step_k;
            if constexpr (!contiguous) begin = step(s, o) + at * left.step_k;
            for (int64_t i = 0; i < (to - r) * run; i++)
              group[i / run * some + j + i % run] = row[i / run * left.step + begin + i % run * left.step_k];
          });
          return (const word*)group;
        };
        const Panel<float, word, word> panel{target_step, direct ? left.step / 2 : some / 2, 1, transposed, wide, width,
                                             words, k || s};
        dot_panel_n<N>(panel, target + c - first, rows, from, shapes);
      }
    }
  }
}
#endif

template <int N, int SEGMENTS, int LINE, class A, class L, class Values, class Fetch, class Step>
FN void dot_many_computed(A* target, int64_t target_step, const Left<L>* lefts, const Values& values,
                          const Fetch& fetch, int64_t rows, int64_t first, int64_t last, int64_t outer, int64_t inner,
                          const Step& step) {
  constexpr int64_t wide = PANEL_TILES * N, some = CHAIN;
  constexpr bool contiguous = same_type<Step, Contiguous>::value, copied = is_half<L> || !contiguous;
#ifdef MANY_IN_PAIRS
  if constexpr (many_in_pairs<A, L, bf16, N>) {
    bool even = outer * inner % 2 == 0;
    for (int s = 0; s < SEGMENTS; s++) even &= lefts[s].step % 2 == 0;
    if (even)
      return dot_many_in_pairs<N, SEGMENTS, LINE>(target, target_step, lefts, values, fetch, rows, first, last, outer,
                                                  inner, step);
  }
#endif
  typedef typename Chosen<copied, A, L>::type Factor;
  alignas(64) A block[SEGMENTS][wide * some], transposed[wide * some], group[copied ? 6 * some : 1];
  TileShapes shapes;
  for (int64_t c = first; c < last; c += wide) {
    const int64_t width = last - c < wide ? last - c : wide;
    for (int64_t k = 0; k == 0 || k < outer * inner; k += some) {  // without anything to sum the result is 0
      const int64_t far = outer * inner - k < some ? outer * inner - k : some;
      const auto put = [&](int64_t i, int64_t j, auto lanes, const auto* tiles) LANEWISE {
        for (int s = 0; s < SEGMENTS; s++) store(block[s] + i * some + j, tiles[s], lanes);
      };
      each_tile<N, SEGMENTS, LINE, A>(values, fetch, c, width, k, far, some, inner, put);
      for (int s = 0; s < SEGMENTS; s++) {
        const Left<L> left = lefts[s];
        turn<N>(transposed, wide, (const A*)block[s], some, width, far);
        const auto from = [&](int64_t r, int64_t to) LANEWISE {
          const L* const there = left.data + r * left.step;
          if constexpr (!copied) {
            return there + k * left.step_k;
          } else if constexpr (contiguous) {
            widen_rows<N>(group, some, there + k * left.step_k, left.step, to - r, far, left.step_k);
            return (const A*)group;
          } else {
            each_run(k, far, inner, [&](int64_t j, int64_t o, int64_t at, int64_t run) LANEWISE {
              widen_rows<N>(group + j, some, there + step(s, o) + at * left.step_k, left.step, to - r, run, left.step_k);
            });
            return (const A*)group;
          }
        };
        const int64_t row_step = copied ? some : left.step, step_k = copied ? 1 : left.step_k;
        const Panel<A, Factor, A> panel{target_step, row_step, step_k, transposed, wide, width, far, k || s};
        dot_panel_n<N>(panel, target + c - first, rows, from, shapes);
      }
    }
  }
}

// As dot_many_computed; a few rows are multiplied in registers.
template <int N, int SEGMENTS, int LINE, int AHEAD, class A, class L, class Values, class Fetch, class Step>
FN void dot_any_computed(A* target, int64_t target_step, const Left<L>* lefts, const Values& values,
                         const Fetch& fetch, int64_t rows, int64_t first, int64_t last, int64_t outer, int64_t inner,
                         const Step& step) {
#define ROWS(rows) \
  return dot_computed<rows, N, SEGMENTS, LINE, AHEAD>(target, target_step, lefts, values, fetch, first, last, outer, inner)
  if (rows == 1) ROWS(1);
  if (rows == 2) ROWS(2);
  if (rows == 3) ROWS(3);
  if (rows == 4) ROWS(4);
#undef ROWS
  dot_many_computed<N, SEGMENTS, LINE>(target, target_step, lefts, values, fetch, rows, first, last, outer, inner, step);
}

}  // namespace fusec
