// The query rows of a task as matrices of bf16.
//
// Included inside the namespace of one instruction set, by way of attention_amx.h.

// Split exactly into up to kMostParts parts of bf16, each laid out as
// [block of rows][32 numbers][matrix of rows], a matrix being 16 pairs of numbers by 16 rows.
class MatrixQuery {
 public:
  // `row_matrices` of rows make a block; `to` takes kMostParts times the rows of all blocks.
  MatrixQuery(const Task& task, int row_blocks, int row_matrices, int padded_dim, char* to)
      : task_(task),
        rows_(task_rows(task)),
        row_blocks_(row_blocks),
        row_matrices_(row_matrices),
        padded_dim_(padded_dim),
        matrices_(to) {}

  void lay_out() {
    while (lay_out_part(parts_++)) {
    }
  }

  int parts() const { return parts_; }

  char* block(int part, int block) const {
    const int64_t bytes = int64_t(row_matrices_) * kGroup * padded_dim_ * 2;
    return matrices_ + (int64_t(part) * row_blocks_ + block) * bytes;
  }

  // Of one row and one key, without parts.
  float product(int row, const char* key) const {
    const float* query = row_at(row);
    float sum = 0.0f;
    for (int d = 0; d < task_.head_dim; d++) {
      uint16_t number;
      memcpy(&number, key + 2 * d, sizeof number);
      const uint32_t bits = uint32_t(number) << 16;
      float x;
      memcpy(&x, &bits, sizeof x);
      sum += query[d] * x;
    }
    return sum * query_sign(task_.scale);
  }

 private:
  const float* row_at(int row) const {
    return task_.query + row / task_.num_queries * task_.query_head_stride +
           row % task_.num_queries * task_.query_token_stride;
  }

  // Tells whether something remains for another part.
  bool lay_out_part(int part) {
    bool remains = false;
    for (int m = 0; m < row_blocks_ * row_matrices_; m++) {
      const float* rows[kGroup];  // null beyond the last
      for (int i = 0; i < kGroup; i++) {
        rows[i] = m * kGroup + i < rows_ ? row_at(m * kGroup + i) : nullptr;
      }
      char* matrix = block(part, m / row_matrices_) + m % row_matrices_ * kMatrixBytes;
      for (int d = 0; d < padded_dim_; d += kNumbers, matrix += row_matrices_ * kMatrixBytes) {
        remains |= lay_out_matrix(rows, d, part, matrix);
      }
    }
    return remains && part + 1 < kMostParts;
  }

  // Numbers d ... d + 31 of 16 rows.
  bool lay_out_matrix(const float* const* rows, int d, int part, char* matrix) const {
    const Vector sign = broadcast(query_sign(task_.scale)), nothing = broadcast(0.0f);
    Words words[kGroup], remains = zero_words();
    for (int i = 0; i < kGroup; i++) {
      Vector parts[2] = {nothing, nothing};
      for (int half = 0; rows[i] && half < 2; half++) {
        Vector x = times(load_numbers(rows[i], d + 16 * half), sign);
        for (int p = 0; p < part; p++) x = remaining_part(x, leading_part(x));
        parts[half] = leading_part(x);
        remains = either(remains, as_words(remaining_part(x, parts[half])));
      }
      words[i] = join_parts(parts[0], parts[1]);
    }
    transpose(words);
    for (int i = 0; i < kGroup; i++) store_words(matrix + 64 * i, words[i]);
    return any_differs(as_floats(remains), nothing);
  }

  Vector load_numbers(const float* row, int d) const {
    const int count = task_.head_dim - d;
    if (count >= 16) return load(row + d);
    float padded[16] = {};
    if (count > 0) memcpy(padded, row + d, count * sizeof(float));
    return load(padded);
  }

  const Task& task_;
  const int rows_, row_blocks_, row_matrices_, padded_dim_;
  int parts_ = 0;
  char* const matrices_;
};
