// A token's result: its slots' down rows, weighted and added in the order of the slots.
#pragma once
#include "config.h"

namespace weave {

// Eight elements times a weight, each rounded.
WEAVE_FN uint4 scaled(uint4 v, float weight) {
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack2<BF16>(unpack<BF16>((u16)words[i]) * weight, unpack<BF16>((u16)(words[i] >> 16)) * weight);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

constexpr u32 PIECE = 256;  // elements of a token that a warp adds at once, eight a lane

// y[token] = sum over slots, in slot order, of weight x row, then plus the residual, for features f .. f + 7 of each lane, below `end`. Lane
// j < top_k holds the row (NONE: skipped) and weight of slot j. One warp.
WEAVE_FN void sum_rows(const Launch& p, u32 token, u32 row, float weight, u32 f, u32 end) {
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  uint4 residual = make_uint4(0, 0, 0, 0);
  // On its way with the rows. Past the read-only path, since it may be where y goes: each lane reads what it will write.
  if (p.residual && f < end) residual = __ldcg((const uint4*)((const u16*)p.residual + (u64)token * p.hidden + f));
  for (u32 j0 = 0; j0 < p.top_k; j0 += 8) {
    uint4 part[8][ROWS_FP32 ? 2 : 1];
    float w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32 from = j0 + j < p.top_k ? j0 + j : 0;
      const u32 r = __shfl_sync(~0u, row, from);
      w[j] = __shfl_sync(~0u, weight, from);
      const bool use = j0 + j < p.top_k && r != NONE && f < end;
      if (!use) w[j] = 0.f;
#pragma unroll
      for (int q = 0; q < (ROWS_FP32 ? 2 : 1); ++q) {
        part[j][q] = make_uint4(0, 0, 0, 0);
        if (use) part[j][q] = __ldcg((const uint4*)((const char*)p.rows + ((u64)r * p.hidden + f) * (ROWS_FP32 ? 4 : 2)) + q);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32* v = (const u32*)part[j];
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        const float value = ROWS_FP32 ? __uint_as_float(v[q]) : unpack<BF16>((u16)(v[q / 2] >> (q % 2 ? 16 : 0)));
        sum[q] = fmaf(w[j], value, sum[q]);
      }
    }
  }
  if (p.residual) {
    const u32* v = (const u32*)&residual;
#pragma unroll
    for (int q = 0; q < 8; ++q) sum[q] += unpack<BF16>((u16)(v[q / 2] >> (q % 2 ? 16 : 0)));
  }
  if (f < end) {
    const uint4 y = make_uint4(pack2<BF16>(sum[0], sum[1]), pack2<BF16>(sum[2], sum[3]), pack2<BF16>(sum[4], sum[5]),
                               pack2<BF16>(sum[6], sum[7]));
    *(uint4*)((u16*)p.out + (u64)token * p.hidden + f) = y;
  }
}

}  // namespace weave
