// Scores of a tile become weights: a running softmax.
//
// Included inside the namespace of one instruction set, as tiles.h is.

// Of each query row, over the tiles so far.
struct Softmax {
  float* tops;    // the largest score
  float* bases;   // the same, but finite
  float* decays;  // what sums of earlier tiles are to be multiplied with
  float* totals;  // (rows, kLanes), of weights; of rows with a lane each, (rows)
  float factor;   // of a score in the exponent of its weight

  // The difference first: it is exact where it matters, and never above 0.
  SPARSEKV_MEMBER Vector weights_of(Vector scores, Vector base) const {
    return power_of_two(times(minus(scores, base), broadcast(factor)));
  }

  // Of the rows from `first` on, scores (rows, kTile) become weights relative to the largest score
  // of the row so far.
  void weigh(const Task& task, const Tile& tile, int first, float* all_scores) const {
    const int rows = task_rows(task), width = rounded_up(tile.count, kLanes);
    for (int r = first; r < rows; r++) {
      float* scores = all_scores + r * kTile;
      const Seen seen = seen_by(task, tile, r % task.num_queries);
      for (int t = 0; t < seen.first; t++) scores[t] = -__builtin_inff();
      for (int t = seen.last; t < width; t++) scores[t] = -__builtin_inff();
      Vector top = load(scores);
      for (int t = kLanes; t < width; t += kLanes) top = maximum(load(scores + t), top);
      const float found = largest(top);
      decays[r] = tops[r];
      if (found > tops[r]) tops[r] = found;
      bases[r] = tops[r] < -__FLT_MAX__ ? -__FLT_MAX__ : tops[r];  // finite: no -inf + inf
    }
    for (int r = first; r < rows; r += kLanes) {
      store(decays + r, weights_of(load(decays + r), load(bases + r)));
    }
    for (int r = first; r < rows; r++) {
      float* scores = all_scores + r * kTile;
      const Vector base = broadcast(bases[r]);
      Vector sum = times(load(totals + r * kLanes), broadcast(decays[r]));
      for (int t = 0; t < width; t += kLanes) {
        const Vector weights = weights_of(load(scores + t), base);
        store(scores + t, weights);
        sum = plus(sum, weights);
      }
      store(totals + r * kLanes, sum);
    }
  }

  // The same of kLaneRows rows from `first` on: scores (kTile, rows), totals (rows).
  void weigh_lanes(const Task& task, const Tile& tile, int first, float* scores) const {
    if (!tile.seen_by_all) hide(task, tile, first, scores);
    for (int r = first; r < first + kLaneRows; r += kLanes, scores += kLanes) {
      const Vector before = load(tops + r);
      Vector top = before;
      for (int t = 0; t < tile.count; t++) top = maximum(load(scores + t * kLaneRows), top);
      const Vector base = maximum(top, broadcast(-__FLT_MAX__));
      const Vector decay = weights_of(before, base);
      Vector sum = zero();  // of this tile first: a long sum of small weights loses digits
      for (int t = 0; t < tile.count; t++) {
        const Vector weights = weights_of(load(scores + t * kLaneRows), base);
        store(scores + t * kLaneRows, weights);
        sum = plus(sum, weights);
      }
      store(tops + r, top);
      store(decays + r, decay);
      store(totals + r, times_plus(load(totals + r), decay, sum));
    }
  }

 private:
  static void hide(const Task& task, const Tile& tile, int first, float* scores) {
    for (int i = 0; i < kLaneRows; i++) {
      const Seen seen = seen_by(task, tile, (first + i) % task.num_queries);
      for (int t = 0; t < tile.count; t++) {
        if (t < seen.first || t >= seen.last) scores[t * kLaneRows + i] = -__builtin_inff();
      }
    }
  }
};
