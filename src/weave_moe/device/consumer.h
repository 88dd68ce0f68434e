// Consumer warpgroups: wgmma over the ring, then the activation or the down rows, then combine tasks.
//
// Weights are the M side (64 rows a warpgroup), tokens the N side. Thread l of warp w holds, for tokens 8 j + 2 (l % 4)
// and the next one, row 16 w + l / 4 in d[4 j], d[4 j + 1] and row 8 further in d[4 j + 2], d[4 j + 3]. In gate_up the
// rows alternate by 8 between gate and up, so those are the gate and up of one element.
#pragma once
#include "combine.h"
#include "staging.h"
#include "trace.h"
#include "wgmma.h"

namespace weave {

// NaN stays NaN.
WEAVE_FN float relu_squared(float v) { return v < 0.f ? 0.f : v * v; }

WEAVE_FN float activate(const Launch& p, float gate, float up) {
#if WEAVE_CLAMP
  gate = gate > p.limit ? p.limit : gate;
  up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
#endif
#if WEAVE_ACTIVATION == 0  // silu, with alpha
  const float act = gate * reciprocal_fast(1.f + exp2_fast(-1.442695041f * p.alpha * gate));
#elif WEAVE_ACTIVATION == 1  // gelu
  const float act = 0.5f * gate * (1.f + erff(gate * 0.7071067812f));
#else  // gelu, tanh form
  const float act = 0.5f * gate * (1.f + tanh_fast(0.7978845608f * (gate + 0.044715f * gate * gate * gate)));
#endif
  return act * (up + p.up_offset);
}

template <int N>
WEAVE_FN bool multiply(const Block& b, Cursor& ring, const TaskSlot& t, float (&d)[N / 2], int warpgroup, u32 lane) {
  const bool packed = t.kind == GATE_UP ? PACKED_UP : PACKED_DOWN;
  const u32 row_block = packed ? 1024 * K_BLOCKS : 1024;
  const u32 k_block = packed ? 1024 : TILE_M * 128;
  const u32 x_block = t.width * 128 >> 4;  // the group's width, which N may exceed
  const u32 rows = warpgroup * 8 * row_block;
  bool ok = true;
#pragma unroll 1
  for (u32 k = 0; k < t.steps; ++k) {
    // A failed wait does not leave the loop: with a product in flight that would make ptxas serialise them all.
    ok &= b.wait(&b.s.full[ring.slot], ring.phase);
    if (TRACE && k == 0 && threadIdx.x == 0) mark(b, t.record, COMPUTE);
    // Rows read by token are ordinary writes. The fence names shared memory: one that covers device memory too was
    // measured to cost 6 to 19 percent of the layer.
    if (N <= GATHER_WIDTH && t.kind == GATE_UP) fence_async_proxy_shared();
    const u64 w = wgmma_descriptor(b.w(ring.slot) + rows, row_block);
    const u64 x = wgmma_descriptor(b.x(ring.slot), 1024);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < TILE_K / 16; ++kk)
      Wgmma<N, BF16>::mma(d, w + (kk / 4) * (k_block >> 4) + (kk % 4) * 2, x + (kk / 4) * x_block + (kk % 4) * 2);
    wgmma_commit();
    // Not one product later: in the meantime the stage would load nothing (docs/measured.md).
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&b.s.empty[ring.slot]);
    ring.advance(b.stages);
  }
  return ok;
}

// Not `v + 0` where there is no bias: that is an instruction, because of -0.
WEAVE_FN float plus(float v, float bias) { return BIAS ? v + bias : v; }

// Of gate and up, or of a thread's two rows; zero past the last row.
struct Biases {
  float first, second;
};
WEAVE_FN Biases gated_bias(const Launch& p, const TaskSlot& t, u32 element) {
  if (!BIAS || !p.b13 || element >= p.intermediate || is_shared(p, t.expert)) return {0, 0};
  const u16* bias = (const u16*)p.b13 + (u64)t.expert * 2 * p.intermediate + element * p.bias_step;
  return {unpack<BF16>(bias[0]), unpack<BF16>(bias[p.bias_up])};
}
WEAVE_FN Biases row_bias(const Launch& p, const void* biases, const TaskSlot& t, u32 row, u32 rows) {
  if (!BIAS || !biases || row >= rows || is_shared(p, t.expert)) return {0, 0};
  const u16* bias = (const u16*)biases + (u64)t.expert * rows + row;
  return {unpack<BF16>(bias[0]), row + 8 < rows ? unpack<BF16>(bias[8]) : 0.f};
}

// Where a warp's rows of a tile begin, counted in elements of h or of the hidden size.
WEAVE_FN u32 gated_element(const TaskSlot& t, int warpgroup, u32 warp) { return t.chunk * UP_ELEMENTS + warpgroup * 32 + warp * 8; }
WEAVE_FN u32 plain_element(const TaskSlot& t, int warpgroup, u32 warp) { return t.chunk * TILE_M + warpgroup * 64 + warp * 16; }

// The activations of one element of two tokens; d: gate and gate, up and up.
WEAVE_FN u32 activation_pair(const Launch& p, const float* d, const Biases& bias) {
  return pack2<BF16>(activate(p, plus(d[0], bias.first), plus(d[2], bias.second)), activate(p, plus(d[1], bias.first), plus(d[3], bias.second)));
}
// One element of two tokens where rows stand for themselves: of down, or of an activation without gate.
template <bool SQUARED>
WEAVE_FN u32 plain_pair(float first, float second, float bias) {
  first = plus(first, bias), second = plus(second, bias);
  return SQUARED ? pack2<BF16>(relu_squared(first), relu_squared(second)) : pack2<BF16>(first, second);
}

// Registers to rows of h: two tokens of one feature become two features of one token by a transpose within the warp.
template <int N>
WEAVE_FN void store_gated(const Block& b, const TaskSlot& t, const float (&d)[N / 2], int warpgroup, u32 warp, u32 lane) {
  const Launch& p = b.p;
  const u32 first = gated_element(t, warpgroup, warp);
  if (first >= p.intermediate) return;  // warp-uniform: the last chunk may reach past the rows
  const Biases bias = gated_bias(p, t, first + lane / 4);
  u16* out = p.h + (u64)t.row * p.intermediate + first + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const u32 pair = transpose_8x8(activation_pair(p, d + 4 * j, bias));
    const u32 token = 8 * j + lane / 4;
    if (token < t.tokens) *(u32*)(out + (u64)token * p.intermediate) = pair;
  }
}

// The same where rows stand for themselves: down rows, or h without a gate.
template <int N, bool SQUARED>
WEAVE_FN void store_plain(const TaskSlot& t, const float (&d)[N / 2], const Biases& bias, u16* rows, u32 first, u32 elements, u32 lane) {
  if (first >= elements) return;
  const bool second = first + 8 < elements;
  u16* out = rows + (u64)t.row * elements + first + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const u32 low = transpose_8x8(plain_pair<SQUARED>(d[4 * j], d[4 * j + 1], bias.first));
    const u32 high = transpose_8x8(plain_pair<SQUARED>(d[4 * j + 2], d[4 * j + 3], bias.second));
    const u32 token = 8 * j + lane / 4;
    if (token < t.tokens) {
      *(u32*)(out + (u64)token * elements) = low;
      if (second) *(u32*)(out + (u64)token * elements + 8) = high;
    }
  }
}

// Down rows that stay in fp32.
template <int N>
WEAVE_FN void store_fp32(const Block& b, const TaskSlot& t, const float (&d)[N / 2], const Biases& bias, u32 first, u32 lane) {
  const Launch& p = b.p;
  if (first >= p.hidden) return;
  const bool second = first + 8 < p.hidden;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 token = 8 * j + 2 * (lane % 4) + i;
      float* out = (float*)p.rows + (u64)(t.row + token) * p.hidden + first + lane / 4;
      if (token < t.tokens) {
        out[0] = plus(d[4 * j + i], bias.first);
        if (second) out[8] = plus(d[4 * j + 2 + i], bias.second);
      }
    }
  }
}

// A tile's results, stored by the consumers or, with many tokens, handed over to be stored.
template <int N>
WEAVE_FN bool store_tile(const Block& b, Cursor& slots, const TaskSlot& t, const float (&d)[N / 2], int warpgroup, u32 warp, u32 lane) {
  const Launch& p = b.p;
  const bool up = t.kind == GATE_UP;
  if (GATED && up) {
    if (!MANY) {
      store_gated<N>(b, t, d, warpgroup, warp, lane);
      return true;
    }
    const Biases bias = gated_bias(p, t, gated_element(t, warpgroup, warp) + lane / 4);
    return stage_tile<N, true>(b, slots, warpgroup, warp, lane, [&](int j) { return activation_pair(p, d + 4 * j, bias); });
  }
  const u32 first = plain_element(t, warpgroup, warp);
  const Biases bias = row_bias(p, up ? p.b13 : p.b2, t, first + lane / 4, up ? p.intermediate : p.hidden);
  if (!up && ROWS_FP32) {
    store_fp32<N>(b, t, d, bias, first, lane);
    return true;
  }
  if (!GATED && up) {
    if (MANY)
      return stage_tile<N, false>(b, slots, warpgroup, warp, lane,
                                  [&](int i) { return plain_pair<true>(d[2 * i], d[2 * i + 1], i & 1 ? bias.second : bias.first); });
    store_plain<N, true>(t, d, bias, p.h, first, p.intermediate, lane);
    return true;
  }
  if (MANY)
    return stage_tile<N, false>(b, slots, warpgroup, warp, lane,
                                [&](int i) { return plain_pair<false>(d[2 * i], d[2 * i + 1], i & 1 ? bias.second : bias.first); });
  store_plain<N, false>(t, d, bias, (u16*)p.rows, first, p.hidden, lane);
  return true;
}

// What a consumer warp carries from task to task.
struct ConsumerState {
  Cursor ring, task, slots;
  u32 join_phase = 0;
};
// A barrier of the consumers that, unlike the hardware's, ends when the block gives up.
WEAVE_FN bool join_consumers(const Block& b, ConsumerState& state, u32 lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(&b.s.join);
  const bool ok = b.wait(&b.s.join, state.join_phase);
  state.join_phase ^= 1;
  return ok;
}

// K ranges: every part leaves its sums in memory; the last one to finish adds them all, in the order of the ranges, so that
// the result does not depend on who is last. All consumers call.
enum Joined : u32 { NOT_LAST, LAST, GIVEN_UP };
template <int N>
WEAVE_FN Joined join_parts(const Block& b, ConsumerState& state, const TaskSlot& t, u32 lane, float (&d)[N / 2]) {
  const Launch& p = b.p;
  const u32 parts = t.kind == GATE_UP ? p.parts_up : p.parts_down;
  if (parts == 1) return LAST;
  // Tiles of gate_up first. A thread reads back only what threads of its own number wrote.
  const u64 first_down = (u64)p.shared.max_groups * p.chunks_up * p.parts_up;
  const u64 block = (t.kind == GATE_UP ? 0 : first_down) + (u64)t.tile * parts;
  float* sums = p.sums + block * (TILE_M * WIDTH_CAP) + threadIdx.x;
  constexpr u32 STRIDE = CONSUMER_WARPS * 32;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[(u64)t.part * (TILE_M * WIDTH_CAP) + i * STRIDE] = d[i];
  __threadfence();
  if (!join_consumers(b, state, lane)) return GIVEN_UP;
  volatile u32* unfinished = &b.s.task[state.task.slot].unfinished;
  if (threadIdx.x == 0) {
    *unfinished = !finish_part(p.shared, t.kind, t.tile, parts);
    __threadfence();
  }
  if (!join_consumers(b, state, lane)) return GIVEN_UP;
  if (*unfinished) return NOT_LAST;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    float sum = 0;
    for (u32 part = 0; part < parts; ++part) sum += __ldcg(&sums[(u64)part * (TILE_M * WIDTH_CAP) + i * STRIDE]);
    d[i] = sum;
  }
  return LAST;
}

template <int N>
WEAVE_FN bool run_tile(const Block& b, ConsumerState& state, const TaskSlot& t, int warpgroup, u32 warp, u32 lane) {
  float d[N / 2];
  // Undefined accumulators would be live across the task loop, those of all widths at once.
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[i] = 0.f;
  if (!multiply<N>(b, state.ring, t, d, warpgroup, lane)) return false;
  if (TRACE && threadIdx.x == 0) mark(b, t.record, STORE);
  if (SPLIT_K) {
    const Joined joined = join_parts<N>(b, state, t, lane, d);
    if (joined != LAST) return joined == NOT_LAST;  // another part will finish the tile
  }
  const bool ok = store_tile<N>(b, state.slots, t, d, warpgroup, warp, lane);
  if (!MANY && t.kind == GATE_UP) fence_async_proxy();  // h is read by TMA
  return ok;
}

template <int N>
WEAVE_FN bool run_width(const Block& b, ConsumerState& state, const TaskSlot& t, int warpgroup, u32 warp, u32 lane) {
  // Many tokens: a product may be 8 columns wider than the group. It reads what lies behind; nothing of that is stored.
  constexpr int STEP = MANY || N > 64 ? 16 : 8;
  if constexpr (N > STEP) {
    if (t.width <= N - STEP) return run_width<N - STEP>(b, state, t, warpgroup, warp, lane);
  }
  return run_tile<N>(b, state, t, warpgroup, warp, lane);
}

template <class Index>
WEAVE_FN bool combine(const Block& b, const Plan<Index>& plan, const SlotTable& table, const TaskSlot& t, u32 lane) {
  const Launch& p = b.p;
  const u32 begin = t.chunk * p.slice;
  const u32 end = begin + p.slice < p.hidden ? begin + p.slice : p.hidden;
  for (u32 i = 0; i < t.tokens; ++i) {
    const u32 token = t.row + i, slot = token * p.top_k + lane;
    u32 row = NONE, tiles = 0;
    float weight = 0;
    const u32 e = lane < p.top_k ? table(slot) : NONE;
    if (e != NONE) {
      row = plan.slot_row[slot];
      weight = SCALE_X ? 1.f : table.weight(slot);  // with the weight on x, rows are added as they are
      tiles = (plan.expert_group[e + 1] - plan.expert_group[e]) * p.chunks_down;
    }
    const bool ok = e == NONE || wait_for_expert(p.shared, e, tiles);
    if (!__all_sync(~0u, ok)) {
      b.abort(TASK_TIMEOUT);
      return false;
    }
    __syncwarp();  // a vote orders nothing: this carries each lane's acquire to the lanes that read the rows
    if (TRACE && i == 0 && threadIdx.x == 0) mark(b, t.record, COMPUTE), mark(b, t.record, STORE);
    for (u32 f = begin + threadIdx.x / 32 * PIECE; f < end; f += CONSUMER_WARPS * PIECE) sum_rows(p, token, row, weight, f + lane * 8, end);
  }
  return true;
}

template <class Index>
WEAVE_FN void consume(const Block& b, const Plan<Index>& plan, const SlotTable& table) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int warpgroup = __shfl_sync(~0u, (int)(warp >> 2), 0);
  Smem& s = b.s;
  ConsumerState state;
  if (!MANY && gathered_first(plan.totals->width)) gather_rows(b, plan, table);
  for (;;) {
    const u32 slot = state.task.slot;
    if (!b.wait(&s.task_full[slot], state.task.phase)) return;
    const TaskSlot t = s.task[slot];
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.task_empty[slot]);
    if (t.kind == END) return;
    if (TRACE && threadIdx.x == 0) mark(b, t.record, WAIT);
    const bool ok = !MANY && t.kind == COMBINE ? combine(b, plan, table, t, lane)
                                               : run_width<WIDTH_CAP>(b, state, t, warpgroup, warp & 3, lane);
    if (!ok) {
      if (lane == 0) b.abort(RING_TIMEOUT);
      return;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.task_done[slot]);
    state.task.advance(TASK_RING);
  }
}

// Before anything else, where a group is wide: its rows of x are copied into row order, a few by ticket, a warp or two a row.
// Rows are counted in the high half of their group's counter, finished tiles in the low one (up_target in config.h).
template <class Index>
WEAVE_FN void gather_rows(const Block& b, const Plan<Index>& plan, const SlotTable& table) {
  const Launch& p = b.p;
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  constexpr u32 ROWS = 4;  // of a ticket
  constexpr u32 WARPS_PER_ROW = CONSUMER_WARPS / ROWS < 1 ? 1 : CONSUMER_WARPS / ROWS;
  const u32 tickets = plan.totals->rows / ROWS;
  const BlockTeam team(0, CONSUMER_WARPS, 3);
  TeamTickets claims = {&p.shared.control->gather};
  claims.ask();
  for (;;) {
    const u32 ticket = claims.take(team, b.s.ticket);
    if (ticket >= tickets) return;
    claims.ask();  // on its way during the copy
    const u32 row = ticket * ROWS + warp / WARPS_PER_ROW;
    u32 lo = 0, hi = plan.totals->groups;  // the group that owns the row
    while (hi - lo > 1) {
      const u32 middle = (lo + hi) / 2;
      if (plan.groups[middle].row <= row)
        lo = middle;
      else
        hi = middle;
    }
    if (!gathered_first(plan.groups[lo].tokens)) continue;
    const u32 slot = plan.row_slot[row];
    if (slot == (u32)(Index)NONE) continue;  // padding
    const float weight = SCALE_X ? table.weight(slot) : 0.f;
    const uint4* from = (const uint4*)((const u16*)p.x + (i64)(slot / p.top_k) * p.x_pitch);
    uint4* to = (uint4*)(p.gathered + (u64)row * p.hidden);
    const u32 pieces = p.hidden / 8;
    for (u32 i = (warp % WARPS_PER_ROW) * 32 + lane; i < pieces; i += WARPS_PER_ROW * 32 * 8) {
      uint4 v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (i + WARPS_PER_ROW * 32 * j < pieces) v[j] = __ldg(from + i + WARPS_PER_ROW * 32 * j);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (i + WARPS_PER_ROW * 32 * j < pieces) to[i + WARPS_PER_ROW * 32 * j] = SCALE_X ? scaled(v[j], weight) : v[j];
    }
    fence_async_proxy();  // read by TMA
    __syncwarp();
    if (lane == 0) add_release(&p.shared.up_done[lo], ROW_GATHERED / WARPS_PER_ROW);
  }
}

// One lane: tells other blocks of finished tiles, so that no consumer executes a device-wide fence.
WEAVE_FN void publish_finished(const Block& b) {
  Smem& s = b.s;
  Cursor ring_task;
  for (;;) {
    if (!b.wait(&s.task_full[ring_task.slot], ring_task.phase)) return;
    const u32 kind = s.task[ring_task.slot].kind, group = s.task[ring_task.slot].group, expert = s.task[ring_task.slot].expert;
    if (kind == END) return;
    if (!b.wait(&s.task_done[ring_task.slot], ring_task.phase)) return;
    if (SPLIT_K && s.task[ring_task.slot].unfinished) {
      // nothing to tell
    } else if (kind == GATE_UP) {
      fence_async_proxy();  // the consumers' stores, seen here through task_done, are read by TMA elsewhere
      finish_gate_up(b.p.shared, group);
    } else if (kind == DOWN) {
      finish_down(b.p.shared, expert);
    }
    if (TRACE) mark(b, s.task[ring_task.slot].record, FINISH);
    barrier_arrive(&s.task_empty[ring_task.slot]);
    ring_task.advance(TASK_RING);
  }
}

}  // namespace weave
