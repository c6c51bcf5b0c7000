// How many threads the library starts when nobody says.
#include <sched.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "pool.h"

namespace sparsekv {

namespace {

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Threads of one core name the same siblings; a processor that names none counts as a core.
int physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
    return int(std::max(1u, std::thread::hardware_concurrency()));  // more than 1024 processors
  }
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    const std::string number = std::to_string(cpu);
    const std::string siblings = read_line("/sys/devices/system/cpu/cpu" + number +
                                           "/topology/thread_siblings_list");
    cores.insert(siblings.empty() ? "alone " + number : siblings);
  }
  return std::max(1, int(cores.size()));
}

// Whole processors that `quota` in every `period` amounts to; no limit: `limit`.
int granted(double quota, double period, int limit) {
  if (quota <= 0 || period <= 0) return limit;
  return std::min(limit, std::max(1, int(quota / period)));
}

// The process's control group and each one above it, in both versions of the interface.
int within_cgroup(int limit) {
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    std::string path = line.substr(second + 1);
    for (;;) {
      const std::string folder = root + (path == "/" ? "" : path);
      if (unified) {  // "max 100000", or "150000 100000"
        std::istringstream text(read_line(folder + "/cpu.max"));
        double quota = 0, period = 0;
        if (text >> quota >> period) limit = granted(quota, period, limit);
      } else {
        std::istringstream quota_text(read_line(folder + "/cpu.cfs_quota_us"));
        std::istringstream period_text(read_line(folder + "/cpu.cfs_period_us"));
        double quota = 0, period = 0;
        if (quota_text >> quota && period_text >> period) limit = granted(quota, period, limit);
      }
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return limit;
}

}  // namespace

int default_thread_count() { return std::max(1, within_cgroup(physical_cores()) - 1); }

}  // namespace sparsekv
