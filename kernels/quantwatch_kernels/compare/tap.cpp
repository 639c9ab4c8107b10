// Norms of two hidden states and of their difference, and the second one's extremes: one pass.
//
// Squares are summed in float64, in lanes that are halved at the end whatever else is in the
// batch: a row's numbers depend on the row alone.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "spread.h"

namespace {

constexpr int64_t kLanes = 16;

struct Bfloat16 {
  uint16_t bits;
};

inline float value(float x) { return x; }

inline float value(Bfloat16 x) {
  union { uint32_t bits; float value; } wide;
  wide.bits = static_cast<uint32_t>(x.bits) << 16;
  return wide.value;
}

struct Lanes {
  double reference[kLanes] = {}, difference[kLanes] = {}, candidate[kLanes] = {};
  float largest[kLanes], smallest[kLanes], odd[kLanes] = {};
  Lanes() {
    std::fill(largest, largest + kLanes, -std::numeric_limits<float>::infinity());
    std::fill(smallest, smallest + kLanes, std::numeric_limits<float>::infinity());
  }
};

inline void add(Lanes& lanes, int64_t l, float h, float other) {
  const double a = h, b = other, gap = a - b;
  lanes.reference[l] += a * a;
  lanes.difference[l] += gap * gap;
  lanes.candidate[l] += b * b;
  lanes.largest[l] = other > lanes.largest[l] ? other : lanes.largest[l];
  lanes.smallest[l] = other < lanes.smallest[l] ? other : lanes.smallest[l];
  lanes.odd[l] += other == other ? 0.0f : 1.0f;
}

double norm(double* squares) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) squares[l] += squares[l + half];
  return std::sqrt(squares[0]);
}

// found: what `TapNorms` has, from one number to the next `stride` further.
template <typename Other>
void compare(const float* h, const Other* other, int64_t width, double* found, int64_t stride) {
  Lanes lanes;
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) add(lanes, l, h[j + l], value(other[j + l]));
  for (int64_t l = 0; j < width; ++j, ++l) add(lanes, l, h[j], value(other[j]));
  const bool defined = std::all_of(lanes.odd, lanes.odd + kLanes, [](float n) { return n == 0; });
  const double nan = std::numeric_limits<double>::quiet_NaN();
  found[0] = norm(lanes.reference);
  found[stride] = norm(lanes.difference);
  found[2 * stride] = norm(lanes.candidate);
  found[3 * stride] = defined ? *std::max_element(lanes.largest, lanes.largest + kLanes) : nan;
  found[4 * stride] = defined ? *std::min_element(lanes.smallest, lanes.smallest + kLanes) : nan;
}

// size: rows, width, numbers from one row to the next of either side, threads.
template <typename Other>
void norms(const float* h, const Other* other, double* found, const int64_t* size) {
  const int64_t rows = size[0], width = size[1], step = size[2], other_step = size[3];
  spread(rows, size[4], [=](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      compare(h + r * step, other + r * other_step, width, found + r, rows);
  });
}

}  // namespace

extern "C" void tap_norms_float32(const float* h, const float* other, double* found,
                                  const int64_t* size) {
  norms(h, other, found, size);
}

extern "C" void tap_norms_bfloat16(const float* h, const Bfloat16* other, double* found,
                                   const int64_t* size) {
  norms(h, other, found, size);
}
