// The scheduler core behind plain functions: what tests/test_plan.py compares with weave_moe.schedule.
//   g++ -std=c++17 -O2 -shared -fPIC -pthread -I <device headers> -I <host> probe.cpp
#include <vector>

#include "arithmetic.h"
#include "route.h"
#include "scheduler.h"
#include "thread_team.h"

using namespace weave;

namespace {

template <class Index>
void plan_with(u32 warps, const PlanShape& shape, const Plan<Index>& plan, const int* expert_of_slot, u32* asked) {
  build_plan_with(warps, shape, plan, [=](u32 slot) {
    __atomic_fetch_add(&asked[slot], 1u, __ATOMIC_RELAXED);
    return (u32)expert_of_slot[slot];  // -1 becomes NONE
  });
}

// Whether a claim made now would get a task; nothing is changed.
bool finds_something(Claimer c, u64 tick, std::vector<u64> queue) {
  c.stage.tick = &tick;
  c.stage.queue = queue.data();
  return c.next(Serial(), c.issue()) != NONE;
}

}  // namespace

extern "C" {

u32 probe_sizeof_group() { return sizeof(Group); }
u32 probe_window_limit() { return WINDOW_LIMIT; }
u32 probe_max_groups(u32 slots, u32 experts, u32 width_cap) { return max_groups(slots, experts, width_cap); }
u32 probe_max_rows(u32 slots, u32 experts) { return max_rows(slots, experts); }
u32 probe_group_width(u32 tokens) { return group_width(tokens); }
// The engine's cut of a reduction: out = start, end.
void probe_k_range(i64 reduction, i64 parts, i64 part, i64* out) {
  const Columns c = range_of(reduction, part, parts);
  out[0] = c.lo;
  out[1] = c.hi;
}
u64 probe_window_word(u32 tag, u32 lo, u32 hi) { return window_word(tag, lo, hi); }

// row_slot and slot_row are u16 arrays where `narrow`, else u32. `asked` [slots] counts the calls of expert_of.
void probe_plan(const int* expert_of_slot, u32 slots, u32 experts, u32 width_cap, u32 warps, u32 narrow, Group* groups,
                u32* expert_group, u32* expert_row, u32* expert_tokens, void* row_slot, void* slot_row, u32* totals,
                u32* asked) {
  const PlanShape shape{slots, experts, width_cap};
  PlanTotals t{};
  if (narrow)
    plan_with(warps, shape,
              Plan<u16>{groups, expert_group, expert_row, expert_tokens, (u16*)row_slot, (u16*)slot_row, &t}, expert_of_slot,
              asked);
  else
    plan_with(warps, shape,
              Plan<u32>{groups, expert_group, expert_row, expert_tokens, (u32*)row_slot, (u32*)slot_row, &t}, expert_of_slot,
              asked);
  totals[0] = t.groups;
  totals[1] = t.rows;
}

// Tokens' experts and weights from logits [tokens, experts]; bias [experts] or null.
void probe_route(const float* logits, const float* bias, u32 tokens, u32 experts, const u32* numbers, float scale, int* ids,
                 float* weights) {
  const Routing r{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], scale};
  std::vector<u32> words(choice_words(experts));
  const Choice c = choice_at(words.data(), experts);
  for (u32 t = 0; t < tokens; ++t) {
    for (u32 e = 0; e < experts; ++e) c.score[e] = logits[t * experts + e];
    choose_experts<1024, 1024>(Serial(), r, experts, c, bias != nullptr, [=](u32 e) { return bias[e]; });
    weigh_choice(Serial(), r, c);
    for (u32 j = 0; j < r.top_k; ++j) ids[t * r.top_k + j] = (int)c.chosen[j], weights[t * r.top_k + j] = chosen_weight(r, c, j);
  }
}

void probe_tiles(const Group* groups, u32 chunks, u32 parts, u32 tasks, Tile* out) {
  for (u32 i = 0; i < tasks; ++i) out[i] = tile_at(groups, chunks, parts, i);
}

// out: fours, twos; task_of [tasks].
void probe_batches(u32 tasks, u32 workers, u32 most, u32* out, u32* task_of) {
  const Batches b = make_batches(tasks, workers, most);
  out[0] = b.fours;
  out[1] = b.twos;
  for (u32 i = 0; i < tasks; ++i) task_of[i] = batch_task(b, i);
}
void probe_windows(u32 tasks, u32 workers, u32 most, u32 tickets, Span* out) {
  const Batches b = make_batches(tasks, workers, most);
  for (u32 i = 0; i < tickets; ++i) out[i] = batch_window(b, tasks, i);
}

// What the taker of `ticket` runs, alone: fills out [tasks], returns their number; *exhausted: no ticket follows.
u32 probe_ticket(u32 policy, u32 share, u32 batch, u32 tasks, u32 workers, u32 experts, const u32* expert_group, u32 tasks_per_group,
                 u32 ticket, u32* out, u32* exhausted) {
  u64 tick = ticket;
  std::vector<u64> queue(workers);
  Claimer c;
  c.begin(Stage{&tick, queue.data(), tasks, workers, expert_group, experts, tasks_per_group},
          Knobs{policy, LARGEST, 0, 1, share, batch}, ticket % workers);
  u32 count = 0;
  for (bool first = true;; first = false) {
    const u32 task = c.resolve(c.issue());
    if (first) *exhausted = c.exhausted;
    if (c.counts.tickets != 1 || task == Claimer::DRY) return count;
    if (task != Claimer::RETRY) out[count++] = task;
  }
}

// One thread plays all workers: at each step the next number of `order` picks a worker, which issues a claim or
// resolves the one it has. `ran` [tasks] counts. Returns 0, or 1 + the worker whose queue is not empty at the end, ~0
// where the count of non-empty queues is wrong then, ~1 for a task that does not exist, ~2 where a claim that was said to
// be in vain was not.
u32 probe_interleave(const Knobs* knobs, u32 tasks, u32 workers, u32 experts, const u32* expert_group, u32 tasks_per_group,
                     const u32* order, u32 orders, u32* ran, u32* steals) {
  u64 tick = 0;
  std::vector<u64> queue(workers), raw(workers);
  std::vector<Claimer> claimers(workers);
  std::vector<char> state(workers, 0);  // 0 idle, 1 issued, 2 gone
  const Serial lanes;
  for (u32 w = 0; w < workers; ++w)
    claimers[w].begin(Stage{&tick, queue.data(), tasks, workers, expert_group, experts, tasks_per_group}, *knobs, w);
  u32 here = workers;
  for (u32 i = 0; here; ++i) {
    const u32 w = (i < orders ? order[i] : i) % workers;
    if (state[w] == 0) {
      if (claimers[w].dry(tick) && finds_something(claimers[w], tick, queue)) return ~2u;
      raw[w] = claimers[w].issue();
      state[w] = 1;
    } else if (state[w] == 1) {
      const u32 task = claimers[w].next(lanes, raw[w]);
      state[w] = task == NONE ? 2 : 0;
      if (task == NONE)
        --here;
      else if (task < tasks)
        ran[task]++;
      else
        return ~1u;
    }
  }
  *steals = 0;
  for (u32 w = 0; w < workers; ++w) {
    if (!window_empty(queue[w])) return 1 + w;
    *steals += claimers[w].counts.steals;
  }
  return tick >> 32 ? ~0u : 0;
}
}
