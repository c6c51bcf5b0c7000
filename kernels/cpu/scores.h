// Query rows times the keys of a tile.
//
// Included inside the namespace of one instruction set, as tiles.h is.

// One chunk of kTokens keys times the same chunk of kRows query rows, end to end, added to their
// sums.
template <class Number, int kRows>
SPARSEKV_INLINE void multiply_chunk(Vector* sums, const char* const* keys, int64_t key_offset,
                                    const float* query) {
  constexpr int kTokens = kAccumulators / kRows;
  if constexpr (kTokens <= kRows) {  // what is fewer stays in registers
    Vector first[kTokens], second[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; t++) Number::load_pair(keys[t] + key_offset, first[t], second[t]);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      Vector q = load(query + r * kChunk);
      Vector p = load(query + r * kChunk + kLanes);
      hold(q);
      hold(p);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; t++) {
        sums[r * kTokens + t] = times_plus(first[t], q, sums[r * kTokens + t]);
      }
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; t++) {
        sums[r * kTokens + t] = times_plus(second[t], p, sums[r * kTokens + t]);
      }
    }
  } else {
    Vector q[kRows], p[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      q[r] = load(query + r * kChunk);
      p[r] = load(query + r * kChunk + kLanes);
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; t++) {
      Vector first, second;
      Number::load_pair(keys[t] + key_offset, first, second);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++) {
        Vector& sum = sums[r * kTokens + t];
        sum = times_plus(first, q[r], sum);
        sum = times_plus(second, p[r], sum);
      }
    }
  }
}

// kRows query rows, end to end, times all keys of the tile: (rows, kTile). What is left of a key
// after `whole` numbers was unpacked beforehand.
template <class Number, int kRows>
void score_rows(const Tile& tile, const float* query, int whole, const float* rest, float* scores,
                Fetcher& fetcher) {
  constexpr int kTokens = kAccumulators / kRows;
  for (int t = 0; t < tile.count; t += kTokens) {
    const char *keys[kTokens], *rests[kTokens];
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; i++) {
      const int token = t + i < tile.count ? t + i : tile.count - 1;
      keys[i] = tile.key[token];
      rests[i] = reinterpret_cast<const char*>(rest + token * kChunk);
    }
    Vector products[kAccumulators];
#pragma GCC unroll 16
    for (int i = 0; i < kAccumulators; i++) products[i] = zero();
    for (int d = 0; d < whole; d += kChunk) {
      fetcher.step();
      multiply_chunk<Number, kRows>(products, keys, d * Number::kBytes, query + d * kRows);
    }
    if (rest) multiply_chunk<Fp32, kRows>(products, rests, 0, query + whole * kRows);
    alignas(64) float found[kAccumulators];
#pragma GCC unroll 4
    for (int i = 0; i < kAccumulators; i += kLanes) store(found + i, sums(products + i));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      memcpy(scores + r * kTile + t, found + r * kTokens, sizeof(float) * kTokens);
    }
  }
}
