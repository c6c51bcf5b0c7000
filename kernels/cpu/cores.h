// The processors that this process may use.
#pragma once

#include <string>
#include <vector>

namespace sparsekv {

// Those that the calling thread may run on, in order. Empty where the system does not say.
std::vector<int> allowed_processors();

// The processors by physical core, cores in order of their first one. Below, `root` is the folder
// of `proc` and `sys`: tests have one of their own.
std::vector<std::vector<int>> physical_cores(
    const std::vector<int>& processors = allowed_processors(), const std::string& root = "/");

// Physical cores, and no more than the process's cgroup grants, less one for the threads that drive
// the accelerator; at least 1. Not OMP_NUM_THREADS: launchers set that to 1.
int default_thread_count(const std::vector<int>& processors = allowed_processors(),
                         const std::string& root = "/");

// Lets the calling thread run on these processors only, if the system agrees.
void pin_to(const std::vector<int>& processors);

}  // namespace sparsekv
