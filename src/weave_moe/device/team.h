// Who executes a cooperative step: one CPU thread, or the threads of one block.
//
// A team has `warps()` of `lanes()` each. A step written for a team is an ordinary loop when the team is one thread,
// so the CPU runs the same text without any stand-in for a barrier or a shuffle.
#pragma once
#include "memory.h"

namespace weave {

constexpr u32 MAX_WARPS = 16;  // of a team

// One thread. Also the `lanes` of the claim code on a CPU.
struct Serial {
  WEAVE_FN u32 warp() const { return 0; }
  WEAVE_FN u32 warps() const { return 1; }
  WEAVE_FN u32 lane() const { return 0; }
  WEAVE_FN u32 lanes() const { return 1; }
  WEAVE_FN u32 rank() const { return 0; }
  WEAVE_FN u32 size() const { return 1; }
  WEAVE_FN void sync() const {}
  WEAVE_FN void sync_warp() const {}
  WEAVE_FN void increment(u32* counter) const { ++*counter; }        // one that other lanes of the warp may increment too
  WEAVE_FN void raise(u32* to, u32 v) const { if (v > *to) *to = v; } // to the largest v of the team
  WEAVE_FN u32 match(u32) const { return 1; }                        // lanes of the warp holding the same value
  WEAVE_FN u32 lanes_below() const { return 0; }                     // mask of the lanes before this one
  WEAVE_FN u64 prefix_sum(u64 v, u64* total) const {                 // exclusive, over the warp
    *total = v;
    return 0;
  }
  // The same over the whole team; `scratch` holds warps() words. All of the team call.
  WEAVE_FN u64 team_prefix_sum(u64 v, u64* total, u64*) const { return prefix_sum(v, total); }
  WEAVE_FN u64 max(u64 v) const { return v; }                        // over the warp
  WEAVE_FN u64 from(bool mine, u64 v) const { return mine ? v : 0; } // the value of a lane for which `mine` holds
  WEAVE_FN u32 first(u32 v) const { return v; }                      // lane 0's value
  WEAVE_FN u32 largest(u32 v) const { return v; }                    // over the warp
  WEAVE_FN u32 best(u32 key, u32 at) const { return key ? at : NONE; } // `at` of the largest key above 0, the lowest of equals
  WEAVE_FN float sum(float v) const { return v; }                    // over the warp
  WEAVE_FN u32 team_largest(u32 v, u32*) const { return v; }         // over the team; scratch as above
};

#if WEAVE_GPU
// A warp; a team by itself as well.
struct WarpLanes {
  u32 lane_;
  WEAVE_FN WarpLanes() : lane_(threadIdx.x & 31) {}
  WEAVE_FN u32 warp() const { return 0; }
  WEAVE_FN u32 warps() const { return 1; }
  WEAVE_FN u32 rank() const { return lane_; }
  WEAVE_FN u32 size() const { return 32; }
  WEAVE_FN void sync() const { __syncwarp(); }
  WEAVE_FN u32 team_largest(u32 v, u32*) const { return largest(v); }
  WEAVE_FN u32 lane() const { return lane_; }
  WEAVE_FN u32 lanes() const { return 32; }
  WEAVE_FN void sync_warp() const { __syncwarp(); }
  WEAVE_FN void increment(u32* counter) const { atomicAdd(counter, 1u); }
  WEAVE_FN void raise(u32* to, u32 v) const {
    v = __reduce_max_sync(~0u, v);
    if (lane_ == 0) atomicMax(to, v);
  }
  WEAVE_FN u32 match(u32 v) const { return __match_any_sync(~0u, v); }
  WEAVE_FN u32 lanes_below() const { return (1u << lane_) - 1; }
  WEAVE_FN u64 prefix_sum(u64 v, u64* total) const {
    u64 sum = v;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const u64 below = __shfl_up_sync(~0u, sum, step);
      if (lane_ >= step) sum += below;
    }
    *total = __shfl_sync(~0u, sum, 31);
    return sum - v;
  }
  WEAVE_FN u64 max(u64 v) const {
#pragma unroll
    for (int step = 16; step; step >>= 1) {
      const u64 other = __shfl_xor_sync(~0u, v, step);
      v = other > v ? other : v;
    }
    return v;
  }
  WEAVE_FN u64 from(bool mine, u64 v) const {
    const u32 who = __ballot_sync(~0u, mine);
    return who ? __shfl_sync(~0u, v, __ffs(who) - 1) : 0;
  }
  WEAVE_FN u32 first(u32 v) const { return __shfl_sync(~0u, v, 0); }
  WEAVE_FN u32 largest(u32 v) const { return __reduce_max_sync(~0u, v); }
  WEAVE_FN u32 best(u32 key, u32 at) const {
    const u32 most = __reduce_max_sync(~0u, key);
    return __reduce_min_sync(~0u, key == most ? at : NONE);
  }
  WEAVE_FN float sum(float v) const {
#pragma unroll
    for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(~0u, v, step);
    return v;
  }
};

// `warps` consecutive warps of a block, starting at warp `first_warp`; sync() is named barrier `barrier`.
struct BlockTeam : WarpLanes {
  u32 first_warp, warps_, barrier;
  WEAVE_FN BlockTeam(u32 first_warp, u32 warps, u32 barrier) : first_warp(first_warp), warps_(warps), barrier(barrier) {}
  WEAVE_FN u32 warp() const { return (threadIdx.x >> 5) - first_warp; }
  WEAVE_FN u32 warps() const { return warps_; }
  WEAVE_FN u32 rank() const { return threadIdx.x - first_warp * 32; }
  WEAVE_FN u32 size() const { return warps_ * 32; }
  WEAVE_FN u64 team_prefix_sum(u64 v, u64* total, u64* scratch) const {
    u64 of_warp;
    u64 before = prefix_sum(v, &of_warp);
    if (lane_ == 0) scratch[warp()] = of_warp;
    sync();
    u64 sum = 0;
    for (u32 w = 0; w < warps_; ++w) {
      if (w == warp()) before += sum;
      sum += scratch[w];
    }
    *total = sum;
    return before;
  }
  WEAVE_FN u32 team_largest(u32 v, u32* scratch) const {
    v = largest(v);
    if (lane_ == 0) scratch[warp()] = v;
    sync();
    return largest(lane_ < warps_ ? scratch[lane_] : 0);
  }
  WEAVE_FN void sync() const { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(warps_ * 32) : "memory"); }
};
#endif

WEAVE_FN u32 count_bits(u32 mask) {
#if WEAVE_GPU
  return __popc(mask);
#else
  return (u32)__builtin_popcount(mask);
#endif
}

}  // namespace weave
