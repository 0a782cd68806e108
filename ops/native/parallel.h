// What the kernels share besides vectors: threads, the page size, and the C names they are called by.
#pragma once

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int PAGE = 16;  // tokens in a KV page

extern int num_threads;

// Starting a team costs a microsecond or two: below this many operations one thread is quicker.
constexpr int64_t PARALLEL_WORK = 1 << 15;

static inline int team(int64_t work) { return work < PARALLEL_WORK ? 1 : num_threads; }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
