// Powers of two, for the weights of scores.
//
// Included inside the namespace of one instruction set, as tiles.h is.

// 2^x for x <= 0, or NaN; relative error below 1e-7.
SPARSEKV_INLINE Vector power_of_two(Vector x) {
  x = maximum(broadcast(-200.0f), x);  // in this order NaN stays
  const Vector whole = round_to_whole(x);
  const Vector rest = minus(x, whole);
  Vector y = broadcast(1.534732010e-04f);  // least relative error on [-1/2, 1/2]
  y = times_plus(y, rest, broadcast(1.340015445e-03f));
  y = times_plus(y, rest, broadcast(9.618484243e-03f));
  y = times_plus(y, rest, broadcast(5.550328082e-02f));
  y = times_plus(y, rest, broadcast(2.402264692e-01f));
  y = times_plus(y, rest, broadcast(6.931472062e-01f));
  y = times_plus(y, rest, broadcast(1.0f));
  return scale_by_power(y, whole);
}
