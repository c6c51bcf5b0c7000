// The processors that this process may use.
#pragma once

#include <vector>

namespace sparsekv {

// Processors of each physical core that the calling thread may run on, cores in order of their
// first processor. Empty where the system does not say.
std::vector<std::vector<int>> physical_cores();

// Physical cores, and no more than the process's cgroup grants, less one for the threads that drive
// the accelerator; at least 1. Not OMP_NUM_THREADS: launchers set that to 1.
int default_thread_count();

// Lets the calling thread run on these processors only, if the system agrees.
void pin_to(const std::vector<int>& processors);

}  // namespace sparsekv
