// Sums of weights times values.
//
// Included inside the namespace of one instruction set, by way of attention_amx.h.

// [slab of numbers][block of rows][matrix of rows][matrix of numbers], each 16 rows by 16 numbers.
// Two matrices hold 32 numbers: the first one those 0 ... 3 of each eight.
template <int kRowMatrices>
class MatrixSums {
 public:
  static constexpr int kSlab = Blocking<kRowMatrices>::kOthers * 16;  // numbers at a time

  // `sums` takes all rows times the padded numbers, `packed` packed_bytes().
  MatrixSums(int row_blocks, int padded_dim_v, float* sums, char* packed)
      : row_blocks_(row_blocks), padded_dim_v_(padded_dim_v), sums_(sums), packed_(packed) {}

  static constexpr int packed_bytes() { return kPlaces * Unit<kOthers>::kBytes; }

  // Nothing was added yet; what is stored is unwritten.
  bool is_empty() const { return is_empty_; }

  void clear() {
    memset(sums_, 0, sizeof(float) * row_blocks_ * Blocking<kRowMatrices>::kRows * padded_dim_v_);
    is_empty_ = false;
  }

  // Of 32 numbers from d on: those in the first matrix; the others lie a matrix further.
  float* of(int row, int d) const {
    const int within = row % Blocking<kRowMatrices>::kRows;
    return block(d / kSlab, row / Blocking<kRowMatrices>::kRows) +
           within / kGroup * Blocking<kRowMatrices>::kOthers * kMatrixFloats +
           d % kSlab / 16 * kMatrixFloats + within % kGroup * 16;
  }

  void decay(int row, float by) {
    const Vector factor = broadcast(by);
    for (int d = 0; d < padded_dim_v_; d += kNumbers) {
      float *low = of(row, d), *high = low + kMatrixFloats;
      store(low, times(load(low), factor));
      store(high, times(load(high), factor));
    }
  }

  // Of so many units, two groups of tokens each. weights: [matrix of rows][kSteps matrices], each
  // 16 rows by 32 tokens. `meanwhile` is called between the products.
  template <class Meanwhile>
  SPARSEKV_MEMBER void add(const Rows* values, int units, const char* weights,
                           const Meanwhile& meanwhile) {
    unit_at(values, units, 0, 0).pack();
    for (int slab = 0; slab < padded_dim_v_ / kSlab; slab++) {
      for (int block = 0; block < row_blocks_; block++) {
        const int64_t first = int64_t(block) * kRowMatrices * kSteps * kMatrixBytes;
        add_block(values, units, slab, block, weights + first, meanwhile);
      }
    }
    is_empty_ = false;
  }

 private:
  static constexpr int kOthers = Blocking<kRowMatrices>::kOthers;
  static constexpr int kPlaces = kRowMatrices == 1 ? 2 : kSteps + 1;

  Unit<kOthers> unit_at(const Rows* values, int units, int slab, int k) const {
    return Unit<kOthers>(values[2 * k], values[2 * k + 1], slab * kSlab * 2,
                         packed_at(units, slab, k));
  }

  // One block of rows needs but the unit at hand and the next, close together in the first-level
  // cache. Several need those of the slab; and the first of the next slab beside the last of it.
  char* packed_at(int units, int slab, int k) const {
    if (kRowMatrices == 1) return packed_ + ((slab * units + k) & 1) * Unit<kOthers>::kBytes;
    return packed_ + (k == 0 && slab % 2 == 1 ? kSteps : k) * Unit<kOthers>::kBytes;
  }

  // While a unit is multiplied, the next is packed: by the first block of rows, and the first unit
  // of the next slab by the last block.
  template <class Meanwhile>
  SPARSEKV_MEMBER void add_block(const Rows* values, int units, int slab, int block,
                                 const char* weights, const Meanwhile& meanwhile) {
    float* to = this->block(slab, block);
    if (is_empty_) {
      clear_matrix<0>();
      clear_matrix<1>();
      clear_matrix<2>();
      clear_matrix<3>();
    } else {
      load_matrix<0>(to, 64);
      load_matrix<1>(to + kMatrixFloats, 64);
      load_matrix<2>(to + 2 * kMatrixFloats, 64);
      load_matrix<3>(to + 3 * kMatrixFloats, 64);
    }
    const float* next_sums = to + kMatricesOfSums * kMatrixFloats;
    const bool packs_slab = block + 1 == row_blocks_ && (slab + 1) * kSlab < padded_dim_v_;
    Unit<kOthers> unit = unit_at(values, units, slab, 0);
    for (int k = 0; k < units; k++, weights += kMatrixBytes) {
      const char* packed = unit.packed();
      const bool is_last = k + 1 == units;
      const bool packs = is_last ? packs_slab : block == 0;
      unit = is_last ? unit_at(values, units, slab + 1, 0) : unit_at(values, units, slab, k + 1);
      const auto between = [&](int quarter) __attribute__((always_inline)) {
        if (packs) unit.pack(quarter);
        meanwhile();
        if (kRowMatrices > 1) next_sums = fetch_sums(next_sums);
      };
      if constexpr (kRowMatrices == 1) {
        load_matrix<4>(weights, 64);
        load_matrix<5>(packed, 64);
        load_matrix<6>(packed + kMatrixBytes, 64);
        load_matrix<7>(packed + 2 * kMatrixBytes, 64);
        between(0);
        multiply_matrices<0, 4, 5>();
        between(1);
        multiply_matrices<1, 4, 6>();
        between(2);
        multiply_matrices<2, 4, 7>();
        load_matrix<5>(packed + 3 * kMatrixBytes, 64);
        between(3);
        multiply_matrices<3, 4, 5>();
      } else {
        load_matrix<6>(packed, 64);
        load_matrix<7>(packed + kMatrixBytes, 64);
        load_matrix<4>(weights, 64);
        load_matrix<5>(weights + kSteps * kMatrixBytes, 64);
        between(0);
        multiply_matrices<0, 4, 6>();
        between(1);
        multiply_matrices<1, 4, 7>();
        between(2);
        multiply_matrices<2, 5, 6>();
        between(3);
        multiply_matrices<3, 5, 7>();
      }
    }
    store_matrix<0>(to, 64);
    store_matrix<1>(to + kMatrixFloats, 64);
    store_matrix<2>(to + 2 * kMatrixFloats, 64);
    store_matrix<3>(to + 3 * kMatrixFloats, 64);
  }

  // Some lines into the first-level cache, which the sums of more rows do not stay in: by the last
  // product of a whole chunk, those of a block.
  SPARSEKV_MEMBER static const float* fetch_sums(const float* sums) {
    constexpr int kLines = kMatricesOfSums * kMatrixBytes / 64 / (4 * kSteps);
    for (int i = 0; i < kLines; i++, sums += 16) __builtin_prefetch(sums, 0, 3);
    return sums;
  }

  float* block(int slab, int block) const {
    return sums_ + (int64_t(slab) * row_blocks_ + block) * kMatricesOfSums * kMatrixFloats;
  }

  const int row_blocks_, padded_dim_v_;
  float* const sums_;
  char* const packed_;  // units of values
  bool is_empty_ = true;
};
