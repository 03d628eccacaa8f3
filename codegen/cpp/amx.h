// Intel AMX: products of tiles of up to 16 rows of 16 words.
#pragma once

#include "amx_instructions.h"

namespace fusec {

#ifdef AMX
constexpr int AMX_ROWS = 16, AMX_COLUMNS = 16, AMX_WORDS = 16;

// The registers of tiles: 0 to 3 are sums, 4 the left operand, 5 to 7 the right one. To configure them takes as long as
// several products, so it is done where shapes change; in the end they are as before, since other libraries in the
// process may configure them once for each thread.
class TileShapes {
  struct Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of each row
    uint8_t rows[16] = {};
  } before, shapes;
  void set(int tile, int64_t rows, int64_t words) { shapes.rows[tile] = rows, shapes.bytes[tile] = 4 * words; }

 public:
  // For so many rows and columns of sums, and words along k.
  void require(int64_t rows, int64_t columns, int64_t words) {
    if (shapes.rows[4] == rows && shapes.bytes[0] == 4 * columns && shapes.bytes[4] == 4 * words) return;
    if (!shapes.rows[4]) store_configuration(&before);
    for (int i = 0; i < 4; i++) set(i, rows, columns);
    set(4, rows, words);
    for (int i = 5; i < 8; i++) set(i, words, columns);
    load_configuration(&shapes);
  }
  ~TileShapes() {
    if (shapes.rows[4]) load_configuration(&before);
  }
};

template <int VALUE> struct Tile { static constexpr int value = VALUE; };
template <int TILES, class Use> FN void each_tile_of(const Use& use) {
  if constexpr (TILES > 1) each_tile_of<TILES - 1>(use);
  use(Tile<TILES - 1>{});
}

template <class A, class L, class R> constexpr bool in_amx = false;
template <> inline constexpr bool in_amx<float, word, word> = true;
template <class L, class R> inline constexpr bool in_amx<int32_t, Quad<L>, Quad<R>> = true;

// Up to 16 rows, and so many tiles of columns, of which a single one may have fewer than 16. Of as many rows of a right
// operand from ``next`` on, so many tiles are asked for meanwhile.
template <int TILES, class A, class L, class R>
FN void dot_amx_columns(const Panel<A, L, R>& panel, int64_t rows, int64_t first, int64_t columns, A* target,
                        const L* left, const R* next, int asked, TileShapes& shapes) {
  const int64_t bytes = 4 * panel.target_step, right_step = panel.right.step;
  const R* const right = panel.right.data + first;
  target += first;
  const auto add_up = [&](int64_t begin, int64_t end, int64_t words, bool adds) LANEWISE {
    shapes.require(rows, columns, words);
    each_tile_of<TILES>([&](auto tile) LANEWISE {
      if (adds) load_tile<tile.value>(target + AMX_COLUMNS * tile.value, bytes);
      else zero_tile<tile.value>();
    });
    for (int64_t k = begin; k < end; k += AMX_WORDS) {
      for (int t = 0; t < asked; t++)
        for (int i = 0; i < AMX_WORDS; i++) __builtin_prefetch(next + (k + i) * right_step + AMX_COLUMNS * t, 0, 2);
      load_tile<4>(left + k, 4 * panel.left_step);
      each_tile_of<TILES>([&](auto tile) LANEWISE {
        constexpr int other = 5 + tile.value % 3;
        load_tile<other>(right + k * right_step + AMX_COLUMNS * tile.value, 4 * right_step);
        multiply_tiles<tile.value, 4, other>(left, right);
      });
    }
    each_tile_of<TILES>([&](auto tile) LANEWISE { store_tile<tile.value>(target + AMX_COLUMNS * tile.value, bytes); });
  };
  const int64_t whole = panel.depth / AMX_WORDS * AMX_WORDS;
  if (whole || !panel.depth) add_up(0, whole, AMX_WORDS, panel.adds);
  asked = 0;
  if (whole < panel.depth) add_up(whole, panel.depth, panel.depth - whole, panel.adds || whole);
}

template <class A, class L, class R>
FN void dot_amx(const Panel<A, L, R>& panel, int64_t rows, A* target, const L* left, const R* next, int asked,
                TileShapes& shapes) {
  constexpr int64_t some = 4 * AMX_COLUMNS;
  int64_t c = 0;
  for (; c + some <= panel.columns; c += some, asked = 0)
    dot_amx_columns<4>(panel, rows, c, AMX_COLUMNS, target, left, next, asked, shapes);
  for (; c < panel.columns; c += AMX_COLUMNS, asked = 0) {
    const int64_t rest = panel.columns - c;
    dot_amx_columns<1>(panel, rows, c, rest < AMX_COLUMNS ? rest : AMX_COLUMNS, target, left, next, asked, shapes);
  }
}
#else
constexpr int AMX_ROWS = 0;
struct TileShapes {};
template <class A, class L, class R> constexpr bool in_amx = false;
template <class A, class L, class R>
FN void dot_amx(const Panel<A, L, R>&, int64_t, A*, const L*, const R*, int, TileShapes&) {}
#endif

}  // namespace fusec
