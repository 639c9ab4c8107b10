// The lens's products in float32: see lens_words.h.
//
// Nothing is rounded but the sums. Those of the difference are small where it is, so what two good
// models differ by isn't lost in the rounding of two large logits.

#if defined(__AVX512F__)

#include "lens_words.h"

namespace {

struct Float32 {
  using Sums = __m512;
  static constexpr int64_t kBlockWords = kInputs;

  static void pack_row(const Halves& x, uint32_t* out) {
    _mm512_storeu_ps(out, x.low);
    _mm512_storeu_ps(out + kLanes, x.high);
  }

  static void pack_panel(const Halves* ids, uint32_t* out) {
    Halves turned[kLanes];
    turn_halves(ids, turned);
    for (int k = 0; k < kLanes; ++k) {
      _mm512_storeu_ps(out + k * kPanel, turned[k].low);
      _mm512_storeu_ps(out + (k + kLanes) * kPanel, turned[k].high);
    }
  }

  static Sums add(Sums sums, __m512i w, __m512i x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sums);
  }

  static void multiply(const uint32_t* rows, int64_t blocks, const uint32_t* panel, float* out) {
    multiply_floats<Float32>(rows, blocks, panel, out);
  }
};

}  // namespace

extern "C" void lens_float32_rows(const float* h, const float* other, const Size* size,
                                  uint32_t* out) {
  pack_rows<Float32>(h, other, *size, out);
}

extern "C" void lens_float32_products(const uint32_t* rows, const float* weight, const Size* size,
                                      float* out, uint32_t* scratch) {
  products_of<Float32>(rows, weight, *size, out, scratch);
}

#endif
