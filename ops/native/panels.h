// Panels of PANEL output columns, in which the weights of a linear are packed.
//
// A panel of float32 weights is [K][PANEL]. A panel of bfloat16 weights is [K / 2][PANEL] of pairs: the
// weight of an even k is in the low half of a 32-bit word, and the weight of the next k in the high
// half. `Quantized` describes a panel of quantised weights. They are rounded to bfloat16 when they are
// unpacked, so that they give the bits of their bfloat16 form.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "vector.h"

// Panel `index` of a part. Its `width` columns begin at `column` of y.
struct PanelOf {
    const LinearPart* part;
    int64_t index, column, width;
};

namespace {

constexpr int PANEL = 48;

// Returns the number of words that hold k elements of a row: one float32 or two bfloat16 per word.
inline int64_t words(const float*, int64_t k) { return k; }
inline int64_t words(const uint32_t*, int64_t k) { return ceil_div(k, 2); }
template <class X>
constexpr int IN_WORD = std::is_same_v<X, float> ? 1 : 2;

#if defined(__AVX512BF16__) && defined(VECTOR_AVX512)
#define NARROW_ORDER 1
#else
#define NARROW_ORDER 0
#endif

// Layout of a panel of quantised weights. The panel is a list of groups of GROUP k. Each group is
//
//     scales [PANEL], minimums [PANEL] if MINIMUM, levels [GROUP / 8][OCTET_BYTES]
//
// A weight is scale * level + minimum, rounded to bfloat16, see ops/block_matrix.py. The levels of an
// octet of k are bytes [8][PANEL], or, of 4 bits and with OFFSET added, words [PANEL], which have the
// level of the first k in their lowest bits.
//
// In NARROW_ORDER, 16 columns are stored in the order in which one instruction narrows 32 floats to
// bfloat16. Scales and minimums of columns 0 to 7 alternate with those of columns 8 to 15. Levels of an
// even k alternate with those of the next k: in the place of the even k for columns 0 to 7, and in the
// place of the next k for columns 8 to 15.
constexpr int OCTET = 8;

template <int BITS, int GROUP, class S, bool MINIMUM, int OFFSET>
struct Quantized {
    typedef S Scale;
    static constexpr int bits = BITS, group = GROUP, offset = OFFSET;
    static constexpr bool has_minimum = MINIMUM;
    static constexpr int64_t head = (MINIMUM ? 2 : 1) * PANEL * sizeof(S);
    static constexpr int64_t octet_bytes = PANEL * BITS, bytes = head + GROUP / OCTET * octet_bytes;
};

inline F scale_of(const float* p) { return load(p); }
inline F scale_of(const uint16_t* p) { return load_half(p); }

// Converts the lowest 4 bits of each word. ADDED<Q> is the part of OFFSET that the result still has.
#ifdef VECTOR_AVX512
template <class Q>
constexpr int ADDED = 0;
template <class Q>
inline F from_lowest(U word) {
    const F levels = __builtin_convertvector(lane_ids() - Q::offset, F);
    return (F)_mm512_permutexvar_ps((__m512i)word, (__m512)levels);
}
#else
template <class Q>
constexpr int ADDED = Q::offset;
template <class Q>
inline F from_lowest(U word) {
    return __builtin_convertvector((I)(word & 15u), F);
}
#endif

// Returns the levels of one k of an octet and of LANES columns, from column c on.
template <class Q>
inline F level(const char* octet, int k, int c) {
    if (Q::bits == 4)
        return from_lowest<Q>(load((const uint32_t*)octet + c) >> 4 * k);
    else if (NARROW_ORDER)
        return load((const int8_t*)octet + k / 2 * 2 * PANEL + 2 * c + k % 2 * LANES);
    else
        return load((const int8_t*)octet + k * PANEL + c);
}

// level * scale is exact, so a fused multiply-add gives the same bits.
template <class Q>
inline F scaled(F level, F scale, F minimum) {
    return Q::has_minimum || ADDED<Q> ? fma(level, scale, minimum) : level * scale;
}

#if defined(VECTOR_AVX512) || defined(VECTOR_AVX2)
// Rounds x / LARGE to bfloat16, to nearest, ties to even. The difference between x and x / LARGE is
// rounded to the last digit that x / LARGE has as bfloat16. What it lacks to x is the result.
constexpr float LARGE = 0x1p16f;
inline F rounded(F x) {
    F rest = x * splat(1 - 1 / LARGE);
    asm("" : "+v"(rest));  // the compiler must not fuse the multiplication and the subtraction
    return x - rest;
}
#else
constexpr float LARGE = 1;
inline F rounded(F x) { return (F)round_bf16(x); }
#endif

// Scales and minimums of LANES columns in one group, which turn levels into weights.
template <class Q>
struct Columns {
    F scale, minimum;

    Columns() = default;
    Columns(F s, F m)
        : scale(s * splat(LARGE)),
          minimum(Q::has_minimum ? m * splat(LARGE) : scale * splat(-(float)ADDED<Q>)) {}

    F weight(const char* octet, int k, int c) const {
        return rounded(scaled<Q>(level<Q>(octet, k, c), scale, minimum));
    }

    // Returns the weights of k and k + 1 as pairs of bfloat16.
    U pair(const char* octet, int k, int c) const {
        return (U)weight(octet, k, c) >> 16 | (U)weight(octet, k + 1, c);
    }
};

#if NARROW_ORDER
// Scales and minimums of LANES columns in one group, for levels in NARROW_ORDER: one vector for columns
// 0 to 7, and one for columns 8 to 15.
template <class Q>
struct PairColumns {
    F scale[2], minimum[2];

    PairColumns() = default;
    PairColumns(F s, F m)
        : scale{(F)_mm512_moveldup_ps((__m512)s), (F)_mm512_movehdup_ps((__m512)s)},
          minimum{(F)_mm512_moveldup_ps((__m512)m), (F)_mm512_movehdup_ps((__m512)m)} {}

    U pair(const char* octet, int k, int c) const {
        const F first = scaled<Q>(level<Q>(octet, k, c), scale[0], minimum[0]);
        const F second = scaled<Q>(level<Q>(octet, k + 1, c), scale[1], minimum[1]);
        return (U)(__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
};
#else
template <class Q>
using PairColumns = Columns<Q>;
#endif

template <class Q, class X>
using ColumnsFor = std::conditional_t<std::is_same_v<X, float>, Columns<Q>, PairColumns<Q>>;

template <class Q, class X>
inline ColumnsFor<Q, X> columns_at(const char* group, int64_t c) {
    const typename Q::Scale* scales = (const typename Q::Scale*)group;
    return {scale_of(scales + c), Q::has_minimum ? scale_of(scales + PANEL + c) : F{}};
}

// Unpacks a word of each column in the form that rows of float32, or of bfloat16, are multiplied by.
template <class C>
inline void unpack(const C& columns, const char* octet, int k, int c, F& out) {
    out = columns.weight(octet, k, c);
}
template <class C>
inline void unpack(const C& columns, const char* octet, int k, int c, U& out) {
    out = columns.pair(octet, k, c);
}

// Unpacks the weights of `depth` k of a panel, in the form for rows of type X.
template <class Q, class X>
void dequantize(const char* group, int64_t depth, X* out) {
    for (int64_t k = 0; k < depth; k += Q::group, group += Q::bytes)
        for (int c = 0; c < PANEL; c += LANES) {
            const auto columns = columns_at<Q, X>(group, c);
            const char* octet = group + Q::head;
            for (int i = 0; i < Q::group; i += OCTET, octet += Q::octet_bytes)
#pragma GCC unroll 8
                for (int j = 0; j < OCTET; j += IN_WORD<X>) {
                    decltype(load(out)) weights;
                    unpack(columns, octet, j, c, weights);
                    store(out + words(out, k + i + j) * PANEL + c, weights);
                }
        }
}

// Pointer to a panel of quantised weights, or to the first of several panels.
template <class Q>
struct Packed {
    const char* at;
};

template <class W>
inline const W* panel_at(const W* w, int64_t p, int64_t depth) {
    return w + p * words(w, depth) * PANEL;
}
template <class Q>
inline Packed<Q> panel_at(Packed<Q> w, int64_t p, int64_t depth) {
    return {w.at + p * (depth / Q::group) * Q::bytes};
}

typedef Quantized<8, 32, uint16_t, false, 0> Q8_0Panel;
typedef Quantized<4, 32, uint16_t, false, 8> Q4_0Panel;
typedef Quantized<4, 32, uint16_t, true, 0> Q4_1Panel;
typedef Quantized<4, 32, float, true, 0> Q4_KPanel;
typedef Quantized<8, 16, float, false, 0> Q6_KPanel;

// Calls `act` with the panel layout of a format of quantised weights.
template <class Act>
void with_layout(int64_t format, Act act) {
    switch (format) {
        case Q8_0: return act(Q8_0Panel{});
        case Q4_0: return act(Q4_0Panel{});
        case Q4_1: return act(Q4_1Panel{});
        case Q4_K: return act(Q4_KPanel{});
        case Q6_K: return act(Q6_KPanel{});
    }
}

inline int64_t count_panels(const LinearPart* parts, int64_t num_parts) {
    int64_t count = 0;
    for (int64_t i = 0; i < num_parts; i++) count += ceil_div(parts[i].columns, PANEL);
    return count;
}

// Returns panel p of all panels of the parts.
inline PanelOf find_panel(const LinearPart* part, int64_t p) {
    int64_t column = 0;
    for (int64_t count; p >= (count = ceil_div(part->columns, PANEL)); p -= count)
        column += (part++)->columns;
    return {part, p, column + p * PANEL, std::min<int64_t>(PANEL, part->columns - p * PANEL)};
}

}  // namespace

#ifdef TILES
// Multiplies some rows, as tiles, by one panel of weights that are bfloat16 or quantised.
void multiply_on_tiles(Tiles<TILE>& tiles, const uint32_t* x, int64_t rows, int64_t depth,
                       const PanelOf& at, const float* bias, float* y, int64_t y_stride);
#endif
