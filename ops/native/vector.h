// Vector types of all kernels, with LANES numbers of 32 bits (16 with AVX-512, 8 with AVX2, otherwise 4
// in the compiler's generic vectors), and vector forms of libm's functions.
#pragma once

#include <cstdint>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define VECTOR_AVX512 1
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#define VECTOR_AVX2 1
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// If the processor can multiply bfloat16 pairs, a linear's input is also rounded to bfloat16, because
// this is faster. See tiles.h for TILES.
#if defined(__AVX512BF16__) && defined(VECTOR_AVX512) && !defined(TILES)
#define PAIR_DOT 1
#endif

/* Encodings of stored numbers. The values are the same as in ops/weight_format.py. */
enum WeightFormat { FP32 = 0, BF16 = 1, Q8_0 = 2, Q4_0 = 3, Q4_1 = 4, Q4_K = 5, Q6_K = 6 };

struct bf16 {
    uint16_t bits;
};

typedef float F __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t I __attribute__((vector_size(LANES * 4), may_alias));
typedef uint32_t U __attribute__((vector_size(LANES * 4), may_alias));
typedef float FMem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t UMem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t HMem __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint8_t BMem __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t SMem __attribute__((vector_size(LANES), aligned(1), may_alias));

static inline F splat(float x) { return x - F{}; }
static inline U splat(uint32_t x) { return x - U{}; }
static inline I splat(int32_t x) { return x - I{}; }

static inline F load(const float* p) { return *(const FMem*)p; }
static inline U load(const uint32_t* p) { return *(const UMem*)p; }
// NOTE: uses intrinsics, because the compiler widens generic vectors in two halves.
static inline F load(const bf16* p) {
#if defined(VECTOR_AVX512)
    return (F)((U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#elif defined(VECTOR_AVX2)
    return (F)((U)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#else
    return (F)(__builtin_convertvector(*(const HMem*)p, U) << 16);
#endif
}
// Loads LANES unsigned words of 16 or 8 bits, widened to 32 bits.
static inline U load(const uint16_t* p) {
#if defined(VECTOR_AVX512)
    return (U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(VECTOR_AVX2)
    return (U)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    return __builtin_convertvector(*(const HMem*)p, U);
#endif
}
static inline U load(const uint8_t* p) {
#if defined(VECTOR_AVX512)
    return (U)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(VECTOR_AVX2)
    return (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    return __builtin_convertvector(*(const BMem*)p, U);
#endif
}
// Loads LANES signed bytes as float.
static inline F load(const int8_t* p) {
#if defined(VECTOR_AVX512)
    return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(VECTOR_AVX2)
    return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return __builtin_convertvector(*(const SMem*)p, F);
#endif
}
static inline void store(float* p, F x) { *(FMem*)p = x; }
static inline void store(uint32_t* p, U x) { *(UMem*)p = x; }

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}

// Rounds to nearest, ties to even. A NaN remains a NaN.
static inline void narrow(float x, float* p) { *p = x; }
static inline void narrow(float x, bf16* p) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    p->bits = x == x ? (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : (uint16_t)0x7fc0;
}

static inline void store(bf16* p, F x) {
    const U bits = (U)x, rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    const U narrowed = x == x ? rounded : splat((uint32_t)0x7fc0);
#if defined(VECTOR_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)narrowed));
#else
    *(HMem*)p = __builtin_convertvector(narrowed, HMem);
#endif
}

// NOTE: uses intrinsics, because with the tuning for some processors the compiler would split the
// multiply-add into two operations again.
static inline F fma(F a, F b, F c) {
#if defined(VECTOR_AVX512)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(VECTOR_AVX2)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Rounds each lane to bfloat16, to nearest, ties to even. The result is in the high half of a word, and
// the low half is zero. Lanes must not be NaN.
static inline U round_bf16(F x) {
    const U bits = (U)x;
    return (bits + 0x7fffu + ((bits >> 16) & 1)) & 0xffff0000u;
}

// Loads LANES float16 numbers as float.
static inline F load_half(const uint16_t* p) {
#if defined(VECTOR_AVX512)
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(VECTOR_AVX2) && defined(__F16C__)
    return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    const U bits = load(p);
    const F magnitude = (F)((bits & 0x7fffu) << 13) * splat(0x1p112f);
    return (F)((U)magnitude | (bits & 0x8000u) << 16);
#endif
}

static inline F maximum(F a, F b) {
#if defined(VECTOR_AVX512)
    return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(VECTOR_AVX2)
    return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

static inline F square_root(F a) {
#if defined(VECTOR_AVX512)
    return (F)_mm512_sqrt_ps((__m512)a);
#elif defined(VECTOR_AVX2)
    return (F)_mm256_sqrt_ps((__m256)a);
#else
    for (int i = 0; i < LANES; i++) a[i] = __builtin_sqrtf(a[i]);
    return a;
#endif
}

static inline bool any(I mask) {
#if defined(VECTOR_AVX512)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(VECTOR_AVX2)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= mask[i];
    return found != 0;
#endif
}

static inline I lane_ids() {
    I ids;
    for (int i = 0; i < LANES; i++) ids[i] = i;
    return ids;
}

// Moves lanes HALF..2 * HALF to 0..HALF. The lanes above are undefined.
template <int HALF>
static inline F upper(F x) {
    return __builtin_shuffle(x, (lane_ids() + HALF) & (LANES - 1));
}

// Returns the sum of the lanes. Adds the upper half to the lower half until one lane remains, so that
// the order of the additions is fixed.
template <int HALF = LANES / 2>
static inline float sum(F x) {
    if constexpr (HALF == 0)
        return x[0];
    else
        return sum<HALF / 2>(x + upper<HALF>(x));
}

template <int HALF = LANES / 2>
static inline float maximum(F x) {
    if constexpr (HALF == 0)
        return x[0];
    else
        return maximum<HALF / 2>(maximum(x, upper<HALF>(x)));
}

static inline F round_nearest(F x) {
    const F magic = splat(12582912.0f);  // after adding 1.5 * 2^23, a float has no room for a fraction
    return (x + magic) - magic;
}

// Returns e^x with an error of about 1 ulp: 0 below -87.3 (also for -inf), and infinity above 88.7.
// Range reduction and coefficients are from Cephes expf.
static inline F exp(F x) {
    const F low = splat(-87.33654f), high = splat(88.72284f);
    const F n = round_nearest(x * splat(1.44269504088896341f));
    F r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    F p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    // 2^n in two factors, because n may be 128 and 2^128 overflows.
    const I whole = __builtin_convertvector(n, I), part = whole >> 1;
    F y = p * (F)((part + 127) << 23) * (F)((whole - part + 127) << 23);
    y = x < low ? F{} : y;
    return x > high ? splat(__builtin_inff()) : y;
}

// Returns ln x with an error of about 1 ulp, for normal positive x. Range reduction and coefficients
// are from Cephes logf.
static inline F log(F x) {
    I bits = (I)x;
    I exponent = (bits >> 23) - 126;
    F m = (F)((bits & 0x007fffff) | 0x3f000000);
    const I small = m < splat(0.707106781186547524f);
    exponent += small;
    m = (small ? m + m : m) - splat(1.0f);
    const F e = __builtin_convertvector(exponent, F), z = m * m;
    F p = splat(7.0376836292e-2f);
    p = fma(p, m, splat(-1.1514610310e-1f));
    p = fma(p, m, splat(1.1676998740e-1f));
    p = fma(p, m, splat(-1.2420140846e-1f));
    p = fma(p, m, splat(1.4249322787e-1f));
    p = fma(p, m, splat(-1.6668057665e-1f));
    p = fma(p, m, splat(2.0000714765e-1f));
    p = fma(p, m, splat(-2.4999993993e-1f));
    p = fma(p, m, splat(3.3333331174e-1f));
    p = p * m * z;
    p = fma(e, splat(-2.12194440e-4f), p);
    p = fma(z, splat(-0.5f), p);
    return fma(e, splat(0.693359375f), m + p);
}

// Returns tanh x with an error of a few ulp: a polynomial near 0 (from Cephes tanhf), and
// 1 - 2 / (e^2x + 1) elsewhere.
static inline F tanh(F x) {
    const F z = x * x;
    F p = splat(-5.70498872745e-3f);
    p = fma(p, z, splat(2.06390887954e-2f));
    p = fma(p, z, splat(-5.37397155531e-2f));
    p = fma(p, z, splat(1.33314422036e-1f));
    p = fma(p, z, splat(-3.33332819422e-1f));
    const F near = fma(p * z, x, x);
    const F far = splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
    return z < splat(0.390625f) ? near : far;
}
