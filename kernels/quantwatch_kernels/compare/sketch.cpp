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

constexpr int64_t kLanes = 16;
constexpr int64_t kSums = 4;
constexpr int64_t kLine = 64;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef float Eight __attribute__((vector_size(kLanes * 2)));
typedef float Four __attribute__((vector_size(kLanes)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

struct Bfloat16 {
  uint16_t bits;
};

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load(const Bfloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words bits = __builtin_convertvector(halves, Words) << 16;
  Floats values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
}

// The first half of the lanes and the second, added.
template <typename Half, typename Whole>
inline Half halved(const Whole& x) {
  static_assert(sizeof(Whole) == 2 * sizeof(Half), "half as many lanes");
  Half parts[2];
  std::memcpy(parts, &x, sizeof x);
  return parts[0] + parts[1];
}

// Halved until one lane is left, in registers: through memory that takes as long as the rest.
inline float sum(const Floats& x) {
  const Four four = halved<Four>(halved<Eight>(x));
  return (four[0] + four[2]) + (four[1] + four[3]);
}

template <typename T>
float dot(const T* w, const T* h, int64_t width, const T* next) {
  constexpr int64_t step = kSums * kLanes;
  Floats sums[kSums] = {};
  int64_t j = 0;
  for (; j + step <= width; j += step) {
    for (int64_t k = 0; k < step; k += kLine / static_cast<int64_t>(sizeof(T)))
      __builtin_prefetch(next + j + k);
    for (int64_t s = 0; s < kSums; ++s)
      sums[s] += load(w + j + s * kLanes) * load(h + j + s * kLanes);
  }
  if (j < width) {  // as long a row, with zeros
    T rest[2][step] = {};
    std::copy(w + j, w + width, rest[0]);
    std::copy(h + j, h + width, rest[1]);
    for (int64_t s = 0; s < kSums; ++s)
      sums[s] += load(rest[0] + s * kLanes) * load(rest[1] + s * kLanes);
  }
  return sum((sums[0] + sums[2]) + (sums[1] + sums[3]));
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
