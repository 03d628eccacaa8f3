// The threads that run a row of kernels. Each of them walks the row and takes its share of a kernel's iterations, and
// what a slower one has not come to; they wait for each other where something has to be done before the next thing
// begins.
//
// A thread that waits looks for a while, then offers its core to others: beside a busy process the thread it waits for
// may be one that stands behind it in the same queue. (OpenMP's own barrier keeps looking for about a millisecond.)
#pragma once

extern "C" int sched_yield(void);

namespace fusec {

constexpr int MOST_LENT = 8;
constexpr int LOOKS = 2000;  // about 20 µs
constexpr int PIECES = 8;    // for each thread

FN void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How many iterations have been taken of what was dealt to one thread, by whomever.
struct Hand { alignas(64) int64_t taken; };

// What all threads of a team see.
struct Meeting {
  alignas(64) int arrived = 0;
  alignas(64) int round = 0;
  alignas(64) int64_t fault = 0;  // of the first check that failed; nothing runs after it
  void* lent[MOST_LENT];          // memory of the first thread that all use
  Hand* hands;
};

// The iterations of a loop, which threads take one by one: each those dealt to it, neighbours in order, then what others
// have not come to, as one that has to share its core is slower. Hands are counted on from loop to loop: nobody leaves
// one before all is taken, so all begin the next with the same counts.
class Deal {
  Hand* const hands;
  const int64_t count, each, start;
  const int thread, threads;
  int64_t place = -1;
  int asked = 0;  // how many hands are empty

  bool take() {
    const int whose = (thread + asked) % threads;
    int64_t& taken = hands[whose].taken;
    int64_t seen = __atomic_load_n(&taken, __ATOMIC_RELAXED);
    while (seen < start + each)
      if (__atomic_compare_exchange_n(&taken, &seen, seen + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        place = whose * each + seen++ - start;
        if (place < count) return true;
      }
    return false;
  }

 public:
  Deal(Hand* hands, int64_t count, int64_t each, int64_t start, int thread, int threads)
      : hands(hands), count(count), each(each), start(start), thread(thread), threads(threads) { ++*this; }
  explicit operator bool() const { return place < count; }
  int64_t operator*() const { return place; }
  void operator++() {
    if (threads == 1) return (void)place++;
    while (asked < threads && !take()) asked++;
    if (asked == threads) place = count;
  }
};

// The iterations of nested loops, which are dealt in pieces.
template <int N> class Share {
  const int64_t all, piece;
  int64_t counts[N], place[N], left = 0;
  Deal pieces;

  void begin() {
    if (!pieces) return;
    int64_t first = *pieces * piece;
    left = all - first < piece ? all - first : piece;
    for (int i = N - 1; i >= 0; i--) place[i] = first % counts[i], first /= counts[i];
  }

 public:
  Share(const int64_t (&given)[N], int64_t all, int64_t piece, Deal pieces) : all(all), piece(piece), pieces(pieces) {
    for (int i = 0; i < N; i++) counts[i] = given[i];
    begin();
  }
  explicit operator bool() const { return left > 0; }
  int64_t operator[](int i) const { return place[i]; }
  void operator++() {
    for (int i = N - 1; i >= 0 && ++place[i] == counts[i]; i--) place[i] = 0;
    if (!--left) ++pieces, begin();
  }
};

class Team {
  Meeting& meeting;
  const bool alone;       // there could be more threads, but nobody has asked for them yet
  bool together = false;  // whether all took part in the kernel before
  int64_t dealt = 0;      // to each thread so far

  void meet() {
    if (threads == 1) return;
    const int now = __atomic_load_n(&meeting.round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&meeting.arrived, 1, __ATOMIC_ACQ_REL) == threads) {
      __atomic_store_n(&meeting.arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&meeting.round, now + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int looks = 0; __atomic_load_n(&meeting.round, __ATOMIC_ACQUIRE) == now; looks++) {
      if (looks < LOOKS) pause();
      else sched_yield();
    }
  }

 public:
  const int thread, threads;
  Arena* const arena;   // of this thread
  int sharing = 1;      // threads that take part in this kernel
  bool asked = false;

  Team(Meeting& meeting, int thread, int threads, bool alone, Arena* arena)
      : meeting(meeting), alone(alone), thread(thread), threads(threads), arena(arena) {}

  // Begins a kernel that it pays to share, or that the first thread runs while the others go on. Gives whether this
  // thread takes part; not where the kernel has to be run again, by more threads.
  bool enter(bool pays) {
    if (pays && alone) return !(asked = true);
    if (pays || together) meet();
    together = pays;
    sharing = pays ? threads : 1;
    return (pays || !thread) && !__atomic_load_n(&meeting.fault, __ATOMIC_RELAXED);
  }
  // For those who take part in this kernel.
  void wait() {
    if (sharing > 1) meet();
  }
  Deal deal(int64_t count) {
    if (sharing == 1) return {nullptr, count, count, 0, 0, 1};
    const int64_t each = (count + threads - 1) / threads, start = dealt;
    dealt += each;
    return {meeting.hands, count, each, start, thread, threads};
  }
  int part() const { return sharing > 1 ? thread : 0; }
  template <int N> Share<N> share(const int64_t (&counts)[N]) {
    int64_t all = 1;
    for (int64_t count : counts) all *= count > 0 ? count : 0;
    const int64_t piece = all / (sharing * PIECES) + 1;
    return {counts, all, piece, deal((all + piece - 1) / piece)};
  }

  // The first check that fails says so; where all take part, all have found it.
  void report(int64_t fault) {
    if (!thread) __atomic_store_n(&meeting.fault, fault, __ATOMIC_RELAXED);
  }
  void*& lent(int number) { return meeting.lent[number]; }
};

// Memory that the first thread has, and that all may use between entering a kernel and the last time they wait.
template <class E, int NUMBER> struct Shared : Scratch {
  static_assert(NUMBER < MOST_LENT, "a kernel with too much memory that threads share");
  Shared(Team& team, int64_t count) : Scratch(nullptr, team.thread ? 0 : room<E>(count)) {
    if (!team.thread) team.lent(NUMBER) = take<E>(count);
  }
};

}  // namespace fusec
