// Threads, the page size and C linkage, shared by the kernels.
#pragma once

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int PAGE = 16;  // tokens in a KV page

extern int num_threads;

// Starting a thread team costs 1 to 2 us, so one thread is faster below this many operations.
constexpr int64_t PARALLEL_WORK = 1 << 15;

static inline int team(int64_t work) { return work < PARALLEL_WORK ? 1 : num_threads; }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
