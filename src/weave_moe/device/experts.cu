// The experts of one MoE layer in one persistent launch: gate_up, activation, down; with few tokens plan and combine too.
// One block an SM; any number of them may be running. Roles by warp: config.h. Claims and progress: queue.h.
#include "consumer.h"
#if WEAVE_MANY
#include "many.h"
#endif
#include "producer.h"
#if WEAVE_ROUTER && !WEAVE_MANY
#include "router.h"
#endif

using namespace weave;

// place(): the part of planning that only activations and combine need; it runs while the first weights are on their way.
template <class Index, class Place>
WEAVE_FN void run_block(const Block& b, const Plan<Index>& plan, const SlotTable& table, u64 ticket, const Place& place) {
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  if (warp == WEIGHT_WARP) {
    produce_weights(b, plan, ticket);
    return;
  }
  place();
  if (warp < CONSUMER_WARPS) {
    consume(b, plan, table);
  } else if (warp == ACTIVATION_WARP) {
    produce_activations(b, plan);
  } else if (warp < PUBLISH_WARP + PUBLISHERS && lane == 0) {
    MANY ? store_staged(b, warp - PUBLISH_WARP) : publish_finished(b);
  }
}

// One warp, after every block has left: whatever was written becomes NaN, and the host is told.
WEAVE_FN void report_failure(const Launch& p) {
  // With many tokens combine, which follows, does that.
  const u64 words = (u64)p.tokens * p.hidden / 2;
  if (!MANY)
    for (u64 i = threadIdx.x & 31; i < words; i += 32) ((u32*)p.out)[i] = ~0u;
  __threadfence_system();
  if ((threadIdx.x & 31) == 0) *(volatile u32*)p.host_error = load_relaxed(&p.shared.control->error);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    weave_experts(const __grid_constant__ Maps maps, const __grid_constant__ Launch p) {
  extern __shared__ __align__(1024) char memory[];
  Smem& s = *(Smem*)(memory + p.ring_bytes + STAGING_BYTES);
  Block b = {p, maps, memory, s};
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const u64 start = p.stats ? nanoseconds() : 0;

  if (threadIdx.x == WEIGHT_WARP * 32) {
    prefetch_map(&maps.w13);
    prefetch_map(&maps.w2);
    s.refused = 0;  // by the thread that may set it
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < MAX_RING; ++i) {
      barrier_init(&s.full[i], 1 + 32);  // the weight producer; the lanes of the activation producer
      barrier_init(&s.empty[i], CONSUMER_WARPS);
    }
    for (int i = 0; i < TASK_RING; ++i) {
      barrier_init(&s.task_full[i], 1);
      barrier_init(&s.task_empty[i], CONSUMER_WARPS + 1 + PUBLISHERS);  // consumers, activation producer, publishers
      barrier_init(&s.task_done[i], CONSUMER_WARPS);
    }
    for (int i = 0; i < WARPGROUPS; ++i)
      for (int j = 0; j < STAGING_SLOTS; ++j) barrier_init(&s.staged[i][j], 4), barrier_init(&s.drained[i][j], 1);
    barrier_init(&s.join, CONSUMER_WARPS);
    s.aborted = 0;
    barrier_init_fence();
  }
#if WEAVE_ROUTER && !WEAVE_MANY
  prefetch_router(p);
#endif
  // Everything above may run beside the end of the kernel before this one; nothing below.
  launch_dependents_may_start();
  wait_for_previous_launch();
  SlotTable table(p);
  if (!table.here) return;
  if (threadIdx.x == 0) trace_clock(p, 0);

  u32 arrival = 0, error = OK, call = p.call;
  u64 ticket = 0;
#if WEAVE_ROUTER && !WEAVE_MANY
  RouterTickets tickets(p);
#endif
  if (threadIdx.x == WEIGHT_WARP * 32) {
    // No result is needed before the plan is known. A ticket holds for whatever plan there will be.
    arrival = add_relaxed(&p.shared.control->entered, 1u);
    error = load_relaxed(&p.shared.control->error);
    if (MANY) call = load_relaxed(&p.shared.control->call);
    ticket = add_relaxed(&p.shared.control->tick[0], (u64)1);
  }
  // Called by the weight producer's first lane before the barrier that ends planning. Behind a failed launch the workspace
  // is as that one left it; beside another launch it is not ours.
  const auto refuse = [&] {
    if (error == OK && arrival < gridDim.x && call == p.call) return;
    fail(p.shared.control, OVERLAP);  // an earlier error stays
    s.refused = 1;
  };
  const PlanShape shape = {p.tokens * p.top_k, p.experts, (u32)WIDTH_CAP};

  if (!MANY) {
    // Every block computes the same plan: cheaper than handing one over, and nothing to wait for.
    char* at = (char*)(&s + 1);
#if WEAVE_ROUTER && !WEAVE_MANY
    const auto may_go_on = [&] {
      // Memory has little to do until tokens have experts. With two slots an expert 13 % of the experts have none, so most of
      // what is asked for will be needed (qwen3-next, T=256: 798 us against 805; deepseek-v3, T=64: 4,233 against 4,241).
      if (warp == WEIGHT_WARP && table.tokens * p.router.routing.top_k >= 2 * p.router.experts) prefetch_weights(p, maps);
      if (threadIdx.x == WEIGHT_WARP * 32) refuse();
      __syncthreads();
      return !s.refused;
    };
    if (!route(b, table, memory, (u64*)at, tickets, may_go_on)) {
      b.abort(PLAN_TIMEOUT);
      s.refused = 1;
    }
    if (s.refused) table.valid = 0;  // there are no slots to read
    at += OWN_BYTES;
#endif
    Plan<PlanIndex> plan;
    plan.groups = (Group*)at;
    at += max_groups(shape.slots, p.experts, WIDTH_CAP) * sizeof(Group);
    plan.expert_group = (u32*)at;
    at += (p.experts + 1) * 4;
    plan.slot_row = (PlanIndex*)at;
    plan.row_slot = plan.slot_row + shape.slots;
    plan.totals = &s.totals;
    // Scratch lies at the end of the ring, where no plan puts weights, and activations come only after place().
    const u32 room = (p.ring_bytes - Block::ring_stages(p.ring_bytes, 8) * W_BYTES) / 4;
    // As many warps as have room for a histogram; the weight producer is not among them.
    const u32 even = (p.experts + 1) & ~1u;  // keeps the 8-byte words of scratch aligned
    const u32 fit = (room - 2 * MAX_WARPS) / even - 2, warps = fit < CONSUMER_WARPS ? fit : CONSUMER_WARPS;
    u32* scratch = (u32*)(memory + p.ring_bytes) - plan_scratch(warps, even);
    plan.expert_tokens = scratch - even;
    plan.expert_row = plan.expert_tokens - even;
    const BlockTeam team(0, warps, 1);
    __syncthreads();
    Lookup first;
    if (warp < warps) count_tokens(team, shape, plan, scratch, table, first);
    if (threadIdx.x == WEIGHT_WARP * 32) refuse();
    __syncthreads();
    b.shape_ring(s.totals.width);
    if (!s.refused)
      run_block(b, plan, table, ticket, [&] {
        if (warp < warps) place_slots(team, shape, plan, scratch, table, first);
        asm volatile("bar.sync 2, %0;" ::"n"(THREADS - 32) : "memory");  // all but the weight producer
      });
  } else {
    // The launch before this one has made the plan and gathered x.
    if (threadIdx.x == WEIGHT_WARP * 32) refuse();
    __syncthreads();
    if (!s.refused) {
      b.shape_ring(p.plan.totals->width);
      run_block(b, p.plan, table, ticket, [] {});
    }
  }
  __syncthreads();
  if (s.aborted)
    for (int i = 0; i < 1000; ++i) __nanosleep(1000);  // loads may still be on their way into this shared memory
  if (threadIdx.x == 0) trace_clock(p, 1);
  if (p.stats && threadIdx.x == 0) {
    p.stats[blockIdx.x * 8] = start;
    p.stats[blockIdx.x * 8 + 1] = nanoseconds();
  }
  if (warp != 0) return;
  const Departure departure = leave(p.shared, WarpLanes());
#if WEAVE_ROUTER && !WEAVE_MANY
  if (departure != NOT_THE_LAST) reset_router(p);
#endif
  if (departure == THE_LAST_OF_A_FAILED_LAUNCH) report_failure(p);
}
