// The keys of a task, a chunk at a time, for kernels that work on matrices of 16 keys.
//
// Included inside the including file's own namespace, after tiles.h.

constexpr int kGroup = 16;  // keys that make one matrix
constexpr int kChunkTiles = 2;

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

// Fetches what the next chunk will read into the second-level cache, some lines at a time, in the
// order of addresses as far as tokens lie end to end.
class Ahead {
 public:
  // Where the next lines lie, and the end of the tokens that follow them. Loops keep it to
  // themselves while they run: then it stays in registers.
  struct Lines {
    const char* at;
    const char* end;
  };

  // Bytes of a token's key and value; 0 for values that lie inside the keys.
  Ahead(int64_t key_bytes, int64_t value_bytes, int lines_at_a_time)
      : bytes_{key_bytes, value_bytes}, lines_at_a_time_(lines_at_a_time) {}

  void start(const Chunk& chunk) {
    chunk_ = &chunk;
    tile_ = token_ = 0;
    values_ = false;
    lines = {nullptr, nullptr};
  }

  SPARSEKV_MEMBER void fetch_some(Lines& lines) {
    if (lines.at >= lines.end) {
      lines = find();
      if (!lines.at) return;
    }
    const char* at = lines.at;
    for (int i = lines_at_a_time_; i > 0; i--, at += 64) __builtin_prefetch(at, 0, 2);
    lines.at = at;
  }

  void fetch_rest() {
    do {
      for (; lines.at < lines.end; lines.at += 64) __builtin_prefetch(lines.at, 0, 2);
      lines = find();
    } while (lines.at);
  }

  Lines lines;

 private:
  // The next tokens that lie end to end: first all keys of a tile, then its values.
  __attribute__((noinline)) Lines find() {
    while (tile_ < chunk_->num_tiles) {
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
      return {at, end};
    }
    return {nullptr, nullptr};
  }

  const int64_t bytes_[2];
  const int lines_at_a_time_;
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
