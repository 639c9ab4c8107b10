// The lens's products in 16-bit integers, every 32 inputs of a row or an id with a step of their
// own: see lens_words.h.
//
//     b(x) = s q     q = nearest(x / s)     s = max(largest |x| / 32767, |x|_2 / 46330)
//
// A block's sum of products is exact: by Cauchy and Schwarz it stays within (46330 + 2.83)^2, which
// is below 2^31 (rounding adds up to sqrt(32) / 2 to a norm). Sums of blocks are float32.
//
// A step is found in float64 and rounded to float32, so that nobody's order of summing shows in it.

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)

#include <cmath>

#include "lens_words.h"

namespace {

constexpr double kLargest = 32767.0;
constexpr double kNorm = 46330.0;
// Of blocks that are far smaller nothing is left: a step's inverse has to be a number.
constexpr float kSmallestStep = 0x1p-120f;

struct Int16 {
  // Not __m512i, which is of eight: g++ would convert at every step and keep the sums in memory.
  typedef int32_t Sums __attribute__((vector_size(64)));
  // The last word of a block is its step.
  static constexpr int64_t kBlockWords = kLanes + 1;

  // Inputs 16 apart share a word.
  static __m512i words_of(const Halves& x, __m512 inverse) {
    const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(x.low, inverse));
    const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(x.high, inverse));
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16));
  }

  static void pack_row(const Halves& x, uint32_t* out) {
    float values[kInputs];
    _mm512_storeu_ps(values, x.low);
    _mm512_storeu_ps(values + kLanes, x.high);
    double squares = 0, largest = 0;
    for (float value : values) {
      squares += static_cast<double>(value) * value;
      largest = std::max(largest, std::abs(static_cast<double>(value)));
    }
    // Ordered so that NaN stays.
    const double norm = std::sqrt(squares) / kNorm, wide = largest / kLargest;
    const float step = std::max(static_cast<float>(wide > norm ? wide : norm), kSmallestStep);
    _mm512_storeu_si512(out, words_of(x, _mm512_set1_ps(1.0f / step)));
    reinterpret_cast<float*>(out)[kLanes] = step;
  }

  static void pack_panel(const Halves* ids, uint32_t* out) {
    Halves turned[kLanes];
    turn_halves(ids, turned);
    const __m512 step = steps(turned), inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), step);
    for (int k = 0; k < kLanes; ++k)
      _mm512_storeu_si512(out + k * kPanel, words_of(turned[k], inverse));
    _mm512_storeu_ps(reinterpret_cast<float*>(out + kLanes * kPanel), step);
  }

  // Of 16 ids.
  static __m512 steps(const Halves* inputs) {
    __m512 largest = _mm512_setzero_ps();
    __m512d squares[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    for (int k = 0; k < kLanes; ++k)
      for (const __m512 x : {inputs[k].low, inputs[k].high}) {
        largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
        for (int half = 0; half < 2; ++half) {
          const __m512d wide = wide_half(x, half);
          squares[half] = _mm512_fmadd_pd(wide, wide, squares[half]);
        }
      }
    __m256 step[2];
    for (int half = 0; half < 2; ++half) {
      const __m512d norm = _mm512_div_pd(_mm512_sqrt_pd(squares[half]), _mm512_set1_pd(kNorm));
      const __m512d wide = _mm512_div_pd(wide_half(largest, half), _mm512_set1_pd(kLargest));
      step[half] = _mm512_cvtpd_ps(_mm512_max_pd(wide, norm));  // of NaN and a number the second
    }
    const __m512 both = _mm512_insertf32x8(_mm512_castps256_ps512(step[0]), step[1], 1);
    return _mm512_max_ps(_mm512_set1_ps(kSmallestStep), both);
  }

  static __m512d wide_half(__m512 x, int half) {
    return _mm512_cvtps_pd(half ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x));
  }

  static Sums add(Sums sums, __m512i w, __m512i x) {
    return (Sums)_mm512_dpwssd_epi32((__m512i)sums, w, x);
  }

  static void multiply(const uint32_t* rows, int64_t blocks, const uint32_t* panel, float* out) {
    std::fill(out, out + kRows * kPanel, 0.0f);
    const int64_t words = blocks * kBlockWords;
    for (int64_t b = 0; b < blocks; ++b, rows += kBlockWords, panel += kBlockWords * kPanel)
      add_block(rows, words, panel, out);
  }

  static void add_block(const uint32_t* rows, int64_t words, const uint32_t* panel, float* out) {
    Sums sums[kRows][kGroups];
    sum_words<Int16>(rows, words, panel, kLanes, sums);
    const float* of_ids = reinterpret_cast<const float*>(panel + kLanes * kPanel);
    const float* of_rows = reinterpret_cast<const float*>(rows + kLanes);
    for (int r = 0; r < kRows; ++r)
      for (int g = 0; g < kGroups; ++g) {
        float* at = out + r * kPanel + g * kLanes;
        const __m512 step = _mm512_mul_ps(_mm512_set1_ps(of_rows[r * words]),
                                          _mm512_loadu_ps(of_ids + g * kLanes));
        const __m512 sum = _mm512_cvtepi32_ps((__m512i)sums[r][g]);
        _mm512_storeu_ps(at, _mm512_fmadd_ps(sum, step, _mm512_loadu_ps(at)));
      }
  }
};

}  // namespace

extern "C" void lens_int16_rows(const float* h, const float* other, const Size* size,
                                uint32_t* out) {
  pack_rows<Int16>(h, other, *size, out);
}

extern "C" void lens_int16_products(const uint32_t* rows, const float* weight, const Size* size,
                                    float* out, uint32_t* scratch) {
  products_of<Int16>(rows, weight, *size, out, scratch);
}

#endif
