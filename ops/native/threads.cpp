#include <sys/syscall.h>
#include <unistd.h>

#include "parallel.h"

int num_threads = 1;

EXPORT void set_num_threads(int threads) { num_threads = threads; }

Memory& kept_memory(bool is_alone) {
    static thread_local Memory memory[2];
    return memory[is_alone];
}

// Semantics: writes the system's ids of the calling thread and of its team's threads; 0 if unknown.
// Shape: ids int32 [threads].
EXPORT void team_ids(int threads, int32_t* ids) {
    for (int i = 0; i < threads; i++) ids[i] = 0;
#ifdef __linux__
#pragma omp parallel num_threads(threads) if (threads > 1)
    ids[omp_get_thread_num()] = (int32_t)syscall(SYS_gettid);
#endif
}
