// Sixteen query rows, a lane each, times the keys of a tile.
//
// A number of a key is multiplied with all rows at once, so that no sum is taken across lanes, and
// a key is unpacked once for sixteen rows. In AVX-512 and bf16 a key of a chunk of 32 numbers costs
// 32 FMAs, whose operand is broadcast by the load (of these a core does three a cycle), and two
// operations of unpacking on the same two ports: 17 cycles.
//
// Included inside the namespace of one instruction set, as tiles.h is.

constexpr int kLaneRows = 16;
constexpr int kRowVectors = kLaneRows / kLanes;
constexpr int kLaneKeys = kAccumulators / kRowVectors;  // keys at a time
constexpr int kChainNumbers = 64;  // so many products are added one after another
static_assert(kChainNumbers % kChunk == 0, "a chain ends with a chunk");

// Keys of a chunk, kLaneKeys of them, and where they go as floats.
struct Ahead {
  const char* const* keys;
  int64_t offset;
  float* unpacked;
};

template <class Number>
SPARSEKV_INLINE void unpack_key(const Ahead& ahead, int k) {
  Vector first, second;
  Number::load_pair(ahead.keys[k] + ahead.offset, first, second);
  store(ahead.unpacked + k * kChunk, first);
  store(ahead.unpacked + k * kChunk + kLanes, second);
}

// One number of kLaneKeys unpacked keys times that of the rows, added to their sums.
SPARSEKV_INLINE void multiply_number(Vector* sums, const float* keys, const float* query) {
  Vector q[kRowVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kRowVectors; v++) q[v] = load(query + v * kLanes);
#pragma GCC unroll 16
  for (int k = 0; k < kLaneKeys; k++) {
    const Vector number = broadcast(keys[k * kChunk]);
#pragma GCC unroll 4
    for (int v = 0; v < kRowVectors; v++) {
      Vector& sum = sums[k * kRowVectors + v];
      sum = times_plus(number, q[v], sum);
    }
  }
}

// All numbers of a chunk; of the next one, a key is unpacked every few numbers: all at once, they
// would hold up the multiplications.
template <class Number>
SPARSEKV_INLINE void multiply_lanes(Vector* sums, const float* keys, const float* query,
                                    const Ahead& ahead, Fetcher& fetcher) {
  constexpr int kNumbers = kChunk / kLaneKeys;
#pragma GCC unroll 2
  for (int k = 0; k < kLaneKeys; k++) {
    fetcher.step();
    unpack_key<Number>(ahead, k);
#pragma GCC unroll 4
    for (int i = 0; i < kNumbers; i++) {
      const int d = k * kNumbers + i;
      multiply_number(sums, keys + d, query + d * kLaneRows);
    }
  }
}

// Adds the sums to those of earlier chains, and starts new ones. In one chain of all products, each
// addition rounds a sum as large as the whole: 576 products of one sign erred seven times as much.
SPARSEKV_INLINE void close_chains(Vector* sums, float* closed) {
#pragma GCC unroll 16
  for (int i = 0; i < kAccumulators; i++) {
    store(closed + i * kLanes, plus(load(closed + i * kLanes), sums[i]));
    sums[i] = zero();
  }
}

// kLaneRows query rows, (numbers as unpacked, rows), times all keys of the tile: (kTile, rows).
// What is left of a key after `whole` numbers was unpacked beforehand.
template <class Number>
void score_lanes(const Tile& tile, const float* query, int whole, const float* rest,
                 float* scores, Fetcher& fetcher) {
  const char* keys[kTile + 2 * kLaneKeys];
  const int end = rounded_up(tile.count, kLaneKeys) + kLaneKeys;
  for (int t = 0; t < end; t++) keys[t] = tile.key[t < tile.count ? t : tile.count - 1];
  alignas(64) float unpacked[2][kLaneKeys * kChunk];
  int now = 0;
  if (whole > 0) {
    for (int k = 0; k < kLaneKeys; k++) unpack_key<Number>({keys, 0, unpacked[now]}, k);
  }
  for (int t = 0; t < tile.count; t += kLaneKeys) {
    Vector products[kAccumulators];
    float* closed = scores + t * kLaneRows;
#pragma GCC unroll 16
    for (int i = 0; i < kAccumulators; i++) {
      products[i] = zero();
      store(closed + i * kLanes, zero());
    }
    for (int d = 0; d < whole; d += kChunk) {
      const int next = d + kChunk;
      const Ahead ahead = next < whole ? Ahead{keys + t, next * Number::kBytes, unpacked[1 - now]}
                                       : Ahead{keys + t + kLaneKeys, 0, unpacked[1 - now]};
      multiply_lanes<Number>(products, unpacked[now], query + d * kLaneRows, ahead, fetcher);
      now = 1 - now;
      if (next % kChainNumbers == 0 && next < whole) close_chains(products, closed);
    }
    if (rest) {
      for (int d = 0; d < kChunk; d++) {
        multiply_number(products, rest + t * kChunk + d, query + (whole + d) * kLaneRows);
      }
    }
    close_chains(products, closed);
  }
}
