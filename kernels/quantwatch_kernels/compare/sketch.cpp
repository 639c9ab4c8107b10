// A few rows of a head times hidden states: out[r][i] = weight[ids[r][i]] . h[r].
//
// What costs is fetching rows of the head, not multiplying them. The lines of the next row are
// asked for while one is multiplied. A product depends on its two rows alone: equal hidden states
// give equal bits, in whatever company they come.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "spread.h"

namespace {

constexpr int64_t kLanes = 64;
constexpr int64_t kLine = 64;

inline float widen(float x) { return x; }

struct Bfloat16 {
  uint16_t bits;
};

inline float widen(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
float dot(const T* w, const T* h, int64_t width, const T* next) {
  float sums[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) {
    for (int64_t k = 0; k < kLanes * static_cast<int64_t>(sizeof(T)); k += kLine)
      __builtin_prefetch(reinterpret_cast<const char*>(next + j) + k);
    for (int64_t l = 0; l < kLanes; ++l) sums[l] += widen(w[j + l]) * widen(h[j + l]);
  }
  for (int64_t l = 0; j < width; ++j, ++l) sums[l] += widen(w[j]) * widen(h[j]);
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) sums[l] += sums[l + half];
  return sums[0];
}

template <typename T>
void share(const T* h, const int32_t* ids, const T* weight, float* out, const int64_t* size,
           int64_t first, int64_t last) {
  const int64_t count = size[1], width = size[2], stride = size[3];
  for (int64_t r = first; r < last; ++r)
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = r * count + i, end = last * count - 1;
      const T* next = weight + ids[std::min(at + 1, end)] * stride;
      out[at] = dot(weight + ids[at] * stride, h + r * width, width, next);
    }
}

}  // namespace

// size: rows, ids per row, hidden width, floats from one row of the weight to the next, threads.
extern "C" void head_rows_float32(const float* h, const int32_t* ids, const float* weight,
                                  float* out, const int64_t* size) {
  spread(size[0], size[4], [=](int64_t first, int64_t last) {
    share(h, ids, weight, out, size, first, last);
  });
}

extern "C" void head_rows_bfloat16(const Bfloat16* h, const int32_t* ids, const Bfloat16* weight,
                                   float* out, const int64_t* size) {
  spread(size[0], size[4], [=](int64_t first, int64_t last) {
    share(h, ids, weight, out, size, first, last);
  });
}
