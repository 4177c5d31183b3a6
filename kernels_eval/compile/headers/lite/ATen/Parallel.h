// at::parallel_for as torch's header gives it to a source compiled without OpenMP.
#pragma once
#include <concur/core.h>
namespace concur {
void parallel_for(int64_t begin, int64_t end, int64_t grain_size, void (*chunk)(const void* f, int64_t begin, int64_t end), const void* f);
}
namespace at {
int get_num_threads();
int get_thread_num();
bool in_parallel_region();
inline int64_t divup(int64_t x, int64_t y) { return (x + y - 1) / y; }
#ifndef _OPENMP  // with -fopenmp torch's header runs the chunks in the candidate's own team: left to `full`
template <class F> inline void parallel_for(const int64_t begin, const int64_t end, const int64_t grain_size, const F& f) {
  concur::parallel_for(begin, end, grain_size, [](const void* g, int64_t from, int64_t to) { (*static_cast<const F*>(g))(from, to); }, &f);
}
#endif
}  // namespace at
