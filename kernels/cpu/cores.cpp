// Which cores there are, and how many threads the library starts when nobody says.
//
// Files are read by C's functions: C++ streams find their locale through symbols that two copies of
// the C++ library in one process share, and where the compiler links its own they crash.
#include "cores.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <thread>

namespace sparsekv {

namespace {

std::vector<std::string> read_lines(const std::string& path) {
  std::vector<std::string> lines;
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (!file) return lines;
  std::string line;
  for (int c; (c = std::fgetc(file)) != EOF;) {
    if (c != '\n') {
      line.push_back(char(c));
      continue;
    }
    lines.push_back(line);
    line.clear();
  }
  if (!line.empty()) lines.push_back(line);
  std::fclose(file);
  return lines;
}

std::string read_line(const std::string& path) {
  const std::vector<std::string> lines = read_lines(path);
  return lines.empty() ? std::string() : lines.front();
}

// Both numbers of a text; false if it does not start with two.
bool two_numbers(const std::string& text, double& first, double& second) {
  return std::sscanf(text.c_str(), "%lf %lf", &first, &second) == 2;
}

// Whole processors that `quota` in every `period` amounts to; no limit: `limit`.
int granted(double quota, double period, int limit) {
  if (quota <= 0 || period <= 0) return limit;
  return std::min(limit, std::max(1, int(quota / period)));
}

// The process's control group and each one above it, in both versions of the interface.
int within_cgroup(int limit, const std::string& root) {
  for (const std::string& line : read_lines(root + "proc/self/cgroup")) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string top = root + (unified ? "sys/fs/cgroup" : "sys/fs/cgroup/cpu");
    std::string path = line.substr(second + 1);
    for (;;) {
      const std::string folder = top + (path == "/" ? "" : path);
      const std::string text = unified  // "max 100000", or "150000 100000"
                                   ? read_line(folder + "/cpu.max")
                                   : read_line(folder + "/cpu.cfs_quota_us") + " " +
                                         read_line(folder + "/cpu.cfs_period_us");
      double quota = 0, period = 0;
      if (two_numbers(text, quota, period)) limit = granted(quota, period, limit);
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return limit;
}

}  // namespace

std::vector<int> allowed_processors() {
  std::vector<int> processors;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return {};  // over 1024 processors
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (CPU_ISSET(cpu, &allowed)) processors.push_back(cpu);
  }
  return processors;
}

// Threads of one core name the same siblings; a processor that names none counts as a core.
std::vector<std::vector<int>> physical_cores(const std::vector<int>& processors,
                                             const std::string& root) {
  std::vector<std::vector<int>> cores;
  std::map<std::string, size_t> known;
  for (const int cpu : processors) {
    const std::string number = std::to_string(cpu);
    const std::string siblings = read_line(root + "sys/devices/system/cpu/cpu" + number +
                                           "/topology/thread_siblings_list");
    const std::string name = siblings.empty() ? "alone " + number : siblings;
    const auto [core, is_new] = known.emplace(name, cores.size());
    if (is_new) cores.emplace_back();
    cores[core->second].push_back(cpu);
  }
  return cores;
}

int default_thread_count(const std::vector<int>& processors, const std::string& root) {
  const int cores = int(physical_cores(processors, root).size());
  const int there = cores > 0 ? cores : int(std::thread::hardware_concurrency());
  return std::max(1, within_cgroup(std::max(1, there), root) - 1);
}

void pin_to(const std::vector<int>& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : processors) CPU_SET(processor, &set);
  sched_setaffinity(0, sizeof set, &set);  // refused: the thread runs wherever it may, as before
}

}  // namespace sparsekv
