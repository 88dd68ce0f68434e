// The experts of one MoE layer in one persistent launch: plan, gate_up, activation, down, combine.
// One block an SM; any number of them may be running. Roles by warp: config.h. Claims and progress: queue.h.
#include "consumer.h"
#include "producer.h"

using namespace weave;

template <class Index>
WEAVE_FN void run_block(const Block& b, const Plan<Index>& plan, const ExpertOf& expert_of, u64 ticket) {
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  if (warp < CONSUMER_WARPS) {
    consume(b, plan, expert_of);
  } else if (warp == WEIGHT_WARP) {
    fence_async_proxy();  // the plan's scratch lay where TMA will write
    produce_weights(b, plan, ticket);
  } else if (warp == ACTIVATION_WARP) {
    produce_activations(b, plan);
  } else if (warp == PUBLISH_WARP && lane == 0) {
    publish_finished(b);
  }
}

// Only after an error: loads may still be in flight into this block's shared memory, and the output is not to be used.
WEAVE_FN void give_up(const Launch& p) {
  __nanosleep(1000000);
  if (threadIdx.x == 0) {
    *(volatile u32*)p.host_error = load_relaxed(&p.shared.control->error);
    __threadfence_system();
  }
  const u64 words = (u64)p.tokens * p.hidden / 2;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < words; i += (u64)gridDim.x * THREADS) ((u32*)p.out)[i] = ~0u;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    weave_experts(const __grid_constant__ Maps maps, const __grid_constant__ Launch p) {
  extern __shared__ __align__(1024) char memory[];
  Smem& s = *(Smem*)memory;
  const Block b = {p, maps, s};
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const u64 start = p.stats ? nanoseconds() : 0;

  u32 arrival = 0;
  u64 ticket = 0;
  if (threadIdx.x == WEIGHT_WARP * 32) {
    // Neither result is needed before the plan is known. A ticket holds for whatever plan there will be.
    arrival = add_relaxed(&p.shared.control->entered, 1u);
    ticket = add_relaxed(&p.shared.control->tick[0], (u64)1);
    prefetch_map(&maps.w13);
    prefetch_map(&maps.w2);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; ++i) {
      barrier_init(&s.full[i], 2);  // the two producers
      barrier_init(&s.empty[i], CONSUMER_WARPS);
    }
    for (int i = 0; i < TASK_RING; ++i) {
      barrier_init(&s.task_full[i], 1);
      barrier_init(&s.task_empty[i], CONSUMER_WARPS + 2);  // consumers, activation producer, publisher
      barrier_init(&s.task_done[i], CONSUMER_WARPS);
    }
    s.aborted = 0;
    barrier_init_fence();
  }
  const ExpertOf expert_of(p);
  const PlanShape shape = {p.tokens * p.top_k, p.experts, (u32)WIDTH_CAP};

  if (LOCAL_PLAN) {
    // Every block computes the same plan: cheaper than handing one over, and nothing to wait for.
    char* at = memory + WEAVE_SMEM_BYTES;
    Plan<PlanIndex> plan;
    plan.groups = (Group*)at;
    at += max_groups(shape.slots, p.experts, WIDTH_CAP) * sizeof(Group);
    plan.expert_group = (u32*)at;
    at += (p.experts + 1) * 4;
    plan.slot_row = (PlanIndex*)at;
    plan.row_slot = plan.slot_row + shape.slots;
    plan.totals = &s.totals;
    u32* scratch = (u32*)s.w;
    plan.expert_row = scratch + plan_scratch(WARPS, p.experts);
    plan.expert_tokens = plan.expert_row + p.experts;
    // Few slots need few warps, and fewer histograms to add up.
    const u32 warps = shape.slots <= 32 * WARPS ? div_up(shape.slots, 32) : WARPS;
    __syncthreads();
    if (warp < warps) build_plan(BlockTeam(0, warps, 1), shape, plan, scratch, expert_of);
    __syncthreads();
    run_block(b, plan, expert_of, ticket);
  } else {
    __syncthreads();
    if (threadIdx.x == 0) s.totals.groups = claim_plan(p.shared);
    __syncthreads();
    if (s.totals.groups) {
      build_plan(BlockTeam(0, WARPS, 1), shape, p.plan, p.plan_scratch, expert_of);
      __threadfence();  // each thread's part of the plan, before one thread's release
      __syncthreads();
      if (threadIdx.x == 0) publish_plan(p.shared);
    } else if (threadIdx.x == 0 && !wait_for_plan(p.shared)) {
      b.abort(PLAN_TIMEOUT);
    }
    __syncthreads();
    run_block(b, p.plan, expert_of, ticket);
  }
  if (threadIdx.x == WEIGHT_WARP * 32 && arrival >= gridDim.x) b.abort(OVERLAP);
  __syncthreads();
  if (failed(p.shared.control)) give_up(p);
  if (p.stats && threadIdx.x == 0) {
    p.stats[blockIdx.x * 8] = start;
    p.stats[blockIdx.x * 8 + 1] = nanoseconds();
  }
  if (warp == 0) leave(p.shared, WarpLanes());
}
