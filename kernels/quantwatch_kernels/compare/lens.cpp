// KL of two rows of logits that arrive in pieces: one pass, and nothing as wide as the vocabulary.
//
// Of the second row z' the differences d = z' - z arrive: those of two good models would be lost in
// the rounding of z'. With any centre c and x = c - d, over all ids seen so far and relative to a
// maximum m:
//
//     S = sum e^(z-m)     A = sum e^(z-m) x     G = sum e^(z-m) (e^-x - 1 + x), no term is negative
//     KL(p||q) = log1p((G - A) / S) + A / S
//
// The centre is the mean difference so far, weighted as the sums are: what all ids share is
// nothing, and a row that is sure of one id has a KL far below the square of any other id's
// difference, which would cancel in G - A, as would a row that is sure of none and of which one id
// moves. When a likelier id comes, or the mean A / S is far from 0 after all, sums move to a new
// centre: with t = c - c', and m' by the factor e^(m-m'),
//
//     G' = e^t G + expm1(t) (S - A) - t S     A' = A - t S
//
// Terms are float32, in partial sums of 16 of them, and what these add up to is float64.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "spread.h"

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kBlock = 16 * kLanes;
constexpr int kTop = 5;
// Differences from the centre beyond which Python has a row read whole: its `_CLOSED_BOUND`.
constexpr float kClosed = 40.0f;
// A mean difference from which what the centre takes away is worth moving to.
constexpr double kFar = 0.125;

// What Python reads and writes, too: see `_State` in lens_native.py.
struct Row {
  double maximum, sum, drift, excess, centre, largest, spoiled;
  double top[kTop];
  double gap[kTop];
};

// e^x for -87 <= x <= 87 to 1.5e-7 relative: 2^n by the exponent's bits, the rest by a polynomial.
inline float exponential(float x) {
  const float n = std::nearbyint(x * 1.44269504f);
  const float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  union { int32_t bits; float value; } scale;
  scale.bits = (static_cast<int32_t>(n) + 127) << 23;
  return p * scale.value;
}

// e^-x - 1 + x for |x| <= 1/2 by its series to x^8: relative error 2e-9 before rounding.
inline float series(float x) {
  float p = 1.0f / 40320;
  p = p * -x + 1.0f / 5040;
  p = p * -x + 1.0f / 720;
  p = p * -x + 1.0f / 120;
  p = p * -x + 1.0f / 24;
  p = p * -x + 1.0f / 6;
  p = p * -x + 0.5f;
  return p * x * x;
}

// Largest z, or NaN where any of z or d isn't finite.
float largest_finite(const float* z, const float* d, int64_t n) {
  float best[kLanes], odd[kLanes];
  std::fill(best, best + kLanes, -std::numeric_limits<float>::infinity());
  std::fill(odd, odd + kLanes, 0.0f);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) {
      best[l] = z[i + l] > best[l] ? z[i + l] : best[l];
      odd[l] += (z[i + l] - z[i + l]) + (d[i + l] - d[i + l]);
    }
  for (; i < n; ++i) {
    best[0] = std::max(best[0], z[i]);
    odd[0] += (z[i] - z[i]) + (d[i] - d[i]);
  }
  float result = best[0], strange = odd[0];
  for (int64_t l = 1; l < kLanes; ++l) {
    result = std::max(result, best[l]);
    strange += odd[l];
  }
  return result + strange;
}

void recentre(Row& row, double maximum, double centre) {
  const double scale = std::exp(row.maximum - maximum), t = row.centre - centre;
  const double growth = std::expm1(t);
  row.excess = scale * (row.excess + growth * (row.excess + row.sum - row.drift) - t * row.sum);
  row.drift = scale * (row.drift - t * row.sum);
  row.sum *= scale;
  row.largest += std::abs(t);  // a bound, which is all that is asked of it
  row.maximum = maximum;
  row.centre = centre;
}

// Larger first, of equal ones the earlier.
void enter(Row& row, float z, float d) {
  int at = kTop - 1;
  for (; at > 0 && z > row.top[at - 1]; --at) {
    row.top[at] = row.top[at - 1];
    row.gap[at] = row.gap[at - 1];
  }
  row.top[at] = z;
  row.gap[at] = std::abs(d);
}

void rank(Row& row, const float* z, const float* d, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t end = std::min(i + kLanes, n);
    float best = z[i];
    for (int64_t j = i + 1; j < end; ++j) best = z[j] > best ? z[j] : best;
    if (!(best > row.top[kTop - 1])) continue;
    for (int64_t j = i; j < end; ++j)
      if (z[j] > row.top[kTop - 1]) enter(row, z[j], d[j]);
  }
}

struct Lanes {
  float sum[kLanes] = {}, drift[kLanes] = {}, excess[kLanes] = {};
};

inline void add(Lanes& lanes, int64_t l, float& far, float z, float d, float maximum,
                float centre) {
  const float x = centre - d;
  const float reach = x < 0 ? -x : x;
  far = reach > far ? reach : far;
  const float bounded = reach > kClosed ? 0.0f : x;
  const float below = z - maximum;
  const float e = below < -87.0f ? 0.0f : exponential(below);
  const float whole = exponential(-bounded) - 1.0f + bounded;
  const float term = reach < 0.5f ? series(x) : whole;
  lanes.sum[l] += e;
  lanes.drift[l] += e * bounded;
  lanes.excess[l] += e * term;
}

void flush(Row& row, const Lanes& lanes) {
  double sum = 0, drift = 0, excess = 0;
  for (int64_t l = 0; l < kLanes; ++l) {
    sum += lanes.sum[l];
    drift += lanes.drift[l];
    excess += lanes.excess[l];
  }
  row.sum += sum;
  row.drift += drift;
  row.excess += excess;
}

void accumulate(Row& row, const float* z, const float* d, int64_t n) {
  const float maximum = static_cast<float>(row.maximum);
  const float centre = static_cast<float>(row.centre);
  float far[kLanes] = {};
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    Lanes lanes;
    for (int64_t k = i; k < i + kBlock; k += kLanes)
      for (int64_t l = 0; l < kLanes; ++l)
        add(lanes, l, far[l], z[k + l], d[k + l], maximum, centre);
    flush(row, lanes);
  }
  Lanes rest;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l)
      add(rest, l, far[l], z[i + l], d[i + l], maximum, centre);
  for (; i < n; ++i) add(rest, 0, far[0], z[i], d[i], maximum, centre);
  flush(row, rest);
  for (int64_t l = 0; l < kLanes; ++l)
    row.largest = far[l] > row.largest ? far[l] : row.largest;
}

// The mean difference of what a row has seen, and of the ids that it is about to see.
float mean_difference(const Row& row, const float* z, const float* d, int64_t n, float maximum) {
  float weights[kLanes] = {}, sums[kLanes] = {};
  for (int64_t i = 0; i < n; i += kLanes)
    for (int64_t l = 0; l < std::min(kLanes, n - i); ++l) {
      const float below = z[i + l] - maximum;
      const float e = below < -87.0f ? 0.0f : exponential(below);
      weights[l] += e;
      sums[l] += e * d[i + l];
    }
  const double scale = row.sum > 0 ? std::exp(row.maximum - maximum) : 0;
  double weight = scale * row.sum, sum = scale * (row.centre * row.sum - row.drift);
  for (int64_t l = 0; l < kLanes; ++l) {
    weight += weights[l];
    sum += sums[l];
  }
  return static_cast<float>(sum / weight);
}

void take(Row& row, const float* z, const float* d, int64_t n) {
  if (row.spoiled != 0) return;
  const float maximum = largest_finite(z, d, n);
  if (!(maximum - maximum == 0)) {
    row.spoiled = 1;
    return;
  }
  if (maximum > row.maximum) {
    const float centre = mean_difference(row, z, d, n, maximum);
    if (row.sum > 0) {
      recentre(row, maximum, centre);
    } else {
      row.maximum = maximum;
      row.centre = centre;
    }
  }
  if (maximum > row.top[kTop - 1]) rank(row, z, d, n);
  accumulate(row, z, d, n);
  const double mean = row.drift / row.sum;
  if (std::abs(mean) > kFar) recentre(row, row.maximum, static_cast<float>(row.centre - mean));
}

}  // namespace

extern "C" void lens_take(const float* z, const float* d, int64_t rows, int64_t columns,
                          int64_t stride, Row* state, int64_t threads) {
  spread(rows, threads, [=](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      take(state[r], z + r * stride, d + r * stride, columns);
  });
}
