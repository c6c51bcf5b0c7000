// Weights times the values of a tile.
//
// Included inside the namespace of one instruction set, as tiles.h is.

// One chunk of the values of a tile, where they lie.
template <class Number>
struct Lying {
  const char* const* tokens;
  int64_t offset;
  SPARSEKV_MEMBER void load_pair(int t, Vector& first, Vector& second) const {
    Number::load_pair(tokens[t] + offset, first, second);
  }
};

// The same, unpacked: kChunk floats a token, end to end.
struct Unpacked {
  const float* start;
  SPARSEKV_MEMBER void load_pair(int t, Vector& first, Vector& second) const {
    first = load(start + t * kChunk);
    second = load(start + t * kChunk + kLanes);
  }
};

// The same, and unpacked for other rows.
template <class Number>
struct Kept {
  Lying<Number> values;
  float* start;
  SPARSEKV_MEMBER void load_pair(int t, Vector& first, Vector& second) const {
    values.load_pair(t, first, second);
    store(start + t * kChunk, first);
    store(start + t * kChunk + kLanes, second);
  }
};

// The weights of a tile's tokens, by row and token or, for rows with a lane each, by token and row.
struct RowWeights {
  const float* start;
  SPARSEKV_MEMBER Vector at(int r, int t) const { return broadcast(start[r * kTile + t]); }
};
struct LaneWeights {
  const float* start;
  SPARSEKV_MEMBER Vector at(int r, int t) const { return broadcast(start[t * kLaneRows + r]); }
};

// One chunk of kRows rows of sums, end to end, += weights x the chunk of `count` values, after the
// sums were scaled. In AVX-512 a value of a chunk costs, for 8 rows, 16 FMAs (8 cycles) and 10
// loads; in bf16, once for all rows, two operations of unpacking on the FMAs' ports.
template <int kRows, class Values, class Weights>
SPARSEKV_INLINE void add_values(float* sums, const float* decay, Values values, int count,
                                Weights weights, Fetcher& fetcher) {
  Vector first[kRows], second[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    const Vector scale = broadcast(decay[r]);
    first[r] = times(load(sums + r * kChunk), scale);
    second[r] = times(load(sums + r * kChunk + kLanes), scale);
  }
  for (int t = 0; t < count; t++) {
    Vector v, w;
    values.load_pair(t, v, w);
    fetcher.step();
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const Vector weight = weights.at(r, t);
      first[r] = times_plus(v, weight, first[r]);
      second[r] = times_plus(w, weight, second[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    store(sums + r * kChunk, first[r]);
    store(sums + r * kChunk + kLanes, second[r]);
  }
}
