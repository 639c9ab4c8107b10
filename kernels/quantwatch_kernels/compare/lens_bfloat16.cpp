// Both models' products with some ids of one head, in bfloat16 with float32 sums.
//
//     z = b(h) b(W)     z' = z + b(h' - h) b(W)     b rounds to bfloat16
//
// Rounded one by one, both models' states would put errors into z and z' that are as large as what
// two good models differ by. Here both share the error of z, of which a KL sees little, and the
// difference is rounded relative to itself.
//
// A word is what one lane multiplies at once: two neighbouring bfloat16. Ids come in panels of 48,
// turned so that the same word of 16 of them lies side by side. A panel is turned once per call,
// while it is multiplied with all rows, eight at a time, the next one is fetched. Every sum goes
// along the width in the same order, so a row's products don't depend on its company.

#if defined(__AVX512F__) && defined(__AVX512BF16__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "spread.h"

namespace {

constexpr int64_t kLanes = 16;
constexpr int kGroups = 3;
constexpr int64_t kPanel = kGroups * kLanes;
constexpr int kRows = 8;
constexpr int64_t kPerWord = 2;

// What Python writes, too: see `_SIZE` in lens_bfloat16_native.py.
struct Size {
  int64_t rows, ids, width, weight_stride, out_stride, threads;

  int64_t words() const { return (width + 2 * kLanes - 1) / (2 * kLanes) * kLanes; }
  int64_t padded() const { return (2 * rows + kRows - 1) / kRows * kRows; }
};

__mmask16 mask_of(int64_t count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xffff : (1 << std::max<int64_t>(count, 0)) - 1);
}

__m512 part(const float* x, int64_t count) { return _mm512_maskz_loadu_ps(mask_of(count), x); }

__m512i words_of(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

__m512i rounded(const float* x, int64_t count) {
  return words_of(part(x, count), part(x + kLanes, count - kLanes));
}

__m512i rounded_difference(const float* x, const float* y, int64_t count) {
  const int64_t rest = count - kLanes;
  return words_of(_mm512_sub_ps(part(x, count), part(y, count)),
                  _mm512_sub_ps(part(x + kLanes, rest), part(y + kLanes, rest)));
}

// 16 rows of 16 words each become 16 columns.
void turn(const __m512i* in, uint32_t* out) {
  __m512i a[kLanes], b[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    _mm512_storeu_si512(out + i * kPanel, _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88));
    _mm512_storeu_si512(out + (i + 8) * kPanel, _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd));
  }
}

// Up to 48 ids of a weight, rounded and turned; zeros beyond what there is.
void pack_panel(const float* weight, int64_t ids, const Size& size, uint32_t* out) {
  for (int64_t k = 0; k < size.words(); k += kLanes)
    for (int g = 0; g < kGroups; ++g) {
      __m512i rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t id = g * kLanes + i, at = id * size.weight_stride + k * kPerWord;
        rows[i] = id < ids ? rounded(weight + at, size.width - k * kPerWord)
                           : _mm512_setzero_si512();
      }
      turn(rows, out + k * kPanel + g * kLanes);
    }
}

// Eight rows times a panel.
void multiply_tile(const uint32_t* rows, int64_t words, const uint32_t* panel, float* out) {
  __m512 sums[kRows][kGroups];
  for (int r = 0; r < kRows; ++r)
    for (int g = 0; g < kGroups; ++g) sums[r][g] = _mm512_setzero_ps();
  for (int64_t k = 0; k < words; ++k) {
    __m512i w[kGroups];
    for (int g = 0; g < kGroups; ++g) w[g] = _mm512_loadu_si512(panel + k * kPanel + g * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const __m512i x = _mm512_set1_epi32(static_cast<int>(rows[r * words + k]));
      for (int g = 0; g < kGroups; ++g)
        sums[r][g] = _mm512_dpbf16_ps(sums[r][g], (__m512bh)w[g], (__m512bh)x);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int g = 0; g < kGroups; ++g)
      _mm512_storeu_ps(out + r * kPanel + g * kLanes, sums[r][g]);
}

// A panel's products to where they belong; differences are added to their references.
void hand_on(const float* products, int64_t ids, const Size& size, float* out) {
  const int64_t away = size.rows * size.out_stride;
  for (int64_t r = 0; r < size.rows; ++r, products += kPanel, out += size.out_stride)
    for (int64_t g = 0; g < ids; g += kLanes) {
      const __m512 z = _mm512_loadu_ps(products + g);
      const __m512 difference = _mm512_loadu_ps(products + size.rows * kPanel + g);
      _mm512_mask_storeu_ps(out + g, mask_of(ids - g), z);
      _mm512_mask_storeu_ps(out + away + g, mask_of(ids - g), _mm512_add_ps(z, difference));
    }
}

// Lines of the weight that are fetched little by little while something else is done.
struct Ahead {
  const float *next, *end;
  int64_t share;

  Ahead(const float* first, const float* last, int64_t parts)
      : next(first), end(last), share(((last - first) / parts + kLanes) / kLanes * kLanes) {}

  void fetch() {
    const float* stop = std::min(next + share, end);
    for (; next < stop; next += kLanes) __builtin_prefetch(next, 0, 2);
  }
};

// Panels first ... last - 1 of all rows; `panel` and `products` are this thread's own.
void multiply(const uint32_t* rows, const float* weight, const Size& size, float* out,
              uint32_t* panel, float* products, int64_t first, int64_t last) {
  const auto row_of = [&](int64_t p) {
    return weight + std::min(p * kPanel, size.ids) * size.weight_stride;
  };
  const int64_t words = size.words();
  for (int64_t p = first; p < last; ++p) {
    const int64_t ids = std::min(kPanel, size.ids - p * kPanel);
    Ahead ahead(row_of(p + 1), row_of(p + 2), size.padded() / kRows);
    pack_panel(row_of(p), ids, size, panel);
    for (int64_t r = 0; r < size.padded(); r += kRows) {
      ahead.fetch();
      multiply_tile(rows + r * words, words, panel, products + r * kPanel);
    }
    hand_on(products, ids, size, out + p * kPanel);
  }
}

}  // namespace

// Rows of both models [rows, width] → words [padded, words]: the reference's, the differences.
extern "C" void lens_bfloat16_rows(const float* h, const float* other, const Size* size,
                                   uint32_t* out) {
  const int64_t words = size->words(), width = size->width, rows = size->rows;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < words; k += kLanes) {
      const int64_t at = r * width + k * kPerWord, left = width - k * kPerWord;
      _mm512_storeu_si512(out + r * words + k, rounded(h + at, left));
      _mm512_storeu_si512(out + (rows + r) * words + k,
                          rounded_difference(other + at, h + at, left));
    }
  std::fill(out + 2 * rows * words, out + size->padded() * words, 0u);
}

// `scratch` has (words + padded) * 48 words for each thread, `out` is [2 rows, ids].
extern "C" void lens_bfloat16_products(const uint32_t* rows, const float* weight, const Size* size,
                                       float* out, uint32_t* scratch) {
  const Size all = *size;
  if (all.rows < 1) return;
  const int64_t panels = (all.ids + kPanel - 1) / kPanel;
  const int64_t each = (panels + all.threads - 1) / all.threads;  // as `spread` parts them
  spread(panels, all.threads, [=](int64_t first, int64_t last) {
    if (first >= last) return;
    uint32_t* panel = scratch + first / each * (all.words() + all.padded()) * kPanel;
    float* products = reinterpret_cast<float*>(panel + all.words() * kPanel);
    multiply(rows, weight, all, out, panel, products, first, last);
  });
}

#endif
