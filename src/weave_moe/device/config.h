// What is fixed when the kernel is compiled, and the layout of shared memory that follows from it.
// Passed by runtime/kernel.py as -D options; schedule/granularity.py chooses them and gives the reasons.
#pragma once
#include "ptx.h"
#include "scheduler.h"

namespace weave {

constexpr int TILE_M = WEAVE_TILE_M;            // weight rows of a tile: 64 or 128
constexpr int TILE_K = WEAVE_TILE_K;            // columns of a ring stage: 64 or 128
constexpr int RING = WEAVE_STAGES;              // stages of the ring
constexpr int WIDTH_CAP = WEAVE_WIDTH_CAP;      // most tokens of a group
constexpr bool BF16 = WEAVE_BF16;               // else fp16
constexpr bool ROWS_FP32 = !BF16;               // down rows before weighting: fp16 could overflow there
constexpr bool LOCAL_PLAN = WEAVE_LOCAL_PLAN;   // each block plans for itself in shared memory
constexpr bool GATHERED_FIRST = WEAVE_GATHERED_FIRST;  // x is copied into row order first; else read by token
constexpr bool PACKED_UP = WEAVE_PACKED_UP;     // hidden % 64 == 0: a stage of w13 is one TMA box
constexpr bool PACKED_DOWN = WEAVE_PACKED_DOWN; // intermediate % 64 == 0: the same for w2 and the activations
constexpr bool BIAS = WEAVE_BIAS;

constexpr int K_BLOCKS = TILE_K / 64;           // 128-byte swizzle rows hold 64 columns
constexpr int WARPGROUPS = TILE_M / 64;         // consumers: each takes 64 of a tile's rows
constexpr int CONSUMER_WARPS = WARPGROUPS * 4;
constexpr int WARPS = CONSUMER_WARPS + 4;
constexpr int THREADS = WARPS * 32;
constexpr int WEIGHT_WARP = CONSUMER_WARPS, ACTIVATION_WARP = CONSUMER_WARPS + 1, PUBLISH_WARP = CONSUMER_WARPS + 2;
constexpr int W_BYTES = TILE_M * TILE_K * 2, X_BYTES = WIDTH_CAP * TILE_K * 2;
constexpr int TASK_RING = 4;

constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_LAST = 0x14F0000000000000ull;  // TMA cache hints

constexpr u32 END = 0xff;  // a task slot that ends the block

struct TaskSlot {
  u32 kind;     // StageKind or END
  u32 width;    // tokens rounded up: columns of the tile
  u32 expert, chunk, group;
  u32 row, tokens;  // COMBINE: first token, number of tokens; chunk is the slice of the hidden size
  u32 steps;    // ring stages
};

using PlanIndex = u16;  // of a local plan

struct Smem {
  char w[RING][W_BYTES];
  char x[RING][X_BYTES];
  TaskSlot task[TASK_RING];
  u64 full[RING], empty[RING];
  u64 task_full[TASK_RING], task_empty[TASK_RING], task_done[TASK_RING];
  PlanTotals totals;
  u32 aborted;
  u32 gather;
  // a local plan's arrays follow
};

static_assert(sizeof(Smem) <= WEAVE_SMEM_BYTES && sizeof(Smem) + 16 > WEAVE_SMEM_BYTES, "schedule/granularity.py: ring_bytes");

// A position in a ring and its phase. Waiting for "empty" starts in phase 1: the first round needs no wait.
template <int SLOTS>
struct Cursor {
  u32 slot = 0, phase = 0;
  WEAVE_FN void advance() {
    if (++slot == SLOTS) slot = 0, phase ^= 1;
  }
};

struct Maps {
  TensorMap w13, w2;
  TensorMap h[WIDTH_CAP / 8];  // [width / 8 - 1]
  TensorMap x[GATHERED_FIRST ? WIDTH_CAP / 8 : 1];  // of the gathered rows; else unused
};

struct Launch {
  const void* x;             // [tokens, hidden], row pitch x_pitch elements
  const void* ids;           // [tokens, top_k] int32 or int64
  const void* weights;       // [tokens, top_k] fp32, bf16 or fp16
  const void* valid;         // number of valid tokens, int32 or int64, or null
  const int* expert_map;     // [experts_global] or null
  const void *b13, *b2;      // [experts, 2 x intermediate], [experts, hidden] or null
  void* out;                 // [tokens, hidden], contiguous
  u16* gathered;             // [max_rows, hidden]: x in row order, or null
  u16* h;                    // [max_rows, intermediate]
  void* rows;                // [max_rows, hidden] bf16 or fp32
  Plan<u32> plan;            // in global memory; unused with a local plan
  u32* plan_scratch;
  Shared shared;
  Knobs knobs;
  u64* stats;                // [workers][8] or null
  u32* host_error;           // pinned word of the host that learns of an error
  u64 weight_hint;
  u64 ring_limit_ns;
  i64 x_pitch;
  i64 valid_offset;          // of this launch's first token, within the tokens that `valid` counts
  u32 tokens, top_k, experts, experts_global, hidden, intermediate;
  u32 chunks_up, chunks_down, combine_tokens, combine_slices, slice;
  u32 ids_wide, weights_kind, valid_wide;  // weights_kind: 0 fp32, 1 bf16, 2 fp16
  float alpha, limit, up_offset;
};

static_assert(sizeof(Launch) == WEAVE_LAUNCH_BYTES, "runtime/kernel.py: Launch");

// The local expert of a slot, or NONE: outside [0, experts), foreign by the map, or of a row past the valid ones.
struct ExpertOf {
  const Launch& p;
  u32 valid_slots;
  WEAVE_FN ExpertOf(const Launch& p) : p(p) {
    u64 tokens = p.tokens;
    if (p.valid) {
      const i64 v = (p.valid_wide ? *(const i64*)p.valid : (i64)*(const int*)p.valid) - p.valid_offset;
      tokens = v < 0 ? 0 : (u64)v < tokens ? (u64)v : tokens;
    }
    valid_slots = (u32)tokens * p.top_k;
  }
  WEAVE_FN u32 operator()(u32 slot) const {
    if (slot >= valid_slots) return NONE;
    i64 id = p.ids_wide ? __ldg((const i64*)p.ids + slot) : (i64)__ldg((const int*)p.ids + slot);
    if (p.expert_map) {
      if (id < 0 || id >= p.experts_global) return NONE;
      id = __ldg(p.expert_map + id);
    }
    return id < 0 || id >= p.experts ? NONE : (u32)id;
  }
};

// A group's counter: rows gathered in the high half, finished gate_up tiles in the low half.
constexpr u32 ROW_GATHERED = 1u << 16;
WEAVE_FN u32 up_target(u32 tokens, u32 tiles) { return (GATHERED_FIRST ? tokens * ROW_GATHERED : 0) + tiles; }

// What every role holds: parameters, shared memory, and the way to give up. A role that fails says so to the launch and
// to its block, and every wait of the block then returns false.
struct Block {
  const Launch& p;
  const Maps& maps;
  Smem& s;

  WEAVE_FN void abort(u32 error) const {
    fail(p.shared.control, error);
    *(volatile u32*)&s.aborted = 1;
  }
  WEAVE_FN bool wait(u64* bar, u32 phase) const {
    if (barrier_try_wait(bar, phase)) return true;
    const u64 begin = nanoseconds();
    for (;;) {
      for (int i = 0; i < 16; ++i)
        if (barrier_try_wait(bar, phase)) return true;
      if (*(volatile u32*)&s.aborted) return false;
      if (nanoseconds() - begin > p.ring_limit_ns) {
        abort(RING_TIMEOUT);
        return false;
      }
    }
  }
};

}  // namespace weave
