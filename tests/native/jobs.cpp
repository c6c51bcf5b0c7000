// Jobs that wait for flags, on pools of several sizes.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "checks.h"
#include "pool.h"

using namespace sparsekv;

namespace {

constexpr double kLong = 60;  // seconds; nothing here takes a hundredth of it

JobStatus wait(Pool& pool, int64_t id) {
  JobStatus status = JobStatus::unended;
  int32_t error = 0;
  CHECK(pool.jobs().wait(id, kLong, status, error));
  CHECK((status == JobStatus::failed) == (error != SPARSEKV_OK));
  return status;
}

// A job with plain input and result, which the flags must order with their writer and reader.
struct Entry {
  Words words;
  int input = 0;
  int result = 0;
  int64_t id = 0;

  void submit(Pool& pool, uint32_t value = 1) {
    id = pool.submit(
        [this, &pool] {
          std::vector<int> parts(5, 0);
          pool.run(5, [&](int64_t i) { parts[i] = input; });
          for (const int part : parts) result += part;
          return int32_t(SPARSEKV_OK);
        },
        words.signal(value, 7));
    CHECK(id > 0);
  }
  // Once: the job may be reading what it was set for.
  void set() {
    if (input) return;
    input = 1;
    words.set();
  }
};

// A watcher sees the status and the result as soon as the flag, whatever the order of flags.
void flags_in_any_order(int threads) {
  Pool pool(threads);
  std::vector<Entry> entries(150);
  std::vector<size_t> order(entries.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(threads));
  for (Entry& entry : entries) entry.submit(pool);
  std::thread watcher([&] {
    for (const Entry& entry : entries) {
      CHECK(entry.words.wait_for_done(7) == SPARSEKV_JOB_DONE);
      CHECK(entry.result == 5);
    }
  });
  for (const size_t i : order) entries[i].set();
  watcher.join();
  for (const Entry& entry : entries) CHECK(wait(pool, entry.id) == JobStatus::done);
}

// The rule of the flag, around the largest value of a word.
void flags_wrap_around() {
  Pool pool(1);
  Entry entry;
  entry.words.set(0xfffffffeu);
  entry.submit(pool, 1);
  entry.words.set(0x80000001u);  // half the circle behind: not yet
  Entry other;
  other.submit(pool, 0xffffffffu);  // 0 is after that
  CHECK(other.words.wait_for_done(7) == SPARSEKV_JOB_DONE);
  CHECK(sparsekv_load_flag(&entry.words.done) == 0);
  entry.words.set(2);
  CHECK(entry.words.wait_for_done(7) == SPARSEKV_JOB_DONE);
}

// A flag in memory that is unmapped at once after the job was cancelled.
void no_flag_is_read_after_cancelling() {
  Pool pool(2);
  Entry entry;
  for (int n = 0; n < 200; n++) {
    void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    auto* words = new (page) Words;
    entry.id = pool.submit(
        [&] {
          entry.result = 1;
          return int32_t(SPARSEKV_OK);
        },
        words->signal());
    CHECK(n % 2 ? pool.jobs().cancel(entry.id) : pool.jobs().release(entry.id));
    CHECK(words->wait_for_done() == SPARSEKV_JOB_CANCELLED);
    munmap(page, 4096);
  }
  CHECK(entry.result == 0);
}

void failures_are_told() {
  Pool pool(1);
  Words words[3];
  words[0].set();
  const int64_t thrown =
      pool.submit([]() -> int32_t { throw std::bad_alloc(); }, words[0].signal());
  CHECK(words[0].wait_for_done() == SPARSEKV_JOB_FAILED);
  const int64_t refused =
      pool.submit([] { return int32_t(SPARSEKV_BAD_ROW); }, {});
  CHECK(wait(pool, thrown) == JobStatus::failed && wait(pool, refused) == JobStatus::failed);
  CHECK(pool.jobs().release(refused) && !pool.jobs().release(refused));
}

// A pool that ends, or whose threads are replaced, keeps no flag waiting.
void jobs_outlive_their_threads() {
  std::vector<Entry> entries(20);
  {
    Pool pool(2);
    for (Entry& entry : entries) entry.submit(pool);
    for (const int threads : {1, 3, 2}) pool.resize(threads);
    for (size_t i = 0; i < 10; i++) entries[i].set();
    for (size_t i = 0; i < 10; i++) CHECK(entries[i].words.wait_for_done(7) == SPARSEKV_JOB_DONE);
  }
  for (size_t i = 10; i < 20; i++) {
    CHECK(entries[i].words.wait_for_done(7) == SPARSEKV_JOB_CANCELLED && entries[i].result == 0);
  }
}

// Three threads, each with jobs of its own, do whatever comes; loops run and threads are replaced.
void anything_at_any_time(int threads, int seed) {
  Pool pool(threads);
  std::vector<std::thread> users;
  for (int user = 0; user < 3; user++) {
    users.emplace_back([&pool, seed, user] {
      std::mt19937 random(seed * 3 + user);
      std::vector<std::unique_ptr<Entry>> entries;
      for (int step = 0; step < 150; step++) {
        const unsigned choice = random() % 8;
        if (choice < 3 || entries.empty()) {
          entries.push_back(std::make_unique<Entry>());
          entries.back()->submit(pool);
          continue;
        }
        const size_t i = random() % entries.size();
        Entry& entry = *entries[i];
        if (choice < 5) entry.set();
        if (choice == 5) CHECK(pool.jobs().cancel(entry.id));
        if (choice == 6) pool.run(9, [](int64_t) {});
        if (choice == 7) {  // afterwards the memory is free
          CHECK(pool.jobs().release(entry.id));
          const int32_t status = entry.words.wait_for_done(7);
          CHECK(entry.result == (status == SPARSEKV_JOB_DONE ? 5 : 0));
          entries.erase(entries.begin() + long(i));
        }
      }
      for (const auto& entry : entries) entry->set();
      for (const auto& entry : entries) CHECK(wait(pool, entry->id) != JobStatus::failed);
    });
  }
  for (int n = 0; n < 6; n++) pool.resize(1 + (threads + n) % 4);
  for (std::thread& user : users) user.join();
}

}  // namespace

void test_jobs() {
  for (const int threads : {1, 2, 4}) {
    flags_in_any_order(threads);
    for (int seed = 0; seed < 3; seed++) anything_at_any_time(threads, seed);
  }
  flags_wrap_around();
  no_flag_is_read_after_cancelling();
  failures_are_told();
  jobs_outlive_their_threads();
}
