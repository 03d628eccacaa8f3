// Kernels one after another, as a table tells them: one call from Python for many launches.
#pragma once

#include <stdint.h>

namespace fusec {

// The table: how many kernels; then for each its function, the number of its first check (0 where it has none), how
// many buffers it takes and which, how many symbols and which. A kernel with checks gives 256 * place + number of one
// that failed, or 0; nothing runs after that, and the number is counted from the first check of all.
inline int64_t launch_all(const int64_t* table, void* const* buffers, const int64_t* symbols) {
  typedef int64_t (*Kernel)(void* const*, const int64_t*);
  for (int64_t left = *table++; left > 0; left--) {
    const Kernel kernel = (Kernel)*table++;
    const int64_t first_check = *table++;
    const int64_t buffer_count = *table++;
    void* taken[buffer_count + 1];
    for (int64_t i = 0; i < buffer_count; i++) taken[i] = buffers[*table++];
    const int64_t symbol_count = *table++;
    int64_t values[symbol_count + 1];
    for (int64_t i = 0; i < symbol_count; i++) values[i] = symbols[*table++];
    const int64_t fault = kernel(taken, values);
    if (first_check && fault) return fault + first_check - 1;
  }
  return 0;
}

}  // namespace fusec
