// Keys of a chunk times query rows.
//
// Included inside the namespace of one instruction set, by way of attention_amx.h.

// kRowMatrices: matrices of query rows that are multiplied together, so that with as many of keys,
// or of numbers of the values, they make kMatricesOfSums.
template <int kRowMatrices>
struct Blocking {
  static constexpr int kRows = kRowMatrices * kGroup;
  static constexpr int kOthers = kMatricesOfSums / kRowMatrices;
};

// Scores of one block of rows and kOthers groups of keys: [matrix of rows][slot][16 rows].
// Meanwhile the next chunk is fetched, and the chunk before gets its weights: what stands between
// two products costs little, and the matrix unit of a crowded processor is even faster for it.
template <int kRowMatrices>
void score_block(const MatrixQuery& query, int block, int key_bytes, const Rows* groups,
                 float* scores, Ahead& ahead, Weighing& weighing) {
  clear_matrix<0>();
  clear_matrix<1>();
  clear_matrix<2>();
  clear_matrix<3>();
  Rows keys[Blocking<kRowMatrices>::kOthers];
  for (int i = 0; i < Blocking<kRowMatrices>::kOthers; i++) keys[i] = groups[i];
  Ahead::Lines lines = ahead.lines;
  for (int part = 0; part < query.parts(); part++) {
    const char* rows = query.block(part, block);
    for (int byte = 0; byte < key_bytes; byte += 64, rows += kRowMatrices * kMatrixBytes) {
      if constexpr (kRowMatrices == 1) {
        load_matrix<4>(rows, 64);
        load_matrix<5>(keys[0].start + byte, keys[0].stride);
        load_matrix<6>(keys[1].start + byte, keys[1].stride);
        load_matrix<7>(keys[2].start + byte, keys[2].stride);
        ahead.fetch_some(lines);
        weighing.step();
        multiply_matrices<0, 5, 4>();
        ahead.fetch_some(lines);
        multiply_matrices<1, 6, 4>();
        ahead.fetch_some(lines);
        weighing.step();
        multiply_matrices<2, 7, 4>();
        load_matrix<5>(keys[3].start + byte, keys[3].stride);
        ahead.fetch_some(lines);
        multiply_matrices<3, 5, 4>();
      } else {
        load_matrix<6>(rows, 64);
        load_matrix<7>(rows + kMatrixBytes, 64);
        load_matrix<4>(keys[0].start + byte, keys[0].stride);
        load_matrix<5>(keys[1].start + byte, keys[1].stride);
        ahead.fetch_some(lines);
        weighing.step();
        multiply_matrices<0, 4, 6>();
        ahead.fetch_some(lines);
        multiply_matrices<1, 5, 6>();
        ahead.fetch_some(lines);
        weighing.step();
        multiply_matrices<2, 4, 7>();
        ahead.fetch_some(lines);
        multiply_matrices<3, 5, 7>();
      }
    }
  }
  ahead.lines = lines;
  float* second = scores + (kRowMatrices == 1 ? 2 * kMatrixFloats : kSlots * 16);
  store_matrix<0>(scores, 64);
  store_matrix<1>(scores + kMatrixFloats, 64);
  store_matrix<2>(second, 64);
  store_matrix<3>(second + kMatrixFloats, 64);
}
