// Eight tiles of TILE rows and the product of two of them, in two forms that give the same bits: AMX's
// instructions, and plain C++ for every processor.
//
// A tile holds float32 sums [TILE][TILE], or bfloat16. The product C += A B takes rows of x, A
// [TILE][TILE_DEPTH], and pairs of weights, B [TILE][TILE] of pairs of k as in panels.h. The sums
// are those of TDPBF16PS in Intel's Software Developer's Manual: for each element, a chain of fused
// multiply-adds over even k and one over odd k, both begun with zero, are added to each other, and
// then to C. Every operation rounds to nearest even, and takes and gives zero for subnormal numbers.
// So a row of C depends on its own row of A alone.
//
// Compiled with TILES, bfloat16 and quantised weights are multiplied so; with AMX, too, by AMX.
#pragma once

#include <cstdint>
#include <cstring>

constexpr int TILE = 16;
constexpr int TILE_DEPTH = 2 * TILE;

class ScalarTiles {
  public:
    template <int T>
    void load(const void* at, int64_t stride) {
        for (int r = 0; r < TILE; r++)
            std::memcpy(tiles[T][r], (const char*)at + r * stride, sizeof tiles[T][r]);
    }

    template <int T>
    void store(void* at, int64_t stride) const {
        for (int r = 0; r < TILE; r++)
            std::memcpy((char*)at + r * stride, tiles[T][r], sizeof tiles[T][r]);
    }

    template <int C, int A, int B>
    void multiply() {
        float low[TILE][TILE], high[TILE][TILE];
        for (int k = 0; k < TILE; k++)
            for (int n = 0; n < TILE; n++) {
                low[k][n] = normal(tiles[B][k][n] << 16);
                high[k][n] = normal(tiles[B][k][n] & 0xffff0000u);
            }
        for (int m = 0; m < TILE; m++) {
            float even[TILE] = {}, odd[TILE] = {};
            for (int k = 0; k < TILE; k++) {
                const double a = normal(tiles[A][m][k] << 16);
                const double b = normal(tiles[A][m][k] & 0xffff0000u);
                for (int n = 0; n < TILE; n++) even[n] = rounded(a * low[k][n] + even[n]);
                for (int n = 0; n < TILE; n++) odd[n] = rounded(b * high[k][n] + odd[n]);
            }
            for (int n = 0; n < TILE; n++) {
                const double sum = rounded((double)even[n] + odd[n]);
                const float whole = rounded(normal(tiles[C][m][n]) + sum);
                std::memcpy(&tiles[C][m][n], &whole, sizeof whole);
            }
        }
    }

  private:
    uint32_t tiles[8][TILE][TILE];

    // The float32 of these bits, zero if it is subnormal.
    static float normal(uint32_t bits) {
        if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    // The float32 nearest to a sum of two, or to a sum of one and a product of two bfloat16, zero if
    // it is subnormal. Products are exact in double, and rounding a sum twice, because double has more
    // than twice the digits, gives what rounding it once does. The bound is where rounding to the
    // digits of float32 gives less than the smallest normal number.
    static float rounded(double sum) {
        const float nearest = (float)sum;
        const bool is_small = __builtin_fabs(sum) < 0x1p-126 - 0x1p-151;
        return is_small ? __builtin_copysignf(0.0f, nearest) : nearest;
    }
};

#ifdef AMX
// The processor's own tiles, configured for the calling thread while this exists.
class AmxTiles {
  public:
    AmxTiles() { asm volatile("ldtilecfg %0" : : "m"(CONFIGURATION)); }
    ~AmxTiles() { asm volatile("tilerelease" : : : "memory"); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;

    // NOTE: not the compiler's intrinsics, which take only literals and let stores to memory that a
    // tile is loaded from be moved or removed.
    template <int T>
    void load(const void* at, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(stride), "i"(T) : "memory");
    }

    template <int T>
    void store(void* at, int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(stride), "i"(T) : "memory");
    }

    template <int C, int A, int B>
    void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
    }

  private:
    struct Configuration {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    alignas(64) static constexpr Configuration CONFIGURATION = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    static_assert(sizeof(Configuration) == 64);
};

typedef AmxTiles Tiles;
#else
typedef ScalarTiles Tiles;
#endif
