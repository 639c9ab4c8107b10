// The lens's products with both factors rounded to bfloat16, summed in float32: see lens_words.h.

#if defined(__AVX512F__) && defined(__AVX512BF16__)

#include "lens_words.h"

namespace {

struct Bfloat16 {
  using Sums = __m512;
  static constexpr int64_t kBlockWords = kLanes;

  // Neighbouring inputs share a word.
  static __m512i rounded(const Halves& x) { return (__m512i)_mm512_cvtne2ps_pbh(x.high, x.low); }

  static void pack_row(const Halves& x, uint32_t* out) { _mm512_storeu_si512(out, rounded(x)); }

  static void pack_panel(const Halves* ids, uint32_t* out) {
    __m512i words[kLanes], turned[kLanes];
    for (int i = 0; i < kLanes; ++i) words[i] = rounded(ids[i]);
    turn(words, turned);
    for (int k = 0; k < kLanes; ++k) _mm512_storeu_si512(out + k * kPanel, turned[k]);
  }

  static Sums add(Sums sums, __m512i w, __m512i x) {
    return _mm512_dpbf16_ps(sums, (__m512bh)w, (__m512bh)x);
  }

  static void multiply(const uint32_t* rows, int64_t blocks, const uint32_t* panel, float* out) {
    multiply_floats<Bfloat16>(rows, blocks, panel, out);
  }
};

}  // namespace

extern "C" void lens_bfloat16_rows(const float* h, const float* other, const Size* size,
                                   uint32_t* out) {
  pack_rows<Bfloat16>(h, other, *size, out);
}

extern "C" void lens_bfloat16_products(const uint32_t* rows, const float* weight, const Size* size,
                                       float* out, uint32_t* scratch) {
  products_of<Bfloat16>(rows, weight, *size, out, scratch);
}

#endif
