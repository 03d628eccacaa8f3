// The instructions of Intel AMX. A register holds a tile of up to 16 rows of 64 bytes.
#pragma once

#include "dot_step.h"
#include "panel.h"

#if defined(AMX) && !defined(FUSEC_AMX_INSTRUCTIONS)
#define FUSEC_AMX_INSTRUCTIONS
namespace fusec {

// A configuration is 64 bytes: a palette, which is 0 where registers are not in use, the bytes of each row from its 16th
// byte on, and numbers of rows from its 48th.
FN void load_configuration(const void* shapes) { asm volatile("ldtilecfg (%0)" : : "r"(shapes) : "memory"); }
FN void store_configuration(void* shapes) { asm volatile("sttilecfg (%0)" : : "r"(shapes) : "memory"); }
template <int TILE> FN void zero_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }
template <int TILE> FN void load_tile(const void* p, int64_t bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(bytes), "i"(TILE) : "memory");
}
template <int TILE> FN void store_tile(void* p, int64_t bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(bytes), "i"(TILE) : "memory");
}
#define TILES(L, R, instruction)                                                                   \
  template <int SUM, int LEFT, int RIGHT> FN void multiply_tiles(const L*, const R*) {               \
    asm volatile(instruction " %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(LEFT), "i"(RIGHT)); \
  }
TILES(word, word, "tdpbf16ps")
TILES(Quad<int8_t>, Quad<int8_t>, "tdpbssd")
TILES(Quad<int8_t>, Quad<uint8_t>, "tdpbsud")
TILES(Quad<uint8_t>, Quad<int8_t>, "tdpbusd")
TILES(Quad<uint8_t>, Quad<uint8_t>, "tdpbuud")
#undef TILES

}  // namespace fusec
#endif
