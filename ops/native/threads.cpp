#include "parallel.h"

int num_threads = 1;

EXPORT void set_num_threads(int threads) { num_threads = threads; }
