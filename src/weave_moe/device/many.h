// Many tokens: the launches before and after the experts'. The first sorts the slots by expert, cuts the groups and copies
// x into row order; the last adds up each token's rows.
//
// Sorting. The slots are cut into chunks, claimed by ticket. A worker chooses the experts of its chunk's tokens where the
// launch routes (router.h), counts them, publishes the counts, and waits until all chunks are counted: those that are not are
// held by running workers, so the wait ends. From all counts each worker then knows, for its own chunks, the first row of
// each expert.
#pragma once
#include "combine.h"
#if WEAVE_ROUTER
#include "router.h"
#endif

namespace weave {

constexpr u32 SORT_WARPS = 16, SORT_THREADS = SORT_WARPS * 32;
constexpr u32 SUM_WORDS = 8 * SORT_THREADS;
constexpr u32 MAX_CHUNKS = 256;  // that one worker may come to hold: all there are

// Dynamic shared memory of the sort. The sums over stretches of chunks are [stretches][experts rounded up to 8]. Before there is
// anything behind chunks(), warps choose there (choose_tokens), with chooser_words each.
struct SortMemory {
  u32* at;
  u32 experts;
  WEAVE_FN u64* sums() const { return (u64*)at; }                  // [SORT_WARPS]
  WEAVE_FN u32* chunks() const { return at + 2 * SORT_WARPS; }     // [MAX_CHUNKS] that this worker holds
  // [SUM_WORDS] of all chunks, then of those before this one.
  WEAVE_FN u32* total() const { return chunks() + MAX_CHUNKS; }
  WEAVE_FN u32* before() const { return total() + SUM_WORDS; }
  WEAVE_FN u32* count() const { return before() + SUM_WORDS; }  // [experts], as all that follow but the last
  WEAVE_FN u32* first_row() const { return count() + experts; }    // of the chunk's first slot
  WEAVE_FN u32* expert_row() const { return count() + 2 * experts; }
  WEAVE_FN u32* expert_tokens() const { return count() + 3 * experts; }
  WEAVE_FN u32* row() const { return count() + 4 * experts; }      // [chunk_slots]
};

WEAVE_FN Range slots_of_chunk(const Launch& p, u32 chunk) {
  const u32 begin = chunk * p.chunk_slots, end = begin + p.chunk_slots, slots = p.tokens * p.top_k;
  return {begin, end < slots ? end : slots};
}

// The expert of each slot of a chunk and its place among the chunk's slots of that expert, kept in slot_row for later; and
// the chunk's counts. Places within a chunk are in no fixed order: no result depends on a slot's row.
WEAVE_FN void count_chunk(const Launch& p, const SlotTable& table, const SortMemory& m, u32 chunk) {
  const u32 experts8 = div_up(p.experts, 8) * 8;
  for (u32 e = threadIdx.x; e < p.experts; e += SORT_THREADS) m.count()[e] = 0;
  __syncthreads();
  const auto [begin, end] = slots_of_chunk(p, chunk);
  for (u32 slot = begin + threadIdx.x; slot < end; slot += SORT_THREADS) {
    const u32 e = table(slot);
    p.plan.slot_row[slot] = e == NONE ? NONE : atomicAdd(&m.count()[e], 1u) << 16 | e;
  }
  __syncthreads();
  for (u32 e = threadIdx.x; e < experts8; e += SORT_THREADS)
    p.chunk_tokens[(u64)chunk * experts8 + e] = e < p.experts ? (u16)m.count()[e] : 0;
}

// Tokens of each expert in all chunks, and in those before `chunk`. Eight experts a thread, as many stretches of chunks
// as there are threads for, so that all loads are on their way at once.
WEAVE_FN void sum_chunks(const Launch& p, const SortMemory& m, u32 chunk) {
  const u32 experts8 = div_up(p.experts, 8) * 8, eighths = experts8 / 8, stretches = SORT_THREADS / eighths;
  const u32 stretch = threadIdx.x / eighths, eighth = threadIdx.x % eighths;
  u32 total[8] = {0, 0, 0, 0, 0, 0, 0, 0}, before[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (stretch < stretches) {
#pragma unroll 4
    for (u32 c = stretch; c < p.sort_chunks; c += stretches) {
      const uint4 v = __ldcg((const uint4*)(p.chunk_tokens + (u64)c * experts8) + eighth);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u32 n = words[i / 2] >> (i % 2 * 16) & 0xffff;
        total[i] += n;
        if (c < chunk) before[i] += n;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      m.total()[stretch * experts8 + eighth * 8 + i] = total[i];
      m.before()[stretch * experts8 + eighth * 8 + i] = before[i];
    }
  }
  __syncthreads();
  for (u32 e = threadIdx.x; e < p.experts; e += SORT_THREADS) {
    u32 all = 0, first = 0;
    for (u32 s = 0; s < stretches; ++s) all += m.total()[s * experts8 + e], first += m.before()[s * experts8 + e];
    m.expert_tokens()[e] = all;
    m.first_row()[e] = first;
  }
  __syncthreads();
}

// Rows and groups of all experts; one worker writes down the plan.
WEAVE_FN void place_experts(const Launch& p, const SortMemory& m, bool write) {
  const BlockTeam team(0, SORT_WARPS, 1);
  const u32 each = div_up(p.experts, SORT_THREADS);
  const u32 from = threadIdx.x * each < p.experts ? threadIdx.x * each : p.experts;
  const u32 to = from + each < p.experts ? from + each : p.experts;
  u64 mine = 0, total;
  for (u32 e = from; e < to; ++e) mine += extent(m.expert_tokens()[e], WIDTH_CAP);
  u64 before = team.team_prefix_sum(mine, &total, m.sums());
  // Only with another launch's counts among ours.
  const bool fits = (u32)total <= p.shared.max_groups && (u32)(total >> 32) <= p.max_rows;
  if (!fits && threadIdx.x == 0) fail(p.shared.control, OVERLAP);
  write &= fits;
  u32 width = 0;
  for (u32 e = from; e < to; ++e) {
    const u32 tokens = m.expert_tokens()[e], row = (u32)(before >> 32);
    m.expert_row()[e] = row;
    m.first_row()[e] += row;
    if (write) {
      const u32 widest = write_groups(p.plan, e, tokens, row, (u32)before, WIDTH_CAP);
      width = widest > width ? widest : width;
    }
    before += extent(tokens, WIDTH_CAP);
  }
  if (write) {
    if (threadIdx.x == 0) {
      p.plan.expert_group[p.experts] = p.plan.totals->groups = (u32)total;
      p.plan.totals->rows = (u32)(total >> 32);
      p.plan.totals->width = 0;
    }
    __syncthreads();
    team.raise(&p.plan.totals->width, width);
  }
  __syncthreads();
}

// Each row of x is read once and written to the rows of all its slots.
WEAVE_FN void scatter_chunk(const Launch& p, const SortMemory& m, u32 chunk) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const auto [begin, end] = slots_of_chunk(p, chunk);
  for (u32 slot = begin + threadIdx.x; slot < end; slot += SORT_THREADS) {
    const u32 at = p.plan.slot_row[slot];  // by this thread, in count_chunk
    u32 row = at == NONE ? NONE : m.first_row()[at & 0xffff] + (at >> 16);
    if (row >= p.max_rows) row = NONE;  // only with another launch's counts among ours
    p.plan.slot_row[slot] = m.row()[slot - begin] = row;
  }
  __syncthreads();
  constexpr u32 LOADS = 8, SPAN = LOADS * 32;  // of 16 bytes
  const u32 words = p.hidden / 8, spans = div_up(words, SPAN), tokens = (end - begin) / p.top_k;
  for (u32 unit = warp; unit < tokens * spans; unit += SORT_WARPS) {
    const u32 t = unit / spans, first = (unit - t * spans) * SPAN + lane;
    const uint4* from = (const uint4*)((const u16*)p.x + (i64)(begin / p.top_k + t) * p.x_pitch);
    uint4 v[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (first + i * 32 < words) v[i] = __ldg(from + first + i * 32);
    for (u32 j = 0; j < p.top_k; ++j) {
      const u32 row = m.row()[t * p.top_k + j];
      if (row == NONE) continue;
      uint4* to = (uint4*)(p.gathered + (u64)row * p.hidden);
      const float weight = SCALE_X ? SlotTable::given_weight(p, begin + t * p.top_k + j) : 0.f;
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
        if (first + i * 32 < words) to[first + i * 32] = SCALE_X ? scaled(v[i], weight) : v[i];
    }
  }
  // Padding: zeros, shared out over the chunks by expert.
  for (u32 e = chunk; e < p.experts; e += p.sort_chunks) {
    const u32 tokens_here = m.expert_tokens()[e], padded = padded_tokens(tokens_here, WIDTH_CAP);
    if (m.expert_row()[e] + padded > p.max_rows) continue;
    uint4* to = (uint4*)(p.gathered + (u64)(m.expert_row()[e] + tokens_here) * p.hidden);
    for (u32 i = threadIdx.x; i < (padded - tokens_here) * words; i += SORT_THREADS) to[i] = make_uint4(0, 0, 0, 0);
  }
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS, 1) weave_sort(const __grid_constant__ Launch p) {
  extern __shared__ __align__(16) u32 sort_words[];
  __shared__ u32 ticket, failed_wait;
  const SortMemory m = {sort_words, p.experts};
  Control* control = p.shared.control;
  launch_dependents_may_start();
  wait_for_previous_launch();
  const SlotTable table(p);
  if (!table.here) return;
  u32 held = 0;
  const BlockTeam team(0, SORT_WARPS, 1);
  TeamTickets tickets = {&control->gather};
  tickets.ask();
  // Behind a failed launch the workspace is as that one left it.
  if (threadIdx.x == 0 && failed(control)) tickets.next = NONE;
  for (;;) {
    const u32 chunk = tickets.take(team, ticket);
    if (chunk >= p.sort_chunks) break;
    tickets.ask();  // on its way while this chunk is counted
    if (threadIdx.x == 0) {
      if (ROUTER < ROUTER_SAME && chunk == 0) store_relaxed(&control->call, p.call);  // else weave_route has
      m.chunks()[held] = chunk;
    }
    ++held;
#if WEAVE_ROUTER
    const auto [begin, end] = slots_of_chunk(p, chunk);
    const u32 last = end / p.top_k < table.tokens ? end / p.top_k : table.tokens;
    choose_tokens(p, m.total(), SORT_WARPS, begin / p.top_k, last);
#endif
    count_chunk(p, table, m, chunk);
    __threadfence();  // each thread's counts, before one thread's release
    __syncthreads();
    if (threadIdx.x == 0) add_release(&control->counted, 1u);
  }
  if (threadIdx.x == 0) failed_wait = held && !wait_for(p.shared, &control->counted, p.sort_chunks, PLAN_TIMEOUT);
  __syncthreads();
  for (u32 i = 0; i < held && !failed_wait; ++i) {
    const u32 chunk = m.chunks()[i];
    sum_chunks(p, m, chunk);
    place_experts(p, m, chunk == 0);
    scatter_chunk(p, m, chunk);
    __syncthreads();
  }
  // The last one out restores the counters.
  if (threadIdx.x == 0 && add_acq_rel(&control->sorted, 1u) == gridDim.x - 1) {
    store_relaxed(&control->gather, 0u);
    store_relaxed(&control->counted, 0u);
    store_relaxed(&control->sorted, 0u);
  }
}

// A warp for each token and piece of the hidden size.
constexpr u32 COMBINE_WARPS = 8;
extern "C" __global__ void __launch_bounds__(COMBINE_WARPS * 32) weave_combine(const __grid_constant__ Launch p) {
  launch_dependents_may_start();
  wait_for_previous_launch();
  const u32 lane = threadIdx.x & 31, pieces = div_up(p.hidden, PIECE);
  const u64 unit = (u64)blockIdx.x * COMBINE_WARPS + (threadIdx.x >> 5);
  const u32 token = (u32)(unit / pieces), f = (u32)(unit - (u64)token * pieces) * PIECE + lane * 8;
  const SlotTable table(p);
  // A launch of few tokens has done the rows that it knows of; those behind are padding.
  if (token >= p.tokens || (!table.here && p.valid_offset + token < p.few_tokens)) return;
  const u32 slot = token * p.top_k + lane;
  u32 row = table.here && lane < p.top_k ? p.plan.slot_row[slot] : NONE;
  if (row >= p.max_rows) row = NONE;  // skipped, or another launch is writing its plan over ours
  const float weight = row == NONE ? 0.f : SCALE_X ? 1.f : SlotTable::given_weight(p, slot);
  const bool ours = !table.here || load_relaxed(&p.shared.control->call) == p.call;
  if (!ours && !failed(p.shared.control) && unit == 0 && lane == 0) {
    // Another call has sorted in this workspace since. An error that is there already stays.
    fail(p.shared.control, OVERLAP);
    __threadfence_system();
    *(volatile u32*)p.host_error = OVERLAP;
  }
  if (!ours || failed(p.shared.control)) {  // or a launch before this one gave up
    if (f < p.hidden) *(uint4*)((u16*)p.out + (u64)token * p.hidden + f) = make_uint4(~0u, ~0u, ~0u, ~0u);
    return;
  }
  sum_rows(p, token, row, weight, f, p.hidden);
}

}  // namespace weave
