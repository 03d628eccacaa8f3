// Kernels one after another, as a table tells them: one call from Python for many launches, and one team of threads.
#pragma once

#include "vec.h"

extern "C" {
int omp_get_num_threads(void);
int omp_get_thread_num(void);
int pthread_key_create(unsigned*, void (*)(void*));
void* pthread_getspecific(unsigned);
int pthread_setspecific(unsigned, const void*);
}

namespace fusec {

// The arena of a thread, which is freed when the thread ends.
static unsigned arena_key;
static bool has_arenas;
inline void drop_arena(void* given) {
  free(((Arena*)given)->block);
  free(given);
}
__attribute__((constructor)) static void make_arena_key() { has_arenas = !pthread_key_create(&arena_key, drop_arena); }
inline Arena* own_arena() {
  if (!has_arenas) return nullptr;
  if (void* const known = pthread_getspecific(arena_key)) return (Arena*)known;
  Arena* const made = (Arena*)malloc(sizeof(Arena));
  *made = {nullptr, 0, 0, 0};
  if (!pthread_setspecific(arena_key, made)) return made;
  free(made);
  return nullptr;
}

// The table: for each kernel its function, the number of its first check (0 where it has none), how many buffers it
// takes and which, how many symbols and which. A kernel gives 256 * place + number of a check that failed, or 0;
// nothing runs after that, and the number is counted from the first check of all.
struct Row {
  const int64_t* next;
  int64_t left;
  void* const* buffers;
  const int64_t* symbols;

  // Runs what is left, up to a kernel that wants more threads.
  void run(Team& team) {
    typedef int64_t (*Kernel)(void* const*, const int64_t*, Team&);
    while (left) {
      const int64_t* at = next;
      const Kernel kernel = (Kernel)*at++;
      const int64_t first_check = *at++;
      const int64_t buffer_count = *at++;
      void* taken[buffer_count + 1];
      for (int64_t i = 0; i < buffer_count; i++) taken[i] = buffers[*at++];
      const int64_t symbol_count = *at++;
      int64_t values[symbol_count + 1];
      for (int64_t i = 0; i < symbol_count; i++) values[i] = symbols[*at++];
      const int64_t fault = kernel(taken, values, team);
      if (team.asked) return;
      if (fault) team.report(fault + first_check - 1);
      next = at, left--;
    }
  }
};

inline int64_t launch_all(int threads, const int64_t* table, void* const* buffers, const int64_t* symbols) {
  Hand hands[threads];
  for (Hand& hand : hands) hand.taken = 0;
  Meeting meeting;
  meeting.hands = hands;
  Row row = {table + 1, *table, buffers, symbols};
  Team first(meeting, 0, 1, threads > 1, own_arena());
  row.run(first);
  if (row.left) {
#pragma omp parallel num_threads(threads)
    {
      Team team(meeting, omp_get_thread_num(), omp_get_num_threads(), false, own_arena());
      Row rest = row;
      rest.run(team);
      team.enter(true);  // all have ended
    }
  }
  return meeting.fault;
}

}  // namespace fusec
