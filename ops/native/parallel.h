// Division of work over a team of threads, and C linkage, which all kernels share.
//
// An op is a function op(team, ...) that each thread of a team calls with the same arguments. It divides
// its work with team.share, and ends when all threads have finished their work. Whatever an op computes
// outside of `share`, each thread computes for itself. An exported function opens a team with in_team,
// and run_layers opens one team for all ops of a step. An item's result never depends on the thread
// that computes it.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int PAGE = 16;  // tokens in a KV page
constexpr int LINE = 64;  // bytes of a cache line

extern int num_threads;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Buffers that the threads of a team share. Each is used by one kind of op.
enum Buffer {
    INPUT, HIDDEN, PARTIALS, QKV, MIXED, GATE_UP, INNER,
    NORMED, ATTENDED, ACTIVATED,  // the rounded forms of what norms, attention and activations write
    NUM_BUFFERS
};

struct alignas(LINE) Line {
    char bytes[LINE];
};

struct Memory {
    std::vector<Line> buffers[NUM_BUFFERS];
};

// Returns memory for teams that the calling thread opens, or for teams of the calling thread alone. It
// is kept until the thread ends.
Memory& kept_memory(bool is_alone);

// Items that a thread has not begun: the first in the low half of the word, the end in the high half.
struct alignas(64) Range {
    std::atomic<uint64_t> word{0};

    void set(int64_t first, int64_t end) {
        word.store((uint64_t)end << 32 | (uint64_t)first, std::memory_order_relaxed);
    }

    // Takes the first item, or the last. Returns -1 if none is left.
    int64_t take(bool is_first) {
        uint64_t old = word.load(std::memory_order_relaxed);
        for (;;) {
            const uint32_t first = (uint32_t)old, end = (uint32_t)(old >> 32);
            if (first == end) return -1;
            const uint64_t rest = is_first ? old + 1 : old - ((uint64_t)1 << 32);
            if (word.compare_exchange_weak(old, rest, std::memory_order_relaxed))
                return is_first ? first : end - 1;
        }
    }
};

// One thread's view of its team.
class Team {
  public:
    const int threads, thread;

    // ranges: one for each thread.
    Team(Memory& memory, Range* ranges, int threads, int thread)
        : threads(threads), thread(thread), memory(memory), ranges(ranges) {
        for (int i = 0; i < NUM_BUFFERS; i++) look_at((Buffer)i);
    }

    // Returns a team of the calling thread alone, with memory of its own.
    Team alone() const { return {kept_memory(true), nullptr, 1, 0}; }

    // Calls act(item) once for each item, in some thread. Returns when all items are done. Each thread
    // begins with its part of the items. A thread that has finished its part takes items of others,
    // because other processes may delay them.
    template <class Act>
    void share(int64_t items, Act act) {
        if (threads == 1) {
            for (int64_t i = 0; i < items; i++) act(i);
            return;
        }
        ranges[thread].set(first_of(items, thread), first_of(items, thread + 1));
        for (int offset = 0; offset < threads; offset++) {
            Range& range = ranges[(thread + offset) % threads];
            for (int64_t i; (i = range.take(offset == 0)) >= 0;) act(i);
        }
        wait();
    }

    // Returns the first item of a thread's part in `share`.
    int64_t first_of(int64_t items, int thread) const { return ceil_div(items * thread, threads); }

    // Returns the same memory for `count` elements in all threads.
    template <class T>
    T* buffer(Buffer buffer, int64_t count) {
        const int64_t lines = ceil_div(count * sizeof(T), sizeof(Line));
        if (lines > views[buffer].lines) {
            wait();
            if (thread == 0) memory.buffers[buffer].resize(lines);
            wait();
            look_at(buffer);
        }
        return (T*)views[buffer].at;
    }

    // Waits until all threads of the team wait.
    void wait() {
        if (threads == 1) return;
#pragma omp barrier
    }

  private:
    struct View {
        Line* at;
        int64_t lines;
    };

    Memory& memory;
    Range* ranges;
    View views[NUM_BUFFERS];

    void look_at(Buffer buffer) {
        std::vector<Line>& lines = memory.buffers[buffer];
        views[buffer] = {lines.data(), (int64_t)lines.size()};
    }
};

// Number of operations below which one thread is faster, because a thread team starts in 1 to 2 us.
constexpr int64_t PARALLEL_WORK = 1 << 15;

// Calls act(team) in each thread of a new team, which has one thread if there is little work.
template <class Act>
void in_team(int64_t work, Act act) {
    const int threads = work < PARALLEL_WORK ? 1 : num_threads;
    Memory& memory = kept_memory(false);
    std::vector<Range> ranges(threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Team team(memory, ranges.data(), omp_get_num_threads(), omp_get_thread_num());
        act(team);
    }
}
