// Comparison of AMX's tiles with the same sums in plain C++, for each kind of kernel.
#pragma once

#include <cstdint>
#include <vector>

#include "vector.h"

#ifdef AMX
bool linears_agree();
bool loras_agree();
bool attentions_agree();

// Asks the system to let this process use AMX's tiles.
bool tiles_are_permitted();

// Numbers of many magnitudes and both signs, some subnormal in bfloat16 and some zero: sums of them
// round differently if they are added in another order.
std::vector<float> various_floats(int64_t count);
void various_bf16(std::vector<bf16>& out);
#endif
