// Comparison of AMX's tiles with the same computation in plain C++, for each kind of kernel.
#pragma once

#include <cstdint>
#include <vector>

#include "vector.h"

#ifdef AMX
bool linears_agree();
bool loras_agree();
bool attentions_agree();

// Requests the system's permission to use AMX's tiles. Returns whether the system granted it.
bool tiles_are_permitted();

// Returns numbers of many magnitudes and both signs, some subnormal in bfloat16 and some zero. Their
// sums round differently if they are added in another order.
std::vector<float> various_floats(int64_t count);
void various_bf16(std::vector<bf16>& out);
#endif
