// Values as the second factor of products.
//
// Included inside the namespace of one instruction set, by way of attention_amx.h.

// A slab of a group's values, kMatrices times 16 numbers wide, and where it goes: in each matrix,
// eight rows of 64 bytes.
template <int kMatrices>
struct Packing {
  const char* from;
  int64_t stride;
  char* to;

  // A quarter of the group: two pairs of tokens, the numbers of a pair alternating.
  SPARSEKV_MEMBER void pack(int quarter) const {
    const char* pair = from + quarter * 4 * stride;
    char* packed = to + quarter * 2 * 64;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++, pair += 2 * stride, packed += 64) {
#pragma GCC unroll 2
      for (int j = 0; j < kMatrices / 2; j++) {
        const Words even = load_words(pair + 64 * j), odd = load_words(pair + stride + 64 * j);
        store_words(packed + 2 * j * kMatrixBytes, alternate_low(even, odd));
        store_words(packed + (2 * j + 1) * kMatrixBytes, alternate_high(even, odd));
      }
    }
  }
};

// A slab of the values of 32 tokens, two groups, and where kMatrices of it go.
template <int kMatrices>
struct Unit {
  static constexpr int kBytes = kMatrices * kMatrixBytes;

  Packing<kMatrices> first, second;

  Unit(const Rows& even_group, const Rows& odd_group, int64_t offset, char* to)
      : first{even_group.start + offset, even_group.stride, to},
        second{odd_group.start + offset, odd_group.stride, to + kMatrixBytes / 2} {}

  const char* packed() const { return first.to; }

  SPARSEKV_MEMBER void pack(int quarter) const {
    first.pack(quarter);
    second.pack(quarter);
  }
  void pack() const {
    for (int quarter = 0; quarter < 4; quarter++) pack(quarter);
  }
};
