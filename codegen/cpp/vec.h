// Vector primitives for generated kernels: what the tile program calls a tile is a Vec<T, N> here.
//
// GCC/Clang vector extensions only, no system headers: a kernel builds in about a tenth of a second.
// Half types live in memory as bf16/f16 and are computed in float. Lanes beyond the end of a range are told by a
// Count: All (a full tile, known when compiled) or Part (the tail).
#pragma once

typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;

#define FN static inline __attribute__((always_inline))
#define LANEWISE __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

extern "C" {
void* malloc(__SIZE_TYPE__);
void free(void*);
float expf(float); float exp2f(float); float expm1f(float); float logf(float); float log1pf(float); float log2f(float);
float tanhf(float); float erff(float); float sinf(float); float cosf(float); float powf(float, float);
float atan2f(float, float); float fmodf(float, float);
double exp(double); double exp2(double); double expm1(double); double log(double); double log1p(double);
double log2(double); double tanh(double); double erf(double); double sin(double); double cos(double);
double pow(double, double); double atan2(double, double); double fmod(double, double);
}

namespace fusec {

// ---------------------------------------------------------------------------------------------- types

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

struct All {};                  // every lane counts
struct Part { int64_t count; };  // the first `count` lanes count, at most as many as there are

template <class A, class B> struct same_type { static constexpr bool value = false; };
template <class A> struct same_type<A, A> { static constexpr bool value = true; };
template <class T> constexpr bool is_float = same_type<T, float>::value || same_type<T, double>::value;

// What a kernel returns where a place is out of range: the number of the check, and the place, as far as it fits.
FN int64_t out_of_range(int64_t place, int64_t check) {
  const int64_t far = int64_t(1) << 54;
  return (place < -far ? -far : place > far ? far : place) * 256 + check;
}

template <class T, int N> struct Raw { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <int bytes> struct IntOf;
template <> struct IntOf<1> { typedef int8_t type; };
template <> struct IntOf<2> { typedef int16_t type; };
template <> struct IntOf<4> { typedef int32_t type; };
template <> struct IntOf<8> { typedef int64_t type; };

// One truth value a lane: 0 or -1.
template <int N> struct Mask {
  typedef typename Raw<int32_t, N>::type raw;
  raw v;
  Mask() = default;
  LANEWISE explicit Mask(raw r) : v(r) {}
  LANEWISE Mask(bool s) : v(raw{} - int32_t(s)) {}
  friend LANEWISE inline Mask operator&(Mask a, Mask b) { return Mask(a.v & b.v); }
  friend LANEWISE inline Mask operator|(Mask a, Mask b) { return Mask(a.v | b.v); }
  friend LANEWISE inline Mask operator^(Mask a, Mask b) { return Mask(a.v ^ b.v); }
  friend LANEWISE inline Mask operator!(Mask a) { return Mask(~a.v); }
};

#if defined(__AVX512F__)
constexpr int REGISTER = 64;
#elif defined(__AVX__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

template <class E> struct Element { typedef E type; };
template <class E> struct Element<E&> { typedef E type; };
template <class V> struct Half {
  typedef typename Element<decltype(V{}[0])>::type E;
  typedef E type __attribute__((vector_size(sizeof(V) / 2)));
  type low, high;
};

// f of both halves of vectors, as one vector R. What is longer than a register is halved until it fits: GCC fuses,
// compares and selects it lane by lane.
template <class R, class F, class... V> FN R by_halves(F f, V... x) {
  const auto halves = [](auto v) LANEWISE {
    Half<decltype(v)> h;
    static_assert(sizeof h == sizeof v);
    __builtin_memcpy(&h, &v, sizeof v);
    return h;
  };
  const Half<R> r = {f(halves(x).low...), f(halves(x).high...)};
  R joined;
  __builtin_memcpy(&joined, &r, sizeof r);
  return joined;
}

template <class T, int N, class F> FN Mask<N> compare(F f, typename Raw<T, N>::type a, typename Raw<T, N>::type b) {
  typedef typename Raw<int32_t, N>::type raw;
  if constexpr (sizeof a > REGISTER)
    return Mask<N>(by_halves<raw>([f](auto x, auto y) LANEWISE { return compare<T, N / 2>(f, x, y).v; }, a, b));
  else if constexpr (sizeof(T) == 4) return Mask<N>((raw)f(a, b));
  else return Mask<N>(__builtin_convertvector(f(a, b), raw));
}

// The sign of each lane as a bit.
#if defined(__AVX__)
template <int N> FN uint64_t signs(Mask<N> m) {
  static_assert(N % 8 == 0);
  uint64_t bits = 0;
  for (int i = 0; i < N / 8; i++) {
    Raw<float, 8>::type part;
    __builtin_memcpy(&part, (const char*)&m + i * sizeof(part), sizeof(part));
    bits |= uint64_t(__builtin_ia32_movmskps256(part)) << (8 * i);
  }
  return bits;
}
#endif

template <int N> FN bool all(Mask<N> m) {
#if defined(__AVX__)
  if constexpr (N % 8 == 0) return signs(m) == ~uint64_t(0) >> (64 - N);
#endif
  int32_t every = -1;
  for (int i = 0; i < N; i++) every &= m.v[i];
  return every != 0;
}

template <int N> FN bool any(Mask<N> m) {
#if defined(__AVX__)
  if constexpr (N % 8 == 0) return signs(m) != 0;
#endif
  int32_t some = 0;
  for (int i = 0; i < N; i++) some |= m.v[i];
  return some != 0;
}

// a·b + c with one rounding, and √a, of a register. GCC has them for vectors of the machine's own size only, and
// spelling them lane by lane ends in scalar code; longer vectors are halved until they fit.
template <class T, int N> FN typename Raw<T, N>::type fma_raw(typename Raw<T, N>::type a, typename Raw<T, N>::type b,
                                                              typename Raw<T, N>::type c) {
  typedef typename Raw<T, N>::type raw;
#if defined(__clang__)
  return __builtin_elementwise_fma(a, b, c);
#else
#if defined(__AVX512F__)
  if constexpr (sizeof(raw) == 64 && sizeof(T) == 4)
    return (raw)__builtin_ia32_vfmaddps512_mask((Raw<float, 16>::type)a, (Raw<float, 16>::type)b, (Raw<float, 16>::type)c, -1, 4);
  else if constexpr (sizeof(raw) == 64)
    return (raw)__builtin_ia32_vfmaddpd512_mask((Raw<double, 8>::type)a, (Raw<double, 8>::type)b, (Raw<double, 8>::type)c, -1, 4);
  else
#endif
#if defined(__FMA__)
  if constexpr (sizeof(raw) == 32 && sizeof(T) == 4)
    return (raw)__builtin_ia32_vfmaddps256((Raw<float, 8>::type)a, (Raw<float, 8>::type)b, (Raw<float, 8>::type)c);
  else if constexpr (sizeof(raw) == 32)
    return (raw)__builtin_ia32_vfmaddpd256((Raw<double, 4>::type)a, (Raw<double, 4>::type)b, (Raw<double, 4>::type)c);
  else
#endif
  if constexpr (sizeof(raw) > 32) {
    return by_halves<raw>([](auto x, auto y, auto z) LANEWISE { return fma_raw<T, N / 2>(x, y, z); }, a, b, c);
  } else {
    for (int i = 0; i < N; i++) a[i] = sizeof(T) == 4 ? __builtin_fmaf(a[i], b[i], c[i]) : __builtin_fma(a[i], b[i], c[i]);
    return a;
  }
#endif
}
template <class T, int N> FN typename Raw<T, N>::type sqrt_raw(typename Raw<T, N>::type a) {
  typedef typename Raw<T, N>::type raw;
#if defined(__clang__)
  return __builtin_elementwise_sqrt(a);
#else
#if defined(__AVX512F__)
  if constexpr (sizeof(raw) == 64 && sizeof(T) == 4)
    return (raw)__builtin_ia32_sqrtps512_mask((Raw<float, 16>::type)a, (Raw<float, 16>::type)a, -1, 4);
  else if constexpr (sizeof(raw) == 64)
    return (raw)__builtin_ia32_sqrtpd512_mask((Raw<double, 8>::type)a, (Raw<double, 8>::type)a, -1, 4);
  else
#endif
#if defined(__AVX__)
  if constexpr (sizeof(raw) == 32 && sizeof(T) == 4) return (raw)__builtin_ia32_sqrtps256((Raw<float, 8>::type)a);
  else if constexpr (sizeof(raw) == 32) return (raw)__builtin_ia32_sqrtpd256((Raw<double, 4>::type)a);
  else
#endif
  if constexpr (sizeof(raw) > 32) {
    return by_halves<raw>([](auto x) LANEWISE { return sqrt_raw<T, N / 2>(x); }, a);
  } else {
    for (int i = 0; i < N; i++) a[i] = sizeof(T) == 4 ? __builtin_sqrtf(a[i]) : __builtin_sqrt(a[i]);
    return a;
  }
#endif
}

// a > b ? a : b, and a < b ? a : b: one instruction, which gives b where they are equal or either is NaN; GCC does not
// find it by itself.
template <class T, int N> FN typename Raw<T, N>::type larger_raw(typename Raw<T, N>::type a, typename Raw<T, N>::type b) {
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (N == 16 && same_type<T, float>::value) return __builtin_ia32_maxps512_mask(a, b, b, -1, 4);
#endif
#if defined(__AVX__) && !defined(__clang__)
  if constexpr (N == 8 && same_type<T, float>::value) return __builtin_ia32_maxps256(a, b);
#endif
  typedef typename Raw<T, N>::type raw;
  if constexpr (sizeof(raw) > REGISTER && is_float<T>)
    return by_halves<raw>([](auto x, auto y) LANEWISE { return larger_raw<T, N / 2>(x, y); }, a, b);
  else return a > b ? a : b;
}
template <class T, int N> FN typename Raw<T, N>::type smaller_raw(typename Raw<T, N>::type a, typename Raw<T, N>::type b) {
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (N == 16 && same_type<T, float>::value) return __builtin_ia32_minps512_mask(a, b, b, -1, 4);
#endif
#if defined(__AVX__) && !defined(__clang__)
  if constexpr (N == 8 && same_type<T, float>::value) return __builtin_ia32_minps256(a, b);
#endif
  typedef typename Raw<T, N>::type raw;
  if constexpr (sizeof(raw) > REGISTER && is_float<T>)
    return by_halves<raw>([](auto x, auto y) LANEWISE { return smaller_raw<T, N / 2>(x, y); }, a, b);
  else return a < b ? a : b;
}

template <class T, int N> struct Vec {
  typedef typename Raw<T, N>::type raw;
  typedef typename Raw<typename IntOf<sizeof(T)>::type, N>::type bits;
  raw v;
  Vec() = default;
  LANEWISE explicit Vec(raw r) : v(r) {}
  LANEWISE Vec(T s) : v(s - raw{}) {}  // minus zero keeps the sign of -0
  friend LANEWISE inline Vec operator+(Vec a, Vec b) { return Vec(a.v + b.v); }
  friend LANEWISE inline Vec operator-(Vec a, Vec b) { return Vec(a.v - b.v); }
  friend LANEWISE inline Vec operator*(Vec a, Vec b) { return Vec(a.v * b.v); }
  friend LANEWISE inline Vec operator-(Vec a) { return Vec(-a.v); }
  friend LANEWISE inline Vec operator/(Vec a, Vec b) {
    static_assert(is_float<T>, "integers divide by floor_divide");
    return Vec(a.v / b.v);
  }
  friend LANEWISE inline Vec operator&(Vec a, Vec b) { return Vec(a.v & b.v); }
  friend LANEWISE inline Vec operator|(Vec a, Vec b) { return Vec(a.v | b.v); }
  friend LANEWISE inline Vec operator^(Vec a, Vec b) { return Vec(a.v ^ b.v); }
  friend LANEWISE inline Vec operator~(Vec a) { return Vec(~a.v); }
  friend LANEWISE inline Mask<N> operator==(Vec a, Vec b) {
    return compare<T, N>([](auto x, auto y) LANEWISE { return x == y; }, a.v, b.v);
  }
  friend LANEWISE inline Mask<N> operator!=(Vec a, Vec b) {
    return compare<T, N>([](auto x, auto y) LANEWISE { return x != y; }, a.v, b.v);
  }
  friend LANEWISE inline Mask<N> operator<(Vec a, Vec b) {
    return compare<T, N>([](auto x, auto y) LANEWISE { return x < y; }, a.v, b.v);
  }
  friend LANEWISE inline Mask<N> operator<=(Vec a, Vec b) {
    return compare<T, N>([](auto x, auto y) LANEWISE { return x <= y; }, a.v, b.v);
  }
  friend LANEWISE inline Mask<N> operator>(Vec a, Vec b) {
    return compare<T, N>([](auto x, auto y) LANEWISE { return x > y; }, a.v, b.v);
  }
  friend LANEWISE inline Mask<N> operator>=(Vec a, Vec b) {
    return compare<T, N>([](auto x, auto y) LANEWISE { return x >= y; }, a.v, b.v);
  }
  // NaN if either is NaN, the first of two zeros, as torch has it.
  friend LANEWISE inline Vec maximum(Vec a, Vec b) {
    const raw larger = larger_raw<T, N>(b.v, a.v);
    if constexpr (is_float<T>) return select(b != b, b, Vec(larger));
    else return Vec(larger);
  }
  friend LANEWISE inline Vec minimum(Vec a, Vec b) {
    const raw smaller = smaller_raw<T, N>(b.v, a.v);
    if constexpr (is_float<T>) return select(b != b, b, Vec(smaller));
    else return Vec(smaller);
  }
  // Rounds once.
  friend LANEWISE inline Vec fma(Vec a, Vec b, Vec c) { return Vec(fma_raw<T, N>(a.v, b.v, c.v)); }
};

template <class T, int N> FN Vec<T, N> select(Mask<N> m, Vec<T, N> a, Vec<T, N> b) {
  typedef typename Vec<T, N>::bits bits;
  if constexpr (sizeof(bits) > REGISTER)
    return Vec<T, N>(by_halves<typename Vec<T, N>::raw>([](auto c, auto x, auto y) LANEWISE {
      return select(Mask<N / 2>(c), Vec<T, N / 2>(x), Vec<T, N / 2>(y)).v;
    }, m.v, a.v, b.v));
  else if constexpr (sizeof(T) == 4) return Vec<T, N>((bits)m.v ? a.v : b.v);
  else return Vec<T, N>(__builtin_convertvector(m.v, bits) ? a.v : b.v);
}
template <int N> FN Mask<N> select(Mask<N> m, Mask<N> a, Mask<N> b) { return (m & a) | (!m & b); }
template <class V> FN V select(bool m, V a, V b) { return m ? a : b; }

// table[index % size] of a table in one register, one instruction where there is one for it, or in two.
template <class T, int N> FN Vec<T, N> permute(Vec<T, N> table, Vec<int32_t, N> index) {
#if defined(__clang__)
  Vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = table.v[index.v[i] & (N - 1)];
  return r;
#else
  typedef typename Vec<T, N>::bits bits;
  return Vec<T, N>(__builtin_shuffle(table.v, __builtin_convertvector(index.v, bits)));
#endif
}

template <class T, int N> FN Vec<T, N> permute(Vec<T, N> low, Vec<T, N> high, Vec<int32_t, N> index) {
  const Mask<N> first = (index & Vec<int32_t, N>(N)) == Vec<int32_t, N>(0);
  return select(first, permute(low, index), permute(high, index));
}

// `f` on every lane, one after another: for functions that are left to libm.
template <class T, int N, class F> FN Vec<T, N> map(F f, Vec<T, N> a) {
  Vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = f(a.v[i]);
  return r;
}
template <class T, int N, class F> FN Vec<T, N> map(F f, Vec<T, N> a, Vec<T, N> b) {
  Vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = f(a.v[i], b.v[i]);
  return r;
}

template <class T, int N> FN typename Vec<T, N>::bits to_bits(Vec<T, N> a) { return (typename Vec<T, N>::bits)a.v; }
template <class T, int N> FN Vec<T, N> from_bits(typename Vec<T, N>::bits b) {
  return Vec<T, N>((typename Vec<T, N>::raw)b);
}

template <class T, int N, class F> FN Vec<T, N> each(F of) {
  Vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = T(of(i));
  return r;
}
template <class T, int N> FN Vec<T, N> iota(int64_t start, int64_t step) {
  return each<T, N>([&](int64_t lane) LANEWISE { return start + lane * step; });
}

template <int N> FN Mask<N> lanes_of(All) { return Mask<N>(true); }
template <int N> FN Mask<N> lanes_of(Part part) { return iota<int32_t, N>(0, 1) < Vec<int32_t, N>(int32_t(part.count)); }

// ---------------------------------------------------------------------------------------------- half types

// The lanes as numbers of 32 bits. By itself GCC widens a register half by half, and joins what it gets.
template <int N> FN typename Raw<uint32_t, N>::type wide_bits(Vec<uint16_t, N> h) {
  typedef typename Raw<uint32_t, N>::type wide;
#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
  if constexpr (N == 8) return (wide)__builtin_ia32_pmovzxwd256((Raw<int16_t, 8>::type)h.v);
#if defined(__AVX512F__)
  if constexpr (N == 16)
    return (wide)__builtin_ia32_pmovzxwd512_mask((Raw<int16_t, 16>::type)h.v, Raw<int32_t, 16>::type{}, -1);
#endif
#endif
  return __builtin_convertvector(h.v, wide);
}

// bfloat16 is the upper half of a float; rounding to nearest even works on the bits, NaN stays NaN.
template <int N> FN Vec<float, N> widen(Vec<uint16_t, N> h, bf16) {
  return Vec<float, N>((typename Vec<float, N>::raw)(wide_bits(h) << 16));
}
template <int N> FN typename Raw<uint32_t, N>::type narrowed_bits(Vec<float, N> x) {
  typedef typename Raw<uint32_t, N>::type wide;
  wide u = (wide)x.v;
  wide rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (x.v != x.v) ? wide{} + 0x7fc0u : rounded;
}
template <int N> FN Vec<uint16_t, N> narrow(Vec<float, N> x, bf16) {
  return Vec<uint16_t, N>(__builtin_convertvector(narrowed_bits(x), typename Raw<uint16_t, N>::type));
}

// IEEE half precision, where a register of eight is converted by the machine. Else by bits: the exponent is moved by an
// exact multiplication with 2^112, which also normalises denormals; on the way back the addition of a power of two lets
// the hardware round denormals.
#if defined(__F16C__) && !defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
FN Vec<float, 8> widen(Vec<uint16_t, 8> h, f16) {
  return Vec<float, 8>(__builtin_ia32_vcvtph2ps256((Raw<int16_t, 8>::type)h.v));
}
FN Vec<uint16_t, 8> narrow(Vec<float, 8> x, f16) {  // 0: to the nearest, ties to even
  return Vec<uint16_t, 8>((Raw<uint16_t, 8>::type)__builtin_ia32_vcvtps2ph256(x.v, 0));
}
#endif
template <int N> FN Vec<float, N> widen(Vec<uint16_t, N> h, f16) {
  typedef typename Raw<uint32_t, N>::type wide;
  typedef typename Vec<float, N>::raw raw;
  wide u = wide_bits(h);
  wide magnitude = (u & 0x7fffu) << 13;
  raw scaled = (raw)magnitude * 0x1p112f;
  wide special = magnitude | 0x7f800000u;
  wide bits = (u & 0x7c00u) == 0x7c00u ? special : (wide)scaled;
  return Vec<float, N>((raw)(bits | ((u & 0x8000u) << 16)));
}
template <int N> FN Vec<uint16_t, N> narrow(Vec<float, N> x, f16) {
  typedef typename Raw<uint32_t, N>::type wide;
  typedef typename Vec<float, N>::raw raw;
  wide u = (wide)x.v;
  wide sign = (u >> 16) & 0x8000u;
  wide m = u & 0x7fffffffu;
  wide normal = (m + 0xc8000fffu + ((m >> 13) & 1u)) >> 13;           // rebias by -112, round to nearest even
  wide tiny = (wide)((raw)m + 0.5f) - 0x3f000000u;                    // below 2^-14: half denormals are multiples of 2^-24
  wide out = m < 0x38800000u ? tiny : normal;
  out = m >= 0x477ff000u ? wide{} + 0x7c00u : out;                    // 65520 and above round to infinity
  out = m > 0x7f800000u ? wide{} + 0x7e00u : out;
  return Vec<uint16_t, N>(__builtin_convertvector(out | sign, typename Raw<uint16_t, N>::type));
}

// ---------------------------------------------------------------------------------------------- memory

struct Next { LANEWISE int64_t operator()(int i) const { return i; } };
struct Strided {
  int64_t step;
  LANEWISE int64_t operator()(int i) const { return i * step; }
};

// The first lanes of neighbours are one instruction under a mask. GCC makes nearly the same of the loops below, but
// that takes it up to half of a kernel's compile.
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__GNUC__) && !defined(__clang__)
template <int N, class E, class F>
constexpr bool masked = N == 16 && same_type<F, Next>::value && (sizeof(E) == 2 || sizeof(E) == 4);
template <class E> FN Vec<E, 16> read_masked(const E* p, Part part) {
  typedef typename Raw<typename IntOf<sizeof(E)>::type, 16>::type bits;
  typedef typename Vec<E, 16>::raw raw;
  const uint16_t lanes = (1u << part.count) - 1;
  if constexpr (sizeof(E) == 4) return Vec<E, 16>((raw)__builtin_ia32_loaddqusi512_mask((const int*)p, bits{}, lanes));
  else return Vec<E, 16>((raw)__builtin_ia32_loaddquhi256_mask((const int16_t*)p, bits{}, lanes));
}
template <class E> FN void put_masked(E* p, Vec<E, 16> x, Part part) {
  typedef typename Raw<typename IntOf<sizeof(E)>::type, 16>::type bits;
  const uint16_t lanes = (1u << part.count) - 1;
  if constexpr (sizeof(E) == 4) __builtin_ia32_storedqusi512_mask((int*)p, (bits)x.v, lanes);
  else __builtin_ia32_storedquhi256_mask((int16_t*)p, (bits)x.v, lanes);
}
#elif defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
template <int N, class E, class F>
constexpr bool masked = N == 8 && same_type<F, Next>::value && sizeof(E) == 4;
template <class E> FN Vec<E, 8> read_masked(const E* p, Part part) {
  typedef Raw<int32_t, 8>::type bits;
  return Vec<E, 8>((typename Vec<E, 8>::raw)__builtin_ia32_maskloadd256((const bits*)p, lanes_of<8>(part).v));
}
template <class E> FN void put_masked(E* p, Vec<E, 8> x, Part part) {
  typedef Raw<int32_t, 8>::type bits;
  __builtin_ia32_maskstored256((bits*)p, lanes_of<8>(part).v, (bits)x.v);
}
#else
template <int N, class E, class F> constexpr bool masked = false;
#endif

template <int N, class E, class F> FN auto read(const E* p, F at, All) {
  Vec<E, N> r;
  for (int i = 0; i < N; i++) r.v[i] = p[at(i)];
  return r;
}
template <int N, class E, class F> FN auto read(const E* p, F at, Part part) {
  if constexpr (masked<N, E, F>) return read_masked(p, part);
  else {
    Vec<E, N> r;
    for (int i = 0; i < N; i++) r.v[i] = i < part.count ? p[at(i)] : E(0);
    return r;
  }
}
template <int N, class E, class F> FN void put(E* p, F at, Vec<E, N> x, All) {
  for (int i = 0; i < N; i++) p[at(i)] = x.v[i];
}
template <int N, class E, class F> FN void put(E* p, F at, Vec<E, N> x, Part part) {
  if constexpr (masked<N, E, F>) put_masked(p, x, part);
  else for (int i = 0; i < N; i++) if (i < part.count) p[at(i)] = x.v[i];
}
template <int N, class E> FN Vec<E, N> read(const E* p, Next, All) {
  Vec<E, N> r;
  __builtin_memcpy(&r.v, p, sizeof(r.v));
  return r;
}
template <int N, class E> FN void put(E* p, Next, Vec<E, N> x, All) { __builtin_memcpy(p, &x.v, sizeof(x.v)); }

// A tile from memory, in its compute type. `at` gives the offset of a lane.
template <int N, class E, class F, class C> FN Vec<E, N> load_at(const E* p, F at, C count) {
  return read<N>(p, at, count);
}
template <int N, class F, class C> FN Vec<float, N> load_at(const bf16* p, F at, C count) {
  return widen(read<N>((const uint16_t*)p, at, count), bf16{});
}
template <int N, class F, class C> FN Vec<float, N> load_at(const f16* p, F at, C count) {
  return widen(read<N>((const uint16_t*)p, at, count), f16{});
}
template <int N, class F, class C> FN Mask<N> load_at(const bool* p, F at, C count) {
  return read<N>((const uint8_t*)p, at, count) != Vec<uint8_t, N>(0);
}
template <int N, class E, class C> FN auto load(const E* p, C count) { return load_at<N>(p, Next{}, count); }
template <int N, class E, class C> FN auto load_strided(const E* p, int64_t step, C count) {
  return load_at<N>(p, Strided{step}, count);
}

template <class E, int N, class F, class C> FN void store_at(E* p, F at, Vec<E, N> x, C count) { put<N>(p, at, x, count); }
template <int N, class F, class C> FN void store_at(bf16* p, F at, Vec<float, N> x, C count) {
  put<N>((uint16_t*)p, at, narrow(x, bf16{}), count);
}
template <int N, class F, class C> FN void store_at(f16* p, F at, Vec<float, N> x, C count) {
  put<N>((uint16_t*)p, at, narrow(x, f16{}), count);
}
template <int N, class F, class C> FN void store_at(bool* p, F at, Mask<N> x, C count) {
  Vec<uint8_t, N> bytes(__builtin_convertvector(-x.v, typename Raw<uint8_t, N>::type));
  put<N>((uint8_t*)p, at, bytes, count);
}
template <class E, class V, class C> FN void store(E* p, V x, C count) { store_at(p, Next{}, x, count); }
template <class E, class V, class C> FN void store_strided(E* p, int64_t step, V x, C count) {
  store_at(p, Strided{step}, x, count);
}

// One element.
template <class E> FN E load(const E* p) { return *p; }
FN float load(const bf16* p) {
  uint32_t u = uint32_t(p->bits) << 16;
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}
FN float load(const f16* p) {
#if defined(__F16C__) && defined(__GNUC__) && !defined(__clang__)
  Raw<int16_t, 8>::type bits{};
  bits[0] = int16_t(p->bits);
  return __builtin_ia32_vcvtph2ps(bits)[0];
#else
  return widen(Vec<uint16_t, 4>(p->bits), f16{}).v[0];
#endif
}
template <class E> FN void store(E* p, E x) { *p = x; }
FN void store(bf16* p, float x) { p->bits = narrow(Vec<float, 4>(x), bf16{}).v[0]; }
FN void store(f16* p, float x) { p->bits = narrow(Vec<float, 4>(x), f16{}).v[0]; }

// Combine elements with those in memory, one lane after another, as several may be for one place.
template <int N> FN int64_t valid(All) { return N; }
template <int N> FN int64_t valid(Part part) { return part.count; }
template <class E, class F, class T, int N, class C, class G> FN void combine_at(E* p, F at, Vec<T, N> x, C count, G op) {
  for (int64_t i = 0; i < valid<N>(count); i++) store(p + at(i), T(op(load(p + at(i)), T(x.v[i]))));
}
template <class F, int N, class C, class G> FN void combine_at(bool* p, F at, Mask<N> x, C count, G op) {
  for (int64_t i = 0; i < valid<N>(count); i++) store(p + at(i), bool(op(load(p + at(i)), bool(x.v[i]))));
}

#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __asan_poison_memory_region(const volatile void*, __SIZE_TYPE__);
void __asan_unpoison_memory_region(const volatile void*, __SIZE_TYPE__);
}
constexpr int64_t GAP = 64;  // between the parts of a block, where accesses are reported
#else
constexpr int64_t GAP = 0;
#endif

// A stack that a thread keeps from launch to launch: fresh memory costs a page fault for each page. What does not fit is
// allocated by itself, and once the stack is empty it grows to what was needed.
struct Arena {
  char* block;
  int64_t size, used, most;
};
constexpr int64_t MOST_KEPT = int64_t(8) << 20;

// Memory private to a thread, for scratch too large for the stack of calls.
class Scratch {
  Arena* const arena;
  const int64_t bytes;
  char* block;
  __UINTPTR_TYPE__ next;

  bool is_own() const { return !arena || arena->used > arena->size; }

 public:
  template <class E> static int64_t room(int64_t count) {
    return ((count * int64_t(sizeof(E)) + 63) & ~int64_t(63)) + GAP;
  }

  Scratch(Arena* arena, int64_t size) : arena(arena), bytes(size + 64) {
    if (arena) arena->used += bytes;
    block = is_own() ? (char*)malloc(uint64_t(bytes)) : arena->block + arena->used - bytes;
    next = ((__UINTPTR_TYPE__)block + 63) & ~(__UINTPTR_TYPE__)63;
  }
  ~Scratch() {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(block, bytes);
#endif
    if (is_own()) free(block);
    if (!arena) return;
    if (arena->most < arena->used) arena->most = arena->used;
    arena->used -= bytes;
    const int64_t wanted = arena->most < MOST_KEPT ? arena->most : MOST_KEPT;
    if (arena->used == 0 && arena->size < wanted) {
      free(arena->block);
      arena->block = (char*)malloc(uint64_t(wanted));
      arena->size = wanted;
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class E> E* take(int64_t count) {
    E* const data = (E*)next;
    next += room<E>(count);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(data + count, next - (__UINTPTR_TYPE__)(data + count));
#endif
    return data;
  }
};

// ---------------------------------------------------------------------------------------------- casts

// Eight bytes in a register of sixteen, once or twice, and back. A load of sixteen bytes would wait for the store of
// eight.
template <bool TWICE = false, class T, int N> FN Vec<T, 2 * N> in_register(Vec<T, N> a) {
  static_assert(sizeof(a) == 8, "half a register");
  int64_t low;
  __builtin_memcpy(&low, &a, 8);
  return Vec<T, 2 * N>((typename Vec<T, 2 * N>::raw)Raw<int64_t, 2>::type{low, TWICE ? low : 0});
}
template <class T, int N> FN Vec<T, N / 2> low_half(Vec<T, N> a) {
  const int64_t low = ((Raw<int64_t, 2>::type)a.v)[0];
  Vec<T, N / 2> r;
  __builtin_memcpy(&r, &low, 8);
  return r;
}

// Bytes as numbers of 32 bits. By itself GCC 12 converts signed bytes one after another.
template <class U, int N> FN typename Raw<int32_t, N>::type wide_bytes(Vec<U, N> a) {
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (N == 16) {
    typedef Raw<int32_t, 16>::type wide;
    const auto bytes = (Raw<char, 16>::type)a.v;
    if constexpr (same_type<U, int8_t>::value) return __builtin_ia32_pmovsxbd512_mask(bytes, wide{}, -1);
    else return __builtin_ia32_pmovzxbd512_mask(bytes, wide{}, -1);
  } else
#elif defined(__AVX2__) && !defined(__clang__)
  if constexpr (N == 8) {
    const auto bytes = (Raw<char, 16>::type)in_register(a).v;
    if constexpr (same_type<U, int8_t>::value) return __builtin_ia32_pmovsxbd256(bytes);
    else return __builtin_ia32_pmovzxbd256(bytes);
  } else
#endif
    return __builtin_convertvector(a.v, typename Raw<int32_t, N>::type);
}

// A float becomes an integer of 32 bits, or of 64 (for int64_t and uint8_t): NaN and what is out of range become its
// least number, as x86 converts, and eager with it. In C++ they are undefined, and GCC takes them not to occur. A
// smaller type keeps the low bits.
template <class T> struct Convert {
  typedef typename IntOf<same_type<T, int64_t>::value || same_type<T, uint8_t>::value ? 8 : 4>::type type;
  static constexpr double past = sizeof(type) == 8 ? 9223372036854775808.0 : 2147483648.0;
  static constexpr type least = type(1) << (8 * sizeof(type) - 1);
};
template <class T, class U> constexpr bool is_float_to_int = is_float<U> && !is_float<T> && !same_type<T, bool>::value;

template <class T, class U, int N> FN Vec<T, N> cast(Vec<U, N> a) {
  if constexpr (same_type<T, U>::value) return a;
  else if constexpr (is_float_to_int<T, U>) {
    typedef typename Convert<T>::type I;
    Mask<N> inside = (a > Vec<U, N>(U(-Convert<T>::past - 1))) & (a < Vec<U, N>(U(Convert<T>::past)));
    Vec<I, N> whole(__builtin_convertvector(select(inside, a, Vec<U, N>(U(0))).v, typename Raw<I, N>::type));
    return cast<T>(select(inside, whole, Vec<I, N>(Convert<T>::least)));
  } else if constexpr (sizeof(U) == 1 && !same_type<U, bool>::value && sizeof(T) >= 4) {
    return cast<T>(Vec<int32_t, N>(wide_bytes(a)));
  } else return Vec<T, N>(__builtin_convertvector(a.v, typename Raw<T, N>::type));
}
template <class T, int N> FN Vec<T, N> cast(Mask<N> m) { return select(m, Vec<T, N>(T(1)), Vec<T, N>(T(0))); }
template <class T, class U> FN T cast(U a) {
  if constexpr (is_float_to_int<T, U>) {
    typedef typename Convert<T>::type I;
    return T(a > U(-Convert<T>::past - 1) && a < U(Convert<T>::past) ? I(a) : Convert<T>::least);
  } else return T(a);
}
template <class U, int N> FN Mask<N> to_bool(Vec<U, N> a) { return a != Vec<U, N>(U(0)); }
template <int N> FN Mask<N> to_bool(Mask<N> a) { return a; }
FN bool to_bool(bool a) { return a; }
template <class U> FN bool to_bool(U a) { return a != U(0); }

// The float of these bits.
template <class T, int N> FN Vec<float, N> bitcast(Vec<int16_t, N> a) {
  return widen(Vec<uint16_t, N>((typename Raw<uint16_t, N>::type)a.v), T{});
}
template <class T, int N> FN Vec<T, N> bitcast(Vec<int32_t, N> a) { return from_bits<T, N>(a.v); }
template <class T> FN float bitcast(int16_t a) {
  T half{uint16_t(a)};
  return load(&half);
}
template <class T> FN T bitcast(int32_t a) {
  T x;
  __builtin_memcpy(&x, &a, sizeof x);
  return x;
}

// To the nearest half, and back: what an explicit cast to a half type leaves of a float.
template <class H, int N> FN Vec<float, N> round_to(Vec<float, N> x) { return widen(narrow(x, H{}), H{}); }
template <class H> FN float round_to(float x) { return round_to<H>(Vec<float, 4>(x)).v[0]; }

// ---------------------------------------------------------------------------------------------- reductions

template <class T> constexpr T lowest() {
  if constexpr (is_float<T>) return -T(__builtin_inf());
  else if constexpr (T(-1) > T(0)) return T(0);
  else return T(T(1) << (8 * sizeof(T) - 1));
}
template <class T> constexpr T highest() {
  if constexpr (is_float<T>) return T(__builtin_inf());
  else return T(~lowest<T>());
}

template <int N, class T, class F> FN T fold(Vec<T, N> x, F f) {
  if constexpr (N == 1) return x.v[0];
  else {
    Vec<T, N / 2> low, high;
    for (int i = 0; i < N / 2; i++) { low.v[i] = x.v[i]; high.v[i] = x.v[i + N / 2]; }
    return fold<N / 2>(f(low, high), f);
  }
}
template <class T, int N> FN T fold_sum(Vec<T, N> x) { return fold<N>(x, [](auto a, auto b) LANEWISE { return a + b; }); }
template <class T, int N> FN T fold_prod(Vec<T, N> x) { return fold<N>(x, [](auto a, auto b) LANEWISE { return a * b; }); }
template <class T, int N> FN T fold_max(Vec<T, N> x) {
  return fold<N>(x, [](auto a, auto b) LANEWISE { return maximum(a, b); });
}
template <class T, int N> FN T fold_min(Vec<T, N> x) {
  return fold<N>(x, [](auto a, auto b) LANEWISE { return minimum(a, b); });
}
template <int N> FN bool fold_max(Mask<N> x) { return any(x); }
template <int N> FN bool fold_min(Mask<N> x) { return all(x); }

// `next` in the lanes that count, `old` in the others.
template <class V> FN V keep(All, V next, V) { return next; }
template <class T, int N> FN Vec<T, N> keep(Part part, Vec<T, N> next, Vec<T, N> old) {
  return select(lanes_of<N>(part), next, old);
}
template <int N> FN Mask<N> keep(Part part, Mask<N> next, Mask<N> old) { return select(lanes_of<N>(part), next, old); }

#include "functions.h"

}  // namespace fusec

#include "team.h"
