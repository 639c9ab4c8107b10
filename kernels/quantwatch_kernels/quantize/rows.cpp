// Row-wise quantization to int8 and the way back, each in one pass over memory.
//
// The rules are those of row_codes.py: scale = absmax / 127, code = x / scale with halves to even,
// a row of zeros has scale 1, a row with a NaN or an infinity has scale NaN and codes 0. Built
// without fast-math and without contraction into fused multiply-adds, so that the results are
// those of the torch operators bit for bit.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

template <class To, class From>
inline To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &value, sizeof out);
  return out;
}

inline float widen(float x) { return x; }
inline float widen(uint16_t bfloat16) { return bits_of<float>(uint32_t{bfloat16} << 16); }

// Without its sign a float compares like its bits as an integer, and NaN is above infinity.
inline float magnitude(const float* x, int64_t columns) {
  int32_t largest = 0;
  for (int64_t k = 0; k < columns; ++k) {
    const int32_t each = bits_of<int32_t>(x[k]) & 0x7fffffff;
    largest = each > largest ? each : largest;
  }
  return bits_of<float>(largest);
}

inline float magnitude(const uint16_t* x, int64_t columns) {
  uint16_t largest = 0;
  for (int64_t k = 0; k < columns; ++k) {
    const uint16_t each = x[k] & 0x7fff;
    largest = each > largest ? each : largest;
  }
  return widen(largest);
}

// Adding 1.5·2^23 leaves the integer, rounded half to even, in the lowest bits of the mantissa.
inline int8_t code_of(float steps) {
  return static_cast<int8_t>(bits_of<int32_t>(steps + 12582912.0f));
}

template <class Input>
void quantize(const Input* x, int64_t rows, int64_t columns, int8_t* codes, float* scales) {
  for (int64_t m = 0; m < rows; ++m, x += columns, codes += columns) {
    float scale = magnitude(x, columns) / 127.0f;
    if (!std::isfinite(scale)) {
      scales[m] = std::numeric_limits<float>::quiet_NaN();
      std::memset(codes, 0, columns);
      continue;
    }
    if (scale == 0.0f) scale = 1.0f;
    scales[m] = scale;
    if (scale >= std::numeric_limits<float>::min()) {
      for (int64_t k = 0; k < columns; ++k) codes[k] = code_of(widen(x[k]) / scale);
      continue;
    }
    // A subnormal scale is coarse: the largest value may be 190 steps away.
    for (int64_t k = 0; k < columns; ++k) {
      codes[k] = code_of(std::fmin(std::fmax(widen(x[k]) / scale, -127.0f), 127.0f));
    }
  }
}

inline void store(float value, float* out) { *out = value; }
inline void store(float value, uint16_t* out) {
  const uint32_t bits = bits_of<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *out = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

template <bool has_bias, class Output>
void rescale(const int32_t* sums, const float* row_scales, const float* scales, const float* bias,
             int64_t rows, int64_t columns, Output* y) {
  for (int64_t m = 0; m < rows; ++m, sums += columns, y += columns) {
    const float row = row_scales[m];
    for (int64_t n = 0; n < columns; ++n) {
      float value = static_cast<float>(sums[n]) * scales[n] * row;
      if (has_bias) value += bias[n];
      store(value, y + n);
    }
  }
}

}  // namespace

extern "C" {

void quantize_float32(const float* x, int64_t rows, int64_t columns, int8_t* codes,
                      float* scales) {
  quantize(x, rows, columns, codes, scales);
}

void quantize_bfloat16(const uint16_t* x, int64_t rows, int64_t columns, int8_t* codes,
                       float* scales) {
  quantize(x, rows, columns, codes, scales);
}

// bias may be null.
void rescale_float32(const int32_t* sums, const float* row_scales, const float* scales,
                     const float* bias, int64_t rows, int64_t columns, float* y) {
  (bias ? rescale<true, float> : rescale<false, float>)(sums, row_scales, scales, bias, rows,
                                                        columns, y);
}

void rescale_bfloat16(const int32_t* sums, const float* row_scales, const float* scales,
                      const float* bias, int64_t rows, int64_t columns, uint16_t* y) {
  (bias ? rescale<true, uint16_t> : rescale<false, uint16_t>)(sums, row_scales, scales, bias, rows,
                                                              columns, y);
}

}  // extern "C"
