// Dot-product instructions: what one of them multiplies and adds up in each lane of a register of sums.
#pragma once

#include "vec.h"

namespace fusec {

template <bool, class X, class Y> struct Chosen { typedef X type; };
template <class X, class Y> struct Chosen<false, X, Y> { typedef Y type; };

// One element along k in each lane: no such instruction.
struct OneStep { static constexpr int count = 1; };

template <class A, class L, class R>
constexpr bool of_halves = same_type<A, float>::value && same_type<L, bf16>::value && same_type<R, bf16>::value;

// Pairs of bfloat16 products are added into float lanes by one instruction, where the machine has it and is quick at it:
// Intel's processors with AVX512-FP16 take two cycles for one, half the speed of their two FMAs a cycle.
#if defined(__AVX512BF16__) && !defined(__AVX512FP16__) && defined(__GNUC__) && !defined(__clang__)
#define IN_PAIRS
typedef int16_t Pairs __attribute__((vector_size(64)));
FN Raw<float, 16>::type add_pairs(Raw<float, 16>::type sum, Pairs a, Pairs b) {
#if __GNUC__ >= 13
  typedef __bf16 Halves __attribute__((vector_size(64)));
  return __builtin_ia32_dpbf16ps_v16sf(sum, (Halves)a, (Halves)b);
#else
  return __builtin_ia32_dpbf16ps_v16sf(sum, a, b);
#endif
}
// Two registers of floats as one: the conversion takes denormals for 0, as the products do.
FN Pairs paired(Raw<float, 16>::type low, Raw<float, 16>::type high) {
#if __GNUC__ >= 13
  return (Pairs)__builtin_ia32_cvtne2ps2bf16_v32bf(high, low);
#else
  return (Pairs)__builtin_ia32_cvtne2ps2bf16_v32hi(high, low);
#endif
}
// (a0, b0, a1, b1, …) of two rows of sixteen.
FN Pairs interleaved(Raw<int16_t, 16>::type a, Raw<int16_t, 16>::type b) {
  typedef long long wide __attribute__((vector_size(64)));
  typedef long long half __attribute__((vector_size(32)));
  const wide rows = __builtin_ia32_inserti64x4_mask((wide)__builtin_ia32_si512_256si((Raw<int32_t, 8>::type)a),
                                                    (half)b, 1, wide{}, -1);
  Pairs order;
  for (int i = 0; i < 32; i++) order[i] = i / 2 + i % 2 * 16;
  return __builtin_ia32_permvarhi512_mask((Pairs)rows, order, Pairs{}, -1);
}
// Each byte of `codes` has one of four bits, from bit SHIFT on; `table` holds its sixteen entries twice. These are
// intrinsics because GCC splits the generic conversion in two, and takes the slower permutation of two tables.
template <int SHIFT> FN Pairs look_up(Pairs table, Vec<uint8_t, 32> codes) {
  typedef Raw<char, 32>::type chars;
  const Pairs wide = __builtin_ia32_pmovzxbw512_mask((chars)codes.v, Pairs{}, -1);
  return __builtin_ia32_permvarhi512_mask(table, wide >> SHIFT, Pairs{}, -1);
}
struct PairStep {
  static constexpr int count = 2, excess = 0;
  static LANEWISE Pairs left(const bf16* p) { return right(p); }
  static LANEWISE Pairs right(const bf16* p) {
    Pairs x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static LANEWISE Raw<float, 16>::type add(Raw<float, 16>::type sum, Pairs l, Pairs r) { return add_pairs(sum, l, r); }
};
template <class A, class L, class R, int N> constexpr bool in_pairs = N == 16 && of_halves<A, L, R>;
#else
typedef OneStep PairStep;
template <class A, class L, class R, int N> constexpr bool in_pairs = false;
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__GNUC__) && !defined(__clang__)
#define AMX
#endif

// With many rows AMX multiplies pairs as well.
#if defined(IN_PAIRS) || defined(AMX)
#define MANY_IN_PAIRS
template <class A, class L, class R, int N> constexpr bool many_in_pairs = N == 16 && of_halves<A, L, R>;
#endif

// Bytes, signed or not, are multiplied exactly and added into lanes of int32_t, which wrap around.
template <class A, class L, class R>
constexpr bool in_bytes = same_type<A, int32_t>::value && sizeof(L) == 1 && sizeof(R) == 1 &&
                          !same_type<L, bool>::value && !same_type<R, bool>::value;

// VNNI multiplies four unsigned bytes of a lane by four signed ones. Where both operands are signed, 128 is added to the
// right one, and where both are unsigned, 128 is subtracted: the results differ by 128 times the left one's sum.
#if defined(__AVX512VNNI__) && defined(__GNUC__) && !defined(__clang__)
#define IN_QUADS
constexpr int QUAD_LANES = 16;
FN Raw<int32_t, 16>::type add_quads(Raw<int32_t, 16>::type sum, Raw<int32_t, 16>::type u, Raw<int32_t, 16>::type s) {
  return __builtin_ia32_vpdpbusd_v16si(sum, u, s);
}
#elif defined(__AVXVNNI__) && defined(__GNUC__) && !defined(__clang__)
#define IN_QUADS
constexpr int QUAD_LANES = 8;
FN Raw<int32_t, 8>::type add_quads(Raw<int32_t, 8>::type sum, Raw<int32_t, 8>::type u, Raw<int32_t, 8>::type s) {
  return __builtin_ia32_vpdpbusd_v8si(sum, u, s);
}
#else
constexpr int QUAD_LANES = 0;
#endif
constexpr int32_t FLIP = int32_t(0x80808080u);
template <class L, class R> constexpr int flipped = !same_type<L, R>::value ? 0 : same_type<L, int8_t>::value ? 128 : -128;

#if defined(IN_QUADS)
template <class L, class R, int N> struct QuadStep {
  typedef typename Raw<int32_t, N>::type raw;
  static constexpr int count = 4, excess = flipped<L, R>;
  template <class T> static LANEWISE raw load(const T* p) {
    raw x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static LANEWISE raw left(const L* p) { return load(p); }
  static LANEWISE raw right(const R* p) { return excess ? load(p) ^ FLIP : load(p); }
  static LANEWISE raw add(raw sum, raw l, raw r) {
    if constexpr (same_type<L, int8_t>::value) return add_quads(sum, r, l);
    else return add_quads(sum, l, r);
  }
  // The left operand's sum.
  static LANEWISE raw total(raw sum, raw l) { return add(sum, l, raw{} + 0x01010101); }
};
#endif

// Without VNNI they are widened to 16 bits, of which pairs are multiplied and added up without rounding.
#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
template <int N> constexpr bool in_words = N == 8;
typedef Raw<int16_t, 16>::type Words;
template <class T> FN Words widened(const T* p) {
  Raw<char, 16>::type x;
  __builtin_memcpy(&x, p, sizeof x);
  if constexpr (same_type<T, int8_t>::value) return __builtin_ia32_pmovsxbw256(x);
  else return __builtin_ia32_pmovzxbw256(x);
}
template <class L, class R> struct WordStep {
  static constexpr int count = 2, excess = 0;
  static LANEWISE Words left(const L* p) { return widened(p); }
  static LANEWISE Words right(const R* p) { return widened(p); }
  static LANEWISE Raw<int32_t, 8>::type add(Raw<int32_t, 8>::type sum, Words l, Words r) {
    return sum + (Raw<int32_t, 8>::type)__builtin_ia32_pmaddwd256(l, r);
  }
};
#else
template <int N> constexpr bool in_words = false;
template <class L, class R> struct WordStep : OneStep {};
#endif
#if !defined(IN_QUADS)
template <class L, class R, int N> struct QuadStep : OneStep {};
#endif

// Some registers of signed bytes times codes from LOW to HIGH, four of each in a lane of eight. Codes that are unsigned,
// or are made so by adding 128, are multiplied by VNNI; without it products of small codes are added up in 16 bits.
template <class R, int LOW, int HIGH> struct GroupStep {
  typedef Raw<int32_t, 8>::type raw;
  typedef Raw<int8_t, 32>::type bytes;
#if (defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))) && defined(__GNUC__) && !defined(__clang__)
  static constexpr int excess = LOW < 0 ? 128 : 0;
  template <int SOME> static LANEWISE raw add(raw sum, const bytes* l, const bytes* r) {
    for (int i = 0; i < SOME; i++)
      sum = __builtin_ia32_vpdpbusd_v8si(sum, excess ? (raw)r[i] ^ FLIP : (raw)r[i], (raw)l[i]);
    return sum;
  }
#elif defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
  static constexpr int excess = 0;
  template <int SOME> static LANEWISE raw add(raw sum, const bytes* l, const bytes* r) {
    typedef Raw<char, 32>::type chars;
    if constexpr (LOW >= 0 && 2 * SOME * 128 * HIGH < 1 << 15) {
      Words words{};
      for (int i = 0; i < SOME; i++) words += (Words)__builtin_ia32_pmaddubsw256((chars)r[i], (chars)l[i]);
      sum += (raw)__builtin_ia32_pmaddwd256(words, Words{} + 1);
    } else {
      for (int i = 0; i < SOME; i++)
        for (int half = 0; half < 32; half += 16)
          sum += (raw)__builtin_ia32_pmaddwd256(widened((const int8_t*)(l + i) + half), widened((const R*)(r + i) + half));
    }
    return sum;
  }
#else
  static constexpr int excess = 0;
  template <int SOME> static LANEWISE raw add(raw sum, const bytes* l, const bytes* r) {
    for (int i = 0; i < SOME; i++)
      for (int k = 0; k < 32; k += 8) {
        typename Raw<int8_t, 8>::type left;
        typename Raw<R, 8>::type right;
        __builtin_memcpy(&left, (const int8_t*)(l + i) + k, 8);
        __builtin_memcpy(&right, (const int8_t*)(r + i) + k, 8);
        sum += __builtin_convertvector(left, raw) * __builtin_convertvector(right, raw);
      }
    return sum;
  }
#endif
};

template <class A, class L, class R, int N> struct StepOf {
  static constexpr bool bytes = in_bytes<A, L, R>;
  typedef typename Chosen<in_words<N>, WordStep<L, R>, OneStep>::type words;
  typedef typename Chosen<N == QUAD_LANES, QuadStep<L, R, N>, words>::type exact;
  typedef typename Chosen<in_pairs<A, L, R, N>, PairStep, OneStep>::type pairs;
  typedef typename Chosen<bytes, exact, pairs>::type type;
};

}  // namespace fusec
