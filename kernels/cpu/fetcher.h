// What is to be read next, fetched while other keys are worked on.
//
// Included inside the namespace of one instruction set, after tiles.h.

SPARSEKV_INLINE bool are_values_in_keys(const Task& task) {
  return task.key.start == task.value.start &&
         task.key.segment_stride == task.value.segment_stride &&
         task.key.row_stride == task.value.row_stride &&
         task.key.token_stride == task.value.token_stride && task.head_dim_v <= task.head_dim;
}

// Fetches the keys, or the values, of a tile into the first-level cache, some lines at a step.
// Values come while their keys are scored, keys while the values before them are added: a whole
// tile ahead, they would not fit beside what is worked on.
//
// Tokens that lie end to end are fetched from four places in turn. The processor's own prefetching
// goes on inside each page it sees being read, and with four pages it is so far ahead that the
// lines asked for here are on their way already. That counts, for it can wait for more lines than
// the first-level cache, whose places for missing lines the work needs too.
class Fetcher {
 public:
  // For tiles of kTile tokens, each to be fetched within so many steps. Values that lie inside the
  // keys come with them.
  Fetcher(const Task& task, int64_t number_bytes, int64_t key_steps, int64_t value_steps)
      : keys_(task.head_dim * number_bytes, key_steps),
        values_(are_values_in_keys(task) ? 0 : task.head_dim_v * number_bytes, value_steps) {}

  void start_keys(const Tile& tile) { start(tile.key, tile.count, keys_); }
  void start_values(const Tile& tile) { start(tile.value, tile.count, values_); }

  // What is started after the present: the first lines of each place. The processor's own
  // prefetching wants to see some lines of a page read before it runs ahead in it.
  void announce_keys(const Tile& tile) const { announce(tile.key, tile.count, keys_); }
  void announce_values(const Tile& tile) const { announce(tile.value, tile.count, values_); }

  // As much as is due after a step more.
  SPARSEKV_MEMBER void step() {
    due_ += pace_.rounds;
    while (due_ >= pace_.steps) {
      due_ -= pace_.steps;
      if (at_ >= end_ && !find()) return;
      fetch_round();
    }
  }

  // All that is left.
  void finish() {
    do {
      while (at_ < end_) fetch_round();
    } while (find());
  }

 private:
  static constexpr int kPlaces = 4;
  static constexpr int kLinesAnnounced = 4;

  struct Pace {
    Pace(int64_t bytes_of_token, int64_t steps_of_tile)
        : bytes(bytes_of_token),
          rounds(int((kTile * ((bytes + 63) / 64) + kPlaces - 1) / kPlaces)),
          steps(steps_of_tile < 1 ? 1 : int(steps_of_tile)) {}

    int64_t bytes;  // of a token
    int rounds, steps;
  };

  // Tokens that lie end to end, in kPlaces parts that start so many bytes apart.
  struct Run {
    const char* start;
    const char* end;  // of the first part
    int64_t apart;
  };

  void start(const char* const* tokens, int count, const Pace& pace) {
    num_runs_ = run_ = 0;
    at_ = end_ = nullptr;
    pace_ = pace;
    due_ = 0;
    if (count == 0 || pace.bytes == 0) return;
    if (lie_end_to_end(tokens, count, pace)) {
      runs_[num_runs_++] = run(tokens[0], count * pace.bytes);
      return;
    }
    for (int first = 0, next; first < count; first = next) {
      for (next = first + 1; next < count; next++) {
        if (tokens[next] - tokens[next - 1] != pace.bytes) break;
      }
      runs_[num_runs_++] = run(tokens[first], (next - first) * pace.bytes);
    }
  }

  static void announce(const char* const* tokens, int count, const Pace& pace) {
    if (count == 0 || pace.bytes == 0 || !lie_end_to_end(tokens, count, pace)) return;
    const Run whole = run(tokens[0], count * pace.bytes);
    for (int i = 0; i < kLinesAnnounced; i++) {
      for (int place = 0; place < kPlaces; place++) {
        __builtin_prefetch(whole.start + place * whole.apart + 64 * i, 0, 2);
      }
    }
  }

  // The last in its place: so are those between, most likely.
  static bool lie_end_to_end(const char* const* tokens, int count, const Pace& pace) {
    return tokens[count - 1] - tokens[0] == (count - 1) * pace.bytes;
  }

  static Run run(const char* start, int64_t bytes) {
    constexpr int64_t kRound = kPlaces * 64;
    const int64_t apart = bytes < kRound ? 0 : (bytes + kRound - 1) / kRound * 64;
    return {start, start + (apart > 0 ? apart : bytes), apart};
  }

  SPARSEKV_MEMBER bool find() {
    if (run_ == num_runs_) return false;
    at_ = runs_[run_].start;
    end_ = runs_[run_].end;
    apart_ = runs_[run_++].apart;
    return true;
  }

  SPARSEKV_MEMBER void fetch_round() {
    __builtin_prefetch(at_, 0, 3);
    __builtin_prefetch(at_ + apart_, 0, 3);
    __builtin_prefetch(at_ + 2 * apart_, 0, 3);
    __builtin_prefetch(at_ + 3 * apart_, 0, 3);
    at_ += 64;
  }

  const Pace keys_, values_;
  Pace pace_{0, 1};  // of what is fetched now
  int due_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;  // in the first part of the run before run_
  int64_t apart_ = 0;
  int run_ = 0, num_runs_ = 0;
  Run runs_[kTile];
};
