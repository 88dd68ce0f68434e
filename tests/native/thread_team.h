// build_plan by several threads: the cooperative path that a block of a GPU takes, on a CPU.
#pragma once
#include <pthread.h>

#include <thread>
#include <vector>

#include "plan.h"

namespace weave {

// A team of `warps` CPU threads, each a warp of one lane: real threads and a real barrier, so that the cooperative parts
// of build_plan (one histogram a warp, their prefix sums) run on a CPU too, and ThreadSanitizer sees a missing sync.
struct ThreadTeam : Serial {
  u32 warp_, warps_;
  pthread_barrier_t* barrier;
  u32 warp() const { return warp_; }
  u32 warps() const { return warps_; }
  u32 rank() const { return warp_; }
  u32 size() const { return warps_; }
  void sync() const { pthread_barrier_wait(barrier); }
  void raise(u32* to, u32 v) const {
    u32 now = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (now < v && !__atomic_compare_exchange_n(to, &now, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
  u64 team_prefix_sum(u64 v, u64* total, u64* scratch) const {
    scratch[warp_] = v;
    sync();
    u64 before = 0;
    *total = 0;
    for (u32 w = 0; w < warps_; ++w) {
      if (w == warp_) before = *total;
      *total += scratch[w];
    }
    return before;
  }
};

template <class Index, class ExpertOf>
void build_plan_with(u32 warps, const PlanShape& shape, const Plan<Index>& plan, const ExpertOf& expert_of) {
  std::vector<u32> scratch(plan_scratch(warps, shape.experts));
  if (warps == 1) {
    build_plan(Serial(), shape, plan, scratch.data(), expert_of);
    return;
  }
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, nullptr, warps);
  std::vector<std::thread> threads;
  for (u32 w = 0; w < warps; ++w)
    threads.emplace_back([&, w] {
      ThreadTeam team;
      team.warp_ = w;
      team.warps_ = warps;
      team.barrier = &barrier;
      build_plan(team, shape, plan, scratch.data(), expert_of);
    });
  for (std::thread& t : threads) t.join();
  pthread_barrier_destroy(&barrier);
}

}  // namespace weave
