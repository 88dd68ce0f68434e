// What a task computes: element types, dot products of a fixed order, activations. Plain loops, fp32 throughout.
//
// A dot product has 16 lanes: lane l adds the products of columns l, l + 16, ... in ascending order, then the lanes are
// added as a fixed tree. It is the same for one token as for four at a time, so a row's bits depend on nothing but the
// row. Products are rounded before they are added (built with -ffp-contract=off): a compiler that may fuse them does so in
// one copy of a loop and not in another, and then one token rounds differently from four.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "engine.h"
#include "../device/memory.h"

namespace weave {

constexpr int LANES = 16;

// Conversions by integer arithmetic: no half type is needed, subnormals survive a process that flushes them, and the
// loops over them vectorise. Narrowing rounds to nearest even and keeps NaN a NaN.
struct Bf16 {
  typedef uint16_t Element;
  typedef uint16_t Row;  // how a row of the down stage is kept
  static float widen(uint16_t h) { return float_of((uint32_t)h << 16); }
  static uint16_t narrow(float f) {
    const uint32_t bits = bits_of(f);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
  }
  static float widen_row(uint16_t h) { return widen(h); }
  static uint16_t narrow_row(float f) { return narrow(f); }
};
struct Fp16 {
  typedef uint16_t Element;
  typedef float Row;  // beyond fp16's range a row is still finite before it is weighted
  static float widen(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = (uint32_t)(h & 0x7fff) << 13;
    const uint32_t exponent = magnitude & 0x0f800000;
    const uint32_t normal = magnitude + (exponent == 0x0f800000 ? (255u - 31) << 23 : (127u - 15) << 23);
    // A subnormal's fraction as that of a number from 2^-14 up, less 2^-14.
    const uint32_t tiny = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
    return float_of(sign | (exponent ? normal : tiny));
  }
  static uint16_t narrow(float f) {
    const uint32_t bits = bits_of(f), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    // One ulp of a number from 0.5 to 1 is one unit of a subnormal half.
    const uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t half = magnitude >= 0x47800000 ? large : magnitude < 0x38800000 ? tiny : normal;
    return (uint16_t)((bits >> 16 & 0x8000) | half);
  }
  static float widen_row(float f) { return f; }
  static float narrow_row(float f) { return f; }
};
struct Fp32 {
  typedef float Element;
  typedef float Row;
  static float widen(float f) { return f; }
  static float narrow(float f) { return f; }
  static float widen_row(float f) { return f; }
  static float narrow_row(float f) { return f; }
};

inline int64_t lanes_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Columns [lo, hi) of a K range; ranges but the last are whole multiples of the lanes. May be empty.
struct Columns {
  int64_t lo, hi;
  int64_t padded() const { return lanes_up(hi - lo); }
};
inline Columns range_of(int64_t k, int64_t part, int64_t parts) {
  const int64_t units = lanes_up(k) / LANES;
  const int64_t lo = units * part / parts * LANES, hi = units * (part + 1) / parts * LANES;
  return Columns{lo < k ? lo : k, hi < k ? hi : k};
}

// `columns` of one row to fp32, with zeros up to a whole number of lanes: zero times zero adds nothing.
template <class T>
inline void widen_columns(const typename T::Element* row, const Columns& columns, float* out) {
  const int64_t n = columns.hi - columns.lo, padded = columns.padded();
  const typename T::Element* from = row + columns.lo;
  for (int64_t i = 0; i < n; ++i) out[i] = T::widen(from[i]);
  for (int64_t i = n; i < padded; ++i) out[i] = 0;
}

// As many lanes as a register holds: compilers spill vectors wider than the machine's.
#if defined(__AVX__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif
constexpr int REGISTERS = LANES / REGISTER_LANES;
typedef float Register __attribute__((vector_size(REGISTER_LANES * sizeof(float)), may_alias));

inline float add_lanes(const Register (&lanes)[REGISTERS]) {
  float sum[LANES];
  memcpy(sum, lanes, sizeof sum);
  for (int half = LANES / 2; half; half /= 2)
    for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
  return sum[0];
}

// out[t * out_stride] = weight . x[t] over n columns, for `Tokens` tokens at once so that a weight is loaded once for all
// of them. weight and x are aligned to the lanes, n and x_stride are whole numbers of lanes.
template <int Tokens>
inline void dots(const float* weight, const float* x, int64_t x_stride, int64_t n, float* out, int64_t out_stride) {
  Register sum[Tokens][REGISTERS] = {};
  for (int64_t k = 0; k < n; k += LANES)
    for (int r = 0; r < REGISTERS; ++r) {
      const int64_t at = k + r * REGISTER_LANES;
      const Register w = *reinterpret_cast<const Register*>(weight + at);
      for (int t = 0; t < Tokens; ++t) sum[t][r] += w * *reinterpret_cast<const Register*>(x + t * x_stride + at);
    }
  for (int t = 0; t < Tokens; ++t) out[t * out_stride] = add_lanes(sum[t]);
}
inline void dots(const float* weight, const float* x, int64_t x_stride, int64_t n, int tokens, float* out,
                 int64_t out_stride) {
  int t = 0;
  for (; t + 4 <= tokens; t += 4) dots<4>(weight, x + t * x_stride, x_stride, n, out + t * out_stride, out_stride);
  for (; t < tokens; ++t) dots<1>(weight, x + t * x_stride, x_stride, n, out + t * out_stride, out_stride);
}

struct ActivationRule {
  int32_t kind;
  float alpha, limit, up_offset;

  bool gated() const { return kind != WEAVE_RELU2; }
  float gate(float g) const {
    switch (kind) {
      case WEAVE_SILU: return g * (1 / (1 + expf(-alpha * g)));
      case WEAVE_GELU: return 0.5f * g * (1 + erff(g * 0.70710678f));
      default: return 0.5f * g * (1 + tanhf(0.79788456f * (g + 0.044715f * g * g * g)));
    }
  }
  // Comparisons are written so that NaN passes through.
  float gated_value(float g, float u) const {
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    return gate(g) * (u + up_offset);
  }
  static float relu2(float v) {
    const float positive = v < 0 ? 0 : v;
    return positive * positive;
  }
};

}  // namespace weave
