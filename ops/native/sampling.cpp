// Samples one token for each row of logits, and computes log-probabilities. The vocabulary is not
// sorted: top-k and top-p become thresholds, which are found in a bounded number of passes over a row.
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace {

constexpr float INF = __builtin_inff();
// Upper bound of Gumbel noise that is computed from 23-bit uniforms.
constexpr float MAX_NOISE = 16.7f;

template <class T>
inline T mix(T x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

struct Key {
    uint32_t low = 0x9e3779b9, high = 0x85ebca6b;

    Key(uint64_t seed, uint64_t position, uint64_t choice) {
        for (uint32_t word : {(uint32_t)seed, (uint32_t)(seed >> 32), (uint32_t)position,
                              (uint32_t)choice}) {
            low = mix(low ^ word);
            high = mix(high ^ word);
        }
    }

    F noise(U tokens) const {
        const U bits = mix(mix(tokens ^ low) + high);
        const F uniform = (__builtin_convertvector((I)(bits >> 9), F) + 0.5f) * 0x1p-23f;
        return -log(-log(uniform));
    }
};

// Calls body(values, token) for each vector of logits. token: token of the first lane. Lanes past the
// end of the vocabulary are -inf.
template <class Body>
inline void each_vector(const float* logits, int64_t vocab, Body body) {
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) body(load(logits + i), (int32_t)i);
    if (i < vocab) {
        F tail = splat(-INF);
        for (int64_t lane = 0; i + lane < vocab; lane++) tail[lane] = logits[i + lane];
        body(tail, (int32_t)i);
    }
}

struct Best {
    F value = splat(-INF);
    I token = I{};

    void take(F values, I tokens) {
        const I better = values > value;
        value = better ? values : value;
        token = better ? tokens : token;
    }

    // Returns the token of the largest value, and the smallest token among equal values.
    int32_t winner() const {
        int32_t best = 0;
        for (int lane = 1; lane < LANES; lane++)
            if (value[lane] > value[best] ||
                (value[lane] == value[best] && token[lane] < token[best]))
                best = lane;
        return token[best];
    }
};

// Returns the smallest token that has the largest logit, or -1 if a logit is NaN.
int32_t argmax(const float* logits, int64_t vocab) {
    Best best[4];
    I broken = I{};
    const I lanes = lane_ids();
    each_vector(logits, vocab, [&](F values, int32_t token) {
        best[token / LANES % 4].take(values, lanes + token);
        broken |= values != values;
    });
    if (any(broken)) return -1;
    for (int i = 1; i < 4; i++)
        for (int lane = 0; lane < LANES; lane++)
            if (best[i].value[lane] > best[0].value[lane] ||
                (best[i].value[lane] == best[0].value[lane] &&
                 best[i].token[lane] < best[0].token[lane])) {
                best[0].value[lane] = best[i].value[lane];
                best[0].token[lane] = best[i].token[lane];
            }
    return best[0].winner();
}

float largest(const float* logits, int64_t vocab) {
    F top = splat(-INF);
    each_vector(logits, vocab, [&](F values, int32_t) { top = maximum(top, values); });
    return maximum(top);
}

double total_mass(const float* logits, int64_t vocab, float top) {
    double total = 0;
    F part = {};
    each_vector(logits, vocab, [&](F values, int32_t token) {
        part += exp(values - top);
        if (token / LANES % 64 == 63) total += sum(part), part = F{};
    });
    return total + sum(part);
}

// Maps floats to integers in the same order, so that any range of floats can be divided evenly.
int32_t order_of(float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

float float_of(int32_t order) {
    const int32_t bits = order ^ ((order >> 31) & 0x7fffffff);
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

constexpr int PIVOTS = 3;

// Returns the largest threshold in [low, high] for which the weight of the values at or above it is at
// least `wanted`, or low if there is none. weigh(pivots, weights) computes these weights for PIVOTS
// thresholds in one pass over the row. Each pass reduces the range to a quarter, so 16 passes find any
// float, and a row's cost does not depend on its logits.
template <class Weigh>
float find_threshold(float low, float high, double wanted, Weigh weigh) {
    int64_t first = order_of(low), last = order_of(high);
    while (first < last) {
        int64_t order[PIVOTS];
        float pivots[PIVOTS];
        double weights[PIVOTS];
        for (int i = 0; i < PIVOTS; i++) {
            order[i] = first + ceil_div((last - first) * (i + 1), PIVOTS + 1);
            pivots[i] = float_of((int32_t)order[i]);
        }
        weigh(pivots, weights);
        for (int i = PIVOTS - 1; i >= 0; i--) {
            if (weights[i] == wanted) return pivots[i];
            if (weights[i] > wanted) {
                first = order[i];
                break;
            }
            last = order[i] - 1;
        }
    }
    return float_of((int32_t)first);
}

float top_k_threshold(const float* logits, int64_t vocab, float top, int64_t top_k) {
    return find_threshold(-INF, top, (double)top_k, [&](const float* pivots, double* weights) {
        I counts[PIVOTS] = {};
        each_vector(logits, vocab, [&](F values, int32_t) {
            for (int i = 0; i < PIVOTS; i++) counts[i] -= values >= splat(pivots[i]);
        });
        for (int i = 0; i < PIVOTS; i++) {
            weights[i] = 0;
            for (int lane = 0; lane < LANES; lane++) weights[i] += counts[i][lane];
        }
    });
}

// Returns the threshold of top-p among the logits that are at least `least`.
float top_p_threshold(const float* logits, int64_t vocab, float top, float least, float top_p) {
    static thread_local std::vector<float> masses;  // e^(logit - top), padded with 0
    masses.assign(vocab + LANES, 0.0f);
    double total = 0;
    F part = {};
    each_vector(logits, vocab, [&](F values, int32_t token) {
        const F mass = values >= splat(least) ? exp(values - top) : F{};
        store(&masses[token], mass);
        part += mass;
        if (token / LANES % 64 == 63) total += sum(part), part = F{};
    });
    total += sum(part);
    // Below top - 88, e^(logit - top) is 0.
    const float low = std::max(least, top - 88.0f);
    return find_threshold(low, top, top_p * total, [&](const float* pivots, double* weights) {
        F parts[PIVOTS] = {};
        for (int i = 0; i < PIVOTS; i++) weights[i] = 0;
        each_vector(logits, vocab, [&](F values, int32_t token) {
            const F mass = load(&masses[token]);
            for (int i = 0; i < PIVOTS; i++) parts[i] += values >= splat(pivots[i]) ? mass : F{};
            if (token / LANES % 64 != 63) return;
            for (int i = 0; i < PIVOTS; i++) weights[i] += sum(parts[i]), parts[i] = F{};
        });
        for (int i = 0; i < PIVOTS; i++) weights[i] += sum(parts[i]);
    });
}

// Returns a threshold: exactly the scaled logits at or above it survive top-k, top-p and min-p.
float survival_threshold(const float* scaled, int64_t vocab, int64_t top_k, float top_p,
                         float min_p) {
    const bool has_k = top_k > 0 && top_k < vocab;
    if (!has_k && top_p >= 1.0f && min_p <= 0.0f) return -INF;
    const float top = largest(scaled, vocab);
    float threshold = -INF;
    if (has_k) threshold = top_k_threshold(scaled, vocab, top, top_k);
    if (top_p < 1.0f) threshold = top_p_threshold(scaled, vocab, top, threshold, top_p);
    if (min_p > 0.0f) threshold = std::max(threshold, top + __builtin_logf(min_p));
    return threshold;
}

// Returns the argmax of scaled + noise over the logits at or above the threshold. The noise is computed
// only for tokens that could still win with the largest noise.
int32_t draw(const float* scaled, int64_t vocab, float threshold, const Key& key) {
    const I lanes = lane_ids();
    const int32_t top = argmax(scaled, vocab);
    if (top < 0) return top;
    float reach = scaled[top] + key.noise(splat((uint32_t)top))[0] - MAX_NOISE;
    reach = std::max(reach, threshold);
    Best best;
    each_vector(scaled, vocab, [&](F values, int32_t token) {
        const I alive = values >= splat(reach);
        if (!any(alive)) return;
        const I tokens = lanes + token;
        best.take(alive ? values + key.noise((U)tokens) : splat(-INF), tokens);
    });
    return best.winner();
}

struct Penalties {
    const int32_t* tokens;
    int64_t prompt_len, total_len;
    float presence, frequency, repetition;
};

// Applies the penalties of one row: counts the row's tokens, and then changes the logits in one pass.
void penalise(float* logits, int64_t vocab, const Penalties& p) {
    if (p.presence == 0 && p.frequency == 0 && p.repetition == 1) return;
    // For each token: number of times it was generated, plus IN_PROMPT if the prompt contains it.
    static thread_local std::vector<int32_t> found;
    constexpr int32_t IN_PROMPT = 1 << 30;
    found.assign(vocab + LANES, 0);
    for (int64_t i = 0; i < p.prompt_len; i++) found[p.tokens[i]] = IN_PROMPT;
    for (int64_t i = p.prompt_len; i < p.total_len; i++) found[p.tokens[i]]++;
    each_vector(logits, vocab, [&](F values, int32_t token) {
        const I entries = (I)load((const uint32_t*)&found[token]), seen = entries != 0;
        if (!any(seen)) return;
        const I counts = entries & ~IN_PROMPT;
        const F repeated = values > F{} ? values / p.repetition : values * p.repetition;
        values = seen ? repeated : values;
        const F lowered = values - (__builtin_convertvector(counts, F) * p.frequency + p.presence);
        values = counts > 0 ? lowered : values;
        if (token + LANES <= vocab) return store(logits + token, values);
        for (int64_t lane = 0; token + lane < vocab; lane++) logits[token + lane] = values[lane];
    });
}

}  // namespace

// Pointers to the tensors of ops.base.SamplingBatch, with strides and flags.
struct Sampling {
    const float* temperature;
    const int32_t* top_k;
    const float *top_p, *min_p;
    const int64_t *seed, *position, *choice;
    const float *presence, *frequency, *repetition;
    const int32_t *token_buffer, *buffer_slot, *prompt_len, *total_len;
    const int32_t *bias_start, *bias_ids;
    const float* bias_values;
    int64_t token_buffer_stride;
    int64_t has_penalties, has_bias;
};

namespace {

int32_t sample_row(float* logits, int64_t vocab, const Sampling& s, int64_t r) {
    if (s.has_bias)
        for (int64_t i = s.bias_start[r]; i < s.bias_start[r + 1]; i++)
            if (s.bias_ids[i] >= 0 && s.bias_ids[i] < vocab)
                logits[s.bias_ids[i]] += s.bias_values[i];
    if (s.has_penalties)
        penalise(logits, vocab,
                 {s.token_buffer + s.buffer_slot[r] * s.token_buffer_stride, s.prompt_len[r],
                  s.total_len[r], s.presence[r], s.frequency[r], s.repetition[r]});
    const float temperature = s.temperature[r];
    if (temperature == 0.0f) return argmax(logits, vocab);
    for (int64_t i = 0; i < vocab; i++) logits[i] /= temperature;
    const float threshold = survival_threshold(logits, vocab, s.top_k[r], s.top_p[r], s.min_p[r]);
    return draw(logits, vocab, threshold, Key(s.seed[r], s.position[r], s.choice[r]));
}

// Finds the `count` largest logits in descending order, the smaller token first among equal logits.
void top_tokens(const float* logits, int64_t vocab, int64_t count, int32_t* ids, float* values) {
    int64_t kept = 0;
    const auto insert = [&](float value, int32_t token) {
        int64_t at = kept < count ? kept++ : count - 1;
        for (; at > 0 && values[at - 1] < value; at--) {
            values[at] = values[at - 1];
            ids[at] = ids[at - 1];
        }
        values[at] = value;
        ids[at] = token;
    };
    each_vector(logits, vocab, [&](F block, int32_t token) {
        if (kept == count && !any(block > splat(values[count - 1]))) return;
        for (int lane = 0; lane < LANES && token + lane < vocab; lane++)
            if (kept < count || block[lane] > values[count - 1]) insert(block[lane], token + lane);
    });
}

}  // namespace

// Shape: logits float32 [rows, vocab], changed; out int32 [rows], -1 where a logit is NaN.
EXPORT void sample(float* logits, int64_t rows, int64_t vocab, const Sampling* batch, int32_t* out) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) out[r] = sample_row(logits + r * vocab, vocab, *batch, r);
}

// Shape: logits float32 [rows, vocab] -> out int32 [rows], the smallest token of the largest logit, or -1.
EXPORT void greedy(const float* logits, int64_t rows, int64_t vocab, int32_t* out) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) out[r] = argmax(logits + r * vocab, vocab);
}

// Shape: logits float32 [rows, vocab], tokens int32 [rows] -> chosen float32 [rows], ids int32 and
// values float32 [rows, num_top], log-probabilities, descending.
EXPORT void log_softmax_top(const float* logits, const int32_t* tokens, int64_t rows, int64_t vocab,
                            int64_t num_top, float* chosen, int32_t* ids, float* values) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = logits + r * vocab;
        const float top = largest(row, vocab);
        const double total = top + __builtin_log(total_mass(row, vocab, top));
        chosen[r] = (float)(row[tokens[r]] - total);
        if (num_top == 0) continue;
        float* best = values + r * num_top;
        top_tokens(row, vocab, num_top, ids + r * num_top, best);
        for (int64_t i = 0; i < num_top; i++) best[i] = (float)(best[i] - total);
    }
}
