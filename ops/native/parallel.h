// Number of threads, page size and C linkage, which all kernels share.
#pragma once

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int PAGE = 16;  // tokens in a KV page

extern int num_threads;

// Number of operations below which one thread is faster, because a thread team starts in 1 to 2 us.
constexpr int64_t PARALLEL_WORK = 1 << 15;

static inline int team(int64_t work) { return work < PARALLEL_WORK ? 1 : num_threads; }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
