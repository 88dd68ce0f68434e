// One launch of the scheduler core with data in place of matrices, for drivers that run it on threads or on fibers.
//
// Every output is a plain word that holds a value only its own task can know, and every task first checks the words of
// the tasks it depends on. So a lost, doubled, early or unordered task shows as a wrong word, as a wrong count, or, under
// ThreadSanitizer, as a race. The workspace is never cleared between launches: what one launch leaves, the next finds.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "scheduler.h"

namespace launch {

using namespace weave;

struct Rng {
  u64 state;
  u32 next() {  // xorshift64*
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (u32)((state * 2685821657736338717ull) >> 32);
  }
  u32 below(u32 n) { return (u32)(((u64)next() * n) >> 32); }
};

struct Problem {
  u32 tokens, top_k, experts, width_cap, chunks_up, chunks_down, parts_up, parts_down, combine_tokens, workers;
  bool prefetch;  // claim the next task before running this one, as a kernel does; never in the combine stage
  Knobs knobs;
  std::vector<u32> expert_of;  // [tokens * top_k], NONE to skip
  u32 slots() const { return tokens * top_k; }
  u32 blocks() const { return div_up(tokens, combine_tokens); }
};

struct Limits {
  u32 slots, experts, groups, rows, tiles, parts, workers;
};

// Where a driver may make a worker pause or let another one run, besides the core's own operations.
struct Hooks {
  void* context;
  void (*between)(void* context, u32 worker);   // after a claim was issued, before it is resolved
  void (*building)(void* context, u32 worker);  // for each slot, while the plan is built
};

struct Workspace {
  Limits limits;
  Control control{};
  std::vector<u64> queue;
  std::vector<u32> up_done, down_done, part_done[2];
  std::vector<Group> groups;
  std::vector<u32> expert_group, expert_row, expert_tokens, row_slot, slot_row;
  PlanTotals totals{};
  // Data: what each task of the last launch wrote (stamped with the launch's number).
  std::vector<u32> partial[2], tile[2], out, ran[STAGES];
  u32 spin_limit, number = 0;

  Workspace(const Limits& l, u32 spin_limit) : limits(l), spin_limit(spin_limit) {
    queue.resize(STAGES * l.workers);
    up_done.resize(l.groups);
    down_done.resize(l.experts);
    groups.resize(l.groups);
    expert_group.resize(l.experts + 1);
    expert_row.resize(l.experts);
    expert_tokens.resize(l.experts);
    row_slot.resize(l.rows);
    slot_row.resize(l.slots);
    out.resize(l.slots);
    for (u32 s = 0; s < 2; ++s) {
      part_done[s].resize(l.tiles);
      tile[s].resize(l.tiles);
      partial[s].resize(l.tiles * l.parts);
    }
    for (u32 s = 0; s < STAGES; ++s) ran[s].resize(s == COMBINE ? l.slots : l.tiles * l.parts);
  }

  Shared shared(const Problem& p) {
    return Shared{&control,   queue.data(), up_done.data(), down_done.data(), {part_done[0].data(), part_done[1].data()},
                  p.workers, limits.groups, limits.experts, spin_limit};
  }
  Plan<u32> plan() {
    return Plan<u32>{groups.data(),   expert_group.data(), expert_row.data(), expert_tokens.data(),
                     row_slot.data(), slot_row.data(),     &totals};
  }
};

// The value that part `part` of a tile must write in launch `number`.
inline u32 stamp(u32 number, u32 stage, u32 tile, u32 part) {
  u32 h = number * 2654435761u ^ (stage + 1) * 40503u ^ (tile + 1) * 2246822519u ^ (part + 1) * 3266489917u;
  h ^= h >> 15;
  return h | 1;
}
inline u32 tile_stamp(u32 number, u32 stage, u32 tile, u32 parts) {
  u32 sum = 0;
  for (u32 i = 0; i < parts; ++i) sum += stamp(number, stage, tile, i);
  return sum;
}

struct Outcome {
  ClaimCounts claims[STAGES];
  const char* wrong;  // what this worker saw that must not be, or null
};

struct Worker {
  Workspace& ws;
  const Problem& p;
  const Shared shared;
  const Hooks& hooks;
  u32 me, number;
  Outcome out{};

  // Workers of one launch pass the same `number`; ws.number is not read here, because it is the driver's.
  Worker(Workspace& ws, const Problem& p, const Hooks& hooks, u32 me, u32 number)
      : ws(ws), p(p), shared(ws.shared(p)), hooks(hooks), me(me), number(number) {}

  u32 chunks(u32 stage) const { return stage == GATE_UP ? p.chunks_up : p.chunks_down; }
  u32 parts(u32 stage) const { return stage == GATE_UP ? p.parts_up : p.parts_down; }
  bool wrong(const char* what) {
    if (!out.wrong) out.wrong = what;
    return false;
  }

  void run() {
    if (!enter(shared)) {
      wrong("a worker too many entered");
      return;
    }
    go();
    leave(shared, Serial());
  }

 private:
  void go() {
    const Plan<u32> plan = ws.plan();
    if (claim_plan(shared)) {
      std::vector<u32> scratch(plan_scratch(1, p.experts));
      build_plan(Serial(), PlanShape{p.slots(), p.experts, p.width_cap}, plan, scratch.data(), [this](u32 slot) {
        hooks.building(hooks.context, me);
        return p.expert_of[slot];
      });
      publish_plan(shared);
    } else if (!wait_for_plan(shared)) {
      wrong("the plan was not published");
      return;
    }
    for (u32 stage = 0; stage < STAGES; ++stage)
      if (!run_stage(stage)) return;
  }

  bool run_stage(u32 stage) {
    const u32 per_group = stage == COMBINE ? 0 : chunks(stage) * parts(stage);
    const u32 tasks = stage == COMBINE ? p.blocks() : ws.totals.groups * per_group;
    Knobs knobs = p.knobs;
    if (stage == COMBINE && knobs.policy == STATIC_EXPERT) knobs.policy = STATIC_STRIDED;
    Claimer claimer;
    claimer.begin(Stage{&shared.control->tick[stage], &shared.queue[stage * p.workers], tasks, p.workers,
                        ws.expert_group.data(), p.experts, per_group},
                  knobs, me);
    const bool prefetch = p.prefetch && stage != COMBINE;
    bool ok = true;
    u64 raw = claimer.issue();
    for (;;) {
      hooks.between(hooks.context, me);
      const u32 task = claimer.next(Serial(), raw);
      if (task == NONE) break;
      if (task >= tasks) {
        ok = wrong("a task beyond the stage's last");
        break;
      }
      if (prefetch) raw = claimer.issue();
      ok = stage == COMBINE ? combine(task) : tile_task(stage, task);
      if (!ok) break;
      if (!prefetch) raw = claimer.issue();
    }
    out.claims[stage] = claimer.counts;
    return ok;
  }

  bool tile_task(u32 stage, u32 task) {
    const u32 C = chunks(stage), P = parts(stage);
    const Tile t = tile_at(ws.groups.data(), C, P, task);
    if (ws.ran[stage][task]++) return wrong(stage == GATE_UP ? "a gate_up task ran twice" : "a down task ran twice");
    if (stage == DOWN) {
      if (!wait_for_group(shared, t.group, p.chunks_up)) return wrong("a down task waited in vain");
      for (u32 c = 0; c < p.chunks_up; ++c) {
        const u32 tile = t.group * p.chunks_up + c;
        if (ws.tile[GATE_UP][tile] != tile_stamp(number, GATE_UP, tile, p.parts_up))
          return wrong("a down task ran before a gate_up task of its group");
      }
    }
    const u32 tile = t.group * C + t.chunk;
    u32 sum = stamp(number, stage, tile, t.part);
    if (P > 1) {
      ws.partial[stage][tile * P + t.part] = sum;
      if (!finish_part(shared, stage, tile, P)) return true;
      sum = 0;
      for (u32 i = 0; i < P; ++i) sum += ws.partial[stage][tile * P + i];
      if (sum != tile_stamp(number, stage, tile, P)) return wrong("the last K range ran before another one");
    }
    ws.tile[stage][tile] = sum;
    if (stage == GATE_UP)
      finish_gate_up(shared, t.group);
    else
      finish_down(shared, ws.groups[t.group].expert);
    return true;
  }

  bool combine(u32 block) {
    if (ws.ran[COMBINE][block]++) return wrong("a combine task ran twice");
    const u32 first = block * p.combine_tokens, end = first + p.combine_tokens;
    for (u32 slot = first * p.top_k; slot < end * p.top_k && slot < p.slots(); ++slot) {
      const u32 e = p.expert_of[slot], row = ws.slot_row[slot];
      if ((row == NONE) != (e == NONE)) return wrong("a slot's row does not fit its expert");
      if (e == NONE) continue;
      u32 group = ws.expert_group[e];
      while (row >= ws.groups[group].row + ws.groups[group].tokens) ++group;
      if (!wait_for_expert(shared, e, (ws.expert_group[e + 1] - ws.expert_group[e]) * p.chunks_down))
        return wrong("a combine task waited in vain");
      for (u32 c = 0; c < p.chunks_down; ++c) {
        const u32 tile = group * p.chunks_down + c;
        if (ws.tile[DOWN][tile] != tile_stamp(number, DOWN, tile, p.parts_down))
          return wrong("a combine task ran before a down task of its tokens");
      }
    }
    ws.out[block] = stamp(number, COMBINE, block, 0);
    return true;
  }
};

// Before a launch: counts of runs to zero, and the next number. The scheduler's own state is left alone.
inline u32 prepare(Workspace& ws) {
  for (std::vector<u32>& ran : ws.ran) std::fill(ran.begin(), ran.end(), 0);
  return ++ws.number;
}

// After a launch, with no worker left: null, or what is wrong.
inline const char* check(const Workspace& ws, const Problem& p, const Outcome* outcomes) {
  for (u32 w = 0; w < p.workers; ++w)
    if (outcomes[w].wrong) return outcomes[w].wrong;
  if (ws.control.error) return "the error flag is set";
  const u32 tasks[STAGES] = {ws.totals.groups * p.chunks_up * p.parts_up, ws.totals.groups * p.chunks_down * p.parts_down,
                             p.blocks()};
  for (u32 s = 0; s < STAGES; ++s)
    for (u32 i = 0; i < ws.ran[s].size(); ++i)
      if (ws.ran[s][i] != (i < tasks[s])) return ws.ran[s][i] ? "a task ran twice" : "a task was lost";
  for (u32 w = 0; w < STAGES * p.workers; ++w)
    if (!window_empty(ws.queue[w])) return "a queue is not empty at the end";
  const Control& c = ws.control;
  if (c.entered || c.left || c.plan || c.epoch != ws.number) return "the launch state was not reset";
  for (u64 tick : c.tick)
    if (tick) return "a dispenser was not reset";
  for (const std::vector<u32>* counters : {&ws.up_done, &ws.down_done, &ws.part_done[0], &ws.part_done[1]})
    for (u32 v : *counters)
      if (v) return "a dependency counter was not reset";
  return nullptr;
}

}  // namespace launch
