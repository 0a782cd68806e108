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

namespace {

constexpr int PANEL = 48;

// Returns the number of words that hold k elements of a row: one float32 or two bfloat16 per word.
inline int64_t words(const float*, int64_t k) { return k; }
inline int64_t words(const uint32_t*, int64_t k) { return ceil_div(k, 2); }

// Layout of a panel of quantised weights. The panel is a list of groups of GROUP k. Each group is
//
//     scales [PANEL], minimums [PANEL] if MINIMUM, levels [GROUP / 2][PANEL] of pairs
//
// A pair holds the levels of an even k (in its low half) and of the next k. It is one byte for levels
// of 4 bits, and two bytes for levels of 8 bits. A weight is scale * level + minimum, rounded to
// bfloat16, see ops/block_matrix.py. Levels of 4 bits are stored with OFFSET added.
template <int BITS, int GROUP, class S, bool MINIMUM, int OFFSET>
struct Quantized {
    typedef S Scale;
    typedef std::conditional_t<BITS == 4, uint8_t, uint16_t> Pair;
    static constexpr int group = GROUP, offset = OFFSET;
    static constexpr bool has_minimum = MINIMUM;
    static constexpr int64_t head = (MINIMUM ? 2 : 1) * PANEL * sizeof(S);
    static constexpr int64_t bytes = head + GROUP / 2 * PANEL * sizeof(Pair);
};

inline F scale_of(const float* p) { return load(p); }
inline F scale_of(const uint16_t* p) { return from_half(load(p)); }

inline I level_of(const uint8_t*, U pair, bool high) { return (I)(high ? pair >> 4 : pair & 15u); }
inline I level_of(const uint16_t*, U pair, bool high) {
    return (I)(high ? pair << 16 : pair << 24) >> 24;
}

// In formats with minimums, level * scale is exact, so a fused multiply-add gives the same bits.
template <class Q>
inline F scaled(F level, F scale, F minimum) {
    return Q::has_minimum ? fma(level, scale, minimum) : level * scale;
}

// Scales and minimums of LANES columns in one group, which turn pairs of levels into weights.
template <class Q>
struct Columns {
    typedef typename Q::Pair Pair;
    F scale, minimum;

    Columns() = default;
    Columns(F scale, F minimum) : scale(scale), minimum(minimum) {}

    U weight(U pair, bool high) const {
        const I level = level_of((const Pair*)nullptr, pair, high) - Q::offset;
        return round_bf16(scaled<Q>(__builtin_convertvector(level, F), scale, minimum));
    }

    void widened(const Pair* pairs, F& low, F& high) const {
        const U pair = load(pairs);
        low = (F)weight(pair, false), high = (F)weight(pair, true);
    }

    U narrowed(const Pair* pairs) const {
        const U pair = load(pairs);
        return weight(pair, false) >> 16 | weight(pair, true);
    }
};

#if defined(__AVX512BF16__) && defined(VECTOR_AVX512)
// 4-bit pairs of 16 columns are stored in the order in which one instruction narrows 32 floats to
// bfloat16. The low halves of the bytes have the levels of columns 0 to 7, alternately for the even
// and the odd k, and the high halves have the levels of columns 8 to 15.
constexpr bool NARROW_ORDER = true;

// Returns each of the lanes 0 to 7 of x twice, or each of the lanes 8 to 15 if `first` is 8.
inline F doubled(F x, int first) {
    return (F)_mm512_permutexvar_ps((__m512i)((lane_ids() >> 1) + first), (__m512)x);
}

// Scales and minimums of LANES columns in one group, for pairs in the order described at NARROW_ORDER:
// one vector for columns 0 to 7, and one for columns 8 to 15.
template <class Q>
struct PairColumns {
    F scale[2], minimum[2] = {};

    PairColumns() = default;
    PairColumns(F s, F m) : scale{doubled(s, 0), doubled(s, 8)} {
        if (Q::has_minimum) minimum[0] = doubled(m, 0), minimum[1] = doubled(m, 8);
    }

    U narrowed(const uint16_t* pairs) const {
        const auto levels = [&](int first) {
            const __m128i bytes = _mm_loadu_si128((const __m128i*)(pairs + first));
            return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        };
        return narrowed(levels(0), levels(8));
    }

    U narrowed(const uint8_t* pairs) const {
        const __m512 levels = (__m512)__builtin_convertvector(lane_ids() - Q::offset, F);
        const U pair = load(pairs);  // the permutation reads only the lowest four bits of a lane
        return narrowed((F)_mm512_permutexvar_ps((__m512i)pair, levels),
                        (F)_mm512_permutexvar_ps((__m512i)(pair >> 4), levels));
    }

    U narrowed(F first, F second) const {
        first = scaled<Q>(first, scale[0], minimum[0]);
        second = scaled<Q>(second, scale[1], minimum[1]);
        return (U)(__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
};
#else
constexpr bool NARROW_ORDER = false;

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

// Stores the weights of a pair of k in the form that rows of the type of `out` are multiplied by.
template <class C, class P>
inline void unpack(const C& columns, const P* pairs, float* out) {
    F low, high;
    columns.widened(pairs, low, high);
    store(out, low), store(out + PANEL, high);
}
template <class C, class P>
inline void unpack(const C& columns, const P* pairs, uint32_t* out) {
    store(out, columns.narrowed(pairs));
}

// Unpacks the weights of `depth` k of a panel, in the form for rows of type X.
template <class Q, class X>
void dequantize(const char* group, int64_t depth, X* out) {
    for (int64_t k = 0; k < depth; k += Q::group, group += Q::bytes) {
        const auto* pairs = (const typename Q::Pair*)(group + Q::head);
        for (int c = 0; c < PANEL; c += LANES) {
            const auto columns = columns_at<Q, X>(group, c);
#pragma GCC unroll 4
            for (int p = 0; p < Q::group / 2; p++)
                unpack(columns, pairs + p * PANEL + c, out + words(out, k + 2 * p) * PANEL + c);
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

// Panel `index` of a part. Its `width` columns begin at `column` of y.
struct PanelOf {
    const LinearPart* part;
    int64_t index, column, width;
};

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
