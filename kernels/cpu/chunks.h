// The keys of a task, a chunk at a time, for kernels that work on matrices of 16 keys.
//
// Included inside the including file's own namespace, after tiles.h.

constexpr int kGroup = 16;  // keys that make one matrix
constexpr int kChunkTiles = 2;
constexpr int kSlots = kChunkTiles * kTile;  // for the keys of a chunk

// A few tiles that every query token sees; or one tile that only some see.
struct Chunk {
  Tile tiles[kChunkTiles];
  int num_tiles = 0;
};

// The chunks of a task. Tiles are found one ahead, to know whether the next one may join.
class Chunks {
 public:
  explicit Chunks(const Task& task) : tiles_(task), more_(tiles_.next(ahead_)) {}

  // Fills the chunk with up to so many tiles; false, with no tile, when nothing is left.
  bool next(Chunk& chunk, int most_tiles = kChunkTiles) {
    chunk.num_tiles = 0;
    while (more_ && chunk.num_tiles < most_tiles) {
      if (chunk.num_tiles > 0 && !ahead_.seen_by_all) break;
      chunk.tiles[chunk.num_tiles++] = ahead_;
      more_ = tiles_.next(ahead_);
      if (!chunk.tiles[0].seen_by_all) break;
    }
    return chunk.num_tiles > 0;
  }

 private:
  Tiles tiles_;
  Tile ahead_;
  bool more_;
};

// Fetches what the next chunk will read into the second-level cache, some lines at a step; of
// tokens that lie end to end from four places in turn, as Fetcher does and for its reason.
class Ahead {
 public:
  // What is next of tokens that lie end to end: the first of kPlaces lines, where its part ends,
  // and how far the parts are apart. Loops keep it to themselves while they run: then it stays in
  // registers.
  struct Lines {
    const char* at;
    const char* end;
    int64_t apart;
    int steps_left;  // until it is read again
  };

  // Bytes of a token's key and value, 0 for values that lie inside the keys; and the steps for a
  // chunk, of which the last may leave a little.
  Ahead(int64_t key_bytes, int64_t value_bytes, int steps) : bytes_{key_bytes, value_bytes} {
    const int lines = kSlots * int((key_bytes + 63) / 64 + (value_bytes + 63) / 64);
    const int rounds = (lines + kPlaces - 1) / kPlaces;
    const int nearest = (rounds + steps / 2) / steps;
    rounds_in_a_turn_ = nearest > 1 ? nearest : 1;
    steps_for_a_turn_ = steps > rounds ? steps / rounds : 1;
  }

  void start(const Chunk& chunk) {
    chunk_ = &chunk;
    tile_ = token_ = 0;
    values_ = false;
    lines = {nullptr, nullptr, 0, steps_for_a_turn_};
  }

  // Instead of a chunk, what will be written.
  void start(const void* written, int64_t bytes) {
    chunk_ = nullptr;
    lines = run(static_cast<const char*>(written), bytes);
  }

  SPARSEKV_MEMBER void fetch_some(Lines& lines) {
    if (--lines.steps_left > 0) return;
    if (lines.at >= lines.end) lines = find();
    lines.steps_left = steps_for_a_turn_;
    if (!lines.at) return;
    for (int i = rounds_in_a_turn_; i > 0; i--) fetch_round(lines);
  }

  void fetch_rest() {
    do {
      while (lines.at < lines.end) fetch_round(lines);
      lines = find();
    } while (lines.at);
  }

  Lines lines;

 private:
  static constexpr int kPlaces = 4;

  SPARSEKV_MEMBER static void fetch_round(Lines& lines) {
    const char* at = lines.at;
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + lines.apart, 0, 2);
    __builtin_prefetch(at + 2 * lines.apart, 0, 2);
    __builtin_prefetch(at + 3 * lines.apart, 0, 2);
    lines.at = at + 64;
  }

  // The next tokens that lie end to end: first all keys of a tile, then its values.
  __attribute__((noinline)) Lines find() {
    while (chunk_ && tile_ < chunk_->num_tiles) {
      const Tile& tile = chunk_->tiles[tile_];
      const int64_t bytes = bytes_[values_];
      if (token_ == tile.count || bytes == 0) {
        token_ = 0;
        if (values_) tile_++;
        values_ = !values_;
        continue;
      }
      const char* const* tokens = values_ ? tile.value : tile.key;
      const char* at = tokens[token_++];
      const char* end = at + bytes;
      for (; token_ < tile.count && tokens[token_] == end; token_++) end += bytes;
      return run(at, end - at);
    }
    return {nullptr, nullptr, 0, 0};
  }

  static Lines run(const char* at, int64_t bytes) {
    constexpr int64_t kRound = kPlaces * 64;
    const int64_t apart = bytes < kRound ? 0 : (bytes + kRound - 1) / kRound * 64;
    return {at, at + (apart > 0 ? apart : bytes), apart, 0};
  }

  const int64_t bytes_[2];
  int rounds_in_a_turn_, steps_for_a_turn_;
  const Chunk* chunk_ = nullptr;
  int tile_ = 0, token_ = 0;
  bool values_ = false;
};

// One group of tokens, `stride` bytes apart.
struct Rows {
  const char* start;
  int64_t stride;
};

// The tokens of a group where they lie, if that is at equal distances and there are enough of them
// and of their bytes; else a copy, with zeros for what is missing.
inline Rows rows_of(const char* const* tokens, int count, int64_t bytes, int64_t padded_bytes,
                    char* copy) {
  if (count == kGroup && bytes == padded_bytes) {
    const int64_t stride = tokens[1] - tokens[0];
    bool even = true;
    for (int i = 2; i < kGroup; i++) even &= tokens[i] - tokens[i - 1] == stride;
    if (even) return {tokens[0], stride};
  }
  for (int i = 0; i < count; i++) {
    memcpy(copy + i * padded_bytes, tokens[i], bytes);
    memset(copy + i * padded_bytes + bytes, 0, padded_bytes - bytes);
  }
  memset(copy + count * padded_bytes, 0, (kGroup - count) * padded_bytes);
  return {copy, padded_bytes};
}
