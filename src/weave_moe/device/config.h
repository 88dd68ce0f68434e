// What is fixed when the kernel is compiled, and the layout of shared memory that follows from it.
// Passed by runtime/kernel.py as -D options; schedule/granularity.py chooses them and gives the reasons.
#pragma once
#include "ptx.h"
#include "route.h"
#include "scheduler.h"

namespace weave {

constexpr int TILE_M = WEAVE_TILE_M;            // weight rows of a tile: 64 or 128
constexpr int TILE_K = WEAVE_TILE_K;            // columns of a ring stage: 64 or 128
constexpr int MAX_RING = 16;                    // most stages of the ring
constexpr int WIDTH_CAP = WEAVE_WIDTH_CAP;      // most tokens of a group
constexpr bool BF16 = WEAVE_BF16;               // else fp16
constexpr bool ROWS_FP32 = !BF16;               // down rows before weighting: fp16 could overflow there
constexpr bool GATED = WEAVE_ACTIVATION != 3;    // W13 has gate and up rows; else one row an element, and relu^2
constexpr bool SCALE_X = WEAVE_SCALE_X;         // rows of x are multiplied by their weight instead of down rows
// Few tokens: one launch, in which each block plans for itself in shared memory and combine is tasks. Many: three or, where
// they multiply for the router, four; this kernel is the last but one (many.h has the others, router.h weave_route).
constexpr bool MANY = WEAVE_MANY;
// Rows of x of wider groups are copied into row order first; of others they are read by token.
constexpr int GATHER_WIDTH = MANY || SCALE_X ? 0 : 32;
constexpr bool WIDE = WIDTH_CAP > GATHER_WIDTH;
constexpr bool PACKED_UP = WEAVE_PACKED_UP;     // hidden % 64 == 0: a stage of w13 is one TMA box
constexpr bool PACKED_DOWN = WEAVE_PACKED_DOWN; // intermediate % 64 == 0: the same for w2 and the activations
constexpr bool BIAS = WEAVE_BIAS;
constexpr bool TRACE = WEAVE_TRACE;             // tasks leave records (trace.h)
// Whether the launch routes its tokens itself (router.h), and what it makes the logits from.
enum RouterKind { NO_ROUTER = 0, ROUTER_LOGITS = 1, ROUTER_SAME = 2, ROUTER_FP32 = 3 };  // SAME: weights in x's dtype
constexpr int ROUTER = WEAVE_ROUTER;
constexpr bool SHARED = WEAVE_SHARED;           // experts from p.routed on are slices of the shared experts
constexpr bool SPLIT_K = WEAVE_SPLIT_K;         // a stage may have several K ranges a tile
static_assert(!(MANY && SPLIT_K), "a part that does not finish its tile stages nothing");

constexpr int K_BLOCKS = TILE_K / 64;           // 128-byte swizzle rows hold 64 columns
constexpr int WARPGROUPS = TILE_M / 64;         // consumers: each takes 64 of a tile's rows
constexpr int UP_ELEMENTS = GATED ? TILE_M / 2 : TILE_M;  // of h in a gate_up tile
constexpr int CONSUMER_WARPS = WARPGROUPS * 4;
constexpr int WARPS = CONSUMER_WARPS + 4;
constexpr int THREADS = WARPS * 32;
constexpr int WEIGHT_WARP = CONSUMER_WARPS, ACTIVATION_WARP = CONSUMER_WARPS + 1;
// Few tokens: one warp tells others of finished tiles. Many: one for each consumer warpgroup, which also stores its tiles.
constexpr int PUBLISH_WARP = CONSUMER_WARPS + 2, PUBLISHERS = MANY ? WARPGROUPS : 1;
constexpr u32 W_BYTES = TILE_M * TILE_K * 2, COLUMN_BYTES = TILE_K * 2;  // of a stage; of a token in a stage
constexpr int TASK_RING = 4;

// Many tokens: results go through shared memory, a slot at a time, and from there by TMA.
constexpr u32 STAGING_SLOTS = 2, STAGING_SLOT_BYTES = 8192;  // of a warpgroup
constexpr u32 STAGING_BYTES = MANY ? WARPGROUPS * STAGING_SLOTS * STAGING_SLOT_BYTES : 0;
constexpr u32 STORE_ROWS = 64;  // most rows of a store; there are maps for 64, 32, 16 and 8
constexpr int STORE_MAPS = 4;

constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_NORMAL = 0x1000000000000000ull, EVICT_LAST = 0x14F0000000000000ull;  // TMA cache hints

constexpr u32 END = 0xff;  // a task slot that ends the block

struct TaskSlot {
  u32 kind;     // StageKind or END
  u32 width;    // tokens rounded up: columns of the tile
  u32 expert, chunk, group;
  u32 row, tokens;  // COMBINE: first token, number of tokens; chunk is the slice of the hidden size
  u32 first_step, steps;  // ring stages
  u32 part, tile;   // with K ranges: which, and of which tile of the stage
  u32 unfinished;   // set by the consumers: another K range of the tile will finish it
  u32 record;       // number of the block's task, where tasks leave records
  u32 siblings;     // groups of the task's expert
};

using PlanIndex = u16;  // of a local plan

constexpr u32 MAX_SLOTS = 32;  // of a token
// A single token every block routes for itself, and keeps what it finds behind Smem: two words a slot.
constexpr u32 OWN_BYTES = ROUTER && !MANY ? MAX_SLOTS * 16 : 0;

// Shared memory: the ring (p.ring_bytes), staging, then this, then a local plan. The ring's weights come first, then its
// activations, whose stages are as wide as the widest group of the launch: narrower groups make a deeper ring.
struct alignas(16) Smem {
  TaskSlot task[TASK_RING];
  u64 full[MAX_RING], empty[MAX_RING];
  u64 task_full[TASK_RING], task_empty[TASK_RING], task_done[TASK_RING];
  u64 staged[2][STAGING_SLOTS], drained[2][STAGING_SLOTS];  // of each warpgroup
  u64 join;  // consumers, where a tile has several K ranges
  PlanTotals totals;
  u32 aborted;  // a role of this block has given up
  u32 refused;  // this block must not take part: an earlier error, or another launch's workspace
  u32 ticket;   // for all of the block
};
static_assert(OWN_BYTES == WEAVE_OWN_BYTES, "schedule/granularity.py: OWN_BYTES");
static_assert(sizeof(Smem) == WEAVE_SMEM_BYTES, "schedule/granularity.py: CONTROL_BYTES");

// A position in a ring and its phase. Waiting for "empty" starts in phase 1: the first round needs no wait.
struct Cursor {
  u32 slot = 0, phase = 0;
  WEAVE_FN void advance(u32 slots) {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

struct Maps {
  TensorMap w13, w2;
  TensorMap shared_w13, shared_w2;  // of the shared experts; else unused
  TensorMap h[WIDTH_CAP / 8];  // [width / 8 - 1]
  TensorMap x[WIDE ? WIDTH_CAP / 8 : 1];  // of the gathered rows; else unused
  TensorMap store_h[MANY ? STORE_MAPS : 1], store_rows[MANY ? STORE_MAPS : 1];  // else unused
};

// What router.h needs to turn hidden states, or logits, into ids and weights.
struct RouterState {  // what is claimed, each in a line of its own
  u32 units, pad0[31];
  u32 tokens, pad1[31];
};
static_assert(sizeof(RouterState) == WEAVE_ROUTER_STATE_BYTES, "runtime/buffers.py: ROUTER_STATE_BYTES");
struct Router {
  const void* weight;          // [experts, hidden] or null
  const void* gate;            // [hidden], of the shared experts, in weight's dtype, or null
  const void* logits;          // [tokens, experts] or null
  const void* bias;            // [experts] or null: of the logits
  const void* selection_bias;  // [experts] or null
  const int* expert_map;       // [experts] or null
  u32* ids;                    // many tokens: [tokens, p.top_k] local experts, then the shared ones
  float* weights;              // many tokens: [tokens, p.top_k]
  u64* slots;                  // few: [tokens, p.top_k][2] the same, as tagged words
  int* chosen;                 // [tokens, top_k] or null: the router's result
  float* chosen_weights;       // [tokens, top_k] or null
  float* sums;                 // many tokens: [tokens][route_sums][rows rounded up to 4]
  u64* partial;                // few: [tokens][segments][rows rounded up to 4], tagged
  RouterState* state;
  Routing routing;
  u32 experts, rows;           // rows: of weight, and gate's
  u32 logits_kind, bias_kind, selection_kind;  // 0 fp32, 1 bf16, 2 fp16
  u32 parts;                   // many tokens: ranges of columns, each multiplied by blocks of its own
};

struct Launch {
  const void* x;             // [tokens, hidden], row pitch x_pitch elements
  const void* ids;           // [tokens, top_k] int32 or int64
  const void* weights;       // [tokens, top_k] fp32, bf16 or fp16
  const void* valid;         // number of valid tokens, int32 or int64, or null
  const int* expert_map;     // [experts_global] or null
  const void *b13, *b2;      // [experts, 2 x intermediate], [experts, hidden] or null
  const void* residual;      // [tokens, hidden], contiguous, or null; may be `out` itself
  void* out;                 // [tokens, hidden], contiguous
  u16* gathered;             // [max_rows, hidden]: x in row order, of wide groups; null where none can be
  u16* h;                    // [max_rows, intermediate]
  void* rows;                // [max_rows, hidden] bf16 or fp32
  float* sums;               // K ranges: [parts][TILE_M x WIDTH_CAP] of each tile, both stages; else null
  Plan<u32> plan;            // many tokens: in global memory; of it groups, expert_group, slot_row and totals
  u16* chunk_tokens;         // many tokens: [sort_chunks][experts rounded up to 8]
  Shared shared;
  Router router;
  Knobs knobs;
  u64* stats;                // [workers][8] or null
  void* trace;               // [workers][trace_tasks] TaskRecord, or null
  u64* trace_clock;          // [workers][4]: device timer and SM clock at a block's start, and at its end
  u32* host_error;           // pinned word of the host that learns of an error
  u64 weight_hint, hot_hint, x_hint;  // of L2; hot: weights that several groups of the launch read
  u64 ring_limit_ns;
  i64 x_pitch;
  i64 valid_offset;          // of this launch's first token, within the tokens that `valid` counts
  u32 ring_bytes;  // a multiple of 1,024
  u32 tokens, top_k, experts, experts_global, hidden, intermediate;
  u32 routed;  // experts before the shared ones
  // Not 0 where `valid` is read and two launches follow each other, of which each call needs one: the first, for few tokens, where
  // no more than these are valid; else the second.
  u32 few_tokens;
  u32 chunks_up, chunks_down, parts_up, parts_down;
  u32 up_blocks;            // of 8 elements an expert in the map of w13
  u32 bias_step, bias_up;   // gated b13: from one element to the next, and from its gate to its up
  u32 hold_down;  // down weights wait for the gate_up tiles of their group
  u32 combine_tokens, combine_slices, slice;
  u32 call;         // differs from any other call's that may be under way
  u32 max_rows;
  u32 trace_tasks;  // records of a block; later tasks leave none
  u32 sort_chunks, chunk_slots;  // many tokens: the slots, cut for sorting; a multiple of top_k
  u32 ids_wide, weights_kind, valid_wide;  // weights_kind: 0 fp32, 1 bf16, 2 fp16
  float alpha, limit, up_offset;
};

static_assert(sizeof(Launch) == WEAVE_LAUNCH_BYTES, "runtime/kernel.py: Launch");

WEAVE_FN float read_float(const void* at, u32 kind, u64 i) {
  if (kind == 0) return __ldg((const float*)at + i);
  const u16 v = __ldg((const u16*)at + i);
  return kind == 1 ? unpack<true>(v) : unpack<false>(v);
}

// A slot's local expert, or NONE: outside [0, experts), foreign by the map, or of a row past the valid ones; and its weight.
struct SlotTable {
  const Launch& p;
  u32 tokens;         // valid ones
  u32 valid;          // their slots
  bool here = true;   // false: so many tokens are valid that the call is another launch's
  // Where this launch routes few tokens itself: two tagged words a slot, its expert and its weight.
  const u64* words = nullptr;
  u32 tag = 0;
  u32* refused = nullptr;
  WEAVE_FN SlotTable(const Launch& p) : p(p), tokens(p.tokens) {
    if (p.valid) {
      const i64 v = p.valid_wide ? *(const i64*)p.valid : (i64)*(const int*)p.valid;
      // Unsigned throughout: from signed values NVRTC 13 makes max(v - offset, 0), which overflows for the least of them.
      const u64 count = v < 0 ? 0 : (u64)v, before = (u64)p.valid_offset;
      here = !p.few_tokens || (count > p.few_tokens) == MANY;
      const u64 left = count > before ? count - before : 0;
      tokens = left < tokens ? (u32)left : tokens;
    }
    valid = tokens * p.top_k;
  }
  WEAVE_FN u32 operator()(u32 slot) const {
    if (SLOTS_ARRIVE) {
      u64 e = 0, weight = 0;
      if (slot >= valid) return NONE;
      load_relaxed(words + 2 * (u64)slot, e, weight);
      if (!has_tag(e, tag) || !has_tag(weight, tag)) return NOT_YET;
      return (u32)e < p.experts ? (u32)e : NONE;
    }
    if (ROUTER && MANY) {  // written by a launch before this one, or by this block
      const u32 e = slot < valid ? p.router.ids[slot] : NONE;
      return e < p.experts ? e : NONE;
    }
    const u32* id = (const u32*)p.ids + ((u64)slot << p.ids_wide);
    const bool in = slot < valid;
    const u32 low = load_if(in, id, NONE), high = load_if(in && p.ids_wide, id + 1, 0);
    const bool known = in && high == 0 && low < (p.expert_map ? p.experts_global : p.experts);
    const u32 e = load_if(known && p.expert_map, (const u32*)p.expert_map + low, low);
    return known && e < p.experts ? e : NONE;
  }
  static WEAVE_FN float given_weight(const Launch& p, u32 slot) {
    if (ROUTER && MANY) return p.router.weights[slot];
    return read_float(p.weights, p.weights_kind, slot);
  }
  WEAVE_FN float weight(u32 slot) const {
    return SLOTS_ARRIVE ? float_of((u32)load_relaxed(words + 2 * (u64)slot + 1)) : given_weight(p, slot);
  }
  // Whether to look once more for what others write.
  WEAVE_FN bool may_look_again(u32 looks) const {
    if (may_look(p.shared, looks, PLAN_TIMEOUT)) return true;
    *(volatile u32*)refused = 1;
    return false;
  }
};

// A group's counter: rows gathered in the high half, finished gate_up tiles in the low half.
constexpr u32 ROW_GATHERED = 1u << 16;
WEAVE_FN bool gathered_first(u32 tokens) { return WIDE && tokens > GATHER_WIDTH; }  // of a group
WEAVE_FN u32 up_target(u32 tokens, u32 tiles) {
  return (!MANY && gathered_first(tokens) ? tokens * ROW_GATHERED : 0) + tiles * PUBLISHERS;
}

// Slices of the shared experts are experts without biases; what a last, short slice lacks is zeros to its tensor maps.
WEAVE_FN bool is_shared(const Launch& p, u32 expert) { return SHARED && expert >= p.routed; }

// Tickets for a team of a block, the first of whose threads is the block's.
struct TeamTickets {
  u32* counter;
  u32 next = 0;
  WEAVE_FN void ask() {  // for one more: on its way from here on
    if (threadIdx.x == 0) next = add_relaxed(counter, 1u);
  }
  template <class Team>
  WEAVE_FN u32 take(const Team& team, u32& shared) {  // the one asked for; all of the team call
    if (threadIdx.x == 0) shared = next;
    team.sync();
    const u32 now = shared;
    team.sync();
    return now;
  }
};

// What every role holds: parameters, shared memory, and the way to give up. A role that fails says so to the launch and
// to its block, and every wait of the block then returns false.
struct Block {
  const Launch& p;
  const Maps& maps;
  char* ring;
  Smem& s;
  u32 stages = 0, x_bytes = 0;  // of the ring; known when the plan is

  // Most stages whose activations have `width` columns.
  static WEAVE_FN u32 ring_stages(u32 ring_bytes, u32 width) {
    const u32 fit = ring_bytes / (W_BYTES + width * COLUMN_BYTES);
    return fit < MAX_RING ? fit : MAX_RING;
  }
  WEAVE_FN void shape_ring(u32 width) {
    width = width < 8 ? 8 : width;
    x_bytes = width * COLUMN_BYTES;
    stages = ring_stages(p.ring_bytes, width);
  }
  WEAVE_FN u32 w(u32 slot) const { return smem_address(ring) + slot * W_BYTES; }
  WEAVE_FN u32 x(u32 slot) const { return smem_address(ring) + stages * W_BYTES + slot * x_bytes; }
  WEAVE_FN char* staging(u32 warpgroup, u32 slot) const {
    return ring + p.ring_bytes + (warpgroup * STAGING_SLOTS + slot) * STAGING_SLOT_BYTES;
  }

  WEAVE_FN void abort(u32 error) const {
    fail(p.shared.control, error);
    *(volatile u32*)&s.aborted = 1;
  }
  WEAVE_FN bool wait(u64* bar, u32 phase) const {
    if (barrier_try_wait(bar, phase)) return true;
    const u64 begin = nanoseconds();
    for (;;) {
#pragma unroll 1
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
