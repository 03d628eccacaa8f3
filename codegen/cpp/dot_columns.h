// Products of few rows by a right operand that is computed in lanes along its columns.
#pragma once

#include "dot.h"

namespace fusec {

// Rows of the right operand that are read for a tile of columns before those of the next one, where they lie apart: as
// many are fetched ahead.
constexpr int STREAMS = 32;

template <int N> struct Count { static constexpr int value = N; };

// values(column, o, lanes) returns a function of (k, tiles), which fills a tile of columns of each segment of k, and
// holds whatever is the same for all k of an outer step. fetch(column, o, k) asks memory for LINE columns of what it is
// computed from: for each k, or if that is the same for all of them, for each outer step.

// Adds the products of some outer steps, and some elements of each, to the sums.
template <int ROWS, int TILES, int N, int SEGMENTS, int LINE, bool BY_STEP, class A, class L, class Values, class Fetch,
          class Lanes>
DOT_FUNCTION dot_tile_columns(A* target, int64_t target_step, const Left<L>* lefts, const Values& values,
                              const Fetch& fetch, int64_t column, Lanes lanes, int64_t first, int64_t last,
                              int64_t start, int64_t end, int64_t inner) {
  CONTRACT
  constexpr int line = LINE > N ? LINE / N : 1;
  typename Raw<A, N>::type sums[ROWS][TILES] = {};
  const auto at = [&](int64_t tile, int64_t o) LANEWISE { return values(column + tile * N, o, lanes); };
  for (int64_t o = first; o < last; o++) {
    if (BY_STEP)
      for (int t = 0; t < TILES; t += line) fetch(column + t * N, o + last - first, 0);
    const ColumnTiles<decltype(at(0, o)), TILES> tiles(at, 0, o);
    for (int64_t k = start; k < end; k++) {
      if (!BY_STEP)
        for (int t = 0; t < TILES; t += line) fetch(column + t * N, o, k + STREAMS);
      tiles.each([&](int t, const auto& fill) LANEWISE {
        Vec<A, N> found[SEGMENTS];
        fill(k, found);
        for (int s = 0; s < SEGMENTS; s++) {
          const L* const left = lefts[s].data + o * inner + k;
          for (int r = 0; r < ROWS; r++) sums[r][t] += A(left[r * lefts[s].step]) * found[s].v;
        }
      });
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int t = 0; t < TILES; t++) {
      A* const place = target + r * target_step + t * N;
      store(place, load<N>(place, lanes) + Vec<A, N>(sums[r][t]), lanes);
    }
}

// Columns from first to last, added to the target or, unless it ADDS, in its place. Some rows of the right operand are
// read for all columns before the next ones, so that the pages in use are few; rows of the left one go in parts of at
// most 4.
template <int ROWS, int N, int SEGMENTS, int LINE, bool BY_STEP, bool ADDS, class A, class L, class Values, class Fetch>
FN void dot_columns(A* target, int64_t target_step, const Left<L>* lefts, const Values& values, const Fetch& fetch,
                    int64_t first, int64_t last, int64_t outer, int64_t inner) {
  if constexpr (ROWS > 4) {
    constexpr int half = (ROWS + 1) / 2;
    Left<L> below[SEGMENTS];
    for (int s = 0; s < SEGMENTS; s++) below[s] = {lefts[s].data + half * lefts[s].step, lefts[s].step, 1};
    dot_columns<half, N, SEGMENTS, LINE, BY_STEP, ADDS>(target, target_step, lefts, values, fetch, first, last, outer,
                                                        inner);
    dot_columns<ROWS - half, N, SEGMENTS, LINE, BY_STEP, ADDS>(target + half * target_step, target_step,
                                                               (const Left<L>*)below, values, fetch, first, last, outer,
                                                               inner);
  } else {
    for (int r = 0; r < ROWS && !ADDS; r++)
      for (int64_t c = first; c < last; c++) target[r * target_step + c - first] = A(0);
    const int64_t rows = (last - first) * int64_t(sizeof(A)) > 256 ? STREAMS : CHAIN;
    const int64_t steps = inner < CHAIN ? CHAIN / (inner ? inner : 1) : 1;
    for (int64_t o = 0; o < outer; o += steps)
      for (int64_t k = 0; k < inner; k += rows) {
        const int64_t stop = o + steps < outer ? o + steps : outer, end = k + rows < inner ? k + rows : inner;
        constexpr int tiles = REGISTERS / 8;
        int64_t c = first;
        const auto add = [&](auto count, auto lanes) LANEWISE {
          dot_tile_columns<ROWS, decltype(count)::value, N, SEGMENTS, LINE, BY_STEP>(
              target + c - first, target_step, lefts, values, fetch, c, lanes, o, stop, k, end, inner);
        };
        for (; c + tiles * N <= last; c += tiles * N) add(Count<tiles>{}, All{});
        for (; c + 2 * N <= last; c += 2 * N) add(Count<2>{}, All{});
        for (; c + N <= last; c += N) add(Count<1>{}, All{});
        if (c < last) add(Count<1>{}, Part{last - c});
      }
  }
}

}  // namespace fusec
