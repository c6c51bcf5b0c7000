// A chunk of keys as the matrices that are multiplied.
//
// Included inside the namespace of one instruction set, by way of attention_amx.h.

// Groups of tokens where they lie or, if that will not do, copied.
class MatrixChunk {
 public:
  int groups = 0;
  int seen[kSlots / kGroup];  // tokens of each group; what follows them counts for nothing
  Rows keys[kSlots / kGroup], values[kSlots / kGroup];

  // Room for copies of all keys and of all values, whose padded sizes are in bytes; and for one of
  // either that is zero.
  void place(char* keys, char* values, const char* zeros, int key_bytes, int value_bytes) {
    copied_keys_ = keys;
    copied_values_ = values;
    zeros_ = zeros;
    key_bytes_ = key_bytes;
    value_bytes_ = value_bytes;
  }

  char* copied_values() const { return copied_values_; }
  int slots() const { return groups * kGroup; }

  // As a multiple of so many groups.
  void gather(const Task& task, const Chunk& chunk, bool values_in_keys, int multiple) {
    groups = 0;
    for (int i = 0; i < chunk.num_tiles; i++) {
      const Tile& tile = chunk.tiles[i];
      for (int first = 0; first < tile.count; first += kGroup) {
        const int count = smaller(kGroup, tile.count - first);
        const int64_t at = groups * kGroup;
        keys[groups] = rows_of(tile.key + first, count, task.head_dim * 2, key_bytes_,
                               copied_keys_ + at * key_bytes_);
        values[groups] = values_in_keys
                             ? keys[groups]
                             : rows_of(tile.value + first, count, task.head_dim_v * 2,
                                       value_bytes_, copied_values_ + at * value_bytes_);
        seen[groups++] = count;
      }
    }
    for (; groups % multiple != 0; groups++) {
      keys[groups] = values[groups] = {zeros_, 0};
      seen[groups] = 0;
    }
  }

 private:
  char *copied_keys_ = nullptr, *copied_values_ = nullptr;
  const char* zeros_ = nullptr;
  int key_bytes_ = 0, value_bytes_ = 0;
};
