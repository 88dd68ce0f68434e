// The two producers of a block. The weight producer claims tasks and streams their weights; it does not wait for data
// (except with hold_down), so weights run ahead of the dependencies. The activation producer waits for other tasks.
#pragma once
#include "trace.h"

namespace weave {

template <class Index>
WEAVE_FN TaskSlot describe(const Launch& p, const Plan<Index>& plan, u32 stage, u32 index) {
  TaskSlot t;
  t.kind = stage;
  t.unfinished = t.record = 0;
  if (stage == COMBINE) {
    const u32 block = index / p.combine_slices;
    t.chunk = index - block * p.combine_slices;
    t.row = block * p.combine_tokens;
    t.tokens = p.tokens - t.row < p.combine_tokens ? p.tokens - t.row : p.combine_tokens;
    t.siblings = t.width = t.expert = t.group = t.first_step = t.steps = t.part = t.tile = 0;
    return t;
  }
  const u32 chunks = stage == GATE_UP ? p.chunks_up : p.chunks_down;
  const u32 parts = SPLIT_K ? stage == GATE_UP ? p.parts_up : p.parts_down : 1;
  const Tile tile = tile_at(plan.groups, chunks, parts, index);
  const Group g = plan.groups[tile.group];
  t.group = tile.group;
  t.chunk = tile.chunk;
  t.expert = g.expert;
  t.row = g.row;
  t.tokens = g.tokens;
  t.siblings = g.siblings;
  t.width = group_width(g.tokens);
  const u32 steps = div_up(stage == GATE_UP ? p.hidden : p.intermediate, TILE_K);
  t.part = tile.part;
  t.tile = index / parts;
  t.first_step = SPLIT_K ? steps * tile.part / parts : 0;
  t.steps = (SPLIT_K ? steps * (tile.part + 1) / parts : steps) - t.first_step;
  return t;
}

// The boxes that one step of a task's weights is made of: box(bytes before it in a stage, map, coordinates...).
template <class Box>
WEAVE_FN void each_box(const Launch& p, const Maps& maps, const TaskSlot& t, u32 step, const Box& box) {
  step += t.first_step;
  const bool shared = is_shared(p, t.expert);
  const u32 slice = shared ? t.expert - p.routed : 0;  // of the shared experts, as wide as the others are
  if (t.kind == GATE_UP) {
    // Gated: blocks of 8 rows, gate and up in turn, so that a thread of the consumer holds both halves of an element.
    const TensorMap* map = shared ? &maps.shared_w13 : &maps.w13;
    const int block = (shared ? slice * (p.intermediate / 8) : t.expert * p.up_blocks) + t.chunk * (UP_ELEMENTS / 8);
    const int steps = PACKED_UP ? 1 : K_BLOCKS;
    for (int kb = 0; kb < steps; ++kb) {
      const u32 to = kb * TILE_M * 128;
      const int k = PACKED_UP ? step * K_BLOCKS : (step * K_BLOCKS + kb) * 64;
      if (GATED && PACKED_UP)
        box(to, map, 0, 0, k, 0, block);
      else if (GATED)
        box(to, map, k, 0, 0, block);
      else if (PACKED_UP)
        box(to, map, 0, 0, k, block);
      else
        box(to, map, k, 0, block);
    }
  } else {
    const TensorMap* map = shared ? &maps.shared_w2 : &maps.w2;
    const int block = ((shared ? 0 : t.expert * p.hidden) + t.chunk * TILE_M) / 8;
    const int first = slice * p.intermediate;  // column
    if (PACKED_DOWN) {
      box(0, map, 0, 0, first / 64 + step * K_BLOCKS, block);
    } else {
      for (int kb = 0; kb < K_BLOCKS; ++kb) box(kb * TILE_M * 128, map, first + (step * K_BLOCKS + kb) * 64, 0, block);
    }
  }
}

struct LoadBox {
  u32 stage;
  u64 *full, hint;
  template <class... Coordinates>
  WEAVE_FN void operator()(u32 at, const TensorMap* map, Coordinates... at_box) const {
    tma_load(stage + at, map, full, hint, at_box...);
  }
};
WEAVE_FN void load_weights(const Block& b, const TaskSlot& t, u32 stage, u64* full, u32 step) {
  each_box(b.p, b.maps, t, step, LoadBox{stage, full, t.siblings > 1 ? b.p.hot_hint : b.p.weight_hint});
}

struct PrefetchBox {
  template <class... Coordinates>
  WEAVE_FN void operator()(u32, const TensorMap* map, Coordinates... at_box) const {
    tma_prefetch(map, EVICT_NORMAL, at_box...);
  }
};
// One warp, before there is a plan: the first steps of the gate_up task with this block's number, if every expert has tokens
// and one group. With fewer or more another block claims it, soon as well.
constexpr u32 PREFETCHED_STEPS = 8;
WEAVE_FN void prefetch_weights(const Launch& p, const Maps& maps) {
  const u32 step = threadIdx.x & 31;
  TaskSlot t = {};
  t.kind = GATE_UP;
  t.expert = blockIdx.x / p.chunks_up;
  t.chunk = blockIdx.x % p.chunks_up;
  if (step < PREFETCHED_STEPS && step * TILE_K < p.hidden && t.expert < p.experts) each_box(p, maps, t, step, PrefetchBox());
}

// One warp. `ticket`: lane 0's first claim of the first stage, issued before the plan was known.
template <class Index>
WEAVE_FN void produce_weights(const Block& b, const Plan<Index>& plan, u64 ticket) {
  const WarpLanes lanes;
  const Launch& p = b.p;
  const u64 planned = p.stats ? nanoseconds() : 0;
  Cursor ring, ring_task;
  ring.phase = ring_task.phase = 1;
  ClaimCounts total = {0, 0, 0, 0, 0};
  bool ok = true, over = false;
  u64 raw = ticket;
  u32 records = 0;
  for (u32 stage = 0; stage < (MANY ? COMBINE : STAGES) && ok; ++stage) {
    Stage st;
    st.tick = &p.shared.control->tick[stage];
    st.queue = p.shared.queue + (u64)stage * p.shared.workers;
    st.workers = p.shared.workers;
    st.experts = p.experts;
    st.expert_group = plan.expert_group;
    st.tasks_per_group = stage == GATE_UP ? p.chunks_up * p.parts_up : p.chunks_down * p.parts_down;
    st.tasks = stage == COMBINE ? div_up(p.tokens, p.combine_tokens) * p.combine_slices : plan.totals->groups * st.tasks_per_group;
    Knobs knobs = p.knobs;
    if (stage == COMBINE && knobs.policy == STATIC_EXPERT) knobs.policy = STATIC_STRIDED;  // no expert to map by
    Claimer claimer;
    claimer.begin(st, knobs, blockIdx.x);
    if (stage && lanes.lane() == 0) raw = claimer.issue();
    for (;;) {
      const u32 index = claimer.next(lanes, raw);
      if (index == NONE) break;
      if (index >= st.tasks) {  // only from another launch's queues
        b.abort(OVERLAP);
        ok = false;
        break;
      }
      if (lanes.lane() == 0) {
        TaskSlot t = describe(p, plan, stage, index);
        if (TRACE) t.record = records++;
        begin_record(b, t, claimer.stolen_from);
        ok = b.wait(&b.s.task_empty[ring_task.slot], ring_task.phase);
        if (ok) {
          b.s.task[ring_task.slot] = t;
          barrier_arrive(&b.s.task_full[ring_task.slot]);
        }
        // One token: an SM without a second gate_up task would take bandwidth from those that have one, and everybody
        // waits for them. So down weights wait like their activations do, for tiles that running workers hold.
        if (p.hold_down && stage == DOWN && ok) {
          ok = wait_for(p.shared, &p.shared.up_done[t.group], up_target(t.tokens, p.chunks_up), TASK_TIMEOUT);
          if (!ok) b.abort(TASK_TIMEOUT);
        }
        // The next claim is in flight during the last loads of this task.
        const u32 claim_at = t.steps > 3 ? t.steps - 3 : 0;
        for (u32 k = 0; k < t.steps && ok; ++k) {
          if (k == claim_at) raw = claimer.issue();
          ok = b.wait(&b.s.empty[ring.slot], ring.phase);
          if (!ok) break;
          u64* full = &b.s.full[ring.slot];
          barrier_arrive_expect(full, W_BYTES);
          if (TRACE && k == 0) mark(b, t.record, LOAD);
          load_weights(b, t, b.w(ring.slot), full, k);
          ring.advance(b.stages);
        }
        // A combine task has no loads to pace its claims, and it may wait: never claim past one.
        if (stage == COMBINE && ok) {
          const u64 tick = load_relaxed(st.tick);
          ok = b.wait(&b.s.task_done[ring_task.slot], ring_task.phase ^ 1);
          over = claimer.dry(tick);  // spares the last block a claim in vain
          if (!over) raw = claimer.issue();
        }
      }
      ok = lanes.first(ok);
      ring_task.advance(TASK_RING);
      if (!ok || lanes.first(over)) break;
    }
    total.tasks += claimer.counts.tasks;
    total.tickets += claimer.counts.tickets;
    total.steals += claimer.counts.steals;
    total.sweeps += claimer.counts.sweeps;
    total.lost += claimer.counts.lost;
  }
  if (lanes.lane() != 0) return;
  if (ok && b.wait(&b.s.task_empty[ring_task.slot], ring_task.phase)) {
    b.s.task[ring_task.slot].kind = END;
    barrier_arrive(&b.s.task_full[ring_task.slot]);
  }
  if (p.stats) {
    u64* out = p.stats + blockIdx.x * 8;
    out[7] = planned;
    out[2] = total.tasks, out[3] = total.steals, out[4] = total.sweeps, out[5] = total.tickets, out[6] = total.lost;
  }
}

// Rows of x, gathered by token with 16-byte copies into the swizzled layout wgmma reads. The barrier of a stage counts
// 32 arrivals for it, one a lane, each made when that lane's copies are complete: this warp never waits for them.
// Such copies are ordinary writes, so the consumers put a proxy fence between the barrier and their wgmma.
template <class Index>
struct Gather {
  static constexpr int LANES_PER_ROW = TILE_K / 8, ROWS_PER_COPY = 32 / LANES_PER_ROW;
  static constexpr int MAX_ROWS = WIDTH_CAP < GATHER_WIDTH ? WIDTH_CAP : GATHER_WIDTH;
  static_assert(MAX_ROWS <= 32, "a row a lane");
  u32 token;  // of the row of the lane's number

  WEAVE_FN void load_tokens(const Launch& p, const Plan<Index>& plan, const TaskSlot& t, u32 lane) {
    token = lane < t.tokens ? (u32)plan.row_slot[t.row + lane] / p.top_k : 0;
  }
  WEAVE_FN void copy(const Launch& p, u32 stage, u64* full, const TaskSlot& t, u32 step, u32 lane) {
    const u32 column16 = lane % LANES_PER_ROW;
    const u32 column = (t.first_step + step) * TILE_K + column16 * 8;
    const u32 bytes = column < p.hidden ? 16 : 0;
    const u16* x = (const u16*)p.x + (bytes ? column : 0);
    const u32 block = stage + (column16 / 8) * t.width * 128;
#pragma unroll
    for (int i = 0; i < MAX_ROWS / ROWS_PER_COPY; ++i) {
      if (i * ROWS_PER_COPY >= t.tokens) break;
      const u32 r = i * ROWS_PER_COPY + lane / LANES_PER_ROW;
      const u32 tok = __shfl_sync(~0u, token, r);
      if (r < t.tokens) copy_async_16(block + r * 128 + ((column16 & 7) ^ (r & 7)) * 16, x + (i64)tok * p.x_pitch, bytes);
    }
    copy_async_arrive(full);
  }
};

// One lane: a task's activations from rows in order, those of h or of the gathered x.
WEAVE_FN bool load_rows(const Block& b, const TaskSlot& t, Cursor& ring) {
  const bool up = t.kind == GATE_UP;
  // Gathered rows, by consumers that have started; finished gate_up tiles of the group, by workers that hold them.
  if (!MANY || !up) {
    if (!wait_for(b.p.shared, &b.p.shared.up_done[t.group], up_target(t.tokens, up ? 0 : b.p.chunks_up), TASK_TIMEOUT)) {
      b.abort(TASK_TIMEOUT);
      return false;
    }
    fence_async_proxy();  // with few tokens the rows were ordinary stores
  }
  const TensorMap* map = &(up ? b.maps.x : b.maps.h)[t.width / 8 - 1];
  const bool packed = up ? PACKED_UP : PACKED_DOWN;
  for (u32 k = 0; k < t.steps; ++k) {
    if (!b.wait(&b.s.empty[ring.slot], ring.phase)) return false;
    u64* bar = &b.s.full[ring.slot];
    barrier_arrive_expect(bar, t.width * TILE_K * 2);
    barrier_arrive(bar, 31);  // for the other lanes, which arrive after a gather
    const u32 dst = b.x(ring.slot);
    if (packed) {
      tma_load(dst, map, bar, b.p.x_hint, 0, t.row, (t.first_step + k) * K_BLOCKS);
    } else {
      for (int kb = 0; kb < K_BLOCKS; ++kb)
        tma_load(dst + kb * t.width * 128, map, bar, b.p.x_hint, ((t.first_step + k) * K_BLOCKS + kb) * 64, t.row);
    }
    ring.advance(b.stages);
  }
  return true;
}

// One warp.
template <class Index>
WEAVE_FN void produce_activations(const Block& b, const Plan<Index>& plan) {
  const u32 lane = threadIdx.x & 31;
  const Launch& p = b.p;
  Smem& s = b.s;
  Cursor ring, ring_task;
  ring.phase = 1;
  Gather<Index> gather;
  for (;;) {
    if (!b.wait(&s.task_full[ring_task.slot], ring_task.phase)) return;
    const TaskSlot t = s.task[ring_task.slot];
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.task_empty[ring_task.slot]);
    ring_task.advance(TASK_RING);
    if (t.kind == END) return;
    if (t.kind == COMBINE) continue;
    if (!MANY && t.kind == GATE_UP && !gathered_first(t.tokens)) {
      gather.load_tokens(p, plan, t, lane);
      for (u32 k = 0; k < t.steps; ++k) {
        if (!b.wait(&s.empty[ring.slot], ring.phase)) return;
        __syncwarp();
        gather.copy(p, b.x(ring.slot), &s.full[ring.slot], t, k, lane);
        ring.advance(b.stages);
      }
    } else {
      bool ok = true;
      if (lane == 0) ok = load_rows(b, t, ring);
      if (!__shfl_sync(~0u, ok, 0)) return;
      ring.slot = __shfl_sync(~0u, ring.slot, 0);
      ring.phase = __shfl_sync(~0u, ring.phase, 0);
    }
  }
}

}  // namespace weave
