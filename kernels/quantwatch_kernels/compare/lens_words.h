// Both models' products with some ids of one head, with 32-bit sums.
//
//     z = b(h) b(W)     d = b(h' - h) b(W)     b rounds factors as a `Format` says
//
// z' = z + d. Done one by one, both models' products would have errors, of rounded factors or of
// sums, that are as large as what two good models differ by. Here both share the error of z, of
// which a KL sees little, and that of the difference is relative to itself.
//
// A word is what one lane multiplies at once: a factor of 32 bits, or two of 16. Widths are done in
// blocks of 32 inputs, `Format::kBlockWords` words. Ids come in panels of 48, turned so that the
// same word of 16 of them lies side by side. A panel is turned once per call; while it is
// multiplied with all rows, eight at a time, the next one is fetched. Every sum goes along the
// width in the same order, so a row's products don't depend on its company.
//
// A format's `pack_row` makes one block of a row, its `pack_panel` one of 16 ids, which it turns;
// its `add` adds the products of two words to `Sums`, and its `multiply` has those of eight rows
// and a panel.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "spread.h"

constexpr int64_t kLanes = 16;
constexpr int64_t kInputs = 2 * kLanes;
constexpr int kGroups = 3;
constexpr int64_t kPanel = kGroups * kLanes;
constexpr int kRows = 8;

// What Python writes, too: see `products` in lens_words_native.py.
struct Size {
  int64_t rows, ids, width, weight_stride, out_stride, threads;

  int64_t blocks() const { return (width + kInputs - 1) / kInputs; }
  int64_t padded() const { return (2 * rows + kRows - 1) / kRows * kRows; }
};

// 32 inputs of a row or of as many ids as there are lanes, in two halves.
struct Halves {
  __m512 low, high;
};

inline __mmask16 mask_of(int64_t count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xffff : (1 << std::max<int64_t>(count, 0)) - 1);
}

inline __m512 part(const float* x, int64_t count) {
  return _mm512_maskz_loadu_ps(mask_of(count), x);
}

inline Halves halves(const float* x, int64_t count) {
  return {part(x, count), part(x + kLanes, count - kLanes)};
}

// 16 rows of 16 words each become 16 columns.
inline void turn(const __m512i* in, __m512i* out) {
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
    out[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    out[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
  }
}

// 32 inputs of 16 ids become those ids' inputs one by one: `low` has the first 16.
inline void turn_halves(const Halves* ids, Halves* inputs) {
  __m512i words[kLanes];
  for (int i = 0; i < kLanes; ++i) words[i] = _mm512_castps_si512(ids[i].low);
  turn(words, words);
  for (int k = 0; k < kLanes; ++k) inputs[k].low = _mm512_castsi512_ps(words[k]);
  for (int i = 0; i < kLanes; ++i) words[i] = _mm512_castps_si512(ids[i].high);
  turn(words, words);
  for (int k = 0; k < kLanes; ++k) inputs[k].high = _mm512_castsi512_ps(words[k]);
}

// Products of eight rows, `stride` words apart, and a panel, over so many words of their width.
template <typename Format>
inline void sum_words(const uint32_t* rows, int64_t stride, const uint32_t* panel, int64_t words,
                      typename Format::Sums (&sums)[kRows][kGroups]) {
  for (int r = 0; r < kRows; ++r)
    for (int g = 0; g < kGroups; ++g) sums[r][g] = typename Format::Sums{};
  for (int64_t k = 0; k < words; ++k) {
    __m512i w[kGroups];
    for (int g = 0; g < kGroups; ++g) w[g] = _mm512_loadu_si512(panel + k * kPanel + g * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const __m512i x = _mm512_set1_epi32(static_cast<int>(rows[r * stride + k]));
      for (int g = 0; g < kGroups; ++g) sums[r][g] = Format::add(sums[r][g], w[g], x);
    }
  }
}

// Products of eight rows and a panel, of a format whose sums are float32: in parts of 256 inputs,
// since the rounding of one long sum grows with it.
template <typename Format>
inline void multiply_floats(const uint32_t* rows, int64_t blocks, const uint32_t* panel,
                            float* out) {
  constexpr int64_t kPart = 8;
  const int64_t words = blocks * Format::kBlockWords;
  std::fill(out, out + kRows * kPanel, 0.0f);
  for (int64_t b = 0; b < blocks; b += kPart) {
    const int64_t first = b * Format::kBlockWords;
    const int64_t part = std::min(kPart, blocks - b) * Format::kBlockWords;
    __m512 sums[kRows][kGroups];
    sum_words<Format>(rows + first, words, panel + first * kPanel, part, sums);
    for (int r = 0; r < kRows; ++r)
      for (int g = 0; g < kGroups; ++g) {
        float* at = out + r * kPanel + g * kLanes;
        _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), sums[r][g]));
      }
  }
}

// A panel's products to where they belong.
inline void hand_on(const float* products, int64_t ids, const Size& size, float* out) {
  for (int64_t r = 0; r < 2 * size.rows; ++r, products += kPanel, out += size.out_stride)
    for (int64_t g = 0; g < ids; g += kLanes)
      _mm512_mask_storeu_ps(out + g, mask_of(ids - g), _mm512_loadu_ps(products + g));
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

// Up to 48 ids of a weight, in words and turned; zeros beyond what there is.
template <typename Format>
void pack_panel(const float* weight, int64_t ids, const Size& size, uint32_t* out) {
  for (int64_t b = 0; b < size.blocks(); ++b, out += Format::kBlockWords * kPanel)
    for (int g = 0; g < kGroups; ++g) {
      Halves rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t id = g * kLanes + i, at = id * size.weight_stride + b * kInputs;
        rows[i] = id < ids ? halves(weight + at, size.width - b * kInputs) : Halves{};
      }
      Format::pack_panel(rows, out + g * kLanes);
    }
}

// Panels first ... last - 1 of all rows; `panel` and `products` are this thread's own.
template <typename Format>
void multiply(const uint32_t* rows, const float* weight, const Size& size, float* out,
              uint32_t* panel, float* products, int64_t first, int64_t last) {
  const auto row_of = [&](int64_t p) {
    return weight + std::min(p * kPanel, size.ids) * size.weight_stride;
  };
  const int64_t words = size.blocks() * Format::kBlockWords;
  for (int64_t p = first; p < last; ++p) {
    const int64_t ids = std::min(kPanel, size.ids - p * kPanel);
    Ahead ahead(row_of(p + 1), row_of(p + 2), size.padded() / kRows);
    pack_panel<Format>(row_of(p), ids, size, panel);
    for (int64_t r = 0; r < size.padded(); r += kRows) {
      ahead.fetch();
      Format::multiply(rows + r * words, size.blocks(), panel, products + r * kPanel);
    }
    hand_on(products, ids, size, out + p * kPanel);
  }
}

// Rows of both models [rows, width] → words [padded, words]: the reference's, the differences.
template <typename Format>
void pack_rows(const float* h, const float* other, const Size& size, uint32_t* out) {
  const int64_t width = size.width, words = size.blocks() * Format::kBlockWords;
  std::fill(out, out + size.padded() * words, 0u);
  for (int64_t r = 0; r < size.rows; ++r)
    for (int64_t b = 0; b < size.blocks(); ++b) {
      const int64_t at = r * width + b * kInputs, left = width - b * kInputs;
      const Halves x = halves(h + at, left), y = halves(other + at, left);
      uint32_t* words_of = out + r * words + b * Format::kBlockWords;
      Format::pack_row(x, words_of);
      Format::pack_row({_mm512_sub_ps(y.low, x.low), _mm512_sub_ps(y.high, x.high)},
                       words_of + size.rows * words);
    }
}

// `scratch` has (words + padded) * 48 words for each thread, `out` is z, then d, [2 rows, ids].
template <typename Format>
void products_of(const uint32_t* rows, const float* weight, const Size& size, float* out,
                 uint32_t* scratch) {
  if (size.rows < 1) return;
  const int64_t words = size.blocks() * Format::kBlockWords;
  const int64_t panels = (size.ids + kPanel - 1) / kPanel;
  const int64_t each = (panels + size.threads - 1) / size.threads;  // as `spread` parts them
  spread(panels, size.threads, [=](int64_t first, int64_t last) {
    uint32_t* panel = scratch + first / each * (words + size.padded()) * kPanel;
    float* products = reinterpret_cast<float*>(panel + words * kPanel);
    multiply<Format>(rows, weight, size, out, panel, products, first, last);
  });
}
