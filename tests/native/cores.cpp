// How many threads there are when nobody says, on machines that are folders of files.
#include "cores.h"

#include <stdlib.h>

#include <filesystem>
#include <string>
#include <vector>

#include "checks.h"

using sparsekv::default_thread_count;
using sparsekv::physical_cores;

namespace {

using Processors = std::vector<int>;

const Processors kEight = {0, 1, 2, 3, 4, 5, 6, 7};
const char* const kUnified = "0::/outer/inner\n";
const char* const kSplit = "5:cpu,cpuacct:/outer/inner\n4:memory,cpuset:/other\n0::/\n";

// A machine's `proc` and `sys`.
class Machine {
 public:
  Machine() {
    std::string name = (std::filesystem::temp_directory_path() / "sparsekv-XXXXXX").string();
    CHECK(mkdtemp(name.data()));
    root_ = name + "/";
  }
  ~Machine() { std::filesystem::remove_all(root_); }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  Machine& with(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::FILE* file = std::fopen((root_ + path).c_str(), "w");
    CHECK(file && std::fputs(text.c_str(), file) >= 0);
    CHECK(std::fclose(file) == 0);
    return *this;
  }
  Machine& with_groups(const std::string& text) { return with("proc/self/cgroup", text); }
  Machine& with_unified(const std::string& group, const std::string& text) {
    return with("sys/fs/cgroup/" + group + "cpu.max", text);
  }
  Machine& with_split(const std::string& group, const std::string& quota) {
    with("sys/fs/cgroup/cpu/" + group + "cpu.cfs_period_us", "100000\n");
    return with("sys/fs/cgroup/cpu/" + group + "cpu.cfs_quota_us", quota);
  }
  // Processors n and n + 4 are threads of one core.
  Machine& with_hyperthreads() {
    for (const int cpu : kEight) {
      const std::string core = std::to_string(cpu % 4), other = std::to_string(cpu % 4 + 4);
      with("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
           core + "," + other + "\n");
    }
    return *this;
  }

  const std::string& root() const { return root_; }
  int threads(const Processors& allowed = kEight) const {
    return default_thread_count(allowed, root_);
  }

 private:
  std::string root_;
};

void one_core_is_left_to_others() {
  const Machine machine;
  CHECK(machine.threads() == 7);
  CHECK(machine.threads({2, 5}) == 1);
  CHECK(machine.threads({3}) == 1);
}

void threads_of_one_core_count_once() {
  Machine machine;
  machine.with_hyperthreads();
  CHECK(machine.threads() == 3);
  CHECK(machine.threads({0, 1, 4}) == 1);
  const std::vector<Processors> want = {{0, 4}, {1}};
  CHECK(physical_cores({0, 1, 4}, machine.root()) == want);
}

int in_unified_group(const std::string& text) {
  return Machine().with_groups(kUnified).with_unified("outer/inner/", text).threads();
}

void version_2_limits_the_threads() {
  CHECK(in_unified_group("300000 100000\n") == 2);
  CHECK(in_unified_group("390000 100000\n") == 2);  // whole processors
  CHECK(in_unified_group("50000 100000\n") == 1);
  CHECK(in_unified_group("3200000 100000\n") == 7);  // more than there are
  for (const char* text : {"max 100000\n", "", "rubbish\n", "100000 0\n"}) {
    CHECK(in_unified_group(text) == 7);
  }
}

int in_split_group(const std::string& quota) {
  return Machine().with_groups(kSplit).with_split("outer/inner/", quota).threads();
}

void version_1_limits_the_threads() {
  CHECK(in_split_group("300000\n") == 2);
  for (const char* quota : {"-1\n", "0\n", ""}) CHECK(in_split_group(quota) == 7);
}

void the_least_of_a_group_and_those_above_counts() {
  Machine unified;
  unified.with_groups(kUnified).with_unified("outer/inner/", "max 100000\n");
  CHECK(unified.with_unified("outer/", "600000 100000\n").threads() == 5);
  CHECK(unified.with_unified("", "400000 100000\n").threads() == 3);
  CHECK(unified.with_unified("outer/inner/", "300000 100000\n").threads() == 2);
  Machine split;
  split.with_groups(kSplit).with_split("outer/inner/", "-1\n");
  CHECK(split.with_split("outer/", "600000\n").threads() == 5);
  CHECK(split.with_split("", "400000\n").threads() == 3);
  CHECK(split.with_split("outer/inner/", "300000\n").threads() == 2);
}

void groups_of_others_do_not_count() {
  Machine split;
  split.with_groups(kSplit).with_split("other/", "300000\n");  // that of memory
  CHECK(split.threads() == 7);
  CHECK(split.with_unified("outer/", "300000 100000\n").threads() == 7);
  Machine unified;
  unified.with_groups(kUnified).with_unified("outer/other/", "300000 100000\n");
  CHECK(unified.threads() == 7);
}

// In a container, the group may be the root of what is to be seen, or not to be seen.
void a_container_sees_what_limits_it() {
  Machine machine;
  machine.with_unified("", "300000 100000\n");
  CHECK(machine.with_groups("0::/\n").threads() == 2);
  CHECK(machine.with_groups("0::/unseen/group\n").threads() == 2);
}

void cores_and_groups_both_limit() {
  Machine machine;
  machine.with_hyperthreads().with_groups("0::/\n");
  CHECK(machine.with_unified("", "600000 100000\n").threads() == 3);
  CHECK(machine.with_unified("", "300000 100000\n").threads() == 2);
}

void openmp_has_no_say() {
  for (const char* number : {"1", "3"}) {
    CHECK(setenv("OMP_NUM_THREADS", number, 1) == 0);
    CHECK(Machine().threads() == 7);
  }
  CHECK(unsetenv("OMP_NUM_THREADS") == 0);
}

}  // namespace

void test_cores() {
  one_core_is_left_to_others();
  threads_of_one_core_count_once();
  version_2_limits_the_threads();
  version_1_limits_the_threads();
  the_least_of_a_group_and_those_above_counts();
  groups_of_others_do_not_count();
  a_container_sees_what_limits_it();
  cores_and_groups_both_limit();
  openmp_has_no_say();
}
