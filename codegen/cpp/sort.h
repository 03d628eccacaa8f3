// Stable sorts of the elements of a row by radix: the places of the first of them, in order.
#pragma once
#include "vec.h"

namespace fusec {

constexpr int64_t FEW = 32;       // elements that are sorted by insertion
constexpr int64_t MANY = 2048;    // elements from which digits are long
constexpr int LONG = 11, SHORT = 8;  // bits of a digit

template <int bytes> struct Unsigned { typedef uint32_t type; };
template <> struct Unsigned<8> { typedef uint64_t type; };

template <class K> struct Entry { K key; uint32_t place; };

// Unsigned integers in the order of numbers, or in reverse: NaN is the largest number, and zeros are equal.
template <bool DESCENDING, class E> FN typename Unsigned<sizeof(E)>::type key_of(E x) {
  typedef typename Unsigned<sizeof(E)>::type K;
  constexpr K sign = K(1) << (8 * sizeof(K) - 1);
  K key;
  if constexpr (is_float<E>) {
    x += E(0);  // -0 becomes 0
    __builtin_memcpy(&key, &x, sizeof(K));
    key ^= key & sign ? ~K(0) : sign;
    if (x != x) key = ~K(0);
  } else if constexpr (sizeof(E) == 8) {
    key = K(x) ^ sign;
  } else {
    key = K(int32_t(x)) ^ sign;
  }
  return DESCENDING ? K(~key) : key;
}

template <class K> FN void sort_by_insertion(Entry<K>* entries, int64_t n) {
  for (int64_t i = 1; i < n; i++) {
    const Entry<K> entry = entries[i];
    int64_t at = i;
    for (; at > 0 && entries[at - 1].key > entry.key; at--) entries[at] = entries[at - 1];
    entries[at] = entry;
  }
}

// Sort digit by digit, the lowest first. Returns where the result is: `from` or `to`.
template <int BITS, class K> Entry<K>* sort_by_digits(Entry<K>* from, Entry<K>* to, int64_t n) {
  constexpr int bits = 8 * sizeof(K), digits = (bits + BITS - 1) / BITS;
  constexpr K last = (K(1) << BITS) - 1;
  uint32_t starts[digits][last + 1] = {};
  for (int64_t i = 0; i < n; i++)
    for (int d = 0; d < digits; d++) starts[d][(from[i].key >> (d * BITS)) & last]++;
  for (int d = 0; d < digits; d++) {
    if (starts[d][(from[0].key >> (d * BITS)) & last] == n) continue;  // all have the same digit
    uint32_t start = 0;
    for (K digit = 0; digit <= last; digit++) {
      const uint32_t count = starts[d][digit];
      starts[d][digit] = start;
      start += count;
    }
    for (int64_t i = 0; i < n; i++) to[starts[d][(from[i].key >> (d * BITS)) & last]++] = from[i];
    Entry<K>* const other = from;
    from = to;
    to = other;
  }
  return from;
}

template <class K> FN Entry<K>* sorted(Entry<K>* from, Entry<K>* to, int64_t n) {
  if (n > MANY) return sort_by_digits<LONG>(from, to, n);
  if (n > FEW) return sort_by_digits<SHORT>(from, to, n);
  sort_by_insertion(from, n);
  return from;
}

// The entries that may be among the first `count`. Of a sample of the elements as many come no later than the last of
// them: no element after it is among the first of all.
template <bool DESCENDING, class E, class K>
int64_t select(const E* elements, Entry<K>* entries, Entry<K>* other, int64_t n, int64_t count) {
  constexpr int64_t block = 32;
  int64_t sample = count;
  while (sample * sample < count * n) sample *= 2;  // about as many entries are left
  const int64_t step = n / sample;
  for (int64_t i = 0; i < sample; i++) entries[i] = {key_of<DESCENDING>(elements[i * step]), uint32_t(i * step)};
  const E last = elements[sorted(entries, other, sample)[count - 1].place];
  const auto passes = [=](E x) { return DESCENDING ? !(x < last) : !(x > last); };  // NaN passes
  int64_t found = 0;
  for (int64_t start = 0; start < n; start += block) {
    const int64_t stop = start + block < n ? start + block : n;
    if (start + block <= n) {
      int some = 0;
      for (int64_t i = 0; i < block; i++) some |= passes(elements[start + i]);
      if (!some) continue;
    }
    for (int64_t i = start; i < stop; i++)
      if (passes(elements[i])) entries[found++] = {key_of<DESCENDING>(elements[i]), uint32_t(i)};
  }
  return found;
}

// The first `count` of sorted entries as places and elements.
template <class E, class K>
FN void put(const E* elements, const Entry<K>* entries, int64_t* order, E* values, int64_t count) {
  for (int64_t i = 0; i < count; i++) values[i] = elements[order[i] = entries[i].place];
}

// Sort where more than half of the elements are equal, as in a row that is masked; or do nothing.
template <bool DESCENDING, class E, class K>
bool sort_around(E usual, const E* elements, int64_t* order, E* values, Entry<K>* entries, Entry<K>* other, int64_t n) {
  constexpr int64_t block = 32;
  const K middle = key_of<DESCENDING>(usual);
  uint32_t equal = 0, less = 0;
  for (int64_t i = 0; i < n; i++) {
    const K key = key_of<DESCENDING>(elements[i]);
    equal += key == middle, less += key < middle;
  }
  if (equal <= n / 2) return false;
  int64_t at = less, others = 0;
  for (int64_t start = 0; start < n; start += block) {
    const E* const some = elements + start;
    int same = 0;
    if (start + block <= n)
      for (int64_t i = 0; i < block; i++) same += key_of<DESCENDING>(some[i]) == middle;
    if (same == block) {
      for (int64_t i = 0; i < block; i++) order[at + i] = start + i, values[at + i] = some[i];
      at += block;
      continue;
    }
    for (int64_t i = start; i < start + block && i < n; i++) {
      const K key = key_of<DESCENDING>(elements[i]);
      if (key == middle) order[at] = i, values[at++] = elements[i];
      else entries[others++] = {key, uint32_t(i)};
    }
  }
  const Entry<K>* const rest = sorted(entries, other, others);
  put(elements, rest, order, values, less);
  put(elements, rest + less, order + less + equal, values + less + equal, others - less);
  return true;
}

// The places of the first `count` of `n` elements in order, smallest first or else largest first, and the elements.
// The memory is for two entries of each element.
template <bool DESCENDING, class E>
void argsort(const E* elements, int64_t* order, E* values, int64_t* memory, int64_t n, int64_t count) {
  typedef typename Unsigned<sizeof(E)>::type K;
  if (count == 0) return;
  Entry<K>*const one = (Entry<K>*)memory, *const two = one + n;
  if (count == n && sort_around<DESCENDING>(elements[n / 2], elements, order, values, one, two, n)) return;
  int64_t found = n;
  if (n > MANY && count < n / 16) found = select<DESCENDING>(elements, one, two, n, count);
  else for (int64_t i = 0; i < n; i++) one[i] = {key_of<DESCENDING>(elements[i]), uint32_t(i)};
  put(elements, sorted(one, two, found), order, values, count);
}

// The sum or product of each element and all before it, continued from an accumulator that has more bits.
template <class A, class T> FN T scan_sum(A& total, T x) { return T(total += x); }
template <class A, class T> FN T scan_prod(A& total, T x) { return T(total *= x); }
template <class A, int N> FN Vec<A, N> sums_so_far(Vec<A, N> x) {
  Vec<int32_t, N> lane;
  for (int i = 0; i < N; i++) lane.v[i] = i;
  for (int by = 1; by < N; by *= 2)
    x = x + select(lane >= by, permute(x, lane - Vec<int32_t, N>(by)), Vec<A, N>(A(0)));
  return x;
}
template <class A, class T, int N, class C> FN Vec<T, N> scan_sum(A& total, Vec<T, N> x, C count) {
  if constexpr (is_float<T> && same_type<A, T>::value) {  // the order shows, as where a sum overflows
    for (int64_t i = 0; i < valid<N>(count); i++) x.v[i] = scan_sum(total, T(x.v[i]));
    return x;
  } else {
    constexpr int wide = REGISTER / int(sizeof(A)), step = wide < N ? wide : N;
    for (int start = 0; start < N && start < valid<N>(count); start += step) {
      Vec<T, step> part;
      __builtin_memcpy(&part, (T*)&x + start, sizeof part);
      const Vec<A, step> sums = sums_so_far(cast<A>(part));
      part = cast<T>(sums + Vec<A, step>(total));
      total += sums.v[step - 1];  // nothing follows where only a part is valid
      __builtin_memcpy((T*)&x + start, &part, sizeof part);
    }
    return x;
  }
}
template <class A, class T, int N, class C> FN Vec<T, N> scan_prod(A& total, Vec<T, N> x, C count) {
  for (int64_t i = 0; i < valid<N>(count); i++) x.v[i] = scan_prod(total, T(x.v[i]));
  return x;
}

}  // namespace fusec
