// The keys of a task, a tile at a time, for the kernels of every instruction set.
//
// Included inside the including file's own namespace, by way of attention.h and its like: nothing
// here may be shared between files that are compiled for different instruction sets.

// Stored keys that at least one query token of the task sees, in order.
struct Tile {
  const char* key[kTile];    // of each token, and its value
  const char* value[kTile];
  int count = 0;
  bool seen_by_all = true;   // by every query token; else the tokens stand at consecutive positions
  int64_t position = 0;      // of the first token, where not seen by all
};

// The tiles of a task. Keys that no query token sees are left out: those after the last query, out
// of every sliding window, before the row's first position, under the key mask, or past the last key.
class Tiles {
 public:
  explicit Tiles(const Task& task)
      : task_(task),
        at_(task.begin),
        first_query_(task.first_query_position),
        last_query_(task.first_query_position + task.num_queries - 1),
        first_seen_(larger(task.first_position, first_query_ - task.sliding_window + 1)),
        first_seen_by_all_(larger(task.first_position, last_query_ - task.sliding_window + 1)) {}

  // Fills the tile; false, with a count of 0, when nothing is left.
  bool next(Tile& tile) {
    tile.count = 0;
    tile.seen_by_all = true;
    Run run;
    while (tile.count < kTile && find(run)) {
      const bool seen_by_all = run.position >= first_seen_by_all_ && run.position <= first_query_;
      if (seen_by_all) {
        take(tile, run, smaller(run.count, first_query_ - run.position + 1));
        continue;
      }
      if (tile.count > 0) break;  // it needs a tile of its own
      const bool before = run.position < first_seen_by_all_ && run.position <= first_query_;
      tile.seen_by_all = false;
      tile.position = run.position;
      take_until_hidden(tile, run, before ? smaller(run.count, first_seen_by_all_ - run.position)
                                          : run.count);
      break;
    }
    return tile.count > 0;
  }

 private:
  // Tokens at at_ that lie one after another in one segment, the first of which is seen.
  struct Run {
    const char* key;
    const char* value;
    const uint8_t* mask;  // of the first token; null: none is hidden by it
    int64_t position;
    int64_t count;
  };

  static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
  static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

  bool find(Run& run) {
    while (at_ < task_.end) {
      int64_t key = at_, count = task_.end - at_;
      if (task_.blocks) {
        const int64_t block = at_ / task_.block_size, offset = at_ % task_.block_size;
        key = task_.blocks[block] * task_.block_size + offset;
        const int64_t left = task_.block_size - offset;
        count = smaller(count, left);
        if (key >= task_.num_keys) {  // the last block may end early
          at_ += count;
          continue;
        }
        count = smaller(count, task_.num_keys - key);
      }
      const int64_t segment = key / task_.tokens, offset = key % task_.tokens;
      count = smaller(count, task_.tokens - offset);
      const int64_t position = task_.positions[segment] + offset;
      if (position > last_query_) {
        at_ += count;
        continue;
      }
      count = smaller(count, last_query_ - position + 1);
      const uint8_t* mask = task_.key_mask ? task_.key_mask + position : nullptr;
      int64_t hidden = position < first_seen_ ? smaller(count, first_seen_ - position) : 0;
      while (mask && hidden < count && !mask[hidden]) hidden++;
      if (hidden > 0) {
        at_ += hidden;
        continue;
      }
      run = {address(task_.key, segment, offset), address(task_.value, segment, offset), mask,
             position, count};
      return true;
    }
    return false;
  }

  void take(Tile& tile, const Run& run, int64_t count) {
    int n = tile.count;
    int64_t i = 0;
    if (!run.mask) {
      const int taken = int(smaller(count, kTile - n));
      for (int t = 0; t < taken; t++) tile.key[n + t] = run.key + t * task_.key.token_stride;
      for (int t = 0; t < taken; t++) tile.value[n + t] = run.value + t * task_.value.token_stride;
      tile.count = n + taken;
      at_ += taken;
      return;
    }
    for (; i < count && n < kTile; i++) {
      if (!run.mask[i]) continue;
      tile.key[n] = run.key + i * task_.key.token_stride;
      tile.value[n] = run.value + i * task_.value.token_stride;
      n++;
    }
    tile.count = n;
    at_ += i;
  }

  void take_until_hidden(Tile& tile, const Run& run, int64_t count) {
    int64_t seen = 0;
    while (seen < count && seen < kTile && (!run.mask || run.mask[seen])) seen++;
    take(tile, run, seen);
  }

  const char* address(const Stored& stored, int64_t segment, int64_t offset) const {
    const int64_t row =
        task_.row_table ? task_.row_table[segment * task_.row_table_stride] : task_.row;
    return stored.start + segment * stored.segment_stride + row * stored.row_stride +
           offset * stored.token_stride;
  }

  const Task& task_;
  int64_t at_;
  const int64_t first_query_, last_query_;
  const int64_t first_seen_, first_seen_by_all_;  // positions, by any and by every query token
};

// Tokens [first, last) of a tile are those that a query token sees.
struct Seen {
  int first;
  int last;
};

inline Seen seen_by(const Task& task, const Tile& tile, int query) {
  if (tile.seen_by_all) return {0, tile.count};
  const int64_t last = task.first_query_position + query + 1 - tile.position;
  const int64_t first = last - task.sliding_window;
  const int64_t count = tile.count;
  const int64_t end = last < 0 ? 0 : last < count ? last : count;
  const int64_t begin = first < 0 ? 0 : first < end ? first : end;
  return {int(begin), int(end)};
}
