// Results of a tile with many tokens: consumers write them to shared memory, a slot at a time, and a warp of their own
// stores them by TMA, so that no consumer waits for memory.
//
// A slot holds 128 tokens x 32 elements of a gated tile (64 bytes a token, 64-byte swizzle) or 64 tokens x 64 elements
// (128 bytes, 128-byte swizzle). Groups own as many rows as their width, so all of a slot is stored.
#pragma once
#include "trace.h"

namespace weave {

constexpr int SLOT_TOKENS_GATED = STAGING_SLOT_BYTES / 64, SLOT_TOKENS = STAGING_SLOT_BYTES / 128;

// `pair(j)`: two tokens of one element, packed, for the warp's j-th 8 x 8 matrix. Tokens are the columns of a matrix. Of a
// gated tile a warp has one matrix (8 elements) for 8 tokens, else two. All warps of the warpgroup call.
template <int N, bool HALF, class Pair>
WEAVE_FN bool stage_tile(const Block& b, Cursor& slots, u32 warpgroup, u32 warp, u32 lane, const Pair& pair) {
  constexpr int TOKENS = HALF ? SLOT_TOKENS_GATED : SLOT_TOKENS, PER_TOKENS = HALF ? 1 : 2;
  bool ok = true;
#pragma unroll
  for (int first = 0; first < N; first += TOKENS) {
    constexpr int MOST = N < TOKENS ? N : TOKENS;
    const int tokens = N - first < MOST ? N - first : MOST;
    ok &= b.wait(&b.s.drained[warpgroup][slots.slot], slots.phase ^ 1);
    const u32 at = smem_address(b.staging(warpgroup, slots.slot));
    const int matrices = tokens / 8 * PER_TOKENS, base = first / 8 * PER_TOKENS;
#pragma unroll
    for (int m = 0; m < MOST / 8 * PER_TOKENS; m += 4) {
      if (m >= matrices) break;
      // Lane 8 q + r: row r of matrix m + q.
      const int q = m + (int)(lane / 8);
      const u32 token = (HALF ? q : q / 2) * 8 + lane % 8;
      const u32 piece = HALF ? warp ^ ((token >> 1) & 3) : (warp * 2 + (q & 1)) ^ (token & 7);
      const u32 address = at + token * (HALF ? 64 : 128) + piece * 16;
      if (m + 4 <= matrices)
        store_matrices(address, pair(base + m), pair(base + m + 1), pair(base + m + 2), pair(base + m + 3));
      else
        store_matrices(address, pair(base + m), pair(base + m + 1));
    }
    fence_async_proxy_shared();  // read by TMA
    __syncwarp();
    if (lane == 0) barrier_arrive(&b.s.staged[warpgroup][slots.slot]);
    slots.advance(STAGING_SLOTS);
  }
  return ok;
}

// One lane for each consumer warpgroup: stores what is staged, and tells other blocks of finished gate_up tiles.
WEAVE_FN void store_staged(const Block& b, u32 warpgroup) {
  Smem& s = b.s;
  Cursor ring_task, slots;
  for (;;) {
    if (!b.wait(&s.task_full[ring_task.slot], ring_task.phase)) return;
    const u32 kind = s.task[ring_task.slot].kind, group = s.task[ring_task.slot].group, chunk = s.task[ring_task.slot].chunk;
    const u32 width = s.task[ring_task.slot].width, record = s.task[ring_task.slot].record;
    u32 row = s.task[ring_task.slot].row;
    barrier_arrive(&s.task_empty[ring_task.slot]);
    ring_task.advance(TASK_RING);
    if (kind == END) break;
    const bool up = kind == GATE_UP, half = GATED && up;
    const TensorMap* maps = up ? b.maps.store_h : b.maps.store_rows;
    const u32 slot_tokens = half ? SLOT_TOKENS_GATED : SLOT_TOKENS;
    const int column = half ? chunk * UP_ELEMENTS + warpgroup * 32 : chunk * TILE_M + warpgroup * 64;
    // Down rows of fp32 are stored by the consumers.
    for (u32 first = 0; first < width && (up || !ROWS_FP32); first += slot_tokens) {
      u32 left = width - first < slot_tokens ? width - first : slot_tokens;
      if (!b.wait(&s.staged[warpgroup][slots.slot], slots.phase)) return;
      u32 from = smem_address(b.staging(warpgroup, slots.slot));
#pragma unroll
      for (int m = 0; m < STORE_MAPS; ++m) {
        const u32 rows = STORE_ROWS >> m;
        while (left >= rows) {
          tma_store(&maps[m], from, column, row);
          from += rows * (half ? 64 : 128);
          row += rows;
          left -= rows;
        }
      }
      tma_store_commit();
      tma_store_wait_read();
      barrier_arrive(&s.drained[warpgroup][slots.slot]);
      slots.advance(STAGING_SLOTS);
    }
    if (up) {
      tma_store_wait();
      fence_async_proxy();  // read by TMA elsewhere
      finish_gate_up(b.p.shared, group);
    }
    if (TRACE && warpgroup == 0) mark(b, record, FINISH);
  }
  tma_store_wait();
}

}  // namespace weave
