// Elementary functions on tiles and scalars; included by vec.h, inside its namespace.
//
// Float: within 2 ulp on the whole range. What transformers run often (exp, tanh, sigmoid, erf, log) is computed in
// float after Cody-Waite range reduction ("Software Manual for the Elementary Functions", 1980) with the polynomials
// of Cephes (Moshier) or, for erf, minimax fits of our own; the rest in double, rounded once. Double: libm, lane by lane.
#pragma once

template <int N> using F = Vec<float, N>;
template <int N> using D = Vec<double, N>;

template <class T, int N> FN Vec<T, N> abs(Vec<T, N> a) {
  if constexpr (is_float<T>) return from_bits<T, N>(to_bits(a) & ~(to_bits(Vec<T, N>(T(-0.0)))));
  else return select(a < Vec<T, N>(T(0)), -a, a);
}
template <class T, int N> FN Vec<T, N> copysign(Vec<T, N> a, Vec<T, N> sign) {
  auto high = to_bits(Vec<T, N>(T(-0.0)));
  return from_bits<T, N>((to_bits(a) & ~high) | (to_bits(sign) & high));
}
template <class T, int N> FN Vec<T, N> sign(Vec<T, N> a) {
  Vec<T, N> zero(T(0)), one(T(1));
  return select(a > zero, one, zero) - select(a < zero, one, zero);
}
template <class T, int N> FN Mask<N> isnan(Vec<T, N> a) { return a != a; }
template <class T, int N> FN Mask<N> isinf(Vec<T, N> a) {
  if constexpr (is_float<T>) return abs(a) == Vec<T, N>(T(__builtin_inf()));
  else return Mask<N>(false);
}
template <class T, int N> FN Vec<T, N> reciprocal(Vec<T, N> a) { return Vec<T, N>(T(1)) / a; }
template <class T, int N> FN Vec<T, N> sqrt(Vec<T, N> a) { return Vec<T, N>(sqrt_raw<T, N>(a.v)); }
template <class T, int N> FN Vec<T, N> rsqrt(Vec<T, N> a) { return reciprocal(sqrt(a)); }

// To the nearest integer, halves to even: adding and subtracting 1.5·2^(digits-1) lets the hardware round.
template <class T, int N> FN Vec<T, N> round(Vec<T, N> a) {
  if constexpr (!is_float<T>) return a;
  else {
    constexpr T limit = sizeof(T) == 4 ? T(0x1p23) : T(0x1p52);
    Vec<T, N> m = abs(a), big(limit);
    return select(m < big, copysign((m + big) - big, a), a);
  }
}
template <class T, int N> FN Vec<T, N> floor(Vec<T, N> a) {
  if constexpr (!is_float<T>) return a;
  else {
    Vec<T, N> r = round(a);
    return copysign(select(r > a, r - Vec<T, N>(T(1)), r), a);
  }
}
template <class T, int N> FN Vec<T, N> ceil(Vec<T, N> a) {
  if constexpr (!is_float<T>) return a;
  else return -floor(-a);
}
template <class T, int N> FN Vec<T, N> trunc(Vec<T, N> a) {
  if constexpr (!is_float<T>) return a;
  else return copysign(floor(abs(a)), a);
}

// ---------------------------------------------------------------------------------------------- exponential

// x·2^n for whole n of up to twice the exponent range. Denormal results round once: 2^n is two factors, where there is
// no instruction.
template <int N> FN F<N> scale(F<N> x, F<N> n) {
  x = select(n < F<N>(-150.0f), F<N>(0.0f), x);  // which it rounds to; without this, at many times the cost
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (N == 16) return F<N>(__builtin_ia32_scalefps512_mask(x.v, n.v, x.v, -1, 4));
#endif
  typename Vec<int32_t, N>::raw all = __builtin_convertvector(n.v, typename Vec<int32_t, N>::raw), half = all >> 1;
  F<N> a = from_bits<float, N>((half + 127) << 23), b = from_bits<float, N>((all - half + 127) << 23);
  return x * a * b;
}
// The nearest integer.
template <int N> FN F<N> nearest(F<N> t) {
  F<N> magic(12582912.0f);
  return t + magic - magic;
}
// (e^r - 1 - r) / r² for |r| <= ln2/2.
template <int N> FN F<N> exp_tail(F<N> r) {
  F<N> p(1.9875691500e-4f);
  p = fma(p, r, F<N>(1.3981999507e-3f));
  p = fma(p, r, F<N>(8.3334519073e-3f));
  p = fma(p, r, F<N>(4.1665795894e-2f));
  p = fma(p, r, F<N>(1.6666665459e-1f));
  return fma(p, r, F<N>(5.0000001201e-1f));
}
template <int N> FN F<N> reduce_ln2(F<N> x, F<N> n) {
  F<N> r = fma(n, F<N>(-0.693359375f), x);
  return fma(n, F<N>(2.12194440e-4f), r);
}
template <int N> FN F<N> clamp(F<N> x, float low, float high) {  // NaN stays
  x = F<N>(smaller_raw<float, N>(F<N>(high).v, x.v));
  return F<N>(larger_raw<float, N>(F<N>(low).v, x.v));
}

template <int N> FN F<N> exp(F<N> x) {
  x = clamp(x, -105.0f, 89.0f);
  F<N> n = nearest(x * F<N>(1.44269504088896341f)), r = reduce_ln2(x, n);
  F<N> one(1.0f), high = one + r, low = (one - high) + r;  // 1 + r exactly, so that only the last sum rounds
  return scale(high + fma(exp_tail(r), r * r, low), n);
}
template <int N> FN F<N> exp2(F<N> x) {
  x = clamp(x, -151.0f, 129.0f);
  F<N> n = nearest(x), r = (x - n) * F<N>(0.693147180559945f);
  return scale(fma(exp_tail(r), r * r, r) + F<N>(1.0f), n);
}
// 2^n·(e^r - 1) + (2^n - 1), at half scale so that n = 128 is finite on the way.
template <int N> FN F<N> expm1(F<N> a) {
  F<N> x = clamp(a, -30.0f, 89.0f);
  F<N> n = nearest(x * F<N>(1.44269504088896341f)), r = reduce_ln2(x, n);
  F<N> p = fma(exp_tail(r), r * r, r), s = scale(F<N>(0.5f), n);
  F<N> y = fma(s, p, s - F<N>(0.5f));
  return select(abs(a) < F<N>(1e-8f), a, y + y);
}
// e^-|x| is at most 1, so neither side overflows; what 1 + e^-|x| loses by rounding is put back at the end.
template <int N> FN F<N> sigmoid(F<N> x) {
  F<N> one(1.0f), e = exp(-abs(x)), s = one + e, lost = (one - s) + e;
  Mask<N> below = x < F<N>(0.0f);
  F<N> y = select(below, e, one) / s;
  return fma(-(y * lost), select(below, one - y, y), y);
}
template <int N> FN F<N> tanh(F<N> x) {
  F<N> m = abs(x), z = x * x;
  F<N> p(-5.70498872745e-3f);
  p = fma(p, z, F<N>(2.06390887954e-2f));
  p = fma(p, z, F<N>(-5.37397155531e-2f));
  p = fma(p, z, F<N>(1.33314422036e-1f));
  p = fma(p, z, F<N>(-3.33332819422e-1f));
  F<N> near = fma(p * z, x, x);
  F<N> far = F<N>(1.0f) - F<N>(2.0f) / (exp(m + m) + F<N>(1.0f));
  return copysign(select(m < F<N>(0.625f), near, far), x);
}
// Minimax fits: erf(x)/x - 1 in x², and ln(1 - erf x) + x in x.
template <int N> FN F<N> erf(F<N> x) {
  F<N> m = abs(x), z = x * x;
  F<N> p(8.316772e-5f);
  p = fma(p, z, F<N>(-8.130012e-4f));
  p = fma(p, z, F<N>(5.1999064e-3f));
  p = fma(p, z, F<N>(-2.685894e-2f));
  p = fma(p, z, F<N>(1.12836875e-1f));
  p = fma(p, z, F<N>(-3.7612632e-1f));
  p = fma(p, z, F<N>(1.2837917e-1f));
  F<N> near = fma(p, x, x);
  F<N> t = select(m > F<N>(4.0f), F<N>(4.0f), m);
  F<N> q(-2.109491106e-5f);
  q = fma(q, t, F<N>(4.344611079e-4f));
  q = fma(q, t, F<N>(-4.171056207e-3f));
  q = fma(q, t, F<N>(2.511941083e-2f));
  q = fma(q, t, F<N>(-1.082800627e-1f));
  q = fma(q, t, F<N>(-6.333469152e-1f));
  q = fma(q, t, F<N>(-1.295149177e-1f));
  q = fma(q, t, F<N>(1.746826747e-4f));
  F<N> far = copysign(F<N>(1.0f) - exp(q - t), x);
  return select(m < F<N>(0.921875f), near, select(x == x, far, x));
}

// ---------------------------------------------------------------------------------------------- logarithm

template <int N> FN F<N> log(F<N> a) {
  typedef Vec<int32_t, N> I;
  Mask<N> tiny = a < F<N>(0x1p-126f);
  F<N> x = select(tiny, a * F<N>(0x1p23f), a);
  typename I::raw bits = to_bits(x);
  I e = I((bits >> 23) - 126) - select(tiny, I(23), I(0));
  F<N> m = from_bits<float, N>((bits & 0x007fffff) | 0x3f000000);
  Mask<N> low = m < F<N>(0.707106781186547524f);
  e = e - select(low, I(1), I(0));
  m = select(low, m + m, m) - F<N>(1.0f);
  F<N> k = cast<float>(e), z = m * m;
  F<N> p(7.0376836292e-2f);
  p = fma(p, m, F<N>(-1.1514610310e-1f));
  p = fma(p, m, F<N>(1.1676998740e-1f));
  p = fma(p, m, F<N>(-1.2420140846e-1f));
  p = fma(p, m, F<N>(1.4249322787e-1f));
  p = fma(p, m, F<N>(-1.6668057665e-1f));
  p = fma(p, m, F<N>(2.0000714765e-1f));
  p = fma(p, m, F<N>(-2.4999993993e-1f));
  p = fma(p, m, F<N>(3.3333331174e-1f));
  F<N> y = fma(k, F<N>(-2.12194440e-4f), p * z * m);
  y = fma(z, F<N>(-0.5f), y);
  y = fma(k, F<N>(0.693359375f), m + y);
  F<N> inf(__builtin_inff());
  y = select(a < inf, y, a);  // infinity and NaN
  y = select(a < F<N>(0.0f), F<N>(__builtin_nanf("")), y);
  return select(a == F<N>(0.0f), -inf, y);
}

// ln x in double for positive normal x, to about 1e-12: artanh series of (m-1)/(m+1) with m in [√½, √2).
template <int N> FN D<N> log_wide(D<N> x) {
  typedef Vec<int64_t, N> I;
  typename I::raw bits = to_bits(x);
  typename I::raw shifted = bits - 0x3fe6a09e667f3bcd;  // √½
  I e(shifted >> 52);
  D<N> m = from_bits<double, N>(bits - (shifted & (int64_t)0xfff0000000000000));
  D<N> f = (m - D<N>(1.0)) / (m + D<N>(1.0)), z = f * f;
  D<N> p(2.0 / 15);
  p = fma(p, z, D<N>(2.0 / 13));
  p = fma(p, z, D<N>(2.0 / 11));
  p = fma(p, z, D<N>(2.0 / 9));
  p = fma(p, z, D<N>(2.0 / 7));
  p = fma(p, z, D<N>(2.0 / 5));
  p = fma(p, z, D<N>(2.0 / 3));
  p = fma(p * z, f, f + f);
  return fma(cast<double>(e), D<N>(0.693147180559945309417), p);
}
// 2^t in double for |t| <= 1000, to about 1e-12.
template <int N> FN D<N> exp2_wide(D<N> t) {
  typedef Vec<int64_t, N> I;
  D<N> n = round(t), r = (t - n) * D<N>(0.693147180559945309417);
  D<N> p(1.0 / 3628800);
  p = fma(p, r, D<N>(1.0 / 362880));
  p = fma(p, r, D<N>(1.0 / 40320));
  p = fma(p, r, D<N>(1.0 / 5040));
  p = fma(p, r, D<N>(1.0 / 720));
  p = fma(p, r, D<N>(1.0 / 120));
  p = fma(p, r, D<N>(1.0 / 24));
  p = fma(p, r, D<N>(1.0 / 6));
  p = fma(p, r, D<N>(0.5));
  p = fma(p, r, D<N>(1.0));
  p = fma(p, r, D<N>(1.0));
  I k = cast<int64_t>(n);
  return p * from_bits<double, N>((k.v + 1023) << 52);
}

template <int N> FN F<N> log2(F<N> a) {
  F<N> inf(__builtin_inff());
  Mask<N> usual = (a > F<N>(0.0f)) & (a < inf);
  F<N> y = cast<float>(log_wide(cast<double>(select(usual, a, F<N>(1.0f)))) * D<N>(1.44269504088896340736));
  F<N> rest = select(a == F<N>(0.0f), -inf, select(a < F<N>(0.0f), F<N>(__builtin_nanf("")), a));
  return select(usual, y, rest);
}
template <int N> FN F<N> log1p(F<N> a) {
  F<N> inf(__builtin_inff()), one(1.0f);
  Mask<N> usual = (a > -one) & (a < inf);
  D<N> x = cast<double>(select(usual, a, F<N>(0.0f)));
  F<N> near = cast<float>(fma(x * x, fma(x, D<N>(1.0 / 3), D<N>(-0.5)), x));
  F<N> y = select(abs(a) < F<N>(1e-4f), select(a == F<N>(0.0f), a, near), cast<float>(log_wide(x + D<N>(1.0))));
  F<N> rest = select(a == -one, -inf, select(a < -one, F<N>(__builtin_nanf("")), a));
  return select(usual, y, rest);
}
template <int N> FN F<N> pow(F<N> x, F<N> y) {
  F<N> inf(__builtin_inff()), zero(0.0f);
  if (all((x > zero) & (x < inf) & (abs(y) < inf))) {
    D<N> t = log_wide(cast<double>(x)) * D<N>(1.44269504088896340736) * cast<double>(y);
    t = select(t > D<N>(200.0), D<N>(200.0), t);
    t = select(t < D<N>(-200.0), D<N>(-200.0), t);
    return cast<float>(exp2_wide(t));
  }
  return map([](float a, float b) { return powf(a, b); }, x, y);
}

// ---------------------------------------------------------------------------------------------- sine and cosine

// sin(x + quarter·π/2): π/2 in three parts (Cephes), exact for the quarter turns of |x| < 2^20; beyond, libm.
template <int N> FN F<N> sine(F<N> a, int32_t quarter) {
  typedef Vec<int64_t, N> I;
  D<N> x = cast<double>(a);
  D<N> n = round(x * D<N>(0.636619772367581343076));
  D<N> r = fma(n, D<N>(-1.57079625129699707031e0), x);
  r = fma(n, D<N>(-7.54978941586159635335e-8), r);
  r = fma(n, D<N>(-5.39030285815811905290e-15), r);
  D<N> z = r * r;
  D<N> s(-2.50507477628578072866e-8);
  s = fma(s, z, D<N>(2.75573136213857245213e-6));
  s = fma(s, z, D<N>(-1.98412698295895385996e-4));
  s = fma(s, z, D<N>(8.33333333332211858878e-3));
  s = fma(s, z, D<N>(-1.66666666666666307295e-1));
  s = fma(s * z, r, r);
  D<N> c(2.08757008419747316778e-9);
  c = fma(c, z, D<N>(-2.75573141792967388112e-7));
  c = fma(c, z, D<N>(2.48015872888517045348e-5));
  c = fma(c, z, D<N>(-1.38888888888730564116e-3));
  c = fma(c, z, D<N>(4.16666666666665929218e-2));
  c = fma(c * z, z, fma(z, D<N>(-0.5), D<N>(1.0)));
  I turn = cast<int64_t>(n) + I(quarter);
  D<N> y = select((turn & I(1)) == I(1), c, s);
  return cast<float>(select((turn & I(2)) == I(2), -y, y));
}
template <int N> FN F<N> sin(F<N> a) {
  if (!all(abs(a) < F<N>(1048576.0f))) return map([](float x) { return sinf(x); }, a);
  return select(a == F<N>(0.0f), a, sine(a, 0));
}
template <int N> FN F<N> cos(F<N> a) {
  if (!all(abs(a) < F<N>(1048576.0f))) return map([](float x) { return cosf(x); }, a);
  return sine(a, 1);
}

// ---------------------------------------------------------------------------------------------- double

// ln x of normal positive numbers, within 1 ulp: the polynomial of FDLIBM's log.
template <int N> FN D<N> log_normal(D<N> x) {
  typedef typename D<N>::bits I;
  typedef typename Vec<uint64_t, N>::raw U;
  constexpr uint64_t bias = uint64_t(1024) << 52;  // AVX2 neither shifts signed integers of 64 bits nor converts them
  const U bits = (U)to_bits(x), shifted = bits - (0x3fe6a09e667f3bcd - bias);  // √½
  D<N> k = from_bits<double, N>((I)((shifted >> 52) | 0x4330000000000000)) - D<N>(0x1p52 + 1024);
  D<N> f = from_bits<double, N>((I)(bits - ((shifted & 0xfff0000000000000) - bias))) - D<N>(1.0);
  D<N> s = f / (f + D<N>(2.0)), z = s * s, half = D<N>(0.5) * f * f;
  D<N> p(1.479819860511658591e-01);
  p = fma(p, z, D<N>(1.531383769920937332e-01));
  p = fma(p, z, D<N>(1.818357216161805012e-01));
  p = fma(p, z, D<N>(2.222219843214978396e-01));
  p = fma(p, z, D<N>(2.857142874366239149e-01));
  p = fma(p, z, D<N>(3.999999999940941908e-01));
  p = fma(p, z, D<N>(6.666666666666735130e-01));
  p = fma(s, fma(p, z, half), k * D<N>(1.90821492927058770002e-10));
  return fma(k, D<N>(6.93147180369123816490e-01), f - (half - p));
}
template <int N> FN Mask<N> is_normal(D<N> x) {
  return (x >= D<N>(0x1p-1022)) & (x < D<N>(__builtin_inf()));
}
template <int N> FN D<N> log(D<N> a) {
  if (!all(is_normal(a))) return map([](double x) { return ::log(x); }, a);
  return log_normal(a);
}
template <int N> FN D<N> log1p(D<N> a) {
  D<N> x = a + D<N>(1.0);
  if (!all(is_normal(x))) return map([](double x) { return ::log1p(x); }, a);
  D<N> inverse = cast<double>(F<N>(1.0f) / cast<float>(x));
  return fma(a - (x - D<N>(1.0)), inverse, log_normal(x));  // what rounding the sum lost
}

#define BY_LIBM(name) \
  template <int N> FN D<N> name(D<N> a) { return map([](double x) { return ::name(x); }, a); }
BY_LIBM(exp) BY_LIBM(exp2) BY_LIBM(expm1) BY_LIBM(log2) BY_LIBM(tanh) BY_LIBM(erf)
BY_LIBM(sin) BY_LIBM(cos)
#undef BY_LIBM
template <int N> FN D<N> pow(D<N> a, D<N> b) { return map([](double x, double y) { return ::pow(x, y); }, a, b); }
template <int N> FN D<N> sigmoid(D<N> x) {
  D<N> e = exp(-abs(x));
  return select(x < D<N>(0.0), e, D<N>(1.0)) / (D<N>(1.0) + e);
}
template <int N> FN F<N> atan2(F<N> a, F<N> b) { return map([](float x, float y) { return atan2f(x, y); }, a, b); }
template <int N> FN D<N> atan2(D<N> a, D<N> b) { return map([](double x, double y) { return ::atan2(x, y); }, a, b); }

// ---------------------------------------------------------------------------------------------- scalars

FN float exp(float x) { return expf(x); }
FN float exp2(float x) { return exp2f(x); }
FN float expm1(float x) { return expm1f(x); }
FN float log(float x) { return logf(x); }
FN float log1p(float x) { return log1pf(x); }
FN float log2(float x) { return log2f(x); }
FN float tanh(float x) { return tanhf(x); }
FN float erf(float x) { return erff(x); }
FN float sin(float x) { return sinf(x); }
FN float cos(float x) { return cosf(x); }
FN float pow(float x, float y) { return powf(x, y); }
FN float atan2(float x, float y) { return atan2f(x, y); }
using ::exp; using ::exp2; using ::expm1; using ::log; using ::log1p; using ::log2;
using ::tanh; using ::erf; using ::sin; using ::cos; using ::pow; using ::atan2;
FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FN double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
FN float sqrt(float x) { return __builtin_sqrtf(x); }
FN double sqrt(double x) { return __builtin_sqrt(x); }

template <class T> FN T one_lane(Vec<T, 4> x) { return x.v[0]; }
template <class T> FN T abs(T x) { return one_lane(abs(Vec<T, 4>(x))); }
template <class T> FN T sign(T x) { return T(T(x > T(0)) - T(x < T(0))); }
template <class T> FN T round(T x) { return one_lane(round(Vec<T, 4>(x))); }
template <class T> FN T floor(T x) { return one_lane(floor(Vec<T, 4>(x))); }
template <class T> FN T ceil(T x) { return one_lane(ceil(Vec<T, 4>(x))); }
template <class T> FN T trunc(T x) { return one_lane(trunc(Vec<T, 4>(x))); }
template <class T> FN T reciprocal(T x) { return T(1) / x; }
template <class T> FN T rsqrt(T x) { return T(1) / sqrt(x); }
template <class T> FN T sigmoid(T x) {
  T e = exp(-abs(x));
  return (x < T(0) ? e : T(1)) / (T(1) + e);
}
template <class T> FN bool isnan(T x) { return x != x; }
template <class T> FN bool isinf(T x) {
  if constexpr (is_float<T>) return abs(x) == T(__builtin_inf());
  else return false;
}
template <class T> FN T maximum(T a, T b) { return a >= b || a != a ? a : b; }
template <class T> FN T minimum(T a, T b) { return a <= b || a != a ? a : b; }

// An index that is used in offsets: no access leaves a dimension of this length, whatever was computed.
FN int64_t clamp_index(int64_t index, int64_t length) { return minimum(maximum(index, int64_t(0)), length - 1); }
template <int N> FN Vec<int64_t, N> clamp_index(Vec<int64_t, N> index, int64_t length) {
  return minimum(maximum(index, Vec<int64_t, N>(0)), Vec<int64_t, N>(length - 1));
}

// ---------------------------------------------------------------------------------------------- division, shifts

// torch's meanings: floor_divide rounds down, remainder has the sign of the divisor, fmod that of the dividend. An
// integer division by zero gives 0, as the processor would trap; the importer leaves one that may occur to ATen.
template <class T> FN T fmod(T a, T b) {
  if constexpr (same_type<T, float>::value) return fmodf(a, b);
  else if constexpr (is_float<T>) return ::fmod(a, b);
  else return b == T(0) || (T(-1) < T(0) && b == T(-1)) ? T(0) : T(a % b);
}
template <class T> FN T remainder(T a, T b) {
  T r = fusec::fmod(a, b);
  return r != T(0) && (r < T(0)) != (b < T(0)) ? T(r + b) : r;
}
template <class T> FN T floor_divide(T a, T b) {
  if constexpr (is_float<T>) {
    if (b == T(0)) return a / b;
    T mod = fusec::fmod(a, b);
    T quotient = (a - mod) / b;
    if (mod != T(0) && (b < T(0)) != (mod < T(0))) quotient -= T(1);
    if (quotient == T(0)) return a / b * T(0);  // of its sign
    T down = floor(quotient);
    return quotient - down > T(0.5) ? down + T(1) : down;
  } else {
    if (b == T(0)) return T(0);
    if (T(-1) < T(0) && b == T(-1)) return T(0 - a);
    T quotient = T(a / b);
    return a % b != T(0) && (a < T(0)) != (b < T(0)) ? T(quotient - T(1)) : quotient;
  }
}
template <class T> FN T shift_left(T a, T b) {
  return b < T(0) || b >= T(8 * sizeof(T)) ? T(0) : T(typename IntOf<8>::type(a) << b);
}
template <class T> FN T shift_right(T a, T b) {
  constexpr T last = T(8 * sizeof(T) - 1);
  if (b >= T(0) && b <= last) return T(a >> b);
  return T(-1) < T(0) ? T(a >> last) : T(0);
}
// Integer powers by squaring; a negative exponent leaves 1 and -1 only.
template <class T> FN T power(T base, T exponent) {
  if (exponent < T(0)) return base == T(1) ? T(1) : base == T(-1) ? (exponent & T(1) ? T(-1) : T(1)) : T(0);
  T result = T(1);
  for (; exponent > T(0); exponent = T(exponent >> 1)) {
    if (exponent & T(1)) result = T(result * base);
    base = T(base * base);
  }
  return result;
}

#define LANE_BY_LANE(name) \
  template <class T, int N> FN Vec<T, N> name(Vec<T, N> a, Vec<T, N> b) { \
    return map([](T x, T y) LANEWISE { return fusec::name(x, y); }, a, b); \
  }
LANE_BY_LANE(fmod) LANE_BY_LANE(remainder) LANE_BY_LANE(floor_divide) LANE_BY_LANE(power)
#undef LANE_BY_LANE

template <class T, int N> FN Vec<T, N> shift_left(Vec<T, N> a, Vec<T, N> b) {
  typedef typename Vec<T, N>::raw raw;
  const auto inside = (b.v >= T(0)) & (b.v <= T(8 * sizeof(T) - 1));
  return Vec<T, N>(inside ? a.v << (inside ? b.v : raw{}) : raw{});
}
template <class T, int N> FN Vec<T, N> shift_right(Vec<T, N> a, Vec<T, N> b) {
  typedef typename Vec<T, N>::raw raw;
  constexpr T last = T(8 * sizeof(T) - 1);
  if constexpr (sizeof(raw) == 8 && N > 1) {  // GCC shifts half a register, and by unequal bits, element by element
    return low_half(shift_right(in_register(a), in_register<true>(b)));
  } else {
    const auto inside = (b.v & T(~last)) == T(0);
    const raw shifted = a.v >> (inside ? b.v : raw{} + last);
    if constexpr (T(-1) < T(0)) return Vec<T, N>(shifted);
    else return Vec<T, N>(inside ? shifted : raw{});
  }
}
