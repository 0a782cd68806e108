// One token for each row of logits, and log-probabilities. Nothing sorts the vocabulary: top-k and
// top-p become thresholds, found by partitioning the few logits of one bin.
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace {

constexpr float INF = __builtin_inff();
// Gumbel noise of 23-bit uniforms lies within these bounds.
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

// Calls body(vector of values, token of its first lane); lanes past the end are -inf.
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

    // The largest value, of equal ones the smallest token.
    int32_t winner() const {
        int32_t best = 0;
        for (int lane = 1; lane < LANES; lane++)
            if (value[lane] > value[best] ||
                (value[lane] == value[best] && token[lane] < token[best]))
                best = lane;
        return token[best];
    }
};

// -1 where a logit is NaN.
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

struct Candidate {
    float value, mass;
};

bool larger(const Candidate& a, const Candidate& b) { return a.value > b.value; }

// The value at which the mass of the largest candidates reaches `wanted`, halving the range in
// question each time (quickselect by weight).
float keep_mass(std::vector<Candidate>& found, double wanted) {
    auto begin = found.begin(), end = found.end();
    while (end - begin > 1) {
        const auto middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, larger);
        double mass = 0;
        for (auto c = begin; c < middle; c++) mass += c->mass;
        if (mass >= wanted) {
            end = middle;
        } else {
            wanted -= mass;
            begin = middle;
        }
    }
    return begin->value;
}

// The logits of a row in bins by their distance from the largest, the nearest first, so that a threshold is searched
// in one bin: whatever a caller asks for, a row takes two passes and no sort of the vocabulary.
struct Bins {
    static constexpr int32_t COUNT = 32 << 6;
    float top;
    int64_t num[COUNT] = {};
    double mass[COUNT] = {};  // e^(value - top)

    Bins(const float* logits, int64_t vocab) : top(largest(logits, vocab)) {
        each_vector(logits, vocab, [&](F values, int32_t) {
            const I bins = bins_of(values);
            const F weights = exp(values - top);
            for (int lane = 0; lane < LANES; lane++)
                if (values[lane] > -INF) num[bins[lane]]++, mass[bins[lane]] += weights[lane];
        });
    }

    // By the upper bits of the distance, whose order is that of the floats: 64 bins for each power of
    // two from 2^-10 to 2^22, so that no temperature brings all logits into a few bins.
    I bins_of(F values) const {
        const I place = (I)(((U)(top - values) >> 17) - ((127u - 10u) << 6));
        const I above = place > 0 ? place : I{};
        const I last = splat((int32_t)(COUNT - 1));
        return above < last ? above : last;
    }

    // The candidates of a bin that are not below `low`.
    void collect(const float* logits, int64_t vocab, int32_t bin, float low,
                 std::vector<Candidate>& found) const {
        found.clear();
        each_vector(logits, vocab, [&](F values, int32_t) {
            const I inside = bins_of(values) == bin;
            if (!any(inside)) return;
            const F weights = exp(values - top);
            for (int lane = 0; lane < LANES; lane++)
                if (inside[lane] && values[lane] > -INF && values[lane] >= low)
                    found.push_back({values[lane], weights[lane]});
        });
    }
};

// The smallest scaled logit that survives top-k, top-p and min-p.
float survival_threshold(const float* scaled, int64_t vocab, int64_t top_k, float top_p,
                         float min_p) {
    static thread_local std::vector<Candidate> found;
    const bool has_k = top_k > 0 && top_k < vocab, has_p = top_p < 1.0f;
    float threshold = -INF;
    if (min_p > 0.0f) threshold = largest(scaled, vocab) + __builtin_logf(min_p);
    if (!has_k && !has_p) return threshold;
    const Bins bins(scaled, vocab);
    double mass = 0;  // of the survivors of top-k
    float least = -INF;
    int32_t bin = 0;
    for (int64_t before = 0; bin < Bins::COUNT; bin++) {
        if (has_k && before + bins.num[bin] >= top_k) {
            bins.collect(scaled, vocab, bin, -INF, found);
            const auto last = found.begin() + (top_k - before - 1);
            std::nth_element(found.begin(), last, found.end(), larger);
            least = last->value;
            for (const Candidate& c : found)
                if (c.value >= least) mass += c.mass;
            break;
        }
        before += bins.num[bin];
        mass += bins.mass[bin];
    }
    threshold = std::max(threshold, least);
    if (!has_p) return threshold;
    double wanted = top_p * mass;
    bin = 0;
    while (bin < Bins::COUNT - 1 && bins.mass[bin] < wanted) wanted -= bins.mass[bin++];
    bins.collect(scaled, vocab, bin, least, found);
    return found.empty() ? threshold : std::max(threshold, keep_mass(found, wanted));
}

// argmax of scaled + noise over the survivors. The noise is computed only where it could still win.
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

void penalise(float* logits, int64_t vocab, const Penalties& p) {
    static thread_local std::vector<int32_t> counts;  // -1 = not in the row, else how often generated
    if ((int64_t)counts.size() < vocab) counts.resize(vocab, -1);
    for (int64_t i = 0; i < p.total_len; i++) {
        int32_t& count = counts[p.tokens[i]];
        count = std::max(count, 0) + (i >= p.prompt_len);
    }
    for (int64_t i = 0; i < p.total_len; i++) {
        int32_t& count = counts[p.tokens[i]];
        if (count < 0) continue;
        float& logit = logits[p.tokens[i]];
        logit = logit > 0 ? logit / p.repetition : logit * p.repetition;
        if (count > 0) logit -= p.frequency * (float)count + p.presence;
        count = -1;
    }
}

}  // namespace

// The pointers of ops.base.SamplingBatch, with the strides its tensors do not tell.
struct Sampling {
    const float* temperature;
    const int32_t* top_k;
    const float *top_p, *min_p;
    const int64_t *seed, *position, *choice;
    const float *presence, *frequency, *repetition;
    const int32_t *token_buffer, *buffer_row, *prompt_len, *total_len;
    const int32_t *bias_start, *bias_ids;
    const float* bias_values;
    int64_t token_buffer_stride;
    int64_t has_penalties, has_bias;
};

namespace {

int32_t sample_row(float* logits, int64_t vocab, const Sampling& s, int64_t r) {
    if (s.has_bias)
        for (int64_t i = s.bias_start[r]; i < s.bias_start[r + 1]; i++)
            logits[s.bias_ids[i]] += s.bias_values[i];
    if (s.has_penalties)
        penalise(logits, vocab,
                 {s.token_buffer + s.buffer_row[r] * s.token_buffer_stride, s.prompt_len[r],
                  s.total_len[r], s.presence[r], s.frequency[r], s.repetition[r]});
    const float temperature = s.temperature[r];
    if (temperature == 0.0f) return argmax(logits, vocab);
    for (int64_t i = 0; i < vocab; i++) logits[i] /= temperature;
    const float threshold = survival_threshold(logits, vocab, s.top_k[r], s.top_p[r], s.min_p[r]);
    return draw(logits, vocab, threshold, Key(s.seed[r], s.position[r], s.choice[r]));
}

// The `count` largest, descending, of equal ones the smaller token first.
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
