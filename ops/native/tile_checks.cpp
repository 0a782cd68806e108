#include "tile_checks.h"

#include <cstring>

#include "parallel.h"

#ifdef AMX
std::vector<float> various_floats(int64_t count) {
    std::vector<float> out(count);
    uint32_t state = 1;
    for (float& value : out) {
        state = state * 1664525u + 1013904223u;
        const uint32_t draw = state >> 9, kind = draw % 29;
        // Exponents are 2^-10 to 2^5. Of 29 numbers, about one is subnormal and one is zero.
        const uint32_t exponent = kind > 1 ? 117 + draw % 16 : 0;
        const uint32_t bits = (state & 0x80000000u) | exponent << 23 | (kind == 1 ? 0 : draw);
        std::memcpy(&value, &bits, sizeof value);
    }
    return out;
}

void various_bf16(std::vector<bf16>& out) {
    const std::vector<float> wide = various_floats(out.size());
    for (size_t i = 0; i < out.size(); i++) narrow(wide[i], &out[i]);
}
#endif

// Semantics: returns 0 if the kernels of this library can be used here, 1 if the system does not let
// this process use AMX's tiles, 2 if the tiles give other bits than the same computation in plain C++.
EXPORT int check_tiles() {
#ifdef AMX
    if (!tiles_are_permitted()) return 1;
    if (!linears_agree() || !loras_agree() || !attentions_agree()) return 2;
#endif
    return 0;
}
