// Eight tiles of TILE rows and the product of two of them, in two forms that give the same bits: with
// AMX instructions, and in plain C++ for every processor.
//
// Tiles 0 to 5 hold float32 sums, C [TILE][TILE]. Tile 6 holds rows of x in bfloat16, A [TILE][2 *
// PAIRS]. Tile 7 holds weights, B [PAIRS][TILE], as pairs of k (see panels.h). C += A B is computed as
// by TDPBF16PS in Intel's Software Developer's Manual. For each element, one chain of fused
// multiply-adds over even k and one over odd k begin with zero. The results of the two chains are added
// to each other, and then to C. Every operation rounds to nearest even, and treats subnormal operands
// and results as zero. A row of C therefore depends only on the same row of A.
//
// If TILES is defined, bfloat16 and quantised weights are multiplied on tiles. If AMX is also defined,
// AMX instructions compute the products.
#pragma once

#include <cstdint>
#include <cstring>

constexpr int TILE = 16;
constexpr int TILE_DEPTH = 2 * TILE;

// `configure` sets the number of pairs and the number of columns of B and C, at first PAIRS and TILE.
// The tiles are undefined afterwards.
template <int PAIRS>
class ScalarTiles {
  public:
    void configure(int64_t pairs, int64_t columns) { num_pairs = pairs, num_columns = columns; }

    template <int T>
    void load(const void* at, int64_t stride) {
        for (int r = 0; r < (T == 7 ? num_pairs : TILE); r++)
            std::memcpy(tiles[T][r], (const char*)at + r * stride,
                        4 * (T == 6 ? num_pairs : num_columns));
    }

    template <int T>
    void store(void* at, int64_t stride) const {
        static_assert(T < 6);
        for (int r = 0; r < TILE; r++)
            std::memcpy((char*)at + r * stride, tiles[T][r], 4 * num_columns);
    }

    template <int C>
    void multiply() {
        multiply(tiles[C]);
    }

  private:
    uint32_t tiles[8][TILE][TILE];
    int64_t num_pairs = PAIRS, num_columns = TILE;

    // NOTE: not inlined, because many callers would each get a copy of this code.
    __attribute__((noinline)) void multiply(uint32_t (&sums)[TILE][TILE]) {
        const auto &a = tiles[6], &b = tiles[7];
        float low[PAIRS][TILE], high[PAIRS][TILE];
        for (int k = 0; k < num_pairs; k++)
            for (int n = 0; n < TILE; n++) {
                low[k][n] = normal(b[k][n] << 16);
                high[k][n] = normal(b[k][n] & 0xffff0000u);
            }
        for (int m = 0; m < TILE; m++) {
            float even[TILE] = {}, odd[TILE] = {};
            for (int k = 0; k < num_pairs; k++) {
                const double first = normal(a[m][k] << 16);
                const double second = normal(a[m][k] & 0xffff0000u);
                for (int n = 0; n < TILE; n++) even[n] = rounded(first * low[k][n] + even[n]);
                for (int n = 0; n < TILE; n++) odd[n] = rounded(second * high[k][n] + odd[n]);
            }
            for (int n = 0; n < TILE; n++) {
                const double sum = rounded((double)even[n] + odd[n]);
                const float whole = rounded(normal(sums[m][n]) + sum);
                std::memcpy(&sums[m][n], &whole, sizeof whole);
            }
        }
    }

    // Returns the float32 with these bits, or zero if it is subnormal.
    static float normal(uint32_t bits) {
        if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    // Rounds a sum of two float32 numbers, or of a float32 number and a product of two bfloat16
    // numbers, to float32, or to zero if the result is subnormal. Products are exact in double. The sum
    // is rounded twice, to double and to float32, with the same result as if it were rounded once,
    // because double has more than twice as many digits as float32. Sums below the bound would round,
    // with the digits of float32, to less than the smallest normal number.
    static float rounded(double sum) {
        const float nearest = (float)sum;
        const bool is_small = __builtin_fabs(sum) < 0x1p-126 - 0x1p-151;
        return is_small ? __builtin_copysignf(0.0f, nearest) : nearest;
    }
};

#ifdef AMX
// The processor's tiles, which are configured for the calling thread while the object exists.
template <int PAIRS>
class AmxTiles {
  public:
    AmxTiles() { configure(PAIRS, TILE); }
    ~AmxTiles() { asm volatile("tilerelease" : : : "memory"); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;

    void configure(int64_t pairs, int64_t columns) {
        if (configuration.rows[7] == pairs && configuration.row_bytes[7] == 4 * columns) return;
        for (int t = 0; t < 8; t++) {
            configuration.row_bytes[t] = 4 * (t == 6 ? pairs : columns);
            configuration.rows[t] = t == 7 ? pairs : TILE;
        }
        asm volatile("ldtilecfg %0" : : "m"(configuration));
    }

    // NOTE: the compiler's intrinsics are not used. They take only literals, and the compiler may move
    // or remove stores to memory that a tile is loaded from.
    template <int T>
    void load(const void* at, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(stride), "i"(T) : "memory");
    }

    template <int T>
    void store(void* at, int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(stride), "i"(T) : "memory");
    }

    template <int C>
    void multiply() {
        asm volatile("tdpbf16ps %%tmm7, %%tmm6, %%tmm%c0" : : "i"(C));
    }

  private:
    struct Configuration {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    alignas(64) Configuration configuration = {1, 0, {}, {}, {}};
    static_assert(sizeof(Configuration) == 64);
};

template <int PAIRS>
using Tiles = AmxTiles<PAIRS>;
#else
template <int PAIRS>
using Tiles = ScalarTiles<PAIRS>;
#endif
