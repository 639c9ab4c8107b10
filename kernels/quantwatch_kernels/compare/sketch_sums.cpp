// KL of a candidate from the logits that a sketch keeps, row by row: the formulas of
// sketch_estimate.py in float64, in one pass over what stays in the nearest cache.
//
// phi(d) = e^-d - 1 + d is a series for |d| < 1/2, where its terms would cancel. Sums are added up
// in eight lanes whatever else is in the batch: a row's numbers depend on the row alone.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "spread.h"

namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kTop = 5;
constexpr double kTame = 300.0;      // beyond it e^-d may be too large: sketch_sums.py does such rows
constexpr double kExponent = 700.0;  // less likely than e^-700 is nothing
constexpr float kLargest = std::numeric_limits<float>::max();

// What Python reads, too: see `_ROW` in sketch_sums_native.py.
struct Found {
  double kl = 0, error = 0, five = 0, three = 0;
  // How many: differences that aren't 0, logits that are infinite or no numbers, |d| beyond kTame.
  double differences = 0, infinite = 0, undefined = 0, far = 0;
};

// e^x for |x| <= 700 to 1.6e-16 relative: 2^n by the exponent's bits, the rest by its series.
inline double exponential(double x) {
  constexpr double round = 6755399441055744.0;  // 1.5 * 2^52: the sum's last bits are n
  const double shifted = x * 1.4426950408889634 + round, n = shifted - round;
  const double f = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800;
  p = p * f + 1.0 / 479001600;
  p = p * f + 1.0 / 39916800;
  p = p * f + 1.0 / 3628800;
  p = p * f + 1.0 / 362880;
  p = p * f + 1.0 / 40320;
  p = p * f + 1.0 / 5040;
  p = p * f + 1.0 / 720;
  p = p * f + 1.0 / 120;
  p = p * f + 1.0 / 24;
  p = p * f + 1.0 / 6;
  p = p * f + 0.5;
  p = p * f * f + f + 1.0;
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  double scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// phi(d) for |d| <= 1/2: the first term left out is 6e-18 of the first.
inline double series(double d) {
  double p = 1.0 / 1307674368000;
  p = p * -d + 1.0 / 87178291200;
  p = p * -d + 1.0 / 6227020800;
  p = p * -d + 1.0 / 479001600;
  p = p * -d + 1.0 / 39916800;
  p = p * -d + 1.0 / 3628800;
  p = p * -d + 1.0 / 362880;
  p = p * -d + 1.0 / 40320;
  p = p * -d + 1.0 / 5040;
  p = p * -d + 1.0 / 720;
  p = p * -d + 1.0 / 120;
  p = p * -d + 1.0 / 24;
  p = p * -d + 1.0 / 6;
  p = p * -d + 0.5;
  return p * d * d;
}

template <typename Term>
double total(int64_t first, int64_t last, const Term& term) {
  double lanes[kLanes] = {};
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += term(i + l);
  for (int64_t l = 0; i < last; ++i, ++l) lanes[l] += term(i);
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

// Variance of what `value` gives for the draws, which are at least two.
template <typename Value>
double variance(int64_t first, int64_t last, const Value& value) {
  const double draws = static_cast<double>(last - first);
  const double mean = total(first, last, value) / draws;
  return total(first, last, [&](int64_t i) { return (value(i) - mean) * (value(i) - mean); }) /
         (draws - 1);
}

// One thread's buffers, as long as a row.
struct Buffers {
  std::vector<double> x, w, d, growth, excess;
  explicit Buffers(int64_t n) : x(n), w(n), d(n), growth(n), excess(n) {}
};

// old, z: logits of the reference and of the candidate, kept ones first, then draws.
Found compare(const float* old, const float* z, double log_normalizer, double tail_mass,
              int64_t kept, int64_t n, Buffers& b) {
  const double first = static_cast<double>(old[0]) - z[0];
  double *__restrict x = b.x.data(), *__restrict w = b.w.data(), *__restrict d = b.d.data();
  double *__restrict growth = b.growth.data(), *__restrict excess = b.excess.data();
  const double share = tail_mass / static_cast<double>(n - kept);
  // By the likeliest id first: when it has all the mass, what it differs by is all there is.
  for (int64_t i = 0; i < n; ++i) x[i] = (static_cast<double>(old[i]) - z[i]) - first;
  for (int64_t i = 0; i < kept; ++i) {
    const double log_w = old[i] - log_normalizer;
    w[i] = log_w < -kExponent ? 0.0 : exponential(log_w);
  }
  std::fill(w + kept, w + n, share);
  const double mass = total(0, n, [=](int64_t i) { return w[i]; });
  const double mean = total(0, n, [=](int64_t i) { return w[i] * x[i]; }) / mass;
  for (int64_t i = 0; i < n; ++i) d[i] = x[i] - mean;
  for (int64_t i = 0; i < n; ++i) {
    const double bounded = std::abs(d[i]) > kTame ? 0.0 : d[i];
    const double whole = exponential(-bounded) - 1.0, near = series(bounded);
    const bool small = std::abs(bounded) < 0.5;
    growth[i] = small ? near - bounded : whole;
    excess[i] = small ? near : whole + bounded;
  }
  const double g = total(0, n, [=](int64_t i) { return w[i] * excess[i]; }) / mass, one = 1 + g;
  const double rho = tail_mass / mass, draws = static_cast<double>(n - kept);
  const double moved = variance(kept, n, [=](int64_t i) { return growth[i]; });
  const double psi = variance(kept, n, [=](int64_t i) { return excess[i] + g * d[i]; });
  Found found;
  found.kl = std::log1p(g) + rho * rho * moved / (2 * draws * one * one);
  found.error = rho * std::sqrt(psi) / one / std::sqrt(draws);
  found.far = total(0, n, [=](int64_t i) { return std::abs(d[i]) > kTame ? 1.0 : 0.0; });
  found.differences = total(0, n, [=](int64_t i) { return x[i] == 0 ? 0.0 : 1.0; });
  found.infinite = total(0, n, [=](int64_t i) { return std::abs(z[i]) > kLargest ? 1.0 : 0.0; });
  found.undefined = total(0, n, [=](int64_t i) { return z[i] == z[i] ? 0.0 : 1.0; });
  const int64_t five = std::min(kTop, n), three = std::min(kTop - 2, n);
  for (int64_t i = 0; i < five; ++i) {
    const double gap = static_cast<double>(old[i]) - z[i], size = gap == 0 ? 0.0 : std::abs(gap);
    found.five += size / five;
    if (i < three) found.three += size / three;
  }
  return found;
}

}  // namespace

// size: rows, ids kept per row, ids per row, threads.
extern "C" void sketch_sums(const float* old, const float* z, const double* log_normalizer,
                            const double* tail_mass, Found* found, const int64_t* size) {
  const int64_t kept = size[1], n = size[2];
  spread(size[0], size[3], [=](int64_t begin, int64_t end) {
    Buffers buffers(n);
    for (int64_t r = begin; r < end; ++r)
      found[r] = compare(old + r * n, z + r * n, log_normalizer[r], tail_mass[r], kept, n, buffers);
  });
}
