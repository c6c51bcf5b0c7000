// What is to be read next, fetched while other keys are worked on.
//
// Included inside the namespace of one instruction set, after tiles.h.

SPARSEKV_INLINE bool are_values_in_keys(const Task& task) {
  return task.key.start == task.value.start &&
         task.key.segment_stride == task.value.segment_stride &&
         task.key.row_stride == task.value.row_stride &&
         task.key.token_stride == task.value.token_stride && task.head_dim_v <= task.head_dim;
}

// Fetches keys and values of tiles into the first-level cache, some lines at a step. Values come
// while their keys are scored, keys while the values before them are added: a whole tile ahead, they
// would not fit beside what is worked on.
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

  // What is to come after what was named last, which is fetched from now on; what was named before
  // that is needed now, and all of it asked for when this returns.
  void follow_keys(const Tile& tile) { follow(tile.key, tile.count, keys_); }
  void follow_values(const Tile& tile) { follow(tile.value, tile.count, values_); }

  // As much as is due after a step more.
  SPARSEKV_MEMBER void step() {
    due_ += rounds_;
    while (due_ >= steps_) {
      due_ -= steps_;
      if (at_ >= end_ && !enter_run()) return;
      fetch_round();
    }
  }

 private:
  static constexpr int kPlaces = 4;
  static constexpr int kLinesAnnounced = 4;
  // Rounds of what comes next that are fetched early, so that the present is complete a little before
  // it is needed: its last lines belong to every place, the first one too. Two threads with matrices
  // for 8 query rows, of 23.5 GB/s that they could read: 21.3 without, 23.6 with 4 to 8 rounds.
  static constexpr int kLead = 4;

  struct Pace {
    Pace(int64_t bytes_of_token, int64_t steps_of_tile)
        : bytes(bytes_of_token), steps(steps_of_tile < 1 ? 1 : int(steps_of_tile)) {}

    int64_t bytes;  // of a token
    int steps;
  };

  // Tokens that lie end to end, in kPlaces parts that start so many bytes apart.
  struct Run {
    const char* start;
    const char* end;  // of the first part
    int64_t apart;

    int rounds() const { return int((end - start + 63) / 64); }
  };

  // Keys, or values, of a tile.
  struct Stream {
    int num_runs = 0, run = 0;  // the next to be entered
    int steps = 1;
    Run runs[kTile];

    int rounds_left() const {
      int rounds = 0;
      for (int i = run; i < num_runs; i++) rounds += runs[i].rounds();
      return rounds;
    }
  };

  void follow(const char* const* tokens, int count, const Pace& pace) {
    while (is_present_) {
      while (at_ < end_) fetch_round();
      if (present_->run == present_->num_runs) break;
      enter_run();
    }
    Stream* const next = present_;
    present_ = next_;
    next_ = next;
    is_present_ = true;
    next->num_runs = next->run = 0;
    next->steps = pace.steps;
    if (count > 0 && pace.bytes > 0) fill(*next, tokens, count, pace);
    due_ = 0;
    steps_ = present_->steps;
    const int lead = next->rounds_left();
    rounds_ = present_->rounds_left() + int((end_ - at_ + 63) / 64) + (lead < kLead ? lead : kLead);
  }

  static void fill(Stream& stream, const char* const* tokens, int count, const Pace& pace) {
    if (lie_end_to_end(tokens, count, pace)) {
      stream.runs[stream.num_runs++] = run(tokens[0], count * pace.bytes);
      announce(stream.runs[0]);
      return;
    }
    for (int first = 0, next; first < count; first = next) {
      for (next = first + 1; next < count; next++) {
        if (tokens[next] - tokens[next - 1] != pace.bytes) break;
      }
      stream.runs[stream.num_runs++] = run(tokens[first], (next - first) * pace.bytes);
    }
  }

  // The first lines of each place: the processor's own prefetching wants to see some lines of a page
  // read before it runs ahead in it.
  static void announce(const Run& run) {
    for (int i = 0; i < kLinesAnnounced; i++) {
      for (int place = 0; place < kPlaces; place++) {
        __builtin_prefetch(run.start + place * run.apart + 64 * i, 0, 2);
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

  // The next run, of the present or else of what follows; false: there is none.
  SPARSEKV_MEMBER bool enter_run() {
    Stream* from = is_present_ ? present_ : next_;
    if (from->run == from->num_runs) {
      if (!is_present_ || next_->num_runs == 0) return false;
      is_present_ = false;
      from = next_;
    }
    const Run& run = from->runs[from->run++];
    at_ = run.start;
    end_ = run.end;
    apart_ = run.apart;
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
  const char *at_ = nullptr, *end_ = nullptr;  // in the first part of a run
  int64_t apart_ = 0;
  int due_ = 0, rounds_ = 0, steps_ = 1;
  bool is_present_ = true;  // the run that was entered; else it is of what follows
  Stream streams_[2];
  Stream *present_ = &streams_[0], *next_ = &streams_[1];
};
